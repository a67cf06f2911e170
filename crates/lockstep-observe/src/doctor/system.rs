//! Checks of processor, memory, disks and process limits, from the text files of /proc and /sys.
//!
//! Each file has a parser that a test can call with a text. A value that the system does not provide yields no finding.

use std::fs;
use std::path::{Path, PathBuf};

use lockstep_config::human;
use lockstep_tensor::CpuLevel;
use lockstep_tensor::host::{available_memory_bytes, online_cores, processor_name};
use lockstep_tensor::topology::Topology;

use super::finding::{Finding, Status};

const OTHER_DIRECTORY: &str = "choose another directory with --checkpoint-dir, and checkpoint.dir in the run";
/// Free disk space below which a warning is given: too little for checkpoints.
const SMALL_DISK_BYTES: u64 = 2 << 30;
/// Memory below which a warning is given: too little to train a useful model.
const SMALL_MEMORY_BYTES: u64 = 1 << 30;
/// Limit on open files below which a warning is given: large runs need more for ranks, shards and sockets.
const FEW_FILES: u64 = 1024;

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Returns the number of threads that this process may use.
pub(super) fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

pub(super) fn processor() -> Vec<Finding> {
    let section = "processor";
    let model = processor_name();
    let mut findings = vec![
        Finding::ok(section, "model", model),
        Finding::ok(section, "instructions", CpuLevel::detect().to_string()),
    ];
    let online = online_cores();
    let usable = threads();
    let used = Finding::ok(section, "threads", format!("{usable} of {online} cores"));
    let status = read("/proc/self/status").unwrap_or_default();
    let affinity = field(&status, "Cpus_allowed_list").unwrap_or("all");
    let advice = "the affinity or the control group of this process keeps it off the others";
    findings.push(used.warned_if(usable < online, advice));
    findings.push(Finding::ok(section, "affinity", format!("cores {affinity}")));
    let topology = Topology::current();
    let ranks = topology.ranks_by_node().map(|ranks| format!("; auto is {ranks} ranks, one for each node"));
    findings.push(Finding::ok(section, "topology", format!("{topology}{}", ranks.unwrap_or_default())));
    if let Some(cores) = group_cores() {
        findings.push(Finding::ok(section, "control group", format!("{cores:.1} cores")));
    }
    findings
}

pub(super) fn memory() -> Vec<Finding> {
    let section = "memory";
    let mut findings = Vec::new();
    let info = read("/proc/meminfo").unwrap_or_default();
    let kib = |name| field(&info, name).and_then(|value| value.split(' ').next()?.parse::<u64>().ok());
    if let Some(total) = kib("MemTotal") {
        let installed = human::bytes(total.saturating_mul(1024)).to_string();
        findings.push(Finding::ok(section, "installed", installed));
    }
    if let Some(available) = available_memory_bytes() {
        let value = format!("{} (control group included)", human::bytes(available));
        let advice = "close other programs, or raise the memory limit of the control group";
        let is_small = available < SMALL_MEMORY_BYTES;
        findings.push(Finding::ok(section, "available", value).warned_if(is_small, advice));
    }
    if let Some(text) = read("/sys/kernel/mm/transparent_hugepage/enabled") {
        let chosen = chosen_word(&text).unwrap_or("unknown").to_owned();
        let finding = Finding::ok(section, "huge pages", format!("transparent: {chosen}"));
        let advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled makes large buffers faster";
        findings.push(finding.warned_if(chosen == "never", advice));
    }
    if let Some(text) = read("/sys/kernel/mm/transparent_hugepage/shmem_enabled") {
        let chosen = chosen_word(&text).unwrap_or("unknown").to_owned();
        let is_refused = refuses_shared_huge_pages(&chosen);
        let finding = Finding::ok(section, "shared memory", format!("huge pages: {chosen}"));
        let advice = "ranks of one machine share buffers in small pages; \
                      echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled allows huge ones";
        findings.push(finding.warned_if(is_refused, advice));
    }
    findings
}

pub(super) fn disks(checkpoint_dir: &Path) -> Vec<Finding> {
    let section = "disk";
    let mut findings = Vec::new();
    let there = nearest_existing(checkpoint_dir);
    let name = format!("checkpoints in {}", checkpoint_dir.display());
    let free = rustix::fs::statvfs(&there).map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    let is_writable = rustix::fs::access(&there, rustix::fs::Access::WRITE_OK).is_ok();
    findings.push(match free {
        _ if !there.is_dir() => Finding::ok(section, name, format!("{} is not a directory", there.display()))
            .with(Status::Missing, OTHER_DIRECTORY),
        _ if !is_writable => {
            Finding::ok(section, name, "not writable").with(Status::Missing, OTHER_DIRECTORY)
        }
        Err(error) => Finding::ok(section, name, format!("unknown: {error}"))
            .with(Status::Warning, "the file system does not say how much room it has"),
        Ok(free) if free < SMALL_DISK_BYTES => {
            Finding::ok(section, name, format!("{} free", human::bytes(free)))
                .with(Status::Warning, "a checkpoint takes 12 bytes for each parameter; free some space")
        }
        Ok(free) => Finding::ok(section, name, format!("{} free", human::bytes(free))),
    });
    let shared = Path::new("/dev/shm");
    let value = match rustix::fs::statvfs(shared) {
        Ok(disk) if shared.is_dir() => {
            format!("{} free", human::bytes(disk.f_bavail.saturating_mul(disk.f_frsize)))
        }
        _ => "not there".to_owned(),
    };
    findings.push(Finding::ok(section, "/dev/shm", format!("{value} (not used yet)")));
    findings
}

