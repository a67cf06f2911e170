//! A save beside the training, in stages that all ranks pass together between their steps.
//!
//! The only rank does all of a save in one stage. Of several, the first opens a directory, each writes its part, and the first makes
//! a checkpoint of the parts; whatever fails begins again at the first stage, in the place that comes next.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use lockstep_checkpoint::{PendingSave, Staging};
use lockstep_engine::{Patience, Snapshot};
use lockstep_observe::progress::Progress;

use super::job::{Attempt, Job, Saved};
use super::part::{Written, gather};
use super::{Decision, Memory, OPENING, Ran, Saver};
use crate::Error;

/// A save under way.
pub(super) struct Save {
    job: Arc<Job>,
    attempt: Attempt,
    pub(super) begin: Instant,
    stage: Stage,
}

/// Work of the first rank; `None` on the others.
type OfFirst<T> = Option<PendingSave<Result<T, Error>>>;

/// The stage of a save.
#[expect(clippy::large_enum_variant, reason = "there is one save at a time")]
enum Stage {
    /// The only rank does everything.
    Alone(PendingSave<Done<Result<Saved, Error>>>),
    /// The first rank opens a directory for the parts.
    Opening(OfFirst<Staging>),
    /// Each rank writes its part.
    Writing(Own, Option<Staging>),
    /// The first rank makes a checkpoint of the parts.
    Committing(OfFirst<Saved>),
}

/// The own part of a save.
enum Own {
    Pending(PendingSave<Done<Written>>),
    Written(Written),
}

/// The outcome of work on a snapshot.
struct Done<T> {
    ran: Ran,
    snapshot: Snapshot,
    result: T,
}

impl<T> Done<T> {
    /// Does `work` on what a snapshot holds.
    fn on(mut snapshot: Snapshot, work: impl FnOnce(&mut Snapshot) -> T) -> Self {
        let begin = Instant::now();
        let result = work(&mut snapshot);
        Self { ran: Ran { begin, end: Instant::now() }, snapshot, result }
    }
}

/// The wait for a stage.
#[derive(Clone, Copy)]
struct Pace {
    /// Limit on the wait for the own work; `None` waits to its end.
    time: Option<Duration>,
    /// Patience with the other ranks.
    patience: Patience,
}

impl Pace {
    /// The result of `work`, or `work` if it takes longer.
    fn settle<T>(self, work: PendingSave<T>) -> Result<T, PendingSave<T>> {
        match self.time {
            Some(time) => work.poll_for(time),
            None => Ok(work.wait()),
        }
    }
}

/// The continuation after a stage.
enum Turn {
    /// Waiting: a rank is not done with it.
    Pending(Stage),
    Next(Attempt, Stage),
    Over,
}

impl Saver {
    /// Begins a save of the snapshot that was taken.
    pub(super) fn start(&mut self, job: Job, progress: &mut Progress) -> Result<(), Error> {
        let (job, attempt, begin) = (Arc::new(job), Attempt::default(), Instant::now());
        if self.ranks.size() > 1 {
            let stage = self.opening(&job, attempt);
            self.under_way = Some(Save { job, attempt, begin, stage });
            return self.advance(Pace { time: Some(OPENING), patience: Patience::Unlimited }, progress);
        }
        let snapshot = std::mem::replace(&mut self.snapshot, Memory::None);
        if let (Some(thread), Memory::There(snapshot)) = (&self.thread, snapshot) {
            let shared = job.clone();
            let save = move |snapshot: &mut Snapshot| shared.save_alone(&snapshot.tensors());
            let stage = Stage::Alone(thread.run(move || Done::on(*snapshot, save)));
            self.under_way = Some(Save { job, attempt, begin, stage });
        }
        Ok(())
    }

    /// Takes a save further, as far as all ranks are done with its stages, and tells of it when it has ended. All that save
    /// together call this after the same steps.
    ///
    /// # Errors
    /// Weights that are not finite; [`Error::Comm`]. What kept the save from being made is a message.
    pub(crate) fn poll(&mut self, progress: &mut Progress) -> Result<(), Error> {
        self.advance(Pace { time: Some(Duration::ZERO), patience: Patience::Limited }, progress)
    }

