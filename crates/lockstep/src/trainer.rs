//! The training loop for a model and a data set of one's own: steps, guard, metrics, checkpoints and resumption as `lockstep
//! train` has them.

use std::sync::Arc;

use lockstep_config::{PlanFile, Resume, RunConfig};
use lockstep_data::samples::{Dataset, EpochEnd, SampleBatches, SampleSequence, TensorSpec, Transforms};
use lockstep_data::{BatchSource, SampleOrder};
use lockstep_engine::Ranks;
use lockstep_model::{InputDeclaration, ModelConfig, register_given};
use lockstep_observe::progress::{Detail, Progress};
use lockstep_plan::Plan;
use lockstep_tensor::is_name_of;
use lockstep_train::{Summary, TrainingData, ranks_of, train_on};

use crate::World;
use crate::error::Error;

/// A training run of a model on a data set.
///
/// Every key of a RUN.toml can be set; the defaults are those of `lockstep train`. Checkpoints go to `checkpoints/`, metrics
/// and a report to `runs/`, unless `checkpoint.dir` and `metrics.dir` say otherwise.
#[derive(Debug)]
pub struct Trainer {
    model: ModelConfig,
    data: Option<Set>,
    valid: Option<Set>,
    plan: Option<Plan>,
    settings: Vec<String>,
    resume: Resume,
}

/// A data set with its transforms.
#[derive(Debug)]
struct Set {
    dataset: Arc<dyn Dataset>,
    transforms: Transforms,
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
        self.data = Some(Set { dataset: Arc::new(dataset), transforms });
        self
    }

    /// Sets the validation samples, for `train.eval_every`.
    #[must_use]
    pub fn valid(mut self, dataset: impl Dataset + 'static, transforms: Transforms) -> Self {
        self.valid = Some(Set { dataset: Arc::new(dataset), transforms });
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
        let seed = config.train.seed;
        let source = |set: Set, order: SampleOrder| -> Result<Arc<dyn BatchSource>, Error> {
            let sequence = SampleSequence::new(order, set.dataset.len(), EpochEnd::Continue)?;
            Ok(Arc::new(SampleBatches::new(set.dataset, set.transforms, sequence, seed)?))
        };
        let Some(data) = self.data else { return Err(Error::NoData) };
        for set in [Some(&data), self.valid.as_ref()].into_iter().flatten() {
            check_inputs(&self.model, set)?;
        }
        let digest = format!("{} samples of {:?}", data.dataset.len(), data.dataset.tensors());
        let train = source(data, SampleOrder::Shuffle { seed })?;
        let valid = self.valid.map(|set| source(set, SampleOrder::Sequential)).transpose()?;
        let data = TrainingData::of_samples(train, valid, digest);
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

/// Checks that transformed samples have the inputs of the model.
fn check_inputs(model: &ModelConfig, set: &Set) -> Result<(), Error> {
    let tensors = set.transforms.output(set.dataset.tensors())?;
    for declared in model.model().inputs() {
        let found = tensors.iter().find(|tensor| is_name_of(&tensor.name, &declared.name));
        let shape = &declared.shape;
        let is_of_shape = |extents: &[Option<usize>]| {
            extents.len() == shape.len()
                && extents.iter().zip(shape).all(|(extent, size)| *extent == Some(*size))
        };
        // The length of sequences is checked when a micro-batch is read.
        let fits = |tensor: &TensorSpec| match (declared.is_per_token, tensor.shape.split_first()) {
            (false, _) => is_of_shape(&tensor.shape),
            (true, first) => first.is_some_and(|(_, of_token)| is_of_shape(of_token)),
        };
        if found.is_none_or(|tensor| tensor.dtype != declared.dtype || !fits(tensor)) {
            let found = tensors.iter().map(describe).collect::<Vec<_>>().join(", ");
            let InputDeclaration { name, dtype, shape, .. } = declared;
            return Err(Error::Input { input: format!("{name} {dtype} {shape:?}"), found });
        }
    }
    Ok(())
}

/// Describes a tensor of samples: `image u8 [32, 32, 3]`, with `?` for an extent that varies.
fn describe(tensor: &TensorSpec) -> String {
    let extent = |extent: &Option<usize>| extent.map_or("?".to_owned(), |extent| extent.to_string());
    let shape = tensor.shape.iter().map(extent).collect::<Vec<_>>().join(", ");
    format!("{} {} [{shape}]", tensor.name, tensor.dtype)
}
