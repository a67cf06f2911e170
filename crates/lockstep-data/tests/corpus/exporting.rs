//! Tests of text exported as indexed data sets: their contents, and that an interruption changes no byte.

use std::{
    cell::Cell,
    fs::{self, OpenOptions},
    io::Write,
    path::Path,
};

use lockstep_data::{
    DataError, Ending, ErrorKind, ExportOptions, Exported, Format, Result, Silent, TextOptions, Tokenizer,
    tokenize_to_indexed,
};

use crate::workshop::{Workshop, all_ids, sample_text, trained_tokenizer};

fn export(
    workshop: &Workshop,
    patterns: &[String],
    tokenizer: &Tokenizer,
    ending: Ending,
    should_stop: &dyn Fn() -> bool,
) -> Result<Exported> {
    let options = ExportOptions {
        prefix: &workshop.path("out"),
        text: TextOptions::default(),
        ending,
        progress: &Silent,
        should_stop,
    };
    tokenize_to_indexed(&workshop.sources(patterns), tokenizer, &options)
}

fn result(workshop: &Workshop) -> (Vec<u8>, Vec<u8>) {
    assert!(!workshop.path("out.partial").exists(), "nothing but the result is left");
    (fs::read(workshop.path("out.bin")).unwrap(), fs::read(workshop.path("out.idx")).unwrap())
}

#[test]
fn an_exported_text_is_read_as_the_text_itself() {
    let (workshop, tokenizer) = (Workshop::new(), trained_tokenizer());
    let eos = tokenizer.eos_id().unwrap();
    let lines = "{\"text\": \"the rank\"}\n{\"text\": \"\"}\n{\"text\": \"all\"}\n";
    let patterns = [workshop.write("a.jsonl", lines), workshop.write("b.txt", sample_text(200))];
    let made = export(&workshop, &patterns, &tokenizer, Ending::EndOfText, &|| false).unwrap();
    let prefix = workshop.path("out").to_str().unwrap().to_owned();
    let tokens = workshop.open(&[prefix], Format::Auto, None, 300).unwrap();
    assert_eq!((tokens.documents(), tokens.tokens()), (3, made.tokens));
    let mut expected = all_ids(&workshop.tokenize(&patterns, &tokenizer).unwrap().file);
    expected.push(eos);
    assert_eq!(all_ids(&tokens.files()[0]), expected);
    tokens.verify().unwrap();
}

#[test]
fn without_end_of_text_tokens_documents_are_in_the_index_alone() {
    let workshop = Workshop::new();
    let tokenizer = trained_tokenizer();
    let patterns = [workshop.write("a.txt", "the rank"), workshop.write("b.txt", "all")];
    export(&workshop, &patterns, &tokenizer, Ending::Nothing, &|| false).unwrap();
    let prefix = workshop.path("out").to_str().unwrap().to_owned();
    let tokens = workshop.open(&[prefix], Format::Indexed, None, 300).unwrap();
    let expected = [tokenizer.encode("the rank").unwrap(), tokenizer.encode("all").unwrap()].concat();
    assert_eq!((all_ids(&tokens.files()[0]), tokens.documents()), (expected, 2));
}

/// Appends partial writes to the files, as a kill or a power loss leaves them.
fn tear(work: &Path) {
    for name in ["tokens.bin", "lengths.u32", "journal.jsonl"] {
        let mut file = OpenOptions::new().append(true).open(work.join(name)).unwrap();
        file.write_all(b"{\"position\": torn").unwrap();
    }
}

