//! The search for the best plan: everything that can be chosen, in the order of the least that it could cost, until nothing that is left
//! could be better.
//!
//! A [`Space`] lists every [`Candidate`]: each way to make a mesh of the devices, with each ZeRO stage, micro-batch, schedule and
//! recomputation that fits the model and the batch. A [`Subject`] knows for each a *bound*, which costs microseconds and is never above
//! what the candidate comes to, and the *value* itself, which costs milliseconds: the memory of every rank and the simulated step.
//! Candidates are valued in ascending order of their bounds. When as many as are wanted are known to be better than the next bound, the
//! search ends, and no candidate that was not looked at could have been among them (branch and bound: Land and Doig 1960). So the
//! result is that of an exhaustive search of the same space: its gap is 0, and a test holds it to that. A search that an [`Observer`] stops
//! before returns the best so far, with the gap that is left.

mod space;

use lockstep_plan::schedule::Kind;
use lockstep_plan::{
    ContextMethod, Degrees, Offload, PassOrder, PipelineSchedule, Plan, Recompute, Residence, ZeroStage,
};

pub use space::Space;

/// A point of the search space: the choices that [`Candidate::plan`] makes a plan of. A search holds hundreds of thousands of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// How the devices are laid out.
    pub degrees: Degrees,
    /// What is shared out over the shard axis.
    pub zero_stage: ZeroStage,
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Whether tensor-parallel ranks split norms and residuals along the sequence.
    pub sequence_parallel: bool,
    /// How ranks that share sequences reach each other's parts; of no meaning where none do.
    pub context_method: ContextMethod,
    /// What the ranks of a pipeline do, and stages on each.
    pub schedule: (Kind, usize),
    /// What blocks forget, at most.
    pub recompute: Recompute,
    /// The kinds of state that are offloaded, and where to.
    pub offload: Offload,
}

impl Candidate {
    /// Micro-batches of each part of a batch of so many sequences.
    pub fn micro_batches(&self, global_batch: usize) -> usize {
        global_batch / (self.degrees.replicate * self.degrees.shard) / self.micro_batch
    }

    /// The plan of these choices; what is no choice is that of `base`, and stages are left open.
    pub fn plan(&self, base: &Plan) -> Plan {
        let (kind, chunks) = self.schedule;
        let chunks = (self.degrees.pipeline > 1).then_some(chunks);
        let residence = match self.offload.is_nothing() {
            true => base.residence,
            false => self.offload.of_fraction(base.residence.fraction),
        };
        Plan {
            mesh: self.degrees,
            micro_batch: Some(self.micro_batch),
            zero_stage: self.zero_stage.number(),
            sequence_parallel: self.sequence_parallel,
            context_method: self.context_method,
            schedule: PipelineSchedule { passes: PassOrder::Published(kind), chunks },
            stages: Vec::new(),
            recompute: self.recompute.into(),
            residence,
            ..base.clone()
        }
    }
}

/// Why a candidate is none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rejection {
    /// A rank needs more than its device has.
    Memory {
        /// Which stage of the pipeline it is.
        stage: usize,
        /// Bytes that it needs.
        needed: u64,
        /// Bytes that there are.
        available: u64,
        /// The category that takes most.
        most: lockstep_plan::MemoryCategory,
    },
    /// A rank's share of host memory or disk has no room for its offloaded state.
    Room {
        /// Host memory or disk.
        place: Residence,
        /// Bytes that it needs.
        needed: u64,
        /// Bytes that there are.
        available: u64,
    },
    /// Its stages, or something else of it, do not fit the model.
    Invalid,
    /// It was found to be worse than as many others as are wanted before it was looked at in full.
    Worse,
}

/// Who knows what candidates come to.
pub trait Subject {
    /// What a candidate comes to in full.
    type Value;

    /// The least that a candidate can come to; none if it cannot be.
    fn bound(&mut self, candidate: &Candidate) -> Option<f64>;

    /// What it comes to: a number that is better the less it is, and what stands behind it. What comes to `limit` or more need not be
    /// looked at to the end.
    ///
    /// # Errors
    /// Why it is no choice.
    fn value(&mut self, candidate: &Candidate, limit: f64) -> Result<(f64, Self::Value), Rejection>;
}

