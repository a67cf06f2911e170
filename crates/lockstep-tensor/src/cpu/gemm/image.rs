//! Packing of the operands of a convolution directly from images and filters, so that the matrix of patches (im2col) is
//! never stored.
//!
//! Each direction has a fast path, for panels whose units are contiguous across the depth, and a path that builds
//! blocks from lines on the stack, for all others.

use std::ops::Range;

use bytemuck::Zeroable;

use super::{
    blocks::Blocks,
    kernel::ZERO_LINE,
    lanes::Lanes,
    operand::Order,
    patches::{Filters, Patch, Patches, Segment, Span, StoredTaps},
    scratch::MAX_DEPTH,
    transpose::{Block, SIDE},
    units::{PanelShape, Unit, along_unlikely, blocks},
};

/// Elements of the longest line of a block: [`SIDE`] pairs.
const LINE: usize = 2 * SIDE;

/// Packs patches whose elements are the depth.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn pack_along<V: Lanes, U: Unit, P: PanelShape>(
    elements: &[U::Source],
    patches: &Patches,
    outer: Range<usize>,
    depth: Range<usize>,
    units: usize,
    panels: &mut [u32],
) {
    let has_whole_units = U::ELEMENTS == 1 || (patches.is_even() && depth.start.is_multiple_of(2));
    if P::ORDER == Order::AcrossDepth && P::WIDTH <= SIDE && has_whole_units {
        for (index, panel) in panels.chunks_exact_mut(P::WIDTH * units).enumerate() {
            let first = (outer.start + index * P::WIDTH).min(outer.end);
            let outer = first..outer.end.min(first + P::WIDTH);
            // SAFETY: the caller's promise.
            unsafe { along_panel::<V, U, P>(elements, patches, outer, depth.clone(), panel) };
        }
        return;
    }
    blocks::<P>(outer, depth, units, U::ELEMENTS, panels, |block, outer, depth| {
        for (row, index) in block.iter_mut().zip(outer) {
            let patch = patches.patch(index);
            let mut line = [U::Source::zeroed(); LINE];
            let mut place = 0;
            for segment in patches.segments(depth.clone()) {
                let Span { start, skip, len } = patches.span(patch, &segment);
                line[place + skip..][..len].copy_from_slice(&elements[start..][..len]);
                place += segment.len;
            }
            U::along(&line[..SIDE * U::ELEMENTS], row);
        }
        if P::ORDER == Order::AcrossDepth {
            // SAFETY: the caller's promise.
            unsafe { V::transpose(block) };
        }
    });
}

/// Packs a panel of at most [`SIDE`] patches whose segments are whole units.
///
/// # Safety
/// As [`pack_along`].
#[inline(always)]
unsafe fn along_panel<V: Lanes, U: Unit, P: PanelShape>(
    elements: &[U::Source],
    patches: &Patches,
    outer: Range<usize>,
    depth: Range<usize>,
    panel: &mut [u32],
) {
    let present = outer.len();
    let mut lanes = [Patch::default(); SIDE];
    if present > 0 {
        patches.patches(outer.start, &mut lanes[..present]);
    }
    let mut rest = panel;
    for segment in patches.segments(depth) {
        let mut spans = [Span::default(); SIDE];
        let mut is_whole = present == P::WIDTH;
        for (span, lane) in spans.iter_mut().zip(&lanes[..present]) {
            *span = patches.span(*lane, &segment);
            is_whole &= span.len == segment.len;
        }
        for start in (0..segment.len).step_by(SIDE * U::ELEMENTS) {
            let len = (SIDE * U::ELEMENTS).min(segment.len - start);
            let mut block = [[0; SIDE]; SIDE];
            // A line that is shorter than a block may be read with what follows it, which is not written.
            let last = spans[present.saturating_sub(1)].start + start + SIDE * U::ELEMENTS;
            if is_whole && last <= elements.len() {
                for (row, span) in block.iter_mut().zip(&spans[..P::WIDTH]) {
                    U::along(&elements[span.start + start..][..SIDE * U::ELEMENTS], row);
                }
            } else {
                partial_block::<U>(elements, &spans[..present], start, len, &mut block);
            }
            // SAFETY: the caller's promise.
            unsafe { V::transpose(&mut block) };
            let (lines, after) = std::mem::take(&mut rest).split_at_mut(len.div_ceil(U::ELEMENTS) * P::WIDTH);
            for (line, row) in lines.chunks_exact_mut(P::WIDTH).zip(&block) {
                line.copy_from_slice(&row[..P::WIDTH]);
            }
            rest = after;
        }
    }
    rest.fill(0);
}

