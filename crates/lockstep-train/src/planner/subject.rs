//! What a candidate of the search comes to: a configuration, its memory on every rank and its step.

use std::ops::Range;
use std::rc::Rc;

use lockstep_plan::cluster::{Cluster, NodeKind, Software};
use lockstep_plan::gathering::{RankPasses, TooFewLive};
use lockstep_plan::predict::{
    Failures, Goodput, PlanShape, Saves, SlowDevice, StepPrediction, TimedModel, data_stall_s, predict_step,
    predict_step_ms, slowest_kind,
};
use lockstep_plan::schedule::{Kind, Schedule};
use lockstep_plan::search::{Candidate, Rejection};
use lockstep_plan::work::{Labor, ModelWork, Pass};
use lockstep_plan::{
    Axis, MemoryBytes, MemoryCategory, Mesh, Offload, Plan, PlanPrediction, PlannedStep, RankTraffic,
    RanksMemory, Recompute, Residence, Residences, StageMemory, StatePlan, WINDOW_ELEMENTS, ZeroStage,
    offload_traffic_by_kind, offloaded_bytes, predicted, split_quickly,
};

use crate::config::ReshardAfterForward;
use crate::forecast::Training;
use crate::planner::Planner;
use crate::planner::bounds::shortened;
use crate::planner::memory::{Holding, memory_elsewhere, state_of};
use crate::planner::recordings::{Recording, kept_elsewhere};
use crate::{Error, RunConfig, plan};

/// What of memory a plan may count on: the rest is the driver's or the system's, and lost between blocks.
pub(super) const USABLE: f64 = 0.94;

/// Seconds until a node that failed is noticed and replaced.
const REPLACEMENT_S: f64 = 300.0;

/// A plan, and what it comes to.
#[derive(Debug, Clone)]
pub struct Evaluated {
    /// The run with the plan in its keys.
    pub config: RunConfig,
    /// The plan as a file has it.
    pub plan: Plan,
    /// Its step.
    pub step: StepPrediction,
    /// What a save takes.
    pub saves: Saves,
    /// Milliseconds that each step waits for its sequences.
    pub data_stall_ms: f64,
    /// What each rank of the pipeline books, from the first stage on; all other ranks with the same coordinate book as much.
    pub memory: Vec<MemoryBytes>,
    /// What each may book: of a host the rank's share of it.
    pub capacity_bytes: u64,
    /// Whether every rank fits.
    pub fits: bool,
    /// What a rank lacks, if it does not.
    pub lacking: Option<Rejection>,
    /// Tokens of a step.
    pub tokens: u64,
    /// Floating-point operations of a step of the model, the whole square of scores counted, as published figures do.
    pub model_flops: f64,
    /// The same with what is computed again.
    pub hardware_flops: f64,
    /// Devices.
    pub devices: usize,
    /// 10¹² operations a second that a device could do at best, in the run's type.
    pub peak_tflops: f64,
    /// Whether that is known, and not a guess for a machine that nobody has measured.
    pub knows_peak: bool,
    /// Dollars an hour of all nodes, if that is known.
    pub price_per_hour: Option<f64>,
}

impl Evaluated {
    /// 10¹² operations a second of each device, without what is computed again.
    pub fn tflops_per_device(&self) -> f64 {
        self.model_flops / (self.step.step_ms * 1e-3) / self.devices as f64 / 1e12
    }

    /// The same with it.
    pub fn hardware_tflops_per_device(&self) -> f64 {
        self.hardware_flops / (self.step.step_ms * 1e-3) / self.devices as f64 / 1e12
    }

    /// Model FLOP/s as a share of the peak; none where that is a guess.
    pub fn mfu(&self) -> Option<f64> {
        self.knows_peak.then(|| self.tflops_per_device() / self.peak_tflops)
    }

