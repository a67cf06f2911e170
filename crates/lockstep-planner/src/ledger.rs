//! The exact figures of a plan's ranks: the bytes that each books in its ledger, and the traffic of its offloaded state.

use std::rc::Rc;

use lockstep_plan::gathering::LiveLimitTooLow;
use lockstep_plan::{
    MemoryBytes, Mesh, Plan, RankTraffic, Residence, Residences, StatePlan, StepLayout,
    offload_traffic_by_kind, predicted,
};

use crate::Planner;
use crate::forecast::MemoryInputs;
use crate::memory::{Holding, memory_elsewhere};
use crate::recordings::Recording;
use crate::search::Rejection;

impl Planner {
    /// Returns the bytes that a pipeline rank books.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] if the limit on live parameters leaves no room for a unit's weights.
    pub(crate) fn memory_of(
        &self,
        plan: &Plan,
        layout: &StepLayout,
        recording: &Recording,
        rank: usize,
    ) -> Result<MemoryBytes, Rejection> {
        if !self.traits().has_ledger {
            let stages = layout.stages_on(rank);
            let Recording { work, .. } = recording;
            let (state, mesh) = (self.state_bytes(recording), &layout.mesh);
            let holding = Holding { state, mesh, zero_stage: plan.effective_zero_stage(), stages: &stages };
            let elements = |unit| work.unit(unit).elements();
            let forgotten = |unit: usize| plan.recompute.of(unit.saturating_sub(1));
            let kept = |unit| self.traits().saved_bytes(work, unit, forgotten(unit));
            return Ok(memory_elsewhere(holding, elements, kept));
        }
        let state = self.state_plan(plan, layout, recording, rank);
        let shard_ranks = |summing| layout.mesh.shard_ranks(summing);
        let prediction = predicted(&recording.profile, &layout.passes_of(rank), shard_ranks, &state);
        let prediction = prediction.map_err(|_| Rejection::Invalid)?;
        // A device allocates what is booked; a host's system allocates pages when they are first written.
        Ok(if self.is_host() { prediction.touched() } else { prediction.by_category() })
    }

    /// Returns the residences of a plan's state on these machines; for ranks on CPUs, host memory is their own memory.
    pub(crate) fn residences_of(&self, plan: &Plan) -> Residences {
        let residences = plan.residence;
        if self.is_host() { residences.on_cpu() } else { residences }
    }

    /// Returns true if a plan offloads anything on these machines.
    pub(crate) fn offloads(&self, plan: &Plan) -> bool {
        self.traits().has_ledger && self.residences_of(plan).offload_anything()
    }

    /// Returns the recording of the model where each block recomputes by the plan's rules.
    pub(crate) fn recording_of(&mut self, plan: &Plan, mesh: &Mesh) -> Rc<Recording> {
        self.recordings.by_layer(plan, mesh)
    }

    /// Returns the traffic of offloaded state of each pipeline rank in a step; empty if nothing is offloaded.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] if the limit on live parameters leaves no room for a unit's weights.
    pub(crate) fn traffic_of(
        &self,
        plan: &Plan,
        layout: &StepLayout,
        recording: &Recording,
    ) -> Result<Vec<RankTraffic>, Rejection> {
        if !self.offloads(plan) {
            return Ok(Vec::new());
        }
        let Residences { optimizer, activations, .. } = self.residences_of(plan);
        let of_rank = |rank: usize| {
            let state = self.state_plan(plan, layout, recording, rank);
            let shard_ranks = |summing| layout.mesh.shard_ranks(summing);
            let passes = &layout.passes_of(rank);
            let by_kind = offload_traffic_by_kind(&recording.profile, passes, shard_ranks, &state)?;
            let mut traffic = RankTraffic::default();
            for (moved, residence) in by_kind.into_iter().zip([optimizer, activations]) {
                match residence {
                    Residence::Memory => {}
                    Residence::Host => traffic.host = traffic.host + moved,
                    Residence::Disk => traffic.disk = traffic.disk + moved,
                }
            }
            Ok(traffic)
        };
        let traffic = (0..layout.pipeline_ranks()).map(of_rank).collect::<Result<_, LiveLimitTooLow>>();
        traffic.map_err(|_| Rejection::Invalid)
    }

    /// Returns the inputs of the state layout of a pipeline rank.
    pub(crate) fn state_plan(
        &self,
        plan: &Plan,
        layout: &StepLayout,
        recording: &Recording,
        rank: usize,
    ) -> StatePlan {
        let (batch, facts) = (self.config.train.global_batch, &recording.facts);
        let mut state = StatePlan::new(plan, self.residences_of(plan), &layout.mesh, batch, facts);
        let of_a_stage = layout.mesh.world_size() / layout.pipeline_ranks();
        let copies = MemoryInputs::under(&self.config, plan).copies(
            &layout.mesh,
            rank * of_a_stage,
            plan.effective_zero_stage(),
        );
        // Copies of an accelerator's state are in host memory, which is not counted here.
        let is_here = usize::from(self.is_host());
        (state.kept_copies, state.saved_copies) = (is_here * copies.kept, is_here * copies.saved);
        state
    }
}
