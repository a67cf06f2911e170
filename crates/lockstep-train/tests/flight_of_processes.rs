//! Ranks as processes, one of which makes a mistake: the flight records that outlive them name the culprit.
//!
//! The launcher starts this test program again, with [`a_rank`] as the only test.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::env;
use std::time::{Duration, Instant};

use lockstep_comm::{CommError, Deadline, Group, NodePlacement, ReduceOp, WorldOptions};
use lockstep_launch::{
    Agent, Elastic, Failure, JoinOptions, Launch, Output, Pinning, RunOutcome, join_from_environment,
};
use lockstep_observe::flight::{Analysis, Dump, Ending, Finding, analyse};
use rustix::process::{Pid, Signal, kill_process};

/// Environment variable with the fault of rank 1.
const FAULT: &str = "LOCKSTEP_TEST_FAULT";
const RANKS: usize = 3;
/// Number of the operation at which the fault occurs, after those of joining.
const AT: usize = 20;

/// The program of each rank; does nothing in the launching process.
#[test]
fn a_rank() {
    let Some(fault) = env::var_os(FAULT) else { return };
    let group = join_from_environment(JoinOptions::default(), Deadline::after(Duration::from_secs(30)))
        .unwrap()
        .unwrap();
    let result = work(&group, fault.to_str().unwrap());
    std::process::exit(if result.is_ok() { 0 } else { 1 });
}

fn work(group: &Group, fault: &str) -> Result<(), CommError> {
    let mut data = vec![0.0_f32; 4096];
    for round in 0..1_000_000 {
        let is_wrong = group.rank() == 1 && round == AT;
        let limit = Deadline::after(Duration::from_millis(if fault == "idle" { 400 } else { 20_000 }));
        match fault {
            "skip" if is_wrong => continue,
            "size" if is_wrong => group.all_reduce(&mut data[..4000], ReduceOp::Sum, limit)?,
            "idle" if is_wrong => std::thread::sleep(Duration::from_millis(900)),
            _ if round % 2 == 1 => group.barrier(limit)?,
            _ => group.all_reduce(&mut data[..], ReduceOp::Sum, limit)?,
        }
    }
    Ok(())
}

fn start(fault: &str, silence: Duration) -> Agent {
    let launch = Launch {
        program: env::current_exe().unwrap(),
        arguments: ["--exact", "a_rank", "--nocapture"].map(Into::into).to_vec(),
        environment: vec![(FAULT.into(), fault.into())],
        ranks: RANKS,
        placement: NodePlacement::alone(RANKS),
        options: WorldOptions { arena_bytes: 1 << 24, silence, ..WorldOptions::default() },
        pinning: Pinning::Free,
        output: Output::Labelled,
        elastic: Elastic::default(),
        success_codes: vec![0],
    };
    launch.start().unwrap()
}

/// Waits for the failure; returns it and the analysis of its flight record, written and read as a file.
fn end(agent: &mut Agent) -> (Failure, Analysis) {
    let begin = Instant::now();
    let failure = loop {
        match agent.watch(Duration::from_millis(100)).unwrap() {
            Some(RunOutcome::Failed(failure)) => break failure,
            Some(RunOutcome::Succeeded(_)) => panic!("the run ended well"),
            None => assert!(begin.elapsed() < Duration::from_secs(60), "the run does not end"),
        }
    };
    let ending = Ending::by(&failure.error);
    let dump = Dump::new(RANKS, Some(ending), (0..RANKS).map(|rank| (rank, agent.world().recorded(rank))));
    let dir = tempfile::tempdir().unwrap();
    let analysis = analyse(&[Dump::read(&dump.write(dir.path()).unwrap()).unwrap()]);
    (failure, analysis)
}

fn signal(agent: &mut Agent, signal: Signal) {
    let begin = Instant::now();
    while agent.world().recorded(1).last().is_none_or(|last| (last.number as usize) < AT) {
        assert!(begin.elapsed() < Duration::from_secs(60), "rank 1 does nothing");
        assert!(agent.watch(Duration::from_millis(1)).unwrap().is_none(), "the run ended");
    }
    kill_process(Pid::from_raw(agent.pids()[1] as i32).unwrap(), signal).unwrap();
}

const SILENCE: Duration = Duration::from_secs(10);

#[test]
fn a_rank_that_skips_an_operation_or_calls_it_with_another_size_is_named_with_its_line() {
    for (fault, differs) in [("skip", "operation"), ("size", "elements")] {
        let (_, analysis) = end(&mut start(fault, SILENCE));
        assert_eq!(analysis.culprits, [1], "{analysis}");
        let Finding::Mismatch { place, differs: found, calls } = &analysis.finding else {
            panic!("{analysis}")
        };
        // The first operation is the barrier of joining.
        assert_eq!((place.sequence as usize, found[0]), (AT + 1, differs), "{analysis}");
        assert_eq!(calls.iter().map(|call| call.ranks.clone()).collect::<Vec<_>>(), [vec![0, 2], vec![1]]);
        let is_here = |caller: &String| caller.contains("flight_of_processes.rs:");
        assert!(
            calls.iter().all(|call| call.callers.len() == 1 && call.callers.iter().all(is_here)),
            "{analysis}"
        );
    }
}

#[test]
fn a_rank_that_does_not_come_in_time_is_named_with_what_it_did_last() {
    let (failure, analysis) = end(&mut start("idle", SILENCE));
    assert!(matches!(failure.error, CommError::TimedOut { rank: 1, .. }), "{failure}");
    assert_eq!(analysis.culprits, [1], "{analysis}");
    let Finding::Missing { place, missing, .. } = &analysis.finding else { panic!("{analysis}") };
    assert_eq!(place.sequence as usize, AT + 1, "{analysis}");
    let last = missing[0].operation.as_ref().unwrap();
    assert!(last.is_done && last.sequence as usize == AT && last.seconds_ago > 0.3, "{analysis}");
}

#[test]
fn a_rank_that_is_killed_or_stopped_is_named() {
    for (way, silence) in [(Signal::KILL, SILENCE), (Signal::STOP, Duration::from_millis(600))] {
        let mut agent = start("none", silence);
        signal(&mut agent, way);
        let (failure, analysis) = end(&mut agent);
        assert!(matches!(failure.error, CommError::PeerLost { rank: 1, .. }), "{failure}");
        assert_eq!(analysis.culprits, [1], "{analysis}");
        assert!(analysis.lost.is_some_and(|lost| lost.rank == 1 && lost.operation.is_some()));
    }
}
