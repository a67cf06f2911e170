//! Retries for locks that a process which was just killed may still hold until the kernel has released them.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// Longest wait for a dying process.
const PATIENCE: Duration = Duration::from_secs(3);
/// Pause between two attempts.
const RETRY: Duration = Duration::from_millis(10);

/// Takes a lock by calling `take` repeatedly while its error `is_busy`, for three seconds at most.
///
/// # Errors
/// If the last attempt fails.
pub fn retry_lock<T, E>(
    mut take: impl FnMut() -> Result<T, E>,
    is_busy: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let begin = Instant::now();
    loop {
        match take() {
            Err(error) if is_busy(&error) && begin.elapsed() < PATIENCE => sleep(RETRY),
            taken => return taken,
        }
    }
}
