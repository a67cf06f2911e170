//! Lower bounds on the step time of candidates, a microsecond each. They assume the least recomputation and offload that memory
//! makes necessary.

use lockstep_plan::schedule::Kind;
use lockstep_plan::work::UnitElements;
use lockstep_plan::{ContextMethod, Degrees, FRAME_PLACES, Mesh, Recompute, StateOnRank};

use crate::caches::{ModeOutline, Outline, PassKey};
use crate::memory::state_of_unit;
use crate::offload::Least;
use crate::predict::TimedModel;
use crate::recordings::Recording;
use crate::search::Candidate;
use crate::{Objective, Planner};

/// Slack on the memory limit during bounding: bounds ignore alignment padding.
const SLACK: f64 = 1.03;

impl Planner {
    /// Returns a lower bound of the objective; `None` for a candidate that cannot fit. It is the time of all passes with balanced
    /// stages, with the pipeline's fill and with the least recomputation that memory makes necessary.
    pub(crate) fn lower_bound(&mut self, candidate: &Candidate) -> Option<f64> {
        let outline = self.outline(candidate)?;
        let ranks = candidate.degrees.pipeline as f64;
        let micro_batches = candidate.micro_batches(self.config.train.global_batch) as f64;
        let (kind, chunks) = candidate.schedule;
        // Where state is offloaded memory is scarce, and the ring's buffers decide what fits.
        if candidate.offload.is_nothing() && self.is_dominated_by_ring(candidate)? {
            return None;
        }
        let ModeOutline { pass_ms: none_ms, saved_bytes: none_bytes } =
            self.mode_outline(candidate, Recompute::None)?;
        // Model state of all pipeline ranks of a replica together.
        let mesh = Mesh::new(candidate.degrees).ok()?;
        let held = state_of_unit(outline.state, &mesh, candidate.zero_stage, outline.elements);
        let state = held.total() as f64;
        // Micro-batches in flight: one without a pipeline, on the first rank as many as there are ranks, half of that in V-shaped
        // schedules.
        let at_once = if kind.is_v_shaped() { ranks / 2.0 } else { ranks.min(micro_batches) };
        let available = self.capacity_bytes(self.ranks_of(candidate)) as f64 * SLACK;
        // Lower bounds of memory do not know of state that the run itself offloads.
        let is_counted = !self.offloads(&self.config.plan);
        let left = available - 0.9 * state / ranks;
        // A candidate that fits without recomputation needs none.
        let needs_mode = !candidate.offload.is_nothing()
            || self.objective == Objective::Headroom
            || is_counted && left < 0.8 * none_bytes * at_once / ranks;
        let mode = if needs_mode { candidate.recompute } else { Recompute::None };
        let ModeOutline { pass_ms: mode_ms, saved_bytes: mode_bytes } = self.mode_outline(candidate, mode)?;
        let stretch = bubble_factor(kind, ranks, chunks as f64, micro_batches);
        if !candidate.offload.is_nothing() {
            let least = self.least_offloaded(held, mode_bytes / ranks, ranks, [at_once, micro_batches]);
            return self.bound_offloaded(candidate, micro_batches * stretch * mode_ms / ranks, least);
        }
        if is_counted && left < 0.8 * mode_bytes * at_once / ranks {
            return None;
        }
        // Fraction of the blocks that have to recompute.
        let spared = (none_bytes - mode_bytes) * at_once / ranks;
        let missing = 0.8 * none_bytes * at_once / ranks - left;
        let forgets = if is_counted && spared > 0.0 { (missing / spared).clamp(0.0, 1.0) } else { 0.0 };
        if candidate.recompute == Recompute::None && forgets > 0.0 {
            return None;
        }
        let pass_ms = none_ms + forgets * (mode_ms - none_ms).max(0.0);
        let step_ms = micro_batches * stretch * pass_ms / ranks;
        Some(match self.objective {
            Objective::Headroom => (0.8 * mode_bytes * at_once + 0.9 * state) / ranks / available,
            _ => self.objective_of_time(candidate, step_ms),
        })
    }
}

/// Returns a lower bound of a pipeline's time without split backwards, as a multiple of its ranks' mean work.
///
/// Rank `s` waits for one forward and one backward of a chunk on each rank before it. With `M` micro-batches and `v` chunks of `t[r] / v`
/// on rank `r`, the step takes at least `M t[s] + (t[0] + … + t[s - 1]) / v`. Stages are whole units, so the last ranks may have fewer. The
/// largest of these sums is smallest where all are equal: `t[s + 1] = t[s] (1 - 1 / (v M))`. Split backwards fill the wait.
fn bubble_factor(kind: Kind, ranks: f64, chunks: f64, micro_batches: f64) -> f64 {
    if kind.splits_backward() {
        return 1.0;
    }
    let passes = chunks * micro_batches;
    ranks / (passes * (1.0 - (1.0 - 1.0 / passes).powf(ranks)))
}

