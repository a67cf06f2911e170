//! Reads a cluster from TOML. Omitted keys have defaults, and all problems are reported at once.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use toml::de::{DeTable, DeValue};

use super::field::{DEVICE, EFFICIENCY, Field, LINK, NODE, Row};
use super::section::{Notes, Rule, Section, count_of, one_of, quoted, unknown};
use super::{Cluster, ClusterError, Device, Efficiency, Joins, Link, MAX_LEVELS, NodeKind, Software, Tile};
use lockstep_plan::DType;

/// Mean time between failures of a device, in hours: 419 unexpected interruptions in 54 days on 16,384 H100 ("The Llama 3 Herd of
/// Models", 2024, section 3.3.4).
const HOURS_BETWEEN_FAILURES_OF_DEVICE: f64 = 54.0 * 24.0 * 16_384.0 / 419.0;

/// Dtypes whose GEMMs have a peak.
const PEAKS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

const DEVICE_TEXT: &str = include_str!("presets/devices.toml");
const LINK_TEXT: &str = include_str!("presets/links.toml");

/// Names of the known devices, for `device = "NAME"` and `like = "NAME"`.
pub static DEVICES: LazyLock<Vec<&str>> = LazyLock::new(|| tables_of(DEVICE_TEXT));

/// Names of the known links, for `like = "NAME"`.
pub static LINKS: LazyLock<Vec<&str>> = LazyLock::new(|| tables_of(LINK_TEXT));

