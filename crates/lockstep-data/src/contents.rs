//! Statistics about token files, for display.

use std::path::PathBuf;

use crate::{error::Result, id_type::IdType, tokenizer::Tokenizer, tokens::Tokens};

/// Statistics and a sample of a sequence of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contents {
    /// Statistics of each file, in order.
    pub files: Vec<FileContents>,
    /// Number of documents.
    pub documents: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of tokens whose labels are masked, such as prompts.
    pub context_tokens: u64,
    /// Length of the longest document, in tokens.
    pub longest_document: u64,
    /// First ids of the sequence, at most 64.
    pub sample_ids: Vec<u32>,
    /// Decoded text of `sample_ids`; `None` without a tokenizer.
    pub sample: Option<String>,
}

/// Statistics of one token file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileContents {
    /// Path of the token file; for tokenized text, that of the cache file.
    pub path: PathBuf,
    /// Type in which ids are stored.
    pub id_type: IdType,
    /// Number of documents in the file.
    pub documents: u64,
    /// Number of tokens in the file.
    pub tokens: u64,
}

/// Number of tokens in the sample.
const SAMPLE_TOKENS: u64 = 64;

impl Tokens {
    /// Counts documents and tokens, and decodes the first tokens.
    ///
    /// # Errors
    /// If an id is beyond the vocabulary, or the tokenizer cannot decode the sample.
    pub fn contents(&self, tokenizer: Option<&Tokenizer>) -> Result<Contents> {
        let files: Vec<FileContents> = self
            .files()
            .iter()
            .map(|file| FileContents {
                path: file.path().to_owned(),
                id_type: file.id_type(),
                documents: file.documents(),
                tokens: file.tokens(),
            })
            .collect();
        let ends = self.document_starts(1..self.tokens()).chain(std::iter::once(self.tokens()));
        let lengths = ends.scan(0, |start, end| Some(end - std::mem::replace(start, end)));
        let mut sample_ids = Vec::new();
        self.read(0..self.tokens().min(SAMPLE_TOKENS), &mut sample_ids)?;
        Ok(Contents {
            documents: self.documents(),
            tokens: self.tokens(),
            context_tokens: self.files().iter().map(|file| file.context_tokens()).sum(),
            longest_document: lengths.max().unwrap_or_default(),
            sample: tokenizer.map(|tokenizer| tokenizer.decode(&sample_ids)).transpose()?,
            sample_ids,
            files,
        })
    }

    /// Checks all files completely: cache files against their checksum, and every id of other files against the
    /// vocabulary.
    ///
    /// # Errors
    /// If a file is damaged; the first damage is reported.
    pub fn verify(&self) -> Result<()> {
        self.files().iter().try_for_each(|file| file.verify())
    }
}
