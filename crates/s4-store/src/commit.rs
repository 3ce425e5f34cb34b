//! Makes commits safe on unsafe object stores, by checks before and after.
//!
//! A server that checks whether an object exists and then writes it can tell each of two writers
//! that it created the same entry; the last write stays. And a folder can be removed, or a bucket
//! emptied, while a writer has the store open. So a writer checks the newest entries that it knows
//! before it creates the next one, and reads both back before it acknowledges anything.
//!
//! Of two versions of an entry, the valid one is the one whose hash the next entry names. Any
//! writer that knows its bytes puts it back, and the other writer commits again after it. A writer
//! lists again any checkpoint that it acknowledged and no longer finds in the log.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use s4_format::Digest;
use tokio::time::Instant;

use crate::entry::{Entry, Op};
use crate::error::{CommitUnknown, Error, LogDamage, Result};
use crate::inner::Inner;
use crate::known::Known;
use crate::log::{Seen, Slot, whose};
use crate::state::State;

/// Time limits for other writers to put the log in order: before and after a commit.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(60));
/// Number of entries before the newest that are read again: if no other writers are active, and if some
/// are.
const BEFORE: (u64, u64) = (1, 4);
/// Number of entries after one that does not fit that are read, to find out what should be there.
const AFTER: u64 = 8;
/// The least and the most time to wait for a late write of another writer.
const SETTLE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

impl CommitUnknown {
    pub(crate) fn of(entry: &Entry, cause: String) -> Self {
        let checkpoint = entry.op.published();
        Self { write_id: entry.write_id, slot: entry.n, checkpoint, cause }
    }
}

/// Whether an operation that was committed has left no trace in the state.
fn is_lost(state: &State, op: &Op) -> bool {
    match op {
        Op::Publish(publish) => state.get(publish.id).is_none() && state.dead(publish.id).is_none(),
        Op::Retire { .. } | Op::Abort { .. } | Op::Unretire { .. } => state.check(op).is_ok(),
        Op::Pin { .. } | Op::Unpin { .. } | Op::Fence { .. } => false,
    }
}

/// Entries by their numbers.
type Entries = BTreeMap<u64, (Box<Entry>, Digest)>;

impl Inner {
    /// Brings `known` up to date, and makes sure that what was known before is still there.
    pub(crate) async fn be_sure(&self, known: &mut Known) -> Result<()> {
        let (head, hash) = (known.state.head(), known.state.head_hash);
        let before = if known.own.others_are_near() { BEFORE.1 } else { BEFORE.0 };
        let before = head.saturating_sub(before).max(1);
        let newest = head.max(1);
        let (store, entries) = futures::join!(
            self.check_repo(),
            self.read_entries(before.min(newest)..head + 3, newest),
        );
        store?;
        let mut entries = entries?;
        if self.mend(&mut entries).await? {
            known.own.others = Some(Instant::now());
        }
        let same = match entries.get(&head) {
            _ if head == 0 => true,
            Some((_, found)) => *found == hash,
            None => return Err(self.gone(head)),
        };
        if !same || known.own.reread {
            return self.recover(known).await;
        }
        let (next, later) = (entries.contains_key(&(head + 1)), entries.contains_key(&(head + 2)));
        if next || later {
            known.own.others = Some(Instant::now());
            match self.advance(known).await {
                Err(e) if e.is_log_damage() => return self.recover(known).await,
                other => other?,
            }
            return self.check_ends_here(known).await;
        }
        Ok(())
    }

    /// Checks that the log really ends with the newest known entry. If only the next entry has been lost, a process
    /// that has not read it yet would otherwise write another one in its place, without knowing the later ones.
    pub(crate) async fn check_ends_here(&self, known: &Known) -> Result<()> {
        let next = known.state.head() + 1;
        let later = self.read_slot(next + 1).await.map_err(|e| self.unreadable(next + 1, e))?;
        let Seen::Entry(later, _) = later else { return Ok(()) };
        // Others may have created both in the meantime, and a network file system may show the first one later.
        let retry = self.io.retry();
        let end = Instant::now() + retry.deadline.min(PATIENCE.0);
        for attempt in 0.. {
            self.sync_log()?;
            if !matches!(self.read_slot(next).await, Ok(Seen::Empty)) {
                break;
            }
            let pause = retry.pause(attempt, later.write_id.spread());
            if Instant::now() + pause >= end {
                return Err(self.damaged(LogDamage::Missing { first: next, last: next }));
            }
            tokio::time::sleep(pause).await;
        }
        Ok(())
    }

