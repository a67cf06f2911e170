//! Lines on standard output and standard error. A reader that has gone away changes neither what the command does nor its exit
//! code; a disk that is full ends it with a message. (`println!` and `eprintln!` panic in both cases.)

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

use lockstep_observe::screen::{self, Colour};

use crate::exit::FAILED;
use crate::limits;

/// Writes one line, or ends the process.
pub(crate) fn line(text: Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush()) else { return };
    if error.kind() == ErrorKind::BrokenPipe {
        return;
    }
    self::error(&format!("cannot write to standard output: {error}"));
    std::process::exit(i32::from(FAILED));
}

/// What went wrong, on standard error.
pub(crate) fn error(text: &str) {
    let hint = limits::hint(text).map_or(String::new(), |hint| format!("; {hint}"));
    screen::line(&screen::message("error", Colour::Red, &format!("{text}{hint}")));
}

/// What goes on but not as asked, on standard error.
pub(crate) fn warning(text: &str) {
    screen::line(&screen::message("warning", Colour::Yellow, text));
}

/// A labelled line on standard error.
pub(crate) fn field(label: &str, text: &str) {
    screen::line(&screen::field(label, text));
}

/// `println!` by way of [`line()`].
macro_rules! say {
    ($($argument:tt)*) => { $crate::output::line(format_args!($($argument)*)) };
}
/// `eprintln!` that never panics.
macro_rules! note {
    ($($argument:tt)*) => { lockstep_observe::screen::line(&format!($($argument)*)) };
}
pub(crate) use {note, say};
