//! Models of GGUF files: quantized weights in their place, and tokenizers.

mod experts;

use std::fs;

use lockstep_checkpoint::{DType, ModelDirectory, gguf::StoredElements};
use lockstep_data::Tokenizer;
use lockstep_infer::{InferencePlan, LoadOptions, LoadedModel, PlanRequest};
use lockstep_plan::BlockFormat;
use lockstep_tensor::BlockActivations;
use serde_json::{Value, json};

use super::{assert_chunks_change_nothing, fixture, logits_of};
use crate::common::{config, random_model};

#[test]
fn a_quantized_model_has_the_logits_of_its_decoded_weights() {
    let dir = tempfile::tempdir().unwrap();
    let ids: Vec<u32> = (0..24).map(|at| at * at * 7 % 260).collect();
    for (model_type, formats) in [
        ("llama", &BlockFormat::OF_GGUF[..]),
        ("qwen3", &[BlockFormat::Q8_0, BlockFormat::Q4K]),
        ("phi3", &[BlockFormat::Q8_0, BlockFormat::Q6K]),
    ] {
        let hf = dir.path().join(model_type);
        random_model(&hf, &config(model_type));
        for &format in formats {
            let name = format!("{model_type}-{format}");
            let path = dir.path().join(format!("{name}.gguf"));
            ModelDirectory::open(&hf).unwrap().export_gguf(StoredElements::Blocks(format), &path).unwrap();
            let quantized = ModelDirectory::open(&path).unwrap();
            let decoded = dir.path().join(name.clone());
            quantized.export_hf(DType::F32, &decoded).unwrap();
            let decoded = ModelDirectory::open(&decoded).unwrap();
            for dtype in [DType::BF16, DType::F32] {
                let load = |directory: &ModelDirectory, threads, activations| {
                    let options = LoadOptions::new(threads).with_dtype(dtype);
                    LoadedModel::load(directory, LoadOptions { activations: Some(activations), ..options })
                        .unwrap()
                };
                let dense = load(&decoded, 1, BlockActivations::Float);
                let whole = logits_of(&dense, &ids, ids.len());
                let [one, two] = [1, 2].map(|threads| load(&quantized, threads, BlockActivations::Float));
                let chunks = [(&one, ids.len()), (&one, 1), (&one, 9), (&two, 5)];
                assert_chunks_change_nothing(&whole, &ids, &chunks, &name);
                // With int8 activations the logits are near, and depend on chunks and threads as little.
                let [int8, two] = [1, 2].map(|threads| load(&quantized, threads, BlockActivations::Int8));
                let rounded = logits_of(&int8, &ids, ids.len());
                assert_chunks_change_nothing(&rounded, &ids, &[(&int8, 1), (&int8, 9), (&two, 5)], &name);
                let energy: f32 = whole.iter().map(|logit| logit * logit).sum();
                let error: f32 = rounded.iter().zip(&whole).map(|(a, b)| (a - b) * (a - b)).sum();
                assert!(error < 2e-3 * energy, "{name}: error {:.1e} of the logits' energy", error / energy);
                let [in_place, converted] = one.weight_bytes();
                let stored = fs::metadata(&path).unwrap().len() as usize;
                // Norms are converted, and llama's queries and keys have their rows in another order.
                let expected = if model_type == "llama" { stored / 2 } else { stored - stored / 10 };
                assert!(in_place > expected, "{name}: {in_place} bytes in place, {converted} converted");
                assert!(converted < stored / 4, "{name}: {in_place} bytes in place, {converted} converted");
            }
        }
    }
}

