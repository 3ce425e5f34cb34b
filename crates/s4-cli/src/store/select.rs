//! Finds the checkpoint that an argument names.

use s4weights::store::{Checkpoint, CheckpointId, Entry, Op, State};

use crate::error::{Failure, Result};

/// What `find` takes, for help texts.
pub(crate) const WHICH: &str = "Step, checkpoint id, or `latest`";

/// The checkpoint that a word names: `latest`, a step (the newest checkpoint of it), or an id.
pub(crate) fn find<'a>(store: &str, state: &'a State, which: &str) -> Result<&'a Checkpoint> {
    if which == "latest" {
        return state.latest().ok_or_else(|| Failure::NotFound(format!("{store} is empty")));
    }
    if let Ok(step) = which.parse::<u64>() {
        return state.at_step(step).ok_or_else(|| no_step(store, state, step));
    }
    let id: CheckpointId = which.parse().map_err(|_| {
        Failure::Usage(format!("`{which}` is not a step, a checkpoint id or `latest`"))
    })?;
    state.get(id).ok_or_else(|| match state.dead(id) {
        Some(dead) => Failure::NotFound(format!(
            "checkpoint {id} is no longer listed: see entry {} of `s4w store log`",
            dead.entry
        )),
        None => Failure::NotFound(format!("{store} has no checkpoint {id}")),
    })
}

/// Finds several checkpoints, without duplicates.
pub(crate) fn find_all(store: &str, state: &State, which: &[String]) -> Result<Vec<Checkpoint>> {
    let mut found: Vec<Checkpoint> = vec![];
    for word in which {
        let one = find(store, state, word)?;
        if !found.iter().any(|c| c.id() == one.id()) {
            found.push(one.clone());
        }
    }
    Ok(found)
}

/// The id that a word names in the whole log: it is an id, or a step, whose last retired checkpoint is meant.
pub(crate) fn find_retired(store: &str, log: &[Entry], which: &str) -> Result<CheckpointId> {
    let Ok(step) = which.parse::<u64>() else {
        let not = |_| Failure::Usage(format!("`{which}` is not a step or a checkpoint id"));
        return which.parse().map_err(not);
    };
    let of_step = |entry: &Entry| match &entry.op {
        Op::Publish(about) if about.step == step => Some(about.id),
        _ => None,
    };
    let ids: Vec<_> = log.iter().filter_map(of_step).collect();
    let retired = log.iter().rev().filter_map(|entry| match &entry.op {
        Op::Retire { ids, .. } => Some(ids),
        _ => None,
    });
    let found = retired.flatten().find(|id| ids.contains(id)).copied();
    found.ok_or_else(|| {
        Failure::NotFound(format!("{store} has no retired checkpoint of step {step}"))
    })
}

fn no_step(store: &str, state: &State, step: u64) -> Failure {
    let steps = || state.list().into_iter().map(Checkpoint::step);
    let below = steps().filter(|s| *s < step).max();
    let above = steps().filter(|s| *s > step).min();
    let near = match (below, above) {
        (Some(a), Some(b)) => format!("; the nearest are {a} and {b}"),
        (Some(a), None) | (None, Some(a)) => format!("; the nearest is {a}"),
        (None, None) => "; it is empty".into(),
    };
    Failure::NotFound(format!("{store} has no checkpoint of step {step}{near}"))
}
