//! Context parallelism: the sharding of sequences, for attention where each rank holds some tokens of every sequence.
//!
//! Attention is the only operation of a block that reads other tokens, apart from the slot counts of routers. There are
//! three methods: keys and values are all-gathered (as in Llama 3: Grattafiori et al., 2024), or travel around a ring
//! (`ops::ring`), or an all-to-all converts from sharded tokens to sharded heads, so that each rank attends within whole
//! sequences (Jacobs et al., 2023). All-gathers and all-to-alls are operations of their own
//! (`ops::context_collective`), and their backward is derived like any other.
//!
//! ```text
//! ring         q, k, v of local tokens -> attention, in which k and v travel around the ring -> y of local tokens
//! all-gather   k, v -> all-gather; q of local tokens -> attention -> y of local tokens
//! all-to-all   q, k, v -> all tokens, some heads -> attention -> y -> local tokens, all heads
//! ```

use lockstep_plan::ContextPlace;
use lockstep_tensor::{AttentionDirection, TokenSpan};

use crate::recorder::Recorder;

impl Recorder {
    /// Records the block as rank `place` of the context-parallel group. The recorder's shape, until now that of whole
    /// sequences, becomes that of the local tokens.
    ///
    /// # Panics
    /// If the sequences do not divide among the ranks.
    #[track_caller]
    pub fn share_sequences(&mut self, place: ContextPlace) {
        self.shape.seq_len = place.held(self.shape.seq_len);
        self.context = place;
    }
}

/// Returns the two token ranges of each sequence that a rank holds, as spans of its tensors; `held` is their total length.
pub(crate) fn spans(place: ContextPlace, rank: usize, held: usize) -> [TokenSpan; 2] {
    let positions = place.halves_of(rank, held * place.ranks);
    let half = held / 2;
    [0, 1].map(|index| TokenSpan {
        stored: held,
        first: index * half,
        len: if index == 0 { half } else { held - half },
        position: positions[index],
    })
}

/// Returns true if any of the queries may see any of the keys.
pub(crate) fn may_see(
    queries: TokenSpan,
    keys: TokenSpan,
    window: Option<usize>,
    direction: AttentionDirection,
) -> bool {
    let behind = window.map(|window| window - 1);
    let ahead = match direction {
        AttentionDirection::Causal => Some(0),
        AttentionDirection::Bidirectional => behind,
    };
    let first_seen = behind.map_or(0, |behind| queries.position.saturating_sub(behind));
    let end_of_queries = queries.position + queries.len;
    queries.len > 0
        && keys.len > 0
        && ahead.is_none_or(|ahead| keys.position < end_of_queries + ahead)
        && keys.position + keys.len > first_seen
}

#[cfg(test)]
mod tests {
    use lockstep_plan::ContextMethod;

    use super::*;

    #[test]
    fn queries_see_keys_of_their_direction_and_window() {
        let span = |position, len| TokenSpan { stored: len, first: 0, len, position };
        let table = [
            (span(4, 4), span(0, 4), None, true),
            (span(4, 4), span(4, 4), None, true),
            (span(4, 4), span(8, 4), None, false),
            (span(4, 4), span(7, 4), None, true),
            (span(8, 4), span(0, 4), Some(5), false),
            (span(8, 4), span(0, 4), Some(6), true),
            (span(8, 4), span(0, 0), None, false),
        ];
        for (queries, keys, window, expected) in table {
            let found = may_see(queries, keys, window, AttentionDirection::Causal);
            assert_eq!(found, expected, "{queries:?} {keys:?} {window:?}");
        }
        let later = [
            (span(4, 4), span(8, 4), None, true),
            (span(4, 4), span(12, 4), Some(5), false),
            (span(4, 4), span(11, 4), Some(5), true),
        ];
        for (queries, keys, window, expected) in later {
            let found = may_see(queries, keys, window, AttentionDirection::Bidirectional);
            assert_eq!(found, expected, "{queries:?} {keys:?} {window:?}");
        }
    }

    #[test]
    fn spans_are_the_ranges_that_a_rank_holds() {
        let place = ContextPlace { ranks: 2, rank: 0, method: ContextMethod::Ring };
        let positions = |rank| spans(place, rank, 6).map(|span| (span.first, span.len, span.position));
        assert_eq!(positions(0), [(0, 3, 0), (3, 3, 9)]);
        assert_eq!(positions(1), [(0, 3, 3), (3, 3, 6)]);
    }
}
