//! Bodies of the fuzz targets: each parses its input and asserts properties of accepted inputs.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;

use lockstep_checkpoint::gguf::parse_gguf;
use lockstep_checkpoint::safetensors::parse_header;
use lockstep_checkpoint::{CheckpointError, Digest, Manifest, ModelDirectory, parse_adapter_config};
use lockstep_config::RunConfig;
use lockstep_data::{
    ChatTemplate, Document, IndexHeader, TextOptions, TokenFileHeader, Tokenizer, parse_json_line,
    read_text_column,
};
use lockstep_model::ModelConfig;
use lockstep_observe::flight::{Dump, analyse};
use lockstep_observe::report::{self, Parts};
use lockstep_plan::schedule::{Costs, PassKind, Schedule, StageCost, passes_from_csv};
use lockstep_plan::work::Collective;
use lockstep_plan::{Axis, DType, Facts, Plan, StepFacts, TensorDimensions};
use lockstep_planner::cluster::Cluster;
use serde_json::Value;

use crate::Verdict;

/// Parses a whole safetensors file. The tensors of an accepted file must tile its data.
///
/// # Panics
/// If the tensors do not tile the data.
pub fn safetensors_header(bytes: &[u8]) -> Verdict {
    let header = parse_header(bytes);
    if let Ok(header) = &header {
        let data: usize = header.tensors().iter().map(|tensor| tensor.bytes).sum();
        let first = header.tensors().first().map_or(bytes.len(), |tensor| tensor.offset);
        assert_eq!(first + data, bytes.len(), "every byte belongs to one tensor");
        for pair in header.tensors().windows(2) {
            assert_eq!(pair[0].offset + pair[0].bytes, pair[1].offset, "{pair:?}");
        }
        for tensor in header.tensors() {
            assert_eq!(header.tensor(&tensor.name), Some(tensor), "found by its name");
        }
    }
    (&header).into()
}

/// Parses a whole GGUF file. The tensors of an accepted file must lie in it, without common bytes.
///
/// # Panics
/// If a tensor lies outside, or two share a byte.
pub fn gguf_file(bytes: &[u8]) -> Verdict {
    let header = parse_gguf(bytes);
    if let Ok(header) = &header {
        let mut ranges: Vec<_> =
            header.tensors().iter().map(|tensor| (tensor.offset, tensor.offset + tensor.bytes)).collect();
        ranges.retain(|(start, end)| start < end);
        ranges.sort_unstable();
        assert!(ranges.iter().all(|(_, end)| *end <= bytes.len()), "{ranges:?} of {} bytes", bytes.len());
        assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranges:?}");
        for tensor in header.tensors() {
            let rows: usize = tensor.shape.iter().rev().skip(1).product();
            let row = tensor.stored.row_bytes(tensor.shape.last().copied().unwrap_or(1));
            assert_eq!(row.map(|row| row * rows), Some(tensor.bytes), "{tensor:?}");
            assert_eq!(header.tensor(&tensor.name), Some(tensor), "found by its name");
        }
        let strings = header.metadata.keys().filter_map(|key| header.metadata.strings(key, bytes));
        assert!(strings.flatten().all(|strings| strings.len() <= bytes.len()), "more strings than bytes");
        assert!(
            header
                .metadata
                .keys()
                .filter_map(|key| header.metadata.numbers(key, bytes))
                .all(|all| all.len() <= bytes.len())
        );
    }
    (&header).into()
}

