//! The first screen of a run: everything that is derived from its configuration, printed once before the first step.

use std::collections::BTreeMap;

use lockstep_config::{ModelSource, ResolvedModel, RunConfig, human};
use lockstep_data::{Dataset, RecordShape, Supervision, Tokenizer};
use lockstep_engine::Engine;
use lockstep_observe::progress::Progress;
use lockstep_observe::report::DevicePeak;
use lockstep_plan::{BlockFormat, MemoryCategory, ParameterId, TensorPlace};
use lockstep_tensor::host::available_memory_bytes;

use crate::TrainingData;
use crate::corpus::TextCorpus;
use crate::kernels::machine_line;
use crate::predicted::Predicted;
use crate::samples::described;

/// The inputs of the first screen.
pub(crate) struct Screen<'a> {
    pub(crate) config: &'a RunConfig,
    pub(crate) model: &'a ResolvedModel,
    pub(crate) data: &'a TrainingData,
    pub(crate) engine: &'a Engine,
    pub(crate) predicted: &'a Predicted,
    pub(crate) peak: Option<&'a DevicePeak>,
}

/// Prints the first screen of a run: model, data, step and memory; all else only with details on.
pub(crate) fn describe(screen: &Screen<'_>, tensor: TensorPlace, progress: &mut Progress) {
    let Screen { config, model, data, engine, predicted, peak } = *screen;
    let parameters = human::count(model.config.parameter_count() as f64);
    let sizes = model.config.model().sizes();
    let of_output = match sizes.classes {
        0 => format!("vocabulary {}", sizes.vocab),
        classes => format!("{classes} classes"),
    };
    let named = format!("{}: {parameters} parameters, {} layers, {of_output}", name(config), sizes.layers);
    progress.field("model", &named);
    if let Some(trained) = trained_part(engine) {
        progress.field("trained", &trained);
    }
    match &data.text {
        Some(corpus) => {
            progress.field("data", &data_line(corpus));
            describe_records(corpus, progress);
            describe_answers(config, corpus, progress);
            describe_blend(config, corpus, progress);
        }
        None => progress.field("data", &samples_line(data)),
    }
    data.damages.iter().for_each(|damage| progress.field("damaged", damage));
    let dtype = engine.model().program(0).shape().dtype;
    progress.field("step", &step_line(config, sizes.vocab > 0, &format!("{dtype}")));
    describe_work(config, engine, peak, tensor, progress);
    progress.field("memory", &memory_line(predicted));
    progress.detail("", &memory_by_category(engine, predicted));
}

/// Returns the model's name as the user gave it.
fn name(config: &RunConfig) -> String {
    let changed = config.model.overrides.len();
    match config.model_source() {
        ModelSource::Preset(name) if changed == 0 => name.to_owned(),
        ModelSource::Preset(name) => format!("{name}, {} changed", human::plural(changed, "key")),
        ModelSource::Path(path) => path.display().to_string(),
        ModelSource::ModelType(model_type) => model_type.to_owned(),
    }
}

fn data_line(corpus: &TextCorpus) -> String {
    let valid = corpus.valid.as_ref().map_or(0, Dataset::tokens);
    format!(
        "{} tokens{}{}, {}{}",
        human::count(corpus.train.tokens() as f64),
        if corpus.sources.len() > 1 {
            format!(" of {} sources", corpus.sources.len())
        } else {
            String::new()
        },
        if valid > 0 { format!(", {} to evaluate on", human::count(valid as f64)) } else { String::new() },
        corpus.tokenizer_name.as_ref().map_or("no tokenizer".to_owned(), |name| format!("tokenizer {name}")),
        if corpus.from_cache() { " (from the cache)" } else { "" },
    )
}

/// Returns the number of samples and their tensors: `50,000 samples (image u8 [32, 32, 3], label i32 []), 10,000 to evaluate on`.
fn samples_line(data: &TrainingData) -> String {
    let tensors = data.tensors.iter().map(described).collect::<Vec<_>>().join(", ");
    let valid = data.valid.as_ref().map_or("none".to_owned(), |valid| human::thousands(valid.samples()));
    format!("{} samples ({tensors}), {valid} to evaluate on", human::thousands(data.train.samples()))
}

