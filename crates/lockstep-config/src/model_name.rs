//! Finds a model by any of its names: a preset, a directory, a checkpoint, or a repository of a hub of Hugging Face.
//!
//! A path that exists wins. Repositories are found in the cache of `huggingface_hub`, else downloaded into it (`lockstep-hub`):
//! `hf://org/name` always names one, `org/name` where it is neither a path nor an architecture that is known as a preset.

use std::path::{Path, PathBuf};

use lockstep_checkpoint::{ModelDirectory, list};
use lockstep_hub::{Hub, HubError, ModelName, Need, Settings};
use lockstep_model::{ModelConfig, presets};

use crate::Error;
use crate::download_progress::Shown;
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

/// Use of the network in a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Traffic {
    /// Files that the cache lacks are downloaded.
    Allowed,
    /// Only this machine is searched.
    Forbidden,
}

/// A search for a model.
struct Search<'s> {
    need: Need,
    traffic: Traffic,
    settings: &'s dyn Fn() -> Result<Settings, HubError>,
}

/// Finds a model by a name. Of a repository its configuration and tokenizer are downloaded.
///
/// # Errors
/// If no preset, directory or repository has that name, or a download fails.
pub fn find_model(name: &str) -> Result<NamedModel, Error> {
    Search::new(Need::Configuration, Traffic::Allowed).find(name)
}

/// Finds a model by a name on this machine; nothing is downloaded.
///
/// # Errors
/// If no preset, directory or cached repository has that name.
pub fn find_local_model(name: &str) -> Result<NamedModel, Error> {
    Search::new(Need::Configuration, Traffic::Forbidden).find(name)
}

/// Finds the directory or the GGUF file of a model with weights, which are downloaded if its repository is not in the cache.
///
/// # Errors
/// As [`find_model`]; if the name is a preset, which has no weights.
pub fn find_weights(name: &str) -> Result<PathBuf, Error> {
    let found = Search::new(Need::Weights, Traffic::Allowed).find(name).map_err(|error| match error {
        // The list of presets, which have no weights, would not help.
        Error::Model(_) => Error::NoModel(format!(
            "{name} is no directory, no checkpoint of a run, and no repository (org/name); presets, as `lockstep models` lists them, \
             have no weights"
        )),
        error => error,
    });
    match found? {
        NamedModel::Directory(path) => Ok(path),
        NamedModel::Preset(preset) => Err(Error::NoModel(format!(
            "{name} is a preset ({preset}), an architecture without weights; give a directory, a checkpoint of a run, or a repository \
             (org/name)"
        ))),
    }
}

/// Finds a model for a plan of its inference: its weights if they are on this machine, otherwise its configuration alone, which is
/// downloaded if need be.
///
/// # Errors
/// As [`find_model`].
pub fn find_described(name: &str) -> Result<NamedModel, Error> {
    match Search::new(Need::Weights, Traffic::Forbidden).find(name) {
        Ok(NamedModel::Directory(path)) => Ok(NamedModel::Directory(path)),
        Ok(NamedModel::Preset(_)) | Err(_) => find_model(name),
    }
}

/// Downloads a repository into the cache of Hugging Face, or what has changed in it, and returns the path of its newest commit.
///
/// # Errors
/// If the text names no repository, or a download fails.
pub fn fetch_model(name: &str, need: Need) -> Result<PathBuf, Error> {
    let fetched = || {
        let model = ModelName::parse(name)?;
        Hub::new(Settings::from_environment()?).update(&model, need, &Shown::default())
    };
    fetched().map_err(|source| Error::Hub { prefix: String::new(), source: Box::new(source) })
}

