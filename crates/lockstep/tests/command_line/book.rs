//! Runs every command in the book, page by page, in a directory with the files that the page mentions. Commands that would take
//! long get additional arguments; those that measure a machine run in `cargo xtask soak` (`LOCKSTEP_BOOK=all`). The output shown
//! below a command (blocks of kind `console`) must be what the command prints, except for numbers.

use std::time::Duration;

use crate::pages::{Page, pages};
use crate::workshop::{Outcome, Workshop};

/// Time limit on a command: in CI, and with `LOCKSTEP_BOOK=all`.
const LIMITS: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(900)];

/// Way in which a command is run.
#[derive(Debug, Clone, Copy)]
enum How {
    /// With additional arguments.
    Smaller(&'static [&'static str]),
    /// Unchanged, by `cargo xtask soak` alone.
    Soak,
    /// Not here: it needs other machines, other programs or the toolchain. The text names the test of similar commands.
    Elsewhere(&'static str),
}

/// A rule for commands that are not run unchanged: those of `page` (any page if it is empty) that begin with `start` and contain
/// `part`. The first matching rule applies.
struct Rule {
    page: &'static str,
    start: &'static str,
    part: &'static str,
    how: How,
}

const fn rule(page: &'static str, start: &'static str, part: &'static str, how: How) -> Rule {
    Rule { page, start, part, how }
}

/// The model of README and docs/getting-started.md, as small as its commands allow.
const SMALL_GPT: How = How::Smaller(&[
    "--set=model.n_layer=1",
    "--set=model.n_embd=32",
    "--set=model.n_head=2",
    "--set=train.global_batch=4",
    "--set=train.micro_batch=2",
    "--set=train.seq_len=32",
    "--set=train.threads=1",
    "--set=train.log_every=250",
]);

/// The plan of docs/memory.md.
const ZERO_3: How = How::Smaller(&["--set=parallel.data_parallel_shard=4", "--set=parallel.zero_stage=3"]);

/// A model and data for an imported file, which has neither.
const TINY: How = How::Smaller(&[
    "--set=model.hidden_size=32",
    "--set=model.intermediate_size=64",
    "--set=model.num_hidden_layers=2",
    "--set=model.num_attention_heads=2",
    "--set=model.num_key_value_heads=2",
    "--set=data.train=books/*.txt",
    "--set=train.seq_len=16",
    "--set=train.threads=1",
    "--steps=2",
]);

/// A short form of the README's fine-tuning.
const SMALL_LORA: How =
    How::Smaller(&["--set=train.seq_len=32", "--set=train.threads=1", "--set=train.log_every=150"]);

/// A run with directories of its own, next to another run.
const ANOTHER_RUN: How = How::Smaller(&["--set=checkpoint.dir=other", "--set=metrics.dir=other"]);

/// The small model for `verify`, which runs few steps.
const SMALL_VERIFIED: How = How::Smaller(&[
    "--set=model.n_layer=1",
    "--set=model.n_embd=32",
    "--set=model.n_head=2",
    "--set=train.global_batch=4",
    "--set=train.seq_len=32",
]);

