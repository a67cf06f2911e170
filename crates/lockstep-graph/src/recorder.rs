//! What model code is written against: storage-less values and the operations on them.
//!
//! Every value is a matrix `[tokens, columns]`; heads are a way to read the columns. A recorder checks
//! shapes as it goes, so a model that does not fit together fails while it is recorded, with both shapes.

use std::collections::BTreeSet;

use lockstep_plan::{DType, Initializer};
use lockstep_tensor::Gelu;

use crate::{
    AttentionShape, BatchInput, DropoutSite, InputGradient, LowRank, ParameterDeclaration, ParameterIndex,
    Program, Recompute,
    low_rank::Narrow,
    operation::{AttentionOperation, Operation},
};

/// Logits that a loss holds at once, about: few enough to save memory, so many that reading the output layer's
/// weights and adding to their gradient once for each such part costs little.
const LOGITS_AT_ONCE: usize = 1 << 25;

/// A handle to a recorded value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Value(pub(crate) usize);

/// What a program is recorded for.
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
    /// Tokens in each.
    pub seq_len: usize,
    /// Type of activations and of the weights that kernels read.
    pub dtype: DType,
}

impl BlockShape {
    /// Most tokens in a micro-batch. With the limits on a model's widths it keeps the size of every tensor in 64 bits.
    pub const MAX_TOKENS: usize = 1 << 31;

    /// Tokens in a micro-batch.
    pub fn tokens(&self) -> usize {
        self.sequences * self.seq_len
    }
}

/// Whether a linear layer has a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// No bias.
    Without,
    /// A bias, zero at the start.
    With,
}

impl From<bool> for Bias {
    fn from(has_bias: bool) -> Self {
        if has_bias { Self::With } else { Self::Without }
    }
}

/// A linear layer `y = x Wᵀ + b` with parameters `NAME.weight [out, in]` and `NAME.bias [out]`.
#[derive(Debug, Clone, Copy)]
pub struct Linear<'a> {
    /// Name of the module within its block.
    pub name: &'a str,
    /// Columns of the output.
    pub out_features: usize,
    /// Whether there is a bias.
    pub bias: Bias,
    /// Standard deviation of the initial weights.
    pub std: f32,
}

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

/// Records one block.
#[derive(Debug)]
pub struct Recorder {
    pub(crate) mode: Mode,
    pub(crate) shape: BlockShape,
    pub(crate) values: Vec<ValueInfo>,
    pub(crate) operations: Vec<Operation>,
    pub(crate) parameters: Vec<ParameterDeclaration>,
    pub(crate) input: Option<Value>,
    pub(crate) input_gradient: InputGradient,
    frozen: BTreeSet<String>,
    pub(crate) low_rank: Option<LowRank>,
    pub(crate) narrow: Vec<Narrow>,
    dropout_sites: u32,
}

impl Recorder {
    /// An empty recording.
    pub fn new(mode: Mode, shape: BlockShape) -> Self {
        Self {
            mode,
            shape,
            values: Vec::new(),
            operations: Vec::new(),
            parameters: Vec::new(),
            input: None,
            input_gradient: InputGradient::Wanted,
            frozen: BTreeSet::new(),
            low_rank: None,
            narrow: Vec::new(),
            dropout_sites: 0,
        }
    }

    /// Records parameters of these names, within the block, as ones that are never trained.
    pub fn freeze(&mut self, names: impl IntoIterator<Item = String>) {
        self.frozen.extend(names);
    }

    /// Says whether a block before this one waits for a gradient; it does unless something is said.
    pub fn set_input_gradient(&mut self, input_gradient: InputGradient) {
        self.input_gradient = input_gradient;
    }

    /// The block's input, `[tokens, columns]`: the output of the block before.
    ///
    /// # Panics
    /// If called twice.
    pub fn input(&mut self, columns: usize) -> Value {
        assert!(self.input.is_none(), "a block has one input");
        let value = self.value(columns);
        self.input = Some(value);
        value
    }

