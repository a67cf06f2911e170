//! Tokenizes a corpus once into a [`TokenFile`], which later runs find by the hash of its inputs.

use std::{fs, path::Path};

use rayon::prelude::*;

use crate::{
    documents::hash_file,
    encoder::{Encoder, Ending, Position},
    error::{DataError, Result},
    json_line::TextOptions,
    progress::Progress,
    sources::SourceFile,
    token_cache::{TokenFileHeader, TokenFileWriter},
    token_file::TokenFile,
    tokenizer::Tokenizer,
};

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

/// Tokenizes `files` in order, with an end-of-text token between documents if the tokenizer has one and the document
/// does not end with it already. Documents without text are skipped.
///
/// Runs on the current rayon pool. The result is kept in `options.cache_dir`. Its name is a hash of the format version,
/// the tokenizer, the options and the contents of the files (not their paths), which together determine the ids. A
/// damaged file of that name is replaced. Several processes may do this at the same time: each writes its own temporary
/// file, and all end with the same bytes under the same name.
///
/// # Errors
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
        return Err(file.bad("it belongs to another corpus, tokenizer or set of options than its name says"));
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
    encoder.finish(files)?;
    encoder.sink.commit()
}
