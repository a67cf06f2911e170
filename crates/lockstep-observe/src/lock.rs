//! Locks that a run which was just killed may still hold: the kernel gives them back once it has taken the process apart.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// The longest wait for a dying process.
const PATIENCE: Duration = Duration::from_secs(3);
/// The pause between two tries.
const RETRY: Duration = Duration::from_millis(10);

/// Takes a lock by `take`, again and again while its error `is_busy`, for three seconds at most.
///
/// # Errors
/// The last one of `take`.
pub fn take_from_the_dying<T, E>(
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
