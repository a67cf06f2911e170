//! What `deploy/` holds fits the program and itself: commands are ones that it takes, and the names and numbers that must agree
//! do.

use std::path::Path;

use clap::Parser;
use yaml_rust2::{Yaml, YamlLoader};

use crate::Cli;

fn read(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(file);
    std::fs::read_to_string(&path).expect("the file is there")
}

/// The words of a command after `start`, with what a shell would put in place of variables; parsed by the program.
fn command(text: &str, start: &str) -> Vec<String> {
    let (_, rest) = text.split_once(start).expect("it trains");
    let words = rest.split_whitespace().take_while(|word| *word != "||" && *word != "&&");
    let words = words.filter(|word| *word != "\\").map(|word| match word.trim_matches('"') {
        "$leader:$port" => "node1:29400".to_owned(),
        word if word.starts_with('$') => "2".to_owned(),
        word => word.to_owned(),
    });
    let words: Vec<String> = ["lockstep".to_owned(), "train".to_owned()].into_iter().chain(words).collect();
    if let Err(error) = Cli::try_parse_from(&words) {
        panic!("{words:?}\n{error}");
    }
    words
}

fn after<'w>(words: &'w [String], flag: &str) -> &'w str {
    let at = words.iter().position(|word| word == flag).expect("the flag is given");
    &words[at + 1]
}

/// What must hold of the Job whose pods meet at `leader`.
fn check_job(job: &Yaml, leader: &str) {
    let pod = &job["template"]["spec"];
    let container = &pod["containers"][0];
    let words = command(container["args"][0].as_str().expect("a text"), "exec lockstep train ");
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
    assert!(mounted("/secret")["secret"]["secretName"].as_str().is_some());
    assert!(after(&words, "--secret-file").starts_with("/run/lockstep/"));
    assert_eq!(mounted("/run/lockstep")["emptyDir"]["medium"].as_str(), Some("Memory"));
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
