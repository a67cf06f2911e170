//! Analysis of flight records: a table of failures, and files that must be rejected.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use lockstep_observe::flight::{Analysis, Dump, Finding, analyse, read_all};
use serde_json::{Value, json};

/// Returns an operation of the group of all `world` ranks, called at `posted_us`. If `done`, it was met and completed 10 us
/// later.
fn call(number: u64, world: usize, kind: &str, elements: usize, posted_us: u64, done: bool) -> Value {
    let done_us = done.then_some(posted_us + 10);
    json!({
        "number": number, "group": { "index": 0, "first": 0, "size": world }, "sequence": number,
        "what": format!("{kind} of {elements} f32"), "kind": kind, "op": null, "dtype": "f32", "elements": elements,
        "root": null, "detail": 0, "posted_us": posted_us, "met_us": done_us, "done_us": done_us,
        "caller": format!("{kind}.rs:{elements}"),
    })
}

/// Returns the operation as [`call`] does, moved to a group of `size` ranks from `first`, of partition `index`.
fn in_group(mut call: Value, index: u32, first: usize, size: usize, sequence: u32) -> Value {
    call["group"] = json!({ "index": index, "first": first, "size": size });
    call["sequence"] = sequence.into();
    call
}

fn message(kind: &str, number: u64, peer: usize, elements: usize, done: bool) -> Value {
    let mut message = call(number, 3, kind, elements, 1000, done);
    message["root"] = peer.into();
    message["sequence"] = 0.into();
    message
}

/// Returns the dump of a host as JSON.
fn dump(world: usize, ranks: &[(usize, Vec<Value>)]) -> Value {
    let ranks: Vec<Value> =
        ranks.iter().map(|(rank, operations)| json!({ "rank": rank, "operations": operations })).collect();
    json!({
        "format": "lockstep flight recorder", "version": 1, "host": "here", "written_us": 5_000_000, "ended": null,
        "world_size": world, "ranks": ranks,
    })
}

fn analysed(dump: &Value) -> Analysis {
    analyse(&[Dump::parse(dump.to_string().as_bytes()).unwrap()])
}

/// Returns the culprits and the message for `world` ranks with these records.
fn told(world: usize, ranks: &[(usize, Vec<Value>)]) -> (Vec<usize>, String) {
    let analysis = analysed(&dump(world, ranks));
    let text = analysis.to_string();
    (analysis.culprits, text)
}

/// Returns a completed barrier, then an all-reduce that not all ranks call.
fn waiting(world: usize) -> Vec<Value> {
    vec![call(0, world, "barrier", 0, 1000, true), call(1, world, "all_reduce", 8, 2000, false)]
}

#[test]
fn who_has_not_come_is_named_with_what_it_did_last() {
    let idle = vec![call(0, 3, "barrier", 0, 1000, true)];
    let (culprits, text) = told(3, &[(0, waiting(3)), (1, idle), (2, waiting(3))]);
    assert_eq!(culprits, [1]);
    for part in [
        "rank 1 never came to operation 1 of the group of all 3 ranks:\n",
        "  ranks 0, 2 called all_reduce of 8 f32 (all_reduce.rs:8)\n",
        "  rank 1 last called barrier of 0 f32, operation 0 of the group of all 3 ranks (barrier.rs:0): done 5.0s before",
        "All ranks agree on 1 operation before.\n",
    ] {
        assert!(text.contains(part), "{part:?} in\n{text}");
    }
    let (culprits, text) = told(2, &[(0, waiting(2)), (1, Vec::new())]);
    assert_eq!(culprits, [1]);
    assert!(
        text.contains("rank 1 never came to operation 0") && text.contains("rank 1 has called nothing"),
        "{text}"
    );
}

#[test]
fn unlike_calls_are_told_with_what_differs_and_the_minority_is_to_blame() {
    let called = |world, kind: &str, elements| vec![call(0, world, kind, elements, 1000, false)];
    let sums = |elements| called(3, "all_reduce", elements);
    let (culprits, text) = told(3, &[(0, sums(9)), (1, sums(8)), (2, sums(8))]);
    assert_eq!(culprits, [0]);
    assert!(text.contains("different things (elements) as operation 0"), "{text}");
    assert!(
        text.contains("  ranks 1, 2 called all_reduce of 8 f32 (all_reduce.rs:8)\n  rank 0 called"),
        "{text}"
    );
    let (culprits, text) = told(2, &[(0, called(2, "all_reduce", 8)), (1, called(2, "barrier", 0))]);
    assert_eq!(culprits, [1], "of two, rank 0 is right");
    assert!(text.contains("(operation, elements)"), "{text}");
}

