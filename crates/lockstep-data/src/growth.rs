//! Upper bound on how much a `tokenizer.json` can lengthen a text before it is split into tokens.
//!
//! Normalizers and decoders are lists of replacements that run one after another. Twenty replacements that double the
//! text turn a line of 3 kB into 3 GB, and the library cannot be interrupted. So the maximum growth of each step is
//! computed from the file. A file beyond [`MOST`] is rejected before it processes any text.

use serde_json::Value;

/// Maximum factor by which a tokenizer's replacements may lengthen a text. The largest factors computed for published tokenizers are
/// 176 (T5) and 132 (ALBERT).
pub(crate) const MOST: f64 = 400.0;

/// Growth factor of NFKC and NFKD: U+FDFA of 3 bytes becomes 33.
const COMPATIBILITY: f64 = 11.0;
/// Growth factor of NFC and NFD: U+0390 of 2 bytes becomes 6.
const CANONICAL: f64 = 3.0;
/// Growth factor of lower-casing: U+023A of 2 bytes becomes 3.
const LOWER_CASE: f64 = 1.5;
/// Growth factor of the byte-level alphabet: a byte becomes a character of up to 2 bytes.
const BYTE_LEVEL: f64 = 2.0;
/// Growth factor of spaces around Chinese characters, which have 3 bytes each.
const CHINESE: f64 = 5.0 / 3.0;
/// Returns the maximum growth factor of the file's steps, for encoding or decoding, whichever is larger.
pub(crate) fn of(tokenizer: &Value) -> f64 {
    let of_steps = |names: &[&str]| {
        let mut growth = Growth { factor: 1.0, is_decomposed: false };
        names.iter().for_each(|name| growth.apply(&tokenizer[*name]));
        growth.factor
    };
    of_steps(&["normalizer", "pre_tokenizer"]).max(of_steps(&["decoder"]))
}

/// Growth factor of the steps so far.
struct Growth {
    factor: f64,
    /// True if characters have been decomposed; a second decomposition changes nothing.
    is_decomposed: bool,
}

impl Growth {
    fn apply(&mut self, step: &Value) {
        let list = ["normalizers", "pretokenizers", "decoders"].iter().find_map(|name| step[name].as_array());
        if let Some(steps) = list {
            return steps.iter().for_each(|step| self.apply(step));
        }
        let len = |name: &str| step[name].as_str().map_or(0, str::len) as f64;
        self.factor *= match step["type"].as_str() {
            Some("Replace") => of_replacement(&step["pattern"], len("content")),
            Some("Prepend") => 1.0 + len("prepend"),
            // SentencePiece's character table is a decomposition as well.
            Some("NFKC" | "NFKD" | "Precompiled") => self.decompose(COMPATIBILITY),
            Some("NFC" | "NFD") => self.decompose(CANONICAL),
            Some("Lowercase") => LOWER_CASE,
            Some("ByteLevel") => BYTE_LEVEL,
            Some("BertNormalizer") => CHINESE * self.decompose(CANONICAL) * LOWER_CASE,
            Some("Metaspace") => 1.0 + len("replacement"),
            _ => 1.0,
        };
    }

    fn decompose(&mut self, factor: f64) -> f64 {
        if std::mem::replace(&mut self.is_decomposed, true) { 1.0 } else { factor }
    }
}

/// Returns the growth factor of replacing every match of `pattern` by `content` bytes.
fn of_replacement(pattern: &Value, content: f64) -> f64 {
    match pattern["String"].as_str() {
        // The empty string matches between any two bytes.
        Some("") => 1.0 + content,
        Some(text) => (content / text.len() as f64).max(1.0),
        // A regular expression may match a single byte, or nothing.
        None => 1.0 + content,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn replace(pattern: Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    #[test]
    fn steps_multiply_and_the_side_that_grows_most_counts() {
        let double = replace(json!({"String": "a"}), "aa");
        let albert = json!({
            "normalizer": {"type": "Sequence", "normalizers": [
                replace(json!({"String": "``"}), "\""), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"},
                {"type": "Precompiled", "precompiled_charsmap": ""}, replace(json!({"Regex": " {2,}"}), " "),
            ]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "Metaspace", "replacement": "▁"}]},
        });
        for (tokenizer, expected) in [
            (json!({}), 1.0),
            (json!({"normalizer": double}), 2.0),
            (
                json!({"normalizer": {"type": "Sequence", "normalizers": vec![double.clone(); 20]}}),
                1_048_576.0,
            ),
            (json!({"normalizer": double, "pre_tokenizer": {"type": "ByteLevel"}}), 4.0),
            (
                json!({"normalizer": double, "decoder": {"type": "Sequence", "decoders": [double, double]}}),
                4.0,
            ),
            (json!({"normalizer": replace(json!({"String": ""}), "abc")}), 4.0),
            (json!({"normalizer": replace(json!({"Regex": "x*"}), "abc")}), 4.0),
            (json!({"normalizer": replace(json!({"String": " "}), "▁")}), 3.0),
            (json!({"normalizer": replace(json!({"String": "``"}), "\"")}), 1.0),
            (json!({"normalizer": {"type": "NFKC"}}), 11.0),
            (albert, 132.0),
        ] {
            assert!(
                (of(&tokenizer) - expected).abs() < 1e-9,
                "{} of {tokenizer}, {expected} expected",
                of(&tokenizer)
            );
        }
    }
}
