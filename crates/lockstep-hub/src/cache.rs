//! One repository in the cache of `huggingface_hub`: refs, snapshots, blobs, and lists of files.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::HubError;
use crate::listing::{
    CONFIGURATION, Files, INDEX, Listing, MAX_INDEX_BYTES, MAX_LISTING_BYTES, Need, SINGLE, chosen,
    gguf_parts, shards,
};
use crate::name::{MAIN, ModelName, is_commit, is_plain};

/// First line of a file that tells backup programs to leave a directory out.
const CACHE_TAG: &str =
    "Signature: 8a477f597d28d172789f06886806bc55\n# A cache of models; see https://bford.info/cachedir/\n";

/// Directory of a repository in the cache.
#[derive(Debug)]
pub(crate) struct Repository {
    cache: PathBuf,
    directory: PathBuf,
    folder: String,
}

/// List of a commit's files, in the format that `huggingface_hub` keeps below `trees`.
#[derive(Serialize, Deserialize)]
struct Tree {
    format_version: u32,
    files: Files,
}

impl Repository {
    pub(crate) fn new(cache: &Path, model: &ModelName) -> Self {
        let folder = format!("models--{}", model.repository().replace('/', "--"));
        Self { cache: cache.to_owned(), directory: cache.join(&folder), folder }
    }

    /// Returns the path of a blob.
    pub(crate) fn blob(&self, etag: &str) -> PathBuf {
        self.directory.join("blobs").join(etag)
    }

    /// Returns the path of a blob's lock.
    pub(crate) fn lock(&self, etag: &str) -> PathBuf {
        self.cache.join(".locks").join(&self.folder).join(format!("{etag}.lock"))
    }

