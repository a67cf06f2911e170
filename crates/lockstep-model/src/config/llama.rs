//! Configuration of the Llama-like families: Llama, Mistral, Qwen, Gemma, OLMo 2 and Phi-3, and the families with experts
//! Mixtral, Qwen-MoE, DeepSeek-V3 and gpt-oss.
//!
//! These families share one architecture. What a `config.json` can change is a field of the struct; the table of
//! families (`family.rs`) has what it cannot.

use lockstep_tensor::GatedActivation;
use serde_json::{Map, Value, json};

use super::classes::Classes;
use super::experts::ExpertsConfig;
use super::family::{AttentionBias, FamilyTraits, LlamaFamily, QueryKeyNorm, Windows};
use super::family_rope::FamilyRopes;
use super::keys::{self, FIXED_FOR_ALL, FIXED_FOR_DEEPSEEK, FIXED_FOR_EXPERTS, FIXED_FOR_LLAMA};
use super::latent::LatentAttention;
use super::limits::{Checks, HEADS, LAYERS, POSITIONS, VOCABULARY, WIDTH};
use super::reader::{Entry, Reader};
use super::rope::{Rope, RopeScaling};
use super::tokens::SpecialTokens;
use super::windows::{LayerWindows, layer_types};
use crate::error::ConfigProblem;

/// A Llama-like model: RMSNorm, RoPE, grouped-query attention, and a gated feed-forward layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// The family, which determines `model_type`.
    pub family: LlamaFamily,
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Gated activation of the feed-forward layer and of experts.
    pub gate: GatedActivation,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads of a block.
    pub num_attention_heads: usize,
    /// Number of key/value heads of a block.
    pub num_key_value_heads: usize,
    /// Number of elements of one head; even. `num_attention_heads * head_dim` need not equal the hidden size.
    pub head_dim: usize,
    /// Length in tokens of the longest sequence that the model supports.
    pub max_position_embeddings: usize,
    /// Epsilon that RMSNorm adds to the mean square.
    pub rms_norm_eps: f64,
    /// Settings of rotary position embedding.
    pub rope: Rope,
    /// Fraction of each head's elements that rotate, in (0, 1].
    pub rotary_fraction: f64,
    /// Settings of rotary position embedding in layers with a sliding window, for the family where they differ (Gemma 3).
    pub local_rope: Option<Rope>,
    /// Number of positions that a position sees in layers with a window, itself included; `None` means all before it.
    pub sliding_window: Option<usize>,
    /// Period of the layers that see all positions in spite of `sliding_window`: the last of every `full_every`.
    pub full_every: Option<usize>,
    /// Soft cap of attention scores: `cap · tanh(score / cap)`.
    pub score_cap: Option<f64>,
    /// Soft cap of logits.
    pub logit_cap: Option<f64>,
    /// Scores are divided by the square root of this number; `None` takes that of the head size.
    pub query_scale: Option<f64>,
    /// True if the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// True if the attention's output projection has a bias.
    pub output_bias: bool,
    /// True if the three feed-forward projections have biases.
    pub mlp_bias: bool,
    /// True if queries and keys pass an RMSNorm before RoPE.
    pub qk_norm: bool,
    /// Dropout probability on attention probabilities.
    pub attention_dropout: f64,
    /// Mixture-of-experts layers, for families that have them.
    pub experts: Option<Box<ExpertsConfig>>,
    /// Multi-head latent attention, for the family that has it; it determines head size and key/value heads.
    pub latent: Option<LatentAttention>,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// True if the output layer is tied to the token embedding.
    pub tie_word_embeddings: bool,
    /// Classes of sequences; `None` for a language model.
    pub classes: Option<Classes>,
    /// Ids of the special tokens.
    pub tokens: SpecialTokens,
}

/// End of the names of transformers' classes that are language models.
const LANGUAGE_MODEL: &str = "ForCausalLM";
/// End of the names of transformers' classes that classify sequences.
const CLASSIFIER: &str = "ForSequenceClassification";

