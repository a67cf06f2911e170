//! Reference attention by its definition, in f64 and one score at a time, for tests of the block kernels.

use lockstep_plan::random::Philox;

/// The geometry of [`Attention`](crate::Attention), with owned dropout keys.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) sequences: usize,
    pub(super) query_len: usize,
    pub(super) key_len: usize,
    pub(super) query_start: usize,
    pub(super) heads: usize,
    pub(super) key_value_heads: usize,
    pub(super) head_dim: usize,
    pub(super) scale: f32,
    pub(super) window: Option<usize>,
    /// First key of each query's document, `[sequences · query_len]`.
    pub(super) document_starts: Option<Vec<u32>>,
    /// Index of the first head in the whole model.
    pub(super) first_head: usize,
    /// Dropout probability; 0 for no dropout.
    pub(super) dropout: f32,
    pub(super) site: u32,
}

impl Case {
    /// Returns the dropout key of a sequence.
    pub(super) fn key(sequence: usize) -> u64 {
        0x1234_5678_9abc_def0_u64.wrapping_mul(sequence as u64 + 1)
    }

    pub(super) fn query_elements(&self) -> usize {
        self.sequences * self.query_len * self.heads * self.head_dim
    }

    pub(super) fn key_elements(&self) -> usize {
        self.sequences * self.key_len * self.key_value_heads * self.head_dim
    }

    pub(super) fn statistic_elements(&self) -> usize {
        self.sequences * self.query_len * self.heads
    }

    /// Returns the dropout's factor on a probability.
    pub(super) fn factor(&self, sequence: usize, query: usize, head: usize, key: usize) -> f64 {
        if self.dropout == 0.0 {
            return 1.0;
        }
        let position = (self.query_start + query) as u32;
        let counter = [position, (self.first_head + head) as u32, key as u32 / 4, self.site];
        let word = Philox::new(Self::key(sequence)).block(counter)[key % 4];
        let probability = f64::from(self.dropout);
        if f64::from(word) >= probability * 2.0_f64.powi(32) { 1.0 / (1.0 - probability) } else { 0.0 }
    }

    /// Calls `visit` with each query of each head and the keys it sees.
    fn for_each_row(&self, mut visit: impl FnMut(Row<'_>)) {
        for sequence in 0..self.sequences {
            for query in 0..self.query_len {
                for head in 0..self.heads {
                    let position = self.query_start + query;
                    let key_head = head / (self.heads / self.key_value_heads);
                    let document_start = self
                        .document_starts
                        .as_ref()
                        .map_or(0, |starts| starts[sequence * self.query_len + query] as usize);
                    let keys: Vec<_> = (document_start..self.key_len)
                        .filter(|j| *j <= position && self.window.is_none_or(|window| j + window > position))
                        .collect();
                    let place = |token, heads, head| (token * heads + head) * self.head_dim;
                    visit(Row {
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
                    });
                }
            }
        }
    }

    /// Returns the probabilities of a row and its log-sum-exp.
    fn softmax(&self, row: &Row<'_>, q: &[f64], k: &[f64]) -> (Vec<f64>, f64) {
        let scores: Vec<_> = row
            .places
            .iter()
            .map(|place| f64::from(self.scale) * dot(self.head_dim, &q[row.vector..], &k[*place..]))
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
        let log_sum_exp = if scores.is_empty() { f64::NEG_INFINITY } else { largest + total.ln() };
        (scores.iter().map(|score| (score - log_sum_exp).exp()).collect(), log_sum_exp)
    }

    /// Returns the outputs and log-sum-exps.
    pub(super) fn forward(&self, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let mut out = vec![0.0; self.query_elements()];
        let mut log_sum_exp = vec![0.0; self.statistic_elements()];
        self.for_each_row(|row| {
            let (probabilities, statistic) = self.softmax(&row, q, k);
            log_sum_exp[row.statistic] = statistic;
            for ((p, place), factor) in probabilities.iter().zip(row.places).zip(row.factors) {
                add(self.head_dim, &mut out[row.vector..], p * factor, &v[*place..]);
            }
        });
        (out, log_sum_exp)
    }

    /// Returns the gradients of queries, keys and values.
    pub(super) fn backward(&self, q: &[f64], k: &[f64], v: &[f64], dout: &[f64]) -> [Vec<f64>; 3] {
        let mut dq = vec![0.0; self.query_elements()];
        let (mut dk, mut dv) = (vec![0.0; self.key_elements()], vec![0.0; self.key_elements()]);
        self.for_each_row(|row| {
            let (probabilities, _) = self.softmax(&row, q, k);
            let dprobabilities: Vec<_> = row
                .places
                .iter()
                .zip(row.factors)
                .map(|(place, factor)| factor * dot(self.head_dim, &dout[row.vector..], &v[*place..]))
                .collect();
            let correction: f64 = probabilities.iter().zip(&dprobabilities).map(|(p, dp)| p * dp).sum();
            for (i, place) in row.places.iter().enumerate() {
                let p = probabilities[i];
                let dscore = f64::from(self.scale) * p * (dprobabilities[i] - correction);
                add(self.head_dim, &mut dq[row.vector..], dscore, &k[*place..]);
                add(self.head_dim, &mut dk[*place..], dscore, &q[row.vector..]);
                add(self.head_dim, &mut dv[*place..], p * row.factors[i], &dout[row.vector..]);
            }
        });
        [dq, dk, dv]
    }
}

/// One query of one head.
struct Row<'a> {
    vector: usize,
    statistic: usize,
    places: &'a [usize],
    factors: &'a [f64],
}

fn dot(n: usize, a: &[f64], b: &[f64]) -> f64 {
    a[..n].iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(n: usize, sum: &mut [f64], factor: f64, x: &[f64]) {
    for (sum, x) in sum[..n].iter_mut().zip(x) {
        *sum += factor * x;
    }
}
