//! The token file: a header of 128 bytes, then ids as little-endian u16 or u32.
//!
//! It is named by the hash of what it was made from, appears under that name in one step (written aside,
//! synced, renamed), and is never changed afterwards, which is what makes it safe to map.

use std::{
    fs::{self, File},
    io::{self, Seek, SeekFrom, Write},
    ops::Range,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use lockstep_tensor::MappedFile;

use crate::error::{DataError, Result, TokenFileProblem};

/// How wide an id is in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenWidth {
    /// Two bytes: vocabularies up to 65,536.
    U16,
    /// Four bytes.
    U32,
}

impl TokenWidth {
    /// The narrowest width for ids below `vocab_size`.
    pub const fn for_vocabulary(vocab_size: u64) -> Self {
        if vocab_size <= 1 << 16 { Self::U16 } else { Self::U32 }
    }

    /// Bytes per id.
    pub const fn bytes(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    /// Appends `ids`, which all are below the vocabulary that this width was chosen for.
    pub(crate) fn encode(self, ids: &[u32], out: &mut Vec<u8>) {
        match self {
            Self::U16 => out.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes())),
            Self::U32 => out.extend(ids.iter().flat_map(|&id| id.to_le_bytes())),
        }
    }

    fn decode(self, bytes: &[u8]) -> impl Iterator<Item = u32> {
        // Both halves of the chain are exact, and one of them is empty.
        let (narrow, wide): (&[u8], &[u8]) = match self {
            Self::U16 => (bytes, &[]),
            Self::U32 => (&[], bytes),
        };
        let narrow = narrow.as_chunks().0.iter().map(|&id| u32::from(u16::from_le_bytes(id)));
        narrow.chain(wide.as_chunks().0.iter().map(|&id| u32::from_le_bytes(id)))
    }
}

/// What stands before the ids.
///
/// ```text
///   0  [u8; 8]   magic "LOCKTOKS"
///   8  u32       format version
///  12  u32       width of an id in bytes: 2 or 4
///  16  u64       number of tokens
///  24  u64       size of the vocabulary
///  32  [u8; 32]  content key: hash of tokenizer, options and source files
///  64  [u8; 32]  BLAKE3 of the ids
///  96  [u8; 32]  BLAKE3 of the 96 bytes above
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenFileHeader {
    /// The width of an id.
    pub width: TokenWidth,
    /// How many tokens follow.
    pub tokens: u64,
    /// Every id is below this.
    pub vocab_size: u64,
    /// The hash of everything the ids were made from; the file's name repeats it.
    pub content_key: blake3::Hash,
    /// The hash of the ids as they are stored.
    pub payload_hash: blake3::Hash,
}

const MAGIC: [u8; 8] = *b"LOCKTOKS";

impl TokenFileHeader {
    /// The version of the format that this program writes and reads.
    pub const VERSION: u32 = 1;
    /// The length of a header.
    pub const BYTES: usize = 128;

    /// Reads the header at the start of `bytes`, which may be anything.
    ///
    /// # Errors
    /// The first rule that it breaks. Lengths are not compared with what follows: see [`TokenFile::open`].
    pub fn parse(bytes: &[u8]) -> Result<Self, TokenFileProblem> {
        let short = TokenFileProblem::ShorterThanHeader {
            bytes: bytes.len() as u64,
            header_bytes: Self::BYTES as u64,
        };
        let header: &[u8; Self::BYTES] = bytes.first_chunk().ok_or(short)?;
        if header[..8] != MAGIC {
            return Err(TokenFileProblem::Magic);
        }
        let version = u32_at(header, 8);
        if version != Self::VERSION {
            return Err(TokenFileProblem::Version { found: version, supported: Self::VERSION });
        }
        if blake3::hash(&header[..96]) != hash_at(header, 96) {
            return Err(TokenFileProblem::HeaderChecksum);
        }
        let (width_bytes, tokens, vocab_size) = (u32_at(header, 12), u64_at(header, 16), u64_at(header, 24));
        let width = match width_bytes {
            2 => TokenWidth::U16,
            4 => TokenWidth::U32,
            _ => {
                let value = u64::from(width_bytes);
                return Err(TokenFileProblem::Field { field: "bytes per id", value });
            }
        };
        if vocab_size > i32::MAX as u64 || TokenWidth::for_vocabulary(vocab_size) != width {
            return Err(TokenFileProblem::Field { field: "vocabulary", value: vocab_size });
        }
        if tokens.checked_mul(width.bytes() as u64).is_none_or(|payload| payload > i64::MAX as u64 / 2) {
            return Err(TokenFileProblem::Field { field: "tokens", value: tokens });
        }
        Ok(Self {
            width,
            tokens,
            vocab_size,
            content_key: hash_at(header, 32),
            payload_hash: hash_at(header, 64),
        })
    }

