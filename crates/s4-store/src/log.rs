//! Reading the log, and the one way to change a store: creating its next entry.

use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use tokio::time::Instant;

use crate::entry::{Entry, MAX_ENTRY, Op, VERSION};
use crate::error::{CommitUnknown, Error, Result};
use crate::id::{Hash, WriteId};
use crate::io::is_permanent;
use crate::repo::Mode;
use crate::state::State;
use crate::store::Inner;
use crate::view;

/// A view is written when the last one known is this many entries old: with the listing, what
/// opening a store costs at most.
pub(crate) const VIEW_EVERY: u64 = 32;

/// How many further entries are asked for one by one before the log is listed.
const ONE_BY_ONE: u64 = 4;

/// The state as this process knows it.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) state: Arc<State>,
    /// The newest entry that a stored view covers, as far as is known.
    pub(crate) viewed: u64,
}

/// What stands in a slot of the log after a try to create it.
enum Slot {
    Ours,
    Other(Box<Entry>, Hash),
}

/// How a try to read a slot ended.
enum Seen {
    Entry(Box<Entry>, Hash),
    Empty,
}

impl Inner {
    /// Loads the state: from the view if there is a good one, else from the log alone.
    pub(crate) async fn load(&self) -> Result<Known> {
        let mut known = match view::read(self).await {
            Some(state) => Known { viewed: state.head(), state: Arc::new(state) },
            None => Known::default(),
        };
        match self.catch_up(&mut known).await {
            // A view from another log (a folder that was copied over, say) does not fit this one.
            Err(Error::Corrupt { .. }) if known.viewed > 0 => {
                tracing::warn!("the stored view does not fit the log: replaying from the start");
                let mut known = Known { state: Arc::new(self.replay().await?), viewed: 0 };
                self.refresh(&mut known).await?;
                Ok(known)
            }
            Err(e) => Err(e),
            Ok(()) => Ok(known),
        }
    }

    /// Replays the whole log, trusting nothing else.
    pub(crate) async fn replay(&self) -> Result<State> {
        let mut known = Known::default();
        self.catch_up(&mut known).await?;
        Ok(Arc::unwrap_or_clone(known.state))
    }

    /// Applies all entries after `known`: those that a listing shows, side by side, then what came
    /// after it, one by one. A listing may be stale; a missing answer to a read is the end.
    async fn catch_up(&self, known: &mut Known) -> Result<()> {
        let from = known.state.head();
        let offset = (from > 0).then(|| self.layout.entry(from));
        let listed = self.io.list(&self.layout.log(), offset.as_ref()).await?;
        let last = listed.iter().filter_map(|m| self.layout.parse_entry(&m.location)).max();
        let wanted = from + 1..last.map_or(from, |last| last.max(from)) + 1;
        let read = |n| self.read_entry(n);
        let mut entries = futures::stream::iter(wanted).map(read).buffered(self.concurrency());
        while let Some((entry, hash)) = entries.try_next().await.map_err(gap)? {
            self.apply(known, &entry, hash)?;
        }
        drop(entries);
        self.follow(known, u64::MAX).await.map(drop)
    }

    /// Brings `known` up to date.
    pub(crate) async fn refresh(&self, known: &mut Known) -> Result<()> {
        if self.follow(known, ONE_BY_ONE).await? { Ok(()) } else { self.catch_up(known).await }
    }

    /// Reads up to `most` further entries one by one; says whether the end was reached.
    async fn follow(&self, known: &mut Known, most: u64) -> Result<bool> {
        for _ in 0..most {
            let n = known.state.head() + 1;
            match self.read_slot(n).await? {
                Seen::Empty => return Ok(true),
                Seen::Entry(entry, hash) => self.apply(known, &entry, hash)?,
            }
        }
        Ok(false)
    }

    async fn read_entry(&self, n: u64) -> Result<(Entry, Hash)> {
        let key = self.layout.entry(n);
        let parse = |bytes: &Bytes| Ok((Entry::parse(key.as_ref(), n, bytes)?, Hash::of(bytes)));
        self.io.get_checked(&key, MAX_ENTRY, parse).await
    }

    async fn read_slot(&self, n: u64) -> Result<Seen> {
        match self.read_entry(n).await {
            Ok((entry, hash)) => Ok(Seen::Entry(Box::new(entry), hash)),
            Err(e) if e.is_missing() => Ok(Seen::Empty),
            Err(e) => Err(e),
        }
    }

    fn apply(&self, known: &mut Known, entry: &Entry, hash: Hash) -> Result<()> {
        let key = self.layout.entry(entry.n).to_string();
        Arc::make_mut(&mut known.state).apply(&key, entry, hash).map(drop)
    }

