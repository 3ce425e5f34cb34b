//! One bad entry of a log whose checkpoints were retired, replaced and swept: what has no data is not
//! listed, and nothing else is lost than what that entry said.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use s4_store::testing::{FaultStore, quick_options, toy};
use s4_store::{
    CheckOptions, Checkpoint, CheckpointId, Entry, Op, Place, RepairReport, Retention, Store,
};

use crate::damage::{Way, harm, steps};
use crate::{doing_at, faulty, now};

const VIEW: &str = "runs/one/logck";

/// A store with its log, and a view that was stored halfway.
struct Swept {
    faults: FaultStore,
    place: Place,
    log: Vec<Entry>,
    halfway: (u64, Bytes),
    listed: BTreeSet<CheckpointId>,
}

/// Every operation, with a sweep that deletes data after each that takes something off the list.
async fn swept() -> Swept {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let sweep = async || store.sweep(&now()).await.unwrap();
    let one = toy::save(&store, 1, None, &[1; 20]).await.unwrap();
    let two = toy::save(&store, 2, Some((one.reference(), &[1; 20])), &[2; 20]).await.unwrap();
    let three = toy::save(&store, 3, Some((two.reference(), &[2; 20])), &[3; 20]).await.unwrap();
    store.pin(two.id()).await.unwrap();
    let two = store.rebase(two.id(), &mut toy::ToyRebaser::default()).await.unwrap();
    sweep().await;
    let four = toy::save(&store, 4, Some((two.reference(), &[2; 20])), &[4; 20]).await.unwrap();
    store.unpin(two.id()).await.unwrap();
    store.retire(&[three.id()], "").await.unwrap();
    sweep().await;
    let view = faults.get(&Path::from(VIEW)).await.unwrap().bytes().await.unwrap();
    let halfway = (store.state().await.unwrap().head(), view);
    let five = toy::save(&store, 5, None, &[5; 20]).await.unwrap();
    let six = toy::save(&store, 6, None, &[6; 20]).await.unwrap();
    store.retire(&[five.id(), six.id()], "").await.unwrap();
    store.unretire(&[five.id()]).await.unwrap();
    store.pin(five.id()).await.unwrap();
    sweep().await;
    let seven = toy::save(&store, 7, Some((five.reference(), &[5; 20])), &[7; 20]).await.unwrap();
    let eight = toy::save(&store, 8, Some((seven.reference(), &[7; 20])), &[8; 20]).await.unwrap();
    store.retire(&[eight.id()], "").await.unwrap();
    store.retire(&[seven.id(), one.id()], "").await.unwrap();
    sweep().await;
    toy::save(&store, 9, Some((four.reference(), &[4; 20])), &[9; 20]).await.unwrap();
    let ten = toy::save(&store, 10, None, &[10; 20]).await.unwrap();
    store.retire(&[ten.id()], "").await.unwrap();
    sweep().await;
    toy::save(&store, 11, Some((five.reference(), &[5; 20])), &[11; 20]).await.unwrap();
    sweep().await;
    let log = store.log(1).await.unwrap();
    let listed = ids(&store).await;
    Swept { faults, place, log, halfway, listed }
}

async fn ids(store: &Store) -> BTreeSet<CheckpointId> {
    store.list().await.unwrap().iter().map(|c| c.id()).collect()
}

