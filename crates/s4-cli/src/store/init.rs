//! `init`: a new store.

use s4weights::store::{CheckpointStore, StoreOptions, Writers};

use super::{StoreArgs, writing};
use crate::error::Result;
use crate::{say, to_json};

/// `init`
pub(crate) fn init(args: &StoreArgs, writers: Writers, network: bool) -> Result<()> {
    let mut options = args.options(StoreOptions::default());
    options.requests.writers = writers;
    options.requests.allow_network_fs = network;
    let store = CheckpointStore::create(&args.store, &args.storage()?, options)?;
    if args.json {
        return say(&to_json(store.repo())?);
    }
    let writers = writing::writers(store.repo().mode);
    say(&format!("{}: store created; writers: {writers}", store.name()))
}
