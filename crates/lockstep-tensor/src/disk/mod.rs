//! Disk offload: an unnamed file or stored ones, and asynchronous reads and writes between them and buffers.
//!
//! A [`ScratchFile`] reserves its whole space before anything is written, and bypasses the page cache if the file
//! system allows it. It has no name: when the process ends, in any way, the system reclaims the space, and no partly
//! written file is left. A [`DiskQueue`] transfers ranges lent by an [`Arena`](crate::Arena)'s buffers to and from
//! the file, by io_uring if the kernel has it, else by threads with blocking I/O.
//!
//! ```text
//! let ticket = queue.read(offset, buffer.lend(range))?;     the transfer is overlapped with compute
//! queue.wait(ticket, deadline)?;                            the bytes are there and the loan is over
//! ```

mod error;
mod file;
mod open_file;
mod pool;
mod queue;
#[cfg(target_os = "linux")]
mod ring;
#[cfg(test)]
mod tests;
mod transfer;

pub use error::DiskError;
pub use file::{ScratchFile, StoredFile};
pub use queue::{DiskIo, DiskQueue, DiskTraffic, Ticket};
pub use transfer::{Action, DiskBackend, Transfer};
