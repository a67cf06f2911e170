//! Reasons why ranks, or the launchers of several machines, cannot come together.

use std::{io, path::PathBuf};

/// Reason why ranks cannot come together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JoinProblem {
    /// The other end is not Lockstep, or another version of it.
    #[error("the other end speaks version {theirs}, this program {ours}")]
    Version {
        /// Protocol version of the other end; 0 if it does not speak the protocol at all.
        theirs: u32,
        /// Protocol version of this program.
        ours: u32,
    },
    /// The inherited descriptor is not a socket.
    #[error("{variable} = {value:?} is not a descriptor of a socket")]
    Descriptor {
        /// Name of the environment variable.
        variable: &'static str,
        /// Value of that variable.
        value: String,
    },
    /// A number is outside its allowed range.
    #[error("{what} {value} is not allowed: {allowed}")]
    OutOfRange {
        /// Name of the number.
        what: &'static str,
        /// Value of the number.
        value: usize,
        /// Allowed range, for the message.
        allowed: String,
    },
    /// The other end closed the connection.
    #[error("the launcher has gone")]
    HungUp,
    /// The two ends have different secrets, or one of them has none.
    #[error(
        "the other end has another secret than this one, or none: compare --secret-file, or --pairing-code, of both"
    )]
    Secret,
    /// The secret cannot be used.
    #[error("the secret in {path:?} cannot be used: {what}")]
    SecretFile {
        /// Path of the secret file.
        path: PathBuf,
        /// Reason, for the message.
        what: String,
    },
    /// The address where ranks meet is reachable from other machines, and the run has no secret.
    #[error(
        "{host} can be reached from other machines, and this run has no secret to keep strangers out: give the pairing code that node 0 prints (--pairing-code), or name the same file of 32 random bytes, which only you can read, on every machine (--secret-file, LOCKSTEP_SECRET_FILE)"
    )]
    NoSecret {
        /// Host where ranks meet.
        host: String,
    },
    /// Another run meets at this address.
    #[error("the other end belongs to another run (--rdzv-id)")]
    OtherRun,
    /// A connection broke or timed out.
    #[error("a connection failed: {0}")]
    Connection(io::ErrorKind),
    /// The address where ranks meet cannot be used.
    #[error("cannot meet at {address}: {what}")]
    Address {
        /// The address that was tried.
        address: String,
        /// Reason, for the message.
        what: String,
    },
    /// Some ranks or nodes did not come in time.
    #[error(
        "{} did not come within {waited_s} s: {}{}{rejections}",
        list(what, missing),
        "are they running, and can they reach this machine?",
        if rejections.is_empty() { "" } else { "; " }
    )]
    Missing {
        /// `rank` or `node`.
        what: &'static str,
        /// Numbers of the missing ranks or nodes.
        missing: Vec<usize>,
        /// Waiting time in seconds.
        waited_s: u64,
        /// Connections that were turned away meanwhile, worded for the message; empty if there were none.
        rejections: String,
    },
    /// Two processes claim the same number.
    #[error("two processes say that they are {what} {number}")]
    Duplicate {
        /// `rank` or `node`.
        what: &'static str,
        /// Number that both claim.
        number: usize,
    },
    /// Ranks or nodes disagree on how many of them there are.
    #[error("{what} {number} was started as one of {theirs}, {what} 0 as one of {ours}")]
    OtherSize {
        /// `rank` or `node`.
        what: &'static str,
        /// Number of the one that disagrees with number 0.
        number: usize,
        /// Count that it expects.
        theirs: usize,
        /// Count that number 0 expects.
        ours: usize,
    },
    /// A rank was given another configuration than rank 0.
    #[error(
        "rank {rank} was started with other settings than rank 0: give all ranks the same file and the same --set"
    )]
    OtherPlan {
        /// World rank of the process.
        rank: usize,
    },
    /// MPI was started a second time in one process.
    #[error("MPI was started before")]
    Again,
}

/// Maximum number of numbers that a message lists.
const LISTED: usize = 16;

/// Formats numbers as in `ranks 2, 5 and 7`.
fn list(what: &str, numbers: &[usize]) -> String {
    match numbers {
        [number] => format!("{what} {number}"),
        [first @ .., _] if first.len() >= LISTED => {
            let listed: Vec<String> = first[..LISTED].iter().map(usize::to_string).collect();
            format!("{what}s {} and {} more", listed.join(", "), numbers.len() - LISTED)
        }
        [numbers @ .., last] => {
            let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
            format!("{what}s {} and {last}", numbers.join(", "))
        }
        [] => format!("no {what}"),
    }
}
