//! A plan as one self-contained HTML page: the mesh on the machines, the step's timeline, traffic, memory over time, rooflines and
//! the ranking.
//!
//! The page draws the document of `lockstep plan --json`. Only what would be too long or too special for that document is added here.

mod memory;
mod mesh;
mod timeline;

use lockstep_config::human;
use lockstep_observe::page;
use serde_json::{Value, json};

use crate::{
    Details, Evaluated, Planner, mesh_in_words, parts, recompute_in_words, rejection_in_words,
    schedule_in_words,
};

const STYLE: &str = include_str!("../../assets/plan.css");
const SCRIPT: &str = concat!(include_str!("../../assets/timeline.js"), include_str!("../../assets/plan.js"));

/// The content of a page.
#[derive(Debug, Clone, Copy)]
pub struct Page<'a> {
    /// The best plan, or the one that was asked for, then the others of the ranking.
    pub ranking: &'a [&'a Evaluated],
    /// Parts of the step of the first plan.
    pub details: &'a Details,
    /// The document that the command prints with `--json`.
    pub document: &'a Value,
    /// The command that made the page.
    pub command: &'a str,
}

impl Page<'_> {
    /// Returns the page for the plans of `planner`; empty if there is no plan.
    pub fn html(&self, planner: &Planner) -> String {
        let Self { ranking, details, document, command } = *self;
        let Some(best) = ranking.first() else { return String::new() };
        let cluster = planner.cluster();
        let parameters = human::billions(planner.parameters() as f64);
        let title = format!("{} ({parameters} parameters) on {}", planner.model_name(), cluster.name);
        let data = json!({
            "title": title, "command": command, "lockstep": env!("CARGO_PKG_VERSION"), "document": document,
            "plans": ranking.iter().map(|found| words(found)).collect::<Vec<_>>(),
            "rejection": best.lacking.as_ref().map(rejection_in_words),
            "links": mesh::links(cluster, best), "mesh": mesh::mesh(cluster, best),
            "timeline": timeline::timeline(best), "memory": memory::memory(best, details),
        });
        page::Page { title: &title, style: STYLE, script: SCRIPT, data: &data }.html()
    }
}

/// Returns the names of a plan's choices and of the parts of its step.
fn words(found: &Evaluated) -> Value {
    let plan = &found.plan;
    json!({
        "mesh": mesh_in_words(&plan.mesh), "schedule": schedule_in_words(plan), "recompute": recompute_in_words(plan),
        "parts": parts(&found.step).map(|part| [part.key, part.name]).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use lockstep_config::RunConfig;
    use serde_json::{Value, json};

    use super::Page;
    use crate::cluster::Cluster;
    use crate::{Objective, Planner};

    const COMMAND: &str = "lockstep plan --model '<i>&'";

    fn page_of(settings: &[&str], mut cluster: Cluster, name: &str) -> String {
        name.clone_into(&mut cluster.name);
        let config = RunConfig::parse("", "a test", settings).unwrap();
        let mut planner = Planner::new(config, cluster, Objective::Time).unwrap();
        let best = planner.of_run().unwrap();
        let details = planner.details(&best).unwrap();
        let document = json!({ "ranking": [{ "step_ms": best.step.step_ms }] });
        Page { ranking: &[&best], details: &details, document: &document, command: COMMAND }.html(&planner)
    }

    /// Returns the data that the page's script draws.
    fn data(page: &str) -> Value {
        let (_, rest) = page.split_once("id=\"data\">").unwrap();
        serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
    }

    #[test]
    fn a_page_needs_nothing_else_and_has_all_that_it_draws() {
        let settings = [
            "model.preset=gpt2-124m",
            "train.global_batch=32",
            "train.seq_len=512",
            "train.precision=bf16",
            "parallel.pipeline_parallel=4",
            "parallel.tensor_parallel=2",
        ];
        let name = "</script><b>&\"machines";
        for (settings, pipeline, ranks) in [(&settings[..], 4, 8), (&settings[..4], 1, 1)] {
            let page = page_of(settings, Cluster::preset("dgx-a100").unwrap(), name);
            // The name of a namespace is no link.
            let links = page.replace("http://www.w3.org/2000/svg", "");
            assert!(
                !["http", "src=", "href=", "url(", "@import"].iter().any(|link| links.contains(link)),
                "a link"
            );
            assert!(!page.contains("<b>") && page.contains("<title>gpt2-124m ("), "a name");
            let data = data(&page);
            assert!(data["title"].as_str().unwrap().ends_with(name), "{}", data["title"]);
            assert_eq!(data["command"], COMMAND);
            assert!(data["document"]["ranking"][0]["step_ms"].as_f64() > Some(0.0), "{}", data["document"]);
            assert_eq!(data["mesh"]["nodes"][0]["ranks"], json!([0, ranks]), "{}", data["mesh"]);
            assert_eq!(data["plans"][0]["parts"].as_array().map(Vec::len), Some(5), "{}", data["plans"]);
            let rows = data["timeline"]["rows"].as_array().unwrap();
            assert_eq!(rows.len(), pipeline, "a row for each pipeline rank");
            assert!(rows.iter().all(|row| !row["passes"].as_str().unwrap().is_empty()), "passes of each");
            for curve in data["memory"].as_array().unwrap() {
                let points = curve["points"].as_array().unwrap();
                assert!(
                    points.iter().all(|point| point.as_array().is_some_and(|of| of.len() > 1)),
                    "{curve}"
                );
                let begins: Vec<u64> = points.iter().map(|point| point[0].as_u64().unwrap()).collect();
                assert!(begins.len() > 4 && begins.is_sorted_by(|a, b| a < b), "{begins:?}");
            }
        }
    }

    #[test]
    fn a_plan_that_does_not_fit_says_so() {
        let settings = ["model.preset=gpt2-124m", "train.global_batch=32", "train.seq_len=512"];
        let small = |bytes: u64| {
            let mut cluster = Cluster::preset("dgx-a100").unwrap();
            cluster.nodes[0].device.memory_bytes = bytes;
            data(&page_of(&settings, cluster, "machines"))["rejection"].clone()
        };
        let (fits, lacks) = (small(80 << 30), small(1 << 30));
        assert_eq!(fits, Value::Null);
        assert!(lacks.as_str().unwrap().starts_with("does not fit: pipeline rank 0 needs"), "{lacks}");
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
        let passes = |row: &Value| row["passes"].as_str().unwrap().matches(char::is_alphabetic).count();
        let rows = data(&page)["timeline"]["rows"].as_array().unwrap().iter().map(passes).collect::<Vec<_>>();
        assert_eq!(rows, [2 * 2048; 4], "a forward and a backward of each micro-batch");
        assert!(page.len() < 300_000, "{} bytes", page.len());
    }
}
