//! Reads a cluster from TOML. Omitted keys have defaults, and all problems are reported at once.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use toml::de::{DeTable, DeValue};

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
    let links: Vec<Option<Link>> = file.sections("link").into_iter().map(read_link).collect();
    is_sound &= links.iter().all(Option::is_some);
    let mut cluster = Cluster {
        name,
        nodes,
        links: links.into_iter().flatten().collect(),
        software: software.unwrap_or(Software::Lockstep),
        storage_gb_per_s,
    };
    if is_sound && !cluster.nodes.is_empty() {
        check(&mut cluster, &file);
    }
    file.finish();
    Some(cluster)
}

fn read_node(mut section: Section<'_, '_>) -> Option<NodeKind> {
    let count = section.count("count");
    let devices = section.count("devices");
    section.require("device", "the name of a known device, or a table that describes one");
    let device = read_device(&mut section, "device");
    let alone = read_device(&mut section, "alone");
    let host_memory_bytes = section.size("host_memory");
    let host_gb_per_s = section.number("host_gb_per_s", Rule::Positive);
    let host_memory_gb_per_s = section.number("host_memory_gb_per_s", Rule::Positive);
    let disk_bytes = section.size("disk");
    let disk_gb_per_s = section.number("disk_gb_per_s", Rule::Positive);
    let price_per_hour = section.number("price_per_hour", Rule::NotNegative);
    let price_source = section.text("price_source").map(str::to_owned);
    let kilowatts = section.number("kilowatts", Rule::Positive);
    let hours = section.number("hours_between_failures", Rule::Positive);
    if alone.is_some() && device.as_ref().is_some_and(|device| !device.is_host) {
        section.refuse(
            "alone",
            "applies to hosts, whose cores are divided among the ranks",
            "device.is_host = true",
        );
    }
    section.finish();
    let (device, devices) = (device?, devices.unwrap_or(1));
    // Ranks on a CPU have the host's memory.
    let own_memory = if device.is_host { device.memory_bytes } else { 0 };
    Some(NodeKind {
        count: count.unwrap_or(1),
        devices,
        alone,
        host_memory_bytes: host_memory_bytes.unwrap_or(own_memory),
        host_gb_per_s: host_gb_per_s.unwrap_or(24.0),
        host_memory_gb_per_s,
        disk_bytes: disk_bytes.unwrap_or(0),
        disk_gb_per_s: disk_gb_per_s.unwrap_or(1.0),
        price_per_hour,
        price_source,
        kilowatts,
        hours_between_failures: hours.unwrap_or(HOURS_BETWEEN_FAILURES_OF_DEVICE / devices as f64),
        device,
    })
}

/// Reads a device under a key: the name of a known one, or a table.
fn read_device(parent: &mut Section<'_, '_>, key: &'static str) -> Option<Device> {
    match parent.text_or_other(key)? {
        Ok(name) => known_device(parent, key, name),
        Err(DeValue::Table(_)) => read_device_table(parent.section(key)?, ""),
        Err(other) => {
            let what = format!("{} is no device", quoted(other));
            parent.refuse(key, what, "the name of a known device, or a table that describes one");
            None
        }
    }
}

/// Returns a known device; a problem of `key` if the name is unknown.
fn known_device(section: &Section<'_, '_>, key: &str, name: &str) -> Option<Device> {
    let Some(name) = DEVICES.iter().copied().find(|known| *known == name) else {
        section.refuse(key, unknown(name, &DEVICES), one_of(&DEVICES));
        return None;
    };
    read_document(DEVICE_TEXT, "devices.toml", |mut file, _| read_device_table(file.section(name)?, name))
        .ok()
}

/// Returns a known link; a problem of `like` if the name is unknown.
fn known_link(section: &Section<'_, '_>, name: &str) -> Option<Link> {
    let Some(name) = LINKS.iter().copied().find(|known| *known == name) else {
        section.refuse("like", unknown(name, &LINKS), one_of(&LINKS));
        return None;
    };
    let read = |mut file: Section<'_, '_>, _: &str| read_link(file.section(name)?);
    read_document(LINK_TEXT, "links.toml", read).ok().map(|link| Link { name: name.to_owned(), ..link })
}

