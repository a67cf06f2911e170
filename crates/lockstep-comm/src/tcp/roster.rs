//! The roster of a rendezvous: what its first participant knows of all, and how it is sent to each of them.
//!
//! [`Registry`] decides who takes part, as a pure function of what arrives. The encoded roster says of each participant only
//! the words that differ from the participant before, so that the ranks of one host share their host's bytes.

use std::net::{IpAddr, Ipv6Addr};

use super::handshake::{Hello, Purpose};
use crate::JoinProblem;

/// Length in bytes of the data that a participant sends.
pub(crate) const INFO_BYTES: usize = 96;
/// Number of words of a participant's data and of the address that it came from.
const ENTRY_WORDS: usize = (INFO_BYTES + 16) / WORD_BYTES;
const WORD_BYTES: usize = 8;
/// Maximum length in bytes of an encoded participant: a mask of its words that differ, and these words.
const ENTRY_BYTES: usize = size_of::<u16>() + ENTRY_WORDS * WORD_BYTES;

/// Number of a participant that takes any free number.
pub(crate) const ANY: usize = u32::MAX as usize;

/// A participant's data, and the address of its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Participant {
    pub(crate) info: [u8; INFO_BYTES],
    pub(crate) address: IpAddr,
}

impl Participant {
    fn words(&self) -> [u64; ENTRY_WORDS] {
        let address = match self.address {
            IpAddr::V4(address) if address.is_unspecified() => Ipv6Addr::UNSPECIFIED,
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        let mut words = [0; ENTRY_WORDS];
        let bytes = self.info.iter().copied().chain(address.octets());
        for (at, byte) in bytes.enumerate() {
            words[at / WORD_BYTES] |= u64::from(byte) << (at % WORD_BYTES * 8);
        }
        words
    }

    fn from_words(words: &[u64; ENTRY_WORDS]) -> Self {
        let (mut info, mut octets) = ([0; INFO_BYTES], [0; 16]);
        let bytes = words.iter().flat_map(|word| word.to_le_bytes());
        info.iter_mut().chain(&mut octets).zip(bytes).for_each(|(to, byte)| *to = byte);
        Self { info, address: Ipv6Addr::from(octets).to_canonical() }
    }
}

/// Encodes the participants, in order.
pub(crate) fn encode(participants: &[Participant]) -> Vec<u8> {
    let (mut out, mut before) = (Vec::new(), [0; ENTRY_WORDS]);
    for participant in participants {
        let words = participant.words();
        let differs = |at: &usize| words[*at] != before[*at];
        let mask = (0..ENTRY_WORDS).filter(differs).fold(0_u16, |mask, at| mask | 1 << at);
        out.extend_from_slice(&mask.to_le_bytes());
        (0..ENTRY_WORDS).filter(differs).for_each(|at| out.extend_from_slice(&words[at].to_le_bytes()));
        before = words;
    }
    out
}

/// Returns the maximum length in bytes of an encoded roster of `count` participants.
pub(crate) fn max_bytes(count: usize) -> usize {
    count * ENTRY_BYTES
}

/// Decodes a roster of `count` participants; `None` if the bytes are no such roster.
pub(crate) fn decode(mut bytes: &[u8], count: usize) -> Option<Vec<Participant>> {
    // Every participant takes a mask at least, so a short roster reserves no memory for many.
    let mut participants = Vec::with_capacity(count.min(bytes.len() / size_of::<u16>()));
    let mut words = [0; ENTRY_WORDS];
    for _ in 0..count {
        let mask = u16::from_le_bytes(*bytes.split_off(..2)?.as_array()?);
        if mask >> ENTRY_WORDS != 0 {
            return None;
        }
        for at in (0..ENTRY_WORDS).filter(|at| mask >> at & 1 == 1) {
            words[at] = u64::from_le_bytes(*bytes.split_off(..WORD_BYTES)?.as_array()?);
        }
        participants.push(Participant::from_words(&words));
    }
    bytes.is_empty().then_some(participants)
}

/// Participants that have come to the first one, each with its connection `C`.
#[derive(Debug)]
pub(crate) struct Registry<C> {
    purpose: Purpose,
    /// The first participant.
    first: Participant,
    /// The others by number, from 1.
    others: Vec<Option<(Participant, C)>>,
    numbered: usize,
    /// Participants that take any free number, in order of arrival.
    unnumbered: Vec<(Participant, C)>,
    /// Address at which other machines reach the first participant, as seen on one of their connections.
    outside: Option<IpAddr>,
}

impl<C> Registry<C> {
    /// Creates the registry of `count` participants, of which `first` has come.
    pub(crate) fn new(purpose: Purpose, count: usize, first: Participant) -> Self {
        let others = (1..count).map(|_| None).collect();
        let outside = Some(first.address).filter(|address| !address.is_unspecified());
        Self { purpose, first, others, numbered: 0, unnumbered: Vec::new(), outside }
    }

