//! Advice on errors that come from limits of the system on this process (`ulimit`, cgroups).

/// Advice if threads or processes are refused.
const TASKS: &str = "the system allows no more threads or processes: raise ulimit -u, pids.max (TasksMax) of the cgroup, or ulimit -v";
/// Advice if memory is refused.
const MEMORY: &str = "the system gives no more memory: raise ulimit -v, where that is set, or take less";
/// Advice if a file may not grow.
const FILES: &str = "files may not become so large: raise ulimit -f";

/// Returns advice if `message` reports a refused resource.
pub(crate) fn hint(message: &str) -> Option<&'static str> {
    // A socket without data to read reports EAGAIN too.
    let is_of_task = ["start", "thread", "watch for"].iter().any(|word| message.contains(word));
    let is_unnumbered = message.contains("cannot start") && message.contains("compute thread");
    if is_unnumbered || is_of_task && message.contains("(os error 11)") {
        return Some(TASKS);
    }
    let found = [("(os error 12)", MEMORY), ("(os error 27)", FILES)];
    found.into_iter().find(|(code, _)| message.contains(code)).map(|(_, hint)| hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_told_with_the_limit_that_does_it() {
        let text = format!("cannot start a rank: {}", std::io::Error::from_raw_os_error(11));
        assert!(hint(&text).is_some_and(|hint| hint.contains("ulimit -u")), "{text}");
        let text = format!("cannot append to x: {}", std::io::Error::from_raw_os_error(27));
        assert!(hint(&text).is_some_and(|hint| hint.contains("ulimit -f")), "{text}");
        assert!(hint("cannot start 2 compute threads").is_some());
        for other in
            ["rank 1 was lost", "cannot receive a frame: Resource temporarily unavailable (os error 11)"]
        {
            assert_eq!(hint(other), None);
        }
    }
}
