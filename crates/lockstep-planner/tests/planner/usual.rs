//! Typical questions are answered quickly: the number of fully evaluated plans does not exceed that in the table of questions.
//! `LOCKSTEP_QUESTIONS=all` asks all of them (`cargo xtask soak`).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use lockstep_config::RunConfig;
use lockstep_planner::cluster::Cluster;
use lockstep_planner::{Objective, Planner};

use crate::questions::{Question, questions};

/// Returns the problem with the answer to a question, if there is one.
fn problem(question: &Question) -> Option<String> {
    let name = format!("{} on {}", question.model, question.cluster);
    let config =
        RunConfig::parse("", &name, &question.settings()).unwrap_or_else(|error| panic!("{name}: {error}"));
    let cluster = Cluster::preset(question.cluster).unwrap_or_else(|error| panic!("{name}: {error}"));
    let mut planner =
        Planner::new(config, cluster, Objective::Time).unwrap_or_else(|error| panic!("{name}: {error}"));
    let ranking = planner.find(3).ranking;
    let fits = !ranking.best.is_empty();
    if fits != question.fits {
        return Some(format!("{name}: fits is {fits}"));
    }
    (ranking.valued > question.most_valued)
        .then(|| format!("{name}: {} plans were evaluated, {} may be", ranking.valued, question.most_valued))
}

#[test]
fn usual_questions_are_answered_with_few_evaluations() {
    let all = std::env::var("LOCKSTEP_QUESTIONS").is_ok_and(|which| which == "all");
    let asked: Vec<Question> = questions().into_iter().filter(|question| all || question.is_quick).collect();
    assert!(asked.len() >= 12, "{} questions", asked.len());
    let next = AtomicUsize::new(0);
    let work = || {
        let mut problems = Vec::new();
        while let Some(question) = asked.get(next.fetch_add(1, Ordering::Relaxed)) {
            problems.extend(problem(question));
        }
        problems
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let problems: Vec<String> = thread::scope(|scope| {
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a question does not panic")).collect()
    });
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}
