//! The loop over the tries of an attack.

use std::collections::BTreeMap;
use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lockstep_plan::random::Draws;

/// Draws a duration below `limit`, in steps of a millisecond.
pub(crate) fn time_below(limit: Duration, choice: &mut Draws) -> Duration {
    Duration::from_millis(choice.below(limit.as_millis() as usize) as u64)
}

fn number(variable: &str) -> Option<u64> {
    env::var(variable).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{variable} is a number")))
}

/// Runs the tries of an attack one after the other: see [`tries_at_a_time`].
pub(crate) fn tries(
    attack: &str,
    default: u64,
    limit: Duration,
    run: impl Fn(u64, &mut Draws) -> String + Sync,
) {
    tries_at_a_time(1, attack, default, limit, run);
}

/// Runs the tries of an attack: `default` of them, or `LOCKSTEP_SEEDS`, from seed `LOCKSTEP_SEED` on, up to `at_a_time` at once. A
/// try returns its outcome in a word or two; their counts are printed at the end.
///
/// # Panics
/// If a try panics, after naming its seed; if the tries take longer than `limit` each.
pub(crate) fn tries_at_a_time(
    at_a_time: u64,
    attack: &str,
    default: u64,
    limit: Duration,
    run: impl Fn(u64, &mut Draws) -> String + Sync,
) {
    let (first, count) = (number("LOCKSTEP_SEED").unwrap_or(0), number("LOCKSTEP_SEEDS").unwrap_or(default));
    let begin = Instant::now();
    let (next, done) = (AtomicU64::new(first), Mutex::new(BTreeMap::<String, u64>::new()));
    let make = |seed: u64| {
        let begin = Instant::now();
        match catch_unwind(AssertUnwindSafe(|| run(seed, &mut Draws::new(seed)))) {
            Ok(what) => *done.lock().unwrap().entry(what).or_default() += 1,
            Err(panic) => {
                // No further try begins.
                next.store(first + count, Ordering::Relaxed);
                eprintln!(
                    "try {seed} of {attack} failed; LOCKSTEP_SEED={seed} LOCKSTEP_SEEDS=1 cargo test -p lockstep --test attack {attack}"
                );
                resume_unwind(panic);
            }
        }
        assert!(begin.elapsed() < limit, "try {seed} of {attack} took {:?}", begin.elapsed());
    };
    std::thread::scope(|scope| {
        for _ in 0..at_a_time.min(count) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        break;
                    }
                    make(seed);
                }
            });
        }
    });
    println!("{attack}: {count} tries in {:.1} s", begin.elapsed().as_secs_f64());
    for (what, times) in done.into_inner().unwrap() {
        println!("  {times:5} {what}");
    }
}
