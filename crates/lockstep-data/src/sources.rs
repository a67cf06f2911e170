//! Which files a corpus consists of: files, directories and globs become one sorted list.
//!
//! The order within a pattern is the order of the paths' bytes, on every machine; nothing that matches
//! is skipped in silence, except hidden files below a directory.

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

/// How a file is read, as a configuration names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// By the extension: `.jsonl`, `.json`, `.ndjson` and `.jsonlines` hold records of JSON, `.parquet` a table; a `.bin` is one of Megatron's if its
    /// `.idx` lies beside it, else raw tokens; archives, tables and the like are refused; everything else is text.
    #[default]
    Auto,
    /// UTF-8 text; a file is one document.
    Text,
    /// One JSON object a line, or one array of objects; an object is one document.
    JsonLines,
    /// Parquet; a row is one document.
    Parquet,
    /// Megatron's indexed data sets: a `.bin` with its `.idx`.
    Indexed,
    /// Ids and nothing else, as nanoGPT writes them.
    RawTokens,
}

impl Format {
    const NAMES: [&'static str; 6] = ["auto", "text", "jsonl", "parquet", "indexed", "tokens"];
}

impl FromStr for Format {
    type Err = DataError;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "text" => Ok(Self::Text),
            "jsonl" => Ok(Self::JsonLines),
            "parquet" => Ok(Self::Parquet),
            "indexed" => Ok(Self::Indexed),
            "tokens" => Ok(Self::RawTokens),
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
    Parquet,
    Indexed,
    RawTokens,
}

impl FileFormat {
    /// Whether a tokenizer is needed to read it.
    pub(crate) fn is_text(self) -> bool {
        match self {
            Self::Text | Self::JsonLines | Self::Parquet => true,
            Self::Indexed | Self::RawTokens => false,
        }
    }

    /// Whether it has fields, of which one is named.
    pub(crate) fn has_fields(self) -> bool {
        matches!(self, Self::JsonLines | Self::Parquet)
    }

    /// What it is called in a configuration.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::JsonLines => "jsonl",
            Self::Parquet => "parquet",
            Self::Indexed => "indexed",
            Self::RawTokens => "tokens",
        }
    }
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
            Format::Parquet => FileFormat::Parquet,
            Format::Indexed => FileFormat::Indexed,
            Format::RawTokens => FileFormat::RawTokens,
            Format::Auto => match extension_of(&path).as_str() {
                "jsonl" | "json" | "ndjson" | "jsonlines" => FileFormat::JsonLines,
                "parquet" => FileFormat::Parquet,
                "idx" => FileFormat::Indexed,
                "bin" if pair_of(&path).is_some() => FileFormat::Indexed,
                "bin" => FileFormat::RawTokens,
                extension if NOT_TEXT.contains(&extension) => {
                    return Err(DataError::UnsupportedFormat { extension: extension.to_owned(), path });
                }
                _ => FileFormat::Text,
            },
        };
        Ok(Self { path, format })
    }

    /// Whether a tokenizer is needed to read it.
    pub fn is_text(&self) -> bool {
        self.format.is_text()
    }

    /// What kind of records it has, as the first of them shows; none where it has no records, or no sound one.
    pub fn record_shape(&self, options: TextOptions<'_>) -> Option<RecordShape> {
        if self.format != FileFormat::JsonLines {
            return None;
        }
        let record = JsonRecords::open(&self.path, 0).ok()?.next().ok()??;
        Some(parse_record(&record.text, options, &ChatTemplate::ChatMl).ok()?.0)
    }

    /// Whether its documents can be told apart by end-of-text tokens only.
    pub fn hides_documents(&self) -> bool {
        self.format == FileFormat::RawTokens
    }
}

/// Extensions of files that users keep corpora in and that are no plain text, so that the message is about
/// the format and not about some byte.
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

/// The files that `patterns` name, pattern by pattern; within a pattern sorted by path.
///
/// A pattern is a file, a directory (all files below it, hidden ones excepted), or a glob in which `*`
/// stays within one directory and `**` does not; one of Megatron's data sets may also be named without extension.
/// Relative ones start from the current directory. A file that two patterns name is read twice.
///
/// # Errors
/// A pattern that matches no file, a glob that cannot be parsed, a directory that cannot be read, or a
/// file whose format is not supported.
pub fn expand<S: AsRef<str>>(patterns: &[S], format: Format) -> Result<Vec<SourceFile>> {
    let mut files = Vec::new();
    for pattern in patterns {
        let first = files.len();
        for path in expand_one(pattern.as_ref(), format)? {
            let mut file = SourceFile::new(path, format)?;
            if file.format == FileFormat::Indexed {
                file.path.set_extension("bin");
                // A pattern may name both halves of a data set; it is read once.
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

fn expand_one(pattern: &str, format: Format) -> Result<Vec<PathBuf>> {
    let path = Path::new(pattern);
    if matches!(format, Format::Auto | Format::Indexed)
        && !path.exists()
        && let Some((bin, _)) = pair_of(path)
    {
        return Ok(vec![bin]);
    }
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
    for entry in walkdir::WalkDir::new(start).follow_links(true) {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => {
                let path = error.path().unwrap_or(start).to_owned();
                // A link back up the tree leads to nothing new; one that leads nowhere is no file, and whoever names
                // it gets an error when it is opened.
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
        assert_eq!(format("a.JSONL", Format::Auto).unwrap(), FileFormat::JsonLines);
        assert_eq!(format("a.rs", Format::Auto).unwrap(), FileFormat::Text);
        assert_eq!(format("README", Format::Auto).unwrap(), FileFormat::Text);
        assert_eq!(format("a.json", Format::JsonLines).unwrap(), FileFormat::JsonLines);
        assert_eq!(format("a.bin", Format::Auto).unwrap(), FileFormat::RawTokens);
        let error = format("a.npy", Format::Auto).unwrap_err().to_string();
        assert!(error.contains("a.npy") && error.contains(".jsonl"), "{error}");
    }
}
