//! File format of the flight recorder: JSON with the last operations of ranks, one file per host, or per rank under foreign
//! launchers. Times are of the host's clock, which its ranks share.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use lockstep_comm::{CommError, GroupName, MAX_WORLD, Recorded, now_us};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::json_value::write_json;

const FORMAT: &str = "lockstep flight recorder";
const VERSION: u32 = 1;
/// Limit on the size of a file, below ten thousand operations of each of 65,536 ranks.
const MOST_BYTES: u64 = 1 << 30;
/// Limit on times: the year 2286.
const LAST_US: u64 = 10_000_000_000_000_000;

/// Records of the ranks of one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dump {
    format: String,
    version: u32,
    /// Name of the host.
    pub host: String,
    /// Time of writing, in microseconds since 1970.
    pub written_us: u64,
    /// Reason why the run ended, if it has.
    pub ended: Option<Ending>,
    /// Number of ranks of the run, on all hosts.
    pub world_size: usize,
    /// Ranks of this host.
    pub ranks: Vec<RankRecords>,
}

/// Reason why a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    /// Message of the error.
    pub message: String,
    /// The lost rank, if losing one ended the run.
    pub lost: Option<usize>,
}

/// Last operations of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankRecords {
    /// Number of the rank.
    pub rank: usize,
    /// Operations, the oldest first.
    pub operations: Vec<Operation>,
}

/// One call of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// Number of the call among all calls of the rank, from 0.
    pub number: u64,
    /// Group of the operation.
    pub group: Group,
    /// Sequence number in the group; of `send` and `receive`, between the two ranks.
    pub sequence: u32,
    /// Description of the call.
    pub what: String,
    /// Kind of operation, such as `all_reduce`.
    pub kind: String,
    /// Reduction operator, if any.
    pub op: Option<String>,
    /// Type of the elements.
    pub dtype: String,
    /// Number of elements.
    pub elements: usize,
    /// Root of the operation, or the peer of a message, as a rank of the group.
    pub root: Option<usize>,
    /// Hash of further arguments that must be equal on all ranks.
    pub detail: u64,
    /// Time of the call, in microseconds since 1970.
    pub posted_us: u64,
    /// Time at which all ranks had called it.
    pub met_us: Option<u64>,
    /// Time at which this rank's part was completed.
    pub done_us: Option<u64>,
    /// Source file and line of the call.
    pub caller: String,
}

/// A process group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Group {
    /// Index: 0 for the world group, then in the order of creation.
    pub index: u32,
    /// Lowest rank in the group.
    pub first: u32,
    /// Number of ranks.
    pub size: u32,
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { index, first, size } = *self;
        GroupName { index, first, size }.fmt(f)
    }
}

impl Ending {
    /// Returns the ending for a communication error.
    pub fn by(error: &CommError) -> Self {
        let lost = match error {
            CommError::PeerLost { rank, .. } => Some(*rank),
            _ => None,
        };
        Self { message: error.to_string(), lost }
    }
}

impl Dump {
    /// Returns the current records of this host, from pairs of a rank and its recorded calls.
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

    /// Returns true if no rank has called any operation.
    pub fn is_empty(&self) -> bool {
        self.ranks.iter().all(|rank| rank.operations.is_empty())
    }

    /// Writes `flight-00000.json` in `dir`, named after its lowest rank, over the file of an earlier run; returns the path.
    ///
    /// # Errors
    /// If the file cannot be written.
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

    /// Parses the bytes of a file.
    ///
    /// # Errors
    /// If they are not such a file or hold impossible numbers; the text says which.
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

    /// Rejects numbers that no run writes, before they are used.
    fn check(&self) -> Result<(), String> {
        let world = self.world_size;
        if !(1..=MAX_WORLD).contains(&world) {
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

/// Returns the first 40 characters of untrusted text.
fn short(text: &str) -> String {
    text.chars().take(40).collect()
}
