//! torchrun's flags for starting ranks, each with its environment variable: `--rdzv-conf` and `PET_RDZV_CONF`. The command line
//! overrides the variables. Flags without effect are accepted and reported once.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, ValueHint};
use lockstep_launch::{Output, Route, Routing, automatic_ranks};

use crate::exit::{Failure, MISSING};

const HEADING: &str = "Starting ranks, as torchrun does";
/// Maximum number of restarts that may be asked for.
const RESTART_LIMIT: usize = 1000;
/// Maximum wait for other machines, in seconds.
const WAIT_LIMIT: u64 = 86_400;
/// Standard output, in torchrun's bit mask of streams.
const OUT: u8 = 1;
/// Standard error, in the same bit mask.
const ERR: u8 = 2;

/// torchrun's flags; `_` may be written for `-`.
#[derive(Debug, Default, Args)]
pub(crate) struct Flags {
    /// Ranks on this machine: a number, auto (one for each memory node if there are several, otherwise for each core) or cpu (one for
    /// each core); gpu is for builds that compute on GPUs
    #[arg(long, value_name = "N|auto|cpu", alias = "nproc_per_node", help_heading = HEADING)]
    nproc_per_node: Option<String>,
    /// Run on this machine alone, whatever else says where machines meet
    #[arg(long, help_heading = HEADING)]
    standalone: bool,
    /// Rendezvous backend: c10d or static, which are the same here
    #[arg(long, value_name = "NAME", alias = "rdzv_backend", help_heading = HEADING)]
    rdzv_backend: Option<String>,
    /// Settings of the rendezvous: join_timeout=SECONDS, rank=R, is_host=true
    #[arg(long, value_name = "KEY=VALUE,...", alias = "rdzv_conf", help_heading = HEADING)]
    rdzv_conf: Option<String>,
    /// Restart all ranks from the last checkpoint after a failure, at most N times
    #[arg(long, value_name = "N", alias = "max_restarts", help_heading = HEADING)]
    max_restarts: Option<String>,
    /// Append the output of each rank to rank-00000.out and .err, ... in DIR; rank 0 is shown as well. Without it, lines of the
    /// other ranks are shown as "[rank 1] ..."
    #[arg(long, value_name = "DIR", alias = "log_dir", value_hint = ValueHint::DirPath, help_heading = HEADING)]
    log_dir: Option<PathBuf>,
    /// Streams that go to files only: 1 output, 2 errors, 3 both; or by local rank, as 0:3,1:1
    #[arg(short, long, value_name = "STREAMS", help_heading = HEADING)]
    redirects: Option<String>,
    /// Streams that go to files and are shown
    #[arg(short, long, value_name = "STREAMS", help_heading = HEADING)]
    tee: Option<String>,
    /// Local ranks whose output is shown, as 0,1; files keep all
    #[arg(long, value_name = "RANKS", alias = "local_ranks_filter", help_heading = HEADING)]
    local_ranks_filter: Option<String>,
    /// Name before the rank in labels of output lines, as in `[NAME1]:`
    #[arg(long, value_name = "NAME", help_heading = HEADING)]
    role: Option<String>,
    #[command(flatten)]
    idle: Idle,
}

/// Flags of torchrun that have no effect here, or that are refused.
#[derive(Debug, Default)]
struct Idle {
    /// The given ones of [`IDLE`] and [`FOR_PYTHON`].
    given: Vec<&'static str>,
}

/// Lookup of an environment variable; an empty one counts as not set.
pub(crate) type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Looks up a variable of this process. A process that torchrun has started as a rank inherits the `PET_` variables, which are
/// meant for torchrun and ignored here.
pub(crate) fn variable(name: &str) -> Option<String> {
    let get = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    if name.starts_with("PET_") && get("LOCAL_RANK").is_some() { None } else { get(name) }
}

