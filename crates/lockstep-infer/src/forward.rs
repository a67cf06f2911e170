//! The forward of a batch of tokens: programs by number of rows, and the memory in which they run.
//!
//! Under context parallelism the rows of a batch are sharded as well as the key-value cache: each rank computes equally many
//! consecutive ones.

use std::{collections::BTreeMap, ops::Range};

use lockstep_engine::UnitParameters;
use lockstep_graph::{Batch as Inputs, Replay};
use lockstep_model::RecordedModel;
use lockstep_plan::{CachePlace, DType, MemoryCategory};
use lockstep_tensor::{Buffer, Matrix, PagedCache, Tensor, TensorError, View};

use crate::{
    InferError, LoadedModel,
    cache::{BatchTables, PagePool},
    run_memory::frame_and_workspace_bytes,
};

/// Recordings that are kept. A decoding batch has few sizes; those of the chunks of prompts vary.
const KEPT_RECORDINGS: usize = 48;

/// Least rows of a micro-batch, so that products are worth more than the reading of weights.
const LEAST_MICRO_BATCH_ROWS: usize = 64;

/// Programs and memory of forwards. Memory grows with the largest batch so far, and recordings are kept by size.
pub(crate) struct Forward<'m> {
    model: &'m LoadedModel,
    /// Weights that stay in the model's files.
    in_place: Vec<Option<Matrix<'m>>>,
    /// Programs by number of rows on this rank.
    recorded: BTreeMap<usize, RecordedModel>,
    constants: Vec<Tensor>,
    /// This rank's place among those that the cache is sharded over.
    place: CachePlace,
    memory: Memory,
}

/// Memory of a forward.
struct Memory {
    /// Frames of units with even and with odd numbers: a unit reads the output of the one before.
    frames: [Buffer; 2],
    workspace: Buffer,
    ids: Tensor,
    positions: Tensor,
    /// Outputs of the rows of all context-parallel ranks, `[rows, width]`; empty if there is one.
    all_rows: Tensor,
    /// Last rows of the sequences, `[sequences, width]`.
    last_rows: Tensor,
    /// Logits in f32, `[sequences, vocabulary]`.
    logits: Tensor,
    row_starts: Tensor,
    cached: Tensor,
    pages: Tensor,
}

/// The least sizes of a forward's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sizes {
    frame_bytes: usize,
    workspace_bytes: usize,
    rows: usize,
    /// Rows of all ranks whose outputs are gathered.
    gathered_rows: usize,
    /// Sequences whose logits are wanted.
    logits: usize,
    sequences: usize,
    pages: usize,
}

/// A sequence's part of a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    /// New tokens.
    pub(crate) ids: &'a [u32],
    /// Tokens that are cached already.
    pub(crate) cached: usize,
    /// Pages with room for both.
    pub(crate) pages: &'a [u32],
    /// True if the logits after the last token are wanted.
    pub(crate) wants_logits: bool,
    /// True if the sequence may get longer than the model's short context.
    pub(crate) is_long: bool,
}

impl<'m> Forward<'m> {
    /// Records the programs for one token.
    ///
    /// # Errors
    /// If memory runs out.
    pub(crate) fn new(model: &'m LoadedModel) -> Result<Self, InferError> {
        let place = model.cache_place();
        let one = model.record_generation(place.ranks);
        let constants = one.constants().iter().map(|constant| constant.allocate(&model.arena));
        let constants = constants.collect::<Result<_, TensorError>>()?;
        let memory = Memory::new(model, Sizes::default())?;
        let recorded = BTreeMap::from([(1, one)]);
        Ok(Self { model, in_place: model.weights.in_place(), recorded, constants, place, memory })
    }

