//! Saving, listing, restoring and tidying up, as a training run does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use s4weights::store::{
    Best, CheckOptions, CheckpointStore, Place, Reason, Retention, SaveOptions, StoreError,
    StoreOptions, SweepOptions, WhyBase,
};
use s4weights::{Error, ProgressFn};

use crate::run::{State, memory, open, options};

/// Saves steps 0, 10, 20..., and returns the states.
fn train(store: &CheckpointStore, state: &mut State, steps: std::ops::Range<u64>) -> Vec<State> {
    let save = |step: u64| {
        state.step(step);
        state.save(store, step * 10).unwrap();
        state.clone()
    };
    steps.map(save).collect()
}

fn places() -> Vec<(Place, Option<tempfile::TempDir>)> {
    let folder = tempfile::tempdir().unwrap();
    let place = Place::folder(folder.path().join("not/yet/there"));
    vec![(memory(), None), (place, Some(folder))]
}

#[test]
fn every_step_of_a_run_comes_back_bit_for_bit() {
    for (place, _folder) in places() {
        let store = open(&place, StoreOptions { max_chain: 4, ..options() });
        let states = train(&store, &mut State::new(20_000), 0..7);
        let list = store.list().unwrap();
        let bases: Vec<bool> = list.iter().map(|c| c.base.is_none()).collect();
        assert_eq!(bases, [true, false, false, false, true, false, false]);
        assert!(list[1].about.data_len < list[0].about.data_len);
        // Another process sees the same.
        let again = CheckpointStore::open_at(&place, options()).unwrap();
        for (n, state) in states.iter().enumerate() {
            assert_eq!(&State::load(&again, Some(n as u64 * 10)).unwrap(), state, "{n}");
        }
        assert_eq!(again.latest().unwrap().unwrap().step(), 60);
        let report = again.check(&CheckOptions { read_data: true, ..CheckOptions::default() });
        let report = report.unwrap();
        assert!(report.is_clean() && report.checkpoints == 7 && report.bytes_read > 0);
    }
}

#[test]
fn a_new_process_goes_on_with_the_chain_of_the_old_one() {
    let place = memory();
    let mut state = State::new(20_000);
    train(&open(&place, options()), &mut state, 0..2);
    // This handle has nothing in memory: the parent is read back.
    let store = open(&place, options());
    state.step(9);
    let saved = state.save(&store, 99).unwrap();
    assert_eq!(saved.why_base, None);
    assert_eq!(saved.checkpoint.base, Some(store.at_step(0).unwrap().id()));
    assert_eq!(State::load(&store, Some(99)).unwrap(), state);
}

#[test]
fn the_last_values_are_kept_compressed_or_not_at_all_and_the_outcome_is_the_same() {
    let mut sizes = vec![];
    for parent_memory in [1 << 30, 400_000, 0] {
        let store = open(&memory(), StoreOptions { parent_memory, ..options() });
        train(&store, &mut State::new(20_000), 0..3);
        sizes.push(store.list().unwrap().iter().map(|c| c.about.data_len).collect::<Vec<_>>());
    }
    assert_eq!(sizes[0], sizes[1]);
    assert_eq!(sizes[0], sizes[2]);
}

#[test]
fn weights_and_optimizer_state_lie_in_different_objects() {
    let store = open(&memory(), options());
    let saved = State::new(20_000).save(&store, 0).unwrap();
    // One object of each group: everything is small here.
    assert_eq!(saved.checkpoint.about.objects, 2);
}

#[test]
fn bases_come_when_asked_for_and_when_most_is_new() {
    let store = open(&memory(), options());
    let mut state = State::new(20_000);
    let why = |saved: s4weights::store::Saved| saved.why_base;
    assert_eq!(why(state.save(&store, 0).unwrap()), Some(WhyBase::Policy(Reason::First)));
    assert_eq!(why(state.save(&store, 1).unwrap()), None);
    let asked = SaveOptions { base: true, ..SaveOptions::default() };
    assert_eq!(why(state.save_with(&store, 2, asked).unwrap()), Some(WhyBase::Asked));
    state.0.iter_mut().for_each(|t| t.0 = format!("renamed.{}", t.0));
    assert_eq!(why(state.save(&store, 3).unwrap()), Some(WhyBase::Policy(Reason::Changed)));
    assert_eq!(State::load(&store, None).unwrap(), state);
}