/// Prints the kinds of records that were found, and the chat template.
fn describe_records(corpus: &TextCorpus, progress: &mut Progress) {
    let shapes = &corpus.shapes;
    if shapes.iter().all(|shape| *shape == RecordShape::Text) {
        return;
    }
    let found: Vec<&str> = shapes.iter().map(|shape| shape.describe()).collect();
    let tokenizer = corpus.tokenizer.as_ref().filter(|_| shapes.iter().any(|shape| shape.uses_template()));
    let written = match tokenizer.map(Tokenizer::has_chat_template) {
        Some(true) => ", written by the tokenizer's chat template",
        Some(false) => ", written in ChatML: the tokenizer has no chat template",
        None => "",
    };
    progress.field("records", &format!("{}{written}", found.join("; ")));
    let missing = tokenizer.map(Tokenizer::missing_markers).unwrap_or_default();
    if !missing.is_empty() {
        progress.field(
            "",
            &format!("{}: no token of the vocabulary, so spelled out in several", missing.join(", ")),
        );
    }
}

fn describe_answers(config: &RunConfig, corpus: &TextCorpus, progress: &mut Progress) {
    let seq_len = config.train.seq_len;
    if let Some(supervision) = corpus.train.supervision() {
        progress.field("answers", &answers(&supervision, seq_len));
    }
    if let Some(supervision) = corpus.valid.as_ref().and_then(Dataset::supervision) {
        progress.detail("", &format!("of the validation set {}", answers(&supervision, seq_len)));
    }
}

fn describe_blend(config: &RunConfig, corpus: &TextCorpus, progress: &mut Progress) {
    if corpus.sources.len() < 2 {
        return;
    }
    let samples = config.train.steps * config.train.global_batch as u64;
    for (i, source) in corpus.sources.iter().enumerate() {
        let (share, epochs) = (corpus.train.share(i) * 100.0, corpus.train.epochs(i, samples));
        let tokens = human::count(source.tokens.tokens() as f64);
        let line =
            format!("{share:.4} % from {}: {tokens} tokens, {epochs:.2} epochs in this run", source.name);
        progress.detail("blend", &line);
    }
}

/// Returns the batch and its distribution: `8 sequences of 128 tokens = 1.0k tokens; 2 ranks × 1 micro-batch of 4; bf16`, or
/// `8 samples` for a model without tokens.
fn step_line(config: &RunConfig, has_tokens: bool, dtype: &str) -> String {
    let (parts, ranks) = (config.batch_parts(), config.ranks());
    let mut line = match has_tokens {
        true => format!(
            "{} of {} tokens = {} tokens",
            human::plural(config.train.global_batch, "sequence"),
            human::thousands(config.train.seq_len as u64),
            human::count(config.tokens_per_step() as f64)
        ),
        false => human::plural(config.train.global_batch, "sample").to_string(),
    };
    if parts > 1 || config.accumulation_steps() > 1 {
        let of_each = human::plural(config.accumulation_steps(), "micro-batch");
        let by = if parts > 1 { format!("{parts} ranks × ") } else { String::new() };
        line += &format!("; {by}{of_each} of {}", config.micro_batch());
    }
    if ranks > parts {
        line += &format!("; {ranks} ranks in all");
    }
    line + "; " + dtype
}

/// Prints the FLOPs of a step, the machine, and the collectives between ranks.
fn describe_work(
    config: &RunConfig,
    engine: &Engine,
    peak: Option<&DevicePeak>,
    tensor: TensorPlace,
    progress: &mut Progress,
) {
    let ranks = config.batch_parts();
    let formula = match trained_part(engine) {
        None => "6 for each weight of a product and token, and attention",
        Some(_) => {
            "2 for each weight of a product and token, 2 for each gradient of an input or weight that is needed, and \
             attention"
        }
    };
    let flops = engine.model().training_flops() * (ranks * config.accumulation_steps()) as u64;
    progress.detail("work", &format!("{} FLOPs a step: {formula}", human::count(flops as f64)));
    let peak = peak.map_or(String::new(), |peak| {
        format!(", peak {}FLOP/s ({})", human::count_of(peak.flops_per_s), peak.source)
    });
    progress.detail("machine", &format!("{}{peak}", machine_line(engine, config.ranks())));
    if tensor.chunks > 1 {
        let (ranks, chunks) = (tensor.ranks, tensor.chunks);
        let line =
            format!("{ranks} tensor-parallel ranks, in {chunks} chunks that overlap with the products");
        progress.detail("exchanges", &line);
    }
    if let Some(gathers) = engine.gathers_of_step() {
        let own: usize = engine.parameter_ids().map(|id| engine.records()[id.0].local_elements()).sum();
        let line = format!(
            "{} all-gathers of weights a step for {} uses of units; at most {} of {} parameters are whole at once",
            gathers.stays().len(),
            gathers.len(),
            human::count(gathers.most_live() as f64),
            human::count(own as f64),
        );
        progress.detail("sharding", &line);
    }
}

