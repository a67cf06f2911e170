//! The model state of a rank: the stores that its [`StateLayout`] lists. Weights that other ranks own, or that are on
//! disk, are gathered after each optimizer step (ZeRO stages 1 and 2) or before each use (stage 3, offload).
//!
//! | residence of a flat parameter | location of its elements | transfers |
//! |---|---|---|
//! | resident | flat buffers of its [`StateStore`] | all-gathers after the optimizer step, at stages 1 and 2 |
//! | gathered | unsharded in the [`ParameterPool`] while units read them | gathers before use, reads of the own elements |
//! | windowed | on disk, in a [`WindowedStore`] | window by window during the optimizer step |

use std::cell::RefCell;
use std::ops::Range;

use lockstep_comm::{Collective, LentBuffer};
use lockstep_model::RecordedModel;
use lockstep_plan::gathering::{GatherPlan, Gathers, Sequence};
use lockstep_plan::{
    Extent, FlatParameter, ParameterId, ParameterRecord, StateItem, StateKind, StateLayout, StoreKind,
    ZeroStage,
};
use lockstep_tensor::{Arena, DiskTraffic, Kernels, TensorError};

use crate::parameter_pool::{OwnWeights, ParameterPool, WeightTransfer};
use crate::state_store::StateStore;
use crate::transfers::{Job, Traffic, Transfers};
use crate::weights::{WeightSource, Weights};
use crate::windowed_store::WindowedStore;
use crate::{EngineError, Offload, shards::Shards};

/// Weights and optimizer state. The stores of gradients and their residual are also here until
/// [`Gradients`](crate::Gradients) takes them.
#[derive(Debug)]
pub(crate) struct ModelState {
    stores: Vec<StateStore>,
    /// Offloaded flat parameters: first trained weights and optimizer state, then frozen weights.
    files: [Option<RefCell<WindowedStore>>; 2],
    pool: Option<ParameterPool>,
    shards: Shards,
    transfers: Transfers<WeightTransfer>,
    /// Flat parameters of trained weights that each unit reads; `None` unless they are gathered after the optimizer
    /// step.
    reads: Option<Vec<Vec<usize>>>,
}

impl ModelState {
    /// Allocates zeros for every store of `layout`, in its order. Weights come first, so that a model that does not fit
    /// is reported for its weights. With `gathers`, weights are gathered before each use.
    ///
    /// # Errors
    /// If memory or the disk has no room.
    pub(crate) fn zeros(
        arena: &Arena,
        model: &RecordedModel,
        layout: &StateLayout,
        offload: &Offload,
        gathers: Option<Gathers>,
        shards: Shards,
    ) -> Result<Self, EngineError> {
        let store = |item: &StateItem| StateStore::zeros_of(arena, &layout.records, item);
        let mut stores = layout.items.iter().map(store).collect::<Result<Vec<_>, TensorError>>()?;
        let find = |kind| stores.iter().find(|store: &&StateStore| store.kind() == kind);
        let file = |items: Vec<&StateItem>| {
            let kinds = items.iter().map(|item| (item.kind, item.dtype)).collect();
            let store = items.first().and_then(|item| find(item.kind));
            let file = store.map(|store| WindowedStore::zeros(offload, store, kinds, arena)).transpose()?;
            Ok::<_, EngineError>(file.flatten().map(RefCell::new))
        };
        let frozen = layout.item(StoreKind::FrozenWeights).into_iter().collect();
        let files = [file(layout.updated_on_disk().collect())?, file(frozen)?];
        let is_gathered_after =
            (ZeroStage::Optimizer..ZeroStage::Parameters).contains(&layout.plan.zero_stage);
        let reads = find(StoreKind::Weights).filter(|_| is_gathered_after).map(|weights| {
            let flat = |id: &ParameterId| Some(weights.span_of(*id)?.flat);
            let reads = |unit| model.unit_parameters(unit).iter().filter_map(flat).collect();
            (0..model.units()).map(reads).collect()
        });
        let flat_parameters: usize = stores.iter().map(|store| store.flat_parameters().len()).sum();
        let quantized = layout.plan.quantized_weights();
        let pool = gathers.map(|gathers| ParameterPool::new(arena, gathers, &mut stores, &shards, quantized));
        let (pool, transfers) = (pool.transpose()?, Transfers::new(shards.limit, flat_parameters));
        Ok(Self { stores, files, pool, shards, transfers, reads })
    }

