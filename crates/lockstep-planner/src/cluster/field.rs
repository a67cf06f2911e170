//! The keys of the tables of a cluster file. Each is listed once, with the field that it sets; it is read and written by its row.

use std::collections::BTreeMap;

use lockstep_plan::DType;

use super::section::Rule;
use super::{Device, Efficiency, Joins, Link, NodeKind, Tile};

/// A field of a cluster, by the form of its value in a file.
pub(super) enum Field<'t> {
    Text(&'t mut String),
    OptionalText(&'t mut Option<String>),
    Flag(&'t mut bool),
    Count(&'t mut usize),
    OptionalCount(&'t mut Option<usize>),
    Bytes(&'t mut u64),
    Number(&'t mut f64, Rule),
    OptionalNumber(&'t mut Option<f64>, Rule),
    /// A share, or `false` to remove the one of the link in `like`.
    OptionalShare(&'t mut Option<f64>),
    Numbers(&'t mut [f64; 3]),
    Joins(&'t mut Joins),
    /// A table, or `false` to remove the tile of the device in `like`.
    Tile(&'t mut Option<Tile>),
    Peaks(&'t mut BTreeMap<DType, f64>),
    // Tables within the table, which are written after it.
    Device(&'t mut Device),
    OptionalDevice(&'t mut Option<Device>),
    Efficiency(&'t mut Efficiency),
    Rates(&'t mut BTreeMap<String, f64>),
}

/// A key and its field.
pub(super) type Row<T> = (&'static str, fn(&mut T) -> Field<'_>);

/// The keys of `[[node]]`.
pub(super) const NODE: &[Row<NodeKind>] = &[
    ("count", |node| Field::Count(&mut node.count)),
    ("devices", |node| Field::Count(&mut node.devices)),
    ("device", |node| Field::Device(&mut node.device)),
    ("alone", |node| Field::OptionalDevice(&mut node.alone)),
    ("host_memory", |node| Field::Bytes(&mut node.host_memory_bytes)),
    ("host_gb_per_s", |node| Field::Number(&mut node.host_gb_per_s, Rule::Positive)),
    ("host_memory_gb_per_s", |node| Field::OptionalNumber(&mut node.host_memory_gb_per_s, Rule::Positive)),
    ("disk", |node| Field::Bytes(&mut node.disk_bytes)),
    ("disk_gb_per_s", |node| Field::Number(&mut node.disk_gb_per_s, Rule::Positive)),
    ("price_per_hour", |node| Field::OptionalNumber(&mut node.price_per_hour, Rule::NotNegative)),
    ("price_source", |node| Field::OptionalText(&mut node.price_source)),
    ("kilowatts", |node| Field::OptionalNumber(&mut node.kilowatts, Rule::Positive)),
    ("hours_between_failures", |node| Field::Number(&mut node.hours_between_failures, Rule::Positive)),
];

/// The keys of a device, besides `like`.
pub(super) const DEVICE: &[Row<Device>] = &[
    ("name", |device| Field::Text(&mut device.name)),
    ("peak_tflops", |device| Field::Peaks(&mut device.peak_tflops)),
    ("memory", |device| Field::Bytes(&mut device.memory_bytes)),
    ("memory_gb_per_s", |device| Field::Number(&mut device.memory_gb_per_s, Rule::Positive)),
    ("is_host", |device| Field::Flag(&mut device.is_host)),
    ("efficiency", |device| Field::Efficiency(&mut device.efficiency)),
];

/// The keys of a device's `efficiency`.
pub(super) const EFFICIENCY: &[Row<Efficiency>] = &[
    ("product", |efficiency| Field::Number(&mut efficiency.product, Rule::Share)),
    ("attention", |efficiency| Field::Number(&mut efficiency.attention, Rule::Share)),
    ("scores", |efficiency| Field::Number(&mut efficiency.scores, Rule::Share)),
    ("stream", |efficiency| Field::Number(&mut efficiency.stream, Rule::Share)),
    ("half_shape", |efficiency| Field::Numbers(&mut efficiency.half_shape)),
    ("cold_gb_per_s", |efficiency| Field::Number(&mut efficiency.cold_gb_per_s, Rule::NotNegative)),
    ("launch_us", |efficiency| Field::Number(&mut efficiency.launch_us, Rule::NotNegative)),
    ("tile", |efficiency| Field::Tile(&mut efficiency.tile)),
    ("measured", |efficiency| Field::Rates(&mut efficiency.measured)),
];

/// The keys of `[[link]]`, besides `like`.
pub(super) const LINK: &[Row<Link>] = &[
    ("name", |link| Field::Text(&mut link.name)),
    ("joins", |link| Field::Joins(&mut link.joins)),
    ("gb_per_s", |link| Field::Number(&mut link.gb_per_s, Rule::Positive)),
    ("efficiency", |link| Field::Number(&mut link.efficiency, Rule::Share)),
    ("in_switch", |link| Field::OptionalShare(&mut link.in_switch)),
    ("latency_us", |link| Field::Number(&mut link.latency_us, Rule::NotNegative)),
    ("start_us", |link| Field::Number(&mut link.start_us, Rule::NotNegative)),
    ("fill", |link| Field::Number(&mut link.fill, Rule::NotNegative)),
    ("torus", |link| Field::OptionalCount(&mut link.torus)),
];
