//! Finds out whether an object store creates an object only if it is absent.
//!
//! Some servers ignore the condition, and some check it and then write, which two writers can slip
//! through: nothing but trying shows it. So the store is tried, one write after the other and many
//! at once, in objects of the probe's own.

use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use object_store::path::Path;
use object_store::{Error as StoreError, ObjectStore, ObjectStoreExt, PutMode};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::{Error, Result};

/// Rounds of the race.
const ROUNDS: u32 = 10;
/// Writers in each round.
const RACERS: u32 = 16;

/// What the probe found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeReport {
    /// A second create of one object was refused, and the first one's bytes stayed.
    pub refuses_second: bool,
    /// No race had two winners or another's bytes.
    pub survives_races: bool,
    /// Rounds of the race that were run, with 16 writers each.
    pub rounds: u32,
    /// Rounds that went wrong.
    pub bad_rounds: u32,
    /// What was seen, for people. Empty if all is well.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

impl ProbeReport {
    /// Whether several writers are safe.
    #[must_use]
    pub fn many_writers(&self) -> bool {
        self.refuses_second && self.survives_races
    }
}

/// Tries the store in `folder`, a place where nothing else writes.
///
/// # Errors
/// If the store cannot be written to or read at all.
pub async fn probe(
    store: &Arc<dyn ObjectStore>,
    folder: &Path,
    unique: Uuid,
) -> Result<ProbeReport> {
    // Side by side in one folder, so that a local one is not littered with empty folders.
    let key =
        |what: String| folder.clone().join(format!("probe-{}-{what}", unique.as_hyphenated()));
    let mut report = ProbeReport::default();
    let mut made = vec![key("twice".into())];
    sequential(store, &made[0], &mut report).await?;
    if report.refuses_second {
        for round in 0..ROUNDS {
            let key = key(format!("race-{round}"));
            made.push(key.clone());
            report.rounds += 1;
            if let Some(wrong) = race(store, &key, RACERS).await? {
                report.bad_rounds += 1;
                report.detail = format!("round {round}: {wrong}");
            }
        }
        report.survives_races = report.bad_rounds == 0;
    }
    for key in made {
        // What stays behind is swept later.
        let _ = store.delete(&key).await;
    }
    Ok(report)
}

/// The cheap part of the probe: a second create. Says what is wrong, if anything is.
async fn sequential(
    store: &Arc<dyn ObjectStore>,
    key: &Path,
    report: &mut ProbeReport,
) -> Result<()> {
    // The object may be there after an ambiguous answer; then the second try is refused for it.
    let first = store.put_opts(key, "first".into(), PutMode::Create.into()).await;
    if let Err(error @ (StoreError::NotImplemented { .. } | StoreError::NotSupported { .. })) =
        first
    {
        report.detail = error.to_string();
        return Ok(());
    }
    let second = store.put_opts(key, "second".into(), PutMode::Create.into()).await;
    let found = read(store, key).await.map_err(|e| match (first, e) {
        (Err(e), StoreError::NotFound { .. }) | (_, e) => Error::storage("probe", key, e),
    })?;
    report.refuses_second = second.is_err() && found == "first";
    if !report.refuses_second {
        let answer = second.err().map_or("was accepted".to_owned(), |e| e.to_string());
        report.detail = format!("a second create {answer}; the object holds {found:?}");
    }
    Ok(())
}

/// One race. Says what is wrong, if anything is. A round may have no winner: answers get lost.
pub(crate) async fn race(
    store: &Arc<dyn ObjectStore>,
    key: &Path,
    racers: u32,
) -> Result<Option<String>> {
    // Tasks of their own: on several threads, requests really overlap.
    let mut running: FuturesUnordered<_> = (0..racers)
        .map(|racer| {
            let (store, key) = (Arc::clone(store), key.clone());
            tokio::spawn(async move {
                let body = format!("racer {racer}");
                let put = store.put_opts(&key, body.clone().into(), PutMode::Create.into()).await;
                put.is_ok().then_some(body)
            })
        })
        .collect();
    let mut winners = Vec::new();
    while let Some(done) = running.next().await {
        winners.extend(done.ok().flatten());
    }
    let found = match read(store, key).await {
        Ok(found) => found,
        Err(StoreError::NotFound { .. }) if winners.is_empty() => return Ok(None),
        Err(e) => return Err(Error::storage("probe", key, e)),
    };
    Ok(match &winners[..] {
        [] => None,
        [winner] if found == winner => None,
        _ => Some(format!("{} of {racers} creates were accepted, {found:?} stayed", winners.len())),
    })
}

async fn read(store: &Arc<dyn ObjectStore>, key: &Path) -> object_store::Result<Bytes> {
    store.get(key).await?.bytes().await
}
