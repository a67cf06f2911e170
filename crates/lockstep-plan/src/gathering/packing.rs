//! Where things lie that are there at known times: two that are there at once do not overlap, and little is wasted.

/// How long something is there, and how much room it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifetime {
    /// The first moment.
    pub from: usize,
    /// The last.
    pub to: usize,
    /// Its elements.
    pub elements: usize,
}

/// The first element of each in one pool, and the elements of that. The largest are placed first, each as low as those allow that are
/// there at the same time. They are given in the order in which they begin.
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

/// For each the others that are there at any time of its own.
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
