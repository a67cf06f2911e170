//! Properties of reading, writing and overriding a configuration, on files that transformers wrote.

use std::path::{Path, PathBuf};

use lockstep_model::{
    Activation, ConfigProblem, FalconConfig, FalconResidual, Gpt2Config, GptNeoxConfig, LlamaConfig,
    ModelConfig, ModelError, OptConfig, Rope, RopeScaling, presets,
};
use lockstep_plan::DType;
use lockstep_tensor::GatedActivation;
use serde_json::{Map, Value, json};

use crate::FAMILIES;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

fn fixture(name: &str) -> ModelConfig {
    ModelConfig::from_file(&fixtures().join(name)).unwrap_or_else(|error| panic!("{error}"))
}

fn table(value: Value) -> Map<String, Value> {
    value.as_object().expect("a table").clone()
}

fn read(value: Value) -> Result<ModelConfig, ModelError> {
    ModelConfig::from_table(&table(value), "config.json")
}

fn llama(config: &ModelConfig) -> &LlamaConfig {
    config.get().expect("a Llama")
}

fn gpt2(config: &ModelConfig) -> &Gpt2Config {
    config.get().expect("a GPT-2")
}

/// Returns the problems of a configuration that must be rejected.
fn problems(value: Value) -> Vec<ConfigProblem> {
    match read(value.clone()) {
        Err(ModelError::Config { problems, .. }) => problems,
        other => panic!("{value} gave {other:?}"),
    }
}

#[test]
fn both_forms_of_transformers_mean_the_same() {
    for model in ["llama3.1-8b", "qwen3-0.6b", "gemma2-2b", "gemma3-1b", "gpt-oss-20b"] {
        let old = fixture(&format!("configs/{model}.transformers4.json"));
        let new = fixture(&format!("configs/{model}.transformers5.json"));
        assert_eq!(old, new, "{model}");
    }
}

#[test]
fn published_files_are_the_presets() {
    let mut published = llama(&fixture("configs/llama3.1-8b.transformers4.json")).clone();
    published.tokens.end = vec![128_001]; // The file is the instruction-tuned model's.
    assert_eq!(ModelConfig::from(published), ModelConfig::preset("llama3-8b").unwrap());
    assert_eq!(fixture("configs/qwen3-0.6b.transformers5.json"), ModelConfig::preset("qwen3-0.6b").unwrap());
    for model in ["gemma2-2b", "gemma3-1b", "olmo2-7b", "phi-3-mini", "gpt-oss-20b"] {
        let published = fixture(&format!("configs/{model}.transformers4.json"));
        assert_eq!(published, ModelConfig::preset(model).unwrap(), "{model}");
    }
    let published = gpt2(&fixture("configs/gpt2.transformers4.json")).clone();
    assert_eq!(ModelConfig::from(published.with_dropout(0.0)), ModelConfig::preset("gpt2-124m").unwrap());
    let mistral = fixture("configs/mistral-7b.transformers4.json");
    assert_eq!((mistral.parameter_count(), llama(&mistral).sliding_window), (7_241_732_096, Some(4096)));
    let qwen = fixture("configs/qwen2.5-0.5b.transformers4.json");
    assert_eq!((qwen.parameter_count(), llama(&qwen).sliding_window), (494_032_768, None));
    for model in ["pythia-1.4b", "falcon-7b", "falcon-40b", "opt-350m", "bloom-560m"] {
        let published = fixture(&format!("configs/{model}.transformers4.json")).without_dropout();
        assert_eq!(published, ModelConfig::preset(model).unwrap(), "{model}");
    }
}

