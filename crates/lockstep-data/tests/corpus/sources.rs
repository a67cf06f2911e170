//! Tests of sources in every format as one sequence of tokens, and of blends of them.

use std::sync::Arc;

use lockstep_data::{
    Dataset, Format, MicroBatch, Packing, SampleOrder, SampleOrigin, Tail, Tokenizer, Tokens, WindowOptions,
};

use crate::workshop::Workshop;

const OPTIONS: WindowOptions = WindowOptions {
    seq_len: 2,
    order: SampleOrder::Shuffle { seed: 3 },
    tail: Tail::Drop,
    packing: Packing::Stream,
};

fn read(tokens: &Tokens, range: std::ops::Range<u64>) -> Vec<u32> {
    let mut ids = Vec::new();
    tokens.read(range, &mut ids).unwrap();
    ids
}

#[test]
fn text_raw_and_indexed_tokens_follow_one_another() {
    let workshop = Workshop::new();
    let index = include_bytes!("../../../../tests/fixtures/data/megatron.idx");
    let bin = include_bytes!("../../../../tests/fixtures/data/megatron.bin");
    workshop.write("m.idx", index);
    let patterns = [
        workshop.write("a.txt", "ab"),
        workshop.write("b.txt", "c"),
        workshop.write("raw.bin", [1, 0, 2, 0, 3, 0]),
        workshop.write("m.bin", bin),
        workshop.write("d.txt", "d"),
    ];
    let tokens = workshop.open(&patterns, Format::Auto, Some(&Tokenizer::Bytes), 256).unwrap();
    let whole: Vec<u32> = [97, 98, 99, 1, 2, 3, 10, 11, 12, 20, 30, 31, 32, 33, 100].into();
    assert_eq!(read(&tokens, 0..15), whole);
    for start in 0..15 {
        for end in start..=15 {
            assert_eq!(read(&tokens, start..end), whole[start as usize..end as usize], "{start}..{end}");
        }
    }
    // Two text files, one raw file, one Megatron data set (two documents, the second of two sequences), and a text
    // file.
    assert_eq!((tokens.files().len(), tokens.documents()), (4, 6));
    let windows = WindowOptions { seq_len: 14, packing: Packing::Documents, ..OPTIONS };
    let mut batch = MicroBatch::default();
    Dataset::new(tokens, 0..15, windows, "all").unwrap().fill(0..1, &mut batch).unwrap();
    assert_eq!(batch.document_starts, [0, 0, 2, 3, 3, 3, 6, 6, 6, 9, 9, 9, 9, 9]);
}

fn letters(workshop: &Workshop, first: u8, count: usize) -> Dataset {
    let text: Vec<u8> = (0..count).map(|i| first + (i % 26) as u8).collect();
    let tokens = workshop.byte_tokens(text);
    let range = 0..tokens.tokens();
    Dataset::new(tokens, range, OPTIONS, "letters").unwrap()
}

#[test]
fn a_blend_draws_from_each_source_as_its_weight_says_and_from_each_window_once_an_epoch() {
    let workshop = Workshop::new();
    let (small, large) = (letters(&workshop, b'A', 21), letters(&workshop, b'a', 201));
    let blend = Dataset::blend(&[(small, 3.0), (large, 7.0)]).unwrap();
    assert_eq!((blend.sources(), blend.share(0), blend.windows()), (2, 0.3, 110));
    assert_eq!(blend.epochs(0, 100), 3.0);
    let mut batch = MicroBatch::default();
    blend.fill(0..1000, &mut batch).unwrap();
    let mut from_small = 0;
    for (sample, row) in batch.ids.chunks_exact(2).enumerate() {
        from_small += u64::from(row[0] < u32::from(b'a'));
        let error = 0.3 * (sample + 1) as f64 - from_small as f64;
        assert!(error.abs() < 1.0, "off by {error} after {}", sample + 1);
    }
    // Thirty samples of every hundred: three epochs of ten windows each.
    let mut windows: Vec<u64> = (0..100)
        .map(|sample| blend.locate(sample))
        .filter(|place| place.source == 0 && place.epoch == 1)
        .map(|SampleOrigin { window, .. }| window)
        .collect();
    windows.sort_unstable();
    assert_eq!(windows, (0..10).collect::<Vec<_>>());
}

#[test]
fn a_sample_of_a_blend_depends_on_its_number_alone() {
    let workshop = Workshop::new();
    let parts = [(letters(&workshop, b'A', 41), 0.25), (letters(&workshop, b'a', 101), 0.75)];
    let (one, other) = (Dataset::blend(&parts).unwrap(), Dataset::blend(&parts).unwrap());
    let (mut whole, mut batch) = (MicroBatch::default(), MicroBatch::default());
    one.fill(0..500, &mut whole).unwrap();
    for first in [499, 40, 0, 123] {
        other.fill(first..first + 1, &mut batch).unwrap();
        assert_eq!(batch.ids, whole.ids[2 * first as usize..][..2], "sample {first}");
        assert_eq!(batch.sample_numbers, [first]);
    }
}

#[test]
fn sources_of_a_blend_are_shuffled_independently() {
    let workshop = Workshop::new();
    let letters = letters(&workshop, b'a', 101);
    let blend = Dataset::blend(&[(letters.clone(), 1.0), (letters.clone(), 1.0)]).unwrap();
    let order = |source: usize| -> Vec<u64> {
        let places = (0..100).map(|sample| blend.locate(sample));
        places.filter(|place| place.source == source).map(|place| place.window).collect()
    };
    assert_ne!(order(0), order(1));
    let alone: Vec<u64> = (0..50).map(|sample| letters.locate(sample).window).collect();
    assert_eq!(order(0), alone, "the first source of a blend is read as if it were alone");
}

#[test]
fn a_blend_holds_its_sources_as_long_as_it_lives() {
    let workshop = Workshop::new();
    let tokens = workshop.byte_tokens("abcdefgh");
    let dataset = Dataset::new(Arc::clone(&tokens), 0..8, OPTIONS, "letters").unwrap();
    let blend = Dataset::blend(&[(dataset, 1.0)]).unwrap();
    assert_eq!(Arc::strong_count(&tokens), 2);
    drop(blend);
    assert_eq!(Arc::strong_count(&tokens), 1);
}
