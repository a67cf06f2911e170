//! How a process finds the other ranks when somebody has started it as one of them: our own launcher, on one machine or on
//! several, or a launcher that only sets variables (torchrun, `mpirun`, `srun`).

use std::{env, net::TcpListener, path::PathBuf, time::Duration};

use crate::{
    CommError, Deadline, Group, JoinProblem, MpiOptions, call,
    environment::{self, Launcher, ProcessPlace},
    join_mpi, launch, shm,
    tcp::{self, Meeting, Secret, TcpOptions},
    world,
};

/// The variable that names the file with the job's secret; our own launcher names a descriptor that its ranks inherit.
pub const SECRET_VARIABLE: &str = "LOCKSTEP_SECRET_FILE";
/// The variable with the number of a socket that rank 0 inherits.
pub(crate) const LISTENER_VARIABLE: &str = "LOCKSTEP_LISTENER_FD";
/// Where ranks meet if nobody says: torchrun's port.
pub const DEFAULT_PORT: u16 = 29500;
/// Ports for launchers that name a job, but no port.
const JOB_PORTS: std::ops::Range<u16> = 20_000..29_000;

/// Ports that ranks try in turn where a launcher of others has taken the one that it names.
const AGENT_PORTS: usize = 8;

/// How long ranks of several machines may take to come.
pub const MEETING_LIMIT: Duration = Duration::from_secs(300);

/// How ranks reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Way {
    /// By shared memory where all are on one machine and our launcher has started them, else by TCP.
    #[default]
    Auto,
    /// By shared memory: all are on one machine.
    SharedMemory,
    /// By TCP, wherever they are.
    Tcp,
    /// By MPI, which knows where they are.
    Mpi,
}

/// What a rank brings when it joins the others.
#[derive(Debug, Clone, Copy, Default)]
pub struct JoinOptions {
    /// How they reach each other.
    pub way: Way,
    /// What it says over TCP.
    pub tcp: TcpOptions,
    /// How it talks over MPI.
    pub mpi: MpiOptions,
}

/// The place of this process among those that were started with it; `None` if it was started alone.
///
/// # Errors
/// [`JoinProblem::Environment`].
pub fn place() -> Result<Option<ProcessPlace>, CommError> {
    let variable = |name: &str| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let place = environment::detect(&variable);
    let place = place.map_err(|problem| CommError::Join(JoinProblem::Environment(problem)))?;
    Ok(place.filter(|place| place.world_size.is_some_and(|ranks| ranks > 1) || is_launched()))
}

/// Whether our own launcher has started this process.
pub fn is_launched() -> bool {
    env::var_os(world::SOCKET_VARIABLE).is_some()
}

/// Joins the ranks that this process was started with; `None` if it was started alone.
///
/// # Errors
/// [`CommError::Join`] if they cannot come together, [`CommError::TimedOut`] if one of them does not come.
pub fn join_from_environment(options: JoinOptions, deadline: Deadline) -> Result<Option<Group>, CommError> {
    if options.way == Way::Mpi {
        return join_mpi(options.mpi).map(Some);
    }
    let Some(place) = place()? else { return Ok(None) };
    let ranks = place.world_size.or(place.local_size).unwrap_or(1);
    let are_near = place.local_size == Some(ranks);
    if options.way == Way::SharedMemory && !(are_near && is_launched()) {
        return Err(CommError::Join(JoinProblem::NoSharedMemory { launcher: place.launcher }));
    }
    tracing::debug!(
        launcher = %place.launcher, rank = place.rank, ranks, local_ranks = place.local_size, way = ?options.way, "joining the other ranks"
    );
    let Some(socket) = world::inherited_socket()? else {
        let meeting = meeting(&place, are_near)?;
        let pin = launch::pin_to_share;
        return tcp::join_with(place.rank, ranks, meeting, options.tcp, None, pin, deadline).map(Some);
    };
    if are_near && options.way != Way::Tcp {
        tracing::debug!("all ranks are on this machine: shared memory");
        return world::join(&socket, deadline).map(Some);
    }
    let local: shm::Machine = world::enter(&socket, deadline)?;
    let meeting = meeting(&place, are_near)?;
    // The launcher has pinned it.
    tcp::join_with(place.rank, ranks, meeting, options.tcp, Some(local), |_, _| {}, deadline).map(Some)
}

/// Where the ranks of `place` meet.
fn meeting(place: &ProcessPlace, are_near: bool) -> Result<Meeting, CommError> {
    let named = place.leader.clone().filter(|leader| leader.port.is_some() || !are_near);
    let host = variable("MASTER_ADDR").or_else(|| named.as_ref().map(|leader| leader.host.clone()));
    let listener = world::inherited(LISTENER_VARIABLE)?.map(TcpListener::from);
    let secret = secret()?;
    let host = match host {
        // Where all ranks are here, nobody else has to reach them: torchrun names this machine all the same, and without a secret
        // only loopback will do.
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
        None => return Err(CommError::Join(JoinProblem::NoLeader { launcher: place.launcher })),
    };
    let run = variable("TORCHELASTIC_RUN_ID").unwrap_or_else(|| job(place.launcher));
    // A rank that an earlier attempt has left behind belongs to another run.
    let attempt = variable("TORCHELASTIC_RESTART_COUNT").filter(|_| is_launched());
    let run = attempt.map_or(run.clone(), |attempt| format!("{run}.{attempt}"));
    let port = named.and_then(|leader| leader.port);
    let port = port.or_else(|| variable("MASTER_PORT")?.parse().ok()).unwrap_or_else(|| port_of(&run));
    let meeting = Meeting { host, port, listener, run, secret, ..Meeting::default() };
    let is_agents = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    let meeting = if is_agents && !is_launched() { beside_agent(meeting) } else { meeting };
    let Meeting { host, port, listener, run, .. } = &meeting;
    tracing::debug!(%host, port, %run, listens = listener.is_some(), "the rendezvous of the ranks");
    Ok(meeting)
}

/// The same meeting at ports of its own, for ranks of a torchrun whose agent listens at `MASTER_PORT` itself.
fn beside_agent(meeting: Meeting) -> Meeting {
    let restart = variable("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
    let run = format!("{}.{}.{restart}", meeting.run, meeting.port);
    let mut ports = (0..AGENT_PORTS).map(|attempt| port_of(&format!("{run}.{attempt}")));
    let port = ports.next().unwrap_or(meeting.port);
    let fallback_ports = ports.collect();
    Meeting { port, fallback_ports, run, ..meeting }
}

/// A variable that is set, and not empty.
fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// The job's secret, if there is one.
///
/// # Errors
/// [`JoinProblem::SecretFile`].
pub fn secret() -> Result<Option<Secret>, CommError> {
    let path = env::var_os(SECRET_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    path.map(|path| Secret::from_file(&path)).transpose().map_err(CommError::Join)
}

/// A name that the ranks of a launcher share, and those of another run do not; empty if there is none.
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

fn port_of(job: &str) -> u16 {
    if job.is_empty() {
        return DEFAULT_PORT;
    }
    let hash = call::hash(job.bytes().map(usize::from));
    JOB_PORTS.start + (hash % u64::from(JOB_PORTS.end - JOB_PORTS.start)) as u16
}
