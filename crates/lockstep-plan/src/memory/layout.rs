//! Layout of parameters in a flat store, which holds one number per element, in one buffer per unit.
//!
//! Each parameter starts at a multiple of 1,024 elements. So shards are cut at block borders, and the gradient norm, a sum over such
//! blocks, does not depend on the cut. Parameters whose gradients are complete at the same time and reduced over the same group form a
//! *flat parameter* ([`FlatParameter`], as FSDP's `FlatParameter`). Each rank of the shard group owns one of its equal ranges, whatever
//! parameters lie there. A store holds its flat parameters whole, or only the rank's shards, or nothing if they are on disk. Every range
//! fills whole disk blocks in any dtype.
//!
//! ```text
//! unit     [ flat parameter                    | flat parameter        ]
//!          [ parameter   | parameter      | pad | table             |pad]     parameters start at multiples of 1,024
//! owned by [ rank 0      | rank 1        | ...  | rank 0 | rank 1 | ... ]     ranges end at multiples of 2,048
//! ```

use std::ops::Range;

use crate::{
    DISK_ALIGNMENT_BYTES, DType, ParameterRecord, QUANTIZATION_BLOCK, ReductionGroup, ShardPlace,
    booked_bytes,
};

/// Alignment of parameters, in elements.
const ALIGNMENT_ELEMENTS: usize = 1024;
/// Alignment of shard borders, in elements: a disk block of the narrowest weight dtype.
const RANGE_ALIGNMENT_ELEMENTS: usize = DISK_ALIGNMENT_BYTES / DType::BF16.size_bytes();

/// Part of its flat parameters that a store holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All elements of each flat parameter.
    Whole,
    /// Only the rank's shards.
    Own,
}

/// Flat parameter: consecutive parameters of a buffer whose gradients are complete at the same time and reduced over the same group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlatParameter {
    /// First unit of the buffer that it lies in.
    pub unit: usize,
    /// Index of the last unit whose backward contributes to the gradients; sparse embedding rows of a tied table excepted.
    pub completed_by: usize,
    /// Index of that unit's buffer.
    pub completed_in: usize,
    /// Group over which the gradients are reduced.
    pub summing: ReductionGroup,
    /// Offset in the unit's buffer of the first element that the store holds.
    pub start: usize,
    /// Unsharded size in elements, whatever part the store holds.
    pub elements: usize,
    /// Range of these elements that the rank owns.
    pub own: Range<usize>,
    /// True if the store holds nothing of it because it is on disk.
    pub is_on_disk: bool,
}

/// Layout of all parameters of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreLayout {
    /// Flat parameters, unit by unit.
    pub flat_parameters: Vec<FlatParameter>,
    /// Flat parameter and offset of each parameter, by [`ParameterId`](crate::ParameterId); `None` if the store does not hold it.
    pub places: Vec<Option<(usize, usize)>>,
    /// Size of each unit's buffer in elements; empty if the store holds no parameter.
    pub unit_elements: Vec<usize>,
}

/// Staging buffers of gradients in flight to their owners. Two buffers alternate: one is reduced while the next unit's backward fills
/// the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GradientStaging {
    /// Offset of each flat parameter in its buffer, in elements.
    pub offsets: Vec<usize>,
    /// Sizes of both buffers in elements.
    pub elements: [usize; 2],
}

/// Staging buffers of quantized gradients in flight to their owners. Two pairs of buffers alternate; each pair has one for sending and
/// one for receiving.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizedGradientStaging {
    /// Offset of each flat parameter in its buffers, in elements; `None` if it is not quantized.
    pub offsets: Vec<Option<usize>>,
    /// Sizes of both send buffers in elements.
    pub sent: [usize; 2],
    /// Sizes of both receive buffers in elements.
    pub received: [usize; 2],
}

impl FlatParameter {
    /// Returns which of the two staging buffers its gradients use; consecutive buffers alternate.
    pub const fn parity(&self) -> usize {
        self.completed_in % 2
    }
}

impl StoreLayout {
    /// Lays out a store of the `records` for whose index `keeps` returns true; `extent` is the part that it holds. `place` returns the
    /// rank's position in the shard group of each reduction group.
    pub fn new(
        records: &[ParameterRecord],
        extent: Extent,
        place: impl Fn(ReductionGroup) -> ShardPlace,
        keeps: impl Fn(usize) -> bool,
    ) -> Self {
        Self::partly_on_disk(records, extent, place, keeps, |_, _| false)
    }

