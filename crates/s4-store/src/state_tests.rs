//! Every rule of the log, and what a void entry does.

use super::*;
use crate::id::{Ids, TimeIds, WriteId};

fn id() -> CheckpointId {
    CheckpointId::new(TimeIds.next())
}

fn publish(step: u64, parent: Option<Reference>) -> Publish {
    let id = id();
    Publish {
        id,
        step,
        parent,
        since_base: parent.map_or(0, |_| step as u32),
        replaces: None,
        manifest_blake3: Hash::of(id.to_string().as_bytes()),
        manifest_len: 10,
        objects: 1,
        data_len: 100,
        raw_len: 200,
        metrics: BTreeMap::new(),
        tags: BTreeMap::new(),
    }
}

fn reference(p: &Publish) -> Reference {
    Reference { id: p.id, manifest_blake3: p.manifest_blake3 }
}

fn apply(state: &mut State, op: Op) -> Option<Conflict> {
    let entry = Entry {
        v: crate::entry::VERSION,
        n: state.head + 1,
        prev: state.head_hash,
        write_id: WriteId::new(TimeIds.next()),
        at_ms: 0,
        op,
    };
    let bytes = entry.to_bytes("k").unwrap();
    let read = Entry::parse("k", entry.n, &bytes).unwrap();
    assert_eq!(read, entry);
    state.apply("k", &read, Hash::of(&bytes)).unwrap()
}

/// A base and two deltas, one on the other.
fn chain(state: &mut State) -> [Publish; 3] {
    let base = publish(1, None);
    let one = publish(2, Some(reference(&base)));
    let two = publish(3, Some(reference(&one)));
    let all = [base, one, two];
    for p in &all {
        assert_eq!(apply(state, Op::Publish(p.clone())), None);
    }
    all
}

fn retire(ids: &[CheckpointId]) -> Op {
    Op::Retire { ids: ids.to_vec(), reason: String::new() }
}

#[test]
fn what_is_needed_cannot_be_retired() {
    let mut state = State::default();
    let [base, one, two] = chain(&mut state);
    let before = state.live.clone();
    let needed = Conflict::Needed { id: base.id, by: one.id };
    assert_eq!(apply(&mut state, retire(&[base.id])), Some(needed));
    assert_eq!(state.live, before);
    assert_eq!(state.void.len(), 1);
    assert_eq!(state.descendants(&[base.id]), [one.id, two.id].into());
    assert_eq!(apply(&mut state, retire(&[two.id, one.id])), None);
    assert_eq!(state.latest().unwrap().id(), base.id);
    assert_eq!(apply(&mut state, retire(&[one.id])), Some(Conflict::NotLive(one.id)));
}

#[test]
fn pins_hold_until_they_are_taken_off() {
    let mut state = State::default();
    let [_, _, two] = chain(&mut state);
    assert_eq!(apply(&mut state, Op::Pin { id: two.id }), None);
    assert_eq!(apply(&mut state, retire(&[two.id])), Some(Conflict::Pinned(two.id)));
    assert_eq!(apply(&mut state, Op::Unpin { id: two.id }), None);
    assert_eq!(apply(&mut state, retire(&[two.id])), None);
    assert_eq!(apply(&mut state, Op::Pin { id: two.id }), Some(Conflict::NotLive(two.id)));
}

#[test]
fn a_child_after_its_parent_retired_is_void() {
    let mut state = State::default();
    let base = publish(1, None);
    apply(&mut state, Op::Publish(base.clone()));
    let late = publish(2, Some(reference(&base)));
    assert_eq!(apply(&mut state, retire(&[base.id])), None);
    let gone = Conflict::ParentGone { child: late.id, parent: base.id, state: "retired" };
    assert_eq!(apply(&mut state, Op::Publish(late.clone())), Some(gone));
    assert!(state.get(late.id).is_none());
    let stranger = publish(3, Some(Reference { id: id(), manifest_blake3: Hash::of(b"") }));
    let verdict = apply(&mut state, Op::Publish(stranger));
    assert!(matches!(verdict, Some(Conflict::ParentGone { state: "unknown", .. })));
}

#[test]
fn a_parent_with_another_manifest_is_refused() {
    let mut state = State::default();
    let [base, ..] = chain(&mut state);
    let other = Reference { id: base.id, manifest_blake3: Hash::of(b"other") };
    let verdict = apply(&mut state, Op::Publish(publish(9, Some(other))));
    assert!(matches!(verdict, Some(Conflict::ParentDiffers { .. })));
}

