//! Runs over several machines: torchrun's flags and variables, and where the ranks of this machine stand among all.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use lockstep_comm::{
    CommError, DEFAULT_PORT, Deadline, MEETING_LIMIT, Meeting, Placement, SECRET_VARIABLE, meet_nodes, secret,
};

use crate::exit::Failure;

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
    /// File with the job's secret, on every machine; only you may read it. Needed where others can reach the ranks
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    secret_file: Option<PathBuf>,
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

/// Flags, and what stands for those that are not given.
struct Wishes {
    nnodes: usize,
    node: Option<usize>,
    endpoint: Option<(String, u16)>,
    run: String,
}

impl Nodes {
    /// Where `ranks` ranks of this machine stand among those of all machines, once all have come; `None` if there is only
    /// this one.
    pub(crate) fn meet(&self, ranks: usize) -> Result<Option<Placement>, Failure> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let wishes = self.wishes(&variable)?;
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
        let meeting = Meeting { host, port, listener: None, run: wishes.run, secret: self.secret()? };
        let deadline = Deadline::after(MEETING_LIMIT);
        Ok(Some(meet_nodes(meeting, wishes.node, wishes.nnodes, ranks, deadline)?))
    }

    /// Whether there are other machines.
    pub(crate) fn are_several(&self) -> bool {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        self.wishes(&variable).is_ok_and(|wishes| wishes.nnodes > 1)
    }

    /// The file with the secret, for the ranks.
    pub(crate) fn environment(&self) -> Vec<(std::ffi::OsString, std::ffi::OsString)> {
        self.secret_file.iter().map(|path| (SECRET_VARIABLE.into(), path.into())).collect()
    }

    fn secret(&self) -> Result<Option<lockstep_comm::Secret>, CommError> {
        match &self.secret_file {
            Some(path) => lockstep_comm::Secret::from_file(path).map(Some).map_err(CommError::Join),
            None => secret(),
        }
    }

    fn wishes(&self, variable: &dyn Fn(&str) -> Option<String>) -> Result<Wishes, Failure> {
        let nnodes = match (self.nnodes, variable("PET_NNODES")) {
            (Some(nnodes), _) => nnodes,
            (None, Some(text)) => {
                nodes(&text).map_err(|what| Failure::configuration(format!("PET_NNODES={text}: {what}")))?
            }
            (None, None) => 1,
        };
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
        let endpoint = match &self.rdzv_endpoint {
            Some(text) => Some(endpoint(text)?),
            None => {
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
}

/// `node1:29400`, `node1`, `[::1]:29400`.
fn endpoint(text: &str) -> Result<(String, u16), Failure> {
    let problem =
        || Failure::configuration(format!("--rdzv-endpoint {text}: HOST or HOST:PORT, as node1:29400"));
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
    };

    fn wishes(
        arguments: &Nodes,
        environment: &[(&str, &str)],
    ) -> (usize, Option<usize>, Option<(String, u16)>) {
        let variable = |name: &str| {
            environment.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())
        };
        let found = arguments.wishes(&variable).unwrap();
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
            assert_eq!(endpoint(text).ok(), expected, "{text}");
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
