//! The runner in a process of its own: what it accepts becomes durable, once, whatever happens to it.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{LONG, Setup, values, write_checkpoint};
use s4weights::store::CheckpointStore;
use s4weights::{Reader, Source};
use serde_json::json;
use uuid::Uuid;

#[test]
fn child() {
    common::be_the_child();
}

#[test]
fn what_is_accepted_becomes_durable_to_the_bit() {
    let setup = Setup::new("keep_local = 2\n");
    let daemon = setup.start();
    let ids: Vec<Uuid> = (1..=5).map(|step| setup.save(step * 10)).collect();
    for id in &ids {
        let done = setup.wait(*id, "durable");
        assert_eq!(done["state"], "durable", "{done}");
    }
    setup.check_store(&[10, 20, 30, 40, 50]);
    // Submitting again changes nothing; another step under the same id is refused.
    assert_eq!(setup.submit(ids[0], 10).json()["state"], "durable");
    assert_eq!(setup.submit(ids[0], 11).status, 409);
    assert_eq!(
        setup.ask("POST", "/v1/flush", Some(&json!({"timeout_ms": 1000}))).unwrap().text,
        r#"{"open":0}"#
    );
    let status = daemon.get("/v1/status").json();
    assert_eq!(status["last_durable"]["step"], 50);
    assert_eq!(status["ready"], true, "{status}");
    assert!(status["ratio"].as_f64().unwrap() > 1.2, "{status}");
    assert_eq!(status["checkpoints"][0]["kind"], "delta", "{status}");
    assert_eq!(daemon.get("/readyz").status, 200);
    daemon.stop();
    setup.check_store(&[10, 20, 30, 40, 50]);
    // The newest local copies stay, with their ancestors.
    let staging = setup.path("state/staging");
    assert_eq!(fs::read_dir(staging.join("queue")).unwrap().count(), 0);
    assert!(fs::read_dir(staging.join("local/ck")).unwrap().count() <= 4);
}

/// Every place in the life of a checkpoint at which the process may die.
const PLACES: [&str; 8] =
    ["taken", "accepted", "compressed", "verified", "uploaded", "attempt", "listed", "durable"];

#[test]
fn a_death_at_any_point_loses_nothing_and_lists_nothing_twice() {
    for place in PLACES {
        let setup = Setup::default();
        let mut daemon = setup.start_with(&format!("{place}:2"), |_| {});
        let mut accepted = vec![];
        for step in 1..=3 {
            let id = Uuid::new_v4();
            write_checkpoint(&setup.offered(id), step);
            // The runner may die before it answers; then the trainer submits again.
            let answer =
                setup.ask("POST", "/v1/submissions", Some(&json!({"id": id, "step": step})));
            accepted.push((id, step, answer.is_ok_and(|a| a.status == 200)));
        }
        let status = daemon.wait();
        assert!(!status.success() && status.code().is_none(), "{place}: {status}");
        drop(daemon);
        let daemon = setup.start();
        for (id, step, known) in accepted {
            if !known {
                assert_eq!(setup.submit(id, step).status, 200, "{place}");
            }
            assert_eq!(setup.wait(id, "durable")["state"], "durable", "{place}");
        }
        daemon.stop();
        setup.check_store(&[1, 2, 3]);
    }
}

#[test]
fn a_store_that_cannot_be_reached_delays_and_loses_nothing() {
    let setup = Setup::new("drain_seconds = 1\n");
    // A file where a folder should be.
    fs::write(setup.store(), "").unwrap();
    let daemon = setup.start();
    let id = setup.save(1);
    assert_eq!(setup.wait(id, "verified")["state"].as_str().map(|s| s == "failed"), Some(false));
    let end = Instant::now() + LONG;
    while setup.wait(id, "staged")["error"].is_null() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(daemon.get("/readyz").status, 503);
    assert_eq!(daemon.get("/livez").status, 200);
    let why = daemon.get("/readyz?verbose").text;
    assert!(why.contains("the store: "), "{why}");
    let metrics = daemon.get("/metrics").text;
    assert!(metrics.contains("s4w_runner_store_reachable 0"), "{metrics}");
    // A shutdown stays within its limit, and the next start goes on.
    let began = Instant::now();
    daemon.stop();
    // Its usual limit is 100 seconds.
    assert!(began.elapsed() < Duration::from_secs(60));
    let daemon = setup.start();
    let second = setup.save(2);
    fs::remove_file(setup.store()).unwrap();
    for id in [id, second] {
        assert_eq!(setup.wait(id, "durable")["state"], "durable");
    }
    daemon.wait_until_ready();
    daemon.stop();
    setup.check_store(&[1, 2]);
}

