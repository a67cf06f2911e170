//! A plan file, as a run takes it: the keys that it stands for, and whether the run keeps to it.

use std::path::{Path, PathBuf};

use lockstep_plan::{
    DEFAULT_BUCKET_MB, Degrees, Feedback, LayerRule, MemoryCategory, PipelineSchedule, Plan, RecomputeRules,
    Residence, Residences, Sharding, TensorDimensions,
};

use crate::config::{ContextMethod, Origin, Problem, ReshardAfterForward, TensorLayout};
use crate::setup::named_model;
use crate::{Error, Forecast, RunConfig, human, plan};

/// A plan, and where it stands.
#[derive(Debug, Clone)]
pub struct PlanFile {
    path: PathBuf,
    plan: Plan,
    settings: Vec<String>,
}

impl PlanFile {
    /// Reads a plan from its file.
    ///
    /// # Errors
    /// [`Error::Plan`] with what keeps it from being read.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let refuse = |problems: String| Error::Plan { path: path.to_owned(), problems };
        let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
        let plan = Plan::from_json(&text).map_err(|error| refuse(error.to_string()))?;
        let settings = settings_of(&plan);
        Ok(Self { path: path.to_owned(), plan, settings })
    }

    /// A plan that stands in no file; `name` is what messages call it.
    pub fn unwritten(plan: Plan, name: &str) -> Self {
        let settings = settings_of(&plan);
        Self { path: PathBuf::from(name), plan, settings }
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The keys that it sets, as `--set` takes them.
    pub fn settings(&self) -> &[String] {
        &self.settings
    }

    /// Whether a run that has these settings keeps to the plan, and its model is the plan's.
    ///
    /// # Errors
    /// [`Error::Plan`] with everything that does not fit, or differs; as [`plan::check`].
    pub fn check(&self, config: &RunConfig) -> Result<(), Error> {
        let (model, _) = named_model(config)?;
        let facts = plan::facts_of(config, &model);
        self.plan.validate(&facts).map_err(|error| self.refuse(error.to_string()))?;
        let (plan, _) = plan::check(config).map_err(|error| self.blamed(error))?;
        let differences = differences(&self.plan, &plan);
        if differences.is_empty() { Ok(()) } else { Err(self.refuse(differences.join("\n"))) }
    }

    /// Whether a run of `config`, but for what the plan sets, can keep to it.
    pub fn fits(&self, config: &RunConfig) -> bool {
        config.with_settings(&self.settings).is_ok_and(|config| self.check(&config).is_ok())
    }

    /// How what the file predicts differs from what `forecast` says of the run, if it predicts anything and differs: the plan may have been
    /// edited, or made for other settings.
    pub fn outdated(&self, forecast: &Forecast) -> Option<String> {
        let file = self.plan.predicted.as_ref()?;
        let now = |rank: usize| forecast.of_rank(rank).by_category();
        let mut other = (0..forecast.ranks()).filter(|rank| file.of_rank(*rank) != Some(now(*rank)));
        let first = other.next()?;
        let others = match other.count() {
            0 => String::new(),
            others => format!(", and so on {}", human::plural(others, "other rank")),
        };
        let what = match file.of_rank(first) {
            None => "is not foretold".to_owned(),
            Some(memory) => {
                let parts = memory.entries().zip(now(first).entries()).filter(|(file, now)| file != now);
                let part = |((category, file), (_, now)): ((MemoryCategory, usize), (_, usize))| {
                    format!("{} {file} bytes and comes to {now}", category.name())
                };
                format!("is foretold {}", parts.map(part).collect::<Vec<_>>().join(", "))
            }
        };
        let path = self.path.display();
        Some(format!(
            "{path} was edited, or made for other settings: rank {first} {what}{others}; \
             lockstep plan RUN.toml --plan {path} -o {path} predicts anew"
        ))
    }

    /// The same error, as one of this file if all that is wrong are settings of its.
    pub fn blamed(&self, error: Error) -> Error {
        let Error::Configuration(problems) = &error else { return error };
        let is_own = |origin: &Origin| match origin {
            Origin::Argument(text) => self.settings.iter().any(|setting| **setting == **text),
            _ => false,
        };
        if !problems.iter().all(|problem| is_own(&problem.origin)) {
            return error;
        }
        let line = |problem: &Problem| match problem.allowed.as_str() {
            "" => problem.what.clone(),
            allowed => format!("{}: {}; allowed: {allowed}", problem.key, problem.what),
        };
        self.refuse(problems.iter().map(line).collect::<Vec<_>>().join("\n"))
    }

    fn refuse(&self, problems: String) -> Error {
        Error::Plan { path: self.path.clone(), problems }
    }
}

