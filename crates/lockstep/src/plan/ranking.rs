//! The answer of a search, as a table or as one JSON document.

use lockstep_config::human;
use lockstep_config::plan::check;
use lockstep_plan::{ContextMethod, Plan, PlanPrediction};
use lockstep_planner::cluster::Cluster;
use lockstep_planner::search::{Found, Ranking, Rejection};
use lockstep_planner::{
    Advice, Assumption, Details, Evaluated, Forecast, Help, Neighbour, Planner, Scaling, Searched,
    mesh_in_words, parts, recompute_in_words, rejection_in_words, schedule_in_words,
};
use lockstep_tensor::topology::Topology;
use serde_json::{Map, Value, json};

use super::arguments::Arguments;
use super::details::{self, print_traffic};
use super::figures::{figures, machines, memory_by_category, print_workload, workload};
use super::progress::{Stop, Watch};
use super::scaling;
use super::training::Training;
use crate::exit::Failure;
use crate::output::say;

/// Searches and prints the answer.
pub(super) fn run(
    arguments: &Arguments,
    planner: &mut Planner,
    assumed: &[Assumption],
) -> Result<(), Failure> {
    refuse_scaling_of_unlike_nodes(arguments, planner.cluster())?;
    let mut watch = Watch::start(arguments.limit)?;
    let searched = planner.find_observed(arguments.top, &mut watch);
    let Some(best) = searched.ranking.best.first() else {
        let failure = nothing(&searched.ranking, planner, &mut watch);
        watch.finish();
        return Err(failure);
    };
    let answer = Answer::new(arguments, planner, best, &mut watch)?;
    arguments.write_plan(&predicted_plan(planner, &best.value)?)?;
    let is_wanted = arguments.json || arguments.html.is_some();
    let document = is_wanted.then(|| answer.to_json(planner, &searched, assumed));
    if let (Some(details), Some(document)) = (&answer.details, &document) {
        let ranking: Vec<&Evaluated> = searched.ranking.best.iter().map(|found| &found.value).collect();
        arguments.write_page(planner, &ranking, details, document)?;
    }
    if let Some(document) = document.filter(|_| arguments.json) {
        say!("{document}");
    } else {
        print_workload(planner, assumed);
        print(&searched, planner, answer.stopped);
        answer.print(arguments, planner.cluster(), &best.value);
    }
    Ok(())
}

/// Returns the plan with its prediction. On this machine the memory is predicted exactly, with the kernels that will run; a search
/// only estimates it.
fn predicted_plan(planner: &Planner, best: &Evaluated) -> Result<Plan, Failure> {
    let plan = best.plan_with_prediction(planner.cluster());
    if !planner.is_host() {
        return Ok(plan);
    }
    let (_, model) = check(&best.config)?;
    let step = plan.predicted.as_ref().and_then(|predicted| predicted.step.clone());
    let forecast = Forecast::of(&best.config, &model)?;
    Ok(Plan { predicted: Some(PlanPrediction { step, ..forecast.of_plan() }), ..plan })
}

fn refuse_scaling_of_unlike_nodes(arguments: &Arguments, cluster: &Cluster) -> Result<(), Failure> {
    match &arguments.scaling {
        Some(nodes) if cluster.nodes.len() > 1 => Err(Failure::configuration(format!(
            "--scaling {nodes:?}: {} has nodes of several kinds; one kind is needed",
            cluster.name
        ))),
        _ => Ok(()),
    }
}

/// The parts of the answer other than the ranking, as far as flags ask for them.
struct Answer {
    stopped: Option<Stop>,
    /// Advice on other machines, if the best plan waits for disks.
    advice: Vec<Advice>,
    scaling: Option<Scaling>,
    training: Option<Training>,
    neighbours: Vec<Neighbour>,
    /// Changes that would help and the cost of a slow device, with `--explain`.
    explained: Option<(Vec<Help>, Vec<Slowdown>)>,
    details: Option<Details>,
}

impl Answer {
    fn new(
        arguments: &Arguments,
        planner: &mut Planner,
        best: &Found<Evaluated>,
        watch: &mut Watch,
    ) -> Result<Self, Failure> {
        let Found { candidate, value, .. } = best;
        let scaling = arguments.scaling.as_ref().map(|named| {
            let named: Vec<usize> = named.iter().map(|nodes| nodes.get()).collect();
            planner.scaling(&scaling::nodes(&named, planner.cluster().nodes[0].count), watch)
        });
        let stopped = watch.stopped();
        let mut advice = Vec::new();
        if stopped.is_none() && waits_for_disk(value, planner.cluster()) {
            watch.leave_a_moment();
            advice = planner.advice(watch);
        }
        watch.finish();
        let wants_neighbours = arguments.explain || arguments.html.is_some();
        let neighbours = if wants_neighbours { planner.neighbours(candidate, value) } else { Vec::new() };
        let explained = match arguments.explain {
            true => Some((planner.help(candidate, value), slowdowns(planner, value)?)),
            false => None,
        };
        Ok(Self {
            stopped,
            advice,
            scaling,
            training: arguments.tokens.map(|tokens| Training::of(tokens, value, planner.cluster())),
            neighbours,
            explained,
            details: arguments.wants_details().then(|| planner.details(value)).transpose()?,
        })
    }

