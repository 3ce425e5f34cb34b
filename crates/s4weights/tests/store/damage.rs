//! Damaged objects and crashes: errors name what is wrong, and older checkpoints are found.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use s4weights::Error;
use s4weights::store::{
    CheckOptions, CheckpointId, CheckpointStore, Mode, Place, StoreError, StoreOptions, Verdict,
    WhyBase, Writers, is_damage,
};

use crate::run::{State, open, options};

/// The files of a checkpoint's data objects.
pub(crate) fn objects(folder: &Path, id: CheckpointId) -> Vec<PathBuf> {
    let files = walk(folder).into_iter().filter(|p| p.to_string_lossy().contains(&id.to_string()));
    let mut files: Vec<_> = files.filter(|p| !p.ends_with("manifest")).collect();
    files.sort();
    files
}

fn walk(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    entries.flat_map(|p| if p.is_dir() { walk(&p) } else { vec![p] }).collect()
}

pub(crate) fn flip(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(path, bytes).unwrap();
}

/// Saves steps 0, 1 and 2: each a delta of the one before, or all bases.
fn three_steps(folder: &Path, max_chain: u32) -> (CheckpointStore, Vec<State>) {
    let store = open(&Place::folder(folder), StoreOptions { max_chain, max_hops: 63, ..options() });
    let mut state = State::new(40_000);
    let mut states = vec![];
    for step in 0..3 {
        state.step(step);
        state.save(&store, step).unwrap();
        states.push(state.clone());
    }
    (store, states)
}

#[test]
fn falling_back_is_asked_for_and_told_of() {
    let folder = tempfile::tempdir().unwrap();
    let (store, states) = three_steps(folder.path(), 1);
    let newest = store.latest().unwrap().unwrap();
    flip(&objects(folder.path(), newest.id())[0]);
    let error = State::load(&store, None).unwrap_err();
    let said = error.to_string();
    assert!(is_damage(&error) && said.contains("step 2") && said.contains("model."), "{said}");
    let read = |loaded: &s4weights::store::Loaded| {
        let reader = loaded.reader();
        reader.tensors().map(|t| reader.read(t.name)).collect::<Result<Vec<_>, _>>()
    };
    let (values, skipped) = store.load_usable(read).unwrap();
    assert_eq!(values[0], states[1].0[0].3);
    assert_eq!(skipped.iter().map(|s| s.checkpoint.step()).collect::<Vec<_>>(), [2]);
}

#[test]
fn every_kind_of_damage_is_passed_over() {
    type Harm = fn(&mut Vec<u8>);
    let ways: [(&str, Harm); 4] = [
        ("flipped", |bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
        }),
        ("cut", |bytes| bytes.truncate(bytes.len() / 2)),
        ("cut by a byte", |bytes| bytes.truncate(bytes.len() - 1)),
        ("empty", Vec::clear),
    ];
    for (what, harm) in ways {
        for part in ["data", "manifest"] {
            let folder = tempfile::tempdir().unwrap();
            let (store, states) = three_steps(folder.path(), 1);
            let id = store.latest().unwrap().unwrap().id();
            let files = match part {
                "data" => objects(folder.path(), id),
                _ => vec![folder.path().join(format!("ck/{id}/manifest"))],
            };
            for file in &files {
                let mut bytes = std::fs::read(file).unwrap();
                harm(&mut bytes);
                std::fs::write(file, bytes).unwrap();
            }
            let error = State::load(&store, None).unwrap_err();
            assert!(is_damage(&error), "{part} {what}: {error:?}");
            let read = |loaded: &s4weights::store::Loaded| {
                let reader = loaded.reader();
                reader.tensors().map(|t| reader.read(t.name)).collect::<Result<Vec<_>, _>>()
            };
            let (values, skipped) = store.load_usable(read).unwrap();
            assert_eq!((values[0].clone(), skipped.len()), (states[1].0[0].3.clone(), 1));
        }
    }
}

