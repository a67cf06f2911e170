//! The parts of a step add up to the step: traffic and waits, memory in use and booked; no point lies above its roofline.

use lockstep_plan::MemoryCategory;
use lockstep_planner::cluster::Cluster;
use lockstep_planner::predict::Sent;
use lockstep_planner::{Details, Evaluated};

use super::planner;

const DENSE: [&str; 4] =
    ["model.preset=gpt2-124m", "train.global_batch=64", "train.seq_len=512", "train.precision=bf16"];
const EXPERTS: [&str; 3] = ["model.preset=mixtral-20m", "train.global_batch=64", "train.seq_len=128"];

const LARGE: [&str; 4] =
    ["model.preset=llama3-8b", "train.global_batch=16", "train.seq_len=8192", "train.precision=bf16"];

/// Returns plans that together send every kind of traffic, each with a cluster.
pub(super) fn plans() -> Vec<(&'static str, Vec<&'static str>)> {
    let split = |model: &[&'static str], more: &[&'static str]| [model, more].concat();
    vec![
        ("dgx-h100x2", split(&DENSE, &["parallel.tensor_parallel=4", "parallel.data_parallel_replicate=4"])),
        ("dgx-a100", split(&DENSE, &["parallel.data_parallel_shard=8", "parallel.zero_stage=3"])),
        (
            "dgx-a100",
            split(
                &DENSE,
                &["parallel.data_parallel_shard=8", "parallel.zero_stage=2", "train.micro_batch=2"],
            ),
        ),
        (
            "dgx-h100x2",
            split(
                &DENSE,
                &[
                    "parallel.pipeline_parallel=4",
                    "parallel.pipeline_schedule=zb_v",
                    "parallel.data_parallel_shard=4",
                    "parallel.zero_stage=3",
                    "train.micro_batch=1",
                ],
            ),
        ),
        (
            "dgx-h100x2",
            split(
                &DENSE,
                &[
                    "parallel.context_parallel=4",
                    "parallel.tensor_parallel=2",
                    "parallel.pipeline_parallel=2",
                    "parallel.sequence_parallel=true",
                    "train.micro_batch=4",
                    "parallel.recompute=full",
                ],
            ),
        ),
        (
            "dgx-h100",
            split(
                &LARGE,
                &["parallel.context_parallel=4", "parallel.data_parallel_shard=2", "parallel.zero_stage=3"],
            ),
        ),
        (
            "dgx-h100",
            split(
                &EXPERTS,
                &["parallel.data_parallel_shard=8", "parallel.expert_parallel=4", "parallel.zero_stage=1"],
            ),
        ),
    ]
}

fn detailed(settings: &[&str], cluster: Cluster) -> (Evaluated, Details) {
    let mut planner = planner(settings, cluster);
    let found = planner.of_run().expect("a plan that fits the model");
    let details = planner.details(&found).expect("a plan that fits the model");
    (found, details)
}

#[track_caller]
fn assert_near(found: f64, expected: f64, what: &str) {
    assert!((found - expected).abs() <= 1e-6 * expected.abs().max(1e-3), "{what}: {found}, not {expected}");
}

#[test]
fn what_is_waited_for_adds_up_to_the_step() {
    let mut seen = std::collections::BTreeSet::new();
    for (name, settings) in plans() {
        for software in ["lockstep", "megatron", "deepspeed"] {
            let mut cluster = Cluster::preset(name).unwrap();
            let of_name = |one: &lockstep_planner::cluster::Software| one.name() == software;
            cluster.software = lockstep_planner::cluster::Software::ALL.into_iter().find(of_name).unwrap();
            let (found, details) = detailed(&settings, cluster);
            let what = format!("{settings:?} on {name}, {software}");
            let kinds = &details.traffic.kinds;
            seen.extend(kinds.iter().map(|kind| kind.sent));
            let inside = || kinds.iter().filter(|kind| kind.sent != Sent::Messages);
            let waited: f64 = inside().map(|kind| kind.exposed_ms).sum();
            let exposed = waited + details.traffic.shared_ms;
            assert_near(exposed, found.step.exposed_ms(), &format!("{what}: waited for"));
            let busy = inside().map(|kind| kind.busy_ms).sum();
            assert_near(busy, found.step.exchange_busy_ms, &format!("{what}: takes"));
            for kind in kinds {
                assert!(kind.total_bytes() > 0.0 && (0.0..=1.0).contains(&kind.hidden()), "{what}: {kind:?}");
                let is_inside = kind.sent == Sent::Messages || kind.exposed_ms <= kind.busy_ms * 1.000_001;
                assert!(is_inside, "{what}: {kind:?}");
            }
        }
    }
    // The plans are those of language models.
    let others = [Sent::TensorAndContext, Sent::Statistics];
    let missing: Vec<Sent> = Sent::ALL.into_iter().filter(|sent| !seen.contains(sent)).collect();
    assert!(missing.iter().all(|sent| others.contains(sent)), "{missing:?}");
}