    /// Waits at most `time` for each stage of the save that is under way; returns true if it is not over then.
    pub(super) fn is_saving_after(&mut self, time: Duration, progress: &mut Progress) -> Result<bool, Error> {
        self.advance(Pace { time: Some(time), patience: Patience::Unlimited }, progress)?;
        Ok(self.under_way.is_some())
    }

    /// Returns true if the save under way waits for a file system that does not answer, on any rank: the training does not wait for it.
    /// All that save together call this after the same steps.
    pub(super) fn stalls(&self) -> Result<bool, Error> {
        let Some(Save { job, .. }) = &self.under_way else { return Ok(false) };
        Ok(self.ranks.any_in_time(job.stalls.load(Ordering::Relaxed), Patience::Unlimited)?)
    }

    /// The step whose save is under way.
    pub(super) fn step_under_way(&self) -> Option<u64> {
        self.under_way.as_ref().map(|save| save.job.step)
    }

    /// Waits for the save that is under way.
    pub(super) fn wait(&mut self, progress: &mut Progress) -> Result<(), Error> {
        self.advance(Pace { time: None, patience: Patience::Unlimited }, progress)
    }

    /// Takes a save from stage to stage until a rank is not done with one.
    fn advance(&mut self, mut pace: Pace, progress: &mut Progress) -> Result<(), Error> {
        while let Some(Save { job, attempt, begin, stage }) = self.under_way.take() {
            let turn = match stage {
                Stage::Alone(work) => self.end_alone(&job, work, pace, progress)?,
                Stage::Opening(work) => self.end_opening(&job, attempt, work, pace, progress)?,
                Stage::Writing(own, staging) => {
                    self.end_writing(&job, attempt, own, staging, pace, progress)?
                }
                Stage::Committing(work) => self.end_committing(&job, attempt, work, pace, progress)?,
            };
            match turn {
                Turn::Pending(stage) => {
                    self.under_way = Some(Save { job, attempt, begin, stage });
                    break;
                }
                Turn::Next(attempt, stage) => {
                    // Only the stage at hand is waited for.
                    pace.time = pace.time.map(|_| Duration::ZERO);
                    self.under_way = Some(Save { job, attempt, begin, stage });
                }
                Turn::Over => {}
            }
        }
        Ok(())
    }

    fn end_alone(
        &mut self,
        job: &Job,
        work: PendingSave<Done<Result<Saved, Error>>>,
        pace: Pace,
        progress: &mut Progress,
    ) -> Result<Turn, Error> {
        match pace.settle(work) {
            Err(work) => Ok(Turn::Pending(Stage::Alone(work))),
            Ok(done) => {
                let saved = self.take_back(done);
                self.tell(job.step, saved, progress)?;
                Ok(Turn::Over)
            }
        }
    }

    fn end_opening(
        &mut self,
        job: &Arc<Job>,
        attempt: Attempt,
        work: OfFirst<Staging>,
        pace: Pace,
        progress: &mut Progress,
    ) -> Result<Turn, Error> {
        let decision = match self.settle_of_first(job, attempt, work, pace)? {
            Err(work) => return Ok(Turn::Pending(Stage::Opening(work))),
            Ok(decision) => decision,
        };
        let staging = match decision {
            Decision::GoOn(staging) => staging,
            other => return self.turn_after_failure(job, other, progress),
        };
        let own = match (&self.thread, std::mem::replace(&mut self.snapshot, Memory::None)) {
            (Some(thread), Memory::There(snapshot)) if self.has_part => {
                let shared = job.clone();
                let write = move |snapshot: &mut Snapshot| shared.write(attempt, &snapshot.tensors());
                Own::Pending(thread.run(move || Done::on(*snapshot, write)))
            }
            (_, memory) => {
                self.snapshot = memory;
                Own::Written(Ok(None))
            }
        };
        Ok(Turn::Next(attempt, Stage::Writing(own, staging)))
    }

