//! Names of models on a hub: `hf://org/name@revision/file.gguf` and its short forms.

use std::fmt;

use crate::error::HubError;

/// Branch that a name without a revision stands for.
pub(crate) const MAIN: &str = "main";

/// Longest part of a repository's name, in bytes, as the hub allows.
const MAX_PART_BYTES: usize = 96;

/// A repository, and optionally a revision and one of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelName {
    repository: String,
    revision: Option<String>,
    file: Option<String>,
}

impl ModelName {
    /// Parses `hf://org/name[@revision][/file.gguf]`, `org/name[@revision]`, or the address of a repository's page.
    ///
    /// # Errors
    /// If the text has none of these forms, or a part has characters that the hub does not allow.
    pub fn parse(text: &str) -> Result<Self, HubError> {
        let invalid = |reason: &str| HubError::Name { name: text.to_owned(), reason: reason.to_owned() };
        let parsed = match text.split_once("://") {
            None => Self::of_path(text),
            Some(("hf", path)) => Self::of_path(path),
            Some(("http" | "https", rest)) => match rest.split_once('/') {
                Some(("huggingface.co" | "hf.co" | "www.huggingface.co", path)) => Self::of_page(path),
                _ => return Err(invalid("only addresses of huggingface.co are known")),
            },
            Some(_) => return Err(invalid("its scheme is not hf")),
        };
        parsed.map_err(invalid)
    }

    /// Parses `org/name@revision/file`.
    fn of_path(path: &str) -> Result<Self, &'static str> {
        let path = path.trim_end_matches('/');
        let Some((repository, rest)) = path.split_once('@') else {
            let end = path.match_indices('/').nth(1).map_or(path.len(), |(at, _)| at);
            return Self::of_parts(&path[..end], None, path[end..].strip_prefix('/'));
        };
        // `refs/pr/1` is the only kind of revision that is written with slashes.
        let parts = if rest.starts_with("refs/") { 3 } else { 1 };
        let end = rest.match_indices('/').nth(parts - 1).map_or(rest.len(), |(at, _)| at);
        let revision = rest[..end].replace("%2F", "/").replace("%2f", "/");
        Self::of_parts(repository, Some(&revision), rest[end..].strip_prefix('/'))
    }

    /// Parses the path of a page: `org/name`, `org/name/tree/main`, `org/name/blob/main/file`.
    fn of_page(path: &str) -> Result<Self, &'static str> {
        let path = path.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
        let parts: Vec<&str> = path.split('/').collect();
        match parts.as_slice() {
            [organization, name, "tree", revision] => {
                Self::of_parts(&format!("{organization}/{name}"), Some(revision), None)
            }
            [organization, name, "blob" | "resolve", revision, file @ ..] if !file.is_empty() => {
                Self::of_parts(&format!("{organization}/{name}"), Some(revision), Some(&file.join("/")))
            }
            [_] | [_, _] => Self::of_parts(path, None, None),
            _ => Err("it is no page of a repository"),
        }
    }

    fn of_parts(repository: &str, revision: Option<&str>, file: Option<&str>) -> Result<Self, &'static str> {
        if repository.split('/').count() > 2 || !repository.split('/').all(is_repository_part) {
            return Err("a repository is org/name, of letters, digits, `.`, `_` and `-`");
        }
        if revision.is_some_and(|revision| !is_revision(revision)) {
            return Err("a revision is a branch, a tag or a commit");
        }
        if let Some(file) = file {
            if !is_file(file) {
                return Err("its file has a part that no repository contains");
            }
            if !file.ends_with(".gguf") {
                return Err("of single files only GGUF files are models");
            }
        }
        Ok(Self {
            repository: repository.to_owned(),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }

    /// Returns `org/name`.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Returns the branch, tag or commit; `None` if the name has none and stands for the branch `main`.
    pub fn revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }

    /// Returns the GGUF file that is named; `None` for a whole repository.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.repository)?;
        if let Some(revision) = &self.revision {
            write!(formatter, "@{revision}")?;
        }
        self.file.as_ref().map_or(Ok(()), |file| write!(formatter, "/{file}"))
    }
}

/// Returns true for a name of an organization or of its repository.
fn is_repository_part(part: &str) -> bool {
    // `--` separates the parts in the cache.
    is_plain(part)
        && part.len() <= MAX_PART_BYTES
        && !part.starts_with('-')
        && !part.ends_with(['-', '.'])
        && !part.contains("--")
        && !part.contains("..")
}

/// Returns true for a branch, tag or commit that is also a safe relative path.
pub(crate) fn is_revision(revision: &str) -> bool {
    revision.len() <= 255 && revision.split('/').all(is_plain)
}

/// Returns true for a relative path without hidden parts or parts that lead out of its directory.
pub(crate) fn is_file(file: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && !part.chars().any(|c| c.is_control() || "\\:*?\"<>|".contains(c))
    };
    file.len() <= 1024 && file.split('/').all(is_part)
}

/// Returns true for a name that is a safe part of a path: letters, digits, `.`, `_`, `-` and `+`, with no dot in front.
pub(crate) fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && !name.starts_with('.')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-+".contains(c))
}

/// Returns true for the full hash of a commit.
pub(crate) fn is_commit(text: &str) -> bool {
    is_hash(text, 40)
}

/// Returns true for a hash of `digits` lower-case hexadecimal digits.
pub(crate) fn is_hash(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_a_name_is_parsed() {
        for (text, repository, revision, file) in [
            ("org/name", "org/name", None, None),
            ("gpt2", "gpt2", None, None),
            ("org/name@v1.0", "org/name", Some("v1.0"), None),
            ("hf://org/name@refs/pr/3", "org/name", Some("refs/pr/3"), None),
            ("hf://org/name@a%2Fb/q.gguf", "org/name", Some("a/b"), Some("q.gguf")),
            ("hf://org/name/sub/q4.gguf", "org/name", None, Some("sub/q4.gguf")),
            ("hf://org/name/", "org/name", None, None),
            ("https://huggingface.co/org/name", "org/name", None, None),
            ("https://hf.co/org/name/tree/main", "org/name", Some("main"), None),
            (
                "https://huggingface.co/org/name/blob/main/a/q.gguf?x",
                "org/name",
                Some("main"),
                Some("a/q.gguf"),
            ),
        ] {
            let name = ModelName::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(
                (name.repository(), name.revision(), name.file()),
                (repository, revision, file),
                "{text}"
            );
        }
        assert_eq!(ModelName::parse("hf://a/b@c/d.gguf").unwrap().to_string(), "a/b@c/d.gguf");
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for text in [
            "",
            "/",
            "a//b",
            "../b",
            "a/..",
            "a/b--c",
            "-a/b",
            "a/b@",
            "a/b@../x",
            "a/b@/x",
            "hf://a/b/../c.gguf",
            "hf://a/b/.c.gguf",
            "hf://a/b/model.bin",
            "s3://a/b",
            "https://example.org/a/b",
            "https://huggingface.co/a/b/tree",
            "a b/c",
            "a/b\n",
            "hf://a/b/c\\d.gguf",
        ] {
            assert!(ModelName::parse(text).is_err(), "{text:?} was parsed: {:?}", ModelName::parse(text));
        }
    }
}