/// Writes where the segments of `depth` of patches `outer` lie, panel after panel: for each segment the offset of its
/// elements in each of `panel_rows` patches, then their number. Returns the numbers of a panel.
///
/// Every segment must lie in the image or beyond its border as a whole.
#[inline(always)]
pub(super) fn locate(
    patches: &Patches,
    outer: Range<usize>,
    depth: Range<usize>,
    panel_rows: usize,
    table: &mut [u64],
) -> usize {
    let mut lanes = [Patch::default(); Blocks::TASK_ROWS];
    let lanes = &mut lanes[..outer.len()];
    patches.patches(outer.start, lanes);
    let line_len = panel_rows + 1;
    let panel_len = line_len * patches.segments(depth.clone()).count();
    let row_elements = patches.row_elements();
    for (index, segment) in patches.segments(depth).enumerate() {
        assert!(segment.len <= MAX_DEPTH, "a segment of {} elements is longer than the zeros", segment.len);
        let distance = segment.row * row_elements as isize + segment.column;
        for (panel, lanes) in lanes.chunks(panel_rows).enumerate() {
            let line = &mut table[panel * panel_len + index * line_len..][..line_len];
            for (offset, lane) in line.iter_mut().zip(lanes) {
                let (row, column) = (lane.row + segment.row, lane.column + segment.column);
                debug_assert!(
                    column + segment.len as isize <= 0
                        || (0..=row_elements as isize - segment.len as isize).contains(&column)
                        || column >= row_elements as isize,
                    "a segment is cut by the border"
                );
                let is_inside = (row as usize) < patches.image[0] && (column as usize) < row_elements;
                let start = lane.start.wrapping_add_signed(distance) as u64;
                *offset = if is_inside { start } else { ZERO_LINE };
            }
            line[lanes.len()..panel_rows].fill(ZERO_LINE);
            line[panel_rows] = segment.len as u64;
        }
    }
    panel_len
}

/// Reads `len` elements from `start` on of each span into a zeroed block.
#[inline(never)]
fn partial_block<U: Unit>(
    elements: &[U::Source],
    spans: &[Span],
    start: usize,
    len: usize,
    block: &mut Block,
) {
    for (row, span) in block.iter_mut().zip(spans) {
        let first = start.max(span.skip);
        let end = (start + len).min(span.skip + span.len);
        if first >= end {
            continue;
        }
        let source = &elements[span.start + first - span.skip..][..end - first];
        if first == start && end - first == SIDE * U::ELEMENTS {
            U::along(&source[..SIDE * U::ELEMENTS], row);
        } else {
            let mut line = [U::Source::zeroed(); LINE];
            line[first - start..][..source.len()].copy_from_slice(source);
            U::along(&line[..SIDE * U::ELEMENTS], row);
        }
    }
}

