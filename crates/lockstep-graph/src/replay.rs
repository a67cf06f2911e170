//! Replay of a program: each instruction becomes a kernel call on views of the caller's buffers.
//!
//! A replay walks a list and allocates nothing. If it is traced, each instruction is a span.

use std::cell::Cell;

use lockstep_comm::CommError;
use lockstep_plan::DType;
use lockstep_tensor::{
    Buffer, Dropout, Gemm, GemmLayout, GroupedGemm, Kernels, LayerNorm, Rotation, TokenPositions, View, Write,
};

use crate::{
    BatchInput, CommunicationBuffer, ContextPeers, DropoutSite, GridGroups, ParameterIndex, Peers, Program,
    Trace, Value,
    attention::AttentionGradients,
    backward::{Gradient, GradientBuffer},
    cost::Stage,
    loss::PartialLoss,
    operation::{Operation, RotaryPairs, TokenRange},
    program::{Instruction, Phase},
    recorder::ValueInfo,
    storage::{Region, Slot},
};

/// Current location of a block's weights and gradients.
pub trait Parameters {
    /// Returns the weight that kernels read, in the dtype the program was recorded for.
    fn weight(&self, index: ParameterIndex) -> View<'_>;
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

/// A micro-batch on the device; under context parallelism, its local tokens.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Token ids, u32 `[tokens]`.
    pub ids: View<'a>,
    /// Labels, i32 `[tokens]`, -100 where masked. Required by a program with a loss.
    pub labels: Option<View<'a>>,
    /// Position of each token in its sequence, u32 `[tokens]`.
    pub positions: View<'a>,
    /// Index within its sequence of the first token of each token's document, u32 `[tokens]`. `None`: a sequence is
    /// one document. The all-to-all method of context parallelism needs those of whole sequences.
    pub document_starts: Option<View<'a>>,
    /// Key of (seed, sample, epoch) of each sequence, u32 `[sequences, 2]`. Required by a program with dropout.
    pub dropout_keys: Option<View<'a>>,
    /// Inverse frequencies, f32 `[head_dim / 2]`. Required by a program with rotary embeddings.
    pub inverse_frequencies: Option<View<'a>>,
}

/// Cached keys and values of one sequence, for one layer.
#[derive(Debug, Clone, Copy)]
pub struct KeyValueCache<'a> {
    /// Keys, `[capacity, key_value_heads · head_dim]`.
    pub keys: View<'a>,
    /// Values, `[capacity, key_value_heads · head_dim]`.
    pub values: View<'a>,
    /// Number of cached tokens.
    pub filled: usize,
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
    /// Frame of at least [`Program::frame_bytes`]; if `output` is given, the bytes before the output suffice.
    pub frame: &'a Buffer,
    /// Buffer for the output, `[tokens, columns]`; `None` puts it in the frame.
    pub output: Option<View<'a>>,
    /// Workspace of at least [`Program::workspace_bytes`].
    pub workspace: &'a Buffer,
    /// Index of the block's first dropout site in the model.
    pub first_dropout_site: u32,
    /// Key-value cache, in generation.
    pub cache: Option<KeyValueCache<'a>>,
    /// The tensor-parallel group, if the block was recorded for several ranks.
    pub peers: Option<Peers<'a>>,
    /// Row and column groups of this rank, under two-dimensional tensor parallelism.
    pub grid: Option<GridGroups<'a>>,
    /// The expert-parallel group, if the experts are on several ranks.
    pub expert_peers: Option<Peers<'a>>,
    /// The ranks that route other tokens of the same sequences, if there are any.
    pub sequence_peers: Option<Peers<'a>>,
    /// The context-parallel group, if the block was recorded for several ranks.
    pub context: Option<ContextPeers<'a>>,
    /// Communication buffer, if the program overlaps collectives with products.
    pub communication_buffer: Option<&'a CommunicationBuffer>,
    /// Destination of the smallest router margin
    /// ([`RouterKernels::router_margin`](lockstep_tensor::RouterKernels::router_margin)); `None` if it is not wanted.
    pub router_margin: Option<&'a Cell<f32>>,
    /// Destination of the spans of operations; `None` if the replay is not traced.
    pub trace: Option<Trace<'a>>,
}

