//! `ls`: the list.

use s4weights::store::{Checkpoint, StoreOptions};

use super::row::{Row, stored};
use super::{StoreArgs, text};
use crate::error::Result;
use crate::{say, to_json};

/// `ls`
pub(crate) fn ls(args: &StoreArgs, last: Option<usize>) -> Result<()> {
    let store = args.open_to_read(StoreOptions::default())?;
    let state = store.state()?;
    let all = state.list();
    let skip = all.len().saturating_sub(last.unwrap_or(usize::MAX));
    let rows: Vec<Row> = all[skip..].iter().map(|c| Row::new(&state, c)).collect();
    if args.json {
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

pub(super) fn totals(list: &[&Checkpoint]) -> String {
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
