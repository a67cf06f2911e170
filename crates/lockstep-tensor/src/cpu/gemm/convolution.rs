//! Convolution by implicit GEMM: the loops and micro-kernels of the matrix product, on operands that are packed
//! directly from images and filters.
//!
//! - Forward: patches of the input `[pixels, taps · in]` times filters.
//! - Gradient of the input: patches of the output's gradient times filters. With a stride, the pixels of the input
//!   fall into classes that see different taps, and each class is a product of its own.
//! - Gradient of the weight: transposed patches of the input `[taps · in, pixels]` times the output's gradient. In f32,
//!   [`weight_gradient`] reads both in place.
//!
//! In f32, [`winograd`] computes the first two for kernels of 3 × 3 with stride 1, and [`few_channels`] the first and the last
//! of a network's first layer.

use lockstep_plan::DType;

use super::{
    dispatch::Multiply,
    few_channels,
    operand::{Operand, Order},
    patches::{Filters, Grid, Patches, TapOrder},
    problem::Problem,
    scratch::MAX_DEPTH,
    store::{Target, Window},
    weight_gradient, winograd,
};
use crate::{
    Conv2d, ConvolutionKernels, CpuQueue, Gemm, GemmKernels, GemmLayout, View, Window2d, Write,
    cpu::{
        operands::{check_disjoint, expect},
        simd::{inlined, with_float},
        vision::{depthwise, depthwise_backward_input, depthwise_backward_weight, is_depthwise},
    },
};

/// Channels of a block of the weight's gradient: the rows of the panels of A, or a multiple of them.
const GRADIENT_BLOCK: usize = 12;
/// Granularity of blocks of channels: the elements of a block that packing transposes at once.
const BLOCK_GRAIN: usize = 16;

impl ConvolutionKernels for CpuQueue {
    fn conv2d(&self, conv: Conv2d, x: View<'_>, weight: View<'_>, bias: Option<View<'_>>, y: View<'_>) {
        check("conv2d", conv, x, weight, y);
        check_disjoint(&[y], &[x, weight]);
        if let Some(bias) = bias {
            expect("conv2d: bias", bias, x.dtype(), conv.out_channels());
            check_disjoint(&[y], &[bias]);
        }
        if is_pointwise(conv) {
            let (x, weight, y) = as_matrices(conv, x, weight, y);
            let (layout, write) = (GemmLayout::NT, Write::Overwrite);
            return self.gemm(Gemm { layout, a: x, b: weight, c: y, bias, write });
        }
        if is_depthwise(conv) {
            return depthwise(self, conv, x, weight, bias, y);
        }
        if forward_in_f32(self, conv, x, weight, bias, y) {
            return;
        }
        with_float!(x.dtype(), T => forward::<T>(self, conv, x, weight, bias, y));
    }

    fn conv2d_backward_input(
        &self,
        conv: Conv2d,
        dy: View<'_>,
        weight: View<'_>,
        dx: View<'_>,
        write: Write,
    ) {
        check("conv2d_backward_input", conv, dx, weight, dy);
        check_disjoint(&[dx], &[dy, weight]);
        if is_pointwise(conv) {
            let (dx, weight, dy) = as_matrices(conv, dx, weight, dy);
            return self.gemm(Gemm { layout: GemmLayout::NN, a: dy, b: weight, c: dx, bias: None, write });
        }
        if is_depthwise(conv) {
            return depthwise_backward_input(self, conv, dy, weight, dx, write);
        }
        if backward_input_in_f32(self, conv, dy, weight, dx, write) {
            return;
        }
        with_float!(dy.dtype(), T => backward_input::<T>(self, conv, dy, weight, dx, write));
    }

    fn conv2d_backward_weight(&self, conv: Conv2d, dy: View<'_>, x: View<'_>, dweight: View<'_>) {
        let elements = conv.weight_shape().elements();
        expect("conv2d_backward_weight: dweight", dweight, DType::F32, elements);
        expect("conv2d_backward_weight: x", x, x.dtype(), conv.input_shape().elements());
        expect("conv2d_backward_weight: dy", dy, x.dtype(), conv.output_shape().elements());
        check_disjoint(&[dweight], &[dy, x]);
        if is_pointwise(conv) {
            let (x, c, dy) = as_matrices(conv, x, dweight, dy);
            let (layout, write) = (GemmLayout::TN, Write::Accumulate);
            return self.gemm(Gemm { layout, a: dy, b: x, c, bias: None, write });
        }
        if is_depthwise(conv) {
            return depthwise_backward_weight(self, conv, dy, x, dweight);
        }
        if backward_weight_in_f32(self, conv, dy, x, dweight) {
            return;
        }
        with_float!(x.dtype(), T => backward_weight::<T>(self, conv, dy, x, dweight));
    }
}

