//! That several writers are safe is proved, or the store is refused; and acknowledged saves stay,
//! even if the server lies later.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::TryStreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use s4_store::testing::{
    Fault, FaultStore, Liar, Lie, OpKind, Random, conformance, create_race, quick_options, toy,
};
use s4_store::{
    About, Cause, CheckOptions, Checkpoint, CheckpointId, Error, Mode, Op, Place, ProbeLimits,
    Store, StoreOptions, Writers,
};

use crate::faulty;

fn thorough() -> StoreOptions {
    StoreOptions { probe: ProbeLimits::default(), ..quick_options() }
}

fn single() -> StoreOptions {
    StoreOptions { writers: Writers::Single, ..quick_options() }
}

/// An answer that is lost during the probe proves nothing.
#[tokio::test(start_paused = true)]
async fn a_disturbed_probe_is_repeated() {
    let (faults, place) = faulty();
    faults.heal();
    Store::create(&place, quick_options()).await.unwrap();
    let requests = faults.ops();
    let mut fired = 0;
    for fault in [
        Fault::Before,
        Fault::After,
        Fault::TakenByUs,
        Fault::Conflict,
        Fault::Short,
        Fault::Flipped,
        Fault::Stale,
    ] {
        for nth in 0..requests {
            let (faults, place) = faulty();
            faults.fail_nth(nth, fault);
            let store = Store::create(&place, quick_options()).await;
            let store = store.unwrap_or_else(|e| panic!("request {nth}, {fault:?}: {e}"));
            assert_eq!(store.repo().mode, Mode::Many, "request {nth}, {fault:?}");
            assert!(store.repo().probe.many_writers() && store.repo().probe.detail.is_empty());
            fired += faults.fired();
        }
    }
    assert!(fired > requests, "{fired} faults had an effect");
}

/// A server that never answers one request is asked again before the deadline, however short that is.
#[tokio::test(start_paused = true)]
async fn a_probe_does_not_wait_for_one_answer_until_its_deadline() {
    let (mut fired, mut nth) = (0, 0);
    loop {
        let (faults, place) = faulty();
        let mut creates = 0;
        faults.set_plan(move |op| {
            creates += u32::from(op.kind == OpKind::Create && op.key.contains("probe-"));
            (creates == nth + 1).then(|| creates += 1).map(|()| Fault::Unanswered)
        });
        let store = Store::create(&place, quick_options()).await;
        let store = store.unwrap_or_else(|e| panic!("create {nth}: {e}"));
        assert_eq!(store.repo().mode, Mode::Many, "create {nth}");
        if faults.fired() == 0 {
            break;
        }
        (fired, nth) = (fired + 1, nth + 1);
    }
    assert!(fired > 40, "{fired} creates had no answer");
}

/// Under any rate of faults a store is created for many writers, or not at all.
#[tokio::test(start_paused = true)]
async fn no_store_is_created_for_one_writer_because_of_faults() {
    let (mut created, mut failed) = (0, 0);
    for seed in 0..500 {
        let (faults, place) = faulty();
        let mut random = Random::new(seed);
        let rate = 3 + random.below(60);
        faults.set_plan(move |_| {
            let fault = Fault::ALL[random.below(7) as usize];
            random.one_in(rate).then_some(fault)
        });
        match Store::create(&place, quick_options()).await {
            Ok(store) => {
                assert_eq!(store.repo().mode, Mode::Many, "seed {seed}");
                created += 1;
            }
            Err(
                Error::ProbeDisturbed { .. }
                | Error::Storage { .. }
                | Error::Deadline { .. }
                | Error::Corrupt { .. }
                | Error::StoreExists { .. },
            ) => failed += 1,
            Err(other) => panic!("seed {seed}: {other:?}"),
        }
    }
    println!("{created} stores created, {failed} creations failed");
    assert!(created > 250, "{created} created, {failed} failed");
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_stays_disturbed_says_by_what() {
    let (faults, place) = faulty();
    let mut creates = 0;
    faults.set_plan(move |op| {
        creates += u32::from(op.kind == OpKind::Create);
        (op.kind == OpKind::Create && creates > 3).then_some(Fault::Before)
    });
    let error = Store::create(&place, quick_options()).await.unwrap_err();
    assert!(matches!(&error, Error::ProbeDisturbed { .. }), "{error}");
    assert!(error.to_string().contains("injected: not done"), "{error}");
    faults.heal();
    assert!(matches!(Store::open(&place, quick_options()).await, Err(Error::NoStore { .. })));
    assert_eq!(Store::create(&place, quick_options()).await.unwrap().repo().mode, Mode::Many);
}

/// The probe must catch each kind of server that lies; a store for one writer at a time must be
/// asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_lies_is_caught() {
    for lie in [Lie::IgnoresCondition, Lie::ChecksThenWrites, Lie::NotImplemented] {
        let liar: Arc<dyn ObjectStore> = Arc::new(Liar::new(Arc::new(InMemory::new()), lie));
        let place = Place::objects(Arc::clone(&liar), Path::default());
        let refused = Store::create(&place, thorough()).await.unwrap_err();
        assert!(matches!(refused, Error::Refused(_)), "{lie:?}: {refused:?}");
        assert!(refused.to_string().contains("`writers=\"single\"`"), "{refused}");
        if lie != Lie::NotImplemented {
            assert!(conformance(Arc::clone(&liar), Path::from("c")).await.is_err(), "{lie:?}");
            let race = create_race(&liar, &Path::from("r"), 40, 16).await;
            assert!(race.is_err(), "{lie:?}: {race:?}");
        }
        let store = Store::create(&place, single()).await.unwrap();
        assert_eq!(store.repo().mode, Mode::Single, "{lie:?}");
        toy::save(&store, 1, None, b"one").await.unwrap();
        store.release().await.unwrap();
        let again = Store::open(&place, thorough()).await.unwrap();
        toy::save(&again, 2, None, b"two").await.unwrap();
        let steps: Vec<_> = store.list().await.unwrap().iter().map(|c| c.step()).collect();
        assert_eq!(steps, [1, 2], "one writer after the other is fine");
        assert!(again.allow_many_writers().await.is_err(), "{lie:?}");
        assert_eq!(Store::open(&place, quick_options()).await.unwrap().repo().mode, Mode::Single);
    }
}

