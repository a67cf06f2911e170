//! Samples as the micro-batches of a run: a data set, its transforms and its order.

use std::{io, ops::Range, sync::Arc};

use rayon::{ThreadPool, ThreadPoolBuilder, prelude::*};

use super::{
    bad_samples::OnBadSample, batch::Batch, dataset::Dataset, reader::SampleReader, sequence::SampleSequence,
    tensor::Sample, transform::Transforms,
};
use crate::{
    batch::MicroBatch,
    batch_source::BatchSource,
    error::{DataError, Result},
};

/// Options of [`SampleBatches`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadOptions {
    /// Random seed of the transforms.
    pub seed: u64,
    /// Number of threads that read and transform samples; 1 or more.
    pub workers: usize,
    /// Reaction to a damaged sample, as for [`LoaderOptions`](super::LoaderOptions).
    pub on_bad_sample: OnBadSample,
}

/// A data set with its transforms in its order, from which a run fills micro-batches. Samples are read and transformed on
/// threads of its own; their number changes no batch.
#[derive(Debug)]
pub struct SampleBatches {
    reader: SampleReader,
    threads: ThreadPool,
}

impl SampleBatches {
    /// Creates the source and its threads.
    ///
    /// # Errors
    /// If a transform does not fit the tensors of the data set, the sequence is for another number of samples, or the
    /// threads cannot be started.
    pub fn new(
        dataset: Arc<dyn Dataset>,
        transforms: Transforms,
        sequence: SampleSequence,
        options: ReadOptions,
    ) -> Result<Self> {
        if options.workers == 0 {
            return Err(DataError::out_of_range("workers", 0, "1 or more"));
        }
        let reader = SampleReader::new(dataset, transforms, sequence, options.seed, options.on_bad_sample)?;
        let threads = ThreadPoolBuilder::new()
            .num_threads(options.workers)
            .thread_name(|worker| format!("lockstep-read-{worker}"))
            .build()
            .map_err(io::Error::other)
            .map_err(DataError::io("start", "the threads that read samples".as_ref()))?;
        Ok(Self { reader, threads })
    }

    /// Reads and transforms samples by their global numbers, each with the number of those skipped for it.
    fn read(&self, numbers: Range<u64>) -> Vec<Result<(Sample, u64)>> {
        let read = |number| {
            let mut sample = Sample::default();
            let skipped = self.reader.read(number, &mut sample)?;
            Ok((sample, skipped))
        };
        self.threads.install(|| numbers.into_par_iter().map(read).collect())
    }
}

impl BatchSource for SampleBatches {
    fn samples(&self) -> u64 {
        self.reader.epoch_samples()
    }

    fn fill(&self, samples: Range<u64>, batch: &mut MicroBatch) -> Result<()> {
        batch.clear(1);
        let mut stacked = Batch { tensors: std::mem::take(&mut batch.inputs), ..Batch::default() };
        for (number, read) in samples.clone().zip(self.read(samples)) {
            let (sample, skipped) = read?;
            stacked.skipped += skipped;
            stacked.push(&sample, number).map_err(|problem| self.reader.unlike_its_batch(number, problem))?;
        }
        batch.sequences = stacked.samples();
        batch.skipped = stacked.skipped;
        batch.inputs = stacked.tensors;
        batch.sample_numbers = stacked.sample_numbers;
        Ok(())
    }
}
