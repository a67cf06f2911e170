//! Steps of developers' commands: a command line that is printed, timed, and ended when it hangs.

use std::io;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time limit on a step of CI; only a hang exceeds it.
pub(crate) const LIMIT: Duration = Duration::from_secs(25 * 60);

/// Runs a command line whose words contain no spaces.
pub(crate) fn run(command: &str, environment: &[(&str, &str)]) -> Result<(), String> {
    run_within(LIMIT, command, environment)
}

/// Runs a command line whose words contain no spaces; fails if it takes longer than `limit`.
pub(crate) fn run_within(limit: Duration, command: &str, environment: &[(&str, &str)]) -> Result<(), String> {
    println!("== {command}");
    let begin = Instant::now();
    let mut words = command.split_whitespace();
    let program = words.next().unwrap_or_default();
    let failed = |error: io::Error| format!("cannot run {program}: {error}");
    let mut child =
        Command::new(program).args(words).envs(environment.iter().copied()).spawn().map_err(failed)?;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            break status;
        }
        if begin.elapsed() > limit {
            let _ = child.kill();
            return Err(format!("failed: {command} took more than {} minutes", limit.as_secs() / 60));
        }
        sleep(Duration::from_millis(50));
    };
    if !status.success() {
        return Err(format!("failed: {command} ({status})"));
    }
    println!("== ok in {:.0} s", begin.elapsed().as_secs_f64());
    Ok(())
}
