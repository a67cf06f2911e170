//! A plan: how a training step is split over ranks, as a small JSON file that a planner writes, a person edits and an engine executes.
//!
//! A plan does not change what a step computes, except that it may ask for quantized collectives, which round.
//!
//! ```json
//! {
//!   "version": 1,
//!   "model": "9f2c…",
//!   "mesh": { "pipeline": 2, "shard": 2, "tensor": 2 },
//!   "micro_batch": 1,
//!   "schedule": { "kind": "zb_v", "chunks": 2 },
//!   "stages": [4, 3, 3, 4],
//!   "recompute": "selective",
//!   "sequence_parallel": true,
//!   "tensor_chunks": 4,
//!   "context_method": "ring",
//!   "zero_stage": 1,
//!   "quantize_gradients": "int8",
//!   "residence": { "optimizer": "disk", "fraction": 0.5 },
//!   "predicted": { "memory": [{ "ranks": "0-7", "bytes": { "parameters": 4096, "gradients": 4096 } }] }
//! }
//! ```
//!
//! [`Plan::check`] checks a plan against the model, the batch and the world size. It reports all problems at once, or returns a
//! [`CheckedPlan`] with the mesh and the schedule.

mod check;
mod predicted;
mod problem;
mod rank;
pub(crate) mod rules;
#[cfg(test)]
mod tests;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{
    Feedback, Quantization, QuantizedType, RecomputeRules, Residences, Sharding, SplitError, ZeroStage,
    mesh::Degrees,
    schedule::{Kind, Schedule, ScheduleError, passes_from_csv},
    split_units,
};

pub use predicted::{PlanPrediction, PlannedStep, RankList, RanksMemory};
pub use problem::{PlanError, PlanProblem, PlanProblems};
pub use rank::{CheckedPlan, Places, RankPlan, StepLayout};

/// Version of the plan file format that this program writes, and the only one that it reads.
pub const PLAN_VERSION: u32 = 1;

/// Parallelization of a training step: the contents of a plan file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Version of the file's format: [`PLAN_VERSION`].
    pub version: u32,
    /// Digest of the model that the plan is for; empty if the plan may be used with any model that fits.
    #[serde(default)]
    pub model: String,
    /// Degrees of the mesh axes; an omitted axis has degree 1.
    #[serde(default)]
    pub mesh: Degrees,
    /// Micro-batch size in sequences, per data-parallel rank; if `None`, [`Plan::micro_batch_of`] chooses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<usize>,
    /// Pipeline schedule: the order of forward and backward passes on each pipeline rank.
    #[serde(default)]
    pub schedule: PipelineSchedule,
    /// Number of units (embedding, blocks, head) of each pipeline stage, first layer first; empty to balance the stages by cost.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<usize>,
    /// Activation recomputation of each block: one word for all, or rules by layer.
    #[serde(default)]
    pub recompute: RecomputeRules,
    /// True if recomputed blocks' inputs are sharded over the tensor-parallel group (activation partitioning, `P_a` of Rajbhandari et al.
    /// 2019).
    #[serde(default, skip_serializing_if = "is_default")]
    pub partition_activations: bool,
    /// True if norms and residuals are sharded by tokens over the tensor-parallel group (sequence parallelism, Korthikanti et al. 2022).
    #[serde(default)]
    pub sequence_parallel: bool,
    /// Layout of linear layers over the tensor-parallel group. The 2D layout shards norms and residuals by tokens in any case.
    #[serde(default)]
    pub tensor_layout: TensorDimensions,
    /// Number of row chunks in which tensor-parallel collectives overlap with their GEMMs (Wang et al. 2023). If omitted, the engine
    /// chooses it by the links between the ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor_chunks: Option<usize>,
    /// Algorithm of context-parallel attention.
    #[serde(default)]
    pub context_method: ContextMethod,
    /// ZeRO stage over the shard axis (Rajbhandari et al. 2019): 0 shards nothing, 1 optimizer state, 2 gradients as well, 3 parameters
    /// as well.
    #[serde(default)]
    pub zero_stage: u8,
    /// Quantized type in which sharded weights are all-gathered (Wang et al. 2023); if omitted, their own dtype.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantize_weights: Option<QuantizedType>,
    /// Quantized type in which gradients are reduce-scattered; if omitted, f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantize_gradients: Option<QuantizedType>,
    /// Error feedback of quantized gradients; if omitted, each rank keeps its quantization error and adds it to the next gradient.
    #[serde(default, skip_serializing_if = "is_default")]
    pub quantize_feedback: Feedback,
    /// Further settings of sharded state: reshard policy, limit on unsharded parameters, secondary shards and wrapping.
    #[serde(default, skip_serializing_if = "is_default")]
    pub sharding: Sharding,
    /// Offload of optimizer state, gradients, parameters and activations; an omitted kind stays in device memory.
    #[serde(default, skip_serializing_if = "is_default")]
    pub residence: Residences,
    /// Bucket size of the gradient reduction, which overlaps with the backward pass, in MiB.
    #[serde(default = "default_bucket_mb", skip_serializing_if = "is_default_bucket")]
    pub bucket_mb: f64,
    /// Predicted memory and step time of the plan. Runs ignore it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<PlanPrediction>,
}

