//! The choice of what stays in memory: a function of sizes and a limit.
//!
//! Units that are not resident pass through two or three buffers, each as large as the largest of them. So one large unit
//! (an output layer) makes every buffer large, unless it is resident itself. The solver therefore tries each bound on the
//! size of streamed units: larger units are resident, the rest of the memory is filled, and the bound with the fewest bytes
//! read in a pass wins.
//!
//! ```text
//! bytes = resident weights + buffers * largest streamed unit + largest conversion of a streamed unit
//! ```

/// Buffers of a streamed model: one in use and two being read; two if there is no room for three.
const BUFFERS: [usize; 2] = [3, 2];

/// Blocks count as equal if the smaller has this share of the larger's bytes: they differ in whole blocks of the disk.
const ALIKE: f64 = 0.98;

/// Part of a model that is on one device: a decoder block, or the embedding or head with the weights tied to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Item {
    /// Bytes in memory if the part is resident.
    pub(crate) resident_bytes: u64,
    /// Bytes of a buffer that holds the part as it is stored, whole blocks of the disk.
    pub(crate) slot_bytes: u64,
    /// Bytes of its weights that are converted after a read.
    pub(crate) converted_bytes: u64,
    /// Bytes in memory if the part is not resident: rows of its tables that are looked up.
    pub(crate) touched_bytes: u64,
    pub(crate) role: Role,
}

/// Use of a part that is not resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// It is read in each pass.
    Streamed,
    /// Only rows of its tables are looked up in the file, which takes no time.
    LookedUp,
    /// It cannot be used from disk.
    Resident,
}

/// Order in which streamable units become resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Evenly spread over the model, so that resident units are computed while the next streamed ones are read.
    Spread,
    /// From the front.
    Sequential,
}

/// A solved placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Placement {
    /// True for each part that stays in memory.
    pub(crate) resident: Vec<bool>,
    /// Number of streaming buffers; 0 if nothing is streamed.
    pub(crate) buffers: usize,
}

impl Placement {
    /// Returns the placement with as many of `buffers` buffers as there are streamed parts.
    pub(crate) fn new(items: &[Item], resident: Vec<bool>, buffers: usize) -> Self {
        let streamed = streamed(items, &resident).count();
        Self { resident, buffers: buffers.min(streamed) }
    }

    /// Returns the placement with tables on disk whose rows are looked up, since that takes no time: their memory is of more use elsewhere.
    pub(crate) fn without_lookups(mut self, items: &[Item]) -> Self {
        for (resident, item) in self.resident.iter_mut().zip(items) {
            *resident &= item.role != Role::LookedUp || item.touched_bytes >= item.resident_bytes;
        }
        self
    }

    /// Returns the bytes of resident weights and of rows that are looked up.
    pub(crate) fn weight_bytes(&self, items: &[Item]) -> u64 {
        let bytes = |(item, &resident): (&Item, &bool)| {
            if resident { item.resident_bytes } else { item.touched_bytes }
        };
        items.iter().zip(&self.resident).map(bytes).sum()
    }

    /// Returns the bytes of one streaming buffer.
    pub(crate) fn buffer_bytes(&self, items: &[Item]) -> u64 {
        streamed(items, &self.resident).map(|item| item.slot_bytes).max().unwrap_or(0)
    }

    /// Returns the bytes of all streaming buffers and of conversions.
    pub(crate) fn streaming_bytes(&self, items: &[Item]) -> u64 {
        let converted = streamed(items, &self.resident).map(|item| item.converted_bytes).max();
        self.buffers as u64 * self.buffer_bytes(items) + converted.unwrap_or(0)
    }

    /// Returns the bytes that each pass reads from disk.
    pub(crate) fn read_bytes(&self, items: &[Item]) -> u64 {
        streamed(items, &self.resident).map(|item| item.slot_bytes).sum()
    }

    /// Returns the bytes of resident weights, rows that are looked up, and buffers.
    pub(crate) fn total_bytes(&self, items: &[Item]) -> u64 {
        self.weight_bytes(items) + self.streaming_bytes(items)
    }
}

fn streamed<'a>(items: &'a [Item], resident: &'a [bool]) -> impl Iterator<Item = &'a Item> {
    let on_disk = items.iter().zip(resident).filter(|&(_, &resident)| !resident).map(|(item, _)| item);
    on_disk.filter(|item| item.role == Role::Streamed)
}