impl LlamaConfig {
    pub(crate) fn read(family: LlamaFamily, table: &Map<String, Value>) -> (Self, Vec<ConfigProblem>) {
        let traits = family.traits();
        let [vocabulary, hidden, intermediate, layers, heads, positions] = traits.sizes;
        let mut reader = Reader::new(table, "");
        let has_latent = family == LlamaFamily::DeepseekV3;
        read_fixed(&mut reader, family);
        let latent = has_latent.then(|| LatentAttention::read(&mut reader));
        let hidden_size = reader.size("hidden_size", hidden);
        let num_hidden_layers = reader.size("num_hidden_layers", layers);
        let num_attention_heads = reader.size("num_attention_heads", heads);
        let num_key_value_heads = match reader.optional_size("num_key_value_heads") {
            Entry::Given(heads) => heads,
            Entry::Null => num_attention_heads,
            Entry::Absent => traits.num_key_value_heads.unwrap_or(num_attention_heads),
        };
        let max_position_embeddings = reader.size("max_position_embeddings", positions);
        let attention_bias = read_attention_bias(&mut reader, family);
        let intermediate_size = reader.size("intermediate_size", intermediate);
        let LayerWindows { window, full_every } = LayerWindows::read(&mut reader, family, num_hidden_layers);
        let ropes = FamilyRopes::read(&mut reader, family, max_position_embeddings);
        let [score_cap, logit_cap] = read_soft_caps(&mut reader, family);
        let config = Self {
            family,
            vocab_size: reader.size("vocab_size", vocabulary),
            hidden_size,
            intermediate_size,
            gate: read_gate(&mut reader, traits.block.gate),
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim: match &latent {
                Some(latent) => latent.head_dim(),
                None => read_head_dim(&mut reader, family, hidden_size, num_attention_heads),
            },
            max_position_embeddings,
            rms_norm_eps: reader.number("rms_norm_eps", traits.rms_norm_eps),
            rope: ropes.rope,
            rotary_fraction: ropes.rotary_fraction,
            local_rope: ropes.local,
            sliding_window: window,
            full_every,
            score_cap,
            logit_cap,
            query_scale: traits.soft_caps.map(|_| reader.number("query_pre_attn_scalar", 256.0)),
            qkv_bias: attention_bias || traits.attention_bias == AttentionBias::OnQueriesKeysValues,
            output_bias: attention_bias,
            mlp_bias: read_mlp_bias(&mut reader, family),
            qk_norm: traits.qk_norm != QueryKeyNorm::Never,
            attention_dropout: reader.number("attention_dropout", 0.0),
            latent,
            experts: ExpertsConfig::read(&mut reader, family, intermediate_size).map(Box::new),
            initializer_range: reader.number("initializer_range", 0.02),
            tie_word_embeddings: reader.flag("tie_word_embeddings", traits.ties_embeddings),
            classes: reader
                .architecture()
                .is_some_and(|name| name.ends_with(CLASSIFIER))
                .then(|| Classes::read(&mut reader, 2)),
            tokens: SpecialTokens::read(&mut reader),
        };
        (config, reader.finish())
    }

    /// Returns the keys of `config.json`, without those that all families have; RoPE in form 4.
    pub(crate) fn keys(&self) -> Map<String, Value> {
        let (mut table, traits) = (Map::new(), self.family.traits());
        let mut put = |key: &str, value: Value| table.insert(key.to_owned(), value);
        put("vocab_size", json!(self.vocab_size));
        put("hidden_size", json!(self.hidden_size));
        put("intermediate_size", json!(self.intermediate_size));
        put("num_hidden_layers", json!(self.num_hidden_layers));
        put("num_attention_heads", json!(self.num_attention_heads));
        put("num_key_value_heads", json!(self.num_key_value_heads));
        if self.latent.is_none() {
            put("head_dim", json!(self.head_dim));
        }
        put("max_position_embeddings", json!(self.max_position_embeddings));
        for key in activation_keys(self.family) {
            put(key, json!(activation_name(self.gate)));
        }
        if let GatedActivation::Clamped { slope, limit } = self.gate {
            put("swiglu_alpha", json!(shortest(slope)));
            put("swiglu_limit", json!(shortest(limit)));
        }
        put("rms_norm_eps", json!(self.rms_norm_eps));
        put("attention_dropout", json!(self.attention_dropout));
        put("initializer_range", json!(self.initializer_range));
        put("tie_word_embeddings", json!(self.tie_word_embeddings));
        if traits.attention_bias == AttentionBias::Configured {
            put("attention_bias", json!(self.output_bias));
        }
        if self.family == LlamaFamily::Llama {
            put("mlp_bias", json!(self.mlp_bias));
        }
        if self.family == LlamaFamily::DeepseekV3 {
            put("num_nextn_predict_layers", json!(0));
        }
        if traits.attention_bias == AttentionBias::Everywhere {
            put("attention_bias", json!(true));
        }
        if traits.soft_caps.is_some() {
            put("attn_logit_softcapping", json!(self.score_cap));
            put("final_logit_softcapping", json!(self.logit_cap));
            put("query_pre_attn_scalar", json!(self.query_scale));
        }
        if traits.windows != Windows::Never {
            put("sliding_window", json!(self.sliding_window));
        }
        match traits.windows {
            Windows::InUpperLayers => {
                // If there are windows, all layers have one: `max_window_layers` counts the layers before the first.
                let windows = self.sliding_window.is_some();
                put("use_sliding_window", json!(windows));
                put("max_window_layers", json!(if windows { 0 } else { self.num_hidden_layers }));
            }
            Windows::InMostLayers { .. } => {
                put("layer_types", layer_types(self.full_every, self.num_hidden_layers));
            }
            Windows::Never | Windows::InAllLayers { .. } => {}
        }
        if let Some(experts) = &self.experts {
            experts.write(self.family, &mut table);
        }
        if let Some(latent) = &self.latent {
            latent.write(&mut table);
        }
        if let Some(classes) = &self.classes {
            classes.write(&mut table);
            let family = self.family.traits().architecture.trim_end_matches(LANGUAGE_MODEL);
            table.insert("architectures".to_owned(), json!([format!("{family}{CLASSIFIER}")]));
        }
        self.ropes().write_form_4(self.family, &mut table);
        table
    }