    /// Tokens a second.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / (self.step.step_ms * 1e-3)
    }

    /// The rank of the pipeline that books most, and what.
    pub fn largest(&self) -> (usize, MemoryBytes) {
        let by_total = self.memory.iter().enumerate().rev().max_by_key(|(_, memory)| memory.total());
        by_total.map_or((0, MemoryBytes::default()), |(rank, memory)| (rank, *memory))
    }

    /// What a plan file says of the step.
    pub fn planned_step(&self, cluster: &Cluster) -> PlannedStep {
        let step = &self.step;
        PlannedStep {
            cluster: cluster.name.clone(),
            step_ms: step.step_ms,
            compute_ms: step.work_ms + step.update_ms,
            exposed_ms: step.exposed_ms(),
            bubble_ms: step.bubble_ms,
            host_ms: step.host_ms,
            disk_ms: step.disk_ms,
            tokens_per_s: self.tokens_per_s(),
            mfu: self.mfu(),
            price_per_billion_tokens: self.price_per_billion_tokens(),
        }
    }

    /// The plan, with what it is predicted to come to.
    pub fn plan_with_prediction(&self, cluster: &Cluster) -> Plan {
        let of_a_stage = self.devices / self.memory.len().max(1);
        let memory = self.memory.iter().enumerate().map(|(rank, bytes)| RanksMemory {
            ranks: (rank * of_a_stage..(rank + 1) * of_a_stage).collect(),
            bytes: *bytes,
        });
        let predicted = PlanPrediction { memory: memory.collect(), step: Some(self.planned_step(cluster)) };
        Plan { predicted: Some(predicted), ..self.plan.clone() }
    }

    /// Dollars for 10⁹ tokens, if that is known.
    pub fn price_per_billion_tokens(&self) -> Option<f64> {
        Some(self.price_per_step()? / self.tokens as f64 * 1e9)
    }

    /// What failures leave of the time, if the state is saved as often as is best. After a failure as much is read as was written, beside the
    /// minutes until a node is replaced; and what is lost began when the copy was made whose writing has come to an end.
    pub fn goodput(&self, cluster: &Cluster) -> Goodput {
        let written_s = self.saves.least_interval_s();
        let restart_s = REPLACEMENT_S + self.saves.write_s + written_s;
        // Nothing is saved within a step.
        let least_s = written_s.max(self.step.step_ms * 1e-3);
        Failures::of(cluster, self.saves.stall_s(f64::INFINITY), restart_s).goodput(least_s)
    }

    /// What steps wait for each save, in milliseconds; where the run saves at its end only, for one that follows no other soon.
    pub fn save_ms(&self) -> f64 {
        let between_s = match self.config.checkpoint.every {
            0 => f64::INFINITY,
            every => every as f64 * self.step.step_ms * 1e-3,
        };
        self.saves.stall_s(between_s) * 1e3
    }

    /// Bytes of a checkpoint: those of all ranks of a replica.
    pub fn saved_bytes(&self) -> f64 {
        let replicas = self.plan.mesh.replicate.max(1);
        self.saves.bytes * (self.devices / replicas) as f64
    }

    /// The same for each of the steps between two; none where the run saves at its end only.
    pub fn save_stall_ms(&self) -> Option<f64> {
        let every = self.config.checkpoint.every;
        (every > 0).then(|| self.save_ms() / every as f64)
    }

    /// Dollars of a step, if that is known.
    pub fn price_per_step(&self) -> Option<f64> {
        self.price_per_hour.map(|price| price * self.step.step_ms / 3.6e6)
    }
}

/// A configuration's layout.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub(super) mesh: Mesh,
    pub(super) schedule: Option<Rc<Schedule>>,
    pub(super) stages: Vec<Range<usize>>,
    pub(super) micro_batches: usize,
}

impl Layout {
    pub(super) fn of_rank(&self, rank: usize, units: usize) -> Vec<StageMemory> {
        match &self.schedule {
            Some(schedule) => StageMemory::of_rank(schedule, &self.stages, rank),
            None => vec![StageMemory::whole(units)],
        }
    }

