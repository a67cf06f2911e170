//! Simulates a schedule: the start and end of each action, and the memory of each rank, from the costs of the passes.
//!
//! The simulator follows the action lists as the engine does. A pass occupies its rank for its duration. A message is in flight from the
//! moment when it is sent and its receive is posted, and both ranks continue. Gradient reductions take no time here. Before the optimizer
//! step every rank waits for all others, because of the global gradient norm.

use super::{Action, Message, Pass, PassKind, Schedule};

/// Durations and memory of a stage's passes, for one micro-batch.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StageCost {
    /// Duration of the forward.
    pub forward_ms: f64,
    /// Duration of the input-gradient half; a whole backward takes both durations.
    pub backward_input_ms: f64,
    /// Duration of the weight-gradient half.
    pub backward_weight_ms: f64,
    /// Memory from the start of the forward to the end of the input-gradient half.
    pub until_input_bytes: u64,
    /// Memory from the start of the forward to the end of the weight-gradient half.
    pub until_weight_bytes: u64,
    /// Memory from the start of the input-gradient half to the end of the weight-gradient half, if the backward is split.
    pub deferred_bytes: u64,
}

impl StageCost {
    /// Returns the duration of a pass.
    pub fn duration_ms(&self, kind: PassKind) -> f64 {
        match kind {
            PassKind::Forward => self.forward_ms,
            PassKind::Backward => self.backward_input_ms + self.backward_weight_ms,
            PassKind::BackwardInput => self.backward_input_ms,
            PassKind::BackwardWeight => self.backward_weight_ms,
        }
    }
}

/// Costs of a step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Costs {
    /// Costs of each stage.
    pub stages: Vec<StageCost>,
    /// Latency of a message between two ranks.
    pub latency_ms: f64,
    /// Transfer time of a message, after its latency.
    pub transfer_ms: f64,
    /// Duration of the optimizer step, including the all-reduce of the gradient norm.
    pub optimizer_ms: f64,
}

impl Costs {
    /// Returns equal costs for each of `stages` stages, with free messages and a free optimizer step.
    pub fn uniform(stages: usize, stage: StageCost) -> Self {
        Self { stages: vec![stage; stages], ..Self::default() }
    }
}

/// Error: the number of stage costs differs from the schedule's stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there are costs of {given} stages for a schedule of {stages}")]
pub struct CostsError {
    /// Number of stage costs given.
    pub given: usize,
    /// Number of stages of the schedule.
    pub stages: usize,
}

/// An action with its start and end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// Action that was run.
    pub action: Action,
    /// Start in milliseconds from the start of the step.
    pub start_ms: f64,
    /// End in milliseconds from the start of the step.
    pub end_ms: f64,
}

/// Timeline and peak memory of one step.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    /// For each rank, its actions in the order of its list.
    pub spans: Vec<Vec<Span>>,
    /// Duration of the step.
    pub step_ms: f64,
    /// Fraction of all ranks' time that they wait, from 0 to 1.
    pub bubble: f64,
    /// For each rank, the maximum number of pairs of micro-batch and chunk in flight.
    pub peak_activations: Vec<usize>,
    /// For each rank, the maximum number of bytes that these take.
    pub peak_bytes: Vec<u64>,
}

impl Schedule {
    /// Runs the action lists with these costs.
    ///
    /// # Errors
    /// If `costs` has another number of stages than the schedule.
    pub fn simulate(&self, costs: &Costs) -> Result<Simulation, CostsError> {
        let mut spans: Vec<Vec<Span>> =
            self.actions.iter().map(|list| Vec::with_capacity(list.len())).collect();
        let ends_ms = Run::new(self, costs)?.follow(|rank, span| spans[rank].push(span));
        // Every list ends with the optimizer step, which starts when the last rank has reached it.
        let start_ms = ends_ms.into_iter().fold(0.0, f64::max);
        let step_ms = start_ms + costs.optimizer_ms;
        for list in &mut spans {
            list.push(Span { action: Action::Step, start_ms, end_ms: step_ms });
        }
        let worked: f64 = spans
            .iter()
            .flatten()
            .filter(|span| matches!(span.action, Action::Compute(_) | Action::Step))
            .map(|span| span.end_ms - span.start_ms)
            .sum();
        let available = step_ms * self.ranks() as f64;
        let bubble = if available > 0.0 { 1.0 - worked / available } else { 0.0 };
        let peaks = (0..self.ranks()).map(|rank| peak(self, rank, &costs.stages));
        let (peak_activations, peak_bytes) = peaks.unzip();
        Ok(Simulation { spans, step_ms, bubble, peak_activations, peak_bytes })
    }

