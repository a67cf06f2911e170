//! Validates action lists, and reports all problems at once.
//!
//! Each rank's list is checked by itself: every action occurs once, and after what it needs on the same rank. Then all lists are run
//! together (`deadlock`).

use std::collections::{HashMap, HashSet};

use super::{Action, Message, Pass, PassKind, Schedule, ScheduleProblem, deadlock::deadlocks};

/// Returns the rank of each stage, which is the one with its first forward, or else with any of its passes; and a problem for each stage
/// without passes.
pub(super) fn owners(passes: &[Vec<Pass>]) -> (Vec<usize>, Vec<ScheduleProblem>) {
    let mut owners: HashMap<usize, (bool, usize)> = HashMap::new();
    for (rank, list) in passes.iter().enumerate() {
        for pass in list {
            let forward = pass.kind == PassKind::Forward;
            let (by_forward, owner) = owners.entry(pass.stage).or_insert((forward, rank));
            if forward && !*by_forward {
                (*by_forward, *owner) = (true, rank);
            }
        }
    }
    // Stage indices beyond the number of distinct stages are unknown; however large, they take no memory.
    let stages = owners.len();
    let rank_of = (0..stages).map(|stage| owners.get(&stage).map_or(usize::MAX, |&(_, rank)| rank));
    let missing = (0..stages).filter(|stage| !owners.contains_key(stage));
    let problems = missing.map(|stage| ScheduleProblem::MissingStage { stage, stages }).collect();
    (rank_of.collect(), problems)
}

/// Returns all problems of a schedule.
pub(super) fn problems(schedule: &Schedule) -> Vec<ScheduleProblem> {
    if schedule.ranks() == 0 {
        return vec![ScheduleProblem::NoRanks];
    }
    let mut problems = Vec::new();
    let exchanged = exchanged(schedule);
    for rank in 0..schedule.ranks() {
        let places = HashMap::new();
        RankCheck { schedule, exchanged: &exchanged, rank, places, problems: &mut problems }.run();
    }
    problems.extend(deadlocks(schedule));
    problems
}

/// Returns the messages between ranks that some pass makes and some pass needs, so that a missing pass is reported once and not again for
/// its messages.
fn exchanged(schedule: &Schedule) -> HashSet<Message> {
    let (stages, mut made, mut needed) = (schedule.stages(), HashSet::new(), HashSet::new());
    for rank in 0..schedule.ranks() {
        for pass in schedule.passes(rank).filter(|pass| schedule.rank_of.get(pass.stage) == Some(&rank)) {
            made.extend(Message::made_by(pass, stages));
            needed.extend(Message::needed_by(pass, stages));
        }
    }
    made.retain(|message| needed.contains(message) && schedule.crosses_ranks(*message));
    made
}

/// Check of one rank's list.
struct RankCheck<'a> {
    schedule: &'a Schedule,
    exchanged: &'a HashSet<Message>,
    rank: usize,
    /// First position and number of occurrences of each known action.
    places: HashMap<Action, (usize, usize)>,
    problems: &'a mut Vec<ScheduleProblem>,
}

