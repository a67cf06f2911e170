//! A model in memory, ready to run the forward.

use std::{ops::Range, path::Path};

use lockstep_checkpoint::{ModelDirectory, WeightQuantization};
use lockstep_comm::Group;
use lockstep_data::Tokenizer;
use lockstep_engine::Ranks;
use lockstep_model::{HeadOutput, ModelConfig, RecordedModel};
use lockstep_plan::{CachePlace, ContextPlace, DType, KvCacheType, MemoryBytes, MemoryCategory, Places};
use lockstep_tensor::{Arena, BlockActivations, CacheShape, DiskTraffic, Queue, Summation};

use crate::{
    GenerationConfig, InferError, InferencePlan, ModelDescription,
    placement_plan::CHUNK,
    run_memory::{RankShare, kv_cache_type, record},
    weight_form::WeightForm,
    weights::ModelWeights,
};

/// Settings of [`LoadedModel::load`].
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// Number of compute threads.
    pub threads: usize,
    /// Type of weights and activations: f32, bf16 or f16; `None` takes that of most weights in the files.
    pub dtype: Option<DType>,
    /// Type of the activations in products with quantized weights; `None` takes int8, but the activations' own type if that is
    /// f32.
    pub activations: Option<BlockActivations>,
    /// Quantization of the matrices of linear layers that are stored as numbers; `None` leaves them.
    pub quantize: Option<WeightQuantization>,
    /// Type of cached keys and values; `None` takes that of the activations.
    pub kv_cache: Option<KvCacheType>,
}

impl LoadOptions {
    /// Returns the options of a model in the type of its files.
    pub fn new(threads: usize) -> Self {
        Self { threads, dtype: None, activations: None, quantize: None, kv_cache: None }
    }

    /// Returns the options with weights and activations in type `dtype`.
    pub fn with_dtype(self, dtype: DType) -> Self {
        Self { dtype: Some(dtype), ..self }
    }
}

/// A model, or this rank's shards of one, and a queue to run it on.
pub struct LoadedModel {
    pub(crate) config: ModelConfig,
    pub(crate) weights: ModelWeights,
    /// Type of weights and activations.
    pub(crate) dtype: DType,
    /// Type of cached keys and values.
    pub(crate) kv_cache: KvCacheType,
    pub(crate) arena: Arena,
    pub(crate) queue: Box<dyn Queue>,
    /// The ranks that run the model.
    ranks: Ranks,
    /// Tokens of a prompt that are computed at once.
    pub(crate) chunk_tokens: usize,
    /// True if a pass reads weights from disk on any rank.
    pub(crate) reads_disk: bool,
    description: ModelDescription,
}

impl LoadedModel {
    /// Loads a Hugging Face directory, a GGUF file or a checkpoint of a run, in the type of its files, to run on `threads` threads.
    ///
    /// # Errors
    /// If a file is missing, damaged or does not fit the model, the model is no causal language model, or memory runs out.
    pub fn open(dir: &Path, threads: usize) -> Result<Self, InferError> {
        Self::load(&ModelDirectory::open(dir)?, LoadOptions::new(threads))
    }

    /// Loads a model on one rank. Weights that are stored in the type that is asked for are used where they lie in their files; all
    /// others are converted into memory.
    ///
    /// # Errors
    /// As for [`LoadedModel::open`].
    pub fn load(directory: &ModelDirectory, options: LoadOptions) -> Result<Self, InferError> {
        Self::load_on(directory, options, Ranks::alone())
    }

