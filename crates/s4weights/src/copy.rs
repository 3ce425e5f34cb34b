//! Copies whole checkpoints and compares them: the code that rebase, restore and transcode share.

use std::fmt;

use s4_format::Digest;

use crate::error::{Error, Result};
use crate::reader::{Reader, TensorInfo};
use crate::tensor_source::TensorSource;
use crate::writer::{Contents, Writer, Written};

/// Bytes of values that are in memory at once, unless one tensor is larger.
const BATCH: u64 = 64 << 20;

/// Options for copying a checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct CopyOptions<'a> {
    /// Bytes of values in memory at once, unless one tensor is larger; 64 MiB by default. The output
    /// depends on it: small tensors are packed and chunks are placed batch by batch.
    pub batch: u64,
    /// The group of each tensor ([`TensorSource::group`]); if empty, all are of group 0.
    pub groups: &'a [u8],
    /// Whether the values are hashed on the way, so that [`compare`] need not read them again.
    pub hash: bool,
}

impl Default for CopyOptions<'_> {
    fn default() -> Self {
        Self { batch: BATCH, groups: &[], hash: false }
    }
}

/// The result of [`copy`].
#[derive(Debug)]
pub struct Copied {
    /// The report of the writer.
    pub written: Written,
    /// The hash of each tensor's values, by number, if requested.
    pub digests: Option<Vec<Digest>>,
}

/// Copies everything in a checkpoint, and finishes the copy: every tensor, in order, so that numbers do
/// not change, the tree, blobs, metadata and roles.
///
/// # Errors
/// Those of reading and of writing. Nothing is visible then.
pub fn copy(from: &Reader, mut to: Writer, options: &CopyOptions<'_>) -> Result<Copied> {
    if let Some(roles) = &from.manifest().roles {
        to.declare(roles.clone())?;
    }
    let infos: Vec<_> = from.tensors().collect();
    to.expect(infos.iter().map(|info| info.bytes).sum());
    let groups = options.groups;
    if !groups.is_empty() && groups.len() != infos.len() {
        return Err(Error::Argument(format!(
            "groups {groups:?} do not match {} tensors",
            infos.len()
        )));
    }
    let mut digests = options.hash.then(Vec::new);
    for batch in batches(&infos, options.batch) {
        let values = read_batch(from, batch.clone())?;
        let source = |(i, values)| {
            let TensorInfo { name, dtype, shape, .. } = infos[i];
            let group = groups.get(i).copied().unwrap_or(0);
            TensorSource::new(name, dtype, shape, values).in_group(group)
        };
        to.write(&batch.zip(&values).map(source).collect::<Vec<_>>())?;
        if let Some(digests) = &mut digests {
            digests.extend(values.iter().map(|v| Digest::of(v)));
        }
    }
    let written = to.complete(contents(from)?)?;
    Ok(Copied { written, digests })
}

/// Everything in a checkpoint except tensors and their roles.
fn contents(from: &Reader) -> Result<Contents> {
    let manifest = from.manifest();
    let blobs = manifest.blobs.keys().map(|name| Ok((name.clone(), from.blob(name)?)));
    Ok(Contents {
        tree: manifest.tree.clone(),
        blobs: blobs.collect::<Result<_>>()?,
        metadata: manifest.metadata.clone(),
    })
}

/// A difference between a copy and its original.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Difference {
    /// Names, order, dtypes or shapes of the tensors.
    Tensors,
    /// The form of the saved object, or its tree.
    Tree,
    /// The metadata.
    Metadata,
    /// The tensors' roles in the optimizer.
    Roles,
    /// Names of the blobs.
    Blobs,
    /// A blob.
    Blob(String),
    /// The values of a tensor.
    Values(String),
    /// The copy is a delta, which no copy should be.
    Parent,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensors => f.write_str("the list of tensors"),
            Self::Tree => f.write_str("the tree"),
            Self::Metadata => f.write_str("metadata"),
            Self::Roles => f.write_str("the table of roles"),
            Self::Blobs => f.write_str("the list of blobs"),
            Self::Blob(name) => write!(f, "blob `{name}`"),
            Self::Values(name) => write!(f, "tensor `{name}`"),
            Self::Parent => f.write_str("the parent"),
        }
    }
}

