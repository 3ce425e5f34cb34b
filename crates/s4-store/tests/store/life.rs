//! What a store does when all goes well, and where it refuses.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use s4_store::testing::{Liar, Lie, OpKind, quick_options, toy};
use s4_store::{
    About, Best, CallbackError, Checkpoint, Conflict, Error, Keep, Place, Reading, Retention,
    Store, SweepOptions, Verdict, Why,
};

use crate::faulty;

async fn new_store() -> Store {
    let (_, place) = faulty();
    Store::create(&place, quick_options()).await.unwrap()
}

async fn save(store: &Store, step: u64, parent: Option<&Checkpoint>, loss: f64) -> Checkpoint {
    let mut attempt = store.begin().await.unwrap();
    attempt.put("weights", Bytes::from(vec![step as u8; 10])).await.unwrap();
    let about = About {
        step,
        parent: parent.map(Checkpoint::reference),
        metrics: [("loss".to_owned(), loss)].into(),
        tags: [("run".to_owned(), "a".to_owned())].into(),
        raw_len: 40,
        ..About::default()
    };
    attempt.publish(Bytes::new(), about).await.unwrap()
}

fn ids(list: &[&Checkpoint]) -> Vec<s4_store::CheckpointId> {
    list.iter().map(|c| c.id()).collect()
}

#[tokio::test]
async fn retention_keeps_what_any_rule_names_and_what_that_needs() {
    let store = new_store().await;
    let base = save(&store, 100, None, 5.0).await;
    let d1 = save(&store, 110, Some(&base), 4.0).await;
    let d2 = save(&store, 120, Some(&d1), 1.0).await;
    let old = save(&store, 200, None, 3.0).await;
    let mid = save(&store, 210, None, 2.5).await;
    let pin = save(&store, 220, None, 9.0).await;
    let last = save(&store, 230, None, 8.0).await;
    store.pin(pin.id()).await.unwrap();
    let state = store.state().await.unwrap();

    let best = Best { metric: "loss".into(), count: 1, larger: false };
    let policy = Retention { keep_last: Some(1), best: vec![best], ..Retention::default() };
    let plan = policy.plan(&state).unwrap();
    assert_eq!(plan.retire, ids(&[&old, &mid]));
    assert_eq!(plan.keep[&d2.id()], [Keep::Best("loss".into())]);
    assert_eq!(plan.keep[&base.id()], [Keep::NeededBy(d2.id())]);
    assert_eq!(plan.keep[&last.id()], [Keep::Newest, Keep::Last]);
    assert_eq!(plan.keep[&pin.id()], [Keep::Pinned]);

    let every = Retention { keep_every: Some(100), ..Retention::default() };
    assert_eq!(every.plan(&state).unwrap().retire.first(), Some(&d2.id()), "deltas go first");
    assert_eq!(Retention::default().plan(&state).unwrap().retire, [], "no rules keep everything");
    let none = Retention { keep_last: Some(0), protect: vec![old.id()], ..Retention::default() };
    let kept: Vec<_> = none.plan(&state).unwrap().keep.into_keys().collect();
    let mut wanted = ids(&[&old, &pin, &last]);
    wanted.sort();
    assert_eq!(kept, wanted, "the newest stays whatever the rules say");

    let gone = store.apply_retention(&policy).await.unwrap();
    assert_eq!(gone, ids(&[&old, &mid]));
    assert_eq!(store.apply_retention(&policy).await.unwrap(), []);
    let listed = store.list().await.unwrap();
    assert_eq!(ids(&listed.iter().collect::<Vec<_>>()), ids(&[&base, &d1, &d2, &pin, &last]));
    assert_eq!(listed[0].about.tags, BTreeMap::from([("run".into(), "a".into())]));
}

#[tokio::test]
async fn what_may_not_be_retired_is_not() {
    let store = new_store().await;
    let base = save(&store, 1, None, 0.0).await;
    let delta = save(&store, 2, Some(&base), 0.0).await;
    let needed = store.retire(&[base.id()], "").await.unwrap_err();
    assert!(matches!(needed, Error::Conflict(Conflict::Needed { .. })), "{needed}");
    store.pin(delta.id()).await.unwrap();
    store.pin(delta.id()).await.unwrap();
    let pinned = store.retire(&[base.id(), delta.id()], "").await.unwrap_err();
    assert!(matches!(pinned, Error::Conflict(Conflict::Pinned(_))), "{pinned}");
    store.unpin(delta.id()).await.unwrap();
    assert_eq!(store.retire(&[base.id(), delta.id(), base.id()], "old").await.unwrap(), 2);
    assert!(store.latest().await.unwrap().is_none());
    let read = store.read(base.id()).await.unwrap_err();
    assert!(matches!(read, Error::NoCheckpoint { .. }), "{read}");
    assert_eq!(store.log(1).await.unwrap().len(), 5, "a second pin is no entry");
    let aborted = store.abort(base.id()).await.unwrap_err();
    assert!(matches!(aborted, Error::Conflict(Conflict::Spent { .. })), "{aborted}");
}

