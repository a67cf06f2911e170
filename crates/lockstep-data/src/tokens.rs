//! The token sequence of a run: token files and tokenized text files, concatenated.

use std::{ops::Range, path::Path};

use crate::{
    error::{DataError, Result},
    id_type::IdType,
    json_line::TextOptions,
    progress::Progress,
    sources::{Format, SourceFile},
    token_file::TokenFile,
    tokenize::{TokenizeOptions, tokenize_files},
    tokenizer::Tokenizer,
};

/// Options for opening files as tokens.
#[derive(Clone, Copy)]
pub struct OpenOptions<'a> {
    /// Tokenizer for text files and source of the end-of-text id; `None` if all files hold tokens.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Vocabulary size of the model: every id must be below it.
    pub vocab_size: u64,
    /// Id type of raw token files; derived from the vocabulary size if `None`.
    pub id_type: Option<IdType>,
    /// Search for document boundaries in raw token files; it reads them completely.
    pub documents: FindDocuments,
    /// Directory of token cache files for text.
    pub cache_dir: &'a Path,
    /// Field names for reading documents from text files.
    pub text: TextOptions<'a>,
    /// Observer of the progress of tokenization.
    pub progress: &'a dyn Progress,
}

/// Search for document boundaries in raw token files, which do not list them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FindDocuments {
    /// No search: documents are not kept apart.
    No,
    /// Each document ends with the tokenizer's end-of-text token.
    ByEndOfText,
}

/// Token files, concatenated in order.
#[derive(Debug)]
pub struct Tokens {
    files: Vec<TokenFile>,
    /// Index of the first token of each file in the sequence, and the total number of tokens.
    starts: Vec<u64>,
    from_cache: bool,
}

impl Tokens {
    /// Opens `files` in order. Token files are memory-mapped. Adjacent text files are tokenized together, or found in
    /// the cache.
    ///
    /// # Errors
    /// If a file is missing, malformed or without text, an id is beyond the vocabulary, or a text file has no
    /// tokenizer.
    pub fn open(files: &[SourceFile], options: &OpenOptions<'_>) -> Result<Self> {
        let id_type = options.id_type.unwrap_or(IdType::for_vocabulary(options.vocab_size));
        let end_of_text = match options.documents {
            FindDocuments::No => None,
            FindDocuments::ByEndOfText => options.tokenizer.and_then(Tokenizer::eos_id),
        };
        let mut opened = Vec::new();
        let (mut text_files, mut made) = (0, 0);
        for group in files.chunk_by(|a, b| a.format.is_text() && b.format.is_text()) {
            let first = &group[0];
            opened.push(match first.format {
                Format::RawTokens => {
                    TokenFile::open_raw(&first.path, id_type, options.vocab_size, end_of_text)?
                }
                Format::Indexed => TokenFile::open_indexed(&first.path, options.vocab_size)?,
                Format::Auto | Format::Text | Format::JsonLines | Format::Parquet => {
                    let no_tokenizer = || DataError::NoTokenizer { path: first.path.clone() };
                    let tokenizer = options.tokenizer.ok_or_else(no_tokenizer)?;
                    let OpenOptions { cache_dir, text, progress, .. } = *options;
                    let tokenized =
                        tokenize_files(group, tokenizer, &TokenizeOptions { cache_dir, text, progress })?;
                    text_files += 1;
                    made += usize::from(!tokenized.from_cache);
                    tokenized.file
                }
            });
        }
        Ok(Self { from_cache: text_files > 0 && made == 0, ..Self::from(opened) })
    }

    /// Returns the total number of tokens.
    pub fn tokens(&self) -> u64 {
        self.starts[self.files.len()]
    }

    /// Returns the total number of documents.
    pub fn documents(&self) -> u64 {
        self.files.iter().map(TokenFile::documents).sum()
    }

    /// Returns the files in order.
    pub fn files(&self) -> &[TokenFile] {
        &self.files
    }

    /// Returns true if some tokens, such as prompts, have masked labels.
    pub fn has_contexts(&self) -> bool {
        self.contexts(0..self.tokens()).next().is_some()
    }

    /// Returns the first token at or after `at` that begins a document; the number of tokens if there is none.
    pub fn next_document(&self, at: u64) -> u64 {
        self.document_starts(at..self.tokens()).next().unwrap_or(self.tokens())
    }

    /// Returns true if there are text files and all their tokens were in the cache.
    pub fn from_cache(&self) -> bool {
        self.from_cache
    }

    /// Returns a hash that identifies the tokens, in hexadecimal. For raw and Megatron files it covers the length and
    /// the sampled pages only.
    pub fn digest(&self) -> String {
        let hash = match self.files.as_slice() {
            [only] => only.digest(),
            files => {
                let mut hasher = blake3::Hasher::new();
                for file in files {
                    hasher.update(file.digest().as_bytes());
                }
                hasher.finalize()
            }
        };
        hash.to_hex().to_string()
    }

    /// Appends the ids of `range` to `out`.
    ///
    /// # Errors
    /// If an id is beyond the vocabulary.
    ///
    /// # Panics
    /// If the range reaches beyond the last token.
    pub fn read(&self, range: Range<u64>, out: &mut Vec<u32>) -> Result<()> {
        self.parts(range).try_for_each(|(file, _, part)| file.read(part, out))
    }

    /// Returns the first token of each document that begins in `range`, ascending. Empty documents repeat the start of
    /// the next one.
    pub(crate) fn document_starts(&self, range: Range<u64>) -> impl Iterator<Item = u64> {
        self.parts(range).flat_map(|(file, offset, part)| {
            file.documents_in(&part).map(move |document| offset + file.document_start(document))
        })
    }

    /// Returns the ranges within `range` whose labels are masked.
    pub(crate) fn contexts(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        self.parts(range).flat_map(|(file, offset, part)| {
            file.contexts_in(part).map(move |context| offset + context.start..offset + context.end)
        })
    }

    /// Splits `range` at file boundaries: returns each file, the index of its first token, and the range within the
    /// file.
    fn parts(&self, range: Range<u64>) -> impl Iterator<Item = (&TokenFile, u64, Range<u64>)> {
        let first = self.starts.partition_point(|&start| start <= range.start).saturating_sub(1);
        let files = self.files.iter().zip(&self.starts).skip(first);
        files.take_while(move |&(_, &start)| start < range.end).map(move |(file, &start)| {
            let part = range.start.saturating_sub(start)..(range.end - start).min(file.tokens());
            (file, start, part)
        })
    }
}

impl From<Vec<TokenFile>> for Tokens {
    fn from(files: Vec<TokenFile>) -> Self {
        let mut starts = vec![0];
        for file in &files {
            starts.push(starts[starts.len() - 1] + file.tokens());
        }
        Self { files, starts, from_cache: false }
    }
}