    /// Returns the RoPE settings in the form in which files have them.
    pub(crate) fn ropes(&self) -> FamilyRopes {
        FamilyRopes {
            rope: self.rope.clone(),
            rotary_fraction: self.rotary_fraction,
            local: self.local_rope.clone(),
        }
    }

    /// Removes lists of layers and tables of RoPE that `overrides` make wrong.
    pub(crate) fn forget_derived_lists(
        &self,
        table: &mut Map<String, Value>,
        overrides: &Map<String, Value>,
    ) {
        if let Some(layers) = overrides.get("num_hidden_layers").and_then(Value::as_u64)
            && table.contains_key("layer_types")
        {
            // A hostile number is refused when the overridden table is read.
            let layers = usize::try_from(layers).unwrap_or(0).min(LAYERS);
            table.insert("layer_types".into(), layer_types(self.full_every, layers));
        }
        if overrides.get("rope_parameters").is_some_and(|ropes| ropes.get("full_attention").is_some()) {
            table.remove("rope_theta");
            table.remove("rope_local_base_freq");
        }
    }

    /// Returns true if a layer sees all positions in a model where most layers have a window.
    pub(crate) fn is_full(&self, layer: usize) -> bool {
        self.full_every.is_some_and(|every| (layer + 1).is_multiple_of(every))
    }

    /// Returns the number of elements of each head that rotate.
    pub(crate) fn rotary_dim(&self) -> usize {
        match &self.latent {
            Some(latent) => latent.rotary_dim,
            None => (self.head_dim as f64 * self.rotary_fraction) as usize,
        }
    }

    pub(crate) fn checked(&self) -> Vec<ConfigProblem> {
        let mut checks = Checks::default();
        checks.size("vocab_size", self.vocab_size, VOCABULARY);
        checks.size("hidden_size", self.hidden_size, WIDTH);
        checks.size("intermediate_size", self.intermediate_size, WIDTH);
        checks.size("num_hidden_layers", self.num_hidden_layers, LAYERS);
        checks.size("num_attention_heads", self.num_attention_heads, HEADS);
        checks.size("num_key_value_heads", self.num_key_value_heads, HEADS);
        checks.size("head_dim", self.head_dim, HEADS);
        checks.size("max_position_embeddings", self.max_position_embeddings, POSITIONS);
        checks.divides(
            ("num_key_value_heads", self.num_key_value_heads),
            ("num_attention_heads", self.num_attention_heads),
        );
        if self.family == LlamaFamily::Llama {
            checks.divides(
                ("num_attention_heads", self.num_attention_heads),
                ("hidden_size", self.hidden_size),
            );
        }
        checks.divides(("RoPE's pair of elements", 2), ("head_dim", self.head_dim));
        if self.rotary_fraction != 1.0 {
            let rotary_dim = ("elements of a head that rotate", self.rotary_dim());
            checks.divides(("RoPE's pair of elements", 2), rotary_dim);
            checks.size(rotary_dim.0, rotary_dim.1, self.head_dim);
        }
        let factors = [
            ("attn_logit_softcapping", self.score_cap),
            ("final_logit_softcapping", self.logit_cap),
            ("query_pre_attn_scalar", self.query_scale),
        ];
        if let GatedActivation::Clamped { slope, limit } = self.gate {
            checks.factor("swiglu_alpha", f64::from(slope));
            checks.factor("swiglu_limit", f64::from(limit));
        }
        for (key, value) in factors.into_iter().filter_map(|(key, value)| Some((key, value?))) {
            checks.factor(key, value);
        }
        if let Some(window) = self.sliding_window {
            checks.size("sliding_window", window, POSITIONS);
        }
        checks.epsilon("rms_norm_eps", self.rms_norm_eps);
        checks.fraction("attention_dropout", self.attention_dropout);
        checks.deviation("initializer_range", self.initializer_range);
        if let Some(experts) = &self.experts {
            experts.check(&mut checks);
        }
        if let Some(latent) = &self.latent {
            latent.check(&mut checks);
            if self.num_key_value_heads != self.num_attention_heads || self.head_dim != latent.head_dim() {
                checks.conflict(
                    "latent attention has as many keys and values as heads, of its own size".to_owned(),
                );
            }
        }
        if let Some(classes) = &self.classes {
            classes.check(&mut checks);
        }
        self.check_family(&mut checks);
        checks.problems.extend(self.rope.problems());
        checks.problems.extend(self.rope.problems_of_pairs(self.rotary_dim() / 2));
        checks.problems.extend(self.local_rope.iter().flat_map(Rope::problems));
        checks.problems
    }

