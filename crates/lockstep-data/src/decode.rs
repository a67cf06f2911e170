//! Streaming detokenization: ids one by one become text that can be printed immediately.
//!
//! The text of a token can depend on the one before it (some decoders drop the space of the first word), and a
//! character can span several tokens. So each call decodes a short window of ids as a whole. It returns only the
//! complete characters that were not returned before.

use crate::{error::Result, tokenizer::Tokenizer};

/// Incremental decoder that turns a stream of ids into text as soon as characters are complete.
#[derive(Debug, Clone)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Latest ids. The first `context` of them have been returned and only provide context for decoding the rest.
    window: Vec<u32>,
    context: usize,
    /// Length of the prefix of the window's text that has been returned, in bytes.
    emitted_bytes: usize,
}

/// Character that every decoder produces for an incomplete character and for an invalid byte.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// Number of ids without a complete character after which they are treated as invalid bytes.
const LONGEST_UNFINISHED: usize = 32;

/// Maximum number of bytes, and so of tokens, in a character.
const LONGEST_CHARACTER: usize = 4;

impl<'a> TextStream<'a> {
    /// Creates an empty stream.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, window: Vec::new(), context: 0, emitted_bytes: 0 }
    }

    /// Adds an id and returns the text that it completes. This is often the text of one token, and sometimes empty.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window)?;
        let finished = text.trim_end_matches(REPLACEMENT);
        let mut new = finished.get(self.emitted_bytes..).unwrap_or_default().to_owned();
        self.emitted_bytes = self.emitted_bytes.max(finished.len());

        if finished.len() == text.len() {
            // A token without text (a special token) is dropped from the context, where it would look like the start of
            // a text.
            if !new.is_empty() {
                self.window.drain(..self.context);
                self.context = self.window.len();
                self.emitted_bytes = self.tokenizer.decode(&self.window)?.len();
            }
        } else if self.window.len() - self.context > LONGEST_UNFINISHED {
            new.push_str(&self.give_up_on_start(&text)?);
        }
        Ok(new)
    }

    /// Ends the stream and returns the rest of its text; an incomplete character becomes U+FFFD.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn finish(&mut self) -> Result<String> {
        let text = self.tokenizer.decode(&self.window)?;
        let rest = text.get(self.emitted_bytes..).unwrap_or_default().to_owned();
        *self = Self::new(self.tokenizer);
        Ok(rest)
    }

    /// Returns the text of all ids but the last few, which may still become a character. The cut is where decoding the
    /// two parts separately gives the same text.
    fn give_up_on_start(&mut self, text: &str) -> Result<String> {
        let longest = self.window.len() - 1;
        for cut in longest + 1 - LONGEST_CHARACTER..=longest {
            let start = self.tokenizer.decode(&self.window[..cut])?;
            let rest = self.tokenizer.decode(&self.window[cut..])?;
            if text.strip_prefix(start.as_str()) == Some(rest.as_str()) {
                let new = start.get(self.emitted_bytes..).unwrap_or_default().to_owned();
                self.window.drain(..cut);
                (self.context, self.emitted_bytes) = (0, 0);
                return Ok(new);
            }
        }
        Ok(String::new())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::testing::{byte_level_json, byte_level_tokenizer};

    fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> String {
        let mut stream = TextStream::new(tokenizer);
        let mut text: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        text.push_str(&stream.finish().unwrap());
        text
    }

    /// Tokenizer in the style of Llama 2: word-start markers, and byte tokens for characters outside the vocabulary.
    fn sentence_piece() -> Tokenizer {
        let json = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "byte_fallback": true, "vocab":
                {"▁a": 0, "▁b": 1, "c": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5}, "merges": []}}"#;
        Tokenizer::from_json(json.as_bytes(), Path::new("sentence-piece.json")).unwrap()
    }

    proptest! {
        #[test]
        fn a_stream_of_any_bytes_is_their_lossy_text(bytes in prop::collection::vec(
            prop_oneof![any::<u8>(), Just(0xFF), Just(0xF0), Just(0x9F), Just(0xA6), Just(b'a')], 0..120)
        ) {
            let ids: Vec<u32> = bytes.iter().map(|&byte| byte.into()).collect();
            prop_assert_eq!(stream(&Tokenizer::Bytes, &ids), String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn a_stream_is_the_text_of_all_its_ids(ids in prop::collection::vec(0_u32..257, 0..80)) {
            let tokenizer = byte_level_tokenizer(&byte_level_json(&true.into()), &[]);
            prop_assert_eq!(stream(&tokenizer, &ids), tokenizer.decode(&ids).unwrap());
        }

        #[test]
        fn spaces_between_words_and_characters_of_several_tokens_survive(
            words in prop::collection::vec(prop_oneof![
                Just(vec![0]), Just(vec![1]), Just(vec![2]), Just(vec![3, 4, 5])], 0..30)
        ) {
            let (tokenizer, ids) = (sentence_piece(), words.concat());
            prop_assert_eq!(stream(&tokenizer, &ids), tokenizer.decode(&ids).unwrap());
        }
    }

    #[test]
    fn a_character_is_given_out_with_its_last_byte() {
        let mut stream = TextStream::new(&Tokenizer::Bytes);
        let out: Vec<String> = "a€b".bytes().map(|byte| stream.push(byte.into()).unwrap()).collect();
        assert_eq!(out, ["a", "", "", "€", "b"]);
    }

    #[test]
    fn ids_beyond_the_bytes_have_no_text() {
        assert_eq!(stream(&Tokenizer::Bytes, &[97, 256, 258, 98]), "ab");
    }
}
