//! Tests whether an object store meets the requirements of a checkpoint store. Anyone can run them on their own
//! object store.

use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};

use super::{quick_options, toy};
use crate::check::CheckOptions;
use crate::options::Writers;
use crate::place::Place;
use crate::probe::race;
use crate::store::Store;
use crate::sweep::SweepOptions;

type Outcome = Result<(), String>;

/// Tests everything that a checkpoint store relies on, below `prefix`, which must be empty.
///
/// # Errors
/// The requirement that the store does not meet, in words.
pub async fn conformance(store: Arc<dyn ObjectStore>, prefix: Path) -> Outcome {
    objects(store.as_ref(), &prefix.clone().join("objects")).await?;
    let rounds = create_race(&store, &prefix.clone().join("race"), 10, 16).await?;
    if rounds == 0 {
        return Err("no race had a winner: conditional creates never succeed".into());
    }
    protocol(&store, prefix.clone().join("store")).await?;
    two_writers(&store, prefix.join("two")).await
}

/// Lets `racers` writers create one object at the same time, `rounds` times. Returns the rounds that had a winner.
///
/// # Errors
/// If a round had two winners, or ended with the bytes of a loser.
pub async fn create_race(
    store: &Arc<dyn ObjectStore>,
    folder: &Path,
    rounds: u32,
    racers: u32,
) -> Result<u32, String> {
    let mut won = 0;
    for round in 0..rounds {
        let key = folder.clone().join(format!("{round}"));
        if let Some(wrong) = race(store, &key, racers).await {
            return Err(format!("race {round}: {wrong}"));
        }
        won += u32::from(store.head(&key).await.is_ok());
        store.delete(&key).await.map_err(text)?;
    }
    Ok(won)
}