    /// Lays out a store as [`StoreLayout::new`], without the flat parameters that are on disk. `is_on_disk` decides by unit and by
    /// whether it is a tied table.
    pub fn partly_on_disk(
        records: &[ParameterRecord],
        extent: Extent,
        place: impl Fn(ReductionGroup) -> ShardPlace,
        keeps: impl Fn(usize) -> bool,
        is_on_disk: impl Fn(usize, bool) -> bool,
    ) -> Self {
        // The last use of each tied table on this rank; it is further back in the model. A tied table is a flat parameter of its own, so
        // that it is sharded alike on every stage that holds it.
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
            (record.buffer.first, completed, is_tied[index], ReductionGroup::of(&record.share))
        };
        let mut kept: Vec<usize> =
            (0..records.len()).filter(|&index| records[index].tie.is_none() && keeps(index)).collect();
        kept.sort_by_key(key);
        let mut flat_parameters: Vec<FlatParameter> = Vec::new();
        let mut places: Vec<Option<(usize, usize)>> = vec![None; records.len()];
        let units = records.iter().map(|record| record.unit + 1).max().unwrap_or(0);
        let mut unit_elements = vec![0; if kept.is_empty() { 0 } else { units }];
        for flat in kept.chunk_by(|a, b| key(a) == key(b)) {
            let mut elements = 0;
            for &index in flat {
                places[index] = Some((flat_parameters.len(), elements));
                elements += records[index]
                    .stored_shape()
                    .iter()
                    .product::<usize>()
                    .next_multiple_of(ALIGNMENT_ELEMENTS);
            }
            let (unit, (completed_by, completed_in), is_tied, summing) = key(&flat[0]);
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
            flat_parameters.push(FlatParameter {
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
        Self { flat_parameters, places, unit_elements }
    }

    /// Returns, by unit, whether its state is on disk, if that is a fraction `share` of what the rank owns. Units are taken from the
    /// first one on.
    pub fn units_on_disk(&self, share: f64) -> Vec<bool> {
        let mut elements = vec![0; self.flat_parameters.iter().map(|flat| flat.unit + 1).max().unwrap_or(0)];
        for flat in &self.flat_parameters {
            elements[flat.unit] += flat.own.len();
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

    /// Returns the size in elements of the longest window, of at most `most`, of the state on disk; `None` if there is none.
    pub fn longest_window(&self, most: usize) -> Option<usize> {
        let on_disk = self.flat_parameters.iter().filter(|flat| flat.is_on_disk);
        on_disk.map(|flat| flat.own.len().min(most)).max().filter(|elements| *elements > 0)
    }

    /// Returns true if the store holds no parameter.
    pub fn is_empty(&self) -> bool {
        self.flat_parameters.is_empty()
    }

    /// Returns the booked bytes of a store with this layout and `dtype`.
    pub fn booked_bytes(&self, dtype: DType) -> usize {
        let units = self.unit_elements.iter();
        units
            .map(|elements| booked_bytes(elements.saturating_mul(dtype.size_bytes())))
            .fold(0, usize::saturating_add)
    }

    /// Returns the staging buffers for gradients with this layout.
    pub fn passage(&self) -> GradientStaging {
        let buffers = self.flat_parameters.iter().map(|flat| flat.completed_in + 1).max().unwrap_or(0);
        let (mut ends, mut elements) = (vec![0; buffers], [0; 2]);
        let offset = |flat: &FlatParameter| {
            let end = &mut ends[flat.completed_in];
            let start = *end;
            *end += flat.elements;
            let longest = &mut elements[flat.parity()];
            *longest = (*longest).max(*end);
            start
        };
        let offsets = self.flat_parameters.iter().map(offset).collect();
        GradientStaging { offsets, elements }
    }

    /// Returns the staging buffers for quantized gradients with this layout; `is_coded` selects the flat parameters. With several
    /// `replicas` the reduced gradients are quantized for the exchange between replicas as well.
    pub fn record_passage(
        &self,
        replicas: usize,
        is_coded: impl Fn(usize) -> bool,
    ) -> QuantizedGradientStaging {
        let buffers = self.flat_parameters.iter().map(|flat| flat.completed_in + 1).max().unwrap_or(0);
        let (mut ends, mut sent, mut received) = (vec![0; buffers], [0; 2], [0; 2]);
        let offset = |(index, flat): (usize, &FlatParameter)| {
            if !is_coded(index) {
                return None;
            }
            let (end, buffer) = (&mut ends[flat.completed_in], flat.parity());
            let start = *end;
            *end += flat.elements;
            sent[buffer] = (*end).max(sent[buffer]);
            // Between replicas one piece arrives from each of them, the last of which may be the longest.
            let piece = (flat.own.len() / QUANTIZATION_BLOCK).div_ceil(replicas) * QUANTIZATION_BLOCK;
            received[buffer] = (*end).max(replicas * piece).max(received[buffer]);
            Some(start)
        };
        let offsets = self.flat_parameters.iter().enumerate().map(offset).collect();
        QuantizedGradientStaging { offsets, sent, received }
    }

    /// Returns the size in elements of each flat parameter if each parameter had `largest_elements`.
    pub(crate) fn largest(&self, records: &[ParameterRecord], largest_elements: &[usize]) -> Vec<usize> {
        let mut largest = vec![0; self.flat_parameters.len()];
        for ((record, place), elements) in records.iter().zip(&self.places).zip(largest_elements) {
            if let Some((flat, _)) = place.filter(|_| record.tie.is_none()) {
                largest[flat] += elements.next_multiple_of(ALIGNMENT_ELEMENTS);
            }
        }
        let padded = |(elements, flat): (usize, &FlatParameter)| {
            let ranks = (flat.elements / flat.own.len().max(1)).max(1);
            elements.next_multiple_of(RANGE_ALIGNMENT_ELEMENTS * ranks)
        };
        largest.into_iter().zip(&self.flat_parameters).map(padded).collect()
    }
}