pub(super) fn process_limits() -> Vec<Finding> {
    let section = "limits";
    let limits = read("/proc/self/limits").unwrap_or_default();
    let mut findings = Vec::new();
    if let Some(files) = soft_limit(&limits, "Max open files") {
        let finding = Finding::ok(section, "open files", files);
        let is_low = files.parse::<u64>().is_ok_and(|files| files < FEW_FILES);
        let advice = format!("ulimit -n {FEW_FILES} gives room for shards and sockets");
        findings.push(finding.warned_if(is_low, advice));
    }
    if let Some(locked) = soft_limit(&limits, "Max locked memory") {
        let value =
            locked.parse().map_or_else(|_| locked.to_owned(), |bytes| human::bytes(bytes).to_string());
        findings.push(Finding::ok(section, "locked memory", format!("{value} (not used yet)")));
    }
    findings
}

/// Returns the value of `name` in a text of `name: value` lines.
fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
}

/// Returns the soft limit from a line of /proc/self/limits.
fn soft_limit<'t>(limits: &'t str, name: &str) -> Option<&'t str> {
    limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()
}

/// The word in brackets, as in `always [madvise] never`.
fn chosen_word(text: &str) -> Option<&str> {
    Some(text.split_once('[')?.1.split_once(']')?.0)
}

/// Returns true if the word of `shmem_enabled` keeps shared memory in small pages, although it is advised to use huge ones.
fn refuses_shared_huge_pages(word: &str) -> bool {
    matches!(word, "never" | "deny")
}

/// Returns the number of cores that the control groups of this process allow (cgroup v2).
fn group_cores() -> Option<f64> {
    let groups = read("/proc/self/cgroup")?;
    let root = Path::new("/sys/fs/cgroup");
    let own = root.join(groups.lines().find_map(|line| line.strip_prefix("0::/"))?);
    own.ancestors()
        .take_while(|group| group.starts_with(root))
        .filter_map(|group| cores_of(&fs::read_to_string(group.join("cpu.max")).ok()?))
        .min_by(f64::total_cmp)
}

/// Returns the cores that `cpu.max` allows (`QUOTA PERIOD` in microseconds); `None` without a limit.
fn cores_of(cpu_max: &str) -> Option<f64> {
    let (quota, period) = cpu_max.trim().split_once(' ')?;
    let (quota, period) = (quota.parse::<f64>().ok()?, period.parse::<f64>().ok()?);
    (period > 0.0).then_some(quota / period)
}

/// Returns the directory, or its nearest ancestor that exists.
fn nearest_existing(dir: &Path) -> PathBuf {
    let above = dir.ancestors().filter(|path| !path.as_os_str().is_empty());
    above.into_iter().find(|path| path.exists()).map_or_else(|| PathBuf::from("."), Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_linux_are_understood() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
                      Max locked memory         8388608              unlimited            bytes\n\
                      Max open files            1024                 524288               files\n";
        assert_eq!(soft_limit(limits, "Max open files"), Some("1024"));
        assert_eq!(soft_limit(limits, "Max locked memory"), Some("8388608"));
        assert_eq!(field("a\t: 1\nmodel name\t: AMD EPYC\n", "model name"), Some("AMD EPYC"));
        assert_eq!(chosen_word("always [madvise] never"), Some("madvise"));
        let shared = [
            "always [within_size] never",
            "always [advise] never deny force",
            "[never] deny",
            "never [deny]",
        ];
        let refused = shared.map(|text| refuses_shared_huge_pages(chosen_word(text).unwrap()));
        assert_eq!(refused, [false, false, true, true]);
        for (text, cores) in
            [("max 100000\n", None), ("150000 100000\n", Some(1.5)), ("", None), ("5 0", None)]
        {
            assert_eq!(cores_of(text), cores, "{text:?}");
        }
    }

    #[test]
    fn a_directory_that_is_not_there_yet_is_judged_by_the_one_above_it() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(nearest_existing(&dir.path().join("a/b")), dir.path());
        assert_eq!(nearest_existing(Path::new("checkpoints-that-are-not-there")), Path::new("."));
    }
}
