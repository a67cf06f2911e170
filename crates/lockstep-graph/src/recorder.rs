//! The API of model code and of operations: values without storage, parameters without weights, and the list of
//! operations.
//!
//! Every value is a matrix `[rows, columns]` of one row per token or sample; heads and the dimensions of images are ways
//! to read the columns. Each operation adds its recording
//! method in its own file. A method checks shapes, so a model whose shapes do not match fails while it is recorded, at
//! the line of the model and with the shapes in the message. Under tensor parallelism ([`Recorder::split`]) shapes are
//! global, and the recorder derives this rank's part.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_plan::{CachePlace, ContextPlace, DType, ExpertPlace, Initializer, Share, TensorPlace};

use crate::{
    block::{
        Bias, BlockShape, Constant, DropoutSite, HeadOutput, InputDeclaration, LoraAdapters, LoraDown,
        MAX_DROPOUT_SITES, Mode, ParameterDeclaration, ParameterIndex, Statistics, TokenRange, Value,
        ValueInfo,
    },
    op::Op,
    placement::{Placement, Redistribute, Split},
    reports::Recorded,
    storage::Region,
    training::InputGradient,
};

/// A recorder of one block.
#[derive(Debug)]
pub struct Recorder {
    pub(crate) mode: Mode,
    pub(crate) shape: BlockShape,
    pub(crate) values: Vec<ValueInfo>,
    /// Global dimensions of each value after its rows.
    pub(crate) dims: Vec<Vec<usize>>,
    /// Flag of each value, true if it is the block's input or an operation writes it.
    pub(crate) written: Vec<bool>,
    /// Placement of each value in the tensor-parallel group.
    pub(crate) placements: Vec<Placement>,
    pub(crate) place: TensorPlace,
    pub(crate) experts: ExpertPlace,
    /// The rank's place in the context-parallel group; `shape` is that of the local tokens.
    pub(crate) context: ContextPlace,
    /// The rank's place among those that key-value caches are sharded over; `shape` is that of the rank's rows.
    pub(crate) cache: CachePlace,
    /// Sharding of modules by name within the block.
    pub(crate) splits: BTreeMap<String, Split>,
    pub(crate) operations: Vec<Box<dyn Op>>,
    /// Redistributions that several operations may read: the input, the collective and the output.
    pub(crate) redistributed: Vec<(Value, Redistribute, Value)>,
    pub(crate) parameters: Vec<ParameterDeclaration>,
    pub(crate) input: Option<Value>,
    pub(crate) statistics: Statistics,
    /// Named inputs of the model.
    pub(crate) inputs: Vec<InputDeclaration>,
    /// Constants of the model.
    pub(crate) constants: Vec<Constant>,
    /// Values that the caller of a replay supplies: named inputs and constants.
    pub(crate) given: Vec<(Value, Region)>,
    pub(crate) input_gradient: InputGradient,
    frozen: BTreeSet<String>,
    pub(crate) low_rank: Option<LoraAdapters>,
    pub(crate) lora_downs: Vec<LoraDown>,
    dropout_sites: u32,
    pub(crate) head_output: HeadOutput,
    pub(crate) reports: Recorded,
}

impl Recorder {
    /// Returns an empty recording.
    pub fn new(mode: Mode, shape: BlockShape) -> Self {
        Self {
            mode,
            shape,
            values: Vec::new(),
            dims: Vec::new(),
            written: Vec::new(),
            placements: Vec::new(),
            place: TensorPlace::default(),
            experts: ExpertPlace::default(),
            context: ContextPlace::default(),
            cache: CachePlace::default(),
            splits: BTreeMap::new(),
            operations: Vec::new(),
            redistributed: Vec::new(),
            parameters: Vec::new(),
            input: None,
            statistics: Statistics::of(mode),
            inputs: Vec::new(),
            constants: Vec::new(),
            given: Vec::new(),
            input_gradient: InputGradient::Wanted,
            frozen: BTreeSet::new(),
            low_rank: None,
            lora_downs: Vec::new(),
            dropout_sites: 0,
            head_output: HeadOutput::default(),
            reports: Recorded::default(),
        }
    }

