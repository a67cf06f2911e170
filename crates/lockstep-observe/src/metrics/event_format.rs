//! The bytes of a TensorBoard event file: protobuf messages, each framed as a TFRecord.
//!
//! ```text
//! record: length u64 | masked CRC-32C of the length u32 | Event | masked CRC-32C of the Event u32
//! Event:  1 wall_time double | 2 step int64 | 3 file_version string | 5 Summary | 7 SessionLog
//! Summary: 1 Value* ; Value: 1 tag string | 2 simple_value float ; SessionLog: 1 status (1 = START)
//! ```
//!
//! Field numbers are those of TensorFlow's `event.proto` and `summary.proto`, the framing that of its `record_writer`.
//! All integers are little-endian.

/// Content of an event.
#[derive(Debug, Clone, Copy)]
pub(super) enum Event<'a> {
    /// Version of the format; the first event of a file.
    FileVersion,
    /// Start of a process; it invalidates the entries of earlier files from `step` on.
    SessionStart {
        /// First step that this process runs.
        step: u64,
    },
    /// Scalars of a step; `values` are messages made by [`push_scalar`].
    Scalars {
        /// Step of the scalars.
        step: u64,
        /// Body of the Summary message.
        values: &'a [u8],
    },
}

/// Appends an event, framed, to `out`. `wall_time` is in seconds since 1970.
pub(super) fn push_event(out: &mut Vec<u8>, wall_time: f64, event: Event<'_>) {
    let frame = out.len();
    out.extend([0; FRAME_START]);
    let start = out.len();
    push_tag(out, 1, Wire::Fixed64);
    out.extend(wall_time.to_le_bytes());
    match event {
        Event::FileVersion => push_bytes(out, 3, b"brain.Event:2"),
        Event::SessionStart { step } => {
            push_integer(out, 2, step);
            push_bytes(out, 7, &[0x08, 1]);
        }
        Event::Scalars { step, values } => {
            push_integer(out, 2, step);
            push_bytes(out, 5, values);
        }
    }
    let length = ((out.len() - start) as u64).to_le_bytes();
    let body = masked_crc(&out[start..]);
    out[frame..frame + 8].copy_from_slice(&length);
    out[frame + 8..start].copy_from_slice(&masked_crc(&length).to_le_bytes());
    out.extend(body.to_le_bytes());
}

/// Appends a Value to the body of a Summary.
pub(super) fn push_scalar(summary: &mut Vec<u8>, tag: &str, value: f32) {
    // One byte for each of two tags, the length-prefixed string and a float.
    let length = 1 + varint_bytes(tag.len() as u64) + tag.len() + 1 + size_of::<f32>();
    push_tag(summary, 1, Wire::Bytes);
    push_varint(summary, length as u64);
    push_bytes(summary, 1, tag.as_bytes());
    push_tag(summary, 2, Wire::Fixed32);
    summary.extend(value.to_le_bytes());
}

/// Bytes of a record before its message.
const FRAME_START: usize = 12;

/// Protobuf's wire types.
#[derive(Clone, Copy)]
enum Wire {
    Varint = 0,
    Fixed64 = 1,
    Bytes = 2,
    Fixed32 = 5,
}

fn push_tag(out: &mut Vec<u8>, field: u8, wire: Wire) {
    out.push(field << 3 | wire as u8);
}

fn push_integer(out: &mut Vec<u8>, field: u8, value: u64) {
    push_tag(out, field, Wire::Varint);
    push_varint(out, value);
}

fn push_bytes(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    push_tag(out, field, Wire::Bytes);
    push_varint(out, bytes.len() as u64);
    out.extend(bytes);
}

fn push_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn varint_bytes(value: u64) -> usize {
    (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
}

/// Returns the CRC-32C, rotated and offset, so that the CRC of data that contains CRCs stays effective.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crc_is_that_of_rfc_3720() {
        let ascending: Vec<u8> = (0..32).collect();
        let cases: [(&[u8], u32); 4] = [
            (b"123456789", 0xe306_9283),
            (&[0; 32], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&ascending, 0x46dd_794e),
        ];
        for (bytes, crc) in cases {
            assert_eq!(crc32c::crc32c(bytes), crc, "of {bytes:?}");
        }
    }

    #[test]
    fn an_event_is_the_bytes_that_tensorflow_writes() {
        let mut values = Vec::new();
        push_scalar(&mut values, "loss", 1.5);
        let mut out = Vec::new();
        push_event(&mut out, 2.0, Event::Scalars { step: 300, values: &values });
        let message = [
            &[0x09][..],
            &2.0_f64.to_le_bytes(),
            &[0x10, 0xac, 0x02],
            &[0x2a, 13, 0x0a, 11, 0x0a, 4],
            b"loss",
            &[0x15],
            &1.5_f32.to_le_bytes(),
        ]
        .concat();
        assert_eq!(out[..8], (message.len() as u64).to_le_bytes());
        assert_eq!(out[8..12], masked_crc(&out[..8]).to_le_bytes());
        assert_eq!(out[12..out.len() - 4], message);
        assert_eq!(out[out.len() - 4..], masked_crc(&message).to_le_bytes());
    }

    #[test]
    fn lengths_of_varints_are_known_before_they_are_written() {
        for value in [0, 1, 127, 128, 16_383, 16_384, u64::MAX] {
            let mut out = Vec::new();
            push_varint(&mut out, value);
            assert_eq!(out.len(), varint_bytes(value), "{value}");
        }
    }
}
