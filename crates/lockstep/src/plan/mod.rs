//! `lockstep plan`: finds the best plan for a model on some machines, or predicts a given plan before any machine runs it.

mod arguments;
mod calibration;
mod counts;
mod details;
mod figures;
mod inference;
mod prediction;
mod progress;
mod ranking;
mod scaling;
mod training;

use std::process::ExitCode;

use lockstep_config::RunConfig;
use lockstep_planner::{Planner, assumptions, machine};

pub(crate) use self::arguments::Arguments;
use crate::exit::Failure;
use crate::output::{note, say};
use crate::ranks::blamed;

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    if let (true, Some(model)) = (arguments.inference.inference, &arguments.model) {
        arguments.inference.run(model, arguments.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    arguments.inference.refuse_without()?;
    arguments.counts.refuse(arguments.cluster.as_deref())?;
    if !arguments.calibrate.is_empty() {
        calibration::run(arguments)?;
        return Ok(ExitCode::SUCCESS);
    }
    let file = arguments.planned.plan()?;
    let settings = [arguments.settings()?, arguments.planned.settings.clone()].concat();
    let load = |settings: &[String]| {
        RunConfig::load_to_plan(arguments.planned.run.as_deref(), file.as_ref(), settings)
    };
    let config = load(&settings).map_err(|error| Arguments::not_loaded(blamed(file.as_ref(), error)))?;
    let is_given = file.is_some() || config.says_how_to_split();
    let open = arguments.open_ranks(&config)?;
    let ranks = if is_given { open.unwrap_or(config.ranks()) } else { 1 };
    let (cluster, doubt) = arguments.cluster(&config, ranks)?;
    if is_given {
        machine::check_ranks(&cluster, open.unwrap_or(config.ranks()))?;
    }
    // A run's file is complete: keys that it leaves out have their defaults.
    let assumed = if arguments.planned.run.is_none() { assumptions(&config, &cluster)? } else { Vec::new() };
    let shards = open.map(|ranks| config.setting_for_ranks(ranks)).transpose()?;
    let config = match assumed.is_empty() && shards.is_none() {
        true => config,
        false => {
            let assumed = assumed.iter().map(|assumption| assumption.setting.clone());
            let settings: Vec<String> = assumed.chain(settings).chain(shards).collect();
            load(&settings).map_err(|error| blamed(file.as_ref(), error))?
        }
    };
    let planner = Planner::new(config.clone(), cluster, arguments.objective.into())?;
    let mut planner = match arguments.nproc_per_node {
        // On a host a rank may have several cores, so the number of ranks is a choice unless it is given.
        Some(ranks) if planner.is_host() => planner.with_ranks(ranks),
        _ => planner,
    };
    if let Some(note) = config.idle_zero_stage() {
        note!("note: {note}");
    }
    if is_given {
        prediction::run(arguments, config, file.as_ref(), &mut planner, &assumed)?;
    } else {
        ranking::run(arguments, &mut planner, &assumed)?;
    }
    if let Some(doubt) = doubt.filter(|_| !arguments.json) {
        say!("\ntimes are estimates: {doubt}");
    }
    Ok(ExitCode::SUCCESS)
}
