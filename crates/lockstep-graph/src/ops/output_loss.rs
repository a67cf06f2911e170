//! The output layer with its cross-entropy loss, computed for one range of tokens at a time, so that the logits of
//! all tokens never exist at once. With a vocabulary-parallel output layer each rank computes its own logits, and the
//! ranks all-gather three numbers per token.

use std::ops::Range;

use lockstep_comm::CommError;
use lockstep_plan::{
    DType, Initializer,
    work::{Collective, Kept, Pass, Peers as Ranks, Product, TaskKind},
};
use lockstep_tensor::{Activation, Gemm, GemmLayout, View, Write};

#[cfg(feature = "faults")]
use crate::faults::Fault;
use crate::{
    block::{ParameterIndex, Value},
    facts::Facts,
    op::Op,
    ops::linear::Linear,
    placement::{Placement, Split},
    recorder::Recorder,
    replay::{InputGradients, Run},
    shapes::Shapes,
    timeline::Cost,
    work_context::{Work, WorkContext},
};

/// Approximate number of logits that a loss holds at once. It is small enough to save memory, and large enough that
/// reading the output layer's weights and accumulating their gradient once per part costs little.
const LOGITS_AT_ONCE: usize = 1 << 25;

/// The output layer and its cross-entropy, computed for one range of tokens at a time so that all logits never exist at
/// once. In training the backward computes the logits, the losses and the gradients together.
#[derive(Debug)]
struct OutputLoss {
    x: Value,
    weight: ParameterIndex,
    bias: Option<ParameterIndex>,
    /// Scratch for the logits of one range of tokens.
    logits: Value,
    soft_cap: Option<SoftCap>,
    split: Option<VocabularyParallelLoss>,
    losses: Value,
}

/// A bound of the logits.
#[derive(Debug, Clone, Copy)]
struct SoftCap {
    bound: f32,
    /// Scratch for the capped logits of one range of tokens, which the backward reads.
    capped: Value,
}

/// Inputs and scratch of a vocabulary-parallel loss, for the tokens of one range.
#[derive(Debug, Clone, Copy)]
struct VocabularyParallelLoss {
    first_column: usize,
    /// Softmax statistics, three numbers per token: see
    /// [`LossKernels::softmax_statistics`](lockstep_tensor::LossKernels::softmax_statistics).
    statistics: Value,
    /// The statistics of all ranks.
    gathered: Value,
    log_sum_exp: Value,
}

impl VocabularyParallelLoss {
    fn scratch(&self) -> [Value; 3] {
        [self.statistics, self.gathered, self.log_sum_exp]
    }
}

impl Recorder {
    /// Records the linear layer `output` and the cross-entropy of its logits against the batch's labels: one loss per
    /// token, 0 where masked. A `soft_cap` bounds the logits. The logits of all tokens never exist at once, and no rank
    /// holds those of another's shard.
    ///
    /// # Panics
    /// If the layer is split in any way other than by the vocabulary.
    #[track_caller]
    pub fn output_loss(&mut self, x: Value, output: Linear<'_>, soft_cap: Option<f32>) -> Value {
        let Linear { name, out_features, bias, std } = output;
        let (x, share) = match self.split_of(name) {
            None => {
                let is_whole = |placement| placement == Placement::Replicate;
                self.expect_placement(x, is_whole, &format!("output layer {name}"));
                (x, self.whole_share(Placement::Replicate))
            }
            Some(Split::VocabularyParallel) => {
                (self.partial_gradient(x), self.vocabulary_shard(out_features))
            }
            Some(split) => {
                panic!(
                    "{name} [{out_features}, ..]: an output layer is split by the vocabulary, not by {split:?}"
                )
            }
        };
        let shape = [out_features, self.columns(x)];
        let local_vocabulary = share.shape_of(&shape)[0];
        let weight = self.parameter(format!("{name}.weight"), &shape, Initializer::Normal { std }, share);
        let bias = self.bias(bias, name, out_features, share);
        let tokens = self.shape.tokens();
        let parts = (tokens * local_vocabulary).div_ceil(LOGITS_AT_ONCE).max(1);
        let rows = tokens.div_ceil(parts).next_multiple_of(64).min(tokens);
        let dtype = self.shape.dtype;
        let logits = self.local(rows, local_vocabulary, dtype);
        let soft_cap =
            soft_cap.map(|bound| SoftCap { bound, capped: self.local(rows, local_vocabulary, dtype) });
        let split = share.shard.map(|shard| VocabularyParallelLoss {
            first_column: shard.start,
            statistics: self.local(rows, 3, DType::F32),
            gathered: self.local(rows, 3 * self.place.ranks, DType::F32),
            log_sum_exp: self.local(rows, 1, DType::F32),
        });
        let losses = self.local(tokens, 1, DType::F32);
        self.push(OutputLoss { x, weight, bias, logits, soft_cap, split, losses });
        losses
    }
}