/// Parses a manifest without its seal; the seal is added here, so that mutations reach the sealed contents. The slices
/// of an accepted manifest must lie within their files.
///
/// # Panics
/// If a slice exceeds its file.
pub fn checkpoint_manifest(body: &[u8]) -> Verdict {
    let path = Path::new("manifest.json");
    // Without a seal, only the check of the seal runs.
    let _ = Manifest::parse(body, path);
    let seal = format!(",\n\"manifest_blake3\":\"{}\"\n}}\n", Digest::of(body));
    let manifest = Manifest::parse(&[body, seal.as_bytes()].concat(), path);
    if let Ok(manifest) = &manifest {
        for tensor in &manifest.tensors {
            let elements: usize = tensor.shape.iter().product();
            let saved: usize = tensor.slices.iter().map(|slice| slice.shape.iter().product::<usize>()).sum();
            assert_eq!(saved, elements, "each element of {} once", tensor.name);
            for slice in &tensor.slices {
                let bytes = (slice.shape.iter().product::<usize>() * tensor.dtype.size_bytes()) as u64;
                assert!(slice.offset + bytes <= manifest.files[&slice.file].bytes, "{slice:?}");
                assert!(!slice.file.contains('/') && slice.file != "..", "{slice:?}");
            }
        }
    }
    (&manifest).into()
}

/// Parses the header of a token cache file, as it is and with a corrected checksum. Writing an accepted header must
/// reproduce the bytes.
///
/// # Panics
/// If the bytes differ.
pub fn token_file_header(bytes: &[u8]) -> Verdict {
    let _ = TokenFileHeader::parse(bytes);
    let mut bytes = bytes.to_vec();
    if let Some((head, rest)) = bytes.split_at_mut_checked(TokenFileHeader::BYTES - 32)
        && let Some(checksum) = rest.first_chunk_mut::<32>()
    {
        *checksum = *blake3::hash(head).as_bytes();
    }
    let header = TokenFileHeader::parse(&bytes);
    if let Ok(header) = &header {
        assert_eq!(header.to_bytes(), bytes[..TokenFileHeader::BYTES]);
        assert!(header.tokens.checked_mul(header.id_type.bytes() as u64).is_some(), "{header:?}");
    }
    (&header).into()
}

/// Parses a line of a JSON lines file. Its text must equal what serde_json reads from the whole line. A document of
/// parts must not have more parts than the line has bytes.
///
/// # Panics
/// If the text differs, or there are more parts.
pub fn json_line(bytes: &[u8]) -> Verdict {
    let Ok(line) = str::from_utf8(bytes) else { return Verdict::Refused };
    let document = parse_json_line(line, TextOptions::default(), &ChatTemplate::default());
    match &document {
        Ok(Document::Text(text)) => {
            // The two parsers may reject different inputs, such as out-of-range numbers in skipped fields.
            if let Ok(value) = serde_json::from_str::<Value>(line) {
                assert_eq!(value["text"].as_str(), Some(text.as_str()));
            }
        }
        Ok(Document::Parts(parts)) => {
            assert!(parts.len() <= line.len(), "{parts:?}")
        }
        Err(problem) => assert!(problem.len() < 4096 + 8 * line.len(), "a message without end"),
    }
    (&document).into()
}

/// Parses the index of a Megatron data set with 14 bytes of tokens. An accepted index must be as long as its counts
/// require.
///
/// # Panics
/// If the length differs.
pub fn index_header(bytes: &[u8]) -> Verdict {
    let header = IndexHeader::parse(bytes, 14);
    if let Ok(header) = &header {
        let length = 34 + 12 * header.sequences + 8 * header.borders;
        assert!(
            [length, length + header.sequences].contains(&bytes.len()),
            "{header:?} in {} bytes",
            bytes.len()
        );
    }
    (&header).into()
}