/// Compares a copy with its original: everything that a caller can read. Also checks that the copy
/// needs no parent. The original's values are read again, unless `digests` of them are at hand
/// ([`Copied::digests`]).
///
/// # Errors
/// Those of reading.
pub fn compare(
    original: &Reader,
    digests: Option<&[Digest]>,
    copy: &Reader,
) -> Result<Option<Difference>> {
    if copy.manifest().parent.is_some() {
        return Ok(Some(Difference::Parent));
    }
    compare_content(original, digests, copy)
}

/// As [`compare`], of a copy that may be a delta.
///
/// # Errors
/// Those of reading.
pub fn compare_content(
    original: &Reader,
    digests: Option<&[Digest]>,
    copy: &Reader,
) -> Result<Option<Difference>> {
    let (from, to) = (original.manifest(), copy.manifest());
    let infos: Vec<_> = original.tensors().collect();
    let described = [
        (infos.iter().copied().eq(copy.tensors()), Difference::Tensors),
        (from.form == to.form && original.tree() == copy.tree(), Difference::Tree),
        (from.metadata == to.metadata, Difference::Metadata),
        (from.roles == to.roles, Difference::Roles),
        (from.blobs.keys().eq(to.blobs.keys()), Difference::Blobs),
    ];
    if let Some((_, difference)) = described.into_iter().find(|(alike, _)| !alike) {
        return Ok(Some(difference));
    }
    for (name, section) in &from.blobs {
        if Digest::of(&copy.blob(name)?) != section.blake3 {
            return Ok(Some(Difference::Blob(name.clone())));
        }
    }
    for batch in batches(&infos, BATCH) {
        let found = read_batch(copy, batch.clone())?;
        let differs = match digests {
            Some(digests) => {
                let expected = digests.get(batch.clone()).unwrap_or_default();
                let alike = |(at, values): (usize, &Vec<u8>)| {
                    expected.get(at).is_some_and(|digest| Digest::of(values) == *digest)
                };
                found.iter().enumerate().position(|pair| !alike(pair))
            }
            None => {
                let expected = read_batch(original, batch.clone())?;
                expected.iter().zip(&found).position(|(a, b)| a != b)
            }
        };
        if let Some(at) = differs {
            return Ok(Some(Difference::Values(infos[batch.start + at].name.to_owned())));
        }
    }
    Ok(None)
}

/// Numbers of tensors whose values are in memory together.
fn batches(infos: &[TensorInfo<'_>], most: u64) -> Vec<std::ops::Range<usize>> {
    let mut out: Vec<std::ops::Range<usize>> = vec![];
    let mut sum = 0u64;
    for (number, tensor) in infos.iter().enumerate() {
        sum = sum.saturating_add(tensor.bytes);
        match out.last_mut() {
            Some(batch) if sum <= most => batch.end = number + 1,
            _ => {
                out.push(number..number + 1);
                sum = tensor.bytes;
            }
        }
    }
    out
}

fn read_batch(reader: &Reader, batch: std::ops::Range<usize>) -> Result<Vec<Vec<u8>>> {
    let infos = reader.tensors().skip(batch.start).take(batch.len());
    let mut values = infos.map(|t| reader.buffer(t.bytes)).collect::<Result<Vec<_>>>()?;
    let mut wants: Vec<_> = batch.zip(values.iter_mut().map(Vec::as_mut_slice)).collect();
    reader.read_into(&mut wants)?;
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_hold_a_tensor_at_least_and_no_more_than_fits() {
        let info =
            |bytes| TensorInfo { name: "", dtype: s4_format::DType::UInt8, shape: &[], bytes };
        let cut = |sizes: &[u64]| batches(&sizes.iter().map(|&b| info(b)).collect::<Vec<_>>(), 10);
        assert!(cut(&[]).is_empty());
        assert_eq!(cut(&[4, 6, 1]), [0..2, 2..3]);
        assert_eq!(cut(&[11, 0, 10, u64::MAX, 3, 3]), [0..1, 1..3, 3..4, 4..6]);
    }
}
