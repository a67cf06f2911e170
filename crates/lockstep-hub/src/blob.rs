//! Download of one file into its blob: resumed where it was cut off, limited to its announced size, and verified.
//!
//! Files with a SHA-256 arrive in `ETAG.incomplete`, which a later process continues. Files without one are small; they arrive in a
//! file of this process alone, since nothing would tell a part that another program wrote wrongly.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use sha2::{Digest, Sha256};

use crate::cache::{Repository, temporary};
use crate::client::{Answer, Client, Failure, Follow, Method, passing_status};
use crate::error::HubError;
use crate::lock::Lock;
use crate::progress::Progress;
use crate::url::shown;

/// Size of the pieces that are read and hashed.
const PIECE_BYTES: usize = 256 << 10;
/// Largest number of requests for one file, however much each of them brings.
const MAX_REQUESTS: u32 = 10_000;

/// A file on the hub.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    /// Name of the model, for messages.
    pub(crate) model: String,
    /// Path in the repository.
    pub(crate) file: String,
    /// Address of the contents.
    pub(crate) url: String,
    /// Name of the blob.
    pub(crate) etag: String,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Hash of the contents, of large files.
    pub(crate) sha256: Option<String>,
}

/// Surroundings of a download.
pub(crate) struct Context<'c> {
    pub(crate) client: &'c Client,
    pub(crate) repository: &'c Repository,
    pub(crate) progress: &'c dyn Progress,
    /// Set when another file has failed.
    pub(crate) stop: &'c AtomicBool,
}

/// A file that is being written, and the hash of what it has.
struct Partial {
    path: PathBuf,
    file: File,
    bytes: u64,
    hash: Sha256,
}

/// Downloads a file unless its blob is there; other processes that want the same wait.
///
/// # Errors
/// If the download fails, or its contents are wrong twice.
pub(crate) fn fetch(context: &Context<'_>, remote: &Remote) -> Result<(), HubError> {
    let blob = context.repository.blob(&remote.etag);
    if blob.exists() {
        context.progress.advance(remote.size);
        return Ok(());
    }
    let note = |text: &str| context.progress.note(text);
    let Some(_lock) = Lock::take(&context.repository.lock(&remote.etag), context.stop, &note)? else {
        return Ok(());
    };
    if blob.exists() {
        context.progress.advance(remote.size);
        return Ok(());
    }
    let path = match remote.sha256 {
        Some(_) => blob.with_file_name(format!("{}.incomplete", remote.etag)),
        None => temporary(&blob).with_extension("incomplete"),
    };
    let mut partial = Partial::open(path, remote.size)?;
    context.progress.advance(partial.bytes);
    let result = complete(context, remote, &mut partial);
    match result {
        Ok(true) => {
            partial.file.sync_all().map_err(HubError::io("write", &partial.path))?;
            fs::rename(&partial.path, &blob).map_err(HubError::io("name", &blob))
        }
        // Parts of files without a hash are not continued by anybody.
        other => {
            if remote.sha256.is_none() {
                let _ = fs::remove_file(&partial.path);
            }
            other.map(|_| ())
        }
    }
}

/// Downloads the rest of a file and verifies all of it; false if `stop` was set.
fn complete(context: &Context<'_>, remote: &Remote, partial: &mut Partial) -> Result<bool, HubError> {
    for is_last in [false, true] {
        if !receive(context, remote, partial)? {
            return Ok(false);
        }
        let Some(announced) = &remote.sha256 else { return Ok(true) };
        let found = partial.found();
        if found == *announced {
            return Ok(true);
        }
        partial.restart(remote.size)?;
        if is_last {
            let _ = fs::remove_file(&partial.path);
            let (model, file) = (remote.model.clone(), remote.file.clone());
            return Err(HubError::Damaged { model, file, announced: announced.clone(), found });
        }
        context.progress.note(&format!("{} arrived damaged; it is fetched again", remote.file));
    }
    Ok(false)
}

/// Receives bytes until the file has its size, by as many requests as that takes; false if `stop` was set.
fn receive(context: &Context<'_>, remote: &Remote, partial: &mut Partial) -> Result<bool, HubError> {
    let mut retries = context.client.retries();
    let mut most = partial.bytes;
    for _ in 0..MAX_REQUESTS {
        if context.stop.load(Ordering::Relaxed) {
            return Ok(false);
        }
        if partial.bytes == remote.size {
            return Ok(true);
        }
        if let Err(failure) = request(context, remote, partial) {
            // Attempts count from the last one that brought new bytes.
            if partial.bytes > most {
                most = partial.bytes;
                retries = context.client.retries();
            }
            retries.wait(failure, context.stop, &|text| {
                context.progress.note(&format!("{}: {text}", remote.file))
            })?;
        }
    }
    let reason = "the connection breaks again and again".to_owned();
    Err(HubError::Unreachable { url: shown(&remote.url), reason, attempts: MAX_REQUESTS })
}