    /// Adds a participant, which reached the first one at the address `reached`.
    ///
    /// # Errors
    /// If its number or its count cannot be; returns its connection, so that it can be told.
    pub(crate) fn add(
        &mut self,
        hello: &Hello,
        participant: Participant,
        reached: Option<IpAddr>,
        connection: C,
    ) -> Result<(), (JoinProblem, C)> {
        let (what, count) = (self.purpose.participant(), self.others.len() + 1);
        let (number, theirs) = (hello.rank as usize, hello.ranks as usize);
        if theirs != count {
            return Err((JoinProblem::OtherSize { what, number, theirs, ours: count }, connection));
        }
        if number != ANY && number >= count {
            let allowed = format!("0 to {}", count - 1);
            return Err((JoinProblem::OutOfRange { what, value: number, allowed }, connection));
        }
        if !participant.address.is_loopback() {
            self.outside = reached.or(self.outside);
        }
        if number == ANY {
            self.unnumbered.push((participant, connection));
            return Ok(());
        }
        match number.checked_sub(1).map(|index| &mut self.others[index]) {
            Some(place @ None) => *place = Some((participant, connection)),
            _ => return Err((JoinProblem::Duplicate { what, number }, connection)),
        }
        self.numbered += 1;
        Ok(())
    }

    /// Returns true if all have come.
    pub(crate) fn is_complete(&self) -> bool {
        self.numbered + self.unnumbered.len() >= self.others.len()
    }

    /// Returns the numbers that have not come.
    pub(crate) fn missing(&self) -> Vec<usize> {
        let is_missing = |number: &usize| self.others[*number - 1].is_none();
        (1..=self.others.len()).filter(is_missing).collect()
    }

