//! Reference attention by its definition, in f64 and one score at a time, for tests of the block kernels.

use lockstep_plan::random::Philox;
use lockstep_tensor::AttentionDirection;

/// The geometry of [`Attention`](lockstep_tensor::Attention), with owned operands.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) sequences: usize,
    pub(crate) query_len: usize,
    pub(crate) key_len: usize,
    pub(crate) query_start: usize,
    pub(crate) heads: usize,
    pub(crate) key_value_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) scale: f32,
    pub(crate) window: Option<usize>,
    /// First key of each query's document, `[sequences · query_len]`.
    pub(crate) document_starts: Option<Vec<u32>>,
    /// Index of the first head in the whole model.
    pub(crate) first_head: usize,
    /// Dropout probability; 0 for no dropout.
    pub(crate) dropout: f32,
    pub(crate) site: u32,
    pub(crate) direction: AttentionDirection,
    /// End of each query's document, `[sequences · query_len]`.
    pub(crate) document_ends: Option<Vec<u32>>,
    /// `[sequences · key_len]`, 0 where hidden.
    pub(crate) key_mask: Option<Vec<u32>>,
    /// `[heads]`.
    pub(crate) alibi_slopes: Option<Vec<f32>>,
    pub(crate) soft_cap: Option<f32>,
    /// `[heads]`.
    pub(crate) sinks: Option<Vec<f64>>,
}

impl Case {
    /// Returns the dropout key of a sequence.
    pub(crate) fn key(sequence: usize) -> u64 {
        0x1234_5678_9abc_def0_u64.wrapping_mul(sequence as u64 + 1)
    }

    pub(crate) fn query_elements(&self) -> usize {
        self.sequences * self.query_len * self.heads * self.head_dim
    }

    pub(crate) fn key_elements(&self) -> usize {
        self.sequences * self.key_len * self.key_value_heads * self.head_dim
    }

    pub(crate) fn statistic_elements(&self) -> usize {
        self.sequences * self.query_len * self.heads
    }

    /// Returns the dropout's factor on a probability.
    pub(crate) fn factor(&self, sequence: usize, query: usize, head: usize, key: usize) -> f64 {
        if self.dropout == 0.0 {
            return 1.0;
        }
        let position = (self.query_start + query) as u32;
        let counter = [position, (self.first_head + head) as u32, key as u32 / 4, self.site];
        let word = Philox::new(Self::key(sequence)).block(counter)[key % 4];
        let probability = f64::from(self.dropout);
        if f64::from(word) >= probability * 2.0_f64.powi(32) { 1.0 / (1.0 - probability) } else { 0.0 }
    }

    /// Returns true if a query sees a key.
    fn sees(&self, sequence: usize, query: usize, key: usize) -> bool {
        let position = self.query_start + query;
        let bound = |bounds: &Option<Vec<u32>>| {
            bounds.as_ref().map(|bounds| bounds[sequence * self.query_len + query] as usize)
        };
        let is_behind = key <= position;
        let in_document = bound(&self.document_starts).is_none_or(|start| start <= key);
        (is_behind || self.direction == AttentionDirection::Bidirectional)
            && in_document
            && (is_behind || bound(&self.document_ends).is_none_or(|end| key < end))
            && self.window.is_none_or(|window| position.abs_diff(key) < window)
            && self.key_mask.as_ref().is_none_or(|mask| mask[sequence * self.key_len + key] != 0)
    }

    /// Returns the gradients of the sinks by their formula, `-sum of exp(sink - lse) rowsum(dO ∘ O)`, and the roots of
    /// the sums of the squares of its terms, to which rounding errors are proportional even where the terms cancel.
    pub(crate) fn sinks_backward(&self, out: &[f64], log_sum_exp: &[f64], dout: &[f64]) -> [Vec<f64>; 2] {
        let heads = self.sinks.as_ref().map_or(0, Vec::len);
        let (mut gradients, mut squares) = (vec![0.0; heads], vec![0.0; heads]);
        self.for_each_row(|row| {
            let Some(gradient) = gradients.get_mut(row.head) else { return };
            let probability = (self.sink(row.head) - log_sum_exp[row.statistic]).exp();
            for (out, dout) in out[row.vector..][..self.head_dim].iter().zip(&dout[row.vector..]) {
                let term = probability * out * dout;
                *gradient -= term;
                squares[row.head] += term * term;
            }
        });
        [gradients, squares.into_iter().map(f64::sqrt).collect()]
    }

