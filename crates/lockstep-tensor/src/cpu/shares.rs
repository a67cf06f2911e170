//! Distribution of a kernel's tasks over threads: each thread owns a contiguous share, and takes from the others once its own is
//! empty.
//!
//! The shares depend on the numbers of tasks and threads alone. So a thread works on the same rows in kernel after kernel, as long
//! as it keeps up, and they stay in its caches and on its memory node. Each share has a counter of its own, which others
//! touch only at the end: no counter is contended by all threads.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Number of stages of a kernel.
pub(super) const STAGES: usize = 3;

/// Returns share `index` of `count` contiguous shares of `tasks`. Sizes differ by at most one, the larger ones first.
fn share(tasks: &Range<usize>, count: usize, index: usize) -> Range<usize> {
    let (size, larger) = (tasks.len() / count, tasks.len() % count);
    let at = |index: usize| tasks.start + index * size + index.min(larger);
    at(index)..at(index + 1)
}

/// The tasks of a kernel and the threads that may run them. Tasks are numbered through the stages; all tasks of a stage
/// are taken before any of the next.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stages {
    /// End of the tasks of each stage.
    ends: [usize; STAGES],
    threads: usize,
}

impl Stages {
    /// Creates stages with these numbers of tasks for at most `threads` threads.
    pub(super) fn new(tasks: [usize; STAGES], threads: usize) -> Self {
        let mut end = 0;
        let ends = tasks.map(|tasks| {
            end += tasks;
            end
        });
        Self { ends, threads: threads.min(end).max(1) }
    }

    /// Number of tasks.
    pub(super) fn tasks(&self) -> usize {
        self.ends[STAGES - 1]
    }

    /// Number of threads: no more than tasks.
    pub(super) fn threads(&self) -> usize {
        self.threads
    }

    fn range(&self, stage: usize) -> Range<usize> {
        let start = if stage == 0 { 0 } else { self.ends[stage - 1] };
        start..self.ends[stage]
    }

    fn is_empty(&self, stage: usize) -> bool {
        self.range(stage).is_empty()
    }

    fn share(&self, stage: usize, thread: usize) -> Range<usize> {
        share(&self.range(stage), self.threads, thread)
    }

    /// Returns the first own task of `thread` in a stage after `stage`.
    fn first_after(&self, stage: usize, thread: usize) -> Option<usize> {
        let shares = (stage + 1..STAGES).map(|stage| self.share(stage, thread));
        shares.into_iter().find(|share| !share.is_empty()).map(|share| share.start)
    }
}

/// Tasks that have been taken from the shares of one thread, for each stage.
#[derive(Debug, Default)]
pub(super) struct Taken([AtomicUsize; STAGES]);

impl Taken {
    /// Starts a kernel. No thread may be in one.
    pub(super) fn reset(&self) {
        self.0.iter().for_each(|taken| taken.store(0, Ordering::Relaxed));
    }
}

/// A task that a thread has taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Task {
    pub(super) index: usize,
    /// The task that this thread will probably take next.
    pub(super) next: Option<usize>,
}

/// The walk of one thread through the shares of a kernel: in each stage its own share first, then those of the threads after it.
#[derive(Debug)]
pub(super) struct Walk {
    stages: Stages,
    own: usize,
    stage: usize,
    /// Number of shares of the stage that were found empty.
    passed: usize,
}

impl Walk {
    /// Creates the walk of thread `own`.
    pub(super) fn new(stages: Stages, own: usize) -> Self {
        Self { stages, own, stage: 0, passed: 0 }
    }