#[test]
fn the_fixtures_say_what_make_py_put_into_them() {
    let config = fixture("llama/config.json");
    let scaling = RopeScaling::Llama3 {
        factor: 4.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 32,
    };
    assert_eq!(llama(&config).rope.scaling, scaling);
    assert_eq!((llama(&config).head_dim, llama(&config).num_key_value_heads), (12, 2));
    let config = fixture("llama_bias/config.json");
    let biases = [llama(&config).qkv_bias, llama(&config).output_bias, llama(&config).mlp_bias];
    assert_eq!(biases, [true; 3]);
    assert_eq!(llama(&config).rope.scaling, RopeScaling::Linear { factor: 2.5 });
    assert_eq!(llama(&fixture("mistral/config.json")).sliding_window, Some(7));
    let config = fixture("qwen2/config.json");
    assert_eq!((llama(&config).qkv_bias, llama(&config).output_bias), (true, false));
    let config = fixture("qwen3/config.json");
    assert_eq!((llama(&config).qk_norm, llama(&config).head_dim), (true, 16));
    assert_eq!(gpt2(&fixture("gpt2/config.json")).activation, Activation::GeluTanh);
    let config = fixture("gemma2/config.json");
    let caps = [llama(&config).score_cap, llama(&config).logit_cap, llama(&config).query_scale];
    assert_eq!(caps, [Some(3.0), Some(5.0), Some(20.0)]);
    assert_eq!((llama(&config).sliding_window, llama(&config).full_every), (Some(7), Some(2)));
    assert_eq!(config.sliding_window(), None, "some layers see all positions");
    let config = fixture("gemma3/config.json");
    let ropes = (llama(&config).rope.clone(), llama(&config).local_rope.clone());
    let full = Rope { theta: 1000.0, scaling: RopeScaling::Linear { factor: 4.0 } };
    assert_eq!(ropes, (full, Some(Rope::new(100.0))));
    assert_eq!(llama(&fixture("phi3/config.json")).rotary_fraction, 0.5);
    let clamped = GatedActivation::Clamped { slope: 1.702, limit: 0.75 };
    assert_eq!(llama(&fixture("gpt_oss/config.json")).gate, clamped);
}

#[test]
fn what_is_written_reads_back_the_same() {
    let presets = presets().iter().map(|preset| preset.config().unwrap());
    let families = FAMILIES.map(|family| fixture(&format!("{family}/config.json")));
    let windowed = read(json!({"model_type": "qwen2", "use_sliding_window": true, "max_window_layers": 0}));
    for config in presets.chain(families).chain([windowed.unwrap()]) {
        let text = config.to_json(DType::BF16).to_string();
        let back = ModelConfig::from_json_text(&text, "written").unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(back, config, "{text}");
    }
}

#[test]
fn an_absent_key_has_the_default_of_its_family() {
    let heads = |model_type: &str| read(json!({"model_type": model_type})).unwrap().num_key_value_heads();
    assert_eq!(["llama", "mistral", "qwen2", "gpt2"].map(heads), [32, 8, 32, 12]);
    assert_eq!(read(json!({"model_type": "qwen3", "hidden_size": 2048})).unwrap().head_dim(), 128);
    assert_eq!(read(json!({"model_type": "llama", "hidden_size": 2048})).unwrap().head_dim(), 64);
}

#[test]
fn options_that_change_the_numbers_are_refused_by_name() {
    let cases = [
        ("gpt2", "scale_attn_by_inverse_layer_idx", json!(true)),
        ("gpt2", "reorder_and_upcast_attn", json!(true)),
        ("gpt2", "scale_attn_weights", json!(false)),
        ("gpt2", "add_cross_attention", json!(true)),
        ("gpt2", "activation_function", json!("silu")),
        ("llama", "hidden_act", json!("gelu")),
        ("llama", "sliding_window", json!(128)),
        ("llama", "auto_map", json!({"AutoModel": "evil.Model"})),
        ("llama", "partial_rotary_factor", json!(0.5)),
        ("mistral", "attention_bias", json!(true)),
        ("mistral", "layer_types", json!(vec!["full_attention"; 32])),
        ("qwen2", "layer_types", json!(["full_attention"])),
        ("qwen2", "mlp_bias", json!(true)),
        ("qwen3", "layer_types", json!(vec!["sliding_attention"; 32])),
        ("gpt_neox", "hidden_act", json!("swish")),
        ("gpt_neox", "hidden_dropout_prob", json!(0.1)),
        ("falcon", "auto_map", json!({"AutoModel": "evil.Model"})),
        (
            "falcon",
            "auto_map",
            json!({"AutoConfig": "configuration_falcon.FalconConfig", "AutoModel": "evil.Model"}),
        ),
        ("falcon", "num_ln_in_parallel_attn", json!(3)),
        ("falcon", "apply_residual_connection_post_layernorm", json!(true)),
        ("opt", "layerdrop", json!(0.1)),
        ("opt", "layer_norm_elementwise_affine", json!(false)),
        ("bloom", "n_inner", json!(64)),
        ("gemma", "hidden_act", json!("silu")),
        ("gemma2", "use_bidirectional_attention", json!(true)),
        ("gemma3_text", "sliding_window_pattern", json!(0)),
        ("gemma3_text", "attn_logit_softcapping", json!(50.0)),
        ("olmo2", "partial_rotary_factor", json!(0.5)),
        ("phi3", "resid_pdrop", json!(0.1)),
        ("gpt_oss", "attention_bias", json!(false)),
    ];
    for (model_type, key, value) in cases {
        match &problems(json!({"model_type": model_type, key: value}))[..] {
            [ConfigProblem::Unsupported { key: named, value: shown, .. }] => {
                assert_eq!(named, key);
                let (shown, value) = (shown.trim_end_matches("..."), value.to_string());
                assert!(value.starts_with(shown), "{model_type}.{key} = {value} is shown as {shown}");
            }
            other => panic!("{model_type}.{key} = {value}: {other:?}"),
        }
    }
}

