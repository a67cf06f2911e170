//! The optimizer steps of the CPU's queue.

use lockstep_plan::exact::ExactSum;

use super::{adamw::adamw, lion::lion, muon::muon, norm::sum_of_squares, sgd::sgd};
use crate::{AdamW, CpuQueue, Lion, Muon, OptimizerKernels, Pending, Sgd, View};

impl OptimizerKernels for CpuQueue {
    fn adamw(&self, step: &AdamW<'_>) {
        adamw(self, step);
    }

    fn sgd(&self, step: &Sgd<'_>) {
        sgd(self, step);
    }

    fn lion(&self, step: &Lion<'_>) {
        lion(self, step);
    }

    fn muon(&self, step: &Muon<'_>) {
        muon(self, step);
    }

    fn sum_of_squares(&self, x: View<'_>) -> Pending<'static, ExactSum> {
        Pending::ready(sum_of_squares(self, x))
    }
}
