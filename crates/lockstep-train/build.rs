//! Packs sources of lower crates into one text, on which the built-in demonstration trains if cargo has downloaded no sources. A
//! program that was copied to another machine thus has its text with it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// Crates whose sources are taken, in this order. This crate depends on each of them, so a change to them rebuilds it anyway.
const CRATES: [&str; 5] =
    ["lockstep-tensor", "lockstep-comm", "lockstep-graph", "lockstep-engine", "lockstep-data"];
/// Approximate length of the text in bytes.
const BYTES: usize = 3 << 19;

fn main() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut text = String::with_capacity(BYTES);
    let mut all: Vec<PathBuf> = CRATES.iter().map(|name| own.join("..").join(name).join("src")).collect();
    // Outside of the workspace, as a package of a registry, the crate has its own sources alone.
    if !all.iter().all(|sources| sources.is_dir()) {
        all = vec![own.join("src")];
    }
    for sources in all {
        println!("cargo::rerun-if-changed={}", sources.display());
        for file in rust_files(&sources) {
            if text.len() < BYTES {
                text += &fs::read_to_string(&file).expect("a source can be read");
            }
        }
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    fs::write(out.join("own_sources.rs.txt"), text).expect("cargo's directory can be written");
}

/// Returns the Rust sources below `dir`, ordered by name.
fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).expect("sources of the workspace");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("readable").path()).collect();
    paths.sort();
    let (dirs, files): (Vec<PathBuf>, Vec<PathBuf>) = paths.into_iter().partition(|path| path.is_dir());
    let rust = files.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    rust.chain(dirs.iter().flat_map(|dir| rust_files(dir))).collect()
}
