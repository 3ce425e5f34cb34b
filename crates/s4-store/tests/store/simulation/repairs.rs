//! Histories whose log is damaged and repaired, several times: some processes keep the store open all the
//! while, some go on writing above the damage, and repairs fail, are killed and are run again.

use object_store::ObjectStoreExt;
use object_store::path::Path;
use s4_store::testing::FaultStore;
use s4_store::{Digest, Publish, RepairReport};

use super::deeds::CHANGING;
use super::*;
use crate::damage::{Way, harm, key};

const VIEW: &str = "runs/one/logck";
/// How long a request may be on its way. Nobody may use a store during a repair, so the last one has
/// arrived before the repair begins.
const LATEST: Duration = Duration::from_secs(600);

/// A process that may keep the store open from round to round.
struct Process {
    who: u64,
    life: u64,
    random: Random,
    store: Option<Store>,
}

impl Process {
    async fn work(mut self, world: Arc<World>, times: u64) -> Self {
        for _ in 0..times {
            let pause = self.random.below(2_000);
            tokio::time::sleep(Duration::from_millis(pause)).await;
            let store = match self.store.take() {
                Some(store) => store,
                None => {
                    self.life += 1;
                    match Store::open(&world.place, world.options(self.who, self.life)).await {
                        Ok(store) => store,
                        Err(error) => {
                            expected(&world.model, error);
                            continue;
                        }
                    }
                }
            };
            if act(&world, (self.who, self.life), &store, &mut self.random).await {
                self.store = Some(store);
            }
            if self.random.one_in(12) {
                tokio::time::sleep(GRACE * 2).await;
            }
        }
        self
    }
}

async fn work(world: &Arc<World>, processes: Vec<Process>, times: u64) -> Vec<Process> {
    let begin = |process: Process| tokio::spawn(process.work(Arc::clone(world), times));
    let tasks: Vec<_> = processes.into_iter().map(begin).collect();
    let mut done = Vec::new();
    for task in tasks {
        done.push(task.await.unwrap());
    }
    done
}

/// The entries up to which the stored view covers the log, if it is a view of this log.
async fn covered(faults: &FaultStore) -> u64 {
    let get = async |key: &Path| match faults.get(key).await {
        Ok(got) => got.bytes().await.ok(),
        Err(_) => None,
    };
    let Some(view) = get(&Path::from(VIEW)).await else { return 0 };
    let Some(line) = view.split(|b| *b == b'\n').next() else { return 0 };
    let Ok(view) = serde_json::from_slice::<serde_json::Value>(line) else { return 0 };
    let head = view["head"].as_u64().unwrap();
    let Some(entry) = get(&key(head)).await else { return 0 };
    let hash = serde_json::to_value(Digest::of(&entry)).unwrap();
    if hash == view["head_hash"] { head } else { 0 }
}

/// The log as it was written, and which of its entries are damaged now.
struct Harmed {
    truth: BTreeMap<u64, Entry>,
    bad: BTreeSet<u64>,
    /// The last entry of which a view keeps the content.
    covered: u64,
}

