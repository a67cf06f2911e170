//! Tests of TCP worlds in which not all ranks are connected from the start, and of groups whose members agree along a tree.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

#[path = "common/cases.rs"]
mod cases;
#[path = "common/tcp.rs"]
mod tcp;

use std::{
    env,
    process::Command,
    sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cases::{Case, case, check_number};
use lockstep_comm::{
    CommError, Deadline, Group, JoinProblem, LossCause, MAX_WORLD, ReduceOp, RendezvousEndpoint, TcpOptions,
    join_by_address,
};
use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::TestRunner,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tcp::{in_tcp_world, in_tcp_world_with, soon};

/// Options of ranks with few neighbours.
const FEW: TcpOptions = TcpOptions {
    streams: 1,
    silence: Duration::from_secs(20),
    encrypt: false,
    neighbours: 1,
    settings: [0; 32],
};
/// Number of ranks of a world whose members agree along a tree.
const MANY: usize = 67;

#[test]
fn ranks_that_are_not_connected_exchange_messages_and_all_operations_give_the_bits_of_the_reference() {
    in_tcp_world_with(FEW, 12, |group| {
        let (rank, ranks) = (group.rank(), group.size());
        // The distance is no power of two. The lower rank sends first, and leaves it at that.
        let peer = (rank + 6) % ranks;
        let mut found = [0_i64; 3];
        if rank < peer {
            group.send(&[rank as i64; 3][..], peer, soon()).unwrap();
        } else {
            group.receive(&mut found[..], peer, soon()).unwrap();
            assert_eq!(found, [peer as i64; 3]);
        }
        for (kind, elements) in (0..10).flat_map(|kind| [(kind, 50), (kind, 30_000)]) {
            let case = Case {
                kind,
                number: kind % 5,
                op: ReduceOp::Sum,
                root: 5,
                elements,
                is_uneven: elements == 50,
                shared: 0,
                seed: 3,
            };
            check_number(group, &case, 0.0);
        }
        let mut runner = TestRunner::deterministic();
        for _ in 0..6 {
            check_number(group, &case().new_tree(&mut runner).unwrap().current(), 0.0);
        }
        cases::what_is_started_goes_on(group);
        cases::messages_arrive_whole_and_in_order(group);
    });
    in_tcp_world(4, cases::groups_work_side_by_side);
}

#[test]
fn a_message_to_a_rank_that_is_not_connected_arrives_though_its_sender_leaves_at_once() {
    in_tcp_world_with(FEW, 12, |group| match group.rank() {
        0 => group.send(&[7_u8; 100][..], 3, soon()).unwrap(),
        11 => group.send(&[9_u8; 100][..], 3, soon()).unwrap(),
        3 => {
            thread::sleep(Duration::from_millis(700));
            for (from, byte) in [(0, 7), (11, 9)] {
                let mut found = [0_u8; 100];
                group.receive(&mut found[..], from, soon()).unwrap();
                assert_eq!(found, [byte; 100]);
            }
        }
        _ => {}
    });
}

#[test]
fn members_of_a_large_group_give_the_bits_of_the_reference() {
    in_tcp_world_with(FEW, MANY, |group| {
        for (kind, number) in (0..10).flat_map(|kind| [(kind, 0), (kind, 1 + kind % 4)]) {
            for (elements, is_uneven) in [(70, false), (67 * 4, true), (0, false)] {
                let case = Case {
                    kind,
                    number,
                    op: ReduceOp::Sum,
                    root: 7,
                    elements,
                    is_uneven,
                    shared: 0,
                    seed: 5,
                };
                check_number(group, &case, 0.0);
            }
        }
        let large = Case {
            kind: 2,
            number: 1,
            op: ReduceOp::Max,
            root: 0,
            elements: 40_000,
            is_uneven: false,
            shared: 0,
            seed: 6,
        };
        check_number(group, &large, 0.0);
        cases::many_small_operations_never_mix(group, 20);
        let halves = [(0..33).collect(), (33..MANY).rev().collect::<Vec<_>>()];
        let half = group.partition(&halves, soon()).unwrap().unwrap();
        let mut sum = [group.rank() as i64];
        half.all_reduce(&mut sum[..], ReduceOp::Sum, soon()).unwrap();
        assert_eq!(sum[0], if group.rank() < 33 { 33 * 16 } else { 34 * 99 / 2 });
    });
}

#[test]
fn hundreds_of_ranks_join_agree_and_exchange_numbers() {
    const RANKS: usize = 260;
    // Both ends of all connections are in this process.
    let limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|most| most < 12_000) {
        #[expect(clippy::print_stderr, reason = "a part that this machine cannot run is said")]
        {
            eprintln!("not tried: too few descriptors here");
        }
        return;
    }
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum.or(Some(12_000)), maximum: limit.maximum })
        .unwrap();
    in_tcp_world_with(FEW, RANKS, |group| {
        let own = group.rank() as i64;
        let mut sum = [own, 1];
        group.all_reduce(&mut sum[..], ReduceOp::Sum, soon()).unwrap();
        assert_eq!(sum, [(RANKS * (RANKS - 1) / 2) as i64, RANKS as i64]);
        let mut all = vec![0_i64; RANKS];
        group.all_gather(&[own * own][..], &mut all[..], soon()).unwrap();
        assert!(all.iter().enumerate().all(|(rank, found)| *found == (rank * rank) as i64));
        let pairs: Vec<Vec<usize>> = (0..RANKS / 2).map(|rank| vec![rank, rank + RANKS / 2]).collect();
        let pair = group.partition(&pairs, soon()).unwrap().unwrap();
        let mut large = vec![own as f32; 20_000];
        pair.all_reduce(&mut large[..], ReduceOp::Max, soon()).unwrap();
        assert!(large.iter().all(|number| *number == (group.rank() % (RANKS / 2) + RANKS / 2) as f32));
        // Ranks leave at once, while consent to the barrier is still being passed on to others.
        group.barrier(soon()).unwrap();
    });
}

