//! The parity matrix: tiny models under every plan, compared with one rank.
//!
//! A [`Workbench`] holds a text and runs configurations on it. Its ranks are threads that use the same shared memory as
//! processes would. Each difference is reported with the command that reproduces it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{env, io};

use lockstep_checkpoint::ModelDirectory;
use lockstep_comm::{Group, World, WorldOptions};
use lockstep_config::{Resume, RunConfig, resolve_model};
use lockstep_engine::Ranks;
use lockstep_launch::interrupt::Interrupt;
use lockstep_observe::progress::Progress;
use lockstep_plan::DType;
use lockstep_plan::schedule::Kind;
use lockstep_tensor::delayed::{Delayed, Fault};
use lockstep_train::verify::{
    Comparison, Numbers, ROUTER_MARGIN, SAMPLE_RUN, Tolerance, alone, exact, numbers, sample_data,
    sample_text,
};
use lockstep_train::{Error, ranks_of, train, train_on};
use serde_json::Value;

use crate::decided::decide;
pub use crate::tiny_models::*;

/// One way to parallelize a run.
#[derive(Debug, Clone)]
pub struct Split {
    /// Kind of parallelism; two splits of the same kind do not combine.
    pub kind: &'static str,
    /// Number of ranks.
    pub ranks: usize,
    /// Settings of the split.
    pub settings: Vec<String>,
}

/// Returns two-dimensional tensor parallelism on `side · side` ranks.
pub fn square(side: usize) -> Split {
    let settings = vec![
        format!("parallel.tensor_parallel={}", side * side),
        "parallel.tensor_layout=2d".to_owned(),
        format!("train.micro_batch={side}"),
    ];
    Split { kind: "tensor", ranks: side * side, settings }
}

/// Returns every way to parallelize a run over `ranks` ranks. These are data-parallel replicas, each ZeRO stage, tensor
/// parallelism (with and without sequence parallelism, in chunks, in two dimensions), context parallelism by every
/// method, and pipelines under every schedule for which the models have enough units.
pub fn splits(ranks: usize) -> Vec<Split> {
    let split = |kind, settings: &[String]| Split { kind, ranks, settings: settings.to_vec() };
    let tensor = format!("parallel.tensor_parallel={ranks}");
    let by_tokens = "parallel.sequence_parallel=true".to_owned();
    let mut all = vec![
        split("replicas", &[format!("parallel.data_parallel_replicate={ranks}")]),
        split("tensor", std::slice::from_ref(&tensor)),
        split("tensor", &[tensor.clone(), by_tokens.clone()]),
        split("tensor", &[tensor, by_tokens, "parallel.tensor_chunks=3".to_owned()]),
    ];
    all.extend([1, 2, 3].map(|stage| {
        let shard = format!("parallel.data_parallel_shard={ranks}");
        split("zero", &[shard, format!("parallel.zero_stage={stage}")])
    }));
    if ranks == 4 {
        all.push(square(2));
    }
    all.extend(["ring", "all_gather", "all_to_all"].map(|method| {
        let method = format!("parallel.context_parallel_method={method}");
        split("context", &[format!("parallel.context_parallel={ranks}"), method])
    }));
    let schedules = Kind::ALL.into_iter().filter(|kind| kind.chunks().0 * ranks <= UNITS);
    all.extend(schedules.map(|kind| {
        let schedule = format!("parallel.pipeline_schedule={}", kind.name());
        split("pipeline", &[format!("parallel.pipeline_parallel={ranks}"), schedule])
    }));
    all
}

/// Returns every way to parallelize the experts of a mixture over `ranks` ranks.
pub fn expert_splits(ranks: usize) -> Vec<Split> {
    let split = |axis: &str, experts: &str| {
        let settings = vec![format!("parallel.{axis}={ranks}"), format!("parallel.{experts}={ranks}")];
        Split { kind: "experts", ranks, settings }
    };
    vec![
        split("data_parallel_shard", "expert_parallel"),
        split("tensor_parallel", "expert_parallel"),
        split("tensor_parallel", "expert_tensor_parallel"),
    ]
}

