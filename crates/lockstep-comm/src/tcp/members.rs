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
    /// Members in the order of their world ranks; empty if `ranks` ascends.
    by_rank: Vec<u32>,
}

impl Members {
    /// Returns the members with these world ranks, as `ranks[own]` sees them.
    pub(crate) fn new(name: GroupName, ranks: Vec<usize>, own: usize) -> Self {
        let mut by_rank = Vec::new();
        if !ranks.is_sorted() {
            by_rank.extend(0..ranks.len() as u32);
            by_rank.sort_unstable_by_key(|member| ranks[*member as usize]);
        }
        Self { name, ranks, own, by_rank }
    }

    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the index of a world rank in the group; `None` if it is no member.
    pub(crate) fn index_of(&self, rank: usize) -> Option<usize> {
        // In the group of all ranks each is where its number says.
        if self.ranks.get(rank) == Some(&rank) {
            return Some(rank);
        }
        if self.by_rank.is_empty() {
            return self.ranks.binary_search(&rank).ok();
        }
        let found = self.by_rank.binary_search_by_key(&rank, |member| self.ranks[*member as usize]).ok()?;
        Some(self.by_rank[found] as usize)
    }

    pub(crate) fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.own;
        (0..self.len()).filter(move |member| *member != own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_member_is_found_by_its_rank_and_nobody_else_is() {
        for ranks in
            [vec![0, 1, 2, 3], vec![3, 5, 9], vec![9, 3, 5], vec![2, 1, 0], vec![4], vec![1, 0, 7, 3, 5]]
        {
            let name = GroupName { index: 1, first: 0, size: ranks.len() as u32 };
            let members = Members::new(name, ranks.clone(), 0);
            for rank in 0..12 {
                let expected = ranks.iter().position(|other| *other == rank);
                assert_eq!(members.index_of(rank), expected, "rank {rank} of {ranks:?}");
            }
        }
    }
}
