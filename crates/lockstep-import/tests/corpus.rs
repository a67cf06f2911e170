//! Configurations from public projects, with the expected outcome of each import.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use lockstep_config::RunConfig;
use lockstep_import::{AutoValues, Format, Import, InUse, Options, Origin, Problems, Treatment, import};
use serde_json::json;

const ALONE: Options = Options { ranks: None, auto: AutoValues::TrainerDefaults };

fn corpus(format: Format) -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(format.word());
    let mut files: Vec<PathBuf> = fs::read_dir(directory).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    files
}

fn import_file(format: Format, path: &Path) -> Result<Import, Problems> {
    let name = path.file_name().unwrap().to_str().unwrap();
    let beside = |file: &str| {
        fs::read_to_string(path.parent().unwrap().join(file)).map_err(|error| error.kind().to_string())
    };
    import(format, &fs::read_to_string(path).unwrap(), name, ALONE, &beside)
}

#[test]
fn every_configuration_has_its_outcome() {
    let mut outcomes = "Outcomes of the imports of tests/corpus, without comments.\n".to_owned();
    let mut files = 0;
    for format in [Format::DeepSpeed, Format::Accelerate] {
        for path in corpus(format) {
            files += 1;
            let name = path.file_name().unwrap().to_str().unwrap();
            let result = match import_file(format, &path) {
                Ok(import) => import.to_toml(),
                Err(problems) => format!("refused: {problems}\n"),
            };
            let lines =
                result.lines().filter(|line| !line.starts_with("# Imported") && !line.starts_with("# Data"));
            let text = lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n");
            // Writing to a String cannot fail.
            let _ = write!(outcomes, "\n=== {}/{name}\n{text}\n", format.word());
        }
    }
    assert!(files >= 40, "only {files} files");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/outcomes.txt");
    if std::env::var_os("LOCKSTEP_WRITE_DOCS").is_some() {
        fs::write(&path, &outcomes).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap();
    let differing = outcomes.lines().zip(expected.lines()).find(|(found, expected)| found != expected);
    assert!(
        outcomes == expected,
        "outcomes.txt is out of date: {differing:?}; LOCKSTEP_WRITE_DOCS=1 writes it"
    );
}

#[test]
fn what_is_imported_is_a_configuration() {
    for format in [Format::DeepSpeed, Format::Accelerate] {
        for path in corpus(format) {
            let Ok(import) = import_file(format, &path) else { continue };
            let text = import.to_toml();
            let config = RunConfig::parse(&text, "run.toml", &[] as &[&str])
                .unwrap_or_else(|problems| panic!("{}: {problems}\n{text}", path.display()));
            for setting in &import.settings {
                let found = config.settings().into_iter().find(|found| found.key == setting.key).unwrap();
                assert!(
                    same(&found.value, &setting.value),
                    "{}: {setting:?}, read as {}",
                    path.display(),
                    found.value
                );
            }
        }
    }
}

/// Returns true if two values are equal, whatever the form of numbers.
fn same(a: &serde_json::Value, b: &serde_json::Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => match (a.as_array(), b.as_array()) {
            (Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
            _ => a == b,
        },
    }
}

#[test]
fn every_key_of_a_table_is_translated_idle_or_refused_with_words() {
    for format in [Format::DeepSpeed, Format::Accelerate] {
        let known: BTreeSet<String> = lockstep_config::KEYS.iter().map(|key| key.name.to_owned()).collect();
        let mut names = BTreeSet::new();
        for row in format.keys() {
            assert!(names.insert(row.key), "{} stands twice", row.key);
            match row.treatment {
                Treatment::To { ours, .. } => {
                    for key in ours.split(", ") {
                        assert!(known.contains(key), "{}: {key} is no key of ours", row.key);
                    }
                }
                Treatment::NoEffect(because) | Treatment::Refused { because, .. } => {
                    assert!(because.len() > 8, "{}: {because}", row.key);
                }
            }
        }
    }
}

#[test]
fn values_say_where_they_come_from() {
    let text = "{\"train_batch_size\": 64,\n \"optimizer\": {\"type\": \"AdamW\"}}";
    let options = Options { ranks: Some(8), auto: AutoValues::TrainerDefaults };
    let import = import(Format::DeepSpeed, text, "ds.json", options, &|_| Err(String::new())).unwrap();
    let origin = |key: &str| {
        &import.settings.iter().find(|setting| setting.key == key).unwrap_or_else(|| panic!("{key}")).origin
    };
    assert!(matches!(origin("train.global_batch"), Origin::File { line: 1, .. }));
    assert!(matches!(origin("train.micro_batch"), Origin::Derived(_)));
    assert!(matches!(origin("optimizer.betas"), Origin::ForeignDefault(_)));
    let toml = import.to_toml();
    for line in [
        "micro_batch = 8    # derived: 64 / 1 / 8 ranks",
        "lr = 1e-3             # default: an optimizer without lr",
        "betas = [0.9, 0.999]  # default: betas of Adam",
        "kind = \"constant\"  # default: without a scheduler the learning rate is constant",
    ] {
        assert!(toml.contains(line), "{line} is not in\n{toml}");
    }
}

/// Returns a file in which `key` is `"auto"`, with the other keys that it requires.
fn with_auto(key: &str, beside: &[(&str, &str)]) -> String {
    let mut file = json!({});
    let mut set = |key: &str, value: &str| {
        *key.split('.').fold(&mut file, |node, part| &mut node[part]) = json!(value);
    };
    let section = |key: &str| key.split('.').next().unwrap().to_owned();
    for (name, value) in
        beside.iter().filter(|(name, _)| !name.contains('.') || section(name) == section(key))
    {
        set(name, value);
    }
    set(key, "auto");
    file.to_string()
}

#[test]
fn every_key_that_is_auto_has_its_row() {
    let files: [(Format, &[(&str, &str)]); 3] = [
        (Format::DeepSpeed, &[("optimizer.type", "AdamW"), ("scheduler.type", "WarmupCosineLR")]),
        (Format::Accelerate, &[("distributed_type", "FSDP")]),
        (Format::Accelerate, &[("distributed_type", "DEEPSPEED")]),
    ];
    let options =
        [AutoValues::TrainerDefaults, AutoValues::OfTheRun].map(|auto| Options { ranks: None, auto });
    for (format, beside) in files {
        for (row, options) in format.keys().iter().flat_map(|row| options.map(|options| (row, options))) {
            let key = row.key.replace(".*", ".some_key");
            let text = with_auto(&key, beside);
            match import(format, &text, "file.json", options, &|_| Err(String::new())) {
                Ok(import) => {
                    let toml = import.to_toml().replace("\n#  ", "");
                    for shown in [toml, import.table(&|_| None).join("\n")] {
                        let is_row = |line: &str| line.contains(&key) && line.contains("\"auto\"");
                        assert!(shown.lines().any(is_row), "{text}, {options:?}:\n{shown}");
                    }
                }
                Err(problems) => {
                    let is_refused = matches!(row.treatment, Treatment::Refused { accepts: None, .. });
                    // These have no default in the other tool either.
                    let is_needed = [
                        "optimizer.type",
                        "scheduler.type",
                        "distributed_type",
                        "elasticity.micro_batch_sizes",
                    ]
                    .contains(&row.key);
                    assert!(is_refused || is_needed, "{text}: {problems}");
                }
            }
        }
    }
}

#[test]
fn a_precision_that_is_auto_is_no_silent_default() {
    let read = |text: &str, auto| {
        import(Format::DeepSpeed, text, "ds.json", Options { ranks: None, auto }, &|_| Err(String::new()))
            .unwrap()
    };
    let both = "{\"fp16\": {\"enabled\": \"auto\"},\n\"bf16\": {\"enabled\": \"auto\"}}";
    let alone = read(both, AutoValues::TrainerDefaults).to_toml();
    let row = "precision = \"f32\"  # line 1: fp16.enabled, bf16.enabled = \"auto\", the Trainer's default";
    assert!(alone.contains(row), "{alone}");
    let in_use = |key: &str| {
        let is_precision = key == "train.precision";
        is_precision.then(|| InUse { value: json!("bf16"), origin: Some("run.toml:3".to_owned()) })
    };
    let table = read(both, AutoValues::OfTheRun).table(&in_use).join("\n");
    for (line, key) in [(1, "fp16"), (2, "bf16")] {
        let row = format!(
            "auto: line {line}: {key}.enabled = \"auto\", left to train.precision = \"bf16\" (run.toml:3)"
        );
        assert!(table.contains(&row), "{table}");
    }
    let one = "{\"fp16\": {\"enabled\": \"auto\"}, \"bf16\": {\"enabled\": true}}";
    let table = read(one, AutoValues::TrainerDefaults).table(&|_| None).join("\n");
    assert!(table.contains("fp16.enabled = \"auto\", left to train.precision = \"bf16\""), "{table}");
}

#[test]
fn a_key_that_sets_nothing_is_named_with_the_reason() {
    let text = "{\"fp16\": {\"enabled\": false, \"hysteresis\": 3}, \"zero_optimization\": {\"stage\": 2, \
                \"stage3_max_live_parameters\": 5}}";
    let import = import(Format::DeepSpeed, text, "ds.json", ALONE, &|_| Err(String::new())).unwrap();
    let table = import.table(&|_| None).join("\n");
    for line in [
        "without effect: fp16.hysteresis: `fp16.enabled` is not true",
        "without effect: fp16.enabled, zero_optimization.stage3_max_live_parameters: nothing to set",
    ] {
        assert!(table.contains(line), "{line} is not in\n{table}");
    }
}

#[test]
fn a_setting_of_the_run_that_wins_is_shown_with_its_place() {
    let import =
        import(Format::DeepSpeed, "{\"steps_per_print\": 2000}", "ds.json", ALONE, &|_| Err(String::new()))
            .unwrap();
    let in_use = |_: &str| Some(InUse { value: json!(10), origin: Some("run.toml:7".to_owned()) });
    let row = "train.log_every = 10  run.toml:7 wins over line 1: steps_per_print = 2000";
    assert_eq!(import.table(&in_use)[0], row);
}

#[test]
fn an_unknown_key_names_the_page_with_the_known_ones() {
    for (format, text, nearest) in [
        (Format::DeepSpeed, "{\"train_batch_sizes\": 4}", "the nearest is train_batch_size;"),
        (Format::DeepSpeed, "{\"qqqqqqq\": 4}", "unknown key; allowed"),
        (
            Format::Accelerate,
            "distributed_type: NO\nmixed_precisions: no\n",
            "the nearest is mixed_precision;",
        ),
        (Format::DeepSpeed, "{\"a\": 1, \"b\": 2, \"c\": 3, \"d\": 4}", "no configuration of DeepSpeed"),
    ] {
        let problems = import(format, text, "file", ALONE, &|_| Err(String::new())).unwrap_err().to_string();
        for part in [nearest, format.page()] {
            assert!(problems.contains(part), "{part} is not in {problems}");
        }
    }
}

#[test]
fn the_format_of_each_configuration_can_be_guessed() {
    for format in [Format::DeepSpeed, Format::Accelerate] {
        for path in corpus(format) {
            let text = fs::read_to_string(&path).unwrap();
            assert_eq!(Format::guess(&text), Some(format), "{}", path.display());
        }
    }
    for text in ["", "a: 1\n", "{", "[1]", "words"] {
        assert_eq!(Format::guess(text), None, "{text:?}");
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    #[test]
    fn no_text_makes_it_panic(text in "\\PC{0,60}|[\\[\\]{}\":, \n#/*a-z0-9.&*!|>-]{0,80}") {
        for format in [Format::DeepSpeed, Format::Accelerate] {
            let _ = import(format, &text, "x", ALONE, &|_| Err(String::new()));
        }
    }

    #[test]
    fn no_value_of_a_known_key_makes_it_panic(row in 0usize..150, value in "[0-9]{1,20}|-?[0-9.e]{1,8}|true|null|\\[\\]|\\{\\}|\"auto\"|\"[a-z]{1,6}\"") {
        let rows = Format::DeepSpeed.keys();
        let mut text = value;
        for part in rows[row % rows.len()].key.trim_end_matches(".*").rsplit('.') {
            text = format!("{{\"{part}\": {text}}}");
        }
        let _ = import(Format::DeepSpeed, &text, "x", ALONE, &|_| Err(String::new()));
    }
}
