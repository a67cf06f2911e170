//! Convolutions of random shapes against the reference, at every level and for every type.

use lockstep_plan::DType;
use lockstep_tensor::{Arena, Conv2d, ConvolutionKernels, CpuLevel, CpuQueue, View, Window2d, Write};
use proptest::prelude::*;

use super::reference;
use crate::reference::finite_differences;
use crate::testing::{
    self, ACTIVATIONS, assert_close, floats, on_every_queue, random_of, report_skipped, values,
};

/// A convolution with its operands, which the type of the activations represents exactly.
struct Case {
    conv: Conv2d,
    dtype: DType,
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Option<Vec<f64>>,
    dy: Vec<f64>,
}

impl Case {
    fn new(conv: Conv2d, dtype: DType, has_bias: bool) -> Self {
        let of = |seed, shape: lockstep_tensor::Shape| random_of(dtype, seed, shape.elements());
        Self {
            conv,
            dtype,
            x: of(1, conv.input_shape()),
            weight: of(2, conv.weight_shape()),
            bias: has_bias.then(|| random_of(dtype, 3, conv.out_channels())),
            dy: of(4, conv.output_shape()),
        }
    }

    /// Returns the output, the gradient of the input overwritten and accumulated, and that of the weight.
    fn run(&self, queue: &CpuQueue) -> Vec<Vec<f64>> {
        let Self { conv, dtype, .. } = *self;
        let [x, weight, dy] = [
            (conv.input_shape(), &self.x),
            (conv.weight_shape(), &self.weight),
            (conv.output_shape(), &self.dy),
        ]
        .map(|(shape, values)| floats(dtype, shape, values));
        let bias = self.bias.as_ref().map(|bias| floats(dtype, [conv.out_channels()], bias));
        let nan = |shape: lockstep_tensor::Shape| floats(dtype, shape, &vec![f64::NAN; shape.elements()]);
        let (y, dx) = (nan(conv.output_shape()), nan(conv.input_shape()));
        let added = floats(dtype, conv.input_shape(), &self.x);
        let dweight = floats(DType::F32, conv.weight_shape(), &self.weight);
        queue.conv2d(conv, x.view(), weight.view(), bias.as_ref().map(|bias| bias.view()), y.view());
        queue.conv2d_backward_input(conv, dy.view(), weight.view(), dx.view(), Write::Overwrite);
        queue.conv2d_backward_input(conv, dy.view(), weight.view(), added.view(), Write::Accumulate);
        queue.conv2d_backward_weight(conv, dy.view(), x.view(), dweight.view());
        [y, dx, added, dweight].map(|tensor| values(tensor.view())).to_vec()
    }

    /// Returns what [`Case::run`] must return.
    fn expected(&self) -> Vec<Vec<f64>> {
        let mut y = reference::conv2d(self.conv, &self.x, &self.weight);
        if let Some(bias) = &self.bias {
            y.iter_mut().enumerate().for_each(|(i, y)| *y += bias[i % bias.len()]);
        }
        let (dx, dweight) = reference::conv2d_backward(self.conv, &self.dy, &self.x, &self.weight);
        let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
        let (added, dweight) = (sum(&dx, &self.x), sum(&dweight, &self.weight));
        vec![y, dx, added, dweight]
    }

    fn check(&self, results: &[Vec<f64>], expected: &[Vec<f64>]) {
        let [height, width] = self.conv.window().kernel;
        let pixels = (self.conv.batch() * self.conv.output().iter().product::<usize>()) as f64;
        let channels = self.conv.in_channels().max(self.conv.out_channels());
        // Sums of terms of at most 4, in f32 and in some order.
        let absolute = |terms: f64| 4e-7 * terms + 1e-6;
        let terms = (height * width * channels + 2) as f64;
        let relative = if self.dtype == DType::F32 { 1e-6 } else { 1.0 / 256.0 + 1e-5 };
        for (index, name) in ["y", "dx", "dx added"].into_iter().enumerate() {
            assert_close(name, &results[index], &expected[index], relative, absolute(terms));
        }
        assert_close("dweight", &results[3], &expected[3], 1e-6, absolute(pixels));
    }
}

