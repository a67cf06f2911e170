//! Cluster files as users write them, and every kind of mistake in one.
//!
//! Each file under `tests/clusters/broken/` ends with one `# expect: TEXT` line per problem that it must cause.

use std::fs;
use std::path::Path;

use lockstep_plan::DType;
use lockstep_planner::cluster::ClusterError;
use lockstep_planner::cluster::{Cluster, DEVICES, Joins, LINKS, PRESETS, Software};
use proptest::prelude::*;

fn parse(text: &str) -> Cluster {
    Cluster::parse(text, "cluster").unwrap_or_else(|problems| panic!("{problems}"))
}

#[test]
fn every_broken_file_gives_exactly_the_problems_it_expects() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clusters/broken");
    let (mut failures, mut files) = (Vec::new(), 0);
    for file in fs::read_dir(directory).unwrap() {
        let path = file.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let expected: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# expect: ")).collect();
        assert!(!expected.is_empty(), "{} expects nothing", path.display());
        let problems: Vec<String> = match Cluster::parse(&text, "cluster") {
            Ok(_) => Vec::new(),
            Err(ClusterError(problems)) => problems.iter().map(ToString::to_string).collect(),
        };
        let found = |text: &&str| problems.iter().any(|problem| problem.contains(*text));
        let located = |problem: &String| problem.starts_with("cluster:");
        if problems.len() != expected.len() || !expected.iter().all(found) || !problems.iter().all(located) {
            failures.push(format!("{}: expected {expected:#?}, got {problems:#?}", path.display()));
        }
        files += 1;
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(files >= 30, "only {files} broken files found");
}

#[test]
fn ten_lines_describe_a_cluster() {
    let cluster = parse(
        "[node]\ncount = 4\ndevices = 8\ndevice = \"h100-sxm\"\nhost_memory = \"2TiB\"\n\n\
         [[link]]\nlike = \"nvlink4\"\n[[link]]\nlike = \"ndr-400g\"\n",
    );
    assert_eq!((cluster.name.as_str(), cluster.software), ("cluster", Software::Lockstep));
    assert_eq!((cluster.node_count(), cluster.devices()), (4, 32));
    let node = &cluster.nodes[0];
    assert_eq!((node.host_memory_bytes, node.price_per_hour), (2 << 40, None));
    assert_eq!(node.device.peak_flops(DType::BF16), Some(989e12));
    assert_eq!(cluster.links.iter().map(|link| link.joins).collect::<Vec<_>>(), [Joins::Node, Joins::All]);
    // One failure of 16,384 devices in three hours is one of 8 devices in 264 days.
    assert!((6300.0..6400.0).contains(&node.hours_between_failures), "{}", node.hours_between_failures);
}

#[test]
fn a_device_may_differ_from_a_known_one_in_a_few_numbers() {
    let cluster = parse(
        "[node.device]\nlike = \"a100-80gb-sxm\"\nname = \"a100-40gb\"\nmemory = \"39.4GiB\"\n\
         peak_tflops.f32 = 1\nefficiency.tile = false\nefficiency.measured = { \"GELU forward\" = 900 }\n",
    );
    let known = parse("[node]\ndevice = \"a100-80gb-sxm\"\n");
    let (found, known) = (&cluster.nodes[0].device, &known.nodes[0].device);
    assert_eq!((found.name.as_str(), found.memory_bytes), ("a100-40gb", 42_305_427_866));
    assert_eq!(found.peak_tflops, [(DType::F32, 1.0), (DType::BF16, 312.0), (DType::F16, 312.0)].into());
    assert_eq!((found.efficiency.tile, found.efficiency.measured["GELU forward"]), (None, 900.0));
    assert_eq!((found.memory_gb_per_s, found.efficiency.product), (2039.0, known.efficiency.product));
}

#[test]
fn nodes_may_differ() {
    let cluster = parse(
        "[[node]]\ncount = 2\ndevices = 8\ndevice = \"h100-sxm\"\n\
         [[node]]\ncount = 3\ndevices = 4\ndevice = \"a100-80gb-sxm\"\n\
         [[link]]\nlike = \"nvlink3\"\n[[link]]\nlike = \"hdr-200g\"\n",
    );
    assert_eq!((cluster.node_count(), cluster.devices()), (5, 28));
    let place = |rank| cluster.node_of(rank).map(|(kind, node)| (kind.device.name.as_str(), node));
    let h100 = "h100-sxm";
    assert_eq!([place(0), place(7), place(8)], [Some((h100, 0)), Some((h100, 0)), Some((h100, 1))]);
    let a100 = "a100-80gb-sxm";
    assert_eq!([place(15), place(16), place(27)], [Some((h100, 1)), Some((a100, 2)), Some((a100, 4))]);
    assert_eq!(place(28), None);
}

