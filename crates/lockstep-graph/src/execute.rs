//! Replay of a program: each instruction becomes a kernel call on views of the caller's buffers.
//!
//! A replay walks a list and allocates nothing. If it is traced, each instruction is a span.

use lockstep_comm::CommError;
use lockstep_tensor::{Buffer, Gemm, GemmLayout, GroupedGemm, LayerNorm, Rotation, View, Write};

use crate::{
    attention::AttentionGradients,
    block::{BatchInput, ParameterIndex, TokenRange, Value},
    instruction::{Gradient, Instruction, Phase},
    operation::{Operation, RotaryPairs},
    placement::Redistribute,
    program::Program,
    replay::{Extra, Replay, Run, Seed, split_heads},
    timeline::Trace,
};

impl Program {
    /// Runs the forward and leaves the output in the frame, or in `replay.output`.
    ///
    /// # Errors
    /// If a collective fails or times out, as in all replays. A replay without groups is infallible.
    pub fn forward(&self, replay: &Replay<'_>) -> Result<(), CommError> {
        self.run(&self.forward, replay, Extra::default())
    }

    /// Runs the forward of a step that continues with a backward. A loss is skipped, because [`Program::backward`]
    /// computes its logits anyway; a block without a loss runs in full.
    ///
    /// # Errors
    /// If a collective fails or times out.
    pub fn forward_for_backward(&self, replay: &Replay<'_>) -> Result<(), CommError> {
        let extra = Extra { skips_loss: true, ..Extra::default() };
        self.run(&self.forward, replay, extra)
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
        let extra = Extra { dy, dx, seed, ..Extra::default() };
        self.run(&self.backward, replay, extra)
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
        let extra = Extra { dy, dx, seed, deferred: Some(deferred), ..Extra::default() };
        self.run(&self.backward_inputs, replay, extra)
    }

    /// Runs the second half of a split backward, which adds to the weight gradients.
    ///
    /// # Errors
    /// If a collective fails or times out.
    pub fn backward_weights(&self, replay: &Replay<'_>, deferred: &Buffer) -> Result<(), CommError> {
        let extra = Extra { deferred: Some(deferred), ..Extra::default() };
        self.run(&self.backward_weights, replay, extra)
    }

    fn run(&self, phase: &Phase, replay: &Replay<'_>, extra: Extra<'_>) -> Result<(), CommError> {
        let run = Run { program: self, phase, replay, extra };
        let is_loss = |instruction: &Instruction| match instruction {
            Instruction::Forward(operation) => self.facts[*operation].is_loss,
            _ => false,
        };
        for instruction in &phase.instructions {
            if extra.skips_loss && is_loss(instruction) {
                continue;
            }
            match replay.trace {
                None => run.instruction(instruction)?,
                Some(Trace { timeline, unit }) => timeline.span(
                    || (self.activity(instruction, phase, unit), self.cost(instruction, phase)),
                    || run.instruction(instruction),
                )?,
            }
        }
        Ok(())
    }
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
            _ => self.in_transit(instruction)?,
        }
        Ok(())
    }

    fn forward(&self, operation: &Operation) -> Result<(), CommError> {
        let queue = self.replay.queue;
        match *operation {
            Operation::Embedding { input, table, first_id, tokens, y } => {
                queue.embedding(self.indices(input, tokens), self.weight(table), first_id, self.value(y));
            }
            Operation::Linear { .. } => {
                let (product, y) = self.output_product(operation);
                self.multiply(&product, self.value(y));
            }
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
            // Redistributions whose collective is the same have lines of their own: see `Run::transfer`.
            Operation::Redistribute {
                exchange: exchange @ (Redistribute::AllGatherReplicated | Redistribute::BlocksToTokens),
                x,
                y,
                scratch,
            } => self.transfer(exchange.forward(), self.value(x), self.value(y), scratch)?,
            Operation::Redistribute { exchange, x, y, scratch } => {
                self.transfer(exchange.forward(), self.value(x), self.value(y), scratch)?;
            }
            Operation::Route(route) => self.route(&route)?,
            Operation::Dispatch { x, chosen, tables, rows } => {
                self.dispatch(self.value(x), self.value(chosen), tables, self.value(rows))?;
            }
            Operation::GroupedLinear { x, weight, offsets, y, .. } => {
                let operands = [self.value(x), self.weight(weight), self.value(y)];
                self.grouped_product(GemmLayout::NT, operands, offsets, Write::Overwrite);
            }
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
                let (weight, rstd) = (self.weight(weight), self.flat(rstd));
                let width = weight.elements();
                let (dy, x, dx) = (group(dy, width), self.grouped(x, width), group(target(0), width));
                queue.rms_norm_backward_input(dy, x, weight, rstd, dx, write);
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
            Operation::GroupedLinear { weight, offsets, .. } => {
                let operands = [dy, self.weight(weight), target(0)];
                self.grouped_product(GemmLayout::NN, operands, offsets, write);
            }
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
            Operation::Redistribute {
                exchange: exchange @ (Redistribute::SliceTokens | Redistribute::BlocksToTokens),
                scratch,
                ..
            } => self.transfer(exchange.backward(), dy, target(0), scratch)?,
            Operation::Redistribute { exchange, scratch, .. } => {
                self.transfer(exchange.backward(), dy, target(0), scratch)?;
            }
            Operation::Embedding { .. } | Operation::Add { .. } | Operation::OutputLoss { .. } => {
                unreachable!("no such instruction is derived: {operation:?}")
            }
        }
        Ok(())
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
                    let (b, (c, write)) = (self.value(x), self.replay.parameters.gradient(weight));
                    queue.gemm(Gemm { layout: GemmLayout::TN, a: dy, b, c, bias: None, write });
                }
                if let Some(bias) = bias.filter(is_trained) {
                    queue.sum_rows(dy, gradient(bias));
                }
            }
            Operation::GroupedLinear { x, weight, offsets, .. } => {
                let (gradient, write) = self.replay.parameters.gradient(weight);
                self.grouped_product(GemmLayout::TN, [dy, self.value(x), gradient], offsets, write);
            }
            Operation::RmsNorm { x, weight, rstd, .. } => {
                let dweight = gradient(weight);
                let (width, rstd) = (dweight.elements(), self.flat(rstd));
                queue.rms_norm_backward_weight(group(dy, width), self.grouped(x, width), rstd, dweight);
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

    /// Computes a product for each local expert on its rows.
    fn grouped_product(&self, layout: GemmLayout, [a, b, c]: [View<'_>; 3], offsets: Value, write: Write) {
        let offsets = self.flat(offsets);
        self.replay.queue.grouped_gemm(GroupedGemm { layout, a, b, c, offsets, write });
    }

    /// Reads back the number of rows in use; `None` if all are.
    fn used_rows(&self, offsets: Option<Value>) -> Option<usize> {
        let offsets = self.flat(offsets?);
        let (last, mut rows) = (offsets.elements() - 1, [0_u32]);
        Some(offsets.rows(last..last + 1).read(&mut rows).wait()[0] as usize)
    }

    fn indices(&self, input: BatchInput, tokens: TokenRange) -> View<'a> {
        let all = match input {
            BatchInput::Ids => self.replay.batch.ids,
            BatchInput::Positions => self.replay.batch.positions,
        };
        all.rows(tokens.first..tokens.first + tokens.len)
    }

    /// Returns a value as `[rows, width]`, one row per norm.
    fn grouped(&self, value: Value, width: usize) -> View<'a> {
        group(self.value(value), width)
    }
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