impl Harmed {
    /// Damages up to three entries, and sometimes the view.
    async fn harm(world: &World, faults: &FaultStore, random: &mut Random, life: u64) -> Self {
        let store = Store::open(&world.place, world.options(53, life)).await.unwrap();
        let log = store.log(1).await.unwrap();
        let last = log.len() as u64;
        match random.below(4) {
            0 => faults.delete(&Path::from(VIEW)).await.map_or((), drop),
            1 => drop(store.sweep(&SweepOptions { grace: GRACE, ..SweepOptions::default() }).await),
            _ => {}
        }
        // The sweep may have added entries.
        let log = store.log(1).await.unwrap();
        let last = last.max(log.len() as u64);
        let covered = covered(faults).await;
        let mut bad = BTreeSet::new();
        // With bad luck, nothing was saved yet.
        let most = if *world.deeds == USUAL { 3 } else { 6 };
        let wanted = if last == 0 { 0 } else { 1 + random.below(most) };
        for _ in 0..wanted {
            // Mostly among the newest ones, which no view covers.
            let n = match random.one_in(3) {
                true => 1 + random.below(last),
                false => last - random.below(last.min(12)),
            };
            let way = [Way::Flipped, Way::Cut, Way::Empty, Way::Gone][random.below(4) as usize];
            // Nothing shows that a log had further entries at its end. A process that has not read two adjacent
            // entries cannot tell that there are more.
            let near = bad.contains(&(n + 1)) || bad.contains(&(n - 1));
            if bad.contains(&n) || (way == Way::Gone && (n == last || near)) {
                continue;
            }
            bad.insert(n);
            harm(faults, n, way, faults).await;
        }
        let mut model = world.model.lock().unwrap();
        (model.harmed, model.broken) = (true, true);
        drop(model);
        Self { truth: log.into_iter().map(|e| (e.n, e)).collect(), bad, covered }
    }

    /// Adds the entries that were written after the damage.
    async fn grow(&mut self, world: &World, faults: &FaultStore, life: u64) {
        // A process that had begun before may have replaced the view by an older one.
        self.covered = self.covered.min(covered(faults).await);
        let store = Store::open_read_only(&world.place, world.options(54, life)).await.unwrap();
        for entry in store.log(1).await.unwrap() {
            self.truth.entry(entry.n).or_insert(entry);
        }
    }

    /// The damaged entries that no view covers.
    fn lost(&self) -> impl Iterator<Item = &Entry> {
        self.bad.range(self.covered + 1..).filter_map(|n| self.truth.get(n))
    }

    /// Tells the model what may be different once the log is repaired: what the lost entries said, and what
    /// hangs on that.
    fn tell(&self, model: &mut Model) {
        let (mut gone, mut back) = (BTreeSet::new(), BTreeSet::new());
        for entry in self.lost() {
            match &entry.op {
                Op::Publish(about) => {
                    gone.extend(about.replaces.map(|old| old.id).into_iter().chain([about.id]));
                    back.extend(gone.iter().copied());
                }
                Op::Unretire { about, .. } => drop(gone.insert(about.id)),
                Op::Retire { ids, .. } => back.extend(ids.iter().copied()),
                Op::Abort { ids } => {
                    model.never.retain(|id| !ids.contains(id));
                    back.extend(ids.iter().copied());
                }
                // What replaces a pinned checkpoint is pinned, without an entry of its own.
                Op::Pin { id } => model.maybe_unpinned.extend(model.family(*id)),
                // Its checkpoint is still pinned, so a later `retire` has no effect.
                Op::Unpin { id } => drop(back.insert(*id)),
                _ => {}
            }
        }
        // A replacement proves that the checkpoint which it replaced was listed.
        let whole = || self.truth.values().filter(|e| !self.bad.contains(&e.n));
        let replaced = |e: &Entry| match &e.op {
            Op::Publish(about) => about.replaces.map(|old| old.id),
            _ => None,
        };
        let proven: BTreeSet<_> = whole().filter_map(replaced).collect();
        let hangs = |gone: &BTreeSet<_>, id| gone.contains(&id) && !proven.contains(&id);
        for entry in self.truth.values() {
            let Some(about) = listing(&entry.op) else { continue };
            // What a checkpoint that is listed again once replaced does not matter.
            let replaces = about.replaces.filter(|_| matches!(entry.op, Op::Publish(_)));
            if about.parent.iter().chain(&replaces).any(|named| hangs(&gone, named.id)) {
                gone.insert(about.id);
            }
        }
        // What a checkpoint needs stays listed with it. A replacement is needed by the deltas of what it replaced, and
        // is pinned as that one was.
        back = back.into_iter().flat_map(|id| model.family(id)).collect();
        for entry in self.truth.values().rev() {
            let about = listing(&entry.op).filter(|about| back.contains(&about.id));
            let parent = about.and_then(|about| about.parent);
            back.extend(parent.into_iter().flat_map(|parent| model.family(parent.id)));
        }
        // What nobody could report is known from entries that a repair may change.
        for entry in self.truth.values() {
            match &entry.op {
                Op::Retire { ids, reason } if reason == "retention" && model.retaining > 0 => {
                    gone.extend(ids);
                }
                Op::Unretire { about, .. } if model.unretiring > 0 => drop(back.insert(about.id)),
                _ => {}
            }
        }
        model.maybe_unpinned.extend(gone.iter().copied());
        model.maybe_gone.extend(gone);
        model.maybe_back.extend(back);
    }
}