    /// Checks that the store is still there, by reading its newest known entry. If that is a
    /// different one now, the next commit deals with it.
    pub(crate) async fn check_there(&self) -> Result<()> {
        let head = self.known.lock().await.state.head();
        if head == 0 {
            return self.check_repo().await;
        }
        match self.read_slot(head).await.map_err(|e| self.unreadable(head, e))? {
            Seen::Entry(..) => Ok(()),
            Seen::Empty => Err(self.gone(head)),
        }
    }

    pub(crate) fn gone(&self, head: u64) -> Error {
        self.changed(&format!("log entry {head} has disappeared"), false)
    }

    /// The error for a store that is not as this process knows it.
    pub(crate) fn changed(&self, what: &str, replaced: bool) -> Error {
        Error::Gone { place: self.name.clone(), what: what.to_owned(), replaced }
    }

    /// Reads entries in parallel. Entries may be absent; damage is an error only from `newest` on.
    async fn read_entries(&self, numbers: Range<u64>, newest: u64) -> Result<Entries> {
        let mut entries = Entries::new();
        for (n, seen) in self.read_each(numbers).await {
            match seen.map_err(|e| self.unreadable(n, e)) {
                Ok(Seen::Entry(entry, hash)) => drop(entries.insert(n, (entry, hash))),
                Ok(Seen::Empty) => {}
                Err(e) if n < newest && e.is_log_damage() => {}
                Err(e) => return Err(e),
            }
        }
        Ok(entries)
    }

    /// From the newest entry backwards, puts back each entry whose hash is not the one that the
    /// next entry names. Returns whether anything was put back.
    async fn mend(&self, entries: &mut Entries) -> Result<bool> {
        let (mut mended, mut after) = (false, None);
        for (n, (entry, hash)) in entries.iter_mut().rev() {
            if let Some((next, wanted)) = after
                && next == *n + 1
                && wanted != *hash
            {
                let Some(right) = self.put_back(*n, wanted).await? else { break };
                (*entry, *hash) = (right, wanted);
                mended = true;
            }
            after = Some((*n, entry.prev));
        }
        Ok(mended)
    }

    /// Puts back entry `n`, which another writer overwrote after the next entry had been written:
    /// that one names the hash `wanted`. The other writer finds out and commits again after the
    /// entries that are there. Returns the entry, if its bytes are known and the next entry is
    /// still there.
    async fn put_back(&self, n: u64, wanted: Digest) -> Result<Option<Box<Entry>>> {
        let Some(bytes) = self.recent.get(n, wanted) else { return Ok(None) };
        self.check_repo().await?;
        let key = self.layout.entry(n);
        let entry = Box::new(Entry::parse(key.as_ref(), n, &bytes)?);
        match self.read_slot(n).await? {
            Seen::Empty => return Ok(None),
            Seen::Entry(_, found) if found == wanted => return Ok(Some(entry)),
            Seen::Entry(..) => {}
        }
        match self.read_slot(n + 1).await? {
            Seen::Entry(next, _) if next.prev == wanted => {}
            _ => return Ok(None),
        }
        tracing::error!(
            store = %self.name, entry = n,
            "another writer overwrote a log entry, which the server must not allow; restoring the entry. Use one \
             writer at a time with this server"
        );
        self.io.put(&key, bytes).await?;
        Ok(Some(entry))
    }