/// A server that checks and writes atomically, except for one create in 25.
#[tokio::test(start_paused = true)]
async fn a_server_that_seldom_checks_too_early_is_caught() {
    let mut caught = 0;
    for seed in 0..40 {
        let liar = Liar::new(Arc::new(InMemory::new()), Lie::ChecksThenWrites);
        let liar = liar.with_gaps(seed, 25, Duration::from_millis(20));
        let faults = FaultStore::new(Arc::new(liar));
        faults.set_delays(seed);
        let place = Place::objects(Arc::new(faults), Path::default());
        let probe = ProbeLimits { time: Duration::MAX, ..ProbeLimits::default() };
        let options = StoreOptions { probe, ..quick_options() };
        caught += u32::from(matches!(Store::create(&place, options).await, Err(Error::Refused(_))));
    }
    println!("{caught} of 40 were caught");
    assert!(caught >= 38, "{caught} of 40 were caught");
}

async fn listed(store: &Store) -> BTreeSet<CheckpointId> {
    store.list().await.unwrap().iter().map(Checkpoint::id).collect()
}

/// A server that passed the probe checks first and then writes, with four writers at the same time: the loser of a
/// race finds out, and all that was acknowledged is there in the end.
async fn racing_writers(seed: u64) -> (u64, usize) {
    let faults = FaultStore::with_runtime_clock(Arc::new(InMemory::new()));
    faults.set_delays(seed);
    let liar = Liar::new(Arc::new(faults), Lie::ChecksThenWrites).with_gaps(
        seed,
        2,
        Duration::from_millis(40),
    );
    liar.set_honest(true);
    let place = Place::objects(Arc::new(liar.clone()), Path::default());
    Store::create(&place, quick_options()).await.unwrap();
    liar.set_honest(false);
    let acknowledged: Arc<Mutex<BTreeSet<CheckpointId>>> = Arc::default();
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let (place, acknowledged) = (place.clone(), Arc::clone(&acknowledged));
            tokio::spawn(async move {
                let store = Store::open(&place, quick_options()).await.unwrap();
                let mut random = Random::new(seed << 8 | writer);
                for n in 0..12 {
                    let saved = toy::save(&store, writer * 100 + n, None, &[7; 20]).await;
                    let saved = saved.unwrap_or_else(|e| panic!("seed {seed}, {writer}: {e}"));
                    acknowledged.lock().unwrap().insert(saved.id());
                    tokio::time::sleep(Duration::from_millis(random.below(60))).await;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
                store.release().await.unwrap();
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
    let store = Store::open(&place, quick_options()).await.unwrap();
    let acknowledged = acknowledged.lock().unwrap().clone();
    let there = listed(&store).await;
    let lost: Vec<_> = acknowledged.difference(&there).collect();
    assert!(lost.is_empty(), "seed {seed}: {lost:?} of {} are lost", acknowledged.len());
    let all = CheckOptions { read_data: true, ..CheckOptions::default() };
    assert!(store.check(&all, None).await.unwrap().is_clean());
    (liar.overwritten(), acknowledged.len())
}

#[tokio::test(start_paused = true)]
async fn a_lost_race_is_found_by_its_loser() {
    let (mut overwritten, mut acknowledged) = (0, 0);
    for seed in 0..50 {
        let (lies, saves) = racing_writers(seed).await;
        overwritten += lies;
        acknowledged += saves;
    }
    println!("{acknowledged} acknowledged saves, {overwritten} creates that overwrote another one");
    assert!(overwritten > 100, "the server hardly lies: {overwritten}");
    assert_eq!(acknowledged, 50 * 48);
}

fn entry(n: u64) -> Path {
    Path::from(format!("runs/one/log/{n:020}"))
}

/// The last acknowledged entry is overwritten by another writer: the next save lists both.
#[tokio::test(start_paused = true)]
async fn an_acknowledged_entry_that_was_overwritten_is_written_again() {
    let (faults, place) = faulty();
    let one = Store::create(&place, quick_options()).await.unwrap();
    toy::save(&one, 0, None, &[0; 20]).await.unwrap();
    let other = Store::open(&place, quick_options()).await.unwrap();
    let lost = toy::save(&one, 1, None, &[1; 20]).await.unwrap();
    let kept = faults.get(&entry(2)).await.unwrap().bytes().await.unwrap();
    faults.delete(&entry(2)).await.unwrap();
    let theirs = toy::save(&other, 2, None, &[2; 20]).await.unwrap();
    assert_ne!(faults.get(&entry(2)).await.unwrap().bytes().await.unwrap(), kept);

    let next = toy::save(&one, 3, None, &[3; 20]).await.unwrap();
    let there = listed(&other).await;
    for (what, saved) in [("lost", &lost), ("theirs", &theirs), ("next", &next)] {
        assert!(there.contains(&saved.id()), "{what} is not listed");
    }
    let report = one.check(&CheckOptions::default(), None).await.unwrap();
    assert!(report.is_clean() && report.void.is_empty(), "{report:?}");

    // The same again, but its data is gone meanwhile: the error names it.
    let lost = toy::save(&one, 4, None, &[4; 20]).await.unwrap();
    let n = one.state().await.unwrap().head();
    faults.delete(&entry(n)).await.unwrap();
    toy::save(&other, 5, None, &[5; 20]).await.unwrap();
    faults.delete(&Path::from(format!("runs/one/ck/{}/d-0", lost.id()))).await.unwrap();
    let error = toy::save(&one, 6, None, &[6; 20]).await.unwrap_err();
    assert!(matches!(&error, Error::SaveLost { id, .. } if *id == lost.id()), "{error}");
    toy::save(&one, 7, None, &[7; 20]).await.unwrap();
}

/// An acknowledged retirement is overwritten by another writer. It is written again only if it can still have an
/// effect.
#[tokio::test(start_paused = true)]
async fn a_retirement_that_was_overwritten_is_not_repeated_in_vain() {
    for (what, retired) in [("save", true), ("retire", true), ("pin", false)] {
        let (faults, place) = faulty();
        let one = Store::create(&place, quick_options()).await.unwrap();
        let old = toy::save(&one, 0, None, &[0; 20]).await.unwrap().id();
        let other = Store::open(&place, quick_options()).await.unwrap();
        one.retire(&[old], "no room").await.unwrap();
        faults.delete(&entry(2)).await.unwrap();
        match what {
            "save" => drop(toy::save(&other, 1, None, &[1; 20]).await.unwrap()),
            "retire" => drop(other.retire(&[old], "no need").await.unwrap()),
            _ => other.pin(old).await.unwrap(),
        }
        for step in 2..4 {
            toy::save(&one, step, None, &[2; 20]).await.unwrap();
        }
        let entries = one.log(1).await.unwrap();
        let retires = entries.iter().filter(|e| matches!(e.op, Op::Retire { .. })).count();
        assert_eq!(retires, usize::from(retired), "{what}");
        assert_eq!(listed(&other).await.contains(&old), !retired, "{what}");
        let report = one.check(&CheckOptions::default(), None).await.unwrap();
        assert!(report.is_clean() && report.void.is_empty(), "{what}: {report:?}");
    }
}

async fn keys(store: &dyn ObjectStore) -> Vec<Path> {
    store.list(None).map_ok(|m| m.location).try_collect().await.unwrap()
}

/// After a bucket is emptied or a folder removed, nothing is acknowledged, and no part of a store
/// comes back.
#[tokio::test]
async fn nothing_is_saved_into_a_store_that_is_gone() {
    for saves in [0, 2] {
        let (faults, place) = faulty();
        let store = Store::create(&place, quick_options()).await.unwrap();
        for step in 0..saves {
            toy::save(&store, step, None, &[1; 20]).await.unwrap();
        }
        for key in keys(&faults).await {
            faults.delete(&key).await.unwrap();
        }
        let error = toy::save(&store, 9, None, &[9; 20]).await.unwrap_err();
        assert!(matches!(error, Error::Gone { .. }), "{saves}: {error}");
        assert!(keys(&faults).await.is_empty());

        let temp = tempfile::tempdir().unwrap();
        let folder = temp.path().join("store");
        let store = Store::create(&Place::folder(&folder), quick_options()).await.unwrap();
        for step in 0..saves {
            toy::save(&store, step, None, &[1; 20]).await.unwrap();
        }
        std::fs::remove_dir_all(&folder).unwrap();
        let error = toy::save(&store, 9, None, &[9; 20]).await.unwrap_err();
        assert!(matches!(error, Error::Gone { .. }), "{saves}: {error}");
        assert!(!folder.exists());
    }
}

/// The bucket is emptied while the data of a save is on its way, and another store is created there.
#[tokio::test]
async fn nothing_is_committed_into_another_store() {
    for recreate in [false, true] {
        for saves in [0, 1] {
            let (faults, place) = faulty();
            let store = Store::create(&place, quick_options()).await.unwrap();
            for step in 0..saves {
                toy::save(&store, step, None, &[1; 20]).await.unwrap();
            }
            let staged = toy::stage(&store, 5, None, &[5; 20]).await.unwrap();
            for key in keys(&faults).await {
                faults.delete(&key).await.unwrap();
            }
            if recreate {
                let other = Store::create(&place, quick_options()).await.unwrap();
                toy::save(&other, 100, None, &[2; 20]).await.unwrap();
            }
            let error = staged.publish().await.unwrap_err();
            assert!(
                matches!(error, Error::Gone { replaced, .. } if replaced == recreate),
                "{recreate} {saves}: {error}"
            );
            assert_eq!(error.cause(), recreate.then_some(Cause::Replaced));
        }
    }
}

/// A delta is not saved if something that it needs is missing.
#[tokio::test]
async fn a_delta_of_what_is_gone_is_not_saved() {
    for (objects, gone) in [(1, "d-0"), (1, "manifest"), (9, "d-7"), (9, "manifest")] {
        for damage in [true, false] {
            let (faults, place) = faulty();
            let store = Store::create(&place, quick_options()).await.unwrap();
            let content = vec![1; objects * 16];
            let base = toy::save(&store, 1, None, &content).await.unwrap();
            let parent = (base.reference(), &content[..]);
            let delta = toy::save(&store, 2, Some(parent), &content).await.unwrap();
            let key = Path::from(format!("runs/one/ck/{}/{gone}", base.id()));
            match damage {
                true => drop(faults.put(&key, "?".into()).await.unwrap()),
                false => faults.delete(&key).await.unwrap(),
            }
            for parent in [&base, &delta] {
                let parent = (parent.reference(), &content[..]);
                let error = toy::save(&store, 3, Some(parent), &content).await.unwrap_err();
                match damage {
                    true => assert!(matches!(error, Error::Corrupt { .. }), "{gone}: {error}"),
                    false => assert!(error.is_missing(), "{gone}: {error}"),
                }
                assert!(error.to_string().contains("step 1"), "{error}");
            }
            assert_eq!(listed(&store).await.len(), 2);
            toy::save(&store, 3, None, &content).await.unwrap();
        }
    }
}

/// How many requests a save makes.
#[tokio::test]
async fn a_commit_takes_few_requests() {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let base = toy::save(&store, 0, None, &[1; 20]).await.unwrap();
    let count = async |parent: Option<&Checkpoint>| {
        let seen: Arc<Mutex<Vec<OpKind>>> = Arc::default();
        let noted = Arc::clone(&seen);
        faults.set_plan(move |op| {
            noted.lock().unwrap().push(op.kind);
            None
        });
        let mut attempt = store.begin().await.unwrap();
        for _ in 0..8 {
            attempt.put("w", "12345678".into()).await.unwrap();
        }
        let parent = parent.map(Checkpoint::reference);
        let saved = attempt.publish("".into(), About { parent, ..About::default() }).await.unwrap();
        let seen = seen.lock().unwrap();
        let of = |kind| seen.iter().filter(|k| **k == kind).count();
        let counts = [OpKind::Put, OpKind::Create, OpKind::Get, OpKind::Head, OpKind::List].map(of);
        println!("PUT, create, GET, HEAD, LIST: {counts:?}");
        (saved, counts)
    };
    // Reads: entry n; `repo.json` and entries n - 1 to n + 2; after the commit, entries n to n + 2.
    let (large, base_counts) = count(None).await;
    assert_eq!(base_counts, [9, 1, 8, 0, 1], "the first entry has none before it");
    let (_, counts) = count(Some(&large)).await;
    assert_eq!(counts, [9, 1, 9, 0, 2], "a delta also lists its parent's objects");
    let (_, counts) = count(Some(&base)).await;
    assert_eq!(counts, [9, 1, 9, 3, 1], "few objects are looked up one by one");
}
