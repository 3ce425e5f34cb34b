//! Many writers, a sweeper and readers against a model, with faults, crashes and days passing. A
//! seed determines everything: `S4_SIM_SEED=n` repeats one, `S4_SIM_SEEDS=n` runs that many.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use s4_store::testing::{Fault, OpInfo, OpKind, Random, SeededIds, quick_options, toy};
use s4_store::{
    About, CheckOptions, Checkpoint, CheckpointId, CommitUnknown, Conflict, Entry, Error,
    ObjectInfo, Op, Place, Reference, Resolution, Retention, Store, StoreOptions, SweepOptions,
};

use crate::{faulty, simulations};

mod deeds;
mod repairs;

use deeds::{Deed, Mix, USUAL};

const LEN: usize = 24;
const GRACE: Duration = Duration::from_secs(24 * 3600);

/// What is known for certain, from acknowledgements alone.
#[derive(Default)]
struct Model {
    /// What each attempt would hold, published or not.
    contents: BTreeMap<CheckpointId, Vec<u8>>,
    /// Checkpoints that were acknowledged as listed.
    listed: BTreeSet<CheckpointId>,
    /// Checkpoints that somebody asked to take off the list, successfully or not.
    maybe_gone: BTreeSet<CheckpointId>,
    /// Checkpoints that somebody asked to list again, successfully or not.
    maybe_back: BTreeSet<CheckpointId>,
    /// Checkpoints that were acknowledged as taken off the list.
    gone: BTreeSet<CheckpointId>,
    /// How many retentions have not reported what they retired: they failed, or their process died.
    retaining: usize,
    /// As `retaining`, for calls that list checkpoints again.
    unretiring: usize,
    unknown: Vec<CommitUnknown>,
    /// Checkpoints that can never be listed: given up, or found not to be in the log.
    never: BTreeSet<CheckpointId>,
    /// Checkpoints that were acknowledged as pinned.
    pinned: BTreeSet<CheckpointId>,
    /// Checkpoints that somebody asked to unpin, successfully or not.
    maybe_unpinned: BTreeSet<CheckpointId>,
    /// What may have replaced a checkpoint.
    heirs: BTreeMap<CheckpointId, Vec<CheckpointId>>,
    /// The log was damaged, so processes may find that it is not the one that they know.
    harmed: bool,
    /// It is damaged now: a process that has not read a lost entry takes the log to end before it, and does not know
    /// that a checkpoint was retired.
    broken: bool,
    acknowledged: usize,
    restored: usize,
    swept: usize,
}

impl Model {
    /// A checkpoint and all that may have replaced it.
    fn family(&self, id: CheckpointId) -> BTreeSet<CheckpointId> {
        let (mut all, mut open) = (BTreeSet::new(), vec![id]);
        while let Some(id) = open.pop() {
            all.insert(id);
            open.extend(self.heirs.get(&id).into_iter().flatten());
        }
        all
    }
}

type Shared = Arc<Mutex<Model>>;

struct World {
    place: Place,
    model: Shared,
    seed: u64,
    deeds: &'static Mix,
}

impl World {
    fn options(&self, who: u64, life: u64) -> StoreOptions {
        let ids = SeededIds::new(self.seed * 4096 + who * 64 + life);
        StoreOptions { ids: Arc::new(ids), upload_memory: 1 << 20, ..quick_options() }
    }
}

fn content(random: &mut Random) -> Vec<u8> {
    (0..LEN).map(|_| random.bits() as u8).collect()
}

/// Errors that a working store may give while others write, die and sweep.
fn expected(model: &Shared, error: Error) {
    match error {
        Error::CommitUnknown(unknown) => model.lock().unwrap().unknown.push(*unknown),
        Error::Storage { .. }
        | Error::Deadline { .. }
        | Error::NoCheckpoint { .. }
        | Error::Missing { .. }
        | Error::Callback(_)
        | Error::Conflict(
            Conflict::Needed { .. }
            | Conflict::NotLive(_)
            | Conflict::Pinned(_)
            | Conflict::ParentGone { .. }
            | Conflict::Spent { .. }
            | Conflict::NotRetired { .. }
            | Conflict::TooDeep { .. },
        ) => {}
        // Two damaged reads in a row look like damage of what is stored.
        Error::Corrupt { .. } | Error::LogDamaged { .. } => {}
        Error::Gone { .. } | Error::SaveLost { .. } if model.lock().unwrap().harmed => {}
        other => panic!("unexpected: {other:?}"),
    }
}