/// Settings for starting ranks, resolved from flags and variables.
#[derive(Debug, Default)]
pub(crate) struct Launching {
    /// Number of ranks on this machine, if it is given.
    pub(crate) ranks: Option<usize>,
    /// True if the run is on this machine alone.
    pub(crate) standalone: bool,
    /// Number of this machine from `--rdzv-conf`.
    pub(crate) node: Option<usize>,
    /// Time limit of the wait for other machines, if `--rdzv-conf` gives it.
    pub(crate) limit: Option<Duration>,
    /// Number of restarts after failures, if a flag gives it.
    pub(crate) max_restarts: Option<usize>,
    pub(crate) role: Option<String>,
    pub(crate) log_dir: Option<PathBuf>,
    redirects: Option<Streams>,
    tee: Option<Streams>,
    shown: Option<Vec<usize>>,
    without_effect: Vec<String>,
}

/// A value and its source: `--tee` or `PET_TEE`.
struct Given {
    name: String,
    text: String,
    is_flag: bool,
}

impl Given {
    fn of(flag: Option<&str>, name: &str, variables: Variables<'_>) -> Option<Self> {
        if let Some(text) = flag {
            return Some(Self { name: name.to_owned(), text: text.to_owned(), is_flag: true });
        }
        let twin = twin(name);
        variables(&twin).map(|text| Self { name: twin, text, is_flag: false })
    }

    fn refuse(&self, why: impl std::fmt::Display) -> Failure {
        let between = if self.is_flag { " " } else { "=" };
        Failure::configuration(format!("{}{between}{}: {why}", self.name, self.text))
    }

    fn number(&self, least: u64, most: u64) -> Result<u64, Failure> {
        let number = self.text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| self.refuse(format!("a number from {least} to {most}")))
    }
}

/// Returns the environment variable of a flag.
fn twin(flag: &str) -> String {
    format!("PET_{}", flag.trim_start_matches('-').replace('-', "_").to_uppercase())
}

/// Resolves a switch from the flag or its variable, which is 0 or 1.
fn is_on(flag: bool, name: &str, variables: Variables<'_>) -> Result<bool, Failure> {
    match Given::of(None, name, variables).filter(|_| !flag) {
        None => Ok(flag),
        Some(given) => Ok(given.number(0, 1)? == 1),
    }
}

impl Flags {
    /// Resolves the flags, and the variables of flags that are not given.
    pub(crate) fn settle(&self, variables: Variables<'_>) -> Result<Launching, Failure> {
        self.idle.refuse(variables)?;
        let given = |flag: &Option<String>, name| Given::of(flag.as_deref(), name, variables);
        let mut launching = Launching {
            standalone: is_on(self.standalone, "--standalone", variables)?,
            without_effect: self.idle.named(variables),
            role: given(&self.role, "--role").map(|given| role(&given)).transpose()?,
            log_dir: self.log_dir.clone().or_else(|| variables("PET_LOG_DIR").map(PathBuf::from)),
            ..Launching::default()
        };
        if let Some(given) = given(&self.nproc_per_node, "--nproc-per-node") {
            launching.ranks = Some(ranks(&given)?);
        }
        if let Some(given) = given(&self.rdzv_backend, "--rdzv-backend") {
            check_backend(&given)?;
        }
        if let Some(given) = given(&self.rdzv_conf, "--rdzv-conf") {
            launching.configure(&given)?;
        }
        if let Some(given) = given(&self.max_restarts, "--max-restarts") {
            launching.max_restarts = Some(given.number(0, RESTART_LIMIT as u64)? as usize);
        }
        let streams = |flag, name| given(flag, name).map(|given| Streams::parse(&given)).transpose();
        launching.redirects = streams(&self.redirects, "--redirects")?;
        launching.tee = streams(&self.tee, "--tee")?;
        if let Some(given) = given(&self.local_ranks_filter, "--local-ranks-filter") {
            let ranks = given.text.split(',').map(|rank| rank.trim().parse().ok()).collect();
            launching.shown = Some(ranks).ok_or_else(|| given.refuse("local ranks, as 0,1"))?;
        }
        Ok(launching)
    }