const RULES: &[Rule] = &[
    rule("", "cargo ", "", How::Elsewhere("CI builds, tests and trains by cargo")),
    rule("", "torchrun ", "", How::Elsewhere("nodes.rs starts ranks with torchrun's variables")),
    rule(
        "",
        "srun ",
        "",
        How::Elsewhere("nodes.rs starts ranks with SLURM's variables; deploy/try-slurm.sh"),
    ),
    rule("", "mpirun ", "", How::Elsewhere("nodes.rs starts ranks with mpirun's variables; cargo xtask mpi")),
    rule("", "tensorboard ", "", How::Elsewhere("another program; events.rs reads what it would")),
    rule("", "deploy/", "", How::Elsewhere("needs SLURM, or builds for minutes")),
    rule("", "docker ", "", How::Elsewhere("deploy/try-image.sh builds and runs the image")),
    rule("", "", "--nnodes", How::Elsewhere("machines.rs, in network namespaces")),
    rule("", "", "--hostfile", How::Elsewhere("hosts.rs, over ssh where there is an sshd")),
    rule("", "lockstep doctor --trace", "", How::Elsewhere("nodes.rs kills a rank and reads what it leaves")),
    rule("", "lockstep fetch ", "", How::Elsewhere("hub.rs, from a hub on loopback")),
    rule("docs/inference.md", "HF_", "", How::Elsewhere("hub.rs, from a hub on loopback")),
    rule("docs/inference.md", "lockstep ", "Qwen/", How::Elsewhere("hub.rs, from a hub on loopback")),
    rule("", "", "mine.csv", How::Elsewhere("lockstep-plan tests schedules of one's own")),
    rule("README.md", "lockstep generate --model exported --chat", "", How::Smaller(&["--prompt=Hello"])),
    rule(
        "docs/fine-tuning.md",
        "lockstep generate --model merged --chat #",
        "",
        How::Smaller(&["--prompt=Hello"]),
    ),
    rule("docs/memory.md", "lockstep train run.toml --resume never", "", ZERO_3),
    rule("docs/coming-from-deepspeed.md", "lockstep train imported.toml", "", TINY),
    rule("docs/coming-from-accelerate.md", "lockstep train imported.toml", "", TINY),
    rule("docs/coming-from-deepspeed.md", "lockstep train run.toml", "--deepspeed", ANOTHER_RUN),
    rule("", "lockstep bench machine", "", How::Soak),
    rule("", "lockstep bench gemm", "", How::Soak),
    rule("README.md", "lockstep bench pipeline", "", How::Smaller(&["--action-ms=1"])),
    rule("", "lockstep doctor --bench", "", How::Soak),
    rule("docs/memory.md", "lockstep bench step --model gpt2-124m", "", How::Soak),
    rule("", "lockstep bench step --model gpt2-124m", "", How::Soak),
    rule(
        "",
        "lockstep bench step --model baby-gpt",
        "",
        How::Smaller(&["--set=model.n_layer=1", "--set=model.n_embd=60", "--steps=2"]),
    ),
    rule("", "lockstep bench collectives", "64MiB", How::Smaller(&["--json"])),
    rule("", "lockstep plan --calibrate", "", How::Soak),
    rule("README.md", "lockstep train lora.toml", "", SMALL_LORA),
    rule("README.md", "lockstep plan run.toml", "", SMALL_VERIFIED),
    rule("README.md", "lockstep train --resume", "", How::Smaller(&["--set=train.log_every=250"])),
    rule("README.md", "lockstep train run.toml", "", SMALL_GPT),
    rule("README.md", "lockstep verify run.toml", "", SMALL_VERIFIED),
    rule("docs/getting-started.md", "lockstep train run.toml --steps 1000", "", SMALL_GPT),
    // Its output is shown, so the model is not changed.
    rule(
        "docs/getting-started.md",
        "lockstep train run.toml",
        "",
        How::Smaller(&[
            "--steps=1",
            "--set=checkpoint.dir=other",
            "--set=metrics.dir=other",
            "--resume=never",
        ]),
    ),
    rule(
        "docs/getting-started.md",
        "lockstep train",
        "",
        How::Smaller(&["--set=train.steps=4", "--set=train.eval_every=0"]),
    ),
];

/// Commands that prepare the files of a page before its commands run.
const BEFORE: &[(&str, &[&str])] = &[
    (
        "README.md",
        &[
            "lockstep train run.toml --steps 1 --set checkpoint.dir=base --set model.n_layer=1 --set model.n_embd=32 --set model.n_head=2 \
             --set train.global_batch=4 --set train.seq_len=32 --set train.threads=1",
            "lockstep checkpoint export base/step-00000001 --hf gpt2",
            "rm -r runs",
        ],
    ),
    ("docs/checkpoints.md", &["lockstep train run.toml --steps 200"]),
    (
        "docs/fine-tuning.md",
        &[
            "lockstep train run.toml --steps 2 --set checkpoint.dir=base",
            "lockstep checkpoint export base/step-00000002 --hf gpt2",
            "lockstep train lora.toml",
        ],
    ),
    (
        "docs/getting-started.md",
        &["lockstep train run.toml --set model.n_layer=1 --set model.n_embd=32 --set model.n_head=2 \
           --set train.global_batch=4 --set train.micro_batch=2 --set train.seq_len=32 --set train.threads=1 --set data.cache_dir=elsewhere"],
    ),
    (
        "docs/inference.md",
        &[
            "lockstep train run.toml --steps 2 --set checkpoint.dir=base",
            "lockstep checkpoint export base/step-00000002 --hf exported",
        ],
    ),
    ("docs/monitoring.md", &["lockstep train run.toml --steps 4"]),
    ("docs/plans.md", &["lockstep plan run.toml --set parallel.tensor_parallel=2 -o plan.json"]),
    ("docs/planning.md", &["lockstep train run.toml --steps 12"]),
    ("docs/ranks.md", &["lockstep train run.toml --nproc-per-node 2 --steps 4"]),
];

