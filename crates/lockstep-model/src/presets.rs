//! Models by name: shapes as published, and three small ones for bytes.
//!
//! Published configurations keep everything that changes a number except dropout, which is zero: a run
//! says how much it wants.

use lockstep_tensor::{RouterScores, RouterWeights};

use crate::config::{
    Activation, ExpertsConfig, Gpt2Config, LlamaConfig, LlamaFamily, ModelConfig, Rope, RopeScaling,
    SpecialTokens,
};
use crate::error::{ModelError, nearest};

/// The name of every preset, smallest models first.
///
/// - `baby-gpt`: nanoGPT's recipe for Shakespeare over bytes (10,818,432 parameters).
/// - `llama-15m`, `llama-60m`: small Llamas over bytes (15,047,040 and 59,134,464 parameters).
/// - `mixtral-20m`: a small Mixtral over bytes, of whose 20,135,168 parameters a token uses 5,979,392.
/// - `llama-110m`: the largest of llama2.c's models for stories, with Llama 2's vocabulary of 32,000 (109,529,856).
/// - the others as their authors published them; `llama3-*` are Llama 3.1.
pub const PRESETS: [&str; 16] = [
    "baby-gpt",
    "llama-15m",
    "mixtral-20m",
    "llama-60m",
    "llama-110m",
    "gpt2-124m",
    "gpt2-355m",
    "qwen3-0.6b",
    "gpt2-774m",
    "llama3.2-1b",
    "gpt2-1558m",
    "llama3-8b",
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "llama3-70b",
    "llama3-405b",
];

/// Tokens of a byte-level vocabulary.
const BYTES: usize = 256;

impl ModelConfig {
    /// The preset called `name`, one of [`PRESETS`].
    ///
    /// # Errors
    /// [`ModelError::UnknownPreset`] with the nearest name.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        let config = match name {
            "baby-gpt" => Self::Gpt2(Gpt2Config {
                vocab_size: BYTES,
                max_position_embeddings: 256,
                activation: Activation::GeluExact,
                bias: false,
                tokens: SpecialTokens::default(),
                ..gpt2(6, 6, 384)
            }),
            "gpt2-124m" => Self::Gpt2(gpt2(12, 12, 768)),
            "gpt2-355m" => Self::Gpt2(gpt2(24, 16, 1024)),
            "gpt2-774m" => Self::Gpt2(gpt2(36, 20, 1280)),
            "gpt2-1558m" => Self::Gpt2(gpt2(48, 25, 1600)),
            "llama-15m" => Self::Llama(byte_llama(Shape {
                hidden_size: 384,
                intermediate_size: 1280,
                num_hidden_layers: 8,
                num_attention_heads: 6,
                num_key_value_heads: 2,
            })),
            "llama-60m" => Self::Llama(byte_llama(Shape {
                hidden_size: 512,
                intermediate_size: 1408,
                num_hidden_layers: 20,
                num_attention_heads: 8,
                num_key_value_heads: 4,
            })),
            "llama-110m" => Self::Llama(LlamaConfig {
                vocab_size: 32_000,
                ..byte_llama(Shape {
                    hidden_size: 768,
                    intermediate_size: 2048,
                    num_hidden_layers: 12,
                    num_attention_heads: 12,
                    num_key_value_heads: 12,
                })
            }),
            "llama3.2-1b" => Self::Llama(LlamaConfig {
                tie_word_embeddings: true,
                rope: llama3_rope(32.0),
                ..llama3(Shape {
                    hidden_size: 2048,
                    intermediate_size: 8192,
                    num_hidden_layers: 16,
                    num_attention_heads: 32,
                    num_key_value_heads: 8,
                })
            }),
            "llama3-8b" => Self::Llama(llama3(Shape {
                hidden_size: 4096,
                intermediate_size: 14336,
                num_hidden_layers: 32,
                num_attention_heads: 32,
                num_key_value_heads: 8,
            })),
            "llama3-70b" => Self::Llama(llama3(Shape {
                hidden_size: 8192,
                intermediate_size: 28672,
                num_hidden_layers: 80,
                num_attention_heads: 64,
                num_key_value_heads: 8,
            })),
            "llama3-405b" => Self::Llama(llama3(Shape {
                hidden_size: 16384,
                intermediate_size: 53248,
                num_hidden_layers: 126,
                num_attention_heads: 128,
                num_key_value_heads: 8,
            })),
            "qwen3-0.6b" => Self::Llama(qwen3_0_6b()),
            "mixtral-20m" => Self::Llama(LlamaConfig {
                tie_word_embeddings: true,
                ..mixtral(Shape {
                    hidden_size: 256,
                    intermediate_size: 512,
                    num_hidden_layers: 6,
                    num_attention_heads: 4,
                    num_key_value_heads: 2,
                })
            }),
            "mixtral-8x7b" => Self::Llama(mixtral_8x7b()),
            "qwen3-30b-a3b" => Self::Llama(qwen3_30b_a3b()),
            _ => {
                return Err(ModelError::UnknownPreset {
                    name: name.to_owned(),
                    nearest: nearest(name, PRESETS),
                    known: PRESETS.to_vec(),
                });
            }
        };
        Ok(config)
    }
}

