//! Runs on other machines started by this command over ssh, from a hostfile with DeepSpeed's filters.
//!
//! Each host gets one command by `ssh -o BatchMode=yes`. The run's secret is sent over its standard input, never in its
//! arguments. The end of that input ends the command on the host, so no process has to be killed remotely.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueHint};
use lockstep_comm::{DEFAULT_PORT, PairingCode};
use lockstep_launch::hostfile::{Host, HostfileProblem, Selection, parse};
use lockstep_launch::interrupt::Interrupt;
use lockstep_launch::ssh::{Remote, quoted, watch};

use crate::exit::{FAILED, Failure};
use crate::nodes::Nodes;
use crate::output::note;

const HEADING: &str = "Starting ranks on other machines, as DeepSpeed does";
/// Flags of DeepSpeed's launcher.
#[derive(Debug, Args)]
pub(crate) struct Hosts {
    /// Start the run over ssh on the machines of this file, whose lines are HOST slots=N
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = HEADING)]
    hostfile: Option<PathBuf>,
    /// Hosts and slots of the file to use: h1@h2:0,2
    #[arg(long, value_name = "HOSTS", conflicts_with = "exclude", help_heading = HEADING)]
    include: Option<String>,
    /// Hosts and slots of the file not to use
    #[arg(long, value_name = "HOSTS", help_heading = HEADING)]
    exclude: Option<String>,
    /// Use the first N hosts of the file
    #[arg(long, value_name = "N", alias = "num_nodes", conflicts_with_all = ["include", "exclude"], help_heading = HEADING)]
    num_nodes: Option<usize>,
    /// Ranks on each host, whatever its slots
    #[arg(long, value_name = "N", alias = "num_gpus", conflicts_with_all = ["include", "exclude"], help_heading = HEADING)]
    num_gpus: Option<usize>,
    /// Program that runs a command on a host, as ssh does
    #[arg(long, value_name = "PROGRAM", default_value = "ssh", help_heading = HEADING)]
    ssh: String,
}

impl Hosts {
    /// Starts this command on all hosts and waits for its end; `None` if there is no hostfile.
    pub(crate) fn run(
        &self,
        ranks: Option<usize>,
        nodes: &Nodes,
        is_started: bool,
    ) -> Result<Option<ExitCode>, Failure> {
        let Some(path) = &self.hostfile else {
            let filters = [
                (self.include.is_some(), "--include"),
                (self.exclude.is_some(), "--exclude"),
                (self.num_nodes.is_some(), "--num-nodes"),
                (self.num_gpus.is_some(), "--num-gpus"),
            ];
            return match filters.into_iter().find(|(is_given, _)| *is_given) {
                None => Ok(None),
                Some((_, name)) => Err(Failure::configuration(format!(
                    "{name} chooses among the hosts of --hostfile: give one; on this machine alone, --nproc-per-node N says how many ranks"
                ))),
            };
        };
        if is_started {
            return Err(Failure::configuration(
                "--hostfile starts machines, and this process is a rank that another launcher has started: leave --hostfile out",
            ));
        }
        if let Some(flag) = nodes.given_beside_hosts() {
            return Err(Failure::configuration(format!(
                "{flag} is what --hostfile says of each machine: leave {flag} out, or start each machine by hand"
            )));
        }
        if ranks.is_some() {
            return Err(Failure::configuration(
                "--nproc-per-node and --hostfile both say how many ranks a machine has: leave one out, or give --num-gpus",
            ));
        }
        let text = std::fs::read_to_string(path).map_err(|error| {
            Failure::configuration(format!("cannot read the hostfile {}: {error}", path.display()))
        })?;
        let problem = |what: HostfileProblem| Failure::configuration(format!("{}: {what}", path.display()));
        let hosts = parse(&text).and_then(|hosts| self.selection().chosen(hosts)).map_err(problem)?;
        self.start(&hosts, nodes.master()).map(Some)
    }

    /// Returns the choice among the hosts of the file.
    fn selection(&self) -> Selection<'_> {
        Selection {
            include: self.include.as_deref(),
            exclude: self.exclude.as_deref(),
            num_nodes: self.num_nodes,
            num_gpus: self.num_gpus,
        }
    }

    fn start(&self, hosts: &[Host], master: (Option<&str>, Option<u16>)) -> Result<ExitCode, Failure> {
        let failed = |error: &dyn std::fmt::Display| Failure { message: error.to_string(), code: FAILED };
        let (address, port) =
            (master.0.unwrap_or_else(|| hosts[0].address()), master.1.unwrap_or(DEFAULT_PORT));
        let here = std::env::current_dir().map_err(|error| failed(&error))?;
        let program = std::env::current_exe().map_err(|error| failed(&error))?;
        let arguments: Vec<String> =
            std::env::args_os().skip(1).map(|text| text.to_string_lossy().into()).collect();
        let secret = PairingCode::random().map_err(|error| failed(&error))?;
        let interrupt = Interrupt::on_signals()?;
        let mut remotes = Vec::new();
        for (node, host) in hosts.iter().enumerate() {
            let mut command = vec![program.to_string_lossy().into_owned()];
            command.extend(without_hosts(&arguments));
            command.extend([
                format!("--nnodes={}", hosts.len()),
                format!("--node-rank={node}"),
                format!("--rdzv-endpoint={address}:{port}"),
                format!("--nproc-per-node={}", host.slots.len()),
                "--secret-file=-".to_owned(),
            ]);
            let command: Vec<String> = command.iter().map(|argument| quoted(argument)).collect();
            let line = format!("cd {} && exec {}", quoted(&here.to_string_lossy()), command.join(" "));
            remotes.push(Remote::connect(&self.ssh, &host.name, &line, &secret)?);
        }
        let names: Vec<String> =
            hosts.iter().map(|host| format!("{} ({})", host.name, host.slots.len())).collect();
        note!("hosts      {}", names.join(", "));
        let code = watch(remotes, &interrupt)?;
        Ok(ExitCode::from(code as u8))
    }
}

