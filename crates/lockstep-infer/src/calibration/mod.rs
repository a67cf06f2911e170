//! Activation-aware scales for the quantization of a model (Lin et al., 2023, "AWQ", section 3.2).
//!
//! A group of linear layers that read one value gets a scale for each input channel: the weights' columns are multiplied, and the
//! parameters that produce the value are divided, so the function stays and channels with large activations lose less to rounding. The
//! model's own forward on a text gives the activations, one unit at a time; [`scale_search`] chooses the scales.

mod scale_search;

use std::cell::Cell;

use lockstep_checkpoint::{ChannelScales, ModelDirectory, QuantizedMatrices};
use lockstep_engine::UnitParameters;
use lockstep_graph::{Batch, HeadOutput, InputObserver, ParameterIndex, Replay, SharedInput};
use lockstep_model::RecordedModel;
use lockstep_plan::{DType, MemoryCategory, ParameterId};
use lockstep_tensor::{Kernels, Matrix, Tensor, TensorError, View};

use self::scale_search::{Layer, Producer, ScaleSearch};
use crate::{InferError, LoadedModel};

/// Most tokens of a window of a calibration text.
const CALIBRATION_WINDOW: usize = 512;

/// Scales of a model's channels, and what they change.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    /// The scales; [`ModelDirectory::with_scales`] applies them.
    pub scales: ChannelScales,
    /// Errors of the quantized layers whose inputs may be scaled.
    pub layers: Vec<CalibratedLayer>,
    /// Quantized layers whose inputs may not be scaled: a scale would change the function of the model.
    pub unscaled: Vec<String>,
    /// Number of tokens of the text that were read.
    pub tokens: usize,
}

/// Errors of a quantized layer on the activations of the calibration text.
#[derive(Debug, Clone, PartialEq)]
pub struct CalibratedLayer {
    /// Name of the module.
    pub module: String,
    /// Exponent of the activations in the scales, from 0 (no scales) to below 1.
    pub exponent: f32,
    /// Sum of the squared outputs.
    pub energy: f64,
    /// Sums of the squared errors of the outputs without and with scales.
    pub errors: [f64; 2],
}

/// Returns the scales with which the outputs of quantized layers lose least on windows of a text. `model` holds the weights of
/// `directory` on one rank. Each unit of the model that is done calls `advance`.
///
/// # Errors
/// If the text is shorter than a window, a file is damaged, or memory runs out.
pub fn calibrate(
    (model, directory): (&LoadedModel, &ModelDirectory),
    matrices: &QuantizedMatrices,
    ids: &[u32],
    mut advance: impl FnMut(),
) -> Result<Calibration, InferError> {
    let window = calibration_window(model);
    let windows = ids.len() / window;
    if windows == 0 {
        return Err(InferError::CalibrationText { tokens: ids.len(), window });
    }
    let recorded = model.record(1, window, HeadOutput::Logits);
    let constants = recorded.constants().iter().map(|constant| constant.allocate(&model.arena));
    let constants = constants.collect::<Result<Vec<_>, TensorError>>()?;
    let in_place = model.weights.in_place();
    let text =
        Text { model, recorded: &recorded, constants, in_place, ids: &ids[..windows * window], window };
    let (scales, layers, tokens) = (ChannelScales::default(), Vec::new(), text.ids.len());
    let mut found = Calibration { scales, layers, unscaled: Vec::new(), tokens };
    let mut before = None;
    for unit in 0..recorded.units() - 1 {
        let inputs = text.scalable_inputs(unit, matrices);
        let observed = Inputs::new(&text, &inputs)?;
        before = Some(text.forward(unit, before.as_ref(), &observed)?);
        for (input, x) in inputs.iter().zip(&observed.values) {
            text.search(unit, input, x, (directory, matrices), &mut found)?;
        }
        advance();
    }
    let module = |name: &String| name.strip_suffix(".weight").unwrap_or(name).to_owned();
    let is_scaled = |module: &String| found.layers.iter().any(|layer| layer.module == *module);
    let quantized = matrices.parameters.iter().map(module);
    found.unscaled = quantized.filter(|module| !is_scaled(module)).collect();
    Ok(found)
}

/// Returns the tokens of a window of a calibration text.
pub fn calibration_window(model: &LoadedModel) -> usize {
    model.config.max_position_embeddings().clamp(1, CALIBRATION_WINDOW)
}

/// A model and the windows of a text that it reads.
struct Text<'a> {
    model: &'a LoadedModel,
    /// Programs for one window.
    recorded: &'a RecordedModel,
    constants: Vec<Tensor>,
    in_place: Vec<Option<Matrix<'a>>>,
    ids: &'a [u32],
    window: usize,
}

