//! The arguments of a replay, and the context in which operations run: views of values, gradients and weights in the
//! caller's buffers.

use std::{cell::Cell, ops::Range};

use lockstep_plan::{DType, ParameterId};
use lockstep_tensor::{
    BlockGemm, Buffer, Dropout, Gemm, GemmLayout, Kernels, Matrix, PagedCache, Tensor, TokenPositions, View,
    Write,
};

use crate::{
    block::{DropoutSite, ParameterIndex, TokenRange, Value, ValueInfo},
    buffers::CommunicationBuffer,
    instruction::{Gradient, Phase},
    peers::{ContextPeers, GridGroups, Peers},
    reports::MAX_REPORTS,
    shapes::Shapes,
    storage::{Region, Slot},
    timeline::Trace,
};

/// Current location of a block's weights and gradients.
pub trait Parameters {
    /// Returns the weight that kernels read, in the dtype the program was recorded for.
    fn weight(&self, index: ParameterIndex) -> View<'_>;
    /// Returns the weight of a product or a lookup, which may be quantized; such a weight has no [`Parameters::weight`].
    fn matrix(&self, index: ParameterIndex) -> Matrix<'_> {
        Matrix::Dense(self.weight(index))
    }
    /// Returns the matrices of experts, if they are read from disk one at a time; such a stack has no [`Parameters::matrix`]. `None`
    /// if the whole stack is in memory.
    fn streamed_experts(&self, _stack: ParameterIndex) -> Option<StreamedExperts<'_>> {
        None
    }
    /// Returns the weight in the highest precision available.
    fn exact(&self, index: ParameterIndex) -> View<'_> {
        self.weight(index)
    }
    /// Returns the f32 gradient and its write mode: overwrite for the first contribution, accumulate afterwards. Each
    /// kernel that contributes calls it once.
    fn gradient(&self, index: ParameterIndex) -> (View<'_>, Write);
    /// Returns, as u32 `[tokens]`, the row of a table's gradient that each token contributes to; `None` if that is the token's id.
    fn gradient_rows(&self, table: ParameterIndex) -> Option<View<'_>>;
}

