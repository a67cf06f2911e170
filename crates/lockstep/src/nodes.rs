//! Runs over several machines: torchrun's flags and variables, and where the ranks of this machine stand among all.

use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::{Args, ValueHint};
use lockstep_comm::{
    CommError, DEFAULT_PORT, Deadline, JoinProblem, Meeting, NodeCard, NodesMet, PairingCode, Secret,
    TurnedAway, meet_nodes, secret,
};
use lockstep_train::interrupt::Interrupt;

use crate::exit::Failure;
use crate::hosts;
use crate::launching::{Launching, Variables, variable};
use crate::output::note;
use crate::ranks;

/// torchrun's own default port of a rendezvous.
const RENDEZVOUS_PORT: u16 = 29400;

/// Flags as torchrun has them, `_` for `-` included. Kubeflow's `PET_` variables stand for those that are not given.
#[derive(Debug, Args)]
pub(crate) struct Nodes {
    /// Machines that the run is started on, each by this command
    #[arg(long, value_name = "N", value_parser = nodes)]
    nnodes: Option<usize>,
    /// Number of this machine, from 0. Left out: the machine of --rdzv-endpoint is 0, the others are numbered as they come
    #[arg(long, value_name = "R", alias = "node_rank")]
    node_rank: Option<usize>,
    /// Where the machines meet: a name or address of node 0, and a port [default port: 29400]
    #[arg(long, value_name = "HOST:PORT", alias = "rdzv_endpoint")]
    rdzv_endpoint: Option<String>,
    /// Name of the run: machines with another one are turned away
    #[arg(long, value_name = "ID", alias = "rdzv_id")]
    rdzv_id: Option<String>,
    /// The host of --rdzv-endpoint, under torchrun's other name
    #[arg(long, value_name = "HOST", alias = "master_addr", conflicts_with = "rdzv_endpoint")]
    master_addr: Option<String>,
    /// The port of --rdzv-endpoint, under torchrun's other name
    #[arg(long, value_name = "PORT", alias = "master_port", conflicts_with = "rdzv_endpoint")]
    master_port: Option<u16>,
    /// File with the job's secret, on every machine; only you may read it. `-` is the first line of standard input, whose end
    /// then ends the run
    #[arg(long, value_name = "FILE", alias = "secret_file", value_hint = ValueHint::FilePath)]
    secret_file: Option<PathBuf>,
    /// The code that node 0 prints where there is no secret file; LOCKSTEP_PAIRING_CODE hides it from lists of processes
    #[arg(long, value_name = "CODE", alias = "pairing_code", conflicts_with = "secret_file")]
    pairing_code: Option<String>,
}

/// A number of machines. A range is for runs that may lose some of them, which this program does not know yet.
fn nodes(text: &str) -> Result<usize, String> {
    let count = |text: &str| text.parse().ok().filter(|count| *count > 0);
    match text.split_once(':') {
        Some((least, most)) if least == most => count(least),
        Some(_) => {
            return Err(
                "a range of nodes is for elastic runs, which are not built yet: give one number".to_owned()
            );
        }
        None => count(text),
    }
    .ok_or_else(|| "a number from 1".to_owned())
}

/// A wait that takes longer is told.
const LONG_WAIT: Duration = Duration::from_secs(5);

/// Runs `wait`, and says `text` as it is then if it takes long.
fn told_if_long<T>(text: impl FnOnce() -> String + Send, wait: impl FnOnce() -> T) -> T {
    let (over, is_over) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if is_over.recv_timeout(LONG_WAIT) == Err(mpsc::RecvTimeoutError::Timeout) {
                note!("{}", text());
            }
        });
        let found = wait();
        drop(over);
        found
    })
}

/// The variable that stands for `--pairing-code`.
const PAIRING_VARIABLE: &str = "LOCKSTEP_PAIRING_CODE";

