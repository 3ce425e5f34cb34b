//! A bucket that is cut off, slow, full or closed: accepted checkpoints wait, and the runner says what is wrong and
//! recovers without help. Uses the first server of `S4_TEST_S3=name=http://127.0.0.1:port,...`, with the bucket
//! `s4test`; `cargo xtask test` starts such servers.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::time::{Duration, Instant};

use common::line::{Fault, Line};
use common::{Daemon, LONG, Setup, values};
use s4weights::store::{CheckpointStore, StorageOptions};
use uuid::Uuid;

#[test]
fn child() {
    common::be_the_child();
}

/// A runner whose bucket is behind a line; `None` where no server was started.
fn setup() -> Option<(Setup, Line, String)> {
    let list = std::env::var("S4_TEST_S3").unwrap_or_default();
    let Some((_, server)) = list.split(',').next().and_then(|s| s.split_once('=')) else {
        eprintln!("SKIPPED: S4_TEST_S3 names no servers; `cargo xtask test` starts them");
        return None;
    };
    let line = Line::to(server);
    let url = format!("s3://s4test/runner-{}", Uuid::new_v4());
    let more = format!(
        "store = {url:?}\n[storage_options]\nendpoint_url = {:?}\nkey = \"test\"\n\
         secret = \"hush\"\nregion = \"us-east-1\"\n",
        line.url
    );
    Some((Setup::new(&more), line, url))
}

/// Waits until the runner is ready, or is not, and its metric agrees; returns what `/readyz` said.
fn wait_ready(daemon: &Daemon<'_>, ready: bool) -> String {
    let end = Instant::now() + LONG;
    loop {
        let answer = daemon.get("/readyz?verbose");
        if (answer.status == 200) == ready {
            let metric = format!("s4w_runner_store_reachable {}\n", u8::from(ready));
            let metrics = daemon.get("/metrics").text;
            assert!(metrics.contains(&metric), "{metrics}");
            return answer.text;
        }
        assert!(Instant::now() < end, "{}", answer.text);
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Checks what is in the bucket, with the line's fault removed.
fn check(line: &Line, url: &str, steps: &[u64]) {
    line.set(Fault::None);
    let options: StorageOptions = [
        ("endpoint_url", &*line.url),
        ("key", "test"),
        ("secret", "hush"),
        ("region", "us-east-1"),
    ]
    .map(|(k, v)| (k.to_owned(), v.to_owned()))
    .into();
    let store = CheckpointStore::open(url, &options, Default::default()).unwrap();
    // A checkpoint that waits after a failure may be uploaded after the next one, but is listed before it.
    let listed: Vec<u64> = store.list().unwrap().iter().map(|c| c.step()).collect();
    assert_eq!(listed, steps);
    for &step in steps {
        let loaded = store.load(Some(step)).unwrap();
        assert_eq!(loaded.reader().read("w").unwrap(), values(step), "step {step}");
    }
}

/// A checkpoint before the fault, two during it, one after it; returns what the runner said during it.
fn survives(fault: Fault) -> Option<String> {
    let (setup, line, url) = setup()?;
    let daemon = setup.start();
    let first = setup.save(1);
    assert_eq!(setup.wait(first, "durable")["state"], "durable");
    line.set(fault);
    let during = [setup.save(2), setup.save(3)];
    let said = wait_ready(&daemon, false);
    for id in during {
        // Accepted, compressed and verified, whatever the bucket does.
        let state = setup.wait(id, "verified")["state"].clone();
        assert!(["verified", "uploading"].iter().any(|s| state == *s), "{state}");
    }
    assert_eq!(daemon.get("/livez").status, 200);
    line.set(Fault::None);
    let after = setup.save(4);
    for id in [during[0], during[1], after] {
        let done = setup.wait(id, "durable");
        assert_eq!(done["state"], "durable", "{done}");
    }
    wait_ready(&daemon, true);
    daemon.stop();
    check(&line, &url, &[1, 2, 3, 4]);
    Some(said)
}

#[test]
fn a_network_that_is_cut_delays_and_loses_nothing() {
    let Some(said) = survives(Fault::Cut) else { return };
    assert!(said.contains("the store: "), "{said}");
}

#[test]
fn a_full_bucket_delays_and_loses_nothing() {
    let Some(said) = survives(Fault::Refused(507, "XMinioStorageFull")) else { return };
    assert!(said.contains("507"), "{said}");
}

#[test]
fn a_permission_that_is_taken_away_delays_and_loses_nothing() {
    let Some(said) = survives(Fault::RefusedAll(403, "AccessDenied")) else { return };
    assert!(said.contains("permission") || said.contains("denied"), "{said}");
    assert!(!said.contains("hush"), "{said}");
}

/// At 2 kB a second, a checkpoint takes longer than a request may be silent.
#[test]
fn a_slow_bucket_is_no_failure() {
    let Some((setup, line, url)) = setup() else { return };
    let daemon = setup.start();
    let first = setup.save(1);
    assert_eq!(setup.wait(first, "durable")["state"], "durable");
    line.set(Fault::Slow(2_000));
    let began = Instant::now();
    let second = setup.save(2);
    let done = setup.wait(second, "durable");
    assert_eq!(done["state"], "durable", "{done}");
    assert!(done["error"].is_null(), "{done}");
    assert!(began.elapsed() > Duration::from_secs(1), "the line was not slow");
    assert_eq!(daemon.get("/readyz").status, 200);
    daemon.stop();
    check(&line, &url, &[1, 2]);
}
