//! Static memory planning: assigns pool offsets to buffers of known lifetimes, so that no two live at once overlap and little is wasted.

/// Lifetime and size of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifetime {
    /// Time of the first use.
    pub from: usize,
    /// Time of the last use, inclusive.
    pub to: usize,
    /// Size in elements.
    pub elements: usize,
}

/// Returns the offset of each buffer in one pool, and the size of the pool, in elements. The largest buffers are placed first, each as
/// low as the buffers that are live at the same time allow. `lifetimes` are in order of `from`.
pub fn pack(lifetimes: &[Lifetime]) -> (Vec<usize>, usize) {
    debug_assert!(lifetimes.is_sorted_by_key(|lifetime| lifetime.from), "in the order in which they begin");
    let mut order: Vec<usize> = (0..lifetimes.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(lifetimes[index].elements), lifetimes[index].from, index));
    let at_once = at_once(lifetimes);
    let mut starts: Vec<Option<usize>> = vec![None; lifetimes.len()];
    let mut pool = 0;
    let mut taken = Vec::new();
    for index in order {
        taken.clear();
        let ranges = at_once[index].iter().filter_map(|&other| {
            let start = starts[other]?;
            Some((start, start + lifetimes[other].elements))
        });
        taken.extend(ranges);
        taken.sort_unstable();
        let mut start = 0;
        for &(from, to) in &taken {
            if from >= start + lifetimes[index].elements {
                break;
            }
            start = start.max(to);
        }
        starts[index] = Some(start);
        pool = pool.max(start + lifetimes[index].elements);
    }
    (starts.into_iter().map(Option::unwrap_or_default).collect(), pool)
}

/// For each buffer, returns the others that are live at any time of its own.
fn at_once(lifetimes: &[Lifetime]) -> Vec<Vec<usize>> {
    let mut at_once = vec![Vec::new(); lifetimes.len()];
    let mut there: Vec<usize> = Vec::new();
    for (index, lifetime) in lifetimes.iter().enumerate() {
        there.retain(|&other| lifetimes[other].to >= lifetime.from);
        for &other in &there {
            at_once[index].push(other);
            at_once[other].push(index);
        }
        there.push(index);
    }
    at_once
}