    fn to_json(&self, planner: &Planner, searched: &Searched, assumed: &[Assumption]) -> Value {
        let cluster = planner.cluster();
        let mut document = to_json(searched, cluster, &self.neighbours, self.explained.as_ref());
        document["workload"] = workload(planner, assumed);
        document["cluster"] = machines(cluster);
        if let Some(training) = &self.training {
            document["training"] = training.to_json();
        }
        if let Some(scaling) = &self.scaling {
            document["scaling"] = scaling::to_json(scaling);
        }
        if !self.advice.is_empty() {
            document["advice"] = self.advice.iter().map(advice_to_json).collect();
        }
        extend(&mut document, self.details.as_ref().map(|details| details::to_json(details, cluster)));
        document
    }

    fn print(&self, arguments: &Arguments, cluster: &Cluster, best: &Evaluated) {
        if !self.advice.is_empty() {
            let share = 100.0 * best.step.disk_ms / best.step.step_ms;
            say!("\nwithout the disk, which takes {share:.0} % of this step");
            self.advice.iter().for_each(|advice| say!("  {}", in_words(advice)));
        }
        if let Some(training) = &self.training {
            training.print();
        }
        if let Some(scaling) = &self.scaling {
            scaling::print(scaling);
        }
        if let Some((helps, slowdowns)) = &self.explained {
            explain(&self.neighbours, helps, slowdowns);
            if arguments.cluster.is_none() {
                explain_ranks(&Topology::current());
            }
        }
        if let Some(details) = self.details.as_ref().filter(|_| arguments.explain) {
            print_traffic(&details.traffic, cluster);
        }
    }
}

/// Returns the failure when no plan fits or was found in time: the candidate with the smallest shortage, and changes with which one
/// would fit.
fn nothing(ranking: &Ranking<Evaluated>, planner: &mut Planner, watch: &mut Watch) -> Failure {
    let workload = planner.workload_in_words();
    let question = format!("{workload}, on {}", cluster_in_words(planner.cluster()));
    if watch.stopped().is_some() {
        return Failure::configuration(format!(
            "no plan was found so far: {question}; {} of {} plans were evaluated, --limit gives the search more time",
            human::thousands(ranking.valued as u64),
            human::thousands(ranking.candidates as u64)
        ));
    }
    let mut message = format!("no plan fits: {question}");
    let needed = |rejection: &Rejection| match rejection {
        Rejection::Memory { needed, .. } => *needed,
        _ => u64::MAX,
    };
    let least = ranking.rejected.iter().min_by_key(|(_, _, rejection)| needed(rejection));
    if let Some((candidate, _, rejection)) = least {
        message +=
            &format!("\n  nearest: {} {}", mesh_in_words(&candidate.degrees), rejection_in_words(rejection));
    } else if let Some(words) = planner.excess_of_state() {
        message += &format!("\n  {words}");
    } else if ranking.candidates == 0 {
        message += "\n  no mesh of these devices suits the model and the batch: the data-parallel ranks have to divide --global-batch";
    }
    watch.leave_a_moment();
    for advice in planner.advice(watch) {
        message += &format!("\n  {}", in_words(&advice));
    }
    Failure::configuration(message)
}

/// Fraction of a step from which on waiting for the disk is worth advice on other machines.
const WORTH_ADVICE: f64 = 0.1;

/// Returns true if the best plan's steps wait so long for disks that its accelerators would be wasted.
fn waits_for_disk(best: &Evaluated, cluster: &Cluster) -> bool {
    let is_host = cluster.nodes.iter().any(|node| node.device.is_host);
    !is_host && best.step.disk_ms > WORTH_ADVICE * best.step.step_ms
}

/// Returns an advice as a line: the flag to type, and what then fits.
pub(super) fn in_words(Advice { flag, words }: &Advice) -> String {
    format!("{flag:<40} {words}")
}

pub(super) fn advice_to_json(Advice { flag, words }: &Advice) -> Value {
    json!({ "flag": flag, "words": words })
}

