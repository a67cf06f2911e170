//! Index of a Megatron indexed data set: the boundaries of sequences in the `.bin`, and of documents.
//!
//! ```text
//!  0  [u8; 9]  magic "MMIDIDX\0\0"
//!  9  u64      version 1
//! 17  u8       type of the ids: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
//! 18  u64      number of sequences S
//! 26  u64      number of document borders D, one more than documents
//! 34  i32[S]   tokens of each sequence
//!     i64[S]   byte offset of each sequence in the .bin: the lengths before it, summed
//!     i64[D]   document borders as numbers of sequences, the first 0
//!     i8[S]    modes, in data sets of several modalities only
//! ```
//!
//! Megatron trusts the file. Here every number is checked once, when the file is opened, so that later reads need no
//! checks.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

use lockstep_tensor::MappedFile;

use crate::{
    error::{DataError, IndexProblem, Result},
    id_type::IdType,
};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const VERSION: u64 = 1;
const HEADER_BYTES: usize = 34;

/// Id types by type code, from 1. The two codes of floating-point types are invalid for ids.
const ID_TYPES: [Option<IdType>; 8] = [
    Some(IdType::U8),
    Some(IdType::I8),
    Some(IdType::I16),
    Some(IdType::I32),
    Some(IdType::I64),
    None,
    None,
    Some(IdType::U16),
];

/// Header fields of a valid index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexHeader {
    /// Type of the ids in the `.bin`.
    pub id_type: IdType,
    /// Number of sequences.
    pub sequences: usize,
    /// Number of document borders, at least one.
    pub borders: usize,
}

impl IndexHeader {
    /// Parses and checks a whole index against the length of its `.bin`. `bytes` may hold anything. Allocates nothing
    /// but the message of an error.
    ///
    /// # Errors
    /// If the index breaks a rule of the format; the first such rule is returned.
    pub fn parse(bytes: &[u8], bin_bytes: u64) -> Result<Self, IndexProblem> {
        let broken = |rule: String| Err(IndexProblem(rule));
        if bytes.len() < HEADER_BYTES {
            return broken(format!("it has {} bytes, fewer than its header of {HEADER_BYTES}", bytes.len()));
        }
        if !bytes.starts_with(MAGIC) {
            return broken("it does not start with MMIDIDX".to_owned());
        }
        let version = number_at(&bytes[9..], 0);
        if version != VERSION {
            return broken(format!("its version is {version}; version {VERSION} is read"));
        }
        let code = bytes[17];
        let Some(id_type) = usize::from(code).checked_sub(1).and_then(|i| *ID_TYPES.get(i)?) else {
            let allowed = "1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16";
            return broken(format!("its type code is {code}; allowed: {allowed}"));
        };
        let (sequences, borders) = (number_at(&bytes[18..], 0), number_at(&bytes[26..], 0));

        // Counts cannot overflow 128 bits. Once the length of the file matches, all counts are bounded by it.
        let without_modes = HEADER_BYTES as u128 + 12 * u128::from(sequences) + 8 * u128::from(borders);
        let lengths = [without_modes, without_modes + u128::from(sequences)];
        if !lengths.contains(&(bytes.len() as u128)) {
            return broken(format!(
                "it has {} bytes, which does not fit its {sequences} sequences and {borders} document borders",
                bytes.len()
            ));
        }
        let header = Self { id_type, sequences: sequences as usize, borders: borders as usize };
        header
            .check_sequences(bytes, bin_bytes)
            .and_then(|()| header.check_borders(bytes))
            .map_err(IndexProblem)?;
        Ok(header)
    }

    fn check_sequences(&self, bytes: &[u8], bin_bytes: u64) -> Result<(), String> {
        let lengths = bytes[HEADER_BYTES..self.offsets_at()].as_chunks::<4>().0;
        let offsets = bytes[self.offsets_at()..self.borders_at()].as_chunks::<8>().0;
        let mut expected = 0_u64;
        for (sequence, (&length, &offset)) in lengths.iter().zip(offsets).enumerate() {
            let (length, offset) = (i32::from_le_bytes(length), i64::from_le_bytes(offset));
            let Ok(tokens) = u64::try_from(length) else {
                return Err(format!("sequence {sequence} has {length} tokens"));
            };
            if u64::try_from(offset) != Ok(expected) {
                return Err(format!(
                    "sequence {sequence} begins at byte {offset}; by the lengths before it that is byte {expected}"
                ));
            }
            expected += tokens * self.id_type.bytes() as u64;
            if expected > bin_bytes {
                break;
            }
        }
        if expected == bin_bytes {
            return Ok(());
        }
        // The count stops at the first sequence beyond the end.
        Err(format!("its sequences ask for {expected} bytes or more of tokens; the .bin has {bin_bytes}"))
    }