/// Opens a small Llama whose `quantization_config` is the first line of the input, and whose tensors are the rest, and reads all of its
/// weights. Repacked ones must have the values of the decoded ones.
///
/// # Panics
/// If a repacked weight differs by more than a rounding.
pub fn quantized_model(bytes: &[u8]) -> Verdict {
    let end = bytes.iter().position(|&byte| byte == b'\n').unwrap_or(bytes.len());
    let (quantization, tensors) = (&bytes[..end], bytes.get(end + 1..).unwrap_or_default());
    let (Ok(quantization), Ok(dir)) = (serde_json::from_slice::<Value>(quantization), tempfile::tempdir())
    else {
        return Verdict::Refused;
    };
    let config = serde_json::json!({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
        "tie_word_embeddings": false, "bos_token_id": null, "eos_token_id": null, "quantization_config": quantization,
    });
    let written = std::fs::write(dir.path().join("config.json"), config.to_string());
    if written.and_then(|()| std::fs::write(dir.path().join("model.safetensors"), tensors)).is_err() {
        return Verdict::Refused;
    }
    let read = || -> Result<(), CheckpointError> {
        let model = ModelDirectory::open(dir.path())?;
        let mut decoded = BTreeMap::new();
        model.for_each_parameter(|name, values| -> Result<(), CheckpointError> {
            decoded.insert(name.to_owned(), values.to_vec());
            Ok(())
        })?;
        for parameter in model.packed_parameters() {
            let mut blocks = vec![0; parameter.bytes()];
            parameter.pack(&mut blocks)?;
            let mut values = vec![0.0; parameter.shape.iter().product()];
            parameter.format.dequantize(&blocks, &mut values);
            for (found, expected) in values.iter().zip(&decoded[parameter.name]) {
                // Factors beyond the range of f32 differ in the order of products.
                let is_near = (found - expected).abs() <= 2.0 * f32::EPSILON * expected.abs();
                assert!(is_near || !found.is_normal() || !expected.is_normal(), "{found} for {expected}");
            }
        }
        Ok(())
    };
    (&read()).into()
}

/// Parses frames from another rank's socket, as they are and with corrected checksums.
///
/// # Panics
/// If the encoding of a parsed frame differs from its bytes.
pub fn frames(bytes: &[u8]) -> Verdict {
    let _ = lockstep_comm::read_frames(bytes);
    (&lockstep_comm::read_frames(&lockstep_comm::seal_frames(bytes))).into()
}

/// Parses a Parquet file with a column `text`.
///
/// # Panics
/// If an error message is too long.
pub fn parquet_file(bytes: &[u8]) -> Verdict {
    let Ok(mut file) = tempfile::NamedTempFile::new() else { return Verdict::Refused };
    if file.write_all(bytes).is_err() {
        return Verdict::Refused;
    }
    let texts = read_text_column(file.path(), "text");
    if let Err(error) = &texts {
        assert!(error.to_string().len() < 4096 + bytes.len(), "a message without end");
    }
    (&texts).into()
}

/// Parses a `tokenizer.json`. An accepted tokenizer must encode texts to ids within its vocabulary and decode any ids
/// without a panic.
///
/// # Panics
/// If an id is beyond the vocabulary.
pub fn tokenizer_json(bytes: &[u8]) -> Verdict {
    let tokenizer = Tokenizer::from_json(bytes, Path::new("tokenizer.json"));
    if let Ok(tokenizer) = &tokenizer {
        for text in ["", "All ranks wait.\n  über 世界\u{301}\0", "<|endoftext|></s>\n\na"] {
            for ids in [tokenizer.encode(text), tokenizer.encode_prompt(text)].into_iter().flatten() {
                let allowed = 0..tokenizer.vocab_size() as u64;
                assert!(ids.iter().all(|&id| allowed.contains(&u64::from(id))), "{ids:?} beyond {allowed:?}");
                let _ = tokenizer.decode(&ids);
            }
        }
        let _ = tokenizer.decode(&[0, u32::MAX, tokenizer.vocab_size() as u32]);
    }
    (&tokenizer).into()
}

/// Parses a `config.json`. An accepted configuration must be valid, have a parameter count, and survive a round trip.
///
/// # Panics
/// If it is not valid, or differs after the round trip.
pub fn model_config(bytes: &[u8]) -> Verdict {
    let Ok(text) = str::from_utf8(bytes) else { return Verdict::Refused };
    let config = ModelConfig::from_json_text(text, "config.json");
    if let Ok(config) = &config {
        config.validate().expect("what was read is valid");
        let written = config.to_json(DType::F32).to_string();
        let read = ModelConfig::from_json_text(&written, "written").expect("what was written can be read");
        assert_eq!(&read, config, "{written}");
        // Counting the parameters of thousands of layers would dominate the time.
        if config.num_hidden_layers() <= 64 {
            assert!(config.parameter_count() > 0);
        }
    }
    (&config).into()
}