    /// Reads the log again after an entry turned out to differ from the known one, and notes which
    /// of its own commits this process must repeat.
    async fn recover(&self, known: &mut Known) -> Result<()> {
        self.check_repo().await?;
        tracing::error!(
            store = %self.name, entry = known.state.head(),
            "the log has changed: the server let a writer overwrite an entry"
        );
        // From the first entry: the stored view may end with the lost entry.
        let state = self.replay_in_order().await?;
        // Nothing is replaced before all is read: if a read fails, the next commit starts over.
        let mut lost = vec![];
        for entry in &known.own.done {
            lost.push(!self.is_there(entry).await? && is_lost(&state, &entry.op));
        }
        known.state = Arc::new(state);
        known.viewed = 0;
        known.own.others = Some(Instant::now());
        known.own.reread = false;
        for (entry, lost) in std::mem::take(&mut known.own.done).into_iter().zip(lost) {
            let list = if lost { &mut known.own.owed } else { &mut known.own.done };
            list.push_back(entry);
        }
        Ok(())
    }

    /// Whether the log has this entry, identified by its write id.
    async fn is_there(&self, entry: &Entry) -> Result<bool> {
        let seen = self.read_slot(entry.n).await?;
        Ok(matches!(seen, Seen::Entry(found, _) if found.write_id == entry.write_id))
    }

    /// The earlier attempt whose entry is in the log after all, if there is one: whatever overwrote it was
    /// itself overwritten.
    pub(crate) async fn landed(&self, known: &Known, tried: &[Entry]) -> Result<Option<Entry>> {
        for entry in tried {
            if entry.n <= known.state.head() && self.is_there(entry).await? {
                return Ok(Some(entry.clone()));
            }
        }
        Ok(None)
    }

    /// Replays the log. Where an entry does not follow the one before it, mends the log or waits
    /// for another writer to do so.
    async fn replay_in_order(&self) -> Result<State> {
        let end = Instant::now() + self.io.retry().deadline.min(PATIENCE.0);
        let mut pause = SETTLE.0;
        loop {
            let (n, error) = match self.replay().await {
                Err(e @ Error::LogDamaged { damage: LogDamage::Unlinked { entry }, .. }) => {
                    (entry, e)
                }
                other => return other,
            };
            let around = n.saturating_sub(BEFORE.1).max(1)..n + AFTER;
            let mended = self.mend(&mut self.read_entries(around, u64::MAX).await?).await?;
            if Instant::now() + pause >= end {
                return Err(error);
            }
            if !mended {
                tokio::time::sleep(pause).await;
                pause += SETTLE.0;
            }
        }
    }

    /// The next operation that must be committed again.
    pub(crate) async fn owed(&self, known: &mut Known) -> Result<Option<Op>> {
        while let Some(entry) = known.own.owed.front().cloned() {
            let op = entry.op.clone();
            if is_lost(&known.state, &op) {
                let possible = known.state.check(&op).map_err(|e| e.to_string());
                // A sweep may have deleted what is not listed any more.
                let Some(about) = op.listed() else { return Ok(Some(op)) };
                let whole = match possible {
                    Ok(()) => self.check_whole(about).await.map_err(|e| e.to_string()),
                    Err(e) => Err(e),
                };
                let Err(why) = whole else { return Ok(Some(op)) };
                known.own.owed.pop_front();
                return Err(Error::SaveLost { place: self.name.clone(), id: about.id, why });
            }
            // The operation is in the log again.
            known.own.owed.pop_front();
            known.own.done.push_back(entry);
        }
        Ok(None)
    }

    /// Applies the entry of a writer who was faster.
    pub(crate) async fn follow_other(
        &self,
        known: &mut Known,
        other: &Entry,
        hash: Digest,
    ) -> Result<()> {
        known.own.others = Some(Instant::now());
        match self.apply(known, other, hash) {
            // It follows a different entry than the one that was there a moment ago.
            Err(e) if e.is_log_damage() => self.recover(known).await,
            other => other,
        }
    }

    /// Until when `entry` may be written. In a store for one writer at a time the lease limits
    /// that, and if the slot is already taken, what it holds is returned instead.
    pub(crate) async fn may_write(
        &self,
        entry: &Entry,
        end: Instant,
    ) -> Result<std::result::Result<Instant, Slot>> {
        let Some(lease) = &self.lease else { return Ok(Ok(end)) };
        if let Seen::Entry(other, hash) = self.read_slot(entry.n).await? {
            return Ok(Err(whose(entry, other, hash)));
        }
        // Confirmed last, so that nothing comes between this check and the write.
        Ok(Ok(end.min(lease.confirm().await?)))
    }

