//! DeepSpeed's hostfile: the machines of a run with their slots, and the filters that choose among them.

use std::collections::BTreeSet;

/// Reason why a hostfile or a filter is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HostfileProblem(String);

/// A machine and the numbers of its slots in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Name of the machine, as `HOST` or `USER@HOST`.
    pub name: String,
    /// Numbers of its slots in use, from 0.
    pub slots: BTreeSet<usize>,
}

impl Host {
    /// Returns the name without a user: `host` of `user@host`.
    pub fn address(&self) -> &str {
        self.name.rsplit_once('@').map_or(&self.name, |(_, host)| host)
    }
}

/// Choice among the hosts of a file.
#[derive(Debug, Clone, Copy, Default)]
pub struct Selection<'a> {
    /// Hosts and slots to use, as `h1@h2:0,2`.
    pub include: Option<&'a str>,
    /// Hosts and slots not to use.
    pub exclude: Option<&'a str>,
    /// Number of hosts to use, from the first on.
    pub num_nodes: Option<usize>,
    /// Number of ranks on each host, whatever its slots.
    pub num_gpus: Option<usize>,
}

impl Selection<'_> {
    /// Returns the hosts and slots of the file that it selects.
    ///
    /// # Errors
    /// If a filter names a host or slot that is not in the file, or leaves no host.
    pub fn chosen(&self, mut hosts: Vec<Host>) -> Result<Vec<Host>, HostfileProblem> {
        if let Some(filter) = &self.include {
            let chosen = filtered(filter, &hosts)?;
            // The order of the file is kept.
            hosts.retain_mut(|host| {
                let found = chosen.iter().find(|(name, _)| *name == host.name);
                if let Some((_, Some(slots))) = found {
                    host.slots.clone_from(slots);
                }
                found.is_some()
            });
        }
        if let Some(filter) = &self.exclude {
            for (name, slots) in filtered(filter, &hosts)? {
                for host in hosts.iter_mut().filter(|host| host.name == name) {
                    host.slots.retain(|slot| slots.as_ref().is_some_and(|slots| !slots.contains(slot)));
                }
            }
            hosts.retain(|host| !host.slots.is_empty());
        }
        if let Some(nodes) = self.num_nodes {
            if nodes == 0 || nodes > hosts.len() {
                return Err(HostfileProblem(format!("--num-nodes {nodes}: it has {} hosts", hosts.len())));
            }
            hosts.truncate(nodes);
        }
        if let Some(ranks) = self.num_gpus {
            if ranks == 0 {
                return Err(HostfileProblem("--num-gpus 0: a number from 1".to_owned()));
            }
            hosts.iter_mut().for_each(|host| host.slots = (0..ranks).collect());
        }
        if hosts.is_empty() {
            Err(HostfileProblem("no host is left to start on".to_owned()))
        } else {
            Ok(hosts)
        }
    }
}

/// Parses lines `HOST slots=N`; empty lines and comments are skipped.
///
/// # Errors
/// If a line has another form, if a host occurs twice, or if there is none.
pub fn parse(text: &str) -> Result<Vec<Host>, HostfileProblem> {
    let mut hosts: Vec<Host> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let number = index + 1;
        let mut words = line.split_whitespace();
        let (name, slots) =
            (words.next().unwrap_or_default(), words.next().and_then(|word| word.strip_prefix("slots=")));
        let slots =
            slots.and_then(|slots| slots.parse::<usize>().ok()).filter(|slots| (1..=1024).contains(slots));
        let Some(slots) = slots else {
            return Err(HostfileProblem(format!(
                "line {number}, {line:?}: HOST slots=N, as worker-1 slots=8"
            )));
        };
        if name.starts_with('-') {
            return Err(HostfileProblem(format!("line {number}: {name:?} is no name of a host")));
        }
        if hosts.iter().any(|host| host.name == name) {
            return Err(HostfileProblem(format!(
                "line {number}: {name} is there twice; give it all its slots in one line"
            )));
        }
        hosts.push(Host { name: name.to_owned(), slots: (0..slots).collect() });
    }
    if hosts.is_empty() {
        Err(HostfileProblem("it names no host; its lines are HOST slots=N".to_owned()))
    } else {
        Ok(hosts)
    }
}

/// Hosts of a filter, with their slots if it names any: `h1@h2:0,2`.
type Filtered = Vec<(String, Option<BTreeSet<usize>>)>;

fn filtered(filter: &str, hosts: &[Host]) -> Result<Filtered, HostfileProblem> {
    filter
        .split('@')
        .map(|part| {
            let (name, slots) =
                part.split_once(':').map_or((part, None), |(name, slots)| (name, Some(slots)));
            let Some(host) = hosts.iter().find(|host| host.name == name) else {
                let known: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
                return Err(HostfileProblem(format!(
                    "no host {name:?} ({filter}); hosts are {}",
                    known.join(", ")
                )));
            };
            let parse = |slot: &str| {
                let slot = slot.trim().parse().ok().filter(|slot| host.slots.contains(slot));
                slot.ok_or_else(|| {
                    HostfileProblem(format!("{filter}: {name} has slots 0 to {}", host.slots.len() - 1))
                })
            };
            let slots = slots.map(|slots| slots.split(',').map(parse).collect()).transpose()?;
            Ok((name.to_owned(), slots))
        })
        .collect()
}
