//! The parity matrix: tiny models under every plan, held against one rank.
//!
//! A [`Workbench`] has a text and runs configurations on it, with ranks that are threads over the same shared memory as
//! processes. Whatever differs comes with the command that shows it again.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use lockstep_comm::{World, WorldOptions};
use lockstep_train::interrupt::Interrupt;
use lockstep_train::verify::{
    Comparison, Numbers, SAMPLE_RUN, TINY_LLAMA, Tolerance, alone, numbers, sample_text,
};
use lockstep_train::{Error, Ranks, RunConfig};

/// A model of the matrix, as a run's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TinyModel {
    /// What it is called in messages.
    pub name: &'static str,
    /// Its settings.
    pub settings: &'static [&'static str],
}

/// Learned positions, LayerNorm, tied embeddings, biases, dropout in all its places.
pub const GPT2: TinyModel = TinyModel {
    name: "gpt2",
    settings: &[
        "model.preset=baby-gpt",
        "model.n_layer=4",
        "model.n_embd=32",
        "model.n_head=4",
        "model.n_positions=16",
        "model.bias=true",
        "train.dropout=0.1",
    ],
};

/// Rotary positions, RMSNorm, grouped-query attention, tied embeddings.
pub const LLAMA: TinyModel = TinyModel { name: "llama", settings: &TINY_LLAMA };

/// Norms of queries and keys, an output layer of its own.
pub const QWEN3: TinyModel = TinyModel {
    name: "qwen3",
    settings: &[
        "model.preset=qwen3-0.6b",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=8",
        "model.num_key_value_heads=4",
        "model.head_dim=8",
        "model.max_position_embeddings=16",
        "model.tie_word_embeddings=false",
    ],
};

/// As Llama, and no position sees further back than its window.
pub const MISTRAL: TinyModel = TinyModel {
    name: "mistral",
    settings: &[
        "model.model_type=mistral",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "model.max_position_embeddings=16",
        "model.sliding_window=5",
    ],
};

/// All models of the matrix.
pub const MODELS: [TinyModel; 3] = [GPT2, LLAMA, QWEN3];

/// A text, and what one rank has computed on it.
pub struct Workbench {
    dir: tempfile::TempDir,
    alone: Mutex<HashMap<Vec<String>, Numbers>>,
}

impl Workbench {
    /// A workbench with conversations, of which the prompts do not count: ranks differ in their valid tokens.
    ///
    /// # Errors
    /// What the system says.
    pub fn new() -> io::Result<Self> {
        let dir = tempfile::tempdir()?;
        std::fs::write(dir.path().join("text.jsonl"), sample_text())?;
        Ok(Self { dir, alone: Mutex::default() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The configuration of a run of `model` with some more settings.
    ///
    /// # Errors
    /// [`Error::Configuration`].
    pub fn config(&self, model: TinyModel, settings: &[&str]) -> Result<RunConfig, Error> {
        let text = format!(
            "[data]\ntrain = [{:?}]\ncache_dir = {:?}\n{SAMPLE_RUN}",
            self.path("text.jsonl"),
            self.path("cache"),
        );
        let settings: Vec<&str> =
            model.settings.iter().chain(&["train.steps=1"]).chain(settings).copied().collect();
        Ok(RunConfig::parse(&text, "the parity matrix", &settings)?)
    }

    /// What a run with these settings computes, on as many ranks as they say.
    ///
    /// # Errors
    /// What keeps any rank from running.
    pub fn numbers(&self, config: &RunConfig) -> Result<Numbers, Error> {
        let ranks = config.ranks();
        if ranks == 1 {
            let found = numbers(config, &Ranks::alone(), &Interrupt::default())?;
            return Ok(found.unwrap_or_default());
        }
        let options = WorldOptions { arena_bytes: 1 << 28, ..WorldOptions::default() };
        let groups = World::in_process(ranks, options)?;
        let of_ranks: Vec<Result<Option<Numbers>, Error>> = std::thread::scope(|scope| {
            let rank =
                |group| scope.spawn(|| numbers(config, &Ranks::of(group, config)?, &Interrupt::default()));
            let threads: Vec<_> = groups.into_iter().map(rank).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        let found: Result<Vec<Option<Numbers>>, Error> = of_ranks.into_iter().collect();
        Ok(found?.into_iter().flatten().next().unwrap_or_default())
    }

    /// Where a plan's numbers lie too far from those of one rank, a line for each with the command that shows it at the end.
    ///
    /// # Errors
    /// What keeps any rank from running.
    pub fn differences(
        &self,
        model: TinyModel,
        plan: &[&str],
        tolerance: Tolerance,
    ) -> Result<Vec<String>, Error> {
        let config = self.config(model, plan)?;
        let found = self.numbers(&config)?;
        let alone_config = alone(&config);
        let key: Vec<String> = model
            .settings
            .iter()
            .chain(plan.iter().filter(|setting| !setting.starts_with("parallel.")))
            .map(ToString::to_string)
            .collect();
        let known = self.alone.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        let expected = match known {
            Some(known) => known,
            None => {
                let expected = self.numbers(&alone_config)?;
                self.alone.lock().unwrap_or_else(PoisonError::into_inner).insert(key, expected.clone());
                expected
            }
        };
        let mut lines = Comparison::of_f32(&found, &expected, tolerance).failures;
        if !lines.is_empty() {
            let set = model.settings.iter().chain(plan).map(|setting| format!(" --set {setting}"));
            lines.push(format!("again: lockstep verify{}", set.collect::<String>()));
        }
        Ok(lines)
    }
}
