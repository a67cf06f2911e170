//! Runs of a ResNet on images of every format, with no program of the user's: losses, resumption, ranks, `data show`, and errors
//! about files that are damaged or do not fit the model.

use lockstep::samples::{
    Cifar, CifarKind, Dataset, Split, TensorData, write_record, write_synthetic_cifar10,
};
use serde_json::Value;

use crate::workshop::Workshop;

/// Two blocks on images of CIFAR's size.
const RUN: &str = r#"[model]
model_type = "resnet"
image_size = 32
num_labels = 10
stem = "cifar"
layer_type = "basic"
embedding_size = 8
hidden_sizes = [8, 16]
depths = [1, 1]
[data]
format = "cifar10"
train = ["cifar"]
valid = ["cifar"]
transforms = [
    { kind = "random_crop", size = 32, padding = 4 },
    { kind = "horizontal_flip" },
    { kind = "normalize", mean = [0.4914, 0.4822, 0.4465], std = [0.2470, 0.2435, 0.2616] },
]
[train]
steps = 6
global_batch = 8
micro_batch = 4
threads = 1
eval_every = 3
[optimizer]
lr = 1e-2
[schedule]
kind = "constant"
warmup_steps = 1
[checkpoint]
every = 3
"#;

/// Bytes of a record of CIFAR-10.
const RECORD_BYTES: usize = 3073;

/// Returns a run on 60 training images and 20 test images.
fn workshop() -> Workshop {
    let workshop = Workshop::new();
    workshop.write("run.toml", RUN);
    write_synthetic_cifar10(&workshop.path("cifar"), 60, 20, 1).unwrap();
    workshop
}

/// Returns the rows of the metrics.
fn rows(workshop: &Workshop) -> Vec<Value> {
    let rows = String::from_utf8(workshop.read("runs/metrics.jsonl")).unwrap();
    rows.lines().map(|row| serde_json::from_str(row).unwrap()).collect()
}

/// Returns the values of some keys in all rows that have the first of them.
fn columns(workshop: &Workshop, keys: &[&str]) -> Vec<Vec<f64>> {
    let rows = rows(workshop);
    let of_row = |row: &Value| keys.iter().map(|key| row[*key].as_f64()).collect::<Option<Vec<f64>>>();
    rows.iter().filter(|row| row.get(keys[0]).is_some()).map(|row| of_row(row).unwrap()).collect()
}

#[test]
fn a_resnet_trains_from_run_toml_and_counts_images_and_its_accuracy() {
    let workshop = workshop();
    let outcome = workshop.train(&[]).succeeds();
    // Long lines are wrapped.
    let screen = outcome.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "resnet: ",
        "60 samples (image u8 [32, 32, 3], label i32 []), 20 to evaluate on",
        "8 samples; 2 micro-batches of 4; f32",
        " samples/s",
        "accuracy 0.",
        "eval accuracy 0.",
    ] {
        assert!(screen.contains(part), "\"{part}\" is missing: {outcome:?}");
    }
    for part in ["token", "perplexity", "lockstep generate"] {
        assert!(!screen.contains(part), "\"{part}\" is about text: {outcome:?}");
    }
    let steps = columns(&workshop, &["loss", "accuracy", "samples", "samples_seen"]);
    assert_eq!(steps.len(), 6);
    for (step, row) in steps.iter().enumerate() {
        let correct = row[1] * 8.0;
        assert!(correct.fract() == 0.0 && (0.0..=8.0).contains(&correct), "step {step}: {row:?}");
        assert_eq!(row[2..], [8.0, 8.0 * (step + 1) as f64]);
    }
    let evaluations = columns(&workshop, &["eval_loss", "eval_accuracy", "eval_samples"]);
    assert_eq!(evaluations.len(), 2);
    for row in evaluations {
        assert!((row[1] * 20.0).fract() == 0.0 && row[2] == 20.0, "{row:?}");
    }
}

