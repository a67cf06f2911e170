//! JSON and YAML text as a tree of scalars with line numbers.
//!
//! Scalars stay text until the type of their key is known. PyYAML follows YAML 1.1 (`no` is a flag, `1e-4` a string),
//! our parser YAML 1.2, and people write `"true"` in JSON; only the key tells which type is meant. JSON is parsed as
//! YAML's flow style after its comments are blanked (DeepSpeed reads files with hjson, which allows comments).

use yaml_rust2::parser::{Event, Parser};
use yaml_rust2::scanner::{ScanError, TScalarStyle};

use crate::problem::{Problem, shortened};

/// Largest nesting depth of a configuration.
const MAX_DEPTH: usize = 32;
/// Largest size of a configuration in bytes.
const MAX_BYTES: usize = 1 << 20;
/// Largest number of keys and values of a configuration.
const MAX_NODES: usize = 50_000;

/// A value of a document.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node {
    /// A scalar whose type is not known yet.
    Scalar {
        /// Text without quotes.
        text: String,
        /// True if the text was quoted.
        quoted: bool,
    },
    /// A sequence of values.
    List(Vec<Node>),
    /// A mapping in the order of the file: key, line of the key from 1, value.
    Map(Vec<(String, usize, Node)>),
}

/// Syntax of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Syntax {
    /// JSON with comments and trailing commas.
    Json,
    /// YAML 1.1 or 1.2.
    Yaml,
}

impl Syntax {
    /// Guesses the syntax of a text: JSON if it begins with a brace or a JSON comment.
    pub(crate) fn of(text: &str) -> Self {
        let text = text.trim_start_matches('\u{feff}').trim_start();
        if text.starts_with('{') || text.starts_with("//") || text.starts_with("/*") {
            Self::Json
        } else {
            Self::Yaml
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Json => "JSON",
            Self::Yaml => "YAML",
        }
    }

    /// Describes an error that the parser found in `text`, in the terms of the syntax.
    fn broken(self, error: &ScanError, text: &str) -> String {
        let is_at_end = error.marker().index() >= text.trim_end().chars().count();
        let what = match self {
            Self::Yaml => shortened(error.info()),
            Self::Json if is_at_end => "it ends before its last '}'".to_owned(),
            Self::Json => in_terms_of_json(error.info()).to_owned(),
        };
        format!("broken {}: {what}", self.name())
    }
}

/// Translates a message of the YAML parser, which parses JSON as well, into the terms of JSON.
fn in_terms_of_json(info: &str) -> &'static str {
    const TERMS: [(&str, &str); 8] = [
        ("flow mapping", "',' or '}' is missing in an object"),
        ("flow sequence", "',' or ']' is missing in an array"),
        ("escape", "a string has an escape that JSON does not know"),
        ("hexadecimal", "a string has an escape that JSON does not know"),
        ("quoted scalar, found unexpected", "a string does not end"),
        ("double-quoted scalar", "':' or ',' is missing after a string"),
        ("quoted scalar", "a string goes on in another line"),
        ("simple key", "':' is missing after a key"),
    ];
    let found = TERMS.iter().find(|(part, _)| info.contains(part));
    found.map_or("a key, a value, ',' or '}' is expected here", |(_, what)| *what)
}

/// Parses a document whose outermost value is a mapping.
pub(crate) fn read(text: &str, file: &str, syntax: Syntax) -> Result<Vec<(String, usize, Node)>, Problem> {
    let of_file = |line, what: String| Problem::new(file, line, "", what, "");
    if text.len() > MAX_BYTES {
        return Err(of_file(0, format!("is longer than {} KiB, which no configuration is", MAX_BYTES >> 10)));
    }
    if text.contains('\0') {
        return Err(of_file(0, "holds NUL bytes, so it is not text".to_owned()));
    }
    let text = text.trim_start_matches('\u{feff}');
    let name = syntax.name();
    let blanked = match syntax {
        Syntax::Json => blank_comments(text),
        Syntax::Yaml => text.to_owned(),
    };
    let mut builder = Builder { file, syntax, open: Vec::new(), root: None, nodes: 0 };
    let mut parser = Parser::new_from_str(&blanked);
    loop {
        let (event, mark) = parser
            .next_token()
            .map_err(|error| of_file(error.marker().line(), syntax.broken(&error, &blanked)))?;
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

/// A collection whose end has not been parsed yet.
enum Open {
    List(Vec<Node>),
    Map { entries: Vec<(String, usize, Node)>, key: Option<(String, usize)> },
}

/// Builder of nodes from the parser's events, without recursion.
struct Builder<'f> {
    file: &'f str,
    syntax: Syntax,
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
                    None => return Err(self.refuse(line, "ends a list that was not begun")),
                };
                self.put(node, line)
            }
            Event::Alias(_) => Err(self.refuse(
                line,
                match self.syntax {
                    Syntax::Json => "broken JSON: a value begins with '*'; write it in quotes",
                    Syntax::Yaml => "uses a YAML alias (*name); write the value itself",
                },
            )),
            Event::DocumentStart if self.root.is_some() => Err(self.refuse(
                line,
                match self.syntax {
                    Syntax::Json => "broken JSON: it goes on after its last '}'",
                    Syntax::Yaml => "holds several documents; one is expected",
                },
            )),
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

