//! Pooling against the reference.

use lockstep_plan::DType;
use lockstep_tensor::{CpuQueue, Pool2d, PoolKernels, Window2d, Write};
use proptest::prelude::*;

use crate::reference::finite_differences;
use crate::testing::{
    ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tensor, tolerance, values,
};

/// Calls `work` with the indices in output and input, and the element of the kernel, of all pairs.
fn for_each_pair(pool: Pool2d, mut work: impl FnMut(usize, usize, usize)) {
    let ([height, width], [rows, columns], channels) = (pool.input(), pool.output(), pool.channels());
    let Window2d { kernel, stride, padding, dilation } = pool.window();
    for out in 0..pool.output_shape().elements() {
        let (pixel, channel) = (out / channels, out % channels);
        let (image, row, column) = (pixel / (rows * columns), pixel / columns % rows, pixel % columns);
        for tap in 0..kernel[0] * kernel[1] {
            let y = (row * stride[0] + tap / kernel[1] * dilation[0]).wrapping_sub(padding[0]);
            let x = (column * stride[1] + tap % kernel[1] * dilation[1]).wrapping_sub(padding[1]);
            if y < height && x < width {
                work(out, ((image * height + y) * width + x) * channels + channel, tap);
            }
        }
    }
}

/// Returns the maxima, and for each the index in the input and in the kernel.
fn max_pool(pool: Pool2d, x: &[f64]) -> Vec<(f64, usize, usize)> {
    let mut best = vec![(f64::NEG_INFINITY, usize::MAX, 0); pool.output_shape().elements()];
    for_each_pair(pool, |out, at, tap| {
        if best[out].1 == usize::MAX || x[at] > best[out].0 {
            best[out] = (x[at], at, tap);
        }
    });
    best
}

fn average_pool(pool: Pool2d, x: &[f64]) -> Vec<f64> {
    let mut y = vec![0.0; pool.output_shape().elements()];
    let elements = pool.window().taps() as f64;
    for_each_pair(pool, |out, at, _| y[out] += x[at] / elements);
    y
}

fn axis() -> impl Strategy<Value = [usize; 5]> {
    (1usize..12, 1usize..=4, 1usize..=3, 0usize..=2, 1usize..=2).prop_map(
        |(size, kernel, stride, padding, dilation)| {
            let padding = padding.min(kernel / 2);
            let kernel = kernel.min((size + 2 * padding - 1) / dilation + 1);
            [size, kernel, stride, padding.min(kernel / 2), dilation]
        },
    )
}

fn pools() -> impl Strategy<Value = Pool2d> {
    let channels = prop_oneof![1usize..40, 250usize..300];
    (1usize..3, axis(), axis(), channels).prop_filter_map(
        "a window in the image",
        |(batch, a, b, channels)| {
            let pair = |index: usize| [a[index], b[index]];
            let window = Window2d { kernel: pair(1), stride: pair(2), padding: pair(3), dilation: pair(4) };
            Pool2d::new([batch, a[0], b[0], channels], window).ok()
        },
    )
}

fn sum(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn maxima_and_their_gradient_match_the_reference(pool in pools()) {
        for dtype in ACTIVATIONS {
            // Few different numbers, so that many maxima are tied.
            let x: Vec<f64> = random_of(dtype, 1, pool.input_shape().elements()).iter().map(|x| x.round()).collect();
            let dy = random_of(dtype, 2, pool.output_shape().elements());
            let run = |queue: &CpuQueue| {
                let (input, dy) = (floats(dtype, pool.input_shape(), &x), floats(dtype, pool.output_shape(), &dy));
                let y = floats(dtype, pool.output_shape(), &vec![f64::NAN; pool.output_shape().elements()]);
                let indices = tensor(&vec![99_u8; y.view().elements()]);
                let dx = floats(dtype, pool.input_shape(), &vec![f64::NAN; x.len()]);
                let added = floats(dtype, pool.input_shape(), &x);
                queue.max_pool2d(pool, input.view(), y.view(), indices.view());
                queue.max_pool2d_backward(pool, dy.view(), indices.view(), dx.view(), Write::Overwrite);
                queue.max_pool2d_backward(pool, dy.view(), indices.view(), added.view(), Write::Accumulate);
                let places = indices.view().to_vec::<u8>().into_iter().map(f64::from).collect();
                vec![values(y.view()), places, values(dx.view()), values(added.view())]
            };
            let best = max_pool(pool, &x);
            let mut dx = vec![0.0; x.len()];
            best.iter().zip(&dy).for_each(|((_, at, _), dy)| dx[*at] += dy);
            on_every_queue(run, |results| {
                assert_eq!(results[0], best.iter().map(|(y, ..)| *y).collect::<Vec<_>>());
                assert_eq!(results[1], best.iter().map(|(.., tap)| *tap as f64).collect::<Vec<_>>());
                assert_close("dx", &results[2], &dx, tolerance(dtype), 2e-6);
                assert_close("dx added", &results[3], &sum(&dx, &x), tolerance(dtype), 2e-6);
            });
        }
    }

    #[test]
    fn averages_and_their_gradient_match_the_reference(pool in pools()) {
        for dtype in ACTIVATIONS {
            let x = random_of(dtype, 1, pool.input_shape().elements());
            let dy = random_of(dtype, 2, pool.output_shape().elements());
            let run = |queue: &CpuQueue| {
                let (input, dy) = (floats(dtype, pool.input_shape(), &x), floats(dtype, pool.output_shape(), &dy));
                let y = floats(dtype, pool.output_shape(), &vec![f64::NAN; pool.output_shape().elements()]);
                let dx = floats(dtype, pool.input_shape(), &vec![f64::NAN; x.len()]);
                let added = floats(dtype, pool.input_shape(), &x);
                queue.avg_pool2d(pool, input.view(), y.view());
                queue.avg_pool2d_backward(pool, dy.view(), dx.view(), Write::Overwrite);
                queue.avg_pool2d_backward(pool, dy.view(), added.view(), Write::Accumulate);
                [y, dx, added].map(|tensor| values(tensor.view())).to_vec()
            };
            let mut dx = vec![0.0; x.len()];
            let elements = pool.window().taps() as f64;
            for_each_pair(pool, |out, at, _| dx[at] += dy[out] / elements);
            on_every_queue(run, |results| {
                assert_close("y", &results[0], &average_pool(pool, &x), tolerance(dtype), 2e-6);
                assert_close("dx", &results[1], &dx, tolerance(dtype), 2e-6);
                assert_close("dx added", &results[2], &sum(&dx, &x), tolerance(dtype), 2e-6);
            });
        }
    }
}

