//! Starts the ranks of one machine.
//!
//! Each rank inherits torchrun's environment variables and a socket, over which it receives the descriptors of the shared
//! memory. A rank dies with its launcher; more exactly, with the thread that started it.

use std::{
    ffi::OsString,
    io,
    os::{
        fd::AsRawFd,
        unix::{net::UnixStream, process::CommandExt},
    },
    path::PathBuf,
    process::Command,
};

use rustix::{
    io::{FdFlags, fcntl_setfd},
    process::{Pid, PidfdFlags, Signal, getppid, pidfd_open, set_parent_process_death_signal},
    thread::{CpuSet, sched_setaffinity},
};

use lockstep_comm::{DEFAULT_PORT, Leader, NodePlacement, SOCKET_VARIABLE, World, WorldOptions};
use lockstep_tensor::topology::Topology;

use crate::{
    LaunchError, Output,
    affinity::{Pinning, cpus_of_rank},
    agent::{Agent, Rank},
    joining::{LISTENER_VARIABLE, SECRET_VARIABLE},
    output::{Relay, Stream},
};

/// Variable with the path of the file where a rank writes the reason of its failure; the name is torchelastic's.
pub const ERROR_FILE_VARIABLE: &str = "TORCHELASTIC_ERROR_FILE";
/// Run id that torchrun gives to a run without one.
const NO_RUN: &str = "none";

/// Description of the ranks to start on this machine.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Program of every rank.
    pub program: PathBuf,
    /// Arguments of the program.
    pub arguments: Vec<OsString>,
    /// Environment variables in addition to the launcher's and to those that identify the rank.
    pub environment: Vec<(OsString, OsString)>,
    /// Number of ranks on this machine.
    pub ranks: usize,
    /// Options of the ranks' world on this machine.
    pub options: WorldOptions,
    /// Place of these ranks among those of other machines.
    pub placement: NodePlacement,
    /// Core affinity of the ranks.
    pub pinning: Pinning,
    /// Destination of the ranks' standard output and standard error.
    pub output: Output,
    /// Variables that torchelastic sets for its workers.
    pub elastic: Elastic,
    /// Exit codes that count as success once the rank has left the world.
    pub success_codes: Vec<i32>,
}

/// The variables of torchelastic's workers, except those for ranks and sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elastic {
    /// Name of the role that all ranks have.
    pub role: String,
    /// Number of restarts after a failure so far.
    pub restart_count: usize,
    /// Maximum number of restarts.
    pub max_restarts: usize,
    /// Directory where a failing rank writes the reason; `None` for no such file.
    pub errors: Option<PathBuf>,
}

impl Default for Elastic {
    /// Returns values without restarts and error files, with torchrun's default role.
    fn default() -> Self {
        Self { role: "default".to_owned(), restart_count: 0, max_restarts: 0, errors: None }
    }
}

impl Elastic {
    /// Returns the path where `rank` writes the reason of its failure; `None` without a directory.
    pub fn error_file(&self, rank: usize) -> Option<PathBuf> {
        self.errors.as_ref().map(|dir| dir.join(format!("rank-{rank:05}.error.json")))
    }

    /// Sets the variables of `rank`, and removes the error file of an earlier attempt.
    fn prepare(&self, rank: usize, placement: &NodePlacement, command: &mut Command) {
        for (name, value) in [
            ("ROLE_RANK", rank),
            ("ROLE_WORLD_SIZE", placement.world_size),
            ("TORCHELASTIC_RESTART_COUNT", self.restart_count),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts),
        ] {
            command.env(name, value.to_string());
        }
        let run = if placement.run.is_empty() { NO_RUN } else { &placement.run };
        command.env("ROLE_NAME", &self.role).env("TORCHELASTIC_RUN_ID", run);
        command.env("TORCHELASTIC_USE_AGENT_STORE", "False");
        match self.error_file(rank) {
            Some(file) => {
                // A missing file is fine.
                let _ = std::fs::remove_file(&file);
                command.env(ERROR_FILE_VARIABLE, file)
            }
            None => command.env_remove(ERROR_FILE_VARIABLE),
        };
    }
}