/// Replaces `//`, `#` and `/* */` comments and tabs of JSON by spaces, and keeps line breaks.
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
            // YAML would read a colon without a following space as part of a plain scalar.
            (false, ':', _) => out.push_str(": "),
            (false, ..) => out.push(c),
        }
    }
    out
}

impl Node {
    /// Returns the scalar's text; `None` for null (`null`, `~`, empty) and for collections.
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Scalar { text, quoted: true } => Some(text),
            Self::Scalar { text, .. } if is_null(text) => None,
            Self::Scalar { text, .. } => Some(text),
            _ => None,
        }
    }

    /// Returns true if the value is null or an empty mapping.
    pub(crate) fn is_null(&self) -> bool {
        match self {
            Self::Scalar { text, quoted } => !quoted && is_null(text),
            Self::Map(entries) => entries.is_empty(),
            Self::List(_) => false,
        }
    }

    /// Returns the value as a flag: `true` or `false`, or a YAML 1.1 or Python spelling of them.
    pub(crate) fn flag(&self) -> Option<bool> {
        match self.text()?.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" | "1" => Some(true),
            "false" | "no" | "off" | "0" => Some(false),
            _ => None,
        }
    }

    /// Returns the value as a finite number; `1e-4` counts.
    pub(crate) fn number(&self) -> Option<f64> {
        let text = self.text()?.trim();
        let digits: String = text.chars().filter(|c| *c != '_').collect();
        digits.parse().ok().filter(|number: &f64| number.is_finite())
    }

    /// Returns the value as a whole number; `5e8` counts. `012` does not: it is ten in YAML 1.1 and twelve in other syntaxes.
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

    /// Returns the value on one line, for messages and tables.
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
    fn messages_speak_of_the_syntax_that_was_read() {
        // Texts that trigger each message of the parser.
        let texts = [
            "{\"a\": {",
            "{\"a\": 1 \"b\": 2}",
            "{\"a\": [1, 2}",
            "{\"a\": \"x}",
            "{\"a\": \"\\q\"}",
            "{\"a\": \"\\u12\"}",
            "{\"a\": 1}}",
            "{\"a\": 1} {\"b\": 2}",
            "{\"a\": *b}",
            "{\"a\": &b}",
            "{\"a\": !b}",
            "{\"a\": @b}",
            "{\"a\": - 1}",
            "{\"a\": |\n 1}",
            "%a\n{}",
            "---\n{}\n---\n{}",
            "{\n\"a\"\n\n: 1}",
            "- 1\n 2: 3",
            "a: b: c",
            "{\"a\": \"x\"y}",
            "\"a\n---\nb\"",
            "",
            "[1]",
        ];
        for text in texts {
            let words = |syntax| read(text, "file", syntax).err().map(|problem| problem.to_string());
            if let Some(problem) = words(Syntax::Json) {
                assert!(problem.contains("JSON"), "{text:?}: {problem}");
                for word in
                    ["YAML", "flow", "block", "scalar", "mapping", "document", "alias", "anchor", "tag"]
                {
                    assert!(!problem.contains(word), "{text:?}: {problem}");
                }
            }
            if let Some(problem) = words(Syntax::Yaml) {
                assert!(!problem.contains("JSON"), "{text:?}: {problem}");
            }
        }
        for (text, syntax) in [
            ("{\"a\": 1}", Syntax::Json),
            ("\u{feff} // one\n{}", Syntax::Json),
            ("# one\na: 1", Syntax::Yaml),
        ] {
            assert_eq!(Syntax::of(text), syntax, "{text}");
        }
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
