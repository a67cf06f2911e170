//! A plan: everything about how a training step is split over ranks, as a small JSON file.
//!
//! A planner writes it, a person edits and compares it, an engine executes it. Nothing in it changes what is computed, but for the loss
//! of what is quantized on its way, where a plan asks for that.
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
//! [`Plan::check`] compares it with the model and the batch and tells all problems at once, or gives the mesh and the
//! schedule, which exist only if they are right.

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

/// The version of plan files that this program writes, and the only one that it reads.
pub const PLAN_VERSION: u32 = 1;

/// How a training step is split over ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Version of the file's format: [`PLAN_VERSION`].
    pub version: u32,
    /// Digest of the model that the plan is for; empty for whatever model it fits.
    #[serde(default)]
    pub model: String,
    /// The degrees of the mesh; what is not said is 1.
    #[serde(default)]
    pub mesh: Degrees,
    /// Sequences of a micro-batch, for each part of the batch; `None` for [`Plan::micro_batch_of`] a global batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<usize>,
    /// What the ranks of a pipeline do in which order.
    #[serde(default)]
    pub schedule: PipelineSchedule,
    /// How many of the model's units (embedding, blocks, head) each stage of the pipeline has, from the first layer on; empty for stages that
    /// cost as much as each other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<usize>,
    /// What each block computes again in its backward: a word, or rules by layer.
    #[serde(default)]
    pub recompute: RecomputeRules,
    /// Whether ranks of the tensor axis keep a slice each of the inputs of blocks that forget everything else (Rajbhandari et al. 2019).
    #[serde(default, skip_serializing_if = "is_default")]
    pub partition_activations: bool,
    /// Whether norms and residuals are split over the tensor axis, along the sequence (Korthikanti et al. 2022).
    #[serde(default)]
    pub sequence_parallel: bool,
    /// How the ranks of the tensor axis share each linear layer. In two dimensions norms and residuals are split along the
    /// sequence in any case.
    #[serde(default)]
    pub tensor_layout: TensorDimensions,
    /// Chunks of rows in which tensor-parallel ranks exchange values beside their products (Wang et al. 2023); left out, as many as
    /// suit what lies between the ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor_chunks: Option<usize>,
    /// How attention reaches the other parts of a sequence.
    #[serde(default)]
    pub context_method: ContextMethod,
    /// What is sharded over the shard axis (Rajbhandari et al. 2019): 0 nothing, 1 optimizer state, 2 gradients as well,
    /// 3 parameters as well.
    #[serde(default)]
    pub zero_stage: u8,
    /// In what weights are gathered that the shard axis shares out (Wang et al. 2023); left out, as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantize_weights: Option<QuantizedType>,
    /// In what gradients go to the ranks that own them; left out, in f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantize_gradients: Option<QuantizedType>,
    /// What becomes of what gradients lose to it; left out, it is kept.
    #[serde(default, skip_serializing_if = "is_default")]
    pub quantize_feedback: Feedback,
    /// How the parameters are.
    #[serde(default, skip_serializing_if = "is_default")]
    pub sharding: Sharding,
    /// What is on disk: state of the optimizer, gradients, parameters, activations; what is not said is in memory.
    #[serde(default, skip_serializing_if = "is_default")]
    pub residence: Residences,
    /// MiB of gradients that are summed over the ranks at once, while the backward goes on.
    #[serde(default = "default_bucket_mb", skip_serializing_if = "is_default_bucket")]
    pub bucket_mb: f64,
    /// What the plan was predicted to come to; no run follows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<PlanPrediction>,
}

/// One rank, and nothing that is not needed for it.
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

/// MiB of gradients that are summed at once, where nobody says otherwise.
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

/// The schedule of a plan's pipeline: `{ "kind": "1f1b", "chunks": 1 }` or `{ "rows": ["F0,F1,B0,B1", ...] }`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "ScheduleFields", into = "ScheduleFields")]
pub struct PipelineSchedule {
    /// Order of the passes on each rank.
    pub passes: PassOrder,
    /// Stages on each rank of a published schedule; `None` for the fewest that its kind takes.
    pub chunks: Option<usize>,
}

/// The order of the passes on each rank of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum PassOrder {
    /// That of a published schedule.
    Published(Kind),
    /// The rows of [`passes_from_csv`](crate::schedule::passes_from_csv), one for each rank.
    Rows(Vec<String>),
}

impl Default for PassOrder {
    fn default() -> Self {
        Self::Published(Kind::OneForwardOneBackward)
    }
}

impl PipelineSchedule {
    /// A published schedule with so many stages on each rank.
    pub const fn published(kind: Kind, chunks: usize) -> Self {
        Self { passes: PassOrder::Published(kind), chunks: Some(chunks) }
    }

    /// A user's schedule: a row for each rank.
    pub const fn rows(rows: Vec<String>) -> Self {
        Self { passes: PassOrder::Rows(rows), chunks: None }
    }

    /// The kind of a published schedule, and its stages on each rank; `None` for a user's.
    pub fn kind(&self) -> Option<(Kind, usize)> {
        match self.passes {
            PassOrder::Published(kind) => Some((kind, self.chunks.unwrap_or(kind.chunks().0))),
            PassOrder::Rows(_) => None,
        }
    }

