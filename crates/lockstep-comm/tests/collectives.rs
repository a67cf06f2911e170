//! Every operation against a reference that knows nothing of ranks, to the bit: random sizes, types, roots and blocks, from
//! private and from shared memory, on worlds of threads.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod common;

use common::{Way, in_world_by, soon};
use half::{bf16, f16};
use lockstep_comm::{
    Collective, Group, Kind, Lent, Number, NumberType, ReduceOp, Source, Target,
    benchmark::{Benchmark, BenchmarkMemory},
};
use lockstep_plan::{DType, MemoryCategory};
use proptest::prelude::*;

/// Runs `work` as each of `ranks` ranks: in one world, then in one of another kind.
fn in_world(ranks: usize, work: impl Fn(&Group) + Sync) {
    for way in Way::ALL {
        in_world_by(way, ranks, &work);
    }
}

/// A type with its reference arithmetic.
trait Value: Number + PartialEq {
    fn make(bits: u64) -> Self;
    fn tree(op: ReduceOp, values: &[Self]) -> Self;
}

fn float(bits: u64) -> f32 {
    let scale = [1.0, 1e4, 1e-4][(bits % 3) as usize];
    ((bits >> 20) as f32 / (1_u64 << 44) as f32 - 0.5) * scale
}

fn tree_of<T: Copy>(values: &[T], op: &impl Fn(T, T) -> T) -> T {
    if values.len() == 1 {
        return values[0];
    }
    let (left, right) = values.split_at(1 << (values.len() - 1).ilog2());
    op(tree_of(left, op), tree_of(right, op))
}

fn float_tree(op: ReduceOp, values: &[f32]) -> f32 {
    match op {
        ReduceOp::Sum => tree_of(values, &|a, b| a + b),
        ReduceOp::Max => tree_of(values, &|a, b| if a > b { a } else { b }),
        ReduceOp::Min => tree_of(values, &|a, b| if a < b { a } else { b }),
    }
}

macro_rules! integer_values {
    ($($type:ty),*) => {$(
        impl Value for $type {
            fn make(bits: u64) -> Self {
                (bits >> 7) as $type
            }
            fn tree(op: ReduceOp, values: &[Self]) -> Self {
                match op {
                    ReduceOp::Sum => tree_of(values, &|a: $type, b| a.wrapping_add(b)),
                    ReduceOp::Max => tree_of(values, &|a: $type, b| a.max(b)),
                    ReduceOp::Min => tree_of(values, &|a: $type, b| a.min(b)),
                }
            }
        }
    )*};
}
integer_values!(i64, u8);

macro_rules! float_values {
    ($($type:ty, $from:expr, $to:expr);*) => {$(
        impl Value for $type {
            fn make(bits: u64) -> Self {
                $from(float(bits))
            }
            fn tree(op: ReduceOp, values: &[Self]) -> Self {
                let wide: Vec<f32> = values.iter().map(|value| $to(*value)).collect();
                $from(float_tree(op, &wide))
            }
        }
    )*};
}
float_values!(f32, |x| x, |x| x; bf16, bf16::from_f32, bf16::to_f32; f16, f16::from_f32, f16::to_f32);

#[derive(Debug, Clone)]
struct Case {
    kind: u8,
    number: u8,
    op: ReduceOp,
    /// Modulo the number of ranks.
    root: usize,
    elements: usize,
    /// Blocks of unlike lengths, where there are blocks.
    is_uneven: bool,
    /// Bit r: rank r's buffers lie in shared memory.
    shared: u8,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let elements = prop_oneof![
        3 => 0_usize..200,
        3 => 200_usize..20_000,
        1 => 20_000_usize..400_000,
    ];
    let shared = prop_oneof![Just(0_u8), Just(255), any::<u8>()];
    let op = prop_oneof![3 => Just(ReduceOp::Sum), 1 => Just(ReduceOp::Max), 1 => Just(ReduceOp::Min)];
    (0_u8..10, 0_u8..5, op, 0_usize..8, elements, any::<bool>(), shared, any::<u64>()).prop_map(
        |(kind, number, op, root, elements, is_uneven, shared, seed)| Case {
            kind,
            number,
            op,
            root,
            elements,
            is_uneven,
            shared,
            seed,
        },
    )
}