#[test]
fn of_two_groups_the_one_is_told_of_whose_missing_ranks_wait_for_nobody() {
    // Ranks 0 and 1 wait for rank 2, which waits for rank 3, which computes.
    let all = |done| call(0, 4, "barrier", 0, 1000, done);
    let pair = |number, posted| in_group(call(number, 4, "all_gather", 4, posted, false), 1, 2, 2, 0);
    let other = |number| in_group(call(number, 4, "all_gather", 4, 900, true), 1, 0, 2, 0);
    let next = call(2, 4, "all_reduce", 8, 2000, false);
    let next = in_group(next, 0, 0, 4, 1);
    let records = [
        (0, vec![all(true), other(1), next.clone()]),
        (1, vec![all(true), other(1), next]),
        (2, vec![all(true), pair(1, 3000)]),
        (3, vec![all(true)]),
    ];
    let (culprits, text) = told(4, &records);
    assert_eq!(culprits, [3], "{text}");
    assert!(text.contains("ranks 2, 3 never came to operation 1 of the group of all 4 ranks"), "{text}");
    // Two groups of the same two ranks, called in different orders.
    let first = |index| in_group(call(0, 2, "barrier", 0, 1000, false), index, 0, 2, 0);
    let (culprits, text) = told(2, &[(0, vec![first(1)]), (1, vec![first(2)])]);
    assert_eq!(culprits.len(), 1, "{text}");
    assert!(text.contains("wait for each other"), "{text}");
}

#[test]
fn messages_are_joined_between_their_two_ranks() {
    let sends = |done| vec![message("send", 0, 1, 5, done)];
    let (culprits, text) = told(3, &[(0, sends(false)), (1, Vec::new()), (2, Vec::new())]);
    assert_eq!(culprits, [1]);
    assert!(text.contains("rank 1 never came to message 0 from rank 0 to rank 1"), "{text}");
    let (culprits, text) =
        told(3, &[(0, sends(false)), (1, vec![message("receive", 0, 0, 6, false)]), (2, Vec::new())]);
    assert_eq!(culprits, [0, 1]);
    assert!(text.contains("message 0 from rank 0 to rank 1:"), "{text}");
    let received = vec![message("receive", 0, 0, 5, true)];
    assert_eq!(analysed(&dump(3, &[(0, sends(true)), (1, received)])).finding, Finding::Agreed);
}

#[test]
fn the_lost_rank_is_to_blame_whoever_waited_for_whom() {
    let mut found = dump(2, &[(0, vec![call(0, 2, "barrier", 0, 1000, true)]), (1, waiting(2))]);
    found["ended"] = json!({ "message": "rank 1 was lost: it was killed by signal 9", "lost": 1 });
    let analysis = analysed(&found);
    assert_eq!(analysis.culprits, [1]);
    let text = analysis.to_string();
    assert!(
        text.contains("the run ended: rank 1 was lost: it was killed by signal 9\n  rank 1 last called"),
        "{text}"
    );
    assert!(text.contains("rank 0 never came"), "{text}");
}

#[test]
fn records_that_are_not_there_are_not_held_against_anybody() {
    let (culprits, text) = told(3, &[(0, waiting(3)), (1, waiting(3))]);
    assert_eq!(culprits, [0; 0]);
    assert!(text.contains("1 of them left no records here"), "{text}");
    assert!(text.contains("Of rank 2 it is not known whether they came to operation 1"), "{text}");
    // Rank 1 has advanced so far that its record no longer holds the last calls of rank 0.
    let early: Vec<Value> = (0..4).map(|i| call(i, 2, "barrier", 0, 1000 + i, true)).collect();
    let late: Vec<Value> = (3..9).map(|i| call(i, 2, "barrier", 0, 1000 + i, i < 4)).collect();
    let (culprits, text) = told(2, &[(0, early), (1, late)]);
    assert_eq!(culprits, [0], "{text}");
    assert!(text.contains("rank 0 never came to operation 4"), "{text}");
}