/// Gradients that seed a backward. Both are reciprocals of counts of the whole step, so that sums over micro-batches
/// and ranks are means.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Seed {
    /// Gradient of each unmasked token's loss: 1 / number of such tokens.
    pub of_tokens: f32,
    /// Gradient of each sequence's router losses: 1 / number of sequences.
    pub of_sequences: f32,
}

impl Seed {
    /// Returns the seed for a model without routers, `1 / G`.
    pub fn of_tokens(of_tokens: f32) -> Self {
        Self { of_tokens, of_sequences: 0.0 }
    }
}

impl Program {
    /// Runs the forward and leaves the output in the frame, or in `replay.output`.
    ///
    /// # Errors
    /// If a collective fails or times out, as in all replays. A replay without groups is infallible.
    pub fn forward(&self, replay: &Replay<'_>) -> Result<(), CommError> {
        self.run((Stage::Forward, &self.forward), &self.gradients, replay, Extra::default())
    }

    /// Runs the forward of a step that continues with a backward. A loss is skipped, because [`Program::backward`]
    /// computes its logits anyway; a block without a loss runs in full.
    ///
    /// # Errors
    /// If a collective fails or times out.
    pub fn forward_for_backward(&self, replay: &Replay<'_>) -> Result<(), CommError> {
        let phase = (Stage::Forward, &self.forward);
        self.run_some(phase, &self.gradients, replay, Extra::default(), |instruction| {
            !matches!(instruction, Instruction::Forward(operation) if self.operations[*operation].is_loss())
        })
    }

    /// Returns the output in the frame, after a forward; losses also after a backward.
    pub fn output<'a>(&self, frame: &'a Buffer) -> View<'a> {
        let info = self.values[self.output.0];
        let slot = self.forward.values[self.output.0].expect("the output has a place");
        frame.view(info.dtype, slot.offset_bytes, [info.rows, info.columns])
    }

    /// Computes the input and weight gradients, after a forward. `dy` is the gradient of the output (`None` for a
    /// block that ends in a loss); `dx` receives that of the input (`None` for a block without an input).
    ///
    /// # Errors
    /// If a collective fails or times out.
    pub fn backward(
        &self,
        replay: &Replay<'_>,
        dy: Option<View<'_>>,
        dx: Option<View<'_>>,
        seed: Seed,
    ) -> Result<(), CommError> {
        let extra = Extra { dy, dx, deferred: None, seed };
        self.run((Stage::Backward, &self.backward), &self.gradients, replay, extra)
    }

    /// Runs the first half of a split backward, the input gradients. Values for the weight gradients are saved in
    /// `deferred` (at least [`Program::deferred_bytes`]) and in the frame.
    ///
    /// # Errors
    /// If a collective fails or times out.
    pub fn backward_inputs(
        &self,
        replay: &Replay<'_>,
        dy: Option<View<'_>>,
        dx: Option<View<'_>>,
        seed: Seed,
        deferred: &Buffer,
    ) -> Result<(), CommError> {
        let extra = Extra { dy, dx, deferred: Some(deferred), seed };
        self.run((Stage::Backward, &self.backward_inputs), &self.split_gradients, replay, extra)
    }

    /// Runs the second half of a split backward, which adds to the weight gradients.
    ///
    /// # Errors
    /// If a collective fails or times out.
    pub fn backward_weights(&self, replay: &Replay<'_>, deferred: &Buffer) -> Result<(), CommError> {
        let extra = Extra { deferred: Some(deferred), ..Extra::default() };
        self.run((Stage::Backward, &self.backward_weights), &self.split_gradients, replay, extra)
    }

    fn run(
        &self,
        (stage, phase): (Stage, &Phase),
        gradients: &[GradientBuffer],
        replay: &Replay<'_>,
        extra: Extra<'_>,
    ) -> Result<(), CommError> {
        self.run_some((stage, phase), gradients, replay, extra, |_| true)
    }

    /// Runs the instructions that satisfy `is_wanted`.
    fn run_some(
        &self,
        (stage, phase): (Stage, &Phase),
        gradients: &[GradientBuffer],
        replay: &Replay<'_>,
        extra: Extra<'_>,
        is_wanted: impl Fn(&Instruction) -> bool,
    ) -> Result<(), CommError> {
        let run = Run { program: self, phase, gradients, replay, extra };
        for instruction in phase.instructions.iter().filter(|instruction| is_wanted(instruction)) {
            match replay.trace {
                None => run.instruction(instruction)?,
                Some(Trace { timeline, unit }) => timeline.span(
                    || {
                        (
                            self.activity(instruction, phase, stage, unit),
                            self.cost(instruction, phase, gradients),
                        )
                    },
                    || run.instruction(instruction),
                )?,
            }
        }
        Ok(())
    }
}

