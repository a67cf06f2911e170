//! Parses a JSON record into a document: a text, a prompt with its completion, or a chat.
//!
//! | the object has | what is read | what is predicted |
//! |---|---|---|
//! | the field `data.text_field` | its text | all of it |
//! | `messages` or `conversations`: a list of `{role, content}` or `{from, value}` | the chat template's text | what the assistant says |
//! | `instruction` and `output`, with `input` and `system` if there are any | the same | the output |
//! | `prompt` and `completion` | the two, put together as they are | the completion |
//!
//! The first matching row decides; other fields are ignored. [`Columns`] renames the fields.

use std::{collections::BTreeMap, fmt};

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use crate::chat::{ChatTemplate, Message, TextPart};

/// Content of one document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Document {
    /// Text whose tokens are all predicted.
    Text(String),
    /// Text in parts, in order; some parts have masked labels.
    Parts(Vec<TextPart>),
}

/// Options for reading text files: the names of fields.
#[derive(Debug, Clone, Copy)]
pub struct TextOptions<'a> {
    /// Field of a JSON object, or column of a table, that holds the text.
    pub text_field: &'a str,
    /// Names of all other fields.
    pub columns: &'a Columns,
}

impl Default for TextOptions<'_> {
    fn default() -> Self {
        static NONE: Columns = Columns { names: BTreeMap::new() };
        Self { text_field: "text", columns: &NONE }
    }
}

/// Names of record fields that differ from the usual ones.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Columns {
    names: BTreeMap<String, String>,
}

impl Columns {
    /// Fields that can be renamed.
    pub const KNOWN: [&'static str; 9] =
        ["prompt", "completion", "instruction", "input", "output", "system", "messages", "role", "content"];

    /// Builds the renaming from a map of usual name to actual name.
    ///
    /// # Errors
    /// If a key is not one of [`Columns::KNOWN`]; that key is returned.
    pub fn new(names: &BTreeMap<String, String>) -> Result<Self, String> {
        match names.keys().find(|name| !Self::KNOWN.contains(&name.as_str())) {
            Some(unknown) => Err(unknown.clone()),
            None => Ok(Self { names: names.clone() }),
        }
    }

    /// Returns the hash of the renamed fields; `None` if none is renamed.
    pub(crate) fn hash(&self) -> Option<blake3::Hash> {
        let mut hasher = blake3::Hasher::new();
        for name in self.names.iter().flat_map(|(known, name)| [known, name]) {
            hasher.update(blake3::hash(name.as_bytes()).as_bytes());
        }
        (!self.names.is_empty()).then(|| hasher.finalize())
    }

    /// Returns the names that a field may have, in order of preference.
    fn of<'a>(&'a self, known: &'a str) -> Vec<&'a str> {
        match (self.names.get(known), known) {
            (Some(name), _) => vec![name],
            (None, "messages") => vec!["messages", "conversations"],
            (None, "role") => vec!["role", "from"],
            (None, "content") => vec!["content", "value"],
            (None, known) => vec![known],
        }
    }
}

/// Shape of a record: the kind of document it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordShape {
    /// Plain text of the text field.
    Text,
    /// Chat: a list of messages.
    Chat,
    /// Instruction with its output, as in Alpaca.
    Instruction,
    /// Prompt and completion, concatenated without a template.
    Completion,
}

impl RecordShape {
    /// Returns a description for messages.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Text => "texts",
            Self::Chat => "chats (messages or conversations)",
            Self::Instruction => "instructions with outputs (alpaca)",
            Self::Completion => "prompts with completions, put together as they are",
        }
    }

    /// Returns true if the chat template renders the record.
    pub fn uses_template(self) -> bool {
        matches!(self, Self::Chat | Self::Instruction)
    }
}

/// Parses one record of a JSON file. Skips other fields without building them.
///
/// # Errors
/// If the record is not valid JSON, or holds no document; the message names the column at which parsing stopped.
pub fn parse_json_line(
    line: &str,
    options: TextOptions<'_>,
    template: &ChatTemplate,
) -> Result<Document, String> {
    parse_record(line, options, template).map(|(_, document)| document)
}

/// Parses one record as [`parse_json_line`] does, and also returns its shape.
pub(crate) fn parse_record(
    line: &str,
    options: TextOptions<'_>,
    template: &ChatTemplate,
) -> Result<(RecordShape, Document), String> {
    let mut parser = serde_json::Deserializer::from_str(line);
    let fields = FieldsOf(options).deserialize(&mut parser);
    let fields = fields.and_then(|fields| parser.end().map(|()| fields));
    // The parser counts lines from the start of the record, so its line number is always 1.
    let fields = fields.map_err(|error| error.to_string().replace(" at line 1 column", " at column"))?;
    fields.into_document(template)
}

