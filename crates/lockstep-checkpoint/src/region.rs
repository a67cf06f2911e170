//! Region of a tensor that one slice holds.
//!
//! A slice is either a box of the tensor's index space or a range of its elements in row-major order. A box has one
//! number per dimension in `start` and `shape` (tensor and expert parallelism). A range has one number each, whatever
//! the tensor's rank (ZeRO's flat shards). On a vector both readings agree, so the two lists are unambiguous. Both
//! kinds are a sequence of *runs*, contiguous in the tensor and in the slice. Reading a range of elements copies the
//! runs that intersect it.

use std::ops::Range;

use lockstep_plan::Share;

use crate::error::CoverageError;

/// Region of a tensor that a [`TensorSlice`](crate::TensorSlice) holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Region {
    /// The whole tensor.
    Whole,
    /// Range of elements in row-major order.
    Elements {
        /// First element of the range.
        start: usize,
        /// Number of elements.
        count: usize,
    },
    /// Box with one start and one extent per dimension; its bytes are row-major within the box.
    Block {
        /// First index in each dimension.
        start: Vec<usize>,
        /// Extent in each dimension.
        shape: Vec<usize>,
    },
}

impl Region {
    /// Returns the region of a rank's shard of a parameter with global shape `whole`; its optimizer states have the
    /// same.
    pub fn of_share(share: &Share, whole: &[usize]) -> Self {
        if share.shard.is_none() && share.inner.is_none() {
            return Self::Whole;
        }
        Self::Block { start: share.start_in(whole), shape: share.shape_of(whole) }
    }

    /// Splits the elements `part` of a rank's shard into consecutive regions of the global tensor, of shape `whole`.
    /// Returns each region with its range of elements within the shard.
    pub fn of_part(share: &Share, whole: &[usize], part: Range<usize>) -> Vec<(Self, Range<usize>)> {
        let held = share.shape_of(whole);
        if part == (0..held.iter().product()) {
            return vec![(Self::of_share(share, whole), part)];
        }
        if share.shard.is_none() && share.inner.is_none() {
            return vec![(Self::Elements { start: part.start, count: part.len() }, part)];
        }
        boxes(&share.start_in(whole), &held, part)
    }

    /// Returns `start` and `shape` in the manifest's form.
    pub(crate) fn extent(&self, global: &[usize]) -> (Vec<usize>, Vec<usize>) {
        match self {
            Self::Whole => (vec![0; global.len()], global.to_vec()),
            Self::Elements { start, count } => (vec![*start], vec![*count]),
            Self::Block { start, shape } => (start.clone(), shape.clone()),
        }
    }
}

/// Splits a row-major range of a box's elements into consecutive boxes. Returns each with its range of elements.
fn boxes(first: &[usize], shape: &[usize], part: Range<usize>) -> Vec<(Region, Range<usize>)> {
    let (Some((&first_row, first_inner)), Some((&rows, inner))) = (first.split_first(), shape.split_first())
    else {
        return vec![(Region::Block { start: vec![], shape: vec![] }, part)];
    };
    let row: usize = inner.iter().product();
    if part.is_empty() || row == 0 || rows == 0 {
        return Vec::new();
    }
    // Boxes of a part of a single row.
    let of_row = |part: Range<usize>| {
        let index = part.start / row;
        let before = index * row;
        let in_row = move |(region, elements): (Region, Range<usize>)| {
            let (start, shape) = region.extent(inner);
            let start = [vec![first_row + index], start].concat();
            let region = Region::Block { start, shape: [vec![1], shape].concat() };
            (region, before + elements.start..before + elements.end)
        };
        boxes(first_inner, inner, part.start - before..part.end - before).into_iter().map(in_row)
    };
    let whole = part.start.div_ceil(row)..part.end / row;
    if whole.start > whole.end {
        return of_row(part).collect();
    }
    let mut found = Vec::new();
    if part.start < whole.start * row {
        found.extend(of_row(part.start..whole.start * row));
    }
    if !whole.is_empty() {
        let start = [vec![first_row + whole.start], first_inner.to_vec()].concat();
        let shape = [vec![whole.len()], inner.to_vec()].concat();
        found.push((Region::Block { start, shape }, whole.start * row..whole.end * row));
    }
    if whole.end * row < part.end {
        found.extend(of_row(whole.end * row..part.end));
    }
    found
}

