//! The weights of a rank's model in every precision, the optimizer's state, and how those that other ranks own get to where kernels read them:
//! after each update (ZeRO stages 1 and 2), or before each use (stage 3, or from a disk).

use std::cell::RefCell;
use std::ops::Range;

use lockstep_model::RecordedModel;
use lockstep_plan::gathering::{Gathers, Sequence};
use lockstep_plan::{Extent, ParameterId, ParameterRecord, StateLayout, StoreKind, ZeroStage};
use lockstep_tensor::{Arena, DiskTraffic, Kernels};

use crate::arriving::Arriving;
use crate::gathered::{Gathered, Own, WeightSource};
use crate::windowed_store::WindowedStore;
use crate::{EngineError, FlatStore, Offload, Traffic, Weights, shards::Shards, stores::Stores};

/// The weights of a rank's model and the optimizer's state.
#[derive(Debug)]
pub(crate) struct ModelWeights {
    /// Weights in every precision in which they are kept, and the optimizer's state, as far as they are in memory.
    pub(crate) stores: Stores,
    /// Who owns what.
    pub(crate) shards: Shards,
    /// The optimizer's state that is on disk, master weights and what kernels read among it, and trained weights that are there.
    pub(crate) on_disk: Option<RefCell<WindowedStore>>,
    /// Weights on disk that are not trained.
    pub(crate) frozen_on_disk: Option<RefCell<WindowedStore>>,
    /// Where parameters that are shared out, or on disk, are whole while they are used.
    pub(crate) gathered: Option<Gathered>,
    /// What other ranks have updated and this one keeps, on its way.
    pub(crate) arriving: Option<Arriving>,
}

impl ModelWeights {
    /// Weights and optimizer state in `stores`, with weights that are gathered before each use where `gathers` plans it.
    ///
    /// # Errors
    /// Out of memory, no room on the disk.
    pub(crate) fn new(
        arena: &Arena,
        model: &RecordedModel,
        layout: &StateLayout,
        (mut stores, offload): (Stores, &Offload),
        gathers: Option<Gathers>,
        shards: Shards,
    ) -> Result<Self, EngineError> {
        let mut on_disk = stores.file(layout.updated_on_disk(), offload, arena)?;
        let mut frozen_on_disk = stores.file(layout.item(StoreKind::FrozenWeights), offload, arena)?;
        let arrive = ZeroStage::Optimizer..ZeroStage::Parameters;
        let arriving =
            arrive.contains(&layout.plan.zero_stage).then(|| Arriving::new(model, stores.trained()));
        let quantized = layout.plan.quantized_weights();
        let gathered = gathers.map(|gathers| {
            let on_disk = [on_disk.as_mut(), frozen_on_disk.as_mut()];
            Gathered::new(arena, gathers, Own { stores: &mut stores, on_disk }, &shards, quantized)
        });
        Ok(Self {
            gathered: gathered.transpose()?,
            arriving,
            stores,
            shards,
            on_disk: on_disk.map(RefCell::new),
            frozen_on_disk: frozen_on_disk.map(RefCell::new),
        })
    }

    /// The frozen weights, if the parameter is frozen.
    fn frozen(&self, record: &ParameterRecord) -> Option<&FlatStore> {
        self.stores.get(StoreKind::FrozenWeights).filter(|_| !record.trainable)
    }

    /// What holds a parameter in the greatest precision there is.
    pub(crate) fn store_of(&self, record: &ParameterRecord) -> &FlatStore {
        self.frozen(record).unwrap_or_else(|| self.stores.updated())
    }

    /// What this rank has of the trained weights that other ranks have copies of.
    pub(crate) fn copied(&mut self) -> &mut FlatStore {
        let is_whole = self.shards.stage() == ZeroStage::Nothing;
        let is_master = self.stores.master().is_some_and(|master| is_whole && !master.is_partly_on_disk());
        let kind = if is_master { StoreKind::MasterWeights } else { StoreKind::Weights };
        self.stores.get_mut(kind).expect("every rank has a store of weights")
    }

