//! Reasons for the best plan: the time and memory of each single change to it, and the change to the machines or the batch that
//! would help most.

use std::collections::HashSet;

use lockstep_config::human;
use lockstep_plan::schedule::Kind;
use lockstep_plan::{ContextMethod, Degrees, Plan, Recompute, Residence, Residences, ZeroStage};

use crate::cluster::Joins;
use crate::predict::StepPrediction;
use crate::search::{Candidate, Rejection, Subject};
use crate::{Evaluated, Planner};

/// A plan that differs from the best in one choice.
#[derive(Debug, Clone, PartialEq)]
pub struct Neighbour {
    /// The choice that differs, in words.
    pub change: String,
    /// Step time over the best plan's; `None` if the plan is infeasible.
    pub step_ratio: Option<f64>,
    /// Reason why it is not the best: the shortage, or the part of the step that takes longer.
    pub reason: String,
}

/// Returns the offloaded kinds of state with their fraction and place; `None` if everything is in device memory.
pub fn residence_in_words(residences: &Residences) -> Option<String> {
    let Residences { optimizer, gradients, parameters, activations, fraction } = *residences;
    let kinds = [("optimizer", optimizer), ("gradients", gradients), ("parameters", parameters)];
    let offloaded = kinds.into_iter().filter(|(_, residence)| *residence != Residence::Memory);
    let names: Vec<&str> = offloaded.map(|(name, _)| name).collect();
    let share = if fraction < 1.0 { format!("{:.0} % of ", fraction * 100.0) } else { String::new() };
    let state = format!("{share}{}", names.join(", "));
    let [of_state, of_activations] = [optimizer, activations]
        .map(|residence| if residence == Residence::Disk { "on disk" } else { "in host memory" });
    match (names.is_empty(), activations != Residence::Memory) {
        (true, false) => None,
        (true, true) => Some(format!("activations {of_activations}")),
        (false, false) => Some(format!("{state} {of_state}")),
        (false, true) if activations == optimizer => Some(format!("{state} and activations {of_state}")),
        (false, true) => Some(format!("{state} {of_state}, activations {of_activations}")),
    }
}

/// Returns the recomputation and the offload of a plan in words.
pub fn recompute_in_words(plan: &Plan) -> String {
    let offloaded = residence_in_words(&plan.residence).map_or(String::new(), |words| format!(", {words}"));
    format!("{}{offloaded}", plan.recompute)
}

/// A change to the machines or the batch, with its benefit.
#[derive(Debug, Clone, PartialEq)]
pub struct Help {
    /// The change in words.
    pub change: &'static str,
    /// Tokens per second with the change over those without. A lower bound: the plan is the local optimum reached from the best one.
    pub speedup: f64,
}

/// A part of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepPart {
    /// Key of the part in `step_parts_ms` of `plan --json`.
    pub key: &'static str,
    /// Name of the part in pages and tables.
    pub name: &'static str,
    /// Milliseconds of the part.
    pub ms: f64,
}

/// Returns the parts whose sum is the step; those of offload only if they are not zero.
pub fn parts(step: &StepPrediction) -> impl Iterator<Item = StepPart> {
    all_parts(step).into_iter().filter(|part| part.ms > 0.0 || !["host", "disk"].contains(&part.key))
}

fn all_parts(step: &StepPrediction) -> [StepPart; 7] {
    [
        ("work", "work", step.work_ms),
        ("exchanges", "exchanges inside passes", step.exchange_ms),
        ("bubble", "waiting for other stages", step.bubble_ms),
        ("gradients", "gradient reduction", step.gradients_ms),
        ("update", "optimizer step", step.update_ms),
        ("host", "waiting for host memory", step.host_ms),
        ("disk", "waiting for the disk", step.disk_ms),
    ]
    .map(|(key, name, ms)| StepPart { key, name, ms })
}

/// Returns the reason why a candidate is infeasible, in one sentence.
pub fn rejection_in_words(rejection: &Rejection) -> String {
    match rejection {
        Rejection::Memory { stage, needed, available, most } => format!(
            "does not fit: pipeline rank {stage} needs {} of {}, most of it {}",
            human::bytes(*needed),
            human::bytes(*available),
            most.name()
        ),
        Rejection::Room { place, needed, available } => format!(
            "has no room for what is offloaded: {} of {} of {} a rank",
            human::bytes(*needed),
            human::bytes(*available),
            if *place == Residence::Disk { "disk" } else { "host memory" },
        ),
        Rejection::Invalid => "does not fit the model and the batch".to_owned(),
        Rejection::Worse => "is worse".to_owned(),
    }
}

/// Returns the mesh in words: the axes whose degree is above 1.
pub fn mesh_in_words(degrees: &Degrees) -> String {
    let Degrees { pipeline, replicate, shard, context, tensor, expert, expert_tensor } = *degrees;
    let axes = [
        ("tensor", tensor),
        ("context", context),
        ("pipeline", pipeline),
        ("shard", shard),
        ("replicate", replicate),
        ("expert", expert),
        ("expert tensor", expert_tensor),
    ];
    let used = axes.iter().filter(|(_, degree)| *degree > 1);
    let words: Vec<String> = used.map(|(name, degree)| format!("{name} {degree}")).collect();
    if words.is_empty() { "one rank".to_owned() } else { words.join(" × ") }
}

