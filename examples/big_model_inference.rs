//! Generation with a model of Hugging Face's, or with the checkpoint of a run: the library call behind `lockstep generate`.
//!
//! ```text
//! cargo run --release --example big_model_inference -- --model DIR --prompt "Once upon a time" --max-memory cpu=2GiB
//! ```
//!
//! With `--max-memory`, modules that do not fit stay on disk and are read ahead of use; the map is printed. `--offload-dir DIR`
//! is for weights in another layout than the model's, such as those of checkpoints.

use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;

use lockstep::generation::{
    Event, InferError, InferencePlan, LoadedModel, MapChoice, ModelDirectory, PlanRequest, Request, Sampling,
    Scheduler, SchedulerOptions, Workload, proportional_bytes,
};

const NEW_TOKENS: usize = 48;
/// Tokens of the prompt and the answer for which memory is planned.
const CONTEXT: usize = 512;

fn generate() -> Result<(), Box<dyn std::error::Error>> {
    let given = lockstep::arguments();
    let value = |name: &str| given.windows(2).find(|pair| pair[0] == name).map(|pair| pair[1].as_str());
    let directory = value("--model").ok_or("--model DIR: a Hugging Face directory, or a checkpoint")?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let model = match value("--max-memory") {
        None => LoadedModel::open(Path::new(directory), threads)?,
        Some(limits) => {
            let directory = ModelDirectory::open(Path::new(directory))?;
            let request = PlanRequest {
                map: MapChoice::Balanced,
                limits: limits.parse()?,
                offload_dir: value("--offload-dir").map(Into::into),
                kv_cache: None,
                activations: None,
                quantize: None,
                workload: Workload::Generation { sequences: 1, context: CONTEXT },
                process_bytes: proportional_bytes(),
                threads,
            };
            let plan = InferencePlan::new(&directory, directory.stored_dtype(), &request)?;
            for ((module, device), row) in plan.map.entries().iter().zip(&plan.modules) {
                eprintln!("{module:40} {device:5} {:>12} bytes {}", row.bytes, plan.dtype());
            }
            eprintln!("{} bytes predicted, {} read for each token", plan.memory.total(), plan.read_bytes(1));
            LoadedModel::load_placed(&directory, plan)?
        }
    };
    let config = model.config();
    eprintln!("{}: {} layers", config.model_type(), config.num_hidden_layers());

    let tokenizer = model.tokenizer()?;
    let prompt = tokenizer.encode(value("--prompt").unwrap_or("fn main"))?;
    let mut tokens = prompt.clone();
    let room = config.max_position_embeddings().saturating_sub(prompt.len());
    let requests =
        [Request { prompt, max_new_tokens: NEW_TOKENS.min(room), sampling: Sampling::greedy(), kept: None }];
    let cache_tokens = Scheduler::cache_tokens(&model, &requests, 1)?;
    let options = SchedulerOptions { max_sequences: 1, max_step_tokens: model.chunk_tokens(), cache_tokens };
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
