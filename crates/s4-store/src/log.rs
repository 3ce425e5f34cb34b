//! The one way to change a store: creating the next entry of its log.

use std::ops::Range;

use bytes::Bytes;
use object_store::path::Path;
use s4_format::Digest;
use tokio::time::Instant;

use crate::entry::{Entry, MAX_ENTRY, Op};
use crate::error::{CommitUnknown, Error, Result};
use crate::failure::Failure;
use crate::id::WriteId;
use crate::io::is_permanent;
use crate::replay::Known;
use crate::state::State;
use crate::store::Inner;
use crate::view;

/// A view is written when the last known one is this many entries old. Together with a listing,
/// that bounds the cost of opening a store.
pub(crate) const VIEW_EVERY: u64 = 32;

/// What a slot of the log holds after an attempt to create it.
pub(crate) enum Slot {
    Ours,
    Other(Box<Entry>, Digest),
}

/// What reading a slot of the log found.
pub(crate) enum Seen {
    Entry(Box<Entry>, Digest),
    Empty,
}

impl Inner {
    pub(crate) async fn read_entry(&self, n: u64) -> Result<(Entry, Digest)> {
        let parse = |bytes: &Bytes| self.parse_entry(n, bytes);
        self.io.get_checked(&self.layout.entry(n), MAX_ENTRY, parse).await
    }

    fn parse_entry(&self, n: u64, bytes: &Bytes) -> Result<(Entry, Digest)> {
        let key = self.layout.entry(n);
        let (entry, hash) = (Entry::parse(key.as_ref(), n, bytes)?, Digest::of(bytes));
        self.recent.keep(n, hash, bytes);
        Ok((entry, hash))
    }

    /// As [`Inner::read_slot`], for several slots in parallel.
    pub(crate) async fn read_each(&self, numbers: Range<u64>) -> Vec<(u64, Result<Seen>)> {
        let keys = numbers.clone().map(|n| self.layout.entry(n)).collect();
        let read = self.io.get_each(keys, MAX_ENTRY).await;
        let parse = |(n, read): (u64, Result<Bytes>)| async move {
            let parsed = match read.and_then(|bytes| self.parse_entry(n, &bytes)) {
                // Read once more, as `get_checked` does.
                Err(Error::Corrupt { .. }) => self.read_slot(n).await,
                other => seen(other),
            };
            (n, parsed)
        };
        futures::future::join_all(numbers.zip(read).map(parse)).await
    }

    pub(crate) async fn read_slot(&self, n: u64) -> Result<Seen> {
        seen(self.read_entry(n).await)
    }

    /// Commits the operation that `build` makes from the newest state, as the next entry of the
    /// log.
    ///
    /// `build` is called again whenever another writer was faster; its error ends the commit with
    /// nothing changed. Returns `None` if `build` finds nothing to do.
    pub(crate) async fn append(
        &self,
        mut build: impl FnMut(&State) -> Result<Option<Op>>,
    ) -> Result<Option<Entry>> {
        self.ensure_writer().await?;
        let mut write_id = WriteId::new(self.options.ids.next());
        let mut known = self.known.lock().await;
        self.be_sure(&mut known).await?;
        let mut tried = Vec::new();
        loop {
            self.sync_log()?;
            let owed = self.owed(&mut known).await?;
            if let Some(entry) = self.landed(&known, &tried).await? {
                known.own.committed(&entry, false);
                return Ok(Some(entry));
            }
            let op = match &owed {
                Some(op) => op.clone(),
                None => match build(&known.state)? {
                    Some(op) => op,
                    None => return Ok(None),
                },
            };
            known.state.check(&op)?;
            let entry = Entry {
                v: op.version(),
                n: known.state.head() + 1,
                prev: known.state.head_hash,
                write_id,
                at_ms: chrono::Utc::now().timestamp_millis(),
                op,
            };
            self.reached("log.before").await;
            let bytes = Bytes::from(entry.to_bytes(self.layout.entry(entry.n).as_ref())?);
            let began = Instant::now();
            let mut slot = self.create_slot(&entry, bytes.clone()).await?;
            let created = matches!(slot, Slot::Ours);
            if created {
                self.reached("log.created").await;
                let others = known.own.others_are_near();
                let settle = others.then(|| began.elapsed());
                slot = self.read_back(&entry, settle).await?;
            }
            match slot {
                Slot::Ours => {
                    self.reached("log.after").await;
                    self.apply(&mut known, &entry, Digest::of(&bytes))?;
                    known.own.committed(&entry, owed.is_some());
                    self.write_view(&mut known).await;
                    self.reached("log.viewed").await;
                    if owed.is_none() {
                        return Ok(Some(entry));
                    }
                    write_id = WriteId::new(self.options.ids.next());
                }
                Slot::Other(other, hash) => {
                    let followed = self.follow_other(&mut known, &other, hash).await;
                    if !created || owed.is_some() {
                        followed?;
                        continue;
                    }
                    match followed {
                        // Whether our entry counts in the end depends on the writer that mends the
                        // log.
                        Err(e) if e.is_log_damage() => {
                            return Err(CommitUnknown::of(&entry, e.to_string()).into());
                        }
                        other => other?,
                    }
                    tried.push(entry);
                }
            }
        }
    }