#[test]
fn who_comes_late_is_told_by_the_median() {
    let records = |late_us: u64| (0..9).map(|i| call(i, 3, "barrier", 0, 1000 * i + late_us, true)).collect();
    let analysis = analysed(&dump(3, &[(0, records(0)), (1, records(700)), (2, records(20))]));
    assert_eq!((analysis.finding.clone(), analysis.agreed, analysis.compared), (Finding::Agreed, 9, 9));
    let order: Vec<(usize, f64, f64)> =
        analysis.stragglers.iter().map(|s| (s.rank, s.median_ms, s.last_share)).collect();
    assert_eq!(order, [(1, 0.7, 1.0), (2, 0.02, 0.0), (0, 0.0, 0.0)]);
    assert!(
        analysis
            .to_string()
            .contains("No operation on record is one on which ranks differ.\nAll ranks agree on 9")
    );
}

#[test]
fn an_operation_that_all_came_to_and_one_did_not_finish_is_told() {
    let call = |done| vec![call(0, 3, "all_reduce", 8, 1000, done)];
    let (culprits, text) = told(3, &[(0, call(true)), (1, call(false)), (2, call(true))]);
    assert_eq!(culprits, [1]);
    assert!(text.contains("all_reduce of 8 f32, and rank 1 did not finish it.\n  ranks 0, 2 did"), "{text}");
}

#[test]
fn what_no_run_writes_is_refused_with_its_reason() {
    let sound = || dump(2, &[(0, waiting(2)), (1, waiting(2))]);
    type Change = fn(&mut Value);
    let table: [(Change, &str); 12] = [
        (|d| d["version"] = 7.into(), "its version is 7, and this program reads 1"),
        (|d| d["format"] = "PyTorch".into(), "its format is \"PyTorch\""),
        (|d| d["world_size"] = 0.into(), "a world of 0 ranks"),
        (|d| d["world_size"] = u64::MAX.into(), "a world of"),
        (|d| d["world_size"] = 1.into(), "of 1"),
        (|d| d["ranks"][1]["rank"] = 0.into(), "two records of rank 0"),
        (|d| d["ranks"][1]["rank"] = (-1).into(), "invalid value"),
        (|d| d["ranks"][0]["operations"][1]["posted_us"] = u64::MAX.into(), "rank 0, operation 1: its times"),
        (|d| d["ranks"][0]["operations"][0]["done_us"] = 3.into(), "rank 0, operation 0: its times"),
        (|d| d["ranks"][0]["operations"][0]["number"] = 9.into(), "operation 9 stands before 1"),
        (
            |d| d["ranks"][0]["operations"][0]["group"]["size"] = 3.into(),
            "a group of 3 ranks from rank 0, of 2",
        ),
        (|d| d["ended"] = json!({ "message": "", "lost": 2 }), "the lost one is rank 2 of 2"),
    ];
    for (change, expected) in table {
        let mut dump = sound();
        change(&mut dump);
        let problem = Dump::parse(dump.to_string().as_bytes()).unwrap_err();
        assert!(problem.contains(expected), "{problem}, expected {expected}");
    }
    let text = sound().to_string();
    for length in [0, 1, text.len() / 2, text.len() - 1] {
        Dump::parse(&text.as_bytes()[..length]).unwrap_err();
    }
    Dump::parse(text.as_bytes()).unwrap();
}

#[test]
fn files_of_several_hosts_are_put_together_if_they_are_of_one_run() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, dump: Value| {
        let path = dir.path().join(name);
        std::fs::write(&path, dump.to_string()).unwrap();
        path
    };
    let idle = vec![call(0, 2, "barrier", 0, 1000, true)];
    let first = write("a.json", dump(2, &[(0, waiting(2))]));
    let second = write("b.json", dump(2, &[(1, idle)]));
    let analysis = analyse(&read_all(&[first.clone(), second]).unwrap());
    assert_eq!((analysis.culprits, analysis.known, analysis.hosts.len()), (vec![1], vec![0, 1], 1));
    let again = write("c.json", dump(2, &[(0, waiting(2))]));
    let of_three = write("d.json", dump(3, &[(2, waiting(3))]));
    for (other, expected) in [(again, "has records of rank 0 as well"), (of_three, "a run of 3 ranks")] {
        let error = read_all(&[first.clone(), other]).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(".json"), "{error}");
    }
}
