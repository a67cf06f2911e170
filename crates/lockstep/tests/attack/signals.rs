//! Signals and kills at random instants, then damage to checkpoints on disk: the run resumes with the bits of an undisturbed one,
//! and no checkpoint is lost.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use lockstep_plan::random::Draws;
use rustix::process::Signal;

use crate::plans::{CROWDS, PLANS, Plan, Run, STEPS, undisturbed};
use crate::process::{children, is_alive, send};
use crate::tries::{time_below, tries};
use crate::workshop::Started;

/// Time limit on the end of a run after a fault.
const END_LIMIT: Duration = Duration::from_secs(30);
/// Time limit on the life of ranks after their launcher was killed.
const ORPHAN_LIMIT: Duration = Duration::from_secs(2);
/// Signals closer than this count as one.
const SAME_CAUSE: Duration = Duration::from_secs(1);

/// Times from the death of a rank to the end of its run, over all tries.
static AFTER_DEATHS: Mutex<Vec<Duration>> = Mutex::new(Vec::new());

/// A fault of a run.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// A signal that ends a rank at once.
    KillRank(Signal),
    KillLauncher,
    /// A stop request to the launcher.
    AskLauncher(Signal),
    /// A stop request to one of the ranks only.
    AskRank(Signal),
    /// Ctrl-C twice within `SAME_CAUSE`.
    AskTwice,
    /// Ctrl-C, and again after `SAME_CAUSE`.
    Insist,
    /// SIGSTOP to a rank or the launcher, and SIGCONT after a while.
    StopRank,
    StopLauncher,
}

const FAULTS: [Fault; 14] = [
    Fault::KillRank(Signal::KILL),
    Fault::KillRank(Signal::KILL),
    Fault::KillRank(Signal::SEGV),
    Fault::KillRank(Signal::ABORT),
    Fault::KillLauncher,
    Fault::AskLauncher(Signal::INT),
    Fault::AskLauncher(Signal::TERM),
    Fault::AskLauncher(Signal::HUP),
    Fault::AskLauncher(Signal::USR1),
    Fault::AskRank(Signal::TERM),
    Fault::AskTwice,
    Fault::Insist,
    Fault::StopRank,
    Fault::StopLauncher,
];

impl Fault {
    /// Returns the exit codes that the README documents for the fault; the run may also have ended before it.
    fn codes(self, is_alone: bool) -> &'static [i32] {
        match self {
            Self::KillRank(_) if is_alone => &[],
            Self::KillRank(_) => &[5],
            Self::KillLauncher => &[],
            Self::AskLauncher(_) | Self::AskRank(_) | Self::AskTwice => &[75],
            Self::Insist => &[75, 130],
            Self::StopRank | Self::StopLauncher => &[],
        }
    }

    /// Returns the signal by which the launcher itself may be ended.
    fn signal(self, is_alone: bool) -> Option<Signal> {
        match self {
            Self::KillRank(signal) if is_alone => Some(signal),
            Self::KillLauncher => Some(Signal::KILL),
            // Before the handlers are installed.
            Self::AskLauncher(signal) | Self::AskRank(signal) => Some(signal),
            Self::AskTwice | Self::Insist => Some(Signal::INT),
            _ => None,
        }
    }

    fn inflict(self, run: &Started, choice: &mut Draws) {
        let launcher = run.child.id();
        let ranks = children(launcher);
        let rank = if ranks.is_empty() { launcher } else { choice.of(&ranks) };
        match self {
            Self::KillRank(signal) | Self::AskRank(signal) => drop(send(rank, signal)),
            Self::KillLauncher => drop(send(launcher, Signal::KILL)),
            Self::AskLauncher(signal) => drop(send(launcher, signal)),
            Self::AskTwice => {
                send(launcher, Signal::INT);
                sleep(time_below(SAME_CAUSE / 2, choice));
                send(launcher, Signal::INT);
            }
            Self::Insist => {
                send(launcher, Signal::INT);
                sleep(SAME_CAUSE + time_below(SAME_CAUSE, choice));
                send(launcher, Signal::INT);
            }
            Self::StopRank | Self::StopLauncher => {
                let stopped = if matches!(self, Self::StopRank) { rank } else { launcher };
                send(stopped, Signal::STOP);
                sleep(time_below(Duration::from_millis(800), choice));
                send(stopped, Signal::CONT);
            }
        }
    }
}

/// Waits for the end of a run after a fault.
fn wait(run: &mut Started) -> ExitStatus {
    let begin = Instant::now();
    loop {
        if let Some(status) = run.child.try_wait().unwrap() {
            return status;
        }
        if begin.elapsed() > END_LIMIT {
            run.child.kill().unwrap();
            panic!("not ended within {END_LIMIT:?}: {}", run.stderr());
        }
        sleep(Duration::from_millis(2));
    }
}

