//! The router of a mixture of experts: scores, the choice of experts, their weights, and the gradient of the logits.
//!
//! With scores `s` (a softmax, or sigmoids), chosen experts `K` and `N = Σ_{j∈K} s_j`, weights are `c s_i`, or
//! `c s_i / N`. The gradient flows through the weights of the chosen experts and through the auxiliary losses: those
//! of the probabilities `p = s / Σ s`, and that of the squared log-sum-exp (z-loss).

use std::ops::Range;

use lockstep_plan::DType;

use super::{
    CpuQueue,
    operands::{Operand, check_disjoint, expect},
    simd::{BLOCK, Block, Float, Isa, add_to, exp, inlined, map_block, sigmoid, sum, with_float},
    softmax::sum_of_exp,
    tasks::{is_parallel, rows_per_task},
};
use crate::{
    ExpertGroups, Pending, Router, RouterGradients, RouterKernels, RouterOutputs, RouterScores,
    RouterWeights, TokenPositions, View,
};

/// Largest number of experts of a router, one row of which is on the stack.
pub(super) const MAX_EXPERTS: usize = 1024;
/// Added to sums of scores that are divisors, all of which may have vanished.
const TINY: f32 = 1e-20;

/// A [`Router`] for a given number of experts.
struct Choice<'a> {
    experts: usize,
    groups: Option<ExpertGroups>,
    bias: Option<&'a [f32]>,
    weights: RouterWeights,
    scale: f32,
}

impl<'a> Choice<'a> {
    /// # Safety
    /// The caller must have checked that no output overlaps the bias.
    ///
    /// # Panics
    /// If there are fewer experts than a token must choose, or the groups do not fit.
    unsafe fn new(router: &Router<'a>, experts: usize) -> Self {
        let top_k = router.top_k;
        assert!(experts <= MAX_EXPERTS, "a router has at most {MAX_EXPERTS} experts, not {experts}");
        assert!((1..=experts).contains(&top_k), "a token cannot choose {top_k} of {experts} experts");
        if let Some(groups) = router.groups {
            let (count, kept) = (groups.count, groups.kept);
            assert!(
                count > 0
                    && experts.is_multiple_of(count)
                    && kept <= count
                    && top_k <= kept * (experts / count),
                "a token cannot choose {top_k} of {experts} experts in {kept} of {count} groups"
            );
        }
        if let Some(bias) = router.selection_bias {
            expect("selection bias of a router", bias, DType::F32, experts);
        }
        let &Router { groups, weights, scale, .. } = router;
        // SAFETY: kernels write only their outputs.
        let bias = router.selection_bias.map(|bias| unsafe { bias.slice() });
        Self { experts, groups, bias, weights, scale }
    }

    /// Returns the value that experts are chosen by: the score plus the selection bias.
    fn value(&self, scores: &[f32], expert: usize) -> f32 {
        scores[expert] + self.bias.map_or(0.0, |bias| bias[expert])
    }

    /// Returns the experts of a group.
    fn members(&self, groups: ExpertGroups, group: usize) -> Range<usize> {
        let size = self.experts / groups.count;
        group * size..(group + 1) * size
    }

    /// Returns the value that groups are chosen by: the sum of their best two experts.
    fn group_value(&self, groups: ExpertGroups, scores: &[f32], group: usize) -> f32 {
        let mut best = [0; 2];
        let best = &mut best[..(self.experts / groups.count).min(2)];
        let value = |expert: usize| self.value(scores, expert);
        choose_largest(self.members(groups, group), value, best);
        best.iter().map(|expert| value(*expert as usize)).sum()
    }

