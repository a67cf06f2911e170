//! Tests of the loader: batches do not depend on threads, ranks or a resume; errors come at their sample.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use lockstep_data::{
    DataError, ErrorKind, SampleCursor, SampleOrder,
    samples::{
        Batch, CenterCrop, Cifar, CifarKind, Dataset, EpochEnd, IterableDataset, Loader, LoaderOptions,
        Normalize, OnBadSample, RandomCrop, RandomHorizontalFlip, RandomResizedCrop, SampleIter,
        SampleSequence, Shuffle, Split, StreamDataset, TensorSpec, ToFloat, Transforms, one_epoch,
        write_synthetic_cifar10,
    },
};
use proptest::prelude::*;

use crate::workshop::{Numbers, assert_says};

fn augmentation() -> Transforms {
    let (mean, std) = Normalize::CIFAR10;
    Transforms::new()
        .then("image", RandomCrop { height: 32, width: 32, padding: 4 })
        .then("image", RandomHorizontalFlip)
        .then("image", RandomResizedCrop { height: 20, width: 16 })
        .then("image", CenterCrop { height: 16, width: 16 })
        .then("image", ToFloat)
        .then("image", Normalize::new(&mean, &std).unwrap())
}

fn cifar(dir: &Path) -> Arc<Cifar> {
    write_synthetic_cifar10(dir, 25, 4, 1).unwrap();
    Arc::new(Cifar::open(dir, CifarKind::Cifar10, Split::Train).unwrap())
}

/// Reads all batches and recycles them.
fn all_batches(mut loader: Loader) -> Vec<Batch> {
    let mut batches = Vec::new();
    while let Some(batch) = loader.next_batch().unwrap() {
        batches.push(batch.clone());
        loader.recycle(batch);
    }
    assert_eq!(loader.next_batch().unwrap(), None);
    batches
}

fn load(
    data: &Arc<Cifar>,
    cursor: SampleCursor,
    steps: u64,
    workers: usize,
    prefetch_batches: usize,
) -> Vec<Batch> {
    let order = SampleOrder::Shuffle { seed: 9 };
    let sequence = SampleSequence::new(order, data.len(), EpochEnd::Continue).unwrap();
    let options = LoaderOptions { seed: 5, workers, prefetch_batches, ..LoaderOptions::default() };
    let data = Arc::clone(data) as Arc<dyn Dataset>;
    all_batches(Loader::start(data, augmentation(), sequence, cursor.ranges(steps), options).unwrap())
}

#[test]
fn batches_depend_neither_on_threads_nor_on_ranks_nor_on_a_resume() {
    let dir = tempfile::tempdir().unwrap();
    let data = cifar(dir.path());
    let whole = load(&data, SampleCursor::single(0, 6, 6).unwrap(), 10, 1, 1);
    assert_eq!(whole.len(), 10);
    let image = whole[0].tensor("image").unwrap();
    assert_eq!((&*image.shape, image.data.len()), (&[6, 16, 16, 3][..], 6 * 16 * 16 * 3));
    assert_eq!(whole[0].tensor("label").unwrap().shape, [6]);
    for (workers, depth) in [(2, 2), (5, 1), (3, 4)] {
        assert_eq!(load(&data, SampleCursor::single(0, 6, 6).unwrap(), 10, workers, depth), whole);
    }
    // A resume after 4 steps.
    assert_eq!(load(&data, SampleCursor::single(24, 6, 6).unwrap(), 6, 2, 2), whole[4..]);
    // Three ranks of two samples each.
    let ranks: Vec<Vec<Batch>> = (0..3)
        .map(|replica| {
            let cursor =
                SampleCursor { samples_consumed: 0, global_batch: 6, micro_batch: 2, replica, replicas: 3 };
            load(&data, cursor, 10, 2, 2)
        })
        .collect();
    for (step, batch) in whole.iter().enumerate() {
        for tensor in &batch.tensors {
            let parts = ranks.iter().map(|batches| batches[step].tensor(&tensor.name).unwrap());
            match tensor.data.as_f32() {
                Some(values) => {
                    assert_eq!(
                        parts.flat_map(|part| part.data.as_f32().unwrap()).collect::<Vec<_>>(),
                        values.iter().collect::<Vec<_>>()
                    );
                }
                None => {
                    let values = tensor.data.as_i32().unwrap();
                    assert!(parts.flat_map(|part| part.data.as_i32().unwrap()).eq(values));
                }
            }
        }
    }
    // An image is augmented otherwise in the next epoch.
    let shown: Vec<Batch> = load(&data, SampleCursor::single(0, 25, 25).unwrap(), 2, 1, 1);
    assert_ne!(shown[0].tensor("image"), shown[1].tensor("image"));
}