#[test]
fn a_shutdown_that_leaves_something_says_so() {
    let setup = Setup::new("drain_seconds = 1\n");
    fs::write(setup.store(), "").unwrap();
    let log = fs::File::create(setup.path("log")).unwrap();
    let mut daemon = setup.start_with("", |command| _ = command.stderr(log));
    for step in [7, 8] {
        setup.wait(setup.save(step), "verified");
    }
    daemon.signal("TERM");
    assert_eq!(daemon.wait().code(), Some(74));
    drop(daemon);
    let said = fs::read_to_string(setup.path("log")).unwrap();
    assert!(said.contains("2 of the accepted checkpoints are not durable yet: step 7 ("), "{said}");
    assert!(
        said.contains("step 8 (") && said.contains("start again with the same state folder"),
        "{said}"
    );
    // A second signal ends it immediately, with the same code.
    let setup = Setup { more: "drain_seconds = 300\n".into(), ..setup };
    let mut daemon = setup.start();
    daemon.signal("TERM");
    daemon.wait_until_draining();
    daemon.signal("INT");
    assert_eq!(daemon.wait().code(), Some(74));
    drop(daemon);
    fs::remove_file(setup.store()).unwrap();
    let setup = Setup { more: String::new(), ..setup };
    assert!(setup.start().stop(), "everything is durable");
    setup.check_store(&[7, 8]);
}

#[test]
fn what_comes_too_late_is_not_accepted() {
    let setup = Setup::new("drain_seconds = 10\n");
    fs::write(setup.store(), "").unwrap();
    let daemon = setup.start();
    setup.wait(setup.save(1), "verified");
    daemon.stop();
    // It pauses between taking a file and accepting it.
    let daemon = setup.start_with("*:1500", |_| {});
    let id = Uuid::new_v4();
    write_checkpoint(&setup.offered(id), 2);
    std::thread::scope(|scope| {
        let submitted = scope.spawn(|| setup.submit(id, 2));
        until("the file is taken", || !setup.offered(id).exists());
        daemon.signal("TERM");
        daemon.wait_until_draining();
        let answer = submitted.join().unwrap();
        assert_eq!(answer.status, 503, "{}", answer.text);
        assert_eq!(answer.json()["error"], "draining", "{}", answer.text);
    });
    // The trainer still has its file, and no start finds a trace of it.
    assert!(setup.offered(id).is_file());
    assert!(!daemon.stop(), "the first one is not durable");
    let daemon = setup.start();
    let path = format!("/v1/submissions/{id}");
    assert_eq!(setup.ask("GET", &path, None).unwrap().status, 404);
    daemon.stop();
}

#[test]
fn what_was_forgotten_keeps_nobody_from_being_ready() {
    let setup = Setup::default();
    let daemon = setup.start();
    let id = Uuid::new_v4();
    fs::write(setup.offered(id), "abc").unwrap();
    assert_eq!(setup.submit(id, 1).status, 200);
    assert_eq!(setup.wait(id, "durable")["state"], "failed");
    assert_eq!(daemon.get("/readyz").status, 503);
    let why = || daemon.get("/readyz?verbose").text;
    assert!(why().contains("could not be compressed"), "{}", why());
    let forgotten = setup.ask("POST", "/v1/forget", Some(&json!({ "id": id }))).unwrap();
    assert_eq!(forgotten.status, 200, "{}", forgotten.text);
    assert!(!why().contains("could not be compressed"), "{}", why());
    // A slow machine may not have contacted the store yet.
    daemon.wait_until_ready();
    daemon.stop();
}

