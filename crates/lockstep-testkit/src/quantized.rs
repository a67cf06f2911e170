//! Checks of quantized gradients and weights; each reports the numbers that violate it.
//!
//! A plan that quantizes cannot reproduce the numbers of one rank, so it is not part of the parity matrix. These checks
//! cover the properties that it does guarantee, on engines whose ranks are threads.

use std::thread;
use std::time::Duration;

use lockstep_comm::{World, WorldOptions};
use lockstep_engine::{Engine, EngineOptions, Groups, HostBatch, Traffic};
use lockstep_graph::{BlockShape, Seed};
use lockstep_model::ModelConfig;
use lockstep_plan::{
    DType, Degrees, MemoryCategory, Plan, QUANTIZATION_BLOCK, Quantization, QuantizedType, ZeroStage,
};
use serde_json::json;

/// Result of a check: an error of the set-up, or a description of the violation.
pub type Found = Result<(), Box<dyn std::error::Error + Send + Sync>>;

const SHAPE: BlockShape = BlockShape { sequences: 1, seq_len: 16, dtype: DType::F32 };
const VOCABULARY: u32 = 64;

/// Parallelism and quantization of a checked plan.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Number of replicas of each shard group.
    pub replicate: usize,
    /// Number of ranks in a shard group.
    pub shard: usize,
    /// ZeRO stage: the state that is sharded.
    pub zero_stage: ZeroStage,
    /// Gradients and weights that are quantized for communication.
    pub quantization: Quantization,
}

impl Case {
    /// Returns the same case without quantization.
    fn exact(self) -> Self {
        Self { quantization: Quantization::default(), ..self }
    }
}

fn model() -> Result<ModelConfig, Box<dyn std::error::Error + Send + Sync>> {
    let config = json!({
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 16, "tie_word_embeddings": false,
    });
    Ok(ModelConfig::from_table(config.as_object().ok_or("no table")?, "test")?)
}

