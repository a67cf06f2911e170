//! Fine-tunes a BERT of Hugging Face's into a classifier of sequences: weights of the encoder from its directory, a new head,
//! padding masks, accuracy on sequences that it has not seen.
//!
//! ```text
//! cargo run --release --example finetune_bert -- --nproc_per_node=2 --model DIR
//! ```
//!
//! Without `--model` it takes the tiny BERT of the tests, from the root of the repository. The sequences are made here: of their
//! ids, a majority is from the upper half of the vocabulary (class 1) or from the lower one (class 0).

use std::ops::Range;
use std::path::Path;
use std::process::ExitCode;

use lockstep::{
    Batch, Engine, Error, INPUT_IDS, LABELS, ModelConfig, NamedTensor, Optimizer, Settings, TensorData, World,
};
use serde_json::json;

const SEQ_LEN: usize = 12;
const GLOBAL_BATCH: usize = 32;
const STEPS: usize = 150;
/// Numbers of samples from here on are for the test.
const TEST: u64 = 1 << 32;

/// Reads the directory's configuration as that of a classifier of two classes.
fn classifier(directory: &Path) -> Result<ModelConfig, Error> {
    let keys = json!({ "architectures": ["BertForSequenceClassification"], "num_labels": 2 });
    let keys = keys.as_object().cloned().unwrap_or_default();
    let pretrained = ModelConfig::from_file(&directory.join("config.json"))?;
    Ok(pretrained.with_overrides(&keys, "the classifier")?)
}

/// Makes samples: ids behind a first token that the classifier reads, padding, and the class.
fn samples(range: Range<u64>, vocabulary: usize) -> Batch {
    let half = vocabulary as u32 / 2;
    let count = (range.end - range.start) as usize;
    let (mut ids, mut mask, mut labels) = (Vec::new(), Vec::new(), Vec::new());
    for sample in range.clone() {
        let random = |at: u64| (sample * 16 + at).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
        let words = 5 + 2 * (random(0) % 4) as usize;
        let upper = random(1) % 2;
        let is_upper = |word: usize| (word < words / 2 + 1) == (upper == 1);
        let id = |word: usize| {
            let offset = random(2 + word as u64) as u32 % (half - 2);
            if is_upper(word) { half + offset } else { 2 + offset }
        };
        ids.push(1);
        ids.extend((0..words).map(id));
        ids.resize(ids.len().next_multiple_of(SEQ_LEN), 0);
        mask.extend((0..SEQ_LEN).map(|at| u32::from(at <= words)));
        labels.push(upper as i32);
    }
    let tokens =
        |name: &str, values: Vec<u32>| NamedTensor::new(name, &[count, SEQ_LEN], TensorData::U32(values));
    let types = vec![0; count * SEQ_LEN];
    let tensors = vec![
        tokens(INPUT_IDS, ids),
        tokens("attention_mask", mask),
        tokens("token_type_ids", types),
        NamedTensor::new(LABELS, &[count], TensorData::I32(labels)),
    ];
    Batch { tensors, sample_numbers: range.collect(), skipped: 0 }
}

fn train(world: &World) -> Result<(), Error> {
    let given = lockstep::arguments();
    let directory = given.windows(2).find(|pair| pair[0] == "--model").map(|pair| pair[1].as_str());
    let directory = Path::new(directory.unwrap_or("tests/fixtures/bert"));
    let model = classifier(directory)?;
    let vocabulary = model.vocab_size();
    let optimizer = Optimizer::AdamW { betas: [0.9, 0.999], eps: 1e-8 };
    let settings = Settings {
        global_batch: GLOBAL_BATCH,
        seq_len: SEQ_LEN,
        optimizer,
        weight_decay: 0.01,
        max_grad_norm: 1.0,
        ..Settings::default()
    };
    let mut engine = Engine::new(world, model, settings)?;
    engine.load(directory)?;
    let shards: Vec<Range<usize>> = engine.shard().collect();
    let global = |first: u64| -> Vec<Batch> {
        let own =
            |range: &Range<usize>| samples(first + range.start as u64..first + range.end as u64, vocabulary);
        shards.iter().map(own).collect()
    };
    for step in 1..=STEPS {
        let loss = engine.forward_backward(&global(((step - 1) * GLOBAL_BATCH) as u64))?;
        engine.step(2e-3 * (1.0 - (step as f64 / STEPS as f64)))?;
        if world.is_first() && step % (STEPS / 5) == 0 {
            println!("step {step}: loss {loss:.4}");
        }
    }
    let loss = engine.evaluate(&global(TEST))?;
    let accuracy = engine.reports().find(|(name, _)| *name == "accuracy").map_or(0.0, |(_, value)| value);
    if world.is_first() {
        println!("test: loss {loss:.4}, accuracy {accuracy:.3}");
    }
    Ok(())
}

fn main() -> ExitCode {
    lockstep::launch(train)
}