/// What a run says otherwise than its plan file, by keys that were given beside it.
fn differences(file: &Plan, run: &Plan) -> Vec<String> {
    let Degrees { tensor, context, pipeline, shard, .. } = file.mesh;
    // Where there is nothing to split, it does not matter what the plan says of how.
    let is_of_no_effect = |field: &str| match field {
        "model" => file.model.is_empty(),
        // It follows from the plan and from settings that no plan has.
        "predicted" => true,
        "sequence_parallel" | "partition_activations" => {
            tensor == 1 || file.tensor_layout == TensorDimensions::Two
        }
        "tensor_layout" => tensor == 1,
        "tensor_chunks" => tensor == 1 || file.tensor_layout == TensorDimensions::Two,
        "context_method" => context == 1,
        "zero_stage" | "quantize_weights" | "quantize_gradients" => shard * context == 1,
        "quantize_feedback" => file.quantize_gradients.is_none(),
        "sharding" => shard * context == 1 || file.zero_stage == 0,
        "schedule" | "stages" => pipeline == 1,
        _ => false,
    };
    let [file, run] = [file, run].map(|plan| serde_json::to_value(plan).unwrap_or_default());
    let fields = file.as_object().into_iter().flatten();
    fields
        .filter(|(field, value)| !is_of_no_effect(field) && run[*field] != **value)
        .map(|(field, value)| {
            let run = &run[field];
            format!("{field} is {value} in the plan, and the run's keys say {run}: leave one out")
        })
        .collect()
}

/// The rules as TOML, in which a table on one line has the keys and values of JSON.
pub(crate) fn recompute_setting(rules: &RecomputeRules) -> String {
    let layer = |LayerRule { from, to, every, mode }: &LayerRule| {
        let to = to.map_or(String::new(), |to| format!("to = {to}, "));
        format!("{{ from = {from}, {to}every = {every}, mode = {:?} }}", mode.word())
    };
    let layers: Vec<String> = rules.rules().map(layer).collect();
    let default = rules.default_mode().word();
    if layers.is_empty() {
        return format!("parallel.recompute={default}");
    }
    format!("parallel.recompute={{ default = {default:?}, layers = [{}] }}", layers.join(", "))
}

