//! Which files a corpus consists of: files, directories and globs become one sorted list.
//!
//! The order within a pattern is the order of the paths' bytes, on every machine; nothing that matches
//! is skipped in silence, except hidden files below a directory.

use std::{
    fs,
    path::{Component, Path, PathBuf},
    str::FromStr,
};

use crate::error::{DataError, Result};

/// How a file is read, as a configuration names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// By the extension: `.jsonl`, `.ndjson` and `.jsonlines` hold JSON lines; archives, tables and the
    /// like are refused; everything else is text.
    #[default]
    Auto,
    /// UTF-8 text; a file is one document.
    Text,
    /// One JSON object a line; a line is one document.
    JsonLines,
}

impl Format {
    const NAMES: [&'static str; 3] = ["auto", "text", "jsonl"];
}

impl FromStr for Format {
    type Err = DataError;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "text" => Ok(Self::Text),
            "jsonl" => Ok(Self::JsonLines),
            _ => Err(DataError::UnknownFormat { name: name.to_owned(), allowed: &Self::NAMES }),
        }
    }
}

/// One file of a corpus, with its format decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// Where it is.
    pub path: PathBuf,
    pub(crate) format: FileFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileFormat {
    Text,
    JsonLines,
}

impl SourceFile {
    /// The file at `path`, read as `format`.
    ///
    /// # Errors
    /// [`DataError::UnsupportedFormat`] if the extension is to decide and names something else than text.
    pub fn new(path: PathBuf, format: Format) -> Result<Self> {
        let format = match format {
            Format::Text => FileFormat::Text,
            Format::JsonLines => FileFormat::JsonLines,
            Format::Auto => match extension_of(&path).as_str() {
                "jsonl" | "ndjson" | "jsonlines" => FileFormat::JsonLines,
                extension if NOT_TEXT.contains(&extension) => {
                    return Err(DataError::UnsupportedFormat { extension: extension.to_owned(), path });
                }
                _ => FileFormat::Text,
            },
        };
        Ok(Self { path, format })
    }
}

/// Extensions of files that users keep corpora in and that are no plain text, so that the message is about
/// the format and not about some byte. A `.json` file may be either, so the user has to say.
const NOT_TEXT: [&str; 18] = [
    "parquet",
    "arrow",
    "feather",
    "bin",
    "idx",
    "npy",
    "npz",
    "pt",
    "safetensors",
    "json",
    "gz",
    "bz2",
    "xz",
    "zst",
    "zip",
    "tar",
    "7z",
    "pdf",
];

fn extension_of(path: &Path) -> String {
    path.extension().map(|e| e.to_string_lossy().to_ascii_lowercase()).unwrap_or_default()
}

/// The files that `patterns` name, pattern by pattern; within a pattern sorted by path.
///
/// A pattern is a file, a directory (all files below it, hidden ones excepted), or a glob in which `*`
/// stays within one directory and `**` does not. Relative ones start from the current directory. A file
/// that two patterns name is read twice.
///
/// # Errors
/// A pattern that matches no file, a glob that cannot be parsed, a directory that cannot be read, or a
/// file whose format is not supported.
pub fn expand<S: AsRef<str>>(patterns: &[S], format: Format) -> Result<Vec<SourceFile>> {
    let mut files = Vec::new();
    for pattern in patterns {
        for path in expand_one(pattern.as_ref())? {
            files.push(SourceFile::new(path, format)?);
        }
    }
    Ok(files)
}

fn expand_one(pattern: &str) -> Result<Vec<PathBuf>> {
    let path = Path::new(pattern);
    // What exists under this very name is meant, even if its name looks like a glob.
    if path.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    let (root, matches) = if path.is_dir() {
        (path.to_owned(), files_below(path, &|relative| !has_hidden_part(relative))?)
    } else {
        let (root, glob) = split_glob(path);
        if glob.as_os_str().is_empty() || !root.is_dir() {
            return Err(no_match(pattern, existing_ancestor(&root)));
        }
        let bad = |e: globset::Error| DataError::BadPattern {
            pattern: pattern.to_owned(),
            problem: e.kind().to_string(),
        };
        let matcher = globset::GlobBuilder::new(&glob.to_string_lossy())
            .literal_separator(true)
            .build()
            .map_err(bad)?
            .compile_matcher();
        let matches = files_below(&root, &|relative| matcher.is_match(relative))?;
        (root, matches)
    };
    if matches.is_empty() {
        return Err(no_match(pattern, root));
    }
    Ok(matches)
}

fn no_match(pattern: &str, searched: PathBuf) -> DataError {
    let searched = if searched.as_os_str().is_empty() { ".".into() } else { searched };
    DataError::NoMatch {
        pattern: pattern.to_owned(),
        searched: fs::canonicalize(&searched).unwrap_or(searched),
    }
}

