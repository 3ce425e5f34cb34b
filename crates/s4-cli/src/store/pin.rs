//! `pin`, `unpin`: protection from being retired.

use s4weights::store::CheckpointId;
use serde::Serialize;

use super::{StoreArgs, select};
use crate::error::Result;
use crate::{say, to_json};

#[derive(Serialize)]
struct Pinned {
    step: u64,
    id: CheckpointId,
    pinned: bool,
}

/// `pin` and `unpin`
pub(crate) fn pin(args: &StoreArgs, which: &[String], pinned: bool) -> Result<()> {
    let store = args.open()?;
    let state = store.state()?;
    let mut done = vec![];
    for c in select::find_all(store.name(), &state, which)? {
        if pinned {
            store.pin(c.id())?
        } else {
            store.unpin(c.id())?
        }
        done.push(Pinned { step: c.step(), id: c.id(), pinned });
    }
    if args.json {
        return say(&to_json(&done)?);
    }
    let word = if pinned { "pinned: it cannot be retired" } else { "not pinned" };
    done.iter().try_for_each(|p| say(&format!("step {} is {word}", p.step)))
}