/// A candidate that was valued.
#[derive(Debug, Clone)]
pub struct Found<V> {
    /// Which.
    pub candidate: Candidate,
    /// The number that it was ranked by.
    pub objective: f64,
    /// What it comes to.
    pub value: V,
}

/// What a search has come to.
#[derive(Debug, Clone)]
pub struct Ranking<V> {
    /// The best, best first.
    pub best: Vec<Found<V>>,
    /// The best candidates that were rejected, by the least that they could have come to, with that and the reason.
    pub rejected: Vec<(Candidate, f64, Rejection)>,
    /// How many candidates there are.
    pub candidates: usize,
    /// How many of them were valued.
    pub valued: usize,
    /// Whether the observer stopped the search.
    pub is_stopped: bool,
    /// By what share a candidate that was not looked at could be better than the best; 0 if the search was not stopped.
    pub gap: f64,
}

impl<V> Ranking<V> {
    fn of(candidates: usize) -> Self {
        Self { best: Vec::new(), rejected: Vec::new(), candidates, valued: 0, is_stopped: false, gap: 0.0 }
    }
}

/// How far a search is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Number of candidates, if all of them are bounded.
    pub candidates: Option<usize>,
    /// Number of candidates looked at so far: bounded, or where all are, valued.
    pub done: usize,
    /// The best objective so far.
    pub best: Option<f64>,
    /// A lower bound of the objective of every candidate that is left.
    pub bound: Option<f64>,
}

/// Told of a search's progress every few candidates; says whether the search goes on.
pub trait Observer {
    /// Whether the search goes on.
    fn goes_on(&mut self, progress: Progress) -> bool;
}

/// An observer that never stops a search.
impl Observer for () {
    fn goes_on(&mut self, _: Progress) -> bool {
        true
    }
}

impl<F: FnMut(Progress) -> bool> Observer for F {
    fn goes_on(&mut self, progress: Progress) -> bool {
        self(progress)
    }
}

/// Rejected candidates that are told.
const MOST_REJECTED: usize = 32;

/// Bounds computed, and candidates valued, between two looks at the observer.
const BETWEEN_LOOKS: [usize; 2] = [256, 1];

/// The `top` best of some candidates, or of those that were looked at until `observer` stopped the search.
pub fn search<S: Subject>(
    candidates: impl IntoIterator<Item = Candidate>,
    top: usize,
    subject: &mut S,
    observer: &mut impl Observer,
) -> Ranking<S::Value> {
    let top = top.max(1);
    let mut bounded: Vec<(f64, Candidate)> = Vec::new();
    let mut left = None;
    for (done, candidate) in candidates.into_iter().enumerate() {
        let progress = Progress { candidates: None, done, best: None, bound: None };
        if done.is_multiple_of(BETWEEN_LOOKS[0]) && !observer.goes_on(progress) {
            // Of what was left out before it was bounded nothing is known.
            left = Some(0.0);
            break;
        }
        bounded.extend(subject.bound(&candidate).map(|bound| (bound, candidate)));
    }
    bounded.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut ranking = Ranking::of(bounded.len());
    for (bound, candidate) in bounded {
        let is_full = ranking.best.len() >= top;
        let worst = ranking.best.last().filter(|_| is_full).map_or(f64::INFINITY, |worst| worst.objective);
        if bound >= worst {
            break;
        }
        let progress = Progress {
            candidates: Some(ranking.candidates),
            done: ranking.valued,
            best: ranking.best.first().map(|best| best.objective),
            bound: Some(bound),
        };
        if ranking.valued.is_multiple_of(BETWEEN_LOOKS[1]) && !observer.goes_on(progress) {
            left.get_or_insert(bound);
            break;
        }
        ranking.valued += 1;
        match subject.value(&candidate, worst) {
            Ok((objective, value)) => {
                let place = ranking.best.partition_point(|found| found.objective <= objective);
                ranking.best.insert(place, Found { candidate, objective, value });
                ranking.best.truncate(top);
            }
            Err(rejection @ (Rejection::Memory { .. } | Rejection::Room { .. }))
                if ranking.rejected.len() < MOST_REJECTED =>
            {
                ranking.rejected.push((candidate, bound, rejection));
            }
            Err(_) => {}
        }
    }
    ranking.is_stopped = left.is_some();
    if let (Some(left), Some(best)) = (left, ranking.best.first()) {
        ranking.gap = (1.0 - left / best.objective).clamp(0.0, 1.0);
    }
    ranking
}
