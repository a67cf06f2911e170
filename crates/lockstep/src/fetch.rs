//! `lockstep fetch`: downloads models into the cache of Hugging Face.

use std::process::ExitCode;

use clap::Args;
use lockstep_config::{Need, fetch_model};

use crate::exit::Failure;
use crate::output::say;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Repositories: org/name, org/name@revision, hf://org/name/file.gguf
    #[arg(required = true, value_name = "MODEL")]
    models: Vec<String>,
    /// Leave the weights out: configuration and tokenizer are enough for `lockstep plan`
    #[arg(long)]
    without_weights: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let need = if arguments.without_weights { Need::Configuration } else { Need::Weights };
    for model in &arguments.models {
        say!("{}", fetch_model(model, need)?.display());
    }
    Ok(ExitCode::SUCCESS)
}
