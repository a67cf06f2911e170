//! The settings of a run's engine that follow from its keys.

use std::path::PathBuf;
use std::time::Duration;

use lockstep_engine::{EngineOptions, Offload, Optimizer, Storage, WeightStorage};
use lockstep_graph::BlockShape;
use lockstep_plan::gathering::LiveLimitTooLow;
use lockstep_tensor::ScratchFile;

use crate::{Error, OptimizerKind, RunConfig};

/// Returns the shape of a run's micro-batch, with the type that its kernels read.
pub fn shape_of(config: &RunConfig) -> BlockShape {
    let (train, sequences) = (&config.train, config.micro_batch());
    BlockShape { sequences, seq_len: train.seq_len, dtype: train.precision.into() }
}

/// Returns the engine's settings that do not depend on the plan.
pub fn engine_options(config: &RunConfig) -> EngineOptions {
    let optimizer = &config.optimizer;
    EngineOptions {
        dtype: shape_of(config).dtype,
        storage: storage(config),
        optimizer: match optimizer.kind {
            OptimizerKind::AdamW => Optimizer::AdamW { betas: optimizer.betas(), eps: optimizer.eps },
            OptimizerKind::Sgd => Optimizer::Sgd { momentum: optimizer.momentum() as f32 },
            OptimizerKind::Lion => Optimizer::Lion { betas: optimizer.betas() },
            OptimizerKind::Muon => Optimizer::Muon {
                momentum: optimizer.momentum() as f32,
                scale: optimizer.muon_scale.into(),
                betas: optimizer.betas(),
                eps: optimizer.eps,
                adam_ratio: optimizer.adam_lr.map_or(1.0, |adam_lr| adam_lr / optimizer.lr),
            },
        },
        seed: config.train.seed,
        threads: match config.train.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        },
    }
}

/// Returns the error for a limit on live parameters below what a unit reads.
pub fn too_few_live(config: &RunConfig, few: LiveLimitTooLow) -> Error {
    let allowed = format!("{} or more, padding included", few.needed);
    let problem = config.problem("parallel.max_live_parameters", few.to_string(), allowed);
    Error::Configuration(problem.into())
}

/// Returns the form and place in which the engine stores weights and optimizer state.
fn storage(config: &RunConfig) -> Storage {
    let parallel = &config.parallel;
    Storage {
        weights: if config.train.master_weights { WeightStorage::Master } else { WeightStorage::Kernels },
        state: config.optimizer.state_precision.into(),
        rounding: config.optimizer.rounding.into(),
        offload: Offload {
            directory: offload_directory(config),
            method: parallel.offload_io.into(),
            limit: Duration::from_secs_f64(parallel.timeout_s),
            ..Offload::default()
        },
    }
}

/// Returns the directory of offloaded state.
pub fn offload_directory(config: &RunConfig) -> PathBuf {
    config.parallel.offload_dir.clone().unwrap_or_else(|| config.checkpoint.dir.clone())
}

/// Moves disk offload to the nearest directory that exists, for runs that leave nothing behind.
pub fn offload_to_existing_directory(config: &mut RunConfig) {
    let directory = ScratchFile::existing_directory(&offload_directory(config));
    config.parallel.offload_dir = Some(directory);
}