impl Text<'_> {
    /// Returns the inputs of quantized layers of a unit whose columns can be scaled.
    fn scalable_inputs(&self, unit: usize, matrices: &QuantizedMatrices) -> Vec<SharedInput> {
        let records = self.recorded.records();
        let is_quantized = |weight: &ParameterIndex| matrices.parameters.contains(self.name(unit, *weight));
        let is_tied = |index: ParameterIndex| {
            let id = self.id(unit, index);
            records[id.0].tie.is_some() || records.iter().any(|record| record.tie == Some(id))
        };
        let is_wanted = |input: &SharedInput| {
            let producers = [input.producer].into_iter().chain(input.producer_bias);
            input.weights.iter().any(is_quantized)
                && !input.weights.iter().copied().chain(producers).any(is_tied)
        };
        self.recorded.program(unit).shared_inputs().into_iter().filter(is_wanted).collect()
    }

    /// Runs a unit on all windows, `input` being the output of the unit before. Returns its output.
    fn forward(
        &self,
        unit: usize,
        input: Option<&Tensor>,
        observed: &Inputs<'_>,
    ) -> Result<Tensor, InferError> {
        let Self { model, recorded, window, .. } = *self;
        let program = recorded.program(unit);
        let (arena, activations) = (&model.arena, MemoryCategory::Activations);
        let frame = arena.allocate(program.frame_bytes(), activations)?;
        let workspace = arena.allocate(program.workspace_bytes(), MemoryCategory::Workspace)?;
        let shape = [self.ids.len(), program.output_columns()];
        let output = Tensor::zeros(arena, model.dtype, shape, activations)?;
        let held = model.weights.begin(&*model.queue, unit)?;
        let weights = model.weights.weights(&self.in_place, held.as_deref());
        let parameters = UnitParameters { ids: recorded.unit_parameters(unit), weights, gradients: None };
        let positions: Vec<u32> = (0..window as u32).collect();
        let positions = Tensor::from_slice(arena, [window], &positions, activations)?;
        for first in (0..self.ids.len()).step_by(window) {
            let rows = first..first + window;
            let ids = Tensor::from_slice(arena, [window], &self.ids[rows.clone()], activations)?;
            let batch = Batch {
                constants: &self.constants,
                long_rows: recorded.long_rows(),
                ..Batch::new(ids.view(), positions.view())
            };
            let replay = Replay::new(&*model.queue, &parameters, batch, &frame, &workspace);
            let input = input.map(|input| input.view().rows(rows.clone()));
            observed.first_row.set(first);
            program.forward(&Replay {
                input,
                output: Some(output.view().rows(rows)),
                observer: Some(observed),
                ..replay
            })?;
        }
        Ok(output)
    }

    /// Chooses the scales of an input and adds them to those that were found.
    fn search(
        &self,
        unit: usize,
        input: &SharedInput,
        x: &Tensor,
        (directory, matrices): (&ModelDirectory, &QuantizedMatrices),
        found: &mut Calibration,
    ) -> Result<(), InferError> {
        let read = |name: &str| -> Result<Vec<f32>, InferError> {
            let mut values = Vec::new();
            directory.read(name, &mut values)?;
            Ok(values)
        };
        let (names, producer) = (self.names(unit, &input.weights), self.name(unit, input.producer));
        let quantized = names.iter().copied().filter(|name| matrices.parameters.contains(*name));
        let layers = quantized
            .map(|name| Ok(Layer { name, weights: read(name)? }))
            .collect::<Result<Vec<_>, InferError>>()?;
        let producer_shape = &self.recorded.records()[self.id(unit, input.producer).0].shape;
        let is_norm = producer_shape.len() == 1;
        let values = if is_norm { Some(read(producer)?) } else { None };
        let search = ScaleSearch {
            kernels: &*self.model.queue,
            arena: &self.model.arena,
            x: x.view(),
            layers,
            producer: Producer {
                rows: &input.producer_rows,
                count: producer_shape[0],
                values,
                offset: input.producer_offset,
            },
            form: matrices.form,
        };
        let best = search.run()?;
        for (layer, [energy, plain, scaled]) in search.layers.iter().zip(&best.energies) {
            found.layers.push(CalibratedLayer {
                module: layer.name.strip_suffix(".weight").unwrap_or(layer.name).to_owned(),
                exponent: best.exponent,
                energy: *energy,
                errors: [*plain, *scaled],
            });
        }
        if best.exponent > 0.0 {
            let of_columns: Vec<f32> = input.producer_rows.iter().map(|row| best.of_rows[*row]).collect();
            names.iter().for_each(|name| found.scales.multiply_columns(name, &of_columns));
            found.scales.divide_rows(producer, &best.of_rows, input.producer_offset);
            for bias in self.names(unit, input.producer_bias.as_slice()) {
                found.scales.divide_rows(bias, &best.of_rows, 0.0);
            }
        }
        Ok(())
    }

    fn id(&self, unit: usize, index: ParameterIndex) -> ParameterId {
        self.recorded.unit_parameters(unit)[index.0]
    }

    fn name(&self, unit: usize, index: ParameterIndex) -> &str {
        &self.recorded.records()[self.id(unit, index).0].name
    }

    fn names(&self, unit: usize, indices: &[ParameterIndex]) -> Vec<&str> {
        indices.iter().map(|index| self.name(unit, *index)).collect()
    }
}

/// Inputs of a unit's layers on the whole text.
struct Inputs<'a> {
    kernels: &'a dyn Kernels,
    /// One of the weights that read each input.
    weights: Vec<ParameterIndex>,
    /// Each input, f32 `[tokens, columns]`.
    values: Vec<Tensor>,
    /// Row of the window that the unit reads.
    first_row: Cell<usize>,
}

impl<'a> Inputs<'a> {
    fn new(text: &Text<'a>, inputs: &[SharedInput]) -> Result<Self, InferError> {
        let tensor = |input: &SharedInput| {
            let shape = [text.ids.len(), input.producer_rows.len()];
            Tensor::zeros(&text.model.arena, DType::F32, shape, MemoryCategory::Activations)
        };
        Ok(Self {
            kernels: &*text.model.queue,
            weights: inputs.iter().map(|input| input.weights[0]).collect(),
            values: inputs.iter().map(tensor).collect::<Result<_, TensorError>>()?,
            first_row: Cell::new(0),
        })
    }
}

impl InputObserver for Inputs<'_> {
    fn observe(&self, weight: ParameterIndex, x: View<'_>) {
        if let Some(input) = self.weights.iter().position(|known| *known == weight) {
            let first = self.first_row.get();
            let rows = self.values[input].view().rows(first..first + x.shape().as_matrix().0);
            self.kernels.cast(x, rows);
        }
    }
}
