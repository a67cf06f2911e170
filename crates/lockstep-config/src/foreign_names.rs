//! Names from other tools: one table in which each is either an alias of a name here, or has a sentence that says what to write instead.
//!
//! Keys are accepted in every section but `[model]`, whose other keys are those of a `config.json`; it has a list of its own.
//! Values belong to one key. Flags and commands are looked up when the command line does not know them.

use serde_json::Value;

use crate::keys::{KEYS, SECTIONS};
use crate::value::ValueType;

/// The place where a name is typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A key of RUN.toml or of `--set`, in any section but `[model]`.
    Key,
    /// A key of `[model]`.
    ModelKey,
    /// The value of this key.
    Value(&'static str),
    /// A flag, without its dashes.
    Flag,
    /// A command of `lockstep`.
    Command,
    /// The name of a model.
    Model,
}

/// The answer to a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The name is an alias of this one and works.
    Is(&'static str),
    /// Instructions on what to write instead.
    Write(&'static str),
}

/// A name from another tool, with the answer to it.
#[derive(Debug, Clone, Copy)]
pub struct ForeignName {
    /// The place where it is typed.
    pub place: Place,
    /// The name in lower case, with underscores in keys and dashes in flags.
    pub typed: &'static str,
    /// The answer to the name.
    pub answer: Answer,
}

const fn key(typed: &'static str, ours: &'static str) -> ForeignName {
    ForeignName { place: Place::Key, typed, answer: Answer::Is(ours) }
}

const fn no_key(typed: &'static str, sentence: &'static str) -> ForeignName {
    ForeignName { place: Place::Key, typed, answer: Answer::Write(sentence) }
}

const fn no_model_key(typed: &'static str, sentence: &'static str) -> ForeignName {
    ForeignName { place: Place::ModelKey, typed, answer: Answer::Write(sentence) }
}

const fn value(of: &'static str, typed: &'static str, ours: &'static str) -> ForeignName {
    ForeignName { place: Place::Value(of), typed, answer: Answer::Is(ours) }
}

const fn no_value(of: &'static str, typed: &'static str, sentence: &'static str) -> ForeignName {
    ForeignName { place: Place::Value(of), typed, answer: Answer::Write(sentence) }
}

const fn flag(typed: &'static str, sentence: &'static str) -> ForeignName {
    ForeignName { place: Place::Flag, typed, answer: Answer::Write(sentence) }
}

const fn command(typed: &'static str, sentence: &'static str) -> ForeignName {
    ForeignName { place: Place::Command, typed, answer: Answer::Write(sentence) }
}

const fn model(typed: &'static str, ours: &'static str) -> ForeignName {
    ForeignName { place: Place::Model, typed, answer: Answer::Is(ours) }
}

const BATCH: &str = "train.global_batch for the sequences of a step over all ranks, train.micro_batch for those of one forward and backward";
const EPOCHS: &str = "train.steps; an epoch has as many as the data has tokens / (train.global_batch x train.seq_len): `lockstep data show` counts them";
const MODEL: &str = "model.preset = \"NAME\" (`lockstep models` lists them) or model.path = \"DIR\", with model.from_pretrained = true for its weights";
const LAYERS: &str = "model.num_hidden_layers, for GPT-2 model.n_layer";
const HEADS: &str = "model.num_attention_heads, for GPT-2 model.n_head";
const WIDTH: &str = "model.hidden_size, for GPT-2 model.n_embd";
const FEED_FORWARD: &str = "model.intermediate_size, for GPT-2 model.n_inner";
const SHARDING: &str = "parallel.zero_stage: 3 for FULL_SHARD, 3 with reshard_after_forward = \"never\" for SHARD_GRAD_OP, 0 for NO_SHARD; HYBRID_SHARD is 3 with parallel.data_parallel_replicate";
const PRECISION: &str = "train.precision = \"bf16\" (or \"f16\", \"f32\")";

/// Names from other tools, by place.
pub const FOREIGN_NAMES: &[ForeignName] = &[
    // Keys.
    key("lr", "optimizer.lr"),
    key("learning_rate", "optimizer.lr"),
    key("max_lr", "optimizer.lr"),
    key("wd", "optimizer.weight_decay"),
    key("adam_eps", "optimizer.eps"),
    key("adam_epsilon", "optimizer.eps"),
    key("max_steps", "train.steps"),
    key("num_steps", "train.steps"),
    key("max_iters", "train.steps"),
    key("train_iters", "train.steps"),
    key("train_batch_size", "train.global_batch"),
    key("global_batch_size", "train.global_batch"),
    key("micro_batch_size", "train.micro_batch"),
    key("per_device_train_batch_size", "train.micro_batch"),
    key("train_micro_batch_size_per_gpu", "train.micro_batch"),
    key("seq_length", "train.seq_len"),
    key("sequence_length", "train.seq_len"),
    key("sequence_len", "train.seq_len"),
    key("max_length", "train.seq_len"),
    key("max_seq_len", "train.seq_len"),
    key("max_seq_length", "train.seq_len"),
    key("block_size", "train.seq_len"),
    key("context_length", "train.seq_len"),
    key("cutoff_len", "train.seq_len"),
    key("dtype", "train.precision"),
    key("mixed_precision", "train.precision"),
    key("grad_clip", "train.max_grad_norm"),
    key("clip_grad", "train.max_grad_norm"),
    key("gradient_clipping", "train.max_grad_norm"),
    key("logging_steps", "train.log_every"),
    key("log_interval", "train.log_every"),
    key("steps_per_print", "train.log_every"),
    key("eval_interval", "train.eval_every"),
    key("eval_iters", "train.eval_steps"),
    key("random_seed", "train.seed"),
    key("lr_scheduler_type", "schedule.kind"),
    key("lr_scheduler", "schedule.kind"),
    key("num_warmup_steps", "schedule.warmup_steps"),
    key("warmup_iters", "schedule.warmup_steps"),
    key("lr_warmup_iters", "schedule.warmup_steps"),
    key("save_steps", "checkpoint.every"),
    key("save_interval", "checkpoint.every"),
    key("save_total_limit", "checkpoint.keep"),
    key("output_dir", "checkpoint.dir"),
    key("out_dir", "checkpoint.dir"),
    key("logging_dir", "metrics.dir"),
    key("train_file", "data.train"),
    key("data_path", "data.train"),
    key("train_data", "data.train"),
    key("validation_file", "data.valid"),
    key("validation_data", "data.valid"),
    key("tokenizer_path", "data.tokenizer"),
    key("tensor_model_parallel_size", "parallel.tensor_parallel"),
    key("tensor_parallel_size", "parallel.tensor_parallel"),
    key("tp_size", "parallel.tensor_parallel"),
    key("pipeline_model_parallel_size", "parallel.pipeline_parallel"),
    key("pipeline_parallel_size", "parallel.pipeline_parallel"),
    key("pp_size", "parallel.pipeline_parallel"),
    key("context_parallel_size", "parallel.context_parallel"),
    key("cp_size", "parallel.context_parallel"),
    key("expert_model_parallel_size", "parallel.expert_parallel"),
    key("lora_r", "fine_tune.lora_rank"),
    key("r", "fine_tune.lora_rank"),
    key("target_modules", "fine_tune.lora_targets"),
    no_key("batch_size", BATCH),
    no_key("batch", BATCH),
    no_key(
        "gradient_accumulation_steps",
        "train.global_batch; micro-batches are accumulated until it is full: global_batch / micro_batch / ranks",
    ),
    no_key(
        "grad_accum",
        "train.global_batch; micro-batches are accumulated until it is full: global_batch / micro_batch / ranks",
    ),
    no_key("epochs", EPOCHS),
    no_key("num_epochs", EPOCHS),
    no_key("num_train_epochs", EPOCHS),
    no_key("warmup_ratio", "schedule.warmup_steps, a number of steps"),
    no_key("min_lr", "schedule.min_lr_ratio, a share of optimizer.lr: 0.1 ends at a tenth"),
    no_key("beta1", "optimizer.betas = [beta1, beta2]"),
    no_key("beta2", "optimizer.betas = [beta1, beta2]"),
    no_key("adam_beta1", "optimizer.betas = [beta1, beta2]"),
    no_key("adam_beta2", "optimizer.betas = [beta1, beta2]"),
    no_key("fp16", PRECISION),
    no_key("bf16", PRECISION),
    no_key("fp32", PRECISION),
    no_key("gradient_checkpointing", "parallel.recompute = \"full\""),
    no_key("activation_checkpointing", "parallel.recompute = \"full\""),
    no_key("model_name_or_path", "model.path = \"DIR\" with model.from_pretrained = true, or model.preset"),
    no_key("model_name", "model.preset, or model.path = \"DIR\""),
    no_key("base_model", "model.path = \"DIR\" with model.from_pretrained = true"),
    no_key("resume_from_checkpoint", "`lockstep train --resume auto|never|CHECKPOINT`; auto is the default"),
    no_key("deepspeed", "`lockstep train --deepspeed FILE`, or `lockstep import deepspeed FILE -o run.toml`"),
    no_key("fsdp", "parallel.zero_stage = 3"),
    no_key("sharding_strategy", SHARDING),
    no_key("fsdp_sharding_strategy", SHARDING),
    no_key("nnodes", "`lockstep train --nnodes N --rdzv-endpoint HOST:PORT`"),
    no_key("num_gpus", "`lockstep train --nproc-per-node N`"),
    no_key("world_size", "`lockstep train --nproc-per-node N`"),
    no_key("report_to", "nothing: metrics go to metrics.dir as metrics.jsonl and TensorBoard files"),
    no_key("num_workers", "nothing: data is read ahead by itself"),
    no_model_key("name", MODEL),
    no_model_key("model", MODEL),
    no_model_key("model_name", MODEL),
    no_model_key("name_or_path", MODEL),
    no_model_key("_name_or_path", MODEL),
    no_model_key("model_name_or_path", MODEL),
    no_model_key("base_model", MODEL),
    no_model_key("pretrained", MODEL),
    no_model_key("pretrained_model_name_or_path", MODEL),
    no_model_key("checkpoint", MODEL),
    no_model_key("architecture", MODEL),
    no_model_key("layers", LAYERS),
    no_model_key("n_layers", LAYERS),
    no_model_key("num_layers", LAYERS),
    no_model_key("heads", HEADS),
    no_model_key("n_heads", HEADS),
    no_model_key("num_heads", HEADS),
    no_model_key("n_kv_heads", "model.num_key_value_heads"),
    no_model_key("num_query_groups", "model.num_key_value_heads"),
    no_model_key("dim", WIDTH),
    no_model_key("d_model", WIDTH),
    no_model_key("embed_dim", WIDTH),
    no_model_key("d_ff", FEED_FORWARD),
    no_model_key("ffn_dim", FEED_FORWARD),
    no_model_key("ffn_hidden_size", FEED_FORWARD),
    no_model_key(
        "max_seq_len",
        "model.max_position_embeddings for what the model can take, train.seq_len for what it is trained on",
    ),
    no_model_key(
        "block_size",
        "model.max_position_embeddings (GPT-2: model.n_positions) for what the model can take, train.seq_len for what it is trained on",
    ),
    // Values.
    value("train.precision", "fp32", "f32"),
    value("train.precision", "float32", "f32"),
    value("train.precision", "float", "f32"),
    value("train.precision", "no", "f32"),
    value("train.precision", "bfloat16", "bf16"),
    value("train.precision", "bf16-mixed", "bf16"),
    value("train.precision", "fp16", "f16"),
    value("train.precision", "float16", "f16"),
    value("train.precision", "half", "f16"),
    value("train.precision", "16-mixed", "f16"),
    no_value("train.precision", "fp8", "\"bf16\"; fp8 is not available"),
    no_value(
        "train.precision",
        "int8",
        "\"bf16\"; weights are quantized between ranks by parallel.quantize_weights",
    ),
    value("optimizer.kind", "adam", "adamw"),
    value("optimizer.kind", "adamw_torch", "adamw"),
    value("optimizer.kind", "adamw_torch_fused", "adamw"),
    value("optimizer.kind", "adamw_hf", "adamw"),
    value("optimizer.kind", "fusedadam", "adamw"),
    no_value(
        "optimizer.kind",
        "adafactor",
        "\"adamw\" with optimizer.state_precision = \"bf16\", which halves its memory",
    ),
    no_value(
        "optimizer.kind",
        "adamw_8bit",
        "\"adamw\" with optimizer.state_precision = \"bf16\", which halves its memory",
    ),
    no_value("optimizer.kind", "lamb", "\"adamw\", \"lion\" or \"muon\""),
    value("schedule.kind", "cosine_with_warmup", "cosine"),
    value("schedule.kind", "linear_with_warmup", "linear"),
    value("schedule.kind", "constant_with_warmup", "constant"),
    value("schedule.kind", "none", "constant"),
    value("schedule.kind", "warmup_stable_decay", "wsd"),
    no_value("schedule.kind", "inverse_sqrt", "\"wsd\" or \"cosine\""),
    value("data.format", "json", "jsonl"),
    value("data.format", "txt", "text"),
    value("data.format", "bin", "tokens"),
    value("optimizer.state_precision", "fp32", "f32"),
    value("optimizer.state_precision", "bfloat16", "bf16"),
    value("parallel.offload.optimizer", "nvme", "disk"),
    value("parallel.offload.parameters", "nvme", "disk"),
    value("parallel.offload.gradients", "nvme", "disk"),
    value("parallel.offload.activations", "nvme", "disk"),
    value("parallel.context_parallel_method", "ulysses", "all_to_all"),
    value("parallel.context_parallel_method", "alltoall", "all_to_all"),
    value("parallel.context_parallel_method", "allgather", "all_gather"),
    value("parallel.context_parallel_method", "p2p", "ring"),
    no_value("parallel.transport", "nccl", "\"auto\": shared memory within a machine, TCP between machines"),
    no_value("parallel.transport", "gloo", "\"auto\": shared memory within a machine, TCP between machines"),
    // Flags; a flag with the name of a key is answered by that key.
    flag("config", "`lockstep train RUN.toml`: the file is no flag"),
    flag(
        "config-file",
        "`lockstep train RUN.toml`; an Accelerate file goes through `lockstep import accelerate FILE -o run.toml`",
    ),
    flag("deepspeed_config", "`--deepspeed FILE`"),
    flag("num-processes", "`--nproc-per-node N`"),
    flag("num-gpus", "`--nproc-per-node N`"),
    flag("gpus", "`--nproc-per-node N`"),
    flag("devices", "`--nproc-per-node N`"),
    flag("load", "`--resume CHECKPOINT`"),
    flag("resume-from-checkpoint", "`--resume CHECKPOINT`"),
    flag("checkpoint", "`--resume CHECKPOINT` to go on, `--model CHECKPOINT` to use it"),
    flag(
        "model-name-or-path",
        "`--model DIR`; for `train`, `--set model.path=DIR` with `--set model.from_pretrained=true`",
    ),
    flag("max-length", "`--max-new-tokens N`"),
    flag("batch-size", "`--batch B`"),
    flag("num-return-sequences", "`-n N`"),
    flag("do-sample", "`--temperature T`, 0 for none"),
    flag("stream", "nothing: text is shown as it comes"),
    flag(
        "model",
        "`--set model.path=DIR`, with `--set model.from_pretrained=true` for its weights, or `--set model.preset=NAME`",
    ),
    flag("data", "`--set data.train=FILE`"),
    flag("dataset", "`--set data.train=FILE`"),
    flag("max-tokens", "`--max-new-tokens N`"),
    flag("temp", "`--temperature T`"),
    flag("port", "`--rdzv-endpoint HOST:PORT`"),
    // Commands.
    command("export", "`lockstep checkpoint export CHECKPOINT --hf DIR`"),
    command("convert", "`lockstep checkpoint export CHECKPOINT --hf DIR`, or `lockstep checkpoint import`"),
    command(
        "finetune",
        "`lockstep train RUN.toml` with model.path = \"DIR\" and model.from_pretrained = true; docs/fine-tuning.md",
    ),
    command(
        "fine-tune",
        "`lockstep train RUN.toml` with model.path = \"DIR\" and model.from_pretrained = true; docs/fine-tuning.md",
    ),
    command(
        "sft",
        "`lockstep train RUN.toml` with model.path = \"DIR\" and model.from_pretrained = true; docs/fine-tuning.md",
    ),
    command("pretrain", "`lockstep train RUN.toml`"),
    command("launch", "`lockstep train RUN.toml --nproc-per-node N`"),
    command("run", "`lockstep train RUN.toml`"),
    command("resume", "`lockstep train RUN.toml`, which goes on from the newest checkpoint"),
    command("chat", "`lockstep generate --model DIR --chat`"),
    command("infer", "`lockstep generate --model DIR --prompt TEXT`"),
    command("inference", "`lockstep generate --model DIR --prompt TEXT`"),
    command("sample", "`lockstep generate --model DIR --prompt TEXT`"),
    command("evaluate", "`lockstep eval --model DIR --data FILE`"),
    command("test", "`lockstep verify`, or `lockstep eval --model DIR --data FILE`"),
    command("tokenize", "`lockstep data tokenize`"),
    command("preprocess", "`lockstep data tokenize`"),
    command("estimate-memory", "`lockstep plan --model NAME --explain`"),
    command("estimate", "`lockstep plan --model NAME --explain`"),
    command(
        "config",
        "a RUN.toml: docs/configuration.md has its keys; `lockstep import` makes one of a DeepSpeed or Accelerate file",
    ),
    command("init", "a RUN.toml: docs/configuration.md has its keys"),
    command("env", "`lockstep doctor`"),
    command("info", "`lockstep doctor`"),
    command("benchmark", "`lockstep bench step --model NAME`"),
    command("download", "`hf download ORG/NAME` of Hugging Face, whose cache is then found"),
    // Models.
    model("gpt2", "gpt2-124m"),
    model("gpt2-small", "gpt2-124m"),
    model("gpt2-medium", "gpt2-355m"),
    model("gpt2-large", "gpt2-774m"),
    model("gpt2-xl", "gpt2-1558m"),
    model("openai-community/gpt2", "gpt2-124m"),
    model("llama3", "llama3-8b"),
    model("llama-3-8b", "llama3-8b"),
    model("llama-3.1-8b", "llama3-8b"),
    model("llama3.1-8b", "llama3-8b"),
    model("llama-3-70b", "llama3-70b"),
    model("llama-3.1-70b", "llama3-70b"),
    model("llama3.1-70b", "llama3-70b"),
    model("llama-3.1-405b", "llama3-405b"),
    model("llama-3.2-1b", "llama3.2-1b"),
    model("mixtral", "mixtral-8x7b"),
];

/// Returns a name in the form of the table.
fn normal(typed: &str, separator: char) -> String {
    let separated = |c: char| if c == '-' || c == '_' { separator } else { c.to_ascii_lowercase() };
    typed.chars().map(separated).collect()
}

fn find(place: Place, typed: &str) -> Option<Answer> {
    FOREIGN_NAMES.iter().find(|habit| habit.place == place && habit.typed == typed).map(|habit| habit.answer)
}

/// Returns the answer to a key that does not exist here, with a known section or without any.
pub(crate) fn of_key(written: &str) -> Option<Answer> {
    let (section, name) = written.rsplit_once('.').unwrap_or(("", written));
    let root = section.split('.').next().unwrap_or(section);
    let is_known = root.is_empty() || SECTIONS.iter().any(|section| section.name == root);
    if !is_known || KEYS.iter().any(|key| key.name == written) {
        return None;
    }
    let place = if section == "model" { Place::ModelKey } else { Place::Key };
    find(place, &normal(name, '_'))
}

/// Returns the answer to a word that is no value of a key.
pub(crate) fn of_value(key: &str, value_type: ValueType, value: &Value) -> Option<Answer> {
    let word = value.as_str()?.to_ascii_lowercase();
    if let ValueType::Choice { allowed, .. } = value_type
        && let Some(ours) = allowed.iter().find(|ours| **ours == word)
    {
        return Some(Answer::Is(ours));
    }
    let habit = FOREIGN_NAMES.iter().find(|habit| habit.place.is_value_of(key) && habit.typed == word);
    habit.map(|habit| habit.answer)
}

impl Place {
    fn is_value_of(self, key: &str) -> bool {
        matches!(self, Self::Value(of) if of == key)
    }
}

/// Returns the preset that a model's name is an alias of.
pub fn preset_of(name: &str) -> Option<&'static str> {
    match find(Place::Model, &name.to_ascii_lowercase()) {
        Some(Answer::Is(preset)) => Some(preset),
        _ => None,
    }
}