/// A parent for the next checkpoint, with its content.
async fn parent(
    store: &Store,
    model: &Shared,
    random: &mut Random,
) -> Result<Option<(Reference, Vec<u8>)>, Error> {
    let state = store.state().await?;
    let all = state.list();
    let parent = match random.below(4) {
        0 => None,
        1 => all.last().copied(),
        // The newest checkpoint, or one that it needs, so that there are trees of deltas.
        2 => all.last().and_then(|c| {
            let chain = state.chain(c.id()).ok()?;
            chain.get(random.below(chain.len() as u64) as usize).copied()
        }),
        _ => all.get(random.below(all.len() as u64) as usize).copied(),
    };
    Ok(parent.map(|parent| (parent.reference(), known_content(model, parent.id()))))
}

async fn publish(store: &Store, model: &Shared, random: &mut Random) -> Result<(), Error> {
    let base = parent(store, model, random).await?;
    let content = content(random);
    let parent = base.as_ref().map(|(reference, base)| (*reference, &base[..]));
    let staged = toy::stage(store, random.below(1000), parent, &content).await?;
    let id = staged.id();
    model.lock().unwrap().contents.insert(id, content);
    let saved = staged.publish().await;
    let mut model = model.lock().unwrap();
    // Whatever else is wrong, the log does not list it, and never will.
    model
        .never
        .extend(saved.as_ref().err().filter(|e| !matches!(e, Error::CommitUnknown(_))).map(|_| id));
    model.listed.insert(saved?.id());
    model.acknowledged += 1;
    Ok(())
}

fn known_content(model: &Shared, id: CheckpointId) -> Vec<u8> {
    model.lock().unwrap().contents.get(&id).cloned().expect("a listed checkpoint nobody wrote")
}

/// Two ranks store a checkpoint together. One may fail, and then go on for a while.
async fn publish_ranks(
    world: &World,
    other: StoreOptions,
    store: &Store,
    random: &mut Random,
) -> Result<(), Error> {
    let model = &world.model;
    let base = parent(store, model, random).await?;
    let content = content(random);
    let id = store.begin().await?.id();
    let stored = match &base {
        Some((_, base)) => content.iter().zip(base).map(|(a, b)| a ^ b).collect(),
        None => content.clone(),
    };
    let (place, late, tail) = (world.place.clone(), random.below(100), stored[16..].to_vec());
    let second = tokio::spawn(async move {
        let store = Store::open(&place, other).await?;
        tokio::time::sleep(Duration::from_millis(late)).await;
        part(&store, id, 1, tail).await
    });
    let first = part(store, id, 0, stored[..16].to_vec()).await;
    let fails = random.one_in(4);
    let second =
        if fails { Err(Error::NoCheckpoint { what: "any".into() }) } else { second.await.unwrap() };
    let both = first.and_then(|first| Ok(vec![first, second?]));
    let staged = async {
        let attempt = store.gather(id, both?).await?;
        let about = About { step: 1, parent: base.map(|(parent, _)| parent), ..About::default() };
        attempt.stage(bytes::Bytes::from_static(b"toy"), about).await
    };
    let staged = match staged.await {
        Ok(staged) => staged,
        Err(error) => {
            store.abort(id).await?;
            model.lock().unwrap().never.insert(id);
            return Err(error);
        }
    };
    model.lock().unwrap().contents.insert(id, content);
    staged.publish().await?;
    let mut model = model.lock().unwrap();
    model.listed.insert(id);
    model.acknowledged += 1;
    Ok(())
}

async fn part(
    store: &Store,
    id: CheckpointId,
    rank: u32,
    bytes: Vec<u8>,
) -> Result<Vec<ObjectInfo>, Error> {
    let mut attempt = store.join(id, rank).await?;
    attempt.put("toy", bytes.into()).await?;
    attempt.finish_part().await
}

/// Pins or unpins a listed checkpoint.
async fn pin(store: &Store, model: &Shared, random: &mut Random) -> Result<(), Error> {
    let state = store.state().await?;
    let all = state.list();
    let Some(one) = all.get(random.below(all.len() as u64) as usize) else { return Ok(()) };
    if random.one_in(3) {
        store.pin(one.id()).await?;
        model.lock().unwrap().pinned.insert(one.id());
        return Ok(());
    }
    model.lock().unwrap().maybe_unpinned.insert(one.id());
    store.unpin(one.id()).await
}

