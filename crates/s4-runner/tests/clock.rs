//! A clock that is set while the runner works: by a day, forward and back. Nothing is lost or late,
//! and the runner's figures are right. Uses `libfaketime`, which sets the clock for one process
//! alone.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use common::{Daemon, Setup};
use serde_json::{Value, json};
use uuid::Uuid;

#[test]
fn child() {
    common::be_the_child();
}

/// The library's path on Debian and Fedora.
fn library() -> Option<PathBuf> {
    let folders =
        ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
    let paths = folders.map(|folder| PathBuf::from(folder).join("faketime/libfaketime.so.1"));
    paths.into_iter().find(|path| path.exists())
}

/// Sets the runner's clock, as an offset from the true time.
fn set_clock(setup: &Setup, offset: &str) {
    let path = setup.path("clock");
    fs::write(path.with_extension("new"), format!("{offset}\n")).unwrap();
    fs::rename(path.with_extension("new"), path).unwrap();
}

fn start<'a>(setup: &'a Setup, library: &std::path::Path) -> Daemon<'a> {
    setup.start_with("", |command| {
        command.env("LD_PRELOAD", library).env("FAKETIME_TIMESTAMP_FILE", setup.path("clock"));
        // The steady clock and the times of files stay the real ones.
        command.env("DONT_FAKE_MONOTONIC", "1").env("NO_FAKE_STAT", "1");
        command.env("FAKETIME_NO_CACHE", "1");
    })
}

fn status(daemon: &Daemon<'_>) -> Value {
    daemon.get("/v1/status").json()
}

/// By how many seconds the runner's clock is ahead, as a submission made just now shows.
fn ahead(setup: &Setup, id: Uuid) -> f64 {
    let shown = setup.wait(id, "staged")["submitted_ms"].as_f64().unwrap();
    let true_ms = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    shown / 1000.0 - true_ms.as_secs_f64()
}

#[test]
fn a_clock_that_is_set_by_a_day_delays_and_loses_nothing() {
    let Some(library) = library() else {
        eprintln!("SKIPPED: libfaketime is not installed (Debian: faketime)");
        return;
    };
    const DAY: f64 = 86_400.0;
    let setup = Setup::new("keep_local = 1\n");
    set_clock(&setup, "+0");
    let daemon = start(&setup, &library);
    let before = setup.save(1);
    assert_eq!(setup.wait(before, "durable")["state"], "durable");
    // A file that a trainer has not submitted yet.
    let (late, late_step) = (Uuid::new_v4(), 2);
    common::write_checkpoint(&setup.offered(late), late_step);
    let mut steps = vec![1];
    for (n, (offset, seconds)) in
        [("+86400", DAY), ("-86400", -DAY), ("+0", 0.0)].iter().enumerate()
    {
        // A checkpoint that waits while the clock is set does not wait longer for it.
        let store = setup.store();
        let aside = setup.path("store-aside");
        fs::rename(&store, &aside).unwrap();
        fs::write(&store, "").unwrap();
        let began = Instant::now();
        let waiting = setup.save(10 * (n as u64 + 1));
        setup.wait(waiting, "verified");
        set_clock(&setup, offset);
        let meanwhile = setup.save(10 * (n as u64 + 1) + 1);
        let found = ahead(&setup, meanwhile);
        assert!((found - seconds).abs() < 600.0, "{offset}: the clock is {found} s ahead");
        let lag = status(&daemon)["durable_lag_seconds"].as_f64().unwrap();
        let real = began.elapsed().as_secs_f64();
        assert!(lag > 0.0 && lag <= real + 0.1, "{offset}: {lag} s of {real} s");
        let metrics = daemon.get("/metrics").text;
        let line =
            metrics.lines().find(|l| l.starts_with("s4w_runner_durable_lag_seconds ")).unwrap();
        let shown: f64 = line.split(' ').nth(1).unwrap().parse().unwrap();
        assert!(shown >= lag && shown < lag + 60.0, "{line}");
        // A deadline is not moved.
        let began = Instant::now();
        let open = setup.ask("POST", "/v1/flush", Some(&json!({ "timeout_ms": 1500 }))).unwrap();
        assert_eq!(open.json()["open"], 2, "{}", open.text);
        assert!((1.4..30.0).contains(&began.elapsed().as_secs_f64()), "{:?}", began.elapsed());
        fs::remove_file(&store).unwrap();
        fs::rename(&aside, &store).unwrap();
        for id in [waiting, meanwhile] {
            let done = setup.wait(id, "durable");
            assert_eq!(done["state"], "durable", "{offset}: {done}");
            let took = done["durable_after_ms"].as_u64().unwrap();
            assert!(took < 120_000, "{offset}: {done}");
        }
        steps.extend([10 * (n as u64 + 1), 10 * (n as u64 + 1) + 1]);
        daemon.wait_until_ready();
        let state = status(&daemon);
        assert_eq!(state["durable_lag_seconds"], 0.0);
        assert_eq!(state["last_durable"]["step"], *steps.last().unwrap());
    }
    // The file lay there for minutes only, whatever the clock said.
    assert_eq!(setup.submit(late, late_step).status, 200);
    assert_eq!(setup.wait(late, "durable")["state"], "durable");
    steps.push(late_step);
    // The newest checkpoint is the one submitted last, and retired copies leave the local drive.
    let listed: Vec<u64> = setup.open_store().list().unwrap().iter().map(|c| c.step()).collect();
    assert_eq!(listed, steps);
    let kept = fs::read_dir(setup.path("state/staging/local/ck")).unwrap().count();
    assert!(kept <= 4, "{kept} checkpoints stay");
    daemon.stop();
    setup.check_store(&steps);
}

#[test]
fn a_clock_that_was_set_between_two_starts_makes_nothing_late() {
    let Some(library) = library() else {
        eprintln!("SKIPPED: libfaketime is not installed (Debian: faketime)");
        return;
    };
    let setup = Setup::new("drain_seconds = 1\n");
    fs::write(setup.store(), "").unwrap();
    let began = Instant::now();
    let mut ids = vec![];
    for offset in ["+0", "+86400", "-86400"] {
        set_clock(&setup, offset);
        let mut daemon = start(&setup, &library);
        ids.push(setup.save(ids.len() as u64));
        let lag = status(&daemon)["durable_lag_seconds"].as_f64().unwrap();
        let real = began.elapsed().as_secs_f64();
        assert!(lag > 0.0 && lag <= real + 0.1, "{offset}: {lag} s of {real} s");
        daemon.child.kill().unwrap();
        daemon.wait();
    }
    fs::remove_file(setup.store()).unwrap();
    let daemon = start(&setup, &library);
    for id in ids {
        assert_eq!(setup.wait(id, "durable")["state"], "durable");
    }
    daemon.stop();
    setup.check_store(&[0, 1, 2]);
    let listed: Vec<u64> = setup.open_store().list().unwrap().iter().map(|c| c.step()).collect();
    assert_eq!(listed, [0, 1, 2]);
}
