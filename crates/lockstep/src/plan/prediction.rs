//! A given plan: the memory of every rank and the time of a step; if it does not fit, the plans that do.

use lockstep_config::plan::check;
use lockstep_config::{PlanFile, RunConfig, human};
use lockstep_plan::{Axis, MemoryBytes, MemoryPrediction, Plan, ZeroStage};
use lockstep_planner::cluster::Cluster;
use lockstep_planner::fit::{available_bytes, needed};
use lockstep_planner::search::Rejection;
use lockstep_planner::{
    Assumption, Evaluated, Forecast, Planner, Remedies, Remedy, mesh_in_words, rejection_in_words,
};
use serde_json::{Value, json};

use super::arguments::{Arguments, shell_word};
use super::details::{self, print_traffic};
use super::figures::{figures, machines, memory_by_category, print_workload, workload};
use super::progress::Watch;
use super::ranking;
use super::training::Training;
use crate::exit::Failure;
use crate::output::say;
use crate::ranks::warn_if_outdated;
use crate::verify::plan_in_words;

/// A given plan with its predicted memory and step, and the remedies if it does not fit.
struct Predicted {
    config: RunConfig,
    plan: Plan,
    forecast: Forecast,
    evaluated: Evaluated,
    ranks_of_a_machine: usize,
    /// Available memory of a machine, in bytes; `None` if it is unknown.
    available_bytes: Option<u64>,
    /// Plans that fit instead, if this one does not.
    remedies: Remedies,
}

/// Predicts the plan of a configuration on the machines of `planner` and prints the answer.
pub(super) fn run(
    arguments: &Arguments,
    config: RunConfig,
    file: Option<&PlanFile>,
    planner: &mut Planner,
    assumed: &[Assumption],
) -> Result<(), Failure> {
    if let Some(file) = file {
        file.check(&config)?;
    }
    let (plan, model) = check(&config)?;
    let forecast = match planner.is_host() {
        true => Forecast::of(&config, &model)?,
        false => Forecast::on_accelerators(planner.config(), &model)?,
    };
    warn_if_outdated(file, &forecast);
    let evaluated = planner.of_run()?;
    let step = Some(evaluated.planned_step(planner.cluster()));
    let plan = Plan { predicted: Some(lockstep_plan::PlanPrediction { step, ..forecast.of_plan() }), ..plan };
    let ranks = forecast.ranks();
    let is_elsewhere = arguments.cluster.is_some();
    let ranks_of_a_machine = match arguments.nproc_per_node {
        Some(ranks) => ranks,
        None if is_elsewhere => {
            planner.cluster().nodes.iter().map(|node| node.devices).max().unwrap_or(ranks)
        }
        None => ranks,
    };
    let ranks_of_a_machine = ranks_of_a_machine.clamp(1, ranks);
    let available_bytes = match arguments.memory {
        Some(bytes) => Some(bytes as u64),
        None if is_elsewhere => Some(evaluated.capacity_bytes * ranks_of_a_machine as u64),
        None => available_bytes(),
    };
    let mut predicted = Predicted {
        config,
        plan,
        forecast,
        evaluated,
        ranks_of_a_machine,
        available_bytes,
        remedies: Remedies::default(),
    };
    if predicted.fits() == Some(false) {
        let mut watch = Watch::start(arguments.limit)?;
        watch.leave_a_moment();
        predicted.remedies = planner.remedies(&mut watch);
        watch.finish();
    }
    arguments.write_plan(&predicted.plan)?;
    let details = arguments.wants_details().then(|| planner.details(&predicted.evaluated)).transpose()?;
    if let Some(details) = &details {
        let mut document = predicted.to_json(arguments.explain, planner.cluster());
        document["workload"] = workload(planner, assumed);
        document["cluster"] = machines(planner.cluster());
        if let Some(tokens) = arguments.tokens {
            document["training"] = Training::of(tokens, &predicted.evaluated, planner.cluster()).to_json();
        }
        ranking::extend(&mut document, Some(details::to_json(details, planner.cluster())));
        arguments.write_page(planner, &[&predicted.evaluated], details, &document)?;
        if arguments.json {
            say!("{document}");
            return Ok(());
        }
    }
    print_workload(planner, assumed);
    predicted.print(arguments.explain, planner);
    if let Some(tokens) = arguments.tokens {
        Training::of(tokens, &predicted.evaluated, planner.cluster()).print();
    }
    if let Some(details) = details.filter(|_| arguments.explain) {
        print_traffic(&details.traffic, planner.cluster());
    }
    Ok(())
}