/// The data that rank `rank` starts with.
fn data<T: Value>(case: &Case, rank: usize, elements: usize) -> Vec<T> {
    let mut bits = case.seed ^ (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let next = |_| {
        bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        T::make(bits ^ bits >> 29)
    };
    (0..elements).map(next).collect()
}

fn reduced<T: Value>(case: &Case, ranks: usize, elements: usize) -> Vec<T> {
    let all: Vec<Vec<T>> = (0..ranks).map(|rank| data(case, rank, elements)).collect();
    (0..elements).map(|i| T::tree(case.op, &all.iter().map(|data| data[i]).collect::<Vec<T>>())).collect()
}

/// Lengths of the blocks of a case.
fn counts(case: &Case, ranks: usize) -> Vec<usize> {
    let share = case.elements / ranks;
    let count = |rank: usize| if case.is_uneven { share * (rank * 3 % 4) / 2 + rank % 2 } else { share };
    (0..ranks).map(count).collect()
}

/// What `from` sends to `to` in an uneven all-to-all.
fn sent(case: &Case, from: usize, to: usize, ranks: usize) -> usize {
    let share = case.elements / ranks;
    if case.is_uneven { share * ((from + 2 * to) % 3) / 2 + (from + to) % 2 } else { share }
}

fn block<T: Copy>(data: &[T], counts: &[usize], rank: usize) -> Vec<T> {
    let start: usize = counts[..rank].iter().sum();
    data[start..start + counts[rank]].to_vec()
}

/// What must be in the rank's output after the operation.
fn expected<T: Value>(case: &Case, rank: usize, ranks: usize) -> Vec<T> {
    let (root, counts) = (case.root % ranks, counts(case, ranks));
    let total: usize = counts.iter().sum();
    let gathered = || (0..ranks).flat_map(|from| data::<T>(case, from, counts[from])).collect::<Vec<T>>();
    match case.kind {
        0 => data(case, root, case.elements),
        1 if rank == root => reduced(case, ranks, case.elements),
        1 => data(case, rank, case.elements),
        2 => reduced(case, ranks, case.elements),
        3 | 4 => block(&reduced(case, ranks, total), &counts, rank),
        5 | 6 => gathered(),
        7 => {
            let from = |from: usize| {
                let counts: Vec<usize> = (0..ranks).map(|to| sent(case, from, to, ranks)).collect();
                block(&data::<T>(case, from, counts.iter().sum()), &counts, rank)
            };
            (0..ranks).flat_map(from).collect()
        }
        8 => block(&data::<T>(case, root, total), &counts, rank),
        9 if rank == root => gathered(),
        _ => Vec::new(),
    }
}

/// Carries out a case; returns the rank's output.
fn run<T: Value>(group: &Group, case: &Case) -> Vec<T> {
    let (rank, ranks, op) = (group.rank(), group.size(), case.op);
    let (root, counts) = (case.root % ranks, counts(case, ranks));
    let total: usize = counts.iter().sum();
    let given = case.is_uneven.then(|| counts.clone());
    let arena = if case.shared >> rank & 1 == 1 {
        group.arena(&[MemoryCategory::Communication])
    } else {
        lockstep_tensor::Arena::new()
    };
    // A byte off, now and then: nothing may count on alignment beyond the type's.
    let shift = case.seed as usize % 3;
    let mut buffers = [0, 1].map(|_| {
        let bytes = (shift + case.elements.max(total) * 2 + 16 * ranks) * size_of::<T>();
        arena.allocate_zeroed(bytes, MemoryCategory::Communication).unwrap()
    });
    let [first, second] = &mut buffers;
    let first: &mut [T] = &mut bytemuck::cast_slice_mut(first.bytes_mut())[shift..];
    let second: &mut [T] = &mut bytemuck::cast_slice_mut(second.bytes_mut())[shift..];
    let run =
        |mut collective: Collective<Source<'_>, Target<'_>>| group.run(&mut collective, soon()).unwrap();
    let fill = |to: &mut [T]| to.copy_from_slice(&data(case, rank, to.len()));
    match case.kind {
        0..=2 => {
            let data = &mut first[..case.elements];
            fill(data);
            match case.kind {
                0 => run(Collective::Broadcast { data: (&mut *data).into(), root }),
                1 => run(Collective::Reduce { data: (&mut *data).into(), op, root }),
                _ => run(Collective::AllReduce { data: (&mut *data).into(), op }),
            }
            data.to_vec()
        }
        3 => {
            let (input, output) = (&mut first[..total], &mut second[..counts[rank]]);
            fill(input);
            let input = Source::from(&*input);
            run(Collective::ReduceScatter { input, output: (&mut *output).into(), op, counts: given });
            output.to_vec()
        }
        4 => {
            let data = &mut first[..total];
            fill(data);
            run(Collective::ReduceScatterInPlace { data: (&mut *data).into(), op, counts: given });
            block(data, &counts, rank)
        }
        5 => {
            let (input, output) = (&mut first[..counts[rank]], &mut second[..total]);
            fill(input);
            let input = Source::from(&*input);
            run(Collective::AllGather { input, output: (&mut *output).into(), counts: given });
            output.to_vec()
        }
        6 => {
            let start: usize = counts[..rank].iter().sum();
            fill(&mut first[start..start + counts[rank]]);
            let data = &mut first[..total];
            run(Collective::AllGatherInPlace { data: (&mut *data).into(), counts: given });
            data.to_vec()
        }
        7 => {
            let sends: Vec<usize> = (0..ranks).map(|to| sent(case, rank, to, ranks)).collect();
            let receives: Vec<usize> = (0..ranks).map(|from| sent(case, from, rank, ranks)).collect();
            let input = &mut first[..sends.iter().sum()];
            fill(input);
            let output = &mut second[..receives.iter().sum()];
            let given = case.is_uneven.then_some((sends, receives));
            let input = Source::from(&*input);
            run(Collective::AllToAll { input, output: (&mut *output).into(), counts: given });
            output.to_vec()
        }
        8 => {
            let (input, output) = (&mut first[..total], &mut second[..counts[rank]]);
            fill(input);
            let input = (rank == root).then(|| Source::from(&*input));
            run(Collective::Scatter { input, output: (&mut *output).into(), root, counts: given });
            output.to_vec()
        }
        _ => {
            let (input, output) = (&mut first[..counts[rank]], &mut second[..total]);
            fill(input);
            let is_root = rank == root;
            let target = is_root.then(|| Target::from(&mut *output));
            run(Collective::Gather { input: Source::from(&*input), output: target, root, counts: given });
            if is_root { output.to_vec() } else { Vec::new() }
        }
    }
}

fn check<T: Value>(group: &Group, case: &Case) {
    let found = run::<T>(group, case);
    let expected = expected::<T>(case, group.rank(), group.size());
    let bytes = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();
    assert_eq!(found.len(), expected.len(), "rank {} of {}: {case:?}", group.rank(), group.size());
    let differs = bytes(&found).iter().zip(bytes(&expected)).position(|(found, expected)| *found != expected);
    let element = differs.map(|byte| byte / size_of::<T>());
    assert_eq!(
        element,
        None,
        "first element that differs on rank {} of {}: {case:?}",
        group.rank(),
        group.size()
    );
}

fn check_number(group: &Group, case: &Case) {
    match case.number {
        0 => check::<f32>(group, case),
        1 => check::<bf16>(group, case),
        2 => check::<f16>(group, case),
        3 => check::<i64>(group, case),
        _ => check::<u8>(group, case),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 40, ..ProptestConfig::default() })]
    #[test]
    fn every_operation_gives_the_bits_of_the_reference_on_every_rank(
        ranks in 1_usize..9, cases in proptest::collection::vec(case(), 1..12)
    ) {
        in_world(ranks, |group| cases.iter().for_each(|case| check_number(group, case)));
    }
}

