//! Decodes image files to bytes `[height, width, channels]`.
//!
//! The contents decide the format, not the extension. JPEG goes to `zune-jpeg` in its strict mode, all other formats to
//! the `image` crate, which would fill the rest of a truncated JPEG with gray. Both are pure Rust.

use std::io::Cursor;

use image::{DynamicImage, ImageFormat, ImageReader, Limits};

use super::jpeg::{JPEG_MAGIC, decode_jpeg};
use crate::quiet;

/// Maximum number of pixels of an image: twice the bound at which Pillow suspects a decompression bomb.
pub const MOST_PIXELS: u64 = 178_956_970;

/// Extensions of image files that are decoded, in lower case.
pub const IMAGE_EXTENSIONS: [&str; 10] =
    ["bmp", "jpeg", "jpg", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp"];

/// Maximum size that a decoder may allocate beside the image, in bytes.
const MOST_BYTES: u64 = 4 * MOST_PIXELS;

/// Channels that images are converted to. Transparency is dropped without blending, as by Pillow's `convert`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Channels {
    /// Red, green, blue; gray images repeat their value.
    #[default]
    Rgb,
    /// One channel of brightness.
    Gray,
}

impl Channels {
    /// Returns the number of channels.
    pub fn count(self) -> usize {
        match self {
            Self::Rgb => 3,
            Self::Gray => 1,
        }
    }
}

/// Decodes an image file of any of [`IMAGE_EXTENSIONS`]. Replaces the contents of `pixels` by its bytes, row-major, and
/// returns the shape `[height, width, channels]`. Values of more than 8 bits are reduced to 8; the orientation of Exif
/// is not applied.
///
/// # Errors
/// If the bytes are no complete image of these formats, or it has more than [`MOST_PIXELS`] pixels.
pub fn decode_image(bytes: &[u8], channels: Channels, pixels: &mut Vec<u8>) -> Result<[usize; 3], String> {
    // Decoders have panicked on damaged files before; a panic in one must not end a run that skips bad samples.
    let decoded = quiet::caught(|| {
        if bytes.starts_with(&JPEG_MAGIC) {
            decode_jpeg(bytes, channels == Channels::Gray, check_size, pixels)
        } else {
            decode_other(bytes, channels, pixels)
        }
    });
    let [height, width] = decoded.unwrap_or_else(|| Err("its contents contradict one another".to_owned()))?;
    let shape = [height, width, channels.count()];
    if pixels.len() != shape.iter().product::<usize>() {
        return Err(format!("it decodes to {} bytes where its header says {shape:?}", pixels.len()));
    }
    Ok(shape)
}

fn check_size(width: u64, height: u64) -> Result<(), String> {
    match width.checked_mul(height) {
        Some(1..=MOST_PIXELS) => Ok(()),
        _ => Err(format!("its header says {width} × {height} pixels; allowed: 1 to {MOST_PIXELS}")),
    }
}

fn decode_other(bytes: &[u8], channels: Channels, pixels: &mut Vec<u8>) -> Result<[usize; 2], String> {
    let mut reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format().map_err(|e| e.to_string())?;
    let known = [ImageFormat::Bmp, ImageFormat::Png, ImageFormat::Pnm, ImageFormat::Tiff, ImageFormat::WebP];
    if reader.format().is_none_or(|format| !known.contains(&format)) {
        return Err(format!("it is not an image; allowed: {}", IMAGE_EXTENSIONS.join(", ")));
    }
    let size = ImageReader::with_format(Cursor::new(bytes), reader.format().unwrap_or(ImageFormat::Png));
    let (width, height) = size.into_dimensions().map_err(|error| error.to_string())?;
    check_size(u64::from(width), u64::from(height))?;
    let mut limits = Limits::default();
    limits.max_alloc = Some(MOST_BYTES);
    reader.limits(limits);
    let image = reader.decode().map_err(|error| error.to_string())?;
    pixels.clear();
    match (image, channels) {
        (DynamicImage::ImageRgb8(image), Channels::Rgb) => pixels.extend_from_slice(image.as_raw()),
        (DynamicImage::ImageLuma8(image), Channels::Gray) => pixels.extend_from_slice(image.as_raw()),
        (image, Channels::Rgb) => pixels.extend_from_slice(image.into_rgb8().as_raw()),
        (image, Channels::Gray) => pixels.extend_from_slice(image.into_luma8().as_raw()),
    }
    Ok([height as usize, width as usize])
}