/// Checks the operands of a convolution.
fn check(kernel: &str, conv: Conv2d, x: View<'_>, weight: View<'_>, y: View<'_>) {
    expect(format_args!("{kernel}: the input"), x, y.dtype(), conv.input_shape().elements());
    expect(format_args!("{kernel}: the weight"), weight, y.dtype(), conv.weight_shape().elements());
    expect(format_args!("{kernel}: the output"), y, x.dtype(), conv.output_shape().elements());
}

/// Returns true if each output pixel is a linear function of the input pixel at the same place.
fn is_pointwise(conv: Conv2d) -> bool {
    let Window2d { kernel, stride, padding, .. } = conv.window();
    conv.groups() == 1 && (kernel, stride, padding) == ([1; 2], [1; 2], [0; 2])
}

/// Returns the operands of a pointwise convolution as matrices.
fn as_matrices<'a>(
    conv: Conv2d,
    x: View<'a>,
    weight: View<'a>,
    y: View<'a>,
) -> (View<'a>, View<'a>, View<'a>) {
    let pixels = conv.batch() * conv.input()[0] * conv.input()[1];
    let (inputs, outputs) = (conv.in_channels(), conv.out_channels());
    (x.reshape([pixels, inputs]), weight.reshape([outputs, inputs]), y.reshape([pixels, outputs]))
}

/// Computes the convolution by the algorithms for f32. Returns false if the operands are of another type or none applies.
fn forward_in_f32(
    queue: &CpuQueue,
    conv: Conv2d,
    x: View<'_>,
    weight: View<'_>,
    bias: Option<View<'_>>,
    y: View<'_>,
) -> bool {
    if x.dtype() != DType::F32 {
        return false;
    }
    // SAFETY: the caller has checked the sizes, and that `y` overlaps no other operand; no other kernel runs meanwhile.
    unsafe {
        let (x, weight, y) = (x.slice(), weight.slice(), y.slice_mut());
        let bias = bias.map(|bias| bias.slice());
        let operands = winograd::Operands::forward(conv, x, weight, bias, y);
        operands.is_some_and(|operands| winograd::convolve(queue, operands))
            || few_channels::forward(queue, conv, x, weight, bias, y)
    }
}

/// Computes the gradient of the input, as [`forward_in_f32`].
fn backward_input_in_f32(
    queue: &CpuQueue,
    conv: Conv2d,
    dy: View<'_>,
    weight: View<'_>,
    dx: View<'_>,
    write: Write,
) -> bool {
    if dy.dtype() != DType::F32 {
        return false;
    }
    // SAFETY: as above, for `dx`.
    unsafe {
        let (dy, weight, dx) = (dy.slice(), weight.slice(), dx.slice_mut());
        let operands = winograd::Operands::backward_input(conv, dy, weight, dx, write);
        operands.is_some_and(|operands| winograd::convolve(queue, operands))
    }
}

/// Adds the gradient of the weight, as [`forward_in_f32`].
fn backward_weight_in_f32(
    queue: &CpuQueue,
    conv: Conv2d,
    dy: View<'_>,
    x: View<'_>,
    dweight: View<'_>,
) -> bool {
    if x.dtype() != DType::F32 {
        return false;
    }
    // SAFETY: as above, for `dweight`.
    unsafe {
        let (dy, x, dweight) = (dy.slice(), x.slice(), dweight.slice_mut::<f32>());
        let dweight = Window::new(dweight.as_mut_ptr(), 1);
        let operands = weight_gradient::Operands { conv, dy, x, dweight };
        weight_gradient::add(queue, operands) || few_channels::add_weight_gradient(queue, operands)
    }
}

/// Returns the order in which the elements of a patch are the depth of a product.
fn depth_order(taps: [usize; 2], channels: usize) -> TapOrder {
    let count = (taps[0] * taps[1]).max(1);
    let largest = MAX_DEPTH / count / BLOCK_GRAIN * BLOCK_GRAIN;
    let block = match largest {
        // Whole patches fit, or the kernel is so large that no block of channels does.
        _ if count * channels <= MAX_DEPTH || largest == 0 => channels,
        _ => channels.div_ceil(channels.div_ceil(largest)).next_multiple_of(BLOCK_GRAIN),
    };
    TapOrder { taps, channels, block: block.max(1) }
}

/// Returns the patches that the output pixels see.
fn input_patches(conv: Conv2d, order: TapOrder) -> Patches {
    let Window2d { stride, padding, dilation, .. } = conv.window();
    Patches {
        order,
        image: conv.input(),
        pixel: conv.in_channels(),
        grid: conv.output(),
        step: stride,
        origin: padding.map(|padding| -(padding as isize)),
        tap_step: dilation,
    }
}

