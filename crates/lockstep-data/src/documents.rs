//! Splits files into documents: a text file is one document, and so is each record of a JSON file and each row of a
//! table.
//!
//! A document reaches the tokenizer in pieces, cut where the tokenizer allows it. So files larger than memory are
//! streamed, and one large file still keeps every core busy.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
};

use crate::{
    error::{DataError, RecordPlace, Result},
    json_records::{JsonRecord, JsonRecords},
    parquet_file::read_parquet,
    sources::{Format, SourceFile},
};

/// Bytes per read, and so about the size of a piece.
const BLOCK_BYTES: u64 = 256 << 10;

/// Part of a document, or all of it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) content: Content,
    /// True if the document is complete with this piece.
    pub(crate) ends_document: bool,
    /// Offset in the file, or row number of a table, at which reading resumes after this piece; see [`read_documents`].
    pub(crate) end: u64,
}

/// Content of a piece.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Text(String),
    /// Unparsed JSON record; it is parsed by the threads that tokenize it.
    JsonRecord {
        place: RecordPlace,
        text: String,
    },
}

impl Content {
    /// Returns the size of the content in bytes, for progress reports.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Text(text) | Self::JsonRecord { text, .. } => text.len(),
        }
    }
}

/// Positions at which a text may be cut without changing its token ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Between any two characters.
    Anywhere,
    /// Only after a single `\n` between two lines: see [`is_line_border`].
    LineBorders,
    /// Nowhere: the tokenizer must see the document as a whole.
    Never,
}

impl Cut {
    /// Returns the length of the longest prefix of `text` that may be cut off, if any.
    fn last_border(self, text: &str) -> Option<usize> {
        match self {
            Self::Anywhere => (!text.is_empty()).then_some(text.len()),
            Self::LineBorders => {
                text.rmatch_indices('\n').map(|(at, _)| at + 1).find(|&at| is_line_border(text, at))
            }
            Self::Never => None,
        }
    }
}

/// Returns true if a `\n` ends right before byte `at`, follows a character that is not white space, and precedes an
/// ASCII letter.
pub(crate) fn is_line_border(text: &str, at: usize) -> bool {
    let (Some(before), Some(after)) = (text.get(..at), text.get(at..)) else { return false };
    let mut backwards = before.chars().rev();
    backwards.next() == Some('\n')
        && backwards.next().is_some_and(|c| !c.is_whitespace())
        && after.starts_with(|c: char| c.is_ascii_alphabetic())
}

/// Sends every piece of `file` from `start` on to `sink`, in order, and returns the hash of the bytes that were read.
/// `text_field` names the text column of a table. `start` is 0 or the [`end`](Piece::end) of an earlier piece. Pieces
/// after a resumed start may be cut at other positions than before.
pub(crate) fn read_documents(
    file: &SourceFile,
    start: u64,
    text_field: &str,
    cut: Cut,
    sink: &mut impl FnMut(Piece) -> Result<()>,
) -> Result<blake3::Hash> {
    match file.format {
        Format::Auto | Format::Text => read_text(&file.path, start, cut, sink),
        Format::JsonLines => read_json_lines(&file.path, start, sink),
        Format::Parquet => {
            read_parquet(&file.path, text_field, start, &mut |text, end| {
                sink(Piece { content: Content::Text(text), ends_document: true, end })
            })?;
            Ok(hash_file(&file.path)?.0)
        }
        Format::Indexed | Format::RawTokens => Err(DataError::NotText { path: file.path.clone() }),
    }
}

/// Returns the hash of a file's bytes and their number. Reads the file in blocks.
pub(crate) fn hash_file(path: &Path) -> Result<(blake3::Hash, u64)> {
    let file = File::open(path).map_err(DataError::io("open", path))?;
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file).map_err(DataError::io("read", path))?;
    Ok((hasher.finalize(), hasher.count()))
}

fn open_at(path: &Path, start: u64) -> Result<File> {
    let mut file = File::open(path).map_err(DataError::io("open", path))?;
    file.seek(SeekFrom::Start(start)).map_err(DataError::io("read", path))?;
    Ok(file)
}

fn read_text(
    path: &Path,
    start: u64,
    cut: Cut,
    sink: &mut impl FnMut(Piece) -> Result<()>,
) -> Result<blake3::Hash> {
    let mut file = open_at(path, start)?;
    let mut hasher = blake3::Hasher::new();
    let mut text = String::new();
    // Bytes that are not yet decoded: between two blocks, at most the first bytes of one character.
    let mut raw = Vec::new();
    let mut raw_offset = start;
    loop {
        let kept = raw.len();
        let read =
            file.by_ref().take(BLOCK_BYTES).read_to_end(&mut raw).map_err(DataError::io("read", path))?;
        hasher.update(&raw[kept..]);
        let not_utf8 =
            |at: usize| DataError::NotUtf8 { path: path.to_owned(), offset_bytes: raw_offset + at as u64 };
        let valid_bytes = match std::str::from_utf8(&raw) {
            Ok(all) => {
                text.push_str(all);
                raw.len()
            }
            Err(error) if error.error_len().is_some() || read == 0 => {
                return Err(not_utf8(error.valid_up_to()));
            }
            Err(error) => {
                let valid = &raw[..error.valid_up_to()];
                text.push_str(std::str::from_utf8(valid).map_err(|e| not_utf8(e.valid_up_to()))?);
                valid.len()
            }
        };
        raw.drain(..valid_bytes);
        raw_offset += valid_bytes as u64;
        if read == 0 {
            sink(Piece { content: Content::Text(text), ends_document: true, end: raw_offset })?;
            return Ok(hasher.finalize());
        }
        if let Some(border) = cut.last_border(&text) {
            let rest = text.split_off(border);
            let end = raw_offset - rest.len() as u64;
            sink(Piece { content: Content::Text(text), ends_document: false, end })?;
            text = rest;
        }
    }
}

