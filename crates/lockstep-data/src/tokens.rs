//! What a run reads, as one sequence of tokens: files of tokens one after another, and text turned into them.

use std::{ops::Range, path::Path};

use crate::{
    error::{DataError, Result},
    id_type::IdType,
    json_line::TextOptions,
    progress::Progress,
    sources::{FileFormat, SourceFile},
    token_file::TokenFile,
    tokenize::{TokenizeOptions, tokenize_files},
    tokenizer::Tokenizer,
};

/// How files become tokens.
#[derive(Clone, Copy)]
pub struct OpenOptions<'a> {
    /// Turns text into ids, and says which id ends a text.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Every id is below this: the model's vocabulary.
    pub vocab_size: u64,
    /// How raw token files are read; by the size of the vocabulary if it is not given.
    pub id_type: Option<IdType>,
    /// Whether the documents of raw token files are looked for, which reads them whole.
    pub documents: FindDocuments,
    /// The directory in which the tokens of text are kept.
    pub cache_dir: &'a Path,
    /// How documents are read out of files of text.
    pub text: TextOptions<'a>,
    /// Hears how far tokenization is.
    pub progress: &'a dyn Progress,
}

/// What is wanted of the borders between documents in raw token files, which do not list them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FindDocuments {
    /// Nothing: nobody keeps documents apart.
    No,
    /// Each ends with the tokenizer's end-of-text token.
    ByEndOfText,
}

/// Files of tokens, one after another.
#[derive(Debug)]
pub struct Tokens {
    files: Vec<TokenFile>,
    /// The number of the first token of each file, and that of all tokens.
    starts: Vec<u64>,
    from_cache: bool,
}

impl Tokens {
    /// Opens `files` in their order. Those that hold tokens are mapped; neighbours that hold text are tokenized
    /// together, or found in the cache.
    ///
    /// # Errors
    /// Files that are missing, malformed or without text; ids beyond the vocabulary; no tokenizer where one is needed.
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
                FileFormat::RawTokens => {
                    TokenFile::open_raw(&first.path, id_type, options.vocab_size, end_of_text)?
                }
                FileFormat::Indexed => TokenFile::open_indexed(&first.path, options.vocab_size)?,
                FileFormat::Text | FileFormat::JsonLines | FileFormat::Parquet => {
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

    /// How many tokens there are.
    pub fn tokens(&self) -> u64 {
        self.starts[self.files.len()]
    }

    /// How many documents they belong to.
    pub fn documents(&self) -> u64 {
        self.files.iter().map(TokenFile::documents).sum()
    }

    /// The files.
    pub fn files(&self) -> &[TokenFile] {
        &self.files
    }

    /// Whether some of them are read and never predicted: prompts.
    pub fn has_contexts(&self) -> bool {
        self.contexts(0..self.tokens()).next().is_some()
    }

    /// The token at or after `at` that begins a document; the end if there is none.
    pub fn next_document(&self, at: u64) -> u64 {
        self.document_starts(at..self.tokens()).next().unwrap_or(self.tokens())
    }

    /// Whether there is text among them and its tokens were there already.
    pub fn from_cache(&self) -> bool {
        self.from_cache
    }

    /// Tells these tokens from others, as hexadecimal digits. Of files that were not made by this program it knows the
    /// length and a thousand pages.
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
    /// [`DataError::TokenOutOfRange`].
    ///
    /// # Panics
    /// If the range reaches beyond the last token.
    pub fn read(&self, range: Range<u64>, out: &mut Vec<u32>) -> Result<()> {
        self.parts(range).try_for_each(|(file, _, part)| file.read(part, out))
    }

    /// The first token of each document that begins in `range`, ascending; those of empty documents stand there
    /// more than once.
    pub(crate) fn document_starts(&self, range: Range<u64>) -> impl Iterator<Item = u64> {
        self.parts(range).flat_map(|(file, offset, part)| {
            file.documents_in(&part).map(move |document| offset + file.document_start(document))
        })
    }

    /// The parts of `range` that are read and never predicted.
    pub(crate) fn contexts(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        self.parts(range).flat_map(|(file, offset, part)| {
            file.contexts_in(part).map(move |context| offset + context.start..offset + context.end)
        })
    }

    /// `range` cut at the borders of files: each file with the number of its first token and the part of it.
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
