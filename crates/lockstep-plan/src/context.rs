//! Split of each sequence over the context-parallel ranks.
//!
//! Under a causal mask late tokens attend to more keys than early ones. So each rank has two chunks of a sequence, at equal distances
//! from its beginning and its end, and all ranks have the same work:
//!
//! ```text
//! 2 ranks   0 1 1 0
//! 4 ranks   0 1 2 3 3 2 1 0
//! ```
//!
//! All-to-all attention works on whole sequences, so each rank has one contiguous chunk.

use std::ops::Range;

use crate::named_enum::named_enum;

named_enum! {
    /// Algorithm by which attention reads the keys and values of other context-parallel ranks.
    #[derive(Default)]
    pub enum ContextMethod {
        /// Ring attention: keys and values travel round the ranks (Liu et al. 2023). Each rank has one early and one late chunk of the
        /// sequence, which balances the causal mask.
        #[default]
        Ring = "ring",
        /// All-gather: every rank gathers all keys and values. The sequence is split as for the ring.
        AllGather = "all_gather",
        /// All-to-all: ranks switch from sequence shards to head shards for attention (DeepSpeed-Ulysses, Jacobs et al. 2023).
        AllToAll = "all_to_all",
    }
}

/// A rank's position in the context-parallel group, and the attention algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContextPlace {
    /// Degree of context parallelism.
    pub ranks: usize,
    /// Rank within the group.
    pub rank: usize,
    /// Algorithm of context-parallel attention, which decides how sequences are split.
    pub method: ContextMethod,
}

impl Default for ContextPlace {
    /// A group of one rank.
    fn default() -> Self {
        Self { ranks: 1, rank: 0, method: ContextMethod::default() }
    }
}

impl ContextPlace {
    /// Returns the number of tokens of a sequence on each rank.
    ///
    /// # Panics
    /// If `seq_len` is not a multiple of the number of chunks that the algorithm needs.
    pub fn held(&self, seq_len: usize) -> usize {
        let Self { ranks, .. } = *self;
        let parts = if self.is_folded() { 2 * ranks } else { ranks };
        assert!(seq_len.is_multiple_of(parts), "{seq_len} tokens are not split evenly into {parts} parts");
        seq_len / ranks
    }

    /// Returns the ratio of tokens that a rank attends with to tokens that it holds: the group size for all-to-all, otherwise 1.
    pub fn attended(&self) -> usize {
        if self.method == ContextMethod::AllToAll { self.ranks } else { 1 }
    }

    /// Returns the number of contiguous chunks of each sequence on a rank.
    pub fn pieces(&self) -> usize {
        if self.is_folded() { 2 } else { 1 }
    }

    /// Returns the position in the sequence of chunk `index` of `rank`, in chunks.
    pub fn piece_place(&self, rank: usize, index: usize) -> usize {
        if index == 1 { 2 * self.ranks - 1 - rank } else { rank }
    }

    /// Returns the first token in the sequence of each half of `rank`'s tokens. The halves are consecutive in its tensors: the second
    /// begins at local token `held / 2`.
    pub fn halves_of(&self, rank: usize, seq_len: usize) -> [usize; 2] {
        let (held, half) = (self.held(seq_len), self.held(seq_len) / 2);
        if self.is_folded() {
            [rank * half, (2 * self.ranks - 1 - rank) * half]
        } else {
            [rank * held, rank * held + half]
        }
    }

    /// Returns the first token in the sequence of each half of this rank's tokens.
    pub fn halves(&self, seq_len: usize) -> [usize; 2] {
        self.halves_of(self.rank, seq_len)
    }

    /// Returns the ranges of this rank's tokens in a micro-batch `[sequences · seq_len]`, in local order.
    pub fn token_ranges(
        &self,
        sequences: usize,
        seq_len: usize,
    ) -> impl Iterator<Item = Range<usize>> + Clone + use<> {
        let (held, halves) = (self.held(seq_len), self.halves(seq_len));
        let lengths = [held / 2, held - held / 2];
        (0..sequences).flat_map(move |sequence| {
            [0, 1].map(|half| {
                let start = sequence * seq_len + halves[half];
                start..start + lengths[half]
            })
        })
    }

    /// Returns true if each rank has an early and a late chunk of a sequence.
    fn is_folded(&self) -> bool {
        self.ranks > 1 && self.method != ContextMethod::AllToAll
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const METHODS: [ContextMethod; 3] =
        [ContextMethod::Ring, ContextMethod::AllGather, ContextMethod::AllToAll];

    proptest! {
        #[test]
        fn every_token_is_held_once(ranks in 1_usize..6, piece in 1_usize..5, sequences in 1_usize..4) {
            for method in METHODS {
                let seq_len = 2 * ranks * piece;
                let mut seen = vec![0; sequences * seq_len];
                for rank in 0..ranks {
                    let place = ContextPlace { ranks, rank, method };
                    let held: usize = place.token_ranges(sequences, seq_len).map(|range| range.len()).sum();
                    prop_assert_eq!(held, sequences * place.held(seq_len));
                    place.token_ranges(sequences, seq_len).flatten().for_each(|token| seen[token] += 1);
                    for (index, first) in place.halves(seq_len).into_iter().take(place.pieces()).enumerate() {
                        let before = place.piece_place(rank, index) * held / (sequences * place.pieces());
                        prop_assert_eq!(before, first);
                    }
                }
                prop_assert!(seen.iter().all(|count| *count == 1), "{:?}: {:?}", method, seen);
            }
        }

        #[test]
        fn folded_ranks_have_as_many_pairs_of_query_and_key(ranks in 1_usize..6, piece in 1_usize..5) {
            let seq_len = 2 * ranks * piece;
            let pairs = |rank| -> usize {
                let place = ContextPlace { ranks, rank, method: ContextMethod::Ring };
                place.token_ranges(1, seq_len).flatten().map(|position| position + 1).sum()
            };
            prop_assert!((1..ranks).all(|rank| pairs(rank) == pairs(0)));
        }
    }

    #[test]
    fn a_rank_alone_holds_all_even_of_odd_sequences() {
        let ranges: Vec<_> = ContextPlace::default().token_ranges(2, 5).collect();
        assert_eq!(ranges, [0..2, 2..5, 5..7, 7..10]);
        let place = ContextPlace { ranks: 2, rank: 1, method: ContextMethod::AllToAll };
        assert_eq!(place.token_ranges(1, 6).collect::<Vec<_>>(), [3..4, 4..6]);
    }
}
