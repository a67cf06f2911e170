//! Cache file of tokenized text: a header, the ids, and the positions of documents and prompts.
//!
//! The file name is the hash of all inputs. The file appears under that name atomically (written beside it, synced,
//! renamed) and is never modified afterwards, which makes it safe to memory-map.

use std::{
    fs::{self, File},
    io::{self, Seek, SeekFrom, Write},
    ops::Range,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use crate::{
    encoder::TokenSink,
    error::{DataError, Result, TokenFileProblem},
    id_type::IdType,
};

/// Header of a token cache file.
///
/// ```text
///   0  [u8; 8]   magic "LOCKTOKS"
///   8  u32       format version
///  12  u32       width of an id in bytes: 2 or 4
///  16  u64       number of tokens T
///  24  u64       size of the vocabulary
///  32  u64       number of documents D
///  40  u64       number of contexts C: ranges of tokens that are read and never predicted, such as prompts
///  48  [u8; 32]  content key: hash of tokenizer, options and source files
///  80  [u8; 32]  BLAKE3 of all that follows the header
/// 112  [u8; 32]  BLAKE3 of the 112 bytes above
/// ```
///
/// After the header: T ids; the index of the first token of each of the D documents (u64, ascending, the first 0); and
/// for each of the C contexts the index of its first token and of the token after its last one (u64, ascending).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenFileHeader {
    /// Type of the ids: `u16` or `u32`.
    pub id_type: IdType,
    /// Number of tokens in the file.
    pub tokens: u64,
    /// Vocabulary size: every id is below it.
    pub vocab_size: u64,
    /// Number of documents in the file.
    pub documents: u64,
    /// Number of contexts: ranges of tokens whose labels are masked.
    pub contexts: u64,
    /// Hash of all inputs that determine the ids; the file name repeats it.
    pub content_key: blake3::Hash,
    /// Hash of the bytes after the header.
    pub payload_hash: blake3::Hash,
}

const MAGIC: [u8; 8] = *b"LOCKTOKS";

/// Offset of the header's own checksum.
const CHECKSUM_AT: usize = 112;

impl TokenFileHeader {
    /// Format version that this program writes and reads.
    pub const VERSION: u32 = 2;
    /// Length of the header in bytes.
    pub const BYTES: usize = CHECKSUM_AT + 32;

    /// Parses the header at the start of `bytes`, which may hold anything.
    ///
    /// # Errors
    /// If the header breaks a rule of the format; the first such rule is returned. The length of the file is not
    /// checked.
    pub fn parse(bytes: &[u8]) -> Result<Self, TokenFileProblem> {
        let broken = |rule: String| Err(TokenFileProblem(rule));
        let Some(header) = bytes.first_chunk::<{ Self::BYTES }>() else {
            return broken(format!("it has {} bytes, fewer than its header of {}", bytes.len(), Self::BYTES));
        };
        if header[..8] != MAGIC {
            return broken("it does not start with the magic bytes of a token file".to_owned());
        }
        let version = u32_at(header, 8);
        if version != Self::VERSION {
            let reads = Self::VERSION;
            return broken(format!("its format version is {version}; this program reads version {reads}"));
        }
        if blake3::hash(&header[..CHECKSUM_AT]) != hash_at(header, CHECKSUM_AT) {
            return broken("the checksum of its header does not match".to_owned());
        }
        // The checksum matches: another program wrote the file.
        let field =
            |field, value: u64| broken(format!("its header says {field} = {value}, which is impossible"));
        let (width_bytes, tokens, vocab_size) = (u32_at(header, 12), u64_at(header, 16), u64_at(header, 24));
        let (documents, contexts) = (u64_at(header, 32), u64_at(header, 40));
        let id_type = match width_bytes {
            2 => IdType::U16,
            4 => IdType::U32,
            _ => return field("bytes per id", u64::from(width_bytes)),
        };
        if vocab_size > i32::MAX as u64 || IdType::for_vocabulary(vocab_size) != id_type {
            return field("vocabulary", vocab_size);
        }
        // Larger than any disk, and small enough that sums of lengths cannot overflow.
        if tokens > 1 << 56 {
            return field("tokens", tokens);
        }
        if documents > tokens || (documents == 0) != (tokens == 0) {
            return field("documents", documents);
        }
        if contexts > tokens {
            return field("contexts", contexts);
        }
        Ok(Self {
            id_type,
            tokens,
            vocab_size,
            documents,
            contexts,
            content_key: hash_at(header, 48),
            payload_hash: hash_at(header, 80),
        })
    }

    /// Encodes the header as it is stored in the file.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&Self::VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.id_type.bytes() as u32).to_le_bytes());
        for (at, value) in
            [(16, self.tokens), (24, self.vocab_size), (32, self.documents), (40, self.contexts)]
        {
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        bytes[48..80].copy_from_slice(self.content_key.as_bytes());
        bytes[80..CHECKSUM_AT].copy_from_slice(self.payload_hash.as_bytes());
        let checksum = blake3::hash(&bytes[..CHECKSUM_AT]);
        bytes[CHECKSUM_AT..].copy_from_slice(checksum.as_bytes());
        bytes
    }

