//! Ids one by one to text that can be printed at once: no half characters, and nothing printed twice.
//!
//! The text of a token can depend on the one before it (some decoders drop the space of the first word),
//! and a character can span several tokens. So a short window of ids is decoded as a whole each time, and
//! what is given out is what its finished part adds to the text that is out already.

use crate::{error::Result, tokenizer::Tokenizer};

/// Turns a stream of ids into text as soon as it is complete.
#[derive(Debug, Clone)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The latest ids; the first `context` of them are there only for what follows them.
    window: Vec<u32>,
    context: usize,
    /// How much of the window's text is out.
    emitted_bytes: usize,
}

/// How an unfinished character, and a byte that is part of none, come out of every decoder.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// More ids than this without a finished character at their end are no text.
const LONGEST_UNFINISHED: usize = 32;

/// No character has more bytes, hence tokens.
const LONGEST_CHARACTER: usize = 4;

impl<'a> TextStream<'a> {
    /// A stream with nothing in it.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, window: Vec::new(), context: 0, emitted_bytes: 0 }
    }

    /// Takes the next id and returns the text that is complete with it, often that of one token,
    /// sometimes none.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window)?;
        let finished = text.trim_end_matches(REPLACEMENT);
        let mut new = finished.get(self.emitted_bytes..).unwrap_or_default().to_owned();
        self.emitted_bytes = self.emitted_bytes.max(finished.len());

        if finished.len() == text.len() {
            // A token without text (a special one) is no context: it would look like a start.
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

    /// Ends the stream: the text of what was still unfinished, as U+FFFD.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(&mut self) -> Result<String> {
        let text = self.tokenizer.decode(&self.window)?;
        let rest = text.get(self.emitted_bytes..).unwrap_or_default().to_owned();
        *self = Self::new(self.tokenizer);
        Ok(rest)
    }

    /// Gives out all of the window but its last few tokens, which may still become a character, at a
    /// place where that changes no character.
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

    /// Words with a mark at their start, and bytes for what is no word, in the manner of Llama 2.
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