/// Returns the settings of every pair of splits that are of different kinds and set no key twice.
pub fn pairs(all: &[Split]) -> Vec<Vec<String>> {
    let is_apart = |first: &Split, second: &Split| {
        let axes = |split: &Split| -> Vec<String> {
            let axis = |setting: &String| setting.split('=').next().unwrap_or_default().to_owned();
            split.settings.iter().map(axis).collect()
        };
        first.kind != second.kind && axes(first).iter().all(|axis| !axes(second).contains(axis))
    };
    let with_later = |(i, first): (usize, &Split)| -> Vec<Vec<String>> {
        let others = all[i + 1..].iter().filter(|second| is_apart(first, second));
        others.map(|second| [&first.settings[..], &second.settings].concat()).collect()
    };
    all.iter().enumerate().flat_map(with_later).collect()
}

/// Device of a workbench's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compute {
    /// The CPU, whose kernels run immediately.
    AtOnce,
    /// Delayed devices, one per rank, with the same fault if any. Their numbers must equal the CPU's bit for bit.
    Delayed(Option<Fault>),
}

impl Compute {
    fn place(self, ranks: Ranks) -> Ranks {
        match self {
            Self::AtOnce => ranks,
            Self::Delayed(fault) => ranks.on(Delayed::new(fault)),
        }
    }
}

/// Test bench with a text, initial weights of the mixtures, and cached results of one rank.
pub struct Workbench {
    compute: Compute,
    dir: tempfile::TempDir,
    alone: Mutex<HashMap<Vec<String>, Numbers>>,
}

impl Workbench {
    /// Creates a workbench whose text is conversations with masked prompts, so that ranks have different numbers of
    /// valid tokens. Ranks compute on the CPU, or on delayed devices if `LOCKSTEP_DEVICE` is `delayed`.
    ///
    /// # Errors
    /// If the files cannot be written.
    pub fn new() -> io::Result<Self> {
        let is_delayed = env::var_os("LOCKSTEP_DEVICE").is_some_and(|device| device == "delayed");
        Self::on(if is_delayed { Compute::Delayed(None) } else { Compute::AtOnce })
    }

    /// Creates a workbench whose ranks compute on the given device.
    ///
    /// # Errors
    /// If the files cannot be written.
    pub fn on(compute: Compute) -> io::Result<Self> {
        let dir = tempfile::tempdir()?;
        std::fs::write(dir.path().join("text.jsonl"), sample_text())?;
        let bench = Self { compute, dir, alone: Mutex::default() };
        for model in MIXTURES {
            bench.make_weights(model).map_err(io::Error::other)?;
        }
        Ok(bench)
    }

