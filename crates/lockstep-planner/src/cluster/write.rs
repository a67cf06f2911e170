//! Writes a cluster as a TOML file with every key, which reads back as the same cluster.

use std::fmt::Write;

use super::{Cluster, Device, Joins, Link, NodeKind};

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
            write_node(&mut text, kind);
        }
        for link in &self.links {
            write_link(&mut text, link);
        }
        text
    }
}

fn write_node(text: &mut String, kind: &NodeKind) {
    heading(text, "[[node]]");
    line(text, "count", kind.count);
    line(text, "devices", kind.devices);
    line(text, "host_memory", size(kind.host_memory_bytes));
    line(text, "host_gb_per_s", number(kind.host_gb_per_s));
    if let Some(rate) = kind.host_memory_gb_per_s {
        line(text, "host_memory_gb_per_s", number(rate));
    }
    line(text, "disk", size(kind.disk_bytes));
    line(text, "disk_gb_per_s", number(kind.disk_gb_per_s));
    if let Some(price) = kind.price_per_hour {
        line(text, "price_per_hour", number(price));
    }
    if let Some(source) = &kind.price_source {
        line(text, "price_source", quoted(source));
    }
    if let Some(kilowatts) = kind.kilowatts {
        line(text, "kilowatts", number(kilowatts));
    }
    line(text, "hours_between_failures", number(kind.hours_between_failures));
    write_device(text, "node.device", &kind.device);
    if let Some(alone) = &kind.alone {
        write_device(text, "node.alone", alone);
    }
}

fn write_device(text: &mut String, place: &str, device: &Device) {
    heading(text, &format!("[{place}]"));
    line(text, "name", quoted(&device.name));
    let peaks: Vec<String> =
        device.peak_tflops.iter().map(|(dtype, peak)| format!("{dtype} = {}", number(*peak))).collect();
    line(text, "peak_tflops", format!("{{ {} }}", peaks.join(", ")));
    line(text, "memory", size(device.memory_bytes));
    line(text, "memory_gb_per_s", number(device.memory_gb_per_s));
    line(text, "is_host", device.is_host);
    let efficiency = &device.efficiency;
    heading(text, &format!("[{place}.efficiency]"));
    line(text, "product", number(efficiency.product));
    line(text, "half_shape", format!("[{}]", efficiency.half_shape.map(number).join(", ")));
    match efficiency.tile {
        Some(tile) => line(
            text,
            "tile",
            format!("{{ rows = {}, columns = {}, units = {} }}", tile.rows, tile.columns, tile.units),
        ),
        None => line(text, "tile", false),
    }
    line(text, "attention", number(efficiency.attention));
    line(text, "scores", number(efficiency.scores));
    line(text, "stream", number(efficiency.stream));
    line(text, "cold_gb_per_s", number(efficiency.cold_gb_per_s));
    line(text, "launch_us", number(efficiency.launch_us));
    if !efficiency.measured.is_empty() {
        heading(text, &format!("[{place}.efficiency.measured]"));
        for (name, rate) in &efficiency.measured {
            line(text, &quoted(name), number(*rate));
        }
    }
}

fn write_link(text: &mut String, link: &Link) {
    heading(text, "[[link]]");
    line(text, "name", quoted(&link.name));
    match link.joins {
        Joins::Node => line(text, "joins", quoted("node")),
        Joins::All => line(text, "joins", quoted("all")),
        Joins::Devices(devices) => line(text, "joins", devices),
    }
    line(text, "gb_per_s", number(link.gb_per_s));
    line(text, "efficiency", number(link.efficiency));
    if let Some(share) = link.in_switch {
        line(text, "in_switch", number(share));
    }
    line(text, "latency_us", number(link.latency_us));
    line(text, "start_us", number(link.start_us));
    line(text, "fill", number(link.fill));
    if let Some(dimensions) = link.torus {
        line(text, "torus", dimensions);
    }
}

fn heading(text: &mut String, heading: &str) {
    text.push('\n');
    text.push_str(heading);
    text.push('\n');
}

fn line(text: &mut String, key: &str, value: impl std::fmt::Display) {
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