/// The meeting of the launchers of a run: before every attempt, and after the last one.
pub(crate) struct Rendezvous {
    host: String,
    port: u16,
    run: String,
    secret: Option<Secret>,
    /// Number of this machine, as far as it is known.
    node: Option<usize>,
    nodes: usize,
    has_met: bool,
    /// Strangers that were turned away, of all meetings.
    turned_away: TurnedAway,
}

/// Between two tries to meet.
const RETRY: Duration = Duration::from_millis(100);
/// Time in which a replacement of a launcher may find the others still busy with the one before it.
const REPLACEMENT: Duration = Duration::from_secs(5);
/// Between two looks whether somebody has asked for a stop.
const LOOK: Duration = Duration::from_millis(20);

impl Rendezvous {
    /// Meets the launchers of all other machines with `card`, for at most `limit`. Gives up when `interrupt` is requested.
    pub(crate) fn meet(
        &mut self,
        card: NodeCard,
        limit: Duration,
        interrupt: Option<&Interrupt>,
    ) -> Result<NodesMet, Failure> {
        let deadline = Deadline::after(limit);
        let begin = Instant::now();
        let (address, nodes, seconds) = (format!("{}:{}", self.host, self.port), self.nodes, limit.as_secs());
        let turned_away = self.turned_away.clone();
        let told = move || {
            let strangers = if turned_away.count() > 0 { format!("; {turned_away}") } else { String::new() };
            format!("waiting for {nodes} machines at {address}, {seconds} s at most{strangers}")
        };
        let met = told_if_long(told, || {
            loop {
                let problem = match self.meet_once(card, deadline, interrupt) {
                    Ok(met) => return Ok(met),
                    Err(Unmet::Interrupted) => return Err(ranks::interrupted()),
                    Err(Unmet::Refused(problem)) => problem,
                };
                // The others may be on their way to this meeting, or wait for one that was replaced.
                let is_passing = match &problem {
                    CommError::Join(JoinProblem::Address { .. }) => self.has_met,
                    CommError::Join(
                        JoinProblem::Connection(_) | JoinProblem::HungUp | JoinProblem::Duplicate { .. },
                    ) => card.max_restarts > 0 && (self.has_met || begin.elapsed() < REPLACEMENT),
                    _ => false,
                };
                if !is_passing || deadline.remaining() <= RETRY {
                    return Err(problem.into());
                }
                std::thread::sleep(RETRY);
            }
        })?;
        self.has_met = true;
        self.node = Some(met.placement.node);
        Ok(met)
    }

    /// One try, in a thread of its own, so that a request for a stop is heard.
    fn meet_once(
        &self,
        card: NodeCard,
        deadline: Deadline,
        interrupt: Option<&Interrupt>,
    ) -> Result<NodesMet, Unmet> {
        let (host, run, secret) = (self.host.clone(), self.run.clone(), self.secret.clone());
        let turned_away = self.turned_away.clone();
        let meeting = Meeting { host, port: self.port, run, secret, turned_away, ..Meeting::default() };
        let (node, nodes) = (self.node, self.nodes);
        let (sender, receiver) = mpsc::channel();
        let talk = move || {
            // After a request for a stop nobody waits for it.
            let _ = sender.send(meet_nodes(meeting, node, nodes, card, deadline));
        };
        let spawned = std::thread::Builder::new().name("lockstep-meeting".to_owned()).spawn(talk);
        spawned.map_err(|source| Unmet::Refused(CommError::Io { what: "start a thread", source }))?;
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(met) => return met.map_err(Unmet::Refused),
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Unmet::Refused(CommError::Join(JoinProblem::HungUp)));
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            if interrupt.is_some_and(Interrupt::is_requested) {
                return Err(Unmet::Interrupted);
            }
        }
    }
}

/// Why launchers did not meet.
enum Unmet {
    /// Somebody has asked for a stop.
    Interrupted,
    /// What kept them from it.
    Refused(CommError),
}