    /// Commits what `build` makes of the newest state, as the next entry of the log.
    ///
    /// `build` is called again whenever another writer was faster; its error ends the commit with
    /// nothing changed. Returns `None` if it finds nothing to do.
    pub(crate) async fn append(
        &self,
        mut build: impl FnMut(&State) -> Result<Option<Op>>,
    ) -> Result<Option<Entry>> {
        self.ensure_writer().await?;
        let write_id = WriteId::new(self.options.ids.next());
        let mut known = self.known.lock().await;
        self.refresh(&mut known).await?;
        loop {
            self.sync_log()?;
            let Some(op) = build(&known.state)? else { return Ok(None) };
            known.state.check(&op)?;
            let entry = Entry {
                v: VERSION,
                n: known.state.head() + 1,
                prev: known.state.head_hash,
                write_id,
                at_ms: chrono::Utc::now().timestamp_millis(),
                op,
            };
            self.reached("log.before").await;
            let bytes = Bytes::from(entry.to_bytes(self.layout.entry(entry.n).as_ref())?);
            match self.create_slot(&entry, bytes.clone()).await? {
                Slot::Ours => {
                    self.reached("log.after").await;
                    self.apply(&mut known, &entry, Hash::of(&bytes))?;
                    self.write_view(&mut known).await;
                    self.reached("log.viewed").await;
                    return Ok(Some(entry));
                }
                Slot::Other(other, hash) => self.apply(&mut known, &other, hash)?,
            }
        }
    }

    /// Tries to create one entry of the log until it is known who did.
    ///
    /// No answer is believed but a plain yes: a gateway's 503 after the commit makes the client
    /// repeat its request, lose against itself and report that the object exists already; a 409 is
    /// reported in the same way though nothing was written; and an answer may be lost. So whatever
    /// was answered, the slot is read, and the write id in it decides.
    async fn create_slot(&self, entry: &Entry, bytes: Bytes) -> Result<Slot> {
        let key = self.layout.entry(entry.n);
        let retry = self.io.retry();
        let end = Instant::now() + retry.deadline;
        let mut ambiguous = false;
        let mut cause = String::from("no answer in time");
        for attempt in 0..u32::MAX {
            if self.repo.mode == Mode::Single
                && let Seen::Entry(other, hash) = self.read_slot(entry.n).await?
            {
                return Ok(whose(entry, other, hash));
            }
            let mut hopeless = false;
            match tokio::time::timeout_at(end, self.try_slot(&key, bytes.clone())).await {
                Ok(Ok(())) if self.repo.mode == Mode::Many => return Ok(Slot::Ours),
                Ok(Ok(())) | Err(_) => ambiguous = true,
                Ok(Err(error)) => {
                    hopeless = is_permanent(&error);
                    let empty = hopeless
                        && !ambiguous
                        && matches!(self.read_slot(entry.n).await, Ok(Seen::Empty));
                    if empty {
                        // The very first try was turned away and left nothing.
                        return Err(Error::storage("write", &key, error));
                    }
                    ambiguous |= !hopeless;
                    cause = error.to_string();
                }
            }
            match self.read_slot(entry.n).await {
                // On a local folder the entry may be there and its folder's sync have failed.
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
        let (write_id, slot) = (entry.write_id, entry.n);
        Err(CommitUnknown { write_id, slot, checkpoint: entry.op.published(), cause }.into())
    }

    async fn try_slot(&self, key: &Path, bytes: Bytes) -> object_store::Result<()> {
        match self.repo.mode {
            Mode::Many => self.io.create_once(key, bytes).await,
            Mode::Single => self.io.put_once(key, bytes).await,
        }
    }

    /// All entries from `from` on.
    pub(crate) async fn entries(&self, from: u64) -> Result<Vec<Entry>> {
        let last = {
            let mut known = self.known.lock().await;
            self.refresh(&mut known).await?;
            known.state.head()
        };
        let read = |n| async move { self.read_entry(n).await.map(|(entry, _)| entry) };
        let entries = futures::stream::iter(from..=last).map(read);
        entries.buffered(self.concurrency()).try_collect().await
    }

    /// Finds out whether a write is in the log, and makes sure that it stays so: if its slot is
    /// still empty, a fence takes it, after which the write can never land.
    pub(crate) async fn resolve(&self, unknown: &CommitUnknown) -> Result<Option<Entry>> {
        for _ in 0..self.io.retry().attempts.max(2) {
            if let Seen::Entry(entry, _) = self.read_slot(unknown.slot).await? {
                self.sync_log()?;
                let ours = entry.write_id == unknown.write_id;
                self.refresh(&mut *self.known.lock().await).await?;
                return Ok(ours.then_some(*entry));
            }
            let fence = Op::Fence { against: unknown.write_id };
            let slot = unknown.slot;
            self.append(|state| Ok((state.head() < slot).then(|| fence.clone()))).await?;
        }
        Err(unknown.clone().into())
    }

    /// On a local folder: what other processes created in the log is on disk before it is relied on.
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

fn whose(ours: &Entry, other: Box<Entry>, hash: Hash) -> Slot {
    if other.write_id == ours.write_id { Slot::Ours } else { Slot::Other(other, hash) }
}

/// An entry that was listed, or that has one after it, must be there.
fn gap(error: Error) -> Error {
    match error {
        Error::Missing { key, .. } => {
            Error::Missing { key, context: ": the log has a gap, later entries are there".into() }
        }
        other => other,
    }
}
