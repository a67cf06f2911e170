//! Rotary embeddings against the reference.

use lockstep_plan::DType;
use lockstep_tensor::{Arena, CpuQueue, Rotary, RotaryKernels, Rotation};
use proptest::prelude::*;

use crate::reference;
use crate::testing::{
    ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tensor, tolerance, values,
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn rotations_match_the_reference_in_both_directions_and_in_place(
        (tokens, heads, half) in
            prop_oneof![(1usize..5, 1usize..4, 1usize..40), (1usize..3, 1usize..3, 250usize..270), (50usize..90, 12usize..16, 64usize..66)],
        first_position in 0u32..131_072,
    ) {
        for dtype in ACTIVATIONS {
            let width = 2 * half * heads;
            let x = random_of(dtype, 1, tokens * width);
            let positions: Vec<u32> = (0..tokens as u32).map(|t| first_position + t).collect();
            let frequencies: Vec<f32> =
                (0..half).map(|i| 10_000.0_f32.powf(-(i as f32) / half as f32)).collect();
            let run = |queue: &CpuQueue| {
                let shape = [tokens, heads, 2 * half];
                let (x, y) = (floats(dtype, shape, &x), floats(dtype, shape, &vec![0.0; tokens * width]));
                let (positions, frequencies) = (tensor(&positions), tensor(&frequencies));
                let rotate = |x: &lockstep_tensor::Tensor, rotation, y: &lockstep_tensor::Tensor| {
                    queue.rope(x.view(), Rotary::new(positions.view(), frequencies.view()), rotation, y.view());
                };
                rotate(&x, Rotation::Backward, &y);
                let backward = values(y.view());
                rotate(&x, Rotation::Forward, &y);
                rotate(&x, Rotation::Forward, &x);
                vec![backward, values(y.view()), values(x.view())]
            };
            let backward = reference::rope(&x, &positions, &frequencies, -1.0);
            let forward = reference::rope(&x, &positions, &frequencies, 1.0);
            on_every_queue(run, |results| {
                assert_close("backward", &results[0], &backward, tolerance(dtype), 2e-6);
                assert_close("forward", &results[1], &forward, tolerance(dtype), 2e-6);
                assert_eq!(results[1], results[2], "in place");
            });
        }
    }

    #[test]
    fn neighbours_are_rotated_as_halves_are(tokens in 1usize..9, heads in 1usize..4, half in 1usize..40) {
        let width = 2 * half * heads;
        let x = random_of(DType::F32, 1, tokens * width);
        let positions: Vec<u32> = (0..tokens as u32).map(|t| 3 * t).collect();
        let frequencies: Vec<f32> = (0..half).map(|i| 100.0_f32.powf(-(i as f32) / half as f32)).collect();
        // The reference has the pairs of a head split in halves.
        let apart = |x: &[f64]| -> Vec<f64> {
            let one = |head: &[f64], first: usize| head.iter().skip(first).step_by(2).copied().collect::<Vec<_>>();
            x.chunks(2 * half).flat_map(|head| [one(head, 0), one(head, 1)].concat()).collect()
        };
        for (rotation, sign) in [(Rotation::Forward, 1.0), (Rotation::Backward, -1.0)] {
            let expected = reference::rope(&apart(&x), &positions, &frequencies, sign);
            let run = |queue: &CpuQueue| {
                let x = floats(DType::F32, [tokens, heads, 2 * half], &x);
                let (positions, frequencies) = (tensor(&positions), tensor(&frequencies));
                queue.rope_interleaved(x.view(), Rotary::new(positions.view(), frequencies.view()), rotation, x.view());
                vec![values(x.view())]
            };
            on_every_queue(run, |results| {
                assert_close("rotated", &apart(&results[0]), &expected, 1e-6, 2e-6);
            });
        }
    }
}

