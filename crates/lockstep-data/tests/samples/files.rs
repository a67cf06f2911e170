//! Tests of CIFAR, image folders and idx files that are sound.

use std::fs;

use lockstep_data::{
    ErrorKind,
    samples::{Channels, Cifar, CifarKind, Dataset, ImageFolder, Sample, Split},
};

use crate::workshop::{assert_says, fixture, pixels, scalar, write};

/// Returns a record whose pixel values follow from its number.
fn record(labels: &[u8], number: u8) -> Vec<u8> {
    let planes = (0..3072_u32).map(|i| (i as u8).wrapping_mul(3).wrapping_add(number) ^ (i >> 8) as u8);
    labels.iter().copied().chain(planes).collect()
}

#[test]
fn cifar_10_is_read_in_the_order_of_its_files() {
    let dir = tempfile::tempdir().unwrap();
    for file in 1..=5_u8 {
        let bytes: Vec<u8> = (0..file).flat_map(|i| record(&[(file + i) % 10], 10 * file + i)).collect();
        // As the published archive unpacks.
        write(dir.path(), &format!("cifar-10-batches-bin/data_batch_{file}.bin"), bytes);
    }
    let data = Cifar::open(dir.path(), CifarKind::Cifar10, Split::Train).unwrap();
    assert_eq!(data.len(), 15);
    let mut reused = Sample::default();
    for (index, (file, i)) in (1..=5_u8).flat_map(|file| (0..file).map(move |i| (file, i))).enumerate() {
        let sample = data.get(index as u64).unwrap();
        assert_eq!(scalar(&sample, "label"), i32::from((file + i) % 10));
        let image = sample.tensor("image").unwrap();
        assert_eq!(image.shape, [32, 32, 3]);
        let planes = &record(&[0], 10 * file + i)[1..];
        for (pixel, values) in image.data.as_u8().unwrap().chunks_exact(3).enumerate() {
            assert_eq!(values, [planes[pixel], planes[1024 + pixel], planes[2048 + pixel]], "pixel {pixel}");
        }
        data.get_into(index as u64, &mut reused).unwrap();
        assert_eq!(reused, sample);
    }
    let specs = data.tensors();
    assert_eq!((&*specs[0].name, &*specs[1].name, specs.len()), ("image", "label", 2));
}

#[test]
fn cifar_100_has_fine_and_coarse_labels() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "test.bin", [record(&[19, 99], 1), record(&[0, 7], 2)].concat());
    let data = Cifar::open(dir.path(), CifarKind::Cifar100, Split::Test).unwrap();
    let sample = data.get(0).unwrap();
    assert_eq!((scalar(&sample, "label"), scalar(&sample, "coarse_label")), (99, 19));
    let sample = data.get(1).unwrap();
    assert_eq!((scalar(&sample, "label"), scalar(&sample, "coarse_label")), (7, 0));
    assert_eq!(sample.tensors.len(), 3);
}

#[test]
fn broken_cifar_files_name_record_and_offset() {
    let dir = tempfile::tempdir().unwrap();
    let open = |bytes: &[u8]| {
        let path = write(dir.path(), "a.bin", bytes);
        Cifar::from_files(vec![path], CifarKind::Cifar10).and_then(|data| data.get(1))
    };
    let two = [record(&[1], 1), record(&[2], 2)].concat();
    open(&two).unwrap();
    let parts =
        ["a.bin, record 1 at byte 3073", "it has 3072 bytes; allowed: one or more records of 3073 bytes"];
    assert_says(open(&two[..6145]), ErrorKind::CorruptInput, &parts);
    assert_says(open(&[]), ErrorKind::CorruptInput, &["a.bin, record 0 at byte 0"]);
    let bad_label = [record(&[1], 1), record(&[10], 2)].concat();
    let parts = ["a.bin, record 1 at byte 3073", "its label is 10, but there are 10 classes: 0 to 9"];
    assert_says(open(&bad_label), ErrorKind::CorruptInput, &parts);
    let hundred = Cifar::from_files(vec![write(dir.path(), "h", record(&[3, 100], 0))], CifarKind::Cifar100);
    let parts = ["h, record 0 at byte 1", "its label is 100, but there are 100 classes: 0 to 99"];
    assert_says(hundred.unwrap().get(0), ErrorKind::CorruptInput, &parts);
    let missing = Cifar::open(dir.path(), CifarKind::Cifar10, Split::Test);
    assert_says(missing, ErrorKind::Configuration, &["cannot open", "test_batch.bin"]);
    // A file that shrinks after it was opened.
    let data = Cifar::from_files(vec![write(dir.path(), "b.bin", &two)], CifarKind::Cifar10).unwrap();
    write(dir.path(), "b.bin", &two[..4000]);
    let parts = ["b.bin", "at byte 3073", "the file ends before"];
    assert_says(data.get(1), ErrorKind::CorruptInput, &parts);
}

#[test]
fn classes_of_an_image_folder_are_its_sorted_directories() {
    let dir = tempfile::tempdir().unwrap();
    for (name, source) in [
        ("root/zebra/1.png", "original.png"),
        ("root/ant/b/2.JPG", "baseline.jpg"),
        ("root/ant/10.pgm", "gray.pgm"),
        ("root/.cache/x.png", "original.png"),
        ("root/ant/readme.txt", "make.py"),
        ("root/list.png", "original.png"),
    ] {
        write(dir.path(), name, fs::read(fixture(source)).unwrap());
    }
    let root = dir.path().join("root");
    let data = ImageFolder::open(&root, Channels::Rgb).unwrap();
    assert_eq!(data.classes(), ["ant", "zebra"]);
    let samples: Vec<_> = (0..data.len())
        .map(|i| {
            (
                data.path(i).strip_prefix(&root).unwrap().display().to_string(),
                scalar(&data.get(i).unwrap(), "label"),
            )
        })
        .collect();
    let expected = [("ant/10.pgm", 0), ("ant/b/2.JPG", 0), ("zebra/1.png", 1)];
    assert_eq!(samples, expected.map(|(path, label)| (path.to_owned(), label)));
    let image = data.get(2).unwrap().tensor("image").unwrap().clone();
    assert_eq!((image.shape, image.data.as_u8().unwrap().to_vec()), pixels("original-png.npy"));

    write(dir.path(), "root/zebra/0.png", "not an image");
    let data = ImageFolder::open(&root, Channels::Rgb).unwrap();
    assert_says(
        data.get(2),
        ErrorKind::CorruptInput,
        &["zebra/0.png, the image at byte 0", "it is not an image"],
    );
    fs::create_dir(root.join("empty")).unwrap();
    let opened = ImageFolder::open(&root, Channels::Rgb);
    assert_says(opened, ErrorKind::Configuration, &["root/empty", "no image; allowed: bmp"]);
    let opened = ImageFolder::open(&root.join("empty"), Channels::Rgb);
    assert_says(opened, ErrorKind::Configuration, &["root/empty", "one directory per class"]);
    assert_says(
        ImageFolder::open(&dir.path().join("no"), Channels::Rgb),
        ErrorKind::Configuration,
        &["cannot read"],
    );
}