fn read_json_lines(
    path: &Path,
    start: u64,
    sink: &mut impl FnMut(Piece) -> Result<()>,
) -> Result<blake3::Hash> {
    let mut records = JsonRecords::open(path, start)?;
    while let Some(JsonRecord { place, text, end }) = records.next()? {
        sink(Piece { content: Content::JsonRecord { place, text }, ends_document: true, end })?;
    }
    Ok(records.hash())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces_of(bytes: &[u8], cut: Cut) -> Result<Vec<Piece>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let mut pieces = Vec::new();
        let hash = read_text(file.path(), 0, cut, &mut |piece| {
            pieces.push(piece);
            Ok(())
        })?;
        assert_eq!(hash, blake3::hash(bytes));
        Ok(pieces)
    }

    #[test]
    fn pieces_put_together_are_the_file_and_only_the_last_ends_the_document() {
        // Four-byte characters at an odd offset, so that a block boundary falls inside one.
        let mut text = "x".to_owned();
        while text.len() < 3 * BLOCK_BYTES as usize {
            text.push_str("🦀🦀 line\nnext ");
        }
        for (cut, at_least) in [(Cut::Anywhere, 3), (Cut::LineBorders, 3), (Cut::Never, 1)] {
            let pieces = pieces_of(text.as_bytes(), cut).unwrap();
            assert!(pieces.len() >= at_least, "{cut:?}: {} pieces", pieces.len());
            assert!(cut != Cut::Never || pieces.len() == 1);
            assert!(pieces.iter().map(text_of).collect::<String>() == text, "{cut:?}");
            assert_eq!(pieces.iter().filter(|piece| piece.ends_document).count(), 1);
            assert!(pieces.last().unwrap().ends_document);
        }
    }

    fn text_of(piece: &Piece) -> &str {
        match &piece.content {
            Content::Text(text) => text,
            Content::JsonRecord { text, .. } => text,
        }
    }

    #[test]
    fn reading_goes_on_after_any_piece() {
        let text = "line ä\n".repeat(BLOCK_BYTES as usize / 3);
        let lines = "{\"text\": \"ä\"}\n\n{\"text\": \"b\"}\n{}";
        let file = tempfile::NamedTempFile::new().unwrap();
        for (format, text) in [(Format::Text, text.as_str()), (Format::JsonLines, lines)] {
            std::fs::write(file.path(), text).unwrap();
            let source = SourceFile { path: file.path().to_owned(), format };
            let pieces_from = |start| {
                let mut pieces = Vec::new();
                let sink = &mut |piece| {
                    pieces.push(piece);
                    Ok(())
                };
                read_documents(&source, start, "text", Cut::LineBorders, sink).unwrap();
                pieces
            };
            let whole = pieces_from(0);
            assert!(whole.len() >= 3, "{format:?}: {} pieces", whole.len());
            for (done, piece) in whole.iter().enumerate() {
                let rest: String = pieces_from(piece.end).iter().map(text_of).collect();
                assert!(
                    rest == whole[done + 1..].iter().map(text_of).collect::<String>(),
                    "{format:?} {done}"
                );
            }
        }
    }

    #[test]
    fn an_invalid_byte_is_found_at_its_offset_in_any_block() {
        let bad_at = BLOCK_BYTES as usize + 5;
        let mut bytes = vec![b'a'; 2 * BLOCK_BYTES as usize];
        bytes[bad_at] = 0xFF;
        for cut in [Cut::Anywhere, Cut::Never] {
            let Err(DataError::NotUtf8 { offset_bytes, .. }) = pieces_of(&bytes, cut) else {
                panic!("the byte 0xFF must be refused");
            };
            assert_eq!(offset_bytes, bad_at as u64);
        }
        let Err(DataError::NotUtf8 { offset_bytes, .. }) =
            pieces_of("aé".as_bytes().split_last().unwrap().1, Cut::Never)
        else {
            panic!("a character cut short by the end of the file must be refused");
        };
        assert_eq!(offset_bytes, 1);
    }

    #[test]
    fn a_line_border_stands_between_two_words_only() {
        for (text, at, expected) in [
            ("a\nb", 2, true),
            ("é.\nb", 4, true),
            ("a\n\nb", 3, false),
            ("a \nb", 3, false),
            ("a\n b", 2, false),
            ("a\n1", 2, false),
            ("\nb", 1, false),
            ("a\n", 2, false),
            ("é\nb", 1, false),
        ] {
            assert_eq!(is_line_border(text, at), expected, "{text:?} at {at}");
        }
    }
}
