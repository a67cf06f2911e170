//! The run that a command line describes: RUN.toml, the run of a checkpoint or the demonstration. A DeepSpeed file, a plan,
//! `--set` and the number of ranks change it, each overriding the one before.

use std::path::Path;

use lockstep_checkpoint::{Checkpoint, find};
use lockstep_config::{Imported, Origin, PlanFile, Resume, RunConfig, Transport, human};
use lockstep_import::{AutoValues, Format, Import, Options};
use lockstep_planner::{Choice, Evaluated, Reason, choose};
use lockstep_train::Error;

use super::arguments::Arguments;
use crate::exit::{CORRUPT_INPUT, Failure};
use crate::import;
use crate::launching::Launching;
use crate::ranks::blamed;
use crate::verify::plan_in_words;

/// The built-in demonstration, which `lockstep train` runs without a file.
pub(super) const DEMONSTRATION: &str = include_str!("demonstration.toml");
/// The key that `--nproc-per-node` sets.
const REPLICAS: &str = "parallel.data_parallel_replicate";

/// The run as described by the command line, its files and the launcher.
pub(super) struct Request<'a> {
    pub(super) arguments: &'a Arguments,
    pub(super) launching: &'a Launching,
    /// Checkpoint to resume from, resolved if `--resume` names a directory of several.
    pub(super) resume: Resume,
    /// Number of ranks that another launcher has started.
    pub(super) started: Option<usize>,
    /// The imported DeepSpeed file.
    pub(super) import: Option<Import>,
}

impl<'a> Request<'a> {
    /// Finds the checkpoint and imports the DeepSpeed file of the command line.
    pub(super) fn new(
        arguments: &'a Arguments,
        launching: &'a Launching,
        started: Option<usize>,
    ) -> Result<Self, Failure> {
        let resume = match arguments.resume.as_str() {
            "auto" => Resume::Auto,
            "never" => Resume::Never,
            path => Resume::From(found_checkpoint(Path::new(path))?),
        };
        let mut request = Self { arguments, launching, resume, started, import: None };
        request.import = request.imported()?;
        Ok(request)
    }

    /// Imports the DeepSpeed file of the command line.
    fn imported(&self) -> Result<Option<Import>, Failure> {
        let Some(path) = &self.arguments.deepspeed else { return Ok(None) };
        if self.resumed_run().is_some() {
            let message = "--deepspeed goes with a RUN.toml; the checkpoint that --resume names has its own configuration";
            return Err(Failure::configuration(message));
        }
        let ranks = match self.started.or(self.launching.ranks) {
            Some(ranks) => ranks,
            None => self.load(None, &self.settings())?.ranks(),
        };
        let options = Options { ranks: Some(ranks), auto: AutoValues::OfTheRun };
        import::read(Format::DeepSpeed, path, options).map(Some)
    }

    /// Returns the checkpoint whose own run continues, if `--resume` names one and there is no RUN.toml.
    fn resumed_run(&self) -> Option<&Path> {
        match (&self.arguments.planned.run, &self.resume) {
            (None, Resume::From(checkpoint)) => Some(checkpoint),
            _ => None,
        }
    }

    /// Returns true if this is the built-in demonstration.
    pub(super) fn is_demonstration(&self) -> bool {
        self.arguments.planned.run.is_none() && self.resumed_run().is_none()
    }

    /// Returns the user's settings.
    fn settings(&self) -> Vec<String> {
        let mut settings = self.arguments.planned.settings.clone();
        settings.extend(self.arguments.steps.map(|steps| format!("train.steps={steps}")));
        settings
    }

    /// Loads the run with an optional plan and additional settings.
    fn load(&self, plan: Option<&PlanFile>, settings: &[String]) -> Result<RunConfig, Error> {
        let imported: Vec<Imported> = self.import.as_ref().map_or(Vec::new(), import::values);
        match (&self.arguments.planned.run, self.resumed_run()) {
            (Some(path), _) => Ok(RunConfig::load_with(Some(path), &imported, plan, settings)?),
            (None, Some(checkpoint)) => run_of_checkpoint(checkpoint, plan, settings),
            (None, None) => {
                let text = demonstration(settings);
                let config =
                    RunConfig::parse_with(text, "the built-in demonstration", &imported, plan, settings)?;
                Ok(config.with_found_model()?)
            }
        }
    }

    /// Returns the configuration of the run. Unless it sets the number of replicas, that follows from the ranks that are started
    /// or from `--nproc-per-node`.
    pub(super) fn configuration(&self, plan: Option<&PlanFile>) -> Result<RunConfig, Failure> {
        let mut settings = self.settings();
        let config = self.load(plan, &settings).map_err(|error| blamed(plan, error))?;
        let Some(ranks) = self.started.or(self.launching.ranks) else { return Ok(config) };
        let found = config.ranks();
        // The number of ranks in a checkpoint is overridden as well.
        let gives_way = self.resumed_run().is_some() && found != ranks;
        if config.origin(REPLICAS) == Origin::Default || gives_way {
            settings.push(config.setting_for_ranks(ranks)?);
            return Ok(self.load(plan, &settings)?);
        }
        if found != ranks && self.started.is_none() && !self.arguments.nodes.are_several(self.launching) {
            let message = match config.ranks_of_a_replica() {
                1 => format!("--nproc-per-node is {ranks}, and {REPLICAS} is {found}: leave one of them out"),
                _ => format!(
                    "--nproc-per-node is {ranks}, and [parallel] is for {found} ranks: leave one of them out"
                ),
            };
            return Err(Failure::configuration(message));
        }
        Ok(config)
    }

