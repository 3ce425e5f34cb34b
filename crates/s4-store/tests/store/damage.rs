//! A log with one bad entry: only what that entry said is lost, nothing is written to such a store,
//! and a process that had it open goes on once it is mended.

use std::time::Duration;

use bytes::Bytes;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use s4_store::testing::{FaultStore, quick_options, toy};
use s4_store::{
    CheckOptions, Checkpoint, Error, LogDamage, Place, Store, StoreOptions, SweepOptions, Verdict,
};

use crate::faulty;

pub(crate) fn key(n: u64) -> Path {
    Path::from(format!("runs/one/log/{n:020}"))
}

/// Steps 1 to `n`, each with its step as content: odd steps are full, even ones deltas of the step
/// before.
pub(crate) async fn grown(n: u8) -> (FaultStore, Place, Vec<Checkpoint>) {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let mut saved: Vec<Checkpoint> = Vec::new();
    for step in 1..=n {
        let base = saved.last().filter(|_| step % 2 == 0).map(Checkpoint::reference);
        let before = [step - 1; 20];
        let parent = base.map(|reference| (reference, &before[..]));
        saved.push(toy::save(&store, step.into(), parent, &[step; 20]).await.unwrap());
    }
    (faults, place, saved)
}

/// The steps that are listed, every one of them restored and compared.
pub(crate) async fn steps(store: &Store) -> Vec<u64> {
    let state = store.state().await.unwrap();
    let mut steps = Vec::new();
    for checkpoint in state.list() {
        let chain = toy::chain(&state, checkpoint).unwrap();
        let content = toy::restore(store, &chain).await.unwrap();
        assert_eq!(content, [checkpoint.step() as u8; 20]);
        steps.push(checkpoint.step());
    }
    steps
}

