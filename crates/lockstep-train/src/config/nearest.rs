//! The known name that is nearest to an unknown one.

use strsim::normalized_damerau_levenshtein;

use super::declare::Key;
use super::keys::{KEYS, SECTIONS};

/// The known `section.key` nearest to what was written, which may lack the section or stand in the wrong one.
pub(super) fn nearest_key(written: &str) -> &'static str {
    let last = written.rsplit('.').next().unwrap_or(written);
    // A right key in a wrong section is nearer than a wrong key in the right one.
    let likeness = |key: &Key| {
        normalized_damerau_levenshtein(written, key.name)
            .max(0.95 * normalized_damerau_levenshtein(last, key.key()))
    };
    KEYS.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b))).map_or("", |key| key.name)
}

/// The known section nearest to what was written.
pub(super) fn nearest_section(written: &str) -> &'static str {
    let likeness = |name: &str| normalized_damerau_levenshtein(written, name);
    SECTIONS
        .iter()
        .max_by(|a, b| likeness(a.name).total_cmp(&likeness(b.name)))
        .map_or("", |section| section.name)
}

/// The names of all sections, for a message.
pub(super) fn all_sections() -> String {
    SECTIONS.iter().map(|section| format!("[{}]", section.name)).collect::<Vec<_>>().join(", ")
}

/// The keys of one section, for a message.
pub(super) fn keys_of(section: &str) -> String {
    KEYS.iter().filter(|key| key.section() == section).map(Key::key).collect::<Vec<_>>().join(", ")
}

/// Whether a key of `[model]` is more likely a misspelt key of ours than one of a `config.json`.
pub(super) fn is_misspelt_model_key(written: &str) -> bool {
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
            ("lr", "optimizer.lr"),
            ("optimizer.beta", "optimizer.betas"),
            ("metrics.directory", "metrics.dir"),
            ("schedule.warmup", "schedule.warmup_steps"),
        ] {
            assert_eq!(nearest_key(written), meant, "for {written}");
        }
        assert_eq!(nearest_section("optim"), "optimizer");
        assert_eq!(nearest_section("checkpoints"), "checkpoint");
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
