//! Where parameters stand in a flat store: one number for each of their elements, in one buffer for each unit.
//!
//! Each parameter starts at a multiple of 1,024 elements, so that shards can be cut at block borders and the
//! gradient norm, a sum over such blocks, does not depend on the cut. Those whose gradients are complete at the same time and
//! summed over the same ranks stand together, in a *stretch*: of it each of the ranks that share out the model's state owns one
//! of equal ranges, whatever parameters lie there. A store has its stretches whole, or only what the rank owns of them, or nothing
//! where that is on disk: of a range of any type a disk has whole blocks.
//!
//! ```text
//! unit     [ stretch                           | stretch               ]
//!          [ parameter   | parameter      | pad | table             |pad]     parameters start at multiples of 1,024
//! owned by [ rank 0      | rank 1        | ...  | rank 0 | rank 1 | ... ]     ranges end at multiples of 2,048
//! ```

use std::ops::Range;

use crate::{
    DISK_ALIGNMENT_BYTES, DType, ParameterRecord, QUANTIZATION_BLOCK, ShardPlace, Summing, booked_bytes,
};

/// Parameters start at multiples of this many elements.
const ALIGNMENT_ELEMENTS: usize = 1024;
/// Ranges of owners end at multiples of this many: a block of a disk, in the narrowest type of weights.
const RANGE_ALIGNMENT_ELEMENTS: usize = DISK_ALIGNMENT_BYTES / DType::BF16.size_bytes();

/// How much a store has of its stretches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All of them.
    Whole,
    /// What the rank owns.
    Own,
}

/// Parameters of a unit that stand together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stretch {
    /// The first unit of the buffer in which it lies.
    pub unit: usize,
    /// The unit whose backward is the last to contribute to its gradients, but for rows of a table that another one looks up.
    pub completed_by: usize,
    /// The number of that unit's buffer.
    pub completed_in: usize,
    /// Over whom its gradients are summed.
    pub summing: Summing,
    /// The first element that the store has of it, in the unit's buffer.
    pub start: usize,
    /// How many elements there are, whatever the store has of them.
    pub elements: usize,
    /// Those of them that the rank owns.
    pub own: Range<usize>,
    /// Whether the store has nothing of it: it is on disk.
    pub is_on_disk: bool,
}

/// Where everything stands in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreLayout {
    /// What stands together, unit by unit.
    pub stretches: Vec<Stretch>,
    /// The stretch of each parameter and its first element there, by [`ParameterId`](crate::ParameterId); none for what is left out.
    pub places: Vec<Option<(usize, usize)>>,
    /// Elements of each unit's buffer; empty for a store that keeps nothing.
    pub unit_elements: Vec<usize>,
}

/// Gradients on their way to their owners: those of a unit are in one of two buffers while the next unit's backward
/// fills the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passage {
    /// Where each stretch begins in its buffer, in elements.
    pub offsets: Vec<usize>,
    /// Elements of both buffers.
    pub elements: [usize; 2],
}

/// Gradients that go to their owners as records of small integers: those of a unit are in one of two pairs of buffers, one for
/// what is sent and one for what comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordPassage {
    /// Where each stretch begins in its buffers, in elements; none for one that goes as it is.
    pub offsets: Vec<Option<usize>>,
    /// Elements of both buffers for what is sent.
    pub sent: [usize; 2],
    /// Elements of both buffers for what comes.
    pub received: [usize; 2],
}

impl Stretch {
    /// Which of two buffers its gradients are in on their way: neighbours have different ones.
    pub const fn parity(&self) -> usize {
        self.completed_in % 2
    }
}

impl StoreLayout {
    /// The layout of a store that has, of those of `records` that `keeps` says by number, as much as `extent`; `place` is the
    /// rank's among those that share out what is summed so.
    pub fn new(
        records: &[ParameterRecord],
        extent: Extent,
        place: impl Fn(Summing) -> ShardPlace,
        keeps: impl Fn(usize) -> bool,
    ) -> Self {
        Self::partly_on_disk(records, extent, place, keeps, |_, _| false)
    }

    /// As [`StoreLayout::new`], of a store that has nothing of the stretches of which `is_on_disk` says so: by unit, and whether it
    /// is a table that two layers share.
    pub fn partly_on_disk(
        records: &[ParameterRecord],
        extent: Extent,
        place: impl Fn(Summing) -> ShardPlace,
        keeps: impl Fn(usize) -> bool,
        is_on_disk: impl Fn(usize, bool) -> bool,
    ) -> Self {
        // The last use of each table, if it is kept here; it is further back in the model. A table that is
        // tied stands alone: it is cut alike wherever it is held, together with whatever.
        let mut tied_in: Vec<Option<(usize, usize)>> = vec![None; records.len()];
        let mut is_tied = vec![false; records.len()];
        for (index, record) in records.iter().enumerate() {
            let Some(table) = record.tie else { continue };
            is_tied[table.0] = true;
            if keeps(index) {
                tied_in[table.0] = tied_in[table.0].max(Some((record.unit, record.buffer.number)));
            }
        }
        let key = |&index: &usize| {
            let record = &records[index];
            let completed = tied_in[index].unwrap_or((record.buffer.first, record.buffer.number));
            (record.buffer.first, completed, is_tied[index], Summing::of(&record.share))
        };
        let mut kept: Vec<usize> =
            (0..records.len()).filter(|&index| records[index].tie.is_none() && keeps(index)).collect();
        kept.sort_by_key(key);
        let mut stretches: Vec<Stretch> = Vec::new();
        let mut places: Vec<Option<(usize, usize)>> = vec![None; records.len()];
        let units = records.iter().map(|record| record.unit + 1).max().unwrap_or(0);
        let mut unit_elements = vec![0; if kept.is_empty() { 0 } else { units }];
        for stretch in kept.chunk_by(|a, b| key(a) == key(b)) {
            let mut elements = 0;
            for &index in stretch {
                places[index] = Some((stretches.len(), elements));
                elements += records[index].local_elements().next_multiple_of(ALIGNMENT_ELEMENTS);
            }
            let (unit, (completed_by, completed_in), is_tied, summing) = key(&stretch[0]);
            let is_on_disk = is_on_disk(unit, is_tied);
            let ShardPlace { ranks, rank } = place(summing);
            let elements = elements.next_multiple_of(RANGE_ALIGNMENT_ELEMENTS * ranks);
            let len = elements / ranks;
            let start = unit_elements[unit];
            unit_elements[unit] += match extent {
                _ if is_on_disk => 0,
                Extent::Own => len,
                Extent::Whole => elements,
            };
            let own = rank * len..(rank + 1) * len;
            stretches.push(Stretch {
                unit,
                completed_by,
                completed_in,
                summing,
                start,
                elements,
                own,
                is_on_disk,
            });
        }
        for (index, record) in records.iter().enumerate() {
            if let Some(table) = record.tie {
                places[index] = places[table.0];
            }
        }
        Self { stretches, places, unit_elements }
    }

