//! Renders chats as text, and marks which parts of the text are predicted.
//!
//! The text follows the tokenizer's own chat template, a Jinja template in `tokenizer_config.json` or
//! `chat_template.jinja`. A tokenizer without one gets ChatML, in which messages follow each other as:
//!
//! ```text
//! <|im_start|>ROLE
//! CONTENT<|im_end|>
//! ```
//!
//! The assistant's messages are predicted, including the end-of-message marker. Everything else has masked labels.

use std::{borrow::Cow, sync::Arc};

use minijinja::{Environment, Error, ErrorKind, syntax::SyntaxConfig, value::Serde};
use serde_json::{Value, json};

/// Consecutive part of a document's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextPart {
    /// Text of the part.
    pub text: String,
    /// Role that decides whether the part is predicted.
    pub role: PartRole,
}

/// Role of a part of a document in training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartRole {
    /// Read only: the labels of its tokens are masked.
    Context,
    /// Predicted: its tokens are labels.
    Answer,
}

impl TextPart {
    pub(crate) fn context(text: impl Into<String>) -> Self {
        Self { text: text.into(), role: PartRole::Context }
    }

    pub(crate) fn answer(text: impl Into<String>) -> Self {
        Self { text: text.into(), role: PartRole::Answer }
    }
}

/// One message of a chat: an object with a role, a content, and any other fields that a template reads.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Message {
    object: Value,
    role: String,
    content: String,
}

/// Role whose messages are predicted.
const ASSISTANT: &str = "assistant";

impl Message {
    /// Reads an object with a role and a content, each from the first of the given names that it has. Returns a
    /// description of the missing field otherwise. Accepts ShareGPT's role names, in any case.
    pub(crate) fn read(object: Value, roles: &[&str], contents: &[&str]) -> Result<Self, String> {
        let (role_name, role) = string_in(&object, roles)?;
        let (content_name, content) = string_in(&object, contents)?;
        let usual = usual_role(&role);
        if (role_name, content_name) != ("role", "content") || usual != role {
            return Ok(Self::new(&usual, &content));
        }
        Ok(Self { object, role, content })
    }

    /// Builds a message with the given role and content.
    pub(crate) fn new(role: &str, content: &str) -> Self {
        let object = json!({ "role": role, "content": content });
        Self { object, role: role.to_owned(), content: content.to_owned() }
    }

    fn is_answer(&self) -> bool {
        self.role == ASSISTANT
    }
}

/// Returns the first of `names` that holds a string, with that string.
fn string_in<'n>(object: &Value, names: &[&'n str]) -> Result<(&'n str, String), String> {
    let found = names.iter().find_map(|&name| Some((name, object.get(name)?.as_str()?.to_owned())));
    found.ok_or_else(|| format!("it has no string in {}", quoted(names)))
}

/// Formats names as `"a" or "b"`.
fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(" or ")
}

/// Maps a role to its name in Hugging Face transformers; unknown roles stay as they are.
fn usual_role(role: &str) -> Cow<'_, str> {
    match role.to_lowercase().as_str() {
        "human" => "user".into(),
        "gpt" | "chatgpt" | "bot" | "model" | "ai" => ASSISTANT.into(),
        "observation" | "function_response" => "tool".into(),
        known @ ("system" | "user" | ASSISTANT | "tool") => known.to_owned().into(),
        _ => role.into(),
    }
}

/// Template that renders a chat as text.
#[derive(Debug, Clone, Default)]
pub enum ChatTemplate {
    /// ChatML, the built-in format.
    #[default]
    ChatMl,
    /// Jinja template of the tokenizer.
    Jinja(Arc<JinjaTemplate>),
}

/// Compiled Jinja chat template in the form in which Hugging Face models publish it.
#[derive(Debug)]
pub struct JinjaTemplate {
    environment: Environment<'static>,
    /// Text of the begin-of-text token, a variable of templates; likewise `eos_token` for the end-of-text token.
    bos_token: Option<String>,
    eos_token: Option<String>,
    hash: blake3::Hash,
}

/// Name of the only template in an environment.
const NAME: &str = "chat template";

/// Number of template instructions after which rendering is aborted as endless.
const FUEL: u64 = 10_000_000;