/// Runs `run` on the engine of each rank, with the rank's number, and returns the results by rank.
fn on_ranks<T: Send>(
    case: Case,
    run: impl Fn(&mut Engine, usize) -> Result<T, Box<dyn std::error::Error + Send + Sync>> + Sync,
) -> Result<Vec<T>, Box<dyn std::error::Error + Send + Sync>> {
    let Case { replicate, shard, zero_stage, quantization } = case;
    let model = model()?;
    let plan = Plan {
        mesh: Degrees { replicate, shard, ..Degrees::default() },
        micro_batch: Some(SHAPE.sequences),
        zero_stage: zero_stage.number(),
        quantize_weights: quantization.weights,
        quantize_gradients: quantization.gradients,
        quantize_feedback: quantization.feedback,
        bucket_mb: 1.0,
        ..Plan::default()
    };
    let plan = model.check_plan(&plan, [replicate * shard, SHAPE.seq_len])?;
    let world = WorldOptions { arena_bytes: 1 << 28, cores: 1, ..WorldOptions::default() };
    let groups = World::in_process(plan.mesh().world_size(), world)?;
    thread::scope(|scope| {
        let rank = |group: lockstep_comm::Group| {
            let (run, model, plan) = (&run, &model, &plan);
            scope.spawn(move || {
                let shared = [MemoryCategory::Gradients, MemoryCategory::Communication];
                let (rank, arena) = (group.rank(), group.arena(&shared));
                let plan = plan.rank(rank);
                let groups = Groups::new(group, plan.clone(), Duration::from_secs(60))?;
                let options = EngineOptions { seed: 1, ..EngineOptions::default() };
                let mut engine =
                    Engine::builder(model, plan).groups(groups).options(options).build(&arena)?;
                engine.initialize(1)?;
                run(&mut engine, rank)
            })
        };
        let threads: Vec<_> = groups.into_iter().map(rank).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// Calls `look` with a micro-batch that depends on `rank`.
fn with_batch<T>(rank: usize, look: impl FnOnce(HostBatch<'_>) -> T) -> T {
    let tokens = SHAPE.tokens();
    let ids: Vec<u32> = (0..tokens as u32).map(|i| (i * i + 7 * i + 11 * rank as u32) % VOCABULARY).collect();
    let labels: Vec<i32> = ids.iter().map(|id| ((id * 5 + 3) % VOCABULARY).cast_signed()).collect();
    let positions: Vec<u32> = (0..tokens as u32).collect();
    look(HostBatch {
        ids: &ids,
        labels: &labels,
        positions: &positions,
        document_starts: &vec![0; tokens],
        sample_numbers: &[rank as u64],
        inputs: &[],
    })
}

/// Returns the gradients that a rank owns after a step on the batch of rank `of`.
fn gradients(
    engine: &mut Engine,
    of: usize,
) -> Result<Vec<Vec<f32>>, Box<dyn std::error::Error + Send + Sync>> {
    let seed = Seed::new(1.0 / SHAPE.tokens() as f32, 1.0);
    with_batch(of, |batch| engine.forward_backward(std::iter::once(batch), seed))?;
    Ok(engine.trained_ids().map(|id| engine.gradient(id)).collect::<Result<_, _>>()?)
}

/// Checks that with quantized weights all ranks compute the same loss from the same tokens, and nearly the loss without
/// quantization.
///
/// # Errors
/// If the losses differ; the message gives them.
pub fn ranks_work_with_the_same_weights() -> Found {
    let quantization = Quantization { weights: Some(QuantizedType::Int8), ..Quantization::default() };
    let case = Case { replicate: 1, shard: 3, zero_stage: ZeroStage::Parameters, quantization };
    let loss = |engine: &mut Engine, _| Ok(with_batch(0, |batch| engine.evaluate(&batch))?);
    let (found, exact) = (on_ranks(case, loss)?, on_ranks(case.exact(), loss)?);
    if found.iter().any(|loss| loss.to_bits() != found[0].to_bits()) {
        return Err(format!("ranks with quantized weights have the losses {found:?}").into());
    }
    let off = (found[0] / exact[0] - 1.0).abs();
    if off == 0.0 || off > 1e-2 {
        return Err(format!("with quantized weights the loss is {}, without {}", found[0], exact[0]).into());
    }
    Ok(())
}

/// Checks error feedback: with constant weights, the error of the gradients summed over several steps stays about that
/// of a single step.
///
/// # Errors
/// If the error grows; the message gives the error after each step.
pub fn what_one_step_loses_the_next_one_says(case: Case) -> Found {
    const STEPS: usize = 8;
    let lost = lost(case, STEPS)?;
    // Without feedback, every step would add the same error.
    if lost[STEPS - 1] > 2.5 * lost[0] || lost[0] == 0.0 {
        return Err(format!("{case:?}: after each step so much is lost: {lost:?}").into());
    }
    Ok(())
}

/// Returns, for each of `steps` steps, the norm over all ranks of the error in the gradients summed up to that step.
///
/// # Errors
/// If the set-up fails.
pub fn lost(case: Case, steps: usize) -> Result<Vec<f64>, Box<dyn std::error::Error + Send + Sync>> {
    let exact = on_ranks(case.exact(), gradients)?;
    let of_steps = |engine: &mut Engine, rank: usize| -> Result<Vec<f64>, _> {
        let mut sums: Vec<Vec<f64>> = exact[rank].iter().map(|gradient| vec![0.0; gradient.len()]).collect();
        let of_step = |step: usize| {
            for (sum, gradient) in sums.iter_mut().zip(gradients(engine, rank)?) {
                sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += f64::from(g));
            }
            let pairs = sums.iter().flatten().zip(exact[rank].iter().flatten());
            let squares = pairs.map(|(sum, g)| (sum - step as f64 * f64::from(*g)).powi(2));
            Ok(squares.sum::<f64>())
        };
        (1..=steps).map(of_step).collect()
    };
    let of_ranks = on_ranks(case, of_steps)?;
    Ok((0..steps).map(|step| of_ranks.iter().map(|lost| lost[step]).sum::<f64>().sqrt()).collect())
}

/// Checks that each element of a reduced gradient is off by at most half a scale per summand, and that replicas have
/// the same bits.
///
/// # Errors
/// If an element or a replica violates this; the message names it.
pub fn sums_are_within_their_bound(case: Case) -> Found {
    let Some(kind) = case.quantization.gradients else { return Err("nothing is quantized".into()) };
    let ranks = case.replicate * case.shard;
    // All ranks have the same batch, so each rank's summand is an equal part of the sum.
    let of_one_batch = |engine: &mut Engine, _: usize| gradients(engine, 0);
    let (found, exact) = (on_ranks(case, of_one_batch)?, on_ranks(case.exact(), of_one_batch)?);
    for (rank, (found, exact)) in found.iter().zip(&exact).enumerate() {
        for (parameter, (found, exact)) in found.iter().zip(exact).enumerate() {
            for (block, (found, exact)) in
                found.chunks(QUANTIZATION_BLOCK).zip(exact.chunks(QUANTIZATION_BLOCK)).enumerate()
            {
                let largest = exact.iter().fold(0.0_f32, |largest, g| largest.max(g.abs()));
                // Quantized once in the reduction over the shard group. Over replicas, quantized as a summand and as
                // the sum.
                let times = if case.replicate > 1 { 3.2 } else { 1.0 };
                let allowed = times * 0.501 * largest / kind.limit() + 1e-7 * largest;
                let off = |(found, exact): (&f32, &f32)| (found - exact).abs();
                let worst = found.iter().zip(exact).map(off).fold(0.0_f32, f32::max);
                if worst.is_nan() || worst > allowed {
                    return Err(format!(
                        "{case:?}, rank {rank} of {ranks}, parameter {parameter}, block {block}: off by {worst:e}, allowed {allowed:e}"
                    )
                    .into());
                }
            }
        }
    }
    for rank in case.shard..ranks {
        if found[rank] != found[rank % case.shard] {
            return Err(
                format!("{case:?}: rank {rank} has other sums than rank {}", rank % case.shard).into()
            );
        }
    }
    Ok(())
}

/// Returns the traffic of gradients and weights that rank 0 sends in a step.
///
/// # Errors
/// If the set-up fails.
pub fn traffic(case: Case) -> Result<Traffic, Box<dyn std::error::Error + Send + Sync>> {
    let of_step = |engine: &mut Engine, rank: usize| {
        engine.take_traffic();
        gradients(engine, rank)?;
        Ok(engine.take_traffic())
    };
    Ok(on_ranks(case, of_step)?.swap_remove(0))
}
