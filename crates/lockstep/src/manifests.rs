//! Tests that the files in `deploy/` match the program and each other: commands are accepted, and names and numbers agree.

use std::path::Path;

use clap::Parser;
use yaml_rust2::{Yaml, YamlLoader};

use crate::command::Cli;

fn read(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(file);
    std::fs::read_to_string(&path).expect("the file is there")
}

/// Returns the arguments after `start` of the `lockstep train` command in a script of `deploy/`, with values in place of its shell
/// variables.
fn command(text: &str, start: &str) -> Vec<String> {
    let (_, rest) = text.split_once(start).expect("it trains");
    let words = rest.split_whitespace().take_while(|word| *word != "||" && *word != "&&");
    let words = words.filter(|word| *word != "\\").map(|word| match word.trim_matches('"') {
        "$leader:$port" => "node1:29400".to_owned(),
        word if word.starts_with('$') => "2".to_owned(),
        word => word.to_owned(),
    });
    parsed(std::iter::once("train".to_owned()).chain(words))
}

/// Asserts that the program accepts the arguments and returns them.
fn parsed(arguments: impl Iterator<Item = String>) -> Vec<String> {
    let words: Vec<String> = std::iter::once("lockstep".to_owned()).chain(arguments).collect();
    if let Err(error) = Cli::try_parse_from(&words) {
        panic!("{words:?}\n{error}");
    }
    words
}

fn after<'w>(words: &'w [String], flag: &str) -> &'w str {
    let at = words.iter().position(|word| word == flag).expect("the flag is given");
    &words[at + 1]
}

/// User id under which the image runs.
const IMAGE_USER: i64 = 65532;

/// Name of the image that the first lines of the Dockerfile build.
fn image() -> String {
    format!("lockstep:{}", env!("CARGO_PKG_VERSION"))
}

#[test]
fn the_dockerfile_builds_the_image_that_the_manifests_name() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let dockerfile = std::fs::read_to_string(root.join("Dockerfile")).expect("the file is there");
    let line = |line: &str| dockerfile.lines().any(|found| found == line);
    assert!(dockerfile.contains(&format!("docker build -t {} .", image())));
    assert!(line(&format!("USER {IMAGE_USER}:{IMAGE_USER}")));
    assert!(line(r#"ENTRYPOINT ["/usr/local/bin/lockstep"]"#), "the manifests give arguments alone");
    let rust = std::fs::read_to_string(root.join("Cargo.toml")).expect("the file is there");
    let version = rust.lines().find_map(|line| line.strip_prefix("rust-version = ")).expect("it says so");
    assert!(dockerfile.contains(&format!("FROM rust:{}-", version.trim_matches('"'))), "{version}");
    let ignored = std::fs::read_to_string(root.join(".dockerignore")).expect("the file is there");
    assert!(ignored.lines().any(|line| line == ".git") && ignored.lines().any(|line| line == "target"));
}

/// Checks the Job whose pods meet at `leader`.
fn check_job(job: &Yaml, leader: &str) {
    let pod = &job["template"]["spec"];
    let container = &pod["containers"][0];
    let arguments = container["args"].as_vec().expect("a list");
    let words = parsed(arguments.iter().map(|word| word.as_str().expect("a text").to_owned()));
    let nodes = job["completions"].as_i64().expect("a number");
    assert_eq!(job["completionMode"].as_str(), Some("Indexed"));
    assert_eq!(job["parallelism"].as_i64(), Some(nodes), "all pods run at once");
    assert_eq!(after(&words, "--nnodes"), nodes.to_string());
    assert_eq!(after(&words, "--rdzv-endpoint"), format!("{leader}:29400"));
    assert_eq!(pod["restartPolicy"].as_str(), Some("Never"), "a policy for exit codes needs it");
    assert_eq!(container["resources"]["requests"], container["resources"]["limits"]);
    let mounted = |path: &str| {
        let mounts = container["volumeMounts"].as_vec().expect("a list");
        let mount = mounts.iter().find(|mount| mount["mountPath"].as_str() == Some(path));
        let name = &mount.unwrap_or_else(|| panic!("nothing is mounted at {path}"))["name"];
        let volumes = pod["volumes"].as_vec().expect("a list");
        volumes.iter().find(|volume| volume["name"] == *name).expect("a volume for each mount").clone()
    };
    assert!(mounted("/run/secret")["secret"]["secretName"].as_str().is_some());
    assert_eq!(after(&words, "--secret-file"), "/run/secret/secret");
    assert_eq!(container["image"].as_str(), Some(image().as_str()));
    assert!(container["command"].is_badvalue(), "the image has no shell, and its entry point is the program");
    assert_eq!(pod["securityContext"]["runAsUser"].as_i64(), Some(IMAGE_USER));
    let port = container["ports"][0]["containerPort"].as_i64().expect("a number");
    assert!(words.contains(&format!("metrics.prometheus=0.0.0.0:{port}")), "{words:?}");
    for probe in ["startupProbe", "livenessProbe"] {
        let asked = &container[probe]["httpGet"];
        assert_eq!(asked["path"].as_str(), Some("/healthz"), "{probe}");
        assert_eq!(asked["port"], container["ports"][0]["name"], "{probe}");
    }
    let failed = &job["podFailurePolicy"]["rules"][0];
    assert_eq!(failed["onExitCodes"]["containerName"], container["name"]);
}

#[test]
fn the_job_of_kubernetes_meets_where_its_service_says() {
    let documents = YamlLoader::load_from_str(&read("kubernetes/indexed-job.yaml")).unwrap();
    let [service, job] = &documents[..] else { panic!("{} documents", documents.len()) };
    let (service_name, job_name) = (&service["metadata"]["name"], &job["metadata"]["name"]);
    assert_eq!(service["spec"]["clusterIP"].as_str(), Some("None"), "the service is headless");
    assert_eq!(service["spec"]["selector"]["batch.kubernetes.io/job-name"], *job_name);
    assert_eq!(job["spec"]["template"]["spec"]["subdomain"], *service_name);
    let name = |name: &Yaml| name.as_str().expect("a name").to_owned();
    check_job(&job["spec"], &format!("{}-0.{}", name(job_name), name(service_name)));
}

#[test]
fn the_job_set_meets_at_its_first_pod() {
    let documents = YamlLoader::load_from_str(&read("kubernetes/jobset.yaml")).unwrap();
    let set = &documents[0];
    let jobs = &set["spec"]["replicatedJobs"][0];
    let name = |name: &Yaml| name.as_str().expect("a name").to_owned();
    let names =
        (name(&set["metadata"]["name"]), name(&jobs["name"]), name(&set["spec"]["network"]["subdomain"]));
    check_job(&jobs["template"]["spec"], &format!("{}-{}-0-0.{}", names.0, names.1, names.2));
}

#[test]
fn the_script_for_slurm_gives_flags_that_the_program_takes() {
    let words = command(&read("slurm.sbatch"), " train \"$@\" ");
    assert!(words.iter().any(|word| word == "--rdzv-id"), "{words:?}");
}
