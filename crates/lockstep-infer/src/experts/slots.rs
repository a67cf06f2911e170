//! Slots of the cache: which matrix lies in which, which of them are awaited, and which makes room for another.
//!
//! A pass that a few experts take part in evicts the matrix whose last use is the longest ago. A pass of nearly all experts (a prompt)
//! is a scan: whatever it reads is needed again one pass later, so eviction by last use would evict every matrix just before its next
//! use. A scan therefore reads through a few slots, and leaves the others as they are.

use std::collections::{BTreeSet, VecDeque};

/// Fraction of a layer's experts from which on a pass is a scan.
const SCAN_SHARE: f64 = 0.9;

/// Last use of the matrix of an empty slot, which is filled before all others.
const NEVER: u64 = 0;
/// Last use of a matrix that only scans used.
const SCANNED: u64 = 1;

/// A matrix: the number of its stack, and its expert.
pub(super) type MatrixId = (usize, usize);

/// Facts about a stack.
#[derive(Debug, Clone, Copy)]
pub(super) struct StackSize {
    /// Unit that reads the stack.
    pub(super) unit: usize,
    pub(super) experts: usize,
}

#[derive(Debug, Clone, Default)]
struct Slot {
    /// The matrix that the slot holds or is being filled with.
    matrix: Option<MatrixId>,
    /// Number of the last pass through a unit that used the matrix, scans excepted.
    last_use: u64,
    /// True from the request of the matrix to its use.
    is_awaited: bool,
    /// True from the read of the matrix to its first use.
    is_fresh: bool,
}

/// Slots, and the matrices that are yet to be read into them.
#[derive(Debug)]
pub(super) struct ExpertSlots {
    stacks: Vec<StackSize>,
    slots: Vec<Slot>,
    /// Slot of each matrix, by stack and expert.
    slot_of: Vec<Vec<Option<usize>>>,
    /// Slots that are not awaited, with their last use.
    free: BTreeSet<(u64, usize)>,
    /// Requested matrices that are in no slot, in the order of their use.
    queue: VecDeque<MatrixId>,
    /// Most slots of a scan that are filled ahead of use.
    window: usize,
    fresh: usize,
    passes: u64,
    is_scan: bool,
    /// True if the unit after a scan was requested.
    is_ahead: bool,
    unit: usize,
}

impl ExpertSlots {
    /// Creates empty slots. Stacks are in the order of their use. A scan fills up to `window` slots ahead of use.
    pub(super) fn new(stacks: Vec<StackSize>, slots: usize, window: usize) -> Self {
        Self {
            slot_of: stacks.iter().map(|stack| vec![None; stack.experts]).collect(),
            stacks,
            slots: vec![Slot::default(); slots],
            free: (0..slots).map(|slot| (NEVER, slot)).collect(),
            queue: VecDeque::new(),
            window: window.max(1),
            fresh: 0,
            passes: SCANNED,
            is_scan: false,
            is_ahead: false,
            unit: 0,
        }
    }

    /// Requests the matrices of these experts of a unit, in the order of its stacks. Earlier requests for others are dropped.
    pub(super) fn route(&mut self, unit: usize, experts: &[usize]) {
        let count = self.stacks.iter().filter(|stack| stack.unit == unit).map(|stack| stack.experts).max();
        self.is_scan = experts.len() as f64 >= SCAN_SHARE * count.unwrap_or(0) as f64;
        (self.unit, self.is_ahead) = (unit, false);
        self.passes += 1;
        self.queue.clear();
        for slot in 0..self.slots.len() {
            let of = self.slots[slot].matrix;
            let is_wanted = of
                .is_some_and(|(stack, expert)| self.stacks[stack].unit == unit && experts.contains(&expert));
            if self.slots[slot].is_awaited && !is_wanted {
                self.release(slot, self.slots[slot].last_use);
            }
        }
        self.request(unit, experts);
    }

    fn request(&mut self, unit: usize, experts: &[usize]) {
        for stack in
            (0..self.stacks.len()).filter(|&stack| self.stacks[stack].unit == unit).collect::<Vec<_>>()
        {
            for &expert in experts {
                match self.slot_of[stack][expert] {
                    Some(slot) => self.hold(slot),
                    None => self.queue.push_back((stack, expert)),
                }
            }
        }
    }