/// Returns the number of elements of a shape, unless it or the size in bytes overflows `usize`.
pub(crate) fn element_count(shape: &[usize]) -> Result<usize, CoverageError> {
    const LARGEST_ELEMENT_BYTES: usize = 8;
    shape
        .iter()
        .try_fold(1usize, |product, &dim| product.checked_mul(dim))
        .filter(|elements| elements.checked_mul(LARGEST_ELEMENT_BYTES).is_some())
        .ok_or_else(|| CoverageError::too_large(shape))
}

/// Slice of a tensor as contiguous runs. Run `i` holds the slice's elements `i * run_elements..(i + 1) * run_elements`.
#[derive(Debug)]
pub(crate) struct Runs<'a> {
    start: &'a [usize],
    shape: &'a [usize],
    global: &'a [usize],
    /// Dimension from which the elements of a run are contiguous; the dimensions before it are iterated. `None` if
    /// there is only one run.
    split: Option<usize>,
    run_elements: usize,
    count: usize,
}

impl<'a> Runs<'a> {
    /// Checks that the slice lies within a tensor of shape `global`, and computes its runs.
    pub(crate) fn new(
        start: &'a [usize],
        shape: &'a [usize],
        global: &'a [usize],
    ) -> Result<Self, CoverageError> {
        let elements = element_count(global)?;
        let fits = |(start, extent): (&usize, &usize), limit: usize| {
            start.checked_add(*extent).is_some_and(|end| end <= limit)
        };
        let as_block = start.len() == global.len()
            && shape.len() == global.len()
            && start.iter().zip(shape).zip(global).all(|(extent, &limit)| fits(extent, limit));
        if as_block {
            if shape.contains(&0) {
                return Ok(Self { start, shape, global, split: None, run_elements: 0, count: 0 });
            }
            let Some(last) = global.len().checked_sub(1) else {
                return Ok(Self { start, shape, global, split: None, run_elements: 1, count: 1 });
            };
            let split = (1..=last).rev().find(|&dim| shape[dim] != global[dim]).unwrap_or(0);
            return Ok(Self {
                start,
                shape,
                global,
                split: Some(split),
                run_elements: shape[split..].iter().product(),
                count: shape[..split].iter().product(),
            });
        }
        match (start, shape) {
            ([first], [extent]) if fits((first, extent), elements) => {
                Ok(Self { start, shape, global, split: None, run_elements: *extent, count: 1 })
            }
            _ => Err(CoverageError(format!(
                "slice at {start:?} of shape {shape:?} does not lie in a tensor of shape {global:?}"
            ))),
        }
    }

    /// Returns the number of elements of the slice.
    pub(crate) fn elements(&self) -> usize {
        self.run_elements * self.count
    }

    /// Returns the slice as one range of the tensor's elements, if it is contiguous.
    pub(crate) fn contiguous(&self) -> Option<Range<usize>> {
        match self.count {
            0 => Some(0..0),
            1 => Some(self.run_start(0)..self.run_start(0) + self.run_elements),
            _ => None,
        }
    }

    /// Returns the first element in the tensor of run `index`. Ascending in `index`.
    fn run_start(&self, index: usize) -> usize {
        let Some(split) = self.split else {
            return self.start.first().copied().unwrap_or(0);
        };
        let mut stride: usize = self.global[split + 1..].iter().product();
        let mut position = self.start[split] * stride;
        stride *= self.global[split];
        let mut rest = index;
        for dim in (0..split).rev() {
            position += (self.start[dim] + rest % self.shape[dim]) * stride;
            rest /= self.shape[dim];
            stride *= self.global[dim];
        }
        position
    }

    /// Returns the pieces of the slice that lie within the tensor's elements `wanted`.
    pub(crate) fn within(&self, wanted: Range<usize>) -> impl Iterator<Item = Piece> + '_ {
        let first =
            partition_point(self.count, |run| self.run_start(run) + self.run_elements <= wanted.start);
        (first..self.count)
            .map(move |run| (run, self.run_start(run)))
            .take_while({
                let end = wanted.end;
                move |&(_, start)| start < end
            })
            .map(move |(run, start)| {
                let from = start.max(wanted.start);
                let to = (start + self.run_elements).min(wanted.end);
                Piece {
                    in_tensor: from,
                    in_slice: run * self.run_elements + (from - start),
                    elements: to.saturating_sub(from),
                }
            })
            .filter(|piece| piece.elements > 0)
    }
}

/// Elements that are contiguous both in a tensor and in one of its slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) in_tensor: usize,
    pub(crate) in_slice: usize,
    pub(crate) elements: usize,
}

