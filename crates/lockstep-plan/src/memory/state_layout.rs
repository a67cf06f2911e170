//! Model state of a rank as a list of flat stores that last from step to step, each with its dtype, extent, residence and category.
//!
//! The list is made once, from the recorded model, the rank's stages and a [`StatePlan`]. The engine allocates it, the predictions of
//! memory and offload traffic sum it, and checkpoints copy it. Only this module decides which stores exist, and which are sharded or
//! offloaded.

use super::{
    MemoryCategory, ModelProfile, QuantizedGradientStaging, SharedTable, StageMemory, StatePlan, StoreLayout,
};
use crate::gathering::{Gathers, LiveLimitTooLow, RankPasses};
use crate::{
    DType, Extent, Feedback, ParameterId, ParameterRecord, QuantizedType, ReductionGroup, ShardPlace,
    StateBytes, StateKind, ZeroStage,
};

/// Kind of flat store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoreKind {
    /// Trained weights in the dtype that kernels read.
    Weights,
    /// Frozen weights in the same dtype.
    FrozenWeights,
    /// Blocks of frozen quantized matrices, in bytes. Every rank of the shard group has all of them.
    QuantizedWeights,
    /// f32 master weights, which the optimizer step updates if kernels read another dtype.
    MasterWeights,
    /// An optimizer state, one number per element.
    Optimizer(StateKind),
    /// Buffers, f32 and replicated: parameters without gradients, such as the biases that select experts and the running
    /// statistics of batch norm. They are apart if the updated weights are sharded or offloaded: every rank updates them alike.
    Buffers,
    /// Accumulated gradients, f32.
    Gradients,
    /// Error feedback: quantization errors of this rank's gradients, which it adds to the next ones.
    GradientResidual,
}

impl StoreKind {
    /// Returns the name in listings of memory.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Weights => "trained weights",
            Self::FrozenWeights => "frozen weights",
            Self::QuantizedWeights => "quantized weights",
            Self::MasterWeights => "f32 master weights",
            Self::Optimizer(kind) => kind.name(),
            Self::Buffers => "buffers",
            Self::Gradients => "sums of gradients",
            Self::GradientResidual => "gradient quantization error",
        }
    }

    /// Returns the category that the store is booked under.
    pub const fn category(self) -> MemoryCategory {
        match self {
            Self::Weights | Self::FrozenWeights | Self::QuantizedWeights => MemoryCategory::Parameters,
            Self::MasterWeights | Self::Optimizer(_) | Self::Buffers => MemoryCategory::Optimizer,
            Self::Gradients => MemoryCategory::Gradients,
            Self::GradientResidual => MemoryCategory::Communication,
        }
    }

    /// Returns the lowest ZeRO stage that shards the store; `None` if it is always replicated.
    const fn sharded_from(self) -> Option<ZeroStage> {
        match self {
            Self::Weights | Self::FrozenWeights => Some(ZeroStage::Parameters),
            Self::MasterWeights | Self::Optimizer(_) => Some(ZeroStage::Optimizer),
            Self::Gradients => Some(ZeroStage::Gradients),
            Self::QuantizedWeights | Self::Buffers | Self::GradientResidual => None,
        }
    }
}

impl StatePlan {
    /// Returns the kinds of stores and their dtypes, in order of allocation, for weights of `dtype`.
    fn stores(&self, dtype: DType) -> Vec<(StoreKind, DType)> {
        let updated = if self.facts.has_master { ZeroStage::Optimizer } else { ZeroStage::Parameters };
        let mut stores = vec![
            (StoreKind::Weights, dtype),
            (StoreKind::FrozenWeights, dtype),
            (StoreKind::QuantizedWeights, DType::U8),
        ];
        stores.extend(self.facts.has_master.then_some((StoreKind::MasterWeights, DType::F32)));
        let kept = self.facts.optimizer_keeps.iter();
        stores.extend(kept.map(|(kind, _)| (StoreKind::Optimizer(*kind), self.facts.optimizer_dtype)));
        if self.zero_stage >= updated || self.on_disk.is_some() {
            stores.push((StoreKind::Buffers, DType::F32));
        }
        stores.push((StoreKind::Gradients, DType::F32));
        if self.quantized_gradients().is_some() && self.quantization.feedback == Feedback::Kept {
            stores.push((StoreKind::GradientResidual, DType::BF16));
        }
        stores
    }

