//! The API of model code: values without storage, and operations on them.
//!
//! Every value is a matrix `[tokens, columns]`; heads are a way to read the columns. A recorder checks shapes as it
//! goes, so a model whose shapes do not match fails while it is recorded, with both shapes in the message. Under
//! tensor parallelism ([`Recorder::split`]) shapes are global, and the recorder derives this rank's part.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_plan::{ContextPlace, DType, ExpertPlace, Initializer, Share, TensorPlace};
use lockstep_tensor::Gelu;

use crate::{
    block::{
        BatchInput, Bias, BlockShape, DropoutSite, HeadOutput, InputDeclaration, LoraAdapters, LoraDown,
        MAX_DROPOUT_SITES, Mode, ParameterDeclaration, ParameterIndex, TokenRange, Value, ValueInfo,
    },
    operation::{Operation, RotaryPairs},
    placement::{Placement, Split},
    training::InputGradient,
};

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
    /// Named inputs of the model.
    pub(crate) inputs: Vec<InputDeclaration>,
    /// Values that are named inputs, each with its index.
    pub(crate) data: Vec<(Value, usize)>,
    pub(crate) input_gradient: InputGradient,
    frozen: BTreeSet<String>,
    pub(crate) low_rank: Option<LoraAdapters>,
    pub(crate) lora_downs: Vec<LoraDown>,
    dropout_sites: u32,
    pub(crate) head_output: HeadOutput,
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
            inputs: Vec::new(),
            data: Vec::new(),
            input_gradient: InputGradient::Wanted,
            frozen: BTreeSet::new(),
            low_rank: None,
            lora_downs: Vec::new(),
            dropout_sites: 0,
            head_output: HeadOutput::default(),
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
        let table = self.parameter(format!("{name}.weight"), &[rows, columns], initializer, share);
        let first_id = share.shard.map_or(0, |shard| shard.start as u32);
        let y = self.value_in(columns, placement);
        let tokens = self.tokens_of(placement);
        self.operations.push(Operation::Embedding { input, table, first_id, tokens, y });
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
        let weight = self.parameter(format!("{name}.weight"), &[width], Initializer::Ones, share);
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
        let weight = self.parameter(format!("{name}.weight"), &[columns], Initializer::Ones, share);
        let bias = self.bias(bias, name, columns, share);
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

    /// Records `factor · x`.
    pub fn scale(&mut self, x: Value, factor: f32) -> Value {
        let y = self.value_like(x, self.columns(x));
        self.operations.push(Operation::Scale { x, factor, y });
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

    /// Returns the global number of columns of a value.
    pub fn columns(&self, value: Value) -> usize {
        let held = self.values[value.0].columns;
        match self.placement(value) {
            Placement::ShardColumns { parts } => held * parts,
            Placement::ShardBlocks(grid) => held * grid.side,
            _ => held,
        }
    }

    pub(crate) fn dropout_site(&mut self, probability: f32) -> Option<DropoutSite> {
        let site = self.dropout_sites;
        assert!(site < MAX_DROPOUT_SITES, "a unit has at most {MAX_DROPOUT_SITES} dropout sites");
        // Sites are counted even where nothing is dropped, so that their indices do not depend on the mode.
        self.dropout_sites += 1;
        (self.mode == Mode::Training && probability > 0.0).then_some(DropoutSite { site, probability })
    }

    /// Declares the parameter `NAME.bias [len]` if the layer has a bias.
    pub(crate) fn bias(
        &mut self,
        bias: Bias,
        name: &str,
        len: usize,
        share: Share,
    ) -> Option<ParameterIndex> {
        let name = format!("{name}.bias");
        (bias == Bias::With).then(|| self.parameter(name, &[len], Initializer::Zeros, share))
    }

    pub(crate) fn parameter(
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
        let info = ValueInfo { rows: self.rows_of(placement), columns: held, dtype: self.shape.dtype };
        self.create(info, placement)
    }

    /// Creates a value with the shape and placement of another.
    pub(crate) fn same_shape(&mut self, other: Value) -> Value {
        self.create(self.values[other.0], self.placement(other))
    }

    /// Creates an f32 value of `columns` numbers per row of `of`.
    pub(crate) fn statistic(&mut self, of: Value, columns: usize) -> Value {
        let info = ValueInfo { columns, dtype: DType::F32, ..self.values[of.0] };
        self.create(info, self.placement(of))
    }

    /// Creates a value of any shape, local to this rank: a table, or scratch.
    pub(crate) fn local(&mut self, rows: usize, columns: usize, dtype: DType) -> Value {
        self.create(ValueInfo { rows, columns, dtype }, Placement::Replicate)
    }

    pub(crate) fn create(&mut self, info: ValueInfo, placement: Placement) -> Value {
        self.values.push(info);
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
