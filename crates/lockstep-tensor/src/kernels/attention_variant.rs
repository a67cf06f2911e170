//! Variants of attention: the direction, key masks, ALiBi, soft-capped scores and attention sinks.

use crate::View;

/// The keys that a query may see, relative to its own position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AttentionDirection {
    /// Keys up to the query's own position, as in decoders.
    #[default]
    Causal,
    /// Keys on both sides, as in encoders. A window reaches equally far in both directions.
    Bidirectional,
}

/// Deviations from plain causal attention. With `i` and `j` the positions of query and key, the score of a visible key
/// is `cap(scale · q·k) - slope · |i - j|`, and the probabilities are
/// `exp(score) / (exp(sink) + sum of exp(score))`.
///
/// | field | calls on spans of keys, as in context parallelism |
/// |---|---|
/// | `alibi_slopes`, `soft_cap` | as for plain attention: positions are those in the whole sequence |
/// | `sinks` | as for plain attention: the call that overwrites counts the sink |
/// | `direction` | bidirectional attention needs a call for every span of keys, also for those after the queries |
/// | `key_mask` | each call needs the mask of the whole sequence |
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionVariant<'a> {
    /// Causal or bidirectional.
    pub direction: AttentionDirection,
    /// Position in the whole sequence at which each query's document ends (exclusive), u32
    /// `[sequences·queries.stored]`, nondecreasing within a sequence. Bidirectional attention needs it beside
    /// [`Attention::document_starts`](crate::Attention::document_starts); causal attention ignores it. See
    /// [`document_ends`].
    pub document_ends: Option<View<'a>>,
    /// Mask of valid keys: 0 hides a key from all queries, any other value shows it (`attention_mask` of BERT). u8 or
    /// u32 `[sequences, positions]` with the key's position in the whole sequence as the column, so the mask of a
    /// whole sequence serves every span of its keys. Rows may be wider than the keys reach. A hidden key and its value
    /// must be finite.
    pub key_mask: Option<View<'a>>,
    /// Slope of each of this rank's heads for linear biases (ALiBi: Press et al., 2022), f32 `[heads]`; constants
    /// without a gradient. See [`alibi_slopes`].
    pub alibi_slopes: Option<View<'a>>,
    /// Bound `c` of soft-capped scores, `cap(s) = c · tanh(s / c)` (Gemma 2: Gemma Team, 2024, section 2); positive.
    pub soft_cap: Option<f32>,
    /// Sinks: a learned logit for each of this rank's heads, which takes part in the denominator of the softmax and has
    /// no value (gpt-oss: OpenAI, 2025). `[heads]` in f32 or in the type of the queries. Their gradient is computed by
    /// [`AttentionKernels::attention_sinks_backward`](crate::AttentionKernels::attention_sinks_backward).
    pub sinks: Option<View<'a>>,
}

/// Returns the ALiBi slopes of all `heads` heads (Press et al., 2022, section 3; for other numbers than powers of two as
/// in BLOOM): `2^(-8 (h + 1) / n)` for the largest power of two `n <= heads`, then every other slope of `2n` heads.
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    let Some(power) = heads.checked_ilog2().map(|exponent| 1 << exponent) else { return Vec::new() };
    let slope = |index: usize, heads: usize| libm::exp2(-8.0 * index as f64 / heads as f64) as f32;
    let own = (1..=power).map(|index| slope(index, power));
    let rest = (1..).step_by(2).map(|index| slope(index, 2 * power));
    own.chain(rest).take(heads).collect()
}

/// Returns the position at which each token's document ends (exclusive), given the position at which it starts, for
/// whole sequences of `len` tokens.
pub fn document_ends(document_starts: &[u32], len: usize) -> Vec<u32> {
    let mut ends = vec![len as u32; document_starts.len()];
    for (starts, ends) in document_starts.chunks(len.max(1)).zip(ends.chunks_mut(len.max(1))) {
        for token in (1..starts.len()).rev() {
            let is_last = starts[token - 1] != starts[token];
            ends[token - 1] = if is_last { starts[token] } else { ends[token] };
        }
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_the_published_ones() {
        // Press et al., section 3: 1/2, 1/4, ... 1/256 for 8 heads; 1/2^0.5, 1/2^1, ... for 16.
        let eight: Vec<f32> = (1..=8).map(|i| 0.5_f32.powi(i)).collect();
        assert_eq!(alibi_slopes(8), eight);
        let sixteen: Vec<f32> = (1..=16).map(|i| (-0.5 * f64::from(i)).exp2() as f32).collect();
        assert_eq!(alibi_slopes(16), sixteen);
        // `build_alibi_tensor` of transformers' BLOOM.
        let twelve = [&eight[..], &[0.707_106_77, 0.353_553_38, 0.176_776_69, 0.088_388_346]].concat();
        assert_eq!(alibi_slopes(12), twelve);
        assert_eq!(alibi_slopes(6), [0.25, 0.0625, 0.015_625, 0.003_906_25, 0.5, 0.125]);
        assert_eq!((alibi_slopes(1), alibi_slopes(0)), (vec![0.003_906_25], vec![]));
    }

    #[test]
    fn a_document_ends_where_the_next_one_starts() {
        let starts = [0, 0, 2, 2, 2, 5, /* next sequence */ 0, 1, 1, 1, 1, 1];
        assert_eq!(document_ends(&starts, 6), [2, 2, 5, 5, 5, 6, 1, 6, 6, 6, 6, 6]);
        assert!(document_ends(&[], 0).is_empty());
    }
}