/// Arguments of backward calls.
#[derive(Clone, Copy, Default)]
pub(crate) struct Extra<'a> {
    dy: Option<View<'a>>,
    dx: Option<View<'a>>,
    deferred: Option<&'a Buffer>,
    pub(crate) seed: Seed,
}

pub(crate) struct Run<'a> {
    pub(crate) program: &'a Program,
    pub(crate) phase: &'a Phase,
    gradients: &'a [GradientBuffer],
    pub(crate) replay: &'a Replay<'a>,
    pub(crate) extra: Extra<'a>,
}

impl<'a> Run<'a> {
    fn instruction(&self, instruction: &Instruction) -> Result<(), CommError> {
        let queue = self.replay.queue;
        match instruction {
            Instruction::Forward(operation) => self.forward(&self.program.operations[*operation])?,
            Instruction::BackwardInputs { operation, dy, dx } => {
                let dy = dy.map(|dy| self.gradient(dy));
                self.backward_inputs(&self.program.operations[*operation], dy, dx)?;
            }
            Instruction::BackwardWeights { operation, dy } => {
                self.backward_weights(&self.program.operations[*operation], self.gradient(*dy))?;
            }
            Instruction::Copy { from, to } => queue.cast(self.gradient(*from), self.gradient(*to)),
            Instruction::Add { from, to } => {
                let to = self.gradient(*to);
                queue.add(to, self.gradient(*from), to);
            }
            Instruction::Start { .. }
            | Instruction::Part { .. }
            | Instruction::Send { .. }
            | Instruction::Await { .. } => self.in_transit(instruction)?,
        }
        Ok(())
    }

