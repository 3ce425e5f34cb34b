//! Processes that write in turn to a store for one writer at a time, on a server that ignores
//! conditions, with faults, deaths, pauses, and requests that take effect late. A seed determines
//! everything: `S4_SIM_SEED=n` repeats one, `S4_SIM_SEEDS=n` runs that many.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use object_store::memory::InMemory;
use object_store::path::Path;
use s4_store::testing::{
    Fault, FaultStore, Liar, Lie, OpKind, Random, SeededIds, quick_options, toy,
};
use s4_store::{
    CheckOptions, CheckpointId, CommitUnknown, Error, Mode, Place, Resolution, Store, StoreOptions,
    Writers,
};

use crate::simulations;

/// How long a request may be on its way, and a process stopped: together less than between the time for
/// which a holder relies on its lease and the time after which it is dead.
const LATE: Duration = Duration::from_secs(10);
const STOP: Duration = Duration::from_secs(4);

#[derive(Default)]
struct Model {
    contents: BTreeMap<CheckpointId, Vec<u8>>,
    /// Acknowledged as listed.
    listed: BTreeSet<CheckpointId>,
    /// Found not to be in the log, which is final.
    never: BTreeSet<CheckpointId>,
    unknown: Vec<CommitUnknown>,
    /// How often the store was opened to many writers.
    switched: usize,
}

type Shared = Arc<Mutex<Model>>;

fn options(seed: u64, who: u64) -> StoreOptions {
    let ids = Arc::new(SeededIds::new(seed * 4096 + who));
    StoreOptions { ids, writers: Writers::Single, ..quick_options() }
}

async fn save(store: &Store, model: &Shared, random: &mut Random) -> Result<(), Error> {
    let content: Vec<u8> = (0..20).map(|_| random.bits() as u8).collect();
    // A handle that was opened before another process opened the store to many writers must not write to it.
    let is_outdated = store.repo().mode == Mode::Single && model.lock().unwrap().switched > 0;
    let newest = store.latest().await?.filter(|_| random.one_in(2));
    let base = newest.map(|c| (c.reference(), model.lock().unwrap().contents[&c.id()].clone()));
    let parent = base.as_ref().map(|(reference, base)| (*reference, &base[..]));
    let staged = toy::stage(store, random.below(1000), parent, &content).await?;
    let id = staged.id();
    model.lock().unwrap().contents.insert(id, content);
    staged.publish().await?;
    assert!(!is_outdated, "{id} was saved by a handle for one writer");
    model.lock().unwrap().listed.insert(id);
    Ok(())
}

async fn resolve(store: &Store, model: &Shared) -> Result<(), Error> {
    let Some(unknown) = model.lock().unwrap().unknown.pop() else { return Ok(()) };
    match store.resolve(&unknown).await {
        Ok(Resolution::Committed(_)) => model.lock().unwrap().listed.extend(unknown.checkpoint),
        // Another process may have sent it, so a late arrival undoes this answer.
        Ok(Resolution::Lost) => {}
        Err(error) => {
            model.lock().unwrap().unknown.push(unknown);
            return Err(error);
        }
    }
    Ok(())
}

/// Opens the store to many writers, if it is not yet. This handle can only read afterwards.
async fn switch(store: &Store, model: &Shared) -> Result<(), Error> {
    if store.repo().mode == Mode::Single {
        store.allow_many_writers().await?;
        model.lock().unwrap().switched += 1;
    }
    Ok(())
}

async fn process(place: Place, model: Shared, seed: u64, who: u64, switches: bool) {
    let mut random = Random::new(seed << 8 | who);
    for life in 0..3 {
        tokio::time::sleep(Duration::from_millis(random.below(100_000))).await;
        let open = async |n: u64| Store::open(&place, options(seed, who * 64 + life + n)).await;
        let Ok(mut store) = open(0).await else { continue };
        for n in 0..6 {
            let (what, dies, stops) = (random.below(8), random.one_in(8), random.one_in(8));
            let after = Duration::from_millis(random.below(300));
            let length = Duration::from_millis(random.below(STOP.as_millis() as u64));
            let acting = &mut random;
            let operation = async {
                match what {
                    0..5 => save(&store, &model, acting).await,
                    5 => resolve(&store, &model).await,
                    6 => store.release().await,
                    _ if switches => switch(&store, &model).await,
                    _ => store.list().await.map(drop),
                }
            };
            let done = {
                let mut operation = Box::pin(operation);
                match tokio::time::timeout(after, &mut operation).await {
                    Ok(done) => done,
                    Err(_) if dies => break,
                    Err(_) => {
                        if stops {
                            tokio::time::sleep(length).await;
                        }
                        operation.await
                    }
                }
            };
            let is_refused = matches!(done, Err(Error::Refused(_)));
            match done {
                Ok(()) => {}
                Err(Error::CommitUnknown(unknown)) => model.lock().unwrap().unknown.push(*unknown),
                Err(
                    Error::Locked { .. }
                    | Error::LeaseLost { .. }
                    | Error::Storage { .. }
                    | Error::Deadline { .. }
                    | Error::Refused(_)
                    | Error::Conflict(_)
                    | Error::Corrupt { .. }
                    | Error::Missing { .. },
                ) => {}
                Err(Error::ProbeDisturbed { .. }) if switches => {}
                Err(other) => panic!("unexpected: {other:?}"),
            }
            if switches && (is_refused || what == 7) {
                // The store may be open to many writers now: only a new handle can write.
                let Ok(again) = open(8 * (n + 1)).await else { break };
                store = again;
            }
            if random.one_in(3) {
                tokio::time::sleep(Duration::from_millis(random.below(100_000))).await;
            }
        }
        if random.one_in(2) {
            // What cannot be given back expires.
            drop(store.release().await);
        }
    }
}

