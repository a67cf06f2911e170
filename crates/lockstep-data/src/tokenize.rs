//! Tokenizes a corpus once: files in, a [`TokenFile`] out, found again by the hash of its content.
//!
//! Documents are read in order by one thread, tokenized by all of them, and written in order. A round of
//! a few megabytes at a time bounds memory whatever the size of the corpus.

use std::{fs, path::Path};

use rayon::prelude::*;

use crate::{
    documents::{Piece, hash_file, read_documents},
    error::{DataError, Result, TokenFileProblem},
    progress::Progress,
    sources::{FileFormat, SourceFile},
    token_file::{TokenFile, TokenFileHeader, TokenFileWriter, TokenWidth},
    tokenizer::Tokenizer,
};

/// How text is turned into a token file, and where that is kept.
#[derive(Clone, Copy)]
pub struct TokenizeOptions<'a> {
    /// The directory of token files; it is created if need be.
    pub cache_dir: &'a Path,
    /// The field of a JSON object that holds its text.
    pub text_field: &'a str,
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
/// tokenizer has one. Documents without text leave no trace.
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
        Ok(Some(file)) => return Ok(Tokenized { file, from_cache: true }),
        Ok(None) => {}
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
        match file.format {
            FileFormat::Text => hasher.update(b"text"),
            // The field matters where there are fields, and its hash has a length that says where it ends.
            FileFormat::JsonLines => {
                hasher.update(b"json").update(blake3::hash(options.text_field.as_bytes()).as_bytes())
            }
        };
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
    if file.header().content_key != key {
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
    let mut round = Round {
        writer: TokenFileWriter::create(path, tokenizer.vocab_size() as u64, key)?,
        tokenizer,
        progress: options.progress,
        pieces: Vec::new(),
        piece_bytes: 0,
        within_document: false,
    };
    for (file, (expected, _)) in files.iter().zip(hashes) {
        let found =
            read_documents(file, options.text_field, tokenizer.cut(), &mut |piece| round.push(piece))?;
        if found != *expected {
            return Err(DataError::SourceChanged { path: file.path.clone() });
        }
    }
    round.flush()?;
    if round.writer.tokens() == 0 {
        let first = files.first().map(|file| file.path.clone()).unwrap_or_default();
        return Err(DataError::NoText { first, files: files.len() });
    }
    round.writer.commit()
}

/// The pieces that are tokenized together, and the file that they go to.
struct Round<'a> {
    writer: TokenFileWriter,
    tokenizer: &'a Tokenizer,
    progress: &'a dyn Progress,
    /// Text, and whether an end-of-text token stands before it.
    pieces: Vec<(String, bool)>,
    piece_bytes: usize,
    /// Whether the next piece goes on with the document of the last one that had text.
    within_document: bool,
}

impl Round<'_> {
    fn push(&mut self, piece: Piece) -> Result<()> {
        let is_first_of_all = self.writer.tokens() == 0 && self.pieces.is_empty();
        if !piece.text.is_empty() {
            self.piece_bytes += piece.text.len();
            let starts_document = !self.within_document && !is_first_of_all;
            self.pieces.push((piece.text, starts_document));
            self.within_document = true;
        }
        if piece.ends_document {
            self.within_document = false;
        }
        if self.piece_bytes >= ROUND_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let (tokenizer, width) = (self.tokenizer, self.writer.width());
        let encoded: Vec<Vec<u8>> = self
            .pieces
            .par_iter()
            .map(|(text, starts_document)| encode_piece(tokenizer, width, text, *starts_document))
            .collect::<Result<_>>()?;
        for bytes in &encoded {
            self.writer.write(bytes)?;
        }
        self.progress.advance(self.piece_bytes as u64);
        self.pieces.clear();
        self.piece_bytes = 0;
        Ok(())
    }
}

fn encode_piece(
    tokenizer: &Tokenizer,
    width: TokenWidth,
    text: &str,
    starts_document: bool,
) -> Result<Vec<u8>> {
    let ids = tokenizer.encode(text)?;
    let mut encoded = Vec::with_capacity((ids.len() + 1) * width.bytes());
    if let Some(eos) = tokenizer.eos_id().filter(|_| starts_document) {
        width.encode(&[eos], &mut encoded);
    }
    tokenizer.check_ids(&ids)?;
    width.encode(&ids, &mut encoded);
    Ok(encoded)
}
