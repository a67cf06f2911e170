//! Look-ups in an embedding table and their gradients.

use lockstep_plan::DType;
use lockstep_tensor::{Arena, CpuQueue, EmbeddingKernels};
use proptest::prelude::*;

use crate::testing::{ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tensor, values};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn tokens_read_their_rows_and_add_their_gradients_to_them(
        (tokens, width) in prop_oneof![(1usize..20, 1usize..40), (150usize..300, 450usize..800)],
        vocabulary in 1usize..50,
    ) {
        for dtype in ACTIVATIONS {
            let table = random_of(dtype, 1, vocabulary * width);
            let (dy, before) = (random_of(dtype, 2, tokens * width), random_of(dtype, 3, vocabulary * width));
            let ids: Vec<u32> = (0..tokens).map(|i| (i * i % vocabulary) as u32).collect();
            let run = |queue: &CpuQueue| {
                let ids = tensor(&ids);
                let table = floats(dtype, [vocabulary, width], &table);
                let out = floats(dtype, [tokens, width], &vec![0.0; tokens * width]);
                let dy = floats(dtype, [tokens, width], &dy);
                let gradient = floats(DType::F32, [vocabulary, width], &before);
                queue.embedding(ids.view(), table.view(), 0, out.view());
                queue.embedding_backward(ids.view(), dy.view(), 0, gradient.view());
                vec![values(out.view()), values(gradient.view())]
            };
            let rows = ids.iter().flat_map(|id| table[*id as usize * width..][..width].to_vec());
            let out: Vec<f64> = rows.collect();
            // The order of the additions is part of the definition, so the f32 sums must agree exactly.
            let mut gradient: Vec<f32> = before.iter().map(|x| *x as f32).collect();
            for (token, id) in ids.iter().enumerate() {
                for i in 0..width {
                    gradient[*id as usize * width + i] += dy[token * width + i] as f32;
                }
            }
            let gradient: Vec<f64> = gradient.into_iter().map(f64::from).collect();
            on_every_queue(run, |results| {
                assert_eq!(results[0], out);
                assert_close("gradient", &results[1], &gradient, 0.0, 0.0);
            });
        }
    }
}

#[test]
fn the_gradient_matches_finite_differences() {
    let (ids, width) = ([2_u32, 0, 2], 3);
    let dy = random_of(DType::F32, 1, 9);
    let loss = |table: &[f64]| -> f64 {
        (0..9).map(|i| dy[i] * table[ids[i / width] as usize * width + i % width]).sum()
    };
    let expected = crate::reference::finite_differences(&random_of(DType::F32, 2, 12), loss);
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    let gradient = floats(DType::F32, [4, width], &[0.0; 12]);
    queue.embedding_backward(tensor(&ids).view(), floats(DType::F32, [3, 3], &dy).view(), 0, gradient.view());
    assert_close("gradient", &values(gradient.view()), &expected, 1e-6, 1e-6);
}

/// Table shards that are adjacent or empty, with ids in all of them and beyond. Each shard must give the row of
/// the whole table if it holds the id, and zeros if not.
#[test]
fn parts_of_a_table_add_up_to_the_whole() {
    let (vocabulary, width, cuts) = (300, 260, [0, 7, 7, 130, 300]);
    let ids: Vec<u32> = (0..250).map(|i| i * i % 300).chain([300, 1000, u32::MAX]).collect();
    let within = ids.len() - 3;
    for dtype in ACTIVATIONS {
        let table = random_of(dtype, 1, vocabulary * width);
        let (dy, before) =
            (random_of(dtype, 2, ids.len() * width), random_of(DType::F32, 3, vocabulary * width));
        let run = |queue: &CpuQueue, cuts: &[usize]| {
            let (ids, dy) = (tensor(&ids), floats(dtype, [ids.len(), width], &dy));
            let table = floats(dtype, [vocabulary, width], &table);
            let gradient = floats(DType::F32, [vocabulary, width], &before);
            let outs = cuts.windows(2).map(|cut| {
                let out = floats(dtype, [ids.view().elements(), width], &vec![9.0; dy.view().elements()]);
                let rows = cut[0]..cut[1];
                let (table, gradient) = (table.view().rows(rows.clone()), gradient.view().rows(rows));
                queue.embedding(ids.view(), table, cut[0] as u32, out.view());
                queue.embedding_backward(ids.view(), dy.view(), cut[0] as u32, gradient);
                values(out.view())
            });
            let outs: Vec<_> = outs.collect();
            let sum = (0..outs[0].len()).map(|i| outs.iter().map(|out| out[i]).sum()).collect();
            vec![sum, values(gradient.view())]
        };
        let both = |queue: &CpuQueue| [run(queue, &cuts), run(queue, &[0, vocabulary])].concat();
        on_every_queue(both, |results| {
            assert_eq!(results[0], results[2], "rows of the parts and of the whole");
            assert_eq!(results[1], results[3], "gradients of the parts and of the whole");
            assert!(results[0][within * width..].iter().all(|x| *x == 0.0), "ids that nobody has");
        });
    }
}
