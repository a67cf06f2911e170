//! Data sets that can only be read in sequence, and their adapter to reading by index.
//!
//! A sample is identified by its position in the sequence, so the state of a run stays the number of samples consumed.
//! A resume skips to the position. Their order may be sequential or shuffled within windows
//! ([`Shuffle::Window`](super::Shuffle::Window)); a shuffle of the whole would read the sequence again for each sample.

use std::{
    collections::VecDeque,
    fmt::Debug,
    fs,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    dataset::{Dataset, check_index},
    record_index::{parse_numbers, write_numbers},
    tensor::{Sample, TensorSpec},
};
use crate::error::{DataError, Result};

/// Samples in sequence. An item that is an error stands for a damaged sample and counts as one.
pub type SampleIter = Box<dyn Iterator<Item = Result<Sample>> + Send>;

/// Data set that is read in sequence: a stream, a generator, a compressed archive. Each pass gives the same samples.
pub trait IterableDataset: Debug + Send + Sync {
    /// Returns the tensors that every sample has, in order.
    fn tensors(&self) -> Vec<TensorSpec>;

    /// Starts a pass.
    ///
    /// # Errors
    /// If the source cannot be opened.
    fn iter(&self) -> Result<SampleIter>;

    /// Starts a pass at sample `start`. By default it reads and drops the samples before; a source that can seek does
    /// better.
    ///
    /// # Errors
    /// If the source cannot be opened.
    fn iter_from(&self, start: u64) -> Result<SampleIter> {
        let mut samples = self.iter()?;
        for _ in 0..start {
            if samples.next().is_none() {
                break;
            }
        }
        Ok(samples)
    }

    /// Returns the number of samples if it is known without a pass.
    fn known_len(&self) -> Option<u64> {
        None
    }

    /// Returns a name of the contents, such as their hash: with other contents it must be another. The number of samples
    /// is cached under it. `None` counts at each start.
    fn content_key(&self) -> Option<String> {
        None
    }
}

/// Iterable data set that is read by index.
///
/// It keeps two passes, because two epochs overlap at their border, and of each the last `window` samples that were read.
/// An index within them or at most `window` after them continues a pass; any other starts one in place of the pass that
/// was used least recently. So `window` should hold all samples that are in use at once: a loader's `workers` ×
/// `prefetch_batches` batches, and twice the window of a shuffle. A smaller one is slow, but gives the same samples.
/// Every rank reads the whole sequence and takes its samples.
#[derive(Debug)]
pub struct StreamDataset {
    source: Arc<dyn IterableDataset>,
    samples: u64,
    window: usize,
    /// Passes, the last used first.
    passes: Mutex<[Pass; 2]>,
}

/// Pass over the source, with its last samples.
#[derive(Default)]
struct Pass {
    iter: Option<SampleIter>,
    /// Position of the next sample of `iter`.
    next: u64,
    /// Last samples before `next`; `None` for one that was damaged.
    kept: VecDeque<Option<Sample>>,
}

impl Pass {
    /// Returns the kept sample at `index`.
    fn kept(&self, index: u64) -> Option<&Sample> {
        let first = self.next - self.kept.len() as u64;
        let place = usize::try_from(index.checked_sub(first)?).ok()?;
        self.kept.get(place)?.as_ref()
    }

    /// Returns the number of samples to read to give the one at `index`, at most `window` + 1; `None` if the pass is too
    /// far before or behind.
    fn samples_to(&self, index: u64, window: usize) -> Option<u64> {
        if self.kept(index).is_some() {
            return Some(0);
        }
        let ahead = index.checked_sub(self.next).filter(|&ahead| ahead <= window as u64);
        ahead.filter(|_| self.iter.is_some()).map(|ahead| ahead + 1)
    }
}

impl Debug for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pass")
            .field("next", &self.next)
            .field("kept", &self.kept.len())
            .finish_non_exhaustive()
    }
}

impl StreamDataset {
    /// Creates a data set that keeps `window` samples. If the number of samples is unknown, it is read from `cache_dir`,
    /// or counted by one pass and cached there under [`IterableDataset::content_key`].
    ///
    /// # Errors
    /// If `window` is 0, the pass that counts fails to start, or the cache directory cannot be written.
    pub fn new(source: Arc<dyn IterableDataset>, window: usize, cache_dir: Option<&Path>) -> Result<Self> {
        if window == 0 {
            return Err(DataError::out_of_range("the window of a stream", 0, "1 or more"));
        }
        let samples = count_samples(source.as_ref(), cache_dir)?;
        Ok(Self { source, samples, window, passes: Mutex::default() })
    }
}

