//! The wire format between ranks: frames with a header of fixed size, some followed by bytes.
//!
//! No field is used before its checksum is verified, and no more memory is allocated than the frame's kind may carry:
//!
//! ```text
//!     kind u8 | channel u8 | lane u8 | 0 | group u32 | sequence u32 | index u32 | offset u64 | call 3 x u64
//!     | bytes u32 | crc32c of the bytes u32 | crc32c of all of this u32
//! ```

use crate::{Malformed, error::ERROR_WORDS, shm::layout::SMALL_BYTES};

/// Length of a header in bytes.
pub(crate) const HEADER_BYTES: usize = 60;
/// Maximum number of data bytes in one frame.
pub(crate) const FRAME_BYTES: usize = 256 << 10;
/// Number of bytes of the error that ended the run.
pub(crate) const ENDING_BYTES: usize = ERROR_WORDS * size_of::<u64>();

/// Offset of the header's checksum, which covers all bytes before it.
const CHECKED_BYTES: usize = HEADER_BYTES - 4;

/// Header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// Operation that the frame belongs to, if any.
    pub(crate) key: Key,
    /// Number of bytes after the header; `crc` is their checksum.
    pub(crate) bytes: u32,
    pub(crate) crc: u32,
}

/// Identification of an operation between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    /// Index of the group's partition.
    pub(crate) group: u32,
    pub(crate) channel: Channel,
    pub(crate) sequence: u32,
}

/// Numbering that a sequence number belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Channel {
    /// Collectives of the group.
    Collective,
    /// Messages from the frame's sender to its receiver.
    Send,
    /// Messages from the frame's receiver to its sender.
    Receive,
}

impl Channel {
    const ALL: [Self; 3] = [Self::Collective, Self::Send, Self::Receive];

    /// Returns the channel as the other end sees it.
    pub(crate) fn turned(self) -> Self {
        match self {
            Self::Collective => Self::Collective,
            Self::Send => Self::Receive,
            Self::Receive => Self::Send,
        }
    }
}

/// Kind of a frame, with its fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Announcement: the sender has started an operation with this call. Small data is attached.
    Announce([u64; 3]),
    /// Data: bytes from `offset` of the sender's piece, which go directly to the receiver's memory.
    Direct { offset: u64 },
    /// Data: bytes from `offset` of chunk `index`, for which the receiver has buffer space.
    Chunk { index: u32, offset: u64 },
    /// Flow control: the sender has buffer space for chunks below `index`.
    Turn { index: u32 },
    /// Heartbeat of the sender.
    Beat,
    /// Farewell of the sender, orderly or in a panic.
    Leaving { in_panic: bool },
    /// End of the run by the error in the bytes.
    Ending,
}

impl Header {
    /// Creates the header of a frame without bytes that belongs to no operation.
    pub(crate) fn bare(kind: Kind) -> Self {
        Self { kind, key: Key { group: 0, channel: Channel::Collective, sequence: 0 }, bytes: 0, crc: 0 }
    }

    /// Creates the header of a frame of an operation, with `bytes`.
    pub(crate) fn of(kind: Kind, key: Key, bytes: &[u8]) -> Self {
        Self { kind, key, bytes: bytes.len() as u32, crc: crc32c::crc32c(bytes) }
    }

    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let (code, lane, index, offset, call) = match self.kind {
            Kind::Announce(call) => (1, 0, 0, 0, call),
            Kind::Direct { offset } => (2, 0, 0, offset, [0; 3]),
            Kind::Chunk { index, offset } => (2, 1, index, offset, [0; 3]),
            Kind::Turn { index } => (3, 0, index, 0, [0; 3]),
            Kind::Beat => (4, 0, 0, 0, [0; 3]),
            Kind::Leaving { in_panic } => (5, u8::from(in_panic), 0, 0, [0; 3]),
            Kind::Ending => (6, 0, 0, 0, [0; 3]),
        };
        let channel = Channel::ALL.iter().position(|channel| *channel == self.key.channel).unwrap_or(0) as u8;
        let mut out = [0; HEADER_BYTES];
        out[..4].copy_from_slice(&[code, channel, lane, 0]);
        out[4..8].copy_from_slice(&self.key.group.to_le_bytes());
        out[8..12].copy_from_slice(&self.key.sequence.to_le_bytes());
        out[12..16].copy_from_slice(&u32::to_le_bytes(index));
        out[16..24].copy_from_slice(&offset.to_le_bytes());
        for (word, bytes) in call.iter().zip(out[24..48].chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        out[48..52].copy_from_slice(&self.bytes.to_le_bytes());
        out[52..56].copy_from_slice(&self.crc.to_le_bytes());
        let crc = crc32c::crc32c(&out[..CHECKED_BYTES]);
        out[CHECKED_BYTES..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Decodes a header.
    ///
    /// # Errors
    /// If the checksum, kind, channel or length is invalid.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Malformed> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if word(CHECKED_BYTES) != crc32c::crc32c(&bytes[..CHECKED_BYTES]) {
            return Err(Malformed::CheckSum);
        }
        let (index, offset) = (word(12), long(16));
        let kind = match (bytes[0], bytes[2]) {
            (1, 0) => Kind::Announce([long(24), long(32), long(40)]),
            (2, 0) => Kind::Direct { offset },
            (2, 1) => Kind::Chunk { index, offset },
            (3, 0) => Kind::Turn { index },
            (4, 0) => Kind::Beat,
            (5, in_panic @ 0..=1) => Kind::Leaving { in_panic: in_panic == 1 },
            (6, 0) => Kind::Ending,
            _ => return Err(Malformed::Kind),
        };
        let channel = *Channel::ALL.get(usize::from(bytes[1])).ok_or(Malformed::Kind)?;
        let key = Key { group: word(4), channel, sequence: word(8) };
        let header = Self { kind, key, bytes: word(48), crc: word(52) };
        let allowed = match kind {
            Kind::Announce(_) => 0..=SMALL_BYTES,
            Kind::Direct { .. } | Kind::Chunk { .. } => 1..=FRAME_BYTES,
            Kind::Turn { .. } | Kind::Beat | Kind::Leaving { .. } => 0..=0,
            Kind::Ending => ENDING_BYTES..=ENDING_BYTES,
        };
        if allowed.contains(&(header.bytes as usize)) { Ok(header) } else { Err(Malformed::Length) }
    }
}

