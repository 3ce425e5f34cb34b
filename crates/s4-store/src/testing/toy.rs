//! A toy encoding with deltas: a child is stored as the XOR with its parent's content, so a restore
//! is right only if the whole chain is.

use bytes::Bytes;

use crate::attempt::{About, Attempt, Staged};
use crate::entry::Reference;
use crate::error::Result;
use crate::rebase::{CallbackError, Rebaser};
use crate::state::{Checkpoint, State};
use crate::store::Store;

/// Contents are cut into objects of this many bytes.
const OBJECT: usize = 16;

/// The content of every manifest of the toy.
const BLOB: &[u8] = b"toy";

/// Saves `content`, as a delta if the parent is given with its content. All contents have one length.
///
/// # Errors
/// Those of the store.
pub async fn save(
    store: &Store,
    step: u64,
    parent: Option<(Reference, &[u8])>,
    content: &[u8],
) -> Result<Checkpoint> {
    stage(store, step, parent, content).await?.publish().await
}

/// Stores `content` as [`save`] does, but does not publish it.
///
/// # Errors
/// Those of the store.
pub async fn stage(
    store: &Store,
    step: u64,
    parent: Option<(Reference, &[u8])>,
    content: &[u8],
) -> Result<Staged> {
    let mut attempt = store.begin().await?;
    let stored = match parent {
        Some((_, base)) => xor(content, base),
        None => content.to_vec(),
    };
    put(&mut attempt, &stored).await?;
    let about = About { step, parent: parent.map(|(p, _)| p), ..About::default() };
    attempt.stage(Bytes::from_static(BLOB), about).await
}

async fn put(attempt: &mut Attempt, stored: &[u8]) -> Result<()> {
    for chunk in stored.chunks(OBJECT) {
        attempt.put("toy", Bytes::copy_from_slice(chunk)).await?;
    }
    Ok(())
}

/// The content of a checkpoint, from all objects of its chain.
///
/// # Errors
/// Those of the store.
pub async fn restore(store: &Store, chain: &[Checkpoint]) -> Result<Vec<u8>> {
    let mut content: Option<Vec<u8>> = None;
    for checkpoint in chain {
        let reading = store.read_manifest(checkpoint).await?;
        let mut stored = Vec::new();
        for n in 0..reading.object_count() {
            stored.extend_from_slice(&reading.object(n).await?);
        }
        content = Some(content.map_or(stored.clone(), |sum| xor(&sum, &stored)));
    }
    Ok(content.unwrap_or_default())
}

/// The chain of a checkpoint in a state, owned.
///
/// # Errors
/// If it is not listed.
pub fn chain(state: &State, checkpoint: &Checkpoint) -> Result<Vec<Checkpoint>> {
    Ok(state.chain(checkpoint.id())?.into_iter().cloned().collect())
}

fn xor(a: &[u8], b: &[u8]) -> Vec<u8> {
    a.iter().zip(b).map(|(a, b)| a ^ b).collect()
}

/// Rebases checkpoints of the toy.
#[derive(Debug, Default)]
pub struct ToyRebaser {
    content: Vec<u8>,
}

#[async_trait::async_trait]
impl Rebaser for ToyRebaser {
    async fn write(
        &mut self,
        store: &Store,
        chain: &[Checkpoint],
        attempt: &mut Attempt,
    ) -> std::result::Result<Bytes, CallbackError> {
        self.content = restore(store, chain).await?;
        put(attempt, &self.content).await?;
        Ok(Bytes::from_static(BLOB))
    }

    async fn verify(
        &mut self,
        _: &Store,
        _: &[Checkpoint],
        staged: &Staged,
    ) -> std::result::Result<(), CallbackError> {
        let reading = staged.reading();
        let mut stored = Vec::new();
        for n in 0..reading.object_count() {
            stored.extend_from_slice(&reading.object(n).await?);
        }
        if stored == self.content { Ok(()) } else { Err("the copy differs".into()) }
    }
}
