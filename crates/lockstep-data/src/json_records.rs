//! Streams the records of a JSON file: one per line, or the elements of one array.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
};

use crate::error::{DataError, RecordPlace, Result};

/// Buffer size of reads, in bytes.
const BLOCK_BYTES: usize = 256 << 10;

/// UTF-8 byte order mark, which some programs write. JSON does not allow it, so it is skipped at the start of the file.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Text of one record.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct JsonRecord {
    pub(crate) place: RecordPlace,
    pub(crate) text: String,
    /// Offset in the file of the next record.
    pub(crate) end: u64,
}

/// Reader of a file, record by record.
pub(crate) struct JsonRecords {
    path: PathBuf,
    reader: BufReader<File>,
    /// Lines or array; `None` before the first record is read.
    form: Option<Form>,
    records: u64,
    offset: u64,
    hasher: blake3::Hasher,
    /// Offset up to which bytes are read but not hashed.
    start: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Lines,
    Array,
    /// Array that has ended.
    Done,
}

impl JsonRecords {
    /// Opens the file at `path`, for the records that end after byte `start`.
    pub(crate) fn open(path: &Path, start: u64) -> Result<Self> {
        let file = File::open(path).map_err(DataError::io("open", path))?;
        let reader = BufReader::with_capacity(BLOCK_BYTES, file);
        let hasher = blake3::Hasher::new();
        Ok(Self { path: path.to_owned(), reader, form: None, records: 0, offset: 0, hasher, start })
    }

    /// Returns the hash of the bytes that were read, except records before the start.
    pub(crate) fn hash(&self) -> blake3::Hash {
        self.hasher.finalize()
    }

    /// Returns the next record that is not empty; `None` at the end of the file.
    pub(crate) fn next(&mut self) -> Result<Option<JsonRecord>> {
        loop {
            let form = match self.form {
                Some(form) => form,
                None => self.find_form()?,
            };
            let record = match form {
                Form::Lines => self.next_line()?,
                Form::Array => self.next_element()?,
                Form::Done => None,
            };
            match record {
                Some(record) if record.end <= self.start || record.text.trim_ascii().is_empty() => {}
                record => return Ok(record),
            }
        }
    }

    /// Detects the form of the file: an array starts with a bracket, anything else has one record per line.
    fn find_form(&mut self) -> Result<Form> {
        let block = self.reader.fill_buf().map_err(DataError::io("read", &self.path))?;
        let text = block.strip_prefix(BYTE_ORDER_MARK).unwrap_or(block);
        let is_array = text.trim_ascii_start().starts_with(b"[");
        if is_array {
            let opening = block.len() - text.trim_ascii_start().len() + 1;
            let opened = block[..opening].to_vec();
            self.reader.consume(opening);
            self.took(&opened);
        }
        let form = if is_array { Form::Array } else { Form::Lines };
        self.form = Some(form);
        Ok(form)
    }

    /// Advances the offset over bytes that were read, and hashes them.
    fn took(&mut self, bytes: &[u8]) {
        self.offset += bytes.len() as u64;
        if self.offset > self.start {
            self.hasher.update(bytes);
        }
    }

    fn next_line(&mut self) -> Result<Option<JsonRecord>> {
        let mut line = Vec::new();
        let read = self.reader.read_until(b'\n', &mut line).map_err(DataError::io("read", &self.path))?;
        if read == 0 {
            return Ok(None);
        }
        self.took(&line);
        self.records += 1;
        let text =
            if self.records == 1 { line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&line) } else { &line };
        self.record(RecordPlace::Line(self.records), text).map(Some)
    }

    fn record(&self, place: RecordPlace, bytes: &[u8]) -> Result<JsonRecord> {
        let text = std::str::from_utf8(bytes).map_err(|error| DataError::NotUtf8 {
            path: self.path.clone(),
            offset_bytes: self.offset - bytes.len() as u64 + error.valid_up_to() as u64,
        })?;
        Ok(JsonRecord { place, text: text.to_owned(), end: self.offset })
    }

    /// Returns the next element: an object, up to its closing brace.
    fn next_element(&mut self) -> Result<Option<JsonRecord>> {
        let (mut bytes, mut scan) = (Vec::new(), Scan::default());
        let place = RecordPlace::Element(self.records + 1);
        let bad = |problem: &str| DataError::JsonRecord {
            path: self.path.clone(),
            place,
            problem: problem.to_owned(),
        };
        let cut_short = bad("the array does not end: the file is cut short, or it lacks a closing ]");
        let not_an_object = bad("it is no object; an array of records is [{...}, {...}]");
        let is_first = self.records == 0;
        loop {
            let block = self.reader.fill_buf().map_err(DataError::io("read", &self.path))?;
            if block.is_empty() {
                return Err(cut_short);
            }
            let (used, state) = scan.take(block, is_first);
            bytes.extend_from_slice(&block[..used]);
            self.reader.consume(used);
            match state {
                Scanned::More => {}
                Scanned::NoObject => return Err(not_an_object),
                Scanned::ArrayEnds => {
                    self.took(&bytes);
                    self.form = Some(Form::Done);
                    return self.read_rest().map(|()| None);
                }
                Scanned::ElementEnds => {
                    self.took(&bytes);
                    self.records += 1;
                    return self.record(place, &bytes[scan.begin..]).map(Some);
                }
            }
        }
    }

    /// Reads to the end of the file and checks that only white space follows the array.
    fn read_rest(&mut self) -> Result<()> {
        loop {
            let block = self.reader.fill_buf().map_err(DataError::io("read", &self.path))?.to_vec();
            if block.is_empty() {
                return Ok(());
            }
            if !block.trim_ascii().is_empty() {
                return Err(DataError::JsonRecord {
                    path: self.path.clone(),
                    place: RecordPlace::Element(self.records),
                    problem: "something follows the end of the array".to_owned(),
                });
            }
            self.reader.consume(block.len());
            self.took(&block);
        }
    }
}