/// What an operation says about the checkpoint that it lists.
fn listing(op: &Op) -> Option<&Publish> {
    match op {
        Op::Publish(about) => Some(about),
        Op::Unretire { about, .. } => Some(about),
        _ => None,
    }
}

/// What a repair is expected to leave: every checkpoint in its order, and whether it is pinned.
fn outcome(all: &[Checkpoint]) -> Vec<(CheckpointId, bool)> {
    all.iter().map(|c| (c.id(), c.pinned)).collect()
}

/// Everything that a process finds wrong while nobody repairs, from time to time.
fn trouble(faults: &FaultStore, seed: u64, rate: u64) {
    let mut random = Random::new(seed ^ 0xfa17);
    faults.set_plan(move |op| {
        let fault = Fault::ALL[random.below(8) as usize];
        let rate = if op.kind == OpKind::Get { rate * 3 } else { rate };
        random.one_in(rate).then_some(fault)
    });
    faults.set_delays(seed ^ 0xde1a);
}

/// As [`trouble`], but no object is read wrongly twice: that would count as damage of what is stored.
fn trouble_once(faults: &FaultStore, seed: u64, rate: u64) {
    let mut random = Random::new(seed ^ 0x4e9a);
    let mut read = BTreeSet::new();
    faults.set_plan(move |op| {
        let fault = Fault::ALL[random.below(8) as usize];
        let fires = random.one_in(rate);
        (fires && (op.kind != OpKind::Get || read.insert(op.key.clone()))).then_some(fault)
    });
    faults.set_delays(seed ^ 0xde1b);
}

/// From now on nothing fails, and what was on its way has arrived.
async fn calm(faults: &FaultStore) {
    faults.heal();
    tokio::time::sleep(LATEST).await;
}

/// Repairs, perhaps several times in vain. Whatever happens to a repair, the next one does what the first
/// one would have done. Returns how many were killed or failed.
async fn mend(world: &World, faults: &FaultStore, random: &mut Random, round: u64) -> usize {
    let repair = async |n: u64, apply: bool| {
        Store::repair(&world.place, world.options(52, round * 16 + n), apply).await
    };
    let planned: RepairReport = repair(0, false).await.unwrap();
    let mut failed = 0;
    for n in 1..1 + random.below(5) {
        trouble_once(faults, world.seed ^ (round << 8 | n), 5 + random.below(60));
        let after = Duration::from_millis(random.below(2_000));
        match tokio::time::timeout(after, repair(n, true)).await {
            Ok(Ok(_)) => {}
            Ok(Err(Error::Storage { .. } | Error::Deadline { .. })) => failed += 1,
            // It reads the log at its end, which a late write may have changed.
            Ok(Err(Error::LogDamaged { .. })) => failed += 1,
            Ok(Err(other)) => panic!("unexpected: {other:?}"),
            Err(_) => failed += 1,
        }
        if random.one_in(2) {
            tokio::time::sleep(LATEST).await;
        }
    }
    calm(faults).await;
    repair(14, true).await.unwrap();
    let again = repair(15, true).await.unwrap();
    assert!(again.damage.is_empty() && again.aside.is_none(), "{again:#?}");
    let store = Store::open(&world.place, world.options(55, round)).await.unwrap();
    let listed = store.list().await.unwrap();
    assert_eq!(outcome(&listed), outcome(&planned.listed), "{planned:#?}");
    failed
}

