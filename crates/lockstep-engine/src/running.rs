//! Running statistics of batch norms: sums over a step's micro-batches, and the change that they make after the step.
//!
//! A step moves each running statistic once, by the mean over the statistics of its micro-batches on all data-parallel ranks,
//! so that every rank keeps the same ones. With one micro-batch on one rank this is what PyTorch does.

use lockstep_comm::CommError;
use lockstep_graph::Program;
use lockstep_model::RecordedModel;
use lockstep_plan::ParameterId;
use lockstep_tensor::Buffer;

use crate::Groups;

/// Statistics of one batch norm, summed over micro-batches.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RunningSum {
    unit: usize,
    /// Running mean and running variance.
    pub(crate) ids: [ParameterId; 2],
    /// Weight of the newest batch.
    pub(crate) momentum: f32,
    /// Sums over micro-batches of the means and of the unbiased variances, `[2 · channels]`.
    sums: Vec<f64>,
    /// Number of micro-batches.
    count: u64,
}

/// Statistics of all batch norms of a rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct RunningSums {
    norms: Vec<RunningSum>,
    /// Host copy of one micro-batch's statistics.
    scratch: Vec<f32>,
}

impl RunningSums {
    /// Returns empty sums for the batch norms of `model`.
    pub(crate) fn new(model: &RecordedModel) -> Self {
        let mut norms = Vec::new();
        for unit in 0..model.units() {
            let ids = model.unit_parameters(unit);
            for update in model.program(unit).running_updates() {
                let ids = update.parameters.map(|index| ids[index.0]);
                let channels: usize = model.records()[ids[0].0].shape.iter().product();
                let (momentum, sums) = (update.momentum, vec![0.0; 2 * channels]);
                norms.push(RunningSum { unit, ids, momentum, sums, count: 0 });
            }
        }
        Self { norms, scratch: Vec::new() }
    }

    /// Returns true if the model has no batch norm.
    pub(crate) fn is_empty(&self) -> bool {
        self.norms.is_empty()
    }

    /// Forgets the sums of the last step.
    pub(crate) fn clear(&mut self) {
        for norm in &mut self.norms {
            norm.sums.fill(0.0);
            norm.count = 0;
        }
    }

    /// Adds the statistics of a micro-batch after the forward of a unit.
    pub(crate) fn add(&mut self, unit: usize, program: &Program, frame: &Buffer) {
        let norms = self.norms.iter_mut().filter(|norm| norm.unit == unit);
        for (norm, update) in norms.zip(program.running_updates()) {
            let statistics = program.statistics(frame, update);
            self.scratch.resize(statistics.elements(), 0.0);
            statistics.reshape([statistics.elements()]).read(&mut self.scratch).wait();
            let channels = norm.sums.len() / 2;
            let (means, variances) = norm.sums.split_at_mut(channels);
            let (rows, rest) = self.scratch.split_at(channels);
            let (mean, squares) = rest.split_at(channels);
            for channel in 0..channels {
                means[channel] += f64::from(mean[channel]);
                // The unbiased variance, as PyTorch keeps it.
                variances[channel] += f64::from(squares[channel]) / (f64::from(rows[channel]) - 1.0).max(1.0);
            }
            norm.count += 1;
        }
    }

    /// Adds up the sums of all ranks. Ranks that compute the same statistics weigh them alike, so the mean stays.
    ///
    /// # Errors
    /// If a rank is lost or does not answer in time.
    pub(crate) fn sum(&mut self, groups: &Groups) -> Result<(), CommError> {
        if self.norms.is_empty() {
            return Ok(());
        }
        let flat = self.norms.iter().flat_map(|norm| norm.sums.iter().copied().chain([norm.count as f64]));
        let mut flat: Vec<f64> = flat.collect();
        groups.add_up_over_world(&mut flat)?;
        let mut rest = &flat[..];
        for norm in &mut self.norms {
            let (sums, later) = rest.split_at(norm.sums.len());
            norm.sums.copy_from_slice(sums);
            norm.count = later[0] as u64;
            rest = &later[1..];
        }
        Ok(())
    }

    /// Returns the batch norms whose statistics the step has moved.
    pub(crate) fn moved(&self) -> impl Iterator<Item = &RunningSum> {
        self.norms.iter().filter(|norm| norm.count > 0)
    }
}

impl RunningSum {
    /// Moves a running statistic: 0 is the mean, 1 the variance.
    pub(crate) fn move_running(&self, which: usize, running: &mut [f32]) {
        let channels = self.sums.len() / 2;
        let batch = &self.sums[which * channels..(which + 1) * channels];
        for (running, sum) in running.iter_mut().zip(batch) {
            let mean = (sum / self.count as f64) as f32;
            *running += self.momentum * (mean - *running);
        }
    }
}