    /// Removes and returns the store of a kind, if the rank has one.
    pub(crate) fn take(&mut self, kind: StoreKind) -> Option<StateStore> {
        let index = self.stores.iter().position(|store| store.kind() == kind)?;
        Some(self.stores.remove(index))
    }

    /// Returns the store of a kind, if the rank has one.
    pub(crate) fn get(&self, kind: StoreKind) -> Option<&StateStore> {
        self.stores.iter().find(|store| store.kind() == kind)
    }

    /// Returns all stores in memory, and the file of those that an optimizer step changes.
    pub(crate) fn all_mut(
        &mut self,
    ) -> (impl Iterator<Item = &mut StateStore>, Option<&RefCell<WindowedStore>>) {
        (self.stores.iter_mut(), self.files[0].as_ref())
    }

    /// Returns the file of trained weights and optimizer state, if any are offloaded.
    pub(crate) fn updated_on_disk(&self) -> Option<&RefCell<WindowedStore>> {
        self.files[0].as_ref()
    }

    /// Returns the trained weights in the type that kernels read; only this rank's own elements if they are gathered
    /// before each use.
    pub(crate) fn trained(&self) -> &StateStore {
        self.get(StoreKind::Weights).expect("every rank has a store of weights")
    }

    /// Returns the f32 master weights, if kernels read another type.
    pub(crate) fn master(&self) -> Option<&StateStore> {
        self.get(StoreKind::MasterWeights)
    }

    /// Returns the buffers, if they have a separate store.
    pub(crate) fn buffers(&self) -> Option<&StateStore> {
        self.get(StoreKind::Buffers)
    }

    /// Returns the trained weights that an optimizer step changes: the master weights if there are any.
    pub(crate) fn updated(&self) -> &StateStore {
        self.master().unwrap_or_else(|| self.trained())
    }

    /// Returns the trained weights that are replicated on other ranks: the master weights where these are replicated
    /// too.
    pub(crate) fn copied(&mut self) -> Option<&mut StateStore> {
        let is_whole = self.shards.stage == ZeroStage::Nothing;
        let is_master = self.master().is_some_and(|master| is_whole && !master.is_partly_on_disk());
        let kind = if is_master { StoreKind::MasterWeights } else { StoreKind::Weights };
        self.stores.iter_mut().find(|store| store.kind() == kind)
    }

    /// Returns the range of a parameter's elements that this rank keeps in any precision.
    pub(crate) fn kept_range(&self, record: &ParameterRecord, id: ParameterId) -> Range<usize> {
        let frozen = self.get(StoreKind::FrozenWeights).filter(|_| !record.trainable);
        let of_kernels = frozen.unwrap_or_else(|| self.trained());
        let is_whole = self.buffers().is_some_and(|store| store.kept_part(id).is_some());
        match of_kernels.extent() {
            Extent::Own if !is_whole => of_kernels.owned_range(id),
            _ => 0..record.local_elements(),
        }
    }

    /// Replaces the elements of a parameter's tensor from `start` on, in memory and on disk; weights in every
    /// precision, except quantized ones. Elements that this rank does not keep are skipped.
    ///
    /// # Errors
    /// If the disk fails.
    pub(crate) fn write(
        &mut self,
        id: ParameterId,
        kind: StateKind,
        start: usize,
        values: &[f32],
    ) -> Result<(), EngineError> {
        let of_weights =
            [StoreKind::Weights, StoreKind::FrozenWeights, StoreKind::MasterWeights, StoreKind::Buffers];
        let of_optimizer = [StoreKind::Optimizer(kind)];
        for &kind in if kind == StateKind::Parameter { &of_weights[..] } else { &of_optimizer } {
            if let Some(store) = self.get(kind) {
                store.write_part(id, start, values);
            }
            let files = self.files.iter_mut().flatten().map(RefCell::get_mut);
            for file in files.filter(|file| file.keeps(kind)) {
                file.write(id, kind, start, values)?;
            }
        }
        Ok(())
    }

