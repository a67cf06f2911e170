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

    /// Returns the index of a world rank in the group; `None` if it is no member.
    pub(crate) fn index_of(&self, rank: usize) -> Option<usize> {
        // In the group of all ranks each is where its number says.
        let is_there = self.ranks.get(rank) == Some(&rank);
        if is_there { Some(rank) } else { self.ranks.iter().position(|other| *other == rank) }
    }

    pub(crate) fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.own;
        (0..self.len()).filter(move |member| *member != own)
    }
}