    fn forward(&self, operation: &Operation) -> Result<(), CommError> {
        let queue = self.replay.queue;
        match *operation {
            Operation::Embedding { input, table, first_id, tokens, y } => {
                queue.embedding(self.indices(input, tokens), self.weight(table), first_id, self.value(y));
            }
            Operation::Linear { y, .. } => self.multiply(&self.output_product(operation), self.value(y)),
            Operation::SummaLinear(ref linear) => self.block_linear(linear)?,
            Operation::RmsNorm { x, weight, eps, y, rstd } => {
                let weight = self.weight(weight);
                let width = weight.elements();
                queue.rms_norm(self.grouped(x, width), weight, eps, self.grouped(y, width), self.flat(rstd));
            }
            Operation::LayerNorm { bias, eps, y, .. } => {
                let bias = bias.map(|bias| self.weight(bias));
                queue.layer_norm(self.layer_norm(operation), bias, eps, self.value(y));
            }
            Operation::Rope { x, head_dim, pairs, tokens, y } => {
                let heads = (head_dim, pairs);
                self.rope(self.value(x), heads, tokens, Rotation::Forward, self.value(y));
            }
            Operation::JoinHeads { own, tail, heads, tails, y } => {
                let [own, y] = [own, y].map(|value| in_heads(self.value(value), heads));
                queue.join_heads(own, in_heads(self.value(tail), tails), y);
            }
            Operation::ResizeHeads { x, heads, y } => {
                queue.resize_heads(in_heads(self.value(x), heads), in_heads(self.value(y), heads));
            }
            Operation::Attention(ref attention) => self.attention(attention)?,
            Operation::ContextCollective(ref exchange) => {
                self.exchange_sequences(exchange, self.value(exchange.x), self.value(exchange.y))?;
            }
            Operation::SwiGlu { gate, up, y, offsets } => {
                let rows = self.used_rows(offsets);
                let [gate, up, y] = [gate, up, y].map(|value| used(self.value(value), rows));
                queue.swiglu(gate, up, y);
            }
            Operation::Gelu { kind, x, y } => queue.gelu(kind, self.value(x), self.value(y)),
            Operation::Scale { x, factor, y } => queue.scale(factor, self.value(x), self.value(y)),
            Operation::Add { a, b, y } => queue.add(self.value(a), self.value(b), self.value(y)),
            Operation::Dropout { x, dropout, tokens, first_feature, y } => {
                let places = self.places(tokens);
                queue.dropout(self.dropout(dropout), places, first_feature, self.value(x), self.value(y));
            }
            Operation::Redistribute { exchange, x, y, scratch } => {
                self.exchange(exchange, self.value(x), self.value(y), scratch)?;
            }
            Operation::Route(route) => self.route(&route)?,
            Operation::Dispatch { x, chosen, tables, rows } => {
                self.dispatch(self.value(x), self.value(chosen), tables, self.value(rows))?;
            }
            Operation::GroupedLinear { x, weight, offsets, y, .. } => queue.grouped_gemm(GroupedGemm {
                layout: GemmLayout::NT,
                a: self.value(x),
                b: self.weight(weight),
                c: self.value(y),
                offsets: self.flat(offsets),
                write: Write::Overwrite,
            }),
            Operation::Combine { rows, weights, tables, returned, y } => {
                self.combine(self.value(rows), self.value(weights), (tables, returned), self.value(y))?;
            }
            Operation::GateRows { gate, x, y } => {
                queue.gate_rows(self.value(gate), self.value(x), self.value(y));
            }
            Operation::OutputLoss { .. } => self.output_loss(operation, |part| self.losses(&part))?,
        }
        Ok(())
    }

