//! Formats of other tools' configurations, with the tables of their keys.

use std::sync::LazyLock;

use crate::table::{self, Row};

/// Keys of DeepSpeed's configurations.
static DEEPSPEED_KEYS: LazyLock<Vec<Row>> = LazyLock::new(|| table::read(include_str!("deepspeed/keys.tsv")));
/// Keys of Accelerate's configurations.
static ACCELERATE_KEYS: LazyLock<Vec<Row>> =
    LazyLock::new(|| table::read(include_str!("accelerate/keys.tsv")));

/// Format of a configuration, named after its tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A DeepSpeed configuration (`ds_config.json`), in JSON.
    DeepSpeed,
    /// A configuration that `accelerate config` writes (`default_config.yaml`), in YAML or JSON.
    Accelerate,
}

impl Format {
    /// Returns the format's name on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Self::DeepSpeed => "deepspeed",
            Self::Accelerate => "accelerate",
        }
    }

    /// Returns the tool's name.
    pub fn tool(self) -> &'static str {
        match self {
            Self::DeepSpeed => "DeepSpeed",
            Self::Accelerate => "Accelerate",
        }
    }

    /// Returns the manual page that lists the tool's keys.
    pub fn page(self) -> &'static str {
        match self {
            Self::DeepSpeed => "docs/coming-from-deepspeed.md",
            Self::Accelerate => "docs/coming-from-accelerate.md",
        }
    }

    /// Returns the tool's keys and their treatment.
    pub fn keys(self) -> &'static [Row] {
        match self {
            Self::DeepSpeed => &DEEPSPEED_KEYS,
            Self::Accelerate => &ACCELERATE_KEYS,
        }
    }

    /// Returns the table of the tool's keys in Markdown.
    pub fn keys_markdown(self) -> String {
        table::markdown(self.keys())
    }
}
