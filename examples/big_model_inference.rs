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

use lockstep::generation::{Event, InferError, LoadedModel, Request, Sampling, Scheduler, SchedulerOptions};

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
    let mut tokens = prompt.clone();
    let room = config.max_position_embeddings().saturating_sub(prompt.len());
    let requests =
        [Request { prompt, max_new_tokens: NEW_TOKENS.min(room), sampling: Sampling::greedy(), kept: None }];
    let cache_tokens = Scheduler::cache_tokens(&model, &requests, 1)?;
    let options = SchedulerOptions {
        max_sequences: 1,
        max_step_tokens: SchedulerOptions::MAX_STEP_TOKENS,
        cache_tokens,
    };
    let mut scheduler = Scheduler::new(&model, options)?;
    for request in requests {
        scheduler.add(request)?;
    }
    scheduler.run::<InferError>(|_, event| {
        if let Event::Token(token) = event {
            tokens.push(token.id);
        }
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