/// Returns the best placement in `available_bytes`: the one that reads the fewest bytes in a pass, with three buffers if
/// they fit. `None` if even the least memory ([`least_bytes`]) is more.
pub(crate) fn place(items: &[Item], available_bytes: u64, order: Order) -> Option<Placement> {
    let all = Placement::new(items, vec![true; items.len()], 0);
    if all.total_bytes(items) <= available_bytes {
        return Some(all);
    }
    BUFFERS.into_iter().find_map(|buffers| {
        let bases = bounds(items).map(|bound| base(items, bound, buffers));
        let fitting = bases.filter(|base| base.total_bytes(items) <= available_bytes);
        let filled = fitting.map(|base| filled(items, base, buffers, available_bytes, order));
        filled.min_by_key(|found| (found.read_bytes(items), found.total_bytes(items)))
    })
}

/// Returns the least memory in which the parts can be used, in bytes.
pub(crate) fn least_bytes(items: &[Item]) -> u64 {
    let two = BUFFERS[BUFFERS.len() - 1];
    let all = Placement::new(items, vec![true; items.len()], 0).total_bytes(items);
    bounds(items).map(|bound| base(items, bound, two).total_bytes(items)).fold(all, u64::min)
}

/// Returns the bounds on the size of streamed parts that are worth a try; 0 streams nothing.
fn bounds(items: &[Item]) -> impl Iterator<Item = u64> {
    let mut bounds: Vec<u64> =
        items.iter().filter(|item| item.role == Role::Streamed).map(|item| item.slot_bytes).collect();
    bounds.push(0);
    bounds.sort_unstable();
    bounds.dedup();
    bounds.into_iter()
}

/// Returns the placement in which only parts above the bound are resident, and those that must be.
fn base(items: &[Item], bound: u64, buffers: usize) -> Placement {
    let is_resident = |item: &Item| match item.role {
        Role::Streamed => item.slot_bytes > bound,
        Role::LookedUp => item.touched_bytes >= item.resident_bytes,
        Role::Resident => true,
    };
    Placement::new(items, items.iter().map(is_resident).collect(), buffers)
}

/// Adds resident parts as long as they fit: streamed ones first, since tables whose rows are looked up save no reads.
fn filled(items: &[Item], base: Placement, buffers: usize, available_bytes: u64, order: Order) -> Placement {
    let candidates: Vec<usize> =
        (0..items.len()).filter(|&i| !base.resident[i] && items[i].role == Role::Streamed).collect();
    let with = |from: &Placement, added: &[usize]| {
        let mut resident = from.resident.clone();
        added.iter().for_each(|&item| resident[item] = true);
        Some(Placement::new(items, resident, buffers))
            .filter(|found| found.total_bytes(items) <= available_bytes)
    };
    let mut best = base;
    if order == Order::Spread {
        // Large parts first, since what they leave free may do for small ones; blocks of about one size at equal distances.
        let mut left = candidates.clone();
        while let Some(largest) = left.iter().map(|&item| items[item].resident_bytes).max() {
            let is_alike = |item: &usize| items[*item].resident_bytes as f64 >= ALIKE * largest as f64;
            let alike: Vec<usize> = left.iter().copied().filter(is_alike).collect();
            left.retain(|item| !is_alike(item));
            let most = (1..=alike.len()).rev().find_map(|count| with(&best, &spread(&alike, count)));
            best = most.unwrap_or(best);
        }
    }
    let lookups = (0..items.len()).filter(|&item| items[item].role == Role::LookedUp);
    for item in candidates.iter().copied().chain(lookups) {
        if !best.resident[item] {
            best = with(&best, &[item]).unwrap_or(best);
        }
    }
    best
}

