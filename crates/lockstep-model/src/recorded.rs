//! A model as the engine sees it: one program per kind of unit, and the record of every parameter.
//!
//! Units are numbered 0 (embedding), 1 to `layers` (blocks), `layers + 1` (head). Blocks of which the same is trained
//! share one program. The records come from the same recording as the programs, so nothing about a parameter is
//! said twice.

use std::collections::BTreeSet;

use lockstep_graph::{BlockShape, Mode, ParameterDeclaration, Program, Recompute, RecomputeRules};
use lockstep_plan::{
    Among, BufferUnit, DType, ModelProfile, ParameterId, ParameterRecord, Places, Shard, Share,
    TensorDimensions, TensorPlace, UnitProfile,
};

use crate::{
    Adapter, ModelConfig,
    units::{Flops, OUTPUT_LAYER, RecordedUnits, unit_of},
};

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

/// What of a model is trained; everything, unless something is said.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tuning {
    /// Canonical names of the parameters that are never trained. One that is tied follows the other.
    pub frozen: BTreeSet<String>,
    /// What is added to linear layers.
    pub adapter: Option<Adapter>,
}

impl Tuning {
    /// Whether training drops anything beyond what the model does.
    pub fn has_dropout(&self) -> bool {
        self.adapter.as_ref().is_some_and(|adapter| adapter.config().dropout > 0.0)
    }

    /// The same without dropout.
    pub fn without_dropout(&self) -> Self {
        Self { frozen: self.frozen.clone(), adapter: self.adapter.as_ref().map(Adapter::without_dropout) }
    }
}

/// What a model is recorded for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordingOptions {
    /// Forward and backward, or the forward alone.
    pub mode: Mode,
    /// The micro-batch, of whole sequences, and the type that kernels read.
    pub shape: BlockShape,
    /// What the blocks forget and compute again.
    pub recompute: RecomputeRules,
    /// What the head ends in.
    pub head_output: HeadOutput,
    /// The rank's coordinates in the groups that split blocks, sequences and experts.
    pub places: Places,
}

impl RecordingOptions {
    /// A training step's micro-batch of `shape`, with losses as the output.
    pub fn training(shape: BlockShape, recompute: RecomputeRules, places: Places) -> Self {
        Self { mode: Mode::Training, shape, recompute, head_output: HeadOutput::Losses, places }
    }
}

/// A recorded model.
#[derive(Debug)]
pub struct RecordedModel {
    pub(crate) units: RecordedUnits,
    layers: usize,
    records: Vec<ParameterRecord>,
    unit_parameters: Vec<Vec<ParameterId>>,
    inverse_frequencies: Option<Vec<f32>>,
    pub(crate) flops: Flops,
    bias_update_rate: f64,
    /// The coordinates that it was recorded for.
    pub(crate) places: Places,
    vocabulary: usize,
    /// The units of whose output the ranks that share blocks keep a slice each.
    sliced: Vec<bool>,
}

impl RecordedModel {
    /// Records the units of `config` for one micro-batch of `shape`, all of it trained. Recomputation applies to the
    /// blocks.
    pub fn new(
        config: &ModelConfig,
        mode: Mode,
        shape: BlockShape,
        recompute: Recompute,
        head_output: HeadOutput,
    ) -> Self {
        let (recompute, places) = (recompute.into(), Places::default());
        let options = RecordingOptions { mode, shape, recompute, head_output, places };
        Self::tuned(config, &Tuning::default(), options)
    }

    /// Records the units of `config`, of which only what `tuning` says is trained.
    ///
    /// # Panics
    /// If the ranks that share the blocks do not divide what they split: see `Mesh`'s checks, which find that before.
    pub fn tuned(config: &ModelConfig, tuning: &Tuning, options: RecordingOptions) -> Self {
        Self::tuned_with_flops(config, tuning, options, None)
    }