/// Packs patches that are the depth.
///
/// # Safety
/// As [`pack_along`].
#[inline(always)]
pub(super) unsafe fn pack_across<V: Lanes, U: Unit, P: PanelShape>(
    elements: &[U::Source],
    patches: &Patches,
    outer: Range<usize>,
    depth: Range<usize>,
    units: usize,
    panels: &mut [u32],
) {
    if P::ORDER == Order::AcrossDepth && U::ELEMENTS == 1 {
        for (index, panel) in panels.chunks_exact_mut(P::WIDTH * units).enumerate() {
            let first = (outer.start + index * P::WIDTH).min(outer.end);
            let outer = first..outer.end.min(first + P::WIDTH);
            panel[depth.len() * P::WIDTH..].fill(0);
            if outer.len() < P::WIDTH {
                panel.fill(0);
            }
            let mut place = 0;
            for segment in patches.segments(outer) {
                let panel = &mut panel[place..];
                match segment.len {
                    len if len == P::WIDTH => {
                        across_segment::<U, P>(elements, patches, &segment, P::WIDTH, depth.clone(), panel)
                    }
                    4 => across_segment::<U, P>(elements, patches, &segment, 4, depth.clone(), panel),
                    8 => across_segment::<U, P>(elements, patches, &segment, 8, depth.clone(), panel),
                    len => across_segment::<U, P>(elements, patches, &segment, len, depth.clone(), panel),
                }
                place += segment.len;
            }
        }
        return;
    }
    blocks::<P>(outer, depth, units, U::ELEMENTS, panels, |block, outer, depth| {
        for (row, index) in block.iter_mut().zip(depth.clone().step_by(U::ELEMENTS)) {
            let mut lines = [[U::Source::zeroed(); SIDE]; 2];
            let count = U::ELEMENTS.min(depth.end - index);
            for (line, index) in lines.iter_mut().zip(index..index + count) {
                let (patch, mut place) = (patches.patch(index), 0);
                for segment in patches.segments(outer.clone()) {
                    let Span { start, skip, len } = patches.span(patch, &segment);
                    line[place + skip..][..len].copy_from_slice(&elements[start..][..len]);
                    place += segment.len;
                }
            }
            // The second line of the last unit is zero, if there is none.
            let second: &[U::Source] = if U::ELEMENTS == 2 { &lines[1] } else { &[] };
            U::across([&lines[0], second], row);
        }
        if P::ORDER == Order::AlongDepth {
            // SAFETY: the caller's promise.
            unsafe { V::transpose(block) };
        }
    });
}

/// Packs one segment, `len` elements long, of all patches of `depth`; `panel` starts at its place in the first unit.
/// The patches of one row of the grid lie in one row of the image, so only their columns are compared with its ends.
#[inline(always)]
fn across_segment<U: Unit, P: PanelShape>(
    elements: &[U::Source],
    patches: &Patches,
    segment: &Segment,
    len: usize,
    depth: Range<usize>,
    panel: &mut [u32],
) {
    let distance = patches.step[1] * patches.pixel;
    let mut index = depth.start;
    while index < depth.end {
        let count = (patches.grid[1] - index % patches.grid[1]).min(depth.end - index);
        let target = &mut panel[(index - depth.start) * P::WIDTH..];
        let patch = patches.patch(index);
        index += count;
        let Some(row) = patches.row(patch, segment) else {
            for place in 0..count {
                target[place * P::WIDTH..][..len].fill(0);
            }
            continue;
        };
        let column = patches.column(patch, segment);
        let whole = whole_spans(patches.row_elements(), column, distance, len, count);
        for place in (0..whole.start).chain(whole.end..count) {
            let span = patches.span_of_row(row, column + (place * distance) as isize, len);
            let target = &mut target[place * P::WIDTH..][..len];
            target.fill(0);
            U::across([&elements[span.start..][..span.len], &[]], &mut target[span.skip..][..span.len]);
        }
        if whole.is_empty() {
            continue;
        }
        let start = row.wrapping_add_signed(column + (whole.start * distance) as isize);
        let source = &elements[start..];
        let target = &mut target[whole.start * P::WIDTH..];
        let last = whole.len() - 1;
        assert!(last * distance + len <= source.len() && last * P::WIDTH + len <= target.len());
        for place in 0..=last {
            // SAFETY: the last ones lie in the slices, as just checked; more checks would take longer than the copy.
            let (source, target) = unsafe {
                (
                    source.get_unchecked(place * distance..place * distance + len),
                    target.get_unchecked_mut(place * P::WIDTH..place * P::WIDTH + len),
                )
            };
            U::across([source, &[]], target);
        }
    }
}

/// Returns the places whose `len` elements lie in a row of `row_elements`. Place `i` of `count` starts at
/// `column + i · distance`.
#[inline(always)]
fn whole_spans(
    row_elements: usize,
    column: isize,
    distance: usize,
    len: usize,
    count: usize,
) -> Range<usize> {
    let first = if column < 0 { column.unsigned_abs().div_ceil(distance) } else { 0 };
    let last = row_elements as isize - len as isize - column;
    let end = if last < 0 { 0 } else { last as usize / distance + 1 };
    first.min(count)..end.min(count).max(first.min(count))
}

