//! Signals set the flag, and a second Ctrl-C ends the process. Both need a process of their own.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::time::Duration;
use std::{env, thread};

use lockstep_launch::interrupt::{Interrupt, SECOND_INTERRUPT_EXIT_CODE};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::raise;

const SIGNALS: &str = "LOCKSTEP_TEST_SIGNALS";
const PAUSE: &str = "LOCKSTEP_TEST_PAUSE";

/// Runs this test binary again, with only the test `child`, which raises `signals` in sequence.
fn process_that_gets(signals: &[i32]) -> ExitStatus {
    run(signals, &[])
}

/// Runs it as [`process_that_gets`] does, with more than a second between two signals.
fn process_that_gets_slowly(signals: &[i32]) -> ExitStatus {
    run(signals, &[(PAUSE, "yes")])
}

fn run(signals: &[i32], more: &[(&str, &str)]) -> ExitStatus {
    let list: Vec<String> = signals.iter().map(ToString::to_string).collect();
    let this_binary = env::current_exe().expect("a running test has a path");
    Command::new(this_binary)
        .args(["--exact", "child", "--test-threads=1", "--quiet"])
        .env(SIGNALS, list.join(" "))
        .envs(more.iter().copied())
        .output()
        .expect("a test binary can start itself")
        .status
}

/// Does nothing unless [`process_that_gets`] started it.
#[test]
fn child() {
    let Ok(signals) = env::var(SIGNALS) else { return };
    let interrupt = Interrupt::on_signals().unwrap();
    assert!(!interrupt.is_requested());
    for (number, signal) in signals.split(' ').enumerate() {
        if number > 0 && env::var_os(PAUSE).is_some() {
            thread::sleep(Duration::from_millis(1500));
        }
        raise(signal.parse().unwrap()).unwrap();
        assert!(interrupt.clone().is_requested());
    }
    if env::var_os(PAUSE).is_some() {
        // The thread that ends the process may be late on a busy machine.
        thread::sleep(Duration::from_secs(5));
    }
}

#[test]
fn one_signal_asks_and_the_process_goes_on() {
    for signal in [SIGINT, SIGTERM] {
        let status = process_that_gets(&[signal]);
        assert_eq!((status.code(), status.signal()), (Some(0), None), "signal {signal}");
    }
    assert_eq!(process_that_gets(&[SIGTERM, SIGTERM]).code(), Some(0), "schedulers repeat themselves");
}

#[test]
fn a_second_ctrl_c_ends_the_process_at_once() {
    for signals in [[SIGINT, SIGINT], [SIGTERM, SIGINT]] {
        let status = process_that_gets_slowly(&signals);
        assert_eq!(status.code(), Some(SECOND_INTERRUPT_EXIT_CODE), "{signals:?}");
    }
}

#[test]
fn signals_of_one_cause_are_one() {
    for signals in [[SIGINT, SIGINT], [SIGTERM, SIGINT], [SIGINT, SIGTERM]] {
        assert_eq!(process_that_gets(&signals).code(), Some(0), "{signals:?}: a terminal and a launcher");
    }
}

#[test]
fn a_request_from_within_is_seen_by_all_clones() {
    let interrupt = Interrupt::default();
    let clone = interrupt.clone();
    interrupt.request();
    assert!(clone.is_requested());
}
