//! Tests of broken shards: each gives one error with the file, the record, the byte offset and the allowed values; or is
//! skipped and counted.

use std::{fs, path::Path};

use lockstep_data::{
    DataError, ErrorKind,
    samples::{
        Channels, Dataset, Field, OnBadSample, Sample, ShardOptions, TfRecordDataset, WebDataset,
        expand_shards,
    },
};
use lockstep_plan::DType;

use crate::workshop::{assert_says, example, fixture, records, scalar, tar, write};

fn open_tar(dir: &Path, bytes: &[u8], on_damage: OnBadSample) -> Result<WebDataset, DataError> {
    let path = write(dir, "a.tar", bytes);
    let fields = vec![Field::class("label", "cls", Some(3))];
    WebDataset::open(
        &path.display().to_string(),
        fields,
        ShardOptions { on_damage, ..ShardOptions::default() },
    )
}

#[test]
fn a_damaged_tar_names_member_and_offset() {
    let dir = tempfile::tempdir().unwrap();
    let sound = tar(&[("0.cls", b"0"), ("1.cls", b"1"), ("2.cls", b"2")]);
    assert_eq!(sound.len(), 3 * 1024 + 1024);
    open_tar(dir.path(), &sound, OnBadSample::Fail).unwrap();
    let flipped = |at: usize| {
        let mut bytes = sound.clone();
        bytes[at] ^= 1;
        bytes
    };
    let mut sizes = sound.clone();
    // A member that claims 8 GiB, with a sound checksum.
    let mut header = tar::Header::from_byte_slice(&sizes[1024..1536]).clone();
    header.set_size(8 << 30);
    header.set_cksum();
    sizes[1024..1536].copy_from_slice(header.as_bytes());
    let twice = tar(&[("0.cls", b"0"), ("1.cls", b"1"), ("1.CLS", b"1")]);
    for (bytes, parts, kept) in [
        (&sound[..1500], ["a.tar, member 1 at byte 1024", "not a tar header"], 0),
        (
            &sound[..1536],
            ["a.tar, member 1.cls at byte 1536", "it has 1 bytes, but the file ends at byte 1536"],
            1,
        ),
        (&sound[..2048], ["a.tar, the end at byte 2048", "no end-of-archive block: it was cut off"], 1),
        (&flipped(1030), ["a.tar, member 1 at byte 1024", "checksum mismatch"], 0),
        (&sizes, ["a.tar, member 1.cls at byte 1536", "it has 8589934592 bytes"], 1),
        (&twice, ["a.tar, member 1.CLS at byte 2560", "two members with the suffix .cls; allowed: one"], 1),
        (b"".as_slice(), ["a.tar, the end at byte 0", "or is empty"], 0),
    ] {
        assert_says(open_tar(dir.path(), bytes, OnBadSample::Fail), ErrorKind::CorruptInput, &parts);
        // Samples before the damage are kept; the last one may lack members, so it is not.
        match open_tar(dir.path(), bytes, OnBadSample::Skip) {
            Ok(data) => {
                assert_eq!((data.len(), data.damages().len()), (kept, 1), "{parts:?}");
                assert_eq!(scalar(&data.get(0).unwrap(), "label"), 0);
            }
            Err(error) => assert_eq!(kept, 0, "{error}"),
        }
    }
}

#[test]
fn a_damaged_member_names_itself_and_its_offset() {
    let dir = tempfile::tempdir().unwrap();
    let png = fs::read(fixture("original.png")).unwrap();
    let members: [(&str, &[u8]); 6] = [
        ("0.cls", b"3"),
        ("0.png", &png[..200]),
        ("1.cls", b"-1"),
        ("1.png", b"GIF89a"),
        ("2.cls", b"cat"),
        ("2.png", &png),
    ];
    let shard = write(dir.path(), "a.tar", tar(&members)).display().to_string();
    let open = |fields| WebDataset::open(&shard, fields, ShardOptions::default());
    let labels = open(vec![Field::class("label", "cls", Some(3))]).unwrap();
    for (index, parts) in [
        (0, ["member 0.cls at byte 512", "its label is 3, but there are 3 classes: 0 to 2"]),
        (1, ["member 1.cls at byte 2560", "its label is -1"]),
        (2, ["member 2.cls at byte 4608", "not a class index in decimal digits"]),
    ] {
        assert_says(labels.get(index), ErrorKind::CorruptInput, &parts);
    }
    let images = open(vec![Field::image("image", "jpg;png", Channels::Rgb)]).unwrap();
    assert_says(images.get(0), ErrorKind::CorruptInput, &["member 0.png at byte 1536"]);
    assert_says(
        images.get(1),
        ErrorKind::CorruptInput,
        &["member 1.png at byte 3584", "it is not an image; allowed"],
    );
    assert_eq!(images.get(2).unwrap().tensor("image").unwrap().shape, [21, 30, 3]);
    let arrays = open(vec![Field::array("x", "cls", DType::F32, &[None])]).unwrap();
    assert_says(arrays.get(0), ErrorKind::CorruptInput, &["member 0.cls at byte 512", "magic bytes of .npy"]);
}

