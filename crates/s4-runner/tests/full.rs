//! The runner's own drive is full: journal, staging folder and local store. Accepted checkpoints stay, and the
//! runner says what is wrong and recovers without help once there is room. Uses a small file system in memory, if
//! the system lets a test mount one.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Daemon, LONG, Setup, write_checkpoint};
use serde_json::Value;
use uuid::Uuid;

/// Set in the run of a test that may mount.
const MAY_MOUNT: &str = "S4W_TEST_MAY_MOUNT";

#[test]
fn child() {
    common::be_the_child();
}

/// Runs the test of this name again, as the root of a namespace of its own. Returns true in that second run.
fn may_mount(test: &str) -> bool {
    if std::env::var_os(MAY_MOUNT).is_some() {
        return true;
    }
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "--map-root-user", "sh", "-c"]);
    // First find out whether mounting works.
    unshare
        .arg("mount -t tmpfs -o size=1m none /tmp && umount /tmp || exit 77; exec \"$@\"")
        .arg("sh");
    unshare.arg(std::env::current_exe().unwrap()).args(["--exact", test, "--nocapture"]);
    let done = match unshare.env(MAY_MOUNT, "1").output() {
        Ok(done) => done,
        Err(e) => {
            eprintln!("SKIPPED: unshare: {e}");
            return false;
        }
    };
    let said = [&done.stdout[..], &done.stderr].map(String::from_utf8_lossy).concat();
    match said.contains("running 1 test") {
        true => assert!(done.status.success(), "{:?}: {said}", done.status),
        false => eprintln!("SKIPPED: no file system may be mounted here: {said}"),
    }
    false
}

/// A small drive, mounted until this is dropped.
struct Drive(PathBuf);

