//! The parts of a save: each rank writes its part, and the first rank commits a checkpoint of all parts.
//!
//! A tensor that several ranks hold is written by one of them. Each rank sends the outcome of its part to the first rank as JSON,
//! so the first rank knows of every failure and its rank.

use std::cell::Cell;
use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use lockstep_checkpoint::{
    ByteSource, CheckpointError, CommitObserver, Region, ShardReport, SliceBytes, Staging, TensorSlice,
    run_on_disk, write_shard_observed,
};
use lockstep_engine::{Contents, OnDisk, Ranks, StateKind, StateTensor};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::state::tensor_kind;

/// Largest report that a rank sends about its part; it describes the tensors in a few hundred bytes each.
const MAX_REPORT_BYTES: usize = 256 << 20;

/// Observer of a save.
pub(super) type Observer = Arc<dyn CommitObserver + Send + Sync>;

/// The part of a save that a rank writes.
pub(crate) struct RankSave {
    pub(crate) step: u64,
    pub(crate) rank: usize,
    /// Names of the parameters whose state this rank writes for its replica.
    pub(crate) owned: HashSet<String>,
    /// True if this rank also writes what all replicas hold; the others write their rank-local state only.
    pub(crate) is_in_first_replica: bool,
}

/// Outcome of a part: its report, or `None` if there was nothing to write.
pub(crate) type Written = Result<Option<ShardReport>, Error>;

impl RankSave {
    /// Writes the tensors of `tensors` that belong to this rank's part to the checkpoints' directory `dir`.
    pub(crate) fn write(
        &self,
        dir: &Path,
        tensors: &[StateTensor<'_>],
        observer: &dyn CommitObserver,
    ) -> Written {
        // Finite gradients may still move a weight out of the range of f32.
        if let Some(name) = StateTensor::first_not_finite(tensors) {
            return Err(Error::WeightsNotFinite { step: self.step, name: name.to_owned() });
        }
        let is_own = |tensor: &&StateTensor<'_>| {
            (self.is_in_first_replica || tensor.kind.is_of_one_rank())
                && self.owned.contains(&tensor.record.name)
        };
        let own: Vec<Own<'_>> = tensors.iter().filter(is_own).map(Own::of).collect();
        let slices: Vec<_> = own.iter().flat_map(Own::slices).collect();
        if slices.is_empty() {
            return Ok(None);
        }
        let (owned_dir, step) = (dir.to_owned(), self.step);
        let find = move || Staging::path_in(&owned_dir, step);
        let staging = run_on_disk(observer, "looking into", dir, find)?;
        let written = write_shard_observed(&staging, self.rank, &slices, observer);
        if let Some(name) = own.iter().find_map(Own::found_not_finite) {
            return Err(Error::WeightsNotFinite { step: self.step, name: name.to_owned() });
        }
        Ok(Some(written?))
    }
}

/// A tensor to write, with its reader if it is on disk.
struct Own<'a> {
    tensor: &'a StateTensor<'a>,
    on_disk: Option<FiniteSource<'a>>,
}

/// Reader of a tensor on disk that fails at the first weight that is not finite.
#[derive(Debug)]
struct FiniteSource<'a> {
    part: OnDisk<'a>,
    /// True if the tensor holds weights.
    is_checked: bool,
    found: Cell<bool>,
}

impl ByteSource for FiniteSource<'_> {
    fn read(&self, start: usize, bytes: &mut [u8]) -> io::Result<()> {
        self.part.read(start, bytes).map_err(io::Error::other)?;
        // Weights with the optimizer step on disk are f32.
        let is_finite = |word: &[u8; 4]| f32::from_le_bytes(*word).is_finite();
        if self.is_checked && !bytes.as_chunks::<4>().0.iter().all(is_finite) {
            self.found.set(true);
            return Err(io::Error::other("a weight is not finite"));
        }
        Ok(())
    }
}

impl<'a> Own<'a> {
    fn of(tensor: &'a StateTensor<'a>) -> Self {
        let is_checked = tensor.kind == StateKind::Parameter;
        let on_disk = match tensor.contents {
            Contents::Memory(_) => None,
            Contents::Disk(part) => Some(FiniteSource { part, is_checked, found: Cell::new(false) }),
        };
        Self { tensor, on_disk }
    }

    /// Returns the name of the parameter if reading it found a weight that is not finite.
    fn found_not_finite(&self) -> Option<&str> {
        let found = self.on_disk.as_ref().is_some_and(|source| source.found.get());
        found.then_some(self.tensor.record.name.as_str())
    }

