//! What a rank needs under systems that are not Lockstep, by the formulas that their papers give: state by the bytes of an element
//! (Rajbhandari et al. 2019, section 3.1), activations by what is kept for gradients (Korthikanti et al. 2022, section 4).

use lockstep_plan::work::{Keeping, ModelWork};
use lockstep_plan::{
    Axis, DType, ExpertAxis, MemoryBytes, MemoryCategory, Mesh, Recompute, StageMemory, ZeroStage,
};

use crate::RunConfig;
use crate::planner::Planner;

impl Planner {
    /// What a rank with these stages needs. A block that forgets "selective" keeps everything but its scores.
    pub(super) fn memory_elsewhere(
        &self,
        config: &RunConfig,
        mesh: &Mesh,
        work: &ModelWork,
        stages: &[StageMemory],
    ) -> MemoryBytes {
        let mut bytes = self.state_elsewhere(config, mesh, work, stages);
        let style = self.cluster.software.style();
        for (stage, unit) in
            stages.iter().flat_map(|stage| stage.units.clone().map(move |unit| (stage, unit)))
        {
            let is_block = unit > 0 && unit + 1 < work.units();
            let keeping = match config.parallel.recompute.of(unit.saturating_sub(1)) {
                Recompute::Full if is_block => Keeping::InputAlone,
                Recompute::Selective if is_block => Keeping::WithoutScores,
                _ if !style.writes_scores => Keeping::WithoutScores,
                _ => Keeping::Everything,
            };
            bytes[MemoryCategory::Activations] +=
                work.unit(unit).kept.bytes(keeping, work.dtype) as usize * stage.slots;
        }
        bytes
    }

    /// Weights, gradients and the optimizer's state of a rank with these stages, by the bytes of an element.
    pub(super) fn state_elsewhere(
        &self,
        config: &RunConfig,
        mesh: &Mesh,
        work: &ModelWork,
        stages: &[StageMemory],
    ) -> MemoryBytes {
        let style = self.cluster.software.style();
        let (view, experts) = (mesh.ranks(), mesh.experts());
        let sharers = view.degree(Axis::Shard) * view.degree(Axis::Context);
        let of_experts = experts.degree(ExpertAxis::ExpertShard);
        let zero_stage = config.zero_stage();
        let mut bytes = MemoryBytes::default();
        let is_narrow = work.dtype != DType::F32;
        for stage in stages {
            for unit in stage.units.clone() {
                let work_of_unit = work.unit(unit);
                let dense = (work_of_unit.parameter_elements - work_of_unit.expert_elements) as f64;
                let mixture = work_of_unit.expert_elements as f64;
                let mut add = |category: MemoryCategory, from: ZeroStage, of_element: f64| {
                    let is_shared = zero_stage >= from;
                    let share =
                        |elements: f64, ranks: usize| elements / if is_shared { ranks as f64 } else { 1.0 };
                    let elements = share(dense, sharers) + share(mixture, of_experts);
                    bytes[category] += (elements * of_element) as usize;
                };
                let weight = work.dtype.size_bytes() as f64;
                add(MemoryCategory::Parameters, ZeroStage::Parameters, weight);
                let gradient = if is_narrow { style.gradient_bytes } else { 4.0 };
                add(MemoryCategory::Gradients, ZeroStage::Gradients, gradient);
                let optimizer = if is_narrow { style.optimizer_bytes } else { 8.0 };
                add(MemoryCategory::Optimizer, ZeroStage::Optimizer, optimizer);
            }
        }
        bytes
    }
}
