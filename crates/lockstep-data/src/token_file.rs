//! A file of token ids, mapped into memory: one that this program made of text, a raw one, or one of Megatron's.
//!
//! Whatever its format, it is a sequence of ids that are checked against the vocabulary whenever they are read, with
//! the places where documents begin and the ranges that are context only.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use lockstep_tensor::MappedFile;
use rayon::prelude::*;

use crate::{
    error::{DataError, Result, TokenFileProblem},
    id_type::{BadId, IdType},
    indexed::Index,
    token_cache::TokenFileHeader,
};

/// A file of token ids, mapped into memory.
///
/// Whoever shortens the file while it is mapped ends this process; files in the cache are never changed.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    map: MappedFile,
    /// Where the ids stand in the map.
    ids: Range<usize>,
    id_type: IdType,
    vocab_size: u64,
    tokens: u64,
    documents: Documents,
    /// Where the contexts stand in the map.
    contexts: Range<usize>,
    digest: blake3::Hash,
}

/// Where documents begin.
#[derive(Debug)]
enum Documents {
    /// The file is one.
    One,
    /// Found by their end-of-text tokens.
    Found(Vec<u64>),
    /// Listed in this part of the map.
    Listed(Range<usize>),
    /// In a file of their own.
    Indexed(Index),
}

/// The bytes and the number of the pages that stand for a file of any size, where it is checked and told from another.
const SAMPLED_PAGE_BYTES: u64 = 4096;
const SAMPLED_PAGES: u64 = 1024;

impl TokenFile {
    /// Maps the tokens of a text that are kept at `path`, after checking the header, the length, and that documents
    /// and contexts lie in order. [`verify`](Self::verify) checks the rest at once.
    ///
    /// # Errors
    /// A file that cannot be opened, or [`DataError::BadTokenFile`].
    pub fn open(path: &Path) -> Result<Self> {
        let bad = |problem| DataError::BadTokenFile { path: path.to_owned(), problem };
        let map = MappedFile::open(path).map_err(DataError::io("open token file", path))?;
        let header = TokenFileHeader::parse(&map).map_err(bad)?;
        if map.len() as u64 != header.file_bytes() {
            let expected_bytes = header.file_bytes();
            return Err(bad(TokenFileProblem::Length { bytes: map.len() as u64, expected_bytes }));
        }
        let [ids, documents, contexts] = header.sections();
        check_order(&map[documents.clone()], &map[contexts.clone()], header.tokens).map_err(bad)?;
        Ok(Self {
            path: path.to_owned(),
            ids,
            id_type: header.id_type,
            vocab_size: header.vocab_size,
            tokens: header.tokens,
            documents: Documents::Listed(documents),
            contexts,
            digest: header.payload_hash,
            map,
        })
    }

    /// Maps a file that holds nothing but ids, as nanoGPT writes them. Where `end_of_text` is given, a document ends
    /// with each of them: the whole file is searched. Otherwise the file is one document.
    ///
    /// # Errors
    /// A file that cannot be opened, that is empty or not a whole number of ids, or whose ids are beyond the
    /// vocabulary: a thousand pages of it are looked at.
    pub fn open_raw(path: &Path, id_type: IdType, vocab_size: u64, end_of_text: Option<u32>) -> Result<Self> {
        let map = MappedFile::open(path).map_err(DataError::io("open token file", path))?;
        let bytes = map.len();
        if bytes == 0 || !bytes.is_multiple_of(id_type.bytes()) {
            return Err(DataError::BadRawFile { path: path.to_owned(), bytes: bytes as u64, id_type });
        }
        let mut file = Self {
            path: path.to_owned(),
            ids: 0..bytes,
            id_type,
            vocab_size,
            tokens: (bytes / id_type.bytes()) as u64,
            documents: Documents::One,
            contexts: 0..0,
            digest: blake3::hash(b""),
            map,
        };
        file.digest = file.sample_pages()?;
        if let Some(end_of_text) = end_of_text {
            file.documents = Documents::Found(file.documents_after(end_of_text)?);
        }
        Ok(file)
    }

