//! Transforms that move pixels: random crop with padding, center crop, horizontal flip. All take u8 or f32 images
//! `[height, width, channels]`.

use lockstep_plan::DType;
use lockstep_tensor::{NamedTensor, TensorData};

use super::{
    tensor::{Spares, TensorSpec},
    transform::{SampleRandom, Transform},
};

/// Height, width and channels of an image tensor.
pub(crate) fn image_shape(tensor: &NamedTensor) -> Result<[usize; 3], String> {
    let [height, width, channels] = tensor.shape[..] else {
        return Err(format!("its shape is {:?}; allowed: [height, width, channels]", tensor.shape));
    };
    Ok([height, width, channels])
}

/// Checks that a specification is an image of u8 or f32, and returns it with another height and width.
pub(crate) fn image_spec(
    input: &TensorSpec,
    size: impl FnOnce(Option<usize>, Option<usize>) -> [Option<usize>; 2],
) -> Result<TensorSpec, String> {
    let [height, width, channels] = input.shape[..] else {
        return Err(format!("it has {} dimensions; allowed: [height, width, channels]", input.shape.len()));
    };
    if !matches!(input.dtype, DType::U8 | DType::F32) {
        return Err(format!("its dtype is {}; allowed: u8, f32", input.dtype));
    }
    let [height, width] = size(height, width);
    Ok(TensorSpec { shape: vec![height, width, channels], ..input.clone() })
}

/// Crop at a random position, after the image has been padded with zeros on every side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomCrop {
    /// Height of the crop, in pixels.
    pub height: usize,
    /// Width of the crop, in pixels.
    pub width: usize,
    /// Pixels of padding on each side.
    pub padding: usize,
}

impl Transform for RandomCrop {
    fn output(&self, input: &TensorSpec) -> Result<TensorSpec, String> {
        image_spec(input, |_, _| [Some(self.height), Some(self.width)])
    }

    fn apply(
        &self,
        tensor: &mut NamedTensor,
        random: SampleRandom,
        spares: &mut Spares,
    ) -> Result<(), String> {
        let [height, width, _] = image_shape(tensor)?;
        let free = |extent: usize, crop: usize| (extent + 2 * self.padding).checked_sub(crop);
        let (Some(rows), Some(columns)) = (free(height, self.height), free(width, self.width)) else {
            return Err(format!(
                "the image has {height} × {width} pixels and {} of padding, fewer than the crop of {} × {}",
                self.padding, self.height, self.width
            ));
        };
        let top = random.below(0, rows + 1) as isize - self.padding as isize;
        let left = random.below(1, columns + 1) as isize - self.padding as isize;
        crop(tensor, [top, left], [self.height, self.width], spares)
    }
}

/// Crop of the center, as torchvision's: an odd remainder rounds half to even, and a smaller image is padded with zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CenterCrop {
    /// Height of the crop, in pixels.
    pub height: usize,
    /// Width of the crop, in pixels.
    pub width: usize,
}

impl Transform for CenterCrop {
    fn output(&self, input: &TensorSpec) -> Result<TensorSpec, String> {
        image_spec(input, |_, _| [Some(self.height), Some(self.width)])
    }

    fn apply(&self, tensor: &mut NamedTensor, _: SampleRandom, spares: &mut Spares) -> Result<(), String> {
        let [height, width, _] = image_shape(tensor)?;
        crop(
            tensor,
            [margin(height, self.height), margin(width, self.width)],
            [self.height, self.width],
            spares,
        )
    }
}

/// Returns where a centered crop begins; negative within the padding.
fn margin(extent: usize, crop: usize) -> isize {
    if extent >= crop {
        // Python's round: half to even.
        ((extent - crop) as f64 / 2.0).round_ties_even() as isize
    } else {
        -(((crop - extent) / 2) as isize)
    }
}

/// Mirror image with probability one half.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RandomHorizontalFlip;

