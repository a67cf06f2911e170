//! The configuration of BERT (Devlin et al., 2019), in the keys of transformers' `BertConfig`.

use serde_json::{Map, Value, json};

use super::activation::Activation;
use super::classes::Classes;
use super::encoder::EncoderSizes;
use super::keys::{FIXED_FOR_ALL, FIXED_FOR_BERT};
use super::limits::{Checks, POSITIONS, VOCABULARY};
use super::reader::Reader;
use super::tokens::SpecialTokens;
use crate::error::ConfigProblem;

/// A BERT: learned positions and token types, bidirectional attention, LayerNorm after attention and feed-forward.
#[derive(Debug, Clone, PartialEq)]
pub struct BertConfig {
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Number of token types: the segments of a pair of sentences.
    pub type_vocab_size: usize,
    /// Sizes of the blocks.
    pub sizes: EncoderSizes,
    /// Number of learned positions, and so the longest sequence in tokens.
    pub max_position_embeddings: usize,
    /// Nonlinearity of the feed-forward layers.
    pub activation: Activation,
    /// Epsilon that LayerNorm adds to the variance.
    pub layer_norm_eps: f64,
    /// Dropout probability after the embeddings and on each output that a block adds to the residual stream.
    pub hidden_dropout_prob: f64,
    /// Dropout probability on attention probabilities.
    pub attention_probs_dropout_prob: f64,
    /// Dropout probability before the classifier; `None` means `hidden_dropout_prob`.
    pub classifier_dropout: Option<f64>,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// True if the output layer of the language model is tied to the token embedding.
    pub tie_word_embeddings: bool,
    /// Task of the last unit (`architectures`).
    pub head: BertHead,
    /// Ids of the special tokens.
    pub tokens: SpecialTokens,
}

/// Task of BERT's last unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BertHead {
    /// Prediction of masked tokens ("BertForMaskedLM").
    MaskedLanguageModel,
    /// Classification of sequences ("BertForSequenceClassification").
    SequenceClassification(Classes),
}

impl BertHead {
    /// Reads the head from `architectures`; without it, a number or names of classes stand for a classifier.
    fn read(reader: &mut Reader<'_>) -> Self {
        let has_classes = ["num_labels", "id2label"].iter().any(|key| reader.value(key).is_some());
        match reader.architecture() {
            Some("BertForSequenceClassification") => Self::SequenceClassification(Classes::read(reader, 2)),
            None if has_classes => Self::SequenceClassification(Classes::read(reader, 2)),
            None | Some("BertForMaskedLM") => Self::MaskedLanguageModel,
            Some(_) => {
                let supported = "[\"BertForMaskedLM\"], [\"BertForSequenceClassification\"]";
                reader.unsupported("architectures", supported);
                Self::MaskedLanguageModel
            }
        }
    }

    /// Name of transformers' class.
    pub(crate) const fn architecture(&self) -> &'static str {
        match self {
            Self::MaskedLanguageModel => "BertForMaskedLM",
            Self::SequenceClassification(_) => "BertForSequenceClassification",
        }
    }

    /// Returns the classes of a classifier.
    pub(crate) const fn classes(&self) -> Option<&Classes> {
        match self {
            Self::MaskedLanguageModel => None,
            Self::SequenceClassification(classes) => Some(classes),
        }
    }
}

impl BertConfig {
    /// Sets all dropout probabilities.
    #[must_use]
    pub fn with_dropout(mut self, probability: f64) -> Self {
        self.hidden_dropout_prob = probability;
        self.attention_probs_dropout_prob = probability;
        self.classifier_dropout = None;
        self
    }

    pub(crate) fn read(table: &Map<String, Value>) -> (Self, Vec<ConfigProblem>) {
        let mut reader = Reader::new(table, "");
        reader.fixed(FIXED_FOR_ALL);
        reader.fixed(FIXED_FOR_BERT);
        let config = Self {
            vocab_size: reader.size("vocab_size", 30522),
            type_vocab_size: reader.size("type_vocab_size", 2),
            sizes: EncoderSizes::read(&mut reader),
            max_position_embeddings: reader.size("max_position_embeddings", 512),
            activation: Activation::read(&mut reader, "hidden_act", Activation::GeluExact),
            layer_norm_eps: reader.number("layer_norm_eps", 1e-12),
            hidden_dropout_prob: reader.number("hidden_dropout_prob", 0.1),
            attention_probs_dropout_prob: reader.number("attention_probs_dropout_prob", 0.1),
            classifier_dropout: reader.optional_number("classifier_dropout"),
            initializer_range: reader.number("initializer_range", 0.02),
            tie_word_embeddings: reader.flag("tie_word_embeddings", true),
            head: BertHead::read(&mut reader),
            tokens: SpecialTokens::read(&mut reader),
        };
        (config, reader.finish())
    }

    /// Returns the keys of `config.json`, without those that all families have.
    pub(crate) fn keys(&self) -> Map<String, Value> {
        let mut table = Map::new();
        let mut put = |key: &str, value: Value| table.insert(key.to_owned(), value);
        self.sizes.keys().into_iter().for_each(|(key, size)| drop(put(key, json!(size))));
        put("architectures", json!([self.head.architecture()]));
        put("vocab_size", json!(self.vocab_size));
        put("type_vocab_size", json!(self.type_vocab_size));
        put("max_position_embeddings", json!(self.max_position_embeddings));
        put("hidden_act", json!(self.activation.name()));
        put("layer_norm_eps", json!(self.layer_norm_eps));
        put("hidden_dropout_prob", json!(self.hidden_dropout_prob));
        put("attention_probs_dropout_prob", json!(self.attention_probs_dropout_prob));
        put("classifier_dropout", json!(self.classifier_dropout));
        put("initializer_range", json!(self.initializer_range));
        put("tie_word_embeddings", json!(self.tie_word_embeddings));
        if let Some(classes) = self.head.classes() {
            classes.write(&mut table);
        }
        table
    }

    pub(crate) fn checked(&self) -> Vec<ConfigProblem> {
        let mut checks = Checks::default();
        self.sizes.check(&mut checks);
        checks.size("vocab_size", self.vocab_size, VOCABULARY);
        checks.size("type_vocab_size", self.type_vocab_size, VOCABULARY);
        checks.size("max_position_embeddings", self.max_position_embeddings, POSITIONS);
        checks.epsilon("layer_norm_eps", self.layer_norm_eps);
        checks.fraction("hidden_dropout_prob", self.hidden_dropout_prob);
        checks.fraction("attention_probs_dropout_prob", self.attention_probs_dropout_prob);
        if let Some(probability) = self.classifier_dropout {
            checks.fraction("classifier_dropout", probability);
        }
        checks.deviation("initializer_range", self.initializer_range);
        if let Some(classes) = self.head.classes() {
            classes.check(&mut checks);
        }
        checks.problems
    }
}