/// Returns the first number in `0..count` for which `before` is false. `before` must be true below that number and false
/// from there on.
fn partition_point(count: usize, before: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low + (high - low) / 2;
        if before(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use lockstep_plan::Shard;

    use super::*;

    fn elements_of(start: &[usize], shape: &[usize], global: &[usize]) -> Vec<usize> {
        let runs = Runs::new(start, shape, global).unwrap();
        let total = global.iter().product();
        let mut found = vec![usize::MAX; runs.elements()];
        for piece in runs.within(0..total) {
            for i in 0..piece.elements {
                found[piece.in_slice + i] = piece.in_tensor + i;
            }
        }
        found
    }

    #[test]
    fn a_box_holds_its_elements_in_row_major_order() {
        assert_eq!(elements_of(&[1, 2], &[2, 2], &[4, 5]), [7, 8, 12, 13]);
        assert_eq!(elements_of(&[1, 0], &[2, 5], &[4, 5]), (5..15).collect::<Vec<_>>());
        assert_eq!(elements_of(&[0, 1, 0], &[2, 1, 3], &[2, 2, 3]), [3, 4, 5, 9, 10, 11]);
        assert_eq!(elements_of(&[], &[], &[]), [0]);
    }

    #[test]
    fn the_shares_of_ranks_are_boxes_of_the_dimension_that_they_split() {
        assert_eq!(Region::of_share(&Share::default(), &[4, 6]), Region::Whole);
        let split = |dim, start, len| Share { shard: Some(Shard { dim, start, len }), ..Share::default() };
        let of_experts = Share { inner: Some(Shard { dim: 1, start: 2, len: 3 }), ..split(0, 1, 2) };
        for share in [split(0, 1, 2), split(1, 3, 3), of_experts] {
            let whole = [4, 6];
            let (start, shape) = Region::of_share(&share, &whole).extent(&whole);
            let held: Vec<_> =
                share.element_ranges(&whole).flat_map(|(first, len)| first..first + len).collect();
            assert_eq!(elements_of(&start, &shape, &whole), held, "{share:?}");
        }
    }

    #[test]
    fn parts_of_a_share_are_regions_that_follow_each_other() {
        let split = |dim, start, len| Share { shard: Some(Shard { dim, start, len }), ..Share::default() };
        let of_experts = Share { inner: Some(Shard { dim: 2, start: 1, len: 2 }), ..split(0, 1, 2) };
        let whole = [4, 6, 3];
        for share in [Share::default(), split(0, 1, 2), split(1, 3, 3), of_experts] {
            let held: Vec<usize> =
                share.element_ranges(&whole).flat_map(|(first, len)| first..first + len).collect();
            for start in 0..held.len() {
                for end in start + 1..=held.len() {
                    let (mut next, mut found) = (start, Vec::new());
                    for (region, elements) in Region::of_part(&share, &whole, start..end) {
                        assert_eq!(elements.start, next, "{share:?} {start}..{end}");
                        next = elements.end;
                        let (first, extent) = region.extent(&whole);
                        found.extend(elements_of(&first, &extent, &whole));
                    }
                    assert_eq!(found, held[start..end], "{share:?} {start}..{end}");
                }
            }
        }
    }

    #[test]
    fn one_number_is_a_range_of_elements_whatever_the_rank() {
        assert_eq!(elements_of(&[7], &[4], &[4, 5]), [7, 8, 9, 10]);
        assert_eq!(elements_of(&[2], &[2], &[5]), [2, 3]);
        assert_eq!(elements_of(&[0], &[1], &[]), [0]);
    }

    #[test]
    fn a_wanted_range_meets_exactly_the_runs_in_it() {
        let runs = Runs::new(&[0, 2], &[4, 2], &[4, 5]).unwrap();
        let pieces: Vec<_> = runs.within(8..14).collect();
        assert_eq!(
            pieces,
            [
                Piece { in_tensor: 8, in_slice: 3, elements: 1 },
                Piece { in_tensor: 12, in_slice: 4, elements: 2 }
            ]
        );
    }

    #[test]
    fn what_reaches_outside_or_overflows_is_refused() {
        for (start, shape, global) in [
            (&[3, 0][..], &[2, 5][..], &[4, 5][..]),
            (&[usize::MAX, 0], &[2, 5], &[4, 5]),
            (&[19], &[2], &[4, 5]),
            (&[0, 0, 0], &[1, 1, 1], &[4, 5]),
            (&[0], &[1, 1], &[4, 5]),
            (&[], &[], &[4, 5]),
            (&[0, 0], &[1, 1], &[usize::MAX, 2]),
        ] {
            assert!(Runs::new(start, shape, global).is_err(), "{start:?} {shape:?} in {global:?}");
        }
    }
}
