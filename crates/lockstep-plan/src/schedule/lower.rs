//! From passes to full lists: where sends, receives, reductions and the update of the weights stand.
//!
//! The lists are written by playing the passes through once, each taking one unit of time (a whole backward two) and
//! starting as soon as its rank is free and what it needs is there. Whenever a pass ends
//!
//! 1. it is written down on its rank,
//! 2. if another rank needs its result, the send is written directly after it, and at the same moment the receive on
//!    the other rank: after all passes that have ended there, before the one that is running,
//! 3. if it was the last to touch the weights of its stage, the reduction of their gradients follows.
//!
//! So there is one order of everything with which each list agrees and in which a send and its receive are neighbours.
//! That is why no list can deadlock, even on a transport where a send waits until its receive is posted: of all
//! that has not happened yet the first thing in that order can always happen. And memory for a message is lent at most
//! one pass before the message exists. Between two chunks of one rank nothing is sent.

use std::collections::{HashMap, HashSet};

use super::{Action, Message, Pass, PassKind};

/// Full lists from the passes of each rank. Whatever the passes are, all of them are in the result: lists that cannot
/// run are told by `validate`, not here.
pub(super) fn lower(rank_of: &[usize], passes: &[Vec<Pass>]) -> Vec<Vec<Action>> {
    let mut lowering = Lowering::new(rank_of, passes);
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
    // What is left waits for something that never comes; it is written as it stands.
    for (rank, &next) in next.iter().enumerate() {
        for &pass in &passes[rank][next..] {
            lowering.receive_for(rank, pass);
            lowering.end(rank, pass);
        }
    }
    lowering.lists.iter_mut().for_each(|list| list.push(Action::Step));
    lowering.lists
}

struct Lowering<'a> {
    rank_of: &'a [usize],
    /// Messages between stages that some pass makes, and that some pass needs.
    makers: HashSet<Message>,
    users: HashSet<Message>,
    /// Messages whose maker has ended.
    made: HashSet<Message>,
    /// Messages whose receive is written.
    received: HashSet<Message>,
    /// For each stage the passes that will still touch its weights' gradients.
    weights_left: HashMap<usize, usize>,
    lists: Vec<Vec<Action>>,
}

impl<'a> Lowering<'a> {
    fn new(rank_of: &'a [usize], passes: &[Vec<Pass>]) -> Self {
        let mut lowering = Self {
            rank_of,
            makers: HashSet::new(),
            users: HashSet::new(),
            made: HashSet::new(),
            received: HashSet::new(),
            weights_left: HashMap::new(),
            lists: vec![Vec::new(); passes.len()],
        };
        for (rank, pass) in
            passes.iter().enumerate().flat_map(|(rank, list)| list.iter().map(move |p| (rank, *p)))
        {
            if rank_of.get(pass.stage) != Some(&rank) {
                continue; // Told by `validate`; nobody waits for it.
            }
            lowering.makers.extend(Message::made_by(pass, rank_of.len()));
            lowering.users.extend(Message::needed_by(pass, rank_of.len()));
            if pass.kind.makes_weight_gradient() {
                *lowering.weights_left.entry(pass.stage).or_default() += 1;
            }
        }
        lowering
    }

    /// Whether what the pass needs from other stages is there, or will never be made by anyone.
    fn can_start(&self, pass: Pass) -> bool {
        let needed = Message::needed_by(pass, self.rank_of.len());
        needed.is_none_or(|message| self.made.contains(&message) || !self.makers.contains(&message))
    }

    fn crosses_ranks(&self, message: Message) -> bool {
        self.rank_of[message.from] != self.rank_of[message.to]
    }

    /// Writes the receive of what a pass needs, unless it is written.
    fn receive_for(&mut self, rank: usize, pass: Pass) {
        if let Some(message) = Message::needed_by(pass, self.rank_of.len())
            && self.rank_of.get(pass.stage) == Some(&rank)
            && self.makers.contains(&message)
            && self.crosses_ranks(message)
            && self.received.insert(message)
        {
            self.lists[rank].push(Action::Receive(message));
        }
    }

    /// Writes a pass, and what follows from its end.
    fn end(&mut self, rank: usize, pass: Pass) {
        self.lists[rank].push(Action::Compute(pass));
        if self.rank_of.get(pass.stage) != Some(&rank) {
            return;
        }
        if let Some(message) = Message::made_by(pass, self.rank_of.len())
            && self.made.insert(message)
            && self.users.contains(&message)
            && self.crosses_ranks(message)
        {
            self.lists[rank].push(Action::Send(message));
            if self.received.insert(message) {
                self.lists[self.rank_of[message.to]].push(Action::Receive(message));
            }
        }
        if pass.kind.makes_weight_gradient()
            && let Some(left) = self.weights_left.get_mut(&pass.stage)
        {
            *left -= 1;
            if *left == 0 {
                self.lists[rank].push(Action::ReduceGradients { stage: pass.stage });
            }
        }
    }
}
