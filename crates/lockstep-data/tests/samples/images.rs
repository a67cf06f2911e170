//! Tests of image files and of resizing against Pillow (`tests/fixtures/images/make.py`).

use std::fs;

use lockstep_data::samples::{
    Channels, NamedTensor, Resize, Sample, SamplePlace, TensorData, Transforms, decode_image,
};
use proptest::prelude::*;

use crate::workshop::{fixture, pixels};

fn decode(name: &str, channels: Channels) -> Result<([usize; 3], Vec<u8>), String> {
    let mut out = Vec::new();
    decode_image(&fs::read(fixture(name)).unwrap(), channels, &mut out).map(|shape| (shape, out))
}

/// Largest and mean difference of two images.
fn difference(a: &[u8], b: &[u8]) -> (u8, f64) {
    let differences = || a.iter().zip(b).map(|(a, b)| a.abs_diff(*b));
    (differences().max().unwrap(), differences().map(f64::from).sum::<f64>() / a.len() as f64)
}

#[test]
fn images_have_the_pixels_that_pillow_decodes() {
    // JPEG decoders differ in rounding, and in how they enlarge subsampled colors.
    for (name, most, mean) in [
        ("original.png", 0, 0.0),
        ("gray.png", 0, 0.0),
        ("alpha.png", 0, 0.0),
        ("palette.png", 0, 0.0),
        ("deep.png", 0, 0.0),
        ("plain.bmp", 0, 0.0),
        ("plain.ppm", 0, 0.0),
        ("gray.pgm", 0, 0.0),
        ("plain.tif", 0, 0.0),
        ("deflated.tif", 0, 0.0),
        ("lossless.webp", 0, 0.0),
        ("gray.jpg", 1, 0.2),
        ("baseline.jpg", 4, 0.6),
        ("restarts.jpg", 4, 0.6),
        ("cmyk.jpg", 60, 3.0),
        ("progressive.jpg", 60, 3.0),
        ("subsampled.jpg", 60, 3.0),
    ] {
        let (shape, found) = decode(name, Channels::Rgb).unwrap();
        let (expected_shape, expected) = pixels(&format!("{}.npy", name.replace('.', "-")));
        assert_eq!(shape[..], expected_shape, "{name}");
        let (found_most, found_mean) = difference(&found, &expected);
        assert!(found_most <= most && found_mean <= mean, "{name}: most {found_most}, mean {found_mean}");
    }
}

#[test]
fn gray_images_have_one_channel_on_request() {
    let (shape, gray) = decode("gray.png", Channels::Gray).unwrap();
    let (_, rgb) = decode("gray.png", Channels::Rgb).unwrap();
    assert_eq!(shape, [21, 30, 1]);
    assert!(rgb.chunks_exact(3).map(|pixel| pixel[0]).eq(gray));
    for name in ["baseline.jpg", "gray.jpg", "original.png"] {
        assert_eq!(decode(name, Channels::Gray).unwrap().0, [21, 30, 1], "{name}");
    }
}

#[test]
fn a_truncated_image_is_refused() {
    for name in [
        "original.png",
        "baseline.jpg",
        "progressive.jpg",
        "plain.bmp",
        "plain.ppm",
        "plain.tif",
        "lossless.webp",
    ] {
        let bytes = fs::read(fixture(name)).unwrap();
        for tenth in 0..10 {
            let cut = &bytes[..bytes.len() * tenth / 10];
            let result = decode_image(cut, Channels::Rgb, &mut Vec::new());
            assert!(result.is_err(), "{name} cut to {} of {} bytes: {result:?}", cut.len(), bytes.len());
        }
    }
}

/// Offset of the height in the header of a JPEG whose frame begins with this marker.
fn jpeg_height(bytes: &[u8], frame: u8) -> usize {
    bytes.windows(2).position(|pair| pair == [0xFF, frame]).unwrap() + 5
}