/// Source of the matrices of experts, some of which are in memory and the others on disk.
pub trait ExpertSource {
    /// Calls `multiply` with each of the experts of a stack and its matrix `[rows, columns]`: first with those in memory, then with
    /// the others in the order of their reads. `experts` are all experts of the layer that rows are routed to, so the matrices of the
    /// layer's other stacks are read ahead.
    ///
    /// If a read fails, `multiply` is not called for that expert, and the source returns the error before the next unit runs.
    fn for_each(&self, stack: ParameterId, experts: &[usize], multiply: &mut dyn FnMut(usize, Matrix<'_>));
}

/// A stack of experts' matrices that are read from disk one at a time.
#[derive(Clone, Copy)]
pub struct StreamedExperts<'a> {
    /// Source of the matrices.
    pub source: &'a dyn ExpertSource,
    /// The stack.
    pub stack: ParameterId,
}

impl StreamedExperts<'_> {
    /// Calls `multiply` with each of the experts and its matrix; see [`ExpertSource::for_each`].
    pub fn for_each(&self, experts: &[usize], mut multiply: impl FnMut(usize, Matrix<'_>)) {
        self.source.for_each(self.stack, experts, &mut multiply);
    }
}

/// Receiver of the inputs of linear layers in a forward on one rank.
pub trait InputObserver {
    /// Receives the input `[rows, columns]` of the layer with this weight, before the layer runs.
    fn observe(&self, weight: ParameterIndex, x: View<'_>);
}

/// A micro-batch on the device; under context parallelism, its local tokens.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Token ids, u32 `[tokens]`.
    pub ids: View<'a>,
    /// Labels, i32 `[tokens]`, -100 where masked. Required by a program that ends in [`Recorder::output_loss`](crate::Recorder::output_loss).
    pub labels: Option<View<'a>>,
    /// Position of each token in its sequence, u32 `[tokens]`.
    pub positions: View<'a>,
    /// Index within its sequence of the first token of each token's document, u32 `[tokens]`. `None`: a sequence is
    /// one document. The all-to-all method of context parallelism needs those of whole sequences.
    pub document_starts: Option<View<'a>>,
    /// Key of (seed, sample, epoch) of each sequence, u32 `[sequences, 2]`. Required by a program with dropout.
    pub dropout_keys: Option<View<'a>>,
    /// Rows of sequences beyond the context for which [`RotaryEmbedding::frequencies`](crate::RotaryEmbedding::frequencies) are:
    /// ascending ranges of tokens.
    pub long_rows: &'a [Range<usize>],
    /// Constants of the model, f32 vectors in the order of its declarations.
    pub constants: &'a [Tensor],
    /// Named inputs, `[samples, ...]`, in the order of the model's declarations.
    pub inputs: &'a [Tensor],
}

impl<'a> Batch<'a> {
    /// Creates a batch of tokens at their positions, without labels, documents, dropout, constants and named inputs.
    pub fn new(ids: View<'a>, positions: View<'a>) -> Self {
        Self {
            ids,
            labels: None,
            positions,
            document_starts: None,
            dropout_keys: None,
            long_rows: &[],
            constants: &[],
            inputs: &[],
        }
    }
}

/// The buffers, groups and settings of one replay.
#[derive(Clone, Copy)]
pub struct Replay<'a> {
    /// Queue that runs the kernels.
    pub queue: &'a dyn Kernels,
    /// The block's weights and gradients.
    pub parameters: &'a dyn Parameters,
    /// The micro-batch to run on.
    pub batch: Batch<'a>,
    /// The output of the block before, `[tokens, columns]`.
    pub input: Option<View<'a>>,
    /// Frame of at least [`Program::frame_bytes`](crate::Program::frame_bytes); if `output` is given, the bytes before the output suffice.
    pub frame: &'a Buffer,
    /// Buffer for the output, `[tokens, columns]`; `None` puts it in the frame.
    pub output: Option<View<'a>>,
    /// Workspace of at least [`Program::workspace_bytes`](crate::Program::workspace_bytes).
    pub workspace: &'a Buffer,
    /// Index of the block's first dropout site in the model.
    pub first_dropout_site: u32,
    /// The key-value cache of the block's layer, in generation: then the rows of the batch are new tokens of its sequences.
    pub cache: Option<PagedCache<'a>>,
    /// The tensor-parallel group, if the block was recorded for several ranks.
    pub peers: Option<Peers<'a>>,
    /// Row and column groups of this rank, under two-dimensional tensor parallelism.
    pub grid: Option<GridGroups<'a>>,
    /// The expert-parallel group, if the experts are on several ranks.
    pub expert_peers: Option<Peers<'a>>,
    /// The ranks that route other tokens of the same sequences, if there are any.
    pub sequence_peers: Option<Peers<'a>>,
    /// The data-parallel ranks, which run the same program on other samples; `None` for one rank, and for programs that
    /// run no collectives over them ([`Program::reads_replicas`](crate::Program::reads_replicas)).
    pub replicas: Option<Peers<'a>>,
    /// The context-parallel group, if the block was recorded for several ranks.
    pub context: Option<ContextPeers<'a>>,
    /// Communication buffer, if the program overlaps collectives with products.
    pub communication_buffer: Option<&'a CommunicationBuffer>,
    /// Destination of the smallest router margin
    /// ([`RouterKernels::router_margin`](lockstep_tensor::RouterKernels::router_margin)); `None` if it is not wanted.
    pub router_margin: Option<&'a Cell<f32>>,
    /// Receiver of the inputs of linear layers in a forward; `None` if they are not wanted.
    pub observer: Option<&'a dyn InputObserver>,
    /// Destination of the spans of operations; `None` if the replay is not traced.
    pub trace: Option<Trace<'a>>,
}

