//! Predicted memory of every rank of a run, before any of them starts. The model is recorded once for each distinct place of a rank
//! on the mesh, and the rest is arithmetic ([`lockstep_plan::predicted`]).

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use lockstep_config::plan::checked_plan;
use lockstep_config::{PlanFile, ResolvedModel, RunConfig, engine_options, human, too_few_live};
use lockstep_engine::EngineOptions;
use lockstep_graph::BlockShape;
use lockstep_model::{ModelConfig, RecordedModel, RecordingOptions, Tuning};
use lockstep_plan::gathering::LiveLimitTooLow;
use lockstep_plan::{
    Axis, MemoryBytes, MemoryCategory, MemoryPrediction, Mesh, ModelProfile, Places, Plan, PlanPrediction,
    RankPlan, RanksMemory, Residences, StatePlan, ZeroStage, predicted,
};

use crate::Error;

/// Predicted memory of the ranks of a run.
#[derive(Debug, Clone)]
pub struct Forecast {
    /// The distinct predictions.
    distinct: Vec<MemoryPrediction>,
    /// Index into `distinct` for each rank.
    of_rank: Vec<usize>,
    mesh: Mesh,
}

impl Forecast {
    /// Predicts the memory of a run of `config`.
    ///
    /// # Errors
    /// If the configuration does not fit its model.
    pub fn of(config: &RunConfig, model: &ResolvedModel) -> Result<Self, Error> {
        Self::of_training(config, &model.config, &model.tuning, &MemoryInputs::of(config))
    }

    /// Predicts the device memory of a run on accelerators. Copies of the state and state offloaded to host memory are not in it.
    ///
    /// # Errors
    /// If the configuration does not fit its model.
    pub fn on_accelerators(config: &RunConfig, model: &ResolvedModel) -> Result<Self, Error> {
        let residences = config.plan.residence.off_device();
        let training = MemoryInputs {
            residences,
            keeps_rollback_copy: false,
            saves_in_background: false,
            ..MemoryInputs::of(config)
        };
        Self::of_training(config, &model.config, &model.tuning, &training)
    }

    /// Predicts the memory of `training` of `model` with the parallelism of `config`.
    ///
    /// # Errors
    /// If the configuration does not fit the model.
    pub fn of_training(
        config: &RunConfig,
        model: &ModelConfig,
        tuning: &Tuning,
        training: &MemoryInputs,
    ) -> Result<Self, Error> {
        let checked = checked_plan(config, model, tuning)?;
        let mesh = *checked.mesh();
        let mut recorded = HashMap::new();
        let mut known: HashMap<(Places, usize, Copies), usize> = HashMap::new();
        let (mut distinct, mut of_rank) = (Vec::new(), Vec::with_capacity(mesh.world_size()));
        for rank in 0..mesh.world_size() {
            let places = Places::of(&mesh, rank, checked.plan());
            let stage = mesh.ranks().coordinate(rank, Axis::Pipeline);
            let copies = training.copies(&mesh, rank, config.zero_stage());
            let unknown = match known.entry((places, stage, copies)) {
                Entry::Occupied(index) => {
                    of_rank.push(*index.get());
                    continue;
                }
                Entry::Vacant(unknown) => unknown,
            };
            let plan = checked.rank(rank);
            let recorded =
                recorded.entry(places).or_insert_with(|| Recorded::new(model, tuning, training, &plan));
            let prediction = recorded.on(&plan, copies).map_err(|few| too_few_live(config, few))?;
            let index = distinct.iter().position(|known| *known == prediction).unwrap_or_else(|| {
                distinct.push(prediction);
                distinct.len() - 1
            });
            of_rank.push(*unknown.insert(index));
        }
        Ok(Self { distinct, of_rank, mesh })
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.of_rank.len()
    }

    /// Returns the mesh of the ranks.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the predicted memory of a rank.
    pub fn of_rank(&self, rank: usize) -> &MemoryPrediction {
        &self.distinct[self.of_rank[rank]]
    }

    /// Returns the distinct predictions as (first rank, number of ranks, prediction), in the order of the ranks.
    pub fn distinct(&self) -> impl Iterator<Item = (usize, usize, &MemoryPrediction)> {
        self.distinct.iter().enumerate().map(|(index, prediction)| {
            let mut ranks = self.of_rank.iter().enumerate().filter(|(_, of_rank)| **of_rank == index);
            let first = ranks.next().map_or(0, |(rank, _)| rank);
            (first, 1 + ranks.count(), prediction)
        })
    }

