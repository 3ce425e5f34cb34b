//! A process that stops at a named point and never comes back, and one that comes back too late.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use object_store::{ObjectStore, ObjectStoreExt};
use s4_store::testing::{quick_options, toy};
use s4_store::{
    CheckOptions, Conflict, CrashPoints, Error, Place, Resolution, Store, StoreOptions,
    SweepOptions,
};

use crate::{doing_at, faulty, now};

/// Notes the points that are reached, and stops the world at one of them.
#[derive(Debug, Default)]
struct Stop {
    at: Option<usize>,
    seen: Mutex<Vec<&'static str>>,
}

#[async_trait::async_trait]
impl CrashPoints for Stop {
    async fn reached(&self, point: &'static str) {
        let number = {
            let mut seen = self.seen.lock().unwrap();
            seen.push(point);
            seen.len() - 1
        };
        if self.at == Some(number) {
            std::future::pending::<()>().await;
        }
    }
}

fn options(stop: &Arc<Stop>) -> StoreOptions {
    StoreOptions { crash_points: Some(Arc::clone(stop) as _), ..quick_options() }
}

const DAY: Duration = Duration::from_secs(24 * 3600);

/// A save, a delta, a rebase, retiring and sweeping, by a process that may stop anywhere.
async fn life(place: &Place, stop: &Arc<Stop>) -> Result<(), Error> {
    let store = Store::open(place, options(stop)).await?;
    let a = toy::save(&store, 1, None, &[1; 20]).await?;
    let b = toy::save(&store, 2, Some((a.reference(), &[1; 20])), &[2; 20]).await?;
    store.rebase(b.id(), &mut toy::ToyRebaser::default()).await?;
    store.retire(&[a.id()], "").await?;
    store.sweep(&now()).await?;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_crash_at_every_named_point() {
    let (_, place) = faulty();
    Store::create(&place, quick_options()).await.unwrap();
    let calm = Arc::new(Stop::default());
    life(&place, &calm).await.unwrap();
    let points = calm.seen.lock().unwrap().clone();
    for name in ["attempt.data", "attempt.manifest", "log.before", "log.after", "rebase.verified"] {
        assert!(points.contains(&name), "{name} is never reached");
    }
    assert!(points.contains(&"delete.begun") && points.contains(&"log.viewed"));
    for (at, name) in points.iter().enumerate() {
        let (_, place) = faulty();
        let kept = Store::create(&place, quick_options()).await.unwrap();
        let kept = toy::save(&kept, 0, None, &[9; 20]).await.unwrap();
        let stop = Arc::new(Stop { at: Some(at), ..Stop::default() });
        let ended = tokio::time::timeout(DAY, life(&place, &stop)).await;
        assert!(ended.is_err(), "{at} {name}: it was to stop there");

        let store = Store::open(&place, quick_options()).await.unwrap();
        let all = CheckOptions { read_data: true, ..CheckOptions::default() };
        let report = store.check(&all, None).await.unwrap();
        assert!(report.is_clean() && report.void.is_empty(), "{at} {name}: {report:?}");
        let state = store.state().await.unwrap();
        for checkpoint in state.list() {
            let chain = toy::chain(&state, checkpoint).unwrap();
            let content = toy::restore(&store, &chain).await.unwrap();
            let expected = if checkpoint.id() == kept.id() { 9 } else { checkpoint.step() as u8 };
            assert_eq!(content, [expected; 20], "{at} {name}");
        }
        assert!(state.get(kept.id()).is_some());
        for _ in 0..2 {
            store.sweep(&now()).await.unwrap();
        }
        let report = store.check(&all, None).await.unwrap();
        assert!(report.is_clean() && report.unlisted.is_empty(), "{at} {name}: {report:?}");
    }
}

/// A writer sleeps for longer than the grace between its data and its commit; a sweep gives up its
/// attempt.
#[tokio::test(start_paused = true)]
async fn a_writer_that_wakes_up_too_late_is_refused() {
    let (_, place) = faulty();
    let writer = Store::create(&place, quick_options()).await.unwrap();
    let base = toy::save(&writer, 1, None, &[1; 20]).await.unwrap();
    let staged = toy::stage(&writer, 2, None, &[2; 20]).await.unwrap();
    let id = staged.id();
    let sweeper = Store::open(&place, quick_options()).await.unwrap();

    tokio::time::sleep(6 * DAY).await;
    let early = sweeper.sweep(&SweepOptions::default()).await.unwrap();
    assert!(early.aborted.is_empty() && early.deleted.is_empty());
    assert_eq!(early.waiting.len(), 1);
    tokio::time::sleep(2 * DAY).await;
    let first = sweeper.sweep(&SweepOptions::default()).await.unwrap();
    assert_eq!(first.aborted.iter().filter_map(|s| s.checkpoint).collect::<Vec<_>>(), [id]);
    assert!(first.deleted.is_empty(), "one cycle gives up, another one deletes");
    let second = sweeper.sweep(&SweepOptions::default()).await.unwrap();
    assert_eq!(second.deleted.iter().filter_map(|s| s.checkpoint).collect::<Vec<_>>(), [id]);

    let refused = staged.publish().await.unwrap_err();
    let spent = Conflict::Spent { id, state: "aborted" };
    assert!(matches!(&refused, Error::Conflict(c) if *c == spent), "{refused}");
    let listed: Vec<_> = writer.list().await.unwrap().iter().map(|c| c.id()).collect();
    assert_eq!(listed, [base.id()]);
}

/// The same writer, but fast enough: what a sweep saw as an orphan is listed by the time it acts.
#[tokio::test(start_paused = true)]
async fn an_orphan_that_is_published_meanwhile_stays() {
    let (_, place) = faulty();
    let writer = Store::create(&place, quick_options()).await.unwrap();
    let staged = toy::stage(&writer, 2, None, &[2; 20]).await.unwrap();
    tokio::time::sleep(8 * DAY).await;
    // The sweep stops before its entry; the writer publishes; the sweep goes on.
    let stop = Arc::new(Stop { at: Some(0), ..Stop::default() });
    let sweeper = Store::open(&place, options(&stop)).await.unwrap();
    let sweep = SweepOptions::default();
    let sweeping = tokio::time::timeout(DAY, sweeper.sweep(&sweep)).await;
    assert!(sweeping.is_err());
    assert_eq!(*stop.seen.lock().unwrap(), ["sweep.judged"]);
    let saved = staged.publish().await.unwrap();
    let report = sweeper.sweep(&sweep).await.unwrap();
    assert!(report.aborted.is_empty() && report.deleted.is_empty());
    assert_eq!(writer.latest().await.unwrap().unwrap().id(), saved.id());
}

/// As above, but the sweep goes on immediately: it gives up the other orphan and leaves this one.
#[tokio::test(start_paused = true)]
async fn a_sweep_looks_at_the_log_once_more_before_it_gives_up() {
    let (_, place) = faulty();
    let writer = Store::create(&place, quick_options()).await.unwrap();
    let staged = toy::stage(&writer, 1, None, &[1; 20]).await.unwrap();
    let dropped = toy::stage(&writer, 2, None, &[2; 20]).await.unwrap();
    let (id, orphan) = (staged.id(), dropped.id());
    tokio::time::sleep(8 * DAY).await;
    let publish = async move { drop(staged.publish().await.unwrap()) };
    let sweeper = Store::open(&place, doing_at("sweep.judged", publish)).await.unwrap();
    let report = sweeper.sweep(&SweepOptions::default()).await.unwrap();
    assert_eq!(report.aborted.iter().filter_map(|s| s.checkpoint).collect::<Vec<_>>(), [orphan]);
    assert_eq!(writer.latest().await.unwrap().unwrap().id(), id);
}

/// A server acknowledges an object but keeps less of it: nothing is published.
#[tokio::test(start_paused = true)]
async fn what_is_not_stored_whole_is_not_published() {
    for len in [20, 200] {
        let (faults, place) = faulty();
        let creator = Store::create(&place, quick_options()).await.unwrap();
        let cut = faults.clone();
        let damage = async move {
            let keys = cut.list(Some(&object_store::path::Path::from("runs/one/ck")));
            let metas: Vec<_> = futures::TryStreamExt::try_collect(keys).await.unwrap();
            let data = metas.iter().find(|m| m.location.as_ref().ends_with("d-1")).unwrap();
            cut.put(&data.location, "x".into()).await.unwrap();
        };
        let store = Store::open(&place, doing_at("attempt.manifest", damage)).await.unwrap();
        let error = toy::save(&store, 1, None, &vec![1; len]).await.unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{len}: {error}");
        assert!(creator.list().await.unwrap().is_empty());
    }
}

/// A parent is retired while its child is being made.
#[tokio::test(start_paused = true)]
async fn a_child_of_a_retired_parent_is_refused() {
    let (_, place) = faulty();
    let one = Store::create(&place, quick_options()).await.unwrap();
    let other = Store::open(&place, quick_options()).await.unwrap();
    let base = toy::save(&one, 1, None, &[1; 20]).await.unwrap();
    let child = toy::stage(&one, 2, Some((base.reference(), &[1; 20])), &[2; 20]).await.unwrap();
    other.retire(&[base.id()], "too fast").await.unwrap();
    let error = child.publish().await.unwrap_err();
    assert!(matches!(error, Error::Conflict(Conflict::ParentGone { .. })), "{error}");
}

/// A refusal is final only if no earlier try may still land.
#[tokio::test(start_paused = true)]
async fn a_refusal_after_a_lost_answer_is_no_answer() {
    use s4_store::testing::{Fault, OpKind};
    for lost_first in [true, false] {
        let (faults, place) = faulty();
        let store = Store::create(&place, quick_options()).await.unwrap();
        let staged = toy::stage(&store, 1, None, &[1; 20]).await.unwrap();
        let mut creates = 0;
        faults.set_plan(move |op| {
            creates += u32::from(op.kind == OpKind::Create);
            let fault = if lost_first && creates == 1 { Fault::Before } else { Fault::Denied };
            (op.kind == OpKind::Create).then_some(fault)
        });
        match staged.publish().await.unwrap_err() {
            Error::CommitUnknown(_) => assert!(lost_first),
            Error::Storage { source, .. } => {
                assert!(!lost_first, "{source}");
                assert_eq!(source.cause(), s4_store::Cause::Permission);
            }
            other => panic!("{other}"),
        }
    }
}

/// All answers of a commit are lost, and reading back fails, too.
#[tokio::test(start_paused = true)]
async fn an_unknown_commit_is_resolved_for_good() {
    use s4_store::testing::{Fault, OpKind};
    for committed in [true, false] {
        let (faults, place) = faulty();
        let store = Store::create(&place, quick_options()).await.unwrap();
        let staged = toy::stage(&store, 1, None, &[1; 20]).await.unwrap();
        let (mut creates, fault) = (0, if committed { Fault::After } else { Fault::Before });
        faults.set_plan(move |op| match op.kind {
            OpKind::Create => {
                creates += 1;
                Some(fault)
            }
            _ if creates > 0 => Some(Fault::Before),
            _ => None,
        });
        let id = staged.id();
        let Err(Error::CommitUnknown(unknown)) = staged.publish().await else {
            panic!("the outcome cannot be known");
        };
        assert_eq!((unknown.checkpoint, unknown.slot), (Some(id), 1));
        faults.heal();
        // Another process may resolve it.
        let other = Store::open(&place, quick_options()).await.unwrap();
        let resolved = other.resolve(&unknown).await.unwrap();
        assert_eq!(matches!(resolved, Resolution::Committed(_)), committed);
        assert_eq!(store.list().await.unwrap().len(), usize::from(committed));
        // A lost write can never land: its number is taken.
        assert_eq!(store.log(1).await.unwrap().len(), 1);
        assert_eq!(other.resolve(&unknown).await.unwrap(), resolved);
    }
}
