//! Finds models in the cache, and downloads them into it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::blob::{Context, Remote, fetch, free_bytes};
use crate::cache::{Repository, read_limited};
use crate::client::{Answer, Client, Failure, Follow, Method, passing_status};
use crate::error::HubError;
use crate::listing::{
    Entry, Files, INDEX, Listing, MAX_INDEX_BYTES, MAX_LISTING_BYTES, MAX_SMALL_BYTES, Need, chosen, shards,
};
use crate::name::{MAIN, ModelName, is_hash, is_plain};
use crate::progress::Progress;
use crate::settings::Settings;
use crate::url::{escaped, escaped_path, shown};

/// Files that are downloaded at once.
const THREADS: usize = 4;

/// A hub of models and the cache of its files.
#[derive(Debug)]
pub struct Hub {
    settings: Settings,
}

impl Hub {
    /// Returns a hub with settings. Nothing is sent before a model is not in the cache.
    pub fn new(settings: Settings) -> Self {
        Self { settings }
    }

    /// Returns the settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the path of a model that the cache has all needed files of: its snapshot, or its GGUF file. `None` if files are
    /// missing. Sends nothing.
    pub fn cached(&self, model: &ModelName, need: Need) -> Option<PathBuf> {
        let repository = Repository::new(&self.settings.cache, model);
        let commit = repository.commit_of(model.revision())?;
        let is_complete = repository.missing(&commit, model, need).is_empty();
        is_complete.then(|| path_of(&repository, &commit, model))
    }

    /// Returns the path of a model: that in the cache if it is complete, else that of a download.
    ///
    /// # Errors
    /// If the cache lacks files and they cannot be downloaded, or downloads are forbidden.
    pub fn find(&self, model: &ModelName, need: Need, progress: &dyn Progress) -> Result<PathBuf, HubError> {
        match self.cached(model, need) {
            Some(path) => Ok(path),
            None => self.update(model, need, progress),
        }
    }

    /// Asks the hub for the newest commit of a model's revision, and downloads the files that are new.
    ///
    /// # Errors
    /// As [`find`](Self::find). An error leaves the cached commit of the revision in use.
    pub fn update(
        &self,
        model: &ModelName,
        need: Need,
        progress: &dyn Progress,
    ) -> Result<PathBuf, HubError> {
        let repository = Repository::new(&self.settings.cache, model);
        if self.settings.is_offline {
            return Err(self.offline(&repository, model, need));
        }
        let client = &Client::new(&self.settings)?;
        let download =
            Download { client, settings: &self.settings, repository: &repository, model, progress };
        let listing = download.listing()?;
        repository.prepare(&listing)?;
        let names = chosen(model, need, &listing.files)?;
        if names.iter().any(|name| name == INDEX) {
            // The index says which shards there are.
            download.files(&listing, &[INDEX.to_owned()])?;
            let path = repository.snapshot(&listing.commit).join(INDEX);
            let index = read_limited(&path, MAX_INDEX_BYTES).map_err(HubError::io("read", &path))?;
            let shards = shards(&index).map_err(|reason| HubError::Answer {
                url: download.page(),
                reason: format!("{INDEX}: {reason}"),
            })?;
            let rest = names.into_iter().filter(|name| name != INDEX);
            download.files(&listing, &rest.chain(shards).collect::<Vec<_>>())?;
        } else {
            download.files(&listing, &names)?;
        }
        // Last, so that the revision never names a commit without its files.
        repository.set_revision(model.revision().unwrap_or(MAIN), &listing.commit)?;
        Ok(path_of(&repository, &listing.commit, model))
    }

    fn offline(&self, repository: &Repository, model: &ModelName, need: Need) -> HubError {
        let missing = match repository.commit_of(model.revision()) {
            Some(commit) => repository.missing(&commit, model, need).join(", "),
            None => "all of it".to_owned(),
        };
        let missing = if missing.is_empty() { "the newest commit".to_owned() } else { missing };
        HubError::Offline { model: model.to_string(), missing, cache: self.settings.cache.clone() }
    }
}

/// Returns the path by which a model is opened.
fn path_of(repository: &Repository, commit: &str, model: &ModelName) -> PathBuf {
    let snapshot = repository.snapshot(commit);
    model.file().map_or(snapshot.clone(), |file| snapshot.join(file))
}