#[test]
fn a_damaged_checkpoint_fails_and_holds_up_no_other() {
    let setup = Setup::default();
    let daemon = setup.start();
    let id = Uuid::new_v4();
    let path = setup.offered(id);
    write_checkpoint(&path, 1);
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).unwrap();
    assert_eq!(setup.submit(id, 1).status, 200);
    // A file that is no checkpoint at all.
    let other = Uuid::new_v4();
    fs::write(setup.offered(other), "abc").unwrap();
    assert_eq!(setup.submit(other, 3).status, 200);
    let good = setup.save(2);
    assert_eq!(setup.wait(other, "durable")["state"], "failed");
    let failed = setup.wait(id, "durable");
    assert_eq!(failed["state"], "failed", "{failed}");
    assert!(failed["error"].as_str().unwrap().contains(&id.to_string()), "{failed}");
    assert_eq!(setup.wait(good, "durable")["state"], "durable");
    assert_eq!(daemon.get("/healthz").status, 503);
    // Until the failed ones are forgotten.
    let forget =
        |id: Uuid| setup.ask("POST", "/v1/forget", Some(&json!({ "id": id }))).unwrap().status;
    assert_eq!((forget(id), forget(other), forget(id), forget(good)), (200, 200, 404, 404));
    assert_eq!(daemon.get("/healthz").status, 200);
    daemon.stop();
    setup.check_store(&[2]);
}

#[test]
fn a_quota_refuses_and_recovers() {
    let setup = Setup::new("quota_bytes = 100000\n");
    // Nothing that is accepted becomes durable, for now.
    fs::write(setup.store(), "").unwrap();
    let daemon = setup.start();
    let mut kept = vec![];
    let refused = loop {
        let id = Uuid::new_v4();
        let step = kept.len() as u64;
        write_checkpoint(&setup.offered(id), step);
        let answer = setup.submit(id, step);
        match answer.status {
            200 => kept.push(id),
            _ => break (id, step, answer),
        }
        assert!(kept.len() < 10);
    };
    let (id, step, answer) = refused;
    assert_eq!((answer.status, answer.json()["error"].as_str()), (507, Some("full")));
    assert!(setup.offered(id).exists(), "what was refused is the trainer's still");
    fs::remove_file(setup.store()).unwrap();
    for id in &kept {
        setup.wait(*id, "durable");
    }
    assert_eq!(setup.submit(id, step).status, 200);
    setup.wait(id, "durable");
    daemon.stop();
    setup.check_store(&(0..=step).collect::<Vec<_>>());
}

#[test]
fn a_restore_may_take_longer_than_a_request() {
    let setup = Setup::default();
    let daemon = setup.start();
    setup.wait(setup.save(7), "durable");
    let what = json!({ "step": 7, "request": Uuid::new_v4(), "timeout_ms": 0 });
    let ask = || setup.ask("POST", "/v1/restore", Some(&what)).unwrap();
    let end = Instant::now() + LONG;
    let done = loop {
        let answer = ask();
        match answer.status {
            202 => assert_eq!(answer.json(), json!({ "running": what["request"] })),
            status => break (status, answer.json()),
        }
        assert!(Instant::now() < end);
    };
    assert_eq!((done.0, &done.1["step"]), (200, &json!(7)), "{done:?}");
    // The answer may be lost: repeating the request does not restore again.
    assert_eq!(ask().json(), done.1);
    let restored = fs::read_dir(setup.path("state/staging/restored")).unwrap().count();
    assert_eq!(restored, 1);
    daemon.stop();
}