#[tokio::test(start_paused = true)]
async fn a_sweep_waits_for_readers() {
    let (_, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let gone = toy::save(&store, 1, None, &[1; 20]).await.unwrap();
    let state = store.state().await.unwrap();
    let chain = toy::chain(&state, state.get(gone.id()).unwrap()).unwrap();
    tokio::time::sleep(Duration::from_secs(30 * 24 * 3600)).await;
    store.retire(&[gone.id()], "").await.unwrap();
    let report = store.sweep(&SweepOptions::default()).await.unwrap();
    assert_eq!(report.waiting.iter().map(|s| s.why).collect::<Vec<_>>(), [Why::TooYoung]);
    // Its data is old, but it was retired a moment ago: readers at work can finish.
    assert_eq!(toy::restore(&store, &chain).await.unwrap(), [1; 20]);
    tokio::time::sleep(Duration::from_secs(8 * 24 * 3600)).await;
    let dry = SweepOptions { dry_run: true, ..SweepOptions::default() };
    let planned = store.sweep(&dry).await.unwrap();
    assert_eq!(toy::restore(&store, &chain).await.unwrap(), [1; 20]);
    let report = store.sweep(&SweepOptions::default()).await.unwrap();
    assert_eq!(report, planned);
    assert_eq!(report.deleted[0].why, Why::Retired);
    assert!(report.deleted_bytes() > 20);
    let error = toy::restore(&store, &chain).await.unwrap_err();
    assert!(error.is_missing(), "{error}");
    let short = SweepOptions { grace: Duration::from_secs(60), ..SweepOptions::default() };
    assert!(matches!(store.sweep(&short).await, Err(Error::Argument(_))));
}

#[tokio::test]
async fn an_attempt_can_be_given_up_by_hand() {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let mut attempt = store.begin().await.unwrap();
    attempt.put("w", Bytes::from_static(b"123")).await.unwrap();
    attempt.abort().await.unwrap();
    let staged = toy::stage(&store, 1, None, b"12").await.unwrap();
    store.abort(staged.id()).await.unwrap();
    let refused = staged.publish().await.unwrap_err();
    assert!(matches!(refused, Error::Conflict(Conflict::Spent { .. })), "{refused}");
    let left = faults.list(Some(&Path::from("runs/one/ck")));
    let left: Vec<_> = futures::TryStreamExt::try_collect(left).await.unwrap();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test]
async fn nonsense_is_refused() {
    let store = new_store().await;
    let attempt = store.begin().await.unwrap();
    let metrics = [("loss".to_owned(), f64::NAN)].into();
    let error = attempt.publish(Bytes::new(), About { metrics, ..About::default() }).await;
    assert!(matches!(error, Err(Error::Argument(_))));
    let attempt = store.begin().await.unwrap();
    let tags = [("x".to_owned(), "y".repeat(100_000))].into();
    let error = attempt.publish(Bytes::new(), About { tags, ..About::default() }).await;
    assert!(matches!(error, Err(Error::Limit(_))), "{error:?}");
    let mut attempt = store.begin().await.unwrap();
    let large = Bytes::from(vec![0; s4_store::MAX_OBJECT + 1]);
    assert!(matches!(attempt.put("w", large).await, Err(Error::Limit(_))));
    assert!(store.list().await.unwrap().is_empty());
    let saved = save(&store, 1, None, 0.0).await;
    let reading = store.read(saved.id()).await.unwrap();
    assert_eq!(reading.range(0, 2..5).await.unwrap(), [1u8; 3][..]);
    assert_eq!(reading.range(0, 5..5).await.unwrap(), Bytes::new());
    for (n, range) in [(0, 0..11), (1, 0..0)] {
        assert!(matches!(reading.range(n, range).await, Err(Error::Argument(_))));
    }
    let backwards = std::ops::Range { start: 4, end: 3 };
    assert!(matches!(reading.range(0, backwards).await, Err(Error::Argument(_))));
}

#[tokio::test]
async fn a_failed_upload_ends_the_attempt() {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let mut attempt = store.begin().await.unwrap();
    let doomed = |kind, key: &str| kind == OpKind::Put && key.ends_with("d-1");
    faults.set_plan(move |op| doomed(op.kind, &op.key).then_some(s4_store::testing::Fault::Before));
    for _ in 0..3 {
        attempt.put("w", Bytes::from_static(b"123")).await.unwrap();
    }
    let error = attempt.publish(Bytes::new(), About::default()).await.unwrap_err();
    assert!(matches!(&error, Error::Storage { key, .. } if key.ends_with("d-1")), "{error}");
    assert!(store.list().await.unwrap().is_empty());
}

/// Whatever keeps an attempt from being staged, its objects are deleted immediately, without a sweep.
#[tokio::test]
async fn what_cannot_be_staged_is_deleted() {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let parent = toy::save(&store, 1, None, &[1; 20]).await.unwrap();
    let objects = || async {
        let all = faults.list(Some(&Path::from("runs/one/ck")));
        futures::TryStreamExt::try_collect::<Vec<_>>(all).await.unwrap().len()
    };
    let before = objects().await;
    for doomed in ["/d-1", "/manifest"] {
        faults.set_plan(move |op| {
            let hit = op.kind == OpKind::Put && op.key.ends_with(doomed);
            hit.then_some(s4_store::testing::Fault::Denied)
        });
        toy::stage(&store, 2, None, &[2; 40]).await.unwrap_err();
        assert_eq!(objects().await, before, "{doomed}");
    }
    faults.heal();
    // The parent turns out to be damaged when everything is stored.
    let lost = Path::from(format!("runs/one/ck/{}/d-0", parent.id()));
    faults.delete(&lost).await.unwrap();
    let base = (parent.reference(), &[1; 20][..]);
    toy::stage(&store, 2, Some(base), &[2; 20]).await.unwrap_err();
    assert_eq!(objects().await, before - 1);
}

/// A store that was copied to a server which lies is not written to.
#[tokio::test]
async fn a_moved_store_is_probed_again() {
    let home: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let place = Place::objects(Arc::clone(&home), Path::default());
    let store = Store::create(&place, quick_options()).await.unwrap();
    toy::save(&store, 1, None, b"one").await.unwrap();
    let liar: Arc<dyn ObjectStore> = Arc::new(Liar::new(home, Lie::IgnoresCondition));
    let moved = Place::objects(liar, Path::default());
    let store = Store::open(&moved, quick_options()).await.unwrap();
    assert_eq!(store.list().await.unwrap().len(), 1, "reading is fine");
    let refused = toy::save(&store, 2, None, b"two").await;
    assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
}

#[tokio::test]
async fn a_newer_log_and_a_gap_are_named() {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    for step in 0..3 {
        save(&store, step, None, 0.0).await;
    }
    let entry = |n: u64| Path::from(format!("runs/one/log/{n:020}"));
    let second = faults.get(&entry(2)).await.unwrap().bytes().await.unwrap();
    faults.delete(&entry(2)).await.unwrap();
    let gap = Store::open(&place, quick_options()).await.unwrap_err();
    assert!(gap.is_log_damage() && gap.to_string().contains("entry 2 is missing"), "{gap}");
    // Another entry in its place does not fit the chain of hashes.
    let first = faults.get(&entry(1)).await.unwrap().bytes().await.unwrap();
    faults.put(&entry(2), first.into()).await.unwrap();
    assert!(matches!(Store::open(&place, quick_options()).await, Err(Error::LogDamaged { .. })));
    faults.put(&entry(2), second.into()).await.unwrap();
    Store::open(&place, quick_options()).await.unwrap();
}

/// Opening and asking for the newest costs a bounded number of requests, whatever the store holds.
#[tokio::test]
async fn opening_a_large_store_takes_few_requests() {
    const MANY: u64 = 5_000;
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    for step in 0..MANY {
        let attempt = store.begin().await.unwrap();
        attempt.publish(Bytes::new(), About { step, ..About::default() }).await.unwrap();
    }
    faults.heal();
    let reader = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(reader.latest().await.unwrap().unwrap().step(), MANY - 1);
    let requests = faults.ops();
    assert!(requests < 40, "{requests} requests");
    assert_eq!(reader.list().await.unwrap().len() as u64, MANY);
    faults.delete(&Path::from("runs/one/logck")).await.unwrap();
    let rebuilt = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(rebuilt.list().await.unwrap(), reader.list().await.unwrap());
    println!("{requests} requests to open a store of {MANY} and read the newest");
}

/// A listing that misses the newest entries changes nothing: they are asked for by name.
#[tokio::test]
async fn a_stale_listing_of_the_log_is_made_up_for() {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    for step in 0..3 {
        save(&store, step, None, 0.0).await;
    }
    let stale = s4_store::testing::Fault::Stale;
    faults.set_plan(move |op| (op.kind == OpKind::List).then_some(stale));
    let report = store.check(&s4_store::CheckOptions::default(), None).await.unwrap();
    assert!(faults.fired() > 0 && report.is_clean());
    assert_eq!(report.checkpoints, 3);
    assert_eq!(Store::open(&place, quick_options()).await.unwrap().list().await.unwrap().len(), 3);
}

/// Objects to every second checkpoint.
#[derive(Default)]
struct Picky(u32);

#[async_trait::async_trait]
impl s4_store::Inspector for Picky {
    async fn inspect(
        &mut self,
        _: &Store,
        chain: &[Checkpoint],
        reading: &Reading,
    ) -> Result<(), CallbackError> {
        assert_eq!(chain[0].id(), reading.id());
        self.0 += 1;
        if self.0.is_multiple_of(2) { Err("I do not like it".into()) } else { Ok(()) }
    }
}

#[tokio::test]
async fn a_check_names_what_is_damaged_and_what_needs_it() {
    use s4_store::CheckOptions;
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let base = save(&store, 1, None, 0.0).await;
    let delta = save(&store, 2, Some(&base), 0.0).await;
    let other = save(&store, 3, None, 0.0).await;

    let mut read = 0;
    for rest in 0..2 {
        let options =
            CheckOptions { read_data: true, part: Some((rest, 2)), ..CheckOptions::default() };
        let report = store.check(&options, None).await.unwrap();
        assert!(report.is_clean() && report.bytes_read > 0);
        read += report.bytes_read;
    }
    assert_eq!(read, 30, "the parts together are all of it");
    let report = store.check(&CheckOptions::default(), Some(&mut Picky::default())).await.unwrap();
    let found: Vec<_> = report.findings.iter().map(|f| f.checkpoint).collect();
    assert_eq!(found, [Some(delta.id())]);
    assert!(matches!(report.findings[0].error, Error::Callback(_)));

    let key = Path::from(format!("runs/one/ck/{}/d-0", base.id()));
    faults.put(&key, Bytes::from(vec![1, 1, 1, 1, 1, 1, 1, 1, 1, 2]).into()).await.unwrap();
    let quick = store.check(&CheckOptions::default(), None).await.unwrap();
    assert!(quick.is_clean(), "the size is right");
    let all = CheckOptions { read_data: true, ..CheckOptions::default() };
    let report = store.check(&all, None).await.unwrap();
    assert!(matches!(&report.findings[..], [f] if f.checkpoint == Some(base.id())), "{report:?}");
    assert_eq!(report.unusable, [(delta.id(), base.id())]);
    let usable = store.usable(&report).await.unwrap();
    assert_eq!(ids(&usable.iter().collect::<Vec<_>>()), ids(&[&other]));
    faults.delete(&key).await.unwrap();
    let quick = store.check(&CheckOptions::default(), None).await.unwrap();
    assert!(matches!(&quick.findings[..], [f] if f.error.is_missing()), "{quick:?}");
    let only = CheckOptions { only: vec![other.id()], ..all.clone() };
    assert!(store.check(&only, None).await.unwrap().is_clean());

    // The part of its parent that the delta needs may still be intact: a caller can tell.
    for (stored, verdict) in [(true, Verdict::Restores), (false, Verdict::Needs(base.id()))] {
        let report = store.check(&all, Some(&mut Says(stored))).await.unwrap();
        let named = report.findings.iter().any(|f| f.checkpoint == Some(delta.id()));
        assert!(!named && report.verdicts.contains(&(delta.id(), verdict)), "{report:?}");
        assert_eq!(report.unusable.is_empty(), stored);
    }
}

/// Says of every checkpoint whether it restores.
struct Says(bool);

#[async_trait::async_trait]
impl s4_store::Inspector for Says {
    async fn inspect(
        &mut self,
        _: &Store,
        _: &[Checkpoint],
        _: &Reading,
    ) -> Result<(), CallbackError> {
        if self.0 { Ok(()) } else { Err("it does not".into()) }
    }
}
