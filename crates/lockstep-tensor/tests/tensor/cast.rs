//! Casts and copies between types.

use lockstep_plan::DType;
use lockstep_tensor::{Arena, CopyKernels, CpuQueue};

use crate::testing::{floats, on_every_queue, random_of, rounded, tensor, values};

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

#[test]
fn casts_round_to_nearest_between_all_floats() {
    for (from, to) in FLOATS.into_iter().flat_map(|from| FLOATS.map(|to| (from, to))) {
        for len in [1, 15, 257, 70_001] {
            let x = random_of(from, 1, len);
            let run = |queue: &CpuQueue| {
                let (x, y) = (floats(from, [len], &x), floats(to, [len], &vec![0.0; len]));
                queue.cast(x.view(), y.view());
                vec![values(y.view())]
            };
            let expected = rounded(to, &x);
            on_every_queue(run, |results| assert_eq!(results[0], expected, "{from} to {to}"));
        }
    }
}

#[test]
fn blocks_are_transposed() {
    for (dtype, [a, b, width]) in FLOATS
        .into_iter()
        .flat_map(|dtype| [[1, 4, 3], [3, 1, 17], [2, 3, 5], [70, 3, 500]].map(|dims| (dtype, dims)))
    {
        let x = random_of(dtype, 1, a * b * width);
        let run = |queue: &CpuQueue| {
            let (x, y) =
                (floats(dtype, [a, b, width], &x), floats(dtype, [b, a, width], &vec![0.0; x.len()]));
            queue.transpose_blocks(x.view(), y.view());
            vec![values(y.view())]
        };
        let row = |block: usize| x[block * width..(block + 1) * width].iter();
        let expected: Vec<f64> =
            (0..b).flat_map(|j| (0..a).flat_map(move |i| row(i * b + j))).copied().collect();
        on_every_queue(run, |results| assert_eq!(results[0], expected, "{dtype} {a} x {b} x {width}"));
    }
}

#[test]
fn every_level_converts_special_numbers_alike() {
    // Vectorized conversions differ from the scalar code, so the numbers fill whole vectors.
    let special = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::from_bits(0x7f80_0001),
        f32::MAX,
        f32::MIN_POSITIVE / 8.0,
        // Ties in bf16 (to even: down, up), the largest f16, the tie above it, and f16 subnormals.
        f32::from_bits(0x3f80_8000),
        f32::from_bits(0x3f81_8000),
        65_504.0,
        65_520.0,
        2.0_f32.powi(-24),
        2.0_f32.powi(-25),
        3.0 * 2.0_f32.powi(-25),
        -2.0_f32.powi(-15),
    ];
    let x: Vec<f64> = special.repeat(5).into_iter().map(f64::from).collect();
    // All NaNs get one bit pattern here, so that equality compares bits.
    let bits = |values: &[f64]| -> Vec<u64> {
        values.iter().map(|x| if x.is_nan() { f64::NAN } else { *x }.to_bits()).collect()
    };
    for (from, to) in FLOATS.into_iter().flat_map(|from| FLOATS.map(|to| (from, to))) {
        let x = rounded(from, &x);
        let run = |queue: &CpuQueue| {
            let (x, y) = (floats(from, [x.len()], &x), floats(to, [x.len()], &vec![1.0; x.len()]));
            queue.cast(x.view(), y.view());
            vec![values(y.view())]
        };
        let expected = bits(&rounded(to, &x));
        on_every_queue(run, |results| assert_eq!(bits(&results[0]), expected, "{from} to {to}"));
    }
}

#[test]
fn integers_are_copied_and_everything_can_be_zeroed() {
    let queue = CpuQueue::new(2, &Arena::new()).unwrap();
    let numbers: Vec<u32> = (0..70_001).collect();
    let (x, y) = (tensor(&numbers), tensor(&vec![0_u32; numbers.len()]));
    queue.cast(x.view(), y.view());
    assert_eq!(y.view().to_vec::<u32>(), numbers);
    queue.zero(y.view().rows(1..70_000));
    assert!(y.view().to_vec::<u32>()[..70_000].iter().all(|x| *x == 0));
    assert_eq!(y.view().to_vec::<u32>()[70_000], 70_000);
}

#[test]
#[should_panic(expected = "not from f32 to u32")]
fn a_cast_to_integers_is_refused() {
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    queue.cast(floats(DType::F32, [1], &[1.0]).view(), tensor(&[1_u32]).view());
}
