//! Numbers the way people read them: `1.2M`, `3.4 GiB`, `1m 20s`.
//!
//! Three digits say enough; whoever needs more reads `metrics.jsonl`.

/// A count with a decimal suffix: `950`, `39.7k`, `1.2M`, `124M`.
pub fn count(number: f64) -> String {
    scaled(number, 1000.0, &["", "k", "M", "G", "T", "P"])
}

/// A number of things: `1 thread`, `4 micro-batches`.
pub fn plural(number: usize, thing: &str) -> String {
    let ending = match thing {
        _ if number == 1 => "",
        thing if thing.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{number} {thing}{ending}")
}

/// A size in binary units: `512 B`, `1.5 KiB`, `3.4 GiB`.
pub fn bytes(number: u64) -> String {
    scaled(number as f64, 1024.0, &[" B", " KiB", " MiB", " GiB", " TiB", " PiB"])
}

/// A length of time with its two leading units: `4.2s`, `42s`, `1m 20s`, `2h 05m`, `3d 04h`.
pub fn seconds(number: f64) -> String {
    if !number.is_finite() || number < 0.0 {
        return "?".to_owned();
    }
    // 9.95 would print as 10.0.
    if number < 9.95 {
        return format!("{number:.1}s");
    }
    let whole = number.round() as u64;
    let (minutes, hours) = (whole / 60, whole / 3600);
    match whole {
        0..60 => format!("{whole}s"),
        60..3600 => format!("{minutes}m {:02}s", whole % 60),
        3600..86_400 => format!("{hours}h {:02}m", minutes % 60),
        _ => format!("{}d {:02}h", hours / 24, hours % 24),
    }
}

/// `number` in the largest unit in which it is 1 or more, with one decimal below 100.
fn scaled(number: f64, base: f64, units: &[&str]) -> String {
    if !number.is_finite() {
        return format!("{number}{}", units[0]);
    }
    if number.abs().round() < base {
        return format!("{number:.0}{}", units[0]);
    }
    let mut value = number;
    let mut unit = 0;
    // Rounding decides too: 999,950 is 1.0M, not 1000k.
    while unit + 1 < units.len() && value.abs().round() >= base {
        value /= base;
        unit += 1;
    }
    let decimals = if value.abs() < 99.95 { 1 } else { 0 };
    format!("{value:.decimals$}{}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_singular() {
        assert_eq!(plural(1, "micro-batch"), "1 micro-batch");
        assert_eq!(plural(2, "micro-batch"), "2 micro-batches");
        assert_eq!(plural(0, "thread"), "0 threads");
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
            assert_eq!(count(number), text, "for {number}");
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
            assert_eq!(bytes(number), text, "for {number}");
        }
        assert_eq!(bytes(u64::MAX), "16384 PiB");
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
            assert_eq!(seconds(number), text, "for {number}");
        }
    }
}
