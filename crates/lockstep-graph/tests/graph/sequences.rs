//! Operations between images, tokens and sequences: their gradients are derivatives, agree bit for bit however a backward
//! runs, and are those of one rank under tensor parallelism.

use std::{thread, time::Duration};

use lockstep_comm::{Group, World, WorldOptions};
use lockstep_graph::{
    Batch, BatchInput, Bias, BlockShape, Convolution, InputDeclaration, Linear, Mode, ParameterIndex,
    Parameters, Peers, Program, Recompute, Recorder, Replay, Seed, SequenceToken, Split, Value,
};
use lockstep_plan::{DType, MemoryCategory, TensorPlace, random::Philox};
use lockstep_tensor::{Arena, CpuQueue, Gelu, Tensor, View, Window2d, Write};

const SHAPE: BlockShape = BlockShape { sequences: 4, seq_len: 5, dtype: DType::F32 };
const WIDTH: usize = 8;
const CLASSES: usize = 3;
const SEED: Seed = Seed::of_tokens(0.25);
const CATEGORY: MemoryCategory = MemoryCategory::Activations;

/// The tensor-parallel group of a recording, and what varies otherwise.
#[derive(Debug, Clone, Copy)]
struct Setting {
    ranks: usize,
    splits_tokens: bool,
    recompute: Recompute,
    reads: Reads,
    dropout: f32,
}

/// Token that the classifier reads.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Reads {
    First,
    Named,
}

const ALONE: Setting =
    Setting { ranks: 1, splits_tokens: false, recompute: Recompute::None, reads: Reads::First, dropout: 0.0 };

/// Records a tiny vision transformer without attention: patches as tokens, a feed-forward layer, a classifier.
fn model(g: &mut Recorder, reads: Reads, dropout: f32) -> Value {
    g.declare_inputs(&[
        InputDeclaration::new("pixels", DType::F32, &[4, 4, 2]),
        InputDeclaration::new("token", DType::U32, &[]),
        InputDeclaration::new("labels", DType::I32, &[]),
    ]);
    let linear = |name, out_features| Linear { name, out_features, bias: Bias::With, std: 0.3 };
    let pixels = g.data("pixels");
    let window = Window2d::square(2, 2, 0);
    let patches = Convolution {
        name: "patches",
        out_channels: WIDTH,
        window,
        groups: 1,
        bias: Bias::With,
        initializer: None,
    };
    let x = g.conv2d(pixels, patches);
    let tokens = g.image_tokens(x, "class_token", 0.5);
    let positions = g.embedding(BatchInput::Positions, "positions", SHAPE.seq_len, WIDTH, 0.5);
    let x = g.add(tokens, positions);
    let normed = g.layer_norm(x, "norm", Bias::With, 1e-5);
    let wide = g.linear(normed, linear("wide", 16));
    let active = g.gelu(Gelu::Exact, wide);
    let fed = g.linear(active, linear("narrow", WIDTH));
    let x = g.add(x, fed);
    let token = match reads {
        Reads::First => SequenceToken::First,
        Reads::Named => SequenceToken::At(g.data("token")),
    };
    let of_sequence = g.token_of_each_sequence(x, token);
    let of_sequence = g.dropout(of_sequence, dropout);
    let logits = g.linear(of_sequence, linear("classes", CLASSES));
    g.cross_entropy(logits, 0.0)
}

fn record(setting: &Setting, rank: usize) -> Program {
    let Setting { ranks, splits_tokens, recompute, reads, dropout } = *setting;
    let mut g = Recorder::new(Mode::Training, SHAPE);
    let splits = [("wide", Split::ColumnParallel { pieces: 16 }), ("narrow", Split::RowParallel)];
    let place = TensorPlace { ranks, rank, splits_tokens, ..TensorPlace::default() };
    g.split(place, splits.map(|(name, split)| (name.to_owned(), split)));
    let losses = model(&mut g, reads, dropout);
    g.finish(losses, recompute)
}

