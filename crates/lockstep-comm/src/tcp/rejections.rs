//! Statistics of rejected connections: number, address and reason.

use std::{
    fmt,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::handshake::Refusal;

/// Number of pairs of address and reason that are counted separately; the rest is counted together.
const ENTRIES: usize = 64;
/// Number of entries that a message names.
const NAMED: usize = 3;
/// Minimum time between two messages.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);
/// Time from the first rejection to the first message, so that one message can report a flood.
const FIRST_REPORT: Duration = Duration::from_millis(500);

/// Connections that a rendezvous has rejected so far. Clones share the statistics.
#[derive(Debug, Clone, Default)]
pub struct Rejections(Arc<Mutex<Counts>>);

#[derive(Debug, Default)]
struct Counts {
    entries: Vec<(IpAddr, Refusal, u64)>,
    others: u64,
    /// Number of connections that no message has reported yet.
    unreported: u64,
    /// Earliest time of the next message.
    next: Option<Instant>,
}

impl Rejections {
    /// Counts one rejected connection.
    pub(crate) fn add(&self, address: IpAddr, refusal: Refusal) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.unreported += 1;
        counts.next.get_or_insert_with(|| Instant::now() + FIRST_REPORT);
        let known = counts.entries.iter().position(|entry| (entry.0, entry.1) == (address, refusal));
        match known {
            Some(known) => counts.entries[known].2 += 1,
            None if counts.entries.len() < ENTRIES => counts.entries.push((address, refusal, 1)),
            None => counts.others += 1,
        }
    }

    /// Logs a warning about rejections since the last one, if that is long enough ago or `at_once` is true.
    pub(crate) fn report(&self, at_once: bool) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if counts.unreported > 0 && (at_once || counts.next.is_some_and(|next| now >= next)) {
            (counts.unreported, counts.next) = (0, Some(now + REPORT_INTERVAL));
            tracing::warn!("{counts} (in all, while waiting for the others)");
        }
    }

    /// Returns the number of rejected connections.
    pub fn count(&self) -> u64 {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.entries.iter().map(|entry| entry.2).sum::<u64>() + counts.others
    }
}

impl fmt::Display for Rejections {
    /// Writes `turned away 132 connections from 10.0.0.7: no greeting within 5 s`; nothing if there was none.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).fmt(f)
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut entries = self.entries.clone();
        entries.sort_by_key(|(_, _, count)| std::cmp::Reverse(*count));
        for (index, (address, refusal, count)) in entries.iter().take(NAMED).enumerate() {
            let start = if index == 0 { "turned away " } else { "; " };
            let connections = if *count == 1 { "connection" } else { "connections" };
            write!(f, "{start}{count} {connections} from {address}: {refusal}")?;
        }
        match entries.iter().skip(NAMED).map(|entry| entry.2).sum::<u64>() + self.others {
            0 => Ok(()),
            rest => write!(f, "; {rest} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn the_most_frequent_are_named_and_the_account_does_not_grow() {
        let counts = Rejections::default();
        assert_eq!(counts.to_string(), "");
        let address = |last: u32| IpAddr::from(Ipv4Addr::from(0x0a00_0000 + last));
        counts.add(address(7), Refusal::Garbage);
        for _ in 0..132 {
            counts.add(address(7), Refusal::Late);
        }
        let text = "turned away 132 connections from 10.0.0.7: no greeting within 5 s; 1 connection from 10.0.0.7: \
             it does not speak this protocol";
        assert_eq!(counts.to_string(), text);
        (0..10_000).for_each(|host| counts.add(address(host), Refusal::HungUp));
        assert_eq!(counts.count(), 10_133);
        assert_eq!(counts.0.lock().unwrap().entries.len(), ENTRIES);
        assert!(counts.to_string().ends_with("; 9999 more"), "{counts}");
    }
}
