//! What files of tokens consist of, for people to look at.

use std::path::PathBuf;

use crate::{error::Result, id_type::IdType, tokenizer::Tokenizer, tokens::Tokens};

/// What there is in a sequence of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contents {
    /// The files, in their order.
    pub files: Vec<FileContents>,
    /// How many documents there are.
    pub documents: u64,
    /// How many tokens.
    pub tokens: u64,
    /// How many of them are read and never predicted.
    pub context_tokens: u64,
    /// The number of tokens of the longest document.
    pub longest_document: u64,
    /// The first few ids.
    pub sample_ids: Vec<u32>,
    /// What they say, where there is a tokenizer.
    pub sample: Option<String>,
}

/// One file of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileContents {
    /// Where it is; the tokens of text are in the cache.
    pub path: PathBuf,
    /// How ids are stored.
    pub id_type: IdType,
    /// How many documents it has.
    pub documents: u64,
    /// How many tokens.
    pub tokens: u64,
}

/// How many tokens are shown.
const SAMPLE_TOKENS: u64 = 64;

impl Tokens {
    /// Counts what there is, and decodes the beginning.
    ///
    /// # Errors
    /// As [`Tokens::read`] and [`Tokenizer::decode`].
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

    /// Looks at every byte: compares those that this program made with their checksums, and every id with the
    /// vocabulary.
    ///
    /// # Errors
    /// The first damage that is found.
    pub fn verify(&self) -> Result<()> {
        self.files().iter().try_for_each(|file| file.verify())
    }
}
