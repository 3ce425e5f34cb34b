//! Importing checkpoints from files, and replicating them from one store to another.

use std::sync::{Arc, Mutex};

use s4weights::store::{CheckpointStore, ImportOptions, Place, ReplicateOptions};
use s4weights::{Error, ProgressFn, Reader, Source, Target, WriteOptions, Writer};

use crate::run::{State, memory, open, options};

/// Writes a file with a state; returns its reader.
fn file(state: &State, folder: &std::path::Path, name: &str) -> Reader {
    let path = folder.join(name);
    let mut writer = Writer::create(Target::from(path.as_path()), WriteOptions::default()).unwrap();
    writer.write(&state.sources()).unwrap();
    writer.finish(Default::default()).unwrap();
    Reader::open(Source::from(path.as_path()), Default::default()).unwrap()
}

fn tags(id: &str) -> ImportOptions {
    let tags = [("submission".to_owned(), id.to_owned())].into();
    ImportOptions { tags, ..ImportOptions::default() }
}

#[test]
fn files_become_deltas_of_each_other_and_move_to_another_store_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let (near, far) = (open(&memory(), options()), open(&memory(), options()));
    let mut state = State::new(20_000);
    let mut copies: Vec<(_, _)> = vec![];
    for step in 0..4 {
        state.step(step);
        let reader = file(&state, folder.path(), &format!("{step}.s4w"));
        let saved = near.import(&reader, step, &tags(&step.to_string())).unwrap();
        assert_eq!(saved.why_base.is_some(), step == 0, "{:?}", saved.why_base);
        assert_eq!(State::load(&near, Some(step)).unwrap(), state);
        let id = saved.checkpoint.id();
        let parent = saved.checkpoint.about.parent.map(|parent| parent.id);
        let parent = copies.iter().find(|(of, _)| Some(*of) == parent).map(|(_, copy)| *copy);
        let how = ReplicateOptions { parent, ..ReplicateOptions::default() };
        let copy = far.replicate(&near, id, &how).unwrap();
        assert_eq!(copy.about.tags, saved.checkpoint.about.tags);
        assert_eq!(copy.about.data_len, saved.checkpoint.about.data_len);
        assert_eq!(copy.about.parent.is_some(), step > 0);
        assert_eq!(State::load(&far, Some(step)).unwrap(), state);
        copies.push((id, copy.id()));
    }
}

#[test]
fn a_delta_needs_the_copy_of_just_its_parent() {
    let folder = tempfile::tempdir().unwrap();
    let (near, far) = (open(&memory(), options()), open(&memory(), options()));
    let mut state = State::new(20_000);
    let mut ids = vec![];
    for step in 0..2 {
        state.step(step);
        let reader = file(&state, folder.path(), &format!("{step}.s4w"));
        ids.push(near.import(&reader, step, &ImportOptions::default()).unwrap().checkpoint.id());
    }
    let refused = far.replicate(&near, ids[1], &ReplicateOptions::default());
    assert!(matches!(&refused, Err(Error::Argument(_))), "{refused:?}");
    // Another checkpoint than the parent that is asked for.
    state.step(9);
    let other = file(&state, folder.path(), "other.s4w");
    let base = ImportOptions { base: true, ..ImportOptions::default() };
    let other = far.import(&other, 9, &base).unwrap().checkpoint.id();
    let how = ReplicateOptions { parent: Some(other), ..ReplicateOptions::default() };
    let refused = far.replicate(&near, ids[1], &how);
    assert!(matches!(&refused, Err(Error::Argument(_))), "{refused:?}");
    assert_eq!(far.list().unwrap().len(), 1);
}

#[test]
fn what_is_not_to_be_listed_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let place = memory();
    let (near, far) = (open(&memory(), options()), open(&place, options()));
    let reader = file(&State::new(5000), folder.path(), "a.s4w");
    let seen = Arc::new(Mutex::new(vec![]));
    let listing = {
        let seen = Arc::clone(&seen);
        Arc::new(move |id| {
            seen.lock().unwrap().push(id);
            Err(Error::Argument("not now".into()))
        })
    };
    let how = ImportOptions { listing: Some(listing.clone()), ..ImportOptions::default() };
    assert!(matches!(far.import(&reader, 1, &how), Err(Error::Argument(_))));
    let id = near.import(&reader, 1, &ImportOptions::default()).unwrap().checkpoint.id();
    let how = ReplicateOptions { listing: Some(listing), ..ReplicateOptions::default() };
    assert!(matches!(far.replicate(&near, id, &how), Err(Error::Argument(_))));
    assert!(far.list().unwrap().is_empty());
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen.len(), 2);
    for id in seen {
        assert!(!far.settle(id).unwrap());
    }
    assert!(far.import(&reader, 1, &ImportOptions::default()).is_ok());
}

#[test]
fn a_cancelled_copy_leaves_no_objects() {
    let folder = tempfile::tempdir().unwrap();
    let far_folder = folder.path().join("far");
    let near = open(&memory(), options());
    let far = Place::folder(&far_folder);
    let far = open(&far, options());
    let reader = file(&State::new(5000), folder.path(), "a.s4w");
    let id = near.import(&reader, 1, &ImportOptions::default()).unwrap().checkpoint.id();
    let progress: ProgressFn = Arc::new(|p| p.done == 0);
    let how = ReplicateOptions { progress: Some(progress), ..ReplicateOptions::default() };
    assert!(matches!(far.replicate(&near, id, &how), Err(Error::Cancelled)));
    let copied = std::fs::read_dir(far_folder.join("ck")).map_or(0, Iterator::count);
    assert_eq!(copied, 0);
    assert!(far.replicate(&near, id, &ReplicateOptions::default()).is_ok());
}

#[test]
fn an_attempt_that_was_given_up_is_never_listed() {
    let folder = tempfile::tempdir().unwrap();
    let place = memory();
    let store = Arc::new(open(&place, options()));
    let reader = file(&State::new(5000), folder.path(), "a.s4w");
    // Another process settles the attempt while the writer's last request is still on its way.
    let other: CheckpointStore = open(&place, options());
    let settled = Arc::new(Mutex::new(None));
    let listing = {
        let settled = Arc::clone(&settled);
        Arc::new(move |id| {
            assert!(!other.settle(id)?);
            *settled.lock().unwrap() = Some(id);
            Ok(())
        })
    };
    let how = ImportOptions { listing: Some(listing), ..ImportOptions::default() };
    assert!(store.import(&reader, 1, &how).is_err());
    assert!(store.list().unwrap().is_empty());
    // An attempt that was listed stays settled as listed, even after it is retired.
    let saved = store.import(&reader, 1, &ImportOptions::default()).unwrap().checkpoint;
    assert!(store.settle(saved.id()).unwrap());
    store.retire(&[saved.id()], "test").unwrap();
    assert!(store.settle(saved.id()).unwrap());
}

#[test]
fn a_file_that_is_damaged_does_not_come_in() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&memory(), options());
    let state = State::new(20_000);
    drop(file(&state, folder.path(), "a.s4w"));
    let path = folder.path().join("a.s4w");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[5000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let reader = Reader::open(Source::from(path.as_path()), Default::default()).unwrap();
    let refused = store.import(&reader, 1, &ImportOptions::default());
    assert!(matches!(&refused, Err(Error::Format { .. })), "{refused:?}");
    assert!(store.list().unwrap().is_empty());
}