/// What the server does with conditions, and whether processes open the store to many writers.
#[derive(Clone, Copy, PartialEq)]
enum Server {
    Ignores,
    /// It ignored them when the store was created.
    Improved,
    Honours,
}

async fn simulate(seed: u64, kind: Server) -> (usize, usize) {
    let clock = FaultStore::with_runtime_clock(Arc::new(InMemory::new()));
    clock.set_delays(seed);
    let server = Arc::new(Liar::new(Arc::new(clock), Lie::IgnoresCondition));
    server.set_honest(kind == Server::Honours);
    let switches = kind != Server::Ignores;
    let connection = |who: u64| {
        let faults = FaultStore::new(Arc::clone(&server) as _);
        faults.set_lateness(seed ^ who, LATE);
        faults.outlive_callers();
        let place = Place::objects(Arc::new(faults.clone()), Path::from("one"));
        (faults, place)
    };
    let (_, calm) = connection(99);
    let store = Store::create(&calm, options(seed, 4000)).await.unwrap();
    store.release().await.unwrap();
    server.set_honest(switches);
    let model = Shared::default();
    let mut random = Random::new(seed);
    let rate = 5 + random.below(30);
    let processes: Vec<_> = (0..1 + random.below(4))
        .map(|who| {
            let (faults, place) = connection(who);
            let mut random = Random::new(seed << 16 | who);
            let mut outage = 0;
            faults.set_plan(move |op| {
                // Sometimes many requests in a row fail, so that the outcome of a commit is unknown.
                if outage == 0 && random.one_in(40) {
                    outage = random.below(60);
                }
                outage = u64::saturating_sub(outage, 1);
                let fault = match random.below(5) {
                    0 => Fault::Before,
                    1 => Fault::After,
                    2 if op.kind == OpKind::Get => Fault::Short,
                    _ => Fault::Late,
                };
                (outage > 0 || random.one_in(rate)).then_some(fault)
            });
            tokio::spawn(process(place, Arc::clone(&model), seed, who, switches))
        })
        .collect();
    for process in processes {
        process.await.unwrap();
    }
    tokio::time::sleep(LATE).await;
    let store = Store::open(&calm, options(seed, 4001)).await.unwrap();
    let unknown = std::mem::take(&mut model.lock().unwrap().unknown);
    for unknown in &unknown {
        match store.resolve(unknown).await.unwrap() {
            Resolution::Committed(_) => model.lock().unwrap().listed.extend(unknown.checkpoint),
            Resolution::Lost => model.lock().unwrap().never.extend(unknown.checkpoint),
        }
    }
    let all = CheckOptions { read_data: true, ..CheckOptions::default() };
    let report = store.check(&all, None).await.unwrap();
    assert!(report.is_clean() && report.void.is_empty(), "{report:?}");
    let state = store.state().await.unwrap();
    let model = std::mem::take(&mut *model.lock().unwrap());
    for id in &model.listed {
        assert!(state.get(*id).is_some(), "{id} was acknowledged and is lost");
    }
    for id in &model.never {
        assert!(state.get(*id).is_none(), "{id} was lost and is listed");
    }
    let done = (model.listed.len(), model.switched);
    for checkpoint in state.list() {
        let chain = toy::chain(&state, checkpoint).unwrap();
        assert_eq!(toy::restore(&store, &chain).await.unwrap(), model.contents[&checkpoint.id()]);
    }
    done
}

fn total(runs: &[(usize, usize)]) -> (usize, usize) {
    runs.iter().fold((0, 0), |sum, run| (sum.0 + run.0, sum.1 + run.1))
}

#[test]
fn writers_in_turn_against_a_model() {
    let runs = simulations(100, |seed| simulate(seed, Server::Ignores));
    let (acknowledged, count) = (total(&runs).0, runs.len());
    println!("{count} seeds: {acknowledged} acknowledged saves");
    assert!(acknowledged > count, "the simulation does nothing");
}

/// Processes open the store to many writers while others save to it.
#[test]
fn a_store_is_opened_to_many_writers_while_it_is_written() {
    for kind in [Server::Honours, Server::Improved] {
        let runs = simulations(30, |seed| simulate(seed, kind));
        let ((acknowledged, switched), count) = (total(&runs), runs.len());
        println!(
            "{count} seeds: {acknowledged} acknowledged saves, {switched} times opened to many writers"
        );
        assert!(acknowledged > count && switched > count / 4, "the simulation does nothing");
    }
}
