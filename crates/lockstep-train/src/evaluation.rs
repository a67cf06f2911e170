//! The evaluation of a run: the mean losses and metrics on its validation set, over all ranks.
//!
//! Replicas take micro-batches of the validation set in turn. Losses and metrics are sums, divided once at the end. A
//! last micro-batch that is not full counts if its labels can be masked: tokens, or classes. With f32 labels or none it is
//! left out.

use std::time::Instant;

use lockstep_config::RunConfig;
use lockstep_data::{BatchSource, MicroBatch};
use lockstep_engine::{Engine, Ranks};
use lockstep_graph::Totals;
use lockstep_observe::metrics::EvalMetrics;

use crate::Error;
use crate::reported::Reported;
use crate::training_data::host_batch;

/// Evaluates the weights after `step` on the first `eval_steps` global batches of `valid`. Collective: every rank calls it.
///
/// # Errors
/// If a sample cannot be read, no label counts, or a rank is lost or does not answer in time.
pub(crate) fn evaluate(
    config: &RunConfig,
    ranks: &Ranks,
    valid: &dyn BatchSource,
    engine: &mut Engine,
    reported: &Reported,
    step: u64,
) -> Result<EvalMetrics, Error> {
    let begin = Instant::now();
    let train = &config.train;
    let micro_batch = config.micro_batch() as u64;
    let samples = valid.samples().min(train.eval_steps.saturating_mul(train.global_batch as u64));
    let mut batch = MicroBatch::default();
    let mut totals = Totals::default();
    engine.take_reported();
    // All ranks run the same number of forwards because expert-parallel groups communicate in each. Some ranks read a
    // micro-batch again that does not count.
    let starts: Vec<u64> = (0..samples).step_by(micro_batch as usize).collect();
    for starts in starts.chunks(ranks.replicas()) {
        let own = starts.get(ranks.replica()).copied();
        let first = own.unwrap_or(starts[0]);
        valid.fill(first..first + micro_batch, &mut batch)?;
        // The last micro-batch may extend into samples that do not count; their labels are masked, or it is left out.
        let counted = own.map_or(0, |first| (samples - first).min(micro_batch));
        let is_exact = counted == micro_batch || batch.mask_from(counted as usize, &mut reported.targets());
        engine.evaluate(&host_batch(&batch))?;
        let sums = engine.take_reported();
        if is_exact {
            totals.add(&Totals { sums, counts: host_batch(&batch).counts(engine.model()) });
        }
    }
    let totals = ranks.totals(totals)?;
    if totals.counts[0] == 0 {
        return Err(Error::NothingToEvaluate { samples, micro_batch });
    }
    // Discards the evaluation's traffic so that the next step does not report it.
    engine.take_traffic();
    Ok(EvalMetrics {
        step,
        loss: reported.loss(&totals),
        metrics: reported.metrics(&totals),
        losses: reported.losses(&totals),
        unit: reported.unit,
        counted: totals.counts[0],
        ms: begin.elapsed().as_secs_f64() * 1e3,
    })
}
