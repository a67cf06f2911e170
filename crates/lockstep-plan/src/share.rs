//! Shards of a parameter under tensor and expert parallelism.
//!
//! A tensor-parallel rank holds the whole parameter, or a range of one of its dimensions. Neighbouring ranks may hold the same range (if
//! there are fewer key/value heads than ranks). A rank's gradient may be complete, or a partial sum that is reduced afterwards. Stacked
//! experts are sharded by expert, and each expert's matrix may be sharded as well.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::named_enum::named_enum;

named_enum! {
    /// Tensor-parallel layout of linear layers.
    #[derive(Default)]
    pub enum TensorDimensions {
        /// 1D: each weight is sharded by columns or by rows (Shoeybi et al. 2019).
        #[default]
        One = "1d",
        /// 2D: the ranks form a square, and weights and activations are sharded in blocks (SUMMA: van de Geijn and Watts 1997; Xu et al.
        /// 2021).
        Two = "2d",
    }
}

/// A rank's position in the tensor-parallel group, and how the group splits linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorPlace {
    /// Degree of tensor parallelism.
    pub ranks: usize,
    /// Rank within the group.
    pub rank: usize,
    /// True if values that would be replicated are sharded by tokens instead (sequence parallelism).
    pub splits_tokens: bool,
    /// Layout of linear layers: 1D or 2D.
    pub dimensions: TensorDimensions,
    /// Row chunks in which collectives overlap with the GEMMs before or after them; 1 for a single collective without overlap.
    pub chunks: usize,
    /// True if each rank keeps a slice of a recomputed block's input, which would be replicated otherwise (Rajbhandari et al. 2019,
    /// `P_a`; Korthikanti et al. 2022).
    pub slices_inputs: bool,
}

/// A rank's position in the square of a 2D tensor layout; ranks are numbered row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GridPlace {
    /// Ranks on a side of the square.
    pub side: usize,
    /// Row index; ranks of a row have the same tokens.
    pub row: usize,
    /// Column index; ranks of a column have the same range of activation columns.
    pub column: usize,
}

impl Default for TensorPlace {
    /// A group of one rank.
    fn default() -> Self {
        let dimensions = TensorDimensions::One;
        Self { ranks: 1, rank: 0, splits_tokens: false, dimensions, chunks: 1, slices_inputs: false }
    }
}

impl TensorPlace {
    /// Returns the position in the square of a 2D layout; `None` in a 1D layout.
    pub fn grid(&self) -> Option<GridPlace> {
        let side = self.ranks.isqrt();
        let is_square = self.ranks > 1 && self.dimensions == TensorDimensions::Two;
        is_square.then(|| GridPlace { side, row: self.rank / side, column: self.rank % side })
    }

    /// Returns this rank's range of `total` things that are sharded evenly.
    ///
    /// # Panics
    /// If the ranks do not divide `total`.
    pub fn even_range(&self, total: usize) -> Range<usize> {
        assert!(total.is_multiple_of(self.ranks), "{total} are not split evenly over {} ranks", self.ranks);
        let len = total / self.ranks;
        self.rank * len..(self.rank + 1) * len
    }

    /// Returns the elements of each rank's slice of a replicated value of `elements`, rounded up: the last slices are padded.
    pub fn slice_elements(&self, elements: usize) -> usize {
        elements.div_ceil(self.ranks)
    }

    /// Returns this rank's range of a vocabulary of `total` tokens. Ranges are as even as whole blocks of 64 allow.
    pub fn vocabulary_range(&self, total: usize) -> Range<usize> {
        let block = if total >= 64 * self.ranks { 64 } else { 1 };
        let start = |rank: usize| (total.div_ceil(block) * rank / self.ranks * block).min(total);
        start(self.rank)..start(self.rank + 1)
    }
}

impl GridPlace {
    /// Returns this rank's block of a weight `[out, in]`: the outputs are sharded by column, the inputs by row.
    ///
    /// # Panics
    /// If the side does not divide both.
    pub fn share_of_weight(&self, shape: [usize; 2]) -> Share {
        let (shard, inner) = (self.range(shape, 0, self.column), self.range(shape, 1, self.row));
        Share { shard: Some(shard), inner: Some(inner), ..Share::default() }
    }

    /// Returns this rank's range of a bias `[out]`. It is sharded by column; ranks of a column hold the same range and apply it to
    /// different tokens.
    ///
    /// # Panics
    /// If the side does not divide it.
    pub fn share_of_bias(&self, outputs: usize) -> Share {
        let shard = Some(self.range([outputs], 0, self.column));
        Share { shard, inner: None, among: Among::TensorColumn, copies: self.side, summands: self.side }
    }

