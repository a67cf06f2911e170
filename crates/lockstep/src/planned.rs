//! Arguments shared by `plan`, `train` and `verify`: a run, and the settings and the plan file that change it.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use lockstep_config::PlanFile;
use lockstep_launch::is_launched;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::exit::Failure;

/// Variable by which a launcher hands its plan to its ranks: a file descriptor and the plan's name for messages.
const HANDED_VARIABLE: &str = "LOCKSTEP_HANDED_PLAN";

/// A plan in a memfd, inherited by all processes that are started while it is open.
#[derive(Debug)]
pub(crate) struct HandedPlan {
    file: File,
    name: String,
}

impl HandedPlan {
    /// Writes the plan to a memfd.
    ///
    /// # Errors
    /// If the system refuses the memfd.
    pub(crate) fn new(plan: &PlanFile) -> io::Result<Self> {
        // Without `CLOEXEC`, so that it is inherited.
        let mut file = File::from(memfd_create("lockstep-plan", MemfdFlags::empty())?);
        file.write_all(plan.plan().to_json().map_err(io::Error::other)?.as_bytes())?;
        Ok(Self { file, name: plan.name().to_owned() })
    }

    /// Returns the variable for the ranks.
    pub(crate) fn variable(&self) -> (OsString, OsString) {
        (HANDED_VARIABLE.into(), format!("{} {}", self.file.as_raw_fd(), self.name).into())
    }
}

/// The run as given on the command line.
#[derive(Debug, Args)]
pub(crate) struct PlannedRun {
    /// The run's configuration; see docs/configuration.md
    #[arg(value_name = "RUN.toml", value_hint = ValueHint::FilePath)]
    pub(crate) run: Option<PathBuf>,
    /// Set a value of the configuration, e.g. --set train.steps=200 --set parallel.zero_stage=3
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) settings: Vec<String>,
    /// A plan file, which replaces the keys of parallel and train.micro_batch
    #[arg(long, value_name = "PLAN.json", value_hint = ValueHint::FilePath)]
    plan: Option<PathBuf>,
}

impl PlannedRun {
    /// Returns the plan: in a rank the one that its launcher has handed over, else that of the file, if there is one.
    pub(crate) fn plan(&self) -> Result<Option<PlanFile>, Failure> {
        let handed = std::env::var(HANDED_VARIABLE).ok().filter(|_| is_launched());
        if let Some((descriptor, name)) = handed.as_deref().and_then(|handed| handed.split_once(' ')) {
            return Ok(Some(PlanFile::read_as(&Path::new("/proc/self/fd").join(descriptor), name)?));
        }
        Ok(self.plan.as_deref().map(PlanFile::read).transpose()?)
    }
}
