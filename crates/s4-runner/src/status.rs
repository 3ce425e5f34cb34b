//! The status that the service reports.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;
use uuid::Uuid;

use crate::config::Config;
use crate::health::{Health, Interruption, StoreHealth};
use crate::queue::{Mode, Queue};
use crate::record::{Record, State};
use crate::staging::Staging;

/// The most checkpoints that the status lists.
const LISTED: usize = 50;

/// Free bytes that the journal needs to keep working.
const JOURNAL: u64 = 64 << 10;

/// The longest a queue may lag behind before `/readyz` says no, in seconds.
const LAG: f64 = 3600.0;

/// A checkpoint, as it is shown.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Shown {
    /// Id of the submission.
    pub id: Uuid,
    /// The training step.
    pub step: u64,
    /// How far it is.
    pub state: State,
    /// Bytes of the tensors; 0: not known yet.
    pub raw_bytes: u64,
    /// Bytes as stored; 0: not known yet.
    pub stored_bytes: u64,
    /// `base` or `delta`, once it is known.
    pub kind: Option<&'static str>,
    /// When it was submitted, in milliseconds since 1970.
    pub submitted_ms: i64,
    /// When it became durable, in milliseconds since 1970.
    pub durable_ms: Option<i64>,
    /// How long it took to become durable, in milliseconds by a clock that nobody can set.
    pub durable_after_ms: Option<u64>,
    /// The last error.
    pub error: Option<String>,
}

impl From<&Record> for Shown {
    fn from(r: &Record) -> Self {
        Self {
            id: r.id,
            step: r.step,
            state: r.state,
            raw_bytes: r.raw_bytes,
            stored_bytes: r.stored_bytes,
            kind: r.local.map(|_| if r.local_parent.is_some() { "delta" } else { "base" }),
            submitted_ms: r.submitted_ms,
            durable_ms: r.durable_ms,
            durable_after_ms: r.durable_after_ms,
            error: r.error.clone(),
        }
    }
}

/// The status, as `/v1/status` gives it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Status {
    /// The program's version.
    pub version: &'static str,
    /// Folder or URL of the store, without secrets.
    pub store_name: String,
    /// The state of the store, as far as it is known.
    pub store: StoreHealth,
    /// The encoder in use: `cpu`, and why.
    pub engine: String,
    /// Whether the entitlement was granted.
    pub entitled: bool,
    /// Whether checkpoints are accepted and become durable.
    pub ready: bool,
    /// Why not.
    pub not_ready: Vec<String>,
    /// `steady`, `urgent` or `draining`.
    pub mode: &'static str,
    /// The announced interruption.
    pub interruption: Option<Interruption>,
    /// Seconds since the start.
    pub uptime_seconds: u64,
    /// Number of checkpoints in each state.
    pub states: BTreeMap<&'static str, u64>,
    /// The checkpoint that was submitted last among those that are durable.
    pub last_durable: Option<Shown>,
    /// When a checkpoint last became durable, in milliseconds since 1970.
    pub last_durable_ms: Option<i64>,
    /// Age of the oldest checkpoint that is not durable.
    pub durable_lag_seconds: f64,
    /// Bytes of the local drive held by checkpoints that are not durable.
    pub queued_bytes: u64,
    /// Limit on those bytes; 0: none.
    pub quota_bytes: u64,
    /// Bytes that are free on the local drive.
    pub staging_free_bytes: u64,
    /// Compression ratio of the remembered durable checkpoints: bytes of tensors per byte stored.
    pub ratio: Option<f64>,
    /// How many records of the journal could not be read.
    pub damaged_records: usize,
    /// The latest checkpoints, newest first.
    pub checkpoints: Vec<Shown>,
}

/// The sources of a status.
pub(crate) struct Sources<'a> {
    /// The configuration.
    pub config: &'a Config,
    /// The records.
    pub queue: &'a Queue,
    /// Signs of life.
    pub health: &'a Health,
    /// The local drive.
    pub staging: &'a Staging,
    /// The encoder in use.
    pub engine: &'a str,
    /// How many records could not be read.
    pub damaged_records: usize,
}

