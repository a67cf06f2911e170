//! BERT (Devlin et al., 2019), with the names of transformers' state dicts: embeddings of tokens, positions and token
//! types; attention in both directions, with LayerNorm after each sum; and a head that predicts masked tokens or classifies
//! sequences by their first token.

use std::borrow::Cow;
use std::sync::Arc;

use lockstep_graph::{
    BatchInput, Bias, InputDeclaration, InputLimit, Linear, Recorder, SequenceToken, Split, Value,
};
use lockstep_plan::{DType, ParameterRecord};
use lockstep_tensor::{Activation, LABELS};
use serde_json::{Map, Value as Json};

use super::encoder::{Encoder, sizes_of};
use crate::config::{BertConfig, BertHead, Classes, SpecialTokens};
use crate::error::ConfigProblem;
use crate::hf_tensor::{HfPlace, HfTensor};
use crate::hf_transform::HfTransform;
use crate::model::{Model, Sizes, Tie, Unit};

/// Name of the input that hides padding: 0 hides a token from all others, u32 per token.
const MASK: &str = "attention_mask";
/// Name of the input of token types, u32 per token.
const TYPES: &str = "token_type_ids";
/// The output layer of the language model. Its bias is `cls.predictions.bias` in checkpoints.
const DECODER: &str = "cls.predictions.decoder";

impl BertConfig {
    fn encoder(&self) -> Encoder {
        Encoder {
            sizes: self.sizes,
            activation: self.activation,
            projections: ["attention.self.query", "attention.self.key", "attention.self.value"],
            qkv_bias: true,
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
        let types = BatchInput::Named(g.data(TYPES));
        let tables = [
            (BatchInput::Ids, "word_embeddings", self.vocab_size),
            (types, "token_type_embeddings", self.type_vocab_size),
            (BatchInput::Positions, "position_embeddings", self.max_position_embeddings),
        ];
        let [words, types, positions] =
            tables.map(|(input, name, rows)| g.embedding(input, name, rows, hidden, std));
        let x = g.add(words, types);
        let x = g.add(x, positions);
        let x = self.norm(g, x, "LayerNorm");
        g.dropout(x, self.hidden_dropout_prob as f32)
    }

    fn block(&self, g: &mut Recorder) -> Value {
        let encoder = self.encoder();
        let x = g.input(self.sizes.hidden_size);
        let mask = g.data(MASK);
        let attended = encoder.attention(g, x, Some(mask));
        let sum = g.add(x, attended);
        let x = self.norm(g, sum, "attention.output.LayerNorm");
        let fed = encoder.feed_forward(g, x);
        let sum = g.add(x, fed);
        self.norm(g, sum, "output.LayerNorm")
    }

    fn head(&self, g: &mut Recorder) -> Value {
        let (encoder, hidden) = (self.encoder(), self.sizes.hidden_size);
        let x = g.input(hidden);
        match &self.head {
            BertHead::MaskedLanguageModel => {
                let x = encoder.linear(g, x, "cls.predictions.transform.dense", hidden, true);
                let x = self.activation.record(g, x);
                let x = self.norm(g, x, "cls.predictions.transform.LayerNorm");
                let (out_features, std) = (self.vocab_size, self.initializer_range as f32);
                let decoder = Linear { name: DECODER, out_features, bias: Bias::With, std };
                g.language_model_head(x, decoder, None)
            }
            BertHead::SequenceClassification(classes) => {
                let x = g.token_of_each_sequence(x, SequenceToken::First);
                let x = encoder.linear(g, x, "bert.pooler.dense", hidden, true);
                let x = g.activation(Activation::Tanh, x);
                let dropout = self.classifier_dropout.unwrap_or(self.hidden_dropout_prob);
                let x = g.dropout(x, dropout as f32);
                let logits = encoder.linear(g, x, "classifier", classes.count(), true);
                g.accuracy(logits);
                g.cross_entropy(logits, 0.0)
            }
        }
    }
}

impl Model for BertConfig {
    fn model_type(&self) -> &str {
        "bert"
    }

