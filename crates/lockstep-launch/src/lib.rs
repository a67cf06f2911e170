//! The start of a run's ranks: who started this process, the processes that it starts, and how they end.
//!
//! A launcher describes its ranks by a [`Launch`], which starts them as processes and returns an [`Agent`]. The agent watches
//! them: the first rank that fails ends the others, and the agent reports the cause. [`run::run_ranks`] does this for copies of
//! this program, and passes a request to stop on to them. Launchers of several machines number their ranks at a rendezvous,
//! which [`lockstep_comm::join_nodes`] provides.
//!
//! A rank calls [`join_from_environment`]. It finds its place in the variables of the launcher that started it (ours, torchrun,
//! `mpirun`, `srun`, Kubernetes) and joins the other ranks over the transport that suits them.
//!
//! - [`environment`]: the launchers that are understood, as a pure function of environment variables.
//! - `joining`: from a rank's place to its process group.
//! - `launch`: the processes of one machine, with their variables and secret; `affinity`: the cores of each.
//! - `agent`: the processes until the last one has ended; `stillness`: heartbeats and out-of-memory kills.
//! - `output`: the ranks' standard output and standard error, line by line.
//! - [`run`]: this program as the launcher of its own ranks.
//! - [`rendezvous`]: the meeting of the launchers of several machines, before every attempt and after the last one.
//! - [`hostfile`], [`ssh`]: the machines of a run, and its commands on them.
//! - [`restarts`]: when failed ranks are restarted, and when a run gives up.
//! - [`interrupt`]: Ctrl-C and SIGTERM as a flag that is read between steps.
//! - [`limits`]: system limits as errors instead of fatal signals.

mod affinity;
mod agent;
pub mod environment;
mod error;
pub mod hostfile;
pub mod interrupt;
mod joining;
mod launch;
pub mod limits;
mod output;
pub mod rendezvous;
pub mod restarts;
pub mod run;
pub mod ssh;
mod stillness;

pub use affinity::{Pinning, automatic_ranks};
pub use agent::{Agent, Failure, Liveness, RunOutcome};
pub use error::LaunchError;
pub use joining::{
    JoinByMpi, JoinOptions, MEETING_LIMIT, SECRET_VARIABLE, is_launched, join_from_environment, place,
    secret, started_group,
};
pub use launch::{ERROR_FILE_VARIABLE, Elastic, Launch};
pub use output::{Output, Route, Routing};
