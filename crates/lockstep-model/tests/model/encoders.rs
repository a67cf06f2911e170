//! Configurations and checkpoints of BERT, ViT and classifiers of sequences.

use lockstep_model::{BertConfig, BertHead, Classes, HfMapping, LlamaConfig, ModelConfig, VitConfig};
use lockstep_plan::DType;
use serde_json::{Value, json};

fn read(table: &Value) -> Result<ModelConfig, String> {
    ModelConfig::from_json_text(&table.to_string(), "a test").map_err(|error| error.to_string())
}

fn refusal(table: &Value) -> String {
    read(table).expect_err("a configuration with a problem")
}

#[test]
fn defaults_are_those_of_the_published_base_models() {
    let bert = read(&json!({ "model_type": "bert" })).unwrap();
    assert_eq!(bert.parameter_count(), 109_514_298);
    let vit = read(&json!({ "model_type": "vit", "num_labels": 1000 })).unwrap();
    assert_eq!(vit.parameter_count(), 86_567_656);
    assert_eq!(vit.model().sizes().fixed_seq_len, Some(197));
}

#[test]
fn the_head_follows_from_the_architecture_or_from_the_classes() {
    let head = |more: Value| {
        let mut table = json!({ "model_type": "bert" });
        table.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        read(&table).unwrap().get::<BertConfig>().unwrap().head.clone()
    };
    let classifier = |count| BertHead::SequenceClassification(Classes::numbered(count));
    assert_eq!(head(json!({})), BertHead::MaskedLanguageModel);
    assert_eq!(head(json!({ "architectures": ["BertForMaskedLM"] })), BertHead::MaskedLanguageModel);
    assert_eq!(head(json!({ "architectures": ["BertForSequenceClassification"] })), classifier(2));
    assert_eq!(head(json!({ "num_labels": 5 })), classifier(5));
    let named = head(json!({ "id2label": { "0": "bad", "1": "good" } }));
    assert_eq!(named, BertHead::SequenceClassification(Classes { names: vec!["bad".into(), "good".into()] }));
    let llama = json!({ "model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "num_labels": 4 });
    let llama = read(&llama).unwrap();
    assert_eq!(llama.get::<LlamaConfig>().unwrap().classes, Some(Classes::numbered(4)));
    assert_eq!(llama.to_json(DType::F32)["architectures"], json!(["LlamaForSequenceClassification"]));
    let language_model = read(&json!({ "model_type": "llama", "num_labels": 4 })).unwrap();
    assert_eq!(language_model.get::<LlamaConfig>().unwrap().classes, None);
}

#[test]
fn what_is_written_is_read_back_and_an_override_of_the_classes_replaces_their_names() {
    let tables = [
        json!({ "model_type": "bert", "architectures": ["BertForSequenceClassification"], "classifier_dropout": 0.3 }),
        json!({ "model_type": "bert", "hidden_act": "relu", "tie_word_embeddings": false }),
        json!({ "model_type": "vit", "id2label": { "0": "a", "1": "b", "2": "c" }, "qkv_bias": false }),
        json!({ "model_type": "mistral", "architectures": ["MistralForSequenceClassification"] }),
    ];
    for table in tables {
        let config = read(&table).unwrap();
        assert_eq!(read(&config.to_json(DType::F32)).unwrap(), config, "{table}");
    }
    let vit = read(&json!({ "model_type": "vit", "id2label": { "0": "a", "1": "b" } })).unwrap();
    let more = json!({ "num_labels": 7 });
    let changed = vit.with_overrides(more.as_object().unwrap(), "a test").unwrap();
    assert_eq!(changed.get::<VitConfig>().unwrap().classes, Classes::numbered(7));
}

#[test]
fn configurations_that_mean_nothing_here_are_problems() {
    let cases = [
        (json!({ "model_type": "bert", "architectures": ["BertForTokenClassification"] }), "BertForMaskedLM"),
        (
            json!({ "model_type": "vit", "architectures": ["ViTForMaskedImageModeling"] }),
            "ViTForImageClassification",
        ),
        (json!({ "model_type": "bert", "hidden_act": "swish" }), "`hidden_act` = \"swish\" is not supported"),
        (json!({ "model_type": "bert", "is_decoder": true }), "is_decoder"),
        (json!({ "model_type": "bert", "position_embedding_type": "relative_key" }), "absolute"),
        (json!({ "model_type": "bert", "num_labels": 1 }), "is a regression"),
        (
            json!({ "model_type": "bert", "num_labels": 3, "problem_type": "regression" }),
            "single_label_classification",
        ),
        (
            json!({ "model_type": "bert", "id2label": { "0": "a", "2": "b" } }),
            "a name for each of the indices",
        ),
        (
            json!({ "model_type": "vit", "id2label": { "0": "a", "1": "b" }, "num_labels": 3 }),
            "names 2 classes",
        ),
        (
            json!({ "model_type": "vit", "patch_size": 15 }),
            "`patch_size` = 15 does not divide `image_size` = 224",
        ),
        (json!({ "model_type": "vit", "patch_size": 0 }), "`patch_size` = 0 is out of range"),
        (json!({ "model_type": "vit", "num_labels": 0 }), "`num_labels` = 0 is out of range"),
        (json!({ "model_type": "vit", "num_labels": usize::MAX }), "`num_labels`"),
        (
            json!({ "model_type": "vit", "num_attention_heads": 0 }),
            "`num_attention_heads` = 0 is out of range",
        ),
        (json!({ "model_type": "vit", "num_attention_heads": 5 }), "does not divide `hidden_size` = 768"),
        (
            json!({ "model_type": "bert", "hidden_dropout_prob": 1.0 }),
            "`hidden_dropout_prob` = 1 is out of range",
        ),
        (json!({ "model_type": "bert", "classifier_dropout": -0.5 }), "`classifier_dropout`"),
    ];
    for (table, part) in cases {
        let message = refusal(&table);
        assert!(message.contains(part), "{table}: {message}");
    }
}

#[test]
fn dropout_is_set_and_cleared_everywhere() {
    for table in [json!({ "model_type": "bert", "num_labels": 2 }), json!({ "model_type": "vit" })] {
        let model = read(&table).unwrap();
        assert!(!model.without_dropout().has_dropout() && model.with_dropout(0.2).has_dropout(), "{table}");
    }
    let only_at_the_end = json!({
        "model_type": "bert", "num_labels": 2, "classifier_dropout": 0.1, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    });
    assert!(read(&only_at_the_end).unwrap().has_dropout());
}

#[test]
fn older_names_are_read_and_heads_for_other_tasks_are_skipped() {
    let tiny = json!({ "model_type": "bert", "vocab_size": 7, "hidden_size": 4, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 6 });
    let config = read(&tiny).unwrap();
    let mapping = HfMapping::new(&config);
    let mut tensors: Vec<(String, Vec<usize>)> = mapping
        .tensors()
        .iter()
        .map(|tensor| {
            let older = tensor.name.replace("LayerNorm.weight", "LayerNorm.gamma");
            (older.replace("LayerNorm.bias", "LayerNorm.beta"), tensor.shape.clone())
        })
        .collect();
    assert!(tensors.iter().any(|(name, _)| name.ends_with("gamma")), "{tensors:?}");
    for (name, shape) in [
        ("bert.embeddings.position_ids", vec![1, 6]),
        ("bert.pooler.dense.weight", vec![4, 4]),
        ("cls.seq_relationship.bias", vec![2]),
        ("cls.predictions.decoder.bias", vec![7]),
        ("cls.predictions.decoder.weight", vec![7, 4]),
    ] {
        tensors.push((name.to_owned(), shape));
    }
    let all = || tensors.iter().map(|(name, shape)| (name.as_str(), &shape[..]));
    let import = mapping.match_checkpoint(all()).unwrap();
    assert_eq!(import.places.len(), mapping.tensors().len());
    assert_eq!(import.tied_copies.len(), 1, "the output layer repeats the embedding");
    let strange =
        mapping.match_checkpoint(all().chain([("strange", &[1_usize][..])])).unwrap_err().to_string();
    assert!(strange.contains("strange"), "{strange}");
}
