//! Kernels of attention in blocks: causal or bidirectional, forward with log-sum-exp and backward; and attention to a key-value
//! cache in pages.

use lockstep_plan::{CachePlace, KvCacheType};

use crate::{AttentionVariant, Dropout, View, Write};

/// The tokens of each sequence that take part in an attention call: `len` of the `stored` ones, from `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenSpan {
    /// Tokens of each sequence that the tensor holds.
    pub stored: usize,
    /// Index of the first token that takes part.
    pub first: usize,
    /// Number of tokens that take part.
    pub len: usize,
    /// Position of the first of them in the whole sequence.
    pub position: usize,
}

impl TokenSpan {
    /// Creates the span of all tokens of a tensor that holds whole sequences, or their beginnings.
    pub fn whole(len: usize) -> Self {
        Self { stored: len, first: 0, len, position: 0 }
    }
}

/// The geometry of an attention. A query sees the keys with `position - window < key's position <= position` that
/// belong to its own document; if the attention is bidirectional, also those with
/// `position < key's position < position + window`.
///
/// Queries and keys are spans of each sequence, so ranks may hold parts of sequences and receive the keys of other
/// ranks part by part (ring attention: Liu et al., 2023). The results of calls with one span of queries and several
/// spans of keys are merged, see [`AttentionKernels::attention`].
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// Sequences in the batch.
    pub sequences: usize,
    /// Queries of each sequence.
    pub queries: TokenSpan,
    /// Keys (and values) of each sequence.
    pub keys: TokenSpan,
    /// Number of query heads.
    pub heads: usize,
    /// Key and value heads; query head `h` reads head `h / (heads / key_value_heads)`.
    pub key_value_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Factor on the scores, usually `head_dim^-0.5`.
    pub scale: f32,
    /// Sliding window in tokens, the query's own included; `None` for full attention.
    pub window: Option<usize>,
    /// Position in the whole sequence at which each query's document starts; `None` if documents of a sequence attend
    /// to each other. u32 `[sequences·queries.stored]`, nondecreasing within a sequence. Blocks of keys outside the
    /// document are skipped.
    pub document_starts: Option<View<'a>>,
    /// Index of this rank's first query head in the whole model, if heads are sharded. Only dropout uses it.
    pub first_head: usize,
    /// Dropout of the probabilities: `position` is the query's, `feature` the key's position.
    pub dropout: Option<Dropout<'a>>,
    /// Direction, key mask, ALiBi, soft-capping and sinks; the default is plain causal attention.
    pub variant: AttentionVariant<'a>,
}

/// Tokens of a page of a key-value cache.
pub const PAGE_TOKENS: usize = 64;

/// The vectors that a key-value cache holds for each token and key head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CachedVectors {
    /// A key and a value.
    KeyAndValue,
    /// One vector, which is the key and the value: the latent of multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024,
    /// section 2.1) with the rotary part of the key.
    Shared,
}

/// The shape of a layer's key-value cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheShape {
    /// Number of key heads.
    pub key_value_heads: usize,
    /// Elements of a vector.
    pub head_dim: usize,
    /// Vectors of each token and key head.
    pub vectors: CachedVectors,
}

impl CacheShape {
    /// Returns the part of a rank among `ranks` tensor-parallel ones. Ranks that outnumber the heads hold the same ones, so a
    /// single head is on every rank.
    #[must_use]
    pub fn of_rank(self, ranks: usize) -> Self {
        Self { key_value_heads: self.key_value_heads.div_ceil(ranks), ..self }
    }
}

/// A batch of sequences with the pages of their key-value caches, for one layer (Kwon et al., PagedAttention, 2023). The queue
/// determines the order of the elements in a page and their bytes ([`Queue::page_bytes`](crate::Queue::page_bytes)).
#[derive(Debug, Clone, Copy)]
pub struct PagedCache<'a> {
    /// Type in which keys and values are stored.
    pub stored: KvCacheType,
    /// Pages of keys, u8 `[pages, bytes of a page]`.
    pub keys: View<'a>,
    /// Pages of values, u8 `[pages, bytes of a page]`; `None` if the keys are the values as well.
    pub values: Option<View<'a>>,
    /// First row of each sequence in the batch, then the end of the last one, u32 `[sequences + 1]`.
    pub row_starts: View<'a>,
    /// Tokens of each sequence that were cached before this batch, u32 `[sequences]`.
    pub cached: View<'a>,
    /// Pages of each sequence in the order of its tokens, u32 `[sequences, most pages of one]`; entries beyond its last token
    /// are not read. If the cache is sharded, these are the pages on this rank.
    pub pages: View<'a>,
    /// This rank's place among those that the cache is sharded over.
    pub place: CachePlace,
}

impl PagedCache<'_> {
    /// Returns the vectors of each token and key head.
    pub fn vectors(&self) -> CachedVectors {
        if self.values.is_some() { CachedVectors::KeyAndValue } else { CachedVectors::Shared }
    }
}

/// Overwrite or accumulate, for each result of [`AttentionKernels::attention_backward`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionWrite {
    /// Mode for the gradient of the queries.
    pub queries: Write,
    /// Mode for the gradients of keys and values.
    pub keys: Write,
}

