//! Tests of every operation against a single-process reference, bit for bit: random sizes, types, roots and blocks,
//! from private and from shared memory, on worlds of threads.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

#[path = "common/cases.rs"]
mod cases;
mod common;

use cases::{Case, case, check_number};
use common::{Way, in_world_by, soon};
use lockstep_comm::{
    Collective, Deadline, Group, Kind, LentBuffer, NumberType, ReduceOp,
    benchmark::{Benchmark, BenchmarkMemory},
};
use lockstep_plan::{DType, MemoryCategory};
use proptest::prelude::*;
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// Runs `work` as each of `ranks` ranks, once per transport.
fn in_world(ranks: usize, work: impl Fn(&Group) + Sync) {
    for way in Way::ALL {
        in_world_by(way, ranks, &work);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 40, ..ProptestConfig::default() })]
    #[test]
    fn every_operation_gives_the_bits_of_the_reference_on_every_rank(
        ranks in 1_usize..9, cases in proptest::collection::vec(case(), 1..12)
    ) {
        in_world(ranks, |group| cases.iter().for_each(|case| check_number(group, case, 0.0)));
    }
}

#[test]
fn many_small_operations_in_a_row_never_mix() {
    in_world(4, |group| cases::many_small_operations_never_mix(group, 2000));
}

#[test]
fn what_is_started_goes_on_while_others_are_late_and_comes_back_in_order() {
    in_world(3, cases::what_is_started_goes_on);
}

#[test]
fn groups_of_a_partition_work_side_by_side_and_one_waits_while_another_goes_on() {
    in_world(4, cases::groups_work_side_by_side);
}

#[test]
fn messages_between_two_ranks_arrive_whole_and_in_order() {
    in_world(3, cases::messages_arrive_whole_and_in_order);
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
fn messages_in_shared_memory_are_fetched_while_their_sender_is_busy() {
    const BYTES: usize = 100_000;
    const MESSAGES: u8 = 5;
    const LONG: Duration = Duration::from_secs(20);
    let fetched = AtomicBool::new(false);
    in_world(2, |group| {
        let limit = || Deadline::after(LONG);
        if group.rank() == 1 {
            let mut found = vec![0_u8; BYTES];
            for message in 0..MESSAGES {
                group.receive(&mut found[..], 0, limit()).unwrap();
                assert!(found.iter().all(|byte| *byte == message), "message {message}: {found:?}");
            }
            fetched.store(true, Ordering::SeqCst);
            return;
        }
        fetched.store(false, Ordering::SeqCst);
        let arena = group.arena(&[MemoryCategory::Communication]);
        let mut buffers = Vec::new();
        let send = |message| {
            let mut buffer = arena.allocate_zeroed(BYTES, MemoryCategory::Communication).unwrap();
            buffer.bytes_mut().fill(message);
            let input = LentBuffer::new(buffer.lend(0..BYTES), DType::U8);
            buffers.push(buffer);
            group.start(Collective::Send { input, to: 1 }, limit()).unwrap()
        };
        let sent: Vec<_> = (0..MESSAGES).map(send).collect();
        group.progress().unwrap();
        // Wait without calling the group until all messages are received.
        let begin = Instant::now();
        while !fetched.load(Ordering::SeqCst) {
            assert!(begin.elapsed() < LONG, "not all messages left by themselves");
            std::thread::sleep(Duration::from_millis(1));
        }
        for pending in sent {
            pending.wait(limit()).unwrap();
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
        let queue = lockstep_tensor::Arena::new().queue(3).unwrap();
        group.set_workers(queue.workers());
        check_number(group, &case, 0.0);
        check_number(group, &Case { shared: 0, number: 1, ..case.clone() }, 0.0);
        check_number(group, &Case { kind: 5, elements: 1_000_000, ..case.clone() }, 0.0);
    });
}
