//! Every request fails once, in every way: nothing that was acknowledged is lost, nothing that is
//! listed is broken, and everything left behind is swept.

use std::time::Duration;

use s4_store::testing::{Fault, FaultStore, quick_options, toy};
use s4_store::{CheckOptions, Checkpoint, Error, Place, Resolution, Store, StoreOptions, Writers};

use crate::{faulty, now};

const LEN: usize = 40;

fn content(n: u8) -> Vec<u8> {
    (0..LEN).map(|i| n.wrapping_mul(91) ^ i as u8).collect()
}

/// A store with a base, two deltas on it, another base that is retired, and an orphan.
struct Start {
    faults: FaultStore,
    place: Place,
    kept: Vec<Checkpoint>,
    /// The content of each kept checkpoint.
    contents: Vec<Vec<u8>>,
}

async fn start() -> Start {
    start_for(Writers::Many).await
}

async fn start_for(writers: Writers) -> Start {
    let (faults, place) = faulty();
    let options = StoreOptions { writers, ..quick_options() };
    let store = Store::create(&place, options).await.unwrap();
    let mut kept = vec![toy::save(&store, 0, None, &content(0)).await.unwrap()];
    for n in 1..3u8 {
        let (last, base) = (kept.last().unwrap().reference(), content(n - 1));
        kept.push(toy::save(&store, n.into(), Some((last, &base)), &content(n)).await.unwrap());
    }
    let gone = toy::save(&store, 90, None, &content(90)).await.unwrap();
    store.retire(&[gone.id()], "").await.unwrap();
    drop(toy::stage(&store, 91, None, &content(91)).await.unwrap());
    store.release().await.unwrap();
    let contents = (0..3).map(content).collect();
    Start { faults, place, kept, contents }
}

/// What an operation did, as far as its caller knows.
#[expect(clippy::large_enum_variant, reason = "there are few")]
enum Known {
    /// It was acknowledged: this checkpoint must be listed, if there is one.
    Done(Option<Checkpoint>),
    /// It failed: no half of what it was about may be there.
    Failed(Error),
}

/// Nothing listed is broken, and everything acknowledged is listed.
async fn verify(start: &Start, known: Known, what: &str, may_replace: Option<usize>) {
    start.faults.heal();
    // What is late has its effect meanwhile.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let store = Store::open(&start.place, quick_options()).await.unwrap();
    let listed = match &known {
        Known::Failed(Error::CommitUnknown(unknown)) => match store.resolve(unknown).await.unwrap()
        {
            Resolution::Committed(entry) => {
                assert_eq!(entry.write_id, unknown.write_id, "{what}");
                unknown.checkpoint
            }
            Resolution::Lost => None,
        },
        Known::Done(checkpoint) => checkpoint.as_ref().map(Checkpoint::id),
        Known::Failed(_) => None,
    };
    let state = store.state().await.unwrap();
    if let Some(id) = listed {
        assert!(state.get(id).is_some(), "{what}: acknowledged, but not listed");
    }
    for (i, (kept, content)) in start.kept.iter().zip(&start.contents).enumerate() {
        let stands_for = match state.get(kept.id()) {
            Some(checkpoint) => checkpoint,
            None if may_replace == Some(i) => state
                .list()
                .into_iter()
                .find(|c| c.about.replaces == Some(kept.reference()))
                .expect(what),
            None => panic!("{what}: step {i} is lost"),
        };
        let chain = toy::chain(&state, stands_for).unwrap();
        assert_eq!(toy::restore(&store, &chain).await.unwrap(), *content, "{what}");
    }
    let options = CheckOptions { read_data: true, ..CheckOptions::default() };
    let report = store.check(&options, None).await.unwrap();
    assert!(report.is_clean() && report.void.is_empty(), "{what}: {report:?}");
    // Two more sweeps leave only what is listed.
    store.sweep(&now()).await.unwrap();
    store.sweep(&now()).await.unwrap();
    let report = store.check(&options, None).await.unwrap();
    assert!(report.is_clean() && report.unlisted.is_empty(), "{what}: {report:?}");
}