    /// Chooses a plan for a run on this machine whose configuration does not say how to split it; returns the plan and the
    /// reason. `None` if the configuration says it, or if no plan fits, which is reported later.
    pub(super) fn choice(&self) -> Result<Option<(PlanFile, String)>, Failure> {
        let config = self.load(None, &self.settings())?;
        if config.says_how_to_split() || config.parallel.transport == Transport::Mpi {
            return Ok(None);
        }
        let Some(Choice { plan, reason }) = choose(&config, &self.resume, self.launching.ranks)? else {
            return Ok(None);
        };
        let words = match reason {
            Reason::Checkpoint(path) => {
                let planned = config.with_plan(&plan).map_err(Error::from)?;
                format!("plan\t{}, as {}", plan_in_words(&planned), path.display())
            }
            Reason::Search { chosen, rival, by_node, candidates, ms, doubt } => {
                let words = in_words(&chosen, rival.as_deref(), doubt.as_deref(), &searched(candidates, ms));
                let nodes = |nodes| format!("\n\ta rank for each of {nodes} memory nodes (NUMA)");
                words + &by_node.map(nodes).unwrap_or_default()
            }
        };
        Ok(Some((plan, words)))
    }
}

/// Returns the demonstration; without its model section if the settings name another model.
fn demonstration(settings: &[String]) -> &'static str {
    let names_model = |setting: &String| {
        ["model.preset=", "model.path=", "model.model_type="]
            .iter()
            .any(|key| setting.trim_start().starts_with(key))
    };
    let rest = DEMONSTRATION.find("[train]").filter(|_| settings.iter().any(names_model));
    &DEMONSTRATION[rest.unwrap_or(0)..]
}

/// Describes the number of compared plans and the time that it took.
fn searched(candidates: usize, ms: f64) -> String {
    format!("{}, compared in {}", human::plural(candidates, "plan"), human::milliseconds(ms))
}

/// Describes the reasons for the chosen plan, in lines of a label, a tab and a text.
fn in_words(chosen: &Evaluated, rival: Option<&Evaluated>, doubt: Option<&str>, searched: &str) -> String {
    let words = |found: &Evaluated| {
        let sequences = human::plural(found.config.micro_batch(), "sequence");
        format!("{}, micro-batches of {sequences}", plan_in_words(&found.config))
    };
    let step_ms = chosen.step.step_ms;
    let source = if doubt.is_some() { "guessed" } else { "predicted from measurements of this machine" };
    let mut lines = format!(
        "plan\t{}: {} a step, {source}\n\tfastest of {searched}",
        words(chosen),
        human::milliseconds(step_ms)
    );
    if let Some(rival) = rival {
        let off = 100.0 * (rival.step.step_ms / step_ms - 1.0);
        let than = if off < 0.0 { "faster, but less simple" } else { "slower" };
        lines += &format!("; next best, {:.1} % {than}: {}", off.abs(), words(rival));
    }
    if let Some(doubt) = doubt {
        lines += &format!("\n\t{doubt}");
    }
    lines
}

/// Returns the checkpoint that `--resume` names; of a directory of checkpoints the newest intact one.
fn found_checkpoint(path: &Path) -> Result<std::path::PathBuf, Failure> {
    let error = match find(path).and_then(|found| Checkpoint::open(&found).map(|_| found)) {
        Ok(found) => return Ok(found),
        Err(error) => error,
    };
    let is_nothing = !path.join("manifest.json").exists()
        && lockstep_checkpoint::list(path).is_ok_and(|checkpoints| checkpoints.is_empty());
    let failure = Failure::from(error);
    let shown = path.display();
    let message = match failure.code {
        _ if path.extension().is_some_and(|extension| extension == "toml") => {
            format!(
                "--resume {shown}: that is no checkpoint; write `lockstep train {shown}`, which goes on from the newest one"
            )
        }
        _ if is_nothing || !path.is_dir() => format!(
            "--resume {shown}: no checkpoint is there; lockstep checkpoint list DIR lists those of a run, auto takes the newest one, \
             never begins anew"
        ),
        CORRUPT_INPUT => failure.message + "; --resume auto takes the newest checkpoint that is whole",
        _ => failure.message,
    };
    Err(Failure { message, ..failure })
}

/// Returns the configuration of the run that wrote a checkpoint, with an optional plan and additional settings.
fn run_of_checkpoint(path: &Path, plan: Option<&PlanFile>, settings: &[String]) -> Result<RunConfig, Error> {
    let checkpoint = Checkpoint::open(path)?;
    let Some(run) = checkpoint.manifest().config.get("run") else {
        return Err(Error::NoRunToResume { path: path.to_owned() });
    };
    Ok(RunConfig::stored(run, &path.display().to_string())?.with_changes(plan, settings)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demonstration_can_be_as_short_as_one_likes() {
        for setting in ["train.steps=1", "train.steps=20", "train.steps=5000"] {
            RunConfig::parse(DEMONSTRATION, "the built-in demonstration", &[setting]).unwrap();
        }
    }

    #[test]
    fn the_demonstration_of_another_model_has_that_models_sizes() {
        let settings = ["model.preset=baby-gpt".to_owned()];
        let config =
            RunConfig::parse(demonstration(&settings), "the built-in demonstration", &settings).unwrap();
        assert!(config.model.overrides.is_empty() && config.train.steps == 800, "{config:?}");
        assert_eq!(demonstration(&["train.steps=3".to_owned()]), DEMONSTRATION);
    }
}