struct Store {
    weights: Vec<Tensor>,
    gradients: Vec<Tensor>,
}

impl Store {
    /// Returns this rank's shards of weights that are the same for every sharding.
    fn new(program: &Program, arena: &Arena) -> Self {
        let (mut weights, mut gradients) = (Vec::new(), Vec::new());
        for (seed, parameter) in (0..).zip(program.parameters()) {
            let elements = parameter.shape.iter().product::<usize>() as u64;
            let all: Vec<f32> = (0..elements).map(|i| 0.4 * Philox::new(seed).normal(i)).collect();
            let local =
                local_part(&parameter.shape, parameter.share.shard.map(|s| (s.dim, s.start, s.len)), &all);
            let shape = parameter.share.shape_of(&parameter.shape);
            weights.push(Tensor::from_slice(arena, &shape[..], &local, CATEGORY).unwrap());
            gradients.push(Tensor::zeros(arena, DType::F32, &shape[..], CATEGORY).unwrap());
        }
        Self { weights, gradients }
    }
}

/// Returns the elements of a shard (dimension, start, length) of a vector or matrix.
fn local_part(shape: &[usize], shard: Option<(usize, usize, usize)>, all: &[f32]) -> Vec<f32> {
    let Some((dim, start, len)) = shard else { return all.to_vec() };
    let inner: usize = shape[dim + 1..].iter().product();
    let rows = all.chunks(shape[dim] * inner);
    rows.flat_map(|row| row[start * inner..(start + len) * inner].to_vec()).collect()
}

impl Parameters for Store {
    fn weight(&self, index: ParameterIndex) -> View<'_> {
        self.weights[index.0].view()
    }

    fn gradient(&self, index: ParameterIndex) -> (View<'_>, Write) {
        (self.gradients[index.0].view(), Write::Accumulate)
    }

    fn gradient_rows(&self, _: ParameterIndex) -> Option<View<'_>> {
        None
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Backward {
    Fused,
    Split,
}

/// Buffers of a program, all full of NaN, and the micro-batch.
struct Bench {
    arena: Arena,
    queue: CpuQueue,
    numbers: [Tensor; 2],
    inputs: [Tensor; 3],
}

impl Bench {
    fn new(arena: Arena) -> Self {
        let pixels: Vec<f32> = (0..4 * 32).map(|i| Philox::new(77).normal(i)).collect();
        let positions: Vec<u32> = (0..20).map(|i| i % 5).collect();
        let keys: Vec<u32> = (0..8).collect();
        let inputs = [
            Tensor::from_slice(&arena, [4, 32], &pixels, CATEGORY).unwrap(),
            Tensor::from_slice(&arena, [4, 1], &[4_u32, 0, 2, 4], CATEGORY).unwrap(),
            Tensor::from_slice(&arena, [4, 1], &[1_i32, 2, -100, 0], CATEGORY).unwrap(),
        ];
        let numbers = [
            Tensor::from_slice(&arena, [20], &positions, CATEGORY).unwrap(),
            Tensor::from_slice(&arena, [4, 2], &keys, CATEGORY).unwrap(),
        ];
        Self { queue: CpuQueue::new(1, &arena).unwrap(), arena, numbers, inputs }
    }