    /// Returns when each rank has done everything but the optimizer step, in milliseconds. The search needs no more than this from its
    /// thousands of simulations.
    ///
    /// # Errors
    /// If `costs` has another number of stages than the schedule.
    pub fn ends_ms(&self, costs: &Costs) -> Result<Vec<f64>, CostsError> {
        Ok(Run::new(self, costs)?.follow(|_, _| {}))
    }
}

/// State of a simulation.
struct Run<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    /// The next action of each rank, and the time at which the rank is free for it.
    next: Vec<usize>,
    free_ms: Vec<f64>,
    /// Times at which each message is sent and its receive is posted, by [`Schedule::place_of`]; [`UNKNOWN`] until then.
    sent_ms: Vec<f64>,
    posted_ms: Vec<f64>,
}

/// Placeholder for a time that is not known yet.
const UNKNOWN: f64 = f64::INFINITY;

impl<'a> Run<'a> {
    fn new(schedule: &'a Schedule, costs: &'a Costs) -> Result<Self, CostsError> {
        let (given, stages) = (costs.stages.len(), schedule.stages());
        if given != stages {
            return Err(CostsError { given, stages });
        }
        let messages = schedule.places();
        Ok(Self {
            schedule,
            costs,
            next: vec![0; schedule.ranks()],
            free_ms: vec![0.0; schedule.ranks()],
            sent_ms: vec![UNKNOWN; messages],
            posted_ms: vec![UNKNOWN; messages],
        })
    }

    /// Calls `done` with the span of every action but the optimizer step, in order on each rank; returns when each rank has finished.
    fn follow(mut self, mut done: impl FnMut(usize, Span)) -> Vec<f64> {
        // The order of ranks changes no time. A schedule cannot deadlock, so each round makes progress.
        let mut moved = true;
        while moved {
            moved = false;
            for rank in 0..self.schedule.ranks() {
                while let Some(span) = self.advance(rank) {
                    done(rank, span);
                    moved = true;
                }
            }
        }
        self.free_ms
    }

    /// Runs the next action of a rank; `None` if it needs a message whose time is not known yet.
    fn advance(&mut self, rank: usize) -> Option<Span> {
        let action = self.schedule.actions(rank)[self.next[rank]];
        let start = self.free_ms[rank];
        let (start_ms, end_ms) = match action {
            Action::Compute(pass) => {
                let start = start.max(self.arrival(pass)?);
                (start, start + self.costs.stages[pass.stage].duration_ms(pass.kind))
            }
            Action::Send(message) => {
                self.sent_ms[self.schedule.place_of(message)] = start;
                (start, start)
            }
            Action::Receive(message) => {
                self.posted_ms[self.schedule.place_of(message)] = start;
                (start, start)
            }
            Action::ReduceGradients { .. } => (start, start),
            Action::Step => return None,
        };
        self.free_ms[rank] = end_ms;
        self.next[rank] += 1;
        Some(Span { action, start_ms, end_ms })
    }

    /// Returns when the message that a pass needs arrives; `None` if that is not known yet.
    fn arrival(&self, pass: Pass) -> Option<f64> {
        let message = Message::needed_by(pass, self.schedule.stages());
        let Some(message) = message.filter(|&message| self.schedule.crosses_ranks(message)) else {
            return Some(0.0);
        };
        let place = self.schedule.place_of(message);
        let start = self.sent_ms[place].max(self.posted_ms[place]);
        (start < UNKNOWN).then_some(start + self.costs.latency_ms + self.costs.transfer_ms)
    }
}

