//! Further model families have the numbers of one rank under every split: linear biases of attention are sharded by
//! heads, key/value heads are shared or replicated, tables of positions have rows before the first.

use lockstep_testkit::parity::{TinyModel, Workbench, splits};
use lockstep_testkit::tiny_families::{FALCON, FAMILIES};
use lockstep_train::verify::Tolerance;

/// Returns all differences between the models' numbers under a plan and on one rank.
fn differences<Setting: AsRef<str>>(bench: &Workbench, model: TinyModel, plan: &[Setting]) -> Vec<String> {
    let plan: Vec<&str> = plan.iter().map(AsRef::as_ref).collect();
    let found = bench.differences(model, &plan, Tolerance::F32);
    let lines = found.unwrap_or_else(|error| vec![error.to_string()]);
    lines.into_iter().map(|line| format!("{}, {}: {line}", model.name, plan.join(" "))).collect()
}

/// Returns true if the one key/value head of the multi-query model can be used: a square of ranks shards all heads.
fn fits(model: TinyModel, plan: &[String]) -> bool {
    model != FALCON || !plan.iter().any(|setting| setting == "parallel.tensor_layout=2d")
}

#[test]
fn every_split_of_every_family_has_the_numbers_of_one_rank() {
    let bench = Workbench::new().unwrap();
    let mut failures = Vec::new();
    for ranks in [2, 4] {
        for split in splits(ranks) {
            let plan = [split.settings, vec!["train.steps=3".to_owned()]].concat();
            for model in FAMILIES.into_iter().filter(|model| fits(*model, &plan)) {
                failures.extend(differences(&bench, model, &plan));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn so_has_tensor_parallelism_within_a_pipeline_and_beside_shared_sequences() {
    let bench = Workbench::new().unwrap();
    let (tensor, sequence) = ("parallel.tensor_parallel=2", "parallel.sequence_parallel=true");
    let (pipeline, context) = ("parallel.pipeline_parallel=2", "parallel.context_parallel=2");
    let methods = ["ring", "all_gather", "all_to_all"]
        .map(|method| format!("parallel.context_parallel_method={method}"));
    let mut plans = vec![vec![tensor, pipeline], vec![tensor, sequence, pipeline]];
    plans.extend(methods.iter().map(|method| vec![tensor, context, method.as_str()]));
    let mut failures = Vec::new();
    for model in FAMILIES {
        for plan in &plans {
            failures.extend(differences(&bench, model, plan));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