/// The keys of a run that a plan sets.
fn settings_of(plan: &Plan) -> Vec<String> {
    let Degrees { pipeline, replicate, shard, context, tensor, expert, expert_tensor } = plan.mesh;
    let splits_by_choice = tensor > 1 && plan.tensor_layout == TensorDimensions::One;
    let mut settings = vec![
        format!("parallel.data_parallel_replicate={replicate}"),
        format!("parallel.data_parallel_shard={shard}"),
        format!("parallel.expert_parallel={expert}"),
        format!("parallel.expert_tensor_parallel={expert_tensor}"),
        format!("parallel.tensor_parallel={tensor}"),
        // Without tensor ranks it is of no effect, or with a square of them, which a plan may say and keys may not.
        format!("parallel.sequence_parallel={}", plan.sequence_parallel && splits_by_choice),
        format!("parallel.context_parallel={context}"),
        recompute_setting(&plan.recompute),
        format!("train.micro_batch={}", plan.micro_batch),
        format!("parallel.pipeline_parallel={pipeline}"),
    ];
    // As sequence parallelism.
    if let Some(chunks) =
        plan.tensor_chunks.filter(|_| tensor > 1 && plan.tensor_layout == TensorDimensions::One)
    {
        settings.push(format!("parallel.tensor_chunks={chunks}"));
    }
    if plan.partition_activations && splits_by_choice {
        settings.push("parallel.partition_activations=true".to_owned());
    }
    if shard * context > 1 {
        settings.push(format!("parallel.zero_stage={}", plan.zero_stage));
        let kinds = [("weights", plan.quantize_weights), ("gradients", plan.quantize_gradients)];
        for (what, kind) in kinds {
            settings.extend(kind.map(|kind| format!("parallel.quantize_{what}={kind}")));
        }
        if plan.quantize_gradients.is_some() {
            let is_kept = plan.quantize_feedback == Feedback::Kept;
            settings.push(format!("parallel.quantize_feedback={is_kept}"));
        }
        if plan.zero_stage > 0 {
            settings.push(format!("parallel.wrap={}", plan.sharding.wrap));
        }
        if plan.zero_stage >= 3 {
            settings.extend(settings_of_gathering(&plan.sharding));
        }
    }
    if tensor > 1 {
        settings.push(format!("parallel.tensor_layout={}", TensorLayout::from(plan.tensor_layout).word()));
    }
    if context > 1 {
        let method = ContextMethod::from(plan.context_method);
        settings.push(format!("parallel.context_parallel_method={}", method.word()));
    }
    if pipeline > 1 {
        match &plan.schedule {
            PipelineSchedule::Published { kind, chunks } => {
                settings.push(format!("parallel.pipeline_schedule={}", kind.name()));
                settings.push(format!("parallel.virtual_stages={chunks}"));
            }
            PipelineSchedule::Rows(rows) => {
                let rows: String = rows.iter().map(|row| format!("{row}\n")).collect();
                settings.push(format!("parallel.pipeline_schedule={rows:?}"));
            }
        }
        settings.push(format!("parallel.pipeline_stages={:?}", plan.stages));
    }
    settings.extend(settings_of_residence(&plan.residence));
    if plan.bucket_mb != DEFAULT_BUCKET_MB {
        settings.push(format!("parallel.bucket_mb={:?}", plan.bucket_mb));
    }
    settings
}

fn settings_of_residence(residence: &Residences) -> Vec<String> {
    let Residences { optimizer, gradients, parameters, activations, fraction } = *residence;
    let kinds = [
        ("optimizer", optimizer),
        ("gradients", gradients),
        ("parameters", parameters),
        ("activations", activations),
    ];
    let offloaded = kinds.into_iter().filter(|(_, residence)| *residence != Residence::Memory);
    let setting = |(what, residence)| {
        format!("parallel.offload.{what}={}", crate::config::Residence::from(residence).word())
    };
    let mut settings: Vec<String> = offloaded.map(setting).collect();
    if fraction != Residences::default().fraction {
        settings.push(format!("parallel.offload.fraction={fraction:?}"));
    }
    settings
}

fn settings_of_gathering(sharding: &Sharding) -> Vec<String> {
    let Sharding { reshard_after_forward, max_live_parameters, secondary_shard, .. } = sharding;
    let reshard = ReshardAfterForward::from(*reshard_after_forward).word();
    let mut settings = vec![format!("parallel.reshard_after_forward={reshard}")];
    settings.extend(max_live_parameters.map(|most| format!("parallel.max_live_parameters={most}")));
    settings.extend(secondary_shard.map(|neighbours| format!("parallel.secondary_shard={neighbours}")));
    settings
}

#[cfg(test)]
mod tests {
    use lockstep_plan::schedule::Kind;
    use lockstep_plan::{PLAN_VERSION, Wrap};

    use super::*;

