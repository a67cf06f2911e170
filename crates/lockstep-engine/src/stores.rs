//! The flat stores of a rank, as its [`StateLayout`] lists them.

use lockstep_plan::{StateItem, StateLayout, StoreKind};
use lockstep_tensor::{Arena, TensorError};

use crate::windows::DiskStore;
use crate::{EngineError, FlatStore, Offload, StateKind};

/// The stores that no part of the engine has taken yet.
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

    /// Takes what the optimizer keeps.
    pub(crate) fn take_optimizer_state(&mut self) -> Vec<(StateKind, FlatStore)> {
        let kinds = StateKind::OF_OPTIMIZERS.into_iter();
        kinds.filter_map(|kind| Some((kind, self.take(StoreKind::Optimizer(kind))?))).collect()
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
    ) -> Result<Option<DiskStore>, EngineError> {
        let kinds: Vec<_> = items.into_iter().map(|item| (item.kind, item.dtype)).collect();
        let is_first =
            |(kind, _): &&(StoreKind, FlatStore)| kinds.first().is_some_and(|first| first.0 == *kind);
        let Some((_, store)) = self.0.iter().find(is_first) else { return Ok(None) };
        DiskStore::zeros(offload, store, kinds, arena)
    }
}