/// Returns the name by which a tokenizer is loaded: "bytes" and paths as they are, of a repository the `tokenizer.json`.
///
/// # Errors
/// If the name has the form of a repository, and it can be neither found nor downloaded.
pub fn find_tokenizer(name: &str) -> Result<String, Error> {
    Search::new(Need::Tokenizer, Traffic::Allowed).tokenizer(name)
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

impl Search<'_> {
    fn new(need: Need, traffic: Traffic) -> Self {
        Self { need, traffic, settings: &Settings::from_environment }
    }

    fn find(&self, name: &str) -> Result<NamedModel, Error> {
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
        let preset = |name: &str| Ok(NamedModel::Preset(name.to_owned()));
        if let Some(known) = preset_called(name) {
            return preset(known);
        }
        let is_address = name.contains("://");
        if is_path(name) && !is_address {
            return Err(Error::NoModel(format!("{name}: there is no such directory")));
        }
        let Ok(model) = ModelName::parse(name) else {
            if is_address || name.contains('/') {
                ModelName::parse(name).map_err(|source| hub_error(name, source))?;
            }
            // Its error lists the presets.
            ModelConfig::preset(name)?;
            return preset(name);
        };
        let hub = (self.settings)().map(Hub::new);
        if let Some(path) = hub.as_ref().ok().and_then(|hub| hub.cached(&model, self.need)) {
            return Ok(NamedModel::Directory(path));
        }
        let is_certain = name.starts_with("hf://");
        // A published architecture is known without traffic; weights are not.
        let may_be_preset = !is_certain
            && model.revision().is_none()
            && (self.need == Need::Configuration || !name.contains('/'));
        if let Some(known) = preset_of_repository(model.repository()).filter(|_| may_be_preset) {
            return preset(&known);
        }
        if !is_certain && !name.contains('/') {
            ModelConfig::preset(name)?;
            return preset(name);
        }
        // A mistyped path of a run is not looked for on the network.
        let is_below_directory =
            || path.parent().is_some_and(|parent| !parent.as_os_str().is_empty() && parent.is_dir());
        if !is_address && is_below_directory() {
            return Err(Error::NoModel(format!(
                "{name}: there is no such directory; hf://{name} is a repository of that name"
            )));
        }
        if self.traffic == Traffic::Forbidden {
            return Err(Error::NoModel(format!(
                "{name} is no directory here, and not in the cache of Hugging Face"
            )));
        }
        let found = hub.and_then(|hub| hub.find(&model, self.need, &Shown::default()));
        found.map(NamedModel::Directory).map_err(|source| hub_error(name, source))
    }

    fn tokenizer(&self, name: &str) -> Result<String, Error> {
        let is_address = name.contains("://");
        let is_repository = name.split('/').count() == 2 && !is_path(name) && !name.ends_with(".json");
        if name == "bytes" || (!is_address && (!is_repository || Path::new(name).exists())) {
            return Ok(name.to_owned());
        }
        match self.find(name)? {
            NamedModel::Directory(directory) => Ok(directory.join("tokenizer.json").display().to_string()),
            NamedModel::Preset(_) => Err(Error::NoModel(format!(
                "{name} is no directory here, and not in the cache of Hugging Face; hf://{name} downloads its tokenizer"
            ))),
        }
    }
}

/// Returns the error of a hub; a name that might have been meant as a path is told to be none.
fn hub_error(name: &str, source: HubError) -> Error {
    let prefix = if name.contains("://") { String::new() } else { format!("{name} is no directory here; ") };
    Error::Hub { prefix, source: Box::new(source) }
}

fn preset_called(name: &str) -> Option<&'static str> {
    presets().iter().map(|preset| preset.name.as_str()).find(|preset| preset.eq_ignore_ascii_case(name))
}