/// Reads the frames in `bytes` as a socket would deliver them, and returns their number. For fuzzing: any bytes end in an error
/// or in whole frames, and allocate no more memory than one frame may have.
///
/// # Errors
/// If the bytes are not whole, valid frames; returns the reason.
pub fn read_frames(mut bytes: &[u8]) -> Result<usize, String> {
    let mut frames = 0;
    while let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        let header = Header::decode(header).map_err(|problem| problem.to_string())?;
        let payload = rest.get(..header.bytes as usize).ok_or("the bytes end within a frame")?;
        if crc32c::crc32c(payload) != header.crc {
            return Err(Malformed::CheckSum.to_string());
        }
        assert_eq!(Header::decode(&header.encode()), Ok(header), "a header that is read is written the same");
        bytes = &rest[payload.len()..];
        frames += 1;
    }
    if bytes.is_empty() { Ok(frames) } else { Err("the bytes end within a header".to_owned()) }
}

/// Returns the bytes with the checksums that a sender would compute, so that a fuzzer gets past them.
pub fn seal_frames(bytes: &[u8]) -> Vec<u8> {
    let mut sealed = bytes.to_vec();
    let mut at = 0;
    while sealed.len() - at >= HEADER_BYTES {
        let length = [0, 1, 2, 3].map(|byte| sealed[at + 48 + byte]);
        let end = (at + HEADER_BYTES).saturating_add(u32::from_le_bytes(length) as usize).min(sealed.len());
        let crc = crc32c::crc32c(&sealed[at + HEADER_BYTES..end]);
        sealed[at + 52..at + CHECKED_BYTES].copy_from_slice(&crc.to_le_bytes());
        let crc = crc32c::crc32c(&sealed[at..at + CHECKED_BYTES]);
        sealed[at + CHECKED_BYTES..at + HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
        at = end;
    }
    sealed
}

/// Returns frames of every kind, one after another.
pub fn sample_frames() -> Vec<u8> {
    let key = Key { group: 3, channel: Channel::Receive, sequence: 7 };
    let kinds = [
        (Kind::Announce([1, 2, 3]), &b"payload"[..]),
        (Kind::Direct { offset: 1 << 40 }, b"x"),
        (Kind::Chunk { index: 7, offset: 9 }, b"yz"),
        (Kind::Turn { index: 5 }, b""),
        (Kind::Beat, b""),
        (Kind::Leaving { in_panic: true }, b""),
        (Kind::Ending, &[7; ENDING_BYTES]),
    ];
    let frame = |(kind, bytes): (Kind, &[u8])| [&Header::of(kind, key, bytes).encode()[..], bytes].concat();
    kinds.into_iter().flat_map(frame).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers() -> Vec<Header> {
        let key = Key { group: 3, channel: Channel::Receive, sequence: u32::MAX };
        let kinds = [
            (Kind::Announce([1, u64::MAX, 3]), &b"payload"[..]),
            (Kind::Direct { offset: 1 << 40 }, b"x"),
            (Kind::Chunk { index: 7, offset: 9 }, b"yz"),
            (Kind::Turn { index: 5 }, b""),
            (Kind::Beat, b""),
            (Kind::Leaving { in_panic: true }, b""),
            (Kind::Leaving { in_panic: false }, b""),
            (Kind::Ending, &[7; ENDING_BYTES]),
        ];
        kinds.map(|(kind, bytes)| Header::of(kind, key, bytes)).to_vec()
    }

    #[test]
    fn samples_are_read_and_sealing_them_changes_nothing() {
        let sample = sample_frames();
        assert_eq!(read_frames(&sample), Ok(7));
        assert_eq!(seal_frames(&sample), sample);
    }

    #[test]
    fn a_header_is_read_as_it_was_written() {
        for header in headers() {
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
    }

    #[test]
    fn a_flipped_bit_anywhere_in_a_header_is_found() {
        for header in headers() {
            for bit in 0..HEADER_BYTES * 8 {
                let mut bytes = header.encode();
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Header::decode(&bytes), Err(Malformed::CheckSum), "bit {bit} of {header:?}");
            }
        }
    }

    #[test]
    fn no_kind_carries_more_than_it_may() {
        for header in headers() {
            for bytes in [FRAME_BYTES as u32 + 1, u32::MAX] {
                let header = Header { bytes, ..header };
                assert_eq!(Header::decode(&header.encode()), Err(Malformed::Length), "{header:?}");
            }
        }
        let empty = Header::of(Kind::Direct { offset: 0 }, headers()[0].key, b"");
        assert_eq!(Header::decode(&empty.encode()), Err(Malformed::Length));
    }
}
