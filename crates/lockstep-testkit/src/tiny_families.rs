//! Tiny models of further families, which run under single splits instead of the whole matrix.

use crate::parity::TinyModel;

/// Linear biases of attention, whose slopes belong to heads, and a norm of the embedding.
pub const BLOOM: TinyModel = TinyModel {
    name: "bloom",
    settings: &[
        "model.model_type=bloom",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.n_layer=4",
        "model.n_head=4",
        "model.seq_length=16",
        "train.dropout=0.1",
    ],
};

/// One key/value head for all queries, with biases, beside the feed-forward layer.
pub const FALCON: TinyModel = TinyModel {
    name: "falcon",
    settings: &[
        "model.model_type=falcon",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=4",
        "model.max_position_embeddings=16",
        "model.bias=true",
        "train.dropout=0.1",
    ],
};

/// Falcon with groups of query heads and two norms.
pub const FALCON_GROUPED: TinyModel = TinyModel {
    name: "falcon_grouped",
    settings: &[
        "model.model_type=falcon",
        "model.vocab_size=256",
        "model.hidden_size=64",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=8",
        "model.num_kv_heads=4",
        "model.new_decoder_architecture=true",
        "model.max_position_embeddings=16",
    ],
};

/// Positions that rotate a part of each head, and attention beside the feed-forward layer.
pub const GPT_NEOX: TinyModel = TinyModel {
    name: "gpt_neox",
    settings: &[
        "model.model_type=gpt_neox",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=4",
        "model.rotary_pct=0.5",
        "model.max_position_embeddings=16",
        "train.dropout=0.1",
    ],
};

/// Learned positions after two unused rows, norms after the residual sums, and a narrow embedding.
pub const OPT: TinyModel = TinyModel {
    name: "opt",
    settings: &[
        "model.model_type=opt",
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.word_embed_proj_dim=24",
        "model.ffn_dim=48",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=4",
        "model.do_layer_norm_before=false",
        "model.max_position_embeddings=16",
        "train.dropout=0.1",
    ],
};

/// All of these models.
pub const FAMILIES: [TinyModel; 5] = [BLOOM, FALCON, FALCON_GROUPED, GPT_NEOX, OPT];