async fn objects(store: &dyn ObjectStore, folder: &Path) -> Outcome {
    let key = folder.clone().join("a");
    let bytes: Vec<u8> =
        (0..100_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    store.put(&key, bytes.clone().into()).await.map_err(text)?;
    let whole = store.get(&key).await.map_err(text)?.bytes().await.map_err(text)?;
    check(whole == bytes, "a read returns different bytes than were written")?;
    let part = store.get_range(&key, 1_000..70_000).await.map_err(text)?;
    check(part == bytes[1_000..70_000], "a range read returns wrong bytes")?;
    let meta = store.head(&key).await.map_err(text)?;
    check(meta.size == 100_000, "a look-up returns the wrong size")?;
    store.put(&key, "new".into()).await.map_err(text)?;
    let whole = store.get(&key).await.map_err(text)?.bytes().await.map_err(text)?;
    check(whole == "new", "a write does not replace, or a read is stale")?;

    store
        .put_opts(&folder.clone().join("b"), "1".into(), PutMode::Create.into())
        .await
        .map_err(text)?;
    let again = store.put_opts(&folder.clone().join("b"), "2".into(), PutMode::Create.into()).await;
    check(again.is_err(), "a second create is accepted")?;
    for n in 0..30 {
        store
            .put(&folder.clone().join("list").join(format!("{n:03}")), "x".into())
            .await
            .map_err(text)?;
    }
    let listed = keys(store, folder, None).await?;
    check(listed.len() == 32, "a listing misses objects")?;
    let offset = folder.clone().join("list").join("019");
    let after = keys(store, &folder.clone().join("list"), Some(&offset)).await?;
    // Some servers ignore the offset; that costs time and does no harm.
    let all = after.iter().filter(|key| **key > offset).count() == 10;
    check(all, "a listing from an offset misses objects after it")?;
    for key in &listed {
        store.delete(key).await.map_err(text)?;
    }
    check(keys(store, folder, None).await?.is_empty(), "deleted objects are listed")?;
    let gone = store.get(&key).await.err();
    let not_found = matches!(gone, Some(object_store::Error::NotFound { .. }));
    check(not_found, "reading a deleted object does not return `NotFound`")
}

async fn keys(
    store: &dyn ObjectStore,
    prefix: &Path,
    offset: Option<&Path>,
) -> Result<Vec<Path>, String> {
    let listing = match offset {
        Some(offset) => store.list_with_offset(Some(prefix), offset),
        None => store.list(Some(prefix)),
    };
    listing.map_ok(|m| m.location).try_collect().await.map_err(text)
}

/// The life of a store: saves, deltas, a rebase, retiring, a sweep, checks.
async fn protocol(objects: &Arc<dyn ObjectStore>, prefix: Path) -> Outcome {
    let place = Place::objects(Arc::clone(objects), prefix);
    let mut options = quick_options();
    options.writers = Writers::Many;
    let store = Store::create(&place, options.clone()).await.map_err(text)?;
    check(Store::create(&place, options.clone()).await.is_err(), "a store can be created twice")?;
    let contents: Vec<Vec<u8>> = (0..4u8).map(|n| vec![n.wrapping_mul(77); 100]).collect();
    let mut saved = vec![toy::save(&store, 0, None, &contents[0]).await.map_err(text)?];
    for step in 1..4 {
        let parent = Some((saved[step - 1].reference(), &contents[step - 1][..]));
        saved.push(toy::save(&store, step as u64, parent, &contents[step]).await.map_err(text)?);
    }
    let rebased =
        store.rebase(saved[2].id(), &mut toy::ToyRebaser::default()).await.map_err(text)?;
    store.retire(&[saved[0].id(), saved[1].id()], "conformance").await.map_err(text)?;
    let sweep = SweepOptions { grace: Duration::ZERO, exclusive: true, dry_run: false };
    let swept = store.sweep(&sweep).await.map_err(text)?;
    check(swept.deleted.len() == 3 && swept.failed.is_empty(), "a sweep does not delete")?;

    let store = Store::open(&place, options).await.map_err(text)?;
    let listed = store.list().await.map_err(text)?;
    let ids: Vec<_> = listed.iter().map(|c| c.id()).collect();
    check(ids == [rebased.id(), saved[3].id()], "the list differs after reopening")?;
    let state = store.state().await.map_err(text)?;
    for (checkpoint, content) in listed.iter().zip(&contents[2..]) {
        let chain = toy::chain(&state, checkpoint).map_err(text)?;
        let restored = toy::restore(&store, &chain).await.map_err(text)?;
        check(restored == *content, "restored bytes differ")?;
    }
    let options = CheckOptions { read_data: true, ..CheckOptions::default() };
    let report = store.check(&options, None).await.map_err(text)?;
    check(report.is_clean() && report.unlisted.is_empty(), "a check finds damage")
}

/// Two writers at the same time, with their own handles.
async fn two_writers(objects: &Arc<dyn ObjectStore>, prefix: Path) -> Outcome {
    let place = Place::objects(Arc::clone(objects), prefix);
    let writer = |writer: u64| {
        let place = place.clone();
        tokio::spawn(async move {
            let store = Store::open_or_create(&place, quick_options()).await?;
            for n in 0..5 {
                toy::save(&store, writer * 100 + n, None, &[writer as u8; 20]).await?;
            }
            Ok::<_, crate::Error>(())
        })
    };
    let (a, b) = (writer(1), writer(2));
    a.await.map_err(text)?.map_err(text)?;
    b.await.map_err(text)?.map_err(text)?;
    let store = Store::open(&place, quick_options()).await.map_err(text)?;
    let mut steps: Vec<_> = store.list().await.map_err(text)?.iter().map(|c| c.step()).collect();
    steps.sort_unstable();
    let wanted: Vec<_> = (100..105).chain(200..205).collect();
    check(steps == wanted, "two writers lost a checkpoint")
}

fn check(holds: bool, otherwise: &str) -> Outcome {
    if holds { Ok(()) } else { Err(otherwise.to_owned()) }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