/// Fields of a JSON object that may make a document.
struct Fields<'a> {
    options: TextOptions<'a>,
    text: Option<String>,
    values: BTreeMap<String, Value>,
    /// Names of the first few fields, for an error message.
    names: Vec<String>,
}

impl Fields<'_> {
    fn into_document(mut self, template: &ChatTemplate) -> Result<(RecordShape, Document), String> {
        if let Some(text) = self.text.take() {
            return Ok((RecordShape::Text, Document::Text(text)));
        }
        if let Some((name, messages)) = self.take("messages") {
            let messages = self.chat(&name, messages)?;
            return Ok((RecordShape::Chat, Document::Parts(template.parts(&messages)?)));
        }
        if self.has("instruction") && self.has("output") {
            let messages = self.instruction()?;
            return Ok((RecordShape::Instruction, Document::Parts(template.parts(&messages)?)));
        }
        match (self.take("prompt"), self.take("completion")) {
            (Some((_, Value::String(prompt))), Some((_, Value::String(completion)))) => {
                let parts = vec![TextPart::context(prompt), TextPart::answer(completion)];
                Ok((RecordShape::Completion, Document::Parts(parts)))
            }
            (Some((first, Value::Array(mut messages))), Some((_, Value::Array(answer)))) => {
                messages.extend(answer);
                let messages = self.chat(&first, Value::Array(messages))?;
                Ok((RecordShape::Chat, Document::Parts(template.parts(&messages)?)))
            }
            (Some((prompt, _)), Some((completion, _))) => {
                Err(format!("\"{prompt}\" and \"{completion}\" are not two strings"))
            }
            _ => Err(self.unknown()),
        }
    }

    fn has(&self, known: &str) -> bool {
        self.options.columns.of(known).iter().any(|name| self.values.contains_key(*name))
    }

    /// Removes the field with the usual name `known`; returns its actual name and value.
    fn take(&mut self, known: &str) -> Option<(String, Value)> {
        let names = self.options.columns.of(known);
        names.into_iter().find_map(|name| Some((name.to_owned(), self.values.remove(name)?)))
    }

    /// Removes a string field that may be absent, null or empty.
    fn optional_text(&mut self, known: &str) -> Result<Option<String>, String> {
        match self.take(known) {
            None | Some((_, Value::Null)) => Ok(None),
            Some((_, Value::String(text))) => Ok(Some(text).filter(|text| !text.is_empty())),
            Some((name, _)) => Err(format!("\"{name}\" is no string")),
        }
    }

    fn system(&mut self) -> Result<Vec<Message>, String> {
        Ok(self.optional_text("system")?.iter().map(|text| Message::new("system", text)).collect())
    }

    fn chat(&mut self, name: &str, messages: Value) -> Result<Vec<Message>, String> {
        let Value::Array(list) = messages else { return Err(format!("\"{name}\" is no list")) };
        let mut messages = self.system()?;
        let (role, content) = (self.options.columns.of("role"), self.options.columns.of("content"));
        for (i, message) in list.into_iter().enumerate() {
            let message = Message::read(message, &role, &content);
            messages.push(message.map_err(|what| format!("message {}: {what}", i + 1))?);
        }
        Ok(messages)
    }

    /// Builds a chat: the instruction and, on the lines after it, the input are the user's message, the output the
    /// answer.
    fn instruction(&mut self) -> Result<Vec<Message>, String> {
        let mut messages = self.system()?;
        let question = [self.optional_text("instruction")?, self.optional_text("input")?];
        let question: Vec<String> = question.into_iter().flatten().collect();
        messages.push(Message::new("user", &question.join("\n")));
        // Without an output there is no answer, and windowing drops the sample.
        messages.extend(self.optional_text("output")?.iter().map(|text| Message::new("assistant", text)));
        Ok(messages)
    }

    fn unknown(&self) -> String {
        let names = if self.names.is_empty() { "none".to_owned() } else { self.names.join(", ") };
        format!(
            "the object has no field \"{}\" (it has: {names}); data.text_field names the one that holds the text; messages, \
             conversations, instruction with output, and prompt with completion are read too, and data.columns says \
             what they are called here, e.g. {{ prompt = \"question\", completion = \"answer\" }}",
            self.options.text_field
        )
    }
}

/// Deserializer seed for an object with the fields that the options name.
struct FieldsOf<'a>(TextOptions<'a>);

