//! Tests of saving and loading: every bit survives under any sharding, and an incomplete save is rejected.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod common;

use std::{
    fs,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use common::State;
use lockstep_checkpoint::{
    Checkpoint, CheckpointError, CheckpointQuality, DType, Digest, Manifest, Region, SaveRequest, Staging,
    TensorKind, TensorSlice, latest_good, list, prune, safetensors::SafetensorsFile, save, set_damaged_aside,
    write_shard,
};
use lockstep_plan::{Initializer, ParameterRecord, Share};
use proptest::prelude::*;
use serde_json::json;

fn keep(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap()
}

fn steps(dir: &Path) -> Vec<u64> {
    list(dir).unwrap().into_iter().map(|listed| listed.step).collect()
}

fn slice<'a>(shape: &'a [usize], region: Region, values: &'a [f32]) -> TensorSlice<'a> {
    TensorSlice {
        name: "w",
        kind: TensorKind::Parameter,
        dtype: DType::F32,
        global_shape: shape,
        region,
        bytes: bytemuck::cast_slice::<f32, u8>(values).into(),
    }
}

#[test]
fn a_state_comes_back_bit_for_bit_with_its_counters() {
    let dir = tempfile::tempdir().unwrap();
    let state = State::at(100);
    let mut request = state.request();
    // Floats whose decimal forms are easily misparsed by one unit in the last place.
    let odd = [0.1 + 0.2, 1.0 / 3.0, 5e-324, 1.797_693_134_862_315_7e308, -0.0, 9_007_199_254_740_993.0];
    request.state = json!({"odd": odd, "large": u64::MAX});
    let path = save(dir.path(), &request, &state.slices()).unwrap();
    assert_eq!(path, dir.path().join("step-00000100"));

    let checkpoint = Checkpoint::open(&path).unwrap();
    checkpoint.verify().unwrap();
    state.assert_equals(&checkpoint);
    let manifest = checkpoint.manifest();
    assert_eq!((manifest.seed, &manifest.config, &manifest.plan), (1337, &request.config, &request.plan));
    assert_eq!(manifest.kernels.as_deref(), Some("avx2"));
    assert_eq!(manifest.state["large"], u64::MAX);
    for (index, expected) in odd.iter().enumerate() {
        let read = manifest.state["odd"][index].as_f64().unwrap();
        assert_eq!(read.to_bits(), f64::to_bits(*expected), "{read} for {expected}");
    }
}

#[test]
fn other_tools_can_read_every_file_and_check_every_hash() {
    let dir = tempfile::tempdir().unwrap();
    let state = State::at(7);
    let path = save(dir.path(), &state.request(), &state.slices()).unwrap();

    // Parsed as plain JSON, without this crate's types.
    let manifest: serde_json::Value =
        serde_json::from_slice(&fs::read(path.join("manifest.json")).unwrap()).unwrap();
    for key in ["version", "step", "kernels", "samples_consumed", "config", "config_blake3", "plan", "seed"] {
        assert!(manifest.get(key).is_some(), "manifest.json lacks {key}");
    }
    let rank_file = fs::read(path.join("rank-00000.safetensors")).unwrap();
    let recorded = &manifest["files"]["rank-00000.safetensors"];
    assert_eq!(recorded["bytes"], rank_file.len());
    assert_eq!(recorded["blake3"], blake3::hash(&rank_file).to_string());

    let file = SafetensorsFile::open(&path.join("rank-00000.safetensors")).unwrap();
    let reference = safetensors::SafeTensors::deserialize(&rank_file).unwrap();
    assert_eq!(reference.tensor("model.norm.weight").unwrap().shape(), [16]);
    assert!(file.names().any(|name| name == "exp_avg_sq/model.norm.weight"));
    for tensor in manifest["tensors"].as_array().unwrap() {
        for slice in tensor["slices"].as_array().unwrap() {
            let offset = slice["offset"].as_u64().unwrap() as usize;
            let bytes =
                slice["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).product::<u64>() * 4;
            let content = &rank_file[offset..offset + bytes as usize];
            assert_eq!(slice["blake3"], blake3::hash(content).to_string(), "{}", tensor["name"]);
        }
    }
}

#[test]
fn every_dtype_keeps_its_bits_and_floats_read_as_f32() {
    let dir = tempfile::tempdir().unwrap();
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let bytes: &[u8] = bytemuck::cast_slice(&all);
    let types = [DType::F32, DType::BF16, DType::F16, DType::I32, DType::U32, DType::U8];
    let shapes = types.map(|dtype| vec![bytes.len() / dtype.size_bytes()]);
    let names = types.map(|dtype| dtype.to_string());
    let slices: Vec<_> = (0..types.len())
        .map(|i| TensorSlice {
            name: &names[i],
            kind: TensorKind::Other("raw".to_owned()),
            dtype: types[i],
            global_shape: &shapes[i],
            region: Region::Whole,
            bytes: bytes.into(),
        })
        .collect();
    let path = save(dir.path(), &SaveRequest::default(), &slices).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let kind = TensorKind::Other("raw".to_owned());
    for (dtype, name) in types.iter().zip(&names) {
        let mut read = vec![0; bytes.len()];
        checkpoint.read_bytes(name, &kind, 0, &mut read).unwrap();
        assert!(read == bytes, "{dtype}");
    }
    let mut one = [0.0];
    checkpoint.read("bf16", &kind, 0x3fc0, &mut one).unwrap();
    assert_eq!(one, [1.5]);
    checkpoint.read("f16", &kind, 0x3e00, &mut one).unwrap();
    assert_eq!(one, [1.5]);
    let error = checkpoint.read("u8", &kind, 0, &mut one).unwrap_err();
    assert!(matches!(error, CheckpointError::UnsupportedDtype { .. }), "{error}");
    let error = checkpoint.read("f32", &kind, shapes[0][0], &mut one).unwrap_err();
    assert!(matches!(error, CheckpointError::Range { .. }), "{error}");
    let error = checkpoint.read("f32", &TensorKind::Parameter, 0, &mut one).unwrap_err();
    assert!(matches!(error, CheckpointError::NoSuchTensor { .. }), "{error}");
}

#[test]
fn several_ranks_save_flat_shards_and_boxes_and_one_reader_sees_whole_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let whole: Vec<f32> = (0..60).map(|i| i as f32).collect();
    let (columns_left, columns_right): (Vec<f32>, Vec<f32>) = (
        whole.chunks(10).flat_map(|row| row[..4].to_vec()).collect(),
        whole.chunks(10).flat_map(|row| row[4..].to_vec()).collect(),
    );
    let block = |start: Vec<usize>, shape: Vec<usize>| Region::Block { start, shape };
    let momentum = |start, values| TensorSlice {
        kind: TensorKind::Momentum,
        ..slice(&[6, 10], Region::Elements { start, count: 20 }, values)
    };

    let staging = Staging::begin(dir.path(), 3).unwrap();
    let first = [
        slice(&[6, 10], block(vec![0, 0], vec![6, 4]), &columns_left),
        momentum(0, &whole[..20]),
        momentum(40, &whole[40..]),
    ];
    let second =
        [slice(&[6, 10], block(vec![0, 4], vec![6, 6]), &columns_right), momentum(20, &whole[20..40])];
    let reports = vec![
        write_shard(staging.path(), 0, &first).unwrap(),
        write_shard(staging.path(), 1, &second).unwrap(),
    ];
    // Ranks exchange reports as JSON or any other serde format.
    let reports = serde_json::from_str(&serde_json::to_string(&reports).unwrap()).unwrap();
    let path = staging.commit(&SaveRequest { step: 3, ..SaveRequest::default() }, reports).unwrap();

    let checkpoint = Checkpoint::open(&path).unwrap();
    checkpoint.verify().unwrap();
    for kind in [TensorKind::Parameter, TensorKind::Momentum] {
        for start in 0..60 {
            for end in start..=60 {
                let mut read = vec![f32::NAN; end - start];
                checkpoint.read("w", &kind, start, &mut read).unwrap();
                assert_eq!(read, whole[start..end], "{kind} {start}..{end}");
            }
        }
    }
    let names: Vec<_> = SafetensorsFile::open(&path.join("rank-00000.safetensors"))
        .unwrap()
        .names()
        .map(str::to_owned)
        .collect();
    assert_eq!(names, ["momentum/w", "momentum/w#1", "w"]);
}

#[test]
fn a_save_that_does_not_cover_everything_once_fails_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let values = [1.0f32; 24];
    let range = |start, count| Region::Elements { start, count };
    let cases: [(&str, Vec<TensorSlice<'_>>); 6] = [
        ("23 of 24 elements", vec![slice(&[4, 6], range(0, 23), &values[..23])]),
        ("overlap", vec![slice(&[4, 6], range(0, 24), &values), slice(&[4, 6], range(5, 1), &values[..1])]),
        ("overlap", vec![slice(&[4, 6], Region::Whole, &values), slice(&[4, 6], Region::Whole, &values)]),
        ("does not lie in", vec![slice(&[4, 6], range(1, 24), &values)]),
        ("needs 96 bytes, but 92", vec![slice(&[4, 6], Region::Whole, &values[..23])]),
        (
            "[4, 6] in one shard and f32 [6, 4]",
            vec![slice(&[4, 6], range(0, 12), &values[..12]), slice(&[6, 4], range(12, 12), &values[..12])],
        ),
    ];
    for (expected, slices) in cases {
        let error = save(dir.path(), &SaveRequest::default(), &slices).unwrap_err();
        assert!(error.to_string().contains(expected), "{expected}: {error}");
    }
    let staging = Staging::begin(dir.path(), 1).unwrap();
    let half = write_shard(staging.path(), 0, &[slice(&[4, 6], range(0, 12), &values[..12])]).unwrap();
    let error = staging.commit(&SaveRequest { step: 1, ..SaveRequest::default() }, vec![half]).unwrap_err();
    assert!(matches!(error, CheckpointError::Coverage { .. }), "{error}");
    assert!(error.to_string().contains("12 of 24 elements are saved"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "a failed save leaves nothing");
}

#[test]
fn every_untied_parameter_of_the_model_must_be_saved() {
    let dir = tempfile::tempdir().unwrap();
    let record = |name: &str, shape: &[usize], tie| ParameterRecord {
        share: Share::default(),
        name: name.to_owned(),
        shape: shape.to_vec(),
        initializer: Initializer::Zeros,
        tie,
        unit: 0,
        buffer: lockstep_plan::BufferUnit::alone(0),
        trainable: true,
        block_format: None,
        decay: true,
        learning_rate_multiplier: 1.0,
    };
    let values = [0.0f32; 6];
    let tensors = [slice(&[2, 3], Region::Whole, &values)];
    let attempt = |parameters: &[ParameterRecord]| {
        save(dir.path(), &SaveRequest { parameters, ..SaveRequest::default() }, &tensors)
    };
    let tied = record("lm_head.weight", &[2, 3], Some(lockstep_plan::ParameterId(0)));
    attempt(&[record("w", &[2, 3], None), tied]).unwrap();
    let absent = attempt(&[record("w", &[2, 3], None), record("bias", &[3], None)]).unwrap_err();
    assert_eq!(absent.to_string(), "parameter of `bias`: no rank saves it");
    let reshaped = attempt(&[record("w", &[3, 2], None)]).unwrap_err();
    assert!(reshaped.to_string().contains("saved with shape [2, 3], but the model has [3, 2]"), "{reshaped}");
}

#[test]
fn a_step_saved_again_replaces_the_first_and_nothing_else_stays_behind() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (State::at(5), State::at(6));
    save(dir.path(), &old.request(), &old.slices()).unwrap();
    let again = SaveRequest { step: 5, ..new.request() };
    let path = save(dir.path(), &again, &new.slices()).unwrap();
    let found = latest_good(dir.path()).unwrap();
    let checkpoint = found.checkpoint.unwrap();
    assert_eq!(checkpoint.manifest().samples_consumed, new.step * 64);
    assert_eq!(checkpoint.path(), path);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn only_one_save_at_a_time_and_the_other_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let state = State::at(1);
    let staging = Staging::begin(dir.path(), 9).unwrap();
    let error = save(dir.path(), &state.request(), &state.slices()).unwrap_err();
    assert!(matches!(error, CheckpointError::Busy { .. }), "{error}");
    assert!(staging.path().exists(), "the second save must not sweep away the first one's files");
    drop(staging);
    save(dir.path(), &state.request(), &state.slices()).unwrap();
}

#[test]
fn prune_keeps_the_newest_good_ones_and_the_protected_and_counts_no_broken_one() {
    let dir = tempfile::tempdir().unwrap();
    for step in 1..=6 {
        let state = State::at(step);
        save(dir.path(), &state.request(), &state.slices()).unwrap();
    }
    let prune = |keep, protect: &[u64]| {
        prune(dir.path(), keep, protect, |_| CheckpointQuality::default()).unwrap().deleted
    };
    assert_eq!(prune(keep(6), &[]), Vec::<PathBuf>::new());
    fs::remove_file(dir.path().join("step-00000005/rank-00000.safetensors")).unwrap();
    let deleted = prune(keep(2), &[1]);
    assert_eq!(deleted, [dir.path().join("step-00000003"), dir.path().join("step-00000002")]);
    assert_eq!(steps(dir.path()), [1, 4, 5, 6]);
    fs::write(dir.path().join("step-00000006/manifest.json"), "{}").unwrap();
    assert_eq!(prune(keep(1), &[]), [dir.path().join("step-00000001")]);
    fs::remove_dir_all(dir.path().join("step-00000004")).unwrap();
    assert!(prune(keep(1), &[]).is_empty(), "with no good one, nothing is deleted");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn prune_lets_no_doubtful_checkpoint_take_the_place_of_a_good_one_and_keeps_the_best() {
    let dir = tempfile::tempdir().unwrap();
    let losses = [
        (1, Some(3.0)),
        (2, Some(2.0)),
        (3, Some(2.5)),
        (4, None),
        (5, Some(9.0)),
        (6, Some(f64::NAN)),
        (7, Some(1.0)),
    ];
    let standing = |manifest: &Manifest| {
        let step = manifest.step;
        let (_, loss) = losses[step as usize - 1];
        CheckpointQuality { is_doubtful: step == 5 || step == 6, loss: loss.filter(|_| step < 7) }
    };
    for (step, left) in [
        (1, &[1][..]),
        (2, &[1, 2]),
        (3, &[2, 3]),
        // The checkpoint with the lowest loss stays besides the newest two.
        (4, &[2, 3, 4]),
        // A doubtful checkpoint stays while it is the newest, and does not count as good.
        (5, &[2, 3, 4, 5]),
        (6, &[2, 3, 4, 6]),
        (7, &[2, 4, 7]),
    ] {
        let state = State::at(step);
        save(dir.path(), &state.request(), &state.slices()).unwrap();
        let pruned = prune(dir.path(), keep(2), &[step], standing).unwrap();
        assert!(pruned.failed.is_empty(), "{pruned:?}");
        assert_eq!(steps(dir.path()), left, "after step {step}");
    }
}

#[test]
fn damaged_checkpoints_are_set_aside_and_may_be_again() {
    let dir = tempfile::tempdir().unwrap();
    let damaged = [dir.path().join("step-00000002")];
    for _ in 0..2 {
        for step in 1..=2 {
            let state = State::at(step);
            save(dir.path(), &state.request(), &state.slices()).unwrap();
        }
        let moved = set_damaged_aside(dir.path(), &damaged).unwrap();
        assert_eq!(moved, [dir.path().join("damaged/step-00000002")]);
        assert!(moved[0].join("manifest.json").exists());
        assert_eq!(steps(dir.path()), [1]);
    }
    assert!(set_damaged_aside(dir.path(), &damaged).is_err(), "what is not there cannot be moved");
}

#[test]
fn names_that_are_no_checkpoints_are_not_listed_and_a_missing_directory_is_empty() {
    let dir = tempfile::tempdir().unwrap();
    let state = State::at(1);
    save(dir.path(), &state.request(), &state.slices()).unwrap();
    for name in ["step-2", ".tmp-step-00000003", "step-00000004.bak", "best"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    assert_eq!(steps(dir.path()), [1]);
    let nothing = latest_good(&dir.path().join("nowhere")).unwrap();
    assert!(nothing.checkpoint.is_none() && nothing.skipped.is_empty());
}

/// Rewrites the manifest of a good checkpoint and seals it again, as an attacker who knows the format could.
fn forged(edit: impl Fn(String) -> String) -> CheckpointError {
    let dir = tempfile::tempdir().unwrap();
    let state = State::at(1);
    let path = save(dir.path(), &state.request(), &state.slices()).unwrap().join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    let body = text.split_once(",\n\"manifest_blake3\"").unwrap().0;
    let edited = edit(body.to_owned());
    assert_ne!(edited, body, "the edit must change something");
    let digest = Digest::of(edited.as_bytes());
    fs::write(&path, format!("{edited},\n\"manifest_blake3\":\"{digest}\"\n}}\n")).unwrap();
    let found = latest_good(dir.path()).unwrap();
    assert!(found.checkpoint.is_none());
    found.skipped.into_iter().next().unwrap().reason
}

#[test]
fn a_sealed_manifest_that_lies_is_refused_too() {
    let replace = |from: &'static str, to: &'static str| forged(move |body| body.replace(from, to));
    let replace_first = |from: &'static str, to: &'static str| forged(move |body| body.replacen(from, to, 1));
    for (error, expected) in [
        (replace("rank-00000.safetensors", "../rank-00000.safetensors"), "not a plain file name"),
        (replace("rank-00000.safetensors", "/etc/passwd"), "not a plain file name"),
        (replace("\"version\":1", "\"version\":2"), "format version 2; this build reads version 1"),
        (replace("lockstep-checkpoint", "other"), "its format is `other`"),
        (replace("\"step\":1", "\"step\":2"), "it is the manifest of step 2"),
        (replace_first("\"shape\":[37,16]", "\"shape\":[37,15]"), "does not lie in"),
        (replace_first("\"shape\":[37,16]", "\"shape\":[38,16]"), "592 of 608 elements are saved"),
        (
            replace_first("\"shape\":[37,16]", "\"shape\":[18446744073709551615,16]"),
            "more elements than can be counted",
        ),
        (replace_first("\"shape\":[37,16]", "\"shape\":[0,18446744073709551615,2]"), "does not lie in"),
        (replace("\"dtype\":\"f32\"", "\"dtype\":\"f64\""), "unknown variant `f64`"),
        (replace_first("\"kind\":\"exp_avg\"", "\"kind\":\"parameter\""), "stands twice"),
        (
            replace("\"file\":\"rank-00000.safetensors\"", "\"file\":\"x\""),
            "lies in `x`, which is not listed",
        ),
        (replace("\"offset\":", "\"offset\":9"), "reaches past the end"),
        (replace("\"bytes\":", "\"bytes\":9"), "were saved"),
    ] {
        let message = error.to_string();
        assert!(error.is_corrupt(), "{message}");
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// A tensor cut into random flat shards over random ranks reads back like any other cut.
    #[test]
    fn resharding_keeps_every_bit(
        cuts in prop::collection::btree_set(1usize..210, 0..6),
        ranks in 1usize..4,
        wanted in (0usize..=210, 0usize..=210),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let whole: Vec<f32> = (0..210).map(|i| f32::from_bits(0x3f80_0000 + i)).collect();
        let mut borders: Vec<usize> = cuts.into_iter().collect();
        borders.insert(0, 0);
        borders.push(210);
        let shards: Vec<_> = borders
            .windows(2)
            .map(|pair| {
                let region = Region::Elements { start: pair[0], count: pair[1] - pair[0] };
                slice(&[5, 6, 7], region, &whole[pair[0]..pair[1]])
            })
            .collect();
        let staging = Staging::begin(dir.path(), 0).unwrap();
        let reports = (0..ranks)
            .map(|rank| {
                let own: Vec<_> = shards.iter().skip(rank).step_by(ranks).cloned().collect();
                write_shard(staging.path(), rank, &own).unwrap()
            })
            .collect();
        let path = staging.commit(&SaveRequest::default(), reports).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let (start, end) = (wanted.0.min(wanted.1), wanted.0.max(wanted.1));
        let mut read = vec![f32::NAN; end - start];
        checkpoint.read("w", &TensorKind::Parameter, start, &mut read).unwrap();
        prop_assert_eq!(&read[..], &whole[start..end]);
    }
}
