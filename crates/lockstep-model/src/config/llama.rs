//! Configuration of the Llama-like families: Llama, Mistral, Qwen2 and Qwen3, and their mixture-of-experts variants.
//!
//! These families share one architecture. They differ in which linear layers have biases, in norms on queries and
//! keys, and in sliding windows: plain fields of the struct.

use serde_json::{Map, Value, json};

use super::experts::ExpertsConfig;
use super::keys::{FIXED_FOR_ALL, FIXED_FOR_DEEPSEEK, FIXED_FOR_EXPERTS, FIXED_FOR_LLAMA};
use super::latent::LatentAttention;
use super::limits::{Checks, HEADS, LAYERS, POSITIONS, VOCABULARY, WIDTH};
use super::reader::{Entry, Reader};
use super::{Rope, SpecialTokens};
use crate::error::ConfigProblem;

/// A Llama-like model: RMSNorm before attention and feed-forward, RoPE, grouped-query attention, and a
/// feed-forward layer gated by SiLU.
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
    /// Number of positions that a position sees, itself included; `None` means all before it.
    pub sliding_window: Option<usize>,
    /// True if the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// True if the attention's output projection has a bias.
    pub output_bias: bool,
    /// True if the three feed-forward projections have biases.
    pub mlp_bias: bool,
    /// True if queries and keys pass an RMSNorm over each head before RoPE.
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
    /// Ids of the special tokens.
    pub tokens: SpecialTokens,
}

/// Llama-like families, one for each `model_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LlamaFamily {
    /// Llama 1 to 3: biases as configured.
    Llama,
    /// Mistral: a sliding window, no biases.
    Mistral,
    /// Qwen2 and Qwen2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen3: norms on queries and keys, and an independent head size.
    Qwen3,
    /// Mistral's architecture with experts in every layer.
    Mixtral,
    /// Qwen2's architecture with experts, one of which is shared by all tokens.
    Qwen2Moe,
    /// Qwen3's architecture with experts.
    Qwen3Moe,
    /// DeepSeek-V3: latent attention, and experts that are chosen by group and balanced by a selection bias.
    DeepseekV3,
}

impl LlamaFamily {
    /// Every Llama-like family.
    pub const ALL: [Self; 8] = [
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Mixtral,
        Self::Qwen2Moe,
        Self::Qwen3Moe,
        Self::DeepseekV3,
    ];

    /// Returns the value of `model_type`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Mixtral => "mixtral",
            Self::Qwen2Moe => "qwen2_moe",
            Self::Qwen3Moe => "qwen3_moe",
            Self::DeepseekV3 => "deepseek_v3",
        }
    }

    pub(super) const fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
            Self::Qwen2Moe => "Qwen2MoeForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::DeepseekV3 => "DeepseekV3ForCausalLM",
        }
    }

    const fn is_qwen(self) -> bool {
        matches!(self, Self::Qwen2 | Self::Qwen3 | Self::Qwen2Moe | Self::Qwen3Moe)
    }

    /// Returns true if queries, keys and values always have biases.
    const fn has_qkv_biases(self) -> bool {
        matches!(self, Self::Qwen2 | Self::Qwen2Moe)
    }

    /// Returns true if queries and keys have norms.
    const fn has_qk_norm(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Qwen3Moe)
    }

    /// Returns true if attention can have a sliding window.
    const fn has_windows(self) -> bool {
        !matches!(self, Self::Llama | Self::DeepseekV3)
    }

    /// Returns true if the family has experts.
    pub const fn has_experts(self) -> bool {
        matches!(self, Self::Mixtral | Self::Qwen2Moe | Self::Qwen3Moe | Self::DeepseekV3)
    }

    /// Returns true if `attention_bias` is a key of this family's `config.json`.
    const fn has_attention_bias_key(self) -> bool {
        matches!(self, Self::Llama | Self::Qwen3 | Self::Qwen3Moe)
    }
}

