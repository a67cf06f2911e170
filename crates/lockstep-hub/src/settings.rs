//! Settings of the hub, from the environment variables of `huggingface_hub`.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::HubError;

/// Address of the hub if `HF_ENDPOINT` is not set.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// Longest silence of a server if `HF_HUB_DOWNLOAD_TIMEOUT` is not set.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// An access token. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Returns the token in a text; `None` if the text is blank.
    ///
    /// # Errors
    /// If it has characters that no token has. The message does not contain it.
    pub fn new(text: &str) -> Result<Option<Self>, HubError> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(None);
        }
        if !text.chars().all(|c| c.is_ascii_graphic()) {
            let reason =
                "the token contains blanks or control characters; write it again, on one line".to_owned();
            return Err(HubError::Setting { variable: "HF_TOKEN", reason });
        }
        Ok(Some(Self(text.to_owned())))
    }

    /// Returns the value of the header `Authorization`.
    pub(crate) fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token(..)")
    }
}

/// Settings of a [`Hub`](crate::Hub).
#[derive(Debug, Clone)]
pub struct Settings {
    /// Address of the hub, without a slash at its end.
    pub endpoint: String,
    /// Directory of the cache.
    pub cache: PathBuf,
    /// Access token, which is sent to the hub's own host alone.
    pub token: Option<Token>,
    /// True if all traffic is forbidden.
    pub is_offline: bool,
    /// Longest silence of a server.
    pub timeout: Duration,
    /// Wait before the first retry; each further wait is twice as long.
    pub first_delay: Duration,
}

impl Settings {
    /// Returns settings for a cache and a hub, without a token.
    pub fn new(cache: PathBuf, endpoint: &str) -> Self {
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache,
            token: None,
            is_offline: false,
            timeout: DEFAULT_TIMEOUT,
            first_delay: Duration::from_secs(1),
        }
    }

    /// Reads the settings from the environment.
    ///
    /// # Errors
    /// If a variable has an unusable value.
    pub fn from_environment() -> Result<Self, HubError> {
        Self::from_variables(&|name| std::env::var_os(name))
    }

    /// Reads the settings from variables.
    ///
    /// # Errors
    /// As [`from_environment`](Self::from_environment).
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| set(name).map(|value| value.to_string_lossy().into_owned());
        let is_true = |name: &str| {
            text(name)
                .is_some_and(|value| ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str()))
        };
        let user_home = set("HOME").map(PathBuf::from);
        let path = |name: &str| {
            let value = PathBuf::from(set(name)?);
            // As the shell would, where the value was quoted.
            match (value.strip_prefix("~"), &user_home) {
                (Ok(rest), Some(home)) => Some(home.join(rest)),
                _ => Some(value),
            }
        };
        let cache_home =
            path("XDG_CACHE_HOME").or_else(|| user_home.as_ref().map(|home| home.join(".cache")));
        let home = path("HF_HOME").or_else(|| cache_home.map(|directory| directory.join("huggingface")));
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let cache = cache.or_else(|| home.as_ref().map(|home| home.join("hub")));
        let cache = cache.ok_or_else(|| HubError::Setting {
            variable: "HF_HUB_CACHE",
            reason: "neither it nor HF_HOME nor HOME is set; set one of them".to_owned(),
        })?;
        let mut settings = Self::new(cache, &text("HF_ENDPOINT").unwrap_or(DEFAULT_ENDPOINT.to_owned()));
        settings.is_offline =
            is_true("HF_HUB_OFFLINE") || (set("HF_HUB_OFFLINE").is_none() && is_true("TRANSFORMERS_OFFLINE"));
        if let Some(seconds) = text("HF_HUB_DOWNLOAD_TIMEOUT") {
            let seconds = seconds.parse().ok().filter(|seconds| (1..=3600).contains(seconds));
            let reason = "allowed are 1 to 3600 seconds".to_owned();
            let seconds = seconds.ok_or(HubError::Setting { variable: "HF_HUB_DOWNLOAD_TIMEOUT", reason })?;
            settings.timeout = Duration::from_secs(seconds);
        }
        let of_variable = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN"));
        let file = path("HF_TOKEN_PATH").or_else(|| home.map(|home| home.join("token")));
        settings.token = match (of_variable, file) {
            (Some(token), _) => Token::new(&token)?,
            (None, Some(_)) if is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN") => None,
            // A file that is not there, or that belongs to another user, is no token.
            (None, Some(file)) => match std::fs::read_to_string(file) {
                Ok(token) => Token::new(&token)?,
                Err(_) => None,
            },
            (None, None) => None,
        };
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Settings, HubError> {
        let variables = variables.to_vec();
        Settings::from_variables(&move |name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn the_cache_is_where_the_python_package_has_it() {
        let all = [
            ("HF_HUB_CACHE", "/a"),
            ("HUGGINGFACE_HUB_CACHE", "/b"),
            ("HF_HOME", "/c"),
            ("XDG_CACHE_HOME", "/d"),
            ("HOME", "/e"),
        ];
        let expected = ["/a", "/b", "/c/hub", "/d/huggingface/hub", "/e/.cache/huggingface/hub"];
        for (first, expected) in expected.iter().enumerate() {
            assert_eq!(settings(&all[first..]).unwrap().cache, PathBuf::from(expected));
        }
        assert!(settings(&[]).unwrap_err().to_string().contains("HF_HOME"));
        assert_eq!(settings(&[("HF_HOME", "~/x"), ("HOME", "/e")]).unwrap().cache, PathBuf::from("/e/x/hub"));
    }

    #[test]
    fn the_token_is_that_of_the_variable_else_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let home = directory.path().to_str().unwrap();
        std::fs::write(directory.path().join("token"), "hf_file\n").unwrap();
        std::fs::write(directory.path().join("other"), "hf_other").unwrap();
        let other = directory.path().join("other");
        let token = |more: &[(&str, &str)]| settings(&[&[("HF_HOME", home)], more].concat()).unwrap().token;
        let expect = |text: &str| Token::new(text).unwrap();
        assert_eq!(token(&[]), expect("hf_file"));
        assert_eq!(token(&[("HF_TOKEN_PATH", other.to_str().unwrap())]), expect("hf_other"));
        assert_eq!(token(&[("HF_TOKEN", "hf_variable")]), expect("hf_variable"));
        assert_eq!(token(&[("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
        let error = settings(&[("HF_HOME", home), ("HF_TOKEN", "hf_secret\nx")]).unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
        assert!(!format!("{:?}", token(&[])).contains("hf_"));
    }

    #[test]
    fn endpoint_offline_mode_and_timeout_are_read() {
        let read =
            settings(&[("HOME", "/e"), ("HF_ENDPOINT", "http://mirror:8/"), ("HF_HUB_OFFLINE", "True")])
                .unwrap();
        assert_eq!((read.endpoint.as_str(), read.is_offline), ("http://mirror:8", true));
        assert!(
            !settings(&[("HOME", "/e"), ("HF_HUB_OFFLINE", "0"), ("TRANSFORMERS_OFFLINE", "1")])
                .unwrap()
                .is_offline
        );
        assert!(
            settings(&[("HOME", "/e"), ("HF_HUB_DOWNLOAD_TIMEOUT", "soon")])
                .unwrap_err()
                .to_string()
                .contains("seconds")
        );
    }
}