async fn get(faults: &FaultStore, key: &Path) -> Bytes {
    faults.get(key).await.unwrap().bytes().await.unwrap()
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Way {
    Flipped,
    Cut,
    Empty,
    Gone,
    /// The entry of another log.
    Other,
}

pub(crate) const WAYS: [Way; 5] = [Way::Flipped, Way::Cut, Way::Empty, Way::Gone, Way::Other];

/// Damages an entry; returns its former bytes.
pub(crate) async fn harm(faults: &FaultStore, n: u64, way: Way, other: &FaultStore) -> Bytes {
    let good = get(faults, &key(n)).await;
    let mut bytes = good.to_vec();
    match way {
        Way::Flipped => {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        }
        Way::Cut => bytes.truncate(good.len() / 2),
        Way::Empty => bytes.clear(),
        Way::Other => bytes = get(other, &key(n)).await.to_vec(),
        Way::Gone => {
            faults.delete(&key(n)).await.unwrap();
            return good;
        }
    }
    faults.put(&key(n), bytes.into()).await.unwrap();
    good
}

/// The steps up to `n` that do not need entry `lost`; each entry listed the step of its number.
pub(crate) fn left(n: u64, lost: u64) -> Vec<u64> {
    let needs = |step: u64| step == lost || (step.is_multiple_of(2) && step - 1 == lost);
    (1..=n).filter(|step| !needs(*step)).collect()
}

#[tokio::test(start_paused = true)]
async fn one_bad_entry_costs_what_it_said_and_no_more() {
    const N: u64 = 6;
    let (other, ..) = grown(N as u8).await;
    for way in WAYS {
        for n in 1..=N {
            let what = format!("entry {n}, {way:?}");
            if way == Way::Gone && n == N {
                // Nothing shows that the log had a last entry which is gone.
                continue;
            }
            let (faults, place, saved) = grown(N as u8).await;
            let good = harm(&faults, n, way, &other).await;
            let error = Store::open(&place, quick_options()).await.unwrap_err();
            assert!(error.is_log_damage(), "{what}: {error}");
            let said = error.to_string();
            assert!(said.contains("s4w store repair") && said.contains("read-only"), "{said}");

            let store = Store::open_read_only(&place, quick_options()).await.unwrap();
            let damage = store.log_damage().await.unwrap();
            // Of two entries that do not fit, either may be the wrong one.
            assert!(
                damage.iter().any(|d| d.entry() == n || d.entry() == n + 1),
                "{what}: {damage:?}"
            );
            assert_eq!(steps(&store).await, left(N, n), "{what}");
            assert!(store.log(1).await.unwrap().len() >= 5);
            let refused = toy::save(&store, 9, None, &[9; 20]).await.unwrap_err();
            assert!(matches!(refused, Error::ReadOnly { .. }), "{what}: {refused}");
            let all = CheckOptions { read_data: true, ..CheckOptions::default() };
            let report = store.check(&all, None).await.unwrap();
            assert!(!report.is_clean(), "{what}");
            assert!(report.findings.iter().all(|f| f.error.is_log_damage()), "{what}: {report:?}");
            let restores = report.verdicts.iter().filter(|(_, v)| *v == Verdict::Restores).count();
            assert_eq!(restores, left(N, n).len(), "{what}");

            // Once mended, the log is whole again for processes that have it open.
            faults.put(&key(n), good.into()).await.unwrap();
            tokio::time::sleep(Duration::from_secs(60)).await;
            assert_eq!(steps(&store).await, (1..=N).collect::<Vec<_>>(), "{what}");
            assert_eq!(store.log_damage().await.unwrap(), []);
            let store = Store::open(&place, quick_options()).await.unwrap();
            assert_eq!(store.latest().await.unwrap().unwrap().id(), saved[5].id());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_stray_entry_far_behind_the_end_is_seen() {
    let (other, ..) = grown(8).await;
    let (faults, place, _) = grown(4).await;
    let stray = get(&other, &key(8)).await;
    faults.put(&key(8), stray.into()).await.unwrap();
    let error = Store::open(&place, quick_options()).await.unwrap_err();
    let gap = LogDamage::Missing { first: 5, last: 7 };
    assert!(matches!(&error, Error::LogDamaged { damage, .. } if *damage == gap), "{error}");
    let store = Store::open_read_only(&place, quick_options()).await.unwrap();
    assert_eq!(steps(&store).await, [1, 2, 3, 4]);
}

#[tokio::test(start_paused = true)]
async fn an_older_bad_entry_under_a_view_is_a_finding_and_stops_nobody() {
    let (other, ..) = grown(6).await;
    for way in WAYS {
        let (faults, place, _) = grown(6).await;
        let store = Store::open(&place, quick_options()).await.unwrap();
        store.sweep(&SweepOptions::default()).await.unwrap();
        harm(&faults, 2, way, &other).await;
        let store = Store::open(&place, quick_options()).await.unwrap();
        toy::save(&store, 7, None, &[7; 20]).await.unwrap();
        assert_eq!(steps(&store).await, [1, 2, 3, 4, 5, 6, 7]);
        let report = store.check(&CheckOptions::default(), None).await.unwrap();
        assert!(!report.findings.is_empty(), "{way:?}");
        assert!(report.findings.iter().all(|f| f.error.is_log_damage()), "{way:?}: {report:?}");
        assert!(report.verdicts.iter().all(|(_, v)| *v == Verdict::Restores), "{way:?}");
        store.sweep(&SweepOptions::default()).await.unwrap();
    }
}

/// The newest entries are gone, but a view knows of them: they were acknowledged.
#[tokio::test(start_paused = true)]
async fn a_log_that_was_put_back_to_an_older_state_is_not_written_to() {
    let (faults, place, _) = grown(6).await;
    let store = Store::open(&place, quick_options()).await.unwrap();
    store.sweep(&SweepOptions::default()).await.unwrap();
    for n in [5, 6] {
        faults.delete(&key(n)).await.unwrap();
    }
    let error = Store::open(&place, quick_options()).await.unwrap_err();
    assert!(error.is_log_damage(), "{error}");
    let store = Store::open_read_only(&place, quick_options()).await.unwrap();
    assert_eq!(steps(&store).await, [1, 2, 3, 4, 5, 6]);
}

#[tokio::test(start_paused = true)]
async fn a_handle_heals_when_the_log_does() {
    let (other, ..) = grown(8).await;
    for way in [Way::Flipped, Way::Cut, Way::Empty, Way::Other] {
        let (faults, place, _) = grown(6).await;
        let open = Store::open(&place, quick_options()).await.unwrap();
        let writer = Store::open(&place, quick_options()).await.unwrap();
        toy::save(&writer, 7, None, &[7; 20]).await.unwrap();
        toy::save(&writer, 8, None, &[8; 20]).await.unwrap();
        let good = harm(&faults, 7, way, &other).await;
        let error = open.state().await.unwrap_err();
        assert!(error.is_log_damage(), "{way:?}: {error}");
        assert!(open.state().await.is_err());
        faults.put(&key(7), good.into()).await.unwrap();
        assert_eq!(steps(&open).await, [1, 2, 3, 4, 5, 6, 7, 8], "{way:?}");
        toy::save(&open, 9, None, &[9; 20]).await.unwrap();
    }
}

/// In a sealed view, checkpoints replace each other in a circle.
#[tokio::test(start_paused = true)]
async fn a_view_that_contradicts_itself_is_not_followed() {
    let (faults, place, saved) = grown(2).await;
    let store = Store::open(&place, StoreOptions::default()).await.unwrap();
    store.sweep(&SweepOptions::default()).await.unwrap();
    let view = Path::from("runs/one/logck");
    let good = get(&faults, &view).await;
    let line = good.split(|byte| *byte == b'\n').next().unwrap();
    let mut json: serde_json::Value = serde_json::from_slice(line).unwrap();
    let hash = saved[0].about.manifest_blake3;
    let ids = ["00000000-0000-7000-8000-000000000001", "00000000-0000-7000-8000-000000000002"];
    let by = |id| serde_json::json!({"id": id, "manifest_blake3": hash});
    let replaced = |id, other| serde_json::json!([id, {"entry": 1, "how": {"replaced": {"by": by(other), "had": hash}}}]);
    json["dead"] = serde_json::json!([replaced(ids[0], ids[1]), replaced(ids[1], ids[0])]);
    let body = json.to_string();
    let sealed = format!("{body}\n\"blake3:{}\"\n", s4_store::Digest::of(body.as_bytes()));
    faults.put(&view, sealed.into()).await.unwrap();
    let store = Store::open(&place, quick_options()).await.unwrap();
    assert_eq!(steps(&store).await, [1, 2]);
    // A delta of a checkpoint whose newest replacement would be looked for forever.
    let lost = s4_store::Reference::from((ids[0].parse().unwrap(), hash));
    let refused = toy::save(&store, 3, Some((lost, &[1; 20])), &[3; 20]).await.unwrap_err();
    assert!(matches!(refused, Error::Conflict(_)), "{refused}");
}
