//! A decoder of one's own: attention and feed-forward side by side (Wang and Komatsuzaki, 2021), with a table that shards its
//! heads and features, so that tensor and pipeline parallelism apply to it.
//!
//! It learns to repeat: the second half of each sequence is the first half again.
//!
//! ```text
//! cargo run --release --example custom_model -- --nproc_per_node=2 --split tensor
//! ```

use std::ops::Range;
use std::process::ExitCode;

use lockstep::{
    AttentionOptions, AttentionShape, BatchInput, Bias, Constant, Degrees, Engine, Error, Linear, MicroBatch,
    Model, Optimizer, Plan, Recorder, Settings, Sizes, Split, Unit, Value, World,
};
use serde_json::{Map, Value as Json};

const VOCABULARY: usize = 32;
const HIDDEN: usize = 64;
const FEATURES: usize = 256;
const HEADS: usize = 4;
const HEAD_DIM: usize = HIDDEN / HEADS;
const LAYERS: usize = 2;
const SEQ_LEN: usize = 16;
const GLOBAL_BATCH: usize = 32;
const STEPS: usize = 300;
/// The output layer; the others differ in name and width.
const LINEAR: Linear<'_> = Linear { name: "head", out_features: VOCABULARY, bias: Bias::Without, std: 0.05 };

/// A decoder whose blocks add attention and feed-forward to the same norm of the residual stream.
#[derive(Debug)]
struct ParallelDecoder;

impl ParallelDecoder {
    fn linear(g: &mut Recorder, x: Value, name: &str, out_features: usize) -> Value {
        g.linear(x, Linear { name, out_features, ..LINEAR })
    }

    fn block(g: &mut Recorder) -> Value {
        let x = g.input(HIDDEN);
        let normed = g.rms_norm(x, "norm", HIDDEN, 1e-6);
        let [q, k, v] = ["q", "k", "v"].map(|name| Self::linear(g, normed, name, HIDDEN));
        let frequencies = g.constant("frequencies");
        let [q, k] = [q, k].map(|x| g.rope(x, HEAD_DIM, frequencies));
        let shape = AttentionShape::new(HEADS, HEADS, HEAD_DIM);
        let attended = g.attention(q, k, v, shape, AttentionOptions::default());
        let attended = Self::linear(g, attended, "o", HIDDEN);
        let up = Self::linear(g, normed, "up", FEATURES);
        let active = g.relu(up);
        let fed = Self::linear(g, active, "down", HIDDEN);
        let x = g.add(x, attended);
        g.add(x, fed)
    }
}

impl Model for ParallelDecoder {
    fn model_type(&self) -> &str {
        "parallel_decoder"
    }

    /// An embedding, the blocks, and a head.
    fn units(&self) -> Vec<Unit> {
        Unit::decoder("", LAYERS, |layer| (format!("layers.{layer}."), 0))
    }

    fn record(&self, unit: usize, g: &mut Recorder) -> Value {
        match unit {
            0 => g.embedding(BatchInput::Ids, "embedding", VOCABULARY, HIDDEN, 0.05),
            unit if unit <= LAYERS => Self::block(g),
            _ => {
                let x = g.input(HIDDEN);
                let x = g.rms_norm(x, "norm", HIDDEN, 1e-6);
                g.language_model_head(x, LINEAR, None)
            }
        }
    }

    /// The tensor-parallel sharding of weights: the only place that knows of it.
    fn placements(&self) -> Vec<(&'static str, Split)> {
        let (heads, features) =
            (Split::ColumnParallel { pieces: HEADS }, Split::ColumnParallel { pieces: FEATURES });
        let columns = [("q", heads), ("k", heads), ("v", heads), ("up", features)];
        let rows = ["o", "down"].map(|name| (name, Split::RowParallel));
        let tables = ["embedding", "head"].map(|name| (name, Split::VocabularyParallel));
        columns.into_iter().chain(rows).chain(tables).collect()
    }

    fn constants(&self) -> Vec<Constant> {
        let frequency = |pair: usize| 10_000_f32.powf(-2.0 * pair as f32 / HEAD_DIM as f32);
        vec![Constant::new("frequencies", (0..HEAD_DIM / 2).map(frequency).collect())]
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            layers: LAYERS,
            vocab: VOCABULARY,
            hidden: HIDDEN,
            intermediate: FEATURES,
            heads: HEADS,
            key_value_heads: HEADS,
            head_dim: HEAD_DIM,
            positions: SEQ_LEN,
            ..Sizes::default()
        }
    }

    fn table(&self) -> Map<String, Json> {
        Map::new()
    }
}

/// Returns sequences whose second half repeats the first; only the second half counts in the loss.
fn repeats(first: usize, range: Range<usize>) -> MicroBatch {
    let samples = (first + range.start) as u64..(first + range.end) as u64;
    let half = SEQ_LEN / 2 + 1;
    let token =
        |sample: u64, at: usize| (sample * 31 + 7 * (at % half) as u64).wrapping_mul(0x9E37_79B9) >> 9;
    let id = |sample: u64, at: usize| (token(sample, at) % VOCABULARY as u64) as u32;
    let sequences = range.len();
    let tokens = || samples.clone().flat_map(|sample| (0..SEQ_LEN).map(move |at| (sample, at)));
    let label = |(sample, at): (u64, usize)| if at + 1 < half { -100 } else { id(sample, at + 1) as i32 };
    MicroBatch {
        ids: tokens().map(|(sample, at)| id(sample, at)).collect(),
        labels: tokens().map(label).collect(),
        document_starts: vec![0; sequences * SEQ_LEN],
        sample_numbers: samples.clone().collect(),
        sequences,
        seq_len: SEQ_LEN,
        ..MicroBatch::default()
    }
}

fn train(world: &World) -> Result<(), Error> {
    let is_split = |how: &str| lockstep::arguments().windows(2).any(|pair| pair == ["--split", how]);
    let degree = |how: &str| if is_split(how) { world.size() } else { 1 };
    let mesh = Degrees { tensor: degree("tensor"), pipeline: degree("pipeline"), ..Degrees::default() };
    let plan = Plan { mesh, micro_batch: Some(8), ..Plan::default() };
    let optimizer = Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8 };
    let settings =
        Settings { plan, global_batch: GLOBAL_BATCH, seq_len: SEQ_LEN, optimizer, ..Settings::default() };
    let mut engine = Engine::new(world, ParallelDecoder, settings)?;
    for step in 1..=STEPS {
        let first = (step - 1) * GLOBAL_BATCH;
        let batches: Vec<MicroBatch> = engine.shard().map(|range| repeats(first, range)).collect();
        let loss = engine.forward_backward(&batches)?;
        engine.step(3e-3 * (1.0 - step as f64 / STEPS as f64))?;
        if world.is_first() && step % (STEPS / 6) == 0 {
            println!("step {step}: loss {loss:.5}");
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    lockstep::launch(train)
}
