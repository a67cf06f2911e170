//! Decodes JPEG images, and refuses baseline ones whose data end before the size in their header.
//!
//! `zune-jpeg`, as most decoders, takes data that end early for black or gray pixels. So bits that are no Huffman code
//! (sixteen ones, which the standard reserves) are put after the data of the scan: a decoder that reads on fails. A
//! sound image never reads them, and the search for the next marker skips them.

use zune_jpeg::{
    JpegDecoder,
    zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions},
};

/// First bytes of a JPEG image.
pub(crate) const JPEG_MAGIC: [u8; 2] = [0xFF, 0xD8];

/// Ones as they stand in a scan: eight bytes, enough for what a decoder reads ahead and for one code.
const NO_CODE: [u8; 16] = [0xFF, 0, 0xFF, 0, 0xFF, 0, 0xFF, 0, 0xFF, 0, 0xFF, 0, 0xFF, 0, 0xFF, 0];

/// Marker bytes of the format.
const BASELINE: [u8; 2] = [0xC0, 0xC1];
const START_OF_SCAN: u8 = 0xDA;
const RESTARTS: std::ops::RangeInclusive<u8> = 0xD0..=0xD7;

/// Decodes an image to `pixels` and returns `[height, width]`. `check_size` judges the size in the header.
pub(crate) fn decode_jpeg(
    bytes: &[u8],
    is_gray: bool,
    check_size: impl Fn(u64, u64) -> Result<(), String>,
    pixels: &mut Vec<u8>,
) -> Result<[usize; 2], String> {
    let damaged = |error: &dyn std::fmt::Debug| format!("it is not a complete JPEG image: {error:?}");
    let options = DecoderOptions::default()
        .set_strict_mode(true)
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX))
        .jpeg_set_out_colorspace(if is_gray { ColorSpace::Luma } else { ColorSpace::RGB });
    let guarded = guard_scan(bytes);
    let bytes = guarded.as_deref().unwrap_or(bytes);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(|error| damaged(&error))?;
    let (width, height) = decoder.dimensions().ok_or("its header has no size")?;
    check_size(width as u64, height as u64)?;
    // The first scan has a bit or more for each 8 × 8 block. So a header cannot cause a large allocation by itself.
    if (width * height) as u64 / 64 > 8 * bytes.len() as u64 {
        return Err(format!(
            "its header says {width} × {height} pixels, too many for its {} bytes",
            bytes.len()
        ));
    }
    let size = decoder.output_buffer_size().ok_or("its header has no size")?;
    pixels.clear();
    pixels.resize(size, 0);
    decoder.decode_into(pixels).map_err(|error| damaged(&error))?;
    Ok([height, width])
}

/// Returns a baseline image with [`NO_CODE`] after its only scan. `None` for images of other kinds, which are decoded as
/// they are: progressive ones, in which the decoder finds the end of a scan by reading ahead, and baseline ones in
/// several scans.
fn guard_scan(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut components = None;
    let mut at = JPEG_MAGIC.len();
    loop {
        let [0xFF, marker] = *bytes.get(at..at + 2)? else { return None };
        if marker == 0xFF {
            at += 1;
            continue;
        }
        let length = usize::from(u16::from_be_bytes([*bytes.get(at + 2)?, *bytes.get(at + 3)?]));
        let segment = bytes.get(at + 4..at + 2 + length)?;
        at += 2 + length;
        if BASELINE.contains(&marker) {
            components = segment.get(5).copied();
        } else if marker == START_OF_SCAN {
            if components != segment.first().copied() {
                return None;
            }
            let (head, rest) = bytes.split_at_checked(at + scan_bytes(bytes.get(at..)?)?)?;
            return Some([head, &NO_CODE, rest].concat());
        }
    }
}

/// Returns the length of the data of a scan: the offset of the first marker that is no restart.
fn scan_bytes(data: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        at += data[at..].iter().position(|&byte| byte == 0xFF)?;
        match *data.get(at + 1)? {
            0 => at += 2,
            marker if RESTARTS.contains(&marker) => at += 2,
            // A fill byte before a marker.
            0xFF => at += 1,
            _ => return Some(at),
        }
    }
}
