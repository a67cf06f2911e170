//! Secret of a job on standard input, as a launcher that starts this command over ssh sends it. It stays out of arguments and of
//! the environment, and the end of that input ends this process.

use std::io::{BufRead, Read};
use std::sync::OnceLock;

use rustix::process::{Signal, getpid, kill_process};

use crate::exit::Failure;

/// Reads the secret from standard input. From then on the end of that input stops this process like SIGTERM.
pub(crate) fn read() -> Result<String, Failure> {
    static READ: OnceLock<String> = OnceLock::new();
    // Ranks that are restarted use the same secret.
    if let Some(secret) = READ.get() {
        return Ok(secret.clone());
    }
    let mut line = String::new();
    let read = std::io::stdin().lock().take(4096).read_line(&mut line);
    let secret = line.trim();
    // Hyphens of a code are not part of the secret; any line of at least 16 characters is accepted.
    if read.is_err() || secret.len() < 16 {
        return Err(Failure::configuration(
            "--secret-file -: standard input has no line of at least 16 characters",
        ));
    }
    std::thread::spawn(|| {
        let mut rest = [0; 256];
        while matches!(std::io::stdin().read(&mut rest), Ok(1..)) {}
        stop();
    });
    Ok(READ.get_or_init(|| secret.to_owned()).clone())
}

/// Requests a stop of this process: it saves and ends.
fn stop() {
    // The process exists and may signal itself.
    let _ = kill_process(getpid(), Signal::TERM);
}
