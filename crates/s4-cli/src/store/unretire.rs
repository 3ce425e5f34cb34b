//! `unretire`: lists retired checkpoints again.

use s4weights::store::CheckpointId;
use serde::Serialize;

use super::{StoreArgs, select};
use crate::error::Result;
use crate::{say, to_json};

#[derive(Serialize)]
struct Listed {
    step: u64,
    id: CheckpointId,
}

/// `unretire`
pub(crate) fn unretire(args: &StoreArgs, which: &[String]) -> Result<()> {
    let store = args.open()?;
    let log = store.log(1)?;
    let ids = which.iter().map(|word| select::find_retired(store.name(), &log, word));
    let ids = ids.collect::<Result<Vec<_>>>()?;
    let listed = store.unretire(&ids)?;
    let listed: Vec<_> = listed.iter().map(|c| Listed { step: c.step(), id: c.id() }).collect();
    if args.json {
        return say(&to_json(&listed)?);
    }
    listed.iter().try_for_each(|c| say(&format!("step {} is listed again ({})", c.step, c.id)))
}