#[test]
fn it_restores_from_the_nearest_tier_that_is_sound() {
    let setup = Setup::new("keep_local = 1\n");
    let daemon = setup.start();
    let restore = |what: serde_json::Value| {
        let answer = setup.ask("POST", "/v1/restore", Some(&what)).unwrap();
        (answer.status, answer.json())
    };
    assert_eq!(restore(json!({})).0, 404);
    let durable = |step| {
        let id = setup.save(step);
        setup.wait(id, "durable");
        id
    };
    let ids: Vec<_> = (1..=6).map(durable).collect();
    let check = |done: &(u16, serde_json::Value), step: u64, tier: &str| {
        assert_eq!(done.0, 200, "{}", done.1);
        assert_eq!((done.1["step"].as_u64(), done.1["tier"].as_str()), (Some(step), Some(tier)));
        let path = done.1["path"].as_str().unwrap();
        let reader = Reader::open(Source::from(path), Default::default()).unwrap();
        assert_eq!(reader.read("w").unwrap(), values(step));
        fs::remove_file(path).unwrap();
    };
    check(&restore(json!({})), 6, "local");
    check(&restore(json!({ "id": ids[5] })), 6, "local");
    // A checkpoint that another program saved to the store has no submission: it is known by the store's id.
    let path = setup.store();
    let store =
        CheckpointStore::open(&path.to_string_lossy(), &Default::default(), Default::default());
    let store = store.unwrap();
    let other = store.save(7, &[], &Default::default()).unwrap().checkpoint.id();
    let done = restore(json!({ "id": other.to_string() }));
    assert_eq!((done.0, done.1["tier"].as_str()), (200, Some("store")), "{}", done.1);
    store.retire(&[other], "only a test").unwrap();
    // A checkpoint that the local drive no longer has is not looked for there.
    let path = setup.path("state/staging/local");
    let local = CheckpointStore::open_read_only(
        &path.to_string_lossy(),
        &Default::default(),
        Default::default(),
    );
    let kept: Vec<u64> = local.unwrap().list().unwrap().iter().map(|c| c.step()).collect();
    let gone = (1..=6).find(|step| !kept.contains(step)).unwrap();
    let done = restore(json!({ "step": gone }));
    assert_eq!(done.1["skipped"], json!([]));
    check(&done, gone, "store");
    // Damaged on the local drive: the store has it.
    let local = setup.path("state/staging/local/ck");
    for entry in fs::read_dir(&local).unwrap() {
        let path = entry.unwrap().path().join("d-0");
        let bytes: Vec<u8> = fs::read(&path).unwrap().iter().map(|b| !b).collect();
        fs::write(&path, bytes).unwrap();
    }
    let done = restore(json!({}));
    assert!(done.1["skipped"][0].as_str().unwrap().contains("step 6, local"), "{}", done.1);
    check(&done, 6, "store");
    assert_eq!(restore(json!({ "step": 9 })).0, 404);
    assert_eq!(restore(json!({ "step": 1, "id": ids[0] })).0, 400);
    daemon.stop();
}

#[test]
fn one_runner_at_a_time_has_a_state_folder() {
    let setup = Setup::default();
    let _daemon = setup.start();
    let mut second = setup.spawn("", |_| {});
    assert_eq!(second.wait().code(), Some(75));
}

#[test]
fn what_was_lost_with_the_drive_is_said_to_be() {
    let setup = Setup::new("drain_seconds = 1\n");
    fs::write(setup.store(), "").unwrap();
    let daemon = setup.start();
    let lost = setup.save(1);
    setup.wait(lost, "verified");
    daemon.stop();
    fs::remove_file(setup.store()).unwrap();
    fs::remove_dir_all(setup.path("state/staging")).unwrap();
    let daemon = setup.start();
    let found = setup.wait(lost, "durable");
    assert_eq!(found["state"], "failed", "{found}");
    assert!(found["error"].as_str().unwrap().contains("drive replaced"), "{found}");
    let next = setup.save(2);
    assert_eq!(setup.wait(next, "durable")["state"], "durable");
    assert_eq!(daemon.get("/healthz").status, 503);
    daemon.stop();
    setup.check_store(&[2]);
}

/// Writes a stand-in for the wheel's `s4w`, whose own tests convert real files: it copies a `.s4w`
/// file, or the one in a folder.
fn make_converter(program: &Path) {
    let script = "#!/bin/sh\n[ \"$1\" = compress ] || exit 2\n[ -d \"$2\" ] && set \"$1\" \"$2/__0_0.distcp\" \"$3\"\n\
                  cp \"$2\" \"$3\"\n";
    // By a process of its own: a child that another test is just starting has a copy of each descriptor of this one,
    // and nothing can be run that is open for writing ("text file busy").
    let write = "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\"";
    let written = Command::new("sh").args(["-c", write]).arg(program).arg(script).status();
    assert!(written.unwrap().success());
}

