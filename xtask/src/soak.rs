//! `cargo xtask soak`: randomized tests with as many tries as take hours, and mutation testing.
//!
//! Every part is also a test of `cargo test --workspace`, there with fewer tries. A failure names its seed and the command that
//! reproduces it.

use std::time::Duration;

use crate::mutants;
use crate::step::run_within;

/// A part of the soak.
struct Part {
    name: &'static str,
    command: &'static str,
    /// Variable that raises the number of tries, if there is one.
    more: Option<(&'static str, &'static str)>,
}

const fn part(name: &'static str, command: &'static str, more: (&'static str, &'static str)) -> Part {
    Part { name, command, more: Some(more) }
}

const fn as_it_is(name: &'static str, command: &'static str) -> Part {
    Part { name, command, more: None }
}

const PARTS: &[Part] = &[
    part(
        "signals",
        "cargo test -p lockstep --test attack mixed_signals -- --nocapture",
        ("LOCKSTEP_SEEDS", "1000"),
    ),
    part("crowds", "cargo test -p lockstep --test attack crowds -- --nocapture", ("LOCKSTEP_SEEDS", "60")),
    part(
        "memory",
        "cargo test -p lockstep --test attack out_of_memory -- --nocapture",
        ("LOCKSTEP_SEEDS", "100"),
    ),
    part(
        "network",
        "cargo test -p lockstep --test attack bad_network -- --nocapture",
        ("LOCKSTEP_SEEDS", "60"),
    ),
    part(
        "restarts",
        "cargo test -p lockstep --test command_line restarts -- --nocapture",
        ("LOCKSTEP_SEEDS", "10"),
    ),
    as_it_is("strangers", "cargo test -p lockstep-comm --test strangers -- --nocapture"),
    part("frames", "cargo test -p lockstep-comm --lib rogue -- --nocapture", ("LOCKSTEP_SEEDS", "1000")),
    part(
        "power",
        "cargo test -p lockstep-checkpoint --test power_loss -- --nocapture",
        ("LOCKSTEP_SEEDS", "200"),
    ),
    part(
        "pruning",
        "cargo test -p lockstep-checkpoint --test reading_beside_pruning -- --nocapture",
        ("LOCKSTEP_SEEDS", "20000"),
    ),
    part(
        "exports",
        "cargo test -p lockstep --test command_line bad_checkpoints -- --nocapture",
        ("LOCKSTEP_SEEDS", "500"),
    ),
    as_it_is("disks", "cargo test -p lockstep --test command_line disks -- --nocapture"),
    part(
        "deaths",
        "cargo test -p lockstep-launch --test processes a_rank_that_dies -- --nocapture",
        ("LOCKSTEP_SEEDS", "1000"),
    ),
    part("plans", "cargo test -p lockstep-testkit --test parity random_plans", ("LOCKSTEP_PLANS", "2000")),
    part("late", "cargo test -p lockstep-testkit --test parity", ("LOCKSTEP_DEVICE", "delayed")),
    part(
        "search",
        "cargo test -p lockstep-planner --test planner looking_at_everything -- --nocapture",
        ("LOCKSTEP_GRID", "all"),
    ),
    part(
        "questions",
        "cargo test -p lockstep-planner --test planner usual_questions -- --nocapture",
        ("LOCKSTEP_QUESTIONS", "all"),
    ),
    as_it_is("golden", "cargo xtask golden"),
    part("book", "cargo test -p lockstep --test command_line book", ("LOCKSTEP_BOOK", "all")),
];

/// The part that is not a test.
const MUTANTS: &str = "mutants";
/// Time limit on a part; only a hang exceeds it.
const LIMIT: Duration = Duration::from_secs(4 * 3600);

/// Runs the parts in `names`, or all; a failed part does not stop the others.
pub(crate) fn soak(names: &[String]) -> Result<(), String> {
    let known = || PARTS.iter().map(|part| part.name).chain([MUTANTS]);
    if let Some(name) = names.iter().find(|name| !known().any(|known| known == *name)) {
        return Err(format!("no part {name:?}: {}", known().collect::<Vec<_>>().join(", ")));
    }
    let is_asked = |name: &str| names.is_empty() || names.iter().any(|asked| asked == name);
    let mut failed = Vec::new();
    for Part { name, command, more } in PARTS.iter().filter(|part| is_asked(part.name)) {
        // A variable of the caller overrides it: LOCKSTEP_SEED=17 LOCKSTEP_SEEDS=1 cargo xtask soak signals.
        let more: Vec<_> =
            more.iter().copied().filter(|(name, _)| std::env::var_os(name).is_none()).collect();
        failed.extend(run_within(LIMIT, command, &more).err().map(|error| format!("{name}: {error}")));
    }
    if is_asked(MUTANTS) {
        failed.extend(mutants::sample().err());
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n")) }
}