    /// Returns the bytes of state per element for weights of `dtype`, summed over the stores that hold every trained parameter.
    pub fn element_bytes(&self, dtype: DType) -> StateBytes {
        let mut bytes = StateBytes { weight: 0, gradient: 0, optimizer: 0 };
        for (kind, dtype) in self.stores(dtype) {
            let size = dtype.size_bytes() as u64;
            match kind {
                StoreKind::Weights => bytes.weight += size,
                StoreKind::Gradients => bytes.gradient += size,
                StoreKind::MasterWeights => bytes.optimizer += size,
                StoreKind::Optimizer(kind) if self.keeps(kind).iter().all(|keeps| *keeps) => {
                    bytes.optimizer += size;
                }
                _ => {}
            }
        }
        bytes
    }

    /// Returns, by parameter, whether the optimizer keeps this state.
    fn keeps(&self, kind: StateKind) -> &[bool] {
        self.facts.optimizer_keeps.iter().find(|(kept, _)| *kept == kind).map_or(&[], |(_, keeps)| keeps)
    }

    /// Returns the quantized type of the gradient reduction; `None` if it is not quantized.
    pub(super) fn quantized_gradients(&self) -> Option<QuantizedType> {
        self.quantization.gradients.filter(|_| self.zero_stage > ZeroStage::Nothing)
    }

    /// Returns the quantized type of weight gathers; `None` if they are not quantized.
    pub fn quantized_weights(&self) -> Option<QuantizedType> {
        self.quantization.weights.filter(|_| self.zero_stage >= ZeroStage::Parameters)
    }

    /// Returns true if gradients leave for their owners, or for the disk, as soon as they are complete.
    pub fn hands_gradients_on(&self) -> bool {
        self.zero_stage >= ZeroStage::Gradients || self.on_disk.is_some_and(|disk| disk.has_gradients)
    }
}

/// Description of one flat store of model state, such as weights, gradients or an optimizer state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateItem {
    /// Kind of store.
    pub kind: StoreKind,
    /// Dtype of the elements.
    pub dtype: DType,
    /// Part of each flat parameter that the store holds: all of it, or the rank's shard.
    pub extent: Extent,
    /// Layout of the parameters, which also says who owns each flat parameter and whether it is offloaded.
    pub layout: StoreLayout,
}

impl StateItem {
    /// Returns the booked bytes of the store.
    pub fn booked_bytes(&self) -> usize {
        self.layout.booked_bytes(self.dtype)
    }
}

/// Model state of a rank.
#[derive(Debug, Clone, PartialEq)]
pub struct StateLayout {
    /// Inputs of the layout, with the ZeRO stage that takes effect: 0 if every shard group has one rank.
    pub plan: StatePlan,
    /// Parameters as this rank sees them: assigned to the plan's buffers, and with the rank's own copy of a shared table.
    pub records: Vec<ParameterRecord>,
    /// By unit, true if it is on this rank.
    pub is_here: Vec<bool>,
    /// Tied table whose embedding and output layer are on two ranks; `None` if there is none.
    pub shared_table: Option<SharedTable>,
    /// The rank's position in the shard group of each reduction group; empty without sharding.
    places: Vec<(ReductionGroup, ShardPlace)>,
    /// Stores in order of allocation. Empty ones are omitted, except weights and gradients.
    pub items: Vec<StateItem>,
}

/// Offloaded units, by unit: of the trained, and of the frozen state.
type OffloadedUnits = [Vec<bool>; 2];

impl StateLayout {
    /// Lays out the state of a rank with these stages of `model`. `place` returns the rank's position in the shard group of each
    /// reduction group.
    pub fn new(
        model: &ModelProfile,
        stages: &[StageMemory],
        place: impl Fn(ReductionGroup) -> ShardPlace,
        state: &StatePlan,
    ) -> Self {
        let is_here = model.is_here(stages);
        let mut records = model.records.clone();
        state.sharding.wrap.apply(&mut records, stages.iter().map(|stage| &stage.units));
        let shared_table = SharedTable::of(&mut records, &is_here);
        let mut places: Vec<(ReductionGroup, ShardPlace)> = Vec::new();
        for summing in records.iter().map(|record| ReductionGroup::of(&record.share)) {
            if places.iter().all(|(known, _)| *known != summing) {
                places.push((summing, place(summing)));
            }
        }
        let mut plan = state.clone();
        if places.iter().all(|(_, place)| place.ranks == 1) {
            plan.zero_stage = ZeroStage::Nothing;
        }
        if plan.zero_stage == ZeroStage::Nothing {
            places.clear();
        }
        let mut layout = Self { plan, records, is_here, shared_table, places, items: Vec::new() };
        let offloaded = layout.offloaded_units();
        for (kind, dtype) in layout.plan.stores(model.dtype) {
            let item = layout.laid_out(model, (kind, dtype), &offloaded);
            if !item.layout.is_empty() || kind == StoreKind::Weights || kind == StoreKind::Gradients {
                layout.items.push(item);
            }
        }
        layout
    }

