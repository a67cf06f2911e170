//! `lockstep plan --tokens 1T`: time, device hours, price and energy of a whole training run.

use lockstep_config::human;
use lockstep_planner::Evaluated;
use lockstep_planner::cluster::Cluster;
use serde_json::{Value, json};

use crate::output::say;

const SECONDS_OF_HOUR: f64 = 3600.0;

/// A training run over so many tokens under a plan.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Training {
    tokens: f64,
    /// Hours of the steps alone.
    hours: f64,
    /// Hours with the cost of failures and saves.
    hours_with_failures: f64,
    device_hours: f64,
    dollars: Option<f64>,
    price_source: Option<String>,
    megawatt_hours: Option<f64>,
}

impl Training {
    pub(super) fn of(tokens: f64, found: &Evaluated, cluster: &Cluster) -> Self {
        let hours = tokens / found.tokens_per_s() / SECONDS_OF_HOUR;
        let share = if found.devices > 1 { found.goodput(cluster).share } else { 1.0 };
        let hours_with_failures = hours / share.max(f64::MIN_POSITIVE);
        let power = |node: &lockstep_planner::cluster::NodeKind| Some(node.kilowatts? * node.count as f64);
        let kilowatts: Option<f64> = cluster.nodes.iter().map(power).sum();
        // Nodes that a plan leaves unused are switched off.
        let used = found.devices as f64 / cluster.devices().max(1) as f64;
        Self {
            tokens,
            hours,
            hours_with_failures,
            device_hours: hours_with_failures * found.devices as f64,
            dollars: found.price_per_hour.map(|price| price * hours_with_failures),
            price_source: cluster.nodes.iter().find_map(|node| node.price_source.clone()),
            megawatt_hours: kilowatts.map(|kilowatts| kilowatts * used * hours_with_failures / 1e3),
        }
    }

    pub(super) fn print(&self) {
        let Self { tokens, hours, hours_with_failures, device_hours, dollars, price_source, megawatt_hours } =
            self;
        say!(
            "\ntraining   {} tokens take {}, with failures and saves {}",
            human::billions(*tokens),
            days(*hours),
            days(*hours_with_failures)
        );
        say!("           {} device hours", whole(*device_hours));
        if let Some(dollars) = dollars {
            let source =
                price_source.as_deref().map_or(String::new(), |source| format!(" (price: {source})"));
            say!("           ${}{source}", whole(*dollars));
        }
        if let Some(energy) = megawatt_hours {
            say!("           {} MWh at the nodes' full power, cooling not counted", energy_in_words(*energy));
        }
    }

    pub(super) fn to_json(&self) -> Value {
        let Self { tokens, hours, hours_with_failures, device_hours, dollars, price_source, megawatt_hours } =
            self;
        json!({
            "tokens": tokens, "days": hours / 24.0, "days_with_failures": hours_with_failures / 24.0,
            "device_hours": device_hours, "dollars": dollars, "price_source": price_source, "megawatt_hours": megawatt_hours,
        })
    }
}

/// Formats a number of hours; as days from two days on.
fn days(hours: f64) -> String {
    match hours {
        hours if hours < 48.0 => human::seconds(hours * SECONDS_OF_HOUR).to_string(),
        hours if hours < 2400.0 => format!("{:.1} days", hours / 24.0),
        hours => format!("{} days", whole(hours / 24.0)),
    }
}

fn whole(number: f64) -> String {
    human::thousands(number.round() as u64)
}

fn energy_in_words(megawatt_hours: f64) -> String {
    if megawatt_hours < 100.0 { format!("{megawatt_hours:.1}") } else { whole(megawatt_hours) }
}

/// Parses a number of tokens: `1T`, `300B`, `15.6T`, `2e12`.
pub(super) fn tokens(text: &str) -> Result<f64, String> {
    let (number, factor) = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text[..at], 1e3),
        Some((at, 'm' | 'M')) => (&text[..at], 1e6),
        Some((at, 'b' | 'B' | 'g' | 'G')) => (&text[..at], 1e9),
        Some((at, 't' | 'T')) => (&text[..at], 1e12),
        _ => (text, 1.0),
    };
    let tokens = number.replace([',', '_'], "").parse::<f64>().ok().map(|number| number * factor);
    tokens
        .filter(|tokens| (1.0..1e18).contains(tokens))
        .ok_or_else(|| "a number such as 300B or 1T".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_counted_in_billions_and_trillions() {
        let table = [
            ("1T", 1e12),
            ("300B", 3e11),
            ("15.6T", 15.6e12),
            ("300G", 3e11),
            ("2e12", 2e12),
            ("1_000_000", 1e6),
            ("4,000K", 4e6),
        ];
        for (text, expected) in table {
            assert_eq!(tokens(text), Ok(expected), "{text}");
        }
        for text in ["", "T", "-1T", "0", "1X", "nan", "1e30"] {
            assert!(tokens(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_days_from_two_on() {
        let table = [(1.0, "1h 00m"), (47.0, "1d 23h"), (60.0, "2.5 days"), (24_000.0, "1,000 days")];
        for (hours, text) in table {
            assert_eq!(days(hours), text);
        }
    }
}
