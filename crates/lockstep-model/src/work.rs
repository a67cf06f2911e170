//! Work of a rank for a micro-batch of a model, unit by unit.

use lockstep_graph::Program;
use lockstep_plan::{
    TensorDimensions, TensorPlace,
    work::{ModelWork, UnitWork},
};

use crate::{
    config::ModelConfig,
    options::{RecordingOptions, Tuning},
    recorded::RecordedModel,
    units::{Flops, RecordedUnits},
};

impl RecordedModel {
    /// Returns the work of each rank for a micro-batch, and the floating-point operations of all ranks together.
    pub fn work(&self) -> ModelWork {
        work_of(&self.units, self.flops, self.places.tensor)
    }
}

/// Returns [`RecordedModel::work`] without building the model's parameter records. It takes the time of recording the
/// distinct units.
///
/// # Panics
/// In the cases in which [`RecordedModel::tuned`] panics.
pub fn model_work(config: &ModelConfig, tuning: &Tuning, options: RecordingOptions) -> ModelWork {
    let units = RecordedUnits::new(config, tuning, options);
    let flops = units.flops_alone(config, tuning, options);
    work_of(&units, flops, options.places.tensor)
}

fn work_of(units: &RecordedUnits, flops: Flops, tensor: TensorPlace) -> ModelWork {
    let between = units.program(0);
    let dtype = between.shape().dtype;
    let TensorPlace { ranks, splits_tokens, dimensions, .. } = tensor;
    let work = |(program, saved_elements): (&Program, &u64)| {
        let work = program.work();
        UnitWork { parameter_elements: work.parameter_elements - saved_elements, ..work }
    };
    ModelWork {
        distinct: units.programs.iter().zip(&units.saved_elements).map(work).collect(),
        of_unit: units.of_unit.clone(),
        dtype,
        boundary_bytes: units.boundary_bytes() as u64,
        is_boundary_whole: ranks > 1 && !splits_tokens && dimensions == TensorDimensions::One,
        training_flops: flops.training,
        attention_flops: flops.attention,
    }
}
