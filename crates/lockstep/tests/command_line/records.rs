//! Records of a run for people (report, trace, TensorBoard files), and the commands that check the machine and complete in the
//! shell.

use std::fs;

use serde_json::Value;

use crate::browser::drawn;
use crate::workshop::Workshop;

/// Returns the names of the files in a directory that begin with `start`.
fn files(workshop: &Workshop, dir: &str, start: &str) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(workshop.path(dir))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with(start))
        .collect();
    names.sort();
    names
}

#[test]
fn a_run_leaves_a_report_event_files_and_the_trace_of_the_steps_asked_for() {
    let workshop = Workshop::new();
    let traced = "metrics.trace_steps=[2, 3]";
    let outcome = workshop.train(&[traced]).succeeds();
    assert!(outcome.stderr.contains("report     runs/report.html"), "{outcome:?}");
    assert_eq!(files(&workshop, "runs", "events.out.tfevents.").len(), 1);

    let trace: Value = serde_json::from_slice(&workshop.read("runs/trace-00000002-00000003.json")).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for event in events {
        let is_number = |key: &str| event[key].as_f64().is_some_and(|value| value >= 0.0);
        assert!(event["name"].is_string() && is_number("pid") && is_number("tid"), "{event}");
        match event["ph"].as_str() {
            Some("X") => assert!(is_number("ts") && is_number("dur") && event["cat"].is_string(), "{event}"),
            phase => assert_eq!(phase, Some("M"), "{event}"),
        }
    }
    let count = |name: &str| events.iter().filter(|event| event["name"] == name).count();
    let found = ["step 1", "step 2", "step 3", "step 4", "checkpoint"].map(count);
    assert_eq!(found, [0, 1, 1, 0, 1], "steps 2 and 3, and the checkpoint between them");
    assert!(count("save") <= 1, "the save beside step 3");
    // Two micro-batches in each of the two steps.
    assert_eq!(["block 1 forward", "head backward", "data wait"].map(count), [4, 4, 2]);

    let page = String::from_utf8(workshop.read("runs/report.html")).unwrap();
    for part in ["<title>llama-15m</title>", "\"roofline\"", "--set metrics.trace_steps=[2, 3]"] {
        assert!(page.contains(part), "the report says {part:?}");
    }
    for outside in ["http://", "https://", "src=", "@import", "url("] {
        let found = page.replace("http://www.w3.org/2000/svg", "").find(outside);
        assert_eq!(found, None, "the report needs nothing else, not even {outside:?}");
    }

    workshop.train(&["train.steps=6"]).succeeds();
    assert_eq!(files(&workshop, "runs", "events.out.tfevents.").len(), 2, "a file for each process");
    workshop.run(&["train", "run.toml", "--resume", "never"]).succeeds();
    assert_eq!(files(&workshop, "runs", "events.out.tfevents.").len(), 1);
    assert_eq!(files(&workshop, "runs/earlier-1", "events.out.tfevents.").len(), 2);
}

#[test]
fn a_browser_draws_the_report_of_a_run_on_one_rank_and_of_a_pipeline() {
    let workshop = Workshop::new();
    workshop.train(&["train.eval_every=2", "data.valid=[\"text.txt\"]"]).succeeds();
    let Some(page) = drawn(&workshop, "runs/report.html", "") else { return };
    let titles = |page: &str, titles: &[&str]| {
        for title in titles {
            assert!(page.contains(&format!("<h2>{title}")), "no card {title:?}: {page}");
        }
    };
    let common = [
        "Loss",
        "Learning rate",
        "Throughput",
        "Predicted and measured",
        "Memory by category",
        "Configuration",
    ];
    titles(&page, &common);
    titles(&page, &["Roofline", "Timeline of step"]);
    let arguments = ["train", "run.toml", "--resume", "never", "--nproc-per-node", "2"];
    workshop.run(&[&arguments[..], &["--set", "parallel.pipeline_parallel=2"]].concat()).succeeds();
    let Some(page) = drawn(&workshop, "runs/report.html", "") else { return };
    titles(&page, &common);
    titles(&page, &["Memory by rank", "Who holds what", "Pipeline in step", "Between ranks"]);
}

#[test]
fn a_run_that_wants_no_records_has_none() {
    let workshop = Workshop::new();
    let outcome = workshop.train(&["metrics.jsonl=false", "metrics.tensorboard=false"]).succeeds();
    assert!(!outcome.stderr.contains("report "), "{outcome:?}");
    assert!(!workshop.path("runs").exists());
}

#[test]
fn a_report_can_be_made_later_and_says_what_it_lacks() {
    let workshop = Workshop::trained();
    fs::remove_file(workshop.path("runs/report.html")).unwrap();
    let outcome = workshop.run(&["report", "runs", "-o", "page.html"]).succeeds();
    assert_eq!(outcome.stdout, "wrote page.html\n");
    workshop.run(&["report", "runs"]).succeeds();
    assert!(workshop.read("page.html") == workshop.read("runs/report.html"), "the same page");

    workshop.run(&["report", "nowhere"]).refuses(2, &["no metrics.jsonl in nowhere"]);
    workshop.run(&["report", "run.toml"]).refuses(2, &["no metrics.jsonl in run.toml"]);
    workshop.run(&["report", "runs", "-o", "text.txt/page.html"]).refuses(1, &["text.txt/page.html"]);
    workshop.write("damaged/metrics.jsonl", b"\xff\xff\nnot a row\n[]\n{\"step\":-1}\n{\"step\":1e999}");
    workshop.run(&["report", "damaged"]).refuses(4, &["damaged/metrics.jsonl", "5 damaged line(s)"]);
}

#[test]
fn the_doctor_looks_at_the_machine_and_misses_a_place_for_checkpoints() {
    let workshop = Workshop::new();
    let document = workshop.run(&["doctor", "--json"]).json();
    assert!(["ok", "warning"].contains(&document["status"].as_str().unwrap()), "{document}");
    let findings = document["findings"].as_array().unwrap();
    let test = findings.iter().find(|finding| finding["name"] == "self-test").unwrap();
    assert_eq!(test["status"], "ok", "{test}");
    let shown = workshop.run(&["doctor"]).succeeds().stdout;
    assert!(shown.lines().count() >= findings.len() && shown.contains("(not used yet)"), "{shown}");

    let outcome = workshop.run(&["doctor", "--checkpoint-dir", "text.txt/here"]);
    assert_eq!(outcome.code, Some(3), "{outcome:?}");
    assert!(outcome.stdout.contains("missing: choose another directory"), "{outcome:?}");
}

#[test]
fn bash_completes_commands_and_flags() {
    let workshop = Workshop::new();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = workshop.run(&["completions", shell]).succeeds().stdout;
        assert!(script.contains("checkpoint") && script.contains("roofline"), "{shell}: {script}");
        workshop.write(&format!("completions.{shell}"), script);
    }
    workshop.run(&["completions", "tcsh"]).refuses(2, &["tcsh", "bash", "elvish"]);
    let complete = |words: &str| {
        let script = format!(
            "source completions.bash; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _lockstep lockstep \"${{COMP_WORDS[COMP_CWORD]}}\"; echo \"${{COMPREPLY[*]}}\""
        );
        workshop.start("bash", &["-c", &script]).finish().succeeds().stdout
    };
    assert_eq!(complete("lockstep che"), "checkpoint\n");
    assert_eq!(complete("lockstep checkpoint v"), "verify\n");
    assert_eq!(complete("lockstep bench step --roof"), "--roofline\n");
}