/// Gives up an attempt, perhaps while its writer is about to list it.
async fn give_up(store: &Store, model: &Shared, random: &mut Random) -> Result<(), Error> {
    let one = {
        let model = model.lock().unwrap();
        let open = model.contents.keys().rev().filter(|id| !model.listed.contains(*id));
        let open: Vec<_> = open.copied().collect();
        open.get(random.below(open.len() as u64) as usize).copied()
    };
    let Some(one) = one else { return Ok(()) };
    store.abort(one).await?;
    model.lock().unwrap().never.insert(one);
    Ok(())
}

async fn sweep(store: &Store, model: &Shared) -> Result<(), Error> {
    let options = SweepOptions { grace: GRACE, ..SweepOptions::default() };
    let report = store.sweep(&options).await?;
    let mut model = model.lock().unwrap();
    model.swept += report.deleted.len() + report.aborted.len();
    Ok(())
}

fn published(entry: &Entry) -> Option<CheckpointId> {
    match &entry.op {
        Op::Publish(about) => Some(about.id),
        _ => None,
    }
}

/// Finds out what became of a commit.
async fn resolve(store: &Store, model: &Shared) -> Result<(), Error> {
    let Some(unknown) = model.lock().unwrap().unknown.pop() else { return Ok(()) };
    let resolved = store.resolve(&unknown).await;
    let mut model = model.lock().unwrap();
    match (resolved, unknown.checkpoint) {
        (Ok(Resolution::Committed(entry)), id) => {
            assert_eq!(published(&entry), id, "{entry:?}");
            model.listed.extend(id);
        }
        (Ok(Resolution::Lost), id) => model.never.extend(id),
        (Err(error), _) => {
            model.unknown.push(unknown);
            return Err(error);
        }
    }
    Ok(())
}

/// Rebases, telling the model before anything can be listed.
async fn rebase(store: &Store, model: &Shared, random: &mut Random) -> Result<(), Error> {
    let state = store.state().await?;
    let deltas: Vec<_> = state.list().into_iter().filter(|c| c.base.is_some()).collect();
    let Some(old) = deltas.get(random.below(deltas.len() as u64) as usize) else { return Ok(()) };
    let mut rebaser =
        Telling { model: Arc::clone(model), old: old.id(), toy: toy::ToyRebaser::default() };
    let new = store.rebase(old.id(), &mut rebaser).await?;
    let mut model = model.lock().unwrap();
    model.listed.insert(new.id());
    model.gone.insert(old.id());
    model.acknowledged += 1;
    Ok(())
}

struct Telling {
    model: Shared,
    old: CheckpointId,
    toy: toy::ToyRebaser,
}

#[async_trait::async_trait]
impl s4_store::Rebaser for Telling {
    async fn write(
        &mut self,
        store: &Store,
        chain: &[Checkpoint],
        attempt: &mut s4_store::Attempt,
    ) -> Result<bytes::Bytes, s4_store::CallbackError> {
        let content = known_content(&self.model, self.old);
        {
            let mut model = self.model.lock().unwrap();
            model.contents.insert(attempt.id(), content);
            model.maybe_gone.insert(self.old);
            model.heirs.entry(self.old).or_default().push(attempt.id());
        }
        self.toy.write(store, chain, attempt).await
    }

    async fn verify(
        &mut self,
        store: &Store,
        chain: &[Checkpoint],
        staged: &s4_store::Staged,
    ) -> Result<(), s4_store::CallbackError> {
        self.toy.verify(store, chain, staged).await
    }
}

async fn retire(store: &Store, model: &Shared, random: &mut Random) -> Result<(), Error> {
    let state = store.state().await?;
    if random.one_in(2) {
        let policy = Retention { keep_last: Some(3), ..Retention::default() };
        // It plans again for every try, so it may retire other checkpoints than are listed now, even some whose
        // writers do not know yet that they are listed. It returns which; if it fails, the log tells.
        model.lock().unwrap().retaining += 1;
        let taken = store.apply_retention(&policy).await?;
        let mut model = model.lock().unwrap();
        model.retaining -= 1;
        model.maybe_gone.extend(taken.iter().copied());
        model.gone.extend(taken);
        return Ok(());
    }
    let all = state.list();
    let Some(one) = all.get(random.below(all.len() as u64) as usize) else { return Ok(()) };
    model.lock().unwrap().maybe_gone.insert(one.id());
    store.retire(&[one.id()], "simulation").await?;
    model.lock().unwrap().gone.insert(one.id());
    Ok(())
}

