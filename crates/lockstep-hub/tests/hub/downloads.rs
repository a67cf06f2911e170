//! Downloads that end well: layout, resumed parts, retries, revisions, several processes.

use std::fs;
use std::thread;
use std::time::Duration;

use lockstep_hub::{Hub, ModelName, Need, Settings, Silent};

use crate::server::{FIRST, Fault, SECOND, etag, sha256};
use crate::{Place, TINY, WEIGHTS, Watch, expect_file};

fn tiny() -> ModelName {
    ModelName::parse("org/tiny").unwrap()
}

#[test]
fn a_model_is_downloaded_once_into_the_layout_of_huggingface_hub() {
    let place = Place::new(&TINY);
    let watch = Watch::default();
    let snapshot = place.hub().find(&tiny(), Need::Weights, &watch).unwrap();
    assert_eq!(snapshot, place.path(&format!("snapshots/{FIRST}")));
    assert_eq!(
        place.names(&format!("snapshots/{FIRST}")),
        ["config.json", "model.safetensors", "tokenizer.json"]
    );
    for (name, bytes) in &TINY[..3] {
        expect_file(&snapshot, name, bytes);
        let target = fs::read_link(snapshot.join(name)).unwrap();
        assert_eq!(target.to_str().unwrap(), format!("../../blobs/{}", etag(name, bytes)));
    }
    assert_eq!(fs::read_to_string(place.path("refs/main")).unwrap(), FIRST);
    assert_eq!(place.names("blobs").len(), 3, "{:?}", place.names("blobs"));
    let total: usize = TINY[..3].iter().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!(*watch.totals.lock().unwrap(), [("org/tiny (3 files)".to_owned(), total as u64)]);
    assert_eq!(*watch.bytes.lock().unwrap(), total as u64);
    let asked = place.server.requests();
    assert!(!asked.iter().any(|request| request.path.contains(".bin")), "{asked:?}");

    assert_eq!(place.find("org/tiny").unwrap(), snapshot);
    let offline = Hub::new(Settings { is_offline: true, ..place.settings() });
    assert_eq!(offline.find(&tiny(), Need::Weights, &Silent).unwrap(), snapshot);
    assert!(place.server.requests().is_empty(), "a complete model needs no traffic");
}

#[test]
fn configuration_comes_first_and_weights_when_they_are_needed() {
    let place = Place::new(&TINY);
    let snapshot = place.hub().find(&tiny(), Need::Configuration, &Silent).unwrap();
    assert_eq!(place.names(&format!("snapshots/{FIRST}")), ["config.json", "tokenizer.json"]);
    assert!(place.hub().cached(&tiny(), Need::Weights).is_none());
    place.server.requests();
    assert_eq!(place.find("org/tiny").unwrap(), snapshot);
    assert!(place.server.bodies("config.json").is_empty());
    expect_file(&snapshot, "model.safetensors", WEIGHTS);
}

#[test]
fn shards_follow_from_their_index() {
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}"#;
    let files: [(&str, &[u8]); 5] = [
        ("config.json", b"{}"),
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", b"one"),
        ("model-2.safetensors", b"two"),
        ("consolidated.safetensors", WEIGHTS),
    ];
    let place = Place::new(&files);
    let snapshot = place.find("org/tiny").unwrap();
    expect_file(&snapshot, "model-2.safetensors", b"two");
    assert!(!snapshot.join("consolidated.safetensors").exists());
    fs::remove_file(snapshot.join("model-1.safetensors")).unwrap();
    assert!(place.hub().cached(&tiny(), Need::Weights).is_none());
    place.find("org/tiny").unwrap();
    expect_file(&snapshot, "model-1.safetensors", b"one");
}

#[test]
fn a_gguf_file_is_found_by_its_path() {
    let place = Place::new(&[
        ("sub/q-00001-of-00002.gguf", b"one"),
        ("sub/q-00002-of-00002.gguf", b"two"),
        ("x.gguf", WEIGHTS),
    ]);
    let path = place.find("hf://org/tiny/sub/q-00001-of-00002.gguf").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"one");
    assert_eq!(fs::read(path.with_file_name("q-00002-of-00002.gguf")).unwrap(), b"two");
    assert!(!path.parent().unwrap().with_file_name("x.gguf").exists());
}

#[test]
fn a_cut_connection_is_resumed_where_it_broke() {
    let place = Place::new(&TINY);
    place.server.fail("/store/", 1, Fault::Cut(100_000));
    let snapshot = place.find("org/tiny").unwrap();
    expect_file(&snapshot, "model.safetensors", WEIGHTS);
    let ranges: Vec<Option<u64>> =
        place.server.bodies("/store/").iter().map(|request| request.range).collect();
    assert_eq!(ranges, [None, Some(100_000)]);
}

#[test]
fn a_part_of_an_earlier_process_is_continued() {
    let place = Place::new(&TINY);
    let part = place.path(&format!("blobs/{}.incomplete", sha256(WEIGHTS)));
    fs::create_dir_all(part.parent().unwrap()).unwrap();
    fs::write(&part, &WEIGHTS[..1000]).unwrap();
    let snapshot = place.find("org/tiny").unwrap();
    expect_file(&snapshot, "model.safetensors", WEIGHTS);
    assert_eq!(place.server.bodies("/store/")[0].range, Some(1000));
    assert!(!part.exists());
}

