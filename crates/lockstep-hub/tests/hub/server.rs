//! A hub on loopback: two listeners, of which one serves pages and the other large files, and faults on request.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use sha2::{Digest, Sha256};

/// Commit of the branch `main` at first.
pub(crate) const FIRST: &str = "1111111111111111111111111111111111111111";
/// Another commit.
pub(crate) const SECOND: &str = "2222222222222222222222222222222222222222";

/// A deviation from a good answer.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// A status with headers, such as `Retry-After: 0`.
    Status(u16, &'static str),
    /// The connection ends after so many bytes of the body.
    Cut(usize),
    /// No answer at all.
    Silence,
    /// The first byte of the body is changed.
    Damage,
    /// More bytes than were announced.
    Excess,
    /// Ranges are ignored.
    WholeOnly,
    /// A body instead of the file's.
    Body(&'static str),
    /// A redirect.
    Redirect(&'static str),
}

/// A request that arrived.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) is_head: bool,
    pub(crate) path: String,
    pub(crate) range: Option<u64>,
    pub(crate) authorization: Option<String>,
    /// True if it came to the listener for large files.
    pub(crate) is_of_store: bool,
}

/// Contents of a repository at a commit.
pub(crate) type Contents = BTreeMap<String, Vec<u8>>;

#[derive(Default)]
struct State {
    commits: BTreeMap<String, Contents>,
    refs: BTreeMap<String, String>,
    requests: Vec<Request>,
    /// Faults: part of the path, how often, and the deviation.
    faults: Vec<(String, usize, Fault)>,
    /// Wait before each body.
    delay: Option<Duration>,
    /// Files listed beside those that are there.
    extra: Vec<String>,
}

/// A running hub with the repository `org/tiny`.
pub(crate) struct Server {
    state: Arc<Mutex<State>>,
    pages: SocketAddr,
}

impl Server {
    pub(crate) fn start(contents: &[(&str, &[u8])]) -> Self {
        let mut state = State::default();
        let contents = contents.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
        state.commits.insert(FIRST.to_owned(), contents);
        state.refs.insert("main".to_owned(), FIRST.to_owned());
        let state = Arc::new(Mutex::new(state));
        let [pages, store] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let (of_pages, of_store) = (pages.local_addr().unwrap(), store.local_addr().unwrap());
        for (listener, is_of_store) in [(pages, false), (store, true)] {
            let state = Arc::clone(&state);
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let state = Arc::clone(&state);
                    thread::spawn(move || serve(stream, &state, of_store, is_of_store));
                }
            });
        }
        Self { state, pages: of_pages }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.pages)
    }

    /// Lets requests whose path contains `part` fail `times` times.
    pub(crate) fn fail(&self, part: &str, times: usize, fault: Fault) -> &Self {
        self.state.lock().unwrap().faults.push((part.to_owned(), times, fault));
        self
    }

    /// Adds a commit, and lets a revision name it.
    pub(crate) fn commit(&self, revision: &str, commit: &str, contents: &[(&str, &[u8])]) {
        let mut state = self.state.lock().unwrap();
        let contents = contents.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
        state.commits.insert(commit.to_owned(), contents);
        state.refs.insert(revision.to_owned(), commit.to_owned());
    }

    /// Lists a file that is not there.
    pub(crate) fn list(&self, name: &str) {
        self.state.lock().unwrap().extra.push(name.to_owned());
    }

    /// Makes bodies slow.
    pub(crate) fn delay(&self, delay: Duration) {
        self.state.lock().unwrap().delay = Some(delay);
    }

    /// Returns the requests since the last call.
    pub(crate) fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }

    /// Returns the requests for bodies of a file since the last call.
    pub(crate) fn bodies(&self, part: &str) -> Vec<Request> {
        let is_body = |request: &Request| !request.is_head && request.path.contains(part);
        self.requests().into_iter().filter(is_body).collect()
    }
}

/// Returns the hash of a file in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the name of a blob: a SHA-256 of large files, 40 digits of others.
pub(crate) fn etag(name: &str, bytes: &[u8]) -> String {
    let hash = sha256(bytes);
    if is_large(name) { hash } else { hash[..40].to_owned() }
}

fn is_large(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".gguf")
}

fn serve(stream: TcpStream, state: &Mutex<State>, store: SocketAddr, is_of_store: bool) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut stream = stream;
    loop {
        let request = read(&mut reader, is_of_store)?;
        let mut state = state.lock().unwrap();
        state.requests.push(request.clone());
        let fault = state.faults.iter_mut().find(|(part, times, fault)| {
            let is_of_body = !matches!(fault, Fault::Status(..) | Fault::Silence | Fault::Redirect(_));
            *times > 0 && request.path.contains(part.as_str()) && !(is_of_body && request.is_head)
        });
        let fault = fault.map(|(_, times, fault)| {
            *times -= 1;
            fault.clone()
        });
        let delay = state.delay;
        let (status, headers, body) = answer(&state, &request, store);
        drop(state);
        respond(&mut stream, &request, (status, headers, body), fault, delay)?;
    }
}