/// Runs once with a random fault; returns the fault as text.
fn disturb(run: &Run, seconds: f64, choice: &mut Draws) -> String {
    let before = run.saved();
    let fault = choice.of(&FAULTS);
    let at = time_below(Duration::from_secs_f64(seconds * 1.1), choice);
    let mut started = run.start();
    sleep(at);
    let ranks = children(started.child.id());
    let begin = Instant::now();
    fault.inflict(&started, choice);
    let status = wait(&mut started);
    if matches!(fault, Fault::KillRank(_)) && status.code() == Some(5) {
        AFTER_DEATHS.lock().unwrap_or_else(PoisonError::into_inner).push(begin.elapsed());
    }
    let said = started.stderr();
    let context = format!("{fault:?} after {at:?} under {:?}: {status}: {said}", run.plan.name);
    // A single rank is its own launcher, and early on the launcher has no ranks yet.
    let is_alone = ranks.is_empty();
    match (status.code(), status.signal()) {
        (Some(code), _) => {
            assert!(code == 0 || fault.codes(is_alone).contains(&code), "an exit code: {context}");
        }
        (None, signal) => {
            let expected = fault.signal(is_alone).map(Signal::as_raw);
            assert!(signal == expected && expected.is_some(), "a signal: {context}");
        }
    }
    assert!(!said.contains("panicked"), "a panic: {context}");
    let begin = Instant::now();
    while ranks.iter().any(|pid| is_alive(*pid)) {
        assert!(begin.elapsed() < ORPHAN_LIMIT, "ranks live on without their launcher: {context}");
        sleep(Duration::from_millis(5));
    }
    let after = run.saved();
    assert!(before.iter().all(|step| after.contains(step)), "{before:?} became {after:?}: {context}");
    let told = said.lines().filter_map(|line| line.strip_prefix("saved ")?.rsplit_once("step-"));
    for (_, step) in told {
        let step: u64 = step.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap();
        assert!(after.contains(&step), "step {step} was saved, and only {after:?} are there: {context}");
    }
    format!("{fault:?}")
}

/// Flips a bit of the newest checkpoint; returns its step.
fn damage(run: &Run, choice: &mut Draws) -> Option<u64> {
    // An intact checkpoint must remain.
    let saved = run.saved();
    let newest = *saved.last().filter(|_| saved.len() > 1)?;
    let dir = run.workshop.path(&format!("checkpoints/step-{newest:08}"));
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let file = &files[choice.below(files.len())];
    let mut bytes = fs::read(file).unwrap();
    let at = choice.below(bytes.len());
    *bytes.get_mut(at)? ^= 1 << choice.below(8);
    fs::write(file, bytes).unwrap();
    Some(newest)
}

/// Runs with one or several faults, perhaps with damage between them, and then to the end; compares the results.
fn attack(plan: Plan, choice: &mut Draws) -> String {
    let (expected, seconds) = &*undisturbed(plan);
    let run = Run::new(plan);
    let mut faults = vec![disturb(&run, *seconds, choice)];
    while choice.below(3) == 0 {
        faults.push(disturb(&run, *seconds, choice));
    }
    if choice.below(5) == 0
        && let Some(step) = damage(&run, choice)
    {
        faults.push(format!("a flipped bit in step {step}"));
    }
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(0), "a refusal under {:?} after {faults:?}: {outcome:?}", plan.name);
    assert_eq!(run.saved().last(), Some(&STEPS), "{faults:?}: {outcome:?}");
    let end = run.end();
    assert_eq!(end.losses, expected.losses, "rows under {:?} after {faults:?}: {outcome:?}", plan.name);
    for (step, files) in end.files {
        // An interrupted run saves at the step of the interruption.
        if let Some(expected) = expected.files.get(&step) {
            assert_eq!(files, *expected, "step {step} under {:?} after {faults:?}: {outcome:?}", plan.name);
        }
    }
    faults.swap_remove(0)
}

/// Prints the times that runs took to end after the death of a rank.
fn print_deaths() {
    let mut times = std::mem::take(&mut *AFTER_DEATHS.lock().unwrap_or_else(PoisonError::into_inner));
    times.sort_unstable();
    if let (Some(most), middle) = (times.last(), times.len() / 2) {
        println!(
            "  {} deaths: the run ended after {:?} (median), {most:?} (most)",
            times.len(),
            times[middle]
        );
    }
}

#[test]
fn mixed_signals() {
    tries("mixed_signals", 30, Duration::from_secs(90), |seed, choice| {
        attack(PLANS[seed as usize % PLANS.len()], choice)
    });
    print_deaths();
}

#[test]
fn crowds() {
    tries("crowds", 3, Duration::from_secs(150), |seed, choice| {
        attack(CROWDS[seed as usize % CROWDS.len()], choice)
    });
    print_deaths();
}