/// One rank, with every optional feature off.
impl Default for Plan {
    fn default() -> Self {
        Self {
            version: PLAN_VERSION,
            model: String::new(),
            mesh: Degrees::default(),
            micro_batch: None,
            schedule: PipelineSchedule::default(),
            stages: Vec::new(),
            recompute: RecomputeRules::default(),
            partition_activations: false,
            sequence_parallel: false,
            tensor_layout: TensorDimensions::default(),
            tensor_chunks: None,
            context_method: ContextMethod::default(),
            zero_stage: 0,
            quantize_weights: None,
            quantize_gradients: None,
            quantize_feedback: Feedback::default(),
            sharding: Sharding::default(),
            residence: Residences::default(),
            bucket_mb: DEFAULT_BUCKET_MB,
            predicted: None,
        }
    }
}

/// Default bucket size of the gradient reduction, in MiB.
pub const DEFAULT_BUCKET_MB: f64 = 25.0;

fn default_bucket_mb() -> f64 {
    DEFAULT_BUCKET_MB
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_default_bucket(bucket_mb: &f64) -> bool {
    *bucket_mb == DEFAULT_BUCKET_MB
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Pipeline schedule of a plan: `{ "kind": "1f1b", "chunks": 1 }` or `{ "rows": ["F0,F1,B0,B1", ...] }`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "ScheduleFields", into = "ScheduleFields")]
pub struct PipelineSchedule {
    /// Order of the forward and backward passes on each rank.
    pub passes: PassOrder,
    /// Stages per rank of a published schedule; `None` for the fewest that its kind allows.
    pub chunks: Option<usize>,
}

/// Order of the forward and backward passes on each pipeline rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum PassOrder {
    /// Order of a published schedule.
    Published(Kind),
    /// Order given by the user: rows of [`passes_from_csv`](crate::schedule::passes_from_csv), one per rank.
    Rows(Vec<String>),
}

impl Default for PassOrder {
    fn default() -> Self {
        Self::Published(Kind::OneForwardOneBackward)
    }
}

impl PipelineSchedule {
    /// Creates a published schedule with `chunks` stages on each rank.
    pub const fn published(kind: Kind, chunks: usize) -> Self {
        Self { passes: PassOrder::Published(kind), chunks: Some(chunks) }
    }

    /// Creates a schedule from a user's rows, one per rank.
    pub const fn rows(rows: Vec<String>) -> Self {
        Self { passes: PassOrder::Rows(rows), chunks: None }
    }

    /// Returns the kind of a published schedule and its stages per rank; `None` for a user's schedule.
    pub fn kind(&self) -> Option<(Kind, usize)> {
        match self.passes {
            PassOrder::Published(kind) => Some((kind, self.chunks.unwrap_or(kind.chunks().0))),
            PassOrder::Rows(_) => None,
        }
    }

    /// Returns the name for messages: that of a published schedule, or "a schedule from a file".
    pub fn name(&self) -> &'static str {
        self.kind().map_or("a schedule from a file", |(kind, _)| kind.name())
    }

    /// Returns the number of stages on all `ranks` together; `None` if the rows cannot be read or the number overflows.
    pub fn stages(&self, ranks: usize) -> Option<usize> {
        match (&self.passes, self.kind()) {
            (PassOrder::Rows(rows), _) => {
                let passes = passes_from_csv(&rows.join("\n"), ranks).ok()?;
                passes.iter().flatten().map(|pass| pass.stage.saturating_add(1)).max()
            }
            (PassOrder::Published(_), kind) => ranks.checked_mul(kind?.1),
        }
    }

    /// Generates the schedule of `ranks` pipeline ranks and `micro_batches` micro-batches.
    ///
    /// # Errors
    /// If the schedule does not work with these numbers; the error lists every problem.
    pub fn for_ranks(&self, ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
        match (&self.passes, self.kind()) {
            (PassOrder::Rows(rows), _) => passes_from_csv(&rows.join("\n"), ranks)
                .and_then(|passes| Schedule::from_passes(micro_batches, &passes)),
            (PassOrder::Published(kind), chunks) => {
                Schedule::new(*kind, ranks, micro_batches, chunks.map_or(1, |(_, chunks)| chunks))
            }
        }
    }
}

