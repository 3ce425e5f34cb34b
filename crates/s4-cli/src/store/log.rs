//! `log`: every change that was ever made.

use s4weights::store::{Entry, Op, StoreOptions};

use super::{StoreArgs, text};
use crate::error::Result;
use crate::visible::name;
use crate::{say, to_json};

/// `log`
pub(crate) fn log(args: &StoreArgs, from: u64) -> Result<()> {
    let store = args.open_to_read(StoreOptions::default())?;
    let entries = store.log(from)?;
    if args.json {
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
    say(&text::table(&["entry", "time", "change", ""], &rows, &[1, 2, 3]))
}

fn operation(op: &Op) -> (&'static str, String) {
    let ids = |ids: &[s4weights::store::CheckpointId]| {
        ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    match op {
        Op::Publish(p) => {
            let kind = match (&p.parent, &p.replaces) {
                (Some(parent), _) => format!("delta of {}", parent.id),
                (None, Some(old)) => format!("base replacing {}", old.id),
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
        // From a later version; this one would have failed to read it.
        _ => ("unknown", String::new()),
    }
}
