//! The configuration of a run: RUN.toml, `--set` arguments, a plan file, and everything that follows from them.
//!
//! [`KEYS`] is the one table of keys. [`RunConfig::load`] reads the sources through it and returns a configuration in which every value
//! fits every other, or the list of all mistakes, each with its place. [`resolve_model`] finds the model that the configuration names,
//! [`plan::checked_plan`] the plan of its ranks, and [`engine_options`] the settings of its engine.
//!
//! - [`RunConfig`]: the values, and [`Origin`]: where each came from.
//! - [`plan`]: the run's plan, checked against its model.
//! - [`schedule`]: the learning rate as a pure function of the step.
//! - [`foreign_names`]: names that other tools use for our keys.
//! - [`human`]: numbers the way people read them.
#![forbid(unsafe_code)]

mod check;
mod choices;
mod data_problems;
mod declare;
mod download_progress;
mod engine_options;
mod error;
pub mod foreign_names;
pub mod human;
mod ineffective_keys;
mod joining;
mod keys;
mod load;
mod manual;
mod model;
mod model_name;
mod nearest;
mod pattern;
pub mod plan;
mod plan_file;
mod plan_keys;
mod problem;
mod reader;
mod record;
mod resume;
mod run_config;
mod sample_transforms;
pub mod schedule;
mod schema;
mod sources;
mod tuning;
mod value;

pub use choices::{
    DataFormat, DataOrder, DataPacking, F32Products, LearningRateScaling, MuonScale, OptimizerKind,
    Precision, Rounding, Scaling, ScheduleKind, StatePrecision, TokenType, Transport, named_passes,
};
pub use data_problems::{data_problems, image_input};
pub use declare::{Key, Rules, Section};
pub use engine_options::{
    engine_options, offload_directory, offload_to_existing_directory, shape_of, too_few_live,
};
pub use error::Error;
pub use keys::{
    CheckpointConfig, DEFAULT_PRESET, DataConfig, FineTuneConfig, KEYS, MetricsConfig, ModelConfig,
    OptimizerConfig, ParallelConfig, RunConfig, SECTIONS, ScheduleConfig, TrainConfig,
};
pub use lockstep_hub::Need;
pub use manual::configuration_markdown;
pub use model::{ResolvedModel, named_model, overrides_of, resolve_model};
pub use model_name::{
    NamedModel, config_of, fetch_model, find_described, find_local_model, find_model, find_tokenizer,
    find_weights,
};
pub use plan_file::{PlanFile, recompute_setting, settings_between};
pub use problem::{Origin, Problem, Problems};
pub use record::{Difference, Setting};
pub use resume::Resume;
pub use run_config::{ModelSource, user_cache_dir};
pub use sample_transforms::{ImageSize, SampleTransform};
pub use schema::configuration_schema;
pub use sources::{Imported, ImportedFrom};
pub use value::{DataSource, TokenizerSource, ValueType};
