//! The program `lockstep`; see the library for its commands.

use std::process::ExitCode;

fn main() -> ExitCode {
    lockstep::command_line()
}
