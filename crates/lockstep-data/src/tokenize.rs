//! Tokenizes a corpus once: files in, a [`TokenFile`] out, found again by the hash of its content.
//!
//! Documents are read in order by one thread, tokenized by all of them, and written in order. A round of
//! a few megabytes at a time bounds memory whatever the size of the corpus.

use std::{fs, ops::Range, path::Path, sync::Arc};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::{
    documents::{Content, Piece, hash_file, read_documents},
    error::{DataError, Result, TokenFileProblem},
    id_type::IdType,
    json_line::{Document, Part, PartRole, TextOptions, parse_json_line},
    progress::Progress,
    sources::SourceFile,
    token_cache::{TokenFileHeader, TokenFileWriter},
    token_file::TokenFile,
    tokenizer::Tokenizer,
};

/// What a document ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The tokenizer's end-of-text token, if it has one and the text does not end with it itself.
    EndOfText,
    /// Its text.
    Nothing,
}

/// How text is turned into a token file, and where that is kept.
#[derive(Clone, Copy)]
pub struct TokenizeOptions<'a> {
    /// The directory of token files; it is created if need be.
    pub cache_dir: &'a Path,
    /// How documents are read.
    pub text: TextOptions<'a>,
    /// Hears how far the work is.
    pub progress: &'a dyn Progress,
}

/// A corpus in tokens.
#[derive(Debug)]
pub struct Tokenized {
    /// The tokens.
    pub file: TokenFile,
    /// Whether they were there already.
    pub from_cache: bool,
}

/// Text that is tokenized between two writes.
const ROUND_BYTES: usize = 16 << 20;

/// The tokens of `files`, in their order, with an end-of-text token between documents where the
/// tokenizer has one and the text does not end with it itself. Documents without text leave no trace.
///
/// The work runs on the current rayon pool. The result is kept in `options.cache_dir` under a name made
/// of the hashes of the format version, the tokenizer, the options and the files' contents (not their
/// paths), so whatever decides the ids decides the name. A damaged file under that name is made again.
/// Any number of processes may do this at once: each writes a file of its own, and all end with the same
/// bytes under the same name.
///
/// # Errors
/// Files that are missing, malformed, empty, or that change meanwhile; a disk that is full. No partial
/// file is left behind.
pub fn tokenize_files(
    files: &[SourceFile],
    tokenizer: &Tokenizer,
    options: &TokenizeOptions<'_>,
) -> Result<Tokenized> {
    let hashes: Vec<(blake3::Hash, u64)> =
        files.par_iter().map(|file| hash_file(&file.path)).collect::<Result<_>>()?;
    let key = content_key(files, &hashes, tokenizer, options);
    let path = options.cache_dir.join(format!("{}.tokens", key.to_hex()));

    match open_cached(&path, key) {
        Ok(Some(file)) => {
            tracing::debug!(path = %path.display(), "tokens are in the cache");
            return Ok(Tokenized { file, from_cache: true });
        }
        Ok(None) => tracing::debug!(path = %path.display(), files = files.len(), "tokenizing into the cache"),
        Err(error) => tracing::warn!(%error, "a damaged token file is made again"),
    }

    fs::create_dir_all(options.cache_dir).map_err(DataError::io("create", options.cache_dir))?;
    options.progress.begin("tokenizing", hashes.iter().map(|(_, bytes)| bytes).sum());
    let written = write_tokens(files, &hashes, tokenizer, options, key, &path);
    options.progress.finish();
    written?;
    Ok(Tokenized { file: TokenFile::open(&path)?, from_cache: false })
}

fn content_key(
    files: &[SourceFile],
    hashes: &[(blake3::Hash, u64)],
    tokenizer: &Tokenizer,
    options: &TokenizeOptions<'_>,
) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"lockstep tokens").update(&TokenFileHeader::VERSION.to_le_bytes());
    hasher.update(tokenizer.content_hash().as_bytes());
    for (file, (hash, bytes)) in files.iter().zip(hashes) {
        hasher.update(file.format.name().as_bytes());
        // The field matters where there are fields, and its hash has a length that says where it ends.
        if file.format.has_fields() {
            hasher.update(blake3::hash(options.text.text_field.as_bytes()).as_bytes());
            if let Some(columns) = options.text.columns.hash() {
                hasher.update(columns.as_bytes());
            }
        }
        hasher.update(&bytes.to_le_bytes()).update(hash.as_bytes());
    }
    hasher.finalize()
}

