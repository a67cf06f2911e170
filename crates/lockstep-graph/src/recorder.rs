//! The API of model code: values without storage, and operations on them.
//!
//! Every value is a matrix `[tokens, columns]`; heads are a way to read the columns. A recorder checks shapes as it
//! goes, so a model whose shapes do not match fails while it is recorded, with both shapes in the message. Under
//! tensor parallelism ([`Recorder::split`]) shapes are global, and the recorder derives this rank's part.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_plan::{CheckedPlan, ContextPlace, DType, ExpertPlace, Initializer, Share, TensorPlace};
use lockstep_tensor::Gelu;

use crate::{
    AttentionShape, BatchInput, DropoutSite, InputGradient, LoraAdapters, ParameterDeclaration,
    ParameterIndex, Program, Recompute, Split,
    low_rank::LoraDown,
    operation::{AttentionOperation, Operation, RotaryPairs, SequenceRange, SplitLoss, TokenRange},
    placement::Placement,
};

/// Most dropout sites of a program. Programs of a model number theirs this far apart, so no two sites share a mask.
pub const MAX_DROPOUT_SITES: u32 = 16;

/// Approximate number of logits that a loss holds at once. It is small enough to save memory, and large enough that
/// reading the output layer's weights and accumulating their gradient once per part costs little.
const LOGITS_AT_ONCE: usize = 1 << 25;

/// A handle to a recorded value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Value(pub(crate) usize);

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

/// Presence of a bias in a linear layer.
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

/// A linear layer `y = x Wᵀ + b` with parameters `NAME.weight [out, in]` and `NAME.bias [out]`.
#[derive(Debug, Clone, Copy)]
pub struct Linear<'a> {
    /// Name of the module within its block.
    pub name: &'a str,
    /// Number of output columns.
    pub out_features: usize,
    /// Presence of a bias.
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

/// A recorder of one block.
#[derive(Debug)]
pub struct Recorder {
    pub(crate) mode: Mode,
    pub(crate) shape: BlockShape,
    pub(crate) values: Vec<ValueInfo>,
    /// Placement of each value in the tensor-parallel group.
    pub(crate) placements: Vec<Placement>,
    pub(crate) place: TensorPlace,
    pub(crate) experts: ExpertPlace,
    /// The rank's place in the context-parallel group; `shape` is that of the local tokens.
    pub(crate) context: ContextPlace,
    /// Sharding of modules by name within the block.
    pub(crate) splits: BTreeMap<String, Split>,
    pub(crate) operations: Vec<Operation>,
    pub(crate) parameters: Vec<ParameterDeclaration>,
    pub(crate) input: Option<Value>,
    pub(crate) input_gradient: InputGradient,
    frozen: BTreeSet<String>,
    pub(crate) low_rank: Option<LoraAdapters>,
    pub(crate) narrow: Vec<LoraDown>,
    dropout_sites: u32,
}

