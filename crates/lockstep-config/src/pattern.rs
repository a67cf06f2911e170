//! Patterns that match parameter names, and suggestions for a pattern that matches none.

pub(crate) use lockstep_plan::describes;
use strsim::normalized_damerau_levenshtein;

/// Most names that a message lists.
const NEAR: usize = 3;

/// Returns the names most similar to `pattern`, one for each kind of parameter.
pub(crate) fn nearest<'n>(pattern: &str, names: impl Iterator<Item = &'n str>) -> Vec<&'n str> {
    let literal = pattern.split('*').max_by_key(|part| part.len()).unwrap_or_default().trim_matches('.');
    let mut ranked: Vec<(f64, &str)> = names.map(|name| (likeness(literal, name), name)).collect();
    ranked.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    // The same parameter of another layer adds no information.
    let kind = |name: &str| name.replace(|c: char| c.is_ascii_digit(), "");
    let mut near: Vec<&str> = Vec::new();
    for (_, name) in ranked {
        if near.len() < NEAR && near.iter().all(|known| kind(known) != kind(name)) {
            near.push(name);
        }
    }
    near
}

/// Returns the similarity of `literal` to the best window of as many consecutive components of a dotted name, in [0, 1].
fn likeness(literal: &str, name: &str) -> f64 {
    let components: Vec<&str> = name.split('.').collect();
    let width = literal.split('.').count().min(components.len());
    let likeness = |window: &[&str]| normalized_damerau_levenshtein(literal, &window.join("."));
    components.windows(width).map(likeness).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 5] = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    ];

    #[test]
    fn a_star_stands_for_any_characters_and_the_rest_for_itself() {
        let describing = |pattern: &str| NAMES.iter().filter(|name| describes(pattern, name)).count();
        for (pattern, expected) in [
            ("*", 5),
            ("model.*", 5),
            ("*.mlp.*", 2),
            ("model.layers.0.*", 2),
            ("*norm.weight", 1),
            ("model.norm", 0),
            ("*up_proj*weight*", 2),
            ("", 0),
        ] {
            assert_eq!(describing(pattern), expected, "{pattern}");
        }
    }

    #[test]
    fn what_was_meant_comes_first_and_once_for_all_layers() {
        for (pattern, meant) in [
            ("*.mpl.*", NAMES[2]),
            ("model.embed_token.*", NAMES[0]),
            ("*.self_atn.q_proj.*", NAMES[1]),
            ("q_prj", NAMES[1]),
        ] {
            let near = nearest(pattern, NAMES.into_iter());
            assert_eq!(near[0], meant, "for {pattern}");
            assert!(!near.contains(&NAMES[3]), "{near:?}");
        }
    }
}
