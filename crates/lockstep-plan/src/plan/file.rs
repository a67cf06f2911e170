//! The plan as a file: its fields and their defaults, its JSON form, and the choices that a plan leaves open.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{
    Facts, PassOrder, PipelineSchedule, PlanError, PlanPrediction, PlanProblem, PlanProblems,
    predicted::is_default,
};
use crate::{
    ContextMethod, Degrees, Feedback, Quantization, QuantizedType, RecomputeRules, Residences, Sharding,
    SplitError, TensorDimensions, ZeroStage, schedule::Kind, split_units,
};

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

impl Plan {
    /// Returns the plan for a world of `ranks`, if its mesh is a part of that: the mesh is repeated by data parallelism. With a
    /// ZeRO stage and an open shard axis the ranks shard the state, as FSDP does; otherwise they are replicas.
    #[must_use]
    pub fn over(mut self, ranks: usize) -> Self {
        let own = self.mesh.world_size().filter(|own| *own > 0 && ranks.is_multiple_of(*own));
        let times = own.map_or(1, |own| ranks / own);
        let shards = self.zero_stage > 0 && self.mesh.shard == 1;
        let axis = if shards { &mut self.mesh.shard } else { &mut self.mesh.replicate };
        *axis *= times;
        self
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

/// Upper limit of tokens in a micro-batch. With the limits on a model's widths it keeps the size of every tensor in 64 bits.
pub const MAX_MICRO_BATCH_TOKENS: usize = 1 << 31;

/// Returns the problem of a plan file's version; `None` for the version that this program reads.
pub(super) fn version_problem(version: u32) -> Option<String> {
    (version != PLAN_VERSION).then(|| {
        format!("the plan's format has version {version}; this program reads version {PLAN_VERSION}")
    })
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
        match version_problem(version) {
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
            (_, 1) => vec![facts.units],
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
