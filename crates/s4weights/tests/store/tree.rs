//! Which checkpoint each one is a delta of, whatever happens to the others.

use s4weights::store::{
    Checkpoint, CheckpointId, CheckpointStore, Reason, Retention, StoreOptions, WhyBase,
};

use crate::run::{State, memory, open, options};

/// The step of the checkpoint that `id` is a delta of.
fn of_step(store: &CheckpointStore, id: CheckpointId) -> Option<u64> {
    let state = store.state().unwrap();
    let base = state.get(id).unwrap().base?;
    Some(state.get(base).unwrap().step())
}

/// Checkpoints that a restore reads besides the base.
fn hops(store: &CheckpointStore, id: CheckpointId) -> usize {
    store.state().unwrap().chain(id).unwrap().len() - 1
}

/// Saves the next step; returns the step that it is a delta of.
fn go_on(store: &CheckpointStore, state: &mut State, step: u64) -> Option<u64> {
    state.step(step);
    let saved = state.save(store, step).unwrap();
    assert_eq!(&State::load(store, Some(step)).unwrap(), state);
    of_step(store, saved.checkpoint.id())
}

fn train(store: &CheckpointStore, state: &mut State, steps: std::ops::Range<u64>) {
    for step in steps {
        go_on(store, state, step);
    }
}

fn at_step(store: &CheckpointStore, step: u64) -> Checkpoint {
    store.at_step(step).unwrap()
}

const SIXTEEN: [Option<u64>; 17] = {
    let n = Some;
    [
        None,
        n(0),
        n(0),
        n(0),
        n(0),
        n(4),
        n(4),
        n(4),
        n(0),
        n(8),
        n(8),
        n(8),
        n(0),
        n(12),
        n(12),
        n(12),
        None,
    ]
};

#[test]
fn sixteen_share_a_base_within_two_hops() {
    for parent_memory in [1 << 30, 0] {
        let store = open(&memory(), StoreOptions { parent_memory, ..options() });
        let mut state = State::new(10_000);
        let parents: Vec<_> = (0..17).map(|step| go_on(&store, &mut state, step)).collect();
        assert_eq!(parents, SIXTEEN);
        assert!(store.list().unwrap().iter().all(|c| hops(&store, c.id()) <= 2));
    }
}

#[test]
fn hops_make_a_line_or_a_star() {
    for (max_hops, expected) in
        [(63, [None, Some(0), Some(1), Some(2)]), (1, [None, Some(0), Some(0), Some(0)])]
    {
        let store = open(&memory(), StoreOptions { max_hops, ..options() });
        let mut state = State::new(10_000);
        let parents: Vec<_> = (0..4).map(|step| go_on(&store, &mut state, step)).collect();
        assert_eq!(parents, expected);
    }
}

#[test]
fn every_process_goes_on_where_the_one_before_stopped() {
    let place = memory();
    let mut state = State::new(10_000);
    // A parent that is read back is kept if it is needed again; the choice of parents is the same either way.
    for (step, parent) in (0..17).zip(SIXTEEN) {
        let parent_memory = [1 << 30, 200_000, 0][step as usize % 3];
        let store = open(&place, StoreOptions { parent_memory, ..options() });
        assert_eq!(go_on(&store, &mut state, step), parent, "{step}");
    }
    let store = open(&place, options());
    let parents: Vec<_> = (17..25).map(|step| go_on(&store, &mut state, step)).collect();
    let later = |p: &Option<u64>| Some(p.map_or(16, |p| p + 16));
    assert_eq!(parents, SIXTEEN[1..9].iter().map(later).collect::<Vec<_>>());
}

#[test]
fn numbers_go_on_when_those_before_are_retired() {
    let policy = Retention { keep_last: Some(1), ..Retention::default() };
    let place = memory();
    let with = || StoreOptions { retention: Some(policy.clone()), ..options() };
    let mut store = open(&place, with());
    let mut state = State::new(10_000);
    for (step, parent) in (0..17).zip(SIXTEEN) {
        if step % 5 == 4 {
            // Another process finds the same short list.
            store = open(&place, with());
        }
        assert_eq!(go_on(&store, &mut state, step), parent, "{step}");
        assert!(store.list().unwrap().len() <= 3, "the newest, its anchor and its base");
    }
}

