//! Agreement of a group's members on their calls, before any data of the operation moves.
//!
//! Members of a small group announce their calls to each other. Those of a group of more than `FLAT_MEMBERS` agree along a
//! [`tree`](super::tree): up it goes what a subtree has called, and down the consent. A member that waits for long says for
//! whom.

use std::time::Duration;

use super::{
    frame::{Header, Kind},
    members::Members,
    operation::{Announcement, Running},
    send_queues::SendQueues,
    tree::{Tally, check_announcer, children, parent, subtree},
};
use crate::{Call, CommError, Malformed, exchange::Exchange, task::Flow};

/// Time after which a member says for whom it waits.
pub(crate) const LONG_WAIT: Duration = Duration::from_millis(50);

impl Running {
    /// Returns the members that announce their calls to this one: the peer of a message, all others, or neighbours in the tree.
    pub(crate) fn announcers(&self, members: &Members) -> Vec<usize> {
        match self.peer {
            Some(peer) => vec![peer],
            None if self.is_flat => members.others().collect(),
            None => children(members.own, members.len()).chain(parent(members.own)).collect(),
        }
    }

    /// Takes the announcement of a member.
    pub(crate) fn take_announcement(
        &mut self,
        members: &Members,
        member: usize,
        announcement: Announcement,
    ) -> Result<(), Malformed> {
        if !self.is_flat {
            check_announcer(members.own, member, announcement.data.len())?;
        }
        let known = &mut self.peers.entry(member).or_default().announcement;
        if known.is_some() {
            return Err(Malformed::Operation);
        }
        *known = Some(announcement);
        Ok(())
    }

    pub(crate) fn announcement(&self, member: usize) -> Option<&Announcement> {
        self.peers.get(&member)?.announcement.as_ref()
    }

    /// Returns a member whose announcement to this one is missing.
    pub(crate) fn unannounced(&self, members: &Members) -> Option<usize> {
        let is_missing = |member: &usize| self.announcement(*member).is_none();
        match self.peer {
            Some(peer) => Some(peer).filter(is_missing),
            None if self.is_flat => members.others().find(is_missing),
            None => children(members.own, members.len()).chain(parent(members.own)).find(is_missing),
        }
    }

    /// Returns the member that delays the agreement: the one whose announcement is missing, or the one that it has named.
    pub(crate) fn awaited(&self, members: &Members) -> Option<usize> {
        let missing = self.unannounced(members)?;
        Some(self.peers.get(&missing).and_then(|peer| peer.missing).unwrap_or(missing))
    }

    /// Returns true once all members are known to have made the same call.
    ///
    /// # Errors
    /// If they did not.
    pub(crate) fn agree(&mut self, members: &Members, queues: &mut SendQueues) -> Result<bool, CommError> {
        if self.is_agreed {
            return Ok(true);
        }
        if self.is_flat {
            if self.unannounced(members).is_some() {
                return Ok(false);
            }
            match self.peer {
                Some(peer) => self.compare_with(members, peer)?,
                None => self.compare(members)?,
            }
        } else if !self.agree_along_tree(members, queues)? {
            return Ok(false);
        }
        self.is_agreed = true;
        Ok(true)
    }

    /// Passes the calls of this member's subtree to its parent, and the parent's consent to the children. Returns true once
    /// that is done.
    fn agree_along_tree(&mut self, members: &Members, queues: &mut SendQueues) -> Result<bool, CommError> {
        let call = self.task.call.to_words();
        if !self.has_told_parent {
            if children(members.own, members.len()).any(|child| self.announcement(child).is_none()) {
                return Ok(false);
            }
            let mut tally = Tally::of(members.own, call);
            for child in children(members.own, members.len()) {
                let data = self.announcement(child).map_or(&[][..], |announcement| &announcement.data);
                let theirs = Tally::decode(data, &subtree(child, members.len()));
                tally.add(&theirs.ok_or_else(|| self.malformed(members, child))?);
            }
            self.has_told_parent = true;
            match parent(members.own) {
                Some(parent) => self.announce(members.ranks[parent], &tally.encode(), queues),
                None => {
                    if let Some([(odd, found), (reference, expected)]) = tally.dissent() {
                        let call = |words| Call::from_words(words).unwrap_or(self.task.call);
                        let comparison = self.comparison(members);
                        return Err(comparison.mismatch(odd, call(found), reference, call(expected)));
                    }
                }
            }
        }
        if parent(members.own).is_some_and(|parent| self.announcement(parent).is_none()) {
            return Ok(false);
        }
        for child in children(members.own, members.len()) {
            self.announce(members.ranks[child], &[], queues);
        }
        if let Flow::Unknown { sends, receives } = &self.task.flow {
            let own = members.own;
            self.comparison(members).of_lengths((own, sends[own]), (own, receives[own]))?;
            // Members that disagree on a length are found by the bytes that arrive, or fail to.
            self.task.flow = Flow::Exchange(Exchange::of_own_blocks(own, sends, receives));
        }
        Ok(true)
    }