    /// Replaces bytes of the blocks of a quantized matrix from byte `start` on. Other parameters are skipped.
    pub(crate) fn write_blocks(&self, id: ParameterId, start: usize, blocks: &[u8]) {
        if let Some(store) = self.get(StoreKind::QuantizedWeights).filter(|store| store.blocks(id).is_some())
        {
            store.write_blocks(id, start, blocks);
        }
    }

    /// Rounds this rank's own elements of a parameter's f32 master weights, if any, to the type that kernels read.
    pub(crate) fn round(&self, queue: &dyn Kernels, id: ParameterId) {
        if let Some(master) = self.master().and_then(|store| store.part(id))
            && let Some(rounded) = self.trained().part(id)
        {
            queue.cast(master.view, rounded.view);
        }
    }

    /// Begins to all-gather the updated trained weights, at ZeRO stages 1 and 2. Until [`ModelState::wait_for_gathers`], only
    /// passes of units may read or write them.
    ///
    /// # Errors
    /// If another rank is lost.
    pub(crate) fn gather_updated(&mut self) -> Result<(), EngineError> {
        let Self { stores, shards, transfers, reads: Some(_), .. } = self else { return Ok(()) };
        for weights in stores.iter_mut().filter(|store| store.kind() == StoreKind::Weights) {
            let dtype = weights.dtype();
            for index in 0..weights.flat_parameters().len() {
                let &FlatParameter { summing, elements, .. } = &weights.flat_parameters()[index];
                let Some(group) = shards.gathering.get(summing) else { continue };
                let (buffer, range) = weights.lend_from(index, 0..elements);
                let (bytes, data) = (range.len(), LentBuffer::new(buffer.lend(range), dtype));
                let collective = Collective::AllGatherInPlace { data, counts: None };
                transfers.begin(
                    WeightTransfer::FlatParameter(index),
                    Job::Collective { group, collective, bytes },
                )?;
            }
        }
        Ok(())
    }

    /// Waits until all weights in memory are those of the last optimizer step.
    ///
    /// # Errors
    /// If another rank is lost.
    pub(crate) fn wait_for_gathers(&mut self) -> Result<(), EngineError> {
        self.transfers.finish(|transfer| matches!(transfer, WeightTransfer::FlatParameter(_)))
    }

    /// Begins a sequence of units that read gathered weights.
    pub(crate) fn begin(&mut self, sequence: Sequence) {
        if let Some(pool) = &mut self.pool {
            pool.begin(sequence);
        }
    }

    /// Returns the planned gathers of a step; `None` unless weights are gathered before each use.
    pub(crate) fn gathers_of_step(&self) -> Option<&GatherPlan> {
        self.pool.as_ref().map(ParameterPool::plan_of_step)
    }

    /// Returns the bytes of the files.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.files.iter().flatten().map(|file| file.borrow().staging.disk_bytes()).sum()
    }

    /// Returns the disk traffic since the last call.
    pub(crate) fn take_disk_traffic(&mut self) -> DiskTraffic {
        let traffic = self.files.iter_mut().flatten().map(|file| file.get_mut().staging.take_traffic());
        traffic.fold(DiskTraffic::default(), |sum, traffic| sum + traffic)
    }

    /// Returns the traffic of gathers since the last call.
    pub(crate) fn take_traffic(&mut self) -> Traffic {
        self.transfers.take_traffic()
    }
}

impl WeightSource for ModelState {
    fn make_ready(&mut self, queue: &dyn Kernels, unit: usize) -> Result<(), EngineError> {
        let Self { stores, files, pool, shards, transfers, reads } = self;
        match (pool, reads) {
            (Some(pool), _) => {
                pool.make_ready(queue, unit, &mut OwnWeights { stores, files, shards, transfers })
            }
            (None, Some(reads)) => transfers.finish(|transfer| match transfer {
                WeightTransfer::FlatParameter(flat) => reads[unit].contains(flat),
                WeightTransfer::Bundle(_) => false,
            }),
            (None, None) => Ok(()),
        }
    }

    fn weights(&self) -> Weights<'_> {
        Weights {
            trained: self.trained(),
            pool: self.pool.as_ref(),
            frozen: self.get(StoreKind::FrozenWeights),
            quantized: self.get(StoreKind::QuantizedWeights),
            exact: self.buffers().or_else(|| self.master()),
            in_place: &[],
            held: None,
        }
    }
}