/// Returns the schedule with the number of stages of each rank; `None` without a pipeline.
pub fn schedule_in_words(plan: &Plan) -> Option<String> {
    match plan.schedule.kind() {
        _ if plan.mesh.pipeline == 1 => None,
        Some((kind, 1)) => Some(kind.name().to_owned()),
        Some((kind, chunks)) => Some(format!("{} × {chunks}", kind.name())),
        None => Some("of a file".to_owned()),
    }
}

/// A change to the machines or the batch, applied to a planner.
type Change = fn(&mut Planner);

impl Planner {
    /// Evaluates the plans that differ from the best in one choice, the fastest first.
    pub fn neighbours(&mut self, best: &Candidate, evaluated: &Evaluated) -> Vec<Neighbour> {
        let mut neighbours: Vec<Neighbour> = Vec::new();
        for (change, candidate) in changes(best) {
            // Meshes outside the search space are skipped: their rejection would not be about memory.
            if candidate == *best || !self.is_candidate(&candidate) {
                continue;
            }
            let value = self
                .value(&candidate, f64::INFINITY)
                .and_then(|(_, plan)| self.evaluate(&self.run_under(plan)).map_err(|_| Rejection::Invalid));
            let neighbour = match value {
                Ok(other) => {
                    let ratio = other.step.step_ms / evaluated.step.step_ms;
                    Neighbour {
                        change,
                        step_ratio: Some(ratio),
                        reason: longest(&evaluated.step, &other.step),
                    }
                }
                // The change has no effect here, so this is the same plan.
                Err(Rejection::Invalid | Rejection::Worse) => continue,
                Err(rejection) => {
                    Neighbour { change, step_ratio: None, reason: rejection_in_words(&rejection) }
                }
            };
            neighbours.push(neighbour);
        }
        let key = |neighbour: &Neighbour| neighbour.step_ratio.unwrap_or(f64::INFINITY);
        neighbours.sort_by(|a, b| key(a).total_cmp(&key(b)));
        neighbours
    }

    /// Returns the changes to machines or batch that would help, best first. For each, the best plan is improved one choice at a
    /// time until no change improves it.
    pub fn help(&mut self, best: &Candidate, evaluated: &Evaluated) -> Vec<Help> {
        let mut helps = Vec::new();
        let changes: [(&'static str, Change); 5] = [
            ("twice the memory on each device", |planner| {
                for node in &mut planner.cluster.nodes {
                    node.device.memory_bytes *= 2;
                    node.host_memory_bytes *= 2;
                }
            }),
            ("links inside nodes twice as fast", |planner| planner.double_links(true)),
            ("links between nodes twice as fast", |planner| planner.double_links(false)),
            ("memory of devices twice as fast", |planner| {
                for node in &mut planner.cluster.nodes {
                    node.device.memory_gb_per_s *= 2.0;
                }
            }),
            ("twice the batch", |planner| planner.config.train.global_batch *= 2),
        ];
        for (change, apply) in changes {
            let Ok(mut planner) = Self::new(self.config.clone(), self.cluster.clone(), self.objective) else {
                continue;
            };
            apply(&mut planner);
            // Recordings depend neither on the machine nor on the global batch.
            std::mem::swap(&mut planner.recordings, &mut self.recordings);
            planner.offloads.clone_from(&self.offloads);
            if let Some((_, plan)) = planner.climb(best)
                && let Ok(improved) = planner.evaluate(&planner.run_under(plan))
            {
                helps.push(Help { change, speedup: improved.tokens_per_s() / evaluated.tokens_per_s() });
            }
            std::mem::swap(&mut planner.recordings, &mut self.recordings);
        }
        helps.sort_by(|a, b| b.speedup.total_cmp(&a.speedup));
        helps
    }
}

impl Planner {
    /// Doubles the bandwidth of all levels of links that are inside nodes, or of all others.
    fn double_links(&mut self, are_inside_nodes: bool) {
        let cluster = &mut self.cluster;
        let (is_alone, devices) = (cluster.node_count() == 1, cluster.devices_of_a_node());
        for link in &mut cluster.links {
            let is_inside_nodes = match link.joins {
                Joins::Node => true,
                Joins::Devices(joined) => joined <= devices,
                Joins::All => is_alone,
            };
            if is_inside_nodes == are_inside_nodes {
                link.gb_per_s *= 2.0;
            }
        }
    }

