//! Visibility and addressing: the rows of a task, the keys each row may see, and the positions of their elements in
//! memory.
//!
//! The query heads that share a key head (grouped-query attention) are stacked: row `r` of a (sequence, key head)
//! pair is query `r / group` of its head number `r % group`. So one pass over keys and values serves the whole group.

use std::ops::Range;

use lockstep_plan::CachePlace;

use super::{
    lanes::{BLOCK, padded},
    pages::Pages,
    variant::{KeyMask, Sinks},
};
use crate::{Attention, AttentionDirection, Dropout, TokenSpan, View, cpu::dropout::Mask};

/// A 64-bit mask for each row of a block of scores: bit `j` stands for key `j` of the block.
pub(super) type Bits = [u64; BLOCK];

/// An [`Attention`] with values derived from it.
#[derive(Clone, Copy)]
pub(super) struct Geometry<'a> {
    /// Number of keys that take part; key indices count from the first of them.
    pub(super) key_len: usize,
    pub(super) head_dim: usize,
    /// `head_dim` rounded up to whole registers of every level.
    pub(super) padded_dim: usize,
    pub(super) scale: f32,
    pub(super) dropout: Option<KeyedMask<'a>>,
    pub(super) soft_cap: Option<f32>,
    /// ALiBi slope of each head.
    pub(super) alibi_slopes: Option<&'a [f32]>,
    pub(super) sinks: Option<Sinks<'a>>,
    /// Query heads that share a key head.
    pub(super) group: usize,
    sequences: usize,
    queries: TokenSpan,
    keys: TokenSpan,
    heads: usize,
    first_head: usize,
    key_value_heads: usize,
    window: usize,
    /// Number of positions from the query's own on whose keys it may see: 1 if causal.
    reach: usize,
    /// Position at which the document of each query starts, `[sequences · queries.stored]`.
    document_starts: Option<&'a [u32]>,
    /// Position at which the document of each query ends, of the same shape; `None` if causal.
    document_ends: Option<&'a [u32]>,
    key_mask: Option<KeyMask<'a>>,
    /// Pages of the keys, if they are those of a cache.
    pub(super) pages: Option<Pages<'a>>,
}

/// One key head of one sequence.
#[derive(Clone, Copy)]
pub(super) struct Pair {
    pub(super) sequence: usize,
    pub(super) key_head: usize,
}

impl<'a> Geometry<'a> {
    /// # Panics
    /// If there are no heads, the key heads do not divide the query heads, the window is 0, a span exceeds the stored
    /// tokens, the documents of a sequence are not in order, or an operand of the variant has another type or size.
    pub(super) fn new(attention: &Attention<'a>) -> Self {
        let &Attention { queries, keys, heads, key_value_heads, head_dim, window, .. } = attention;
        assert!(
            head_dim > 0 && key_value_heads > 0 && heads.is_multiple_of(key_value_heads),
            "attention needs elements per head ({head_dim}) and a multiple of {key_value_heads} key heads, not {heads}"
        );
        assert!(window != Some(0), "a window of 0 tokens sees nothing");
        for (name, span) in [("queries", queries), ("keys", keys)] {
            let TokenSpan { stored, first, len, .. } = span;
            assert!(
                first <= stored && len <= stored - first,
                "{name} of attention: {len} from {first} on are more than the {stored} of a sequence"
            );
        }
        let variant = attention.variant;
        let is_causal = variant.direction == AttentionDirection::Causal;
        assert!(
            is_causal || attention.document_starts.is_some() == variant.document_ends.is_some(),
            "bidirectional attention needs both the starts and the ends of documents, or neither"
        );
        if let Some(cap) = variant.soft_cap {
            assert!(cap > 0.0 && cap.is_finite(), "scores cannot be capped to {cap}");
        }
        let window = window.unwrap_or(usize::MAX);
        Self {
            key_len: keys.len,
            head_dim,
            padded_dim: padded(head_dim),
            scale: attention.scale,
            dropout: attention.dropout.map(|dropout| KeyedMask::new(dropout, attention.sequences)),
            soft_cap: variant.soft_cap,
            // SAFETY: the callers check that no output overlaps the slopes.
            alibi_slopes: variant.alibi_slopes.map(|slopes| unsafe { slopes.slice::<f32>() }).inspect(
                |slopes| {
                    assert_eq!(slopes.len(), heads, "attention needs one slope for each head");
                },
            ),
            // SAFETY: the callers check that no output overlaps the sinks.
            sinks: variant.sinks.map(|sinks| unsafe { Sinks::new(sinks, heads) }),
            group: heads / key_value_heads,
            sequences: attention.sequences,
            queries,
            keys,
            heads,
            first_head: attention.first_head,
            key_value_heads,
            window,
            reach: if is_causal { 1 } else { window },
            document_starts: attention
                .document_starts
                .map(|starts| document_bounds(attention, "start", starts)),
            document_ends: variant
                .document_ends
                .filter(|_| !is_causal)
                .map(|ends| document_bounds(attention, "end", ends)),
            // SAFETY: the callers check that no output overlaps the mask.
            key_mask: variant
                .key_mask
                .map(|mask| unsafe { KeyMask::new(mask, attention.sequences, keys.position + keys.len) }),
            pages: None,
        }
    }

