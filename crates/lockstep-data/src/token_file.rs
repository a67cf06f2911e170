//! Memory-mapped files of token ids: token cache files, raw files and Megatron indexed data sets.
//!
//! All formats provide a sequence of ids, document starts, and ranges with masked labels. Ids are checked against the
//! vocabulary at every read.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    str::FromStr,
};

use lockstep_tensor::MappedFile;
use rayon::prelude::*;

use crate::{
    error::{DataError, Result, TokenFileProblem},
    id_type::{BadId, IdType},
    indexed::Index,
    token_cache::TokenFileHeader,
};

/// Memory-mapped file of token ids.
///
/// If the file is truncated while it is mapped, reading kills the process. Files in the cache are never modified.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    map: MappedFile,
    /// Byte range of the ids in the map.
    ids: Range<usize>,
    id_type: IdType,
    vocab_size: u64,
    tokens: u64,
    documents: Documents,
    /// Byte range of the contexts in the map.
    contexts: Range<usize>,
    digest: blake3::Hash,
}

/// Source of the document boundaries.
#[derive(Debug)]
enum Documents {
    /// The whole file is one document.
    One,
    /// First token of each document, found by searching for end-of-text tokens.
    Found(Vec<u64>),
    /// Byte range in the map that lists the first tokens of documents.
    Listed(Range<usize>),
    /// Index of a Megatron data set.
    Indexed(Index),
}

/// Parses the name of a type in which raw token files may be stored.
impl FromStr for IdType {
    type Err = DataError;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "u16" => Ok(Self::U16),
            "u32" => Ok(Self::U32),
            _ => Err(DataError::UnknownIdType { name: name.to_owned() }),
        }
    }
}

/// Size and maximum number of the pages that are sampled to check a file and to identify its contents.
const SAMPLED_PAGE_BYTES: u64 = 4096;
const SAMPLED_PAGES: u64 = 1024;

