//! One writer at a time, on servers that are not safe for more: the lease.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::TryStreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use s4_store::testing::{Fault, FaultStore, Liar, Lie, OpKind, Random, quick_options, toy};
use s4_store::{CheckOptions, Error, Mode, Place, Resolution, Store, StoreOptions, Writers};

fn single() -> StoreOptions {
    StoreOptions { writers: Writers::Single, ..quick_options() }
}

/// A server that ignores the condition, with the test's clock.
fn server() -> Arc<Liar> {
    let clock = FaultStore::with_runtime_clock(Arc::new(InMemory::new()));
    Arc::new(Liar::new(Arc::new(clock), Lie::IgnoresCondition))
}

/// One process's connection to the server, which may break.
fn connection(server: &Arc<Liar>) -> (FaultStore, Place) {
    let faults = FaultStore::new(Arc::clone(server) as _);
    let place = Place::objects(Arc::new(faults.clone()), Path::from("one"));
    (faults, place)
}

async fn steps(place: &Place) -> Vec<u64> {
    let store = Store::open(place, quick_options()).await.unwrap();
    let all = CheckOptions { read_data: true, ..CheckOptions::default() };
    assert!(store.check(&all, None).await.unwrap().is_clean());
    store.list().await.unwrap().iter().map(|c| c.step()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_second_writer_is_kept_out_for_as_long_as_the_first_lives() {
    let server = server();
    let (_, place) = connection(&server);
    let first = Store::create(&place, single()).await.unwrap();
    toy::save(&first, 1, None, b"one").await.unwrap();
    let second = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(second.list().await.unwrap().len(), 1, "reading needs no lease");
    let mut since = None;
    for _ in 0..3 {
        let error = toy::save(&second, 2, None, b"two").await.unwrap_err();
        let Error::Locked { holder, .. } = &error else { panic!("{error}") };
        let taken = since.get_or_insert(holder.since_ms);
        assert_eq!(holder.since_ms, *taken, "renewing the lease is not taking it");
        let text = error.to_string();
        assert!(text.contains(&format!("process {}", std::process::id())), "{text}");
        assert!(text.contains("break-lease") && text.contains("renews its lease"), "{text}");
        // The first one writes nothing for hours and stays the writer. The lease notes real time.
        std::thread::sleep(Duration::from_millis(5));
        tokio::time::sleep(Duration::from_secs(3600)).await;
    }
    toy::save(&first, 3, None, b"thr").await.unwrap();
    first.release().await.unwrap();
    toy::save(&second, 4, None, b"fou").await.unwrap();
    let error = toy::save(&first, 5, None, b"fiv").await.unwrap_err();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    assert_eq!(steps(&place).await, [1, 3, 4]);
}

/// After a process was killed, the next one waits until its lease is dead.
#[tokio::test(start_paused = true)]
async fn a_dead_holder_is_waited_for() {
    let server = server();
    let (_, place) = connection(&server);
    let first = Store::create(&place, single()).await.unwrap();
    toy::save(&first, 1, None, b"one").await.unwrap();
    drop(first);
    let second = Store::open(&place, quick_options()).await.unwrap();
    let start = tokio::time::Instant::now();
    toy::save(&second, 2, None, b"two").await.unwrap();
    let waited = start.elapsed().as_secs();
    assert!((30..75).contains(&waited), "{waited} s");
    drop(second);
    let third = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(third.break_lease().await.unwrap().len(), 1);
    let start = tokio::time::Instant::now();
    toy::save(&third, 3, None, b"thr").await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(1));
    assert_eq!(steps(&place).await, [1, 2, 3]);
}

/// A deletion whose answer was lost may take effect when the key was written again.
#[tokio::test(start_paused = true)]
async fn no_key_of_a_lease_is_written_again_once_it_was_deleted() {
    let server = server();
    let (faults, place) = connection(&server);
    let (deleted, wrong) = (Arc::new(Mutex::new(BTreeSet::new())), Arc::new(AtomicUsize::new(0)));
    let (gone, again) = (Arc::clone(&deleted), Arc::clone(&wrong));
    faults.set_plan(move |op| {
        let mut gone = gone.lock().unwrap();
        match op.kind {
            _ if !op.key.contains("/lease/") => {}
            OpKind::Delete => drop(gone.insert(op.key.clone())),
            OpKind::Put | OpKind::Create if gone.contains(&op.key) => {
                again.fetch_add(1, Ordering::SeqCst);
            }
            _ => {}
        }
        None
    });
    let first = Store::create(&place, single()).await.unwrap();
    let second = Store::open(&place, quick_options()).await.unwrap();
    for step in 0..3 {
        toy::save(&first, 2 * step, None, b"one").await.unwrap();
        let waiting = toy::save(&second, 2 * step + 1, None, b"two");
        let ending = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            first.release().await.unwrap();
        };
        tokio::join!(waiting, ending).0.unwrap();
        second.release().await.unwrap();
    }
    assert_eq!(steps(&place).await, [0, 1, 2, 3, 4, 5]);
    let deleted = deleted.lock().unwrap().len();
    assert!(deleted > 12 && wrong.load(Ordering::SeqCst) == 0, "{deleted}, {wrong:?}");
}