    /// Returns the next matrix to be read with a slot for it; `None` if nothing is to be read for now.
    pub(super) fn next_read(&mut self) -> Option<(usize, MatrixId)> {
        if self.is_scan {
            if self.queue.is_empty() && !self.is_ahead {
                self.is_ahead = true;
                let next = self.unit_after(self.unit)?;
                let count =
                    self.stacks.iter().filter(|stack| stack.unit == next).map(|stack| stack.experts).min();
                self.request(next, &(0..count.unwrap_or(0)).collect::<Vec<_>>());
            }
            if self.fresh >= self.window {
                return None;
            }
        }
        let matrix = *self.queue.front()?;
        let &(_, slot) = self.free.first()?;
        self.queue.pop_front();
        self.fill(slot, matrix);
        Some((slot, matrix))
    }

    /// Returns the slot of a matrix that is used now, and whether it is yet to be read into it. Without a free slot, the matrix whose
    /// use is the furthest away gives up its own.
    pub(super) fn slot_for(&mut self, matrix: MatrixId) -> (usize, bool) {
        if let Some(slot) = self.slot_of[matrix.0][matrix.1] {
            return (slot, false);
        }
        self.queue.retain(|&queued| queued != matrix);
        let slot = self.free.first().map(|&(_, slot)| slot).unwrap_or_else(|| {
            let distance = |slot: &Slot| {
                let stack = slot.matrix.map_or(0, |(stack, _)| stack);
                (stack + self.stacks.len() - matrix.0) % self.stacks.len()
            };
            let furthest = (0..self.slots.len()).max_by_key(|&slot| distance(&self.slots[slot])).unwrap_or(0);
            let given_up = self.slots[furthest].matrix;
            self.release(furthest, self.slots[furthest].last_use);
            self.queue.extend(given_up);
            furthest
        });
        self.fill(slot, matrix);
        (slot, true)
    }

    /// Returns the slot of a matrix, if it has one.
    pub(super) fn slot_of(&self, (stack, expert): MatrixId) -> Option<usize> {
        self.slot_of[stack][expert]
    }

    /// Marks the matrix of a slot as used.
    pub(super) fn used(&mut self, slot: usize) {
        let last_use = if self.is_scan { self.slots[slot].last_use } else { self.passes };
        self.release(slot, last_use);
    }

    /// Empties a slot.
    pub(super) fn forget(&mut self, slot: usize) {
        if let Some((stack, expert)) = self.slots[slot].matrix.take() {
            self.slot_of[stack][expert] = None;
        }
        self.release(slot, NEVER);
    }

    fn fill(&mut self, slot: usize, matrix: MatrixId) {
        if let Some((stack, expert)) = self.slots[slot].matrix.replace(matrix) {
            self.slot_of[stack][expert] = None;
        }
        self.slot_of[matrix.0][matrix.1] = Some(slot);
        self.hold(slot);
        let slot = &mut self.slots[slot];
        (slot.last_use, slot.is_fresh) = (SCANNED, true);
        self.fresh += 1;
    }

    fn hold(&mut self, slot: usize) {
        self.free.remove(&(self.slots[slot].last_use, slot));
        self.slots[slot].is_awaited = true;
    }

    fn release(&mut self, number: usize, last_use: u64) {
        let slot = &mut self.slots[number];
        self.free.remove(&(slot.last_use, number));
        self.fresh -= usize::from(std::mem::take(&mut slot.is_fresh));
        (slot.is_awaited, slot.last_use) = (false, last_use);
        self.free.insert((last_use, number));
    }

