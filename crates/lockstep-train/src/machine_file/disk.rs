//! What the disk of a directory writes and reads.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Instant;

use rustix::fs::{Advice, fadvise, fstatvfs};

const PART: usize = 4 << 20;

/// What was found of a disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Disk {
    /// 10⁹ bytes a second, of as many read as written.
    pub(super) gb_per_s: f64,
    /// Bytes that are free.
    pub(super) free_bytes: u64,
}

/// Writes so many MiB to a file without a name in `directory`, to the disk itself, and reads them from there.
///
/// # Errors
/// What the system says: no room, no permission.
pub(super) fn measure(directory: &Path, mib: usize) -> io::Result<Disk> {
    let parts = (mib << 20).div_ceil(PART).max(1);
    let mut file = tempfile_in(directory)?;
    let stat = fstatvfs(&file)?;
    let free_bytes = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free_bytes < 4 * (parts * PART) as u64 {
        return Err(io::Error::new(io::ErrorKind::StorageFull, "too little room to measure"));
    }
    // Disks may store zeros without writing them.
    let part: Vec<u8> = (0..PART as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let begin = Instant::now();
    for _ in 0..parts {
        file.write_all(&part)?;
    }
    file.sync_data()?;
    let written = begin.elapsed();
    fadvise(&file, 0, None, Advice::DontNeed)?;
    file.seek(SeekFrom::Start(0))?;
    let mut read = vec![0; PART];
    let begin = Instant::now();
    for _ in 0..parts {
        file.read_exact(&mut read)?;
    }
    let seconds = (written + begin.elapsed()).as_secs_f64();
    Ok(Disk { gb_per_s: 2.0 * (parts * PART) as f64 / seconds.max(1e-9) / 1e9, free_bytes })
}

/// A file that is gone when it is closed.
fn tempfile_in(directory: &Path) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags, open};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(File::from(open(directory, flags, Mode::RUSR | Mode::WUSR)?))
}