    /// The passes of a rank that has these stages.
    fn passes<'l>(&'l self, rank: usize, stages: &'l [StageMemory]) -> RankPasses<'l> {
        let pipeline = self.schedule.as_deref().map(|schedule| (schedule, rank));
        RankPasses { stages, pipeline, micro_batches: self.micro_batches }
    }

    pub(super) fn stages_of(&self, rank: usize) -> Vec<usize> {
        self.schedule.as_ref().map_or_else(|| vec![0], |schedule| schedule.stages_of(rank).collect())
    }

    pub(super) fn pipeline_ranks(&self) -> usize {
        self.mesh.ranks().degree(Axis::Pipeline)
    }
}

impl Planner {
    /// What the plan comes to that a configuration's keys describe.
    ///
    /// # Errors
    /// A configuration that does not fit the model, more ranks than devices.
    pub fn evaluate(&mut self, config: &RunConfig) -> Result<Evaluated, Error> {
        let (plan, layout) = self.described(config)?;
        let recording = self.recording_of(config, &layout.mesh);
        self.evaluated(config.clone(), plan, &layout, &recording)
    }

    /// The plan that a configuration's keys describe.
    pub(super) fn described(&self, config: &RunConfig) -> Result<(Plan, Layout), Error> {
        let (plan, valid) = plan::valid_plan(config, &self.model.config, &self.model.tuning)?;
        let mesh = valid.mesh;
        let is_pipeline = mesh.ranks().degree(Axis::Pipeline) > 1;
        let layout = Layout {
            mesh,
            schedule: is_pipeline.then(|| Rc::new(valid.schedule)),
            stages: valid.stages,
            micro_batches: config.accumulation_steps(),
        };
        Ok((plan, layout))
    }

    /// The time of a plan's step as a multiple of what was predicted, if one device comes to a share of its speed, wherever in the pipeline
    /// that costs most.
    ///
    /// # Errors
    /// A plan that does not fit its model.
    pub fn with_slow_device(&mut self, found: &Evaluated, speed: f64) -> Result<f64, Error> {
        let config = &found.config;
        let (_, layout) = self.described(config)?;
        let recording = self.recording_of(config, &layout.mesh);
        let times = TimedModel::new(&self.cluster, &recording.work, &layout.mesh);
        let traffic = self.traffic_of(config, &layout, &recording).unwrap_or_default();
        let step_ms = |pipeline_rank: usize| {
            let slow = Some(SlowDevice { pipeline_rank, speed });
            let shape = PlanShape { slow, ..self.shape(config.zero_stage(), &layout, &traffic) };
            // The stages are those of the schedule, as above.
            predict_step_ms(&self.cluster, &times, shape).unwrap_or(f64::INFINITY)
        };
        let longest = (0..layout.pipeline_ranks()).map(step_ms).fold(0.0, f64::max);
        Ok(longest / found.step.step_ms)
    }

