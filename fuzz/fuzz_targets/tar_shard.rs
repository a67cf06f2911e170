//! Tar shards of a WebDataset. The body, and what must hold, stand in `lockstep_testkit::sample_targets`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = lockstep_testkit::sample_targets::tar_shard(bytes);
});