    /// Reads the keys and values from the pages of a cache.
    pub(super) fn paged(self, pages: Pages<'a>) -> Self {
        Self { pages: Some(pages), ..self }
    }

    pub(super) fn sequences(&self) -> usize {
        self.sequences
    }

    pub(super) fn heads(&self) -> usize {
        self.heads
    }

    /// Number of (sequence, key head) pairs.
    pub(super) fn pairs(&self) -> usize {
        self.sequences * self.key_value_heads
    }

    pub(super) fn pair(&self, index: usize) -> Pair {
        Pair { sequence: index / self.key_value_heads, key_head: index % self.key_value_heads }
    }

    /// Number of rows of a pair.
    pub(super) fn rows(&self) -> usize {
        self.queries.len * self.group
    }

    /// Returns the elements of a tensor of queries, `[sequences · queries.stored, heads, head_dim]`.
    pub(super) fn query_elements(&self) -> usize {
        self.sequences * self.queries.stored * self.heads * self.head_dim
    }

    /// Returns the elements of a tensor of keys, `[sequences · keys.stored, key_value_heads, head_dim]`.
    pub(super) fn key_elements(&self) -> usize {
        self.sequences * self.keys.stored * self.key_value_heads * self.head_dim
    }

    /// Returns the elements of the log-sum-exps, `[sequences, heads, queries.stored]`.
    pub(super) fn statistic_elements(&self) -> usize {
        self.sequences * self.queries.stored * self.heads
    }

    /// Returns the ranges of the vectors of `rows` in a tensor of queries.
    #[inline(always)]
    pub(super) fn query_vectors(
        &self,
        pair: Pair,
        rows: Range<usize>,
    ) -> impl ExactSizeIterator<Item = Range<usize>> + Clone {
        let &Self { heads, head_dim, group, .. } = self;
        let first =
            (pair.sequence * self.queries.stored + self.queries.first) * heads + pair.key_head * group;
        self.queries_of(rows).map(move |(query, head)| {
            let start = (first + query * heads + head) * head_dim;
            start..start + head_dim
        })
    }

    /// Returns the ranges of the vectors of `keys` in a tensor of keys, or in a cache: then the keys are those of one block.
    #[inline(always)]
    pub(super) fn key_vectors(
        &self,
        pair: Pair,
        keys: Range<usize>,
    ) -> impl ExactSizeIterator<Item = Range<usize>> + Clone {
        let &Self { head_dim, .. } = self;
        let (origin, first, stride) = match self.pages {
            None => {
                let first = pair.sequence * self.keys.stored + self.keys.first;
                (0, (first * self.key_value_heads + pair.key_head) * head_dim, self.key_stride())
            }
            Some(pages) => {
                let block = keys.start / BLOCK;
                let table = pages.table;
                let first = table.start(0, pair.key_head, block) / table.format.stored.element_bytes();
                (block * BLOCK, first, head_dim)
            }
        };
        keys.map(move |key| {
            let start = first + (key - origin) * stride;
            start..start + head_dim
        })
    }

