//! `lockstep eval`, and the loading of models for inference.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use lockstep_checkpoint::DType;
use lockstep_config::RunConfig;
use lockstep_data::{
    Bar, Dataset, FindDocuments, Format, OpenOptions, Packing, Progress, SampleOrder, SourceFile, Tail,
    TextOptions, Tokens, WindowOptions, expand,
};
use lockstep_engine::Ranks;
use lockstep_infer::{EVALUATED_WINDOWS, LoadOptions, PlannedWork, Workload, evaluate};
use lockstep_plan::KvCacheType;
use lockstep_tensor::BlockActivations;
use serde_json::json;

use crate::exit::Failure;
use crate::inference_ranks::RankArguments;
use crate::output::say;
use crate::placement::{FoundModel, PlacedModel, PlacementArguments};
use crate::quantize::QuantizedType;
use crate::thread_count::threads;

/// The model of an inference, and how it is loaded.
#[derive(Debug, Args)]
pub(crate) struct ModelArguments {
    /// A Hugging Face directory, a GGUF file, a checkpoint of a run, or a repository of Hugging Face: org/name, hf://org/name@revision, hf://org/name/file.gguf
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: String,
    /// A directory with an adapter of PEFT's for the model
    #[arg(long, value_name = "DIR")]
    pub(crate) adapter: Option<PathBuf>,
    /// Type of weights and activations; auto takes that of the files, which are then used where they lie. Quantized matrices stay quantized
    #[arg(long, value_name = "TYPE", default_value = "auto", value_enum)]
    dtype: DtypeChoice,
    /// Type of the activations in products with quantized weights: int8, float (their own), or auto for int8 unless --dtype is f32
    #[arg(long, value_name = "TYPE", default_value = "auto", value_enum)]
    activations: ActivationChoice,
    /// Quantize the linear layers of blocks as they are loaded, in groups of 128 (int8) or 64 (int4, nf4)
    #[arg(long, value_name = "TYPE", value_enum)]
    quantize: Option<QuantizedType>,
    /// Compute threads of each rank [default: all cores, shared by the ranks of this machine]
    #[arg(long)]
    threads: Option<usize>,
    #[command(flatten)]
    pub(crate) placement: PlacementArguments,
    #[command(flatten)]
    pub(crate) ranks: RankArguments,
}

/// Values of `--dtype`.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub(crate) enum DtypeChoice {
    #[default]
    Auto,
    F32,
    Bf16,
    F16,
}

/// Values of `--activations`.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum ActivationChoice {
    #[default]
    Auto,
    Int8,
    Float,
}

/// The type of cached keys and values, for commands that have a cache.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct KvCacheArguments {
    /// Type of cached keys and values; auto takes that of the activations, int8 and fp8 have a scale for each token and head
    #[arg(long = "kv-cache", value_name = "TYPE", default_value = "auto", value_enum)]
    choice: KvCacheChoice,
}

impl KvCacheArguments {
    /// Returns the type; `None` for that of the activations.
    pub(crate) fn stored(self) -> Option<KvCacheType> {
        self.choice.stored()
    }
}

/// Values of `--kv-cache`.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum KvCacheChoice {
    Auto,
    F32,
    Bf16,
    Int8,
    Fp8,
}

impl KvCacheChoice {
    /// Returns the type; `None` for that of the activations.
    pub(crate) fn stored(self) -> Option<KvCacheType> {
        match self {
            Self::Auto => None,
            Self::F32 => Some(KvCacheType::F32),
            Self::Bf16 => Some(KvCacheType::Bf16),
            Self::Int8 => Some(KvCacheType::Int8),
            Self::Fp8 => Some(KvCacheType::Fp8),
        }
    }
}

