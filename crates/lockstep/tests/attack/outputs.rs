//! Output that nobody reads, that is full or closed: no failure of it changes a run or its exit code.

use crate::plans::{PLANS, Run, undisturbed};

const LOCKSTEP: &str = env!("CARGO_BIN_EXE_lockstep");

#[test]
fn a_run_does_not_depend_on_who_reads_what_it_says() {
    for plan in [PLANS[0], PLANS[2]] {
        let (expected, _) = &*undisturbed(plan);
        let command = plan.arguments().iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
        for output in [
            ">/dev/full 2>&1",
            "2>/dev/full",
            ">&- 2>&-",
            "2>&1 | head -c 1 >/dev/null",
            "2>&1 >/dev/null | true",
            "2> >(sleep 0.1)",
        ] {
            let run = Run::new(plan);
            // The shell's own output goes to the other end of the pipe.
            let script =
                format!("set -o pipefail; \"$0\" {command} {output}; echo \"code ${{PIPESTATUS[0]}}\" >&3");
            let script = format!("exec 3>&1; {{ {script}; }}");
            let outcome = run.workshop.start("bash", &["-c", &script, LOCKSTEP]).finish();
            assert_eq!(outcome.stdout.lines().last(), Some("code 0"), "{output}: {outcome:?}");
            assert_eq!(run.end(), *expected, "{output} under {:?}", plan.name);
        }
    }
}

#[test]
fn commands_whose_output_is_their_product_say_that_it_cannot_be_written() {
    let run = Run::new(PLANS[0]);
    run.finish().succeeds();
    for command in [
        "checkpoint list checkpoints",
        "models",
        "plan run.toml --set parallel.data_parallel_replicate=1 --json",
        "eval --model checkpoints --data text.txt --json",
        "generate --model checkpoints --prompt a --max-new-tokens 4",
    ] {
        let script = format!("\"$0\" {command} >/dev/full");
        let outcome = run.workshop.start("bash", &["-c", &script, LOCKSTEP]).finish();
        assert_eq!(outcome.code, Some(1), "{command}: {outcome:?}");
        assert!(outcome.stderr.contains("standard output"), "{command}: {outcome:?}");
        // A reader that stops early is not a failure: `lockstep models | head -1`.
        let script = format!("\"$0\" {command} | head -c 1 >/dev/null; exit ${{PIPESTATUS[0]}}");
        let outcome = run.workshop.start("bash", &["-c", &script, LOCKSTEP]).finish();
        assert!(!outcome.stderr.contains("panicked"), "{command}: {outcome:?}");
    }
}
