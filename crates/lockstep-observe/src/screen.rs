//! Text on standard error: wrapped at words, coloured where a terminal shows colours, and never an error.
//!
//! A reader that is gone (`lockstep train 2>&1 | head`) must not end a run, so nothing here fails or panics.

use std::env;
use std::io::{self, IsTerminal, Write};

use rustix::termios::tcgetwinsize;

/// Width in columns if the terminal's is unknown.
const COLUMNS: usize = 80;
/// Maximum width in columns; longer lines are hard to read.
const MOST_COLUMNS: usize = 100;
/// Width of a label and the space after it, in columns.
const LABEL_COLUMNS: usize = 11;

/// The ANSI colour of a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colour {
    /// Labels of fields.
    Bold,
    /// Messages of success.
    Green,
    /// Warnings to the user.
    Yellow,
    /// Errors of the command.
    Red,
}

impl Colour {
    /// Returns `text` in this colour, or unchanged if colours are off.
    pub fn paint(self, text: &str, colours: Colours) -> String {
        let code = match self {
            Self::Bold => "1",
            Self::Green => "1;32",
            Self::Yellow => "1;33",
            Self::Red => "1;31",
        };
        match colours {
            Colours::Shown => format!("\x1b[{code}m{text}\x1b[0m"),
            Colours::Off => text.to_owned(),
        }
    }
}

/// Choice whether colours are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colours {
    /// Shown: on a terminal.
    Shown,
    /// Off: in a file, in a pipe, on a dumb terminal, and if `NO_COLOR` is set.
    Off,
}

impl Colours {
    /// Returns the choice for standard error.
    pub fn of_stderr() -> Self {
        let is_set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
        if is_terminal() && !is_set("NO_COLOR") { Self::Shown } else { Self::Off }
    }
}

/// Returns true if standard error is a terminal that can move its cursor and has a size.
pub fn is_terminal() -> bool {
    let is_dumb = env::var_os("TERM").is_some_and(|term| term == "dumb");
    io::stderr().is_terminal() && columns_of_terminal().is_some() && !is_dumb
}

/// Returns the width of the terminal. A pseudo-terminal that nobody looks at often has no size, and drawing on it is useless.
fn columns_of_terminal() -> Option<usize> {
    let size = tcgetwinsize(io::stderr()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then_some(size.ws_col.into())
}

/// Returns the width at which text is wrapped.
fn columns() -> usize {
    columns_of_terminal().unwrap_or(COLUMNS).min(MOST_COLUMNS)
}

/// Returns a label and its text, wrapped to the terminal or to 80 columns.
pub fn field(label: &str, text: &str) -> String {
    field_in(label, text, columns(), Colours::of_stderr())
}

fn field_in(label: &str, text: &str, columns: usize, colours: Colours) -> String {
    let colour = if label == "done" { Colour::Green } else { Colour::Bold };
    let wrapped = wrap(text, columns.saturating_sub(LABEL_COLUMNS));
    let space = " ".repeat(LABEL_COLUMNS.saturating_sub(label.chars().count()).max(1));
    let indent = format!("\n{}", " ".repeat(LABEL_COLUMNS));
    format!("{}{space}{}", colour.paint(label, colours), wrapped.join(&indent))
}

/// Returns a message that begins with `error` or `warning`; wrapped on a terminal, unchanged for files and scripts.
pub fn message(kind: &str, colour: Colour, text: &str) -> String {
    let shown = match columns_of_terminal() {
        Some(_) => {
            let whole = format!("{kind}: {text}");
            whole.lines().flat_map(|line| wrap(line, columns())).collect::<Vec<_>>().join("\n")
        }
        None => format!("{kind}: {text}"),
    };
    let rest = shown.strip_prefix(kind).unwrap_or_default();
    format!("{}{rest}", colour.paint(kind, Colours::of_stderr()))
}

/// Breaks text between words into lines of at most `columns`. A longer word has a line of its own. All lines have the indentation
/// of the first.
pub fn wrap(text: &str, columns: usize) -> Vec<String> {
    let text = text.trim_end();
    if text.chars().count() <= columns {
        return vec![text.to_owned()];
    }
    let indent: String = text.chars().take_while(|letter| *letter == ' ').collect();
    let mut lines = Vec::new();
    let mut line = indent.clone();
    for word in text.trim_start().split(' ') {
        let is_begun = line.len() > indent.len();
        if is_begun && line.chars().count() + 1 + word.chars().count() > columns {
            lines.push(std::mem::replace(&mut line, indent.clone()));
        } else if is_begun {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines
}

/// Writes a line to standard error. Errors are ignored because the reader may be gone.
pub fn line(text: &str) {
    let mut out = io::stderr().lock();
    let _ = out.write_all(format!("{text}\n").as_bytes()).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words_and_keep_their_indentation() {
        let table: [(&str, usize, &[&str]); 6] = [
            ("", 10, &[""]),
            ("as it is", 10, &["as it is"]),
            ("one two three", 7, &["one two", "three"]),
            ("  one two three", 9, &["  one two", "  three"]),
            ("a-path/that/is/longer than a line", 8, &["a-path/that/is/longer", "than a", "line"]),
            ("× × × × ×", 3, &["× ×", "× ×", "×"]),
        ];
        for (text, columns, lines) in table {
            assert_eq!(wrap(text, columns), lines, "{text:?} in {columns} columns");
        }
    }

    #[test]
    fn a_field_stands_under_its_first_line() {
        let text = "67.3 MiB predicted, of 15.6 GiB";
        assert_eq!(field_in("memory", text, 80, Colours::Off), format!("memory     {text}"));
        let narrow = field_in("memory", text, 31, Colours::Off);
        assert_eq!(narrow, "memory     67.3 MiB predicted,\n           of 15.6 GiB");
        assert_eq!(field_in("done", "4 steps", 80, Colours::Shown), "\x1b[1;32mdone\x1b[0m       4 steps");
    }
}
