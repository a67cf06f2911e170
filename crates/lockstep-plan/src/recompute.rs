//! Activation recomputation: the blocks that save less in their forward and recompute it in their backward.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::named_enum::named_enum;

named_enum! {
    /// Extent of activation recomputation of a block.
    #[derive(PartialOrd, Ord, Default)]
    pub enum Recompute {
        /// No recomputation: everything that the backward needs is saved.
        #[default]
        None = "none",
        /// Selective recomputation of norms, activations and dropouts, whose outputs are cheap to compute and large to save.
        Selective = "selective",
        /// Full recomputation: only the block's input is saved.
        Full = "full",
    }
}

/// Recomputation of each block of a model: one word for all, or rules by layer.
///
/// ```json
/// "selective"
/// { "default": "selective", "layers": [{ "from": 0, "to": 11, "mode": "full" }, { "every": 4, "mode": "none" }] }
/// ```
///
/// If several rules match a layer, the last one counts. Rules are few, so that a value of this type is `Copy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct RecomputeRules {
    default: Recompute,
    rules: [Option<LayerRule>; Self::MOST],
}

/// Recomputation of some layers: every `every`-th layer of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerRule {
    /// First layer of the range, counted from 0.
    #[serde(default)]
    pub from: usize,
    /// Last layer of the range; `None` for the last of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<usize>,
    /// Step between the layers; 2 takes every other layer from the first one on.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub every: usize,
    /// Recomputation of these layers.
    pub mode: Recompute,
}

fn one() -> usize {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_one(every: &usize) -> bool {
    *every == 1
}

impl LayerRule {
    fn describes(&self, layer: usize) -> bool {
        layer >= self.from
            && self.to.is_none_or(|to| layer <= to)
            && (layer - self.from).is_multiple_of(self.every)
    }
}

/// Serialized form of [`RecomputeRules`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    ForAll(Recompute),
    ByLayer(ByLayer),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ByLayer {
    #[serde(default)]
    default: Recompute,
    layers: Vec<LayerRule>,
}

/// Error in the rules of recomputation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecomputeError {
    /// There are too many rules.
    #[error("there are {found} rules; at most {} are read", RecomputeRules::MOST)]
    TooMany {
        /// Number of rules.
        found: usize,
    },
    /// A rule has `every` = 0.
    #[error("rule {rule} takes every 0th layer; 1 takes each")]
    EveryNone {
        /// Number of the rule, counted from 1.
        rule: usize,
    },
    /// The range of a rule ends before it begins.
    #[error("rule {rule} is from layer {from} to {to}; it ends before it begins")]
    Backwards {
        /// Number of the rule, counted from 1.
        rule: usize,
        /// First layer of the range.
        from: usize,
        /// Last layer of the range.
        to: usize,
    },
}

impl RecomputeRules {
    /// Maximum number of rules.
    pub const MOST: usize = 8;

    /// Creates rules, with `default` for the layers that no rule matches.
    ///
    /// # Errors
    /// If there are more than [`RecomputeRules::MOST`] rules, or if a rule has an empty range or `every` = 0.
    pub fn new(default: Recompute, rules: &[LayerRule]) -> Result<Self, RecomputeError> {
        let mut all = [None; Self::MOST];
        if rules.len() > Self::MOST {
            return Err(RecomputeError::TooMany { found: rules.len() });
        }
        for (number, (place, rule)) in all.iter_mut().zip(rules).enumerate() {
            let LayerRule { from, to, every, .. } = *rule;
            if every == 0 {
                return Err(RecomputeError::EveryNone { rule: number + 1 });
            }
            if let Some(to) = to.filter(|to| *to < from) {
                return Err(RecomputeError::Backwards { rule: number + 1, from, to });
            }
            *place = Some(*rule);
        }
        Ok(Self { default, rules: all })
    }

    /// Returns the recomputation of a layer, counted from 0.
    pub fn of(&self, layer: usize) -> Recompute {
        let rules = self.rules.iter().rev().flatten();
        rules.filter(|rule| rule.describes(layer)).map(|rule| rule.mode).next().unwrap_or(self.default)
    }