/// Returns the maximum number of pairs of micro-batch and chunk, and of bytes, in flight on a rank.
fn peak(schedule: &Schedule, rank: usize, stages: &[StageCost]) -> (usize, u64) {
    let (mut pairs, mut bytes) = (0, 0);
    let (mut most_pairs, mut most_bytes) = (0, 0);
    for pass in schedule.passes(rank) {
        let stage = &stages[pass.stage];
        match pass.kind {
            PassKind::Forward => {
                pairs += 1;
                bytes += stage.until_input_bytes + stage.until_weight_bytes;
            }
            PassKind::BackwardInput => bytes += stage.deferred_bytes,
            PassKind::Backward | PassKind::BackwardWeight => {}
        }
        (most_pairs, most_bytes) = (most_pairs.max(pairs), most_bytes.max(bytes));
        match pass.kind {
            PassKind::Forward => {}
            PassKind::BackwardInput => bytes -= stage.until_input_bytes,
            PassKind::Backward => {
                pairs -= 1;
                bytes -= stage.until_input_bytes + stage.until_weight_bytes;
            }
            PassKind::BackwardWeight => {
                pairs -= 1;
                bytes -= stage.until_weight_bytes + stage.deferred_bytes;
            }
        }
    }
    (most_pairs, most_bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::{super::tests::published, *};
    use crate::schedule::Kind;

    const UNIT: StageCost = StageCost {
        forward_ms: 1.0,
        backward_input_ms: 1.0,
        backward_weight_ms: 1.0,
        until_input_bytes: 5,
        until_weight_bytes: 2,
        deferred_bytes: 1,
    };

    /// Simulates `kind` with unit costs per stage.
    fn unit(kind: Kind, ranks: usize, micro_batches: usize, chunks: usize) -> Simulation {
        let schedule = Schedule::new(kind, ranks, micro_batches, chunks).unwrap();
        schedule.simulate(&Costs::uniform(schedule.stages(), UNIT)).unwrap()
    }

    /// Returns the time for which the average rank waits.
    fn waiting(simulation: &Simulation) -> f64 {
        simulation.bubble * simulation.step_ms
    }

    fn near(value: f64, expected: f64, what: impl std::fmt::Debug) {
        assert!((value - expected).abs() < 1e-9, "{value}, not {expected}: {what:?}");
    }

    #[test]
    fn gpipe_and_1f1b_wait_for_ranks_minus_one_micro_batches() {
        for (ranks, micro_batches) in [(1, 3), (2, 1), (4, 2), (4, 8), (4, 16), (8, 32)] {
            let expected = (ranks - 1) as f64 / (micro_batches + ranks - 1) as f64;
            for kind in [Kind::GPipe, Kind::OneForwardOneBackward] {
                near(unit(kind, ranks, micro_batches, 1).bubble, expected, (kind, ranks, micro_batches));
            }
        }
    }

    #[test]
    fn chunks_divide_the_bubble() {
        // Relative to the ideal time, as Narayanan et al. 2021 count it.
        for (ranks, micro_batches, chunks) in [(2, 4, 2), (4, 8, 2), (4, 16, 4), (8, 16, 3)] {
            for kind in [Kind::Interleaved, Kind::LoopedBreadthFirst] {
                let bubble = unit(kind, ranks, micro_batches, chunks).bubble;
                let expected = (ranks - 1) as f64 / (chunks * micro_batches) as f64;
                near(bubble / (1.0 - bubble), expected, (kind, ranks, micro_batches, chunks));
            }
        }
    }

    #[test]
    fn zb_h1_waits_for_forward_plus_input_minus_weight() {
        for (ranks, micro_batches) in [(1, 2), (2, 4), (4, 8), (4, 16), (8, 16)] {
            for cost in [UNIT, StageCost { forward_ms: 1.2, backward_input_ms: 1.1, ..UNIT }] {
                let schedule = Schedule::new(Kind::ZeroBubbleH1, ranks, micro_batches, 1).unwrap();
                let simulation = schedule.simulate(&Costs::uniform(ranks, cost)).unwrap();
                let each = cost.forward_ms + cost.backward_input_ms - cost.backward_weight_ms;
                near(waiting(&simulation), (ranks - 1) as f64 * each, (ranks, micro_batches, each));
            }
        }
    }

    #[test]
    fn v_shaped_schedules_wait_for_the_first_forward_only() {
        for (ranks, micro_batches) in [(1, 2), (2, 4), (3, 6), (4, 8), (4, 16), (8, 16), (8, 40)] {
            for kind in [Kind::ZeroBubbleV, Kind::DualPipeV] {
                // A unit here is a pass through half of a rank's layers. The last rank starts `ranks - 1` units late, and the first one
                // ends as much early.
                let simulation = unit(kind, ranks, micro_batches, 2);
                near(waiting(&simulation), (ranks - 1) as f64, (kind, ranks, micro_batches));
            }
        }
        let long = unit(Kind::ZeroBubbleV, 4, 64, 2);
        assert!(long.bubble < 0.01, "{}", long.bubble);
    }

    #[test]
    fn zero_bubble_schedules_beat_1f1b() {
        for micro_batches in [8, 16] {
            // The same model: half a stage for each of two chunks.
            let step =
                |kind: Kind, chunks: usize| unit(kind, 4, micro_batches, chunks).step_ms / chunks as f64;
            let [plain, h1] = [Kind::OneForwardOneBackward, Kind::ZeroBubbleH1].map(|kind| step(kind, 1));
            let [v, dual] = [Kind::ZeroBubbleV, Kind::DualPipeV].map(|kind| step(kind, 2));
            assert!(v < h1 && dual < h1 && h1 < plain, "{v} {dual} {h1} {plain}");
        }
    }

    #[test]
    fn activations_peak_where_the_papers_say() {
        for (ranks, micro_batches) in [(2, 4), (4, 8), (4, 16), (8, 16)] {
            let peaks = |kind: Kind, chunks| unit(kind, ranks, micro_batches, chunks).peak_activations;
            let constant = |peak: usize| vec![peak; ranks];
            let falling =
                |step: usize, first: usize| (0..ranks).map(|rank| first - step * rank).collect::<Vec<_>>();
            assert_eq!(peaks(Kind::GPipe, 1), constant(micro_batches));
            assert_eq!(peaks(Kind::LoopedBreadthFirst, 3), constant(3 * micro_batches));
            assert_eq!(peaks(Kind::OneForwardOneBackward, 1), falling(1, ranks));
            assert_eq!(peaks(Kind::Interleaved, 2), falling(2, 3 * ranks - 1));
            assert_eq!(peaks(Kind::ZeroBubbleH1, 1), constant(ranks));
            assert_eq!(peaks(Kind::ZeroBubbleV, 2), constant(2 * ranks));
            assert_eq!(peaks(Kind::DualPipeV, 2), constant(2 * ranks + 1));
        }
    }

    #[test]
    fn bytes_are_kept_until_what_needs_them_is_done() {
        let passes = super::super::passes_from_csv("F0,F1,I0,I1,W0,W1", 1).unwrap();
        let schedule = Schedule::from_passes(2, &passes).unwrap();
        let peak = |cost| schedule.simulate(&Costs::uniform(1, cost)).unwrap().peak_bytes[0];
        // Two forwards, and the first backward's deferred part.
        assert_eq!(peak(UNIT), 2 * (5 + 2) + 1);
        // A large deferred part peaks after the second input-gradient half.
        assert_eq!(peak(StageCost { deferred_bytes: 50, ..UNIT }), 5 + 2 * (2 + 50));
    }

    #[test]
    fn messages_and_the_update_take_their_time() {
        let schedule = Schedule::new(Kind::OneForwardOneBackward, 2, 1, 1).unwrap();
        let costs = Costs {
            stages: vec![UNIT, StageCost { forward_ms: 2.0, ..UNIT }],
            latency_ms: 0.25,
            transfer_ms: 0.5,
            optimizer_ms: 3.0,
        };
        let simulation = schedule.simulate(&costs).unwrap();
        let at = |rank: usize, text: &str| {
            let spans = &simulation.spans[rank];
            let span = spans.iter().find(|span| span.action.to_string() == text).unwrap();
            (span.start_ms, span.end_ms)
        };
        assert_eq!(at(1, "1F0"), (1.75, 3.75));
        assert_eq!(at(1, "1B0"), (3.75, 5.75));
        assert_eq!(at(0, "0B0"), (6.5, 8.5));
        // The rank that is done first waits for the other before the optimizer step.
        assert_eq!(at(1, "STEP"), (8.5, 11.5));
        assert_eq!(simulation.step_ms, 11.5);
        near(simulation.bubble, 1.0 - (3.0 + 4.0 + 6.0) / 23.0, &simulation);
        let none = schedule.simulate(&Costs::default()).unwrap_err();
        assert_eq!(none.to_string(), "there are costs of 0 stages for a schedule of 2");
    }

    proptest! {
        #[test]
        fn every_action_happens_once_and_in_order(
            (kind, ranks, micro_batches, chunks) in published(),
            times in prop::array::uniform3(1_u32..50),
            message in 0_u32..30,
            slower in any::<prop::sample::Index>(),
        ) {
            let schedule = Schedule::new(kind, ranks, micro_batches, chunks).unwrap();
            let [forward_ms, backward_input_ms, backward_weight_ms] = times.map(f64::from);
            let stage = StageCost { forward_ms, backward_input_ms, backward_weight_ms, ..UNIT };
            let mut costs = Costs::uniform(schedule.stages(), stage);
            costs.stages[slower.index(schedule.stages())].forward_ms *= 3.0;
            costs.latency_ms = f64::from(message);
            costs.optimizer_ms = 7.0;
            let simulation = schedule.simulate(&costs).unwrap();
            let mut ends = HashMap::new();
            for (rank, spans) in simulation.spans.iter().enumerate() {
                let actions: Vec<_> = spans.iter().map(|span| span.action).collect();
                prop_assert_eq!(actions, schedule.actions(rank));
                prop_assert!(spans.windows(2).all(|pair| pair[0].end_ms <= pair[1].start_ms));
                prop_assert_eq!(spans.last().unwrap().end_ms, simulation.step_ms);
                ends.extend(spans.iter().map(|span| (span.action, span.end_ms)));
            }
            // A pass starts at least `latency_ms` after the send of its message.
            for span in simulation.spans.iter().flatten() {
                if let Action::Compute(pass) = span.action
                    && let Some(message) = Message::needed_by(pass, schedule.stages())
                    && let Some(sent) = ends.get(&Action::Send(message))
                {
                    prop_assert!(span.start_ms >= sent + costs.latency_ms);
                }
            }
            prop_assert!((0.0..1.0).contains(&simulation.bubble), "{}", simulation.bubble);
            let most = simulation.peak_activations.iter().copied().max().unwrap();
            prop_assert!(most <= micro_batches * chunks);
        }
    }
}