impl Predicted {
    /// Returns the memory of the machine whose ranks need most together.
    fn of_a_machine(&self) -> MemoryBytes {
        let ranks = self.forecast.ranks();
        let machine =
            |first: usize| needed(&self.forecast, first..ranks.min(first + self.ranks_of_a_machine));
        let machines = (0..ranks).step_by(self.ranks_of_a_machine).map(machine);
        machines.max_by_key(MemoryBytes::total).unwrap_or_default()
    }

    /// Returns the rejection of a plan whose offloaded state exceeds host memory or disk.
    fn lacking_room(&self) -> Option<&Rejection> {
        self.evaluated.lacking.as_ref().filter(|lacking| matches!(lacking, Rejection::Room { .. }))
    }

    fn fits(&self) -> Option<bool> {
        if self.lacking_room().is_some() {
            return Some(false);
        }
        self.available_bytes.map(|available| self.of_a_machine().total() as u64 <= available)
    }

    fn print(&self, explains: bool, planner: &Planner) {
        let Self { config, forecast, .. } = self;
        say!(
            "plan       {}{}, recompute {}, {}, micro-batches of {}",
            plan_in_words(config),
            // With one rank nothing is sharded; other stages are in `plan_in_words`.
            if config.ranks() > 1 && config.zero_stage() == ZeroStage::Nothing {
                ", ZeRO stage 0"
            } else {
                ""
            },
            config.plan.recompute,
            config.train.precision.word(),
            config.micro_batch(),
        );
        if config.ranks() == 1 {
            say!(
                "           (one rank; without a degree in [parallel] a search says how several would share the run)"
            );
        }
        say!("\n{:<24}{:>12}  of these", "memory", "a rank");
        for (rank, ranks, prediction) in forecast.distinct() {
            let others = match ranks {
                1 => String::new(),
                2 => ", as 1 other".to_owned(),
                _ => format!(", as {} others", ranks - 1),
            };
            let memory = prediction.by_category();
            let name = format!("rank {rank}{others}");
            say!("{name:<24}{:>12}  {}", human::bytes(memory.total() as u64).to_string(), parts(memory));
            if explains {
                explain(prediction);
            }
        }
        let (all, machine) = (needed(forecast, 0..forecast.ranks()), self.of_a_machine());
        say!("{:<24}{:>12}", "all ranks", human::bytes(all.total() as u64).to_string());
        let (needs, ranks) =
            (human::bytes(machine.total() as u64), human::plural(self.ranks_of_a_machine, "rank"));
        let available = self.available_bytes.map(human::bytes);
        let verdict = match (self.lacking_room(), self.fits(), available) {
            (Some(lacking), ..) => format!("does NOT fit: it {}", rejection_in_words(lacking)),
            (None, Some(true), Some(available)) => {
                format!("fits: {ranks} of a machine need {needs} of {available}")
            }
            (None, Some(false), Some(available)) => {
                format!("does NOT fit: {ranks} of a machine need {needs}, and {available} are there")
            }
            _ => {
                format!("{ranks} of a machine need {needs}; what is there is not known: say it with --memory")
            }
        };
        ranking::print_step(&self.evaluated, planner.cluster());
        say!("\nverdict    {verdict}");
        self.print_remedies();
    }

    /// Prints what to type for a plan that fits, in a line or two.
    fn print_remedies(&self) {
        let Remedies { nearest, best, advice } = &self.remedies;
        let step_ms = |remedy: &Remedy| remedy.evaluated.step.step_ms;
        let is_slower = |nearest: &Remedy| best.as_ref().is_none_or(|best| step_ms(best) < step_ms(nearest));
        if let Some(nearest) = nearest {
            say!("it fits    with {}", remedy_in_words(nearest));
        }
        if let Some(best) = best.as_ref().filter(|_| nearest.as_ref().is_none_or(is_slower)) {
            say!("the best   of a search: {}", remedy_in_words(best));
        }
        for advice in advice {
            say!("others fit with {}", ranking::in_words(advice));
        }
    }