    /// Gives the free numbers away. Returns all participants in order, and the connections of all but the first by number.
    pub(crate) fn close(mut self) -> (Vec<Participant>, Vec<(usize, C)>) {
        let free = self.others.iter_mut().filter(|place| place.is_none());
        free.zip(self.unnumbered).for_each(|(place, participant)| *place = Some(participant));
        let (mut participants, mut connections) = (vec![self.first], Vec::new());
        for (index, other) in self.others.into_iter().enumerate() {
            if let Some((participant, connection)) = other {
                participants.push(participant);
                connections.push((index + 1, connection));
            }
        }
        for participant in &mut participants {
            // Other machines reach a participant on the first one's machine where they reach the first one.
            if participant.address.is_loopback() || participant.address.is_unspecified() {
                participant.address = self.outside.unwrap_or(participant.address);
            }
        }
        (participants, connections)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use lockstep_plan::random::Draws;
    use proptest::prelude::*;

    use super::*;
    use crate::MAX_WORLD;

    /// Returns what a rank of a host of eight ranks sends.
    fn participant(rank: usize) -> Participant {
        let (mut info, host) = ([0; INFO_BYTES], rank / 8);
        info[..2].copy_from_slice(&((rank * 7919) as u16).to_le_bytes());
        info[4..8].copy_from_slice(&((host * 8) as u32).to_le_bytes());
        info[12..28].copy_from_slice(&blake3::hash(&host.to_le_bytes()).as_bytes()[..16]);
        info[32..64].fill(7);
        Participant { info, address: IpAddr::from(Ipv4Addr::from(0x0a00_0000 + host as u32)) }
    }

    fn hello(rank: usize, ranks: usize) -> Hello {
        Hello { purpose: Purpose::Ranks, rank: rank as u32, ranks: ranks as u32, stream: 0, run: [0; 32] }
    }

    #[test]
    fn the_largest_world_meets_in_any_order_and_its_roster_is_small() {
        let mut registry = Registry::new(Purpose::Ranks, MAX_WORLD, participant(0));
        let mut order: Vec<usize> = (1..MAX_WORLD).collect();
        let mut random = Draws::new(1);
        (1..order.len()).rev().for_each(|last| order.swap(last, random.below(last + 1)));
        for rank in order {
            assert!(!registry.is_complete());
            registry.add(&hello(rank, MAX_WORLD), participant(rank), None, rank).unwrap();
        }
        assert!(registry.is_complete() && registry.missing().is_empty());
        let (participants, connections) = registry.close();
        assert!(participants.iter().enumerate().all(|(rank, found)| *found == participant(rank)));
        assert!(
            connections.iter().all(|(number, rank)| number == rank) && connections.len() == MAX_WORLD - 1
        );
        let bytes = encode(&participants);
        assert!(bytes.len() < 20 * MAX_WORLD, "{} bytes", bytes.len());
        assert!(decode(&bytes, MAX_WORLD) == Some(participants), "another roster");
        assert_eq!(decode(&bytes, MAX_WORLD - 1), None);
        assert_eq!(decode(&bytes[..bytes.len() - 1], MAX_WORLD), None);
    }

    #[test]
    fn a_participant_with_an_impossible_number_is_told_so_and_free_numbers_go_by_arrival() {
        let mut registry = Registry::new(Purpose::Nodes, 4, participant(0));
        let mut add = |rank, ranks| registry.add(&hello(rank, ranks), participant(rank % 4), None, rank);
        add(2, 4).unwrap();
        assert_eq!(add(2, 4).unwrap_err().0, JoinProblem::Duplicate { what: "node", number: 2 });
        assert_eq!(add(0, 4).unwrap_err().0, JoinProblem::Duplicate { what: "node", number: 0 });
        let other_size = JoinProblem::OtherSize { what: "node", number: 1, theirs: 65_536, ours: 4 };
        assert_eq!(add(1, 65_536).unwrap_err().0, other_size);
        assert!(matches!(add(4, 4).unwrap_err().0, JoinProblem::OutOfRange { value: 4, .. }));
        add(ANY, 4).unwrap();
        assert!(!registry.is_complete());
        assert_eq!(registry.missing(), [1, 3]);
        registry.add(&hello(ANY, 4), participant(9), None, 9).unwrap();
        assert!(registry.is_complete());
        let numbers: Vec<_> = registry.close().1;
        assert_eq!(numbers, [(1, ANY), (2, 2), (3, 9)]);
    }

    proptest! {
        #[test]
        fn a_roster_is_read_as_it_was_written(ranks in proptest::collection::vec(0_usize..100_000, 1..40)) {
            let participants: Vec<_> = ranks.into_iter().map(participant).collect();
            prop_assert_eq!(decode(&encode(&participants), participants.len()), Some(participants));
        }

        #[test]
        fn any_bytes_are_a_roster_or_none_and_a_claim_of_many_reserves_no_memory(
            bytes in proptest::collection::vec(any::<u8>(), 0..300), count in 0_usize..1 << 40
        ) {
            if let Some(participants) = decode(&bytes, count) {
                prop_assert!(participants.capacity() <= bytes.len());
            }
            prop_assert!(decode(&bytes, count % 8).is_none_or(|found| found.len() == count % 8));
        }
    }
}