/// Serialized form of [`PipelineSchedule`].
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScheduleFields {
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<Kind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chunks: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<Vec<String>>,
}

impl TryFrom<ScheduleFields> for PipelineSchedule {
    type Error = &'static str;

    fn try_from(fields: ScheduleFields) -> Result<Self, &'static str> {
        match fields {
            ScheduleFields { kind: Some(kind), chunks, rows: None } => {
                Ok(Self { passes: PassOrder::Published(kind), chunks })
            }
            ScheduleFields { kind: None, chunks: None, rows: Some(rows) } => Ok(Self::rows(rows)),
            _ => Err("a schedule has either a kind, with its number of chunks, or rows"),
        }
    }
}

impl From<PipelineSchedule> for ScheduleFields {
    fn from(PipelineSchedule { passes, chunks }: PipelineSchedule) -> Self {
        match passes {
            PassOrder::Published(kind) => Self { kind: Some(kind), chunks, rows: None },
            PassOrder::Rows(rows) => Self { kind: None, chunks: None, rows: Some(rows) },
        }
    }
}

/// Tensor-parallel layout of linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum TensorDimensions {
    /// 1D: each weight is sharded by columns or by rows (Shoeybi et al. 2019).
    #[default]
    #[serde(rename = "1d")]
    One,
    /// 2D: the ranks form a square, and weights and activations are sharded in blocks (SUMMA: van de Geijn and Watts 1997; Xu et al.
    /// 2021).
    #[serde(rename = "2d")]
    Two,
}

/// Algorithm by which attention reads the keys and values of other context-parallel ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContextMethod {
    /// Ring attention: keys and values travel round the ranks (Liu et al. 2023). Each rank has one early and one late chunk of the
    /// sequence, which balances the causal mask.
    #[default]
    Ring,
    /// All-gather: every rank gathers all keys and values. The sequence is split as for the ring.
    AllGather,
    /// All-to-all: ranks switch from sequence shards to head shards for attention (DeepSpeed-Ulysses, Jacobs et al. 2023).
    AllToAll,
}

/// Upper limit of tokens in a micro-batch. With the limits on a model's widths it keeps the size of every tensor in 64 bits.
pub const MAX_MICRO_BATCH_TOKENS: usize = 1 << 31;

/// Facts about the optimizer step that rules need and that do not depend on the model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepFacts {
    /// Sequences of a step over all ranks: the global batch size.
    pub global_batch: usize,
    /// Sequence length in tokens.
    pub seq_len: usize,
    /// True if the optimizer needs whole matrices, as Muon does; element-wise optimizers can update any range of elements.
    pub updates_whole_matrices: bool,
    /// True if the loss scale is dynamic (f16).
    pub scales_loss: bool,
}

/// Facts about the model, the step and the world that a plan is checked against.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Digest of the model, compared with [`Plan::model`].
    pub model: String,
    /// Number of transformer blocks.
    pub layers: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Number of key/value heads.
    pub key_value_heads: usize,
    /// Hidden size: columns of the values between blocks.
    pub hidden: usize,
    /// Width of the feed-forward layers.
    pub intermediate: usize,
    /// True if keys and values are projected from a latent vector that all heads share (multi-head latent attention).
    pub has_latent_attention: bool,
    /// Vocabulary size in tokens.
    pub vocab: usize,
    /// Experts per block; 0 for a dense model.
    pub experts: usize,
    /// Width of an expert's feed-forward layer.
    pub expert_intermediate: usize,
    /// Rank of the LoRA adapter if only adapters are trained; `None` otherwise.
    pub adapter_rank: Option<usize>,
    /// Facts about the optimizer step.
    pub step: StepFacts,
    /// World size: number of ranks of the run.
    pub world_size: usize,
}

impl Facts {
    /// Returns the number of units that stages consist of: the embedding, the blocks and the head.
    pub const fn units(&self) -> usize {
        self.layers.saturating_add(2)
    }
}

