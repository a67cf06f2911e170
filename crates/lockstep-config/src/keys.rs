//! The table of keys: the one place that defines a key, its type, default, range and meaning.
//!
//! The structs of the configuration, parsing, error messages and `docs/configuration.md` are all generated from it. A key is listed
//! only once something reads it; a planned key is named under `later` and refused.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::LazyLock;

use lockstep_model::{ALL_LINEAR, MAX_RANK};
use lockstep_plan::gathering::ReshardAfterForward;
use lockstep_plan::{
    ContextMethod, Feedback, PassOrder, Plan, QuantizedType, RecomputeRules, Residence, TensorDimensions,
    Wrap,
};
use serde_json::Value;

use crate::choices::{
    AllReduce, BaseQuantization, DataFormat, DataOrder, DataPacking, F32Products, LearningRateScaling,
    MuonScale, OffloadIo, OptimizerKind, Precision, Rounding, Scaling, ScheduleKind, StatePrecision,
    TokenType, Transport,
};
use crate::declare::{Key, KeyReader, Section, joined, key_name, key_word, rules, sections};
use crate::problem::Origin;
use crate::sample_transforms::SampleTransform;
use crate::value::{DataSource, Readable, TokenizerSource};

/// The preset that is trained when `[model]` names none.
pub const DEFAULT_PRESET: &str = "llama-15m";

/// Aliases of keys, as (alias, key).
pub(crate) const ALIASES: [(&str, &str); 1] = [("train.lr", "optimizer.lr")];

/// The keys that name the model; at most one may be set.
pub(crate) const MODEL_SOURCES: [&str; 3] = ["model.preset", "model.path", "model.model_type"];

