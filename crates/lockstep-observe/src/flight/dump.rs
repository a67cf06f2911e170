//! What ranks called last, as a file: JSON, one for each host, or for each rank where no launcher of ours writes them. Times
//! are of the host's clock, as all its ranks see it.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use lockstep_comm::{CommError, GroupName, Recorded, now_us};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::trace::write_json;

const FORMAT: &str = "lockstep flight recorder";
const VERSION: u32 = 1;
/// No file is larger: a thousand operations of each of a million ranks are not read in one go.
const MOST_BYTES: u64 = 1 << 30;
/// No world is.
const MOST_RANKS: usize = 1 << 20;
/// No time is later: the year 2286.
const LAST_US: u64 = 10_000_000_000_000_000;

/// The records of ranks of one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dump {
    format: String,
    version: u32,
    /// Its name.
    pub host: String,
    /// When they were written, in microseconds since 1970.
    pub written_us: u64,
    /// Why the run ended, if it has.
    pub ended: Option<Ending>,
    /// Ranks of the run on all hosts.
    pub world_size: usize,
    /// Those of this host.
    pub ranks: Vec<RankRecords>,
}

/// Why a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    /// In words.
    pub message: String,
    /// The rank that was lost, if that was it.
    pub lost: Option<usize>,
}

/// What one rank called last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankRecords {
    /// Its rank.
    pub rank: usize,
    /// Oldest first.
    pub operations: Vec<Operation>,
}

/// One call of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// Counts all calls of the rank, from 0.
    pub number: u64,
    /// The group.
    pub group: Group,
    /// The operation's number in the group; of `send` and `receive`, between the two ranks.
    pub sequence: u32,
    /// The call in words.
    pub what: String,
    /// `all_reduce` and the like.
    pub kind: String,
    /// The reduction, if it is one.
    pub op: Option<String>,
    /// Type of the elements.
    pub dtype: String,
    /// Elements.
    pub elements: usize,
    /// The rank of the group that the operation turns on.
    pub root: Option<usize>,
    /// A hash of what else must be alike.
    pub detail: u64,
    /// When it was called, in microseconds since 1970.
    pub posted_us: u64,
    /// When all ranks had called it.
    pub met_us: Option<u64>,
    /// When this rank's part was done.
    pub done_us: Option<u64>,
    /// Source file and line of the call.
    pub caller: String,
}

/// A group of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Group {
    /// 0 for all ranks, then in the order in which groups were made.
    pub index: u32,
    /// The lowest rank in it.
    pub first: u32,
    /// How many ranks.
    pub size: u32,
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { index, first, size } = *self;
        GroupName { index, first, size }.fmt(f)
    }
}

impl Ending {
    /// By `error`.
    pub fn by(error: &CommError) -> Self {
        let lost = match error {
            CommError::PeerLost { rank, .. } => Some(*rank),
            _ => None,
        };
        Self { message: error.to_string(), lost }
    }
}