impl AttentionWrite {
    /// Overwrites all results, for a call that has all queries and all keys.
    pub const OVERWRITE: Self = Self { queries: Write::Overwrite, keys: Write::Overwrite };
}

/// Attention. Part of [`Kernels`](crate::Kernels).
pub trait AttentionKernels {
    /// Computes attention. `q`, `out`: `[sequences·queries.stored, heads, head_dim]`; `k`, `v`:
    /// `[sequences·keys.stored, key_value_heads, head_dim]`; `log_sum_exp`: f32 `[sequences, heads, queries.stored]`,
    /// of the scores (and the sink), before dropout. A row that sees no key is zero. No queries-by-keys matrix is ever
    /// stored. Rows of `out` and `log_sum_exp` that are not among the queries stay unchanged.
    ///
    /// With [`Write::Accumulate`], `out` and `log_sum_exp` hold the attention to other, disjoint keys on entry, and
    /// the attention to both on return: `lse = log(e^a + e^b)`, `out = e^(a - lse) out_a + e^(b - lse) out_b`. `out`
    /// may be f32 whatever the type of `q`, and must be f32 when it accumulates: partial softmax results stay in f32
    /// and are rounded once, by [`CopyKernels::cast`](crate::CopyKernels::cast), after the last part. Causal attention
    /// needs no call for keys after all queries. Sinks take part in calls that overwrite and not in those that
    /// accumulate, so exactly one call for each query must overwrite.
    #[expect(clippy::too_many_arguments, reason = "three inputs, two outputs, and how these are written")]
    fn attention(
        &self,
        attention: &Attention<'_>,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
        out: View<'_>,
        log_sum_exp: View<'_>,
        write: Write,
    );

    /// Computes the gradients of [`AttentionKernels::attention`]: `dq` of the queries, `dk` and `dv` of the keys. `out` (in
    /// the type of `q`) and `log_sum_exp` are the final ones, over all keys. A call computes the contribution of its
    /// keys to `dq`, and of its queries to `dk` and `dv`. `write` selects overwrite or accumulate. Each of the three
    /// gradients may be f32 whatever the type of `q`, and must be f32 when it accumulates.
    #[expect(clippy::too_many_arguments, reason = "six inputs and three outputs, all of the mathematics")]
    fn attention_backward(
        &self,
        attention: &Attention<'_>,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
        out: View<'_>,
        log_sum_exp: View<'_>,
        dout: View<'_>,
        dq: View<'_>,
        dk: View<'_>,
        dv: View<'_>,
        write: AttentionWrite,
    );

    /// Accumulates the gradients of the attention's sinks into `dsinks`, f32 `[heads]`. `out` (in the type of `dout`)
    /// and `log_sum_exp` are the final ones, over all keys. They suffice, so one call for each span of queries gives
    /// the whole gradient, whatever the number of calls over spans of keys.
    ///
    /// # Panics
    /// If the attention has no sinks.
    fn attention_sinks_backward(
        &self,
        attention: &Attention<'_>,
        out: View<'_>,
        log_sum_exp: View<'_>,
        dout: View<'_>,
        dsinks: View<'_>,
    );

    /// Writes the keys and values of new tokens, `[rows, key_value_heads, head_dim]`, to the pages of their sequences, in the
    /// type of the cache; those of tokens whose page another rank has are left out. A page is overwritten as a whole when its first
    /// token is written. Where keys are the values as well, there is no `v`.
    ///
    /// # Panics
    /// If a sequence has not enough pages, the pages have another size, the cache has values and `v` is `None` or the reverse, or
    /// the cache holds no numbers of this type ([`KvCacheType::holds`]).
    fn append_to_cache(
        &self,
        cache: PagedCache<'_>,
        key_value_heads: usize,
        k: View<'_>,
        v: Option<View<'_>>,
    );

    /// Computes the attention of the rows of a batch, `[rows, heads, head_dim]`, to all tokens of their own sequence up to
    /// themselves, which are in the cache and are read as they are stored. In a sharded cache these are the tokens on this rank, and
    /// [`AttentionKernels::merge_attention`] merges the results of all ranks. Reads the heads, scale, window and variant of `attention`;
    /// its spans of tokens are those of the batch. `out` may be f32 whatever the type of `q`. A row's result has the same bits in any
    /// batch.
    ///
    /// # Panics
    /// If the attention has a key mask, documents or dropout.
    fn cached_attention(
        &self,
        attention: &Attention<'_>,
        cache: PagedCache<'_>,
        q: View<'_>,
        out: View<'_>,
        log_sum_exp: View<'_>,
    );

    /// Merges attentions of the same queries to disjoint keys. `parts`: f32 `[parts, rows, heads, head_dim]`; `log_sum_exp`: f32
    /// `[parts, heads, rows]`; `out`: `[rows, heads, head_dim]`. A part that saw no key has a log-sum-exp of -inf and no weight. Parts
    /// are added in their order.
    fn merge_attention(&self, parts: View<'_>, log_sum_exp: View<'_>, out: View<'_>);
}