    /// Returns the booked bytes of each rank in the form of a plan file.
    pub fn of_plan(&self) -> PlanPrediction {
        let memory = self.distinct.iter().enumerate().map(|(index, prediction)| {
            let ranks = (0..self.ranks()).filter(|rank| self.of_rank[*rank] == index);
            RanksMemory { ranks: ranks.collect(), bytes: prediction.by_category() }
        });
        PlanPrediction { memory: memory.collect(), step: None }
    }

    /// Returns a message on the first difference between the memory that a plan file predicts and this forecast; `None` if there is none, or the
    /// file predicts nothing. The file may have been edited, or made for other settings.
    pub fn outdated(&self, file: &PlanFile) -> Option<String> {
        let predicted = file.plan().predicted.as_ref()?;
        let now = |rank: usize| self.of_rank(rank).by_category();
        let mut other = (0..self.ranks()).filter(|rank| predicted.of_rank(*rank) != Some(now(*rank)));
        let first = other.next()?;
        let others = match other.count() {
            0 => String::new(),
            others => format!(", and so on {}", human::plural(others, "other rank")),
        };
        let what = match predicted.of_rank(first) {
            None => "is not predicted".to_owned(),
            Some(memory) => {
                let parts = memory.entries().zip(now(first).entries()).filter(|(file, now)| file != now);
                let part = |((category, file), (_, now)): ((MemoryCategory, usize), (_, usize))| {
                    format!("{} {file} bytes and comes to {now}", category.name())
                };
                format!("is predicted {}", parts.map(part).collect::<Vec<_>>().join(", "))
            }
        };
        let path = file.path().display();
        Some(format!(
            "{path} was edited, or made for other settings: rank {first} {what}{others}; \
             lockstep plan RUN.toml --plan {path} -o {path} predicts anew"
        ))
    }

    /// Returns the most that any rank holds, by category.
    pub fn greatest(&self) -> MemoryBytes {
        self.distinct.iter().fold(MemoryBytes::default(), |most, one| most.maximum(&one.by_category()))
    }
}

/// Numbers of copies of the state that a rank makes, for rollbacks and for saves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Copies {
    /// Copies to go back to.
    pub kept: usize,
    /// Copies that are saved in the background.
    pub saved: usize,
}

/// The inputs of a memory prediction other than the model and its parallelism.
#[derive(Debug, Clone)]
pub struct MemoryInputs {
    options: EngineOptions,
    /// The plan's residences on this device.
    residences: Residences,
    /// True if a copy of the state is kept for rollbacks.
    keeps_rollback_copy: bool,
    /// True if the state is copied so that saves overlap with steps.
    saves_in_background: bool,
}

impl MemoryInputs {
    /// Returns the inputs of a run.
    pub fn of(config: &RunConfig) -> Self {
        Self::under(config, &config.plan)
    }

    /// Returns the memory-prediction inputs of `config` with `plan` instead of its own.
    pub(crate) fn under(config: &RunConfig, plan: &Plan) -> Self {
        let every = config.checkpoint.every;
        let saves_midway = every > 0 && every < config.train.steps;
        Self {
            options: engine_options(config),
            residences: plan.residence.on_cpu(),
            keeps_rollback_copy: config.rollback_after() > 0,
            saves_in_background: config.saves_from_copies_of(plan) && saves_midway,
        }
    }

    /// Returns the inputs of steps of `plan` that keep no copies of the state.
    pub fn bare(options: EngineOptions, plan: &Plan) -> Self {
        let residences = plan.residence.on_cpu();
        Self { options, residences, keeps_rollback_copy: false, saves_in_background: false }
    }

    /// Returns the copies of the state that a rank keeps.
    pub fn copies(&self, mesh: &Mesh, rank: usize, zero_stage: ZeroStage) -> Copies {
        let saves = self.saves_in_background && mesh.is_in_first_replica(rank, zero_stage);
        Copies { kept: usize::from(self.keeps_rollback_copy), saved: usize::from(saves) }
    }
}

/// A model, recorded for one place on the mesh.
struct Recorded {
    profile: ModelProfile,
    state: StatePlan,
}

