//! A plan as one self-contained HTML page: the mesh on the machines, the step's timeline, traffic, memory over time, rooflines and
//! the ranking.
//!
//! Everything is drawn here, as SVG. The page's one script draws the timeline again so that a reader can zoom into it; without it
//! the page lacks nothing else. Each figure names its place in `plan --json`, and tests compare the two.

mod memory;
mod mesh;
mod roofline;
mod svg;
mod timeline;
mod traffic;

use std::fmt::Write;

use lockstep_config::human;
use lockstep_plan::Plan;

use self::svg::{bar, colour, escaped, figure, rate, share_figure, size_figure, table, time_figure};
use crate::cluster::Cluster;
use crate::{
    Details, Evaluated, Neighbour, Planner, Roofline, Searched, StepPart, mesh_in_words, parts,
    recompute_in_words, schedule_in_words,
};

const STYLE: &str = lockstep_observe::report::STYLE;
const OWN_STYLE: &str = include_str!("../../assets/plan.css");
const SCRIPT: &str = include_str!("../../assets/plan.js");

/// The content of a page.
#[derive(Debug, Clone, Copy)]
pub struct Page<'a> {
    /// The best plans, or the one that was asked for; the pictures show the first.
    pub ranking: &'a [Evaluated],
    /// Parts of the step of the first plan.
    pub details: &'a Details,
    /// Plans that differ from the first in one choice.
    pub neighbours: &'a [Neighbour],
    /// The search; `None` if the plan was given.
    pub searched: Option<&'a Searched>,
    /// The command that made the page.
    pub command: Option<&'a str>,
}

impl Page<'_> {
    /// Returns the page for the plans of `planner`; empty if there is no plan.
    pub fn html(&self, planner: &Planner) -> String {
        let Self { ranking, details, neighbours, searched, command } = *self;
        let Some(best) = ranking.first() else { return String::new() };
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
        card("The mesh on the machines", &mesh::links(cluster, best), &mesh::mesh(cluster, best));
        card("The step", &bound(best), &(stacked(best) + &timeline::timeline(best)));
        let links: Vec<&str> = cluster.links.iter().map(|link| link.name.as_str()).collect();
        card("What a rank sends", &links.join(", "), &traffic::traffic(cluster, best, &details.traffic));
        let capacity = format!("{} a rank may book", human::bytes(best.capacity_bytes));
        card("Memory of a rank over the step", &capacity, &memory::memory(best, details));
        for (number, roofline) in details.rooflines.iter().enumerate() {
            card(&title_of(roofline, details), &roofline.device, &roofline::roofline(roofline, number));
        }
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
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, \
             initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n<title>{name}</title>\n<style>\n{STYLE}{OWN_STYLE}</style>\n\
             </head>\n<body>\n<main>\n<h1>{name}</h1>\n<p>{}</p>\n<p>{}</p>\n{}{}{}<div class=\"cards\">\n{page}</div>\n</main>\n\
             <script>\n{SCRIPT}</script>\n</body>\n</html>\n",
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
        )
    }
}

/// Returns the largest part of the step and its share, in words.
fn bound(best: &Evaluated) -> String {
    let largest = parts(&best.step).max_by(|a, b| a.ms.total_cmp(&b.ms));
    largest.map_or(String::new(), |part| {
        format!("{:.0} % of it is {}", 100.0 * part.ms / best.step.step_ms.max(f64::MIN_POSITIVE), part.name)
    })
}

fn pieces(best: &Evaluated) -> Vec<(f64, String, String)> {
    let piece = |(index, part): (usize, StepPart)| {
        (part.ms, format!("{} {}", part.name, human::step_time(part.ms)), colour(index))
    };
    parts(&best.step).enumerate().map(piece).collect()
}

/// Draws the parts of the step as one bar, with their names.
fn stacked(best: &Evaluated) -> String {
    let name = |(index, StepPart { key, name, ms, .. }): (usize, StepPart)| {
        let figure = time_figure(&format!("/ranking/0/step_parts_ms/{key}"), ms);
        format!("<span><i style=\"background:{}\"></i>{name} {figure}</span>", colour(index))
    };
    let names: String = parts(&best.step).enumerate().map(name).collect();
    format!("{}<div class=\"legend\">{names}</div>", bar(&pieces(best), ""))
}

/// Returns the title of a roofline: its device, and in a mixed cluster its pipeline ranks.
fn title_of(roofline: &Roofline, details: &Details) -> String {
    let mut title = "The roofline of a micro-batch".to_owned();
    if details.rooflines.len() > 1 {
        let _ = write!(title, " on {}", roofline.device);
        if let (Some(first), Some(last)) = (roofline.pipeline_ranks.first(), roofline.pipeline_ranks.last())
            && details.memory.len() > 1
        {
            let ranks =
                if first == last { format!("rank {first}") } else { format!("ranks {first} to {last}") };
            let _ = write!(title, ": pipeline {ranks}");
        }
    }
    title
}