    /// Checks that the family's `config.json` can express this configuration, which may have been built in code.
    fn check_family(&self, checks: &mut Checks) {
        let (family, FamilyTraits { attention_bias, qk_norm, windows, soft_caps, .. }) =
            (self.family, self.family.traits());
        let is_periodic = matches!(windows, Windows::InMostLayers { .. });
        let no_caps = self.score_cap.or(self.logit_cap).or(self.query_scale).is_none();
        let attention_bias_fits = match attention_bias {
            AttentionBias::Configured => self.qkv_bias == self.output_bias,
            AttentionBias::OnQueriesKeysValues => self.qkv_bias && !self.output_bias,
            AttentionBias::Everywhere => self.qkv_bias && self.output_bias,
            AttentionBias::Never => !self.qkv_bias && !self.output_bias,
        };
        let has_gate =
            std::mem::discriminant(&self.gate) == std::mem::discriminant(&family.traits().block.gate);
        let is_plain = self.rope.scaling == RopeScaling::Default;
        let is_long = matches!(self.rope.scaling, RopeScaling::LongRope(_));
        let rules = [
            (has_gate, "this activation"),
            (attention_bias_fits, "these attention biases"),
            (!self.mlp_bias || family == LlamaFamily::Llama, "biases in the feed-forward layer"),
            (self.qk_norm == (qk_norm != QueryKeyNorm::Never), "this setting of `qk_norm`"),
            (self.full_every.is_none() || is_periodic, "layers without the sliding window of others"),
            (soft_caps.is_some() || no_caps, "soft caps or a scale of queries"),
            (self.local_rope.is_some() == (family == LlamaFamily::Gemma3), "this setting of `local_rope`"),
            (self.rotary_fraction == 1.0 || family == LlamaFamily::Phi3, "heads that rotate in part"),
            (family != LlamaFamily::Phi3 || is_plain || is_long, "scaled RoPE other than LongRoPE"),
            (!is_long || (self.latent.is_none() && self.local_rope.is_none()), "LongRoPE"),
            (self.experts.is_some() == family.has_experts(), "this setting of `experts`"),
            (self.latent.is_some() == (family == LlamaFamily::DeepseekV3), "this setting of `latent`"),
            (self.sliding_window.is_none() || windows != Windows::Never, "a sliding window"),
        ];
        for (fits, what) in rules {
            if !fits {
                checks.conflict(format!("model type \"{}\" cannot have {what}", family.model_type()));
            }
        }
    }
}

fn read_head_dim(reader: &mut Reader<'_>, family: LlamaFamily, hidden_size: usize, heads: usize) -> usize {
    match (reader.optional_size("head_dim"), family.traits().head_dim) {
        (Entry::Given(size), _) => size,
        (Entry::Absent, Some(size)) => size,
        (Entry::Absent | Entry::Null, _) => {
            // Zero heads are reported by the range checks.
            if heads != 0 && !hidden_size.is_multiple_of(heads) {
                reader.conflict(format!(
                    "`head_dim` is absent and `num_attention_heads` = {heads} does not divide `hidden_size` = \
                     {hidden_size}"
                ));
            }
            hidden_size.checked_div(heads).unwrap_or(2)
        }
    }
}