    fn units(&self) -> Vec<Unit> {
        Unit::decoder("bert.embeddings.", self.sizes.num_hidden_layers, |layer| {
            (format!("bert.encoder.layer.{layer}."), 0)
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
        let labels = self.head.classes().map(|_| InputDeclaration::new(LABELS, DType::I32, &[]));
        let per_token = |name| InputDeclaration::per_token(name, DType::U32);
        let types = per_token(TYPES).limited(InputLimit::Below(self.type_vocab_size as u32));
        [per_token(MASK), types].into_iter().chain(labels).collect()
    }

    fn placements(&self) -> Vec<(&'static str, Split)> {
        let of_vocabulary = ["word_embeddings", DECODER].map(|name| (name, Split::VocabularyParallel));
        self.encoder().splits().chain(of_vocabulary).collect()
    }

    fn ties(&self) -> Vec<Tie> {
        let is_tied = self.tie_word_embeddings && self.head == BertHead::MaskedLanguageModel;
        let (head, parameter) = (self.sizes.num_hidden_layers + 1, format!("{DECODER}.weight"));
        Tie::of(is_tied, head, &parameter, "bert.embeddings.word_embeddings.weight")
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            vocab: self.vocab_size,
            classes: self.head.classes().map_or(0, Classes::count),
            positions: self.max_position_embeddings,
            ..sizes_of(self.sizes)
        }
    }

    fn table(&self) -> Map<String, Json> {
        self.keys()
    }

    fn architecture(&self) -> Option<&str> {
        Some(self.head.architecture())
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        self.checked()
    }

    fn forget_derived(&self, table: &mut Map<String, Json>, overrides: &Map<String, Json>) {
        Classes::forget(table, overrides);
    }

    fn tokens(&self) -> &SpecialTokens {
        &self.tokens
    }

    fn has_dropout(&self) -> bool {
        let of_classifier = self.head.classes().and(self.classifier_dropout).unwrap_or(0.0);
        self.hidden_dropout_prob + self.attention_probs_dropout_prob + of_classifier > 0.0
    }

    fn with_dropout(&self, probability: f64) -> Option<Arc<dyn Model>> {
        Some(Arc::new(self.clone().with_dropout(probability)))
    }

    fn checkpoint_prefix(&self) -> &'static str {
        "bert."
    }

    fn checkpoint_tensors(&self, records: &[ParameterRecord]) -> Vec<HfTensor> {
        let own = records.iter().filter(|record| record.tie.is_none());
        let tensor = |record: &ParameterRecord| match record.name.strip_prefix(DECODER) {
            Some(".bias") => HfTensor::single(HfPlace::new(
                record,
                "cls.predictions.bias".to_owned(),
                record.shape.clone(),
                HfTransform::Same,
            )),
            _ => HfTensor::same(record),
        };
        own.map(tensor).collect()
    }

    /// Norms once had other names. Heads for other tasks, and a pooler that no head reads, are skipped.
    fn checkpoint_name<'n>(&self, name: &'n str) -> Option<Cow<'n, str>> {
        let is_classifier = self.head.classes().is_some();
        let is_other = match name.split('.').find(|part| *part != "bert") {
            Some("cls") => is_classifier || name.starts_with("cls.seq_relationship."),
            Some("pooler" | "classifier") => !is_classifier,
            _ => false,
        };
        let is_skipped =
            is_other || name == "cls.predictions.decoder.bias" || name.ends_with("embeddings.position_ids");
        let renamed = [(".gamma", ".weight"), (".beta", ".bias")]
            .iter()
            .find_map(|(old, new)| name.strip_suffix(old).map(|module| format!("{module}{new}")));
        (!is_skipped).then(|| renamed.map_or(Cow::Borrowed(name), Cow::Owned))
    }
}