/// A run that takes no time, with eight sequences per step.
const RUN: &str = r#"[model]
preset = "llama-15m"
num_hidden_layers = 2
hidden_size = 32
intermediate_size = 64
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 256
[data]
train = ["books/*.txt"]
[train]
steps = 2
global_batch = 8
micro_batch = 1
seq_len = 16
threads = 1
eval_every = 0
[checkpoint]
every = 1000
"#;

/// The run of docs/fine-tuning.md.
const LORA: &str = r#"[model]
path = "gpt2"
from_pretrained = true
[fine_tune]
lora_rank = 2
[data]
train = ["instructions.jsonl"]
[train]
steps = 1000
global_batch = 1
seq_len = 64
threads = 1
eval_every = 0
log_every = 500
[schedule]
warmup_steps = 10
[checkpoint]
every = 1000
"#;

/// Returns a directory with all files that pages mention.
fn stocked() -> Workshop {
    let workshop = Workshop::new();
    let text = "All ranks wait until the last gradient is reduced, and then they go on together.\n";
    for name in ["books/a.txt", "books/b.txt", "more.txt", "held-out.txt"] {
        workshop.write(name, text.repeat(100));
    }
    workshop.write("run.toml", RUN);
    workshop.write("lora.toml", LORA);
    let instruction = r#"{"prompt": "Who waits? ", "completion": "All ranks."}"#;
    workshop.write("instructions.jsonl", format!("{instruction}\n").repeat(60));
    workshop.write("questions.txt", "Who waits?\nFor what?\n");
    workshop.write(
        "ds_config.json",
        r#"{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}"#,
    );
    let accelerate = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: 'no'\n";
    workshop.write(".cache/huggingface/accelerate/default_config.yaml", accelerate);
    workshop
}

/// A command of a page, and the output shown below it.
struct Shown {
    line: String,
    output: Vec<String>,
}

/// Returns the commands of a page: those of its blocks and those in tables of commands.
fn commands(page: &Page) -> Vec<Shown> {
    let mut commands: Vec<Shown> = Vec::new();
    let mut is_table_of_commands = false;
    for line in page.text.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        is_table_of_commands = cells.len() > 1 && (is_table_of_commands || cells.contains(&"command"));
        let spans = cells.iter().filter_map(|cell| cell.strip_prefix('`')?.strip_suffix('`'));
        let found = spans.filter(|span| is_table_of_commands && span.starts_with("lockstep "));
        commands.extend(found.map(|line| Shown { line: line.to_owned(), output: Vec::new() }));
    }
    for block in page.blocks() {
        match block.kind.as_str() {
            "sh" => {
                let lines = block.text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
                commands.extend(lines.map(|line| Shown { line: line.to_owned(), output: Vec::new() }));
            }
            "console" => {
                for line in block.text.lines() {
                    match line.strip_prefix("$ ") {
                        Some(line) => commands.push(Shown { line: line.to_owned(), output: Vec::new() }),
                        None => commands.last_mut().expect("a prompt first").output.push(line.to_owned()),
                    }
                }
            }
            _ => {
                let is_command = |line: &str| line.starts_with("lockstep ") || line.starts_with("$ ");
                let found = block.text.lines().find(|line| is_command(line));
                assert_eq!(found, None, "{}: a command in a block of kind {:?}", page.name, block.kind);
            }
        }
    }
    commands
}

/// Returns the index of the rule for a command.
fn rule_for(page: &str, line: &str) -> Option<usize> {
    let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    RULES.iter().position(|rule| {
        (rule.page.is_empty() || rule.page == page)
            && line.starts_with(rule.start)
            && line.contains(rule.part)
    })
}

/// Returns true if every command runs unchanged.
fn is_everything() -> bool {
    std::env::var("LOCKSTEP_BOOK").is_ok_and(|wanted| wanted == "all")
}