    /// Reads the new tokens of sequences, and writes the logits of those that want them to `logits`, one after the other, on all
    /// ranks. In a pipeline, each rank passes the rows on to the next, a micro-batch at a time, and the last one sends the logits to
    /// all.
    ///
    /// # Errors
    /// If memory runs out, or a collective fails.
    pub(crate) fn run(
        &mut self,
        parts: &[Part<'_>],
        pool: &PagePool,
        logits: &mut Vec<f32>,
    ) -> Result<(), InferError> {
        let pipeline = self.model.ranks().groups().pipeline_peers();
        // Each micro-batch would read weights from disk again.
        let stages = pipeline.filter(|_| !self.model.reads_disk).map_or(1, |pipeline| pipeline.group.size());
        let mut micro_batches = micro_batches(parts, stages);
        let padding = vec![0; self.place.ranks - 1];
        for parts in &mut micro_batches {
            let missing = rows_of(parts).next_multiple_of(self.place.ranks) - rows_of(parts);
            if missing > 0 {
                parts.push(Part::padding(&padding[..missing], pool.padding()));
            }
        }
        self.prepare(&micro_batches)?;
        let mut wanted = 0;
        for micro_batch in &micro_batches {
            wanted += self.pass(micro_batch, pool, wanted)?;
        }
        let vocabulary = self.model.config.vocab_size();
        logits.resize(wanted * vocabulary, 0.0);
        if wanted > 0 {
            let computed = self.memory.logits.view().rows(0..wanted);
            if let Some(pipeline) = pipeline {
                pipeline.broadcast(computed, pipeline.group.size() - 1)?;
            }
            computed.read(logits).wait();
        }
        Ok(())
    }

    /// Runs this rank's units on a micro-batch. The last stage writes its logits from row `first` on. Returns their number.
    fn pass(&self, parts: &[Part<'_>], pool: &PagePool, first: usize) -> Result<usize, InferError> {
        let Self { model, in_place, recorded, constants, place, memory } = self;
        let all_rows = rows_of(parts);
        let tables = memory.write(parts, all_rows);
        let rows = own_rows(*place, all_rows);
        let programs = &recorded[&rows.len()];
        let (units, head) = (model.stage(), programs.units() - 1);
        let pipeline = model.ranks().groups().pipeline_peers();
        let long_rows = within(long_rows(parts), &rows);
        let replay = Unit { model, constants, memory, in_place, long_rows: &long_rows };
        let output = |unit: usize| programs.program(unit).output(memory.frame(unit));
        // The output of the stage before is where it would be if this rank had computed it.
        let input = |unit: usize| unit.checked_sub(1).map(output);
        if let (Some(pipeline), Some(before)) = (pipeline, units.start.checked_sub(1)) {
            pipeline.receive(output(before), pipeline.group.rank() - 1)?;
        }
        for unit in units.start..units.end.min(head) {
            let cache = unit.checked_sub(1).map(|layer| pool.layer(layer, &tables));
            replay.run(programs, unit, rows.clone(), input(unit), cache)?;
        }
        if let Some(pipeline) = pipeline.filter(|_| units.end <= head) {
            pipeline.send(output(units.end - 1), pipeline.group.rank() + 1)?;
        }
        let wanted = wanted_of(parts);
        if wanted > 0 && units.end > head {
            let vocabulary = model.config.vocab_size();
            let outputs = memory.gather_outputs(model, output(head - 1), all_rows)?;
            let last = memory.gather_last_rows(model, outputs, parts);
            let programs = &recorded[&wanted];
            replay.run(programs, head, 0..wanted, Some(last), None)?;
            let computed = programs.program(head).output(memory.frame(head));
            let widened = memory.logits.view().rows(first..first + wanted);
            model.queue.cast(computed.reshape([wanted, vocabulary]), widened);
        }
        Ok(wanted)
    }

    /// Records the programs of micro-batches and of their heads, and makes the memory large enough for each.
    fn prepare(&mut self, micro_batches: &[Vec<Part<'_>>]) -> Result<(), InferError> {
        let mut sizes =
            Sizes { logits: micro_batches.iter().map(|parts| wanted_of(parts)).sum(), ..Sizes::default() };
        let ranks = self.place.ranks;
        let rows: Vec<[usize; 2]> =
            micro_batches.iter().map(|parts| [rows_of(parts) / ranks, wanted_of(parts).max(1)]).collect();
        let is_new = rows.as_flattened().iter().any(|rows| !self.recorded.contains_key(rows));
        if is_new && self.recorded.len() + 2 * rows.len() > KEPT_RECORDINGS {
            self.recorded.clear();
        }
        for (parts, of_parts) in micro_batches.iter().zip(rows) {
            for rows in of_parts {
                let record = || self.model.record_generation(rows * ranks);
                self.recorded.entry(rows).or_insert_with(record);
            }
            let [blocks, head] = of_parts.map(|rows| &self.recorded[&rows]);
            let [frame_bytes, workspace_bytes] = frame_and_workspace_bytes(blocks, head, self.model.stage());
            let pages = parts.iter().map(|part| part.pages.len()).max().unwrap_or(0);
            sizes = sizes.max(Sizes {
                frame_bytes,
                workspace_bytes,
                rows: of_parts[0] * ranks,
                gathered_rows: if ranks > 1 { of_parts[0] * ranks } else { 0 },
                logits: 0,
                sequences: parts.len(),
                pages: parts.len() * pages,
            });
        }
        self.memory.grow(self.model, sizes)?;
        Ok(())
    }
}

impl<'a> Part<'a> {
    /// Returns padding rows, on the pool's padding page.
    fn padding(ids: &'a [u32], pages: &'a [u32]) -> Self {
        Self { ids, cached: 0, pages, wants_logits: false, is_long: false }
    }
}

/// Returns the rows of a batch that this rank computes.
fn own_rows(place: CachePlace, rows: usize) -> Range<usize> {
    let of_each = rows / place.ranks;
    place.rank * of_each..(place.rank + 1) * of_each
}

/// Returns the parts of `ranges` within `rows`, counted from the first of these.
fn within(ranges: Vec<Range<usize>>, rows: &Range<usize>) -> Vec<Range<usize>> {
    let part = |range: Range<usize>| {
        let (start, end) = (range.start.max(rows.start), range.end.min(rows.end));
        (start < end).then(|| start - rows.start..end - rows.start)
    };
    ranges.into_iter().filter_map(part).collect()
}

/// Returns the rows of long sequences; neighbours in one range.
fn long_rows(parts: &[Part<'_>]) -> Vec<Range<usize>> {
    let (mut found, mut end) = (Vec::<Range<usize>>::new(), 0);
    for part in parts {
        let rows = end..end + part.ids.len();
        end = rows.end;
        match found.last_mut() {
            _ if !part.is_long => {}
            Some(last) if last.end == rows.start => last.end = rows.end,
            _ => found.push(rows),
        }
    }
    found
}

/// Returns the number of new tokens.
fn rows_of(parts: &[Part<'_>]) -> usize {
    parts.iter().map(|part| part.ids.len()).sum()
}

/// Returns the number of sequences whose logits are wanted.
fn wanted_of(parts: &[Part<'_>]) -> usize {
    parts.iter().filter(|part| part.wants_logits).count()
}

/// Splits a batch into micro-batches for a pipeline of `stages` stages, which then compute at the same time. A batch of few rows is
/// one: reading the weights takes most of its time, and each micro-batch reads them again.
fn micro_batches<'a>(parts: &[Part<'a>], stages: usize) -> Vec<Vec<Part<'a>>> {
    let rows = rows_of(parts);
    let most = if stages > 1 { 2 * stages } else { 1 };
    let rows_of_each = rows.div_ceil((rows / LEAST_MICRO_BATCH_ROWS).clamp(1, most));
    let (mut micro_batches, mut room) = (vec![Vec::new()], rows_of_each);
    for part in parts {
        let mut part = *part;
        while part.ids.len() > room {
            let (ids, rest) = part.ids.split_at(room);
            if room > 0 {
                micro_batches.last_mut().expect("at least one").push(Part {
                    ids,
                    wants_logits: false,
                    ..part
                });
            }
            part = Part { ids: rest, cached: part.cached + ids.len(), ..part };
            micro_batches.push(Vec::new());
            room = rows_of_each;
        }
        room -= part.ids.len();
        micro_batches.last_mut().expect("at least one").push(part);
    }
    micro_batches
}

impl Sizes {
    /// Returns the larger one of each size.
    fn max(self, other: Self) -> Self {
        Self {
            frame_bytes: self.frame_bytes.max(other.frame_bytes),
            workspace_bytes: self.workspace_bytes.max(other.workspace_bytes),
            rows: self.rows.max(other.rows),
            gathered_rows: self.gathered_rows.max(other.gathered_rows),
            logits: self.logits.max(other.logits),
            sequences: self.sequences.max(other.sequences),
            pages: self.pages.max(other.pages),
        }
    }
}

impl Memory {
    fn new(model: &LoadedModel, sizes: Sizes) -> Result<Self, TensorError> {
        let arena = &model.arena;
        let frame = || arena.allocate(sizes.frame_bytes, MemoryCategory::Activations);
        let words = |len: usize| Tensor::zeros(arena, DType::U32, [len], MemoryCategory::Activations);
        let matrix = |dtype, rows: usize, columns: usize| {
            Tensor::zeros(arena, dtype, [rows, columns], MemoryCategory::Activations)
        };
        let width = model.config.hidden_size();
        Ok(Self {
            frames: [frame()?, frame()?],
            workspace: arena.allocate(sizes.workspace_bytes, MemoryCategory::Workspace)?,
            ids: words(sizes.rows)?,
            positions: words(sizes.rows)?,
            all_rows: matrix(model.dtype, sizes.gathered_rows, width)?,
            last_rows: matrix(model.dtype, sizes.logits, width)?,
            logits: matrix(DType::F32, sizes.logits, model.config.vocab_size())?,
            row_starts: words(sizes.sequences + 1)?,
            cached: words(sizes.sequences)?,
            pages: words(sizes.pages)?,
        })
    }

    /// Returns the sizes that this memory has.
    fn sizes(&self) -> Sizes {
        let elements = |tensor: &Tensor| tensor.view().elements();
        let rows = |tensor: &Tensor| tensor.view().shape().dims()[0];
        Sizes {
            frame_bytes: self.frames[0].len_bytes(),
            workspace_bytes: self.workspace.len_bytes(),
            rows: elements(&self.ids),
            gathered_rows: rows(&self.all_rows),
            logits: rows(&self.logits),
            sequences: elements(&self.cached),
            pages: elements(&self.pages),
        }
    }

    /// Makes every part at least as large as `sizes`. Contents are lost if anything grows.
    fn grow(&mut self, model: &LoadedModel, sizes: Sizes) -> Result<(), TensorError> {
        let held = self.sizes();
        let larger = held.max(sizes);
        if larger != held {
            // The old memory is freed before the new one is allocated.
            *self = Self::new(model, Sizes::default())?;
            *self = Self::new(model, larger)?;
        }
        Ok(())
    }

    fn frame(&self, unit: usize) -> &Buffer {
        &self.frames[unit % 2]
    }

    /// Writes the tokens of a batch and its tables.
    fn write(&self, parts: &[Part<'_>], rows: usize) -> BatchTables<'_> {
        let most = parts.iter().map(|part| part.pages.len()).max().unwrap_or(0);
        let mut ids = Vec::with_capacity(rows);
        let mut positions = Vec::with_capacity(rows);
        let (mut row_starts, mut pages) = (vec![0], Vec::with_capacity(parts.len() * most));
        for part in parts {
            ids.extend_from_slice(part.ids);
            positions.extend((part.cached..part.cached + part.ids.len()).map(|position| position as u32));
            row_starts.push(ids.len() as u32);
            pages.extend_from_slice(part.pages);
            pages.resize(row_starts.len().saturating_sub(1) * most, 0);
        }
        let cached: Vec<u32> = parts.iter().map(|part| part.cached as u32).collect();
        self.ids.view().rows(0..rows).write(&ids);
        self.positions.view().rows(0..rows).write(&positions);
        let tables = BatchTables {
            row_starts: self.row_starts.view().rows(0..row_starts.len()),
            cached: self.cached.view().rows(0..cached.len()),
            pages: self.pages.view().rows(0..pages.len()),
        };
        tables.row_starts.write(&row_starts);
        tables.cached.write(&cached);
        tables.pages.write(&pages);
        tables
    }

    /// Returns the outputs of all `rows` rows of a batch, given those of this rank.
    fn gather_outputs<'a>(
        &'a self,
        model: &LoadedModel,
        outputs: View<'a>,
        rows: usize,
    ) -> Result<View<'a>, InferError> {
        let Some(peers) = model.ranks().groups().context_peers() else { return Ok(outputs) };
        let all = self.all_rows.view().rows(0..rows);
        peers.gather(outputs, all)?;
        Ok(all)
    }

    /// Returns the last rows of the parts whose logits are wanted.
    fn gather_last_rows<'a>(
        &'a self,
        model: &LoadedModel,
        outputs: View<'a>,
        parts: &[Part<'_>],
    ) -> View<'a> {
        let (mut end, mut gathered) = (0, 0);
        if parts.iter().all(|part| part.ids.len() == 1 && part.wants_logits) {
            return outputs;
        }
        for part in parts {
            end += part.ids.len();
            if part.wants_logits {
                let row = self.last_rows.view().rows(gathered..gathered + 1);
                model.queue.cast(outputs.rows(end - 1..end), row);
                gathered += 1;
            }
        }
        self.last_rows.view().rows(0..gathered)
    }
}

/// Arguments that the replays of a batch's units share.
struct Unit<'a> {
    model: &'a LoadedModel,
    constants: &'a [Tensor],
    memory: &'a Memory,
    in_place: &'a [Option<Matrix<'a>>],
    long_rows: &'a [Range<usize>],
}