    /// Maps the `.bin` and the `.idx` of one of Megatron's indexed data sets; `path` is either.
    ///
    /// # Errors
    /// A file that cannot be opened, an index that breaks a rule of the format or does not fit the tokens, ids beyond
    /// the vocabulary: a thousand pages are looked at.
    pub fn open_indexed(path: &Path, vocab_size: u64) -> Result<Self> {
        let (path, index_path) = (path.with_extension("bin"), path.with_extension("idx"));
        let map = MappedFile::open(&path).map_err(DataError::io("open token file", &path))?;
        let index = Index::open(&index_path, map.len() as u64)?;
        let id_type = index.header().id_type;
        let mut file = Self {
            ids: 0..map.len(),
            id_type,
            vocab_size,
            tokens: (map.len() / id_type.bytes()) as u64,
            documents: Documents::Indexed(index),
            contexts: 0..0,
            digest: blake3::hash(b""),
            map,
            path,
        };
        if file.tokens == 0 {
            return Err(DataError::NoText { first: file.path, files: 1 });
        }
        file.digest = file.sample_pages()?;
        Ok(file)
    }

    /// Compares the contents of a file made by this program with their checksum, and looks at every id of any other.
    ///
    /// # Errors
    /// [`DataError::BadTokenFile`] if a byte has changed, [`DataError::TokenOutOfRange`].
    pub fn verify(&self) -> Result<()> {
        if let Documents::Listed(_) = self.documents {
            let same = blake3::hash(&self.map[TokenFileHeader::BYTES..]) == self.digest;
            return if same { Ok(()) } else { Err(self.bad(TokenFileProblem::PayloadChecksum)) };
        }
        self.blocks().try_for_each(|block| self.read(block, &mut Vec::new()))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How its ids are stored.
    pub fn id_type(&self) -> IdType {
        self.id_type
    }

    /// How many tokens it holds.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// How many documents they belong to.
    pub fn documents(&self) -> u64 {
        match &self.documents {
            Documents::One => 1,
            Documents::Found(starts) => starts.len() as u64,
            Documents::Listed(part) => (part.len() / 8) as u64,
            Documents::Indexed(index) => index.documents(),
        }
    }

    /// The first token of document `document`. Documents that are empty begin where the next one does.
    pub(crate) fn document_start(&self, document: u64) -> u64 {
        match &self.documents {
            Documents::One => 0,
            Documents::Found(starts) => starts[document as usize],
            Documents::Listed(part) => number_at(&self.map[part.clone()], document),
            Documents::Indexed(index) => index.document_start(document),
        }
    }

    /// The documents whose first token lies in `range`.
    pub(crate) fn documents_in(&self, range: &Range<u64>) -> Range<u64> {
        let before = |limit| partition_point(self.documents(), |i| self.document_start(i) < limit);
        before(range.start)..before(range.end)
    }

    /// The ranges of tokens, cut to `range`, that are read and never predicted.
    pub(crate) fn contexts_in(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let part = &self.map[self.contexts.clone()];
        let contexts = (part.len() / 16) as u64;
        let first = partition_point(contexts, |i| number_at(part, 2 * i + 1) <= range.start);
        (first..contexts)
            .map(|i| number_at(part, 2 * i)..number_at(part, 2 * i + 1))
            .take_while(move |context| context.start < range.end)
            .map(move |context| context.start.max(range.start)..context.end.min(range.end))
    }

    /// How many tokens are never predicted.
    pub fn context_tokens(&self) -> u64 {
        self.contexts_in(0..self.tokens).map(|context| context.end - context.start).sum()
    }

    /// Tells the file's contents from others: the hash of all of them where this program made it, else of its length
    /// and a thousand pages.
    pub(crate) fn digest(&self) -> blake3::Hash {
        self.digest
    }

    /// Appends the ids of `range` to `out`.
    ///
    /// # Errors
    /// [`DataError::TokenOutOfRange`] for an id beyond the vocabulary, which must reach no embedding table.
    ///
    /// # Panics
    /// If the range reaches beyond the last token.
    pub fn read(&self, range: Range<u64>, out: &mut Vec<u32>) -> Result<()> {
        let bytes = &self.map[self.ids.clone()][self.id_type.byte_range(&range)];
        let decoded = self.id_type.decode(bytes, self.vocab_size, out);
        decoded.map_err(|BadId { index, value }| DataError::TokenOutOfRange {
            path: self.path.clone(),
            index: range.start + index as u64,
            value,
            vocab_size: self.vocab_size,
            id_type: self.id_type,
        })
    }

    /// Reads up to a thousand pages, evenly spread, and returns the hash of their bytes and of the file's length. A
    /// file of another width or vocabulary than was thought shows here, before the first step.
    fn sample_pages(&self) -> Result<blake3::Hash> {
        let page = SAMPLED_PAGE_BYTES / self.id_type.bytes() as u64;
        let last = self.tokens.saturating_sub(page);
        let pages = self.tokens.div_ceil(page).min(SAMPLED_PAGES);
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.id_type.name().as_bytes()).update(&self.tokens.to_le_bytes());
        let mut ids = Vec::new();
        for i in 0..pages {
            let start = if pages == 1 {
                0
            } else {
                (u128::from(last) * u128::from(i) / u128::from(pages - 1)) as u64
            };
            let range = start..self.tokens.min(start + page);
            ids.clear();
            self.read(range.clone(), &mut ids)?;
            hasher.update(&self.map[self.ids.clone()][self.id_type.byte_range(&range)]);
        }
        Ok(hasher.finalize())
    }

