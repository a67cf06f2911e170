//! Overlapped collectives in chunks change no bit, and the collectives that run are those that the program's work lists.

use std::{net::TcpListener, thread, time::Duration};

use lockstep_comm::{
    Deadline, Group, Kind, RendezvousEndpoint, TcpOptions, World, WorldOptions, join_by_address,
};
use lockstep_graph::{
    AttentionOptions, AttentionShape, Batch, Bias, BlockShape, CommunicationBuffer, Constant, ContextPeers,
    Linear, Mode, ParameterIndex, Parameters, Peers, Program, Recompute, Recorder, Replay, Ring, Seed, Split,
    Value,
};
use lockstep_plan::{
    ContextMethod, ContextPlace, DType, MemoryCategory, TensorPlace,
    random::Philox,
    work::{Collective, TaskKind},
};
use lockstep_tensor::{Arena, CopyKernels, CpuQueue, GatedActivation, Tensor, View, Write};
use proptest::{prelude::*, sample::select};

const WIDTH: usize = 16;
const LIMIT: Duration = Duration::from_secs(60);

/// Parameters of one recording and one run of a block.
#[derive(Debug, Clone, Copy)]
struct Setting {
    shape: BlockShape,
    splits_tokens: bool,
    recompute: Recompute,
    chunks: usize,
    backward: Backward,
    shared: Shared,
}

/// The parallelism under test: tensor parallelism of the block, or context parallelism of its sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Shared {
    Block,
    Sequences(ContextMethod),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Backward {
    Fused,
    Split,
}

fn frequencies() -> Constant {
    Constant::new("frequencies", vec![1.0, 0.3, 0.1, 0.03])
}

/// Records a Llama block with biases, under the same sharding on all ranks.
fn block(g: &mut Recorder, x: Value) -> Value {
    let linear = |g: &mut Recorder, x, name, out_features| {
        g.linear(x, Linear { name, out_features, bias: Bias::With, std: 0.3 })
    };
    let normed = g.rms_norm(x, "norm_1", WIDTH, 1e-5);
    let [q, k, v] = [("q", 32), ("k", 16), ("v", 16)].map(|(name, columns)| linear(g, normed, name, columns));
    let frequencies = g.constant("frequencies");
    let (q, k) = (g.rope(q, 8, frequencies), g.rope(k, 8, frequencies));
    let shape = AttentionShape { scale: 0.4, ..AttentionShape::new(4, 2, 8) };
    let attended =
        g.attention(q, k, v, shape, AttentionOptions { dropout: 0.1, ..AttentionOptions::default() });
    let projected = linear(g, attended, "o", WIDTH);
    let dropped = g.dropout(projected, 0.1);
    let x = g.add(x, dropped);
    let normed = g.layer_norm(x, "norm_2", Bias::With, 1e-5);
    let [gate, up] = ["gate", "up"].map(|name| linear(g, normed, name, 24));
    let active = g.gated(GatedActivation::Silu, gate, up);
    let down = linear(g, active, "down", WIDTH);
    g.add(x, down)
}

fn record(setting: &Setting, ranks: usize, rank: usize) -> Program {
    let mut g = Recorder::new(Mode::Training, setting.shape);
    g.declare_constants(&[frequencies()]);
    let Setting { splits_tokens, chunks, shared, .. } = *setting;
    let splits = [
        ("q", Split::ColumnParallel { pieces: 4 }),
        ("k", Split::ColumnParallel { pieces: 2 }),
        ("v", Split::ColumnParallel { pieces: 2 }),
        ("o", Split::RowParallel),
        ("gate", Split::ColumnParallel { pieces: 24 }),
        ("up", Split::ColumnParallel { pieces: 24 }),
        ("down", Split::RowParallel),
    ];
    match shared {
        Shared::Block => {
            let place = TensorPlace { ranks, rank, splits_tokens, chunks, ..TensorPlace::default() };
            g.split(place, splits.map(|(name, split)| (name.to_owned(), split)));
        }
        Shared::Sequences(method) => g.share_sequences(ContextPlace { ranks, rank, method }),
    }
    let x = g.input(WIDTH);
    let y = block(&mut g, x);
    g.finish(y, setting.recompute)
}

