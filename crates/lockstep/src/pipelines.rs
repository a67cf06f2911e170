//! `lockstep bench pipeline`: the command starts itself once per rank; rank 0 prints.

use std::process::ExitCode;

use clap::Args;
use lockstep_comm::Group;
use lockstep_config::{human, named_passes};
use lockstep_launch::interrupt::Interrupt;
use lockstep_launch::{JoinOptions, started_group};
use lockstep_plan::schedule::{Kind, Schedule, StageCost};
use lockstep_plan::{PassOrder, PipelineSchedule};
use lockstep_train::rehearsal::{PipelineBenchmark, Rehearsed};
use serde_json::json;

use crate::collectives::{Transport, bytes};
use crate::exit::Failure;
use crate::output::say;
use crate::ranks;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Ranks of the pipeline, on this machine. Schedules with several stages per rank split the same model more finely
    #[arg(long, default_value_t = 4)]
    stages: usize,
    /// Micro-batches of a step; several numbers give several rows
    #[arg(long, value_delimiter = ',', value_name = "N,...", default_value = "8,16")]
    micro_batches: Vec<usize>,
    /// gpipe, 1f1b, interleaved_1f1b, looped_bfs, zb_h1, zb_v, dualpipe_v or a CSV file [default: all named schedules]
    #[arg(long, value_delimiter = ',', value_name = "NAME|FILE.csv,...")]
    schedule: Vec<String>,
    /// Stages of each rank, if the schedule permits several
    #[arg(long, default_value_t = 2, value_name = "N")]
    virtual_stages: usize,
    /// Milliseconds of each of a micro-batch's forward, input backward and weight backward on a rank
    #[arg(long, value_name = "MS", default_value_t = 20.0)]
    action_ms: f64,
    /// Size of a message from one stage to the next
    #[arg(long, value_parser = bytes, default_value = "256KiB")]
    message: usize,
    /// Timed steps, after one that is not counted
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Transport between ranks
    #[arg(long, value_enum, default_value_t = Transport::Auto)]
    transport: Transport,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let schedules = arguments.schedules()?;
    let options =
        JoinOptions { way: arguments.transport.into(), mpi: ranks::mpi(), ..JoinOptions::default() };
    match started_group(options).map_err(|error| ranks::told_by(error, 0))? {
        Some(group) => {
            let abort = |code: u8| group.abort(code.into());
            rehearse(arguments, &schedules, &group)
                .map_err(|error| ranks::ended_by(error, group.rank(), abort))?;
            Ok(ExitCode::SUCCESS)
        }
        None => ranks::run(
            ranks::Start::here(arguments.stages, arguments.transport.into())?,
            &Interrupt::default(),
        ),
    }
}

impl Arguments {
    /// Returns the schedules with their names, for each number of micro-batches.
    fn schedules(&self) -> Result<Vec<(String, Schedule)>, Failure> {
        let refuse = |message: String| Err(Failure::configuration(message));
        if self.stages < 2 {
            return refuse(format!("--stages {}: allowed is 2 or more", self.stages));
        }
        if !(self.action_ms > 0.0 && self.action_ms <= 10_000.0) {
            return refuse(format!("--action-ms {}: allowed is more than 0, to 10000", self.action_ms));
        }
        if self.steps == 0 {
            return refuse("--steps 0: allowed is 1 or more".to_owned());
        }
        let all = || Kind::ALL.map(|kind| kind.name().to_owned()).to_vec();
        let names = if self.schedule.is_empty() { all() } else { self.schedule.clone() };
        let (mut schedules, mut problems) = (Vec::new(), Vec::new());
        for micro_batches in &self.micro_batches {
            for name in &names {
                match self.schedule_of(name, *micro_batches) {
                    Ok(schedule) => schedules.push((name.clone(), schedule)),
                    Err(problem) => problems.push(format!("--schedule {name}: {problem}")),
                }
            }
        }
        if problems.is_empty() { Ok(schedules) } else { refuse(problems.join("\n")) }
    }

    fn schedule_of(&self, name: &str, micro_batches: usize) -> Result<Schedule, String> {
        let passes = named_passes(name)
            .map_err(|error| format!("is no schedule, and as a file it cannot be read: {error}"))?;
        let schedule = match passes {
            PassOrder::Published(kind) => {
                let (fewest, most) = kind.chunks();
                PipelineSchedule::published(kind, self.virtual_stages.clamp(fewest, most))
            }
            PassOrder::Rows(rows) => PipelineSchedule::rows(rows),
        };
        schedule.for_ranks(self.stages, micro_batches).map_err(|error| error.to_string())
    }
}

/// Runs the benchmark on one rank.
fn rehearse(
    arguments: &Arguments,
    schedules: &[(String, Schedule)],
    group: &Group,
) -> Result<(), lockstep_train::Error> {
    let Arguments { stages, action_ms, message, steps, .. } = *arguments;
    let shows = group.rank() == 0 && !arguments.json;
    let rank_cost = StageCost {
        forward_ms: action_ms,
        backward_input_ms: action_ms,
        backward_weight_ms: action_ms,
        ..StageCost::default()
    };
    let benchmark = PipelineBenchmark { rank_cost, message_bytes: message, steps };
    if shows {
        say!(
            "{stages} ranks asleep for {action_ms} ms in each pass of all of a rank's layers (a whole backward: two), messages of {}, median of {}",
            human::bytes(message as u64),
            human::plural(steps, "step"),
        );
        say!("{:17} {:>13} {:^30} {:^30} {:>7}", "", "", "step, ms", "bubble, %", "late by");
        say!(
            "{:17} {:>13} {:>9} {:>10} {:>9} {:>9} {:>10} {:>9} {:>7}",
            "schedule",
            "micro-batches",
            "measured",
            "simulated",
            "differ",
            "measured",
            "simulated",
            "differ",
            "us"
        );
    }
    let mut rows = Vec::new();
    for (name, schedule) in schedules {
        let micro_batches = schedule.micro_batches();
        let found @ Rehearsed { measured, simulated, late_us } = benchmark.run(group, schedule)?;
        let (step_differs, bubble_differs) =
            (measured.step_ms / simulated.step_ms - 1.0, measured.bubble - simulated.bubble);
        if shows {
            say!(
                "{name:17} {micro_batches:>13} {:>9.1} {:>10.1} {:>7.2} % {:>9.2} {:>10.2} {:>9.2} {late_us:>7.0}",
                measured.step_ms,
                simulated.step_ms,
                100.0 * step_differs,
                100.0 * measured.bubble,
                100.0 * simulated.bubble,
                100.0 * bubble_differs,
            );
        }
        let mut row = json!(found);
        row["schedule"] = json!(name);
        row["micro_batches"] = json!(micro_batches);
        row["stages"] = json!(schedule.stages());
        rows.push(row);
    }
    if group.rank() == 0 && arguments.json {
        say!(
            "{}",
            json!({ "ranks": stages, "action_ms": action_ms, "message_bytes": message, "rows": rows })
        );
    }
    Ok(())
}
