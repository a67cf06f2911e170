//! A model as the engine sees it: one program per distinct unit, and the record of every parameter.
//!
//! Units are numbered in forward order: for a decoder 0 (embedding), 1 to `layers` (blocks), `layers + 1` (head). Units of one
//! kind that train the same parameters share one program. Records and programs come from the same recording, so every fact about a parameter
//! is stated once.

use std::ops::Range;

use lockstep_graph::{
    BlockShape, Constant, HeadOutput, InputDeclaration, MAX_DROPOUT_SITES, Mode, ParameterDeclaration,
    Program, Recompute, RecomputeRules, Report, Statistics,
};
use lockstep_plan::{
    Among, BufferUnit, DType, ModelProfile, ParameterId, ParameterRecord, Places, Shard, Share,
    TensorDimensions, TensorPlace, UnitProfile,
};

use crate::{
    config::ModelConfig,
    model::{Model, Tie},
    options::{RecordingOptions, Tuning},
    units::{Flops, RecordedUnits},
};

/// A recorded model: programs, parameter records and memory facts, for one rank's shards.
#[derive(Debug)]
pub struct RecordedModel {
    pub(crate) units: RecordedUnits,
    records: Vec<ParameterRecord>,
    unit_parameters: Vec<Vec<ParameterId>>,
    constants: Vec<Constant>,
    inputs: Vec<InputDeclaration>,
    pub(crate) flops: Flops,
    bias_update_rate: f64,
    /// The places that the model was recorded for.
    pub(crate) places: Places,
    vocabulary: usize,
    classes: usize,
    /// Per unit, true if each rank of the tensor-parallel group keeps a slice of its output.
    sliced: Vec<bool>,
    /// True if the sequences of the recorded shape are longer than the model's short context.
    is_long: bool,
}

impl RecordedModel {
    /// Records the units of `config` for one micro-batch of `shape`, with all parameters trained. Recomputation
    /// applies to the blocks.
    pub fn new(
        config: &ModelConfig,
        mode: Mode,
        shape: BlockShape,
        recompute: Recompute,
        head_output: HeadOutput,
    ) -> Self {
        let (recompute, places) = (recompute.into(), Places::default());
        let statistics = Statistics::of(mode);
        let options = RecordingOptions { mode, shape, recompute, head_output, statistics, places };
        Self::tuned(config, &Tuning::default(), options)
    }

    /// Records the units of `config`, with the parameters that `tuning` trains.
    ///
    /// # Panics
    /// If a sharded dimension does not divide evenly in its group. The checks of `Mesh` find this earlier.
    pub fn tuned(config: &ModelConfig, tuning: &Tuning, options: RecordingOptions) -> Self {
        Self::tuned_with_flops(config, tuning, options, None)
    }

    /// Records as [`RecordedModel::tuned`] does, but takes the [`RecordedModel::flops`] of a recording for another
    /// rank of the same replica. This saves most of the time, because computing them records the model for one rank
    /// alone.
    ///
    /// # Panics
    /// In the cases in which [`RecordedModel::tuned`] panics.
    pub fn tuned_with_flops(
        config: &ModelConfig,
        tuning: &Tuning,
        options: RecordingOptions,
        flops: Option<Flops>,
    ) -> Self {
        let description = config.model();
        let units = RecordedUnits::new(config, tuning, options);
        let flops = flops.unwrap_or_else(|| units.flops_alone(config, tuning, options));
        let mut model = Self {
            units,
            records: Vec::new(),
            unit_parameters: Vec::new(),
            constants: description.constants(),
            inputs: inputs_of(description, options.shape),
            flops,
            bias_update_rate: config.experts().map_or(0.0, |experts| experts.bias_update_rate),
            places: options.places,
            vocabulary: config.vocab_size(),
            classes: description.sizes().classes,
            sliced: Vec::new(),
            is_long: description.short_context().is_some_and(|short| options.shape.seq_len > short),
        };
        (0..model.units()).for_each(|unit| model.declare(unit));
        description.ties().iter().for_each(|tie| model.tie(tie));
        for record in model.records.iter_mut().filter(|record| !record.trainable) {
            let columns = record.local_shape().last().copied().unwrap_or(0);
            let format = tuning.quantized.get(&record.name).copied();
            // A shard that cuts blocks stays numbers.
            record.block_format = format.filter(|format| format.bytes(columns).is_some());
        }
        model.sliced = (0..model.units()).map(|unit| model.can_slice(unit, options.recompute)).collect();
        model
    }