    /// Rows of the table `NAME.weight [rows, columns]`, one for each token.
    pub fn embedding(
        &mut self,
        input: BatchInput,
        name: &str,
        rows: usize,
        columns: usize,
        std: f32,
    ) -> Value {
        let table = self.parameter(format!("{name}.weight"), &[rows, columns], Initializer::Normal { std });
        let y = self.value(columns);
        self.operations.push(Operation::Embedding { input, table, y });
        y
    }

    /// A linear layer, with what [`Recorder::adapt`] adds to it.
    pub fn linear(&mut self, x: Value, linear: Linear<'_>) -> Value {
        let Linear { name, out_features, bias, std } = linear;
        let weight = self.linear_weight(x, name, out_features, std);
        let bias = (bias == Bias::With)
            .then(|| self.parameter(format!("{name}.bias"), &[out_features], Initializer::Zeros));
        let y = self.value(out_features);
        self.operations.push(Operation::Linear { x, weight, bias, y });
        self.adapted(name, x, y)
    }

    /// Root-mean-square normalization with the scale `NAME.weight [width]`, over each group of `width` columns: the
    /// whole row, or each head.
    ///
    /// # Panics
    /// If `width` does not divide the columns.
    pub fn rms_norm(&mut self, x: Value, name: &str, width: usize, eps: f32) -> Value {
        let columns = self.columns(x);
        assert!(columns.is_multiple_of(width), "{name}: a norm over {width} of {columns} columns");
        let weight = self.parameter(format!("{name}.weight"), &[width], Initializer::Ones);
        let y = self.value(columns);
        let rstd = self.statistic(columns / width);
        self.operations.push(Operation::RmsNorm { x, weight, eps, y, rstd });
        y
    }

    /// Layer normalization with `NAME.weight` and, if asked for, `NAME.bias`.
    pub fn layer_norm(&mut self, x: Value, name: &str, bias: Bias, eps: f32) -> Value {
        let columns = self.columns(x);
        let weight = self.parameter(format!("{name}.weight"), &[columns], Initializer::Ones);
        let bias = (bias == Bias::With)
            .then(|| self.parameter(format!("{name}.bias"), &[columns], Initializer::Zeros));
        let y = self.value(columns);
        let (mean, rstd) = (self.statistic(1), self.statistic(1));
        self.operations.push(Operation::LayerNorm { x, weight, bias, eps, y, mean, rstd });
        y
    }

    /// Rotary position embedding of each head, in the half-split form.
    pub fn rope(&mut self, x: Value, head_dim: usize) -> Value {
        let columns = self.columns(x);
        assert!(columns.is_multiple_of(head_dim), "heads of {head_dim} in {columns} columns");
        let y = self.value(columns);
        self.operations.push(Operation::Rope { x, head_dim, y });
        y
    }

    /// Causal attention, with dropout of the probabilities.
    pub fn attention(&mut self, q: Value, k: Value, v: Value, shape: AttentionShape, dropout: f32) -> Value {
        let AttentionShape { heads, key_value_heads, head_dim, .. } = shape;
        for (name, value, heads) in [("q", q, heads), ("k", k, key_value_heads), ("v", v, key_value_heads)] {
            let columns = self.columns(value);
            assert_eq!(
                columns,
                heads * head_dim,
                "{name} has {columns} columns for {heads} heads of {head_dim}"
            );
        }
        let dropout = self.dropout_site(dropout);
        let y = self.value(heads * head_dim);
        let log_sum_exp = self.statistic(heads);
        let attention = AttentionOperation { q, k, v, shape, dropout, y, log_sum_exp };
        self.operations.push(Operation::Attention(attention));
        y
    }

    /// `silu(gate) · up`.
    pub fn swiglu(&mut self, gate: Value, up: Value) -> Value {
        self.expect_same(gate, up);
        let y = self.value(self.columns(gate));
        self.operations.push(Operation::SwiGlu { gate, up, y });
        y
    }

