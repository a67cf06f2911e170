//! What a search has found: a table, or one JSON document.

use lockstep_plan::cluster::Cluster;
use lockstep_plan::search::{Ranking, Rejection};
use lockstep_plan::{ContextMethod, Plan};
use lockstep_train::human;
use lockstep_train::planner::{
    Advice, Assumption, Evaluated, Help, Neighbour, Page, Planner, Searched, mesh_in_words, parts,
    recompute_in_words, rejection_in_words, schedule_in_words,
};
use serde_json::{Map, Value, json};

use super::details::{self, print_traffic};
use super::foretold::by_name;
use super::scaling;
use super::searching::{Stop, Watch};
use super::training::Training;
use super::{Arguments, figures, print_workload, workload};
use crate::exit::Failure;
use crate::output::say;

/// Searches, and tells what was found.
pub(super) fn run(
    arguments: &Arguments,
    planner: &mut Planner,
    assumed: &[Assumption],
) -> Result<(), Failure> {
    if let Some(nodes) = &arguments.scaling
        && planner.cluster().nodes.len() > 1
    {
        let message = format!(
            "--scaling {nodes:?}: {} has nodes of several kinds; one kind is needed",
            planner.cluster().name
        );
        return Err(Failure::configuration(message));
    }
    let mut watch = Watch::start(arguments.limit)?;
    let searched = planner.find_observed(arguments.top, &mut watch);
    let ranking = &searched.ranking;
    let Some(best) = ranking.best.first() else {
        let failure = nothing(ranking, planner, &mut watch);
        watch.finish();
        return Err(failure);
    };
    let scaling = arguments.scaling.as_ref().map(|named| {
        let named: Vec<usize> = named.iter().map(|nodes| nodes.get()).collect();
        planner.scaling(&scaling::nodes(&named, planner.cluster().nodes[0].count), &mut watch)
    });
    let stopped = watch.stopped();
    let advice = if stopped.is_none() && waits_for_disk(&best.value, planner.cluster()) {
        watch.leave_a_moment();
        planner.advice(&mut watch)
    } else {
        Vec::new()
    };
    watch.finish();
    let neighbours = if arguments.explain || arguments.html.is_some() {
        planner.neighbours(&best.candidate, &best.value)
    } else {
        Vec::new()
    };
    let helps = if arguments.explain { planner.help(&best.candidate, &best.value) } else { Vec::new() };
    let slowdowns = if arguments.explain { slowdowns(planner, &best.value)? } else { Vec::new() };
    arguments.write_plan(&best.value.plan_with_prediction(planner.cluster()))?;
    let details = arguments.wants_details().then(|| planner.details(&best.value)).transpose()?;
    if let Some(details) = &details {
        let all: Vec<Evaluated> = ranking.best.iter().map(|found| found.value.clone()).collect();
        let (neighbours, searched) = (&neighbours[..], Some(&searched));
        let page = Page { ranking: &all, details, neighbours, searched, command: None };
        arguments.write_page(planner, page)?;
    }
    if arguments.json {
        let explained = arguments.explain.then_some((&helps[..], &slowdowns[..]));
        let mut document = to_json(&searched, planner.cluster(), &neighbours, explained);
        document["workload"] = workload(planner, assumed);
        if let Some(tokens) = arguments.tokens {
            document["training"] = Training::of(tokens, &best.value, planner.cluster()).to_json();
        }
        if let Some(scaling) = &scaling {
            document["scaling"] = scaling::to_json(scaling);
        }
        if !advice.is_empty() {
            let change = |Advice { flag, words }: &Advice| json!({ "flag": flag, "words": words });
            document["advice"] = advice.iter().map(change).collect();
        }
        extend(&mut document, details.map(|details| details::to_json(&details, planner.cluster())));
        say!("{document}");
        return Ok(());
    }
    print_workload(planner, assumed);
    print(&searched, planner, stopped);
    if !advice.is_empty() {
        let share = 100.0 * best.value.step.disk_ms / best.value.step.step_ms;
        say!("\nwithout the disk, which takes {share:.0} % of this step");
        advice.iter().for_each(|advice| say!("  {}", in_words(advice)));
    }
    if let Some(tokens) = arguments.tokens {
        Training::of(tokens, &best.value, planner.cluster()).print();
    }
    if let Some(scaling) = &scaling {
        scaling::print(scaling);
    }
    if let Some(details) = details.filter(|_| arguments.explain) {
        explain(&neighbours, &helps, &slowdowns);
        print_traffic(&details.traffic, planner.cluster());
    }
    Ok(())
}

/// The failure where no plan was found: the candidate that lacked least, and the changes with which one would fit.
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

/// Share of a step from which on waiting for the disk is worth other machines.
const WORTH_ADVICE: f64 = 0.1;

/// Whether the best plan is one that nobody would rent accelerators for: its steps wait for disks.
fn waits_for_disk(best: &Evaluated, cluster: &Cluster) -> bool {
    let is_host = cluster.nodes.iter().any(|node| node.device.is_host);
    !is_host && best.step.disk_ms > WORTH_ADVICE * best.step.step_ms
}

/// An advice as a line: what to type, and what then fits.
fn in_words(Advice { flag, words }: &Advice) -> String {
    format!("{flag:<40} {words}")
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
            plan.micro_batch,
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

/// A plan's axes, and how those that share sequences reach each other's parts.
fn mesh_of(plan: &Plan) -> String {
    let method = match plan.context_method {
        _ if plan.mesh.context == 1 => return mesh_in_words(&plan.mesh),
        ContextMethod::Ring => "ring",
        ContextMethod::AllGather => "gather",
        ContextMethod::AllToAll => "all-to-all",
    };
    format!("{}, {method}", mesh_in_words(&plan.mesh))
}

/// With as many digits as say something: cores come to less than one.
fn teraflops(number: f64) -> String {
    if number < 10.0 { format!("{number:.3}") } else { format!("{number:.1}") }
}

/// Where the time of a step goes, and what comes of it.
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

/// Shares of its speed that a device is thought to come to, and the step with it as a multiple of the step without.
type Slowdown = (f64, f64);

/// What a slow device costs. A device that throttles comes to about these.
fn slowdowns(planner: &mut Planner, best: &Evaluated) -> Result<Vec<Slowdown>, Failure> {
    let one = |speed: f64| Ok((speed, planner.with_slow_device(best, speed)?));
    [0.9, 0.75, 0.5].into_iter().map(one).collect()
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
    explained: Option<(&[Help], &[Slowdown])>,
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
        "memory_bytes": by_name(found.largest().1),
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