/// Cuts a pattern into the directory that it names literally and the glob below it. The glob of a
/// pattern without any wildcard is empty.
fn split_glob(pattern: &Path) -> (PathBuf, PathBuf) {
    let is_glob = |part: &Component<'_>| part.as_os_str().to_string_lossy().contains(['*', '?', '[', '{']);
    let mut parts = pattern.components();
    let mut root = PathBuf::new();
    let mut rest = parts.clone();
    while let Some(part) = parts.next() {
        if is_glob(&part) {
            return (root, rest.as_path().to_owned());
        }
        root.push(part);
        rest = parts.clone();
    }
    (root, PathBuf::new())
}

fn existing_ancestor(path: &Path) -> PathBuf {
    path.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("")).to_owned()
}

fn has_hidden_part(relative: &Path) -> bool {
    relative.components().any(|part| part.as_os_str().as_encoded_bytes().starts_with(b"."))
}

/// The files below `root` whose path relative to it is `wanted`, sorted by path. Symbolic links are
/// followed, except back into a directory that the walk is already in.
pub(crate) fn files_below(root: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<Vec<PathBuf>> {
    let start = if root.as_os_str().is_empty() { Path::new(".") } else { root };
    let mut found = Vec::new();
    let mut open = Vec::new();
    walk(start, Path::new(""), &mut open, &mut |relative| {
        if wanted(relative) {
            found.push(root.join(relative));
        }
    })?;
    found.sort_unstable_by(|a, b| a.as_os_str().as_encoded_bytes().cmp(b.as_os_str().as_encoded_bytes()));
    Ok(found)
}

fn walk(
    directory: &Path,
    relative: &Path,
    open: &mut Vec<PathBuf>,
    visit: &mut dyn FnMut(&Path),
) -> Result<()> {
    let canonical = fs::canonicalize(directory).map_err(DataError::io("open directory", directory))?;
    if open.contains(&canonical) {
        return Ok(());
    }
    open.push(canonical);
    for entry in fs::read_dir(directory).map_err(DataError::io("read directory", directory))? {
        let entry = entry.map_err(DataError::io("read directory", directory))?;
        let (path, relative) = (entry.path(), relative.join(entry.file_name()));
        // A link that leads nowhere is no file; whoever names it gets an error when it is opened.
        let Ok(metadata) = fs::metadata(&path) else { continue };
        if metadata.is_dir() {
            walk(&path, &relative, open, visit)?;
        } else if metadata.is_file() {
            visit(&relative);
        }
    }
    open.pop();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for file in
            ["b.txt", "a.txt", "sub/c.txt", "sub/deep/d.jsonl", "sub/.hidden/e.txt", ".f.txt", "g[1].txt"]
        {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        dir
    }

    fn names(dir: &Path, pattern: &str) -> Vec<String> {
        let pattern = dir.join(pattern).to_string_lossy().into_owned();
        let files = expand(&[pattern], Format::Auto).unwrap();
        files.iter().map(|f| f.path.strip_prefix(dir).unwrap().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn patterns_name_files_in_the_order_of_their_paths() {
        let dir = tree();
        assert_eq!(names(dir.path(), ""), ["a.txt", "b.txt", "g[1].txt", "sub/c.txt", "sub/deep/d.jsonl"]);
        assert_eq!(names(dir.path(), "*.txt"), [".f.txt", "a.txt", "b.txt", "g[1].txt"]);
        assert_eq!(names(dir.path(), "[ab].txt"), ["a.txt", "b.txt"]);
        assert_eq!(names(dir.path(), "g[1].txt"), ["g[1].txt"]);
        assert_eq!(
            names(dir.path(), "sub/**/*.{txt,jsonl}"),
            ["sub/.hidden/e.txt", "sub/c.txt", "sub/deep/d.jsonl"]
        );
    }

    #[test]
    fn a_link_back_to_its_own_directory_ends_the_walk() {
        let dir = tree();
        std::os::unix::fs::symlink(dir.path().join("sub"), dir.path().join("sub/deep/loop")).unwrap();
        assert_eq!(names(dir.path(), "sub"), ["sub/c.txt", "sub/deep/d.jsonl"]);
    }

    #[test]
    fn the_extension_decides_the_format_unless_it_is_given() {
        let format = |path: &str, format| SourceFile::new(path.into(), format).map(|file| file.format);
        assert_eq!(format("a.JSONL", Format::Auto).unwrap(), FileFormat::JsonLines);
        assert_eq!(format("a.rs", Format::Auto).unwrap(), FileFormat::Text);
        assert_eq!(format("README", Format::Auto).unwrap(), FileFormat::Text);
        assert_eq!(format("a.json", Format::JsonLines).unwrap(), FileFormat::JsonLines);
        let error = format("a.parquet", Format::Auto).unwrap_err().to_string();
        assert!(error.contains("a.parquet") && error.contains(".jsonl"), "{error}");
    }
}