impl Harmed {
    /// The report of a repair accounts for every checkpoint that will not be listed any more.
    fn is_told(&self, listed: &BTreeSet<CheckpointId>, planned: &RepairReport) {
        let mut gone: BTreeSet<_> = planned.losses.iter().filter_map(|l| l.checkpoint).collect();
        for entry in self.truth.values() {
            match &entry.op {
                Op::Retire { ids, .. } => gone.extend(ids),
                Op::Publish(about) => gone.extend(about.replaces.map(|old| old.id)),
                _ => {}
            }
        }
        // What an unreadable entry said, nobody can say.
        gone.extend(self.lost().filter_map(|e| listing(&e.op)).map(|about| about.id));
        let left: BTreeSet<_> = planned.listed.iter().map(Checkpoint::id).collect();
        let silent = listed.difference(&left).find(|id| !gone.contains(id));
        assert!(silent.is_none(), "{silent:?} is lost without a word: {planned:#?}");
    }
}

async fn simulate(seed: u64) -> (usize, usize, usize) {
    let (faults, place) = faulty();
    let model = Shared::default();
    let deeds = if seed.is_multiple_of(2) { &USUAL } else { &CHANGING };
    let world = Arc::new(World { place, model: Arc::clone(&model), seed, deeds });
    Store::create(&world.place, world.options(61, 0)).await.unwrap();
    let mut random = Random::new(seed ^ 0x4e9a14);
    faults.set_lateness(seed ^ 0x1a7e, LATEST);
    faults.set_skew(seed ^ 0x54e3, Duration::from_secs(600));
    faults.outlive_callers();
    let rate = 10 + random.below(60);
    let begin = |who| Process { who, life: 0, random: Random::new(seed << 8 | who), store: None };
    let mut processes: Vec<_> = (0..2 + random.below(4)).map(begin).collect();
    let (mut damaged, mut failed) = (0, 0);
    for round in 0..3 {
        trouble(&faults, seed << 8 | round, rate);
        processes = work(&world, processes, 5).await;
        calm(&faults).await;
        let store = Store::open(&world.place, world.options(56, round)).await.unwrap();
        let listed = store.list().await.unwrap().iter().map(Checkpoint::id).collect();
        let mut harmed = Harmed::harm(&world, &faults, &mut random, round).await;
        if random.one_in(2) {
            // Processes that have the store open may not have noticed.
            trouble(&faults, seed << 8 | 64 | round, rate);
            processes = work(&world, processes, 2).await;
            calm(&faults).await;
            harmed.grow(&world, &faults, round).await;
        }
        damaged += harmed.bad.len();
        harmed.tell(&mut model.lock().unwrap());
        let options = world.options(57, round);
        let planned = Store::repair(&world.place, options, false).await.unwrap();
        harmed.is_told(&listed, &planned);
        failed += mend(&world, &faults, &mut random, round).await;
        model.lock().unwrap().broken = false;
    }
    trouble(&faults, seed << 8 | 128, rate);
    work(&world, processes, 4).await;
    faults.heal();
    judge(&world, false).await;
    tokio::time::sleep(LATEST).await;
    judge(&world, true).await;
    (model.lock().unwrap().acknowledged, damaged, failed)
}

#[test]
fn repairs_between_writers_against_a_model() {
    let runs = simulations(40, simulate);
    let (mut acknowledged, mut damaged, mut failed) = (0, 0, 0);
    for (saved, bad, killed) in &runs {
        acknowledged += saved;
        damaged += bad;
        failed += killed;
    }
    let count = runs.len();
    println!(
        "{count} seeds: {acknowledged} acknowledged saves, {damaged} damaged entries, {failed} repairs that \
         were killed or failed"
    );
    assert!(
        acknowledged > count && damaged > count && failed > count,
        "the simulation does nothing"
    );
}
