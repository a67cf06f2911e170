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
const BETWEEN: Duration = Duration::from_secs(5);
/// Time from the first rejection to the first message, so that one message can report a flood.
const GATHERING: Duration = Duration::from_millis(500);

/// Connections that a rendezvous has rejected so far. Clones share the statistics.
#[derive(Debug, Clone, Default)]
pub struct Rejections(Arc<Mutex<Account>>);

#[derive(Debug, Default)]
struct Account {
    entries: Vec<(IpAddr, Refusal, u64)>,
    others: u64,
    /// Number of connections that no message has reported yet.
    untold: u64,
    /// Earliest time of the next message.
    next: Option<Instant>,
}

impl Rejections {
    /// Counts one rejected connection.
    pub(crate) fn add(&self, address: IpAddr, refusal: Refusal) {
        let mut account = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        account.untold += 1;
        account.next.get_or_insert_with(|| Instant::now() + GATHERING);
        let known = account.entries.iter().position(|entry| (entry.0, entry.1) == (address, refusal));
        match known {
            Some(known) => account.entries[known].2 += 1,
            None if account.entries.len() < ENTRIES => account.entries.push((address, refusal, 1)),
            None => account.others += 1,
        }
    }

    /// Logs a warning about rejections since the last one, if that is long enough ago or `at_once` is true.
    pub(crate) fn tell(&self, at_once: bool) {
        let mut account = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if account.untold > 0 && (at_once || account.next.is_some_and(|next| now >= next)) {
            (account.untold, account.next) = (0, Some(now + BETWEEN));
            tracing::warn!("{account} (in all, while waiting for the others)");
        }
    }

    /// Returns the number of rejected connections.
    pub fn count(&self) -> u64 {
        let account = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        account.entries.iter().map(|entry| entry.2).sum::<u64>() + account.others
    }
}

impl fmt::Display for Rejections {
    /// Writes `turned away 132 connections from 10.0.0.7: no greeting within 5 s`; nothing if there was none.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).fmt(f)
    }
}

impl fmt::Display for Account {
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
        let account = Rejections::default();
        assert_eq!(account.to_string(), "");
        let address = |last: u32| IpAddr::from(Ipv4Addr::from(0x0a00_0000 + last));
        account.add(address(7), Refusal::Garbage);
        for _ in 0..132 {
            account.add(address(7), Refusal::Late);
        }
        let text = "turned away 132 connections from 10.0.0.7: no greeting within 5 s; 1 connection from 10.0.0.7: \
             it does not speak this protocol";
        assert_eq!(account.to_string(), text);
        (0..10_000).for_each(|host| account.add(address(host), Refusal::HungUp));
        assert_eq!(account.count(), 10_133);
        assert_eq!(account.0.lock().unwrap().entries.len(), ENTRIES);
        assert!(account.to_string().ends_with("; 9999 more"), "{account}");
    }
}
