//! Remedies for a given plan that does not fit: the fewest changes with which it would, and the best plan for the same machines.

use lockstep_config::{PlanFile, RunConfig, settings_between};
use lockstep_plan::{Plan, Recompute};

use crate::search::{Observer, Progress};
use crate::{Advice, Evaluated, Planner};

/// A plan that fits in place of one that does not.
#[derive(Debug, Clone)]
pub struct Remedy {
    /// Keys that turn the given plan into this one, as `--set` takes them; empty if keys of the given plan have to be removed first.
    pub settings: Vec<String>,
    /// Memory and step of the plan.
    pub evaluated: Evaluated,
}

/// Plans that fit in place of one that does not.
#[derive(Debug, Clone, Default)]
pub struct Remedies {
    /// The fastest of the plans with the fewest changes to recomputation, ZeRO stage and micro-batch.
    pub nearest: Option<Remedy>,
    /// The best plan that a search has found for the same machines.
    pub best: Option<Remedy>,
    /// Other machines or another batch, if no plan fits.
    pub advice: Vec<Advice>,
}

impl Planner {
    /// Returns the plans that fit in place of the run's own. `observer` may stop the search for them.
    pub fn remedies(&mut self, observer: &mut impl Observer) -> Remedies {
        let nearest = self.nearest_that_fits(observer);
        let Ok(open) = self.config.without_plan() else {
            return Remedies { nearest, ..Remedies::default() };
        };
        let Ok(open) = Self::new(open, self.cluster.clone(), self.objective) else {
            return Remedies { nearest, ..Remedies::default() };
        };
        let mut open = Self { ranks: self.ranks, ..open };
        let found = open.find_observed(1, observer).ranking.best.into_iter().next();
        let best = found.and_then(|found| self.as_remedy(found.value));
        let has_none = nearest.is_none() && best.is_none();
        let advice = if has_none { open.advice(observer) } else { Vec::new() };
        Remedies { nearest, best, advice }
    }

    /// Returns the fastest of the plans that fit with the fewest changes to the run's own.
    fn nearest_that_fits(&mut self, observer: &mut impl Observer) -> Option<Remedy> {
        let choices = choices_of(&self.config);
        let mut done = 0;
        for changes in 1..=choices.len() {
            let mut nearest: Option<Remedy> = None;
            for settings in combinations(&choices, changes) {
                if !observer.goes_on(Progress { candidates: None, done, best: None, bound: None }) {
                    return nearest;
                }
                done += 1;
                let Some(evaluated) = self.changed(&settings) else { continue };
                let is_faster = |nearest: &Remedy| evaluated.step.step_ms < nearest.evaluated.step.step_ms;
                if evaluated.fits && nearest.as_ref().is_none_or(is_faster) {
                    nearest = Some(Remedy { settings, evaluated });
                }
            }
            if nearest.is_some() {
                return nearest;
            }
        }
        None
    }

    /// Evaluates the run's plan with some keys changed; `None` if these do not go together.
    fn changed(&mut self, settings: &[String]) -> Option<Evaluated> {
        let mut config = self.config.with_settings(settings).ok()?;
        // The planner has set these for its machines; they are no keys of the run.
        config.train.threads = self.config.train.threads;
        config.train.dropout = self.config.train.dropout;
        self.evaluate(&config).ok()
    }

    /// Returns another plan as a remedy: by the keys in which it differs from the run's own, or without any if keys of the run
    /// contradict it.
    fn as_remedy(&mut self, other: Evaluated) -> Option<Remedy> {
        let given = self.described(&self.config).ok()?;
        let under = |plan: &Plan| {
            self.config.with_plan(&PlanFile::unwritten(plan.clone(), "")).map(|config| config.plan).ok()
        };
        let settings = under(given.plan())
            .zip(under(&other.plan))
            .map_or_else(Vec::new, |(given, other)| settings_between(&given, &other));
        let changed = self.changed(&settings).filter(|evaluated| evaluated.fits);
        Some(match changed {
            Some(evaluated) => Remedy { settings, evaluated },
            None => Remedy { settings: Vec::new(), evaluated: other },
        })
    }
}

/// Returns the changes that reduce memory, by kind: recomputation, sharding, micro-batch. A change is a list of settings.
fn choices_of(config: &RunConfig) -> Vec<Vec<Vec<String>>> {
    let plan = &config.plan;
    let recompute: Vec<Vec<String>> = [Recompute::Selective, Recompute::Full]
        .into_iter()
        .filter(|mode| plan.recompute != (*mode).into() && plan.recompute != Recompute::Full.into())
        .map(|mode| vec![format!("parallel.recompute={}", mode.name())])
        .collect();
    let replicas = plan.mesh.replicate;
    let are_sharded = plan.mesh.shard * plan.mesh.context > 1;
    let stages = (config.zero_stage().number() + 1..=3).map(|stage| format!("parallel.zero_stage={stage}"));
    let sharding: Vec<Vec<String>> = match are_sharded {
        true => stages.map(|stage| vec![stage]).collect(),
        false if replicas > 1 => stages
            .map(|stage| {
                let shards = format!("parallel.data_parallel_shard={replicas}");
                vec!["parallel.data_parallel_replicate=1".to_owned(), shards, stage]
            })
            .collect(),
        false => Vec::new(),
    };
    let halves = std::iter::successors(Some(config.micro_batch()), |size| (*size > 1).then_some(size / 2));
    let micro_batch: Vec<Vec<String>> =
        halves.skip(1).map(|size| vec![format!("train.micro_batch={size}")]).collect();
    [recompute, sharding, micro_batch].into_iter().filter(|choices| !choices.is_empty()).collect()
}

/// Returns the settings of every combination of `number` changes of different kinds.
fn combinations(choices: &[Vec<Vec<String>>], number: usize) -> Vec<Vec<String>> {
    let Some((first, rest)) = choices.split_first() else {
        return if number == 0 { vec![Vec::new()] } else { Vec::new() };
    };
    let mut all = combinations(rest, number);
    if number > 0 {
        let others = combinations(rest, number - 1);
        all.extend(first.iter().flat_map(|one| others.iter().map(move |other| [&one[..], other].concat())));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_choices_are_made_and_no_more() {
        let choices = |kind: &str, number: usize| -> Vec<Vec<String>> {
            (0..number).map(|index| vec![format!("{kind}={index}")]).collect()
        };
        let choices = [choices("a", 2), choices("b", 3), choices("c", 1)];
        let numbers = [0, 1, 2, 3, 4].map(|number| combinations(&choices, number).len());
        assert_eq!(numbers, [1, 6, 11, 6, 0]);
        assert!(combinations(&choices, 2).contains(&vec!["a=1".to_owned(), "c=0".to_owned()]));
    }
}
