//! A plan on one page that needs nothing else: the mesh on the machines, the step's timeline, memory over time, the roofline and the
//! ranking. All of it is drawn here, as SVG; no script runs in the page.

mod pictures;

use std::fmt::Write;

use lockstep_plan::cluster::Cluster;
use lockstep_plan::predict::Worker;
use lockstep_plan::work::{Labor, Task};
use lockstep_plan::{PipelineSchedule, Plan};

use super::{Evaluated, Neighbour, Planner, Searched, mesh_in_words, parts, schedule_in_words};
use crate::config::ModelSource;
use crate::{Error, human};

const STYLE: &str = include_str!("../../../assets/report.css");

/// A kind of task: what it takes of a step, and how near it comes to the device's limits.
#[derive(Debug, Clone, PartialEq)]
struct Point {
    name: String,
    /// Floating-point operations for each byte that goes through memory.
    intensity: f64,
    /// Operations a second.
    rate: f64,
    /// Seconds in a micro-batch.
    seconds: f64,
}

/// The limits of what a rank computes with, and how near the work of a micro-batch comes to them.
#[derive(Debug, Clone, PartialEq)]
struct Roofline {
    /// The device; of a host with fewer ranks than cores, all cores of a rank.
    device: String,
    /// Operations a second.
    peak: f64,
    /// Bytes a second.
    bandwidth: f64,
    /// The kinds of tasks, those that take longest first.
    points: Vec<Point>,
}

/// The page of `best`, the first of `ranking`; `command` is the one that it was made with.
///
/// # Errors
/// A configuration that does not fit its model.
pub fn page(
    planner: &mut Planner,
    best: &Evaluated,
    ranking: &[Evaluated],
    neighbours: &[Neighbour],
    searched: Option<&Searched>,
    command: Option<&str>,
) -> Result<String, Error> {
    let roofline = planner.roofline(best)?;
    let cluster = planner.cluster();
    let name = escaped(&format!("{} on {}", planner.model_in_words(), cluster.name));
    let mut page = String::new();
    let mut card = |title: &str, note: &str, body: &str| {
        let _ = writeln!(
            page,
            "<section class=\"card wide\"><div class=\"head\"><h2>{}</h2><span class=\"readout\">{}</span></div>{body}</section>",
            escaped(title),
            escaped(note)
        );
    };
    let links = pictures::links(cluster, best);
    card("The mesh on the machines", &links, &pictures::mesh(cluster, best));
    card(
        "The step",
        &pictures::bound(best),
        &(pictures::stacked(&parts(&best.step)) + &pictures::timeline(best)),
    );
    let capacity = format!("{} a rank may book", human::bytes(best.capacity_bytes));
    card("Memory of a rank over the step", &capacity, &pictures::memory(best));
    card("The roofline of a micro-batch", &roofline.device, &pictures::roofline(&roofline));
    let note = searched.map_or(String::new(), |Searched { ranking, ms }| {
        format!(
            "{} plans, {} looked at, in {}",
            human::count(ranking.candidates as f64),
            human::count(ranking.valued as f64),
            human::milliseconds(*ms)
        )
    });
    card("The best plans", &note, &table_of(ranking));
    if !neighbours.is_empty() {
        card(
            "Why not otherwise",
            "each choice of the best plan made another way",
            &table_of_neighbours(neighbours),
        );
    }
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, \
         initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n<title>{name}</title>\n<style>\n{STYLE}</style>\n\
         </head>\n<body>\n<main>\n<h1>{name}</h1>\n<p>{}</p>\n<p>{}</p>\n{}{}{}<div class=\"cards\">\n{page}</div>\n</main>\n</body>\n</html>\n",
        escaped(&format!(
            "Predicted by lockstep {}: {}",
            env!("CARGO_PKG_VERSION"),
            plan_in_words(&best.plan)
        )),
        escaped(&batch_in_words(best)),
        command.map_or(String::new(), |command| format!(
            "<p class=\"small\"><code>{}</code></p>\n",
            escaped(command)
        )),
        verdict(best),
        tiles(best, cluster),
    ))
}

impl Planner {
    /// The model by its name and its size.
    fn model_in_words(&self) -> String {
        let parameters = human::count(self.model.config.parameter_count() as f64);
        let name = match self.config.model_source() {
            ModelSource::Preset(name) | ModelSource::ModelType(name) => name.to_owned(),
            ModelSource::Path(path) => path.display().to_string(),
        };
        format!("{name} ({parameters} parameters)")
    }

