//! Downloads that fail: each with a message that says what to do, and nothing wrong in the cache.

use std::time::{Duration, Instant};

use lockstep_hub::{ErrorKind, Hub, HubError, ModelName, Need, Settings, Silent};

use crate::server::Fault;
use crate::{Place, TINY, expect_file};

/// Returns the message of a failed search.
fn refused(place: &Place, name: &str) -> (ErrorKind, String) {
    match place.find(name) {
        Ok(path) => panic!("{name} was found: {}", path.display()),
        Err(error) => (error.kind(), error.to_string()),
    }
}

#[test]
fn names_that_the_hub_does_not_have_are_refused_with_the_next_step() {
    for (name, fault, parts) in [
        ("org/other", None, &["no such repository", "check the name"][..]),
        ("org/tiny@v9", None, &["revision (v9)", "a branch, a tag or a commit"]),
        (
            "org/tiny",
            Some(Fault::Status(401, "X-Error-Code: RepoNotFound")),
            &["refuses access (401)", "HF_TOKEN"],
        ),
        (
            "org/tiny",
            Some(Fault::Status(401, "X-Error-Code: GatedRepo")),
            &["accept the conditions", "/org/tiny", "HF_TOKEN"],
        ),
        ("org/tiny", Some(Fault::Status(403, "X-Error-Code: GatedRepo")), &["accept the conditions"]),
        ("org/tiny", Some(Fault::Status(403, "X: y")), &["refuses access (403)"]),
        ("hf://org/tiny/q4.gguf", None, &["no GGUF file"]),
    ] {
        let place = Place::new(&TINY);
        if let Some(fault) = fault {
            place.server.fail("/api/", 9, fault);
        }
        let (kind, message) = refused(&place, name);
        assert_eq!(kind, ErrorKind::Configuration, "{message}");
        for part in parts {
            assert!(message.contains(part), "{name}: {message}");
        }
        let api = place.server.requests();
        assert_eq!(api.len(), 1, "it is not tried again: {api:?}");
    }
}

#[test]
fn gated_weights_are_refused_with_the_page_of_their_conditions() {
    let place = Place::new(&TINY);
    place.server.fail("/resolve/", 99, Fault::Status(403, "X-Error-Code: GatedRepo"));
    let error =
        place.with_token().find(&ModelName::parse("org/tiny").unwrap(), Need::Weights, &Silent).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("with the account of the token") && message.contains("/org/tiny"), "{message}");
    assert!(!message.contains("hf_secret"), "{message}");
}

