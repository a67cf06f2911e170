//! Tokenizes a corpus once into a [`TokenFile`], which later runs find by the hash of its inputs.
//!
//! One thread reads documents in order, all threads tokenize them, and the ids are written in order. Rounds of 16 MiB
//! bound the memory for a corpus of any size.

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

/// Token at the end of each document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The tokenizer's end-of-text token, unless it has none or the document ends with it already.
    EndOfText,
    /// No token is added.
    Nothing,
}

/// Options for tokenizing text into the cache.
#[derive(Clone, Copy)]
pub struct TokenizeOptions<'a> {
    /// Directory of token cache files; created if it is missing.
    pub cache_dir: &'a Path,
    /// Field names for reading documents.
    pub text: TextOptions<'a>,
    /// Observer of the progress.
    pub progress: &'a dyn Progress,
}

/// Tokenized corpus, and its origin.
#[derive(Debug)]
pub struct Tokenized {
    /// Token file with the result.
    pub file: TokenFile,
    /// True if the file was in the cache already.
    pub from_cache: bool,
}

/// Bytes of text that are tokenized between two writes.
const ROUND_BYTES: usize = 16 << 20;

/// Tokenizes `files` in order, with an end-of-text token between documents if the tokenizer has one and the document
/// does not end with it already. Documents without text are skipped.
///
/// Runs on the current rayon pool. The result is kept in `options.cache_dir`. Its name is a hash of the format version,
/// the tokenizer, the options and the contents of the files (not their paths), which together determine the ids. A
/// damaged file of that name is replaced. Several processes may do this at the same time: each writes its own temporary
/// file, and all end with the same bytes under the same name.
///
/// If a file is missing or malformed, no file holds text, a file changes while it is read, or the disk is full. No
/// unfinished file is left behind.
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
        Err(error) => tracing::warn!(%error, "a damaged token file is written again"),
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
        // The field name counts only where records have fields. It is hashed, so that its length is fixed.
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

/// Opens the token file at `path`. Returns `None` if there is none, and an error if it is damaged.
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

    /// Tokenizes and writes the pieces that have been read.
    pub(crate) fn flush(&mut self) -> Result<()> {
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
