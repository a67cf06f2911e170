//! Bilinear resizing with half-pixel centers and antialiasing, as Pillow's and torchvision's default (`antialias=True`).
//!
//! An output pixel is a weighted mean of input pixels around the same relative position. The weight is a triangle whose
//! half width is one input pixel when enlarging, and the scale factor when reducing. Rows are resized first, then
//! columns, in f32; u8 images are rounded once at the end, where Pillow rounds after each pass.

use super::{
    crops::{crop, image_shape, image_spec},
    tensor::{Spares, TensorSpec},
    transform::{SampleRandom, Transform},
};
use lockstep_tensor::{NamedTensor, TensorData};

/// Size of a resized image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resize {
    /// This height and width, in pixels.
    Exact {
        /// Height in pixels.
        height: usize,
        /// Width in pixels.
        width: usize,
    },
    /// This many pixels on the shorter side, the longer one in proportion, rounded down.
    ShorterSide(usize),
}

impl Resize {
    fn size(self, height: usize, width: usize) -> [usize; 2] {
        let scaled = |long: usize, short: usize, size: usize| (long * size / short.max(1)).max(1);
        match self {
            Self::Exact { height, width } => [height, width],
            Self::ShorterSide(size) if height <= width => [size, scaled(width, height, size)],
            Self::ShorterSide(size) => [scaled(height, width, size), size],
        }
    }

    fn check(self) -> Result<(), String> {
        let is_empty = match self {
            Self::Exact { height, width } => height == 0 || width == 0,
            Self::ShorterSide(size) => size == 0,
        };
        if is_empty {
            Err("it has no pixel; allowed: 1 or more in each direction".to_owned())
        } else {
            Ok(())
        }
    }
}

impl Transform for Resize {
    fn output(&self, input: &TensorSpec) -> Result<TensorSpec, String> {
        self.check()?;
        image_spec(input, |height, width| match (self, height, width) {
            (Self::Exact { height, width }, ..) => [Some(*height), Some(*width)],
            (_, Some(height), Some(width)) => self.size(height, width).map(Some),
            (Self::ShorterSide(_), ..) => [None, None],
        })
    }

    fn apply(&self, tensor: &mut NamedTensor, _: SampleRandom, spares: &mut Spares) -> Result<(), String> {
        let [height, width, _] = image_shape(tensor)?;
        resize(tensor, self.size(height, width), spares)
    }
}

/// Crop of a random area and aspect ratio, resized: the usual augmentation of ImageNet.
///
/// The area is 8 % to 100 % of the image's, the aspect ratio 3/4 to 4/3 (uniform in its logarithm). After ten choices
/// that do not fit into the image, the center is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomResizedCrop {
    /// Height of the result, in pixels.
    pub height: usize,
    /// Width of the result, in pixels.
    pub width: usize,
}

/// Fractions of the area, and aspect ratios, of torchvision.
const AREA: (f64, f64) = (0.08, 1.0);
const ASPECT: (f64, f64) = (3.0 / 4.0, 4.0 / 3.0);
const ATTEMPTS: u16 = 10;

impl RandomResizedCrop {
    /// Returns top, left, height and width of the crop.
    fn region(random: SampleRandom, height: usize, width: usize) -> [usize; 4] {
        let area = (height * width) as f64;
        for attempt in 0..ATTEMPTS {
            let draw = 4 * attempt;
            let target = area * (AREA.0 + (AREA.1 - AREA.0) * random.uniform(draw));
            // 16/9 = ASPECT.1 / ASPECT.0. Powers through `libm` have the same bits on every CPU.
            let aspect = ASPECT.0 * libm::pow(ASPECT.1 / ASPECT.0, random.uniform(draw + 1));
            let crop_width = (target * aspect).sqrt().round() as usize;
            let crop_height = (target / aspect).sqrt().round() as usize;
            if (1..=height).contains(&crop_height) && (1..=width).contains(&crop_width) {
                let top = random.below(draw + 2, height - crop_height + 1);
                let left = random.below(draw + 3, width - crop_width + 1);
                return [top, left, crop_height, crop_width];
            }
        }
        let aspect = width as f64 / height as f64;
        let (crop_height, crop_width) = if aspect < ASPECT.0 {
            (((width as f64 / ASPECT.0).round() as usize).clamp(1, height), width)
        } else if aspect > ASPECT.1 {
            (height, ((height as f64 * ASPECT.1).round() as usize).clamp(1, width))
        } else {
            (height, width)
        };
        [(height - crop_height) / 2, (width - crop_width) / 2, crop_height, crop_width]
    }
}