/// The sizes in which the Llamas differ.
#[derive(Clone, Copy)]
struct Shape {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
}

fn gpt2(num_hidden_layers: usize, num_attention_heads: usize, hidden_size: usize) -> Gpt2Config {
    const END_OF_TEXT: u32 = 50256;
    Gpt2Config {
        vocab_size: 50257,
        hidden_size,
        intermediate_size: 4 * hidden_size,
        num_hidden_layers,
        num_attention_heads,
        max_position_embeddings: 1024,
        activation: Activation::GeluTanh,
        layer_norm_epsilon: 1e-5,
        bias: true,
        embedding_dropout: 0.0,
        residual_dropout: 0.0,
        attention_dropout: 0.0,
        initializer_range: 0.02,
        tie_word_embeddings: true,
        tokens: SpecialTokens { beginning: Some(END_OF_TEXT), end: vec![END_OF_TEXT], padding: None },
    }
}

/// A Llama of this shape with heads of equal share, no biases and nothing tied.
fn llama(shape: Shape) -> LlamaConfig {
    LlamaConfig {
        family: LlamaFamily::Llama,
        vocab_size: BYTES,
        hidden_size: shape.hidden_size,
        intermediate_size: shape.intermediate_size,
        num_hidden_layers: shape.num_hidden_layers,
        num_attention_heads: shape.num_attention_heads,
        num_key_value_heads: shape.num_key_value_heads,
        head_dim: shape.hidden_size / shape.num_attention_heads,
        max_position_embeddings: 2048,
        rms_norm_eps: 1e-5,
        rope: Rope::new(10_000.0),
        sliding_window: None,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        attention_dropout: 0.0,
        experts: None,
        latent: None,
        initializer_range: 0.02,
        tie_word_embeddings: false,
        tokens: SpecialTokens::default(),
    }
}

/// Heads of 64, so that even these split over two ranks; the embedding, of bytes unless said otherwise, is tied.
fn byte_llama(shape: Shape) -> LlamaConfig {
    LlamaConfig { tie_word_embeddings: true, ..llama(shape) }
}

/// Llama 3.1 (Grattafiori et al. 2024, table 3; RoPE scaling as in the released configurations).
fn llama3(shape: Shape) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 128_256,
        max_position_embeddings: 131_072,
        rope: llama3_rope(8.0),
        tokens: SpecialTokens { beginning: Some(128_000), end: vec![128_001], padding: None },
        ..llama(shape)
    }
}

fn llama3_rope(factor: f64) -> Rope {
    Rope {
        theta: 500_000.0,
        scaling: RopeScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        },
    }
}

/// Qwen3 0.6B (Yang et al. 2025): heads wider than their share of the hidden size.
fn qwen3_0_6b() -> LlamaConfig {
    LlamaConfig {
        family: LlamaFamily::Qwen3,
        vocab_size: 151_936,
        head_dim: 128,
        max_position_embeddings: 40_960,
        rms_norm_eps: 1e-6,
        rope: Rope::new(1_000_000.0),
        qk_norm: true,
        tie_word_embeddings: true,
        tokens: SpecialTokens { beginning: Some(151_643), end: vec![151_645], padding: None },
        ..llama(Shape {
            hidden_size: 1024,
            intermediate_size: 3072,
            num_hidden_layers: 28,
            num_attention_heads: 16,
            num_key_value_heads: 8,
        })
    }
}

