//! The memory of a run besides weights: caches of keys and values, activations and workspace, before anything is allocated.

use std::ops::Range;

use lockstep_engine::Runner;
use lockstep_graph::{BlockShape, Mode, Program, RecomputeRules, Statistics};
use lockstep_model::{Flops, HeadOutput, ModelConfig, RecordedModel, RecordingOptions, Tuning};
use lockstep_plan::{CachePlace, DType, KvCacheType, Places, StageMemory, booked_bytes};
use lockstep_tensor::{CacheShape, CpuLevel, PAGE_TOKENS, page_bytes};

use crate::InferError;

/// Work that memory is planned for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workload {
    /// Generation.
    Generation {
        /// Sequences at a time.
        sequences: usize,
        /// Tokens of each sequence: the prompt and those that are generated.
        context: usize,
    },
    /// Evaluation of windows of tokens.
    Evaluation {
        /// Windows in a forward.
        windows: usize,
        /// Tokens of a window.
        seq_len: usize,
    },
}

impl Workload {
    /// Returns the most tokens that a pass can have.
    pub(crate) fn tokens(self) -> usize {
        match self {
            Self::Generation { sequences, context } => sequences * context,
            Self::Evaluation { windows, seq_len } => windows * seq_len,
        }
    }
}

/// Bytes of a run by category, weights excepted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RunMemory {
    pub(crate) kv_cache: u64,
    pub(crate) activations: u64,
    pub(crate) workspace: u64,
}

/// Part of a model on a rank: its pipeline stage, and its coordinates in the groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RankShare {
    /// Units of its pipeline stage.
    pub(crate) stage: Range<usize>,
    pub(crate) places: Places,
}

impl RankShare {
    /// Returns the share of one rank that has the whole model.
    pub(crate) fn whole(config: &ModelConfig) -> Self {
        Self { stage: 0..config.num_hidden_layers() + 2, places: Places::default() }
    }

    /// Returns the layers of the stage, from 0.
    pub(crate) fn layers(&self, config: &ModelConfig) -> Range<usize> {
        self.stage.start.saturating_sub(1)..(self.stage.end - 1).min(config.num_hidden_layers())
    }

    /// Returns the rank's place among the context-parallel ranks, over which key-value caches are sharded.
    pub(crate) fn cache_place(&self) -> CachePlace {
        self.places.for_generation().cache
    }

    /// Returns the tokens of a page of a sequence, on all ranks that the cache is sharded over.
    pub(crate) fn page_tokens(&self) -> usize {
        PAGE_TOKENS * self.cache_place().ranks
    }

    /// Returns the bytes of the cached keys and values of one sequence of `context` tokens on this rank: whole pages.
    pub(crate) fn kv_cache_bytes(
        &self,
        config: &ModelConfig,
        types: (DType, KvCacheType),
        context: usize,
    ) -> u64 {
        let shape = config.cache_shape().of_rank(self.places.tensor.ranks);
        let on_this_rank = context.div_ceil(self.page_tokens()) * PAGE_TOKENS;
        self.layers(config).len() as u64 * kv_layer_bytes(types, shape, on_this_rank)
    }

    /// Returns the bytes of the padding page; 0 without context parallelism.
    fn padding_bytes(&self, config: &ModelConfig, types: (DType, KvCacheType)) -> u64 {
        if self.cache_place().ranks > 1 { self.kv_cache_bytes(config, types, 1) } else { 0 }
    }
}

impl RunMemory {
    /// Returns the memory of a workload on a rank, of which prompts are read in chunks of `chunk` tokens.
    pub(crate) fn of(
        config: &ModelConfig,
        share: &RankShare,
        (dtype, kv_cache): (DType, KvCacheType),
        workload: Workload,
        chunk: usize,
    ) -> Self {
        match workload {
            Workload::Generation { sequences, context } => {
                let generation = Self::of_generation(config, share, dtype, sequences, (chunk, context));
                let bytes = sequences as u64 * share.kv_cache_bytes(config, (dtype, kv_cache), context)
                    + share.padding_bytes(config, (dtype, kv_cache));
                Self { kv_cache: bytes, ..generation }
            }
            Workload::Evaluation { windows, seq_len } => {
                let model = record(config, dtype, [windows, seq_len], HeadOutput::Losses, Places::default());
                let stages = [StageMemory::whole(model.units())];
                let activations = Runner::predicted_activation_bytes(&model) as u64;
                Self { kv_cache: 0, activations, workspace: model.profile().workspace_bytes(&stages) as u64 }
            }
        }
    }

