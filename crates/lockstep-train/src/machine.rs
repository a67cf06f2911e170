//! How much memory the system could still give this process, and how much it has taken.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Bytes that can be taken without swapping, as far as the system and the process's control group tell.
pub(crate) fn available_memory_bytes() -> Option<u64> {
    let of_system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available(&text));
    let of_group = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| left_in_group(&text));
    of_system.into_iter().chain(of_group).min()
}

/// Bytes that can be taken before the system has to end somebody: swap counts, and pages of files that a control group
/// would drop. None where the system does not say.
pub(crate) fn takable_memory_bytes() -> Option<u64> {
    let of_system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let swap = kib(&text, "SwapFree:").unwrap_or(0).checked_mul(1024)?;
        mem_available(&text)?.checked_add(swap)
    });
    let of_group = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| of_groups(&text, takable_in));
    of_system.into_iter().chain(of_group).min()
}

/// The most bytes that this process ever had resident; 0 where the system does not say.
pub(crate) fn peak_resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    kib(&status, "VmHWM:").map_or(0, |kib| kib * 1024)
}

/// Bytes of this process that are resident, of pages that it shares with others its part (PSS: the sum over processes counts
/// every page once); 0 where the system does not say. The system walks all page tables for it: milliseconds for each
/// gigabyte.
pub(crate) fn proportional_bytes() -> u64 {
    // A step that asks for it allocates nothing; the file has some 700 bytes.
    let mut text = [0; 4096];
    let mut read = 0;
    let Ok(mut file) = fs::File::open("/proc/self/smaps_rollup") else { return 0 };
    while let Ok(bytes @ 1..) = file.read(&mut text[read..]) {
        read += bytes;
    }
    let text = std::str::from_utf8(&text[..read]).unwrap_or_default();
    kib(text, "Pss:").map_or(0, |kib| kib * 1024)
}

/// [`peak_resident_bytes`] without what other processes answer for of the pages that are shared with them now.
pub(crate) fn peak_own_bytes() -> u64 {
    let maps = fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let of_others = match (kib(&maps, "Rss:"), kib(&maps, "Pss:")) {
        (Some(resident), Some(own)) => resident.saturating_sub(own) * 1024,
        _ => 0,
    };
    peak_resident_bytes().saturating_sub(of_others)
}

fn kib(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// `MemAvailable` of /proc/meminfo.
fn mem_available(meminfo: &str) -> Option<u64> {
    kib(meminfo, "MemAvailable:")?.checked_mul(1024)
}

/// What the tightest limit above the process leaves (control groups, version 2). Pages of files that a group
/// holds count as used here though the system would drop them: this errs to the side of care.
fn left_in_group(cgroup: &str) -> Option<u64> {
    of_groups(cgroup, left_in)
}

/// The least that any group above the process has of something.
fn of_groups(cgroup: &str, of_group: impl Fn(&Path) -> Option<u64>) -> Option<u64> {
    let root = Path::new("/sys/fs/cgroup");
    let own = root.join(cgroup.lines().find_map(|line| line.strip_prefix("0::/"))?);
    own.ancestors().take_while(|group| group.starts_with(root)).filter_map(of_group).min()
}

/// What a group's limit leaves if it drops what it can, and swaps as far as it may.
fn takable_in(group: &Path) -> Option<u64> {
    let left = left_in(group)?;
    let text = |name: &str| fs::read_to_string(group.join(name)).unwrap_or_default();
    let stat = text("memory.stat");
    let of_files = |key: &str| -> u64 {
        let value = |line: &str| line.strip_prefix(key)?.trim().parse().ok();
        stat.lines().find_map(value).unwrap_or(0)
    };
    let dropped = of_files("active_file ").saturating_add(of_files("inactive_file "));
    let number = |name: &str| text(name).trim().parse::<u64>().ok();
    // No limit of its own: the system's counts.
    let swap = number("memory.swap.max")
        .map_or(u64::MAX, |limit| limit.saturating_sub(number("memory.swap.current").unwrap_or(0)));
    let swap = swap.min(kib(&fs::read_to_string("/proc/meminfo").ok()?, "SwapFree:").unwrap_or(0) * 1024);
    Some(left.saturating_add(dropped).saturating_add(swap))
}

fn left_in(group: &Path) -> Option<u64> {
    let number = |file: PathBuf| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let limit = number(group.join("memory.max"))?;
    Some(limit.saturating_sub(number(group.join("memory.current"))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_available_memory_is_read_in_bytes_and_nothing_else_is_taken_for_it() {
        let text = "MemTotal:       24689492 kB\nMemFree:   1 kB\nMemAvailable:   20123456 kB\n";
        assert_eq!(mem_available(text), Some(20_123_456 * 1024));
        for text in ["", "MemAvailable: many kB", "MemAvailable: 3", "MemTotal: 7 kB"] {
            assert_eq!(mem_available(text), None, "{text:?}");
        }
    }

    #[test]
    fn pages_that_are_shared_with_nobody_are_all_this_process_s_own() {
        let (resident, own) = (peak_resident_bytes(), peak_own_bytes());
        assert!(own > 0 && own <= resident && resident - own < resident / 2, "{own} of {resident}");
    }

    #[test]
    fn a_group_leaves_its_limit_less_what_it_holds() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(left_in(dir.path()), None);
        fs::write(dir.path().join("memory.current"), "300\n").unwrap();
        for (limit, left) in [("max\n", None), ("1000\n", Some(700)), ("200\n", Some(0))] {
            fs::write(dir.path().join("memory.max"), limit).unwrap();
            assert_eq!(left_in(dir.path()), left, "{limit}");
        }
    }

    #[test]
    fn a_group_that_drops_its_files_leaves_more() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("memory.max", "1000\n"),
            ("memory.current", "900\n"),
            ("memory.stat", "anon 500\ninactive_file 250\nactive_file 50\nactive_anon 7\n"),
            ("memory.swap.max", "0\n"),
        ] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        assert_eq!((left_in(dir.path()), takable_in(dir.path())), (Some(100), Some(400)));
    }
}
