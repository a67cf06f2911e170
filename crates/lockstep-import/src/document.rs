//! JSON and YAML text as one tree of scalars with line numbers.
//!
//! Scalars stay text until a key's type is known. PyYAML follows YAML 1.1 (`no` is a flag, `1e-4` is a string), our
//! parser YAML 1.2, and people write `"true"` in JSON: only the key decides what is meant. JSON is read as YAML's
//! flow style after its comments (DeepSpeed reads files with hjson) are blanked.

use yaml_rust2::parser::{Event, Parser};
use yaml_rust2::scanner::{ScanError, TScalarStyle};

use crate::problem::{Problem, shortened};

/// Nothing in these files nests deeper.
const MAX_DEPTH: usize = 32;
/// A longer file is not a configuration.
const MAX_BYTES: usize = 1 << 20;
/// More keys and values than any configuration has.
const MAX_NODES: usize = 50_000;

/// A value of a document.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node {
    /// Text whose type is not known yet.
    Scalar {
        /// The text, without quotes.
        text: String,
        /// Whether it stood in quotes.
        quoted: bool,
    },
    /// A sequence.
    List(Vec<Node>),
    /// A mapping, in the order of the file; each key with its line.
    Map(Vec<(String, usize, Node)>),
}

/// How the text of a document is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Syntax {
    /// JSON with comments and trailing commas.
    Json,
    /// YAML.
    Yaml,
}

/// Reads a document whose outermost value is a mapping.
pub(crate) fn read(text: &str, file: &str, syntax: Syntax) -> Result<Vec<(String, usize, Node)>, Problem> {
    let of_file = |line, what: String| Problem::new(file, line, "", what, "");
    if text.len() > MAX_BYTES {
        return Err(of_file(0, format!("is longer than {} KiB, which no configuration is", MAX_BYTES >> 10)));
    }
    if text.contains('\0') {
        return Err(of_file(0, "holds NUL bytes, so it is not text".to_owned()));
    }
    let text = text.trim_start_matches('\u{feff}');
    let blanked = match syntax {
        Syntax::Json => blank_comments(text),
        Syntax::Yaml => text.to_owned(),
    };
    let name = match syntax {
        Syntax::Json => "JSON",
        Syntax::Yaml => "YAML",
    };
    let mut builder = Builder { file, open: Vec::new(), root: None, nodes: 0 };
    let mut parser = Parser::new_from_str(&blanked);
    loop {
        let broken = |error: &ScanError| {
            of_file(error.marker().line(), format!("broken {name}: {}", shortened(error.info())))
        };
        let (event, mark) = parser.next_token().map_err(|error| broken(&error))?;
        match event {
            Event::StreamEnd => break,
            event => builder.add(event, mark.line())?,
        }
    }
    match builder.root {
        Some(Node::Map(entries)) => Ok(entries),
        None => Err(of_file(0, format!("is empty; {name} with keys is expected"))),
        Some(_) => Err(of_file(1, format!("is not a table of keys; {name} with keys is expected"))),
    }
}

/// A collection that is being read.
enum Open {
    List(Vec<Node>),
    Map { entries: Vec<(String, usize, Node)>, key: Option<(String, usize)> },
}

/// Turns a parser's events into nodes, without recursion.
struct Builder<'f> {
    file: &'f str,
    open: Vec<Open>,
    root: Option<Node>,
    nodes: usize,
}