    /// Returns the next unit with stacks; after the last one comes the first.
    fn unit_after(&self, unit: usize) -> Option<usize> {
        let units = || self.stacks.iter().map(|stack| stack.unit);
        units().filter(|&other| other > unit).min().or_else(|| units().min())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Stacks of two matrices for each expert in each unit.
    fn slots(units: usize, experts: usize, count: usize, window: usize) -> ExpertSlots {
        let stacks = (0..2 * units).map(|stack| StackSize { unit: stack / 2, experts }).collect();
        ExpertSlots::new(stacks, count, window)
    }

    /// Uses experts of a unit as the cache does, and returns the matrices that were read, in their order.
    fn pass(slots: &mut ExpertSlots, unit: usize, experts: &[usize]) -> Vec<MatrixId> {
        let mut reads = Vec::new();
        slots.route(unit, experts);
        for stack in [2 * unit, 2 * unit + 1] {
            reads.extend(std::iter::from_fn(|| slots.next_read()).map(|(_, matrix)| matrix));
            for &expert in experts {
                let (slot, is_read) = slots.slot_for((stack, expert));
                if is_read {
                    reads.push((stack, expert));
                }
                assert_eq!(slots.slot_of((stack, expert)), Some(slot));
                slots.used(slot);
                reads.extend(std::iter::from_fn(|| slots.next_read()).map(|(_, matrix)| matrix));
            }
        }
        reads
    }

    #[test]
    fn experts_that_are_used_again_are_not_read_again() {
        let mut slots = slots(3, 8, 20, 4);
        assert_eq!(pass(&mut slots, 0, &[1, 5]), [(0, 1), (0, 5), (1, 1), (1, 5)]);
        assert_eq!(pass(&mut slots, 1, &[0, 2]).len(), 4);
        assert_eq!(pass(&mut slots, 0, &[5, 6]), [(0, 6), (1, 6)]);
        assert_eq!(pass(&mut slots, 0, &[5, 1]), []);
    }

    #[test]
    fn the_matrix_whose_last_use_is_the_longest_ago_makes_room() {
        let mut slots = slots(1, 8, 6, 4);
        for experts in [[0, 1], [0, 2], [0, 3]] {
            pass(&mut slots, 0, &experts);
        }
        assert_eq!(pass(&mut slots, 0, &[0, 2]), [], "1 made room");
        assert_eq!(pass(&mut slots, 0, &[1]), [(0, 1), (1, 1)]);
        assert_eq!(pass(&mut slots, 0, &[0, 2]), [], "3 made room");
    }

    #[test]
    fn scans_leave_most_of_the_cache_as_it_is_and_read_ahead() {
        let (units, experts, count, window) = (4, 8, 40, 4);
        let mut slots = slots(units, experts, count, window);
        let all: Vec<usize> = (0..experts).collect();
        let scan =
            |slots: &mut ExpertSlots| (0..units).map(|unit| pass(slots, unit, &all).len()).sum::<usize>();
        let matrices = 2 * units * experts;
        assert!(scan(&mut slots) >= matrices);
        for _ in 0..3 {
            let reads = scan(&mut slots);
            assert!(
                reads <= matrices - count + 2 * window,
                "{reads} of {matrices} matrices with {count} slots"
            );
        }
        let used = pass(&mut slots, 2, &[3, 4]).len();
        scan(&mut slots);
        let again = pass(&mut slots, 2, &[3, 4]);
        assert!(again.is_empty(), "read again after a scan: {again:?}; {used} at first");
    }

    proptest! {
        #[test]
        fn every_matrix_is_in_its_slot_when_it_is_used(
            count in 1_usize..40,
            window in 1_usize..9,
            passes in proptest::collection::vec((0_usize..3, proptest::collection::btree_set(0_usize..8, 1..=8)), 1..30),
        ) {
            let mut slots = slots(3, 8, count, window);
            for (unit, experts) in passes {
                let experts: Vec<usize> = experts.into_iter().collect();
                pass(&mut slots, unit, &experts);
                let held: Vec<_> = slots.slots.iter().filter_map(|slot| slot.matrix).collect();
                let mut distinct = held.clone();
                distinct.sort_unstable();
                distinct.dedup();
                prop_assert_eq!(distinct.len(), held.len(), "a matrix in two slots: {:?}", held);
                let awaited = slots.slots.iter().filter(|slot| slot.is_awaited).count();
                prop_assert_eq!(slots.free.len(), count - awaited);
                prop_assert_eq!(slots.fresh, slots.slots.iter().filter(|slot| slot.is_fresh).count());
            }
        }
    }
}