/// Lists a retired checkpoint again, perhaps while a sweep is about to delete it.
async fn unretire(store: &Store, model: &Shared, random: &mut Random) -> Result<(), Error> {
    let one = {
        let mut model = model.lock().unwrap();
        let gone: Vec<_> = model.gone.iter().copied().collect();
        let Some(one) = gone.get(random.below(gone.len() as u64) as usize) else { return Ok(()) };
        // The checkpoints that it needs come back with it.
        model.maybe_back.extend(gone.iter());
        let one = *one;
        model.unretiring += 1;
        one
    };
    let back = store.unretire(&[one]).await;
    let mut model = model.lock().unwrap();
    let model = &mut *model;
    model.unretiring -= 1;
    match &back {
        Ok(listed) => model.maybe_back.extend(listed.iter().map(Checkpoint::id)),
        // Any checkpoint that it needs may be back.
        Err(_) => model.maybe_back.extend(model.contents.keys()),
    }
    back.map(drop)
}

/// Reads a listed checkpoint. It must be whole if it was listed when the reader began and reading
/// takes less than the grace.
async fn read(store: &Store, model: &Shared, random: &mut Random) -> Result<(), Error> {
    let state = store.state().await?;
    let all = state.list();
    let Some(one) = all.get(random.below(all.len() as u64) as usize) else { return Ok(()) };
    let chain = toy::chain(&state, one)?;
    match toy::restore(store, &chain).await {
        Ok(content) => {
            assert_eq!(content, known_content(model, one.id()), "restored bytes differ");
            model.lock().unwrap().restored += 1;
            Ok(())
        }
        Err(e @ Error::Missing { .. }) => {
            let model = model.lock().unwrap();
            let retired = chain.iter().any(|c| model.maybe_gone.contains(&c.id()));
            assert!(model.broken && retired, "a reader lost its checkpoint: {e}");
            Err(e)
        }
        Err(e) => Err(e),
    }
}

/// Stops a process in the middle of an operation.
async fn stopped<T>(operation: impl Future<Output = T>, after: Duration, length: Duration) -> T {
    let mut operation = std::pin::pin!(operation);
    match tokio::time::timeout(after, &mut operation).await {
        Ok(done) => done,
        Err(_) => {
            tokio::time::sleep(length).await;
            operation.await
        }
    }
}

/// One operation of a process, during which it may die or be stopped. Returns whether it lives.
async fn act(world: &World, me: (u64, u64), store: &Store, random: &mut Random) -> bool {
    let model = &world.model;
    let ms = |random: &mut Random, most| Duration::from_millis(random.below(most));
    let what = world.deeds.choose(random);
    let after = ms(random, 400);
    let (dies, stops) = (random.one_in(10), random.one_in(10));
    let length = ms(random, 300_000_000);
    let operation = async {
        match what {
            Deed::Save => publish(store, model, random).await,
            Deed::PublishRanks => {
                publish_ranks(world, world.options(me.0, me.1 + 32), store, random).await
            }
            Deed::Retire => retire(store, model, random).await,
            Deed::Unretire => unretire(store, model, random).await,
            Deed::Rebase => rebase(store, model, random).await,
            Deed::Pin => pin(store, model, random).await,
            Deed::GiveUp => give_up(store, model, random).await,
            Deed::Sweep => sweep(store, model).await,
            Deed::Resolve => resolve(store, model).await,
            Deed::Read => read(store, model, random).await,
        }
    };
    let done = if dies {
        // It dies at an arbitrary `await`: the future is dropped there.
        match tokio::time::timeout(after, operation).await {
            Ok(done) => done,
            Err(_) => return false,
        }
    } else if stops && what != Deed::Read {
        stopped(operation, after, length).await
    } else {
        operation.await
    };
    if let Err(error) = done {
        expected(model, error);
    }
    true
}

/// One process after another: each lives until it is done or dies.
async fn writer(world: Arc<World>, who: u64) {
    let mut random = Random::new(world.seed << 8 | who);
    let model = &world.model;
    for life in 0..3 {
        if random.one_in(2) {
            tokio::time::sleep(Duration::from_millis(random.below(200_000_000))).await;
        }
        let opening = Store::open(&world.place, world.options(who, life));
        let store = match opening.await {
            Ok(store) => store,
            Err(error) => {
                expected(model, error);
                continue;
            }
        };
        for _ in 0..6 {
            if !act(&world, (who, life), &store, &mut random).await {
                break;
            }
            if random.one_in(6) {
                // It does nothing for days, whatever the others do.
                tokio::time::sleep(GRACE * 2).await;
            }
        }
    }
}