    /// Lays out the state of the first rank of each shard group. `shard_ranks` returns the size of the groups; all ranks of a group have
    /// equal memory.
    pub fn of_first_ranks(
        model: &ModelProfile,
        stages: &[StageMemory],
        shard_ranks: impl Fn(ReductionGroup) -> usize,
        state: &StatePlan,
    ) -> Self {
        Self::new(model, stages, |summing| ShardPlace { ranks: shard_ranks(summing), rank: 0 }, state)
    }

    /// Returns the units whose state is offloaded, from the first one on.
    fn offloaded_units(&self) -> OffloadedUnits {
        let Some(disk) = self.plan.on_disk else { return [Vec::new(), Vec::new()] };
        [true, false].map(|is_trained| {
            let keeps = |index: usize| self.is_here(index) && self.records[index].trainable == is_trained;
            let place = |summing| self.place(summing);
            StoreLayout::new(&self.records, Extent::Own, place, keeps).units_on_disk(disk.share)
        })
    }

    /// Lays out one store. The gradients' layout must exist before that of their residual.
    fn laid_out(
        &self,
        model: &ModelProfile,
        (kind, dtype): (StoreKind, DType),
        [trained, frozen]: &OffloadedUnits,
    ) -> StateItem {
        let Self { plan, records, .. } = self;
        let is_sharded = match kind {
            StoreKind::Gradients => plan.hands_gradients_on(),
            kind => kind.sharded_from().is_some_and(|from| plan.zero_stage >= from),
        };
        let extent = if is_sharded { Extent::Own } else { Extent::Whole };
        let is_trained = |index: usize| self.is_here(index) && records[index].trainable;
        let is_frozen = |index: usize| self.is_here(index) && !records[index].trainable;
        let keeps = |index: usize| match kind {
            StoreKind::Weights | StoreKind::MasterWeights | StoreKind::Gradients => is_trained(index),
            StoreKind::FrozenWeights => is_frozen(index) && records[index].block_format.is_none(),
            StoreKind::QuantizedWeights => is_frozen(index) && records[index].block_format.is_some(),
            StoreKind::Optimizer(kind) => is_trained(index) && plan.keeps(kind)[index],
            StoreKind::Buffers => {
                let buffers = &model.units[records[index].unit].buffers;
                is_trained(index) && buffers.iter().any(|id| id.0 == index)
            }
            StoreKind::GradientResidual => {
                let place = self.layout_of(StoreKind::Gradients).places[index];
                is_trained(index) && place.is_some_and(|(flat, _)| self.is_coded(flat))
            }
        };
        let has_weights = plan.on_disk.is_some_and(|disk| disk.has_parameters);
        let has_gradients = plan.on_disk.is_some_and(|disk| disk.has_gradients);
        let is_offloaded = |units: &[bool], unit: usize| units.get(unit) == Some(&true);
        let is_on_disk = |unit: usize, is_tied: bool| match kind {
            StoreKind::Weights => has_weights && is_offloaded(trained, unit),
            StoreKind::FrozenWeights => has_weights && is_offloaded(frozen, unit),
            StoreKind::MasterWeights | StoreKind::Optimizer(_) => is_offloaded(trained, unit),
            StoreKind::Gradients => has_gradients && is_offloaded(trained, unit) && !is_tied,
            StoreKind::QuantizedWeights | StoreKind::Buffers | StoreKind::GradientResidual => false,
        };
        // If frozen weights are not sharded, the rank owns all of them.
        let is_alone = match kind {
            StoreKind::FrozenWeights => !is_sharded,
            kind => matches!(kind, StoreKind::QuantizedWeights | StoreKind::Buffers),
        };
        let place = |summing| if is_alone { ShardPlace::default() } else { self.place(summing) };
        let mut layout = StoreLayout::partly_on_disk(records, extent, place, keeps, is_on_disk);
        if kind == StoreKind::GradientResidual {
            // Each rank keeps its own quantization errors, for the gradients of all owners.
            layout.flat_parameters.iter_mut().for_each(|flat| flat.own = 0..flat.elements);
        }
        StateItem { kind, dtype, extent, layout }
    }

    /// Returns true if the unit of a parameter is on this rank.
    fn is_here(&self, index: usize) -> bool {
        self.is_here[self.records[index].unit]
    }

    /// Returns the rank's position in the shard group of state reduced over `summing`.
    pub fn place(&self, summing: ReductionGroup) -> ShardPlace {
        self.places
            .iter()
            .find(|(known, _)| *known == summing)
            .map_or_else(ShardPlace::default, |known| known.1)
    }

