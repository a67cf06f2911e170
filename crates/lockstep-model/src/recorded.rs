//! A model as the engine sees it: one program per kind of unit, and the record of every parameter.
//!
//! Units are numbered 0 (embedding), 1 to `layers` (blocks, which share one program), `layers + 1` (head). The
//! records come from the same recording as the programs, so nothing about a parameter is said twice.

use lockstep_graph::{BlockShape, Mode, ParameterDeclaration, Program, Recompute, Recorder};
use lockstep_plan::{DType, ParameterId, ParameterRecord};

use crate::ModelConfig;

/// Dropout sites reserved for each unit.
const DROPOUT_SITES_PER_UNIT: u32 = 16;

/// What the head ends in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadOutput {
    /// The loss of each token.
    Losses,
    /// The logits.
    Logits,
}

/// A recorded model.
#[derive(Debug)]
pub struct RecordedModel {
    embedding: Program,
    block: Program,
    head: Program,
    layers: usize,
    records: Vec<ParameterRecord>,
    unit_parameters: Vec<Vec<ParameterId>>,
    inverse_frequencies: Option<Vec<f32>>,
}

impl RecordedModel {
    /// Records the units of `config` for one micro-batch of `shape`. Recomputation applies to the blocks.
    pub fn new(
        config: &ModelConfig,
        mode: Mode,
        shape: BlockShape,
        recompute: Recompute,
        head_output: HeadOutput,
    ) -> Self {
        let family = config.family();
        let mut g = Recorder::new(mode, shape);
        let output = family.embedding(&mut g);
        let embedding = g.finish(output, Recompute::None);

        let mut g = Recorder::new(mode, shape);
        let output = family.block(&mut g);
        let block = g.finish(output, recompute);

        let mut g = Recorder::new(mode, shape);
        let (x, output_layer) = family.head(&mut g);
        let output = match head_output {
            HeadOutput::Losses => g.output_loss(x, output_layer),
            HeadOutput::Logits => g.linear(x, output_layer),
        };
        let head = g.finish(output, Recompute::None);

        let layers = config.num_hidden_layers();
        let mut model = Self {
            embedding,
            block,
            head,
            layers,
            records: Vec::new(),
            unit_parameters: Vec::new(),
            inverse_frequencies: family.inverse_frequencies(),
        };
        for unit in 0..model.units() {
            let prefix = match unit {
                0 => family.embedding_prefix(),
                unit if unit <= layers => family.block_prefix(unit - 1),
                _ => String::new(),
            };
            model.declare(unit, &prefix);
        }
        if config.tie_word_embeddings() {
            model.tie("lm_head.weight", family.embedding_table());
        }
        model
    }

    /// Number of units.
    pub fn units(&self) -> usize {
        self.layers + 2
    }

    /// The program of a unit.
    pub fn program(&self, unit: usize) -> &Program {
        match unit {
            0 => &self.embedding,
            unit if unit <= self.layers => &self.block,
            _ => &self.head,
        }
    }

    /// Every parameter, in the order of the units.
    pub fn records(&self) -> &[ParameterRecord] {
        &self.records
    }

    /// The parameters of a unit, in the order in which its program declares them.
    pub fn unit_parameters(&self, unit: usize) -> &[ParameterId] {
        &self.unit_parameters[unit]
    }

    /// The frequencies of rotary embeddings, if the model has them.
    pub fn inverse_frequencies(&self) -> Option<&[f32]> {
        self.inverse_frequencies.as_deref()
    }

    /// The number of a unit's first dropout site in the model.
    pub fn first_dropout_site(unit: usize) -> u32 {
        unit as u32 * DROPOUT_SITES_PER_UNIT
    }

    /// Floating-point operations of one training step on one micro-batch, without recomputation: the forward, and
    /// twice as much for the backward.
    pub fn training_flops(&self) -> u64 {
        3 * (0..self.units()).map(|unit| self.program(unit).profile().forward_flops).sum::<u64>()
    }

    fn declare(&mut self, unit: usize, prefix: &str) {
        let first = self.records.len();
        let records: Vec<_> =
            self.program(unit).parameters().iter().map(|declared| record(declared, unit, prefix)).collect();
        self.records.extend(records);
        self.unit_parameters.push((first..self.records.len()).map(ParameterId).collect());
    }

    fn tie(&mut self, name: &str, target: &str) {
        let find = |name: &str| self.records.iter().position(|record| record.name == name);
        let (tied, target) = (find(name), find(target));
        let tied = tied.expect("a family declares an output layer");
        self.records[tied].tie = Some(ParameterId(target.expect("a family declares an embedding table")));
    }
}

fn record(declared: &ParameterDeclaration, unit: usize, prefix: &str) -> ParameterRecord {
    ParameterRecord {
        name: format!("{prefix}{}", declared.name),
        shape: declared.shape.clone(),
        initializer: declared.initializer,
        tie: None,
        unit,
        trainable: true,
        // Matrices decay, scales and biases do not.
        decay: declared.shape.len() > 1,
        learning_rate_multiplier: 1.0,
    }
}

/// Every parameter of the model: embedding, block by block, then the head.
///
/// Unit 0 is the embedding, unit `1 + n` block `n`, the last unit the final norm and the output layer. Names are Hugging
/// Face's, except that a GPT-2's fused `c_attn` is three parameters (`attn.q`, `attn.k`, `attn.v`); every linear
/// weight is `[out, in]`. A tied output layer is a record whose `tie` points to the embedding. Matrices decay, vectors do
/// not. Initial weights follow transformers: normal, with GPT-2's projections into the residual stream scaled by
/// 1/√(2 × blocks); biases zero; norms one.
pub fn parameter_records(config: &ModelConfig) -> Vec<ParameterRecord> {
    // Parameters depend on no shape of the input, so that the smallest will do.
    let shape = BlockShape { sequences: 1, seq_len: 1, dtype: DType::F32 };
    RecordedModel::new(config, Mode::Inference, shape, Recompute::None, HeadOutput::Logits).records
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique_and_units_ascend() {
        for name in crate::PRESETS {
            let config = ModelConfig::preset(name).expect("a preset");
            let records = parameter_records(&config);
            let names: HashSet<_> = records.iter().map(|record| &record.name).collect();
            assert_eq!(names.len(), records.len(), "{name}");
            assert!(records.is_sorted_by_key(|record| record.unit), "{name}");
            assert_eq!(
                records.last().map(|record| record.unit),
                Some(config.num_hidden_layers() + 1),
                "{name}"
            );
        }
    }

    #[test]
    fn a_tied_head_points_to_the_embedding() {
        for (name, tied) in [("baby-gpt", true), ("llama3-8b", false), ("qwen3-0.6b", true)] {
            let records = parameter_records(&ModelConfig::preset(name).expect("a preset"));
            let head = records.last().expect("a model has parameters");
            assert_eq!(
                (head.name.as_str(), head.tie),
                ("lm_head.weight", tied.then_some(ParameterId(0))),
                "{name}"
            );
            assert_eq!(head.shape, records[0].shape, "{name}");
        }
    }

    #[test]
    fn only_matrices_decay() {
        let records = parameter_records(&ModelConfig::preset("gpt2-124m").expect("a preset"));
        for record in records {
            assert_eq!(record.decay, record.shape.len() == 2, "{}", record.name);
        }
    }
}