    /// Every kind of task of a micro-batch of a plan, and the limits of what the first rank computes with.
    fn roofline(&mut self, best: &Evaluated) -> Result<Roofline, Error> {
        let mesh = lockstep_plan::Mesh::new(best.config.degrees())?;
        let rules = best.config.parallel.recompute;
        let recording =
            self.recordings.by_layer(&best.config, &self.model, &mesh, &rules, self.cluster.software);
        // As the prediction shares out the nodes.
        let node = &self.cluster.nodes[0];
        let ranks_of_a_node = best.devices.div_ceil(self.cluster.node_count().max(1));
        let device = node.device_of(ranks_of_a_node.min(node.devices));
        let worker = Worker { device, style: self.cluster.software.style(), dtype: recording.work.dtype };
        let mut points: Vec<(Point, f64, f64)> = Vec::new();
        for unit in 0..recording.work.units() {
            let unit = recording.work.unit(unit);
            for task in unit.forward.iter().chain(&unit.backward) {
                let Some((name, flops)) = told(task) else { continue };
                let (seconds, bytes) = (worker.seconds(task), task.bytes as f64);
                match points.iter_mut().find(|(point, ..)| point.name == name) {
                    Some((point, sum, moved)) => {
                        point.seconds += seconds;
                        *sum += flops;
                        *moved += bytes;
                    }
                    None => points.push((Point { name, intensity: 0.0, rate: 0.0, seconds }, flops, bytes)),
                }
            }
        }
        let finished = |(point, flops, bytes): (Point, f64, f64)| Point {
            intensity: flops / bytes.max(1.0),
            rate: flops / point.seconds.max(f64::MIN_POSITIVE),
            ..point
        };
        let mut points: Vec<Point> = points.into_iter().map(finished).collect();
        points.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let device = &worker.device;
        let cores = node.devices / ranks_of_a_node.clamp(1, node.devices.max(1));
        Ok(Roofline {
            device: if node.device.is_host && cores > 1 {
                format!("{}, {}", device.name, human::plural(cores, "core"))
            } else {
                device.name.clone()
            },
            peak: device.peak_flops(worker.dtype).unwrap_or(best.peak_tflops * 1e12),
            bandwidth: device.memory_gb_per_s * 1e9,
            points,
        })
    }
}

/// What the roofline calls a task, and its operations; none of an exchange.
fn told(task: &Task) -> Option<(String, f64)> {
    let vector = task.vector_flops as f64;
    match task.labor {
        Labor::Product(product) => {
            Some((format!("{} {}", task.name, task.pass.name()), product.flops() as f64 + vector))
        }
        Labor::Attention(attention) => {
            Some((format!("{} {}", task.name, task.pass.name()), attention.flops as f64 + vector))
        }
        Labor::Stream => Some((task.name.to_owned(), vector)),
        Labor::Exchange(_) => None,
    }
}

/// What a step reads.
fn batch_in_words(best: &Evaluated) -> String {
    let train = &best.config.train;
    format!(
        "{} of {} in a step, in {}, on {}",
        human::plural(train.global_batch, "sequence"),
        human::plural(train.seq_len, "token"),
        train.precision.word(),
        human::plural(best.devices, if best.devices == 1 { "rank" } else { "device" })
    )
}

/// Says so where a rank would book more than it may; nothing where all fit.
fn verdict(best: &Evaluated) -> String {
    if best.fits {
        return String::new();
    }
    let (rank, memory) = best.largest();
    let words = format!(
        "Does not fit: pipeline rank {rank} needs {} of {}.",
        human::bytes(memory.total() as u64),
        human::bytes(best.capacity_bytes)
    );
    format!("<p class=\"bad\"><b>{}</b></p>\n", escaped(&words))
}

/// A time with as many digits as tell plans apart.
fn time(ms: f64) -> String {
    match ms {
        ms if ms.abs() < 1000.0 => human::milliseconds(ms),
        ms if ms.abs() < 99_950.0 => format!("{:.*} s", if ms < 9995.0 { 2 } else { 1 }, ms / 1e3),
        ms => human::milliseconds(ms),
    }
}

/// So many of a unit, its prefix before it: `139 GFLOP/s`.
fn rate(amount: f64, unit: &str) -> String {
    let number = human::count(amount).to_string();
    let digits = number.trim_end_matches(char::is_alphabetic);
    format!("{digits} {}{unit}", &number[digits.len()..])
}

