//! The bandwidth of a disk under optimizer offload: windows are read and written past the page cache, several in flight at once.

use std::path::Path;
use std::time::{Duration, Instant};

use lockstep_engine::EngineError;
use lockstep_plan::{DISK_ALIGNMENT_BYTES, MemoryCategory, WINDOW_ELEMENTS, WINDOW_SLOTS};
use lockstep_tensor::{Action, Arena, Buffer, DiskError, DiskIo, DiskQueue, ScratchFile, Ticket};

/// Bytes of a window of weights and two moments in f32.
const WINDOW_BYTES: usize = 3 * 4 * WINDOW_ELEMENTS;
/// Windows that are read ahead while others are written.
const AHEAD: usize = WINDOW_SLOTS / 2;
/// Longest wait for a read or a write.
const LIMIT: Duration = Duration::from_secs(120);

/// The measured disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Disk {
    /// Bandwidth in GB/s, with as many bytes read as written at the same time.
    pub(super) gb_per_s: f64,
    /// Free space, in bytes.
    pub(super) free_bytes: u64,
}

/// Writes so many MiB to an unnamed file in `directory`, and then reads and writes each window of it once, as an optimizer step does.
///
/// # Errors
/// If the directory does not exist, cannot be written or has no room, or if memory runs out.
pub(super) fn measure(directory: &Path, mib: usize) -> Result<Disk, EngineError> {
    // `ScratchFile::create` would create a missing directory.
    std::fs::metadata(directory)
        .map_err(|source| DiskError::Create { directory: directory.to_owned(), source })?;
    let bytes = WINDOW_BYTES.min(mib << 20);
    let windows = ((mib << 20) / bytes).max(1);
    let free_bytes = ScratchFile::available_bytes(directory).unwrap_or(0);
    let file = ScratchFile::create(directory, (windows * bytes) as u64)?;
    let mut state = State {
        queue: DiskQueue::new(file, DiskIo::Auto)?,
        memory: Arena::new().allocate(WINDOW_SLOTS * bytes, MemoryCategory::Workspace)?,
        pending: [const { None }; WINDOW_SLOTS],
        bytes,
    };
    // Disks may store zeros without writing them.
    let noise = |i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8;
    state.memory.bytes_mut().iter_mut().zip(0..).for_each(|(byte, i)| *byte = noise(i));
    for window in 0..windows {
        state.begin(Action::Write, window)?;
    }
    state.settle()?;
    let begin = Instant::now();
    state.update(windows)?;
    let gb_per_s = 2.0 * (windows * bytes) as f64 / begin.elapsed().as_secs_f64().max(1e-9) / 1e9;
    Ok(Disk { gb_per_s, free_bytes })
}

/// Windows on disk, with memory for a few of them.
struct State {
    queue: DiskQueue,
    memory: Buffer,
    /// The read or write in flight in each slot of the memory.
    pending: [Option<Ticket>; WINDOW_SLOTS],
    bytes: usize,
}

impl State {
    /// Reads and writes each window once; reads ahead overlap with writes behind.
    fn update(&mut self, windows: usize) -> Result<(), DiskError> {
        for ahead in 0..windows.min(AHEAD) {
            self.begin(Action::Read, ahead)?;
        }
        for window in 0..windows {
            self.begin(Action::Write, window)?;
            if window + AHEAD < windows {
                self.begin(Action::Read, window + AHEAD)?;
            }
        }
        self.settle()
    }

    /// Starts to read or write a window, once the operation before it in its slot has finished.
    fn begin(&mut self, action: Action, window: usize) -> Result<(), DiskError> {
        let slot = window % WINDOW_SLOTS;
        self.wait(slot)?;
        let (offset, start) = ((window * self.bytes) as u64, slot * self.bytes);
        debug_assert!(start.is_multiple_of(DISK_ALIGNMENT_BYTES));
        let loan = self.memory.lend(start..start + self.bytes);
        self.pending[slot] = Some(match action {
            Action::Read => self.queue.read(offset, loan),
            Action::Write => self.queue.write(offset, loan),
        });
        Ok(())
    }

    fn wait(&mut self, slot: usize) -> Result<(), DiskError> {
        self.pending[slot].take().map_or(Ok(()), |ticket| self.queue.wait(ticket, LIMIT))
    }

    fn settle(&mut self) -> Result<(), DiskError> {
        (0..WINDOW_SLOTS).try_for_each(|slot| self.wait(slot))
    }
}