    fn evaluated(
        &self,
        config: RunConfig,
        plan: Plan,
        layout: &Layout,
        recording: &Recording,
    ) -> Result<Evaluated, Error> {
        // What cannot be has no memory either.
        let traffic = self.traffic_of(&config, layout, recording).unwrap_or_default();
        let step = self.step(&config, layout, &recording.work, &traffic);
        let memory =
            (0..layout.pipeline_ranks()).map(|rank| self.memory_of(&config, layout, recording, rank));
        let memory: Vec<MemoryBytes> = memory.collect::<Result<_, Rejection>>().unwrap_or_default();
        let lacking = match memory.is_empty() {
            true => Some(Rejection::Invalid),
            false => {
                self.lacking(layout, &memory).or_else(|| self.lacking_elsewhere(&config, layout, recording))
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
            saves: self.saves_of(&config, layout, recording),
            data_stall_ms: self.data_stall_ms(&config, layout, step.step_ms),
            plan,
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

    /// What a save takes of what each rank of the pipeline writes: what a copy of it takes, of other systems the optimizer's state.
    fn saves_of(&self, config: &RunConfig, layout: &Layout, recording: &Recording) -> Saves {
        let bytes_of = |rank: usize| {
            let stages = &layout.of_rank(rank, recording.work.units())[..];
            if self.cluster.software != Software::Lockstep {
                let (state, mesh) = (self.state_bytes(recording), &layout.mesh);
                let holding = Holding { state, mesh, zero_stage: config.zero_stage(), stages };
                let elements = |unit| recording.work.unit(unit).elements();
                return state_of(holding, elements)[MemoryCategory::Optimizer];
            }
            let whole = StatePlan { on_disk: None, ..self.state_plan(config, layout, recording, rank) };
            let state = StatePlan { kept_copies: 0, saved_copies: 1, ..whole };
            let shard_ranks = |summing| layout.mesh.shard_ranks(summing);
            let prediction = predicted(&recording.profile, layout.passes(rank, stages), shard_ranks, &state);
            prediction.map_or(0, |prediction| prediction.by_category()[MemoryCategory::Snapshot])
        };
        let bytes = (0..layout.pipeline_ranks()).map(bytes_of).max().unwrap_or(0);
        Saves::of(&self.cluster, &layout.mesh, bytes as f64, config.saves_from_copies())
    }

    fn data_stall_ms(&self, config: &RunConfig, layout: &Layout, step_ms: f64) -> f64 {
        let sequences = config.train.global_batch / config.batch_parts().max(1);
        let tokens = (sequences * config.train.seq_len) as f64;
        data_stall_s(&self.cluster, &layout.mesh, tokens, step_ms * 1e-3) * 1e3
    }

    fn step(
        &self,
        config: &RunConfig,
        layout: &Layout,
        work: &ModelWork,
        traffic: &[RankTraffic],
    ) -> StepPrediction {
        // The stages are those of the schedule: both come from one valid plan.
        predict_step(&self.cluster, work, self.shape(config.zero_stage(), layout, traffic))
            .expect("costs of every stage of the schedule")
    }

    /// What the time of a layout depends on.
    pub(super) fn shape<'l>(
        &self,
        zero_stage: ZeroStage,
        layout: &'l Layout,
        traffic: &'l [RankTraffic],
    ) -> PlanShape<'l> {
        PlanShape {
            mesh: &layout.mesh,
            zero_stage,
            micro_batches: layout.micro_batches,
            schedule: layout.schedule.as_deref(),
            stages: &layout.stages,
            gathers_once: self.config.parallel.reshard_after_forward == ReshardAfterForward::Never,
            slow: None,
            traffic,
        }
    }
}

impl Planner {
    /// A candidate's keys; what they do not say is the run's.
    pub(super) fn keys_of(&self, candidate: &Candidate) -> RunConfig {
        let mut config = self.config.clone();
        let Candidate {
            degrees,
            zero_stage,
            micro_batch,
            sequence_parallel,
            context_method,
            schedule: (kind, chunks),
            recompute: _,
            offload,
        } = *candidate;
        config.train.micro_batch = Some(micro_batch);
        let parallel = &mut config.parallel;
        parallel.data_parallel_replicate = degrees.replicate;
        parallel.data_parallel_shard = degrees.shard;
        parallel.zero_stage = usize::from(zero_stage.number());
        parallel.tensor_parallel = degrees.tensor;
        parallel.sequence_parallel = sequence_parallel;
        parallel.context_parallel = degrees.context;
        parallel.context_parallel_method = context_method.into();
        parallel.expert_parallel = degrees.expert;
        parallel.expert_tensor_parallel = degrees.expert_tensor;
        parallel.pipeline_parallel = degrees.pipeline;
        parallel.pipeline_schedule = kind.name().to_owned();
        parallel.virtual_stages = (degrees.pipeline > 1).then_some(chunks);
        parallel.pipeline_stages = None;
        if !offload.is_nothing() {
            let Offload { optimizer, gradients, parameters, activations } = offload;
            parallel.offload_optimizer = optimizer.into();
            parallel.offload_gradients = gradients.into();
            parallel.offload_parameters = parameters.into();
            parallel.offload_activations = activations.into();
        }
        config
    }