fn numbers(batch: &Batch) -> Vec<i32> {
    batch.tensor("n").unwrap().data.as_i32().unwrap().to_vec()
}

fn start(data: Numbers, ranges: Vec<std::ops::Range<u64>>, options: LoaderOptions) -> Loader {
    let sequence = SampleSequence::new(SampleOrder::Sequential, data.n, EpochEnd::Continue).unwrap();
    Loader::start(Arc::new(data), Transforms::new(), sequence, ranges.into_iter(), options).unwrap()
}

#[test]
fn an_error_comes_at_its_sample_after_all_batches_before_it() {
    for workers in [1, 4] {
        let data = Numbers { n: 20, bad: vec![13], panics: None };
        let options = LoaderOptions { workers, ..LoaderOptions::default() };
        // Sample numbers of the second epoch.
        let mut loader =
            start(data, one_epoch(20, 5).map(|range| range.start + 20..range.end + 20).collect(), options);
        assert_eq!(numbers(&loader.next_batch().unwrap().unwrap()), [0, 1, 2, 3, 4]);
        assert_eq!(numbers(&loader.next_batch().unwrap().unwrap()), [5, 6, 7, 8, 9]);
        let parts = ["sample 33 (epoch 1, index 13)", "it is damaged"];
        assert_says(loader.next_batch(), ErrorKind::CorruptInput, &parts);
        assert_eq!(loader.next_batch().unwrap(), None, "no batch follows");
    }
}

#[test]
fn damaged_samples_are_replaced_by_the_next_and_counted() {
    for workers in [1, 3] {
        let data = Numbers { n: 10, bad: vec![3, 4, 9], panics: None };
        let options = LoaderOptions { workers, on_bad_sample: OnBadSample::Skip, ..LoaderOptions::default() };
        let mut loader = start(data, one_epoch(10, 5).collect(), options);
        let first = loader.next_batch().unwrap().unwrap();
        assert_eq!((numbers(&first), first.skipped, loader.skipped()), (vec![0, 1, 2, 5, 5], 3, 3));
        let second = loader.next_batch().unwrap().unwrap();
        assert_eq!((numbers(&second), second.skipped, loader.skipped()), (vec![5, 6, 7, 8, 0], 1, 4));
        assert_eq!(second.sample_numbers, [5, 6, 7, 8, 9]);
    }
    let data = Numbers { n: 10, bad: (0..10).collect(), panics: None };
    let options = LoaderOptions { on_bad_sample: OnBadSample::Skip, ..LoaderOptions::default() };
    let mut loader = start(data, one_epoch(10, 5).collect(), options);
    assert_says(loader.next_batch(), ErrorKind::CorruptInput, &["it is damaged"]);
}

#[test]
fn a_panic_in_a_data_set_is_an_error_at_its_batch() {
    let data = Numbers { n: 20, bad: Vec::new(), panics: Some(7) };
    let mut loader = start(data, one_epoch(20, 5).collect(), LoaderOptions::default());
    assert_eq!(numbers(&loader.next_batch().unwrap().unwrap()), [0, 1, 2, 3, 4]);
    assert_says(loader.next_batch(), ErrorKind::Failed, &["a data thread panicked"]);
    assert_eq!(loader.next_batch().unwrap(), None);
}

#[test]
fn a_panic_of_the_ranges_is_an_error_and_no_endless_wait() {
    for workers in [1, 3] {
        let sequence = SampleSequence::new(SampleOrder::Sequential, 20, EpochEnd::Continue).unwrap();
        let ranges = std::iter::from_fn(|| panic!("the user's iterator"));
        let options = LoaderOptions { workers, ..LoaderOptions::default() };
        let data = Arc::new(Numbers { n: 20, bad: Vec::new(), panics: None });
        let mut loader = Loader::start(data, Transforms::new(), sequence, ranges, options).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(loader.next_batch()));
        let batch = receiver.recv_timeout(Duration::from_secs(10)).expect("the loader answers");
        assert_says(batch, ErrorKind::Failed, &["a data thread panicked"]);
    }
}