impl Status {
    /// The current status.
    #[must_use]
    pub(crate) fn new(from: &Sources<'_>) -> Self {
        let records = from.queue.list();
        let mut states: BTreeMap<_, u64> = State::ALL.map(|s| (s.name(), 0)).into();
        for record in &records {
            *states.entry(record.state.name()).or_default() += 1;
        }
        let open = records.iter().filter(|r| !r.state.is_final());
        let now = Instant::now();
        let lag = open.filter_map(|r| from.queue.age(r.seq, now)).max().unwrap_or_default();
        let durable = || records.iter().filter(|r| r.state == State::Durable);
        // Training may have gone back to an earlier step.
        let last = durable().max_by_key(|r| r.seq);
        let sum = |of: fn(&Record) -> u64| durable().map(of).fold(0, u64::saturating_add);
        let (raw, stored) = (sum(|r| r.raw_bytes), sum(|r| r.stored_bytes));
        let mode = from.queue.mode();
        let mut status = Self {
            version: env!("CARGO_PKG_VERSION"),
            store_name: from.config.store_name(),
            store: from.health.store(),
            engine: from.engine.to_owned(),
            entitled: from.health.is_entitled(),
            ready: false,
            not_ready: vec![],
            mode: match mode {
                Mode::Steady => "steady",
                Mode::Urgent => "urgent",
                Mode::Draining => "draining",
            },
            interruption: from.health.interruption(),
            uptime_seconds: from.health.uptime().as_secs(),
            states,
            last_durable: last.map(Shown::from),
            last_durable_ms: durable().filter_map(|r| r.durable_ms).max(),
            durable_lag_seconds: lag.as_secs_f64(),
            queued_bytes: records.iter().map(Record::held_bytes).fold(0, u64::saturating_add),
            quota_bytes: from.config.quota_bytes,
            staging_free_bytes: from.staging.free().unwrap_or(0),
            ratio: (stored > 0).then(|| raw as f64 / stored as f64),
            damaged_records: from.damaged_records,
            checkpoints: records.iter().rev().take(LISTED).map(Shown::from).collect(),
        };
        status.not_ready = status.obstacles(from, mode);
        status.ready = status.not_ready.is_empty();
        status
    }

    fn obstacles(&self, from: &Sources<'_>, mode: Mode) -> Vec<String> {
        let mut out = vec![];
        match (self.store.reachable, &self.store.error) {
            (Some(true), _) => {}
            (None, _) => out.push("the store has not been contacted yet".to_owned()),
            (Some(false), why) => {
                out.push(format!("the store: {}", why.as_deref().unwrap_or("no answer")));
            }
        }
        if mode == Mode::Draining {
            out.push("draining: no more checkpoints are accepted".into());
        }
        if self.staging_free_bytes == 0 || self.staging_free_bytes < from.config.min_free_bytes {
            out.push("the local drive is full".into());
        }
        if !from.queue.is_writable() {
            out.push("the journal is not writable".into());
        }
        if let Some(why) = from.health.uncompressed() {
            out.push(format!("the last checkpoint could not be compressed: {why}"));
        }
        if from.queue.free().unwrap_or(0) < JOURNAL {
            out.push("the drive of the journal is full".into());
        }
        if self.quota_bytes > 0 && self.queued_bytes >= self.quota_bytes {
            out.push("the quota of the local drive is used up".into());
        }
        if self.durable_lag_seconds > LAG {
            out.push("a checkpoint has been waiting for more than an hour".into());
        }
        if let Some(why) = from.health.unwatched() {
            out.push(format!("the watched folder: {why}"));
        }
        for thread in from.health.stalled() {
            out.push(format!("the thread {thread:?} has stalled"));
        }
        out
    }

    /// Whether nothing needs a person's attention: the answer of `/healthz`.
    #[must_use]
    pub(crate) fn is_healthy(&self, health: &Health) -> bool {
        health.stalled().is_empty() && self.damaged_records == 0 && self.states["failed"] == 0
    }
}