#[test]
fn every_preset_is_sound_and_reads_as_it_was_written() {
    for name in PRESETS {
        let cluster = Cluster::preset(name).unwrap_or_else(|problems| panic!("{name}: {problems}"));
        assert_eq!((cluster.name.as_str(), cluster.node_count()), (name, 1));
        assert_eq!(parse(&cluster.to_toml()), cluster, "{}", cluster.to_toml());
    }
    let local = Cluster::local(2, 24_689_492 * 1024);
    assert_eq!(parse(&local.to_toml()), local, "{}", local.to_toml());
}

#[test]
fn every_known_device_and_link_can_be_named() {
    for &device in DEVICES.iter() {
        let cluster = parse(&format!("node.device = \"{device}\""));
        assert_eq!(cluster.nodes[0].device.name, device);
        assert!(cluster.nodes[0].device.peak_flops(DType::F16).or(Some(1e12)) > Some(1e11), "{device}");
    }
    for &link in LINKS.iter() {
        let cluster =
            parse(&format!("node.device = \"h100-sxm\"\nlink.like = \"{link}\"\nlink.joins = \"all\""));
        assert_eq!(cluster.links[0].name, link);
    }
}

#[test]
fn a_number_of_nodes_may_follow_the_name_of_a_preset() {
    let cluster = Cluster::preset("dgx-h100x96").unwrap();
    assert_eq!((cluster.name.as_str(), cluster.node_count(), cluster.devices()), ("dgx-h100x96", 96, 768));
    for (name, words) in [
        ("dgx-h100x0", "no number of nodes after dgx-h100x"),
        ("dgx-h100x", "no number of nodes"),
        ("dgx-h100x-1", "no number of nodes"),
        ("dgx-h100x1000000000000000000", "allowed: 1 to 536870911"),
        ("dgx-h10", "the nearest is dgx-h100"),
        ("dgx_h100x4", "dgx-h100x96"),
        ("", "is not known"),
        ("x", "is not known"),
    ] {
        let error = Cluster::preset(name).map(|cluster| cluster.name).unwrap_err().to_string();
        assert!(error.contains(words), "{name}: {error}");
    }
}

#[test]
fn ranks_share_out_the_cores_of_a_host() {
    let text = "[node]\ndevices = 4\ndevice = { is_host = true, memory = \"8GiB\", memory_gb_per_s = 5, \
                peak_tflops = { f32 = 0.1 }, efficiency.measured = { \"update\" = 3 } }\n";
    let links = "[link]\ngb_per_s = 8\nlatency_us = 1\n";
    let guessed = parse(&format!("{text}{links}"));
    let node = &guessed.nodes[0];
    assert_eq!(node.host_memory_bytes, 8 << 30);
    for (ranks, tflops) in [(4, 0.1), (2, 0.2), (1, 0.4), (3, 0.1), (8, 0.1), (0, 0.4)] {
        assert_eq!(node.device_of(ranks).peak_tflops[&DType::F32], tflops, "{ranks} ranks");
    }
    let alone = "alone = { name = \"all\", is_host = true, memory = \"8GiB\", memory_gb_per_s = 10, \
                 peak_tflops = { f32 = 0.3 }, efficiency.measured = { \"update\" = 12 } }\n";
    let measured = parse(&format!("{text}{alone}{links}"));
    assert_eq!(parse(&measured.to_toml()), measured);
    let node = &measured.nodes[0];
    assert_eq!(
        (node.device_of(4).as_ref(), node.device_of(1).as_ref()),
        (&node.device, node.alone.as_ref().unwrap())
    );
    let two = node.device_of(2);
    for (found, expected) in [
        (two.peak_tflops[&DType::F32], 0.1 * 3_f64.sqrt()),
        (two.memory_gb_per_s, 5.0 * 2_f64.sqrt()),
        (two.efficiency.measured["update"], 6.0),
    ] {
        assert!((found / expected - 1.0).abs() < 1e-12, "{found}, not {expected}");
    }
    // An accelerator always has one rank.
    let preset = Cluster::preset("dgx-h100").unwrap();
    assert_eq!(preset.nodes[0].device_of(2).as_ref(), &preset.nodes[0].device);
}