impl LlamaConfig {
    pub(super) fn read(family: LlamaFamily, table: &Map<String, Value>) -> (Self, Vec<ConfigProblem>) {
        let mut reader = Reader::new(table, "");
        reader.fixed(FIXED_FOR_ALL);
        reader.fixed(FIXED_FOR_LLAMA);
        // transformers' defaults differ between the families.
        let (vocabulary, intermediate, key_value_heads, positions) = match family {
            LlamaFamily::Llama => (32000, 11008, None, 2048),
            LlamaFamily::Mistral => (32000, 14336, Some(8), 4096 * 32),
            LlamaFamily::Qwen2 | LlamaFamily::Qwen3 => (151936, 22016, Some(32), 32768),
            LlamaFamily::Mixtral => (32000, 14336, Some(8), 4096 * 32),
            LlamaFamily::Qwen2Moe => (151936, 5632, Some(16), 32768),
            LlamaFamily::Qwen3Moe => (151936, 6144, Some(4), 32768),
            LlamaFamily::DeepseekV3 => (129280, 18432, None, 4096),
        };
        let (hidden, layers, heads) = match family {
            LlamaFamily::Qwen2Moe => (2048, 24, 16),
            LlamaFamily::Qwen3Moe => (2048, 24, 32),
            LlamaFamily::DeepseekV3 => (7168, 61, 128),
            _ => (4096, 32, 32),
        };
        if family.has_experts() {
            reader.fixed(FIXED_FOR_EXPERTS);
        }
        let has_latent = family == LlamaFamily::DeepseekV3;
        if has_latent {
            reader.fixed(FIXED_FOR_DEEPSEEK);
        }
        let latent = has_latent.then(|| LatentAttention::read(&mut reader));
        let hidden_size = reader.size("hidden_size", hidden);
        let num_hidden_layers = reader.size("num_hidden_layers", layers);
        let num_attention_heads = reader.size("num_attention_heads", heads);
        let num_key_value_heads = match reader.optional_size("num_key_value_heads") {
            Entry::Given(heads) => heads,
            Entry::Null => num_attention_heads,
            Entry::Absent => key_value_heads.unwrap_or(num_attention_heads),
        };
        let max_position_embeddings = reader.size("max_position_embeddings", positions);
        let attention_bias = read_attention_bias(&mut reader, family);
        let intermediate_size = reader.size("intermediate_size", intermediate);
        let epsilon = if family == LlamaFamily::Mixtral { 1e-5 } else { 1e-6 };
        let config = Self {
            family,
            vocab_size: reader.size("vocab_size", vocabulary),
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim: match &latent {
                Some(latent) => latent.head_dim(),
                None => read_head_dim(&mut reader, family, hidden_size, num_attention_heads),
            },
            max_position_embeddings,
            rms_norm_eps: reader.number("rms_norm_eps", epsilon),
            rope: Rope::read(&mut reader, max_position_embeddings),
            sliding_window: read_sliding_window(&mut reader, family, num_hidden_layers),
            qkv_bias: attention_bias || family.has_qkv_biases(),
            output_bias: attention_bias,
            mlp_bias: read_mlp_bias(&mut reader, family),
            qk_norm: family.has_qk_norm(),
            attention_dropout: reader.number("attention_dropout", 0.0),
            latent,
            experts: ExpertsConfig::read(&mut reader, family, intermediate_size).map(Box::new),
            initializer_range: reader.number("initializer_range", 0.02),
            tie_word_embeddings: reader.flag("tie_word_embeddings", false),
            tokens: SpecialTokens::read(&mut reader),
        };
        (config, reader.finish())
    }

    /// Returns the keys of `config.json`, without those that all families have; RoPE in form 4.
    pub(super) fn table(&self) -> Map<String, Value> {
        let mut table = Map::new();
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
        put("hidden_act", json!("silu"));
        put("rms_norm_eps", json!(self.rms_norm_eps));
        put("attention_dropout", json!(self.attention_dropout));
        put("initializer_range", json!(self.initializer_range));
        put("tie_word_embeddings", json!(self.tie_word_embeddings));
        if self.family.has_attention_bias_key() {
            put("attention_bias", json!(self.output_bias));
        }
        match self.family {
            LlamaFamily::Llama => {
                put("mlp_bias", json!(self.mlp_bias));
            }
            LlamaFamily::DeepseekV3 => {
                put("num_nextn_predict_layers", json!(0));
            }
            LlamaFamily::Mistral | LlamaFamily::Mixtral => {
                put("sliding_window", json!(self.sliding_window));
            }
            LlamaFamily::Qwen2 | LlamaFamily::Qwen3 | LlamaFamily::Qwen2Moe | LlamaFamily::Qwen3Moe => {
                // If there are windows, all layers have one: `max_window_layers` counts the layers before the first.
                let windows = self.sliding_window.is_some();
                put("use_sliding_window", json!(windows));
                put("sliding_window", json!(self.sliding_window));
                put("max_window_layers", json!(if windows { 0 } else { self.num_hidden_layers }));
            }
        }
        if let Some(experts) = &self.experts {
            experts.write(self.family, &mut table);
        }
        if let Some(latent) = &self.latent {
            latent.write(&mut table);
        }
        self.rope.write_form_4(&mut table);
        table
    }

    pub(super) fn problems(&self) -> Vec<ConfigProblem> {
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
        self.check_family(&mut checks);
        checks.problems.extend(self.rope.problems());
        checks.problems
    }

