//! Real text for the built-in demonstration: the Rust sources that cargo has downloaded to build this program.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use crate::sources::{Format, SourceFile, files_below};

/// Size limit of a file. Larger files are mostly tables and generated bindings.
const LONGEST_FILE_BYTES: u64 = 128 << 10;

/// Minimum size of a usable corpus.
const LEAST_BYTES: u64 = 1 << 20;

/// Returns Rust sources of about `max_bytes` in total from cargo's registry (`$CARGO_HOME`, else `~/.cargo`), in the
/// order of their paths. Returns an empty list if the registry holds less than 1 MiB of them, and less than
/// `max_bytes`.
///
/// Skips files that are not UTF-8 and files above 128 KiB.
pub fn demo_sources(max_bytes: u64) -> Vec<SourceFile> {
    let cargo_home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo_home = cargo_home.or_else(|| env::home_dir().map(|home| home.join(".cargo")));
    cargo_home.map_or(Vec::new(), |home| corpus(&home.join("registry").join("src"), max_bytes))
}

/// Returns the sources below `registry`; empty if there are too few.
fn corpus(registry: &Path, max_bytes: u64) -> Vec<SourceFile> {
    let (files, bytes) = rust_sources(registry, max_bytes);
    if bytes >= LEAST_BYTES.min(max_bytes) { files } else { Vec::new() }
}

/// Returns the first sources below `root`, up to `max_bytes`, and their total size. An unreadable directory counts as
/// empty.
fn rust_sources(root: &Path, max_bytes: u64) -> (Vec<SourceFile>, u64) {
    let is_rust = |path: &Path| path.extension().is_some_and(|extension| extension == "rs");
    let mut files = Vec::new();
    let mut bytes = 0;
    for path in files_below(root, &is_rust).unwrap_or_default() {
        if bytes >= max_bytes {
            break;
        }
        if fs::metadata(&path).is_ok_and(|metadata| metadata.len() > LONGEST_FILE_BYTES) {
            continue;
        }
        let Ok(text) = fs::read_to_string(&path) else { continue };
        if let Ok(file) = SourceFile::new(path, Format::Text) {
            bytes += text.len() as u64;
            files.push(file);
        }
    }
    (files, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(dir: &Path, names_and_texts: &[(&str, &[u8])]) -> PathBuf {
        for (name, text) in names_and_texts {
            let path = dir.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir.to_owned()
    }

    #[test]
    fn the_registry_is_taken_in_order_up_to_the_limit_and_without_what_is_no_text() {
        let dir = tempfile::tempdir().unwrap();
        let (kilo, long) = ([b'a'; 1000], [b'a'; LONGEST_FILE_BYTES as usize + 1]);
        let registry = sources(
            &dir.path().join("registry"),
            &[
                ("b-1.0/src/lib.rs", &kilo),
                ("a-1.0/src/lib.rs", &kilo),
                ("a-1.0/src/bad.rs", b"\xFF"),
                ("a-1.0/src/long.rs", &long),
                ("a-1.0/README.md", &kilo),
                ("c-1.0/src/lib.rs", &kilo),
            ],
        );
        let found = corpus(&registry, 1_500);
        let paths: Vec<_> = found.iter().map(|file| file.path.strip_prefix(&registry).unwrap()).collect();
        assert_eq!(paths, [Path::new("a-1.0/src/lib.rs"), Path::new("b-1.0/src/lib.rs")]);
    }

    #[test]
    fn a_small_registry_or_none_is_no_corpus() {
        let dir = tempfile::tempdir().unwrap();
        let registry = sources(&dir.path().join("registry"), &[("a/lib.rs", b"fn a() {}")]);
        assert_eq!(corpus(&registry, 1 << 20), []);
        assert_eq!(corpus(Path::new("nowhere"), 1 << 20), []);
    }
}