/// Returns the number of samples: the known one, the cached one, or that of a pass.
fn count_samples(source: &dyn IterableDataset, cache_dir: Option<&Path>) -> Result<u64> {
    if let Some(samples) = source.known_len() {
        return Ok(samples);
    }
    let cached = cache_dir.zip(source.content_key()).map(|(directory, key)| {
        let hash = blake3::hash(format!("lockstep sample count 1\n{key}").as_bytes());
        (directory, directory.join(format!("{}.index", hash.to_hex())))
    });
    if let Some((_, path)) = &cached
        && let Some([samples]) = fs::read(path).ok().as_deref().and_then(parse_numbers).as_deref()
    {
        return Ok(*samples);
    }
    let samples = source.iter()?.count() as u64;
    if let Some((directory, path)) = cached {
        write_numbers(directory, &path, &[samples])?;
    }
    Ok(samples)
}

impl Dataset for StreamDataset {
    fn len(&self) -> u64 {
        self.samples
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.source.tensors()
    }

    fn get(&self, index: u64) -> Result<Sample> {
        check_index(index, self.samples)?;
        let mut passes = self.passes.lock().unwrap_or_else(PoisonError::into_inner);
        let [last, other] =
            passes.each_ref().map(|pass| pass.samples_to(index, self.window).unwrap_or(u64::MAX));
        if other <= last && last > 0 {
            passes.swap(0, 1);
        }
        let pass = &mut passes[0];
        if let Some(sample) = pass.kept(index) {
            return Ok(sample.clone());
        }
        // A sample before the windows, a damaged one (whose error is wanted again), or one far ahead.
        if pass.samples_to(index, self.window).is_none() {
            *pass = Pass { iter: Some(self.source.iter_from(index)?), next: index, kept: VecDeque::new() };
        }
        loop {
            let Some(read) = pass.iter.as_mut().and_then(Iterator::next) else {
                let problem =
                    format!("the stream ends after {} samples, but it has had {}", pass.next, self.samples);
                pass.iter = None;
                return Err(DataError::BadSample { index, problem });
            };
            let is_wanted = pass.next == index;
            pass.next += 1;
            if pass.kept.len() == self.window {
                pass.kept.pop_front();
            }
            match read {
                Ok(sample) => {
                    let wanted = is_wanted.then(|| sample.clone());
                    pass.kept.push_back(Some(sample));
                    if let Some(sample) = wanted {
                        return Ok(sample);
                    }
                }
                Err(error) => {
                    pass.kept.push_back(None);
                    if is_wanted {
                        return Err(error);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use lockstep_plan::DType;

    use super::*;
    use crate::samples::tensor::{NamedTensor, TensorData};

    /// Numbers `0..10`, of which 4 is damaged; counts the passes.
    #[derive(Debug, Default)]
    struct Numbers {
        passes: AtomicU64,
    }

    impl IterableDataset for Numbers {
        fn tensors(&self) -> Vec<TensorSpec> {
            vec![TensorSpec::fixed("n", DType::I32, &[])]
        }

        fn iter(&self) -> Result<SampleIter> {
            self.passes.fetch_add(1, Ordering::Relaxed);
            Ok(Box::new((0..10).map(|n| match n {
                4 => Err(DataError::BadSample { index: 4, problem: "it is four".to_owned() }),
                _ => Ok(Sample::new(vec![NamedTensor::new("n", &[], TensorData::I32(vec![n]))])),
            })))
        }

        fn content_key(&self) -> Option<String> {
            Some("numbers".to_owned())
        }
    }

    fn number(data: &StreamDataset, index: u64) -> i32 {
        data.get(index).unwrap().tensor("n").unwrap().data.as_i32().unwrap()[0]
    }

    #[test]
    fn any_index_gives_its_sample_and_those_of_the_window_need_no_new_pass() {
        let source = Arc::new(Numbers::default());
        let data = StreamDataset::new(Arc::clone(&source) as Arc<dyn IterableDataset>, 4, None).unwrap();
        assert_eq!(data.len(), 10);
        for index in [2, 0, 1, 3, 6, 5, 8, 7] {
            assert_eq!(number(&data, index), index as i32);
        }
        // One to count, one for the index 2, one for the indexes from 0 on.
        assert_eq!(source.passes.load(Ordering::Relaxed), 3);
        assert_eq!(number(&data, 1), 1);
        for _ in 0..2 {
            assert!(data.get(4).unwrap_err().to_string().contains("it is four"));
        }
        assert!(data.get(10).is_err());
    }

    #[test]
    fn two_epochs_that_overlap_need_one_pass_each() {
        let source = Arc::new(Numbers::default());
        let data = StreamDataset::new(Arc::clone(&source) as Arc<dyn IterableDataset>, 4, None).unwrap();
        for index in [5, 6, 7, 0, 8, 1, 9, 2, 7, 3] {
            assert_eq!(number(&data, index), index as i32);
        }
        // One to count, one for each epoch.
        assert_eq!(source.passes.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn the_count_is_cached_by_the_content_key() {
        let dir = tempfile::tempdir().unwrap();
        for passes in [1, 0] {
            let source = Arc::new(Numbers::default());
            let shared = Arc::clone(&source) as Arc<dyn IterableDataset>;
            assert_eq!(StreamDataset::new(shared, 1, Some(dir.path())).unwrap().len(), 10);
            assert_eq!(source.passes.load(Ordering::Relaxed), passes);
        }
    }
}