impl Launch {
    /// Starts all ranks and returns the agent that watches them.
    ///
    /// # Errors
    /// If the number of ranks is out of range, if a log or error directory cannot be created, or if the program cannot be
    /// started.
    pub fn start(&self) -> Result<Agent, LaunchError> {
        let options = WorldOptions { first_rank: self.placement.first_rank, ..self.options };
        let world = World::new(self.ranks, options)?;
        let mut agent = Agent::new(world, options, self.output.clone(), self.success_codes.clone());
        if let Some(dir) = &self.elastic.errors {
            let made = std::fs::create_dir_all(dir);
            made.map_err(|source| LaunchError::Log { path: dir.clone(), source })?;
        }
        let mut streams = Vec::new();
        let topology = Topology::current();
        for rank in 0..self.ranks {
            let cpus = match self.pinning {
                Pinning::Free => None,
                Pinning::Share => Some(cpus_of_rank(&topology, rank, self.ranks)),
            };
            let (started, printed) = self.start_rank(agent.world(), rank, cpus)?;
            tracing::debug!(rank = options.first_rank + rank, pid = started.child.id(), "started a rank");
            agent.ranks.push(started);
            streams.extend(printed);
        }
        agent.relay = Some(Relay::start(streams)?);
        Ok(agent)
    }

    fn start_rank(
        &self,
        world: &World,
        rank: usize,
        cpus: Option<CpuSet>,
    ) -> Result<(Rank, Vec<Stream>), LaunchError> {
        let (ours, theirs) = UnixStream::pair().map_err(LaunchError::io("make a socket for a rank"))?;
        world.welcome(&ours, rank)?;
        let mut command = Command::new(&self.program);
        // Ctrl-C in a terminal reaches the launcher alone, which asks all ranks to stop at the same step.
        command.process_group(0);
        command.args(&self.arguments).envs(self.environment.iter().cloned());
        let placement = &self.placement;
        let world_rank = placement.first_rank + rank;
        for (name, value) in [
            ("RANK", world_rank),
            ("LOCAL_RANK", rank),
            ("WORLD_SIZE", placement.world_size),
            ("LOCAL_WORLD_SIZE", self.ranks),
            ("GROUP_RANK", placement.node),
            ("GROUP_WORLD_SIZE", placement.nodes),
        ] {
            command.env(name, value.to_string());
        }
        if let Some(Leader { host, port }) = &placement.leader {
            command.env("MASTER_ADDR", host);
            command.env("MASTER_PORT", port.unwrap_or(DEFAULT_PORT).to_string());
        }
        self.elastic.prepare(world_rank, placement, &mut command);
        command.env(SOCKET_VARIABLE, theirs.as_raw_fd().to_string());
        let listener = placement.listener.clone().filter(|_| world_rank == 0);
        match &listener {
            Some(listener) => command.env(LISTENER_VARIABLE, listener.as_raw_fd().to_string()),
            None => command.env_remove(LISTENER_VARIABLE),
        };
        let secret = placement.secret.clone();
        if let Some(secret) = &secret {
            command.env(SECRET_VARIABLE, secret.inherited_path());
        }
        self.output.prepare((rank, world_rank), &mut command)?;
        let parent = rustix::process::getpid();
        let prepare = move || -> io::Result<()> {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before the death signal was set.
            if getppid() != Some(parent) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if let Some(cpus) = &cpus {
                sched_setaffinity(None, cpus)?;
            }
            if let Some(listener) = &listener {
                fcntl_setfd(listener, FdFlags::empty())?;
            }
            if let Some(secret) = &secret {
                fcntl_setfd(secret.as_ref(), FdFlags::empty())?;
            }
            Ok(fcntl_setfd(&theirs, FdFlags::empty())?)
        };
        // SAFETY: between fork and exec it makes system calls only; it neither allocates nor locks.
        unsafe { command.pre_exec(prepare) };
        let mut child = command.spawn().map_err(LaunchError::io("start a rank"))?;
        let streams = self.output.streams((rank, world_rank), &mut child);
        let process = Pid::from_raw(child.id() as i32).ok_or(rustix::io::Errno::SRCH);
        let process = process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
        let process = process.map_err(|error| LaunchError::io("watch a rank")(error.into()))?;
        Ok((Rank { child, process, has_ended: false }, streams?))
    }
}
