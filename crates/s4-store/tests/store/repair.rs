//! Mending a damaged log: nothing is written before it is asked for, and nothing more is lost than
//! the report says, at whatever point the repair stops.

use std::collections::BTreeMap;

use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use s4_store::testing::{Fault, FaultStore, OpKind, quick_options, toy};
use s4_store::{
    CheckOptions, Checkpoint, CheckpointId, Conflict, Error, LogDamage, Place, Store, SweepOptions,
};

use crate::damage::{WAYS, Way, grown, harm, key, left, steps};
use crate::faulty;

async fn everything(faults: &FaultStore) -> BTreeMap<Path, Vec<u8>> {
    let keys: Vec<_> = faults.list(None).map_ok(|m| m.location).try_collect().await.unwrap();
    let mut all = BTreeMap::new();
    for key in keys {
        let bytes = faults.get(&key).await.unwrap().bytes().await.unwrap();
        all.insert(key, bytes.to_vec());
    }
    all
}

#[tokio::test(start_paused = true)]
async fn a_bad_entry_is_mended_and_what_it_said_is_told() {
    const N: u64 = 6;
    let (other, ..) = grown(N as u8).await;
    for way in WAYS {
        for n in 1..=N {
            if way == Way::Gone && n == N {
                continue;
            }
            let what = format!("entry {n}, {way:?}");
            let (faults, place, saved) = grown(N as u8).await;
            harm(&faults, n, way, &other).await;
            let before = everything(&faults).await;
            let dry = Store::repair(&place, quick_options(), false).await.unwrap();
            assert_eq!(everything(&faults).await, before, "{what}: a dry run wrote something");
            assert!(dry.aside.is_none() && !dry.losses.is_empty(), "{what}: {dry:?}");
            let lost: Vec<_> = dry.losses.iter().filter_map(|l| l.step).collect();
            if n % 2 == 1 {
                // The lost delta is named; what the bad entry itself said, nobody knows.
                assert!(lost.contains(&(n + 1)), "{what}: {dry:?}");
            }
            assert!(dry.unnamed.contains_key(&saved[n as usize - 1].id()), "{what}: {dry:?}");

            let done = Store::repair(&place, quick_options(), true).await.unwrap();
            assert_eq!((&done.losses, &done.listed), (&dry.losses, &dry.listed), "{what}");
            let aside = done.aside.unwrap();
            let after = everything(&faults).await;
            if way != Way::Gone {
                let copy = Path::from(format!("{aside}/log/{n:020}"));
                assert_eq!(after.get(&copy), before.get(&key(n)), "{what}");
            }
            assert!(after.contains_key(&Path::from(format!("{aside}/repair.json"))));
            let store = Store::open(&place, quick_options()).await.unwrap();
            assert_eq!(steps(&store).await, left(N, n), "{what}");
            let all = CheckOptions { read_data: true, ..CheckOptions::default() };
            let report = store.check(&all, None).await.unwrap();
            assert!(report.is_clean() && report.void.is_empty(), "{what}: {report:?}");
            toy::save(&store, 9, None, &[9; 20]).await.unwrap();
            let again = Store::repair(&place, quick_options(), true).await.unwrap();
            assert!(again.damage.is_empty() && again.aside.is_none(), "{what}: {again:?}");
        }
    }
}

/// A log with every operation in it, and a view of all its entries.
async fn eventful() -> (FaultStore, Place, u64) {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let mut rebaser = toy::ToyRebaser::default();
    let one = toy::save(&store, 1, None, &[1; 20]).await.unwrap();
    let two = toy::save(&store, 2, Some((one.reference(), &[1; 20])), &[2; 20]).await.unwrap();
    toy::save(&store, 3, Some((two.reference(), &[2; 20])), &[3; 20]).await.unwrap();
    store.pin(two.id()).await.unwrap();
    let two = store.rebase(two.id(), &mut rebaser).await.unwrap();
    toy::save(&store, 4, Some((two.reference(), &[2; 20])), &[4; 20]).await.unwrap();
    let gone = toy::save(&store, 5, None, &[5; 20]).await.unwrap();
    store.unpin(two.id()).await.unwrap();
    store.retire(&[one.id(), gone.id()], "").await.unwrap();
    store.unretire(&[gone.id()]).await.unwrap();
    store.pin(gone.id()).await.unwrap();
    toy::save(&store, 6, Some((gone.reference(), &[5; 20])), &[6; 20]).await.unwrap();
    let head = store.state().await.unwrap().head();
    store.sweep(&SweepOptions::default()).await.unwrap();
    (faults, place, head)
}

