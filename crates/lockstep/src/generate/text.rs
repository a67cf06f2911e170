//! Text that grows by pieces and ends before a stop string.

/// A text whose tail is held back while it may be the beginning of a stop string.
pub(super) struct StoppedText<'s> {
    stops: &'s [String],
    text: String,
    shown_bytes: usize,
    is_ended: bool,
}

impl<'s> StoppedText<'s> {
    /// Creates an empty text that ends before the first of `stops`, none of which is empty.
    pub(super) fn new(stops: &'s [String]) -> Self {
        Self { stops, text: String::new(), shown_bytes: 0, is_ended: false }
    }

    /// Adds a piece. Returns the part of the text that can be shown now.
    pub(super) fn push(&mut self, piece: &str) -> &str {
        if self.is_ended {
            return "";
        }
        self.text += piece;
        // A match cannot start before the tail that was held back.
        let tail = &self.text[self.shown_bytes..];
        if let Some(at) = self.stops.iter().filter_map(|stop| tail.find(stop.as_str())).min() {
            self.text.truncate(self.shown_bytes + at);
            self.is_ended = true;
            return self.show_to(self.text.len());
        }
        let held = self.stops.iter().map(|stop| held_bytes(&self.text, stop)).max();
        self.show_to(self.text.len() - held.unwrap_or(0))
    }

    /// Returns true if a stop string has ended the text.
    pub(super) fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Returns the tail that was held back: no more pieces follow.
    pub(super) fn finish(&mut self) -> &str {
        self.show_to(self.text.len())
    }

    /// Returns the whole text.
    pub(super) fn into_text(self) -> String {
        self.text
    }

    fn show_to(&mut self, end: usize) -> &str {
        let start = self.shown_bytes;
        self.shown_bytes = end.max(start);
        &self.text[start..self.shown_bytes]
    }
}

/// Returns the length of the longest end of `text` that begins `stop` without being all of it.
fn held_bytes(text: &str, stop: &str) -> usize {
    (1..stop.len())
        .rev()
        .find(|&bytes| stop.is_char_boundary(bytes) && text.ends_with(&stop[..bytes]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is shown after each piece, the text, and whether a stop string ended it.
    fn grow(stops: &[&str], pieces: &[&str]) -> (Vec<String>, String, bool) {
        let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
        let mut text = StoppedText::new(&stops);
        let mut shown: Vec<String> = pieces.iter().map(|piece| text.push(piece).to_owned()).collect();
        shown.push(text.finish().to_owned());
        let is_ended = text.is_ended();
        (shown, text.into_text(), is_ended)
    }

    #[test]
    fn what_may_be_the_end_is_held_back_and_the_end_is_not_shown() {
        let (shown, text, is_ended) = grow(&["<end>"], &["a<", "b <e", "nd", "> rest", "more"]);
        assert_eq!(shown, ["a", "<b ", "", "", "", ""]);
        assert_eq!((text.as_str(), is_ended), ("a<b ", true));
    }

    #[test]
    fn the_first_of_several_stop_strings_ends_the_text() {
        let (shown, text, is_ended) = grow(&["stop", "\n\n", "é!"], &["one\n", "\ntwo stop"]);
        assert_eq!(shown, ["one", "", ""]);
        assert_eq!((text.as_str(), is_ended), ("one", true));
        let (shown, text, is_ended) = grow(&["stop", "é!"], &["a st", "é", "."]);
        assert_eq!(shown, ["a ", "st", "é.", ""]);
        assert_eq!((text.as_str(), is_ended), ("a sté.", false));
    }

    #[test]
    fn without_stop_strings_everything_is_shown_at_once() {
        let (shown, text, is_ended) = grow(&[], &["a", "b"]);
        assert_eq!(
            (shown, text.as_str(), is_ended),
            (vec!["a".into(), "b".into(), String::new()], "ab", false)
        );
    }
}