    /// Loads this rank's shards of a model, as [`LoadedModel::load`] does. The plan of the ranks is one that
    /// [`check_plan`](crate::check_plan) has checked. All ranks must then run the same requests in the same order.
    ///
    /// # Errors
    /// As for [`LoadedModel::open`].
    pub fn load_on(
        directory: &ModelDirectory,
        options: LoadOptions,
        ranks: Ranks,
    ) -> Result<Self, InferError> {
        let dtype = options.dtype.unwrap_or_else(|| directory.stored_dtype());
        let kv_cache = kv_cache_type(options.kv_cache, dtype)?;
        let arena = arena(&ranks);
        let description = ModelDescription::of(directory)?;
        // Ranks that share sequences have the same weights, and one token cannot be shared.
        let places = Places { context: ContextPlace::default(), ..ranks.groups().places() };
        let recorded = record(description.config(), dtype, [1, 1], HeadOutput::Logits, places);
        let stage = ranks.groups().stage(recorded.units());
        let mut queue = queue(&arena, options.threads)?;
        let form = WeightForm::new(dtype, options.quantize, options.activations);
        queue.set_block_activations(form.activations);
        let records = (recorded.records(), stage);
        let weights = ModelWeights::load(directory, records, form, (&arena, &*queue))?;
        if let Some(group) = ranks.group() {
            // Collectives on one machine use the compute threads rather than a core of their own.
            group.set_workers(queue.workers());
        }
        Ok(Self::of(description, weights, (dtype, kv_cache, CHUNK), (arena, queue), ranks))
    }

    /// Loads a model as a plan places it, on as many threads as the plan has: resident weights are read into memory, the others
    /// from disk in each pass. Weights that must be made before they are read from disk are written to the offload directory.
    ///
    /// # Errors
    /// As for [`LoadedModel::open`], or if the offload directory cannot be written.
    pub fn load_placed(directory: &ModelDirectory, plan: InferencePlan) -> Result<Self, InferError> {
        Self::load_placed_on(directory, plan, Ranks::alone())
    }

    /// Loads this rank's part of a model as a plan for it places it, as [`LoadedModel::load_placed`] does. The plan is one that
    /// [`InferencePlan::agree`] has been called on.
    ///
    /// # Errors
    /// As for [`LoadedModel::load_placed`].
    pub fn load_placed_on(
        directory: &ModelDirectory,
        mut plan: InferencePlan,
        ranks: Ranks,
    ) -> Result<Self, InferError> {
        plan.write_offloaded(directory)?;
        let InferencePlan { parts, resident, room, chunk_tokens, reads_disk, threads, kv_cache, .. } = plan;
        let (arena, dtype) = (arena(&ranks), parts.dtype());
        let mut queue = queue(&arena, threads)?;
        queue.set_block_activations(parts.form().activations);
        let weights = ModelWeights::load_placed(directory, parts, (&resident, room), &arena, &*queue)?;
        let description = ModelDescription::of(directory)?;
        if let Some(group) = ranks.group() {
            group.set_workers(queue.workers());
        }
        let model = Self::of(description, weights, (dtype, kv_cache, chunk_tokens), (arena, queue), ranks);
        Ok(Self { reads_disk, ..model })
    }

    fn of(
        description: ModelDescription,
        weights: ModelWeights,
        (dtype, kv_cache, chunk_tokens): (DType, KvCacheType, usize),
        (arena, queue): (Arena, Box<dyn Queue>),
        ranks: Ranks,
    ) -> Self {
        let config = description.config().clone();
        let reads_disk = false;
        Self { config, weights, dtype, kv_cache, arena, queue, ranks, chunk_tokens, reads_disk, description }
    }

    /// Returns the ranks that run the model, as this one sees them.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Returns the units of the model that this rank runs: those of its pipeline stage.
    pub(crate) fn stage(&self) -> Range<usize> {
        self.ranks.groups().stage(self.config.num_hidden_layers() + 2)
    }

    /// Returns the layers that this rank runs, from 0.
    pub(crate) fn layers(&self) -> Range<usize> {
        self.share().layers(&self.config)
    }

    /// Returns the shape of each layer's cache on this rank.
    pub(crate) fn cache_shape(&self) -> CacheShape {
        self.config.cache_shape().of_rank(self.ranks.groups().tensor_place().ranks)
    }

