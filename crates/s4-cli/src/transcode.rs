//! Any readable .s4w file into one of open codecs, with the same contents.

use std::collections::BTreeMap;
use std::fs;

use s4weights::format::Digest;
use s4weights::{
    Contents, Preset, ReadOptions, Reader, Report, Source, Target, TensorInfo, TensorSource,
    WriteOptions, Writer,
};

use crate::error::{Failure, Result};
use crate::progress::Bar;

/// Bytes of values that are in memory at a time: of one tensor at least.
const BATCH: u64 = 256 << 20;

/// Writes the contents of one file into another, and reads that back; gives what was written.
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
    if is_same(input, output) {
        return Err(usage("input and output are the same file"));
    }
    let quiet = ReadOptions { progress: None, ..read.clone() };
    let reader = Reader::open(Source::from(input), read)?;
    bar.expect(reader.tensors().map(|t| t.bytes).sum());
    let mut writer = Writer::create(Target::from(output), write)?;
    let hashes = copy_tensors(&reader, &mut writer)?;
    let report = writer.finish(contents(&reader)?)?;
    let open = ReadOptions { trusted: false, parents: None, ..quiet };
    if let Err(e) = compare(&reader, &hashes, output, open) {
        if !s4weights::is_url(output) {
            // What is wrong is not to be found by anyone; the reason is more telling than this.
            let _ = fs::remove_file(output);
        }
        return Err(e);
    }
    Ok(report)
}

fn usage(what: &str) -> Failure {
    Failure::Library(s4weights::Error::Argument(what.into()))
}

fn is_same(input: &str, output: &str) -> bool {
    let real = |path| fs::canonicalize(path).ok();
    input == output || real(input).is_some_and(|i| real(output) == Some(i))
}

/// Numbers of tensors that are in memory together.
fn batches(tensors: &[TensorInfo<'_>]) -> Vec<std::ops::Range<usize>> {
    let mut out = vec![];
    let (mut first, mut bytes) = (0, 0u64);
    for (number, t) in tensors.iter().enumerate() {
        if number > first && bytes.saturating_add(t.bytes) > BATCH {
            out.push(first..number);
            (first, bytes) = (number, 0);
        }
        bytes = bytes.saturating_add(t.bytes);
    }
    out.push(first..tensors.len());
    out
}

/// The values of some tensors.
fn values(reader: &Reader, numbers: std::ops::Range<usize>) -> Result<Vec<Vec<u8>>> {
    let infos = reader.tensors().skip(numbers.start).take(numbers.len());
    let mut buffers = vec![];
    for t in infos {
        let mut buffer: Vec<u8> = vec![];
        let len = usize::try_from(t.bytes).unwrap_or(usize::MAX);
        buffer.try_reserve_exact(len).map_err(|e| Failure::Io(std::io::Error::other(e)))?;
        buffer.resize(len, 0);
        buffers.push(buffer);
    }
    let mut requests: Vec<_> =
        numbers.zip(buffers.iter_mut()).map(|(n, b)| (n, b.as_mut_slice())).collect();
    reader.read_into(&mut requests)?;
    Ok(buffers)
}

/// Copies every tensor, in order, so that numbers stay what they are; gives the hash of each.
fn copy_tensors(reader: &Reader, writer: &mut Writer) -> Result<Vec<Digest>> {
    let tensors: Vec<_> = reader.tensors().collect();
    let mut hashes = vec![];
    for batch in batches(&tensors) {
        let values = values(reader, batch.clone())?;
        let sources = tensors[batch].iter().zip(&values).map(|(t, data)| {
            let TensorInfo { name, dtype, shape, .. } = *t;
            TensorSource { name, dtype, shape, data }
        });
        writer.write(&sources.collect::<Vec<_>>())?;
        hashes.extend(values.iter().map(|v| Digest::of(v)));
    }
    Ok(hashes)
}

/// All but the tensors.
fn contents(reader: &Reader) -> Result<Contents> {
    let manifest = reader.manifest();
    let mut blobs = BTreeMap::new();
    for name in manifest.blobs.keys() {
        blobs.insert(name.clone(), reader.blob(name)?);
    }
    Ok(Contents {
        tree: manifest.tree.clone(),
        blobs,
        metadata: manifest.metadata.clone(),
        roles: manifest.roles.clone(),
    })
}

/// Reads the output and compares everything with the input.
fn compare(input: &Reader, hashes: &[Digest], output: &str, options: ReadOptions) -> Result<()> {
    let differs =
        |what: &str| Err(Failure::Test(format!("{output}: {what} differs from the input")));
    let written = Reader::open(Source::from(output), options)?;
    let (from, to) = (input.manifest(), written.manifest());
    if !to.closed_codecs.is_empty() || to.parent.is_some() {
        return Err(Failure::Test(format!("{output}: not an open file")));
    }
    if input.tree() != written.tree() || from.form != to.form {
        return differs("the tree");
    }
    if from.metadata != to.metadata || from.roles != to.roles {
        return differs("metadata or roles");
    }
    if !from.blobs.keys().eq(to.blobs.keys()) {
        return differs("a blob");
    }
    for (name, section) in &from.blobs {
        if Digest::of(&written.blob(name)?) != section.blake3 {
            return differs(&format!("blob `{name}`"));
        }
    }
    let alike = |(a, b): (TensorInfo<'_>, TensorInfo<'_>)| a == b;
    let count = input.tensors().len();
    if written.tensors().len() != count || !input.tensors().zip(written.tensors()).all(alike) {
        return differs("the list of tensors");
    }
    let tensors: Vec<_> = written.tensors().collect();
    for batch in batches(&tensors) {
        let values = values(&written, batch.clone())?;
        for ((t, data), hash) in tensors[batch.clone()].iter().zip(&values).zip(&hashes[batch]) {
            if Digest::of(data) != *hash {
                return differs(&format!("tensor `{}`", t.name));
            }
        }
    }
    Ok(())
}