#[test]
fn blocks_that_no_kernel_reads_have_the_logits_of_their_decoded_weights() {
    let dir = tempfile::tempdir().unwrap();
    let ids: Vec<u32> = (0..24).map(|at| at * at * 7 % 60).collect();
    let stored = ModelDirectory::open(&fixture("gguf/foreign.gguf")).unwrap();
    let summary = stored.quantization().unwrap();
    assert_eq!((summary.packed, summary.decoded.len()), (7, 2), "{summary:?}");
    let decoded = dir.path().join("decoded");
    stored.export_hf(DType::F32, &decoded).unwrap();
    let decoded = ModelDirectory::open(&decoded).unwrap();
    let offload = tempfile::tempdir().unwrap();
    for dtype in [DType::BF16, DType::F32] {
        let options = LoadOptions { activations: Some(BlockActivations::Float), ..LoadOptions::new(1) };
        let options = options.with_dtype(dtype);
        let whole = logits_of(&LoadedModel::load(&decoded, options).unwrap(), &ids, ids.len());
        assert!(whole.iter().all(|logit| logit.is_finite()), "{dtype}: {whole:?}");
        let model = LoadedModel::load(&stored, options).unwrap();
        assert_chunks_change_nothing(&whole, &ids, &[(&model, ids.len()), (&model, 1)], "foreign");
        let request = PlanRequest {
            activations: options.activations,
            ..super::placed::request(r#"{"": "disk"}"#, offload.path())
        };
        let plan = InferencePlan::new(&stored, dtype, &request).unwrap();
        assert!(plan.disk_bytes > 0, "{dtype}");
        let streamed = LoadedModel::load_placed(&stored, plan).unwrap();
        assert_chunks_change_nothing(&whole, &ids, &[(&streamed, 5)], "foreign, from disk");
    }
}

#[test]
fn a_file_of_gguf_py_has_the_logits_of_transformers() {
    for family in ["llama", "mistral", "qwen2", "qwen3", "phi3", "phi3_long", "mixtral", "qwen3_moe"] {
        let (ids, logits) = super::expected(family);
        let directory = ModelDirectory::open(&fixture(&format!("gguf/{family}.gguf"))).unwrap();
        let options = LoadOptions::new(1).with_dtype(DType::F32);
        let found = logits_of(&LoadedModel::load(&directory, options).unwrap(), &ids, ids.len());
        let expected = logits.last().unwrap();
        let scale = expected.iter().fold(0.0_f32, |most, logit| most.max(logit.abs()));
        for (index, (a, b)) in found.iter().zip(expected).enumerate() {
            // Matrices are f16 in the file.
            assert!((a - b).abs() < 5e-3 * scale, "{family}: logit {index} is {a}, transformers has {b}");
        }
    }
}

/// Returns the signs of the 256 bytes in byte-level vocabularies.
fn byte_signs() -> Vec<String> {
    let mut others = 256..;
    (0..=255_u32)
        .map(|byte| match byte {
            0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from_u32(byte),
            _ => others.next().and_then(char::from_u32),
        })
        .map(|sign| sign.unwrap().to_string())
        .collect()
}

/// Returns a `tokenizer.json` of bytes, two special tokens and two merges.
fn byte_level(pattern: &str) -> Value {
    let mut vocab: serde_json::Map<String, Value> =
        byte_signs().into_iter().enumerate().map(|(id, sign)| (sign, id.into())).collect();
    for (id, token) in [(256, "he"), (257, "ll")] {
        vocab.insert(token.to_owned(), id.into());
    }
    let added = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
               "special": true})
    };
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(258, "<|end|>"), added(259, "<|begin|>")],
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false}, byte_level,
        ]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [259], "tokens": ["<|begin|>"]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": ["h e", "l l"],
        },
    })
}

/// Returns a `tokenizer.json` in the form of Llama 2: pieces with a sign for spaces, and bytes for what is no piece.
fn sentence_pieces() -> Value {
    let mut vocab = serde_json::Map::new();
    for (id, token) in ["<unk>", "<s>", "</s>"].into_iter().enumerate() {
        vocab.insert(token.to_owned(), id.into());
    }
    for byte in 0..256 {
        vocab.insert(format!("<0x{byte:02X}>"), (3 + byte).into());
    }
    // Merged pieces before the characters, as in SentencePiece's models.
    let pieces = ["\u{2581}t", "he", "\u{2581}the", "ll", "\u{2581}", "t", "h", "e", "l", "o"];
    for (index, piece) in pieces.into_iter().enumerate() {
        vocab.insert(piece.to_owned(), (259 + index).into());
    }
    let added = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
               "special": true})
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
        ]},
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "vocab": vocab,
            "merges": ["\u{2581} t", "h e", "\u{2581}t he", "l l"],
        },
    })
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Returns a `tokenizer.json` in the form of SmolLM: digits are split off, then text as GPT-2 splits it.
fn digits_and_words() -> Value {
    let mut tokenizer = byte_level(LLAMA3);
    tokenizer["pre_tokenizer"]["pretokenizers"] = json!([
        {"type": "Digits", "individual_digits": true},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    ]);
    tokenizer
}