    /// Returns the bytes of the cached keys and values of one sequence of `context` tokens on this rank: whole pages.
    pub fn kv_cache_bytes(&self, context: usize) -> u64 {
        self.share().kv_cache_bytes(&self.config, (self.dtype, self.kv_cache), context)
    }

    /// Returns the part of the model on this rank.
    fn share(&self) -> RankShare {
        RankShare { stage: self.stage(), places: self.ranks.groups().places() }
    }

    /// Returns this rank's place among the context-parallel ranks, over which key-value caches are sharded.
    pub(crate) fn cache_place(&self) -> CachePlace {
        self.share().cache_place()
    }

    /// Returns the tokens of a page of a sequence, on all ranks that the cache is sharded over.
    pub fn page_tokens(&self) -> usize {
        self.share().page_tokens()
    }

    /// Returns the tokens of the pages that hold `tokens` tokens of one sequence.
    pub fn whole_pages(&self, tokens: usize) -> usize {
        tokens.next_multiple_of(self.page_tokens())
    }

    /// Returns the type of the weights and activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the type of cached keys and values.
    pub fn kv_cache(&self) -> KvCacheType {
        self.kv_cache
    }

    /// Returns the number of compute threads.
    pub fn threads(&self) -> usize {
        self.queue.threads()
    }

    /// Returns the bytes of weights that stay in their files, and of those that were converted into memory.
    pub fn weight_bytes(&self) -> [usize; 2] {
        [self.weights.in_place_bytes, self.weights.converted_bytes()]
    }

    /// Returns the most tokens of prompts that are computed at once.
    pub fn chunk_tokens(&self) -> usize {
        self.chunk_tokens
    }

    /// Returns the traffic of the disk since the last call; zero unless weights are streamed.
    pub fn take_disk_traffic(&self) -> DiskTraffic {
        self.weights.take_traffic()
    }

    /// Returns the peaks of what was allocated, in bytes: by category, and of the total.
    pub fn peak_memory(&self) -> (MemoryBytes, usize) {
        (self.arena.peak(), self.arena.peak_total_bytes())
    }

    /// Returns the model's configuration, without dropout.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns true if a Lockstep run trained this model on chats.
    pub fn has_chats(&self) -> bool {
        self.description.has_chats()
    }

    /// Returns [`ModelDescription::generation_config`].
    ///
    /// # Errors
    /// If the file cannot be read or is invalid.
    pub fn generation_config(&self) -> Result<GenerationConfig, InferError> {
        self.description.generation_config()
    }

    /// Returns [`ModelDescription::tokenizer`].
    ///
    /// # Errors
    /// If there is no tokenizer, or it cannot be loaded or does not fit the vocabulary.
    pub fn tokenizer(&self) -> Result<Tokenizer, InferError> {
        self.description.tokenizer()
    }

    /// Records the programs for `sequences` of `seq_len` tokens.
    pub(crate) fn record(&self, sequences: usize, seq_len: usize, output: HeadOutput) -> RecordedModel {
        let places = self.ranks.groups().places();
        record(&self.config, self.dtype, [sequences, seq_len], output, places)
    }

    /// Records the programs for a batch of `rows` new tokens of any sequences, the rows of all context-parallel ranks.
    pub(crate) fn record_generation(&self, rows: usize) -> RecordedModel {
        let places = self.ranks.groups().places().for_generation();
        record(&self.config, self.dtype, [1, rows], HeadOutput::Logits, places)
    }
}

/// Returns the arena of a model: collectives read what they reduce where it lies.
fn arena(ranks: &Ranks) -> Arena {
    let shared = |group: &Group| group.arena(&[MemoryCategory::Workspace]);
    ranks.group().map_or_else(Arena::new, shared)
}

/// Returns a queue on which a token's logits do not depend on the tokens that are computed with it.
fn queue(arena: &Arena, threads: usize) -> Result<Box<dyn Queue>, InferError> {
    let mut queue = arena.queue(threads)?;
    queue.set_summation(Summation::ByDepth);
    Ok(queue)
}
