use proptest::{prelude::*, sample::select};

use super::*;

/// Any published schedule with numbers that it permits.
pub(super) fn published() -> impl Strategy<Value = (Kind, usize, usize, usize)> {
    (select(Kind::ALL.to_vec()), 1..7_usize, 1..20_usize, 1..5_usize).prop_map(
        |(kind, ranks, micro_batches, chunks)| {
            let (fewest, most) = kind.chunks();
            let micro_batches = match kind {
                Kind::Interleaved => micro_batches.next_multiple_of(ranks),
                _ if kind.is_v_shaped() => micro_batches + 2 * ranks - 1,
                _ => micro_batches,
            };
            (kind, ranks, micro_batches, chunks.clamp(fewest, most))
        },
    )
}

fn parse(rows: &[&str]) -> Vec<Vec<Pass>> {
    passes_from_csv(&rows.join("\n"), rows.len()).unwrap()
}

fn text(schedule: &Schedule, rank: usize) -> String {
    schedule.actions(rank).iter().map(Action::to_string).collect::<Vec<_>>().join(" ")
}

fn passes_text(schedule: &Schedule, rank: usize) -> String {
    schedule.passes(rank).map(|pass| pass.to_string()).collect::<Vec<_>>().join(" ")
}

/// All problems of some rows, as text.
fn problems(micro_batches: usize, rows: &[&str]) -> Vec<String> {
    let error = Schedule::from_passes(micro_batches, &parse(rows)).unwrap_err();
    error.0.iter().map(ScheduleProblem::to_string).collect()
}

