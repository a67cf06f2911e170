//! Turns documents into the ids of a data set, in order and with every core.
//!
//! One thread reads documents in order, all threads tokenize them, and the ids go in order to a [`TokenSink`]: a cache file or
//! an indexed data set. Rounds of 16 MiB bound the memory for a corpus of any size.

use std::{ops::Range, path::Path, sync::Arc};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::{
    chat::{PartRole, TextPart},
    documents::{Content, Piece, read_documents},
    error::{DataError, Result},
    id_type::IdType,
    json_line::{Document, TextOptions, parse_json_line},
    progress::Progress,
    sources::SourceFile,
    tokenizer::Tokenizer,
};

/// Token at the end of each document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The tokenizer's end-of-text token, unless it has none or the document ends with it already.
    EndOfText,
    /// No token is added.
    Nothing,
}

/// Bytes of text that are tokenized between two writes.
const ROUND_BYTES: usize = 16 << 20;

/// Destination of tokens.
pub(crate) trait TokenSink {
    /// Returns the type in which ids are encoded.
    fn id_type(&self) -> IdType;

    /// Returns the number of tokens written so far.
    fn tokens(&self) -> u64;

    /// Starts a document with the next token.
    fn begin_document(&mut self) -> Result<()>;

    /// Appends ids that [`IdType::encode`] has encoded. `contexts` are the ranges of them with masked labels.
    fn write(&mut self, ids: &[u8], contexts: &[Range<u64>]) -> Result<()>;

    /// Notes that everything up to `position` has been written.
    fn reached(&mut self, _position: Position) -> Result<()> {
        Ok(())
    }
}

/// Position of tokenization in a list of files: the whole state that a resume needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Position {
    /// Index of the current file.
    pub(crate) file: usize,
    /// Position in the file at which reading resumes; see [`Piece::end`].
    pub(crate) offset: u64,
    /// True if a document continues at this position.
    pub(crate) within_document: bool,
    /// Last id that was written.
    pub(crate) last_id: Option<u32>,
}

/// Encoder that tokenizes pieces in rounds and writes their ids in order.
pub(crate) struct Encoder<'a, S> {
    pub(crate) sink: S,
    tokenizer: &'a Tokenizer,
    text: TextOptions<'a>,
    ending: Ending,
    progress: &'a dyn Progress,
    round: Vec<(Arc<Path>, Piece)>,
    round_bytes: usize,
    position: Position,
}

/// Encoded ids of a piece.
struct Encoded {
    ids: Vec<u8>,
    last_id: Option<u32>,
    contexts: Vec<Range<u64>>,
}

impl<'a, S: TokenSink> Encoder<'a, S> {
    /// Creates an encoder that resumes at `position`.
    pub(crate) fn new(
        sink: S,
        tokenizer: &'a Tokenizer,
        text: TextOptions<'a>,
        ending: Ending,
        progress: &'a dyn Progress,
        position: Position,
    ) -> Self {
        Self { sink, tokenizer, text, ending, progress, round: Vec::new(), round_bytes: 0, position }
    }

    /// Returns the position after the last [`flush`](Self::flush); pieces read since then do not count.
    pub(crate) fn position(&self) -> Position {
        self.position
    }

    /// Reads `file`, which is number `index` in the list, from `start` on, and returns the hash of the bytes that were
    /// read.
    pub(crate) fn read(&mut self, index: usize, file: &SourceFile, start: u64) -> Result<blake3::Hash> {
        let path: Arc<Path> = file.path.as_path().into();
        read_documents(file, start, self.text.text_field, self.tokenizer.cut(), &mut |piece| {
            self.position = Position { file: index, offset: piece.end, ..self.position };
            self.round_bytes += piece.content.bytes();
            self.round.push((Arc::clone(&path), piece));
            if self.round_bytes >= ROUND_BYTES { self.flush() } else { Ok(()) }
        })
    }

    /// Tokenizes and writes the last pieces; fails if there was no text in `files`.
    pub(crate) fn finish(&mut self, files: &[SourceFile]) -> Result<()> {
        self.flush()?;
        if self.sink.tokens() > 0 {
            return Ok(());
        }
        let first = files.first().map(|file| file.path.clone()).unwrap_or_default();
        Err(DataError::NoText { first, files: files.len() })
    }

