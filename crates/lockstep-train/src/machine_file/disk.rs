//! What the disk of a directory moves when an engine updates state that is there: window by window, several on their way at once, past the
//! page cache.

use std::path::Path;
use std::time::{Duration, Instant};

use lockstep_engine::EngineError;
use lockstep_plan::{DISK_ALIGNMENT_BYTES, MemoryCategory, WINDOW_ELEMENTS, WINDOW_SLOTS};
use lockstep_tensor::{Action, Arena, Buffer, DiskError, DiskMethod, DiskQueue, ScratchFile, Ticket};

/// A window of weights and two moments in f32.
const WINDOW_BYTES: usize = 3 * 4 * WINDOW_ELEMENTS;
/// Windows that are on their way in while others are on their way out.
const AHEAD: usize = WINDOW_SLOTS / 2;
/// How long the disk may take for one.
const LIMIT: Duration = Duration::from_secs(120);

/// What was found of a disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Disk {
    /// 10⁹ bytes a second, of as many read as written at the same time.
    pub(super) gb_per_s: f64,
    /// Bytes that are free.
    pub(super) free_bytes: u64,
}

/// Writes so many MiB to a file without a name in `directory`, and then reads and writes each window of it once, as an update does.
///
/// # Errors
/// No such directory, no room, no permission; out of memory.
pub(super) fn measure(directory: &Path, mib: usize) -> Result<Disk, EngineError> {
    // A file that stands for memory would have it made.
    std::fs::metadata(directory)
        .map_err(|source| DiskError::Create { directory: directory.to_owned(), source })?;
    let bytes = WINDOW_BYTES.min(mib << 20);
    let windows = ((mib << 20) / bytes).max(1);
    let free_bytes = ScratchFile::available_bytes(directory).unwrap_or(0);
    let file = ScratchFile::create(directory, (windows * bytes) as u64)?;
    let mut state = State {
        queue: DiskQueue::new(file, DiskMethod::Auto)?,
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

/// Windows on disk, of which a few have memory.
struct State {
    queue: DiskQueue,
    memory: Buffer,
    /// What each part of the memory is on its way for.
    pending: [Option<Ticket>; WINDOW_SLOTS],
    bytes: usize,
}

impl State {
    /// Reads each window, those ahead while those behind are written.
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

    /// Begins to move a window when what has its memory is through.
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
