//! The HTTP server of a run: `GET /metrics` for Prometheus, and `GET /healthz` for liveness checks such as the probes of
//! Kubernetes.
//!
//! Rank 0 serves both. The first rank of every other machine serves `/healthz` alone, so that each pod can be probed.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use lockstep_config::RunConfig;

use crate::Error;

/// Initial capacity of the text of `/metrics`.
const TEXT_BYTES: usize = 8 << 10;
/// Longest time that a client may take to send its request or to read the answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest request that is read.
const REQUEST_BYTES: usize = 8 << 10;
/// Multiple of the slowest step after which a run without a step counts as stuck, though never before `parallel.timeout_s`.
/// Evaluations and saves run between steps.
const SLOWEST_STEPS: u32 = 20;

/// HTTP server in a thread of its own, which ends when the server is dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    has_ended: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

/// State from which requests are answered.
#[derive(Debug)]
struct State {
    /// The text of `/metrics`; empty on machines other than the first.
    metrics: String,
    /// Last step and the time of its end; before the first step, the time at which the server was started.
    step: u64,
    at: Instant,
    /// The longest time between two steps so far.
    slowest: Duration,
    /// Least time without a step after which the run counts as stuck.
    limit: Duration,
}

impl State {
    /// Returns the status line and the text of `/healthz`.
    fn health(&self) -> (&'static str, String) {
        let idle = self.at.elapsed();
        let text = format!("step {}, {:.0} s ago\n", self.step, idle.as_secs_f64());
        let limit = self.limit.max(self.slowest * SLOWEST_STEPS);
        (if idle > limit { "503 Service Unavailable" } else { "200 OK" }, text)
    }
}

impl Server {
    /// Opens the server at `metrics.prometheus`; `None` if that is not set.
    ///
    /// # Errors
    /// If the address cannot be listened on.
    pub fn open(config: &RunConfig) -> Result<Option<Self>, Error> {
        let limit = Duration::from_secs_f64(config.parallel.timeout_s);
        config.metrics.prometheus.as_deref().map(|address| Self::start(address, limit)).transpose()
    }

    fn start(address: &str, limit: Duration) -> Result<Self, Error> {
        let failed = |source| Error::Prometheus { address: address.to_owned(), source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        let address_bound = listener.local_addr().map_err(failed)?;
        let metrics = String::with_capacity(TEXT_BYTES);
        let (at, slowest) = (Instant::now(), Duration::ZERO);
        let state = Arc::new(Mutex::new(State { metrics, step: 0, at, slowest, limit }));
        let has_ended = Arc::new(AtomicBool::new(false));
        let (shown, ended) = (Arc::clone(&state), Arc::clone(&has_ended));
        let serve = move || {
            for stream in
                listener.incoming().map_while(|stream| (!ended.load(Ordering::Acquire)).then_some(stream))
            {
                // A client whose connection fails will ask again.
                let _ = stream.and_then(|stream| answer(stream, &shown));
            }
        };
        let thread =
            thread::Builder::new().name("lockstep-metrics".to_owned()).spawn(serve).map_err(failed)?;
        tracing::debug!(address = %address_bound, "metrics and health over HTTP");
        Ok(Self { address: address_bound, state, has_ended, thread: Some(thread) })
    }

    /// Address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Records the end of `step` and replaces the text of `/metrics`.
    pub fn show(&self, step: u64, metrics: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.step > 0 {
            state.slowest = state.slowest.max(state.at.elapsed());
        }
        (state.step, state.at) = (step, Instant::now());
        state.metrics.clear();
        state.metrics.push_str(metrics);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Release);
        // Wakes the thread, which waits for a connection.
        let is_woken = TcpStream::connect_timeout(&reachable(self.address), PATIENCE).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| is_woken) {
            let _ = thread.join();
        }
    }
}

/// Returns an address of this machine that reaches a socket bound to `address`; loopback if it is bound to all.
fn reachable(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(of) if of.ip().is_unspecified() => ([127, 0, 0, 1], of.port()).into(),
        SocketAddr::V6(of) if of.ip().is_unspecified() => (std::net::Ipv6Addr::LOCALHOST, of.port()).into(),
        address => address,
    }
}

/// Reads a request and answers it.
fn answer(mut stream: TcpStream, state: &Mutex<State>) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut request = Vec::new();
    let mut part = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut part)? {
            0 => return Ok(()),
            _ if request.len() > REQUEST_BYTES => return Ok(()),
            count => request.extend_from_slice(&part[..count]),
        }
    }
    let path = request.strip_prefix(b"GET ").and_then(|rest| rest.split(|byte| b" ?".contains(byte)).next());
    let (status, body) = {
        let state = state.lock().unwrap_or_else(PoisonError::into_inner);
        match path {
            Some(b"/healthz") => state.health(),
            Some(b"/metrics" | b"/") if state.step == 0 || !state.metrics.is_empty() => {
                ("200 OK", state.metrics.clone())
            }
            _ => {
                ("404 Not Found", "GET /metrics on the machine of rank 0, GET /healthz on each\n".to_owned())
            }
        }
    };
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )?;
    stream.flush()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the response to `GET path`, headers included.
    pub(crate) fn ask(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn health_is_lost_without_a_step_for_longer_than_the_limit_and_the_slowest_steps() {
        let server = Server::start("127.0.0.1:0", Duration::from_millis(200)).unwrap();
        let health = || ask(server.address(), "/healthz");
        assert!(health().starts_with("HTTP/1.1 200 OK"), "{}", health());
        server.show(7, "text");
        assert!(health().ends_with("step 7, 0 s ago\n"), "{}", health());
        thread::sleep(Duration::from_millis(300));
        assert!(health().starts_with("HTTP/1.1 503 "), "{}", health());
        // A step of 0.3 s raises the limit to twenty times that.
        server.show(8, "text");
        thread::sleep(Duration::from_millis(300));
        assert!(health().starts_with("HTTP/1.1 200 OK"), "{}", health());
    }

    #[test]
    fn machines_other_than_the_first_have_health_and_no_metrics() {
        let server = Server::start("127.0.0.1:0", PATIENCE).unwrap();
        server.show(1, "");
        assert!(ask(server.address(), "/metrics").starts_with("HTTP/1.1 404 "));
        assert!(ask(server.address(), "/healthz?x=1").starts_with("HTTP/1.1 200 "));
    }

    #[test]
    fn a_port_that_is_taken_is_an_error() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap().to_string();
        assert!(matches!(Server::start(&address, PATIENCE), Err(Error::Prometheus { .. })));
    }
}
