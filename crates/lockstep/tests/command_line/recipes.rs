//! Every file in `recipes/` runs: two steps with a small model, on data in the format that it names.

use std::fs;
use std::path::{Path, PathBuf};

use lockstep::samples::write_synthetic_cifar10;

use crate::workshop::Workshop;

/// A recipe, and settings that make it small.
struct Recipe {
    name: &'static str,
    smaller: &'static [&'static str],
}

const GPT2: [&str; 3] = ["model.n_layer=2", "model.n_head=2", "model.n_embd=32"];

const LLAMA: &[&str] = &[
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "train.seq_len=64",
];

/// The recipes in order; the first one produces the model from which the fine-tuning ones start.
const RECIPES: &[Recipe] = &[
    Recipe { name: "nanogpt-shakespeare", smaller: &GPT2 },
    Recipe {
        name: "gpt2-124m",
        smaller: &[
            "model.n_layer=2",
            "model.n_head=2",
            "model.n_embd=32",
            "data.tokenizer=bytes",
            "train.seq_len=64",
        ],
    },
    Recipe {
        name: "cifar10-resnet",
        smaller: &["model.embedding_size=4", "model.hidden_sizes=[4, 8]", "model.depths=[1, 1]"],
    },
    Recipe { name: "chat-lora", smaller: &["train.seq_len=256"] },
    Recipe { name: "fine-tune", smaller: &["train.seq_len=256"] },
    Recipe { name: "moe", smaller: LLAMA },
    Recipe { name: "long-context", smaller: LLAMA },
    Recipe { name: "hybrid-4-ranks", smaller: LLAMA },
    Recipe {
        name: "zero-offload",
        smaller: &["model.n_layer=2", "model.n_head=2", "model.n_embd=32", "train.seq_len=64"],
    },
];

/// Settings for two steps without evaluations.
const SHORT: [&str; 8] = [
    "train.steps=2",
    "train.global_batch=4",
    "train.micro_batch=1",
    "train.eval_every=0",
    "train.threads=1",
    "schedule.warmup_steps=1",
    "schedule.decay_steps=1",
    "metrics.tensorboard=false",
];

fn recipes() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes")
}

/// Returns a directory with data under the names in recipes.
fn with_data() -> Workshop {
    let workshop = Workshop::new();
    let text =
        "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer.\n".repeat(400);
    for name in ["tinyshakespeare.txt", "books/a.txt", "openwebtext.txt"] {
        workshop.write(name, &text);
    }
    write_synthetic_cifar10(&workshop.path("cifar-10-batches-bin"), 20, 10, 1).unwrap();
    let chat = r#"{"messages": [{"role": "user", "content": "To be?"}, {"role": "assistant", "content": "Or not to be."}]}"#;
    let instruction = r#"{"prompt": "To be? ", "completion": "Or not to be."}"#;
    workshop.write("chats.jsonl", format!("{chat}\n").repeat(60));
    workshop.write("instructions.jsonl", format!("{instruction}\n").repeat(60));
    workshop
}

#[test]
fn every_recipe_runs() {
    let workshop = with_data();
    let mut files: Vec<String> = fs::read_dir(recipes())
        .unwrap()
        .filter_map(|entry| {
            entry.unwrap().path().file_name()?.to_str()?.strip_suffix(".toml").map(str::to_owned)
        })
        .collect();
    let mut names: Vec<&str> = RECIPES.iter().map(|recipe| recipe.name).collect();
    files.sort_unstable();
    names.sort_unstable();
    assert_eq!(files, names);
    for Recipe { name, smaller } in RECIPES {
        let file = recipes().join(format!("{name}.toml"));
        let own = [format!("checkpoint.dir={name}/checkpoints"), format!("metrics.dir={name}/runs")];
        // Parquet is tested elsewhere.
        let parquet = ["data.train=[\"openwebtext.txt\"]"];
        let data: &[&str] = if *name == "gpt2-124m" { &parquet } else { &[] };
        let settings =
            SHORT.iter().chain(*smaller).chain(data).copied().chain(own.iter().map(String::as_str));
        let arguments: Vec<&str> = ["train", file.to_str().unwrap()]
            .into_iter()
            .chain(settings.flat_map(|setting| ["--set", setting]))
            .collect();
        workshop.run(&arguments).succeeds();
        if *name == "nanogpt-shakespeare" {
            let checkpoint = format!("{name}/checkpoints/step-00000002");
            workshop.run(&["checkpoint", "export", &checkpoint, "--hf", "model"]).succeeds();
        }
    }
}