/// Values that files may have, valid and invalid.
fn value() -> impl Strategy<Value = String> {
    const TEXTS: [&str; 9] = ["80GiB", "h100-sxm", "nvlink4", "node", "all", "", "-1", "lockstep", "\\u0000"];
    let leaf = prop_oneof![
        any::<i64>().prop_map(|number| number.to_string()),
        (0..20_u32).prop_map(|number| number.to_string()),
        any::<f64>().prop_map(|number| format!("{number:?}").replace("NaN", "nan")),
        (0.0..2.0_f64).prop_map(|number| format!("{number:?}")),
        prop::sample::select(&TEXTS[..]).prop_map(|text| format!("\"{text}\"")),
        any::<bool>().prop_map(|flag| flag.to_string()),
    ];
    leaf.prop_recursive(4, 24, 6, |inner| {
        let entry = (prop::sample::select(&KEYS[..]), inner.clone());
        let table = |entries: Vec<(&'static str, String)>| {
            let entries: std::collections::BTreeMap<_, _> = entries.into_iter().collect();
            let entries: Vec<String> =
                entries.iter().map(|(key, value)| format!("{key} = {value}")).collect();
            format!("{{ {} }}", entries.join(", "))
        };
        prop_oneof![
            prop::collection::vec(inner, 0..4).prop_map(|items| format!("[{}]", items.join(", "))),
            prop::collection::vec(entry, 0..8).prop_map(table),
        ]
    })
}

const KEYS: [&str; 37] = [
    "name",
    "software",
    "node",
    "link",
    "count",
    "devices",
    "device",
    "alone",
    "host_memory",
    "host_gb_per_s",
    "host_memory_gb_per_s",
    "disk",
    "disk_gb_per_s",
    "price_per_hour",
    "price_source",
    "kilowatts",
    "storage_gb_per_s",
    "hours_between_failures",
    "like",
    "memory",
    "memory_gb_per_s",
    "peak_tflops",
    "is_host",
    "efficiency",
    "product",
    "half_shape",
    "tile",
    "measured",
    "bf16",
    "f32",
    "joins",
    "gb_per_s",
    "in_switch",
    "latency_us",
    "fill",
    "torus",
    "odd",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_file_makes_the_reader_panic(entries in prop::collection::btree_map(prop::sample::select(&KEYS[..]), value(), 0..6)) {
        let lines: Vec<String> = entries.iter().map(|(key, value)| format!("{key} = {value}")).collect();
        let text = lines.join("\n");
        match Cluster::parse(&text, "random") {
            Ok(cluster) => prop_assert_eq!(parse(&cluster.to_toml()).devices(), cluster.devices()),
            Err(ClusterError(problems)) => prop_assert!(!problems.is_empty(), "{}", text),
        }
    }
}

#[test]
fn accelerators_are_counted_as_people_count_them() {
    let table = [
        ("h100x16", "dgx-h100x2", 2, 8),
        ("H100x8", "dgx-h100", 1, 8),
        ("h100", "1 of 8 devices of dgx-h100", 1, 1),
        ("a100x4", "4 of 8 devices of dgx-a100", 1, 4),
        ("v100x32", "dgx-2x2", 2, 16),
        ("h200x128", "hgx-h200x16", 16, 8),
        ("16xH100", "dgx-h100x2", 2, 8),
        ("2x8xH100", "dgx-h100x2", 2, 8),
        ("h100:16", "dgx-h100x2", 2, 8),
        ("4xA100", "4 of 8 devices of dgx-a100", 1, 4),
        ("8xa100-sxm", "dgx-a100", 1, 8),
        ("2xDGX-H100", "dgx-h100x2", 2, 8),
        ("dgx-2:4", "dgx-2x4", 4, 16),
    ];
    for (name, expected, nodes, devices) in table {
        let cluster = Cluster::preset(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        let node = &cluster.nodes[0];
        assert_eq!((cluster.name.as_str(), node.count, node.devices), (expected, nodes, devices), "{name}");
    }
    let half = Cluster::preset("h100x4").unwrap();
    assert_eq!(half.nodes[0].price_per_hour, Some(55.04 / 2.0));
    for name in
        ["h100x12", "h100x0", "h100xfour", "h100x", "12xh100", "3x8x1xh100x1000000000000000000", "0xh100"]
    {
        let error = Cluster::preset(name).expect_err(name).to_string();
        assert!(error.contains("multiple of the 8"), "{name}: {error}");
    }
}
