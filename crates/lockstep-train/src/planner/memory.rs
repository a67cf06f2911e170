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
        let style = self.cluster.software.style();
        let (view, experts) = (mesh.ranks(), mesh.experts());
        let sharers = view.degree(Axis::Shard) * view.degree(Axis::Context);
        let of_experts = experts.degree(ExpertAxis::ExpertShard);
        let mut bytes = MemoryBytes::default();
        let is_narrow = dtype != DType::F32;
        for unit in stages.iter().flat_map(|stage| stage.units.clone()) {
            let [dense, mixture] = elements(unit);
            let mut add = |category: MemoryCategory, from: ZeroStage, of_element: f64| {
                let is_shared = zero_stage >= from;
                let share =
                    |elements: f64, ranks: usize| elements / if is_shared { ranks as f64 } else { 1.0 };
                let elements = share(dense, sharers) + share(mixture, of_experts);
                bytes[category] += (elements * of_element) as usize;
            };
            let weight = dtype.size_bytes() as f64;
            add(MemoryCategory::Parameters, ZeroStage::Parameters, weight);
            let gradient = if is_narrow { style.gradient_bytes } else { 4.0 };
            add(MemoryCategory::Gradients, ZeroStage::Gradients, gradient);
            let optimizer = if is_narrow { style.optimizer_bytes } else { 8.0 };
            add(MemoryCategory::Optimizer, ZeroStage::Optimizer, optimizer);
        }
        bytes
    }
}
