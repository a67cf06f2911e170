//! Log events on standard error: `LOCKSTEP_LOG` filters them, `--log-format` sets their format.

use std::env::{self, VarError};

use clap::ValueEnum;
use lockstep_observe::screen::Colours;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::exit::Failure;

/// Environment variable with the filter.
const VARIABLE: &str = "LOCKSTEP_LOG";
/// Filter if the variable is not set.
const DEFAULT: &str = "warn";
/// Description of valid filters for messages.
const ALLOWED: &str = "error, warn, info, debug, trace or off, or parts of the program with one of these each, as in \
                       lockstep_comm=debug,lockstep_data=trace";

/// Format of log events.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub(crate) enum LogFormat {
    /// Plain text, one line per event.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Starts the output of log events.
///
/// # Errors
/// If the filter is invalid.
pub(crate) fn start(format: LogFormat) -> Result<(), Failure> {
    let filter = match env::var(VARIABLE) {
        Ok(text) if !text.trim().is_empty() => filter(&text).map_err(|problem| {
            Failure::configuration(format!("{VARIABLE}={text}: {problem}; allowed: {ALLOWED}"))
        })?,
        Err(VarError::NotUnicode(_)) => {
            return Err(Failure::configuration(format!("{VARIABLE} is not UTF-8; allowed: {ALLOWED}")));
        }
        Ok(_) | Err(VarError::NotPresent) => EnvFilter::new(DEFAULT),
    };
    // Write errors are not logged: a reader that is gone must not cause a panic.
    let events = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(Colours::of_stderr() == Colours::Shown)
        .log_internal_errors(false);
    match format {
        LogFormat::Text => events.init(),
        LogFormat::Json => events.json().init(),
    }
    Ok(())
}

/// Parses a filter. A lone word that is not a level is refused; it would match a module that does not exist.
fn filter(text: &str) -> Result<EnvFilter, String> {
    let directives: Vec<&str> =
        text.split(',').map(str::trim).filter(|directive| !directive.is_empty()).collect();
    for directive in &directives {
        let is_level = |text: &str| text.parse::<LevelFilter>().is_ok();
        let is_part = |text: &str| text.starts_with("lockstep");
        match directive.rsplit_once('=') {
            Some((_, level)) if !is_level(level) => return Err(format!("{level:?} is not a level")),
            None if !is_level(directive) && !is_part(directive) => {
                return Err(format!("{directive:?} is neither a level nor a part of the program"));
            }
            _ => {}
        }
    }
    EnvFilter::try_new(directives.join(",")).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_level_is_refused() {
        for text in
            ["debug", "lockstep_comm=debug,lockstep_data=trace", "info,lockstep_train", "off", "WARN, "]
        {
            assert!(filter(text).is_ok(), "{text}");
        }
        for (text, part) in
            [("debgu", "\"debgu\""), ("lockstep_comm=loud", "\"loud\""), ("info,verbose", "\"verbose\"")]
        {
            assert!(filter(text).is_err_and(|problem| problem.contains(part)), "{text}");
        }
    }
}