    fn replay<R>(
        &self,
        program: &Program,
        store: &Store,
        peers: Option<Peers<'_>>,
        work: impl FnOnce(&Replay<'_>) -> R,
    ) -> R {
        let poisoned = |bytes| {
            let mut buffer = self.arena.allocate(bytes, MemoryCategory::Workspace).unwrap();
            buffer.bytes_mut().fill(0xff);
            buffer
        };
        let frame = poisoned(program.frame_bytes());
        let workspace = poisoned(program.workspace_bytes().max(program.split_workspace_bytes()));
        let [positions, keys] = &self.numbers;
        work(&Replay {
            peers,
            ..Replay::new(
                &self.queue,
                store,
                Batch {
                    dropout_keys: Some(keys.view()),
                    inputs: &self.inputs,
                    ..Batch::new(positions.view(), positions.view())
                },
                &frame,
                &workspace,
            )
        })
    }

    /// Returns the losses and the gradient of every parameter.
    fn run(&self, program: &Program, peers: Option<Peers<'_>>, backward: Backward) -> Vec<Vec<f32>> {
        let store = Store::new(program, &self.arena);
        let deferred = self.arena.allocate(program.deferred_bytes(), CATEGORY).unwrap();
        let losses = self.replay(program, &store, peers, |replay| {
            program.forward(replay).unwrap();
            match backward {
                Backward::Fused => program.backward(replay, None, None, SEED).unwrap(),
                Backward::Split => {
                    program.backward_inputs(replay, None, None, SEED, &deferred).unwrap();
                    program.backward_weights(replay, &deferred).unwrap();
                }
            }
            program.output(replay.frame).to_vec::<f32>()
        });
        let gradients = store.gradients.iter().map(|gradient| gradient.view().to_vec());
        [losses].into_iter().chain(gradients).collect()
    }

    fn loss(&self, program: &Program, store: &Store) -> f64 {
        self.replay(program, store, None, |replay| {
            program.forward(replay).unwrap();
            let losses = program.output(replay.frame).to_vec::<f32>();
            losses.iter().map(|&loss| f64::from(loss) * f64::from(SEED.of_tokens)).sum()
        })
    }
}

#[test]
fn the_gradients_are_derivatives() {
    for reads in [Reads::First, Reads::Named] {
        let program = record(&Setting { reads, dropout: 0.2, ..ALONE }, 0);
        let bench = Bench::new(Arena::new());
        let found = bench.run(&program, None, Backward::Fused);
        let store = Store::new(&program, &bench.arena);
        for (index, gradient) in found[1..].iter().enumerate() {
            let (weight, name) = (store.weights[index].view(), &program.parameters()[index].name);
            let values = weight.to_vec::<f32>();
            let direction: Vec<f32> = (0..values.len() as u64).map(|i| Philox::new(9).normal(i)).collect();
            let h = 2e-3;
            let along = |sign: f32| {
                let moved: Vec<f32> = values.iter().zip(&direction).map(|(v, d)| v + sign * h * d).collect();
                weight.copy_from(&moved);
                bench.loss(&program, &store)
            };
            let slope = (along(1.0) - along(-1.0)) / (2.0 * f64::from(h));
            weight.copy_from(&values);
            let products = gradient.iter().zip(&direction).map(|(&g, &d)| f64::from(g) * f64::from(d));
            let (expected, scale): (f64, f64) =
                (products.sum(), gradient.iter().map(|&g| f64::from(g).abs()).sum());
            // Nothing mixes tokens here, so no patch reaches a classifier of the class token.
            let is_read = reads == Reads::Named || !name.starts_with("patches");
            assert_eq!(scale > 0.0, is_read, "{name} has a gradient, {reads:?}: {scale}");
            assert!((slope - expected).abs() < 2e-3 * scale + 1e-4, "{name}, {reads:?}: {slope}, {expected}");
        }
    }
}

#[test]
fn every_way_of_running_the_backward_gives_the_same_bits() {
    let bench = Bench::new(Arena::new());
    for reads in [Reads::First, Reads::Named] {
        let setting = Setting { reads, dropout: 0.3, ..ALONE };
        let expected = bench.run(&record(&setting, 0), None, Backward::Fused);
        assert!(expected.iter().flatten().all(|number| number.is_finite()), "{expected:?}");
        assert_eq!(expected[0].len(), SHAPE.sequences, "one loss for each sequence");
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let program = record(&Setting { recompute, ..setting }, 0);
            for backward in [Backward::Fused, Backward::Split] {
                let found = bench.run(&program, None, backward);
                assert!(found == expected, "{reads:?}, {recompute:?}, {backward:?}: {found:?}, {expected:?}");
            }
        }
    }
}