#[test]
fn a_longer_run_tells_most_images_apart() {
    let workshop = workshop();
    write_synthetic_cifar10(&workshop.path("cifar"), 400, 100, 1).unwrap();
    let batch = ["train.global_batch=32", "train.micro_batch=32"];
    let settings = ["train.steps=50", "train.eval_every=50", "checkpoint.every=0"];
    workshop.train(&[&batch[..], &settings].concat()).succeeds();
    let last = columns(&workshop, &["eval_accuracy", "eval_samples"]);
    assert!(last[0][0] > 0.5, "one of ten is guessed: {last:?}");
}

#[test]
fn a_run_that_resumes_is_the_uninterrupted_one_bit_for_bit() {
    let keys = ["loss", "accuracy", "grad_norm", "samples_seen"];
    let eval_keys = ["eval_loss", "eval_accuracy"];
    let (whole, halves) = (workshop(), workshop());
    whole.train(&[]).succeeds();
    halves.train(&["train.steps=3"]).succeeds();
    let resumed = halves.train(&[]).succeeds();
    assert!(resumed.stderr.contains("resuming from"), "{resumed:?}");
    assert_eq!(columns(&halves, &keys), columns(&whole, &keys));
    assert_eq!(columns(&halves, &eval_keys), columns(&whole, &eval_keys));
}

#[test]
fn two_ranks_and_any_number_of_threads_see_the_images_of_one() {
    let alone = workshop();
    alone.train(&[]).succeeds();
    let keys = ["loss", "accuracy", "grad_norm"];
    let eval_keys = ["eval_loss", "eval_accuracy", "eval_samples"];
    let threads = workshop();
    threads.train(&["data.workers=5", "data.prefetch=1"]).succeeds();
    assert_eq!(columns(&threads, &keys), columns(&alone, &keys));
    let both = workshop();
    both.run(&["train", "run.toml", "--nproc-per-node", "2"]).succeeds();
    for keys in [&keys[..], &eval_keys] {
        for (found, expected) in columns(&both, keys).iter().zip(columns(&alone, keys)) {
            let is_close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-4 * b.abs();
            assert!(found.iter().zip(&expected).all(is_close), "{keys:?}: {found:?}, alone {expected:?}");
            assert_eq!(found[1], expected[1], "the accuracy is a count: {keys:?}");
        }
    }
}

/// An image with its label.
struct Sample {
    pixels: Vec<u8>,
    label: i32,
}

/// Returns the training images, class by class as a directory of images has them.
fn samples(workshop: &Workshop) -> Vec<Sample> {
    let cifar = Cifar::open(&workshop.path("cifar"), CifarKind::Cifar10, Split::Train).unwrap();
    let sample = |index| {
        let sample = cifar.get(index).unwrap();
        let TensorData::U8(pixels) = &sample.tensor("image").unwrap().data else { panic!() };
        let label = sample.tensor("label").unwrap().data.as_i32().unwrap()[0];
        Sample { pixels: pixels.clone(), label }
    };
    let mut samples: Vec<Sample> = (0..cifar.len()).map(sample).collect();
    samples.sort_by_key(|sample| sample.label);
    samples
}

/// Returns an image as a PPM file.
fn ppm(pixels: &[u8]) -> Vec<u8> {
    [b"P6\n32 32\n255\n", pixels].concat()
}

/// Returns the records of CIFAR-10 with these samples.
fn cifar(samples: &[Sample]) -> Vec<u8> {
    let record = |sample: &Sample| {
        let plane = |color: usize| sample.pixels.iter().skip(color).step_by(3).copied().collect::<Vec<u8>>();
        [vec![sample.label as u8], plane(0), plane(1), plane(2)].concat()
    };
    samples.iter().flat_map(record).collect()
}

/// Returns an idx file of bytes with these extents.
fn idx(shape: &[u32], bytes: &[u8]) -> Vec<u8> {
    let extents: Vec<u8> = shape.iter().flat_map(|extent| extent.to_be_bytes()).collect();
    [&[0, 0, 8, shape.len() as u8], &extents[..], bytes].concat()
}

