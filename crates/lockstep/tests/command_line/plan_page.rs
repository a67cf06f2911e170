//! The page of a plan: its data are those of `plan --json`, and a browser draws every figure of them.

use serde_json::Value;

use crate::browser::drawn;
use crate::workshop::Workshop;

/// Plans that cover all parts of a page: a pipeline on a cluster, experts, one rank of this machine, and a search result.
const PLANS: [(&str, &[&str]); 5] = [
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
        "dualpipe",
        &[
            "--model",
            "gpt2-124m",
            "--cluster",
            "dgx-h100",
            "--seq-len",
            "512",
            "--global-batch",
            "16",
            "--set",
            "parallel.pipeline_parallel=4",
            "--set",
            "parallel.pipeline_schedule=dualpipe_v",
            "--set",
            "train.micro_batch=1",
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
            "--set",
            "metrics.dir=<i>runs</i>",
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

/// Returns every figure of a drawn page: its pointer into the document, its value, and the visible text.
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

/// Returns true if two values are the same; JavaScript has one type of numbers.
fn is_same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| (a - b).abs() <= 1e-12 * a.abs())
}

#[test]
fn a_page_has_the_document_of_its_command() {
    let workshop = Workshop::new();
    for (name, arguments) in PLANS {
        let (page, document) = page_of(&workshop, name, arguments);
        let data = page.split_once("id=\"data\">").unwrap().1.split_once("</script>").unwrap().0;
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["document"], document, "{name}");
        let ranks = document["memory_over_time"].as_array().unwrap();
        for curve in data["memory"].as_array().unwrap() {
            // Thinning keeps the peak.
            let points = curve["points"].as_array().unwrap();
            let bytes = points.iter().flat_map(|point| point.as_array().unwrap()[1..].iter());
            let most = bytes.map(|bytes| bytes.as_u64().unwrap()).max();
            let told = &ranks[curve["pipeline_rank"].as_u64().unwrap() as usize]["peak_bytes"];
            assert_eq!(most, told.as_u64(), "{name}: {curve}");
        }
    }
}

#[test]
fn a_browser_draws_every_figure_of_the_document() {
    let workshop = Workshop::new();
    for (name, arguments) in PLANS {
        let (_, document) = page_of(&workshop, name, arguments);
        let Some(page) = drawn(&workshop, &format!("{name}.html"), "") else { return };
        for title in [
            "The mesh on the machines",
            "The step",
            "Traffic of a rank",
            "Memory of a rank over the step",
            "The best plans",
        ] {
            assert!(page.contains(&format!("<h2>{title}</h2>")), "{name}: {title}");
        }
        assert!(!page.contains("<i>runs"), "{name}: a name is markup");
        let figures = figures(&page);
        for (pointer, value, words) in &figures {
            let told = document.pointer(pointer).unwrap_or(&Value::Null);
            let is_told = !told.is_null() || value.is_null();
            assert!(
                is_told && is_same(told, value),
                "{name}: {pointer} is {told}, and {value} ({words}) on the page"
            );
            assert!(!words.is_empty(), "{name}: {pointer} has no words");
        }
        let count = |start: &str| figures.iter().filter(|(pointer, ..)| pointer.starts_with(start)).count();
        let length = |pointer: &str| document.pointer(pointer).and_then(Value::as_array).map_or(0, Vec::len);
        // Each plan of the ranking, each point of each roofline, each kind of traffic, the parts of the step.
        for row in 0..length("/ranking") {
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
fn a_browser_shows_a_stretch_of_the_step() {
    let workshop = Workshop::new();
    for (name, passes) in [("pipeline", 4 * 8 * 2), ("one", 4 * 2)] {
        let arguments = PLANS.iter().find(|(plan, _)| *plan == name).unwrap().1;
        let (_, document) = page_of(&workshop, name, arguments);
        let step_ms = document["ranking"][0]["step_ms"].as_f64().unwrap();
        let parts = &document["ranking"][0]["step_parts_ms"];
        let after_ms = parts["gradients"].as_f64().unwrap() + parts["update"].as_f64().unwrap();
        let stretch = format!("#ms=0-{}", step_ms / 2.0);
        let Some(page) = drawn(&workshop, &format!("{name}.html"), &stretch) else { return };
        let canvas = page.split_once("<canvas").expect("a canvas").1.split_once('>').unwrap().0;
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