impl<'a> Replay<'a> {
    /// Creates the replay of a block on one rank: without an input, an output of its own, a cache and groups.
    pub fn new(
        queue: &'a dyn Kernels,
        parameters: &'a dyn Parameters,
        batch: Batch<'a>,
        frame: &'a Buffer,
        workspace: &'a Buffer,
    ) -> Self {
        Self {
            queue,
            parameters,
            batch,
            input: None,
            frame,
            output: None,
            workspace,
            first_dropout_site: 0,
            cache: None,
            peers: None,
            grid: None,
            expert_peers: None,
            sequence_peers: None,
            replicas: None,
            context: None,
            communication_buffer: None,
            router_margin: None,
            observer: None,
            trace: None,
        }
    }
}

/// Gradients that seed a backward. Both are reciprocals of counts of the whole step, so that sums over micro-batches
/// and ranks are means.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Seed {
    /// Gradient of each unmasked token's loss: 1 / number of such tokens.
    pub of_tokens: f32,
    /// Gradient of each sequence's router losses: 1 / number of sequences.
    pub of_sequences: f32,
    /// Gradient of each number of the model's further losses, by report: weight / number of those that count.
    pub of_reports: [f32; MAX_REPORTS],
}

impl Seed {
    /// Returns the seed for a model with one loss.
    pub const fn new(of_tokens: f32, of_sequences: f32) -> Self {
        Self { of_tokens, of_sequences, of_reports: [0.0; MAX_REPORTS] }
    }

    /// Returns the seed for a model with one loss and without routers, `1 / G`.
    pub const fn of_tokens(of_tokens: f32) -> Self {
        Self::new(of_tokens, 0.0)
    }
}

/// Arguments of one call besides those of its replay: buffers and seed of a backward, options of a forward.
#[derive(Clone, Copy, Default)]
pub(crate) struct Extra<'a> {
    pub(crate) dy: Option<View<'a>>,
    pub(crate) dx: Option<View<'a>>,
    pub(crate) deferred: Option<&'a Buffer>,
    pub(crate) seed: Seed,
    /// True in a forward that a backward follows, which computes the loss.
    pub(crate) skips_loss: bool,
}

/// One phase of a program that is being replayed, as operations see it: the views of their operands, and the queue,
/// groups and batch that the caller supplied.
pub struct Run<'a> {
    pub(crate) shapes: &'a Shapes,
    pub(crate) phase: &'a Phase,
    pub(crate) replay: &'a Replay<'a>,
    pub(crate) extra: Extra<'a>,
}

