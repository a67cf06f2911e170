//! Rows that are prepended and selected, against the reference.

use lockstep_plan::DType;
use lockstep_tensor::{CopyKernels, CpuQueue, Write};
use proptest::prelude::*;

use crate::testing::{
    ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tensor, tolerance, values,
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_prepended_and_a_selected_row_and_their_gradients_match_the_reference(
        (batch, len, width) in prop_oneof![(1usize..5, 1usize..6, 1usize..40), (20usize..80, 10usize..12, 200usize..300)],
        place in 0.0..1.0,
    ) {
        let index = (place * len as f64) as usize;
        for dtype in ACTIVATIONS {
            let x = random_of(dtype, 1, batch * len * width);
            let [token, before] = [2, 3].map(|seed| random_of(dtype, seed, width));
            let dy = random_of(dtype, 4, batch * (len + 1) * width);
            let run = |queue: &CpuQueue| {
                let sequences = |values: &[f64]| floats(dtype, [batch, len, width], values);
                let longer = |values: &[f64]| floats(dtype, [batch, len + 1, width], values);
                let nan = vec![f64::NAN; batch * len * width];
                let (x_tensor, token, dy) = (sequences(&x), floats(dtype, [width], &token), longer(&dy));
                let (y, dx, added) = (longer(&values(dy.view())), sequences(&nan), sequences(&x));
                let drow = floats(DType::F32, [width], &before);
                let (selected, spread, more) =
                    (floats(dtype, [batch, width], &vec![9.0; batch * width]), sequences(&nan), sequences(&x));
                queue.prepend_row(token.view(), x_tensor.view(), y.view());
                queue.prepend_row_backward_row(dy.view(), drow.view());
                queue.prepend_row_backward_input(dy.view(), dx.view(), Write::Overwrite);
                queue.prepend_row_backward_input(dy.view(), added.view(), Write::Accumulate);
                queue.select_row(x_tensor.view(), index, selected.view());
                queue.select_row_backward(selected.view(), index, spread.view(), Write::Overwrite);
                queue.select_row_backward(selected.view(), index, more.view(), Write::Accumulate);
                [y, drow, dx, added, selected, spread, more].map(|tensor| values(tensor.view())).to_vec()
            };
            let y: Vec<f64> = x.chunks(len * width).flat_map(|x| [&token, x].concat()).collect();
            let dx: Vec<f64> = dy.chunks((len + 1) * width).flat_map(|dy| dy[width..].to_vec()).collect();
            let added: Vec<f64> = dx.iter().zip(&x).map(|(a, b)| a + b).collect();
            let sum_at = |i: usize| dy.iter().skip(i).step_by((len + 1) * width).sum::<f64>();
            let drow: Vec<f64> = (0..width).map(|i| before[i] + sum_at(i)).collect();
            let selected: Vec<f64> = x.chunks(len * width).flat_map(|x| x[index * width..][..width].to_vec()).collect();
            let is_selected = |i: usize| i / width % len == index;
            let spread: Vec<f64> = x.iter().enumerate().map(|(i, x)| if is_selected(i) { *x } else { 0.0 }).collect();
            let more: Vec<f64> = x.iter().zip(&spread).map(|(a, b)| a + b).collect();
            on_every_queue(run, |results| {
                assert_eq!((&results[0], &results[2]), (&y, &dx));
                assert_close("drow", &results[1], &drow, 2e-6, 1e-5);
                assert_close("dx added", &results[3], &added, tolerance(dtype), 1e-6);
                assert_eq!((&results[4], &results[5]), (&selected, &spread));
                assert_close("dx of the selection added", &results[6], &more, tolerance(dtype), 1e-6);
            });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_row_of_each_sequence_and_its_gradient_match_the_reference(
        (batch, len, width) in prop_oneof![(1usize..5, 1usize..6, 1usize..40), (20usize..80, 10usize..12, 200usize..300)],
        seed in 0u32..100,
    ) {
        let indices: Vec<u32> = (0..batch as u32).map(|b| (b * 7 + seed) % len as u32).collect();
        for dtype in ACTIVATIONS {
            let (x, dy) = (random_of(dtype, 1, batch * len * width), random_of(dtype, 2, batch * width));
            let run = |queue: &CpuQueue| {
                let sequences = |values: &[f64]| floats(dtype, [batch, len, width], values);
                let (x_tensor, rows) = (sequences(&x), tensor(&indices));
                let [y, dy] = [&vec![9.0; batch * width], &dy].map(|values| floats(dtype, [batch, width], values));
                let (dx, added) = (sequences(&vec![f64::NAN; batch * len * width]), sequences(&x));
                queue.select_rows(x_tensor.view(), rows.view(), y.view());
                queue.select_rows_backward(dy.view(), rows.view(), dx.view(), Write::Overwrite);
                queue.select_rows_backward(dy.view(), rows.view(), added.view(), Write::Accumulate);
                [y, dx, added].map(|tensor| values(tensor.view())).to_vec()
            };
            let first = |b: usize| (b * len + indices[b] as usize) * width;
            let y: Vec<f64> = (0..batch).flat_map(|b| x[first(b)..][..width].to_vec()).collect();
            let mut dx = vec![0.0; x.len()];
            (0..batch).for_each(|b| dx[first(b)..][..width].copy_from_slice(&dy[b * width..][..width]));
            let added: Vec<f64> = x.iter().zip(&dx).map(|(a, b)| a + b).collect();
            on_every_queue(run, |results| {
                assert_eq!((&results[0], &results[1]), (&y, &dx));
                assert_close("dx added", &results[2], &added, tolerance(dtype), 1e-6);
            });
        }
    }
}

#[test]
fn an_index_beyond_its_sequence_gives_nan_and_no_gradient() {
    let queue = CpuQueue::new(1, &lockstep_tensor::Arena::new()).unwrap();
    let x = floats(DType::F32, [2, 2, 1], &[1.0, 2.0, 3.0, 4.0]);
    let (y, rows) = (floats(DType::F32, [2, 1], &[0.0; 2]), tensor(&[1_u32, 2]));
    queue.select_rows(x.view(), rows.view(), y.view());
    assert!(values(y.view())[0] == 2.0 && values(y.view())[1].is_nan(), "{:?}", values(y.view()));
    let dy = floats(DType::F32, [2, 1], &[5.0, 6.0]);
    queue.select_rows_backward(dy.view(), rows.view(), x.view(), Write::Overwrite);
    assert_eq!(values(x.view()), [0.0, 5.0, 0.0, 0.0]);
}

#[test]
#[should_panic(expected = "select_row: row 3 of sequences of 3")]
fn a_row_beyond_the_sequence_is_refused() {
    let queue = CpuQueue::new(1, &lockstep_tensor::Arena::new()).unwrap();
    let (x, y) = (floats(DType::F32, [1, 3, 2], &[0.0; 6]), floats(DType::F32, [2], &[0.0; 2]));
    queue.select_row(x.view(), 3, y.view());
}
