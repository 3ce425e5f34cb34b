//! Finds out whether an object store creates an object only if it is absent.
//!
//! Some servers ignore the condition, and some check it and then write, which lets two writers slip through:
//! only a test shows it. So the probe tests the object store by consecutive writes and many races, on
//! objects of its own. Only clean answers count: a race that lost an answer proves nothing, and is run
//! again under another key.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use object_store::path::Path;
use object_store::{Error as StoreError, ObjectStore, ObjectStoreExt, PutMode};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::io::is_permanent;
use crate::options::{ProbeLimits, StoreOptions};

/// Maximum number of races in flight.
const SIDE_BY_SIDE: usize = 8;
/// Of this many races, one has many writers and one has large bodies.
const VARIETY: u32 = 8;
/// Maximum number of races in a local folder.
const LOCAL_ROUNDS: u32 = 16;
/// Bytes of a large body: servers that check first and then receive the body leave a wide gap.
const LARGE: usize = 64 << 10;
/// Bytes of the other bodies, about the size of a log entry.
const SMALL: usize = 512;
/// An answer that takes longer counts as lost.
const PATIENCE: Duration = Duration::from_secs(30);
/// So does one that takes longer than the deadline divided by this, which leaves time for other tries.
const TRIES: u32 = 4;
/// The message about bytes that nobody wrote.
const DAMAGED: &str = "the data read back is damaged";
/// How often progress is reported.
const TELL: Duration = Duration::from_secs(2);

/// The findings of a probe.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeReport {
    /// A second create of one object was refused, and the first one's bytes stayed.
    pub refuses_second: bool,
    /// No race had two winners, or ended with the bytes of a loser.
    pub survives_races: bool,
    /// Races that ended with clear answers, of 3 to 16 writers each.
    pub rounds: u32,
    /// Races that went wrong.
    pub bad_rounds: u32,
    /// What was found, for people. Empty if all is well.
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

/// The outcome of a trial.
enum Outcome {
    /// As it must, with a clean answer to every request.
    Good,
    /// The store does not meet the requirements.
    Bad(String),
    /// It proves nothing: an answer was lost or made no sense.
    Disturbed(String),
}

/// The answer to one create.
enum Answer {
    Accepted,
    Refused,
    /// The server or its client cannot do it.
    Unsupported(String),
    /// Refused permanently, for a reason other than the condition.
    Denied(StoreError),
    Disturbed(String),
}

/// How long the probe waits.
#[derive(Clone, Copy)]
struct Patience {
    /// For all answers.
    end: Instant,
    /// For one answer.
    answer: Duration,
}

impl Patience {
    fn within(deadline: Duration) -> Self {
        Self { end: Instant::now() + deadline, answer: PATIENCE.min(deadline / TRIES) }
    }

    /// The time from which an answer to a request that begins now counts as lost.
    fn for_answer(self) -> Instant {
        self.end.min(Instant::now() + self.answer)
    }
}

/// One race.
#[derive(Clone, Copy)]
struct Race {
    racers: u32,
    /// Bytes that each writes.
    len: usize,
    /// The racers start within this time.
    spread: Duration,
}

/// Tries the store in `folder`, where nothing else may write. Long probes report progress as `tracing`
/// events.
///
/// # Errors
/// [`Error::ProbeDisturbed`] if too few trials had clean answers until the deadline of
/// [`crate::Retry`]; [`Error::Storage`] if the store cannot be written to at all.
pub(crate) async fn probe(
    store: &Arc<dyn ObjectStore>,
    folder: &Path,
    options: &StoreOptions,
    is_local: bool,
) -> Result<ProbeReport> {
    let mut limits = options.probe.clone();
    if is_local {
        // The kernel creates a link or does not: the races only check that a kernel's file system
        // is there.
        limits.most_rounds = limits.most_rounds.min(LOCAL_ROUNDS);
    }
    Probe::new(store, folder, options).run(&limits).await
}

