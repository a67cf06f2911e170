//! Inputs of a state layout: model state settings of the plan, and the state kept by the run's optimizer and precision.

use crate::mesh::{Axis, Mesh};
use crate::{DType, OffloadPlan, Plan, Quantization, Residence, Residences, Sharding, StateKind, ZeroStage};

/// State that the optimizer and the precision of a run keep, whatever the plan.
#[derive(Debug, Clone, PartialEq)]
pub struct StateFacts {
    /// True if f32 master weights are kept beside the weights that kernels read.
    pub has_master: bool,
    /// Dtype of the optimizer's states.
    pub optimizer_dtype: DType,
    /// States of the optimizer, each with a flag per [`ParameterId`](crate::ParameterId): true if the state exists for that parameter.
    pub optimizer_keeps: Vec<(StateKind, Vec<bool>)>,
    /// Elements of a window in which offloaded state is streamed.
    pub window_elements: usize,
    /// Bytes of packed operands.
    pub packed_bytes: usize,
}

/// The inputs of a [`StateLayout`](super::StateLayout) other than the recorded model and its stages.
#[derive(Debug, Clone, PartialEq)]
pub struct StatePlan {
    /// State of the optimizer and the precision.
    pub facts: StateFacts,
    /// The ZeRO stage.
    pub zero_stage: ZeroStage,
    /// Quantized types of collectives within a shard group.
    pub quantization: Quantization,
    /// Data-parallel replicas, each of which may be sharded.
    pub replicas: usize,
    /// Reshard policy, limits and wrapping of sharded state.
    pub sharding: Sharding,
    /// Offloaded model state; `None` if all of it is in device memory. State layouts treat host memory like a disk.
    pub on_disk: Option<OffloadPlan>,
    /// True if saved activations are offloaded, to disk or to host memory.
    pub has_activations_on_disk: bool,
    /// Micro-batches of a step, summed over all data-parallel and context-parallel ranks.
    pub micro_batches: usize,
    /// Copies of the state that are kept in memory to roll back to.
    pub kept_copies: usize,
    /// Copies for asynchronous saving, made if there is memory for them.
    pub saved_copies: usize,
}

impl StatePlan {
    /// Returns the inputs for `plan` on a mesh, without copies of the state. `residences` are the plan's as the device sees them: use
    /// [`Residences::on_cpu`] for ranks on CPUs.
    pub fn new(
        plan: &Plan,
        residences: Residences,
        mesh: &Mesh,
        global_batch: usize,
        facts: &StateFacts,
    ) -> Self {
        let ranks = mesh.ranks();
        Self {
            facts: facts.clone(),
            zero_stage: plan.effective_zero_stage(),
            quantization: plan.quantization(),
            replicas: ranks.degree(Axis::Replicate),
            sharding: plan.sharding.clone(),
            on_disk: residences.offload_plan(facts.window_elements),
            has_activations_on_disk: residences.activations != Residence::Memory,
            micro_batches: global_batch / plan.micro_batch_of(global_batch) * ranks.degree(Axis::Context),
            kept_copies: 0,
            saved_copies: 0,
        }
    }
}