/// State of a scan over one array element.
#[derive(Default)]
struct Scan {
    /// Bytes before the element: white space and a comma.
    begin: usize,
    has_comma: bool,
    depth: usize,
    in_string: bool,
    is_escaped: bool,
}

/// Result of scanning a block.
enum Scanned {
    More,
    ElementEnds,
    ArrayEnds,
    NoObject,
}

impl Scan {
    /// Scans bytes of `block` up to the end of the element, and returns their number.
    fn take(&mut self, block: &[u8], is_first: bool) -> (usize, Scanned) {
        for (at, &byte) in block.iter().enumerate() {
            if self.depth == 0 {
                match byte {
                    b'{' if is_first || self.has_comma => self.depth = 1,
                    b' ' | b'\t' | b'\r' | b'\n' => self.begin += 1,
                    b',' if !is_first && !self.has_comma => {
                        self.has_comma = true;
                        self.begin += 1;
                    }
                    b']' if !self.has_comma => return (at + 1, Scanned::ArrayEnds),
                    _ => return (at + 1, Scanned::NoObject),
                }
                continue;
            }
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.in_string => self.is_escaped = true,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => self.depth -= 1,
                _ => {}
            }
            if self.depth == 0 {
                return (at + 1, Scanned::ElementEnds);
            }
        }
        (block.len(), Scanned::More)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(text: &str, start: u64) -> Result<Vec<JsonRecord>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let mut records = JsonRecords::open(file.path(), start)?;
        let mut all = Vec::new();
        while let Some(record) = records.next()? {
            all.push(record);
        }
        if start == 0 {
            assert_eq!(records.hash(), blake3::hash(text.as_bytes()), "{text}");
        }
        Ok(all)
    }

    #[test]
    fn an_array_and_lines_give_the_same_records() {
        let elements = [r#"{"a": "]}\"{"}"#, r#"{"b": [1, {"c": []}]}"#, r#"{"ä": 1}"#];
        let lines = records(&elements.join("\n\n"), 0).unwrap();
        for (open, between, close) in [("[", ",", "]"), ("\u{feff} [\n  ", " ,\n  ", "\n]\n")] {
            let text = format!("{open}{}{close}", elements.join(between));
            let array = records(&text, 0).unwrap();
            assert_eq!(array.iter().map(|record| record.text.as_str()).collect::<Vec<_>>(), elements);
            assert_eq!(array[2].place, RecordPlace::Element(3));
            for (done, record) in array.iter().enumerate() {
                assert_eq!(records(&text, record.end).unwrap(), array[done + 1..], "{done}");
            }
        }
        let texts = lines.iter().map(|record| record.text.trim_ascii());
        assert_eq!(texts.collect::<Vec<_>>(), elements);
        assert_eq!(records("[]", 0).unwrap(), []);
    }

    #[test]
    fn an_array_that_is_damaged_names_the_element() {
        for (text, expected) in [
            (r#"[{"a": 1}, {"b""#, "element 2: the array does not end"),
            (r#"[{"a": 1}"#, "element 2: the array does not end"),
            ("[1, 2]", "element 1: it is no object"),
            (r#"[{"a": 1} {"b": 1}]"#, "element 2: it is no object"),
            (r#"[{"a": 1},]"#, "element 2: it is no object"),
            (r#"[{"a": 1}] x"#, "something follows"),
        ] {
            let problem = records(text, 0).unwrap_err().to_string();
            assert!(problem.contains(expected), "{text}: {problem}");
        }
    }
}