#[test]
fn two_writers_both_publish_and_nothing_is_lost() {
    let place = memory();
    open(&place, options());
    let place = &place;
    let run = |seed: u64| {
        let store = open(place, options());
        let mut state = State::new(6_000);
        (0..6u64)
            .map(|n| {
                state.step(seed + n);
                state.save(&store, seed + n).unwrap();
                (seed + n, state.clone())
            })
            .collect::<Vec<_>>()
    };
    let all: Vec<_> = std::thread::scope(|s| {
        let runs = [s.spawn(|| run(1000)), s.spawn(|| run(2000))];
        runs.into_iter().flat_map(|r| r.join().unwrap()).collect()
    });
    let store = open(place, options());
    assert_eq!(store.list().unwrap().len(), 12);
    for (step, state) in all {
        assert_eq!(State::load(&store, Some(step)).unwrap(), state, "{step}");
    }
}

#[test]
fn retention_keeps_what_its_rules_name_and_what_that_needs() {
    let best = Best { metric: "loss".into(), count: 1, larger: false };
    let policy = Retention { keep_last: Some(2), best: vec![best], ..Retention::default() };
    let store =
        open(&memory(), StoreOptions { max_chain: 1, retention: Some(policy), ..options() });
    let mut state = State::new(5_000);
    for step in 0..6u64 {
        state.step(step);
        let metrics = BTreeMap::from([("loss".to_owned(), if step == 2 { 0.1 } else { 1.0 })]);
        let with = SaveOptions { metrics, ..SaveOptions::default() };
        state.save_with(&store, step, with).unwrap();
    }
    let steps: Vec<u64> = store.list().unwrap().iter().map(|c| c.step()).collect();
    assert_eq!(steps, [2, 4, 5]);
}

#[test]
fn a_delta_cannot_lose_its_base_until_it_is_rebased_and_then_can() {
    for (place, _folder) in places() {
        let options = || StoreOptions { max_hops: 63, ..options() };
        let store = open(&place, options());
        let states = train(&store, &mut State::new(20_000), 0..4);
        let ids: Vec<_> = store.list().unwrap().iter().map(|c| c.id()).collect();
        let refused = store.retire(&ids[..1], "test").unwrap_err();
        assert!(
            matches!(&refused, Error::Store { source, .. } if matches!(**source, StoreError::Conflict(_))),
            "{refused}"
        );
        let rebased = store.rebase(ids[2], None).unwrap();
        assert_eq!((rebased.base, rebased.step(), rebased.about.objects), (None, 20, 2));
        assert_eq!(store.rebase(rebased.id(), None).unwrap().id(), rebased.id());
        // The child of a replaced checkpoint is read through the replacement, by every handle.
        assert_eq!(store.retire(&ids[..2], "test").unwrap(), 2);
        let swept =
            store.sweep(&SweepOptions { grace: Duration::ZERO, exclusive: true, dry_run: false });
        assert_eq!(swept.unwrap().deleted.len(), 3);
        for handle in [&store, &open(&place, options())] {
            assert_eq!(State::load(handle, Some(20)).unwrap(), states[2]);
            assert_eq!(State::load(handle, Some(30)).unwrap(), states[3]);
        }
        let all = CheckOptions { read_data: true, ..CheckOptions::default() };
        assert!(store.check(&all).unwrap().is_clean());
        // Training goes on, from what this handle saved last and from what a new handle finds.
        let mut state = states[3].clone();
        for (handle, step) in [(&store, 40), (&open(&place, options()), 50)] {
            state.step(step);
            assert_eq!(state.save(handle, step).unwrap().why_base, None);
            assert_eq!(State::load(handle, None).unwrap(), state);
        }
    }
}

#[test]
fn a_replaced_last_save_is_still_a_parent() {
    let store = open(&memory(), options());
    let mut state = State::new(20_000);
    train(&store, &mut state, 0..3);
    store.rebase(store.latest().unwrap().unwrap().id(), None).unwrap();
    state.step(3);
    assert_eq!(state.save(&store, 30).unwrap().why_base, None);
    assert_eq!(State::load(&store, Some(30)).unwrap(), state);
}

#[test]
fn what_a_handle_listed_is_looked_up_again_when_it_is_gone() {
    for (place, _folder) in places() {
        let store = open(&place, StoreOptions { max_chain: 1, ..options() });
        let states = train(&store, &mut State::new(5_000), 0..2);
        let other = open(&place, options());
        let ids: Vec<_> = other.list().unwrap().iter().map(|c| c.id()).collect();
        store.retire(&ids[..1], "test").unwrap();
        // It can be read as long as its data is there.
        assert_eq!(other.load_id(ids[0], None).unwrap().step(), 0);
        let all = SweepOptions { grace: Duration::ZERO, exclusive: true, dry_run: false };
        assert_eq!(store.sweep(&all).unwrap().deleted.len(), 1);
        let gone = other.load_id(ids[0], None).map(drop).unwrap_err();
        assert!(
            matches!(&gone, Error::Store { source, .. } if matches!(**source, StoreError::NoCheckpoint { .. })),
            "{gone}"
        );
        assert_eq!(State::load(&other, Some(10)).unwrap(), states[1]);
    }
}

