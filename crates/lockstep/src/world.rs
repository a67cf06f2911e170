//! The ranks of a program, as one of them sees them.

use std::time::Duration;

use lockstep_comm::{CommError, Deadline, Group};
use lockstep_engine::{Groups, Ranks};
use lockstep_launch::interrupt::Interrupt;
use lockstep_plan::CheckedPlan;

use crate::error::Error;

/// Longest wait for other ranks.
const LIMIT: Duration = Duration::from_secs(600);

/// The ranks of a program, as one of them sees them: what `torch.distributed` is after `init_process_group`.
pub struct World {
    group: Option<Group>,
    interrupt: Interrupt,
}

impl World {
    pub(crate) fn new(group: Option<Group>, interrupt: Interrupt) -> Self {
        Self { group: group.filter(|group| group.size() > 1), interrupt }
    }

    /// Returns the rank of this process, from 0.
    pub fn rank(&self) -> usize {
        self.group.as_ref().map_or(0, Group::rank)
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.group.as_ref().map_or(1, Group::size)
    }

    /// Returns true on rank 0, which prints and writes files.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Returns true once the run was asked to stop (Ctrl-C, SIGTERM): save and return.
    pub fn is_interrupted(&self) -> bool {
        self.interrupt.is_requested()
    }

    pub(crate) fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// Returns the group of all ranks, for collectives of your own; `None` for a single rank.
    pub fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// Waits until all ranks have called this.
    ///
    /// # Errors
    /// If a rank is lost, or does not come within ten minutes.
    pub fn barrier(&self) -> Result<(), CommError> {
        self.group.as_ref().map_or(Ok(()), |group| group.barrier(Deadline::after(LIMIT)))
    }

    /// Returns the sum over ranks of a number of each; the additions are in the order of the ranks.
    ///
    /// # Errors
    /// If a rank is lost, or does not come within ten minutes.
    #[track_caller]
    pub fn sum(&self, value: f64) -> Result<f64, CommError> {
        Ok(self.gather(value)?.into_iter().sum())
    }

    /// Returns the largest of the ranks' numbers, on all ranks.
    ///
    /// # Errors
    /// If a rank is lost, or does not come within ten minutes.
    #[track_caller]
    pub fn maximum(&self, value: f64) -> Result<f64, CommError> {
        Ok(self.gather(value)?.into_iter().fold(f64::NEG_INFINITY, f64::max))
    }

    /// Returns the number of each rank, on all ranks.
    ///
    /// # Errors
    /// If a rank is lost, or does not come within ten minutes.
    #[track_caller]
    pub fn gather(&self, value: f64) -> Result<Vec<f64>, CommError> {
        let Some(group) = &self.group else { return Ok(vec![value]) };
        let mut bits = vec![0_i64; group.size()];
        group.all_gather(&[value.to_bits().cast_signed()][..], &mut bits[..], Deadline::after(LIMIT))?;
        Ok(bits.into_iter().map(|bits| f64::from_bits(bits.cast_unsigned())).collect())
    }

    /// Returns on all ranks the text that `make` returns on rank 0. Collective: every rank calls it.
    ///
    /// # Errors
    /// On rank 0 the error of `make`; on the others, that rank 0 has failed. If a rank is lost.
    pub(crate) fn made_by_first<E: From<Error>>(
        &self,
        make: impl FnOnce() -> Result<String, E>,
    ) -> Result<String, E> {
        let Some(group) = &self.group else { return make() };
        let own = self.is_first().then(make).transpose();
        let length = own.as_ref().ok().map(|text| text.as_ref().map_or(0, String::len) as i64);
        let mut length = [length.unwrap_or(-1)];
        group.broadcast(&mut length[..], 0, Deadline::after(LIMIT)).map_err(Error::from)?;
        let mut bytes = own?.unwrap_or_default().into_bytes();
        let Ok(length) = usize::try_from(length[0]) else { return Err(Error::FirstRank.into()) };
        bytes.resize(length, 0);
        group.broadcast(&mut bytes[..], 0, Deadline::after(LIMIT)).map_err(Error::from)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Returns the ranks in the layout of a plan. Collective: every rank calls it.
    pub(crate) fn planned(&self, plan: &CheckedPlan) -> Result<Ranks, CommError> {
        match &self.group {
            None => Ok(Ranks::alone()),
            Some(group) => Ok(Ranks::new(Groups::new(group.clone(), plan.rank(self.rank()), LIMIT)?)),
        }
    }
}