    /// Returns true if the tensor-parallel group may slice a unit's output. The output must be the input of a fully
    /// recomputed block, and only this block's backward may read it.
    fn can_slice(&self, unit: usize, recompute: RecomputeRules) -> bool {
        let TensorPlace { ranks, splits_tokens, slices_inputs, dimensions, .. } = self.places.tensor;
        let all_have_it = !splits_tokens && dimensions == TensorDimensions::One;
        let next = self.units.declared.get(unit + 1).and_then(|next| next.layer);
        let is_for_replay = next.is_some_and(|layer| recompute.of(layer) == Recompute::Full);
        slices_inputs
            && ranks > 1
            && all_have_it
            && is_for_replay
            && self.program(unit + 1).has_backward()
            && self.program(unit).forgets_output()
    }

    /// Returns the rows of a micro-batch of the recorded shape whose sequences are longer than the model's short context: all or none.
    pub fn long_rows(&self) -> &'static [Range<usize>] {
        const ALL: &Range<usize> = &(0..usize::MAX);
        if self.is_long { std::slice::from_ref(ALL) } else { &[] }
    }

    /// Returns the number of units.
    pub fn units(&self) -> usize {
        self.units.declared.len()
    }

    /// Returns the number of classes that the model tells apart; 0 if it is no classifier.
    pub fn classes(&self) -> usize {
        self.classes
    }

    /// Returns the model's losses and metrics, the loss that is trained on first; empty if it was recorded without a loss.
    pub fn reports(&self) -> &[Report] {
        self.program(self.units() - 1).reports()
    }

    /// Returns the number of tokens in the vocabulary; 0 if the model reads no tokens.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Returns the number of layers.
    pub fn layers(&self) -> usize {
        self.units.declared.iter().filter(|unit| unit.layer.is_some()).count()
    }

    /// Returns the index of a unit's layer, which rules of recomputation name; `None` for an embedding or a head.
    pub fn layer(&self, unit: usize) -> Option<usize> {
        self.units.declared[unit].layer
    }

    /// Returns the program of a unit.
    pub fn program(&self, unit: usize) -> &Program {
        self.units.program(unit)
    }

    /// Returns true if each rank of the tensor-parallel group keeps only a slice of a unit's replicated output.
    pub fn slices_output(&self, unit: usize) -> bool {
        self.sliced[unit]
    }

    /// Returns the number of elements of such a slice.
    pub fn slice_elements(&self) -> usize {
        let between = self.program(0);
        self.places.tensor.slice_elements(between.output_rows() * between.output_columns())
    }

    /// Returns the bytes of a unit's frame: the memory of its saved activations and of its output, or of this rank's slice of the output
    /// where `slices_output` is true.
    pub fn frame_bytes(&self, unit: usize) -> usize {
        let program = self.program(unit);
        if self.slices_output(unit) {
            program.output_bytes().start + self.slice_elements() * program.shape().dtype.size_bytes()
        } else {
            program.frame_bytes()
        }
    }

    /// Returns the first unit that has a backward; `None` if nothing is trained.
    pub fn first_trained_unit(&self) -> Option<usize> {
        (0..self.units()).find(|&unit| self.program(unit).has_backward())
    }

    /// Returns the record of every parameter, in the order of the units.
    pub fn records(&self) -> &[ParameterRecord] {
        &self.records
    }

    /// Returns the ids of a unit's parameters, in the order in which its program declares them.
    pub fn unit_parameters(&self, unit: usize) -> &[ParameterId] {
        &self.unit_parameters[unit]
    }

    /// Returns the parameter of a unit that biases the choice of experts; `None` if it has none. It has no gradient;
    /// the load of the experts updates it.
    pub fn selection_bias(&self, unit: usize) -> Option<ParameterId> {
        let index = self.program(unit).selection_bias()?;
        Some(self.unit_parameters[unit][index.0])
    }

    /// Returns the parameters of a unit that have no gradient: the bias that selects experts, running statistics.
    pub fn buffers(&self, unit: usize) -> impl Iterator<Item = ParameterId> {
        self.program(unit).buffers().map(move |index| self.unit_parameters[unit][index.0])
    }

    /// Returns true if evaluation reads running statistics, as with batch norm.
    pub fn has_running_statistics(&self) -> bool {
        self.units.programs.iter().any(|program| program.running_updates().next().is_some())
    }

    /// Returns true if a unit runs collectives over the data-parallel ranks.
    pub fn reads_replicas(&self) -> bool {
        self.units.programs.iter().any(Program::reads_replicas)
    }

    /// Returns the step size of updates to selection biases.
    pub fn bias_update_rate(&self) -> f64 {
        self.bias_update_rate
    }

    /// Returns the constants that a replay supplies, in this order.
    pub fn constants(&self) -> &[Constant] {
        &self.constants
    }

    /// Returns the named inputs of a micro-batch besides its tokens.
    pub fn inputs(&self) -> &[InputDeclaration] {
        &self.inputs
    }

    /// Returns the inputs of memory prediction: the bytes of each unit, and the records of parameters.
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
                overlap_buffer_bytes: (program.transit_chunks() > 0).then(|| program.overlap_buffer_bytes()),
                has_backward: program.has_backward(),
                buffers: self.buffers(unit).collect(),
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
            data_bytes: self
                .inputs
                .iter()
                .map(|input| shape.sequences * input.elements() * input.dtype.size_bytes())
                .collect(),
            tokens: shape.tokens(),
            boundary_bytes: self.units.boundary_bytes(),
            slice_bytes: self.slice_elements() * shape.dtype.size_bytes(),
            gathered_bytes: self.slice_elements() * self.places.tensor.ranks * shape.dtype.size_bytes(),
            constants: self.constants.iter().map(|constant| constant.values.len()).collect(),
            context: self.places.context,
        }
    }

    /// Returns the largest number of elements of a parameter that any rank of its group holds.
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

    /// Returns the index in the model of a unit's first dropout site.
    pub fn first_dropout_site(unit: usize) -> u32 {
        unit as u32 * MAX_DROPOUT_SITES
    }

    /// Floating-point operations of one training step on one micro-batch, summed over the ranks of a data-parallel
    /// replica, without recomputation. The backward counts twice the forward, less the gradients that are not needed.
    pub fn training_flops(&self) -> u64 {
        self.flops.training
    }

    /// Floating-point operations summed over the ranks of a data-parallel replica; independent of this rank's place.
    pub fn flops(&self) -> Flops {
        self.flops
    }

    fn declare(&mut self, unit: usize) {
        let first = self.records.len();
        let prefix = &self.units.declared[unit].prefix;
        let records: Vec<_> =
            self.program(unit).parameters().iter().map(|declared| record(declared, unit, prefix)).collect();
        self.records.extend(records);
        self.unit_parameters.push((first..self.records.len()).map(ParameterId).collect());
    }

    /// Ties a parameter to the one that owns its weights.
    ///
    /// # Panics
    /// If the model declares neither, or only one of them.
    fn tie(&mut self, tie: &Tie) {
        let Tie { unit, parameter, target } = tie;
        let name = format!("{}{parameter}", self.units.declared[*unit].prefix);
        let find = |name: &str| self.records.iter().position(|record| record.name == name);
        let (tied, owner) = (find(&name), find(target));
        let tied = tied.unwrap_or_else(|| panic!("the model ties {name}, which it does not declare"));
        let owner =
            owner.unwrap_or_else(|| panic!("the model ties {name} to {target}, which it does not declare"));
        self.records[tied].tie = Some(ParameterId(owner));
    }
}