    /// Returns the directory with the files of a commit.
    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.directory.join("snapshots").join(commit)
    }

    /// Returns the commit of a revision; without a revision that of the branch `main`, else the newest. `None` if there is none.
    pub(crate) fn commit_of(&self, revision: Option<&str>) -> Option<String> {
        let is_there = |commit: &str| is_plain(commit) && self.snapshot(commit).is_dir();
        if let Some(commit) = revision.filter(|revision| is_there(revision)) {
            return Some(commit.to_owned());
        }
        let name = self.directory.join("refs").join(revision.unwrap_or(MAIN));
        let commit = fs::read_to_string(name).unwrap_or_default();
        if is_there(commit.trim()) {
            return Some(commit.trim().to_owned());
        }
        if revision.is_some() {
            return None;
        }
        let entries = fs::read_dir(self.directory.join("snapshots")).ok()?.flatten();
        let newest = entries
            .filter(|entry| entry.path().is_dir())
            .max_by_key(|entry| entry.metadata().and_then(|metadata| metadata.modified()).ok())?;
        newest.file_name().into_string().ok()
    }

    /// Returns the needed files that a snapshot lacks, as far as the cache tells. Where no list of the repository's files is kept,
    /// a snapshot with a configuration and all weights counts as complete.
    pub(crate) fn missing(&self, commit: &str, model: &ModelName, need: Need) -> Vec<String> {
        let snapshot = self.snapshot(commit);
        let lacks = |name: &String| !snapshot.join(name).exists();
        let tree = self.tree(commit);
        let needed = match tree.as_ref().and_then(|files| chosen(model, need, files).ok()) {
            Some(needed) => needed,
            None => self.usual(commit, model, need),
        };
        let mut missing: Vec<String> = needed.iter().filter(|name| lacks(name)).cloned().collect();
        if needed.iter().any(|name| name == INDEX) && !missing.iter().any(|name| name == INDEX) {
            match read_limited(&snapshot.join(INDEX), MAX_INDEX_BYTES)
                .map_err(|error| error.to_string())
                .and_then(|index| shards(&index))
            {
                Ok(shards) => missing.extend(shards.into_iter().filter(lacks)),
                // A damaged index is fetched again.
                Err(_) => missing.push(INDEX.to_owned()),
            }
        }
        missing
    }

    /// Returns the files that a model usually has.
    fn usual(&self, commit: &str, model: &ModelName, need: Need) -> Vec<String> {
        if let Some(file) = model.file() {
            return gguf_parts(file);
        }
        let has_index = || {
            let snapshot = self.snapshot(commit);
            !snapshot.join(SINGLE).exists() && snapshot.join(INDEX).exists()
        };
        let weights = if has_index() { INDEX } else { SINGLE };
        let usual: &[&str] = match need {
            Need::Tokenizer => &["tokenizer.json"],
            Need::Configuration => &[CONFIGURATION],
            Need::Weights => &[CONFIGURATION, weights],
        };
        usual.iter().map(|name| (*name).to_owned()).collect()
    }

    /// Returns the list of a commit's files; `None` if none is kept, or it is of another format.
    fn tree(&self, commit: &str) -> Option<Files> {
        let text = read_limited(&self.tree_file(commit), MAX_LISTING_BYTES).ok()?;
        let tree: Tree = serde_json::from_slice(&text).ok()?;
        (tree.format_version == 1).then_some(tree.files)
    }

    fn tree_file(&self, commit: &str) -> PathBuf {
        self.directory.join("trees").join(format!("{commit}.json"))
    }

    /// Creates the directories and keeps the list of files.
    ///
    /// # Errors
    /// If the cache cannot be written.
    pub(crate) fn prepare(&self, listing: &Listing) -> Result<(), HubError> {
        for directory in [self.directory.join("blobs"), self.snapshot(&listing.commit)] {
            fs::create_dir_all(&directory).map_err(HubError::io("create", &directory))?;
        }
        let tag = self.cache.join("CACHEDIR.TAG");
        if !tag.exists() {
            // Only a hint to other programs.
            let _ = fs::write(&tag, CACHE_TAG);
        }
        // Other readers take every entry's size and hash for granted.
        if listing.files.values().all(|entry| entry.size.is_some() && entry.blob_id.is_some()) {
            let tree = Tree { format_version: 1, files: listing.files.clone() };
            let text = serde_json::to_vec(&tree)
                .map_err(|error| HubError::io("write", &self.directory)(error.into()))?;
            replace(&self.tree_file(&listing.commit), &text)?;
        }
        Ok(())
    }

    /// Makes `file` of a snapshot a relative link to its blob.
    ///
    /// # Errors
    /// If the link cannot be created.
    pub(crate) fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(file);
        let up = "../".repeat(2 + file.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{etag}"));
        if fs::read_link(&path).is_ok_and(|current| current == target) {
            return Ok(());
        }
        let failed = |error| HubError::io("link", &path)(error);
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(HubError::io("create", directory))?;
        }
        let temporary = temporary(&path);
        symlink(&target, &temporary).and_then(|()| fs::rename(&temporary, &path)).map_err(failed)
    }

    /// Lets a branch or tag name a commit.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn set_revision(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        let path = self.directory.join("refs").join(revision);
        if is_commit(revision) || fs::read_to_string(&path).is_ok_and(|current| current == commit) {
            return Ok(());
        }
        replace(&path, commit.as_bytes())
    }
}

/// Writes a file by way of a temporary one, so that readers see it whole or not at all.
fn replace(path: &Path, content: &[u8]) -> Result<(), HubError> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(HubError::io("create", directory))?;
    }
    let temporary = temporary(path);
    fs::write(&temporary, content)
        .and_then(|()| fs::rename(&temporary, path))
        .map_err(HubError::io("write", path))
}

/// Returns a name beside `path` that no other process or thread uses.
pub(crate) fn temporary(path: &Path) -> PathBuf {
    use std::sync::atomic::{AtomicU64, Ordering};
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!("{name}.{:x}-{count}.tmp", std::process::id()))
}

/// Reads a file of at most `limit` bytes.
pub(crate) fn read_limited(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(path)?.take(limit + 1).read_to_end(&mut content)?;
    if content.len() as u64 > limit {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it is longer than {limit} bytes")));
    }
    Ok(content)
}