    /// The header as it stands in the file.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&Self::VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.width.bytes() as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.tokens.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.vocab_size.to_le_bytes());
        bytes[32..64].copy_from_slice(self.content_key.as_bytes());
        bytes[64..96].copy_from_slice(self.payload_hash.as_bytes());
        let checksum = blake3::hash(&bytes[..96]);
        bytes[96..].copy_from_slice(checksum.as_bytes());
        bytes
    }

    fn file_bytes(&self) -> u64 {
        Self::BYTES as u64 + self.tokens * self.width.bytes() as u64
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

/// A token file, mapped into memory.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    header: TokenFileHeader,
    map: MappedFile,
}

impl TokenFile {
    /// Maps the token file at `path` after checking its header and its length. The ids are checked as
    /// they are [`read`](Self::read); [`verify`](Self::verify) checks them all at once.
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
        Ok(Self { path: path.to_owned(), header, map })
    }

    /// Compares the ids with their checksum: reads the whole file.
    ///
    /// # Errors
    /// [`DataError::BadTokenFile`] if a byte has changed.
    pub fn verify(&self) -> Result<()> {
        if blake3::hash(self.payload()) == self.header.payload_hash {
            return Ok(());
        }
        Err(self.bad(TokenFileProblem::PayloadChecksum))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What its header says.
    pub fn header(&self) -> &TokenFileHeader {
        &self.header
    }

    /// How many tokens it holds.
    pub fn tokens(&self) -> u64 {
        self.header.tokens
    }

    /// Appends the ids of `range` to `out`.
    ///
    /// # Errors
    /// [`DataError::BadTokenFile`] for an id beyond the vocabulary: the file was damaged after it was
    /// opened or verified, and such an id must reach no embedding table.
    ///
    /// # Panics
    /// If the range reaches beyond the last token.
    pub fn read(&self, range: Range<u64>, out: &mut Vec<u32>) -> Result<()> {
        let width = self.header.width.bytes();
        let bytes = &self.payload()[range.start as usize * width..range.end as usize * width];
        let start = out.len();
        out.extend(self.header.width.decode(bytes));
        let beyond = |&id: &u32| u64::from(id) >= self.header.vocab_size;
        match out[start..].iter().position(beyond) {
            None => Ok(()),
            Some(at) => Err(self.bad(TokenFileProblem::TokenOutOfRange {
                index: range.start + at as u64,
                id: out[start + at],
                vocab_size: self.header.vocab_size,
            })),
        }
    }

    pub(crate) fn bad(&self, problem: TokenFileProblem) -> DataError {
        DataError::BadTokenFile { path: self.path.clone(), problem }
    }

    fn payload(&self) -> &[u8] {
        &self.map[TokenFileHeader::BYTES..]
    }
}

/// Writes a token file beside its final name; [`commit`](Self::commit) makes it appear, and dropping
/// it before that leaves nothing behind.
pub(crate) struct TokenFileWriter {
    file: File,
    partial: PathBuf,
    path: PathBuf,
    header: TokenFileHeader,
    hasher: blake3::Hasher,
    committed: bool,
}

/// The end of the names of files that are being written.
const PARTIAL_SUFFIX: &str = ".partial";

/// Nothing is written for this long by a process that still lives.
const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