/// Returns a tar file with these members.
fn tar(members: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, contents) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(contents.len() as u64);
        header.set_mode(0o444);
        builder.append_data(&mut header, name, &contents[..]).unwrap();
    }
    builder.into_inner().unwrap()
}

/// Returns a field of bytes of a protocol buffer.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let length = bytes.len();
    let length =
        if length < 128 { vec![length as u8] } else { vec![length as u8 | 0x80, (length >> 7) as u8] };
    [&[number << 3 | 2], &length[..], bytes].concat()
}

/// Returns a `tf.Example` of an image and a label.
fn example(sample: &Sample) -> Vec<u8> {
    let feature = |name: &str, kind, value: &[u8]| {
        field(1, &[field(1, name.as_bytes()), field(2, &field(kind, value))].concat())
    };
    let image = feature("image", 1, &field(1, &ppm(&sample.pixels)));
    // One packed integer.
    let label = feature("label", 3, &field(1, &[sample.label as u8]));
    field(1, &[image, label].concat())
}

/// Writes the samples in every format.
fn write_all(workshop: &Workshop, samples: &[Sample]) {
    workshop.write("sorted.bin", cifar(samples));
    let bytes: Vec<u8> = samples.iter().flat_map(|sample| sample.pixels.clone()).collect();
    let labels: Vec<u8> = samples.iter().map(|sample| sample.label as u8).collect();
    let count = samples.len() as u32;
    workshop.write("images.idx", idx(&[count, 32, 32, 3], &bytes));
    workshop.write("labels.idx", idx(&[count], &labels));
    for (number, sample) in samples.iter().enumerate() {
        workshop.write(&format!("folder/class-{}/{number:03}.ppm", sample.label), ppm(&sample.pixels));
    }
    for (shard, samples) in samples.chunks(samples.len().div_ceil(2)).enumerate() {
        let members: Vec<(String, Vec<u8>)> = samples
            .iter()
            .enumerate()
            .flat_map(|(number, sample)| {
                let member = |suffix: &str, bytes| (format!("{number:03}.{suffix}"), bytes);
                [member("ppm", ppm(&sample.pixels)), member("cls", sample.label.to_string().into_bytes())]
            })
            .collect();
        workshop.write(&format!("shard-{shard}.tar"), tar(&members));
        let mut records = Vec::new();
        samples.iter().for_each(|sample| write_record(&example(sample), &mut records));
        workshop.write(&format!("part-{shard}.tfrecord"), records);
    }
}

/// The formats besides CIFAR-10, each with its settings.
const FORMATS: [(&str, &[&str]); 4] = [
    ("idx", &["data.train=images.idx", "data.labels=labels.idx"]),
    ("image_folder", &["data.train=folder"]),
    ("webdataset", &["data.train=shard-{0..1}.tar"]),
    ("tfrecord", &["data.train=part-*.tfrecord"]),
];

/// Runs a command on the samples of a format, with additional settings.
fn run_of(
    workshop: &Workshop,
    command: &[&str],
    format: &str,
    settings: &[&str],
) -> crate::workshop::Outcome {
    let format = format!("data.format={format}");
    let all = [format.as_str(), "data.valid=[]", "train.eval_every=0", "train.steps=2"];
    let sets = all.iter().chain(settings).flat_map(|setting| ["--set", setting]);
    workshop.run(&command.iter().copied().chain(sets).collect::<Vec<_>>())
}

const TRAIN: &[&str] = &["train", "run.toml", "--resume", "never"];