#[test]
fn the_long_rope_of_phi_is_read_in_all_forms_and_written_as_it_is_read() {
    let [short, long] = [1.0, 2.0].map(|first| (0..18).map(|at| first + at as f64 / 8.0).collect::<Vec<_>>());
    let with = |more: Value| {
        let mut keys = table(json!({
            "model_type": "phi3", "hidden_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2,
            "max_position_embeddings": 131_072,
        }));
        keys.extend(table(more));
        read(Value::Object(keys))
    };
    let scaling = json!({"type": "longrope", "short_factor": short, "long_factor": long});
    let of_old = |name: &str| {
        let mut scaling = scaling.clone();
        scaling["type"] = json!(name);
        let part = json!({
            "rope_scaling": scaling, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        });
        with(part).unwrap()
    };
    let config = of_old("longrope");
    assert_eq!(llama(&of_old("su")), llama(&config));
    let rope = &llama(&config).rope;
    assert_eq!(rope.short_context(), Some(4096));
    assert!((rope.amplitude() - (1.0 + 32_f64.ln() / 4096_f64.ln()).sqrt()).abs() < 1e-12);
    let [of_short, of_long] = [rope.inverse_frequencies(36), rope.long_inverse_frequencies(36).unwrap()];
    assert_eq!((of_short[0], of_long[0], of_short.len()), (1.0, 0.5, 18));
    let parameters = json!({
        "rope_type": "longrope", "short_factor": short, "long_factor": long, "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096,
    });
    assert_eq!(llama(&with(json!({"rope_parameters": parameters})).unwrap()), llama(&config));
    assert_eq!(llama(&read(config.to_json(lockstep_plan::DType::F32)).unwrap()), llama(&config));
    let message = |more: Value| with(more).unwrap_err().to_string();
    let of_all = message(json!({"rope_scaling": scaling}));
    assert!(of_all.contains("a list of 18") && of_all.contains("24 numbers"), "{of_all}");
    let missing = message(json!({"rope_scaling": {"type": "longrope", "short_factor": "all"}}));
    assert!(missing.contains("long_factor") && missing.contains("a list of numbers"), "{missing}");
    let negative = json!({"rope_type": "longrope", "short_factor": [0.0], "long_factor": [1.0]});
    assert!(message(json!({"rope_scaling": negative})).contains("finite numbers above 0"));
}

#[test]
fn rope_types_that_are_not_supported_are_refused_by_name() {
    for rope_type in ["dynamic", "proportional", "mrope"] {
        for key in ["rope_scaling", "rope_parameters"] {
            let config =
                json!({"model_type": "llama", key: {"rope_type": rope_type, "factor": 2.0, "beta_fast": 32}});
            let expected = ConfigProblem::Unsupported {
                key: format!("{key}.rope_type"),
                value: format!("\"{rope_type}\""),
                supported: "\"default\", \"linear\", \"llama3\", \"yarn\", \"longrope\"".into(),
            };
            assert_eq!(problems(config), [expected]);
        }
    }
}

