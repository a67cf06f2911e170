//! A run at a terminal: Ctrl-C reaches all processes of the terminal and ends all ranks with one checkpoint.

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::workshop::Workshop;

/// Ctrl-C, as a terminal's line discipline reads it.
const CTRL_C: &[u8] = b"\x03";
const LIMIT: Duration = Duration::from_secs(30);

/// A program with a controlling terminal of its own.
struct Terminal {
    keys: File,
    child: Child,
}

impl Terminal {
    /// Starts `lockstep ARGUMENTS` in the foreground of a new terminal; its output goes to the file `said`.
    fn start(workshop: &Workshop, arguments: &[&str]) -> Self {
        let keys = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&keys).unwrap();
        unlockpt(&keys).unwrap();
        let name: CString = ptsname(&keys, Vec::new()).unwrap();
        let screen: OwnedFd = open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
        // setsid of util-linux makes its input the controlling terminal.
        let child = Command::new("setsid")
            .args(["--ctty", "--wait", env!("CARGO_BIN_EXE_lockstep")])
            .args(arguments)
            .current_dir(workshop.path(""))
            .env("XDG_CACHE_HOME", workshop.path("cache"))
            .stdin(Stdio::from(screen))
            .stdout(Stdio::null())
            .stderr(File::create(workshop.path("said")).unwrap())
            .spawn()
            .unwrap();
        Self { keys: File::from(keys), child }
    }

    fn type_ctrl_c(&mut self) {
        self.keys.write_all(CTRL_C).unwrap();
    }

    /// Waits for the program and returns its exit code.
    fn finish(&mut self) -> Option<i32> {
        let begin = Instant::now();
        while begin.elapsed() < LIMIT {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.child.kill().unwrap();
        panic!("not done within {LIMIT:?}");
    }
}

fn said(workshop: &Workshop) -> String {
    String::from_utf8_lossy(&workshop.read("said")).into_owned()
}

#[test]
fn ctrl_c_at_a_terminal_saves_whatever_the_number_of_ranks_and_of_keystrokes() {
    for (ranks, keystrokes) in [(1, 1), (2, 1), (2, 3), (4, 2)] {
        let workshop = Workshop::new();
        let ranks = ranks.to_string();
        let endless = ["train", "run.toml", "--set", "train.steps=1000000", "--set", "checkpoint.every=0"];
        let mut terminal =
            Terminal::start(&workshop, &[&endless[..], &["--nproc-per-node", ranks.as_str()]].concat());
        let begin = Instant::now();
        while !said(&workshop).contains("\nstep ") {
            assert!(begin.elapsed() < LIMIT, "no step: {}", said(&workshop));
            std::thread::sleep(Duration::from_millis(3));
        }
        for _ in 0..keystrokes {
            terminal.type_ctrl_c();
        }
        assert_eq!(terminal.finish(), Some(75), "{ranks} ranks, {keystrokes} times: {}", said(&workshop));
        let saved = std::fs::read_dir(workshop.path("checkpoints")).unwrap();
        let saved = saved
            .filter(|entry| entry.as_ref().is_ok_and(|entry| entry.path().join("manifest.json").exists()));
        assert_eq!(saved.count(), 1, "{ranks} ranks: {}", said(&workshop));
    }
}
