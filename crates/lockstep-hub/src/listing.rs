//! Files of a repository at one commit, and the choice of those that are needed.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::error::HubError;
use crate::name::{ModelName, is_commit, is_file, is_hash};

/// Largest answer with the files of a repository, in bytes.
pub(crate) const MAX_LISTING_BYTES: u64 = 32 << 20;
/// Largest index of shards, in bytes.
pub(crate) const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Largest file other than weights, in bytes.
pub(crate) const MAX_SMALL_BYTES: u64 = 256 << 20;

/// Weights in one file.
pub(crate) const SINGLE: &str = "model.safetensors";
/// Table of the shards of weights in several files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Configuration of the model.
pub(crate) const CONFIGURATION: &str = "config.json";
/// Files of a tokenizer. A repository has some of them.
const TOKENIZER: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
];
/// Files that say how a model is run. A repository has some of them.
const SETTINGS: [&str; 2] = ["generation_config.json", "quantize_config.json"];

/// Files of a repository that a caller needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// The tokenizer alone.
    Tokenizer,
    /// The configuration and the tokenizer.
    Configuration,
    /// The configuration, the tokenizer and the weights.
    Weights,
}

/// A file of a repository.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// Size in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) size: Option<u64>,
    /// Hash that git has for the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) blob_id: Option<String>,
    /// SHA-256 of a large file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lfs_sha256: Option<String>,
    /// Size of a large file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lfs_size: Option<u64>,
    /// Hash of another storage of the hub; kept for other readers of the cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) xet_hash: Option<String>,
}

/// Files of a repository by their paths.
pub(crate) type Files = BTreeMap<String, Entry>;

/// A commit and its files.
#[derive(Debug, Clone)]
pub(crate) struct Listing {
    pub(crate) commit: String,
    pub(crate) files: Files,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    xet_hash: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Listing {
    /// Parses the answer of `/api/models/REPOSITORY/revision/REVISION`. Files with unsafe paths are left out.
    ///
    /// # Errors
    /// With the deviation, if the answer has another form.
    pub(crate) fn parse(answer: &[u8]) -> Result<Self, String> {
        let answer: Answer = serde_json::from_slice(answer)
            .map_err(|error| format!("it answers no list of a repository's files: {error}"))?;
        if !is_commit(&answer.sha) {
            return Err(format!(
                "its commit is no hash: {:?}",
                answer.sha.chars().take(50).collect::<String>()
            ));
        }
        let entry = |sibling: Sibling| {
            let lfs = sibling.lfs.unwrap_or(Lfs { sha256: None, size: None });
            let entry = Entry {
                size: sibling.size,
                blob_id: sibling.blob_id,
                lfs_sha256: lfs.sha256.filter(|hash| is_hash(hash, 64)),
                lfs_size: lfs.size,
                xet_hash: sibling.xet_hash,
            };
            (sibling.rfilename, entry)
        };
        let files =
            answer.siblings.into_iter().filter(|sibling| is_file(&sibling.rfilename)).map(entry).collect();
        Ok(Self { commit: answer.sha, files })
    }
}

/// Chooses the files that are needed. Shards are not among them: [`shards`] reads their names from the index.
///
/// # Errors
/// If the repository lacks the named file, or weights in a form that is read.
pub(crate) fn chosen(model: &ModelName, need: Need, files: &Files) -> Result<Vec<String>, HubError> {
    let has = |name: &str| files.contains_key(name);
    if let Some(file) = model.file() {
        let parts = gguf_parts(file);
        if let Some(missing) = parts.iter().find(|part| !has(part)) {
            let there = files.keys().filter(|name| name.ends_with(".gguf")).map(String::as_str);
            let reason = match listed(there) {
                Some(there) => format!("is not there: {missing}; its repository has {there}"),
                None => "is not there, and its repository has no GGUF file".to_owned(),
            };
            return Err(HubError::NoWeights { model: model.to_string(), reason });
        }
        return Ok(parts);
    }
    let mut chosen: Vec<&str> = TOKENIZER.into_iter().filter(|name| has(name)).collect();
    if need == Need::Tokenizer {
        if chosen.is_empty() {
            let reason = "has no tokenizer; name a repository with a tokenizer.json".to_owned();
            return Err(HubError::NoWeights { model: model.to_string(), reason });
        }
        return Ok(chosen.into_iter().map(str::to_owned).collect());
    }
    if !has(CONFIGURATION) {
        return Err(HubError::NoWeights {
            model: model.to_string(),
            reason: other_form("config.json", model, files),
        });
    }
    chosen.push(CONFIGURATION);
    chosen.extend(SETTINGS.into_iter().filter(|name| has(name)));
    if need == Need::Weights {
        let weights = [SINGLE, INDEX].into_iter().find(|name| has(name));
        chosen.push(weights.ok_or_else(|| HubError::NoWeights {
            model: model.to_string(),
            reason: other_form(SINGLE, model, files),
        })?);
    }
    Ok(chosen.into_iter().map(str::to_owned).collect())
}

/// Describes a repository that lacks a file: its weights in other forms, and the next step.
fn other_form(lacking: &str, model: &ModelName, files: &Files) -> String {
    let with = |endings: &[&str]| {
        let names = files.keys().map(String::as_str);
        listed(names.filter(|name| endings.iter().any(|ending| name.ends_with(ending))))
    };
    if let Some(gguf) = with(&[".gguf"]) {
        return format!(
            "has no {lacking}; its GGUF files are named one by one, as hf://{model}/FILE.gguf: {gguf}"
        );
    }
    if let Some(pickles) = with(&[".bin", ".pt", ".pth", ".ckpt"]) {
        return format!(
            "has no {lacking}, and pickles are never read ({pickles}); name a repository with safetensors files"
        );
    }
    match with(&[".safetensors"]) {
        Some(others) => {
            format!("has no {lacking}, only {others}; name a repository in the form of transformers")
        }
        None => format!("has no {lacking}; name the repository of a language model"),
    }
}

/// Joins the first names; `None` if there is none.
fn listed<'n>(names: impl Iterator<Item = &'n str>) -> Option<String> {
    const SHOWN: usize = 8;
    let names: Vec<&str> = names.collect();
    let more = if names.len() > SHOWN { format!(" and {} more", names.len() - SHOWN) } else { String::new() };
    (!names.is_empty()).then(|| names[..names.len().min(SHOWN)].join(", ") + &more)
}