/// A late write of a holder that died is no sign of life.
#[tokio::test(start_paused = true)]
async fn a_renewal_that_arrives_late_keeps_nobody_out() {
    let server = server();
    let (faults, place) = connection(&server);
    let first = Store::create(&place, single()).await.unwrap();
    toy::save(&first, 1, None, b"one").await.unwrap();
    drop(first);
    let lease = faults.list(Some(&Path::from("one/lease"))).try_next().await.unwrap().unwrap();
    let second = Store::open(&place, quick_options()).await.unwrap();
    let arriving = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        server.put(&lease.location, bytes::Bytes::from_static(b"{}").into()).await.unwrap();
    };
    let (saved, ()) = tokio::join!(toy::save(&second, 2, None, b"two"), arriving);
    saved.unwrap();
    assert_eq!(steps(&place).await, [1, 2]);
}

/// A process died while the store's clock was ahead, so its lease or claim is dated in the future.
#[tokio::test(start_paused = true)]
async fn a_dead_holder_from_the_future_is_waited_for() {
    for name in ["held", "claim"] {
        let faults = FaultStore::with_runtime_clock(Arc::new(InMemory::new()));
        let place = Place::objects(Arc::new(faults.clone()), Path::from("one"));
        let store = Store::create(&place, single()).await.unwrap();
        store.release().await.unwrap();
        let dead = Path::from(format!("one/lease/{name}-01900000-0000-7000-8000-000000000000"));
        faults.put(&dead, bytes::Bytes::from_static(b"{}").into()).await.unwrap();
        faults.set_date(&dead, chrono::DateTime::UNIX_EPOCH + Duration::from_secs(86_400));
        let start = tokio::time::Instant::now();
        let saved = toy::save(&store, 1, None, b"one").await;
        let waited = start.elapsed().as_secs();
        assert!(saved.is_ok() && (55..75).contains(&waited), "{name}, {waited} s: {saved:?}");
        assert_eq!(steps(&place).await, [1]);
    }
}

/// A process that was without a network, or asleep, for longer than its lease lives notices before
/// it commits.
#[tokio::test(start_paused = true)]
async fn a_holder_that_was_away_for_too_long_notices() {
    let server = server();
    let (faults, place) = connection(&server);
    let (_, other_place) = connection(&server);
    let first = Store::create(&place, single()).await.unwrap();
    toy::save(&first, 1, None, b"one").await.unwrap();
    let staged = toy::stage(&first, 2, None, b"two").await.unwrap();
    faults.set_plan(|_| Some(Fault::Before));
    tokio::time::sleep(Duration::from_secs(100)).await;
    let second = Store::open(&other_place, quick_options()).await.unwrap();
    toy::save(&second, 3, None, b"thr").await.unwrap();
    faults.heal();
    let error = staged.publish().await.unwrap_err();
    assert!(matches!(&error, Error::LeaseLost { .. } | Error::Locked { .. }), "{error}");
    toy::save(&second, 4, None, b"fou").await.unwrap();
    second.release().await.unwrap();
    // There is no other writer any more, so this one may write again.
    toy::save(&first, 5, None, b"fiv").await.unwrap();
    assert_eq!(steps(&place).await, [1, 3, 4, 5]);
}

