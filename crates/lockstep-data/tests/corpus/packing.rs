//! Tests of documents in windows: which tokens attend to which, which are predicted, and which documents stay whole.

use std::{fmt::Write, sync::Arc};

use lockstep_data::{
    Dataset, Format, IGNORE_LABEL, MicroBatch, Packing, SampleOrder, Supervision, Tail, Tokenizer, Tokens,
    WindowOptions,
};
use proptest::prelude::*;

use crate::workshop::{Workshop, trained_tokenizer};

fn windows(tokens: &Arc<Tokens>, seq_len: usize, packing: Packing) -> Dataset {
    let options = WindowOptions { seq_len, order: SampleOrder::Sequential, tail: Tail::Drop, packing };
    Dataset::new(Arc::clone(tokens), 0..tokens.tokens(), options, "the test set").unwrap()
}

/// Tokenizes each of `documents` as one document of bytes.
fn byte_documents(workshop: &Workshop, documents: &[&str]) -> Arc<Tokens> {
    let mut lines = String::new();
    for document in documents {
        writeln!(lines, "{{\"text\": \"{document}\"}}").unwrap();
    }
    workshop
        .open(&[workshop.write("documents.jsonl", lines)], Format::Auto, Some(&Tokenizer::Bytes), 256)
        .unwrap()
}

fn all(dataset: &Dataset) -> MicroBatch {
    let mut batch = MicroBatch::default();
    dataset.fill(0..dataset.windows(), &mut batch).unwrap();
    batch
}

/// Formats labels as text, with a dot for each masked one.
fn labels(batch: &MicroBatch) -> String {
    let letter = |&label: &i32| if label == IGNORE_LABEL { '.' } else { label as u8 as char };
    batch.labels.iter().map(letter).collect()
}

fn ids(batch: &MicroBatch) -> String {
    batch.ids.iter().map(|&id| if id == 0 { '_' } else { id as u8 as char }).collect()
}

#[test]
fn documents_that_are_kept_apart_begin_at_zero_and_predict_nothing_of_the_next() {
    let workshop = Workshop::new();
    let tokens = byte_documents(&workshop, &["abc", "de", "fghijk"]);
    assert_eq!((tokens.documents(), tokens.tokens()), (3, 11));
    let stream = all(&windows(&tokens, 5, Packing::Stream));
    assert_eq!((ids(&stream), labels(&stream)), ("abcdefghij".to_owned(), "bcdefghijk".to_owned()));
    assert_eq!(stream.positions, [0, 1, 2, 3, 4].repeat(2));
    assert_eq!(stream.document_starts, [0; 10]);

    let apart = all(&windows(&tokens, 5, Packing::Documents));
    // The second window begins with the third document.
    assert_eq!((ids(&apart), labels(&apart)), ("abcdefghij".to_owned(), "bc.e.ghijk".to_owned()));
    assert_eq!(apart.positions, [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]);
    assert_eq!(apart.document_starts, [0, 0, 0, 3, 3, 0, 0, 0, 0, 0]);
}

#[test]
fn a_document_that_begins_right_after_a_window_is_no_label_of_it() {
    let workshop = Workshop::new();
    let apart = all(&windows(&byte_documents(&workshop, &["abcd", "efgh", "i"]), 4, Packing::Documents));
    assert_eq!((ids(&apart), labels(&apart)), ("abcdefgh".to_owned(), "bcd.fgh.".to_owned()));
    assert_eq!(apart.positions, [0, 1, 2, 3, 0, 1, 2, 3]);
}

#[test]
fn whole_documents_are_cut_only_where_they_are_longer_than_a_window() {
    let workshop = Workshop::new();
    let tokens = byte_documents(&workshop, &["abc", "def", "ghijklmnopq", "rs", "t"]);
    let dataset = windows(&tokens, 5, Packing::WholeDocuments);
    let batch = all(&dataset);
    // The first two documents fit together, since the last token of a window is only a label. So does the end of the
    // third.
    assert_eq!(ids(&batch), "abcdeghijklmnoprst__");
    assert_eq!(labels(&batch), "bc.efhijklmnopqs....");
    assert_eq!(batch.positions[15..], [0, 1, 0, 0, 1], "padding is a document of its own");
    assert_eq!(batch.document_starts[15..], [0, 0, 2, 3, 3]);
    assert_eq!(dataset.filled(), 18.0 / 20.0);
}