    /// As [`RecordedModel::tuned`], with the [`RecordedModel::flops`] of a recording for another place among the ranks that share the model, if
    /// there is one: recording the model for one rank alone is most of the time that they take.
    ///
    /// # Panics
    /// Where [`RecordedModel::tuned`] does.
    pub fn tuned_with_flops(
        config: &ModelConfig,
        tuning: &Tuning,
        options: RecordingOptions,
        flops: Option<Flops>,
    ) -> Self {
        let family = config.family();
        let units = RecordedUnits::new(config, tuning, options);
        let flops = flops.unwrap_or_else(|| units.flops_alone(config, tuning, options));
        let mut model = Self {
            units,
            layers: config.num_hidden_layers(),
            records: Vec::new(),
            unit_parameters: Vec::new(),
            inverse_frequencies: family.inverse_frequencies(),
            flops,
            bias_update_rate: config.experts().map_or(0.0, |experts| experts.bias_update_rate),
            places: options.places,
            vocabulary: config.vocab_size(),
            sliced: Vec::new(),
        };
        (0..model.units()).for_each(|unit| model.declare(unit, &unit_of(config, unit).1));
        if config.tie_word_embeddings() {
            model.tie(OUTPUT_LAYER, family.embedding_table());
        }
        model.sliced = (0..model.units()).map(|unit| model.can_slice(unit, options.recompute)).collect();
        model
    }

    /// Whether the ranks that share the blocks keep slices of the output of a unit: it is the input of a block that forgets everything
    /// else, and nothing but this block's backward reads it.
    fn can_slice(&self, unit: usize, recompute: RecomputeRules) -> bool {
        let TensorPlace { ranks, splits_tokens, slices_inputs, dimensions, .. } = self.places.tensor;
        let all_have_it = !splits_tokens && dimensions == TensorDimensions::One;
        // Block n is unit n + 1.
        let is_for_replay = unit < self.layers && recompute.of(unit) == Recompute::Full;
        slices_inputs
            && ranks > 1
            && all_have_it
            && is_for_replay
            && self.program(unit + 1).has_backward()
            && self.program(unit).forgets_output()
    }

    /// Number of units.
    pub fn units(&self) -> usize {
        self.layers + 2
    }

    /// The program of a unit.
    pub fn program(&self, unit: usize) -> &Program {
        self.units.program(unit)
    }

    /// Whether the ranks that share the blocks keep a slice each of the output of a unit, which all of them have.
    pub fn slices_output(&self, unit: usize) -> bool {
        self.sliced[unit]
    }

    /// Elements of such a slice.
    pub fn slice_elements(&self) -> usize {
        let between = self.program(0);
        self.places.tensor.slice_elements(between.output_rows() * between.output_columns())
    }

    /// Bytes of a frame of a unit, with its output or the rank's slice of that.
    pub fn frame_bytes(&self, unit: usize) -> usize {
        let program = self.program(unit);
        if self.slices_output(unit) {
            program.output_bytes().start + self.slice_elements() * program.shape().dtype.size_bytes()
        } else {
            program.frame_bytes()
        }
    }

    /// The first unit that has a backward; none if nothing is trained.
    pub fn first_trained_unit(&self) -> Option<usize> {
        (0..self.units()).find(|&unit| self.program(unit).has_backward())
    }

    /// Every parameter, in the order of the units.
    pub fn records(&self) -> &[ParameterRecord] {
        &self.records
    }

    /// The parameters of a unit, in the order in which its program declares them.
    pub fn unit_parameters(&self, unit: usize) -> &[ParameterId] {
        &self.unit_parameters[unit]
    }

    /// The parameter of a unit whose values choose experts, if it has one: no gradient changes it, but the load of the experts.
    pub fn selection_bias(&self, unit: usize) -> Option<ParameterId> {
        let index = self.program(unit).selection_bias()?;
        Some(self.unit_parameters[unit][index.0])
    }

    /// How far the load of a step moves these.
    pub fn bias_update_rate(&self) -> f64 {
        self.bias_update_rate
    }

    /// The frequencies of rotary embeddings, if the model has them.
    pub fn inverse_frequencies(&self) -> Option<&[f32]> {
        self.inverse_frequencies.as_deref()
    }

