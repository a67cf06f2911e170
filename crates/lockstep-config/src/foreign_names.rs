//! Names from other tools: one table, `foreign_names.tsv`, in which each is either an alias of a name here, or has a sentence that
//! says what to write instead.
//!
//! Keys are accepted in every section but `[model]`, whose other keys are those of a `config.json`; it has a list of its own.
//! Values belong to one key. Flags and commands are looked up when the command line does not know them.

use std::sync::LazyLock;

use serde_json::Value;

use crate::keys::{KEYS, SECTIONS};
use crate::value::ValueType;

/// The place where a name is typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameContext {
    /// A key of RUN.toml or of `--set`, in any section but `[model]`.
    Key,
    /// A key of `[model]`.
    ModelKey,
    /// The value of this key.
    Value(&'static str),
    /// A flag, without its dashes.
    Flag,
    /// A command of `lockstep`.
    Command,
    /// The name of a model.
    Model,
}

/// The answer to a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The name is an alias of this one and works.
    Is(&'static str),
    /// Instructions on what to write instead.
    Write(&'static str),
}

/// A name from another tool, with the answer to it.
#[derive(Debug, Clone, Copy)]
pub struct ForeignName {
    /// The place where it is typed.
    pub place: NameContext,
    /// The name in lower case, with underscores in keys and dashes in flags.
    pub typed: &'static str,
    /// The answer to the name.
    pub answer: Answer,
}

/// Names from other tools, in the order of `foreign_names.tsv`.
pub static FOREIGN_NAMES: LazyLock<Vec<ForeignName>> = LazyLock::new(|| rows().filter_map(parsed).collect());

/// Returns the lines of the table, without its comment.
fn rows() -> impl Iterator<Item = &'static str> {
    include_str!("foreign_names.tsv").lines().filter(|line| !line.starts_with('#'))
}

/// Parses a line: the place, the name, `is` or `write`, and the name or the sentence here. `None` if it is malformed.
fn parsed(row: &'static str) -> Option<ForeignName> {
    let columns: Vec<&str> = row.split('\t').collect();
    let [place, typed, kind, text] = columns[..] else { return None };
    let place = match place {
        "key" => NameContext::Key,
        "model-key" => NameContext::ModelKey,
        "flag" => NameContext::Flag,
        "command" => NameContext::Command,
        "model" => NameContext::Model,
        key => NameContext::Value(key),
    };
    let answer = match kind {
        "is" => Answer::Is(text),
        "write" => Answer::Write(text),
        _ => return None,
    };
    Some(ForeignName { place, typed, answer })
}

/// Returns a name in the form of the table.
fn normal(typed: &str, separator: char) -> String {
    let separated = |c: char| if c == '-' || c == '_' { separator } else { c.to_ascii_lowercase() };
    typed.chars().map(separated).collect()
}

fn find(place: NameContext, typed: &str) -> Option<Answer> {
    FOREIGN_NAMES.iter().find(|habit| habit.place == place && habit.typed == typed).map(|habit| habit.answer)
}

/// Returns the answer to a key that does not exist here, with a known section or without any.
pub(crate) fn of_key(written: &str) -> Option<Answer> {
    let (section, name) = written.rsplit_once('.').unwrap_or(("", written));
    let root = section.split('.').next().unwrap_or(section);
    let is_known = root.is_empty() || SECTIONS.iter().any(|section| section.name == root);
    if !is_known || KEYS.iter().any(|key| key.name == written) {
        return None;
    }
    let place = if section == "model" { NameContext::ModelKey } else { NameContext::Key };
    find(place, &normal(name, '_'))
}

/// Returns the answer to a word that is no value of a key.
pub(crate) fn of_value(key: &str, value_type: ValueType, value: &Value) -> Option<Answer> {
    let word = value.as_str()?.to_ascii_lowercase();
    if let ValueType::Choice { allowed } = value_type
        && let Some(ours) = allowed.iter().find(|ours| **ours == word)
    {
        return Some(Answer::Is(ours));
    }
    let habit = FOREIGN_NAMES.iter().find(|habit| habit.place.is_value_of(key) && habit.typed == word);
    habit.map(|habit| habit.answer)
}