#[test]
fn work_that_is_cut_off_at_any_step_goes_on_to_the_same_bytes() {
    // A round ends after 16 MiB of text: three rounds, one of which ends within a document, and a last one.
    let text = sample_text(330_000);
    let line = format!("{{\"text\": {:?}}}\n", "wait ".repeat(200));
    let write = |workshop: &Workshop| {
        [
            workshop.write("a.txt", &text),
            workshop.write("b.jsonl", line.repeat(30_000)),
            workshop.write("c.txt", "end"),
        ]
    };
    let undisturbed = Workshop::new();
    export(&undisturbed, &write(&undisturbed), &Tokenizer::Bytes, Ending::EndOfText, &|| false).unwrap();
    let expected = result(&undisturbed);

    let workshop = Workshop::new();
    let patterns = write(&workshop);
    let mut stops = 0;
    let made = loop {
        let steps = Cell::new(0);
        let stop_at_first = || steps.replace(1) == 0;
        match export(&workshop, &patterns, &Tokenizer::Bytes, Ending::EndOfText, &stop_at_first) {
            Ok(made) => break made,
            Err(error) => {
                assert!(matches!(error, DataError::Interrupted { .. }), "{error:?}");
                assert_eq!(error.kind(), ErrorKind::Interrupted);
                stops += 1;
                assert!(stops < 20, "every run makes a step");
                tear(&workshop.path("out.partial"));
                // The last stop would come at the very end; let this run finish.
                if stops == 5 {
                    break export(&workshop, &patterns, &Tokenizer::Bytes, Ending::EndOfText, &|| false)
                        .unwrap();
                }
            }
        }
    };
    assert!(made.resumed_tokens > 0 && stops >= 3, "{made:?} after {stops} stops");
    assert!(result(&workshop) == expected, "the bytes differ");
}

#[test]
fn a_kill_between_the_two_renames_loses_nothing() {
    let workshop = Workshop::new();
    let patterns = [workshop.write("a.txt", "the rank")];
    let first = export(&workshop, &patterns, &Tokenizer::Bytes, Ending::EndOfText, &|| true).unwrap_err();
    assert!(matches!(first, DataError::Interrupted { tokens: 8, .. }), "{first:?}");
    fs::rename(workshop.path("out.partial/tokens.bin"), workshop.path("out.bin")).unwrap();
    export(&workshop, &patterns, &Tokenizer::Bytes, Ending::EndOfText, &|| false).unwrap();
    assert_eq!(result(&workshop).0, b"the rank".iter().flat_map(|&byte| [byte, 0]).collect::<Vec<u8>>());
}

#[test]
fn other_work_and_finished_work_are_left_alone() {
    let workshop = Workshop::new();
    let patterns = [workshop.write("a.txt", "the rank")];
    let run = |patterns: &[String], stop: bool| {
        export(&workshop, patterns, &Tokenizer::Bytes, Ending::EndOfText, &|| stop).unwrap_err()
    };
    let others = [workshop.write("b.txt", "other text"), workshop.write("c.jsonl", "{}")];
    assert!(
        matches!(run(&others, false), DataError::JsonRecord { .. }),
        "this comes nowhere, and is in nobody's way"
    );
    assert!(matches!(run(&patterns, true), DataError::Interrupted { .. }));
    assert!(matches!(run(&others, false), DataError::OtherWork { .. }));
    fs::write(workshop.path("out.partial/tokens.bin"), "").unwrap();
    assert!(
        matches!(run(&patterns, false), DataError::OtherWork { .. }),
        "what the journal counts is not there"
    );
    fs::remove_dir_all(workshop.path("out.partial")).unwrap();
    workshop.write("out.idx", "somebody's");
    assert!(matches!(run(&patterns, false), DataError::OutputExists { .. }));
    assert_eq!(fs::read(workshop.path("out.idx")).unwrap(), b"somebody's");
}

#[test]
fn prompts_are_refused_for_the_format_cannot_keep_them() {
    let workshop = Workshop::new();
    let patterns = [workshop.write("a.jsonl", r#"{"prompt": "2+2=", "completion": "4"}"#)];
    let error = export(&workshop, &patterns, &Tokenizer::Bytes, Ending::EndOfText, &|| false).unwrap_err();
    assert!(matches!(error, DataError::NoPlaceForPrompts { document: 1 }), "{error:?}");
}
