//! Rules of plans: each is a function that reports violations, next to the fields that it is about.

mod alone;
mod rule;
mod with_model;

pub(super) use alone::ALONE;
pub(super) use rule::Rule;
pub(super) use with_model::{ON_RANKS, WITH_MODEL};