fn read(reader: &mut BufReader<TcpStream>, is_of_store: bool) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|bytes| *bytes > 0)?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut request =
        Request { is_head: method == "HEAD", path, range: None, authorization: None, is_of_store };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|bytes| *bytes > 0)?;
        let Some((name, value)) = line.trim().split_once(':') else { return Some(request) };
        match name.to_lowercase().as_str() {
            "range" => {
                request.range = value.trim().strip_prefix("bytes=")?.trim_end_matches('-').parse().ok();
            }
            "authorization" => request.authorization = Some(value.trim().to_owned()),
            _ => {}
        }
    }
}

/// Returns status, headers and body of the good answer.
fn answer(state: &State, request: &Request, store: SocketAddr) -> (u16, String, Vec<u8>) {
    let none = |code: &str| (404, format!("X-Error-Code: {code}\r\n"), Vec::new());
    let path = request.path.split('?').next().unwrap_or_default();
    if let Some(revision) = path.strip_prefix("/api/models/org/tiny/revision/") {
        let revision = revision.replace("%2F", "/");
        let commit = state.refs.get(&revision).unwrap_or(&revision);
        let Some(contents) = state.commits.get(commit) else { return none("RevisionNotFound") };
        return (200, String::new(), listing(commit, contents, &state.extra).into_bytes());
    }
    if let Some((_, file)) = path.split_once("/store/") {
        let (commit, name) = file.split_once('/').unwrap_or_default();
        return match state.commits.get(commit).and_then(|contents| contents.get(name)) {
            Some(bytes) => (200, String::new(), bytes.clone()),
            None => none("EntryNotFound"),
        };
    }
    let Some((commit, name)) = path.strip_prefix("/org/tiny/resolve/").and_then(|rest| rest.split_once('/'))
    else {
        return none("RepoNotFound");
    };
    let Some(bytes) = state.commits.get(commit).and_then(|contents| contents.get(name)) else {
        return none("EntryNotFound");
    };
    let etag = etag(name, bytes);
    if is_large(name) {
        let headers = format!(
            "X-Repo-Commit: {commit}\r\nX-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {}\r\n\
             Location: http://{store}/store/{commit}/{name}?signature=secret\r\n",
            bytes.len()
        );
        return (302, headers, Vec::new());
    }
    (200, format!("X-Repo-Commit: {commit}\r\nETag: \"{etag}\"\r\n"), bytes.clone())
}

fn listing(commit: &str, contents: &Contents, extra: &[String]) -> String {
    let file = |(name, bytes): (&String, &Vec<u8>)| {
        let lfs = match is_large(name) {
            true => format!(r#","lfs":{{"sha256":"{}","size":{}}}"#, sha256(bytes), bytes.len()),
            false => String::new(),
        };
        format!(r#"{{"rfilename":"{name}","size":{},"blobId":"{}"{lfs}}}"#, bytes.len(), &sha256(bytes)[..40])
    };
    let extra = extra.iter().map(|name| format!(r#"{{"rfilename":"{name}","size":1,"blobId":"0"}}"#));
    let files: Vec<String> = contents.iter().map(file).chain(extra).collect();
    format!(r#"{{"id":"org/tiny","sha":"{commit}","siblings":[{}]}}"#, files.join(","))
}

/// Sends an answer, or what a fault makes of it. `None` ends the connection.
fn respond(
    stream: &mut TcpStream,
    request: &Request,
    (mut status, mut headers, mut body): (u16, String, Vec<u8>),
    fault: Option<Fault>,
    delay: Option<Duration>,
) -> Option<()> {
    let mut sent = None;
    let mut takes_ranges = true;
    match fault {
        Some(Fault::Status(code, more)) => {
            (status, headers, body) = (code, format!("{more}\r\n"), Vec::new())
        }
        Some(Fault::Redirect(to)) => {
            (status, headers, body) = (302, format!("Location: {to}\r\n"), Vec::new())
        }
        Some(Fault::Silence) => {
            thread::sleep(Duration::from_secs(3));
            return None;
        }
        Some(Fault::Body(text)) => body = text.as_bytes().to_vec(),
        Some(Fault::Damage) => body[0] ^= 1,
        Some(Fault::Excess) => body.extend_from_slice(b"more than was announced"),
        Some(Fault::WholeOnly) => takes_ranges = false,
        Some(Fault::Cut(bytes)) => sent = Some(bytes),
        None => {}
    }
    if let Some(from) = request.range.filter(|_| takes_ranges && status == 200) {
        let (from, all) = (from as usize, body.len());
        if from >= all {
            (status, body) = (416, Vec::new());
        } else {
            (status, headers) = (206, format!("{headers}Content-Range: bytes {from}-{}/{all}\r\n", all - 1));
            body.drain(..from);
        }
    }
    let head = format!("HTTP/1.1 {status} x\r\n{headers}Content-Length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).ok()?;
    if request.is_head {
        return Some(());
    }
    if let Some(delay) = delay {
        thread::sleep(delay);
    }
    stream.write_all(&body[..sent.unwrap_or(body.len()).min(body.len())]).ok()?;
    sent.is_none().then_some(())
}