    /// Writes weights of `model` with clear router decisions: those after one training step, changed by [`decide`].
    fn make_weights(&self, model: TinyModel) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let dirs = [
            format!("checkpoint.dir={:?}", self.path("checkpoints").join(model.name)),
            format!("metrics.dir={:?}", self.path("runs").join(model.name)),
        ];
        let settings: Vec<&str> =
            dirs.iter().map(String::as_str).chain(["metrics.tensorboard=false"]).collect();
        let config = self.config_of(model.settings, &settings)?;
        let show = |steps| Progress::as_lines(steps, Box::new(io::sink()));
        train(&config, &Resume::Never, &Ranks::alone(), &Interrupt::default(), show)?;
        let weights = ModelDirectory::open(&config.checkpoint.dir.join("step-00000001"))?;
        weights.export_hf(DType::F32, &self.path(model.name))?;
        decide(&self.path(model.name))
    }

    /// Returns the settings that select the model: its own, or for a mixture the path of its weights in `dir`.
    fn model_settings(model: TinyModel, dir: &Path) -> Vec<String> {
        if !MIXTURES.contains(&model) {
            return model.settings.iter().map(ToString::to_string).collect();
        }
        vec![format!("model.path={:?}", dir.join(model.name)), "model.from_pretrained=true".to_owned()]
    }

    /// Copies the weights of a model to a directory that outlives the workbench, and returns the settings that select
    /// them.
    fn keep(&self, model: TinyModel) -> io::Result<Vec<String>> {
        let kept = std::env::temp_dir().join("lockstep-parity");
        if MIXTURES.contains(&model) {
            let to = kept.join(model.name);
            std::fs::create_dir_all(&to)?;
            for entry in std::fs::read_dir(self.path(model.name))? {
                let entry = entry?;
                std::fs::copy(entry.path(), to.join(entry.file_name()))?;
            }
        }
        Ok(Self::model_settings(model, &kept))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the configuration of a run of `model` with additional settings.
    ///
    /// # Errors
    /// If the settings are invalid.
    pub fn config(&self, model: TinyModel, settings: &[&str]) -> Result<RunConfig, Error> {
        let of_model = Self::model_settings(model, self.dir.path());
        self.config_of(&of_model.iter().map(String::as_str).collect::<Vec<_>>(), settings)
    }

    fn config_of(&self, of_model: &[&str], settings: &[&str]) -> Result<RunConfig, Error> {
        let data = [
            format!("data.cache_dir={:?}", self.path("cache")),
            "train.steps=1".to_owned(),
            format!("data.train=[{:?}]", self.path("text.jsonl")),
        ];
        // Models with named inputs run on generated samples, and those without tokens refuse a text.
        let alone = resolve_model(&RunConfig::parse(SAMPLE_RUN, "the parity matrix", of_model)?);
        let reads_text = alone.map_or(true, |model| model.config.model().inputs().is_empty());
        let of_data = data.iter().take(if reads_text { 3 } else { 2 }).map(String::as_str);
        let settings: Vec<&str> =
            of_model.iter().copied().chain(of_data).chain(settings.iter().copied()).collect();
        Ok(RunConfig::parse(SAMPLE_RUN, "the parity matrix", &settings)?)
    }

    /// Runs a configuration on its number of ranks and returns the resulting numbers.
    ///
    /// # Errors
    /// If a rank cannot run.
    ///
    /// # Panics
    /// If another device than the CPU computes different numbers.
    pub fn numbers(&self, config: &RunConfig) -> Result<Numbers, Error> {
        let numbers_on = |compute| -> Result<Numbers, Error> {
            let found = on_devices(config, compute, |ranks| numbers(config, ranks, &Interrupt::default()))?;
            Ok(found.into_iter().flatten().next().unwrap_or_default())
        };
        let found = numbers_on(Compute::AtOnce)?;
        if self.compute != Compute::AtOnce {
            let late = numbers_on(self.compute)?;
            assert!(late == found, "on {:?}: {:?}, on the CPU {:?}", self.compute, late.steps, found.steps);
        }
        Ok(found)
    }

    /// Trains the first half of the steps under the first plan and resumes from its checkpoint under the second.
    /// Returns the losses of all steps.
    ///
    /// # Errors
    /// If a rank cannot run, or a file cannot be read or written.
    pub fn losses_of_both(
        &self,
        model: TinyModel,
        plans: [&[&str]; 2],
        steps: u64,
    ) -> Result<Vec<f64>, Box<dyn std::error::Error>> {
        let dir = tempfile::tempdir_in(self.dir.path())?;
        let half = steps.div_ceil(2);
        let common = [
            format!("train.steps={steps}"),
            format!("checkpoint.every={half}"),
            "metrics.tensorboard=false".to_owned(),
        ];
        let mut resume = Resume::Never;
        let mut losses = Vec::new();
        for (part, plan) in plans.into_iter().enumerate() {
            let dir = dir.path().join(part.to_string());
            let dirs = [
                format!("checkpoint.dir={:?}", dir.join("checkpoints")),
                format!("metrics.dir={:?}", dir.join("runs")),
            ];
            let settings = common.iter().chain(&dirs).map(String::as_str).chain(plan.iter().copied());
            let config = self.config(model, &settings.collect::<Vec<_>>())?;
            let show = |steps| Progress::as_lines(steps, Box::new(io::sink()));
            let run = |ranks: &Ranks| match sample_data(&config)? {
                Some(data) => train_on(data, &config, &resume, ranks, &Interrupt::default(), show),
                None => train(&config, &resume, ranks, &Interrupt::default(), show),
            };
            on_devices(&config, self.compute, run)?;
            let rows = std::fs::read_to_string(config.metrics.dir.join("metrics.jsonl"))?;
            let rows = rows.lines().filter_map(|row| serde_json::from_str::<Value>(row).ok());
            let found: Vec<f64> = rows.filter_map(|row| row["loss"].as_f64()).collect();
            // The second part starts at the checkpoint of the first.
            losses.extend(if part == 0 { &found[..half as usize] } else { &found });
            resume = Resume::From(config.checkpoint.dir.join(format!("step-{half:08}")));
        }
        Ok(losses)
    }

    /// Compares a plan with one rank. Returns a line for each number that exceeds the tolerance, and at the end the
    /// command that reproduces it.
    ///
    /// # Errors
    /// If a rank cannot run.
    pub fn differences(
        &self,
        model: TinyModel,
        plan: &[&str],
        tolerance: Tolerance,
    ) -> Result<Vec<String>, Error> {
        let found = self.numbers(&self.config(model, plan)?)?;
        self.differences_of(&found, model, plan, tolerance)
    }

    /// Compares `found`, the numbers of a run of `plan`, with those of one rank; [`Workbench::differences`] runs the plan itself.
    ///
    /// # Errors
    /// If the run on one rank fails.
    pub fn differences_of(
        &self,
        found: &Numbers,
        model: TinyModel,
        plan: &[&str],
        tolerance: Tolerance,
    ) -> Result<Vec<String>, Error> {
        let expected = self.of_one_rank(&self.config(model, plan)?, model, plan)?;
        Ok(self.failures(Comparison::of_f32(found, &expected, tolerance), model, plan))
    }

    /// Compares the error of a plan in bf16 or f16 with that of one rank in the same dtype, both against one rank in f32.
    ///
    /// # Errors
    /// If a rank cannot run.
    pub fn narrow_differences(&self, model: TinyModel, plan: &[&str]) -> Result<Vec<String>, Error> {
        let config = self.config(model, plan)?;
        let (found, one_rank) = (self.numbers(&config)?, self.of_one_rank(&config, model, plan)?);
        let in_f32 = self.numbers(&exact(&alone(&config)))?;
        Ok(self.failures(Comparison::of_narrow(&found, &one_rank, &in_f32), model, plan))
    }

    /// Returns the numbers of one rank, computed once and cached.
    fn of_one_rank(&self, config: &RunConfig, model: TinyModel, plan: &[&str]) -> Result<Numbers, Error> {
        let key: Vec<String> = model
            .settings
            .iter()
            .chain(plan.iter().filter(|setting| !setting.starts_with("parallel.")))
            .map(ToString::to_string)
            .collect();
        let known = self.alone.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(known) = known {
            return Ok(known);
        }
        let expected = self.numbers(&alone(config))?;
        self.alone.lock().unwrap_or_else(PoisonError::into_inner).insert(key, expected.clone());
        Ok(expected)
    }

    fn failures(&self, comparison: Comparison, model: TinyModel, plan: &[&str]) -> Vec<String> {
        let Comparison { failures: mut lines, router_margin, .. } = comparison;
        // With a smaller margin, the numbers of a correct plan could differ.
        let margin = router_margin.filter(|margin| *margin <= ROUTER_MARGIN);
        lines.extend(margin.map(|margin| {
            format!("routers are undecided: a token's last expert is {margin:e} ahead of the next, not above {ROUTER_MARGIN:e}")
        }));
        if !lines.is_empty() {
            let of_model = self.keep(model).unwrap_or_else(|error| vec![format!("MODEL, not kept: {error}")]);
            let set = of_model.iter().map(String::as_str).chain(plan.iter().copied());
            let set: String = set.map(|setting| format!(" --set '{setting}'")).collect();
            lines.push(format!("again: lockstep verify{set}"));
        }
        lines
    }
}