impl<'a> Run<'a> {
    /// Returns the queue that runs the kernels.
    pub fn queue(&self) -> &'a dyn Kernels {
        self.replay.queue
    }

    /// Returns the arguments of the replay: the batch, the process groups, the key-value cache.
    pub fn replay(&self) -> &'a Replay<'a> {
        self.replay
    }

    /// Returns the shapes of the block, and which of its values and parameters have gradients.
    pub fn shapes(&self) -> &'a Shapes {
        self.shapes
    }

    /// Returns the gradients that seed the backward.
    pub fn seed(&self) -> Seed {
        self.extra.seed
    }

    /// Returns the gradient that seeds each of these losses: that of the model's loss, or of a further one.
    pub fn seed_of(&self, losses: Value) -> f32 {
        let Seed { of_tokens, of_reports, .. } = self.seed();
        match self.shapes.reports.iter().position(|report| report.values == losses) {
            None | Some(0) => of_tokens,
            Some(report) => of_reports[report],
        }
    }

    /// Returns a value as `[rows, columns]`.
    pub fn value(&self, value: Value) -> View<'a> {
        let slot = self.phase.values[value.0].expect("every value an instruction touches has a place");
        self.at(slot, self.shapes.values[value.0])
    }

    /// Returns a value as a vector.
    pub fn flat(&self, value: Value) -> View<'a> {
        let view = self.value(value);
        view.reshape([view.elements()])
    }

    /// Returns this rank's shard of a weight, in the dtype that kernels read.
    pub fn weight(&self, index: ParameterIndex) -> View<'a> {
        self.replay.parameters.weight(index)
    }

    /// Returns this rank's shard of a weight that is multiplied or looked up, which may be quantized.
    pub fn matrix(&self, index: ParameterIndex) -> Matrix<'a> {
        self.replay.parameters.matrix(index)
    }

    /// Returns the matrices of experts, if they are read from disk one at a time.
    pub(crate) fn streamed_experts(&self, stack: ParameterIndex) -> Option<StreamedExperts<'a>> {
        self.replay.parameters.streamed_experts(stack)
    }

    /// Computes `y = x Wᵀ (+ bias)`, which is a part of a product of `rows` rows.
    pub(crate) fn multiply(
        &self,
        x: View<'_>,
        weight: ParameterIndex,
        bias: Option<View<'_>>,
        y: View<'_>,
        rows: usize,
    ) {
        match self.matrix(weight) {
            Matrix::Dense(b) => {
                let (layout, write) = (GemmLayout::NT, Write::Overwrite);
                self.queue().gemm_rows(Gemm { layout, a: x, b, c: y, bias, write }, rows);
            }
            Matrix::Blocks(b) => self.queue().block_gemm(BlockGemm::linear(x, b, y, bias)),
        }
    }

    /// Computes `dx (+)= dy W`, which is a part of a product of `rows` rows.
    pub(crate) fn multiply_back(
        &self,
        dy: View<'_>,
        weight: ParameterIndex,
        (dx, write): (View<'_>, Write),
        rows: usize,
    ) {
        let layout = GemmLayout::NN;
        match self.matrix(weight) {
            Matrix::Dense(b) => {
                self.queue().gemm_rows(Gemm { layout, a: dy, b, c: dx, bias: None, write }, rows);
            }
            Matrix::Blocks(b) => {
                self.queue().block_gemm(BlockGemm { layout, a: dy, b, c: dx, bias: None, write });
            }
        }
    }

    /// Returns this rank's shard of a weight in the highest precision that is kept.
    pub fn exact(&self, index: ParameterIndex) -> View<'a> {
        self.replay.parameters.exact(index)
    }

    /// Returns the f32 gradient of a trained weight for a kernel that can overwrite and accumulate, and the mode that it
    /// has to use. Each kernel that contributes calls it once.
    pub fn gradient_to_write(&self, index: ParameterIndex) -> (View<'a>, Write) {
        self.replay.parameters.gradient(index)
    }

    /// Returns the f32 gradient of a trained weight for a kernel that only accumulates: an old gradient is zeroed. Each
    /// kernel that contributes calls it once.
    pub fn gradient_of_weight(&self, index: ParameterIndex) -> View<'a> {
        let (gradient, write) = self.gradient_to_write(index);
        if write == Write::Overwrite {
            self.replay.queue.zero(gradient);
        }
        gradient
    }

    /// Returns true if the parameter is trained.
    pub fn trains(&self, index: ParameterIndex) -> bool {
        self.shapes.trains(index)
    }

    /// Returns the tensor-parallel group.
    ///
    /// # Panics
    /// If the program was recorded for one rank.
    pub fn peers(&self) -> Peers<'a> {
        self.replay.peers.expect("a program that was recorded for several ranks is given them")
    }

    /// Returns the context-parallel group.
    ///
    /// # Panics
    /// If the program was recorded for whole sequences.
    pub fn peers_of_context(&self) -> Peers<'a> {
        let context = self.replay.context;
        context.expect("a program that was recorded for parts of sequences is given the other ranks").peers
    }

    /// Returns the row and the column group under two-dimensional tensor parallelism.
    pub(crate) fn grid_peers(&self) -> GridGroups<'a> {
        self.replay
            .grid
            .expect("a program that was recorded for a square of ranks is given its rows and columns")
    }

    /// Returns the places of some tokens in their sequences, which key dropout masks.
    pub(crate) fn places(&self, tokens: TokenRange) -> TokenPositions {
        let (seq_len, context) = (self.shapes.block.seq_len, self.shapes.context);
        let halves = context.halves_of(context.rank, seq_len * context.ranks);
        TokenPositions { first_row: tokens.first, seq_len, halves }
    }

    pub(crate) fn dropout(&self, dropout: DropoutSite) -> Dropout<'a> {
        Dropout {
            probability: dropout.probability,
            site: self.replay.first_dropout_site + dropout.site,
            keys: self.replay.batch.dropout_keys.expect("a program with dropout is given keys"),
        }
    }

    pub(crate) fn gradient(&self, gradient: Gradient) -> View<'a> {
        let slot =
            self.phase.gradients[gradient.0].expect("every gradient an instruction touches has a place");
        self.at(slot, self.phase.buffers[gradient.0].info)
    }

    fn at(&self, slot: Slot, info: ValueInfo) -> View<'a> {
        let ValueInfo { rows, columns, dtype } = info;
        let within = |buffer: &'a Buffer| buffer.view(dtype, slot.offset_bytes, [rows, columns]);
        let given = |view: Option<View<'a>>, what: &str| match view {
            Some(view) => check(view, dtype).reshape([rows, columns]),
            None => panic!("this program needs {what}"),
        };
        match slot.region {
            Region::Data(index) => {
                let tensor = self.replay.batch.inputs.get(index);
                given(tensor.map(Tensor::view), "a named input")
            }
            Region::Constant(index) => {
                given(self.replay.batch.constants.get(index).map(Tensor::view), "a constant of the model")
            }
            Region::Frame => within(self.replay.frame),
            Region::Output => match self.replay.output {
                Some(view) => check(view, dtype).reshape([rows, columns]),
                None => within(self.replay.frame),
            },
            Region::Workspace => within(self.replay.workspace),
            Region::Deferred => within(self.extra.deferred.expect("a split backward has a deferred buffer")),
            Region::Input => given(self.replay.input, "an input"),
            Region::OutputGradient => given(self.extra.dy, "the gradient of its output"),
            Region::InputGradient => given(self.extra.dx, "a place for the gradient of its input"),
        }
    }
}

