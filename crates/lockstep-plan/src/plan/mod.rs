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
//! [`Plan::validate`] compares it with the model and the batch and tells all problems at once, or gives the mesh and the
//! schedule, which exist only if they are right.

mod predicted;
mod problem;
#[cfg(test)]
mod tests;
mod validate;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{
    Feedback, QuantizedType, RecomputeRules, Residences, Sharding,
    mesh::{Degrees, Mesh},
    schedule::{Kind, Schedule, ScheduleError, passes_from_csv},
};

pub use predicted::{PlanPrediction, PlannedStep, RankList, RanksMemory};
pub use problem::{PlanError, PlanProblem};

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
    /// Sequences of a micro-batch, for each part of the batch.
    pub micro_batch: usize,
    /// What the ranks of a pipeline do in which order.
    #[serde(default)]
    pub schedule: PipelineSchedule,
    /// How many of the model's units (embedding, blocks, head) each stage of the pipeline has, from the first layer on.
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

/// The schedule of a plan: a published one, or a user's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ScheduleFields", into = "ScheduleFields")]
pub enum PipelineSchedule {
    /// `{ "kind": "1f1b", "chunks": 1 }`.
    Published {
        /// Which.
        kind: Kind,
        /// Stages on each rank.
        chunks: usize,
    },
    /// `{ "rows": ["F0,F1,B0,B1", ...] }`: the rows of [`passes_from_csv`](crate::schedule::passes_from_csv).
    Rows(Vec<String>),
}

impl PipelineSchedule {
    /// The lists of `ranks` for a step of so many micro-batches.
    ///
    /// # Errors
    /// Everything that is wrong with it for these numbers.
    pub fn for_ranks(&self, ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
        match self {
            Self::Published { kind, chunks } => Schedule::new(*kind, ranks, micro_batches, *chunks),
            Self::Rows(rows) => passes_from_csv(&rows.join("\n"), ranks)
                .and_then(|passes| Schedule::from_passes(micro_batches, &passes)),
        }
    }
}

impl Default for PipelineSchedule {
    fn default() -> Self {
        Self::Published { kind: Kind::OneForwardOneBackward, chunks: 1 }
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
                Ok(Self::Published { kind, chunks: chunks.unwrap_or(kind.chunks().0) })
            }
            ScheduleFields { kind: None, chunks: None, rows: Some(rows) } => Ok(Self::Rows(rows)),
            _ => Err("a schedule has either a kind, with its number of chunks, or rows"),
        }
    }
}

impl From<PipelineSchedule> for ScheduleFields {
    fn from(schedule: PipelineSchedule) -> Self {
        match schedule {
            PipelineSchedule::Published { kind, chunks } => {
                Self { kind: Some(kind), chunks: Some(chunks), rows: None }
            }
            PipelineSchedule::Rows(rows) => Self { kind: None, chunks: None, rows: Some(rows) },
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

/// What a plan is compared with: the model, the batch and the ranks that are there.
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
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Sequences of a step.
    pub global_batch: usize,
    /// Ranks.
    pub world_size: usize,
}

impl Facts {
    /// What stages are made of: the embedding, the blocks and the head.
    pub const fn units(&self) -> usize {
        self.layers.saturating_add(2)
    }
}

/// What a plan that fits its [`Facts`] comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValidPlan {
    /// The mesh.
    pub mesh: Mesh,
    /// The schedule of each pipeline, with the micro-batches of a step.
    pub schedule: Schedule,
    /// The units of each stage.
    pub stages: Vec<Range<usize>>,
}

impl Plan {
    /// Reads a plan from a file's text. Whether it is right is another matter: [`Plan::validate`].
    pub fn from_json(text: &str) -> Result<Self, PlanError> {
        /// The version alone: later ones may have fields that this program does not know.
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let Version { version } = serde_json::from_str(text)?;
        if version != PLAN_VERSION {
            return Err(PlanError::Invalid(vec![PlanProblem::Version { version }]));
        }
        Ok(serde_json::from_str(text)?)
    }

    /// The text of a file.
    pub fn to_json(&self) -> Result<String, PlanError> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
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
