//! Configuration of the Llama-like families: Llama, Mistral, Qwen2 and Qwen3, and their mixture-of-experts variants.
//!
//! These families share one architecture. They differ in which linear layers have biases, in norms on queries and
//! keys, and in sliding windows: plain fields of the struct.

use serde_json::{Map, Value, json};

use super::classes::Classes;
use super::experts::ExpertsConfig;
use super::family::{AttentionBias, FamilyTraits, LlamaFamily, Windows};
use super::keys::{FIXED_FOR_ALL, FIXED_FOR_DEEPSEEK, FIXED_FOR_EXPERTS, FIXED_FOR_LLAMA};
use super::latent::LatentAttention;
use super::limits::{Checks, HEADS, LAYERS, POSITIONS, VOCABULARY, WIDTH};
use super::reader::{Entry, Reader};
use super::rope::Rope;
use super::tokens::SpecialTokens;
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
        reader.fixed(FIXED_FOR_ALL);
        reader.fixed(FIXED_FOR_LLAMA);
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
            Entry::Absent => traits.num_key_value_heads.unwrap_or(num_attention_heads),
        };
        let max_position_embeddings = reader.size("max_position_embeddings", positions);
        let attention_bias = read_attention_bias(&mut reader, family);
        let intermediate_size = reader.size("intermediate_size", intermediate);
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
            rms_norm_eps: reader.number("rms_norm_eps", traits.rms_norm_eps),
            rope: Rope::read(&mut reader, max_position_embeddings),
            sliding_window: read_sliding_window(&mut reader, family, num_hidden_layers),
            qkv_bias: attention_bias || traits.attention_bias == AttentionBias::OnQueriesKeysValues,
            output_bias: attention_bias,
            mlp_bias: read_mlp_bias(&mut reader, family),
            qk_norm: traits.has_qk_norm,
            attention_dropout: reader.number("attention_dropout", 0.0),
            latent,
            experts: ExpertsConfig::read(&mut reader, family, intermediate_size).map(Box::new),
            initializer_range: reader.number("initializer_range", 0.02),
            tie_word_embeddings: reader.flag("tie_word_embeddings", false),
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
        if self.family.traits().attention_bias == AttentionBias::Configured {
            put("attention_bias", json!(self.output_bias));
        }
        if self.family == LlamaFamily::Llama {
            put("mlp_bias", json!(self.mlp_bias));
        }
        if self.family == LlamaFamily::DeepseekV3 {
            put("num_nextn_predict_layers", json!(0));
        }
        if self.family.traits().windows != Windows::Never {
            put("sliding_window", json!(self.sliding_window));
        }
        if self.family.traits().windows == Windows::InUpperLayers {
            // If there are windows, all layers have one: `max_window_layers` counts the layers before the first.
            let windows = self.sliding_window.is_some();
            put("use_sliding_window", json!(windows));
            put("max_window_layers", json!(if windows { 0 } else { self.num_hidden_layers }));
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
        self.rope.write_form_4("rope_theta", &mut table);
        table
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
        checks.problems
    }

    /// Checks that the family's `config.json` can express this configuration, which may have been built in code.
    fn check_family(&self, checks: &mut Checks) {
        let (family, FamilyTraits { attention_bias, has_qk_norm, windows, .. }) =
            (self.family, self.family.traits());
        let attention_bias_fits = match attention_bias {
            AttentionBias::Configured => self.qkv_bias == self.output_bias,
            AttentionBias::OnQueriesKeysValues => self.qkv_bias && !self.output_bias,
            AttentionBias::Never => !self.qkv_bias && !self.output_bias,
        };
        let rules = [
            (attention_bias_fits, "these attention biases"),
            (!self.mlp_bias || family == LlamaFamily::Llama, "biases in the feed-forward layer"),
            (self.qk_norm == has_qk_norm, "this setting of `qk_norm`"),
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
    let always = family.traits().attention_bias == AttentionBias::OnQueriesKeysValues;
    let given = reader.flag("attention_bias", always);
    match family.traits().attention_bias {
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

/// Reads the sliding window of all layers. Qwen can restrict windows to the upper layers; that is supported only if
/// it amounts to all layers or none.
fn read_sliding_window(reader: &mut Reader<'_>, family: LlamaFamily, layers: usize) -> Option<usize> {
    let windows = family.traits().windows;
    let mut window = match reader.optional_size("sliding_window") {
        Entry::Absent => match windows {
            Windows::Never => None,
            Windows::InAllLayers { default } => default,
            Windows::InUpperLayers => Some(4096),
        },
        // transformers writes 0 for Qwen2-MoE without windows.
        Entry::Given(0) if family == LlamaFamily::Qwen2Moe => None,
        entry => entry.given(),
    };
    let is_qwen = windows == Windows::InUpperLayers;
    let mut layers_before_first_window = 0;
    if is_qwen {
        layers_before_first_window = reader.size("max_window_layers", 28);
        if !reader.flag("use_sliding_window", false) {
            window = None;
        }
    }
    if windows == Windows::Never && window.is_some() {
        reader.unsupported("sliding_window", "null (this family sees all positions; Mistral has windows)");
        return None;
    }
    match read_layer_types(reader, layers) {
        // Explicit layer types take precedence; Mistral's attention reads `sliding_window` alone.
        Some(LayerTypes::Full) if is_qwen => return None,
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