#[test]
fn one_forward_one_backward_is_the_published_one() {
    let schedule = Schedule::new(Kind::OneForwardOneBackward, 3, 4, 1).unwrap();
    assert_eq!(passes_text(&schedule, 0), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
    assert_eq!(passes_text(&schedule, 1), "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3");
    assert_eq!(passes_text(&schedule, 2), "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3");
}

#[test]
fn interleaved_goes_through_chunks_in_groups_of_as_many_micro_batches_as_ranks() {
    let schedule = Schedule::new(Kind::Interleaved, 2, 4, 2).unwrap();
    assert_eq!(passes_text(&schedule, 0), "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3");
    assert_eq!(passes_text(&schedule, 1), "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3");
}

#[test]
fn the_zero_bubble_schedules_let_weights_wait() {
    let schedule = Schedule::new(Kind::ZeroBubbleH1, 3, 3, 1).unwrap();
    assert_eq!(passes_text(&schedule, 0), "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2");
    assert_eq!(passes_text(&schedule, 2), "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2");
    let schedule = Schedule::new(Kind::ZeroBubbleV, 2, 4, 2).unwrap();
    assert_eq!(
        passes_text(&schedule, 0),
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3"
    );
}

#[test]
fn sends_follow_their_pass_and_a_turn_on_one_rank_sends_nothing() {
    let passes = parse(&["0F0,3F0,3B0,0B0", "1F0,2F0,2B0,1B0"]);
    let schedule = Schedule::from_passes(1, &passes).unwrap();
    assert_eq!(
        text(&schedule, 0),
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 3REDUCE_GRAD 0RECV_B0 0B0 0REDUCE_GRAD STEP"
    );
    assert_eq!(
        text(&schedule, 1),
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 2REDUCE_GRAD 1B0 1SEND_B0 1REDUCE_GRAD STEP"
    );
}

#[test]
fn everything_forgotten_doubled_or_out_of_order_is_told_at_once() {
    assert_eq!(
        problems(3, &["0F0,0F1,0F1,0B1,0B0,0W0", "1F0,1F1,1F2,1I0,1I1,1W1,1W0,1B2,1F7,9F0"]),
        [
            "stage 2 of 3 is on no rank",
            "rank 0 does 0F1 2 times",
            "rank 0 does 0B0 and its half 0W0",
            "rank 0 lacks 0F2",
            "rank 0 lacks 0B2",
            "rank 0 does 0B0 after 0B1: gradients of weights are added in ascending order of micro-batches",
            "rank 0 does 0W0 after 0B1: gradients of weights are added in ascending order of micro-batches",
            "rank 1: 1F7 names a micro-batch that does not exist; there are 3, counted from 0",
            "rank 1: 9F0 names a stage that does not exist; the schedule has 3 stages, counted from 0",
            "rank 1 does 1W0 after 1W1: gradients of weights are added in ascending order of micro-batches",
        ]
    );
}

#[test]
fn an_action_before_what_it_needs_is_told_with_what_that_is() {
    assert_eq!(
        problems(1, &["0B0,0F0,3F0,3W0,3I0", "1F0,2B0,2F0,1I0,1W0"]),
        [
            "rank 0 does 0B0 before 0F0, which it needs",
            "rank 0 does 3W0 before 3I0, which it needs",
            "rank 1 does 2B0 before 2F0, which it needs",
            "deadlock: rank 0 waits before 0B0 for 1SEND_B0 of rank 1; \
             rank 1 waits before 1F0 for 0SEND_F0 of rank 0",
        ]
    );
}

#[test]
fn ranks_that_wait_for_each_other_are_told_as_a_circle() {
    // Rank 0 wants a backward before it gives the forward that rank 1 wants first.
    assert_eq!(
        problems(2, &["0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"]),
        ["deadlock: rank 0 waits before 0B0 for 1SEND_B0 of rank 1; \
             rank 1 waits before 1F1 for 0SEND_F1 of rank 0"]
    );
}

#[test]
fn full_lists_are_checked_like_derived_ones() {
    let good = Schedule::new(Kind::OneForwardOneBackward, 2, 2, 1).unwrap();
    let lists: Vec<Vec<Action>> = (0..2).map(|rank| good.actions(rank).to_vec()).collect();
    let check = |lists: &[Vec<Action>]| Schedule::from_actions(vec![0, 1], 2, lists.to_vec());
    assert_eq!(check(&lists), Ok(good));
    // Each action that is removed from a valid list is reported as missing, and nothing else is reported.
    for (rank, list) in lists.iter().enumerate() {
        for (place, action) in list.iter().enumerate() {
            let mut lists = lists.clone();
            lists[rank].remove(place);
            let problems = check(&lists).unwrap_err().0;
            assert_eq!(problems, [ScheduleProblem::Forgotten { rank, action: *action }]);
        }
    }
    // If a send waits for its receive, two ranks that both send first never receive.
    let mut crossed = lists;
    let receive = crossed[1].iter().position(|action| action.to_string() == "1RECV_F1").unwrap();
    let receive = crossed[1].remove(receive);
    let forward = crossed[1].iter().position(|action| action.to_string() == "1F1").unwrap();
    crossed[1].insert(forward, receive);
    let receive = crossed[0].iter().position(|action| action.to_string() == "0RECV_B0").unwrap();
    let receive = crossed[0].remove(receive);
    let backward = crossed[0].iter().position(|action| action.to_string() == "0B0").unwrap();
    crossed[0].insert(backward, receive);
    assert_eq!(
        check(&crossed).unwrap_err().to_string(),
        "deadlock: rank 0 waits before 0SEND_F1 for 1RECV_F1 of rank 1; \
         rank 1 waits before 1SEND_B0 for 0RECV_B0 of rank 0"
    );
}

#[test]
fn numbers_that_do_not_fit_are_told_with_the_nearest_that_do() {
    let message = |kind, ranks, micro_batches, chunks| {
        Schedule::new(kind, ranks, micro_batches, chunks).unwrap_err().to_string()
    };
    assert_eq!(
        message(Kind::Interleaved, 4, 10, 1),
        "interleaved_1f1b cannot have 1 stages on each rank; nearest: 2\n\
         interleaved_1f1b takes micro-batches in groups of 4, the pipeline ranks, and 10 are not a multiple; \
         nearest: 8 or 12"
    );
    assert_eq!(
        message(Kind::ZeroBubbleV, 4, 7, 2),
        "zb_v on 4 pipeline ranks needs at least 8 micro-batches, not 7"
    );
    assert_eq!(
        message(Kind::GPipe, 4, 0, 1),
        "gpipe on 4 pipeline ranks needs at least 1 micro-batches, not 0"
    );
    assert_eq!(
        message(Kind::LoopedBreadthFirst, 4, usize::MAX, 2),
        "the schedule would have more than 4194304 forwards"
    );
}

#[test]
fn a_file_is_read_as_pytorch_writes_it() {
    let rows = "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n";
    let schedule = Schedule::from_passes(2, &passes_from_csv(rows, 2).unwrap()).unwrap();
    assert_eq!(passes_text(&schedule, 0), "0F0 0F1 0B0 0B1");
    let short = passes_from_csv("F0,F1,B0,B1\r\nF0,I0,W0,(F1;B1)OVERLAP_F_B\r\n", 2).unwrap();
    assert_eq!(passes_text(&Schedule::from_passes(2, &short).unwrap(), 1), "1F0 1I0 1W0 1F1 1B1");
    assert_eq!(
        passes_from_csv("0F0,0X1,F+1,\n0SEND_F0", 3).unwrap_err().to_string(),
        "the schedule has 2 rows for 3 pipeline ranks; it needs one for each\n\
         row 1, cell 2: \"0X1\" is no pass; one is written STAGE, one of F, B, I and W, MICRO-BATCH, as in 1F0\n\
         row 1, cell 3: \"F+1\" is no pass; one is written STAGE, one of F, B, I and W, MICRO-BATCH, as in 1F0\n\
         row 2, cell 1: \"0SEND_F0\" is no pass; one is written STAGE, one of F, B, I and W, MICRO-BATCH, as in 1F0"
    );
}

#[test]
fn names_are_those_of_the_configuration() {
    for kind in Kind::ALL {
        assert_eq!(Kind::from_name(kind.name()), Some(kind));
        assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
    }
}

proptest! {
    #[test]
    fn published_schedules_are_complete_and_cannot_deadlock((kind, ranks, micro_batches, chunks) in published()) {
        let schedule = Schedule::new(kind, ranks, micro_batches, chunks);
        prop_assert!(schedule.is_ok(), "{}", schedule.unwrap_err());
        let schedule = schedule.unwrap();
        prop_assert_eq!(schedule.stages(), ranks * chunks);
        for rank in 0..ranks {
            let stages: Vec<_> = schedule.stages_of(rank).collect();
            let expected: Vec<_> = (0..chunks).map(|chunk| kind.stage(rank, chunk, ranks)).collect();
            prop_assert_eq!(stages, expected);
        }
    }

    #[test]
    fn every_send_follows_its_pass_and_every_receive_stands_before_its_own(
        (kind, ranks, micro_batches, chunks) in published(),
    ) {
        let schedule = Schedule::new(kind, ranks, micro_batches, chunks).unwrap();
        let stages = schedule.stages();
        for rank in 0..ranks {
            let list = schedule.actions(rank);
            for (place, action) in list.iter().enumerate() {
                if let Action::Send(message) = action {
                    let Action::Compute(pass) = list[place - 1] else { panic!("{}: {action}", text(&schedule, rank)) };
                    prop_assert_eq!(Message::made_by(pass, stages), Some(*message));
                }
                if let Action::Receive(message) = action {
                    let needs = |action: &Action| {
                        matches!(action, Action::Compute(pass) if Message::needed_by(*pass, stages) == Some(*message))
                    };
                    prop_assert!(list[place..].iter().any(needs), "{}: {action}", text(&schedule, rank));
                }
            }
        }
    }

    #[test]
    fn a_pass_taken_out_or_moved_is_always_noticed(
        (kind, ranks, micro_batches, chunks) in published(), at in any::<prop::sample::Index>(), rank in 0..6_usize,
    ) {
        let mut passes = kind.passes(ranks, micro_batches, chunks).unwrap();
        let list = &mut passes[rank % ranks];
        let pass = list.remove(at.index(list.len()));
        let error = Schedule::from_passes(micro_batches, &passes).unwrap_err();
        let noticed = error.0.iter().any(|problem| {
            matches!(problem, ScheduleProblem::Forgotten { action, .. } if *action == Action::Compute(pass))
        });
        // A stage that loses its only forward may be assigned to another rank; then there are several problems.
        prop_assert!(noticed || error.0.len() > 1, "{pass}: {error}");
        passes[rank % ranks].insert(0, pass);
        let first = pass.kind == PassKind::Forward && pass.micro_batch == 0 && pass.stage < ranks;
        prop_assert!(pass.kind == PassKind::Forward || first || Schedule::from_passes(micro_batches, &passes).is_err());
    }

    #[test]
    fn any_passes_at_all_give_a_schedule_or_problems(
        lists in prop::collection::vec(
            prop::collection::vec((select(PassKind::ALL.to_vec()), 0..4_usize, 0..3_usize), 0..20), 0..4
        ),
    ) {
        let pass = |(kind, stage, micro_batch)| Pass { kind, stage, micro_batch };
        let lists: Vec<Vec<Pass>> = lists.into_iter().map(|list| list.into_iter().map(pass).collect()).collect();
        if let Err(error) = Schedule::from_passes(3, &lists) {
            prop_assert!(!error.0.is_empty());
        }
    }
}

#[test]
fn published_schedules_need_no_second_look() {
    for kind in Kind::ALL {
        for (ranks, micro_batches, chunks) in
            [(1, 1, 1), (2, 4, 2), (3, 6, 2), (4, 8, 1), (4, 12, 3), (8, 16, 2)]
        {
            let checked = Schedule::new(kind, ranks, micro_batches, chunks).ok();
            assert_eq!(
                Schedule::published(kind, ranks, micro_batches, chunks).ok(),
                checked,
                "{kind:?} {ranks} {micro_batches}"
            );
        }
    }
}
