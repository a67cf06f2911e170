//! The pool of gathered weights: weights are unsharded only while units use them (ZeRO stage 3; Rajbhandari et al.,
//! 2020, and PyTorch's FSDP).
//!
//! Each rank keeps its own elements. A bundle is a set of flat parameters that the same units read, gathered together.
//! The [`GatherPlan`] decides before the run when each bundle is gathered, how long it stays, and where it lies in the
//! pool. The pool carries out the plan: it waits for the bundles of a unit and prefetches those of later units.
//!
//! Own elements on disk (ZeRO-Infinity: Rajbhandari et al., 2021) are read to their place in the pool, overlapped with
//! earlier units, and gathered from there.
//!
//! Weights may be gathered as quantized codes (qwZ of ZeRO++: Wang et al., 2023). Each rank encodes its own elements,
//! and every rank decodes all of them, its own included, so that all compute with the same bits. A secondary shard (hpZ
//! of ZeRO++) keeps a range of the weights that the first gather of a sequence brought; later gathers then involve only
//! neighbours, such as the ranks of a machine.

use std::cell::RefCell;
use std::ops::Range;

use lockstep_comm::{Collective, LentBuffer};
use lockstep_plan::gathering::{Bundled, GatherPlan, Gathers, Kept, Residency, Sequence};
use lockstep_plan::{DType, MemoryCategory, QuantizedType, StoreKind};
use lockstep_tensor::{Arena, Buffer, Kernels, Shape, TensorError, View};

use crate::state_store::StateStore;
use crate::transfers::{Job, Transfers};
use crate::windowed_store::WindowedStore;
use crate::{EngineError, shards::Shards};

/// A weight gather in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WeightTransfer {
    /// A flat parameter, by index, that is gathered after the optimizer step.
    FlatParameter(usize),
    /// A bundle of the pool, by index.
    Bundle(usize),
}

/// Borrowed parts of the model state that the pool gathers from: own weights in memory and on disk, groups and
/// transfers.
pub(crate) struct OwnWeights<'a> {
    pub(crate) stores: &'a mut [StateStore],
    /// Offloaded flat parameters: first of trained, then of frozen weights.
    pub(crate) files: &'a mut [Option<RefCell<WindowedStore>>; 2],
    pub(crate) shards: &'a Shards,
    pub(crate) transfers: &'a mut Transfers<WeightTransfer>,
}

/// Returns the store of trained or of frozen weights, if there is one.
fn store_of(stores: &mut [StateStore], kept: Kept) -> Option<&mut StateStore> {
    let kind = match kept {
        Kept::Trained => StoreKind::Weights,
        Kept::Frozen => StoreKind::FrozenWeights,
    };
    stores.iter_mut().find(|store| store.kind() == kind)
}

/// Memory for weights that are currently unsharded, and the state of their gathers.
#[derive(Debug)]
pub(crate) struct ParameterPool {
    memory: Buffer,
    dtype: DType,
    /// Quantized codes of the pool's elements, if weights are gathered as codes.
    codes: Option<(QuantizedType, Buffer)>,
    /// Memory of the secondary shard (hpZ), if there is one.
    secondary: Option<Buffer>,
    bundles: Vec<Bundle>,
    /// Bundles that each unit reads.
    needs: Vec<Vec<usize>>,
    /// Planned gathers of a step, of one micro-batch and of an evaluation, in the order of [`Sequence::ALL`].
    plans: [GatherPlan; 3],
    sequence: Sequence,
    /// Number of uses of the current sequence that have been made ready; a use is one pass of a unit.
    used: usize,
}

/// Flat parameters that the same units read and that are gathered together.
#[derive(Debug)]
struct Bundle {
    flat_parameters: Vec<BundledParameter>,
    /// True if the secondary shard is filled from this bundle once it has arrived.
    fills_secondary: bool,
    /// Index of the bundle's first element in the pool; `None` if it was not gathered in this sequence.
    start: Option<usize>,
}

