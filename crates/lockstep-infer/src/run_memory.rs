//! The memory of a run besides weights: caches of keys and values, activations and workspace, before anything is allocated.

use lockstep_engine::Runner;
use lockstep_graph::{BlockShape, Mode, Recompute};
use lockstep_model::{HeadOutput, ModelConfig, RecordedModel};
use lockstep_plan::{DType, StageMemory, booked_bytes};

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
    /// Returns the tokens of a sequence.
    pub fn tokens(self) -> usize {
        match self {
            Self::Generation { context, .. } => context,
            Self::Evaluation { seq_len, .. } => seq_len,
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

impl RunMemory {
    /// Returns the memory of a workload, of which prompts are read in chunks of `chunk` tokens.
    pub(crate) fn of(config: &ModelConfig, dtype: DType, workload: Workload, chunk: usize) -> Self {
        match workload {
            Workload::Generation { sequences, context } => {
                let generation = Self::of_generation(config, dtype, chunk.min(context));
                Self { kv_cache: sequences as u64 * kv_cache_bytes(config, dtype, context), ..generation }
            }
            Workload::Evaluation { windows, seq_len } => {
                let model = record(config, dtype, [windows, seq_len], HeadOutput::Losses);
                let stages = [StageMemory::whole(model.units())];
                let activations = Runner::predicted_activation_bytes(&model) as u64;
                Self { kv_cache: 0, activations, workspace: model.profile().workspace_bytes(&stages) as u64 }
            }
        }
    }

    pub(crate) fn total(&self) -> u64 {
        self.kv_cache + self.activations + self.workspace
    }

    /// Returns the memory of the programs of a decoding step and of a chunk of a prompt, which exist together.
    fn of_generation(config: &ModelConfig, dtype: DType, chunk: usize) -> Self {
        let logits = booked_bytes(config.vocab_size() * DType::F32.size_bytes());
        let mut memory = Self { activations: logits as u64, ..Self::default() };
        // Only a decoding step runs the head.
        for (tokens, without) in [(1, 0), (chunk, 1)] {
            let model = record(config, dtype, [1, tokens], HeadOutput::Logits);
            let units = model.units() - without;
            let most = |bytes: &dyn Fn(usize) -> usize| (0..units).map(bytes).max().unwrap_or(0);
            let frame = booked_bytes(most(&|unit| model.program(unit).frame_bytes()));
            let inputs = booked_bytes(tokens * DType::U32.size_bytes());
            memory.activations += 2 * (frame + inputs) as u64;
            memory.workspace += booked_bytes(most(&|unit| model.program(unit).workspace_bytes())) as u64;
        }
        memory
    }
}

/// Returns the bytes of the cached keys and values of one sequence of `context` tokens.
pub(crate) fn kv_cache_bytes(config: &ModelConfig, dtype: DType, context: usize) -> u64 {
    let width = config.num_key_value_heads() * config.head_dim();
    let cache = booked_bytes(context * width * dtype.size_bytes()) as u64;
    2 * config.num_hidden_layers() as u64 * cache
}

/// Records the programs of a model for `sequences` of `seq_len` tokens.
pub(crate) fn record(
    config: &ModelConfig,
    dtype: DType,
    [sequences, seq_len]: [usize; 2],
    output: HeadOutput,
) -> RecordedModel {
    let shape = BlockShape { sequences, seq_len, dtype };
    RecordedModel::new(config, Mode::Inference, shape, Recompute::None, output)
}
