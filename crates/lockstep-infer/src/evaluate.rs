//! Loss and perplexity of a model on a text.

use lockstep_data::{Dataset, MicroBatch};
use lockstep_engine::{HostBatch, Runner};
use lockstep_graph::Totals;
use lockstep_model::HeadOutput;

use crate::{InferError, LoadedModel, weights::RunnerWeights};

/// Most windows of a forward.
pub const EVALUATED_WINDOWS: usize = 8;

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evaluation {
    /// Mean cross-entropy over all predicted tokens, in nats.
    pub loss: f64,
    /// Number of predicted tokens.
    pub tokens: u64,
}

impl Evaluation {
    /// Returns the perplexity, `e^loss`.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// Returns the mean loss over every window of `data`, on all ranks. Data-parallel replicas evaluate windows in turn. Each forward calls
/// `advance` with its number of windows, those of all replicas.
///
/// # Errors
/// If memory runs out, a token file is damaged, or another rank is lost.
pub fn evaluate(
    model: &LoadedModel,
    data: &Dataset,
    mut advance: impl FnMut(u64),
) -> Result<Evaluation, InferError> {
    let (replica, replicas) = (model.ranks().replica() as u64, model.ranks().replicas() as u64);
    let sequences = data.windows().div_ceil(replicas).min(EVALUATED_WINDOWS as u64);
    let recorded = model.record(sequences as usize, data.seq_len(), HeadOutput::Losses);
    let groups = model.ranks().groups();
    let mut runner = Runner::for_evaluation(&recorded, &model.arena, groups.clone())?;
    let mut weights = RunnerWeights::new(&model.weights);
    let has_head = model.stage().end == recorded.units();
    let mut batch = MicroBatch::default();
    let mut all = Totals::default();
    for round in (0..data.windows()).step_by((sequences * replicas) as usize) {
        let first = round + replica * sequences;
        data.fill(first..first + sequences, &mut batch)?;
        // The last batches may extend into windows that were counted already; their labels are masked.
        let counted = data.windows().saturating_sub(first).min(sequences) as usize * data.seq_len();
        batch.labels[counted..].fill(lockstep_data::IGNORE_LABEL);
        let host = HostBatch {
            ids: &batch.ids,
            labels: &batch.labels,
            positions: &batch.positions,
            document_starts: &batch.document_starts,
            sample_numbers: &batch.sample_numbers,
            inputs: &[],
        };
        runner.forward_from(&recorded, &*model.queue, &mut weights, &host)?;
        let mut own = Totals::default();
        // Ranks of other pipeline stages have no losses.
        own.sums[0] = if has_head { runner.loss_sum(&recorded) } else { 0.0 };
        own.counts[0] = batch.valid_tokens();
        // In every round, so that no replica waits longer for another than a forward takes.
        all.add(&model.ranks().totals(own)?);
        advance(sequences * replicas);
    }
    let tokens = all.counts[0];
    Ok(Evaluation { loss: all.sums[0] / tokens as f64, tokens })
}
