//! The evaluation of a configuration: its memory on every rank, its step and its checkpoint saves.

use lockstep_config::RunConfig;
use lockstep_plan::gathering::ReshardAfterForward;
use lockstep_plan::work::{ModelWork, Pass, TaskKind};
use lockstep_plan::{
    CheckedPlan, MemoryBytes, MemoryCategory, Plan, RankTraffic, StatePlan, StepLayout, ZeroStage, predicted,
};

use crate::cluster::NodeKind;
use crate::evaluated::Evaluated;
use crate::memory::{Holding, state_of};
use crate::predict::{
    PlanShape, Saves, SlowDevice, StepPrediction, TimedModel, data_stall_s, predict_step, predict_step_ms,
};
use crate::recordings::Recording;
use crate::search::Rejection;
use crate::{Error, Planner, machine};

impl Planner {
    /// Evaluates the plan that a configuration's keys describe.
    ///
    /// # Errors
    /// If the configuration does not fit the model, or has more ranks than there are devices.
    pub fn evaluate(&mut self, config: &RunConfig) -> Result<Evaluated, Error> {
        machine::check_ranks(&self.cluster, config.ranks())?;
        let plan = self.described(config)?;
        let recording = self.recording_of(plan.plan(), plan.mesh());
        self.evaluated(config.clone(), &plan, &recording)
    }

    /// Returns the step time over the predicted one if one device runs at the fraction `speed` of its rate, at the pipeline rank
    /// where that costs most.
    ///
    /// # Errors
    /// If the plan does not fit its model.
    pub fn with_slow_device(&mut self, found: &Evaluated, speed: f64) -> Result<f64, Error> {
        let config = &found.config;
        let checked = self.described(config)?;
        let layout = checked.layout();
        let recording = self.recording_of(checked.plan(), &layout.mesh);
        let times = TimedModel::new(&self.cluster, &recording.work, &layout.mesh);
        let traffic = self.traffic_of(checked.plan(), layout, &recording).unwrap_or_default();
        let step_ms = |pipeline_rank: usize| {
            let slow = Some(SlowDevice { pipeline_rank, speed });
            let shape = PlanShape { slow, ..self.shape(config.zero_stage(), layout, &traffic) };
            // Stages and schedule come from the same valid plan.
            predict_step_ms(&self.cluster, &times, shape).unwrap_or(f64::INFINITY)
        };
        let longest = (0..layout.pipeline_ranks()).map(step_ms).fold(0.0, f64::max);
        Ok(longest / found.step.step_ms)
    }

    fn evaluated(
        &self,
        config: RunConfig,
        plan: &CheckedPlan,
        recording: &Recording,
    ) -> Result<Evaluated, Error> {
        let (plan, layout) = (plan.plan(), plan.layout());
        // A plan that is invalid has no memory either.
        let traffic = self.traffic_of(plan, layout, recording).unwrap_or_default();
        let step = self.step(plan, layout, &recording.work, &traffic);
        let memory = (0..layout.pipeline_ranks()).map(|rank| self.memory_of(plan, layout, recording, rank));
        let memory: Vec<MemoryBytes> = memory.collect::<Result<_, Rejection>>().unwrap_or_default();
        let lacking = match memory.is_empty() {
            true => Some(Rejection::Invalid),
            false => {
                self.lacking(layout, &memory).or_else(|| self.lacking_elsewhere(plan, layout, recording))
            }
        };
        let devices = layout.mesh.world_size();
        let work = &recording.work;
        let micro_batches = (config.batch_parts() * layout.micro_batches) as f64;
        let model_flops = micro_batches * (work.training_flops + work.attention_flops) as f64;
        let peak_of = |node: &NodeKind| {
            node.device_of(self.cluster.ranks_of_a_node(node, devices)).peak_flops(work.dtype)
        };
        let peak = self.cluster.nodes.iter().filter_map(peak_of);
        Ok(Evaluated {
            saves: self.saves_of(plan, layout, recording),
            data_stall_ms: self.data_stall_ms(layout, step.step_ms),
            plan: plan.clone(),
            step,
            memory,
            capacity_bytes: self.capacity_bytes(devices),
            fits: lacking.is_none(),
            lacking,
            tokens: (config.train.global_batch * config.train.seq_len) as u64,
            model_flops,
            hardware_flops: model_flops * (1.0 + computed_again(work)),
            devices,
            peak_tflops: peak.fold(f64::INFINITY, f64::min) / 1e12,
            knows_peak: self.cluster.name != "local",
            price_per_hour: self.price_per_hour(devices),
            config,
        })
    }

