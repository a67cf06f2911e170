//! Rates of all operations of models other than products: steps of small models are timed operation by operation, and compared with
//! the work in their recordings.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use lockstep_engine::{Engine, EngineOptions};
use lockstep_graph::{BlockShape, Span};
use lockstep_model::ModelConfig;
use lockstep_plan::work::{ModelWork, Task, TaskKind};
use lockstep_plan::{DType, MemoryCategory, Plan};
use lockstep_tensor::{Arena, CopyKernels, CpuQueue, Tensor, TensorError};
use serde_json::json;

use crate::Error;
use crate::benchmark::{RandomTokens, SEED, make_step};

const SEQUENCES: usize = 2;
/// Bytes per parameter of an AdamW step, including the gradient norm, as the planner counts them.
const UPDATE_BYTES: f64 = 30.0;

/// Rates by operation and pass, in GB/s or GFLOP/s.
pub(super) type Rates = BTreeMap<String, f64>;

/// An amount of work in bytes or FLOPs, and its seconds.
type Taken = (f64, f64);

/// Returns models that contain every operation of their families: GPT-2, Llama with grouped-query attention, Mixtral, and Qwen3
/// with its norms.
fn models(seq_len: usize) -> Result<Vec<ModelConfig>, Error> {
    let llama = |model_type: &str| {
        json!({
            "model_type": model_type, "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024,
            "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
            "max_position_embeddings": seq_len,
        })
    };
    let gpt2 = json!({
        "model_type": "gpt2", "vocab_size": 2048, "n_embd": 512, "n_layer": 2, "n_head": 8, "n_positions": seq_len,
    });
    let (mut mixtral, mut qwen3) = (llama("mixtral"), llama("qwen3"));
    mixtral["intermediate_size"] = json!(512);
    mixtral["num_local_experts"] = json!(4);
    mixtral["num_experts_per_tok"] = json!(2);
    qwen3["head_dim"] = json!(64);
    qwen3["num_hidden_layers"] = json!(1);
    let model = |table: serde_json::Value| {
        Ok(ModelConfig::from_table(table.as_object().expect("a table"), "machine")?)
    };
    [gpt2, llama("llama"), mixtral, qwen3].into_iter().map(model).collect()
}

/// Measures the rates of all tasks of steps in `dtype` on `threads` threads. For each kind of task the median of `steps` counts.
///
/// # Errors
/// If memory or threads cannot be had.
pub(super) fn measure(threads: usize, dtype: DType, seq_len: usize, steps: usize) -> Result<Rates, Error> {
    let shape = BlockShape { sequences: SEQUENCES, seq_len, dtype };
    let mut all: BTreeMap<String, Taken> = BTreeMap::new();
    for model in models(seq_len)? {
        for (name, (amount, seconds)) in of_model(&model, threads, shape, steps)? {
            let taken = all.entry(name).or_default();
            taken.0 += amount;
            taken.1 += seconds;
        }
    }
    let rate = |(name, (amount, seconds)): (String, Taken)| Some((name, positive(amount / seconds / 1e9)?));
    let mut rates: Rates = all.into_iter().filter_map(rate).collect();
    // Recomputation runs at the rate of the forward.
    let again = |(name, rate): (&String, &f64)| {
        Some((format!("{} recompute", name.strip_suffix(" forward")?), *rate))
    };
    let recomputed: Vec<_> = rates.iter().filter_map(again).collect();
    rates.extend(recomputed);
    Ok(rates)
}

/// Returns the rate if it is usable: some tasks are shorter than the clock's resolution.
fn positive(rate: f64) -> Option<f64> {
    (rate.is_finite() && rate > 1e-6).then_some(rate)
}

