//! The state of a rank as a list: each flat store that lasts from step to step, with its type, its extent, its residence and its category.
//!
//! The list is made once, from the recorded model, the rank's stages and a [`StatePlan`]. The engine allocates it, the prediction of
//! memory and the traffic of offloaded state sum it, and copies of the state for checkpoints follow it. No other place decides which
//! stores exist, which of them are sharded, or what of them is offloaded.

use super::{MemoryCategory, ModelProfile, RecordPassage, SharedTable, StageMemory, StatePlan, StoreLayout};
use crate::gathering::{Gathers, RankPasses, TooFewLive};
use crate::{
    DType, Extent, Feedback, ParameterId, ParameterRecord, QuantizedType, ShardPlace, StateBytes, StateKind,
    Summing, ZeroStage,
};

/// A kind of flat store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoreKind {
    /// Trained weights in the type that kernels read.
    Weights,
    /// Frozen weights in the same type.
    FrozenWeights,
    /// f32 weights that the optimizer step changes, where kernels read another type.
    MasterWeights,
    /// One of the optimizer's numbers of each element.
    Optimizer(StateKind),
    /// Biases that choose experts, f32 and whole, where the weights that are updated are sharded or offloaded: every rank moves them alike.
    SelectionBiases,
    /// Sums of gradients, f32.
    Gradients,
    /// Quantization errors of this rank's gradients, which it adds to the next ones.
    GradientResidual,
}

impl StoreKind {
    /// The name in listings of memory.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Weights => "trained weights",
            Self::FrozenWeights => "frozen weights",
            Self::MasterWeights => "f32 master weights",
            Self::Optimizer(kind) => kind.name(),
            Self::SelectionBiases => "biases that choose experts",
            Self::Gradients => "sums of gradients",
            Self::GradientResidual => "what gradients lost",
        }
    }

    /// The category that the store is booked under.
    pub const fn category(self) -> MemoryCategory {
        match self {
            Self::Weights | Self::FrozenWeights => MemoryCategory::Parameters,
            Self::MasterWeights | Self::Optimizer(_) | Self::SelectionBiases => MemoryCategory::Optimizer,
            Self::Gradients => MemoryCategory::Gradients,
            Self::GradientResidual => MemoryCategory::Communication,
        }
    }

    /// The ZeRO stage from which on the store is sharded; `None` if every rank has it whole.
    const fn sharded_from(self) -> Option<ZeroStage> {
        match self {
            Self::Weights | Self::FrozenWeights => Some(ZeroStage::Parameters),
            Self::MasterWeights | Self::Optimizer(_) => Some(ZeroStage::Optimizer),
            Self::Gradients => Some(ZeroStage::Gradients),
            Self::SelectionBiases | Self::GradientResidual => None,
        }
    }
}

impl StatePlan {
    /// The kinds of stores of ranks whose weights are of `dtype`, each with its type, in the order in which they are allocated.
    fn stores(&self, dtype: DType) -> Vec<(StoreKind, DType)> {
        let updated = if self.facts.has_master { ZeroStage::Optimizer } else { ZeroStage::Parameters };
        let mut stores = vec![(StoreKind::Weights, dtype), (StoreKind::FrozenWeights, dtype)];
        stores.extend(self.facts.has_master.then_some((StoreKind::MasterWeights, DType::F32)));
        let kept = self.facts.optimizer_keeps.iter();
        stores.extend(kept.map(|(kind, _)| (StoreKind::Optimizer(*kind), self.facts.optimizer_dtype)));
        if self.zero_stage >= updated || self.on_disk.is_some() {
            stores.push((StoreKind::SelectionBiases, DType::F32));
        }
        stores.push((StoreKind::Gradients, DType::F32));
        if self.quantized_gradients().is_some() && self.quantization.feedback == Feedback::Kept {
            stores.push((StoreKind::GradientResidual, DType::BF16));
        }
        stores
    }

    /// Bytes of the state of one element, of weights of `dtype`: by the stores that every trained parameter has a part in.
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

    /// The parameters of which the optimizer keeps a number.
    fn keeps(&self, kind: StateKind) -> &[bool] {
        self.facts.optimizer_keeps.iter().find(|(kept, _)| *kept == kind).map_or(&[], |(_, keeps)| keeps)
    }

    /// The codes in which gradients go to their owners, if they are quantized.
    pub(super) fn quantized_gradients(&self) -> Option<QuantizedType> {
        self.quantization.gradients.filter(|_| self.zero_stage > ZeroStage::Nothing)
    }

    /// The codes in which weights are gathered, if they are quantized.
    pub fn quantized_weights(&self) -> Option<QuantizedType> {
        self.quantization.weights.filter(|_| self.zero_stage >= ZeroStage::Parameters)
    }

