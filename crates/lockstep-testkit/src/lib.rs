//! Test support: fuzz targets for every parser of untrusted input, and the parity matrix over plans.
//!
//! A [`Target`] takes any bytes, parses them, and asserts properties of accepted inputs; it never fails for rejected
//! ones. Two drivers feed it. One is cargo-fuzz (`fuzz/` beside the crates, on nightly). The other is this crate's
//! test, which runs on stable in seconds and takes [`mutations`](mutate) of valid [`seeds`].
//!
//! The [`parity`] matrix runs tiny models under every kind of plan and under [random plans](random_plan), and compares
//! the numbers with those of one rank. Plans that [quantize](quantized) have their own checks.
#![forbid(unsafe_code)]

mod decided;
pub mod encoders;
pub mod mutate;
pub mod parity;
pub mod quantized;
pub mod random_plan;
pub mod sample_seeds;
pub mod sample_targets;
pub mod seeds;
pub mod targets;
pub mod tiny_families;
mod tiny_models;

/// Fuzz target: a parser with its seeds and dictionary.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name of the target, as in `cargo fuzz run NAME`.
    pub name: &'static str,
    /// Parses any bytes and asserts properties of what was accepted.
    ///
    /// # Panics
    /// If the parser panics, or an accepted input breaks a property.
    pub parse: fn(&[u8]) -> Verdict,
    /// Inputs that the parser accepts.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Dictionary of tokens with a meaning in the format.
    pub words: &'static [&'static str],
}

/// Result of a parser on one input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The input was parsed, and the asserted properties held.
    Accepted,
    /// The input was rejected with an error.
    Refused,
}

impl<T, E> From<&Result<T, E>> for Verdict {
    fn from(result: &Result<T, E>) -> Self {
        if result.is_ok() { Self::Accepted } else { Self::Refused }
    }
}

