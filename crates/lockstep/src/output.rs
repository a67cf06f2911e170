//! Lines on standard output. A reader that has gone away ends the command quietly; a disk that is full ends it with a
//! message. (`println!` panics in both cases.)

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

use crate::exit::FAILED;

/// Writes one line, or ends the process.
pub(crate) fn line(text: Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush()) else { return };
    if error.kind() == ErrorKind::BrokenPipe {
        std::process::exit(0);
    }
    eprintln!("error: cannot write to standard output: {error}");
    std::process::exit(i32::from(FAILED));
}

/// `println!` by way of [`line()`].
macro_rules! say {
    ($($argument:tt)*) => { $crate::output::line(format_args!($($argument)*)) };
}
pub(crate) use say;