/// A flat parameter in a bundle.
#[derive(Debug)]
struct BundledParameter {
    bundled: Bundled,
    /// Elements of the flat parameter in this rank's secondary shard; `None` without one.
    secondary: Option<Range<usize>>,
    /// True while this rank's own elements are being read from disk.
    is_read: bool,
    /// True if it is gathered as quantized codes.
    is_coded: bool,
}

impl ParameterPool {
    /// Allocates a pool for the weights that `gathers` plans, and marks them as gathered in `stores`. With `quantized`,
    /// they are gathered as codes of that type.
    ///
    /// # Errors
    /// If memory runs out.
    pub(crate) fn new(
        arena: &Arena,
        gathers: Gathers,
        stores: &mut [StateStore],
        shards: &Shards,
        quantized: Option<QuantizedType>,
    ) -> Result<Self, TensorError> {
        let dtype = store_of(stores, Kept::Trained).map_or(DType::F32, |store| store.dtype());
        let in_communication = |bytes: usize| arena.allocate(bytes, MemoryCategory::Communication);
        let secondary = gathers
            .secondary_elements
            .map(|elements| arena.allocate_zeroed(elements * dtype.size_bytes(), MemoryCategory::Parameters));
        let secondary = secondary.transpose()?;
        let memory = in_communication(gathers.pool_bytes(dtype))?;
        let codes = quantized
            .map(|kind| Ok::<_, TensorError>((kind, in_communication(kind.bytes(gathers.pool_elements()))?)));
        let codes = codes.transpose()?;
        let Gathers { bundles, needs, in_bundle, plans, .. } = gathers;
        for (kept, in_bundle) in [Kept::Trained, Kept::Frozen].into_iter().zip(in_bundle) {
            let Some(store) = store_of(stores, kept) else { continue };
            for (flat, place) in in_bundle.into_iter().enumerate() {
                place.into_iter().for_each(|place| store.gather(flat, place));
            }
        }
        let mut flat = |bundled: Bundled| {
            let store = store_of(stores, bundled.kept).filter(|_| bundled.secondary_start.is_some());
            let group =
                store.and_then(|store| shards.neighbours.get(store.flat_parameters()[bundled.flat].summing));
            let secondary = group.map(|group| {
                let elements = bundled.elements / group.size();
                group.rank() * elements..(group.rank() + 1) * elements
            });
            BundledParameter { bundled, secondary, is_read: false, is_coded: false }
        };
        let mut bundle = |flat_parameters: Vec<Bundled>| {
            let flat_parameters = flat_parameters.into_iter().map(&mut flat).collect();
            Bundle { flat_parameters, fills_secondary: false, start: None }
        };
        let bundles = bundles.into_iter().map(&mut bundle).collect();
        let (sequence, used) = (Sequence::Step, 0);
        Ok(Self { memory, dtype, codes, secondary, bundles, needs, plans, sequence, used })
    }

    /// Begins a sequence of uses. Bundles of the last sequence are no longer valid.
    pub(crate) fn begin(&mut self, sequence: Sequence) {
        self.sequence = sequence;
        self.used = 0;
        self.bundles.iter_mut().for_each(|bundle| bundle.start = None);
    }

    /// Returns the planned gathers of a step.
    pub(crate) fn plan_of_step(&self) -> &GatherPlan {
        &self.plans[Sequence::Step as usize]
    }

