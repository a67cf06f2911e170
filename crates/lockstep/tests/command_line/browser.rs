//! Pages as a browser draws them, if one is installed.

use std::process::{Command, Stdio};

use crate::workshop::Workshop;

/// Names under which a browser may be installed.
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// Returns the document of a page after its script has run; `None` without a browser. `fragment` is the part of the address after
/// the file.
///
/// # Panics
/// If the script reports a mistake.
pub(crate) fn drawn(workshop: &Workshop, file: &str, fragment: &str) -> Option<String> {
    let is_there = |browser: &&str| {
        let mut command = Command::new(browser);
        command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let Some(browser) = BROWSERS.into_iter().find(is_there) else {
        println!("skipped: {file} is not drawn, there is no chromium here");
        return None;
    };
    let profile = format!("--user-data-dir={}", workshop.path("browser").display());
    let address = format!("file://{}{fragment}", workshop.path(file).display());
    let options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"];
    let outcome =
        workshop.start(browser, &[&options[..], &[&profile, &address]].concat()).finish().succeeds();
    let mistakes: Vec<&str> = outcome.stderr.lines().filter(|line| line.contains("CONSOLE")).collect();
    assert!(mistakes.is_empty(), "{file}: {mistakes:?}");
    let main = outcome.stdout.split_once("<main").expect("a page").1.split_once("</main>").unwrap().0;
    for none in ["NaN", "undefined", "Infinity", "[object"] {
        assert!(!main.contains(none), "{file}: {none} on the page: {main}");
    }
    Some(main.to_owned())
}
