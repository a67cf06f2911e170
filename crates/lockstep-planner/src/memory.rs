//! Memory of a rank under systems other than Lockstep, by the formulas of their papers: model state by the bytes of an element
//! (Rajbhandari et al. 2019, section 3.1), activations by what is saved for the backward (Korthikanti et al. 2022, section 4).

use lockstep_plan::work::UnitElements;
use lockstep_plan::{
    Axis, ExpertAxis, MemoryBytes, MemoryCategory, Mesh, Residences, StageMemory, StateBytes, StateOnRank,
    StatePlan, ZeroStage,
};

use crate::Planner;
use crate::recordings::Recording;

/// The inputs of a rank's model state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Holding<'a> {
    /// Bytes of state per element.
    pub(crate) state: StateBytes,
    /// Mesh of all ranks.
    pub(crate) mesh: &'a Mesh,
    /// ZeRO stage of the shard axis.
    pub(crate) zero_stage: ZeroStage,
    /// Stages of the rank.
    pub(crate) stages: &'a [StageMemory],
}

impl Planner {
    /// Returns the bytes of state per element: for Lockstep by the run's optimizer and precision, for others by their style.
    pub(crate) fn state_bytes(&self, recording: &Recording) -> StateBytes {
        let Recording { work, facts, .. } = recording;
        if !self.traits().has_ledger {
            return self.traits().state_bytes(work.dtype);
        }
        let (plan, mesh) = (&self.config.plan, Mesh::default());
        StatePlan::new(plan, Residences::default(), &mesh, 1, facts).element_bytes(work.dtype)
    }
}

/// Returns the memory of a rank under another system: `elements` gives the parameters of a unit, `kept` the bytes of activations
/// that it saves.
pub(crate) fn memory_elsewhere(
    holding: Holding<'_>,
    elements: impl Fn(usize) -> UnitElements,
    kept: impl Fn(usize) -> u64,
) -> MemoryBytes {
    let mut bytes = state_of(holding, elements);
    for stage in holding.stages {
        for unit in stage.units.clone() {
            bytes[MemoryCategory::Activations] += kept(unit) as usize * stage.slots;
        }
    }
    bytes
}

/// Returns the weights, gradients and optimizer state of a rank, in bytes.
pub(crate) fn state_of(holding: Holding<'_>, elements: impl Fn(usize) -> UnitElements) -> MemoryBytes {
    let Holding { state, mesh, zero_stage, stages } = holding;
    let mut bytes = MemoryBytes::default();
    for unit in stages.iter().flat_map(|stage| stage.units.clone()) {
        let held = state_of_unit(state, mesh, zero_stage, elements(unit));
        bytes[MemoryCategory::Parameters] += held.weights as usize;
        bytes[MemoryCategory::Gradients] += held.gradients as usize;
        bytes[MemoryCategory::Optimizer] += held.optimizer as usize;
    }
    bytes
}

/// Returns the state of a unit on a rank: weights of all its parameters, gradients and optimizer state of the trained ones.
pub(crate) fn state_of_unit(
    state: StateBytes,
    mesh: &Mesh,
    zero_stage: ZeroStage,
    elements: UnitElements,
) -> StateOnRank {
    let (view, experts) = (mesh.ranks(), mesh.experts());
    let sharers = (view.degree(Axis::Shard) * view.degree(Axis::Context)) as u64;
    let of_experts = experts.degree(ExpertAxis::ExpertShard) as u64;
    let on_rank = |[dense, mixture]: [f64; 2]| {
        [(dense, sharers), (mixture, of_experts)]
            .map(|(elements, ranks)| state.on_rank(elements as u64, ranks, zero_stage))
    };
    let sum = |held: [StateOnRank; 2], bytes: fn(&StateOnRank) -> u64| held.iter().map(bytes).sum();
    let trained = on_rank(elements.trained);
    StateOnRank {
        weights: sum(on_rank(elements.all), |held| held.weights),
        gradients: sum(trained, |held| held.gradients),
        optimizer: sum(trained, |held| held.optimizer),
    }
}