    /// Gaussian error linear unit.
    pub fn gelu(&mut self, kind: Gelu, x: Value) -> Value {
        let y = self.value(self.columns(x));
        self.operations.push(Operation::Gelu { kind, x, y });
        y
    }

    /// `a + b`.
    pub fn add(&mut self, a: Value, b: Value) -> Value {
        self.expect_same(a, b);
        let y = self.value(self.columns(a));
        self.operations.push(Operation::Add { a, b, y });
        y
    }

    /// Dropout; nothing is recorded in inference or for probability 0.
    pub fn dropout(&mut self, x: Value, probability: f32) -> Value {
        let Some(dropout) = self.dropout_site(probability) else { return x };
        let y = self.value(self.columns(x));
        self.operations.push(Operation::Dropout { x, dropout, y });
        y
    }

    /// The linear layer `output`, and the cross-entropy of the logits that it would give against the labels of the
    /// batch: one loss per token, 0 where masked. The logits of all tokens never exist at once.
    ///
    /// # Panics
    /// If the layer has a bias, which no output layer has.
    pub fn output_loss(&mut self, x: Value, output: Linear<'_>) -> Value {
        let Linear { name, out_features, bias, std } = output;
        assert_eq!(bias, Bias::Without, "{name}: an output layer has no bias");
        let weight = self.linear_weight(x, name, out_features, std);
        let tokens = self.shape.tokens();
        let parts = (tokens * out_features).div_ceil(LOGITS_AT_ONCE).max(1);
        let rows = tokens.div_ceil(parts).next_multiple_of(64).min(tokens);
        self.values.push(ValueInfo { rows, columns: out_features, dtype: self.shape.dtype });
        let logits = Value(self.values.len() - 1);
        let losses = self.statistic(1);
        self.operations.push(Operation::OutputLoss { x, weight, logits, losses });
        losses
    }

    /// Ends the recording: `output` is what the next block reads.
    pub fn finish(self, output: Value, recompute: Recompute) -> Program {
        Program::compile(self, output, recompute)
    }

    /// Columns of a value.
    pub fn columns(&self, value: Value) -> usize {
        self.values[value.0].columns
    }

    fn dropout_site(&mut self, probability: f32) -> Option<DropoutSite> {
        let site = self.dropout_sites;
        // Sites are counted even where nothing is dropped, so that a number never depends on the mode.
        self.dropout_sites += 1;
        (self.mode == Mode::Training && probability > 0.0).then_some(DropoutSite { site, probability })
    }

    fn linear_weight(&mut self, x: Value, name: &str, out_features: usize, std: f32) -> ParameterIndex {
        let shape = [out_features, self.columns(x)];
        self.parameter(format!("{name}.weight"), &shape, Initializer::Normal { std })
    }

    pub(crate) fn parameter(
        &mut self,
        name: String,
        shape: &[usize],
        initializer: Initializer,
    ) -> ParameterIndex {
        assert!(
            self.parameters.iter().all(|parameter| parameter.name != name),
            "the block declares {name} twice"
        );
        let trainable = !self.frozen.contains(&name);
        self.parameters.push(ParameterDeclaration { name, shape: shape.to_vec(), initializer, trainable });
        ParameterIndex(self.parameters.len() - 1)
    }

    pub(crate) fn value(&mut self, columns: usize) -> Value {
        self.push(columns, self.shape.dtype)
    }

    /// An f32 value of `columns` numbers per token.
    fn statistic(&mut self, columns: usize) -> Value {
        self.push(columns, DType::F32)
    }

    fn push(&mut self, columns: usize, dtype: DType) -> Value {
        self.values.push(ValueInfo { rows: self.shape.tokens(), columns, dtype });
        Value(self.values.len() - 1)
    }

    fn expect_same(&self, a: Value, b: Value) {
        let (a, b) = (self.columns(a), self.columns(b));
        assert_eq!(a, b, "operands of {a} and {b} columns");
    }
}