impl TokenFileWriter {
    /// Begins the file at `path`, whose directory exists.
    pub(crate) fn create(path: &Path, vocab_size: u64, content_key: blake3::Hash) -> Result<Self> {
        let directory = path.parent().unwrap_or(Path::new("."));
        remove_abandoned(directory);
        let (file, partial) = create_partial(path).map_err(DataError::io("create a file in", directory))?;
        let mut writer = Self {
            file,
            partial,
            path: path.to_owned(),
            header: TokenFileHeader {
                width: TokenWidth::for_vocabulary(vocab_size),
                tokens: 0,
                vocab_size,
                content_key,
                payload_hash: content_key,
            },
            hasher: blake3::Hasher::new(),
            committed: false,
        };
        // The header is known at the end; until then its place is kept by what is no header.
        let written = writer.file.write_all(&[0; TokenFileHeader::BYTES]);
        written.map_err(|e| writer.write_error(e))?;
        Ok(writer)
    }

    pub(crate) fn width(&self) -> TokenWidth {
        self.header.width
    }

    /// How many tokens have been written.
    pub(crate) fn tokens(&self) -> u64 {
        self.header.tokens
    }

    /// Appends ids that [`TokenWidth::encode`] has encoded.
    pub(crate) fn write(&mut self, encoded: &[u8]) -> Result<()> {
        self.hasher.update(encoded);
        let written = self.file.write_all(encoded);
        written.map_err(|e| self.write_error(e))?;
        self.header.tokens += (encoded.len() / self.header.width.bytes()) as u64;
        Ok(())
    }

    /// Completes the file and gives it its name.
    pub(crate) fn commit(mut self) -> Result<()> {
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
        // The file is complete under its name; only the name itself could still be lost with the power,
        // which costs no more than making the file again.
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

impl Drop for TokenFileWriter {
    fn drop(&mut self) {
        if !self.committed {
            // Nothing more can be done about a file that cannot be removed; a later run sweeps it up.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// A new file of its own for each writer: two processes that make the same token file do not meet before
/// the rename, which either may win.
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

/// Removes what processes that were killed while writing have left.
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
            width: TokenWidth::U16,
            tokens: 10,
            vocab_size: 256,
            content_key: blake3::hash(b"key"),
            payload_hash: blake3::hash(b"payload"),
        }
    }

    proptest! {
        #[test]
        fn a_header_survives_the_way_to_bytes_and_back(tokens in 0_u64..1 << 60, vocab_size in 0_u64..=i32::MAX as u64) {
            let header =
                TokenFileHeader { tokens, vocab_size, width: TokenWidth::for_vocabulary(vocab_size), ..header() };
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

        #[test]
        fn ids_survive_both_widths(ids in prop::collection::vec(0_u32..65_536, 0..50)) {
            for width in [TokenWidth::U16, TokenWidth::U32] {
                let mut bytes = Vec::new();
                width.encode(&ids, &mut bytes);
                prop_assert_eq!(width.decode(&bytes).collect::<Vec<_>>(), ids.clone());
            }
        }
    }

    #[test]
    fn impossible_values_under_a_sound_checksum_are_refused() {
        let resealed = |change: &dyn Fn(&mut [u8])| {
            let mut bytes = header().to_bytes();
            change(&mut bytes[..96]);
            let checksum = blake3::hash(&bytes[..96]);
            bytes[96..].copy_from_slice(checksum.as_bytes());
            TokenFileHeader::parse(&bytes).unwrap_err()
        };
        assert_eq!(
            resealed(&|bytes| bytes[12] = 3),
            TokenFileProblem::Field { field: "bytes per id", value: 3 }
        );
        assert_eq!(
            resealed(&|bytes| bytes[16..24].fill(0xFF)),
            TokenFileProblem::Field { field: "tokens", value: u64::MAX }
        );
        assert_eq!(
            resealed(&|bytes| bytes[24..32].copy_from_slice(&65_537_u64.to_le_bytes())),
            TokenFileProblem::Field { field: "vocabulary", value: 65_537 }
        );
    }

    #[test]
    fn a_writer_that_is_dropped_leaves_nothing_and_a_full_disk_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tokens");
        let mut writer = TokenFileWriter::create(&path, 256, blake3::hash(b"")).unwrap();
        writer.write(&[1, 0, 2, 0]).unwrap();
        let error = writer.write_error(io::Error::from(io::ErrorKind::StorageFull));
        assert!(matches!(error, DataError::DiskFull { written_bytes: 132, .. }), "{error:?}");
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
