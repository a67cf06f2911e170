//! Numbers for readers: `1.2M`, `3.4 GiB`, `1m 20s`; and sizes that they write.
//!
//! Three digits are enough here; `metrics.jsonl` has the exact values.

use std::fmt;

/// A number that formats itself for readers without allocating.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Human<'t> {
    number: f64,
    form: Form<'t>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Form<'t> {
    Things(&'t str),
    Seconds,
    Scaled { base: f64, units: [&'t str; 6] },
}

/// Formats a count with a decimal suffix: `950`, `39.7k`, `1.2M`, `124M`.
pub fn count(number: f64) -> Human<'static> {
    Human { number, form: Form::Scaled { base: 1000.0, units: ["", "k", "M", "G", "T", "P"] } }
}

/// Formats a number that precedes a unit, with the unit's prefix: `290 G` of `290 GFLOP/s`.
pub fn count_of(number: f64) -> Human<'static> {
    Human { number, form: Form::Scaled { base: 1000.0, units: [" ", " k", " M", " G", " T", " P"] } }
}

/// Formats an integer with thousands separators: `4,194,304`.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a number of parameters or tokens: `124M`, `8.0B`, `1.0T`.
pub fn billions(number: f64) -> Human<'static> {
    Human { number, form: Form::Scaled { base: 1000.0, units: ["", "K", "M", "B", "T", "Q"] } }
}

/// Formats a ratio as a relative change with its sign, `+12.3 %`; without a sign if it rounds to zero.
pub fn change(ratio: f64) -> String {
    let percent = (ratio - 1.0) * 100.0;
    if percent.abs() < 0.05 { "0.0 %".to_owned() } else { format!("{percent:+.1} %") }
}

/// Formats a number of things: `1 thread`, `4 micro-batches`.
pub fn plural(number: usize, thing: &str) -> Human<'_> {
    Human { number: number as f64, form: Form::Things(thing) }
}

/// Formats a size in binary units: `512 B`, `1.5 KiB`, `3.4 GiB`.
pub fn bytes(number: u64) -> Human<'static> {
    let units = [" B", " KiB", " MiB", " GiB", " TiB", " PiB"];
    Human { number: number as f64, form: Form::Scaled { base: 1024.0, units } }
}

/// Units of sizes, in bytes.
const UNITS: [(&str, u64); 12] = [
    ("B", 1),
    ("kB", 1000),
    ("KB", 1000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("PB", 1_000_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("PiB", 1 << 50),
];

/// Reads a size such as `80GiB`, `1.5 TB` or `4096`, in bytes; `None` if it is no size, or does not fit an `i64`.
pub fn read_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim() {
        "" => 1,
        unit => UNITS.iter().find(|(name, _)| *name == unit)?.1,
    };
    // Whole numbers are read exactly, however large.
    if let Ok(number) = number.parse::<u64>() {
        return number.checked_mul(factor).filter(|&bytes| i64::try_from(bytes).is_ok());
    }
    whole_bytes(number.parse().ok()?, factor)
}

/// Rounds a number of units of `factor` bytes to whole bytes; `None` if it is negative or does not fit an `i64`.
pub fn whole_bytes(number: f64, factor: u64) -> Option<u64> {
    let bytes = number * factor as f64;
    (bytes >= 0.0 && bytes < i64::MAX as f64).then(|| bytes.round() as u64)
}

/// Formats a duration given in milliseconds: `12.3 ms` below a second, then as [`seconds`].
pub fn milliseconds(number: f64) -> String {
    if number.abs() < 1000.0 { format!("{number:.1} ms") } else { seconds(number / 1e3).to_string() }
}

/// Formats a step time with enough digits to distinguish plans: `12.3 ms`, `1.23 s`, `25.6 s`, from 100 s on as [`seconds`].
pub fn step_time(ms: f64) -> String {
    match ms.abs() {
        1000.0..9995.0 => format!("{:.2} s", ms / 1e3),
        9995.0..99_950.0 => format!("{:.1} s", ms / 1e3),
        _ => milliseconds(ms),
    }
}

/// Formats a duration with its two leading units: `4.2s`, `42s`, `1m 20s`, `2h 05m`, `3d 04h`.
pub fn seconds(number: f64) -> Human<'static> {
    Human { number, form: Form::Seconds }
}

impl fmt::Display for Human<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.form {
            Form::Things(thing) => {
                let ending = match *thing {
                    _ if self.number == 1.0 => "",
                    thing if thing.ends_with("ch") => "es",
                    _ => "s",
                };
                write!(f, "{} {thing}{ending}", thousands(self.number as u64))
            }
            Form::Seconds => write_seconds(f, self.number),
            Form::Scaled { base, units } => write_scaled(f, self.number, *base, units),
        }
    }
}

