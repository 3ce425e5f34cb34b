//! Rewrites any readable .s4w file with open codecs, with the same contents.

use s4weights::copy::{self, CopyOptions};
use s4weights::format::Digest;
use s4weights::{
    Preset, ReadOptions, Reader, Report, Source, Target, WriteOptions, Writer, redact_url,
};

use crate::draft::Draft;
use crate::error::{Failure, Result};
use crate::files;
use crate::progress::Bar;

/// Bytes of values that are in memory at a time, or one tensor if that is larger.
const BATCH: u64 = 256 << 20;

/// Writes the contents of one file into another, and reads that back; returns the writer's report.
pub(crate) fn run(
    input: &str,
    (output, force): (&str, bool),
    read: ReadOptions,
    write: WriteOptions,
    bar: &Bar,
) -> Result<Report> {
    if write.preset == Preset::Nvcomp {
        return Err(usage(
            "preset `nvcomp` writes a closed codec: use `fast`, `balanced` or `small`",
        ));
    }
    let quiet = ReadOptions { progress: None, ..read.clone() };
    let reader = files::open(input, read)?;
    bar.expect(reader.tensors().map(|t| t.bytes).sum());
    // Nobody must find the wrong output: a file gets its name once it was compared.
    let draft = Draft::of(output, force)?;
    let to = match &draft {
        Some(draft) => Target::from(draft.path()),
        None => Target::from(output),
    };
    let write = || {
        let writer = Writer::create(to, write)?;
        let options = CopyOptions { batch: BATCH, hash: true, ..CopyOptions::default() };
        let copied = copy::copy(&reader, writer, &options)?;
        // The file that is compared here, and no other, gets the name.
        let file = draft.as_ref().map(Draft::open).transpose()?;
        let from = match (&draft, &file) {
            (Some(draft), Some(file)) => draft.source(file)?,
            _ => Source::from(output),
        };
        let open = ReadOptions { trusted: false, parents: None, ..quiet };
        let written = Reader::open(from, open)?;
        check(&reader, copied.digests.as_deref(), output, &written)?;
        Ok((copied.written.report, file))
    };
    let (report, file) = write().map_err(|e| match &draft {
        Some(draft) => draft.about_target(e),
        None => e,
    })?;
    if let (Some(draft), Some(file)) = (draft, file) {
        draft.publish(file).map_err(|e| files::unless_taken(e, output, force))?;
    }
    Ok(report)
}

fn usage(what: &str) -> Failure {
    Failure::Library(s4weights::Error::Argument(what.into()))
}

/// Compares everything in the output, which must need no other file, with the input.
fn check(input: &Reader, digests: Option<&[Digest]>, output: &str, written: &Reader) -> Result<()> {
    let output = redact_url(output);
    if !written.manifest().closed_codecs.is_empty() {
        return Err(Failure::Test(format!("{output}: the output still needs a closed codec")));
    }
    match copy::compare(input, digests, written)? {
        Some(what) => Err(Failure::Test(format!("{output}: {what} differs from the input"))),
        None => Ok(()),
    }
}
