//! Lowers passes to full action lists: inserts sends, receives, gradient reductions and the optimizer step.
//!
//! The passes are run once, each taking one unit of time (a whole backward two) and starting as soon as its rank is free and its input is
//! there. Whenever a pass ends
//!
//! 1. it is appended to its rank's list,
//! 2. if another rank needs its result, the send is appended directly after it, and at the same moment the receive is
//!    appended on the other rank: after all passes that have ended there, before the one that is running,
//! 3. if it is the last to accumulate into its stage's weight gradients, their reduction follows.
//!
//! So there is one global order that each list agrees with, and in which a send and its receive are neighbours. No list can deadlock,
//! even on a transport where a send waits until its receive is posted: of all remaining actions, the first one in that order can always
//! run. A receive buffer is posted at most one pass before its message exists. Between two chunks of one rank nothing is sent.

use super::action::{Action, Message, Pass, PassKind, place_of};

/// Returns the full lists for the passes of each rank. Every pass is in the result, even if it cannot run; `validate` reports such lists.
pub(super) fn lower(rank_of: &[usize], micro_batches: usize, passes: &[Vec<Pass>]) -> Vec<Vec<Action>> {
    let mut lowering = Lowering::new(rank_of, micro_batches, passes);
    let mut next = vec![0; passes.len()];
    let mut running: Vec<Option<(u64, Pass)>> = vec![None; passes.len()];
    loop {
        let now = running.iter().flatten().map(|&(end, _)| end).min().unwrap_or(0);
        for (rank, running) in running.iter_mut().enumerate() {
            if let Some((_, pass)) = running.take_if(|(end, _)| *end == now) {
                lowering.end(rank, pass);
            }
        }
        for (rank, running) in running.iter_mut().enumerate() {
            if running.is_none()
                && let Some(&pass) = passes[rank].get(next[rank])
                && lowering.can_start(pass)
            {
                let units = if pass.kind == PassKind::Backward { 2 } else { 1 };
                *running = Some((now + units, pass));
                next[rank] += 1;
            }
        }
        if running.iter().all(Option::is_none) {
            break;
        }
    }
    // The remaining passes wait for something that never comes; they are appended as they are.
    for (rank, &next) in next.iter().enumerate() {
        for &pass in &passes[rank][next..] {
            lowering.receive_for(rank, pass);
            lowering.end(rank, pass);
        }
    }
    lowering.lists.iter_mut().for_each(|list| list.push(Action::Step));
    lowering.lists
}

/// State of a message between stages.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    /// True if some pass makes it, and true if some pass needs it.
    has_maker: bool,
    has_user: bool,
    /// True once its maker has ended.
    is_made: bool,
    /// True once its receive has been appended.
    is_received: bool,
}

struct Lowering<'a> {
    rank_of: &'a [usize],
    micro_batches: usize,
    /// State of each message, by [`place_of`].
    messages: Vec<Known>,
    /// For each stage, the number of passes that will still accumulate into its weight gradients.
    weights_left: Vec<usize>,
    lists: Vec<Vec<Action>>,
}

impl<'a> Lowering<'a> {
    fn new(rank_of: &'a [usize], micro_batches: usize, passes: &[Vec<Pass>]) -> Self {
        let mut lowering = Self {
            rank_of,
            micro_batches,
            messages: vec![Known::default(); 2 * rank_of.len() * micro_batches],
            weights_left: vec![0; rank_of.len()],
            lists: passes.iter().map(|list| Vec::with_capacity(3 * list.len())).collect(),
        };
        for (rank, pass) in
            passes.iter().enumerate().flat_map(|(rank, list)| list.iter().map(move |p| (rank, *p)))
        {
            if !lowering.is_known(rank, pass) {
                continue; // Told by `validate`; nobody waits for it.
            }
            if let Some(message) = Message::made_by(pass, rank_of.len()) {
                lowering.message(message).has_maker = true;
            }
            if let Some(message) = Message::needed_by(pass, rank_of.len()) {
                lowering.message(message).has_user = true;
            }
            lowering.weights_left[pass.stage] += usize::from(pass.kind.makes_weight_gradient());
        }
        lowering
    }

    /// Returns true if the pass is of an existing micro-batch and of a stage of this rank.
    fn is_known(&self, rank: usize, pass: Pass) -> bool {
        self.rank_of.get(pass.stage) == Some(&rank) && pass.micro_batch < self.micro_batches
    }

    fn message(&mut self, message: Message) -> &mut Known {
        &mut self.messages[place_of(message, self.micro_batches)]
    }

    /// Returns true if the message that the pass needs has been made, or no pass makes it.
    fn can_start(&self, pass: Pass) -> bool {
        let stages = self.rank_of.len();
        // A user's indices may be arbitrary: no pass makes messages of stages and micro-batches that do not exist.
        let is_known = |message: &Message| {
            message.from.max(message.to) < stages && message.micro_batch < self.micro_batches
        };
        let needed = Message::needed_by(pass, stages).filter(is_known);
        let known = needed.map(|message| self.messages[place_of(message, self.micro_batches)]);
        known.is_none_or(|known| known.is_made || !known.has_maker)
    }

    fn crosses_ranks(&self, message: Message) -> bool {
        self.rank_of[message.from] != self.rank_of[message.to]
    }

    /// Appends the receive of the message that a pass needs, unless it is there already.
    fn receive_for(&mut self, rank: usize, pass: Pass) {
        if self.is_known(rank, pass)
            && let Some(message) = Message::needed_by(pass, self.rank_of.len())
            && self.message(message).has_maker
            && self.crosses_ranks(message)
            && !std::mem::replace(&mut self.message(message).is_received, true)
        {
            self.lists[rank].push(Action::Receive(message));
        }
    }

    /// Appends a pass, and the actions that follow from its end.
    fn end(&mut self, rank: usize, pass: Pass) {
        self.lists[rank].push(Action::Compute(pass));
        if !self.is_known(rank, pass) {
            return;
        }
        if let Some(message) = Message::made_by(pass, self.rank_of.len())
            && !std::mem::replace(&mut self.message(message).is_made, true)
            && self.message(message).has_user
            && self.crosses_ranks(message)
        {
            self.lists[rank].push(Action::Send(message));
            if !std::mem::replace(&mut self.message(message).is_received, true) {
                self.lists[self.rank_of[message.to]].push(Action::Receive(message));
            }
        }
        if pass.kind.makes_weight_gradient() {
            let left = &mut self.weights_left[pass.stage];
            *left -= 1;
            if *left == 0 {
                self.lists[rank].push(Action::ReduceGradients { stage: pass.stage });
            }
        }
    }
}