    /// The layout of a candidate whose stages take as long as each other; of a long schedule as many micro-batches as show how it goes on.
    pub(super) fn laid_out(
        &mut self,
        candidate: &Candidate,
        count: usize,
        times: &TimedModel,
    ) -> Option<Layout> {
        let mesh = Mesh::new(candidate.degrees).ok()?;
        let micro_batches = candidate.micro_batches(self.config.train.global_batch);
        let (kind, chunks) = candidate.schedule;
        let ranks = candidate.degrees.pipeline;
        if ranks == 1 {
            let stages = std::iter::once(0..times.units()).collect();
            return Some(Layout { mesh, schedule: None, stages, micro_batches });
        }
        let micro_batches = shortened(kind, ranks, micro_batches);
        let schedule = self.schedule(kind, ranks, micro_batches, chunks)?;
        let stages = self.stages(candidate, &mesh, count, times, &schedule)?;
        Some(Layout { mesh, schedule: Some(schedule), stages, micro_batches })
    }

    /// The stages of a pipeline that take as long as each other, each on the slowest of its nodes, where so many blocks forget what the
    /// candidate says.
    fn stages(
        &mut self,
        candidate: &Candidate,
        mesh: &Mesh,
        count: usize,
        times: &TimedModel,
        schedule: &Schedule,
    ) -> Option<Vec<Range<usize>>> {
        let stages = schedule.stages();
        let forgotten = if count == 0 { Recompute::None } else { candidate.recompute };
        // Where all nodes are alike it does not matter which rank has which stage.
        let is_v = self.cluster.nodes.len() > 1 && candidate.schedule.0.is_v_shaped();
        let key = (self.pass_key(candidate), forgotten, count, stages, is_v);
        if let Some(known) = self.cuts.get(&key) {
            return known.clone();
        }
        let of_kind = |kind: usize| -> Vec<f64> {
            let seconds = times.unit_seconds(kind);
            seconds.iter().map(|[forward, backward]| forward + backward).collect()
        };
        let costs: Vec<Vec<f64>> = (0..self.cluster.nodes.len()).map(of_kind).collect();
        let kind = |rank: usize| slowest_kind(&self.cluster, mesh, times.dtype(), rank);
        let kinds: Vec<usize> = (0..candidate.degrees.pipeline).map(kind).collect();
        let of_stage = |stage: usize| costs[kinds[schedule.rank_of(stage)]].as_slice();
        let cut = split_quickly(of_stage, times.units(), stages).map(|units| {
            let stage = |end: &mut usize, units: usize| {
                let start = *end;
                *end += units;
                Some(start..*end)
            };
            units.into_iter().scan(0, stage).collect::<Vec<_>>()
        });
        self.cuts.insert(key, cut.clone());
        cut
    }

    pub(super) fn schedule(
        &mut self,
        kind: Kind,
        ranks: usize,
        micro_batches: usize,
        chunks: usize,
    ) -> Option<Rc<Schedule>> {
        let key = (kind, ranks, micro_batches, chunks);
        if let Some(known) = self.schedules.get(&key) {
            return known.clone();
        }
        let schedule = Schedule::published(kind, ranks, micro_batches, chunks).ok().map(Rc::new);
        self.schedules.insert(key, schedule.clone());
        schedule
    }

