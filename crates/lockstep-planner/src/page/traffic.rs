//! Traffic of a rank in a step: busy time of each level of links, and exposed communication.

use lockstep_config::human;

use super::svg::{bar, colour, escaped, figure, legend, note, table, time_figure};
use crate::Evaluated;
use crate::cluster::Cluster;
use crate::predict::{Sent, StepTraffic, Traffic};

fn colour_of(sent: Sent) -> String {
    colour(sent as usize)
}

/// Draws a bar for each level of links, and a table of the traffic by kind.
pub(super) fn traffic(cluster: &Cluster, best: &Evaluated, traffic: &StepTraffic) -> String {
    let StepTraffic { pipeline_rank, kinds, shared_ms } = traffic;
    if kinds.is_empty() {
        return note("Nothing is sent.");
    }
    let names = kinds.iter().map(|kind| (kind.sent.name().to_owned(), colour_of(kind.sent)));
    let mut about = "Bars: how long each link would take at its full rate, as a share of the step. A rank's bytes are means over its group."
        .to_owned();
    if best.plan.mesh.pipeline > 1 {
        about += &format!(
            " It is pipeline rank {pipeline_rank}, which is busy longest. What is waited for messages is part of the waiting for other stages."
        );
    }
    let shared = time_figure("/traffic/shared_links_ms", *shared_ms);
    let shared = format!(
        "<p>{shared} more are waited because several of these are to go over the same links at once.</p>"
    );
    let shared = if *shared_ms > 0.0 { shared } else { String::new() };
    bars(cluster, best, kinds) + &legend(names) + &rows(cluster, kinds) + &shared + &note(&about)
}

/// Returns the levels of links with any traffic.
fn levels(cluster: &Cluster, kinds: &[Traffic]) -> Vec<usize> {
    let is_used = |level: &usize| kinds.iter().any(|kind| kind.bytes[*level] > 0.0);
    (0..cluster.links.len()).filter(is_used).collect()
}

fn bars(cluster: &Cluster, best: &Evaluated, kinds: &[Traffic]) -> String {
    let bar_of = |level: usize| {
        let link = &cluster.links[level];
        let ms = |bytes: f64| bytes / (link.gb_per_s * 1e9) * 1e3;
        let bytes: f64 = kinds.iter().map(|kind| kind.bytes[level]).sum();
        let share = ms(bytes) / best.step.step_ms.max(f64::MIN_POSITIVE);
        let piece = |kind: &Traffic| {
            let words = format!("{} {}", kind.sent.name(), human::bytes(kind.bytes[level] as u64));
            (kind.bytes[level], words, colour_of(kind.sent))
        };
        let pieces: Vec<_> = kinds.iter().filter(|kind| kind.bytes[level] > 0.0).map(piece).collect();
        let looks = format!("height:14px;margin:0;width:{:.2}%", 100.0 * share.min(1.0));
        format!(
            "<div class=\"link\"><span>{}</span><div class=\"track\">{}</div><span>{}, {} of {}</span></div>",
            escaped(&link.name),
            bar(&pieces, &looks),
            human::bytes(bytes as u64),
            human::step_time(ms(bytes)),
            human::step_time(best.step.step_ms)
        )
    };
    levels(cluster, kinds).into_iter().map(bar_of).collect()
}

fn rows(cluster: &Cluster, kinds: &[Traffic]) -> String {
    let levels = levels(cluster, kinds);
    let row = |(index, kind): (usize, &Traffic)| {
        let pointer = |key: &str| format!("/traffic/kinds/{index}/{key}");
        let mut row = vec![
            format!(
                "<i class=\"dot\" style=\"background:{}\"></i>{}",
                colour_of(kind.sent),
                escaped(kind.sent.name())
            ),
            figure(&pointer("ranks"), kind.ranks, &kind.ranks.to_string()),
        ];
        row.extend(levels.iter().map(|level| {
            let bytes = kind.bytes[*level];
            figure(&pointer(&format!("bytes/{level}")), bytes, &human::bytes(bytes as u64).to_string())
        }));
        row.push(time_figure(&pointer("busy_ms"), kind.busy_ms));
        row.push(time_figure(&pointer("exposed_ms"), kind.exposed_ms));
        row.push(figure(&pointer("hidden"), kind.hidden(), &format!("{:.0} %", kind.hidden() * 100.0)));
        row
    };
    let mut names = vec!["", "ranks"];
    names.extend(levels.iter().map(|level| cluster.links[*level].name.as_str()));
    names.extend(["takes", "waited for", "hidden"]);
    table(&names, kinds.iter().enumerate().map(row))
}
