//! How the ranks of a tensor-parallel axis share a parameter.
//!
//! A rank holds the whole of a parameter, or a range of one of its dimensions. Neighbouring ranks may hold the same (key and
//! value heads fewer than ranks), and what each computes of a gradient may be the gradient or one summand of it.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A rank's place on the tensor-parallel axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorPlace {
    /// Ranks on the axis.
    pub ranks: usize,
    /// Which of them this is.
    pub rank: usize,
    /// Whether values that every rank would hold whole are split by tokens instead (sequence parallelism).
    pub splits_tokens: bool,
}

impl Default for TensorPlace {
    /// Alone.
    fn default() -> Self {
        Self { ranks: 1, rank: 0, splits_tokens: false }
    }
}

impl TensorPlace {
    /// The range of `total` that is this rank's if each has as many as any other.
    ///
    /// # Panics
    /// If the ranks do not divide `total`.
    pub fn even_range(&self, total: usize) -> Range<usize> {
        assert!(total.is_multiple_of(self.ranks), "{total} are not split evenly over {} ranks", self.ranks);
        let len = total / self.ranks;
        self.rank * len..(self.rank + 1) * len
    }

    /// The range of a vocabulary of `total` that is this rank's: as even as whole blocks of 64 allow.
    pub fn vocabulary_range(&self, total: usize) -> Range<usize> {
        let block = if total >= 64 * self.ranks { 64 } else { 1 };
        let start = |rank: usize| (total.div_ceil(block) * rank / self.ranks * block).min(total);
        start(self.rank)..start(self.rank + 1)
    }
}

/// A range of one dimension of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// The dimension.
    pub dim: usize,
    /// The first index.
    pub start: usize,
    /// How many follow.
    pub len: usize,
}

/// What a rank holds of a parameter and of its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The part it holds; the whole if none.
    pub shard: Option<Shard>,
    /// How many neighbouring ranks of the axis hold the same, this one included.
    pub copies: usize,
    /// Over how many neighbouring ranks of the axis gradients have to be summed.
    pub summands: usize,
}

impl Default for Share {
    /// All of it, alone.
    fn default() -> Self {
        Self { shard: None, copies: 1, summands: 1 }
    }
}

impl Share {
    /// The shape of what the rank holds of a parameter of this shape.
    pub fn shape_of(&self, whole: &[usize]) -> Vec<usize> {
        let mut shape = whole.to_vec();
        if let Some(Shard { dim, len, .. }) = self.shard {
            shape[dim] = len;
        }
        shape
    }

    /// The ranges of a parameter's elements that the rank holds, in their order: each as its first element in a parameter of
    /// this shape, and how many elements follow.
    pub fn stretches(&self, whole: &[usize]) -> impl Iterator<Item = (usize, usize)> + use<> {
        let Shard { dim, start, len } =
            self.shard.unwrap_or(Shard { dim: 0, start: 0, len: whole.first().copied().unwrap_or(1) });
        let outer: usize = whole.iter().take(dim).product();
        let inner: usize = whole.iter().skip(dim + 1).product();
        let extent = whole.get(dim).copied().unwrap_or(1);
        (0..outer).map(move |row| ((row * extent + start) * inner, len * inner))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn shards_cover_every_element_once(
            rows in 1usize..9, columns in 1usize..9, depth in 1usize..4, dim in 0usize..3, ranks in 1usize..5
        ) {
            let mut whole = vec![rows, columns, depth];
            whole[dim] *= ranks;
            let total: usize = whole.iter().product();
            let mut seen = vec![0; total];
            for rank in 0..ranks {
                let range = TensorPlace { ranks, rank, splits_tokens: false }.even_range(whole[dim]);
                let share =
                    Share { shard: Some(Shard { dim, start: range.start, len: range.len() }), ..Share::default() };
                let held: usize = share.stretches(&whole).map(|(_, len)| len).sum();
                prop_assert_eq!(held, share.shape_of(&whole).iter().product::<usize>());
                for (start, len) in share.stretches(&whole) {
                    seen[start..start + len].iter_mut().for_each(|count| *count += 1);
                }
            }
            prop_assert!(seen.iter().all(|count| *count == 1), "{seen:?}");
        }

        #[test]
        fn a_vocabulary_is_split_into_ranges_that_follow_each_other(total in 8usize..70_000, ranks in 1usize..9) {
            let mut end = 0;
            for rank in 0..ranks {
                let range = TensorPlace { ranks, rank, splits_tokens: false }.vocabulary_range(total);
                prop_assert_eq!(range.start, end);
                prop_assert!(!range.is_empty());
                end = range.end;
            }
            prop_assert_eq!(end, total);
        }
    }

    #[test]
    fn a_parameter_that_is_not_split_is_one_stretch() {
        assert_eq!(Share::default().stretches(&[3, 4]).collect::<Vec<_>>(), [(0, 12)]);
        assert_eq!(Share::default().stretches(&[5]).collect::<Vec<_>>(), [(0, 5)]);
    }
}