sections! {
    /// The model to train: one of `preset`, `path` and `model_type`. Any other key overrides the same key of the model's
    /// `config.json`, such as `hidden_size = 512`; the model family checks it.
    model: ModelConfig and any other key in overrides {
        /// A named architecture, such as `llama-60m`.
        preset: Option<String> = None,
            rules().when_absent("`llama-15m`, unless `path` or `model_type` is given").defines_numbers();
        /// A directory with a Hugging Face `config.json`, a GGUF file, a checkpoint, or a repository of Hugging Face: `org/name`,
        /// `hf://org/name@revision`. Files that its cache lacks are downloaded, the weights only with `from_pretrained`.
        path: Option<PathBuf> = None, rules().when_absent("none").defines_numbers();
        /// A model family, such as `llama`; its sizes are given as overrides.
        model_type: Option<String> = None, rules().when_absent("none").defines_numbers();
        /// Start from the weights in `path` instead of random ones.
        from_pretrained: bool = false, rules().defines_numbers();
    }

    /// The training and evaluation data.
    data: DataConfig {
        /// Files, directories and glob patterns to train on, one after another. An entry `{ path = "...", weight = 0.3 }` is a
        /// source of its own, from which that share of the samples is drawn; the entries without a weight together are one source,
        /// which has the rest. If every entry has a weight, only the ratios matter.
        train: Vec<DataSource> = Vec::new(),
            rules()
                .when_absent("text found on the machine: Rust sources that cargo has downloaded, else our own")
                .defines_numbers();
        /// Files, directories and glob patterns to evaluate on.
        valid: Vec<String> = Vec::new(),
            rules()
                .when_absent("of text, `valid_fraction` of the training text, from its end; of samples, none")
                .defines_numbers();
        /// The share of the training text that is kept for evaluation when `valid` is not given.
        valid_fraction: f64 = 0.1, rules().at_least(0.0).below(1.0).defines_numbers();
        /// Format of the files; `auto` decides by the file name. From `cifar10` on they hold samples for a model of images: `cifar10`
        /// and `cifar100` take the directory of the data set, of which `valid` reads the test part; `idx` takes images, and `labels`;
        /// `image_folder` a directory with one of images per class; `webdataset` and `tfrecord` take shards (`train-{000..099}.tar`).
        format: DataFormat = DataFormat::Auto, rules().defines_numbers();
        /// `bytes`, the path of a `tokenizer.json`, or a repository of Hugging Face (`org/name`). Files of tokens need none.
        tokenizer: Option<TokenizerSource> = None,
            rules().when_absent("the one in the model's directory, else `bytes`").defines_numbers();
        /// The type of the ids in raw token files (`format = "tokens"`), little-endian.
        token_type: Option<TokenType> = None,
            rules().when_absent("`u16` for a vocabulary of at most 65,536, else `u32`").defines_numbers();
        /// Packing of documents into sequences. `stream`: one after another, cut wherever a sequence ends. `documents`: the same,
        /// but a token attends only to its own document, positions begin at 0 in each, and no token predicts the first of the next.
        /// `whole_documents`: as `documents`, and cut only if longer than a sequence; when the next document does not fit, the rest
        /// of a sequence is padding. In raw token files a document ends with the tokenizer's end-of-text token.
        packing: Option<DataPacking> = None,
            rules()
                .when_absent("`whole_documents` for prompts with completions and for chats, else `stream`")
                .defines_numbers();
        /// `shuffle` draws every window or sample once an epoch, in an order that depends on the seed; `sequential` reads them
        /// from the start.
        order: DataOrder = DataOrder::Shuffle, rules().defines_numbers();
        /// The field of a JSON record, or the column of a Parquet file (`a.b` within a struct), that holds the text. A record
        /// without it may hold `messages` (a list of `{role, content}`) or `conversations` (of `{from, value}`), `instruction` and
        /// `output` with `input` and `system`, or `prompt` and `completion`; then only the assistant's turns, the output or the
        /// completion are predicted. Chats and instructions are formatted by the tokenizer's chat template, else as ChatML.
        text_field: String = "text".to_owned(), rules().defines_numbers();
        /// Names of JSON fields that differ from the known ones: `{ prompt = "question", completion = "answer" }`. Known are
        /// `prompt`, `completion`, `instruction`, `input`, `output`, `system`, `messages`, and in a message `role` and `content`.
        /// For samples, the model's inputs and their parts of a record: `{ pixel_values = "jpg;png", labels = "cls" }`; `;` separates
        /// alternatives.
        columns: BTreeMap<String, String> = BTreeMap::new(), rules().defines_numbers();
        /// The file of labels of the images in `train`, with `format = "idx"`.
        labels: Option<PathBuf> = None, rules().when_absent("none").defines_numbers();
        /// The file of labels of the images in `valid`, with `format = "idx"`.
        valid_labels: Option<PathBuf> = None, rules().when_absent("none").defines_numbers();
        /// Transforms of each training image, in order. `resize` (`size`: the shorter side, or `[height, width]`), `center_crop`,
        /// `random_crop` (with `padding`), `random_resized_crop`, `horizontal_flip`, and `normalize` (`mean`, `std`), which takes bytes
        /// as numbers in [0, 1].
        transforms: Option<Vec<SampleTransform>> = None,
            rules().when_absent("images are resized to the model's, and bytes become numbers in [0, 1]").defines_numbers();
        /// Transforms of each image of an evaluation.
        valid_transforms: Option<Vec<SampleTransform>> = None,
            rules().when_absent("`transforms` without chance: the center in place of a random crop, no flip").defines_numbers();
        /// Skip damaged samples, each for the next sound one, and count them, in place of ending the run. A shard that is cut off ends
        /// before the damage.
        skip_bad_samples: bool = false, rules().defines_numbers();
        /// Threads of each rank that read and transform samples; their number changes no bit.
        workers: usize = 2, rules().at_least(1.0).at_most(4096.0);
        /// Micro-batches that each rank reads ahead.
        prefetch: usize = 4, rules().at_least(1.0).at_most(65536.0);
        /// Directory in which tokenized text and indexes of shards are kept between runs.
        cache_dir: Option<PathBuf> = None, rules().when_absent("`lockstep` in the user's cache directory");
    }

    /// Length of the run, batch sizes and precision.
    train: TrainConfig {
        /// Optimizer steps of the whole run.
        steps: u64 = 1000, rules().at_least(1.0).at_most(1e12);
        /// Sequences, or samples, in one optimizer step, over all ranks.
        global_batch: usize = 32, rules().at_least(1.0).at_most(1e6).defines_numbers();
    } in plan {
        /// Sequences, or samples, in one forward and backward; divides `global_batch`.
        micro_batch in micro_batch: Option<usize> = None,
            rules().at_least(1.0).at_most(1e6).when_absent(
                "the largest divisor of `global_batch` up to 8, with `parallel.tensor_layout = \"2d\"` one that its side divides",
            );
    } {
        /// Tokens in a sequence.
        seq_len: usize = 256, rules().at_least(1.0).at_most(16_777_216.0).defines_numbers();
        /// Seed of initial weights, dropout and data order.
        seed: u64 = 1337, rules().defines_numbers();
        /// The type of activations and of the weights that kernels read; gradients and the optimizer state stay in f32.
        precision: Precision = Precision::F32, rules().defines_numbers();
        /// Method of f32 matrix products where the CPU has AMX: `split` in three parts of bf16 each, or by `fma`.
        f32_products: F32Products = F32Products::Fma, rules().defines_numbers();
        /// Keep an f32 copy of weights that kernels read in another precision, and update that. Without it bf16 weights
        /// are updated in place and should be rounded `stochastic`ally.
        master_weights: bool = true, rules().defines_numbers();
        /// With `f16`, a fixed loss scale; 0 adjusts it dynamically: steps whose gradients overflow are skipped and lower it.
        loss_scale: f64 = 0.0, rules().at_least(0.0).at_most(4294967296.0).defines_numbers();
        /// The loss scale of the first step, as a power of two.
        initial_scale_power: u64 = 16, rules().at_most(32.0).defines_numbers();
        /// Steps without an overflow after which the loss scale is doubled.
        loss_scale_window: u64 = 1000, rules().at_least(1.0).defines_numbers();
        /// Overflows after which the loss scale is halved.
        hysteresis: u64 = 2, rules().at_least(1.0).defines_numbers();
        /// The least loss scale. At this one, an overflow is handled as any other step that is not finite.
        min_loss_scale: f64 = 1.0, rules().above(0.0).at_most(4294967296.0).defines_numbers();
        /// Gradients are clipped to this global L2 norm; 0 switches clipping off.
        max_grad_norm: f64 = 1.0, rules().at_least(0.0).defines_numbers();
        /// Probability of dropout, in families that have it.
        dropout: f64 = 0.0,
            rules().at_least(0.0).below(1.0).when_absent("that of the model's `config.json`; `0.0` for a preset")
                .defines_numbers();
        /// Compute threads; 0 uses every core.
        threads: usize = 0, rules().at_most(4096.0);
        /// A step whose loss or gradient norm is more than this many times the median of the last 64 sound steps is a spike and is
        /// skipped; 0 skips only steps that are not finite.
        spike_factor: f64 = 0.0, rules().at_least(0.0).defines_numbers();
        /// Consecutive skipped steps after which the run restores the last copy of its state in memory and continues with the data
        /// after them; 0 never does. (The tenth in a row ends the run.)
        rollback_after: Option<u64> = None,
            rules().at_most(9.0).when_absent("3 with `spike_factor`, else 0").defines_numbers();
        /// Steps between copies of the state in memory for rollbacks; one is also made with each checkpoint.
        rollback_every: u64 = 100, rules().at_least(1.0).defines_numbers();
        /// Steps between evaluations; 0 switches them off.
        eval_every: u64 = 100, rules();
        /// Global batches in one evaluation.
        eval_steps: u64 = 10, rules().at_least(1.0);
        /// Steps between lines of progress where the output is not a terminal.
        log_every: u64 = 10, rules().at_least(1.0);
    }

    /// The optimizer and its settings.
    optimizer: OptimizerConfig {
        /// `adamw`; `sgd` with momentum; `lion`; or `muon` for the matrices of the blocks, with AdamW for embeddings,
        /// output layer, norms and biases.
        kind: OptimizerKind = OptimizerKind::AdamW, rules().defines_numbers();
        /// The learning rate at its peak; `train.lr` is another name for it.
        lr: f64 = 3e-4, rules().above(0.0).at_most(1e6).defines_numbers();
        /// Decay rates of AdamW's first and second moment; for Lion, the weights of the momentum in its update and in its average.
        betas: Option<[f64; 2]> = None,
            rules().at_least(0.0).below(1.0).when_absent("`[0.9, 0.95]`; for `lion` `[0.9, 0.99]`").defines_numbers();
        /// Term added to AdamW's denominator.
        eps: f64 = 1e-8, rules().above(0.0).defines_numbers();
        /// Strength of the decoupled weight decay.
        weight_decay: f64 = 0.1, rules().at_least(0.0).defines_numbers();
        /// Momentum of `sgd` and `muon`.
        momentum: Option<f64> = None,
            rules().at_least(0.0).below(1.0).when_absent("`0.9`; for `muon` `0.95`").defines_numbers();
        /// The learning rate of AdamW for the parameters that `muon` leaves to it.
        adam_lr: Option<f64> = None,
            rules().above(0.0).at_most(1e6).when_absent("`lr`").defines_numbers();
        /// Scaling of a matrix's learning rate in `muon`: `match_adamw` by 0.2 times the square root of its longer side, so that
        /// AdamW's learning rates fit; `original` by the square root of rows over columns, at least 1.
        muon_scale: MuonScale = MuonScale::MatchAdamW, rules().defines_numbers();
        /// The type of moments and momentum; `bf16` halves their memory.
        state_precision: StatePrecision = StatePrecision::F32, rules().defines_numbers();
        /// Rounding of weights and state in bf16. `stochastic` is right on average, so that changes too small for bf16 are not lost.
        rounding: Rounding = Rounding::Nearest, rules().defines_numbers();
        /// Names of the parameters with weight decay; `*` matches any characters, as in `*.mlp.*`. An empty list: none.
        decay: Option<Vec<String>> = None, rules().when_absent("all matrices").defines_numbers();
        /// Factors on the learning rate by parameter name, as in `{ "*.mlp.*" = 0.1 }`. If several patterns match a name, the
        /// longest counts.
        lr_multipliers: BTreeMap<String, f64> = BTreeMap::new(), rules().above(0.0).at_most(1e6).defines_numbers();
    }

    /// The learning rate over the steps: a linear warm-up, then `kind`.
    schedule: ScheduleConfig {
        /// `linear` and `cosine` decay after the warm-up; `wsd` stays at the peak and decays with 1 - sqrt at the end.
        kind: ScheduleKind = ScheduleKind::Cosine, rules().defines_numbers();
        /// Steps in which the learning rate rises to its peak.
        warmup_steps: Option<u64> = None,
            rules().when_absent("a tenth of `train.steps`; 10 to 100 in runs of 20 steps or more").defines_numbers();
        /// Steps in which it decays. The decay ends with the run, or later if it does not fit after the warm-up.
        decay_steps: Option<u64> = None,
            rules().at_least(1.0).at_most(1e12)
                .when_absent("all steps after the warm-up; for `wsd` a fifth of `train.steps`")
                .defines_numbers();
        /// The learning rate at the end, as a fraction of the peak.
        min_lr_ratio: f64 = 0.1, rules().at_least(0.0).at_most(1.0).defines_numbers();
        /// Scaling of `optimizer.lr` with the global batch, so that one recipe serves several batches: the peak is `lr * global_batch /
        /// scale_lr_batch` (`linear`, usual with SGD), or `lr * sqrt(global_batch / scale_lr_batch)` (`sqrt`, usual with Adam).
        scale_lr: LearningRateScaling = LearningRateScaling::None, rules().defines_numbers();
        /// The global batch, in sequences, for which `optimizer.lr` was chosen.
        scale_lr_batch: usize = 256, rules().at_least(1.0).defines_numbers();
    }

    /// The part of a pretrained model that is trained; by default all of it.
    fine_tune: FineTuneConfig {
        /// Names of the parameters that keep their values from `model.path`; `*` matches any characters, as in `model.layers.0.*`.
        /// They need neither gradients nor optimizer state.
        freeze: Vec<String> = Vec::new(), rules().defines_numbers();
        /// Trains a low-rank adapter of this rank (LoRA) and freezes the model itself.
        lora_rank: Option<usize> = None,
            rules().at_least(1.0).at_most(MAX_RANK as f64).when_absent("no adapter").defines_numbers();
        /// LoRA's alpha, which scales the adapter's output.
        lora_alpha: f64 = 16.0, rules().above(0.0).at_most(1e6).defines_numbers();
        /// Probability of dropout of the adapted layers' inputs.
        lora_dropout: f64 = 0.0, rules().at_least(0.0).below(1.0).defines_numbers();
        /// Linear layers as PEFT names them: the end of a module's name, such as `q_proj`, or `all-linear` for all but
        /// the output layer.
        lora_targets: Vec<String> = vec![ALL_LINEAR.to_owned()], rules().defines_numbers();
        /// `standard` multiplies what the adapter adds by `lora_alpha / lora_rank`, `rank_stabilized` (rsLoRA) by
        /// `lora_alpha / sqrt(lora_rank)`.
        lora_scaling: Scaling = Scaling::Standard, rules().defines_numbers();
        /// Quantization of the frozen matrices of linear layers in blocks (QLoRA). They are quantized as they are loaded, stay so in
        /// memory, and are decoded panel by panel in forward and backward. Matrices that `model.path` stores quantized keep the blocks of
        /// their files. `none` holds all of them as numbers of `train.precision`.
        quantize: BaseQuantization = BaseQuantization::None, rules().defines_numbers();
        /// Directory of a PEFT adapter to continue from; rank, alpha and targets are those of the adapter.
        adapter: Option<PathBuf> = None, rules().when_absent("none").defines_numbers();
    }

    /// The parallelism. If no key here says how a step is parallelized, `lockstep train` asks the planner and reports its choice.
    parallel: ParallelConfig {} in plan {
        /// Data-parallel replicas of the model, each of which reads its part of every global batch. Left out: as many as the
        /// started ranks make, or one with `zero_stage`.
        data_parallel_replicate in mesh.replicate: usize = 1, rules().at_least(1.0).at_most(65536.0);
        /// Ranks of each replica that read different parts of the global batch. Over them the model state can be sharded
        /// (`zero_stage`) and the experts split (`expert_parallel`); everything else is replicated.
        data_parallel_shard in mesh.shard: usize = 1, rules().at_least(1.0).at_most(65536.0);
        /// Model state that is sharded over the ranks of `data_parallel_shard` and `context_parallel`: 0 nothing, 1 optimizer state
        /// and master weights, 2 also gradients, 3 also parameters. Experts are sharded over those of these ranks that hold the
        /// same experts. Without `data_parallel_shard` and `data_parallel_replicate`, the started ranks become shards.
        zero_stage in zero_stage: u8 = 0, rules().at_most(3.0);
        /// With `zero_stage = 3`, the form in which weights are all-gathered (qwZ of ZeRO++): `int8` sends one byte for each weight and a
        /// scale for each 256, and all ranks compute with the quantized weights. The weights that are updated and saved stay exact.
        quantize_weights in quantize_weights: Option<QuantizedType> = None, rules().words(&["none", "int8"]).defines_numbers();
        /// With `zero_stage` 1, 2 or 3, the form in which gradients are reduce-scattered (qgZ of ZeRO++); they are summed in f32.
        quantize_gradients in quantize_gradients: Option<QuantizedType> = None, rules().defines_numbers();
        /// With `quantize_gradients`, error feedback: each rank keeps the quantization error of its gradients and adds it to the
        /// next ones. It takes 2 bytes for each parameter on every rank, in memory and in checkpoints.
        quantize_feedback in quantize_feedback: Feedback = Feedback::Kept, rules().defines_numbers();
        /// With `zero_stage = 3`, or parameters on disk, the handling of a unit's gathered weights (embedding, a block or the head) after
        /// its forward: `always` frees them, `never` keeps those of all units for the backward and the next micro-batches, `auto` keeps
        /// those that are needed soonest, within `max_live_parameters`. The weights that the backward begins with are always kept.
        reshard_after_forward in sharding.reshard_after_forward: ReshardAfterForward = ReshardAfterForward::Auto, rules();
        /// With `zero_stage = 3`, or parameters on disk, the most parameters that are unsharded on a rank at once: those of the
        /// unit that computes, those that are being prefetched, and those that are kept for later. One unit's must fit.
        max_live_parameters in sharding.max_live_parameters: Option<usize> = None,
            rules().at_least(1.0).at_most(1e15)
                .when_absent("those of two units that follow each other; with `reshard_after_forward = \"never\"` all");
        /// With `zero_stage = 3`, the size of a group of nearby ranks, such as those of a node, which keep a second set of shards:
        /// the first all-gather of a step fills it, and the further ones stay within the group (hpZ of ZeRO++).
        secondary_shard in sharding.secondary_shard: Option<usize> = None, rules().at_least(2.0).at_most(256.0).when_absent("nothing is kept twice");
        /// Expert-parallel ranks: the experts of each layer are split over them, and every rank sends its tokens to the ranks of
        /// their experts. They are taken from `tensor_parallel` times `context_parallel` times `data_parallel_shard`.
        expert_parallel in mesh.expert: usize = 1, rules().at_least(1.0).at_most(65536.0);
        /// Tensor-parallel ranks of each expert's matrices; a divisor of `tensor_parallel`.
        expert_tensor_parallel in mesh.expert_tensor: usize = 1, rules().at_least(1.0).at_most(65536.0);
        /// Tensor-parallel ranks: heads, features and the vocabulary are split over them.
        tensor_parallel in mesh.tensor: usize = 1, rules().at_least(1.0).at_most(65536.0);
        /// Sequence parallelism: the tensor-parallel ranks split the activations between the matrix products by tokens, so that
        /// their memory shrinks with the ranks.
        sequence_parallel in sequence_parallel: bool = false, rules();
        /// Split of the blocks' linear layers: `1d`, each by its columns or its rows (Megatron-LM); `2d`, by blocks on a square of
        /// 4, 9, 16 ... ranks (SUMMA), each row of which has different sequences of a micro-batch.
        tensor_layout in tensor_layout: TensorDimensions = TensorDimensions::One, rules();
        /// Chunks of rows in which tensor-parallel collectives are overlapped with matrix products; 1 overlaps nothing. No bit of
        /// the result depends on it.
        tensor_chunks in tensor_chunks: Option<usize> = None,
            rules().at_least(1.0).at_most(64.0).when_absent("1 where these ranks are on one machine, else 4");
        /// Context-parallel ranks: each holds some of the tokens of every sequence, and attention exchanges what it needs of the others.
        context_parallel in mesh.context: usize = 1, rules().at_least(1.0).at_most(65536.0);
        /// Method of context parallelism: with `ring` keys and values go round the ranks, with `all_gather` each rank has all of
        /// them during an attention, with `all_to_all` ranks exchange tokens for heads (DeepSpeed-Ulysses).
        context_parallel_method in context_method: ContextMethod = ContextMethod::Ring, rules();
        /// Pipeline-parallel ranks: each holds some of the layers, and micro-batches go through them one after the other.
        pipeline_parallel in mesh.pipeline: usize = 1, rules().at_least(1.0).at_most(65536.0);
        /// Pipeline schedule: `gpipe`, `1f1b`, `interleaved_1f1b`, `looped_bfs`, `zb_h1`, `zb_v`, `dualpipe_v`, or a CSV file with
        /// a row for each rank, as of `torch.distributed.pipelining` (or such rows themselves, with a line break after each). No
        /// bit of the result depends on it.
        pipeline_schedule in schedule.passes: PassOrder = PassOrder::default(), rules();
        /// Stages of each pipeline rank. Left out: the fewest that the schedule allows.
        virtual_stages in schedule.chunks: Option<usize> = None, rules().at_least(1.0).at_most(256.0).when_absent("the schedule's");
        /// Number of the model's units (the embedding, each block, the head) in every pipeline stage, from the first on. Left out:
        /// balanced stages.
        pipeline_stages in stages: Vec<usize> = Vec::new(),
            rules().at_least(1.0).when_absent("even by operations");
        /// Size in MiB of the buckets in which gradients are reduced, overlapped with the backward.
        bucket_mb in bucket_mb: f64 = lockstep_plan::DEFAULT_BUCKET_MB, rules().above(0.0).at_most(1e6);
    } {
        /// Steps between comparisons of all ranks' weights; 0 compares them at the start only.
        check_every: u64 = 100, rules();
        /// Seconds that a rank waits for the others before the run ends with an error.
        timeout_s: f64 = 600.0, rules().above(0.0).at_most(86400.0);
        /// Transport between ranks. `auto`: shared memory where they are all on one machine and were started by `lockstep` itself,
        /// else TCP.
        transport: Transport = Transport::Auto, rules();
        /// Algorithm of gradient all-reduces over a network. `tree` adds in the same order as shared memory, and so gives the same
        /// bits; the others give bits of their own, the same on all ranks.
        all_reduce: AllReduce = AllReduce::Tree, rules();
        /// TCP connections for data between every two ranks that use TCP.
        tcp_connections: usize = 2, rules().at_least(1.0).at_most(16.0);
        /// Encrypt the traffic between ranks over TCP, under keys that each connection's handshake makes. Ranks that share memory
        /// send nothing over a network. No bit of the result depends on it.
        encrypt: bool = false, rules();
    } in plan {
        /// Activations that a block recomputes in its backward to save memory; no bit of the result depends on it. One word for all blocks,
        /// or rules by layer, of which the last one that matches a layer counts: `{ default = "none", layers = [{ from = 0, to = 11, every
        /// = 2, mode = "full" }] }` is for every other one of the first twelve. Left out, `from` is 0, `to` the last layer, and `every` 1.
        recompute in recompute: RecomputeRules = RecomputeRules::default(), rules();
        /// Each tensor-parallel rank keeps a slice of the input of every block whose `recompute` is `full`, and the slices are all-gathered
        /// before the block's backward, instead of every rank keeping the whole input. No bit of the result depends on it.
        partition_activations in partition_activations: bool = false, rules();
        /// Place of master weights and optimizer moments: `disk` is an unnamed file, of which a few windows are in memory while
        /// they are updated. `cpu` is host memory, which CPU ranks use in any case. No bit of the result depends on it.
        offload_optimizer as "offload.optimizer" in residence.optimizer: Residence = Residence::Memory, rules();
        /// Place of gradients, from a unit's backward to the optimizer step; those of tied embeddings stay in memory.
        offload_gradients as "offload.gradients" in residence.gradients: Residence = Residence::Memory, rules();
        /// Place of the weights that kernels read, between their uses: a unit's are prefetched while the unit before it computes
        /// (`max_live_parameters`, `reshard_after_forward`).
        offload_parameters as "offload.parameters" in residence.parameters: Residence = Residence::Memory, rules();
        /// Place of the activations that blocks save for their backward: with `disk` they are written while the forward goes on and
        /// prefetched for the backward, and those of three blocks are in memory at a time. The head's activations stay in memory.
        offload_activations as "offload.activations" in residence.activations: Residence = Residence::Memory, rules();
        /// Fraction of a rank's model state that is offloaded to the place of `offload.optimizer`, rounded up to whole units of the
        /// model, from the first on. Activations are offloaded altogether.
        offload_fraction as "offload.fraction" in residence.fraction: f64 = 1.0, rules().above(0.0).at_most(1.0);
    } {
        /// The directory of the offload files, on a disk with room for them.
        offload_dir as "offload.dir": Option<PathBuf> = None, rules().when_absent("`checkpoint.dir`");
        /// Method of reading and writing the offload files: `io_uring` or `threads`; `auto` takes `io_uring` where the system has it.
        offload_io as "offload.io": OffloadIo = OffloadIo::Auto, rules();
    } in plan {
        /// Units of the model (the embedding, each block, the head) that share a flat parameter, whose gradients are reduced
        /// together and whose weights are gathered together: `block` makes one of each unit, `{ min_parameters = N }` joins
        /// consecutive units until they have so many parameters, and a list of patterns such as `["model.layers.*"]` joins
        /// consecutive units that match the same one.
        wrap in sharding.wrap: Wrap = Wrap::Block, rules();
    }

    /// Checkpoints of the run.
    checkpoint: CheckpointConfig {
        /// The directory that holds the `step-NNNNNNNN` directories.
        dir: PathBuf = PathBuf::from("checkpoints"), rules();
        /// Steps between checkpoints; 0 saves at the end only.
        every: u64 = 500, rules();
        /// A second directory, best on another file system: a save goes there if it fails in `dir`, or makes no progress. `--resume
        /// auto` looks in both.
        fallback: Option<PathBuf> = None, rules().when_absent("none");
        /// Seconds without progress after which a save gives up on a directory. The run reports a stall from the fifth second on.
        stall_s: f64 = 60.0, rules().above(0.0);
        /// Seconds from SIGTERM or Ctrl-C to the end of the process: as long as the scheduler waits before it kills. Saves that make no
        /// progress are given up in time; on one rank a step that takes longer is abandoned, and the state before it is saved.
        grace_s: f64 = 30.0, rules().above(0.0);
        /// Number of the newest checkpoints that are kept; 0 keeps all.
        keep: usize = 3, rules();
        /// Keep the checkpoint with the lowest evaluation loss as well, of those that were saved after a step that was evaluated.
        keep_best: bool = false, rules();
        /// Write checkpoints in the background, from a copy of the state in memory. Without memory for it, training waits for each save.
        in_background as "async": bool = true, rules();
    }

    /// Automatic restarts by the launcher after the loss of a rank.
    elastic: ElasticConfig {
        /// Restarts of all ranks from the newest checkpoint that the launcher may have outstanding; 0 ends the run at the first failure. The flag
        /// `--max-restarts` wins. Failures that a restart cannot mend (exit codes 2, 3 and 4) end the run in any case.
        max_restarts: u64 = 0, rules().at_most(1000.0);
        /// Seconds of running without a failure after which one restart is given back to `max_restarts`.
        stable_after_s: f64 = 300.0, rules().above(0.0).at_most(1e6);
        /// Restarts in a row without a new checkpoint after which the run gives up, whatever is left of `max_restarts`.
        max_futile_restarts: u64 = 5, rules().at_least(1.0).at_most(1000.0);
        /// Seconds that the machines of a run wait for one whose launcher is gone, or for a replacement of it. `join_timeout` of `--rdzv-conf` wins.
        rejoin_timeout_s: f64 = 600.0, rules().above(0.0).at_most(86400.0);
        /// Milliseconds without a sign of life after which a rank counts as lost.
        heartbeat_ms: u64 = 5000, rules().at_least(500.0).at_most(3_600_000.0);
    }
    later ["min_nodes"]

    /// The records of the run.
    metrics: MetricsConfig {
        /// The directory of the run's records.
        dir: PathBuf = PathBuf::from("runs"), rules();
        /// Write `metrics.jsonl`, one object a step.
        jsonl: bool = true, rules();
        /// Write the same numbers as TensorBoard event files.
        tensorboard: bool = true, rules();
        /// An address such as `127.0.0.1:9400` at which Prometheus finds the numbers of the last step, at `/metrics`. The first
        /// rank of every machine reports at `/healthz` whether the run makes progress.
        prometheus: Option<String> = None, rules().when_absent("none");
        /// A file such as `run.prom` with the same text, for the textfile collector of node_exporter; written as a whole, at most once
        /// a second.
        prometheus_file: Option<PathBuf> = None, rules().when_absent("none");
        /// The first and the last step whose operations are written, each with its time, to a trace that Perfetto and
        /// chrome://tracing open.
        trace_steps: Option<[u64; 2]> = None, rules().at_least(1.0).when_absent("none");
    }
}
