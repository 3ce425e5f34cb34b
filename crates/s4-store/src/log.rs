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
use crate::inner::Inner;
use crate::known::Known;
use crate::state::State;
use crate::view;

/// A view is written when the last known one is this many entries old. Together with a listing,
/// that bounds the cost of opening a store.
pub(crate) const VIEW_EVERY: u64 = 32;

/// The content of a slot of the log after an attempt to create its entry.
pub(crate) enum Slot {
    Ours,
    Other(Box<Entry>, Digest),
}

/// The result of reading a slot of the log.
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
        build: impl FnMut(&State) -> Result<Option<Op>>,
    ) -> Result<Option<Entry>> {
        self.append_after(None, build).await
    }

    /// As [`Inner::append`]. `asked`: the write whose outcome the caller wants to find out by this.
    async fn append_after(
        &self,
        asked: Option<WriteId>,
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
            let open = known.own.open.take();
            let open = open.filter(|e| (e.n, e.prev) == known.state.next());
            let again = open.is_some();
            let entry = match open {
                Some(entry) => entry,
                None => {
                    let op = match &owed {
                        Some(op) => op.clone(),
                        None => match build(&known.state)? {
                            Some(op) => op,
                            None => return Ok(None),
                        },
                    };
                    known.state.check(&op)?;
                    let (n, prev) = known.state.next();
                    let at_ms = chrono::Utc::now().timestamp_millis();
                    Entry { v: op.version(), n, prev, write_id, at_ms, op }
                }
            };
            self.reached("log.before").await;
            let bytes = Bytes::from(entry.to_bytes(self.layout.entry(entry.n).as_ref())?);
            let began = Instant::now();
            known.own.open = (!self.creates_entries()).then(|| entry.clone());
            let mut slot = match self.create_slot(&entry, bytes.clone()).await {
                Err(e) if !again && !matches!(e, Error::CommitUnknown(_)) => {
                    // Nothing was sent, or everything that was sent was refused.
                    known.own.open = None;
                    return Err(e);
                }
                Err(e) if again && asked != Some(entry.write_id) => {
                    return Err(self.nothing_sent(&entry, e));
                }
                other => other?,
            };
            let created = matches!(slot, Slot::Ours);
            if created {
                self.reached("log.created").await;
                let others = known.own.others_are_near();
                let settle = others.then(|| began.elapsed());
                slot = match self.read_back(&entry, settle).await {
                    Err(e) if again && asked != Some(entry.write_id) => {
                        return Err(self.nothing_sent(&entry, e));
                    }
                    other => other?,
                };
            }
            known.own.open = None;
            match slot {
                Slot::Ours => {
                    self.reached("log.after").await;
                    self.apply(&mut known, &entry, Digest::of(&bytes))?;
                    known.own.committed(&entry, owed.is_some() && !again);
                    self.write_view(&mut known).await;
                    self.reached("log.viewed").await;
                    if again {
                        continue;
                    }
                    if owed.is_none() {
                        return Ok(Some(entry));
                    }
                    write_id = WriteId::new(self.options.ids.next());
                }
                Slot::Other(other, hash) => {
                    let followed = self.follow_other(&mut known, &other, hash).await;
                    if !created || owed.is_some() || again {
                        followed?;
                        self.check_ends_here(&known).await?;
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

    /// The error of a commit that was never sent, because an earlier one had to be written again first and that
    /// failed. The earlier one's outcome is still unknown; this one is certainly not in the log.
    fn nothing_sent(&self, earlier: &Entry, error: Error) -> Error {
        match error {
            Error::CommitUnknown(_) => Error::Deadline {
                action: "write again",
                key: self.layout.entry(earlier.n).to_string(),
                limit: self.io.retry().deadline,
                last: Failure::silent(),
            },
            other => other,
        }
    }

    /// Tries to create one entry of the log until it is known whose entry is there.
    ///
    /// Only a plain success is trusted. A gateway's 503 after the commit makes the client repeat its request, lose
    /// against itself, and report that the object exists already; a 409 is reported in the same way although
    /// nothing was written; and an answer may be lost. So after any other answer the slot is read, and the write id
    /// in it decides.
    async fn create_slot(&self, entry: &Entry, bytes: Bytes) -> Result<Slot> {
        let key = self.layout.entry(entry.n);
        let retry = self.io.retry();
        let end = Instant::now() + retry.deadline;
        let mut ambiguous = false;
        let mut cause = String::from("request timed out");
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
            let until = match attempt {
                0 => until.min(Instant::now() + retry.first_try()),
                _ => until,
            };
            let mut hopeless = false;
            match tokio::time::timeout_at(until, self.try_slot(&key, bytes.clone())).await {
                Ok(Ok(())) => return Ok(Slot::Ours),
                Err(_) => ambiguous = true,
                Ok(Err(error)) => {
                    hopeless = self.io.is_permanent(&error);
                    let empty = hopeless
                        && !ambiguous
                        && matches!(self.read_slot(entry.n).await, Ok(Seen::Empty));
                    if empty {
                        // No earlier try can have landed, and this one was refused without effect.
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
                Err(e) => cause = format!("{cause}; could not read it back: {e}"),
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
                // A repair of the log may have restored the entry, under a write id of its own. Where the entry has no
                // effect any more, it has put a fence in its place.
                let ours = match (&entry.op, unknown.checkpoint) {
                    (Op::Fence { against }, _) if *against == unknown.write_id => false,
                    (op, Some(id)) => op.published() == Some(id),
                    _ => entry.write_id == unknown.write_id,
                };
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
            let build = |state: &State| Ok((state.head() < slot).then(|| fence.clone()));
            self.append_after(Some(unknown.write_id), build).await?;
        }
        Err(unknown.clone().into())
    }

    /// In a local folder: makes sure that entries which other processes created are on disk before
    /// they are relied on.
    pub(crate) fn sync_log(&self) -> Result<()> {
        self.folder.as_ref().map_or(Ok(()), |folder| folder.sync_names(&self.layout.log()))
    }

    /// Stores a view if the last one is old. Best effort: a failed write is not an error.
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
