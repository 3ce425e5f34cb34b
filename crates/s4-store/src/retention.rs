//! Retention: which checkpoints to keep.

use std::collections::{BTreeMap, BTreeSet};

use crate::entry::MAX_IDS;
use crate::entry::Op;
use crate::error::{Error, Result};
use crate::id::CheckpointId;
use crate::state::{Checkpoint, State};
use crate::store::Store;

/// A policy. It keeps the union of its rules, the ancestors of kept checkpoints, pinned checkpoints,
/// and always the newest. A policy without rules keeps everything.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Retention {
    /// Keeps this many of the newest.
    pub keep_last: Option<usize>,
    /// Keeps those whose step is a multiple of this.
    pub keep_every: Option<u64>,
    /// Keeps the best by these metrics.
    pub best: Vec<Best>,
    /// Keeps these, as long as they are listed: for example the one that a run was resumed from.
    pub protect: Vec<CheckpointId>,
}

/// The best checkpoints by one metric. Checkpoints without the metric do not count.
#[derive(Debug, Clone, PartialEq)]
pub struct Best {
    /// The metric's name.
    pub metric: String,
    /// How many to keep; of two equal ones, the newer.
    pub count: usize,
    /// Whether a larger number is better.
    pub larger: bool,
}

/// Why a checkpoint stays.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Keep {
    /// It is the newest.
    Newest,
    /// It is one of the newest, by [`Retention::keep_last`].
    Last,
    /// Its step is a multiple of [`Retention::keep_every`].
    Every,
    /// It is among the best by this metric.
    Best(String),
    /// It is pinned.
    Pinned,
    /// The caller protects it.
    Protected,
    /// This checkpoint is kept and needs it.
    NeededBy(CheckpointId),
    /// There are no rules.
    NoRules,
}

/// What a policy decides about a state.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// The checkpoints that stay, with the reasons.
    pub keep: BTreeMap<CheckpointId, Vec<Keep>>,
    /// The checkpoints to retire, deltas before their parents.
    pub retire: Vec<CheckpointId>,
}

impl Retention {
    /// Applies the policy to a state.
    ///
    /// # Errors
    /// [`Error::Argument`] if checkpoints would be retired although no checkpoint has the metric by
    /// which the best are kept: its name may be wrong.
    pub fn plan(&self, state: &State) -> Result<Plan> {
        let list = state.list();
        let mut keep: BTreeMap<CheckpointId, Vec<Keep>> = BTreeMap::new();
        for (checkpoint, why) in self.chosen(&list) {
            keep.entry(checkpoint.id()).or_default().push(why);
        }
        let chosen: Vec<_> = keep.keys().copied().collect();
        for id in chosen {
            // A broken chain, which the rules of the log exclude, keeps nothing further.
            for needed in state.chain(id).unwrap_or_default().iter().skip(1) {
                let why = keep.entry(needed.id()).or_default();
                if !why.iter().any(|w| matches!(w, Keep::NeededBy(_))) {
                    why.push(Keep::NeededBy(id));
                }
            }
        }
        let mut retire: Vec<_> =
            list.iter().map(|c| c.id()).filter(|id| !keep.contains_key(id)).collect();
        let depth = |id: &CheckpointId| state.chain(*id).map_or(0, |chain| chain.len());
        retire.sort_by_cached_key(|id| std::cmp::Reverse(depth(id)));
        if !retire.is_empty() {
            self.check_metrics(state)?;
        }
        Ok(Plan { keep, retire })
    }

    /// Checks that each metric by which the best are kept is one that a listed checkpoint has.
    /// Without listed checkpoints there is nothing to check.
    ///
    /// # Errors
    /// [`Error::Argument`] names a metric that no checkpoint has.
    pub fn check_metrics(&self, state: &State) -> Result<()> {
        let list = state.list();
        if list.is_empty() {
            return Ok(());
        }
        let known: BTreeSet<&str> =
            list.iter().flat_map(|c| c.about.metrics.keys()).map(String::as_str).collect();
        let Some(best) = self.best.iter().find(|best| !known.contains(best.metric.as_str())) else {
            return Ok(());
        };
        let known: Vec<_> = known.into_iter().collect();
        let known = if known.is_empty() { "none".into() } else { known.join(", ") };
        Err(Error::Argument(format!(
            "retention: cannot keep the best checkpoints by `{}`, because no checkpoint has that metric \
             (available: {known}); nothing was retired",
            best.metric
        )))
    }

    /// The checkpoints that the rules keep, each with the rule. `list` is from the oldest to the
    /// newest.
    fn chosen<'a>(&'a self, list: &[&'a Checkpoint]) -> Vec<(&'a Checkpoint, Keep)> {
        let mut chosen = Vec::new();
        chosen.extend(list.last().map(|c| (*c, Keep::Newest)));
        let last = list.iter().rev().take(self.keep_last.unwrap_or(0));
        chosen.extend(last.map(|c| (*c, Keep::Last)));
        let every = self.keep_every.filter(|every| *every > 0);
        let multiple = |c: &&&Checkpoint| every.is_some_and(|every| c.step().is_multiple_of(every));
        chosen.extend(list.iter().filter(multiple).map(|c| (*c, Keep::Every)));
        for best in &self.best {
            chosen.extend(best.of(list).into_iter().map(|c| (c, Keep::Best(best.metric.clone()))));
        }
        chosen.extend(list.iter().filter(|c| c.pinned).map(|c| (*c, Keep::Pinned)));
        let protected = list.iter().filter(|c| self.protect.contains(&c.id()));
        chosen.extend(protected.map(|c| (*c, Keep::Protected)));
        if self.keep_last.is_none() && every.is_none() && self.best.is_empty() {
            chosen.extend(list.iter().map(|c| (*c, Keep::NoRules)));
        }
        chosen
    }
}

impl Best {
    fn of<'a>(&self, list: &[&'a Checkpoint]) -> Vec<&'a Checkpoint> {
        let value = |c: &Checkpoint| c.about.metrics.get(&self.metric).copied();
        let mut ranked: Vec<_> =
            list.iter().rev().filter_map(|c| value(c).map(|v| (v, *c))).collect();
        ranked.sort_by(|a, b| if self.larger { b.0.total_cmp(&a.0) } else { a.0.total_cmp(&b.0) });
        ranked.into_iter().take(self.count).map(|(_, c)| c).collect()
    }
}

impl Store {
    /// Retires the checkpoints that the policy does not keep. Returns their ids; their data stays
    /// until a sweep.
    ///
    /// # Errors
    /// As [`Retention::plan`]; if the log cannot be read or written.
    pub async fn apply_retention(&self, policy: &Retention) -> Result<Vec<CheckpointId>> {
        let mut retired = Vec::new();
        let build = |state: &State| {
            // Planned again for every try: another writer may have published a child.
            let mut ids = policy.plan(state)?.retire;
            ids.truncate(MAX_IDS);
            let op = Op::Retire { ids, reason: "retention".into() };
            Ok(Some(op).filter(|op| !matches!(op, Op::Retire { ids, .. } if ids.is_empty())))
        };
        while let Some(entry) = self.inner.append(build).await? {
            if let Op::Retire { ids, .. } = entry.op {
                retired.extend(ids);
            }
        }
        Ok(retired)
    }
}
