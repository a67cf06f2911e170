//! `docs/configuration.md`, written from the table of keys.

use std::fmt::Write as _;

use crate::foreign_names::{Answer, FOREIGN_NAMES, ForeignName, NameContext};
use crate::keys::{ALIASES, KEYS, SECTIONS};
use crate::value::ValueType;

const INTRODUCTION: &str = "\
<!-- Generated from crates/lockstep-config/src/keys.rs by `cargo xtask docs`; do not edit. -->
# Configuration

A run is described by a TOML file, `lockstep train RUN.toml`. Every key has a default, so the file may be
empty. Any value can be set on the command line as well, where the last one wins:

    lockstep train RUN.toml --set train.steps=200 --set train.lr=3e-4 --set 'data.train=[\"a.txt\"]'

What stands after `=` is a TOML value; a bare word is a string. A key that does not exist, a value that does
not fit, values that contradict each other and a key that would have no effect are errors; all of them are
reported at once, each with its line, and the run does not start. An argument that makes another choice than the
file (another `kind`, another model) sets aside what the file says of the old one. Paths are relative to the
current directory.
";

const EDITORS: &str = "\
\n## Editors

`lockstep schema` prints the JSON Schema of a run. Editors that know TOML (Even Better TOML, Taplo, Tombi)
complete and check a file that begins with a line such as

    #:schema run.schema.json

when the schema lies beside it: `lockstep schema > run.schema.json`.
";

/// Returns the manual of RUN.toml, in Markdown.
pub fn configuration_markdown() -> String {
    let mut out = INTRODUCTION.to_owned();
    for section in SECTIONS.iter() {
        out.push_str(&format!("\n## [{}]\n\n{}\n\n", section.name, section.doc));
        out.push_str("| key | takes | default | meaning |\n|---|---|---|---|\n");
        for key in KEYS.iter().filter(|key| key.section() == section.name) {
            let takes = match key.value_type {
                ValueType::Choice { .. } => format!("`{}`", key.value_type),
                ValueType::Recompute => {
                    "`\"none\"`, `\"selective\"`, `\"full\"`, or a table of rules".to_owned()
                }
                ValueType::Wrap => "`\"block\"`, a table with a size, or a list of patterns".to_owned(),
                ValueType::TextList => "a list of strings".to_owned(),
                ValueType::IntegerList => "a list of integers".to_owned(),
                ValueType::SourceList => "a list of strings and of tables `{ path, weight }`".to_owned(),
                ValueType::TransformList => "a list of tables `{ kind, ... }`".to_owned(),
                ValueType::NumberTable => format!("a table of numbers {}", key.rules),
                other => format!("{other} {}", key.rules),
            };
            let default = match key.rules.when_absent {
                Some(text) => text.to_owned(),
                None => format!("`{}`", key.default),
            };
            // Writing to a String cannot fail.
            let _ = writeln!(out, "| `{}` | {} | {} | {} |", key.key(), takes.trim_end(), default, key.doc);
        }
        if !section.later.is_empty() {
            let names: Vec<String> = section.later.iter().map(|later| format!("`{later}`")).collect();
            let _ = writeln!(out, "\nNot supported yet, and refused: {}.", names.join(", "));
        }
    }
    out.push_str(EDITORS);
    out.push_str("\n## Other names\n\n");
    for (alias, name) in ALIASES {
        let _ = writeln!(out, "`{alias}` is another name of `{name}`.");
    }
    out.push_str("\nNames of other tools are taken in any section, or answered with what to write:\n\n");
    out.push_str("| typed | here |\n|---|---|\n");
    for ForeignName { place, typed, answer } in FOREIGN_NAMES.iter() {
        let ours = match answer {
            Answer::Is(ours) => format!("`{ours}`"),
            Answer::Write(sentence) => (*sentence).to_owned(),
        };
        let typed = match place {
            NameContext::Key => format!("`{typed}`"),
            NameContext::ModelKey => format!("`model.{typed}`"),
            NameContext::Value(key) => format!("`{key} = \"{typed}\"`"),
            NameContext::Model => format!("`model.preset = \"{typed}\"`"),
            NameContext::Flag => format!("`--{typed}`"),
            NameContext::Command => format!("`lockstep {typed}`"),
        };
        let _ = writeln!(out, "| {typed} | {ours} |");
    }
    out
}
