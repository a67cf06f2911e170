//! Joining of the ranks that this process was started with: by Lockstep's own launcher, on one machine or several, or by a
//! launcher that only sets environment variables (torchrun, `mpirun`, `srun`).

use std::{env, net::TcpListener, path::PathBuf, time::Duration};

use lockstep_comm::{
    CommError, Deadline, Group, RendezvousEndpoint, SOCKET_VARIABLE, Secret, TcpOptions, TransportKind,
    enter, inherited, inherited_socket, join, join_with,
};

use crate::{
    LaunchError, affinity,
    environment::{self, Launcher, ProcessPlace},
};

/// Environment variable with the path of the job's secret file. Lockstep's launcher passes the path of an inherited
/// descriptor.
pub const SECRET_VARIABLE: &str = "LOCKSTEP_SECRET_FILE";
/// Environment variable with the descriptor of the listening socket that rank 0 inherits.
pub(crate) const LISTENER_VARIABLE: &str = "LOCKSTEP_LISTENER_FD";
/// Number of ports that ranks try in turn when another launcher's agent occupies `MASTER_PORT`.
const AGENT_PORTS: usize = 8;

/// Time limit for ranks of several machines to meet.
pub const MEETING_LIMIT: Duration = Duration::from_secs(300);
/// Longest wait of launched ranks for each other at the start.
const JOIN_LIMIT: Duration = Duration::from_secs(60);

/// Options of a rank that joins the others.
#[derive(Debug, Clone, Copy, Default)]
pub struct JoinOptions {
    /// Transport between the ranks.
    pub way: TransportKind,
    /// Options of the TCP transport.
    pub tcp: TcpOptions,
    /// Function that joins the ranks over MPI; `None` in a program built without it.
    pub mpi: Option<JoinByMpi>,
}

/// Function that starts MPI and returns the group of all ranks, as `lockstep_mpi::join_mpi` does.
pub type JoinByMpi = fn() -> Result<Group, CommError>;

/// Returns the place of this process in the run; `None` if it was started alone.
///
/// # Errors
/// If the launcher's environment variables are invalid.
pub fn place() -> Result<Option<ProcessPlace>, LaunchError> {
    let variable = |name: &str| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let place = environment::detect(&variable)?;
    Ok(place.filter(|place| place.world_size.is_some_and(|ranks| ranks > 1) || is_launched()))
}

/// Returns true if Lockstep's own launcher started this process.
pub fn is_launched() -> bool {
    env::var_os(SOCKET_VARIABLE).is_some()
}

/// Joins the ranks that this process was started with; `None` if it was started alone.
///
/// # Errors
/// If the environment is invalid, if the ranks cannot reach or authenticate each other, or if a rank does not join before
/// `deadline`.
pub fn join_from_environment(options: JoinOptions, deadline: Deadline) -> Result<Option<Group>, LaunchError> {
    if options.way == TransportKind::Mpi {
        let join = options.mpi.ok_or(LaunchError::NotBuilt)?;
        return Ok(Some(join()?));
    }
    let Some(place) = place()? else { return Ok(None) };
    let ranks = place.world_size.or(place.local_size).unwrap_or(1);
    let are_near = place.local_size == Some(ranks);
    if options.way == TransportKind::SharedMemory && !(are_near && is_launched()) {
        return Err(LaunchError::NoSharedMemory { launcher: place.launcher });
    }
    tracing::debug!(
        launcher = %place.launcher, rank = place.rank, ranks, local_ranks = place.local_size, way = ?options.way, "joining the other ranks"
    );
    let Some(socket) = inherited_socket()? else {
        let endpoint = endpoint(&place, are_near)?;
        let pin = affinity::pin_to_share;
        let group = join_with(place.rank, ranks, endpoint, options.tcp, None, pin, deadline)?;
        return Ok(Some(group));
    };
    if are_near && options.way != TransportKind::Tcp {
        tracing::debug!("all ranks are on this machine: shared memory");
        return Ok(Some(join(&socket, deadline)?));
    }
    let local = enter(&socket, deadline)?;
    let endpoint = endpoint(&place, are_near)?;
    // The launcher has pinned this rank already.
    Ok(Some(join_with(place.rank, ranks, endpoint, options.tcp, Some(local), |_, _| {}, deadline)?))
}