/// Returns the names of a document's tables that are within no other, in its order.
fn tables_of(text: &'static str) -> Vec<&'static str> {
    let name = |line: &'static str| line.strip_prefix('[')?.strip_suffix(']');
    text.lines().filter_map(name).filter(|name| !name.contains('.')).collect()
}

impl Cluster {
    /// Reads a cluster file. `name` stands for the file in messages, and is the cluster's name if the file has none.
    ///
    /// # Errors
    /// If the file is not valid; the error lists every problem with its place.
    pub fn parse(text: &str, name: &str) -> Result<Self, ClusterError> {
        read_document(text, name, read_cluster)
    }
}

/// Parses a document and converts it by `read`, if the syntax is valid.
fn read_document<T>(
    text: &str,
    name: &str,
    read: impl FnOnce(Section<'_, '_>, &str) -> Option<T>,
) -> Result<T, ClusterError> {
    let notes = Notes::new(text, name);
    let (document, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        let at = error.span().map_or(text.len(), |span| span.start);
        // Further errors on the same line are consequences of the first.
        if !notes.has_line_of(at) {
            let message: String = error.message().chars().take(200).collect();
            notes.add(at, "", format!("this is no TOML: {message}"), "");
        }
    }
    // After a syntax error, values that could still be read would only cause further errors.
    let found =
        if notes.is_empty() { read(Section::of_document(&notes, document.get_ref()), name) } else { None };
    match found {
        Some(found) if notes.is_empty() => Ok(found),
        _ => Err(ClusterError(notes.into_problems())),
    }
}

fn read_cluster(mut file: Section<'_, '_>, name: &str) -> Option<Cluster> {
    let name = file.text("name").unwrap_or(name).to_owned();
    let software = file.choice("software", &Software::ALL.map(Software::name));
    let software = Software::ALL.into_iter().find(|known| Some(known.name()) == software);
    let storage_gb_per_s = file.number("storage_gb_per_s", Rule::Positive);
    let mut nodes = Vec::new();
    let mut is_sound = true;
    let told = file.notes.len();
    file.require("node", "a table [[node]] for each kind of node");
    for section in file.sections("node") {
        match read_node(section) {
            Some(node) => nodes.push(node),
            None => is_sound = false,
        }
    }
    if nodes.is_empty() && file.notes.len() == told {
        file.refuse("node", "there are no nodes", "a table [[node]] for each kind of node");
    }
    let links = file.sections("link").into_iter().map(read_link).collect();
    let mut cluster =
        Cluster { name, nodes, links, software: software.unwrap_or(Software::Lockstep), storage_gb_per_s };
    if is_sound && !cluster.nodes.is_empty() {
        check(&mut cluster, &file);
    }
    file.finish();
    Some(cluster)
}

fn read_node(mut section: Section<'_, '_>) -> Option<NodeKind> {
    section.require("device", "the name of a known device, or a table that describes one");
    let mut node = NodeKind {
        count: 1,
        devices: 1,
        device: unknown_device(""),
        alone: None,
        host_memory_bytes: 0,
        host_gb_per_s: 24.0,
        host_memory_gb_per_s: None,
        disk_bytes: 0,
        disk_gb_per_s: 1.0,
        price_per_hour: None,
        price_source: None,
        kilowatts: None,
        hours_between_failures: 0.0,
    };
    section.read(&mut node, NODE);
    let has_device = !node.device.name.is_empty();
    if node.alone.is_some() && has_device && !node.device.is_host {
        section.refuse(
            "alone",
            "applies to hosts, whose cores are divided among the ranks",
            "device.is_host = true",
        );
    }
    if !section.has("host_memory") && node.device.is_host {
        // Ranks on a CPU have the host's memory.
        node.host_memory_bytes = node.device.memory_bytes;
    }
    if !section.has("hours_between_failures") {
        node.hours_between_failures = HOURS_BETWEEN_FAILURES_OF_DEVICE / node.devices as f64;
    }
    section.finish();
    has_device.then_some(node)
}

impl Section<'_, '_> {
    /// Reads the keys of a table into the fields of `table`; fields whose key is missing or wrong keep their values.
    fn read<T>(&mut self, table: &mut T, rows: &[Row<T>]) {
        for (key, field) in rows {
            field(table).read(self, key);
        }
    }
}

impl Field<'_> {
    /// Sets the field to the value of a key, if it has one that fits.
    fn read(self, section: &mut Section<'_, '_>, key: &'static str) {
        fn set<T>(field: &mut T, value: Option<T>) {
            if let Some(value) = value {
                *field = value;
            }
        }
        match self {
            Self::Text(field) => set(field, section.text(key).map(str::to_owned)),
            Self::OptionalText(field) => set(field, section.text(key).map(|text| Some(text.to_owned()))),
            Self::Flag(field) => set(field, section.flag(key)),
            Self::Count(field) => set(field, section.count(key)),
            Self::OptionalCount(field) => set(field, section.count(key).map(Some)),
            Self::Bytes(field) => set(field, section.size(key)),
            Self::Number(field, rule) => set(field, section.number(key, rule)),
            Self::OptionalNumber(field, rule) => set(field, section.number(key, rule).map(Some)),
            Self::OptionalShare(field) => match section.text_or_other(key) {
                Some(Err(DeValue::Boolean(false))) => *field = None,
                _ => set(field, section.number(key, Rule::Share).map(Some)),
            },
            Self::Numbers(field) => set(field, section.numbers(key, Rule::NotNegative)),
            Self::Joins(field) => set(field, read_joins(section)),
            Self::Tile(field) => set(field, read_tile(section)),
            Self::Peaks(field) => field.extend(section.section(key).map(read_peaks).into_iter().flatten()),
            Self::Device(field) => set(field, read_device(section, key)),
            Self::OptionalDevice(field) => set(field, read_device(section, key).map(Some)),
            Self::Efficiency(field) => {
                if let Some(mut section) = section.section(key) {
                    section.read(field, EFFICIENCY);
                    section.finish();
                }
            }
            Self::Rates(field) => {
                field.extend(section.section(key).map(Section::all_numbers).into_iter().flatten());
            }
        }
    }
}

/// Reads a device under a key: the name of a known one, or a table.
fn read_device(parent: &mut Section<'_, '_>, key: &'static str) -> Option<Device> {
    match parent.text_or_other(key)? {
        Ok(name) => known_device(parent, key, name),
        Err(DeValue::Table(_)) => Some(read_device_table(parent.section(key)?, "device")),
        Err(other) => {
            let what = format!("{} is no device", quoted(other));
            parent.refuse(key, what, "the name of a known device, or a table that describes one");
            None
        }
    }
}