struct Store {
    weights: Vec<Tensor>,
    gradients: Vec<Tensor>,
}

impl Store {
    fn new(program: &Program, queue: &CpuQueue, arena: &Arena, rank: usize) -> Self {
        let local =
            || program.parameters().iter().map(|parameter| parameter.share.shape_of(&parameter.shape));
        let zeros =
            |shape: Vec<usize>| Tensor::zeros(arena, DType::F32, &shape[..], MemoryCategory::Gradients);
        let weight = |(index, shape): (usize, Vec<usize>)| {
            let seed = (index * 8 + rank) as u64;
            noise(queue, arena, program.shape().dtype, &shape, seed)
        };
        Self {
            weights: local().enumerate().map(weight).collect(),
            gradients: local().map(|shape| zeros(shape).unwrap()).collect(),
        }
    }
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

fn noise(queue: &CpuQueue, arena: &Arena, dtype: DType, shape: &[usize], seed: u64) -> Tensor {
    let values: Vec<f32> =
        (0..shape.iter().product::<usize>() as u64).map(|i| Philox::new(seed).normal(i) * 0.5).collect();
    let values = Tensor::from_slice(arena, shape, &values, MemoryCategory::Parameters).unwrap();
    let out = Tensor::zeros(arena, dtype, shape, MemoryCategory::Parameters).unwrap();
    queue.cast(values.view(), out.view());
    out
}

fn bits(queue: &CpuQueue, arena: &Arena, view: View<'_>) -> Vec<u32> {
    let out = Tensor::zeros(arena, DType::F32, view.shape(), MemoryCategory::Workspace).unwrap();
    queue.cast(view, out.view());
    out.view().to_vec::<f32>().into_iter().map(f32::to_bits).collect()
}

/// Returns one rank's bits of the output, of the input's gradient and of every parameter's gradient.
fn run(group: &Group, setting: &Setting) -> Vec<Vec<u32>> {
    let (rank, ranks) = (group.rank(), group.size());
    let program = record(setting, ranks, rank);
    let arena = group.arena(&[MemoryCategory::Workspace, MemoryCategory::Communication]);
    let queue = CpuQueue::new(1, &arena).unwrap();
    let store = Store::new(&program, &queue, &arena, rank);
    let BlockShape { sequences, seq_len, dtype } = program.shape();
    let tokens = program.shape().tokens();
    let held = [program.output_rows(), WIDTH];
    // Ranks with replicated values get the same data.
    let of = |seed: u64| if setting.splits_tokens { seed + rank as u64 } else { seed };
    let (x, dy) =
        (noise(&queue, &arena, dtype, &held, of(100)), noise(&queue, &arena, dtype, &held, of(200)));
    let dx = noise(&queue, &arena, dtype, &held, 0);
    let category = MemoryCategory::Activations;
    let numbers =
        |shape: [usize; 2], numbers: Vec<u32>| Tensor::from_slice(&arena, shape, &numbers, category).unwrap();
    let positions = numbers([1, tokens], (0..tokens).map(|i| (i % seq_len) as u32).collect());
    let keys = numbers([sequences, 2], (0..2 * sequences as u32).collect());
    let constants = [frequencies().allocate(&arena).unwrap()];
    // NaN in every buffer, so that reads of unwritten memory show.
    let poisoned = |bytes| {
        let mut buffer = arena.allocate(bytes, MemoryCategory::Workspace).unwrap();
        buffer.bytes_mut().fill(0xff);
        buffer
    };
    let frame = poisoned(program.frame_bytes());
    let workspace = poisoned(program.workspace_bytes().max(program.split_workspace_bytes()));
    let deferred = poisoned(program.deferred_bytes());
    let communication_buffer = CommunicationBuffer::new([&program].into_iter(), &arena).unwrap();
    assert_eq!(communication_buffer.is_some(), setting.chunks > 1, "{setting:?}");
    let ring = Ring::new([&program].into_iter(), &arena).unwrap();
    let peers = Peers { group, limit: LIMIT };
    let of_block = setting.shared == Shared::Block;
    let replay = Replay {
        input: Some(x.view()),
        peers: of_block.then_some(peers),
        context: (!of_block).then_some(ContextPeers { peers, ring: ring.as_ref() }),
        communication_buffer: communication_buffer.as_ref(),
        ..Replay::new(
            &queue,
            &store,
            Batch {
                dropout_keys: Some(keys.view()),
                constants: &constants,
                ..Batch::new(positions.view().reshape([tokens]), positions.view().reshape([tokens]))
            },
            &frame,
            &workspace,
        )
    };
    let (dy, gradient) = (Some(dy.view()), Some(dx.view()));
    program.forward(&replay).unwrap();
    match setting.backward {
        Backward::Fused => program.backward(&replay, dy, gradient, Seed::default()).unwrap(),
        Backward::Split => {
            program.backward_inputs(&replay, dy, gradient, Seed::default(), &deferred).unwrap();
            program.backward_weights(&replay, &deferred).unwrap();
        }
    }
    let mut found = vec![bits(&queue, &arena, program.output(&frame)), bits(&queue, &arena, dx.view())];
    found.extend(store.gradients.iter().map(|gradient| bits(&queue, &arena, gradient.view())));
    assert!(found.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()), "{setting:?}");
    found
}

