//! Lines on standard output and standard error. A reader that is gone changes neither the command's work nor its exit code; a
//! full disk ends it with a message. (`println!` and `eprintln!` panic in both cases.)

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use lockstep_observe::screen::{self, Colour};

use crate::advice;
use crate::exit::FAILED;

/// True in ranks that leave the words to the first one.
static IS_MUTED: AtomicBool = AtomicBool::new(false);

/// Drops everything from now on but errors: this process is a rank whose results are those of the first rank as well.
pub(crate) fn mute() {
    IS_MUTED.store(true, Ordering::Relaxed);
}

fn is_muted() -> bool {
    IS_MUTED.load(Ordering::Relaxed)
}

/// Writes one line to standard output; ends the process if that fails, unless the reader is gone.
pub(crate) fn line(text: Arguments<'_>) {
    if is_muted() {
        return;
    }
    let mut out = std::io::stdout().lock();
    let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush()) else { return };
    if error.kind() == ErrorKind::BrokenPipe {
        return;
    }
    self::error(&format!("cannot write to standard output: {error}"));
    std::process::exit(i32::from(FAILED));
}

/// Writes a piece of text to standard output at once. Errors are ignored because the reader may be gone.
pub(crate) fn piece(text: &str) {
    if is_muted() {
        return;
    }
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Prints an error on standard error, with advice if a system limit is the cause.
pub(crate) fn error(text: &str) {
    let hint = advice::hint(text).map_or(String::new(), |hint| format!("; {hint}"));
    screen::line(&screen::message("error", Colour::Red, &format!("{text}{hint}")));
}

/// Prints a warning on standard error.
pub(crate) fn warning(text: &str) {
    remark(format_args!("{}", screen::message("warning", Colour::Yellow, text)));
}

/// Prints a labelled line on standard error.
pub(crate) fn field(label: &str, text: &str) {
    remark(format_args!("{}", screen::field(label, text)));
}

/// Writes one line to standard error.
pub(crate) fn remark(text: Arguments<'_>) {
    if !is_muted() {
        screen::line(&text.to_string());
    }
}

/// `println!` through [`line()`].
macro_rules! say {
    ($($argument:tt)*) => { $crate::output::line(format_args!($($argument)*)) };
}
/// `eprintln!` through [`remark()`].
macro_rules! note {
    ($($argument:tt)*) => { $crate::output::remark(format_args!($($argument)*)) };
}
pub(crate) use {note, say};