impl NameContext {
    fn is_value_of(self, key: &str) -> bool {
        matches!(self, Self::Value(of) if of == key)
    }
}

/// Returns the preset that a model's name is an alias of.
pub fn preset_of(name: &str) -> Option<&'static str> {
    match find(NameContext::Model, &name.to_ascii_lowercase()) {
        Some(Answer::Is(preset)) => Some(preset),
        _ => None,
    }
}

/// Returns the sentence on a flag that a command does not have; `typed` is without its dashes.
pub fn of_flag(typed: &str) -> Option<String> {
    let name = normal(name_of_flag(typed), '-');
    let is_it = |habit: &&ForeignName| habit.place == NameContext::Flag && normal(habit.typed, '-') == name;
    match FOREIGN_NAMES.iter().find(is_it)?.answer {
        Answer::Write(sentence) | Answer::Is(sentence) => Some(format!("write {sentence}")),
    }
}

fn name_of_flag(typed: &str) -> &str {
    typed.split('=').next().unwrap_or(typed)
}

/// Returns the `--set` argument that a flag stands for, for commands that have `--set`; `typed` is without its dashes.
pub fn setting_of_flag(typed: &str) -> Option<String> {
    let word = normal(name_of_flag(typed), '_');
    let key = KEYS.iter().find(|key| key.name == word || key.key() == word).map(|key| key.name);
    match key.map(Answer::Is).or_else(|| find(NameContext::Key, &word))? {
        Answer::Is(key) => Some(format!("write --set {key}=VALUE")),
        Answer::Write(sentence) => Some(format!("write {sentence}")),
    }
}

