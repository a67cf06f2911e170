//! The plans of the golden runs: every split, many pairs, every schedule, ZeRO 0 to 3, offload, quantized communication, experts,
//! adapters, precisions, optimizers, and runs that are resumed under another plan.

/// A run with its settings.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) model: &'static [&'static str],
    pub(super) ranks: usize,
    pub(super) plan: &'static [&'static str],
    /// Ranks and settings of a second run, which resumes from the checkpoint of the first.
    pub(super) resumed_under: Option<(usize, &'static [&'static str])>,
}

impl Case {
    /// Returns the settings of the first run other than those common to all cases.
    pub(super) fn settings(&self) -> Vec<&'static str> {
        [self.model, self.plan].concat()
    }
}

const GPT2: &[&str] = &[
    "model.preset=baby-gpt",
    "model.n_layer=4",
    "model.n_embd=32",
    "model.n_head=4",
    "model.n_positions=16",
    "model.bias=true",
    "train.dropout=0.1",
    "train.precision=f32",
];
const LLAMA: &[&str] = &[
    "model.preset=llama-15m",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=2",
    "model.max_position_embeddings=16",
    "model.tie_word_embeddings=true",
    "train.precision=f32",
];
/// The weights of a run of [`LLAMA`], which [`BASE`] names.
pub(super) const PRETRAINED: &[&str] =
    &["model.path=\"base\"", "model.from_pretrained=true", "train.precision=f32"];
/// Directory and model of [`PRETRAINED`].
pub(super) const BASE: (&str, &[&str]) = ("base", LLAMA);
const MIXTRAL: &[&str] = &[
    "model.preset=mixtral-20m",
    "model.hidden_size=32",
    "model.intermediate_size=24",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=4",
    "model.num_local_experts=4",
    "model.router_aux_loss_coef=0.1",
    "model.router_z_loss_coef=0.01",
    "model.expert_capacity_factor=1.25",
    "model.max_position_embeddings=16",
    "model.initializer_range=0.2",
    "train.precision=f32",
];
const DEEPSEEK: &[&str] = &[
    "model.model_type=deepseek_v3",
    "model.vocab_size=256",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.moe_intermediate_size=16",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=8",
    "model.q_lora_rank=16",
    "model.kv_lora_rank=16",
    "model.qk_nope_head_dim=4",
    "model.qk_rope_head_dim=4",
    "model.v_head_dim=6",
    "model.n_routed_experts=8",
    "model.n_group=4",
    "model.topk_group=2",
    "model.num_experts_per_tok=3",
    "model.first_k_dense_replace=1",
    "model.router_bias_update_rate=0.002",
    "model.max_position_embeddings=16",
    "model.initializer_range=0.2",
    "train.precision=f32",
];

macro_rules! cases {
    ($($name:literal $model:ident on $ranks:literal: $plan:expr $(, then on $other_ranks:literal: $other:expr)?;)+) => {
        /// Every case of the golden runs.
        pub(super) const CASES: &[Case] = &[$(
            Case { name: $name, model: $model, ranks: $ranks, plan: &$plan, resumed_under: cases!(@then $($other_ranks, $other)?) },
        )+];
    };
    (@then) => { None };
    (@then $ranks:literal, $plan:expr) => { Some(($ranks, &$plan)) };
}