    /// The name of a published schedule, in messages also that of a user's.
    pub fn name(&self) -> &'static str {
        self.kind().map_or("a schedule from a file", |(kind, _)| kind.name())
    }

    /// Stages of all `ranks`; `None` if they cannot be counted.
    pub fn stages(&self, ranks: usize) -> Option<usize> {
        match (&self.passes, self.kind()) {
            (PassOrder::Rows(rows), _) => {
                let passes = passes_from_csv(&rows.join("\n"), ranks).ok()?;
                passes.iter().flatten().map(|pass| pass.stage.saturating_add(1)).max()
            }
            (PassOrder::Published(_), kind) => ranks.checked_mul(kind?.1),
        }
    }

    /// The lists of `ranks` for a step of so many micro-batches.
    ///
    /// # Errors
    /// Everything that is wrong with it for these numbers.
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

/// [`PipelineSchedule`] as it stands in a file.
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

/// How the ranks of the tensor axis share the linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum TensorDimensions {
    /// As a row, by columns or by rows of each weight (Shoeybi et al. 2019).
    #[default]
    #[serde(rename = "1d")]
    One,
    /// As a square, by blocks of weights and activations (SUMMA: van de Geijn and Watts 1997; Xu et al. 2021).
    #[serde(rename = "2d")]
    Two,
}

/// How attention reaches the parts of a sequence that other ranks of the context axis hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContextMethod {
    /// Keys and values travel round the ranks (Liu et al. 2023); each rank holds one early and one late piece, so that
    /// all have the same share of the causal half.
    #[default]
    Ring,
    /// Every rank gathers all keys and values; pieces as for the ring.
    AllGather,
    /// Ranks exchange parts of the sequence for parts of the heads (Jacobs et al. 2023).
    AllToAll,
}

/// Most tokens in a micro-batch. With the limits on a model's widths it keeps the size of every tensor in 64 bits.
pub const MAX_MICRO_BATCH_TOKENS: usize = 1 << 31;

/// The optimizer step that a plan lays out, for rules that need no model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepFacts {
    /// Sequences of a step.
    pub global_batch: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// True if the optimizer updates whole matrices, as Muon does, and not any range of elements.
    pub updates_whole_matrices: bool,
    /// True if the loss is scaled by a factor that changes from step to step (f16).
    pub scales_loss: bool,
}

/// The model, the step and the world that a plan is checked against.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Digest of the model.
    pub model: String,
    /// Blocks.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Key and value heads.
    pub key_value_heads: usize,
    /// Columns of the values between blocks.
    pub hidden: usize,
    /// Width of the feed-forward layers.
    pub intermediate: usize,
    /// Whether keys and values are made of a narrow value that all heads share.
    pub has_latent_attention: bool,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Experts of a block; 0 for none.
    pub experts: usize,
    /// Width of an expert.
    pub expert_intermediate: usize,
    /// Rank of the low-rank adapter that is trained in place of the model; `None` without one.
    pub adapter_rank: Option<usize>,
    /// The step.
    pub step: StepFacts,
    /// Ranks.
    pub world_size: usize,
}

impl Facts {
    /// What stages are made of: the embedding, the blocks and the head.
    pub const fn units(&self) -> usize {
        self.layers.saturating_add(2)
    }
}

impl Plan {
    /// Reads a plan from a file's text. [`Plan::check`] judges what it says.
    pub fn from_json(text: &str) -> Result<Self, PlanError> {
        /// The version alone: later ones may have fields that this program does not know.
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

    /// The text of a file.
    pub fn to_json(&self) -> Result<String, PlanError> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// The plan with all that it leaves open: the model, the micro-batch, the chunks of its schedule and, by what each unit costs, its stages.
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
                // What is wrong with the rows is told when the plan is validated.
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

    /// Sequences of a micro-batch of a global batch: what the plan says, else the largest divisor of a part of the batch up to 8 that the rows of
    /// a square of tensor ranks divide, each of which has whole sequences.
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

    /// The ZeRO stage; nothing is sharded where one rank has all of a replica's sequences.
    pub fn effective_zero_stage(&self) -> ZeroStage {
        let owners = self.mesh.shard.saturating_mul(self.mesh.context);
        let stage = if owners > 1 { usize::from(self.zero_stage) } else { 0 };
        ZeroStage::from_number(stage).unwrap_or_default()
    }

    /// The small integers that go between the ranks over which state is sharded.
    pub fn quantization(&self) -> Quantization {
        let is_sharded = self.effective_zero_stage() > ZeroStage::Nothing;
        Quantization {
            weights: self.quantize_weights.filter(|_| is_sharded),
            gradients: self.quantize_gradients.filter(|_| is_sharded),
            feedback: self.quantize_feedback,
        }
    }

    /// [`Plan::bucket_mb`] in bytes.
    pub fn bucket_bytes(&self) -> usize {
        (self.bucket_mb * f64::from(1 << 20)) as usize
    }

    /// The units of each stage, from their numbers.
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
