//! `retire`: takes checkpoints off the list, and deletes nothing.

use std::num::NonZeroUsize;

use clap::Args;
use s4weights::store::{Best, Checkpoint, CheckpointId, Retention, State};
use serde::Serialize;

use super::{StoreArgs, select, text};
use crate::error::{Failure, Result};
use crate::{say, to_json};

/// What to retire: checkpoints by name, or what rules do not keep.
#[derive(Args)]
pub(crate) struct Choice {
    /// Steps or ids
    #[arg(value_name = "CHECKPOINT", conflicts_with_all = ["keep_last", "keep_every", "keep_best"])]
    which: Vec<String>,
    /// Keep the newest N
    #[arg(long, value_name = "N")]
    keep_last: Option<NonZeroUsize>,
    /// Keep steps that are multiples of K
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    keep_every: Option<u64>,
    /// Keep the best checkpoints by a metric, such as loss:3:min or accuracy:1:max; may be repeated
    #[arg(long, value_name = "METRIC:COUNT:min|max", value_parser = best)]
    keep_best: Vec<Best>,
}

fn best(text: &str) -> std::result::Result<Best, String> {
    let form = || "expected METRIC:COUNT:min or METRIC:COUNT:max".to_owned();
    let mut parts = text.rsplitn(3, ':');
    let larger = match parts.next() {
        Some("max") => true,
        Some("min") => false,
        _ => return Err(form()),
    };
    let count = parts.next().and_then(|n| n.parse::<NonZeroUsize>().ok()).ok_or_else(form)?.get();
    let metric = parts.next().filter(|m| !m.is_empty()).ok_or_else(form)?.to_owned();
    Ok(Best { metric, count, larger })
}

#[derive(Serialize)]
struct Retired {
    dry_run: bool,
    retired: Vec<Gone>,
    kept: usize,
}

#[derive(Serialize)]
struct Gone {
    step: u64,
    id: CheckpointId,
}

/// `retire`
pub(crate) fn retire(args: &StoreArgs, choice: &Choice, reason: &str, dry_run: bool) -> Result<()> {
    let by_rules = choice.which.is_empty();
    if by_rules
        && choice.keep_last.is_none()
        && choice.keep_every.is_none()
        && choice.keep_best.is_empty()
    {
        return Err(Failure::Usage(
            "name checkpoints to retire, or rules for those to keep: --keep-last, --keep-every, --keep-best"
                .into(),
        ));
    }
    let store = args.open()?;
    let state = store.state()?;
    let gone = if by_rules {
        let policy = choice.policy();
        let wrong = |e| Failure::Usage(format!("{}: {e}", store.name()));
        // Report a mistyped metric even if nothing would be retired this time.
        policy.check_metrics(&state).map_err(wrong)?;
        match dry_run || !reason.is_empty() {
            true => policy.plan(&state).map_err(wrong)?.retire,
            false => store.apply_retention(&policy)?,
        }
    } else {
        let found = select::find_all(store.name(), &state, &choice.which)?;
        let ids: Vec<_> = found.iter().map(Checkpoint::id).collect();
        obstacle(&state, &found)?;
        ids
    };
    // Rules for which no reason is given were applied by the store itself.
    let is_done = dry_run || gone.is_empty() || by_rules && reason.is_empty();
    if !is_done {
        store.retire(&gone, reason)?;
    }
    let step = |id: &CheckpointId| state.get(*id).map_or(0, Checkpoint::step);
    let mut retired: Vec<_> = gone.iter().map(|id| Gone { step: step(id), id: *id }).collect();
    retired.sort_by_key(|gone| (gone.step, gone.id));
    let kept = state.list().len().saturating_sub(retired.len());
    let report = Retired { dry_run, retired, kept };
    say(&if args.json { to_json(&report)? } else { as_text(store.name(), report) })
}

impl Choice {
    fn policy(&self) -> Retention {
        Retention {
            keep_last: self.keep_last.map(NonZeroUsize::get),
            keep_every: self.keep_every,
            best: self.keep_best.clone(),
            protect: vec![],
        }
    }
}

/// Explains in terms of steps why some checkpoints cannot be retired. (The log has the last word,
/// also about what other writers do meanwhile.)
fn obstacle(state: &State, going: &[Checkpoint]) -> Result<()> {
    if let Some(pinned) = going.iter().find(|c| c.pinned) {
        let step = pinned.step();
        let hint = "unpin it with `s4w store unpin`";
        return Err(Failure::Conflict(format!("step {step} is pinned; {hint}")));
    }
    let ids: Vec<_> = going.iter().map(Checkpoint::id).collect();
    let needs =
        |c: &&Checkpoint| c.base.is_some_and(|b| ids.contains(&b)) && !ids.contains(&c.id());
    let list = state.list();
    let Some(child) = list.iter().copied().find(needs) else { return Ok(()) };
    let parent = child.base.and_then(|b| state.get(b)).map_or(0, Checkpoint::step);
    let step = child.step();
    Err(Failure::Conflict(format!(
        "step {parent} is needed by step {step}, which is a delta of it: retire both, \
         or make step {step} a base first with `s4w store rebase`"
    )))
}

fn as_text(store: &str, report: Retired) -> String {
    let steps: Vec<_> = report.retired.iter().map(|g| g.step.to_string()).collect();
    let s = if steps.len() == 1 { "" } else { "s" };
    let kept = text::count(report.kept, "checkpoint");
    match (steps.is_empty(), report.dry_run) {
        (true, _) => format!("{store}: nothing to retire; {kept} in the list"),
        (false, true) => {
            format!("{store}: would retire step{s} {}; {kept} would be left", steps.join(", "))
        }
        (false, false) => format!(
            "{store}: retired step{s} {}; {kept} left. `s4w store gc` deletes their data once the \
             grace period is over",
            steps.join(", ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::best;

    #[test]
    fn rules_for_the_best() {
        let b = best("val:loss:3:min").unwrap();
        assert_eq!((b.metric.as_str(), b.count, b.larger), ("val:loss", 3, false));
        for bad in ["loss", "loss:3", ":3:min", "loss:x:min", "loss:3:least", "3:max"] {
            assert!(best(bad).unwrap_err().contains("METRIC:COUNT:min"), "{bad}");
        }
    }
}
