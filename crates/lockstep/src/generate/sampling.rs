//! Options of sampling, with the defaults of a model's `generation_config.json`.

use clap::Args;
use lockstep_infer::{GenerationConfig, Sampling};

use crate::exit::Failure;

#[derive(Debug, Args)]
pub(super) struct SamplingArguments {
    /// Divides the logits; 0 takes the most likely token [default: generation_config.json, else 1]
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Only the K most likely tokens; 0 for all [default: generation_config.json, else 0]
    #[arg(long)]
    top_k: Option<usize>,
    /// Only the most likely tokens that together have this probability [default: generation_config.json, else 1]
    #[arg(long)]
    top_p: Option<f32>,
    /// Only tokens with at least this fraction of the most likely one's probability [default: generation_config.json, else 0]
    #[arg(long, allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Divides positive logits of tokens in the prompt or the output, and multiplies negative ones [default:
    /// generation_config.json, else 1]
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// Subtracted from a token's logit for each of its occurrences in the output
    #[arg(long, value_name = "F", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Subtracted from the logits of tokens that occur in the output
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Added to the logit of a token, as ID=BIAS or several with commas
    #[arg(long, value_name = "ID=BIAS", value_delimiter = ',', value_parser = bias)]
    logit_bias: Vec<(u32, f32)>,
    /// Search with this many beams instead of sampling; -n takes the N best texts [default: generation_config.json, else 1]
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u64).range(1..=1024),
        conflicts_with_all = ["temperature", "top_k", "top_p", "min_p", "logit_bias", "logprobs", "sliding_window"]
    )]
    num_beams: Option<u64>,
    /// Exponent of the length by which a beam's log-probability is divided [default: generation_config.json, else 1]
    #[arg(long, value_name = "E", requires = "num_beams", allow_negative_numbers = true)]
    length_penalty: Option<f32>,
    /// End a beam search as soon as there are as many complete texts as beams
    #[arg(long, requires = "num_beams")]
    early_stopping: bool,
    /// With --json: log-probabilities of each token and of the N most likely ones
    #[arg(long, value_name = "N", requires = "json", value_parser = clap::value_parser!(u64).range(..=20))]
    logprobs: Option<u64>,
}

/// Settings of a beam search.
pub(super) struct BeamSettings {
    pub(super) beams: usize,
    pub(super) length_penalty: f32,
    pub(super) early_stopping: bool,
}

/// Reads `ID=BIAS`.
fn bias(text: &str) -> Result<(u32, f32), String> {
    text.split_once('=')
        .and_then(|(id, bias)| Some((id.trim().parse().ok()?, bias.trim().parse().ok()?)))
        .ok_or_else(|| "allowed: a token id, =, and a number, as in 50256=-100".to_owned())
}

impl SamplingArguments {
    /// Returns the settings of a beam search if the command line asks for one, or else the model does.
    pub(super) fn beams(&self, config: &GenerationConfig) -> Option<BeamSettings> {
        let samples = self.temperature.is_some() || config.samples == Some(true);
        let of_model = config.num_beams.filter(|_| !samples);
        let beams = self.num_beams.map(|beams| beams as usize).or(of_model).filter(|beams| *beams > 1)?;
        Some(BeamSettings {
            beams,
            length_penalty: self.length_penalty.or(config.length_penalty).unwrap_or(1.0),
            early_stopping: self.early_stopping || config.early_stopping == Some(true),
        })
    }

    /// Returns the settings of the command line, else those of the model, else the neutral ones.
    pub(super) fn resolve(&self, config: &GenerationConfig, seed: u64) -> Result<Sampling, Failure> {
        let draws = config.samples != Some(false) || self.temperature.is_some();
        let of_config = |value: Option<f32>| value.filter(|_| draws);
        let sampling = Sampling {
            temperature: self.temperature.or(of_config(config.temperature)).unwrap_or(f32::from(draws)),
            top_k: self.top_k.or(config.top_k.filter(|_| draws)).unwrap_or(0),
            top_p: self.top_p.or(of_config(config.top_p)).unwrap_or(1.0),
            min_p: self.min_p.or(of_config(config.min_p)).unwrap_or(0.0),
            // Penalties change what is most likely, so they hold without sampling as well.
            repetition_penalty: self.repetition_penalty.or(config.repetition_penalty).unwrap_or(1.0),
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            logit_bias: self.logit_bias.clone(),
            logprobs: self.logprobs.map(|count| count as usize),
            seed,
        };
        sampling.check()?;
        Ok(sampling)
    }
}
