//! The matrices of a convolution as index arithmetic: patches of an image, filters, and pixels of a grid. None of them
//! is ever stored.
//!
//! A patch is what one output pixel sees of the image: for each tap of the kernel the channels of one pixel, zero
//! beyond the border. Element `k` of a patch belongs to (block of channels, tap, channel), in this order. With blocks
//! of channels, a block of the depth of a product reads each filter as one contiguous range.

use std::ops::Range;

/// Smallest number of channels that are read as they lie in the image. Fewer are joined with those of the neighbouring
/// taps, and packed.
pub(super) const LONG_SEGMENT: usize = 16;

/// Order of the elements of a patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TapOrder {
    /// Rows and columns of taps.
    pub(super) taps: [usize; 2],
    /// Channels of a tap.
    pub(super) channels: usize,
    /// Channels of a block; the last block may have fewer.
    pub(super) block: usize,
}

/// Position of an element of a patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tap {
    pub(super) row: usize,
    pub(super) column: usize,
    pub(super) channel: usize,
    /// Elements from this one on that belong to the same tap and block.
    pub(super) rest: usize,
}

impl TapOrder {
    /// Number of elements of a patch.
    pub(super) fn len(&self) -> usize {
        self.taps[0] * self.taps[1] * self.channels
    }

    /// Returns true if a range of a patch's elements is whole blocks of channels.
    pub(super) fn is_whole_blocks(&self, elements: &Range<usize>) -> bool {
        let block_len = self.taps[0] * self.taps[1] * self.block;
        let is_border = |index: usize| index.is_multiple_of(block_len) || index == self.len();
        is_border(elements.start) && is_border(elements.end)
    }

    /// Returns the position of element `index`.
    #[inline(always)]
    pub(super) fn at(&self, index: usize) -> Tap {
        let block_len = self.taps[0] * self.taps[1] * self.block;
        let (block, rest) = (index / block_len, index % block_len);
        let width = self.block.min(self.channels - block * self.block);
        let (tap, channel) = (rest / width, rest % width);
        Tap {
            row: tap / self.taps[1],
            column: tap % self.taps[1],
            channel: block * self.block + channel,
            rest: width - channel,
        }
    }
}

/// The patches of a batch of images `[batch, height, width, pixel]`, one for each pixel of a grid.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patches {
    pub(super) order: TapOrder,
    /// Height and width of an image.
    pub(super) image: [usize; 2],
    /// Elements of a pixel: the channels of all groups.
    pub(super) pixel: usize,
    /// Rows and columns of the grid; each image has one.
    pub(super) grid: [usize; 2],
    /// Distance in the image between neighbours of the grid.
    pub(super) step: [usize; 2],
    /// Position in the image of the first tap of the grid's first patch.
    pub(super) origin: [isize; 2],
    /// Distance in the image between neighbouring taps.
    pub(super) tap_step: [usize; 2],
}

/// One patch: its image and the position of its first tap there.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Patch {
    /// Index of the image's first element.
    image: usize,
    /// Index of the first tap's first element; before the image if the tap sees padding.
    pub(super) start: usize,
    pub(super) row: isize,
    /// Index of the first tap's pixel in the image's row, in elements.
    pub(super) column: isize,
}

/// Elements of a patch that are neighbours in the image too.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    /// Row relative to that of the patch.
    pub(super) row: isize,
    /// First element relative to the patch's first.
    pub(super) column: isize,
    pub(super) len: usize,
}

/// The part of a segment that lies in the image; the rest is zero.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Span {
    /// Index of the first element.
    pub(super) start: usize,
    /// Zeros before it.
    pub(super) skip: usize,
    pub(super) len: usize,
}

impl Patches {
    /// Returns true if the taps of a row are neighbours in the image and in a patch.
    #[inline(always)]
    fn has_contiguous_rows(&self) -> bool {
        let order = self.order;
        let is_dense = self.tap_step[1] == 1 && order.channels == self.pixel;
        is_dense && order.channels < LONG_SEGMENT && order.block >= order.channels
    }

    /// Returns true if every segment has an even number of elements.
    pub(super) fn is_even(&self) -> bool {
        self.order.channels.is_multiple_of(2) && self.order.block.is_multiple_of(2)
    }

    /// Returns patch `index` of all images.
    #[inline(always)]
    pub(super) fn patch(&self, index: usize) -> Patch {
        let (row, column) = (index / self.grid[1], index % self.grid[1]);
        let (image, row) = (row / self.grid[0], row % self.grid[0]);
        let at = |index: usize, axis: usize| (index * self.step[axis]) as isize + self.origin[axis];
        let image = image * self.image[0] * self.row_elements();
        let (row, column) = (at(row, 0), at(column, 1) * self.pixel as isize);
        let start = image.wrapping_add_signed(row * self.row_elements() as isize + column);
        Patch { image, start, row, column }
    }

    /// Writes the patches from `index` on to `patches`. They must exist.
    #[inline(always)]
    pub(super) fn patches(&self, index: usize, patches: &mut [Patch]) {
        let (mut patch, mut column) = (self.patch(index), index % self.grid[1]);
        let distance = (self.step[1] * self.pixel) as isize;
        for (place, to) in patches.iter_mut().enumerate() {
            if column == self.grid[1] {
                (patch, column) = (self.patch(index + place), 0);
            }
            *to = patch;
            patch.column += distance;
            patch.start = patch.start.wrapping_add_signed(distance);
            column += 1;
        }
    }

