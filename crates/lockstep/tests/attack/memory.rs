//! A rank killed by the kernel's out-of-memory killer: the others report it, and the run resumes. Needs root and a memory
//! controller of control groups, version 1 or 2.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lockstep_plan::random::Draws;

use crate::plans::{PLANS, Run, undisturbed};
use crate::process::children;
use crate::tries::tries;
use crate::workshop::Started;

/// Memory that a rank may allocate after it has joined the group; each allocates more before its first step.
const LIMIT_BYTES: u64 = 1 << 20;

/// A control group with little memory; removed when dropped.
struct SmallGroup(PathBuf);

impl SmallGroup {
    /// Creates a group; `None` if this process may not.
    fn new(name: &str) -> Option<Self> {
        let roots = [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")];
        let (root, limit) = roots.into_iter().find(|(root, limit)| {
            let probe = Path::new(root).join(format!("{name}-probe"));
            let is_there = fs::create_dir(&probe).is_ok() && probe.join(limit).exists();
            let _ = fs::remove_dir(&probe);
            is_there
        })?;
        let group = Self(Path::new(root).join(name));
        fs::create_dir(&group.0).ok()?;
        fs::write(group.0.join(limit), LIMIT_BYTES.to_string()).ok()?;
        // Otherwise pages could be swapped out; not every kernel counts swap.
        let _ = fs::write(group.0.join("memory.swap.max"), "0");
        Some(group)
    }

    fn take(&self, pid: u32) -> bool {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).is_ok()
    }
}

impl Drop for SmallGroup {
    fn drop(&mut self) {
        // The group of a process that has just died is busy for a moment.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Waits for a rank's process and returns its id.
fn process_of(rank: usize, run: &Started) -> u32 {
    let begin = Instant::now();
    loop {
        if let Some(pid) = children(run.child.id()).get(rank) {
            return *pid;
        }
        assert!(begin.elapsed() < Duration::from_secs(10), "no rank {rank}: {}", run.stderr());
    }
}

fn attack(seed: u64, choice: &mut Draws) -> String {
    let several: Vec<_> = PLANS.into_iter().filter(|plan| plan.ranks > 1).collect();
    let plan = several[seed as usize % several.len()];
    let (expected, _) = &*undisturbed(plan);
    let Some(group) = SmallGroup::new(&format!("lockstep-{}-{seed}", std::process::id())) else {
        // Written directly, because the test harness hides the output of tests that pass.
        let _ = writeln!(std::io::stderr(), "SKIPPED: limits of memory need root and control groups");
        return "skipped".to_owned();
    };
    let run = Run::new(plan);
    let started = run.start();
    let victim = choice.below(plan.ranks);
    let is_limited = group.take(process_of(victim, &started));
    let outcome = started.finish();
    let what = match outcome.code {
        // It had allocated all that it needs before it joined the group.
        Some(0) => "not killed".to_owned(),
        Some(5) => {
            let lost = format!("rank {victim} was lost: it was killed by the out-of-memory killer");
            assert!(outcome.stderr.contains(&lost), "{outcome:?}");
            "killed".to_owned()
        }
        _ => panic!("rank {victim} (limited: {is_limited}): {outcome:?}"),
    };
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(0), "a refusal: {outcome:?}");
    assert_eq!(run.end(), *expected, "{outcome:?}");
    what
}

#[test]
fn out_of_memory() {
    tries("out_of_memory", 4, Duration::from_secs(60), attack);
}