impl ChatTemplate {
    /// Compiles a Jinja template.
    ///
    /// # Errors
    /// If the template cannot be parsed; the message describes the problem.
    pub(crate) fn jinja(
        source: &str,
        bos_token: Option<String>,
        eos_token: Option<String>,
    ) -> Result<Self, String> {
        let mut environment = Environment::new();
        // The syntax options of transformers.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| describe(&error))?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |problem: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, problem))
        });
        environment.add_template_owned(NAME, source.to_owned()).map_err(|error| describe(&error))?;
        let hash = blake3::hash(source.as_bytes());
        Ok(Self::Jinja(Arc::new(JinjaTemplate { environment, bos_token, eos_token, hash })))
    }

    /// Returns the hash of a Jinja template; `None` for the built-in ChatML.
    pub(crate) fn hash(&self) -> Option<blake3::Hash> {
        match self {
            Self::ChatMl => None,
            Self::Jinja(template) => Some(template.hash),
        }
    }

    /// Renders the chat as parts that are predicted and parts that are not.
    pub(crate) fn parts(&self, messages: &[Message]) -> Result<Vec<TextPart>, String> {
        if messages.is_empty() {
            return Ok(Vec::new());
        }
        match self {
            Self::ChatMl => Ok(messages.iter().flat_map(chat_ml).collect()),
            Self::Jinja(template) => template.parts(messages),
        }
    }
}

impl ChatTemplate {
    /// Renders the chat for generation: it ends with the header of the assistant's next message.
    pub(crate) fn question(&self, messages: &[Message]) -> Result<String, String> {
        match self {
            Self::ChatMl => {
                let parts = messages.iter().flat_map(chat_ml).map(|part| part.text);
                Ok(parts.collect::<String>() + "<|im_start|>assistant\n")
            }
            Self::Jinja(template) => template.render(messages, Ask::ForAnAnswer),
        }
    }

    /// Returns the markers that the template writes around messages, such as `<|im_start|>` and `[INST]`.
    pub(crate) fn markers(&self) -> Vec<String> {
        let messages = [Message::new("user", "a"), Message::new(ASSISTANT, "b")];
        let texts = self.parts(&messages).unwrap_or_default().into_iter().map(|part| part.text);
        let text: String = texts.collect();
        let mut markers = Vec::new();
        for (opening, closing) in [('<', '>'), ('[', ']')] {
            for (at, _) in text.match_indices(opening) {
                let Some(length) = text[at..].find(closing) else { continue };
                let marker = &text[at..=at + length];
                let is_mark = marker.len() > 2 && !marker.contains(char::is_whitespace);
                if is_mark && !markers.iter().any(|known| known == marker) {
                    markers.push(marker.to_owned());
                }
            }
        }
        markers
    }

    /// Returns the text that ends an assistant's message in ChatML. `None` for a Jinja template, whose end-of-text
    /// token ends it.
    pub(crate) fn end_of_answer(&self) -> Option<&'static str> {
        matches!(self, Self::ChatMl).then_some(CHAT_ML_END)
    }
}

/// End-of-message marker of ChatML.
const CHAT_ML_END: &str = "<|im_end|>";

fn chat_ml(message: &Message) -> [TextPart; 2] {
    let said = format!("{}{CHAT_ML_END}\n", message.content);
    let said = if message.is_answer() { TextPart::answer(said) } else { TextPart::context(said) };
    [TextPart::context(format!("<|im_start|>{}\n", message.role)), said]
}

impl JinjaTemplate {
    /// Renders the chat in parts. The text of an answer is the difference between two renderings: the messages up to
    /// and including the answer, minus the earlier messages with the generation prompt.
    fn parts(&self, messages: &[Message]) -> Result<Vec<TextPart>, String> {
        let mut parts = Vec::new();
        let mut written = String::new();
        // A template may render earlier messages differently once later ones follow; then the difference is undefined.
        let rest_of = |text: &str, written: &str, number: usize| {
            text.strip_prefix(written).map(str::to_owned).ok_or_else(|| {
                format!("the chat template writes what stands before message {number} in more than one way")
            })
        };
        for (i, _) in messages.iter().enumerate().filter(|(_, message)| message.is_answer()) {
            let question = self.render(&messages[..i], Ask::ForAnAnswer)?;
            parts.push(TextPart::context(rest_of(&question, &written, i + 1)?));
            let answer = self.render(&messages[..=i], Ask::Nothing)?;
            parts.push(TextPart::answer(rest_of(&answer, &question, i + 1)?));
            written = answer;
        }
        let whole = self.render(messages, Ask::Nothing)?;
        parts.push(TextPart::context(rest_of(&whole, &written, messages.len())?));
        Ok(parts)
    }