    /// Elements of a row of an image.
    #[inline(always)]
    pub(super) fn row_elements(&self) -> usize {
        self.image[1] * self.pixel
    }

    /// Returns the segments of a range of a patch's elements.
    #[inline(always)]
    pub(super) fn segments(&self, elements: Range<usize>) -> impl Iterator<Item = Segment> {
        let mut start = elements.start;
        std::iter::from_fn(move || {
            (start < elements.end).then(|| {
                let segment = self.segment(start, elements.end);
                start += segment.len;
                segment
            })
        })
    }

    #[inline(always)]
    fn segment(&self, start: usize, end: usize) -> Segment {
        let row = |tap: usize| (tap * self.tap_step[0]) as isize;
        if self.has_contiguous_rows() {
            let len = self.order.taps[1] * self.order.channels;
            let column = start % len;
            return Segment {
                row: row(start / len),
                column: column as isize,
                len: (len - column).min(end - start),
            };
        }
        let tap = self.order.at(start);
        let column = tap.column * self.tap_step[1] * self.pixel + tap.channel;
        Segment { row: row(tap.row), column: column as isize, len: tap.rest.min(end - start) }
    }

    /// Returns the part of a patch's segment that lies in the image.
    #[inline(always)]
    pub(super) fn span(&self, patch: Patch, segment: &Segment) -> Span {
        match self.row(patch, segment) {
            Some(row) => self.span_of_row(row, patch.column + segment.column, segment.len),
            None => Span::default(),
        }
    }

    /// Returns the first element of the row of the image in which a segment lies; `None` if it lies in none.
    #[inline(always)]
    pub(super) fn row(&self, patch: Patch, segment: &Segment) -> Option<usize> {
        let row = usize::try_from(patch.row + segment.row).ok().filter(|row| *row < self.image[0])?;
        Some(patch.image + row * self.row_elements())
    }

    /// Returns the index in the row of the image of a segment's first element.
    #[inline(always)]
    pub(super) fn column(&self, patch: Patch, segment: &Segment) -> isize {
        patch.column + segment.column
    }

    /// Returns the part of the elements `column..column + len` that lies in the row.
    #[inline(always)]
    pub(super) fn span_of_row(&self, row: usize, column: isize, len: usize) -> Span {
        let (first, end) = (column.max(0), (column + len as isize).min(self.row_elements() as isize));
        if first >= end {
            return Span::default();
        }
        Span { start: row + first as usize, skip: (first - column) as usize, len: (end - first) as usize }
    }
}

/// The filters of a convolution: the element of patch element `k` and lane `l` is `offset(k) + l · lane_stride`. A
/// lane is an output channel, or an input channel in the gradient of the input.
#[derive(Debug, Clone, Copy)]
pub(super) struct Filters {
    pub(super) order: TapOrder,
    pub(super) lane_stride: usize,
    pub(super) channel_stride: usize,
    /// Offset of the first tap.
    pub(super) first_tap: usize,
    /// Distances between the rows and columns of taps.
    pub(super) tap_strides: [isize; 2],
}

/// The taps of a channel as they are stored: its elements for one lane are contiguous.
pub(super) struct StoredTaps {
    /// Number of stored taps.
    pub(super) count: usize,
    /// Index among the taps of a patch; `None` if the patches lack the tap.
    pub(super) places: [Option<u8>; Self::MOST],
}

impl StoredTaps {
    /// Largest number of taps, those of a kernel of 8 × 8.
    const MOST: usize = 64;
}

impl Filters {
    /// Returns the stored taps, unless there are too many of them or most are in no patch.
    pub(super) fn stored_taps(&self) -> Option<StoredTaps> {
        // The taps are the innermost dimension of the weight; one of the other two is next to them.
        let count = self.lane_stride.min(self.channel_stride);
        let [rows, columns] = self.order.taps;
        if count > StoredTaps::MOST || 2 * rows * columns < count {
            return None;
        }
        let mut places = [None; StoredTaps::MOST];
        for tap in 0..rows * columns {
            let (row, column) = (tap / columns, tap % columns);
            let offset = row as isize * self.tap_strides[0] + column as isize * self.tap_strides[1];
            places[self.first_tap.wrapping_add_signed(offset)] = u8::try_from(tap).ok();
        }
        Some(StoredTaps { count, places })
    }

    /// Returns the offset of element `index` of a patch, and the number of elements from it on that follow each other at
    /// the distance `channel_stride`.
    #[inline(always)]
    pub(super) fn at(&self, index: usize) -> (usize, usize) {
        let tap = self.order.at(index);
        let offset = tap.row as isize * self.tap_strides[0] + tap.column as isize * self.tap_strides[1];
        (self.first_tap.wrapping_add_signed(offset) + tap.channel * self.channel_stride, tap.rest)
    }
}

/// The rows of an output that are the pixels of a grid.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    /// Rows and columns of the grid; each image has one.
    pub(super) size: [usize; 2],
    /// Elements between neighbouring images, rows and columns.
    pub(super) strides: [usize; 3],
}

impl Grid {
    /// Returns the first element of row `index` of the output.
    #[inline(always)]
    pub(super) fn offset(&self, index: usize) -> usize {
        let (row, column) = (index / self.size[1], index % self.size[1]);
        let (image, row) = (row / self.size[0], row % self.size[0]);
        image * self.strides[0] + row * self.strides[1] + column * self.strides[2]
    }
}
