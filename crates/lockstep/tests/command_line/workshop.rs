//! A directory with a tiny run, commands in it, and assertions about their outcomes.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Time limit on any command of these tests; each takes well under a second.
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// Two layers of width 32 over bytes. The learning rate does not depend on the number of steps, so a run may resume with more of
/// them.
const RUN: &str = r#"[model]
preset = "llama-15m"
num_hidden_layers = 2
hidden_size = 32
intermediate_size = 64
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 64
[data]
train = ["text.txt"]
[train]
steps = 4
global_batch = 4
micro_batch = 2
seq_len = 16
threads = 1
eval_every = 0
[schedule]
kind = "constant"
warmup_steps = 1
[checkpoint]
every = 2
"#;

/// The directory in which the program runs.
pub(crate) struct Workshop {
    dir: tempfile::TempDir,
    commands: AtomicUsize,
}

impl Workshop {
    /// Returns a run that has not begun: `run.toml` and `text.txt`.
    pub(crate) fn new() -> Self {
        let workshop = Self { dir: tempfile::tempdir().unwrap(), commands: AtomicUsize::new(0) };
        workshop.write("run.toml", RUN);
        workshop.write("text.txt", "All ranks wait until the last gradient is reduced.\n".repeat(40));
        workshop
    }

    /// Returns a finished run: `checkpoints/step-00000002` and `-00000004`, and the last one exported to `hf`.
    pub(crate) fn trained() -> Self {
        let workshop = Self::new();
        workshop.run(&["train", "run.toml"]).succeeds();
        workshop.run(&["checkpoint", "export", "checkpoints/step-00000004", "--hf", "hf"]).succeeds();
        workshop
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    /// Reads a JSON file, modifies it with `change` and writes it back.
    pub(crate) fn edit_json(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut value = serde_json::from_slice(&self.read(name)).unwrap();
        change(&mut value);
        self.write(name, value.to_string());
    }

    /// Flips a bit in the middle of a file.
    pub(crate) fn flip_a_bit(&self, name: &str) {
        let mut bytes = self.read(name);
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        self.write(name, bytes);
    }

    /// Runs the program to its end.
    pub(crate) fn run(&self, arguments: &[&str]) -> Outcome {
        self.start(env!("CARGO_BIN_EXE_lockstep"), arguments).finish()
    }

    /// Runs `train run.toml` with these `--set` arguments.
    pub(crate) fn train(&self, settings: &[&str]) -> Outcome {
        let sets = settings.iter().flat_map(|setting| ["--set", setting]);
        self.run(&["train", "run.toml"].into_iter().chain(sets).collect::<Vec<_>>())
    }

    /// Starts any program in the directory, with caches there.
    pub(crate) fn start(&self, program: &str, arguments: &[&str]) -> Started {
        self.start_in(program, arguments, &[])
    }

    /// Starts a program as [`Workshop::start`] does, with additional environment variables.
    pub(crate) fn start_in(&self, program: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Started {
        let number = self.commands.fetch_add(1, Ordering::Relaxed);
        let stdout = self.path(&format!(".stdout-{number}"));
        let stderr = self.path(&format!(".stderr-{number}"));
        let child = Command::new(program)
            .args(arguments)
            .current_dir(self.dir.path())
            .env("XDG_CACHE_HOME", self.path("cache"))
            .env("RUST_BACKTRACE", "0")
            // No test leaves this machine.
            .env("HF_HUB_OFFLINE", "1")
            .env_remove("HF_HOME")
            .env_remove("HF_HUB_CACHE")
            .env_remove("LOCKSTEP_CPU_LEVEL")
            .env_remove("LOCKSTEP_LOG")
            .env_remove("LOCKSTEP_MACHINE")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(File::create(&stdout).unwrap())
            .stderr(File::create(&stderr).unwrap())
            .spawn()
            .unwrap();
        let command = format!("{} {}", program.rsplit('/').next().unwrap(), arguments.join(" "));
        Started { child, command, stdout, stderr }
    }
}

/// A running program.
pub(crate) struct Started {
    pub(crate) child: Child,
    command: String,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Started {
    /// Returns its standard error so far.
    pub(crate) fn stderr(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.stderr).unwrap()).into_owned()
    }

    /// Waits until `condition` holds.
    pub(crate) fn wait_until(&mut self, what: &str, condition: impl Fn(&Self) -> bool) {
        let begin = Instant::now();
        while !condition(self) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "{}: ended before {what}: {}", self.command, self.stderr());
            if begin.elapsed() > TIME_LIMIT {
                self.child.kill().unwrap();
                panic!("{}: no {what} within {TIME_LIMIT:?}: {}", self.command, self.stderr());
            }
            std::thread::sleep(Duration::from_millis(3));
        }
    }

    /// Waits for the program to end.
    pub(crate) fn finish(self) -> Outcome {
        self.finish_within(TIME_LIMIT)
    }

    /// Waits as [`Started::finish`] does, for commands that take longer.
    pub(crate) fn finish_within(mut self, limit: Duration) -> Outcome {
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if begin.elapsed() > limit {
                self.child.kill().unwrap();
                self.child.wait().unwrap();
                panic!("{}: not done within {limit:?}: {}", self.command, self.stderr());
            }
            std::thread::sleep(Duration::from_millis(3));
        };
        let stdout = String::from_utf8(fs::read(&self.stdout).unwrap()).expect("output is UTF-8");
        let outcome = Outcome { code: status.code(), stdout, stderr: self.stderr(), command: self.command };
        assert!(outcome.code.is_some(), "killed by a signal: {outcome:?}");
        for trace in ["panicked at", "stack backtrace", "RUST_BACKTRACE"] {
            assert!(!outcome.stderr.contains(trace), "a panic: {outcome:?}");
        }
        outcome
    }
}

/// Result of a program.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// The command; shown if a failed assertion prints the outcome.
    #[expect(dead_code, reason = "shown by Debug")]
    command: String,
}

impl Outcome {
    pub(crate) fn succeeds(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// Asserts that the program failed with `code` before any other output, with one message that contains `parts`.
    pub(crate) fn refuses(self, code: i32, parts: &[&str]) {
        assert!(self.stderr.starts_with("error: "), "the message comes first: {self:?}");
        self.fails(code, parts);
    }

    /// Asserts what [`Outcome::refuses`] does, but allows progress before the message.
    pub(crate) fn fails(self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stdout, "", "nothing on standard output: {self:?}");
        let messages = self.stderr.lines().filter(|line| line.starts_with("error: ")).count();
        assert_eq!(messages, 1, "one message: {self:?}");
        let message = &self.stderr[self.stderr.find("error: ").unwrap()..];
        for part in parts {
            assert!(message.contains(part), "the message says {part:?}: {self:?}");
        }
        // A message that fills the screen is not clear; those of clap and the lists of presets are the longest.
        assert!(message.len() < 2000, "a message of {} bytes: {self:?}", message.len());
    }

    /// Parses standard output, which is one JSON document.
    pub(crate) fn json(self) -> Value {
        let outcome = self.succeeds();
        serde_json::from_str(&outcome.stdout).unwrap_or_else(|error| panic!("{error}: {outcome:?}"))
    }
}