#[test]
fn many_small_operations_in_a_row_never_mix() {
    in_world(4, |group| {
        for round in 0..2000_usize {
            let mut sum = [(group.rank() + round) as i64; 3];
            group.all_reduce(&mut sum[..], ReduceOp::Sum, soon()).unwrap();
            assert_eq!(sum, [(6 + 4 * round) as i64; 3]);
            let mut word = [if group.rank() == round % 4 { round as i64 } else { -1 }];
            group.broadcast(&mut word[..], round % 4, soon()).unwrap();
            assert_eq!(word, [round as i64]);
        }
    });
}

#[test]
fn what_is_started_goes_on_while_others_are_late_and_comes_back_in_order() {
    const BUCKET: usize = 100_000;
    in_world(3, |group| {
        for category in [MemoryCategory::Gradients, MemoryCategory::Workspace] {
            let arena = group.arena(&[MemoryCategory::Gradients]);
            let mut buffer = arena.allocate_zeroed(40 * BUCKET * 4, category).unwrap();
            let value = |bucket: usize, rank: usize| (bucket * 10 + rank) as f32;
            let mut pending = Vec::new();
            for bucket in 0..40 {
                let range = bucket * BUCKET..(bucket + 1) * BUCKET;
                let floats = vec![value(bucket, group.rank()); BUCKET];
                buffer.view(DType::F32, range.start * 4, [BUCKET]).copy_from(&floats);
                let lent = Lent::new(buffer.lend(range.start * 4..range.end * 4), DType::F32);
                let started = Collective::AllReduce { data: lent, op: ReduceOp::Sum };
                pending.push(group.start(started, soon()).unwrap());
                if group.rank() == bucket % 3 {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            }
            // The last first: order of waiting does not matter.
            for pending in pending.into_iter().rev() {
                drop(pending.wait(soon()).unwrap());
            }
            let sums: Vec<f32> = buffer.view(DType::F32, 0, [40 * BUCKET]).to_vec();
            for (i, sum) in sums.iter().enumerate() {
                let expected = (0..3).map(|rank| value(i / BUCKET, rank)).sum::<f32>();
                assert_eq!(*sum, expected, "element {i} on rank {}", group.rank());
            }
        }
    });
}

#[test]
fn groups_of_a_partition_work_side_by_side_and_one_waits_while_another_goes_on() {
    in_world(4, |group| {
        let rows = group.partition(&[vec![0, 1], vec![3, 2]], soon()).unwrap().unwrap();
        let columns = group.partition(&[vec![0, 3], vec![1, 2]], soon()).unwrap().unwrap();
        assert_eq!(rows.rank(), [0, 1, 1, 0][group.rank()]);
        let mut sum = [1_i64 << (8 * group.rank())];
        rows.all_reduce(&mut sum[..], ReduceOp::Sum, soon()).unwrap();
        assert_eq!(sum[0], if group.rank() < 2 { 0x101 } else { 0x101_0000 });
        columns.all_reduce(&mut sum[..], ReduceOp::Sum, soon()).unwrap();
        assert_eq!(sum[0], 0x101_0101);
        // Ranks 0 and 1 begin the row's operation in the background, and meet in the column while it is under way.
        let arena = group.arena(&[MemoryCategory::Gradients]);
        let mut buffer = arena.allocate_zeroed(1 << 20, MemoryCategory::Gradients).unwrap();
        let data = Lent::new(buffer.lend(0..1 << 20), DType::U8);
        let pending = rows.start(Collective::AllReduce { data, op: ReduceOp::Max }, soon()).unwrap();
        columns.barrier(soon()).unwrap();
        group.barrier(soon()).unwrap();
        drop(pending.wait(soon()).unwrap());
        // A rank that is in no group of a partition still takes part in making it.
        let pair = group.partition(&[vec![2, 0]], soon()).unwrap();
        assert_eq!(pair.map(|pair| pair.rank()), [Some(1), None, Some(0), None][group.rank()]);
    });
}

#[test]
fn messages_between_two_ranks_arrive_whole_and_in_order() {
    in_world(3, |group| {
        let arena = group.arena(&[MemoryCategory::Activations]);
        for category in [MemoryCategory::Activations, MemoryCategory::Workspace] {
            for elements in [0, 5, 8000, 200_000] {
                let mut buffer = arena.allocate_zeroed(elements * 4, category).unwrap();
                let next = (group.rank() + 1) % 3;
                let last = (group.rank() + 2) % 3;
                // A ring would hang if sending what is small waited for receiving.
                let message: &mut [f32] = &mut buffer.elements_mut()[..elements];
                if elements < 10_000 {
                    message.fill(group.rank() as f32);
                    group.send(&*message, next, soon()).unwrap();
                    group.receive(&mut *message, last, soon()).unwrap();
                    assert!(message.iter().all(|x| *x == last as f32));
                }
                if group.rank() == 0 {
                    message.iter_mut().enumerate().for_each(|(i, x)| *x = i as f32);
                    group.send(&*message, 1, soon()).unwrap();
                } else if group.rank() == 1 {
                    group.receive(&mut *message, 0, soon()).unwrap();
                    assert!(message.iter().enumerate().all(|(i, x)| *x == i as f32), "{elements} elements");
                }
            }
        }
        // Both ways at once, in the background.
        let mut out = arena.allocate_zeroed(400_000, MemoryCategory::Activations).unwrap();
        let mut back = arena.allocate_zeroed(400_000, MemoryCategory::Workspace).unwrap();
        out.bytes_mut().fill(group.rank() as u8 + 1);
        if group.rank() < 2 {
            let peer = 1 - group.rank();
            let input = Lent::new(out.lend(0..400_000), DType::U8);
            let output = Lent::new(back.lend(0..400_000), DType::U8);
            let received = group.start(Collective::Receive { output, from: peer }, soon()).unwrap();
            let sent = group.start(Collective::Send { input, to: peer }, soon()).unwrap();
            drop((sent.wait(soon()).unwrap(), received.wait(soon()).unwrap()));
            assert!(back.bytes_mut()[..400_000].iter().all(|byte| *byte == peer as u8 + 1));
        }
    });
}

#[test]
fn benchmarks_find_no_wrong_element_and_count_bandwidth_as_nccl_tests_do() {
    in_world(3, |group| {
        for kind in Benchmark::KINDS {
            for (number, memory) in
                [(NumberType::F32, BenchmarkMemory::Shared), (NumberType::Bf16, BenchmarkMemory::Private)]
            {
                let time = std::time::Duration::from_millis(1);
                let timing = Benchmark { kind, number, bytes: 300_001, memory, time }.run(group).unwrap();
                assert_eq!((timing.wrong, timing.bytes % 12), (0, 0), "{kind:?} {number}");
                let factor = match kind {
                    Kind::AllReduce => 4.0 / 3.0,
                    Kind::Broadcast | Kind::Reduce => 1.0,
                    _ => 2.0 / 3.0,
                };
                assert!((timing.bus_gbps / timing.algorithm_gbps - factor).abs() < 1e-9, "{kind:?}");
            }
        }
    });
}

#[test]
fn compute_threads_share_the_work_and_change_no_bit() {
    let case = Case {
        kind: 2,
        number: 0,
        op: ReduceOp::Sum,
        root: 0,
        elements: 1_000_003,
        is_uneven: false,
        shared: 255,
        seed: 7,
    };
    in_world(2, |group| {
        let queue = lockstep_tensor::CpuQueue::new(3, &lockstep_tensor::Arena::new()).unwrap();
        group.set_workers(queue.workers());
        check_number(group, &case);
        check_number(group, &Case { shared: 0, number: 1, ..case.clone() });
        check_number(group, &Case { kind: 5, elements: 1_000_000, ..case.clone() });
    });
}
