//! The training loop for a model and a data set of one's own: steps, guard, metrics, checkpoints and resumption as `lockstep
//! train` has them.

use std::sync::Arc;

use lockstep_config::{PlanFile, Resume, RunConfig};
use lockstep_data::samples::{Dataset, Transforms};
use lockstep_engine::Ranks;
use lockstep_model::{ModelConfig, register_given};
use lockstep_observe::progress::{Detail, Progress};
use lockstep_plan::Plan;
use lockstep_train::{SampleCorpus, SampleSet, Summary, TrainingData, ranks_of, train_on};

use crate::World;
use crate::error::Error;

/// A training run of a model on a data set.
///
/// Every key of a RUN.toml can be set; the defaults are those of `lockstep train`. Checkpoints go to `checkpoints/`, metrics
/// and a report to `runs/`, unless `checkpoint.dir` and `metrics.dir` say otherwise.
#[derive(Debug)]
pub struct Trainer {
    model: ModelConfig,
    data: Option<SampleSet>,
    valid: Option<SampleSet>,
    plan: Option<Plan>,
    settings: Vec<String>,
    resume: Resume,
}

impl Trainer {
    /// Returns a run of a model: one of the families, or one of your own.
    pub fn new(model: impl Into<ModelConfig>) -> Self {
        let (data, valid, plan) = (None, None, None);
        Self { model: model.into(), data, valid, plan, settings: Vec::new(), resume: Resume::Auto }
    }

    /// Sets the training samples and what is done to each of them.
    #[must_use]
    pub fn data(mut self, dataset: impl Dataset + 'static, transforms: Transforms) -> Self {
        self.data = Some(SampleSet { dataset: Arc::new(dataset), transforms });
        self
    }

    /// Sets the validation samples, for `train.eval_every`.
    #[must_use]
    pub fn valid(mut self, dataset: impl Dataset + 'static, transforms: Transforms) -> Self {
        self.valid = Some(SampleSet { dataset: Arc::new(dataset), transforms });
        self
    }

    /// Sets the plan, which is extended to all ranks by data parallelism ([`Plan::over`]); by default ranks are replicas.
    #[must_use]
    pub fn plan(mut self, plan: Plan) -> Self {
        self.plan = Some(plan);
        self
    }

    /// Sets a key of RUN.toml, as `--set` does: `train.steps=500`.
    #[must_use]
    pub fn set(mut self, setting: impl Into<String>) -> Self {
        self.settings.push(setting.into());
        self
    }

    /// Applies each `--set KEY=VALUE` among the arguments of the program.
    #[must_use]
    pub fn settings_from_arguments(mut self) -> Self {
        let given = crate::arguments();
        let pairs = given.windows(2).filter(|pair| pair[0] == "--set");
        self.settings.extend(pairs.map(|pair| pair[1].clone()));
        self
    }

    /// Sets where the run begins; by default at its newest checkpoint, if there is one.
    #[must_use]
    pub fn resume(mut self, resume: Resume) -> Self {
        self.resume = resume;
        self
    }

    /// Trains as one of the ranks of `world` until the last step, or until the run is asked to stop. Collective: every rank
    /// calls it. Rank 0 prints.
    ///
    /// # Errors
    /// If a setting is invalid, the plan does not fit the model or the ranks, a sample cannot be read, or a rank is lost.
    pub fn run(self, world: &World) -> Result<Summary, Error> {
        let config = self.config(world)?;
        let Some(train) = self.data else { return Err(Error::NoData) };
        let digest = format!("{} samples of {:?}", train.dataset.len(), train.dataset.tensors());
        let corpus = SampleCorpus { train, valid: self.valid, digest, damages: Vec::new() };
        let data = TrainingData::of_samples(&config, &self.model, corpus)?;
        let ranks = match world.group() {
            Some(group) => ranks_of(group.clone(), &config)?,
            None => Ranks::alone(),
        };
        let show = |steps| Progress::on_stderr(steps).with_detail(Detail::Summary);
        Ok(train_on(data, &config, &self.resume, &ranks, world.interrupt(), show)?)
    }

    /// Returns the configuration of the run.
    fn config(&self, world: &World) -> Result<RunConfig, Error> {
        // A run names its model; overrides are part of the model that was given.
        let own = [format!("model.model_type={:?}", register_given(self.model.handle()))];
        let settings: Vec<&String> = own.iter().chain(&self.settings).collect();
        let config = RunConfig::parse("", "the trainer", &settings).map_err(lockstep_config::Error::from)?;
        let planned = match &self.plan {
            Some(plan) => {
                let plan = plan.clone().over(world.size());
                config.with_plan(&PlanFile::unwritten(plan, "the trainer's plan"))
            }
            None => config.with_settings(&[config.setting_for_ranks(world.size())?]),
        };
        Ok(planned.map_err(lockstep_config::Error::from)?)
    }
}
