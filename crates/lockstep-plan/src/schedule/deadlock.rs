//! Deadlock detection: runs the lists of all ranks together, without durations.
//!
//! A send waits until its receive is posted, and a pass until its message is sent, as on the strictest transport. From each rank that is
//! stuck at the end, the waits are followed from rank to rank until a cycle closes. A rank that waits for a missing action is in no
//! cycle; `validate` reports it.

use std::collections::HashSet;

use super::{Action, Message, Schedule, ScheduleProblem, Wait};

/// Returns the cycles of ranks that wait for each other; none if all lists run to their end.
pub(super) fn deadlocks(schedule: &Schedule) -> Vec<ScheduleProblem> {
    let messages = schedule.actions.iter().flatten().filter(|action| is_message(action));
    let mut play = Play {
        schedule,
        pending: messages.copied().collect(),
        next: vec![0; schedule.ranks()],
        step: schedule.actions.iter().map(|list| list.iter().position(|a| *a == Action::Step)).collect(),
    };
    let mut moved = true;
    while moved {
        moved = false;
        for rank in 0..schedule.ranks() {
            while let Some(action) = play.next_of(rank)
                && play.wait_of(rank, action).is_none()
            {
                if is_message(&action) {
                    play.pending.remove(&action);
                }
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

fn is_message(action: &Action) -> bool {
    matches!(action, Action::Send(_) | Action::Receive(_))
}

struct Play<'a> {
    schedule: &'a Schedule,
    /// Sends and receives that have not happened yet.
    pending: HashSet<Action>,
    next: Vec<usize>,
    /// Position of the optimizer step in each list.
    step: Vec<Option<usize>>,
}

impl Play<'_> {
    fn next_of(&self, rank: usize) -> Option<Action> {
        self.schedule.actions[rank].get(self.next[rank]).copied()
    }

    /// Returns what a rank has to wait for before an action; `None` if it can go on.
    fn wait_of(&self, rank: usize, action: Action) -> Option<Wait> {
        let wait = |on, needs| Wait { rank, action, needs, on };
        match action {
            Action::Compute(pass) => {
                let message = Message::needed_by(pass, self.schedule.stages())?;
                let send = Action::Send(message);
                let on = *self.schedule.rank_of.get(message.from)?;
                self.pending.contains(&send).then(|| wait(on, send))
            }
            Action::Send(message) => {
                let receive = Action::Receive(message);
                let on = *self.schedule.rank_of.get(message.to)?;
                self.pending.contains(&receive).then(|| wait(on, receive))
            }
            Action::Step => (0..self.schedule.ranks())
                .find(|&other| self.step[other].is_some_and(|step| step > self.next[other]))
                .map(|other| wait(other, Action::Step)),
            Action::Receive(_) | Action::ReduceGradients { .. } => None,
        }
    }
}

/// Returns each cycle among ranks that wait for at most one other.
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