impl Plan {
    /// Parses a plan file. Only the syntax and the version are checked; [`Plan::check`] checks the rest.
    pub fn from_json(text: &str) -> Result<Self, PlanError> {
        /// Only the version: files of later versions may have fields that this program does not know.
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let Version { version } = serde_json::from_str(text)?;
        match rules::version(version) {
            Some(what) => Err(PlanProblems(vec![PlanProblem { fields: &["version"], what }]).into()),
            None => Ok(serde_json::from_str(text)?),
        }
    }

    /// Returns the contents of a plan file.
    pub fn to_json(&self) -> Result<String, PlanError> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// Returns the plan with every open choice made: model digest, micro-batch size, schedule chunks, and stages balanced by the units'
    /// `costs`.
    ///
    /// # Errors
    /// If there are more stages than units.
    pub fn resolved(&self, facts: &Facts, costs: impl FnOnce() -> Vec<f64>) -> Result<Self, SplitError> {
        let ranks = self.mesh.pipeline;
        let schedule = self.schedule.clone();
        let chunks = schedule.kind().map(|(_, chunks)| chunks);
        let stages = match (&schedule.passes, ranks) {
            _ if !self.stages.is_empty() => self.stages.clone(),
            (_, 1) => vec![facts.units()],
            (PassOrder::Published(kind), _) => split_units(*kind, &costs(), ranks, chunks.unwrap_or(1))?,
            (PassOrder::Rows(_), _) => {
                // `Plan::check` reports what is wrong with the rows.
                let stages = schedule.stages(ranks).unwrap_or(ranks);
                split_units(Kind::OneForwardOneBackward, &costs(), stages, 1)?
            }
        };
        let Quantization { weights, gradients, .. } = self.quantization();
        Ok(Self {
            model: facts.model.clone(),
            micro_batch: Some(self.micro_batch_of(facts.step.global_batch)),
            schedule: PipelineSchedule { chunks, ..schedule },
            stages,
            zero_stage: self.effective_zero_stage().number(),
            quantize_weights: weights,
            quantize_gradients: gradients,
            ..self.clone()
        })
    }

    /// Returns the micro-batch size in sequences for a global batch. If the plan has none, it is the largest divisor, up to 8, of a
    /// data-parallel rank's batch. A 2D tensor layout prefers a multiple of the square's side, so that each row of ranks has whole
    /// sequences.
    pub fn micro_batch_of(&self, global_batch: usize) -> usize {
        let batch = global_batch / self.mesh.replicate.saturating_mul(self.mesh.shard).max(1);
        let rows = match self.tensor_layout {
            TensorDimensions::One => 1,
            TensorDimensions::Two => self.mesh.tensor.isqrt(),
        };
        let divisors = || (1..=8).rev().filter(|&candidate| batch.is_multiple_of(candidate));
        let default = || divisors().find(|candidate| candidate.is_multiple_of(rows)).or(divisors().next());
        self.micro_batch.or_else(default).unwrap_or(1)
    }

    /// Returns the ZeRO stage that takes effect: [`ZeroStage::Nothing`] if shard and context degree are both 1.
    pub fn effective_zero_stage(&self) -> ZeroStage {
        let owners = self.mesh.shard.saturating_mul(self.mesh.context);
        let stage = if owners > 1 { usize::from(self.zero_stage) } else { 0 };
        ZeroStage::from_number(stage).unwrap_or_default()
    }

    /// Returns the quantized types of collectives within a shard group; none if state is not sharded.
    pub fn quantization(&self) -> Quantization {
        let is_sharded = self.effective_zero_stage() > ZeroStage::Nothing;
        Quantization {
            weights: self.quantize_weights.filter(|_| is_sharded),
            gradients: self.quantize_gradients.filter(|_| is_sharded),
            feedback: self.quantize_feedback,
        }
    }

    /// Returns [`Plan::bucket_mb`] in bytes.
    pub fn bucket_bytes(&self) -> usize {
        (self.bucket_mb * f64::from(1 << 20)) as usize
    }

    /// Returns the range of units of each stage, from [`Plan::stages`].
    pub fn unit_ranges(&self) -> Vec<Range<usize>> {
        let mut next = 0_usize;
        let range = |&units: &usize| {
            let start = next;
            next = next.saturating_add(units);
            start..next
        };
        self.stages.iter().map(range).collect()
    }
}