/// A download of one model.
struct Download<'d> {
    client: &'d Client,
    settings: &'d Settings,
    repository: &'d Repository,
    model: &'d ModelName,
    progress: &'d dyn Progress,
}

impl Download<'_> {
    /// Returns the address of the repository's page.
    fn page(&self) -> String {
        format!("{}/{}", self.settings.endpoint, self.model.repository())
    }

    /// Returns the commit of the revision and its files.
    fn listing(&self) -> Result<Listing, HubError> {
        let (endpoint, repository) = (&self.settings.endpoint, self.model.repository());
        let revision = escaped(self.model.revision().unwrap_or(MAIN));
        let url = format!("{endpoint}/api/models/{repository}/revision/{revision}?blobs=true");
        let note = |text: &str| self.progress.note(text);
        self.client.repeat(&AtomicBool::new(false), &note, || {
            let answer = self.client.send(Method::Get, &url, 0, Follow::WithinHub)?;
            self.expect_success(&answer, None)?;
            let body = answer.read_limited(MAX_LISTING_BYTES)?;
            let listing =
                Listing::parse(&body).map_err(|reason| HubError::Answer { url: shown(&url), reason })?;
            Ok(listing)
        })
    }

    /// Downloads files of a commit, several at once, and links them into the snapshot.
    fn files(&self, listing: &Listing, names: &[String]) -> Result<(), HubError> {
        let snapshot = self.repository.snapshot(&listing.commit);
        let names: Vec<&String> = names.iter().filter(|name| !snapshot.join(name).exists()).collect();
        if names.is_empty() {
            return Ok(());
        }
        let bytes = self.check_space(&listing.files, &names)?;
        let task = match names.as_slice() {
            [one] => format!("{} {one}", self.model),
            several => format!("{} ({} files)", self.model, several.len()),
        };
        self.progress.begin(&task, bytes);
        let (next, stop, failed) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(None));
        let work = || {
            while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                if let Err(error) = self.file(listing, name, &stop) {
                    // The first error is the cause of the others.
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    stop.store(true, Ordering::Relaxed);
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..THREADS.min(names.len()) {
                scope.spawn(work);
            }
        });
        self.progress.finish();
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Returns the bytes of the files, as far as they are known.
    ///
    /// # Errors
    /// If the disk has less space.
    fn check_space(&self, files: &Files, names: &[&String]) -> Result<u64, HubError> {
        let size =
            |name: &&String| files.get(*name).and_then(|entry| entry.lfs_size.or(entry.size)).unwrap_or(0);
        let bytes: u64 = names.iter().map(size).fold(0, u64::saturating_add);
        let blobs = self.repository.blob("");
        // Parts and blobs that are there need no space; they are subtracted only where the space seems short.
        match free_bytes(&blobs) {
            Some(free) if free < bytes => {
                let there = names.iter().map(|name| self.bytes_there(files.get(*name))).sum();
                let needed = bytes.saturating_sub(there);
                if free < needed {
                    return Err(HubError::DiskFull { path: blobs, needed, free });
                }
                Ok(bytes)
            }
            _ => Ok(bytes),
        }
    }

    /// Returns the bytes of a file that are on the disk.
    fn bytes_there(&self, entry: Option<&Entry>) -> u64 {
        let length = |etag: &str| {
            let blob = self.repository.blob(etag);
            let part = self.repository.blob(&format!("{etag}.incomplete"));
            blob.metadata().or_else(|_| part.metadata()).map_or(0, |metadata| metadata.len())
        };
        let etag = entry.and_then(|entry| entry.lfs_sha256.as_deref().or(entry.blob_id.as_deref()));
        etag.filter(|etag| is_plain(etag)).map_or(0, length)
    }

    /// Downloads one file and links it into the snapshot.
    fn file(&self, listing: &Listing, name: &str, stop: &AtomicBool) -> Result<(), HubError> {
        let note = |text: &str| self.progress.note(&format!("{name}: {text}"));
        let remote = self.client.repeat(stop, &note, || self.describe(listing, name))?;
        let context =
            Context { client: self.client, repository: self.repository, progress: self.progress, stop };
        fetch(&context, &remote)?;
        if self.repository.blob(&remote.etag).exists() {
            self.repository.link(&listing.commit, name, &remote.etag)?;
        }
        Ok(())
    }

    /// Asks the hub for the size and the hash of a file.
    fn describe(&self, listing: &Listing, name: &str) -> Result<Remote, Failure> {
        let (endpoint, repository) = (&self.settings.endpoint, self.model.repository());
        let url = format!("{endpoint}/{repository}/resolve/{}/{}", listing.commit, escaped_path(name));
        let answer = self.client.send(Method::Head, &url, 0, Follow::WithinHub)?;
        if !answer.response.status().is_redirection() {
            self.expect_success(&answer, Some(name))?;
        }
        let deviation = |reason: String| HubError::Answer { url: shown(&url), reason };
        if let Some(commit) = answer.header("x-repo-commit").filter(|commit| *commit != listing.commit) {
            let commit: String = commit.chars().take(50).collect();
            return Err(deviation(format!(
                "it belongs to the commit {commit:?}, not to the one that was asked for"
            ))
            .into());
        }
        let etag = answer.header("x-linked-etag").or(answer.header("etag"));
        let etag = etag.map(|etag| etag.trim().trim_start_matches("W/").trim_matches('"'));
        let etag = etag.filter(|etag| is_plain(etag) && !etag.contains('+')).ok_or_else(|| {
            deviation(
                "its answer has no usable ETag; HF_ENDPOINT must name a hub or a mirror of one".to_owned(),
            )
        })?;
        let entry = listing.files.get(name).cloned().unwrap_or_default();
        let number = |text: Option<&str>| text.and_then(|text| text.trim().parse::<u64>().ok());
        let length =
            number(answer.header("content-length")).filter(|_| answer.response.status().is_success());
        let size = number(answer.header("x-linked-size")).or(entry.lfs_size).or(length).or(entry.size);
        let size =
            size.ok_or_else(|| deviation("its answer does not tell the size of the file".to_owned()))?;
        let is_weights = [".safetensors", ".gguf"].iter().any(|ending| name.ends_with(ending));
        if !is_weights && size > MAX_SMALL_BYTES {
            let reason =
                format!("{name} has {size} bytes; files other than weights may have {MAX_SMALL_BYTES}");
            return Err(deviation(reason).into());
        }
        let sha256 = if is_hash(etag, 64) { Some(etag.to_owned()) } else { entry.lfs_sha256 };
        Ok(Remote {
            model: self.model.to_string(),
            file: name.to_owned(),
            url: url.clone(),
            etag: etag.to_owned(),
            size,
            sha256,
        })
    }

    /// Explains an answer with an error status.
    fn expect_success(&self, answer: &Answer, file: Option<&str>) -> Result<(), Failure> {
        if let Some(failure) = passing_status(answer) {
            return Err(failure);
        }
        let status = answer.response.status();
        if status.is_success() {
            return Ok(());
        }
        let (model, endpoint) = (self.model.to_string(), self.settings.endpoint.clone());
        let code = answer.header("x-error-code").unwrap_or_default();
        let error = match (status.as_u16(), code) {
            (401 | 403, "GatedRepo") => {
                let page = self.page();
                let next = match self.client.has_token() {
                    true => {
                        format!("accept the conditions of the model at {page}, with the account of the token")
                    }
                    false => format!(
                        "accept the conditions of the model at {page}, and set HF_TOKEN to a token of that account"
                    ),
                };
                HubError::Refused { model, endpoint, status: status.as_u16(), next }
            }
            (401, _) => {
                let next = match self.client.has_token() {
                    true => {
                        "the repository does not exist, or the token (HF_TOKEN, or the file of `hf auth login`) is wrong or may not read it"
                    }
                    false => {
                        "the repository does not exist, or is private: check its name, or set HF_TOKEN to a token that may read it"
                    }
                };
                HubError::Refused { model, endpoint, status: 401, next: next.to_owned() }
            }
            (403, _) => {
                let next = format!("check at {} that the account of HF_TOKEN may read it", self.page());
                HubError::Refused { model, endpoint, status: 403, next }
            }
            (404, "RevisionNotFound") => {
                let what = format!("revision ({})", self.model.revision().unwrap_or(MAIN));
                HubError::NotFound {
                    model,
                    what,
                    endpoint,
                    hint: "; give a branch, a tag or a commit after the @",
                }
            }
            (404, _) => {
                let what = file.map_or("repository".to_owned(), |file| format!("file ({file})"));
                HubError::NotFound { model, what, endpoint, hint: "; check the name" }
            }
            _ => HubError::Answer { url: shown(&answer.url), reason: format!("the server answers {status}") },
        };
        Err(error.into())
    }
}