/// Returns the errors of all ranks of a large world.
fn errors(work: impl Fn(&Group) -> Result<(), CommError> + Sync) -> Vec<CommError> {
    let (errors, done) = (std::sync::Mutex::new(Vec::new()), Barrier::new(MANY));
    in_tcp_world_with(FEW, MANY, |group| {
        if let Err(error) = work(group) {
            errors.lock().unwrap().push(error);
        }
        done.wait();
    });
    errors.into_inner().unwrap()
}

#[test]
fn the_odd_one_of_a_large_group_is_named_on_every_rank() {
    let found = errors(|group| {
        group.barrier(soon())?;
        let mut data = vec![1.0_f32; if group.rank() == 45 { 11 } else { 10 }];
        group.all_reduce(&mut data[..], ReduceOp::Sum, soon())
    });
    assert_eq!(found.len(), MANY);
    for error in found {
        let CommError::Mismatch { rank: 45, reference: 0, found, context } = error else { panic!("{error}") };
        assert_eq!((found.elements, context.call.elements, context.sequence), (11, 10, 1));
    }
}

#[test]
fn a_member_of_a_large_group_that_does_not_come_is_named_on_every_rank_whoever_gives_up_first() {
    // All at once; the late one's parent; a leaf far from it.
    for first in [None, Some(30), Some(1)] {
        let failed = AtomicUsize::new(0);
        let found = errors(|group| {
            let late = group.rank() == 31;
            while late && failed.load(Ordering::Relaxed) < MANY - 1 {
                thread::sleep(Duration::from_millis(1));
            }
            let gives_up = first.is_none_or(|first| first == group.rank());
            let limit = Duration::from_millis(if gives_up { 2500 } else { 60_000 });
            let result = group.barrier(Deadline::after(limit));
            failed.fetch_add(1, Ordering::Relaxed);
            result
        });
        assert_eq!(found.len(), MANY);
        for error in found {
            let CommError::TimedOut { rank: 31, waiting, .. } = error else { panic!("{first:?}: {error}") };
            assert!(first.is_none_or(|first| first == waiting), "{error}");
        }
    }
}