fn run(workshop: &Workshop, line: &str) -> Outcome {
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_lockstep"));
    let path = std::env::var("PATH").unwrap();
    let path = format!("{}:{path}", program.parent().unwrap().display());
    let home = workshop.path("").display().to_string();
    let variables = [("PATH", path.as_str()), ("HOME", &home), ("CARGO_HOME", &home)];
    let started = workshop.start_in("sh", &["-c", line], &variables);
    started.finish_within(LIMITS[usize::from(is_everything())])
}

/// Returns a command with additional arguments, inserted before a pipe, a redirection or a comment.
fn with(line: &str, arguments: &[&str]) -> String {
    let end = ["  #", " > ", " | "].iter().filter_map(|mark| line.find(mark)).min().unwrap_or(line.len());
    let (command, rest) = line.split_at(end);
    format!("{} {}{rest}", command.trim_end(), arguments.join(" "))
}

/// Runs the commands of a page in order.
fn check(name: &str) {
    let all = pages();
    let page = all.iter().find(|page| page.name == name).expect("the page is there");
    let workshop = stocked();
    for block in page.blocks().iter().filter(|block| block.kind == "toml") {
        // A block that begins with its file name is written to that file.
        if let Some(file) = block.text.strip_prefix("# ").and_then(|text| text.split_once(".toml\n")) {
            workshop.write(&format!("{}.toml", file.0), &block.text);
        }
    }
    let before = BEFORE.iter().filter(|(page, _)| *page == name).flat_map(|(_, lines)| *lines);
    for line in before {
        run(&workshop, line).succeeds();
    }
    for Shown { line, output } in commands(page) {
        let command = match rule_for(name, &line).map(|rule| RULES[rule].how) {
            None => line.clone(),
            Some(How::Smaller(arguments)) => with(&line, arguments),
            Some(How::Soak) if is_everything() => line.clone(),
            Some(How::Soak | How::Elsewhere(_)) => continue,
        };
        let outcome = run(&workshop, &command);
        let is_refused = output.iter().any(|line| line.starts_with("error: "));
        assert_eq!(outcome.code, Some(if is_refused { 2 } else { 0 }), "{name}: {line}\n{outcome:?}");
        let printed = format!("{}\n{}", outcome.stderr, outcome.stdout);
        if let Err(line) = has_shape(&printed, &output) {
            panic!("{name}: `{command}` prints no line like\n  {line}\nbut\n{printed}");
        }
    }
}

/// Checks that the lines of `shown` occur in `printed` consecutively, except for numbers, units and spaces. `...` stands for any
/// lines.
fn has_shape(printed: &str, shown: &[String]) -> Result<(), String> {
    let mut printed = printed.lines().map(shape).filter(|line| !line.is_empty());
    // Output before the first shown line is ignored.
    let mut may_skip = true;
    for line in shown.iter().filter(|line| !line.trim().is_empty()) {
        if line.trim() == "..." {
            may_skip = true;
            continue;
        }
        let wanted = shape(line);
        let found =
            if may_skip { printed.any(|line| line == wanted) } else { printed.next() == Some(wanted) };
        if !found {
            return Err(line.clone());
        }
        may_skip = false;
    }
    Ok(())
}

/// Units that may follow a number, with or without a space.
const UNITS: [&str; 18] = [
    "%", "B", "KiB", "MiB", "GiB", "TiB", "k", "M", "G", "T", "ns", "µs", "ms", "s", "min", "m", "h", "days",
];

/// Returns a line without its numbers, their units, and the spaces of columns.
fn shape(line: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in line.split_whitespace() {
        let is_after_number = words.last().is_some_and(|last| last.ends_with('#'));
        let bare = word.trim_end_matches([',', ';', ')', '.']);
        if is_after_number && UNITS.contains(&bare) {
            let last = words.last_mut().expect("there is one");
            last.push_str(&word[bare.len()..]);
        } else {
            words.push(without_numbers(word));
        }
    }
    words.join(" ")
}