fn read_attention_bias(reader: &mut Reader<'_>, family: LlamaFamily) -> bool {
    if family == LlamaFamily::Qwen2Moe && !reader.flag("qkv_bias", true) {
        reader.unsupported("qkv_bias", "true (Qwen2 has biases on queries, keys and values)");
    }
    let biases = family.traits().attention_bias;
    let always = matches!(biases, AttentionBias::OnQueriesKeysValues | AttentionBias::Everywhere);
    let given = reader.flag("attention_bias", always);
    match biases {
        AttentionBias::Everywhere => {
            if !given {
                reader.unsupported("attention_bias", "true (this family has biases on all projections)");
            }
            return true;
        }
        AttentionBias::Configured => return given,
        AttentionBias::Never if given => {
            reader.unsupported("attention_bias", "false (this family has no biases)");
        }
        AttentionBias::OnQueriesKeysValues if !given => {
            reader.unsupported("attention_bias", "true (Qwen2 has biases on queries, keys and values)");
        }
        AttentionBias::Never | AttentionBias::OnQueriesKeysValues => {}
    }
    false
}

fn read_mlp_bias(reader: &mut Reader<'_>, family: LlamaFamily) -> bool {
    let given = reader.flag("mlp_bias", false);
    if given && family != LlamaFamily::Llama {
        reader.unsupported("mlp_bias", "false (only Llama can have these biases)");
        return false;
    }
    given
}

/// Reads the keys that are supported with certain values only.
fn read_fixed(reader: &mut Reader<'_>, family: LlamaFamily) {
    reader.fixed(FIXED_FOR_ALL);
    reader.fixed(FIXED_FOR_LLAMA);
    if family.has_experts() {
        reader.fixed(FIXED_FOR_EXPERTS);
    }
    match family {
        LlamaFamily::DeepseekV3 => reader.fixed(FIXED_FOR_DEEPSEEK),
        LlamaFamily::Gemma | LlamaFamily::Gemma2 | LlamaFamily::Gemma3 => {
            reader.fixed(keys::FIXED_FOR_GEMMA);
            reader.harmless(keys::HARMLESS_FOR_GEMMA);
        }
        LlamaFamily::Phi3 => reader.fixed(keys::FIXED_FOR_PHI3),
        LlamaFamily::GptOss => reader.harmless(keys::HARMLESS_FOR_GPT_OSS),
        _ => {}
    }
    if family != LlamaFamily::Phi3 {
        reader.fixed(keys::FIXED_WITHOUT_ORIGINAL_CONTEXT);
    }
    let known = match family.traits().block.gate {
        GatedActivation::Gelu(_) => keys::FIXED_GELU,
        GatedActivation::Silu | GatedActivation::Clamped { .. } => keys::FIXED_SILU,
    };
    reader.fixed(known);
}

/// Returns the keys that name the activation.
fn activation_keys(family: LlamaFamily) -> &'static [&'static str] {
    match family {
        // transformers 4 reads the second key as well.
        LlamaFamily::Gemma => &["hidden_act", "hidden_activation"],
        LlamaFamily::Gemma2 | LlamaFamily::Gemma3 => &["hidden_activation"],
        _ => &["hidden_act"],
    }
}

fn activation_name(gate: GatedActivation) -> &'static str {
    match gate {
        GatedActivation::Gelu(_) => "gelu_pytorch_tanh",
        GatedActivation::Silu | GatedActivation::Clamped { .. } => "silu",
    }
}

/// Reads the numbers of a clamped activation.
fn read_gate(reader: &mut Reader<'_>, gate: GatedActivation) -> GatedActivation {
    let GatedActivation::Clamped { slope, limit } = gate else { return gate };
    let slope = reader.number("swiglu_alpha", shortest(slope)) as f32;
    GatedActivation::Clamped { slope, limit: reader.number("swiglu_limit", shortest(limit)) as f32 }
}

/// Returns the number whose shortest decimal form is that of `value`: 1.702 for the f32 next to it.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// Reads the soft caps of scores and logits; absent keys have the family's defaults.
fn read_soft_caps(reader: &mut Reader<'_>, family: LlamaFamily) -> [Option<f64>; 2] {
    let Some([scores, logits]) = family.traits().soft_caps else { return [None; 2] };
    let caps = [
        reader.number_or_null("attn_logit_softcapping", scores),
        reader.number_or_null("final_logit_softcapping", logits),
    ];
    if family == LlamaFamily::Gemma3 && caps[0].is_some() {
        reader.unsupported("attn_logit_softcapping", "null (Gemma 3 caps no scores)");
    }
    caps
}