    /// Checks that the family's `config.json` can express this configuration, which may have been built in code.
    fn check_family(&self, checks: &mut Checks) {
        let family = self.family;
        let attention_bias_fits = match family {
            LlamaFamily::Llama | LlamaFamily::Qwen3 | LlamaFamily::Qwen3Moe => {
                self.qkv_bias == self.output_bias
            }
            LlamaFamily::Mistral | LlamaFamily::Mixtral | LlamaFamily::DeepseekV3 => {
                !self.qkv_bias && !self.output_bias
            }
            LlamaFamily::Qwen2 | LlamaFamily::Qwen2Moe => self.qkv_bias && !self.output_bias,
        };
        let rules = [
            (attention_bias_fits, "these attention biases"),
            (!self.mlp_bias || family == LlamaFamily::Llama, "biases in the feed-forward layer"),
            (self.qk_norm == family.has_qk_norm(), "this setting of `qk_norm`"),
            (self.experts.is_some() == family.has_experts(), "this setting of `experts`"),
            (self.latent.is_some() == (family == LlamaFamily::DeepseekV3), "this setting of `latent`"),
            (self.sliding_window.is_none() || family.has_windows(), "a sliding window"),
        ];
        for (fits, what) in rules {
            if !fits {
                checks.conflict(format!("model type \"{}\" cannot have {what}", family.model_type()));
            }
        }
    }
}

fn read_head_dim(reader: &mut Reader<'_>, family: LlamaFamily, hidden_size: usize, heads: usize) -> usize {
    match (reader.optional_size("head_dim"), family) {
        (Entry::Given(size), _) => size,
        (Entry::Absent, LlamaFamily::Qwen3) => 128,
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
    let given = reader.flag("attention_bias", family.has_qkv_biases());
    match family {
        LlamaFamily::Llama | LlamaFamily::Qwen3 | LlamaFamily::Qwen3Moe => return given,
        LlamaFamily::Mistral | LlamaFamily::Mixtral | LlamaFamily::DeepseekV3 if given => {
            reader.unsupported("attention_bias", "false (this family has no biases)");
        }
        LlamaFamily::Qwen2 | LlamaFamily::Qwen2Moe if !given => {
            reader.unsupported("attention_bias", "true (Qwen2 has biases on queries, keys and values)");
        }
        LlamaFamily::Mistral
        | LlamaFamily::Mixtral
        | LlamaFamily::DeepseekV3
        | LlamaFamily::Qwen2
        | LlamaFamily::Qwen2Moe => {}
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

/// Reads the sliding window of all layers. Qwen can restrict windows to the upper layers; that is supported only if
/// it amounts to all layers or none.
fn read_sliding_window(reader: &mut Reader<'_>, family: LlamaFamily, layers: usize) -> Option<usize> {
    let mut window = match (reader.optional_size("sliding_window"), family) {
        (Entry::Absent, LlamaFamily::Llama | LlamaFamily::Mixtral | LlamaFamily::DeepseekV3) => None,
        (Entry::Absent, _) => Some(4096),
        // transformers writes 0 for Qwen2-MoE without windows.
        (Entry::Given(0), LlamaFamily::Qwen2Moe) => None,
        (entry, _) => entry.given(),
    };
    let mut layers_before_first_window = 0;
    if family.is_qwen() {
        layers_before_first_window = reader.size("max_window_layers", 28);
        if !reader.flag("use_sliding_window", false) {
            window = None;
        }
    }
    if !family.has_windows() && window.is_some() {
        reader.unsupported("sliding_window", "null (this family sees all positions; Mistral has windows)");
        return None;
    }
    match read_layer_types(reader, layers) {
        // Explicit layer types take precedence; Mistral's attention reads `sliding_window` alone.
        Some(LayerTypes::Full) if family.is_qwen() => return None,
        Some(LayerTypes::Full) if window.is_some() => {
            reader.unsupported(
                "layer_types",
                "\"sliding_attention\" in all layers where there is a sliding window",
            );
        }
        Some(LayerTypes::Sliding) if window.is_none() => {
            reader.unsupported(
                "layer_types",
                "\"full_attention\" in all layers where there is no sliding window",
            );
        }
        Some(LayerTypes::Full | LayerTypes::Sliding) => {}
        None if layers_before_first_window >= layers => return None,
        None if window.is_some() && layers_before_first_window > 0 => {
            let supported = format!("0 (windows in all layers) or at least {layers} (in none)");
            reader.unsupported("max_window_layers", supported);
        }
        None => {}
    }
    window
}

/// Layer types of a model whose layers are all of one type.
enum LayerTypes {
    Full,
    Sliding,
}

fn read_layer_types(reader: &mut Reader<'_>, layers: usize) -> Option<LayerTypes> {
    let types = reader.value("layer_types")?;
    let all = |name: &str| {
        types.as_array().is_some_and(|list| list.len() == layers && list.iter().all(|entry| entry == name))
    };
    if all("full_attention") {
        return Some(LayerTypes::Full);
    }
    if all("sliding_attention") {
        return Some(LayerTypes::Sliding);
    }
    reader.unsupported(
        "layer_types",
        format!("{layers} entries that are all \"full_attention\" or all \"sliding_attention\""),
    );
    None
}