/// Returns the named inputs of a model as tensors per sample of a micro-batch.
fn inputs_of(model: &dyn Model, shape: BlockShape) -> Vec<InputDeclaration> {
    model.inputs().iter().map(|input| input.for_tokens(shape.seq_len)).collect()
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
        block_format: None,
        // Weight decay applies to matrices, not to scales and biases; those of experts are stacked.
        decay: declared.shape.len() > 1 && !declared.name.ends_with(".bias"),
        learning_rate_multiplier: 1.0,
    }
}

/// Returns the record of every parameter of the model: embedding, block by block, then the head.
///
/// Unit 0 is the embedding, unit `1 + n` block `n`, the last unit the final norm and the output layer. Names are
/// Hugging Face's, except that GPT-2's fused `c_attn` is three parameters (`attn.q`, `attn.k`, `attn.v`); every
/// linear weight is `[out, in]`. A tied output layer is a record whose `tie` points to the embedding. Weight decay
/// applies to matrices, not to vectors. Initial weights follow transformers: normal, with GPT-2's projections into
/// the residual stream scaled by 1/√(2 × blocks); biases zero; norms one.
pub fn parameter_records(config: &ModelConfig) -> Vec<ParameterRecord> {
    tuned_records(config, &Tuning::default())
}

impl ModelConfig {
    /// Number of parameters, tied ones counted once.
    pub fn parameter_count(&self) -> u64 {
        let own = |record: &ParameterRecord| record.tie.is_none();
        parameter_records(self).iter().filter(|record| own(record)).map(|r| r.elements() as u64).sum()
    }
}

