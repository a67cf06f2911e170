//! Tests of micro-batches from a token file: the contents of rows, and that the prefetch thread changes nothing.

use std::{sync::Arc, time::Duration};

use lockstep_data::{
    DataError, Dataset, IGNORE_LABEL, MicroBatch, Packing, Prefetcher, SampleCursor, SampleOrder,
    SampleOrigin, Tail, TokenFile, Tokens, WindowOptions,
};
use proptest::prelude::*;

use crate::workshop::Workshop;

const SEQUENTIAL: WindowOptions =
    WindowOptions { seq_len: 4, order: SampleOrder::Sequential, tail: Tail::Drop, packing: Packing::Stream };

fn letters(count: usize) -> Vec<u8> {
    (0..count).map(|i| b'a' + (i % 26) as u8).collect()
}

fn dataset(tokens: &Arc<Tokens>, options: WindowOptions) -> Dataset {
    Dataset::new(Arc::clone(tokens), 0..tokens.tokens(), options, "the test set").unwrap()
}

#[test]
fn sequential_windows_are_consecutive_and_wrap_by_epoch() {
    let workshop = Workshop::new();
    let dataset = dataset(&workshop.byte_tokens("abcdefghij"), SEQUENTIAL);
    assert_eq!(dataset.windows(), 2);
    let mut batch = MicroBatch::default();
    dataset.fill(0..3, &mut batch).unwrap();
    let expected = MicroBatch {
        ids: b"abcdefghabcd".iter().map(|&byte| byte.into()).collect(),
        labels: b"bcdefghibcde".iter().map(|&byte| byte.into()).collect(),
        positions: [0, 1, 2, 3].repeat(3),
        document_starts: vec![0; 12],
        sample_numbers: vec![0, 1, 2],
        inputs: Vec::new(),
        skipped: 0,
        sequences: 3,
        seq_len: 4,
    };
    assert_eq!(batch, expected);
    assert_eq!(dataset.locate(2), SampleOrigin { source: 0, epoch: 1, window: 0 });
}

#[test]
fn a_shuffled_epoch_reads_every_window_once() {
    let workshop = Workshop::new();
    let options = WindowOptions { order: SampleOrder::Shuffle { seed: 5 }, seq_len: 2, ..SEQUENTIAL };
    let text: Vec<u8> = (0..=127).collect();
    let dataset = dataset(&workshop.byte_tokens(&text), options);
    let mut batch = MicroBatch::default();
    let epoch = |epoch: u64, batch: &mut MicroBatch| {
        dataset.fill(epoch * dataset.windows()..(epoch + 1) * dataset.windows(), batch).unwrap();
        batch.ids.chunks_exact(2).map(|row| row[0]).collect::<Vec<u32>>()
    };
    let (first, second) = (epoch(0, &mut batch), epoch(1, &mut batch));
    assert_ne!(first, second);
    for mut starts in [first, second] {
        starts.sort_unstable();
        assert!(starts.iter().copied().eq((0..126).step_by(2)), "{starts:?}");
    }
}

#[test]
fn a_padded_tail_predicts_every_token_but_the_first() {
    let workshop = Workshop::new();
    for tokens in 2..12 {
        let file = workshop.byte_tokens(letters(tokens));
        let dataset = dataset(&file, WindowOptions { tail: Tail::Pad, ..SEQUENTIAL });
        let mut batch = MicroBatch::default();
        dataset.fill(0..dataset.windows(), &mut batch).unwrap();
        assert_eq!(batch.valid_tokens(), tokens as u64 - 1, "{tokens} tokens");
        assert_eq!(batch.ids.len(), batch.labels.len());
        assert_eq!(batch.ids.len(), batch.sequences * 4);
        let predicted: Vec<u8> =
            batch.labels.iter().filter(|&&label| label != IGNORE_LABEL).map(|&label| label as u8).collect();
        assert_eq!(predicted, letters(tokens)[1..], "{tokens} tokens");
    }
}

#[test]
fn a_range_of_the_file_is_all_that_its_data_set_reads() {
    let workshop = Workshop::new();
    let tokens = workshop.byte_tokens("abcdefghijklmnop");
    let dataset = Dataset::new(tokens, 8..13, SEQUENTIAL, "the validation set").unwrap();
    let mut batch = MicroBatch::default();
    dataset.fill(0..2, &mut batch).unwrap();
    assert_eq!(batch.ids, b"ijklijkl".map(u32::from));
    assert_eq!(batch.labels, b"jklmjklm".map(i32::from));
}