impl Recorder {
    /// Returns an empty recording.
    pub fn new(mode: Mode, shape: BlockShape) -> Self {
        Self {
            mode,
            shape,
            values: Vec::new(),
            placements: Vec::new(),
            place: TensorPlace::default(),
            experts: ExpertPlace::default(),
            context: ContextPlace::default(),
            splits: BTreeMap::new(),
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

    /// Marks parameters of these names, relative to the block, as frozen.
    pub fn freeze(&mut self, names: impl IntoIterator<Item = String>) {
        self.frozen.extend(names);
    }

    /// Sets if an earlier block needs the gradient of this block's input. By default one does.
    pub fn set_input_gradient(&mut self, input_gradient: InputGradient) {
        self.input_gradient = input_gradient;
    }

    /// Returns the block's input, `[tokens, columns]`: the output of the previous block.
    ///
    /// # Panics
    /// If called twice.
    pub fn input(&mut self, columns: usize) -> Value {
        assert!(self.input.is_none(), "a block has one input");
        let value = self.value_in(columns, self.stream());
        self.input = Some(value);
        value
    }

    /// Records an embedding: one row of the table `NAME.weight [rows, columns]` per token.
    ///
    /// # Panics
    /// If the table is split in any way other than by its rows.
    pub fn embedding(
        &mut self,
        input: BatchInput,
        name: &str,
        rows: usize,
        columns: usize,
        std: f32,
    ) -> Value {
        let (share, placement) = match self.split_of(name) {
            None => (self.whole_share(self.stream()), self.stream()),
            Some(Split::VocabularyParallel) => (self.vocabulary_shard(rows), Placement::Partial),
            Some(split) => panic!("{name}: a table is split by its rows, not by {split:?}"),
        };
        let initializer = Initializer::Normal { std };
        let table = self.parameter_shared(format!("{name}.weight"), &[rows, columns], initializer, share);
        let first_id = share.shard.map_or(0, |shard| shard.start as u32);
        let y = self.value_in(columns, placement);
        let tokens = self.tokens_of(placement);
        self.operations.push(Operation::Embedding { input, table, first_id, tokens, y });
        self.reduce_partial(y)
    }

    /// Records a linear layer, with the adapter that [`Recorder::adapt`] gives it.
    ///
    /// # Panics
    /// If the input's placement does not fit the layer's split.
    pub fn linear(&mut self, x: Value, linear: Linear<'_>) -> Value {
        let Linear { name, out_features, bias, std } = linear;
        let (split, initializer) = (self.split_of(name), Initializer::Normal { std });
        let y = self.product(x, name, out_features, split, (bias, initializer));
        self.adapted(name, x, y)
    }

    /// Records `x Wᵀ + b` with the parameters `NAME.weight` and, with a bias, `NAME.bias`.
    pub(crate) fn product(
        &mut self,
        x: Value,
        name: &str,
        out_features: usize,
        split: Option<Split>,
        (bias, initializer): (Bias, Initializer),
    ) -> Value {
        if let (Some(split), Some(grid)) = (split, self.place.grid()) {
            return self.product_of_blocks(x, name, out_features, (split, grid), (bias, initializer));
        }
        let shape = [out_features, self.columns(x)];
        let (x, weight, of_bias, placement) = match split {
            None => {
                let placement = self.placement(x);
                self.expect_placement(
                    x,
                    |placement| matches!(placement, Placement::Replicate | Placement::ShardTokens),
                    name,
                );
                (x, self.whole_share(placement), self.whole_share(placement), placement)
            }
            Some(Split::ColumnParallel { pieces }) => {
                let parts = self.parts(name, pieces);
                let share = self.shard(0, out_features, parts);
                (self.partial_gradient(x), share, share, Placement::ShardColumns { parts })
            }
            Some(Split::RowParallel) => {
                let parts = self.place.ranks;
                self.expect_placement(x, |placement| placement == Placement::ShardColumns { parts }, name);
                let whole = self.whole_share(Placement::Partial);
                (x, self.shard(1, shape[1], parts), whole, Placement::Partial)
            }
            Some(Split::VocabularyParallel) => {
                panic!("{name}: only an output layer is split by a vocabulary")
            }
        };
        let weight = self.parameter_shared(format!("{name}.weight"), &shape, initializer, weight);
        let bias = (bias == Bias::With).then(|| {
            self.parameter_shared(format!("{name}.bias"), &[out_features], Initializer::Zeros, of_bias)
        });
        let y = self.value_in(out_features, placement);
        // Only one of the partial sums includes the bias.
        let adds_bias = placement != Placement::Partial || self.place.rank == 0;
        self.operations.push(Operation::Linear { x, weight, bias, adds_bias, y });
        self.reduce_partial(y)
    }

    /// Records root-mean-square normalization with the scale `NAME.weight [width]`, over each group of `width`
    /// columns: the whole row, or each head.
    ///
    /// # Panics
    /// If `width` does not divide the local columns.
    pub fn rms_norm(&mut self, x: Value, name: &str, width: usize, eps: f32) -> Value {
        let (columns, held) = (self.columns(x), self.values[x.0].columns);
        assert!(held.is_multiple_of(width), "{name}: a norm over {width} of {held} columns");
        let share = self.whole_share(self.placement(x));
        let weight = self.parameter_shared(format!("{name}.weight"), &[width], Initializer::Ones, share);
        let y = self.value_like(x, columns);
        let rstd = self.statistic(x, held / width);
        self.operations.push(Operation::RmsNorm { x, weight, eps, y, rstd });
        y
    }

    /// Records layer normalization with `NAME.weight` and, with a bias, `NAME.bias`.
    ///
    /// # Panics
    /// If the value is neither replicated nor sharded by tokens.
    pub fn layer_norm(&mut self, x: Value, name: &str, bias: Bias, eps: f32) -> Value {
        self.expect_placement(
            x,
            |placement| matches!(placement, Placement::Replicate | Placement::ShardTokens),
            name,
        );
        let (columns, share) = (self.columns(x), self.whole_share(self.placement(x)));
        let weight = self.parameter_shared(format!("{name}.weight"), &[columns], Initializer::Ones, share);
        let bias = (bias == Bias::With)
            .then(|| self.parameter_shared(format!("{name}.bias"), &[columns], Initializer::Zeros, share));
        let y = self.value_like(x, columns);
        let (mean, rstd) = (self.statistic(x, 1), self.statistic(x, 1));
        self.operations.push(Operation::LayerNorm { x, weight, bias, eps, y, mean, rstd });
        y
    }

    /// Records rotary position embedding of each head, in the half-split form.
    pub fn rope(&mut self, x: Value, head_dim: usize) -> Value {
        self.rope_in_pairs(x, head_dim, RotaryPairs::Halves)
    }

    /// Records rotary position embedding of each head, in the half-split or the interleaved form.
    pub fn rope_in_pairs(&mut self, x: Value, head_dim: usize, pairs: RotaryPairs) -> Value {
        let columns = self.columns(x);
        assert!(columns.is_multiple_of(head_dim), "heads of {head_dim} in {columns} columns");
        self.expect_placement(x, |placement| placement != Placement::ShardTokens, "rotary embedding");
        let y = self.value_like(x, columns);
        let tokens = self.tokens_of(self.placement(x));
        self.operations.push(Operation::Rope { x, head_dim, pairs, tokens, y });
        y
    }

    /// Records the concatenation of each head of `own` with its head of `tail`, or with the only one.
    ///
    /// # Panics
    /// If the two are not sharded alike, or if a single tail for sharded heads is itself partial or sharded by columns.
    pub fn join_heads(&mut self, own: Value, tail: Value, heads: usize, tails: usize) -> Value {
        let is_split = matches!(self.placement(own), Placement::ShardColumns { .. });
        let tail = if tails == 1 && is_split { self.partial_gradient(tail) } else { tail };
        let fits = tails == 1 || self.placement(own) == self.placement(tail);
        assert!(fits, "heads of {:?} with tails of {:?}", self.placement(own), self.placement(tail));
        let y = self.value_like(own, self.columns(own) + self.columns(tail) * heads / tails);
        let held = heads * self.values[own.0].columns / self.columns(own);
        let tails = if tails == 1 { 1 } else { held };
        self.operations.push(Operation::JoinHeads { own, tail, heads: held, tails, y });
        y
    }

    /// Records each head truncated or zero-padded to `width` elements.
    pub fn resize_heads(&mut self, x: Value, heads: usize, width: usize) -> Value {
        let y = self.value_like(x, heads * width);
        let heads = heads * self.values[x.0].columns / self.columns(x);
        self.operations.push(Operation::ResizeHeads { x, heads, y });
        y
    }

    /// Records causal attention, with dropout of the probabilities.
    ///
    /// # Panics
    /// If the shapes or placements of queries, keys and values do not match.
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
        let (of_queries, of_keys) = (self.placement(q), self.placement(k));
        let ranks = self.place.ranks;
        let fits = match (of_queries, of_keys) {
            (Placement::Replicate, Placement::Replicate) => true,
            (Placement::ShardColumns { parts }, Placement::ShardColumns { parts: of_keys }) => {
                parts == ranks && key_value_heads.is_multiple_of(of_keys)
            }
            (Placement::ShardBlocks(grid), Placement::ShardBlocks(_)) => {
                heads.is_multiple_of(grid.side) && key_value_heads.is_multiple_of(grid.side)
            }
            _ => false,
        };
        assert!(fits && of_keys == self.placement(v), "attention of {of_queries:?} to {of_keys:?}");
        let held = |value: Value| self.values[value.0].columns / head_dim;
        let shape = AttentionShape { heads: held(q), key_value_heads: held(k), ..shape };
        let all = SequenceRange { first: 0, len: self.shape.sequences };
        let (first_head, sequences) = match of_queries {
            Placement::Replicate => (0, all),
            Placement::ShardBlocks(grid) => (grid.column * shape.heads, self.sequences_of(grid)),
            _ => (self.place.rank * shape.heads, all),
        };
        let dropout = self.dropout_site(dropout);
        let heads = shape.heads;
        let ([q, k, v], skipped, shape, reach) = self.reached([q, k, v], shape);
        let y = self.beside(q);
        let log_sum_exp = self.statistic(q, shape.heads);
        self.operations.push(Operation::Attention(AttentionOperation {
            q,
            k,
            v,
            shape,
            first_head: first_head + skipped,
            sequences,
            dropout,
            reach,
            y,
            log_sum_exp,
        }));
        self.returned(y, heads)
    }

    /// Records `silu(gate) · up`.
    pub fn swiglu(&mut self, gate: Value, up: Value) -> Value {
        self.expect_same(gate, up);
        let y = self.value_like(gate, self.columns(gate));
        self.operations.push(Operation::SwiGlu { gate, up, y, offsets: None });
        y
    }

    /// Records a Gaussian error linear unit.
    pub fn gelu(&mut self, kind: Gelu, x: Value) -> Value {
        let y = self.value_like(x, self.columns(x));
        self.operations.push(Operation::Gelu { kind, x, y });
        y
    }

    /// Records `a + b`.
    pub fn add(&mut self, a: Value, b: Value) -> Value {
        self.expect_same(a, b);
        let y = self.value_like(a, self.columns(a));
        self.operations.push(Operation::Add { a, b, y });
        y
    }

    /// Records dropout; records nothing in inference or for probability 0.
    pub fn dropout(&mut self, x: Value, probability: f32) -> Value {
        let Some(dropout) = self.dropout_site(probability) else { return x };
        let placement = self.placement(x);
        let first_feature = match placement {
            Placement::ShardColumns { parts } => {
                self.place.rank * parts / self.place.ranks * self.values[x.0].columns
            }
            Placement::ShardBlocks(grid) => grid.column * self.values[x.0].columns,
            _ => 0,
        };
        let y = self.value_like(x, self.columns(x));
        let tokens = self.tokens_of(placement);
        self.operations.push(Operation::Dropout {
            x,
            dropout,
            tokens,
            first_feature: first_feature as u32,
            y,
        });
        y
    }

    /// Records the linear layer `output` and the cross-entropy of its logits against the batch's labels: one loss per
    /// token, 0 where masked. The logits of all tokens never exist at once, and no rank holds those of another's
    /// shard.
    ///
    /// # Panics
    /// If the layer has a bias, which output layers do not have.
    pub fn output_loss(&mut self, x: Value, output: Linear<'_>) -> Value {
        let Linear { name, out_features, bias, std } = output;
        assert_eq!(bias, Bias::Without, "{name}: an output layer has no bias");
        let (x, share) = match self.split_of(name) {
            None => {
                self.expect_placement(x, |placement| placement == Placement::Replicate, name);
                (x, self.whole_share(Placement::Replicate))
            }
            Some(Split::VocabularyParallel) => {
                (self.partial_gradient(x), self.vocabulary_shard(out_features))
            }
            Some(split) => panic!("{name}: an output layer is split by the vocabulary, not by {split:?}"),
        };
        let shape = [out_features, self.columns(x)];
        let held = share.shape_of(&shape)[0];
        let weight =
            self.parameter_shared(format!("{name}.weight"), &shape, Initializer::Normal { std }, share);
        let tokens = self.shape.tokens();
        let parts = (tokens * held).div_ceil(LOGITS_AT_ONCE).max(1);
        let rows = tokens.div_ceil(parts).next_multiple_of(64).min(tokens);
        let logits = self.scratch(rows, held, self.shape.dtype);
        let split = share.shard.map(|shard| SplitLoss {
            first_column: shard.start,
            statistics: self.scratch(rows, 3, DType::F32),
            gathered: self.scratch(rows, 3 * self.place.ranks, DType::F32),
            log_sum_exp: self.scratch(rows, 1, DType::F32),
        });
        let losses = self.push(1, DType::F32, Placement::Replicate);
        self.operations.push(Operation::OutputLoss { x, weight, logits, split, losses });
        losses
    }

    /// Ends the recording and compiles it; `output` is the value that the next block reads.
    pub fn finish(self, output: Value, recompute: Recompute) -> Program {
        Program::compile(self, output, recompute)
    }

    /// Returns the global number of columns of a value.
    pub fn columns(&self, value: Value) -> usize {
        let held = self.values[value.0].columns;
        match self.placement(value) {
            Placement::ShardColumns { parts } => held * parts,
            Placement::ShardBlocks(grid) => held * grid.side,
            _ => held,
        }
    }

    fn dropout_site(&mut self, probability: f32) -> Option<DropoutSite> {
        let site = self.dropout_sites;
        assert!(site < MAX_DROPOUT_SITES, "a unit has at most {MAX_DROPOUT_SITES} dropout sites");
        // Sites are counted even where nothing is dropped, so that their indices do not depend on the mode.
        self.dropout_sites += 1;
        (self.mode == Mode::Training && probability > 0.0).then_some(DropoutSite { site, probability })
    }

    pub(crate) fn parameter_shared(
        &mut self,
        name: String,
        shape: &[usize],
        initializer: Initializer,
        share: Share,
    ) -> ParameterIndex {
        assert!(
            self.parameters.iter().all(|parameter| parameter.name != name),
            "the block declares {name} twice"
        );
        let trainable = !self.frozen.contains(&name);
        let shape = shape.to_vec();
        self.parameters.push(ParameterDeclaration { name, shape, share, initializer, trainable });
        ParameterIndex(self.parameters.len() - 1)
    }

    /// Returns the tokens whose rows a value in `placement` holds.
    pub(crate) fn tokens_of(&self, placement: Placement) -> TokenRange {
        let len = self.rows_of(placement);
        let first = match placement {
            Placement::ShardTokens => self.place.rank * len,
            Placement::ShardBlocks(grid) => self.sequences_of(grid).first * self.shape.seq_len,
            _ => 0,
        };
        TokenRange { first, len }
    }

    /// Creates a value of `columns` global columns, in the placement of `other`.
    pub(crate) fn value_like(&mut self, other: Value, columns: usize) -> Value {
        self.value_in(columns, self.placement(other))
    }

    pub(crate) fn value_in(&mut self, columns: usize, placement: Placement) -> Value {
        let held = match placement {
            Placement::ShardColumns { parts } => columns / parts,
            Placement::ShardBlocks(grid) => {
                assert!(columns.is_multiple_of(grid.side), "{columns} columns for a side of {}", grid.side);
                columns / grid.side
            }
            _ => columns,
        };
        self.push(held, self.shape.dtype, placement)
    }

    /// Creates a value with the shape and placement of another.
    fn beside(&mut self, other: Value) -> Value {
        self.values.push(self.values[other.0]);
        self.placements.push(self.placement(other));
        Value(self.values.len() - 1)
    }

    /// Creates an f32 value of `columns` numbers per row of `of`.
    fn statistic(&mut self, of: Value, columns: usize) -> Value {
        let value = self.beside(of);
        self.values[value.0] = ValueInfo { columns, dtype: DType::F32, ..self.values[of.0] };
        value
    }

    /// Creates scratch of an operation.
    pub(crate) fn scratch(&mut self, rows: usize, columns: usize, dtype: DType) -> Value {
        self.table(rows, columns, dtype)
    }

    /// Creates a value of any shape, local to this rank.
    pub(crate) fn table(&mut self, rows: usize, columns: usize, dtype: DType) -> Value {
        self.values.push(ValueInfo { rows, columns, dtype });
        self.placements.push(Placement::Replicate);
        Value(self.values.len() - 1)
    }

    fn push(&mut self, columns: usize, dtype: DType, placement: Placement) -> Value {
        self.values.push(ValueInfo { rows: self.rows_of(placement), columns, dtype });
        self.placements.push(placement);
        Value(self.values.len() - 1)
    }

    fn expect_same(&self, a: Value, b: Value) {
        let kind = |value: Value| (self.columns(value), self.placement(value));
        let (a, b) = (kind(a), kind(b));
        assert_eq!(a, b, "operands of unlike columns or placements");
        assert!(a.1 != Placement::Partial, "summands are summed before anything is done with them");
    }
}