impl TokenFile {
    /// Maps a token cache file. Checks the header, the length, and the order of documents and of contexts (ranges
    /// without labels, such as prompts).
    /// [`verify`](Self::verify) checks the contents.
    ///
    /// # Errors
    /// If the file cannot be opened, or breaks a rule of the format.
    pub fn open(path: &Path) -> Result<Self> {
        let bad = |problem| DataError::BadTokenFile { path: path.to_owned(), problem };
        let map = MappedFile::open(path).map_err(DataError::io("open token file", path))?;
        let header = TokenFileHeader::parse(&map).map_err(bad)?;
        if map.len() as u64 != header.file_bytes() {
            let (found, expected) = (map.len(), header.file_bytes());
            let problem = format!("it has {found} bytes where its header asks for {expected}");
            return Err(bad(TokenFileProblem(problem)));
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

    /// Maps a raw file of ids without a header, as nanoGPT writes them. With `end_of_text`, the whole file is searched
    /// for that id, and each one ends a document. Otherwise the file is one document.
    ///
    /// # Errors
    /// If the file cannot be opened, is empty or not a whole number of ids, or an id in its sampled pages (at most
    /// 1,024) is beyond the vocabulary.
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

    /// Maps the `.bin` and the `.idx` of a Megatron indexed data set; `path` is either of them.
    ///
    /// # Errors
    /// If a file cannot be opened, the index breaks a rule of the format or does not match the `.bin`, there are no
    /// tokens, or an id in the sampled pages (at most 1,024) is beyond the vocabulary.
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

    /// Checks the whole file: a token cache file against its checksum, every id of any other file against the
    /// vocabulary.
    ///
    /// # Errors
    /// If the checksum of a cache file does not match, or an id of another file is beyond the vocabulary.
    pub fn verify(&self) -> Result<()> {
        if let Documents::Listed(_) = self.documents {
            if blake3::hash(&self.map[TokenFileHeader::BYTES..]) == self.digest {
                return Ok(());
            }
            return Err(self.bad("the checksum of its tokens does not match"));
        }
        self.blocks().try_for_each(|block| self.read(block, &mut Vec::new()))
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the type in which ids are stored.
    pub fn id_type(&self) -> IdType {
        self.id_type
    }

    /// Returns the number of tokens in the file.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the number of documents in the file.
    pub fn documents(&self) -> u64 {
        match &self.documents {
            Documents::One => 1,
            Documents::Found(starts) => starts.len() as u64,
            Documents::Listed(part) => (part.len() / 8) as u64,
            Documents::Indexed(index) => index.documents(),
        }
    }

    /// Returns the first token of document `document`. An empty document has the same start as the next one.
    pub(crate) fn document_start(&self, document: u64) -> u64 {
        match &self.documents {
            Documents::One => 0,
            Documents::Found(starts) => starts[document as usize],
            Documents::Listed(part) => number_at(&self.map[part.clone()], document),
            Documents::Indexed(index) => index.document_start(document),
        }
    }

    /// Returns the documents whose first token lies in `range`.
    pub(crate) fn documents_in(&self, range: &Range<u64>) -> Range<u64> {
        let before = |limit| partition_point(self.documents(), |i| self.document_start(i) < limit);
        before(range.start)..before(range.end)
    }

    /// Returns the token ranges with masked labels, clipped to `range`.
    pub(crate) fn contexts_in(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let part = &self.map[self.contexts.clone()];
        let contexts = (part.len() / 16) as u64;
        let first = partition_point(contexts, |i| number_at(part, 2 * i + 1) <= range.start);
        (first..contexts)
            .map(|i| number_at(part, 2 * i)..number_at(part, 2 * i + 1))
            .take_while(move |context| context.start < range.end)
            .map(move |context| context.start.max(range.start)..context.end.min(range.end))
    }

    /// Returns the number of tokens whose labels are masked.
    pub fn context_tokens(&self) -> u64 {
        self.contexts_in(0..self.tokens).map(|context| context.end - context.start).sum()
    }

    /// Returns a hash that identifies the contents: of all contents for a token cache file, of the length and the
    /// sampled pages otherwise.
    pub(crate) fn digest(&self) -> blake3::Hash {
        self.digest
    }

    /// Appends the ids of `range` to `out`.
    ///
    /// # Errors
    /// If an id is beyond the vocabulary: it must not reach the embedding table.
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

    /// Reads up to 1,024 evenly spaced pages, and returns the hash of their bytes and of the file's length. So a wrong
    /// id type or vocabulary shows before the first step.
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

    /// Returns the first token of every document, each of which ends with `end_of_text`.
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

    /// Splits the file into ranges of about a million tokens.
    fn blocks(&self) -> impl IndexedParallelIterator<Item = Range<u64>> {
        const BLOCK_TOKENS: u64 = 1 << 20;
        let blocks = self.tokens.div_ceil(BLOCK_TOKENS) as usize;
        let range = |i: usize| i as u64 * BLOCK_TOKENS..self.tokens.min((i as u64 + 1) * BLOCK_TOKENS);
        (0..blocks).into_par_iter().map(range)
    }

    /// Returns the hash of the inputs that a token cache file was made from; `None` for other files.
    pub(crate) fn content_key(&self) -> Option<blake3::Hash> {
        let Documents::Listed(_) = self.documents else { return None };
        TokenFileHeader::parse(&self.map).ok().map(|header| header.content_key)
    }

    /// Returns the error of a file that breaks a rule of the format.
    pub(crate) fn bad(&self, rule: &str) -> DataError {
        DataError::BadTokenFile { path: self.path.clone(), problem: TokenFileProblem(rule.to_owned()) }
    }
}

/// Checks that documents and contexts are in order and lie within `tokens` tokens.
fn check_order(documents: &[u8], contexts: &[u8], tokens: u64) -> Result<(), TokenFileProblem> {
    let disorder =
        |what: &str| Err(TokenFileProblem(format!("its {what} do not lie in order within its tokens")));
    let mut starts = numbers(documents);
    let ascend = starts.clone().is_sorted_by(|a, b| a < b);
    let fit =
        starts.next().is_none_or(|first| first == 0) && starts.next_back().is_none_or(|last| last < tokens);
    if !(ascend && fit) {
        return disorder("documents");
    }
    let mut borders = numbers(contexts);
    if !borders.clone().is_sorted() || borders.next_back().is_some_and(|end| end > tokens) {
        return disorder("contexts");
    }
    Ok(())
}

fn numbers(bytes: &[u8]) -> impl DoubleEndedIterator<Item = u64> + Clone {
    bytes.as_chunks().0.iter().map(|&number| u64::from_le_bytes(number))
}

fn number_at(bytes: &[u8], index: u64) -> u64 {
    u64::from_le_bytes(bytes.as_chunks().0[index as usize])
}

/// Returns the first number in `0..count` for which `is_before` is false. `is_before` must be true below some number
/// and false from there on.
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