impl Unit<'_> {
    /// Runs one unit on some rows of a batch.
    fn run(
        &self,
        programs: &RecordedModel,
        unit: usize,
        rows: Range<usize>,
        input: Option<View<'_>>,
        cache: Option<PagedCache<'_>>,
    ) -> Result<(), InferError> {
        let Self { model, constants, memory, in_place, long_rows } = *self;
        let held = model.weights.begin(&*model.queue, unit)?;
        let weights = model.weights.weights(in_place, held.as_deref());
        let parameters = UnitParameters { ids: programs.unit_parameters(unit), weights, gradients: None };
        let [ids, positions] = [&memory.ids, &memory.positions].map(|words| words.view().rows(rows.clone()));
        let batch = Inputs { constants, long_rows, ..Inputs::new(ids, positions) };
        let frame = memory.frame(unit);
        let replay = Replay::new(&*model.queue, &parameters, batch, frame, &memory.workspace);
        let replay = model.ranks().groups().attach(replay);
        programs.program(unit).forward(&Replay { input, cache, ..replay })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_have_the_rows_of_a_batch_in_their_order() {
        let ids: Vec<u32> = (0..300).collect();
        let part = |range: std::ops::Range<usize>, cached| Part {
            ids: &ids[range],
            cached,
            pages: &[],
            wants_logits: true,
            is_long: cached > 5,
        };
        let parts = [part(0..1, 40), part(1..2, 7), part(2..202, 0), part(202..300, 5)];
        assert_eq!(long_rows(&parts), std::slice::from_ref(&(0..2)));
        assert_eq!(micro_batches(&parts, 1).len(), 1);
        assert_eq!(micro_batches(&parts[..2], 2).len(), 1);
        let split = micro_batches(&parts, 2);
        assert_eq!(split.iter().map(|parts| rows_of(parts)).collect::<Vec<_>>(), [75, 75, 75, 75]);
        let rows: Vec<u32> = split.iter().flatten().flat_map(|part| part.ids).copied().collect();
        assert_eq!(rows, ids);
        let of_third: Vec<_> =
            split.iter().flatten().filter(|part| (2..202).contains(&part.ids[0])).collect();
        let cached: Vec<usize> = of_third.iter().map(|part| part.cached).collect();
        assert_eq!(cached, [0, 73, 148]);
        let wants: Vec<bool> = of_third.iter().map(|part| part.wants_logits).collect();
        assert_eq!(wants, [false, false, true]);
        assert_eq!(split.iter().map(|parts| wanted_of(parts)).sum::<usize>(), 4);
    }
}
