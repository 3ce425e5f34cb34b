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
        order: None,
        manifest_blake3: Digest::of(id.to_string().as_bytes()),
        manifest_len: 10,
        objects: 1,
        parts: crate::layout::Parts::default(),
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
        v: op.version(),
        n: state.head + 1,
        prev: state.head_hash,
        write_id: WriteId::new(TimeIds.next()),
        at_ms: 0,
        op,
    };
    let bytes = entry.to_bytes("k").unwrap();
    let read = Entry::parse("k", entry.n, &bytes).unwrap();
    assert_eq!(read, entry);
    let verdict = state.apply("k", &read, Digest::of(&bytes)).unwrap();
    state.settle();
    verdict
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
    let stranger = publish(3, Some(Reference { id: id(), manifest_blake3: Digest::of(b"") }));
    let verdict = apply(&mut state, Op::Publish(stranger));
    assert!(matches!(verdict, Some(Conflict::ParentGone { state: "unknown", .. })));
}

#[test]
fn a_parent_with_another_manifest_is_refused() {
    let mut state = State::default();
    let [base, ..] = chain(&mut state);
    let other = Reference { id: base.id, manifest_blake3: Digest::of(b"other") };
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

    // A writer that was saving a delta of the old one may still publish: the content is the same.
    let late = publish(4, Some(reference(&one)));
    assert_eq!(apply(&mut state, Op::Publish(late.clone())), None);
    assert_eq!(ids(state.chain(late.id).unwrap()), [late.id, full.id]);
    // But not against a manifest that the old one never had.
    let wrong = Reference { id: one.id, manifest_blake3: Digest::of(b"x") };
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
    let hash = Digest::of(&[]);
    assert!(state.apply("k", &entry(2, hash), hash).is_err());
    assert!(state.apply("k", &entry(1, Digest::of(b"x")), hash).is_err());
    assert!(state.apply("k", &entry(1, hash), hash).is_ok());
}

fn entry(state: &State, op: Op) -> Entry {
    let (n, prev) = (state.head + 1, state.head_hash);
    Entry { v: op.version(), n, prev, write_id: WriteId::new(TimeIds.next()), at_ms: 0, op }
}

/// Replays operations without bytes; returns how long that took.
fn replay(ops: impl IntoIterator<Item = Op>) -> (State, std::time::Duration) {
    let start = std::time::Instant::now();
    let mut state = State::default();
    for op in ops {
        let entry = entry(&state, op);
        state.apply("k", &entry, entry.prev).unwrap();
    }
    state.settle();
    (state, start.elapsed())
}

/// `n` operations in which one checkpoint has many deltas and is replaced again and again, each time
/// with a delta of the very first; then all are retired, one by one.
fn replacements(n: usize) -> Vec<Op> {
    let first = publish(1, None);
    let mut ops = vec![Op::Publish(first.clone())];
    let mut deltas = vec![];
    for step in 0..n as u64 / 2 {
        let delta = publish(step, Some(reference(&first)));
        deltas.push(delta.id);
        ops.push(Op::Publish(delta));
    }
    let mut old = first.clone();
    for step in 0..n as u64 / 4 {
        let mut new = publish(step, None);
        new.replaces = Some(reference(&old));
        ops.push(Op::Publish(new.clone()));
        let delta = publish(step, Some(reference(&first)));
        deltas.push(delta.id);
        ops.push(Op::Publish(delta));
        old = new;
    }
    ops.extend(deltas.into_iter().map(|id| retire(&[id])));
    ops
}

#[test]
fn the_time_of_a_replay_grows_with_the_log_and_not_with_its_square() {
    let (few, many) = (replacements(4_000), replacements(64_000));
    let (mut state, _) = replay(few.clone());
    assert!(state.void.is_empty() && state.live.len() == 1);
    // The smaller log several times, since a clock's readings vary.
    let small = (0..3).map(|_| replay(few.clone()).1).min().unwrap();
    // The larger one again if it was slow: a busy machine may have stalled.
    let mut took = vec![];
    while took.len() < 5 && took.last().is_none_or(|last| *last >= small * 100) {
        let (large, time) = replay(many.clone());
        assert!(large.void.is_empty() && large.live.len() == 1);
        took.push(time);
    }
    // Linear growth would take 16 times as long, quadratic growth 256 times.
    let least = took.iter().min().copied().unwrap();
    assert!(least < small * 100, "{took:?} for 16 times what takes {small:?}");
    // Publishing one id again and again is void each time.
    let again = state.live.values().next().unwrap().about.clone();
    let before = state.void.len();
    for _ in 0..50_000 {
        let entry = entry(&state, Op::Publish(again.clone()));
        state.apply("k", &entry, entry.prev).unwrap();
    }
    assert_eq!(state.void.len(), before + 50_000);
}