/// Sizes along one axis: (image, kernel, stride, padding, dilation) that fit.
fn axis(largest: usize) -> impl Strategy<Value = [usize; 5]> {
    (1..=largest, 1usize..=4, 1usize..=3, 0usize..=3, 1usize..=3).prop_map(
        |(size, kernel, stride, padding, dilation)| {
            let kernel = kernel.min((size + 2 * padding - 1) / dilation + 1);
            [size, kernel, stride, padding, dilation]
        },
    )
}

fn shape(batch: usize, [vertical, horizontal]: [[usize; 5]; 2], channels: [usize; 3]) -> Conv2d {
    let pair = |index: usize| [vertical[index], horizontal[index]];
    let window = Window2d { kernel: pair(1), stride: pair(2), padding: pair(3), dilation: pair(4) };
    let [groups, inputs, outputs] = channels;
    Conv2d::new([batch, vertical[0], horizontal[0], groups * inputs], groups * outputs, window, groups)
        .unwrap()
}

fn emulated() -> Option<CpuQueue> {
    let queue = testing::emulated(CpuLevel::AmxBf16, 2, &Arena::new());
    if queue.is_none() && CpuLevel::detect() != CpuLevel::AmxBf16 {
        report_skipped("convolutions on emulated tiles, which need AVX-512 BF16");
    }
    queue
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn kernels_of_three_by_three_match_the_reference(
        batch in 1usize..4,
        [height, width] in [3usize..12, 3usize..12],
        padding in [0usize..3, 0usize..3],
        [inputs, outputs] in [1usize..5, 1usize..4],
        has_bias in any::<bool>(),
    ) {
        let window = Window2d { padding, ..Window2d::square(3, 1, 0) };
        let conv = Conv2d::new([batch, height, width, 16 * inputs], 32 * outputs, window, 1).unwrap();
        let case = Case::new(conv, DType::F32, has_bias);
        let expected = case.expected();
        on_every_queue(|queue| case.run(queue), |results| case.check(results, &expected));
    }

    #[test]
    fn convolutions_and_their_gradients_match_the_reference(
        batch in 1usize..3,
        axes in [axis(9), axis(12)],
        channels in prop_oneof![
            [1usize..4, 1usize..6, 1usize..6],
            // Depthwise, in one and in several vectors.
            [2usize..40, 1usize..2, 1usize..2],
            [250usize..300, 1usize..2, 1usize..2],
            [1usize..2, 14usize..40, 10usize..40],
            // A first layer.
            [1usize..2, 1usize..6, 1usize..3].prop_map(|[groups, inputs, outputs]| [groups, inputs, 32 * outputs]),
            // Whole tiles of the gradient of the weight.
            [1usize..3, 4usize..10, 1usize..4].prop_map(|[groups, inputs, outputs]| [groups, 4 * inputs, 32 * outputs]),
        ],
        has_bias in any::<bool>(),
    ) {
        let conv = shape(batch, axes, channels);
        for dtype in ACTIVATIONS {
            let case = Case::new(conv, dtype, has_bias);
            let expected = case.expected();
            on_every_queue(|queue| case.run(queue), |results| case.check(results, &expected));
        }
    }
}

