//! Tests of broken inputs: each gives one message with the problem, its location and the allowed values.

use std::{fs, path::Path, sync::Arc};

use lockstep_data::{
    DataError, Dataset, ErrorKind, Format, Packing, SampleOrder, SourceFile, Tail, TokenFile, Tokenizer,
    WindowOptions, expand,
};
use proptest::prelude::*;

use crate::workshop::{Workshop, trained_tokenizer, trained_tokenizer_json};

/// Checks the kind of an error and that its message contains each of `parts`.
#[track_caller]
fn assert_says<T: std::fmt::Debug>(result: Result<T, DataError>, kind: ErrorKind, parts: &[&str]) {
    let error = result.unwrap_err();
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "\"{part}\" is not in: {message}");
    }
    assert_eq!(error.kind(), kind, "{message}");
}

#[test]
fn a_pattern_without_files_is_named() {
    let workshop = Workshop::new();
    fs::create_dir(workshop.path("empty")).unwrap();
    let root = workshop.path("").display().to_string();
    for name in ["missing.txt", "missing/a.txt", "missing/*.txt", "*.txt", "empty"] {
        let pattern = workshop.path(name).display().to_string();
        let parts = [pattern.as_str(), root.trim_end_matches('/'), "no file matches"];
        assert_says(expand(&[&pattern], Format::Auto), ErrorKind::Configuration, &parts);
    }
    let bad = workshop.path("a[.txt").display().to_string();
    assert_says(expand(&[&bad], Format::Auto), ErrorKind::Configuration, &[&bad, "not a valid glob"]);
}

#[test]
fn files_without_text_are_an_error() {
    let workshop = Workshop::new();
    let patterns = [workshop.write("a.txt", ""), workshop.write("b.jsonl", "\n\n{\"text\": \"\"}\n")];
    let result = workshop.tokenize(&patterns, &Tokenizer::Bytes);
    assert_says(result, ErrorKind::Configuration, &["no text", "a.txt and 1 more"]);
    assert_eq!(workshop.cached(), [""; 0]);
}

#[test]
fn a_file_that_vanishes_after_the_patterns_were_expanded_is_named() {
    let workshop = Workshop::new();
    let options = lockstep_data::TokenizeOptions {
        cache_dir: &workshop.cache(),
        text: lockstep_data::TextOptions::default(),
        progress: &lockstep_data::Silent,
    };
    let file = SourceFile::new(workshop.path("gone.txt"), Format::Text).unwrap();
    let result = lockstep_data::tokenize_files(&[file], &Tokenizer::Bytes, &options);
    assert_says(result, ErrorKind::Configuration, &["gone.txt", "cannot open"]);
}

#[test]
fn bytes_that_are_no_utf8_are_found_at_their_offset() {
    let workshop = Workshop::new();
    for (name, bytes, offset) in [
        ("latin1.txt", b"caf\xE9 au lait".as_slice(), "offset 3"),
        ("cut.txt", b"ab\xE2\x82", "offset 2"),
        ("a.jsonl", b"{\"text\": \"a\"}\n{\"text\": \"\xFF\"}\n", "offset 24"),
    ] {
        let result = workshop.tokenize(&[workshop.write(name, bytes)], &Tokenizer::Bytes);
        assert_says(result, ErrorKind::CorruptInput, &[name, offset, "not UTF-8"]);
        assert_eq!(workshop.cached(), [""; 0], "{name}: nothing is left");
    }
}

#[test]
fn a_bad_line_of_json_is_found_at_its_number() {
    let workshop = Workshop::new();
    for (line, problem) in [
        ("{\"text\": \"a\"", "EOF"),
        ("{\"text\": 1}", "expected a string"),
        ("{\"body\": \"a\"}", "no field \"text\" (it has: body)"),
        ("not json", "expected"),
        ("[\"text\"]", "expected an object"),
    ] {
        let pattern = workshop.write("a.jsonl", format!("{{\"text\": \"fine\"}}\n\n{line}\n"));
        let result = workshop.tokenize(&[pattern], &Tokenizer::Bytes);
        assert_says(result, ErrorKind::CorruptInput, &["a.jsonl line 3", problem]);
        assert_eq!(workshop.cached(), [""; 0], "{line}: nothing is left");
    }
}

#[test]
fn formats_that_are_not_read_say_which_are() {
    let workshop = Workshop::new();
    let pattern = workshop.write("a.npy", "NUMPY");
    let parts = ["a.npy", ".npy", ".jsonl", "\"text\""];
    assert_says(expand(&[pattern], Format::Auto), ErrorKind::Configuration, &parts);
    assert_says(
        "csv".parse::<Format>(),
        ErrorKind::Configuration,
        &["\"csv\"", "auto, text, jsonl, parquet, indexed, tokens"],
    );
}

#[test]
fn a_tokenizer_that_is_none_is_refused_with_its_path() {
    let workshop = Workshop::new();
    let missing = workshop.path("missing.json").display().to_string();
    assert_says(
        Tokenizer::load(&missing),
        ErrorKind::Configuration,
        &[&missing, "cannot read the tokenizer"],
    );
    let json = trained_tokenizer_json();
    let contents = [
        "",
        "not json",
        "{}",
        "[1, 2]",
        &json[..json.len() / 2],
        r#"{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}"#,
        r#"{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}"#,
        r#"{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}"#,
        r#"{"version": "1.0", "added_tokens": [], "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
            "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}"#,
    ];
    for content in contents {
        let path = workshop.write("tokenizer.json", content);
        assert_says(Tokenizer::load(&path), ErrorKind::CorruptInput, &[&path, "not a usable tokenizer.json"]);
    }
}

