//! A background save, overlapped with the training, as a state machine of phases. All ranks that save together pass each phase
//! together, between two steps.
//!
//! With one rank a single phase does everything. With several, the first rank opens a directory, each rank writes its part, and
//! the first rank commits the checkpoint. Any failure restarts the save at the first phase with the next [`Attempt`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use lockstep_checkpoint::{PendingSave, Staging};
use lockstep_engine::{Snapshot, TimeLimit};
use lockstep_observe::progress::Progress;

use super::job::{Attempt, Job, Saved};
use super::part::gather;
use super::save::{Done, OfFirst, Own, Save, SavePhase};
use super::saver::{Decision, Memory, Saver};
use crate::Error;

/// Longest wait of the training for a save to be opened. If it is opened in this time, the save needs no additional step.
const OPENING: Duration = Duration::from_millis(100);

/// One poll of an attempt, with its limits on the wait for a phase.
#[derive(Clone, Copy)]
struct Poll<'a> {
    job: &'a Arc<Job>,
    attempt: Attempt,
    pace: Pace,
}

/// Limits on the wait for a phase.
#[derive(Clone, Copy)]
struct Pace {
    /// Limit on the wait for this rank's own work; `None` waits until it ends.
    time: Option<Duration>,
    /// Limit on the wait for the other ranks.
    limit: TimeLimit,
}

impl Pace {
    /// Returns the result of `work`, or `work` itself if it takes longer than `time`.
    fn settle<T>(self, work: PendingSave<T>) -> Result<T, PendingSave<T>> {
        match self.time {
            Some(time) => work.poll_for(time),
            None => Ok(work.wait()),
        }
    }
}

/// Transition after a phase has been polled.
enum Turn {
    /// The phase is not complete: some rank is still at work.
    Pending(SavePhase),
    Next(Attempt, SavePhase),
    Over,
}

impl Saver {
    /// Starts a save of the snapshot that was taken.
    pub(super) fn start(&mut self, job: Job, progress: &mut Progress) -> Result<(), Error> {
        let (job, attempt, begin) = (Arc::new(job), Attempt::default(), Instant::now());
        if self.ranks.size() > 1 {
            let phase = self.opening(&job, attempt);
            self.in_flight = Some(Save { job, attempt, begin, phase });
            return self.advance(Pace { time: Some(OPENING), limit: TimeLimit::Unlimited }, progress);
        }
        let snapshot = std::mem::replace(&mut self.snapshot, Memory::None);
        if let (Some(thread), Memory::There(snapshot)) = (&self.thread, snapshot) {
            let shared = job.clone();
            let save = move |snapshot: &mut Snapshot| shared.save_alone(&snapshot.tensors());
            let phase = SavePhase::Alone(thread.run(move || Done::on(*snapshot, save)));
            self.in_flight = Some(Save { job, attempt, begin, phase });
        }
        Ok(())
    }

    /// Advances the save through each phase that all ranks have completed, and reports its end. A collective call: all ranks that
    /// save together make it after the same steps.
    ///
    /// # Errors
    /// If weights are not finite or the communication with other ranks fails. A failure to save is reported as a message.
    pub(crate) fn poll(&mut self, progress: &mut Progress) -> Result<(), Error> {
        self.advance(Pace { time: Some(Duration::ZERO), limit: TimeLimit::Limited }, progress)
    }

    /// Waits at most `time` for each phase of the save in flight; returns true if the save has not ended.
    pub(super) fn is_saving_after(&mut self, time: Duration, progress: &mut Progress) -> Result<bool, Error> {
        self.advance(Pace { time: Some(time), limit: TimeLimit::Unlimited }, progress)?;
        Ok(self.in_flight.is_some())
    }

    /// Returns true if, on any rank, the save in flight waits for a file system that does not answer. The training does not wait
    /// for such a save. A collective call.
    pub(super) fn stalls(&self) -> Result<bool, Error> {
        let Some(Save { job, .. }) = &self.in_flight else { return Ok(false) };
        Ok(self.ranks.any_in_time(job.stalls.load(Ordering::Relaxed), TimeLimit::Unlimited)?)
    }

    /// Returns the step whose save is in flight.
    pub(super) fn step_in_flight(&self) -> Option<u64> {
        self.in_flight.as_ref().map(|save| save.job.part.step)
    }

    /// Waits until the save in flight has ended.
    pub(super) fn wait(&mut self, progress: &mut Progress) -> Result<(), Error> {
        self.advance(Pace { time: None, limit: TimeLimit::Unlimited }, progress)
    }

    /// Advances the save phase by phase until a phase is incomplete on some rank.
    fn advance(&mut self, mut pace: Pace, progress: &mut Progress) -> Result<(), Error> {
        while let Some(Save { job, attempt, begin, phase }) = self.in_flight.take() {
            let poll = Poll { job: &job, attempt, pace };
            let turn = match phase {
                SavePhase::Alone(work) => self.end_alone(poll, work, progress)?,
                SavePhase::Opening(work) => self.end_opening(poll, work, progress)?,
                SavePhase::Writing(own, staging) => self.end_writing(poll, (own, staging), progress)?,
                SavePhase::Committing(work) => self.end_committing(poll, work, progress)?,
            };
            match turn {
                Turn::Pending(phase) => {
                    self.in_flight = Some(Save { job, attempt, begin, phase });
                    break;
                }
                Turn::Next(attempt, phase) => {
                    // Only the current phase is waited for.
                    pace.time = pace.time.map(|_| Duration::ZERO);
                    self.in_flight = Some(Save { job, attempt, begin, phase });
                }
                Turn::Over => {}
            }
        }
        Ok(())
    }