/// Flags, and what stands for those that are not given.
struct Wishes {
    nnodes: usize,
    node: Option<usize>,
    endpoint: Option<(String, u16)>,
    run: String,
}

impl Nodes {
    /// Where the launchers of all machines meet; `None` if there is only this one.
    pub(crate) fn rendezvous(&self, launching: &Launching) -> Result<Option<Rendezvous>, Failure> {
        let wishes = self.wishes(&variable, launching)?;
        if wishes.nnodes == 1 && wishes.endpoint.is_none() {
            return Ok(None);
        }
        let Some((host, port)) = wishes.endpoint else {
            let message = format!(
                "--nnodes {} needs --rdzv-endpoint HOST:PORT, the same on every machine",
                wishes.nnodes
            );
            return Err(Failure::configuration(message));
        };
        let mut meeting = Meeting { host, port, run: wishes.run, ..Meeting::default() };
        meeting.secret = self.key(&meeting, wishes.node, wishes.nnodes, launching.limit)?;
        let Meeting { host, port, run, secret, turned_away, .. } = meeting;
        // The secret of a file, or of a pairing code, holds for all attempts.
        let (node, nodes) = (wishes.node, wishes.nnodes);
        Ok(Some(Rendezvous { host, port, run, secret, node, nodes, has_met: false, turned_away }))
    }

    /// Whether there are other machines.
    pub(crate) fn are_several(&self, launching: &Launching) -> bool {
        self.wishes(&variable, launching).is_ok_and(|wishes| wishes.nnodes > 1)
    }

    /// `--master-addr` and `--master-port`.
    pub(crate) fn master(&self) -> (Option<&str>, Option<u16>) {
        (self.master_addr.as_deref(), self.master_port)
    }