#[test]
fn the_gradients_match_finite_differences() {
    let pool = Pool2d::new([1, 5, 4, 2], Window2d::square(3, 2, 1)).unwrap();
    let x = random_of(DType::F32, 1, pool.input_shape().elements());
    let dy = random_of(DType::F32, 2, pool.output_shape().elements());
    let weighted = |y: Vec<f64>| y.iter().zip(&dy).map(|(y, dy)| y * dy).sum();
    let of_max = finite_differences(&x, |x| weighted(max_pool(pool, x).iter().map(|(y, ..)| *y).collect()));
    let of_average = finite_differences(&x, |x| weighted(average_pool(pool, x)));
    let run = |queue: &CpuQueue| {
        let (x, dy) =
            (floats(DType::F32, pool.input_shape(), &x), floats(DType::F32, pool.output_shape(), &dy));
        let y = floats(DType::F32, pool.output_shape(), &vec![0.0; dy.view().elements()]);
        let indices = tensor(&vec![0_u8; dy.view().elements()]);
        let [of_max, of_average] = [(); 2].map(|()| floats(DType::F32, pool.input_shape(), &[0.0; 40]));
        queue.max_pool2d(pool, x.view(), y.view(), indices.view());
        queue.max_pool2d_backward(pool, dy.view(), indices.view(), of_max.view(), Write::Overwrite);
        queue.avg_pool2d_backward(pool, dy.view(), of_average.view(), Write::Overwrite);
        [of_max, of_average].map(|tensor| values(tensor.view())).to_vec()
    };
    on_every_queue(run, |results| {
        assert_close("max", &results[0], &of_max, 1e-6, 1e-6);
        assert_close("average", &results[1], &of_average, 1e-6, 1e-6);
    });
}

#[test]
fn nan_and_negative_infinity_pass_through_a_maximum() {
    let pool = Pool2d::new([1, 2, 2, 1], Window2d::whole([2, 2])).unwrap();
    for (x, largest, place) in
        [([1.0, f64::NAN, 3.0, 2.0], f64::NAN, 1), ([f64::NEG_INFINITY; 4], f64::NEG_INFINITY, 0)]
    {
        let run = |queue: &CpuQueue| {
            let (x, y) = (floats(DType::F32, [4], &x), floats(DType::F32, [1], &[0.0]));
            let indices = tensor(&[9_u8]);
            queue.max_pool2d(pool, x.view(), y.view(), indices.view());
            vec![values(y.view()), vec![f64::from(indices.view().to_vec::<u8>()[0])]]
        };
        on_every_queue(run, |results| {
            assert!(results[0][0] == largest || (results[0][0].is_nan() && largest.is_nan()));
            assert_eq!(results[1], [f64::from(place)]);
        });
    }
}

#[test]
fn a_window_that_could_see_only_padding_is_refused() {
    let message = Pool2d::new([1, 4, 4, 1], Window2d::square(3, 1, 2)).unwrap_err();
    assert_eq!(message, "the padding [2, 2] of a pooling is at most half its kernel [3, 3]");
    // The two elements of the kernel lie on both sides of the image's only row.
    let window = Window2d { kernel: [2, 1], stride: [1; 2], padding: [1, 0], dilation: [2, 1] };
    let message = Pool2d::new([1, 1, 4, 1], window).unwrap_err();
    assert!(message.starts_with("a window sees only padding of an image of 1 x 4: "), "{message}");
}
