//! The page of a plan: its figures equal those of `plan --json`, and a browser renders it without errors.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::workshop::Workshop;

/// Names under which a browser may be installed.
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// Plans that cover all parts of a page: a pipeline on a cluster, experts, one rank of this machine, and a search result.
const PLANS: [(&str, &[&str]); 4] = [
    (
        "pipeline",
        &[
            "--model",
            "gpt2-124m",
            "--cluster",
            "dgx-h100x2",
            "--seq-len",
            "512",
            "--global-batch",
            "32",
            "--set",
            "parallel.pipeline_parallel=4",
            "--set",
            "parallel.tensor_parallel=2",
            "--set",
            "parallel.data_parallel_shard=2",
            "--set",
            "parallel.zero_stage=1",
            "--set",
            "train.micro_batch=2",
        ],
    ),
    (
        "experts",
        &[
            "--model",
            "mixtral-20m",
            "--cluster",
            "dgx-h100",
            "--seq-len",
            "128",
            "--global-batch",
            "32",
            "--set",
            "parallel.data_parallel_shard=8",
            "--set",
            "parallel.expert_parallel=4",
            "--set",
            "parallel.zero_stage=2",
        ],
    ),
    (
        "one",
        &[
            "--model",
            "baby-gpt",
            "--global-batch",
            "8",
            "--set",
            "parallel.zero_stage=0",
            "--set",
            "train.micro_batch=2",
            "--set",
            "train.threads=1",
        ],
    ),
    (
        "found",
        &[
            "--model",
            "gpt2-355m",
            "--cluster",
            "dgx-a100",
            "--seq-len",
            "512",
            "--global-batch",
            "64",
            "--explain",
        ],
    ),
];

/// Returns the page of a plan and its JSON document, from one command.
fn page_of(workshop: &Workshop, name: &str, arguments: &[&str]) -> (String, Value) {
    let file = format!("{name}.html");
    let command = [&["plan"], arguments, &["--html", &file, "--json"]].concat();
    let found = workshop.run(&command).json();
    (String::from_utf8(workshop.read(&file)).unwrap(), found)
}

/// Returns every figure of a page: its pointer into the document, its value, and the visible text.
fn figures(page: &str) -> Vec<(String, Value, String)> {
    let unescaped = |text: &str| {
        text.replace("&quot;", "\"").replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    };
    let figure = |text: &str| {
        let (value, rest) = text.split_once("\" data-of=\"").unwrap();
        let (pointer, rest) = rest.split_once("\">").unwrap();
        let (words, _) = rest.split_once("</data>").unwrap();
        (unescaped(pointer), serde_json::from_str(&unescaped(value)).unwrap(), unescaped(words))
    };
    page.split("<data value=\"").skip(1).map(figure).collect()
}

#[test]
fn figures_of_a_page_are_those_of_the_document() {
    let workshop = Workshop::new();
    for (name, arguments) in PLANS {
        let (page, document) = page_of(&workshop, name, arguments);
        let figures = figures(&page);
        for (pointer, value, words) in &figures {
            let told = document.pointer(pointer).unwrap_or(&Value::Null);
            let is_told = !told.is_null() || value.is_null();
            assert!(
                is_told && told == value,
                "{name}: {pointer} is {told}, and {value} ({words}) on the page"
            );
            assert!(!words.is_empty(), "{name}: {pointer} has no words");
        }
        let count = |start: &str| figures.iter().filter(|(pointer, ..)| pointer.starts_with(start)).count();
        let length = |pointer: &str| document.pointer(pointer).and_then(Value::as_array).map_or(0, Vec::len);
        // Each plan of the ranking, each point of each roofline, each kind of traffic, the parts of the step.
        let rows = length("/ranking");
        for row in 0..rows {
            assert!(count(&format!("/ranking/{row}/")) >= 11, "{name}: plan {row}");
        }
        for roofline in 0..length("/rooflines") {
            let points = length(&format!("/rooflines/{roofline}/points"));
            assert!(points > 5 && count(&format!("/rooflines/{roofline}/")) >= 2 * points, "{name}");
        }
        assert_eq!(count("/ranking/0/step_parts_ms/"), 9, "{name}: in the bar and in the table");
        assert_eq!(length("/traffic/kinds") == 0, name == "one", "{name}: {}", document["traffic"]);
        assert!(count("/traffic/") >= 5 * length("/traffic/kinds"), "{name}");
        assert!(count("/memory_over_time/") >= 4, "{name}");
        assert_eq!(count("/neighbours/"), length("/neighbours"), "{name}");
        // The visible text equals the number.
        let step = figures.iter().find(|(pointer, ..)| pointer == "/ranking/0/step_ms").unwrap();
        let (number, unit) = step.2.split_once(' ').unwrap_or((&step.2, ""));
        let factor = if unit == "s" { 1e3 } else { 1.0 };
        let shown = number.parse::<f64>().unwrap() * factor;
        assert!((shown / step.1.as_f64().unwrap() - 1.0).abs() < 0.01, "{name}: {step:?}");
    }
}

#[test]
fn a_browser_draws_the_page_and_shows_a_stretch_of_the_step() {
    let is_there = |browser: &&str| {
        Command::new(browser)
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    let Some(browser) = BROWSERS.into_iter().find(is_there) else {
        println!("skipped: there is no chromium here");
        return;
    };
    let workshop = Workshop::new();
    for (name, passes) in [("pipeline", 4 * 8 * 2), ("one", 4 * 2)] {
        let arguments = PLANS.iter().find(|(plan, _)| *plan == name).unwrap().1;
        let (_, document) = page_of(&workshop, name, arguments);
        let step_ms = document["ranking"][0]["step_ms"].as_f64().unwrap();
        let parts = &document["ranking"][0]["step_parts_ms"];
        let after_ms = parts["gradients"].as_f64().unwrap() + parts["update"].as_f64().unwrap();
        let address =
            format!("file://{}#ms=0-{}", workshop.path(&format!("{name}.html")).display(), step_ms / 2.0);
        let profile = format!("--user-data-dir={}", workshop.path("browser").display());
        let options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--dump-dom",
            &profile,
            &address,
        ];
        let outcome = workshop.start(browser, &options).finish().succeeds();
        let mistakes: Vec<&str> = outcome.stderr.lines().filter(|line| line.contains("CONSOLE")).collect();
        assert!(mistakes.is_empty(), "{name}: {mistakes:?}");
        let canvas = outcome.stdout.split_once("<canvas").expect("a canvas").1.split_once('>').unwrap().0;
        let number = |key: &str| -> f64 {
            let value =
                canvas.split_once(&format!("data-{key}=\"")).unwrap_or_else(|| panic!("{key}: {canvas}")).1;
            value.split_once('"').unwrap().0.parse().unwrap()
        };
        assert_eq!(number("passes") as usize, passes, "{name}: {canvas}");
        // Waits are part of the step, so the last action ends where it should, less one of them.
        let (end_ms, last_ms) = (number("end"), step_ms - after_ms);
        assert!((end_ms - last_ms).abs() <= 1e-5 * step_ms, "{name}: passes end at {end_ms}, not {last_ms}");
        assert_eq!(number("from"), 0.0, "{name}: {canvas}");
        assert!((number("to") / (step_ms / 2.0) - 1.0).abs() < 1e-6, "{name}: {canvas}");
    }
}
