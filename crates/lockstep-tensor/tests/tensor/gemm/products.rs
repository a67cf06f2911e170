//! Every level, layout and type against the reference; the same bits for any number of threads.

use std::ops::Range;

use half::{bf16, f16};
use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::{
    Arena, CpuLevel, CpuQueue, F32Products, Gemm, GemmKernels, GemmLayout, Queue, Summation, Write,
};
use proptest::prelude::*;

use super::reference::{Exact, multiply};
use crate::reference::finite_differences;
use crate::testing::{assert_close, emulated, floats, random, report_skipped, values};

const LAYOUTS: [GemmLayout; 3] = [GemmLayout::NN, GemmLayout::NT, GemmLayout::TN];
/// The types of operands and of C.
const TYPES: [(DType, DType); 5] = [
    (DType::F32, DType::F32),
    (DType::BF16, DType::F32),
    (DType::BF16, DType::BF16),
    (DType::F16, DType::F32),
    (DType::F16, DType::F16),
];

/// A product to test, with its operands as f64 values that its types represent exactly.
#[derive(Debug, Clone)]
struct Case {
    layout: GemmLayout,
    shape: [usize; 3],
    types: (DType, DType),
    a: Vec<f64>,
    b: Vec<f64>,
    bias: Option<Vec<f64>>,
    earlier: Option<Vec<f64>>,
}

impl Case {
    fn new(layout: GemmLayout, [m, n, k]: [usize; 3], types: (DType, DType), seed: u64) -> Self {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut values = |count: usize, dtype| -> Vec<f64> {
            let mut value = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((state >> 40) as f32 / (1_u64 << 23) as f32) - 1.0
            };
            (0..count)
                .map(|_| match dtype {
                    DType::BF16 => bf16::from_f32(value()).into(),
                    DType::F16 => f16::from_f32(value()).into(),
                    _ => value().into(),
                })
                .collect()
        };
        let (a, b) = (values(m * k, types.0), values(k * n, types.0));
        let bias = seed.is_multiple_of(2).then(|| values(n, types.0));
        let earlier = seed.is_multiple_of(3).then(|| values(m * n, types.1));
        Self { layout, shape: [m, n, k], types, a, b, bias, earlier }
    }

    /// Returns C as `queue` computes it.
    fn run(&self, queue: &CpuQueue) -> Vec<f64> {
        self.run_of(queue, self.shape[0])
    }

    /// Returns C, computed as a part of a product of `rows` rows.
    fn run_of(&self, queue: &CpuQueue, rows: usize) -> Vec<f64> {
        let [m, n, k] = self.shape;
        let (a_shape, b_shape) = match self.layout {
            GemmLayout::NN => ([m, k], [k, n]),
            GemmLayout::NT => ([m, k], [n, k]),
            GemmLayout::TN => ([k, m], [k, n]),
        };
        let a = floats(self.types.0, a_shape, &self.a);
        let b = floats(self.types.0, b_shape, &self.b);
        let bias = self.bias.as_ref().map(|bias| floats(self.types.0, [n], bias));
        // Overwritten values must not matter, not even NaN.
        let (earlier, write) = match &self.earlier {
            Some(earlier) => (earlier.clone(), Write::Accumulate),
            None => (vec![f64::NAN; m * n], Write::Overwrite),
        };
        let c = floats(self.types.1, [m, n], &earlier);
        let gemm = Gemm {
            layout: self.layout,
            a: a.view(),
            b: b.view(),
            c: c.view(),
            bias: bias.as_ref().map(|bias| bias.view()),
            write,
        };
        queue.gemm_rows(gemm, rows);
        values(c.view())
    }

    /// Checks the result of each queue against the reference.
    fn check<'a>(&self, queues: impl IntoIterator<Item = &'a CpuQueue>) {
        let exact = multiply(
            self.layout,
            self.shape,
            &self.a,
            &self.b,
            self.bias.as_deref(),
            self.earlier.as_deref(),
        );
        queues.into_iter().for_each(|queue| self.check_against(&exact, queue));
    }

    fn check_against(&self, exact: &[Exact], queue: &CpuQueue) {
        let [_, n, k] = self.shape;
        let out = self.run(queue);
        // Sums are in f32, in some order; a narrower result is rounded once more.
        let sum_error = f64::from(f32::EPSILON) * (k as f64 + 4.0);
        let rounding = match self.types.1 {
            DType::BF16 => f64::from(bf16::EPSILON) / 2.0,
            DType::F16 => f64::from(f16::EPSILON) / 2.0,
            _ => 0.0,
        };
        for (index, (out, exact)) in out.iter().zip(exact).enumerate() {
            // Half the spacing of subnormal f16 numbers.
            let smallest = if self.types.1 == DType::F16 { 2.0_f64.powi(-25) } else { 0.0 };
            let bound = exact.magnitude * sum_error + exact.value.abs() * rounding * 1.01 + smallest;
            assert!(
                (out - exact.value).abs() <= bound,
                "{} {:?} {:?} m, n, k = {:?}: C[{}, {}] is {out}, must be {} ± {bound:e}",
                queue.level(),
                self.layout,
                self.types,
                self.shape,
                index / n,
                index % n,
                exact.value,
            );
        }
    }
}