impl ModelArguments {
    /// Finds the model by any of its names, with the adapter if one is given.
    pub(crate) fn find(&self) -> Result<FoundModel, Failure> {
        let activations = match self.activations {
            ActivationChoice::Auto => None,
            ActivationChoice::Int8 => Some(BlockActivations::Int8),
            ActivationChoice::Float => Some(BlockActivations::Float),
        };
        let quantize = self.quantize.map(QuantizedType::quantization);
        let threads = threads(self.threads)?;
        let options =
            LoadOptions { threads, dtype: self.dtype.dtype(), activations, quantize, kv_cache: None };
        FoundModel::new(&self.model, self.adapter.as_deref(), options, &self.placement)
    }

    /// Starts the ranks of the model, or joins the others as one of them, as [`RankArguments::join`].
    pub(crate) fn join(
        &self,
        found: &mut FoundModel,
        work: PlannedWork,
    ) -> Result<ControlFlow<ExitCode, Ranks>, Failure> {
        let joined = self.ranks.join(found, work)?;
        // A rank may have its share of the cores only since it has joined.
        found.options.threads = threads(self.threads)?;
        Ok(joined)
    }
}

impl DtypeChoice {
    /// Returns the type; `None` for that of the files.
    pub(crate) fn dtype(self) -> Option<DType> {
        match self {
            Self::Auto => None,
            Self::F32 => Some(DType::F32),
            Self::Bf16 => Some(DType::BF16),
            Self::F16 => Some(DType::F16),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct EvalArguments {
    #[command(flatten)]
    model: ModelArguments,
    /// Files of text, JSON lines or tokens, directories, globs
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    data: Vec<String>,
    /// Tokens per window [default: the model's maximum, at most 1024]
    #[arg(long)]
    seq_len: Option<usize>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn eval(arguments: &EvalArguments) -> Result<ExitCode, Failure> {
    let mut found = arguments.model.find()?;
    let longest = found.description.config().max_position_embeddings();
    let seq_len = arguments.seq_len.unwrap_or(longest.min(1024));
    if seq_len == 0 || seq_len > longest {
        return Err(Failure::configuration(format!("--seq-len {seq_len}: allowed is 1 to {longest}")));
    }
    let ranks = match arguments.model.join(&mut found, PlannedWork::Evaluation { seq_len })? {
        ControlFlow::Continue(ranks) => ranks,
        ControlFlow::Break(code) => return Ok(code),
    };
    let workload = Workload::Evaluation { windows: EVALUATED_WINDOWS, seq_len };
    let PlacedModel { model, .. } = &found.load(workload, ranks)?;
    let files = expand(&arguments.data, Format::Auto)?;
    let cache_dir = RunConfig::default().cache_dir();
    let progress = Bar::default();
    let tokenizer = files.iter().any(SourceFile::is_text).then(|| model.tokenizer()).transpose()?;
    let options = OpenOptions {
        tokenizer: tokenizer.as_ref(),
        vocab_size: model.config().vocab_size() as u64,
        id_type: None,
        documents: FindDocuments::No,
        cache_dir: &cache_dir,
        text: TextOptions::default(),
        progress: &progress,
    };
    // The first rank writes the tokens of a text to the cache.
    let open = || Tokens::open(&files, &options).map_err(Failure::from);
    let tokens = Arc::new(model.ranks().first_then_others(open)?);
    let range = 0..tokens.tokens();
    // For prompts with answers only the answers are measured, and samples do not see each other.
    let packing = if tokens.has_contexts() { Packing::WholeDocuments } else { Packing::Stream };
    let window = WindowOptions { seq_len, order: SampleOrder::Sequential, tail: Tail::Pad, packing };
    let data = Dataset::new(tokens, range, window, "the text")?;
    progress.begin_items(&format!("evaluating windows of {seq_len} tokens"), data.windows());
    let result = evaluate(model, &data, |windows| progress.advance(windows));
    progress.finish();
    let result = result?;
    let perplexity = result.perplexity();
    if arguments.json {
        say!("{}", json!({ "loss": result.loss, "perplexity": perplexity, "tokens": result.tokens }));
    } else {
        let (loss, tokens) = (result.loss, result.tokens);
        say!("loss {loss:.4}  perplexity {perplexity:.3}  tokens {tokens}  windows of {seq_len}");
    }
    Ok(ExitCode::SUCCESS)
}