/// Parses a PEFT `adapter_config.json`. An accepted configuration must have a finite, positive scale.
///
/// # Panics
/// If the scale is not finite and positive.
pub fn adapter_config(bytes: &[u8]) -> Verdict {
    let config = parse_adapter_config(bytes);
    if let Ok(config) = &config {
        assert!(config.scale().is_finite() && config.scale() > 0.0, "{config:?}");
    }
    (&config).into()
}

/// Parses a RUN.toml. The values derived from an accepted file must be computable, and it must not differ from itself.
///
/// # Panics
/// If a derived value is wrong, or a comparison with itself finds a difference.
pub fn run_toml(bytes: &[u8]) -> Verdict {
    let Ok(text) = str::from_utf8(bytes) else { return Verdict::Refused };
    let config = RunConfig::parse(text, "RUN.toml", &[] as &[&str]);
    match &config {
        Ok(config) => {
            assert_eq!(config.accumulation_steps() * config.micro_batch(), config.train.global_batch);
            let rate = config.learning_rate();
            for step in [0, config.train.steps / 2, config.train.steps, u64::MAX] {
                assert!(rate.at(step) >= 0.0, "learning rate {} at step {step}", rate.at(step));
            }
            assert_eq!(config.differences(&config.to_json()), []);
            assert!(config.tokens_per_step() > 0);
        }
        Err(problems) => {
            assert!(problems.to_string().len() < 4096 + 64 * text.len(), "a message without end")
        }
    }
    (&config).into()
}

/// Parses a cluster file. An accepted cluster must survive a round trip, have each device on a node, and give finite
/// times for collectives and messages.
///
/// # Panics
/// If one of these does not hold.
pub fn cluster(bytes: &[u8]) -> Verdict {
    let Ok(text) = str::from_utf8(bytes) else { return Verdict::Refused };
    let cluster = Cluster::parse(text, "cluster.toml");
    match &cluster {
        Ok(cluster) => {
            let written = cluster.to_toml();
            let read = Cluster::parse(&written, "written").expect("what was written can be read");
            assert_eq!(&read, cluster, "{written}");
            let last = cluster.devices() - 1;
            let node = cluster.node_of(last).map(|(_, node)| node);
            assert_eq!(node, Some(cluster.node_count() - 1), "the last device is on the last node");
            assert!(cluster.node_of(last + 1).is_none(), "and there is none after it");
            for collective in [Collective::AllReduce, Collective::AllGather, Collective::AllToAll] {
                let whole = cluster.seconds(collective, 1 << 20, &cluster.placement(last + 1, 1));
                assert!(whole.is_finite() && (whole > 0.0) == (last > 0), "{collective:?} takes {whole} s");
            }
            let sent = cluster.send_seconds(1 << 20, 0, last);
            assert!(sent.is_finite() && (sent > 0.0) == (last > 0), "a message takes {sent} s");
        }
        Err(problems) => {
            assert!(problems.to_string().len() < 4096 + 256 * text.len(), "a message without end")
        }
    }
    (&cluster).into()
}

/// Builds the report of a run from its rows; the first line also serves as the run's description. No text of the input
/// may become markup in the page, and its data must be valid JSON.
///
/// # Panics
/// If one of these does not hold.
pub fn run_report(bytes: &[u8]) -> Verdict {
    let first = bytes.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let run: Value = serde_json::from_slice(first).unwrap_or_default();
    let parts = Parts { run: run.clone(), profile: run.clone(), layout: run.clone(), timeline: run };
    let page = report::page_of(bytes, parts);
    let Ok(Some(page)) = page else { return Verdict::Refused };
    let lower = page.to_lowercase();
    for (markup, count) in [("<script", 2), ("</script", 2), ("<!--", 0), ("<title", 1)] {
        assert_eq!(lower.matches(markup).count(), count, "{markup:?} in the report");
    }
    let data = page.split("id=\"data\">").nth(1).and_then(|rest| rest.split("</script>").next());
    assert!(data.is_some_and(|data| serde_json::from_str::<Value>(data).is_ok()), "the data are JSON");
    Verdict::Accepted
}