/// Returns a `tokenizer.json` in the form of Llama 3, in which a piece that is a token is not made of merges.
fn without_merges_of_tokens(pattern: &str) -> Value {
    let mut tokenizer = byte_level(pattern);
    tokenizer["model"]["ignore_merges"] = true.into();
    tokenizer
}

#[test]
fn a_tokenizer_survives_the_way_through_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config("llama");
    config["vocab_size"] = 270.into();
    config["num_hidden_layers"] = 1.into();
    let template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    for (name, tokenizer, ends) in [
        ("llama3", without_merges_of_tokens(LLAMA3), ["<|begin|>", "<|end|>"]),
        ("dbrx", byte_level(LLAMA3), ["<|begin|>", "<|end|>"]),
        ("tekken", without_merges_of_tokens(TEKKEN), ["<|begin|>", "<|end|>"]),
        ("smollm", digits_and_words(), ["<|begin|>", "<|end|>"]),
        ("qwen2", byte_level(QWEN2), ["<|begin|>", "<|end|>"]),
        ("gpt-4o", byte_level(O200K), ["<|begin|>", "<|end|>"]),
        ("pieces", sentence_pieces(), ["<s>", "</s>"]),
    ] {
        let hf = dir.path().join(name);
        let special = if name == "pieces" { [1, 2] } else { [259, 258] };
        (config["bos_token_id"], config["eos_token_id"]) = (special[0].into(), special[1].into());
        random_model(&hf, &config);
        fs::write(hf.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let settings = json!({"bos_token": ends[0], "eos_token": ends[1], "chat_template": template});
        fs::write(hf.join("tokenizer_config.json"), settings.to_string()).unwrap();
        let path = dir.path().join(format!("{name}.gguf"));
        let notes =
            ModelDirectory::open(&hf).unwrap().export_gguf(StoredElements::Dense(DType::F32), &path).unwrap();
        assert!(!notes.lacks_tokenizer, "{name}");
        let [expected, found] =
            [&hf, &path].map(|path| LoadedModel::open(path, 1).unwrap().tokenizer().unwrap());
        for text in ["hello the 1234 he'll\n\n  été €", "", " the", "the<s>x", "<|end|>llhe", "a\u{2581}b"]
        {
            let ids = |tokenizer: &Tokenizer| {
                [tokenizer.encode(text), tokenizer.encode_prompt(text)].map(Result::unwrap)
            };
            assert_eq!(ids(&found), ids(&expected), "{name}: {text:?}");
            let [ids, _] = ids(&found);
            assert_eq!(found.decode(&ids).unwrap(), expected.decode(&ids).unwrap(), "{name}: {text:?}");
        }
        assert_eq!(found.eos_id(), expected.eos_id(), "{name}");
        let chat = [("user".to_owned(), "hello".to_owned())];
        assert_eq!(found.encode_chat(&chat).unwrap(), expected.encode_chat(&chat).unwrap(), "{name}");
    }
}

#[test]
fn a_model_of_bytes_reads_bytes_from_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config("llama");
    (config["vocab_size"], config["eos_token_id"], config["bos_token_id"]) =
        (259.into(), Value::Null, Value::Null);
    random_model(&dir.path().join("model"), &config);
    let path = dir.path().join("model.gguf");
    let model = ModelDirectory::open(&dir.path().join("model")).unwrap();
    model.export_gguf(StoredElements::Blocks(BlockFormat::Q8_0), &path).unwrap();
    let tokenizer = LoadedModel::open(&path, 1).unwrap().tokenizer().unwrap();
    let text = "Bytes: é\n\0";
    let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
    assert_eq!(tokenizer.encode(text).unwrap(), bytes);
    assert_eq!(tokenizer.decode(&bytes).unwrap(), text);
}
