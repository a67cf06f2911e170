//! Collectives of gradients and weights: gradient reductions, weight gathers for passes, and weight gathers after the optimizer step.

use crate::system::SystemTraits;
use lockstep_plan::ZeroStage;
use lockstep_plan::work::Collective;

/// Phase of a step in which state is communicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StatePassage {
    /// Gradient reduction after the last backward.
    Sum,
    /// Gradient reduction of each micro-batch.
    SumOfMicroBatch,
    /// Weight gather for a pass.
    Gather,
    /// Weight gather after the optimizer step.
    Arrive,
}

/// A number of equal collectives.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct StateExchange {
    pub(super) passage: StatePassage,
    pub(super) collective: Collective,
    /// Number of repetitions.
    pub(super) times: f64,
    /// Bytes of each, counted as in [`Exchange::bytes`](crate::work::Exchange).
    pub(super) bytes: f64,
    /// Factor on the bytes for systems whose collectives do not achieve the link bandwidth.
    pub(super) slowness: f64,
    /// Size and stride of the group.
    pub(super) size: usize,
    pub(super) stride: usize,
}

/// State that is equal on some ranks, which may shard it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct SharedState {
    /// Bytes of gradients, of the weights that the optimizer step updates, and of all weights.
    pub(super) gradient_bytes: f64,
    pub(super) updated_bytes: f64,
    pub(super) weight_bytes: f64,
    /// Number of units.
    pub(super) units: usize,
    /// Size and stride of the shard group.
    pub(super) sharers: usize,
    pub(super) stride: usize,
    /// Data-parallel replicas of the shard group.
    pub(super) replicas: usize,
}

impl SharedState {
    /// Returns the collectives of the state under a ZeRO stage, in a step of this many micro-batches.
    pub(super) fn exchanges(
        &self,
        style: &SystemTraits,
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
        // Sharded state is communicated unit by unit.
        let units = units as f64 * style.gathers_of_a_unit;
        let unit_by_unit = |passage, collective, bytes: f64| StateExchange {
            passage,
            collective,
            times: units,
            bytes: bytes / units,
            slowness: 1.0 / style.gather_efficiency,
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