    fn backward_inputs(
        &self,
        operation: &Operation,
        dy: Option<View<'a>>,
        dx: &[(Gradient, Write)],
    ) -> Result<(), CommError> {
        let queue = self.replay.queue;
        let target = |index: usize| self.gradient(dx[index].0);
        let write = dx[0].1;
        if let Operation::OutputLoss { x, weight, .. } = *operation {
            return self.output_loss_gradients(operation, (x, weight), target(0), write);
        }
        let dy = dy.expect("every operation but a loss is given the gradient of its output");
        match *operation {
            Operation::Linear { .. } => self.multiply(&self.input_product(operation, dy, write), target(0)),
            Operation::SummaLinear(ref linear) => {
                self.block_linear_input_gradient(linear, dy, target(0), write)?;
            }
            Operation::RmsNorm { x, weight, rstd, .. } => {
                self.rms_norm_input_gradient(x, weight, rstd, dy, (target(0), write));
            }
            Operation::LayerNorm { .. } => {
                queue.layer_norm_backward_input(self.layer_norm(operation), dy, target(0), write);
            }
            Operation::Rope { head_dim, pairs, tokens, .. } => {
                self.rope(dy, (head_dim, pairs), tokens, Rotation::Backward, target(0));
            }
            Operation::JoinHeads { heads, tails, .. } => {
                let (down, dtail) = (in_heads(target(0), heads), in_heads(target(1), tails));
                queue.join_heads_backward(in_heads(dy, heads), down, dtail);
            }
            Operation::ResizeHeads { heads, .. } => {
                queue.resize_heads(in_heads(dy, heads), in_heads(target(0), heads));
            }
            Operation::Attention(ref attention) => {
                let gradients = AttentionGradients { dq: target(0), dk: target(1), dv: target(2) };
                self.attention_backward(attention, dy, gradients)?;
            }
            Operation::ContextCollective(ref exchange) => {
                self.exchange_sequence_gradients(exchange, dy, target(0))?;
            }
            Operation::SwiGlu { gate, up, offsets, .. } => {
                let rows = self.used_rows(offsets);
                let operands = [dy, self.value(gate), self.value(up), target(0), target(1)];
                let [dy, gate, up, dgate, dup] = operands.map(|view| used(view, rows));
                queue.swiglu_backward(dy, gate, up, dgate, dup);
            }
            Operation::Route(route) => self.route_gradient(&route, dy, target(0)),
            Operation::Dispatch { tables, .. } => self.dispatch_gradient(dy, tables, target(0))?,
            Operation::GroupedLinear { weight, offsets, .. } => queue.grouped_gemm(GroupedGemm {
                layout: GemmLayout::NN,
                a: dy,
                b: self.weight(weight),
                c: target(0),
                offsets: self.flat(offsets),
                write,
            }),
            Operation::Combine { rows, weights, tables, returned, .. } => {
                let rows = self.value(returned.unwrap_or(rows));
                self.combine_gradient(dy, rows, self.value(weights), tables, [target(0), target(1)])?;
            }
            Operation::GateRows { gate, x, .. } => {
                queue.gate_rows_backward(dy, self.value(gate), self.value(x), target(0), target(1));
            }
            Operation::Gelu { kind, x, .. } => queue.gelu_backward(kind, dy, self.value(x), target(0)),
            Operation::Scale { factor, .. } => queue.scale(factor, dy, target(0)),
            Operation::Dropout { dropout, tokens, first_feature, .. } => {
                queue.dropout(self.dropout(dropout), self.places(tokens), first_feature, dy, target(0));
            }
            Operation::Redistribute { exchange, scratch, .. } => {
                self.exchange_gradient(exchange, dy, target(0), scratch)?;
            }
            Operation::Embedding { .. } | Operation::Add { .. } | Operation::OutputLoss { .. } => {
                unreachable!("no such instruction is derived: {operation:?}")
            }
        }
        Ok(())
    }

    /// Computes the losses and the gradients of the output layer's operands, one range of tokens at a time.
    fn output_loss_gradients(
        &self,
        operation: &Operation,
        (x, weight): (Value, ParameterIndex),
        dx: View<'a>,
        write: Write,
    ) -> Result<(), CommError> {
        let queue = self.replay.queue;
        let needs_dx = self.program.training.differentiates(x);
        let x = self.value(x);
        let is_trained = self.program.training.trains(weight);
        let gradient = is_trained.then(|| self.replay.parameters.gradient(weight));
        let weight = self.weight(weight);
        self.output_loss(operation, |part| {
            self.losses_with_gradient(&part)?;
            let PartialLoss { tokens, logits, .. } = part;
            let product = |layout, b, c, write| Gemm { layout, a: logits, b, c, bias: None, write };
            if needs_dx {
                queue.gemm(product(GemmLayout::NN, weight, dx.rows(tokens.clone()), write));
            }
            if let Some((dweight, first)) = gradient {
                let add = if tokens.start == 0 { first } else { Write::Accumulate };
                queue.gemm(product(GemmLayout::TN, x.rows(tokens), dweight, add));
            }
            Ok(())
        })
    }