/// Creates queues of every level that can be tested here. AMX is emulated if the CPU lacks it.
pub(crate) fn queues(threads: usize) -> Vec<CpuQueue> {
    let mut queues = Vec::new();
    for level in CpuLevel::ALL {
        if level <= CpuLevel::detect() {
            queues.push(CpuQueue::with_level(threads, &Arena::new(), level).unwrap());
        } else if let Some(queue) = emulated(level, threads, &Arena::new()) {
            report_skipped(&format!("matrix products on real {level}, which this CPU lacks: it is emulated"));
            queues.push(queue);
        } else {
            report_skipped(&format!("matrix products at level {level}, which this CPU lacks"));
        }
    }
    queues
}

/// Returns the queues, and one that multiplies f32 in three parts if this CPU or its emulation can.
fn queues_of_products(threads: usize) -> Vec<CpuQueue> {
    let mut all = queues(threads);
    let split = queues(threads).into_iter().find(|queue| queue.level() == CpuLevel::AmxBf16);
    all.extend(split.map(|mut queue| {
        queue.set_f32_products(F32Products::SplitBf16);
        queue
    }));
    all
}

fn cases(shapes: &[[usize; 3]]) -> impl Iterator<Item = Case> {
    shapes.iter().enumerate().flat_map(|(seed, shape)| {
        LAYOUTS.into_iter().flat_map(move |layout| {
            TYPES.into_iter().map(move |types| Case::new(layout, *shape, types, seed as u64))
        })
    })
}

#[test]
fn every_level_agrees_with_the_reference_at_odd_sizes() {
    let sizes = [1, 2, 3, 7, 17, 31, 33, 63, 65, 129, 255];
    let mut shapes = Vec::new();
    for (i, size) in sizes.into_iter().enumerate() {
        shapes.push([size, sizes[(i + 3) % 11], sizes[(i + 7) % 11]]);
        shapes.push([sizes[(i + 5) % 11], size, size]);
        shapes.push([size, size, sizes[(i + 6) % 11]]);
    }
    let queues = queues_of_products(2);
    cases(&shapes).for_each(|case| case.check(&queues));
}

#[test]
fn depths_beyond_one_block_agree_with_the_reference() {
    let queues = queues_of_products(2);
    let few_rows = [1, 9, 5000];
    cases(&[[30, 40, 1025], [13, 70, 2049], [33, 33, 4100], few_rows]).for_each(|case| case.check(&queues));
}

#[test]
fn chunks_of_rows_and_columns_meet_without_a_gap() {
    // Large enough for several chunks of columns, and, in bf16, of rows with partial sums.
    let mut queues = queues_of_products(2);
    queues.retain(|queue| {
        let is_emulated = queue.level() > CpuLevel::detect();
        if is_emulated {
            // It would take minutes.
            report_skipped("matrix products of several chunks on emulated AMX");
        }
        queue.level() >= CpuLevel::Avx2 && !is_emulated
    });
    cases(&[[2, 9, 3], [1100, 40, 2100], [20, 3300, 1030]])
        .filter(|case| case.layout == GemmLayout::NT)
        .for_each(|case| case.check(&queues));
}

#[test]
fn an_empty_depth_gives_the_bias_or_leaves_c() {
    let queues = queues_of_products(1);
    cases(&[[3, 40, 0], [20, 5, 0], [20, 5, 0], [20, 40, 0]]).for_each(|case| case.check(&queues));
}

