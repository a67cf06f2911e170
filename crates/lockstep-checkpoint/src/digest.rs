//! BLAKE3 digests, which identify the contents of files and tensors.

use std::{fmt, io, io::Read};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Minimum number of bytes for which hashing on several threads pays off.
const PARALLEL_BYTES: usize = 256 << 10;

/// BLAKE3 digest, formatted as 64 lower-case hexadecimal digits, as `b3sum` prints it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// Hashes `bytes`; large inputs use all threads of the current pool.
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = Hasher::new();
        hasher.update(bytes);
        hasher.finish()
    }

    /// Returns the 32 bytes of the digest.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Parses the output of `Display`. Returns `None` for anything else, including upper case, so that each digest has
    /// only one spelling.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digest = Self(*blake3::Hash::from_hex(text).ok()?.as_bytes());
        (digest.to_string() == text).then_some(digest)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::from_hex(&text)
            .ok_or_else(|| de::Error::custom(format!("`{text}` is not 64 lower-case hexadecimal digits")))
    }
}

/// Incremental BLAKE3 hasher.
#[derive(Default)]
pub(crate) struct Hasher(blake3::Hasher);

impl Hasher {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        if bytes.len() >= PARALLEL_BYTES {
            self.0.update_rayon(bytes);
        } else {
            self.0.update(bytes);
        }
    }

    pub(crate) fn finish(&self) -> Digest {
        Digest(*self.0.finalize().as_bytes())
    }
}

/// Hashes exactly `bytes` bytes of `source`. Uses read calls instead of a mapping, so that a failing disk gives an
/// error and not a signal.
pub(crate) fn digest_reader(source: &mut impl Read, bytes: u64) -> io::Result<Digest> {
    const BUFFER_BYTES: u64 = 4 << 20;
    let mut buffer = vec![0; usize::try_from(bytes.min(BUFFER_BYTES)).expect("at most 4 MiB")];
    let mut hasher = Hasher::new();
    let mut left = bytes;
    while left > 0 {
        let piece = &mut buffer[..usize::try_from(left.min(BUFFER_BYTES)).expect("at most 4 MiB")];
        source.read_exact(piece)?;
        hasher.update(piece);
        left -= piece.len() as u64;
    }
    Ok(hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_blake3_however_the_bytes_arrive() {
        let bytes: Vec<u8> = (0..3_000_001u32).map(|i| (i % 251) as u8).collect();
        let expected = blake3::hash(&bytes).to_string();
        assert_eq!(Digest::of(&bytes).to_string(), expected);
        let read = digest_reader(&mut bytes.as_slice(), bytes.len() as u64).unwrap();
        assert_eq!(read.to_string(), expected);
    }

    #[test]
    fn a_digest_has_one_spelling() {
        let digest = Digest::of(b"lockstep");
        let text = digest.to_string();
        assert_eq!(Digest::from_hex(&text), Some(digest));
        assert_eq!(Digest::from_hex(&text.to_uppercase()), None);
        assert_eq!(Digest::from_hex(&text[1..]), None);
    }
}
