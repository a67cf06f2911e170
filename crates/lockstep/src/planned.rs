//! What `plan`, `train` and `verify` have in common: a run, with what settings and a plan file change in it.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use lockstep_train::PlanFile;

use crate::exit::Failure;

/// A run, as it is given on the command line.
#[derive(Debug, Args)]
pub(crate) struct PlannedRun {
    /// The run's configuration; see docs/configuration.md
    #[arg(value_name = "RUN.toml", value_hint = ValueHint::FilePath)]
    pub(crate) run: Option<PathBuf>,
    /// Set a value of the configuration, e.g. --set train.steps=200 --set parallel.zero_stage=3
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) settings: Vec<String>,
    /// A plan file, which says what the keys of parallel and train.micro_batch would
    #[arg(long, value_name = "PLAN.json", value_hint = ValueHint::FilePath)]
    plan: Option<PathBuf>,
}

impl PlannedRun {
    /// The plan file, if there is one.
    pub(crate) fn plan(&self) -> Result<Option<PlanFile>, Failure> {
        Ok(self.plan.as_deref().map(PlanFile::read).transpose()?)
    }

    /// What the plan sets, and after it, so that it wins, what the user does.
    pub(crate) fn settings_with(&self, plan: Option<&PlanFile>) -> Vec<String> {
        let of_plan = plan.map_or(&[][..], PlanFile::settings);
        [of_plan, &self.settings].concat()
    }
}