    /// Returns the byte ranges of the ids, the document starts and the contexts in the file; they are adjacent.
    pub(crate) fn sections(&self) -> [Range<usize>; 3] {
        let ids = Self::BYTES..Self::BYTES + self.tokens as usize * self.id_type.bytes();
        let documents = ids.end..ids.end + 8 * self.documents as usize;
        let contexts = documents.end..documents.end + 16 * self.contexts as usize;
        [ids, documents, contexts]
    }

    pub(crate) fn file_bytes(&self) -> u64 {
        self.sections()[2].end as u64
    }
}

fn array_at<const N: usize>(header: &[u8; TokenFileHeader::BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|i| header[at + i])
}

fn u32_at(header: &[u8; TokenFileHeader::BYTES], at: usize) -> u32 {
    u32::from_le_bytes(array_at(header, at))
}

fn u64_at(header: &[u8; TokenFileHeader::BYTES], at: usize) -> u64 {
    u64::from_le_bytes(array_at(header, at))
}

fn hash_at(header: &[u8; TokenFileHeader::BYTES], at: usize) -> blake3::Hash {
    blake3::Hash::from_bytes(array_at(header, at))
}

/// Writer of a token file under a temporary name. [`commit`](Self::commit) renames it to its final name; dropping it
/// before that removes the file.
pub(crate) struct TokenFileWriter {
    file: File,
    partial: PathBuf,
    path: PathBuf,
    header: TokenFileHeader,
    hasher: blake3::Hasher,
    documents: Vec<u8>,
    contexts: Vec<u8>,
    committed: bool,
}

/// Suffix of the names of unfinished files.
const PARTIAL_SUFFIX: &str = ".partial";

/// Age after which an unfinished file counts as left by a killed process.
const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

impl TokenFileWriter {
    /// Creates the temporary file for `path`, whose directory must exist.
    pub(crate) fn create(path: &Path, vocab_size: u64, content_key: blake3::Hash) -> Result<Self> {
        let directory = path.parent().unwrap_or(Path::new("."));
        remove_abandoned(directory);
        let (file, partial) = create_partial(path).map_err(DataError::io("create a file in", directory))?;
        let mut writer = Self {
            file,
            partial,
            path: path.to_owned(),
            header: TokenFileHeader {
                id_type: IdType::for_vocabulary(vocab_size),
                tokens: 0,
                vocab_size,
                documents: 0,
                contexts: 0,
                content_key,
                payload_hash: content_key,
            },
            hasher: blake3::Hasher::new(),
            documents: Vec::new(),
            contexts: Vec::new(),
            committed: false,
        };
        // The header is written last; until then zero bytes, which are no valid header, reserve its place.
        let written = writer.file.write_all(&[0; TokenFileHeader::BYTES]);
        written.map_err(|e| writer.write_error(e))?;
        Ok(writer)
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        self.file.write_all(bytes).map_err(|e| self.write_error(e))
    }

    /// Completes the file and renames it to its final name.
    pub(crate) fn commit(mut self) -> Result<()> {
        let (documents, contexts) = (std::mem::take(&mut self.documents), std::mem::take(&mut self.contexts));
        self.append(&documents)?;
        self.append(&contexts)?;
        self.header.payload_hash = self.hasher.finalize();
        let header = self.header.to_bytes();
        let written = self
            .file
            .seek(SeekFrom::Start(0))
            .and_then(|_| self.file.write_all(&header))
            .and_then(|()| self.file.sync_all())
            .and_then(|()| fs::rename(&self.partial, &self.path));
        written.map_err(|e| self.write_error(e))?;
        self.committed = true;
        // The file is complete under its name. A power loss could still lose the name, and then the file is only made
        // again.
        if let Some(directory) = self.path.parent().and_then(|path| File::open(path).ok()) {
            let _ = directory.sync_all();
        }
        Ok(())
    }

    fn write_error(&self, source: io::Error) -> DataError {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                DataError::DiskFull { path: self.path.clone(), written_bytes: self.header.file_bytes() }
            }
            _ => DataError::Io { action: "write", path: self.partial.clone(), source },
        }
    }
}

impl TokenSink for TokenFileWriter {
    fn id_type(&self) -> IdType {
        self.header.id_type
    }

    fn tokens(&self) -> u64 {
        self.header.tokens
    }

    fn begin_document(&mut self) -> Result<()> {
        self.documents.extend(self.header.tokens.to_le_bytes());
        self.header.documents += 1;
        Ok(())
    }

