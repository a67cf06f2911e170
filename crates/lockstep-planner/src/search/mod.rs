//! Search for the best plan: a branch-and-bound search over all choices, in order of their lower bounds.
//!
//! A [`Space`] lists every [`Candidate`]: each mesh of the devices, with each ZeRO stage, micro-batch size, schedule and recomputation
//! that fits the model and the batch. A [`Subject`] computes a lower *bound* of each, which takes microseconds, and the *value* itself,
//! which takes milliseconds: the memory of every rank and the simulated step. Candidates are valued in ascending order of their bounds.
//! When as many as are wanted are better than the next bound, the search ends: no remaining candidate can be among the best (branch and
//! bound: Land and Doig 1960). So the result equals that of an exhaustive search of the same space, with a gap of 0, as a test checks. If
//! an [`Observer`] stops the search early, it returns the best so far, with the remaining gap.

mod space;

use lockstep_plan::schedule::Kind;
use lockstep_plan::{
    ContextMethod, Degrees, Offload, PassOrder, PipelineSchedule, Plan, Recompute, Residence, ZeroStage,
};

pub use space::Space;

/// A point of the search space: the choices that [`Candidate::plan`] turns into a plan. A search has hundreds of thousands of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// Degrees of the mesh.
    pub degrees: Degrees,
    /// ZeRO stage over the shard and context axes.
    pub zero_stage: ZeroStage,
    /// Micro-batch size in sequences.
    pub micro_batch: usize,
    /// True for sequence parallelism.
    pub sequence_parallel: bool,
    /// Algorithm of context-parallel attention; ignored if the context degree is 1.
    pub context_method: ContextMethod,
    /// Pipeline schedule, and stages per rank.
    pub schedule: (Kind, usize),
    /// Recomputation of every block; the most that any block does.
    pub recompute: Recompute,
    /// Kinds of state that are offloaded, and their destinations.
    pub offload: Offload,
}

impl Candidate {
    /// Returns the number of micro-batches of each data-parallel rank.
    pub fn micro_batches(&self, global_batch: usize) -> usize {
        global_batch / (self.degrees.replicate * self.degrees.shard) / self.micro_batch
    }

    /// Returns the plan of these choices. Everything else is taken from `base`, and stages are left open.
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

/// Reason why a candidate is infeasible.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rejection {
    /// A rank does not fit the memory of its device.
    Memory {
        /// Pipeline stage of the rank.
        stage: usize,
        /// Bytes that the rank needs.
        needed: u64,
        /// Bytes that are available.
        available: u64,
        /// Category with the most bytes.
        most: lockstep_plan::MemoryCategory,
    },
    /// The offloaded state of a rank does not fit its part of host memory or disk.
    Room {
        /// Place that is too small: host memory or disk.
        place: Residence,
        /// Bytes that the rank needs.
        needed: u64,
        /// Bytes that are available.
        available: u64,
    },
    /// The stages, or other choices, do not fit the model.
    Invalid,
    /// The candidate turned out to be worse than the wanted number of others before it was fully valued.
    Worse,
}

/// Cost model of candidates.
pub trait Subject {
    /// Full result of a candidate.
    type Value;

    /// Returns a lower bound of the candidate's objective; `None` if the candidate is infeasible.
    fn bound(&mut self, candidate: &Candidate) -> Option<f64>;

    /// Returns the objective, of which less is better, and the full result. Candidates whose objective is `limit` or more need not be
    /// valued fully.
    ///
    /// # Errors
    /// If the candidate is infeasible, or is found to be worse than `limit`.
    fn value(&mut self, candidate: &Candidate, limit: f64) -> Result<(f64, Self::Value), Rejection>;
}

/// A candidate that was valued.
#[derive(Debug, Clone)]
pub struct Found<V> {
    /// Choices of the candidate.
    pub candidate: Candidate,
    /// Objective that it was ranked by.
    pub objective: f64,
    /// Full result of the candidate.
    pub value: V,
}

/// Result of a search.
#[derive(Debug, Clone)]
pub struct Ranking<V> {
    /// Best candidates, best first.
    pub best: Vec<Found<V>>,
    /// Candidates rejected for memory or room, each with its bound and the reason, in ascending order of bounds.
    pub rejected: Vec<(Candidate, f64, Rejection)>,
    /// Number of candidates with a bound; the others are infeasible.
    pub candidates: usize,
    /// Number of candidates that were valued.
    pub valued: usize,
    /// True if the observer stopped the search.
    pub is_stopped: bool,
    /// Maximum fraction by which a remaining candidate could be better than the best; 0 if the search was not stopped.
    pub gap: f64,
}

impl<V> Ranking<V> {
    fn of(candidates: usize) -> Self {
        Self { best: Vec::new(), rejected: Vec::new(), candidates, valued: 0, is_stopped: false, gap: 0.0 }
    }
}

/// Progress of a search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Number of candidates; `None` until all are bounded.
    pub candidates: Option<usize>,
    /// Number of candidates that were bounded so far, or valued once all are bounded.
    pub done: usize,
    /// Best objective so far.
    pub best: Option<f64>,
    /// Lower bound of the objective of all remaining candidates.
    pub bound: Option<f64>,
}

/// Receives the progress of a search every few candidates, and may stop it.
pub trait Observer {
    /// Returns true if the search may continue.
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

/// Maximum number of rejected candidates in a ranking.
const MOST_REJECTED: usize = 32;

/// Number of bounds computed, and of candidates valued, between two calls of the observer.
const BETWEEN_LOOKS: [usize; 2] = [256, 1];

/// Returns the `top` best candidates, or the best of those that were valued before `observer` stopped the search.
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
            // Nothing is known about candidates without a bound.
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
