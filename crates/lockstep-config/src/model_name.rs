//! Finds a model by any of its names: a preset, a directory, a checkpoint, or a Hugging Face repository in the local cache.
//!
//! Nothing is downloaded. The cache has the layout of `huggingface_hub`: `models--ORG--NAME/refs/main` names a commit, and
//! `models--ORG--NAME/snapshots/COMMIT` holds its files.

use std::path::{Path, PathBuf};
use std::{env, fs};

use lockstep_checkpoint::{ModelDirectory, list};
use lockstep_model::{ModelConfig, presets};

use crate::Error;
use crate::foreign_names::preset_of;

/// The location of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NamedModel {
    /// A named architecture, without weights.
    Preset(String),
    /// A directory with a `config.json`, or a checkpoint of a run.
    Directory(PathBuf),
}

impl NamedModel {
    /// Returns the key of RUN.toml that names the model, as an argument of `--set`.
    pub fn setting(&self) -> String {
        match self {
            Self::Preset(name) => format!("model.preset={name}"),
            Self::Directory(path) => format!("model.path={:?}", path.display().to_string()),
        }
    }
}

/// Finds a model by a name.
///
/// # Errors
/// If no preset, directory or cached repository has that name.
pub fn find_model(name: &str) -> Result<NamedModel, Error> {
    find_in(name, &cache_directories(&|variable| env::var_os(variable).map(PathBuf::from)))
}

/// Finds the directory of a model with weights.
///
/// # Errors
/// As [`find_model`]; if the name is a preset, which has no weights.
pub fn find_weights(name: &str) -> Result<PathBuf, Error> {
    let found = find_model(name).map_err(|error| match error {
        // The list of presets, which have no weights, would not help.
        Error::Model(_) => Error::NoModel(format!(
            "{name} is no directory, no checkpoint of a run, and no repository in the cache of Hugging Face; presets, as `lockstep models` lists \
             them, have no weights"
        )),
        error => error,
    });
    match found? {
        NamedModel::Directory(path) => Ok(path),
        NamedModel::Preset(preset) => Err(Error::NoModel(format!(
            "{name} is a preset ({preset}), an architecture without weights; give a directory, a checkpoint of a run, or a repository \
             in the cache of Hugging Face"
        ))),
    }
}

/// Returns the configuration of a model in a directory, or of a checkpoint.
///
/// # Errors
/// If there is none, or it is not supported.
pub fn config_of(directory: &Path) -> Result<ModelConfig, Error> {
    let file = directory.join("config.json");
    if file.exists() {
        return Ok(ModelConfig::from_file(&file)?);
    }
    if directory.is_file() {
        return Ok(ModelDirectory::open(directory)?.config().clone());
    }
    match list(directory.parent().unwrap_or(directory)) {
        Ok(listed) if listed.iter().any(|listed| listed.path == directory) => {
            Ok(ModelDirectory::open(directory)?.config().clone())
        }
        _ => Ok(ModelConfig::from_file(&file)?),
    }
}

fn find_in(name: &str, caches: &[PathBuf]) -> Result<NamedModel, Error> {
    let path = Path::new(name);
    if path.is_dir() {
        // A directory of checkpoints stands for the newest; loading verifies every byte.
        let is_model = ["config.json", "manifest.json"].iter().any(|file| path.join(file).exists());
        let newest = if is_model { None } else { list(path)?.pop() };
        return Ok(NamedModel::Directory(newest.map_or_else(|| path.to_owned(), |newest| newest.path)));
    }
    if let Some(directory) = path.parent().filter(|_| path.is_file()) {
        return of_file(path, directory);
    }
    let id = repository(name)?;
    let preset_called = |name: &str| {
        presets().iter().map(|preset| preset.name.as_str()).find(|preset| preset.eq_ignore_ascii_case(name))
    };
    if let Some(preset) = preset_called(id) {
        return Ok(NamedModel::Preset(preset.to_owned()));
    }
    if let Some(snapshot) = caches.iter().find_map(|cache| snapshot(cache, id)) {
        return Ok(NamedModel::Directory(snapshot));
    }
    let last = id.rsplit('/').next().unwrap_or(id);
    let last = last.strip_prefix("Meta-").or(last.strip_prefix("meta-")).unwrap_or(last);
    let of_last = || preset_called(last);
    if let Some(preset) = preset_of(id).or_else(|| preset_of(last)).or_else(of_last) {
        return Ok(NamedModel::Preset(preset.to_owned()));
    }
    if is_path(id) {
        return Err(Error::NoModel(format!("{name}: there is no such directory")));
    }
    if id.contains('/') {
        return Err(Error::NoModel(format!(
            "{id} is no directory here, and not in the cache of Hugging Face ({}); `hf download {id}` puts it there",
            caches.first().map_or("none is set".to_owned(), |cache| cache.display().to_string())
        )));
    }
    // Its error lists the presets.
    ModelConfig::preset(name)?;
    Ok(NamedModel::Preset(name.to_owned()))
}

/// Returns the directory of a model's file.
fn of_file(path: &Path, directory: &Path) -> Result<NamedModel, Error> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if name == "config.json" || name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json") {
        let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
        return Ok(NamedModel::Directory(directory.to_owned()));
    }
    let what = match path.extension().and_then(|extension| extension.to_str()) {
        Some("gguf") => return Ok(NamedModel::Directory(path.to_owned())),
        Some("bin" | "pt" | "pth" | "ckpt") => {
            "is not read; give a directory with config.json and safetensors files, or a GGUF file"
        }
        _ => "is a file; give the directory of a model",
    };
    Err(Error::NoModel(format!("{} {what}", path.display())))
}

