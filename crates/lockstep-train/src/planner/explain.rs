//! Why a plan and not another: what each single change to the best plan would come to, and which change to the machines or the batch
//! would help most.

use std::collections::HashSet;

use lockstep_plan::predict::StepPrediction;
use lockstep_plan::schedule::Kind;
use lockstep_plan::search::{Candidate, Rejection, Subject};
use lockstep_plan::{
    ContextMethod, Degrees, PipelineSchedule, Plan, Recompute, Residence, Residences, ZeroStage,
};

use crate::human;
use crate::planner::{Evaluated, Planner};

/// A plan that differs from the best in one choice.
#[derive(Debug, Clone, PartialEq)]
pub struct Neighbour {
    /// What is chosen otherwise.
    pub change: String,
    /// The time of its step as a multiple of the best plan's; none if it cannot be carried out.
    pub step_ratio: Option<f64>,
    /// Why it is not the best: what it lacks, or what takes longer.
    pub reason: String,
}

/// What is on disk, and how much of it; none where nothing is.
pub fn residence_in_words(residences: &Residences) -> Option<String> {
    let Residences { optimizer, gradients, parameters, activations, fraction } = *residences;
    let kinds = [("optimizer", optimizer), ("gradients", gradients), ("parameters", parameters)];
    let of_state: Vec<&str> = kinds
        .into_iter()
        .filter(|(_, residence)| *residence == Residence::Disk)
        .map(|(name, _)| name)
        .collect();
    let share = if fraction < 1.0 { format!("{:.0} % of ", fraction * 100.0) } else { String::new() };
    let mut words = Vec::new();
    if !of_state.is_empty() {
        words.push(format!("{share}{}", of_state.join(", ")));
    }
    if activations == Residence::Disk {
        words.push("activations".to_owned());
    }
    (!words.is_empty()).then(|| format!("{} on disk", words.join(" and ")))
}

/// What blocks forget, and what is on disk.
pub fn recompute_in_words(plan: &Plan) -> String {
    let on_disk = residence_in_words(&plan.residence).map_or(String::new(), |words| format!(", {words}"));
    format!("{}{on_disk}", plan.recompute)
}

/// A change to the machines or the batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Help {
    /// Which.
    pub change: &'static str,
    /// Tokens a second of the best plan with it, as a multiple of what they are without.
    pub speedup: f64,
}

/// What the part of a step is called that there is only where something is on disk.
pub const DISK: &str = "waiting for the disk";

/// The parts of a step, with their names.
pub fn parts(step: &StepPrediction) -> [(&'static str, f64); 6] {
    [
        ("work", step.work_ms),
        ("exchanges inside passes", step.exchange_ms),
        ("waiting for other stages", step.bubble_ms),
        ("sums of gradients", step.gradients_ms),
        ("the update", step.update_ms),
        (DISK, step.disk_ms),
    ]
}

/// In one sentence, why a candidate is none.
pub fn rejection_in_words(rejection: &Rejection) -> String {
    match rejection {
        Rejection::Memory { stage, needed, available, most } => format!(
            "does not fit: pipeline rank {stage} needs {} of {}, most of it {}",
            human::bytes(*needed),
            human::bytes(*available),
            most.name()
        ),
        Rejection::Invalid => "does not fit the model and the batch".to_owned(),
        Rejection::Worse => "is worse".to_owned(),
    }
}

/// The axes that are used.
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

/// What the ranks of a plan's pipeline do, and on how many stages each; none without a pipeline.
pub fn schedule_in_words(plan: &Plan) -> Option<String> {
    match &plan.schedule {
        _ if plan.mesh.pipeline == 1 => None,
        PipelineSchedule::Published { kind, chunks: 1 } => Some(kind.name().to_owned()),
        PipelineSchedule::Published { kind, chunks } => Some(format!("{} × {chunks}", kind.name())),
        PipelineSchedule::Rows(_) => Some("of a file".to_owned()),
    }
}

/// A change to the machines or the batch.
type Change = fn(&mut Planner);

impl Planner {
    /// What the best plan would come to with one choice made otherwise, the nearest first.
    pub fn neighbours(&mut self, best: &Candidate, evaluated: &Evaluated) -> Vec<Neighbour> {
        let all: HashSet<Candidate> = self.candidates().into_iter().collect();
        let mut neighbours: Vec<Neighbour> = Vec::new();
        for (change, candidate) in changes(best) {
            // Of a mesh that there is not, another reason than memory is told by the configuration's own checks.
            if candidate == *best || !all.contains(&candidate) {
                continue;
            }
            let value = self
                .value(&candidate, f64::INFINITY)
                .and_then(|(_, config)| self.evaluate(&config).map_err(|_| Rejection::Invalid));
            let neighbour = match value {
                Ok(other) => {
                    let ratio = other.step.step_ms / evaluated.step.step_ms;
                    Neighbour {
                        change,
                        step_ratio: Some(ratio),
                        reason: longest(&evaluated.step, &other.step),
                    }
                }
                // It needs nothing of this, and so is the same plan as without.
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

    /// What would help, best first: each change is searched for the plan that is best with it.
    pub fn help(&self, evaluated: &Evaluated) -> Vec<Help> {
        let mut helps = Vec::new();
        let changes: [(&'static str, Change); 5] = [
            ("twice the memory on each device", |planner| {
                for node in &mut planner.cluster.nodes {
                    node.device.memory_bytes *= 2;
                    node.host_memory_bytes *= 2;
                }
            }),
            ("links inside nodes twice as fast", |planner| {
                if let Some(link) = planner.cluster.links.first_mut() {
                    link.gb_per_s *= 2.0;
                }
            }),
            ("links between nodes twice as fast", |planner| {
                if let [_, .., link] = &mut planner.cluster.links[..] {
                    link.gb_per_s *= 2.0;
                }
            }),
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
            if let Some(best) = planner.find(1).ranking.best.first() {
                let speedup = best.value.tokens_per_s() / evaluated.tokens_per_s();
                helps.push(Help { change, speedup });
            }
        }
        helps.sort_by(|a, b| b.speedup.total_cmp(&a.speedup));
        helps
    }
}

/// Each choice made otherwise; what one axis gives up or takes the batch's axes take or give up.
fn changes(best: &Candidate) -> Vec<(String, Candidate)> {
    let mut changes = Vec::new();
    let Degrees { replicate, shard, tensor, pipeline, context, .. } = best.degrees;
    let with = |degrees: Degrees| Candidate { degrees, ..*best };
    // Those that share out the state take what is left over, or the replicas where none do.
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
            // A schedule of a pipeline, where there was none.
            if of == 1 && name == "pipeline" {
                continue;
            }
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
        changes.push((format!("recompute {}", recompute.word()), Candidate { recompute, ..*best }));
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

/// The part of a step that takes longer than the best plan's by most.
fn longest(best: &StepPrediction, other: &StepPrediction) -> String {
    let more =
        parts(best).into_iter().zip(parts(other)).map(|((name, best), (_, other))| (name, best, other));
    let most = more.max_by(|a, b| (a.2 - a.1).total_cmp(&(b.2 - b.1)));
    most.map_or(String::new(), |(name, best, other)| {
        format!("{name} {} instead of {}", human::milliseconds(other), human::milliseconds(best))
    })
}