    /// Reads a created entry and its neighbours back, and puts back the entry before it if another writer overwrote
    /// that. `settle`: how long the create took, if other writers are active; it determines how long to wait for
    /// their late writes.
    pub(crate) async fn read_back(&self, entry: &Entry, settle: Option<Duration>) -> Result<Slot> {
        let settle = settle.filter(|_| self.folder.is_none());
        if let Some(took) = settle {
            tokio::time::sleep((took * 3).clamp(SETTLE.0, SETTLE.1)).await;
        }
        let retry = self.io.retry();
        let end = Instant::now() + retry.deadline.min(PATIENCE.1);
        let mut failed = 0;
        loop {
            let cause = match self.look_back(entry).await {
                Ok(Look::Slot(slot)) => return Ok(self.warn_if_taken(entry, slot)),
                Ok(Look::Overtook) => "the next entry does not follow this one".to_owned(),
                Ok(Look::Unlinked) => match self.put_back(entry.n - 1, entry.prev).await {
                    Ok(put) => {
                        failed += u32::from(put.is_none());
                        "the previous entry is another writer's".to_owned()
                    }
                    Err(e) => {
                        failed += 1;
                        format!("could not restore the previous entry: {e}")
                    }
                },
                Ok(Look::Nothing) => {
                    failed += 1;
                    "it was acknowledged, but is missing".to_owned()
                }
                Err(e) => {
                    failed += 1;
                    format!("could not read it back: {e}")
                }
            };
            let pause = retry.pause(failed, entry.write_id.spread()).max(SETTLE.0 / 4);
            if failed >= retry.attempts.max(2) || Instant::now() + pause >= end {
                return Err(CommitUnknown::of(entry, cause).into());
            }
            tokio::time::sleep(pause).await;
        }
    }

    fn warn_if_taken(&self, entry: &Entry, slot: Slot) -> Slot {
        if !matches!(slot, Slot::Ours) {
            tracing::error!(
                store = %self.name, entry = entry.n,
                "the server reported that it created a log entry, but found another writer's in its place: the \
                 server is not safe for several writers. Nothing was lost, but use one writer at a time"
            );
        }
        slot
    }

    async fn look_back(&self, entry: &Entry) -> Result<Look> {
        let first = entry.n.saturating_sub(1).max(1);
        let mut read: BTreeMap<_, _> =
            self.read_each(first..entry.n + 2).await.into_iter().collect();
        let mut take = |n: u64| read.remove(&n).unwrap_or(Ok(Seen::Empty));
        let (own, next) = (take(entry.n), take(entry.n + 1));
        let before = take(entry.n.wrapping_sub(1));
        let linked = || match (entry.n, before) {
            (0 | 1, _) => Ok(true),
            // Its seal matches: the hash is not the result of damage in transit.
            (_, Ok(Seen::Entry(_, hash))) => Ok(hash == entry.prev),
            (n, Ok(Seen::Empty)) => Err(Error::missing(self.layout.entry(n - 1))),
            (_, Err(e)) => Err(e),
        };
        let Seen::Entry(found, hash) = own? else { return Ok(Look::Nothing) };
        let slot = whose(entry, found, hash);
        if !matches!(slot, Slot::Ours) {
            return Ok(Look::Slot(slot));
        }
        // Our entry may have overwritten one that others have continued from. Then the next entry
        // wins, together with the one before it that it names, which those others restore.
        if let Seen::Entry(next, _) = next?
            && next.prev != hash
        {
            return Ok(Look::Overtook);
        }
        Ok(if linked()? { Look::Slot(Slot::Ours) } else { Look::Unlinked })
    }
}

/// The result of reading back a created entry.
enum Look {
    Nothing,
    Slot(Slot),
    /// Our entry, but the next entry names a different one as its predecessor.
    Overtook,
    /// Our entry, but the entry before it is no longer the one that it names.
    Unlinked,
}
