//! Properties of the mapping to Hugging Face checkpoints: exact in both directions, and strict about names.

use std::collections::HashMap;
use std::path::Path;

use lockstep_model::{
    CheckpointProblem, HfContent, HfImport, HfMapping, ModelConfig, ModelError, parameter_records,
};
use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::{Map, Value, json};

use crate::FAMILIES;

fn fixture(file: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(file);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn fixture_config(family: &str) -> ModelConfig {
    let text = String::from_utf8(fixture(&format!("{family}/config.json"))).expect("UTF-8");
    ModelConfig::from_json_text(&text, family).unwrap_or_else(|error| panic!("{error}"))
}

fn tiny(overrides: Value) -> ModelConfig {
    let overrides: &Map<String, Value> = overrides.as_object().expect("a table");
    ModelConfig::from_table(overrides, "test").unwrap_or_else(|error| panic!("{error}"))
}

/// Matches the names and shapes of an exported checkpoint after `edit` has changed them.
fn matched(
    config: &ModelConfig,
    edit: impl Fn(&mut Vec<(String, Vec<usize>)>),
) -> Result<HfImport, ModelError> {
    let mapping = HfMapping::new(config);
    let mut tensors: Vec<_> =
        mapping.tensors().iter().map(|tensor| (tensor.name.clone(), tensor.shape.clone())).collect();
    edit(&mut tensors);
    mapping.match_checkpoint(tensors.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())))
}

fn problems(result: Result<HfImport, ModelError>) -> Vec<CheckpointProblem> {
    match result {
        Err(ModelError::Checkpoint { problems }) => problems,
        other => panic!("{other:?}"),
    }
}

/// Reads every parameter out of a checkpoint.
fn import(config: &ModelConfig, checkpoint: &HashMap<String, Vec<u16>>) -> HashMap<String, Vec<u16>> {
    let mut parameters: HashMap<String, Vec<u16>> = HashMap::new();
    for place in matched(config, |_| ()).expect("the model's own tensors").places {
        let part = place.part();
        let parameter = parameters.entry(place.parameter.clone()).or_default();
        parameter.resize(part.end, 0);
        place.read(&checkpoint[&place.tensor], &mut parameter[part]).expect("fitting lengths");
    }
    parameters
}

/// Writes every tensor of a checkpoint. Elements that no parameter covers stay at `u16::MAX`.
fn export(config: &ModelConfig, parameters: &HashMap<String, Vec<u16>>) -> HashMap<String, Vec<u16>> {
    let mut checkpoint = HashMap::new();
    for tensor in HfMapping::new(config).tensors() {
        let elements = tensor.shape.iter().product();
        let stored = match &tensor.content {
            HfContent::Zeros => vec![0; elements],
            HfContent::Parameters(places) => {
                let mut stored = vec![u16::MAX; elements];
                for place in places {
                    let part = &parameters[&place.parameter][place.part()];
                    place.write(part, &mut stored).expect("fitting lengths");
                }
                stored
            }
        };
        checkpoint.insert(tensor.name.clone(), stored);
    }
    checkpoint
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn export_then_import_keeps_every_bit(
        (heads, head_dim, inner, vocab) in (1usize..4, 1usize..20, 1usize..70, 1usize..40),
        (bias, tied, family) in (any::<bool>(), any::<bool>(), 0usize..9),
        seed in any::<u64>(),
    ) {
        let hidden = heads * head_dim;
        let config = match family {
            0 => tiny(json!({
                "model_type": "gpt2", "n_embd": hidden, "n_head": heads, "n_layer": 2, "n_inner": inner,
                "n_positions": 7, "vocab_size": vocab, "bias": bias, "tie_word_embeddings": tied,
            })),
            3 => tiny(json!({
                "model_type": "mixtral", "hidden_size": 2 * hidden, "head_dim": 2 * head_dim, "num_local_experts": 3,
                "num_attention_heads": heads, "num_key_value_heads": 1, "num_hidden_layers": 2,
                "intermediate_size": inner, "vocab_size": vocab, "tie_word_embeddings": tied,
            })),
            4 => tiny(json!({
                "model_type": "qwen2_moe", "hidden_size": 2 * hidden, "head_dim": 2 * head_dim, "num_experts": 4,
                "num_attention_heads": heads, "num_key_value_heads": 1, "num_hidden_layers": 2, "decoder_sparse_step": 2,
                "intermediate_size": inner, "moe_intermediate_size": inner, "vocab_size": vocab,
                "tie_word_embeddings": tied,
            })),
            5 => tiny(json!({
                "model_type": "gpt_neox", "hidden_size": 2 * hidden, "num_attention_heads": heads, "num_hidden_layers": 2,
                "intermediate_size": inner, "vocab_size": vocab, "rotary_pct": 1.0, "attention_bias": bias,
                "tie_word_embeddings": tied,
            })),
            6 => tiny(json!({
                "model_type": "falcon", "hidden_size": 4 * hidden, "num_attention_heads": 2 * heads, "num_kv_heads": heads,
                "num_hidden_layers": 2, "ffn_hidden_size": inner, "vocab_size": vocab, "bias": bias,
                "new_decoder_architecture": true, "tie_word_embeddings": tied,
            })),
            7 => tiny(json!({
                "model_type": "opt", "hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": 2,
                "ffn_dim": inner, "vocab_size": vocab, "enable_bias": bias, "word_embed_proj_dim": inner,
                "max_position_embeddings": 7, "tie_word_embeddings": tied,
            })),
            8 => tiny(json!({
                "model_type": "bloom", "hidden_size": hidden, "n_head": heads, "n_layer": 2, "vocab_size": vocab,
                "tie_word_embeddings": tied,
            })),
            family => tiny(json!({
                "model_type": (["llama", "qwen3"][family - 1]), "hidden_size": hidden, "head_dim": 2 * head_dim,
                "num_attention_heads": heads, "num_key_value_heads": 1, "num_hidden_layers": 2,
                "intermediate_size": inner, "vocab_size": vocab, "attention_bias": bias,
                "tie_word_embeddings": tied,
            })),
        };
        let philox = lockstep_plan::random::Philox::new(seed);
        let mut parameters = HashMap::new();
        for (index, record) in parameter_records(&config).iter().enumerate() {
            if record.tie.is_none() {
                let first = (index as u64) << 32;
                // 15 bits, so that no element equals the `u16::MAX` of elements never written.
                let fill = |element| philox.at(first + element as u64)[0] as u16 >> 1;
                parameters.insert(record.name.clone(), (0..record.elements()).map(fill).collect::<Vec<_>>());
            }
        }
        let checkpoint = export(&config, &parameters);
        for (name, stored) in &checkpoint {
            prop_assert!(!stored.contains(&u16::MAX), "{name} is not covered");
        }
        prop_assert_eq!(import(&config, &checkpoint), parameters);
    }
}

