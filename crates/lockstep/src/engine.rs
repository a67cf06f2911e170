//! The engine of a loop of your own: forward and backward of a global batch, then the optimizer step.

use std::path::{Path, PathBuf};

use lockstep_checkpoint::latest_good;
use lockstep_data::MicroBatch;
use lockstep_data::samples::Batch;
use lockstep_engine::{EngineOptions, HostBatch, Optimizer, Ranks, Update};
use lockstep_graph::{MAX_REPORTS, Totals};
use lockstep_model::ModelConfig;
use lockstep_plan::{CheckedPlan, DType, MemoryBytes, Plan};
use lockstep_train::{LoopState, clip_coefficient, host_batch, load_engine, sample_batch, save_engine};

use crate::World;
use crate::error::Error;

/// Settings of an [`Engine`].
#[derive(Debug, Clone)]
pub struct Settings {
    /// Layout of the work over the ranks, extended to all of them by data parallelism: see [`Plan::over`].
    pub plan: Plan,
    /// Samples of a step over all ranks.
    pub global_batch: usize,
    /// Tokens of a sample; 1 for a model whose samples are no sequences.
    pub seq_len: usize,
    /// Dtype of weights and activations that kernels read; f32 master weights are kept in any case.
    pub precision: DType,
    /// Optimizer and its hyperparameters.
    pub optimizer: Optimizer,
    /// Weight decay of matrices; vectors do not decay.
    pub weight_decay: f64,
    /// Largest global norm of the gradients; 0 does not clip.
    pub max_grad_norm: f64,
    /// Seed of the initial weights and of dropout.
    pub seed: u64,
    /// Compute threads of each rank.
    pub threads: usize,
}

impl Default for Settings {
    fn default() -> Self {
        let EngineOptions { dtype: precision, optimizer, seed, threads, .. } = EngineOptions::default();
        Self {
            plan: Plan::default(),
            global_batch: 32,
            seq_len: 1,
            precision,
            optimizer,
            weight_decay: 0.0,
            max_grad_norm: 0.0,
            seed,
            threads,
        }
    }
}

/// A model with its gradients and optimizer state, laid out over the ranks by a plan.
pub struct Engine {
    engine: lockstep_engine::Engine,
    ranks: Ranks,
    model: ModelConfig,
    plan: CheckedPlan,
    settings: Settings,
    updates: u64,
    /// Samples of all ranks in the steps so far.
    samples: u64,
    /// Reports of the last global batch.
    totals: Totals,
}

/// The outcome of an optimizer step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Number of optimizer steps so far.
    pub number: u64,
    /// Global L2 norm of the gradients before clipping.
    pub grad_norm: f64,
}

/// Memory of a rank, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Most that has been booked at one time so far.
    pub peak_bytes: usize,
    /// Prediction of the plan for each category, made before anything was allocated.
    pub predicted: MemoryBytes,
    /// Most that has been booked at one time in each category so far.
    pub peak: MemoryBytes,
}

impl Engine {
    /// Builds the engine of this rank with initial weights, which are the same under every plan. Collective: every rank
    /// calls it.
    ///
    /// # Errors
    /// If the plan does not fit the model or the ranks (the error lists every problem), memory runs out, or a rank is lost.
    pub fn new(world: &World, model: impl Into<ModelConfig>, settings: Settings) -> Result<Self, Error> {
        let model = model.into();
        model.validate()?;
        let plan = settings.plan.clone().over(world.size());
        let plan = model.check_plan(&plan, [settings.global_batch, settings.seq_len])?;
        if plan.mesh().world_size() != world.size() {
            return Err(Error::WorldSize { plan: plan.mesh().world_size(), world: world.size() });
        }
        let ranks = world.planned(&plan)?;
        let options = EngineOptions {
            dtype: settings.precision,
            optimizer: settings.optimizer,
            seed: settings.seed,
            threads: settings.threads,
            ..EngineOptions::default()
        };
        let builder = lockstep_engine::Engine::builder(&model, plan.rank(world.rank()));
        let mut engine = builder.groups(ranks.groups().clone()).options(options).build(&ranks.arena())?;
        engine.initialize(settings.seed)?;
        let totals = Totals::default();
        Ok(Self { engine, ranks, model, plan, settings, updates: 0, samples: 0, totals })
    }

    /// Returns the number of optimizer steps so far, those before the checkpoint included that was loaded.
    pub fn steps(&self) -> u64 {
        self.updates
    }

    /// Saves a checkpoint with parameters and optimizer state under `dir`, and returns its path. Every plan on any number of
    /// ranks can load it; `lockstep checkpoint export` makes a Hugging Face directory of one of a known family. Collective:
    /// every rank calls it.
    ///
    /// # Errors
    /// If a weight is not finite, a file cannot be written, or a rank is lost. Earlier checkpoints remain.
    pub fn save(&mut self, dir: impl AsRef<Path>) -> Result<PathBuf, Error> {
        let (step, samples_consumed, seed) = (self.updates, self.samples, self.settings.seed);
        let state = LoopState { step, samples_consumed, seed };
        let described = (&self.model, self.plan.plan());
        Ok(save_engine(&mut self.engine, &self.ranks, dir.as_ref(), state, described)?)
    }