fn print(searched: &Searched, planner: &Planner, stopped: Option<Stop>) {
    let Searched { ranking, ms } = searched;
    say!("cluster    {}", cluster_in_words(planner.cluster()));
    let verdict = match stopped {
        None => "no other is better".to_owned(),
        Some(stop) => format!(
            "stopped by {}: another could be up to {:.1} % better",
            if stop == Stop::Limit { "--limit" } else { "a signal" },
            ranking.gap * 100.0
        ),
    };
    say!(
        "searched   {} plans in {}, {} of them in full: {verdict}",
        human::thousands(ranking.candidates as u64),
        human::milliseconds(*ms),
        human::thousands(ranking.valued as u64),
    );
    let plans = || ranking.best.iter().map(|found| &found.value.plan);
    let widest = |least: usize, words: fn(&Plan) -> String| {
        plans().map(|plan| words(plan).chars().count() + 2).fold(least, usize::max)
    };
    let mesh_width = widest(30, mesh_of);
    let recompute_width = widest(16, recompute_in_words);
    say!(
        "\n{:<4}{:<mesh_width$}{:<6}{:<7}{:<24}{:<recompute_width$}{:>10}{:>10}{:>9}{:>7}{:>11}",
        "",
        "mesh",
        "ZeRO",
        "micro",
        "schedule",
        "recompute",
        "step",
        "tokens/s",
        "TFLOP/s",
        "MFU",
        "memory"
    );
    for (index, found) in ranking.best.iter().enumerate() {
        let Evaluated { plan, step, .. } = &found.value;
        let (_, memory) = found.value.largest();
        say!(
            "{:<4}{:<mesh_width$}{:<6}{:<7}{:<24}{:<recompute_width$}{:>10}{:>10}{:>9}{:>7}{:>11}",
            index + 1,
            mesh_of(plan),
            plan.zero_stage,
            found.value.config.micro_batch(),
            schedule_in_words(plan).unwrap_or_else(|| "-".to_owned()),
            recompute_in_words(plan),
            human::step_time(step.step_ms),
            human::count(found.value.tokens_per_s()).to_string(),
            teraflops(found.value.tflops_per_device()),
            found.value.mfu().map_or("?".to_owned(), |mfu| format!("{:.1}%", mfu * 100.0)),
            human::bytes(memory.total() as u64).to_string(),
        );
    }
    if let Some(best) = ranking.best.first() {
        print_step(&best.value, planner.cluster());
    }
}

/// Returns a plan's axes, with the context-parallel method.
fn mesh_of(plan: &Plan) -> String {
    let method = match plan.context_method {
        _ if plan.mesh.context == 1 => return mesh_in_words(&plan.mesh),
        ContextMethod::Ring => "ring",
        ContextMethod::AllGather => "gather",
        ContextMethod::AllToAll => "all-to-all",
    };
    format!("{}, {method}", mesh_in_words(&plan.mesh))
}

/// Formats TFLOP/s with as many digits as are significant: CPU cores have less than one.
fn teraflops(number: f64) -> String {
    if number < 10.0 { format!("{number:.3}") } else { format!("{number:.1}") }
}

/// Prints the parts of a step and the figures that follow from it.
pub(super) fn print_step(found: &Evaluated, cluster: &Cluster) {
    let step = &found.step;
    let shares = parts(step).map(|part| {
        let share = 100.0 * part.ms / step.step_ms.max(f64::MIN_POSITIVE);
        format!("{} {} ({share:.0} %)", part.name, human::step_time(part.ms))
    });
    say!("\nstep       {} on {}", human::step_time(step.step_ms), cluster_in_words(cluster));
    for share in shares {
        say!("           {share}");
    }
    say!(
        "           {} tokens/s, {} TFLOP/s a device without recomputation, {} with it",
        human::count(found.tokens_per_s()),
        teraflops(found.tflops_per_device()),
        teraflops(found.hardware_tflops_per_device()),
    );
    if let (Some(price), Some(of_tokens)) = (found.price_per_hour, found.price_per_billion_tokens()) {
        let source = cluster.nodes.iter().find_map(|node| node.price_source.as_deref());
        let source = source.map_or(String::new(), |source| format!(" ({source})"));
        let [price, of_tokens] = [price, of_tokens].map(|dollars| human::thousands(dollars.round() as u64));
        say!("           ${price} an hour, ${of_tokens} for 1B tokens{source}");
    }
    let every = found.config.checkpoint.every;
    if every > 0 {
        let save = human::step_time(found.save_ms());
        say!("           beside: each save, one in {every} steps, holds them up for {save}");
    }
    if found.data_stall_ms > 0.0 {
        say!(
            "           beside: {} a step until the disk has read its sequences",
            human::step_time(found.data_stall_ms)
        );
    }
    if found.devices > 1 {
        let goodput = found.goodput(cluster);
        say!(
            "           {:.1} % of the time is work that no failure undoes, with a save every {} ({} written in {})",
            goodput.share * 100.0,
            human::seconds(goodput.interval_s),
            human::bytes(found.saved_bytes() as u64),
            human::seconds(found.saves.write_s),
        );
    }
}

