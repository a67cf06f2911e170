//! Tests of tokenization into the cache: the ids, when a file is made again, and concurrent writers.

use std::{
    fs,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use lockstep_data::{IdType, Progress, TokenFile, Tokenizer};

use crate::workshop::{Workshop, all_ids, sample_text, trained_tokenizer, trained_tokenizer_json};

/// Progress observer that records its calls.
#[derive(Default)]
struct Tally {
    total: AtomicU64,
    done: AtomicU64,
    finished: AtomicU64,
}

impl Progress for Tally {
    fn begin(&self, _task: &str, total_bytes: u64) {
        self.total.store(total_bytes, Ordering::Relaxed);
    }
    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
    fn finish(&self) {
        self.finished.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn byte_tokens_are_the_bytes_of_the_files_in_order() {
    let workshop = Workshop::new();
    let long = sample_text(60_000);
    assert!(long.len() > 3 << 20, "long enough to be cut into several pieces: {}", long.len());
    let patterns =
        [workshop.write("b.txt", &long), workshop.write("a.txt", "é\r\n"), workshop.write("c.txt", "")];
    let tokens = workshop.tokenize(&patterns, &Tokenizer::Bytes).unwrap().file;
    assert_eq!(tokens.id_type(), IdType::U16);
    assert_eq!(tokens.documents(), 2, "one of the files is empty");
    let bytes: Vec<u8> = all_ids(&tokens).into_iter().map(|id| id as u8).collect();
    assert!(bytes == format!("{long}é\r\n").into_bytes(), "{} bytes", bytes.len());
}

#[test]
fn a_large_text_becomes_the_ids_of_the_whole_although_it_is_cut() {
    let (workshop, tokenizer) = (Workshop::new(), trained_tokenizer());
    let text = sample_text(20_000);
    let tokens = workshop.tokenize(&[workshop.write("a.txt", &text)], &tokenizer).unwrap().file;
    let (found, expected) = (all_ids(&tokens), tokenizer.encode(&text).unwrap());
    let first_difference = found.iter().zip(&expected).position(|(a, b)| a != b);
    assert_eq!((found.len(), first_difference), (expected.len(), None));
}

#[test]
fn an_end_of_text_token_stands_between_documents_and_nowhere_else() {
    let (workshop, tokenizer) = (Workshop::new(), trained_tokenizer());
    let eos = tokenizer.eos_id().unwrap();
    let patterns = [
        workshop.write("a.jsonl", "{\"text\": \"the rank\"}\n\n{\"text\": \"\"}\n{\"text\": \"all\"}\n"),
        workshop.write("empty.txt", ""),
        workshop.write("b.txt", "wait"),
    ];
    let ids = all_ids(&workshop.tokenize(&patterns, &tokenizer).unwrap().file);
    let documents: Vec<String> =
        ids.split(|&id| id == eos).map(|document| tokenizer.decode(document).unwrap()).collect();
    assert_eq!(documents, ["the rank", "all", "wait"]);
}

#[test]
fn json_lines_may_begin_with_a_byte_order_mark_and_only_the_first_may() {
    let (workshop, tokenizer) = (Workshop::new(), trained_tokenizer());
    let lines = "{\"text\": \"the rank\"}\n{\"text\": \"all\"}\n";
    let patterns = [workshop.write("a.jsonl", lines), workshop.write("b.jsonl", format!("\u{feff}{lines}"))];
    let [plain, marked] =
        [0, 1].map(|i| all_ids(&workshop.tokenize(&patterns[i..=i], &tokenizer).unwrap().file));
    assert_eq!(marked, plain);
    let error = |name: &str, bytes: Vec<u8>| {
        workshop.tokenize(&[workshop.write(name, bytes)], &tokenizer).unwrap_err().to_string()
    };
    let inside = error("c.jsonl", format!("{lines}\u{feff}{lines}").into());
    assert!(inside.contains("c.jsonl line 3"), "{inside}");
    let broken = error("d.jsonl", [&b"\xef\xbb\xbf{\"text\": \"a"[..], b"\xff\"}\n"].concat());
    assert!(broken.contains("offset 14 is invalid"), "offsets count the mark: {broken}");
}

#[test]
fn a_second_run_finds_the_tokens_and_any_change_of_content_does_not() {
    let (workshop, tokenizer) = (Workshop::new(), trained_tokenizer());
    let patterns = [workshop.write("a.txt", "the rank"), workshop.write("b.jsonl", r#"{"text": "all"}"#)];
    let run = |tokenizer: &Tokenizer| workshop.tokenize(&patterns, tokenizer).unwrap();
    assert!(!run(&tokenizer).from_cache);
    assert!(run(&tokenizer).from_cache);
    assert_eq!(workshop.cached().len(), 1, "{:?}", workshop.cached());

    assert!(!run(&Tokenizer::Bytes).from_cache, "another tokenizer");
    let without_eos = trained_tokenizer_json().replace("<|endoftext|>", "<|unknown|>");
    let without_eos = Tokenizer::from_json(without_eos.as_bytes(), "b.json".as_ref()).unwrap();
    assert_eq!(without_eos.eos_id(), None);
    assert!(!run(&without_eos).from_cache, "another end-of-text token");
    workshop.write("a.txt", "the ranks");
    assert!(!run(&tokenizer).from_cache, "another text");

    fs::rename(workshop.path("a.txt"), workshop.path("moved.txt")).unwrap();
    let moved = [workshop.path("moved.txt").to_str().unwrap().to_owned(), patterns[1].clone()];
    assert!(workshop.tokenize(&moved, &tokenizer).unwrap().from_cache, "the same text elsewhere");
}

#[test]
fn progress_reaches_its_total_and_a_cached_run_shows_none() {
    let workshop = Workshop::new();
    let patterns = [workshop.write("a.txt", sample_text(50))];
    let tally = Tally::default();
    workshop.tokenize_with(&patterns, &Tokenizer::Bytes, &tally).unwrap();
    assert_eq!(tally.done.load(Ordering::Relaxed), sample_text(50).len() as u64);
    assert_eq!(tally.done.load(Ordering::Relaxed), tally.total.load(Ordering::Relaxed));
    assert_eq!(tally.finished.load(Ordering::Relaxed), 1);
    workshop.tokenize_with(&patterns, &Tokenizer::Bytes, &tally).unwrap();
    assert_eq!(tally.finished.load(Ordering::Relaxed), 1);
}

#[test]
fn writers_at_the_same_time_all_get_the_same_tokens() {
    let (workshop, tokenizer) = (Workshop::new(), trained_tokenizer());
    let patterns = [workshop.write("a.txt", sample_text(2_000))];
    let ids: Vec<Vec<u32>> = thread::scope(|scope| {
        let run = || all_ids(&workshop.tokenize(&patterns, &tokenizer).unwrap().file);
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(ids.windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(workshop.cached().len(), 1, "only the finished file stays: {:?}", workshop.cached());
}

#[test]
fn a_damaged_token_file_is_made_again() {
    let workshop = Workshop::new();
    let patterns = [workshop.write("a.txt", "the rank")];
    let path = workshop.tokenize(&patterns, &Tokenizer::Bytes).unwrap().file.path().to_owned();
    let sound = fs::read(&path).unwrap();
    for damage in [3, 20, sound.len() - 1] {
        let mut damaged = sound.clone();
        damaged[damage] ^= 0x10;
        // The file is not mapped here, so it may be overwritten in place.
        fs::write(&path, &damaged).unwrap();
        let again = workshop.tokenize(&patterns, &Tokenizer::Bytes).unwrap();
        assert!(!again.from_cache, "byte {damage}");
        assert_eq!(fs::read(&path).unwrap(), sound, "byte {damage}");
    }
    fs::write(&path, &sound[..sound.len() - 1]).unwrap();
    assert!(!workshop.tokenize(&patterns, &Tokenizer::Bytes).unwrap().from_cache);
    TokenFile::open(&path).unwrap().verify().unwrap();
}

#[test]
fn the_end_of_text_token_is_the_one_that_the_config_names() {
    let tokenizer = trained_tokenizer();
    let rank = tokenizer.encode("e").unwrap()[0];
    for config in [r#"{"eos_token": "e"}"#, r#"{"eos_token": {"content": "e"}, "other": 1}"#] {
        let named = tokenizer.clone().with_config(config.as_bytes(), "config.json".as_ref()).unwrap();
        assert_eq!(named.eos_id(), Some(rank), "{config}");
        assert_ne!(named.content_hash(), tokenizer.content_hash());
    }
    let silent = tokenizer.clone().with_config(b"{}", "config.json".as_ref()).unwrap();
    assert_eq!(silent.eos_id(), tokenizer.eos_id());
}

#[test]
fn a_tokenizer_is_found_in_its_directory_with_its_config() {
    let workshop = Workshop::new();
    workshop.write("model/tokenizer.json", trained_tokenizer_json());
    workshop.write("model/tokenizer_config.json", r#"{"eos_token": "e"}"#);
    let tokenizer = Tokenizer::load(workshop.path("model").to_str().unwrap()).unwrap();
    assert_eq!(tokenizer.eos_id(), Some(tokenizer.encode("e").unwrap()[0]));
    assert_eq!(tokenizer.vocab_size(), 300);
    tokenizer.fits(300).unwrap();
    assert!(matches!(Tokenizer::load("bytes").unwrap(), Tokenizer::Bytes));
}
