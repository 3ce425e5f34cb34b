//! Rewrites any readable .s4w file with open codecs, with the same contents.

use std::fs;

use s4weights::copy::{self, CopyOptions};
use s4weights::format::Digest;
use s4weights::{Preset, ReadOptions, Reader, Report, Source, Target, WriteOptions, Writer};

use crate::error::{Failure, Result};
use crate::files;
use crate::progress::Bar;

/// Bytes of values that are in memory at a time, or one tensor if that is larger.
const BATCH: u64 = 256 << 20;

/// Writes the contents of one file into another, and reads that back; returns the writer's report.
pub(crate) fn run(
    input: &str,
    output: &str,
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
    let writer = Writer::create(Target::from(output), write)?;
    let options = CopyOptions { batch: BATCH, hash: true, ..CopyOptions::default() };
    let copied = copy::copy(&reader, writer, &options)?;
    let open = ReadOptions { trusted: false, parents: None, ..quiet };
    if let Err(e) = check(&reader, copied.digests.as_deref(), output, open) {
        if !s4weights::is_url(output) {
            // Nobody must find the wrong output. If it cannot be removed, the error below matters more.
            let _ = fs::remove_file(output);
        }
        return Err(e);
    }
    Ok(copied.written.report)
}

fn usage(what: &str) -> Failure {
    Failure::Library(s4weights::Error::Argument(what.into()))
}

/// Reads the output, which must need no other file, and compares everything with the input.
fn check(
    input: &Reader,
    digests: Option<&[Digest]>,
    output: &str,
    options: ReadOptions,
) -> Result<()> {
    let written = Reader::open(Source::from(output), options)?;
    if !written.manifest().closed_codecs.is_empty() {
        return Err(Failure::Test(format!("{output}: it still needs a closed codec")));
    }
    match copy::compare(input, digests, &written)? {
        Some(what) => Err(Failure::Test(format!("{output}: {what} differs from the input"))),
        None => Ok(()),
    }
}
