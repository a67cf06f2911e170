//! What a rank needs under systems that are not Lockstep, by the formulas that their papers give: state by the bytes of an element
//! (Rajbhandari et al. 2019, section 3.1), activations by what is kept for gradients (Korthikanti et al. 2022, section 4).

use lockstep_plan::cluster::Software;
use lockstep_plan::{
    Axis, DType, ExpertAxis, MemoryBytes, MemoryCategory, Mesh, StageMemory, StateBytes, ZeroStage,
};

use crate::planner::Planner;
use crate::planner::recordings::Recording;

/// What a rank has of a model whose state is shared out so.
#[derive(Debug, Clone, Copy)]
pub(super) struct Holding<'a> {
    /// Bytes of an element's state.
    pub(super) state: StateBytes,
    /// Who is where.
    pub(super) mesh: &'a Mesh,
    /// What is shared out.
    pub(super) zero_stage: ZeroStage,
    /// The rank's stages.
    pub(super) stages: &'a [StageMemory],
}

impl Planner {
    /// Bytes of an element's state: of Lockstep what the run's optimizer keeps of every parameter, of others what their style says.
    pub(super) fn state_bytes(&self, recording: &Recording) -> StateBytes {
        let Recording { work, state, .. } = recording;
        if self.cluster.software != Software::Lockstep {
            return self.cluster.software.style().state_bytes(work.dtype);
        }
        // Muon keeps one number of a matrix and two of the rest: what only some parameters have is left out.
        let of_all =
            state.optimizer_keeps.iter().filter(|(_, keeps)| keeps.iter().all(|keeps| *keeps)).count();
        let master = if state.has_master { DType::F32.size_bytes() } else { 0 };
        StateBytes {
            weight: work.dtype.size_bytes() as u64,
            gradient: DType::F32.size_bytes() as u64,
            optimizer: (master + of_all * state.optimizer_dtype.size_bytes()) as u64,
        }
    }
}

/// What a rank needs of another system than Lockstep; `elements` says of each unit its parameters outside experts and in them, `kept` the
/// bytes that it keeps.
pub(super) fn memory_elsewhere(
    holding: Holding<'_>,
    elements: impl Fn(usize) -> [f64; 2],
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

/// Weights, gradients and the optimizer's state of a rank, by the bytes of an element.
pub(super) fn state_of(holding: Holding<'_>, elements: impl Fn(usize) -> [f64; 2]) -> MemoryBytes {
    let Holding { state, mesh, zero_stage, stages } = holding;
    let (view, experts) = (mesh.ranks(), mesh.experts());
    let sharers = (view.degree(Axis::Shard) * view.degree(Axis::Context)) as u64;
    let of_experts = experts.degree(ExpertAxis::ExpertShard) as u64;
    let mut bytes = MemoryBytes::default();
    for unit in stages.iter().flat_map(|stage| stage.units.clone()) {
        let [dense, mixture] = elements(unit);
        for held in [
            state.on_rank(dense as u64, sharers, zero_stage),
            state.on_rank(mixture as u64, of_experts, zero_stage),
        ] {
            bytes[MemoryCategory::Parameters] += held.weights as usize;
            bytes[MemoryCategory::Gradients] += held.gradients as usize;
            bytes[MemoryCategory::Optimizer] += held.optimizer as usize;
        }
    }
    bytes
}
