//! The README's picture: runs the demonstration and draws its output as an SVG.
//!
//! Drawn from a real run, the picture always shows what the program really does.

use std::fmt::Write;
use std::process::{Command, Stdio};
use std::{fs, io};

const COMMAND: &str = "cargo run --release -- train";
const OUT: &str = "docs/train.svg";
const FONT_SIZE: usize = 13;
const LINE_HEIGHT: usize = 18;
/// Width of a character of common monospace fonts, relative to the font size.
const ASPECT: f64 = 0.602;
const MARGIN: usize = 16;
const MAX_COLUMNS: usize = 112;

/// Runs the demonstration in an empty directory and writes its picture.
pub(crate) fn draw() -> Result<(), String> {
    let text = demonstration().map_err(|error| format!("cannot run the demonstration: {error}"))?;
    let lines: Vec<String> = std::iter::once(format!("$ {COMMAND}"))
        .chain(text.lines().map(|line| line.chars().take(MAX_COLUMNS).collect()))
        .collect();
    fs::write(OUT, svg(&lines)).map_err(|error| format!("cannot write {OUT}: {error}"))?;
    println!("wrote {OUT}");
    Ok(())
}

/// Returns the output of the demonstration: standard error, then the sample on standard output.
fn demonstration() -> io::Result<String> {
    let build = Command::new("cargo").args(["build", "--release", "--quiet"]).status()?;
    if !build.success() {
        return Err(io::Error::other("the build failed"));
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let binary = fs::canonicalize(target)?.join("release/lockstep");
    let directory = std::env::temp_dir().join(format!("lockstep-picture-{}", std::process::id()));
    fs::create_dir_all(&directory)?;
    let words = COMMAND.split_once("-- ").map_or("", |(_, words)| words).split_whitespace();
    let output = Command::new(binary).args(words).current_dir(&directory).stdin(Stdio::null()).output()?;
    fs::remove_dir_all(&directory)?;
    if !output.status.success() {
        return Err(io::Error::other(String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout))
}

/// Draws lines of a terminal as an SVG.
fn svg(lines: &[String]) -> String {
    let columns = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0);
    let width = (columns as f64 * FONT_SIZE as f64 * ASPECT).ceil() as usize + 2 * MARGIN;
    let height = lines.len() * LINE_HEIGHT + 2 * MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" role=\"img\" aria-label=\"A training run in a terminal\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#16181d\"/>\n\
         <g font-family=\"ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace\" \
         font-size=\"{FONT_SIZE}\" fill=\"#d7dae0\">\n"
    );
    for (index, line) in lines.iter().enumerate() {
        let y = MARGIN + index * LINE_HEIGHT + FONT_SIZE;
        let color = match line {
            line if line.starts_with("$ ") => " fill=\"#8fd18f\"",
            line if line.starts_with("step ") && line.contains("eval loss") => " fill=\"#e5c07b\"",
            line if line.starts_with("saved ") => " fill=\"#7f8794\"",
            _ => "",
        };
        let text = line.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        // Control characters are invalid in XML.
        let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        // Writing to a string does not fail.
        let _ = writeln!(svg, "<text x=\"{MARGIN}\" y=\"{y}\" xml:space=\"preserve\"{color}>{text}</text>");
    }
    svg + "</g>\n</svg>\n"
}
