//! Time and candidates of the planner's usual questions: `cargo run --release -p lockstep-planner --example questions [--
//! FILTER|quick]`. `quick` runs the questions that every test run asks. An answer that differs from the table is marked.

#[path = "questions/table.rs"]
mod table;

use lockstep_config::RunConfig;
use lockstep_planner::cluster::Cluster;
use lockstep_planner::{Objective, Planner};
use table::Question;

/// Returns the CPU time of this process, in seconds.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn main() {
    let filter = std::env::args().nth(1).unwrap_or_default();
    println!(
        "{:<40}{:>8}{:>10}{:>10}{:>10}{:>10}{:>12}  best",
        "question", "tokens", "CPU s", "plans", "valued", "allowed", "step"
    );
    for question in table::questions() {
        let name = format!("{} on {}", question.model, question.cluster);
        let is_asked = if filter == "quick" { question.is_quick } else { name.contains(&filter) };
        if !is_asked {
            continue;
        }
        let config = RunConfig::parse("", &name, &question.settings())
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let cluster = Cluster::preset(question.cluster).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut planner =
            Planner::new(config, cluster, Objective::Time).unwrap_or_else(|error| panic!("{name}: {error}"));
        let begin = cpu_seconds();
        let searched = planner.find(3);
        let seconds = cpu_seconds() - begin;
        let ranking = &searched.ranking;
        let (step, best) =
            ranking.best.first().map_or(("-".to_owned(), "nothing fits".to_owned()), |found| {
                let plan = &found.value.plan;
                let words = lockstep_planner::mesh_in_words(&plan.mesh);
                let recompute = lockstep_planner::recompute_in_words(plan);
                let mfu = found.value.mfu().unwrap_or(0.0) * 100.0;
                (
                    format!("{:.2} s", found.value.step.step_ms / 1e3),
                    format!("{words}, ZeRO {}, {recompute}, MFU {mfu:.1} %", plan.zero_stage),
                )
            });
        let Question { seq_len, fits, most_valued, .. } = question;
        let allowed = if fits { most_valued.to_string() } else { "-".to_owned() };
        let is_as_said = fits != ranking.best.is_empty() && ranking.valued <= most_valued;
        let mark = if is_as_said { "" } else { "  (differs from the table)" };
        println!(
            "{name:<40}{seq_len:>8}{seconds:>10.2}{:>10}{:>10}{allowed:>10}{step:>12}  {best}{mark}",
            ranking.candidates, ranking.valued
        );
    }
}