    /// Returns the predicted time of a save, whose bytes are a copy of the state that a pipeline rank holds; for other systems, of
    /// the optimizer state.
    fn saves_of(&self, plan: &Plan, layout: &StepLayout, recording: &Recording) -> Saves {
        let bytes_of = |rank: usize| {
            let stages = &layout.stages_on(rank)[..];
            if !self.traits().has_ledger {
                let (state, mesh) = (self.state_bytes(recording), &layout.mesh);
                let holding = Holding { state, mesh, zero_stage: plan.effective_zero_stage(), stages };
                let elements = |unit| recording.work.unit(unit).elements();
                return state_of(holding, elements)[MemoryCategory::Optimizer];
            }
            let whole = StatePlan { on_disk: None, ..self.state_plan(plan, layout, recording, rank) };
            let state = StatePlan { kept_copies: 0, saved_copies: 1, ..whole };
            let shard_ranks = |summing| layout.mesh.shard_ranks(summing);
            let prediction = predicted(&recording.profile, &layout.passes_of(rank), shard_ranks, &state);
            prediction.map_or(0, |prediction| prediction.by_category()[MemoryCategory::Snapshot])
        };
        let bytes = (0..layout.pipeline_ranks()).map(bytes_of).max().unwrap_or(0);
        Saves::of(&self.cluster, &layout.mesh, bytes as f64, self.config.saves_from_copies_of(plan))
    }

    fn data_stall_ms(&self, layout: &StepLayout, step_ms: f64) -> f64 {
        let sequences = self.config.train.global_batch / layout.mesh.batch_parts();
        let tokens = (sequences * self.config.train.seq_len) as f64;
        data_stall_s(&self.cluster, &layout.mesh, tokens, step_ms * 1e-3) * 1e3
    }

    fn step(
        &self,
        plan: &Plan,
        layout: &StepLayout,
        work: &ModelWork,
        traffic: &[RankTraffic],
    ) -> StepPrediction {
        // Stages and schedule come from the same valid plan.
        predict_step(&self.cluster, work, self.shape(plan.effective_zero_stage(), layout, traffic))
            .expect("costs of every stage of the schedule")
    }

    /// Returns the inputs of the step-time model for a layout.
    pub(crate) fn shape<'l>(
        &self,
        zero_stage: ZeroStage,
        layout: &'l StepLayout,
        traffic: &'l [RankTraffic],
    ) -> PlanShape<'l> {
        PlanShape {
            layout,
            zero_stage,
            gathers_once: self.config.plan.sharding.reshard_after_forward == ReshardAfterForward::Never,
            slow: None,
            traffic,
        }
    }
}

/// Returns the recomputed FLOPs as a fraction of those of forward and backward. Attention counts the full square of scores.
fn computed_again(work: &ModelWork) -> f64 {
    let (mut once, mut again) = (0.0, 0.0);
    for unit in 0..work.units() {
        let unit = work.unit(unit);
        for task in unit.forward.iter().chain(&unit.backward) {
            let flops = match task.kind {
                TaskKind::Product(product) => product.flops() as f64,
                TaskKind::Attention(attention) => 2.0 * attention.flops as f64,
                _ => continue,
            };
            if task.pass == Pass::Recompute { again += flops } else { once += flops }
        }
    }
    if once > 0.0 { again / once } else { 0.0 }
}