    /// Whether gradients leave for where they are kept as soon as they are complete.
    pub fn hands_gradients_on(&self) -> bool {
        self.zero_stage >= ZeroStage::Gradients || self.on_disk.is_some_and(|disk| disk.has_gradients)
    }
}

/// A flat store of model state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateItem {
    /// The kind of store.
    pub kind: StoreKind,
    /// Type of the elements.
    pub dtype: DType,
    /// The elements of each stretch that the store has: all, or those that the rank owns.
    pub extent: Extent,
    /// The parameters by unit and stretch. A stretch says who owns it, and whether it is offloaded.
    pub layout: StoreLayout,
}

impl StateItem {
    /// Bytes that the store books.
    pub fn booked_bytes(&self) -> usize {
        self.layout.booked_bytes(self.dtype)
    }
}

/// The model state of a rank.
#[derive(Debug, Clone, PartialEq)]
pub struct StateLayout {
    /// The plan that the list follows from, with the ZeRO stage that takes effect: nobody shards what a rank has alone.
    pub plan: StatePlan,
    /// The model's parameters as this rank sees them: in the buffers of the plan, and with a table of the rank's own where both ends share it.
    pub records: Vec<ParameterRecord>,
    /// True for units that are on this rank.
    pub is_here: Vec<bool>,
    /// The table that an embedding and an output layer on two ranks share.
    pub shared_table: Option<SharedTable>,
    /// The rank's place in the shard group of each way in which gradients are summed.
    places: Vec<(Summing, ShardPlace)>,
    /// The stores, in the order in which they are allocated. Stores of no parameter are left out, but for weights and gradients.
    pub items: Vec<StateItem>,
}

/// True for units whose trained, and whose frozen, state is offloaded.
type OffloadedUnits = [Vec<bool>; 2];