/// A writer that was away for long, but is the only one, goes on.
#[tokio::test(start_paused = true)]
async fn an_outage_is_no_loss_of_the_lease() {
    let server = server();
    let (faults, place) = connection(&server);
    let store = Store::create(&place, single()).await.unwrap();
    toy::save(&store, 1, None, b"one").await.unwrap();
    faults.set_plan(|_| Some(Fault::Before));
    tokio::time::sleep(Duration::from_secs(1000)).await;
    faults.heal();
    toy::save(&store, 2, None, b"two").await.unwrap();
    assert_eq!(steps(&place).await, [1, 2]);
}

/// A lease that was taken away is noticed at the next commit.
#[tokio::test(start_paused = true)]
async fn a_lease_that_was_broken_is_noticed() {
    let server = server();
    let (_, place) = connection(&server);
    let first = Store::create(&place, single()).await.unwrap();
    let staged = toy::stage(&first, 1, None, b"one").await.unwrap();
    let second = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(second.break_lease().await.unwrap()[0].pid, std::process::id());
    toy::save(&second, 2, None, b"two").await.unwrap();
    let error = staged.publish().await.unwrap_err();
    assert!(matches!(&error, Error::LeaseLost { holder: Some(_), .. }), "{error}");
    assert_eq!(steps(&place).await, [2]);
}

/// Many processes want to write at the same instant, again and again: one at a time does.
#[tokio::test(start_paused = true)]
async fn of_writers_that_start_at_once_one_writes_at_a_time() {
    let mut saves = 0;
    for seed in 0..60 {
        let clock = FaultStore::with_runtime_clock(Arc::new(InMemory::new()));
        clock.set_delays(seed);
        let server = Arc::new(Liar::new(Arc::new(clock), Lie::IgnoresCondition));
        let (_, place) = connection(&server);
        let store = Store::create(&place, single()).await.unwrap();
        store.release().await.unwrap();
        let inside = Arc::new(AtomicUsize::new(0));
        let writers: Vec<_> = (0..2 + seed % 4)
            .map(|who| {
                let (place, inside) = (place.clone(), Arc::clone(&inside));
                tokio::spawn(async move {
                    let mut random = Random::new(seed << 8 | who);
                    let store = Store::open(&place, quick_options()).await.unwrap();
                    let mut done = Vec::new();
                    for n in 0..3 {
                        match store.begin().await {
                            Ok(_) => {}
                            Err(Error::Locked { .. }) => continue,
                            Err(e) => panic!("seed {seed}: {e}"),
                        }
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "seed {seed}: two");
                        let step = who * 10 + n;
                        toy::save(&store, step, None, b"any").await.unwrap();
                        done.push(step);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        store.release().await.unwrap();
                        tokio::time::sleep(Duration::from_millis(random.below(30))).await;
                    }
                    done
                })
            })
            .collect();
        let mut done = Vec::new();
        for writer in writers {
            done.extend(writer.await.unwrap());
        }
        done.sort_unstable();
        let mut there = steps(&place).await;
        there.sort_unstable();
        assert_eq!(there, done, "seed {seed}");
        saves += done.len();
    }
    println!("{saves} saves");
    assert!(saves > 200, "{saves}");
}

/// Two processes create a store at the same time.
#[tokio::test(start_paused = true)]
async fn one_of_two_creators_wins() {
    for seed in 0..40 {
        let clock = FaultStore::with_runtime_clock(Arc::new(InMemory::new()));
        clock.set_delays(seed);
        let server = Arc::new(Liar::new(Arc::new(clock), Lie::IgnoresCondition));
        let create = || {
            let (_, place) = connection(&server);
            tokio::spawn(async move { Store::create(&place, single()).await })
        };
        let (a, b) = (create(), create());
        let (a, b) = (a.await.unwrap(), b.await.unwrap());
        assert!(a.is_ok() != b.is_ok(), "seed {seed}: {a:?} {b:?}");
        let error = a.and(b).unwrap_err();
        assert!(matches!(error, Error::StoreExists { .. } | Error::Locked { .. }), "{error}");
    }
}

