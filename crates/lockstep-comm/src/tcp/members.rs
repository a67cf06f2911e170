//! A group as seen by one of its ranks, over sockets.

use crate::GroupName;

/// Members of a group.
#[derive(Debug)]
pub(crate) struct Members {
    pub(crate) name: GroupName,
    /// World ranks of the members, in group order.
    pub(crate) ranks: Vec<usize>,
    /// Index of this rank in `ranks`.
    pub(crate) own: usize,
}

impl Members {
    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    pub(crate) fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.own;
        (0..self.len()).filter(move |member| *member != own)
    }
}