#[test]
fn an_empty_product_writes_nothing() {
    for queue in queues(1) {
        for case in cases(&[[0, 5, 7], [5, 0, 7], [0, 0, 0]]) {
            assert_eq!(case.run(&queue), [0.0_f64; 0]);
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let shapes = [[5, 700, 300], [130, 70, 1100], [257, 129, 63]];
    let results: Vec<Vec<Vec<Vec<f64>>>> = [1, 2, 3]
        .map(|threads| {
            queues_of_products(threads)
                .iter()
                .map(|queue| cases(&shapes).map(|case| case.run(queue)).collect())
                .collect()
        })
        .into();
    assert!(results[0] == results[1], "two threads differ from one");
    assert!(results[0] == results[2], "three threads differ from one");
}

#[test]
fn a_part_of_the_rows_has_the_bits_that_they_have_in_the_whole() {
    // Few rows, several panels, and several blocks of depth with partial sums; one row has a value that cannot be split.
    let shapes = [[7, 40, 70], [20, 33, 90], [70, 50, 1100]];
    let cuts = |m: usize| [0, 1, m / 3, m / 2 + 1, m - 2, m];
    for queue in queues_of_products(2) {
        for mut case in cases(&shapes).filter(|case| case.layout != GemmLayout::TN) {
            let [m, n, k] = case.shape;
            if case.types.0 == DType::F32 {
                case.a[m / 2 * k] = 1e-38_f32.into();
            }
            let whole = case.run(&queue);
            for rows in cuts(m).windows(2).map(|ends| ends[0]..ends[1]) {
                let part = Case {
                    shape: [rows.len(), n, k],
                    a: case.a[rows.start * k..rows.end * k].to_vec(),
                    earlier: case.earlier.as_ref().map(|c| c[rows.start * n..rows.end * n].to_vec()),
                    ..case.clone()
                };
                let found = part.run_of(&queue, m);
                let expected = &whole[rows.start * n..rows.end * n];
                let name =
                    format!("{} {:?} {:?} rows {rows:?} of {m}", queue.level(), case.layout, case.types);
                assert!(found == expected, "{name}: {:?} instead of {:?}", &found[..3], &expected[..3]);
            }
        }
    }
}

#[test]
fn a_part_of_the_columns_has_the_bits_that_they_have_in_the_whole() {
    // Tiles of f32 are 48 columns wide for the whole, and 32 for the parts, which 48 does not divide.
    let columns_of = |matrix: &[f64], n: usize, part: &Range<usize>| -> Vec<f64> {
        matrix.chunks_exact(n).flat_map(|row| &row[part.clone()]).copied().collect()
    };
    for queue in queues_of_products(2) {
        for case in cases(&[[40, 96, 70], [100, 144, 1100]]) {
            let [m, n, k] = case.shape;
            let whole = case.run(&queue);
            for part in [0..32, 32..96, n - 30..n] {
                let b = match case.layout {
                    GemmLayout::NT => case.b[part.start * k..part.end * k].to_vec(),
                    GemmLayout::NN | GemmLayout::TN => columns_of(&case.b, n, &part),
                };
                let of_part = Case {
                    shape: [m, part.len(), k],
                    b,
                    bias: case.bias.as_ref().map(|bias| bias[part.clone()].to_vec()),
                    earlier: case.earlier.as_ref().map(|c| columns_of(c, n, &part)),
                    ..case.clone()
                };
                let (found, expected) = (of_part.run(&queue), columns_of(&whole, n, &part));
                let differing = found.iter().zip(&expected).find(|(found, expected)| found != expected);
                let name = format!("{} {:?} {:?} columns {part:?}", queue.level(), case.layout, case.types);
                assert!(differing.is_none(), "{name}: found and expected {differing:?}");
            }
        }
    }
}

/// Depths: none, a part of a vector, several blocks with a remainder.
#[test]
fn sums_by_depth_agree_with_the_reference_at_odd_sizes() {
    let shapes = [[9, 1, 0], [11, 50, 7], [52, 47, 33], [97, 13, 1100], [10, 820, 64], [49, 100, 2077]];
    for mut queue in queues(2) {
        queue.set_summation(Summation::ByDepth);
        for case in cases(&shapes).filter(|case| case.layout == GemmLayout::NT) {
            case.check([&queue]);
        }
    }
}

#[test]
fn a_row_summed_by_depth_has_the_same_bits_alone_and_among_any_rows() {
    let shapes = [[64, 40, 70], [100, 31, 2077], [55, 900, 96]];
    for threads in [1, 2] {
        for mut queue in queues(threads) {
            queue.set_summation(Summation::ByDepth);
            for case in cases(&shapes).filter(|case| case.layout == GemmLayout::NT) {
                let [m, n, k] = case.shape;
                let whole = case.run(&queue);
                for rows in [0..1, 3..5, 7..15, 2..11, 3..20, 5..37, 1..50, 13..m] {
                    let part = Case {
                        shape: [rows.len(), n, k],
                        a: case.a[rows.start * k..rows.end * k].to_vec(),
                        earlier: case.earlier.as_ref().map(|c| c[rows.start * n..rows.end * n].to_vec()),
                        ..case.clone()
                    };
                    let (found, expected) = (part.run(&queue), &whole[rows.start * n..rows.end * n]);
                    let differs = found.iter().zip(expected).position(|(found, expected)| found != expected);
                    let name = format!("{} {:?} rows {rows:?} of {m} x {n} x {k}", queue.level(), case.types);
                    assert!(
                        differs.is_none(),
                        "{name}: element {differs:?} is {:?} instead of {:?}",
                        differs.map(|at| found[at]),
                        differs.map(|at| expected[at])
                    );
                }
            }
        }
    }
}

#[test]
fn a_linear_layers_gradients_are_the_nn_and_the_tn_product() {
    let [tokens, n, k] = [5, 4, 3];
    let (x, w, dy) = (random(1, tokens * k), random(2, n * k), random(3, tokens * n));
    let product = |layout, shape, a: &[f64], b: &[f64]| -> Vec<f64> {
        multiply(layout, shape, a, b, None, None).iter().map(|exact| exact.value).collect()
    };
    let loss = |x: &[f64], w: &[f64]| -> f64 {
        let y = product(GemmLayout::NT, [tokens, n, k], x, w);
        y.iter().zip(&dy).map(|(y, dy)| y * dy).sum()
    };
    let dx = product(GemmLayout::NN, [tokens, k, n], &dy, &w);
    assert_close("dX", &dx, &finite_differences(&x, |x| loss(x, &w)), 1e-8, 1e-8);
    let dw = product(GemmLayout::TN, [n, k, tokens], &dy, &x);
    assert_close("dW", &dw, &finite_differences(&w, |w| loss(&x, w)), 1e-8, 1e-8);
}

#[test]
fn nan_and_infinity_reach_their_row_and_no_other() {
    for queue in queues(2) {
        for (mut case, value) in cases(&[[21, 35, 50], [4, 35, 50]]).zip([f64::NAN, f64::INFINITY].repeat(9))
        {
            let [m, n, k] = case.shape;
            let row = m - 1;
            case.a[if case.layout == GemmLayout::TN { 7 * m + row } else { row * k + 7 }] = value;
            let out = case.run(&queue);
            assert!(out[..row * n].iter().all(|x| x.is_finite()), "{} {:?}", queue.level(), case.layout);
            assert!(out[row * n..].iter().all(|x| !x.is_finite()), "{} {:?}", queue.level(), case.layout);
        }
    }
}

/// Returns the largest and the root-mean-square error of the elements of C, relative to |A| |B|, rows times columns.
fn errors(case: &Case, queue: &CpuQueue) -> [f64; 2] {
    let [m, n, k] = case.shape;
    let exact = multiply(case.layout, case.shape, &case.a, &case.b, None, None);
    let norm = |elements: &[f64], start: usize, step: usize| -> f64 {
        (0..k).map(|p| elements[start + p * step].powi(2)).sum::<f64>().sqrt()
    };
    let (mut largest, mut squares) = (0.0_f64, 0.0);
    for (index, (out, exact)) in case.run(queue).iter().zip(&exact).enumerate() {
        let (row, column) = (index / n, index % n);
        let a = if case.layout == GemmLayout::TN { norm(&case.a, row, m) } else { norm(&case.a, row * k, 1) };
        let b = if case.layout == GemmLayout::NT {
            norm(&case.b, column * k, 1)
        } else {
            norm(&case.b, column, n)
        };
        let error = (out - exact.value).abs() / (a * b);
        largest = largest.max(error);
        squares += error * error;
    }
    [largest, (squares / (m * n) as f64).sqrt()]
}

#[test]
fn f32_products_in_three_parts_err_no_more_than_by_fma() {
    let Some(mut queue) = queues(2).into_iter().find(|queue| queue.level() == CpuLevel::AmxBf16) else {
        return;
    };
    let spread = |x: f64, decades: f64| x * 10.0_f64.powf(decades * ((x.abs() * 7.0).fract() - 0.5));
    let ranges: [(&str, &dyn Fn(f64) -> f64); 4] = [
        ("uniform in -1..1", &|x| x),
        ("uniform in 0..1", &f64::abs),
        ("four decades", &|x| spread(x, 4.0)),
        ("eighteen decades", &|x| spread(x, 18.0)),
    ];
    for (range, map) in ranges {
        let [mut split, mut fma] = [[0.0_f64; 2]; 2];
        for (seed, shape) in
            [[64, 64, 64], [40, 70, 400], [33, 65, 1100], [64, 64, 2048]].into_iter().enumerate()
        {
            for layout in LAYOUTS {
                let mut case = Case::new(layout, shape, (DType::F32, DType::F32), seed as u64);
                (case.bias, case.earlier) = (None, None);
                for operand in [&mut case.a, &mut case.b] {
                    operand.iter_mut().for_each(|x| *x = f64::from(map(*x) as f32));
                }
                for (products, worst) in [(F32Products::SplitBf16, &mut split), (F32Products::Fma, &mut fma)]
                {
                    queue.set_f32_products(products);
                    let found = errors(&case, &queue);
                    worst.iter_mut().zip(found).for_each(|(worst, found)| *worst = worst.max(found));
                }
            }
        }
        assert!(
            split[0] <= fma[0] && split[1] <= fma[1],
            "{range}: largest and root-mean-square error {split:?} in three parts, {fma:?} by FMA"
        );
    }
}

#[test]
fn values_that_cannot_be_split_are_multiplied_by_fma() {
    for queue in queues_of_products(2).into_iter().filter(|queue| queue.level() >= CpuLevel::Avx512) {
        for layout in LAYOUTS {
            // One value makes a panel of A exceptional, another one a panel of B; both must enter their products
            // exactly.
            for value in [1e-38, 1e-44, 1.5e38] {
                let mut case = Case::new(layout, [70, 80, 300], (DType::F32, DType::F32), 1);
                case.a.iter_mut().chain(&mut case.b).for_each(|x| *x *= 0.01);
                case.a[3] = f64::from(value as f32);
                case.b[5] = f64::from(value as f32).min(1.0);
                case.check([&queue]);
            }
        }
    }
}

#[test]
fn scratch_does_not_grow_after_the_queue_is_made() {
    let arena = Arena::new();
    let queue = CpuQueue::new(2, &arena).unwrap();
    let booked = arena.in_use();
    cases(&[[3, 100, 100], [100, 100, 3000], [300, 300, 300]]).for_each(|case| drop(case.run(&queue)));
    assert_eq!(arena.in_use().total(), booked.total());
    assert_eq!(booked.total(), booked[MemoryCategory::Workspace]);
}

#[test]
#[should_panic(expected = "do not fit")]
fn operands_that_do_not_fit_are_refused() {
    let [a, b, c] =
        [[4, 6], [6, 5], [4, 5]].map(|shape| floats(DType::F32, shape, &[0.0; 30][..shape[0] * shape[1]]));
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    let (a, b, c) = (a.view(), b.view(), c.view());
    queue.gemm(Gemm { layout: GemmLayout::NT, a, b, c, bias: None, write: Write::Overwrite });
}

#[test]
#[should_panic(expected = "overlaps another operand")]
fn an_output_that_is_also_an_input_is_refused() {
    let a = floats(DType::F32, [4, 4], &[0.0; 16]);
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    let (a, b, c) = (a.view(), a.view(), a.view());
    queue.gemm(Gemm { layout: GemmLayout::NN, a, b, c, bias: None, write: Write::Overwrite });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn random_shapes_agree_with_the_reference(
        m in 1_usize..300, n in 1_usize..300, k in 1_usize..300,
        layout in prop::sample::select(&LAYOUTS[..]), types in prop::sample::select(&TYPES[..]), seed: u64,
    ) {
        let case = Case::new(layout, [m, n, k], types, seed);
        case.check(&queues(2));
    }
}