/// Logits of a range of tokens, ready for the loss.
struct PartialLoss<'a> {
    tokens: Range<usize>,
    logits: View<'a>,
    /// The bound of the logits and a copy of the capped ones.
    capped: Option<(Activation, View<'a>)>,
    labels: View<'a>,
    losses: View<'a>,
    split: Option<VocabularyParallelLoss>,
}

impl Op for OutputLoss {
    fn facts(&self) -> Facts {
        let Self { x, weight, bias, logits, soft_cap, split, losses } = *self;
        let of_split = split.iter().flat_map(VocabularyParallelLoss::scratch);
        let capped = soft_cap.iter().map(|soft_cap| soft_cap.capped);
        Facts {
            scratch: of_split.chain([logits]).chain(capped).collect(),
            weights: vec![weight],
            bias,
            saved_for_inputs: vec![x],
            is_loss: true,
            vector_flops: [4, 7, 0],
            ..Facts::of("output layer and loss", [x], [losses])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        self.for_each_range(run, |part| losses(run, &part))
    }

    fn backward_loss(&self, run: &Run<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let queue = run.queue();
        let (needs_dx, dx, write) = (run.shapes().differentiates(self.x), dx.view(0), dx.write(0));
        let x = run.value(self.x);
        let gradient = run.trains(self.weight).then(|| run.gradient_to_write(self.weight));
        let of_bias = self.bias.filter(|bias| run.trains(*bias)).map(|bias| run.gradient_of_weight(bias));
        let weight = run.weight(self.weight);
        self.for_each_range(run, |part| {
            losses_with_gradient(run, &part)?;
            let PartialLoss { tokens, logits, capped, .. } = part;
            if let Some((kind, capped)) = capped {
                queue.activation_backward(kind, logits, capped, logits);
            }
            if let Some(dbias) = of_bias {
                queue.sum_rows(logits, dbias);
            }
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

    /// The logits, the loss, and in the backward the needed gradients.
    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let Self { x, weight, logits, losses, .. } = *self;
        let (shapes, facts, pass) = (context.shapes, context.facts, context.pass);
        let (tokens, inner, columns) =
            (shapes.block().tokens() as u64, shapes.columns(x), shapes.columns(logits));
        let of_logits = tokens * columns * shapes.block().dtype.size_bytes() as u64;
        let (of_weight, of_x) = (shapes.weight_bytes(weight), shapes.bytes(x));
        let product = |rows, inner, columns, bytes| {
            let product = Product { rows, inner, columns, count: 1 };
            let cost = Cost { product_flops: product.flops(), ..Cost::of_bytes(bytes) };
            Work { kind: TaskKind::Product(product), cost }
        };
        let is_backward = pass == Pass::BackwardInputs;
        // In the backward the gradient of the logits overwrites them.
        let of_cap = if self.soft_cap.is_some() { 3 } else { 0 };
        let of_loss = of_logits * (of_cap + if is_backward { 2 } else { 1 });
        let loss = Cost {
            vector_flops: tokens * columns * facts.vector_flops(pass),
            ..Cost::of_bytes(of_loss + shapes.bytes(losses))
        };
        let mut work = vec![product(tokens, inner, columns, of_x + of_weight + of_logits)];
        work.extend(self.statistics_gathered(shapes));
        work.push(Work { kind: TaskKind::Stream, cost: loss });
        if is_backward && shapes.differentiates(x) {
            work.push(product(tokens, columns, inner, of_logits + of_weight + context.gradient_bytes));
        }
        if is_backward && shapes.trains(weight) {
            let added = context.weight_gradient_bytes(shapes.parameter_elements(weight));
            work.push(product(columns, tokens, inner, of_logits + of_x + added));
        }
        work
    }

    fn kept(&self, shapes: &Shapes) -> Kept {
        let logits = shapes.block().tokens() as u64 * shapes.columns(self.logits);
        Kept { logits, ..Kept::default() }
    }

    #[cfg(feature = "faults")]
    fn inject(&mut self, fault: Fault) {
        if let (Fault::LogitsFromZero, Some(split)) = (fault, &mut self.split) {
            split.first_column = 0;
        }
    }
}

impl OutputLoss {
    /// Returns the all-gathers of the softmax statistics of a vocabulary-parallel loss, one per range of tokens.
    fn statistics_gathered(&self, shapes: &Shapes) -> Vec<Work> {
        let Some(split) = self.split else { return Vec::new() };
        let token = shapes.columns(split.gathered) * DType::F32.size_bytes() as u64;
        let (tokens, step) = (shapes.block().tokens() as u64, shapes.rows(self.logits));
        let parts = (0..tokens).step_by(step as usize).map(|start| step.min(tokens - start));
        parts.map(|tokens| Work::exchange(Ranks::Tensor, Collective::AllGather, tokens * token)).collect()
    }

    /// Computes the logits of one range of tokens after another and passes each to `finish`.
    fn for_each_range<'a>(
        &self,
        run: &Run<'a>,
        finish: impl Fn(PartialLoss<'a>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let Self { x, weight, bias, logits, soft_cap, split, losses } = *self;
        let bias = bias.map(|bias| run.weight(bias));
        let (x, logits) = (run.value(x), run.value(logits));
        let labels = run.replay().batch.labels.expect("a program with a loss is given labels");
        let losses = run.flat(losses);
        let (all, step) = (losses.elements(), logits.shape().as_matrix().0);
        for start in (0..all).step_by(step) {
            let tokens = start..all.min(start + step);
            let logits = logits.rows(0..tokens.len());
            run.multiply(x.rows(tokens.clone()), weight, bias, logits, tokens.len());
            let capped = soft_cap.map(|SoftCap { bound, capped }| {
                let (kind, capped) = (Activation::SoftCap(bound), run.value(capped).rows(0..tokens.len()));
                run.queue().activation(kind, logits, capped);
                run.queue().cast(capped, logits);
                (kind, capped)
            });
            let (labels, losses) = (labels.rows(tokens.clone()), losses.rows(tokens.clone()));
            finish(PartialLoss { tokens, logits, capped, labels, losses, split })?;
        }
        Ok(())
    }
}

impl VocabularyParallelLoss {
    /// Writes the losses of a range of tokens whose vocabulary is sharded. Returns the log-sum-exp of each token's
    /// logits over the whole vocabulary, f32 `[tokens]`.
    fn losses<'a>(&self, run: &Run<'a>, part: &PartialLoss<'_>) -> Result<View<'a>, CommError> {
        let Self { first_column, statistics, gathered, log_sum_exp } = *self;
        let (queue, ranks, tokens) = (run.queue(), run.peers().group.size(), part.tokens.len());
        let first = |value, elements: usize| run.flat(value).rows(0..elements);
        let statistics = first(statistics, 3 * tokens).reshape([3, tokens]);
        let gathered = first(gathered, 3 * ranks * tokens).reshape([ranks, 3, tokens]);
        let log_sum_exp = first(log_sum_exp, tokens);
        queue.softmax_statistics(part.logits, part.labels, first_column, statistics);
        run.peers().gather(statistics, gathered)?;
        queue.merge_softmax(gathered, part.labels, log_sum_exp, part.losses);
        Ok(log_sum_exp)
    }
}

/// Writes the losses of a range of tokens.
fn losses(run: &Run<'_>, part: &PartialLoss<'_>) -> Result<(), CommError> {
    match part.split {
        None => run.queue().cross_entropy(part.logits, part.labels, part.losses),
        Some(split) => drop(split.losses(run, part)?),
    }
    Ok(())
}

/// Writes the losses of a range of tokens, and overwrites the logits with their gradients.
fn losses_with_gradient(run: &Run<'_>, part: &PartialLoss<'_>) -> Result<(), CommError> {
    let PartialLoss { logits, labels, losses, split, .. } = *part;
    let (queue, seed) = (run.queue(), run.seed().of_tokens);
    match split {
        None => queue.cross_entropy_with_gradient(logits, labels, losses, seed),
        Some(split) => {
            let log_sum_exp = split.losses(run, part)?;
            queue.softmax_gradient(logits, labels, split.first_column, log_sum_exp, seed);
        }
    }
    Ok(())
}
