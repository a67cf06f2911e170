//! `lockstep plan`: finds the best plan for a model on some machines, or predicts a given plan before any machine runs it.

mod calibrated;
mod counts;
mod details;
mod foretold;
mod found;
mod scaling;
mod searching;
mod training;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum, ValueHint};
use lockstep_checkpoint::MANIFEST_FILE;
use lockstep_config::{NamedModel, RunConfig, find_model};
use lockstep_plan::Plan;
use lockstep_planner::cluster::Cluster;
use lockstep_planner::machine::{self, LocalMachine};
use lockstep_planner::{self, Assumption, Evaluated, Page, Planner, assumptions};
use lockstep_train::Error;
use serde_json::{Value, json};

use crate::collectives::bytes;
use crate::exit::Failure;
use crate::output::{note, say};
use crate::planned::PlannedRun;
use crate::ranks::blamed;

/// Find the best plan for a run on some machines; or, where the parallel section has degrees or a plan file is given, predict that
/// plan.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    planned: PlannedRun,
    #[command(flatten)]
    counts: counts::Counts,
    /// A model: a preset, such as llama3-8b, a directory with a config.json, a checkpoint, or a repository in the cache of Hugging Face
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// The machines: a preset with a number of nodes, such as dgx-h100x96, or a file; see docs/clusters.md [default: this machine]
    #[arg(long, value_name = "PRESET|FILE")]
    cluster: Option<String>,
    /// Tokens of a sequence
    #[arg(long, value_name = "S")]
    seq_len: Option<usize>,
    /// Sequences of a step, on all ranks together
    #[arg(long, value_name = "B")]
    global_batch: Option<usize>,
    /// Precision of the training [default: on accelerators bf16, f16 before Ampere; on CPUs f32]
    #[arg(long, value_name = "f32|bf16|f16")]
    precision: Option<String>,
    /// Tokens of a whole training run, such as 300B or 1T: adds its duration and its price
    #[arg(long, value_name = "TOKENS", value_parser = training::tokens)]
    tokens: Option<f64>,
    /// Add a table of other numbers of nodes, with the same batch (strong scaling) and with one that grows with them (weak
    /// scaling); without numbers powers of two
    #[arg(long, value_name = "NODES", num_args = 0..=1, require_equals = true, value_delimiter = ',')]
    scaling: Option<Vec<NonZeroUsize>>,
    /// Time after which the search ends with the best plan so far, and with a bound on how much better another could be
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = searching::duration)]
    limit: Duration,
    /// Number of plans to show
    #[arg(long, value_name = "K", default_value_t = 3)]
    top: usize,
    /// The figure by which plans are ranked
    #[arg(long, value_enum, default_value_t = Objective::Time)]
    objective: Objective,
    /// Memory of each machine for its ranks, e.g. 24GiB [default: what this machine has left, or what the cluster says]
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory: Option<usize>,
    /// Ranks on each machine [default: one for each device; of a given plan, all]
    #[arg(long, value_name = "N", alias = "nproc_per_node")]
    nproc_per_node: Option<usize>,
    /// Explain the answer: step times and shortages of the best plan's neighbours, and the changes that would help most; for a
    /// given plan, the composition of each rank's memory
    #[arg(long)]
    explain: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// Write the best plan with its prediction, for train --plan
    #[arg(short, long, value_name = "PLAN.json", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
    /// Calibrate the machine by a finished run, given by the directory of its records; several times for several runs. The
    /// calibrated machine is written to the cluster file, or to --output
    #[arg(long, value_name = "RUN_DIR", value_hint = ValueHint::DirPath,
        conflicts_with_all = ["run", "settings", "plan", "model", "seq_len", "global_batch", "explain", "html"])]
    calibrate: Vec<PathBuf>,
    /// Write one HTML page with the mesh on the machines, the timeline of the step, memory, the roofline and the ranking
    #[arg(long, value_name = "REPORT.html", value_hint = ValueHint::FilePath)]
    html: Option<PathBuf>,
}

/// The figure by which plans are ranked.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Objective {
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

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    arguments.counts.refuse(arguments.cluster.as_deref())?;
    if !arguments.calibrate.is_empty() {
        calibrated::run(arguments)?;
        return Ok(ExitCode::SUCCESS);
    }
    let file = arguments.planned.plan()?;
    let settings = [arguments.settings()?, arguments.planned.settings.clone()].concat();
    let load = |settings: &[String]| {
        RunConfig::load_to_plan(arguments.planned.run.as_deref(), file.as_ref(), settings)
    };
    let config = load(&settings).map_err(|error| Arguments::not_loaded(blamed(file.as_ref(), error)))?;
    let is_given = file.is_some() || config.says_how_to_split();
    let open = arguments.open_ranks(&config)?;
    let ranks = if is_given { open.unwrap_or(config.ranks()) } else { 1 };
    let (cluster, doubt) = arguments.cluster(&config, ranks)?;
    if is_given {
        machine::check_ranks(&cluster, open.unwrap_or(config.ranks()))?;
    }
    // A run's file is complete: keys that it leaves out have their defaults.
    let assumed = if arguments.planned.run.is_none() { assumptions(&config, &cluster)? } else { Vec::new() };
    let shards = open.map(|ranks| config.setting_for_ranks(ranks)).transpose()?;
    let config = match assumed.is_empty() && shards.is_none() {
        true => config,
        false => {
            let assumed = assumed.iter().map(|assumption| assumption.setting.clone());
            let settings: Vec<String> = assumed.chain(settings).chain(shards).collect();
            load(&settings).map_err(|error| blamed(file.as_ref(), error))?
        }
    };
    let planner = Planner::new(config.clone(), cluster, arguments.objective.into())?;
    let mut planner = match arguments.nproc_per_node {
        // On a host a rank may have several cores, so the number of ranks is a choice unless it is given.
        Some(ranks) if planner.is_host() => planner.with_ranks(ranks),
        _ => planner,
    };
    if let Some(note) = config.idle_zero_stage() {
        note!("note: {note}");
    }
    if is_given {
        foretold::run(arguments, config, file.as_ref(), &mut planner, &assumed)?;
    } else {
        found::run(arguments, &mut planner, &assumed)?;
    }
    if let Some(doubt) = doubt.filter(|_| !arguments.json) {
        say!("\ntimes are estimates: {doubt}");
    }
    Ok(ExitCode::SUCCESS)
}

