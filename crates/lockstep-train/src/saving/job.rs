//! One save of a run, attempted in one directory after another.
//!
//! If a directory is full, its checkpoints are pruned before the next attempt, finally down to one. If that does not help, the
//! next directory is tried. The first rank decides, and the other ranks follow.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use lockstep_checkpoint::{CheckpointError, SaveRequest, ShardReport, Staging, run_on_disk};
use lockstep_engine::StateTensor;
use lockstep_observe::metrics::MetricsFile;
use lockstep_observe::progress::MessagePrinter;
use lockstep_plan::ParameterRecord;
use serde_json::Value;

use super::directories::{CheckpointDir, Limits, Watch};
use super::part::{Observer, RankSave, Written};
use crate::Error;
use crate::state::{Counters, SavedState};

/// An attempt to save: a directory and the pruning before it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Attempt {
    /// Index of the directory.
    pub(super) place: usize,
    /// Number of checkpoints to which the directory is pruned first; `None` on the first attempt in a directory.
    keep: Option<usize>,
}

impl Attempt {
    /// Returns the first attempt in a directory.
    pub(super) fn at(place: usize) -> Self {
        Self { place, keep: None }
    }
}

/// A save, with everything that an attempt needs except the tensors.
pub(super) struct Job {
    pub(super) part: RankSave,
    pub(super) places: Arc<[CheckpointDir]>,
    pub(super) observer: Observer,
    pub(super) voice: MessagePrinter,
    pub(super) limits: Limits,
    /// Contents other than tensors; `None` except on the first rank.
    pub(super) contents: Option<Contents>,
    /// True while the save waits for a file system that does not answer.
    pub(super) stalls: AtomicBool,
    /// Reasons why attempts have failed.
    pub(super) failures: Mutex<Vec<String>>,
}

/// Contents of a checkpoint other than its tensors.
pub(super) struct Contents {
    /// Description of the run's configuration.
    pub(super) record: Value,
    /// Description of the plan.
    pub(super) plan: Value,
    /// Level of the kernels; `None` if ranks have different levels.
    pub(super) kernels: Option<String>,
    pub(super) state: SavedState,
    pub(super) parameters: Vec<ParameterRecord>,
    pub(super) metrics: Option<Arc<MetricsFile>>,
}

/// A new checkpoint.
pub(super) struct Saved {
    pub(super) path: PathBuf,
    /// Failures that did not prevent the checkpoint.
    pub(super) warnings: Vec<String>,
}

impl Job {
    /// Runs the whole save as the only rank, with all its attempts.
    pub(super) fn save_alone(&self, tensors: &[StateTensor<'_>]) -> Result<Saved, Error> {
        let mut attempt = Attempt::default();
        loop {
            let saved = self.open(attempt).and_then(|staging| {
                let report = self.write(attempt, tensors)?;
                self.commit(attempt, staging, report.into_iter().collect())
            });
            match saved {
                Err(Error::Checkpoint(error)) => attempt = self.next(attempt, error)?,
                saved => return saved,
            }
        }
    }

    fn place(&self, attempt: Attempt) -> &CheckpointDir {
        &self.places[attempt.place]
    }

    fn watch(&self, attempt: Attempt) -> Watch<'_> {
        Watch {
            inner: &self.observer,
            voice: &self.voice,
            step: self.part.step,
            place: self.place(attempt),
            has_other: attempt.place + 1 < self.places.len(),
            limits: &self.limits,
            stalls: &self.stalls,
            told: Cell::default(),
        }
    }

    /// Opens the staging directory, after the pruning that the attempt asks for.
    pub(super) fn open(&self, attempt: Attempt) -> Result<Staging, Error> {
        let (place, watch) = (self.place(attempt), self.watch(attempt));
        place.check()?;
        if let Some(keep) = attempt.keep {
            for path in place.make_room(keep, &watch)?.deleted {
                self.voice.message(&format!(
                    "removed {} to make room for step {}",
                    path.display(),
                    self.part.step
                ));
            }
        }
        Ok(Staging::begin_observed(&place.path, self.part.step, &watch).map_err(|error| place.note(error))?)
    }

