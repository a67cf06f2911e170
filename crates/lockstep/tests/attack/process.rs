//! Child processes, and signals to processes.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};

/// Returns the processes whose parent is `parent`, ascending.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let is_child = |pid: &u32| {
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
        // The program's name, in parentheses, may contain anything.
        let Some((_, fields)) = stat.rsplit_once(") ") else { return false };
        fields.split(' ').nth(1) == Some(&parent.to_string())
    };
    let pids = fs::read_dir("/proc").unwrap();
    let pids = pids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut pids: Vec<u32> = pids.filter(is_child).collect();
    pids.sort_unstable();
    pids
}

/// Sends a signal; returns false if the process is gone.
pub(crate) fn send(pid: u32, signal: Signal) -> bool {
    Pid::from_raw(pid as i32).is_some_and(|pid| kill_process(pid, signal).is_ok())
}

/// Returns true if the process exists and is not a zombie.
pub(crate) fn is_alive(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    stat.rsplit_once(") ").is_some_and(|(_, fields)| !fields.starts_with(['Z', 'X']))
}