async fn sweeper(world: Arc<World>) {
    let mut random = Random::new(world.seed << 8 | 99);
    for life in 0..12 {
        tokio::time::sleep(Duration::from_millis(random.below(2000))).await;
        if let Ok(store) = Store::open(&world.place, world.options(50, life)).await
            && let Err(error) = sweep(&store, &world.model).await
        {
            expected(&world.model, error);
        }
        if random.one_in(2) {
            tokio::time::sleep(GRACE + Duration::from_secs(60)).await;
        }
    }
}

/// The checkpoints that retentions retired, if one of the retentions could not report it.
async fn taken_untold(world: &World, store: &Store) -> BTreeSet<CheckpointId> {
    if world.model.lock().unwrap().retaining == 0 {
        return BTreeSet::new();
    }
    let of = |entry: Entry| match entry.op {
        Op::Retire { ids, reason } if reason == "retention" => ids,
        _ => vec![],
    };
    store.log(1).await.unwrap().into_iter().flat_map(of).collect()
}

/// The checkpoints that were listed again, if a process that did so died before it could report it:
/// what a checkpoint needs comes back with it, even if the process that retired it does not know
/// that yet.
async fn back_untold(world: &World, store: &Store) -> BTreeSet<CheckpointId> {
    if world.model.lock().unwrap().unretiring == 0 {
        return BTreeSet::new();
    }
    let of = |entry: Entry| match entry.op {
        Op::Unretire { about, .. } => Some(about.id),
        _ => None,
    };
    store.log(1).await.unwrap().into_iter().filter_map(of).collect()
}

/// At the end, with the faults gone: the log agrees with every acknowledgement. `settled` says that no
/// request is on its way any more.
async fn judge(world: &World, settled: bool) {
    let store = Store::open(&world.place, world.options(60, settled.into())).await.unwrap();
    let unknown = std::mem::take(&mut world.model.lock().unwrap().unknown);
    for unknown in &unknown {
        let resolved = store.resolve(unknown).await.unwrap();
        let again = store.resolve(unknown).await.unwrap();
        assert_eq!(resolved, again);
        let mut model = world.model.lock().unwrap();
        match resolved {
            Resolution::Committed(entry) => {
                assert_eq!(published(&entry), unknown.checkpoint, "{entry:?}");
                model.listed.extend(unknown.checkpoint);
            }
            Resolution::Lost => model.never.extend(unknown.checkpoint),
        }
    }
    let state = store.state().await.unwrap();
    let taken = taken_untold(world, &store).await;
    let back = back_untold(world, &store).await;
    world.model.lock().unwrap().maybe_back.extend(back);
    let log = store.log(1).await.unwrap();
    let history = |id: CheckpointId| -> Vec<_> {
        log.iter().filter(|entry| format!("{entry:?}").contains(&id.to_string())).collect()
    };
    let wanted = {
        let model = world.model.lock().unwrap();
        for id in model.gone.difference(&model.maybe_back) {
            assert!(
                state.get(*id).is_none(),
                "{id} was retired and is listed: {:#?}",
                history(*id)
            );
        }
        for id in &model.never {
            assert!(
                state.get(*id).is_none(),
                "{id} was given up and is listed: {:#?}",
                history(*id)
            );
        }
        for id in &model.pinned {
            let family = model.family(*id);
            let kept = family.iter().any(|id| state.get(*id).is_some_and(|c| c.pinned));
            let free = !family.is_disjoint(&model.maybe_unpinned);
            assert!(kept || free, "{id} was pinned and is not");
        }
        model.listed.difference(&model.maybe_gone).copied().collect::<Vec<_>>()
    };
    for id in wanted.into_iter().filter(|id| !taken.contains(id)) {
        assert!(state.get(id).is_some(), "{id} was acknowledged and is lost: {:#?}", history(id));
    }
    for checkpoint in state.list() {
        let chain = toy::chain(&state, checkpoint).unwrap();
        let restored = toy::restore(&store, &chain).await.unwrap();
        assert_eq!(restored, known_content(&world.model, checkpoint.id()));
    }
    let all = CheckOptions { read_data: true, ..CheckOptions::default() };
    let report = store.check(&all, None).await.unwrap();
    assert!(report.is_clean() && report.void.is_empty(), "{report:?}");
    let now = SweepOptions { grace: Duration::ZERO, exclusive: true, dry_run: false };
    for _ in 0..2 {
        store.sweep(&now).await.unwrap();
    }
    let report = store.check(&all, None).await.unwrap();
    assert!(report.is_clean(), "{report:?}");
    assert!(!settled || report.unlisted.is_empty(), "{report:?}");
}

