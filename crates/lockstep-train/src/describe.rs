//! What a run says of itself before its first step: everything that is derived from its configuration, once.

use lockstep_data::Dataset;
use lockstep_engine::Engine;
use lockstep_plan::{MemoryCategory, ParameterId, TensorPlace};

use crate::config::{ModelSource, RunConfig};
use crate::forecast::Predicted;
use crate::progress::Progress;
use crate::{Corpus, ResolvedModel, human};

/// Shows all of it.
pub(crate) fn describe(
    config: &RunConfig,
    model: &ResolvedModel,
    corpus: &Corpus,
    engine: &Engine,
    predicted: &Predicted,
    tensor: TensorPlace,
    progress: &mut Progress,
) {
    let name = match config.model_source() {
        ModelSource::Preset(name) if config.model.overrides.is_empty() => name.to_owned(),
        ModelSource::Preset(name) => {
            format!("{name} with {}", human::plural(config.model.overrides.len(), "changed key"))
        }
        ModelSource::Path(path) => path.display().to_string(),
        ModelSource::ModelType(model_type) => model_type.to_owned(),
    };
    progress.message(&format!(
        "model      {name} ({}): {} parameters, {} layers, vocabulary {}",
        model.config.model_type(),
        human::count(model.config.parameter_count() as f64),
        model.config.num_hidden_layers(),
        model.config.vocab_size(),
    ));
    if let Some(trained) = trained_part(engine) {
        progress.message(&trained);
    }
    progress.message(&format!(
        "data       {} tokens to train on, {} to evaluate on, {}{}",
        human::count(corpus.train.tokens() as f64),
        human::count(corpus.valid.as_ref().map_or(0, Dataset::tokens) as f64),
        corpus.tokenizer_name.as_ref().map_or("no tokenizer".to_owned(), |name| format!("tokenizer {name}")),
        if corpus.from_cache() { " (from the cache)" } else { "" },
    ));
    if corpus.sources.len() > 1 {
        let samples = config.train.steps * config.train.global_batch as u64;
        for (i, source) in corpus.sources.iter().enumerate() {
            progress.message(&format!(
                "blend      {:.4} % from {}: {} tokens, {:.2} epochs in this run",
                corpus.train.share(i) * 100.0,
                source.name,
                human::count(source.tokens.tokens() as f64),
                corpus.train.epochs(i, samples),
            ));
        }
    }
    let ranks = config.batch_parts();
    progress.message(&format!(
        "step       {} of {} tokens = {}{} of {} ({} tokens)",
        human::plural(config.train.global_batch, "sequence"),
        config.train.seq_len,
        if ranks == 1 { String::new() } else { format!("{ranks} ranks × ") },
        human::plural(config.accumulation_steps(), "micro-batch"),
        config.micro_batch(),
        human::count(config.tokens_per_step() as f64),
    ));
    let formula = match trained_part(engine) {
        None => "6 for each weight of a product and token, and attention",
        Some(_) => {
            "2 for each weight of a product and token, 2 for each gradient of an input or weight that is needed, and \
             attention"
        }
    };
    progress.message(&format!(
        "work       {} FLOPs a step: {formula}",
        human::count((engine.model().training_flops() * (ranks * config.accumulation_steps()) as u64) as f64),
    ));
    progress.message(&format!(
        "machine    {}{}, {} instructions, {} arithmetic",
        if ranks == 1 { String::new() } else { format!("{ranks} ranks × ") },
        human::plural(engine.queue().threads(), "thread"),
        engine.queue().level(),
        engine.model().program(0).shape().dtype,
    ));
    if tensor.chunks > 1 {
        progress.message(&format!(
            "exchanges  {} tensor-parallel ranks, in {} chunks beside the products",
            tensor.ranks, tensor.chunks,
        ));
    }
    if let Some(gathers) = engine.gathers_of_step() {
        let kept: usize = engine.parameter_ids().map(|id| engine.records()[id.0].local_elements()).sum();
        progress.message(&format!(
            "sharding   {} gathers of weights a step for {} uses of units; at most {} of {} parameters are whole at once",
            gathers.stays().len(),
            gathers.len(),
            human::count(gathers.most_live() as f64),
            human::count(kept as f64),
        ));
    }
    progress.message(&memory_line(engine, predicted));
}

/// What the rank that needs most was predicted to hold, and in what the ledger of this one differs from what was predicted of it.
fn memory_line(engine: &Engine, predicted: &Predicted) -> String {
    let (rank, most) = predicted.largest();
    let shown = |(category, bytes): (MemoryCategory, usize)| {
        (bytes > 0).then(|| format!("{} {}", category.name(), human::bytes(bytes as u64)))
    };
    let parts: Vec<String> = most.entries().filter_map(shown).collect();
    let mut line =
        format!("memory     {} predicted: {}", human::bytes(most.total() as u64), parts.join(", "));
    if predicted.by_rank.len() > 1 {
        let (ranks, total) = (predicted.by_rank.len(), human::bytes(predicted.total() as u64));
        line += &format!(" (rank {rank}, which needs most; {total} on all {ranks} ranks)");
    }
    // Copies of the state come later.
    let (booked, of_engine) = (engine.arena().in_use(), engine.predicted_memory().by_category());
    for (category, bytes) in booked.entries().filter(|(category, _)| *category != MemoryCategory::Cached) {
        if bytes != of_engine[category] {
            line += &format!("; {} of {} are booked here", human::bytes(bytes as u64), category.name());
        }
    }
    line
}

/// How much of the model is trained, where it is not all.
fn trained_part(engine: &Engine) -> Option<String> {
    let elements = |ids: &mut dyn Iterator<Item = ParameterId>| -> usize {
        ids.map(|id| engine.records()[id.0].elements()).sum()
    };
    let (all, trained) = (elements(&mut engine.parameter_ids()), elements(&mut engine.trained_ids()));
    (trained < all).then(|| {
        format!(
            "trained    {} of {} parameters ({:.2} %); the others keep their values",
            human::count(trained as f64),
            human::count(all as f64),
            100.0 * trained as f64 / all as f64
        )
    })
}
