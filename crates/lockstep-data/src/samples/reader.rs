//! Reads and transforms the samples of a sequence by their global numbers: the one path from a data set to a batch.

use std::sync::Arc;

use super::{
    bad_samples::OnBadSample,
    dataset::Dataset,
    sequence::{SamplePlace, SampleSequence},
    tensor::Sample,
    transform::Transforms,
};
use crate::error::{DataError, ErrorKind, Result};

/// Number of damaged samples in a row after which skipping fails: such a data set is unusable.
const MOST_SKIPPED_IN_A_ROW: u64 = 100;

/// A data set with its transforms and its order: everything that decides what sample number `n` is.
#[derive(Debug)]
pub(crate) struct SampleReader {
    dataset: Arc<dyn Dataset>,
    transforms: Transforms,
    sequence: SampleSequence,
    seed: u64,
    on_bad_sample: OnBadSample,
}

impl SampleReader {
    /// Creates the reader; `seed` is that of the transforms.
    ///
    /// # Errors
    /// If a transform does not suit the data set, or `sequence` is for another number of samples.
    pub(crate) fn new(
        dataset: Arc<dyn Dataset>,
        transforms: Transforms,
        sequence: SampleSequence,
        seed: u64,
        on_bad_sample: OnBadSample,
    ) -> Result<Self> {
        if sequence.samples() != dataset.len() {
            let allowed = format!("{}, the samples of the data set", dataset.len());
            return Err(DataError::out_of_range(
                "the number of samples in the sequence",
                sequence.samples(),
                allowed,
            ));
        }
        transforms.output(dataset.tensors())?;
        Ok(Self { dataset, transforms, sequence, seed, on_bad_sample })
    }

    /// Returns the number of samples of an epoch.
    pub(crate) fn epoch_samples(&self) -> u64 {
        self.sequence.epoch_samples()
    }

    /// Reads and transforms the sample with the global number `number`. Returns the number of damaged samples that were
    /// skipped for it.
    ///
    /// # Errors
    /// If the sample cannot be read or transformed, and is not skipped.
    pub(crate) fn read(&self, number: u64, sample: &mut Sample) -> Result<u64> {
        let place = self.sequence.locate(number);
        let mut skipped = 0;
        loop {
            let at = SamplePlace { index: (place.index + skipped) % self.dataset.len(), ..place };
            let read = self.dataset.get_into(at.index, sample);
            let Err(error) = read.and_then(|()| self.transforms.apply(sample, self.seed, at)) else {
                return Ok(skipped);
            };
            let may_skip = self.on_bad_sample == OnBadSample::Skip
                && error.kind() == ErrorKind::CorruptInput
                && skipped < MOST_SKIPPED_IN_A_ROW.min(self.dataset.len() - 1);
            if !may_skip {
                return Err(at_sample(at, error));
            }
            tracing::warn!(sample = at.sample, index = at.index, %error, "a damaged sample is skipped");
            skipped += 1;
        }
    }

    /// Returns the error of a sample that does not stack with the others of its batch.
    pub(crate) fn unlike_its_batch(&self, number: u64, problem: String) -> DataError {
        let place = self.sequence.locate(number);
        at_sample(place, DataError::BadSample { index: place.index, problem })
    }
}

fn at_sample(place: SamplePlace, source: DataError) -> DataError {
    DataError::AtSample {
        sample: place.sample,
        epoch: place.epoch,
        index: place.index,
        source: Box::new(source),
    }
}