#[test]
fn an_id_is_used_once() {
    let mut state = State::default();
    let [base, ..] = chain(&mut state);
    let again = apply(&mut state, Op::Publish(base.clone()));
    assert_eq!(again, Some(Conflict::Spent { id: base.id, state: "published" }));
    let orphan = publish(5, None);
    assert_eq!(apply(&mut state, Op::Abort { ids: vec![orphan.id] }), None);
    let late = apply(&mut state, Op::Publish(orphan.clone()));
    assert_eq!(late, Some(Conflict::Spent { id: orphan.id, state: "aborted" }));
    let listed = apply(&mut state, Op::Abort { ids: vec![base.id] });
    assert_eq!(listed, Some(Conflict::Spent { id: base.id, state: "published" }));
}

#[test]
fn a_replacement_takes_over_children_pin_and_place() {
    let mut state = State::default();
    let [base, one, two] = chain(&mut state);
    apply(&mut state, Op::Pin { id: one.id });
    let mut full = publish(2, None);
    full.replaces = Some(reference(&one));
    assert_eq!(apply(&mut state, Op::Publish(full.clone())), None);
    assert_eq!(state.latest().unwrap().id(), two.id, "a rebase is no newer than the original");
    assert!(state.get(full.id).unwrap().pinned);
    let ids = |chain: Vec<&Checkpoint>| chain.iter().map(|c| c.id()).collect::<Vec<_>>();
    assert_eq!(ids(state.chain(two.id).unwrap()), [two.id, full.id]);
    assert_eq!(apply(&mut state, retire(&[base.id])), None, "nothing needs the base any more");

    // A writer that was at work against the old one may still publish: the content is the same.
    let late = publish(4, Some(reference(&one)));
    assert_eq!(apply(&mut state, Op::Publish(late.clone())), None);
    assert_eq!(ids(state.chain(late.id).unwrap()), [late.id, full.id]);
    // But not against a manifest that the old one never had.
    let wrong = Reference { id: one.id, manifest_blake3: Hash::of(b"x") };
    let verdict = apply(&mut state, Op::Publish(publish(5, Some(wrong))));
    assert!(matches!(verdict, Some(Conflict::ParentDiffers { .. })));
    // Replacing twice: the second one finds nothing to replace.
    let mut again = publish(2, None);
    again.replaces = Some(reference(&one));
    assert_eq!(apply(&mut state, Op::Publish(again)), Some(Conflict::NotLive(one.id)));
}

#[test]
fn a_replacement_is_full() {
    let mut state = State::default();
    let [base, one, _] = chain(&mut state);
    let mut delta = publish(2, Some(reference(&base)));
    delta.replaces = Some(reference(&one));
    let verdict = apply(&mut state, Op::Publish(delta.clone()));
    assert_eq!(verdict, Some(Conflict::ReplacementHasParent(delta.id)));
}

#[test]
fn chains_have_a_limit() {
    let mut state = State::default();
    let mut last = publish(0, None);
    apply(&mut state, Op::Publish(last.clone()));
    for step in 1..MAX_CHAIN as u64 {
        last = publish(step, Some(reference(&last)));
        assert_eq!(apply(&mut state, Op::Publish(last.clone())), None);
    }
    assert_eq!(state.chain(last.id).unwrap().len(), MAX_CHAIN);
    let verdict = apply(&mut state, Op::Publish(publish(99, Some(reference(&last)))));
    assert!(matches!(verdict, Some(Conflict::TooDeep { depth: 65, .. })));
}

#[test]
fn the_newest_is_the_last_published_not_the_highest_step() {
    let mut state = State::default();
    for step in [100, 200, 150] {
        apply(&mut state, Op::Publish(publish(step, None)));
    }
    assert_eq!(state.latest().unwrap().step(), 150);
    assert_eq!(state.list().iter().map(|c| c.step()).collect::<Vec<_>>(), [100, 200, 150]);
    assert_eq!(state.at_step(200).unwrap().step(), 200);
    assert!(state.at_step(1).is_none());
}

#[test]
fn entries_follow_each_other() {
    let mut state = State::default();
    let entry = |n, prev| Entry {
        v: 1,
        n,
        prev,
        write_id: WriteId::new(TimeIds.next()),
        at_ms: 0,
        op: Op::Publish(publish(1, None)),
    };
    let hash = Hash::of_nothing();
    assert!(state.apply("k", &entry(2, hash), hash).is_err());
    assert!(state.apply("k", &entry(1, Hash::of(b"x")), hash).is_err());
    assert!(state.apply("k", &entry(1, hash), hash).is_ok());
}
