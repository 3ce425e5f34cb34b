//! Rebases: rewrites a delta as a base, so that its parents can be deleted.

use s4_store::{Attempt, CallbackError, Checkpoint, CheckpointId, Rebaser, Staged, Store};
use tokio::sync::mpsc::{Sender, channel};

use crate::copy::{self, CopyOptions};
use crate::error::{Error, Result};
use crate::objects::{DataObject, ObjectOptions};
use crate::options::WriteOptions;
use crate::progress::ProgressFn;
use crate::reader::{ReadOptions, Reader};
use crate::store::CheckpointStore;
use crate::store::bridge::{Asker, ChannelSink, group_of, upload};
use crate::store::open::Opener;
use crate::writer::Writer;

impl CheckpointStore {
    /// Rewrites a checkpoint as a base, compares every value with the original, and replaces the original:
    /// step, metrics, tags, pin and children are kept. A checkpoint that is a base already is left alone.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if it cannot be read, [`Error::Store`] if it was retired meanwhile or the
    /// store fails, [`Error::Cancelled`]. Nothing has changed then.
    pub fn rebase(&self, id: CheckpointId, progress: Option<ProgressFn>) -> Result<Checkpoint> {
        let state = self.state()?;
        if let Some(base) = state.get(id).filter(|c| c.base.is_none()) {
            return Ok(base.clone());
        }
        let asker = Asker::new(progress);
        let mut rebaser = ByCopy {
            opener: self.opener.clone(),
            read: self.reading(),
            write: self.writing(),
            objects: self.objects_for(state.get(id).map_or(0, |c| c.about.raw_len)),
        };
        let store = self.opener.store.clone();
        let rebase = async move { store.rebase(id, &mut rebaser).await };
        self.opener.bridge.wait_asking(&asker, rebase)?.map_err(|e| self.error(e))
    }
}

/// Copies and compares checkpoints.
#[derive(Clone)]
struct ByCopy {
    opener: Opener,
    read: ReadOptions,
    write: WriteOptions,
    objects: ObjectOptions,
}

#[async_trait::async_trait]
impl Rebaser for ByCopy {
    async fn write(
        &mut self,
        _store: &Store,
        chain: &[Checkpoint],
        attempt: &mut Attempt,
    ) -> std::result::Result<bytes::Bytes, CallbackError> {
        let (sender, receiver) = channel(1);
        let (own, chain) = (self.clone(), chain.to_vec());
        let writing = tokio::task::spawn_blocking(move || own.copy(&chain, sender));
        let uploaded = upload(attempt, receiver).await;
        let index = writing.await?;
        uploaded.map_err(|e| self.opener.bridge.error(e))?;
        Ok(index?)
    }

    async fn verify(
        &mut self,
        _store: &Store,
        chain: &[Checkpoint],
        staged: &Staged,
    ) -> std::result::Result<(), CallbackError> {
        let (own, chain, reading) = (self.clone(), chain.to_vec(), staged.reading());
        let compare = move || {
            let Some(first) = chain.first() else { return Ok(()) };
            let new = own.opener.open_one(first, reading, &own.read)?;
            let old = own.opener.open(&chain, &own.read)?;
            require_same(&old, &new).map_err(|e| own.opener.about(first, e))
        };
        Ok(tokio::task::spawn_blocking(compare).await??)
    }
}

impl ByCopy {
    fn copy(&self, chain: &[Checkpoint], sender: Sender<DataObject>) -> Result<bytes::Bytes> {
        let old = self.opener.open(chain, &self.read)?;
        let bridge = self.opener.bridge.clone();
        let target = bridge.target().to_owned();
        let sink = Box::new(ChannelSink { bridge, asker: Asker::default(), sender });
        let writer = Writer::create_objects(&target, sink, self.objects, self.write.clone())?;
        let groups = self.groups(&old, chain)?;
        let options = CopyOptions { groups: &groups, ..CopyOptions::default() };
        Ok(copy::copy(&old, writer, &options)?.written.index.unwrap_or_default())
    }

    /// The group of each tensor: that of the object that its first chunk is in.
    fn groups(&self, old: &Reader, chain: &[Checkpoint]) -> Result<Vec<u8>> {
        let Some(first) = chain.first().cloned() else { return Ok(vec![]) };
        let store = self.opener.store.clone();
        let reading = self.opener.bridge.ask(async move { store.read_manifest(&first).await })?;
        let of_object = |number: u32| {
            let info = reading.manifest().objects.get(number as usize);
            info.map_or(0, |info| group_of(&info.kind))
        };
        let hosts: Vec<usize> = (0..old.named()).map(|t| old.host(t)).collect();
        let blocks = old.blocks(&hosts)?;
        let group = |host: &usize| {
            let record = blocks.get(host).and_then(|b| b.records.first());
            record.map_or(0, |r| of_object(r.object))
        };
        Ok(hosts.iter().map(group).collect())
    }
}

/// Fails unless two checkpoints have the same content.
fn require_same(old: &Reader, new: &Reader) -> Result<()> {
    let Some(difference) = copy::compare(old, None, new)? else { return Ok(()) };
    let e = s4_format::Error::corrupt(format!("{difference} differs from the original"));
    Err(Error::Format { target: new.name.clone(), source: e.in_part("copy") })
}