/// The checkpoints that are unknown without an entry: those that it listed or replaced, and those made from them.
/// But a later replacement proves that the old checkpoint was listed.
fn hangs_on(log: &[Entry], lost: u64) -> BTreeSet<CheckpointId> {
    let mut unknown = BTreeSet::new();
    let replaced = |e: &Entry| match &e.op {
        Op::Publish(p) if e.n != lost => p.replaces.map(|old| old.id),
        _ => None,
    };
    let proven: BTreeSet<_> = log.iter().filter_map(replaced).collect();
    match &log[lost as usize - 1].op {
        Op::Publish(p) => unknown.extend(p.replaces.map(|old| old.id).into_iter().chain([p.id])),
        Op::Unretire { about, .. } => unknown.extend([about.id]),
        _ => {}
    }
    for entry in log {
        if let Op::Publish(p) = &entry.op
            && p.parent
                .iter()
                .chain(&p.replaces)
                .any(|r| unknown.contains(&r.id) && !proven.contains(&r.id))
        {
            unknown.insert(p.id);
        }
    }
    unknown
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum View {
    Newest,
    Halfway,
    None,
}

#[tokio::test(start_paused = true)]
async fn what_a_sweep_deleted_is_never_listed_again() {
    let other = swept().await;
    let head = other.log.len() as u64;
    for view in [View::Newest, View::Halfway, View::None] {
        for way in [Way::Flipped, Way::Gone, Way::Other] {
            for n in 1..=head {
                if way == Way::Gone && n == head && view != View::Newest {
                    // Nothing shows that the log had a last entry which is gone.
                    continue;
                }
                let what = format!("{view:?}, entry {n}, {way:?}");
                let swept = swept().await;
                let known = swept.put_view(view).await;
                harm(&swept.faults, n, way, &other.faults).await;
                let (seen, done) = swept.mend(&what).await;
                if way == Way::Other && (view != View::Newest || n == head) {
                    // Of two entries that do not fit, either may be the wrong one.
                    continue;
                }
                let unknown = if n > known { hangs_on(&swept.log, n) } else { BTreeSet::new() };
                let missing = swept.listed.difference(&seen).find(|id| !unknown.contains(id));
                assert!(missing.is_none(), "{what}: {missing:?}");
                let others = swept.log.iter().filter(|e| e.n != n);
                let named: BTreeSet<_> = others.flat_map(given_up).collect();
                assert!(seen.is_disjoint(&named), "{what}: an entry says that it was given up");
                if view == View::Newest {
                    assert_eq!(seen, swept.listed, "{what}");
                    assert!(done.losses.iter().all(|l| l.checkpoint.is_none()), "{what}: {done:?}");
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn nor_with_two_bad_entries() {
    let head = swept().await.log.len() as u64;
    for view in [View::Halfway, View::None] {
        for (n, m) in (1..=head).flat_map(|n| (n + 1..=head.min(n + 5)).map(move |m| (n, m))) {
            let swept = swept().await;
            swept.put_view(view).await;
            for bad in [n, m] {
                harm(&swept.faults, bad, Way::Flipped, &swept.faults).await;
            }
            swept.mend(&format!("{view:?}, entries {n} and {m}")).await;
        }
    }
}

/// A sweep that was interrupted before it had written anything to the log: what it began to delete is
/// not listed again, even if the log loses the entry that ended it.
#[tokio::test(start_paused = true)]
async fn what_an_interrupted_sweep_began_to_delete_is_not_listed_again() {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let one = toy::save(&store, 1, None, &[1; 20]).await.unwrap();
    let two = toy::save(&store, 2, Some((one.reference(), &[1; 20])), &[2; 20]).await.unwrap();
    store.rebase(two.id(), &mut toy::ToyRebaser::default()).await.unwrap();
    let begun = doing_at("delete.begun", std::future::pending());
    let sweeper = Store::open(&place, begun).await.unwrap();
    let options = now();
    let stopped = tokio::time::timeout(Duration::from_secs(60), sweeper.sweep(&options)).await;
    assert!(stopped.is_err(), "it was to stop");
    assert_eq!(store.log(1).await.unwrap().len(), 3, "nothing in the log");
    // What is left of it is deleted by the next sweep,
    let left = store.check(&CheckOptions::default(), None).await.unwrap().unlisted;
    assert!(left.contains_key(&two.id()), "{left:?}");
    // and not listed meanwhile if the entry of the rebase is lost.
    harm(&faults, 3, Way::Flipped, &faults).await;
    let damaged = Store::open_read_only(&place, quick_options()).await.unwrap();
    assert_eq!(steps(&damaged).await, [1]);
    Store::repair(&place, quick_options(), true).await.unwrap();
    let store = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(steps(&store).await, [1]);
    for _ in 0..2 {
        store.sweep(&now()).await.unwrap();
    }
    let report = store.check(&CheckOptions::default(), None).await.unwrap();
    assert!(report.is_clean() && report.unlisted.is_empty(), "{report:?}");
}

impl Swept {
    /// Returns the last entry that the view knows.
    async fn put_view(&self, view: View) -> u64 {
        let path = Path::from(VIEW);
        match view {
            View::Newest => self.log.len() as u64,
            View::Halfway => {
                self.faults.put(&path, self.halfway.1.clone().into()).await.unwrap();
                self.halfway.0
            }
            View::None => {
                self.faults.delete(&path).await.unwrap();
                0
            }
        }
    }

    /// Repairs the log. Everything that is listed before and after it restores, and no clean-up costs
    /// more than it should. Returns what is listed.
    async fn mend(&self, what: &str) -> (BTreeSet<CheckpointId>, RepairReport) {
        let store = Store::open_read_only(&self.place, quick_options()).await.unwrap();
        steps(&store).await;
        let seen = ids(&store).await;
        let told = |r: &RepairReport| {
            (r.losses.clone(), r.listed.iter().map(Checkpoint::id).collect::<BTreeSet<_>>())
        };
        let dry = Store::repair(&self.place, quick_options(), false).await.unwrap();
        let done = Store::repair(&self.place, quick_options(), true).await.unwrap();
        assert_eq!(told(&done), told(&dry), "{what}");
        assert_eq!(told(&done).1, seen, "{what}: {done:?}");

        // From the log alone.
        self.faults.delete(&Path::from(VIEW)).await.unwrap();
        let store = Store::open(&self.place, quick_options()).await.unwrap();
        assert_eq!(ids(&store).await, seen, "{what}");
        steps(&store).await;
        let all = CheckOptions { read_data: true, ..CheckOptions::default() };
        let report = store.check(&all, None).await.unwrap();
        assert!(report.is_clean() && report.void.is_empty(), "{what}: {report:?}");
        let keep = Retention { keep_last: Some(1), ..Retention::default() };
        store.apply_retention(&keep).await.unwrap();
        store.sweep(&now()).await.unwrap();
        assert!(!steps(&store).await.is_empty() || seen.is_empty(), "{what}");
        (seen, done)
    }
}

fn given_up(entry: &Entry) -> Vec<CheckpointId> {
    match &entry.op {
        Op::Abort { ids } => ids.clone(),
        _ => vec![],
    }
}