    /// Loads a checkpoint, whatever its plan was, or the weights of a Hugging Face directory. Collective: every rank calls it.
    ///
    /// # Errors
    /// If a file is damaged, or the tensors are not those of the model.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<(), Error> {
        let state = load_engine(&mut self.engine, path.as_ref(), (&self.model, self.settings.seed))?;
        (self.updates, self.samples) = (state.step, state.samples_consumed);
        Ok(())
    }

    /// Loads the newest intact checkpoint under `dir`, if there is one, and returns the number of optimizer steps so far.
    /// Collective: every rank calls it.
    ///
    /// # Errors
    /// As for [`Engine::load`], and if the directory cannot be read.
    pub fn resume(&mut self, dir: impl AsRef<Path>) -> Result<u64, Error> {
        let dir = dir.as_ref();
        if dir.is_dir()
            && let Some(checkpoint) = latest_good(dir).map_err(lockstep_train::Error::from)?.checkpoint
        {
            self.load(checkpoint.path())?;
        }
        Ok(self.updates)
    }

    /// Returns the plan, with everything resolved that it left open.
    pub fn plan(&self) -> &CheckedPlan {
        &self.plan
    }

    /// Returns the predicted and the booked memory of this rank.
    pub fn memory(&self) -> Memory {
        let arena = self.engine.arena();
        Memory {
            peak_bytes: arena.peak_total_bytes(),
            predicted: self.engine.predicted_memory().by_category(),
            peak: arena.peak(),
        }
    }

    /// Returns the engine beneath: weights, gradients, memory and traces of this rank.
    pub fn inner(&mut self) -> &mut lockstep_engine::Engine {
        &mut self.engine
    }

    /// Returns the samples of a global batch that this rank reads, as ranges of positions in it, one for each micro-batch.
    pub fn shard(&self) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let micro_batch = self.plan.micro_batch();
        let of_rank = self.settings.global_batch / self.ranks.replicas();
        let first = self.ranks.replica() * of_rank;
        (first..first + of_rank).step_by(micro_batch).map(move |start| start..start + micro_batch)
    }

    /// Runs forward and backward of this rank's micro-batches of a global batch, and returns the loss: the mean over all
    /// valid targets of the global batch, on all ranks. Collective: every rank calls it.
    ///
    /// # Errors
    /// If the global batch has no valid target, a rank is lost, or a disk of offloaded state fails.
    pub fn forward_backward(&mut self, micro_batches: &[impl Inputs]) -> Result<f64, Error> {
        let batches = micro_batches.iter().map(Inputs::host_batch);
        let mut own = Totals::default();
        for batch in batches.clone() {
            own.add(&Totals { counts: batch.counts(self.engine.model()), ..Totals::default() });
        }
        let counted = self.ranks.totals(own)?;
        if counted.counts[0] == 0 {
            return Err(Error::NoTargets);
        }
        let seed = counted.seed(self.engine.model().reports(), self.settings.global_batch as u64, 1.0);
        self.engine.take_reported();
        self.engine.forward_backward(batches, seed)?;
        self.take_totals(own.counts)
    }

    /// Gathers the reports of the micro-batches that have run, whose counts on this rank are `counts`, and returns the loss.
    fn take_totals(&mut self, counts: [u64; MAX_REPORTS]) -> Result<f64, Error> {
        let own = Totals { sums: self.engine.take_reported(), counts };
        self.totals = self.ranks.totals(own)?;
        if self.totals.counts[0] == 0 {
            return Err(Error::NoTargets);
        }
        Ok(self.totals.loss(self.engine.model().reports()))
    }

    /// Returns the mean of each loss and metric of the model over the last global batch, by name.
    pub fn reports(&self) -> impl Iterator<Item = (&str, f64)> {
        let reports = self.engine.model().reports().iter().enumerate();
        reports.filter_map(|(index, report)| Some((report.name.as_str(), self.totals.mean(index)?)))
    }

    /// Clips the gradients and makes an optimizer step. Collective: every rank calls it.
    ///
    /// # Errors
    /// If a rank is lost, or a disk of offloaded state fails.
    pub fn step(&mut self, learning_rate: f64) -> Result<Step, Error> {
        let grad_norm = self.engine.finish_gradients()?;
        self.updates += 1;
        self.samples += self.settings.global_batch as u64;
        self.engine.update(&Update {
            learning_rate,
            weight_decay: self.settings.weight_decay,
            gradient_scale: clip_coefficient(self.settings.max_grad_norm, grad_norm) as f32,
            step: self.updates,
        })?;
        Ok(Step { number: self.updates, grad_norm })
    }

    /// Returns the mean loss of a global batch without changing anything. Collective: every rank calls it.
    ///
    /// # Errors
    /// As for [`Engine::forward_backward`].
    pub fn evaluate(&mut self, micro_batches: &[impl Inputs]) -> Result<f64, Error> {
        let mut own = Totals::default();
        self.engine.take_reported();
        for batch in micro_batches.iter().map(Inputs::host_batch) {
            own.add(&Totals { counts: batch.counts(self.engine.model()), ..Totals::default() });
            self.engine.evaluate(&batch)?;
        }
        self.take_totals(own.counts)
    }
}

/// A micro-batch as the engine reads it: of tokens, or of named tensors.
pub trait Inputs {
    /// Returns the slices of the micro-batch.
    fn host_batch(&self) -> HostBatch<'_>;
}

impl Inputs for Batch {
    fn host_batch(&self) -> HostBatch<'_> {
        sample_batch(&self.tensors, &self.sample_numbers)
    }
}

impl Inputs for MicroBatch {
    fn host_batch(&self) -> HostBatch<'_> {
        host_batch(self)
    }
}
