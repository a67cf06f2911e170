//! Finding and downloading of models, against a hub on loopback.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod downloads;
mod refusals;
mod server;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use lockstep_hub::{Hub, HubError, ModelName, Need, Progress, Settings, Silent, Token};
use server::Server;
use tempfile::TempDir;

/// Weights of the tiny model; long enough to be cut.
pub(crate) const WEIGHTS: &[u8] = &[7; 300_000];
/// Files of the tiny model.
pub(crate) const TINY: [(&str, &[u8]); 5] = [
    ("config.json", b"{}"),
    ("tokenizer.json", b"{\"model\": {}}"),
    ("model.safetensors", WEIGHTS),
    ("pytorch_model.bin", b"pickle"),
    ("README.md", b"text"),
];

/// A server and an empty cache.
pub(crate) struct Place {
    pub(crate) server: Server,
    directory: TempDir,
}

impl Place {
    pub(crate) fn new(files: &[(&str, &[u8])]) -> Self {
        Self { server: Server::start(files), directory: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn settings(&self) -> Settings {
        let mut settings = Settings::new(self.directory.path().join("hub"), &self.server.endpoint());
        settings.timeout = Duration::from_millis(500);
        settings.first_delay = Duration::from_millis(5);
        settings
    }

    pub(crate) fn with_token(&self) -> Hub {
        Hub::new(Settings { token: Token::new("hf_secret").unwrap(), ..self.settings() })
    }

    pub(crate) fn hub(&self) -> Hub {
        Hub::new(self.settings())
    }

    pub(crate) fn find(&self, name: &str) -> Result<PathBuf, HubError> {
        self.hub().find(&ModelName::parse(name).unwrap(), Need::Weights, &Silent)
    }

    /// Returns a path in the directory of the repository.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.directory.path().join("hub/models--org--tiny").join(path)
    }

    /// Returns the names in a directory of the repository, sorted.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = self.path(path).read_dir() else { return Vec::new() };
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// Asserts that a snapshot's file has contents.
pub(crate) fn expect_file(snapshot: &Path, name: &str, expected: &[u8]) {
    let bytes = std::fs::read(snapshot.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(
        bytes == expected,
        "{name} has {} bytes, not the {} that were served",
        bytes.len(),
        expected.len()
    );
}

/// Observer that keeps what it is told.
#[derive(Default)]
pub(crate) struct Watch {
    pub(crate) totals: Mutex<Vec<(String, u64)>>,
    pub(crate) bytes: Mutex<u64>,
    pub(crate) notes: Mutex<Vec<String>>,
}

impl Progress for Watch {
    fn begin(&self, task: &str, total_bytes: u64) {
        self.totals.lock().unwrap().push((task.to_owned(), total_bytes));
    }

    fn advance(&self, bytes: u64) {
        *self.bytes.lock().unwrap() += bytes;
    }

    fn finish(&self) {}

    fn note(&self, text: &str) {
        self.notes.lock().unwrap().push(text.to_owned());
    }
}