    fn rms_norm_input_gradient(
        &self,
        x: Value,
        weight: ParameterIndex,
        rstd: Value,
        dy: View<'a>,
        (dx, write): (View<'a>, Write),
    ) {
        let weight = self.weight(weight);
        let width = weight.elements();
        let (dy, x, dx) = (group(dy, width), self.grouped(x, width), group(dx, width));
        self.replay.queue.rms_norm_backward_input(dy, x, weight, self.flat(rstd), dx, write);
    }

    fn backward_weights(&self, operation: &Operation, dy: View<'_>) -> Result<(), CommError> {
        let queue = self.replay.queue;
        // Zeroes a gradient that is to be overwritten, for kernels that only accumulate.
        let gradient = |index: ParameterIndex| {
            let (gradient, write) = self.replay.parameters.gradient(index);
            if write == Write::Overwrite {
                queue.zero(gradient);
            }
            gradient
        };
        let is_trained = |index: &ParameterIndex| self.program.training.trains(*index);
        match *operation {
            Operation::Embedding { input, table, first_id, tokens, .. } => {
                let (rows, first) = match self.replay.parameters.gradient_rows(table) {
                    Some(rows) => (rows, 0),
                    None => (self.indices(input, tokens), first_id),
                };
                queue.embedding_backward(rows, dy, first, gradient(table));
            }
            Operation::Linear { x, weight, bias, .. } => {
                if is_trained(&weight) {
                    let (c, write) = self.replay.parameters.gradient(weight);
                    queue.gemm(Gemm {
                        layout: GemmLayout::TN,
                        a: dy,
                        b: self.value(x),
                        c,
                        bias: None,
                        write,
                    });
                }
                if let Some(bias) = bias.filter(is_trained) {
                    queue.sum_rows(dy, gradient(bias));
                }
            }
            Operation::GroupedLinear { x, weight, offsets, .. } => {
                let (c, write) = self.replay.parameters.gradient(weight);
                queue.grouped_gemm(GroupedGemm {
                    layout: GemmLayout::TN,
                    a: dy,
                    b: self.value(x),
                    c,
                    offsets: self.flat(offsets),
                    write,
                });
            }
            Operation::RmsNorm { x, weight, rstd, .. } => {
                let dweight = gradient(weight);
                let width = dweight.elements();
                queue.rms_norm_backward_weight(
                    group(dy, width),
                    self.grouped(x, width),
                    self.flat(rstd),
                    dweight,
                );
            }
            Operation::LayerNorm { weight, bias, .. } if is_trained(&weight) => {
                let norm = self.layer_norm(operation);
                let bias = bias.filter(is_trained).map(gradient);
                queue.layer_norm_backward_weight(norm, dy, gradient(weight), bias);
            }
            Operation::LayerNorm { bias: Some(bias), .. } => queue.sum_rows(dy, gradient(bias)),
            Operation::SummaLinear(ref linear) => {
                if is_trained(&linear.weight) {
                    self.block_linear_weight_gradient(linear, dy)?;
                }
                if let Some(bias) = linear.bias.filter(is_trained) {
                    queue.sum_rows(dy, gradient(bias));
                }
            }
            _ => unreachable!("no such instruction is derived: {operation:?}"),
        }
        Ok(())
    }

    /// Returns the places of some tokens in their sequences, which key dropout masks.
    pub(crate) fn places(&self, tokens: TokenRange) -> TokenPositions {
        let (seq_len, context) = (self.program.shape.seq_len, self.program.context);
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

    fn rope(
        &self,
        x: View<'_>,
        (head_dim, pairs): (usize, RotaryPairs),
        tokens: TokenRange,
        rotation: Rotation,
        y: View<'_>,
    ) {
        let batch = &self.replay.batch;
        let positions = batch.positions.rows(tokens.first..tokens.first + tokens.len);
        let frequencies =
            batch.inverse_frequencies.expect("a program with rotary embeddings is given frequencies");
        let heads = x.shape().as_matrix().1 / head_dim;
        let (x, y) = (split_heads(x, heads, head_dim), split_heads(y, heads, head_dim));
        let queue = self.replay.queue;
        match pairs {
            RotaryPairs::Halves => queue.rope(x, positions, frequencies, rotation, y),
            RotaryPairs::Neighbours => {
                queue.rope_interleaved(x, positions, frequencies, rotation, y);
            }
        }
    }

    fn layer_norm(&self, operation: &Operation) -> LayerNorm<'a> {
        let Operation::LayerNorm { x, weight, mean, rstd, .. } = *operation else {
            unreachable!("called for a layer norm: {operation:?}")
        };
        LayerNorm {
            x: self.value(x),
            weight: self.weight(weight),
            mean: self.flat(mean),
            rstd: self.flat(rstd),
        }
    }

    /// Reads back the number of rows in use; `None` if all are.
    fn used_rows(&self, offsets: Option<Value>) -> Option<usize> {
        let offsets = self.flat(offsets?);
        let (last, mut rows) = (offsets.elements() - 1, [0_u32]);
        Some(offsets.rows(last..last + 1).read(&mut rows).wait()[0] as usize)
    }

    /// Tokens per sequence, those of other ranks included.
    pub(crate) fn whole_seq_len(&self) -> usize {
        self.program.shape.seq_len * self.program.context.ranks
    }

    fn indices(&self, input: BatchInput, tokens: TokenRange) -> View<'a> {
        let all = match input {
            BatchInput::Ids => self.replay.batch.ids,
            BatchInput::Positions => self.replay.batch.positions,
        };
        all.rows(tokens.first..tokens.first + tokens.len)
    }

