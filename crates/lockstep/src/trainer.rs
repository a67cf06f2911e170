//! The training loop for a model and a data set of one's own: steps, guard, metrics, checkpoints and resumption as `lockstep
//! train` has them.

use std::sync::Arc;

use lockstep_config::{PlanFile, Resume, RunConfig};
use lockstep_data::samples::{Dataset, Transforms};
use lockstep_engine::Ranks;
use lockstep_model::{ModelConfig, register_given};
use lockstep_observe::progress::{Detail, Progress};
use lockstep_plan::Plan;
use lockstep_planner::choose;
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
    layout: Layout,
    settings: Vec<String>,
    resume: Resume,
}

impl Trainer {
    /// Returns a run of a model: one of the families, or one of your own.
    pub fn new(model: impl Into<ModelConfig>) -> Self {
        let (settings, resume) = (Vec::new(), Resume::Auto);
        Self { model: model.into(), data: None, valid: None, layout: Layout::Replicas, settings, resume }
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

    /// Sets the plan, or [`Layout::Auto`] for the planner's choice; by default ranks are replicas.
    #[must_use]
    pub fn plan(mut self, layout: impl Into<Layout>) -> Self {
        self.layout = layout.into();
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
        let plan = match &self.layout {
            Layout::Replicas => None,
            Layout::Auto => self.chosen(&config, world)?,
            Layout::Given(plan) => Some(plan.as_ref().clone().over(world.size())),
        };
        let planned = match plan {
            Some(plan) => config.with_plan(&PlanFile::unwritten(plan, "the trainer's plan")),
            None => config.with_settings(&[config.setting_for_ranks(world.size())?]),
        };
        Ok(planned.map_err(lockstep_config::Error::from)?)
    }

    /// Returns the plan that rank 0 chooses for all ranks, as `lockstep train` does; `None` if the settings say how to split
    /// the run, or no plan fits, which the check of the run reports.
    fn chosen(&self, config: &RunConfig, world: &World) -> Result<Option<Plan>, Error> {
        if config.says_how_to_split() {
            return Ok(None);
        }
        let choose = || -> Result<String, Error> {
            let choice = choose(config, &self.resume, Some(world.size()))?;
            Ok(choice.map_or(Ok(String::new()), |choice| choice.plan.plan().to_json())?)
        };
        let text = world.made_by_first(choose)?;
        Ok(if text.is_empty() { None } else { Some(Plan::from_json(&text)?) })
    }
}

/// The layout of a run over its ranks.
#[derive(Debug, Clone)]
pub enum Layout {
    /// Every rank is a data-parallel replica, unless a setting says otherwise.
    Replicas,
    /// The planner's choice, as for `lockstep train` without `[parallel]`: the fastest plan that fits in memory.
    Auto,
    /// A plan, which is extended to all ranks by data parallelism ([`Plan::over`]).
    Given(Box<Plan>),
}

impl From<Plan> for Layout {
    fn from(plan: Plan) -> Self {
        Self::Given(Box::new(plan))
    }
}
