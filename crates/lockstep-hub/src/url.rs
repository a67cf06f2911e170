//! Addresses: origins, targets of redirects, escaping.

use std::fmt::Write as _;

use ureq::http::Uri;

/// Scheme, host and port of an address. A token goes to one origin only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    scheme: String,
    host: String,
    port: u16,
}

impl Origin {
    /// Returns the origin of an `http` or `https` address; `None` for any other text.
    pub(crate) fn of(url: &str) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let scheme = uri.scheme_str()?.to_ascii_lowercase();
        let default = match scheme.as_str() {
            "http" => 80,
            "https" => 443,
            _ => return None,
        };
        let authority = uri.authority()?;
        // Names and passwords in an address are of no use here, and hide the host from a reader.
        if authority.as_str().contains('@') || authority.host().is_empty() {
            return None;
        }
        let port = authority.port_u16().unwrap_or(default);
        Some(Self { scheme, host: authority.host().to_ascii_lowercase(), port })
    }

    /// Returns true if connections are encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.scheme == "https"
    }
}

/// Returns the target of a redirect from `url`. `None` if the location has an unknown form, or would end the encryption.
pub(crate) fn target(url: &str, location: &str) -> Option<String> {
    let from = Origin::of(url)?;
    let start = url.find("://")? + 3;
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |at| start + at);
    let target = if location.contains("://") {
        location.to_owned()
    } else if location.starts_with("//") {
        format!("{}:{location}", from.scheme)
    } else if location.starts_with('/') {
        format!("{}{location}", &url[..end])
    } else {
        return None;
    };
    let to = Origin::of(&target)?;
    (to.is_encrypted() || !from.is_encrypted()).then_some(target)
}

/// Returns an address without its query, which may hold a signature.
pub(crate) fn shown(url: &str) -> String {
    url.split(['?', '#']).next().unwrap_or_default().to_owned()
}

/// Escapes a path for an address; slashes separate its parts.
pub(crate) fn escaped_path(path: &str) -> String {
    path.split('/').map(escaped).collect::<Vec<_>>().join("/")
}

/// Escapes a part of a path; a slash is escaped as well.
pub(crate) fn escaped(part: &str) -> String {
    let mut escaped = String::with_capacity(part.len());
    for byte in part.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            escaped.push(byte.into());
        } else {
            // Writing to a text does not fail.
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_differ_by_scheme_host_and_port() {
        let origin = |url| Origin::of(url);
        assert_eq!(origin("https://hub.example/a?b"), origin("https://HUB.example:443/"));
        for other in ["http://hub.example", "https://hub.example:444", "https://hub.example.org"] {
            assert_ne!(origin("https://hub.example"), origin(other), "{other}");
        }
        for url in ["ftp://x/y", "hub.example", "https://user@hub.example/", "https://"] {
            assert_eq!(origin(url), None, "{url}");
        }
    }

    #[test]
    fn redirects_are_resolved_and_never_end_the_encryption() {
        let from = "https://hub.example/a/b?q";
        for (location, expected) in [
            ("/c?d", Some("https://hub.example/c?d")),
            ("//cdn.example/x", Some("https://cdn.example/x")),
            ("https://cdn.example/x", Some("https://cdn.example/x")),
            ("http://hub.example/x", None),
            ("file:///etc/passwd", None),
            ("c", None),
        ] {
            assert_eq!(target(from, location).as_deref(), expected, "{location}");
        }
        assert_eq!(target("http://a:1/x", "/y").as_deref(), Some("http://a:1/y"));
    }

    #[test]
    fn paths_are_escaped() {
        assert_eq!(escaped_path("a b/c#?.gguf"), "a%20b/c%23%3F.gguf");
        assert_eq!(escaped("refs/pr/1"), "refs%2Fpr%2F1");
    }
}
