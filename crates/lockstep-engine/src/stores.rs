//! The stores of a rank's weights and of its optimizer's state, all zero: what of them is in memory, whole or the own part, and what
//! is on disk.

use lockstep_model::RecordedModel;
use lockstep_plan::{DType, Extent, MemoryCategory, ParameterRecord, StoreLayout, ZeroStage};
use lockstep_tensor::{Arena, TensorError};

use crate::optimizer::Role;
use crate::shards::Shards;
use crate::windows::{DiskStore, Section};
use crate::{EngineError, FlatStore, Optimizer, StateKind, Storage};

/// The stores of a rank.
#[derive(Debug)]
pub(crate) struct Stores {
    /// What kernels read of the trained parameters.
    pub(crate) trained: FlatStore,
    /// What they read of the others.
    pub(crate) frozen: Option<FlatStore>,
    /// f32 weights of the trained parameters, if kernels read another type.
    pub(crate) master: Option<FlatStore>,
    /// The biases by which experts are chosen, in f32 and whole, where what is updated is not.
    pub(crate) biases: Option<FlatStore>,
    /// What the optimizer keeps.
    pub(crate) optimizer: Vec<(StateKind, FlatStore)>,
    /// What is on disk of the trained parameters.
    pub(crate) on_disk: Option<DiskStore<Section>>,
    /// What is there of the others.
    pub(crate) frozen_on_disk: Option<DiskStore<Section>>,
    /// Of which units what is trained has its state on disk.
    pub(crate) units_on_disk: Vec<bool>,
}

/// What a rank keeps.
#[derive(Clone, Copy)]
pub(crate) struct Keeper<'a> {
    pub(crate) arena: &'a Arena,
    pub(crate) model: &'a RecordedModel,
    /// As this rank sees them.
    pub(crate) records: &'a [ParameterRecord],
    /// Which units are on this rank.
    pub(crate) is_here: &'a [bool],
    pub(crate) shards: &'a Shards,
    pub(crate) storage: &'a Storage,
    pub(crate) optimizer: Optimizer,
    /// The type that kernels read.
    pub(crate) dtype: DType,
    /// Whether f32 weights are kept beside those that they read.
    pub(crate) has_master: bool,
}

