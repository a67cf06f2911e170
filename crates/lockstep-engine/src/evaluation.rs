//! Forwards without a backward, of one micro-batch after the other: by one rank, or by the ranks of one replica.

use lockstep_model::RecordedModel;
use lockstep_plan::StageMemory;
use lockstep_tensor::{Arena, Kernels};

use crate::{
    EngineError, Groups, HostBatch, Runner, WeightSource, Weights, boundaries::message, passes::PassLocation,
    runner::Purpose, slots::Stage,
};

impl Runner {
    /// Allocates memory for forwards of `model`, which was recorded for this rank of `groups`, in the rank's stage of the pipeline.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn for_evaluation(model: &RecordedModel, arena: &Arena, groups: Groups) -> Result<Self, EngineError> {
        let units = groups.stage(model.units());
        let stages = [StageMemory { units, slots: 1, splits_backward: false }];
        Self::in_groups(model, arena, 0, groups, &stages, None)
    }

    /// Runs the forward of every unit.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time, or a disk of offloaded state fails.
    pub fn forward(
        &mut self,
        model: &RecordedModel,
        queue: &dyn Kernels,
        mut weights: Weights<'_>,
        batch: &HostBatch<'_>,
    ) -> Result<(), EngineError> {
        self.forward_from(model, queue, &mut weights, batch)
    }

    /// Runs the forward of every unit, with weights that are made ready unit by unit. In a pipeline, the rank receives the output of
    /// the stage before its own, runs its units, and sends their output to the next stage.
    ///
    /// # Errors
    /// As [`Runner::forward`], or if the weights of a unit cannot be had.
    pub fn forward_from(
        &mut self,
        model: &RecordedModel,
        queue: &dyn Kernels,
        weights: &mut dyn WeightSource,
        batch: &HostBatch<'_>,
    ) -> Result<(), EngineError> {
        batch.check(model)?;
        let place = PassLocation::default();
        self.load(model, place, batch);
        let groups = self.groups.clone();
        let pipeline = groups.pipeline_peers();
        let Stage { units, slots, .. } = &self.stages[place.stage];
        let units = units.clone();
        if let (Some(pipeline), Some(input)) = (pipeline, &slots[place.slot].input) {
            pipeline.receive(message(model, units.start - 1, input, 0), pipeline.group.rank() - 1)?;
        }
        self.forward_stage(model, place, queue, weights, Purpose::Evaluation)?;
        if let Some(pipeline) = pipeline.filter(|_| units.end < model.units()) {
            let (output, start) = self.output_of(model, place, units.end - 1);
            pipeline.send(message(model, units.end - 1, output, start), pipeline.group.rank() + 1)?;
        }
        Ok(())
    }
}
