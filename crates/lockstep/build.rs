//! Passes the commit to the program: `LOCKSTEP_COMMIT` if it is set, else the one in `.git`. Git itself is not needed, and a
//! source tree without a history builds as well.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-env-changed=LOCKSTEP_COMMIT");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let commit = env::var("LOCKSTEP_COMMIT").ok().or_else(|| commit(&root)).unwrap_or_default();
    let short = commit.get(..12).unwrap_or(&commit);
    let version = env!("CARGO_PKG_VERSION");
    let version = if short.is_empty() { version.to_owned() } else { format!("{version} ({short})") };
    println!("cargo::rustc-env=LOCKSTEP_BUILD_COMMIT={commit}");
    println!("cargo::rustc-env=LOCKSTEP_BUILD_VERSION={version}");
}

/// Returns the commit that is checked out in `root`.
fn commit(root: &Path) -> Option<String> {
    let git = git_directory(root)?;
    let head = read(&git.join("HEAD"))?;
    let Some(reference) = head.strip_prefix("ref: ") else { return whole(&head) };
    // A linked worktree has its own HEAD and shares the branches.
    let shared = read(&git.join("commondir")).map_or(git.clone(), |dir| git.join(dir));
    if let Some(found) = read(&shared.join(reference)) {
        return whole(&found);
    }
    let packed = read(&shared.join("packed-refs"))?;
    packed.lines().find_map(|line| whole(line.strip_suffix(reference)?))
}

/// Returns `.git`, or the directory that it names if it is a file.
fn git_directory(root: &Path) -> Option<PathBuf> {
    let git = root.join(".git");
    if git.is_dir() {
        return Some(git);
    }
    Some(root.join(read(&git)?.strip_prefix("gitdir: ")?))
}

/// Returns the text of a file; a change of it rebuilds the program.
fn read(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    println!("cargo::rerun-if-changed={}", path.display());
    Some(text.trim().to_owned())
}

fn whole(hash: &str) -> Option<String> {
    let hash = hash.trim();
    (hash.len() >= 40 && hash.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| hash.to_owned())
}
