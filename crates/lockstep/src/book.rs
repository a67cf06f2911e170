//! The book under `docs/` and the README hold to the program: every run in them is one that it takes, every command one
//! that it knows.

use std::path::{Path, PathBuf};

use clap::Parser;
use lockstep_plan::cluster::Cluster;
use lockstep_train::RunConfig;

use crate::Cli;

fn pages() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let docs = std::fs::read_dir(root.join("docs")).expect("the book is there");
    let mut pages: Vec<PathBuf> = docs.map(|entry| entry.expect("readable").path()).collect();
    pages.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.push(root.join("README.md"));
    pages.into_iter().map(|path| (path.clone(), std::fs::read_to_string(&path).expect("text"))).collect()
}

/// The fenced blocks of a page, with what their fence says.
fn blocks(page: &str) -> Vec<(&str, String)> {
    let mut blocks: Vec<(&str, String)> = Vec::new();
    let mut inside = false;
    for line in page.lines() {
        match (line.strip_prefix("```"), blocks.last_mut()) {
            (Some(kind), _) if !inside => {
                blocks.push((kind, String::new()));
                inside = true;
            }
            (Some(_), _) => inside = false,
            (None, Some((_, text))) if inside => *text += &format!("{line}\n"),
            (None, _) => {}
        }
    }
    blocks
}

/// A line as a shell cuts it into words, up to a comment or a redirection.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quote = None;
    for c in line.chars() {
        let word = words.last_mut().expect("there is always one");
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '\'' | '"') => quote = Some(c),
            (None, '#' | '>') if word.is_empty() => break,
            (None, c) if c.is_whitespace() => words.push(String::new()),
            (_, c) => word.push(c),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

#[test]
fn every_run_in_the_book_is_one_that_the_program_takes() {
    let mut runs = 0;
    for (path, page) in pages() {
        for (_, text) in blocks(&page).into_iter().filter(|(kind, _)| *kind == "toml") {
            let name = path.display().to_string();
            if let Err(problems) = RunConfig::parse(&text, &name, &[""; 0]) {
                panic!("{problems}\n{text}");
            }
            runs += 1;
        }
    }
    assert!(runs >= 10, "only {runs} runs found");
}

/// Their fences say so: `toml cluster`.
#[test]
fn every_cluster_in_the_book_is_one_that_the_planner_takes() {
    let mut clusters = 0;
    for (path, page) in pages() {
        for (_, text) in blocks(&page).into_iter().filter(|(kind, _)| *kind == "toml cluster") {
            if let Err(problems) = Cluster::parse(&text, &path.display().to_string()) {
                panic!("{problems}\n{text}");
            }
            clusters += 1;
        }
    }
    assert!(clusters >= 1, "no cluster found");
}

#[test]
fn every_command_in_the_book_is_one_that_the_program_knows() {
    let mut commands = 0;
    for (path, page) in pages() {
        let lines = blocks(&page).into_iter().flat_map(|(_, text)| {
            text.lines().filter(|line| line.starts_with("lockstep ")).map(str::to_owned).collect::<Vec<_>>()
        });
        for line in lines {
            if let Err(error) = Cli::try_parse_from(words(&line)) {
                panic!("{}: {line}\n{error}", path.display());
            }
            commands += 1;
        }
    }
    assert!(commands >= 20, "only {commands} commands found");
}

#[test]
fn every_page_that_a_page_links_to_is_there() {
    for (path, page) in pages() {
        let targets = page.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.contains("://") && !target.starts_with('#')) {
            let (file, heading) =
                target.split_once('#').map_or((target, None), |(file, id)| (file, Some(id)));
            let file = path.parent().expect("a page lies in a directory").join(file);
            assert!(file.exists(), "{}: {target} is not there", path.display());
            if let Some(heading) = heading {
                let text = std::fs::read_to_string(&file).unwrap();
                let ids: Vec<String> = text.lines().filter(|line| line.starts_with('#')).map(id_of).collect();
                assert!(ids.iter().any(|id| id == heading), "{}: {target}: {ids:?}", path.display());
            }
        }
    }
}

/// What a heading is linked by: its words in lower case, joined by hyphens.
fn id_of(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}