/// Runs `run` on the number of ranks in `config`, as threads, and returns the results of all ranks.
///
/// # Errors
/// If a rank cannot run.
pub fn on_ranks<T: Send>(
    config: &RunConfig,
    run: impl Fn(&Ranks) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    on_devices(config, Compute::AtOnce, run)
}

fn on_devices<T: Send>(
    config: &RunConfig,
    compute: Compute,
    run: impl Fn(&Ranks) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    if config.ranks() == 1 {
        return Ok(vec![run(&compute.place(Ranks::alone()))?]);
    }
    on_ranks_of(config, |group| Ok(compute.place(ranks_of(group, config)?)), run)
}

/// Runs as [`on_ranks`] does, but each thread builds its [`Ranks`] from its group with `join`.
///
/// # Errors
/// If a rank cannot run.
pub fn on_ranks_of<T: Send>(
    config: &RunConfig,
    join: impl Fn(Group) -> Result<Ranks, Error> + Sync,
    run: impl Fn(&Ranks) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    // One core: the ranks of other tests run beside these, so a waiting rank sleeps at once.
    let options = WorldOptions { arena_bytes: 1 << 28, cores: 1, ..WorldOptions::default() };
    let groups = World::in_process(config.ranks(), options)?;
    std::thread::scope(|scope| {
        let rank = |group| scope.spawn(|| run(&join(group)?));
        let threads: Vec<_> = groups.into_iter().map(rank).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
