//! Memory that is available to this process, and memory that it uses.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Returns the model name of the processor. AArch64 has numbers of implementer and part instead. If the system reports neither, returns
/// the name of the architecture.
pub fn processor_name() -> String {
    let part = || {
        let (implementer, part) = (processor_field("CPU implementer")?, processor_field("CPU part")?);
        Some(format!("{}, implementer {implementer}, part {part}", std::env::consts::ARCH))
    };
    processor_field("model name").or_else(part).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Returns the version of the processor's microcode; empty if the system does not report it.
pub fn microcode() -> String {
    processor_field("microcode").unwrap_or_default()
}

/// Returns the value of a field of the first processor in `/proc/cpuinfo`.
fn processor_field(name: &str) -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let mut fields = info.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
}

/// Returns the number of cores that are online, including those that this process may not use.
pub fn online_cores() -> usize {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.lines().filter(|line| line.starts_with("processor")).count().max(1)
}

/// Returns the bytes available without swapping, by the system and the process's control groups; `None` if neither reports them.
pub fn available_memory_bytes() -> Option<u64> {
    let of_system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available(&text));
    let of_group = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| left_in_group(&text));
    of_system.into_iter().chain(of_group).min()
}

/// Returns the bytes available before the out-of-memory killer acts: with swap, and with file pages that a control group would
/// drop. `None` if the system does not report them.
pub fn takable_memory_bytes() -> Option<u64> {
    let of_system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let swap = kib(&text, "SwapFree:").unwrap_or(0).checked_mul(1024)?;
        mem_available(&text)?.checked_add(swap)
    });
    let of_group = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| takable_in_group(&text));
    of_system.into_iter().chain(of_group).min()
}

/// Returns the peak resident memory of this process, in bytes; 0 if the system does not report it.
pub fn peak_resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    kib(&status, "VmHWM:").map_or(0, |kib| kib * 1024)
}

/// Returns the proportional set size (PSS) of this process, in bytes; 0 if the system does not report it. A page shared with other
/// processes counts by this process's part, so that the sum over processes counts it once. The system walks all page tables for it:
/// milliseconds per gigabyte.
pub fn proportional_bytes() -> u64 {
    // Steps must not allocate, so the text is read into the stack; the file has some 700 bytes.
    let mut text = [0; 4096];
    let mut read = 0;
    let Ok(mut file) = fs::File::open("/proc/self/smaps_rollup") else { return 0 };
    while let Ok(bytes @ 1..) = file.read(&mut text[read..]) {
        read += bytes;
    }
    let text = std::str::from_utf8(&text[..read]).unwrap_or_default();
    kib(text, "Pss:").map_or(0, |kib| kib * 1024)
}

/// Returns [`peak_resident_bytes`] without the parts of currently shared pages that are accounted to other processes.
pub fn peak_own_bytes() -> u64 {
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

/// Returns `MemAvailable` of /proc/meminfo, in bytes.
fn mem_available(meminfo: &str) -> Option<u64> {
    kib(meminfo, "MemAvailable:")?.checked_mul(1024)
}

/// Returns what the tightest limit above the process leaves. Inactive file pages count as free, since the system drops them first;
/// active ones count as used, although it could drop them too.
fn left_in_group(cgroup: &str) -> Option<u64> {
    groups_of(cgroup).iter().filter_map(Group::left).min()
}

/// Returns what the tightest limit leaves after dropping and swapping all that is possible.
fn takable_in_group(cgroup: &str) -> Option<u64> {
    groups_of(cgroup).iter().filter_map(Group::takable).min()
}

/// A memory control group, of cgroup version 1 or 2.
#[derive(Debug)]
struct Group {
    path: PathBuf,
    files: &'static Files,
}

/// File names of a cgroup version.
#[derive(Debug)]
struct Files {
    /// Mount point of its hierarchy.
    root: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Keys of inactive and active file pages in the group's statistics.
    inactive_files: &'static str,
    active_files: &'static str,
    swap_limit: &'static str,
    swap_used: &'static str,
    /// True if the two numbers of swap include memory.
    swap_has_memory: bool,
}

const VERSION_2: Files = Files {
    root: "/sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    inactive_files: "inactive_file ",
    active_files: "active_file ",
    swap_limit: "memory.swap.max",
    swap_used: "memory.swap.current",
    swap_has_memory: false,
};

const VERSION_1: Files = Files {
    root: "/sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    inactive_files: "total_inactive_file ",
    active_files: "total_active_file ",
    swap_limit: "memory.memsw.limit_in_bytes",
    swap_used: "memory.memsw.usage_in_bytes",
    swap_has_memory: true,
};

/// Returns the memory control groups of a process, from its own to the outermost, by its `/proc/self/cgroup`. In a container its
/// own group is the outermost, whatever its path outside.
fn groups_of(cgroup: &str) -> Vec<Group> {
    let own = |line: &'static Files, path: &str| {
        let root = Path::new(line.root);
        let own = root.join(path.trim_start_matches('/'));
        let groups = own.ancestors().take_while(|group| group.starts_with(root));
        groups.map(|path| Group { path: path.to_owned(), files: line }).collect::<Vec<_>>()
    };
    let of_line = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        match (parts.next()?, parts.next()?) {
            ("", path) => Some(own(&VERSION_2, path)),
            (controllers, path) if controllers.split(',').any(|name| name == "memory") => {
                Some(own(&VERSION_1, path))
            }
            _ => None,
        }
    };
    cgroup.lines().filter_map(of_line).flatten().collect()
}

