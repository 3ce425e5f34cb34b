//! Listing retired checkpoints again, and which is faster: that or a sweep.

use std::time::Duration;

use object_store::ObjectStoreExt;
use object_store::path::Path;
use s4_store::testing::quick_options;
use s4_store::{About, Best, Conflict, Error, Retention, Store, SweepOptions};

use crate::damage::{grown, key, steps};
use crate::{doing_at, now};

#[tokio::test(start_paused = true)]
async fn a_retired_checkpoint_comes_back_as_it_was() {
    let (faults, place, saved) = grown(6).await;
    let store = Store::open(&place, quick_options()).await.unwrap();
    let before = store.list().await.unwrap();
    store.retire(&[saved[4].id(), saved[5].id()], "").await.unwrap();
    assert_eq!(store.latest().await.unwrap().unwrap().step(), 4);
    // The delta needs its base.
    let back = store.unretire(&[saved[5].id()]).await.unwrap();
    assert_eq!(back.iter().map(|c| c.step()).collect::<Vec<_>>(), [5, 6]);
    assert_eq!(steps(&store).await, [1, 2, 3, 4, 5, 6]);
    let mut after = store.list().await.unwrap();
    for (now, was) in after.iter_mut().zip(&before) {
        now.entry = was.entry;
    }
    assert_eq!(after, before, "except for the entry that lists it");
    // Entries with the new operation are of version 2, all others of version 1.
    for entry in store.log(1).await.unwrap() {
        let bytes = faults.get(&key(entry.n)).await.unwrap().bytes().await.unwrap();
        let new = String::from_utf8_lossy(&bytes).contains("unretire");
        assert_eq!(entry.v, 1 + u32::from(new));
        assert_eq!(new, entry.n > 7);
    }
    let again = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(again.list().await.unwrap(), store.list().await.unwrap());
    let listed = store.unretire(&[saved[5].id()]).await.unwrap_err();
    let state = "listed";
    let refused = Conflict::NotRetired { id: saved[5].id(), state };
    assert!(matches!(&listed, Error::Conflict(c) if *c == refused), "{listed}");
    // It can be retired and listed again any number of times.
    store.retire(&[saved[5].id()], "").await.unwrap();
    store.unretire(&[saved[5].id()]).await.unwrap();
    assert_eq!(steps(&store).await.len(), 6);
}

#[tokio::test(start_paused = true)]
async fn what_a_sweep_has_given_up_does_not_come_back() {
    let (faults, place, saved) = grown(6).await;
    let store = Store::open(&place, quick_options()).await.unwrap();
    let id = saved[5].id();
    store.retire(&[id], "").await.unwrap();
    // During the grace, a sweep leaves it alone.
    store.sweep(&SweepOptions::default()).await.unwrap();
    store.unretire(&[id]).await.unwrap();
    store.retire(&[id], "").await.unwrap();
    // Some of its data is lost.
    let object = Path::from(format!("runs/one/ck/{id}/d-1"));
    let bytes = faults.get(&object).await.unwrap().bytes().await.unwrap();
    faults.delete(&object).await.unwrap();
    assert!(store.unretire(&[id]).await.unwrap_err().is_missing());
    faults.put(&object, bytes.into()).await.unwrap();
    store.sweep(&now()).await.unwrap();
    let error = store.unretire(&[id]).await.unwrap_err();
    let refused = Conflict::NotRetired { id, state: "given up" };
    assert!(matches!(&error, Error::Conflict(c) if *c == refused), "{error}");
    assert_eq!(steps(&store).await, [1, 2, 3, 4, 5]);
}

/// The two meet at every point of a sweep: one of them succeeds, and the other does nothing.
#[tokio::test(start_paused = true)]
async fn a_sweep_and_an_unretire_at_the_same_time() {
    for (point, comes_back) in
        [("log.before", true), ("sweep.given_up", false), ("delete.begun", false)]
    {
        let (_, place, saved) = grown(6).await;
        let store = Store::open(&place, quick_options()).await.unwrap();
        let id = saved[5].id();
        store.retire(&[id], "").await.unwrap();
        let other = store.clone();
        let meanwhile = async move {
            let back = other.unretire(&[id]).await;
            assert_eq!(back.is_ok(), comes_back, "{point}: {back:?}");
        };
        let sweeper = Store::open(&place, doing_at(point, meanwhile)).await.unwrap();
        let report = sweeper.sweep(&now()).await.unwrap();
        assert_eq!(report.deleted.is_empty(), comes_back, "{point}: {report:?}");
        assert_eq!(steps(&store).await.len(), if comes_back { 6 } else { 5 }, "{point}");
    }
}

/// Between a sweep's judgement and its entry a checkpoint is listed again and retired again: a
/// reader that began in between gets a full grace.
#[tokio::test(start_paused = true)]
async fn a_checkpoint_that_was_retired_twice_has_two_graces() {
    let (_, place, saved) = grown(6).await;
    let store = Store::open(&place, quick_options()).await.unwrap();
    let id = saved[5].id();
    store.retire(&[id], "").await.unwrap();
    tokio::time::sleep(Duration::from_secs(8 * 24 * 3600)).await;
    let other = store.clone();
    let meanwhile = async move {
        other.unretire(&[id]).await.unwrap();
        other.retire(&[id], "").await.unwrap();
    };
    let sweeper = Store::open(&place, doing_at("log.before", meanwhile)).await.unwrap();
    let report = sweeper.sweep(&SweepOptions::default()).await.unwrap();
    assert!(report.deleted.is_empty(), "{report:?}");
    store.unretire(&[id]).await.unwrap();
    assert_eq!(steps(&store).await.len(), 6);
}

#[tokio::test(start_paused = true)]
async fn the_best_by_a_metric_that_nobody_has_retires_nothing() {
    let (_, place, _) = grown(6).await;
    let store = Store::open(&place, quick_options()).await.unwrap();
    let mut attempt = store.begin().await.unwrap();
    attempt.put("w", "x".into()).await.unwrap();
    let metrics = [("val_loss".to_owned(), 1.0)].into();
    attempt.publish("".into(), About { step: 7, metrics, ..About::default() }).await.unwrap();
    let best = |metric: &str| Retention {
        best: vec![Best { metric: metric.into(), count: 1, larger: false }],
        ..Retention::default()
    };
    let error = store.apply_retention(&best("loss")).await.unwrap_err();
    let said = error.to_string();
    assert!(matches!(error, Error::Argument(_)), "{said}");
    assert!(said.contains("`loss`") && said.contains("val_loss"), "{said}");
    assert_eq!(store.list().await.unwrap().len(), 7);
    assert_eq!(store.apply_retention(&best("val_loss")).await.unwrap().len(), 6);
}