#[test]
fn an_image_that_lies_about_its_size_is_refused() {
    let png = fs::read(fixture("original.png")).unwrap();
    let jpeg = fs::read(fixture("baseline.jpg")).unwrap();
    let bmp = fs::read(fixture("plain.bmp")).unwrap();
    let with = |bytes: &[u8], at: usize, value: &[u8]| {
        let mut bytes = bytes.to_vec();
        bytes[at..at + value.len()].copy_from_slice(value);
        bytes
    };
    let height = jpeg_height(&jpeg, 0xC0);
    // The checksum of a PNG header covers its size.
    let ihdr = |width: u32, height: u32| {
        let mut bytes = with(&png, 16, &[width.to_be_bytes(), height.to_be_bytes()].concat());
        let mut crc = flate2::Crc::new();
        crc.update(&bytes[12..29]);
        bytes[29..33].copy_from_slice(&crc.sum().to_be_bytes());
        bytes
    };
    for (what, bytes, part) in [
        ("png checksum", with(&png, 20, &[0, 0, 1, 0]), ""),
        ("png taller", ihdr(30, 2000), ""),
        ("png huge", ihdr(60_000, 60_000), "60000 × 60000 pixels; allowed: 1 to"),
        ("png empty", ihdr(0, 21), ""),
        ("jpeg taller", with(&jpeg, height, &[1, 0]), ""),
        ("jpeg taller by a block", with(&jpeg, height, &[0, 25]), "complete JPEG image"),
        ("jpeg huge", with(&jpeg, height, &[0xFF, 0xFF, 0xFF, 0xFF]), "pixels; allowed: 1 to"),
        ("jpeg large", with(&jpeg, height, &[0x20, 0, 0x20, 0]), "too many for its"),
        ("bmp taller", with(&bmp, 22, &[0, 1, 0, 0]), ""),
        ("no image", b"GIF89a, or something else".to_vec(), "it is not an image; allowed: bmp"),
        ("nothing", Vec::new(), ""),
    ] {
        let result = decode_image(&bytes, Channels::Rgb, &mut Vec::new());
        let problem = result.expect_err(what);
        assert!(problem.contains(part), "{what}: {problem}");
    }
}

fn resized(image: NamedTensor, resize: Resize) -> NamedTensor {
    let mut sample = Sample::new(vec![image]);
    let transforms = Transforms::new().then("image", resize);
    transforms.apply(&mut sample, 0, SamplePlace { sample: 0, epoch: 0, index: 0 }).unwrap();
    sample.tensors.remove(0)
}

#[test]
fn resizing_is_pillows_bilinear_filter() {
    let (shape, original) = pixels("original-png.npy");
    for (height, width) in [(7, 10), (40, 45), (21, 13), (9, 60)] {
        let image = NamedTensor::new("image", &shape, TensorData::U8(original.clone()));
        let found = resized(image, Resize::Exact { height, width });
        let (expected_shape, expected) = pixels(&format!("resize-{height}x{width}.npy"));
        assert_eq!(found.shape, expected_shape);
        // Pillow rounds between its passes.
        let (most, mean) = difference(found.data.as_u8().unwrap(), &expected);
        assert!(most <= 1 && mean < 0.3, "{height} x {width}: most {most}, mean {mean}");
    }
}

/// Bilinear resizing as a sum over all input pixels, in f64.
fn reference(image: &NamedTensor, out_height: usize, out_width: usize) -> Vec<f64> {
    let [height, width, channels] = image.shape[..] else { panic!() };
    let pixels = image.data.as_f32().unwrap();
    let weight = |at: usize, extent: usize, out: usize, i: usize| {
        let scale = extent as f64 / out as f64;
        let distance = (i as f64 + 0.5 - (at as f64 + 0.5) * scale) / scale.max(1.0);
        (1.0 - distance.abs()).max(0.0)
    };
    let mut out = Vec::new();
    for y in 0..out_height {
        for x in 0..out_width {
            for c in 0..channels {
                let (mut sum, mut total) = (0.0, 0.0);
                for i in 0..height {
                    for j in 0..width {
                        let w = weight(y, height, out_height, i) * weight(x, width, out_width, j);
                        sum += w * f64::from(pixels[(i * width + j) * channels + c]);
                        total += w;
                    }
                }
                out.push(sum / total);
            }
        }
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn resizing_is_a_weighted_mean_of_pixels(
        height in 1_usize..12, width in 1_usize..12, channels in 1_usize..4,
        out_height in 1_usize..14, out_width in 1_usize..14, seed: u32
    ) {
        let values = (0..height * width * channels).map(|i| ((i as u32 ^ seed).wrapping_mul(2_654_435_761) >> 24) as f32);
        let image = NamedTensor::new("image", &[height, width, channels], TensorData::F32(values.collect()));
        let expected = reference(&image, out_height, out_width);
        let found = resized(image, Resize::Exact { height: out_height, width: out_width });
        prop_assert_eq!(&found.shape, &[out_height, out_width, channels]);
        for (found, expected) in found.data.as_f32().unwrap().iter().zip(expected) {
            prop_assert!((f64::from(*found) - expected).abs() < 1e-3, "{} is not {}", found, expected);
        }
    }
}

#[test]
fn the_shorter_side_decides_the_size_in_proportion() {
    for (shape, size, expected) in
        [([20, 30, 1], 10, [10, 15, 1]), ([31, 20, 1], 10, [15, 10, 1]), ([5, 5, 2], 7, [7, 7, 2])]
    {
        let image = NamedTensor::new("image", &shape, TensorData::U8(vec![9; shape.iter().product()]));
        let found = resized(image, Resize::ShorterSide(size));
        assert_eq!(found.shape, expected);
        assert!(found.data.as_u8().unwrap().iter().all(|&value| value == 9), "a constant stays one");
    }
}
