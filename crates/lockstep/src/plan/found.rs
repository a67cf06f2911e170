//! What a search has found: a table, or one JSON document.

use lockstep_plan::cluster::Cluster;
use lockstep_plan::search::Ranking;
use lockstep_plan::{ContextMethod, Plan};
use lockstep_train::human;
use lockstep_train::planner::{
    DISK, Evaluated, Help, Neighbour, Page, Planner, Searched, mesh_in_words, parts, recompute_in_words,
    rejection_in_words, schedule_in_words,
};
use serde_json::{Map, Value, json};

use super::details::{self, print_traffic};
use super::foretold::by_name;
use super::{Arguments, figures};
use crate::exit::Failure;
use crate::output::say;

/// Searches, and tells what was found.
pub(super) fn run(arguments: &Arguments, planner: &mut Planner) -> Result<(), Failure> {
    let searched = planner.find(arguments.top);
    let ranking = &searched.ranking;
    let Some(best) = ranking.best.first() else { return Err(nothing(ranking, planner)) };
    let neighbours = if arguments.explain || arguments.html.is_some() {
        planner.neighbours(&best.candidate, &best.value)
    } else {
        Vec::new()
    };
    let helps = if arguments.explain { planner.help(&best.value) } else { Vec::new() };
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
        extend(&mut document, details.map(|details| details::to_json(&details, planner.cluster())));
        say!("{document}");
        return Ok(());
    }
    print(&searched, planner);
    if let Some(details) = details.filter(|_| arguments.explain) {
        explain(&neighbours, &helps, &slowdowns);
        print_traffic(&details.traffic, planner.cluster());
    }
    Ok(())
}

/// Why there is no plan at all: the candidates that came nearest.
fn nothing(ranking: &Ranking<Evaluated>, planner: &Planner) -> Failure {
    let mut message = format!("no plan for {} fits", cluster_in_words(planner.cluster()));
    message += &match planner.candidates().len() {
        0 => ": no way to share the devices suits the model and the batch (the number of ranks that read other parts of the batch has to \
              divide train.global_batch)"
            .to_owned(),
        all => format!(
            ": each of {} needs more memory than a device has; more nodes or larger devices would help, or a smaller model",
            human::plural(all, "plan")
        ),
    };
    let nearest = ranking
        .rejected
        .iter()
        .filter(|(_, _, rejection)| matches!(rejection, lockstep_plan::search::Rejection::Memory { .. }));
    let least = nearest.min_by_key(|(_, _, rejection)| match rejection {
        lockstep_plan::search::Rejection::Memory { needed, .. } => *needed,
        _ => u64::MAX,
    });
    if let Some((candidate, _, rejection)) = least {
        message += &format!("; {} {}", mesh_in_words(&candidate.degrees), rejection_in_words(rejection));
    }
    Failure::configuration(message)
}

fn print(searched: &Searched, planner: &Planner) {
    let Searched { ranking, ms } = searched;
    say!("cluster    {}", cluster_in_words(planner.cluster()));
    say!(
        "searched   {} plans in {}, {} of them in full: none that is left could be better",
        human::count(ranking.candidates as f64),
        human::milliseconds(*ms),
        human::count(ranking.valued as f64),
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
            human::milliseconds(step.step_ms).to_string(),
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
    let shares = parts(step).into_iter().filter(|(name, ms)| *ms > 0.0 || *name != DISK).map(|(name, ms)| {
        format!(
            "{name} {} ({:.0} %)",
            human::milliseconds(ms),
            100.0 * ms / step.step_ms.max(f64::MIN_POSITIVE)
        )
    });
    say!("\nstep       {} on {}", human::milliseconds(step.step_ms), cluster_in_words(cluster));
    for share in shares {
        say!("           {share}");
    }
    say!(
        "           {} tokens/s, {} TFLOP/s a device without what is computed again, {} with it",
        human::count(found.tokens_per_s()),
        teraflops(found.tflops_per_device()),
        teraflops(found.hardware_tflops_per_device()),
    );
    if let (Some(price), Some(of_tokens)) = (found.price_per_hour, found.price_per_billion_tokens()) {
        say!("           ${price:.0} an hour, ${of_tokens:.0} for 1G tokens");
    }
    let every = found.config.checkpoint.every;
    if every > 0 {
        let save = human::milliseconds(found.save_ms());
        say!("           beside: each save, one in {every} steps, holds them up for {save}");
    }
    if found.data_stall_ms > 0.0 {
        say!(
            "           beside: {} a step until the disk has read its sequences",
            human::milliseconds(found.data_stall_ms)
        );
    }
    if found.devices > 1 {
        let goodput = found.goodput(cluster);
        say!(
            "           with a save every {} {:.1} % of the time is work that no failure undoes",
            human::seconds(goodput.interval_s),
            goodput.share * 100.0
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
            Some(ratio) if *ratio >= 1.0 => format!("{:.1} % slower: ", (ratio - 1.0) * 100.0),
            Some(ratio) => format!("{:.1} % faster, but worse by the objective: ", (1.0 - ratio) * 100.0),
            None => String::new(),
        };
        say!("  {change:<46}{slower}{reason}");
    }
    say!("\nwhat would help");
    for Help { change, speedup } in helps {
        say!("  {change:<46}{:+.1} % tokens/s", (speedup - 1.0) * 100.0);
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
        "search": { "candidates": ranking.candidates, "valued": ranking.valued, "ms": ms, "gap": 0.0 },
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