    /// Returns the pages of a cache that holds keys and values in blocks, as right operands or codes of them.
    #[inline(always)]
    pub(super) fn pages_of_blocks(&self) -> Option<Pages<'a>> {
        self.pages.filter(Pages::is_of_blocks)
    }

    /// Returns the elements from one key's vector to the next.
    fn key_stride(&self) -> usize {
        self.key_value_heads * self.head_dim
    }

    /// Returns the indices of the log-sum-exps of `rows`.
    #[inline(always)]
    pub(super) fn statistics(&self, pair: Pair, rows: Range<usize>) -> impl Iterator<Item = usize> {
        let stored = self.queries.stored;
        let first = (pair.sequence * self.heads + pair.key_head * self.group) * stored + self.queries.first;
        self.queries_of(rows).map(move |(query, head)| first + head * stored + query)
    }

    /// Returns the query of each of `rows`, counted from the first of the span, and its head in the group. Counted up
    /// because divisions would take much of the time.
    #[inline(always)]
    fn queries_of(
        &self,
        rows: Range<usize>,
    ) -> impl ExactSizeIterator<Item = (usize, usize)> + Clone + use<> {
        let group = self.group;
        let mut next = (rows.start / group, rows.start % group);
        rows.map(move |_| {
            let (query, head) = next;
            next = if head + 1 == group { (query + 1, 0) } else { (query, head + 1) };
            (query, head)
        })
    }

    /// Returns the query head of a row.
    pub(super) fn head(&self, pair: Pair, row: usize) -> usize {
        pair.key_head * self.group + row % self.group
    }

    fn position(&self, row: usize) -> usize {
        self.queries.position + row / self.group
    }

    /// Returns the position of a row's query minus that of a key. Exact up to 2^24.
    pub(super) fn offset(&self, row: usize, key: usize) -> f32 {
        let (query, key) = (self.position(row), self.keys.position + key);
        if query >= key { (query - key) as f32 } else { -((key - query) as f32) }
    }

    /// Returns the range of keys that at least one of `rows` (not empty) may see, apart from the key mask.
    pub(super) fn keys_of(&self, pair: Pair, rows: Range<usize>) -> Range<usize> {
        // Starts and ends are nondecreasing: the first row sees the earliest keys, the last row the latest.
        let [first, last] = [rows.start, rows.end - 1].map(|row| self.keys_of_query(pair, row / self.group));
        first.start..last.end
    }

    /// Returns the blocks of the `seen` keys that this rank has, each with the seen keys of the next one, which are empty after the last.
    pub(super) fn key_blocks(&self, seen: Range<usize>) -> impl Iterator<Item = [Range<usize>; 2]> + use<> {
        let CachePlace { ranks, rank } =
            self.pages.map_or_else(CachePlace::default, |pages| pages.table.place);
        let (first, stride, key_len) = (seen.start / BLOCK, ranks * BLOCK, self.key_len);
        let ahead = (rank + ranks - first % ranks) % ranks;
        ((first + ahead) * BLOCK..seen.end).step_by(stride).map(move |start| {
            let next = seen.end.min(start + stride)..seen.end.min(start + stride + BLOCK);
            [start..key_len.min(start + BLOCK), next]
        })
    }

    /// Returns the range of keys that a query, counted from the first of the span, may see. It may end before it starts.
    #[inline(always)]
    fn keys_of_query(&self, pair: Pair, query: usize) -> Range<usize> {
        let bound = |bounds: &[u32]| {
            bounds[pair.sequence * self.queries.stored + self.queries.first + query] as usize
        };
        let position = self.queries.position + query;
        let in_window = (position + 1).saturating_sub(self.window);
        let start = self.document_starts.map_or(in_window, |starts| in_window.max(bound(starts)));
        let end = position.saturating_add(self.reach);
        let end = self.document_ends.map_or(end, |ends| end.min(bound(ends)));
        let key_at = |position: usize| position.saturating_sub(self.keys.position);
        key_at(start)..key_at(end).min(self.key_len)
    }

    /// Returns the mask of the keys of a block that the key mask does not hide.
    pub(super) fn valid_keys(&self, pair: Pair, first_key: usize) -> u64 {
        let Some(mask) = self.key_mask else { return u64::MAX };
        let keys = (self.key_len - first_key).min(BLOCK);
        mask.bits(pair.sequence, self.keys.position + first_key, keys)
    }

    /// Returns the mask of visible keys for each row, in the block that starts at `first_key`. `None` if no row sees
    /// any.
    pub(super) fn visible(&self, pair: Pair, rows: Range<usize>, first_key: usize) -> Option<Bits> {
        let [first, last] = [rows.start, rows.end - 1].map(|row| self.keys_of_query(pair, row / self.group));
        let end_key = first_key + BLOCK;
        if last.end <= first_key || first.start >= end_key {
            return None;
        }
        let valid = self.valid_keys(pair, first_key);
        // Every row sees the keys that both the first and the last row see.
        if last.start <= first_key && first.end >= end_key {
            return (valid != 0).then_some([valid; BLOCK]);
        }
        let mut bits = [0; BLOCK];
        let (mut query, mut seen) = (rows.start / self.group, 0);
        // First row of the next query, counted up because divisions would take much of the time.
        let mut next_row = rows.start;
        for (bits, row) in bits.iter_mut().zip(rows) {
            if row == next_row {
                let keys = self.keys_of_query(pair, query);
                let start = keys.start.max(first_key) - first_key;
                let end = keys.end.min(end_key).saturating_sub(first_key);
                seen = if start < end { (u64::MAX >> (BLOCK - (end - start))) << start & valid } else { 0 };
                query += 1;
                next_row = query * self.group;
            }
            *bits = seen;
        }
        bits.iter().any(|bits| *bits != 0).then_some(bits)
    }

    /// Returns the scratch elements of a block's derivatives of soft-capped scores: none without a cap.
    pub(super) fn cap_derivatives(&self) -> usize {
        self.soft_cap.map_or(0, |_| BLOCK * BLOCK)
    }

    /// Returns the counter of the dropout block that holds a row's word for `first_key`, and the index of that word
    /// in the block.
    pub(super) fn dropout_counter(
        &self,
        pair: Pair,
        row: usize,
        first_key: usize,
        site: u32,
    ) -> ([u32; 4], usize) {
        let head = self.first_head + self.head(pair, row);
        let key = self.keys.position + first_key;
        ([self.position(row) as u32, head as u32, key as u32 / 4, site], key % 4)
    }
}

