//! Tests that every rank gets the same error, and soon, whatever one rank does wrong: mismatching operations, and ranks that
//! leave, panic, or never come.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod common;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use common::{Way, in_world_by, soon};
use lockstep_comm::{
    Collective, CommError, Deadline, Group, Kind, LossCause, NumberType, Problem, ReduceOp, Source, Target,
};

/// Runs `work` as each of `ranks` ranks, once per transport. Returns the error of each rank, which must be the same on all
/// transports.
fn told(ranks: usize, work: impl Fn(&Group) -> Result<(), CommError> + Sync) -> Vec<CommError> {
    let [shared, tcp, encrypted] = Way::ALL.map(|way| told_by(way, ranks, &work));
    let text = |errors: &[CommError]| errors.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(text(&tcp), text(&shared), "by TCP, and in shared memory");
    assert_eq!(text(&encrypted), text(&tcp), "by TCP, encrypted and as it is");
    shared
}

/// Returns the errors of [`told`] for one transport.
fn told_by(way: Way, ranks: usize, work: impl Fn(&Group) -> Result<(), CommError> + Sync) -> Vec<CommError> {
    let errors = Mutex::new(Vec::new());
    in_world_by(way, ranks, |group| {
        // A failing rank stays until all have failed: its departure must not be what the others report.
        if let Err(error) = work(group) {
            errors.lock().unwrap().push((group.rank(), error));
            let begin = Instant::now();
            while errors.lock().unwrap().len() < ranks && begin.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    let mut errors = errors.into_inner().unwrap();
    errors.sort_by_key(|(rank, _)| *rank);
    errors.into_iter().map(|(_, error)| error).collect()
}

/// Calls operation `kind` once, with `elements` per rank.
fn call(group: &Group, kind: Kind, elements: usize, deadline: Deadline) -> Result<(), CommError> {
    let ranks = group.size();
    let (block, whole) = (vec![1.0_f32; elements], vec![1.0_f32; elements * ranks]);
    let (mut own, mut all) = (block.clone(), whole.clone());
    let (own, all) = (&mut own[..], &mut all[..]);
    let is_root = group.rank() == 0;
    let op = ReduceOp::Sum;
    let mut collective = match kind {
        Kind::Barrier => Collective::Barrier,
        Kind::Broadcast => Collective::Broadcast { data: own.into(), root: 0 },
        Kind::Reduce => Collective::Reduce { data: own.into(), op, root: 0 },
        Kind::AllReduce => Collective::AllReduce { data: own.into(), op },
        Kind::ReduceScatter => Collective::ReduceScatter {
            input: Source::from(&whole[..]),
            output: own.into(),
            op,
            counts: None,
        },
        Kind::AllGather => {
            Collective::AllGather { input: Source::from(&block[..]), output: Target::from(all), counts: None }
        }
        Kind::AllToAll => {
            Collective::AllToAll { input: Source::from(&whole[..]), output: all.into(), counts: None }
        }
        Kind::Scatter => {
            let input = is_root.then(|| Source::from(&whole[..]));
            Collective::Scatter { input, output: own.into(), root: 0, counts: None }
        }
        Kind::Gather => {
            let output = is_root.then(|| Target::from(all));
            Collective::Gather { input: Source::from(&block[..]), output, root: 0, counts: None }
        }
        Kind::Send | Kind::Receive => {
            let (from, to) = (0, 1);
            return match group.rank() {
                0 => group.send(&block[..], to, deadline),
                1 => group.receive(own, from, deadline),
                _ => group.barrier(deadline),
            };
        }
        Kind::Partition => {
            let groups: Vec<Vec<usize>> = (0..ranks).map(|rank| vec![(rank + elements) % ranks]).collect();
            return group.partition(&groups, deadline).map(|_| ());
        }
    };
    group.run(&mut collective, deadline)
}

/// Numbers of elements for which data goes through small slots, and through chunks.
const SIZES: [usize; 2] = [10, 50_000];

#[test]
fn another_size_on_one_rank_is_named_on_every_rank_for_every_operation() {
    for kind in Kind::ALL.into_iter().filter(|kind| !matches!(kind, Kind::Barrier | Kind::Receive)) {
        for elements in SIZES {
            let errors = told(3, |group| {
                call(group, kind, elements, soon())?;
                call(group, kind, elements + usize::from(group.rank() == 1), soon())?;
                group.barrier(soon())
            });
            assert_eq!(errors.len(), 3, "{kind:?} of {elements}");
            for error in &errors {
                assert_eq!(error.to_string(), errors[0].to_string());
                let CommError::Mismatch { rank, found, reference, context, .. } = error else {
                    panic!("{kind:?} of {elements}: {error}")
                };
                // For a message, the mismatch names the sender as the odd rank.
                let expected = if kind == Kind::Send { (0, 1) } else { (1, 0) };
                assert_eq!((*rank, *reference), expected, "{error}");
                let sequence =
                    if kind == Kind::Send { 1 } else { 1 + u32::from(found.kind == Kind::Barrier) };
                assert_eq!((context.sequence, context.group.size), (sequence, 3), "{error}");
            }
        }
    }
}

#[test]
fn another_type_operation_root_or_reduction_on_one_rank_is_a_mismatch_on_every_rank() {
    type Called = fn(&Group) -> Result<(), CommError>;
    let odd_calls: [Called; 5] = [
        |group| group.all_reduce(&mut [1_i64; 64][..], ReduceOp::Sum, soon()),
        |group| group.all_reduce(&mut [1.0_f32; 64][..], ReduceOp::Max, soon()),
        |group| group.reduce(&mut [1.0_f32; 64][..], ReduceOp::Sum, 0, soon()),
        |group| group.barrier(soon()),
        |group| group.broadcast(&mut [1.0_f32; 64][..], 2, soon()),
    ];
    for odd in odd_calls {
        let errors = told(4, |group| {
            if group.rank() == 3 {
                odd(group)
            } else {
                group.all_reduce(&mut [1.0_f32; 64][..], ReduceOp::Sum, soon())
            }
        });
        assert_eq!(errors.len(), 4);
        for error in errors {
            let CommError::Mismatch { rank: 3, reference: 0, context, .. } = error else { panic!("{error}") };
            assert_eq!(
                (context.call.kind, context.call.number, context.call.elements),
                (Kind::AllReduce, NumberType::F32, 64)
            );
        }
    }
}

#[test]
fn uneven_blocks_that_two_ranks_see_unlike_are_named_on_every_rank() {
    let errors = told(3, |group| {
        let sends = vec![1, 2, 3];
        let mut receives = vec![group.rank() + 1; 3];
        if group.rank() == 2 {
            receives[1] = 2;
        }
        let input = [0_u8; 6];
        let mut output = vec![0_u8; receives.iter().sum()];
        let counts = Some((sends, receives));
        let output = Target::from(&mut output[..]);
        group.run(&mut Collective::AllToAll { input: Source::from(&input[..]), output, counts }, soon())
    });
    assert_eq!(errors.len(), 3);
    for error in errors {
        let CommError::Mismatch { rank: 1, reference: 2, found, context } = error else { panic!("{error}") };
        assert_eq!((found.elements, context.call.elements), (3, 2));
    }
}

#[test]
fn a_call_that_cannot_be_right_ends_the_run_on_every_rank() {
    let errors = told(3, |group| {
        let rank = group.rank();
        group.reduce(&mut [0_u8; 4][..], ReduceOp::Sum, if rank == 2 { 3 } else { 0 }, soon())
    });
    assert_eq!(errors.len(), 3);
    for error in errors {
        let CommError::Misuse { rank: 2, problem: Problem::Rank, context } = error else { panic!("{error}") };
        assert_eq!(context.call.root, Some(3));
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_when_the_time_is_up() {
    for kind in Kind::ALL.into_iter().filter(|kind| !matches!(kind, Kind::Send | Kind::Receive)) {
        for (way, elements) in Way::ALL.into_iter().flat_map(|way| SIZES.map(|elements| (way, elements))) {
            let failed = AtomicU32::new(0);
            let errors = told_by(way, 3, |group| {
                while group.rank() == 2 && failed.load(Ordering::Relaxed) < 2 {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let result = call(group, kind, elements, Deadline::after(Duration::from_millis(150)));
                failed.fetch_add(1, Ordering::Relaxed);
                result
            });
            assert_eq!(errors.len(), 3, "{kind:?}");
            for error in errors {
                let CommError::TimedOut { rank: 2, waited_ms: 150, ref context, .. } = error else {
                    panic!("{kind:?}: {error}")
                };
                assert_eq!((context.call.kind, context.sequence), (kind, 0));
            }
        }
    }
}

#[test]
fn a_message_that_nobody_sends_or_receives_is_late() {
    let late = |group: &Group| match group.rank() {
        0 => group.receive(&mut [0_u8; 3][..], 1, Deadline::after(Duration::from_millis(30))),
        _ => group.barrier(soon()),
    };
    for error in told(2, late) {
        assert!(matches!(error, CommError::TimedOut { rank: 1, waiting: 0, .. }), "{error}");
    }
    let full = |group: &Group| match group.rank() {
        0 => group.send(&vec![0_u8; 1 << 20][..], 1, Deadline::after(Duration::from_millis(30))),
        _ => group.barrier(soon()),
    };
    for error in told(2, full) {
        assert!(matches!(error, CommError::TimedOut { rank: 1, waiting: 0, .. }), "{error}");
    }
}

#[test]
fn a_rank_that_leaves_or_panics_is_known_within_200_ms_in_every_operation() {
    let mut delays = Vec::new();
    for kind in Kind::ALL.into_iter().filter(|kind| !matches!(kind, Kind::Send | Kind::Receive)) {
        let cases = Way::ALL.map(|way| [(way, 10, false), (way, 50_000, true)]);
        for (way, elements, panics) in cases.into_iter().flatten() {
            let gone = Mutex::new(None);
            let late = Mutex::new(Vec::new());
            let world = || {
                in_world_by(way, 3, |group| {
                    if group.rank() != 1 {
                        let error = call(group, kind, elements, soon()).unwrap_err();
                        let since = gone.lock().unwrap().map(|gone: Instant| gone.elapsed());
                        late.lock().unwrap().push((error, since.unwrap_or_default()));
                    } else {
                        std::thread::sleep(Duration::from_millis(20));
                        *gone.lock().unwrap() = Some(Instant::now());
                        if panics {
                            // Like `panic!`, but without printing a message, which takes time.
                            std::panic::resume_unwind(Box::new(()));
                        }
                    }
                });
            };
            assert_eq!(catch_unwind(AssertUnwindSafe(world)).is_err(), panics);
            let lost = if panics { LossCause::Panicked } else { LossCause::Left };
            let late = late.into_inner().unwrap();
            assert_eq!(late.len(), 2);
            for (error, since) in late {
                let CommError::PeerLost { rank: 1, cause, context: Some(context) } = error else {
                    panic!("{kind:?}: {error}")
                };
                assert_eq!((cause, context.call.kind), (lost, kind));
                delays.push(since);
            }
        }
    }
    // Other tests may load the machine, so the maximum has slack; a real regression shows in the median.
    delays.sort_unstable();
    assert!(delays[delays.len() / 2] < Duration::from_millis(200), "{delays:?}");
    assert!(delays[delays.len() - 1] < Duration::from_secs(2), "{delays:?}");
}

#[test]
fn a_stop_by_one_rank_reaches_those_who_wait_and_those_who_come_later() {
    let errors = told(3, |group| match group.rank() {
        0 => {
            std::thread::sleep(Duration::from_millis(20));
            group.stop();
            group.barrier(soon())
        }
        1 => group.barrier(soon()),
        _ => {
            std::thread::sleep(Duration::from_millis(60));
            group.all_reduce(&mut [0_u8; 9][..], ReduceOp::Max, soon())
        }
    });
    assert_eq!(errors.len(), 3);
    assert!(errors.iter().all(|error| matches!(error, CommError::Stopped { by: Some(0) })), "{errors:?}");
}

#[test]
fn the_flight_recorder_shows_who_has_not_come() {
    // Only ranks that share memory see each other's records.
    for (way, others) in [(Way::SharedMemory, 1), (Way::Tcp, 0)] {
        in_world_by(way, 2, |group| {
            group.barrier(soon()).unwrap();
            if group.rank() == 0 {
                let time = Deadline::after(Duration::from_millis(50));
                group.all_reduce(&mut [0.0_f32; 5][..], ReduceOp::Sum, time).unwrap_err();
                let (own, other) = (group.recorded(0), group.recorded(1));
                assert_eq!((own.len(), other.len()), (2, others), "{way:?}");
                assert!(own[0].done_us.is_some() && own[1].met_us.is_none());
                assert!(own[1].caller.contains("faults.rs:"), "{}", own[1]);
            } else {
                std::thread::sleep(Duration::from_millis(200));
            }
        });
    }
}