    fn check_borders(&self, bytes: &[u8]) -> Result<(), String> {
        let (borders, sequences) = (&bytes[self.borders_at()..][..8 * self.borders], self.sequences);
        let mut previous = 0;
        for (index, &border) in borders.as_chunks::<8>().0.iter().enumerate() {
            let border = i64::from_le_bytes(border);
            let fits = u64::try_from(border)
                .is_ok_and(|b| b >= previous && b <= sequences as u64 && (index > 0 || b == 0));
            if !fits {
                return Err(format!(
                    "document border {index} is at sequence {border}; allowed: from 0 in ascending order to {sequences}"
                ));
            }
            previous = border as u64;
        }
        // A builder that never ended a document leaves only the first border.
        if self.borders == 0 || (self.borders > 1 && previous != sequences as u64) {
            return Err(format!("its last document ends at sequence {previous} of {sequences}"));
        }
        Ok(())
    }

    fn offsets_at(&self) -> usize {
        HEADER_BYTES + 4 * self.sequences
    }

    fn borders_at(&self) -> usize {
        self.offsets_at() + 8 * self.sequences
    }
}

/// Checked index, memory-mapped.
#[derive(Debug)]
pub(crate) struct Index {
    map: MappedFile,
    header: IndexHeader,
}

impl Index {
    /// Maps and checks the index at `path` of a `.bin` of `bin_bytes`.
    pub(crate) fn open(path: &Path, bin_bytes: u64) -> Result<Self> {
        let map = MappedFile::open(path).map_err(DataError::io("open the index", path))?;
        let header = IndexHeader::parse(&map, bin_bytes)
            .map_err(|problem| DataError::BadIndex { path: path.to_owned(), problem })?;
        Ok(Self { map, header })
    }

    pub(crate) fn header(&self) -> &IndexHeader {
        &self.header
    }

    /// Returns the number of documents; an index with only the first border is one document.
    pub(crate) fn documents(&self) -> u64 {
        (self.header.borders as u64 - 1).max(1)
    }

    /// Returns the first token of document `document`. For an empty last document this is the position after the last
    /// token.
    pub(crate) fn document_start(&self, document: u64) -> u64 {
        let sequence = number_at(&self.map[self.header.borders_at()..], document as usize) as usize;
        if sequence == 0 {
            return 0;
        }
        let offsets = &self.map[self.header.offsets_at()..];
        let id_bytes = self.header.id_type.bytes() as u64;
        if sequence < self.header.sequences {
            return number_at(offsets, sequence) / id_bytes;
        }
        let last = i32::from_le_bytes(self.map[HEADER_BYTES..].as_chunks().0[sequence - 1]);
        number_at(offsets, sequence - 1) / id_bytes + last as u64
    }
}

/// Returns number `index` of the eight-byte numbers in `bytes`.
fn number_at(bytes: &[u8], index: usize) -> u64 {
    u64::from_le_bytes(bytes.as_chunks().0[index])
}

/// Returns the type in which Megatron stores the ids of a vocabulary.
pub(crate) fn id_type_for(vocab_size: u64) -> IdType {
    if vocab_size < 65_500 { IdType::U16 } else { IdType::I32 }
}

/// Writes an index with one sequence of the given length per document.
pub(crate) fn write_index(out: &mut impl Write, id_type: IdType, lengths: &[u32]) -> io::Result<()> {
    let code = ID_TYPES.iter().position(|&known| known == Some(id_type)).map_or(0, |i| i as u8 + 1);
    out.write_all(MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())?;
    out.write_all(&[code])?;
    out.write_all(&(lengths.len() as u64).to_le_bytes())?;
    out.write_all(&(lengths.len() as u64 + 1).to_le_bytes())?;
    for length in lengths {
        out.write_all(&length.to_le_bytes())?;
    }
    let mut offset = 0_u64;
    for &length in lengths {
        out.write_all(&offset.to_le_bytes())?;
        offset += u64::from(length) * id_type.bytes() as u64;
    }
    for border in 0..=lengths.len() as u64 {
        out.write_all(&border.to_le_bytes())?;
    }
    Ok(())
}