impl Keeper<'_> {
    /// All stores.
    ///
    /// # Errors
    /// Out of memory, no room on the disk.
    pub(crate) fn zeros(self) -> Result<Stores, EngineError> {
        let is_trained = |record: &ParameterRecord| record.trainable && self.is_here[record.unit];
        let is_frozen = |record: &ParameterRecord| !record.trainable && self.is_here[record.unit];
        let alone = Shards::none();
        let of_parameters = self.shared_out(ZeroStage::Parameters);
        let owners_of_frozen = if of_parameters == Extent::Own { self.shards } else { &alone };
        let units_on_disk = self.units_on_disk(self.shards, is_trained);
        let frozen_on_disk = self.units_on_disk(owners_of_frozen, is_frozen);
        let (reads_from_disk, of_kernels) =
            (self.has_weights_on_disk(), (self.dtype, MemoryCategory::Parameters));
        // Parameters come first: a model that is too large is refused for them.
        let is_there = |unit: usize, _: bool| reads_from_disk && units_on_disk[unit];
        let trained = self.store(of_kernels, self.shards, of_parameters, is_trained, is_there)?;
        let is_there = |unit: usize, _: bool| reads_from_disk && frozen_on_disk[unit];
        let frozen = self.store(of_kernels, owners_of_frozen, of_parameters, is_frozen, is_there)?;
        let in_optimizer = |dtype| (dtype, MemoryCategory::Optimizer);
        let of_optimizer = self.shared_out(ZeroStage::Optimizer);
        let of_state = |dtype, keeps: &dyn Fn(&ParameterRecord) -> bool| {
            let is_there = |unit: usize, _: bool| units_on_disk[unit];
            self.store(in_optimizer(dtype), self.shards, of_optimizer, keeps, is_there)
        };
        let master = self.has_master.then(|| of_state(DType::F32, &is_trained)).transpose()?;
        let mut optimizer = Vec::new();
        for kind in StateKind::OF_OPTIMIZERS {
            let kinds_of =
                |record: &ParameterRecord| self.optimizer.state_kinds(Role::of(record, self.model.units()));
            let keeps = |record: &ParameterRecord| is_trained(record) && kinds_of(record).contains(&kind);
            let store = of_state(self.storage.state, &keeps)?;
            optimizer.extend((!store.is_empty()).then_some((kind, store)));
        }
        let updated = if self.has_master { of_optimizer } else { of_parameters };
        let is_bias = |record: &ParameterRecord| {
            let bias = self.model.selection_bias(record.unit).filter(|_| is_trained(record));
            bias.is_some_and(|id| self.records[id.0].name == record.name)
        };
        let biases = (updated == Extent::Own || self.storage.offload.plan().is_some())
            .then(|| self.store(in_optimizer(DType::F32), &alone, Extent::Whole, is_bias, |_, _| false))
            .transpose()?;
        Ok(Stores {
            on_disk: self.on_disk(&trained, master.as_ref(), &optimizer)?,
            frozen_on_disk: self.weights_on_disk(&frozen)?,
            trained,
            frozen: (!frozen.is_empty()).then_some(frozen),
            master,
            biases: biases.filter(|store| !store.is_empty()),
            optimizer,
            units_on_disk,
        })
    }

    /// Whether weights that kernels read are on disk.
    pub(crate) fn has_weights_on_disk(self) -> bool {
        self.storage.offload.plan().is_some_and(|disk| disk.has_parameters)
    }

    /// How much of a store is here that is shared out from a stage on.
    pub(crate) fn shared_out(self, from: ZeroStage) -> Extent {
        if self.shards.stage() >= from { Extent::Own } else { Extent::Whole }
    }

    fn units_on_disk(self, owners: &Shards, is_kept: impl Fn(&ParameterRecord) -> bool) -> Vec<bool> {
        let share = self.storage.offload.plan().map_or(0.0, |disk| disk.share);
        let place = |summing| owners.place(summing);
        let keeps = |index: usize| is_kept(&self.records[index]);
        StoreLayout::new(self.records, Extent::Own, place, keeps).units_on_disk(share)
    }

    fn store(
        self,
        kind: (DType, MemoryCategory),
        owners: &Shards,
        extent: Extent,
        keeps: impl Fn(&ParameterRecord) -> bool,
        is_on_disk: impl Fn(usize, bool) -> bool,
    ) -> Result<FlatStore, TensorError> {
        FlatStore::zeros_but(self.arena, self.records, kind, owners, extent, keeps, is_on_disk)
    }

    /// Everything that an update reads and writes of what is on disk, beside each other.
    fn on_disk(
        self,
        trained: &FlatStore,
        master: Option<&FlatStore>,
        optimizer: &[(StateKind, FlatStore)],
    ) -> Result<Option<DiskStore<Section>>, EngineError> {
        let weights = trained.is_partly_on_disk().then_some(trained);
        let read_by_kernels =
            if master.is_some() { Section::Rounded } else { Section::State(StateKind::Parameter) };
        let weights = weights.into_iter().map(|store| (read_by_kernels, store));
        let updated = master.into_iter().map(|store| (Section::State(StateKind::Parameter), store));
        let kept = optimizer.iter().map(|(kind, store)| (Section::State(*kind), store));
        let stores: Vec<(Section, &FlatStore)> = weights.chain(updated).chain(kept).collect();
        let Some((_, layout)) = stores.first() else { return Ok(None) };
        let sections = stores.iter().map(|(section, store)| (*section, store.dtype())).collect();
        DiskStore::zeros(&self.storage.offload, layout, sections, self.arena)
    }

    /// Weights that no update changes.
    fn weights_on_disk(self, frozen: &FlatStore) -> Result<Option<DiskStore<Section>>, EngineError> {
        let sections = vec![(Section::State(StateKind::Parameter), frozen.dtype())];
        DiskStore::zeros(&self.storage.offload, frozen, sections, self.arena)
    }
}
