//! Runs over several machines: torchrun's rendezvous flags and variables, and the position of this machine's ranks among all.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use lockstep_comm::{CommError, DEFAULT_PORT, PairingCode, RendezvousEndpoint, Secret};
use lockstep_launch::rendezvous::Rendezvous;
use lockstep_launch::{MEETING_LIMIT, secret};

use crate::exit::Failure;
use crate::launching::{Launching, Variables, variable};
use crate::output::note;
use crate::stdin_secret;

/// torchrun's default port of a rendezvous.
const RENDEZVOUS_PORT: u16 = 29400;

/// torchrun's flags; `_` may be written for `-`. Kubeflow's `PET_` variables replace flags that are not given.
#[derive(Debug, Args)]
pub(crate) struct Nodes {
    /// Number of machines of the run; each starts this command
    #[arg(long, value_name = "N", value_parser = nodes)]
    nnodes: Option<usize>,
    /// Number of this machine, from 0 [default: 0 on the machine of --rdzv-endpoint, the others in order of arrival]
    #[arg(long, value_name = "R", alias = "node_rank")]
    node_rank: Option<usize>,
    /// Rendezvous: name or address of node 0, and a port [default port: 29400]
    #[arg(long, value_name = "HOST:PORT", alias = "rdzv_endpoint")]
    rdzv_endpoint: Option<String>,
    /// Name of the run: machines with another name are rejected
    #[arg(long, value_name = "ID", alias = "rdzv_id")]
    rdzv_id: Option<String>,
    /// Host of --rdzv-endpoint, under torchrun's other name
    #[arg(long, value_name = "HOST", alias = "master_addr", conflicts_with = "rdzv_endpoint")]
    master_addr: Option<String>,
    /// Port of --rdzv-endpoint, under torchrun's other name
    #[arg(long, value_name = "PORT", alias = "master_port", conflicts_with = "rdzv_endpoint")]
    master_port: Option<u16>,
    /// File with the job's secret, on every machine, readable by you alone. `-` is the first line of standard input, whose end
    /// then ends the run
    #[arg(long, value_name = "FILE", alias = "secret_file", value_hint = ValueHint::FilePath)]
    secret_file: Option<PathBuf>,
    /// Code that node 0 prints if there is no secret file; LOCKSTEP_PAIRING_CODE hides it from process lists
    #[arg(long, value_name = "CODE", alias = "pairing_code", conflicts_with = "secret_file")]
    pairing_code: Option<String>,
}

/// Parses a number of machines. A range is for elastic runs, which are not supported yet.
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

/// Variable in place of `--pairing-code`.
const PAIRING_VARIABLE: &str = "LOCKSTEP_PAIRING_CODE";

/// Values of the flags, or of the variables in their place.
struct Wishes {
    nnodes: usize,
    node: Option<usize>,
    endpoint: Option<(String, u16)>,
    run: String,
}

impl Nodes {
    /// Returns the rendezvous of the launchers of all machines; `None` if there is only this one.
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
        let mut endpoint =
            RendezvousEndpoint { host, port, run: wishes.run, ..RendezvousEndpoint::default() };
        endpoint.secret =
            self.key(&endpoint, wishes.node, wishes.nnodes, launching.limit.unwrap_or(MEETING_LIMIT))?;
        Ok(Some(Rendezvous::new(endpoint, wishes.node, wishes.nnodes)))
    }

    /// Returns true if the run has other machines.
    pub(crate) fn are_several(&self, launching: &Launching) -> bool {
        self.wishes(&variable, launching).is_ok_and(|wishes| wishes.nnodes > 1)
    }

    /// Returns `--master-addr` and `--master-port`.
    pub(crate) fn master(&self) -> (Option<&str>, Option<u16>) {
        (self.master_addr.as_deref(), self.master_port)
    }

    /// Returns the name of a given flag that is for one machine, if there is one.
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

    /// Returns the name of a given flag that asks for ranks to be started, if there is one.
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

    /// Returns the secret of `endpoint`: from the file, from the pairing code, or on node 0 from a new code, which it prints.
    /// `None` on loopback if neither was given: the launchers then authenticate each other by user id.
    fn key(
        &self,
        endpoint: &RendezvousEndpoint,
        node: Option<usize>,
        nodes: usize,
        limit: Duration,
    ) -> Result<Option<Secret>, Failure> {
        let code = self.pairing_code.clone().or_else(|| variable(PAIRING_VARIABLE));
        let given = match &self.secret_file {
            Some(path) if path.as_os_str() == "-" => Some(Secret::of(stdin_secret::read()?.as_bytes())),
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
            None if nodes > 1 && !endpoint.is_local() && is_first(endpoint, node)? => {
                let code = PairingCode::random().map_err(CommError::Join)?;
                let wait = limit.as_secs();
                note!("pairing code {code}");
                note!("within {wait} s give the other machines the same command with --pairing-code {code}");
                code
            }
            // The rendezvous itself reports if a secret is needed.
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
        // Launchers with one process per machine number the machines.
        for name in ["PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"] {
            if node.is_none() && nnodes > 1 {
                node = number(name)?;
            }
        }
        let node = agreed(node, launching.node, nnodes)?;
        // A flag overrides the variables of both kinds.
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

    /// Resolves the flags of a run with `--standalone`.
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

/// Returns true if this machine is node 0.
fn is_first(endpoint: &RendezvousEndpoint, node: Option<usize>) -> Result<bool, CommError> {
    match node {
        Some(node) => Ok(node == 0),
        // Among several launchers on one machine, the one that listens first is node 0.
        None => Ok(endpoint.is_here()? && !endpoint.port_is_taken()),
    }
}

/// Reconciles the number of this machine from `--node-rank` (or a variable in its place) and from `--rdzv-conf`.
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

/// Parses `node1:29400`, `node1` or `[::1]:29400`; `name` is the flag or variable, for the error.
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