    /// The first token of every document, where each ends with `end_of_text`.
    fn documents_after(&self, end_of_text: u32) -> Result<Vec<u64>> {
        let after = |block: Range<u64>| -> Result<Vec<u64>> {
            let mut ids = Vec::new();
            self.read(block.clone(), &mut ids)?;
            let ends = ids.iter().enumerate().filter(|&(_, &id)| id == end_of_text);
            Ok(ends.map(|(i, _)| block.start + i as u64 + 1).collect())
        };
        let found: Vec<Vec<u64>> = self.blocks().map(after).collect::<Result<_>>()?;
        let starts = found.into_iter().flatten().filter(|&start| start < self.tokens);
        Ok(std::iter::once(0).chain(starts).collect())
    }

    /// The file in ranges of a few megabytes.
    fn blocks(&self) -> impl IndexedParallelIterator<Item = Range<u64>> {
        const BLOCK_TOKENS: u64 = 1 << 20;
        let blocks = self.tokens.div_ceil(BLOCK_TOKENS) as usize;
        let range = |i: usize| i as u64 * BLOCK_TOKENS..self.tokens.min((i as u64 + 1) * BLOCK_TOKENS);
        (0..blocks).into_par_iter().map(range)
    }

    /// What a file that this program made was made from.
    pub(crate) fn content_key(&self) -> Option<blake3::Hash> {
        let Documents::Listed(_) = self.documents else { return None };
        TokenFileHeader::parse(&self.map).ok().map(|header| header.content_key)
    }

    pub(crate) fn bad(&self, problem: TokenFileProblem) -> DataError {
        DataError::BadTokenFile { path: self.path.clone(), problem }
    }
}

/// Whether documents and contexts lie in order within `tokens` tokens.
fn check_order(documents: &[u8], contexts: &[u8], tokens: u64) -> Result<(), TokenFileProblem> {
    let mut starts = numbers(documents);
    let ascend = starts.clone().is_sorted_by(|a, b| a < b);
    let fit =
        starts.next().is_none_or(|first| first == 0) && starts.next_back().is_none_or(|last| last < tokens);
    if !(ascend && fit) {
        return Err(TokenFileProblem::Order { what: "documents" });
    }
    let mut borders = numbers(contexts);
    if !borders.clone().is_sorted() || borders.next_back().is_some_and(|end| end > tokens) {
        return Err(TokenFileProblem::Order { what: "contexts" });
    }
    Ok(())
}

fn numbers(bytes: &[u8]) -> impl DoubleEndedIterator<Item = u64> + Clone {
    bytes.as_chunks().0.iter().map(|&number| u64::from_le_bytes(number))
}

fn number_at(bytes: &[u8], index: u64) -> u64 {
    u64::from_le_bytes(bytes.as_chunks().0[index as usize])
}

/// The first of `0..count` for which `is_before` does not hold, if it holds for those before and no others.
pub(crate) fn partition_point(count: u64, is_before: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low + (high - low) / 2;
        if is_before(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}