async fn publish(start: &Start) -> Result<Option<Checkpoint>, Error> {
    let store = Store::open(&start.place, quick_options()).await?;
    let parent = (start.kept[2].reference(), &start.contents[2][..]);
    let saved = toy::save(&store, 3, Some(parent), &content(3)).await?;
    let chain = toy::chain(&*store.state().await?, &saved)?;
    assert_eq!(toy::restore(&store, &chain).await?, content(3));
    Ok(Some(saved))
}

async fn rebase(start: &Start) -> Result<Option<Checkpoint>, Error> {
    let store = Store::open(&start.place, quick_options()).await?;
    let mut rebaser = toy::ToyRebaser::default();
    Ok(Some(store.rebase(start.kept[1].id(), &mut rebaser).await?))
}

async fn sweep(start: &Start) -> Result<Option<Checkpoint>, Error> {
    let store = Store::open(&start.place, quick_options()).await?;
    store.sweep(&now()).await?;
    store.sweep(&now()).await?;
    Ok(None)
}

/// All faults, and an answer that never comes: nobody waits for it until the deadline.
fn faults() -> impl Iterator<Item = Fault> {
    Fault::ALL.into_iter().chain([Fault::Unanswered])
}

/// Fails each request of `operation` in each way, each time on a fresh store.
async fn every_request<F>(name: &str, writers: Writers, may_replace: Option<usize>, operation: F)
where
    F: AsyncFn(&Start) -> Result<Option<Checkpoint>, Error>,
{
    let calm = start_for(writers).await;
    calm.faults.heal();
    let done = operation(&calm).await.unwrap();
    let requests = calm.faults.ops();
    assert!(requests > 10, "{name}: {requests} requests");
    verify(&calm, Known::Done(done), name, may_replace).await;
    let mut fired = 0;
    for fault in faults() {
        for nth in 0..requests {
            let what = format!("{name}, request {nth}, {fault:?}");
            let start = start_for(writers).await;
            start.faults.fail_nth(nth, fault);
            let known = match operation(&start).await {
                Ok(done) => Known::Done(done),
                Err(error) => Known::Failed(error),
            };
            fired += start.faults.fired();
            verify(&start, known, &what, may_replace).await;
        }
    }
    assert!(fired > 3 * requests, "{name}: only {fired} faults had an effect");
    println!("{name}: {requests} requests, {fired} faults");
}

#[tokio::test(start_paused = true)]
async fn every_request_of_a_publish() {
    every_request("publish", Writers::Many, None, publish).await;
}

#[tokio::test(start_paused = true)]
async fn every_request_of_a_publish_under_a_lease() {
    every_request("publish under a lease", Writers::Single, None, publish).await;
}

#[tokio::test(start_paused = true)]
async fn every_request_of_a_rebase() {
    every_request("rebase", Writers::Many, Some(1), rebase).await;
}

#[tokio::test(start_paused = true)]
async fn every_request_of_a_sweep() {
    every_request("sweep", Writers::Many, None, sweep).await;
}

/// A single fault, unless it is a crash or a refusal, is survived without the caller noticing.
#[tokio::test(start_paused = true)]
async fn one_fault_is_nothing_a_caller_sees() {
    let calm = start().await;
    calm.faults.heal();
    publish(&calm).await.unwrap();
    let requests = calm.faults.ops();
    for fault in faults() {
        if matches!(fault, Fault::Crash | Fault::CrashAfter | Fault::Denied) {
            continue;
        }
        for nth in 0..requests {
            let start = start().await;
            start.faults.fail_nth(nth, fault);
            let outcome = publish(&start).await;
            assert!(outcome.is_ok(), "request {nth}, {fault:?}: {outcome:?}");
        }
    }
}