    /// Tokenizes and writes the pieces that have been read.
    fn flush(&mut self) -> Result<()> {
        let (tokenizer, id_type, text) = (self.tokenizer, self.sink.id_type(), self.text);
        let encoded: Vec<Result<Encoded>> = self
            .round
            .par_iter()
            .map(|(path, piece)| encode(tokenizer, id_type, text, path, &piece.content))
            .collect();
        for (encoded, (_, piece)) in encoded.into_iter().zip(&self.round) {
            // Of several errors, the first one in file order is reported.
            let Encoded { ids, last_id, contexts } = encoded?;
            if !ids.is_empty() {
                if !self.position.within_document {
                    if self.ending == Ending::EndOfText && self.sink.tokens() > 0 {
                        end_document(&mut self.sink, tokenizer, &mut self.position)?;
                    }
                    self.sink.begin_document()?;
                    self.position.within_document = true;
                }
                self.sink.write(&ids, &contexts)?;
                self.position.last_id = last_id;
            }
            self.position.within_document &= !piece.ends_document;
        }
        self.progress.advance(self.round_bytes as u64);
        self.round.clear();
        self.round_bytes = 0;
        self.sink.reached(self.position)
    }
}

/// Writes an end-of-text token, if the tokenizer has one and the last document does not end with it already.
pub(crate) fn end_document(
    sink: &mut impl TokenSink,
    tokenizer: &Tokenizer,
    position: &mut Position,
) -> Result<()> {
    let eos = tokenizer.eos_id().filter(|&eos| position.last_id != Some(eos));
    let Some(eos) = eos else { return Ok(()) };
    let mut id = Vec::new();
    sink.id_type().encode(&[eos], &mut id);
    position.last_id = Some(eos);
    sink.write(&id, &[])
}

fn encode(
    tokenizer: &Tokenizer,
    id_type: IdType,
    text: TextOptions<'_>,
    path: &Path,
    content: &Content,
) -> Result<Encoded> {
    let document;
    let (ids, contexts) = match content {
        Content::Text(text) => (tokenizer.encode(text)?, Vec::new()),
        Content::JsonRecord { place, text: record } => {
            let bad = |problem| DataError::JsonRecord { path: path.to_owned(), place: *place, problem };
            document = parse_json_line(record, text, tokenizer.chat_template()).map_err(bad)?;
            match &document {
                Document::Text(text) => (tokenizer.encode(text)?, Vec::new()),
                Document::Parts(parts) => encode_parts(tokenizer, parts)?,
            }
        }
    };
    tokenizer.check_ids(&ids)?;
    let mut encoded = Vec::with_capacity(ids.len() * id_type.bytes());
    id_type.encode(&ids, &mut encoded);
    Ok(Encoded { last_id: ids.last().copied(), ids: encoded, contexts })
}

/// Encodes the parts as one text, and returns the ids and the ranges of them with masked labels. Appends an end-of-text
/// token, which is masked if every part is. A token belongs to the part in which it ends.
fn encode_parts(tokenizer: &Tokenizer, parts: &[TextPart]) -> Result<(Vec<u32>, Vec<Range<u64>>)> {
    let whole: String = parts.iter().map(|part| part.text.as_str()).collect();
    let (mut ids, ends) = tokenizer.encode_with_ends(&whole)?;
    let mut contexts: Vec<Range<u64>> = Vec::new();
    let (mut token, mut part_end) = (0, 0);
    for part in parts {
        part_end += part.text.len();
        let first = token;
        token += ends[token..].iter().take_while(|&&end| end <= part_end).count();
        match contexts.last_mut() {
            _ if part.role == PartRole::Answer || first == token => {}
            Some(last) if last.end == first as u64 => last.end = token as u64,
            _ => contexts.push(first as u64..token as u64),
        }
    }
    if let Some(eos) = tokenizer.eos_id()
        && ids.last().is_some_and(|&last| last != eos)
    {
        ids.push(eos);
        let is_context = !parts.iter().any(|part| part.role == PartRole::Answer);
        contexts.last_mut().filter(|_| is_context).into_iter().for_each(|last| last.end += 1);
    }
    Ok((ids, contexts))
}