impl Planner {
    /// Returns the model's name and size.
    fn model_in_words(&self) -> String {
        format!("{} ({} parameters)", self.model_name(), human::billions(self.parameters() as f64))
    }
}

/// Returns the batch of a step in words.
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

/// Returns a warning if a rank would book more than it may; empty if all fit.
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

fn tiles(best: &Evaluated, cluster: &Cluster) -> String {
    let (rank, memory) = best.largest();
    let of_first = |key: &str| format!("/ranking/0/{key}");
    let flops = |key: &str, tflops: f64| figure(&of_first(key), tflops, &rate(tflops * 1e12, "FLOP/s"));
    let total = of_first(&format!("memory_by_stage/{rank}/total"));
    let mut tiles = String::new();
    let mut tile = |value: String, name: &str| {
        let _ = write!(tiles, "<div class=\"tile\"><b>{value}</b><span>{}</span></div>", escaped(name));
    };
    tile(time_figure(&of_first("step_ms"), best.step.step_ms), "a step");
    let tokens_per_s = human::count(best.tokens_per_s()).to_string();
    tile(figure(&of_first("tokens_per_s"), best.tokens_per_s(), &tokens_per_s), "tokens a second");
    tile(flops("tflops_per_device", best.tflops_per_device()), "a device, model");
    let hardware = best.hardware_tflops_per_device();
    tile(flops("hardware_tflops_per_device", hardware), "with what is computed again");
    tile(share_figure(&of_first("mfu"), best.mfu()), "MFU");
    let of_rank = match best.memory.len() {
        0 | 1 => "memory of each rank".to_owned(),
        _ => format!("most memory: pipeline rank {rank}"),
    };
    tile(size_figure(&total, memory.total() as u64), &of_rank);
    if let (Some(price), Some(tokens)) = (best.price_per_hour, best.price_per_billion_tokens()) {
        tile(figure(&of_first("price_per_hour"), price, &format!("${price:.0}")), "an hour");
        let tokens = figure(&of_first("price_per_billion_tokens"), tokens, &format!("${tokens:.0}"));
        tile(tokens, "for 10⁹ tokens");
    }
    let every = best.config.checkpoint.every;
    if every > 0 {
        let save = time_figure(&of_first("stalls_ms/of_a_save"), best.save_ms());
        tile(save, &format!("for each save, one in {every} steps"));
    }
    if best.devices > 1 {
        let goodput = best.goodput(cluster);
        let share = share_figure(&of_first("goodput/share"), Some(goodput.share));
        tile(share, &format!("lasts, with a save every {}", human::seconds(goodput.interval_s)));
    }
    format!("<div class=\"tiles\">{tiles}</div>\n")
}

fn plan_in_words(plan: &Plan) -> String {
    let schedule = match plan.schedule.kind() {
        _ if plan.mesh.pipeline == 1 => String::new(),
        Some((kind, chunks)) => {
            format!(", {} with {} on each rank", kind.name(), human::plural(chunks, "stage"))
        }
        None => format!(", {}", plan.schedule.name()),
    };
    format!(
        "{}{schedule}, ZeRO stage {}, micro-batches of {}, recompute {}",
        mesh_in_words(&plan.mesh),
        plan.zero_stage,
        plan.micro_batch.unwrap_or(1),
        recompute_in_words(plan)
    )
}

