//! What ranks send each other of gradients and weights beside passes: sums of gradients, gathers of weights, and what is gathered after
//! the update.

use crate::predict::style::Style;
use lockstep_plan::ZeroStage;
use lockstep_plan::work::Collective;

/// When something of the state goes between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StatePassage {
    /// Gradients, after the last backward.
    Sum,
    /// Gradients of each micro-batch.
    SumOfMicroBatch,
    /// Weights, for passes.
    Gather,
    /// Weights, after the update.
    Arrive,
}

/// Collectives that are alike.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct StateExchange {
    pub(super) passage: StatePassage,
    pub(super) collective: Collective,
    /// How many there are.
    pub(super) times: f64,
    /// Bytes of each, as [`Exchange::bytes`](lockstep_plan::work::Exchange) counts them.
    pub(super) bytes: f64,
    /// They take as long as if there were so many times these bytes: not everybody comes to what links give.
    pub(super) slowness: f64,
    /// Ranks, and how far each is from the one before.
    pub(super) size: usize,
    pub(super) stride: usize,
}

/// State that ranks have alike and may share out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct SharedState {
    /// Bytes of gradients, of the weights that the optimizer step changes, and of all weights.
    pub(super) gradient_bytes: f64,
    pub(super) updated_bytes: f64,
    pub(super) weight_bytes: f64,
    /// In how many units.
    pub(super) units: usize,
    /// Ranks that may share it out, each `stride` after the other.
    pub(super) sharers: usize,
    pub(super) stride: usize,
    /// How many times that is there.
    pub(super) replicas: usize,
}

impl SharedState {
    /// What goes between its ranks where they share out what `zero_stage` says, in a step of so many micro-batches.
    pub(super) fn exchanges(
        &self,
        style: &Style,
        zero_stage: ZeroStage,
        micro_batches: usize,
    ) -> impl Iterator<Item = StateExchange> + use<> {
        let Self { gradient_bytes, updated_bytes, weight_bytes, units, sharers, stride, replicas } = *self;
        let sum = |bytes, size, stride| StateExchange {
            passage: StatePassage::Sum,
            collective: Collective::AllReduce,
            times: 1.0,
            bytes,
            slowness: 1.0,
            size,
            stride,
        };
        if zero_stage == ZeroStage::Nothing {
            return [Some(sum(gradient_bytes, sharers * replicas, stride)), None, None].into_iter().flatten();
        }
        // What is shared out goes unit by unit.
        let units = units as f64 * style.gathers_of_a_unit;
        let unit_by_unit = |passage, collective, bytes: f64| StateExchange {
            passage,
            collective,
            times: units,
            bytes: bytes / units,
            slowness: 1.0 / style.gathers_at,
            size: sharers,
            stride,
        };
        let is_of_micro_batch = zero_stage >= ZeroStage::Gradients && micro_batches > 1;
        let scattered = if is_of_micro_batch { StatePassage::SumOfMicroBatch } else { StatePassage::Sum };
        let (gathered, gathered_bytes) = match zero_stage {
            ZeroStage::Parameters => (StatePassage::Gather, weight_bytes),
            _ => (StatePassage::Arrive, updated_bytes),
        };
        let own = sum(gradient_bytes / sharers as f64, replicas, stride * sharers);
        let scatter = unit_by_unit(scattered, Collective::ReduceScatter, gradient_bytes);
        let gather = unit_by_unit(gathered, Collective::AllGather, gathered_bytes);
        [Some(own), Some(scatter), Some(gather)].into_iter().flatten()
    }
}