fn write_seconds(f: &mut fmt::Formatter<'_>, number: f64) -> fmt::Result {
    if !number.is_finite() || number < 0.0 {
        return f.write_str("?");
    }
    // 9.95 would print as 10.0.
    if number < 9.95 {
        return write!(f, "{number:.1}s");
    }
    let whole = number.round() as u64;
    let (minutes, hours) = (whole / 60, whole / 3600);
    match whole {
        0..60 => write!(f, "{whole}s"),
        60..3600 => write!(f, "{minutes}m {:02}s", whole % 60),
        3600..86_400 => write!(f, "{hours}h {:02}m", minutes % 60),
        _ => write!(f, "{}d {:02}h", hours / 24, hours % 24),
    }
}

/// Writes `number` in the largest unit in which it is 1 or more, with one decimal below 100.
fn write_scaled(f: &mut fmt::Formatter<'_>, number: f64, base: f64, units: &[&str]) -> fmt::Result {
    if !number.is_finite() {
        return write!(f, "{number}{}", units[0]);
    }
    if number.abs().round() < base {
        return write!(f, "{number:.0}{}", units[0]);
    }
    let mut value = number;
    let mut unit = 0;
    // Rounding decides too: 999,950 is 1.0M, not 1000k.
    while unit + 1 < units.len() && value.abs().round() >= base {
        value /= base;
        unit += 1;
    }
    let decimals = if value.abs() < 99.95 { 1 } else { 0 };
    write!(f, "{value:.decimals$}{}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_singular() {
        assert_eq!(plural(1, "micro-batch").to_string(), "1 micro-batch");
        assert_eq!(plural(2, "micro-batch").to_string(), "2 micro-batches");
        assert_eq!(plural(0, "thread").to_string(), "0 threads");
    }

    #[test]
    fn counts_keep_three_digits_and_round_up_into_the_next_unit() {
        let cases = [
            (0.0, "0"),
            (999.4, "999"),
            (999.6, "1.0k"),
            (1000.0, "1.0k"),
            (39_702.0, "39.7k"),
            (99_960.0, "100k"),
            (999_400.0, "999k"),
            (999_960.0, "1.0M"),
            (1_240_000.0, "1.2M"),
            (124_439_808.0, "124M"),
            (1.2e11, "120G"),
            (7.5e18, "7500P"),
            (f64::NAN, "NaN"),
        ];
        for (number, text) in cases {
            assert_eq!(count(number).to_string(), text, "for {number}");
        }
    }

    #[test]
    fn thousands_are_separated() {
        let table = [(0, "0"), (999, "999"), (1000, "1,000"), (4_194_304, "4,194,304"), (12_345, "12,345")];
        for (number, text) in table {
            assert_eq!(thousands(number), text);
        }
    }

    #[test]
    fn a_change_of_nothing_has_no_sign() {
        let table =
            [(1.0, "0.0 %"), (0.9999, "0.0 %"), (1.0004, "0.0 %"), (1.25, "+25.0 %"), (0.5, "-50.0 %")];
        for (ratio, text) in table {
            assert_eq!(change(ratio), text);
        }
    }

    #[test]
    fn sizes_are_binary() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (1_048_575, "1.0 MiB"),
            (432_013_312, "412 MiB"),
            (3_650_722_202, "3.4 GiB"),
        ];
        for (number, text) in cases {
            assert_eq!(bytes(number).to_string(), text, "for {number}");
        }
        assert_eq!(bytes(u64::MAX).to_string(), "16384 PiB");
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("80GiB", 80 << 30),
            ("1.5 TiB", 3 << 39),
            ("512MB", 512_000_000),
            (" 7 ", 7),
            ("0", 0),
            ("0.5kB", 500),
            ("9007199254740993B", 9_007_199_254_740_993),
        ] {
            assert_eq!(read_bytes(text), Some(bytes), "{text}");
        }
        for text in ["", "GiB", "-3", "3 gigs", "1e5", "1.2.3", ".", "99999999999PiB", "NaN", "4GIB"] {
            assert_eq!(read_bytes(text), None, "{text}");
        }
    }

    #[test]
    fn times_of_steps_have_the_digits_that_tell_them_apart() {
        let times = [0.25, 999.4, 5794.2, 5932.0, 12_345.0, 123_456.0].map(step_time);
        assert_eq!(times, ["0.2 ms", "999.4 ms", "5.79 s", "5.93 s", "12.3 s", "2m 03s"]);
    }

    #[test]
    fn times_show_two_units() {
        let cases = [
            (0.0, "0.0s"),
            (4.25, "4.2s"),
            (9.96, "10s"),
            (59.4, "59s"),
            (59.6, "1m 00s"),
            (80.0, "1m 20s"),
            (3599.6, "1h 00m"),
            (7500.0, "2h 05m"),
            (273_600.0, "3d 04h"),
            (-1.0, "?"),
            (f64::INFINITY, "?"),
        ];
        for (number, text) in cases {
            assert_eq!(seconds(number).to_string(), text, "for {number}");
        }
    }
}