/// Parses a file of the flight recorder. The analysis of an accepted file must have a text and blame only existing
/// ranks.
///
/// # Panics
/// If one of these does not hold.
pub fn flight_records(bytes: &[u8]) -> Verdict {
    let dump = Dump::parse(bytes);
    if let Ok(dump) = &dump {
        let analysis = analyse(std::slice::from_ref(dump));
        assert!(!analysis.to_string().is_empty());
        assert!(analysis.culprits.iter().all(|rank| *rank < dump.world_size), "{analysis:?}");
    }
    (&dump).into()
}

/// Parses a plan file. An accepted plan must survive a round trip, give each rank its own mesh coordinates and each
/// stage its units, and run in the simulator.
///
/// # Panics
/// If one of these does not hold.
pub fn plan(bytes: &[u8]) -> Verdict {
    let Ok(text) = std::str::from_utf8(bytes) else { return Verdict::Refused };
    let Ok(plan) = Plan::from_json(text) else { return Verdict::Refused };
    let written = plan.to_json().expect("what was read can be written");
    assert_eq!(Plan::from_json(&written).ok().as_ref(), Some(&plan), "{written}");
    // Two-dimensional tensor parallelism does not support experts.
    let experts = if plan.tensor_layout == TensorDimensions::Two { 0 } else { 8 };
    let facts = Facts {
        model: plan.model.clone(),
        units: 8,
        layers: 6,
        heads: 8,
        key_value_heads: 2,
        hidden: 32,
        intermediate: 48,
        has_latent_attention: false,
        has_inputs: false,
        fixed_seq_len: None,
        norms_span_heads: false,
        experts_have_biases: false,
        vocab: 256,
        experts,
        expert_intermediate: 2 * experts,
        adapter_rank: None,
        has_quantized_weights: false,
        step: StepFacts { global_batch: 16, seq_len: 32, ..StepFacts::default() },
        // The plan's own world size, if it is at most 64 ranks.
        world_size: plan.mesh.world_size().filter(|ranks| *ranks <= 64).unwrap_or(8),
    };
    let Ok(checked) = plan.check(&facts) else { return Verdict::Refused };
    let layout = checked.layout();
    let ranks = layout.mesh.ranks();
    let place = |rank| Axis::ALL.map(|axis| ranks.coordinate(rank, axis));
    let places: BTreeSet<_> = (0..facts.world_size).map(place).collect();
    assert_eq!(places.len(), facts.world_size, "each rank has a place of its own");
    assert_eq!(layout.stages.iter().map(|units| units.len()).sum::<usize>(), facts.units);
    layout.schedule.iter().for_each(|schedule| simulated(schedule));
    Verdict::Accepted
}

/// Parses a user-defined schedule. An accepted schedule must terminate in the simulator, with every pass executed once.
///
/// # Panics
/// If it does not.
pub fn schedule_csv(bytes: &[u8]) -> Verdict {
    let Ok(text) = std::str::from_utf8(bytes) else { return Verdict::Refused };
    let Ok(passes) = passes_from_csv(text, 2) else { return Verdict::Refused };
    let last = passes.iter().flatten().map(|pass| pass.micro_batch).max().unwrap_or(0);
    let schedule = Schedule::from_passes(last.saturating_add(1), &passes);
    if let Ok(schedule) = &schedule {
        simulated(schedule);
    }
    (&schedule).into()
}

/// Simulates a valid schedule in time.
fn simulated(schedule: &Schedule) {
    let cost = StageCost {
        forward_ms: 1.0,
        backward_input_ms: 1.0,
        backward_weight_ms: 1.0,
        ..StageCost::default()
    };
    let costs = Costs::uniform(schedule.stages(), cost);
    let simulation = schedule.simulate(&costs).expect("a cost for each stage");
    let forwards = (0..schedule.ranks()).flat_map(|rank| schedule.passes(rank));
    let forwards = forwards.filter(|pass| pass.kind == PassKind::Forward).count();
    assert_eq!(forwards, schedule.stages() * schedule.micro_batches(), "each forward once");
    assert!(simulation.step_ms.is_finite() && simulation.step_ms > 0.0, "it ends");
}