/// Returns `count` of the candidates at equal distances.
fn spread(candidates: &[usize], count: usize) -> Vec<usize> {
    let all = candidates.len().max(1);
    let is_chosen = |at: usize| (at + 1) * count / all > at * count / all;
    candidates.iter().enumerate().filter(|&(at, _)| is_chosen(at)).map(|(_, &item)| item).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ORDERS: [Order; 2] = [Order::Spread, Order::Sequential];

    fn block(bytes: u64) -> Item {
        let (slot_bytes, converted_bytes, touched_bytes) = (bytes, 0, 0);
        Item { resident_bytes: bytes, slot_bytes, converted_bytes, touched_bytes, role: Role::Streamed }
    }

    fn items() -> impl Strategy<Value = Vec<Item>> {
        let role = prop_oneof![
            8 => Just(Role::Streamed),
            1 => Just(Role::Resident),
            1 => Just(Role::LookedUp),
        ];
        let converted = prop_oneof![3 => Just(0), 1 => 1_u64..50];
        let item = (1_u64..100, 0_u64..4, converted, 0_u64..20, role).prop_map(
            |(resident_bytes, more, converted_bytes, touched, role)| Item {
                resident_bytes,
                slot_bytes: resident_bytes + more,
                converted_bytes,
                touched_bytes: if role == Role::LookedUp { touched } else { 0 },
                role,
            },
        );
        proptest::collection::vec(item, 1..9)
    }

    /// Returns every placement with `buffers` buffers.
    fn every(items: &[Item], buffers: usize) -> impl Iterator<Item = Placement> {
        (0_u32..1 << items.len()).filter_map(move |bits| {
            let resident: Vec<bool> = (0..items.len()).map(|item| bits >> item & 1 == 1).collect();
            let is_allowed = items.iter().zip(&resident).all(|(item, &is)| is || item.role != Role::Resident);
            is_allowed.then(|| Placement::new(items, resident, buffers))
        })
    }

    proptest! {
        #[test]
        fn budgets_are_kept_and_the_least_is_what_no_placement_is_below(items in items(), room in 0_u64..900) {
            let least = least_bytes(&items);
            // Conversions count in the bound of a slot only, so a subset may convert less than the base of its bound.
            if items.iter().all(|item| item.converted_bytes == 0) {
                let found = every(&items, 2).map(|found| found.total_bytes(&items)).min();
                prop_assert_eq!(Some(least), found);
            }
            for order in ORDERS {
                let found = place(&items, room, order);
                prop_assert_eq!(found.is_some(), room >= least, "{:?} in {}, least {}", items, room, least);
                let Some(found) = found else { continue };
                prop_assert!(found.total_bytes(&items) <= room, "{:?} in {}", found, room);
                let must = items.iter().zip(&found.resident).all(|(item, &is)| is || item.role != Role::Resident);
                prop_assert!(must, "{:?}", found);
            }
        }

        #[test]
        fn equal_blocks_fill_the_memory(count in 1_usize..40, head in 1_u64..400, room in 0_u64..4400) {
            let mut items = vec![block(100); count];
            items.push(block(head));
            if let Some(found) = place(&items, room, Order::Spread) {
                let with_three = every_count(&items, room, 3).or_else(|| every_count(&items, room, 2));
                prop_assert_eq!(Some(found.read_bytes(&items)), with_three, "{:?}", found);
            }
        }
    }

    /// Returns the fewest bytes read of all placements of equal blocks and a last part.
    fn every_count(items: &[Item], room: u64, buffers: usize) -> Option<u64> {
        let blocks = items.len() - 1;
        let placements = (0..=blocks).flat_map(|count| {
            [false, true].map(|head| {
                let resident = (0..blocks).map(|at| at < count).chain([head]).collect();
                Placement::new(items, resident, buffers)
            })
        });
        let fitting = placements.filter(|found| found.total_bytes(items) <= room);
        fitting.map(|found| found.read_bytes(items)).min()
    }

    #[test]
    fn a_large_head_is_resident_rather_than_in_every_buffer() {
        let mut items = vec![block(10); 20];
        items.push(block(60));
        // Three buffers of the head take 180; the head and three buffers of a block take 90.
        let found = place(&items, 150, Order::Spread).expect("it fits");
        assert!(found.resident[20], "{found:?}");
        assert_eq!(found.read_bytes(&items), 140, "{found:?}");
        assert_eq!(least_bytes(&items), 80);
    }

    #[test]
    fn resident_blocks_are_spread_evenly_or_come_first() {
        let items = vec![block(10); 9];
        let resident = |order| {
            let found = place(&items, 60, order).expect("it fits");
            found.resident.iter().map(|&is| if is { 'r' } else { '.' }).collect::<String>()
        };
        assert_eq!(resident(Order::Spread), "..r..r..r");
        assert_eq!(resident(Order::Sequential), "rrr......");
    }

    #[test]
    fn a_table_that_is_looked_up_stays_on_disk_first() {
        let table = Item { role: Role::LookedUp, touched_bytes: 1, ..block(50) };
        let items = [table, block(10), block(10), block(10), block(10), block(10)];
        let found = place(&items, 60, Order::Spread).expect("it fits");
        assert_eq!(found.resident, [false, true, true, true, true, true], "{found:?}");
        assert_eq!((found.read_bytes(&items), found.buffers), (0, 0));
    }
}
