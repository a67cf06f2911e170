//! Configurations as public projects use them, and what becomes of each.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use lockstep_import::{AutoValues, Format, Import, Options, Origin, Problems, import};
use lockstep_train::RunConfig;

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

/// Whether two values are the same but for the form of numbers.
fn same(a: &serde_json::Value, b: &serde_json::Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b || (a.is_array() && b.is_array()),
    }
}

#[test]
fn every_key_of_a_table_is_translated_idle_or_refused_with_words() {
    for format in [Format::DeepSpeed, Format::Accelerate] {
        let known: BTreeSet<String> =
            lockstep_train::config::KEYS.iter().map(|key| key.name.to_owned()).collect();
        let mut names = BTreeSet::new();
        for row in format.keys() {
            assert!(names.insert(row.key), "{} stands twice", row.key);
            match row.treatment {
                lockstep_import::Treatment::To { ours, .. } => {
                    for key in ours.split(", ") {
                        assert!(known.contains(key), "{}: {key} is no key of ours", row.key);
                    }
                }
                lockstep_import::Treatment::NoEffect(because)
                | lockstep_import::Treatment::Refused { because, .. } => {
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