#[test]
fn a_dropped_loader_ends_its_threads_within_a_sample() {
    #[derive(Debug)]
    struct Slow;
    impl Dataset for Slow {
        fn len(&self) -> u64 {
            1 << 30
        }
        fn tensors(&self) -> Vec<TensorSpec> {
            Vec::new()
        }
        fn get(&self, _: u64) -> Result<lockstep_data::samples::Sample, DataError> {
            std::thread::sleep(Duration::from_millis(10));
            Ok(lockstep_data::samples::Sample::default())
        }
    }
    let sequence = SampleSequence::new(SampleOrder::Sequential, 1 << 30, EpochEnd::Continue).unwrap();
    let ranges = (0..).map(|i| i * 100_000..(i + 1) * 100_000);
    let options = LoaderOptions { workers: 4, ..LoaderOptions::default() };
    let loader = Loader::start(Arc::new(Slow), Transforms::new(), sequence, ranges, options).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let begin = Instant::now();
    drop(loader);
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
}

#[test]
fn unsuitable_arguments_are_refused_before_the_first_sample() {
    let dir = tempfile::tempdir().unwrap();
    let data = cifar(dir.path());
    let start = |transforms, samples, options| {
        let sequence = SampleSequence::new(SampleOrder::Sequential, samples, EpochEnd::Continue).unwrap();
        Loader::start(
            Arc::clone(&data) as Arc<dyn Dataset>,
            transforms,
            sequence,
            one_epoch(samples, 5),
            options,
        )
    };
    let options = LoaderOptions::default();
    let normalize = || Normalize::new(&[0.0; 3], &[1.0; 3]).unwrap();
    for (transforms, samples, options, part) in [
        (Transforms::new(), 24, options, "sequence is 24; allowed: 25"),
        (Transforms::new(), 25, LoaderOptions { workers: 0, ..options }, "workers is 0; allowed: 1 or more"),
        (Transforms::new(), 25, LoaderOptions { prefetch_batches: 0, ..options }, "prefetch_batches is 0"),
        (
            Transforms::new().then("image", normalize()),
            25,
            options,
            "of \"image\": its dtype is u8; allowed: f32",
        ),
        (Transforms::new().then("picture", ToFloat), 25, options, "no such tensor; allowed: image, label"),
        (
            Transforms::new().then("label", RandomHorizontalFlip),
            25,
            options,
            "0 dimensions; allowed: [height, width",
        ),
    ] {
        assert_says(start(transforms, samples, options), ErrorKind::Configuration, &[part]);
    }
    // A crop of an image that is too small is found at the sample.
    let large = Transforms::new().then("image", RandomCrop { height: 50, width: 50, padding: 0 });
    let mut loader = start(large, 25, options).unwrap();
    let parts = ["sample 0 (epoch 0, index 0)", "RandomCrop", "fewer than the crop of 50 × 50"];
    assert_says(loader.next_batch(), ErrorKind::CorruptInput, &parts);
}

/// Stream of the numbers `0..n`.
#[derive(Debug)]
struct Stream(u64);

impl IterableDataset for Stream {
    fn tensors(&self) -> Vec<TensorSpec> {
        Numbers::sound(self.0).tensors()
    }

    fn iter(&self) -> Result<SampleIter, DataError> {
        let numbers = Numbers::sound(self.0);
        Ok(Box::new((0..self.0).map(move |i| numbers.get(i))))
    }

    fn known_len(&self) -> Option<u64> {
        Some(self.0)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_stream_gives_the_batches_of_reading_by_index(
        n in 1_u64..40, window in 1_usize..60, shuffle_window in 1_u64..10, workers in 1_usize..4, batch in 1_u64..7,
        consumed in 0_u64..50, seed: u64
    ) {
        let shuffle = Shuffle::Window { seed, window: shuffle_window };
        let sequence = SampleSequence::new(shuffle, n, EpochEnd::Continue).unwrap();
        let ranges = || (0..8).map(move |i| consumed + i * batch..consumed + (i + 1) * batch);
        let options = LoaderOptions { workers, ..LoaderOptions::default() };
        let stream: Arc<dyn Dataset> = Arc::new(StreamDataset::new(Arc::new(Stream(n)), window, None).unwrap());
        let streamed = Loader::start(stream, Transforms::new(), sequence, ranges(), options).unwrap();
        let indexed = Loader::start(Numbers::sound(n), Transforms::new(), sequence, ranges(), options).unwrap();
        prop_assert_eq!(all_batches(streamed), all_batches(indexed));
    }
}