#[test]
fn a_wrong_part_and_a_server_without_ranges_start_again() {
    for (part, fault) in
        [(vec![0; 1000], None), (vec![7; 1000], Some(Fault::WholeOnly)), (vec![7; 400_000], None)]
    {
        let place = Place::new(&TINY);
        if let Some(fault) = fault {
            place.server.fail("/store/", 9, fault);
        }
        let path = place.path(&format!("blobs/{}.incomplete", sha256(WEIGHTS)));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, part).unwrap();
        expect_file(&place.find("org/tiny").unwrap(), "model.safetensors", WEIGHTS);
    }
}

#[test]
fn a_damaged_file_is_fetched_a_second_time() {
    let place = Place::new(&TINY);
    place.server.fail("/store/", 1, Fault::Damage);
    let snapshot = place.find("org/tiny").unwrap();
    expect_file(&snapshot, "model.safetensors", WEIGHTS);
    assert_eq!(place.server.bodies("/store/").len(), 2);
}

#[test]
fn busy_and_silent_servers_are_asked_again() {
    for fault in [
        Fault::Status(500, "X: y"),
        Fault::Status(503, "X: y"),
        Fault::Status(429, "Retry-After: 0"),
        Fault::Silence,
    ] {
        for part in ["/api/", "/resolve/", "/store/"] {
            let place = Place::new(&TINY);
            place.server.fail(part, 1, fault.clone());
            let watch = Watch::default();
            let snapshot = place.hub().find(&tiny(), Need::Weights, &watch);
            let snapshot = snapshot.unwrap_or_else(|error| panic!("{fault:?} of {part}: {error}"));
            expect_file(&snapshot, "model.safetensors", WEIGHTS);
            assert!(watch.notes.lock().unwrap()[0].contains("next attempt in"));
        }
    }
}

#[test]
fn the_token_goes_to_the_hub_alone() {
    let place = Place::new(&TINY);
    place.with_token().find(&tiny(), Need::Weights, &Silent).unwrap();
    let requests = place.server.requests();
    assert!(requests.iter().any(|request| request.is_of_store), "{requests:?}");
    for request in requests {
        let expected = (!request.is_of_store).then_some("Bearer hf_secret");
        assert_eq!(request.authorization.as_deref(), expected, "{}", request.path);
    }
}

#[test]
fn branches_tags_and_commits_are_revisions() {
    let place = Place::new(&TINY);
    let other: [(&str, &[u8]); 2] = [("config.json", b"{\"second\": 1}"), ("model.safetensors", b"second")];
    place.server.commit("refs/pr/1", SECOND, &other);
    let first = place.find("org/tiny").unwrap();
    let second = place.find("org/tiny@refs/pr/1").unwrap();
    expect_file(&second, "model.safetensors", b"second");
    assert_eq!(fs::read_to_string(place.path("refs/refs/pr/1")).unwrap(), SECOND);
    assert_eq!(fs::read_to_string(place.path("refs/main")).unwrap(), FIRST);
    place.server.requests();
    assert_eq!(place.find(&format!("org/tiny@{SECOND}")).unwrap(), second);
    assert_eq!(place.find("org/tiny").unwrap(), first);
    assert!(place.server.requests().is_empty(), "both are in the cache");
    let fresh = Place::new(&TINY);
    fresh.find(&format!("org/tiny@{FIRST}")).unwrap();
    assert!(fresh.names("refs").is_empty(), "a commit needs no ref");
}

#[test]
fn an_update_moves_the_branch_and_fetches_what_is_new() {
    let place = Place::new(&TINY);
    let first = place.find("org/tiny").unwrap();
    let mut changed = TINY;
    changed[0].1 = b"{\"changed\": 1}";
    place.server.commit("main", SECOND, &changed);
    place.server.requests();
    assert_eq!(place.find("org/tiny").unwrap(), first, "a model that is there does not change by itself");
    place.server.fail("config.json", 9, Fault::Status(500, "X: y"));
    assert!(place.hub().update(&tiny(), Need::Weights, &Silent).is_err());
    assert_eq!(place.find("org/tiny").unwrap(), first, "a failed update changes nothing");
    let second = loop {
        // The faults that are left are used up first.
        if let Ok(path) = place.hub().update(&tiny(), Need::Weights, &Silent) {
            break path;
        }
    };
    expect_file(&second, "config.json", b"{\"changed\": 1}");
    expect_file(&first, "config.json", b"{}");
    assert_eq!(fs::read_to_string(place.path("refs/main")).unwrap(), SECOND);
    assert_eq!(place.find("org/tiny").unwrap(), second);
    assert!(place.server.bodies("/store/").is_empty(), "the weights are the same blob");
}

#[test]
fn several_at_once_download_each_file_once() {
    let place = Place::new(&TINY);
    place.server.delay(Duration::from_millis(100));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| expect_file(&place.find("org/tiny").unwrap(), "model.safetensors", WEIGHTS));
        }
    });
    let requests = place.server.requests();
    for file in [
        "store/1111111111111111111111111111111111111111/model.safetensors",
        "resolve/1111111111111111111111111111111111111111/config.json",
    ] {
        let bodies =
            requests.iter().filter(|request| !request.is_head && request.path.contains(file)).count();
        assert_eq!(bodies, 1, "{file}");
    }
    assert!(
        !place.names("blobs").iter().any(|name| name.contains("incomplete")),
        "{:?}",
        place.names("blobs")
    );
}

#[test]
fn a_cache_of_another_program_is_read() {
    let place = Place::new(&TINY);
    let snapshot = place.path("snapshots/0123");
    fs::create_dir_all(&snapshot).unwrap();
    for (name, bytes) in [("config.json", "{}"), ("model.safetensors", "x")] {
        fs::write(snapshot.join(name), bytes).unwrap();
    }
    assert_eq!(place.find("org/tiny").unwrap(), snapshot);
    assert!(place.server.requests().is_empty());
}
