//! The configuration of ViT (Dosovitskiy et al., 2021), in the keys of transformers' `ViTConfig`.

use serde_json::{Map, Value, json};

use super::activation::Activation;
use super::classes::Classes;
use super::encoder::EncoderSizes;
use super::keys::{FIXED_FOR_ALL, HARMLESS_FOR_VIT};
use super::limits::{Checks, WIDTH};
use super::reader::Reader;
use crate::error::ConfigProblem;

/// A vision transformer that classifies images: patches as tokens behind a class token, LayerNorm before attention and
/// feed-forward.
#[derive(Debug, Clone, PartialEq)]
pub struct VitConfig {
    /// Rows and columns of the images.
    pub image_size: usize,
    /// Rows and columns of a patch.
    pub patch_size: usize,
    /// Channels of the images.
    pub num_channels: usize,
    /// Sizes of the blocks.
    pub sizes: EncoderSizes,
    /// Nonlinearity of the feed-forward layers.
    pub activation: Activation,
    /// True if queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Epsilon that LayerNorm adds to the variance.
    pub layer_norm_eps: f64,
    /// Dropout probability after the embeddings and on each output that a block adds to the residual stream.
    pub hidden_dropout_prob: f64,
    /// Dropout probability on attention probabilities.
    pub attention_probs_dropout_prob: f64,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// The classes of images.
    pub classes: Classes,
}

/// Most rows and columns of an image.
const IMAGE: usize = 1 << 14;
/// Name of transformers' class.
pub(crate) const VIT_ARCHITECTURE: &str = "ViTForImageClassification";

impl VitConfig {
    /// Sets both dropout probabilities.
    #[must_use]
    pub const fn with_dropout(mut self, probability: f64) -> Self {
        self.hidden_dropout_prob = probability;
        self.attention_probs_dropout_prob = probability;
        self
    }

    /// Patches along a side of an image.
    pub const fn side(&self) -> usize {
        self.image_size / self.patch_size
    }

    /// Tokens of an image: its patches and the class token.
    pub const fn seq_len(&self) -> usize {
        self.side() * self.side() + 1
    }

    pub(crate) fn read(table: &Map<String, Value>) -> (Self, Vec<ConfigProblem>) {
        let mut reader = Reader::new(table, "");
        reader.fixed(FIXED_FOR_ALL);
        for key in HARMLESS_FOR_VIT {
            reader.value(key);
        }
        if reader.architecture().is_some_and(|name| name != VIT_ARCHITECTURE) {
            reader.unsupported("architectures", format!("[\"{VIT_ARCHITECTURE}\"]"));
        }
        let config = Self {
            image_size: reader.size("image_size", 224),
            patch_size: reader.size("patch_size", 16),
            num_channels: reader.size("num_channels", 3),
            sizes: EncoderSizes::read(&mut reader),
            activation: Activation::read(&mut reader, "hidden_act", Activation::GeluExact),
            qkv_bias: reader.flag("qkv_bias", true),
            layer_norm_eps: reader.number("layer_norm_eps", 1e-12),
            hidden_dropout_prob: reader.number("hidden_dropout_prob", 0.0),
            attention_probs_dropout_prob: reader.number("attention_probs_dropout_prob", 0.0),
            initializer_range: reader.number("initializer_range", 0.02),
            classes: Classes::read(&mut reader, 2),
        };
        (config, reader.finish())
    }

    /// Returns the keys of `config.json`.
    pub(crate) fn keys(&self) -> Map<String, Value> {
        let mut table = Map::new();
        let mut put = |key: &str, value: Value| table.insert(key.to_owned(), value);
        self.sizes.keys().into_iter().for_each(|(key, size)| drop(put(key, json!(size))));
        put("image_size", json!(self.image_size));
        put("patch_size", json!(self.patch_size));
        put("num_channels", json!(self.num_channels));
        put("hidden_act", json!(self.activation.name()));
        put("qkv_bias", json!(self.qkv_bias));
        put("layer_norm_eps", json!(self.layer_norm_eps));
        put("hidden_dropout_prob", json!(self.hidden_dropout_prob));
        put("attention_probs_dropout_prob", json!(self.attention_probs_dropout_prob));
        put("initializer_range", json!(self.initializer_range));
        self.classes.write(&mut table);
        table
    }

    pub(crate) fn checked(&self) -> Vec<ConfigProblem> {
        let mut checks = Checks::default();
        self.sizes.check(&mut checks);
        checks.size("image_size", self.image_size, IMAGE);
        checks.size("patch_size", self.patch_size, IMAGE);
        checks.size("num_channels", self.num_channels, WIDTH);
        checks.divides(("patch_size", self.patch_size), ("image_size", self.image_size));
        checks.epsilon("layer_norm_eps", self.layer_norm_eps);
        checks.fraction("hidden_dropout_prob", self.hidden_dropout_prob);
        checks.fraction("attention_probs_dropout_prob", self.attention_probs_dropout_prob);
        checks.deviation("initializer_range", self.initializer_range);
        self.classes.check(&mut checks);
        checks.problems
    }
}