    /// Returns the store of a kind; `None` if the rank has none.
    pub fn item(&self, kind: StoreKind) -> Option<&StateItem> {
        self.items.iter().find(|item| item.kind == kind)
    }

    /// Returns the layout of a store that every rank has: trained weights or gradients.
    pub(super) fn layout_of(&self, kind: StoreKind) -> &StoreLayout {
        &self.item(kind).expect("every rank has stores of weights and of gradients").layout
    }

    /// Returns the stores that a checkpoint or a copy of the state holds.
    pub fn saved(&self) -> impl Iterator<Item = &StateItem> {
        let updated = if self.plan.facts.has_master { StoreKind::MasterWeights } else { StoreKind::Weights };
        self.items.iter().filter(move |item| match item.kind {
            StoreKind::Weights | StoreKind::MasterWeights => item.kind == updated,
            StoreKind::Optimizer(_) | StoreKind::Buffers | StoreKind::GradientResidual => true,
            StoreKind::FrozenWeights | StoreKind::QuantizedWeights | StoreKind::Gradients => false,
        })
    }

    /// Returns the stores of the optimizer step's offload file, where each window holds all of them; none if nothing is offloaded.
    pub fn updated_on_disk(&self) -> impl Iterator<Item = &StateItem> {
        let on_disk = self.plan.on_disk;
        self.items.iter().filter(move |item| match item.kind {
            StoreKind::Weights => on_disk.is_some_and(|disk| disk.has_parameters),
            StoreKind::MasterWeights | StoreKind::Optimizer(_) => on_disk.is_some(),
            _ => false,
        })
    }

    /// Returns the offload files, each as its layout and the dtypes in a window: of the optimizer step, of gradients, and of frozen
    /// weights.
    pub(super) fn files(&self) -> [Option<(&StoreLayout, Vec<DType>)>; 3] {
        fn beside<'a>(items: impl Iterator<Item = &'a StateItem>) -> Option<(&'a StoreLayout, Vec<DType>)> {
            let mut items = items.peekable();
            let layout = &items.peek()?.layout;
            Some((layout, items.map(|item| item.dtype).collect()))
        }
        let alone = |kind| beside(self.item(kind).into_iter());
        [beside(self.updated_on_disk()), alone(StoreKind::Gradients), alone(StoreKind::FrozenWeights)]
    }

    /// Returns true if a flat parameter's gradients are quantized: it is sharded, and not a tied table that is also reduced between
    /// stages.
    pub fn is_coded(&self, flat: usize) -> bool {
        let gradients = self.layout_of(StoreKind::Gradients);
        let of_table = self.shared_table.and_then(|table| gradients.places[table.id.0]);
        let is_table = of_table.is_some_and(|(of_table, _)| of_table == flat);
        self.place(gradients.flat_parameters[flat].summing).ranks > 1 && !is_table
    }

    /// Returns the quantized type and the staging buffers of quantized gradients; `None` if gradients are not quantized.
    pub fn record_passage(&self) -> Option<(QuantizedType, QuantizedGradientStaging)> {
        let passage = |flat| self.is_coded(flat);
        let gradients = self.layout_of(StoreKind::Gradients);
        let kind = self.plan.quantized_gradients()?;
        Some((kind, gradients.record_passage(self.plan.replicas, passage)))
    }

    /// Returns the tied output layers whose embedding is in another unit of this rank, each with its table.
    pub fn tied_tables(&self) -> impl Iterator<Item = (ParameterId, ParameterId)> {
        let is_trained = |index: usize| self.is_here(index) && self.records[index].trainable;
        self.records.iter().enumerate().filter_map(move |(index, record)| {
            let table = record.tie.filter(|_| is_trained(index))?;
            (self.records[table.0].unit != record.unit).then_some((ParameterId(index), table))
        })
    }

    /// Returns the parameter gathers of the rank; `None` if all weights are in place for kernels, so that nothing is gathered.
    ///
    /// # Errors
    /// If the limit on live parameters leaves no room for a unit's weights.
    pub fn gathers(
        &self,
        model: &ModelProfile,
        passes: &RankPasses,
    ) -> Result<Option<Gathers>, LiveLimitTooLow> {
        let is_sharded = self.plan.zero_stage >= ZeroStage::Parameters;
        if !is_sharded && !self.plan.on_disk.is_some_and(|disk| disk.has_parameters) {
            return Ok(None);
        }
        let stores = [StoreKind::Weights, StoreKind::FrozenWeights]
            .map(|kind| self.item(kind).map(|item| &item.layout));
        let ranks = |summing| if is_sharded { self.place(summing).ranks } else { 1 };
        Gathers::new(model, stores, ranks, passes, &self.plan.sharding).map(Some)
    }
}
