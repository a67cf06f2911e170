//! The vocabulary of a recorded block: its shape and purpose, its values and parameters, and the token ranges and
//! dropout sites that operations refer to.
//!
//! A value is a matrix `[tokens, columns]` without storage; a parameter is a declaration without weights.

use std::collections::BTreeMap;

use lockstep_plan::{CheckedPlan, DType, Initializer, MemoryCategory, Share};
use lockstep_tensor::{Arena, Tensor, TensorError};

/// Purpose of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Forward and backward, with dropout.
    Training,
    /// Forward only, without dropout; attention can read and fill a key-value cache.
    Inference,
}

/// The micro-batch shape and element type a block is recorded for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockShape {
    /// Sequences in a micro-batch.
    pub sequences: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Dtype of activations and of the weights that kernels read.
    pub dtype: DType,
}

impl BlockShape {
    /// Largest number of tokens in a micro-batch.
    pub const MAX_TOKENS: usize = lockstep_plan::MAX_MICRO_BATCH_TOKENS;

    /// Returns the micro-batch shape of a plan, with the dtype that kernels read.
    pub fn of_plan(plan: &CheckedPlan, dtype: DType) -> Self {
        Self { sequences: plan.micro_batch(), seq_len: plan.seq_len(), dtype }
    }

    /// Returns the number of tokens in a micro-batch.
    pub fn tokens(&self) -> usize {
        self.sequences * self.seq_len
    }
}

/// A handle to a recorded value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Value(pub(crate) usize);

/// Local shape and dtype of a value.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ValueInfo {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) dtype: DType,
}

impl ValueInfo {
    pub(crate) fn elements(&self) -> usize {
        self.rows * self.columns
    }

    pub(crate) fn bytes(&self) -> usize {
        self.elements() * self.dtype.size_bytes()
    }
}

/// Index of a parameter in its program's list of declarations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ParameterIndex(pub usize);

/// A parameter as its block declares it; the name is relative to the block.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterDeclaration {
    /// Name within the block, e.g. `self_attn.q_proj.weight`.
    pub name: String,
    /// Global (unsharded) shape.
    pub shape: Vec<usize>,
    /// This rank's shard.
    pub share: Share,
    /// Initializer of the global parameter.
    pub initializer: Initializer,
    /// True if it is trained and so has a gradient.
    pub trainable: bool,
}

/// Source of the statistics that batch norms use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Statistics {
    /// The micro-batch: training.
    #[default]
    Batch,
    /// The running statistics: evaluation.
    Running,
}

impl Statistics {
    /// Returns the statistics that programs for a purpose use.
    pub fn of(mode: Mode) -> Self {
        match mode {
            Mode::Training => Self::Batch,
            Mode::Inference => Self::Running,
        }
    }
}

/// A change of running statistics: `running = (1 - momentum) · running + momentum · batch`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunningUpdate {
    /// Running mean and running variance, `[channels]` each.
    pub parameters: [ParameterIndex; 2],
    /// Statistics of the micro-batch, f32 `[3, channels]`: number of rows, mean, and sum of the squared differences from it.
    pub statistics: Value,
    /// Weight of the newest batch.
    pub momentum: f32,
}

/// Presence of a bias in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// The layer has no bias.
    Without,
    /// The layer has a bias, which is initialized to zero.
    With,
}

impl From<bool> for Bias {
    fn from(has_bias: bool) -> Self {
        if has_bias { Self::With } else { Self::Without }
    }
}

/// An integer input of a micro-batch that an embedding can look up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchInput {
    /// Ids of the tokens.
    Ids,
    /// Position of each token in its sequence.
    Positions,
    /// Position of each token in its sequence, in a table whose rows before `row` belong to no position: OPT and RoBERTa
    /// reserve two for padding.
    PositionsFrom {
        /// Row of position 0.
        row: usize,
    },
    /// A named input, u32 `[seq_len]` per sequence: a number for each token.
    Named(Value),
}

/// A named input of a model: a tensor per sample, or per token of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputDeclaration {
    /// Name, e.g. `pixel_values`.
    pub name: String,
    /// Dtype on the device.
    pub dtype: DType,
    /// Shape of one sample, or of one token of a sample; empty for a single number.
    pub shape: Vec<usize>,
    /// True if a sample has a tensor for each of its tokens: `[seq_len, shape]`.
    pub is_per_token: bool,
    /// Limit of unsigned integers; `None` without one.
    pub limit: Option<InputLimit>,
}