    /// Queues the announcement of this rank's call to a world rank.
    pub(crate) fn announce(&self, rank: usize, data: &[u8], queues: &mut SendQueues) {
        let header = Header::of(Kind::Announce(self.task.call.to_words()), self.key, data);
        queues.to(rank).control.push_back((header, data.to_vec()));
    }

    /// Tells the neighbours in the tree which member is missing, once that takes long: its parent knows, and all others would
    /// name somebody who waits as well. A neighbour that is missing is thereby connected, and lost if it has left.
    pub(crate) fn name_missing(&mut self, members: &Members, queues: &mut SendQueues) {
        if self.is_flat || self.is_agreed || self.begun_at.elapsed() < LONG_WAIT {
            return;
        }
        let Some(missing) = self.awaited(members).filter(|missing| self.named_missing != Some(*missing))
        else {
            return;
        };
        self.named_missing = Some(missing);
        let waiting_parent = parent(members.own).filter(|_| !self.has_told_parent);
        for member in children(members.own, members.len()).chain(waiting_parent) {
            let note = Kind::Turn { index: missing as u32 };
            queues.tell(members.ranks[member], Header::of(note, self.key, &[]));
        }
    }

    /// Takes note of the member that a neighbour in the tree waits for.
    pub(crate) fn note_missing(&mut self, members: &Members, member: usize, missing: u32) {
        let missing = Some(missing as usize).filter(|missing| *missing < members.len());
        self.peers.entry(member).or_default().missing = missing.filter(|missing| *missing != members.own);
    }

    /// Checks that all ranks made the same call, and completes the plan of an all-to-all with uneven blocks.
    fn compare(&mut self, members: &Members) -> Result<(), CommError> {
        let own = self.task.call.to_words();
        let call = |member| self.announcement(member).map_or(own, |post| post.call);
        let calls: Vec<[u64; 3]> = (0..members.len()).map(call).collect();
        self.comparison(members).of_calls(&calls)?;
        if matches!(self.task.flow, Flow::Unknown { .. }) {
            let tables = self.tables(members.len()).map_err(|member| self.malformed(members, member))?;
            let word = |member: usize, index: usize| tables[member][index];
            self.task.flow = Flow::Exchange(self.comparison(members).of_tables(word)?);
        }
        Ok(())
    }

    /// Returns each member's table of bytes sent to and received from each of `ranks` members.
    ///
    /// # Errors
    /// If a member has attached anything else; returns the first such member.
    fn tables(&self, ranks: usize) -> Result<Vec<Vec<usize>>, usize> {
        let own = Self::eager(&self.task);
        let table = |member| {
            let (words, rest) = self.announcement(member).map_or(&own, |post| &post.data).as_chunks::<8>();
            let table: Vec<usize> = words.iter().map(|word| u64::from_le_bytes(*word) as usize).collect();
            let total = table.iter().try_fold(0_usize, |sum, bytes| sum.checked_add(*bytes));
            (table.len() == 2 * ranks && rest.is_empty() && total.is_some()).then_some(table)
        };
        (0..ranks).map(|member| table(member).ok_or(member)).collect()
    }

    /// Checks that a message matches its receive. A mismatch names the sender as the odd rank.
    fn compare_with(&self, members: &Members, peer: usize) -> Result<(), CommError> {
        let Some(announcement) = self.announcement(peer) else { return Ok(()) };
        let own = self.task.call;
        let is_sender = own.kind == crate::Kind::Send;
        let kind = if is_sender { crate::Kind::Receive } else { crate::Kind::Send };
        if announcement.call == (Call { kind, root: Some(members.own), ..own }).to_words() {
            return Ok(());
        }
        let theirs = Call::from_words(announcement.call).unwrap_or(own);
        let comparison = self.comparison(members);
        Err(if is_sender {
            comparison.mismatch(members.own, own, peer, theirs)
        } else {
            comparison.mismatch(peer, theirs, members.own, own)
        })
    }
}
