//! A plan file as the source of a run's plan, and the check that the run keeps to it.

use std::path::Path;

use lockstep_plan::{LayerRule, Plan, RecomputeRules};
use serde_json::Value;

use crate::keys::values_of_plan;
use crate::record::toml_value;
use crate::{Error, Origin, Problem, RunConfig, named_model, plan};

/// A plan and the file that it was read from.
#[derive(Debug, Clone)]
pub struct PlanFile {
    /// The path of the file, or the name in messages of a plan without one.
    name: String,
    plan: Plan,
}

impl PlanFile {
    /// Reads a plan from its file.
    ///
    /// # Errors
    /// [`Error::Plan`] if the file cannot be read or is no plan.
    pub fn read(path: &Path) -> Result<Self, Error> {
        Self::read_as(path, &path.display().to_string())
    }

    /// Reads a plan from a file that messages call `name`.
    ///
    /// # Errors
    /// As [`PlanFile::read`].
    pub fn read_as(path: &Path, name: &str) -> Result<Self, Error> {
        let refuse = |problems: String| Error::Plan { path: name.into(), problems };
        let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
        let plan = Plan::from_json(&text).map_err(|error| refuse(error.to_string()))?;
        Ok(Self { name: name.to_owned(), plan })
    }

    /// Wraps a plan without a file; messages call it `name`.
    pub fn unwritten(plan: Plan, name: &str) -> Self {
        Self { name: name.to_owned(), plan }
    }

    /// Returns the plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The path of the file, or the name of a plan without one.
    pub fn path(&self) -> &Path {
        Path::new(&self.name)
    }

    /// Returns the name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Checks that a run's settings keep to the plan, and that the plan is for the run's model.
    ///
    /// # Errors
    /// [`Error::Plan`] with everything that does not fit or differs; also as [`plan::check`].
    pub fn check(&self, config: &RunConfig) -> Result<(), Error> {
        let (model, _) = named_model(config)?;
        let facts = plan::facts_of(config, &model);
        if let Ok(plan) = self.plan.resolved(&facts, || vec![1.0; facts.units]) {
            let plan = Plan { model: self.plan.model.clone(), ..plan };
            plan.check(&facts).map_err(|error| self.refuse(error.to_string()))?;
        }
        plan::check(config).map_err(|error| self.blamed(error))?;
        let differences = differences(self, config);
        if differences.is_empty() { Ok(()) } else { Err(self.refuse(differences.join("\n"))) }
    }

    /// Returns true if a run of `config`, with the plan's keys replaced, can keep to the plan.
    pub fn fits(&self, config: &RunConfig) -> bool {
        config.with_plan(self).is_ok_and(|config| self.check(&config).is_ok())
    }

    /// Returns a configuration error as an error about this plan file if all its problems come from a plan; any other error as it is.
    pub fn blamed(&self, error: Error) -> Error {
        let Error::Configuration(problems) = &error else { return error };
        if !problems.iter().all(|problem| matches!(problem.origin, Origin::Plan(_))) {
            return error;
        }
        let line = |problem: &Problem| {
            let text = problem.to_string();
            text.strip_prefix(&format!("{}: ", problem.origin)).unwrap_or(&text).to_owned()
        };
        self.refuse(problems.iter().map(line).collect::<Vec<_>>().join("\n"))
    }

    fn refuse(&self, problems: String) -> Error {
        Error::Plan { path: self.path().to_owned(), problems }
    }
}

/// Returns the `--set` arguments that contradict the plan file.
fn differences(file: &PlanFile, config: &RunConfig) -> Vec<String> {
    let now = values_of_plan(&config.plan);
    let of_arguments = |key: &str| matches!(config.origin(key), Origin::Argument(_));
    let entries = values_of_plan(&file.plan).into_iter().zip(now);
    entries
        .filter(|((key, file), (_, run))| file != run && of_arguments(key))
        .map(|((key, file), (_, run))| {
            format!("{key} is {file} in the plan, and --set says {run}: leave one out")
        })
        .collect()
}

/// Returns the `--set` arguments that turn one plan into another.
pub fn settings_between(from: &Plan, to: &Plan) -> Vec<String> {
    let entries = values_of_plan(from).into_iter().zip(values_of_plan(to));
    let changed = entries.filter(|((_, from), (_, to))| from != to);
    changed.filter_map(|(_, (key, value))| Some(format!("{key}={}", argument_value(&value)?))).collect()
}

/// Returns a value as in a `--set` argument: a word has no quotation marks.
fn argument_value(value: &Value) -> Option<String> {
    let is_word = |word: &&str| word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    value.as_str().filter(is_word).map(str::to_owned).or_else(|| toml_value(value))
}

/// Returns the `--set` argument of recompute rules, with the rules as an inline TOML table.
pub fn recompute_setting(rules: &RecomputeRules) -> String {
    let layer = |LayerRule { from, to, every, mode }: &LayerRule| {
        let to = to.map_or(String::new(), |to| format!("to = {to}, "));
        format!("{{ from = {from}, {to}every = {every}, mode = {:?} }}", mode.name())
    };
    let layers: Vec<String> = rules.rules().map(layer).collect();
    let default = rules.default_mode().name();
    if layers.is_empty() {
        return format!("parallel.recompute={default}");
    }
    format!("parallel.recompute={{ default = {default:?}, layers = [{}] }}", layers.join(", "))
}

