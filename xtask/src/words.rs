//! `cargo xtask words`: statistics on doc comments. It counts openings that a newcomer has to read twice and comments of one or
//! two words, crate by crate. It also prints doc comments drawn at random, to be read by somebody who has never seen the
//! repository.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Number of doc comments that are printed.
const DRAWN: usize = 50;

/// Share of all doc comments that may open with a forbidden word, in percent.
const LIMIT_PERCENT: f64 = 2.0;

/// Openings without a noun or a verb: a doc comment of a type or field opens with its noun, that of a function with a verb.
const FORBIDDEN: [&str; 13] = [
    "what ",
    "whether ",
    "who ",
    "whose ",
    "whom ",
    "those ",
    "the same ",
    "how ",
    "of ",
    "that ",
    "which ",
    "where ",
    "why ",
];

/// A doc comment and the line at which it begins.
#[derive(Debug)]
struct Comment {
    path: PathBuf,
    line: usize,
    text: String,
    /// First line of code below the comment.
    item: String,
}

impl Comment {
    fn opens_with_a_forbidden_word(&self) -> bool {
        let text = self.text.to_lowercase();
        FORBIDDEN.iter().any(|word| text.starts_with(word))
    }

    /// Returns true for `/// What.` and the like; a link to another comment is a sentence.
    fn is_too_short(&self) -> bool {
        self.text.split_whitespace().count() <= 2 && !self.text.contains('[')
    }
}

/// Counts and prints doc comments; `arguments` are an optional seed of the draw, or `--list`, which prints every comment at fault
/// instead.
///
/// # Errors
/// If the share of forbidden openings reaches [`LIMIT_PERCENT`], or a directory cannot be read.
pub(crate) fn words(arguments: &[String]) -> Result<(), String> {
    let comments = all_comments()?;
    if arguments.first().is_some_and(|argument| argument == "--list") {
        let at_fault =
            comments.iter().filter(|comment| comment.opens_with_a_forbidden_word() || comment.is_too_short());
        let within = |comment: &&Comment| arguments.get(1).is_none_or(|part| comment.path.starts_with(part));
        at_fault
            .filter(within)
            .for_each(|Comment { path, line, text, .. }| println!("{}:{line}: {text}", path.display()));
        return Ok(());
    }
    let seed = match arguments.first() {
        Some(seed) => {
            seed.parse().map_err(|_| format!("{seed:?} is no seed; allowed: a whole number, or --list"))?
        }
        None => std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()),
    };
    draw(&comments, seed);
    judge(&comments)
}

/// Counts all doc comments, as CI does.
///
/// # Errors
/// If the share of forbidden openings reaches [`LIMIT_PERCENT`], or a directory cannot be read.
pub(crate) fn check() -> Result<(), String> {
    judge(&all_comments()?)
}

fn all_comments() -> Result<Vec<Comment>, String> {
    let mut comments = Vec::new();
    for directory in ["crates", "xtask", "examples"] {
        collect(Path::new(directory), &mut comments)?;
    }
    Ok(comments)
}

fn judge(comments: &[Comment]) -> Result<(), String> {
    let percent = count(comments);
    if percent < LIMIT_PERCENT {
        return Ok(());
    }
    Err(format!(
        "{percent:.1} % of all doc comments open with a forbidden word; allowed: below {LIMIT_PERCENT} % (--list [DIR] names them)"
    ))
}

/// Prints a table by crate; returns the share of forbidden openings, in percent.
fn count(comments: &[Comment]) -> f64 {
    let mut of_crates: BTreeMap<String, [usize; 3]> = BTreeMap::new();
    for comment in comments {
        let mut folders = comment.path.iter().skip_while(|folder| *folder == "crates");
        let name = folders.next().unwrap_or_default().to_string_lossy().into_owned();
        let counts = of_crates.entry(name).or_default();
        counts[0] += 1;
        counts[1] += usize::from(comment.opens_with_a_forbidden_word());
        counts[2] += usize::from(comment.is_too_short());
    }
    let sum = |index: usize| of_crates.values().map(|counts| counts[index]).sum::<usize>();
    println!("{:<24} {:>12} {:>9} {:>9}", "crate", "doc comments", "openings", "too short");
    for (name, [all, openings, short]) in &of_crates {
        println!("{name:<24} {all:>12} {openings:>9} {short:>9}");
    }
    println!("{:<24} {:>12} {:>9} {:>9}", "all", sum(0), sum(1), sum(2));
    100.0 * sum(1) as f64 / sum(0).max(1) as f64
}

/// Prints some of the comments, chosen by a linear congruential generator (Knuth, MMIX).
fn draw(comments: &[Comment], seed: u64) {
    println!("seed {seed}");
    let mut state = seed;
    for _ in 0..DRAWN.min(comments.len()) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let Comment { path, line, text, item } = &comments[(state >> 33) as usize % comments.len()];
        println!("\n{}:{line}\n  {text}\n  > {item}", path.display());
    }
    println!();
}

fn collect(directory: &Path, comments: &mut Vec<Comment>) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot read {}: {error}", directory.display());
    let mut paths: Vec<PathBuf> = fs::read_dir(directory)
        .map_err(failed)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()
        .map_err(failed)?;
    paths.sort();
    for path in paths {
        if path.is_dir() {
            if path.file_name().is_none_or(|name| name != "target") {
                collect(&path, comments)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            comments_of(&path, &fs::read_to_string(&path).map_err(failed)?, comments);
        }
    }
    Ok(())
}

/// Adds the doc comments of a file; consecutive lines form one text.
fn comments_of(path: &Path, source: &str, comments: &mut Vec<Comment>) {
    let mut lines = source.lines().enumerate().peekable();
    while let Some((number, line)) = lines.next() {
        let Some((marker, first)) = doc_line(line) else { continue };
        let mut text = first.to_owned();
        while let Some((_, next)) =
            lines.next_if(|(_, next)| doc_line(next).is_some_and(|(other, _)| other == marker))
        {
            let next = doc_line(next).map_or("", |(_, text)| text);
            text.push(' ');
            text.push_str(next);
        }
        let item = lines.peek().map_or("", |(_, item)| item.trim()).to_owned();
        comments.push(Comment {
            path: path.to_owned(),
            line: number + 1,
            text: text.trim().to_owned(),
            item,
        });
    }
}

/// Returns the marker and the text of a line of a doc comment.
fn doc_line(line: &str) -> Option<(&'static str, &str)> {
    let line = line.trim_start();
    ["///", "//!"].into_iter().find_map(|marker| Some((marker, line.strip_prefix(marker)?.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doc_comment_is_one_text_and_known_by_its_opening() {
        let source = "//! A file.\n\n/// What there\n/// is.\nstruct A;\n    /// Rank.\n    b: u32,\n/// See [`A`].\nfn c() {}\n";
        let mut comments = Vec::new();
        comments_of(Path::new("a.rs"), source, &mut comments);
        let texts: Vec<_> = comments.iter().map(|comment| (comment.line, comment.text.as_str())).collect();
        assert_eq!(texts, [(1, "A file."), (3, "What there is."), (6, "Rank."), (8, "See [`A`].")]);
        let at_fault: Vec<_> = comments
            .iter()
            .map(|comment| (comment.opens_with_a_forbidden_word(), comment.is_too_short()))
            .collect();
        assert_eq!(at_fault, [(false, true), (true, false), (false, true), (false, false)]);
    }
}
