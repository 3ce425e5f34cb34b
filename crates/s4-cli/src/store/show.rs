//! `show`: the store, or one checkpoint.

use s4weights::store::{Checkpoint, State, StoreOptions};
use serde::Serialize;

use super::ls::totals;
use super::row::{Row, stored};
use super::{StoreArgs, select, text};
use crate::error::Result;
use crate::visible::name;
use crate::{inspect, say, to_json};

/// The summary that `show` prints of a whole store.
#[derive(Serialize)]
struct Summary<'a> {
    store: &'a str,
    repo: &'a s4weights::store::Repo,
    log_entries: u64,
    checkpoints: usize,
    bases: usize,
    bytes: u64,
    raw_bytes: u64,
    latest: Option<Row>,
}

/// `show` without a checkpoint: the store itself.
pub(crate) fn summary(args: &StoreArgs) -> Result<()> {
    let store = args.open_to_read(StoreOptions::default())?;
    let state = store.state()?;
    let list = state.list();
    let repo = store.repo();
    if args.json {
        return say(&to_json(&Summary {
            store: store.name(),
            repo,
            log_entries: state.head(),
            checkpoints: list.len(),
            bases: list.iter().filter(|c| c.base.is_none()).count(),
            bytes: list.iter().map(|c| stored(c)).sum(),
            raw_bytes: list.iter().map(|c| c.about.raw_len).sum(),
            latest: state.latest().map(|c| Row::new(&state, c)),
        })?);
    }
    say(&format!("store     {} ({})", store.name(), repo.id))?;
    say(&format!("created   {} by {}", text::when(repo.created_ms), repo.created_by))?;
    say(&format!("writers   {}", super::writing::writers(repo.mode)))?;
    say(&format!("log       {} entries", state.head()))?;
    say(&format!("holds     {}", totals(&list)))?;
    match state.latest() {
        Some(c) => {
            say(&format!("latest    step {} ({})", c.step(), Row::new(&state, c).kind_text()))
        }
        None => Ok(()),
    }
}

/// The details that `show` prints of a checkpoint.
#[derive(Serialize)]
struct Details {
    #[serde(flatten)]
    row: Row,
    /// Steps that restoring it reads, the base last.
    chain_steps: Vec<u64>,
    /// Steps that need it.
    needed_by: Vec<u64>,
    content: s4weights::Inspection,
}

/// `show` with a checkpoint.
pub(crate) fn show(args: &StoreArgs, which: &str, bits: bool) -> Result<()> {
    let store = args.open_to_read(StoreOptions::default())?;
    let state = store.state()?;
    let found = select::find(store.name(), &state, which)?;
    let content = store.load_id(found.id(), None)?.reader().inspect(bits)?;
    let chain = state.chain(found.id()).unwrap_or_default();
    let details = Details {
        row: Row::new(&state, found),
        chain_steps: chain.iter().map(|c| c.step()).collect(),
        needed_by: children(&state, found).iter().map(|c| c.step()).collect(),
        content,
    };
    say(&if args.json { to_json(&details)? } else { details_as_text(&details) })
}

fn children<'a>(state: &'a State, parent: &Checkpoint) -> Vec<&'a Checkpoint> {
    let needs = |c: &&Checkpoint| c.base == Some(parent.id());
    state.list().into_iter().filter(needs).collect()
}

fn details_as_text(d: &Details) -> String {
    let row = &d.row;
    let steps = |steps: &[u64]| steps.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let mut lines = vec![
        format!("step      {}{}", row.step, if row.pinned { "  (pinned)" } else { "" }),
        format!("id        {}", row.id),
        format!("published {}", row.published),
        format!("kind      {}", row.kind_text()),
        format!(
            "in store  {} in {} and a manifest, ratio {}",
            text::bytes(row.bytes),
            text::count(row.objects as usize, "object"),
            text::ratio_text(row.ratio)
        ),
    ];
    if row.chain > 1 {
        lines.push(format!("chain     {} checkpoints: {}", row.chain, steps(&d.chain_steps)));
    }
    if !d.needed_by.is_empty() {
        lines.push(format!("needed by {}", steps(&d.needed_by)));
    }
    lines.extend(row.metrics.iter().map(|(k, v)| format!("metric    {} = {v}", name(k))));
    lines.extend(row.tags.iter().map(|(k, v)| format!("tag       {} = {}", name(k), name(v))));
    lines.push(inspect::table(&d.content));
    lines.join("\n")
}