/// Runs `work` on each rank of a world joined by shared memory; returns the results.
fn in_shared_memory<R: Send>(ranks: usize, work: impl Fn(&Group) -> R + Sync) -> Vec<R> {
    let options = WorldOptions { arena_bytes: 1 << 26, ..WorldOptions::default() };
    let groups = World::in_process(ranks, options).unwrap();
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || work(&group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `work` on each rank of a world joined by sockets; returns the results.
fn by_sockets<R: Send>(ranks: usize, work: impl Fn(&Group) -> R + Sync) -> Vec<R> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        let work = &work;
        let rank = |rank| {
            let listener = (rank == 0).then(|| listener.try_clone().unwrap());
            let run = format!("overlap on port {port}");
            let endpoint = RendezvousEndpoint {
                host: "127.0.0.1".to_owned(),
                port,
                listener,
                run,
                ..RendezvousEndpoint::default()
            };
            let options = TcpOptions::default();
            scope.spawn(move || {
                work(&join_by_address(rank, ranks, endpoint, options, Deadline::after(LIMIT)).unwrap())
            })
        };
        let threads: Vec<_> = (0..ranks).map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Asserts that chunked collectives give the same bits as unchunked ones, for each number of chunks.
fn compare(group: &Group, setting: &Setting, chunks: &[usize]) {
    let expected = run(group, &Setting { chunks: 1, ..*setting });
    for &chunks in chunks {
        let found = run(group, &Setting { chunks, ..*setting });
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let differing = found.iter().zip(expected).position(|(found, expected)| found != expected);
            let values = differing.map(|at| (f32::from_bits(found[at]), f32::from_bits(expected[at]), at));
            assert_eq!(
                values,
                None,
                "(with chunks, without, element) of result {index} on rank {} in {chunks} chunks: {setting:?}",
                group.rank()
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn no_bit_depends_on_the_chunks_whether_they_divide_the_rows_or_not(
        ranks in select(vec![2_usize, 4]),
        (sequences, tokens) in (1_usize..3, 1_usize..40),
        dtype in select(vec![DType::F32, DType::BF16]),
        splits_tokens: bool,
        recompute in select(vec![Recompute::None, Recompute::Selective, Recompute::Full]),
        backward in select(vec![Backward::Fused, Backward::Split]),
        chunks in 2_usize..8,
    ) {
        let shape = BlockShape { sequences, seq_len: tokens * ranks, dtype };
        let shared = Shared::Block;
        let setting = Setting { shape, splits_tokens, recompute, chunks, backward, shared };
        in_shared_memory(ranks, |group| compare(group, &setting, &[chunks]));
    }
}

#[test]
fn nor_where_ranks_are_joined_by_sockets() {
    let shape = BlockShape { sequences: 2, seq_len: 150, dtype: DType::F32 };
    for splits_tokens in [true, false] {
        let recompute = Recompute::Selective;
        let (backward, shared) = (Backward::Fused, Shared::Block);
        let setting = Setting { shape, splits_tokens, recompute, chunks: 1, backward, shared };
        by_sockets(2, |group| compare(group, &setting, &[2, 4, 7]));
    }
}

/// Counts a rank's calls of a collective.
fn count(group: &Group, kind: Kind) -> usize {
    group.recorded(group.rank()).iter().filter(|recorded| recorded.call.kind == kind).count()
}

#[test]
fn a_chunk_is_an_exchange_and_gathers_for_weights_alone_are_not_cut() {
    let shape = BlockShape { sequences: 1, seq_len: 32, dtype: DType::F32 };
    let expected = |backward: Backward, chunks: usize| {
        let recompute = Recompute::None;
        let shared = Shared::Block;
        let setting = Setting { shape, splits_tokens: true, recompute, chunks, backward, shared };
        let counts = in_shared_memory(2, |group| {
            run(group, &setting);
            [Kind::AllGather, Kind::ReduceScatter].map(|kind| count(group, kind))
        });
        assert_eq!(counts[0], counts[1], "both ranks call the same");
        counts[0]
    };
    for backward in [Backward::Fused, Backward::Split] {
        // Two all-gathers and two reduce-scatters forward, as many backward, and two more all-gathers for the weight gradients.
        assert_eq!(expected(backward, 1), [6, 4], "{backward:?}");
        assert_eq!(expected(backward, 4), [4 * 4 + 2, 4 * 4], "{backward:?}");
    }
}

const KINDS: [Kind; 5] = [Kind::AllReduce, Kind::AllGather, Kind::ReduceScatter, Kind::AllToAll, Kind::Send];

/// Bytes per kind of collective that the block's work predicts.
fn said(setting: &Setting, ranks: usize) -> [u64; 5] {
    let work = record(setting, ranks, 0).work();
    let backward = match setting.backward {
        Backward::Fused => work.backward,
        Backward::Split => [work.backward_inputs, work.backward_weights].concat(),
    };
    let mut sums = [0; 5];
    for task in work.forward.iter().chain(&backward) {
        let TaskKind::Exchange(exchange) = task.kind else { continue };
        let (kind, times) = match exchange.collective {
            Collective::AllReduce => (Kind::AllReduce, 1),
            Collective::AllGather => (Kind::AllGather, 1),
            Collective::ReduceScatter => (Kind::ReduceScatter, 1),
            Collective::AllToAll => (Kind::AllToAll, 1),
            Collective::Ring => (Kind::Send, ranks as u64 - 1),
            Collective::Shift => (Kind::Send, 1),
            Collective::Broadcast | Collective::Reduce => panic!("no such exchange is recorded: {task:?}"),
        };
        sums[KINDS.iter().position(|other| *other == kind).unwrap()] += times * exchange.bytes;
    }
    sums
}

/// Bytes per kind of collective that a rank has called.
fn called(group: &Group) -> [u64; 5] {
    let calls: Vec<_> = group.recorded(group.rank()).into_iter().map(|recorded| recorded.call).collect();
    KINDS.map(|kind| {
        let of_kind = calls.iter().filter(|call| call.kind == kind);
        of_kind.map(|call| (call.elements * call.number.size_bytes()) as u64).sum()
    })
}

#[test]
fn the_work_of_a_program_has_the_bytes_that_ranks_exchange() {
    let shape = BlockShape { sequences: 2, seq_len: 48, dtype: DType::BF16 };
    let of_sequences = [ContextMethod::Ring, ContextMethod::AllGather, ContextMethod::AllToAll];
    let of_block = [(false, 1), (false, 3), (true, 1), (true, 3)];
    let kinds = of_block.map(|(splits_tokens, chunks)| (Shared::Block, splits_tokens, chunks));
    let kinds: Vec<_> =
        kinds.into_iter().chain(of_sequences.map(|method| (Shared::Sequences(method), true, 1))).collect();
    for ranks in [2, 4] {
        for backward in [Backward::Fused, Backward::Split] {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                for &(shared, splits_tokens, chunks) in &kinds {
                    let setting = Setting { shape, splits_tokens, recompute, chunks, backward, shared };
                    let found = in_shared_memory(ranks, |group| {
                        run(group, &setting);
                        called(group)
                    });
                    assert_eq!(found, vec![said(&setting, ranks); ranks], "{setting:?}");
                    assert!(found[0].iter().sum::<u64>() > 0, "{setting:?}");
                }
            }
        }
    }
}