    fn range<const N: usize>(&self, shape: [usize; N], dim: usize, index: usize) -> Shard {
        let (total, side) = (shape[dim], self.side);
        assert!(total.is_multiple_of(side), "{total} are not split evenly over a side of {side}");
        Shard { dim, start: index * (total / side), len: total / side }
    }
}

/// A rank's position in the expert-parallel group of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ExpertPlace {
    /// Expert-parallel degree: ranks with different experts.
    pub ranks: usize,
    /// Rank within the expert-parallel group.
    pub rank: usize,
    /// Tensor-parallel degree within an expert.
    pub tensor_ranks: usize,
    /// Rank within the expert's tensor-parallel group.
    pub tensor_rank: usize,
}

impl Default for ExpertPlace {
    /// A group of one rank.
    fn default() -> Self {
        Self { ranks: 1, rank: 0, tensor_ranks: 1, tensor_rank: 0 }
    }
}

impl ExpertPlace {
    /// Returns the size of the group over which tokens are dispatched to experts.
    pub fn group_size(&self) -> usize {
        self.ranks * self.tensor_ranks
    }
}

/// Group of ranks that a [`Share`] refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Among {
    /// Ranks of the tensor-parallel group.
    #[default]
    Tensor,
    /// Ranks of one column of a 2D tensor layout, all of which hold the same.
    TensorColumn,
    /// Expert-parallel group. Ranks at the same position of other such groups hold the same experts, and gradients are reduced over
    /// those.
    Experts,
}

/// Identifies the group over which a gradient is reduced. Parameters with equal values have the same holders, so they are sharded over
/// the same ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReductionGroup {
    /// Group whose ranks hold shards or copies of the parameter.
    pub among: Among,
    /// Number of consecutive tensor-parallel ranks whose gradients are partial sums.
    pub summands: usize,
}

impl ReductionGroup {
    /// Returns the reduction group of a parameter's gradient.
    pub fn of(share: &Share) -> Self {
        Self { among: share.among, summands: share.summands }
    }
}

/// A range of one dimension of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Index of the sharded dimension.
    pub dim: usize,
    /// First index of the range.
    pub start: usize,
    /// Length of the range.
    pub len: usize,
}

/// A rank's shard of a parameter and of its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Range of one dimension that the rank holds; `None` if it holds all of it.
    pub shard: Option<Shard>,
    /// Range of a second dimension within the first; `None` if it is not sharded twice.
    #[serde(default)]
    pub inner: Option<Shard>,
    /// Group whose ranks hold the other shards, or copies of this one.
    #[serde(default)]
    pub among: Among,
    /// Number of consecutive ranks of the group that hold the same shard, this one included.
    pub copies: usize,
    /// Number of consecutive ranks of the group over which the gradient has to be reduced.
    pub summands: usize,
}

impl Default for Share {
    /// The whole parameter, on one rank.
    fn default() -> Self {
        Self { shard: None, inner: None, among: Among::Tensor, copies: 1, summands: 1 }
    }
}

impl Share {
    /// Returns the local shape for a parameter of shape `whole`.
    pub fn shape_of(&self, whole: &[usize]) -> Vec<usize> {
        let mut shape = whole.to_vec();
        for Shard { dim, len, .. } in self.shards() {
            shape[dim] = len;
        }
        shape
    }

    /// Returns the first index of the shard in each dimension.
    pub fn start_in(&self, whole: &[usize]) -> Vec<usize> {
        let mut first = vec![0; whole.len()];
        for Shard { dim, start, .. } in self.shards() {
            first[dim] = start;
        }
        first
    }

    fn shards(&self) -> impl Iterator<Item = Shard> {
        self.shard.into_iter().chain(self.inner)
    }

