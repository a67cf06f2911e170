//! Relay of the ranks' standard output and standard error to the terminal and to files.
//!
//! Lines of different ranks never mix: each is written whole, after the label of its rank. A thread of the launcher relays
//! them and buffers at most one line per stream. Everything that a rank wrote before it died is relayed.

use std::{
    fs::{self, File},
    io::{self, IsTerminal, Write},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread::{Builder, JoinHandle},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
};

use crate::LaunchError;

/// Maximum length of a line in bytes; longer lines are cut.
const LINE_BYTES: usize = 64 << 10;
/// Size of one read in bytes.
const READ_BYTES: usize = 16 << 10;
/// Maximum number of reads from a pipe at the end. A pipe holds less than this, unless another process still writes to it.
const LAST_READS: usize = (1 << 20) / READ_BYTES;
/// Escape sequence that clears the line of a progress bar.
const CLEAR_LINE: &str = "\r\x1b[K";

/// Destination of the ranks' output.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Output {
    /// The launcher's own output: rank 0's unchanged, that of the others line by line as `[rank 3] ...`.
    #[default]
    Labelled,
    /// Appended to `rank-00003.out` and `rank-00003.err` in this directory; the launcher shows rank 0's as well.
    Files(PathBuf),
    /// Destinations chosen for each rank and stream.
    RouterOutputs(Routing),
}

/// Destinations by local rank and stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routing {
    /// Directory of the files.
    pub dir: PathBuf,
    /// Role name in labels: `[trainer3]: ` for `trainer`, `[rank 3] ` without a role.
    pub role: Option<String>,
    /// Routes of standard output and standard error, in this order, of each rank of this machine.
    pub streams: Vec<[Route; 2]>,
}

/// Destinations of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// True if the launcher shows the stream.
    pub console: bool,
    /// True if the stream is appended to the rank's file.
    pub file: bool,
}

/// File extensions of the two streams.
const EXTENSIONS: [&str; 2] = ["out", "err"];

/// Local rank and world rank.
type Numbers = (usize, usize);

impl Output {
    fn routes(&self, (local, rank): Numbers) -> [Route; 2] {
        match self {
            Self::Labelled => [Route { console: true, file: false }; 2],
            Self::Files(_) => [Route { console: rank == 0, file: true }; 2],
            Self::RouterOutputs(routing) => {
                routing.streams.get(local).copied().unwrap_or([Route { console: true, file: false }; 2])
            }
        }
    }

    fn file(&self, rank: usize, extension: &str) -> Option<PathBuf> {
        match self {
            Self::Labelled => None,
            Self::Files(dir) | Self::RouterOutputs(Routing { dir, .. }) => Some(file(dir, rank, extension)),
        }
    }

    fn label(&self, rank: usize) -> Option<String> {
        (rank > 0).then(|| match self {
            Self::RouterOutputs(Routing { role: Some(role), .. }) => format!("[{role}{rank}]: "),
            _ => format!("[rank {rank}] "),
        })
    }

    /// Returns the path of a rank's standard error, if it is written to a file.
    pub(crate) fn error_log(&self, numbers: Numbers) -> Option<PathBuf> {
        self.file(numbers.1, EXTENSIONS[1]).filter(|_| self.routes(numbers)[1].file)
    }

    /// Returns true if the launcher shows a rank's standard error.
    pub(crate) fn shows_errors(&self, numbers: Numbers) -> bool {
        self.routes(numbers)[1].console
    }

    /// Redirects the output of a rank's process to its destinations.
    ///
    /// # Errors
    /// If a file cannot be opened.
    pub(crate) fn prepare(&self, numbers: Numbers, command: &mut Command) -> Result<(), LaunchError> {
        let target = |stream: usize| -> Result<Stdio, LaunchError> {
            let route = self.routes(numbers)[stream];
            Ok(match (route.console, self.file(numbers.1, EXTENSIONS[stream]).filter(|_| route.file)) {
                (false, None) => Stdio::null(),
                (false, Some(path)) => Stdio::from(open(path)?),
                // The progress bar is drawn directly on the terminal.
                (true, None) if numbers.1 == 0 => Stdio::inherit(),
                (true, _) => Stdio::piped(),
            })
        };
        command.stdout(target(0)?).stderr(target(1)?);
        Ok(())
    }

    /// Returns the streams to relay of a rank that [`Output::prepare`] was called for.
    ///
    /// # Errors
    /// If a file cannot be opened, or a pipe cannot be made non-blocking.
    pub(crate) fn streams(&self, numbers: Numbers, child: &mut Child) -> Result<Vec<Stream>, LaunchError> {
        let label = self.label(numbers.1);
        let routes = self.routes(numbers);
        let copy = |stream: usize| {
            let path = self.file(numbers.1, EXTENSIONS[stream]).filter(|_| routes[stream].file);
            path.map(open).transpose()
        };
        let mut streams = Vec::new();
        if let Some(pipe) = child.stdout.take() {
            streams.push(Stream::new(pipe.into(), label.clone(), Box::new(io::stdout()), copy(0)?)?);
        }
        if let Some(pipe) = child.stderr.take() {
            // Only rank 0 draws a progress bar, on the launcher's terminal.
            let is_drawn_on = io::stderr().is_terminal();
            let label = label.map(|label| if is_drawn_on { format!("{CLEAR_LINE}{label}") } else { label });
            streams.push(Stream::new(pipe.into(), label, Box::new(io::stderr()), copy(1)?)?);
        }
        Ok(streams)
    }
}

fn file(dir: &Path, rank: usize, extension: &str) -> PathBuf {
    dir.join(format!("rank-{rank:05}.{extension}"))
}