/// Returns the preset with the architecture of a published model.
fn preset_of_repository(repository: &str) -> Option<String> {
    let last = repository.rsplit('/').next().unwrap_or(repository);
    let last = last.strip_prefix("Meta-").or(last.strip_prefix("meta-")).unwrap_or(last);
    preset_of(repository)
        .or_else(|| preset_of(last))
        .or_else(|| preset_called(last))
        .map(|name| name.to_string())
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn directory(path: &Path) {
        fs::create_dir_all(path).unwrap();
        fs::write(path.join("config.json"), "{}").unwrap();
    }

    /// Searches a cache; nothing is sent.
    fn find_in(name: &str, need: Need, cache: &Path) -> Result<NamedModel, Error> {
        let settings = || {
            let mut settings = Settings::new(cache.to_owned(), "http://127.0.0.1:9");
            settings.is_offline = true;
            Ok(settings)
        };
        Search { need, traffic: Traffic::Allowed, settings: &settings }.find(name)
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
        let found = |name: &str| {
            find_in(name, Need::Configuration, &cache).unwrap_or_else(|error| panic!("{name}: {error}"))
        };
        for name in [
            "org/name",
            "org/name@aaa",
            "https://huggingface.co/org/name",
            "https://huggingface.co/org/name/tree/main",
            "hf://org/name",
        ] {
            assert_eq!(found(name), NamedModel::Directory(first.clone()), "{name}");
        }
        assert_eq!(found("org/name@bbb"), NamedModel::Directory(second.clone()));
        assert_eq!(found("gpt2"), NamedModel::Directory(cache.join("models--gpt2/snapshots/ccc")));
        let none = temporary.path().join("none");
        let gpt2 = find_in("gpt2", Need::Configuration, &none).unwrap();
        assert_eq!(gpt2, NamedModel::Preset("gpt2-124m".to_owned()));
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
    fn weights_of_a_published_model_are_those_of_its_repository() {
        let temporary = tempfile::tempdir().unwrap();
        for name in ["openai-community/gpt2", "hf://openai-community/gpt2", "hf://gpt2"] {
            let error = find_in(name, Need::Weights, temporary.path()).unwrap_err().to_string();
            assert!(error.contains("HF_HUB_OFFLINE forbids downloads"), "{name}: {error}");
        }
    }

    #[test]
    fn a_tokenizer_is_named_by_path_or_repository() {
        let temporary = tempfile::tempdir().unwrap();
        let snapshot = temporary.path().join("models--org--name/snapshots/aaa");
        directory(&snapshot);
        fs::write(snapshot.join("tokenizer.json"), "{}").unwrap();
        let settings = || {
            let mut settings = Settings::new(temporary.path().to_owned(), "http://127.0.0.1:9");
            settings.is_offline = true;
            Ok(settings)
        };
        let search = Search { need: Need::Tokenizer, traffic: Traffic::Allowed, settings: &settings };
        for path in ["bytes", "none/tokenizer.json", "/none/tokenizer.json", "none"] {
            assert_eq!(search.tokenizer(path).unwrap(), path);
        }
        let file = snapshot.join("tokenizer.json").display().to_string();
        assert_eq!(search.tokenizer("org/name").unwrap(), file);
        assert_eq!(search.tokenizer("hf://org/name").unwrap(), file);
        assert!(search.tokenizer("org/other").unwrap_err().to_string().contains("HF_HUB_OFFLINE"));
    }

    #[test]
    fn a_name_that_nothing_has_says_what_to_do() {
        let temporary = tempfile::tempdir().unwrap();
        let weights = temporary.path().join("model.bin");
        fs::write(&weights, "x").unwrap();
        for (name, part) in [
            ("org/none", "org/none is no directory here; "),
            ("org/none", "`lockstep fetch org/none`"),
            ("src/none", "src/none: there is no such directory; hf://src/none"),
            ("../../etc/passwd", "no such directory"),
            ("https://example.org/model", "only addresses of huggingface.co"),
            ("hf://org/name/pytorch_model.bin", "only GGUF files"),
            ("./none", "no such directory"),
            ("gpt5", "`lockstep models` lists them"),
            (weights.to_str().unwrap(), "config.json and safetensors"),
        ] {
            let error = find_in(name, Need::Configuration, temporary.path()).unwrap_err().to_string();
            assert!(error.contains(part), "{name}: {error}");
        }
        assert!(find_weights("llama3-8b").unwrap_err().to_string().contains("without weights"));
    }
}