    /// Returns this rank's shard of the tensor as one slice, or as several if it begins or ends within a row of a tensor split
    /// over ranks.
    fn slices(&self) -> Vec<TensorSlice<'_>> {
        let StateTensor { record, kind, dtype, first, .. } = *self.tensor;
        let size = dtype.size_bytes();
        let len = self.tensor.len_bytes();
        let bytes = match &self.on_disk {
            Some(source) => SliceBytes::Source { source, start: 0, len },
            None => self.tensor.in_memory().unwrap_or_default().into(),
        };
        let slice = |(region, elements): (Region, Range<usize>)| TensorSlice {
            name: &record.name,
            kind: tensor_kind(kind),
            dtype,
            global_shape: &record.shape,
            region,
            bytes: bytes.range((elements.start - first) * size..(elements.end - first) * size),
        };
        let part = first..first + len / size;
        Region::of_part(&record.share, &record.shape, part).into_iter().map(slice).collect()
    }
}

/// Outcome of another rank's part, as sent to the first rank.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum PartOutcome {
    Written(Option<ShardReport>),
    NotFinite { parameter: String },
    Failed { reason: String, is_full: bool },
}

impl PartOutcome {
    fn of(written: &Written) -> Self {
        match written {
            Ok(report) => Self::Written(report.clone()),
            Err(Error::WeightsNotFinite { name, .. }) => Self::NotFinite { parameter: name.clone() },
            Err(error) => {
                let is_full = matches!(error, Error::Checkpoint(error) if error.is_full());
                Self::Failed { reason: error.to_string(), is_full }
            }
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        let failed = |reason: String| {
            let reason = format!("the report of its part {reason}");
            serde_json::json!(Self::Failed { reason, is_full: false }).to_string().into_bytes()
        };
        match serde_json::to_vec(self) {
            Ok(bytes) if bytes.len() <= MAX_REPORT_BYTES => bytes,
            Ok(bytes) => failed(format!("has {} bytes; at most {MAX_REPORT_BYTES} are sent", bytes.len())),
            Err(error) => failed(format!("cannot be written: {error}")),
        }
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        serde_json::from_slice(bytes).unwrap_or_else(|error| Self::Failed {
            reason: format!("the report of its part cannot be read: {error}"),
            is_full: false,
        })
    }

    /// Converts the outcome of rank `rank` to the result that the first rank handles.
    fn of_rank(self, rank: usize, step: u64) -> Written {
        match self {
            Self::Written(report) => Ok(report),
            Self::NotFinite { parameter } => Err(Error::WeightsNotFinite { step, name: parameter }),
            Self::Failed { reason, is_full } => Err(CheckpointError::OfRank { rank, reason, is_full }.into()),
        }
    }
}

/// Gathers the reports of all parts on the first of `ranks`; `None` on the others. A collective call.
///
/// # Errors
/// On the first rank, if any rank has failed. On a rank whose weights are not finite, for that reason. On all, if the
/// communication fails.
pub(crate) fn gather(ranks: &Ranks, step: u64, own: Written) -> Result<Option<Vec<ShardReport>>, Error> {
    let told = ranks.gather(&PartOutcome::of(&own).to_bytes())?;
    if !ranks.is_first() {
        return match own {
            Err(error @ Error::WeightsNotFinite { .. }) => Err(error),
            _ => Ok(None),
        };
    }
    let of_others = told.iter().enumerate().skip(1);
    let of_others = of_others.map(|(rank, bytes)| PartOutcome::from_bytes(bytes).of_rank(rank, step));
    let reports: Vec<Option<ShardReport>> =
        std::iter::once(own).chain(of_others).collect::<Result<_, _>>()?;
    Ok(Some(reports.into_iter().flatten().collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_of_a_part_is_known_on_the_first_rank_with_its_number() {
        let not_finite = Error::WeightsNotFinite { step: 7, name: "w".to_owned() };
        let full = CheckpointError::Busy { dir: "runs".into() };
        let reason = format!("rank 3: {full}");
        for (own, expected) in [
            (Ok(None), None),
            (Err(not_finite), Some("w is not finite after step 7".to_owned())),
            (Err(full.into()), Some(reason)),
        ] {
            let arrived = PartOutcome::from_bytes(&PartOutcome::of(&own).to_bytes()).of_rank(3, 7);
            match (arrived, expected) {
                (Ok(report), None) => assert_eq!(report, None),
                (Err(error), Some(expected)) => {
                    assert!(error.to_string().starts_with(&expected), "{error}, expected {expected}");
                }
                (arrived, expected) => panic!("{arrived:?}, expected {expected:?}"),
            }
        }
        let garbled = PartOutcome::from_bytes(b"{\"Written\":").of_rank(2, 7).unwrap_err();
        assert!(
            garbled.to_string().starts_with("rank 2: the report of its part cannot be read"),
            "{garbled}"
        );
    }
}