#[test]
fn a_tokenizer_config_that_names_no_token_is_refused() {
    let config = |json: &str| trained_tokenizer().with_config(json.as_bytes(), Path::new("config.json"));
    let parts = ["config.json", "<|nothing|>"];
    assert_says(config(r#"{"eos_token": "<|nothing|>"}"#), ErrorKind::CorruptInput, &parts);
    assert_says(config("{"), ErrorKind::CorruptInput, &["config.json"]);
}

#[test]
fn a_tokenizer_larger_than_the_vocabulary_says_both_sizes() {
    let tokenizer = trained_tokenizer();
    tokenizer.fits(300).unwrap();
    let parts = ["trained.json", "ids up to 299", "256 entries", "at least 300"];
    assert_says(tokenizer.fits(256), ErrorKind::Configuration, &parts);
    assert_says(Tokenizer::Bytes.fits(255), ErrorKind::Configuration, &["bytes", "255"]);
    assert_says(Tokenizer::Bytes.fits(0), ErrorKind::Configuration, &["0 entries"]);
}

#[test]
fn a_damaged_token_file_is_refused_for_the_rule_it_breaks() {
    let workshop = Workshop::new();
    let path = workshop.byte_tokens("the rank waits").files()[0].path().to_owned();
    let sound = fs::read(&path).unwrap();
    let problem_of = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        match TokenFile::open(&path).and_then(|file| file.verify()) {
            Err(DataError::BadTokenFile { problem, .. }) => problem,
            other => panic!("expected a bad token file, not {other:?}"),
        }
    };
    let flipped = |at: usize| {
        let mut bytes = sound.clone();
        bytes[at] ^= 1;
        bytes
    };
    let longer = [sound.as_slice(), &[0]].concat();
    for (bytes, expected) in [
        (&b""[..], "it has 0 bytes, fewer than its header of 144"),
        (&sound[..143], "it has 143 bytes, fewer than its header of 144"),
        (&sound[..150], "it has 150 bytes where its header asks for 180"),
        (&longer, "it has 181 bytes where its header asks for 180"),
        (&flipped(0), "it does not start with the magic bytes of a token file"),
        (&flipped(8), "its format version is 3; this program reads version 2"),
        (&flipped(20), "the checksum of its header does not match"),
        (&flipped(150), "the checksum of its tokens does not match"),
        (&flipped(175), "its documents do not lie in order within its tokens"),
    ] {
        assert_eq!(problem_of(bytes).to_string(), expected);
    }
}

#[test]
fn fewer_tokens_than_a_window_says_how_many_there_are_and_are_needed() {
    let workshop = Workshop::new();
    let tokens = workshop.byte_tokens("0123456789");
    let build = |range, seq_len, tail| {
        let options =
            WindowOptions { seq_len, order: SampleOrder::Sequential, tail, packing: Packing::Stream };
        Dataset::new(Arc::clone(&tokens), range, options, "the validation set")
    };
    assert_eq!(build(0..10, 9, Tail::Drop).unwrap().windows(), 1);
    let parts = ["the validation set", "10 tokens", "needs 11", "seq_len 10"];
    assert_says(build(0..10, 10, Tail::Drop), ErrorKind::Configuration, &parts);
    assert_says(build(3..3, 4, Tail::Drop), ErrorKind::Configuration, &["0 tokens", "needs 5"]);
    assert_says(build(3..4, 4, Tail::Pad), ErrorKind::Configuration, &["1 tokens", "needs 2"]);
    assert_says(build(0..11, 4, Tail::Drop), ErrorKind::Configuration, &["0..11", "0..10"]);
    assert_says(build(0..10, 0, Tail::Drop), ErrorKind::Configuration, &["seq_len is 0"]);
}

#[test]
fn a_cache_directory_that_cannot_be_made_is_named() {
    let workshop = Workshop::new();
    let pattern = workshop.write("a.txt", "text");
    workshop.write("cache", "a file where the directory should be");
    let result = workshop.tokenize(&[pattern], &Tokenizer::Bytes);
    assert_says(result, ErrorKind::Failed, &["cannot create", "cache"]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_as_a_tokenizer_give_a_tokenizer_or_an_error(mut at in 0_usize..10_000, byte: u8) {
        let mut json = trained_tokenizer_json().into_bytes();
        at %= json.len();
        json[at] = byte;
        if let Ok(tokenizer) = Tokenizer::from_json(&json, Path::new("flipped.json")) {
            tokenizer.fits(tokenizer.vocab_size()).unwrap();
        }
    }

    #[test]
    fn any_bytes_as_a_corpus_give_tokens_or_an_error(
        bytes in prop::collection::vec(any::<u8>(), 0..60), jsonl: bool
    ) {
        let workshop = Workshop::new();
        let pattern = workshop.write(if jsonl { "a.jsonl" } else { "a.txt" }, &bytes);
        let is_text = std::str::from_utf8(&bytes).is_ok() && !bytes.is_empty();
        let result = workshop.tokenize(&[pattern], &Tokenizer::Bytes);
        if !jsonl {
            prop_assert_eq!(result.is_ok(), is_text);
        }
        prop_assert_eq!(workshop.cached().len(), usize::from(result.is_ok()));
    }
}
