//! Agreement of the members of a large group on their calls, along a binomial tree: each member passes its subtree's calls to
//! its parent, and the first member passes its consent down again. Each member then talks to lg P others instead of all.
//!
//! Member m is the root of the subtree m..m + 2^k, where 2^k is the largest power of two that divides m. These are the subtrees
//! of the tree in which numbers are reduced (`reduce`).

use std::ops::Range;

use crate::Malformed;

/// Maximum number of members that announce their calls to each other directly, with small data attached.
pub(crate) const FLAT_MEMBERS: usize = 64;
/// Maximum number of different calls that a tally keeps.
const CALLS: usize = 8;
/// Length in bytes of an encoded call with its count and its first member.
const ENTRY_BYTES: usize = 32;
/// Maximum length in bytes of an encoded tally.
const TALLY_BYTES: usize = CALLS * ENTRY_BYTES;

/// Returns the parent of a member; `None` for the first.
pub(crate) fn parent(member: usize) -> Option<usize> {
    (member > 0).then(|| member & (member - 1))
}

/// Returns the children of a member of a group of `members`, in order.
pub(crate) fn children(member: usize, members: usize) -> impl Iterator<Item = usize> {
    let levels = if member == 0 { usize::BITS - 1 } else { member.trailing_zeros() };
    (0..levels).map(move |level| member + (1 << level)).take_while(move |child| *child < members)
}

/// Returns the members of a member's subtree.
pub(crate) fn subtree(member: usize, members: usize) -> Range<usize> {
    let end = if member == 0 { members } else { members.min(member + (1 << member.trailing_zeros())) };
    member..end
}

/// Checks that member `from` may announce `bytes` bytes to member `own`: only neighbours in the tree do, and only tallies.
pub(crate) fn check_announcer(own: usize, from: usize, bytes: usize) -> Result<(), Malformed> {
    if parent(own) != Some(from) && parent(from) != Some(own) {
        return Err(Malformed::Operation);
    }
    if bytes > TALLY_BYTES { Err(Malformed::Call) } else { Ok(()) }
}

/// Calls of the members of a subtree: each different one with its first member and the number of members that made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tally(Vec<Entry>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    call: [u64; 3],
    first: u32,
    count: u32,
}

/// A member whose call differs from the majority's, and the first that made the majority's call, each with its call.
pub(crate) type Dissent = [(usize, [u64; 3]); 2];

impl Tally {
    /// Returns the tally of one member.
    pub(crate) fn of(member: usize, call: [u64; 3]) -> Self {
        Self(vec![Entry { call, first: member as u32, count: 1 }])
    }

    /// Adds the tally of other members.
    pub(crate) fn add(&mut self, other: &Self) {
        for entry in &other.0 {
            match self.0.iter_mut().find(|known| known.call == entry.call) {
                Some(known) => {
                    known.first = known.first.min(entry.first);
                    known.count += entry.count;
                }
                None => self.0.push(*entry),
            }
        }
        self.0.sort_unstable_by_key(|entry| (std::cmp::Reverse(entry.count), entry.first));
        self.0.truncate(CALLS);
    }

    /// Returns whose call differs; `None` if all agree. On a tie, the call of the lower member counts as the majority's.
    pub(crate) fn dissent(&self) -> Option<Dissent> {
        let (majority, others) = self.0.split_first()?;
        let odd = others.iter().min_by_key(|entry| entry.first)?;
        Some([odd, majority].map(|entry| (entry.first as usize, entry.call)))
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let words = |entry: &Entry| {
            let [a, b, c] = entry.call;
            [a, b, c, u64::from(entry.first) | u64::from(entry.count) << 32]
        };
        self.0.iter().flat_map(words).flat_map(u64::to_le_bytes).collect()
    }

    /// Decodes the tally of a member's subtree; `None` if the bytes are no such tally.
    pub(crate) fn decode(bytes: &[u8], subtree: &Range<usize>) -> Option<Self> {
        let (entries, rest) = bytes.as_chunks::<ENTRY_BYTES>();
        let entry = |bytes: &[u8; ENTRY_BYTES]| {
            let (words, _) = bytes.as_chunks::<8>();
            let [a, b, c, d] = [0, 1, 2, 3].map(|index: usize| u64::from_le_bytes(words[index]));
            Entry { call: [a, b, c], first: d as u32, count: (d >> 32) as u32 }
        };
        let entries: Vec<Entry> = entries.iter().take(CALLS + 1).map(entry).collect();
        let is_inside = |entry: &Entry| {
            subtree.contains(&(entry.first as usize)) && (1..=subtree.len()).contains(&(entry.count as usize))
        };
        let is_sound = rest.is_empty() && (1..=CALLS).contains(&entries.len());
        (is_sound && entries.iter().all(is_inside)).then_some(Self(entries))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::call::odd_one_out;

    /// Returns the tally that a member passes to its parent, through the wire.
    fn gathered(member: usize, calls: &[[u64; 3]]) -> Tally {
        let mut tally = Tally::of(member, calls[member]);
        for child in children(member, calls.len()) {
            let of_child = gathered(child, calls).encode();
            tally.add(&Tally::decode(&of_child, &subtree(child, calls.len())).unwrap());
        }
        tally
    }

    proptest! {
        #[test]
        fn a_tree_of_members_finds_the_odd_one_that_all_would_find(calls in proptest::collection::vec(0_u64..4, 1..200)) {
            let calls: Vec<[u64; 3]> = calls.into_iter().map(|call| [call.saturating_sub(1), 7, 9]).collect();
            let found = gathered(0, &calls).dissent();
            let expected = odd_one_out(&calls).map(|(odd, reference)| [(odd, calls[odd]), (reference, calls[reference])]);
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn every_member_has_one_parent_and_subtrees_are_contiguous(members in 1_usize..300) {
            for member in 0..members {
                let own = subtree(member, members);
                let mut end = member + 1;
                for child in children(member, members) {
                    prop_assert_eq!(parent(child), Some(member));
                    prop_assert_eq!(subtree(child, members).start, end);
                    end = subtree(child, members).end;
                }
                prop_assert_eq!(end, own.end);
            }
        }

        #[test]
        fn any_bytes_are_a_small_tally_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            if let Some(tally) = Tally::decode(&bytes, &(0..100)) {
                prop_assert!(tally.0.len() <= CALLS);
            }
        }
    }

    #[test]
    fn a_member_of_the_largest_group_talks_to_few() {
        let most = (0..65_536).map(|member| children(member, 65_536).count()).max();
        assert_eq!(most, Some(16));
    }
}