#[test]
fn an_anchor_stays_as_long_as_others_need_it() {
    let store = open(&memory(), options());
    let mut state = State::new(10_000);
    train(&store, &mut state, 0..7);
    let four = at_step(&store, 4).id();
    assert!(store.retire(&[four], "test").is_err());
    store.retire(&[at_step(&store, 5).id(), at_step(&store, 1).id()], "test").unwrap();
    assert!(store.retire(&[four], "test").is_err());
    // If the checkpoint saved last is gone, the newest one left counts.
    store.retire(&[at_step(&store, 6).id()], "test").unwrap();
    assert_eq!(go_on(&store, &mut state, 10), Some(4));
    store.retire(&[at_step(&store, 10).id(), four], "test").unwrap();
    assert_eq!(go_on(&store, &mut state, 20), Some(0));
    assert_eq!(at_step(&store, 20).since_base(), 4);
}

#[test]
fn a_rebased_anchor_is_a_base_of_its_own() {
    let place = memory();
    let store = open(&place, options());
    let mut state = State::new(10_000);
    train(&store, &mut state, 0..6);
    let new = store.rebase(at_step(&store, 4).id(), None).unwrap();
    assert_eq!((new.since_base(), hops(&store, at_step(&store, 5).id())), (0, 1));
    // The rebased checkpoint takes the anchor's place, for this handle and for others.
    assert_eq!(go_on(&store, &mut state, 6), Some(4));
    let other = open(&place, options());
    assert_eq!(go_on(&other, &mut state, 7), Some(4));
    assert_eq!(go_on(&other, &mut state, 8), Some(4));
    assert_eq!((hops(&other, at_step(&other, 8).id()), go_on(&other, &mut state, 9)), (1, Some(8)));
    let list = other.list().unwrap();
    assert!(list.iter().all(|c| hops(&other, c.id()) <= 2));
    // The rebased checkpoint may also be the one saved last.
    other.rebase(at_step(&other, 9).id(), None).unwrap();
    assert_eq!(go_on(&other, &mut state, 10), Some(9));
    assert_eq!(at_step(&other, 10).since_base(), 1);
}

#[test]
fn two_writers_each_follow_their_own_line() {
    let place = memory();
    let (mut a, mut b) = (State::new(10_000), State::new(10_000));
    let one = open(&place, options());
    go_on(&one, &mut a, 0);
    let two = open(&place, options());
    let mut parents = [vec![], vec![]];
    for n in 1..9u64 {
        parents[0].push(go_on(&one, &mut a, n));
        b.step(1000 + n);
        // Neither writer's values are mistaken for the other's.
        let saved = b.save(&two, 100 + n).unwrap();
        parents[1].push(of_step(&two, saved.checkpoint.id()));
        assert_eq!(State::load(&one, Some(100 + n)).unwrap(), b);
    }
    assert_eq!(parents[0], SIXTEEN[1..9]);
    // The second writer began after the first one's first delta, at position 2 since the base.
    let n = Some;
    assert_eq!(parents[1], [n(0), n(0), n(0), n(103), n(103), n(103), n(0), n(107)]);
    let list = one.list().unwrap();
    assert_eq!(list.len(), 17);
    assert!(list.iter().all(|c| hops(&one, c.id()) <= 2));
}

#[test]
fn a_run_that_went_back_goes_on_from_there() {
    let place = memory();
    let mut state = State::new(10_000);
    let first = open(&place, options());
    train(&first, &mut state, 0..11);
    let store = open(&place, options());
    let mut state = State::load(&store, Some(5)).unwrap();
    state.step(77);
    // Step 5 was at position 5 since the base, a delta of 4.
    let saved = state.save(&store, 6).unwrap();
    assert_eq!(of_step(&store, saved.checkpoint.id()), Some(4));
    assert_eq!(saved.checkpoint.since_base(), 6);
    // Loading another step in between does not matter.
    State::load(&store, Some(10)).unwrap();
    state.step(78);
    let saved = state.save(&store, 7).unwrap();
    assert_eq!(
        (of_step(&store, saved.checkpoint.id()), saved.checkpoint.since_base()),
        (Some(4), 7)
    );
    assert_eq!(State::load(&store, None).unwrap(), state);
}

#[test]
fn chains_of_other_options_are_continued_within_the_hops() {
    let place = memory();
    let line = open(&place, StoreOptions { max_hops: 63, ..options() });
    let mut state = State::new(10_000);
    train(&line, &mut state, 0..6);
    let store = open(&place, options());
    assert_eq!(go_on(&store, &mut state, 6), Some(1));
    assert_eq!(hops(&store, at_step(&store, 6).id()), 2);
    let star = open(&place, StoreOptions { max_hops: 1, ..options() });
    assert_eq!(go_on(&star, &mut state, 7), Some(0));
    let few = open(&place, StoreOptions { max_chain: 4, ..options() });
    state.step(8);
    let saved = state.save(&few, 8).unwrap();
    assert_eq!(saved.why_base, Some(WhyBase::Policy(Reason::Full)));
}