#[cfg(test)]
mod tests {
    use lockstep_plan::gathering::ReshardAfterForward;
    use lockstep_plan::schedule::Kind;
    use lockstep_plan::{
        ContextMethod, Degrees, PipelineSchedule, Recompute, Residence, Residences, Sharding,
        TensorDimensions, Wrap,
    };

    use super::*;

    fn plan() -> Plan {
        Plan {
            mesh: Degrees { pipeline: 2, replicate: 2, context: 2, tensor: 2, ..Degrees::default() },
            micro_batch: Some(2),
            schedule: PipelineSchedule::published(Kind::ZeroBubbleV, 2),
            stages: vec![2, 2, 1, 3],
            recompute: Recompute::Full.into(),
            sequence_parallel: true,
            tensor_chunks: Some(3),
            context_method: ContextMethod::AllToAll,
            ..Plan::default()
        }
    }

    /// Returns a run under `file`, with a model of as many units.
    fn run_under(file: &Plan, more: &[&str]) -> RunConfig {
        let layers = format!("model.n_layer={}", file.stages.iter().sum::<usize>() - 2);
        let settings = ["model.preset=baby-gpt", "model.n_head=8", &layers, "train.global_batch=16"];
        let settings = [&settings[..], &["data.train=[\"a.txt\"]"], more].concat();
        let file = PlanFile::unwritten(file.clone(), "plan.json");
        RunConfig::parse_with("", "RUN.toml", &[], Some(&file), &settings)
            .unwrap_or_else(|problems| panic!("{problems}"))
    }

    /// Returns the plan of a run under `file`.
    fn plan_under(file: &Plan, more: &[&str]) -> Plan {
        plan::check(&run_under(file, more)).unwrap_or_else(|error| panic!("{error}")).0
    }

    #[test]
    fn a_run_under_a_plan_has_that_plan() {
        let rows = PipelineSchedule::rows(vec![
            "F0,F1,F2,F3,B0,B1,B2,B3".to_owned(),
            "F0,F1,F2,F3,B0,B1,B2,B3".to_owned(),
        ]);
        let by_rows = Plan { schedule: rows, stages: vec![1, 5], ..plan() };
        let wrap = Wrap::Named(vec!["model.layers.*".to_owned(), "lm_head.*".to_owned()]);
        let sharding = Sharding {
            reshard_after_forward: ReshardAfterForward::Always,
            max_live_parameters: Some(1_000_000),
            secondary_shard: Some(2),
            wrap,
        };
        let mesh = Degrees { replicate: 1, shard: 2, ..plan().mesh };
        let gathered = Plan { mesh, zero_stage: 3, sharding, ..plan() };
        let by_size = Sharding { wrap: Wrap::AtLeast(5_000_000), ..Sharding::default() };
        let joined = Plan { zero_stage: 1, sharding: by_size, ..gathered.clone() };
        let (optimizer, parameters) = (Residence::Disk, Residence::Disk);
        let residence = Residences { optimizer, parameters, fraction: 0.25, ..Residences::default() };
        let on_disk = Plan { residence, bucket_mb: 1.5, ..gathered.clone() };
        let residence = Residences {
            optimizer: Residence::Host,
            activations: Residence::Host,
            fraction: 0.875,
            ..Residences::default()
        };
        let in_host_memory = Plan { residence, ..gathered.clone() };
        for file in [plan(), by_rows, gathered, joined, on_disk, in_host_memory] {
            assert_eq!(Plan { model: String::new(), ..plan_under(&file, &[]) }, file);
        }
    }

    #[test]
    fn what_has_no_effect_in_a_plan_is_passed_over() {
        let mesh = Degrees { replicate: 2, tensor: 4, ..Degrees::default() };
        let tensor_layout = TensorDimensions::Two;
        let file =
            Plan { mesh, stages: vec![8], schedule: PipelineSchedule::default(), tensor_layout, ..plan() };
        let run = run_under(&file, &[]);
        assert_eq!(run.plan.tensor_layout, TensorDimensions::Two);
        assert!(!run.plan.sequence_parallel && run.plan.tensor_chunks.is_none(), "{:?}", run.plan);
        let lines = differences(
            &PlanFile::unwritten(file.clone(), ""),
            &run_under(&file, &["parallel.tensor_layout=1d"]),
        );
        assert!(
            lines.len() == 1
                && lines[0]
                    .starts_with("parallel.tensor_layout is \"2d\" in the plan, and --set says \"1d\""),
            "{lines:?}"
        );
    }

    #[test]
    fn settings_beside_a_plan_that_say_something_else_are_told() {
        let run = run_under(&plan(), &["parallel.recompute=none", "parallel.pipeline_stages=[2, 2, 2, 2]"]);
        let mut lines = differences(&PlanFile::unwritten(plan(), ""), &run);
        lines.sort();
        assert!(lines.len() == 2 && lines[0].contains("pipeline_stages is [2,2,1,3]"), "{lines:?}");
        assert!(lines[1].contains("recompute is \"full\" in the plan"), "{lines:?}");
    }

    #[test]
    fn settings_make_one_plan_of_another() {
        let other = Plan { recompute: Recompute::Selective.into(), stages: vec![2, 2, 2, 2], ..plan() };
        assert_eq!(
            settings_between(&plan(), &other),
            ["parallel.pipeline_stages=[2, 2, 2, 2]", "parallel.recompute=selective"]
        );
        let changed =
            run_under(&plan(), &["parallel.pipeline_stages=[2, 2, 2, 2]", "parallel.recompute=selective"]);
        assert_eq!(changed.plan.recompute, other.recompute);
    }
}