/// The traffic of all kinds over a link level takes no longer than the step, however slow the link is.
#[test]
fn no_link_carries_more_in_a_step_than_it_can() {
    let mut waited_together = 0;
    for (name, settings) in plans() {
        for slowness in (0..20).map(|power| 1.3_f64.powi(power)) {
            let mut cluster = Cluster::preset(name).unwrap();
            cluster.software = lockstep_planner::cluster::Software::Lockstep;
            cluster.links.iter_mut().for_each(|link| link.gb_per_s /= slowness);
            let links = cluster.links.clone();
            let (found, details) = detailed(&settings, cluster);
            waited_together += usize::from(details.traffic.shared_ms > 0.0);
            for (level, link) in links.iter().enumerate() {
                let bytes: f64 = details.traffic.kinds.iter().map(|kind| kind.bytes[level]).sum();
                let ms = bytes / (link.gb_per_s * 1e9) * 1e3;
                let what = format!("{settings:?} on {name}, {} {slowness} times as slow", link.name);
                assert!(ms <= found.step.step_ms, "{what}: {ms} ms in a step of {}", found.step.step_ms);
            }
        }
    }
    assert!(waited_together > 0, "nothing has shared a link");
}

/// Gradients of `P` parameters in f32 are all-reduced over a ring of eight ranks; nothing else is sent. The tied embedding is
/// counted twice, as the step counts it.
#[test]
fn replicas_send_what_a_ring_of_them_does() {
    let settings = [&DENSE[..], &["parallel.data_parallel_replicate=8"]].concat();
    let (_, details) = detailed(&settings, Cluster::preset("dgx-a100").unwrap());
    let [gradients] = &details.traffic.kinds[..] else { panic!("{:?}", details.traffic) };
    let parameters = 124_439_808.0 + 50_257.0 * 768.0;
    assert_eq!(gradients.sent, Sent::Gradients);
    assert_near(gradients.total_bytes(), 2.0 * 7.0 / 8.0 * 4.0 * parameters, "bytes");
    assert_eq!((gradients.bytes[0], gradients.ranks), (gradients.total_bytes(), 8));
}

#[test]
fn no_more_is_in_use_than_is_booked_and_a_rank_by_itself_comes_to_it() {
    for (name, settings) in plans() {
        let mut cluster = Cluster::preset(name).unwrap();
        cluster.software = lockstep_planner::cluster::Software::Lockstep;
        let (found, details) = detailed(&settings, cluster);
        assert_eq!(details.memory.len(), found.plan.mesh.pipeline);
        for (rank, (curve, memory)) in details.memory.iter().zip(&found.memory).enumerate() {
            let what = format!("{settings:?}, pipeline rank {rank}");
            let (peak_ms, peak_bytes) = curve.peak();
            let activations = memory[MemoryCategory::Activations];
            assert_eq!(curve.booked_bytes, memory.total(), "{what}");
            assert_eq!(curve.standing_bytes, memory.total() - activations, "{what}");
            assert!(peak_bytes <= curve.booked_bytes, "{what}: {peak_bytes} of {}", curve.booked_bytes);
            let in_use = peak_bytes - curve.standing_bytes;
            // In a pipeline, slots are booked before their receive, and both halves of split backwards for each.
            let least = if found.plan.mesh.pipeline == 1 { 0.98 } else { 0.3 };
            assert!(in_use as f64 >= least * activations as f64, "{what}: {in_use} of {activations}");
            assert!(peak_ms > 0.0 && peak_ms < found.step.step_ms, "{what}: {peak_ms}");
            assert!(curve.points.last().is_some_and(|(_, bytes)| *bytes < peak_bytes), "{what}");
        }
    }
}

#[test]
fn unlike_nodes_have_a_roofline_each_with_the_units_that_are_there() {
    let mut cluster = Cluster::preset("dgx-h100").unwrap();
    cluster.nodes.push(Cluster::preset("dgx-a100").unwrap().nodes[0].clone());
    let settings = [&DENSE[..], &["parallel.pipeline_parallel=2", "parallel.tensor_parallel=4"]].concat();
    let settings = [&settings[..], &["parallel.data_parallel_replicate=2"]].concat();
    let (_, details) = detailed(&settings, cluster);
    let [first, second] = &details.rooflines[..] else { panic!("{:?}", details.rooflines) };
    assert_eq!((&first.pipeline_ranks[..], &second.pipeline_ranks[..]), (&[0][..], &[1][..]));
    assert!(first.peak > 2.0 * second.peak && first.bandwidth > second.bandwidth);
    // The output layer is in the second stage alone.
    let is_head = |point: &&lockstep_planner::Point| {
        point.shape.is_some_and(|shape| shape.rows.max(shape.columns) > 12_000)
    };
    assert_eq!(first.points.iter().filter(is_head).count(), 0, "{:?}", first.points);
    assert_eq!(second.points.iter().filter(is_head).count(), 2, "{:?}", second.points);
    for roofline in &details.rooflines {
        assert!(roofline.points.is_sorted_by(|a, b| a.seconds >= b.seconds));
        for point in &roofline.points {
            assert!(
                roofline.share_of_roof(point) <= 1.001,
                "{point:?} above the roof of {}",
                roofline.device
            );
        }
    }
}