#[test]
fn the_same_images_give_the_same_losses_in_every_format() {
    let workshop = workshop();
    write_all(&workshop, &samples(&workshop));
    run_of(&workshop, TRAIN, "cifar10", &["data.train=sorted.bin"]).succeeds();
    let keys = ["loss", "accuracy"];
    let expected = columns(&workshop, &keys);
    assert_eq!(expected.len(), 2);
    for (format, settings) in FORMATS {
        run_of(&workshop, TRAIN, format, settings).succeeds();
        assert_eq!(columns(&workshop, &keys), expected, "{format}");
        // Names of the parts of a record may be said.
        let columns_setting = match format {
            "webdataset" => r#"data.columns={ pixel_values = "ppm", labels = "cls" }"#,
            "tfrecord" => r#"data.columns={ pixel_values = "image", labels = "label" }"#,
            _ => r#"data.columns={ labels = "label" }"#,
        };
        run_of(&workshop, TRAIN, format, &[settings, &[columns_setting]].concat()).succeeds();
        assert_eq!(columns(&workshop, &keys), expected, "{format} with columns");
    }
}

#[test]
fn data_show_says_what_the_samples_are_and_what_the_model_sees() {
    let workshop = workshop();
    let shown = workshop.run(&["data", "show", "run.toml"]).succeeds().stdout;
    for part in [
        "train  60 samples",
        "image u8 [32, 32, 3]",
        "image f32 [32, 32, 3]",
        "first      label ",
        "0.80 epochs",
    ] {
        assert!(shown.contains(part), "\"{part}\" is missing:\n{shown}");
    }
    let drawn: Vec<&str> = shown.lines().filter(|line| line.starts_with("  |")).collect();
    assert_eq!(drawn.len(), 16, "the first training image:\n{shown}");
    let json = workshop.run(&["data", "show", "run.toml", "--json", "--verify"]).json();
    assert_eq!((&json["train"]["samples"], &json["valid"]["samples"]), (&60.into(), &20.into()), "{json}");
}

#[test]
fn a_run_on_images_is_planned_and_its_checkpoint_exported() {
    let workshop = workshop();
    let planned = workshop.run(&["plan", "run.toml"]).succeeds();
    assert!(planned.stdout.contains("8 samples a step"), "{planned:?}");
    workshop.train(&["train.steps=1"]).succeeds();
    workshop.run(&["checkpoint", "export", "checkpoints/step-00000001", "--hf", "hf"]).succeeds();
    assert!(workshop.path("hf/model.safetensors").exists());
}

#[test]
fn damaged_files_end_the_run_with_the_file_the_record_and_the_offset() {
    let workshop = workshop();
    let samples = samples(&workshop);
    write_all(&workshop, &samples);
    let damage = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = workshop.read(name);
        change(&mut bytes);
        workshop.write(name, bytes);
    };
    let refused = |format: &str, settings: &[&str], parts: &[&str]| {
        run_of(&workshop, TRAIN, format, settings).fails(4, parts);
    };
    damage("sorted.bin", &|bytes| bytes.truncate(10 * RECORD_BYTES + 100));
    refused(
        "cifar10",
        &["data.train=sorted.bin"],
        &["sorted.bin, record 10 at byte 30730", "it has 100 bytes"],
    );
    damage("sorted.bin", &|bytes| bytes.truncate(10 * RECORD_BYTES));
    damage("sorted.bin", &|bytes| bytes[2 * RECORD_BYTES] = 77);
    let sequential = "data.order=sequential";
    refused(
        "cifar10",
        &["data.train=sorted.bin", sequential],
        &["sorted.bin, record 2 at byte 6146", "its label is 77", "sample 2 (epoch 0, index 2)"],
    );
    damage("images.idx", &|bytes| bytes.truncate(5000));
    refused("idx", FORMATS[0].1, &["images.idx, the file at byte 5000", "only 4980 follow"]);
    let first = format!("folder/class-{}/000.ppm", samples[0].label);
    damage(&first, &|bytes| bytes.truncate(500));
    refused("image_folder", &[FORMATS[1].1, &[sequential]].concat(), &["000.ppm, the image at byte 0"]);
    damage("shard-1.tar", &|bytes| bytes.truncate(1000));
    refused("webdataset", FORMATS[2].1, &["shard-1.tar", "at byte "]);
    damage("part-0.tfrecord", &|bytes| bytes[100] ^= 1);
    refused(
        "tfrecord",
        &[FORMATS[3].1, &[sequential]].concat(),
        &["part-0.tfrecord, record 0 at byte 12", "checksum"],
    );
}