#[test]
fn offline_nothing_is_sent_and_missing_files_are_named() {
    let place = Place::new(&TINY);
    let offline = || Hub::new(Settings { is_offline: true, ..place.settings() });
    let find = |need| offline().find(&ModelName::parse("org/tiny").unwrap(), need, &Silent);
    assert!(find(Need::Weights).unwrap_err().to_string().contains("missing: all of it"));
    place.hub().find(&ModelName::parse("org/tiny").unwrap(), Need::Configuration, &Silent).unwrap();
    place.server.requests();
    find(Need::Configuration).unwrap();
    let error = find(Need::Weights).unwrap_err();
    assert!(error.to_string().contains("missing: model.safetensors"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Configuration);
    assert!(place.server.requests().is_empty());
}

#[test]
fn a_file_that_is_damaged_twice_is_not_kept() {
    let place = Place::new(&TINY);
    place.server.fail("/store/", 9, Fault::Damage);
    let (kind, message) = refused(&place, "org/tiny");
    assert_eq!(kind, ErrorKind::CorruptInput);
    assert!(message.contains("model.safetensors of org/tiny arrived damaged twice"), "{message}");
    assert_eq!(place.server.bodies("/store/").len(), 2);
    assert!(!place.names("blobs").iter().any(|name| name.len() >= 64), "{:?}", place.names("blobs"));
    assert!(!place.path("refs/main").exists(), "the branch names no commit without its files");
}

#[test]
fn answers_longer_than_announced_are_refused() {
    for part in ["/store/", "config.json"] {
        let place = Place::new(&TINY);
        place.server.fail(part, 9, Fault::Excess);
        let (kind, message) = refused(&place, "org/tiny");
        assert_eq!(kind, ErrorKind::CorruptInput);
        assert!(message.contains("longer than the"), "{message}");
        assert!(!message.contains("secret"), "queries hold signatures: {message}");
    }
}

#[test]
fn hostile_lists_lead_nowhere() {
    let place = Place::new(&TINY);
    for name in ["../../../escaped.json", "/escaped.json", "..", "a\\\\b"] {
        place.server.list(name);
    }
    place.find("org/tiny").unwrap();
    assert_eq!(place.names("snapshots").len(), 1);
    for body in ["<html>", "{\"sha\": \"../../x\"}", "[]"] {
        let place = Place::new(&TINY);
        place.server.fail("/api/", 1, Fault::Body(body));
        assert_eq!(refused(&place, "org/tiny").0, ErrorKind::CorruptInput, "{body}");
    }
    let index = br#"{"weight_map": {"a": "../../../escaped.safetensors"}}"#;
    let place = Place::new(&[("config.json", b"{}"), ("model.safetensors.index.json", index)]);
    let (kind, message) = refused(&place, "org/tiny");
    assert!(kind == ErrorKind::CorruptInput && message.contains("escaped"), "{message}");
}

#[test]
fn redirects_that_lead_nowhere_are_refused() {
    for (to, part) in [("file:///etc/passwd", "no usable target"), ("/api/again", "redirects more than")] {
        let place = Place::new(&TINY);
        place.server.fail("/api/", 99, Fault::Redirect(to));
        let (_, message) = refused(&place, "org/tiny");
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn servers_that_stay_silent_or_away_are_given_up() {
    let place = Place::new(&TINY);
    place.server.fail("/api/", 99, Fault::Silence);
    let start = Instant::now();
    let settings = Settings { timeout: Duration::from_millis(100), ..place.settings() };
    let find = |settings: Settings| {
        Hub::new(settings).find(&ModelName::parse("org/tiny").unwrap(), Need::Weights, &Silent)
    };
    let error = find(settings).unwrap_err();
    assert!(matches!(error, HubError::Unreachable { attempts: 5, .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());

    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = find(Settings { endpoint: format!("http://{closed}"), ..place.settings() }).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("refused") && message.contains("HF_HUB_OFFLINE=1"), "{message}");
    assert_eq!(error.kind(), ErrorKind::Failed);

    let place = Place::new(&TINY);
    place.server.fail("/api/", 99, Fault::Status(429, "Retry-After: 9999"));
    let (_, message) = refused(&place, "org/tiny");
    assert!(message.contains("wait for 9999 seconds"), "{message}");
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let place = Place::new(&TINY);
    let file = tempfile::NamedTempFile::new().unwrap();
    let settings = Settings { cache: file.path().to_owned(), ..place.settings() };
    let error =
        Hub::new(settings).find(&ModelName::parse("org/tiny").unwrap(), Need::Weights, &Silent).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Failed);
    assert!(error.to_string().contains(file.path().to_str().unwrap()), "{error}");
}

#[test]
fn an_endpoint_that_is_no_address_is_refused() {
    let place = Place::new(&TINY);
    for endpoint in ["huggingface.co", "ftp://x", "https://user:word@host"] {
        let settings = Settings { endpoint: endpoint.to_owned(), ..place.settings() };
        let error = Hub::new(settings)
            .find(&ModelName::parse("org/tiny").unwrap(), Need::Weights, &Silent)
            .unwrap_err();
        assert!(error.to_string().contains("HF_ENDPOINT"), "{error}");
    }
    expect_file(&place.find("org/tiny").unwrap(), "config.json", b"{}");
}