impl Drive {
    fn mount(path: PathBuf, kib: usize) -> Self {
        fs::create_dir(&path).unwrap();
        let size = format!("size={kib}k");
        let mut mount = Command::new("mount");
        assert!(
            mount.args(["-t", "tmpfs", "-o", &size, "none"]).arg(&path).status().unwrap().success()
        );
        Self(path)
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    /// Fills the drive until `free` bytes are left.
    fn fill(&self, free: u64) {
        let mut file = fs::File::options().create(true).append(true).open(self.filler()).unwrap();
        while file.write_all(&[7; 4096]).is_ok() {}
        // The last page may be written in part.
        let len = file.metadata().unwrap().len();
        file.set_len(len - free.min(len)).unwrap();
    }

    fn make_room(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Puts something else where the store should be.
fn take_store_away(setup: &Setup) {
    if setup.store().exists() {
        fs::rename(setup.store(), setup.path("aside")).unwrap();
    }
    fs::write(setup.store(), "").unwrap();
}

fn bring_store_back(setup: &Setup) {
    fs::remove_file(setup.store()).unwrap();
    if setup.path("aside").exists() {
        fs::rename(setup.path("aside"), setup.store()).unwrap();
    }
}

/// Waits until the staged file of a verified checkpoint is removed, which makes room.
fn wait_for_removal(setup: &Setup, id: Uuid) {
    let staged = setup.path("state/staging/queue").join(format!("{id}.s4w"));
    until("its staged file is removed", || !staged.exists());
}

fn offer(setup: &Setup, step: u64) -> Uuid {
    let id = Uuid::new_v4();
    write_checkpoint(&setup.offered(id), step);
    id
}

#[test]
fn a_full_drive_refuses_and_recovers() {
    if !may_mount("a_full_drive_refuses_and_recovers") {
        return;
    }
    let setup = Setup::new("drain_seconds = 1\n");
    let drive = Drive::mount(setup.path("state"), 4096);
    let daemon = setup.start();
    let first = setup.save(1);
    setup.wait(first, "durable");
    wait_for_removal(&setup, first);
    daemon.wait_until_ready();
    // A submission.
    let second = offer(&setup, 2);
    drive.fill(0);
    let answer = setup.submit(second, 2);
    assert_eq!((answer.status, answer.json()["error"].as_str()), (507, Some("full")));
    assert!(setup.offered(second).exists(), "what was refused is the trainer's still");
    let said = daemon.get("/readyz?verbose");
    assert_eq!(said.status, 503, "{}", said.text);
    for why in ["the local drive is full", "the drive of the journal is full"] {
        assert!(said.text.contains(why), "{}", said.text);
    }
    assert_eq!(daemon.get("/livez").status, 200);
    assert!(daemon.get("/metrics").text.contains("s4w_runner_refused_total{kind=\"full\"} 1"));
    drive.make_room();
    daemon.wait_until_ready();
    assert_eq!(setup.submit(second, 2).status, 200);
    assert_eq!(setup.wait(second, "durable")["state"], "durable");
    // A verified checkpoint becomes durable although the drive is full: that is what makes room.
    take_store_away(&setup);
    let third = setup.save(3);
    setup.wait(third, "verified");
    wait_for_removal(&setup, third);
    drive.fill(0);
    bring_store_back(&setup);
    assert_eq!(setup.wait(third, "durable")["state"], "durable");
    // Now other files take the runner's reserved room as well.
    drive.fill(0);
    assert_eq!(daemon.get("/readyz").status, 503);
    // The next process, after a kill, starts on a full drive.
    let mut daemon = daemon;
    daemon.child.kill().unwrap();
    daemon.wait();
    drop(daemon);
    let daemon = setup.start();
    assert_eq!(daemon.get("/readyz").status, 503);
    assert_eq!(setup.wait(third, "durable")["state"], "durable");
    drive.make_room();
    daemon.wait_until_ready();
    let fourth = setup.save(4);
    assert_eq!(setup.wait(fourth, "durable")["state"], "durable");
    daemon.stop();
    setup.check_store(&[1, 2, 3, 4]);
}

#[test]
fn what_cannot_be_compressed_for_want_of_room_waits() {
    if !may_mount("what_cannot_be_compressed_for_want_of_room_waits") {
        return;
    }
    let drop_folder = tempfile::tempdir().unwrap();
    let folder = drop_folder.path();
    let setup = Setup::new(&format!(
        "drain_seconds = 1\n[watch]\nfolder = {folder:?}\nsettle_seconds = 0\npt_converter = \"/bin/false\"\n"
    ));
    let drive = Drive::mount(setup.path("state"), 4096);
    let daemon = setup.start();
    // The local store exists, and is empty.
    until("the local store is made", || setup.path("state/staging/local/repo.json").exists());
    let id = offer(&setup, 1);
    drive.fill(12 << 10);
    assert_eq!(setup.submit(id, 1).status, 200);
    let error = || setup.wait(id, "staged")["error"].as_str().unwrap_or_default().to_lowercase();
    until("the failure is shown", || error().contains("no space left"));
    assert_eq!(setup.wait(id, "staged")["state"], "staged");
    assert!(daemon.get("/metrics").text.contains("s4w_runner_errors_total{kind=\"full\"}"));
    let lag = |daemon: &Daemon<'_>| -> Value {
        daemon.get("/v1/status").json()["durable_lag_seconds"].clone()
    };
    assert!(lag(&daemon).as_f64().unwrap() > 0.0);
    // A file that is dropped into the watched folder waits there.
    fs::write(folder.join("step_2.pt"), vec![0; 1 << 20]).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert!(!daemon.get("/metrics").text.contains("kind=\"watch\""), "it is not given up");
    drive.make_room();
    assert_eq!(setup.wait(id, "durable")["state"], "durable");
    // Now it is given to the converter, which fails here.
    until("it is looked at again", || daemon.get("/metrics").text.contains("kind=\"watch\"} 1"));
    daemon.wait_until_ready();
    assert_eq!(lag(&daemon), 0.0);
    daemon.stop();
    setup.check_store(&[1]);
}

#[test]
fn a_drive_that_the_runner_itself_filled_is_emptied_by_it() {
    if !may_mount("a_drive_that_the_runner_itself_filled_is_emptied_by_it") {
        return;
    }
    let setup = Setup::new("keep_local = 100\ndrain_seconds = 60\n");
    let drive = Drive::mount(setup.path("state"), 4096);
    take_store_away(&setup);
    let daemon = setup.start();
    let mut ids: Vec<Uuid> = (0..6).map(|step| setup.save(step)).collect();
    for id in &ids {
        setup.wait(*id, "verified");
        wait_for_removal(&setup, *id);
    }
    // One more is accepted, and then there is no room to compress it, and nobody else will make any.
    let last = offer(&setup, 6);
    drive.fill(12 << 10);
    assert_eq!(setup.submit(last, 6).status, 200);
    let error = || setup.wait(last, "staged")["error"].as_str().unwrap_or_default().to_lowercase();
    until("it has no room to compress", || error().contains("no space left"));
    bring_store_back(&setup);
    ids.push(last);
    for id in &ids {
        let done = setup.wait(*id, "durable");
        assert_eq!(done["state"], "durable", "{done}");
    }
    drive.make_room();
    daemon.wait_until_ready();
    let after = setup.save(7);
    assert_eq!(setup.wait(after, "durable")["state"], "durable");
    daemon.stop();
    setup.check_store(&(0..=7).collect::<Vec<_>>());
    let listed: Vec<u64> = setup.open_store().list().unwrap().iter().map(|c| c.step()).collect();
    assert_eq!(listed, (0..=7).collect::<Vec<_>>());
}