    fn end_writing(
        &mut self,
        job: &Arc<Job>,
        attempt: Attempt,
        own: Own,
        staging: Option<Staging>,
        pace: Pace,
        progress: &mut Progress,
    ) -> Result<Turn, Error> {
        let own = match own {
            Own::Pending(work) => match pace.settle(work) {
                Ok(done) => Own::Written(self.take_back(done)),
                Err(work) => Own::Pending(work),
            },
            written @ Own::Written(_) => written,
        };
        let is_pending = self.ranks.any_in_time(matches!(own, Own::Pending(_)), pace.patience)?;
        let written = match own {
            Own::Written(written) if !is_pending => written,
            own => return Ok(Turn::Pending(Stage::Writing(own, staging))),
        };
        let reports = gather(&self.ranks, job.step, written);
        let reports = match self.ranks.is_first() {
            true => Some(reports.map(Option::unwrap_or_default)),
            false => reports.map(|_| None)?,
        };
        match self.decide(reports, job, attempt, pace.patience)? {
            Decision::GoOn(reports) => {
                let shared = job.clone();
                let work = self.thread.as_ref().zip(staging.zip(reports));
                let work = work.map(|(thread, (staging, reports))| {
                    thread.run(move || shared.commit(attempt, staging, reports))
                });
                Ok(Turn::Next(attempt, Stage::Committing(work)))
            }
            other => self.turn_after_failure(job, other, progress),
        }
    }

    fn end_committing(
        &mut self,
        job: &Arc<Job>,
        attempt: Attempt,
        work: OfFirst<Saved>,
        pace: Pace,
        progress: &mut Progress,
    ) -> Result<Turn, Error> {
        match self.settle_of_first(job, attempt, work, pace)? {
            Err(work) => Ok(Turn::Pending(Stage::Committing(work))),
            Ok(Decision::GoOn(saved)) => {
                if let Some(saved) = saved {
                    self.tell(job.step, Ok(saved), progress)?;
                }
                Ok(Turn::Over)
            }
            Ok(other) => self.turn_after_failure(job, other, progress),
        }
    }

    /// The turn after a stage that was not a success.
    fn turn_after_failure<T>(
        &mut self,
        job: &Arc<Job>,
        decision: Decision<T>,
        progress: &mut Progress,
    ) -> Result<Turn, Error> {
        match decision {
            Decision::Again(attempt) => Ok(Turn::Next(attempt, self.opening(job, attempt))),
            Decision::Over(Some(error)) => {
                self.tell(job.step, Err(error), progress)?;
                Ok(Turn::Over)
            }
            Decision::Over(None) | Decision::GoOn(_) => Ok(Turn::Over),
        }
    }

    /// The decision on the first rank's work, or the work if it is not done.
    fn settle_of_first<T>(
        &self,
        job: &Job,
        attempt: Attempt,
        work: OfFirst<T>,
        pace: Pace,
    ) -> Result<Result<Decision<T>, OfFirst<T>>, Error> {
        let work = work.map(|work| pace.settle(work));
        let is_pending = self.ranks.any_in_time(matches!(work, Some(Err(_))), pace.patience)?;
        match work {
            Some(Err(work)) => Ok(Err(Some(work))),
            None if is_pending => Ok(Err(None)),
            Some(Ok(result)) => self.decide(Some(result), job, attempt, pace.patience).map(Ok),
            None => self.decide(None, job, attempt, pace.patience).map(Ok),
        }
    }

    fn opening(&self, job: &Arc<Job>, attempt: Attempt) -> Stage {
        let shared = job.clone();
        let thread = self.thread.as_ref().filter(|_| self.ranks.is_first());
        Stage::Opening(thread.map(|thread| thread.run(move || shared.open(attempt))))
    }

    /// The result of work on a snapshot, which is there for the next.
    fn take_back<T>(&mut self, done: Done<T>) -> T {
        self.ended.push(done.ran);
        self.snapshot = Memory::There(Box::new(done.snapshot));
        done.result
    }
}
