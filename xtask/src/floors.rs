//! Floors of the house: a crate uses only crates on floors below its own, as ARCHITECTURE.md draws them. The drawing is the rule,
//! so a crate that it lacks, or puts on the wrong floor, is an error.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use serde_json::Value;

/// Crates for tests and developers, which are on no floor.
const WITHOUT_FLOOR: [&str; 2] = ["lockstep-testkit", "xtask"];

/// Compares the dependencies of all crates with the floors of ARCHITECTURE.md; dependencies of tests do not count.
///
/// # Errors
/// If a crate uses one that is not below it, a crate has no floor, or the manifests cannot be read.
pub(crate) fn check() -> Result<(), String> {
    let text = fs::read_to_string("ARCHITECTURE.md")
        .map_err(|error| format!("cannot read ARCHITECTURE.md: {error}"))?;
    let metadata = Command::new("cargo")
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()
        .map_err(|error| format!("cannot run cargo metadata: {error}"))?;
    if !metadata.status.success() {
        return Err(format!("cargo metadata failed:\n{}", String::from_utf8_lossy(&metadata.stderr)));
    }
    let metadata: Value = serde_json::from_slice(&metadata.stdout)
        .map_err(|error| format!("cargo metadata answers with no JSON: {error}"))?;
    let problems = problems(&floors(&text), &metadata);
    if problems.is_empty() {
        println!("no crate uses one on its own floor or above");
        return Ok(());
    }
    Err(problems.join("\n"))
}

/// Returns the floor of each crate in the drawing: `floor 3  lockstep-graph  ...`; lines without a number are of the floor above
/// them. The ground is floor 0.
fn floors(text: &str) -> BTreeMap<&str, usize> {
    let mut floors = BTreeMap::new();
    let mut current = None;
    for line in text.lines().filter(|line| line.starts_with("    ")) {
        let mut words = line.split_whitespace().peekable();
        match words.peek().copied() {
            Some("floor") => current = words.nth(1).and_then(|number| number.parse().ok()),
            Some("ground") => {
                words.next();
                current = Some(0);
            }
            _ => {}
        }
        let name = words.next().filter(|name| name.starts_with("lockstep"));
        floors.extend(name.zip(current));
    }
    floors
}

/// Describes the dependencies that do not lead down.
fn problems(floors: &BTreeMap<&str, usize>, metadata: &Value) -> Vec<String> {
    let mut problems = Vec::new();
    let Some(packages) = metadata["packages"].as_array() else {
        return vec!["cargo metadata lists no packages".to_owned()];
    };
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        if WITHOUT_FLOOR.contains(&name) {
            continue;
        }
        let Some(floor) = floors.get(name) else {
            problems.push(format!("{name} has no floor in ARCHITECTURE.md"));
            continue;
        };
        let dependencies = package["dependencies"].as_array().map_or(&[][..], Vec::as_slice);
        for dependency in dependencies.iter().filter(|dependency| dependency["kind"] != "dev") {
            let other = dependency["name"].as_str().unwrap_or_default();
            if WITHOUT_FLOOR.contains(&other) {
                problems.push(format!("{name} uses {other}, which is for tests and developers alone"));
            }
            if let Some(below) = floors.get(other).filter(|below| *below >= floor) {
                problems.push(format!(
                    "{name} (floor {floor}) uses {other} (floor {below}), which is not below it"
                ));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_dependency_on_the_same_floor_or_above_is_a_problem() {
        let drawing = "text\n\n    floor 2   lockstep-a   x\n              lockstep-b   y\n    ground    lockstep-c   z\n";
        let floors = floors(drawing);
        assert_eq!(floors, BTreeMap::from([("lockstep-a", 2), ("lockstep-b", 2), ("lockstep-c", 0)]));
        let uses = |name: &str, kind: Value| json!({ "name": name, "kind": kind });
        let metadata = json!({ "packages": [
            { "name": "lockstep-a", "dependencies": [uses("lockstep-c", Value::Null), uses("serde", Value::Null)] },
            { "name": "lockstep-b", "dependencies": [uses("lockstep-a", json!("dev")), uses("lockstep-a", Value::Null)] },
            { "name": "lockstep-d", "dependencies": [] },
        ] });
        assert_eq!(
            problems(&floors, &metadata),
            [
                "lockstep-b (floor 2) uses lockstep-a (floor 2), which is not below it",
                "lockstep-d has no floor in ARCHITECTURE.md"
            ]
        );
    }
}
