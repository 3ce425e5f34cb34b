//! The runner under load, killed again and again. `S4W_RUNNER_LOAD=500,4,50` sets how many checkpoints, by how
//! many trainers, and how many kills.

#![cfg(target_os = "linux")]

mod common;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Setup, values, write_checkpoint};
use serde_json::json;
use uuid::Uuid;

#[test]
fn child() {
    common::be_the_child();
}

/// Saves a checkpoint whatever happens: submits it until that is acknowledged.
fn save(setup: &Setup, step: u64) -> Uuid {
    let id = Uuid::new_v4();
    while !setup.offered(id).parent().is_some_and(|folder| folder.is_dir()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    write_checkpoint(&setup.offered(id), step);
    let message = json!({ "id": id, "step": step });
    let end = Instant::now() + Duration::from_secs(300);
    loop {
        match setup.ask("POST", "/v1/submissions", Some(&message)) {
            Ok(answer) if answer.status == 200 => return id,
            // No room now: the trainer waits.
            Ok(answer) => assert_eq!(answer.status, 507, "{}", answer.text),
            Err(_) => {}
        }
        assert!(Instant::now() < end, "step {step} is never accepted");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn folder_bytes(path: &std::path::Path) -> u64 {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let size = |e: std::fs::DirEntry| match e.metadata() {
        Ok(about) if about.is_dir() => folder_bytes(&e.path()),
        Ok(about) => about.len(),
        Err(_) => 0,
    };
    entries.map(size).sum()
}

fn resident_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

#[test]
fn whatever_is_accepted_is_durable_once_though_it_is_killed_at_random() {
    let wanted = std::env::var("S4W_RUNNER_LOAD").unwrap_or_else(|_| "40,3,8".into());
    let numbers: Vec<usize> = wanted.split(',').map(|n| n.parse().unwrap()).collect();
    let [checkpoints, trainers, kills] = numbers[..] else { panic!("{wanted}") };
    let quota = 2 << 20;
    let setup =
        Setup::new(&format!("quota_bytes = {quota}\nkeep_local = 2\ndrain_seconds = 300\n"));
    let (next, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    let began = Instant::now();
    let (mut most_memory, mut most_disk, mut untrue) = (0, 0, vec![]);
    let accepted: BTreeMap<u64, Uuid> = std::thread::scope(|scope| {
        let train = || {
            let mut own = vec![];
            loop {
                let step = next.fetch_add(1, Ordering::Relaxed);
                if step >= checkpoints {
                    return own;
                }
                own.push((step as u64, save(&setup, step as u64)));
            }
        };
        let threads: Vec<_> = (0..trainers).map(|_| scope.spawn(train)).collect();
        let ending = scope.spawn(|| {
            let all: BTreeMap<_, _> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
            done.store(true, Ordering::Relaxed);
            all
        });
        let mut random: u64 = 88_172_645_463_325_252;
        for kill in 0..=kills {
            let mut daemon = setup.start();
            // The last runner stays until everything is accepted.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let life = Duration::from_millis(20 + random % 400);
            let end = Instant::now() + life;
            while if kill < kills { Instant::now() < end } else { !done.load(Ordering::Relaxed) } {
                most_memory = most_memory.max(resident_kib(daemon.child.id()));
                most_disk = most_disk.max(folder_bytes(&setup.path("state")));
                if let Some(answer) = daemon.try_get("/v1/status") {
                    let status = answer.json();
                    let open: u64 = ["staged", "compressed", "verified", "uploading"]
                        .iter()
                        .map(|s| status["states"][s].as_u64().unwrap())
                        .sum();
                    if (open == 0) != (status["durable_lag_seconds"] == 0.0) {
                        untrue.push(status);
                    }
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            if kill < kills {
                daemon.child.kill().unwrap();
                daemon.wait();
            } else {
                daemon.stop();
            }
        }
        ending.join().unwrap()
    });
    assert!(untrue.is_empty(), "{untrue:?}");
    assert_eq!(accepted.len(), checkpoints);
    let store = setup.open_store();
    let listed = store.list().unwrap();
    let tags: BTreeMap<_, _> =
        listed.iter().map(|c| (c.about.tags["s4w.submission"].clone(), c.step())).collect();
    assert_eq!((listed.len(), tags.len()), (checkpoints, checkpoints), "once each");
    for (step, id) in &accepted {
        assert_eq!(tags.get(&id.to_string()), Some(step));
        let loaded = store.load(Some(*step)).unwrap();
        assert_eq!(loaded.reader().read("w").unwrap(), values(*step), "step {step}");
    }
    let report =
        store.check(&s4weights::store::CheckOptions { read_data: true, ..Default::default() });
    assert!(report.unwrap().is_clean());
    eprintln!(
        "{checkpoints} checkpoints, {trainers} trainers, {kills} kills: {:.1} s, at most {most_memory} KiB \
         resident, {} KiB of disk",
        began.elapsed().as_secs_f64(),
        most_disk >> 10
    );
    // The journal, checkpoints on their way (within the quota), and the local store.
    assert!(most_disk < 4 * quota as u64, "{most_disk} bytes of disk");
}
