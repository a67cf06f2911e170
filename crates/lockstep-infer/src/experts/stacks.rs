//! Stacks of experts' matrices that can be read one matrix at a time: places in files, and sizes.

use lockstep_checkpoint::gguf::StoredElements;
use lockstep_plan::{DISK_ALIGNMENT_BYTES, ParameterId};

use crate::extent::Extent;

/// Bytes of slots that a scan fills ahead of use.
const WINDOW_BYTES: usize = 512 << 20;

/// A stack, whose matrices lie in files as the model reads them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExpertStack {
    pub(crate) id: ParameterId,
    /// Unit that reads the stack.
    pub(crate) unit: usize,
    pub(crate) elements: StoredElements,
    /// Rows and columns of a matrix.
    pub(crate) shape: [usize; 2],
    pub(crate) matrix_bytes: u64,
    /// File and first byte of each expert's matrix.
    pub(crate) places: Vec<(usize, u64)>,
}

impl ExpertStack {
    /// Returns the blocks of the disk that hold the matrix of an expert.
    pub(crate) fn extent(&self, expert: usize) -> Extent {
        let (file, offset) = self.places[expert];
        Extent::of(file, offset..offset + self.matrix_bytes)
    }

    /// Returns the byte of its extent at which the matrix of an expert begins.
    pub(crate) fn start(&self, expert: usize) -> usize {
        (self.places[expert].1 - self.extent(expert).offset) as usize
    }
}

/// Slots of a cache of experts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ExpertRoom {
    pub(crate) slots: usize,
    pub(crate) slot_bytes: usize,
}

impl ExpertRoom {
    /// Returns the room of every matrix of the stacks, wherever it begins in a block of the disk.
    pub(crate) fn for_all(stacks: &[ExpertStack]) -> Self {
        let extent = |stack: &ExpertStack| {
            (stack.matrix_bytes as usize).next_multiple_of(DISK_ALIGNMENT_BYTES) + DISK_ALIGNMENT_BYTES
        };
        let slot_bytes = stacks.iter().map(extent).max().unwrap_or(0);
        Self { slots: stacks.iter().map(|stack| stack.places.len()).sum(), slot_bytes }
    }

    /// Returns the least room in which experts can be used: the matrices of those that a token is routed to in a layer are read at
    /// the same time.
    pub(crate) fn least(stacks: &[ExpertStack], per_token: usize) -> Self {
        let of_unit = |unit: usize| stacks.iter().filter(|stack| stack.unit == unit).count();
        let most = stacks.iter().map(|stack| of_unit(stack.unit)).max().unwrap_or(0);
        let all = Self::for_all(stacks);
        Self { slots: (most * per_token).min(all.slots), ..all }
    }

    /// Returns the most room of `bytes` bytes.
    pub(crate) fn within(self, bytes: u64) -> Self {
        let slots = bytes.checked_div(self.slot_bytes as u64).unwrap_or(0);
        Self { slots: self.slots.min(slots as usize), ..self }
    }

    /// Returns the bytes of the slots.
    pub(crate) fn bytes(self) -> usize {
        self.slots * self.slot_bytes
    }

    /// Returns the most slots that a scan fills ahead of use.
    pub(crate) fn window(self) -> usize {
        let most = WINDOW_BYTES.checked_div(self.slot_bytes).unwrap_or(0);
        most.min(self.slots / 2).max(1)
    }
}

/// Bytes that passes read of experts on disk.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct ExpertReads {
    /// Bytes of all experts on disk.
    pub(crate) bytes: u64,
    /// Fraction of them that the cache has room for.
    pub(crate) cached: f64,
    /// Fraction of a layer's experts that a token is routed to.
    pub(crate) routed: f64,
}

impl ExpertReads {
    pub(crate) fn new(stacks: &[ExpertStack], room: ExpertRoom, per_token: usize) -> Self {
        let matrices: usize = stacks.iter().map(|stack| stack.places.len()).sum();
        let experts = stacks.iter().map(|stack| stack.places.len()).min().unwrap_or(1);
        let bytes = stacks.iter().map(|stack| stack.places.len() as u64 * stack.matrix_bytes).sum();
        let share = |part: usize, all: usize| (part as f64 / all.max(1) as f64).min(1.0);
        Self { bytes, cached: share(room.slots, matrices), routed: share(per_token, experts) }
    }

    /// Returns the bytes that a pass of `tokens` tokens reads if each is routed to any expert with the same probability.
    pub(crate) fn of_pass(self, tokens: usize) -> u64 {
        let used = 1.0 - (1.0 - self.routed).powf(tokens as f64);
        (self.bytes as f64 * used * (1.0 - self.cached)) as u64
    }
}

#[cfg(test)]
mod tests {
    use lockstep_plan::DType;

    use super::*;

    #[test]
    fn slots_hold_any_matrix_in_whole_blocks_of_the_disk() {
        let stack = ExpertStack {
            id: ParameterId(3),
            unit: 1,
            elements: StoredElements::Dense(DType::BF16),
            shape: [25, 100],
            matrix_bytes: 5000,
            places: (0..4).map(|expert| (0, 1000 + expert * 5000)).collect(),
        };
        let stacks = [stack.clone(), ExpertStack { id: ParameterId(4), ..stack.clone() }];
        assert_eq!((stack.extent(1).offset, stack.extent(1).bytes, stack.start(1)), (4096, 8192, 1904));
        let all = ExpertRoom::for_all(&stacks);
        assert_eq!(all, ExpertRoom { slots: 8, slot_bytes: 12288 }, "expert 3 lies in three blocks");
        assert_eq!(ExpertRoom::least(&stacks, 2).slots, 4);
        assert_eq!(all.within(50_000).slots, 4);
        let reads = ExpertReads::new(&stacks, all.within(50_000), 1);
        assert_eq!((reads.of_pass(1), reads.of_pass(1000)), (5000, 20_000));
    }
}