    /// What a rank of the pipeline books.
    pub(super) fn memory_of(
        &self,
        config: &RunConfig,
        layout: &Layout,
        recording: &Recording,
        rank: usize,
    ) -> Result<MemoryBytes, Rejection> {
        let stages = layout.of_rank(rank, recording.work.units());
        if self.cluster.software != Software::Lockstep {
            let Recording { work, .. } = recording;
            let (state, mesh) = (self.state_bytes(recording), &layout.mesh);
            let holding = Holding { state, mesh, zero_stage: config.zero_stage(), stages: &stages };
            let elements = |unit| work.unit(unit).elements();
            let forgotten = |unit: usize| config.parallel.recompute.of(unit.saturating_sub(1));
            let kept = |unit| kept_elsewhere(work, unit, forgotten(unit), self.cluster.software);
            return Ok(memory_elsewhere(holding, elements, kept));
        }
        let state = self.state_plan(config, layout, recording, rank);
        let shard_ranks = |summing| layout.mesh.shard_ranks(summing);
        let prediction = predicted(&recording.profile, layout.passes(rank, &stages), shard_ranks, &state);
        let prediction = prediction.map_err(|_| Rejection::Invalid)?;
        // A device gives what is booked; a host's system gives pages when they are first written.
        Ok(if self.is_host() { prediction.touched() } else { prediction.by_category() })
    }

    /// Residences of a configuration's state on these machines: for ranks on CPUs host memory is their own.
    pub(super) fn residences_of(&self, config: &RunConfig) -> Residences {
        let residences = config.residences();
        if self.is_host() { residences.on_cpu() } else { residences }
    }

    /// Whether a configuration offloads anything on these machines.
    fn offloads(&self, config: &RunConfig) -> bool {
        self.cluster.software == Software::Lockstep && self.residences_of(config).offload_anything()
    }

    /// The recording of a configuration whose blocks recompute by its rules.
    pub(super) fn recording_of(&mut self, config: &RunConfig, mesh: &Mesh) -> Rc<Recording> {
        let (rules, software) = (config.parallel.recompute, self.cluster.software);
        self.recordings.by_layer(config, &self.model, mesh, &rules, software)
    }