/// Returns the filters with output channels as lanes.
fn filters_by_output(conv: Conv2d, order: TapOrder) -> Filters {
    let [rows, columns] = conv.window().kernel;
    Filters {
        order,
        lane_stride: order.channels * rows * columns,
        channel_stride: rows * columns,
        first_tap: 0,
        tap_strides: [columns as isize, 1],
    }
}

/// Returns the elements from `start` on; none if there are fewer.
fn from<T>(elements: &[T], start: usize) -> &[T] {
    elements.get(start..).unwrap_or_default()
}

fn forward<T: Multiply<T>>(
    queue: &CpuQueue,
    conv: Conv2d,
    x: View<'_>,
    weight: View<'_>,
    bias: Option<View<'_>>,
    y: View<'_>,
) {
    let groups = conv.groups();
    let (inputs, outputs) = (conv.in_channels() / groups, conv.out_channels() / groups);
    let order = depth_order(conv.window().kernel, inputs);
    let (patches, filters) = (input_patches(conv, order), filters_by_output(conv, order));
    // SAFETY: `y` overlaps no other operand, and no other kernel runs meanwhile.
    let (x, weight, bias, y) = unsafe {
        (x.slice::<T>(), weight.slice::<T>(), bias.map(|bias| bias.slice::<T>()), y.slice_mut::<T>())
    };
    let rows = y.len() / conv.out_channels().max(1);
    let c = Window::new(y.as_mut_ptr(), conv.out_channels());
    let problems = (0..groups).map(|group| {
        let weight = from(weight, group * outputs * order.len());
        Problem {
            m: rows,
            of_rows: rows,
            n: outputs,
            k: order.len(),
            a: Operand::patches(from(x, group * inputs), &patches, Order::AlongDepth),
            b: match order.taps {
                [1, 1] => Operand::new(weight, inputs, Order::AlongDepth),
                _ => Operand::filters(weight, &filters),
            },
            // SAFETY: each group writes its own channels; without pixels the window is not used.
            c: Target::Matrix(unsafe { c.at(0, if rows == 0 { 0 } else { group * outputs }) }),
            bias: bias.map(|bias| &bias[group * outputs..][..outputs]),
            write: Write::Overwrite,
        }
    });
    T::multiply(queue, problems);
}

/// The taps that one class of input pixels sees along an axis: those of an arithmetic progression.
#[derive(Debug, Clone, Copy)]
struct PhaseAxis {
    /// Pixels of the class.
    pixels: usize,
    taps: usize,
    /// The last tap of the progression; a patch reads it first.
    last_tap: usize,
    tap_step: usize,
    /// Position in the output that the class's first pixel sees through the last tap.
    origin: isize,
    /// Distance in the output between neighbouring taps.
    distance: usize,
}

