//! The output layer with its cross-entropy loss, computed for one range of tokens at a time, so that the logits of
//! all tokens never exist at once. With a vocabulary-parallel output layer each rank computes its own logits, and the
//! ranks all-gather three numbers per token.

use std::ops::Range;

use lockstep_comm::CommError;
use lockstep_plan::{DType, Initializer};
use lockstep_tensor::{Gemm, GemmLayout, View, Write};

use crate::{
    block::{Bias, ParameterIndex, Value},
    linear::Linear,
    operation::{Operation, VocabularyParallelLoss},
    placement::{Placement, Split},
    recorder::Recorder,
    replay::Run,
};

/// Approximate number of logits that a loss holds at once. It is small enough to save memory, and large enough that
/// reading the output layer's weights and accumulating their gradient once per part costs little.
const LOGITS_AT_ONCE: usize = 1 << 25;

impl Recorder {
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
        let local_vocabulary = share.shape_of(&shape)[0];
        let weight = self.parameter(format!("{name}.weight"), &shape, Initializer::Normal { std }, share);
        let tokens = self.shape.tokens();
        let parts = (tokens * local_vocabulary).div_ceil(LOGITS_AT_ONCE).max(1);
        let rows = tokens.div_ceil(parts).next_multiple_of(64).min(tokens);
        let logits = self.local(rows, local_vocabulary, self.shape.dtype);
        let split = share.shard.map(|shard| VocabularyParallelLoss {
            first_column: shard.start,
            statistics: self.local(rows, 3, DType::F32),
            gathered: self.local(rows, 3 * self.place.ranks, DType::F32),
            log_sum_exp: self.local(rows, 1, DType::F32),
        });
        let losses = self.local(tokens, 1, DType::F32);
        self.operations.push(Operation::OutputLoss { x, weight, logits, split, losses });
        losses
    }
}

/// Logits of a range of tokens, ready for the loss.
pub(crate) struct PartialLoss<'a> {
    pub(crate) tokens: Range<usize>,
    pub(crate) logits: View<'a>,
    labels: View<'a>,
    losses: View<'a>,
    split: Option<VocabularyParallelLoss>,
}

impl<'a> Run<'a> {
    /// Computes the logits of one range of tokens after another and passes each to `finish`.
    pub(crate) fn output_loss(
        &self,
        operation: &Operation,
        finish: impl Fn(PartialLoss<'a>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let Operation::OutputLoss { x, weight, logits, split, losses } = *operation else {
            unreachable!("called for a loss: {operation:?}")
        };
        let (x, weight, logits) = (self.value(x), self.weight(weight), self.value(logits));
        let (labels, losses) = (self.labels(), self.flat(losses));
        let (all, step) = (losses.elements(), logits.shape().as_matrix().0);
        for start in (0..all).step_by(step) {
            let tokens = start..all.min(start + step);
            let logits = logits.rows(0..tokens.len());
            let layout = GemmLayout::NT;
            let (a, write) = (x.rows(tokens.clone()), Write::Overwrite);
            self.replay.queue.gemm(Gemm { layout, a, b: weight, c: logits, bias: None, write });
            let (labels, losses) = (labels.rows(tokens.clone()), losses.rows(tokens.clone()));
            finish(PartialLoss { tokens, logits, labels, losses, split })?;
        }
        Ok(())
    }

    /// Computes the losses and the gradients of the output layer's operands, one range of tokens at a time.
    pub(crate) fn output_loss_gradients(
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

    /// Writes the losses of a range of tokens.
    pub(crate) fn losses(&self, part: &PartialLoss<'a>) -> Result<(), CommError> {
        match part.split {
            None => self.replay.queue.cross_entropy(part.logits, part.labels, part.losses),
            Some(split) => drop(self.split_losses(part, split)?),
        }
        Ok(())
    }

    /// Writes the losses of a range of tokens, and overwrites the logits with their gradients.
    pub(crate) fn losses_with_gradient(&self, part: &PartialLoss<'a>) -> Result<(), CommError> {
        let PartialLoss { logits, labels, losses, split, .. } = *part;
        let (queue, seed) = (self.replay.queue, self.extra.seed.of_tokens);
        match split {
            None => queue.cross_entropy_with_gradient(logits, labels, losses, seed),
            Some(split) => {
                let log_sum_exp = self.split_losses(part, split)?;
                queue.softmax_gradient(logits, labels, split.first_column, log_sum_exp, seed);
            }
        }
        Ok(())
    }

    /// Writes the losses of a range of tokens whose vocabulary is sharded. Returns the log-sum-exp of each token's
    /// logits over the whole vocabulary, f32 `[tokens]`.
    fn split_losses(
        &self,
        part: &PartialLoss<'a>,
        split: VocabularyParallelLoss,
    ) -> Result<View<'a>, CommError> {
        let VocabularyParallelLoss { first_column, statistics, gathered, log_sum_exp } = split;
        let (queue, ranks, tokens) = (self.replay.queue, self.peers().group.size(), part.tokens.len());
        let first = |value, elements: usize| self.flat(value).rows(0..elements);
        let statistics = first(statistics, 3 * tokens).reshape([3, tokens]);
        let gathered = first(gathered, 3 * ranks * tokens).reshape([ranks, 3, tokens]);
        let log_sum_exp = first(log_sum_exp, tokens);
        queue.softmax_statistics(part.logits, part.labels, first_column, statistics);
        self.peers().gather(statistics, gathered)?;
        queue.merge_softmax(gathered, part.labels, log_sum_exp, part.losses);
        Ok(log_sum_exp)
    }
}