impl Transform for RandomHorizontalFlip {
    fn output(&self, input: &TensorSpec) -> Result<TensorSpec, String> {
        image_spec(input, |height, width| [height, width])
    }

    fn apply(&self, tensor: &mut NamedTensor, random: SampleRandom, _: &mut Spares) -> Result<(), String> {
        let [_, width, channels] = image_shape(tensor)?;
        if random.uniform(0) < 0.5 {
            match &mut tensor.data {
                TensorData::U8(pixels) => flip(pixels, width, channels),
                TensorData::F32(pixels) => flip(pixels, width, channels),
                other => return Err(format!("its dtype is {}; allowed: u8, f32", other.dtype())),
            }
        }
        Ok(())
    }
}

fn flip<T>(pixels: &mut [T], width: usize, channels: usize) {
    if channels == 0 || width == 0 {
        return;
    }
    for row in pixels.chunks_exact_mut(width * channels) {
        for left in 0..width / 2 {
            let right = width - 1 - left;
            let (before, after) = row.split_at_mut(right * channels);
            before[left * channels..][..channels].swap_with_slice(&mut after[..channels]);
        }
    }
}

/// Replaces an image by `size` pixels of it from `[top, left]` on; zeros where there is no pixel.
pub(crate) fn crop(
    tensor: &mut NamedTensor,
    start: [isize; 2],
    size: [usize; 2],
    spares: &mut Spares,
) -> Result<(), String> {
    let shape = image_shape(tensor)?;
    let data = match &tensor.data {
        TensorData::U8(pixels) => {
            let mut out = spares.u8();
            crop_into(pixels, shape, start, size, &mut out);
            TensorData::U8(out)
        }
        TensorData::F32(pixels) => {
            let mut out = spares.f32();
            crop_into(pixels, shape, start, size, &mut out);
            TensorData::F32(out)
        }
        other => return Err(format!("its dtype is {}; allowed: u8, f32", other.dtype())),
    };
    spares.give(tensor.replace(&[size[0], size[1], shape[2]], data));
    Ok(())
}

