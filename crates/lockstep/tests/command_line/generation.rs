//! `lockstep generate`: its prompts, options and defaults, and the errors about models.

use serde_json::{Value, json};

use crate::{
    fine_tuning::{TOKENIZER, names},
    workshop::{Outcome, Workshop},
};

/// Runs `generate` with the exported model.
fn generate(workshop: &Workshop, more: &[&str]) -> Outcome {
    workshop.run(&[&["generate", "--model", "hf"], more].concat())
}

#[test]
fn generation_follows_the_models_own_configuration_unless_told_otherwise() {
    let workshop = Workshop::trained();
    let prompt = ["--prompt", "All ranks", "--json"];
    let told = [&prompt[..], &["--temperature", "0", "--max-new-tokens", "6"]].concat();
    let greedy = generate(&workshop, &told).json();
    assert_eq!((greedy["tokens"].as_array().unwrap().len(), &greedy["finish_reason"]), (6, &json!("length")));
    workshop.write("hf/generation_config.json", r#"{"do_sample": false, "max_new_tokens": 6}"#);
    assert_eq!(generate(&workshop, &prompt).json(), greedy);
    let shorter = generate(&workshop, &[&prompt[..], &["--max-new-tokens", "2"]].concat()).json();
    assert_eq!(shorter["tokens"].as_array().unwrap(), &greedy["tokens"].as_array().unwrap()[..2]);
    // The last of its end-of-text tokens is the first that it would generate.
    let ends = json!({"do_sample": false, "eos_token_id": [999, greedy["tokens"][0]]}).to_string();
    workshop.write("hf/generation_config.json", ends);
    let ended = generate(&workshop, &told).json();
    assert_eq!((&ended["tokens"], &ended["finish_reason"]), (&json!([]), &json!("stop")));
}

#[test]
fn prompts_come_from_files_and_standard_input_and_in_samples() {
    let workshop = Workshop::trained();
    workshop.write("prompts.txt", "All\n\nranks\n");
    let several = ["--prompts", "prompts.txt", "-n", "2", "--max-new-tokens", "3", "--seed", "5", "--json"];
    let all = generate(&workshop, &several).json();
    let results = all["results"].as_array().unwrap();
    let prompts: Vec<&str> = results.iter().map(|result| result["prompt"].as_str().unwrap()).collect();
    assert_eq!(prompts, ["All", "All", "ranks", "ranks"]);
    let one = ["--prompt", "All", "--max-new-tokens", "3", "--seed", "6", "--json"];
    assert_eq!(generate(&workshop, &one).json(), results[1]);
    let piped = format!(
        "printf 'All\\n' | '{}' generate --model hf --max-new-tokens 3 --seed 6 --json",
        env!("CARGO_BIN_EXE_lockstep")
    );
    assert_eq!(workshop.start("sh", &["-c", &piped]).finish().json(), results[1]);
    let text = generate(&workshop, &several[..6]).succeeds().stdout;
    assert!(text.contains("--- prompt 2, sample 2\nranks"), "{text}");
    let chat = ["--chat", "--system", "s", "--prompt", "q", "--max-new-tokens", "1", "--json"];
    let template = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n";
    workshop.edit_json("hf/config.json", |config| config["max_position_embeddings"] = 128.into());
    assert_eq!(generate(&workshop, &chat).json()["prompt_tokens"], template.len());
}

#[test]
fn a_window_slides_over_what_the_context_does_not_hold() {
    let workshop = Workshop::trained();
    let long = ["--prompt", "All ranks wait", "--max-new-tokens", "100", "--json"];
    generate(&workshop, &long).refuses(2, &["114 tokens", "64 positions", "--sliding-window 32"]);
    let slid = generate(&workshop, &[&long[..], &["--sliding-window", "32"]].concat()).json();
    assert_eq!(slid["tokens"].as_array().unwrap().len(), 100);
    // Nothing differs until the context is full.
    let within = ["--prompt", "All ranks wait", "--max-new-tokens", "50", "--json"];
    let within = generate(&workshop, &within).json();
    assert_eq!(slid["tokens"].as_array().unwrap()[..50], within["tokens"].as_array().unwrap()[..]);
}

#[test]
fn texts_are_the_same_one_by_one_and_in_a_batch() {
    let workshop = Workshop::trained();
    let lines: Vec<String> =
        (1..12).map(|words| "All ranks wait ".repeat(words % 4 + 1)[..words].to_owned()).collect();
    workshop.write("prompts.txt", lines.join("\n"));
    let all = ["--prompts", "prompts.txt", "-n", "2", "--max-new-tokens", "9", "--logprobs", "1", "--json"];
    let batched = generate(&workshop, &all).json();
    assert_eq!(batched["results"].as_array().unwrap().len(), 22);
    for size in ["1", "3"] {
        let other = generate(&workshop, &[&all[..], &["--batch-size", size]].concat()).json();
        assert_eq!(batched, other, "--batch-size {size}");
    }
    let shown = ["--prompts", "prompts.txt", "--max-new-tokens", "9"];
    let texts = [&["--batch-size", "1"][..], &["--batch-size", "5"]]
        .map(|size| generate(&workshop, &[&shown[..], size].concat()).succeeds().stdout);
    assert_eq!(texts[0], texts[1]);
    let headings: Vec<&str> = texts[0].lines().filter(|line| line.starts_with("--- prompt")).collect();
    assert_eq!((headings.len(), headings[10]), (11, "--- prompt 11, sample 1"));
}

#[test]
fn several_ranks_generate_and_measure_what_one_does() {
    let workshop = Workshop::trained();
    workshop.write("prompts.txt", "All ranks\nwait\n");
    let told = ["--prompts", "prompts.txt", "--temperature", "0", "--max-new-tokens", "9", "--json"];
    let expected = generate(&workshop, &told).json();
    let loss = |more: &[&str]| {
        let eval = ["eval", "--model", "hf", "--data", "text.txt", "--seq-len", "16", "--json"];
        workshop.run(&[&eval[..], more].concat()).json()["loss"].as_f64().unwrap()
    };
    for plan in [
        &["--nproc-per-node", "2"][..],
        &["--set", "parallel.pipeline_parallel=2"],
        &["--nproc_per_node=4", "--set=parallel.pipeline_parallel=2", "--set=parallel.transport=tcp"],
        &["--set", "parallel.context_parallel=2"],
        &["--nproc-per-node", "4", "--set", "parallel.context_parallel=2", "--set", "parallel.transport=tcp"],
        &["--set", "parallel.data_parallel_replicate=2"],
        &["--nproc-per-node", "4", "--set", "parallel.data_parallel_replicate=2"],
        // More replicas than prompts.
        &["--set", "parallel.data_parallel_replicate=3"],
    ] {
        assert_eq!(generate(&workshop, &[&told[..], plan].concat()).json(), expected, "{plan:?}");
        assert!((loss(plan) / loss(&[]) - 1.0).abs() < 1e-5, "{plan:?}");
    }
    let of_training = [
        "plan",
        "run.toml",
        "--set",
        "parallel.tensor_parallel=2",
        "--set",
        "parallel.sequence_parallel=true",
        "--set",
        "parallel.data_parallel_shard=2",
        "--set",
        "parallel.zero_stage=3",
        "-o",
        "plan.json",
    ];
    workshop.run(&of_training).succeeds();
    assert_eq!(generate(&workshop, &[&told[..], &["--plan", "plan.json"]].concat()).json(), expected);
    let beams = ["--num-beams", "3", "--prompt", "All", "--max-new-tokens", "5", "--json"];
    let found = generate(&workshop, &beams).json();
    assert_eq!(generate(&workshop, &[&beams[..], &["--nproc-per-node", "2"]].concat()).json(), found);
    let replicas = ["--nproc-per-node", "2", "--set", "parallel.data_parallel_replicate=2"];
    for told in [
        &["--prompts", "prompts.txt", "-n", "3", "--max-new-tokens", "5"][..],
        &["--prompts", "prompts.txt", "-n", "2", "--num-beams", "3", "--max-new-tokens", "5"],
        &["--prompts", "prompts.txt", "-n", "2", "--max-new-tokens", "5", "--logprobs", "3", "--json"],
    ] {
        let of_one = generate(&workshop, told).succeeds();
        let of_two = generate(&workshop, &[told, &replicas].concat()).succeeds();
        assert_eq!((of_two.stdout, of_two.stderr), (of_one.stdout, of_one.stderr), "{told:?}");
    }
    // The second replica's prompt is too long, and both say so.
    workshop.write("long.txt", format!("a\n{}\n", "All ranks ".repeat(30)));
    let too_long = generate(&workshop, &[&["--prompts", "long.txt"][..], &replicas].concat());
    assert_eq!(too_long.code, Some(2), "{too_long:?}");
    assert_eq!(too_long.stderr.matches("300 tokens").count(), 1, "the first rank says so: {too_long:?}");
    assert!(!too_long.stderr.contains("lost"), "{too_long:?}");
    let of_beams =
        generate(&workshop, &[&["--prompts", "long.txt", "--num-beams", "2"][..], &replicas].concat());
    assert_eq!(of_beams.code, Some(2), "{of_beams:?}");
    assert_eq!(of_beams.stderr.matches("error: ").count(), 1, "{of_beams:?}");
    let piped = format!(
        "printf 'All ranks' | '{}' generate --model hf --temperature 0 --max-new-tokens 9 --nproc-per-node 2",
        env!("CARGO_BIN_EXE_lockstep")
    );
    let text = workshop.start("sh", &["-c", &piped]).finish().succeeds();
    let of_one = expected["results"][0]["text"].as_str().unwrap();
    assert_eq!(text.stdout, format!("All ranks{of_one}\n"));
    assert!(!text.stderr.contains("rank 1"), "{}", text.stderr);
    let bench = ["bench", "generate", "--model", "hf", "--prompt-tokens", "8", "--new-tokens", "4", "--json"];
    let measured = workshop.run(&[&bench[..], &["--nproc-per-node", "2"]].concat()).json();
    assert_eq!(
        (&measured["ranks"], measured["weights_in_place_bytes"].as_u64() > Some(0)),
        (&json!(2), true)
    );
    let measured = workshop.run(&[&bench[..], &replicas].concat()).json();
    assert_eq!((&measured["ranks"], &measured["replicas"]), (&json!(2), &json!(2)));
}

#[test]
fn plans_that_inference_cannot_run_are_refused_before_any_rank_starts() {
    let workshop = Workshop::trained();
    for (more, parts) in [
        (
            &["--nproc-per-node", "3"][..],
            &["tensor 3 does not divide the 2 attention heads", "nearest: 2"][..],
        ),
        (
            &["--set", "parallel.data_parallel_shard=2"],
            &["data_parallel_shard", "parallel.data_parallel_replicate"],
        ),
        (
            &["--set", "parallel.zero_stage=3"],
            &["parallel.zero_stage", "allowed", "parallel.tensor_parallel"],
        ),
        (&["--set", "parallel.tensor_parallel=2", "--nproc-per-node", "5"], &["2 ranks", "5 ranks"]),
        (
            &["--nproc-per-node", "2", "--max-memory", "cpu=1GiB"],
            &["--max-memory", "tensor_parallel 2", "pipeline_parallel"],
        ),
    ] {
        generate(&workshop, &[&["--prompt", "All"], more].concat()).refuses(2, parts);
    }
}

#[test]
fn options_of_sampling_change_the_text_as_they_say() {
    let workshop = Workshop::trained();
    let run = |more: &[&str]| {
        let common = ["--prompt", "All ranks", "--temperature", "0", "--max-new-tokens", "8", "--json"];
        generate(&workshop, &[&common[..], more].concat()).json()
    };
    let plain = run(&["--logprobs", "2"]);
    let ids = |result: &Value| -> Vec<u64> {
        result["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
    };
    let tokens = ids(&plain);
    let first = &plain["logprobs"]["content"][0];
    assert_eq!(plain["logprobs"]["content"].as_array().unwrap().len(), tokens.len());
    assert_eq!(first["top_logprobs"][0]["id"], tokens[0], "greedy takes the most likely: {first}");
    assert_eq!(first["top_logprobs"][0]["logprob"], first["logprob"]);
    // A forbidden token gives way to the next one.
    let biased = run(&["--logit-bias", &format!("{}=-100,3=-1", tokens[0])]);
    assert_eq!(ids(&biased)[0], first["top_logprobs"][1]["id"]);
    assert!(!ids(&biased).contains(&tokens[0]), "{biased}");
    // No token comes twice if each occurrence costs more than any difference of logits.
    let mut once = ids(&run(&["--presence-penalty", "1000"]));
    once.sort_unstable();
    once.dedup();
    assert_eq!(once.len(), 8);
    let text = plain["text"].as_str().unwrap();
    let stop: String = text.chars().skip(3).take(2).collect();
    let stopped = run(&["--stop", "not there", "--stop", &stop]);
    let kept = &text[..text.find(&stop).unwrap()];
    assert_eq!((&stopped["text"], &stopped["finish_reason"]), (&json!(kept), &json!("stop")));
    // The most likely token alone is left, whatever the seed.
    let sampled = ["--prompt", "All ranks", "--max-new-tokens", "8", "--seed", "9", "--min-p", "1", "--json"];
    assert_eq!(generate(&workshop, &sampled).json()["tokens"], plain["tokens"]);
    workshop.write("hf/generation_config.json", r#"{"do_sample": true, "min_p": 1.0, "max_new_tokens": 8}"#);
    assert_eq!(generate(&workshop, &["--prompt", "All ranks", "--json"]).json()["tokens"], plain["tokens"]);
}

#[test]
fn mistakes_with_models_and_generation_have_one_message_that_names_the_way_out() {
    let workshop = Workshop::trained();
    workshop.write("empty.txt", "\n\n");
    workshop.write("latin1.txt", b"caf\xe9");
    std::fs::create_dir(workshop.path("nothing")).unwrap();
    let before = names(&workshop);
    let cases: [(&[&str], i32, &[&str]); 21] = [
        (&[], 2, &["there is no prompt", "--prompts FILE"]),
        (&["--prompt", "-"], 2, &["there is no prompt"]),
        (&["--prompts", "gone.txt"], 2, &["--prompts gone.txt", "No such file"]),
        (&["--prompts", "empty.txt"], 2, &["--prompts empty.txt has no prompt"]),
        (&["--prompts", "latin1.txt"], 4, &["latin1.txt is not UTF-8"]),
        (&["--prompts", "empty.txt", "--prompt", "a"], 2, &["cannot be used with"]),
        (&["--prompt", "a", "--system", "b"], 2, &["--chat"]),
        (&["--prompt", "a", "-n", "0"], 2, &["0"]),
        (&["--prompt", "a", "--sliding-window", "0"], 2, &["--sliding-window 0", "1 to 63"]),
        (&["--prompt", "a", "--sliding-window", "64"], 2, &["--sliding-window 64", "1 to 63"]),
        (&["--prompt", "a", "--temperature", "-1"], 2, &["temperature", "0 or more"]),
        (&["--prompt", "a", "--max-new-tokens", "64"], 2, &["--sliding-window"]),
        (&["--prompt", "a", "--adapter", "nothing"], 2, &["nothing"]),
        (&["--prompt", "a", "--min-p", "2"], 2, &["min-p = 2", "0 to 1"]),
        (&["--prompt", "a", "--repetition-penalty", "0"], 2, &["repetition-penalty", "more than 0"]),
        (&["--prompt", "a", "--frequency-penalty", "nan"], 2, &["frequency-penalty", "a finite number"]),
        (&["--prompt", "a", "--logit-bias", "7"], 2, &["--logit-bias", "50256=-100"]),
        (&["--prompt", "a", "--logprobs", "2"], 2, &["--json"]),
        (&["--prompt", "a", "--logprobs", "21", "--json"], 2, &["21", "20"]),
        (&["--prompt", "a", "--stop", ""], 2, &["--stop"]),
        (&["--prompt", "a", "--batch-size", "0"], 2, &["--batch-size", "0"]),
    ];
    for (arguments, code, parts) in cases {
        generate(&workshop, arguments).fails(code, parts);
    }
    for (text, parts) in [
        ("{", &["generation_config.json"][..]),
        (r#"{"eos_token_id": "</s>"}"#, &["generation_config.json", "eos_token_id", "a token id or a list"]),
        (r#"{"temperature": "hot"}"#, &["temperature", "a number"]),
    ] {
        workshop.write("hf/generation_config.json", text);
        generate(&workshop, &["--prompt", "a"]).fails(4, parts);
    }
    workshop.write("hf/generation_config.json", "{}");
    workshop.run(&["generate", "--model", "nothing", "--prompt", "a"]).fails(2, &["nothing/config.json"]);
    let images = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/vit");
    for command in [&["plan", "--inference"][..], &["bench", "generate"], &["generate", "--prompt", "a"]] {
        let arguments = [command, &["--model", images]].concat();
        workshop.run(&arguments).fails(2, &["a model of type vit generates no text"]);
    }
    workshop.run(&["models", "llama9"]).fails(2, &["llama9", "lockstep models"]);
    workshop.write("hf/tokenizer.json", TOKENIZER);
    workshop.write("hf/chat_template.jinja", "{{ raise_exception('roles must alternate') }}");
    generate(&workshop, &["--chat", "--prompt", "a"]).fails(2, &["tokenizer.json", "roles must alternate"]);
    workshop.write("hf/chat_template.jinja", "{% for %}");
    generate(&workshop, &["--chat", "--prompt", "a"]).fails(4, &["chat_template.jinja", "line 1"]);
    assert_eq!(names(&workshop), before);
}
