//! `lockstep import`, and the `--deepspeed` file of `lockstep train`.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum, ValueHint};
use lockstep_config::{self as config, Imported, ImportedFrom, RunConfig, human};
use lockstep_import::{AutoValues, Import, InUse, Options, Origin, import};

use crate::exit::Failure;
use crate::output::{note, say};

/// Largest configuration file of another tool that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    /// A DeepSpeed configuration, ds_config.json
    Deepspeed,
    /// A configuration that `accelerate config` writes, default_config.yaml
    Accelerate,
}

impl From<Format> for lockstep_import::Format {
    fn from(format: Format) -> Self {
        match format {
            Format::Deepspeed => Self::DeepSpeed,
            Format::Accelerate => Self::Accelerate,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Tool that the configuration belongs to
    format: Format,
    /// The configuration file
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: PathBuf,
    /// Ranks of the run, where batch sizes follow from them [default: the file's]
    #[arg(long, value_name = "N", value_parser = crate::ranks::number)]
    ranks: Option<usize>,
    /// Write the RUN.toml to this file, and nothing if the import fails [default: standard output]
    #[arg(short, long, value_name = "RUN.toml", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
    /// Overwrite the file that --output names
    #[arg(long, requires = "output")]
    force: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    if let Some(output) = arguments.output.as_deref().filter(|output| !arguments.force && output.exists()) {
        return Err(exists(output));
    }
    let options = Options { ranks: arguments.ranks, auto: AutoValues::TrainerDefaults };
    let import = read(arguments.format.into(), &arguments.file, options)?;
    let config = checked(&import)?;
    let text = import.to_toml_with(&|key| {
        let mut found = in_use(&config, key)?;
        if import.settings.iter().any(|setting| setting.key == key) {
            found.origin = None;
        }
        Some(found)
    });
    match &arguments.output {
        None => say!("{}", text.trim_end()),
        Some(output) => write(output, &text, arguments.force)?,
    }
    note!("{}", summary(&import));
    if let Some(output) = &arguments.output {
        note!("written to {}", output.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes a RUN.toml atomically; with `replace`, over an existing file.
fn write(path: &Path, text: &str, replace: bool) -> Result<(), Failure> {
    let refuse = |error: std::io::Error| match error.kind() {
        ErrorKind::AlreadyExists => exists(path),
        _ => Failure::configuration(format!("cannot write {}: {error}", path.display())),
    };
    if !replace {
        let mut file = File::create_new(path).map_err(refuse)?;
        return file.write_all(text.as_bytes()).map_err(|error| {
            // The file is new, so removing the partial content loses nothing.
            let _ = fs::remove_file(path);
            refuse(error)
        });
    }
    if path.is_dir() {
        return Err(Failure::configuration(format!("cannot write {}: it is a directory", path.display())));
    }
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", std::process::id()));
    let new = PathBuf::from(name);
    fs::write(&new, text).and_then(|()| fs::rename(&new, path)).map_err(|error| {
        let _ = fs::remove_file(&new);
        refuse(error)
    })
}

fn exists(path: &Path) -> Failure {
    Failure::configuration(format!("{} exists; --force overwrites it", path.display()))
}

/// Returns the message for `lockstep import FILE`, where `typed` was given in place of the format; `None` if it is not a file.
pub(crate) fn hint(typed: &str) -> Option<String> {
    let text = read_text(Path::new(typed)).ok()?;
    Some(match lockstep_import::Format::guess(&text) {
        Some(format) => format!(
            "the format is missing; {typed} looks like a configuration of {}: lockstep import {} {typed}",
            format.tool(),
            format.word()
        ),
        None => format!(
            "the format is missing, and {typed} looks like neither: lockstep import deepspeed {typed}, or lockstep import accelerate {typed}"
        ),
    })
}

/// Imports a file; files that it names are looked for in its directory.
pub(crate) fn read(
    format: lockstep_import::Format,
    path: &Path,
    options: Options,
) -> Result<Import, Failure> {
    let text = read_text(path)
        .map_err(|error| Failure::configuration(format!("cannot read {}: {error}", path.display())))?;
    let beside = |name: &str| read_text(&path.parent().unwrap_or(Path::new("")).join(name));
    import(format, &text, &path.display().to_string(), options, &beside).map_err(|problems| {
        let mut message = problems.to_string();
        if let Some(other) = lockstep_import::Format::guess(&text).filter(|guess| *guess != format) {
            let (tool, word) = (other.tool(), other.word());
            message.push_str(&format!(
                "\n  the file looks like a configuration of {tool}: lockstep import {word} {}",
                path.display()
            ));
        }
        Failure::configuration(message)
    })
}

fn read_text(path: &Path) -> Result<String, String> {
    let metadata = fs::metadata(path).map_err(|error| error.to_string())?;
    if metadata.is_dir() {
        return Err("it is a directory".to_owned());
    }
    if metadata.len() > MAX_FILE_BYTES {
        return Err(format!("it is longer than {} KiB, which no configuration is", MAX_FILE_BYTES >> 10));
    }
    fs::read_to_string(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::InvalidData => "it is not text (UTF-8)".to_owned(),
        _ => error.to_string(),
    })
}

/// Checks the result by the rules of RUN.toml; a mistake is reported at its place in the other tool's file.
fn checked(import: &Import) -> Result<RunConfig, Failure> {
    let problems = match RunConfig::parse(&import.to_toml(), "run.toml", &[] as &[&str]) {
        Ok(config) => return Ok(config),
        Err(problems) => problems,
    };
    let lines = problems.iter().map(|problem| {
        let setting = import.settings.iter().find(|setting| setting.key == problem.key);
        let place = match setting.map(|setting| &setting.origin) {
            Some(Origin::File { file, line, key, .. }) => format!("{file}:{line}: {key}"),
            _ => import.file.clone(),
        };
        let allowed = match problem.allowed.as_str() {
            "" => String::new(),
            allowed => format!("; allowed: {allowed}"),
        };
        format!("{place}: as {}: {}{allowed}", problem.key, problem.what)
    });
    Err(Failure::configuration(lines.collect::<Vec<_>>().join("\n  ")))
}

/// Returns the value of a key in a run, and its origin.
fn in_use(config: &RunConfig, key: &str) -> Option<InUse> {
    let setting = config.settings().into_iter().find(|setting| setting.key == key)?;
    Some(InUse { value: setting.value, origin: Some(setting.origin.to_string()) })
}

/// Returns the table of an import for the terminal, with the run's values that override the file's.
pub(crate) fn table(import: &Import, config: &RunConfig) -> Vec<String> {
    import.table(&|key| {
        let found = in_use(config, key)?;
        let is_of_file =
            matches!(config.origin(key), config::Origin::File { name, .. } if *name == *import.file);
        Some(if is_of_file { InUse { origin: None, ..found } } else { found })
    })
}

/// Returns the imported values with their origins, for a run that uses the file.
pub(crate) fn values(import: &Import) -> Vec<Imported> {
    let values = import.settings.iter().map(|setting| {
        let (place, from) = match &setting.origin {
            Origin::File { file, line, .. } => {
                let from = if is_of_records(setting.key) { ImportedFrom::Rule } else { ImportedFrom::User };
                ((file.clone(), *line), from)
            }
            // A batch size given as micro-batch and accumulation steps was written by the user.
            Origin::Derived(_) if setting.key == "train.global_batch" => {
                ((import.file.clone(), 0), ImportedFrom::User)
            }
            Origin::Derived(_) | Origin::ForeignDefault(_) | Origin::Trainer { .. } => {
                ((import.file.clone(), 0), ImportedFrom::Rule)
            }
        };
        Imported { key: setting.key.to_owned(), value: setting.value.clone(), place, from }
    });
    values.collect()
}

/// Returns true if a key affects only the output and records of a run, so that two files may differ in it.
fn is_of_records(key: &str) -> bool {
    key == "train.log_every" || key.starts_with("metrics.")
}

/// Returns a summary line with the number of values by source.
fn summary(import: &Import) -> String {
    let count =
        |is: fn(&Origin) -> bool| import.settings.iter().filter(|setting| is(&setting.origin)).count();
    let given = count(|origin| matches!(origin, Origin::File { .. }));
    let defaults = count(|origin| matches!(origin, Origin::ForeignDefault(_)));
    let derived = count(|origin| matches!(origin, Origin::Derived(_)));
    let trainer = count(|origin| matches!(origin, Origin::Trainer { .. }));
    let idle: usize = import.without_effect.values().map(Vec::len).sum();
    let mut text = format!(
        "{}: {} translated, {} of {} written out, {derived} derived, {} without effect",
        import.file,
        human::plural(given, "value"),
        human::plural(defaults, "default"),
        import.tool,
        human::plural(idle, "key"),
    );
    if trainer > 0 || !import.autos.is_empty() {
        text.push_str(&format!(
            "\n\"auto\": {} of the Trainer written out, {} left to the run",
            human::plural(trainer, "default"),
            human::plural(import.autos.len(), "key")
        ));
    }
    for remark in &import.remarks {
        text.push_str(&format!("\nnote: {remark}"));
    }
    text
}