/// Limit of the numbers of an unsigned input, which micro-batches are checked against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputLimit {
    /// Numbers are below this one: rows of a table.
    Below(u32),
    /// Numbers are below the sequence length: indices of tokens.
    SequenceLength,
}

impl InputDeclaration {
    /// Creates a declaration of a tensor per sample.
    pub fn new(name: &str, dtype: DType, shape: &[usize]) -> Self {
        Self { name: name.to_owned(), dtype, shape: shape.to_vec(), is_per_token: false, limit: None }
    }

    /// Creates a declaration of a number per token, such as a mask: `[seq_len]` per sample.
    pub fn per_token(name: &str, dtype: DType) -> Self {
        Self { is_per_token: true, ..Self::new(name, dtype, &[]) }
    }

    /// Sets the limit of unsigned numbers.
    #[must_use]
    pub fn limited(self, limit: InputLimit) -> Self {
        Self { limit: Some(limit), ..self }
    }

    /// Returns the declaration for samples of `seq_len` tokens, as a tensor per sample whose limit is a number.
    pub fn for_tokens(&self, seq_len: usize) -> Self {
        let tokens = self.is_per_token.then_some(seq_len);
        let shape = tokens.into_iter().chain(self.shape.iter().copied()).collect();
        let limit = self.limit.map(|limit| match limit {
            InputLimit::Below(_) => limit,
            InputLimit::SequenceLength => InputLimit::Below(seq_len as u32),
        });
        Self { shape, is_per_token: false, limit, ..self.clone() }
    }

    /// Number of elements of one sample, or of one token of a sample.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A named vector of numbers that belongs to a model and has no gradient, such as the inverse frequencies of rotary
/// embeddings or the slopes of ALiBi.
#[derive(Debug, Clone, PartialEq)]
pub struct Constant {
    /// Name, e.g. `inverse_frequencies`.
    pub name: String,
    /// Values of the vector, in f32 on every device.
    pub values: Vec<f32>,
}

impl Constant {
    /// Creates a constant.
    pub fn new(name: &str, values: Vec<f32>) -> Self {
        Self { name: name.to_owned(), values }
    }

    /// Allocates the constant, f32, and books it under parameters.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn allocate(&self, arena: &Arena) -> Result<Tensor, TensorError> {
        Tensor::from_slice(arena, [self.values.len()], &self.values, MemoryCategory::Parameters)
    }
}

/// Output of a model's last unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HeadOutput {
    /// The loss of each token, f32.
    #[default]
    Losses,
    /// The logits of each token.
    Logits,
}

/// Consecutive tokens of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenRange {
    pub(crate) first: usize,
    pub(crate) len: usize,
}

/// Consecutive sequences of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SequenceRange {
    pub(crate) first: usize,
    pub(crate) len: usize,
}

/// Most dropout sites of a program. Programs of a model number theirs this far apart, so no two sites share a mask.
pub const MAX_DROPOUT_SITES: u32 = 16;

/// A dropout site of a block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DropoutSite {
    /// Index of the site within its block.
    pub site: u32,
    /// Probability of dropping an element.
    pub probability: f32,
}

/// Low-rank adapters of some linear layers of a block: `y = x Wᵀ + b + scale · (dropout(x) Aᵀ) Bᵀ` with
/// `A [rank, in]` and `B [out, rank]` (Hu et al., 2021, section 4.1).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LoraAdapters {
    /// Rank of the adapters: rows of `A`.
    pub rank: usize,
    /// Factor on the adapter's output.
    pub scale: f32,
    /// Dropout probability on the adapter's input.
    pub dropout: f32,
    /// Adapted layers by name within the block, each with the name of its `A`; layers that read the same value may
    /// use one `A`. The parameters are `NAME.lora_A.weight` and `LAYER.lora_B.weight`.
    pub layers: BTreeMap<String, String>,
}

/// The scaled output of an `A`, which several layers may read.
#[derive(Debug)]
pub(crate) struct LoraDown {
    pub(crate) name: String,
    pub(crate) of: Value,
    pub(crate) value: Value,
}