impl<'de, 'a> DeserializeSeed<'de> for FieldsOf<'a> {
    type Value = Fields<'a>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Fields<'a>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, 'a> Visitor<'de> for FieldsOf<'a> {
    type Value = Fields<'a>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with a string in its field \"{}\"", self.0.text_field)
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Fields<'a>, M::Error> {
        let columns = self.0.columns;
        let wanted: Vec<&str> = Columns::KNOWN[..7].iter().flat_map(|known| columns.of(known)).collect();
        let mut fields = Fields { options: self.0, text: None, values: BTreeMap::new(), names: Vec::new() };
        while let Some(key) = map.next_key::<String>()? {
            if key == self.0.text_field {
                if fields.text.replace(map.next_value()?).is_some() {
                    return Err(de::Error::custom(format_args!("the field \"{key}\" is there twice")));
                }
                continue;
            }
            if fields.names.len() < 8 {
                fields.names.push(key.clone());
            }
            if wanted.contains(&key.as_str()) {
                fields.values.insert(key, map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Document, String> {
        parse_json_line(line, TextOptions::default(), &ChatTemplate::default())
    }

    #[test]
    fn a_line_gives_its_document_or_says_what_is_wrong() {
        let text = parse(r#"{"id": [1, {}], "text": "a\nb", "prompt": 3}"#);
        assert_eq!(text, Ok(Document::Text("a\nb".to_owned())));
        for (line, expected) in [
            ("{\"text\": \"a\"", "EOF while parsing an object at column 12"),
            ("[1]", "expected an object with a string in its field \"text\""),
            (r#"{"body": "a", "id": 1}"#, "no field \"text\" (it has: body, id)"),
            (r#"{"prompt": "a"}"#, "no field \"text\" (it has: prompt)"),
            (r#"{"text": 3}"#, "expected a string at column 10"),
            (r#"{"text": "a", "text": "b"}"#, "twice"),
            (r#"{"text": "a"} {}"#, "trailing characters at column 15"),
            (r#"{"text": "\ud800"}"#, "column 17"),
            (r#"{"prompt": "a", "completion": 1}"#, "not two strings"),
            (r#"{"messages": {}}"#, "\"messages\" is no list"),
            (r#"{"messages": [{"role": "user", "content": "a"}, 7]}"#, "message 2: "),
            (r#"{"messages": [{"role": "user"}]}"#, "message 1: it has no string in \"content\""),
            (
                r#"{"conversations": [{"from": "human"}]}"#,
                "message 1: it has no string in \"content\" or \"value\"",
            ),
            (r#"{"instruction": 3, "output": "a"}"#, "\"instruction\" is no string"),
            (r#"{"question": "a", "answer": "b"}"#, "data.columns"),
        ] {
            let problem = parse(line).unwrap_err();
            assert!(problem.contains(expected), "{line}: {problem}");
        }
    }

    #[test]
    fn a_completion_is_predicted_and_its_prompt_is_not() {
        let parts = parse(r#"{"prompt": "2+2=", "completion": "4"}"#);
        assert_eq!(parts, Ok(Document::Parts(vec![TextPart::context("2+2="), TextPart::answer("4")])));
    }

    #[test]
    fn alpaca_and_sharegpt_are_chats() {
        let chat = parse(
            r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q\nx"},
                {"role": "assistant", "content": "a"}]}"#,
        );
        assert!(matches!(&chat, Ok(Document::Parts(parts)) if !parts.is_empty()), "{chat:?}");
        for line in [
            r#"{"instruction": "q", "input": "x", "output": "a", "system": "s", "id": 7}"#,
            r#"{"conversations": [{"from": "human", "value": "q\nx"}, {"from": "gpt", "value": "a"}], "system": "s"}"#,
            r#"{"conversations": [{"role": "system", "content": "s"}, {"role": "user", "content": "q\nx"},
                {"role": "assistant", "content": "a"}]}"#,
        ] {
            assert_eq!(parse(line), chat, "{line}");
        }
        let without_input = parse(r#"{"instruction": "q", "input": "", "output": "a"}"#);
        assert_eq!(
            without_input,
            parse(
                r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#
            )
        );
    }

    #[test]
    fn columns_give_fields_other_names() {
        let columns = |pairs: &[(&str, &str)]| {
            let names = pairs.iter().map(|(known, name)| ((*known).to_owned(), (*name).to_owned())).collect();
            Columns::new(&names)
        };
        let parse_with = |columns: &Columns, line: &str| {
            let options = TextOptions { columns, ..TextOptions::default() };
            parse_json_line(line, options, &ChatTemplate::default())
        };
        let pair = columns(&[("prompt", "question"), ("completion", "answer")]).unwrap();
        let parts = parse_with(&pair, r#"{"question": "2+2=", "answer": "4", "prompt": "x"}"#);
        assert_eq!(parts, Ok(Document::Parts(vec![TextPart::context("2+2="), TextPart::answer("4")])));
        let chat = columns(&[("messages", "dialog"), ("role", "speaker"), ("content", "says")]).unwrap();
        let line = r#"{"dialog": [{"speaker": "human", "says": "q"}, {"speaker": "bot", "says": "a"}]}"#;
        let expected =
            parse(r#"{"conversations": [{"from": "user", "value": "q"}, {"from": "gpt", "value": "a"}]}"#);
        assert_eq!(parse_with(&chat, line), expected);
        assert_eq!(columns(&[("promt", "question")]), Err("promt".to_owned()));
    }
}