    /// Traffic of offloaded state of each pipeline rank in a step; empty if nothing is offloaded.
    pub(super) fn traffic_of(
        &self,
        config: &RunConfig,
        layout: &Layout,
        recording: &Recording,
    ) -> Result<Vec<RankTraffic>, Rejection> {
        if !self.offloads(config) {
            return Ok(Vec::new());
        }
        let Residences { optimizer, activations, .. } = self.residences_of(config);
        let of_rank = |rank: usize| {
            let stages = layout.of_rank(rank, recording.work.units());
            let state = self.state_plan(config, layout, recording, rank);
            let shard_ranks = |summing| layout.mesh.shard_ranks(summing);
            let passes = layout.passes(rank, &stages);
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
        let traffic = (0..layout.pipeline_ranks()).map(of_rank).collect::<Result<_, TooFewLive>>();
        traffic.map_err(|_| Rejection::Invalid)
    }

    /// What the offloaded state and activations of a plan lack room for, in host memory or on disk.
    pub(super) fn lacking_elsewhere(
        &self,
        config: &RunConfig,
        layout: &Layout,
        recording: &Recording,
    ) -> Option<Rejection> {
        if !self.offloads(config) {
            return None;
        }
        let ranks = layout.mesh.world_size();
        let Residences { optimizer, activations, .. } = self.residences_of(config);
        let of_rank = |rank: usize| {
            let stages = layout.of_rank(rank, recording.work.units());
            let state = self.state_plan(config, layout, recording, rank);
            let shard_ranks = |summing| layout.mesh.shard_ranks(summing);
            offloaded_bytes(&recording.profile, layout.passes(rank, &stages), shard_ranks, &state)
        };
        let held: Vec<[u64; 2]> = (0..layout.pipeline_ranks()).map(of_rank).collect();
        [Residence::Host, Residence::Disk].into_iter().find_map(|place| {
            let of_kind = |bytes: u64, residence| if residence == place { bytes } else { 0 };
            let of_rank = |[state, kept]: &[u64; 2]| of_kind(*state, optimizer) + of_kind(*kept, activations);
            let needed = held.iter().map(of_rank).max().unwrap_or(0);
            let available = self.room_bytes(place, ranks) as u64;
            (needed > available).then_some(Rejection::Room { place, needed, available })
        })
    }

    /// How a rank of the pipeline keeps its state.
    fn state_plan(
        &self,
        config: &RunConfig,
        layout: &Layout,
        recording: &Recording,
        rank: usize,
    ) -> StatePlan {
        let mut state = recording.state.clone();
        let residences = self.residences_of(config);
        state.on_disk = residences.offload_plan(WINDOW_ELEMENTS);
        state.has_activations_on_disk = residences.activations != Residence::Memory;
        state.zero_stage = config.zero_stage();
        state.replicas = layout.mesh.ranks().degree(Axis::Replicate);
        let options = crate::engine_options(config);
        state.micro_batches = options.micro_batches * layout.mesh.ranks().degree(Axis::Context);
        let of_a_stage = layout.mesh.world_size() / layout.pipeline_ranks();
        let copies = Training::of(config).copies(&layout.mesh, rank * of_a_stage, config.zero_stage());
        // Copies of an accelerator's state are in host memory.
        let is_here = usize::from(self.is_host());
        (state.kept_copies, state.saved_copies) = (is_here * copies.kept, is_here * copies.saved);
        state
    }

    /// What a rank may book.
    pub(super) fn capacity_bytes(&self, ranks: usize) -> u64 {
        let of_node = |node: &NodeKind| {
            let bytes = match node.device.is_host {
                true => node.host_memory_bytes / (ranks.min(node.devices).max(1) as u64),
                false => node.device.memory_bytes,
            };
            (bytes as f64 * USABLE) as u64
        };
        self.cluster.nodes.iter().map(of_node).min().unwrap_or(0)
    }

    /// The stage that lacks memory, and how much it needs and has; of a host all ranks share what there is.
    pub(super) fn lacking(&self, layout: &Layout, memory: &[MemoryBytes]) -> Option<Rejection> {
        let ranks = layout.mesh.world_size();
        let available = self.capacity_bytes(ranks);
        let most = |bytes: MemoryBytes| {
            bytes
                .entries()
                .max_by_key(|(_, bytes)| *bytes)
                .map_or(MemoryCategory::Activations, |(most, _)| most)
        };
        if self.is_host() {
            let mean =
                memory.iter().copied().sum::<MemoryBytes>().total() as u64 / memory.len().max(1) as u64;
            let (stage, largest) =
                memory.iter().copied().enumerate().max_by_key(|(_, bytes)| bytes.total())?;
            return (mean > available).then(|| Rejection::Memory {
                stage,
                needed: mean,
                available,
                most: most(largest),
            });
        }
        let (stage, largest) =
            memory.iter().copied().enumerate().rev().max_by_key(|(_, bytes)| bytes.total())?;
        let needed = largest.total() as u64;
        (needed > available).then(|| Rejection::Memory { stage, needed, available, most: most(largest) })
    }

    pub(super) fn price_per_hour(&self, devices: usize) -> Option<f64> {
        let mut left = devices;
        let mut price = 0.0;
        for node in &self.cluster.nodes {
            let nodes = left.div_ceil(node.devices.max(1)).min(node.count);
            price += node.price_per_hour? * nodes as f64;
            left = left.saturating_sub(nodes * node.devices);
        }
        Some(price)
    }
}

/// What is computed again, as a share of all products of a forward and a backward, the whole square of scores counted.
fn computed_again(work: &ModelWork) -> f64 {
    let (mut once, mut again) = (0.0, 0.0);
    for unit in 0..work.units() {
        let unit = work.unit(unit);
        for task in unit.forward.iter().chain(&unit.backward) {
            let flops = match task.labor {
                Labor::Product(product) => product.flops() as f64,
                Labor::Attention(attention) => 2.0 * attention.flops as f64,
                _ => continue,
            };
            if task.pass == Pass::Recompute { again += flops } else { once += flops }
        }
    }
    if once > 0.0 { again / once } else { 0.0 }
}
