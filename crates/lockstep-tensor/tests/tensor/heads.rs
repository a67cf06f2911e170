//! Heads joined, cut and padded, against the definition.

use lockstep_tensor::{CpuQueue, HeadKernels};
use proptest::prelude::*;

use crate::testing::{ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tolerance, values};

fn joined(own: &[f64], tail: &[f64], [heads, width, tails]: [usize; 3]) -> Vec<f64> {
    let behind = tail.len() * heads / tails / (own.len() / width);
    let rows = own.chunks(width).enumerate();
    let tail_of = |row: usize| if tails == 1 { row / heads } else { row };
    rows.flat_map(|(row, own)| [own, &tail[tail_of(row) * behind..][..behind]].concat()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn heads_are_joined_cut_and_padded(
        (tokens, heads) in prop_oneof![(1usize..7, 1usize..5), (60usize..70, 8usize..12)],
        [width, behind] in [1usize..40, 1usize..300],
        is_shared in proptest::bool::ANY,
    ) {
        let tails = if is_shared { 1 } else { heads };
        for dtype in ACTIVATIONS {
            let own = random_of(dtype, 1, tokens * heads * width);
            let tail = random_of(dtype, 2, tokens * tails * behind);
            let run = |queue: &CpuQueue| {
                let own = floats(dtype, [tokens, heads, width], &own);
                let tail = floats(dtype, [tokens, tails, behind], &tail);
                let make = |width: usize| floats(dtype, [tokens, heads, width], &vec![9.0; tokens * heads * width]);
                let (y, down, wide, narrow) = (make(width + behind), make(width), make(width + 3), make(1));
                let dtail = floats(dtype, [tokens, tails, behind], &vec![9.0; tail.view().elements()]);
                queue.join_heads(own.view(), tail.view(), y.view());
                queue.join_heads_backward(y.view(), down.view(), dtail.view());
                queue.resize_heads(own.view(), wide.view());
                queue.resize_heads(own.view(), narrow.view());
                [y, down, dtail, wide, narrow].map(|tensor| values(tensor.view())).to_vec()
            };
            let times = if is_shared { heads as f64 } else { 1.0 };
            let dtail: Vec<f64> = tail.iter().map(|x| times * x).collect();
            let padded: Vec<f64> = own.chunks(width).flat_map(|head| [head, &[0.0; 3]].concat()).collect();
            let cut: Vec<f64> = own.iter().copied().step_by(width).collect();
            on_every_queue(run, |results| {
                assert_eq!(results[0], joined(&own, &tail, [heads, width, tails]));
                assert_eq!(results[1], own);
                assert_close("dtail", &results[2], &dtail, tolerance(dtype), 1e-6);
                assert_eq!((&results[3], &results[4]), (&padded, &cut));
            });
        }
    }
}