    /// Returns the rules with every layer's recomputation raised to at least `least`; `None` if that changes nothing.
    #[must_use]
    pub fn at_least(&self, least: Recompute) -> Option<Self> {
        if self.default >= least && self.rules().all(|rule| rule.mode >= least) {
            return None;
        }
        let default = self.default.max(least);
        let rules = self.rules.map(|rule| rule.map(|rule| LayerRule { mode: rule.mode.max(least), ..rule }));
        let says_anything = rules.iter().flatten().any(|rule| rule.mode != default);
        Some(Self { default, rules: if says_anything { rules } else { [None; Self::MOST] } })
    }

    /// Returns true if the default or any rule has this mode, whether or not a layer matches.
    pub fn forgets(&self, mode: Recompute) -> bool {
        self.default == mode || self.rules().any(|rule| rule.mode == mode)
    }

    /// Returns the recomputation of layers that no rule matches.
    pub fn default_mode(&self) -> Recompute {
        self.default
    }

    /// Returns the rules by layer.
    pub fn rules(&self) -> impl Iterator<Item = &LayerRule> {
        self.rules.iter().flatten()
    }
}

impl From<Recompute> for RecomputeRules {
    fn from(recompute: Recompute) -> Self {
        Self { default: recompute, rules: [None; Self::MOST] }
    }
}

impl TryFrom<Written> for RecomputeRules {
    type Error = RecomputeError;

    fn try_from(written: Written) -> Result<Self, RecomputeError> {
        match written {
            Written::ForAll(recompute) => Ok(recompute.into()),
            Written::ByLayer(ByLayer { default, layers }) => Self::new(default, &layers),
        }
    }
}

impl From<RecomputeRules> for Written {
    fn from(rules: RecomputeRules) -> Self {
        let layers: Vec<LayerRule> = rules.rules().copied().collect();
        if layers.is_empty() {
            return Self::ForAll(rules.default);
        }
        Self::ByLayer(ByLayer { default: rules.default, layers })
    }
}

/// `full`, or `selective, layers 0-11 full, every 4th from 0 on none`.
impl fmt::Display for RecomputeRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.default.name())?;
        for LayerRule { from, to, every, mode } in self.rules() {
            let end = to.map_or(" on".to_owned(), |to| format!(" to {to}"));
            match every {
                1 => write!(f, ", from layer {from}{end} {}", mode.name())?,
                every => write!(f, ", every {every} layers from {from}{end} {}", mode.name())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> RecomputeRules {
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn modes(text: &str) -> String {
        (0..8).map(|layer| rules(text).of(layer).name().chars().next().unwrap_or_default()).collect()
    }

    #[test]
    fn the_last_rule_that_describes_a_layer_counts() {
        assert_eq!(modes("\"full\""), "ffffffff");
        assert_eq!(modes(r#"{"layers": [{"every": 2, "mode": "full"}]}"#), "fnfnfnfn");
        assert_eq!(
            modes(r#"{"default": "selective", "layers": [{"from": 2, "to": 4, "mode": "full"}]}"#),
            "ssfffsss"
        );
        let both = r#"{"layers": [{"to": 5, "mode": "full"}, {"from": 1, "every": 3, "mode": "selective"}]}"#;
        assert_eq!(modes(both), "fsffsfns");
    }

    #[test]
    fn rules_are_written_as_they_were_read() {
        for text in [
            r#""selective""#,
            r#"{"default":"none","layers":[{"from":0,"every":2,"mode":"full"}]}"#,
            r#"{"default":"full","layers":[{"from":3,"to":3,"mode":"none"},{"from":5,"mode":"selective"}]}"#,
        ] {
            assert_eq!(serde_json::to_string(&rules(text)).unwrap_or_default(), text);
        }
    }

    #[test]
    fn rules_that_describe_nothing_are_refused() {
        let rule = LayerRule { from: 4, to: Some(3), every: 1, mode: Recompute::Full };
        assert_eq!(
            RecomputeRules::new(Recompute::None, &[rule]),
            Err(RecomputeError::Backwards { rule: 1, from: 4, to: 3 })
        );
        let rule = LayerRule { to: None, every: 0, ..rule };
        assert_eq!(RecomputeRules::new(Recompute::None, &[rule]), Err(RecomputeError::EveryNone { rule: 1 }));
        let rule = LayerRule { every: 1, ..rule };
        assert_eq!(
            RecomputeRules::new(Recompute::None, &[rule; 9]),
            Err(RecomputeError::TooMany { found: 9 })
        );
    }
}