/// Returns a word with `#` for each number and its unit.
fn without_numbers(word: &str) -> String {
    let mut out = String::new();
    let mut rest = word;
    while let Some(at) = rest.find(|c: char| c.is_ascii_digit()) {
        let is_part_of_name = rest[..at].ends_with(|c: char| c.is_ascii_alphabetic());
        out += rest[..at].trim_end_matches(|c| !is_part_of_name && (c == '-' || c == '+'));
        let number = rest[at..].trim_start_matches(|c: char| c.is_ascii_digit() || c == '.' || c == ',');
        let mut digits = &rest[at..rest.len() - number.len()];
        // Commas and periods at the end belong to the sentence.
        digits = digits.trim_end_matches(['.', ',']);
        rest = &rest[at + digits.len()..];
        if is_part_of_name {
            out += digits;
            continue;
        }
        out.push('#');
        let exponent = rest.strip_prefix('e').map(|rest| rest.trim_start_matches(['-', '+']));
        if let Some(exponent) = exponent.filter(|exponent| exponent.starts_with(|c: char| c.is_ascii_digit()))
        {
            rest = exponent.trim_start_matches(|c: char| c.is_ascii_digit());
        }
        let letters = rest.find(|c: char| !c.is_alphabetic() && c != '%').unwrap_or(rest.len());
        if UNITS.contains(&&rest[..letters]) {
            rest = &rest[letters..];
        }
    }
    out + rest
}

/// Defines a test for each page: they run in parallel, and a failure names the page.
macro_rules! pages {
    ($($test:ident: $page:literal,)*) => {
        const PAGES: &[&str] = &[$($page),*];
        $(
            #[test]
            fn $test() {
                check($page);
            }
        )*
    };
}

pages! {
    readme: "README.md",
    checkpoints: "docs/checkpoints.md",
    clusters: "docs/clusters.md",
    coming_from_accelerate: "docs/coming-from-accelerate.md",
    coming_from_deepspeed: "docs/coming-from-deepspeed.md",
    coming_from_megatron: "docs/coming-from-megatron.md",
    coming_from_pytorch: "docs/coming-from-pytorch.md",
    data: "docs/data.md",
    fine_tuning: "docs/fine-tuning.md",
    getting_started: "docs/getting-started.md",
    inference: "docs/inference.md",
    memory: "docs/memory.md",
    models: "docs/models.md",
    monitoring: "docs/monitoring.md",
    planning: "docs/planning.md",
    plans: "docs/plans.md",
    precision: "docs/precision.md",
    ranks: "docs/ranks.md",
    reliability: "docs/reliability.md",
    troubleshooting: "docs/troubleshooting.md",
}

#[test]
fn every_page_with_a_command_is_run_and_every_rule_is_needed() {
    let mut used = vec![false; RULES.len()];
    for page in pages() {
        let commands = commands(&page);
        let is_run = PAGES.contains(&page.name.as_str());
        assert!(is_run || commands.is_empty(), "{} has commands and no test", page.name);
        for rule in commands.iter().filter_map(|command| rule_for(&page.name, &command.line)) {
            used[rule] = true;
        }
    }
    for (rule, is_used) in RULES.iter().zip(used) {
        assert!(
            is_used,
            "no command of {:?} begins with {:?} and has {:?}",
            rule.page, rule.start, rule.part
        );
        if let How::Elsewhere(what) = rule.how {
            assert!(!what.is_empty());
        }
    }
}

#[test]
fn shapes_ignore_numbers_and_units_and_nothing_else() {
    let alike = [
        (
            "memory     312 MiB predicted; 22.6 GiB available here",
            "memory 1.2 GiB predicted; 900.0 MiB available here",
        ),
        ("1  loss   5.5420448   1.2e-9  1.0e-5", "12 loss 4.1 3.0e-10 1e-5"),
        (
            "done  2 steps in 1.3 s, 4.2k tokens/s; loss 3.1",
            "done 500 steps in 2 min, 901 tokens/s; loss 2.25",
        ),
        ("plan 64 GPUs, 37.5 % MFU", "plan 8 GPUs, 4 % MFU"),
    ];
    for (left, right) in alike {
        assert_eq!(shape(left), shape(right));
    }
    for (left, right) in [("loss 3", "less 3"), ("zero2", "zero3"), ("1 rank", "1 node"), ("a 3 b", "a 3")] {
        assert_ne!(shape(left), shape(right), "{left} {right}");
    }
    let shown = ["a 1", "...", "c 2"].map(str::to_owned);
    assert_eq!(has_shape("x\na 5\nb\nb\nc 7\n", &shown), Ok(()));
    assert_eq!(has_shape("a 5\nb\n", &shown), Err("c 2".to_owned()));
    let shown = ["a 1", "c 2"].map(str::to_owned);
    assert_eq!(has_shape("a 5\nb\nc 7\n", &shown), Err("c 2".to_owned()));
}
