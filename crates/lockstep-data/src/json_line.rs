//! A line of JSON as a document: a text, a prompt with its completion, or messages of a chat.
//!
//! | the object has | what is read | what is predicted |
//! |---|---|---|
//! | the field `data.text_field` | its text | all of it |
//! | `messages`: a list of `{role, content}` | the chat template's text | what the assistant says |
//! | `prompt` and `completion` | the two, put together as they are | the completion |
//!
//! Other fields are passed over, and the first of these that is there decides.

use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use crate::chat::{ChatTemplate, Message};

/// What one document says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Document {
    /// Text of which every token is predicted.
    Text(String),
    /// Text of which some parts are context only, in their order.
    Parts(Vec<Part>),
}

/// A part of a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// What it says.
    pub text: String,
    /// What is done with it.
    pub role: PartRole,
}

/// What is done with a part of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartRole {
    /// It is read, and its tokens are labels of nothing.
    Context,
    /// It is predicted.
    Answer,
}

impl Part {
    pub(crate) fn context(text: impl Into<String>) -> Self {
        Self { text: text.into(), role: PartRole::Context }
    }

    pub(crate) fn answer(text: impl Into<String>) -> Self {
        Self { text: text.into(), role: PartRole::Answer }
    }
}

/// The document in one line of a JSON lines file, whose text is in the field `text_field` if there is one. Fields that
/// are not asked for are skipped without being built.
///
/// # Errors
/// What is wrong with the line, in words, with the column where the parser stopped.
pub fn parse_json_line(line: &str, text_field: &str, template: &ChatTemplate) -> Result<Document, String> {
    let mut parser = serde_json::Deserializer::from_str(line);
    let fields = FieldsOf(text_field).deserialize(&mut parser);
    let fields = fields.and_then(|fields| parser.end().map(|()| fields));
    // The parser counts lines from the start of what it was given, which is one line.
    let fields = fields.map_err(|error| error.to_string().replace(" at line 1 column", " at column"))?;
    match fields {
        Fields { text: Some(text), .. } => Ok(Document::Text(text)),
        Fields { messages: Some(messages), .. } => {
            let Value::Array(messages) = messages else {
                return Err("\"messages\" is no list".to_owned());
            };
            let messages: Vec<Message> = messages
                .into_iter()
                .enumerate()
                .map(|(i, message)| {
                    Message::read(message).map_err(|what| format!("message {}: {what}", i + 1))
                })
                .collect::<Result<_, _>>()?;
            template.parts(&messages).map(Document::Parts)
        }
        Fields { prompt: Some(prompt), completion: Some(completion), .. } => match (prompt, completion) {
            (Value::String(prompt), Value::String(completion)) => {
                Ok(Document::Parts(vec![Part::context(prompt), Part::answer(completion)]))
            }
            _ => Err("\"prompt\" and \"completion\" are not two strings".to_owned()),
        },
        Fields { others, .. } => Err(format!(
            "the object has no field \"{text_field}\" (it has: {}); data.text_field names the one that holds the text, \
             and \"messages\", or \"prompt\" with \"completion\", are read too",
            if others.is_empty() { "none".to_owned() } else { others.join(", ") }
        )),
    }
}

/// What is read of an object.
#[derive(Default)]
struct Fields {
    text: Option<String>,
    messages: Option<Value>,
    prompt: Option<Value>,
    completion: Option<Value>,
    /// Names of the first few fields, for a message.
    others: Vec<String>,
}

/// Reads an object, of which this field holds the text.
struct FieldsOf<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for FieldsOf<'_> {
    type Value = Fields;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Fields, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FieldsOf<'_> {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with a string in its field \"{}\"", self.0)
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Fields, M::Error> {
        let mut fields = Fields::default();
        while let Some(key) = map.next_key::<String>()? {
            let slot = match key.as_str() {
                text if text == self.0 => {
                    if fields.text.replace(map.next_value()?).is_some() {
                        return Err(de::Error::custom(format_args!("the field \"{key}\" is there twice")));
                    }
                    continue;
                }
                "messages" => &mut fields.messages,
                "prompt" => &mut fields.prompt,
                "completion" => &mut fields.completion,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    if fields.others.len() < 8 {
                        fields.others.push(key);
                    }
                    continue;
                }
            };
            *slot = Some(map.next_value()?);
            fields.others.push(key);
        }
        Ok(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Document, String> {
        parse_json_line(line, "text", &ChatTemplate::default())
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
            (r#"{"messages": []}"#, "no message of the role assistant"),
        ] {
            let problem = parse(line).unwrap_err();
            assert!(problem.contains(expected), "{line}: {problem}");
        }
    }

    #[test]
    fn a_completion_is_predicted_and_its_prompt_is_not() {
        let parts = parse(r#"{"prompt": "2+2=", "completion": "4"}"#);
        assert_eq!(parts, Ok(Document::Parts(vec![Part::context("2+2="), Part::answer("4")])));
    }
}