#[test]
fn a_stored_state_is_what_it_was_or_is_refused() {
    let mut state = State::default();
    let [_, one, two] = chain(&mut state);
    let mut full = publish(2, None);
    full.replaces = Some(reference(&one));
    apply(&mut state, Op::Publish(full.clone()));
    let parts = |state: &State| {
        let live: Vec<_> = state.live.values().cloned().collect();
        let dead: Vec<_> = state.dead.iter().map(|(id, dead)| (*id, *dead)).collect();
        ((state.head, state.head_hash), live, dead)
    };
    let (head, live, dead) = parts(&state);
    let read = State::stored(head, live.clone(), dead.clone()).unwrap();
    assert_eq!(read, state);
    assert_eq!(read.descendants(&[full.id]), [two.id].into());
    let refused = |live: &[Checkpoint], dead: &[(CheckpointId, Dead)]| {
        State::stored(head, live.to_vec(), dead.to_vec()).unwrap_err()
    };
    let how = |by: CheckpointId| End::Replaced {
        by: Reference { id: by, manifest_blake3: Digest::of(b"") },
        had: Digest::of(b""),
    };
    let circle: Vec<_> = (0..3).map(|_| id()).collect();
    let circle: Vec<_> =
        (0..3).map(|i| (circle[i], Dead { entry: 1, how: how(circle[(i + 1) % 3]) })).collect();
    assert!(refused(&live, &circle).contains("cycle"));
    let twice = [(id(), Dead { entry: 1, how: how(full.id) }), dead[0]];
    assert!(refused(&live, &twice).contains("replaces two others"));
    assert!(refused(&live, &[(full.id, Dead { entry: 1, how: End::Retired })]).contains("twice"));
    assert!(
        refused(&live, &[(id(), Dead { entry: 99, how: End::Retired })])
            .contains("after its last one")
    );
    let mut bent = live.clone();
    bent[0].base = Some(bent[0].id());
    assert!(refused(&bent, &dead).contains("chain"));
    bent[0].base = Some(id());
    assert!(refused(&bent, &dead).contains("chain"));
}

#[test]
fn an_older_checkpoint_may_be_listed_after_newer_ones() {
    let mut state = State::default();
    let first = publish(1, None);
    let newest = publish(4, None);
    for p in [&first, &newest] {
        assert_eq!(apply(&mut state, Op::Publish(p.clone())), None);
    }
    // Both come right before entry 2, in the order of their entries.
    let late = [2, 3].map(|step| Publish { order: Some(1), ..publish(step, None) });
    for p in &late {
        let op = Op::Publish(p.clone());
        assert_eq!(op.version(), 4);
        assert_eq!(apply(&mut state, op), None);
    }
    let steps = |state: &State| state.list().iter().map(|c| c.step()).collect::<Vec<_>>();
    assert_eq!(steps(&state), [1, 2, 3, 4]);
    assert_eq!(state.latest().unwrap().id(), newest.id);
    // No checkpoint is newer than its entry, whatever it says.
    let boast = Publish { order: Some(u64::MAX), ..publish(5, None) };
    assert_eq!(apply(&mut state, Op::Publish(boast.clone())), None);
    assert_eq!(state.get(boast.id).unwrap().order, 5);
    // A position of its own survives being retired and listed again, and is taken over by a
    // replacement.
    assert_eq!(apply(&mut state, retire(&[late[0].id])), None);
    let back = Op::Unretire { about: Box::new(late[0].clone()), order: 1, published_ms: 0 };
    assert_eq!(back.version(), 4);
    assert_eq!(apply(&mut state, back), None);
    assert_eq!(state.get(late[0].id).unwrap().order, 1);
    let full = Publish { replaces: Some(reference(&late[1])), ..publish(3, None) };
    assert_eq!(apply(&mut state, Op::Publish(full.clone())), None);
    assert_eq!((state.get(full.id).unwrap().order, state.latest().unwrap().step()), (1, 5));
}

#[test]
fn a_retired_checkpoint_is_listed_again_until_it_is_given_up() {
    let mut state = State::default();
    let [_, one, two] = chain(&mut state);
    let unretire =
        |p: &Publish, order| Op::Unretire { about: Box::new(p.clone()), order, published_ms: 7 };
    let listed = Conflict::NotRetired { id: two.id, state: "listed" };
    assert_eq!(apply(&mut state, unretire(&two, 3)), Some(listed));
    assert_eq!(apply(&mut state, retire(&[two.id, one.id])), None);
    let gone = Conflict::ParentGone { child: two.id, parent: one.id, state: "retired" };
    assert_eq!(apply(&mut state, unretire(&two, 3)), Some(gone));
    assert_eq!(apply(&mut state, unretire(&one, 2)), None);
    // Its position in time is before it was retired, whatever the entry says.
    assert_eq!(apply(&mut state, unretire(&two, u64::MAX)), None);
    let back = state.get(two.id).unwrap();
    assert_eq!((back.order, back.at_ms, back.base), (5, 7, Some(one.id)));
    assert_eq!(apply(&mut state, retire(&[two.id])), None);
    assert_eq!(apply(&mut state, Op::Abort { ids: vec![two.id] }), None);
    let given_up = Conflict::NotRetired { id: two.id, state: "given up" };
    assert_eq!(apply(&mut state, unretire(&two, 3)), Some(given_up));
    assert!(apply(&mut state, Op::Abort { ids: vec![two.id] }).is_some());
    let unknown = publish(9, None);
    let verdict = apply(&mut state, unretire(&unknown, 1));
    assert_eq!(verdict, Some(Conflict::NotRetired { id: unknown.id, state: "unknown" }));
}