/// Returns true if a name has the form of a path.
fn is_path(name: &str) -> bool {
    name.starts_with(['/', '.', '~']) || name.ends_with('/') || name.matches('/').count() > 1
}

/// Returns the repository that a name or a URL stands for.
fn repository(name: &str) -> Result<&str, Error> {
    let Some((scheme, rest)) = name.split_once("://") else { return Ok(name) };
    let path = match (scheme, rest.split_once('/')) {
        ("hf", _) => rest,
        ("http" | "https", Some(("huggingface.co" | "hf.co", path))) => path,
        _ => {
            return Err(Error::NoModel(format!(
                "{name} is an address, and nothing is downloaded; fetch the model, and give its directory"
            )));
        }
    };
    // The rest is `tree/main` and the like.
    let end = path.match_indices('/').nth(1).map_or(path.len(), |(at, _)| at);
    Ok(path[..end].trim_end_matches('/'))
}

/// Returns the directories of cached repositories, in order of precedence.
fn cache_directories(variable: &dyn Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    let below = |name: &str, rest: &str| variable(name).map(|directory| directory.join(rest));
    [
        variable("HF_HUB_CACHE"),
        variable("HUGGINGFACE_HUB_CACHE"),
        below("HF_HOME", "hub"),
        below("XDG_CACHE_HOME", "huggingface/hub"),
        below("HOME", ".cache/huggingface/hub"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Returns the snapshot of a cached repository: that of `main`, else the newest.
fn snapshot(cache: &Path, id: &str) -> Option<PathBuf> {
    let is_name = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    if !id.split('/').all(is_name) || id.split('/').count() > 2 {
        return None;
    }
    let repository = cache.join(format!("models--{}", id.replace('/', "--")));
    let snapshots = repository.join("snapshots");
    let commit = fs::read_to_string(repository.join("refs/main")).unwrap_or_default();
    let main = snapshots.join(commit.trim());
    if is_name(commit.trim()) && main.is_dir() {
        return Some(main);
    }
    let entries = fs::read_dir(&snapshots).ok()?.flatten().filter(|entry| entry.path().is_dir());
    let newest = entries.max_by_key(|entry| entry.metadata().and_then(|metadata| metadata.modified()).ok());
    newest.map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(path: &Path) {
        fs::create_dir_all(path).unwrap();
        fs::write(path.join("config.json"), "{}").unwrap();
    }

    #[test]
    fn a_model_is_found_by_each_of_its_names() {
        let temporary = tempfile::tempdir().unwrap();
        let cache = temporary.path().join("hub");
        let (first, second) =
            (cache.join("models--org--name/snapshots/aaa"), cache.join("models--org--name/snapshots/bbb"));
        for path in [&first, &second, &cache.join("models--gpt2/snapshots/ccc")] {
            directory(path);
        }
        fs::create_dir_all(cache.join("models--org--name/refs")).unwrap();
        fs::write(cache.join("models--org--name/refs/main"), "aaa\n").unwrap();
        let caches = [temporary.path().join("none"), cache.clone()];
        let found = |name: &str| find_in(name, &caches).unwrap_or_else(|error| panic!("{name}: {error}"));
        for name in [
            "org/name",
            "https://huggingface.co/org/name",
            "https://huggingface.co/org/name/tree/main",
            "hf://org/name",
        ] {
            assert_eq!(found(name), NamedModel::Directory(first.clone()), "{name}");
        }
        assert_eq!(found("gpt2"), NamedModel::Directory(cache.join("models--gpt2/snapshots/ccc")));
        assert_eq!(find_in("gpt2", &[]).unwrap(), NamedModel::Preset("gpt2-124m".to_owned()));
        for (name, preset) in [
            ("llama3-8b", "llama3-8b"),
            ("GPT2-124M", "gpt2-124m"),
            ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
            ("meta-llama/Llama-3.1-70B", "llama3-70b"),
            ("openai-community/gpt2-xl", "gpt2-1558m"),
        ] {
            assert_eq!(found(name), NamedModel::Preset(preset.to_owned()), "{name}");
        }
        let file = second.join("config.json");
        assert_eq!(found(file.to_str().unwrap()), NamedModel::Directory(second));
    }

    #[test]
    fn a_name_that_nothing_has_says_what_to_do() {
        let temporary = tempfile::tempdir().unwrap();
        let weights = temporary.path().join("model.bin");
        fs::write(&weights, "x").unwrap();
        for (name, part) in [
            ("org/none", "`hf download org/none`"),
            ("../../etc/passwd", "no such directory"),
            ("https://example.org/model", "nothing is downloaded"),
            ("./none", "no such directory"),
            ("gpt5", "`lockstep models` lists them"),
            (weights.to_str().unwrap(), "config.json and safetensors"),
        ] {
            let error = find_in(name, &[temporary.path().to_owned()]).unwrap_err().to_string();
            assert!(error.contains(part), "{name}: {error}");
        }
        assert!(find_weights("llama3-8b").unwrap_err().to_string().contains("without weights"));
    }
}