/// Relative speed of a slow device, and the step with it as a multiple of the step without.
type Slowdown = (f64, f64);

/// Computes the cost of one slow device, at speeds of devices that throttle.
fn slowdowns(planner: &mut Planner, best: &Evaluated) -> Result<Vec<Slowdown>, Failure> {
    let one = |speed: f64| Ok((speed, planner.with_slow_device(best, speed)?));
    [0.9, 0.75, 0.5].into_iter().map(one).collect()
}

/// Explains the number of ranks that `train` takes by itself on a machine with several memory nodes.
fn explain_ranks(topology: &Topology) {
    if let Some(ranks) = topology.ranks_by_node() {
        say!("\nranks of train without --nproc-per-node, and with auto");
        say!("  one for each memory node, {ranks}: {topology}");
        say!("  the threads of a rank then share a node's memory; the times above know no memory nodes");
    }
}

fn explain(neighbours: &[Neighbour], helps: &[Help], slowdowns: &[Slowdown]) {
    say!("\nwhy not otherwise");
    for Neighbour { change, step_ratio, reason } in neighbours {
        let slower = match step_ratio {
            Some(ratio) if (ratio - 1.0).abs() < 5e-4 => "as fast: ".to_owned(),
            Some(ratio) if *ratio >= 1.0 => format!("{:.1} % slower: ", (ratio - 1.0) * 100.0),
            Some(ratio) => format!("{:.1} % faster, but worse by the objective: ", (1.0 - ratio) * 100.0),
            None => String::new(),
        };
        say!("  {change:<46}{slower}{reason}");
    }
    say!("\nwhat would help");
    for Help { change, speedup } in helps {
        say!("  {change:<46}{} tokens/s", human::change(*speedup));
    }
    say!("\nwhat one slow device costs");
    for (speed, ratio) in slowdowns {
        let change = format!("one of all at {:.0} % of its speed", speed * 100.0);
        say!("  {change:<46}a step takes {:.1} % longer", (ratio - 1.0) * 100.0);
    }
}

fn to_json(
    Searched { ranking, ms }: &Searched,
    cluster: &Cluster,
    neighbours: &[Neighbour],
    explained: Option<&(Vec<Help>, Vec<Slowdown>)>,
) -> Value {
    let rows: Vec<Value> = ranking.best.iter().map(|found| row(&found.value, cluster)).collect();
    let best = ranking.best.first().map(|found| found.value.plan_with_prediction(cluster));
    let mut document = json!({
        "best": best, "ranking": rows,
        "search": { "candidates": ranking.candidates, "valued": ranking.valued, "ms": ms, "gap": ranking.gap, "stopped": ranking.is_stopped },
    });
    if !neighbours.is_empty() || explained.is_some() {
        let neighbour = |neighbour: &Neighbour| json!({ "change": neighbour.change, "step_ratio": neighbour.step_ratio, "reason": neighbour.reason });
        document["neighbours"] = neighbours.iter().map(neighbour).collect();
    }
    if let Some((helps, slowdowns)) = explained {
        document["helps"] =
            helps.iter().map(|help| json!({ "change": help.change, "speedup": help.speedup })).collect();
        let slowdown = |(speed, ratio): &Slowdown| json!({ "speed": speed, "step_ratio": ratio });
        document["slow_device"] = slowdowns.iter().map(slowdown).collect();
    }
    document
}

fn row(found: &Evaluated, cluster: &Cluster) -> Value {
    let plan = &found.plan;
    let mut row = json!({
        "mesh": plan.mesh, "zero_stage": plan.zero_stage, "micro_batch": plan.micro_batch,
        "schedule": plan.schedule, "recompute": plan.recompute,
        "sequence_parallel": plan.sequence_parallel, "stages": plan.stages,
        "memory_bytes": memory_by_category(found.largest().1),
        "fits": found.fits,
    });
    extend(&mut row, figures(found, cluster).as_object().cloned());
    row
}

/// Adds keys to an object.
pub(super) fn extend(object: &mut Value, more: Option<Map<String, Value>>) {
    if let Some(object) = object.as_object_mut() {
        object.extend(more.into_iter().flatten());
    }
}

pub(super) fn cluster_in_words(cluster: &Cluster) -> String {
    let kinds = cluster.nodes.iter().map(|node| {
        let nodes = human::plural(node.count, "node").to_string();
        format!("{nodes} of {} x {}", node.devices, node.device.name)
    });
    format!("{}: {}", cluster.name, kinds.collect::<Vec<_>>().join(", "))
}