#[test]
fn damaged_samples_are_skipped_and_counted_if_the_run_says_so() {
    let workshop = workshop();
    write_all(&workshop, &samples(&workshop));
    let mut bytes = workshop.read("part-0.tfrecord");
    bytes[100] ^= 1;
    workshop.write("part-0.tfrecord", bytes);
    let mut shard = workshop.read("part-1.tfrecord");
    shard.truncate(shard.len() - 10);
    workshop.write("part-1.tfrecord", shard);
    let settings = [FORMATS[3].1, &["data.order=sequential", "data.skip_bad_samples=true"]].concat();
    let outcome = run_of(&workshop, TRAIN, "tfrecord", &settings).succeeds();
    assert!(outcome.stderr.contains("damaged") && outcome.stderr.contains("part-1.tfrecord"), "{outcome:?}");
    let skipped: Vec<Option<u64>> =
        rows(&workshop).iter().map(|row| row["skipped_samples"].as_u64()).collect();
    assert_eq!(skipped, [Some(1), None], "the first sample of the first step");
}

#[test]
fn data_that_do_not_fit_the_model_are_one_mistake_of_the_configuration() {
    let workshop = workshop();
    let refused = |settings: &[&str], parts: &[&str]| {
        workshop.train(settings).fails(2, parts);
    };
    refused(&["model.num_labels=5"], &["data.format", "has 10 classes, and the model 5"]);
    refused(&["data.columns={ image = \"x\" }"], &["data.columns", "\"image\"", "pixel_values, labels"]);
    let smaller = r#"data.transforms=[{ kind = "center_crop", size = 24 }]"#;
    refused(
        &[smaller],
        &["data.transforms", "image f32 [24, 24, 3]", "pixel_values f32 [32, 32, 3]", "kind = \"resize\""],
    );
    let gray = r#"data.transforms=[{ kind = "normalize", mean = [0.5], std = [0.5] }]"#;
    refused(&[gray], &["data.transforms", "other channels than the normalization; allowed: 1"]);
    refused(&["data.train=nowhere"], &["nowhere"]);
    let mut text = String::from(RUN);
    text = text.replace("format = \"cifar10\"", "format = \"text\"").replace("valid = [\"cifar\"]\n", "");
    let (start, end) = (text.find("transforms").unwrap(), text.find("[train]").unwrap());
    text.replace_range(start..end, "");
    workshop.write("text.toml", &text);
    let expected =
        "\"text\" holds text, and resnet reads pixel_values and labels; allowed: \"cifar10\", \"cifar100\"";
    workshop.run(&["train", "text.toml"]).fails(2, &[expected]);
    let language = "[model]\npreset = \"llama-15m\"\n[data]\nformat = \"cifar10\"\ntrain = [\"cifar\"]\n";
    workshop.write("language.toml", language);
    let expected = "\"cifar10\" holds samples, and llama reads tokens of a vocabulary of";
    workshop.run(&["train", "language.toml"]).fails(2, &["language.toml:4", expected]);
}

#[test]
fn a_validation_folder_names_the_classes_of_the_training_folder() {
    let workshop = workshop();
    let samples = samples(&workshop);
    write_all(&workshop, &samples);
    workshop.write("other/class-3/x.ppm", ppm(&samples[0].pixels));
    let settings = ["data.format=image_folder", "data.train=folder", "data.valid=other"];
    let expected = "has other classes than data.train, so that their numbers differ: 1 (class-3)";
    workshop.train(&settings).fails(2, &[expected]);
}