/// Returns the start or end of the document of each query, `[sequences · queries.stored]`.
///
/// # Panics
/// If there is not one for each query, or those of a sequence are not in order.
fn document_bounds<'a>(attention: &Attention<'a>, name: &str, bounds: View<'a>) -> &'a [u32] {
    // SAFETY: the callers of `Geometry::new` check that no output overlaps the bounds.
    let bounds = unsafe { bounds.slice::<u32>() };
    let stored = attention.queries.stored;
    let expected = attention.sequences * stored;
    assert_eq!(bounds.len(), expected, "attention needs the {name} of the document of each query");
    assert!(
        bounds.chunks(stored.max(1)).all(|bounds| bounds.is_sorted()),
        "the documents of a sequence of attention must follow each other"
    );
    bounds
}

/// Returns the range from the first to the last row in which a bit of `columns` is set.
pub(super) fn rows_with(bits: &[u64], columns: u64) -> Range<usize> {
    let seen = |bits: &u64| bits & columns != 0;
    let Some(start) = bits.iter().position(seen) else { return 0..0 };
    let end = bits.iter().rposition(seen).map_or(start, |last| last + 1);
    start..end
}

/// Returns the range from the first to the last key that any of the rows has set.
pub(super) fn columns_of(bits: &[u64]) -> Range<usize> {
    match bits.iter().fold(0, |union, bits| union | bits) {
        0 => 0..0,
        union => union.trailing_zeros() as usize..BLOCK - union.leading_zeros() as usize,
    }
}

/// The dropout of the probabilities, and the Philox key of each sequence.
#[derive(Clone, Copy)]
pub(super) struct KeyedMask<'a> {
    pub(super) mask: Mask,
    keys: &'a [u32],
}

impl<'a> KeyedMask<'a> {
    fn new(dropout: Dropout<'a>, sequences: usize) -> Self {
        let keys = dropout.keys;
        assert_eq!(keys.elements(), 2 * sequences, "a dropout needs one key of two words for each sequence");
        // SAFETY: the callers check that no output overlaps the keys.
        Self { mask: Mask::new(&dropout), keys: unsafe { keys.slice() } }
    }

    /// Returns the Philox key of a sequence.
    pub(super) fn key(&self, sequence: usize) -> [u32; 2] {
        [self.keys[2 * sequence], self.keys[2 * sequence + 1]]
    }
}
