//! The JSON Schema of RUN.toml, generated from the table of keys, for editors that complete and check TOML.

use serde_json::{Map, Value, json};

use crate::declare::Key;
use crate::keys::{ALIASES, KEYS, SECTIONS};
use crate::sample_transforms::kinds;
use crate::value::ValueType;

/// Returns the JSON Schema (2020-12) of RUN.toml.
pub fn configuration_schema() -> Value {
    let mut sections = Map::new();
    for section in SECTIONS.iter() {
        let mut properties = Map::new();
        for key in KEYS.iter().filter(|key| key.section() == section.name) {
            let path: Vec<&str> = key.key().split('.').collect();
            insert(&mut properties, &path, schema_of(key));
        }
        for (alias, name) in ALIASES.iter().filter(|(alias, _)| alias.split('.').next() == Some(section.name))
        {
            let key = KEYS.iter().find(|key| key.name == *name).map(schema_of);
            properties.insert(alias[section.name.len() + 1..].to_owned(), key.unwrap_or_default());
        }
        // Other keys of [model] are those of a model's config.json.
        let has_others = section.name == "model";
        let schema = json!({
            "type": "object", "description": section.doc, "properties": properties, "additionalProperties": has_others,
        });
        sections.insert(section.name.to_owned(), schema);
    }
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Lockstep run",
        "description": "RUN.toml: `lockstep train RUN.toml`",
        "type": "object",
        "properties": sections,
        "additionalProperties": false,
    })
}

/// Inserts the schema of a dotted key such as `offload.optimizer` below that of its table.
fn insert(properties: &mut Map<String, Value>, path: &[&str], schema: Value) {
    match path {
        [] => {}
        [last] => {
            properties.insert((*last).to_owned(), schema);
        }
        [table, rest @ ..] => {
            let table = properties.entry(*table).or_insert_with(
                || json!({ "type": "object", "properties": {}, "additionalProperties": false }),
            );
            if let Some(inner) = table["properties"].as_object_mut() {
                insert(inner, rest, schema);
            }
        }
    }
}

fn schema_of(key: &Key) -> Value {
    let bounded = |kind: &str| {
        let mut schema = json!({ "type": kind });
        for (name, bound) in key.rules.bounds() {
            schema[name] = number(bound, kind);
        }
        schema
    };
    let text = || json!({ "type": "string", "minLength": 1 });
    let pair = |items: Value| json!({ "type": "array", "items": items, "minItems": 2, "maxItems": 2 });
    let list = |items: Value| json!({ "type": "array", "items": items });
    let mut schema = match key.value_type {
        ValueType::Flag => json!({ "type": "boolean" }),
        ValueType::Integer => bounded("integer"),
        ValueType::Number => bounded("number"),
        ValueType::NumberPair => pair(bounded("number")),
        ValueType::IntegerPair => pair(bounded("integer")),
        ValueType::Text => text(),
        ValueType::TextList => json!({ "anyOf": [text(), list(text())] }),
        ValueType::IntegerList => list(bounded("integer")),
        ValueType::SourceList => {
            let source = json!({
                "type": "object", "required": ["path"], "additionalProperties": false,
                "properties": { "path": text(), "weight": { "type": "number", "exclusiveMinimum": 0 } },
            });
            let either = json!({ "anyOf": [text(), source] });
            json!({ "anyOf": [text(), source, list(either)] })
        }
        ValueType::TransformList => {
            list(json!({ "anyOf": kinds().map(schema_of_transform).collect::<Vec<_>>() }))
        }
        ValueType::NumberTable => json!({ "type": "object", "additionalProperties": bounded("number") }),
        ValueType::TextTable => json!({ "type": "object", "additionalProperties": text() }),
        ValueType::Recompute => {
            json!({ "anyOf": [{ "enum": ["none", "selective", "full"] }, { "type": "object" }] })
        }
        ValueType::Wrap => json!({ "anyOf": [{ "enum": ["block"] }, { "type": "object" }, list(text())] }),
        ValueType::Choice { allowed } => json!({ "enum": allowed }),
    };
    let default = key.rules.when_absent.map_or(key.default.to_string(), str::to_owned);
    schema["description"] = format!("{} Default: {default}.", key.doc).into();
    if key.rules.when_absent.is_none() {
        schema["default"] = key.default.clone();
    }
    schema
}

/// Returns the schema of an entry of a list of transforms: its kind, and the keys that this takes.
fn schema_of_transform((kind, keys): (&str, &[&str])) -> Value {
    let numbers = || json!({ "type": "array", "items": { "type": "number" }, "minItems": 1 });
    let pixels = || json!({ "type": "integer", "minimum": 1 });
    let mut properties = Map::new();
    properties.insert("kind".to_owned(), json!({ "const": kind }));
    for key in keys {
        let schema = match *key {
            "size" => {
                json!({ "anyOf": [pixels(), { "type": "array", "items": pixels(), "minItems": 2, "maxItems": 2 }] })
            }
            "padding" => json!({ "type": "integer", "minimum": 0 }),
            _ => numbers(),
        };
        properties.insert((*key).to_owned(), schema);
    }
    let required: Vec<&str> =
        ["kind"].into_iter().chain(keys.iter().copied().filter(|key| *key != "padding")).collect();
    json!({ "type": "object", "required": required, "additionalProperties": false, "properties": properties })
}

/// Returns a bound as JSON, as an integer if the value is one.
fn number(bound: f64, kind: &str) -> Value {
    if kind == "integer" && bound.fract() == 0.0 { json!(bound as i64) } else { json!(bound) }
}
