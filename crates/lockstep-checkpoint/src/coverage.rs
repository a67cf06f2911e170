//! Check that the slices of a save cover every element of a tensor exactly once.
//!
//! Slices cover a tensor exactly once if they lie within it, do not overlap, and have as many elements in total as the
//! tensor. So only overlap needs work. For element ranges it suffices to sort by start and compare neighbours. For
//! boxes, a sweep along the first dimension compares the boxes that share an index there.

use std::ops::Range;

use crate::{
    error::CoverageError,
    region::{Runs, element_count},
};

/// Maximum number of boxes per tensor. Comparing boxes takes quadratic time at worst; this number is far above any mesh
/// and still fast.
const MAX_BOXES: usize = 16_384;

/// Checks that `slices`, given as (start, shape) pairs, cover a tensor of shape `global` exactly once.
pub(crate) fn check(global: &[usize], slices: &[(&[usize], &[usize])]) -> Result<(), CoverageError> {
    let elements = element_count(global)?;
    let mut ranges = Vec::with_capacity(slices.len());
    let mut boxes = Vec::new();
    let mut covered = 0usize;
    for &(start, shape) in slices {
        let runs = Runs::new(start, shape, global)?;
        if runs.elements() == 0 {
            continue;
        }
        covered = covered.saturating_add(runs.elements());
        ranges.push((runs.contiguous(), start));
        if start.len() == global.len() {
            boxes.push((start, shape));
        }
    }

    let all_ranges: Option<Vec<(Range<usize>, &[usize])>> =
        ranges.iter().map(|(range, start)| range.clone().map(|range| (range, *start))).collect();
    match all_ranges {
        Some(ranges) => check_ranges(ranges)?,
        None if boxes.len() == ranges.len() => check_boxes(boxes)?,
        None => {
            let mixed = "element ranges and boxes that are not contiguous are mixed in one tensor";
            return Err(CoverageError(mixed.to_owned()));
        }
    }
    if covered == elements {
        return Ok(());
    }
    Err(CoverageError(format!("{covered} of {elements} elements are saved")))
}

fn check_ranges(mut ranges: Vec<(Range<usize>, &[usize])>) -> Result<(), CoverageError> {
    ranges.sort_by_key(|(range, _)| range.start);
    match ranges.windows(2).find(|pair| pair[1].0.start < pair[0].0.end) {
        Some(pair) => Err(overlap(pair[0].1, pair[1].1)),
        None => Ok(()),
    }
}

fn check_boxes(mut boxes: Vec<(&[usize], &[usize])>) -> Result<(), CoverageError> {
    if boxes.len() > MAX_BOXES {
        let found = boxes.len();
        return Err(CoverageError(format!("{found} slices, but at most {MAX_BOXES} are allowed")));
    }
    boxes.sort_by_key(|(start, _)| start[0]);
    for (index, (start, shape)) in boxes.iter().enumerate() {
        let end = start[0] + shape[0];
        for (other_start, other_shape) in boxes[index + 1..].iter().take_while(|(other, _)| other[0] < end) {
            let meet = |dim: usize| {
                start[dim] < other_start[dim] + other_shape[dim] && other_start[dim] < start[dim] + shape[dim]
            };
            if (0..start.len()).all(meet) {
                return Err(overlap(start, other_start));
            }
        }
    }
    Ok(())
}

fn overlap(first: &[usize], second: &[usize]) -> CoverageError {
    CoverageError(format!("slices at {first:?} and {second:?} overlap"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn exact_covers_pass() {
        let whole: (&[usize], &[usize]) = (&[0, 0], &[4, 6]);
        check(&[4, 6], &[whole]).unwrap();
        check(&[4, 6], &[(&[0], &[7]), (&[7], &[17])]).unwrap();
        check(&[4, 6], &[(&[0, 0], &[2, 6]), (&[12], &[12])]).unwrap();
        check(&[4, 6], &[(&[0, 0], &[4, 3]), (&[0, 3], &[2, 3]), (&[2, 3], &[2, 3])]).unwrap();
        check(&[], &[(&[], &[])]).unwrap();
        check(&[0, 3], &[]).unwrap();
    }

    #[test]
    fn holes_overlaps_and_mixtures_are_named() {
        let missing = check(&[4, 6], &[(&[0], &[23])]).unwrap_err();
        assert_eq!(missing.to_string(), "23 of 24 elements are saved");
        assert_eq!(check(&[], &[]).unwrap_err().to_string(), "0 of 1 elements are saved");
        // As many elements as the tensor has, but one of them twice and one never.
        let twice = check(&[4, 6], &[(&[0], &[12]), (&[11], &[12])]).unwrap_err();
        assert_eq!(twice.to_string(), "slices at [0] and [11] overlap");
        let boxes = check(&[4, 6], &[(&[0, 0], &[4, 3]), (&[1, 2], &[3, 4])]).unwrap_err();
        assert_eq!(boxes.to_string(), "slices at [0, 0] and [1, 2] overlap");
        let mixed = check(&[4, 6], &[(&[0, 0], &[4, 3]), (&[3], &[12])]).unwrap_err();
        assert!(mixed.to_string().contains("are mixed in one tensor"), "{mixed}");
    }

    proptest! {
        /// Compares the result with counting every element.
        #[test]
        fn the_verdict_is_that_of_counting(
            boxes in prop::collection::vec(((0usize..4, 0usize..5), (0usize..4, 0usize..5)), 0..6),
        ) {
            let global = [3usize, 4];
            let slices: Vec<([usize; 2], [usize; 2])> = boxes
                .iter()
                .map(|&((r, c), (h, w))| {
                    let (r, c) = (r.min(3), c.min(4));
                    ([r, c], [h.min(3 - r), w.min(4 - c)])
                })
                .collect();
            let mut counts = [0; 12];
            for (start, shape) in &slices {
                for row in start[0]..start[0] + shape[0] {
                    for column in start[1]..start[1] + shape[1] {
                        counts[row * 4 + column] += 1;
                    }
                }
            }
            let views: Vec<(&[usize], &[usize])> =
                slices.iter().map(|(start, shape)| (&start[..], &shape[..])).collect();
            let verdict = check(&global, &views);
            prop_assert_eq!(verdict.is_ok(), counts == [1; 12], "{:?} for {:?}", verdict, slices);
        }
    }
}
