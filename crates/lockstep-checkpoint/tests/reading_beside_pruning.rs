//! Tests of a reader concurrent with a run that saves and prunes. It reads a complete checkpoint, or gets an error that
//! names a newer one.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod common;

use std::{
    num::NonZeroUsize,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::State;
use lockstep_checkpoint::{Checkpoint, CheckpointError, CheckpointQuality, list, prune, save};

/// Returns the number of reads, from `LOCKSTEP_SEEDS`.
fn tries() -> u64 {
    std::env::var("LOCKSTEP_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(300)
}

/// Guard that ends the writer, even if the reader panics.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_reader_sees_a_whole_checkpoint_or_is_told_which_one_to_take() {
    let work = tempfile::tempdir().unwrap();
    let dir = work.path();
    let ends = AtomicBool::new(false);
    let (mut whole, mut gone) = (0, 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            for step in 1.. {
                let state = State::at(step);
                save(dir, &state.request(), &state.slices()).unwrap();
                prune(dir, NonZeroUsize::new(2).unwrap(), &[], |_| CheckpointQuality::default()).unwrap();
                if ends.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let _ends = Ends(&ends);
        let begin = Instant::now();
        while list(dir).unwrap().len() < 2 {
            assert!(begin.elapsed() < Duration::from_secs(60), "nothing is saved");
        }
        for seed in 0..tries() {
            assert!(begin.elapsed() < Duration::from_secs(60), "try {seed} after {:?}", begin.elapsed());
            let Some(listed) = list(dir).unwrap().into_iter().next() else { continue };
            // Delays from zero to about the duration of a save.
            thread::sleep(Duration::from_micros(seed * 7_919 % 4_000));
            let read = Checkpoint::open(&listed.path).and_then(|checkpoint| {
                checkpoint.verify()?;
                // A verified checkpoint stays readable even if it is renamed or removed.
                thread::sleep(Duration::from_micros(seed * 104_729 % 6_000));
                State::at(listed.step).assert_equals(&checkpoint);
                Ok(())
            });
            match read {
                Ok(()) => whole += 1,
                Err(
                    error @ (CheckpointError::NoSuchCheckpoint { .. }
                    | CheckpointError::Removed { newest: Some(_), .. }),
                ) => {
                    assert!(
                        !error.is_corrupt() && error.to_string().contains("/step-"),
                        "try {seed}: {error}"
                    );
                    gone += 1;
                }
                Err(error) => panic!("try {seed}, step {}: {error}", listed.step),
            }
        }
    });
    println!("{whole} read whole, {gone} gone");
    assert!(tries() < 200 || whole > 0 && gone > 0, "{whole} read whole, {gone} gone: both must happen");
}
