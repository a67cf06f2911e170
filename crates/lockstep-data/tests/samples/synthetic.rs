//! Tests of the generated data set in CIFAR-10's format.

use std::fs;

use lockstep_data::{
    ErrorKind,
    samples::{Cifar, CifarKind, Dataset, Split, write_synthetic_cifar10},
};

use crate::workshop::{assert_says, scalar};

#[test]
fn the_same_arguments_give_the_same_files() {
    let dir = tempfile::tempdir().unwrap();
    let hash = |name: &str, seed| {
        let path = dir.path().join(name);
        write_synthetic_cifar10(&path, 13, 3, seed).unwrap();
        let mut names: Vec<_> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.sort();
        let bytes: Vec<u8> = names.iter().flat_map(|path| fs::read(path).unwrap()).collect();
        (names.len(), blake3::hash(&bytes).to_hex().to_string())
    };
    let first = hash("a", 1);
    assert_eq!(first.0, 7);
    assert_eq!(first, hash("b", 1));
    assert_ne!(first, hash("c", 2));
    // The bytes are part of the interface: recorded numbers of examples rest on them.
    assert_eq!(&first.1[..16], "2a78a3a4a37e99a1");
    let train = Cifar::open(&dir.path().join("a"), CifarKind::Cifar10, Split::Train).unwrap();
    assert_eq!(train.len(), 13);
    for (train, test, part) in [(4, 1, "train_samples is 4; allowed: 5 or more"), (5, 0, "test_samples is 0")]
    {
        assert_says(write_synthetic_cifar10(dir.path(), train, test, 0), ErrorKind::Configuration, &[part]);
    }
}

/// Features that a small convolutional network finds: the energy of each color at a few differences of position.
fn features(pixels: &[u8]) -> Vec<f64> {
    let pixel = |y: usize, x: usize, c: usize| f64::from(pixels[(y % 32 * 32 + x % 32) * 3 + c]);
    let mut features = Vec::new();
    for c in 0..3 {
        for (dy, dx) in [(0, 1), (1, 0), (1, 1), (0, 4), (4, 0), (2, 4), (4, 28)] {
            let squares = (0..24).flat_map(|y| (4..24).map(move |x| (y, x)));
            let sum: f64 = squares
                .map(|(y, x)| {
                    let x_shifted = if dx > 16 { x + dx - 32 } else { x + dx };
                    (pixel(y, x, c) - pixel(y + dy, x_shifted, c)).powi(2)
                })
                .sum();
            features.push((sum / 480.0).sqrt());
        }
    }
    features
}

/// Nearest class mean of the features: a stand-in for a model, fast enough for a test.
#[test]
fn classes_can_be_learned_and_not_by_their_mean_color() {
    let dir = tempfile::tempdir().unwrap();
    write_synthetic_cifar10(dir.path(), 1000, 300, 7).unwrap();
    let open = |split| Cifar::open(dir.path(), CifarKind::Cifar10, split).unwrap();
    let read = |data: &Cifar, features: &dyn Fn(&[u8]) -> Vec<f64>| -> Vec<(usize, Vec<f64>)> {
        (0..data.len())
            .map(|i| {
                let sample = data.get(i).unwrap();
                (
                    scalar(&sample, "label") as usize,
                    features(sample.tensor("image").unwrap().data.as_u8().unwrap()),
                )
            })
            .collect()
    };
    let accuracy = |features: &dyn Fn(&[u8]) -> Vec<f64>| {
        let (train, test) = (read(&open(Split::Train), features), read(&open(Split::Test), features));
        let mut means = vec![(0.0, vec![0.0; train[0].1.len()]); 10];
        for (label, values) in &train {
            means[*label].0 += 1.0;
            means[*label].1.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        assert!(means.iter().all(|(count, _)| *count > 60.0), "classes are about equally frequent");
        let distance = |values: &[f64], (count, sums): &(f64, Vec<f64>)| -> f64 {
            values.iter().zip(sums).map(|(value, sum)| (value - sum / count).powi(2)).sum()
        };
        let right = test.iter().filter(|(label, values)| {
            let nearest =
                (0..10).min_by(|&a, &b| distance(values, &means[a]).total_cmp(&distance(values, &means[b])));
            nearest == Some(*label)
        });
        right.count() as f64 / test.len() as f64
    };
    let by_texture = accuracy(&features);
    assert!(by_texture > 0.8, "{by_texture}");
    let mean_color = |pixels: &[u8]| {
        let mean = |c| pixels.iter().skip(c).step_by(3).map(|&value| f64::from(value)).sum::<f64>() / 1024.0;
        (0..3).map(mean).collect()
    };
    let by_color = accuracy(&mean_color);
    assert!(by_color < 0.5, "{by_color}");
}