    /// Returns the experts that a token may not choose because their groups are not selected, and the margin of that
    /// selection.
    fn closed_groups(&self, scores: &[f32]) -> (Marks, f32) {
        let mut excluded = Marks::default();
        let Some(groups) = self.groups else { return (excluded, f32::INFINITY) };
        let (mut values, mut order) = ([0.0; MAX_EXPERTS], [0; MAX_EXPERTS]);
        let (values, order) = (&mut values[..groups.count], &mut order[..groups.count]);
        for (group, value) in values.iter_mut().enumerate() {
            *value = self.group_value(groups, scores, group);
        }
        choose_largest(0..groups.count, |group| values[group], order);
        let (kept, closed) = order.split_at(groups.kept);
        for group in closed {
            self.members(groups, *group as usize).for_each(|expert| excluded.set(expert));
        }
        let ends = kept.last().zip(closed.first());
        (excluded, ends.map_or(f32::INFINITY, |(last, next)| values[*last as usize] - values[*next as usize]))
    }

    /// Chooses experts by their scores, best first.
    fn choose(&self, scores: &[f32], chosen: &mut [u32]) {
        let (excluded, _) = self.closed_groups(scores);
        let open = (0..self.experts).filter(|expert| !excluded.has(*expert));
        choose_largest(open, |expert| self.value(scores, expert), chosen);
    }

    /// Returns the margin of a choice of `top_k` experts: see
    /// [`RouterKernels::router_margin`].
    fn margin(&self, scores: &[f32], top_k: usize) -> f32 {
        let (excluded, of_groups) = self.closed_groups(scores);
        let open = (0..self.experts).filter(|expert| !excluded.has(*expert));
        let mut best = [0; MAX_EXPERTS];
        let best = &mut best[..(top_k + 1).min(open.clone().count())];
        let value = |expert: usize| self.value(scores, expert);
        choose_largest(open, value, best);
        let ends = best.get(top_k - 1).zip(best.get(top_k));
        let of_experts =
            ends.map_or(f32::INFINITY, |(last, next)| value(*last as usize) - value(*next as usize));
        of_groups.min(of_experts)
    }

    /// Returns the divisor of the scores; `None` if they are not normalized.
    fn divisor(&self, scores: &[f32], chosen: &[u32]) -> Option<f32> {
        match self.weights {
            RouterWeights::Scores => None,
            RouterWeights::Normalized => {
                Some(chosen.iter().map(|expert| scores[*expert as usize]).sum::<f32>() + TINY)
            }
        }
    }
}

/// A bit set of experts or groups.
#[derive(Default, Clone, Copy)]
struct Marks([u64; MAX_EXPERTS / 64]);

impl Marks {
    fn has(&self, index: usize) -> bool {
        self.0[index / 64] >> (index % 64) & 1 == 1
    }

    fn set(&mut self, index: usize) {
        self.0[index / 64] |= 1 << (index % 64);
    }
}

/// Fills `chosen` with the candidates of the largest values, largest first; the earlier one wins a tie, and NaN
/// counts as less than any number. There must be at least as many candidates.
#[inline(always)]
fn choose_largest(candidates: impl Iterator<Item = usize>, value: impl Fn(usize) -> f32, chosen: &mut [u32]) {
    let known = |expert: u32| value(expert as usize);
    let mut len = 0;
    for candidate in candidates {
        let own = value(candidate);
        let is_less = |other: u32| own > known(other) || known(other).is_nan() && !own.is_nan();
        if len < chosen.len() {
            len += 1;
        } else if !is_less(chosen[len - 1]) {
            continue;
        }
        // The last one is dropped, or the list is not full yet; smaller ones move back by one.
        let mut place = len - 1;
        while place > 0 && is_less(chosen[place - 1]) {
            chosen[place] = chosen[place - 1];
            place -= 1;
        }
        chosen[place] = candidate as u32;
    }
    assert_eq!(len, chosen.len(), "there are fewer experts than a token must choose");
}