#[test]
fn a_dry_sweep_deletes_nothing() {
    let store = open(&memory(), StoreOptions { max_chain: 1, ..options() });
    let states = train(&store, &mut State::new(5_000), 0..2);
    let first = store.list().unwrap()[0].id();
    let reading = store.load(Some(0)).unwrap();
    store.retire(&[first], "test").unwrap();
    let sweep = |dry_run| {
        let options = SweepOptions { grace: Duration::ZERO, exclusive: true, dry_run };
        store.sweep(&options).unwrap().deleted.len()
    };
    assert_eq!(sweep(true), 1);
    // A reader that had opened it can go on reading.
    assert_eq!(reading.reader().read("model.w").unwrap(), states[0].0[0].3);
    assert_eq!(sweep(false), 1);
    assert!(reading.reader().read("model.half").is_err());
    let log = store.log(1).unwrap();
    assert_eq!(log.len(), 4, "the last one says that it can never come back");
}

#[test]
fn pinned_checkpoints_stay() {
    let store = open(&memory(), options());
    State::new(5_000).save(&store, 1).unwrap();
    let id = store.at_step(1).unwrap().id();
    store.pin(id).unwrap();
    assert!(store.at_step(1).unwrap().pinned);
    assert!(store.retire(&[id], "test").is_err());
    store.unpin(id).unwrap();
    assert_eq!(store.retire(&[id], "test").unwrap(), 1);
    assert!(store.load(None).is_err());
}

#[test]
fn a_cancelled_save_leaves_the_list_as_it_was() {
    let store = open(&memory(), options());
    let state = State::new(300_000);
    state.save(&store, 1).unwrap();
    let cancel = SaveOptions { progress: Some(Arc::new(|_| false)), ..SaveOptions::default() };
    assert!(matches!(state.save_with(&store, 2, cancel), Err(Error::Cancelled)));
    assert_eq!(store.list().unwrap().len(), 1);
    // The handle is as good as new.
    assert_eq!(state.save(&store, 3).unwrap().why_base, None);
}

#[test]
fn calls_work_inside_an_asynchronous_program_too() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let store = open(&memory(), options());
        let state = State::new(10_000);
        state.save(&store, 1).unwrap();
        assert_eq!(State::load(&store, None).unwrap(), state);
    });
}

#[test]
fn places_are_probed() {
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().join("new").to_string_lossy().into_owned();
    assert!(
        CheckpointStore::probe(&url, &Default::default(), StoreOptions::default())
            .unwrap()
            .many_writers()
    );
    let missing = CheckpointStore::open(&url, &Default::default(), options());
    let missing = missing.err().map(|e| e.to_string()).unwrap_or_default();
    assert!(missing.contains("no checkpoint store"), "{missing}");
    assert_eq!(missing.matches(&url).count(), 1, "{missing}");
}

#[test]
fn what_cannot_be_saved_is_refused_by_name() {
    let store = open(&memory(), options());
    let state = State::new(5_000);
    let metrics = BTreeMap::from([("loss".to_owned(), f64::NAN)]);
    // Before anything is encoded or uploaded.
    let progress: Option<ProgressFn> = Some(Arc::new(|_| panic!("the save went on")));
    let bad = SaveOptions { metrics, progress, ..SaveOptions::default() };
    let error = state.save_with(&store, 1, bad).err().map(|e| e.to_string());
    assert!(error.is_some_and(|e| e.contains("loss")));
    let mut twice = state.clone();
    twice.0.push(state.0[0].clone());
    let error = store.save(1, &twice.sources(), &SaveOptions::default()).err();
    assert!(matches!(error, Some(Error::Argument(what)) if what.contains("model.w")));
    let bad = |max_chain, max_hops| {
        let bad = StoreOptions { max_chain, max_hops, ..options() };
        matches!(CheckpointStore::create_at(&memory(), bad), Err(Error::Argument(_)))
    };
    assert!(bad(0, 2) && bad(4097, 2) && bad(16, 0) && bad(16, 64));
    assert!(!bad(1, 1) && !bad(4096, 63));
    assert!(store.list().unwrap().is_empty());
}
