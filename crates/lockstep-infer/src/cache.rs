//! The key-value cache: pages of 64 tokens, which sequences take from a common pool and give back when they end.
//!
//! Under context parallelism the cache is sharded: a page of the pool is then a page on each rank, with consecutive tokens, so that
//! the pools of all ranks give out the same numbers.

use lockstep_plan::{CachePlace, DType, KvCacheType, MemoryCategory};
use lockstep_tensor::{Buffer, PagedCache, Queue, TensorError, View};

use crate::{InferError, LoadedModel};

/// The pages of this rank's layers. Page `n` holds the same tokens of a sequence in every layer, on every rank.
pub(crate) struct PagePool {
    /// Keys and values of this rank's heads in each of its layers, `[pages, bytes of a page]`; no buffer of values if the keys are the
    /// values as well.
    layers: Vec<[Option<Buffer>; 2]>,
    /// Index of the first of these layers in the model.
    first_layer: usize,
    stored: KvCacheType,
    page_bytes: [usize; 2],
    pages: usize,
    /// This rank's place among those that the cache is sharded over.
    place: CachePlace,
    /// Tokens of a page on all of these ranks.
    page_tokens: usize,
    /// Page of the rows that fill a batch up to a multiple of the ranks; `None` on one rank.
    padding: Option<u32>,
    /// Pages that no sequence has; the one freed last is taken first, because it may still be in a CPU cache.
    free: Vec<u32>,
    /// Number of sequences that have each page.
    owners: Vec<u32>,
}

impl PagePool {
    /// Creates a pool for `tokens` tokens of one sequence.
    pub(crate) fn new(model: &LoadedModel, tokens: usize) -> Result<Self, TensorError> {
        let (stored, place) = (model.kv_cache, model.cache_place());
        let of_sequences = tokens.div_ceil(model.page_tokens());
        let padding = (place.ranks > 1).then_some(of_sequences as u32);
        let pages = of_sequences + usize::from(padding.is_some());
        let page_bytes = model.queue.page_bytes(model.dtype, stored, model.cache_shape());
        let buffer = |bytes: usize| {
            let buffer = || model.arena.allocate(pages * bytes, MemoryCategory::Activations);
            (bytes > 0).then(buffer).transpose()
        };
        let layers = model
            .layers()
            .map(|_| Ok([buffer(page_bytes[0])?, buffer(page_bytes[1])?]))
            .collect::<Result<_, TensorError>>()?;
        Ok(Self {
            layers,
            first_layer: model.layers().start,
            stored,
            page_bytes,
            pages,
            place,
            page_tokens: model.page_tokens(),
            padding,
            free: (0..of_sequences as u32).rev().collect(),
            owners: vec![0; of_sequences],
        })
    }

    /// Returns the page of rows that belong to no sequence.
    pub(crate) fn padding(&self) -> &[u32] {
        self.padding.as_slice()
    }

    /// Adds pages to a sequence until they hold `tokens` tokens.
    ///
    /// # Errors
    /// If too few pages are free. The sequence keeps those that it has got.
    pub(crate) fn extend(&mut self, sequence: &mut Vec<u32>, tokens: usize) -> Result<(), InferError> {
        while sequence.len() < tokens.div_ceil(self.page_tokens) {
            let page = self.take()?;
            sequence.push(page);
        }
        Ok(())
    }

    fn take(&mut self) -> Result<u32, InferError> {
        let page =
            self.free.pop().ok_or(InferError::CacheFull { tokens: self.owners.len() * self.page_tokens })?;
        self.owners[page as usize] = 1;
        Ok(page)
    }

    /// Takes all pages of a sequence back, but for those that another sequence has as well.
    pub(crate) fn release(&mut self, sequence: &mut Vec<u32>) {
        for page in sequence.drain(..).rev() {
            let owners = &mut self.owners[page as usize];
            *owners -= 1;
            if *owners == 0 {
                self.free.push(page);
            }
        }
    }

    /// Returns pages of a second sequence with the first `tokens` tokens of `sequence`: full pages are shared, a last one that is not
    /// full is copied.
    ///
    /// # Errors
    /// If no page is free for the copy.
    pub(crate) fn fork(
        &mut self,
        queue: &dyn Queue,
        sequence: &[u32],
        tokens: usize,
    ) -> Result<Vec<u32>, InferError> {
        let (full, rest) = sequence.split_at(tokens / self.page_tokens);
        let copy = if tokens.is_multiple_of(self.page_tokens) { None } else { Some((rest[0], self.take()?)) };
        for &page in full {
            self.owners[page as usize] += 1;
        }
        let mut pages = full.to_vec();
        if let Some((source, target)) = copy {
            for buffers in &self.layers {
                for (buffer, bytes) in buffers.iter().flatten().zip(self.page_bytes) {
                    let view = buffer.view(DType::U8, 0, [self.pages, bytes]);
                    let page = |page: u32| view.rows(page as usize..page as usize + 1);
                    queue.cast(page(source), page(target));
                }
            }
            pages.push(target);
        }
        Ok(pages)
    }

    /// Returns the cache of a layer of the model for a batch.
    ///
    /// # Panics
    /// If another rank runs the layer.
    pub(crate) fn layer<'a>(&'a self, layer: usize, batch: &BatchTables<'a>) -> PagedCache<'a> {
        let [keys, values] = [0, 1].map(|operand| {
            let buffer = self.layers[layer - self.first_layer][operand].as_ref()?;
            Some(buffer.view(DType::U8, 0, [self.pages, self.page_bytes[operand]]))
        });
        let keys = keys.expect("a page of every cache has keys");
        let BatchTables { row_starts, cached, pages } = *batch;
        PagedCache { stored: self.stored, keys, values, row_starts, cached, pages, place: self.place }
    }
}

/// The tables of a batch that attention reads, on the device.
#[derive(Clone, Copy)]
pub(crate) struct BatchTables<'a> {
    pub(crate) row_starts: View<'a>,
    pub(crate) cached: View<'a>,
    pub(crate) pages: View<'a>,
}
