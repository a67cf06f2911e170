//! Requests to a hub: redirects, the token, retries and limits.
//!
//! Redirects are followed here and not by the HTTP library, because the token must not leave the hub's own host, and because the
//! hub describes a file in the headers of the redirect.

use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ureq::http::{HeaderMap, Response, header};
use ureq::{Agent, Body, Timeout};

use crate::error::HubError;
use crate::settings::{Settings, Token};
use crate::tls;
use crate::url::{Origin, shown, target};

/// Number of attempts of a request that the network or the server fails.
pub(crate) const ATTEMPTS: u32 = 5;
/// Number of attempts to connect to a server that has not answered yet.
const FIRST_ATTEMPTS: u32 = 2;
/// Longest wait that a server may ask for.
const MAX_DELAY: Duration = Duration::from_secs(300);
/// Largest number of redirects of a request.
const MAX_REDIRECTS: usize = 10;
/// Longest duration of an answer that is read as a whole.
const MAX_ANSWER_TIME: Duration = Duration::from_secs(120);

/// Methods of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    Get,
    Head,
}

/// Redirects that are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Follow {
    /// All of them.
    Everywhere,
    /// Only those within the hub; one that leads elsewhere is the answer.
    WithinHub,
}

/// A failed attempt.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Another attempt would fail as well.
    Final(HubError),
    /// Another attempt may succeed, `after` the time that the server asks for.
    Passing { url: String, reason: String, after: Option<Duration> },
    /// There is no connection to the server.
    Unconnected { url: String, reason: String },
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        Self::Final(error)
    }
}

impl Failure {
    /// Returns a failure of the network or the server.
    pub(crate) fn passing(url: &str, reason: impl Into<String>) -> Self {
        Self::Passing { url: shown(url), reason: reason.into(), after: None }
    }
}

/// An answer without an error status, and the address that gave it.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) url: String,
    pub(crate) response: Response<Body>,
}

impl Answer {
    /// Returns a header as text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        text_of(self.response.headers(), name)
    }

    /// Reads the whole body.
    ///
    /// # Errors
    /// If it is longer than `limit` bytes, breaks off, or takes longer than [`MAX_ANSWER_TIME`].
    pub(crate) fn read_limited(self, limit: u64) -> Result<Vec<u8>, Failure> {
        let start = Instant::now();
        let mut reader = self.response.into_body().into_reader();
        let mut content = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        loop {
            let bytes = reader
                .read(&mut buffer)
                .map_err(|error| Failure::passing(&self.url, format!("the answer breaks off: {error}")))?;
            if bytes == 0 {
                return Ok(content);
            }
            content.extend_from_slice(&buffer[..bytes]);
            if content.len() as u64 > limit {
                let reason = format!("the answer is longer than the {limit} bytes that it may have");
                return Err(HubError::Answer { url: shown(&self.url), reason }.into());
            }
            if start.elapsed() > MAX_ANSWER_TIME {
                return Err(Failure::passing(
                    &self.url,
                    format!("the answer takes longer than {MAX_ANSWER_TIME:?}"),
                ));
            }
        }
    }
}

/// Returns a header as text.
fn text_of<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// Client of one hub.
#[derive(Debug)]
pub(crate) struct Client {
    agent: Agent,
    hub: Origin,
    token: Option<Token>,
    first_delay: Duration,
    has_tls: Result<(), &'static str>,
    /// True once the hub has answered.
    is_reached: AtomicBool,
}