/// Returns the fraction of tokens that are predicted, and the samples that were left out, with reasons.
pub fn answers(supervision: &Supervision, seq_len: usize) -> String {
    let Supervision {
        tokens,
        labels,
        samples,
        without_answer,
        answer_out_of_window,
        truncated,
        masked_windows,
        ..
    } = *supervision;
    let mut line = format!(
        "{} of {} tokens are predicted ({:.1} %)",
        human::thousands(labels),
        human::thousands(tokens),
        100.0 * labels as f64 / tokens.max(1) as f64
    );
    let mut left_out = Vec::new();
    if answer_out_of_window > 0 {
        left_out.push(format!(
            "{} with prompts of {seq_len} tokens or more (train.seq_len = {} would keep the shortest)",
            human::thousands(answer_out_of_window),
            supervision.seq_len_for_one_more
        ));
    }
    if without_answer > 0 {
        left_out.push(format!("{} without an answer", human::thousands(without_answer)));
    }
    if !left_out.is_empty() {
        let dropped = human::thousands(answer_out_of_window + without_answer);
        let samples = human::thousands(samples);
        line += &format!("; {dropped} of {samples} samples are left out: {}", left_out.join(", "));
    }
    if truncated > 0 {
        line += &format!("; {} longer than {seq_len} tokens are cut there", human::thousands(truncated));
    }
    if masked_windows > 0 {
        line += &format!("; {} windows of prompts alone are left out", human::thousands(masked_windows));
    }
    line
}

/// Returns the memory of the rank that is predicted to need most, and the available memory of this machine.
fn memory_line(predicted: &Predicted) -> String {
    let (rank, most) = predicted.largest();
    let mut line = format!("{} predicted", human::bytes(most.total() as u64));
    if predicted.by_rank.len() > 1 {
        let (ranks, total) = (predicted.by_rank.len(), human::bytes(predicted.total() as u64));
        line += &format!(" for rank {rank}, which needs most, and {total} for all {ranks} ranks");
    }
    match available_memory_bytes() {
        Some(available) => format!("{line}; {} available here", human::bytes(available)),
        None => line,
    }
}

/// Returns the predicted memory by category, and each category for which this rank's ledger has booked a different amount.
fn memory_by_category(engine: &Engine, predicted: &Predicted) -> String {
    let shown = |(category, bytes): (MemoryCategory, usize)| {
        (bytes > 0).then(|| format!("{} {}", category.name(), human::bytes(bytes as u64)))
    };
    let parts: Vec<String> = predicted.largest().1.entries().filter_map(shown).collect();
    let mut line = parts.join(", ");
    // Copies of the state are booked later.
    let (booked, of_engine) = (engine.arena().in_use(), engine.predicted_memory().by_category());
    for (category, bytes) in booked.entries().filter(|(category, _)| *category != MemoryCategory::Cached) {
        if bytes != of_engine[category] {
            line += &format!("; {} of {} are booked here", human::bytes(bytes as u64), category.name());
        }
    }
    line
}

/// Returns the trained part of the model in words; `None` if it is all of it.
fn trained_part(engine: &Engine) -> Option<String> {
    let elements = |ids: &mut dyn Iterator<Item = ParameterId>| -> usize {
        ids.map(|id| engine.records()[id.0].elements()).sum()
    };
    let (all, trained) = (elements(&mut engine.parameter_ids()), elements(&mut engine.trained_ids()));
    (trained < all).then(|| {
        format!(
            "{} of {} parameters ({:.2} %); the others keep their values{}",
            human::count(trained as f64),
            human::count(all as f64),
            100.0 * trained as f64 / all as f64,
            quantized_part(engine)
        )
    })
}

/// Returns the number of quantized matrices by format, in words that go on a line; empty if there are none.
fn quantized_part(engine: &Engine) -> String {
    let mut counts: BTreeMap<BlockFormat, usize> = BTreeMap::new();
    for format in engine.parameter_ids().filter_map(|id| engine.records()[id.0].block_format) {
        *counts.entry(format).or_default() += 1;
    }
    let part = |(format, count): (BlockFormat, usize)| format!(", {count} matrices in blocks of {format}");
    counts.into_iter().map(part).collect()
}
