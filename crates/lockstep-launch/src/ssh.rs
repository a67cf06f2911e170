//! Commands on other machines, started by ssh.
//!
//! A host gets one command by `ssh -o BatchMode=yes`. The run's secret is sent over its standard input, never in its arguments.
//! The end of that input ends the command on the host, so no process has to be killed remotely.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use lockstep_comm::PairingCode;

use crate::LaunchError;
use crate::interrupt::Interrupt;

/// Exit code of ssh for its own failures.
const SSH_FAILED: i32 = 255;
/// Interval at which the remote commands are polled.
const LOOK: Duration = Duration::from_millis(50);
/// Time for a command to end after its standard input has ended, before its ssh is killed.
const PATIENCE: Duration = Duration::from_secs(300);

/// The command on another machine.
#[derive(Debug)]
pub struct Remote {
    host: String,
    child: Child,
    input: Option<ChildStdin>,
    code: Option<i32>,
}

impl Remote {
    /// Runs `line` on a host, with the secret as the first line of its input.
    ///
    /// # Errors
    /// If `program` cannot be started.
    pub fn connect(program: &str, host: &str, line: &str, secret: &PairingCode) -> Result<Self, LaunchError> {
        let mut command = Command::new(program);
        command.args(["-o", "BatchMode=yes", "--", host, line]).stdin(Stdio::piped());
        // Ctrl-C reaches this process alone, which ends the others in order.
        command.process_group(0);
        let mut child = command.spawn().map_err(|source| LaunchError::Ssh {
            program: program.to_owned(),
            host: host.to_owned(),
            source,
        })?;
        let mut input = child.stdin.take();
        if let Some(input) = &mut input {
            // A command that has already ended reports why by its exit code.
            let _ = writeln!(input, "{secret}").and_then(|()| input.flush());
        }
        Ok(Self { host: host.to_owned(), child, input, code: None })
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.input = None;
        if self.code.is_none() {
            // The process may have ended just now.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Waits for all commands; the first failure, or a signal, ends the others. Returns the exit code of the first
/// failure, or 0.
///
/// # Errors
/// If a host cannot be reached, if the program is not there, or if a command cannot be watched.
pub fn watch(mut remotes: Vec<Remote>, interrupt: &Interrupt) -> Result<i32, LaunchError> {
    let mut first = None;
    let mut last_moment = None;
    while remotes.iter().any(|remote| remote.code.is_none()) {
        for remote in remotes.iter_mut().filter(|remote| remote.code.is_none()) {
            let ended = remote.child.try_wait();
            let ended = ended.map_err(LaunchError::Remote)?;
            if let Some(status) = ended {
                let code = status.code().unwrap_or(SSH_FAILED);
                remote.code = Some(code);
                first = first.or((code != 0).then_some(code));
            }
        }
        if last_moment.is_none() && (first.is_some() || interrupt.is_requested()) {
            last_moment = Some(Instant::now() + PATIENCE);
            remotes.iter_mut().for_each(|remote| remote.input = None);
        }
        if last_moment.is_some_and(|moment| Instant::now() > moment) {
            break;
        }
        std::thread::sleep(LOOK);
    }
    // All hosts with the exit code of the first failure, in the order of the hostfile.
    let alike = remotes.iter().filter(|remote| remote.code == first).map(|remote| remote.host.as_str());
    let hosts: Vec<&str> = alike.collect();
    let (host, all) = (hosts.first().copied().unwrap_or_default(), hosts.join(", "));
    match first {
        None => Ok(0),
        Some(SSH_FAILED) => Err(LaunchError::Unreachable { host: host.to_owned(), all }),
        Some(126 | 127) => Err(LaunchError::NotInstalled { all }),
        Some(code) => Ok(code),
    }
}

/// Quotes an argument for a shell.
pub fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@%+".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}