#[test]
fn rope_settings_that_contradict_each_other_are_refused() {
    let old = json!({"model_type": "llama", "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}});
    assert!(matches!(&problems(old)[..], [ConfigProblem::Conflict { .. }]));
    let linear = json!({"type": "linear", "factor": 2.0});
    let both =
        json!({"model_type": "llama", "rope_scaling": linear, "rope_parameters": {"rope_type": "default"}});
    assert!(matches!(&problems(both)[..], [ConfigProblem::Conflict { .. }]));
}

#[test]
fn qwen_may_have_windows_in_all_layers_or_none() {
    let window = |first: usize| {
        read(json!({
            "model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": true,
            "sliding_window": 64, "max_window_layers": first,
        }))
    };
    assert_eq!(llama(&window(0).unwrap()).sliding_window, Some(64));
    assert_eq!(llama(&window(4).unwrap()).sliding_window, None);
    let message = window(2).unwrap_err().to_string();
    assert!(message.contains("`max_window_layers` = 2"), "{message}");
}

#[test]
fn every_spelling_of_partial_rotary_positions_means_the_same() {
    let rotated = |keys: Value| {
        let mut keys = table(keys);
        keys.extend(table(json!({"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4})));
        let config = read(Value::Object(keys)).unwrap();
        let config: &GptNeoxConfig = config.get().expect("a GPT-NeoX");
        (config.rotary_dim(), config.rope.theta, config.rope.scaling.clone())
    };
    assert_eq!(rotated(json!({})), (4, 10_000.0, RopeScaling::Default));
    let linear = RopeScaling::Linear { factor: 2.0 };
    let old =
        json!({"rotary_pct": 0.5, "rotary_emb_base": 500, "rope_scaling": {"type": "linear", "factor": 2}});
    assert_eq!(rotated(old), (8, 500.0, linear.clone()));
    let rope =
        json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0, "partial_rotary_factor": 0.5});
    assert_eq!(rotated(json!({"rope_parameters": rope})), (8, 500.0, linear));

    let base = ModelConfig::preset("pythia-1b").unwrap();
    let changed = |overrides: Value| {
        let config = base.with_overrides(&table(overrides), "[model]").unwrap();
        let config: &GptNeoxConfig = config.get().expect("a GPT-NeoX");
        (config.rotary_dim(), config.rope.theta)
    };
    let rope = json!({"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5});
    assert_eq!(changed(json!({"rope_parameters": rope})), (128, 500.0));
    assert_eq!(changed(json!({"rotary_pct": 1.0})), (256, 10_000.0));
}

#[test]
fn relations_that_a_family_cannot_have_are_refused_in_one_message() {
    let cases = [
        (json!({"model_type": "gpt_neox", "rotary_pct": 0.01}), "rotates 0 of 96"),
        (json!({"model_type": "gpt_neox", "rotary_pct": 0.1}), "rotates 9 of 96"),
        (json!({"model_type": "gpt_neox", "rotary_pct": 1.5}), "`rotary_pct` = 1.5"),
        (
            json!({"model_type": "gpt_neox", "rotary_pct": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}),
            "RoPE's part of a head is 0.5 by `rotary_pct` and 0.25 by `rope_parameters`",
        ),
        (
            json!({"model_type": "gpt_neox", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
            "YaRN scales the scores of 24 of 96",
        ),
        (
            json!({"model_type": "gpt_neox", "num_attention_heads": 7}),
            "`num_attention_heads` = 7 does not divide",
        ),
        (
            json!({"model_type": "falcon", "new_decoder_architecture": true, "parallel_attn": false}),
            "needs `parallel_attn` = true",
        ),
        (json!({"model_type": "falcon", "num_ln_in_parallel_attn": 2}), "needs `new_decoder_architecture`"),
        (json!({"model_type": "falcon", "num_kv_heads": 8}), "`num_kv_heads` = 8 has no effect"),
        (
            json!({"model_type": "falcon", "new_decoder_architecture": true, "num_kv_heads": 8}),
            "`num_kv_heads` = 8 does not divide `num_attention_heads` = 71",
        ),
        (json!({"model_type": "falcon", "num_attention_heads": 64}), "does not divide `the head size` = 71"),
        (
            json!({"model_type": "falcon", "n_embed": 142, "hidden_size": 284}),
            "its alias `n_embed` = 142 differ",
        ),
        (json!({"model_type": "opt", "num_attention_heads": 7}), "does not divide `hidden_size` = 768"),
        (json!({"model_type": "opt", "dropout": 1.0}), "`dropout` = 1"),
        (json!({"model_type": "bloom", "n_head": 3}), "`n_head` = 3 does not divide `hidden_size` = 64"),
        (
            json!({"model_type": "bloom", "n_head": 8, "num_attention_heads": 4}),
            "`num_attention_heads` = 4 differ",
        ),
        (json!({"model_type": "bloom", "seq_lenght": 3}), "did you mean `seq_length`?"),
        (json!({"model_type": "opt", "ffn_dims": 3}), "did you mean `ffn_dim`?"),
        (json!({"model_type": "falcon", "num_kv_head": 3}), "did you mean `num_kv_heads`?"),
        (json!({"model_type": "gpt_neox", "rotary_pc": 3}), "did you mean `rotary_pct`?"),
    ];
    for (config, expected) in cases {
        let message = read(config.clone()).unwrap_err().to_string();
        assert!(message.contains(expected), "{config}: {message}");
        assert_eq!(problems(config.clone()).len(), 1, "{config}: {message}");
    }
}

#[test]
fn heads_of_falcon_follow_from_its_architecture() {
    let heads = |keys: Value| {
        let mut keys = table(keys);
        keys.extend(table(json!({"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4})));
        let config = read(Value::Object(keys)).unwrap();
        let config: &FalconConfig = config.get().expect("a Falcon");
        (config.num_key_value_heads, config.residual)
    };
    let [one, two] = [FalconResidual::ParallelOneNorm, FalconResidual::ParallelTwoNorms];
    assert_eq!(heads(json!({})), (1, one));
    assert_eq!(heads(json!({"num_kv_heads": 4})), (1, one), "as in the file of the 7B model");
    assert_eq!(heads(json!({"multi_query": false, "parallel_attn": false})), (4, FalconResidual::Sequential));
    assert_eq!(heads(json!({"new_decoder_architecture": true})), (4, two));
    assert_eq!(heads(json!({"new_decoder_architecture": true, "num_kv_heads": 2})), (2, two));
    assert_eq!(
        heads(json!({"new_decoder_architecture": true, "num_ln_in_parallel_attn": 1, "multi_query": false})),
        (4, one)
    );
}

#[test]
fn layers_without_a_window_are_the_last_of_every_so_many() {
    let types = |list: &[&str]| {
        read(json!({"model_type": "gemma2", "num_hidden_layers": list.len(), "layer_types": list}))
    };
    let (full, sliding) = ("full_attention", "sliding_attention");
    let every = |list: &[&str]| llama(&types(list).unwrap()).full_every;
    assert_eq!(every(&[sliding, sliding, full, sliding]), Some(3));
    assert_eq!((every(&[full, full]), every(&[sliding, sliding])), (Some(1), None));
    for list in [&[full, sliding][..], &[sliding, full, full], &[full, sliding, full]] {
        let message = types(list).map(|_| ()).unwrap_err().to_string();
        assert!(message.contains("layer_types"), "{list:?}: {message}");
    }
    let hostile = read(json!({"model_type": "gemma2", "num_hidden_layers": u64::MAX, "layer_types": [full]}));
    assert!(hostile.unwrap_err().to_string().contains("num_hidden_layers"));
    let pattern = read(json!({"model_type": "gemma3_text", "sliding_window_pattern": 4})).unwrap();
    assert_eq!(llama(&pattern).full_every, Some(4));
    let fewer = ModelConfig::preset("gemma2-2b").unwrap();
    let fewer = fewer.with_overrides(&table(json!({"num_hidden_layers": 3})), "[model]").unwrap();
    assert_eq!((fewer.num_hidden_layers(), llama(&fewer).full_every), (3, Some(2)));
}

#[test]
fn the_two_ropes_of_gemma_are_overridden_in_either_form() {
    let preset = ModelConfig::preset("gemma3-4b").unwrap();
    let change = |overrides: Value| {
        let changed = preset.with_overrides(&table(overrides), "[model]").unwrap();
        (llama(&changed).rope.clone(), llama(&changed).local_rope.clone().unwrap())
    };
    let linear = RopeScaling::Linear { factor: 8.0 };
    let (rope, local) = change(json!({"rope_theta": 5e5, "rope_local_base_freq": 500.0}));
    assert_eq!((rope, local), (Rope { theta: 5e5, scaling: linear }, Rope::new(500.0)));
    let tables = json!({"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 500.0}});
    assert_eq!(change(json!({ "rope_parameters": tables })), (Rope::new(5e5), Rope::new(500.0)));
}

#[test]
fn slopes_of_falcon_are_scaled_like_scores_and_have_the_precision_of_bf16() {
    let slopes = |config: Value| {
        let constants = read(config).unwrap().model().constants();
        assert_eq!(constants.iter().map(|constant| &constant.name[..]).collect::<Vec<_>>(), ["alibi_slopes"]);
        constants[0].values.clone()
    };
    let exact = slopes(json!({"model_type": "bloom", "hidden_size": 48, "n_head": 12}));
    let rounded =
        slopes(json!({"model_type": "falcon", "hidden_size": 48, "num_attention_heads": 12, "alibi": true}));
    assert_eq!((exact.len(), exact[0], exact[8]), (12, 0.5, std::f32::consts::FRAC_1_SQRT_2));
    assert_eq!((rounded.len(), rounded[0], rounded[8]), (12, 0.25, 0.707_031_25 / 2.0));
}

#[test]
fn an_unknown_key_names_the_nearest_known_one() {
    let found = problems(json!({"model_type": "llama", "num_hiden_layers": 2}));
    let nearest = Some("num_hidden_layers".to_owned());
    assert_eq!(found, [ConfigProblem::UnknownKey { key: "num_hiden_layers".into(), nearest }]);
    let found = problems(json!({"model_type": "llama", "rope_scaling": {"type": "linear", "factr": 2}}));
    assert!(
        found.contains(&ConfigProblem::UnknownKey {
            key: "rope_scaling.factr".into(),
            nearest: Some("factor".into())
        }),
        "{found:?}"
    );
}

#[test]
fn an_unknown_model_type_is_refused_with_the_known_ones() {
    let message = read(json!({"model_type": "mamba"})).unwrap_err().to_string();
    assert!(message.contains("\"mamba\"") && message.contains("\"qwen3\""), "{message}");
    let message = read(json!({"hidden_size": 64})).unwrap_err().to_string();
    assert!(message.contains("`model_type` is missing"), "{message}");
}

#[test]
fn every_problem_is_reported_at_once() {
    let found = problems(json!({
        "model_type": "llama", "hidden_size": 100, "num_attention_heads": 3, "head_dim": 33,
        "num_key_value_heads": 2, "vocab_size": 0, "rms_norm_eps": 0.0, "colour": "blue",
    }));
    assert_eq!(found.len(), 6, "{found:#?}");
}

#[test]
fn hostile_sizes_are_refused_without_overflow() {
    for value in [json!(0), json!(-1), json!(u64::MAX), json!(1e300), json!("64"), json!([64])] {
        for key in ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "head_dim"] {
            assert!(!problems(json!({"model_type": "llama", key: value})).is_empty(), "{key} = {value}");
        }
        for key in ["n_embd", "n_head", "n_layer", "n_inner", "n_positions"] {
            assert!(!problems(json!({"model_type": "gpt2", key: value})).is_empty(), "{key} = {value}");
        }
        for (model_type, keys) in [
            ("gpt_neox", ["hidden_size", "intermediate_size", "num_attention_heads", "rotary_pct"]),
            ("falcon", ["hidden_size", "ffn_hidden_size", "num_attention_heads", "num_hidden_layers"]),
            ("opt", ["word_embed_proj_dim", "ffn_dim", "num_attention_heads", "max_position_embeddings"]),
            ("bloom", ["n_embed", "n_head", "num_hidden_layers", "seq_length"]),
        ] {
            for key in keys {
                assert!(
                    !problems(json!({"model_type": model_type, key: value})).is_empty(),
                    "{key} = {value}"
                );
            }
        }
    }
}

#[test]
fn text_that_is_no_table_is_refused() {
    for text in ["", "{", "[]", "3", "{\"model_type\": \"llama\", \"rms_norm_eps\": NaN}", "\u{0}"] {
        let error = ModelConfig::from_json_text(text, "config.json").unwrap_err();
        assert!(error.to_string().starts_with("config.json"), "{text:?}: {error}");
    }
    let missing = ModelConfig::from_file(Path::new("nowhere/config.json")).unwrap_err();
    assert!(missing.to_string().contains("nowhere/config.json"), "{missing}");
}

#[test]
fn an_override_carries_along_what_follows_from_it() {
    let change = |preset: &str, overrides: Value| {
        ModelConfig::preset(preset).unwrap().with_overrides(&table(overrides), "[model]").unwrap()
    };
    let wider = change("llama-15m", json!({"hidden_size": 768}));
    assert_eq!((wider.head_dim(), wider.num_key_value_heads()), (128, 2));
    let qwen = change("qwen3-0.6b", json!({"hidden_size": 512}));
    assert_eq!(qwen.head_dim(), 128, "Qwen3's head size stands on its own");
    let gpt2 = change("gpt2-124m", json!({"hidden_size": 1536, "n_layer": 2}));
    assert_eq!((gpt2.hidden_size(), gpt2.intermediate_size(), gpt2.num_hidden_layers()), (1536, 6144, 2));
    let plain = change("llama3-8b", json!({"rope_scaling": null}));
    assert_eq!(llama(&plain).rope, Rope::new(500_000.0));
    let opt = change("opt-125m", json!({"hidden_size": 96}));
    assert_eq!(opt.get::<OptConfig>().expect("an OPT").embedding_size, 96);
    let opt = change("opt-350m", json!({"hidden_size": 96}));
    assert_eq!(opt.get::<OptConfig>().expect("an OPT").embedding_size, 512, "it stands on its own");
    let bloom =
        change("bloom-560m", json!({"num_attention_heads": 8, "n_embed": 64, "num_hidden_layers": 3}));
    assert_eq!((bloom.num_attention_heads(), bloom.hidden_size(), bloom.num_hidden_layers()), (8, 64, 3));
    let falcon = change("falcon-40b", json!({"new_decoder_architecture": false}));
    assert_eq!(falcon.num_key_value_heads(), 1);
    let linear = change("llama3-8b", json!({"rope_parameters": {"rope_type": "linear", "factor": 2}}));
    let expected = (500_000.0, RopeScaling::Linear { factor: 2.0 });
    assert_eq!((llama(&linear).rope.theta, llama(&linear).rope.scaling.clone()), expected);
}

#[test]
fn an_override_is_checked_like_a_file() {
    let preset = ModelConfig::preset("llama-15m").unwrap();
    for (overrides, expected) in [
        (json!({"num_hiden_layers": 2}), "did you mean `num_hidden_layers`?"),
        (json!({"num_attention_heads": 5}), "`num_key_value_heads` = 2 does not divide"),
        (json!({"model_type": "gpt2"}), "`model_type` = \"gpt2\""),
        (json!({"bias": true}), "unknown key `bias`"),
    ] {
        let message = preset.with_overrides(&table(overrides), "[model]").unwrap_err().to_string();
        assert!(message.starts_with("[model]: ") && message.contains(expected), "{message}");
    }
}

#[test]
fn a_configuration_that_its_file_cannot_express_is_invalid() {
    let mut config = llama(&ModelConfig::preset("llama-15m").unwrap()).clone();
    config.qk_norm = true;
    config.sliding_window = Some(8);
    config.output_bias = true;
    let message = ModelConfig::from(config).validate().unwrap_err().to_string();
    assert!(message.contains("3 problems"), "{message}");
}

#[test]
fn inverse_frequencies_are_those_of_transformers() {
    let text = std::fs::read_to_string(fixtures().join("rope.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert!(cases.len() >= 10);
    for case in cases {
        let head_dim = case["head_dim"].as_u64().unwrap();
        let config = read(json!({
            "model_type": "llama", "head_dim": head_dim, "rope_parameters": case["rope_parameters"],
        }));
        let config = config.unwrap();
        let rope = &llama(&config).rope;
        let (factor, expected) = (rope.attention_factor(), case["attention_factor"].as_f64().unwrap());
        assert!((factor - expected).abs() <= 1e-12, "{}: {factor} and {expected}", case["rope_parameters"]);
        let found = rope.inverse_frequencies(head_dim as usize);
        let expected = case["inverse_frequencies"].as_array().unwrap();
        assert_eq!(found.len(), expected.len());
        for (pair, (found, expected)) in found.iter().zip(expected).enumerate() {
            let expected = expected.as_f64().unwrap() as f32;
            let difference = (found - expected).abs();
            assert!(
                difference <= 4.0 * f32::EPSILON * expected,
                "{}, pair {pair}: {found} and {expected}",
                case["rope_parameters"]
            );
        }
    }
}
