//! The inputs of a state layout: what a plan says of model state, and what the optimizer and the precision of a run keep of it.

use crate::mesh::{Axis, Mesh};
use crate::{DType, DiskPlan, Plan, Quantization, Residence, Residences, Sharding, StateKind, ZeroStage};

/// The state that the optimizer and the precision of a run keep, whatever its plan.
#[derive(Debug, Clone, PartialEq)]
pub struct StateFacts {
    /// True if f32 weights are kept beside those that kernels read.
    pub has_master: bool,
    /// Type of the optimizer's numbers.
    pub optimizer_dtype: DType,
    /// The optimizer's numbers: each with the parameters of which it is kept, by [`ParameterId`](crate::ParameterId).
    pub optimizer_keeps: Vec<(StateKind, Vec<bool>)>,
    /// Elements of a window in which offloaded state is moved.
    pub window_elements: usize,
    /// Bytes of packed operands.
    pub packed_bytes: usize,
}

/// The inputs of a [`StateLayout`](super::StateLayout) other than the recorded model and its stages.
#[derive(Debug, Clone, PartialEq)]
pub struct StatePlan {
    /// State that the optimizer and the precision keep.
    pub facts: StateFacts,
    /// The ZeRO stage.
    pub zero_stage: ZeroStage,
    /// Codes of weights and gradients between the ranks of a shard group.
    pub quantization: Quantization,
    /// Data-parallel replicas, each whole or sharded.
    pub replicas: usize,
    /// Buffers and gathers of sharded weights.
    pub sharding: Sharding,
    /// Model state on disk; `None` if all of it is in memory.
    pub on_disk: Option<DiskPlan>,
    /// True if saved activations are on disk.
    pub has_activations_on_disk: bool,
    /// Micro-batches of a step, on all data-parallel and context-parallel ranks together.
    pub micro_batches: usize,
    /// Copies of the state that are kept, to go back to.
    pub kept_copies: usize,
    /// Copies that are made if there is memory for them, to be saved beside the steps.
    pub saved_copies: usize,
}

impl StatePlan {
    /// The state of `plan` on a mesh, for steps of so many sequences, without copies. `residences` are the plan's, as the device has them:
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
