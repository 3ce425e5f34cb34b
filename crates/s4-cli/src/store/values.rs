//! `restore` and `rebase`: the verbs that read and write values.

use std::fs;

use s4weights::copy::{CopyOptions, copy};
use s4weights::store::{CheckpointId, StoreOptions};
use s4weights::{Preset, Target, Writer, redact_url};
use serde::Serialize;

use super::row::stored;
use super::{StoreArgs, select, text};
use crate::arrays::Arrays;
use crate::error::{Failure, Result};
use crate::progress::Bar;
use crate::{Common, convert, files, say, to_json};

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

/// The output of a restore.
pub(crate) struct Output<'a> {
    pub(crate) name: Option<&'a str>,
    pub(crate) preset: Preset,
    /// Whether to replace a file that is there already.
    pub(crate) force: bool,
}

/// `restore`
pub(crate) fn restore(
    args: &StoreArgs,
    which: &str,
    to: &Output<'_>,
    common: &Common,
) -> Result<()> {
    let preset = to.preset;
    let store = args.open_to_read(options(preset, common))?;
    let state = store.state()?;
    let found = select::find(store.name(), &state, which)?;
    let (step, id) = (found.step(), found.id());
    let output = to.name.map_or_else(|| format!("step-{step}.s4w"), str::to_owned);
    let is_ours = output.ends_with(".s4w");
    if !is_ours && !output.ends_with(".safetensors") {
        return Err(Failure::Unsupported(format!(
            "{}: the output must be a .s4w or .safetensors file; the Python wheel's `s4w` also writes .pt \
             files: `pip install s4weights torch`",
            redact_url(&output)
        )));
    }
    if !is_ours {
        convert::require_safetensors(&output)?;
    }
    check_outside(&args.store, &output)?;
    files::check_output(None, &output, to.force, args.reading())?;
    let bar = Bar::new(common.quiet);
    let loaded = store.load_id(id, bar.callback())?;
    let reader = loaded.reader();
    let raw_bytes = reader.tensors().map(|t| t.bytes).sum();
    bar.expect(raw_bytes);
    let tensors = match is_ours {
        true => {
            let options = args.writing(common.write(preset, &Bar::new(true)));
            let taken = |e: s4weights::Error| files::unless_taken(e.into(), &output, to.force);
            let writer =
                Writer::create(files::target(&output, to.force), options).map_err(taken)?;
            copy(reader, writer, &CopyOptions::default()).map_err(taken)?;
            reader.tensors().len()
        }
        false => {
            let place = format!("{}: step {step}", redact_url(store.name()));
            let arrays = Arrays::of(reader, &place)?;
            if !arrays.left_out.is_nothing() {
                convert::warn_of(&arrays.left_out, &output, common.quiet);
            }
            convert::to_safetensors(reader, arrays, (&output, to.force))?
        }
    };
    drop(bar);
    if args.json {
        return say(&to_json(&Restored { step, id, output, tensors, raw_bytes })?);
    }
    let tensors = text::count(tensors, "tensor");
    say(&format!("{}: step {step}, {tensors}, {}", redact_url(&output), text::bytes(raw_bytes)))
}

/// Refuses to write into the folder of the store that is read.
fn check_outside(store: &str, output: &str) -> Result<()> {
    let root = files::local(store).and_then(|root| fs::canonicalize(root).ok());
    // An output that cannot be written fails when it is opened.
    let file = Target::from(output).local_file().ok().flatten().map(|(path, _)| path);
    let folder = file.and_then(|file| fs::canonicalize(files::folder(&file)).ok());
    match (root, folder) {
        (Some(root), Some(folder)) if folder.starts_with(&root) => Err(Failure::Usage(format!(
            "{}: the output is in the store that is read; nothing was changed. Name an output outside of it",
            redact_url(output)
        ))),
        _ => Ok(()),
    }
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
pub(crate) fn rebase(args: &StoreArgs, which: &str, preset: Preset, common: &Common) -> Result<()> {
    let store = args.open_with(options(preset, common))?;
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
    if args.json {
        return say(&to_json(&report)?);
    }
    let (step, after) = (report.step, text::bytes(report.bytes));
    if !report.changed {
        return say(&format!("step {step} is already a base ({after})"));
    }
    let before = text::bytes(report.bytes_before);
    say(&format!(
        "step {step} is now a base: {before} -> {after}, every value compared; id {}",
        report.id
    ))
}