/// Times a step of one model: its tasks by name and pass, and its optimizer step.
fn of_model(
    model: &ModelConfig,
    threads: usize,
    shape: BlockShape,
    steps: usize,
) -> Result<BTreeMap<String, Taken>, Error> {
    let plan = Plan { micro_batch: Some(shape.sequences), ..Plan::default() };
    let plan = model.check_plan(&plan, [shape.sequences, shape.seq_len])?.rank(0);
    let options = EngineOptions { dtype: shape.dtype, seed: SEED, threads, ..EngineOptions::default() };
    let mut engine = Engine::builder(model, plan).options(options).build(&Arena::new())?;
    engine.initialize(SEED)?;
    let mut timed = Vec::with_capacity(steps);
    for step in 0..=steps {
        let batch = [RandomTokens::new(model, shape, step)];
        engine.timeline().start();
        make_step(&mut engine, &batch, shape.tokens(), step as u64 + 1)?;
        let spans = engine.timeline().stop();
        if step > 0 {
            timed.push(seconds_by_name(&spans));
        }
    }
    let middle = |name: &str| {
        let mut seconds: Vec<f64> = timed.iter().map(|step| step.get(name).copied().unwrap_or(0.0)).collect();
        seconds.sort_by(f64::total_cmp);
        seconds.get(seconds.len() / 2).copied().unwrap_or(f64::INFINITY)
    };
    let mut taken: BTreeMap<String, Taken> = amounts(&engine.model().work())
        .into_iter()
        .map(|(name, amount)| (name.clone(), (amount, middle(&name))))
        .collect();
    let elements: usize = engine.records().iter().map(|record| record.elements()).sum();
    let seconds = middle("optimizer") + middle("gradient norm");
    taken.insert("update".to_owned(), (UPDATE_BYTES * elements as f64, seconds));
    Ok(taken)
}

fn seconds_by_name(spans: &[Span]) -> BTreeMap<String, f64> {
    let mut seconds = BTreeMap::new();
    for span in spans {
        let name = match span.activity.pass {
            Some(pass) => format!("{} {}", span.activity.name, pass.name()),
            None => span.activity.name.to_owned(),
        };
        *seconds.entry(name).or_default() += span.duration.as_secs_f64();
    }
    seconds
}

/// Returns the FLOPs of attention and the bytes of all other operations but products, by name and pass. Operations that contain
/// products are left out: their time cannot be separated.
fn amounts(work: &ModelWork) -> BTreeMap<String, f64> {
    let name = |task: &Task| format!("{} {}", task.name, task.pass.name());
    let units = (0..work.units()).map(|unit| work.unit(unit));
    let tasks: Vec<&Task> = units.flat_map(|unit| unit.forward.iter().chain(&unit.backward)).collect();
    let of_products: BTreeSet<String> = tasks
        .iter()
        .filter(|task| matches!(task.kind, TaskKind::Product(_)))
        .map(|task| name(task))
        .collect();
    let mut amounts = BTreeMap::new();
    for task in tasks {
        let amount = match task.kind {
            TaskKind::Attention(attention) => attention.flops,
            TaskKind::Stream => task.bytes,
            TaskKind::Product(_) | TaskKind::Exchange(_) => continue,
        };
        let name = name(task);
        if amount > 0 && !of_products.contains(&name) {
            *amounts.entry(name).or_default() += amount as f64;
        }
    }
    amounts
}

/// Measures the microseconds of a task that does almost nothing.
///
/// # Errors
/// If memory runs out.
pub(super) fn launch_us(queue: &CpuQueue, arena: &Arena) -> Result<f64, TensorError> {
    const TASKS: usize = 2000;
    let from = Tensor::zeros(arena, DType::F32, [1, 16], MemoryCategory::Workspace)?;
    let to = Tensor::zeros(arena, DType::BF16, [1, 16], MemoryCategory::Workspace)?;
    let begin = Instant::now();
    for _ in 0..TASKS {
        queue.cast(from.view(), to.view());
    }
    Ok(begin.elapsed().as_secs_f64() * 1e6 / TASKS as f64)
}

#[cfg(test)]
mod tests {
    use lockstep_graph::Mode;
    use lockstep_model::{HeadOutput, RecordedModel};

    use super::*;

    #[test]
    fn every_task_of_the_families_presets_is_met() {
        let work_of = |model: &ModelConfig| {
            let shape = BlockShape { sequences: 1, seq_len: 64, dtype: DType::F32 };
            let recompute = lockstep_graph::Recompute::None;
            RecordedModel::new(model, Mode::Training, shape, recompute, HeadOutput::Losses).work()
        };
        let met: BTreeSet<String> =
            models(64).unwrap().iter().flat_map(|model| amounts(&work_of(model)).into_keys()).collect();
        for preset in ["baby-gpt", "llama-15m", "mixtral-20m"] {
            let model = ModelConfig::preset(preset).unwrap();
            for name in amounts(&work_of(&model)).into_keys() {
                assert!(met.contains(&name), "{preset} has {name}; met are {met:?}");
            }
        }
        for name in ["attention forward", "attention backward inputs"] {
            assert!(met.contains(name), "{name} in {met:?}");
        }
    }
}
