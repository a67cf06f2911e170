//! Recording of a model's units; units whose recordings would be equal share a program.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_graph::{
    InputGradient, LoraAdapters, ParameterDeclaration, Program, Recompute, Recorder, Split, Value,
};
use lockstep_plan::{BlockFormat, Places};

use crate::{
    config::ModelConfig,
    model::Unit,
    options::{RecordingOptions, Tuning},
};

/// Floating-point operations of a forward and a backward of a micro-batch, summed over the ranks of a data-parallel replica.
#[derive(Debug, Clone, Copy, Default)]
pub struct Flops {
    pub(crate) training: u64,
    /// Part of these that is attention's.
    pub(crate) attention: u64,
}

/// The programs of all units.
#[derive(Debug)]
pub(crate) struct RecordedUnits {
    /// The distinct programs.
    pub(crate) programs: Vec<Program>,
    /// Elements that each of these programs does not hold because its quantized matrices take fewer bytes than numbers would.
    pub(crate) saved_elements: Vec<u64>,
    /// Index of each unit's program.
    pub(crate) of_unit: Vec<usize>,
    /// The units as the model declares them.
    pub(crate) declared: Vec<Unit>,
}

impl RecordedUnits {
    pub(crate) fn new(config: &ModelConfig, tuning: &Tuning, options: RecordingOptions) -> Self {
        let model = config.model();
        let (splits, ties, inputs) = (model.placements(), model.ties(), model.inputs());
        let constants = model.constants();
        let mut units = Self {
            programs: Vec::new(),
            saved_elements: Vec::new(),
            of_unit: Vec::new(),
            declared: model.units(),
        };
        // Recording inputs of each program.
        let mut recorded: Vec<Recording> = Vec::new();
        let mut trains_anything = false;
        for (index, unit) in units.declared.iter().enumerate() {
            let mut recording = Recording::new(unit, tuning);
            for tie in ties.iter().filter(|tie| tie.unit == index) {
                recording.freeze_tied(&tie.parameter, tuning.frozen.contains(&tie.target));
            }
            if !trains_anything {
                recording.input_gradient = InputGradient::Unwanted;
            }
            recording.recompute = unit.layer.map_or(Recompute::None, |layer| options.recompute.of(layer));
            let known = recorded.iter().position(|known| *known == recording);
            let program = known.unwrap_or_else(|| {
                units.programs.push(recording.run(options, &splits, |g| {
                    g.declare_inputs(&inputs);
                    g.declare_constants(&constants);
                    model.record(index, g)
                }));
                let recorded_last = units.programs.last();
                units
                    .saved_elements
                    .push(recorded_last.map_or(0, |program| recording.saved_elements(program)));
                recorded.push(recording);
                recorded.len() - 1
            });
            trains_anything |= units.programs[program].trained().next().is_some();
            units.of_unit.push(program);
        }
        units
    }

    /// Returns the program of a unit.
    pub(crate) fn program(&self, unit: usize) -> &Program {
        &self.programs[self.of_unit[unit]]
    }

    /// Returns the bytes of the largest value between units.
    pub(crate) fn boundary_bytes(&self) -> usize {
        let between = 0..self.of_unit.len().saturating_sub(1);
        between.map(|unit| self.program(unit).output_bytes().len()).max().unwrap_or(0)
    }

    /// Returns the floating-point operations of all ranks together, which equal those of a recording for one rank.
    /// `self` is the recording of a single rank's shards.
    pub(crate) fn flops_alone(
        &self,
        config: &ModelConfig,
        tuning: &Tuning,
        options: RecordingOptions,
    ) -> Flops {
        let Places { tensor, context, experts, .. } = options.places;
        if tensor.ranks * context.ranks * experts.group_size() > 1 {
            let alone = RecordingOptions { places: Places::default(), ..options };
            return Self::new(config, tuning, alone).flops();
        }
        self.flops()
    }

    fn flops(&self) -> Flops {
        let profiles: Vec<_> = self.programs.iter().map(Program::profile).collect();
        // Saturation is harmless: a model this large fails the memory check.
        self.of_unit.iter().map(|program| &profiles[*program]).fold(Flops::default(), |sum, profile| {
            let both = profile.forward_flops.saturating_add(profile.backward_flops);
            Flops {
                training: sum.training.saturating_add(both),
                attention: sum.attention.saturating_add(profile.attention_flops),
            }
        })
    }
}

/// Inputs that determine the program of a unit.
#[derive(Debug, PartialEq)]
struct Recording {
    kind: usize,
    /// Names of frozen parameters, relative to the unit.
    frozen: BTreeSet<String>,
    /// Block formats of quantized matrices by their names, relative to the unit.
    quantized: BTreeMap<String, BlockFormat>,
    low_rank: Option<LoraAdapters>,
    input_gradient: InputGradient,
    recompute: Recompute,
}

impl Recording {
    fn new(unit: &Unit, tuning: &Tuning) -> Self {
        let (kind, prefix) = (unit.kind, unit.prefix.as_str());
        // A head has no prefix; the names of other units match none of its parameters.
        let within = |name: &String| name.strip_prefix(prefix).map(str::to_owned);
        let frozen = tuning.frozen.iter().filter_map(within).collect();
        let quantized = tuning.quantized.iter();
        let quantized = quantized.filter_map(|(name, format)| Some((within(name)?, *format))).collect();
        let low_rank = tuning.adapter.as_ref().map(|adapter| adapter.within(prefix));
        let (input_gradient, recompute) = (InputGradient::Wanted, Recompute::None);
        Self { kind, frozen, quantized, low_rank, input_gradient, recompute }
    }

    /// Returns the number of elements whose bytes blocks save, in the dtype of the unit's program.
    fn saved_elements(&self, program: &Program) -> u64 {
        let size = program.shape().dtype.size_bytes();
        let saved = |declared: &ParameterDeclaration| {
            let elements = declared.share.shape_of(&declared.shape).iter().product::<usize>();
            let bytes = self.quantized.get(&declared.name)?.bytes(elements)?;
            Some(elements.saturating_sub(bytes.div_ceil(size)) as u64)
        };
        program.parameters().iter().filter_map(saved).sum()
    }

    /// Makes a tied parameter frozen or trained like the one it is tied to.
    fn freeze_tied(&mut self, name: &str, is_frozen: bool) {
        if is_frozen {
            self.frozen.insert(name.to_owned());
        } else {
            self.frozen.remove(name);
        }
    }

    fn run(
        &self,
        options: RecordingOptions,
        splits: &[(&str, Split)],
        record: impl FnOnce(&mut Recorder) -> Value,
    ) -> Program {
        let RecordingOptions { mode, shape, places: Places { tensor, context, experts, cache }, .. } =
            options;
        let mut g = Recorder::new(mode, shape);
        g.set_head_output(options.head_output);
        g.set_statistics(options.statistics);
        g.share_sequences(context);
        g.shard_cache(cache);
        g.split(tensor, splits.iter().map(|(module, split)| ((*module).to_owned(), *split)));
        g.share_experts(experts);
        g.freeze(self.frozen.iter().cloned());
        g.set_input_gradient(self.input_gradient);
        if let Some(low_rank) = &self.low_rank {
            g.adapt(low_rank.clone());
        }
        let output = record(&mut g);
        g.finish(output, self.recompute)
    }
}