#[test]
fn importing_and_exporting_a_checkpoint_of_transformers_gives_its_bytes_back() {
    for family in FAMILIES {
        let config = fixture_config(family);
        let file = fixture(&format!("{family}/model.safetensors"));
        let file = SafeTensors::deserialize(&file).unwrap();
        let mapping = HfMapping::new(&config);
        let views = file.tensors();
        let import = mapping.match_checkpoint(views.iter().map(|(name, view)| (name.as_str(), view.shape())));
        let mut parameters = HashMap::new();
        for place in import.unwrap_or_else(|error| panic!("{family}: {error}")).places {
            let part = place.part();
            let parameter: &mut Vec<u8> = parameters.entry(place.parameter.clone()).or_default();
            parameter.resize(4 * part.end, 0);
            let parameter = &mut parameter[4 * part.start..];
            place.read_bytes::<4>(file.tensor(&place.tensor).unwrap().data(), parameter).unwrap();
        }
        assert_eq!(mapping.tensors().len(), views.len(), "{family}");
        for tensor in mapping.tensors() {
            let HfContent::Parameters(places) = &tensor.content else { panic!("{} is zero", tensor.name) };
            let mut stored = vec![0xff; 4 * tensor.shape.iter().product::<usize>()];
            for place in places {
                let part = 4 * place.part().start..4 * place.part().end;
                place.write_bytes::<4>(&parameters[&place.parameter][part], &mut stored).unwrap();
            }
            assert!(stored == file.tensor(&tensor.name).unwrap().data(), "{family}: {} differs", tensor.name);
        }
    }
}

#[test]
fn every_parameter_has_a_place_of_its_size() {
    for family in FAMILIES {
        let config = fixture_config(family);
        let mapping = HfMapping::new(&config);
        for record in parameter_records(&config) {
            let elements = mapping.places_of(&record.name).fold(0, |end, place| {
                assert_eq!(place.part().start, end, "{family}: {} is read in order", record.name);
                place.part().end
            });
            let expected = if record.tie.is_none() { record.elements() } else { 0 };
            assert_eq!(elements, expected, "{family}: {}", record.name);
        }
    }
}

