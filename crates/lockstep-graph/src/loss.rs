//! The output layer with its cross-entropy loss, computed for one range of tokens at a time, so that the logits of
//! all tokens never exist at once. With a vocabulary-parallel output layer each rank computes its own logits, and the
//! ranks all-gather three numbers per token.

use std::ops::Range;

use lockstep_comm::CommError;
use lockstep_tensor::{Gemm, GemmLayout, View, Write};

use crate::{
    operation::{Operation, SplitLoss},
    replay::Run,
};

/// Logits of a range of tokens, ready for the loss.
pub(crate) struct PartialLoss<'a> {
    pub(crate) tokens: Range<usize>,
    pub(crate) logits: View<'a>,
    labels: View<'a>,
    losses: View<'a>,
    split: Option<SplitLoss>,
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
    fn split_losses(&self, part: &PartialLoss<'a>, split: SplitLoss) -> Result<View<'a>, CommError> {
        let SplitLoss { first_column, statistics, gathered, log_sum_exp } = split;
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