fn tiles(best: &Evaluated, cluster: &Cluster) -> String {
    let (rank, memory) = best.largest();
    let mut tiles = vec![
        (time(best.step.step_ms), "a step".to_owned()),
        (human::count(best.tokens_per_s()).to_string(), "tokens a second".to_owned()),
        (rate(best.tflops_per_device() * 1e12, "FLOP/s"), "a device, model".to_owned()),
        (rate(best.hardware_tflops_per_device() * 1e12, "FLOP/s"), "with what is computed again".to_owned()),
        (best.mfu().map_or("?".to_owned(), |mfu| format!("{:.1} %", mfu * 100.0)), "MFU".to_owned()),
        (
            human::bytes(memory.total() as u64).to_string(),
            match best.memory.len() {
                0 | 1 => "memory of each rank".to_owned(),
                _ => format!("most memory: pipeline rank {rank}"),
            },
        ),
    ];
    if let (Some(price), Some(tokens)) = (best.price_per_hour, best.price_per_billion_tokens()) {
        tiles.push((format!("${price:.0}"), "an hour".to_owned()));
        tiles.push((format!("${tokens:.0}"), "for 10⁹ tokens".to_owned()));
    }
    if best.devices > 1 {
        let goodput = best.goodput(cluster);
        tiles.push((
            format!("{:.1} %", goodput.share * 100.0),
            format!("lasts, with a save every {}", human::seconds(goodput.interval_s)),
        ));
    }
    let tile = |(value, name): &(String, String)| {
        format!("<div class=\"tile\"><b>{}</b><span>{}</span></div>", escaped(value), escaped(name))
    };
    format!("<div class=\"tiles\">{}</div>\n", tiles.iter().map(tile).collect::<String>())
}

fn plan_in_words(plan: &Plan) -> String {
    let schedule = match &plan.schedule {
        _ if plan.mesh.pipeline == 1 => String::new(),
        PipelineSchedule::Published { kind, chunks } => {
            format!(", {} with {} on each rank", kind.name(), human::plural(*chunks, "stage"))
        }
        PipelineSchedule::Rows(_) => ", a schedule from a file".to_owned(),
    };
    format!(
        "{}{schedule}, ZeRO stage {}, micro-batches of {}, recompute {}",
        mesh_in_words(&plan.mesh),
        plan.zero_stage,
        plan.micro_batch,
        plan.recompute
    )
}

fn table_of(ranking: &[Evaluated]) -> String {
    let slowest = ranking.iter().map(|found| found.step.step_ms).fold(0.0, f64::max);
    let mut table = "<div class=\"scroll\"><table class=\"named\"><tr><th>mesh</th><th>ZeRO</th><th>micro-batch</th><th>schedule</th>\
                     <th>recompute</th><th>step</th><th>work</th><th>exchanges</th><th>bubble</th><th>gradients</th><th>tokens/s</th>\
                     <th>MFU</th><th>memory</th></tr>"
        .to_owned();
    for found in ranking {
        let (plan, step) = (&found.plan, &found.step);
        let schedule = schedule_in_words(plan).unwrap_or_else(|| "none".to_owned());
        let share = step.step_ms / slowest.max(f64::MIN_POSITIVE);
        let _ = write!(
            table,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{schedule}</td><td>{}</td><td><span>{}</span>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td{}>{} of {}</td></tr>",
            escaped(&mesh_in_words(&plan.mesh)),
            plan.zero_stage,
            plan.micro_batch,
            escaped(&plan.recompute.to_string()),
            time(step.step_ms),
            pictures::strip(&parts(step), share),
            time(step.work_ms),
            time(step.exchange_ms),
            time(step.bubble_ms),
            time(step.gradients_ms),
            human::count(found.tokens_per_s()),
            found.mfu().map_or("?".to_owned(), |mfu| format!("{:.1} %", mfu * 100.0)),
            if found.fits { "" } else { " class=\"bad\"" },
            human::bytes(found.largest().1.total() as u64),
            human::bytes(found.capacity_bytes),
        );
    }
    table + "</table></div>"
}

fn table_of_neighbours(neighbours: &[Neighbour]) -> String {
    let mut table = "<div class=\"scroll\"><table class=\"named\"><tr><th>change</th><th>step</th><th class=\"left\">why not</th></tr>".to_owned();
    for Neighbour { change, step_ratio, reason } in neighbours {
        let step =
            step_ratio.map_or("cannot be".to_owned(), |ratio| format!("{:+.1} %", (ratio - 1.0) * 100.0));
        let _ = write!(
            table,
            "<tr><td>{}</td><td>{step}</td><td class=\"left\">{}</td></tr>",
            escaped(change),
            escaped(reason)
        );
    }
    table + "</table></div>"
}

