//! Partitions of a buffer into one block per rank, and of a block into windows: arithmetic only.

use std::{ops::Range, sync::Arc};

/// Alignment, in elements, of each rank's part of a reduction, so that no two ranks write to one cache line.
const ALIGNMENT_ELEMENTS: usize = 64;

/// One block of elements per rank, in rank order, that together cover a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Blocks {
    /// Blocks of `len` elements, except for the last ones, which `total` cuts short.
    Even {
        /// Number of elements in a block.
        len: usize,
        /// Number of elements in all blocks.
        total: usize,
    },
    /// Borders: block r extends from border r to border r + 1.
    Uneven(Arc<[usize]>),
}

impl Blocks {
    /// Returns blocks of equal length; `None` if `total` is not a multiple of `ranks`.
    pub(crate) fn even(total: usize, ranks: usize) -> Option<Self> {
        total.is_multiple_of(ranks).then(|| Self::Even { len: total / ranks, total })
    }

    /// Returns aligned blocks of nearly equal length, for work that may be split anywhere.
    pub(crate) fn shares(total: usize, ranks: usize) -> Self {
        Self::Even { len: total.div_ceil(ranks).next_multiple_of(ALIGNMENT_ELEMENTS), total }
    }

    /// Returns blocks of the given lengths; `None` if their sum overflows.
    pub(crate) fn of_lengths(lengths: &[usize]) -> Option<Self> {
        let mut borders = vec![0_usize];
        for length in lengths {
            borders.push(borders[borders.len() - 1].checked_add(*length)?);
        }
        Some(Self::Uneven(borders.into()))
    }

    /// Returns the range of elements in the block of rank `rank`.
    pub fn range(&self, rank: usize) -> Range<usize> {
        match self {
            Self::Even { len, total } => {
                let border = |rank: usize| len.saturating_mul(rank).min(*total);
                border(rank)..border(rank + 1)
            }
            Self::Uneven(borders) => borders[rank]..borders[rank + 1],
        }
    }

    /// Returns the number of elements in all blocks.
    pub fn total(&self) -> usize {
        match self {
            Self::Even { total, .. } => *total,
            Self::Uneven(borders) => borders[borders.len() - 1],
        }
    }

    /// Returns the number of elements in the longest block.
    pub(crate) fn longest(&self, ranks: usize) -> usize {
        (0..ranks).map(|rank| self.range(rank).len()).max().unwrap_or(0)
    }

    /// Returns the blocks with all lengths multiplied by `factor`, such as from elements to bytes.
    pub(crate) fn scaled(&self, factor: usize) -> Self {
        match self {
            Self::Even { len, total } => Self::Even { len: len * factor, total: total * factor },
            Self::Uneven(borders) => Self::Uneven(borders.iter().map(|border| border * factor).collect()),
        }
    }
}

/// Returns window `index` of a range that is processed `width` elements at a time; empty past the end.
pub fn window(range: &Range<usize>, width: usize, index: usize) -> Range<usize> {
    let start = width.saturating_mul(index).min(range.len());
    let end = start.saturating_add(width).min(range.len());
    range.start + start..range.start + end
}

/// Returns the intersection of two ranges; empty if they are disjoint.
pub(crate) fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn blocks_cover_every_element_once_in_order(total in 0_usize..5000, ranks in 1_usize..9, lengths in proptest::collection::vec(0_usize..50, 1..9)) {
            let uneven = Blocks::of_lengths(&lengths).unwrap();
            prop_assert_eq!(uneven.total(), lengths.iter().sum::<usize>());
            let mut all = vec![(Blocks::shares(total, ranks), ranks), (uneven, lengths.len())];
            all.extend(Blocks::even(total, ranks).map(|blocks| (blocks, ranks)));
            for (blocks, ranks) in all {
                let mut end = 0;
                for rank in 0..ranks {
                    let range = blocks.range(rank);
                    prop_assert_eq!(range.start, end);
                    prop_assert!(range.len() <= blocks.longest(ranks));
                    prop_assert_eq!(blocks.scaled(4).range(rank), range.start * 4..range.end * 4);
                    end = range.end;
                }
                prop_assert_eq!(end, blocks.total());
            }
        }

        #[test]
        fn windows_cover_a_range_in_order(start in 0_usize..100, len in 0_usize..100, width in 1_usize..30) {
            let range = start..start + len;
            let mut end = start;
            for index in 0..len.div_ceil(width) {
                let window = window(&range, width, index);
                prop_assert_eq!(window.start, end);
                prop_assert!(!window.is_empty() && window.len() <= width);
                end = window.end;
            }
            prop_assert_eq!(end, range.end);
            prop_assert!(window(&range, width, len.div_ceil(width)).is_empty());
        }

        #[test]
        fn an_intersection_holds_what_both_ranges_do(a in 0_usize..20, b in 0_usize..20, c in 0_usize..20, d in 0_usize..20) {
            let shared = intersection(&(a..b), &(c..d));
            for i in 0..20 {
                prop_assert_eq!(shared.contains(&i), (a..b).contains(&i) && (c..d).contains(&i));
            }
        }
    }

    #[test]
    fn a_total_that_does_not_divide_has_no_even_blocks() {
        assert_eq!(Blocks::even(10, 4), None);
        assert_eq!(Blocks::of_lengths(&[usize::MAX, 1]), None);
        assert_eq!(Blocks::even(0, 4).unwrap().range(3), 0..0);
    }
}