    fn write(&mut self, ids: &[u8], contexts: &[Range<u64>]) -> Result<()> {
        for context in contexts {
            self.contexts.extend((self.header.tokens + context.start).to_le_bytes());
            self.contexts.extend((self.header.tokens + context.end).to_le_bytes());
        }
        self.header.contexts += contexts.len() as u64;
        self.append(ids)?;
        self.header.tokens += (ids.len() / self.header.id_type.bytes()) as u64;
        Ok(())
    }
}

impl Drop for TokenFileWriter {
    fn drop(&mut self) {
        if !self.committed {
            // A file that cannot be removed is left to the clean-up of a later run.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// Creates a temporary file with a unique name. Two processes that make the same token file only meet at the rename,
/// which either may win.
fn create_partial(path: &Path) -> io::Result<(File, PathBuf)> {
    let mut attempt = 0_u32;
    loop {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}-{attempt}{PARTIAL_SUFFIX}", std::process::id()));
        let partial = path.with_file_name(name);
        match File::options().write(true).create_new(true).open(&partial) {
            Ok(file) => return Ok((file, partial)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => attempt += 1,
            Err(error) => return Err(error),
        }
    }
}

/// Removes unfinished files of processes that were killed while writing.
fn remove_abandoned(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let is_partial = entry.file_name().to_string_lossy().ends_with(PARTIAL_SUFFIX);
        let age = entry.metadata().and_then(|m| m.modified()).map(|at| SystemTime::now().duration_since(at));
        if is_partial && matches!(age, Ok(Ok(age)) if age > ABANDONED_AFTER) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> TokenFileHeader {
        TokenFileHeader {
            id_type: IdType::U16,
            tokens: 10,
            vocab_size: 256,
            documents: 2,
            contexts: 1,
            content_key: blake3::hash(b"key"),
            payload_hash: blake3::hash(b"payload"),
        }
    }

    proptest! {
        #[test]
        fn a_header_survives_the_way_to_bytes_and_back(
            tokens in 2_u64..1 << 56, vocab_size in 0_u64..=i32::MAX as u64
        ) {
            let id_type = IdType::for_vocabulary(vocab_size);
            let header = TokenFileHeader { tokens, vocab_size, id_type, ..header() };
            prop_assert_eq!(TokenFileHeader::parse(&header.to_bytes()), Ok(header));
        }

        #[test]
        fn any_flipped_bit_of_a_header_is_found(byte in 0..TokenFileHeader::BYTES, bit in 0..8) {
            let mut bytes = header().to_bytes();
            bytes[byte] ^= 1_u8 << bit;
            prop_assert!(TokenFileHeader::parse(&bytes).is_err());
        }

        #[test]
        fn any_bytes_are_parsed_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(TokenFileHeader::parse(&bytes).is_err());
        }
    }

    #[test]
    fn impossible_values_under_a_sound_checksum_are_refused() {
        let resealed = |change: &dyn Fn(&mut [u8])| {
            let mut bytes = header().to_bytes();
            change(&mut bytes[..CHECKSUM_AT]);
            let checksum = blake3::hash(&bytes[..CHECKSUM_AT]);
            bytes[CHECKSUM_AT..].copy_from_slice(checksum.as_bytes());
            TokenFileHeader::parse(&bytes).unwrap_err()
        };
        let says = |change: &dyn Fn(&mut [u8]), field: &str, value: u64| {
            let expected = format!("its header says {field} = {value}, which is impossible");
            assert_eq!(resealed(change).to_string(), expected);
        };
        says(&|bytes| bytes[12] = 3, "bytes per id", 3);
        says(&|bytes| bytes[16..24].fill(0xFF), "tokens", u64::MAX);
        says(&|bytes| bytes[24..32].copy_from_slice(&65_537_u64.to_le_bytes()), "vocabulary", 65_537);
        for (at, field) in [(32, "documents"), (40, "contexts")] {
            says(&|bytes| bytes[at] = 11, field, 11);
        }
        says(&|bytes| bytes[32] = 0, "documents", 0);
    }

    #[test]
    fn a_writer_that_is_dropped_leaves_nothing_and_a_full_disk_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tokens");
        let mut writer = TokenFileWriter::create(&path, 256, blake3::hash(b"")).unwrap();
        writer.write(&[1, 0, 2, 0], &[]).unwrap();
        let error = writer.write_error(io::Error::from(io::ErrorKind::StorageFull));
        assert!(matches!(error, DataError::DiskFull { written_bytes: 148, .. }), "{error:?}");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
        drop(writer);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    }

    #[test]
    fn only_old_partial_files_are_swept_up() {
        let dir = tempfile::tempdir().unwrap();
        for (name, days) in [("old.partial", 2), ("new.partial", 0), ("old.tokens", 2)] {
            let file = File::create(dir.path().join(name)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(days * 24 * 60 * 60)).unwrap();
        }
        remove_abandoned(dir.path());
        let mut left: Vec<_> = fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["new.partial", "old.tokens"]);
    }
}