    pub(crate) fn peers(&self) -> Peers<'a> {
        self.replay.peers.expect("a program that was recorded for several ranks is given them")
    }

    pub(crate) fn labels(&self) -> View<'a> {
        self.replay.batch.labels.expect("a program with a loss is given labels")
    }

    pub(crate) fn weight(&self, index: ParameterIndex) -> View<'a> {
        self.replay.parameters.weight(index)
    }

    /// Returns a value as `[tokens, columns]`.
    pub(crate) fn value(&self, value: Value) -> View<'a> {
        let slot = self.phase.values[value.0].expect("every value an instruction touches has a place");
        self.at(slot, self.program.values[value.0])
    }

    /// Returns a value as `[rows, width]`, one row per norm.
    fn grouped(&self, value: Value, width: usize) -> View<'a> {
        group(self.value(value), width)
    }

    /// Returns a statistic as a vector.
    pub(crate) fn flat(&self, value: Value) -> View<'a> {
        let view = self.value(value);
        view.reshape([view.elements()])
    }

    pub(crate) fn gradient(&self, gradient: Gradient) -> View<'a> {
        let slot =
            self.phase.gradients[gradient.0].expect("every gradient an instruction touches has a place");
        self.at(slot, self.gradients[gradient.0].info)
    }

    fn at(&self, slot: Slot, info: ValueInfo) -> View<'a> {
        let ValueInfo { rows, columns, dtype } = info;
        let within = |buffer: &'a Buffer| buffer.view(dtype, slot.offset_bytes, [rows, columns]);
        let given = |view: Option<View<'a>>, what: &str| match view {
            Some(view) => check(view, dtype).reshape([rows, columns]),
            None => panic!("this program needs {what}"),
        };
        match slot.region {
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

fn check(view: View<'_>, dtype: DType) -> View<'_> {
    assert_eq!(view.dtype(), dtype, "a program recorded for {dtype} was given {view:?}");
    view
}

/// Returns the first `rows` rows, or all.
fn used(view: View<'_>, rows: Option<usize>) -> View<'_> {
    rows.map_or(view, |rows| view.rows(0..rows))
}

fn group(view: View<'_>, width: usize) -> View<'_> {
    view.reshape([view.elements() / width, width])
}

/// Reshapes a value to `[rows, heads, columns / heads]`.
fn in_heads(view: View<'_>, heads: usize) -> View<'_> {
    let (rows, columns) = view.shape().as_matrix();
    view.reshape([rows, heads, columns / heads])
}

pub(crate) fn split_heads(view: View<'_>, heads: usize, head_dim: usize) -> View<'_> {
    view.reshape([view.elements() / (heads * head_dim), heads, head_dim])
}
