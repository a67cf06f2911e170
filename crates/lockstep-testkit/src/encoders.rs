//! Tiny models of the parity matrix that read named inputs besides tokens: encoders, classifiers, and a network of
//! convolutions. They run on generated samples.

use crate::parity::TinyModel;

/// BERT as a language model of masked tokens: padding, token types, LayerNorm after each sum, dropout.
pub const BERT: TinyModel = TinyModel {
    name: "bert",
    settings: &[
        "model.model_type=bert",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=4",
        "model.max_position_embeddings=16",
        "model.initializer_range=0.1",
    ],
};

/// BERT as a classifier of sequences, whose values have a row per sequence.
pub const BERT_CLASSIFIER: TinyModel = TinyModel {
    name: "bert_classifier",
    settings: &[
        "model.model_type=bert",
        "model.num_labels=3",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=4",
        "model.max_position_embeddings=16",
        "model.initializer_range=0.1",
    ],
};

/// Vision transformer of nine patches and a class token, with dropout.
pub const VIT: TinyModel = TinyModel {
    name: "vit",
    settings: &[
        "model.model_type=vit",
        "model.image_size=12",
        "model.patch_size=4",
        "model.num_labels=5",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=4",
        "model.hidden_dropout_prob=0.1",
        "model.initializer_range=0.1",
        "train.seq_len=10",
    ],
};

/// Llama as a classifier of sequences by their last tokens.
pub const LLAMA_CLASSIFIER: TinyModel = TinyModel {
    name: "llama_classifier",
    settings: &[
        "model.model_type=llama",
        "model.architectures=[\"LlamaForSequenceClassification\"]",
        "model.num_labels=3",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "model.max_position_embeddings=16",
        "model.initializer_range=0.1",
    ],
};

/// Residual network of convolutions, without attention: no plan can shard its blocks.
pub const RESNET: TinyModel = TinyModel {
    name: "resnet",
    settings: &[
        "model.model_type=resnet",
        "model.stem=cifar",
        "model.layer_type=basic",
        "model.image_size=8",
        "model.num_labels=5",
        "model.embedding_size=4",
        "model.hidden_sizes=[4, 8]",
        "model.depths=[2, 2]",
        "train.seq_len=1",
        "train.global_batch=16",
        "train.micro_batch=2",
    ],
};

/// All models of the matrix that read named inputs and have attention.
pub const ENCODERS: [TinyModel; 4] = [BERT, BERT_CLASSIFIER, VIT, LLAMA_CLASSIFIER];
