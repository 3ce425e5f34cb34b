//! `ls`, `show`, `log`: looking, which changes nothing.

use s4weights::store::{Checkpoint, Entry, Op, State, StoreOptions};
use serde::Serialize;

use super::row::{Row, stored};
use super::{Place, select, text};
use crate::error::Result;
use crate::visible::name;
use crate::{inspect, say, to_json};

/// `ls`
pub(crate) fn list(place: &Place, last: Option<usize>, json: bool) -> Result<()> {
    let store = place.open_to_read(StoreOptions::default())?;
    let state = store.state()?;
    let all = state.list();
    let skip = all.len().saturating_sub(last.unwrap_or(usize::MAX));
    let rows: Vec<Row> = all[skip..].iter().map(|c| Row::new(&state, c)).collect();
    if json {
        return say(&to_json(&rows)?);
    }
    if rows.is_empty() {
        return say(&format!("{}: no checkpoints", store.name()));
    }
    say(&rows_as_text(&rows))?;
    say(&format!("{}: {}", store.name(), totals(&all[skip..])))
}

fn rows_as_text(rows: &[Row]) -> String {
    let head = ["step", "kind", "hops", "size", "ratio", "published", "", "id"];
    let line = |r: &Row| {
        vec![
            r.step.to_string(),
            r.kind_text(),
            r.hops.to_string(),
            text::bytes(r.bytes),
            text::ratio_text(r.ratio),
            r.published.clone(),
            if r.pinned { "pinned".into() } else { String::new() },
            r.id.to_string(),
        ]
    };
    text::table(&head, &rows.iter().map(line).collect::<Vec<_>>(), &[1, 5, 6, 7])
}

fn totals(list: &[&Checkpoint]) -> String {
    let bases = list.iter().filter(|c| c.base.is_none()).count();
    let bytes: u64 = list.iter().map(|c| stored(c)).sum();
    let raw: u64 = list.iter().map(|c| c.about.raw_len).sum();
    format!(
        "{} ({}, {}), {} for {} of values, ratio {}",
        text::count(list.len(), "checkpoint"),
        text::count(bases, "base"),
        text::count(list.len() - bases, "delta"),
        text::bytes(bytes),
        text::bytes(raw),
        text::ratio_text(text::ratio(raw, bytes))
    )
}

/// What `show` says of a whole store.
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
pub(crate) fn summary(place: &Place, json: bool) -> Result<()> {
    let store = place.open_to_read(StoreOptions::default())?;
    let state = store.state()?;
    let list = state.list();
    let repo = store.repo();
    if json {
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

/// What `show` says of a checkpoint.
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
pub(crate) fn show(place: &Place, which: &str, bits: bool, json: bool) -> Result<()> {
    let store = place.open_to_read(StoreOptions::default())?;
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
    say(&if json { to_json(&details)? } else { details_as_text(&details) })
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

/// `log`
pub(crate) fn log(place: &Place, from: u64, json: bool) -> Result<()> {
    let store = place.open_to_read(StoreOptions::default())?;
    let entries = store.log(from)?;
    if json {
        return say(&to_json(&entries)?);
    }
    if entries.is_empty() {
        return say(&format!("{}: the log has no entry {from}", store.name()));
    }
    let line = |e: &Entry| {
        let (verb, rest) = operation(&e.op);
        vec![e.n.to_string(), text::when(e.at_ms), verb.to_owned(), rest]
    };
    let rows: Vec<_> = entries.iter().map(line).collect();
    say(&text::table(&["entry", "time", "what", ""], &rows, &[1, 2, 3]))
}

fn operation(op: &Op) -> (&'static str, String) {
    let ids = |ids: &[s4weights::store::CheckpointId]| {
        ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    match op {
        Op::Publish(p) => {
            let kind = match (&p.parent, &p.replaces) {
                (Some(parent), _) => format!("delta of {}", parent.id),
                (None, Some(old)) => format!("base in the place of {}", old.id),
                (None, None) => "base".into(),
            };
            let size = text::bytes(p.data_len.saturating_add(p.manifest_len));
            ("publish", format!("step {}: {}, {size}, {kind}", p.step, p.id))
        }
        Op::Retire { ids: gone, reason } if reason.is_empty() => ("retire", ids(gone)),
        Op::Retire { ids: gone, reason } => ("retire", format!("{} ({})", ids(gone), name(reason))),
        Op::Abort { ids: gone } => ("abort", ids(gone)),
        Op::Unretire { about, .. } => ("unretire", format!("step {}: {}", about.step, about.id)),
        Op::Pin { id } => ("pin", id.to_string()),
        Op::Unpin { id } => ("unpin", id.to_string()),
        Op::Fence { against } => ("fence", format!("against write {against}")),
        // A later version's, which this one would not have been able to read.
        _ => ("unknown", String::new()),
    }
}
