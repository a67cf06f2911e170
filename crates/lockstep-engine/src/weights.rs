//! Everything in which the weights of a rank's model are kept, and how those that other ranks own get to where kernels read them:
//! after each update (ZeRO stages 1 and 2), or before each use (stage 3, or from a disk).

use std::cell::RefCell;
use std::ops::Range;

use lockstep_model::RecordedModel;
use lockstep_plan::gathering::{Gathers, Sequence};
use lockstep_plan::{Extent, ParameterId, ParameterRecord, StateLayout, StoreKind, ZeroStage};
use lockstep_tensor::{Arena, DiskTraffic, Kernels};

use crate::arriving::Arriving;
use crate::gathered::{Gathered, Own, WeightSource};
use crate::windows::DiskStore;
use crate::{EngineError, FlatStore, Offload, Traffic, Weights, shards::Shards, stores::Stores};

/// The weights of a rank's model.
#[derive(Debug)]
pub(crate) struct ModelWeights {
    /// What kernels read of the trained parameters: all of it, or where these are shared out what this rank owns.
    pub(crate) trained: FlatStore,
    /// What kernels read of the parameters that are not trained, as of those that are; there is nothing else of them.
    pub(crate) frozen: Option<FlatStore>,
    /// f32 weights of the trained parameters, if kernels read another type.
    pub(crate) master: Option<FlatStore>,
    /// The biases by which experts are chosen, in f32 and whole, where what is updated is shared out: every rank moves them alike.
    pub(crate) biases: Option<FlatStore>,
    /// Who owns what.
    pub(crate) shards: Shards,
    /// The optimizer's state that is on disk, master weights and what kernels read among it, and trained weights that are there.
    pub(crate) on_disk: Option<RefCell<DiskStore>>,
    /// Weights on disk that are not trained.
    pub(crate) frozen_on_disk: Option<RefCell<DiskStore>>,
    /// Where parameters that are shared out, or on disk, are whole while they are used.
    pub(crate) gathered: Option<Gathered>,
    /// What other ranks have updated and this one keeps, on its way.
    pub(crate) arriving: Option<Arriving>,
}

impl ModelWeights {
    /// Weights out of `stores`, with those that are gathered before each use as `gathers` plans, where they are.
    ///
    /// # Errors
    /// Out of memory, no room on the disk.
    pub(crate) fn new(
        arena: &Arena,
        model: &RecordedModel,
        layout: &StateLayout,
        (stores, offload): (&mut Stores, &Offload),
        gathers: Option<Gathers>,
        shards: Shards,
    ) -> Result<Self, EngineError> {
        let mut on_disk = stores.file(layout.updated_on_disk(), offload, arena)?;
        let mut frozen_on_disk = stores.file(layout.item(StoreKind::FrozenWeights), offload, arena)?;
        let mut trained = stores.take(StoreKind::Weights).expect("every rank has a store of weights");
        let mut frozen = stores.take(StoreKind::FrozenWeights);
        let arrive = ZeroStage::Optimizer..ZeroStage::Parameters;
        let arriving = arrive.contains(&layout.plan.zero_stage).then(|| Arriving::new(model, &trained));
        let quantized = layout.plan.quantized_weights();
        let gathered = gathers.map(|gathers| {
            let on_disk = [on_disk.as_mut(), frozen_on_disk.as_mut()];
            let own = Own { trained: &mut trained, frozen: frozen.as_mut(), on_disk };
            Gathered::new(arena, gathers, own, &shards, quantized)
        });
        Ok(Self {
            gathered: gathered.transpose()?,
            arriving,
            trained,
            frozen,
            master: stores.take(StoreKind::MasterWeights),
            biases: stores.take(StoreKind::SelectionBiases),
            shards,
            on_disk: on_disk.map(RefCell::new),
            frozen_on_disk: frozen_on_disk.map(RefCell::new),
        })
    }

    /// What is updated: the weights of the trained parameters in the greatest precision there is.
    pub(crate) fn updated(&self) -> &FlatStore {
        self.master.as_ref().unwrap_or(&self.trained)
    }

    /// What holds a parameter in the greatest precision there is.
    pub(crate) fn store_of(&self, record: &ParameterRecord) -> &FlatStore {
        self.frozen.as_ref().filter(|_| !record.trainable).unwrap_or_else(|| self.updated())
    }

    /// What this rank has of the trained weights that other ranks have copies of.
    pub(crate) fn copied(&mut self) -> &mut FlatStore {
        match &mut self.master {
            Some(master) if self.shards.stage() == ZeroStage::Nothing && !master.is_partly_on_disk() => {
                master
            }
            _ => &mut self.trained,
        }
    }

    /// Which elements of a parameter, in one range, this rank keeps in any precision.
    pub(crate) fn kept_range(&self, record: &ParameterRecord, id: ParameterId) -> Range<usize> {
        let of_kernels = self.frozen.as_ref().filter(|_| !record.trainable).unwrap_or(&self.trained);
        let is_whole = self.biases.as_ref().is_some_and(|store| store.kept_part(id).is_some());
        match of_kernels.extent() {
            Extent::Own if !is_whole => of_kernels.owned_range(id),
            _ => 0..record.local_elements(),
        }
    }

    /// Replaces the elements from `start` on of a parameter, in every precision in which it is kept.
    pub(crate) fn write(&self, record: &ParameterRecord, id: ParameterId, start: usize, values: &[f32]) {
        self.store_of(record).write_part(id, start, values);
        if record.trainable && self.master.is_some() {
            self.trained.write_part(id, start, values);
        }
        if let Some(biases) = &self.biases {
            biases.write_part(id, start, values);
        }
    }

    /// Rounds what this rank owns of a trained parameter's master copy, if there is one, to what kernels read.
    pub(crate) fn round(&self, queue: &dyn Kernels, id: ParameterId) {
        if let Some(master) = self.master.as_ref().and_then(|store| store.part(id))
            && let Some(rounded) = self.trained.part(id)
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
        let Self { trained, shards, arriving: Some(arriving), .. } = self else { return Ok(()) };
        Ok(arriving.begin(trained, shards)?)
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
        stores.map(|store| store.borrow().len_bytes()).sum()
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
        let Self { trained, frozen, shards, gathered, arriving, on_disk, frozen_on_disk, .. } = self;
        match (gathered, arriving) {
            (Some(gathered), _) => {
                let on_disk = [on_disk, frozen_on_disk].map(|store| store.as_mut().map(RefCell::get_mut));
                let own = &mut Own { trained, frozen: frozen.as_mut(), on_disk };
                gathered.make_ready(queue, unit, own, shards)
            }
            (None, Some(arriving)) => Ok(arriving.wait_for(unit, shards)?),
            (None, None) => Ok(()),
        }
    }

    fn weights(&self) -> Weights<'_> {
        Weights {
            trained: &self.trained,
            gathered: self.gathered.as_ref(),
            frozen: self.frozen.as_ref(),
            exact: self.biases.as_ref().or(self.master.as_ref()),
        }
    }
}