    fn to_json(&self, explains: bool, cluster: &Cluster) -> Value {
        let Self { plan, forecast, .. } = self;
        let of_rank = |(rank, ranks, prediction): (usize, usize, &MemoryPrediction)| {
            let mut row = json!({
                "rank": rank, "ranks": ranks, "coordinates": coordinates(forecast, rank),
                "memory_bytes": memory_by_category(prediction.by_category()),
            });
            if explains {
                let items = prediction.items.iter().map(|item| {
                    json!({ "category": item.category, "what": item.what, "bytes": item.bytes, "reserve": item.is_reserve })
                });
                row["made_of"] = items.collect();
            }
            row
        };
        let most = forecast.distinct().max_by_key(|(_, _, prediction)| prediction.by_category().total());
        let most = most.map_or_else(MemoryBytes::default, |(_, _, prediction)| prediction.by_category());
        let mut row = json!({
            "mesh": plan.mesh, "zero_stage": plan.zero_stage, "micro_batch": plan.micro_batch,
            "schedule": plan.schedule, "recompute": plan.recompute, "memory_bytes": memory_by_category(most),
            "memory_by_rank": forecast.distinct().map(of_rank).collect::<Vec<_>>(),
            "machine": {
                "ranks": self.ranks_of_a_machine, "needed_bytes": self.of_a_machine().total(),
                "available_bytes": self.available_bytes,
            },
            "fits": self.fits(),
        });
        ranking::extend(&mut row, figures(&self.evaluated, cluster).as_object().cloned());
        let mut document = json!({ "best": plan, "ranking": [row] });
        if self.fits() == Some(false) {
            let Remedies { nearest, best, advice } = &self.remedies;
            let remedy = |remedy: &Remedy| {
                json!({ "settings": remedy.settings, "step_ms": remedy.evaluated.step.step_ms,
                    "memory_bytes": memory_by_category(remedy.evaluated.largest().1) })
            };
            document["remedies"] = json!({
                "nearest": nearest.as_ref().map(remedy), "best": best.as_ref().map(remedy),
                "advice": advice.iter().map(ranking::advice_to_json).collect::<Vec<_>>(),
            });
        }
        document
    }
}

/// Returns the settings of a remedy, with its memory and step.
fn remedy_in_words(Remedy { settings, evaluated }: &Remedy) -> String {
    let settings: Vec<String> =
        settings.iter().map(|setting| format!("--set {}", shell_word(setting))).collect();
    let (_, memory) = evaluated.largest();
    let keys = match settings.is_empty() {
        true => format!(
            "{}, ZeRO {}, micro-batches of {}, without --plan and keys of parallel",
            mesh_in_words(&evaluated.plan.mesh),
            evaluated.plan.zero_stage,
            evaluated.config.micro_batch()
        ),
        false => settings.join(" "),
    };
    format!(
        "{keys}: {} a rank, {} a step",
        human::bytes(memory.total() as u64),
        human::step_time(evaluated.step.step_ms)
    )
}

/// Returns the categories with any bytes, in words.
fn parts(memory: MemoryBytes) -> String {
    let parts = memory.entries().filter(|(_, bytes)| *bytes > 0);
    let part = |(category, bytes): (lockstep_plan::MemoryCategory, usize)| {
        format!("{} {}", category.name(), human::bytes(bytes as u64))
    };
    parts.map(part).collect::<Vec<_>>().join(", ")
}

fn coordinates(forecast: &Forecast, rank: usize) -> Value {
    let view = forecast.mesh().ranks();
    let coordinate = |axis: Axis| (axis.name().to_owned(), Value::from(view.coordinate(rank, axis)));
    Value::Object(Axis::ALL.into_iter().map(coordinate).collect())
}

fn explain(prediction: &MemoryPrediction) {
    for item in &prediction.items {
        let reserve = if item.is_reserve { ", at most" } else { "" };
        let bytes = human::bytes(item.bytes as u64).to_string();
        say!("{:<24}{bytes:>12}  {} ({}{reserve})", "", item.what, item.category.name());
    }
}
