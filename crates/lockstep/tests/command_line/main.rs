//! The program as scripts see it: exit code, standard output, standard error and the files on disk. Every child process has a
//! time limit, and none may panic.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod bad_checkpoints;
mod bad_disks;
mod bad_models;
mod bad_runs;
mod book;
mod browser;
mod data;
mod events;
mod fine_tuning;
mod frozen_disks;
mod generation;
mod going_on;
mod habits;
mod hosts;
mod hub;
#[expect(dead_code, reason = "the tests of the hub use all of it")]
#[path = "../../../lockstep-hub/tests/hub/server.rs"]
mod hub_server;
mod images;
mod import;
mod kernel_levels;
mod launching;
mod limits;
mod machines;
mod mistakes;
mod mistakes_launch;
mod namespaces;
mod nodes;
mod pages;
mod placement;
mod plan;
mod plan_page;
mod quantized;
mod ranks;
mod recipes;
mod records;
mod restarts;
mod screen;
mod terminal;
mod verify;
mod whole_way;
mod workshop;
