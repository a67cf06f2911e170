//! Command line of `lockstep plan`: its flags, the settings of the run that they make, the machines that they name, and the files
//! that they ask for.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum, ValueHint};
use lockstep_checkpoint::MANIFEST_FILE;
use lockstep_config::{NamedModel, RunConfig, find_local_model, find_model};
use lockstep_plan::Plan;
use lockstep_planner::cluster::Cluster;
use lockstep_planner::machine::{self, LocalMachine};
use lockstep_planner::{Details, Evaluated, Page, Planner};
use lockstep_train::Error;
use serde_json::Value;

use super::inference::InferenceArguments;
use super::{counts, progress, training};
use crate::collectives::bytes;
use crate::exit::Failure;
use crate::planned::PlannedRun;

/// Find the best plan for a run on some machines; or, where the parallel section has degrees or a plan file is given, predict that
/// plan.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(super) planned: PlannedRun,
    #[command(flatten)]
    pub(super) counts: counts::Counts,
    #[command(flatten)]
    pub(super) inference: InferenceArguments,
    /// A model: a preset, such as llama3-8b, a directory with a config.json, a checkpoint, or a repository of Hugging Face (org/name)
    #[arg(long, value_name = "MODEL")]
    pub(super) model: Option<String>,
    /// The machines: a preset with a number of nodes, such as dgx-h100x96, or a file; see docs/clusters.md [default: this machine]
    #[arg(long, value_name = "PRESET|FILE")]
    pub(super) cluster: Option<String>,
    /// Tokens of a sequence
    #[arg(long, value_name = "S")]
    pub(super) seq_len: Option<usize>,
    /// Sequences of a step, on all ranks together
    #[arg(long, value_name = "B")]
    pub(super) global_batch: Option<usize>,
    /// Precision of the training [default: on accelerators bf16, f16 before Ampere; on CPUs f32]
    #[arg(long, value_name = "f32|bf16|f16")]
    pub(super) precision: Option<String>,
    /// Tokens of a whole training run, such as 300B or 1T: adds its duration and its price
    #[arg(long, value_name = "TOKENS", value_parser = training::tokens)]
    pub(super) tokens: Option<f64>,
    /// Add a table of other numbers of nodes, with the same batch (strong scaling) and with one that grows with them (weak
    /// scaling); without numbers powers of two
    #[arg(long, value_name = "NODES", num_args = 0..=1, require_equals = true, value_delimiter = ',')]
    pub(super) scaling: Option<Vec<NonZeroUsize>>,
    /// Time after which the search ends with the best plan so far, and with a bound on how much better another could be
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = progress::duration)]
    pub(super) limit: Duration,
    /// Number of plans to show
    #[arg(long, value_name = "K", default_value_t = 3)]
    pub(super) top: usize,
    /// The figure by which plans are ranked
    #[arg(long, value_enum, default_value_t = Objective::Time)]
    pub(super) objective: Objective,
    /// Memory of each machine for its ranks, e.g. 24GiB [default: what this machine has left, or what the cluster says]
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub(super) memory: Option<usize>,
    /// Ranks on each machine [default: one for each device; of a given plan, all]
    #[arg(long, value_name = "N", alias = "nproc_per_node")]
    pub(super) nproc_per_node: Option<usize>,
    /// Explain the answer: step times and shortages of the best plan's neighbours, and the changes that would help most; for a
    /// given plan, the composition of each rank's memory
    #[arg(long)]
    pub(super) explain: bool,
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
    /// Write the best plan with its prediction, for train --plan
    #[arg(short, long, value_name = "PLAN.json", value_hint = ValueHint::FilePath)]
    pub(super) output: Option<PathBuf>,
    /// Calibrate the machine by a finished run, given by the directory of its records; several times for several runs. The
    /// calibrated machine is written to the cluster file, or to --output
    #[arg(long, value_name = "RUN_DIR", value_hint = ValueHint::DirPath,
        conflicts_with_all = ["run", "settings", "plan", "model", "seq_len", "global_batch", "explain", "html"])]
    pub(super) calibrate: Vec<PathBuf>,
    /// Write one HTML page with the mesh on the machines, the timeline of the step, memory, the roofline and the ranking
    #[arg(long, value_name = "REPORT.html", value_hint = ValueHint::FilePath)]
    pub(super) html: Option<PathBuf>,
}

/// The figure by which plans are ranked.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum Objective {
    /// The least time of a step
    Time,
    /// The least price of a token, with as many of the nodes as pay
    Cost,
    /// The most memory left
    Headroom,
}

impl From<Objective> for lockstep_planner::Objective {
    fn from(objective: Objective) -> Self {
        match objective {
            Objective::Time => Self::Time,
            Objective::Cost => Self::Cost,
            Objective::Headroom => Self::Headroom,
        }
    }
}

