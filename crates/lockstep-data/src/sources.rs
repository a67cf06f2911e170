//! Expands files, directories and globs into the sorted list of files of a corpus.
//!
//! Within a pattern, files are ordered by the bytes of their paths, on every machine. No match is skipped silently,
//! except hidden files below a directory.

use std::{
    fs,
    path::{Component, Path, PathBuf},
    str::FromStr,
};

use crate::{
    chat::ChatTemplate,
    error::{DataError, Result},
    indexed::pair_of,
    json_line::{RecordShape, TextOptions, parse_record},
    json_records::JsonRecords,
};

/// Format setting of a data source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// Decided by the extension. `.jsonl`, `.json`, `.ndjson` and `.jsonlines` hold JSON records, `.parquet` a table. A
    /// `.bin` belongs to a Megatron data set if its `.idx` lies beside it, and holds raw tokens otherwise. Archives,
    /// tables and other binary formats are rejected. Everything else is text.
    #[default]
    Auto,
    /// UTF-8 text; each file is one document.
    Text,
    /// One JSON object per line, or one array of objects; each object is one document.
    JsonLines,
    /// Parquet table; each row is one document.
    Parquet,
    /// Megatron indexed data set: a `.bin` with its `.idx`.
    Indexed,
    /// Raw token ids without a header, as nanoGPT writes them.
    RawTokens,
}

impl Format {
    const ALL: [Self; 6] =
        [Self::Auto, Self::Text, Self::JsonLines, Self::Parquet, Self::Indexed, Self::RawTokens];
    /// Names in the configuration, in the order of [`Self::ALL`].
    const NAMES: [&'static str; 6] = ["auto", "text", "jsonl", "parquet", "indexed", "tokens"];

    /// Returns the name of the format in the configuration. It is part of the key of cached tokens.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Text => "text",
            Self::JsonLines => "jsonl",
            Self::Parquet => "parquet",
            Self::Indexed => "indexed",
            Self::RawTokens => "tokens",
        }
    }

    /// Returns true if the file holds text, which needs a tokenizer.
    pub(crate) fn is_text(self) -> bool {
        !matches!(self, Self::Indexed | Self::RawTokens)
    }

    /// Returns true if records have named fields, of which one holds the text.
    pub(crate) fn has_fields(self) -> bool {
        matches!(self, Self::JsonLines | Self::Parquet)
    }
}

impl FromStr for Format {
    type Err = DataError;

    fn from_str(name: &str) -> Result<Self> {
        let known = Self::ALL.into_iter().find(|format| format.name() == name);
        known.ok_or_else(|| DataError::UnknownFormat { name: name.to_owned(), allowed: &Self::NAMES })
    }
}

/// File of a corpus, with its format resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// Path of the file; of a Megatron data set, that of its `.bin`.
    pub path: PathBuf,
    /// Format in which the file is read; never [`Format::Auto`].
    pub(crate) format: Format,
}

impl SourceFile {
    /// Builds the entry for `path`, read as `format`.
    ///
    /// # Errors
    /// If the format is [`Format::Auto`] and the extension is that of an unsupported format.
    pub fn new(path: PathBuf, format: Format) -> Result<Self> {
        let format = match format {
            Format::Auto => match extension_of(&path).as_str() {
                "jsonl" | "json" | "ndjson" | "jsonlines" => Format::JsonLines,
                "parquet" => Format::Parquet,
                "idx" => Format::Indexed,
                "bin" if pair_of(&path).is_some() => Format::Indexed,
                "bin" => Format::RawTokens,
                extension if NOT_TEXT.contains(&extension) => {
                    return Err(DataError::UnsupportedFormat { extension: extension.to_owned(), path });
                }
                _ => Format::Text,
            },
            format => format,
        };
        Ok(Self { path, format })
    }

    /// Returns true if the file holds text, which needs a tokenizer.
    pub fn is_text(&self) -> bool {
        self.format.is_text()
    }

    /// Returns the shape of the file's first record. `None` if the file is not JSON, is empty, or its first record is
    /// invalid.
    pub fn record_shape(&self, options: TextOptions<'_>) -> Option<RecordShape> {
        if self.format != Format::JsonLines {
            return None;
        }
        let record = JsonRecords::open(&self.path, 0).ok()?.next().ok()??;
        Some(parse_record(&record.text, options, &ChatTemplate::ChatMl).ok()?.0)
    }

    /// Returns true if document boundaries are marked only by end-of-text tokens, as in raw token files.
    pub fn hides_documents(&self) -> bool {
        self.format == Format::RawTokens
    }
}

