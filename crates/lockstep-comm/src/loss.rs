//! Causes of the loss of a rank, and the numbers by which they travel between processes.

use std::fmt;

/// Cause of the loss of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossCause {
    /// End of its process for an unknown reason.
    Died,
    /// Death of its process by this signal.
    Signal(i32),
    /// Death of its process by the kernel's out-of-memory killer.
    OutOfMemory,
    /// Death of its process by SIGKILL; the system does not show whether the kernel ran out of memory.
    PerhapsOutOfMemory,
    /// End of its process with this exit code.
    Exit(i32),
    /// Departure while other ranks still depended on it.
    Left,
    /// A panic of the rank.
    Panicked,
    /// No sign of life from its process, which still exists, for this many milliseconds.
    Silent(u64),
    /// A connection that its end closed, or that broke.
    Disconnected,
    /// A message that no rank of this program sends.
    Malformed(Malformed),
    /// No acknowledgement of sent data for too long.
    Unreachable,
}

impl fmt::Display for LossCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Died => f.write_str("died"),
            Self::Signal(signal) => match signal_name(*signal) {
                Some(name) => write!(f, "was killed by signal {signal} ({name})"),
                None => write!(f, "was killed by signal {signal}"),
            },
            Self::OutOfMemory => f.write_str("was killed by the out-of-memory killer (signal 9)"),
            Self::PerhapsOutOfMemory => {
                f.write_str("was killed by signal 9 (SIGKILL), perhaps by the out-of-memory killer")
            }
            Self::Exit(code) => write!(f, "ended with exit code {code}"),
            Self::Left => f.write_str("left the run"),
            Self::Panicked => f.write_str("panicked"),
            Self::Silent(ms) => write!(f, "has not moved for {ms} ms"),
            Self::Disconnected => f.write_str("closed its connections without a word"),
            Self::Malformed(what) => write!(f, "sent what no rank of this program sends: {what}"),
            Self::Unreachable => f.write_str("cannot be reached any more"),
        }
    }
}

/// Returns the name of a signal that ends a process on Linux.
fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        5 => "SIGTRAP",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        14 => "SIGALRM",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        31 => "SIGSYS",
        _ => return None,
    })
}

/// Fault in received data that no rank of this program sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Wrong checksum of a header or of its bytes.
    #[error("a frame's check sum is wrong")]
    CheckSum,
    /// Unknown kind or channel.
    #[error("there is no such frame")]
    Kind,
    /// Number of bytes after a header that its kind does not allow.
    #[error("a frame is longer or shorter than its kind can be")]
    Length,
    /// Operation that is neither in flight nor possible as the next one.
    #[error("a frame of an operation that is not in flight")]
    Operation,
    /// Bytes outside of their destination, or too many.
    #[error("a frame's bytes lie outside of what they belong to, or are too many for it")]
    Range,
    /// Invalid description of an operation, or attached data of the wrong length.
    #[error(
        "an operation was announced with an invalid descriptor, or a payload of the wrong length, or with data of another size"
    )]
    Call,
    /// Invalid error that ends the run.
    #[error("the end of the run was announced without a reason that there is")]
    Ending,
}

impl Malformed {
    /// All faults; the index is the fault's code on the wire.
    pub(crate) const ALL: [Self; 7] =
        [Self::CheckSum, Self::Kind, Self::Length, Self::Operation, Self::Range, Self::Call, Self::Ending];
}

impl LossCause {
    /// Encodes the cause as a code and a value, as it travels between processes.
    pub(crate) fn to_numbers(self) -> (u64, u64) {
        match self {
            Self::Died => (0, 0),
            Self::Signal(signal) => (1, signal as u64),
            Self::Exit(code) => (2, code as u64),
            Self::Left => (3, 0),
            Self::Panicked => (4, 0),
            Self::Silent(ms) => (5, ms),
            Self::Disconnected => (6, 0),
            Self::Malformed(what) => {
                (7, Malformed::ALL.iter().position(|other| *other == what).unwrap_or(0) as u64)
            }
            Self::Unreachable => (8, 0),
            Self::OutOfMemory => (9, 0),
            Self::PerhapsOutOfMemory => (10, 0),
        }
    }

    /// Decodes the numbers that [`Self::to_numbers`] returns; `None` if they are invalid.
    pub(crate) fn from_numbers(code: u64, value: u64) -> Option<Self> {
        Some(match code {
            0 => Self::Died,
            1 => Self::Signal(value as i32),
            2 => Self::Exit(value as i32),
            3 => Self::Left,
            4 => Self::Panicked,
            5 => Self::Silent(value),
            6 => Self::Disconnected,
            7 => Self::Malformed(*Malformed::ALL.get(value as usize)?),
            8 => Self::Unreachable,
            9 => Self::OutOfMemory,
            10 => Self::PerhapsOutOfMemory,
            _ => return None,
        })
    }
}
