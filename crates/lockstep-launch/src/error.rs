//! Errors of this crate.

use std::{io, path::PathBuf};

use lockstep_comm::CommError;

use crate::environment::{EnvironmentProblem, Launcher};

/// Error of starting ranks, or of joining the ranks that this process was started with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Error in the communication with other ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The launcher's environment variables are invalid.
    #[error("cannot join the other ranks: {0}")]
    Environment(#[from] EnvironmentProblem),
    /// Ranks of several machines have no address at which to meet.
    #[error(
        "cannot join the other ranks: {launcher} does not say where ranks of several machines meet: set MASTER_ADDR, and MASTER_PORT, alike for all of them"
    )]
    NoLeader {
        /// Launcher that started them.
        launcher: Launcher,
    },
    /// Shared memory was requested for ranks that cannot share it.
    #[error(
        "cannot join the other ranks: shared memory is for ranks that lockstep itself starts on one machine; these were started by {launcher}"
    )]
    NoSharedMemory {
        /// Launcher that started them.
        launcher: Launcher,
    },
    /// MPI was requested from a program built without it.
    #[error(
        "cannot join the other ranks: this program was built without MPI: cargo build --release --features mpi"
    )]
    NotBuilt,
    /// A log file that cannot be written.
    #[error("cannot write {path}: {source}")]
    Log {
        /// Path of the log file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// Failure of a system call.
    #[error("cannot {what}: {source}")]
    Io {
        /// Action that failed, after "cannot".
        what: &'static str,
        /// Error of the system.
        source: io::Error,
    },
    /// The path of this program, from which ranks are started, is unknown.
    #[error("cannot find the program to start its ranks: {0}")]
    Program(#[source] io::Error),
    /// The handlers of SIGINT and SIGTERM cannot be installed.
    #[error("cannot watch for Ctrl-C and SIGTERM: {0}")]
    Signals(#[source] io::Error),
    /// A stop was requested while no rank was running.
    #[error("interrupted before the ranks had begun")]
    Interrupted,
    /// The program that reaches other machines cannot be started.
    #[error("cannot start {program} to reach {host}: {source} (--ssh names the program)")]
    Ssh {
        /// Program that was to run.
        program: String,
        /// Host that it was to reach.
        host: String,
        /// Error of the system.
        source: io::Error,
    },
    /// Hosts that ssh does not reach.
    #[error(
        "{all} cannot be reached by ssh, or the connection broke (exit code 255): `ssh -o BatchMode=yes {host} true` must work without a password"
    )]
    Unreachable {
        /// The first of these hosts.
        host: String,
        /// All of these hosts, separated by commas.
        all: String,
    },
    /// Hosts without this program or this directory.
    #[error(
        "{all}: there is no lockstep at the path that it has here, or not this directory; install both alike on all hosts"
    )]
    NotInstalled {
        /// These hosts, separated by commas.
        all: String,
    },
    /// A command on another machine cannot be watched.
    #[error(transparent)]
    Remote(io::Error),
}

impl LaunchError {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}