    /// The inputs of memory predictions: the bytes of each unit, and the records of parameters.
    pub fn profile(&self) -> ModelProfile {
        let unit = |unit: usize| {
            let program = self.program(unit);
            UnitProfile {
                parameters: self.unit_parameters[unit].clone(),
                frame_bytes: self.frame_bytes(unit),
                saved_bytes: program.output_bytes().start,
                slices_output: self.slices_output(unit),
                deferred_bytes: program.deferred_bytes(),
                workspace_bytes: program.workspace_bytes(),
                split_workspace_bytes: program.split_workspace_bytes(),
                ring_elements: program.ring_elements(),
                transit_bytes: (program.transit_chunks() > 0).then(|| program.transit_bytes()),
                has_backward: program.has_backward(),
                selection_bias: self.selection_bias(unit),
            }
        };
        let between = self.program(0);
        let shape = between.shape();
        ModelProfile {
            units: (0..self.units()).map(unit).collect(),
            records: self.records.clone(),
            largest_elements: self.records.iter().map(|record| self.largest_elements(record)).collect(),
            dtype: shape.dtype,
            sequences: shape.sequences,
            tokens: shape.tokens(),
            boundary_bytes: between.output_rows() * between.output_columns() * shape.dtype.size_bytes(),
            slice_bytes: self.slice_elements() * shape.dtype.size_bytes(),
            gathered_bytes: self.slice_elements() * self.places.tensor.ranks * shape.dtype.size_bytes(),
            frequencies: self.inverse_frequencies.as_ref().map_or(0, Vec::len),
            context: self.places.context,
        }
    }

    /// The most elements of a parameter that any of the ranks holds that share its unit.
    fn largest_elements(&self, record: &ParameterRecord) -> usize {
        let is_of_vocabulary = (record.unit == 0 || record.unit + 1 == self.units())
            && record.shape.first() == Some(&self.vocabulary)
            && matches!(record.share, Share { shard: Some(Shard { dim: 0, .. }), inner: None, .. })
            && record.share.among == Among::Tensor;
        if !is_of_vocabulary {
            return record.local_elements();
        }
        let part = |rank| TensorPlace { rank, ..self.places.tensor }.vocabulary_range(self.vocabulary).len();
        let rows = (0..self.places.tensor.ranks).map(part).max().unwrap_or(0);
        rows * record.shape[1..].iter().product::<usize>()
    }

    /// The number of a unit's first dropout site in the model.
    pub fn first_dropout_site(unit: usize) -> u32 {
        unit as u32 * DROPOUT_SITES_PER_UNIT
    }

    /// Floating-point operations of one training step on one micro-batch, of all ranks that share the model together and without
    /// recomputation: the forward, and a backward of twice as much, less what nothing that is trained waits for.
    pub fn training_flops(&self) -> u64 {
        self.flops.training
    }

    /// Floating-point operations of the model on all ranks that share it together: the same whatever the place of the rank.
    pub fn flops(&self) -> Flops {
        self.flops
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
        share: declared.share,
        initializer: declared.initializer,
        tie: None,
        unit,
        buffer: BufferUnit::alone(unit),
        trainable: declared.trainable,
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
    tuned_records(config, &Tuning::default())
}

/// The same with what `tuning` freezes and adds.
pub fn tuned_records(config: &ModelConfig, tuning: &Tuning) -> Vec<ParameterRecord> {
    // Parameters depend on no shape of the input, so that the smallest will do.
    let shape = BlockShape { sequences: 1, seq_len: 1, dtype: DType::F32 };
    let (mode, recompute) = (Mode::Inference, RecomputeRules::default());
    let head_output = HeadOutput::Logits;
    let options = RecordingOptions { mode, shape, recompute, head_output, places: Places::default() };
    RecordedModel::tuned(config, tuning, options).records
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique_and_units_ascend() {
        for name in crate::presets().iter().map(|preset| preset.name.as_str()) {
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
