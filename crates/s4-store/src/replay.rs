//! Reading the log: from a view or from its first entry to its end, every entry tied to the one before
//! it by its hash. Anything else is damage, which `salvage` deals with.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use s4_format::Digest;
use tokio::time::Instant;

use crate::entry::Entry;
use crate::error::{Error, LogDamage, Result};
use crate::inner::Inner;
use crate::known::Known;
use crate::log::Seen;
use crate::state::State;
use crate::view;

/// Number of further entries that are requested one by one before the log is listed.
const ONE_BY_ONE: u64 = 4;

/// How often a read-only process reads a damaged log again.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

impl Inner {
    /// Loads the state: from the view if there is a good one, else from the log alone.
    ///
    /// A damaged log is an error, unless the store was opened read-only: then the state is what can
    /// be proved.
    pub(crate) async fn load(&self) -> Result<Known> {
        let view = view::read(self).await;
        let first = match &view {
            None => None,
            Some(view) => match self.replay_from(view.clone()).await {
                Ok(state) => return Ok(Known::new(state, view.head())),
                Err(e) if e.is_log_damage() => Some(e),
                Err(e) => return Err(e),
            },
        };
        let viewed = view.as_ref().map_or(0, State::head);
        let error = match self.replay().await {
            // The view ends with an entry that once was in this log.
            Ok(state) if state.head() < viewed => {
                self.damaged(LogDamage::Missing { first: state.head() + 1, last: viewed })
            }
            Ok(state) => {
                if first.is_some() {
                    tracing::warn!(store = %self.name, "the stored view does not match the log");
                }
                return Ok(Known::new(state, 0));
            }
            Err(e) if e.is_log_damage() => first.unwrap_or(e),
            Err(e) => return Err(e),
        };
        if !self.read_only {
            return Err(error);
        }
        let (state, damage) = self.salvage(view).await?;
        let state = Arc::new(state);
        Ok(Known { state, viewed: 0, damage, read_at: Some(Instant::now()), ..Known::default() })
    }

    /// Warns of a damaged log.
    pub(crate) fn warn_of(&self, damage: &[LogDamage]) {
        if let Some(first) = damage.first() {
            tracing::warn!(
                store = %self.name,
                "the log is damaged: {first}; showing only what can be verified. `s4w store repair` shows what a \
                 repair would lose"
            );
        }
    }

    /// Replays the whole log, trusting nothing else.
    pub(crate) async fn replay(&self) -> Result<State> {
        self.replay_from(State::default()).await
    }

    /// Applies all entries after a state: those that a listing shows are read in parallel, then any
    /// later ones one by one, since the listing may be stale. The first of these that does not
    /// exist is the end. The last entry of the state itself is read, too: it must be the one that
    /// the state ends with.
    async fn replay_from(&self, mut state: State) -> Result<State> {
        let from = state.head();
        let offset = (from > 1).then(|| self.layout.entry(from - 1));
        let listed = self.io.list(&self.layout.log(), offset.as_ref()).await?;
        let listed = listed.iter().filter_map(|m| self.layout.parse_entry(&m.location));
        let mut listed: Vec<u64> = listed.collect();
        listed.sort_unstable();
        let last = listed.last().copied().unwrap_or(from).max(from);
        let read = |n| async move { (n, self.read_entry(n).await) };
        let wanted = futures::stream::iter(from.max(1)..=last);
        let mut entries = wanted.map(read).buffered(self.concurrency());
        while let Some((n, read)) = entries.next().await {
            match read {
                Ok((_, hash)) if n == from && hash == state.head_hash => {}
                Ok(_) if n == from => return Err(self.damaged(LogDamage::Unlinked { entry: n })),
                Ok((entry, hash)) => self.apply_to(&mut state, &entry, hash)?,
                Err(Error::Missing { .. }) => {
                    let there = listed.iter().find(|there| **there > n);
                    let last = there.map_or(n, |there| there - 1);
                    return Err(self.damaged(LogDamage::Missing { first: n, last }));
                }
                Err(e) => return Err(self.unreadable(n, e)),
            }
        }
        drop(entries);
        self.follow(&mut state, u64::MAX).await?;
        state.settle();
        Ok(state)
    }

    /// As [`Inner::refresh`], and makes sure that the newest entry known before is still there: in a store
    /// that was removed nothing is new, either.
    pub(crate) async fn refresh_checked(&self, known: &mut Known) -> Result<()> {
        if !known.damage.is_empty() {
            return self.refresh(known).await;
        }
        let (head, hash) = (known.state.head(), known.state.head_hash);
        let (same, refreshed) = futures::join!(self.still_holds(head, hash), self.refresh(known));
        refreshed?;
        if known.state.head() > head || same? {
            return Ok(());
        }
        self.same_repo().await?;
        self.reload(known).await
    }

