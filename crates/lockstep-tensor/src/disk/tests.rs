//! Tests of disk offload, by both backends.

use std::{
    io,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use lockstep_plan::{DISK_ALIGNMENT_BYTES, MemoryCategory};
use proptest::prelude::*;

use super::{queue::DEPTH, *};
use crate::{Arena, Buffer};

const LIMIT: Duration = Duration::from_secs(20);
const UNIT: usize = DISK_ALIGNMENT_BYTES;

/// Allocates memory that starts at a page.
fn pages(count: usize) -> Buffer {
    Arena::new().allocate_zeroed((count * UNIT).max(2 << 20), MemoryCategory::Workspace).unwrap()
}

fn queue(directory: &Path, units: usize, method: DiskIo) -> DiskQueue {
    let file = ScratchFile::create(directory, (units * UNIT) as u64).unwrap();
    DiskQueue::new(file, method).unwrap()
}

/// Returns the backends that this machine supports.
fn methods() -> Vec<DiskIo> {
    let directory = tempfile::tempdir().unwrap();
    let file = ScratchFile::create(directory.path(), 1).unwrap();
    match DiskQueue::new(file, DiskIo::IoUring) {
        Ok(_) => vec![DiskIo::IoUring, DiskIo::Threads],
        Err(error) => {
            println!("SKIPPED: io_uring: {error}");
            vec![DiskIo::Threads]
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn what_was_written_last_is_read(
        writes in proptest::collection::vec((0_usize..24, 1_usize..8, any::<u8>()), 1..40),
    ) {
        for method in methods() {
            let directory = tempfile::tempdir().unwrap();
            let mut queue = queue(directory.path(), 32, method);
            let mut expected = vec![0_u8; 32 * UNIT];
            let mut memory = pages(32);
            // Writes that overlap must not be in flight together; disjoint ones may.
            for (start, units, value) in &writes {
                let bytes = units * UNIT;
                memory.bytes_mut()[..bytes].fill(*value);
                expected[start * UNIT..][..bytes].fill(*value);
                let ticket = queue.write((start * UNIT) as u64, memory.lend(0..bytes));
                queue.wait(ticket, LIMIT).unwrap();
            }
            let reads: Vec<_> =
                (0..32).map(|unit| queue.read((unit * UNIT) as u64, memory.lend(unit * UNIT..(unit + 1) * UNIT))).collect();
            for ticket in reads.into_iter().rev() {
                queue.wait(ticket, LIMIT).unwrap();
            }
            prop_assert!(memory.bytes_mut()[..32 * UNIT] == expected, "{method:?}");
            let traffic = queue.take_traffic();
            prop_assert_eq!(traffic.read_bytes, (32 * UNIT) as u64);
            prop_assert!(traffic.busy > Duration::ZERO);
        }
    }
}

#[test]
fn a_new_file_is_zeros_and_has_no_name() {
    for method in methods() {
        let directory = tempfile::tempdir().unwrap();
        let mut queue = queue(directory.path(), 4, method);
        let mut memory = pages(4);
        memory.bytes_mut().fill(7);
        let ticket = queue.read(0, memory.lend(0..4 * UNIT));
        queue.wait(ticket, LIMIT).unwrap();
        assert!(memory.bytes_mut()[..4 * UNIT].iter().all(|byte| *byte == 0), "{method:?}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "{method:?}");
    }
}

/// Writes a stored file of two blocks and a hundred bytes.
fn stored(directory: &Path) -> (StoredFile, Vec<u8>) {
    let bytes: Vec<u8> = (0..2 * UNIT + 100).map(|at| (at % 251) as u8).collect();
    let path = directory.join("weights");
    std::fs::write(&path, &bytes).unwrap();
    (StoredFile::open(&path).unwrap(), bytes)
}

#[test]
fn a_stored_file_is_read_to_its_end_which_is_no_whole_block() {
    for method in methods() {
        let directory = tempfile::tempdir().unwrap();
        let (file, bytes) = stored(directory.path());
        let mut queue = DiskQueue::for_stored(method).unwrap();
        let mut memory = pages(4);
        memory.bytes_mut().fill(7);
        let tail = queue.read_stored(&file, UNIT as u64, memory.lend(UNIT..3 * UNIT));
        let head = queue.read_stored(&file, 0, memory.lend(0..UNIT));
        queue.wait(head, LIMIT).unwrap();
        queue.wait(tail, LIMIT).unwrap();
        let found = memory.bytes_mut();
        assert!(found[..bytes.len()] == bytes, "{method:?}");
        // Direct reads of some file systems zero the rest of the block; nothing beyond it changes.
        assert!(found[3 * UNIT..].iter().all(|byte| *byte == 7), "{method:?}");
    }
}

#[test]
fn a_stored_file_that_has_become_shorter_is_an_error_that_names_it() {
    for method in methods() {
        let directory = tempfile::tempdir().unwrap();
        let (file, _) = stored(directory.path());
        std::fs::OpenOptions::new().write(true).open(file.path()).unwrap().set_len(UNIT as u64).unwrap();
        let mut queue = DiskQueue::for_stored(method).unwrap();
        let mut memory = pages(4);
        let ticket = queue.read_stored(&file, 0, memory.lend(0..3 * UNIT));
        let error = queue.wait(ticket, LIMIT).unwrap_err().to_string();
        assert!(error.contains("cannot read 12288 bytes at 0 of") && error.contains("weights"), "{error}");
    }
    let error = StoredFile::open(Path::new("nowhere/weights")).unwrap_err().to_string();
    assert!(error.contains("cannot open nowhere/weights"), "{error}");
}

#[test]
fn more_transfers_than_fit_at_once_all_end() {
    for method in methods() {
        let directory = tempfile::tempdir().unwrap();
        let count = 3 * DEPTH;
        let mut queue = queue(directory.path(), count, method);
        let mut memory = pages(count);
        for (unit, bytes) in memory.bytes_mut()[..count * UNIT].chunks_exact_mut(UNIT).enumerate() {
            bytes.fill(unit as u8);
        }
        let range = |unit: usize| unit * UNIT..(unit + 1) * UNIT;
        let writes: Vec<_> =
            (0..count).map(|unit| queue.write((unit * UNIT) as u64, memory.lend(range(unit)))).collect();
        writes.into_iter().for_each(|ticket| queue.wait(ticket, LIMIT).unwrap());
        memory.bytes_mut().fill(0);
        let reads: Vec<_> =
            (0..count).map(|unit| queue.read((unit * UNIT) as u64, memory.lend(range(unit)))).collect();
        reads.into_iter().for_each(|ticket| queue.wait(ticket, LIMIT).unwrap());
        for (unit, bytes) in memory.bytes_mut()[..count * UNIT].chunks_exact(UNIT).enumerate() {
            assert!(bytes.iter().all(|byte| *byte == unit as u8), "{method:?}: unit {unit} has {}", bytes[0]);
        }
    }
}

#[test]
fn a_queue_that_is_dropped_gives_the_memory_back() {
    for method in methods() {
        let directory = tempfile::tempdir().unwrap();
        let mut queue = queue(directory.path(), 512, method);
        let mut memory = pages(512);
        for part in 0..8 {
            let bytes = 64 * UNIT;
            queue.write((part * bytes) as u64, memory.lend(part * bytes..(part + 1) * bytes));
        }
        drop(queue);
        memory.bytes_mut().fill(1);
    }
}

#[test]
fn what_does_not_fit_is_refused_with_both_numbers() {
    let directory = tempfile::tempdir().unwrap();
    let error = ScratchFile::create(directory.path(), 1 << 60).unwrap_err();
    let DiskError::Full { needed_bytes, available_bytes, .. } = &error else { panic!("{error}") };
    assert_eq!(*needed_bytes, 1 << 60);
    assert!(*available_bytes > 0 && *available_bytes < 1 << 60, "{error}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

/// A backend that fails each transfer, or never ends it.
#[derive(Debug)]
struct Broken {
    started: Vec<Transfer>,
    ends: bool,
}

impl DiskBackend for Broken {
    fn start(&mut self, transfer: Transfer) {
        self.started.push(transfer);
    }

    fn next(&mut self, deadline: Instant) -> Option<(Transfer, io::Result<()>)> {
        if self.ends {
            return Some((self.started.pop()?, Err(io::Error::from_raw_os_error(5))));
        }
        std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
        None
    }
}

#[test]
fn a_failed_transfer_and_a_silent_disk_are_errors_that_say_where() {
    let directory = tempfile::tempdir().unwrap();
    let broken = |ends| {
        let file = Arc::new(ScratchFile::create(directory.path(), 8 * UNIT as u64).unwrap());
        DiskQueue::with_backend(file, Box::new(Broken { started: Vec::new(), ends }))
    };
    let mut memory = pages(1);
    let mut queue = broken(true);
    let ticket = queue.write(2 * UNIT as u64, memory.lend(0..UNIT));
    let error = queue.wait(ticket, LIMIT).unwrap_err().to_string();
    assert!(error.contains("cannot write 4096 bytes at 8192") && error.contains("os error 5"), "{error}");
    let mut queue = broken(false);
    let ticket = queue.read(0, memory.lend(0..UNIT));
    let error = queue.wait(ticket, Duration::from_millis(20)).unwrap_err().to_string();
    assert!(error.contains("has not answered for 0 s"), "{error}");
}

#[test]
fn a_directory_that_is_there_is_found_at_or_above_one_that_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    for asked in ["", "a", "a/b/c"] {
        assert_eq!(ScratchFile::existing_directory(&path.join(asked)), path, "{asked:?}");
    }
    let here = std::env::current_dir().unwrap();
    assert_eq!(ScratchFile::existing_directory(Path::new("no such directory/at all")), here);
}

#[test]
#[should_panic(expected = "which go in units of 4096")]
fn what_is_not_aligned_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut memory = pages(1);
    queue(directory.path(), 1, DiskIo::Threads).read(0, memory.lend(0..512));
}
