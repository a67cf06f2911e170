//! Calibration of `lockstep quantize`: the text, the scales that are chosen on it, and the report of what they change.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use lockstep_checkpoint::{ChannelScales, ModelDirectory, WeightQuantization};
use lockstep_data::{Bar, Progress};
use lockstep_infer::{Calibration, LoadOptions, LoadedModel, calibrate, calibration_window};
use lockstep_tensor::BlockActivations;
use serde_json::{Value, json};

use crate::exit::Failure;

/// Most bytes of text that are read for a token.
const BYTES_PER_TOKEN: usize = 64;

/// The text of a calibration.
pub(crate) struct CalibrationText<'a> {
    pub(crate) path: &'a Path,
    /// Tokens that are read.
    pub(crate) tokens: usize,
}

/// Scales, and the report of what they change.
pub(crate) struct Calibrated {
    pub(crate) scales: ChannelScales,
    pub(crate) report: CalibrationReport,
}

/// Errors of quantized projections without and with the scales of a calibration.
pub(crate) struct CalibrationReport {
    tokens: usize,
    /// Projections by name, as a block has them, in the order of the model.
    projections: Vec<Projection>,
    /// Quantized projections without scales, each with the number of its matrices.
    unscaled: BTreeMap<String, usize>,
}

/// The layers of one name in all blocks.
struct Projection {
    name: String,
    matrices: usize,
    scaled: usize,
    /// Sum of the squared outputs.
    energy: f64,
    /// Sums of the squared errors without and with scales.
    errors: [f64; 2],
}

impl CalibrationText<'_> {
    /// Chooses the scales of a model on the text.
    pub(crate) fn calibrate(
        &self,
        directory: &ModelDirectory,
        quantization: WeightQuantization,
        threads: usize,
    ) -> Result<Calibrated, Failure> {
        let matrices = directory.quantized_matrices(quantization)?;
        let text = self.read()?;
        // Weights that are quantized already are decoded exactly, and activations keep their type.
        let activations = Some(BlockActivations::Float);
        let options = LoadOptions { activations, ..LoadOptions::new(threads) };
        let model = LoadedModel::load(directory, options)?;
        let window = calibration_window(&model);
        if self.tokens < window {
            let problem =
                format!("--calibration-tokens {}: allowed is {window}, a window, or more", self.tokens);
            return Err(Failure::configuration(problem));
        }
        let mut ids = model.tokenizer()?.encode(&text)?;
        ids.truncate(self.tokens);
        let progress = Bar::default();
        let units = model.config().num_hidden_layers() as u64 + 1;
        progress.begin_items("choosing scales layer by layer", units);
        let found = calibrate((&model, directory), &matrices, &ids, || progress.advance(1));
        progress.finish();
        let Calibration { scales, layers, unscaled, tokens } = found?;
        let mut projections: Vec<Projection> = Vec::new();
        for layer in &layers {
            let name = projection_of(&layer.module);
            let at = projections.iter().position(|known| known.name == name).unwrap_or_else(|| {
                let name = name.to_owned();
                projections.push(Projection { name, matrices: 0, scaled: 0, energy: 0.0, errors: [0.0; 2] });
                projections.len() - 1
            });
            projections[at].add(layer.exponent > 0.0, layer.energy, layer.errors);
        }
        let mut without = BTreeMap::new();
        for module in &unscaled {
            *without.entry(projection_of(module).to_owned()).or_default() += 1;
        }
        let report = CalibrationReport { tokens, projections, unscaled: without };
        Ok(Calibrated { scales, report })
    }

    /// Reads the begin of the text, as much as the tokens may need.
    fn read(&self) -> Result<String, Failure> {
        let failed = |error| {
            Failure::configuration(format!("cannot read --calibration {}: {error}", self.path.display()))
        };
        let most = self.tokens.saturating_mul(BYTES_PER_TOKEN) as u64;
        let mut bytes = Vec::new();
        File::open(self.path).and_then(|file| file.take(most).read_to_end(&mut bytes)).map_err(failed)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Returns the name of a module within its block: what follows the number.
fn projection_of(module: &str) -> &str {
    let parts: Vec<&str> = module.split('.').collect();
    let of_block = parts.iter().position(|part| part.parse::<usize>().is_ok()).map_or(0, |number| number + 1);
    let skipped: usize = parts[..of_block].iter().map(|part| part.len() + 1).sum();
    module.get(skipped..).unwrap_or(module)
}

impl Projection {
    fn add(&mut self, is_scaled: bool, energy: f64, errors: [f64; 2]) {
        self.matrices += 1;
        self.scaled += usize::from(is_scaled);
        self.energy += energy;
        self.errors.iter_mut().zip(errors).for_each(|(sum, error)| *sum += error);
    }

    /// Returns the root-mean-square errors relative to the outputs, without and with scales.
    fn relative_errors(&self) -> [f64; 2] {
        self.errors.map(|error| if self.energy > 0.0 { (error / self.energy).sqrt() } else { 0.0 })
    }
}

impl CalibrationReport {
    /// Returns the mean of the projections' errors without and with scales.
    fn mean_errors(&self) -> [f64; 2] {
        [0, 1].map(|at| {
            let errors: f64 =
                self.projections.iter().map(|projection| projection.relative_errors()[at]).sum();
            errors / self.projections.len().max(1) as f64
        })
    }

    /// Returns the report as JSON.
    pub(crate) fn to_json(&self) -> Value {
        let projection = |projection: &Projection| {
            let [plain, scaled] = projection.relative_errors();
            json!({
                "name": projection.name, "matrices": projection.matrices, "scaled": projection.scaled,
                "error_without_scales": plain, "error": scaled,
            })
        };
        let [plain, scaled] = self.mean_errors();
        json!({
            "tokens": self.tokens, "projections": self.projections.iter().map(projection).collect::<Vec<_>>(),
            "unscaled": self.unscaled, "error_without_scales": plain, "error": scaled,
        })
    }

    /// Returns the lines of a table.
    pub(crate) fn lines(&self) -> Vec<String> {
        let row = |name: &str, scaled: &str, [plain, error]: [f64; 2]| {
            format!("{name:<28} {scaled:>12} {:>13.3} % {:>12.3} %", 100.0 * plain, 100.0 * error)
        };
        let head = format!(
            "{:<28} {:>12} {:>15} {:>14}",
            "relative error of outputs", "scaled", "without scales", "with scales"
        );
        let projections = self.projections.iter().map(|projection| {
            let scaled = format!("{} of {}", projection.scaled, projection.matrices);
            row(&projection.name, &scaled, projection.relative_errors())
        });
        let mut lines: Vec<String> = [head].into_iter().chain(projections).collect();
        lines.push(row("mean", "", self.mean_errors()));
        if !self.unscaled.is_empty() {
            let names: Vec<String> =
                self.unscaled.iter().map(|(name, matrices)| format!("{name} ({matrices})")).collect();
            lines.push(format!("without scales, which would change the model: {}", names.join(", ")));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_projection_is_what_follows_the_number_of_its_block() {
        assert_eq!(projection_of("model.layers.12.self_attn.q_proj"), "self_attn.q_proj");
        assert_eq!(projection_of("transformer.h.0.mlp"), "mlp");
        assert_eq!(projection_of("score"), "score");
    }
}