    /// Climbs from a candidate by the best single changes to a local optimum, and returns its objective and plan. `None` if neither
    /// the candidate nor a neighbour fits.
    fn climb(&mut self, from: &Candidate) -> Option<(f64, Plan)> {
        let mut at = *from;
        let mut best = self.value(&at, f64::INFINITY).ok();
        loop {
            let mut better = None;
            for (_, candidate) in changes(&at) {
                let limit = best.as_ref().map_or(f64::INFINITY, |(value, _)| *value);
                if self.is_candidate(&candidate)
                    && let Ok(found) = self.value(&candidate, limit)
                {
                    (best, better) = (Some(found), Some(candidate));
                }
            }
            match better {
                Some(candidate) => at = candidate,
                None => return best,
            }
        }
    }
}

/// Returns each single change to a candidate. When an axis shrinks or grows, the data-parallel axes grow or shrink to keep the world size.
fn changes(best: &Candidate) -> Vec<(String, Candidate)> {
    let mut changes = Vec::new();
    let Degrees { replicate, shard, tensor, pipeline, context, .. } = best.degrees;
    let with = |degrees: Degrees| Candidate { degrees, ..*best };
    // The shard axis absorbs the difference; the replicate axis if nothing is sharded.
    let parts = |degrees: Degrees, parts: usize| {
        let shares = degrees.shard > 1;
        let (replicate, shard) = if shares { (replicate, parts / replicate) } else { (parts, 1) };
        Degrees { replicate, shard, ..degrees }
    };
    let all = replicate * shard;
    let mut resize = |name: &str, of: usize, set: fn(&mut Degrees, usize)| {
        for to in [of * 2, of / 2].into_iter().filter(|to| *to > 0 && (all * of).is_multiple_of(*to)) {
            let mut degrees = parts(best.degrees, all * of / to);
            set(&mut degrees, to);
            changes.push((format!("{name} {to} instead of {of}"), with(degrees)));
        }
    };
    resize("tensor", tensor, |degrees, to| degrees.tensor = to);
    resize("pipeline", pipeline, |degrees, to| degrees.pipeline = to);
    resize("context", context, |degrees, to| degrees.context = to);
    for to in [best.micro_batch * 2, best.micro_batch / 2].into_iter().filter(|to| *to > 0) {
        let change = format!("micro-batches of {to} instead of {}", best.micro_batch);
        changes.push((change, Candidate { micro_batch: to, ..*best }));
    }
    for zero_stage in [ZeroStage::Nothing, ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters]
    {
        let mut candidate = Candidate { zero_stage, ..*best };
        if zero_stage == ZeroStage::Nothing {
            (candidate.degrees.replicate, candidate.degrees.shard) = (all, 1);
        } else if candidate.degrees.shard == 1 {
            (candidate.degrees.replicate, candidate.degrees.shard) = (1, all);
        }
        changes.push((format!("ZeRO stage {}", zero_stage.number()), candidate));
    }
    if context > 1 {
        for (method, name) in [
            (ContextMethod::Ring, "keys and values round the ranks"),
            (ContextMethod::AllGather, "all keys and values on each rank"),
            (ContextMethod::AllToAll, "tokens exchanged for heads"),
        ] {
            changes.push((format!("context: {name}"), Candidate { context_method: method, ..*best }));
        }
    }
    for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
        changes.push((format!("recompute {}", recompute.name()), Candidate { recompute, ..*best }));
    }
    for kind in Kind::ALL {
        let chunks = [kind.chunks().0, best.schedule.1, best.schedule.1 * 2, best.schedule.1 / 2];
        for chunks in chunks.into_iter().filter(|chunks| *chunks > 0 && pipeline > 1) {
            let change = match chunks {
                1 => format!("schedule {}", kind.name()),
                chunks => format!("schedule {} with {chunks} stages a rank", kind.name()),
            };
            changes.push((change, Candidate { schedule: (kind, chunks), ..*best }));
        }
    }
    let mut seen = HashSet::new();
    changes.retain(|(_, candidate)| seen.insert(*candidate));
    changes
}

/// Returns the part of a step that exceeds the best plan's by most, in words.
fn longest(best: &StepPrediction, other: &StepPrediction) -> String {
    let both = all_parts(best).into_iter().zip(all_parts(other));
    let most = both.max_by(|a, b| (a.1.ms - a.0.ms).total_cmp(&(b.1.ms - b.0.ms)));
    most.map_or(String::new(), |(best, other)| {
        format!("{} {} instead of {}", best.name, human::step_time(other.ms), human::step_time(best.ms))
    })
}

#[cfg(test)]
mod tests {
    use lockstep_config::RunConfig;

    use super::*;
    use crate::Objective;
    use crate::cluster::{Cluster, Link};

    #[test]
    fn every_level_beyond_the_node_is_a_link_between_nodes() {
        let mut cluster = Cluster::preset("dgx-h100x8").unwrap();
        let rack = Link { name: "rack".to_owned(), joins: Joins::Devices(16), ..cluster.links[1].clone() };
        cluster.links.insert(1, rack);
        let config = RunConfig::parse("", "a test", &["model.preset=baby-gpt"]).unwrap();
        let doubled = |are_inside_nodes: bool| -> Vec<f64> {
            let mut planner = Planner::new(config.clone(), cluster.clone(), Objective::Time).unwrap();
            planner.double_links(are_inside_nodes);
            let links = planner.cluster.links.iter().zip(&cluster.links);
            links.map(|(link, before)| link.gb_per_s / before.gb_per_s).collect()
        };
        assert_eq!((doubled(true), doubled(false)), (vec![2.0, 1.0, 1.0], vec![1.0, 2.0, 2.0]));
    }
}