/// Joins the group of ranks with which this process was started; `None` if it was started alone.
///
/// # Errors
/// If the ranks do not connect within the time limit.
pub fn started_group(options: JoinOptions) -> Result<Option<Group>, LaunchError> {
    let limit = if is_launched() { JOIN_LIMIT } else { MEETING_LIMIT };
    join_from_environment(options, Deadline::after(limit))
}

/// Returns the rendezvous of the ranks of `place`.
fn endpoint(place: &ProcessPlace, are_near: bool) -> Result<RendezvousEndpoint, LaunchError> {
    let named = place.leader.clone().filter(|leader| leader.port.is_some() || !are_near);
    let host = variable("MASTER_ADDR").or_else(|| named.as_ref().map(|leader| leader.host.clone()));
    let listener = inherited(LISTENER_VARIABLE)?.map(TcpListener::from);
    let secret = secret()?;
    let host = match host {
        // If all ranks are on this machine, no other machine needs to reach the rendezvous. torchrun names the
        // machine's address all the same; without a secret only loopback is allowed.
        Some(_)
            if are_near
                && listener.is_none()
                && !is_launched()
                && (secret.is_none() || place.launcher == Launcher::Torchrun) =>
        {
            "127.0.0.1".to_owned()
        }
        Some(host) => host,
        None if are_near => "127.0.0.1".to_owned(),
        None => return Err(LaunchError::NoLeader { launcher: place.launcher }),
    };
    let run = variable("TORCHELASTIC_RUN_ID").unwrap_or_else(|| job(place.launcher));
    // A rank left over from an earlier attempt belongs to another run.
    let attempt = variable("TORCHELASTIC_RESTART_COUNT").filter(|_| is_launched());
    let run = attempt.map_or(run.clone(), |attempt| format!("{run}.{attempt}"));
    let port = named.and_then(|leader| leader.port);
    let port = port
        .or_else(|| variable("MASTER_PORT")?.parse().ok())
        .unwrap_or_else(|| RendezvousEndpoint::port_of_run(&run));
    let endpoint = RendezvousEndpoint { host, port, listener, run, secret, ..RendezvousEndpoint::default() };
    let is_agents = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    let endpoint = if is_agents && !is_launched() { beside_agent(endpoint) } else { endpoint };
    let RendezvousEndpoint { host, port, listener, run, .. } = &endpoint;
    tracing::debug!(%host, port, %run, listens = listener.is_some(), "the rendezvous of the ranks");
    Ok(endpoint)
}

/// Returns the endpoint at ports of its own, for ranks of a torchrun whose agent itself listens at `MASTER_PORT`.
fn beside_agent(endpoint: RendezvousEndpoint) -> RendezvousEndpoint {
    let restart = variable("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
    let run = format!("{}.{}.{restart}", endpoint.run, endpoint.port);
    let mut ports =
        (0..AGENT_PORTS).map(|attempt| RendezvousEndpoint::port_of_run(&format!("{run}.{attempt}")));
    let port = ports.next().unwrap_or(endpoint.port);
    let fallback_ports = ports.collect();
    RendezvousEndpoint { port, fallback_ports, run, ..endpoint }
}

/// Returns the value of a variable that is set and not empty.
fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns the job's secret; `None` if it has none.
///
/// # Errors
/// If the secret file cannot be read or is not a valid secret.
pub fn secret() -> Result<Option<Secret>, CommError> {
    let path = env::var_os(SECRET_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    path.map(|path| Secret::from_file(&path)).transpose().map_err(CommError::Join)
}

/// Returns a name that is common to the ranks of a launcher and differs from that of other runs; empty if there is none.
fn job(launcher: Launcher) -> String {
    let join = |names: &[&str]| {
        let values: Vec<String> = names.iter().filter_map(|name| env::var(name).ok()).collect();
        values.join(".")
    };
    match launcher {
        Launcher::Slurm => join(&["SLURM_JOB_ID", "SLURM_STEP_ID"]),
        Launcher::OpenMpi => join(&["PMIX_NAMESPACE"]),
        // All ranks of a machine are children of one proxy.
        Launcher::Mpich => rustix::process::getppid().map_or(String::new(), |pid| pid.to_string()),
        Launcher::Torchrun | Launcher::Kubernetes => String::new(),
    }
}