/// Extensions of unsupported formats in which corpora are often stored. They give an error about the format instead of
/// one about an invalid byte.
const NOT_TEXT: [&str; 14] = [
    "arrow",
    "feather",
    "npy",
    "npz",
    "pt",
    "safetensors",
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

/// Returns the files that `patterns` match, pattern by pattern, each pattern's files sorted by path.
///
/// A pattern is a file, a directory (all files below it, except hidden ones), or a glob. In a glob, `*` stays within
/// one directory and `**` does not. A Megatron data set may also be named without its extension. Relative patterns
/// start at the current directory. A file that two patterns match is read twice.
///
/// # Errors
/// If a pattern matches no file, a glob cannot be parsed, a directory cannot be read, or a file has an unsupported
/// format.
pub fn expand<S: AsRef<str>>(patterns: &[S], format: Format) -> Result<Vec<SourceFile>> {
    let mut files = Vec::new();
    for pattern in patterns {
        let first = files.len();
        for path in expand_one(pattern.as_ref(), format)? {
            let mut file = SourceFile::new(path, format)?;
            if file.format == Format::Indexed {
                file.path.set_extension("bin");
                // A pattern may match both files of a data set; it is read once.
                if files[first..].contains(&file) {
                    continue;
                }
            }
            files.push(file);
        }
        tracing::debug!(pattern = pattern.as_ref(), files = files.len() - first, "data files");
    }
    Ok(files)
}

/// Returns the files that one pattern matches, as [`expand`] reads it.
pub(crate) fn expand_one(pattern: &str, format: Format) -> Result<Vec<PathBuf>> {
    let path = Path::new(pattern);
    if matches!(format, Format::Auto | Format::Indexed)
        && !path.exists()
        && let Some((bin, _)) = pair_of(path)
    {
        return Ok(vec![bin]);
    }
    // An existing file of this exact name takes precedence over the reading as a glob.
    if path.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    let (root, matches) = if path.is_dir() {
        (path.to_owned(), files_below(path, &|relative| !has_hidden_part(relative))?)
    } else {
        let (root, glob) = split_glob(path);
        // An empty root is the current directory.
        let is_there = root.as_os_str().is_empty() || root.is_dir();
        if glob.as_os_str().is_empty() || !is_there {
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

/// Splits a pattern into its literal directory prefix and the glob below it. A pattern without wildcards has an empty
/// glob.
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

/// Returns the files below `root` whose path relative to it is `wanted`, sorted by path. Follows symbolic links, except
/// to a directory that contains the link.
pub(crate) fn files_below(root: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<Vec<PathBuf>> {
    let start = if root.as_os_str().is_empty() { Path::new(".") } else { root };
    let mut found = Vec::new();
    for entry in walkdir::WalkDir::new(start).follow_links(true) {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => {
                let path = error.path().unwrap_or(start).to_owned();
                // A link to a parent directory leads to nothing new. A dangling link is skipped; naming it directly
                // gives an error when it is opened.
                let is_link = fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_symlink());
                if is_link {
                    continue;
                }
                return Err(DataError::io("read directory", &path)(error.into()));
            }
        };
        if let Ok(relative) = entry.path().strip_prefix(start)
            && entry.file_type().is_file()
            && wanted(relative)
        {
            found.push(root.join(relative));
        }
    }
    found.sort_unstable_by(|a, b| a.as_os_str().as_encoded_bytes().cmp(b.as_os_str().as_encoded_bytes()));
    Ok(found)
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
    fn a_bin_with_its_idx_is_one_data_set_under_any_of_its_names() {
        let dir = tree();
        for file in ["sub/m.bin", "sub/m.idx", "sub/raw.bin"] {
            fs::write(dir.path().join(file), "").unwrap();
        }
        for pattern in ["sub/m", "sub/m.bin", "sub/m.idx", "sub/m.*"] {
            assert_eq!(names(dir.path(), pattern), ["sub/m.bin"], "{pattern}");
        }
        let pattern = dir.path().join("sub/*.bin").to_string_lossy().into_owned();
        let formats: Vec<_> =
            expand(&[pattern], Format::Auto).unwrap().iter().map(|file| file.format.name()).collect();
        assert_eq!(formats, ["indexed", "tokens"]);
    }

    #[test]
    fn the_extension_decides_the_format_unless_it_is_given() {
        let format = |path: &str, format| SourceFile::new(path.into(), format).map(|file| file.format);
        assert_eq!(format("a.JSONL", Format::Auto).unwrap(), Format::JsonLines);
        assert_eq!(format("a.rs", Format::Auto).unwrap(), Format::Text);
        assert_eq!(format("README", Format::Auto).unwrap(), Format::Text);
        assert_eq!(format("a.json", Format::JsonLines).unwrap(), Format::JsonLines);
        assert_eq!(format("a.bin", Format::Auto).unwrap(), Format::RawTokens);
        let error = format("a.npy", Format::Auto).unwrap_err().to_string();
        assert!(error.contains("a.npy") && error.contains(".jsonl"), "{error}");
    }
}
