//! Tests that the book under `docs/` and the README match the program: it accepts every run and knows every command in them.

// The test that runs the commands reads the same pages.
#[path = "../tests/command_line/pages.rs"]
mod pages;

use clap::Parser;
use lockstep_config::RunConfig;
use lockstep_planner::cluster::Cluster;
use pages::pages;

use crate::command::Cli;

/// Splits a line into words as a shell does, up to a comment or a redirection.
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
    for page in pages() {
        for block in page.blocks().into_iter().filter(|block| block.kind == "toml") {
            if let Err(problems) = RunConfig::parse(&block.text, &page.name, &[""; 0]) {
                panic!("{problems}\n{}", block.text);
            }
            runs += 1;
        }
    }
    assert!(runs >= 10, "only {runs} runs found");
}

/// Clusters are marked by their fences: `toml cluster`.
#[test]
fn every_cluster_in_the_book_is_one_that_the_planner_takes() {
    let mut clusters = 0;
    for page in pages() {
        for block in page.blocks().into_iter().filter(|block| block.kind == "toml cluster") {
            if let Err(problems) = Cluster::parse(&block.text, &page.name) {
                panic!("{problems}\n{}", block.text);
            }
            clusters += 1;
        }
    }
    assert!(clusters >= 1, "no cluster found");
}

#[test]
fn every_command_in_the_book_is_one_that_the_program_knows() {
    let mut commands = 0;
    for page in pages() {
        for block in page.blocks() {
            let lines = block.text.lines().map(|line| line.strip_prefix("$ ").unwrap_or(line));
            for line in lines.filter(|line| line.starts_with("lockstep ")) {
                if let Err(error) = Cli::try_parse_from(words(line)) {
                    panic!("{}: {line}\n{error}", page.name);
                }
                commands += 1;
            }
        }
    }
    assert!(commands >= 20, "only {commands} commands found");
}

#[test]
fn every_source_file_that_the_architecture_names_is_there() {
    let text = std::fs::read_to_string(pages::root().join("ARCHITECTURE.md")).unwrap();
    let is_path =
        |word: &&str| word.starts_with("lockstep-") && word.contains('/') && !word.contains(['*', '{', ' ']);
    let paths: Vec<&str> = text.split('`').skip(1).step_by(2).filter(is_path).collect();
    assert!(paths.len() >= 50, "only {} paths found", paths.len());
    let missing = paths.into_iter().filter(|path| !pages::root().join("crates").join(path).exists());
    assert_eq!(missing.collect::<Vec<_>>(), [""; 0]);
}

#[test]
fn every_page_that_a_page_links_to_is_there() {
    for page in pages() {
        let targets = page.text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.contains("://") && !target.starts_with('#')) {
            let (file, heading) =
                target.split_once('#').map_or((target, None), |(file, id)| (file, Some(id)));
            let file =
                pages::root().join(&page.name).parent().expect("a page lies in a directory").join(file);
            assert!(file.exists(), "{}: {target} is not there", page.name);
            if let Some(heading) = heading {
                let text = std::fs::read_to_string(&file).unwrap();
                let ids: Vec<String> = text.lines().filter(|line| line.starts_with('#')).map(id_of).collect();
                assert!(ids.iter().any(|id| id == heading), "{}: {target}: {ids:?}", page.name);
            }
        }
    }
}

/// Returns the anchor of a heading: its words in lower case, joined by hyphens.
fn id_of(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}
