//! Products of groups of rows, one for each expert.

use lockstep_plan::DType;
use lockstep_tensor::{Arena, CpuLevel, CpuQueue, Gemm, GemmKernels, GemmLayout, GroupedGemm, Tensor, Write};
use proptest::prelude::*;

use crate::testing::{ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tensor, values};

const LAYOUTS: [GemmLayout; 3] = [GemmLayout::NN, GemmLayout::NT, GemmLayout::TN];

/// Returns the shapes of A, B and C for groups of `rows` rows in total.
fn shapes(layout: GemmLayout, groups: usize, rows: usize, [m, n]: [usize; 2]) -> [Vec<usize>; 3] {
    match layout {
        GemmLayout::NN => [vec![rows, m], vec![groups, m, n], vec![rows, n]],
        GemmLayout::NT => [vec![rows, m], vec![groups, n, m], vec![rows, n]],
        GemmLayout::TN => [vec![rows, m], vec![rows, n], vec![groups, m, n]],
    }
}

fn filled(dtype: DType, shape: &[usize], seed: u64) -> Tensor {
    floats(dtype, shape, &random_of(dtype, seed, shape.iter().product()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn each_group_is_the_product_of_its_rows_alone(
        sizes in proptest::collection::vec(prop_oneof![Just(0usize), 1usize..40], 1..6),
        (before, behind) in (0usize..3, 0usize..3),
        width in [1usize..70, 1usize..70],
        (is_added, has_bias) in (proptest::bool::ANY, proptest::bool::ANY),
    ) {
        let groups = sizes.len();
        let mut offsets = vec![before as u32];
        for size in &sizes {
            offsets.push(offsets[offsets.len() - 1] + *size as u32);
        }
        let rows = offsets[groups] as usize + behind;
        let write = if is_added { Write::Accumulate } else { Write::Overwrite };
        let all = LAYOUTS.into_iter().flat_map(|layout| ACTIVATIONS.map(|dtype| (layout, dtype)));
        for (layout, dtype) in all {
            let [a, b, c] = shapes(layout, groups, rows, width);
            let c_dtype = if layout == GemmLayout::TN { DType::F32 } else { dtype };
            let run = |queue: &CpuQueue| {
                let (a, b, c) = (filled(dtype, &a, 1), filled(dtype, &b, 2), filled(c_dtype, &c, 3));
                let columns = c.view().shape().as_matrix().1;
                let has_bias = has_bias && layout != GemmLayout::TN;
                let bias = has_bias.then(|| filled(dtype, &[groups, columns], 6));
                let expected = filled(c_dtype, c.view().shape().dims(), 3);
                let offsets_view = tensor(&offsets);
                let product = GroupedGemm {
                    layout,
                    a: a.view(),
                    b: b.view(),
                    c: c.view(),
                    bias: bias.as_ref().map(Tensor::view),
                    offsets: offsets_view.view(),
                    write,
                };
                queue.grouped_gemm(product);
                for (group, ends) in offsets.windows(2).enumerate() {
                    let rows = ends[0] as usize..ends[1] as usize;
                    let matrix = |tensor: &Tensor| -> [usize; 2] {
                        let dims = tensor.view().shape();
                        [dims.dims()[1], dims.dims()[2]]
                    };
                    let (b, c) = if layout == GemmLayout::TN {
                        let c = expected.view().rows(group..group + 1).reshape(matrix(&expected));
                        (b.view().rows(rows.clone()), c)
                    } else {
                        let b_of_group = b.view().rows(group..group + 1).reshape(matrix(&b));
                        (b_of_group, expected.view().rows(rows.clone()))
                    };
                    let bias = bias.as_ref().map(|bias| bias.view().rows(group..group + 1));
                    queue.gemm(Gemm { layout, a: a.view().rows(rows), b, c, bias, write });
                }
                vec![values(c.view()), values(expected.view())]
            };
            on_every_queue(run, |results| {
                // Rows of no group keep their old value in `expected`.
                assert_eq!(results[0], results[1], "{layout:?} {dtype}, {sizes:?}");
            });
        }
    }
}

#[test]
fn more_groups_than_a_batch_holds_and_larger_ones_than_its_memory_are_all_multiplied() {
    // Products of few and of many rows; the last one has several blocks of depth, and fills the buffer of several
    // others.
    let sizes: Vec<usize> = (0..90).map(|group| [3, 12, 0, 30][group % 4]).chain([5]).collect();
    let cases = [(sizes, [40, 50]), (vec![10, 1, 20], [2100, 700]), (vec![9, 2100, 9], [24, 40])];
    for ((sizes, width), layout) in cases.iter().flat_map(|case| LAYOUTS.map(|layout| (case, layout))) {
        let ends = sizes.iter().scan(0, |end, size| {
            *end += *size as u32;
            Some(*end)
        });
        let offsets: Vec<u32> = [0].into_iter().chain(ends).collect();
        let [a, b, c] = shapes(layout, sizes.len(), sizes.iter().sum(), *width);
        let queue = CpuQueue::new(2, &Arena::new()).unwrap();
        let (a, b) = (filled(DType::BF16, &a, 1), filled(DType::BF16, &b, 2));
        let [found, expected] = [(); 2].map(|()| filled(DType::BF16, &c, 3));
        let product = |offsets: &[u32], first: usize, c: &Tensor| {
            let (offsets, [b, c]) = (tensor(offsets), [b.view(), c.view()]);
            let groups = first..first + offsets.view().elements() - 1;
            let (b, c) = if layout == GemmLayout::TN { (b, c.rows(groups)) } else { (b.rows(groups), c) };
            let (a, offsets) = (a.view(), offsets.view());
            queue.grouped_gemm(GroupedGemm { layout, a, b, c, bias: None, offsets, write: Write::Overwrite });
        };
        product(&offsets, 0, &found);
        for (group, ends) in offsets.windows(2).enumerate() {
            product(ends, group, &expected);
        }
        assert_eq!(values(found.view()), values(expected.view()), "{layout:?} {width:?}");
    }
}

#[test]
fn gradients_of_grouped_products_match_finite_differences() {
    let (offsets, [inner, outer]) = ([0_u32, 2, 2, 5], [3_usize, 4]);
    let (x, w, dy) =
        (random_of(DType::F32, 1, 15), random_of(DType::F32, 2, 36), random_of(DType::F32, 3, 20));
    let loss = |x: &[f64], w: &[f64]| -> f64 {
        let group = |row: usize| (0..3).rfind(|g| offsets[*g] as usize <= row).unwrap();
        let term = |row: usize, j: usize| -> f64 {
            (0..inner).map(|p| x[row * inner + p] * w[(group(row) * outer + j) * inner + p]).sum()
        };
        (0..5)
            .flat_map(|row| (0..outer).map(move |j| (row, j)))
            .map(|(row, j)| dy[row * outer + j] * term(row, j))
            .sum()
    };
    let by_x = crate::reference::finite_differences(&x, |x| loss(x, &w));
    let by_w = crate::reference::finite_differences(&w, |w| loss(&x, w));
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    let offsets = tensor(&offsets);
    let (x, w) = (floats(DType::F32, [5, inner], &x), floats(DType::F32, [3, outer, inner], &w));
    let dy = floats(DType::F32, [5, outer], &dy);
    let (dx, dw) = (filled(DType::F32, &[5, inner], 4), filled(DType::F32, &[3, outer, inner], 5));
    let product = |layout, a: &Tensor, b: &Tensor, c: &Tensor| {
        let (a, b, c, offsets) = (a.view(), b.view(), c.view(), offsets.view());
        queue.grouped_gemm(GroupedGemm { layout, a, b, c, bias: None, offsets, write: Write::Overwrite });
    };
    product(GemmLayout::NN, &dy, &w, &dx);
    product(GemmLayout::TN, &dy, &x, &dw);
    assert_close("dx", &values(dx.view()), &by_x, 1e-6, 1e-6);
    assert_close("dw", &values(dw.view()), &by_w, 1e-6, 1e-6);
}

#[track_caller]
fn run_with_offsets(offsets: &[u32]) {
    let queue = CpuQueue::with_level(1, &Arena::new(), CpuLevel::Portable).unwrap();
    let [a, b, c] = [&[4, 2][..], &[2, 3, 2], &[4, 3]].map(|shape| filled(DType::F32, shape, 1));
    let (a, b, c, offsets) = (a.view(), b.view(), c.view(), tensor(offsets));
    let (layout, write) = (GemmLayout::NT, Write::Overwrite);
    queue.grouped_gemm(GroupedGemm { layout, a, b, c, bias: None, offsets: offsets.view(), write });
}

#[test]
#[should_panic(expected = "groups of 4 rows must follow each other: offsets [0, 3, 5]")]
fn groups_beyond_the_rows_are_refused() {
    run_with_offsets(&[0, 3, 5]);
}

#[test]
#[should_panic(expected = "3 groups of a NT product need a matrix each")]
fn groups_without_a_matrix_are_refused() {
    run_with_offsets(&[0, 1, 2, 3]);
}