impl Builder<'_> {
    fn refuse(&self, line: usize, what: impl Into<String>) -> Problem {
        Problem::new(self.file, line, "", what, "")
    }

    fn add(&mut self, event: Event, line: usize) -> Result<(), Problem> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(self.refuse(line, format!("has more than {MAX_NODES} values")));
        }
        if self.open.len() > MAX_DEPTH {
            return Err(self.refuse(line, format!("nests deeper than {MAX_DEPTH} levels")));
        }
        match event {
            Event::Scalar(text, style, ..) => {
                self.put(Node::Scalar { text, quoted: style != TScalarStyle::Plain }, line)
            }
            Event::SequenceStart(..) => {
                self.open.push(Open::List(Vec::new()));
                Ok(())
            }
            Event::MappingStart(..) => {
                self.open.push(Open::Map { entries: Vec::new(), key: None });
                Ok(())
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let node = match self.open.pop() {
                    Some(Open::List(items)) => Node::List(items),
                    Some(Open::Map { entries, .. }) => Node::Map(entries),
                    None => return Err(self.refuse(line, "ends a list that nobody began")),
                };
                self.put(node, line)
            }
            Event::Alias(_) => Err(self.refuse(line, "uses a YAML alias (*name); write the value itself")),
            Event::DocumentStart if self.root.is_some() => {
                Err(self.refuse(line, "holds several documents; one is expected"))
            }
            _ => Ok(()),
        }
    }

    fn put(&mut self, node: Node, line: usize) -> Result<(), Problem> {
        let file = self.file;
        match self.open.last_mut() {
            None => self.root = Some(node),
            Some(Open::List(items)) => items.push(node),
            Some(Open::Map { entries, key }) => match (key.take(), node) {
                (Some((name, at)), node) => {
                    if let Some((_, first, _)) = entries.iter().find(|(known, ..)| *known == name) {
                        let what = format!("stands twice, first in line {first}");
                        return Err(Problem::new(file, at, &shortened(&name), what, "one of the two"));
                    }
                    entries.push((name, at, node));
                }
                (None, Node::Scalar { text, .. }) => *key = Some((text, line)),
                (None, _) => return Err(self.refuse(line, "has a key that is not a word")),
            },
        }
        Ok(())
    }
}

/// JSON with `//`, `#` and `/* */` comments and tabs as spaces, line breaks where they were.
fn blank_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    let mut in_string = false;
    while let Some(c) = rest.next() {
        match (in_string, c, rest.peek()) {
            (true, '\\', _) => {
                out.push(c);
                out.extend(rest.next());
            }
            (_, '"', _) => {
                in_string = !in_string;
                out.push(c);
            }
            (true, ..) => out.push(c),
            (false, '#', _) | (false, '/', Some('/')) => {
                while rest.next_if(|c| *c != '\n').is_some() {}
                out.push(' ');
            }
            (false, '/', Some('*')) => {
                let mut last = ' ';
                rest.next();
                for c in rest.by_ref() {
                    if c == '\n' {
                        out.push('\n');
                    }
                    if last == '*' && c == '/' {
                        break;
                    }
                    last = c;
                }
            }
            (false, '\t', _) => out.push(' '),
            // A colon without a blank behind it would be part of a plain word to YAML.
            (false, ':', _) => out.push_str(": "),
            (false, ..) => out.push(c),
        }
    }
    out
}

