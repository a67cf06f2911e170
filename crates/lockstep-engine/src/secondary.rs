//! A second copy of gathered weights, shared out among neighbours (the hierarchical partitioning of ZeRO++, hpZ: Wang et al., 2023).
//!
//! What the first gather of a step has brought from all owners is kept once more among a few neighbours, such as the ranks of a machine, a
//! range of each stretch on each of them. Every further gather of the step asks these alone.

use lockstep_comm::Group;
use lockstep_plan::{DType, MemoryCategory, Summing};
use lockstep_tensor::{Arena, Buffer, Kernels, TensorError, View};

use crate::{FlatStore, shards::Shards};

/// What this rank keeps for its neighbours.
#[derive(Debug)]
pub(crate) struct Secondary {
    groups: Vec<(Summing, Group)>,
    buffer: Buffer,
    dtype: DType,
}

/// What of a stretch this rank keeps for its neighbours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SecondaryPart {
    /// The way it is summed, which says who the neighbours are.
    summing: Summing,
    /// Its first element in the stretch.
    first: usize,
    elements: usize,
    /// Its first element among everything that is kept so.
    start: usize,
}

impl Secondary {
    /// Room for so many elements that this rank is to keep for its neighbours, as `shards` has them; nothing is kept yet.
    pub(crate) fn new(
        arena: &Arena,
        shards: &Shards,
        dtype: DType,
        elements: usize,
    ) -> Result<Self, TensorError> {
        let buffer = arena.allocate_zeroed(elements * dtype.size_bytes(), MemoryCategory::Parameters)?;
        Ok(Self { groups: shards.neighbours().to_vec(), buffer, dtype })
    }

    /// What this rank is to keep of a stretch, from an element on; none if nobody shares it out among neighbours.
    pub(crate) fn part(&self, store: &FlatStore, stretch: usize, start: usize) -> Option<SecondaryPart> {
        let stretch = &store.stretches()[stretch];
        let group = self.group(stretch.summing)?;
        let (elements, rank) = (stretch.elements / group.size(), group.rank());
        Some(SecondaryPart { summing: stretch.summing, first: rank * elements, elements, start })
    }

    /// Keeps this rank's part of a stretch, which is `whole` from its first element on: `[elements]`.
    pub(crate) fn keep(&self, queue: &dyn Kernels, part: SecondaryPart, whole: View<'_>) {
        let kept = self.buffer.view(self.dtype, part.start * self.dtype.size_bytes(), [part.elements]);
        queue.cast(whole.rows(part.first..part.first + part.elements), kept);
    }

    /// The neighbours that share out the stretch of a part, and where this one lies.
    pub(crate) fn lend_from(
        &mut self,
        part: SecondaryPart,
    ) -> Option<(Group, &mut Buffer, std::ops::Range<usize>)> {
        let group = self.group(part.summing)?.clone();
        let size = self.dtype.size_bytes();
        Some((group, &mut self.buffer, part.start * size..(part.start + part.elements) * size))
    }

    fn group(&self, summing: Summing) -> Option<&Group> {
        self.groups.iter().find(|(kind, _)| *kind == summing).map(|(_, group)| group)
    }
}
