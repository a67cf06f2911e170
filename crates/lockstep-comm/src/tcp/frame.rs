//! What ranks say to each other over a socket: frames with a header of fixed size, some with bytes behind it.
//!
//! Nothing in a frame is believed before its check sum is, and no memory is taken for more than its kind may carry:
//!
//! ```text
//!     kind u8 | channel u8 | lane u8 | 0 | group u32 | sequence u32 | index u32 | offset u64 | call 3 x u64
//!     | bytes u32 | crc32c of the bytes u32 | crc32c of all of this u32
//! ```

use crate::{error::ERROR_WORDS, shm::layout::SMALL_BYTES};

/// Bytes of a header.
pub(crate) const HEADER_BYTES: usize = 60;
/// Bytes of data in one frame.
pub(crate) const FRAME_BYTES: usize = 256 << 10;
/// Bytes of a frame that says why the run ended.
pub(crate) const ENDING_BYTES: usize = ERROR_WORDS * size_of::<u64>();

/// Where the header's check sum is.
const CHECKED_BYTES: usize = HEADER_BYTES - 4;

/// A header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// Which operation, where it is about one.
    pub(crate) key: Key,
    /// Bytes behind the header, and their check sum.
    pub(crate) bytes: u32,
    pub(crate) crc: u32,
}

/// An operation between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    /// Index of the group's partition.
    pub(crate) group: u32,
    pub(crate) channel: Channel,
    pub(crate) sequence: u32,
}

/// Which count of operations a sequence number belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Channel {
    /// The group's collectives.
    Collective,
    /// What the frame's sender sends to its receiver.
    Send,
    /// What it receives from it.
    Receive,
}

impl Channel {
    const ALL: [Self; 3] = [Self::Collective, Self::Send, Self::Receive];

    /// The channel as the other end sees it.
    pub(crate) fn turned(self) -> Self {
        match self {
            Self::Collective => Self::Collective,
            Self::Send => Self::Receive,
            Self::Receive => Self::Send,
        }
    }
}

/// What a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The sender has come to an operation, and this is how it called it; data that is small comes along.
    Post([u64; 3]),
    /// Bytes from `offset` of the sender's piece, which have their place in the receiver's memory.
    Direct { offset: u64 },
    /// Bytes from `offset` of part `index`, for which the receiver has room.
    Part { index: u32, offset: u64 },
    /// The sender has room for parts below `index`.
    Turn { index: u32 },
    /// The sender moves.
    Beat,
    /// It leaves, in peace or in panic.
    Leaving { in_panic: bool },
    /// The run has ended by an error, which is in the bytes.
    Ending,
}

/// The fault in what a rank has sent, which no rank of this program sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The check sum of a header or of its bytes.
    #[error("a frame's check sum is wrong")]
    CheckSum,
    /// A kind or channel that there is not.
    #[error("there is no such frame")]
    Kind,
    /// The number of bytes behind a header.
    #[error("a frame is longer or shorter than its kind can be")]
    Length,
    /// The operation: none that is under way, or that can be next.
    #[error("a frame is about no operation that is under way")]
    Operation,
    /// The place of bytes, or their number.
    #[error("a frame's bytes lie outside of what they belong to, or are too many for it")]
    Range,
    /// The description of an operation, or the data that came along with it.
    #[error("an operation was announced in words without sense, or with data of another size")]
    Call,
    /// The error that ends the run.
    #[error("the end of the run was announced without a reason that there is")]
    Ending,
}

impl Malformed {
    /// Every fault, in the order of the numbers on the wire.
    pub(crate) const ALL: [Self; 7] =
        [Self::CheckSum, Self::Kind, Self::Length, Self::Operation, Self::Range, Self::Call, Self::Ending];
}

impl Header {
    /// A frame without bytes, and about no operation.
    pub(crate) fn bare(kind: Kind) -> Self {
        Self { kind, key: Key { group: 0, channel: Channel::Collective, sequence: 0 }, bytes: 0, crc: 0 }
    }

    /// A frame about an operation, with `bytes`.
    pub(crate) fn of(kind: Kind, key: Key, bytes: &[u8]) -> Self {
        Self { kind, key, bytes: bytes.len() as u32, crc: crc32c::crc32c(bytes) }
    }

    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let (code, lane, index, offset, call) = match self.kind {
            Kind::Post(call) => (1, 0, 0, 0, call),
            Kind::Direct { offset } => (2, 0, 0, offset, [0; 3]),
            Kind::Part { index, offset } => (2, 1, index, offset, [0; 3]),
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

    /// The header that these bytes are.
    ///
    /// # Errors
    /// [`Malformed`].
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Malformed> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if word(CHECKED_BYTES) != crc32c::crc32c(&bytes[..CHECKED_BYTES]) {
            return Err(Malformed::CheckSum);
        }
        let (index, offset) = (word(12), long(16));
        let kind = match (bytes[0], bytes[2]) {
            (1, 0) => Kind::Post([long(24), long(32), long(40)]),
            (2, 0) => Kind::Direct { offset },
            (2, 1) => Kind::Part { index, offset },
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
            Kind::Post(_) => 0..=SMALL_BYTES,
            Kind::Direct { .. } | Kind::Part { .. } => 1..=FRAME_BYTES,
            Kind::Turn { .. } | Kind::Beat | Kind::Leaving { .. } => 0..=0,
            Kind::Ending => ENDING_BYTES..=ENDING_BYTES,
        };
        if allowed.contains(&(header.bytes as usize)) { Ok(header) } else { Err(Malformed::Length) }
    }
}

/// Takes the frames out of `bytes`, as a socket that delivers just these would; returns how many there are. What the
/// fuzzer tries: whatever the bytes, it ends in an error or in whole frames, and takes no more memory than one may have.
///
/// # Errors
/// Why they are no frames.
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

/// The same bytes with the check sums that a sender would have given them, so that what is behind them is tried as well.
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

/// Frames of every kind, one after another.
pub fn sample_frames() -> Vec<u8> {
    let key = Key { group: 3, channel: Channel::Receive, sequence: 7 };
    let kinds = [
        (Kind::Post([1, 2, 3]), &b"payload"[..]),
        (Kind::Direct { offset: 1 << 40 }, b"x"),
        (Kind::Part { index: 7, offset: 9 }, b"yz"),
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
            (Kind::Post([1, u64::MAX, 3]), &b"payload"[..]),
            (Kind::Direct { offset: 1 << 40 }, b"x"),
            (Kind::Part { index: 7, offset: 9 }, b"yz"),
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