/// Packs filters.
///
/// # Safety
/// As [`pack_along`].
#[inline(always)]
pub(super) unsafe fn pack_filters<V: Lanes, U: Unit, P: PanelShape>(
    elements: &[U::Source],
    filters: &Filters,
    outer: Range<usize>,
    depth: Range<usize>,
    units: usize,
    panels: &mut [u32],
) {
    let whole_vectors = P::ORDER == Order::AcrossDepth && P::WIDTH.is_multiple_of(SIDE);
    if whole_vectors
        && U::ELEMENTS == 1
        && filters.order.is_whole_blocks(&depth)
        && let Some(taps) = filters.stored_taps()
    {
        // SAFETY: the caller's promise.
        unsafe { whole_filters::<V, U, P>(elements, filters, &taps, outer, depth, units, panels) };
        return;
    }
    blocks::<P>(outer, depth, units, U::ELEMENTS, panels, |block, outer, depth| {
        let mut offsets = [0; LINE];
        let mut rest = &mut offsets[..depth.len()];
        let mut index = depth.start;
        while !rest.is_empty() {
            let (first, run) = filters.at(index);
            let (offsets, after) = std::mem::take(&mut rest).split_at_mut(run.min(depth.end - index));
            for (place, offset) in offsets.iter_mut().enumerate() {
                *offset = first + place * filters.channel_stride;
            }
            index += offsets.len();
            rest = after;
        }
        for (row, lane) in block.iter_mut().zip(outer) {
            let lane = &elements[lane * filters.lane_stride..];
            let mut line = [U::Source::zeroed(); LINE];
            for (element, offset) in line.iter_mut().zip(&offsets[..depth.len()]) {
                *element = lane[*offset];
            }
            U::along(&line[..SIDE * U::ELEMENTS], row);
        }
        if P::ORDER == Order::AcrossDepth {
            // SAFETY: the caller's promise.
            unsafe { V::transpose(block) };
        }
    });
}

/// Packs filters in whole blocks of channels, in the order in which they are stored: neighbours in memory are transposed
/// with those of 16 lanes, then go to the places of their taps.
///
/// # Safety
/// As [`pack_along`].
#[inline(always)]
unsafe fn whole_filters<V: Lanes, U: Unit, P: PanelShape>(
    elements: &[U::Source],
    filters: &Filters,
    taps: &StoredTaps,
    outer: Range<usize>,
    depth: Range<usize>,
    units: usize,
    panels: &mut [u32],
) {
    let order = filters.order;
    let block_len = order.taps[0] * order.taps[1] * order.block;
    for (index, panel) in panels.chunks_exact_mut(P::WIDTH * units).enumerate() {
        panel[depth.len() * P::WIDTH..].fill(0);
        for column in (0..P::WIDTH).step_by(SIDE) {
            let first_lane = outer.start + index * P::WIDTH + column;
            let lanes = SIDE.min(outer.end.saturating_sub(first_lane));
            for start in depth.clone().step_by(block_len) {
                let panel = &mut panel[(start - depth.start) * P::WIDTH..];
                let first_channel = start / block_len * order.block;
                let width = order.block.min(order.channels - first_channel);
                // Channels whose taps follow each other in memory.
                let together = if filters.channel_stride == taps.count { width } else { 1 };
                for channel in (0..width).step_by(together) {
                    let from =
                        (first_channel + channel) * filters.channel_stride + first_lane * filters.lane_stride;
                    let (mut at_channel, mut at_tap) = (channel, 0);
                    for place in (0..together * taps.count).step_by(SIDE) {
                        let len = SIDE.min(together * taps.count - place);
                        let mut block = [[0; SIDE]; SIDE];
                        for (lane, row) in block[..lanes].iter_mut().enumerate() {
                            let line = &elements[from + lane * filters.lane_stride + place..];
                            // What follows a shorter line may be read too; it is not written.
                            match line.first_chunk::<SIDE>() {
                                Some(line) => U::along(line, row),
                                None => along_unlikely::<U>(&line[..len], row),
                            }
                        }
                        // SAFETY: the caller's promise.
                        unsafe { V::transpose(&mut block) };
                        for row in &block[..len] {
                            if let Some(tap) = taps.places[at_tap] {
                                let unit = usize::from(tap) * width + at_channel;
                                panel[unit * P::WIDTH + column..][..SIDE].copy_from_slice(row);
                            }
                            at_tap += 1;
                            if at_tap == taps.count {
                                (at_channel, at_tap) = (at_channel + 1, 0);
                            }
                        }
                    }
                }
            }
        }
    }
}