/// Eight experts in each layer, of which a token uses two.
fn mixtral(shape: Shape) -> LlamaConfig {
    let experts = ExpertsConfig {
        count: 8,
        per_token: 2,
        intermediate_size: shape.intermediate_size,
        shared_intermediate_size: None,
        scores: RouterScores::Softmax,
        weights: RouterWeights::Normalized,
        scale: 1.0,
        groups: None,
        bias_update_rate: 0.0,
        auxiliary_loss: 0.02,
        z_loss: 0.0,
        capacity_factor: None,
        every: 1,
        dense_layers: Vec::new(),
    };
    LlamaConfig { family: LlamaFamily::Mixtral, experts: Some(Box::new(experts)), ..llama(shape) }
}

/// Mixtral 8x7B (Jiang et al., 2024).
fn mixtral_8x7b() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 32_000,
        max_position_embeddings: 32_768,
        rope: Rope::new(1_000_000.0),
        tokens: SpecialTokens { beginning: Some(1), end: vec![2], padding: None },
        ..mixtral(Shape {
            hidden_size: 4096,
            intermediate_size: 14336,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 8,
        })
    }
}

/// Qwen3 30B-A3B (Yang et al. 2025): many narrow experts.
fn qwen3_30b_a3b() -> LlamaConfig {
    let shape = Shape {
        hidden_size: 2048,
        intermediate_size: 6144,
        num_hidden_layers: 48,
        num_attention_heads: 32,
        num_key_value_heads: 4,
    };
    let experts = mixtral(shape).experts.map(|experts| {
        Box::new(ExpertsConfig {
            count: 128,
            per_token: 8,
            intermediate_size: 768,
            auxiliary_loss: 0.001,
            ..*experts
        })
    });
    LlamaConfig {
        family: LlamaFamily::Qwen3Moe,
        intermediate_size: shape.intermediate_size,
        num_hidden_layers: shape.num_hidden_layers,
        num_attention_heads: shape.num_attention_heads,
        num_key_value_heads: shape.num_key_value_heads,
        hidden_size: shape.hidden_size,
        experts,
        tie_word_embeddings: false,
        ..qwen3_0_6b()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_counts_are_the_published_ones() {
        let published = [
            ("baby-gpt", 10_818_432_u64),
            ("llama-15m", 15_047_040),
            ("llama-60m", 59_134_464),
            ("llama-110m", 109_529_856),
            ("gpt2-124m", 124_439_808),
            ("gpt2-355m", 354_823_168),
            ("gpt2-774m", 774_030_080),
            ("gpt2-1558m", 1_557_611_200),
            ("llama3.2-1b", 1_235_814_400),
            ("llama3-8b", 8_030_261_248),
            ("llama3-70b", 70_553_706_496),
            ("llama3-405b", 405_853_388_800),
            ("qwen3-0.6b", 596_049_920),
            ("mixtral-20m", 20_135_168),
            ("qwen3-30b-a3b", 30_532_122_624),
            ("mixtral-8x7b", 46_702_792_704),
        ];
        assert_eq!(published.len(), PRESETS.len());
        for (name, count) in published {
            assert_eq!(ModelConfig::preset(name).expect("a preset").parameter_count(), count, "{name}");
        }
    }

    #[test]
    fn every_preset_is_valid() {
        for name in PRESETS {
            ModelConfig::preset(name).and_then(|config| config.validate()).expect(name);
        }
    }

    #[test]
    fn an_unknown_preset_names_the_nearest() {
        let message = ModelConfig::preset("llama3-7b").expect_err("no such preset").to_string();
        assert!(
            message.contains("did you mean `llama3-70b`?") || message.contains("did you mean `llama3-8b`?"),
            "{message}"
        );
    }
}
