//! The vision transformer ViT (Dosovitskiy et al., 2021), with the names of transformers' checkpoints: patches of an image
//! as tokens behind a class token, LayerNorm before attention and feed-forward, and a classifier of the class token.

use std::sync::Arc;

use lockstep_graph::{
    BatchInput, Bias, Convolution, InputDeclaration, Recorder, SequenceToken, Split, Value,
};
use lockstep_plan::{DType, Initializer, ParameterRecord};
use lockstep_tensor::{LABELS, Window2d};
use serde_json::{Map, Value as Json};

use super::encoder::{Encoder, sizes_of};
use crate::config::{Classes, VIT_ARCHITECTURE, VitConfig};
use crate::error::ConfigProblem;
use crate::hf_tensor::{HfPlace, HfTensor};
use crate::hf_transform::HfTransform;
use crate::model::{Model, Sizes, Unit};

/// Name of the input of images, `[height, width, channels]`.
const PIXELS: &str = "pixel_values";
/// Tensor of the learned positions in checkpoints, `[1, tokens, hidden]`; the parameter is its `.weight [tokens, hidden]`.
const POSITIONS: &str = "vit.embeddings.position_embeddings";

impl VitConfig {
    fn encoder(&self) -> Encoder {
        Encoder {
            sizes: self.sizes,
            activation: self.activation,
            projections: [
                "attention.attention.query",
                "attention.attention.key",
                "attention.attention.value",
            ],
            qkv_bias: self.qkv_bias,
            dropout: self.hidden_dropout_prob as f32,
            attention_dropout: self.attention_probs_dropout_prob as f32,
            std: self.initializer_range as f32,
        }
    }

    fn norm(&self, g: &mut Recorder, x: Value, name: &str) -> Value {
        g.layer_norm(x, name, Bias::With, self.layer_norm_eps as f32)
    }

    fn embedding(&self, g: &mut Recorder) -> Value {
        let (std, hidden) = (self.initializer_range as f32, self.sizes.hidden_size);
        let pixels = g.data(PIXELS);
        let patches = g.conv2d(
            pixels,
            Convolution {
                name: "patch_embeddings.projection",
                out_channels: hidden,
                window: Window2d::square(self.patch_size, self.patch_size, 0),
                groups: 1,
                bias: Bias::With,
                initializer: Some(Initializer::Normal { std }),
            },
        );
        let tokens = g.image_tokens(patches, "cls_token", std);
        let positions =
            g.embedding(BatchInput::Positions, "position_embeddings", self.seq_len(), hidden, std);
        let x = g.add(tokens, positions);
        g.dropout(x, self.hidden_dropout_prob as f32)
    }

    fn block(&self, g: &mut Recorder) -> Value {
        let encoder = self.encoder();
        let x = g.input(self.sizes.hidden_size);
        let normed = self.norm(g, x, "layernorm_before");
        let attended = encoder.attention(g, normed, None);
        let x = g.add(x, attended);
        let normed = self.norm(g, x, "layernorm_after");
        let fed = encoder.feed_forward(g, normed);
        g.add(x, fed)
    }

    /// Records the classifier. The norm is of each token, so that of the class token suffices.
    fn head(&self, g: &mut Recorder) -> Value {
        let x = g.input(self.sizes.hidden_size);
        let x = g.token_of_each_sequence(x, SequenceToken::First);
        let x = self.norm(g, x, "vit.layernorm");
        let logits = self.encoder().linear(g, x, "classifier", self.classes.count(), true);
        g.accuracy(logits);
        g.cross_entropy(logits, 0.0)
    }
}

impl Model for VitConfig {
    fn model_type(&self) -> &str {
        "vit"
    }

    fn units(&self) -> Vec<Unit> {
        Unit::decoder("vit.embeddings.", self.sizes.num_hidden_layers, |layer| {
            (format!("vit.encoder.layer.{layer}."), 0)
        })
    }

    fn record(&self, unit: usize, g: &mut Recorder) -> Value {
        match unit {
            0 => self.embedding(g),
            unit if unit <= self.sizes.num_hidden_layers => self.block(g),
            _ => self.head(g),
        }
    }

    fn inputs(&self) -> Vec<InputDeclaration> {
        let Self { image_size, num_channels, .. } = *self;
        vec![
            InputDeclaration::new(PIXELS, DType::F32, &[image_size, image_size, num_channels]),
            InputDeclaration::new(LABELS, DType::I32, &[]),
        ]
    }

    fn placements(&self) -> Vec<(&'static str, Split)> {
        self.encoder().splits().collect()
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            classes: self.classes.count(),
            positions: self.seq_len(),
            fixed_seq_len: Some(self.seq_len()),
            ..sizes_of(self.sizes)
        }
    }

    fn table(&self) -> Map<String, Json> {
        self.keys()
    }

    fn architecture(&self) -> Option<&str> {
        Some(VIT_ARCHITECTURE)
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        self.checked()
    }

    fn forget_derived(&self, table: &mut Map<String, Json>, overrides: &Map<String, Json>) {
        Classes::forget(table, overrides);
    }

    fn has_dropout(&self) -> bool {
        self.hidden_dropout_prob + self.attention_probs_dropout_prob > 0.0
    }

    fn with_dropout(&self, probability: f64) -> Option<Arc<dyn Model>> {
        Some(Arc::new(self.clone().with_dropout(probability)))
    }

    fn checkpoint_prefix(&self) -> &'static str {
        "vit."
    }

    fn checkpoint_tensors(&self, records: &[ParameterRecord]) -> Vec<HfTensor> {
        let tensor = |record: &ParameterRecord| match record.name.strip_prefix(POSITIONS) {
            Some(".weight") => {
                let shape = [&[1], &record.shape[..]].concat();
                HfTensor::single(HfPlace::new(record, POSITIONS.to_owned(), shape, HfTransform::Same))
            }
            _ => HfTensor::same(record),
        };
        records.iter().map(tensor).collect()
    }
}
