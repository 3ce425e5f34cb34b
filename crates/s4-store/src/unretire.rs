//! Lists retired checkpoints again, until a sweep begins to delete their data.
//!
//! Before a sweep deletes any data of a retired checkpoint, it gives the checkpoint up in the log
//! (`abort`). An `unretire` after that has no effect, nor has an `abort` after an `unretire`. So the
//! order of the log decides which came first, and the loser changes nothing.

use std::collections::BTreeMap;

use futures::{StreamExt, TryStreamExt};
use s4_format::limits::MAX_CHAIN;

use crate::entry::{Entry, Op, Publish};
use crate::error::{Conflict, Error, Result};
use crate::id::CheckpointId;
use crate::inner::Inner;
use crate::layout::Part;
use crate::state::{Checkpoint, End, State};
use crate::store::Store;

/// A state of [`Conflict::NotRetired`]: nothing says which checkpoint it is a delta of.
const NOT_DESCRIBED: &str = "retired, and the log entry that described it was lost before a repair";

/// How a checkpoint was listed before it was retired.
struct Before {
    about: Publish,
    order: u64,
    at_ms: i64,
}

impl Store {
    /// Lists retired checkpoints again, with their metrics, tags and position in time, and their
    /// ancestors if these are retired, too. Returns what was listed, a base before its deltas.
    /// Reads the whole log.
    ///
    /// # Errors
    /// [`Error::Conflict`] with [`Conflict::NotRetired`] if one is not retired, a sweep has given it up, or the
    /// entry that described it was lost before a repair; [`Error::Missing`] or [`Error::Corrupt`] if its data is not there as it was stored. Those
    /// that were listed before the error stay listed.
    pub async fn unretire(&self, ids: &[CheckpointId]) -> Result<Vec<Checkpoint>> {
        let inner = &self.inner;
        inner.ensure_writer().await?;
        // Reads from the first entry on: a view of an earlier version does not know what a sweep
        // gave up.
        let (state, mut before) = history(&inner.entries(1).await?);
        let order = wanted(&state, &before, ids)?;
        for id in &order {
            if let Some(before) = before.get(id) {
                inner.check_whole_again(&before.about).await?;
            }
        }
        let mut listed = Vec::new();
        for id in order {
            let Some(Before { about, order, at_ms }) = before.remove(&id) else { continue };
            let op = Op::Unretire { about: Box::new(about), order, published_ms: at_ms };
            inner.append(|_| Ok(Some(op.clone()))).await?;
            let known = inner.known.lock().await;
            listed.extend(known.state.get(id).cloned());
        }
        Ok(listed)
    }
}

/// The state, and how each checkpoint was last listed.
fn history(entries: &[Entry]) -> (State, BTreeMap<CheckpointId, Before>) {
    let mut all: BTreeMap<CheckpointId, Before> = BTreeMap::new();
    let mut state = State::default();
    for entry in entries {
        if state.check(&entry.op).is_err() {
            continue;
        }
        state.follow(entry);
        let (about, at_ms) = match &entry.op {
            Op::Publish(about) => (about, entry.at_ms),
            Op::Unretire { about, published_ms, .. } => (&**about, *published_ms),
            _ => continue,
        };
        if about.is_bare() {
            continue;
        }
        if let Some(order) = state.get(about.id).map(|c| c.order) {
            all.insert(about.id, Before { about: about.clone(), order, at_ms });
        }
    }
    state.settle();
    (state, all)
}

/// The checkpoints that must be listed for `ids` to be usable, a base before its deltas.
fn wanted(
    state: &State,
    before: &BTreeMap<CheckpointId, Before>,
    ids: &[CheckpointId],
) -> Result<Vec<CheckpointId>> {
    let mut order: Vec<CheckpointId> = Vec::new();
    for id in ids {
        let mut chain = Vec::new();
        let mut next = Some(*id);
        while let Some(id) = next.filter(|id| !order.contains(id) && chain.len() < MAX_CHAIN) {
            match state.dead(id).map(|d| d.how) {
                Some(End::Retired) if before.contains_key(&id) => chain.push(id),
                // The rest of the chain is still listed.
                None if !chain.is_empty() && state.get(id).is_some() => break,
                how => {
                    let listed = if state.get(id).is_some() { "listed" } else { "unknown" };
                    let state = match how {
                        Some(End::Aborted) => "given up",
                        Some(End::Retired) => NOT_DESCRIBED,
                        how => how.map_or(listed, End::word),
                    };
                    return Err(Conflict::NotRetired { id, state }.into());
                }
            }
            let parent = before.get(&id).and_then(|b| b.about.parent);
            next = parent.map(|parent| state.stands_for(parent.id));
        }
        order.extend(chain.into_iter().rev());
    }
    Ok(order)
}

impl Inner {
    /// Checks that a checkpoint's manifest is as the log says, and that its objects have the sizes
    /// that the manifest says.
    async fn check_whole_again(&self, about: &Publish) -> Result<()> {
        let manifest = self.manifest_of(about).await?;
        let look = |(n, len)| async move {
            let key = self.layout.part(about.id, Part::Data(n));
            match self.io.head(&key).await? {
                meta if meta.size == len => Ok(()),
                meta => {
                    let what =
                        format!("object has {} bytes, but the manifest says {len}", meta.size);
                    Err(Error::corrupt(key, what))
                }
            }
        };
        let objects: Vec<_> = about.numbers().zip(manifest.objects.iter().map(|o| o.len)).collect();
        let looks = futures::stream::iter(objects).map(look).buffer_unordered(self.concurrency());
        looks.try_collect::<()>().await
    }
}