/// A store for one writer at a time is opened to many, where that is safe.
#[tokio::test(start_paused = true)]
async fn a_store_is_opened_to_many_writers() {
    let server = server();
    server.set_honest(true);
    let (faults, place) = connection(&server);
    let store = Store::create(&place, single()).await.unwrap();
    toy::save(&store, 1, None, b"one").await.unwrap();
    let other = Store::open(&place, quick_options()).await.unwrap();
    let error = other.allow_many_writers().await.unwrap_err();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    store.release().await.unwrap();
    let lost = faults.clone();
    faults.fail_nth(4, Fault::Before);
    assert!(other.allow_many_writers().await.unwrap().many_writers());
    lost.heal();
    for old in [&store, &other] {
        let error = toy::save(old, 9, None, b"not").await.unwrap_err();
        assert!(error.to_string().contains("reopen the store"), "{error}");
        old.release().await.unwrap();
    }
    let (a, b) = (Store::open(&place, quick_options()), Store::open(&place, quick_options()));
    let (a, b) = (a.await.unwrap(), b.await.unwrap());
    assert_eq!(a.repo().mode, Mode::Many);
    assert!(a.repo().probe.many_writers() && a.repo().id == store.repo().id);
    toy::save(&a, 2, None, b"two").await.unwrap();
    toy::save(&b, 3, None, b"thr").await.unwrap();
    assert!(matches!(a.break_lease().await, Err(Error::Argument(_))));
    assert_eq!(steps(&place).await, [1, 2, 3]);
}

/// A commit fails, its effect comes later, and meanwhile the same process commits again.
#[tokio::test(start_paused = true)]
async fn a_commit_that_lands_late_overwrites_nothing() {
    for saves in 1..=3 {
        let server = server();
        let (faults, place) = connection(&server);
        let store = Store::create(&place, single()).await.unwrap();
        toy::save(&store, 1, None, b"one").await.unwrap();
        let staged = toy::stage(&store, 2, None, b"two").await.unwrap();
        faults.set_plan(|op| {
            (op.kind == OpKind::Put && op.key.contains("/log/")).then_some(Fault::Late)
        });
        let error = staged.publish().await.unwrap_err();
        let Error::CommitUnknown(unknown) = error else { panic!("{error}") };
        faults.heal();
        let mut wanted = vec![1];
        for step in 3..3 + saves {
            toy::save(&store, step, None, b"abc").await.unwrap();
            wanted.push(step);
        }
        store.release().await.unwrap();
        drop(store);
        tokio::time::sleep(Duration::from_secs(10)).await;
        let mut there = steps(&place).await;
        there.retain(|step| *step != 2);
        assert_eq!(there, wanted, "{saves}: {unknown}");
    }
}

/// While it is unknown whether one commit is in the log, another one that cannot begin is known not to be.
#[tokio::test(start_paused = true)]
async fn a_commit_behind_an_unknown_one_has_not_begun() {
    let server = server();
    let (faults, place) = connection(&server);
    let store = Store::create(&place, single()).await.unwrap();
    toy::save(&store, 1, None, b"one").await.unwrap();
    let [second, third] = [
        toy::stage(&store, 2, None, b"two").await.unwrap(),
        toy::stage(&store, 3, None, b"thr").await.unwrap(),
    ];
    faults.set_plan(|op| {
        (op.kind == OpKind::Put && op.key.contains("/log/")).then_some(Fault::Before)
    });
    let error = second.publish().await.unwrap_err();
    let Error::CommitUnknown(unknown) = error else { panic!("{error}") };
    let error = third.publish().await.unwrap_err();
    assert!(matches!(error, Error::Deadline { action: "write again", .. }), "{error}");
    let error = store.resolve(&unknown).await.unwrap_err();
    assert!(matches!(error, Error::CommitUnknown(_)), "{error}");
    faults.heal();
    assert!(matches!(store.resolve(&unknown).await.unwrap(), Resolution::Committed(_)));
    toy::save(&store, 4, None, b"fou").await.unwrap();
    store.release().await.unwrap();
    assert_eq!(steps(&place).await, [1, 2, 4]);
}