    fn render(&self, messages: &[Message], ask: Ask) -> Result<String, String> {
        let messages: Vec<&Value> = messages.iter().map(|message| &message.object).collect();
        let context = json!({
            "messages": messages,
            "add_generation_prompt": ask == Ask::ForAnAnswer,
            "bos_token": self.bos_token.as_deref().unwrap_or_default(),
            "eos_token": self.eos_token.as_deref().unwrap_or_default(),
        });
        let rendered =
            self.environment.get_template(NAME).and_then(|template| template.render(Serde(context)));
        rendered.map_err(|error| format!("the chat template refuses the messages: {}", describe(&error)))
    }
}

/// Ending of a rendered chat: none, or a generation prompt.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ask {
    Nothing,
    /// Ends with the header of the assistant's next message.
    ForAnAnswer,
}

/// Formats a template error on one line.
fn describe(error: &Error) -> String {
    let line = error.line().map_or(String::new(), |line| format!(" (line {line} of the template)"));
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    format!("{what}{line}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(messages: &[(&str, &str)]) -> Vec<Message> {
        let message = |&(role, content): &(&str, &str)| Message::new(role, content);
        messages.iter().map(message).collect()
    }

    fn whole(parts: &[TextPart]) -> String {
        parts.iter().map(|part| part.text.as_str()).collect()
    }

    fn said(parts: &[TextPart]) -> Vec<&str> {
        parts.iter().filter(|part| part.role == PartRole::Answer).map(|part| part.text.as_str()).collect()
    }

    #[test]
    fn a_question_ends_where_the_assistant_is_to_speak() {
        let question =
            ChatTemplate::ChatMl.question(&chat(&[("system", "Be short."), ("user", "Who waits?")]));
        let expected = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWho waits?<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(question.as_deref(), Ok(expected));
    }

    const CHAT: [(&str, &str); 5] = [
        ("system", "Be brief."),
        ("user", "2+2?"),
        ("assistant", "4"),
        ("user", " And 3?"),
        ("assistant", "7"),
    ];

    #[test]
    fn roles_are_known_by_any_of_their_names() {
        for (typed, role) in [
            ("Assistant", "assistant"),
            ("gpt", "assistant"),
            ("User", "user"),
            ("human", "user"),
            ("critic", "critic"),
        ] {
            let message =
                Message::read(json!({ "role": typed, "content": "a" }), &["role"], &["content"]).unwrap();
            assert_eq!((message.role.as_str(), &message.object["role"]), (role, &json!(role)), "{typed}");
        }
    }

    #[test]
    fn only_what_the_assistant_says_is_predicted() {
        let parts = ChatTemplate::ChatMl.parts(&chat(&CHAT[..3])).unwrap();
        assert_eq!(
            whole(&parts),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n\
             <|im_start|>assistant\n4<|im_end|>\n"
        );
        assert_eq!(said(&parts), ["4<|im_end|>\n"]);
    }

    /// Template in the style of Llama 3: filters, Python methods, an assigned variable, blocks on separate lines.
    const TEMPLATE: &str = "{{ bos_token }}
{%- for message in messages %}
    {%- set head = '<|' + message['role'] + '|>' %}
    {{- head }}
    {{- message.content.strip() + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}";

    #[test]
    fn a_template_of_a_tokenizer_is_followed() {
        let template =
            ChatTemplate::jinja(TEMPLATE, Some("<s>".to_owned()), Some("</s>".to_owned())).unwrap();
        let parts = template.parts(&chat(&CHAT)).unwrap();
        assert_eq!(
            whole(&parts),
            "<s><|system|>Be brief.</s><|user|>2+2?</s><|assistant|>4</s><|user|>And 3?</s><|assistant|>7</s>"
        );
        assert_eq!(said(&parts), ["4</s>", "7</s>"]);
    }

    #[test]
    fn a_template_that_is_broken_refuses_or_rewrites_is_an_error() {
        let jinja = |source: &str| ChatTemplate::jinja(source, None, None);
        assert!(jinja("{% for %}").unwrap_err().contains("line 1"));
        for (source, expected) in [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages|length }}", "in more than one way"),
            ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "fuel"),
            ("{{ no_such_function() }}", "unknown"),
        ] {
            let problem = jinja(source).and_then(|template| template.parts(&chat(&CHAT))).unwrap_err();
            assert!(problem.contains(expected), "{source}: {problem}");
        }
    }

    #[test]
    fn the_marks_of_a_template_are_found_in_what_it_writes() {
        assert_eq!(ChatTemplate::ChatMl.markers(), ["<|im_start|>", "<|im_end|>"]);
        let source = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}";
        let template = ChatTemplate::jinja(source, None, None).unwrap();
        assert_eq!(template.markers(), ["</s>", "[INST]", "[/INST]"]);
    }
}