/// Waits until a condition holds.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A runner that watches a folder, with a converter in it. `more`: other lines of its configuration.
fn watching(more: &str, watch: &str) -> (tempfile::TempDir, Setup) {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("convert");
    make_converter(&program);
    let at = folder.path();
    let setup =
        Setup::new(&format!("{more}[watch]\nfolder = {at:?}\npt_converter = {program:?}\n{watch}"));
    (folder, setup)
}

/// A checkpoint of a step that appears whole.
fn drop_into(folder: &Path, name: &str, step: u64) {
    let hidden = folder.join(".hidden");
    write_checkpoint(&hidden, step);
    fs::rename(hidden, folder.join(name)).unwrap();
}

#[test]
fn files_that_are_dropped_into_a_folder_become_durable() {
    let (drop_folder, setup) = watching("", "remove = true\nsettle_seconds = 0\n");
    let folder = drop_folder.path();
    let daemon = setup.start();
    drop_into(folder, "run_step_7.pt", 7);
    fs::write(folder.join("notes.txt"), "mine").unwrap();
    fs::write(folder.join("final.pt"), "it has no step").unwrap();
    fs::write(folder.join("step_8.pt"), "this is no checkpoint").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", folder.join("step_9.pt")).unwrap();
    until("it is taken", || !folder.join("run_step_7.pt").exists());
    for name in ["notes.txt", "final.pt", "step_9.pt"] {
        assert!(fs::symlink_metadata(folder.join(name)).is_ok(), "{name}");
    }
    assert_eq!(setup.open_store().list().unwrap()[0].about.tags["source"], "run_step_7.pt");
    daemon.stop();
    setup.check_store(&[7]);
    assert_eq!(fs::read_to_string(folder.join("step_8.pt")).unwrap(), "this is no checkpoint");
}

/// The drive with the staging folder was replaced; the journal and the watched folder are on others.
#[test]
fn what_a_lost_drive_held_is_taken_again() {
    let (drop_folder, setup) = watching("drain_seconds = 1\n", "settle_seconds = 0\n");
    let folder = drop_folder.path();
    // The store cannot be reached.
    fs::write(setup.store(), "").unwrap();
    let daemon = setup.start();
    drop_into(folder, "step_7.pt", 7);
    let states = || daemon.get("/v1/status").json()["states"].clone();
    until("it is taken", || states()["verified"] == 1 || states()["uploading"] == 1);
    drop_into(folder, "step_9.pt", 9);
    let waiting =
        || states()["verified"].as_u64().unwrap() + states()["uploading"].as_u64().unwrap();
    until("both are taken", || waiting() == 2);
    daemon.signal("TERM");
    daemon.wait_until_draining();
    daemon.stop();
    fs::remove_dir_all(setup.path("state/staging")).unwrap();
    fs::remove_file(setup.store()).unwrap();
    let daemon = setup.start();
    let status = || daemon.get("/v1/status").json();
    until("they are durable", || status()["states"]["durable"] == 2);
    assert_eq!(status()["states"]["failed"], 0);
    // They keep their order, whichever was taken first.
    assert_eq!(status()["last_durable"]["step"], 9);
    daemon.stop();
    setup.check_store(&[7, 9]);
}

#[test]
fn a_folder_that_cannot_be_watched_makes_the_runner_unready() {
    let setup = Setup::new("[watch]\nfolder = \"/nowhere/at/all\"\n");
    let daemon = setup.start();
    let unready = || daemon.get("/readyz?verbose").text.contains("the watched folder: ");
    until("it is said", unready);
    assert_eq!(daemon.get("/readyz").status, 503);
    daemon.stop();
}