impl Arguments {
    /// Returns the keys of the run that the arguments set.
    ///
    /// # Errors
    /// If no model has the given name.
    fn settings(&self) -> Result<Vec<String>, Failure> {
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
    fn not_loaded(error: Error) -> Failure {
        let name = match &error {
            Error::Config(lockstep_config::Error::ReadConfiguration { path, .. }) => {
                path.display().to_string()
            }
            _ => return error.into(),
        };
        let is_model = match find_model(&name) {
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
    fn open_ranks(&self, config: &RunConfig) -> Result<Option<usize>, Failure> {
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
    fn cluster(&self, config: &RunConfig, ranks: usize) -> Result<(Cluster, Option<String>), Failure> {
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

    fn write_plan(&self, plan: &Plan) -> Result<(), Failure> {
        let Some(path) = &self.output else { return Ok(()) };
        let text = plan.to_json().map_err(|error| Failure::configuration(error.to_string()))?;
        write(path, &text)
    }

    /// Returns true if any output shows the parts of the step.
    fn wants_details(&self) -> bool {
        self.json || self.explain || self.html.is_some()
    }

    /// Writes the HTML page, if one is asked for, with the command that made it.
    fn write_page(&self, planner: &Planner, page: Page<'_>) -> Result<(), Failure> {
        let Some(path) = &self.html else { return Ok(()) };
        let words: Vec<String> =
            std::env::args_os().skip(1).map(|argument| shell_word(&argument.to_string_lossy())).collect();
        let command = format!("lockstep {}", words.join(" "));
        write(path, &Page { command: Some(&command), ..page }.html(planner))
    }
}

/// Quotes an argument if a shell would split it.
fn shell_word(word: &str) -> String {
    if word.contains([' ', '"', '[', '{', '*', '$']) { format!("'{word}'") } else { word.to_owned() }
}

/// Prints the workload (model, precision, batch) and which part of it is assumed.
fn print_workload(planner: &Planner, assumed: &[Assumption]) {
    say!("workload   {}", planner.workload_in_words());
    if !assumed.is_empty() {
        let values: Vec<&str> = assumed.iter().map(|assumption| assumption.value.as_str()).collect();
        let flags: Vec<&str> = assumed.iter().map(|assumption| assumption.flag).collect();
        say!("           {}: usual on accelerators; {} say otherwise", values.join(", "), flags.join(", "));
    }
}

/// Returns the workload in the form of `--json`.
fn workload(planner: &Planner, assumed: &[Assumption]) -> Value {
    let train = &planner.config().train;
    json!({
        "model": planner.model_name(), "parameters": planner.parameters(),
        "trained_parameters": planner.trained_parameters(), "precision": train.precision.word(),
        "seq_len": train.seq_len, "global_batch": train.global_batch, "tokens_per_step": train.seq_len * train.global_batch,
        "assumed": assumed.iter().map(|assumption| assumption.setting.as_str()).collect::<Vec<_>>(),
    })
}

/// Parses a memory size: a number with a unit. A bare number below 1 MiB is an error, since its unit is missing.
fn memory(text: &str) -> Result<usize, String> {
    let bytes = bytes(text)?;
    let has_unit = !text.bytes().all(|byte| byte.is_ascii_digit());
    if has_unit || bytes >= 1 << 20 { Ok(bytes) } else { Err(format!("{text} bytes; write {text}GB")) }
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let refuse = |error| Failure::configuration(format!("cannot write {}: {error}", path.display()));
    std::fs::write(path, text).map_err(refuse)
}

/// Returns the figures of a plan's step in the form of `--json`.
fn figures(found: &Evaluated, cluster: &Cluster) -> Value {
    let step = &found.step;
    let goodput = (found.devices > 1).then(|| found.goodput(cluster));
    json!({
        "step_ms": step.step_ms,
        "tokens_per_s": found.tokens_per_s(),
        "tflops_per_device": found.tflops_per_device(),
        "hardware_tflops_per_device": found.hardware_tflops_per_device(),
        "mfu": found.mfu(),
        "step_parts_ms": {
            "work": step.work_ms, "exchanges": step.exchange_ms, "bubble": step.bubble_ms,
            "gradients": step.gradients_ms, "update": step.update_ms, "host": step.host_ms, "disk": step.disk_ms,
        },
        "memory_by_stage": found.memory.iter().copied().map(foretold::by_name).collect::<Vec<Value>>(),
        "capacity_bytes": found.capacity_bytes,
        "price_per_hour": found.price_per_hour,
        "price_source": cluster.nodes.iter().find_map(|node| node.price_source.as_deref()),
        "price_per_billion_tokens": found.price_per_billion_tokens(),
        "stalls_ms": {
            "data": found.data_stall_ms, "save": found.save_stall_ms(), "of_a_save": found.save_ms(),
            "saved_bytes": found.saves.bytes,
        },
        "goodput": goodput.map(|goodput| json!({ "share": goodput.share, "interval_s": goodput.interval_s })),
    })
}