    /// Returns the weights from element `first` of a bundle on. The unit that reads them must have been made ready.
    pub(crate) fn view(&self, bundle: usize, first: usize, shape: Shape) -> View<'_> {
        let start = self.bundles[bundle].start.expect("the bundles that a unit reads were made ready");
        self.memory.view(self.dtype, (start + first) * self.dtype.size_bytes(), shape)
    }

    /// Waits until the bundles that `unit` reads have arrived, and begins the gathers that are planned to overlap with
    /// it.
    ///
    /// # Errors
    /// If another rank is lost, or the disk fails.
    ///
    /// # Panics
    /// If the sequence has no further use.
    pub(crate) fn make_ready(
        &mut self,
        queue: &dyn Kernels,
        unit: usize,
        own: &mut OwnWeights<'_>,
    ) -> Result<(), EngineError> {
        let at = self.used;
        self.used += 1;
        let (plan, sequence) = (&self.plans[self.sequence as usize], self.sequence);
        assert!(at < plan.len(), "use {at} of {sequence:?}, of unit {unit}, is one more than planned");
        let (stays, at_once) = (plan.begins_with(at).len(), plan.read_at_once(at));
        let stay = |pool: &Self, index: usize| pool.plans[sequence as usize].begins_with(at)[index];
        (0..at_once).try_for_each(|index| self.begin_gather(queue, stay(self, index), own))?;
        for index in 0..self.needs[unit].len() {
            self.finish_gather(queue, self.needs[unit][index], own)?;
        }
        (at_once..stays).try_for_each(|index| self.begin_gather(queue, stay(self, index), own))
    }

    /// Begins to gather a bundle, or to read its own elements that are on disk.
    fn begin_gather(
        &mut self,
        queue: &dyn Kernels,
        stay: Residency,
        own: &mut OwnWeights<'_>,
    ) -> Result<(), EngineError> {
        let bundle = &mut self.bundles[stay.bundle];
        bundle.start = Some(stay.start);
        bundle.fills_secondary = stay.earlier == 0;
        for index in 0..bundle.flat_parameters.len() {
            let BundledParameter { bundled, secondary, is_read, .. } =
                &mut self.bundles[stay.bundle].flat_parameters[index];
            let from_neighbours = stay.earlier > 0 && secondary.is_some();
            if from_neighbours || !bundled.is_on_disk {
                self.gather(queue, (stay.bundle, index), from_neighbours, own)?;
                continue;
            }
            let store = store_of(own.stores, bundled.kept);
            let first = store.map_or(0, |store| store.flat_parameters()[bundled.flat].own.start);
            if let Some(file) = own.files[bundled.kept as usize].as_mut().map(RefCell::get_mut) {
                let start_bytes = (stay.start + bundled.start + first) * self.dtype.size_bytes();
                file.begin_to_fill(bundled.flat, &mut self.memory, start_bytes)?;
                *is_read = true;
            }
        }
        Ok(())
    }

    /// Waits until a bundle has arrived.
    fn finish_gather(
        &mut self,
        queue: &dyn Kernels,
        bundle: usize,
        own: &mut OwnWeights<'_>,
    ) -> Result<(), EngineError> {
        for index in 0..self.bundles[bundle].flat_parameters.len() {
            let BundledParameter { bundled, is_read, .. } = &mut self.bundles[bundle].flat_parameters[index];
            let file = own.files[bundled.kept as usize].as_mut().filter(|_| std::mem::take(is_read));
            if let Some(file) = file {
                file.get_mut().finish_filling(bundled.flat)?;
                self.gather(queue, (bundle, index), false, own)?;
            }
        }
        own.transfers.finish(|transfer| *transfer == WeightTransfer::Bundle(bundle))?;
        self.decode(queue, bundle);
        self.fill_secondary(queue, bundle);
        Ok(())
    }

    /// Begins to all-gather a flat parameter of a bundle from its owners, or from the secondary shards of neighbours.
    /// Does nothing if this rank owns all of it.
    #[track_caller]
    fn gather(
        &mut self,
        queue: &dyn Kernels,
        (bundle, index): (usize, usize),
        from_neighbours: bool,
        own: &mut OwnWeights<'_>,
    ) -> Result<(), EngineError> {
        let (dtype, size) = (self.dtype, self.dtype.size_bytes());
        let Bundle { flat_parameters, start, .. } = &mut self.bundles[bundle];
        let BundledParameter { bundled, secondary, is_coded, .. } = &mut flat_parameters[index];
        let Some(store) = store_of(own.stores, bundled.kept) else { return Ok(()) };
        let summing = store.flat_parameters()[bundled.flat].summing;
        let Some(group) = own.shards.gathering.get(summing) else { return Ok(()) };
        let (first, elements) = (start.unwrap_or_default() + bundled.start, bundled.elements);
        let of_own = store.flat_parameters()[bundled.flat].own.clone();
        let in_pool = first * size..(first + elements) * size;
        let shard = self.secondary.as_mut().zip(secondary.as_ref()).zip(bundled.secondary_start);
        let shard = shard.zip(own.shards.neighbours.get(summing)).filter(|_| from_neighbours);
        *is_coded = shard.is_none() && self.codes.is_some();
        let (group, collective, bytes) = match (shard, &mut self.codes) {
            (Some((((buffer, range), start), neighbours)), _) => {
                let input = LentBuffer::new(buffer.lend(start * size..(start + range.len()) * size), dtype);
                let output = LentBuffer::new(self.memory.lend(in_pool.clone()), dtype);
                (neighbours, Collective::AllGather { input, output, counts: None }, in_pool.len())
            }
            (None, Some((kind, codes))) => {
                let of = |from: usize, to: usize| kind.bytes(first + from)..kind.bytes(first + to);
                let (own_codes, all) = (of(of_own.start, of_own.end), of(0, elements));
                let weights = if bundled.is_on_disk {
                    self.memory.view(dtype, (first + of_own.start) * size, [of_own.len()])
                } else {
                    store.own_of(bundled.flat)
                };
                let target = codes.view(DType::U8, own_codes.start, [own_codes.len()]);
                queue.quantize(*kind, weights, None, target);
                let data = LentBuffer::new(codes.lend(all.clone()), DType::U8);
                (group, Collective::AllGatherInPlace { data, counts: None }, all.len())
            }
            (None, None) if bundled.is_on_disk => {
                let data = LentBuffer::new(self.memory.lend(in_pool.clone()), dtype);
                (group, Collective::AllGatherInPlace { data, counts: None }, in_pool.len())
            }
            (None, None) => {
                let (buffer, range) = store.lend_own(bundled.flat);
                let input = LentBuffer::new(buffer.lend(range), dtype);
                let output = LentBuffer::new(self.memory.lend(in_pool.clone()), dtype);
                (group, Collective::AllGather { input, output, counts: None }, in_pool.len())
            }
        };
        own.transfers.begin(WeightTransfer::Bundle(bundle), Job::Collective { group, collective, bytes })
    }

    /// Decodes the flat parameters of a bundle that have arrived as codes.
    fn decode(&mut self, queue: &dyn Kernels, bundle: usize) {
        let Some((kind, codes)) = &self.codes else { return };
        let Bundle { flat_parameters, start: Some(start), .. } = &mut self.bundles[bundle] else { return };
        for BundledParameter { bundled, is_coded, .. } in flat_parameters {
            if std::mem::take(is_coded) {
                let (first, elements) = (*start + bundled.start, bundled.elements);
                let bytes = kind.bytes(first)..kind.bytes(first + elements);
                let weights = self.memory.view(self.dtype, first * self.dtype.size_bytes(), [elements]);
                queue.dequantize(*kind, codes.view(DType::U8, bytes.start, [bytes.len()]), weights);
            }
        }
    }

    /// Copies this rank's part of an arrived bundle to the secondary shard.
    fn fill_secondary(&mut self, queue: &dyn Kernels, bundle: usize) {
        let size = self.dtype.size_bytes();
        let Bundle { flat_parameters, fills_secondary, start: Some(start) } = &mut self.bundles[bundle]
        else {
            return;
        };
        let Some(shard) = self.secondary.as_ref().filter(|_| std::mem::take(fills_secondary)) else { return };
        for BundledParameter { bundled, secondary, .. } in flat_parameters {
            let Some((range, at)) = secondary.as_ref().zip(bundled.secondary_start) else { continue };
            let first = *start + bundled.start + range.start;
            let arrived = self.memory.view(self.dtype, first * size, [range.len()]);
            queue.cast(arrived, shard.view(self.dtype, at * size, [range.len()]));
        }
    }
}