/// Returns a GGUF file, with the others if it is the first of several.
pub(crate) fn gguf_parts(file: &str) -> Vec<String> {
    let split = || {
        let (stem, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let stem = stem.strip_suffix("-00001")?;
        let count: u32 = count.parse().ok().filter(|_| count.len() == 5)?;
        (1..=999)
            .contains(&count)
            .then(|| (1..=count).map(|number| format!("{stem}-{number:05}-of-{count:05}.gguf")).collect())
    };
    split().unwrap_or_else(|| vec![file.to_owned()])
}

/// Returns the shards that an index names.
///
/// # Errors
/// With the deviation, if the text is no index or a name leads out of its directory.
pub(crate) fn shards(index: &[u8]) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index =
        serde_json::from_slice(index).map_err(|error| format!("it is no index of weights: {error}"))?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    let is_shard = |name: &str| is_file(name) && !name.contains('/') && name.ends_with(".safetensors");
    match shards.iter().find(|name| !is_shard(name)) {
        Some(name) => Err(format!("its shard {name:?} has no name of a safetensors file")),
        None => Ok(shards),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Files {
        names.iter().map(|name| ((*name).to_owned(), Entry::default())).collect()
    }

    fn choice(model: &str, need: Need, names: &[&str]) -> Result<Vec<String>, String> {
        chosen(&ModelName::parse(model).unwrap(), need, &files(names)).map_err(|error| error.to_string())
    }

    #[test]
    fn only_files_that_are_needed_are_chosen() {
        let all = [
            "config.json",
            "model.safetensors",
            "pytorch_model.bin",
            "README.md",
            "tokenizer.json",
            "merges.txt",
            "onnx/model.onnx",
        ];
        let sharded = ["config.json", INDEX, "model-00001-of-00002.safetensors", "consolidated.safetensors"];
        assert_eq!(
            choice("a/b", Need::Weights, &all).unwrap(),
            ["tokenizer.json", "merges.txt", "config.json", "model.safetensors"]
        );
        assert_eq!(
            choice("a/b", Need::Configuration, &all).unwrap(),
            ["tokenizer.json", "merges.txt", "config.json"]
        );
        assert_eq!(choice("a/b", Need::Tokenizer, &all).unwrap(), ["tokenizer.json", "merges.txt"]);
        assert_eq!(choice("a/b", Need::Weights, &sharded).unwrap(), ["config.json", INDEX]);
        let parts = ["q-00001-of-00002.gguf", "q-00002-of-00002.gguf"];
        assert_eq!(choice("hf://a/b/q-00001-of-00002.gguf", Need::Weights, &parts).unwrap(), parts);
    }

    #[test]
    fn repositories_in_other_forms_are_refused_with_the_next_step() {
        for (model, names, part) in [
            ("a/b", &["config.json", "pytorch_model.bin"][..], "pickles are never read (pytorch_model.bin)"),
            ("a/b", &["x-q4.gguf", "x-q8.gguf"], "hf://a/b/FILE.gguf: x-q4.gguf, x-q8.gguf"),
            ("a/b", &["README.md"], "name the repository of a language model"),
            ("a/b", &["config.json", "consolidated.safetensors"], "only consolidated.safetensors"),
            ("hf://a/b/y.gguf", &["x.gguf"], "its repository has x.gguf"),
            ("hf://a/b/y-00001-of-00002.gguf", &["y-00001-of-00002.gguf"], "y-00002-of-00002.gguf"),
        ] {
            let error = choice(model, Need::Weights, names).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn paths_and_hashes_of_a_hostile_server_are_not_taken_over() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let answer = format!(
            r#"{{"sha": "{commit}", "siblings": [{{"rfilename": "../../x"}}, {{"rfilename": "/etc/x"}}, {{"rfilename": "a/../b"}},
               {{"rfilename": "config.json", "size": 3, "lfs": {{"sha256": "../x"}}}}]}}"#
        );
        let listing = Listing::parse(answer.as_bytes()).unwrap();
        assert_eq!(listing.files.keys().collect::<Vec<_>>(), ["config.json"]);
        assert_eq!(listing.files["config.json"].lfs_sha256, None);
        assert!(Listing::parse(br#"{"sha": "../../x"}"#).unwrap_err().contains("no hash"));
        assert!(Listing::parse(b"<html>").is_err());
        for shard in ["../x.safetensors", "/x.safetensors", "x.bin", "a/x.safetensors", ".safetensors"] {
            assert!(
                shards(format!(r#"{{"weight_map": {{"w": "{shard}"}}}}"#).as_bytes()).is_err(),
                "{shard}"
            );
        }
    }
}