/// As [`probe`], but without races: finds out only whether a second create is refused.
pub(crate) async fn probe_twice(
    store: &Arc<dyn ObjectStore>,
    folder: &Path,
    options: &StoreOptions,
) -> Result<ProbeReport> {
    let limits = ProbeLimits { least_rounds: 0, most_rounds: 0, time: Duration::ZERO };
    Probe::new(store, folder, options).run(&limits).await
}

struct Probe<'a> {
    store: &'a Arc<dyn ObjectStore>,
    folder: &'a Path,
    options: &'a StoreOptions,
    unique: Uuid,
    start: Instant,
    patience: Patience,
    /// Keys that were written.
    made: Vec<Path>,
    /// Trials in a row that were disturbed.
    disturbed: u32,
    /// The shortest time that a create took.
    latency: Duration,
}

impl<'a> Probe<'a> {
    fn new(store: &'a Arc<dyn ObjectStore>, folder: &'a Path, options: &'a StoreOptions) -> Self {
        Self {
            store,
            folder,
            options,
            unique: options.ids.next(),
            start: Instant::now(),
            patience: Patience::within(options.retry.deadline),
            made: Vec::new(),
            disturbed: 0,
            latency: PATIENCE,
        }
    }

    async fn run(mut self, limits: &ProbeLimits) -> Result<ProbeReport> {
        let mut report = ProbeReport::default();
        let outcome = self.trials(limits, &mut report).await;
        let made = std::mem::take(&mut self.made);
        let keys = futures::stream::iter(made.into_iter().map(Ok)).boxed();
        // A sweep deletes what remains.
        let deleted = self.store.delete_stream(keys).for_each(|_| async {});
        let _ = tokio::time::timeout(PATIENCE, deleted).await;
        outcome.map(|()| report)
    }

    async fn trials(&mut self, limits: &ProbeLimits, report: &mut ProbeReport) -> Result<()> {
        loop {
            match self.twice().await? {
                Outcome::Good => break,
                Outcome::Bad(what) => {
                    report.detail = what;
                    return Ok(());
                }
                Outcome::Disturbed(what) => self.pause(what).await?,
            }
        }
        report.refuses_second = true;
        if limits.most_rounds > 0 {
            self.races(limits, report).await?;
            report.survives_races = report.bad_rounds == 0;
        }
        Ok(())
    }

    async fn races(&mut self, limits: &ProbeLimits, report: &mut ProbeReport) -> Result<()> {
        let (mut running, mut begun) = (FuturesUnordered::new(), 0);
        let mut told = Instant::now();
        while report.rounds < limits.most_rounds {
            if report.rounds >= limits.least_rounds && self.start.elapsed() >= limits.time {
                break;
            }
            let wanted = (limits.most_rounds - report.rounds) as usize;
            while running.len() < wanted.min(SIDE_BY_SIDE) {
                let (key, race) = (self.key(&format!("race-{begun}")), self.plan(begun));
                begun += 1;
                let (store, patience) = (Arc::clone(self.store), self.patience);
                running.push(async move { run_race(&store, &key, race, patience).await });
            }
            match running.next().await {
                Some(Outcome::Good) => {
                    report.rounds += 1;
                    self.disturbed = 0;
                }
                Some(Outcome::Bad(what)) => {
                    report.rounds += 1;
                    report.bad_rounds += 1;
                    report.detail = format!("race {}: {what}", report.rounds);
                    break;
                }
                Some(Outcome::Disturbed(what)) => self.pause(what).await?,
                None => break,
            }
            if told.elapsed() >= TELL {
                told = Instant::now();
                tracing::info!(
                    place = %self.folder,
                    "still testing whether several writers are safe: {} of {} to {} races",
                    report.rounds, limits.least_rounds, limits.most_rounds
                );
            }
        }
        Ok(())
    }