fn open(path: PathBuf) -> Result<File, LaunchError> {
    let made = path.parent().map_or(Ok(()), fs::create_dir_all);
    // The output of an earlier run may say why it ended.
    let opened = made.and_then(|()| File::options().append(true).create(true).open(&path));
    opened.map_err(|source| LaunchError::Log { path, source })
}

/// One of a rank's two output streams.
pub(crate) struct Stream {
    pipe: OwnedFd,
    /// Label before each line; without one, bytes pass through as they come.
    label: Option<String>,
    out: Box<dyn Write + Send>,
    copy: Option<File>,
    /// Start of a line that has not ended yet.
    line: Vec<u8>,
}

impl Stream {
    fn new(
        pipe: OwnedFd,
        label: Option<String>,
        out: Box<dyn Write + Send>,
        copy: Option<File>,
    ) -> Result<Self, LaunchError> {
        let flags = fcntl_getfl(&pipe).and_then(|flags| fcntl_setfl(&pipe, flags | OFlags::NONBLOCK));
        flags.map_err(|error| LaunchError::io("read the output of a rank")(error.into()))?;
        Ok(Self { pipe, label, out, copy, line: Vec::new() })
    }

    /// Relays the available bytes, in at most `reads` reads. Returns true if more may come.
    fn carry(&mut self, reads: usize) -> bool {
        let mut bytes = [0; READ_BYTES];
        for _ in 0..reads {
            match rustix::io::read(&self.pipe, &mut bytes) {
                Ok(0) => return false,
                Ok(count) => self.take(&bytes[..count]),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return true,
                Err(_) => return false,
            }
        }
        true
    }

    fn take(&mut self, bytes: &[u8]) {
        let Some(label) = &self.label else { return self.put(bytes) };
        let mut text = Vec::with_capacity(bytes.len() + 2 * label.len());
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(part);
            if part.ends_with(b"\n") || self.line.len() >= LINE_BYTES {
                text.extend_from_slice(label.as_bytes());
                text.append(&mut self.line);
                if !part.ends_with(b"\n") {
                    text.push(b'\n');
                }
            }
        }
        self.put(&text);
    }

    /// Flushes an unfinished line at the end of the stream.
    fn end(&mut self) {
        if !self.line.is_empty() {
            self.take(b"\n");
        }
    }

    /// Writes to all destinations. A closed terminal or a full disk must not end the run.
    fn put(&mut self, bytes: &[u8]) {
        let _ = self.out.write_all(bytes).and_then(|()| self.out.flush());
        if let Some(copy) = &mut self.copy {
            let _ = copy.write_all(bytes);
        }
    }
}

/// Thread that relays streams. Dropping it relays the remaining bytes and ends the thread.
#[derive(Debug)]
pub(crate) struct Relay {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    pub(crate) fn start(streams: Vec<Stream>) -> Result<Self, LaunchError> {
        let failed = LaunchError::io("start a thread");
        let start = || -> io::Result<Self> {
            let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
            let watched = Arc::clone(&stop);
            let thread = Builder::new()
                .name("lockstep-relay".to_owned())
                .spawn(move || carry_all(streams, &watched))?;
            Ok(Self { stop, thread: Some(thread) })
        };
        start().map_err(failed)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // A write fails only if the event counter is at its limit; this one is written once.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn carry_all(mut streams: Vec<Stream>, stop: &OwnedFd) {
    let mut is_last = false;
    while !streams.is_empty() && !is_last {
        let pipes = streams.iter().map(|stream| PollFd::new(&stream.pipe, PollFlags::IN));
        let mut polled: Vec<_> = pipes.chain([PollFd::new(stop, PollFlags::IN)]).collect();
        if poll(&mut polled, None).is_err() {
            continue;
        }
        let mut has_news: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        is_last = has_news.pop().unwrap_or(true);
        let mut news = has_news.into_iter();
        streams.retain_mut(|stream| {
            let has_news = news.next().unwrap_or(true);
            let is_open = if is_last { stream.carry(LAST_READS) } else { !has_news || stream.carry(1) };
            if is_last || !is_open {
                stream.end();
            }
            is_open
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Relays `parts`, each written at once, and returns the output.
    fn carried(label: Option<&str>, parts: &[&[u8]]) -> String {
        let (out, (read, write)) = (Shared::default(), io::pipe().unwrap());
        let stream = Stream::new(read.into(), label.map(str::to_owned), Box::new(out.clone()), None).unwrap();
        let relay = Relay::start(vec![stream]).unwrap();
        for part in parts {
            let mut rest = *part;
            while !rest.is_empty() {
                let count = rustix::io::write(&write, rest).unwrap();
                rest = &rest[count..];
            }
        }
        // The write end is still open, as when a rank has left a child process behind.
        drop(relay);
        drop(write);
        let text = out.0.lock().unwrap().clone();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn lines_are_whole_and_say_whose_they_are_and_the_last_one_is_not_lost() {
        assert_eq!(
            carried(Some("[1] "), &[b"one\ntw", b"o\n\nthree"]),
            "[1] one\n[1] two\n[1] \n[1] three\n"
        );
        assert_eq!(carried(Some("[1] "), &[]), "");
        assert_eq!(carried(None, &[b"one\ntw", b"o\r"]), "one\ntwo\r");
    }

    #[test]
    fn a_line_without_end_is_cut_and_nothing_of_it_is_lost() {
        let long = vec![b'x'; 5 * LINE_BYTES / 2];
        let text = carried(Some("> "), &[&long]);
        assert_eq!(text.matches('x').count(), long.len());
        let longest = text.lines().map(str::len).max().unwrap();
        assert!(
            (3..=4).contains(&text.lines().count()) && longest < LINE_BYTES + READ_BYTES + 3,
            "{longest}"
        );
    }
}