    /// Writes the tensors of `tensors` that belong to this rank's part.
    pub(super) fn write(&self, attempt: Attempt, tensors: &[StateTensor<'_>]) -> Written {
        let (place, watch) = (self.place(attempt), self.watch(attempt));
        place.check()?;
        self.part.write(&place.path, tensors, &watch).map_err(|error| match error {
            Error::Checkpoint(error) => place.note(error).into(),
            error => error,
        })
    }

    /// Commits the checkpoint from the parts and removes checkpoints beyond `checkpoint.keep`.
    pub(super) fn commit(
        &self,
        attempt: Attempt,
        staging: Staging,
        reports: Vec<ShardReport>,
    ) -> Result<Saved, Error> {
        let Some(Contents { record, plan, kernels, state, parameters, metrics }) = &self.contents else {
            unreachable!("the first rank commits");
        };
        let (place, watch) = (self.place(attempt), self.watch(attempt));
        let Counters { step, samples, .. } = state.counters;
        let mut warnings = Vec::new();
        // Rows reach the disk before the checkpoint that counts them; otherwise a resumed run would lack some.
        if let Some(metrics) = metrics.clone() {
            let path = metrics.path().to_owned();
            let synced = run_on_disk(&watch, "syncing", &path, move || Ok(metrics.sync()));
            let failed = synced.map_err(|error| error.to_string()).map(Result::err);
            match failed {
                Ok(None) => {}
                Ok(Some(error)) => warnings.push(error.to_string()),
                Err(error) => warnings.push(error),
            }
        }
        let request = SaveRequest {
            step,
            samples_consumed: samples,
            seed: record["run"]["train"]["seed"].as_u64().unwrap_or_default(),
            kernels: kernels.clone(),
            config: record.clone(),
            plan: plan.clone(),
            state: state.to_json(),
            parameters,
        };
        if state.is_doubtful {
            warnings.push(
                "steps are skipped, or the loss is far above what it was: checkpoints of now replace none of before".to_owned(),
            );
        }
        let left = staging.leftovers().iter();
        warnings.extend(left.map(|error| format!("what an earlier save left stays: {error}")));
        let path = staging.commit_observed(&request, reports, &watch).map_err(|error| place.note(error))?;
        place.has_saved();
        warnings.extend(place.prune(step, &watch));
        Ok(Saved { path, warnings })
    }

    /// Returns the attempt that follows one that failed with `error`, and reports it.
    ///
    /// # Errors
    /// If no attempt is left; the error holds the reason of every failure.
    pub(super) fn next(&self, attempt: Attempt, error: CheckpointError) -> Result<Attempt, Error> {
        let next = self.after(attempt, &error);
        let place = &self.place(attempt).path;
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.retain(|failure| !failure.starts_with(&format!("{}: ", place.display())));
        failures.push(format!("{}: {error}", place.display()));
        match next {
            Some(next) if next.place != attempt.place => {
                let other = &self.place(next).path;
                self.voice.message(&format!(
                    "step {} is not saved in {}: {error}; trying {}",
                    self.part.step,
                    place.display(),
                    other.display()
                ));
                Ok(next)
            }
            Some(next) => Ok(next),
            None if failures.len() == 1 && !matches!(error, CheckpointError::Stalled { .. }) => {
                Err(error.into())
            }
            None => Err(Error::NotSaved { step: self.part.step, reasons: failures.join("\n") }),
        }
    }

    fn after(&self, attempt: Attempt, error: &CheckpointError) -> Option<Attempt> {
        let is_doubtful = self.contents.as_ref().is_some_and(|contents| contents.state.is_doubtful);
        // A doubtful state never replaces an earlier checkpoint.
        if error.is_full()
            && !is_doubtful
            && let Some(keep) = self.place(attempt).keep
            && let Some(fewer) = fewer(keep.get(), attempt.keep)
        {
            return Some(Attempt { keep: Some(fewer), ..attempt });
        }
        let place = attempt.place + 1;
        (place < self.places.len()).then_some(Attempt::at(place))
    }
}

/// Returns the number of checkpoints to which a full directory is pruned next: one fewer than `keep`, then one.
fn fewer(keep: usize, pruned_to: Option<usize>) -> Option<usize> {
    match pruned_to {
        None if keep > 1 => Some(keep - 1),
        Some(pruned_to) if pruned_to > 1 => Some(1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_place_is_pruned_to_one_less_and_then_to_one() {
        for (keep, expected) in [(1, vec![]), (2, vec![1]), (3, vec![2, 1]), (10, vec![9, 1])] {
            let mut found = Vec::new();
            while let Some(next) = fewer(keep, found.last().copied()) {
                found.push(next);
            }
            assert_eq!(found, expected, "checkpoint.keep = {keep}");
        }
    }
}
