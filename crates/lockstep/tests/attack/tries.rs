//! The loop over the tries of an attack.

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use lockstep_plan::random::Draws;

/// Draws a duration below `limit`, in steps of a millisecond.
pub(crate) fn time_below(limit: Duration, choice: &mut Draws) -> Duration {
    Duration::from_millis(choice.below(limit.as_millis() as usize) as u64)
}

fn number(variable: &str) -> Option<u64> {
    env::var(variable).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{variable} is a number")))
}

/// Runs the tries of an attack: `default` of them, or `LOCKSTEP_SEEDS`, from seed `LOCKSTEP_SEED` on. A try returns its outcome
/// in a word or two; their counts are printed at the end.
///
/// # Panics
/// If a try panics, after naming its seed; if the tries take longer than `limit` each.
pub(crate) fn tries(attack: &str, default: u64, limit: Duration, run: impl Fn(u64, &mut Draws) -> String) {
    let (first, count) = (number("LOCKSTEP_SEED").unwrap_or(0), number("LOCKSTEP_SEEDS").unwrap_or(default));
    let begin = Instant::now();
    let mut done = std::collections::BTreeMap::<String, u64>::new();
    for seed in first..first + count {
        let begin = Instant::now();
        let tried = catch_unwind(AssertUnwindSafe(|| run(seed, &mut Draws::new(seed))));
        match tried {
            Ok(what) => *done.entry(what).or_default() += 1,
            Err(panic) => {
                eprintln!(
                    "try {seed} of {attack} failed; LOCKSTEP_SEED={seed} LOCKSTEP_SEEDS=1 cargo test -p lockstep --test attack {attack}"
                );
                resume_unwind(panic);
            }
        }
        assert!(begin.elapsed() < limit, "try {seed} of {attack} took {:?}", begin.elapsed());
    }
    println!("{attack}: {count} tries in {:.1} s", begin.elapsed().as_secs_f64());
    for (what, times) in done {
        println!("  {times:5} {what}");
    }
}
