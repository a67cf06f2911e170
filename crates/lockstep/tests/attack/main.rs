//! Attacks on whole runs, drawn from a seed: signals, kills and damage at random instants, under every kind of plan.
//!
//! A try of an attack is a function of its name and seed. `LOCKSTEP_SEEDS` is the number of tries of each attack; the default
//! takes a minute or two. `LOCKSTEP_SEED` is the first seed: `LOCKSTEP_SEED=17 LOCKSTEP_SEEDS=1 cargo test -p lockstep --test
//! attack mixed_signals` repeats try 17. Waits depend on the clock, so a seed repeats the choices, not every interleaving.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

#[path = "../command_line/workshop.rs"]
#[expect(dead_code, reason = "the tests of the command line use all of it")]
mod workshop;

#[path = "../command_line/namespaces.rs"]
mod namespaces;

mod memory;
mod network;
mod outputs;
mod plans;
mod process;
mod signals;
mod tries;
