//! Generation with a model of Hugging Face's, or with the checkpoint of a run: the library call behind `lockstep generate`.
//!
//! ```text
//! cargo run --release --example big_model_inference -- --model DIR --prompt "Once upon a time"
//! ```
//!
//! The device map has one device today, the processor's memory. Maps over several devices and disk are not there yet.

use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;

use lockstep::generation::{Generator, InferError, LoadedModel, Sampler, Sampling};

const NEW_TOKENS: usize = 48;

fn generate() -> Result<(), Box<dyn std::error::Error>> {
    let given = lockstep::arguments();
    let value = |name: &str| given.windows(2).find(|pair| pair[0] == name).map(|pair| pair[1].as_str());
    let directory = value("--model").ok_or("--model DIR: a Hugging Face directory, or a checkpoint")?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let model = LoadedModel::open(Path::new(directory), threads)?;
    let config = model.config();
    eprintln!("{}: {} layers on cpu", config.model_type(), config.num_hidden_layers());

    let tokenizer = model.tokenizer()?;
    let prompt = tokenizer.encode(value("--prompt").unwrap_or("fn main"))?;
    let capacity = (prompt.len() + NEW_TOKENS).min(config.max_position_embeddings());
    let mut generator = Generator::new(&model, capacity)?.sliding(capacity / 2);
    let mut sampler = Sampler::new(Sampling { temperature: 0.0, ..Sampling::default() })?;
    let mut tokens = prompt.clone();
    generator.generate::<InferError>(&prompt, NEW_TOKENS, &mut sampler, |token| {
        tokens.push(token);
        Ok(ControlFlow::Continue(()))
    })?;
    println!("{}", tokenizer.decode(&tokens)?);
    Ok(())
}

fn main() -> ExitCode {
    match generate() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
