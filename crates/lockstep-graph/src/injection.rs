//! Injection of a test's fault into a recording.

use lockstep_plan::{Among, Shard};

use crate::{
    faults::{self, Fault},
    recorder::Recorder,
};

impl Recorder {
    /// Returns the recording with the fault of this thread, if there is one.
    pub(crate) fn with_fault(mut self) -> Self {
        if let Some(fault) = faults::current() {
            self.operations.iter_mut().for_each(|operation| operation.inject(fault));
            change_parameters(&mut self, fault);
            if fault == Fault::FirstOfContext {
                self.context.rank = 0;
            }
        }
        self
    }
}

fn change_parameters(recorder: &mut Recorder, fault: Fault) {
    let from_zero = |shard: &mut Option<Shard>| shard.iter_mut().for_each(|shard| shard.start = 0);
    for share in recorder.parameters.iter_mut().map(|parameter| &mut parameter.share) {
        match (fault, share.among) {
            (Fault::ShardsFromZero, Among::Tensor | Among::TensorColumn)
            | (Fault::ExpertsFromFirst, Among::Experts) => from_zero(&mut share.shard),
            (Fault::BlocksFromZero, Among::Tensor | Among::TensorColumn)
            | (Fault::PartsOfExpertsFromZero, Among::Experts) => from_zero(&mut share.inner),
            (Fault::ReplicasCountedTwice, _) => share.copies = 1,
            (Fault::PartialTakenAsReduced, _) => share.summands = 1,
            _ => {}
        }
    }
}
