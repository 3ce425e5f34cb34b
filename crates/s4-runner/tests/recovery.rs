//! How a runner handles the state that it finds at its start, and changes that others made to its stores.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{LONG, Setup, be_the_child, values, write_checkpoint};
use s4weights::store::{CheckpointStore, SaveOptions};
use s4weights::{DType, Reader, Source, TensorSource};
use serde_json::{Value, json};
use uuid::Uuid;

#[test]
fn child() {
    be_the_child();
}

/// Saves a step without the runner, as another machine does, with the values of step `of`.
fn save_elsewhere(store: &Path, step: u64, of: u64) {
    let (url, none) = (store.to_string_lossy().into_owned(), Default::default());
    let store = CheckpointStore::open_or_create(&url, &none, Default::default()).unwrap();
    let (data, shape) = (values(of), [values(of).len() as u64 / 4]);
    let source = TensorSource::new("w", DType::Float32, &shape, &data[..]);
    store.save(step, &[source], &SaveOptions::default()).unwrap();
}

/// The step of the restored checkpoint, and the step that its values are of; `None` if there is none.
fn restored(setup: &Setup, what: Value) -> Option<(u64, u64)> {
    let answer = setup.ask("POST", "/v1/restore", Some(&what)).unwrap();
    if answer.status == 404 {
        return None;
    }
    assert_eq!(answer.status, 200, "{}", answer.text);
    let (found, none) = (answer.json(), Default::default());
    let path = found["path"].as_str().unwrap();
    let read = Reader::open(Source::from(path), none).unwrap().read("w").unwrap();
    fs::remove_file(path).unwrap();
    let of = (0..400).find(|step| read == values(*step)).expect("values of a step");
    Some((found["step"].as_u64().unwrap(), of))
}

fn is_verified(setup: &Setup, id: Uuid) {
    let state = setup.wait(id, "verified")["state"].clone();
    assert!(state == "verified" || state == "uploading", "{state}");
}

