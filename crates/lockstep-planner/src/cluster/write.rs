//! Writes a cluster as a TOML file with every key, which reads back as the same cluster.

use std::fmt::Write;

use super::field::{DEVICE, EFFICIENCY, Field, LINK, NODE, Row};
use super::{Cluster, Joins};

impl Cluster {
    /// Returns the cluster as a TOML file, which [`Cluster::parse`] reads as the same cluster.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        line(&mut text, "name", quoted(&self.name));
        line(&mut text, "software", quoted(self.software.name()));
        if let Some(rate) = self.storage_gb_per_s {
            line(&mut text, "storage_gb_per_s", number(rate));
        }
        for kind in &self.nodes {
            text.push_str("\n[[node]]\n");
            write_table(&mut text, "node", &mut kind.clone(), NODE);
        }
        for link in &self.links {
            text.push_str("\n[[link]]\n");
            write_table(&mut text, "link", &mut link.clone(), LINK);
        }
        text
    }
}

/// Writes the keys of a table whose heading is written, and then the tables within it.
fn write_table<T>(text: &mut String, place: &str, table: &mut T, rows: &[Row<T>]) {
    for (key, field) in rows {
        if let Some(value) = field(table).written() {
            line(text, key, value);
        }
    }
    for (key, field) in rows {
        let place = format!("{place}.{key}");
        let mut heading = || text.push_str(&format!("\n[{place}]\n"));
        match field(table) {
            Field::Device(device) | Field::OptionalDevice(Some(device)) => {
                heading();
                write_table(text, &place, device, DEVICE);
            }
            Field::Efficiency(efficiency) => {
                heading();
                write_table(text, &place, efficiency, EFFICIENCY);
            }
            Field::Rates(rates) if !rates.is_empty() => {
                heading();
                rates.iter().for_each(|(name, rate)| line(text, &quoted(name), number(*rate)));
            }
            _ => {}
        }
    }
}

impl Field<'_> {
    /// Returns the value in TOML; `None` for a field without a value, or a table.
    fn written(self) -> Option<String> {
        Some(match self {
            Self::Text(text) => quoted(text),
            Self::OptionalText(text) => quoted(text.as_ref()?),
            Self::Flag(flag) => flag.to_string(),
            Self::Count(count) => count.to_string(),
            Self::OptionalCount(count) => (*count)?.to_string(),
            Self::Bytes(bytes) => size(*bytes),
            Self::Number(value, _) => number(*value),
            Self::OptionalNumber(value, _) | Self::OptionalShare(value) => number((*value)?),
            Self::Numbers(values) => format!("[{}]", values.map(number).join(", ")),
            Self::Joins(Joins::Node) => quoted("node"),
            Self::Joins(Joins::All) => quoted("all"),
            Self::Joins(Joins::Devices(devices)) => devices.to_string(),
            Self::Tile(None) => "false".to_owned(),
            Self::Tile(Some(tile)) => {
                format!("{{ rows = {}, columns = {}, units = {} }}", tile.rows, tile.columns, tile.units)
            }
            Self::Peaks(peaks) => {
                let peak = |(dtype, peak): (&_, &f64)| format!("{dtype} = {}", number(*peak));
                format!("{{ {} }}", peaks.iter().map(peak).collect::<Vec<String>>().join(", "))
            }
            Self::Device(_) | Self::OptionalDevice(_) | Self::Efficiency(_) | Self::Rates(_) => return None,
        })
    }
}

fn line(text: &mut String, key: &str, value: String) {
    // Writing to a `String` cannot fail.
    let _ = writeln!(text, "{key} = {value}");
}

/// Quotes a text or key on one line.
fn quoted(text: &str) -> String {
    let mut line = String::from('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => line.extend(['\\', character]),
            control if control.is_control() => line.push_str(&format!("\\u{:04x}", control as u32)),
            other => line.push(other),
        }
    }
    line.push('"');
    line
}

/// Formats a float with a decimal point, so that strict TOML readers take it for one, and with all digits that matter.
fn number(number: f64) -> String {
    format!("{number:?}")
}

/// Formats bytes in the largest unit of which they are a whole number, if that is MiB or more.
fn size(bytes: u64) -> String {
    for (unit, name) in [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")] {
        if bytes > 0 && bytes.is_multiple_of(unit) {
            return format!("\"{}{name}\"", bytes / unit);
        }
    }
    bytes.to_string()
}
