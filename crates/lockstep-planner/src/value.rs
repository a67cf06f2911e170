//! The value of a candidate without offload: the fewest blocks that have to recompute, and the step time. The full computation is
//! made only where no cheaper bound shows that the candidate is worse.

use lockstep_plan::{MemoryBytes, Plan, Recompute};

use crate::search::{Candidate, Rejection, Subject};
use crate::trial::{Trial, ranks_to_book};
use crate::{Objective, Planner};

impl Subject for Planner {
    type Value = Plan;

    fn bound(&mut self, candidate: &Candidate) -> Option<f64> {
        self.lower_bound(candidate)
    }

    fn value(&mut self, candidate: &Candidate, limit: f64) -> Result<(f64, Plan), Rejection> {
        if !candidate.offload.is_nothing() {
            return self.value_offloaded(candidate, limit);
        }
        if self.is_needless(candidate)? {
            return Err(Rejection::Invalid);
        }
        let layers = self.model.config.num_hidden_layers();
        let mut trial = self.chosen(candidate)?;
        loop {
            let of_time = self.of_time(candidate, &trial, limit)?;
            if let Some(objective) = of_time
                && trial.count == 1
                && self.without(candidate)?.is_some_and(|without| without <= objective)
            {
                return Err(Rejection::Invalid);
            }
            let plan = self.planned(candidate, &trial).ok_or(Rejection::Invalid)?;
            let memory = self.booked(&plan, &trial, ranks_to_book(&trial.memory))?;
            let objective = of_time.unwrap_or_else(|| self.share_of_memory(candidate, &memory));
            if objective >= limit {
                return Err(Rejection::Worse);
            }
            let Some(lacking) = self.lacking(&trial.layout, &memory) else { return Ok((objective, plan)) };
            // The lower bounds ignored something: recompute more blocks.
            if trial.count == 0 || trial.count == layers {
                return Err(lacking);
            }
            let more = (trial.count + layers.div_ceil(32)).min(layers);
            trial = self.fitting(candidate, more)?;
        }
    }
}

impl Planner {
    /// Evaluates a candidate whose first `count` blocks recompute, with the ledger of every rank; tests compare searches with it.
    /// Stops early if the objective reaches `limit`.
    ///
    /// # Errors
    /// If the candidate is invalid or does not fit, or its objective is `limit` or more.
    pub fn value_of(
        &mut self,
        candidate: &Candidate,
        count: usize,
        limit: f64,
    ) -> Result<(f64, Plan), Rejection> {
        let trial = self.tried(candidate, count)?;
        let of_time = self.of_time(candidate, &trial, limit)?;
        let plan = self.planned(candidate, &trial).ok_or(Rejection::Invalid)?;
        let memory = self.booked(&plan, &trial, 0..trial.memory.len())?;
        let objective = of_time.unwrap_or_else(|| self.share_of_memory(candidate, &memory));
        match self.lacking(&trial.layout, &memory) {
            Some(lacking) => Err(lacking),
            None if objective >= limit => Err(Rejection::Worse),
            None => Ok((objective, plan)),
        }
    }

    /// Returns a candidate with the best number of recomputing blocks: the fewest with which every rank fits, since each takes
    /// time; all of them if the objective is headroom.
    fn chosen(&mut self, candidate: &Candidate) -> Result<Trial, Rejection> {
        if candidate.recompute == Recompute::None {
            return self.fitting(candidate, 0);
        }
        let layers = self.model.config.num_hidden_layers();
        let mut trial = self.fitting(candidate, layers)?;
        if self.objective == Objective::Headroom {
            return Ok(trial);
        }
        let mut too_few = 0;
        while trial.count > too_few + 1 {
            let middle = too_few.midpoint(trial.count);
            match self.fitting(candidate, middle) {
                Ok(fits) => trial = fits,
                Err(_) => too_few = middle,
            }
        }
        Ok(trial)
    }

    /// Returns true if a candidate recomputes although it fits without. In a pipeline recomputation may still balance the stages.
    fn is_needless(&mut self, candidate: &Candidate) -> Result<bool, Rejection> {
        let is_open = candidate.recompute == Recompute::None || candidate.degrees.pipeline > 1;
        if is_open || self.objective == Objective::Headroom {
            return Ok(false);
        }
        Ok(self.fitting_without(candidate)?.is_some())
    }

    /// Returns a candidate without recomputation, if it fits by the ledgers.
    fn fitting_without(&mut self, candidate: &Candidate) -> Result<Option<Trial>, Rejection> {
        let Ok(trial) = self.fitting(candidate, 0) else { return Ok(None) };
        let plan = self.planned(candidate, &trial).ok_or(Rejection::Invalid)?;
        let memory = self.booked(&plan, &trial, ranks_to_book(&trial.memory))?;
        Ok(self.lacking(&trial.layout, &memory).is_none().then_some(trial))
    }

    /// Returns the objective of a candidate without recomputation, if it then fits by the ledgers. A candidate with one recomputing
    /// block is a duplicate of that one, unless the block makes the split into stages faster.
    fn without(&mut self, candidate: &Candidate) -> Result<Option<f64>, Rejection> {
        let Some(trial) = self.fitting_without(candidate)? else { return Ok(None) };
        self.of_time(candidate, &trial, f64::INFINITY)
    }

    /// Returns the objective if it is time or price; `None` for headroom.
    ///
    /// # Errors
    /// [`Rejection::Worse`] if the objective is `limit` or more; [`Rejection::Invalid`] if the step cannot be predicted.
    fn of_time(
        &mut self,
        candidate: &Candidate,
        trial: &Trial,
        limit: f64,
    ) -> Result<Option<f64>, Rejection> {
        if self.objective == Objective::Headroom {
            return Ok(None);
        }
        let step_ms = self.step_ms(candidate, trial, |_| Vec::new(), limit)?;
        let objective = self.objective_of_time(candidate, step_ms);
        if objective < limit { Ok(Some(objective)) } else { Err(Rejection::Worse) }
    }

    /// Returns the objective of a candidate by its step time: milliseconds, or these times the hourly price of the nodes. Without prices
    /// a device costs 1.
    pub(crate) fn objective_of_time(&self, candidate: &Candidate, step_ms: f64) -> f64 {
        let devices = self.ranks_of(candidate);
        match self.objective {
            Objective::Time | Objective::Headroom => step_ms,
            Objective::Cost => self.price_per_hour(devices).unwrap_or(devices as f64) * step_ms,
        }
    }

    /// Returns the largest booked bytes of a rank as a fraction of the capacity.
    pub(crate) fn share_of_memory(&self, candidate: &Candidate, memory: &[MemoryBytes]) -> f64 {
        let largest = memory.iter().map(MemoryBytes::total).max().unwrap_or(0);
        largest as f64 / self.capacity_bytes(self.ranks_of(candidate)).max(1) as f64
    }

    pub(crate) fn ranks_of(&self, candidate: &Candidate) -> usize {
        candidate.degrees.world_size().unwrap_or(usize::MAX)
    }
}