    /// A flag of these that is for one machine, if one was given.
    pub(crate) fn given_beside_hosts(&self) -> Option<&'static str> {
        let flags = [
            (self.nnodes.is_some(), "--nnodes"),
            (self.node_rank.is_some(), "--node-rank"),
            (self.rdzv_endpoint.is_some(), "--rdzv-endpoint"),
            (self.secret_file.is_some(), "--secret-file"),
            (self.pairing_code.is_some(), "--pairing-code"),
        ];
        flags.into_iter().find_map(|(is_given, name)| is_given.then_some(name))
    }

    /// A flag of these that asks for ranks to be started, if one was given.
    pub(crate) fn first_given(&self) -> Option<&'static str> {
        let flags = [
            (self.nnodes.is_some_and(|nodes| nodes > 1), "--nnodes"),
            (self.node_rank.is_some(), "--node-rank"),
            (self.rdzv_endpoint.is_some(), "--rdzv-endpoint"),
            (self.master_addr.is_some(), "--master-addr"),
            (self.master_port.is_some(), "--master-port"),
        ];
        flags.into_iter().find_map(|(is_given, name)| is_given.then_some(name))
    }

    /// The secret of `meeting`: that of the file, of the pairing code, or on node 0 of a new code, which it prints. `None` on
    /// loopback if neither was given: the launchers then know each other by their user.
    fn key(
        &self,
        meeting: &Meeting,
        node: Option<usize>,
        nodes: usize,
        limit: Duration,
    ) -> Result<Option<Secret>, Failure> {
        let code = self.pairing_code.clone().or_else(|| variable(PAIRING_VARIABLE));
        let given = match &self.secret_file {
            Some(path) if path.as_os_str() == "-" => Some(Secret::of(hosts::secret_from_stdin()?.as_bytes())),
            Some(path) => Some(Secret::from_file(path).map_err(CommError::Join)?),
            None if code.is_some() => None,
            None => secret()?,
        };
        if given.is_some() {
            return Ok(given);
        }
        let code = match code {
            Some(text) => PairingCode::parse(&text).ok_or_else(|| {
                Failure::configuration(
                    "the pairing code is not one: 20 letters and digits, as node 0 prints them (--pairing-code)",
                )
            })?,
            None if nodes > 1 && !meeting.is_local() && is_first(meeting, node)? => {
                let code = PairingCode::random().map_err(CommError::Join)?;
                let wait = limit.as_secs();
                note!("pairing code {code}");
                note!("within {wait} s give the other machines the same command with --pairing-code {code}");
                code
            }
            // The meeting itself tells where a secret is needed.
            None => return Ok(None),
        };
        Ok(Some(Secret::of(code.bytes())))
    }

    fn wishes(&self, variable: Variables<'_>, launching: &Launching) -> Result<Wishes, Failure> {
        let nnodes = match (self.nnodes, variable("PET_NNODES")) {
            (Some(nnodes), _) => nnodes,
            (None, Some(text)) => {
                nodes(&text).map_err(|what| Failure::configuration(format!("PET_NNODES={text}: {what}")))?
            }
            (None, None) => 1,
        };
        if launching.standalone {
            return self.alone(nnodes);
        }
        let number = |name: &'static str| {
            let value = variable(name).map(|text| text.parse::<usize>().map_err(|_| (name, text)));
            value
                .transpose()
                .map_err(|(name, text)| Failure::configuration(format!("{name}={text}: a number from 0")))
        };
        let mut node = self.node_rank;
        // Those who start one launcher on each machine number them.
        for name in ["PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"] {
            if node.is_none() && nnodes > 1 {
                node = number(name)?;
            }
        }
        let node = agreed(node, launching.node, nnodes)?;
        // A flag wins over the variables of both kinds.
        let has_master = self.master_addr.is_some() || self.master_port.is_some();
        let named = variable("PET_RDZV_ENDPOINT").filter(|_| !has_master);
        let endpoint = match (&self.rdzv_endpoint, named) {
            (Some(text), _) => Some(endpoint("--rdzv-endpoint ", text)?),
            (None, Some(text)) => Some(endpoint("PET_RDZV_ENDPOINT=", &text)?),
            (None, None) => {
                let host = self.master_addr.clone().or_else(|| variable("PET_MASTER_ADDR"));
                let host = host.or_else(|| variable("MASTER_ADDR").filter(|_| nnodes > 1));
                let port = number("PET_MASTER_PORT")?.or(number("MASTER_PORT")?);
                let port = port.map_or(Ok(DEFAULT_PORT), |port| {
                    u16::try_from(port)
                        .map_err(|_| Failure::configuration(format!("no port {port}: 1 to 65535")))
                });
                let port = self.master_port.map_or(port, Ok)?;
                host.map(|host| (host, port))
            }
        };
        let run = self.rdzv_id.clone().or_else(|| variable("PET_RDZV_ID")).unwrap_or_default();
        Ok(Wishes { nnodes, node, endpoint, run })
    }

    /// `--standalone`.
    fn alone(&self, nnodes: usize) -> Result<Wishes, Failure> {
        if nnodes > 1 {
            return Err(Failure::configuration(format!(
                "--standalone is one machine, and --nnodes (or PET_NNODES) says {nnodes}: leave one of them out"
            )));
        }
        if let Some(rank) = self.node_rank.filter(|rank| *rank > 0) {
            return Err(out_of_nodes(rank, 1));
        }
        Ok(Wishes { nnodes: 1, node: None, endpoint: None, run: self.rdzv_id.clone().unwrap_or_default() })
    }
}

/// Whether this machine is node 0.
fn is_first(meeting: &Meeting, node: Option<usize>) -> Result<bool, CommError> {
    match node {
        Some(node) => Ok(node == 0),
        // Of several launchers on one machine the one that listens is the first.
        None => Ok(meeting.is_here()? && !meeting.port_is_taken()),
    }
}

