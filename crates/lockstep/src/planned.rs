//! What `plan`, `train` and `verify` have in common: a run, with what settings and a plan file change in it.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use lockstep_comm::is_launched;
use lockstep_config::PlanFile;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::exit::Failure;

/// The variable by which a launcher tells its ranks of the plan that it hands over: a descriptor, and what messages call the plan.
const HANDED_VARIABLE: &str = "LOCKSTEP_HANDED_PLAN";

/// A plan in an unnamed file, which all processes inherit that are started as long as it is there.
#[derive(Debug)]
pub(crate) struct HandedPlan {
    file: File,
    name: String,
}

impl HandedPlan {
    /// # Errors
    /// What the system says.
    pub(crate) fn new(plan: &PlanFile) -> io::Result<Self> {
        // Without `CLOEXEC`, so that it is inherited.
        let mut file = File::from(memfd_create("lockstep-plan", MemfdFlags::empty())?);
        file.write_all(plan.plan().to_json().map_err(io::Error::other)?.as_bytes())?;
        Ok(Self { file, name: plan.name().to_owned() })
    }

    /// The variable that tells a rank of it.
    pub(crate) fn variable(&self) -> (OsString, OsString) {
        (HANDED_VARIABLE.into(), format!("{} {}", self.file.as_raw_fd(), self.name).into())
    }
}

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
    /// The plan: of a rank the one that its launcher has handed over, else that of the file, if there is one.
    pub(crate) fn plan(&self) -> Result<Option<PlanFile>, Failure> {
        let handed = std::env::var(HANDED_VARIABLE).ok().filter(|_| is_launched());
        if let Some((descriptor, name)) = handed.as_deref().and_then(|handed| handed.split_once(' ')) {
            return Ok(Some(PlanFile::read_as(&Path::new("/proc/self/fd").join(descriptor), name)?));
        }
        Ok(self.plan.as_deref().map(PlanFile::read).transpose()?)
    }
}
