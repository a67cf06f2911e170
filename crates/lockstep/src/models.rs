//! `lockstep models`: lists the model presets.

use std::process::ExitCode;

use clap::Args;
use lockstep_config::human;
use lockstep_model::{ModelConfig, Preset, presets};
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::output::say;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Only presets whose name contains this, e.g. llama3
    name: Option<String>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let wanted = arguments.name.as_deref().unwrap_or_default().to_lowercase();
    let found: Vec<(&Preset, ModelConfig)> = presets()
        .iter()
        .filter(|preset| preset.name.contains(&wanted))
        .map(|preset| Ok((preset, preset.config()?)))
        .collect::<Result<_, Failure>>()?;
    if found.is_empty() {
        return Err(Failure::configuration(format!(
            "no preset's name contains \"{wanted}\"; `lockstep models` lists them all, and a directory with a config.json \
             is a model too (model.path)"
        )));
    }
    if arguments.json {
        let models: Vec<Value> = found.iter().map(|(preset, config)| described(preset, config)).collect();
        say!("{}", json!({ "models": models }));
        return Ok(ExitCode::SUCCESS);
    }
    say!(
        "{:<17} {:>10}  {:<10}  {:>9}  {:>10}  what",
        "name",
        "parameters",
        "shape",
        "context",
        "vocabulary"
    );
    for (preset, config) in &found {
        say!(
            "{:<17} {:>10}  {:<10}  {:>9}  {:>10}  {}",
            preset.name,
            human::billions(config.parameter_count() as f64).to_string(),
            format!("{} × {}", config.num_hidden_layers(), config.hidden_size()),
            human::thousands(config.max_position_embeddings() as u64),
            human::thousands(config.vocab_size() as u64),
            preset.about(),
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn described(preset: &Preset, config: &ModelConfig) -> Value {
    json!({
        "name": preset.name, "about": preset.about(), "model_type": config.model_type(),
        "parameters": config.parameter_count(), "num_hidden_layers": config.num_hidden_layers(),
        "hidden_size": config.hidden_size(), "max_position_embeddings": config.max_position_embeddings(),
        "vocab_size": config.vocab_size(),
    })
}