#[test]
fn what_was_damaged_on_its_way_is_read_once_more() {
    use s4_store::testing::{Fault, FaultStore, OpKind};
    let faults = FaultStore::new(Arc::new(object_store::memory::InMemory::new()));
    let place = Place::objects(Arc::new(faults.clone()), object_store::path::Path::from("s"));
    let store = open(&place, options());
    let mut state = State::new(40_000);
    for step in 0..3 {
        state.step(step);
        state.save(&store, step).unwrap();
    }
    let is_data = |op: &s4_store::testing::OpInfo| op.kind == OpKind::Get && op.key.contains("/d-");
    let mut flips = 0;
    for nth in 0..40 {
        let store = open(&place, options());
        let mut seen = 0;
        faults.set_plan(move |op| {
            seen += u64::from(is_data(op));
            (is_data(op) && seen == nth + 1).then_some(Fault::Flipped)
        });
        assert_eq!(State::load(&store, None).unwrap(), state, "{nth}");
        flips += faults.fired();
    }
    assert!(flips >= 3, "{flips}");
}

#[test]
fn a_check_finds_the_damaged_one_and_those_that_need_it() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _) = three_steps(folder.path(), 8);
    let ids: Vec<_> = store.list().unwrap().iter().map(|c| c.id()).collect();
    flip(&objects(folder.path(), ids[1])[0]);
    let quick = store.check(&CheckOptions::default()).unwrap();
    assert!(quick.is_clean());
    let full = CheckOptions { read_data: true, ..CheckOptions::default() };
    let report = store.check(&full).unwrap();
    assert!(report.findings.iter().any(|f| f.checkpoint == Some(ids[1])));
    assert!(report.unusable.contains(&(ids[2], ids[1])));
    let error = store.rebase(ids[2], None).unwrap_err();
    assert!(is_damage(&error), "{error}");
    assert_eq!(store.list().unwrap().len(), 3);
}

/// A tensor that is not stored as a difference needs nothing of the parent.
#[test]
fn what_restores_in_spite_of_a_damaged_parent_is_said_to_restore() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&Place::folder(folder.path()), options());
    let mut state = State::new(40_000);
    let base = state.save(&store, 0).unwrap().checkpoint;
    state.step(1);
    let moments = &mut state.0[3];
    assert_eq!(moments.0, "optimizer.m");
    for (i, value) in (0u64..).zip(moments.3.chunks_mut(4)) {
        let hash = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1357;
        value.copy_from_slice(&((hash >> 33) as f32).to_le_bytes());
    }
    let delta = state.save(&store, 1).unwrap().checkpoint;
    assert_eq!(delta.base, Some(base.id()));
    flip(&objects(folder.path(), base.id())[1]);
    assert_eq!(State::load(&store, Some(1)).unwrap(), state);
    let full = CheckOptions { read_data: true, ..CheckOptions::default() };
    let report = store.check(&full).unwrap();
    let verdicts = [(base.id(), Verdict::Damaged), (delta.id(), Verdict::Restores)];
    assert_eq!((&report.verdicts[..], report.unusable.len()), (&verdicts[..], 0), "{report:?}");
    assert!(!report.is_clean());
}

#[test]
fn a_damaged_parent_makes_the_next_save_a_base() {
    let folder = tempfile::tempdir().unwrap();
    let (store, states) = three_steps(folder.path(), 8);
    let newest = store.latest().unwrap().unwrap();
    objects(folder.path(), newest.id()).iter().for_each(|p| flip(p));
    drop(store);
    let linear = StoreOptions { max_hops: 63, ..options() };
    let store = open(&Place::folder(folder.path()), linear);
    let mut state = states[2].clone();
    state.step(7);
    let saved = state.save(&store, 7).unwrap();
    assert!(matches!(saved.why_base, Some(WhyBase::Parent(_))), "{:?}", saved.why_base);
    assert_eq!(State::load(&store, None).unwrap(), state);
}