impl PhaseAxis {
    /// Returns the class of pixels `phase`, `phase + stride`, ... of an axis.
    fn new(conv: Conv2d, axis: usize, phase: usize) -> Self {
        let Window2d { kernel, stride, padding, dilation } = conv.window();
        let [kernel, stride, padding, dilation] =
            [kernel, stride, padding, dilation].map(|sizes| sizes[axis]);
        // Input pixel i sees output pixel o through tap t if o · stride = i + padding - t · dilation.
        let tap_step = stride / greatest_common_divisor(stride, dilation);
        let sees = |tap: &usize| (phase + padding).abs_diff(tap * dilation).is_multiple_of(stride);
        let first = (0..kernel.min(tap_step)).find(sees);
        let taps = first.map_or(0, |first| (kernel - 1 - first) / tap_step + 1);
        let last_tap = first.map_or(0, |first| first + (taps - 1) * tap_step);
        Self {
            pixels: conv.input()[axis].saturating_sub(phase).div_ceil(stride),
            taps,
            last_tap,
            tap_step,
            origin: ((phase + padding) as isize - (last_tap * dilation) as isize).div_euclid(stride as isize),
            distance: tap_step * dilation / stride,
        }
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

fn backward_input<T: Multiply<T>>(
    queue: &CpuQueue,
    conv: Conv2d,
    dy: View<'_>,
    weight: View<'_>,
    dx: View<'_>,
    write: Write,
) {
    // SAFETY: `dx` overlaps no other operand, and no other kernel runs meanwhile.
    let (dy, weight, dx) = unsafe { (dy.slice::<T>(), weight.slice::<T>(), dx.slice_mut::<T>()) };
    let dx = Window::new(dx.as_mut_ptr(), 1);
    let [vertical, horizontal] = conv.window().stride;
    for row in 0..vertical.min(conv.input()[0]) {
        for column in 0..horizontal.min(conv.input()[1]) {
            let axes = [PhaseAxis::new(conv, 0, row), PhaseAxis::new(conv, 1, column)];
            backward_input_phase::<T>(queue, conv, [row, column], axes, (dy, weight, dx), write);
        }
    }
}

/// Computes the gradient of one class of input pixels.
fn backward_input_phase<T: Multiply<T>>(
    queue: &CpuQueue,
    conv: Conv2d,
    phase: [usize; 2],
    axes: [PhaseAxis; 2],
    (dy, weight, dx): (&[T], &[T], Window<T>),
    write: Write,
) {
    let groups = conv.groups();
    let (inputs, outputs) = (conv.in_channels() / groups, conv.out_channels() / groups);
    let Window2d { kernel: [_, columns], stride, .. } = conv.window();
    let taps = conv.window().taps();
    let [rows_axis, columns_axis] = axes;
    let order = depth_order(axes.map(|axis| axis.taps), outputs);
    let size = axes.map(|axis| axis.pixels);
    let patches = Patches {
        order,
        image: conv.output(),
        pixel: conv.out_channels(),
        grid: size,
        step: [1, 1],
        origin: axes.map(|axis| axis.origin),
        tap_step: axes.map(|axis| axis.distance),
    };
    let filters = Filters {
        order,
        lane_stride: taps,
        channel_stride: inputs * taps,
        first_tap: rows_axis.last_tap * columns + columns_axis.last_tap,
        tap_strides: [-((rows_axis.tap_step * columns) as isize), -(columns_axis.tap_step as isize)],
    };
    let [pixel, line] = [conv.in_channels(), conv.input()[1] * conv.in_channels()];
    let grid = Grid { size, strides: [conv.input()[0] * line, stride[0] * line, stride[1] * pixel] };
    let rows = conv.batch() * size[0] * size[1];
    if order.len() == 0 {
        // No output pixel sees these.
        if write == Write::Overwrite {
            let first = phase[0] * line + phase[1] * pixel;
            queue.for_each_row(
                rows,
                pixel,
                inlined!(|row, _| {
                    // SAFETY: the pixel lies in the gradient, and each belongs to one task.
                    unsafe { dx.row(first + grid.offset(row), pixel) }.fill(T::store(0.0));
                }),
            );
        }
        return;
    }
    let problems = (0..groups).map(|group| {
        let weight = from(weight, group * outputs * inputs * taps);
        let first = if rows == 0 { 0 } else { phase[0] * line + phase[1] * pixel + group * inputs };
        Problem {
            m: rows,
            of_rows: rows,
            n: inputs,
            k: order.len(),
            a: Operand::patches(from(dy, group * outputs), &patches, Order::AlongDepth),
            b: match taps {
                1 => Operand::new(weight, inputs, Order::AcrossDepth),
                _ => Operand::filters(weight, &filters),
            },
            // SAFETY: the pixel lies in the gradient; each class and group writes its own elements.
            c: Target::Grid(unsafe { dx.at(first, 0) }, &grid),
            bias: None,
            write,
        }
    });
    T::multiply(queue, problems);
}

fn backward_weight<T: Multiply<f32>>(
    queue: &CpuQueue,
    conv: Conv2d,
    dy: View<'_>,
    x: View<'_>,
    dweight: View<'_>,
) {
    let groups = conv.groups();
    let (inputs, outputs) = (conv.in_channels() / groups, conv.out_channels() / groups);
    // Taps of the same channels follow each other, so that the lines of the gradient are still in the cache.
    let block = if inputs < BLOCK_GRAIN { inputs } else { GRADIENT_BLOCK };
    let order = TapOrder { taps: conv.window().kernel, channels: inputs, block: block.max(1) };
    let (patches, filters) = (input_patches(conv, order), filters_by_output(conv, order));
    // SAFETY: `dweight` overlaps no other operand, and no other kernel runs meanwhile.
    let (dy, x, dweight) = unsafe { (dy.slice::<T>(), x.slice::<T>(), dweight.slice_mut::<f32>()) };
    let c = Window::new(dweight.as_mut_ptr(), 1);
    let problems = (0..groups).map(|group| Problem {
        m: order.len(),
        of_rows: order.len(),
        n: outputs,
        k: conv.batch() * conv.output()[0] * conv.output()[1],
        a: Operand::patches(from(x, group * inputs), &patches, Order::AcrossDepth),
        b: Operand::new(from(dy, group * outputs), conv.out_channels(), Order::AcrossDepth),
        // SAFETY: the group's filters lie in the gradient, and no other group writes them.
        c: Target::Filters(unsafe { c.at(group * outputs * order.len(), 0) }, &filters),
        bias: None,
        write: Write::Accumulate,
    });
    T::multiply(queue, problems);
}