    /// Races differ, as servers do: with many racers at one instant, and with few that start within
    /// the time of a request or two, so that one checks while another one writes.
    fn plan(&self, number: u32) -> Race {
        match number % VARIETY {
            0 => Race { racers: 16, len: SMALL, spread: Duration::ZERO },
            4 => Race { racers: 4, len: LARGE, spread: self.latency },
            odd => Race { racers: 3, len: SMALL, spread: self.latency * (odd % 4) / 2 },
        }
    }

    /// A new key. All keys lie directly in one folder, so that a local one is not littered with
    /// empty folders.
    fn key(&mut self, what: &str) -> Path {
        let key = self.folder.clone().join(format!("probe-{}-{what}", self.unique.as_hyphenated()));
        self.made.push(key.clone());
        key
    }

    /// Waits before the next trial, if there is time for one.
    async fn pause(&mut self, what: String) -> Result<()> {
        let retry = &self.options.retry;
        let pause = retry.pause(self.disturbed, self.unique.as_u64_pair().1);
        self.disturbed += 1;
        if Instant::now() + pause >= self.patience.end {
            let place = self.folder.to_string();
            return Err(Error::ProbeDisturbed { place, limit: retry.deadline, last: what });
        }
        tracing::debug!(what, "a probe trial was inconclusive: trying again");
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// Tries to create one object twice.
    async fn twice(&mut self) -> Result<Outcome> {
        let key = self.key(&format!("twice-{}", self.disturbed));
        let began = Instant::now();
        let first = create(self.store, &key, "first".into(), self.patience).await;
        self.latency = self.latency.min(began.elapsed());
        match first {
            Answer::Accepted => {}
            Answer::Refused => {
                return Ok(Outcome::Disturbed("a new object was reported as existing".into()));
            }
            Answer::Unsupported(what) => return Ok(Outcome::Bad(what)),
            Answer::Disturbed(what) => return Ok(Outcome::Disturbed(what)),
            Answer::Denied(e) => return self.denied(&key, e).await,
        }
        match create(self.store, &key, "second".into(), self.patience).await {
            Answer::Accepted => {
                return Ok(Outcome::Bad("a second create of the same object was accepted".into()));
            }
            Answer::Disturbed(what) => return Ok(Outcome::Disturbed(what)),
            Answer::Refused | Answer::Unsupported(_) | Answer::Denied(_) => {}
        }
        Ok(match read(self.store, &key, self.patience).await {
            Ok(Some(found)) if found == "first" => Outcome::Good,
            Ok(Some(found)) if found == "second" => {
                Outcome::Bad("a second create was refused, but its bytes were stored".into())
            }
            Ok(Some(_)) => Outcome::Disturbed(DAMAGED.into()),
            Ok(None) => Outcome::Bad("a created object is missing".into()),
            Err(what) => Outcome::Disturbed(what),
        })
    }

    /// Finds out whether a create was refused because of its condition, or because every write is.
    async fn denied(&self, key: &Path, error: StoreError) -> Result<Outcome> {
        match timeout_at(self.patience.for_answer(), self.store.put(key, "plain".into())).await {
            Ok(Ok(_)) => {
                Ok(Outcome::Bad(format!("conditional writes are rejected: {}", said(&error))))
            }
            Ok(Err(e)) if is_permanent(&e) => Err(Error::storage("write", key, error)),
            Ok(Err(e)) => Ok(Outcome::Disturbed(said(&e))),
            Err(_) => Ok(Outcome::Disturbed("request timed out".into())),
        }
    }
}

/// One race of writers that start at the same time. Returns what went wrong, if anything; a disturbed race counts
/// as nothing wrong.
pub(crate) async fn race(store: &Arc<dyn ObjectStore>, key: &Path, racers: u32) -> Option<String> {
    let race = Race { racers, len: SMALL, spread: Duration::ZERO };
    let patience = Patience { end: Instant::now() + PATIENCE, answer: PATIENCE };
    match run_race(store, key, race, patience).await {
        Outcome::Bad(what) => Some(what),
        Outcome::Good | Outcome::Disturbed(_) => None,
    }
}

async fn run_race(
    store: &Arc<dyn ObjectStore>,
    key: &Path,
    race: Race,
    patience: Patience,
) -> Outcome {
    // In separate tasks: on several threads, requests really overlap.
    let mut running = JoinSet::new();
    for racer in 0..race.racers {
        let (store, key) = (Arc::clone(store), key.clone());
        let wait = race.spread * racer / race.racers;
        running.spawn(async move {
            let body = body(racer, race.len);
            if !wait.is_zero() {
                tokio::time::sleep(wait).await;
            }
            (create(&store, &key, body.clone(), patience).await, body)
        });
    }
    let (mut winners, mut disturbed) = (Vec::new(), None);
    while let Some(done) = running.join_next().await {
        match done {
            Ok((Answer::Accepted, body)) => winners.push(body),
            Ok((Answer::Disturbed(what), _)) => disturbed = Some(what),
            Ok((Answer::Refused | Answer::Unsupported(_) | Answer::Denied(_), _)) => {}
            Err(e) => disturbed = Some(e.to_string()),
        }
    }
    let found = read(store, key, patience).await;
    match (&winners[..], found) {
        ([], _) => Outcome::Disturbed(disturbed.unwrap_or("no create was accepted".into())),
        ([_, _, ..], _) => {
            Outcome::Bad(format!("{} of {} creates were accepted", winners.len(), race.racers))
        }
        ([winner], Ok(Some(found))) if found == winner => {
            disturbed.map_or(Outcome::Good, Outcome::Disturbed)
        }
        ([_], Ok(Some(found))) if (0..race.racers).any(|racer| found == body(racer, race.len)) => {
            Outcome::Bad("one create was accepted, but another one's bytes were stored".into())
        }
        ([_], Ok(Some(_))) => Outcome::Disturbed(DAMAGED.into()),
        ([_], Ok(None)) => Outcome::Bad("a create was accepted, but nothing was stored".into()),
        ([_], Err(what)) => Outcome::Disturbed(what),
    }
}

fn body(racer: u32, len: usize) -> Bytes {
    let mut body = format!("racer {racer} ").into_bytes();
    body.resize(len.max(body.len()), b'.');
    body.into()
}

/// The error's text, without secrets.
fn said(error: &StoreError) -> String {
    Failure::new(error).to_string()
}

async fn create(
    store: &Arc<dyn ObjectStore>,
    key: &Path,
    body: Bytes,
    patience: Patience,
) -> Answer {
    let put = store.put_opts(key, body.into(), PutMode::Create.into());
    match timeout_at(patience.for_answer(), put).await {
        Ok(Ok(_)) => Answer::Accepted,
        Ok(Err(StoreError::AlreadyExists { .. } | StoreError::Precondition { .. })) => {
            Answer::Refused
        }
        Ok(Err(e @ (StoreError::NotImplemented { .. } | StoreError::NotSupported { .. }))) => {
            Answer::Unsupported(said(&e))
        }
        // How the S3 protocol rejects a header that a server does not know.
        Ok(Err(e)) if e.to_string().contains("status code: 501") => Answer::Unsupported(said(&e)),
        Ok(Err(e)) if is_permanent(&e) => Answer::Denied(e),
        Ok(Err(e)) => Answer::Disturbed(said(&e)),
        Err(_) => Answer::Disturbed("request timed out".into()),
    }
}

/// The object's bytes, `None` if it is not there, or why that is not known.
async fn read(
    store: &Arc<dyn ObjectStore>,
    key: &Path,
    patience: Patience,
) -> std::result::Result<Option<Bytes>, String> {
    let get = async { store.get(key).await?.bytes().await };
    match timeout_at(patience.for_answer(), get).await {
        Ok(Ok(bytes)) => Ok(Some(bytes)),
        Ok(Err(StoreError::NotFound { .. })) => Ok(None),
        Ok(Err(e)) => Err(said(&e)),
        Err(_) => Err("request timed out".into()),
    }
}
