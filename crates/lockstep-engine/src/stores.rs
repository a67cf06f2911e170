//! The flat stores of a rank, as its [`StateLayout`] lists them.

use lockstep_plan::{StateItem, StateLayout, StoreKind};
use lockstep_tensor::{Arena, TensorError};

use crate::windowed_store::WindowedStore;
use crate::{EngineError, FlatStore, Offload};

/// Flat stores by kind. Gradients and their residual are there until [`Gradients`](crate::Gradients) takes them.
#[derive(Debug)]
pub(crate) struct Stores(Vec<(StoreKind, FlatStore)>);

impl Stores {
    /// Zeros for every store of `layout`, in its order: weights come first, so that a model that is too large is refused for them.
    ///
    /// # Errors
    /// Out of memory.
    pub(crate) fn zeros(arena: &Arena, layout: &StateLayout) -> Result<Self, TensorError> {
        let store = |item: &StateItem| Ok((item.kind, FlatStore::zeros_of(arena, &layout.records, item)?));
        layout.items.iter().map(store).collect::<Result<_, _>>().map(Self)
    }

    /// Takes the store of a kind, if the rank has one.
    pub(crate) fn take(&mut self, kind: StoreKind) -> Option<FlatStore> {
        let index = self.0.iter().position(|(other, _)| *other == kind)?;
        Some(self.0.remove(index).1)
    }

    /// The store of a kind, if the rank has one.
    pub(crate) fn get(&self, kind: StoreKind) -> Option<&FlatStore> {
        self.0.iter().find(|(other, _)| *other == kind).map(|(_, store)| store)
    }

    /// See [`Stores::get`].
    pub(crate) fn get_mut(&mut self, kind: StoreKind) -> Option<&mut FlatStore> {
        self.iter_mut().find(|(other, _)| *other == kind).map(|(_, store)| store)
    }

    /// All stores, with their kinds.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (StoreKind, &mut FlatStore)> {
        self.0.iter_mut().map(|(kind, store)| (*kind, store))
    }

    /// The trained weights that kernels read: all of them, or where these are sharded what this rank owns.
    pub(crate) fn trained(&self) -> &FlatStore {
        self.get(StoreKind::Weights).expect("every rank has a store of weights")
    }

    /// The f32 weights in memory, if kernels read another type.
    pub(crate) fn master(&self) -> Option<&FlatStore> {
        self.get(StoreKind::MasterWeights)
    }

    /// The biases by which experts are chosen, where they are kept apart.
    pub(crate) fn biases(&self) -> Option<&FlatStore> {
        self.get(StoreKind::SelectionBiases)
    }

    /// The weights that are updated: those of the trained parameters in the greatest precision there is.
    pub(crate) fn updated(&self) -> &FlatStore {
        self.master().unwrap_or_else(|| self.trained())
    }

    /// The file of some of the stores, window by window beside each other; `None` if all of them are in memory.
    ///
    /// # Errors
    /// No room on the disk or in memory.
    pub(crate) fn file<'a>(
        &self,
        items: impl IntoIterator<Item = &'a StateItem>,
        offload: &Offload,
        arena: &Arena,
    ) -> Result<Option<WindowedStore>, EngineError> {
        let kinds: Vec<_> = items.into_iter().map(|item| (item.kind, item.dtype)).collect();
        let Some(store) = kinds.first().and_then(|(kind, _)| self.get(*kind)) else { return Ok(None) };
        WindowedStore::zeros(offload, store, kinds, arena)
    }
}