impl Transform for RandomResizedCrop {
    fn output(&self, input: &TensorSpec) -> Result<TensorSpec, String> {
        Resize::Exact { height: self.height, width: self.width }.output(input)
    }

    fn apply(
        &self,
        tensor: &mut NamedTensor,
        random: SampleRandom,
        spares: &mut Spares,
    ) -> Result<(), String> {
        let [height, width, _] = image_shape(tensor)?;
        if height * width == 0 {
            return Err("the image has no pixel".to_owned());
        }
        let [top, left, crop_height, crop_width] = Self::region(random, height, width);
        crop(tensor, [top as isize, left as isize], [crop_height, crop_width], spares)?;
        resize(tensor, [self.height, self.width], spares)
    }
}

/// Replaces an image by one of `size` pixels.
fn resize(tensor: &mut NamedTensor, size: [usize; 2], spares: &mut Spares) -> Result<(), String> {
    let [height, width, channels] = image_shape(tensor)?;
    if height * width * channels == 0 {
        return Err("the image has no pixel".to_owned());
    }
    let [out_height, out_width] = size;
    let rows = match &tensor.data {
        TensorData::U8(pixels) => {
            let mut floats = spares.f32();
            floats.extend(pixels.iter().map(|&value| f32::from(value)));
            let rows = resize_rows(&floats, width, channels, out_width, spares.f32());
            spares.give(TensorData::F32(floats));
            rows
        }
        TensorData::F32(pixels) => resize_rows(pixels, width, channels, out_width, spares.f32()),
        other => return Err(format!("its dtype is {}; allowed: u8, f32", other.dtype())),
    };
    let pixels = resize_columns(&rows, height, out_width * channels, out_height, spares.f32());
    spares.give(TensorData::F32(rows));
    let data = if matches!(tensor.data, TensorData::U8(_)) {
        let mut bytes = spares.u8();
        bytes.extend(pixels.iter().map(|&value| (value + 0.5) as u8));
        spares.give(TensorData::F32(pixels));
        TensorData::U8(bytes)
    } else {
        TensorData::F32(pixels)
    };
    spares.give(tensor.replace(&[out_height, out_width, channels], data));
    Ok(())
}

/// Weights of the input pixels `first..` for one output pixel; they sum to 1.
struct Weights {
    first: usize,
    values: Vec<f32>,
}

/// Computes the weights of output pixel `at`, in f64.
fn weights(at: usize, extent: usize, out_extent: usize, weights: &mut Weights) {
    let scale = extent as f64 / out_extent as f64;
    let support = scale.max(1.0);
    let center = (at as f64 + 0.5) * scale;
    let first = (center - support + 0.5).max(0.0) as usize;
    let last = ((center + support + 0.5) as usize).min(extent);
    let triangle = |i: usize| (1.0 - ((i as f64 + 0.5 - center) / support).abs()).max(0.0);
    let sum: f64 = (first..last).map(triangle).sum();
    weights.first = first;
    weights.values.clear();
    weights.values.extend((first..last).map(|i| (triangle(i) / sum) as f32));
}

/// Resizes `[rows, width, channels]` to `[rows, out_width, channels]` in `out`.
fn resize_rows(
    pixels: &[f32],
    width: usize,
    channels: usize,
    out_width: usize,
    mut out: Vec<f32>,
) -> Vec<f32> {
    let rows = pixels.len() / (width * channels);
    out.resize(rows * out_width * channels, 0.0);
    let mut weight = Weights { first: 0, values: Vec::new() };
    for x in 0..out_width {
        weights(x, width, out_width, &mut weight);
        for row in 0..rows {
            let source = &pixels[(row * width + weight.first) * channels..];
            let target = &mut out[(row * out_width + x) * channels..][..channels];
            for (pixel, &weight) in source.chunks_exact(channels).zip(&weight.values) {
                for (sum, &value) in target.iter_mut().zip(pixel) {
                    *sum += weight * value;
                }
            }
        }
    }
    out
}

/// Resizes `[height, row]` to `[out_height, row]` in `out`.
fn resize_columns(
    pixels: &[f32],
    height: usize,
    row: usize,
    out_height: usize,
    mut out: Vec<f32>,
) -> Vec<f32> {
    out.resize(out_height * row, 0.0);
    let mut weight = Weights { first: 0, values: Vec::new() };
    for (y, target) in out.chunks_exact_mut(row).enumerate() {
        weights(y, height, out_height, &mut weight);
        for (source, &weight) in pixels[weight.first * row..].chunks_exact(row).zip(&weight.values) {
            for (sum, &value) in target.iter_mut().zip(source) {
                *sum += weight * value;
            }
        }
    }
    out
}
