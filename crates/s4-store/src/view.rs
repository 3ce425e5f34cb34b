//! A stored copy of the replayed state, so that opening a store need not read its whole log.
//!
//! It may be old, absent or damaged. It counts only if the log still has the entry that it ends with.
//! A view alone never deletes data: the log entry that ended the checkpoint is read first.

use std::sync::Arc;

use s4_format::Digest;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::id::CheckpointId;
use crate::inner::Inner;
use crate::seal;
use crate::state::{Checkpoint, Dead, State};

const VERSION: u32 = 1;

/// A view that is larger is not read.
pub(crate) const MAX_VIEW: u64 = 1 << 30;

#[derive(Serialize, Deserialize)]
struct View {
    v: u32,
    repo: Uuid,
    head: u64,
    head_hash: Digest,
    live: Vec<Checkpoint>,
    dead: Vec<(CheckpointId, Dead)>,
}

/// The state of the view, if there is a good one.
pub(crate) async fn read(inner: &Inner) -> Option<State> {
    read_surely(inner).await.unwrap_or_else(|e| {
        tracing::warn!(error = %e, "the stored view cannot be read: replaying the log");
        None
    })
}

/// As [`read`]; an error if it is not known whether there is a good one. A repair without it would lose what
/// only the view knows, for good.
pub(crate) async fn read_surely(inner: &Inner) -> Result<Option<State>> {
    let key = inner.layout.view();
    let parse = |bytes: &bytes::Bytes| seal::open::<View>(key.as_ref(), bytes);
    match inner.io.get_checked(&key, MAX_VIEW, parse).await {
        Ok(view) if view.v == VERSION && view.repo == inner.repo.id => {
            let state = State::stored((view.head, view.head_hash), view.live, view.dead);
            if let Err(what) = state {
                tracing::warn!(what, "the stored view is inconsistent: replaying the log");
            }
            Ok(state.ok())
        }
        Ok(_) => Ok(None),
        Err(e) if e.is_missing() => Ok(None),
        Err(e @ (Error::Corrupt { .. } | Error::Unsupported { .. })) => {
            tracing::warn!(error = %e, "the stored view is unusable: replaying the log");
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

/// Stores a view. Best effort: a failure is only logged, and there is a time limit in case the server never answers.
pub(crate) async fn write(inner: &Inner, state: &Arc<State>) {
    let view = View {
        v: VERSION,
        repo: inner.repo.id,
        head: state.head,
        head_hash: state.head_hash,
        live: state.live.values().cloned().collect(),
        dead: state.dead.iter().map(|(id, dead)| (*id, *dead)).collect(),
    };
    let key = inner.layout.view();
    let written = match seal::seal(key.as_ref(), &view) {
        Ok(bytes) => {
            let put = inner.io.put_once(&key, bytes.into());
            match tokio::time::timeout(inner.io.retry().deadline / 4, put).await {
                Ok(put) => put.map_err(|e| Failure::new(&e).to_string()),
                Err(_) => Err(Failure::silent().to_string()),
            }
        }
        Err(e) => Err(e.to_string()),
    };
    if let Err(error) = written {
        tracing::debug!(error, "could not store the view; the next writer will try again");
    }
}
