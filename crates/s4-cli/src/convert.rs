//! Converts between .safetensors and .s4w, with one tensor in memory at a time.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use s4weights::{
    Contents, DType, Reader, Report, TensorSource, WriteOptions, Writer, is_url, redact_url,
};
use safetensors::SafeTensorError;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Serialize, Serializer};

use crate::arrays::{Array, Arrays, DTYPES, FOREIGN, buffer};
use crate::error::{Failure, Result};
use crate::files::{self, Other, PICKLES};
use crate::left_out::LeftOut;
use crate::progress::Bar;
use crate::visible;

/// Bytes of the length of a header, a multiple of which it has.
const LENGTH: usize = size_of::<u64>();
/// The limit of the safetensors format.
const LONGEST_HEADER: u64 = 100_000_000;

/// A path or URL with another ending.
pub(crate) fn with_ending(path: &str, ending: &str) -> String {
    let known = [".safetensors", ".s4w"].iter().chain(&PICKLES);
    let stem = known.into_iter().find_map(|e| path.strip_suffix(e)).unwrap_or(path);
    format!("{stem}.{ending}")
}

/// Refuses what only the Python wheel converts.
fn refuse_pickle(path: &str) -> Result<()> {
    let what = match Path::new(path).is_dir() {
        true => "a folder of torch.distributed.checkpoint",
        false if PICKLES.iter().any(|e| path.ends_with(e)) => "a PyTorch file",
        false => return Ok(()),
    };
    Err(Failure::Unsupported(format!(
        "{path}: converting {what} needs the `s4w` of the Python wheel: `pip install s4weights torch`"
    )))
}

/// Says what a file without a safetensors header is; `None` if it should have one.
fn not_safetensors(path: &str) -> Option<Failure> {
    let what = match files::what_else(path, ".safetensors")? {
        Other::S4w => "a .s4w file already",
        Other::Torch => {
            "a PyTorch file or another archive: the Python wheel's `s4w` converts PyTorch files whose \
             names end with .pt, .pth, .bin or .ckpt"
        }
        Other::Safetensors | Other::Unknown => "not a safetensors file",
    };
    Some(Failure::Unsupported(format!("{path}: {what}")))
}

fn named(path: &str, e: std::io::Error) -> Failure {
    Failure::Io(std::io::Error::new(e.kind(), format!("{path}: {e}")))
}

/// Compresses a .safetensors file. `force`: whether the output may replace a file.
pub(crate) fn compress(
    input: &str,
    (output, force): (&str, bool),
    options: WriteOptions,
    bar: &Bar,
) -> Result<Report> {
    files::refuse_stream(input)?;
    refuse_pickle(input)?;
    let mut file = File::open(input).map_err(|e| named(input, e))?;
    let (start, metadata) = read_header(input, &mut file).map_err(|e| match e {
        Failure::Safetensors { .. } => not_safetensors(input).unwrap_or(e),
        e => e,
    })?;
    let mut tensors: Vec<_> = metadata.tensors().into_iter().collect();
    // Those without values may lie at one place: their names decide, so that the same input gives the same file.
    tensors.sort_by(|(a, x), (b, y)| (x.data_offsets, a).cmp(&(y.data_offsets, b)));
    let bytes = tensors.iter().map(|(_, i)| (i.data_offsets.1 - i.data_offsets.0) as u64).sum();
    bar.expect(bytes);
    let mut writer = Writer::create(files::target(output, force), options)
        .map_err(|e| files::unless_taken(e.into(), output, force))?;
    writer.expect(bytes);
    let mut contents = Contents::default();
    if let Some(text) = metadata.metadata() {
        contents.metadata.extend(text.clone());
    }
    for (name, info) in tensors {
        let (from, to) = info.data_offsets;
        let mut data = buffer(to - from, &name)?;
        file.seek(SeekFrom::Start(start + from as u64)).map_err(|e| named(input, e))?;
        file.read_exact(&mut data).map_err(|e| named(input, e))?;
        let known = DTYPES.iter().find(|(theirs, _)| *theirs == info.dtype);
        let (dtype, shape) = match known {
            Some((_, ours)) => (*ours, info.shape.iter().map(|&d| d as u64).collect()),
            None => {
                let text = serde_json::to_string(&(info.dtype, &info.shape));
                let text = text.map_err(|e| Failure::Io(e.into()))?;
                let key = format!("{FOREIGN}{name}");
                if contents.metadata.contains_key(&key) {
                    return Err(Failure::Unsupported(format!(
                        "{input}: the metadata already has the key `{key}`, needed for the dtype of that tensor"
                    )));
                }
                contents.metadata.insert(key, text);
                (DType::Bytes, vec![data.len() as u64])
            }
        };
        writer.write(&[TensorSource::new(&name, dtype, &shape, &data)])?;
    }
    writer.finish(contents).map_err(|e| files::unless_taken(e.into(), output, force))
}

/// Reads and checks the header; returns where the data starts, and which tensors there are.
fn read_header(path: &str, file: &mut File) -> Result<(u64, Metadata)> {
    let bad = |source| Failure::Safetensors { file: path.to_owned(), source };
    let io = |e| named(path, e);
    let len = file.metadata().map_err(io)?.len();
    let mut size = [0; LENGTH];
    file.read_exact(&mut size).map_err(|e| match e.kind() {
        std::io::ErrorKind::UnexpectedEof => bad(SafeTensorError::HeaderTooSmall),
        _ => io(e),
    })?;
    let header = u64::from_le_bytes(size);
    if header > LONGEST_HEADER || header.checked_add(8).is_none_or(|end| end > len) {
        return Err(bad(SafeTensorError::HeaderTooLarge));
    }
    let mut bytes = vec![];
    file.take(header).read_to_end(&mut bytes).map_err(io)?;
    // The crate's own reader of headers needs the whole file in memory. Deserialising checks that
    // the tensors are contiguous.
    let metadata: Metadata = serde_json::from_slice(&bytes)
        .map_err(|e| bad(SafeTensorError::InvalidHeaderDeserialization(e)))?;
    let end = metadata.tensors().values().map(|i| i.data_offsets.1 as u64).max().unwrap_or(0);
    if header + 8 + end != len {
        return Err(bad(SafeTensorError::MetadataIncompleteBuffer));
    }
    Ok((header + 8, metadata))
}