impl Group {
    fn number(&self, name: &str) -> Option<u64> {
        fs::read_to_string(self.path.join(name)).ok()?.trim().parse().ok()
    }

    /// Returns a number of the group's statistics; 0 if it is missing.
    fn counted(&self, name: &str) -> u64 {
        let stat = fs::read_to_string(self.path.join("memory.stat")).unwrap_or_default();
        let value = |line: &str| line.strip_prefix(name)?.trim().parse().ok();
        stat.lines().find_map(value).unwrap_or(0)
    }

    /// Returns what the group's limit leaves; `None` without a limit. The unlimited value of version 1 exceeds all memory.
    fn left(&self) -> Option<u64> {
        let used = self.number(self.files.used)?.saturating_sub(self.counted(self.files.inactive_files));
        Some(self.number(self.files.limit)?.saturating_sub(used))
    }

    /// Returns what the group's limit leaves after dropping its file pages and swapping as much as it may.
    fn takable(&self) -> Option<u64> {
        let left = self.left()?;
        let dropped = self.counted(self.files.active_files);
        // Without a swap limit of the group, the system's free swap is the limit.
        let swap = self.number(self.files.swap_limit).map_or(u64::MAX, |limit| {
            let swap = limit.saturating_sub(self.number(self.files.swap_used).unwrap_or(0));
            if self.files.swap_has_memory { swap.saturating_sub(left) } else { swap }
        });
        let of_system = kib(&fs::read_to_string("/proc/meminfo").ok()?, "SwapFree:").unwrap_or(0) * 1024;
        Some(left.saturating_add(dropped).saturating_add(swap.min(of_system)))
    }
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
        // In this order: other tests allocate meanwhile, and a peak only rises.
        let (own, resident) = (peak_own_bytes(), peak_resident_bytes());
        assert!(own > 0 && own <= resident && resident - own < resident / 2, "{own} of {resident}");
    }

    fn group(files: &'static Files, numbers: &[(&str, &str)]) -> (tempfile::TempDir, Group) {
        let dir = tempfile::tempdir().unwrap();
        numbers.iter().for_each(|(name, text)| fs::write(dir.path().join(name), text).unwrap());
        let group = Group { path: dir.path().to_owned(), files };
        (dir, group)
    }

    #[test]
    fn a_group_leaves_its_limit_less_what_it_holds() {
        for files in [&VERSION_1, &VERSION_2] {
            assert_eq!(group(files, &[]).1.left(), None);
            for (limit, left) in [("max\n", None), ("1000\n", Some(700)), ("200\n", Some(0))] {
                let (_dir, group) = group(files, &[(files.limit, limit), (files.used, "300\n")]);
                assert_eq!(group.left(), left, "{limit}");
            }
        }
    }

    #[test]
    fn a_group_that_drops_its_files_leaves_more() {
        let numbers = [("memory.max", "1000\n"), ("memory.current", "900\n"), ("memory.swap.max", "0\n")];
        let stat = ("memory.stat", "anon 500\ninactive_file 250\nactive_file 50\nactive_anon 7\n");
        let (_dir, group) = group(&VERSION_2, &[&numbers[..], &[stat]].concat());
        assert_eq!((group.left(), group.takable()), (Some(350), Some(400)));
    }

    #[test]
    fn limits_of_memory_and_swap_together_are_those_of_swap_less_what_memory_is_left() {
        let numbers = [
            ("memory.limit_in_bytes", "1000\n"),
            ("memory.usage_in_bytes", "900\n"),
            ("memory.stat", "inactive_file 7\ntotal_inactive_file 250\ntotal_active_file 50\n"),
            ("memory.memsw.limit_in_bytes", "1000\n"),
            ("memory.memsw.usage_in_bytes", "950\n"),
        ];
        let (_dir, group) = group(&VERSION_1, &numbers);
        assert_eq!((group.left(), group.takable()), (Some(350), Some(400)));
    }

    #[test]
    fn the_groups_of_both_versions_are_found_up_to_the_outermost() {
        let text = "9:name=systemd:/\n5:memory,hugetlb:/docker/abc\n1:cpu:/docker/abc\n0::/user.slice/run\n";
        let groups = groups_of(text);
        let paths: Vec<&str> = groups.iter().filter_map(|group| group.path.to_str()).collect();
        let expected = [
            "/sys/fs/cgroup/memory/docker/abc",
            "/sys/fs/cgroup/memory/docker",
            "/sys/fs/cgroup/memory",
            "/sys/fs/cgroup/user.slice/run",
            "/sys/fs/cgroup/user.slice",
            "/sys/fs/cgroup",
        ];
        assert_eq!(paths, expected);
        assert_eq!(groups_of("nonsense\n\n::\n1:memory").len(), 1);
    }
}
