//! Descriptors that this process may have open: each connection to another process takes one.

use std::io;

use rustix::{
    io::Errno,
    process::{Resource, Rlimit, getrlimit, setrlimit},
};

use crate::JoinProblem;

/// Number of descriptors that a process needs beside those of the participants of a rendezvous.
const SPARE_DESCRIPTORS: usize = 256;

/// Raises the number of descriptors that this process may have open to the maximum that the system allows, if it can.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
    {
        tracing::debug!(%error, "cannot raise the limit of descriptors");
    }
}

/// Lets this process open a descriptor for each of `count` participants.
///
/// # Errors
/// If the system does not allow that many.
pub(crate) fn allow_descriptors(count: usize) -> Result<(), JoinProblem> {
    raise_limit();
    let wanted = (count + SPARE_DESCRIPTORS) as u64;
    let Some(allowed) = getrlimit(Resource::Nofile).current.filter(|allowed| *allowed < wanted) else {
        return Ok(());
    };
    let most = allowed.saturating_sub(SPARE_DESCRIPTORS as u64);
    let allowed = format!(
        "at most {most} where a process may open {allowed} files; raise the limit on the machine of rank 0 (ulimit -Hn)"
    );
    Err(JoinProblem::OutOfRange { what: "number of ranks", value: count, allowed })
}

/// Returns true for an error that means that this process, or this machine, has no descriptors left.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    [Errno::MFILE, Errno::NFILE].map(|errno| Some(errno.raw_os_error())).contains(&error.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_for_more_participants_than_the_system_allows_are_refused_with_the_limit() {
        assert_eq!(allow_descriptors(2), Ok(()));
        let Some(most) = getrlimit(Resource::Nofile).maximum else { return };
        let text = allow_descriptors(most as usize).unwrap_err().to_string();
        assert!(text.contains(&format!("a process may open {most} files")), "{text}");
    }

    #[test]
    fn only_missing_descriptors_are_a_shortage() {
        for errno in [Errno::MFILE, Errno::NFILE] {
            assert!(is_shortage(&errno.into()), "{errno:?}");
        }
        assert!(!is_shortage(&Errno::CONNREFUSED.into()));
        assert!(!is_shortage(&io::ErrorKind::TimedOut.into()));
    }
}