type Seen = Vec<(CheckpointId, u64, Option<CheckpointId>, bool, u64)>;

async fn seen(store: &Store) -> Seen {
    let state = store.state().await.unwrap();
    let one = |c: &Checkpoint| (c.id(), c.step(), c.base, c.pinned, c.order);
    state.list().into_iter().map(one).collect()
}

#[tokio::test(start_paused = true)]
async fn with_a_view_no_older_entry_is_a_loss() {
    let (_, _, head) = eventful().await;
    for n in 1..=head {
        for way in [Way::Flipped, Way::Gone] {
            let (faults, place, _) = eventful().await;
            let store = Store::open(&place, quick_options()).await.unwrap();
            let before = seen(&store).await;
            harm(&faults, n, way, &faults).await;
            let what = format!("entry {n}, {way:?}");
            let done = Store::repair(&place, quick_options(), true).await.unwrap();
            assert!(!done.damage.is_empty(), "{what}");
            // From the log alone.
            faults.delete(&Path::from("runs/one/logck")).await.unwrap();
            let store = Store::open(&place, quick_options()).await.unwrap();
            assert_eq!(seen(&store).await, before, "{what}: {done:?}");
            steps(&store).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_view_knows_beyond_the_end_of_the_log_comes_back() {
    let (faults, place, _) = grown(6).await;
    let store = Store::open(&place, quick_options()).await.unwrap();
    store.sweep(&SweepOptions::default()).await.unwrap();
    for n in 4..=6 {
        faults.delete(&key(n)).await.unwrap();
    }
    let done = Store::repair(&place, quick_options(), true).await.unwrap();
    assert_eq!((done.losses, done.reconstructed), (vec![], vec![4, 5, 6]));
    let store = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(steps(&store).await, [1, 2, 3, 4, 5, 6]);
}

#[tokio::test(start_paused = true)]
async fn an_entry_far_behind_the_end_is_put_aside() {
    let (other, ..) = grown(1).await;
    let (faults, place, _) = grown(4).await;
    let stray = other.get(&key(1)).await.unwrap().bytes().await.unwrap();
    for far in [20_000, u64::MAX] {
        faults.put(&key(far), stray.clone().into()).await.unwrap();
    }
    let done = Store::repair(&place, quick_options(), true).await.unwrap();
    assert_eq!(done.removed, [20_000, u64::MAX]);
    assert!(
        matches!(done.damage[..], [LogDamage::Missing { first: 5, .. }, ..]),
        "{:?}",
        done.damage
    );
    let store = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(steps(&store).await, [1, 2, 3, 4]);
    toy::save(&store, 5, None, &[5; 20]).await.unwrap();
}

/// The log says nothing any more of a checkpoint that was replaced later, and no view does: the
/// replacement proves that it was listed.
#[tokio::test(start_paused = true)]
async fn a_rebase_survives_the_loss_of_what_it_replaced() {
    for (lost, way) in [(2, Way::Flipped), (2, Way::Gone), (1, Way::Flipped)] {
        let (faults, place) = faulty();
        let store = Store::create(&place, quick_options()).await.unwrap();
        let one = toy::save(&store, 1, None, &[1; 20]).await.unwrap();
        let two = toy::save(&store, 2, Some((one.reference(), &[1; 20])), &[2; 20]).await.unwrap();
        toy::save(&store, 3, Some((two.reference(), &[2; 20])), &[3; 20]).await.unwrap();
        let two = store.rebase(two.id(), &mut toy::ToyRebaser::default()).await.unwrap();
        toy::save(&store, 4, Some((two.reference(), &[2; 20])), &[4; 20]).await.unwrap();
        harm(&faults, lost, way, &faults).await;
        let what = format!("entry {lost}, {way:?}");
        let wanted: &[u64] = if lost == 2 { &[1, 2, 3, 4] } else { &[2, 3, 4] };
        let store = Store::open_read_only(&place, quick_options()).await.unwrap();
        assert_eq!(steps(&store).await, wanted, "{what}");
        let dry = Store::repair(&place, quick_options(), false).await.unwrap();
        let done = Store::repair(&place, quick_options(), true).await.unwrap();
        assert_eq!((&dry.losses, &dry.listed), (&done.losses, &done.listed), "{what}");
        let store = Store::open(&place, quick_options()).await.unwrap();
        assert_eq!(steps(&store).await, wanted, "{what}: {done:?}");
        let state = store.state().await.unwrap();
        assert_eq!(state.at_step(2).map(|c| c.id()), Some(two.id()), "{what}");
        let all = CheckOptions { read_data: true, ..CheckOptions::default() };
        let report = store.check(&all, None).await.unwrap();
        assert!(report.is_clean() && report.void.is_empty(), "{what}: {report:?}");
    }
}

/// A repair that dies at any request leaves the store no worse than before, and can be run again.
#[tokio::test(start_paused = true)]
async fn a_repair_stops_at_every_request() {
    // Whether there is a view, and the entries that are damaged, counted from the end of the log. The last but one is
    // a pin: the view alone knows of it then, and a repair adds it at the end. With the last one, nothing but the
    // entries after it could show that the view belongs to this log.
    let cases: [(bool, &[u64]); 5] =
        [(false, &[3]), (true, &[9]), (true, &[1]), (true, &[0]), (true, &[9, 1, 0])];
    for (view, harmed) in cases {
        for fault in [Fault::Crash, Fault::CrashAfter] {
            for nth in 0.. {
                let (faults, place, head) = eventful().await;
                if !view {
                    faults.delete(&Path::from("runs/one/logck")).await.unwrap();
                }
                for n in harmed {
                    harm(&faults, head - n, Way::Flipped, &faults).await;
                }
                let planned = Store::repair(&place, quick_options(), false).await.unwrap();
                let outcome = |all: &[Checkpoint]| -> Vec<_> {
                    all.iter().map(|c| (c.id(), c.pinned)).collect()
                };
                let wanted = outcome(&planned.listed);
                faults.fail_nth(nth, fault);
                let stopped = Store::repair(&place, quick_options(), true).await;
                let fired = faults.fired() > 0 || nth < faults.ops();
                faults.heal();
                let what = format!("view {view}, {harmed:?}, request {nth}, {fault:?}");
                // If the store can be opened for writing, everything is there.
                if let Ok(store) = Store::open(&place, quick_options()).await {
                    assert_eq!(outcome(&store.list().await.unwrap()), wanted, "{what}");
                }
                Store::repair(&place, quick_options(), true).await.unwrap();
                let store = Store::open(&place, quick_options()).await.unwrap();
                assert_eq!(outcome(&store.list().await.unwrap()), wanted, "{what}");
                steps(&store).await;
                if !fired {
                    assert!(stopped.is_ok(), "{what}");
                    assert!(nth > 10, "{what}");
                    break;
                }
            }
        }
    }
}

/// Whatever is stored in place of an entry or of the view, a repair is possible.
#[tokio::test(start_paused = true)]
async fn an_object_that_is_too_large_to_copy_does_not_prevent_a_repair() {
    let large = bytes::Bytes::from(vec![0; (64 << 20) + 1]);
    let (faults, place, _) = grown(4).await;
    let view = Path::from("runs/one/logck");
    for key in [&key(3), &view] {
        faults.put(key, large.clone().into()).await.unwrap();
    }
    let done = Store::repair(&place, quick_options(), true).await.unwrap();
    let aside = done.aside.unwrap();
    let copied = async |name: &str| {
        let key = Path::from(format!("{aside}/{name}"));
        faults.get(&key).await.unwrap().bytes().await.unwrap()
    };
    let entry = format!("log/{:020}", 3);
    assert_eq!(copied(&entry).await, large.slice(1..), "as much as an object may have");
    assert!(copied("logck").await == large, "a view may have 1 GiB");
    let told = copied("repair.json").await;
    let told = String::from_utf8_lossy(&told);
    assert!(told.contains(&format!(r#""cut":["{aside}/{entry}"]"#)), "{told}");
    let store = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(steps(&store).await, [1, 2]);
}

/// Whether there is an entry after the last listed one is known only once its slot was read.
#[tokio::test(start_paused = true)]
async fn a_slot_that_cannot_be_read_is_not_taken_for_an_entry() {
    const N: u64 = 4;
    let (faults, place, _) = grown(N as u8).await;
    faults.delete(&key(2)).await.unwrap();
    let planned = Store::repair(&place, quick_options(), false).await.unwrap();
    let mut failed = 0;
    for nth in 0.. {
        let mut reads = 0;
        faults.set_plan(move |op| {
            reads += u64::from(op.key == key(N + 1).as_ref());
            (op.key == key(N + 1).as_ref() && reads == nth + 1).then_some(Fault::Denied)
        });
        let before = faults.fired();
        let dry = Store::repair(&place, quick_options(), false).await;
        if faults.fired() == before {
            assert!(nth > 0 && failed > 0, "{nth} reads of the next slot");
            break;
        }
        match dry {
            Ok(dry) => assert_eq!(dry, planned, "read {nth}"),
            Err(e) => {
                failed += 1;
                assert!(matches!(e, Error::Storage { .. }), "read {nth}: {e}");
            }
        }
    }
}

/// A replacement proves that the checkpoint which it replaced was listed, even if that had been retired and listed
/// again, and what it was a delta of is lost.
#[tokio::test(start_paused = true)]
async fn a_rebase_of_a_checkpoint_that_was_listed_again_survives() {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let one = toy::save(&store, 1, None, &[1; 20]).await.unwrap();
    let two = toy::save(&store, 2, Some((one.reference(), &[1; 20])), &[2; 20]).await.unwrap();
    store.retire(&[two.id()], "").await.unwrap();
    store.unretire(&[two.id()]).await.unwrap();
    store.rebase(two.id(), &mut toy::ToyRebaser::default()).await.unwrap();
    harm(&faults, 1, Way::Flipped, &faults).await;
    Store::repair(&place, quick_options(), true).await.unwrap();
    let store = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(steps(&store).await, [2]);
}

/// A checkpoint is pinned only while it is listed: of several lost entries, one before the pin is taken to list it, and
/// what replaced it stays pinned.
#[tokio::test(start_paused = true)]
async fn a_rebase_of_a_pinned_checkpoint_stays_pinned() {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let one = toy::save(&store, 1, None, &[1; 20]).await.unwrap();
    let two = toy::save(&store, 2, Some((one.reference(), &[1; 20])), &[2; 20]).await.unwrap();
    store.pin(two.id()).await.unwrap();
    toy::save(&store, 3, None, &[3; 20]).await.unwrap();
    let new = store.rebase(two.id(), &mut toy::ToyRebaser::default()).await.unwrap();
    harm(&faults, 2, Way::Flipped, &faults).await;
    harm(&faults, 4, Way::Flipped, &faults).await;
    let told = Store::repair(&place, quick_options(), true).await.unwrap();
    assert_eq!((told.fenced, told.reconstructed), (vec![4], vec![2]));
    let store = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(steps(&store).await, [1, 2]);
    assert!(store.state().await.unwrap().get(new.id()).is_some_and(|c| c.pinned));
}

/// The view knows that a checkpoint was replaced, even if its replacement has been retired since.
#[tokio::test(start_paused = true)]
async fn a_replaced_checkpoint_is_not_listed_again_in_place_of_a_retired_one() {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let one = toy::save(&store, 1, None, &[1; 20]).await.unwrap();
    let two = toy::save(&store, 2, Some((one.reference(), &[1; 20])), &[2; 20]).await.unwrap();
    let new = store.rebase(two.id(), &mut toy::ToyRebaser::default()).await.unwrap();
    let three = toy::save(&store, 3, Some((new.reference(), &[2; 20])), &[3; 20]).await.unwrap();
    store.retire(&[three.id(), new.id()], "").await.unwrap();
    store.sweep(&SweepOptions::default()).await.unwrap();
    let before = seen(&store).await;
    harm(&faults, 3, Way::Flipped, &faults).await;
    Store::repair(&place, quick_options(), true).await.unwrap();
    let store = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(seen(&store).await, before);
}

/// One entry is gone, and a process has not read it yet: it does not write another one in its place.
#[tokio::test(start_paused = true)]
async fn a_hole_in_the_log_is_not_written_to() {
    let (faults, place, _) = grown(4).await;
    let stale = Store::open(&place, quick_options()).await.unwrap();
    let other = Store::open(&place, quick_options()).await.unwrap();
    for step in [5, 6] {
        toy::save(&other, step, None, &[step as u8; 20]).await.unwrap();
    }
    faults.delete(&key(5)).await.unwrap();
    let refused = toy::save(&stale, 7, None, &[7; 20]).await.unwrap_err();
    assert!(refused.is_log_damage(), "{refused}");
    assert!(faults.get(&key(5)).await.is_err());
}

/// A network file system may show an entry of another machine later than the one after it.
#[tokio::test(start_paused = true)]
async fn an_entry_that_is_seen_late_is_no_hole_in_the_log() {
    let (faults, place, _) = grown(4).await;
    let stale = Store::open(&place, quick_options()).await.unwrap();
    let other = Store::open(&place, quick_options()).await.unwrap();
    for step in [5, 6] {
        toy::save(&other, step, None, &[step as u8; 20]).await.unwrap();
    }
    let late = faults.get(&key(5)).await.unwrap().bytes().await.unwrap();
    faults.delete(&key(5)).await.unwrap();
    let server = faults.clone();
    let shown = tokio::spawn(async move {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        server.put(&key(5), late.into()).await.unwrap();
    });
    toy::save(&stale, 7, None, &[7; 20]).await.unwrap();
    shown.await.unwrap();
    assert_eq!(steps(&stale).await, [1, 2, 3, 4, 5, 6, 7]);
}

/// The entry that listed a retired checkpoint is lost: the process that saved it does not list it again.
#[tokio::test(start_paused = true)]
async fn a_retired_checkpoint_whose_entry_is_lost_is_not_listed_again() {
    for view in [false, true] {
        let (faults, place, _) = grown(4).await;
        let saver = Store::open(&place, quick_options()).await.unwrap();
        let saved = toy::save(&saver, 5, None, &[5; 20]).await.unwrap();
        let other = Store::open(&place, quick_options()).await.unwrap();
        other.retire(&[saved.id()], "").await.unwrap();
        if view {
            other.sweep(&SweepOptions::default()).await.unwrap();
        }
        harm(&faults, 5, Way::Flipped, &faults).await;
        Store::repair(&place, quick_options(), true).await.unwrap();
        toy::save(&saver, 6, None, &[6; 20]).await.unwrap();
        assert_eq!(steps(&saver).await, [1, 2, 3, 4, 6], "view {view}");
    }
}

/// A delta proves that its parent was listed, and a rebase that the checkpoint which it replaced was: if the entry that
/// listed that one again is lost, it is restored.
#[tokio::test(start_paused = true)]
async fn a_lost_unretire_is_proved_by_what_needs_it() {
    for rebased in [false, true] {
        for (view, lost) in [(false, &[6][..]), (true, &[5, 6]), (true, &[5, 6, 7])] {
            let (faults, place, saved) = grown(2).await;
            let store = Store::open(&place, quick_options()).await.unwrap();
            let [one, two] = [saved[0].id(), saved[1].id()];
            store.retire(&[two], "").await.unwrap();
            store.retire(&[one], "").await.unwrap();
            // Entries 5 and 6: the delta needs its base.
            store.unretire(&[two]).await.unwrap();
            if rebased {
                store.rebase(two, &mut toy::ToyRebaser::default()).await.unwrap();
            } else {
                let parent = Some((saved[1].reference(), &[2; 20][..]));
                toy::save(&store, 3, parent, &[3; 20]).await.unwrap();
            }
            if view {
                store.sweep(&SweepOptions::default()).await.unwrap();
            }
            let before = (steps(&store).await, store.list().await.unwrap().len());
            for n in lost {
                harm(&faults, *n, Way::Flipped, &faults).await;
            }
            let told = Store::repair(&place, quick_options(), true).await.unwrap();
            let store = Store::open(&place, quick_options()).await.unwrap();
            let after = (steps(&store).await, store.list().await.unwrap().len());
            assert_eq!(after, before, "rebased {rebased}, lost {lost:?}: {told:#?}");
        }
    }
}

/// A view tells when a checkpoint was first published, which for a rebase is not when its own entry was written.
#[tokio::test(start_paused = true)]
async fn a_rebase_that_was_listed_again_is_restored_from_a_view() {
    for lost in 1..=5 {
        let (faults, place, saved) = grown(2).await;
        let store = Store::open(&place, quick_options()).await.unwrap();
        let new = store.rebase(saved[0].id(), &mut toy::ToyRebaser::default()).await.unwrap();
        store.retire(&[new.id(), saved[1].id()], "").await.unwrap();
        store.unretire(&[new.id()]).await.unwrap();
        store.sweep(&SweepOptions::default()).await.unwrap();
        harm(&faults, lost, Way::Flipped, &faults).await;
        let told = Store::repair(&place, quick_options(), true).await.unwrap();
        let store = Store::open(&place, quick_options()).await.unwrap();
        assert_eq!(steps(&store).await, [1], "{lost} lost: {told:#?}");
    }
}

/// A checkpoint is retired only while it is not pinned, so a `retire` proves that a lost entry unpinned it.
#[tokio::test(start_paused = true)]
async fn a_lost_unpin_is_proved_by_a_retire() {
    let (faults, place, saved) = grown(2).await;
    let store = Store::open(&place, quick_options()).await.unwrap();
    store.pin(saved[1].id()).await.unwrap();
    store.unpin(saved[1].id()).await.unwrap();
    store.retire(&[saved[1].id()], "").await.unwrap();
    harm(&faults, 4, Way::Flipped, &faults).await;
    let told = Store::repair(&place, quick_options(), true).await.unwrap();
    assert_eq!((told.fenced, told.reconstructed), (vec![], vec![4]));
    assert_eq!(steps(&Store::open(&place, quick_options()).await.unwrap()).await, [1]);
}

/// A repair does not know what a replaced checkpoint was a delta of. If a later damage costs the replacement, the
/// replaced one must not be listed as a base.
#[tokio::test(start_paused = true)]
async fn a_second_damage_lists_no_delta_as_a_base() {
    let (faults, place, saved) = grown(2).await;
    let store = Store::open(&place, quick_options()).await.unwrap();
    store.rebase(saved[1].id(), &mut toy::ToyRebaser::default()).await.unwrap();
    toy::save(&store, 3, None, &[3; 20]).await.unwrap();
    for (n, left) in [(1, &[2, 3][..]), (3, &[3])] {
        faults.delete(&Path::from("runs/one/logck")).await.ok();
        harm(&faults, n, Way::Flipped, &faults).await;
        Store::repair(&place, quick_options(), true).await.unwrap();
        assert_eq!(steps(&Store::open(&place, quick_options()).await.unwrap()).await, left);
    }
}

/// A process finds that the log has lost its `unretire`. Meanwhile a sweep deleted the data, so it does not list the
/// checkpoint again.
#[tokio::test(start_paused = true)]
async fn what_a_sweep_deleted_is_not_listed_again_by_its_writer() {
    let (faults, place, saved) = grown(2).await;
    let store = Store::open(&place, quick_options()).await.unwrap();
    store.retire(&[saved[1].id()], "").await.unwrap();
    store.unretire(&[saved[1].id()]).await.unwrap();
    // As if it had been lost: the log ends before it, and the data is gone.
    faults.delete(&key(4)).await.unwrap();
    for part in ["manifest", "d-0", "d-1"] {
        let object = Path::from(format!("runs/one/ck/{}/{part}", saved[1].id()));
        faults.delete(&object).await.unwrap();
    }
    let other = Store::open(&place, quick_options()).await.unwrap();
    toy::save(&other, 3, None, &[3; 20]).await.unwrap();
    let refused = toy::save(&store, 4, None, &[4; 20]).await.unwrap_err();
    assert!(matches!(refused, Error::SaveLost { id, .. } if id == saved[1].id()), "{refused}");
    toy::save(&store, 4, None, &[4; 20]).await.unwrap();
    assert_eq!(steps(&store).await, [1, 3, 4]);
}

/// A listing that misses entries in the middle of the log is no proof that they are lost.
#[tokio::test(start_paused = true)]
async fn a_stale_listing_loses_no_entries() {
    let (faults, place, _) = grown(8).await;
    harm(&faults, 2, Way::Flipped, &faults).await;
    // As a repair that was killed leaves them: these were written last.
    for n in 4..=6 {
        let bytes = faults.get(&key(n)).await.unwrap().bytes().await.unwrap();
        faults.put(&key(n), bytes.into()).await.unwrap();
    }
    faults.set_plan(|op| (op.kind == OpKind::List).then_some(Fault::Stale));
    let told = Store::repair(&place, quick_options(), true).await.unwrap();
    faults.heal();
    assert_eq!(told.fenced, [2], "{told:#?}");
    let store = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(steps(&store).await, [1, 3, 4, 5, 6, 7, 8]);
}

/// A process that does not know the entries after a hole does not replace the view that covers them.
#[tokio::test(start_paused = true)]
async fn a_sweep_before_a_hole_in_the_log_keeps_the_view() {
    let (faults, place, _) = grown(4).await;
    let stale = Store::open(&place, quick_options()).await.unwrap();
    let other = Store::open(&place, quick_options()).await.unwrap();
    for step in [5, 6] {
        toy::save(&other, step, None, &[step as u8; 20]).await.unwrap();
    }
    other.sweep(&SweepOptions::default()).await.unwrap();
    let view = Path::from("runs/one/logck");
    let before = faults.get(&view).await.unwrap().bytes().await.unwrap();
    faults.delete(&key(5)).await.unwrap();
    let refused = stale.sweep(&SweepOptions::default()).await.unwrap_err();
    assert!(refused.is_log_damage(), "{refused}");
    assert_eq!(faults.get(&view).await.unwrap().bytes().await.unwrap(), before);
    Store::repair(&place, quick_options(), true).await.unwrap();
    assert_eq!(
        steps(&Store::open(&place, quick_options()).await.unwrap()).await,
        [1, 2, 3, 4, 5, 6]
    );
}

/// A view does not say which checkpoint a retired one was a delta of. If its entry is lost, too, it cannot be
/// listed again, and neither can its deltas.
#[tokio::test(start_paused = true)]
async fn a_retired_delta_whose_entry_is_lost_is_not_listed_as_a_base() {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let mut saved = vec![toy::save(&store, 1, None, &[1; 20]).await.unwrap()];
    for step in 2..=4_u8 {
        let parent = saved.last().map(|c| (c.reference(), [step - 1; 20]));
        let parent = parent.as_ref().map(|(reference, before)| (*reference, &before[..]));
        saved.push(toy::save(&store, step.into(), parent, &[step; 20]).await.unwrap());
    }
    let [_, two, three, four] = [0, 1, 2, 3].map(|n| saved[n].id());
    store.retire(&[two, three, four], "").await.unwrap();
    store.sweep(&SweepOptions::default()).await.unwrap();
    // The entry of the last one names the one whose entry is lost.
    harm(&faults, 3, Way::Flipped, &faults).await;
    Store::repair(&place, quick_options(), true).await.unwrap();
    let store = Store::open(&place, quick_options()).await.unwrap();
    for id in [three, four] {
        let refused = store.unretire(&[id]).await.unwrap_err();
        let Error::Conflict(Conflict::NotRetired { id, state }) = refused else {
            panic!("{refused}")
        };
        assert_eq!(id, three);
        assert!(state.contains("lost"), "{state}");
        assert_eq!(steps(&store).await, [1]);
    }
    store.unretire(&[two]).await.unwrap();
    assert_eq!(steps(&store).await, [1, 2]);
}

/// Without the view a repair would lose what only the view knows, so it does not begin.
#[tokio::test(start_paused = true)]
async fn a_view_that_cannot_be_read_now_ends_a_repair() {
    let (faults, place, _) = eventful().await;
    harm(&faults, 3, Way::Flipped, &faults).await;
    let before = everything(&faults).await;
    let mut reads = 0;
    faults.set_plan(move |op| {
        // The first time, the store is opened.
        reads += u64::from(op.key.ends_with("logck"));
        (op.key.ends_with("logck") && reads > 1).then_some(Fault::Denied)
    });
    let refused = Store::repair(&place, quick_options(), true).await.unwrap_err();
    assert!(matches!(refused, Error::Storage { .. }), "{refused}");
    faults.heal();
    assert_eq!(everything(&faults).await, before);
}
