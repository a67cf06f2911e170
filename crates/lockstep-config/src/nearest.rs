//! The known name that is most similar to an unknown one.

use strsim::normalized_damerau_levenshtein;

use crate::declare::Key;
use crate::foreign_names::{Answer, FOREIGN_NAMES, NameContext};
use crate::keys::{KEYS, SECTIONS};

/// Least similarity at which a name counts as a misspelling of another.
const LEAST_LIKENESS: f64 = 0.6;

/// Returns the known `section.key` most similar to `written`, which may lack the section or have the wrong one; `None` if none is similar.
pub(crate) fn nearest_key(written: &str) -> Option<&'static str> {
    let last = written.rsplit('.').next().unwrap_or(written);
    // A right key in a wrong section counts more than a wrong key in the right one.
    let likeness = |key: &Key| {
        normalized_damerau_levenshtein(written, key.name)
            .max(0.95 * normalized_damerau_levenshtein(last, key.key()))
    };
    let best = KEYS.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    if likeness(best) >= LEAST_LIKENESS {
        return Some(best.name);
    }
    // A misspelt name of another tool.
    let of_others = FOREIGN_NAMES.iter().filter(|habit| habit.place == NameContext::Key);
    let (habit, likeness) = of_others
        .map(|habit| (habit, normalized_damerau_levenshtein(last, habit.typed)))
        .max_by(|a, b| a.1.total_cmp(&b.1))?;
    match habit.answer {
        Answer::Is(ours) if likeness >= 0.8 => Some(ours),
        _ => None,
    }
}

/// Returns the known section most similar to `written`; `None` if none is similar.
pub(crate) fn nearest_section(written: &str) -> Option<&'static str> {
    let likeness = |name: &str| normalized_damerau_levenshtein(written, name);
    let best = SECTIONS.iter().max_by(|a, b| likeness(a.name).total_cmp(&likeness(b.name)))?;
    (likeness(best.name) >= 0.5).then_some(best.name)
}

/// Returns the names of all sections, for a message.
pub(crate) fn all_sections() -> String {
    SECTIONS.iter().map(|section| format!("[{}]", section.name)).collect::<Vec<_>>().join(", ")
}

/// Returns the keys of one section, for a message.
pub(crate) fn keys_of(section: &str) -> String {
    KEYS.iter().filter(|key| key.section() == section).map(Key::key).collect::<Vec<_>>().join(", ")
}

/// Returns true if a key of `[model]` is more likely a misspelt key of ours than one of a `config.json`.
pub(crate) fn is_misspelt_model_key(written: &str) -> bool {
    KEYS.iter().filter(|key| key.section() == "model").map(Key::key).any(|key| {
        let tolerance = if key.len() > 5 { 2 } else { 1 };
        written != key && strsim::damerau_levenshtein(written, key) <= tolerance
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_or_misplaced_key_finds_the_one_that_was_meant() {
        for (written, meant) in [
            ("train.stpes", "train.steps"),
            ("train.global_batch_size", "train.global_batch"),
            ("train.weight_decay", "optimizer.weight_decay"),
            ("optimizer.lrr", "optimizer.lr"),
            ("optimizer.beta", "optimizer.betas"),
            ("metrics.directory", "metrics.dir"),
            ("schedule.warmup", "schedule.warmup_steps"),
        ] {
            assert_eq!(nearest_key(written), Some(meant), "for {written}");
        }
        for written in ["train.dataloader", "data.dataset"] {
            assert_eq!(nearest_key(written), None, "{written} is like nothing");
        }
        assert_eq!(nearest_section("optim"), Some("optimizer"));
        assert_eq!(nearest_section("checkpoints"), Some("checkpoint"));
        assert_eq!(nearest_section("wandb"), None);
    }

    #[test]
    fn keys_of_a_model_configuration_are_not_taken_for_misspellings() {
        for key in
            ["hidden_size", "num_hidden_layers", "vocab_size", "rope_theta", "n_embd", "bias", "head_dim"]
        {
            assert!(!is_misspelt_model_key(key), "{key}");
        }
        for key in ["pressett", "modeltype", "paht", "from_pretrainde"] {
            assert!(is_misspelt_model_key(key), "{key}");
        }
    }
}