#[test]
fn a_last_token_that_is_a_label_only_fits_beyond_the_window() {
    let workshop = Workshop::new();
    let batch = all(&windows(&byte_documents(&workshop, &["abcd", "efgh"]), 3, Packing::WholeDocuments));
    assert_eq!((ids(&batch), labels(&batch)), ("abcefg".to_owned(), "bcdfgh".to_owned()));
}

#[test]
fn raw_tokens_are_documents_up_to_each_end_of_text() {
    let (workshop, tokenizer) = (Workshop::new(), trained_tokenizer());
    let eos = tokenizer.eos_id().unwrap() as u16;
    let ids: Vec<u8> = [5, 6, eos, 7, eos, 8, 9, 10].iter().flat_map(|id: &u16| id.to_le_bytes()).collect();
    let pattern = workshop.write("a.bin", ids);
    let tokens = workshop.open(&[pattern.clone(), pattern], Format::Auto, Some(&tokenizer), 300).unwrap();
    assert_eq!((tokens.tokens(), tokens.documents()), (16, 6));
    let batch = all(&windows(&tokens, 15, Packing::Documents));
    assert_eq!(batch.document_starts, [0, 0, 0, 3, 3, 5, 5, 5, 8, 8, 8, 11, 11, 13, 13]);
    let ends = i32::from(eos);
    let masked = IGNORE_LABEL;
    assert_eq!(
        batch.labels,
        [6, ends, masked, ends, masked, 9, 10, masked, 6, ends, masked, ends, masked, 9, 10]
    );
}

#[test]
fn prompts_are_read_and_not_predicted() {
    let workshop = Workshop::new();
    let lines = r#"{"prompt": "ab", "completion": "cd"}
{"text": "efg"}
{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}"#;
    let pattern = workshop.write("a.jsonl", lines);
    let tokens = workshop.open(&[pattern], Format::Auto, Some(&Tokenizer::Bytes), 256).unwrap();
    let chat = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\ny<|im_end|>\n";
    assert_eq!(tokens.tokens() as usize, 7 + chat.len());
    assert_eq!(tokens.files()[0].context_tokens() as usize, 2 + chat.len() - "y<|im_end|>\n".len());
    let text = labels(&all(&windows(&tokens, tokens.tokens() as usize - 1, Packing::Stream)));
    let expected = format!(".cdefg{}y<|im_end|>\n", ".".repeat(chat.len() - "y<|im_end|>\n".len()));
    assert_eq!(text, expected);
}