cases! {
    "one-rank-gpt2" GPT2 on 1: [];
    "one-rank-bf16" LLAMA on 1: ["train.precision=bf16", "train.micro_batch=4"];
    "one-rank-f16" LLAMA on 1: ["train.precision=f16", "train.initial_scale_power=8"];
    "one-rank-lion-without-master" LLAMA on 1: ["train.precision=bf16", "train.master_weights=false", "optimizer.kind=lion", "optimizer.rounding=stochastic", "optimizer.state_precision=bf16"];
    "one-rank-muon" LLAMA on 1: ["optimizer.kind=muon"];
    "one-rank-mixtral" MIXTRAL on 1: [];
    "one-rank-deepseek" DEEPSEEK on 1: ["train.precision=bf16"];
    "replicate-2" GPT2 on 2: ["parallel.data_parallel_replicate=2"];
    "replicate-2-buckets" LLAMA on 2: ["parallel.data_parallel_replicate=2", "parallel.bucket_mb=0.01", "optimizer.kind=sgd"];
    "zero-0" GPT2 on 2: ["parallel.data_parallel_shard=2", "parallel.zero_stage=0"];
    "zero-1" GPT2 on 2: ["parallel.data_parallel_shard=2", "parallel.zero_stage=1"];
    "zero-2" LLAMA on 2: ["parallel.data_parallel_shard=2", "parallel.zero_stage=2", "train.precision=bf16"];
    "zero-3" LLAMA on 2: ["parallel.data_parallel_shard=2", "parallel.zero_stage=3", "train.precision=bf16"];
    "zero-3-secondary" GPT2 on 4: ["parallel.data_parallel_shard=4", "parallel.zero_stage=3", "parallel.reshard_after_forward=always", "parallel.secondary_shard=2"];
    "zero-3-never-joined" LLAMA on 2: ["parallel.data_parallel_shard=2", "parallel.zero_stage=3", "parallel.reshard_after_forward=never", "parallel.wrap={ min_parameters = 10000 }"];
    "zero-3-few-live" LLAMA on 2: ["parallel.data_parallel_shard=2", "parallel.zero_stage=3", "parallel.max_live_parameters=40000"];
    "hybrid-shards" GPT2 on 4: ["parallel.data_parallel_replicate=2", "parallel.data_parallel_shard=2", "parallel.zero_stage=2"];
    "quantized-zero-3" LLAMA on 2: ["parallel.data_parallel_shard=2", "parallel.zero_stage=3", "parallel.quantize_weights=int8", "parallel.quantize_gradients=int4"];
    "quantized-zero-1" GPT2 on 2: ["parallel.data_parallel_shard=2", "parallel.zero_stage=1", "parallel.quantize_gradients=int8", "parallel.quantize_feedback=false"];
    "tensor-2" GPT2 on 2: ["parallel.tensor_parallel=2"];
    "tensor-4-sequence" LLAMA on 4: ["parallel.tensor_parallel=4", "parallel.sequence_parallel=true"];
    "tensor-2-chunks" LLAMA on 2: ["parallel.tensor_parallel=2", "parallel.sequence_parallel=true", "parallel.tensor_chunks=2"];
    "tensor-square" GPT2 on 4: ["parallel.tensor_parallel=4", "parallel.tensor_layout=2d", "train.micro_batch=2"];
    "tensor-2-recompute" LLAMA on 2: ["parallel.tensor_parallel=2", "parallel.recompute=full", "parallel.partition_activations=true"];
    "tensor-2-selective" GPT2 on 2: ["parallel.tensor_parallel=2", "parallel.recompute=selective", "train.precision=bf16"];
    "recompute-by-layer" LLAMA on 1: ["parallel.recompute={ default = \"none\", layers = [{ from = 0, every = 2, mode = \"full\" }, { from = 1, to = 1, every = 1, mode = \"selective\" }] }"];
    "context-ring" LLAMA on 2: ["parallel.context_parallel=2", "parallel.context_parallel_method=ring"];
    "context-gather" GPT2 on 2: ["parallel.context_parallel=2", "parallel.context_parallel_method=all_gather"];
    "context-all-to-all" LLAMA on 2: ["parallel.context_parallel=2", "parallel.context_parallel_method=all_to_all"];
    "pipeline-gpipe" GPT2 on 2: ["parallel.pipeline_parallel=2", "parallel.pipeline_schedule=gpipe"];
    "pipeline-1f1b" LLAMA on 2: ["parallel.pipeline_parallel=2", "parallel.pipeline_schedule=1f1b"];
    "pipeline-interleaved" GPT2 on 2: ["parallel.pipeline_parallel=2", "parallel.pipeline_schedule=interleaved_1f1b"];
    "pipeline-looped" LLAMA on 2: ["parallel.pipeline_parallel=2", "parallel.pipeline_schedule=looped_bfs"];
    "pipeline-zb-h1" GPT2 on 3: ["parallel.pipeline_parallel=3", "parallel.pipeline_schedule=zb_h1"];
    "pipeline-zb-v" LLAMA on 2: ["parallel.pipeline_parallel=2", "parallel.pipeline_schedule=zb_v", "parallel.recompute=selective"];
    "pipeline-dualpipe-v" GPT2 on 2: ["parallel.pipeline_parallel=2", "parallel.pipeline_schedule=dualpipe_v"];
    "pipeline-stages" LLAMA on 2: ["parallel.pipeline_parallel=2", "parallel.pipeline_stages=[2, 4]", "train.micro_batch=2"];
    "pipeline-rows" LLAMA on 2: ["parallel.pipeline_parallel=2", "train.micro_batch=4", "parallel.pipeline_schedule=\"F0,F1,B0,B1\\nF0,B0,F1,B1\""];
    "experts-2" MIXTRAL on 2: ["parallel.data_parallel_shard=2", "parallel.expert_parallel=2"];
    "experts-2-zero-3" MIXTRAL on 4: ["parallel.data_parallel_shard=4", "parallel.expert_parallel=2", "parallel.zero_stage=3"];
    "expert-tensor-2" MIXTRAL on 2: ["parallel.tensor_parallel=2", "parallel.expert_tensor_parallel=2"];
    "experts-of-deepseek" DEEPSEEK on 2: ["parallel.tensor_parallel=2", "parallel.expert_parallel=2", "parallel.sequence_parallel=true"];
    "experts-and-pipeline" MIXTRAL on 4: ["parallel.data_parallel_shard=2", "parallel.expert_parallel=2", "parallel.pipeline_parallel=2", "parallel.zero_stage=1"];
    "tensor-and-pipeline" LLAMA on 4: ["parallel.tensor_parallel=2", "parallel.pipeline_parallel=2", "parallel.pipeline_schedule=zb_h1"];
    "tensor-and-zero-3" LLAMA on 4: ["parallel.tensor_parallel=2", "parallel.sequence_parallel=true", "parallel.data_parallel_shard=2", "parallel.zero_stage=3", "train.precision=bf16"];
    "context-and-tensor" LLAMA on 4: ["parallel.context_parallel=2", "parallel.tensor_parallel=2", "parallel.sequence_parallel=true"];
    "context-and-pipeline" GPT2 on 4: ["parallel.context_parallel=2", "parallel.pipeline_parallel=2", "parallel.pipeline_schedule=interleaved_1f1b"];
    "pipeline-and-zero-2" GPT2 on 4: ["parallel.pipeline_parallel=2", "parallel.data_parallel_shard=2", "parallel.zero_stage=2"];
    "pipeline-and-zero-3" LLAMA on 4: ["parallel.pipeline_parallel=2", "parallel.data_parallel_shard=2", "parallel.zero_stage=3", "parallel.pipeline_schedule=zb_v"];
    "everything-on-8" LLAMA on 8: ["parallel.pipeline_parallel=2", "parallel.tensor_parallel=2", "parallel.context_parallel=2", "parallel.zero_stage=1"];
    "offload-optimizer-host" LLAMA on 1: ["parallel.offload.optimizer=cpu", "train.precision=bf16"];
    "offload-optimizer-disk" GPT2 on 2: ["parallel.data_parallel_shard=2", "parallel.zero_stage=2", "parallel.offload.optimizer=disk", "parallel.offload.fraction=0.5"];
    "offload-all-disk" LLAMA on 2: ["parallel.data_parallel_shard=2", "parallel.zero_stage=3", "parallel.offload.optimizer=disk", "parallel.offload.gradients=disk", "parallel.offload.parameters=disk", "parallel.offload.activations=disk", "parallel.recompute=full"];
    "offload-all-host" GPT2 on 1: ["parallel.offload.optimizer=cpu", "parallel.offload.gradients=cpu", "parallel.offload.parameters=cpu"];
    "frozen" PRETRAINED on 2: ["fine_tune.freeze=[\"model.layers.0.*\", \"model.embed_tokens.*\"]", "parallel.pipeline_parallel=2"];
    "lora" PRETRAINED on 2: ["fine_tune.lora_rank=4", "parallel.data_parallel_shard=2", "parallel.zero_stage=3"];
    "resumed-zero-3-as-pipeline" GPT2 on 2: ["parallel.data_parallel_shard=2", "parallel.zero_stage=3"], then on 2: ["parallel.pipeline_parallel=2", "parallel.data_parallel_shard=1", "parallel.zero_stage=0"];
    "resumed-tensor-as-one" LLAMA on 2: ["parallel.tensor_parallel=2"], then on 1: ["parallel.recompute=full", "parallel.tensor_parallel=1"];
    "resumed-one-as-experts" MIXTRAL on 1: [], then on 2: ["parallel.data_parallel_shard=2", "parallel.expert_parallel=2", "parallel.zero_stage=2"];
}