#[test]
fn patches_of_several_blocks_of_depth_match_the_reference() {
    // 9 · 130 elements are blocks of 80 and 50 channels; 81 · 20 have no block; 300 pixels are a task's rows and more.
    let wide = Conv2d::new([1, 6, 7, 130], 33, Window2d::square(3, 1, 1), 1).unwrap();
    let large = Conv2d::new([1, 10, 11, 20], 5, Window2d::square(9, 1, 4), 1).unwrap();
    let strided = Conv2d::new([2, 13, 9, 150], 120, Window2d::square(3, 2, 1), 1).unwrap();
    let many = Conv2d::new([3, 20, 21, 3], 8, Window2d::square(5, 1, 2), 1).unwrap();
    let few = Conv2d::new([1, 2, 2, 40], 24, Window2d::square(2, 2, 0), 1).unwrap();
    for conv in [wide, large, strided, many, few] {
        for dtype in [DType::F32, DType::BF16] {
            let case = Case::new(conv, dtype, true);
            let expected = case.expected();
            on_every_queue(|queue| case.run(queue), |results| case.check(results, &expected));
        }
    }
}

#[test]
fn filters_that_are_transformed_in_several_parts_match_the_reference() {
    // 16 · 448 units of transformed filters for each output channel: 192 of them fit the scratch memory.
    let conv = Conv2d::new([2, 4, 5, 448], 416, Window2d::square(3, 1, 1), 1).unwrap();
    let case = Case::new(conv, DType::F32, true);
    let expected = case.expected();
    on_every_queue(|queue| case.run(queue), |results| case.check(results, &expected));
}

#[test]
fn tiles_multiply_patches_too() {
    let Some(queue) = emulated() else { return };
    let dilated = Window2d { dilation: [1, 2], ..Window2d::square(3, 2, 2) };
    let odd = Conv2d::new([1, 7, 9, 3], 4, Window2d::square(3, 1, 1), 1).unwrap();
    let even = Conv2d::new([2, 6, 7, 36], 40, dilated, 2).unwrap();
    for (conv, dtype) in [odd, even].into_iter().flat_map(|conv| ACTIVATIONS.map(|dtype| (conv, dtype))) {
        let case = Case::new(conv, dtype, true);
        case.check(&case.run(&queue), &case.expected());
    }
}

#[test]
fn the_reference_gradients_match_finite_differences() {
    let window = Window2d { kernel: [3, 2], stride: [2, 1], padding: [1, 0], dilation: [1, 2] };
    let conv = Conv2d::new([2, 5, 4, 4], 6, window, 2).unwrap();
    let case = Case::new(conv, DType::F32, false);
    let loss = |x: &[f64], weight: &[f64]| -> f64 {
        reference::conv2d(conv, x, weight).iter().zip(&case.dy).map(|(y, dy)| y * dy).sum()
    };
    let (dx, dweight) = reference::conv2d_backward(conv, &case.dy, &case.x, &case.weight);
    let by_x = finite_differences(&case.x, |x| loss(x, &case.weight));
    let by_weight = finite_differences(&case.weight, |weight| loss(&case.x, weight));
    assert_close("dx", &dx, &by_x, 1e-6, 1e-6);
    assert_close("dweight", &dweight, &by_weight, 1e-6, 1e-6);
}

#[test]
fn no_images_leave_the_gradient_of_the_weight_as_it_was() {
    let conv = Conv2d::new([0, 5, 5, 4], 6, Window2d::square(3, 2, 1), 2).unwrap();
    let case = Case::new(conv, DType::F32, true);
    on_every_queue(
        |queue| case.run(queue),
        |results| {
            assert!(results[..3].iter().all(Vec::is_empty));
            assert_eq!(results[3], case.weight);
        },
    );
}

#[test]
#[should_panic(expected = "conv2d: the weight must be f32 with 54 elements, not f32 [3]")]
fn a_weight_of_another_shape_is_refused() {
    let conv = Conv2d::new([1, 5, 5, 3], 2, Window2d::square(3, 1, 1), 1).unwrap();
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    let tensor = |shape: lockstep_tensor::Shape| floats(DType::F32, shape, &vec![0.0; shape.elements()]);
    let (x, y, weight) = (tensor(conv.input_shape()), tensor(conv.output_shape()), tensor([3].into()));
    let run = |weight: View<'_>| queue.conv2d(conv, x.view(), weight, None, y.view());
    run(weight.view());
}