#[test]
fn an_answer_ends_with_an_end_of_text_token_that_is_predicted() {
    let (workshop, tokenizer) = (Workshop::new(), trained_tokenizer());
    let pattern = workshop.write("a.jsonl", r#"{"prompt": "the rank", "completion": " waits"}"#);
    let tokens = workshop.open(&[pattern], Format::Auto, Some(&tokenizer), 300).unwrap();
    let whole = tokenizer.encode("the rank waits").unwrap();
    let prompt = tokenizer.encode("the rank").unwrap();
    assert_eq!(whole[..prompt.len()], prompt, "or the test says nothing");
    assert_eq!(tokens.tokens() as usize, whole.len() + 1);
    let batch = all(&windows(&tokens, whole.len(), Packing::Stream));
    let mut expected = vec![IGNORE_LABEL; prompt.len() - 1];
    expected.extend(whole[prompt.len()..].iter().map(|&id| id as i32));
    expected.push(tokenizer.eos_id().unwrap() as i32);
    assert_eq!(batch.labels, expected);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn kept_apart_every_token_but_the_first_of_a_document_is_predicted_once(
        lengths in prop::collection::vec(1_usize..12, 1..12), seq_len in 1_usize..9
    ) {
        let workshop = Workshop::new();
        let mut letter = 0;
        let documents: Vec<String> = lengths
            .iter()
            .map(|&length| (0..length).map(|_| { letter += 1; (b'0' + letter % 74) as char }).collect::<String>())
            .map(|document| document.replace(['"', '\\'], "!"))
            .collect();
        let tokens = byte_documents(&workshop, &documents.iter().map(String::as_str).collect::<Vec<_>>());
        let predictable: usize = lengths.iter().map(|length| length - 1).sum();
        let options =
            WindowOptions { seq_len, order: SampleOrder::Sequential, tail: Tail::Pad, packing: Packing::Stream };
        for packing in [Packing::Documents, Packing::WholeDocuments] {
            let range = 0..tokens.tokens();
            let options = WindowOptions { packing, ..options };
            let Ok(dataset) = Dataset::new(Arc::clone(&tokens), range, options, "the test set") else {
                prop_assert!(tokens.tokens() < 2, "{} tokens are a window", tokens.tokens());
                continue;
            };
            let batch = all(&dataset);
            let mut predicted: Vec<u8> =
                batch.labels.iter().filter(|&&label| label != IGNORE_LABEL).map(|&label| label as u8).collect();
            prop_assert_eq!(predicted.len(), predictable, "{:?}", packing);
            let mut expected: Vec<u8> = documents.iter().flat_map(|text| &text.as_bytes()[1..]).copied().collect();
            expected.sort_unstable();
            predicted.sort_unstable();
            prop_assert_eq!(predicted, expected);
            for (row, start) in (0..batch.ids.len()).zip(&batch.document_starts) {
                let at = row % seq_len;
                prop_assert!(*start as usize <= at && batch.positions[row] as usize == at - *start as usize);
            }
        }
    }
}

/// Builds samples with prompts and completions of the given lengths, in bytes.
fn pairs(workshop: &Workshop, lengths: &[(usize, usize)]) -> Arc<Tokens> {
    let line = |&(prompt, completion): &(usize, usize)| {
        let (prompt, completion) = ("p".repeat(prompt), "c".repeat(completion));
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{completion}\"}}\n")
    };
    let lines: String = lengths.iter().map(line).collect();
    let pattern = workshop.write("pairs.jsonl", lines);
    workshop.open(&[pattern], Format::Auto, Some(&Tokenizer::Bytes), 256).unwrap()
}

#[test]
fn samples_whose_answers_do_not_fit_are_left_out_and_counted() {
    let workshop = Workshop::new();
    // A sample that fits, a prompt that fills a window, no answer, a truncated answer, and another sample that fits.
    let tokens = pairs(&workshop, &[(2, 2), (6, 2), (3, 0), (2, 9), (1, 2)]);
    let dataset = windows(&tokens, 5, Packing::WholeDocuments);
    let batch = all(&dataset);
    assert_eq!(ids(&batch), "ppcc_ppcccpcc__");
    assert_eq!(labels(&batch), ".cc...cccccc...");
    let expected = Supervision {
        tokens: 4 + 8 + 3 + 11 + 3,
        labels: 2 + 4 + 2,
        samples: 5,
        without_answer: 1,
        answer_out_of_window: 1,
        truncated: 1,
        seq_len_for_one_more: 6,
        ..Supervision::default()
    };
    assert_eq!(dataset.supervision(), Some(expected));
}

#[test]
fn a_stream_leaves_out_windows_without_a_label() {
    let workshop = Workshop::new();
    let tokens = pairs(&workshop, &[(11, 2), (10, 3)]);
    let dataset = windows(&tokens, 5, Packing::Stream);
    assert_eq!(labels(&all(&dataset)), "cc.....ccc");
    let supervision = dataset.supervision().unwrap();
    assert_eq!((supervision.labels, supervision.masked_windows, supervision.samples), (5, 3, 0));
}

#[test]
fn data_in_which_nothing_is_predicted_is_refused_with_the_length_that_helps() {
    let workshop = Workshop::new();
    let refused = |lengths: &[(usize, usize)], packing| {
        let tokens = pairs(&workshop, lengths);
        let order = SampleOrder::Sequential;
        let options = WindowOptions { seq_len: 5, order, tail: Tail::Drop, packing };
        let range = 0..tokens.tokens();
        Dataset::new(tokens, range, options, "the training set").unwrap_err().to_string()
    };
    let problem = refused(&[(9, 2), (7, 1), (3, 0)], Packing::WholeDocuments);
    for part in ["of its 3 samples 2 have prompts", "train.seq_len = 7 holds", "1 have no answer"] {
        assert!(problem.contains(part), "{problem}");
    }
    let problem = refused(&[(20, 0)], Packing::Stream);
    assert!(problem.contains("none of its 3 windows"), "{problem}");
}