/// Reads the table of a device. `name` is its default name.
fn read_device_table(mut section: Section<'_, '_>, name: &str) -> Option<Device> {
    let like = section.text("like");
    let base = like.and_then(|like| known_device(&section, "like", like));
    let says = section.text("name").map(str::to_owned);
    if like.is_none() {
        for (key, allowed) in [
            ("peak_tflops", "a table with 10^12 operations a second by type: { bf16 = 312, f32 = 19.5 }"),
            ("memory", "a number of bytes, or one with a unit: \"80GiB\""),
            ("memory_gb_per_s", "10^9 bytes a second"),
        ] {
            section.require(key, allowed);
        }
    }
    let peaks = section.section("peak_tflops").map(read_peaks);
    let memory_bytes = section.size("memory");
    let memory_gb_per_s = section.number("memory_gb_per_s", Rule::Positive);
    let is_host = section.flag("is_host");
    let guesses = base.as_ref().map_or_else(Efficiency::default, |base| base.efficiency.clone());
    let efficiency = match section.section("efficiency") {
        Some(section) => read_efficiency(section, guesses),
        None => guesses,
    };
    section.finish();
    // These placeholders are never used: the file is refused if a required key is missing.
    let base = base.unwrap_or_else(|| Device {
        name: if name.is_empty() { "device".to_owned() } else { name.to_owned() },
        peak_tflops: BTreeMap::new(),
        memory_bytes: 0,
        memory_gb_per_s: 1.0,
        is_host: false,
        efficiency: Efficiency::default(),
    });
    let mut peak_tflops = base.peak_tflops;
    peak_tflops.extend(peaks.into_iter().flatten());
    Some(Device {
        name: says.unwrap_or(base.name),
        peak_tflops,
        memory_bytes: memory_bytes.unwrap_or(base.memory_bytes),
        memory_gb_per_s: memory_gb_per_s.unwrap_or(base.memory_gb_per_s),
        is_host: is_host.unwrap_or(base.is_host),
        efficiency,
    })
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

fn read_efficiency(mut section: Section<'_, '_>, guesses: Efficiency) -> Efficiency {
    let mut share = |key, guess| section.number(key, Rule::Share).unwrap_or(guess);
    let product = share("product", guesses.product);
    let attention = share("attention", guesses.attention);
    let scores = share("scores", guesses.scores);
    let stream = share("stream", guesses.stream);
    let half_shape = section.numbers("half_shape", Rule::NotNegative);
    let cold_gb_per_s = section.number("cold_gb_per_s", Rule::NotNegative);
    let launch_us = section.number("launch_us", Rule::NotNegative);
    let tile = read_tile(&mut section);
    let measured = section.section("measured").map(Section::all_numbers);
    section.finish();
    Efficiency {
        product,
        half_shape: half_shape.unwrap_or(guesses.half_shape),
        tile: tile.unwrap_or(guesses.tile),
        attention,
        scores,
        stream,
        cold_gb_per_s: cold_gb_per_s.unwrap_or(guesses.cold_gb_per_s),
        launch_us: launch_us.unwrap_or(guesses.launch_us),
        measured: guesses.measured.into_iter().chain(measured.into_iter().flatten()).collect(),
    }
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
fn read_link(mut section: Section<'_, '_>) -> Option<Link> {
    let like = section.text("like");
    let base = match like {
        Some(like) => known_link(&section, like),
        None => {
            section.require("gb_per_s", "10^9 bytes a second that a device can send and receive at once");
            section.require("latency_us", "microseconds");
            None
        }
    };
    let name = section.text("name").map(str::to_owned);
    let joins = read_joins(&mut section);
    let gb_per_s = section.number("gb_per_s", Rule::Positive);
    let efficiency = section.number("efficiency", Rule::Share);
    let in_switch = read_in_switch(&mut section);
    let latency_us = section.number("latency_us", Rule::NotNegative);
    let start_us = section.number("start_us", Rule::NotNegative);
    let fill = section.number("fill", Rule::NotNegative);
    let torus = section.count("torus");
    if torus.is_some_and(|dimensions| dimensions > 6) {
        section.refuse("torus", "has too many dimensions", "1 to 6");
    }
    section.finish();
    let base = base.unwrap_or_else(|| Link {
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
    Some(Link {
        name: name.unwrap_or(base.name),
        joins: joins.unwrap_or(base.joins),
        gb_per_s: gb_per_s.unwrap_or(base.gb_per_s),
        efficiency: efficiency.unwrap_or(base.efficiency),
        in_switch: in_switch.unwrap_or(base.in_switch),
        latency_us: latency_us.unwrap_or(base.latency_us),
        start_us: start_us.unwrap_or(base.start_us),
        fill: fill.unwrap_or(base.fill),
        torus: torus.or(base.torus),
    })
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

/// Reads an efficiency factor, or `false` to remove the one of the link in `like`.
fn read_in_switch(section: &mut Section<'_, '_>) -> Option<Option<f64>> {
    match section.text_or_other("in_switch")? {
        Err(DeValue::Boolean(false)) => Some(None),
        _ => section.number("in_switch", Rule::Share).map(Some),
    }
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
