//! Brace expressions in lists of shards, as the shell expands them: `train-{000000..000099}.tar`, `{a,b}.tar`.

use std::path::PathBuf;

use crate::{
    error::{DataError, Result},
    sources::{Format, expand_one},
};

/// Maximum number of files that one list names.
const MOST_FILES: usize = 1 << 20;

/// Maximum depth of braces within braces.
const MOST_DEPTH: usize = 16;

/// Returns the files that `shards` names: lists joined by `::`, each with brace expressions. A range keeps its leading
/// zeros; braces without a comma or a range stay as they are.
///
/// # Errors
/// If the list names no file, more than 2^20, or has more than 16 braces within each other.
pub fn expand_shards(shards: &str) -> Result<Vec<PathBuf>> {
    let bad = |problem| DataError::BadPattern { pattern: shards.to_owned(), problem };
    let mut names = Vec::new();
    for part in shards.split("::").filter(|part| !part.is_empty()) {
        expand_into(part, &mut names, 0).map_err(bad)?;
    }
    if names.is_empty() {
        return Err(bad("it names no file".to_owned()));
    }
    Ok(names.into_iter().map(PathBuf::from).collect())
}

/// Returns the files and directories that `patterns` name: lists as of [`expand_shards`], whose names may be globs. A name that
/// exists is that file or directory; a glob stands for its files, sorted by path.
///
/// # Errors
/// If a name neither exists nor matches a file, or a list or glob cannot be parsed.
pub fn expand_paths<S: AsRef<str>>(patterns: &[S]) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for pattern in patterns {
        for path in expand_shards(pattern.as_ref())? {
            if path.exists() {
                paths.push(path);
            } else {
                paths.extend(expand_one(&path.to_string_lossy(), Format::Text)?);
            }
        }
    }
    Ok(paths)
}

/// Appends the expansions of `text`, the first brace varying slowest.
fn expand_into(text: &str, names: &mut Vec<String>, depth: usize) -> Result<(), String> {
    if depth > MOST_DEPTH {
        return Err(format!("it has more than {MOST_DEPTH} braces"));
    }
    let Some((start, end, choices)) = first_expression(text, depth)? else {
        names.push(text.to_owned());
        return if names.len() > MOST_FILES {
            Err(format!("it names more than {MOST_FILES} files"))
        } else {
            Ok(())
        };
    };
    let (before, after) = (&text[..start], &text[end..]);
    let mut tails = Vec::new();
    expand_into(after, &mut tails, depth + 1)?;
    for choice in choices {
        for tail in &tails {
            if names.len() >= MOST_FILES {
                return Err(format!("it names more than {MOST_FILES} files"));
            }
            names.push(format!("{before}{choice}{tail}"));
        }
    }
    Ok(())
}

/// Returns the byte range and the choices of the first brace expression.
fn first_expression(text: &str, depth: usize) -> Result<Option<(usize, usize, Vec<String>)>, String> {
    for (start, _) in text.match_indices('{') {
        let Some((end, commas)) = closing_brace(text, start) else { continue };
        let inner = &text[start + 1..end];
        if let Some(choices) = range(inner)? {
            return Ok(Some((start, end + 1, choices)));
        }
        if !commas.is_empty() {
            let mut choices = Vec::new();
            let mut from = start + 1;
            for comma in commas.into_iter().chain([end]) {
                expand_into(&text[from..comma], &mut choices, depth + 1)?;
                from = comma + 1;
            }
            return Ok(Some((start, end + 1, choices)));
        }
    }
    Ok(None)
}

/// Returns the brace that closes the one at `start`, and the commas between them outside of inner braces.
fn closing_brace(text: &str, start: usize) -> Option<(usize, Vec<usize>)> {
    let mut depth = 0;
    let mut commas = Vec::new();
    for (at, c) in text[start..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return Some((start + at, commas)),
            '}' => depth -= 1,
            ',' if depth == 1 => commas.push(start + at),
            _ => {}
        }
    }
    None
}

/// Returns the numbers of `first..last` or `first..last..step`; `None` if `text` is no range.
fn range(text: &str) -> Result<Option<Vec<String>>, String> {
    let mut parts = text.split("..");
    let (Some(first), Some(last), step, None) = (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Ok(None);
    };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(first) || !is_number(last) || !step.is_none_or(is_number) {
        return Ok(None);
    }
    let number = |text: &str| text.parse::<u64>().map_err(|_| format!("{text} is too large"));
    let (from, to, step) = (number(first)?, number(last)?, number(step.unwrap_or("1"))?.max(1));
    let count = from.abs_diff(to) / step;
    if count >= MOST_FILES as u64 {
        return Err(format!("{{{text}}} names more than {MOST_FILES} files"));
    }
    let is_padded = [first, last].iter().any(|text| text.len() > 1 && text.starts_with('0'));
    let width = if is_padded { first.len().max(last.len()) } else { 0 };
    let numbers = (0..=count).map(|i| if from <= to { from + i * step } else { from - i * step });
    Ok(Some(numbers.map(|number| format!("{number:0width$}")).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        expand_shards(text).unwrap().iter().map(|path| path.display().to_string()).collect()
    }

    #[test]
    fn braces_expand_as_in_the_shell() {
        for (text, expected) in [
            ("x.tar", &["x.tar"][..]),
            ("x-{000..002}.tar", &["x-000.tar", "x-001.tar", "x-002.tar"]),
            ("x-{8..10}", &["x-8", "x-9", "x-10"]),
            ("x-{08..10}", &["x-08", "x-09", "x-10"]),
            ("{2..0}", &["2", "1", "0"]),
            ("{0..9..4}", &["0", "4", "8"]),
            ("{a,b}/{0..1}", &["a/0", "a/1", "b/0", "b/1"]),
            ("{a,b{1,2}}", &["a", "b1", "b2"]),
            ("{x}.tar", &["{x}.tar"]),
            ("{x}{0..1}", &["{x}0", "{x}1"]),
            ("{a..b}", &["{a..b}"]),
            ("x{,y}", &["x", "xy"]),
            ("x{", &["x{"]),
            ("a::b{0..1}", &["a", "b0", "b1"]),
        ] {
            assert_eq!(names(text), expected, "{text}");
        }
    }

    #[test]
    fn paths_are_what_exists_or_what_a_glob_matches() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b-1.tar", "a-0.tar", "a-1.tar"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let names = |patterns: &[String]| -> Vec<String> {
            let paths = expand_paths(patterns).unwrap_or_else(|error| panic!("{patterns:?}: {error}"));
            paths.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect()
        };
        assert_eq!(names(&[at("{b,a}-1.tar"), at("a-*.tar")]), ["b-1.tar", "a-1.tar", "a-0.tar", "a-1.tar"]);
        assert_eq!(expand_paths(&[at("")]).unwrap(), [PathBuf::from(at(""))], "a directory stays one");
        for missing in ["c.tar", "{a,c}-1.tar", "c*"] {
            let error = expand_paths(&[at(missing)]).unwrap_err().to_string();
            assert!(error.contains("no file matches"), "{missing}: {error}");
        }
    }

    #[test]
    fn a_list_without_end_is_refused() {
        for text in ["{0..99999999}", "{0..999}{0..999}{0..999}", "{0..99999999999999999999999}", "", "::"] {
            let error = expand_shards(text).unwrap_err().to_string();
            assert!(error.len() < 300, "{error}");
        }
        assert!(expand_shards(&"{a,".repeat(1000)).is_ok_and(|names| names.len() == 1));
        assert!(expand_shards(&format!("{}{}", "{a,".repeat(100), "}".repeat(100))).is_err());
    }
}