#[test]
fn fields_that_cannot_be_read_are_refused() {
    for (fields, part) in [
        (vec![], "number of fields is 0"),
        (vec![Field::bytes("a", " ; ")], "field without keys"),
        (vec![Field::bytes("a", "x"), Field::bytes("a", "y")], "name of two fields"),
        (vec![Field::bytes("a", "txt;pkl")], "pickles, which execute code"),
        (vec![Field::array("a", "npy", DType::BF16, &[])], "allowed: u8, i32, u32, f32"),
    ] {
        let opened = WebDataset::open("none.tar", fields, ShardOptions::default());
        assert_says(opened, ErrorKind::Configuration, &[part]);
    }
    let missing = WebDataset::open("none.tar", vec![Field::bytes("a", "x")], ShardOptions::default());
    assert_says(missing, ErrorKind::Configuration, &["cannot open none.tar"]);
    assert_says(
        expand_shards("a{0..99999999}"),
        ErrorKind::Configuration,
        &["names more than 1048576 files"],
    );
}

fn open_records(dir: &Path, bytes: &[u8], on_damage: OnBadSample) -> Result<TfRecordDataset, DataError> {
    let path = write(dir, "a.tfrecord", bytes);
    let fields = vec![Field::class("label", "label", Some(3))];
    let options = ShardOptions { on_damage, ..ShardOptions::default() };
    TfRecordDataset::open(&path.display().to_string(), fields, options)
}

#[test]
fn a_damaged_record_names_number_and_offset() {
    let dir = tempfile::tempdir().unwrap();
    let label = |label: u8| example(&[("label", 3, vec![label])]);
    let sound = records(&[label(0), label(1), label(2)]);
    let record = sound.len() / 3;
    let flipped = |at: usize| {
        let mut bytes = sound.clone();
        bytes[at] ^= 1;
        bytes
    };
    let one = format!("a.tfrecord, record 1 at byte {record}:");
    for (bytes, part) in [
        (&flipped(record), "checksum of its length is"),
        (&flipped(record + 9), "but the file says"),
        (&sound[..record + 5].to_vec(), "the file ends after 5 of its 12 bytes of header"),
        (&sound[..2 * record - 1].to_vec(), "but the file ends at byte"),
    ] {
        let opened = open_records(dir.path(), bytes, OnBadSample::Fail);
        assert_says(opened, ErrorKind::CorruptInput, &[&one, part]);
        let kept = open_records(dir.path(), bytes, OnBadSample::Skip).unwrap();
        assert_eq!((kept.len(), kept.damages().len(), scalar(&kept.get(0).unwrap(), "label")), (1, 1, 0));
    }
    // Damage of the contents is found when the sample is read.
    for at in [record + 12, record + 20, 2 * record - 1] {
        let data = open_records(dir.path(), &flipped(at), OnBadSample::Fail).unwrap();
        assert_eq!(scalar(&data.get(2).unwrap(), "label"), 2);
        let parts =
            [&format!("a.tfrecord, record 1 at byte {}", record + 12), "the checksum of its bytes is"];
        assert_says(data.get(1), ErrorKind::CorruptInput, &parts.map(|part: &str| part));
    }
    assert_says(
        open_records(dir.path(), &[], OnBadSample::Skip),
        ErrorKind::Configuration,
        &["no sample in it"],
    );
    let gzip = [0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_says(
        open_records(dir.path(), &gzip, OnBadSample::Fail),
        ErrorKind::CorruptInput,
        &["compressed by gzip"],
    );
}

#[test]
fn a_record_with_other_features_says_which_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = records(&[
        example(&[("label", 3, vec![3])]),
        example(&[("label", 3, vec![1, 2])]),
        example(&[("label", 1, b"1".to_vec())]),
        example(&[("class", 3, vec![1]), ("name", 1, vec![])]),
        vec![10, 200],
    ]);
    let data = open_records(dir.path(), &bytes, OnBadSample::Fail).unwrap();
    for (index, part) in [
        (0, "its label is 3, but there are 3 classes: 0 to 2"),
        (1, "its feature \"label\" is not one integer"),
        (2, "its feature \"label\" is not one integer"),
        (3, "it has no feature \"label\" (it has: class, name)"),
        (4, "it is not a tf.Example: a varint is cut off"),
    ] {
        let parts = [&format!("record {index} at byte"), part];
        assert_says(data.get(index), ErrorKind::CorruptInput, &parts.map(|part: &str| part));
    }
    assert_says(
        data.get_into(5, &mut Sample::default()),
        ErrorKind::Configuration,
        &["index is 5; allowed: 0 to 4"],
    );
}