/// Sends one request for the rest of a file, and writes what arrives.
fn request(context: &Context<'_>, remote: &Remote, partial: &mut Partial) -> Result<(), Failure> {
    let answer = context.client.send(Method::Get, &remote.url, partial.bytes, Follow::Everywhere)?;
    if let Some(failure) = passing_status(&answer) {
        return Err(failure);
    }
    let status = answer.response.status().as_u16();
    let starts_at = match status {
        200 => 0,
        206 => first_byte(&answer).unwrap_or(u64::MAX),
        // What is there does not belong to this file.
        416 => {
            partial.restart(remote.size)?;
            return Err(Failure::passing(&remote.url, "the server has no such part of the file"));
        }
        // Signed addresses expire; the next request gets a new one.
        403 if answer.url != remote.url => {
            return Err(Failure::passing(&answer.url, "the server answers 403 Forbidden"));
        }
        _ => {
            let reason = format!("the server answers {}", answer.response.status());
            return Err(HubError::Answer { url: shown(&answer.url), reason }.into());
        }
    };
    if starts_at == 0 && partial.bytes > 0 {
        partial.restart(remote.size)?;
    }
    if starts_at != partial.bytes {
        let reason = "the server sends another part of the file than was asked for".to_owned();
        return Err(HubError::Answer { url: shown(&answer.url), reason }.into());
    }
    let url = answer.url;
    let mut reader = answer.response.into_body().into_reader();
    let mut piece = vec![0; PIECE_BYTES];
    while !context.stop.load(Ordering::Relaxed) {
        let bytes = reader.read(&mut piece).map_err(|error| {
            Failure::passing(&url, format!("the connection breaks after {} bytes: {error}", partial.bytes))
        })?;
        if bytes == 0 {
            break;
        }
        if partial.bytes + bytes as u64 > remote.size {
            partial.restart(remote.size)?;
            let reason =
                format!("{} is longer than the {} bytes that the hub announced", remote.file, remote.size);
            return Err(HubError::Answer { url: shown(&url), reason }.into());
        }
        partial.append(&piece[..bytes], remote.size)?;
        context.progress.advance(bytes as u64);
    }
    if partial.bytes < remote.size && !context.stop.load(Ordering::Relaxed) {
        return Err(Failure::passing(
            &url,
            format!("the connection ends after {} of {} bytes", partial.bytes, remote.size),
        ));
    }
    Ok(())
}

/// Returns the first byte of a partial answer: 5 of `bytes 5-9/10`.
fn first_byte(answer: &Answer) -> Option<u64> {
    answer.header("content-range")?.trim().strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok()
}

impl Partial {
    /// Opens a file and hashes what an earlier process has written.
    fn open(path: PathBuf, size: u64) -> Result<Self, HubError> {
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let file = file.map_err(HubError::io("create", &path))?;
        let mut partial = Self { path, file, bytes: 0, hash: Sha256::new() };
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let bytes = partial.file.read(&mut piece).map_err(HubError::io("read", &partial.path))?;
            if bytes == 0 {
                break;
            }
            partial.hash.update(&piece[..bytes]);
            partial.bytes += bytes as u64;
            if partial.bytes > size {
                partial.restart(size)?;
                break;
            }
        }
        Ok(partial)
    }

    /// Empties the file.
    fn restart(&mut self, size: u64) -> Result<(), HubError> {
        (self.bytes, self.hash) = (0, Sha256::new());
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map(|_| ()).map_err(|error| write_error(&self.path, size, error))
    }

    fn append(&mut self, piece: &[u8], size: u64) -> Result<(), HubError> {
        let left = size - self.bytes;
        self.file.write_all(piece).map_err(|error| write_error(&self.path, left, error))?;
        self.hash.update(piece);
        self.bytes += piece.len() as u64;
        Ok(())
    }

    /// Returns the hash of the contents in hexadecimal.
    fn found(&self) -> String {
        self.hash.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Returns the error of a failed write; a full disk is told apart.
fn write_error(path: &Path, needed: u64, error: io::Error) -> HubError {
    let directory = path.parent().unwrap_or(path);
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => HubError::DiskFull {
            path: directory.to_owned(),
            needed,
            free: free_bytes(directory).unwrap_or(0),
        },
        _ => HubError::io("write", path)(error),
    }
}

/// Returns the bytes that are free on the disk of a directory; `None` if the file system does not tell.
pub(crate) fn free_bytes(directory: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(directory).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}
