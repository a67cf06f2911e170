//! Output for people: the first screen of a run, the program without arguments, and output without a reader.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::workshop::Workshop;

/// Returns the labels of the lines before the first step; a continuation line has none.
fn labels(stderr: &str) -> Vec<&str> {
    let head = stderr.lines().take_while(|line| !line.starts_with("step 1/"));
    head.filter_map(|line| line.split_once(' ').map(|(label, _)| label))
        .filter(|label| !label.is_empty())
        .collect()
}

#[test]
fn a_run_begins_with_model_data_step_and_memory_and_says_more_only_if_asked() {
    let workshop = Workshop::new();
    let usual = workshop.run(&["train", "run.toml"]).succeeds();
    assert_eq!(labels(&usual.stderr), ["model", "data", "step", "memory"], "{usual:?}");
    let all = workshop.run(&["train", "run.toml", "--resume", "never", "--verbose"]).succeeds();
    let expected = ["plan", "model", "data", "step", "work", "machine", "memory"];
    assert_eq!(labels(&all.stderr)[..7], expected, "{all:?}");
    for outcome in [usual, all] {
        assert!(!outcome.stderr.contains('\x1b'), "no colours in a file: {outcome:?}");
        let head = outcome.stderr.lines().take_while(|line| !line.starts_with("step 1/"));
        let widest = head.map(|line| line.chars().count()).max();
        assert!(widest <= Some(80), "{widest:?}: {outcome:?}");
    }
}

#[test]
fn the_name_of_the_program_alone_tells_what_to_do_first() {
    let outcome = Workshop::new().run(&[]);
    assert_eq!((outcome.code, &outcome.stdout[..]), (Some(2), ""), "{outcome:?}");
    for command in ["lockstep train ", "lockstep doctor", "lockstep plan --model", "lockstep --help"] {
        assert!(outcome.stderr.contains(command), "{command}: {outcome:?}");
    }
    assert!(outcome.stderr.lines().all(|line| line.chars().count() <= 80), "{outcome:?}");
}

#[test]
fn the_share_of_the_peak_is_shown_and_recorded_on_one_rank_and_on_two() {
    let workshop = Workshop::new();
    for ranks in ["1", "2"] {
        let arguments = ["train", "run.toml", "-v", "--resume", "never", "--nproc-per-node", ranks];
        let outcome = workshop.run(&arguments).succeeds();
        let words = outcome.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("FLOP/s (measured at the start of a run)"), "{outcome:?}");
        assert!(outcome.stderr.contains("  mfu "), "{outcome:?}");
        let rows = String::from_utf8(workshop.read("runs/metrics.jsonl")).unwrap();
        let run: Value = serde_json::from_slice(&workshop.read("runs/run.json")).unwrap();
        let peak = run["peak_flops_per_s"].as_f64().unwrap_or_else(|| panic!("no peak in {run}"));
        for row in rows.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
            let (mfu, rate) = (row["mfu"].as_f64().unwrap(), row["flops_per_s"].as_f64().unwrap());
            assert!(mfu > 0.0 && mfu < 1.0 && (mfu * peak / rate - 1.0).abs() < 1e-9, "{row}");
        }
        let report = String::from_utf8(workshop.read("runs/report.html")).unwrap();
        assert!(report.contains("\"mfu\":{\"x\":[1,2,3,4]"), "{report}");
    }
    // Peaks are measured once and cached.
    assert!(workshop.path("cache/lockstep/peaks.json").is_file());
}

/// Returns the exit code of the program if nobody reads its output.
fn unread(workshop: &Workshop, arguments: &[&str]) -> Option<i32> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
    command.args(arguments).current_dir(workshop.path("")).env("XDG_CACHE_HOME", workshop.path("cache"));
    command.env_remove("LOCKSTEP_MACHINE").env("LOCKSTEP_LOG", "trace");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop((child.stdout.take(), child.stderr.take()));
    child.wait().unwrap().code()
}

#[test]
fn a_reader_that_goes_away_changes_no_exit_code_and_ends_no_run() {
    let workshop = Workshop::new();
    for arguments in [&["train", "run.toml"][..], &["train", "run.toml", "--nproc-per-node", "2", "-v"]] {
        let arguments = [arguments, &["--resume", "never", "--set", "train.log_every=1"]].concat();
        assert_eq!(unread(&workshop, &arguments), Some(0), "{arguments:?}");
        workshop.run(&["checkpoint", "verify", "checkpoints/step-00000004"]).succeeds();
    }
    workshop.flip_a_bit("checkpoints/step-00000004/rank-00000.safetensors");
    let codes: [(&[&str], i32); 6] = [
        (&["checkpoint", "verify", "checkpoints/step-00000004"], 4),
        (&["train", "nowhere.toml"], 2),
        (&["train", "--nonsense"], 2),
        (&[], 2),
        (&["checkpoint", "list", "checkpoints"], 0),
        (&["completions", "bash"], 0),
    ];
    for (arguments, code) in codes {
        assert_eq!(unread(&workshop, arguments), Some(code), "{arguments:?}");
    }
}
