//! Shared libraries of accelerators and MPI: searched by name only; nothing is opened.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::finding::Finding;

/// Libraries to look for: name and possible files, the newest version first.
const LIBRARIES: [(&str, &[&str]); 5] = [
    ("CUDA driver", &["libcuda.so.1", "libcuda.so"]),
    ("NCCL", &["libnccl.so.2", "libnccl.so"]),
    ("cuDNN", &["libcudnn.so.9", "libcudnn.so.8", "libcudnn.so"]),
    ("cuBLASLt", &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"]),
    ("MPI", &["libmpi.so.40", "libmpi.so.12", "libmpi.so"]),
];

/// Directories in which the dynamic linker and installers put libraries.
const DIRECTORIES: [&str; 8] = [
    "/lib64",
    "/usr/lib64",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/lib/wsl/lib",
];

/// Returns one finding for each library.
pub(super) fn all() -> Vec<Finding> {
    let cache = fs::read("/etc/ld.so.cache").unwrap_or_default();
    let variable = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let directories: Vec<PathBuf> = std::env::split_paths(&variable)
        .filter(|path| path.is_absolute())
        .chain(DIRECTORIES.iter().map(PathBuf::from))
        .collect();
    LIBRARIES
        .iter()
        .map(|(name, files)| {
            let found = files
                .iter()
                .find_map(|file| in_directories(file, &directories).or_else(|| in_cache(file, &cache)));
            let value = match found {
                Some(path) => format!("{} (not used yet)", path.display()),
                None => "not found (not used yet)".to_owned(),
            };
            Finding::ok("libraries", *name, value)
        })
        .collect()
}

fn in_directories(file: &str, directories: &[PathBuf]) -> Option<PathBuf> {
    directories.iter().map(|directory| directory.join(file)).find(|path| path.exists())
}

/// Returns the path of a library from the linker's cache, a binary table of null-terminated strings.
fn in_cache(file: &str, cache: &[u8]) -> Option<PathBuf> {
    let paths: BTreeSet<&str> = cache
        .split(|&byte| byte == 0)
        .filter_map(|text| std::str::from_utf8(text).ok())
        .filter(|text| text.starts_with('/') && text.rsplit('/').next() == Some(file))
        .collect();
    paths.into_iter().map(Path::new).find(|path| path.exists()).map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_by_its_directory_or_in_the_cache_if_the_file_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("libmpi.so.40");
        let cache =
            [b"\x01\xff\0libmpi.so.40\0".as_slice(), file.to_str().unwrap().as_bytes(), b"\0"].concat();
        let directories = [dir.path().to_owned()];
        assert_eq!(
            (in_directories("libmpi.so.40", &directories), in_cache("libmpi.so.40", &cache)),
            (None, None)
        );
        fs::write(&file, "").unwrap();
        assert_eq!(in_directories("libmpi.so.40", &directories), Some(file.clone()));
        assert_eq!(in_cache("libmpi.so.40", &cache), Some(file));
        assert_eq!(in_cache("libmpi.so", &cache), None, "another name");
    }
}
