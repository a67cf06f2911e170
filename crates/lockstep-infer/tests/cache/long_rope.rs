//! Models with LongRoPE: requests that stay within the original context, and requests that do not, in one batch.

use std::{fs, ops::ControlFlow};

use lockstep_infer::{
    BeamOptions, Event, InferError, LoadedModel, Request, Sampling, Scheduler, SchedulerOptions, beam_search,
};

use super::{expected, fixture};

const FAMILY: &str = "phi3_long";
/// Tokens of prompts in a model whose original context has 16, each with the number of new ones: the first two fit.
const REQUESTS: [(usize, usize); 4] = [(5, 6), (12, 5), (12, 6), (20, 3)];

/// Returns the tokens and the bits of the log-probabilities of some of the requests, generated together.
fn generated(model: &LoadedModel, requests: &[usize]) -> Vec<Vec<(u32, u32)>> {
    let options = SchedulerOptions { max_sequences: 4, max_step_tokens: 9, cache_tokens: 512 };
    let mut scheduler = Scheduler::new(model, options).unwrap();
    let (ids, _) = expected(FAMILY);
    for &request in requests {
        let (prompt, max_new_tokens) = REQUESTS[request];
        let sampling = Sampling { temperature: 0.0, logprobs: Some(0), ..Sampling::default() };
        let request = Request { prompt: ids[..prompt].to_vec(), max_new_tokens, sampling, kept: None };
        scheduler.add(request).unwrap();
    }
    let mut found = vec![Vec::new(); requests.len()];
    let collect = |request: usize, event| -> Result<_, InferError> {
        if let Event::Token(drawn) = event {
            found[request].push((drawn.id, drawn.logprob.unwrap().to_bits()));
        }
        Ok(ControlFlow::Continue(()))
    };
    scheduler.run(collect).unwrap();
    found
}

#[test]
fn short_and_long_requests_have_the_same_bits_together_and_alone() {
    let model = LoadedModel::open(&fixture(FAMILY), 1).unwrap();
    let together = generated(&model, &[0, 1, 2, 3]);
    for (request, expected) in together.iter().enumerate() {
        assert_eq!(&generated(&model, &[request])[0], expected, "request {request}");
    }
    // The same prompt, once with one more token than fits: other frequencies from its first token on.
    assert_ne!(together[1][0].1, together[2][0].1);
}

#[test]
fn requests_that_fit_have_the_short_frequencies() {
    let dir = tempfile::tempdir().unwrap();
    let config = fs::read_to_string(fixture(FAMILY).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["rope_parameters"]["long_factor"] = config["rope_parameters"]["short_factor"].clone();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    fs::copy(fixture(FAMILY).join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let [model, short] =
        [fixture(FAMILY).as_path(), dir.path()].map(|path| LoadedModel::open(path, 1).unwrap());
    let [found, of_short] = [&model, &short].map(|model| generated(model, &[0, 1, 2, 3]));
    assert_eq!(found[..2], of_short[..2]);
    for request in [2, 3] {
        assert_ne!(found[request][0].1, of_short[request][0].1, "request {request}");
    }
    // A search with one beam reads what a request does.
    let (ids, _) = expected(FAMILY);
    for &(prompt, max_new_tokens) in &REQUESTS {
        let (length_penalty, early_stopping, end) = (1.0, false, Vec::new());
        let options = BeamOptions { beams: 1, max_new_tokens, length_penalty, early_stopping, end };
        let best = beam_search(&model, &ids[..prompt], &options).unwrap().swap_remove(0);
        let request = REQUESTS.iter().position(|other| *other == (prompt, max_new_tokens)).unwrap();
        let tokens: Vec<u32> = found[request].iter().map(|(token, _)| *token).collect();
        assert_eq!(best.tokens, tokens, "request {request}");
    }
}