impl Node {
    /// The scalar's text; `None` for what has the form of no value (`null`, `~`, nothing) and for collections.
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Scalar { text, quoted: true } => Some(text),
            Self::Scalar { text, .. } if is_null(text) => None,
            Self::Scalar { text, .. } => Some(text),
            _ => None,
        }
    }

    /// Whether it says that there is nothing.
    pub(crate) fn is_null(&self) -> bool {
        match self {
            Self::Scalar { text, quoted } => !quoted && is_null(text),
            Self::Map(entries) => entries.is_empty(),
            Self::List(_) => false,
        }
    }

    /// `true` or `false`, also as YAML 1.1 and Python write them.
    pub(crate) fn flag(&self) -> Option<bool> {
        match self.text()?.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" | "1" => Some(true),
            "false" | "no" | "off" | "0" => Some(false),
            _ => None,
        }
    }

    /// A finite number, `1e-4` included.
    pub(crate) fn number(&self) -> Option<f64> {
        let text = self.text()?.trim();
        let digits: String = text.chars().filter(|c| *c != '_').collect();
        digits.parse().ok().filter(|number: &f64| number.is_finite())
    }

    /// A whole number, `5e8` included. `012` is ten to a YAML 1.1 reader and twelve to others: it is refused.
    pub(crate) fn integer(&self) -> Option<u64> {
        let text = self.text()?.trim();
        let digits: String = text.chars().filter(|c| *c != '_').collect();
        if digits.len() > 1 && digits.starts_with('0') && digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        if let Ok(number) = digits.parse() {
            return Some(number);
        }
        let number = self.number()?;
        (number >= 0.0 && number.fract() == 0.0 && number < 2f64.powi(53)).then_some(number as u64)
    }

    /// The value in one line, for messages and tables.
    pub(crate) fn shown(&self) -> String {
        match self {
            Self::Scalar { text, quoted: true } => format!("\"{}\"", shortened(text)),
            Self::Scalar { text, .. } => shortened(text),
            Self::List(items) if items.len() > 8 => format!("a list of {}", items.len()),
            Self::List(items) => {
                let items: Vec<String> = items.iter().map(Self::shown).collect();
                shortened(&format!("[{}]", items.join(", "))).replace("\\\"", "\"")
            }
            Self::Map(entries) => format!("a table of {}", entries.len()),
        }
    }
}

fn is_null(text: &str) -> bool {
    ["", "~", "null", "Null", "NULL", "None"].contains(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Node {
        let mut entries = read(&format!("key: {text}"), "test", Syntax::Yaml).unwrap();
        entries.remove(0).2
    }

    #[test]
    fn yaml_1_1_and_1_2_are_read_alike() {
        for (text, flag) in [("no", false), ("'no'", false), ("off", false), ("YES", true), ("True", true)] {
            assert_eq!(value(text).flag(), Some(flag), "{text}");
        }
        for (text, number) in [("1e-4", 1e-4), ("'1e-4'", 1e-4), ("1_000", 1000.0), ("3", 3.0)] {
            assert_eq!(value(text).number(), Some(number), "{text}");
        }
        assert_eq!(value("5e8").integer(), Some(500_000_000));
        assert_eq!(value("012").integer(), None, "octal to some, decimal to others");
        assert_eq!(value("null").text(), None);
        assert_eq!(value("'null'").text(), Some("null"));
    }

    #[test]
    fn json_may_have_comments_tabs_and_trailing_commas() {
        let text =
            "{\n\t\"a\": 1, // one\n\t\"b\":{\"c\":\"http://x#y\",},/* two\nlines */ \"d\": [1,2,],\n}";
        let entries = read(text, "test", Syntax::Json).unwrap();
        let lines: Vec<(&str, usize)> = entries.iter().map(|(key, line, _)| (key.as_str(), *line)).collect();
        assert_eq!(lines, [("a", 2), ("b", 3), ("d", 4)]);
        let Node::Map(inner) = &entries[1].2 else { panic!("{entries:?}") };
        assert_eq!(inner[0].2.text(), Some("http://x#y"));
    }

    #[test]
    fn what_is_no_configuration_is_refused_where_it_breaks() {
        let deep = "[".repeat(100);
        for (text, message) in [
            ("", "is empty"),
            ("[1, 2]", "is not a table of keys"),
            ("{\"a\": 1, \"a\": 2}", "stands twice"),
            ("{\"a\": {", "broken JSON"),
            (&format!("{{\"a\": {deep}"), "nests deeper"),
            ("{\"a\": \0}", "NUL"),
        ] {
            let problem = read(text, "ds.json", Syntax::Json).unwrap_err().to_string();
            assert!(problem.contains(message) && problem.starts_with("ds.json"), "{text}: {problem}");
        }
        let bomb = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n";
        assert!(read(bomb, "x", Syntax::Yaml).unwrap_err().to_string().contains("alias"));
        assert!(read(&" ".repeat(2 << 20), "x", Syntax::Yaml).unwrap_err().to_string().contains("longer"));
    }
}