    /// Returns the name of a given flag that asks for ranks to be started, if there is one.
    pub(crate) fn first_given(&self) -> Option<&'static str> {
        let flags = [
            (self.nproc_per_node.is_some(), "--nproc-per-node"),
            (self.standalone, "--standalone"),
            (self.max_restarts.is_some(), "--max-restarts"),
            (self.redirects.is_some(), "--redirects"),
            (self.tee.is_some(), "--tee"),
            (self.local_ranks_filter.is_some(), "--local-ranks-filter"),
        ];
        flags.into_iter().find_map(|(is_given, name)| is_given.then_some(name))
    }
}

const OTHER_LOGS: &str = "logs are those of --log-dir";
const SIGNALS: &str = "SIGINT and SIGTERM end a run with a checkpoint";

/// Flags without effect: name, true if a value follows, and the reason.
const IDLE: [(&str, bool, &str); 12] = [
    ("monitor-interval", true, "the end of a rank is known at once"),
    ("start-method", true, "every rank is a process of its own program"),
    ("local-addr", true, "machines are seen at the address that they come from"),
    ("event-log-handler", true, OTHER_LOGS),
    ("logs-specs", true, OTHER_LOGS),
    ("numa-binding", true, "every rank has its share of the cores"),
    ("signals-to-handle", true, SIGNALS),
    ("shutdown-timeout", true, SIGNALS),
    ("duplicate-stdout-filters", true, OTHER_LOGS),
    ("duplicate-stderr-filters", true, OTHER_LOGS),
    ("virtual-local-rank", false, "ranks keep their numbers"),
    ("no-python", false, "no Python is started"),
];
/// Flags for Python programs, which are refused.
const FOR_PYTHON: [&str; 2] = ["module", "run-path"];

