//! Quantized models: a description, and packed tensors. The body, and what must hold, stand in `lockstep_testkit::targets`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = lockstep_testkit::targets::quantized_model(bytes);
});
