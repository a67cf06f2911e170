//! One model, any plan: the numbers are those of one rank.

use lockstep_testkit::parity::{MODELS, Workbench};
use lockstep_train::verify::Tolerance;

const PLANS: [&[&str]; 6] = [
    &["parallel.tensor_parallel=2"],
    &["parallel.tensor_parallel=4"],
    &["parallel.tensor_parallel=2", "parallel.sequence_parallel=true"],
    &["parallel.tensor_parallel=4", "parallel.sequence_parallel=true"],
    &["parallel.tensor_parallel=2", "parallel.data_parallel_replicate=2"],
    &["parallel.tensor_parallel=2", "parallel.sequence_parallel=true", "parallel.data_parallel_replicate=2"],
];

#[test]
fn every_plan_has_the_losses_and_gradients_of_one_rank() {
    let bench = Workbench::new().unwrap();
    let mut failures = Vec::new();
    for model in MODELS {
        for plan in PLANS {
            for recompute in ["none", "selective", "full"] {
                let recompute = format!("parallel.recompute={recompute}");
                let plan: Vec<&str> = plan.iter().copied().chain([recompute.as_str()]).collect();
                let lines = bench.differences(model, &plan, Tolerance::F32).unwrap();
                if !lines.is_empty() {
                    failures.push(format!("{}, {}:\n  {}", model.name, plan.join(" "), lines.join("\n  ")));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