impl RankCheck<'_> {
    fn run(mut self) {
        let (rank, list) = (self.rank, self.schedule.actions(self.rank));
        if self.schedule.stages_of(rank).next().is_none() {
            self.problems.push(ScheduleProblem::IdleRank { rank });
        }
        for (place, &action) in list.iter().enumerate() {
            match self.stranger(action) {
                Some(problem) => self.problems.push(problem),
                None => self.places.entry(action).or_insert((place, 0)).1 += 1,
            }
        }
        for (place, &action) in list.iter().enumerate() {
            let Some(&(first, times)) = self.places.get(&action) else { continue };
            if place == first && times > 1 {
                self.problems.push(ScheduleProblem::Doubled { rank, action, times });
            }
            for needs in self.needs(action) {
                if self.places.get(&needs).is_some_and(|&(needed, _)| needed > place) {
                    self.problems.push(ScheduleProblem::TooEarly { rank, action, needs });
                }
            }
        }
        self.forgotten();
        self.order_of_weights();
    }

    /// Returns the problem of an action that does not belong on this rank, or whose stage or micro-batch does not exist.
    fn stranger(&self, action: Action) -> Option<ScheduleProblem> {
        let (rank, stages, micro_batches) = (self.rank, self.schedule.stages(), self.schedule.micro_batches);
        let (stage, micro_batch) = match action {
            Action::Compute(Pass { stage, micro_batch, .. }) => (stage, micro_batch),
            Action::Send(message) => (message.from, message.micro_batch),
            Action::Receive(message) => (message.to, message.micro_batch),
            Action::ReduceGradients { stage } => (stage, 0),
            Action::Step => return None,
        };
        if stage >= stages {
            return Some(ScheduleProblem::UnknownStage { rank, action, stages });
        }
        if micro_batch >= micro_batches {
            return Some(ScheduleProblem::UnknownMicroBatch { rank, action, micro_batches });
        }
        if let Action::Send(message) | Action::Receive(message) = action {
            let neighbours = message.from.abs_diff(message.to) == 1 && message.from.max(message.to) < stages;
            if !neighbours || !self.schedule.crosses_ranks(message) {
                return Some(ScheduleProblem::NoMessage { rank, action });
            }
        }
        let owner = self.schedule.rank_of[stage];
        (owner != rank).then_some(ScheduleProblem::WrongRank { rank, action, owner })
    }

    fn has(&self, action: Action) -> bool {
        self.places.contains_key(&action)
    }

    /// Returns the actions that have to come first on this rank.
    fn needs(&self, action: Action) -> Vec<Action> {
        let compute = |kind, stage, micro_batch| Action::Compute(Pass { kind, stage, micro_batch });
        match action {
            Action::Compute(pass) => {
                let Pass { kind, stage, micro_batch } = pass;
                let mut needs = match kind {
                    PassKind::Forward => vec![],
                    PassKind::Backward | PassKind::BackwardInput => {
                        vec![compute(PassKind::Forward, stage, micro_batch)]
                    }
                    PassKind::BackwardWeight => vec![compute(PassKind::BackwardInput, stage, micro_batch)],
                };
                if let Some(message) = Message::needed_by(pass, self.schedule.stages()) {
                    if self.schedule.crosses_ranks(message) {
                        needs.push(Action::Receive(message));
                    } else {
                        needs.extend(makers(message));
                    }
                }
                needs
            }
            Action::Send(message) => makers(message),
            Action::Receive(_) => vec![],
            Action::ReduceGradients { stage } => (0..self.schedule.micro_batches)
                .flat_map(|micro_batch| {
                    [PassKind::Backward, PassKind::BackwardWeight]
                        .map(|kind| compute(kind, stage, micro_batch))
                })
                .collect(),
            // No action may come after the optimizer step.
            Action::Step => self.places.keys().copied().collect(),
        }
    }

    fn forgotten(&mut self) {
        let (rank, schedule) = (self.rank, self.schedule);
        let exchanged = |message: &Message| self.exchanged.contains(message);
        let mut forgotten = Vec::new();
        for stage in schedule.stages_of(rank) {
            let mut weights = false;
            for micro_batch in 0..schedule.micro_batches {
                let compute = |kind| Action::Compute(Pass { kind, stage, micro_batch });
                let [forward, fused, input, weight] = PassKind::ALL.map(compute);
                weights |= self.has(fused) || self.has(weight);
                if !self.has(forward) {
                    forgotten.push(forward);
                }
                match (self.has(fused), self.has(input), self.has(weight)) {
                    (false, false, false) => forgotten.push(fused),
                    (false, false, true) => forgotten.push(input),
                    (false, true, false) => forgotten.push(weight),
                    (false, true, true) | (true, false, false) => {}
                    (true, has_input, _) => {
                        let half = if has_input { input } else { weight };
                        self.problems.push(ScheduleProblem::FusedAndSplit { rank, fused, half });
                    }
                }
                for kind in [PassKind::Forward, PassKind::BackwardInput] {
                    let pass = Pass { kind, stage, micro_batch };
                    let made = Message::made_by(pass, schedule.stages()).filter(exchanged);
                    let needed = Message::needed_by(pass, schedule.stages()).filter(exchanged);
                    forgotten.extend(made.map(Action::Send).filter(|&send| !self.has(send)));
                    forgotten.extend(needed.map(Action::Receive).filter(|&receive| !self.has(receive)));
                }
            }
            let reduce = Action::ReduceGradients { stage };
            if weights && !self.has(reduce) {
                forgotten.push(reduce);
            }
        }
        if !self.has(Action::Step) {
            forgotten.push(Action::Step);
        }
        self.problems.extend(forgotten.into_iter().map(|action| ScheduleProblem::Forgotten { rank, action }));
    }

    fn order_of_weights(&mut self) {
        let mut latest: HashMap<usize, Pass> = HashMap::new();
        for pass in self.schedule.passes(self.rank).filter(|pass| pass.kind.makes_weight_gradient()) {
            let before = latest.entry(pass.stage).or_insert(pass);
            if before.micro_batch > pass.micro_batch {
                self.problems.push(ScheduleProblem::WeightsOutOfOrder {
                    rank: self.rank,
                    action: Action::Compute(pass),
                    before: Action::Compute(*before),
                });
            } else {
                *before = pass;
            }
        }
    }
}

/// Returns the passes that can make a message.
fn makers(message: Message) -> Vec<Action> {
    let Message { from: stage, micro_batch, .. } = message;
    let kinds: &[PassKind] = if message.is_activation() {
        &[PassKind::Forward]
    } else {
        &[PassKind::Backward, PassKind::BackwardInput]
    };
    kinds.iter().map(|&kind| Action::Compute(Pass { kind, stage, micro_batch })).collect()
}