/// Returns the name if it is one of `names`; else a problem of `key`.
fn known(section: &Section<'_, '_>, key: &str, name: &str, names: &[&'static str]) -> Option<&'static str> {
    let known = names.iter().copied().find(|known| *known == name);
    if known.is_none() {
        section.refuse(key, unknown(name, names), one_of(names));
    }
    known
}

/// Returns a known device; a problem of `key` if the name is unknown.
fn known_device(section: &Section<'_, '_>, key: &str, name: &str) -> Option<Device> {
    let name = known(section, key, name, &DEVICES)?;
    let read = |mut file: Section<'_, '_>, _: &str| Some(read_device_table(file.section(name)?, name));
    read_document(DEVICE_TEXT, "devices.toml", read).ok()
}

/// Returns a known link; a problem of `like` if the name is unknown.
fn known_link(section: &Section<'_, '_>, name: &str) -> Option<Link> {
    let name = known(section, "like", name, &LINKS)?;
    let read = |mut file: Section<'_, '_>, _: &str| Some(read_link(file.section(name)?));
    read_document(LINK_TEXT, "links.toml", read).ok().map(|link| Link { name: name.to_owned(), ..link })
}

/// Returns a device to which every required key has yet to be given.
fn unknown_device(name: &str) -> Device {
    Device {
        name: name.to_owned(),
        peak_tflops: BTreeMap::new(),
        memory_bytes: 0,
        memory_gb_per_s: 1.0,
        is_host: false,
        efficiency: Efficiency::default(),
    }
}

/// Reads the table of a device. `name` is its default name.
fn read_device_table(mut section: Section<'_, '_>, name: &str) -> Device {
    let like = section.text("like");
    let base = like.and_then(|like| known_device(&section, "like", like));
    if like.is_none() {
        for (key, allowed) in [
            ("peak_tflops", "a table with 10^12 operations a second by type: { bf16 = 312, f32 = 19.5 }"),
            ("memory", "a number of bytes, or one with a unit: \"80GiB\""),
            ("memory_gb_per_s", "10^9 bytes a second"),
        ] {
            section.require(key, allowed);
        }
    }
    let mut device = base.unwrap_or_else(|| unknown_device(name));
    section.read(&mut device, DEVICE);
    section.finish();
    device
}

fn read_peaks(section: Section<'_, '_>) -> BTreeMap<DType, f64> {
    let names = PEAKS.map(|dtype| dtype.to_string());
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut peaks = BTreeMap::new();
    for key in section.keys() {
        match PEAKS.into_iter().find(|dtype| dtype.to_string() == key) {
            Some(dtype) => {
                if let Some(peak) = section.number_of_key(key, Rule::Positive) {
                    peaks.insert(dtype, peak);
                }
            }
            None => section.refuse(key, unknown(key, &names), one_of(&names)),
        }
    }
    if section.keys().next().is_none() {
        section.refuse_whole("no type has a peak", one_of(&names));
    }
    peaks
}

/// Reads a tile: a table, or `false` to remove the one of the device in `like`.
fn read_tile(section: &mut Section<'_, '_>) -> Option<Option<Tile>> {
    match section.text_or_other("tile")? {
        Err(DeValue::Boolean(false)) => Some(None),
        Err(DeValue::Table(_)) => {
            let mut tile = section.section("tile")?;
            let mut side = |key| {
                tile.require(key, "a whole number from 1");
                tile.count(key).map_or(1, |side| side as u64)
            };
            let found = Tile { rows: side("rows"), columns: side("columns"), units: side("units") };
            tile.finish();
            Some(Some(found))
        }
        found => {
            let what = match found {
                Ok(text) => unknown(text, &["false"]),
                Err(other) => format!("{} is no tile", quoted(other)),
            };
            section.refuse("tile", what, "{ rows = 128, columns = 256, units = 132 }, or false");
            None
        }
    }
}

/// Reads the table of a level of links.
fn read_link(mut section: Section<'_, '_>) -> Link {
    let base = match section.text("like") {
        Some(like) => known_link(&section, like),
        None => {
            section.require("gb_per_s", "10^9 bytes a second that a device can send and receive at once");
            section.require("latency_us", "microseconds");
            None
        }
    };
    let mut link = base.unwrap_or_else(|| Link {
        name: "link".to_owned(),
        joins: Joins::All,
        gb_per_s: 1.0,
        efficiency: 0.8,
        in_switch: None,
        latency_us: 0.0,
        start_us: 6.6,
        fill: 0.5,
        torus: None,
    });
    section.read(&mut link, LINK);
    if link.torus.is_some_and(|dimensions| dimensions > 6) {
        section.refuse("torus", "has too many dimensions", "1 to 6");
    }
    section.finish();
    link
}

fn read_joins(section: &mut Section<'_, '_>) -> Option<Joins> {
    let what = match section.text_or_other("joins")? {
        Ok("node") => return Some(Joins::Node),
        Ok("all") => return Some(Joins::All),
        Ok(text) => unknown(text, &["node", "all"]),
        Err(other) => match count_of(other) {
            Some(devices) => return Some(Joins::Devices(devices)),
            None => format!("{} is not a number of devices", quoted(other)),
        },
    };
    section.refuse("joins", what, "node, all, or a number of devices");
    None
}

/// Checks the tables against each other.
fn check(cluster: &mut Cluster, file: &Section<'_, '_>) {
    let devices = cluster.nodes.iter().try_fold(0_usize, |sum, kind| {
        sum.checked_add(kind.count.checked_mul(kind.devices)?).filter(|&sum| u32::try_from(sum).is_ok())
    });
    let Some(devices) = devices else {
        let allowed = "at most 4294967295 devices";
        file.refuse("node", "the nodes have more devices than can be counted", allowed);
        return;
    };
    for (index, kind) in cluster.nodes.iter().enumerate() {
        let earlier = &cluster.nodes[..index];
        if earlier.iter().any(|other| other.device.name == kind.device.name && other.device != kind.device) {
            let place = format!("node[{index}].device.name");
            let what = format!("\"{}\" is another device already", kind.device.name);
            file.notes.add(file.offset_of("node"), &place, what, "a name of its own");
        }
    }
    let last = cluster.links.len().saturating_sub(1);
    let at = file.offset_of("link");
    let refuse = |index: usize, key: &str, what: String, allowed: &str| {
        file.notes.add(at, &format!("link[{index}].{key}"), what, allowed);
    };
    if cluster.links.len() > MAX_LEVELS {
        let what = format!("there are {} levels of links", cluster.links.len());
        file.refuse("link", what, format!("at most {MAX_LEVELS}"));
    }
    if cluster.links.is_empty() && devices > 1 {
        let what = format!("nothing joins the {devices} devices");
        file.refuse("link", what, "a table [[link]] for each level, the innermost first");
    }
    let smallest = cluster.devices_of_a_node();
    let mut below = 1;
    for (index, link) in cluster.links.iter().enumerate() {
        if cluster.links[..index].iter().any(|other| other.name == link.name) {
            refuse(index, "name", format!("\"{}\" is another level already", link.name), "a name of its own");
        }
        let joined = match link.joins {
            Joins::Node => smallest,
            Joins::Devices(number) => number,
            Joins::All => devices,
        };
        if index < last && link.joins == Joins::All {
            let what = format!("joins all {devices} devices, and the level above it is to join more");
            refuse(index, "joins", what, "node, or a number of devices");
        } else if joined < below {
            let what = format!("joins {joined} devices, fewer than the {below} of the level below");
            refuse(index, "joins", what, "levels from the innermost to the outermost");
        }
        if index == last && joined < devices {
            let what = format!("the last level joins {joined} of {devices} devices");
            refuse(index, "joins", what, "all");
        }
        below = joined.max(below);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_of_devices_and_links_has_its_name() {
        for (names, text) in [(&DEVICES, DEVICE_TEXT), (&LINKS, LINK_TEXT)] {
            let tables = DeTable::parse(text).unwrap();
            assert_eq!(names.len(), tables.get_ref().len(), "{names:?}");
            assert!(names.iter().all(|name| tables.get_ref().contains_key(*name)), "{names:?}");
        }
    }
}
