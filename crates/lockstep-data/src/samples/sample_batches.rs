//! Samples as the micro-batches of a run: a data set, its transforms and its order.

use std::{ops::Range, sync::Arc};

use rayon::prelude::*;

use super::{dataset::Dataset, sequence::SampleSequence, tensor::Sample, transform::Transforms};
use crate::{
    batch::MicroBatch,
    batch_source::BatchSource,
    error::{DataError, Result},
    samples::batch::Batch,
};

/// A data set with its transforms in its order, from which a run fills micro-batches. Samples are read and transformed on all
/// of the process's threads.
#[derive(Debug)]
pub struct SampleBatches {
    dataset: Arc<dyn Dataset>,
    transforms: Transforms,
    sequence: SampleSequence,
    seed: u64,
}

impl SampleBatches {
    /// Creates the source; `seed` is that of the transforms.
    ///
    /// # Errors
    /// If a transform does not fit the tensors of the data set, or the sequence is for another number of samples.
    pub fn new(
        dataset: Arc<dyn Dataset>,
        transforms: Transforms,
        sequence: SampleSequence,
        seed: u64,
    ) -> Result<Self> {
        transforms.output(dataset.tensors())?;
        if sequence.samples() != dataset.len() {
            return Err(DataError::out_of_range(
                "the number of samples in the sequence",
                sequence.samples(),
                format!("{}, the samples of the data set", dataset.len()),
            ));
        }
        Ok(Self { dataset, transforms, sequence, seed })
    }

    /// Reads and transforms a sample by its global number.
    fn sample(&self, number: u64) -> Result<Sample> {
        let place = self.sequence.locate(number);
        let mut sample = Sample::default();
        self.dataset.get_into(place.index, &mut sample)?;
        self.transforms.apply(&mut sample, self.seed, place)?;
        Ok(sample)
    }
}

impl BatchSource for SampleBatches {
    fn samples(&self) -> u64 {
        self.sequence.epoch_samples()
    }

    fn fill(&self, samples: Range<u64>, batch: &mut MicroBatch) -> Result<()> {
        batch.clear(1);
        let mut stacked =
            Batch { tensors: std::mem::take(&mut batch.inputs), sample_numbers: Vec::new(), skipped: 0 };
        let read: Vec<Result<Sample>> =
            samples.clone().into_par_iter().map(|number| self.sample(number)).collect();
        for (number, sample) in samples.zip(read) {
            let sample = sample?;
            let place = self.sequence.locate(number);
            stacked
                .push(&sample, number)
                .map_err(|why| DataError::BadSample { index: place.index, problem: why })?;
        }
        batch.sequences = stacked.samples();
        batch.inputs = stacked.tensors;
        batch.sample_numbers = stacked.sample_numbers;
        Ok(())
    }
}