    /// Which units' state is on disk, if that is `share` of what the rank owns: the first ones, until they have it. By unit.
    pub fn units_on_disk(&self, share: f64) -> Vec<bool> {
        let mut elements = vec![0; self.stretches.iter().map(|stretch| stretch.unit + 1).max().unwrap_or(0)];
        for stretch in &self.stretches {
            elements[stretch.unit] += stretch.own.len();
        }
        let wanted = share * elements.iter().sum::<usize>() as f64;
        let mut before = 0;
        let is_on_disk = |len: usize| {
            let is_on_disk = (before as f64) < wanted;
            before += len;
            is_on_disk
        };
        elements.into_iter().map(is_on_disk).collect()
    }

    /// Elements of the longest window of at most `most` elements into which what is on disk is cut; none if nothing is.
    pub fn longest_window(&self, most: usize) -> Option<usize> {
        let on_disk = self.stretches.iter().filter(|stretch| stretch.is_on_disk);
        on_disk.map(|stretch| stretch.own.len().min(most)).max().filter(|elements| *elements > 0)
    }

    /// Whether it keeps no parameter.
    pub fn is_empty(&self) -> bool {
        self.stretches.is_empty()
    }

    /// Bytes of a store of `dtype` laid out so, as they are booked.
    pub fn booked_bytes(&self, dtype: DType) -> usize {
        let units = self.unit_elements.iter();
        units
            .map(|elements| booked_bytes(elements.saturating_mul(dtype.size_bytes())))
            .fold(0, usize::saturating_add)
    }

    /// Where gradients of this layout are until their owners have them.
    pub fn passage(&self) -> Passage {
        let buffers = self.stretches.iter().map(|stretch| stretch.completed_in + 1).max().unwrap_or(0);
        let (mut ends, mut elements) = (vec![0; buffers], [0; 2]);
        let offset = |stretch: &Stretch| {
            let end = &mut ends[stretch.completed_in];
            let start = *end;
            *end += stretch.elements;
            let longest = &mut elements[stretch.parity()];
            *longest = (*longest).max(*end);
            start
        };
        let offsets = self.stretches.iter().map(offset).collect();
        Passage { offsets, elements }
    }

    /// Where gradients of those stretches of this layout that `is_coded` says are as records, if the sums of so many replicas
    /// are exchanged as well.
    pub fn record_passage(&self, replicas: usize, is_coded: impl Fn(usize) -> bool) -> RecordPassage {
        let buffers = self.stretches.iter().map(|stretch| stretch.completed_in + 1).max().unwrap_or(0);
        let (mut ends, mut sent, mut received) = (vec![0; buffers], [0; 2], [0; 2]);
        let offset = |(index, stretch): (usize, &Stretch)| {
            if !is_coded(index) {
                return None;
            }
            let (end, buffer) = (&mut ends[stretch.completed_in], stretch.parity());
            let start = *end;
            *end += stretch.elements;
            sent[buffer] = (*end).max(sent[buffer]);
            // Over replicas as many pieces come as there are of them, of which the last may be the longest.
            let piece = (stretch.own.len() / QUANTIZATION_BLOCK).div_ceil(replicas) * QUANTIZATION_BLOCK;
            received[buffer] = (*end).max(replicas * piece).max(received[buffer]);
            Some(start)
        };
        let offsets = self.stretches.iter().enumerate().map(offset).collect();
        RecordPassage { offsets, sent, received }
    }

    /// Elements of each stretch if of every parameter there were `largest_elements`.
    pub(crate) fn largest(&self, records: &[ParameterRecord], largest_elements: &[usize]) -> Vec<usize> {
        let mut largest = vec![0; self.stretches.len()];
        for ((record, place), elements) in records.iter().zip(&self.places).zip(largest_elements) {
            if let Some((stretch, _)) = place.filter(|_| record.tie.is_none()) {
                largest[stretch] += elements.next_multiple_of(ALIGNMENT_ELEMENTS);
            }
        }
        let padded = |(elements, stretch): (usize, &Stretch)| {
            let ranks = (stretch.elements / stretch.own.len().max(1)).max(1);
            elements.next_multiple_of(RANGE_ALIGNMENT_ELEMENTS * ranks)
        };
        largest.into_iter().zip(&self.stretches).map(padded).collect()
    }
}
