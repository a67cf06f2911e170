//! What a rank needs under systems that are not Lockstep, by the formulas that their papers give: state by the bytes of an element
//! (Rajbhandari et al. 2019, section 3.1), activations by what is kept for gradients (Korthikanti et al. 2022, section 4).

use lockstep_plan::{Axis, DType, ExpertAxis, MemoryBytes, MemoryCategory, Mesh, StageMemory, ZeroStage};

use crate::planner::Planner;

/// What a rank has of a model whose state is shared out so.
#[derive(Debug, Clone, Copy)]
pub(super) struct Holding<'a> {
    /// Who is where.
    pub(super) mesh: &'a Mesh,
    /// What is shared out.
    pub(super) zero_stage: ZeroStage,
    /// Type of weights and values.
    pub(super) dtype: DType,
    /// The rank's stages.
    pub(super) stages: &'a [StageMemory],
}

impl Planner {
    /// What a rank needs; `elements` says of each unit its parameters outside experts and in them, `kept` the bytes that it keeps.
    pub(super) fn memory_elsewhere(
        &self,
        holding: Holding<'_>,
        elements: impl Fn(usize) -> [f64; 2],
        kept: impl Fn(usize) -> u64,
    ) -> MemoryBytes {
        let mut bytes = self.state_elsewhere(holding, elements);
        for stage in holding.stages {
            for unit in stage.units.clone() {
                bytes[MemoryCategory::Activations] += kept(unit) as usize * stage.slots;
            }
        }
        bytes
    }

    /// Weights, gradients and the optimizer's state of a rank, by the bytes of an element.
    pub(super) fn state_elsewhere(
        &self,
        holding: Holding<'_>,
        elements: impl Fn(usize) -> [f64; 2],
    ) -> MemoryBytes {
        let Holding { mesh, zero_stage, dtype, stages } = holding;
        let state = self.cluster.software.style().state_bytes(dtype);
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
}