#[test]
fn training_that_goes_back_is_seen() {
    let setup = Setup::default();
    let daemon = setup.start();
    for step in [100, 50] {
        let id = setup.save(step);
        setup.wait(id, "durable");
    }
    let status = daemon.get("/v1/status").json();
    assert_eq!(status["last_durable"]["step"], 50);
    assert_eq!(status["last_durable_ms"], status["last_durable"]["durable_ms"]);
    daemon.stop();
}

/// A folder as PyTorch writes it, until the metadata gets its final name.
fn write_folder(path: &Path, step: u64) {
    fs::create_dir_all(path).unwrap();
    write_checkpoint(&path.join("__0_0.distcp"), step);
    fs::write(path.join("__1_0.distcp"), "the other rank's").unwrap();
    fs::write(path.join(".metadata.tmp"), "metadata").unwrap();
}

fn complete(path: &Path) {
    fs::rename(path.join(".metadata.tmp"), path.join(".metadata")).unwrap();
}

#[test]
fn folders_of_torch_become_durable_once_they_are_complete() {
    let (drop_folder, setup) = watching("", "remove = true\nsettle_seconds = 1\n");
    let folder = drop_folder.path();
    let (seven, eight) = (folder.join("step_7"), folder.join("run/step_8"));
    let (nine, ten) = (folder.join("step-9.5"), folder.join("step_10"));
    write_folder(&seven, 7);
    write_folder(&eight, 8);
    complete(&eight);
    // A folder with something else in it is taken, and stays.
    write_folder(&nine, 9);
    fs::write(nine.join("tokenizer.json"), "mine").unwrap();
    complete(&nine);
    // A folder that is being rewritten, according to its times.
    write_folder(&ten, 10);
    complete(&ten);
    let file = fs::File::options().write(true).open(ten.join("__1_0.distcp")).unwrap();
    file.set_modified(std::time::SystemTime::now() + Duration::from_secs(100)).unwrap();
    let daemon = setup.start();
    let steps = || -> Vec<u64> {
        setup
            .store()
            .join("repo.json")
            .exists()
            .then(|| setup.open_store())
            .map_or(vec![], |store| store.list().unwrap().iter().map(|c| c.step()).collect())
    };
    until("9 is durable", || steps() == [9]);
    // Enough time for two more looks.
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(steps(), [9], "7 is not complete, 8 is another folder's, 10 is being written");
    assert!(nine.join("tokenizer.json").exists() && nine.join(".metadata").exists());
    let refused = "s4w_runner_errors_total{kind=\"watch\"} 1\n";
    until("10 is said to be refused, once", || daemon.get("/metrics").text.contains(refused));
    complete(&seven);
    until("7 is removed", || !seven.exists());
    // Its new metadata arrives at last.
    fs::write(ten.join(".metadata.tmp"), "metadata of the second time").unwrap();
    complete(&ten);
    let file = fs::File::options().write(true).open(ten.join(".metadata")).unwrap();
    file.set_modified(std::time::SystemTime::now() + Duration::from_secs(200)).unwrap();
    until("10 is removed", || !ten.exists());
    let store = setup.open_store();
    let sources: Vec<_> =
        store.list().unwrap().iter().map(|c| c.about.tags["source"].clone()).collect();
    assert_eq!(sources, ["step-9.5", "step_7", "step_10"]);
    daemon.stop();
    setup.check_store(&[7, 9, 10]);
    let mut left: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["convert", "run", "step-9.5"]);
}

#[test]
fn a_folder_is_removed_whole_though_the_process_is_killed() {
    let (drop_folder, setup) = watching("", "remove = true\nsettle_seconds = 0\n");
    let folder = drop_folder.path();
    write_folder(&folder.join("step_1"), 1);
    complete(&folder.join("step_1"));
    let mut daemon = setup.start_with("durable:1", |_| {});
    assert!(!daemon.wait().success());
    drop(daemon);
    // The leftovers of a process that is killed during a removal.
    let hidden = folder.join(".s4w-removed-step_1");
    fs::rename(folder.join("step_1"), &hidden).unwrap();
    fs::remove_file(hidden.join(".metadata")).unwrap();
    let daemon = setup.start();
    until("it is gone", || !hidden.exists());
    daemon.stop();
    setup.check_store(&[1]);
}
