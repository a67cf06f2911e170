//! Runs every parser on thousands of mutations of valid inputs, on stable and within seconds. A failure prints the
//! target and the number of the mutant, which reproduce it.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use lockstep_testkit::mutate::mutant;
use lockstep_testkit::{TARGETS, Target, Verdict};

/// Time limit per mutant. A parser that exceeds it for a few kilobytes could hang on a larger input.
const TIME_LIMIT: Duration = Duration::from_secs(2);

fn survives(name: &str, mutants: u64) {
    let target: &Target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let seeds = (target.seeds)();
    for (number, seed) in seeds.iter().enumerate() {
        let text = String::from_utf8_lossy(seed);
        assert_eq!((target.parse)(seed), Verdict::Accepted, "seed {number} of {name}: {text}");
    }
    let mut accepted = 0;
    for number in 0..mutants {
        let bytes = mutant(&seeds, target.words, number);
        let begin = Instant::now();
        let verdict = catch_unwind(AssertUnwindSafe(|| (target.parse)(&bytes)));
        let shown = || format!("mutant {number} of {name}: {:?}", String::from_utf8_lossy(&bytes));
        accepted += u64::from(verdict.unwrap_or_else(|_| panic!("{}", shown())) == Verdict::Accepted);
        assert!(begin.elapsed() < TIME_LIMIT, "{:?} for {}", begin.elapsed(), shown());
    }
    // If nearly all mutants are rejected by the first check, the rest of the parser is not tested.
    assert!(accepted > mutants / 200, "only {accepted} of {mutants} mutants of {name} were accepted");
    assert!(accepted < mutants, "{name} refuses nothing");
}

#[test]
fn tensors_of_any_gguf_file_lie_in_it_or_it_is_refused() {
    survives("gguf_file", 20_000);
}

#[test]
fn any_quantized_model_is_repacked_with_its_own_values_or_refused() {
    survives("quantized_model", 4_000);
}

#[test]
fn any_safetensors_file_is_tiled_or_refused() {
    survives("safetensors_header", 20_000);
}

#[test]
fn any_manifest_stays_in_its_files_or_is_refused() {
    survives("checkpoint_manifest", 10_000);
}

#[test]
fn any_token_file_header_reads_as_it_was_written_or_is_refused() {
    survives("token_file_header", 20_000);
}

#[test]
fn any_index_is_as_long_as_it_says_or_refused() {
    survives("index_header", 20_000);
}

#[test]
fn any_frame_is_read_as_it_was_written_or_refused() {
    survives("frames", 20_000);
}

#[test]
fn any_parquet_file_gives_texts_or_is_refused() {
    survives("parquet_file", 3_000);
}

#[test]
fn any_json_line_gives_its_text_or_is_refused() {
    survives("json_line", 20_000);
}

#[test]
fn any_tokenizer_gives_ids_of_its_vocabulary_or_is_refused() {
    survives("tokenizer_json", 3_000);
}

#[test]
fn any_model_configuration_reads_as_it_was_written_or_is_refused() {
    survives("model_config", 10_000);
}

#[test]
fn any_run_configuration_is_consistent_or_refused() {
    survives("run_toml", 10_000);
}

#[test]
fn no_record_of_a_run_becomes_markup_in_its_report() {
    survives("run_report", 5_000);
}

#[test]
fn any_adapter_configuration_is_one_that_can_be_used_or_is_refused() {
    survives("adapter_config", 10_000);
}

#[test]
fn any_flight_record_is_told_in_words_or_refused() {
    survives("flight_records", 5_000);
}

#[test]
fn any_plan_gives_every_rank_a_place_or_is_refused() {
    survives("plan", 20_000);
}

#[test]
fn any_schedule_of_a_user_ends_or_is_refused() {
    survives("schedule_csv", 20_000);
}

#[test]
fn any_cluster_reads_as_it_was_written_or_is_refused() {
    survives("cluster", 20_000);
}

#[test]
fn any_image_has_the_pixels_of_its_shape_or_is_refused() {
    survives("image_file", 5_000);
}

#[test]
fn any_idx_file_has_the_elements_of_its_shape_or_is_refused() {
    survives("idx_file", 20_000);
}

#[test]
fn any_npy_file_has_the_elements_of_its_shape_or_is_refused() {
    survives("npy_file", 20_000);
}

#[test]
fn any_tf_example_has_values_within_its_bytes_or_is_refused() {
    survives("tf_example", 20_000);
}

#[test]
fn any_tf_record_file_is_read_or_refused() {
    survives("tf_record", 5_000);
}

#[test]
fn any_cifar_file_has_labels_of_its_classes_or_is_refused() {
    survives("cifar_file", 3_000);
}

#[test]
fn any_tar_shard_has_labels_of_its_classes_or_is_refused() {
    survives("tar_shard", 3_000);
}