/// The number of this machine by `--node-rank` (or who stands for it) and by `--rdzv-conf`.
fn agreed(node: Option<usize>, by_conf: Option<usize>, nnodes: usize) -> Result<Option<usize>, Failure> {
    match (node, by_conf) {
        (Some(node), Some(other)) if node != other => Err(Failure::configuration(format!(
            "--node-rank says node {node}, and rank or is_host of --rdzv-conf node {other}: leave one of them out"
        ))),
        (Some(node), _) | (None, Some(node)) if node >= nnodes => Err(out_of_nodes(node, nnodes)),
        (node, by_conf) => Ok(node.or(by_conf)),
    }
}

fn out_of_nodes(node: usize, nnodes: usize) -> Failure {
    Failure::configuration(format!(
        "--node-rank {node}: node {node} is not below the number of nodes, {nnodes} (--nnodes)"
    ))
}

/// `node1:29400`, `node1`, `[::1]:29400`; `name` says who gave it.
fn endpoint(name: &str, text: &str) -> Result<(String, u16), Failure> {
    let problem = || Failure::configuration(format!("{name}{text}: HOST or HOST:PORT, as node1:29400"));
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
            (host, port.parse().ok().filter(|port| *port > 0).ok_or_else(problem)?)
        }
        _ => (text, RENDEZVOUS_PORT),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if host.is_empty() { Err(problem()) } else { Ok((host.to_owned(), port)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Nodes = Nodes {
        nnodes: None,
        node_rank: None,
        rdzv_endpoint: None,
        rdzv_id: None,
        master_addr: None,
        master_port: None,
        secret_file: None,
        pairing_code: None,
    };

    fn wishes(
        arguments: &Nodes,
        environment: &[(&str, &str)],
    ) -> (usize, Option<usize>, Option<(String, u16)>) {
        let variable = |name: &str| {
            environment.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())
        };
        let found = arguments.wishes(&variable, &Launching::default()).unwrap();
        (found.nnodes, found.node, found.endpoint)
    }

    #[test]
    fn endpoints_are_read_as_torchrun_reads_them() {
        let table = [
            ("node1:29400", Some(("node1", 29400))),
            ("node1", Some(("node1", 29400))),
            ("10.0.0.1:5", Some(("10.0.0.1", 5))),
            ("[::1]:7", Some(("::1", 7))),
            ("::1", Some(("::1", 29400))),
            ("node1:0", None),
            ("node1:x", None),
            (":7", None),
        ];
        for (text, expected) in table {
            let expected = expected.map(|(host, port)| (host.to_owned(), port));
            assert_eq!(endpoint("", text).ok(), expected, "{text}");
        }
    }

    #[test]
    fn variables_stand_for_flags_that_are_not_given() {
        assert_eq!(wishes(&NONE, &[("MASTER_ADDR", "a"), ("SLURM_NODEID", "3")]), (1, None, None));
        let pet =
            [("PET_NNODES", "2"), ("PET_NODE_RANK", "1"), ("PET_MASTER_ADDR", "a"), ("PET_MASTER_PORT", "7")];
        assert_eq!(wishes(&NONE, &pet), (2, Some(1), Some(("a".to_owned(), 7))));
        let flags =
            Nodes { nnodes: Some(4), node_rank: Some(2), rdzv_endpoint: Some("b:9".to_owned()), ..NONE };
        assert_eq!(wishes(&flags, &pet), (4, Some(2), Some(("b".to_owned(), 9))));
        let slurm = Nodes { nnodes: Some(4), ..NONE };
        let step = [("SLURM_NODEID", "3"), ("MASTER_ADDR", "c")];
        assert_eq!(wishes(&slurm, &step), (4, Some(3), Some(("c".to_owned(), DEFAULT_PORT))));
    }

    #[test]
    fn a_range_of_nodes_is_refused_and_one_of_a_single_number_is_not() {
        assert_eq!(nodes("4"), Ok(4));
        assert_eq!(nodes("4:4"), Ok(4));
        assert!(nodes("1:4").unwrap_err().contains("elastic"));
        for text in ["0", "", "x", "4:", "-1"] {
            assert!(nodes(text).is_err(), "{text}");
        }
    }
}