impl Planner {
    /// Returns the choices on which the passes of a candidate's micro-batches depend.
    pub(crate) fn pass_key(&self, candidate: &Candidate) -> PassKey {
        let Degrees { tensor, context, expert, expert_tensor, pipeline, .. } = candidate.degrees;
        let is_even = self.cluster.nodes.len() == 1;
        PassKey {
            tensor,
            context,
            expert,
            expert_tensor,
            sequence_parallel: candidate.sequence_parallel,
            context_method: candidate.context_method,
            micro_batch: candidate.micro_batch,
            ranks: if self.is_host() { self.ranks_of(candidate) } else { 0 },
            pipeline: if is_even { 0 } else { pipeline },
        }
    }

    /// Returns true for a context-parallel method other than ring that neither takes less time nor saves fewer bytes than ring: it
    /// cannot win. `None` if the candidate's mesh is invalid.
    fn is_dominated_by_ring(&mut self, candidate: &Candidate) -> Option<bool> {
        if candidate.context_method == ContextMethod::Ring || !self.leaves_ring_open() {
            return Some(false);
        }
        let ring = Candidate { context_method: ContextMethod::Ring, ..*candidate };
        for mode in [Recompute::None, candidate.recompute] {
            let [own, ring] = [self.mode_outline(candidate, mode)?, self.mode_outline(&ring, mode)?];
            if own.pass_ms < ring.pass_ms || own.saved_bytes < ring.saved_bytes {
                return Some(false);
            }
        }
        Some(true)
    }

    /// Returns the inputs of the bound of a candidate with offload. `saved_bytes` are the activations that the blocks of a mean
    /// rank save for one micro-batch; `at_once` micro-batches are in flight, `micro_batches` make a step.
    fn least_offloaded(
        &self,
        state: StateOnRank,
        saved_bytes: f64,
        ranks: f64,
        [at_once, micro_batches]: [f64; 2],
    ) -> Least {
        let of_rank = |bytes: u64| 0.9 * bytes as f64 / ranks;
        let kept = 0.8 * saved_bytes;
        let blocks = self.model.config.num_hidden_layers() as f64 / ranks;
        let moved = (1.0 - FRAME_PLACES as f64 / blocks).max(0.0);
        Least {
            state: [state.weights, state.gradients, state.optimizer].map(of_rank),
            kept: kept * at_once,
            kept_of_all: kept * moved * micro_batches,
            micro_batches,
        }
    }

    /// Returns the inputs of a candidate's bound; `None` if its mesh is invalid.
    fn outline(&mut self, candidate: &Candidate) -> Option<Outline> {
        let key = self.pass_key(candidate);
        if let Some(known) = self.caches.outlines.get(&key) {
            return Some(*known);
        }
        let (sketch, of_none) = self.sketch(candidate, Recompute::None)?;
        let mut elements = UnitElements::default();
        for unit in 0..sketch.work.units() {
            elements += sketch.work.unit(unit).elements();
        }
        if self.model.config.tie_word_embeddings() {
            elements = elements.without(sketch.work.unit(0).elements());
        }
        let mut of_mode = [None; 3];
        of_mode[Recompute::None as usize] = Some(of_none);
        let outline = Outline { of_mode, elements, state: self.state_bytes(&sketch) };
        self.caches.outlines.insert(key, outline);
        Some(outline)
    }

    /// Returns times and saved activations of a candidate whose blocks all use recompute mode `mode`.
    fn mode_outline(&mut self, candidate: &Candidate, mode: Recompute) -> Option<ModeOutline> {
        if let Some(known) = self.outline(candidate)?.of_mode[mode as usize] {
            return Some(known);
        }
        let (_, of_mode) = self.sketch(candidate, mode)?;
        let key = self.pass_key(candidate);
        if let Some(outline) = self.caches.outlines.get_mut(&key) {
            outline.of_mode[mode as usize] = Some(of_mode);
        }
        Some(of_mode)
    }

    /// Records a candidate whose blocks all use `mode`, without caching the recording, and returns it with its outline.
    fn sketch(&mut self, candidate: &Candidate, mode: Recompute) -> Option<(Recording, ModeOutline)> {
        let mesh = Mesh::new(candidate.degrees).ok()?;
        let plan = candidate.plan(&self.config.plan);
        let (recording, saved_bytes) = self.recordings.sketch(&plan, &mesh, mode);
        // Of different nodes the fastest: a lower bound must not exceed the time on any of them.
        let times = TimedModel::new(&self.cluster, &recording.work, &mesh);
        let on = |kind: usize| times.pass_seconds(0..times.units(), kind);
        let pass_ms = 1e3 * (0..self.cluster.nodes.len()).map(on).fold(f64::INFINITY, f64::min);
        Some((recording, ModeOutline { pass_ms, saved_bytes }))
    }
}
