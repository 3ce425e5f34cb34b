//! What a process knows of the log, and remembers of what it wrote and read there.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use s4_format::Digest;
use tokio::time::Instant;

use crate::entry::Entry;
use crate::error::LogDamage;
use crate::state::State;

/// Number of its newest entries that a process remembers, to commit them again if they are lost.
const REMEMBERED: usize = 16;
/// Other writers count as active for this long after an entry of theirs was seen.
const NEAR: Duration = Duration::from_secs(60);
/// Number of entries whose bytes are kept.
const KEPT: usize = 64;

/// The state as this process knows it.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) state: Arc<State>,
    /// The newest entry that a stored view covers, as far as is known.
    pub(crate) viewed: u64,
    /// What is wrong with the log: only where the store was opened read-only.
    pub(crate) damage: Vec<LogDamage>,
    /// The recent commits of this process.
    pub(crate) own: OwnCommits,
    /// When a damaged log was read.
    pub(crate) read_at: Option<Instant>,
}

impl Known {
    pub(crate) fn new(state: State, viewed: u64) -> Self {
        Self { state: Arc::new(state), viewed, ..Self::default() }
    }
}

/// Recent commits of this process, and signs of other writers.
#[derive(Debug, Default)]
pub(crate) struct OwnCommits {
    pub(crate) done: VecDeque<Entry>,
    /// Entries that were acknowledged, are not in the log any more, and must be committed again.
    pub(crate) owed: VecDeque<Entry>,
    /// An entry whose write may still land late, on a server that would let it overwrite a newer object. It is
    /// written again before any other entry, so that a late write changes nothing.
    pub(crate) open: Option<Entry>,
    /// When a new entry of another writer was last seen.
    pub(crate) others: Option<Instant>,
    /// Whether the state was loaded again because the log had changed.
    pub(crate) reread: bool,
}

/// The bytes of recently read entries, in every version that was seen.
#[derive(Debug, Default)]
pub(crate) struct Recent(Mutex<VecDeque<(u64, Digest, Bytes)>>);

impl Recent {
    pub(crate) fn keep(&self, n: u64, hash: Digest, bytes: &Bytes) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.iter().any(|(.., found, _)| *found == hash) {
            return;
        }
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back((n, hash, bytes.clone()));
    }

    pub(crate) fn get(&self, n: u64, hash: Digest) -> Option<Bytes> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().find(|kept| (kept.0, kept.1) == (n, hash)).map(|kept| kept.2.clone())
    }
}

impl OwnCommits {
    /// Whether other writers are active.
    pub(crate) fn others_are_near(&self) -> bool {
        self.others.is_some_and(|at| at.elapsed() < NEAR)
    }

    pub(crate) fn committed(&mut self, entry: &Entry, owed: bool) {
        if owed {
            tracing::error!(
                entry = entry.n, what = ?entry.op.published(),
                "another writer had overwritten an acknowledged log entry, which the server must not allow; the \
                 change was committed again. Use one writer at a time with this server"
            );
            self.owed.pop_front();
        }
        self.done.push_back(entry.clone());
        if self.done.len() > REMEMBERED {
            self.done.pop_front();
        }
    }
}