    /// Which elements of a parameter, in one range, this rank keeps in any precision.
    pub(crate) fn kept_range(&self, record: &ParameterRecord, id: ParameterId) -> Range<usize> {
        let of_kernels = self.frozen(record).unwrap_or_else(|| self.stores.trained());
        let biases = self.stores.biases();
        let is_whole = biases.is_some_and(|store| store.kept_part(id).is_some());
        match of_kernels.extent() {
            Extent::Own if !is_whole => of_kernels.owned_range(id),
            _ => 0..record.local_elements(),
        }
    }

    /// Replaces the elements from `start` on of a parameter, in every precision in which it is kept.
    pub(crate) fn write(&self, record: &ParameterRecord, id: ParameterId, start: usize, values: &[f32]) {
        self.store_of(record).write_part(id, start, values);
        if record.trainable && self.stores.master().is_some() {
            self.stores.trained().write_part(id, start, values);
        }
        if let Some(biases) = self.stores.biases() {
            biases.write_part(id, start, values);
        }
    }

    /// Rounds what this rank owns of a trained parameter's master copy, if there is one, to what kernels read.
    pub(crate) fn round(&self, queue: &dyn Kernels, id: ParameterId) {
        if let Some(master) = self.stores.master().and_then(|store| store.part(id))
            && let Some(rounded) = self.stores.trained().part(id)
        {
            queue.cast(master.view, rounded.view);
        }
    }

    /// The weights have changed, on each rank those that it owns: begins to bring those of the others up to date, as far as they are
    /// kept. Until [`ModelWeights::settle`] nobody but the units' passes may read or write them.
    ///
    /// # Errors
    /// [`EngineError`]: none on one rank.
    pub(crate) fn refresh(&mut self) -> Result<(), EngineError> {
        let Self { stores, shards, arriving: Some(arriving), .. } = self else { return Ok(()) };
        let weights = stores.get_mut(StoreKind::Weights);
        Ok(weights.map_or(Ok(()), |weights| arriving.begin(weights, shards))?)
    }

    /// Waits until the weights are what the last update has made them, as far as they are kept.
    ///
    /// # Errors
    /// [`EngineError`]: none on one rank.
    pub(crate) fn settle(&mut self) -> Result<(), EngineError> {
        Ok(self.arriving.as_mut().map_or(Ok(()), |arriving| arriving.wait_for_all(&self.shards))?)
    }

    /// A sequence of uses begins.
    pub(crate) fn begin(&mut self, sequence: Sequence) {
        if let Some(gathered) = &mut self.gathered {
            gathered.begin(sequence);
        }
    }

    /// Bytes of the files that it has.
    pub(crate) fn disk_bytes(&self) -> u64 {
        let stores = [&self.on_disk, &self.frozen_on_disk].into_iter().flatten();
        stores.map(|store| store.borrow().disk_bytes()).sum()
    }

    /// What has been read from them and written since this was last asked.
    pub(crate) fn take_disk_traffic(&mut self) -> DiskTraffic {
        let stores = [&mut self.on_disk, &mut self.frozen_on_disk].into_iter().flatten();
        let traffic = stores.map(|store| store.get_mut().take_traffic());
        traffic.fold(DiskTraffic::default(), |sum, traffic| sum + traffic)
    }

    /// What gathering has cost since this was last asked.
    pub(crate) fn take_traffic(&mut self) -> Traffic {
        let before_use = self.gathered.as_mut().map_or_else(Traffic::default, Gathered::take_traffic);
        self.arriving.as_mut().map_or_else(Traffic::default, Arriving::take_traffic) + before_use
    }
}

impl WeightSource for ModelWeights {
    fn make_ready(&mut self, queue: &dyn Kernels, unit: usize) -> Result<(), EngineError> {
        let Self { stores, shards, gathered, arriving, on_disk, frozen_on_disk } = self;
        match (gathered, arriving) {
            (Some(gathered), _) => {
                let on_disk = [on_disk, frozen_on_disk].map(|store| store.as_mut().map(RefCell::get_mut));
                gathered.make_ready(queue, unit, &mut Own { stores, on_disk }, shards)
            }
            (None, Some(arriving)) => Ok(arriving.wait_for(unit, shards)?),
            (None, None) => Ok(()),
        }
    }

    fn weights(&self) -> Weights<'_> {
        Weights {
            trained: self.stores.trained(),
            gathered: self.gathered.as_ref(),
            frozen: self.stores.get(StoreKind::FrozenWeights),
            exact: self.stores.biases().or_else(|| self.stores.master()),
        }
    }
}