/// How often the disk of a simulation is full.
#[derive(Clone, Copy, PartialEq)]
enum Disk {
    Roomy,
    OftenFull,
}

/// The requests during which a disk is full: it becomes full at any request, and has room again after a while,
/// or once something was deleted from it.
fn full_at_times(seed: u64) -> impl FnMut(&OpInfo) -> bool {
    let mut random = Random::new(seed ^ 0xf011);
    let (mut left, mut until_deleted) = (0, false);
    move |op| {
        if left == 0 && random.one_in(150) {
            left = 1 + random.below(200);
            until_deleted = random.one_in(2);
        }
        left = u64::saturating_sub(left, 1);
        if op.kind == OpKind::Delete && until_deleted {
            left = 0;
        }
        left > 0
    }
}

async fn simulate(seed: u64, disk: Disk) -> (usize, usize, usize) {
    let (faults, place) = faulty();
    let model = Shared::default();
    let world = Arc::new(World { place, model: Arc::clone(&model), seed, deeds: &USUAL });
    Store::create(&world.place, world.options(61, 0)).await.unwrap();
    let mut random = Random::new(seed);
    let rate = 10 + random.below(60);
    let mut faulty_ones = Random::new(seed ^ 0xfa17);
    let mut full = full_at_times(seed);
    let mut full_now = 0;
    faults.set_plan(move |op| {
        let writes = matches!(op.kind, OpKind::Put | OpKind::Create);
        let is_full = disk == Disk::OftenFull && full(op);
        if writes && (is_full || full_now > 0) {
            full_now = u64::saturating_sub(full_now, 1);
            return Some(Fault::Full);
        }
        let fault = Fault::ALL[faulty_ones.below(8) as usize];
        // Reads that are damaged again and again would only test the test.
        let rate = if op.kind == OpKind::Get { rate * 3 } else { rate };
        if disk == Disk::OftenFull && op.kind == OpKind::Create && faulty_ones.one_in(8) {
            // The next try finds the disk full, while this one may still have its effect.
            full_now = 1 + faulty_ones.below(4);
            return Some(if faulty_ones.one_in(2) { Fault::Late } else { fault });
        }
        faulty_ones.one_in(rate).then_some(fault)
    });
    faults.set_delays(seed ^ 0xde1a);
    let latest = GRACE * 3;
    faults.set_lateness(seed ^ 0x1a7e, latest);
    faults.set_skew(seed ^ 0x54e3, Duration::from_secs(600));
    faults.outlive_callers();
    let writers = 2 + random.below(7);
    let mut tasks: Vec<_> =
        (0..writers).map(|who| tokio::spawn(writer(Arc::clone(&world), who))).collect();
    tasks.push(tokio::spawn(sweeper(Arc::clone(&world))));
    for task in tasks {
        task.await.unwrap();
    }
    faults.heal();
    judge(&world, false).await;
    tokio::time::sleep(latest).await;
    judge(&world, true).await;
    let model = model.lock().unwrap();
    (model.acknowledged, model.restored, model.swept)
}

#[test]
fn many_writers_and_a_sweeper_against_a_model() {
    many_writers(200, Disk::Roomy);
}

/// Writes fail for lack of space at any point, and go on once there is room again.
#[test]
fn many_writers_on_a_disk_that_is_often_full() {
    many_writers(40, Disk::OftenFull);
}

fn many_writers(seeds: u64, disk: Disk) {
    let runs = simulations(seeds, |seed| simulate(seed, disk));
    let (mut acknowledged, mut restored, mut swept) = (0, 0, 0);
    for (saved, read, gone) in &runs {
        acknowledged += saved;
        restored += read;
        swept += gone;
    }
    let count = runs.len();
    println!("{count} seeds: {acknowledged} acknowledged saves, {restored} reads, {swept} swept");
    assert!(acknowledged > count && restored > 0, "the simulation does nothing");
    assert!(swept > count, "sweeps do nothing while others are active");
}