impl Arguments {
    /// Returns the keys of the run that the arguments set.
    ///
    /// # Errors
    /// If no model has the given name.
    pub(super) fn settings(&self) -> Result<Vec<String>, Failure> {
        let mut settings = Vec::new();
        if let Some(model) = &self.model {
            settings.push(find_model(model)?.setting());
        }
        settings.extend(self.seq_len.map(|tokens| format!("train.seq_len={tokens}")));
        settings.extend(self.global_batch.map(|sequences| format!("train.global_batch={sequences}")));
        settings.extend(self.precision.as_ref().map(|precision| format!("train.precision={precision}")));
        Ok(settings)
    }

    /// Returns the failure of a run that cannot be loaded; if its path names a model, with the flag for models.
    pub(super) fn not_loaded(error: Error) -> Failure {
        let name = match &error {
            Error::Config(lockstep_config::Error::ReadConfiguration { path, .. }) => {
                path.display().to_string()
            }
            _ => return error.into(),
        };
        let is_model = match find_local_model(&name) {
            Ok(NamedModel::Preset(_)) => true,
            Ok(NamedModel::Directory(path)) => {
                path.join("config.json").is_file() || path.join(MANIFEST_FILE).is_file()
            }
            Err(_) => false,
        };
        if !is_model {
            return error.into();
        }
        let failure = Failure::from(error);
        let message = format!(
            "{}; {name} is a model: write `lockstep plan --model {}`",
            failure.message,
            shell_word(&name)
        );
        Failure { message, ..failure }
    }

    /// Returns the ranks that become shards if `parallel.zero_stage` leaves them open: those that are asked for, else the devices
    /// of a named cluster.
    pub(super) fn open_ranks(&self, config: &RunConfig) -> Result<Option<usize>, Failure> {
        if !config.leaves_shards_open() {
            return Ok(None);
        }
        let devices = || self.cluster.as_ref().map(|name| machine::cluster(name)).transpose();
        Ok(match self.nproc_per_node {
            Some(ranks) => Some(ranks),
            None => devices()?.map(|cluster| cluster.devices()),
        })
    }

    /// Returns the machines, and the reason if they have default rates. Without `--cluster` it is this machine for at least `ranks`
    /// ranks, each with an equal share of the cores or with `train.threads` of them.
    pub(super) fn cluster(
        &self,
        config: &RunConfig,
        ranks: usize,
    ) -> Result<(Cluster, Option<String>), Failure> {
        let (mut cluster, doubt) = match &self.cluster {
            Some(name) => (machine::cluster(name)?, None),
            None => {
                let threads = config.train.threads;
                let ranks = ranks.max(self.nproc_per_node.unwrap_or(1));
                let LocalMachine { cluster, doubt } =
                    LocalMachine::for_ranks(ranks, threads).with_disk_of(config);
                (cluster, doubt)
            }
        };
        if let Some(bytes) = self.memory {
            for node in &mut cluster.nodes {
                node.host_memory_bytes = bytes as u64;
                if !node.device.is_host {
                    node.device.memory_bytes = bytes as u64 / node.devices.max(1) as u64;
                }
            }
        }
        Ok((cluster, doubt))
    }

    pub(super) fn write_plan(&self, plan: &Plan) -> Result<(), Failure> {
        let Some(path) = &self.output else { return Ok(()) };
        let text = plan.to_json().map_err(|error| Failure::configuration(error.to_string()))?;
        write(path, &text)
    }

    /// Returns true if any output shows the parts of the step.
    pub(super) fn wants_details(&self) -> bool {
        self.json || self.explain || self.html.is_some()
    }

    /// Writes the HTML page, if one is asked for, with the command that made it.
    pub(super) fn write_page(
        &self,
        planner: &Planner,
        ranking: &[&Evaluated],
        details: &Details,
        document: &Value,
    ) -> Result<(), Failure> {
        let Some(path) = &self.html else { return Ok(()) };
        let words: Vec<String> =
            std::env::args_os().skip(1).map(|argument| shell_word(&argument.to_string_lossy())).collect();
        let command = format!("lockstep {}", words.join(" "));
        write(path, &Page { ranking, details, document, command: &command }.html(planner))
    }
}

/// Quotes an argument if a shell would split it.
pub(super) fn shell_word(word: &str) -> String {
    if word.contains([' ', '"', '[', '{', '*', '$']) { format!("'{word}'") } else { word.to_owned() }
}

/// Parses a memory size: a number with a unit. A bare number below 1 MiB is an error, since its unit is missing.
fn memory(text: &str) -> Result<usize, String> {
    let bytes = bytes(text)?;
    let has_unit = !text.bytes().all(|byte| byte.is_ascii_digit());
    if has_unit || bytes >= 1 << 20 { Ok(bytes) } else { Err(format!("{text} bytes; write {text}GB")) }
}

pub(super) fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let refuse = |error| Failure::configuration(format!("cannot write {}: {error}", path.display()));
    std::fs::write(path, text).map_err(refuse)
}
