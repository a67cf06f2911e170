//! Bodies of tests of operations, for all transports: random cases, which are compared with a single-process reference, and
//! sequences of operations. Every rank draws the same cases.

use half::{bf16, f16};
use lockstep_comm::{Collective, Group, LentBuffer, Number, ReduceOp, Source, Target};
use lockstep_plan::{DType, MemoryCategory};
use proptest::prelude::*;

use super::soon;

/// Element type with its reference arithmetic.
trait Value: Number + PartialEq {
    fn make(bits: u64) -> Self;
    fn tree(op: ReduceOp, values: &[Self]) -> Self;
    /// Relative error of one addition; 0 for integers.
    const ERROR: f64;
    fn to_f64(self) -> f64;
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
            const ERROR: f64 = 0.0;
            fn to_f64(self) -> f64 {
                self as f64
            }
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
    ($($type:ty, $error:expr, $from:expr, $to:expr);*) => {$(
        impl Value for $type {
            const ERROR: f64 = $error;
            fn to_f64(self) -> f64 {
                f64::from($to(self))
            }
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
float_values!(
    f32, 1e-7, |x| x, |x: f32| x;
    bf16, 1.0 / 256.0, bf16::from_f32, bf16::to_f32;
    f16, 1.0 / 2048.0, f16::from_f32, f16::to_f32
);

/// A random operation.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) kind: u8,
    pub(crate) number: u8,
    pub(crate) op: ReduceOp,
    /// Root, modulo the number of ranks.
    pub(crate) root: usize,
    pub(crate) elements: usize,
    /// True for blocks of different lengths, in operations with blocks.
    pub(crate) is_uneven: bool,
    /// Bit r is set if rank r's buffers are in shared memory.
    pub(crate) shared: u8,
    pub(crate) seed: u64,
}

pub(crate) fn case() -> impl Strategy<Value = Case> {
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

/// Returns the input data of rank `rank`.
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

/// Returns the block lengths of a case.
fn counts(case: &Case, ranks: usize) -> Vec<usize> {
    let share = case.elements / ranks;
    let count = |rank: usize| if case.is_uneven { share * (rank * 3 % 4) / 2 + rank % 2 } else { share };
    (0..ranks).map(count).collect()
}

/// Returns the number of elements that `from` sends to `to` in an uneven all-to-all.
fn sent(case: &Case, from: usize, to: usize, ranks: usize) -> usize {
    let share = case.elements / ranks;
    if case.is_uneven { share * ((from + 2 * to) % 3) / 2 + (from + to) % 2 } else { share }
}

fn block<T: Copy>(data: &[T], counts: &[usize], rank: usize) -> Vec<T> {
    let start: usize = counts[..rank].iter().sum();
    data[start..start + counts[rank]].to_vec()
}

/// Returns the rank's expected output.
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

/// Carries out a case and returns the rank's output.
fn run<T: Value>(group: &Group, case: &Case) -> Vec<T> {
    let (rank, ranks, op) = (group.rank(), group.size(), case.op);
    let (root, counts) = (case.root % ranks, counts(case, ranks));
    let total: usize = counts.iter().sum();
    let given = case.is_uneven.then(|| counts.clone());
    let arena = if case.shared >> (rank % 8) & 1 == 1 {
        group.arena(&[MemoryCategory::Communication])
    } else {
        lockstep_tensor::Arena::new()
    };
    // Offsets buffers by up to two elements: operations may rely on no alignment beyond the type's.
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

/// Carries out a case and checks its result. Sums of floats may differ from the reference by `roundings` roundings of the sum
/// of their magnitudes.
fn check<T: Value>(group: &Group, case: &Case, roundings: f64) {
    let found = run::<T>(group, case);
    let (rank, ranks) = (group.rank(), group.size());
    let expected = expected::<T>(case, rank, ranks);
    assert_eq!(found.len(), expected.len(), "rank {rank} of {ranks}: {case:?}");
    let is_sum = matches!(case.kind, 1..=4) && case.op == ReduceOp::Sum && T::ERROR > 0.0;
    let bytes = |value: &T| bytemuck::bytes_of(value).to_vec();
    let bounds: Vec<f64> = if is_sum && roundings > 0.0 {
        let counts = counts(case, ranks);
        let (first, size) = match case.kind {
            3 | 4 => (counts[..rank].iter().sum(), counts.iter().sum()),
            _ => (0, case.elements),
        };
        let all: Vec<Vec<T>> = (0..ranks).map(|rank| data(case, rank, size)).collect();
        let magnitude = |i: usize| all.iter().map(|data| data[first + i].to_f64().abs()).sum::<f64>();
        // f16 has a smallest step.
        (0..found.len()).map(|i| roundings * (T::ERROR * magnitude(i) + 1e-7)).collect()
    } else {
        vec![0.0; found.len()]
    };
    let is_wrong = |element: &usize| {
        let (found, expected) = (&found[*element], &expected[*element]);
        let distance = (found.to_f64() - expected.to_f64()).abs();
        bytes(found) != bytes(expected) && (bounds[*element] == 0.0 || distance > bounds[*element])
    };
    // Report the first wrong element, if any.
    if let Some(element) = (0..found.len()).find(is_wrong) {
        let (found, expected) = (found[element].to_f64(), expected[element].to_f64());
        panic!("element {element} on rank {rank} of {ranks} is {found:e}, not {expected:e}: {case:?}");
    }
}

/// Carries out a case and checks its result, for the case's element type; see `check`.
pub(crate) fn check_number(group: &Group, case: &Case, roundings: f64) {
    match case.number {
        0 => check::<f32>(group, case, roundings),
        1 => check::<bf16>(group, case, roundings),
        2 => check::<f16>(group, case, roundings),
        3 => check::<i64>(group, case, roundings),
        _ => check::<u8>(group, case, roundings),
    }
}

/// Runs many small operations in a row.
pub(crate) fn many_small_operations_never_mix(group: &Group, rounds: usize) {
    let ranks = group.size();
    for round in 0..rounds {
        let mut sum = [(group.rank() + round) as i64; 3];
        group.all_reduce(&mut sum[..], ReduceOp::Sum, soon()).unwrap();
        assert_eq!(sum, [(ranks * (ranks - 1) / 2 + ranks * round) as i64; 3]);
        let mut word = [if group.rank() == round % ranks { round as i64 } else { -1 }];
        group.broadcast(&mut word[..], round % ranks, soon()).unwrap();
        assert_eq!(word, [round as i64]);
    }
}

/// Runs operations in the background while other ranks are late, and waits for them in any order.
pub(crate) fn what_is_started_goes_on(group: &Group) {
    const BUCKET: usize = 100_000;
    let ranks = group.size();
    for category in [MemoryCategory::Gradients, MemoryCategory::Workspace] {
        let arena = group.arena(&[MemoryCategory::Gradients]);
        let mut buffer = arena.allocate_zeroed(40 * BUCKET * 4, category).unwrap();
        let value = |bucket: usize, rank: usize| (bucket * 10 + rank) as f32;
        let mut pending = Vec::new();
        for bucket in 0..40 {
            let range = bucket * BUCKET..(bucket + 1) * BUCKET;
            let floats = vec![value(bucket, group.rank()); BUCKET];
            buffer.view(DType::F32, range.start * 4, [BUCKET]).copy_from(&floats);
            let lent = LentBuffer::new(buffer.lend(range.start * 4..range.end * 4), DType::F32);
            let started = Collective::AllReduce { data: lent, op: ReduceOp::Sum };
            pending.push(group.start(started, soon()).unwrap());
            if group.rank() == bucket % ranks {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
        // The order of waiting is arbitrary: the last one first.
        for pending in pending.into_iter().rev() {
            drop(pending.wait(soon()).unwrap());
        }
        let sums: Vec<f32> = buffer.view(DType::F32, 0, [40 * BUCKET]).to_vec();
        for (i, sum) in sums.iter().enumerate() {
            let expected = (0..ranks).map(|rank| value(i / BUCKET, rank)).sum::<f32>();
            assert_eq!(*sum, expected, "element {i} on rank {}", group.rank());
        }
    }
}

/// Runs groups of partitions of four ranks, one of which waits while another makes progress.
pub(crate) fn groups_work_side_by_side(group: &Group) {
    let rows = group.partition(&[vec![0, 1], vec![3, 2]], soon()).unwrap().unwrap();
    let columns = group.partition(&[vec![0, 3], vec![1, 2]], soon()).unwrap().unwrap();
    assert_eq!(rows.rank(), [0, 1, 1, 0][group.rank()]);
    let mut sum = [1_i64 << (8 * group.rank())];
    rows.all_reduce(&mut sum[..], ReduceOp::Sum, soon()).unwrap();
    assert_eq!(sum[0], if group.rank() < 2 { 0x101 } else { 0x101_0000 });
    columns.all_reduce(&mut sum[..], ReduceOp::Sum, soon()).unwrap();
    assert_eq!(sum[0], 0x101_0101);
    // Ranks 0 and 1 start the row's operation in the background, and communicate in the column while it is in flight.
    let arena = group.arena(&[MemoryCategory::Gradients]);
    let mut buffer = arena.allocate_zeroed(1 << 20, MemoryCategory::Gradients).unwrap();
    let data = LentBuffer::new(buffer.lend(0..1 << 20), DType::U8);
    let pending = rows.start(Collective::AllReduce { data, op: ReduceOp::Max }, soon()).unwrap();
    columns.barrier(soon()).unwrap();
    group.barrier(soon()).unwrap();
    drop(pending.wait(soon()).unwrap());
    // A rank that is in no group of a partition still takes part in its creation.
    let pair = group.partition(&[vec![2, 0]], soon()).unwrap();
    assert_eq!(pair.map(|pair| pair.rank()), [Some(1), None, Some(0), None][group.rank()]);
}

/// Sends messages between two ranks.
pub(crate) fn messages_arrive_whole_and_in_order(group: &Group) {
    let ranks = group.size();
    let arena = group.arena(&[MemoryCategory::Activations]);
    for category in [MemoryCategory::Activations, MemoryCategory::Workspace] {
        for elements in [0, 5, 8000, 200_000] {
            let mut buffer = arena.allocate_zeroed(elements * 4, category).unwrap();
            let next = (group.rank() + 1) % ranks;
            let last = (group.rank() + ranks - 1) % ranks;
            // A ring would hang if small sends waited for their receives.
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
    // Both directions at once, in the background.
    let mut out = arena.allocate_zeroed(400_000, MemoryCategory::Activations).unwrap();
    let mut back = arena.allocate_zeroed(400_000, MemoryCategory::Workspace).unwrap();
    out.bytes_mut().fill(group.rank() as u8 + 1);
    if group.rank() < 2 {
        let peer = 1 - group.rank();
        let input = LentBuffer::new(out.lend(0..400_000), DType::U8);
        let output = LentBuffer::new(back.lend(0..400_000), DType::U8);
        let received = group.start(Collective::Receive { output, from: peer }, soon()).unwrap();
        let sent = group.start(Collective::Send { input, to: peer }, soon()).unwrap();
        drop((sent.wait(soon()).unwrap(), received.wait(soon()).unwrap()));
        assert!(back.bytes_mut()[..400_000].iter().all(|byte| *byte == peer as u8 + 1));
    }
}
