//! Records a process's file-system calls with `strace`, so that no call of the program can be missed.

use std::fmt;
use std::path::Path;
use std::process::Command;

/// Traced calls: those that change files, names or descriptors, and `statx`, with which the process reports its
/// progress.
const TRACED: &str = "openat,open,creat,close,mkdir,mkdirat,write,pwrite64,writev,pwritev,pwritev2,fallocate,ftruncate,truncate,\
fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir,link,linkat,symlink,symlinkat,dup,dup2,dup3,copy_file_range,sendfile,\
splice,statx,newfstatat,lstat,stat";

/// Completed system call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) name: String,
    pub(crate) arguments: Vec<Argument>,
    pub(crate) result: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Argument {
    Bytes(Vec<u8>),
    Other(String),
}

impl Call {
    /// Returns the first path or text among the arguments.
    pub(crate) fn path(&self) -> Option<&str> {
        self.paths().next()
    }

    pub(crate) fn paths(&self) -> impl Iterator<Item = &str> {
        self.arguments.iter().filter_map(|argument| match argument {
            Argument::Bytes(bytes) => std::str::from_utf8(bytes).ok(),
            Argument::Other(_) => None,
        })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        let bytes = self.arguments.iter().find_map(|argument| match argument {
            Argument::Bytes(bytes) => Some(bytes.as_slice()),
            Argument::Other(_) => None,
        });
        bytes.unwrap_or_default()
    }

    pub(crate) fn text(&self, index: usize) -> &str {
        match self.arguments.get(index) {
            Some(Argument::Other(text)) => text,
            _ => "",
        }
    }

    pub(crate) fn number(&self, index: usize) -> Option<i64> {
        self.text(index).parse().ok()
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.name)?;
        for argument in &self.arguments {
            match argument {
                Argument::Bytes(bytes) if bytes.len() > 200 => write!(f, "{} bytes, ", bytes.len())?,
                Argument::Bytes(bytes) => write!(f, "{:?}, ", String::from_utf8_lossy(bytes))?,
                Argument::Other(text) => write!(f, "{text}, ")?,
            }
        }
        write!(f, ") = {}", self.result)
    }
}

/// Runs this test binary again with `arguments` and with the environment variable `variable` set to `root`. Returns its
/// successful calls in the order of completion; `None` if tracing is not permitted.
pub(crate) fn calls_of(root: &Path, arguments: &[&str], variable: &str) -> Option<Vec<Call>> {
    let log = root.with_extension("strace");
    let status = Command::new("strace")
        .args(["-f", "-xx", "-s", "16777216", "-e", &format!("trace={TRACED}"), "-e", "signal=none", "-o"])
        .arg(&log)
        .arg(std::env::current_exe().unwrap())
        .args(arguments)
        .env(variable, root)
        .output()
        .ok()?;
    let traced = std::fs::read_to_string(&log).unwrap_or_default();
    if !status.status.success() && traced.lines().count() < 10 {
        return None;
    }
    assert!(status.status.success(), "{status:?}");
    Some(parse(&traced))
}

/// Joins calls that strace splits into two lines, and drops calls that failed or never returned.
fn parse(text: &str) -> Vec<Call> {
    let mut begun = std::collections::HashMap::new();
    let mut calls = Vec::new();
    for line in text.lines() {
        let Some((process, rest)) = line.split_once(' ') else { continue };
        let rest = rest.trim_start();
        if let Some(first) = rest.strip_suffix(" <unfinished ...>") {
            begun.insert(process.to_owned(), first.to_owned());
            continue;
        }
        let whole = match rest.strip_prefix("<... ").and_then(|rest| rest.split_once(" resumed>")) {
            Some((_, last)) => begun.remove(process).unwrap_or_default() + last,
            None => rest.to_owned(),
        };
        calls.extend(call(&whole));
    }
    calls
}

fn call(line: &str) -> Option<Call> {
    let (name, rest) = line.split_once('(')?;
    let (arguments, result) = rest.rsplit_once(" = ")?;
    // A stat of a missing file is kept, because it reports progress.
    let is_look = name.contains("stat");
    let result = result.split(' ').next()?.parse().ok().filter(|result| *result >= 0 || is_look)?;
    let arguments = arguments.trim_end().strip_suffix(')')?;
    Some(Call { name: name.to_owned(), arguments: split(arguments), result })
}

/// Splits the arguments. Texts are written as `"\x41\x42"`; other arguments contain commas only within braces.
fn split(text: &str) -> Vec<Argument> {
    let (mut arguments, mut depth, mut current, mut quoted) = (Vec::new(), 0, String::new(), false);
    for character in text.chars() {
        match character {
            '"' => quoted = !quoted,
            '{' | '[' if !quoted => depth += 1,
            '}' | ']' if !quoted => depth -= 1,
            _ => {}
        }
        if character == ',' && depth == 0 && !quoted {
            arguments.push(argument(&std::mem::take(&mut current)));
        } else {
            current.push(character);
        }
    }
    arguments.push(argument(&current));
    arguments
}

fn argument(text: &str) -> Argument {
    let text = text.trim();
    let quoted = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    match quoted {
        Some(text) => {
            let bytes = text.split("\\x").skip(1).map(|byte| u8::from_str_radix(byte, 16).unwrap());
            Argument::Bytes(bytes.collect())
        }
        None => {
            assert!(!text.ends_with("\"..."), "strace has cut off what was written");
            Argument::Other(text.to_owned())
        }
    }
}