    /// Tries to create one entry of the log until it is known whose entry is there.
    ///
    /// Only a plain success is believed: a gateway's 503 after the commit makes the client repeat
    /// its request, lose against itself and report that the object exists already; a 409 is
    /// reported in the same way though nothing was written; and an answer may be lost. So after any
    /// other answer the slot is read, and the write id in it decides.
    async fn create_slot(&self, entry: &Entry, bytes: Bytes) -> Result<Slot> {
        let key = self.layout.entry(entry.n);
        let retry = self.io.retry();
        let end = Instant::now() + retry.deadline;
        let mut ambiguous = false;
        let mut cause = String::from("no answer in time");
        for attempt in 0..u32::MAX {
            let until = match self.may_write(entry, end).await {
                Ok(Ok(until)) => until,
                Ok(Err(slot)) => return Ok(slot),
                Err(e) if !ambiguous => return Err(e),
                Err(e) => {
                    cause = format!("{cause}; then: {e}");
                    break;
                }
            };
            let mut hopeless = false;
            match tokio::time::timeout_at(until, self.try_slot(&key, bytes.clone())).await {
                Ok(Ok(())) => return Ok(Slot::Ours),
                Err(_) => ambiguous = true,
                Ok(Err(error)) => {
                    hopeless = is_permanent(&error);
                    let empty = hopeless
                        && !ambiguous
                        && matches!(self.read_slot(entry.n).await, Ok(Seen::Empty));
                    if empty {
                        // No earlier try can have landed, and this one was turned away and left
                        // nothing.
                        return Err(Error::storage("write", &key, error));
                    }
                    ambiguous |= !hopeless;
                    cause = Failure::new(&error).to_string();
                }
            }
            match self.read_slot(entry.n).await {
                // In a local folder the entry may be there although syncing its folder failed.
                Ok(Seen::Entry(other, hash)) => match self.sync_log() {
                    Ok(()) => return Ok(whose(entry, other, hash)),
                    Err(e) => cause = format!("{cause}; then: {e}"),
                },
                Ok(Seen::Empty) if !hopeless => {}
                Ok(Seen::Empty) => break,
                Err(e) => cause = format!("{cause}; reading it back: {e}"),
            }
            let pause = retry.pause(attempt, entry.write_id.spread() ^ u64::from(attempt));
            if attempt + 1 >= retry.attempts.max(2) || Instant::now() + pause >= end {
                break;
            }
            tokio::time::sleep(pause).await;
        }
        Err(CommitUnknown::of(entry, cause).into())
    }

    async fn try_slot(&self, key: &Path, bytes: Bytes) -> object_store::Result<()> {
        match self.creates_entries() {
            true => self.io.create_once(key, bytes).await,
            false => self.io.put_once(key, bytes).await,
        }
    }

    /// Finds out whether a write is in the log, and makes sure that it stays so: if its slot is
    /// still empty, a fence takes it, after which the write can never land.
    pub(crate) async fn resolve(&self, unknown: &CommitUnknown) -> Result<Option<Entry>> {
        let retry = self.io.retry();
        let end = Instant::now() + retry.deadline;
        for attempt in 0.. {
            if let Seen::Entry(entry, _) = self.read_slot(unknown.slot).await? {
                self.sync_log()?;
                let ours = entry.write_id == unknown.write_id;
                let mut known = self.known.lock().await;
                self.refresh(&mut known).await?;
                if ours {
                    // From now on the entry counts as acknowledged.
                    known.own.committed(&entry, false);
                }
                return Ok(ours.then_some(*entry));
            }
            let pause = retry.pause(attempt, unknown.write_id.spread());
            if attempt > 1 && Instant::now() + pause >= end {
                break;
            }
            if attempt > 0 {
                tokio::time::sleep(pause).await;
            }
            let fence = Op::Fence { against: unknown.write_id };
            let slot = unknown.slot;
            self.append(|state| Ok((state.head() < slot).then(|| fence.clone()))).await?;
        }
        Err(unknown.clone().into())
    }

    /// In a local folder: makes sure that entries which other processes created are on disk before
    /// they are relied on.
    pub(crate) fn sync_log(&self) -> Result<()> {
        self.folder.as_ref().map_or(Ok(()), |folder| folder.sync_names(&self.layout.log()))
    }

    /// Stores a view if the last one is old. It is a hint: failing to write it is no failure.
    async fn write_view(&self, known: &mut Known) {
        if known.state.head() >= known.viewed + VIEW_EVERY {
            view::write(self, &known.state).await;
            known.viewed = known.state.head();
        }
    }
}

fn seen(read: Result<(Entry, Digest)>) -> Result<Seen> {
    match read {
        Ok((entry, hash)) => Ok(Seen::Entry(Box::new(entry), hash)),
        Err(e) if e.is_missing() => Ok(Seen::Empty),
        Err(e) => Err(e),
    }
}

pub(crate) fn whose(ours: &Entry, other: Box<Entry>, hash: Digest) -> Slot {
    if other.write_id == ours.write_id { Slot::Ours } else { Slot::Other(other, hash) }
}