impl Client {
    /// Returns a client with the settings' limits.
    ///
    /// # Errors
    /// If the endpoint is no address, or the file of certificates cannot be read.
    pub(crate) fn new(settings: &Settings) -> Result<Self, HubError> {
        let hub = Origin::of(&settings.endpoint).ok_or_else(|| HubError::Setting {
            variable: "HF_ENDPOINT",
            reason: format!("{} is no address; write https://HOST or http://HOST:PORT", settings.endpoint),
        })?;
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .accept_encoding("identity")
            .user_agent(concat!("lockstep/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(settings.timeout))
            .timeout_resolve(Some(settings.timeout))
            .timeout_recv_response(Some(settings.timeout))
            .timeout_per_read(Some(settings.timeout))
            .timeout_per_write(Some(settings.timeout));
        let tls = tls::configuration()?;
        let has_tls = tls.as_ref().map(|_| ()).map_err(|reason| *reason);
        if let Ok(tls) = tls {
            config = config.tls_config(tls);
        }
        let agent = config.build().new_agent();
        Ok(Self {
            agent,
            hub,
            token: settings.token.clone(),
            first_delay: settings.first_delay,
            has_tls,
            is_reached: AtomicBool::new(false),
        })
    }

    /// Returns true if requests carry a token.
    pub(crate) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Returns the attempts of one request. The first request to a server gives up early where there is no network.
    pub(crate) fn retries(&self) -> Retries {
        let connecting = if self.is_reached.load(Ordering::Relaxed) { ATTEMPTS } else { FIRST_ATTEMPTS };
        Retries { made: 0, connecting, delay: self.first_delay }
    }

    /// Sends a request until it succeeds or the attempts are used up. `answered` judges and reads the answer.
    ///
    /// # Errors
    /// The last failure.
    pub(crate) fn repeat<T>(
        &self,
        stop: &AtomicBool,
        note: &dyn Fn(&str),
        mut attempt: impl FnMut() -> Result<T, Failure>,
    ) -> Result<T, HubError> {
        let mut retries = self.retries();
        loop {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(failure) => retries.wait(failure, stop, note)?,
            }
        }
    }

    /// Sends a request once and follows redirects. The answer has any status.
    ///
    /// # Errors
    /// If there is no answer, or a redirect leads nowhere.
    pub(crate) fn send(
        &self,
        method: Method,
        url: &str,
        from_byte: u64,
        follow: Follow,
    ) -> Result<Answer, Failure> {
        let mut url = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let origin = Origin::of(&url);
            let within_hub = origin.as_ref() == Some(&self.hub);
            if let (Some(true), Err(reason)) = (origin.map(|origin| origin.is_encrypted()), self.has_tls) {
                return Err(HubError::NoTls(reason).into());
            }
            let mut request = match method {
                Method::Get => self.agent.get(&url),
                Method::Head => self.agent.head(&url),
            };
            if from_byte > 0 {
                request = request.header(header::RANGE, format!("bytes={from_byte}-"));
            }
            if let Some(token) = self.token.as_ref().filter(|_| within_hub) {
                request = request.header(header::AUTHORIZATION, token.bearer());
            }
            let response = request.call().map_err(|error| failure_of(&url, error))?;
            self.is_reached.store(true, Ordering::Relaxed);
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(Answer { url, response });
            }
            let location = text_of(response.headers(), "location");
            let next = location.and_then(|location| target(&url, location)).ok_or_else(|| {
                HubError::Answer { url: shown(&url), reason: "its redirect has no usable target".to_owned() }
            })?;
            if follow == Follow::WithinHub && Origin::of(&next).as_ref() != Some(&self.hub) {
                return Ok(Answer { url, response });
            }
            url = next;
        }
        Err(HubError::Answer {
            url: shown(&url),
            reason: format!("it redirects more than {MAX_REDIRECTS} times"),
        }
        .into())
    }
}

/// Returns a failure for an answer with a status that another attempt may change; `None` for all others.
pub(crate) fn passing_status(answer: &Answer) -> Option<Failure> {
    let status = answer.response.status().as_u16();
    if !matches!(status, 408 | 429 | 500..=599) {
        return None;
    }
    let after =
        answer.header("retry-after").and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
    let reason = format!("the server answers {}", answer.response.status());
    Some(Failure::Passing { url: shown(&answer.url), reason, after })
}

/// Attempts of a request, and the wait before the next one.
#[derive(Debug)]
pub(crate) struct Retries {
    made: u32,
    /// Number of attempts to connect.
    connecting: u32,
    delay: Duration,
}

impl Retries {
    /// Waits before the next attempt.
    ///
    /// # Errors
    /// The failure, if it is final, if the attempts are used up, or if `stop` is set.
    pub(crate) fn wait(
        &mut self,
        failure: Failure,
        stop: &AtomicBool,
        note: &dyn Fn(&str),
    ) -> Result<(), HubError> {
        let (url, reason, after, attempts) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Passing { url, reason, after } => (url, reason, after, ATTEMPTS),
            Failure::Unconnected { url, reason } => (url, reason, None, self.connecting),
        };
        self.made += 1;
        let delay = after.unwrap_or(self.delay).max(self.delay);
        if self.made >= attempts || stop.load(Ordering::Relaxed) {
            return Err(HubError::Unreachable { url, reason, attempts: self.made });
        }
        if delay > MAX_DELAY {
            let reason =
                format!("{reason}, and asks to wait for {} seconds; try again then", delay.as_secs());
            return Err(HubError::Unreachable { url, reason, attempts: self.made });
        }
        tracing::debug!(url, reason, ?delay, "another attempt");
        note(&format!("{reason}; next attempt in {:.1} s", delay.as_secs_f64()));
        self.delay = self.delay.saturating_mul(2);
        let end = Instant::now() + delay;
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            thread::sleep(left.min(Duration::from_millis(50)));
        }
        Ok(())
    }
}

/// Returns the failure of a request without an answer.
fn failure_of(url: &str, error: ureq::Error) -> Failure {
    use ureq::Error;
    let unconnected = |reason: String| Failure::Unconnected { url: shown(url), reason };
    match error {
        Error::HostNotFound => unconnected("the host is not known".to_owned()),
        Error::Timeout(Timeout::Resolve | Timeout::Connect) | Error::ConnectionFailed => {
            unconnected("the host does not answer".to_owned())
        }
        Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            unconnected(error.to_string())
        }
        Error::Timeout(_) => Failure::passing(url, "the server is silent"),
        Error::Http(_) | Error::BadUri(_) | Error::InvalidProxyUrl => {
            HubError::Answer { url: shown(url), reason: error.to_string() }.into()
        }
        Error::Rustls(error) => {
            let reason =
                format!("no trusted connection: {error}; SSL_CERT_FILE names other authorities to trust");
            HubError::Answer { url: shown(url), reason }.into()
        }
        error => Failure::passing(url, error.to_string()),
    }
}