impl Recorded {
    fn new(model: &ModelConfig, tuning: &Tuning, training: &MemoryInputs, plan: &RankPlan) -> Self {
        let MemoryInputs { options, residences, .. } = training;
        let shape = BlockShape::of_plan(plan.checked(), options.dtype);
        let recording = RecordingOptions::training(shape, plan.plan().recompute, plan.places);
        let recorded = RecordedModel::tuned(model, tuning, recording);
        let facts = options.state_facts(&recorded);
        let state =
            StatePlan::new(plan.plan(), *residences, plan.mesh(), plan.checked().global_batch(), &facts);
        Self { profile: recorded.profile(), state }
    }

    fn on(&mut self, plan: &RankPlan, copies: Copies) -> Result<MemoryPrediction, LiveLimitTooLow> {
        (self.state.kept_copies, self.state.saved_copies) = (copies.kept, copies.saved);
        let shard_ranks = |summing| plan.mesh().shard_ranks(summing);
        predicted(&self.profile, &plan.passes, shard_ranks, &self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_config::resolve_model;

    const MANUAL: &str = include_str!("../../../docs/memory.md");

    fn config(settings: &[&str]) -> RunConfig {
        let model = [
            "model.preset=llama-15m",
            "model.hidden_size=256",
            "model.intermediate_size=1024",
            "model.num_attention_heads=4",
            "model.num_key_value_heads=4",
            "model.tie_word_embeddings=false",
            "data.train=[\"a.txt\"]",
        ];
        let settings: Vec<&str> = model.iter().chain(settings).copied().collect();
        RunConfig::parse("", "RUN.toml", &settings).unwrap_or_else(|problems| panic!("{problems}"))
    }

    /// Returns the booked bytes per parameter of weights, gradients and optimizer state.
    fn bytes_of_a_parameter(settings: &[&str]) -> [f64; 3] {
        let config = config(settings);
        let model = resolve_model(&config).unwrap();
        let memory = Forecast::of(&config, &model).unwrap().of_rank(0).by_category();
        let parameters = model.config.parameter_count() as f64;
        let state = [MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Optimizer];
        state.map(|category| memory[category] as f64 / parameters)
    }

    #[test]
    fn the_table_of_the_manual_is_what_is_booked() {
        let mut rows = 0;
        let lines = MANUAL.lines().filter(|line| line.starts_with("| f32 |") || line.starts_with("| bf16"));
        for line in lines {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let [precisions, more, weights, gradients, master, adamw, together, one, none] = cells[..] else {
                continue;
            };
            let number = |cell: &str| if cell == "-" { 0.0 } else { cell.parse::<f64>().unwrap() };
            for precision in precisions.split(", ") {
                let precision = format!("train.precision={precision}");
                let mut settings = vec![precision.as_str()];
                if more.contains("state_precision") || more == "both" {
                    settings.push("optimizer.state_precision=bf16");
                }
                if more.contains("master_weights") || more == "both" {
                    settings.push("train.master_weights=false");
                }
                let expected = [number(weights), number(gradients), number(master) + number(adamw)];
                let is_near = |found: f64, expected: f64| (found - expected).abs() < 0.02 * expected.max(1.0);
                let found = bytes_of_a_parameter(&settings);
                for (found, expected) in found.into_iter().zip(expected) {
                    assert!(is_near(found, expected), "{settings:?}: {found} bytes, {line}");
                }
                assert_eq!(expected.iter().sum::<f64>(), number(together), "{line}");
                for (kind, together) in [("lion", one), ("sgd", none)] {
                    let kind = format!("optimizer.kind={kind}");
                    let mut settings = settings.clone();
                    // A run without optimizer state has no state precision to choose.
                    if kind.ends_with("sgd") {
                        settings.push("optimizer.momentum=0.0");
                    }
                    settings.push(&kind);
                    let found: f64 = bytes_of_a_parameter(&settings).iter().sum();
                    assert!(is_near(found, number(together)), "{settings:?}: {found} bytes, {line}");
                }
                rows += 1;
            }
        }
        assert_eq!(rows, 8, "rows of the table, by precision");
    }

    #[test]
    fn ranks_that_hold_the_same_are_told_once() {
        let config = config(&[
            "train.global_batch=8",
            "parallel.data_parallel_replicate=4",
            "parallel.tensor_parallel=2",
        ]);
        let model = resolve_model(&config).unwrap();
        let forecast = Forecast::of(&config, &model).unwrap();
        assert_eq!(forecast.ranks(), 8);
        // Only the first replica is saved.
        let groups: Vec<(usize, usize)> = forecast.distinct().map(|(rank, ranks, _)| (rank, ranks)).collect();
        assert_eq!(groups, [(0, 2), (2, 6)]);
    }
}
