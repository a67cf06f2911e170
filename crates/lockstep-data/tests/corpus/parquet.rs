//! Tests of Parquet files written by pyarrow (`tests/fixtures/data/parquet.py`), with every codec, and of broken ones.

use std::{fs, path::PathBuf};

use lockstep_data::{DataError, ErrorKind, Format, Tokenizer, read_text_column};

use crate::workshop::Workshop;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/data")).join(name)
}

fn expected() -> Vec<String> {
    (0..300).filter(|i| i % 7 != 6).map(|i| format!("row {i}: über {}", "wait ".repeat(i % 5))).collect()
}

#[test]
fn every_codec_and_version_gives_the_same_rows() {
    for codec in ["none", "snappy", "gzip", "brotli", "lz4", "zstd"] {
        for version in [1, 2] {
            let name = format!("{codec}-{version}.parquet");
            let texts = read_text_column(&fixture(&name), "text").unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(texts, expected(), "{name}");
            let sources = read_text_column(&fixture(&name), "meta.source").unwrap();
            assert_eq!(
                (sources.len(), sources[4].as_str()),
                (300, "source 1"),
                "{name}: a dictionary in a struct"
            );
        }
    }
}

#[test]
fn rows_are_documents() {
    let workshop = Workshop::new();
    let pattern = fixture("zstd-2.parquet").to_str().unwrap().to_owned();
    let tokens = workshop.open(&[pattern], Format::Auto, Some(&Tokenizer::Bytes), 256).unwrap();
    assert_eq!(tokens.documents() as usize, expected().len());
    assert_eq!(tokens.tokens() as usize, expected().concat().len());
}

#[track_caller]
fn refuses(path: &std::path::Path, column: &str, parts: &[&str]) {
    let error = read_text_column(path, column).unwrap_err();
    assert!(matches!(error, DataError::BadParquet { .. }), "{error:?}");
    assert_eq!(error.kind(), ErrorKind::CorruptInput);
    for part in parts {
        assert!(error.to_string().contains(part), "\"{part}\" is not in: {error}");
    }
}

#[test]
fn a_column_that_is_missing_or_holds_no_text_is_named_with_the_others() {
    let path = fixture("zstd-1.parquet");
    refuses(
        &path,
        "body",
        &["zstd-1.parquet", "no column \"body\"", "id, text, meta.source, tags.list.element"],
    );
    refuses(&path, "id", &["column \"id\" holds no text"]);
    refuses(&path, "tags.list.element", &["holds no text"]);
}

#[test]
fn damaged_files_are_refused_with_their_name() {
    let workshop = Workshop::new();
    let sound = fs::read(fixture("snappy-1.parquet")).unwrap();
    for (what, bytes) in [
        ("empty", Vec::new()),
        ("no table", b"PAR1 not a table PAR1".to_vec()),
        ("cut short", sound[..sound.len() / 2].to_vec()),
        ("without its start", sound[100..].to_vec()),
        (
            "a footer longer than the file",
            [&sound[..sound.len() - 8], &[0xFF, 0xFF, 0xFF, 0x7F], b"PAR1"].concat(),
        ),
    ] {
        let path = workshop.write("bad.parquet", bytes);
        refuses(path.as_ref(), "text", &["bad.parquet", "is not a Parquet file with text"]);
        let error = workshop.tokenize(&[path], &Tokenizer::Bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::CorruptInput, "{what}");
        assert_eq!(workshop.cached(), [""; 0], "{what}: nothing is left");
    }
}