/// Runs `work` on each rank of a world of threads; returns the results.
fn on_ranks<R: Send>(ranks: usize, work: impl Fn(&Group) -> R + Sync) -> Vec<R> {
    let groups = World::in_process(ranks, WorldOptions { arena_bytes: 1 << 26, ..WorldOptions::default() });
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            groups.unwrap().into_iter().map(|group| scope.spawn(move || work(&group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn tensor_parallel_ranks_have_the_losses_and_gradients_of_one() {
    for reads in [Reads::First, Reads::Named] {
        let alone = Setting { reads, dropout: 0.3, ..ALONE };
        let whole = record(&alone, 0);
        let expected = Bench::new(Arena::new()).run(&whole, None, Backward::Fused);
        for (ranks, splits_tokens) in [(2, false), (2, true), (4, true)] {
            for backward in [Backward::Fused, Backward::Split] {
                let setting = Setting { ranks, splits_tokens, recompute: Recompute::Selective, ..alone };
                let of_ranks = on_ranks(ranks, |group| {
                    let arena = group.arena(&[MemoryCategory::Workspace, MemoryCategory::Communication]);
                    let peers = Peers { group, limit: Duration::from_secs(60) };
                    Bench::new(arena).run(&record(&setting, group.rank()), Some(peers), backward)
                });
                compare(&setting, &of_ranks, &expected);
            }
        }
    }
}

/// Compares each rank's losses, and its shards of gradients after their reduction, with those of one rank.
fn compare(setting: &Setting, of_ranks: &[Vec<Vec<f32>>], expected: &[Vec<f32>]) {
    for (rank, found) in of_ranks.iter().enumerate() {
        let program = record(setting, rank);
        let near = |name: &str, found: &[f32], expected: &[f32]| {
            let differs = found.iter().zip(expected).position(|(a, b)| (a - b).abs() > 1e-5 + 1e-4 * b.abs());
            assert!(
                found.len() == expected.len() && differs.is_none(),
                "{name} on rank {rank}, {setting:?}: {found:?}, {expected:?} expected"
            );
        };
        near("losses", &found[0], &expected[0]);
        for (index, parameter) in program.parameters().iter().enumerate() {
            let is_partial = parameter.share.summands > 1;
            let reduced: Vec<f32> = (0..found[index + 1].len())
                .map(|i| match is_partial {
                    true => of_ranks.iter().map(|gradients| gradients[index + 1][i]).sum(),
                    false => found[index + 1][i],
                })
                .collect();
            let shard = parameter.share.shard.map(|shard| (shard.dim, shard.start, shard.len));
            near(&parameter.name, &reduced, &local_part(&parameter.shape, shard, &expected[index + 1]));
        }
    }
}

#[test]
#[should_panic(expected = "4 images of 2 × 2 and a class token for 4 sequences of 6")]
fn an_image_of_another_number_of_patches_is_refused() {
    let mut g = Recorder::new(Mode::Training, BlockShape { seq_len: 6, ..SHAPE });
    g.declare_inputs(&[InputDeclaration::new("pixels", DType::F32, &[2, 2, 3])]);
    let pixels = g.data("pixels");
    g.image_tokens(pixels, "class_token", 0.5);
}

#[test]
#[should_panic(expected = "is no u32 for each of 4 sequences")]
fn an_index_of_another_dtype_is_refused() {
    let mut g = Recorder::new(Mode::Training, SHAPE);
    g.declare_inputs(&[InputDeclaration::new("token", DType::I32, &[])]);
    let x = g.input(WIDTH);
    let token = g.data("token");
    g.token_of_each_sequence(x, SequenceToken::At(token));
}
