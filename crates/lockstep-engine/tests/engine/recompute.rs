//! Tests of recompute settings per layer: they change no bit, and saved activations are as large as predicted.

use lockstep_engine::{Engine, EngineOptions, HostBatch, Update};
use lockstep_graph::{Recompute, RecomputeRules, Seed};
use lockstep_model::ModelConfig;
use lockstep_plan::{LayerRule, MemoryCategory, Plan};
use lockstep_tensor::Arena;
use proptest::{prelude::*, sample::select};
use serde_json::json;

use crate::common;

const LAYERS: usize = 5;
const TOKENS: usize = 12;

fn engine(recompute: RecomputeRules) -> Engine {
    let config = json!({
        "model_type": "llama", "vocab_size": 11, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 16, "tie_word_embeddings": true,
    });
    let model = ModelConfig::from_table(config.as_object().unwrap(), "test").unwrap();
    let plan = common::one_rank(&model, Plan { recompute, ..Plan::default() }, [2, TOKENS / 2], 1);
    let options = EngineOptions { seed: 1, ..EngineOptions::default() };
    let mut engine = Engine::builder(&model, plan).options(options).build(&Arena::new()).unwrap();
    engine.initialize(1).unwrap();
    engine
}

/// Returns the losses of three steps, and all weights after them.
fn trained(engine: &mut Engine) -> (Vec<u64>, Vec<Vec<u8>>) {
    let ids: [u32; TOKENS] = std::array::from_fn(|i| (i * i + 3) as u32 % 11);
    let labels = ids.map(|id| (id as i32 * 7 + 2) % 11);
    let batch = HostBatch {
        ids: &ids,
        labels: &labels,
        positions: &std::array::from_fn::<u32, TOKENS, _>(|i| i as u32 % (TOKENS as u32 / 2)),
        document_starts: &[0; TOKENS],
        sample_numbers: &[0, 1],
        inputs: &[],
    };
    let step = |step: u64| {
        let seed = Seed::new(1.0 / TOKENS as f32, 0.5);
        let loss = engine.forward_backward(std::iter::once(batch), seed).unwrap();
        engine.finish_gradients().unwrap();
        let update = Update { learning_rate: 1e-2, weight_decay: 0.1, gradient_scale: 1.0, step };
        engine.update(&update).unwrap();
        loss.to_bits()
    };
    let losses = (1..=3).map(step).collect();
    (
        losses,
        engine.state_tensors().iter().map(|tensor| tensor.in_memory().unwrap_or_default().to_vec()).collect(),
    )
}

fn mode() -> impl Strategy<Value = Recompute> {
    select(vec![Recompute::None, Recompute::Selective, Recompute::Full])
}

fn rules() -> impl Strategy<Value = RecomputeRules> {
    let rule = (0..LAYERS, 0..=LAYERS, 1..4_usize, mode()).prop_map(|(from, to, every, mode)| LayerRule {
        from,
        to: (to < LAYERS).then_some(to.max(from)),
        every,
        mode,
    });
    (mode(), prop::collection::vec(rule, 0..4))
        .prop_map(|(default, rules)| RecomputeRules::new(default, &rules).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn no_bit_depends_on_what_layers_forget_and_they_keep_what_was_predicted(rules in rules()) {
        let (mut found, mut expected) = (engine(rules), engine(Recompute::None.into()));
        prop_assert_eq!(trained(&mut found), trained(&mut expected), "{}", rules);
        let booked = found.arena().in_use()[MemoryCategory::Activations];
        prop_assert_eq!(booked, found.predicted_memory().by_category()[MemoryCategory::Activations], "{}", rules);
    }
}

#[test]
fn each_layer_that_forgets_saves_as_much() {
    let kept = |text: &str| {
        engine(serde_json::from_str(text).unwrap()).predicted_memory().by_category()
            [MemoryCategory::Activations]
    };
    let (all, none) = (kept("\"full\""), kept("\"none\""));
    let of_layer = (none - all) / LAYERS;
    assert!(of_layer > 0 && of_layer * LAYERS == none - all, "{none} bytes kept, {all} with full");
    for (rules, layers) in [
        (r#"{"layers": [{"every": 2, "mode": "full"}]}"#, 3),
        (r#"{"layers": [{"from": 1, "to": 2, "mode": "full"}]}"#, 2),
        (r#"{"default": "full", "layers": [{"from": 4, "mode": "none"}]}"#, 4),
    ] {
        assert_eq!(kept(rules), none - layers * of_layer, "{rules}");
    }
}