impl RouterKernels for CpuQueue {
    fn router_top_k(&self, router: &Router<'_>, logits: View<'_>, routed: RouterOutputs<'_>) {
        let (tokens, experts) = logits.shape().as_matrix();
        let &Router { top_k, scores: kind, .. } = router;
        check_routed(routed, tokens, experts, top_k);
        let outputs = [routed.scores, routed.log_sum_exp, routed.experts, routed.weights];
        check_disjoint(&outputs, &[logits]);
        router.selection_bias.into_iter().for_each(|bias| check_disjoint(&outputs, &[bias]));
        // SAFETY: as just checked.
        let choice = unsafe { Choice::new(router, experts) };
        with_float!(logits.dtype(), T => {
            let logits = Operand::<T>::new(logits);
            let [scores, log_sum_exp, weights] =
                [routed.scores, routed.log_sum_exp, routed.weights].map(Operand::<f32>::new);
            let chosen = Operand::<u32>::new(routed.experts);
            self.for_each_row(tokens, experts * (1 + top_k), inlined!(|token, isa| {
                let (row, slots) = (token * experts..(token + 1) * experts, token * top_k..(token + 1) * top_k);
                // SAFETY: the logits are only read; a token's outputs belong to one task.
                let (logits, scores, log_sum_exp, chosen, weights) = unsafe {
                    (
                        logits.read(row.clone()),
                        scores.write(row),
                        log_sum_exp.write(token..token + 1),
                        chosen.write(slots.clone()),
                        weights.write(slots),
                    )
                };
                log_sum_exp[0] = score(isa, kind, logits, scores);
                choice.choose(scores, chosen);
                let divisor = choice.divisor(scores, chosen);
                let factor = divisor.map_or(choice.scale, |divisor| choice.scale / divisor);
                for (weight, expert) in weights.iter_mut().zip(&*chosen) {
                    *weight = factor * scores[*expert as usize];
                }
            }));
        });
    }