#[test]
fn elements_without_a_frequency_stay_as_they_are() {
    let (tokens, heads, head_dim, half) = (3, 2, 7, 2);
    let (positions, frequencies) = ([0_u32, 5, 9], [1.0_f32, 0.3]);
    for dtype in ACTIVATIONS {
        let x = random_of(dtype, 1, tokens * heads * head_dim);
        let heads_of = |x: &[f64]| x.chunks(head_dim).map(<[f64]>::to_vec).collect::<Vec<_>>();
        let first: Vec<f64> = heads_of(&x).iter().flat_map(|head| head[..2 * half].to_vec()).collect();
        let rotated = reference::rope(&first, &positions, &frequencies, 1.0);
        let rest = heads_of(&x).into_iter().map(|head| head[2 * half..].to_vec());
        let expected: Vec<f64> =
            rotated.chunks(2 * half).zip(rest).flat_map(|(first, rest)| [first, &rest].concat()).collect();
        let run = |queue: &CpuQueue| {
            let shape = [tokens, heads, head_dim];
            let (x, y) = (floats(dtype, shape, &x), floats(dtype, shape, &vec![9.0; x.len()]));
            let (positions, frequencies) = (tensor(&positions), tensor(&frequencies));
            let (positions, frequencies) = (positions.view(), frequencies.view());
            queue.rope(x.view(), Rotary::new(positions, frequencies), Rotation::Forward, y.view());
            queue.rope(x.view(), Rotary::new(positions, frequencies), Rotation::Forward, x.view());
            let z = floats(dtype, shape, &values(y.view()));
            queue.rope_interleaved(
                z.view(),
                Rotary::new(positions, frequencies),
                Rotation::Forward,
                z.view(),
            );
            queue.rope_interleaved(
                z.view(),
                Rotary::new(positions, frequencies),
                Rotation::Backward,
                z.view(),
            );
            vec![values(y.view()), values(x.view()), values(z.view())]
        };
        on_every_queue(run, |results| {
            assert_close("rotated", &results[0], &expected, tolerance(dtype), 2e-6);
            assert_eq!(results[0], results[1], "in place");
            assert_close("there and back", &results[2], &results[0], 2.0 * tolerance(dtype), 2e-6);
        });
    }
}

#[test]
fn rotated_elements_are_multiplied_by_the_amplitude_and_the_others_are_not() {
    let (positions, frequencies, shape) = ([3_u32, 70], [1.0_f32, 0.3], [2, 1, 5]);
    let x = random_of(DType::F32, 1, 10);
    let run = |queue: &CpuQueue| {
        let (positions, frequencies) = (tensor(&positions), tensor(&frequencies));
        let plain = Rotary::new(positions.view(), frequencies.view());
        let mut results = Vec::new();
        for rotary in [plain, Rotary { amplitude: 1.25, ..plain }] {
            let [halves, pairs] = [0, 1].map(|_| floats(DType::F32, shape, &x));
            queue.rope(halves.view(), rotary, Rotation::Forward, halves.view());
            queue.rope_interleaved(pairs.view(), rotary, Rotation::Backward, pairs.view());
            results.extend([values(halves.view()), values(pairs.view())]);
        }
        results
    };
    on_every_queue(run, |results| {
        for (plain, larger) in [(&results[0], &results[2]), (&results[1], &results[3])] {
            let grown = plain.iter().enumerate().map(|(i, x)| if i % 5 < 4 { 1.25 * x } else { *x });
            assert_close("grown", larger, &grown.collect::<Vec<_>>(), 1e-6, 1e-6);
        }
    });
}

#[test]
#[should_panic(expected = "rope: f32 [2, 4, 3] is not [2 tokens, heads, at least 4 elements]")]
fn heads_narrower_than_the_rotation_are_refused() {
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    let x = floats(DType::F32, [2, 4, 3], &[0.0; 24]);
    let (positions, frequencies) = (tensor(&[0_u32, 1]), tensor(&[1.0_f32, 0.1]));
    queue.rope(x.view(), Rotary::new(positions.view(), frequencies.view()), Rotation::Forward, x.view());
}