    /// Takes the next task; `None` once all tasks are taken. `taken` returns the counters of a thread's shares.
    ///
    /// Counters only grow. So when a thread has found every share of a stage empty, all tasks of that stage are taken.
    pub(super) fn take<'a>(&mut self, taken: impl Fn(usize) -> &'a Taken) -> Option<Task> {
        let Self { stages, own, .. } = *self;
        while self.stage < STAGES {
            if stages.is_empty(self.stage) {
                self.stage += 1;
                continue;
            }
            let owner = own + self.passed;
            let owner = if owner < stages.threads { owner } else { owner - stages.threads };
            let share = stages.share(self.stage, owner);
            let counter = &taken(owner).0[self.stage];
            // Looks first: an empty share is left in the caches of those who look.
            if !share.is_empty() && counter.load(Ordering::Relaxed) < share.len() {
                let index = share.start + counter.fetch_add(1, Ordering::Relaxed);
                if index < share.end {
                    let next = Some(index + 1).filter(|next| *next < share.end);
                    let next = next.or_else(|| stages.first_after(self.stage, own));
                    return Some(Task { index, next });
                }
            }
            self.passed += 1;
            if self.passed == stages.threads {
                (self.stage, self.passed) = (self.stage + 1, 0);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn shares_are_contiguous_balanced_and_cover_every_task_once() {
        for threads in 1..=128 {
            for tasks in (0..300).chain([1000, 4095, 1 << 20, usize::MAX - 7]) {
                let tasks = 7..7 + tasks.min(usize::MAX - 7);
                let shares: Vec<_> = (0..threads).map(|index| share(&tasks, threads, index)).collect();
                assert_eq!((shares[0].start, shares[threads - 1].end), (tasks.start, tasks.end));
                assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start), "{shares:?}");
                assert!(shares.windows(2).all(|pair| pair[0].len() >= pair[1].len()), "{shares:?}");
                assert!(shares[0].len() - shares[threads - 1].len() <= 1, "{shares:?}");
            }
        }
    }

    #[test]
    fn threads_that_keep_up_take_their_own_shares_and_know_their_next_task() {
        let stages = Stages::new([4, 6, 2], 2);
        let taken = [Taken::default(), Taken::default()];
        let mut walks = [0, 1].map(|own| Walk::new(stages, own));
        let mut order = [vec![], vec![]];
        for _ in 0..6 {
            for (walk, order) in walks.iter_mut().zip(&mut order) {
                let task = walk.take(|thread| &taken[thread]).unwrap();
                order.push((task.index, task.next));
            }
        }
        let expected = [[0, 1, 4, 5, 6, 10], [2, 3, 7, 8, 9, 11]];
        for (order, expected) in order.iter().zip(expected) {
            let next = expected[1..].iter().copied().map(Some).chain([None]);
            assert_eq!(*order, expected.into_iter().zip(next).collect::<Vec<_>>());
        }
        assert!(walks.iter_mut().all(|walk| walk.take(|thread| &taken[thread]).is_none()));
    }

    proptest! {
        /// Threads come late, or never: whatever their order, the others take all tasks.
        #[test]
        fn every_task_is_taken_once_and_stage_after_stage(
            tasks in prop::array::uniform3(0_usize..60),
            threads in 1_usize..=128,
            turns in prop::collection::vec(any::<prop::sample::Index>(), 0..400),
        ) {
            let stages = Stages::new(tasks, threads);
            let taken: Vec<_> = (0..threads).map(|_| Taken::default()).collect();
            let mut walks: Vec<_> = (0..stages.threads()).map(|own| Walk::new(stages, own)).collect();
            let mut order = Vec::new();
            let turns = turns.iter().map(|turn| turn.index(walks.len())).collect::<Vec<_>>();
            // Thread 0, the caller, is always there and goes on until nothing is left.
            for own in turns.into_iter().chain(std::iter::repeat_n(0, stages.tasks() + 1)) {
                order.extend(walks[own].take(|thread| &taken[thread]).map(|task| task.index));
            }
            let stage = |task: usize| stages.ends.iter().filter(|end| **end <= task).count();
            prop_assert!(order.is_sorted_by_key(|task| stage(*task)), "{order:?} of {stages:?}");
            order.sort_unstable();
            prop_assert_eq!(order, (0..tasks.iter().sum()).collect::<Vec<_>>());
        }
    }
}