/// Returns the arguments for the other machines: all except those of this module.
fn without_hosts(arguments: &[String]) -> Vec<String> {
    let own =
        ["hostfile", "include", "exclude", "num-nodes", "num-gpus", "ssh", "master-addr", "master-port"];
    let mut kept = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let (name, value) =
            argument.split_once('=').map_or((argument.as_str(), None), |(name, value)| (name, Some(value)));
        let is_own =
            name.strip_prefix("--").is_some_and(|name| own.contains(&name.replace('_', "-").as_str()));
        if !is_own {
            kept.push(argument.clone());
        } else if value.is_none() {
            // The value is the next argument.
            arguments.next();
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(flags: &[&str], text: &str) -> Result<Vec<(String, Vec<usize>)>, String> {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            hosts: Hosts,
        }
        let line = <Line as clap::Parser>::try_parse_from([&["x"], flags].concat()).unwrap();
        let hosts = parse(text).and_then(|hosts| line.hosts.selection().chosen(hosts));
        let hosts = hosts.map_err(|problem| problem.to_string())?;
        Ok(hosts.into_iter().map(|host| (host.name, host.slots.into_iter().collect())).collect())
    }

    const FILE: &str = "# a comment\n\nh1 slots=2\nroot@h2  slots=4 # more\nh3 slots=1\n";

    #[test]
    fn hosts_are_chosen_as_deepspeed_chooses_them() {
        /// Flags, and the expected hosts with their slots.
        type Case = (&'static [&'static str], &'static [(&'static str, &'static [usize])]);
        let table: [Case; 7] = [
            (&[], &[("h1", &[0, 1]), ("root@h2", &[0, 1, 2, 3]), ("h3", &[0])]),
            (&["--include", "h3@h1"], &[("h1", &[0, 1]), ("h3", &[0])]),
            (&["--include", "h1:1"], &[("h1", &[1])]),
            (&["--exclude", "h1:0@h3"], &[("h1", &[1]), ("root@h2", &[0, 1, 2, 3])]),
            (&["--num_nodes", "2"], &[("h1", &[0, 1]), ("root@h2", &[0, 1, 2, 3])]),
            (&["--num_nodes=1", "--num_gpus=3"], &[("h1", &[0, 1, 2])]),
            (&["--exclude", "h1"], &[("root@h2", &[0, 1, 2, 3]), ("h3", &[0])]),
        ];
        for (flags, expected) in table {
            let expected: Vec<_> =
                expected.iter().map(|(name, slots)| ((*name).to_owned(), slots.to_vec())).collect();
            assert_eq!(chosen(flags, FILE).unwrap(), expected, "{flags:?}");
        }
    }

    #[test]
    fn mistakes_in_a_hostfile_or_a_filter_are_told() {
        let table: [(&[&str], &str, &str); 9] = [
            (&[], "", "names no host"),
            (&[], "h1\n", "line 1"),
            (&[], "h1 slots=2\nh2 slots=two", "line 2"),
            (&[], "h1 slots=2\nh1 slots=2", "line 2: h1 is there twice"),
            (&[], "-oProxyCommand=x slots=1", "no name of a host"),
            (&["--include", "h9"], FILE, "hosts are h1, root@h2, h3"),
            (&["--exclude", "h1:2"], FILE, "h1 has slots 0 to 1"),
            (&["--exclude", "h1@root@h2@h3"], FILE, "no host \"root\""),
            (&["--num-nodes", "4"], FILE, "it has 3 hosts"),
        ];
        for (flags, text, part) in table {
            let message = chosen(flags, text).unwrap_err();
            assert!(message.contains(part), "{flags:?} {text:?}: {message}");
        }
    }

    #[test]
    fn arguments_go_to_other_machines_whole_and_without_those_for_this_one() {
        let arguments =
            ["train", "a b.toml", "--hostfile=h", "--num_nodes", "2", "--set", "x.y='1'", "--ssh", "s"];
        let kept = without_hosts(&arguments.map(str::to_owned));
        assert_eq!(kept, ["train", "a b.toml", "--set", "x.y='1'"]);
        assert_eq!(quoted("a b.toml"), "'a b.toml'");
        assert_eq!(quoted("x.y='1'"), r"'x.y='\''1'\'''");
        assert_eq!(quoted("--nnodes=2"), "--nnodes=2");
    }
}