/// Text that stands for itself in HTML.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use crate::RunConfig;
    use crate::planner::{Objective, Planner};
    use lockstep_plan::cluster::Cluster;

    fn page_of(settings: &[&str], mut cluster: Cluster, name: &str) -> String {
        name.clone_into(&mut cluster.name);
        let config = RunConfig::parse("", "a test", settings).unwrap();
        let mut planner = Planner::new(config, cluster, Objective::Time).unwrap();
        let best = planner.of_run().unwrap();
        let command = Some("lockstep plan --model '<i>&'");
        super::page(&mut planner, &best, std::slice::from_ref(&best), &[], None, command).unwrap()
    }

    #[test]
    fn a_page_needs_nothing_else_and_shows_what_is_predicted() {
        let settings = [
            "model.preset=gpt2-124m",
            "train.global_batch=32",
            "train.seq_len=512",
            "train.precision=bf16",
            "parallel.pipeline_parallel=4",
            "parallel.tensor_parallel=2",
        ];
        for settings in [&settings[..], &settings[..4]] {
            let page = page_of(settings, Cluster::preset("dgx-a100").unwrap(), "</script><b>&\"machines");
            assert!(!page.contains("http"), "a link");
            assert!(
                !page.contains("<b>&\"machines") && page.contains("&lt;b&gt;&amp;&quot;machines"),
                "a name"
            );
            for tag in ["section", "svg", "table", "div", "p", "main"] {
                let (opened, closed) =
                    (page.matches(&format!("<{tag}")).count(), page.matches(&format!("</{tag}>")).count());
                // Of these some are longer names of others.
                let longer = if tag == "p" { page.matches("<polyline").count() } else { 0 };
                assert_eq!(opened - longer, closed, "{tag}");
            }
            for title in
                ["The mesh on the machines", "The step", "Memory of a rank", "The roofline", "The best plans"]
            {
                assert!(page.contains(title), "{title}");
            }
            assert!(!page.contains("NaN") && !page.contains("inf"), "a number that is none");
            assert!(page.contains("lockstep plan --model '&lt;i&gt;&amp;'"), "the command");
            assert!(page.contains("gpt2-124m (") && page.contains("32 sequences of 512 tokens"), "the run");
        }
    }

    #[test]
    fn a_plan_that_does_not_fit_says_so_first() {
        let settings = ["model.preset=gpt2-124m", "train.global_batch=32", "train.seq_len=512"];
        let small = |bytes: u64| {
            let mut cluster = Cluster::preset("dgx-a100").unwrap();
            cluster.nodes[0].device.memory_bytes = bytes;
            page_of(&settings, cluster, "machines")
        };
        let (fits, lacks) = (small(80 << 30), small(1 << 30));
        assert!(
            !fits.contains("Does not fit") && !fits.contains("class=\"bad\""),
            "all that is needed is there"
        );
        let (said, tiles) = (lacks.find("Does not fit: pipeline rank 0"), lacks.find("class=\"tiles\""));
        assert!(said.is_some() && said < tiles, "{said:?} before {tiles:?}");
    }

    #[test]
    fn no_point_is_above_the_roof_of_what_a_rank_has() {
        // One rank has both cores, and so the bandwidth of both.
        for settings in [&["model.preset=baby-gpt"][..], &["model.preset=baby-gpt", "train.precision=bf16"]] {
            let config = RunConfig::parse("", "a test", settings).unwrap();
            let mut planner = Planner::new(config, Cluster::local(2, 16 << 30), Objective::Time).unwrap();
            let best = planner.of_run().unwrap();
            let roofline = planner.roofline(&best).unwrap();
            assert_eq!(roofline.peak, best.peak_tflops * 1e12);
            for point in &roofline.points {
                let roof = roofline.peak.min(point.intensity * roofline.bandwidth);
                assert!(point.rate <= roof * 1.001, "{point:?} above {roof:e} of {}", roofline.device);
            }
        }
    }

    #[test]
    fn a_thousand_short_passes_stay_a_small_page() {
        let settings = [
            "model.preset=gpt2-124m",
            "train.global_batch=2048",
            "train.micro_batch=1",
            "train.seq_len=128",
            "parallel.pipeline_parallel=4",
        ];
        let page = page_of(&settings, Cluster::preset("dgx-a100").unwrap(), "machines");
        assert!(page.contains("shares of the time") && page.len() < 200_000, "{} bytes", page.len());
    }

    #[test]
    fn figures_have_the_digits_that_tell_them_apart() {
        let times = [0.25, 999.4, 5794.2, 5932.0, 12_345.0, 123_456.0].map(super::time);
        assert_eq!(times, ["0.2 ms", "999.4 ms", "5.79 s", "5.93 s", "12.3 s", "2m 03s"]);
        let rates = [1.39e11, 4.64e14, 12.0].map(|amount| super::rate(amount, "FLOP/s"));
        assert_eq!(rates, ["139 GFLOP/s", "464 TFLOP/s", "12 FLOP/s"]);
    }
}