/// Destinations of the gradients of an operation's inputs, in the order of [`Facts::inputs`](crate::Facts::inputs).
pub struct InputGradients<'r> {
    pub(crate) run: &'r Run<'r>,
    pub(crate) targets: &'r [(Gradient, Write)],
}

impl<'r> InputGradients<'r> {
    /// Returns the gradient of an input as `[rows, columns]`. It has a place even where nothing needs it.
    pub fn view(&self, input: usize) -> View<'r> {
        self.run.gradient(self.targets[input].0)
    }

    /// Returns the mode of writing the gradient of an input: overwrite, unless
    /// [`Facts::accumulates`](crate::Facts::accumulates).
    pub fn write(&self, input: usize) -> Write {
        self.targets[input].1
    }
}

fn check(view: View<'_>, dtype: DType) -> View<'_> {
    assert_eq!(view.dtype(), dtype, "a program recorded for {dtype} was given {view:?}");
    view
}

/// Returns a view as rows of `width` elements: pixels of an image, tokens, or heads.
pub(crate) fn rows_of(view: View<'_>, width: usize) -> View<'_> {
    view.reshape([view.elements() / width, width])
}

pub(crate) fn split_heads(view: View<'_>, heads: usize, head_dim: usize) -> View<'_> {
    view.reshape([view.elements() / (heads * head_dim), heads, head_dim])
}
