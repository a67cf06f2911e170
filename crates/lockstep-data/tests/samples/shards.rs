//! Tests of WebDataset and TFRecord shards that are sound, and of their cached indexes.

use std::fs;

use lockstep_data::samples::{
    Channels, Dataset, Field, Sample, ShardOptions, TensorData, TfRecordDataset, WebDataset,
};
use lockstep_plan::DType;

use crate::workshop::{example, fixture, records, scalar, tar, write};

fn text(sample: &Sample, name: &str) -> String {
    String::from_utf8(sample.tensor(name).unwrap().data.as_u8().unwrap().to_vec()).unwrap()
}

#[test]
fn a_shard_of_webdataset_itself_is_read() {
    let shard = fixture("shard.tar").display().to_string();
    let fields = vec![
        Field::image("image", "jpg;png", Channels::Rgb),
        Field::class("label", "cls", Some(13)),
        Field::bytes("json", "json"),
        Field::array("weights", "weights.npy", DType::F32, &[Some(4)]),
    ];
    let data = WebDataset::open(&shard, fields, ShardOptions::default()).unwrap();
    assert_eq!(data.len(), 5);
    for i in [3, 0, 4, 1, 2] {
        let sample = data.get(i).unwrap();
        assert_eq!(sample.tensor("image").unwrap().shape, [6 + i as usize, 8, 3]);
        assert_eq!(scalar(&sample, "label"), 3 * i as i32);
        assert_eq!(text(&sample, "json"), format!("{{\"caption\": \"number {i}\"}}"));
        let weights = (0..4).map(|w| (w + i) as f32).collect();
        assert_eq!(sample.tensor("weights").unwrap().data, TensorData::F32(weights));
    }
}

#[test]
fn samples_are_consecutive_members_with_one_key() {
    let dir = tempfile::tempdir().unwrap();
    let long = format!("{}/deep.txt", "directory".repeat(15));
    let first = tar(&[
        ("__meta.json__", b"{}"),
        ("a/1.txt", b"one"),
        ("a/1.CLS", b" 7\n"),
        ("README", b"?"),
        ("a/1.seg.txt", b"mask"),
        ("b/1.txt", b"two"),
        ("a/1.txt", b"three"),
        (&long, b"four"),
    ]);
    write(dir.path(), "s-08.tar", first);
    write(dir.path(), "s-09.tar", tar(&[("x.txt", b"five"), ("x.cls", b"1")]));
    let shards = dir.path().join("s-{08..09}.tar").display().to_string();
    let data = WebDataset::open(&shards, vec![Field::bytes("text", "txt")], ShardOptions::default()).unwrap();
    let texts: Vec<String> = (0..data.len()).map(|i| text(&data.get(i).unwrap(), "text")).collect();
    assert_eq!(texts, ["one", "two", "three", "four", "five"]);
    let fields = vec![Field::bytes("mask", "seg.txt"), Field::class("label", "cls", Some(10))];
    let data = WebDataset::open(&shards, fields, ShardOptions::default()).unwrap();
    assert_eq!(
        (text(&data.get(0).unwrap(), "mask"), scalar(&data.get(0).unwrap(), "label")),
        ("mask".to_owned(), 7)
    );
    let error = data.get(1).unwrap_err().to_string();
    assert!(error.contains("s-08.tar, member b/1.txt at byte"), "{error}");
    assert!(error.contains("its sample has no member with the suffix \"seg.txt\""), "{error}");
}

#[test]
fn a_cached_index_gives_the_same_samples() {
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    let options = ShardOptions { cache_dir: Some(&cache), ..ShardOptions::default() };
    let members: Vec<(String, String)> = (0..20).map(|i| (format!("{i}.txt"), format!("text {i}"))).collect();
    let members: Vec<(&str, &[u8])> = members.iter().map(|(name, text)| (&**name, text.as_bytes())).collect();
    let path = write(dir.path(), "a.tar", tar(&members));
    let shard = path.display().to_string();
    let open = || WebDataset::open(&shard, vec![Field::bytes("text", "txt")], options).unwrap();
    let read = |data: &WebDataset| (0..20).map(|i| text(&data.get(i).unwrap(), "text")).collect::<Vec<_>>();
    let first = read(&open());
    assert_eq!(fs::read_dir(&cache).unwrap().count(), 1);
    assert_eq!(read(&open()), first);
    assert_eq!(fs::read_dir(&cache).unwrap().count(), 1);
    // Other fields have an index of their own.
    let other = WebDataset::open(&shard, vec![Field::bytes("text", "md;txt")], options).unwrap();
    assert_eq!(read(&other), first);
    assert_eq!(fs::read_dir(&cache).unwrap().count(), 2);
    // A shard that is overwritten under an open data set is noticed, whatever its index says.
    let data = open();
    fs::write(&path, vec![b'x'; 30_000]).unwrap();
    let error = data.get(3).unwrap_err().to_string();
    assert!(
        error.contains("a.tar, a member at byte 3072") && error.contains("changed after it was indexed"),
        "{error}"
    );
}

#[test]
fn records_of_examples_become_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let png = fs::read(fixture("gray.png")).unwrap();
    let record = |label: u8, floats: &[f32]| {
        example(&[
            ("image/encoded", 1, png.clone()),
            ("image/class/label", 3, vec![label]),
            ("embedding", 2, floats.iter().flat_map(|value| value.to_le_bytes()).collect()),
            ("name", 1, b"n".to_vec()),
        ])
    };
    write(dir.path(), "d-0.tfrecord", records(&[record(1, &[1.0, 2.0]), record(5, &[3.0, 4.0])]));
    write(dir.path(), "d-1.tfrecord", records(&[record(9, &[5.0, 6.0, 7.0, 8.0])]));
    let fields = || {
        vec![
            Field::class("label", "label;image/class/label", Some(10)),
            Field::image("image", "image/encoded", Channels::Gray),
            Field::array("embedding", "embedding", DType::F32, &[None, Some(2)]),
            Field::bytes("name", "name"),
            Field::array("ids", "image/class/label", DType::U32, &[Some(1)]),
        ]
    };
    let shards = dir.path().join("d-{0,1}.tfrecord").display().to_string();
    let cache = dir.path().join("cache");
    for cache_dir in [None, Some(&*cache), Some(&*cache)] {
        let options = ShardOptions { cache_dir, ..ShardOptions::default() };
        let data = TfRecordDataset::open(&shards, fields(), options).unwrap();
        assert_eq!(data.len(), 3);
        let labels: Vec<i32> = (0..3).map(|i| scalar(&data.get(i).unwrap(), "label")).collect();
        assert_eq!(labels, [1, 5, 9]);
        let sample = data.get(2).unwrap();
        assert_eq!(sample.tensor("image").unwrap().shape, [21, 30, 1]);
        let embedding = sample.tensor("embedding").unwrap();
        assert_eq!(embedding.shape, [2, 2]);
        assert_eq!(embedding.data.as_f32().unwrap(), [5.0, 6.0, 7.0, 8.0]);
        assert_eq!(sample.tensor("ids").unwrap().data, TensorData::U32(vec![9]));
        assert_eq!(text(&sample, "name"), "n");
    }
}