    /// Calls `visit` with each query of each head and the keys it sees.
    fn for_each_row(&self, mut visit: impl FnMut(Row<'_>)) {
        for sequence in 0..self.sequences {
            for query in 0..self.query_len {
                for head in 0..self.heads {
                    let position = self.query_start + query;
                    let key_head = head / (self.heads / self.key_value_heads);
                    let keys: Vec<_> =
                        (0..self.key_len).filter(|key| self.sees(sequence, query, *key)).collect();
                    let place = |token, heads, head| (token * heads + head) * self.head_dim;
                    visit(Row {
                        head,
                        vector: place(sequence * self.query_len + query, self.heads, head),
                        statistic: (sequence * self.heads + head) * self.query_len + query,
                        places: &keys
                            .iter()
                            .map(|j| place(sequence * self.key_len + j, self.key_value_heads, key_head))
                            .collect::<Vec<_>>(),
                        factors: &keys
                            .iter()
                            .map(|j| self.factor(sequence, query, head, *j))
                            .collect::<Vec<_>>(),
                        distances: &keys.iter().map(|j| position.abs_diff(*j) as f64).collect::<Vec<_>>(),
                    });
                }
            }
        }
    }

    /// Returns the score of key number `key` of a row, and its derivative by the scaled product of query and key.
    fn score(&self, row: &Row<'_>, key: usize, q: &[f64], k: &[f64]) -> (f64, f64) {
        let product = dot(self.head_dim, &q[row.vector..], &k[row.places[key]..]);
        let score = f64::from(self.scale) * product;
        let (score, derivative) = self.soft_cap.map_or((score, 1.0), |cap| {
            let tangent = (score / f64::from(cap)).tanh();
            (f64::from(cap) * tangent, 1.0 - tangent * tangent)
        });
        let slope = self.alibi_slopes.as_ref().map_or(0.0, |slopes| f64::from(slopes[row.head]));
        (score - slope * row.distances[key], derivative)
    }

    /// Returns the probabilities of a row, the derivatives of its scores, and its log-sum-exp.
    fn softmax(&self, row: &Row<'_>, q: &[f64], k: &[f64]) -> (Vec<f64>, Vec<f64>, f64) {
        let (scores, derivatives): (Vec<_>, Vec<_>) =
            (0..row.places.len()).map(|key| self.score(row, key, q, k)).unzip();
        let sink = self.sink(row.head);
        let largest = scores.iter().copied().fold(sink, f64::max);
        let total: f64 = scores.iter().chain([&sink]).map(|score| (score - largest).exp()).sum();
        let log_sum_exp = if largest == f64::NEG_INFINITY { largest } else { largest + total.ln() };
        let probabilities = scores.iter().map(|score| (score - log_sum_exp).exp()).collect();
        (probabilities, derivatives, log_sum_exp)
    }

    /// Returns the sink of a head; without sinks one of no weight.
    fn sink(&self, head: usize) -> f64 {
        self.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| sinks[head])
    }

    /// Returns the outputs and log-sum-exps.
    pub(crate) fn forward(&self, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let mut out = vec![0.0; self.query_elements()];
        let mut log_sum_exp = vec![0.0; self.statistic_elements()];
        self.for_each_row(|row| {
            let (probabilities, _, statistic) = self.softmax(&row, q, k);
            log_sum_exp[row.statistic] = statistic;
            for ((p, place), factor) in probabilities.iter().zip(row.places).zip(row.factors) {
                add(self.head_dim, &mut out[row.vector..], p * factor, &v[*place..]);
            }
        });
        (out, log_sum_exp)
    }

    /// Returns the gradients of queries, keys, values and sinks (empty without sinks). `rounded_out` replaces the exact
    /// outputs in `rowsum(dO ∘ O)`: where few keys are visible, `dP - rowsum(dO ∘ O)` cancels, and the rounding of a
    /// 16-bit output is most of what remains.
    pub(crate) fn backward(
        &self,
        [q, k, v]: [&[f64]; 3],
        dout: &[f64],
        rounded_out: Option<&[f64]>,
    ) -> [Vec<f64>; 4] {
        let mut dq = vec![0.0; self.query_elements()];
        let (mut dk, mut dv) = (vec![0.0; self.key_elements()], vec![0.0; self.key_elements()]);
        let mut dsinks = vec![0.0; self.sinks.as_ref().map_or(0, Vec::len)];
        self.for_each_row(|row| {
            let (probabilities, derivatives, log_sum_exp) = self.softmax(&row, q, k);
            let dprobabilities: Vec<_> = row
                .places
                .iter()
                .zip(row.factors)
                .map(|(place, factor)| factor * dot(self.head_dim, &dout[row.vector..], &v[*place..]))
                .collect();
            let exact = || probabilities.iter().zip(&dprobabilities).map(|(p, dp)| p * dp).sum();
            let correction: f64 = rounded_out
                .map_or_else(exact, |out| dot(self.head_dim, &dout[row.vector..], &out[row.vector..]));
            for (i, place) in row.places.iter().enumerate() {
                let p = probabilities[i];
                let dscore = f64::from(self.scale) * derivatives[i] * p * (dprobabilities[i] - correction);
                add(self.head_dim, &mut dq[row.vector..], dscore, &k[*place..]);
                add(self.head_dim, &mut dk[*place..], dscore, &q[row.vector..]);
                add(self.head_dim, &mut dv[*place..], p * row.factors[i], &dout[row.vector..]);
            }
            if let Some(dsink) = dsinks.get_mut(row.head) {
                *dsink -= (self.sink(row.head) - log_sum_exp).exp() * correction;
            }
        });
        [dq, dk, dv, dsinks]
    }
}

/// One query of one head.
struct Row<'a> {
    head: usize,
    vector: usize,
    statistic: usize,
    places: &'a [usize],
    factors: &'a [f64],
    /// Distances in tokens to the keys.
    distances: &'a [f64],
}

fn dot(n: usize, a: &[f64], b: &[f64]) -> f64 {
    a[..n].iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(n: usize, sum: &mut [f64], factor: f64, x: &[f64]) {
    for (sum, x) in sum[..n].iter_mut().zip(x) {
        *sum += factor * x;
    }
}