/// The token file at `path` if there is a sound one; an error if there is another.
fn open_cached(path: &Path, key: blake3::Hash) -> Result<Option<TokenFile>> {
    if !path.exists() {
        return Ok(None);
    }
    let file = TokenFile::open(path)?;
    if file.content_key() != Some(key) {
        return Err(file.bad(TokenFileProblem::OtherContent));
    }
    file.verify()?;
    Ok(Some(file))
}

fn write_tokens(
    files: &[SourceFile],
    hashes: &[(blake3::Hash, u64)],
    tokenizer: &Tokenizer,
    options: &TokenizeOptions<'_>,
    key: blake3::Hash,
    path: &Path,
) -> Result<()> {
    let sink = TokenFileWriter::create(path, tokenizer.vocab_size() as u64, key)?;
    let TokenizeOptions { text, progress, .. } = *options;
    let mut encoder = Encoder::new(sink, tokenizer, text, Ending::EndOfText, progress, Position::default());
    for (index, (file, (expected, _))) in files.iter().zip(hashes).enumerate() {
        if encoder.read(index, file, 0)? != *expected {
            return Err(DataError::SourceChanged { path: file.path.clone() });
        }
    }
    encoder.flush()?;
    if encoder.sink.tokens() == 0 {
        let first = files.first().map(|file| file.path.clone()).unwrap_or_default();
        return Err(DataError::NoText { first, files: files.len() });
    }
    encoder.sink.commit()
}

/// Where tokens go.
pub(crate) trait TokenSink {
    /// How ids are encoded.
    fn id_type(&self) -> IdType;

    /// How many tokens have been written.
    fn tokens(&self) -> u64;

    /// The next token is the first of a document.
    fn begin_document(&mut self) -> Result<()>;

    /// Appends ids that [`IdType::encode`] has encoded; `contexts` are the ranges of them that are never predicted.
    fn write(&mut self, ids: &[u8], contexts: &[Range<u64>]) -> Result<()>;

    /// All that was read up to `position` has been written.
    fn reached(&mut self, _position: Position) -> Result<()> {
        Ok(())
    }
}

/// How far in a list of files tokenization is: all that is needed to go on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Position {
    /// Which file.
    pub(crate) file: usize,
    /// Where in it; see [`Piece::end`].
    pub(crate) offset: u64,
    /// Whether a document goes on there.
    pub(crate) within_document: bool,
    /// The last id that was written.
    pub(crate) last_id: Option<u32>,
}

/// Tokenizes pieces in rounds and hands them on in their order.
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

/// The ids of a piece.
struct Encoded {
    ids: Vec<u8>,
    last_id: Option<u32>,
    contexts: Vec<Range<u64>>,
}

impl<'a, S: TokenSink> Encoder<'a, S> {
    /// An encoder that goes on at `position`.
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

    /// How far it has come, but for what was read since the last [`flush`](Self::flush).
    pub(crate) fn position(&self) -> Position {
        self.position
    }

    /// Reads `file`, which is number `index`, from `start` on, and returns the hash of what was read.
    pub(crate) fn read(&mut self, index: usize, file: &SourceFile, start: u64) -> Result<blake3::Hash> {
        let path: Arc<Path> = file.path.as_path().into();
        read_documents(file, start, self.text.text_field, self.tokenizer.cut(), &mut |piece| {
            self.position = Position { file: index, offset: piece.end, ..self.position };
            self.round_bytes += piece.content.bytes();
            self.round.push((Arc::clone(&path), piece));
            if self.round_bytes >= ROUND_BYTES { self.flush() } else { Ok(()) }
        })
    }

    /// Tokenizes and writes what has been read.
    pub(crate) fn flush(&mut self) -> Result<()> {
        let (tokenizer, id_type, text) = (self.tokenizer, self.sink.id_type(), self.text);
        let encoded: Vec<Result<Encoded>> = self
            .round
            .par_iter()
            .map(|(path, piece)| encode(tokenizer, id_type, text, path, &piece.content))
            .collect();
        for (encoded, (_, piece)) in encoded.into_iter().zip(&self.round) {
            // Of several errors, the first in the files is reported.
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

/// Writes an end-of-text token, if the tokenizer has one and the last document does not end with it.
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

/// The ids of the parts as one text, ended by an end-of-text token that is predicted if anything is, and which ranges
/// of them are context. A token belongs to the part in which it ends.
fn encode_parts(tokenizer: &Tokenizer, parts: &[Part]) -> Result<(Vec<u32>, Vec<Range<u64>>)> {
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