impl Args for Idle {
    fn augment_args(command: Command) -> Command {
        let switches = FOR_PYTHON.map(|name| (name, false, ""));
        let with_flags = IDLE.into_iter().chain(switches).fold(command, |command, (name, has_value, _)| {
            let action = if has_value { ArgAction::Set } else { ArgAction::SetTrue };
            let argument = Arg::new(name).long(name).action(action).hide(true);
            command.arg(if name == "module" { argument.short('m') } else { argument })
        });
        // DeepSpeed's launcher adds this flag to every program.
        with_flags.arg(Arg::new("local_rank").long("local_rank").action(ArgAction::Append).hide(true))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Idle {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let names = IDLE.into_iter().map(|(name, ..)| name).chain(FOR_PYTHON);
        let is_given = |name: &&str| matches.value_source(name) == Some(ValueSource::CommandLine);
        Ok(Self { given: names.filter(is_given).collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Idle {
    /// Refuses flags for Python programs.
    fn refuse(&self, variables: Variables<'_>) -> Result<(), Failure> {
        for name in FOR_PYTHON {
            let (flag, is_given) = (format!("--{name}"), self.given.contains(&name));
            if is_on(is_given, &flag, variables)? {
                let name = if is_given { flag } else { twin(&flag) };
                return Err(Failure::configuration(format!(
                    "{name} is for Python programs: lockstep is the program itself, and RUN.toml stands where torchrun has a script; leave {name} out"
                )));
            }
        }
        Ok(())
    }

    /// Returns the given flags, each with the reason why it has no effect.
    fn named(&self, variables: Variables<'_>) -> Vec<String> {
        let named = IDLE.into_iter().filter_map(|(name, _, why)| {
            let is_twin = || variables(&twin(name)).is_some_and(|value| value != "0");
            let name = match self.given.contains(&name) {
                true => format!("--{name}"),
                false => is_twin().then(|| twin(name))?,
            };
            Some(format!("{name} ({why})"))
        });
        named.collect()
    }
}

/// Parses a number of ranks; `cpu` is one per core, `auto` one per memory node if there are several.
fn ranks(given: &Given) -> Result<usize, Failure> {
    match given.text.as_str() {
        "auto" => Ok(automatic_ranks()),
        "cpu" => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
        "gpu" | "xpu" => {
            let why = "this build computes on the processor and starts no ranks on accelerators; take auto, cpu or a number";
            Err(Failure { code: MISSING, ..given.refuse(why) })
        }
        text => text
            .parse()
            .ok()
            .filter(|ranks| *ranks > 0)
            .ok_or_else(|| given.refuse("a number from 1, auto, cpu or gpu")),
    }
}

fn check_backend(given: &Given) -> Result<(), Failure> {
    match given.text.as_str() {
        "c10d" | "static" => Ok(()),
        "etcd" | "etcd-v2" => Err(given.refuse(
            "machines meet at node 0 and need no etcd server; take c10d, with --rdzv-endpoint HOST:PORT of node 0",
        )),
        _ => Err(given.refuse("c10d or static")),
    }
}

fn role(given: &Given) -> Result<String, Failure> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if given.text.len() <= 64 && given.text.chars().all(is_plain) {
        return Ok(given.text.clone());
    }
    Err(given.refuse("a name of at most 64 letters, digits, '-', '_' and '.'"))
}

/// Keys of `--rdzv-conf` that torchrun knows and that have no effect here.
const IDLE_KEYS: [&str; 9] = [
    "last_call_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "store_type",
    "read_timeout",
    "use_libuv",
    "local_addr",
];

impl Launching {
    /// Applies the settings of `--rdzv-conf`.
    fn configure(&mut self, given: &Given) -> Result<(), Failure> {
        for pair in given.text.split(',').filter(|pair| !pair.trim().is_empty()) {
            let Some((key, value)) = pair.split_once('=').map(|(key, value)| (key.trim(), value.trim()))
            else {
                return Err(given.refuse(format!("{pair:?} has no '='; KEY=VALUE,KEY=VALUE")));
            };
            let number = |least: u64, most: u64| {
                let number = value.parse().ok().filter(|number| (least..=most).contains(number));
                number.ok_or_else(|| given.refuse(format!("{key} is a number from {least} to {most}")))
            };
            match (key, value.to_ascii_lowercase().as_str()) {
                ("timeout" | "join_timeout", _) => {
                    self.limit = Some(Duration::from_secs(number(1, WAIT_LIMIT)?));
                }
                ("rank", _) => self.is_node(number(0, 1 << 20)? as usize, given)?,
                ("is_host", "1" | "true" | "t" | "yes" | "y") => self.is_node(0, given)?,
                ("is_host", "0" | "false" | "f" | "no" | "n") => self
                    .without_effect
                    .push("is_host=false (the machine of --rdzv-endpoint is node 0)".to_owned()),
                ("is_host", _) => return Err(given.refuse("is_host is true or false")),
                _ if IDLE_KEYS.contains(&key) => {
                    self.without_effect.push(format!("{key} of --rdzv-conf (machines meet once)"));
                }
                _ => {
                    return Err(given.refuse(format!(
                        "no key {key:?}; join_timeout, timeout, rank and is_host are used, {} accepted",
                        IDLE_KEYS.join(", ")
                    )));
                }
            }
        }
        Ok(())
    }

    fn is_node(&mut self, node: usize, given: &Given) -> Result<(), Failure> {
        match self.node.replace(node) {
            Some(other) if other != node => Err(given.refuse("rank and is_host contradict each other")),
            _ => Ok(()),
        }
    }

    /// Returns a sentence that lists the flags without effect, if there are any.
    pub(crate) fn without_effect(&self) -> Option<String> {
        let named = self.without_effect.join(", ");
        (!named.is_empty()).then(|| format!("without effect here: {named}"))
    }

    /// Returns the destinations of the output of this machine's `ranks` ranks; files are in `dir` unless a flag names a
    /// directory. `is_first` tells if rank 0 is among them.
    pub(crate) fn output(&self, ranks: usize, is_first: First, dir: &Path) -> Result<Output, Failure> {
        for (name, streams) in [("--redirects", &self.redirects), ("--tee", &self.tee)] {
            if let Some(rank) = streams.as_ref().and_then(Streams::last).filter(|rank| *rank >= ranks) {
                return Err(no_such_rank(name, rank, ranks));
            }
        }
        if let Some(rank) = self.shown.iter().flatten().find(|rank| **rank >= ranks) {
            return Err(no_such_rank("--local-ranks-filter", *rank, ranks));
        }
        if self.redirects.is_none() && self.tee.is_none() && self.shown.is_none() && self.role.is_none() {
            return Ok(self.log_dir.clone().map_or(Output::Labelled, Output::Files));
        }
        let streams = (0..ranks).map(|rank| [OUT, ERR].map(|stream| self.route(rank, stream, is_first)));
        let dir = self.log_dir.clone().unwrap_or_else(|| dir.to_owned());
        Ok(Output::RouterOutputs(Routing { dir, role: self.role.clone(), streams: streams.collect() }))
    }

    /// Returns the destinations of a stream of a local rank.
    fn route(&self, rank: usize, stream: u8, is_first: First) -> Route {
        let has = |streams: &Option<Streams>| {
            streams.as_ref().is_some_and(|streams| streams.of(rank) & stream != 0)
        };
        let (is_redirected, is_teed) = (has(&self.redirects), has(&self.tee));
        let is_plain = self.redirects.is_none() && self.tee.is_none();
        let keeps_all = is_plain && self.log_dir.is_some();
        let is_shown = match &self.shown {
            Some(shown) => shown.contains(&rank),
            None => !keeps_all || (rank == 0 && is_first == First::Here),
        };
        Route {
            file: keeps_all || is_redirected || is_teed,
            console: is_shown && (is_teed || !is_redirected),
        }
    }
}

/// Location of rank 0 of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum First {
    /// Among the ranks of this machine.
    Here,
    /// On another machine.
    Elsewhere,
}

fn no_such_rank(name: &str, rank: usize, ranks: usize) -> Failure {
    let last = ranks - 1;
    Failure::configuration(format!(
        "{name} names local rank {rank}, and this machine has ranks 0 to {last} (--nproc-per-node)"
    ))
}

/// Bit masks of streams by local rank: 0 none, 1 output, 2 errors, 3 both.
#[derive(Debug, PartialEq, Eq)]
enum Streams {
    OfAll(u8),
    ByRank(BTreeMap<usize, u8>),
}

impl Streams {
    fn parse(given: &Given) -> Result<Self, Failure> {
        let problem =
            || given.refuse("0 (none), 1 (output), 2 (errors) or 3 (both), or so by local rank, as 0:3,1:1");
        let digit = |text: &str| text.trim().parse().ok().filter(|streams: &u8| *streams <= 3);
        if let Some(streams) = digit(&given.text) {
            return Ok(Self::OfAll(streams));
        }
        let mut by_rank = BTreeMap::new();
        for pair in given.text.split(',') {
            let (rank, streams) = pair.split_once(':').ok_or_else(problem)?;
            let rank = rank.trim().parse().map_err(|_| problem())?;
            if by_rank.insert(rank, digit(streams).ok_or_else(problem)?).is_some() {
                return Err(given.refuse(format!("local rank {rank} is named twice")));
            }
        }
        Ok(Self::ByRank(by_rank))
    }

    fn of(&self, rank: usize) -> u8 {
        match self {
            Self::OfAll(streams) => *streams,
            Self::ByRank(by_rank) => by_rank.get(&rank).copied().unwrap_or(0),
        }
    }

    /// Returns the greatest rank that is named.
    fn last(&self) -> Option<usize> {
        match self {
            Self::OfAll(_) => None,
            Self::ByRank(by_rank) => by_rank.keys().next_back().copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }

    fn settle(arguments: &[&str], environment: &[(&str, &str)]) -> Result<Launching, Failure> {
        let line = Line::try_parse_from([&["x"], arguments].concat()).unwrap();
        line.flags.settle(&|name| {
            environment.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn every_flag_has_a_variable_that_stands_for_it_and_the_command_line_wins() {
        let twins = [
            ("PET_NPROC_PER_NODE", "3"),
            ("PET_STANDALONE", "1"),
            ("PET_RDZV_CONF", "join_timeout=7,rank=1"),
            ("PET_MAX_RESTARTS", "2"),
            ("PET_ROLE", "trainer"),
            ("PET_LOG_DIR", "logs"),
            ("PET_TEE", "0:3,1:1"),
            ("PET_LOCAL_RANKS_FILTER", "0, 2"),
            ("PET_MONITOR_INTERVAL", "5"),
            ("PET_NO_PYTHON", "0"),
        ];
        let found = settle(&[], &twins).unwrap();
        assert_eq!((found.ranks, found.standalone, found.node), (Some(3), true, Some(1)));
        assert_eq!((found.limit, found.max_restarts), (Some(Duration::from_secs(7)), Some(2)));
        assert_eq!((found.role.as_deref(), found.shown), (Some("trainer"), Some(vec![0, 2])));
        assert_eq!(found.log_dir, Some("logs".into()));
        assert_eq!(found.tee, Some(Streams::ByRank(BTreeMap::from([(0, 3), (1, 1)]))));
        assert_eq!(found.without_effect, ["PET_MONITOR_INTERVAL (the end of a rank is known at once)"]);
        let flags = ["--nproc_per_node=4", "--max_restarts", "0", "-t", "3", "--role", "x"];
        let found = settle(&flags, &twins).unwrap();
        assert_eq!((found.ranks, found.max_restarts), (Some(4), Some(0)));
        assert_eq!((found.tee, found.role.as_deref()), (Some(Streams::OfAll(3)), Some("x")));
    }

    #[test]
    fn streams_go_where_torchrun_sends_them() {
        let routed = |arguments: &[&str]| -> Vec<[(bool, bool); 2]> {
            let launching = settle(arguments, &[]).unwrap();
            match launching.output(2, First::Here, Path::new("d")).unwrap() {
                Output::RouterOutputs(routing) => {
                    let pair = |route: Route| (route.console, route.file);
                    routing.streams.iter().map(|streams| streams.map(pair)).collect()
                }
                other => panic!("{other:?}"),
            }
        };
        let (shown, kept, both) = ((true, false), (false, true), (true, true));
        assert_eq!(routed(&["-r", "3"]), [[kept; 2]; 2]);
        assert_eq!(routed(&["-t", "3"]), [[both; 2]; 2]);
        assert_eq!(routed(&["-r", "1:2", "-t", "0:1"]), [[both, shown], [shown, kept]]);
        assert_eq!(routed(&["--local-ranks-filter", "1"]), [[(false, false); 2], [shown; 2]]);
        assert_eq!(routed(&["--local-ranks-filter", "1", "-r", "3", "-t", "3"]), [[kept; 2], [both; 2]]);
        assert_eq!(routed(&["--log-dir", "x", "--role", "a"]), [[both; 2], [kept; 2]]);
        let launching = settle(&[], &[]).unwrap();
        assert_eq!(launching.output(2, First::Here, Path::new("d")).unwrap(), Output::Labelled);
    }

    #[test]
    fn values_that_cannot_be_are_refused_by_the_name_that_was_used() {
        let table: [(&[&str], &str); 9] = [
            (&["--tee", "5"], "--tee 5: 0 (none)"),
            (&["--redirects", "0:3,0:1"], "named twice"),
            (&["--rdzv-backend", "etcd-v2"], "need no etcd server"),
            (&["--rdzv-conf", "join_timeout"], "has no '='"),
            (&["--rdzv-conf", "join_timeouts=3"], "no key \"join_timeouts\""),
            (&["--rdzv-conf", "rank=1,is_host=true"], "contradict"),
            (&["--max-restarts=-1"], "0 to 1000"),
            (&["--nproc-per-node", "gpu"], "computes on the processor"),
            (&["-m"], "leave --module out"),
        ];
        for (arguments, part) in table {
            let message = match settle(arguments, &[]) {
                Ok(_) => panic!("{arguments:?} is taken"),
                Err(failure) => failure.message,
            };
            assert!(message.contains(part), "{arguments:?}: {message}");
        }
        let failure = settle(&[], &[("PET_TEE", "5")]).unwrap_err();
        assert!(failure.message.starts_with("PET_TEE=5: 0 (none)"), "{}", failure.message);
        assert_eq!(settle(&[], &[("PET_NPROC_PER_NODE", "gpu")]).unwrap_err().code, MISSING);
    }
}
