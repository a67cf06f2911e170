//! Models by the names of repositories, downloaded from a hub on loopback.

use crate::hub_server::{FIRST, Fault, SECOND, Server};
use crate::workshop::{Started, Workshop};

/// A trained model on a hub, and commands that reach it.
struct Place {
    workshop: Workshop,
    server: Server,
    endpoint: String,
}

impl Place {
    fn new() -> Self {
        let workshop = Workshop::trained();
        let files =
            ["config.json", "model.safetensors"].map(|name| (name, workshop.read(&format!("hf/{name}"))));
        let server = Server::start(&files.each_ref().map(|(name, bytes)| (*name, bytes.as_slice())));
        let endpoint = server.endpoint();
        Self { workshop, server, endpoint }
    }

    fn start(&self, arguments: &[&str]) -> Started {
        let variables =
            [("HF_HUB_OFFLINE", "0"), ("HF_ENDPOINT", self.endpoint.as_str()), ("NO_PROXY", "127.0.0.1")];
        self.workshop.start_in(env!("CARGO_BIN_EXE_lockstep"), arguments, &variables)
    }
}

const GENERATE: [&str; 8] =
    ["generate", "--prompt", "a", "--max-new-tokens", "1", "--threads", "1", "--model"];

#[test]
fn commands_download_the_model_that_they_are_given() {
    let place = Place::new();
    let cache = "cache/huggingface/hub/models--org--tiny";
    let weights = || place.server.bodies("/store/").len();
    let plan = [
        "plan",
        "--model",
        "org/tiny",
        "--seq-len",
        "16",
        "--global-batch",
        "4",
        "--set",
        "parallel.data_parallel_replicate=1",
    ];
    place.start(&plan).finish().succeeds();
    assert_eq!(weights(), 0, "a plan needs no weights");
    // Two processes at once download the weights once.
    let both = [(); 2].map(|()| place.start(&[&GENERATE[..], &["org/tiny"]].concat()));
    for started in both {
        started.finish().succeeds();
    }
    assert_eq!(weights(), 1);
    assert_eq!(place.workshop.read(&format!("{cache}/refs/main")), FIRST.as_bytes());
    let fresh = ["--resume", "never", "--set", "train.steps=1", "--set", "model.from_pretrained=true"];
    place.workshop.write("named.toml", "model.path = \"hf://org/tiny\"\n[data]\ntrain = [\"text.txt\"]\n[train]\nseq_len = 16\nglobal_batch = 2\nthreads = 1\neval_every = 0\n[checkpoint]\ndir = \"named\"\n[metrics]\ndir = \"named-runs\"\n");
    let train = [&["train", "named.toml", "--nproc-per-node", "2"][..], &fresh].concat();
    place.start(&train).finish().succeeds();
    // All of it is there now.
    assert!(place.server.requests().is_empty());

    let mut changed = place.workshop.read("hf/config.json");
    changed.push(b'\n');
    place.server.commit(
        "main",
        SECOND,
        &[("config.json", &changed), ("model.safetensors", &place.workshop.read("hf/model.safetensors"))],
    );
    let fetched = place.start(&["fetch", "org/tiny"]).finish().succeeds();
    assert!(fetched.stdout.trim_end().ends_with(&format!("{cache}/snapshots/{SECOND}")), "{fetched:?}");
    assert_eq!(weights(), 0, "they have not changed");
    let offline = place.workshop.run(&[&GENERATE[..], &["org/tiny"]].concat());
    offline.succeeds();
}

#[test]
fn ranks_of_a_run_find_the_model_that_the_launcher_has_downloaded() {
    let place = Place::new();
    place.workshop.write("named.toml", "[model]\npath = \"org/tiny\"\nfrom_pretrained = true\n[data]\ntrain = [\"text.txt\"]\n[train]\nsteps = 1\nseq_len = 16\nglobal_batch = 2\nthreads = 1\neval_every = 0\n");
    place.start(&["train", "named.toml", "--nproc-per-node", "2", "--resume", "never"]).finish().succeeds();
    let requests = place.server.requests();
    let lists = requests.iter().filter(|request| request.path.contains("/api/")).count();
    assert_eq!(lists, 1, "{requests:?}");
}

#[test]
fn failed_downloads_have_the_exit_codes_of_their_causes() {
    let place = Place::new();
    let generate = |model: &str| place.start(&[&GENERATE[..], &[model]].concat()).finish();
    generate("org/none").refuses(2, &["org/none is no directory here", "no such repository"]);
    generate("org/tiny@v9").refuses(2, &["revision (v9)"]);
    place.server.fail("/store/", 9, Fault::Damage);
    generate("hf://org/tiny").fails(4, &["model.safetensors of org/tiny arrived damaged twice"]);
    let closed = [("HF_HUB_OFFLINE", "0"), ("HF_ENDPOINT", "http://127.0.0.1:9"), ("NO_PROXY", "127.0.0.1")];
    let unreachable = place.workshop.start_in(
        env!("CARGO_BIN_EXE_lockstep"),
        &[&GENERATE[..], &["org/tiny"]].concat(),
        &closed,
    );
    unreachable.finish().fails(1, &["refused", "HF_ENDPOINT"]);
}