/// Waits until a checkpoint is durable, whether the journal knows it yet or not.
fn becomes_durable(setup: &Setup, id: Uuid) {
    let end = Instant::now() + LONG;
    let path = format!("/v1/submissions/{id}?state=durable&timeout_ms=60000");
    while setup.ask("GET", &path, None).unwrap().json()["state"] != "durable" {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Makes the store unreachable: accepted checkpoints are verified, and wait.
fn take_store_away(setup: &Setup) {
    fs::write(setup.store(), "").unwrap();
}

fn bring_store_back(setup: &Setup) {
    fs::remove_file(setup.store()).unwrap();
}

fn record(setup: &Setup, id: Uuid) -> PathBuf {
    setup.path("state/journal").join(format!("{id}.json"))
}

#[test]
fn what_others_saved_and_retired_counts() {
    let setup = Setup::default();
    let daemon = setup.start();
    let first = setup.save(100);
    setup.wait(first, "durable");
    assert_eq!(restored(&setup, json!({})), Some((100, 100)));
    // Another machine goes on, and saves the step again.
    save_elsewhere(&setup.store(), 200, 200);
    save_elsewhere(&setup.store(), 100, 7);
    assert_eq!(restored(&setup, json!({ "step": 100 })), Some((100, 7)));
    save_elsewhere(&setup.store(), 300, 300);
    assert_eq!(restored(&setup, json!({})), Some((300, 300)));
    let store = setup.open_store();
    let newest = store.latest().unwrap().unwrap().id();
    store.retire(&[newest], "a test").unwrap();
    assert_eq!(restored(&setup, json!({})), Some((100, 7)));
    // A checkpoint that is not durable yet is the newest.
    let last = setup.save(50);
    assert_eq!(restored(&setup, json!({})).unwrap().0, 50);
    setup.wait(last, "durable");
    daemon.stop();
}

#[test]
fn another_store_is_another_run() {
    let setup = Setup::new("drain_seconds = 1\n");
    let daemon = setup.start();
    let first = setup.save(1);
    setup.wait(first, "durable");
    daemon.stop();
    let other = setup.path("other");
    let setup = Setup { more: format!("store = {:?}\n", other.to_str().unwrap()), ..setup };
    let daemon = setup.start();
    assert_eq!(restored(&setup, json!({})), None);
    assert_eq!(restored(&setup, json!({ "step": 1 })), None);
    daemon.stop();
    // A checkpoint on its way to one store goes to no other.
    fs::remove_dir_all(&other).unwrap();
    fs::write(&other, "").unwrap();
    let daemon = setup.start();
    let open = setup.save(2);
    is_verified(&setup, open);
    daemon.signal("TERM");
    daemon.wait_until_draining();
    // The second signal: nothing is waited for.
    daemon.stop();
    let setup = Setup { more: "drain_seconds = 1\n".into(), ..setup };
    assert_eq!(setup.spawn("", |_| {}).wait().code(), Some(78));
}

#[test]
fn a_store_that_does_not_answer_is_not_an_empty_one() {
    let setup = Setup::new("drain_seconds = 1\n");
    take_store_away(&setup);
    let daemon = setup.start();
    let answer = setup.ask("POST", "/v1/restore", Some(&json!({}))).unwrap();
    assert_eq!(answer.status, 502, "{}", answer.text);
    let id = setup.save(3);
    is_verified(&setup, id);
    assert_eq!(restored(&setup, json!({})), Some((3, 3)));
    daemon.stop();
}

#[test]
fn what_the_journal_lost_becomes_durable() {
    for all in [false, true] {
        let setup = Setup::new("drain_seconds = 1\n");
        take_store_away(&setup);
        let mut daemon = setup.start();
        let ids: Vec<_> = (1..=4).map(|step| setup.save(step)).collect();
        ids.iter().for_each(|id| is_verified(&setup, *id));
        daemon.signal("KILL");
        daemon.wait();
        drop(daemon);
        if all {
            fs::remove_dir_all(setup.path("state/journal")).unwrap();
        } else {
            fs::write(record(&setup, ids[1]), "{").unwrap();
        }
        bring_store_back(&setup);
        let daemon = setup.start();
        ids.iter().for_each(|id| becomes_durable(&setup, *id));
        // A record that was put aside stays visible.
        assert_eq!(daemon.get("/healthz").status, if all { 200 } else { 503 });
        daemon.stop();
        let daemon = setup.start();
        assert_eq!(daemon.get("/healthz").status, if all { 200 } else { 503 });
        assert_eq!(restored(&setup, json!({})).unwrap().0, 4, "the newest is");
        daemon.stop();
        setup.check_store(&[1, 2, 3, 4]);
    }
}

/// Waits until the runner says what is wrong with the store.
fn says(setup: &Setup, id: Uuid, what: &str) {
    let end = Instant::now() + LONG;
    loop {
        let found = setup.wait(id, "verified");
        if found["error"].as_str().is_some_and(|e| e.contains(what)) {
            return;
        }
        assert!(Instant::now() < end, "{found}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn where_a_store_vanished_no_other_is_used() {
    let setup = Setup::new("drain_seconds = 1\n");
    let daemon = setup.start();
    let first = setup.save(1);
    setup.wait(first, "durable");
    // As if its file system were not mounted any more.
    let aside = setup.path("aside");
    fs::rename(setup.store(), &aside).unwrap();
    let second = setup.save(2);
    says(&setup, second, "is not there");
    assert_eq!(daemon.get("/readyz").status, 503);
    assert!(!daemon.stop(), "it is not durable");
    // Nor does a runner that starts before the file system is mounted create a store.
    fs::create_dir(setup.store()).unwrap();
    let daemon = setup.start();
    says(&setup, second, "is not there");
    assert_eq!(fs::read_dir(setup.store()).unwrap().count(), 0);
    // And the store of somebody else is not this one.
    save_elsewhere(&setup.store(), 9, 9);
    says(&setup, second, "it is store ");
    setup.check_store(&[9]);
    fs::remove_dir_all(setup.store()).unwrap();
    fs::rename(&aside, setup.store()).unwrap();
    setup.wait(second, "durable");
    assert!(daemon.stop());
    setup.check_store(&[1, 2]);
}

#[test]
fn checkpoints_without_records_keep_their_store() {
    for all in [false, true] {
        let setup = Setup::new("drain_seconds = 1\n");
        take_store_away(&setup);
        let daemon = setup.start();
        let id = setup.save(1);
        is_verified(&setup, id);
        daemon.stop();
        if all {
            fs::remove_dir_all(setup.path("state/journal")).unwrap();
        } else {
            fs::write(record(&setup, id), "{").unwrap();
        }
        let other = setup.path("other");
        let setup = Setup { more: format!("store = {:?}\n", other.to_str().unwrap()), ..setup };
        assert_eq!(setup.spawn("", |_| {}).wait().code(), Some(78));
        bring_store_back(&setup);
        let setup = Setup { more: String::new(), ..setup };
        let daemon = setup.start();
        becomes_durable(&setup, id);
        daemon.stop();
        setup.check_store(&[1]);
    }
}

#[test]
fn a_drive_that_was_away_for_one_start_loses_nothing() {
    let setup = Setup::new("drain_seconds = 1\n");
    take_store_away(&setup);
    let daemon = setup.start();
    let id = setup.save(1);
    is_verified(&setup, id);
    daemon.stop();
    let (drive, aside) = (setup.path("state/staging"), setup.path("aside"));
    fs::rename(&drive, &aside).unwrap();
    bring_store_back(&setup);
    let daemon = setup.start();
    assert_eq!(setup.wait(id, "durable")["state"], "failed");
    daemon.stop();
    fs::remove_dir_all(&drive).unwrap();
    fs::rename(&aside, &drive).unwrap();
    let daemon = setup.start();
    // It has failed until the local store was looked through.
    let end = Instant::now() + LONG;
    while setup.wait(id, "durable")["state"] == "failed" {
        assert!(Instant::now() < end, "it stays failed");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(setup.wait(id, "durable")["state"], "durable");
    daemon.stop();
    setup.check_store(&[1]);
}

#[test]
fn the_file_of_what_failed_stays_until_it_is_forgotten() {
    let setup = Setup::new("quota_bytes = 100000\n");
    let daemon = setup.start();
    let id = Uuid::new_v4();
    fs::write(setup.offered(id), vec![b'x'; 90_000]).unwrap();
    assert_eq!(setup.submit(id, 1).status, 200);
    assert_eq!(setup.wait(id, "durable")["state"], "failed");
    // It counts in the quota.
    let next = Uuid::new_v4();
    fs::write(setup.offered(next), vec![b'x'; 90_000]).unwrap();
    assert_eq!(setup.submit(next, 1).status, 507);
    daemon.stop();
    let daemon = setup.start();
    let file = setup.path("state/staging/queue").join(format!("{id}.s4w"));
    assert!(file.is_file());
    let forgotten = setup.ask("POST", "/v1/forget", Some(&json!({ "id": id }))).unwrap();
    assert_eq!(forgotten.status, 200, "{}", forgotten.text);
    assert!(!file.exists());
    daemon.stop();
}

#[test]
fn a_damaged_local_copy_is_said_to_be_that() {
    let setup = Setup::new("drain_seconds = 1\n");
    take_store_away(&setup);
    let daemon = setup.start();
    let id = setup.save(1);
    is_verified(&setup, id);
    for entry in fs::read_dir(setup.path("state/staging/local/ck")).unwrap() {
        let path = entry.unwrap().path().join("d-0");
        let bytes: Vec<u8> = fs::read(&path).unwrap().iter().map(|b| !b).collect();
        fs::write(&path, bytes).unwrap();
    }
    bring_store_back(&setup);
    let found = setup.wait(id, "durable");
    assert_eq!(found["state"], "failed", "{found}");
    assert!(found["error"].as_str().unwrap().contains("local copy is damaged"), "{found}");
    let next = setup.save(2);
    assert_eq!(setup.wait(next, "durable")["state"], "durable");
    assert_eq!(daemon.get("/readyz").status, 200);
    daemon.stop();
    setup.check_store(&[2]);
}

#[test]
fn one_runner_at_a_time_has_a_staging_folder() {
    let setup = Setup::default();
    let _daemon = setup.start();
    let staging = setup.path("state/staging");
    let more = format!("staging_dir = {:?}\n", staging.to_str().unwrap());
    let other = Setup::new(&more);
    assert_eq!(other.spawn("", |_| {}).wait().code(), Some(75));
}

#[test]
fn an_id_stands_for_one_file() {
    let setup = Setup::default();
    let daemon = setup.start();
    let id = setup.save(1);
    setup.wait(id, "durable");
    assert_eq!(setup.submit(id, 1).status, 200, "told twice, done once");
    write_checkpoint(&setup.offered(id), 1);
    assert_eq!(setup.submit(id, 1).status, 409, "another file");
    fs::remove_file(setup.offered(id)).unwrap();
    let other = json!({ "id": id, "step": 1, "tags": { "run": "b" } });
    assert_eq!(setup.ask("POST", "/v1/submissions", Some(&other)).unwrap().status, 409);
    daemon.stop();
}

#[test]
fn connections_that_hold_on_keep_nobody_out() {
    let setup = Setup::default();
    let daemon = setup.start();
    let mut held = vec![];
    for _ in 0..200 {
        let mut stream = TcpStream::connect(&setup.http).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        held.push(stream);
    }
    for _ in 0..10 {
        assert_eq!(daemon.get("/livez").status, 200);
    }
    daemon.stop();
}