/// Returns the sentence on a flag that a command does not have; `typed` is without its dashes.
pub fn of_flag(typed: &str) -> Option<String> {
    let name = name_of_flag(typed);
    let found = FOREIGN_NAMES
        .iter()
        .find(|habit| habit.place == Place::Flag && normal(habit.typed, '-') == normal(name, '-'));
    if let Some(ForeignName { answer: Answer::Write(sentence), .. }) = found {
        return Some(format!("write {sentence}"));
    }
    None
}

fn name_of_flag(typed: &str) -> &str {
    typed.split('=').next().unwrap_or(typed)
}

/// Returns the `--set` argument that a flag stands for, for commands that have `--set`; `typed` is without its dashes.
pub fn setting_of_flag(typed: &str) -> Option<String> {
    let word = normal(name_of_flag(typed), '_');
    let key = KEYS.iter().find(|key| key.name == word || key.key() == word).map(|key| key.name);
    match key.map(Answer::Is).or_else(|| find(Place::Key, &word))? {
        Answer::Is(key) => Some(format!("write --set {key}=VALUE")),
        Answer::Write(sentence) => Some(format!("write {sentence}")),
    }
}

/// Returns the sentence on a command that does not exist.
pub fn of_command(typed: &str) -> Option<String> {
    match find(Place::Command, &normal(typed, '-'))? {
        Answer::Write(sentence) | Answer::Is(sentence) => Some(format!("write {sentence}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RunConfig;

    /// Returns a value that a key accepts, in TOML.
    fn example(name: &str) -> String {
        let key = KEYS.iter().find(|key| key.name == name).unwrap_or_else(|| panic!("{name} is no key"));
        match key.value_type {
            ValueType::Flag => "true".to_owned(),
            ValueType::Number => "0.5".to_owned(),
            ValueType::Integer => "1".to_owned(),
            ValueType::Choice { allowed, .. } => format!("\"{}\"", allowed[0]),
            _ => "\"some.txt\"".to_owned(),
        }
    }

    #[test]
    fn every_key_works_or_has_a_sentence_and_no_neighbour() {
        for ForeignName { typed, answer, .. } in
            FOREIGN_NAMES.iter().filter(|habit| habit.place == Place::Key)
        {
            for section in ["train", "optimizer", "data"] {
                let ours = match answer {
                    Answer::Is(ours) => ours,
                    Answer::Write(_) => "train.steps",
                };
                let text = format!("[{section}]\n{typed} = {}\n", example(ours));
                let found = RunConfig::parse(&text, "run.toml", &[] as &[&str]);
                match (answer, found) {
                    (Answer::Is(ours), Ok(config)) => assert_ne!(
                        config.origin(ours),
                        crate::Origin::Default,
                        "{section}.{typed} sets {ours}"
                    ),
                    // Rules between keys may refuse it, but under its name here.
                    (Answer::Is(ours), Err(problems)) => {
                        assert!(problems.iter().all(|problem| problem.key == *ours), "{typed}: {problems}");
                    }
                    (Answer::Write(sentence), Err(problems)) => {
                        let text = problems.to_string();
                        assert!(text.contains(sentence) && !text.contains("nearest"), "{typed}: {text}");
                    }
                    (Answer::Write(_), Ok(_)) => panic!("{section}.{typed} is accepted"),
                }
            }
        }
    }

    #[test]
    fn every_key_of_a_model_has_a_sentence_and_is_not_taken_for_one_of_its_config_json() {
        for ForeignName { typed, answer, .. } in
            FOREIGN_NAMES.iter().filter(|habit| habit.place == Place::ModelKey)
        {
            let Answer::Write(sentence) = answer else { panic!("{typed} has no sentence") };
            for text in [
                format!("[model]\n{typed} = \"x\"\n"),
                format!("[model]\npreset = \"baby-gpt\"\n{typed} = 3\n"),
            ] {
                let problems =
                    RunConfig::parse(&text, "run.toml", &[] as &[&str]).expect_err(typed).to_string();
                assert!(problems.contains(sentence), "{typed}: {problems}");
            }
        }
    }

    #[test]
    fn every_value_works_or_has_a_sentence() {
        for ForeignName { place, typed, answer } in FOREIGN_NAMES {
            let Place::Value(key) = place else { continue };
            let setting = format!("{key}={}", typed.to_uppercase());
            let found = RunConfig::parse("", "run.toml", &[&setting]);
            match (answer, found) {
                (Answer::Is(ours), Ok(config)) => {
                    let setting = config.settings().into_iter().find(|setting| setting.key == *key);
                    assert_eq!(
                        setting.map(|setting| setting.value),
                        Some(Value::from(*ours)),
                        "{key} = {typed}"
                    );
                }
                (Answer::Is(_), Err(problems)) => {
                    let is_rule = |text: &str| text.contains("need") || text.contains("has no effect");
                    assert!(
                        problems.iter().all(|problem| is_rule(&problem.what)),
                        "{key} = {typed}: {problems}"
                    );
                }
                (Answer::Write(sentence), Err(problems)) => {
                    assert!(problems.to_string().contains(sentence), "{key} = {typed}: {problems}");
                }
                (Answer::Write(_), Ok(_)) => panic!("{key} = {typed} is accepted"),
            }
        }
    }

    #[test]
    fn models_are_presets_and_flags_and_commands_have_sentences() {
        assert!(FOREIGN_NAMES.len() >= 60);
        for ForeignName { place, typed, answer } in FOREIGN_NAMES {
            match (place, answer) {
                (Place::Model, Answer::Is(preset)) => {
                    lockstep_model::ModelConfig::preset(preset)
                        .unwrap_or_else(|error| panic!("{typed}: {error}"));
                    assert_eq!(preset_of(&typed.to_uppercase()), Some(*preset));
                }
                (Place::Flag, Answer::Write(sentence)) => {
                    assert_eq!(of_flag(typed), Some(format!("write {sentence}")))
                }
                (Place::Command, Answer::Write(sentence)) => {
                    assert_eq!(of_command(typed), Some(format!("write {sentence}")));
                }
                (Place::Key | Place::ModelKey | Place::Value(_), _) => {}
                other => panic!("{typed}: {other:?}"),
            }
        }
        assert_eq!(setting_of_flag("lr"), Some("write --set optimizer.lr=VALUE".to_owned()));
        assert_eq!(setting_of_flag("learning-rate=3e-4"), Some("write --set optimizer.lr=VALUE".to_owned()));
        assert_eq!(setting_of_flag("steps"), Some("write --set train.steps=VALUE".to_owned()));
        assert_eq!((of_flag("zzz"), setting_of_flag("zzz")), (None, None));
    }
}
