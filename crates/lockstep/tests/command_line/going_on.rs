//! Runs that go on: with more steps than before, from a checkpoint alone, and from a configuration that was printed.

use serde_json::Value;

use crate::workshop::Workshop;

const FOLLOWING: [&str; 2] = ["schedule.kind=cosine", "optimizer.lr=1e-3"];

#[test]
fn more_steps_let_a_run_go_on_whose_schedule_follows_them() {
    let workshop = Workshop::new();
    let train = |more: &[&str]| {
        let settings = FOLLOWING.iter().flat_map(|setting| ["--set", setting]);
        workshop.run(
            &["train", "run.toml"]
                .into_iter()
                .chain(settings)
                .chain(more.iter().copied())
                .collect::<Vec<_>>(),
        )
    };
    train(&[]).succeeds();
    let done = train(&[]).succeeds();
    assert!(done.stderr.contains("all 4 steps were made before; --steps 8 goes on"), "{done:?}");
    let more = train(&["--steps", "8"]).succeeds();
    let words = more.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains("the schedule now follows 8 steps, and not 4: the learning rate of step 5 is"),
        "{more:?}"
    );
    assert!(workshop.path("checkpoints/step-00000008").is_dir(), "{more:?}");
    // A schedule that somebody has given another length is another schedule.
    let pinned = ["--steps", "12", "--set", "schedule.decay_steps=3"];
    train(&pinned)
        .refuses(2, &["schedule.decay_steps was 7, is 3", "--resume checkpoints/step-00000008 to go on"]);
}

#[test]
fn a_checkpoint_alone_says_what_run_it_is_of() {
    let workshop = Workshop::new();
    workshop.train(&FOLLOWING).succeeds();
    let weights = |workshop: &Workshop| workshop.read("checkpoints/step-00000004/rank-00000.safetensors");
    let expected = weights(&workshop);
    std::fs::remove_file(workshop.path("run.toml")).unwrap();
    let resumed = workshop.run(&["train", "--resume", "checkpoints/step-00000002"]).succeeds();
    assert!(
        resumed.stderr.contains("26.8k parameters") && resumed.stderr.contains("step 4/4"),
        "{resumed:?}"
    );
    assert_eq!(resumed.stdout, "", "a sample is the demonstration's: {resumed:?}");
    assert!(weights(&workshop) == expected, "the same run ends with the same weights");
    // And it can be given more steps, and other ranks.
    let resume = ["train", "--resume", "checkpoints/step-00000004", "--steps", "6", "--nproc-per-node", "2"];
    let more = workshop.run(&resume).succeeds();
    assert!(
        more.stderr.contains("2 ranks") && workshop.path("checkpoints/step-00000006").is_dir(),
        "{more:?}"
    );
}

#[test]
fn a_configuration_that_is_printed_is_one_that_can_be_read() {
    let workshop = Workshop::new();
    let print = |run: &str, set: &str| {
        workshop.run(&["train", run, "--print-config", "--steps", "7", "--set", set]).succeeds().stdout
    };
    let first = print("run.toml", "data.text_field='a \"b\"'");
    for line in
        ["steps = 7  # --set train.steps=7", "# seed = 1337  # default", "kind = \"constant\"  # run.toml:"]
    {
        assert!(first.lines().any(|found| found.starts_with(line)), "{line}: {first}");
    }
    workshop.write("printed.toml", &first);
    let values = |text: &str| {
        text.lines().map(|line| line.split("  #").next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(values(&print("printed.toml", "data.text_field='a \"b\"'")), values(&first));
    assert!(!workshop.path("checkpoints").exists() && !workshop.path("runs").exists(), "nothing is trained");
}

#[test]
fn the_record_of_a_run_names_program_host_and_data() {
    let workshop = Workshop::new();
    workshop.train(&[]).succeeds();
    let run: Value = serde_json::from_slice(&workshop.read("runs/run.json")).unwrap();
    assert_eq!(run["lockstep"], env!("CARGO_PKG_VERSION"), "{run}");
    assert!(run["commit"].is_null() || run["commit"].as_str().is_some_and(|hash| hash.len() >= 40), "{run}");
    let host = rustix::system::uname();
    assert_eq!(run["host"], host.nodename().to_string_lossy().as_ref(), "{run}");
    assert_eq!(run["data"]["sources"][0]["digest"], run["data"]["digest"], "{run}");
    assert!(run["data"]["digest"].as_str().is_some_and(|digest| digest.len() == 64), "{run}");
}