/// Returns the sentence on a command that does not exist.
pub fn of_command(typed: &str) -> Option<String> {
    match find(NameContext::Command, &normal(typed, '-'))? {
        Answer::Write(sentence) | Answer::Is(sentence) => Some(format!("write {sentence}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RunConfig;

    /// Returns a value that a key accepts, in TOML.
    fn example(name: &str) -> String {
        let key = KEYS.iter().find(|key| key.name == name).unwrap_or_else(|| panic!("{name} is no key"));
        match key.value_type {
            ValueType::Flag => "true".to_owned(),
            ValueType::Number => "0.5".to_owned(),
            ValueType::Integer => "1".to_owned(),
            ValueType::Choice { allowed } => format!("\"{}\"", allowed[0]),
            _ => "\"some.txt\"".to_owned(),
        }
    }

    #[test]
    fn every_row_parses_and_names_keys_that_exist() {
        assert_eq!(FOREIGN_NAMES.len(), rows().count());
        let exists = |name: &str| KEYS.iter().any(|key| key.name == name);
        for ForeignName { place, typed, answer } in FOREIGN_NAMES.iter() {
            match (place, answer) {
                (NameContext::Value(key), _) | (NameContext::Key, Answer::Is(key)) => {
                    assert!(exists(key), "{typed}: {key}")
                }
                _ => {}
            }
        }
    }

    #[test]
    fn every_key_works_or_has_a_sentence_and_no_neighbour() {
        for ForeignName { typed, answer, .. } in
            FOREIGN_NAMES.iter().filter(|habit| habit.place == NameContext::Key)
        {
            for section in ["train", "optimizer", "data"] {
                let ours = match answer {
                    Answer::Is(ours) => ours,
                    Answer::Write(_) => "train.steps",
                };
                let text = format!("[{section}]\n{typed} = {}\n", example(ours));
                let found = RunConfig::parse(&text, "run.toml", &[] as &[&str]);
                match (answer, found) {
                    (Answer::Is(ours), Ok(config)) => assert_ne!(
                        config.origin(ours),
                        crate::Origin::Default,
                        "{section}.{typed} sets {ours}"
                    ),
                    // Rules between keys may refuse it, but under its name here.
                    (Answer::Is(ours), Err(problems)) => {
                        assert!(problems.iter().all(|problem| problem.key == *ours), "{typed}: {problems}");
                    }
                    (Answer::Write(sentence), Err(problems)) => {
                        let text = problems.to_string();
                        assert!(text.contains(sentence) && !text.contains("nearest"), "{typed}: {text}");
                    }
                    (Answer::Write(_), Ok(_)) => panic!("{section}.{typed} is accepted"),
                }
            }
        }
    }

    #[test]
    fn every_key_of_a_model_has_a_sentence_and_is_not_taken_for_one_of_its_config_json() {
        for ForeignName { typed, answer, .. } in
            FOREIGN_NAMES.iter().filter(|habit| habit.place == NameContext::ModelKey)
        {
            let Answer::Write(sentence) = answer else { panic!("{typed} has no sentence") };
            for text in [
                format!("[model]\n{typed} = \"x\"\n"),
                format!("[model]\npreset = \"baby-gpt\"\n{typed} = 3\n"),
            ] {
                let problems =
                    RunConfig::parse(&text, "run.toml", &[] as &[&str]).expect_err(typed).to_string();
                assert!(problems.contains(sentence), "{typed}: {problems}");
            }
        }
    }

    #[test]
    fn every_value_works_or_has_a_sentence() {
        for ForeignName { place, typed, answer } in FOREIGN_NAMES.iter() {
            let NameContext::Value(key) = place else { continue };
            let setting = format!("{key}={}", typed.to_uppercase());
            let found = RunConfig::parse("", "run.toml", &[&setting]);
            match (answer, found) {
                (Answer::Is(ours), Ok(config)) => {
                    let setting = config.settings().into_iter().find(|setting| setting.key == *key);
                    assert_eq!(
                        setting.map(|setting| setting.value),
                        Some(Value::from(*ours)),
                        "{key} = {typed}"
                    );
                }
                (Answer::Is(_), Err(problems)) => {
                    let is_rule = |text: &str| text.contains("need") || text.contains("has no effect");
                    assert!(
                        problems.iter().all(|problem| is_rule(&problem.what)),
                        "{key} = {typed}: {problems}"
                    );
                }
                (Answer::Write(sentence), Err(problems)) => {
                    assert!(problems.to_string().contains(sentence), "{key} = {typed}: {problems}");
                }
                (Answer::Write(_), Ok(_)) => panic!("{key} = {typed} is accepted"),
            }
        }
    }

    #[test]
    fn models_are_presets_and_flags_and_commands_have_sentences() {
        assert!(FOREIGN_NAMES.len() >= 60);
        for ForeignName { place, typed, answer } in FOREIGN_NAMES.iter() {
            match (place, answer) {
                (NameContext::Model, Answer::Is(preset)) => {
                    lockstep_model::ModelConfig::preset(preset)
                        .unwrap_or_else(|error| panic!("{typed}: {error}"));
                    assert_eq!(preset_of(&typed.to_uppercase()), Some(*preset));
                }
                (NameContext::Flag, Answer::Write(sentence)) => {
                    assert_eq!(of_flag(typed), Some(format!("write {sentence}")))
                }
                (NameContext::Command, Answer::Write(sentence)) => {
                    assert_eq!(of_command(typed), Some(format!("write {sentence}")));
                }
                (NameContext::Key | NameContext::ModelKey | NameContext::Value(_), _) => {}
                other => panic!("{typed}: {other:?}"),
            }
        }
        assert_eq!(setting_of_flag("lr"), Some("write --set optimizer.lr=VALUE".to_owned()));
        assert_eq!(setting_of_flag("learning-rate=3e-4"), Some("write --set optimizer.lr=VALUE".to_owned()));
        assert_eq!(setting_of_flag("steps"), Some("write --set train.steps=VALUE".to_owned()));
        assert_eq!((of_flag("zzz"), setting_of_flag("zzz")), (None, None));
    }
}
