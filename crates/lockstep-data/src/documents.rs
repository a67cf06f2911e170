//! Files to documents: a text file is one, each line of a JSON lines file is one.
//!
//! A document reaches the tokenizer in pieces, cut where the tokenizer allows it, so that a file larger
//! than memory streams through and one large file still keeps every core busy.

use std::{
    fmt,
    fs::File,
    io::{BufRead, BufReader, Read},
    path::Path,
};

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::{
    error::{DataError, Result},
    sources::{FileFormat, SourceFile},
};

/// How much is read at a time, and so about the size of a piece.
const BLOCK_BYTES: u64 = 256 << 10;

/// A part of a document, or all of it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) text: String,
    /// Whether the document is complete with this piece.
    pub(crate) ends_document: bool,
}

/// Where a text may be cut without changing what it becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Between any two characters.
    Anywhere,
    /// After a single `\n` between two lines: see [`is_line_border`].
    LineBorders,
    /// Nowhere: the tokenizer must see the document as a whole.
    Never,
}

impl Cut {
    /// The length of the longest start of `text` that can be cut off, if any.
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

/// Whether a `\n` ends right before byte `at`, follows a character that is not white space, and precedes
/// an ASCII letter.
pub(crate) fn is_line_border(text: &str, at: usize) -> bool {
    let (Some(before), Some(after)) = (text.get(..at), text.get(at..)) else { return false };
    let mut backwards = before.chars().rev();
    backwards.next() == Some('\n')
        && backwards.next().is_some_and(|c| !c.is_whitespace())
        && after.starts_with(|c: char| c.is_ascii_alphabetic())
}

/// Sends every piece of `file` to `sink`, in order, and returns the hash of the bytes that were read.
pub(crate) fn read_documents(
    file: &SourceFile,
    text_field: &str,
    cut: Cut,
    sink: &mut impl FnMut(Piece) -> Result<()>,
) -> Result<blake3::Hash> {
    match file.format {
        FileFormat::Text => read_text(&file.path, cut, sink),
        FileFormat::JsonLines => read_json_lines(&file.path, text_field, sink),
    }
}

/// The hash of a file's bytes and their number, read in blocks.
pub(crate) fn hash_file(path: &Path) -> Result<(blake3::Hash, u64)> {
    let file = File::open(path).map_err(DataError::io("open", path))?;
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file).map_err(DataError::io("read", path))?;
    Ok((hasher.finalize(), hasher.count()))
}

fn read_text(path: &Path, cut: Cut, sink: &mut impl FnMut(Piece) -> Result<()>) -> Result<blake3::Hash> {
    let mut file = File::open(path).map_err(DataError::io("open", path))?;
    let mut hasher = blake3::Hasher::new();
    let mut text = String::new();
    // The bytes not yet known to be text: at most the start of one character stays over from a block.
    let mut raw = Vec::new();
    let mut raw_offset = 0_u64;
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
            sink(Piece { text, ends_document: true })?;
            return Ok(hasher.finalize());
        }
        if let Some(border) = cut.last_border(&text) {
            let rest = text.split_off(border);
            sink(Piece { text, ends_document: false })?;
            text = rest;
        }
    }
}

fn read_json_lines(
    path: &Path,
    text_field: &str,
    sink: &mut impl FnMut(Piece) -> Result<()>,
) -> Result<blake3::Hash> {
    let file = File::open(path).map_err(DataError::io("open", path))?;
    let mut reader = BufReader::with_capacity(BLOCK_BYTES as usize, file);
    let mut hasher = blake3::Hasher::new();
    let mut line = Vec::new();
    let mut offset = 0_u64;
    for number in 1.. {
        line.clear();
        let read = reader.read_until(b'\n', &mut line).map_err(DataError::io("read", path))?;
        if read == 0 {
            break;
        }
        hasher.update(&line);
        let text = std::str::from_utf8(&line).map_err(|error| DataError::NotUtf8 {
            path: path.to_owned(),
            offset_bytes: offset + error.valid_up_to() as u64,
        })?;
        offset += read as u64;
        if text.trim_ascii().is_empty() {
            continue;
        }
        let text = parse_json_line(text, text_field).map_err(|problem| DataError::JsonLine {
            path: path.to_owned(),
            line: number,
            problem,
        })?;
        sink(Piece { text, ends_document: true })?;
    }
    Ok(hasher.finalize())
}

/// The text of one line of a JSON lines file: the string in the field `text_field` of its object. Other
/// fields are skipped without being built.
///
/// # Errors
/// What is wrong with the line, in words, with the column where the parser stopped.
pub fn parse_json_line(line: &str, text_field: &str) -> Result<String, String> {
    let mut parser = serde_json::Deserializer::from_str(line);
    let text = TextField(text_field).deserialize(&mut parser).and_then(|text| parser.end().map(|()| text));
    // The parser counts lines from the start of what it was given, which is one line.
    text.map_err(|error| error.to_string().replace(" at line 1 column", " at column"))
}

/// Reads an object and keeps one string of it.
struct TextField<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for TextField<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TextField<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with a string in its field \"{}\"", self.0)
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<String, M::Error> {
        let mut text = None;
        let mut others = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            if key == self.0 {
                text = Some(map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
                if others.len() < 8 {
                    others.push(key);
                }
            }
        }
        text.ok_or_else(|| {
            de::Error::custom(format_args!(
                "the object has no field \"{}\" (it has: {}); data.text_field names the one that holds the \
                 text",
                self.0,
                if others.is_empty() { "none".to_owned() } else { others.join(", ") }
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces_of(bytes: &[u8], cut: Cut) -> Result<Vec<Piece>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let mut pieces = Vec::new();
        let hash = read_text(file.path(), cut, &mut |piece| {
            pieces.push(piece);
            Ok(())
        })?;
        assert_eq!(hash, blake3::hash(bytes));
        Ok(pieces)
    }

    #[test]
    fn pieces_put_together_are_the_file_and_only_the_last_ends_the_document() {
        // Four-byte characters at an odd offset, so that a block ends within one.
        let mut text = "x".to_owned();
        while text.len() < 3 * BLOCK_BYTES as usize {
            text.push_str("🦀🦀 line\nnext ");
        }
        for (cut, at_least) in [(Cut::Anywhere, 3), (Cut::LineBorders, 3), (Cut::Never, 1)] {
            let pieces = pieces_of(text.as_bytes(), cut).unwrap();
            assert!(pieces.len() >= at_least, "{cut:?}: {} pieces", pieces.len());
            assert!(cut != Cut::Never || pieces.len() == 1);
            let joined: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
            assert!(joined == text, "{cut:?}");
            assert_eq!(pieces.iter().filter(|piece| piece.ends_document).count(), 1);
            assert!(pieces.last().unwrap().ends_document);
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

    #[test]
    fn a_line_gives_its_text_or_says_what_is_wrong() {
        assert_eq!(parse_json_line(r#"{"id": [1, {}], "text": "a\nb"}"#, "text").unwrap(), "a\nb");
        for (line, expected) in [
            ("{\"text\": \"a\"", "EOF while parsing an object at column 12"),
            ("[1]", "expected an object with a string in its field \"text\""),
            (r#"{"body": "a", "id": 1}"#, "no field \"text\" (it has: body, id)"),
            (r#"{"text": 3}"#, "expected a string at column 10"),
            (r#"{"text": "a"} {}"#, "trailing characters at column 15"),
            (r#"{"text": "\ud800"}"#, "column 17"),
        ] {
            let problem = parse_json_line(line, "text").unwrap_err();
            assert!(problem.contains(expected), "{line}: {problem}");
        }
    }
}