impl Dump {
    /// Records of this host as they are now: pairs of a rank and what it called.
    pub fn new(
        world_size: usize,
        ended: Option<Ending>,
        ranks: impl IntoIterator<Item = (usize, Vec<Recorded>)>,
    ) -> Self {
        let written_us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_micros() as u64);
        let now_us = now_us();
        let at = |us: u64| written_us.saturating_sub(now_us.saturating_sub(us));
        let records = |(rank, recorded): (usize, Vec<Recorded>)| RankRecords {
            rank,
            operations: recorded.into_iter().map(|recorded| Operation::new(recorded, at)).collect(),
        };
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            written_us,
            ended,
            world_size,
            ranks: ranks.into_iter().map(records).collect(),
        }
    }

    /// Whether no rank has called anything.
    pub fn is_empty(&self) -> bool {
        self.ranks.iter().all(|rank| rank.operations.is_empty())
    }

    /// Writes `flight-00000.json` in `dir`, named by the first rank in it, over what an earlier run left there; returns where.
    ///
    /// # Errors
    /// [`Error::Metrics`].
    pub fn write(&self, dir: &Path) -> Result<PathBuf, Error> {
        let first = self.ranks.iter().map(|rank| rank.rank).min().unwrap_or(0);
        let path = dir.join(format!("flight-{first:05}.json"));
        write_json(&path, self)?;
        Ok(path)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::ReadRecords`] if it cannot be read, [`Error::BadRecords`] if it is damaged or something else.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::ReadRecords { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let mut bytes = Vec::new();
        file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
        Self::parse(&bytes).map_err(|problem| Error::BadRecords { path: path.to_owned(), problem })
    }

    /// What the bytes of a file say.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u32,
        }
        if bytes.len() as u64 > MOST_BYTES {
            return Err(format!("it is larger than {} GiB", MOST_BYTES >> 30));
        }
        let head: Head = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if head.format != FORMAT {
            return Err(format!("its format is {:?}", short(&head.format)));
        }
        if head.version != VERSION {
            return Err(format!("its version is {}, and this program reads {VERSION}", head.version));
        }
        let dump: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        dump.check().map(|()| dump)
    }

    /// Numbers that no run writes are refused before anybody counts with them.
    fn check(&self) -> Result<(), String> {
        let world = self.world_size;
        if !(1..=MOST_RANKS).contains(&world) {
            return Err(format!("a world of {world} ranks"));
        }
        if self.written_us > LAST_US {
            return Err("it was written after the year 2286".to_owned());
        }
        if let Some(rank) = self.ended.as_ref().and_then(|ended| ended.lost).filter(|rank| *rank >= world) {
            return Err(format!("the lost one is rank {rank} of {world}"));
        }
        for (index, RankRecords { rank, operations }) in self.ranks.iter().enumerate() {
            if *rank >= world {
                return Err(format!("records of rank {rank} of {world}"));
            }
            if self.ranks[..index].iter().any(|other| other.rank == *rank) {
                return Err(format!("two records of rank {rank}"));
            }
            for operation in operations {
                operation
                    .check(world)
                    .map_err(|problem| format!("rank {rank}, operation {}: {problem}", operation.number))?;
            }
            if let Some(pair) = operations.windows(2).find(|pair| pair[0].number >= pair[1].number) {
                return Err(format!(
                    "rank {rank}: operation {} stands before {}",
                    pair[0].number, pair[1].number
                ));
            }
        }
        Ok(())
    }
}

impl Operation {
    fn new(recorded: Recorded, at: impl Fn(u64) -> u64) -> Self {
        let Recorded { number, call, group, sequence, posted_us, met_us, done_us, caller } = recorded;
        let GroupName { index, first, size } = group;
        Self {
            number,
            group: Group { index, first, size },
            sequence,
            what: call.to_string(),
            kind: call.kind.name().to_owned(),
            op: call.op.map(|op| op.name().to_owned()),
            dtype: call.number.name().to_owned(),
            elements: call.elements,
            root: call.root,
            detail: call.detail,
            posted_us: at(posted_us),
            met_us: met_us.map(&at),
            done_us: done_us.map(&at),
            caller,
        }
    }

    fn check(&self, world: usize) -> Result<(), String> {
        let Group { first, size, .. } = self.group;
        if size == 0 || size as usize > world || first as usize >= world {
            return Err(format!("a group of {size} ranks from rank {first}, of {world}"));
        }
        if let Some(root) = self.root.filter(|root| *root >= size as usize) {
            return Err(format!("it turns on rank {root} of {size}"));
        }
        let times = [Some(self.posted_us), self.met_us, self.done_us];
        let times: Vec<u64> = times.into_iter().flatten().collect();
        if !times.is_sorted() || times.last().is_some_and(|last| *last > LAST_US) {
            return Err("its times are out of order".to_owned());
        }
        Ok(())
    }
}

/// The beginning of a text that may be anything.
fn short(text: &str) -> String {
    text.chars().take(40).collect()
}
