//! The number of compute threads of a command.

use crate::exit::Failure;

/// Maximum number of threads, as for `train.threads`.
const MAX_THREADS: usize = 4096;

/// Returns the number of compute threads: `asked`, or all cores if it is 0 or `None`.
pub(crate) fn threads(asked: Option<usize>) -> Result<usize, Failure> {
    match asked {
        Some(threads) if threads > MAX_THREADS => {
            Err(Failure::configuration(format!("--threads {threads}: allowed is 0 to {MAX_THREADS}")))
        }
        Some(threads) if threads > 0 => Ok(threads),
        _ => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
    }
}