#[test]
fn a_rank_that_stops_the_run_is_named_by_ranks_that_were_never_connected_to_it() {
    let found = errors(|group| {
        if group.rank() == 40 {
            let stop = group.clone();
            stop.stop();
        }
        // Rank 20 and rank 40 are no neighbours.
        let mut byte = [0_u8];
        if group.rank() == 20 { group.receive(&mut byte[..], 21, soon()) } else { group.barrier(soon()) }
    });
    assert_eq!(found.len(), MANY);
    assert!(found.iter().all(|error| matches!(error, CommError::Stopped { by: Some(40) })), "{found:?}");
}

#[test]
fn a_message_from_a_rank_that_has_left_without_being_connected_is_not_waited_for() {
    in_tcp_world_with(TcpOptions { silence: Duration::from_secs(1), ..FEW }, 12, |group| {
        if group.rank() == 8 {
            thread::sleep(Duration::from_millis(100));
            let begin = Instant::now();
            let error = group.receive(&mut [0_u8; 3][..], 2, soon()).unwrap_err();
            // It does not listen any more, so nothing is tried again.
            assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
            let CommError::PeerLost { rank: 2, cause, .. } = error else { panic!("{error}") };
            // It may have answered with its last breath.
            let causes = [LossCause::Unreachable, LossCause::Left, LossCause::Disconnected];
            assert!(causes.contains(&cause), "{cause}");
        }
    });
}

/// Environment variable of the process whose descriptors run out.
const FEW_DESCRIPTORS: &str = "LOCKSTEP_TEST_FEW_DESCRIPTORS";

/// Runs ranks whose process may open nothing more once they have met; does nothing in the test process.
#[test]
fn ranks_without_descriptors() {
    if env::var_os(FEW_DESCRIPTORS).is_none() {
        return;
    }
    let all_have_met = Barrier::new(12);
    in_tcp_world_with(FEW, 12, |group| {
        if all_have_met.wait().is_leader() {
            setrlimit(
                Resource::Nofile,
                Rlimit { current: Some(3), maximum: getrlimit(Resource::Nofile).maximum },
            )
            .unwrap();
        }
        all_have_met.wait();
        let rank = group.rank();
        let begin = Instant::now();
        // Rank 0 has no connection to rank 3. The others wait for their neighbours.
        let error = match rank {
            0 => group.send(&vec![7_u8; 1 << 20][..], 3, soon()),
            _ => group.receive(&mut [0_u8][..], (rank + 1) % 12, soon()),
        };
        let error = error.unwrap_err();
        match &error {
            CommError::Io { source, .. } if rank == 0 => assert_eq!(source.raw_os_error(), Some(24)),
            CommError::Stopped { by: Some(0) } if rank > 0 => {}
            _ => panic!("rank {rank}: {error}"),
        }
        assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    });
    std::process::exit(42);
}

#[test]
fn a_rank_without_descriptors_for_a_connection_ends_the_run_with_that_cause() {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "ranks_without_descriptors", "--nocapture"]).env(FEW_DESCRIPTORS, "1");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(42), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_world_that_is_too_large_is_refused_with_the_limit() {
    let refused = |ranks| {
        let endpoint = RendezvousEndpoint { host: "127.0.0.1".to_owned(), ..RendezvousEndpoint::default() };
        join_by_address(0, ranks, endpoint, TcpOptions::default(), soon()).unwrap_err()
    };
    for ranks in [0, MAX_WORLD + 1, usize::MAX] {
        let error = refused(ranks);
        let CommError::Join(JoinProblem::OutOfRange { what: "number of ranks", value, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!(value, ranks);
        assert!(error.to_string().ends_with(&format!("number of ranks {ranks} is not allowed: 1 to 65536")));
    }
}
