//! The requests that the service handles: accept, report, flush, drain, forget.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, timeout_at};
use uuid::Uuid;

use crate::config::Config;
use crate::folder::is_full;
use crate::health::Health;
use crate::metrics::Metrics;
use crate::queue::{Mode, SharedQueue, Submission};
use crate::record::{Record, SUBMISSION, State};
use crate::restores::Restores;
use crate::staging::{NotTaken, Staging};
use crate::status::{Sources, Status};
use crate::stores::Stores;
use crate::worker::{CrashHook, finite};

/// The most tags of a checkpoint, and the most metrics.
const MAX_WORDS: usize = 64;
/// The most bytes of all their names and texts: they share a log entry of 64 KiB.
const MAX_TEXT: usize = 16 << 10;

/// All parts of the service.
pub(crate) struct Service {
    /// The configuration.
    pub config: Config,
    /// The records.
    pub queue: SharedQueue,
    /// The local drive.
    pub staging: Staging,
    /// The stores.
    pub stores: Arc<Stores>,
    /// Signs of life.
    pub health: Arc<Health>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// The encoder in use, and why.
    pub engine: String,
    /// How many records of the journal could not be read.
    pub damaged_records: usize,
    /// Held while a submission is accepted, so that the checks made for it stay valid.
    pub(crate) accepting: Mutex<()>,
    /// Restores for clients.
    pub(crate) restores: Restores,
    /// Called at each named place.
    pub(crate) reached: CrashHook,
}

/// Why a submission was not accepted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    /// The service is ending.
    #[error("the runner is shutting down and accepts no more checkpoints")]
    Draining,
    /// There is no room: try again later.
    #[error("{0}")]
    Full(String),
    /// The id belongs to another checkpoint.
    #[error("submission id {0} belongs to another checkpoint")]
    Conflict(Uuid),
    /// The message is invalid.
    #[error("{0}")]
    Bad(String),
    /// The file cannot be taken.
    #[error(transparent)]
    NotTaken(#[from] NotTaken),
    /// An I/O error.
    #[error("the runner's disk: {0}")]
    Io(#[from] std::io::Error),
}

impl Refusal {
    /// A word for programs.
    #[must_use]
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Draining => "draining",
            Self::Full(_) => "full",
            Self::Conflict(_) => "conflict",
            Self::Bad(_) => "bad_request",
            Self::NotTaken(NotTaken::Missing(_)) => "missing",
            Self::NotTaken(NotTaken::Refused { .. }) => "refused",
            Self::Io(e) | Self::NotTaken(NotTaken::Io(e)) if is_full(e) => "full",
            Self::Io(_) | Self::NotTaken(NotTaken::Io(_)) => "disk",
        }
    }
}

/// Where trainers write, and how much fits.
#[derive(Debug, Serialize)]
pub(crate) struct Room {
    /// The folder for incoming checkpoints.
    pub incoming: std::path::PathBuf,
    /// Bytes that would be accepted now.
    pub room_bytes: u64,
    /// Whether submissions are accepted at all.
    pub accepting: bool,
}

impl Service {
    /// Accepts the file that a trainer has written. The submission is in the journal when this
    /// returns; repeating it changes nothing.
    ///
    /// # Errors
    /// [`Refusal`]; nothing was accepted then, and the file is where it was.
    pub(crate) fn submit(&self, submission: Submission) -> Result<Record, Refusal> {
        let done = self.try_submit(submission);
        done.inspect_err(|e| self.metrics.refused(e.kind()))
    }

    fn try_submit(&self, submission: Submission) -> Result<Record, Refusal> {
        check_words(&submission)?;
        let _one = self.accepting.lock().unwrap_or_else(|e| e.into_inner());
        let (id, uid) = (submission.id, submission.uid);
        if let Some(known) = self.queue.get(id) {
            // A file of this name must be another one: the first was moved away.
            let same = known.step == submission.step
                && known.uid == uid
                && known.metrics == submission.metrics
                && known.tags == submission.tags
                && !self.staging.offered(id).exists();
            return if same { Ok(known) } else { Err(Refusal::Conflict(id)) };
        }
        if self.queue.mode() == Mode::Draining {
            return Err(Refusal::Draining);
        }
        let bytes = self.staging.look(id, uid)?;
        self.check_quota(bytes)?;
        let bytes = self.staging.take(id, uid)?;
        (self.reached)("taken");
        let accepted = self.queue.accept(submission, bytes).map_err(Refusal::from);
        let accepted = accepted.and_then(|record| record.ok_or(Refusal::Draining));
        let accepted = accepted.inspect_err(|_| self.staging.give_back(id))?;
        self.metrics.accepted();
        (self.reached)("accepted");
        Ok(accepted)
    }

