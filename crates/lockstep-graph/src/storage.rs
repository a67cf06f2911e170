//! Memory planning of a program: lifetimes of values in, offsets out.

/// A memory region that a value can live in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Region {
    /// The block's input: the output of the block before.
    Input,
    /// A named input of the micro-batch, by its index.
    Data(usize),
    /// A constant of the model, by its index.
    Constant(usize),
    /// Activations that the block saves for one micro-batch.
    Frame,
    /// The block's output: the end of the frame, or a buffer that the caller supplies.
    Output,
    /// Values that live inside one call.
    Workspace,
    /// Values that the first half of a split backward saves for the weight gradients.
    Deferred,
    /// The gradient of the block's output.
    OutputGradient,
    /// The gradient of the block's input.
    InputGradient,
}

/// An offset in a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) region: Region,
    pub(crate) offset_bytes: usize,
}

impl Slot {
    pub(crate) const fn start_of(region: Region) -> Self {
        Self { region, offset_bytes: 0 }
    }
}

/// Alignment of offsets in bytes: every value starts at a cache line.
const ALIGNMENT: usize = 64;

/// A bump allocator that hands out consecutive ranges of a region.
#[derive(Debug, Default)]
pub(crate) struct Bump {
    pub(crate) bytes: usize,
}

impl Bump {
    pub(crate) fn place(&mut self, region: Region, bytes: usize) -> Slot {
        let slot = Slot { region, offset_bytes: self.bytes };
        self.bytes += bytes.next_multiple_of(ALIGNMENT);
        slot
    }
}

/// A value of `bytes` that lives from its first to its last access, both included, in instruction indices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lifetime {
    pub(crate) first: usize,
    pub(crate) last: usize,
    pub(crate) bytes: usize,
}

/// Returns offsets such that no two lifetimes that overlap in time overlap in memory, and the total bytes.
///
/// Greedy by size, each at the lowest offset that fits: within a few percent of the best on the lifetimes
/// of transformer blocks, and simple enough to check.
pub(crate) fn pack(lifetimes: &[Lifetime]) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..lifetimes.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(lifetimes[i].bytes), lifetimes[i].first, i));
    let mut offsets = vec![0; lifetimes.len()];
    let mut placed: Vec<usize> = Vec::new();
    let mut total = 0;
    for &i in &order {
        let bytes = lifetimes[i].bytes.next_multiple_of(ALIGNMENT);
        let mut taken: Vec<(usize, usize)> = placed
            .iter()
            .filter(|&&j| lifetimes[j].first <= lifetimes[i].last && lifetimes[i].first <= lifetimes[j].last)
            .map(|&j| (offsets[j], offsets[j] + lifetimes[j].bytes.next_multiple_of(ALIGNMENT)))
            .collect();
        taken.sort_unstable();
        let mut offset = 0;
        for (start, end) in taken {
            if offset + bytes <= start {
                break;
            }
            offset = offset.max(end);
        }
        offsets[i] = offset;
        total = total.max(offset + bytes);
        placed.push(i);
    }
    (offsets, total)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn values_alive_together_never_overlap(
            raw in prop::collection::vec((0usize..40, 0usize..10, 1usize..5000), 1..60)
        ) {
            let lifetimes: Vec<Lifetime> =
                raw.iter().map(|&(first, length, bytes)| Lifetime { first, last: first + length, bytes }).collect();
            let (offsets, total) = pack(&lifetimes);
            for i in 0..lifetimes.len() {
                let (a, a_start) = (lifetimes[i], offsets[i]);
                prop_assert!(a_start.is_multiple_of(ALIGNMENT) && a_start + a.bytes <= total);
                for j in 0..i {
                    let (b, b_start) = (lifetimes[j], offsets[j]);
                    let together = a.first <= b.last && b.first <= a.last;
                    let overlap = a_start < b_start + b.bytes && b_start < a_start + a.bytes;
                    prop_assert!(!(together && overlap), "{a:?} at {a_start} and {b:?} at {b_start}");
                }
            }
        }
    }

    #[test]
    fn a_chain_of_two_needs_two_places() {
        let chain: Vec<Lifetime> = (0..10).map(|t| Lifetime { first: t, last: t + 1, bytes: 64 }).collect();
        assert_eq!(pack(&chain).1, 128);
    }
}