    fn end_alone(
        &mut self,
        Poll { job, pace, .. }: Poll<'_>,
        work: PendingSave<Done<Result<Saved, Error>>>,
        progress: &mut Progress,
    ) -> Result<Turn, Error> {
        match pace.settle(work) {
            Err(work) => Ok(Turn::Pending(SavePhase::Alone(work))),
            Ok(done) => {
                let saved = self.take_back(done);
                self.tell(job.part.step, saved, progress)?;
                Ok(Turn::Over)
            }
        }
    }

    fn end_opening(
        &mut self,
        poll: Poll<'_>,
        work: OfFirst<Staging>,
        progress: &mut Progress,
    ) -> Result<Turn, Error> {
        let Poll { job, attempt, .. } = poll;
        let staging = match self.settle_of_first(poll, work)? {
            Err(work) => return Ok(Turn::Pending(SavePhase::Opening(work))),
            Ok(Decision::GoOn(staging)) => staging,
            Ok(other) => return self.turn_after_failure(job, other, progress),
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
        Ok(Turn::Next(attempt, SavePhase::Writing(own, staging)))
    }

    fn end_writing(
        &mut self,
        Poll { job, attempt, pace }: Poll<'_>,
        (own, staging): (Own, Option<Staging>),
        progress: &mut Progress,
    ) -> Result<Turn, Error> {
        let own = match own {
            Own::Pending(work) => match pace.settle(work) {
                Ok(done) => Own::Written(self.take_back(done)),
                Err(work) => Own::Pending(work),
            },
            written @ Own::Written(_) => written,
        };
        let is_pending = self.ranks.any_in_time(matches!(own, Own::Pending(_)), pace.limit)?;
        let written = match own {
            Own::Written(written) if !is_pending => written,
            own => return Ok(Turn::Pending(SavePhase::Writing(own, staging))),
        };
        let reports = gather(&self.ranks, job.part.step, written);
        let reports = match self.ranks.is_first() {
            true => Some(reports.map(Option::unwrap_or_default)),
            false => reports.map(|_| None)?,
        };
        match self.decide(reports, job, attempt, pace.limit)? {
            Decision::GoOn(reports) => {
                let shared = job.clone();
                let work = self.thread.as_ref().zip(staging.zip(reports));
                let work = work.map(|(thread, (staging, reports))| {
                    thread.run(move || shared.commit(attempt, staging, reports))
                });
                Ok(Turn::Next(attempt, SavePhase::Committing(work)))
            }
            other => self.turn_after_failure(job, other, progress),
        }
    }

    fn end_committing(
        &mut self,
        poll: Poll<'_>,
        work: OfFirst<Saved>,
        progress: &mut Progress,
    ) -> Result<Turn, Error> {
        match self.settle_of_first(poll, work)? {
            Err(work) => Ok(Turn::Pending(SavePhase::Committing(work))),
            Ok(Decision::GoOn(saved)) => {
                if let Some(saved) = saved {
                    self.tell(poll.job.part.step, Ok(saved), progress)?;
                }
                Ok(Turn::Over)
            }
            Ok(other) => self.turn_after_failure(poll.job, other, progress),
        }
    }

    /// Returns the transition after a phase that did not succeed.
    fn turn_after_failure<T>(
        &mut self,
        job: &Arc<Job>,
        decision: Decision<T>,
        progress: &mut Progress,
    ) -> Result<Turn, Error> {
        match decision {
            Decision::Again(attempt) => Ok(Turn::Next(attempt, self.opening(job, attempt))),
            Decision::Over(Some(error)) => {
                self.tell(job.part.step, Err(error), progress)?;
                Ok(Turn::Over)
            }
            Decision::Over(None) | Decision::GoOn(_) => Ok(Turn::Over),
        }
    }

    /// Returns the decision on the first rank's work, or the work itself if it is not complete.
    fn settle_of_first<T>(
        &self,
        Poll { job, attempt, pace }: Poll<'_>,
        work: OfFirst<T>,
    ) -> Result<Result<Decision<T>, OfFirst<T>>, Error> {
        let work = work.map(|work| pace.settle(work));
        let is_pending = self.ranks.any_in_time(matches!(work, Some(Err(_))), pace.limit)?;
        let own = match work {
            Some(Err(work)) => return Ok(Err(Some(work))),
            None if is_pending => return Ok(Err(None)),
            Some(Ok(result)) => Some(result),
            None => None,
        };
        self.decide(own, job, attempt, pace.limit).map(Ok)
    }

    fn opening(&self, job: &Arc<Job>, attempt: Attempt) -> SavePhase {
        let shared = job.clone();
        let thread = self.thread.as_ref().filter(|_| self.ranks.is_first());
        SavePhase::Opening(thread.map(|thread| thread.run(move || shared.open(attempt))))
    }

    /// Returns the result of work on a snapshot and keeps the snapshot for the next save.
    fn take_back<T>(&mut self, done: Done<T>) -> T {
        self.ended.push(done.ran);
        self.snapshot = Memory::There(Box::new(done.snapshot));
        done.result
    }
}