    /// Whether entry `n` still has this hash; entry 0 means `repo.json`.
    async fn still_holds(&self, n: u64, hash: Digest) -> Result<bool> {
        if n == 0 {
            return self.same_repo().await.map(|_| true);
        }
        match self.read_slot(n).await {
            Ok(Seen::Entry(_, found)) => Ok(found == hash),
            // Perhaps the whole store is gone.
            Ok(Seen::Empty) => Err(self.same_repo().await.err().unwrap_or_else(|| self.gone(n))),
            Err(Error::Corrupt { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Brings `known` up to date. If the log does not continue as this process knows it, the state
    /// is loaded again: the log may have been repaired, or put back, since.
    pub(crate) async fn refresh(&self, known: &mut Known) -> Result<()> {
        if known.damage.is_empty() {
            match self.advance(known).await {
                Err(e) if e.is_log_damage() => {}
                other => return other,
            }
        } else if known.read_at.is_some_and(|at| at.elapsed() < LOOK_AGAIN) {
            return Ok(());
        }
        self.reload(known).await
    }

    async fn reload(&self, known: &mut Known) -> Result<()> {
        let Known { state, viewed, damage, read_at, .. } = self.load().await?;
        // Warns once per damage, not at every read.
        if damage != known.damage {
            self.warn_of(&damage);
        }
        (known.state, known.viewed, known.damage, known.read_at) = (state, viewed, damage, read_at);
        known.own.reread = true;
        Ok(())
    }

    pub(crate) async fn advance(&self, known: &mut Known) -> Result<()> {
        let n = known.state.head() + 1;
        let (entry, hash) = match self.read_slot(n).await.map_err(|e| self.unreadable(n, e))? {
            Seen::Empty => return Ok(()),
            Seen::Entry(entry, hash) => (entry, hash),
        };
        self.apply(known, &entry, hash)?;
        let state = Arc::make_mut(&mut known.state);
        let followed = self.follow(state, ONE_BY_ONE - 1).await;
        state.settle();
        if !followed? {
            known.state = Arc::new(self.replay_from(State::clone(&known.state)).await?);
        }
        Ok(())
    }

    /// Applies up to `most` further entries, read one by one; returns whether the end was reached.
    async fn follow(&self, state: &mut State, most: u64) -> Result<bool> {
        for _ in 0..most {
            let n = state.head() + 1;
            match self.read_slot(n).await.map_err(|e| self.unreadable(n, e))? {
                Seen::Empty => return Ok(true),
                Seen::Entry(entry, hash) => self.apply_to(state, &entry, hash)?,
            }
        }
        Ok(false)
    }

    /// Applies the next entry, and settles the state for others to see.
    pub(crate) fn apply(&self, known: &mut Known, entry: &Entry, hash: Digest) -> Result<()> {
        let state = Arc::make_mut(&mut known.state);
        let applied = self.apply_to(state, entry, hash);
        state.settle();
        applied
    }

    /// Applies the next of many entries, without settling the state.
    fn apply_to(&self, state: &mut State, entry: &Entry, hash: Digest) -> Result<()> {
        let key = self.layout.entry(entry.n).to_string();
        let applied = state.apply(&key, entry, hash);
        applied.map(drop).map_err(|_| self.damaged(LogDamage::Unlinked { entry: entry.n }))
    }

    pub(crate) fn damaged(&self, damage: LogDamage) -> Error {
        Error::LogDamaged { place: self.name.clone(), damage }
    }

    pub(crate) fn unreadable(&self, entry: u64, error: Error) -> Error {
        match error {
            Error::Corrupt { what, .. } => self.damaged(LogDamage::Unreadable { entry, what }),
            other => other,
        }
    }

    /// All entries from `from` on; if the log is damaged, those that can be read.
    pub(crate) async fn entries(&self, from: u64) -> Result<Vec<Entry>> {
        let (last, damaged) = {
            let mut known = self.known.lock().await;
            self.refresh(&mut known).await?;
            (known.state.head(), !known.damage.is_empty())
        };
        if damaged {
            return Ok(self.read_slots(from).await?.good().cloned().collect());
        }
        let read = |n| async move { self.read_entry(n).await.map(|(entry, _)| entry) };
        let entries = futures::stream::iter(from..=last).map(read).buffered(self.concurrency());
        match entries.try_collect().await {
            // The damage is before the entry that the view ends with, so the state does not show it.
            Err(Error::Corrupt { .. } | Error::Missing { .. }) if self.read_only => {
                // Unless the whole store is gone.
                self.same_repo().await?;
                Ok(self.read_slots(from).await?.good().cloned().collect())
            }
            other => other,
        }
    }
}