/// Returns the records of [`parameter_records`] with the parameters that `tuning` freezes and adds.
pub fn tuned_records(config: &ModelConfig, tuning: &Tuning) -> Vec<ParameterRecord> {
    // Parameters do not depend on the shape of the input, so the smallest one suffices.
    let seq_len = config.model().sizes().fixed_seq_len.unwrap_or(1);
    let shape = BlockShape { sequences: 1, seq_len, dtype: DType::F32 };
    let (mode, recompute) = (Mode::Inference, RecomputeRules::default());
    let head_output = HeadOutput::Logits;
    let (statistics, places) = (Statistics::of(mode), Places::default());
    let options = RecordingOptions { mode, shape, recompute, head_output, statistics, places };
    RecordedModel::tuned(config, tuning, options).records
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::{Adapter, LoraConfig, LoraScaling};

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

    /// Latent attention is recorded in two forms.
    #[test]
    fn both_modes_record_the_same_parameters() {
        let config = ModelConfig::preset("deepseek-v3").expect("a preset");
        let adapter = |target: &str| {
            let (targets, scaling) = (vec![target.to_owned()], LoraScaling::Standard);
            let lora = LoraConfig { rank: 8, alpha: 8.0, dropout: 0.0, scaling, targets };
            Adapter::new(lora, &config).expect("a target")
        };
        for adapter in [None, Some(adapter("o_proj")), Some(adapter("kv_a_proj_with_mqa"))] {
            let tuning = Tuning { adapter, ..Tuning::default() };
            let records = |mode| {
                let options = RecordingOptions {
                    mode,
                    shape: BlockShape { sequences: 1, seq_len: 2, dtype: DType::F32 },
                    recompute: RecomputeRules::default(),
                    head_output: HeadOutput::Logits,
                    statistics: Statistics::of(mode),
                    places: Places::default(),
                };
                let recorded =
                    RecordedModel::tuned_with_flops(&config, &tuning, options, Some(Flops::default()));
                recorded.records().iter().map(|record| (record.name.clone(), record.shape.clone())).collect()
            };
            let [inference, training]: [Vec<_>; 2] = [Mode::Inference, Mode::Training].map(records);
            let differs = inference.iter().zip(&training).find(|(inference, training)| inference != training);
            assert_eq!(differs, None, "{:?}", tuning.adapter.map(|adapter| adapter.config().targets.clone()));
            assert_eq!(inference.len(), training.len());
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