fn table_of(ranking: &[Evaluated]) -> String {
    let slowest = ranking.iter().map(|found| found.step.step_ms).fold(0.0, f64::max);
    let row = |(index, found): (usize, &Evaluated)| {
        let (plan, step) = (&found.plan, &found.step);
        let micro_batch = found.config.micro_batch();
        let of_row = |key: &str| format!("/ranking/{index}/{key}");
        let share = step.step_ms / slowest.max(f64::MIN_POSITIVE);
        let looks = format!("height:5px;margin-top:2px;width:{:.0}%", 100.0 * share);
        let part = |StepPart { key, ms, .. }| time_figure(&of_row(&format!("step_parts_ms/{key}")), ms);
        let (rank, memory) = found.largest();
        let needed = size_figure(&of_row(&format!("memory_by_stage/{rank}/total")), memory.total() as u64);
        let capacity = size_figure(&of_row("capacity_bytes"), found.capacity_bytes);
        let verdict = if found.fits { "" } else { " class=\"bad\"" };
        let mut row = vec![
            figure(&of_row("mesh"), plan.mesh, &mesh_in_words(&plan.mesh)),
            figure(&of_row("zero_stage"), plan.zero_stage, &plan.zero_stage.to_string()),
            figure(&of_row("micro_batch"), micro_batch, &micro_batch.to_string()),
            escaped(&schedule_in_words(plan).unwrap_or_else(|| "none".to_owned())),
            escaped(&recompute_in_words(plan)),
            time_figure(&of_row("step_ms"), step.step_ms) + &bar(&pieces(found), &looks),
        ];
        row.extend(parts(&found.step).take(4).map(part));
        row.push(figure(
            &of_row("tokens_per_s"),
            found.tokens_per_s(),
            &human::count(found.tokens_per_s()).to_string(),
        ));
        row.push(share_figure(&of_row("mfu"), found.mfu()));
        row.push(format!("<span{verdict}>{needed} of {capacity}</span>"));
        row
    };
    let names = [
        "mesh",
        "ZeRO",
        "micro-batch",
        "schedule",
        "recompute",
        "step",
        "work",
        "exchanges",
        "bubble",
        "gradients",
        "tokens/s",
        "MFU",
        "memory",
    ];
    table(&names, ranking.iter().enumerate().map(row))
}

fn table_of_neighbours(neighbours: &[Neighbour]) -> String {
    let row = |(index, neighbour): (usize, &Neighbour)| {
        let Neighbour { change, step_ratio, reason } = neighbour;
        let step =
            step_ratio.map_or("cannot be".to_owned(), |ratio| format!("{:+.1} %", (ratio - 1.0) * 100.0));
        let step = figure(&format!("/neighbours/{index}/step_ratio"), step_ratio, &step);
        vec![escaped(change), step, format!("<span class=\"left\">{}</span>", escaped(reason))]
    };
    table(&["change", "step", "why not"], neighbours.iter().enumerate().map(row))
}

#[cfg(test)]
mod tests {
    use crate::cluster::Cluster;

    use super::Page;
    use crate::{Objective, Planner};
    use lockstep_config::RunConfig;

    fn page_of(settings: &[&str], mut cluster: Cluster, name: &str) -> String {
        name.clone_into(&mut cluster.name);
        let config = RunConfig::parse("", "a test", settings).unwrap();
        let mut planner = Planner::new(config, cluster, Objective::Time).unwrap();
        let best = planner.of_run().unwrap();
        let details = planner.details(&best).unwrap();
        let page = Page {
            ranking: std::slice::from_ref(&best),
            details: &details,
            neighbours: &[],
            searched: None,
            command: Some("lockstep plan --model '<i>&'"),
        };
        page.html(&planner)
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
                // Some of these are prefixes of others.
                let longer = ["<polyline", "<path"].iter().filter(|_| tag == "p");
                let longer: usize = longer.map(|longer| page.matches(longer).count()).sum();
                assert_eq!(opened - longer, closed, "{tag}");
            }
            for title in [
                "The mesh on the machines",
                "The step",
                "What a rank sends",
                "Memory of a rank",
                "The roofline",
                "The best plans",
            ] {
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
        // The one rank has both cores and their bandwidth.
        for settings in [&["model.preset=baby-gpt"][..], &["model.preset=baby-gpt", "train.precision=bf16"]] {
            let config = RunConfig::parse("", "a test", settings).unwrap();
            let mut planner = Planner::new(config, Cluster::local(2, 16 << 30), Objective::Time).unwrap();
            let best = planner.of_run().unwrap();
            let [roofline] = &planner.details(&best).unwrap().rooflines[..] else {
                panic!("one kind of node")
            };
            assert_eq!(roofline.peak, best.peak_tflops * 1e12);
            for point in &roofline.points {
                let roof = roofline.roof(point);
                assert!(point.rate() <= roof * 1.001, "{point:?} above {roof:e} of {}", roofline.device);
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
        assert!(page.contains("shares of the time") && page.len() < 300_000, "{} bytes", page.len());
    }

    #[test]
    fn figures_have_the_digits_that_tell_them_apart() {
        let times = [0.25, 999.4, 5794.2, 5932.0, 12_345.0, 123_456.0].map(lockstep_config::human::step_time);
        assert_eq!(times, ["0.2 ms", "999.4 ms", "5.79 s", "5.93 s", "12.3 s", "2m 03s"]);
        let rates = [1.39e11, 4.64e14, 12.0].map(|amount| super::svg::rate(amount, "FLOP/s"));
        assert_eq!(rates, ["139 GFLOP/s", "464 TFLOP/s", "12 FLOP/s"]);
    }
}