    fn router_margin(&self, router: &Router<'_>, scores: View<'_>) -> Pending<'static, f32> {
        let (tokens, experts) = scores.shape().as_matrix();
        expect("router_margin: scores", scores, DType::F32, tokens * experts);
        // SAFETY: nothing is written.
        let (choice, scores) = unsafe { (Choice::new(router, experts), scores.slice::<f32>()) };
        let margins = scores.chunks_exact(experts).map(|scores| choice.margin(scores, router.top_k));
        Pending::ready(margins.fold(f32::INFINITY, f32::min))
    }

    fn router_top_k_backward(
        &self,
        router: &Router<'_>,
        logits: View<'_>,
        routed: RouterOutputs<'_>,
        gradients: RouterGradients<'_>,
        places: TokenPositions,
        dlogits: View<'_>,
    ) {
        let (tokens, experts) = logits.shape().as_matrix();
        let &Router { top_k, scores: kind, .. } = router;
        check_routed(routed, tokens, experts, top_k);
        expect("router_top_k_backward: dlogits", dlogits, logits.dtype(), tokens * experts);
        expect("router_top_k_backward: dweights", gradients.weights, DType::F32, tokens * top_k);
        let RouterOutputs { scores, log_sum_exp, experts: chosen, weights } = routed;
        check_disjoint(&[dlogits], &[logits, scores, log_sum_exp, chosen, weights, gradients.weights]);
        if let Some(probabilities) = gradients.probabilities {
            check_disjoint(&[dlogits], &[probabilities]);
            check_sequences("router_top_k_backward", probabilities, places, tokens, experts);
        }
        router.selection_bias.into_iter().for_each(|bias| check_disjoint(&[dlogits], &[bias]));
        // SAFETY: as just checked; kernels write only their outputs.
        let (choice, chosen, log_sum_exp) =
            unsafe { (Choice::new(router, experts), chosen.slice::<u32>(), log_sum_exp.slice::<f32>()) };
        if let Some((slot, expert)) =
            chosen.iter().enumerate().find(|(_, expert)| **expert as usize >= experts)
        {
            panic!("token {} has chosen expert {expert} of {experts}", slot / top_k);
        }
        with_float!(logits.dtype(), T => {
            let [logits, dlogits] = [logits, dlogits].map(Operand::<T>::new);
            let [scores, dweights] = [scores, gradients.weights].map(Operand::<f32>::new);
            let dprobabilities = gradients.probabilities.map(Operand::<f32>::new);
            self.for_each_range(tokens, rows_per_task(tokens, 4 * experts), inlined!(|tokens, isa| {
                let mut dscores = [0.0; MAX_EXPERTS];
                let dscores = &mut dscores[..experts];
                for token in tokens {
                    let (row, slots) = (token * experts..(token + 1) * experts, token * top_k..(token + 1) * top_k);
                    // SAFETY: all of these are only read.
                    let (logits, scores, dweights) = unsafe {
                        (logits.read(row.clone()), scores.read(row.clone()), dweights.read(slots.clone()))
                    };
                    dscores.fill(0.0);
                    if let Some(gradient) = &dprobabilities {
                        let (sequence, _) = places.of(token);
                        // SAFETY: as above.
                        let gradient = unsafe { gradient.read(sequence * experts..(sequence + 1) * experts) };
                        by_probabilities(kind, scores, gradient, dscores);
                    }
                    let chosen = &chosen[slots];
                    by_weights(&choice, scores, chosen, dweights, dscores);
                    let [mean] = sum([scores, &*dscores], inlined!(|[s, ds]| [s * ds]));
                    let statistic = log_sum_exp[token];
                    let squared = 2.0 * gradients.squared_log_sum_exp * statistic;
                    // Without a z-loss, an infinite log-sum-exp must not turn the gradient into NaN.
                    let squared = if gradients.squared_log_sum_exp == 0.0 { 0.0 } else { squared };
                    for (i, dscore) in dscores.iter_mut().enumerate() {
                        let s = scores[i];
                        *dscore = match kind {
                            RouterScores::Softmax => s * (*dscore - mean),
                            RouterScores::Sigmoid => *dscore * s * (1.0 - s),
                        };
                    }
                    if squared != 0.0 {
                        for (dscore, x) in dscores.iter_mut().zip(logits) {
                            *dscore += squared * exp(isa, x.load() - statistic);
                        }
                    }
                    // SAFETY: each row belongs to one task.
                    T::store_all(isa, dscores, unsafe { dlogits.write(row) });
                }
            }));
        });
    }

    fn router_load(
        &self,
        routed: RouterOutputs<'_>,
        places: TokenPositions,
        counts: View<'_>,
        probabilities: View<'_>,
    ) {
        let (tokens, experts) = routed.scores.shape().as_matrix();
        let (sequences, _) = counts.shape().as_matrix();
        let top_k = routed.experts.elements().checked_div(tokens).unwrap_or(0);
        expect("router_load: experts", routed.experts, DType::U32, tokens * top_k);
        expect("router_load: probabilities", probabilities, DType::F32, counts.elements());
        check_sequences("router_load", counts, places, tokens, experts);
        check_disjoint(&[counts, probabilities], &[routed.scores, routed.experts]);
        let [scores, counts, sums] = [routed.scores, counts, probabilities].map(Operand::<f32>::new);
        // SAFETY: as just checked; kernels write only their outputs.
        let chosen = unsafe { routed.experts.slice::<u32>() };
        let sequences_per_task = if is_parallel(tokens * experts) { 1 } else { sequences.max(1) };
        self.for_each_range(
            sequences,
            sequences_per_task,
            inlined!(|range, _| {
                for sequence in range {
                    let row = sequence * experts..(sequence + 1) * experts;
                    // SAFETY: a sequence's outputs belong to one task.
                    let (counts, sums) = unsafe { (counts.write(row.clone()), sums.write(row)) };
                    counts.fill(0.0);
                    sums.fill(0.0);
                    let here = |row: usize| {
                        row.clamp(places.first_row, places.first_row + tokens) - places.first_row
                    };
                    for token in here(sequence * places.seq_len)..here((sequence + 1) * places.seq_len) {
                        // SAFETY: the scores are only read.
                        let scores = unsafe { scores.read(token * experts..(token + 1) * experts) };
                        let [total] = sum([scores], inlined!(|[s]| [s]));
                        let share = 1.0 / (total + TINY);
                        for (sum, score) in sums.iter_mut().zip(scores) {
                            *sum += score * share;
                        }
                        for expert in &chosen[token * top_k..(token + 1) * top_k] {
                            counts[*expert as usize] += 1.0;
                        }
                    }
                }
            }),
        );
    }
}