    pub(crate) fn total(&self) -> u64 {
        self.kv_cache + self.activations + self.workspace
    }

    /// Returns the memory of a forward with a chunk of a prompt and the logits of all sequences.
    fn of_generation(
        config: &ModelConfig,
        share: &RankShare,
        dtype: DType,
        sequences: usize,
        (chunk, context): (usize, usize),
    ) -> Self {
        let places = share.places.for_generation();
        let ranks = places.cache.ranks;
        let rows = chunk.min(sequences * context).max(sequences).next_multiple_of(ranks);
        let [blocks, head] = [rows, sequences * ranks]
            .map(|rows| record(config, dtype, [1, rows], HeadOutput::Logits, places));
        let [frame, workspace] = frame_and_workspace_bytes(&blocks, &head, share.stage.clone());
        let words = |count: usize| booked_bytes(count * DType::U32.size_bytes());
        let matrix = |rows: usize| booked_bytes(rows * config.hidden_size() * dtype.size_bytes());
        let logits = sequences * config.vocab_size() * DType::F32.size_bytes();
        let pages = context.div_ceil(share.page_tokens());
        // Padding is a sequence as well.
        let listed = sequences + usize::from(ranks > 1);
        let tables = words(listed + 1) + words(listed) + words(listed * pages);
        // Logits are on the host as well.
        let activations = 2 * booked_bytes(frame)
            + 2 * words(rows)
            + matrix(sequences)
            + if ranks > 1 { matrix(rows) } else { 0 }
            + 2 * booked_bytes(logits)
            + tables;
        Self { kv_cache: 0, activations: activations as u64, workspace: booked_bytes(workspace) as u64 }
    }
}

/// Returns the bytes of the cached keys and values of one sequence in one layer with a cache of `shape`, for a computation in one
/// type and a cache of the other.
pub(crate) fn kv_layer_bytes(
    (dtype, kv_cache): (DType, KvCacheType),
    shape: CacheShape,
    context: usize,
) -> u64 {
    let page: usize = page_bytes(CpuLevel::detect(), dtype, kv_cache, shape).iter().sum();
    (context.div_ceil(PAGE_TOKENS) * page) as u64
}

/// Returns the type of the cache of a model that computes in `dtype`: that which is asked for, else that of the computation.
///
/// # Errors
/// If such a cache does not hold numbers of `dtype`.
pub(crate) fn kv_cache_type(asked: Option<KvCacheType>, dtype: DType) -> Result<KvCacheType, InferError> {
    let held = || KvCacheType::ALL.into_iter().filter(|stored| stored.holds(dtype));
    let stored = asked.or(KvCacheType::of(dtype)).filter(|stored| stored.holds(dtype));
    stored.ok_or_else(|| InferError::KvCache {
        asked: asked.map_or(dtype.to_string(), |asked| asked.to_string()),
        dtype,
        allowed: held().map(KvCacheType::name).collect(),
    })
}

/// Returns the bytes of a frame and of the workspace in which the units of a stage run: the embedding and the blocks of `blocks`, and the
/// head of `head`. Logits of all rows of a prompt would be the largest value by far.
pub(crate) fn frame_and_workspace_bytes(
    blocks: &RecordedModel,
    head: &RecordedModel,
    stage: Range<usize>,
) -> [usize; 2] {
    let last = head.units() - 1;
    // The output of the unit before the stage is received into a frame.
    let units = stage.start.saturating_sub(1)..stage.end;
    let programs =
        || units.clone().map(|unit| if unit == last { head.program(unit) } else { blocks.program(unit) });
    let most = |bytes: fn(&Program) -> usize| programs().map(bytes).max().unwrap_or(0);
    [most(Program::frame_bytes), most(Program::workspace_bytes)]
}

/// Records the programs of a model for `sequences` of `seq_len` tokens, as the rank at `places` runs them.
pub(crate) fn record(
    config: &ModelConfig,
    dtype: DType,
    [sequences, seq_len]: [usize; 2],
    head_output: HeadOutput,
    places: Places,
) -> RecordedModel {
    let (mode, recompute) = (Mode::Inference, RecomputeRules::default());
    let shape = BlockShape { sequences, seq_len, dtype };
    let statistics = Statistics::of(mode);
    let options = RecordingOptions { mode, shape, recompute, head_output, statistics, places };
    // The operations of all ranks are counted by recording the model for one rank; estimates ask for that alone.
    let flops = (places != Places::default()).then(Flops::default);
    RecordedModel::tuned_with_flops(config, &Tuning::default(), options, flops)
}