#[test]
fn filling_again_allocates_nothing() {
    let workshop = Workshop::new();
    let dataset = dataset(&workshop.byte_tokens(letters(1_000)), SEQUENTIAL);
    let mut batch = MicroBatch::default();
    dataset.fill(0..8, &mut batch).unwrap();
    let before = (batch.ids.as_ptr(), batch.labels.as_ptr(), batch.positions.as_ptr());
    for step in 1..20 {
        dataset.fill(step * 8..(step + 1) * 8, &mut batch).unwrap();
    }
    assert_eq!(before, (batch.ids.as_ptr(), batch.labels.as_ptr(), batch.positions.as_ptr()));
}

fn drain(prefetcher: &mut Prefetcher) -> Vec<MicroBatch> {
    let mut batches = Vec::new();
    while let Some(batch) = prefetcher.next_batch().unwrap() {
        batches.push(batch.clone());
        prefetcher.recycle(batch);
    }
    batches
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn replicas_together_read_what_one_would_whatever_the_micro_batch(
        micro in 1_u64..4, accumulation in 1_u64..4, replicas in 1_u64..4, start in 0_u64..500, depth in 0_usize..4
    ) {
        let workshop = Workshop::new();
        let options = WindowOptions { order: SampleOrder::Shuffle { seed: 9 }, ..SEQUENTIAL };
        let dataset = dataset(&workshop.byte_tokens(letters(333)), options);
        let global_batch = micro * accumulation * replicas;
        let mut rows = Vec::new();
        for replica in 0..replicas {
            let cursor =
                SampleCursor { samples_consumed: start, global_batch, micro_batch: micro, replica, replicas };
            let mut prefetcher = Prefetcher::start(Arc::new(dataset.clone()), cursor.ranges(2), depth).unwrap();
            for batch in drain(&mut prefetcher) {
                prop_assert_eq!(batch.sequences as u64, micro);
                let ids = batch.ids.chunks_exact(4).map(<[u32]>::to_vec);
                rows.extend(batch.sample_numbers.iter().copied().zip(ids));
            }
        }
        rows.sort();
        let mut whole = MicroBatch::default();
        dataset.fill(start..start + 2 * global_batch, &mut whole).unwrap();
        let expected: Vec<(u64, Vec<u32>)> =
            whole.sample_numbers.iter().copied().zip(whole.ids.chunks_exact(4).map(<[u32]>::to_vec)).collect();
        prop_assert_eq!(rows, expected);
    }
}

#[test]
fn a_prefetcher_ends_with_none_and_stays_there() {
    let workshop = Workshop::new();
    let dataset = dataset(&workshop.byte_tokens(letters(100)), SEQUENTIAL);
    let cursor = SampleCursor::single(0, 4, 2).unwrap();
    let mut prefetcher = Prefetcher::start(Arc::new(dataset), cursor.ranges(3), 2).unwrap();
    assert_eq!(drain(&mut prefetcher).len(), 6);
    assert_eq!(prefetcher.next_batch().unwrap(), None);
    assert!(prefetcher.take_wait() > Duration::ZERO);
    assert_eq!(prefetcher.take_wait(), Duration::ZERO);
}

#[test]
fn dropping_a_prefetcher_in_the_middle_ends_its_thread() {
    let workshop = Workshop::new();
    let tokens = workshop.byte_tokens(letters(100));
    for depth in [0, 1, 8] {
        let cursor = SampleCursor::single(0, 2, 2).unwrap();
        let mut prefetcher =
            Prefetcher::start(Arc::new(dataset(&tokens, SEQUENTIAL)), cursor.ranges(u64::MAX / 4), depth)
                .unwrap();
        prefetcher.next_batch().unwrap().unwrap();
        drop(prefetcher);
        // The prefetch thread held the other reference.
        assert_eq!(Arc::strong_count(&tokens), 1, "depth {depth}");
    }
}

#[test]
fn an_error_of_the_thread_reaches_the_consumer_in_its_place() {
    let workshop = Workshop::new();
    let path = workshop.byte_tokens(letters(100)).files()[0].path().to_owned();
    let mut bytes = std::fs::read(&path).unwrap();
    // The ninth window gets a token of id 0xFF00 + 'g', beyond the 256 of the vocabulary.
    bytes[144 + 2 * (8 * 4 + 2) + 1] = 0xFF;
    std::fs::write(&path, bytes).unwrap();
    let tokens = Arc::new(Tokens::from(vec![TokenFile::open(&path).unwrap()]));
    let cursor = SampleCursor::single(0, 4, 4).unwrap();
    let mut prefetcher =
        Prefetcher::start(Arc::new(dataset(&tokens, SEQUENTIAL)), cursor.ranges(4), 2).unwrap();
    for _ in 0..2 {
        assert!(prefetcher.next_batch().unwrap().is_some());
    }
    let error = prefetcher.next_batch().unwrap_err();
    assert!(matches!(error, DataError::TokenOutOfRange { index: 34, .. }), "{error:?}");
    assert_eq!(prefetcher.next_batch().unwrap(), None);
}
