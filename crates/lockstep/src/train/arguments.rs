//! Command line of `lockstep train`, and what its launcher passes to ranks beside it.

use std::path::PathBuf;

use clap::Args;

use crate::hosts::Hosts;
use crate::launching::Flags;
use crate::nodes::Nodes;
use crate::planned::PlannedRun;

/// Variable with which the launcher passes the description of the chosen plan to the first rank.
pub(super) const CHOSEN_VARIABLE: &str = "LOCKSTEP_CHOSEN_PLAN";

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(super) planned: PlannedRun,
    /// Starting point: the newest intact checkpoint (auto), step 0 (never), or a checkpoint's directory
    #[arg(long, default_value = "auto", value_name = "auto|never|PATH")]
    pub(super) resume: String,
    #[command(flatten)]
    pub(super) nodes: Nodes,
    #[command(flatten)]
    pub(super) flags: Flags,
    #[command(flatten)]
    pub(super) hosts: Hosts,
    /// Number of steps, as --set train.steps=N; a larger number lets a finished run continue
    #[arg(long, value_name = "N")]
    pub(super) steps: Option<u64>,
    /// Print the resolved configuration of the run in TOML and exit
    #[arg(long)]
    pub(super) print_config: bool,
    /// DeepSpeed configuration, whose values override RUN.toml and are overridden by --set; see docs/coming-from-deepspeed.md
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, alias = "deepspeed_config")]
    pub(super) deepspeed: Option<PathBuf>,
    /// Print more before the first step: the plan and the reason for it, the work of a step, memory by category
    #[arg(short, long)]
    pub(super) verbose: bool,
}
