//! Tests of operations and faults over MPI, started by `mpirun` (`cargo xtask mpi`). Without it they are a world of one rank.
//!
//! The first argument selects a part; without it, all tests without faults run. A part that must end in an error exits with
//! [`AS_EXPECTED`], because MPI ends by an abort.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

#[path = "../../lockstep-comm/tests/common/cases.rs"]
mod cases;

use std::env;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use cases::{case, check_number};
use lockstep_comm::{Collective, CommError, Deadline, Group, LossCause, ReduceOp, Source, Target};
use lockstep_mpi::{MpiOptions, join_mpi};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

/// Exit code of a part that ended in an error, as it must.
const AS_EXPECTED: i32 = 42;
/// Number of random operations.
const CASES: usize = 120;

/// Returns a deadline long enough for any operation of a test, even on a loaded machine.
fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

fn main() -> ExitCode {
    let part = env::args().nth(1).filter(|part| !part.starts_with('-')).unwrap_or_default();
    // The maximum size of an MPI call: in part `cut`, nearly all data exceeds it and is split.
    let per_call = if part == "cut" { 1000 } else { MpiOptions::default().per_call };
    let group = join_mpi(MpiOptions { per_call, exit_code: |_| AS_EXPECTED }).unwrap();
    let error = match part.as_str() {
        "" | "cut" => {
            operations(&group);
            println!("rank {} of {}: all operations are right", group.rank(), group.size());
            return ExitCode::SUCCESS;
        }
        "mismatch" => mismatch(&group),
        "tables" => tables(&group),
        "late" => late(&group),
        // The other ranks' reports end this rank.
        "left" if group.rank() == 1 => return ExitCode::FAILURE,
        "left" => left(&group),
        "panic" => panicked(&group),
        "moving" => moving(&group),
        other => panic!("no part {other:?}"),
    };
    if error.teller().is_none_or(|rank| rank == group.rank()) {
        println!("rank {} tells: {error}", group.rank());
    }
    group.abort(AS_EXPECTED);
    ExitCode::FAILURE
}

fn operations(group: &Group) {
    let mut runner = TestRunner::deterministic();
    for _ in 0..CASES {
        let case = case().new_tree(&mut runner).unwrap().current();
        check_number(group, &case, group.size() as f64);
    }
    cases::many_small_operations_never_mix(group, 200);
    cases::what_is_started_goes_on(group);
    if group.size() == 4 {
        cases::groups_work_side_by_side(group);
    }
    if group.size() > 1 {
        cases::messages_arrive_whole_and_in_order(group);
    }
    for op in [ReduceOp::Max, ReduceOp::Min] {
        let mut value = [if group.rank() == 0 { f32::NAN } else { 1.0 }];
        group.all_reduce(&mut value[..], op, soon()).unwrap();
        assert!(value[0].is_nan(), "{op:?}");
    }
}

/// Tests that a rank with another size is reported.
fn mismatch(group: &Group) -> CommError {
    let mut data = vec![1.0_f32; if group.rank() == 1 { 9 } else { 10 }];
    let error = group.all_reduce(&mut data[..], ReduceOp::Sum, soon()).unwrap_err();
    let CommError::Mismatch { rank: 1, reference: 0, found, context } = &error else { panic!("{error}") };
    assert_eq!((found.elements, context.call.elements), (9, 10));
    error
}

/// Tests that a rank which expects more than another sends to it is reported.
fn tables(group: &Group) -> CommError {
    let ranks = group.size();
    let mut receives = vec![group.rank() + 1; ranks];
    if group.rank() == 2 {
        receives[1] = 2;
    }
    let input = vec![0_u8; ranks * (ranks + 1) / 2];
    let mut output = vec![0_u8; receives.iter().sum()];
    let (input, output) = (Source::from(&input[..]), Target::from(&mut output[..]));
    let counts = Some(((1..=ranks).collect(), receives));
    let error = group.run(&mut Collective::AllToAll { input, output, counts }, soon()).unwrap_err();
    let CommError::Mismatch { rank: 1, reference: 2, .. } = &error else { panic!("{error}") };
    error
}

/// Tests that a rank which does not come is reported.
fn late(group: &Group) -> CommError {
    if group.rank() == 2 {
        loop {
            sleep(Duration::from_millis(20));
            if let Err(error) = group.progress() {
                return error;
            }
        }
    }
    let limit = if group.rank() == 0 { 300 } else { 20_000 };
    let deadline = Deadline::after(Duration::from_millis(limit));
    let error = group.barrier(deadline).unwrap_err();
    let CommError::TimedOut { rank: 2, waiting: 0, waited_ms: 300, .. } = &error else { panic!("{error}") };
    error
}

/// Tests that a rank which ends while the others wait for it is reported.
fn left(group: &Group) -> CommError {
    let error = group.barrier(soon()).unwrap_err();
    let CommError::PeerLost { rank: 1, cause: LossCause::Left | LossCause::Panicked, .. } = &error else {
        panic!("{error}")
    };
    error
}

/// Tests that a rank which panics while the others wait for it is reported.
fn panicked(group: &Group) -> CommError {
    if group.rank() == 1 {
        std::panic::resume_unwind(Box::new(()));
    }
    left(group)
}

/// Tests a deadline that passes while borrowed data is being transferred.
fn moving(group: &Group) -> CommError {
    let mut data = vec![1_u8; 64 << 20];
    let result = if group.rank() == 0 {
        group.send(&data[..], 1, Deadline::after(Duration::from_millis(200)))
    } else {
        sleep(Duration::from_millis(600));
        group.receive(&mut data[..], 0, soon())
    };
    let error = result.unwrap_err();
    let CommError::TimedOut { rank: 1, waiting: 0, .. } = &error else { panic!("{error}") };
    error
}
