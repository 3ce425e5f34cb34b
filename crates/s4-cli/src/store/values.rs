//! `restore` and `rebase`: what reads and writes values.

use std::collections::BTreeMap;

use s4weights::store::{CheckpointId, StoreOptions};
use s4weights::{Contents, Preset, Reader, Target, TensorSource, Writer};
use serde::Serialize;

use super::row::stored;
use super::{Place, select, text};
use crate::error::{Failure, Result};
use crate::progress::Bar;
use crate::{Common, convert, say, to_json};

/// Bytes of values that are in memory at once, unless one tensor is larger.
const BATCH: u64 = 64 << 20;

fn options(preset: Preset, common: &Common) -> StoreOptions {
    StoreOptions { preset, threads: common.threads, simd: common.simd, ..Default::default() }
}

#[derive(Serialize)]
struct Restored {
    step: u64,
    id: CheckpointId,
    output: String,
    tensors: usize,
    raw_bytes: u64,
}

/// `restore`
pub(crate) fn restore(
    place: &Place,
    which: &str,
    output: Option<&str>,
    preset: Preset,
    json: bool,
    common: &Common,
) -> Result<()> {
    let store = place.open_to_read(options(preset, common))?;
    let state = store.state()?;
    let found = select::find(store.name(), &state, which)?;
    let (step, id) = (found.step(), found.id());
    let output = output.map_or_else(|| format!("step-{step}.s4w"), str::to_owned);
    let ending = output.rsplit('.').next().unwrap_or_default();
    if !["s4w", "safetensors"].contains(&ending) {
        return Err(Failure::Unsupported(format!(
            "{output}: a checkpoint is restored to a .s4w or .safetensors file, and by the Python \
             wheel's `s4w` to a .pt file: `pip install s4weights torch`"
        )));
    }
    let bar = Bar::new(common.quiet);
    let loaded = store.load_id(id, bar.callback())?;
    let reader = loaded.reader();
    let raw_bytes = reader.tensors().map(|t| t.bytes).sum();
    bar.expect(raw_bytes);
    let tensors = match ending {
        "s4w" => copy(reader, &output, common.write(preset, &Bar::new(true)))?,
        _ => convert::to_safetensors(reader, &output)?,
    };
    drop(bar);
    if json {
        return say(&to_json(&Restored { step, id, output, tensors, raw_bytes })?);
    }
    let tensors = text::count(tensors, "tensor");
    say(&format!("{output}: step {step}, {tensors}, {}", text::bytes(raw_bytes)))
}

/// Writes all of a checkpoint into one file that stands alone.
fn copy(reader: &Reader, output: &str, options: s4weights::WriteOptions) -> Result<usize> {
    let mut writer = Writer::create(Target::from(output), options)?;
    let infos: Vec<_> = reader.tensors().collect();
    let mut at = 0;
    while at < infos.len() {
        let mut sum = 0;
        let fits = infos[at..].iter().take_while(|t| {
            sum += t.bytes;
            sum <= BATCH
        });
        let batch = &infos[at..at + fits.count().max(1)];
        let values = batch.iter().map(|t| reader.read(t.name)).collect::<Result<Vec<_>, _>>()?;
        let sources: Vec<_> = batch
            .iter()
            .zip(&values)
            .map(|(t, data)| TensorSource { name: t.name, dtype: t.dtype, shape: t.shape, data })
            .collect();
        writer.write(&sources)?;
        at += batch.len();
    }
    let manifest = reader.manifest();
    let mut blobs = BTreeMap::new();
    for name in manifest.blobs.keys() {
        blobs.insert(name.clone(), reader.blob(name)?);
    }
    writer.finish(Contents {
        tree: manifest.tree.clone(),
        blobs,
        metadata: manifest.metadata.clone(),
        roles: manifest.roles.clone(),
    })?;
    Ok(infos.len())
}

#[derive(Serialize)]
struct Rebased {
    step: u64,
    id: CheckpointId,
    was: CheckpointId,
    bytes: u64,
    bytes_before: u64,
    changed: bool,
}

/// `rebase`
pub(crate) fn rebase(
    place: &Place,
    which: &str,
    preset: Preset,
    json: bool,
    common: &Common,
) -> Result<()> {
    let store = place.open_with(options(preset, common))?;
    let state = store.state()?;
    let old = select::find(store.name(), &state, which)?;
    let bar = Bar::waiting(common.quiet, &format!("step {}: writing and comparing", old.step()));
    let new = store.rebase(old.id(), bar.callback())?;
    drop(bar);
    let report = Rebased {
        step: new.step(),
        id: new.id(),
        was: old.id(),
        bytes: stored(&new),
        bytes_before: stored(old),
        changed: new.id() != old.id(),
    };
    if json {
        return say(&to_json(&report)?);
    }
    let (step, after) = (report.step, text::bytes(report.bytes));
    if !report.changed {
        return say(&format!("step {step} is a base already ({after})"));
    }
    let before = text::bytes(report.bytes_before);
    say(&format!(
        "step {step} is a base now: {before} -> {after}, every value compared; id {}",
        report.id
    ))
}