/// The parent's values are in memory, so nothing reads its objects; but a delta of it could never
/// be restored.
#[test]
fn a_parent_whose_objects_are_gone_makes_the_next_save_a_base() {
    let folder = tempfile::tempdir().unwrap();
    let (store, states) = three_steps(folder.path(), 8);
    let base = store.list().unwrap()[0].id();
    std::fs::remove_file(&objects(folder.path(), base)[0]).unwrap();
    let mut state = states[2].clone();
    state.step(7);
    let saved = state.save(&store, 7).unwrap();
    match &saved.why_base {
        Some(WhyBase::Parent(why)) => assert!(why.contains("step 0"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(State::load(&store, None).unwrap(), state);
    state.step(8);
    let next = state.save(&store, 8).unwrap();
    assert_eq!(next.checkpoint.base, Some(saved.checkpoint.id()));
    assert_eq!(State::load(&store, None).unwrap(), state);
}

#[test]
fn a_save_into_a_folder_that_is_gone_fails() {
    for empty in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("store");
        let (store, states) = three_steps(&place, 8);
        std::fs::remove_dir_all(&place).unwrap();
        if empty {
            // This is how a mount point looks without its file system.
            std::fs::create_dir(&place).unwrap();
        }
        for step in 3..5 {
            let error = states[2].save(&store, step).unwrap_err();
            let gone = matches!(&error, Error::Store { source, .. }
                if matches!(**source, StoreError::Gone { .. }));
            assert!(gone && error.to_string().contains("no checkpoint was saved"), "{error}");
        }
        assert_eq!(place.exists(), empty);
        assert!(!empty || walk(&place).is_empty());
    }
}

/// With one writer at a time, the next one need not wait for a writer that has ended.
#[test]
fn the_end_of_a_store_gives_back_its_lease() {
    let mut single = options();
    single.requests.writers = Writers::Single;
    let three = || {
        let folder = tempfile::tempdir().unwrap();
        let start = std::time::Instant::now();
        let mut state = State::new(100);
        for step in 0..3 {
            let store = open(&Place::folder(folder.path()), single.clone());
            assert_eq!(store.repo().mode, Mode::Single);
            state.step(step);
            state.save(&store, step).unwrap();
        }
        assert_eq!(walk(&folder.path().join("lease")), Vec::<PathBuf>::new());
        start.elapsed().as_secs()
    };
    // In time in one of some tries: a busy machine may stall.
    assert!((0..3).any(|_| three() < 20));
}

#[test]
fn a_missing_object_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _) = three_steps(folder.path(), 1);
    let newest = store.latest().unwrap().unwrap();
    let gone = objects(folder.path(), newest.id()).remove(0);
    std::fs::remove_file(&gone).unwrap();
    let error = State::load(&store, None).unwrap_err();
    assert!(is_damage(&error) && error.to_string().contains("missing"), "{error}");
    let report = store.check(&CheckOptions::default()).unwrap();
    assert_eq!(report.findings.len(), 1);
    assert!(State::load(&store, Some(1)).is_ok());
}

/// Blocks at a named point, as if the process had crashed there.
#[derive(Debug)]
struct StopAt(&'static str, AtomicBool);

#[async_trait::async_trait]
impl s4_store::CrashPoints for StopAt {
    async fn reached(&self, point: &'static str) {
        if point == self.0 && !self.1.swap(true, Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
    }
}

#[test]
fn a_crash_between_any_two_writes_costs_no_listed_step() {
    for point in ["attempt.data", "attempt.manifest", "log.before", "log.after"] {
        let folder = tempfile::tempdir().unwrap();
        let (store, states) = three_steps(folder.path(), 8);
        drop(store);
        let stop = Arc::new(StopAt(point, AtomicBool::new(false)));
        let mut crashing = options();
        crashing.requests.crash_points = Some(stop.clone());
        let (place, next) = (Place::folder(folder.path()), State::new(40_000));
        // The thread never returns, as if the process were gone.
        std::thread::spawn({
            let (place, next) = (place.clone(), next.clone());
            move || next.save(&open(&place, crashing), 9).map(drop)
        });
        while !stop.1.load(Ordering::SeqCst) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let store = open(&place, options());
        let published = point == "log.after";
        assert_eq!(store.list().unwrap().len(), if published { 4 } else { 3 }, "{point}");
        for (step, state) in states.iter().enumerate() {
            assert_eq!(&State::load(&store, Some(step as u64)).unwrap(), state, "{point}");
        }
        next.save(&store, 10).unwrap();
        assert_eq!(State::load(&store, Some(10)).unwrap(), next);
        let missing = State::load(&store, Some(9)).err();
        assert_eq!(missing.is_none(), published, "{point}");
        assert!(missing.is_none_or(|e| matches!(e, Error::Store { .. })));
    }
}