    /// Sets the statistics that batch norms use; by default those of the micro-batch in training, the running ones in
    /// inference.
    pub fn set_statistics(&mut self, statistics: Statistics) {
        self.statistics = statistics;
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
    #[track_caller]
    pub fn input(&mut self, columns: usize) -> Value {
        assert!(self.input.is_none(), "a block has one input");
        let value = self.value_in(columns, self.stream());
        self.written[value.0] = true;
        self.input = Some(value);
        value
    }

    /// Adds an operation to the recording. Its inputs are recorded values; its outputs are new ones, from
    /// [`Recorder::same_shape`], [`Recorder::value_like`], [`Recorder::statistic`] or [`Recorder::local`].
    ///
    /// # Panics
    /// If an output is already written by another operation, or an input is not written by any.
    #[track_caller]
    pub fn push(&mut self, operation: impl Op + 'static) {
        let facts = operation.facts();
        for output in &facts.outputs {
            let is_new = !std::mem::replace(&mut self.written[output.0], true);
            assert!(is_new, "{}: output {} is written twice", facts.name, self.describe(*output));
        }
        for read in facts.reads() {
            assert!(
                self.written[read.0],
                "{} reads {} before it is written",
                facts.name,
                self.describe(read)
            );
        }
        self.operations.push(Box::new(operation));
    }

    /// Returns the purpose of the recording.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the micro-batch shape; under context parallelism, with the local tokens of each sequence.
    pub fn shape(&self) -> BlockShape {
        self.shape
    }

    /// Returns the rank's place in the tensor-parallel group.
    pub fn place(&self) -> TensorPlace {
        self.place
    }

    /// Returns the local rows of a value: its tokens, or this rank's range of them.
    pub fn local_rows(&self, value: Value) -> usize {
        self.values[value.0].rows
    }

    /// Returns the local columns of a value.
    pub fn local_columns(&self, value: Value) -> usize {
        self.values[value.0].columns
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

    /// Returns the global dimensions of a value after its rows: `[height, width, channels]` of an image, the columns of a
    /// matrix.
    pub fn dims(&self, value: Value) -> &[usize] {
        &self.dims[value.0]
    }

    /// Describes a value in messages: local rows, global columns and placement.
    pub fn describe(&self, value: Value) -> String {
        let placement = self.placement(value);
        format!("[{}, {}] {placement:?}", self.local_rows(value), self.columns(value))
    }

    #[track_caller]
    pub(crate) fn dropout_site(&mut self, probability: f32) -> Option<DropoutSite> {
        let site = self.dropout_sites;
        assert!(site < MAX_DROPOUT_SITES, "a unit has at most {MAX_DROPOUT_SITES} dropout sites");
        // Sites are counted even where nothing is dropped, so that their indices do not depend on the mode.
        self.dropout_sites += 1;
        (self.mode == Mode::Training && probability > 0.0).then_some(DropoutSite { site, probability })
    }

    /// Declares the parameter `NAME.bias [len]` if the layer has a bias.
    #[track_caller]
    pub fn bias(&mut self, bias: Bias, name: &str, len: usize, share: Share) -> Option<ParameterIndex> {
        let name = format!("{name}.bias");
        (bias == Bias::With).then(|| self.parameter(name, &[len], Initializer::Zeros, share))
    }

    /// Declares a parameter of global `shape`, of which this rank has `share`; its name is relative to the block.
    ///
    /// # Panics
    /// If the block declares the name twice.
    #[track_caller]
    pub fn parameter(
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

    /// Creates a value of `columns` global columns, with the local rows and the placement of `other`.
    ///
    /// # Panics
    /// If the placement does not divide the columns.
    #[track_caller]
    pub fn value_like(&mut self, other: Value, columns: usize) -> Value {
        self.value_beside(other, columns, self.placement(other))
    }

    /// Creates a value of `columns` global columns in a placement, with the local rows of `other`.
    ///
    /// # Panics
    /// If the placement does not divide the columns.
    #[track_caller]
    pub fn value_beside(&mut self, other: Value, columns: usize, placement: Placement) -> Value {
        let value = self.value_in(columns, placement);
        self.values[value.0].rows = self.values[other.0].rows;
        value
    }

    /// Gives a value the dimensions of another.
    pub(crate) fn copy_dims(&mut self, from: Value, to: Value) {
        self.dims[to.0] = self.dims[from.0].clone();
    }

    /// Creates a value of `columns` global columns, one row per token, in a placement.
    ///
    /// # Panics
    /// If the placement does not divide the columns.
    #[track_caller]
    pub fn value_in(&mut self, columns: usize, placement: Placement) -> Value {
        let held = match placement {
            Placement::ShardColumns { parts } => {
                assert!(columns.is_multiple_of(parts), "{columns} columns are not split into {parts} shards");
                columns / parts
            }
            Placement::ShardBlocks(grid) => {
                assert!(columns.is_multiple_of(grid.side), "{columns} columns for a side of {}", grid.side);
                columns / grid.side
            }
            _ => columns,
        };
        let info = ValueInfo { rows: self.rows_of(placement), columns: held, dtype: self.shape.dtype };
        self.create(info, placement)
    }

    /// Creates a value with the shape, dimensions and placement of another.
    pub fn same_shape(&mut self, other: Value) -> Value {
        let value = self.create(self.values[other.0], self.placement(other));
        self.copy_dims(other, value);
        value
    }

    /// Creates an f32 value of `columns` numbers per row of `of`.
    pub fn statistic(&mut self, of: Value, columns: usize) -> Value {
        let info = ValueInfo { columns, dtype: DType::F32, ..self.values[of.0] };
        self.create(info, self.placement(of))
    }

    /// Creates a value of any shape, local to this rank: a table, or scratch.
    pub fn local(&mut self, rows: usize, columns: usize, dtype: DType) -> Value {
        self.create(ValueInfo { rows, columns, dtype }, Placement::Replicate)
    }

    pub(crate) fn create(&mut self, info: ValueInfo, placement: Placement) -> Value {
        self.values.push(info);
        self.written.push(false);
        self.placements.push(placement);
        let value = Value(self.values.len() - 1);
        self.dims.push(vec![self.columns(value)]);
        value
    }

    /// Asserts that the operands of the operation `what` have the same columns and placement, and are not partial sums.
    ///
    /// # Panics
    /// If they do not.
    #[track_caller]
    pub fn expect_same(&self, a: Value, b: Value, what: &str) {
        let kind = |value: Value| (self.columns(value), self.placement(value));
        let describe = || format!("{what} of {} and {}", self.describe(a), self.describe(b));
        assert!(kind(a) == kind(b), "{}: operands of unlike columns or placements", describe());
        let is_partial = self.placement(a) == Placement::Partial;
        assert!(!is_partial, "{}: summands are summed before anything is done with them", describe());
    }
}