#[test]
fn names_without_the_prefix_of_the_family_are_accepted() {
    let prefixes =
        [("gpt2", "transformer."), ("qwen2", "model."), ("falcon", "transformer."), ("opt", "model.")];
    for (family, prefix) in prefixes {
        let import = matched(&fixture_config(family), |tensors| {
            for (name, _) in tensors {
                *name = name.strip_prefix(prefix).expect("the prefix").to_owned();
            }
        });
        let import = import.unwrap_or_else(|error| panic!("{family}: {error}"));
        assert!(import.places.iter().all(|place| !place.tensor.starts_with(prefix)), "{family}");
    }
}

#[test]
fn old_buffers_are_passed_over() {
    for (family, buffers) in [
        ("gpt2", ["transformer.h.0.attn.bias", "h.1.attn.masked_bias"]),
        ("llama", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]),
        ("gpt_neox", ["gpt_neox.layers.0.attention.bias", "layers.1.attention.masked_bias"]),
        ("gpt_neox", ["gpt_neox.layers.0.attention.rotary_emb.inv_freq", "layers.1.attention.bias"]),
    ] {
        let with = matched(&fixture_config(family), |tensors| {
            tensors.extend(buffers.map(|name| (name.to_owned(), vec![3])));
        });
        let without = matched(&fixture_config(family), |_| ());
        assert_eq!(with.unwrap().places, without.unwrap().places);
    }
}

#[test]
fn every_tensor_that_does_not_fit_is_named() {
    let found = problems(matched(&fixture_config("llama"), |tensors| {
        tensors.retain(|(name, _)| name != "model.layers.1.mlp.up_proj.weight");
        tensors.push(("model.layers.2.mlp.up_proj.weight".into(), vec![88, 48]));
        tensors.push(("norm.weight".into(), vec![48]));
        tensors[0].1 = vec![113, 64];
    }));
    let tensor = |name: &str| name.to_owned();
    assert_eq!(
        found,
        [
            CheckpointProblem::Duplicate { tensors: [tensor("model.norm.weight"), tensor("norm.weight")] },
            CheckpointProblem::Shape {
                tensor: tensor("model.embed_tokens.weight"),
                expected: vec![113, 48],
                found: vec![113, 64]
            },
            CheckpointProblem::Missing { tensor: tensor("model.layers.1.mlp.up_proj.weight") },
            CheckpointProblem::Unexpected { tensor: tensor("model.layers.2.mlp.up_proj.weight") },
        ]
    );
}

#[test]
fn a_tied_output_layer_may_be_repeated_and_an_untied_one_may_not_be_missing() {
    let import = matched(&fixture_config("gpt2"), |tensors| {
        tensors.push(("lm_head.weight".into(), vec![113, 48]));
    });
    let copies = import.unwrap().tied_copies;
    assert_eq!(copies.len(), 1);
    assert_eq!(
        (copies[0].0.as_str(), copies[0].1.tensor.as_str()),
        ("lm_head.weight", "transformer.wte.weight")
    );

    let found = problems(matched(&fixture_config("llama"), |tensors| {
        tensors.retain(|(name, _)| name != "lm_head.weight");
    }));
    assert_eq!(found, [CheckpointProblem::Missing { tensor: "lm_head.weight".into() }]);
}

#[test]
fn a_model_without_biases_is_exported_with_zeros_and_takes_no_others_back() {
    let config = ModelConfig::preset("baby-gpt").unwrap();
    let mapping = HfMapping::new(&config);
    let zeros = mapping.tensors().iter().filter(|tensor| tensor.content == HfContent::Zeros).count();
    assert_eq!(zeros, 6 * 6 + 1);
    assert_eq!(matched(&config, |_| ()).unwrap().zeros.len(), zeros);
    let without = matched(&config, |tensors| tensors.retain(|(name, _)| !name.ends_with(".bias")));
    assert_eq!(without.unwrap().zeros.len(), 0);

    assert!(HfImport::require_zeros("a", 4, &[0; 12]).is_ok());
    let message = HfImport::require_zeros("a", 4, &[0, 0, 0, 0, 0, 1, 0, 0]).unwrap_err().to_string();
    assert!(message.contains("a is not zero at element 1"), "{message}");
}

#[test]
fn data_of_another_length_is_refused() {
    let mapping = HfMapping::new(&fixture_config("gpt2"));
    let place = mapping.places_of("transformer.h.0.attn.k.weight").next().unwrap();
    let (stored, parameter) = (48 * 144, 48 * 48);
    assert!(place.read(&vec![0_u8; stored], &mut vec![0; parameter]).is_ok());
    assert!(place.read(&vec![0_u8; stored - 1], &mut vec![0; parameter]).is_err());
    assert!(place.read(&vec![0_u8; stored], &mut vec![0; parameter + 1]).is_err());
    assert!(place.read_bytes::<4>(&vec![0; 4 * stored + 1], &mut vec![0; 4 * parameter]).is_err());
}
