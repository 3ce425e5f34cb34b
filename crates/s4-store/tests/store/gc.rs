//! Sweeps of large stores, on full and read-only disks, and of stores with old damage.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use s4_store::testing::{FaultStore, quick_options, toy};
use s4_store::{CheckpointId, Digest, Place, Store, SweepOptions};
use serde_json::json;

use crate::counting::Counting;
use crate::{faulty, now};

fn counted() -> (Counting, Place) {
    let store = Counting::default();
    let objects: Arc<dyn ObjectStore> = Arc::new(store.clone());
    (store, Place::objects(objects, Path::from("s")))
}

fn sealed(value: &serde_json::Value) -> Bytes {
    let body = value.to_string();
    format!("{body}\n\"blake3:{}\"\n", Digest::of(body.as_bytes())).into()
}

fn id(n: u64) -> String {
    format!("00000000-0000-7000-8000-{n:012x}")
}

/// A log that lists `n` checkpoints, and data for each, as in a store that has been used for long.
async fn large(objects: &Counting, n: u64) {
    let mut prev = Digest::of(&[]);
    for n in 1..=n {
        let publish = json!({
            "id": id(n), "step": n, "manifest_blake3": Digest::of(b"m"), "manifest_len": 1,
            "objects": 1, "data_len": 1,
        });
        let entry = sealed(&json!({
            "v": 1, "n": n, "prev": prev, "write_id": id(n), "at_ms": 0, "op": {"publish": publish},
        }));
        prev = Digest::of(&entry);
        objects.put(&Path::from(format!("s/log/{n:020}")), entry.into()).await.unwrap();
        for part in ["d-0", "manifest"] {
            let key = Path::from(format!("s/ck/{}/{part}", id(n)));
            objects.put(&key, Bytes::from_static(b"x").into()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn with_nothing_to_do_ten_thousand_checkpoints_cost_forty_requests() {
    let (objects, place) = counted();
    Store::create(&place, quick_options()).await.unwrap();
    large(&objects, 10_000).await;
    // The first sweep reads the log, and leaves a view.
    let store = Store::open(&place, quick_options()).await.unwrap();
    store.sweep(&SweepOptions::default()).await.unwrap();
    // Sixteen entries are not in the view: as many as there are on average.
    let one: CheckpointId = id(5).parse().unwrap();
    for _ in 0..8 {
        store.pin(one).await.unwrap();
        store.unpin(one).await.unwrap();
    }
    objects.reset();
    let store = Store::open(&place, quick_options()).await.unwrap();
    let report = store.sweep(&SweepOptions::default()).await.unwrap();
    assert_eq!(report, s4_store::SweepReport::default());
    let requests = objects.requests.load(Ordering::Relaxed);
    println!("{requests} requests");
    assert!(requests <= 40, "{requests} requests");
    // Everything to be deleted goes in bulk.
    let ids: Vec<CheckpointId> = (1..=3000).map(|n| id(n).parse().unwrap()).collect();
    store.retire(&ids, "").await.unwrap();
    objects.reset();
    let report = store.sweep(&now()).await.unwrap();
    assert_eq!((report.deleted.len(), report.failed.len()), (3000, 0));
    let requests = objects.requests.load(Ordering::Relaxed);
    println!("{requests} requests to delete 3000");
    assert!(requests <= 120, "{requests} requests");
    assert_eq!(objects.deletes.load(Ordering::Relaxed), 6001, "and the clock");
}

/// A store with a retired checkpoint, an aborted one, and one that stays.
async fn with_dead(place: &Place) -> (Store, CheckpointId, CheckpointId) {
    let store = Store::create(place, quick_options()).await.unwrap();
    toy::save(&store, 1, None, &[1; 20]).await.unwrap();
    let gone = toy::save(&store, 2, None, &[2; 20]).await.unwrap().id();
    let orphan = toy::stage(&store, 3, None, &[3; 20]).await.unwrap().id();
    store.retire(&[gone], "").await.unwrap();
    (store, gone, orphan)
}

/// A sweep that is not `exclusive` says in the log what it gives up, before it deletes. On a full
/// disk it has to make room for that entry first.
#[tokio::test(start_paused = true)]
async fn a_full_disk_is_swept() {
    for (view, exclusive) in [(true, false), (false, true), (false, false)] {
        let objects = Counting::default();
        let dated = FaultStore::with_runtime_clock(Arc::new(objects.clone()));
        let place = Place::objects(Arc::new(dated), Path::from("s"));
        let (store, gone, _) = with_dead(&place).await;
        if view {
            store.sweep(&SweepOptions::default()).await.unwrap();
        }
        tokio::time::sleep(Duration::from_secs(8 * 24 * 3600)).await;
        toy::save(&store, 4, None, &[4; 20]).await.unwrap();
        objects.full.store(true, Ordering::Relaxed);
        let options = SweepOptions { exclusive, ..SweepOptions::default() };
        let dry = SweepOptions { dry_run: true, ..options.clone() };
        let planned = store.sweep(&dry).await.unwrap();
        assert!(planned.deleted.iter().any(|s| s.checkpoint == Some(gone)), "{planned:?}");
        let report = store.sweep(&options).await.unwrap();
        if view || exclusive {
            let deleted: Vec<_> = report.deleted.iter().filter_map(|s| s.checkpoint).collect();
            assert_eq!(deleted, [gone], "{report:?}");
            // By now there is room for the entry that gives the orphan up.
            assert_eq!(report.aborted.len(), 1, "{report:?}");
        } else {
            assert!(report.deleted.is_empty(), "{report:?}");
            assert!(report.failed.iter().any(|(_, e)| e.contains("`exclusive`")), "{report:?}");
        }
        assert_eq!(store.list().await.unwrap().len(), 2);
    }
}

#[tokio::test]
async fn a_dry_run_writes_nothing_and_works_where_nothing_can_be_written() {
    let (objects, place) = counted();
    let (_, gone, orphan) = with_dead(&place).await;
    objects.read_only.store(true, Ordering::Relaxed);
    objects.reset();
    for store in [
        Store::open(&place, quick_options()).await.unwrap(),
        Store::open_read_only(&place, quick_options()).await.unwrap(),
    ] {
        let dry = SweepOptions { dry_run: true, ..now() };
        let planned = store.sweep(&dry).await.unwrap();
        let of =
            |list: &[s4_store::Swept]| list.iter().filter_map(|s| s.checkpoint).collect::<Vec<_>>();
        assert_eq!((of(&planned.deleted), of(&planned.aborted)), (vec![gone], vec![orphan]));
    }
    let touched = objects.writes.load(Ordering::Relaxed) + objects.deletes.load(Ordering::Relaxed);
    assert_eq!(touched, 0);
}

/// An entry that the view covers is damaged: what later entries ended is deleted, what this entry
/// ended stays.
#[tokio::test(start_paused = true)]
async fn old_damage_of_the_log_does_not_stop_a_sweep() {
    for (damaged, goes) in [(1, true), (4, false)] {
        let (faults, place) = faulty();
        let store = Store::create(&place, quick_options()).await.unwrap();
        toy::save(&store, 1, None, &[1; 20]).await.unwrap();
        toy::save(&store, 2, None, &[2; 20]).await.unwrap();
        let gone = toy::save(&store, 3, None, &[3; 20]).await.unwrap();
        store.retire(&[gone.id()], "").await.unwrap();
        toy::save(&store, 4, None, &[4; 20]).await.unwrap();
        store.sweep(&SweepOptions::default()).await.unwrap();
        let key = Path::from(format!("runs/one/log/{damaged:020}"));
        faults.put(&key, Bytes::from_static(b"rubbish").into()).await.unwrap();
        let store = Store::open(&place, quick_options()).await.unwrap();
        let report = store.sweep(&now()).await.unwrap();
        assert_eq!(report.deleted.len(), usize::from(goes), "{report:?}");
        assert_eq!(report.failed.len(), usize::from(!goes), "{report:?}");
        assert_eq!(store.list().await.unwrap().len(), 3);
    }
}
