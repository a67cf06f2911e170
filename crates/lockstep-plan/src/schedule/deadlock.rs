//! Whether the lists of all ranks can run to their end together.
//!
//! They are played through without durations. A send waits until its receive is posted and a pass until its message is
//! sent: the strictest transport. Whoever still stands at the end is followed to the rank it waits for, and from
//! there on, until a circle closes. A rank that waits for something that is nowhere is not part of any circle; what is
//! missing is told elsewhere.

use std::collections::HashSet;

use super::{Action, Message, Schedule, ScheduleProblem, Wait};

/// The circles of ranks that wait for each other; none if all lists run to their end.
pub(super) fn deadlocks(schedule: &Schedule) -> Vec<ScheduleProblem> {
    let everything: HashSet<Action> = schedule.actions.iter().flatten().copied().collect();
    let mut play = Play { schedule, everything, next: vec![0; schedule.ranks()], happened: HashSet::new() };
    let mut moved = true;
    while moved {
        moved = false;
        for rank in 0..schedule.ranks() {
            while let Some(action) = play.next_of(rank)
                && play.wait_of(rank, action).is_none()
            {
                play.happened.insert(action);
                play.next[rank] += 1;
                moved = true;
            }
        }
    }
    let waits: Vec<Option<Wait>> = (0..schedule.ranks())
        .map(|rank| play.next_of(rank).and_then(|action| play.wait_of(rank, action)))
        .collect();
    circles(&waits)
}

struct Play<'a> {
    schedule: &'a Schedule,
    everything: HashSet<Action>,
    next: Vec<usize>,
    happened: HashSet<Action>,
}

impl Play<'_> {
    fn next_of(&self, rank: usize) -> Option<Action> {
        self.schedule.actions[rank].get(self.next[rank]).copied()
    }

    /// What a rank has to wait for before an action, if anything.
    fn wait_of(&self, rank: usize, action: Action) -> Option<Wait> {
        let wait = |on, needs| Wait { rank, action, needs, on };
        match action {
            Action::Compute(pass) => {
                let message = Message::needed_by(pass, self.schedule.stages())?;
                let send = Action::Send(message);
                let pending = self.everything.contains(&send) && !self.happened.contains(&send);
                let on = *self.schedule.rank_of.get(message.from)?;
                pending.then(|| wait(on, send))
            }
            Action::Send(message) => {
                let receive = Action::Receive(message);
                let pending = self.everything.contains(&receive) && !self.happened.contains(&receive);
                let on = *self.schedule.rank_of.get(message.to)?;
                pending.then(|| wait(on, receive))
            }
            Action::Step => (0..self.schedule.ranks())
                .find(|&other| {
                    let list = &self.schedule.actions[other];
                    list[self.next[other]..].iter().position(|action| *action == Action::Step) > Some(0)
                })
                .map(|other| wait(other, Action::Step)),
            Action::Receive(_) | Action::ReduceGradients { .. } => None,
        }
    }
}

/// Each circle among ranks that wait for at most one other.
fn circles(waits: &[Option<Wait>]) -> Vec<ScheduleProblem> {
    let mut circles = Vec::new();
    let mut seen = vec![false; waits.len()];
    for start in 0..waits.len() {
        let mut path: Vec<Wait> = Vec::new();
        let mut rank = start;
        while let Some(wait) = waits.get(rank).copied().flatten()
            && !seen[rank]
        {
            seen[rank] = true;
            path.push(wait);
            rank = wait.on;
        }
        if let Some(first) = path.iter().position(|wait| wait.rank == rank) {
            circles.push(ScheduleProblem::Deadlock { cycle: path.split_off(first) });
        }
    }
    circles
}
