//! Storage types of token ids: little-endian integers of one to eight bytes.

use std::{fmt, ops::Range};

/// Integer type of the ids in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdType {
    /// Unsigned, one byte.
    U8,
    /// Signed, one byte.
    I8,
    /// Signed, two bytes.
    I16,
    /// Unsigned, two bytes: vocabularies up to 65,536.
    U16,
    /// Signed, four bytes.
    I32,
    /// Unsigned, four bytes.
    U32,
    /// Signed, eight bytes.
    I64,
}

/// Token id that is beyond the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadId {
    /// Index of the id among those that were decoded.
    pub(crate) index: usize,
    pub(crate) value: i64,
}

impl IdType {
    /// Returns the narrowest type in which this program writes ids below `vocab_size`.
    pub const fn for_vocabulary(vocab_size: u64) -> Self {
        if vocab_size <= 1 << 16 { Self::U16 } else { Self::U32 }
    }

    /// Returns the number of bytes per id.
    pub const fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 | Self::U32 => 4,
            Self::I64 => 8,
        }
    }

    /// Returns the name of the type in the configuration and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::U16 => "u16",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I64 => "i64",
        }
    }

    /// Appends `ids` in this type to `out`. All of them must fit.
    pub(crate) fn encode(self, ids: &[u32], out: &mut Vec<u8>) {
        match self.bytes() {
            1 => out.extend(ids.iter().map(|&id| id as u8)),
            2 => out.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes())),
            4 => out.extend(ids.iter().flat_map(|&id| id.to_le_bytes())),
            _ => out.extend(ids.iter().flat_map(|&id| u64::from(id).to_le_bytes())),
        }
    }

    /// Appends the ids in `bytes` to `out`. If an id is not below `vocab_size`, appends nothing and returns the first
    /// such id.
    pub(crate) fn decode(self, bytes: &[u8], vocab_size: u64, out: &mut Vec<u32>) -> Result<(), BadId> {
        /// Decodes ids of N bytes. A negative number becomes a `u64` beyond any vocabulary.
        fn all<const N: usize>(
            bytes: &[u8],
            vocab_size: u64,
            out: &mut Vec<u32>,
            value: impl Fn([u8; N]) -> i64,
        ) -> Result<(), BadId> {
            let start = out.len();
            let limit = vocab_size.min(1 << 31);
            let mut highest = 0;
            let ids = bytes.as_chunks::<N>().0;
            out.extend(ids.iter().map(|&id| {
                let id = value(id) as u64;
                highest = highest.max(id);
                id as u32
            }));
            if ids.is_empty() || highest < limit {
                return Ok(());
            }
            out.truncate(start);
            let bad = ids.iter().map(|&id| value(id)).enumerate().find(|&(_, id)| id as u64 >= limit);
            bad.map_or(Ok(()), |(index, value)| Err(BadId { index, value }))
        }
        match self {
            Self::U8 => all(bytes, vocab_size, out, |[id]| i64::from(id)),
            Self::I8 => all(bytes, vocab_size, out, |id| i64::from(i8::from_le_bytes(id))),
            Self::I16 => all(bytes, vocab_size, out, |id| i64::from(i16::from_le_bytes(id))),
            Self::U16 => all(bytes, vocab_size, out, |id| i64::from(u16::from_le_bytes(id))),
            Self::I32 => all(bytes, vocab_size, out, |id| i64::from(i32::from_le_bytes(id))),
            Self::U32 => all(bytes, vocab_size, out, |id| i64::from(u32::from_le_bytes(id))),
            Self::I64 => all(bytes, vocab_size, out, i64::from_le_bytes),
        }
    }

    /// Returns the byte range of the ids in `range`.
    pub(crate) fn byte_range(self, range: &Range<u64>) -> Range<usize> {
        range.start as usize * self.bytes()..range.end as usize * self.bytes()
    }
}

impl fmt::Display for IdType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: [IdType; 7] =
        [IdType::U8, IdType::I8, IdType::I16, IdType::U16, IdType::I32, IdType::U32, IdType::I64];

    proptest! {
        #[test]
        fn ids_survive_every_type_that_holds_them(ids in prop::collection::vec(0_u32..128, 0..50)) {
            for id_type in ALL {
                let mut bytes = Vec::new();
                id_type.encode(&ids, &mut bytes);
                prop_assert_eq!(bytes.len(), ids.len() * id_type.bytes());
                let mut found = vec![7];
                prop_assert_eq!(id_type.decode(&bytes, 128, &mut found), Ok(()));
                prop_assert_eq!(&found[1..], &ids[..], "{}", id_type);
            }
        }
    }

    #[test]
    fn the_first_id_beyond_the_vocabulary_is_found_with_its_sign() {
        let cases: [(IdType, &[u8], i64); 4] = [
            (IdType::I8, &[1, 0xFF, 0xFE], -1),
            (IdType::U16, &[1, 0, 0, 1, 0, 2], 256),
            (IdType::I32, &[1, 0, 0, 0, 0, 0, 0, 0x80], i64::from(i32::MIN)),
            (IdType::I64, &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], 1 << 32),
        ];
        for (id_type, bytes, value) in cases {
            let mut out = vec![5];
            assert_eq!(id_type.decode(bytes, 256, &mut out), Err(BadId { index: 1, value }), "{id_type}");
            assert_eq!(out, [5], "nothing of a bad range is kept");
        }
    }
}