fn crop_into<T: Copy + Default>(
    pixels: &[T],
    [height, width, channels]: [usize; 3],
    [top, left]: [isize; 2],
    [out_height, out_width]: [usize; 2],
    out: &mut Vec<T>,
) {
    out.resize(out_height * out_width * channels, T::default());
    // Columns of the output that lie within the image.
    let first = (-left).clamp(0, out_width as isize);
    let last = (width as isize - left).clamp(first, out_width as isize);
    let (first, last, from) = (first as usize, last as usize, (left + first) as usize);
    if first == last || channels == 0 {
        return;
    }
    for (row, line) in out.chunks_exact_mut(out_width * channels).enumerate() {
        let source = top + row as isize;
        if (0..height as isize).contains(&source) {
            let start = (source as usize * width + from) * channels;
            let count = (last - first) * channels;
            line[first * channels..last * channels].copy_from_slice(&pixels[start..start + count]);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::samples::sequence::SamplePlace;

    fn random(sample: u64) -> SampleRandom {
        SampleRandom::new(3, SamplePlace { sample, epoch: 0, index: 0 }, 0)
    }

    /// An image whose pixels are all different and none zero.
    fn image([height, width, channels]: [usize; 3]) -> NamedTensor {
        let pixels = (1..=height * width * channels).map(|i| i as f32).collect();
        NamedTensor::new("image", &[height, width, channels], TensorData::F32(pixels))
    }

    /// The pixel at a position, and zero outside.
    fn pixel(image: &NamedTensor, y: isize, x: isize, c: usize) -> f32 {
        let [height, width, channels] = image.shape[..] else { panic!() };
        if y < 0 || x < 0 || y >= height as isize || x >= width as isize {
            return 0.0;
        }
        image.data.as_f32().unwrap()[(y as usize * width + x as usize) * channels + c]
    }

    proptest! {
        #[test]
        fn a_crop_is_the_pixels_at_its_offset(
            height in 1_usize..7, width in 1_usize..7, channels in 1_usize..4, top in -9_isize..9, left in -9_isize..9,
            out_height in 1_usize..7, out_width in 1_usize..7
        ) {
            let before = image([height, width, channels]);
            let mut after = before.clone();
            crop(&mut after, [top, left], [out_height, out_width], &mut Spares::default()).unwrap();
            prop_assert_eq!(&after.shape, &[out_height, out_width, channels]);
            for y in 0..out_height as isize {
                for x in 0..out_width as isize {
                    for c in 0..channels {
                        prop_assert_eq!(pixel(&after, y, x, c), pixel(&before, top + y, left + x, c));
                    }
                }
            }
        }

        #[test]
        fn a_flip_mirrors_each_row(height in 1_usize..5, width in 1_usize..6, channels in 1_usize..4) {
            let before = image([height, width, channels]);
            let mut after = before.clone();
            let TensorData::F32(pixels) = &mut after.data else { panic!() };
            flip(pixels, width, channels);
            for y in 0..height as isize {
                for x in 0..width as isize {
                    for c in 0..channels {
                        prop_assert_eq!(pixel(&after, y, x, c), pixel(&before, y, width as isize - 1 - x, c));
                    }
                }
            }
        }

        /// The random crop of an image padded by `padding` is a crop at one of the allowed offsets.
        #[test]
        fn a_random_crop_stays_within_the_padding(
            height in 1_usize..7, width in 1_usize..7, padding in 0_usize..4, sample: u64
        ) {
            let before = image([height, width, 1]);
            let mut after = before.clone();
            let crop_size = RandomCrop { height, width, padding };
            crop_size.apply(&mut after, random(sample), &mut Spares::default()).unwrap();
            let offsets = -(padding as isize)..=padding as isize;
            let found = offsets.clone().any(|top| offsets.clone().any(|left| {
                let mut expected = before.clone();
                crop(&mut expected, [top, left], [height, width], &mut Spares::default()).unwrap();
                expected == after
            }));
            prop_assert!(found, "{:?}", after);
        }
    }

    #[test]
    fn every_offset_and_both_mirror_images_occur() {
        let mut crops = std::collections::HashSet::new();
        let mut flips = 0;
        for sample in 0..400 {
            let mut tensor = image([4, 4, 1]);
            RandomCrop { height: 4, width: 4, padding: 1 }
                .apply(&mut tensor, random(sample), &mut Spares::default())
                .unwrap();
            crops.insert(format!("{:?}", tensor.data));
            let mut tensor = image([2, 2, 1]);
            RandomHorizontalFlip.apply(&mut tensor, random(sample), &mut Spares::default()).unwrap();
            flips += usize::from(tensor != image([2, 2, 1]));
        }
        assert_eq!(crops.len(), 9);
        assert!((160..240).contains(&flips), "{flips}");
    }

    #[test]
    fn a_center_crop_begins_where_torchvisions_does() {
        for (extent, size, expected) in [(5, 2, 2), (7, 2, 2), (4, 2, 1), (3, 3, 0), (2, 5, -1), (2, 4, -1)] {
            assert_eq!(margin(extent, size), expected, "{size} of {extent}");
        }
    }

    #[test]
    fn an_image_smaller_than_its_crop_is_refused() {
        let crop = RandomCrop { height: 9, width: 2, padding: 1 };
        let problem = crop.apply(&mut image([4, 4, 1]), random(0), &mut Spares::default()).unwrap_err();
        assert!(problem.contains("4 × 4 pixels and 1 of padding, fewer than the crop of 9 × 2"), "{problem}");
        let label = TensorSpec::fixed("label", DType::I32, &[]);
        assert!(crop.output(&label).unwrap_err().contains("0 dimensions"));
    }
}