    fn plan() -> Plan {
        Plan {
            version: PLAN_VERSION,
            model: String::new(),
            mesh: Degrees { pipeline: 2, replicate: 2, context: 2, tensor: 2, ..Degrees::default() },
            micro_batch: 2,
            schedule: PipelineSchedule::Published { kind: Kind::ZeroBubbleV, chunks: 2 },
            stages: vec![2, 2, 1, 3],
            recompute: lockstep_plan::Recompute::Full.into(),
            partition_activations: false,
            sequence_parallel: true,
            tensor_layout: TensorDimensions::One,
            tensor_chunks: Some(3),
            context_method: lockstep_plan::ContextMethod::AllToAll,
            zero_stage: 0,
            quantize_weights: None,
            quantize_gradients: None,
            quantize_feedback: lockstep_plan::Feedback::Kept,
            sharding: Sharding::default(),
            residence: Residences::default(),
            bucket_mb: DEFAULT_BUCKET_MB,
            predicted: None,
        }
    }

    /// The plan of a run with the keys of `file`, for a model of as many units.
    fn run_of(file: &Plan, more: &[&str]) -> Plan {
        let mut settings = settings_of(file);
        let layers = file.stages.iter().sum::<usize>() - 2;
        settings.extend(["model.preset=baby-gpt".to_owned(), "model.n_head=8".to_owned()]);
        settings.extend([format!("model.n_layer={layers}")]);
        settings.extend(["train.global_batch=16".to_owned(), "data.train=[\"a.txt\"]".to_owned()]);
        settings.extend(more.iter().map(ToString::to_string));
        let config =
            RunConfig::parse("", "RUN.toml", &settings).unwrap_or_else(|problems| panic!("{problems}"));
        crate::plan::check(&config).unwrap_or_else(|error| panic!("{error}")).0
    }

    #[test]
    fn keys_say_what_a_plan_says() {
        let rows = PipelineSchedule::Rows(vec![
            "F0,F1,F2,F3,B0,B1,B2,B3".to_owned(),
            "F0,F1,F2,F3,B0,B1,B2,B3".to_owned(),
        ]);
        let by_rows = Plan { schedule: rows, stages: vec![1, 5], ..plan() };
        let (reshard_after_forward, max_live_parameters) =
            (lockstep_plan::gathering::ReshardAfterForward::Always, Some(1_000_000));
        let wrap = Wrap::Named(vec!["model.layers.*".to_owned(), "lm_head.*".to_owned()]);
        let sharding =
            Sharding { reshard_after_forward, max_live_parameters, secondary_shard: Some(2), wrap };
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
            let run = run_of(&file, &[]);
            assert_eq!(Plan { model: String::new(), ..run }, file);
        }
    }

    #[test]
    fn a_square_of_ranks_is_one_of_the_keys_and_splits_by_tokens_whatever_the_plan_says() {
        let mesh = Degrees { replicate: 2, tensor: 4, ..Degrees::default() };
        let tensor_layout = TensorDimensions::Two;
        let file =
            Plan { mesh, stages: vec![8], schedule: PipelineSchedule::default(), tensor_layout, ..plan() };
        let run = run_of(&file, &[]);
        assert_eq!(run.tensor_layout, TensorDimensions::Two);
        assert_eq!(differences(&file, &run), Vec::<String>::new());
        let run = run_of(&file, &["parallel.tensor_layout=1d"]);
        let lines = differences(&file, &run);
        assert!(
            lines.len() == 1
                && lines[0].starts_with("tensor_layout is \"2d\" in the plan, and the run's keys say \"1d\""),
            "{lines:?}"
        );
    }

    #[test]
    fn keys_beside_a_plan_that_say_something_else_are_told() {
        let run = run_of(&plan(), &["parallel.recompute=none", "parallel.pipeline_stages=[2, 2, 2, 2]"]);
        let lines = differences(&plan(), &run);
        assert!(lines.len() == 2 && lines[0].contains("recompute is \"full\" in the plan"), "{lines:?}");
        assert!(lines[1].contains("stages is [2,2,1,3]"), "{lines:?}");
    }

    #[test]
    fn experts_are_shared_out_as_a_plan_says() {
        let mesh = Degrees { shard: 2, tensor: 2, expert: 2, expert_tensor: 2, ..Degrees::default() };
        let settings = settings_of(&Plan { mesh, stages: vec![8], ..plan() });
        let config = RunConfig::parse("", "RUN.toml", &settings).unwrap();
        assert_eq!(config.degrees(), mesh);
    }
}