    /// Returns the contiguous ranges of elements that the rank holds, in order, as (first element in a parameter of shape `whole`,
    /// length).
    pub fn element_ranges(&self, whole: &[usize]) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (whole, held, start) = (whole.to_vec(), self.shape_of(whole), self.start_in(whole));
        // Everything behind the last sharded dimension is contiguous.
        let cut = self.shards().map(|shard| shard.dim).max().unwrap_or(0);
        let inner: usize = whole.iter().skip(cut + 1).product();
        let len = held.get(cut).map_or(1, |len| len * inner);
        let outer: usize = held.iter().take(cut).product();
        (0..outer).map(move |mut row| {
            let (mut first, mut stride) = (0, inner);
            for dim in (0..held.len().min(cut + 1)).rev() {
                let index = if dim == cut { 0 } else { row % held[dim] };
                if dim < cut {
                    row /= held[dim];
                }
                first += (start[dim] + index) * stride;
                stride *= whole[dim];
            }
            (first, len)
        })
    }

    /// Returns the same ranges clipped to the elements `part` of the rank's shard.
    pub fn element_ranges_of_part(
        &self,
        whole: &[usize],
        part: Range<usize>,
    ) -> impl Iterator<Item = (usize, usize)> + use<> {
        let mut held = 0;
        self.element_ranges(whole).filter_map(move |(first, len)| {
            let (start, end) = (part.start.max(held), part.end.min(held + len));
            let cut = (start < end).then(|| (first + start - held, end - start));
            held += len;
            cut
        })
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
                let range = TensorPlace { ranks, rank, ..TensorPlace::default() }.even_range(whole[dim]);
                let share =
                    Share { shard: Some(Shard { dim, start: range.start, len: range.len() }), ..Share::default() };
                let held: usize = share.element_ranges(&whole).map(|(_, len)| len).sum();
                prop_assert_eq!(held, share.shape_of(&whole).iter().product::<usize>());
                for (start, len) in share.element_ranges(&whole) {
                    seen[start..start + len].iter_mut().for_each(|count| *count += 1);
                }
            }
            prop_assert!(seen.iter().all(|count| *count == 1), "{seen:?}");
        }

        #[test]
        fn a_vocabulary_is_split_into_ranges_that_follow_each_other(total in 8usize..70_000, ranks in 1usize..9) {
            let mut end = 0;
            for rank in 0..ranks {
                let range = TensorPlace { ranks, rank, ..TensorPlace::default() }.vocabulary_range(total);
                prop_assert_eq!(range.start, end);
                prop_assert!(!range.is_empty());
                end = range.end;
            }
            prop_assert_eq!(end, total);
        }
    }

    #[test]
    fn parts_of_experts_cover_every_element_once() {
        let whole = [4, 3, 6];
        for dim in [1, 2] {
            let mut seen = vec![0; 72];
            let parts = if dim == 1 { 3 } else { 2 };
            for (rank, part) in (0..2).flat_map(|rank| (0..parts).map(move |part| (rank, part))) {
                let len = whole[dim] / parts;
                let share = Share {
                    shard: Some(Shard { dim: 0, start: 2 * rank, len: 2 }),
                    inner: Some(Shard { dim, start: part * len, len }),
                    among: Among::Experts,
                    ..Share::default()
                };
                let held: usize = share.element_ranges(&whole).map(|(_, len)| len).sum();
                assert_eq!(held, share.shape_of(&whole).iter().product::<usize>());
                for (start, len) in share.element_ranges(&whole) {
                    seen[start..start + len].iter_mut().for_each(|count| *count += 1);
                }
            }
            assert!(seen.iter().all(|count| *count == 1), "{seen:?}");
        }
    }

    #[test]
    fn a_part_of_what_a_rank_holds_is_cut_from_its_stretches() {
        // Columns 2 and 3 of rows of 6: elements 2, 3, 8, 9, 14, 15.
        let share = Share { shard: Some(Shard { dim: 1, start: 2, len: 2 }), ..Share::default() };
        let part = |range| share.element_ranges_of_part(&[3, 6], range).collect::<Vec<_>>();
        assert_eq!(part(0..6), [(2, 2), (8, 2), (14, 2)]);
        assert_eq!(part(1..4), [(3, 1), (8, 2)]);
        assert_eq!(part(3..3), []);
        assert_eq!(Share::default().element_ranges_of_part(&[3, 6], 4..9).collect::<Vec<_>>(), [(4, 5)]);
    }

    #[test]
    fn blocks_of_a_square_cover_every_element_of_a_weight_once_and_of_a_bias_once_a_row() {
        let dimensions = TensorDimensions::Two;
        let (mut weight, mut bias) = (vec![0; 6 * 9], vec![0; 6]);
        for rank in 0..9 {
            let place = TensorPlace { ranks: 9, rank, dimensions, ..TensorPlace::default() };
            let grid = place.grid().unwrap();
            assert_eq!((grid.row, grid.column), (rank / 3, rank % 3));
            for (first, len) in grid.share_of_weight([6, 9]).element_ranges(&[6, 9]) {
                weight[first..first + len].iter_mut().for_each(|count| *count += 1);
            }
            for (first, len) in grid.share_of_bias(6).element_ranges(&[6]) {
                bias[first..first + len].iter_mut().for_each(|count| *count += 1);
            }
        }
        assert!(
            weight.iter().all(|count| *count == 1) && bias.iter().all(|count| *count == 3),
            "{weight:?}, {bias:?}"
        );
    }

    #[test]
    fn a_parameter_that_is_not_split_is_one_stretch() {
        assert_eq!(Share::default().element_ranges(&[3, 4]).collect::<Vec<_>>(), [(0, 12)]);
        assert_eq!(Share::default().element_ranges(&[5]).collect::<Vec<_>>(), [(0, 5)]);
    }
}