/// Fuzz targets, one for each parser of input that others may have written.
pub const TARGETS: [Target; 25] = [
    Target {
        name: "quantized_model",
        parse: targets::quantized_model,
        seeds: seeds::quantized,
        words: &[
            "quant_method",
            "group_size",
            "weight_block_size",
            "\"bits\":8",
            "-1",
            "qweight",
            "weight_scale",
            "[1048576,1]",
        ],
    },
    Target {
        name: "gguf_file",
        parse: targets::gguf_file,
        seeds: seeds::gguf,
        words: &[
            "GGUF",
            "general.alignment",
            "general.architecture",
            "llama",
            "tokenizer.ggml.tokens",
            "\0\0\0\0",
        ],
    },
    Target { name: "frames", parse: targets::frames, seeds: seeds::frames, words: &[] },
    Target {
        name: "safetensors_header",
        parse: targets::safetensors_header,
        seeds: seeds::safetensors,
        words: &[
            "\"dtype\"",
            "\"shape\"",
            "\"data_offsets\"",
            "__metadata__",
            "F32",
            "BF16",
            "F4",
            "[0,0]",
            "[]",
        ],
    },
    Target {
        name: "checkpoint_manifest",
        parse: targets::checkpoint_manifest,
        seeds: seeds::manifests,
        words: &[
            "\"shape\":",
            "\"start\":",
            "\"offset\":",
            "\"slices\":",
            "[0]",
            "[]",
            "../x",
            "\"f32\"",
            "\"bf16\"",
        ],
    },
    Target {
        name: "token_file_header",
        parse: targets::token_file_header,
        seeds: seeds::token_files,
        words: &["LOCKTOKS"],
    },
    Target {
        name: "index_header",
        parse: targets::index_header,
        seeds: seeds::indexes,
        words: &["MMIDIDX\0\0"],
    },
    Target {
        name: "parquet_file",
        parse: targets::parquet_file,
        seeds: seeds::parquet_files,
        words: &["PAR1", "text"],
    },
    Target {
        name: "json_line",
        parse: targets::json_line,
        seeds: seeds::json_lines,
        words: &["\"text\":", "\\ud800", "\\u0000", "null", "[[[[[[[[", "{\"a\":"],
    },
    Target {
        name: "tokenizer_json",
        parse: targets::tokenizer_json,
        seeds: seeds::tokenizers,
        words: &[
            "null",
            "\"BPE\"",
            "\"Unigram\"",
            "\"Metaspace\"",
            "\"Precompiled\"",
            "\"Regex\"",
            "true",
            "\"Ġ\"",
        ],
    },
    Target {
        name: "model_config",
        parse: targets::model_config,
        seeds: seeds::model_configs,
        words: &[
            "\"hidden_size\":",
            "\"rope_scaling\":",
            "\"gpt2\"",
            "null",
            "\"qwen3\"",
            "\"n_embd\":",
            "0.0",
            "{}",
        ],
    },
    Target {
        name: "adapter_config",
        parse: targets::adapter_config,
        seeds: seeds::adapter_configs,
        words: &["\"r\":", "\"use_dora\":", "\"lora_alpha\":", "null", "true", "{}", "1e999", "\"LORA\""],
    },
    Target {
        name: "run_toml",
        parse: targets::run_toml,
        seeds: seeds::run_files,
        words: &[
            "[train]\n",
            "[model]\n",
            "steps = ",
            "rope_scaling.factor = ",
            "true",
            "[[",
            "'''",
            "inf",
            "0x",
            "= {",
        ],
    },
    Target {
        name: "cluster",
        parse: targets::cluster,
        seeds: seeds::clusters,
        words: &[
            "[[node]]\n",
            "[[link]]\n",
            "devices = ",
            "joins = ",
            "\"node\"",
            "like = ",
            "-1",
            "inf",
            "1e18",
            "= {",
            "is_host = true",
        ],
    },
    Target {
        name: "flight_records",
        parse: targets::flight_records,
        seeds: seeds::flight_records,
        words: &[
            "\"sequence\":",
            "\"send\"",
            "\"receive\"",
            "\"index\":",
            "\"root\":",
            "null",
            "18446744073709551615",
        ],
    },
    Target {
        name: "run_report",
        parse: targets::run_report,
        seeds: seeds::run_records,
        words: &[
            "</script>",
            "<!--",
            "{{data}}",
            "1e308",
            "-1",
            "null",
            "\"memory\":{",
            "\"settings\":[",
            "\n{",
        ],
    },
    Target {
        name: "plan",
        parse: targets::plan,
        seeds: seeds::plans,
        words: &[
            "\"pipeline\":",
            "\"tensor\":",
            "\"expert\":",
            "\"chunks\":",
            "\"rows\":",
            "\"zb_v\"",
            "\"stages\":",
            "0",
            "2",
            "18446744073709551615",
        ],
    },
    Target {
        name: "schedule_csv",
        parse: targets::schedule_csv,
        seeds: seeds::schedules,
        words: &["F", "B", "I", "W", ",", "\n", "0F0", "1B1", ")OVERLAP_F_B", "18446744073709551615"],
    },
    Target {
        name: "image_file",
        parse: sample_targets::image_file,
        seeds: sample_seeds::images,
        words: &["IHDR", "IDAT", "IEND", "P5\n", "P6 ", " 65535 ", "VP8L", "RIFF"],
    },
    Target {
        name: "idx_file",
        parse: sample_targets::idx_file,
        seeds: sample_seeds::idx_files,
        words: &["\0\0\x08\x03", "\0\0\x0b\x01", "\0\0\0\x01"],
    },
    Target {
        name: "npy_file",
        parse: sample_targets::npy_file,
        seeds: sample_seeds::npy_files,
        words: &["'<f4'", "'|b1'", "'<u4'", "True", "(2, 3)", "()", "(", "18446744073709551615"],
    },
    Target {
        name: "tf_example",
        parse: sample_targets::tf_example,
        seeds: sample_seeds::examples,
        words: &["label"],
    },
    Target {
        name: "tf_record",
        parse: sample_targets::tf_record,
        seeds: sample_seeds::records,
        words: &["label"],
    },
    Target {
        name: "cifar_file",
        parse: sample_targets::cifar_file,
        seeds: sample_seeds::cifar_files,
        words: &["\n"],
    },
    Target {
        name: "tar_shard",
        parse: sample_targets::tar_shard,
        seeds: sample_seeds::tar_files,
        words: &["ustar", ".cls", ".txt", "size=18446744073709551615", "77777777777", "././@LongLink"],
    },
];