/// Refuses to write tensors to anything but a .safetensors file on this machine.
pub(crate) fn require_safetensors(output: &str) -> Result<()> {
    if !output.ends_with(".safetensors") {
        return Err(Failure::Unsupported(format!(
            "{}: the output must be a .safetensors file; the Python wheel's `s4w` also writes .pt files: \
             `pip install s4weights torch`",
            redact_url(output)
        )));
    }
    if is_url(output) {
        return Err(Failure::Unsupported(format!(
            "{}: a .safetensors file can be written to a local path only, not to a URL",
            redact_url(output)
        )));
    }
    Ok(())
}

/// Refuses a pickled object at a URL if there is a time limit, because of which the wheel's `s4w` has not converted it.
pub(crate) fn refuse_pickle_in_time(reader: &Reader, input: &str) -> Result<()> {
    match LeftOut::of(reader).pickled {
        true => Err(Failure::Unsupported(format!(
            "{}: the saved object is a pickle, and only PyTorch can tell which tensors it has. With PyTorch \
             installed, the Python wheel's `s4w` writes them: leave out --timeout, which it does not support here",
            redact_url(input)
        ))),
        false => Ok(()),
    }
}

/// Writes the tensors of a .s4w file into a .safetensors file; returns their number. Warns of what
/// else the file holds. Without an `output` that the user named, which says that the tensors are
/// wanted, such a file is refused.
pub(crate) fn decompress(
    reader: &Reader,
    input: &str,
    output: Option<&str>,
    (target, force): (&str, bool),
    quiet: bool,
) -> Result<usize> {
    let arrays = Arrays::of(reader, &redact_url(input))?;
    if !arrays.left_out.is_nothing() {
        let left_out = &arrays.left_out;
        if output.is_none() {
            let input = redact_url(input);
            return Err(Failure::Unsupported(format!(
                "{input}: a .safetensors file cannot hold {left_out}. To write everything to a .pt file, use \
                 the Python wheel's `s4w`; to write only the tensors, name the output, such as {target}"
            )));
        }
        warn_of(left_out, target, quiet);
    }
    to_safetensors(reader, arrays, (target, force))
}

/// Warns of what is not written.
pub(crate) fn warn_of(left_out: &LeftOut, output: &str, quiet: bool) {
    if !quiet {
        visible::tell(&format!(
            "warning: {output} holds tensors only; left out: {left_out}. The Python wheel's `s4w` can write \
             everything to a .pt file"
        ));
    }
}

/// Writes the tensors of an open checkpoint into a .safetensors file, which with `force` may replace another; returns
/// their number.
pub(crate) fn to_safetensors(
    reader: &Reader,
    arrays: Arrays,
    (output, force): (&str, bool),
) -> Result<usize> {
    let taken = |e: s4weights::Error| files::unless_taken(e.into(), output, force);
    let Arrays { mut arrays, metadata, .. } = arrays;
    // As the safetensors crate does: wide elements first, so that all are aligned.
    arrays.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
    let header = header(&arrays, metadata).map_err(|e| {
        Failure::Unsupported(format!("{output}: safetensors cannot hold these tensors: {e}"))
    })?;
    // The crate's own writer would replace what may not be written to, pipes and devices.
    let mut out = files::target(output, force).open().map_err(taken)?;
    out.write(&header)?;
    for array in &arrays {
        out.write(&array.read(reader)?)?;
    }
    out.commit().map_err(taken)?;
    Ok(arrays.len())
}

/// A value in the header of a .safetensors file.
#[derive(Serialize)]
#[serde(untagged)]
enum Entry {
    /// Sorted, so that the same input gives the same file.
    Metadata(BTreeMap<String, String>),
    Tensor(TensorInfo),
}

/// The start of a .safetensors file, up to the values.
fn header(arrays: &[Array], metadata: HashMap<String, String>) -> Result<Vec<u8>, SafeTensorError> {
    let mut end = 0_usize;
    let tensors: Vec<_> = (arrays.iter())
        .map(|Array { name, dtype, shape, bytes, .. }| {
            let start = end;
            end = end.saturating_add(*bytes);
            let (dtype, shape, data_offsets) = (*dtype, shape.clone(), (start, end));
            (name.clone(), TensorInfo { dtype, shape, data_offsets })
        })
        .collect();
    // It checks them.
    Metadata::new(None, tensors.clone())?;
    let metadata = (!metadata.is_empty())
        .then(|| ("__metadata__".to_owned(), Entry::Metadata(metadata.into_iter().collect())));
    let tensors = tensors.into_iter().map(|(name, info)| (name, Entry::Tensor(info)));
    let mut out = vec![0; LENGTH];
    serde_json::Serializer::new(&mut out).collect_map(metadata.into_iter().chain(tensors))?;
    out.resize(out.len().next_multiple_of(LENGTH), b' ');
    let length = (out.len() - LENGTH) as u64;
    if length > LONGEST_HEADER {
        return Err(SafeTensorError::HeaderTooLarge);
    }
    out[..LENGTH].copy_from_slice(&length.to_le_bytes());
    Ok(out)
}