/// Returns the `.bin` and the `.idx` that `path` names, if both exist. `path` is either of them, or their common path
/// without extension, as in Megatron's `--data-path`.
pub(crate) fn pair_of(path: &Path) -> Option<(PathBuf, PathBuf)> {
    let is_member = path.extension().is_some_and(|extension| extension == "bin" || extension == "idx");
    let stem = if is_member { path.with_extension("") } else { path.to_owned() };
    let with = |extension: &str| {
        let mut name = stem.clone().into_os_string();
        name.push(extension);
        PathBuf::from(name)
    };
    let (bin, index) = (with(".bin"), with(".idx"));
    (bin.is_file() && index.is_file()).then_some((bin, index))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn index_of(lengths: &[u32], id_type: IdType) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_index(&mut bytes, id_type, lengths).unwrap();
        bytes
    }

    #[test]
    fn an_index_that_was_written_is_read() {
        let bytes = index_of(&[3, 0, 4], IdType::U16);
        let header = IndexHeader::parse(&bytes, 14).unwrap();
        assert_eq!(header, IndexHeader { id_type: IdType::U16, sequences: 3, borders: 4 });
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        let index = Index::open(file.path(), 14).unwrap();
        assert_eq!(index.documents(), 3);
        assert_eq!((0..3).map(|i| index.document_start(i)).collect::<Vec<_>>(), [0, 3, 3]);
    }

    #[test]
    fn modes_are_passed_over_and_borders_may_be_missing() {
        let mut bytes = index_of(&[3, 4], IdType::I32);
        bytes.extend([0, 0]);
        assert_eq!(IndexHeader::parse(&bytes, 28).unwrap().sequences, 2);
        let mut bytes = index_of(&[3, 4], IdType::I32);
        bytes.truncate(bytes.len() - 16);
        bytes[26] = 1;
        assert_eq!(IndexHeader::parse(&bytes, 28).unwrap().borders, 1);
    }

    #[test]
    fn each_rule_is_checked() {
        let sound = index_of(&[3, 4], IdType::U16);
        let broken = |at: usize, value: u8| {
            let mut bytes = sound.clone();
            bytes[at] = value;
            IndexHeader::parse(&bytes, 14).unwrap_err()
        };
        let short = IndexHeader::parse(&sound[..33], 14).unwrap_err();
        assert_eq!(short.to_string(), "it has 33 bytes, fewer than its header of 34");
        for (at, value, expected) in [
            (0, b'X', "it does not start with MMIDIDX"),
            (9, 2, "its version is 2; version 1 is read"),
            (18, 3, "it has 82 bytes, which does not fit its 3 sequences and 3 document borders"),
            (25, 0xFF, "82 bytes, which does not fit its 18374686479671623682 sequences and 3 document"),
            (33, 0xFF, "its 2 sequences and 18374686479671623683 document borders"),
            (37, 0x80, "sequence 0 has -2147483645 tokens"),
            (34, 2, "sequence 1 begins at byte 6; by the lengths before it that is byte 4"),
            (42, 1, "sequence 0 begins at byte 1; by the lengths before it that is byte 0"),
            (38, 5, "its sequences ask for 16 bytes or more of tokens; the .bin has 14"),
            (58, 1, "document border 0 is at sequence 1; allowed: from 0 in ascending order to 2"),
            (74, 3, "document border 2 is at sequence 3"),
            (74, 1, "its last document ends at sequence 1 of 2"),
        ] {
            let problem = broken(at, value).to_string();
            assert!(problem.contains(expected), "byte {at} = {value}: {problem}");
        }
        for code in [0, 6, 7, 9, 255] {
            let problem = broken(17, code).to_string();
            assert!(problem.starts_with(&format!("its type code is {code}; allowed: 1 u8")), "{problem}");
        }
        let mut none = index_of(&[], IdType::U16);
        assert!(IndexHeader::parse(&none, 0).is_ok());
        none.truncate(HEADER_BYTES);
        none[26] = 0;
        let problem = IndexHeader::parse(&none, 0).unwrap_err().to_string();
        assert_eq!(problem, "its last document ends at sequence 0 of 0");
    }

    proptest! {
        #[test]
        fn any_changed_byte_gives_an_index_that_can_be_used_or_an_error(
            lengths in prop::collection::vec(0_u32..9, 0..6), at: prop::sample::Index, value: u8
        ) {
            let mut bytes = index_of(&lengths, IdType::U16);
            *at.get_mut(&mut bytes) = value;
            let bin_bytes = 2 * lengths.iter().sum::<u32>();
            if let Ok(header) = IndexHeader::parse(&bytes, bin_bytes.into()) {
                prop_assert!(header.sequences == lengths.len());
            }
        }
    }
}