impl StateLayout {
    /// Lays out the state of a rank with these stages of `model`; `place` is the rank's among those that can shard state whose gradients
    /// are summed so.
    pub fn new(
        model: &ModelProfile,
        stages: &[StageMemory],
        place: impl Fn(Summing) -> ShardPlace,
        state: &StatePlan,
    ) -> Self {
        let is_here = model.is_here(stages);
        let mut records = model.records.clone();
        state.sharding.wrap.apply(&mut records, stages.iter().map(|stage| &stage.units));
        let shared_table = SharedTable::of(&mut records, &is_here);
        let mut places: Vec<(Summing, ShardPlace)> = Vec::new();
        for summing in records.iter().map(|record| Summing::of(&record.share)) {
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

    /// Lays out the state of the first rank of each shard group, which are of the size that `shard_ranks` says: all ranks of a group have as much.
    pub fn of_first_ranks(
        model: &ModelProfile,
        stages: &[StageMemory],
        shard_ranks: impl Fn(Summing) -> usize,
        state: &StatePlan,
    ) -> Self {
        Self::new(model, stages, |summing| ShardPlace { ranks: shard_ranks(summing), rank: 0 }, state)
    }

    /// The units whose state is offloaded, from the first one on.
    fn offloaded_units(&self) -> OffloadedUnits {
        let Some(disk) = self.plan.on_disk else { return [Vec::new(), Vec::new()] };
        [true, false].map(|is_trained| {
            let keeps = |index: usize| self.is_here(index) && self.records[index].trainable == is_trained;
            let place = |summing| self.place(summing);
            StoreLayout::new(&self.records, Extent::Own, place, keeps).units_on_disk(disk.share)
        })
    }

    /// Lays out a store of a kind; that of gradients comes before that of their residual.
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
        let keeps = |index: usize| match kind {
            StoreKind::Weights | StoreKind::MasterWeights | StoreKind::Gradients => is_trained(index),
            StoreKind::FrozenWeights => self.is_here(index) && !records[index].trainable,
            StoreKind::Optimizer(kind) => is_trained(index) && plan.keeps(kind)[index],
            StoreKind::SelectionBiases => {
                let bias = model.units[records[index].unit].selection_bias;
                is_trained(index) && bias.is_some_and(|id| id.0 == index)
            }
            StoreKind::GradientResidual => {
                let place = self.layout_of(StoreKind::Gradients).places[index];
                is_trained(index) && place.is_some_and(|(stretch, _)| self.is_coded(stretch))
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
            StoreKind::SelectionBiases | StoreKind::GradientResidual => false,
        };
        // A rank owns all frozen weights that nobody shards, whatever its place.
        let is_alone = match kind {
            StoreKind::FrozenWeights => !is_sharded,
            kind => kind == StoreKind::SelectionBiases,
        };
        let place = |summing| if is_alone { ShardPlace::default() } else { self.place(summing) };
        let mut layout = StoreLayout::partly_on_disk(records, extent, place, keeps, is_on_disk);
        if kind == StoreKind::GradientResidual {
            // Each rank has errors of its own, of the gradients of all owners.
            layout.stretches.iter_mut().for_each(|stretch| stretch.own = 0..stretch.elements);
        }
        StateItem { kind, dtype, extent, layout }
    }

    /// Whether the unit of a parameter is on this rank.
    fn is_here(&self, index: usize) -> bool {
        self.is_here[self.records[index].unit]
    }

    /// The rank's place among those that shard state whose gradients are summed so.
    pub fn place(&self, summing: Summing) -> ShardPlace {
        self.places
            .iter()
            .find(|(known, _)| *known == summing)
            .map_or_else(ShardPlace::default, |known| known.1)
    }

    /// The store of a kind, if the rank has one.
    pub fn item(&self, kind: StoreKind) -> Option<&StateItem> {
        self.items.iter().find(|item| item.kind == kind)
    }

    /// The layout of a store that every rank has: of trained weights or of gradients.
    pub(super) fn layout_of(&self, kind: StoreKind) -> &StoreLayout {
        &self.item(kind).expect("every rank has stores of weights and of gradients").layout
    }

    /// The stores that a checkpoint or a copy of the state holds.
    pub fn saved(&self) -> impl Iterator<Item = &StateItem> {
        let updated = if self.plan.facts.has_master { StoreKind::MasterWeights } else { StoreKind::Weights };
        self.items.iter().filter(move |item| match item.kind {
            StoreKind::Weights | StoreKind::MasterWeights => item.kind == updated,
            StoreKind::Optimizer(_) | StoreKind::SelectionBiases | StoreKind::GradientResidual => true,
            StoreKind::FrozenWeights | StoreKind::Gradients => false,
        })
    }

    /// The stores that lie on disk beside each other, window by window, for the optimizer step; none if all are in memory.
    pub fn updated_on_disk(&self) -> impl Iterator<Item = &StateItem> {
        let on_disk = self.plan.on_disk;
        self.items.iter().filter(move |item| match item.kind {
            StoreKind::Weights => on_disk.is_some_and(|disk| disk.has_parameters),
            StoreKind::MasterWeights | StoreKind::Optimizer(_) => on_disk.is_some(),
            _ => false,
        })
    }

    /// The stores of each file on disk, as one layout and the types that lie beside each other: of the optimizer step, of gradients, and of
    /// frozen weights.
    pub(super) fn files(&self) -> [Option<(&StoreLayout, Vec<DType>)>; 3] {
        fn beside<'a>(items: impl Iterator<Item = &'a StateItem>) -> Option<(&'a StoreLayout, Vec<DType>)> {
            let mut items = items.peekable();
            let layout = &items.peek()?.layout;
            Some((layout, items.map(|item| item.dtype).collect()))
        }
        let alone = |kind| beside(self.item(kind).into_iter());
        [beside(self.updated_on_disk()), alone(StoreKind::Gradients), alone(StoreKind::FrozenWeights)]
    }

    /// Whether a stretch of the gradients is sent as codes: neither one that nobody shards, nor a table that is summed over stages as well.
    pub fn is_coded(&self, stretch: usize) -> bool {
        let gradients = self.layout_of(StoreKind::Gradients);
        let of_table = self.shared_table.and_then(|table| gradients.places[table.id.0]);
        let is_table = of_table.is_some_and(|(of_table, _)| of_table == stretch);
        self.place(gradients.stretches[stretch].summing).ranks > 1 && !is_table
    }

    /// Staging of the codes of gradients, if they are quantized.
    pub fn record_passage(&self) -> Option<(QuantizedType, RecordPassage)> {
        let passage = |stretch| self.is_coded(stretch);
        let gradients = self.layout_of(StoreKind::Gradients);
        let kind = self.plan.quantized_gradients()?;
        Some((kind, gradients.record_passage(self.plan.replicas, passage)))
    }

    /// The output layers whose table an embedding in another unit of this rank shares, and that table.
    pub fn tied_tables(&self) -> impl Iterator<Item = (ParameterId, ParameterId)> {
        let is_trained = |index: usize| self.is_here(index) && self.records[index].trainable;
        self.records.iter().enumerate().filter_map(move |(index, record)| {
            let table = record.tie.filter(|_| is_trained(index))?;
            (self.records[table.0].unit != record.unit).then_some((ParameterId(index), table))
        })
    }

    /// The weights that are whole while units work with them, and when; `None` where all are where kernels read them.
    ///
    /// # Errors
    /// If the limit on live parameters leaves no room for a unit's weights.
    pub fn gathers(&self, model: &ModelProfile, passes: &RankPasses) -> Result<Option<Gathers>, TooFewLive> {
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