/// Writes the scores of a row of logits, and returns their log-sum-exp.
#[inline(always)]
fn score<T: Float>(isa: Isa, kind: RouterScores, logits: &[T], scores: &mut [f32]) -> f32 {
    let (largest, total) = sum_of_exp(isa, logits);
    let share = (1.0 / total) as f32;
    let mut results = [Block::ZERO];
    for (logits, scores) in logits.chunks(BLOCK).zip(scores.chunks_mut(BLOCK)) {
        match kind {
            RouterScores::Softmax => map_block(
                [logits],
                &mut results,
                scores.len(),
                inlined!(|[x]| [exp(isa, x - largest) * share]),
            ),
            RouterScores::Sigmoid => {
                map_block([logits], &mut results, scores.len(), inlined!(|[x]| [sigmoid(isa, x)]))
            }
        }
        scores.copy_from_slice(&results[0].0[..scores.len()]);
    }
    (f64::from(largest) + libm::log(total)) as f32
}

/// Adds the gradient through the weights to the gradient of the scores.
#[inline(always)]
fn by_weights(choice: &Choice<'_>, scores: &[f32], chosen: &[u32], dweights: &[f32], dscores: &mut [f32]) {
    let scale = choice.scale;
    let slots = || chosen.iter().map(|expert| *expert as usize).zip(dweights);
    let (factor, common) = match choice.divisor(scores, chosen) {
        None => (scale, 0.0),
        Some(divisor) => {
            let mean = slots().map(|(expert, dweight)| scores[expert] * dweight).sum::<f32>() / divisor;
            (scale / divisor, mean)
        }
    };
    for (expert, dweight) in slots() {
        dscores[expert] += factor * (dweight - common);
    }
}

/// Adds the gradient through the probabilities to the gradient of the scores.
#[inline(always)]
fn by_probabilities(kind: RouterScores, scores: &[f32], gradient: &[f32], dscores: &mut [f32]) {
    match kind {
        RouterScores::Softmax => add_to(dscores, gradient),
        RouterScores::Sigmoid => {
            let [total, mean] = sum([scores, gradient], inlined!(|[s, g]| [s, s * g]));
            let total = total + TINY;
            for (dscore, gradient) in dscores.iter_mut().zip(gradient) {
                *dscore += (gradient - mean / total) / total;
            }
        }
    }
}

/// Panics unless `rows` has a row for each sequence of the tokens.
fn check_sequences(kernel: &str, rows: View<'_>, places: TokenPositions, tokens: usize, experts: usize) {
    let (sequences, columns) = rows.shape().as_matrix();
    assert!(
        rows.dtype() == DType::F32
            && columns == experts
            && places.first_row + tokens <= sequences * places.seq_len,
        "{kernel}: {rows:?} must be f32 with {experts} experts for each sequence of rows {} to {} of {} tokens each",
        places.first_row,
        places.first_row + tokens,
        places.seq_len
    );
}

fn check_routed(routed: RouterOutputs<'_>, tokens: usize, experts: usize, top_k: usize) {
    expect("scores of a router", routed.scores, DType::F32, tokens * experts);
    expect("log_sum_exp of a router", routed.log_sum_exp, DType::F32, tokens);
    expect("experts of a router", routed.experts, DType::U32, tokens * top_k);
    expect("weights of a router", routed.weights, DType::F32, tokens * top_k);
}