    fn check_quota(&self, bytes: u64) -> Result<(), Refusal> {
        let free = self.staging.free()?;
        if free == 0 || free < self.config.min_free_bytes {
            return Err(Refusal::Full(format!(
                "{free} bytes are free on the runner's drive, {} must stay free",
                self.config.min_free_bytes
            )));
        }
        let room = self.quota_left();
        match bytes <= room {
            true => Ok(()),
            false => Err(Refusal::Full(format!(
                "{bytes} bytes do not fit: {room} bytes of the quota of {} are left until earlier \
                 checkpoints become durable",
                self.config.quota_bytes
            ))),
        }
    }

    fn quota_left(&self) -> u64 {
        let held = self.queue.list().iter().map(Record::held_bytes).fold(0, u64::saturating_add);
        match self.config.quota_bytes {
            0 => u64::MAX,
            quota => quota.saturating_sub(held),
        }
    }

    /// Where trainers write, and how much fits.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn room(&self) -> std::io::Result<Room> {
        let free = self.staging.free()?.saturating_sub(self.config.min_free_bytes);
        let room_bytes = free.min(self.quota_left());
        let accepting = self.queue.mode() != Mode::Draining;
        Ok(Room { incoming: self.staging.incoming(), room_bytes, accepting })
    }

    /// Waits until a checkpoint has reached a state or failed, or time is up; then returns its record.
    pub(crate) async fn wait(&self, id: Uuid, wanted: State, time: Duration) -> Option<Record> {
        let end = Instant::now() + time;
        let mut changed = self.queue.watch();
        loop {
            let record = self.queue.get(id)?;
            if record.state.reaches(wanted) {
                return Some(record);
            }
            match timeout_at(end, changed.changed()).await {
                Ok(Ok(())) => {}
                _ => return self.queue.get(id),
            }
        }
    }

    /// Waits until everything accepted so far is durable or failed; returns how many are not.
    pub(crate) async fn flush(&self, time: Duration) -> usize {
        let end = Instant::now() + time;
        let mut changed = self.queue.watch();
        let last = self.queue.list().last().map_or(0, |r| r.seq);
        loop {
            let records = self.queue.list();
            let open = records.iter().filter(|r| r.seq <= last && !r.state.is_final()).count();
            if open == 0 {
                return 0;
            }
            match timeout_at(end, changed.changed()).await {
                Ok(Ok(())) => {}
                _ => return open,
            }
        }
    }

    /// Stops accepting, and waits as [`Service::flush`] does, the newest checkpoint first.
    pub(crate) async fn drain(&self, time: Duration) -> usize {
        self.queue.set_mode(Mode::Draining);
        self.flush(time).await
    }

    /// Forgets a submission that has failed, and its file; returns whether there was one.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn forget(&self, id: Uuid) -> std::io::Result<bool> {
        let local = self.queue.get(id).and_then(|record| record.local);
        let known = self.queue.forget_failed(id)?;
        if known {
            self.staging.remove(id)?;
            self.stores.forget_local(local);
            self.health.forget(id);
        }
        Ok(known)
    }

    /// The current status.
    #[must_use]
    pub(crate) fn status(&self) -> Status {
        Status::new(&Sources {
            config: &self.config,
            queue: &self.queue,
            health: &self.health,
            staging: &self.staging,
            engine: &self.engine,
            damaged_records: self.damaged_records,
        })
    }
}

fn check_words(submission: &Submission) -> Result<(), Refusal> {
    let Submission { metrics, tags, .. } = submission;
    let bad = |what: &str| Err(Refusal::Bad(what.to_owned()));
    if metrics.len() > MAX_WORDS || tags.len() > MAX_WORDS {
        return bad("more than 64 metrics or tags");
    }
    let texts = metrics.keys().chain(tags.keys()).chain(tags.values());
    if texts.map(String::len).sum::<usize>() > MAX_TEXT {
        return bad("names of metrics and tags and values of tags exceed 16 KiB in total");
    }
    if !finite(metrics) {
        return bad("a metric is not a finite number");
    }
    if tags.contains_key(SUBMISSION) {
        return bad("the tag `s4w.submission` is reserved for the runner");
    }
    Ok(())
}
