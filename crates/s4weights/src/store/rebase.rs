//! Rebasing: the same values once more, as a base, so that what they were a difference from can go.

use std::sync::Arc;

use s4_format::DType;
use s4_store::{Attempt, CallbackError, Checkpoint, CheckpointId, Rebaser, Staged, Store};
use tokio::sync::mpsc::{Sender, channel};

use crate::error::{Error, Result};
use crate::objects::DataObject;
use crate::objects::ObjectOptions;
use crate::options::{ProgressFn, ReadOptions, WriteOptions};
use crate::reader::Reader;
use crate::store::CheckpointStore;
use crate::store::bridge::{Asker, ChannelSink, group_of, upload};
use crate::store::open::Opener;
use crate::writer::{Contents, TensorSource, Writer};

/// Bytes of values that are in memory at once, unless one tensor is larger.
const BATCH: u64 = 64 << 20;

impl CheckpointStore {
    /// Writes a checkpoint once more, as a base, compares every value with the original, and puts it
    /// in the original's place: with its step, metrics, tags and pin, and with its children. What is a
    /// base already stays as it is.
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
        let read = ReadOptions {
            threads: self.options.threads,
            simd: self.options.simd,
            ..ReadOptions::default()
        };
        let write = WriteOptions {
            preset: self.options.preset,
            threads: self.options.threads,
            simd: self.options.simd,
            memory: Some(self.options.memory),
            ..WriteOptions::default()
        };
        let mut copy = Copy {
            opener: self.opener.clone(),
            read,
            write,
            objects: ObjectOptions { bytes: self.options.object_bytes },
        };
        let store = self.opener.store.clone();
        let rebase = async move { store.rebase(id, &mut copy).await };
        self.opener.bridge.wait_asking(&asker, rebase)?.map_err(|e| self.error(e))
    }
}

/// Copies and compares checkpoints.
#[derive(Clone)]
struct Copy {
    opener: Opener,
    read: ReadOptions,
    write: WriteOptions,
    objects: ObjectOptions,
}

#[async_trait::async_trait]
impl Rebaser for Copy {
    async fn write(
        &mut self,
        _store: &Store,
        chain: &[Checkpoint],
        attempt: &mut Attempt,
    ) -> std::result::Result<bytes::Bytes, CallbackError> {
        let (sender, receiver) = channel(1);
        let (copy, chain) = (self.clone(), chain.to_vec());
        let writing = tokio::task::spawn_blocking(move || copy.copy(&chain, sender));
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
        let (copy, chain, reading) = (self.clone(), chain.to_vec(), staged.reading());
        let compare = move || {
            let Some(first) = chain.first() else { return Ok(()) };
            let new = copy.opener.open_one(first, reading, &copy.read)?;
            let old = copy.opener.open(&chain, &copy.read)?;
            same_values(&old, &new).map_err(|e| copy.opener.about(first, e))
        };
        Ok(tokio::task::spawn_blocking(compare).await??)
    }
}

impl Copy {
    fn copy(&self, chain: &[Checkpoint], sender: Sender<DataObject>) -> Result<bytes::Bytes> {
        let old = self.opener.open(chain, &self.read)?;
        let bridge = self.opener.bridge.clone();
        let target = bridge.target().to_owned();
        let sink = Box::new(ChannelSink { bridge, asker: Asker::default(), sender });
        let mut writer = Writer::create_objects(&target, sink, self.objects, self.write.clone())?;
        let groups = self.groups(&old, chain)?;
        for batch in batches(&old) {
            let values = read_batch(&old, &batch)?;
            let infos: Vec<_> = old.tensors().collect();
            let sources: Vec<_> = (batch.iter().zip(&values))
                .map(|(&n, data)| {
                    let t = infos[n];
                    TensorSource { name: t.name, dtype: t.dtype, shape: t.shape, data }
                })
                .collect();
            let groups: Vec<u8> = batch.iter().map(|&n| groups[n]).collect();
            writer.write_grouped(&sources, &groups)?;
        }
        let manifest = old.manifest();
        let blobs = manifest.blobs.keys().map(|name| Ok((name.clone(), old.blob(name)?)));
        let contents = Contents {
            tree: manifest.tree.clone(),
            blobs: blobs.collect::<Result<_>>()?,
            metadata: manifest.metadata.clone(),
            roles: manifest.roles.clone(),
        };
        Ok(writer.complete(contents)?.index.unwrap_or_default())
    }

    /// The group of each tensor: that of the object which its first chunk is in.
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

/// Numbers of tensors whose values fit in memory together.
fn batches(reader: &Reader) -> Vec<Vec<usize>> {
    let mut out: Vec<Vec<usize>> = vec![];
    let mut sum = 0;
    for (number, tensor) in reader.tensors().enumerate() {
        match out.last_mut() {
            Some(batch) if sum + tensor.bytes <= BATCH => batch.push(number),
            _ => {
                out.push(vec![number]);
                sum = 0;
            }
        }
        sum += tensor.bytes;
    }
    out
}

fn read_batch(reader: &Reader, batch: &[usize]) -> Result<Vec<Vec<u8>>> {
    let sizes: Vec<u64> = reader.tensors().map(|t| t.bytes).collect();
    let mut values = vec![];
    for &number in batch {
        values.push(reader.buffer(sizes[number])?);
    }
    let mut wants: Vec<_> =
        batch.iter().copied().zip(values.iter_mut().map(Vec::as_mut_slice)).collect();
    reader.read_into(&mut wants)?;
    Ok(values)
}

/// Compares everything that a caller can read.
fn same_values(old: &Arc<Reader>, new: &Reader) -> Result<()> {
    let list = |r: &Reader| -> Vec<(String, DType, Vec<u64>)> {
        r.tensors().map(|t| (t.name.to_owned(), t.dtype, t.shape.to_vec())).collect()
    };
    let differs = |what: String| {
        let e = s4_format::Error::corrupt(format!("{what} differs from the original"));
        Err(Error::Format { target: new.name.clone(), source: e.in_part("copy") })
    };
    let names = list(old);
    if names != list(new) {
        return differs("the list of tensors".into());
    }
    if old.tree() != new.tree() || old.manifest().metadata != new.manifest().metadata {
        return differs("what describes the object".into());
    }
    for name in old.manifest().blobs.keys() {
        if old.blob(name)? != new.blob(name)? {
            return differs(format!("blob `{name}`"));
        }
    }
    for batch in batches(old) {
        let (a, b) = (read_batch(old, &batch)?, read_batch(new, &batch)?);
        if let Some((&n, _)) = batch.iter().zip(a.iter().zip(&b)).find(|(_, (a, b))| a != b) {
            return differs(format!("tensor `{}`", names[n].0));
        }
    }
    Ok(())
}
