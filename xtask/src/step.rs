//! Steps of developers' commands: a command line that is printed, timed, and ended when it hangs.

use std::env;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time limit on a step of CI; only a hang exceeds it.
pub(crate) const LIMIT: Duration = Duration::from_secs(25 * 60);

/// Time limit on a step that runs at the lowest priority beside others, which may leave it little of the processors.
pub(crate) const BACKGROUND_LIMIT: Duration = Duration::from_secs(75 * 60);

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
    let Some(status) = wait(&mut child, begin, limit).map_err(failed)? else {
        let _ = child.kill();
        return Err(too_long(command, limit));
    };
    judge(command, begin, status)
}

/// A command of this program that runs at the lowest priority beside other steps. Dropping it ends the command and its children.
pub(crate) struct Background {
    command: String,
    child: Child,
    /// Standard output and standard error.
    output: File,
    begin: Instant,
}

impl Background {
    /// Starts this program with `arguments`. Cargo would not start it while it builds other programs.
    pub(crate) fn start(arguments: &[&str]) -> Result<Self, String> {
        let command = format!("cargo xtask {}", arguments.join(" "));
        println!("== {command} (in the background)");
        let failed = |error: io::Error| format!("cannot start {command}: {error}");
        let output = tempfile::tempfile().map_err(failed)?;
        let (stdout, stderr) = (output.try_clone().map_err(failed)?, output.try_clone().map_err(failed)?);
        let child = Command::new("nice")
            .args(["-n", "19"])
            .arg(env::current_exe().map_err(failed)?)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        Ok(Self { command, child, output, begin: Instant::now() })
    }

    /// Waits for the end of the command, and prints its output.
    ///
    /// # Errors
    /// If the command fails, or takes longer than [`BACKGROUND_LIMIT`].
    pub(crate) fn finish(mut self) -> Result<(), String> {
        println!("== {} (from the background)", self.command);
        let failed = |error: io::Error| format!("cannot wait for a command in the background: {error}");
        let status = wait(&mut self.child, self.begin, BACKGROUND_LIMIT).map_err(failed)?;
        let mut output = Vec::new();
        self.output.rewind().and_then(|()| self.output.read_to_end(&mut output)).map_err(failed)?;
        print!("{}", String::from_utf8_lossy(&output));
        judge(&self.command, self.begin, status.ok_or_else(|| too_long(&self.command, BACKGROUND_LIMIT))?)
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let group = format!("-{}", self.child.id());
            let _ = Command::new("kill").args(["-s", "KILL", "--", &group]).status();
            let _ = self.child.wait();
        }
    }
}

/// Waits for the end of a command that began at `begin`; `None` if it takes longer than `limit`.
fn wait(child: &mut Child, begin: Instant, limit: Duration) -> io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if begin.elapsed() > limit {
            return Ok(None);
        }
        sleep(Duration::from_millis(50));
    }
}

/// Prints the time of a successful command, or returns an error.
fn judge(command: &str, begin: Instant, status: ExitStatus) -> Result<(), String> {
    if !status.success() {
        return Err(format!("failed: {command} ({status})"));
    }
    println!("== ok in {:.0} s", begin.elapsed().as_secs_f64());
    Ok(())
}

fn too_long(command: &str, limit: Duration) -> String {
    format!("failed: {command} took more than {} minutes", limit.as_secs() / 60)
}
