//! Converts between .safetensors and .s4w, with one tensor in memory at a time.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use s4weights::{
    Contents, DType, Reader, Report, Target, TensorSource, WriteOptions, Writer, is_url, redact_url,
};
use safetensors::tensor::{Dtype, Metadata, View as SafetensorsView};

use crate::arrays::{Array, Arrays, DTYPES, FOREIGN};
use crate::error::{Failure, Result};
use crate::files::{self, Other, PICKLES};
use crate::left_out::LeftOut;
use crate::progress::Bar;
use crate::visible;

/// A path or URL with another ending.
pub(crate) fn with_ending(path: &str, ending: &str) -> String {
    let known = [".safetensors", ".s4w"].iter().chain(&PICKLES);
    let stem = known.into_iter().find_map(|e| path.strip_suffix(e)).unwrap_or(path);
    format!("{stem}.{ending}")
}

/// Refuses what only the Python wheel converts.
fn refuse_pickle(path: &str) -> Result<()> {
    let what = match Path::new(path).is_dir() {
        true => "folders of torch.distributed.checkpoint",
        false if PICKLES.iter().any(|e| path.ends_with(e)) => "PyTorch's own files",
        false => return Ok(()),
    };
    Err(Failure::Unsupported(format!(
        "{path}: {what} are converted by the Python wheel: `pip install s4weights torch`, then its `s4w`"
    )))
}

/// Says what a file without a safetensors header is; `None` if it should have one.
fn not_safetensors(path: &str) -> Option<Failure> {
    let what = match files::what_else(path, ".safetensors")? {
        Other::S4w => "a .s4w file already",
        Other::Torch => {
            "a PyTorch file or another archive: the Python wheel's `s4w` converts PyTorch files, whose \
             names end with .pt, .pth, .bin or .ckpt"
        }
        Other::Safetensors | Other::Unknown => "not a safetensors file",
    };
    Some(Failure::Unsupported(format!("{path}: {what}")))
}

fn named(path: &str, e: std::io::Error) -> Failure {
    Failure::Io(std::io::Error::new(e.kind(), format!("{path}: {e}")))
}

/// Compresses a .safetensors file.
pub(crate) fn compress(
    input: &str,
    output: &str,
    options: WriteOptions,
    bar: &Bar,
) -> Result<Report> {
    refuse_pickle(input)?;
    let mut file = File::open(input).map_err(|e| named(input, e))?;
    let (start, metadata) = read_header(input, &mut file).map_err(|e| match e {
        Failure::Safetensors { .. } => not_safetensors(input).unwrap_or(e),
        e => e,
    })?;
    let mut tensors: Vec<_> = metadata.tensors().into_iter().collect();
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let bytes = tensors.iter().map(|(_, i)| (i.data_offsets.1 - i.data_offsets.0) as u64).sum();
    bar.expect(bytes);
    let mut writer = Writer::create(Target::from(output), options)?;
    writer.expect(bytes);
    let mut contents = Contents::default();
    if let Some(text) = metadata.metadata() {
        contents.metadata.extend(text.clone());
    }
    for (name, info) in tensors {
        let (from, to) = info.data_offsets;
        let mut data = vec![0; to - from];
        file.seek(SeekFrom::Start(start + from as u64)).map_err(|e| named(input, e))?;
        file.read_exact(&mut data).map_err(|e| named(input, e))?;
        let known = DTYPES.iter().find(|(theirs, _)| *theirs == info.dtype);
        let (dtype, shape) = match known {
            Some((_, ours)) => (*ours, info.shape.iter().map(|&d| d as u64).collect()),
            None => {
                let text = serde_json::to_string(&(info.dtype, &info.shape));
                let text = text.map_err(|e| Failure::Io(e.into()))?;
                contents.metadata.insert(format!("{FOREIGN}{name}"), text);
                (DType::Bytes, vec![data.len() as u64])
            }
        };
        writer.write(&[TensorSource::new(&name, dtype, &shape, &data)])?;
    }
    Ok(writer.finish(contents)?)
}

/// Reads and checks the header; returns where the data starts, and which tensors there are.
fn read_header(path: &str, file: &mut File) -> Result<(u64, Metadata)> {
    let bad = |source| Failure::Safetensors { file: path.to_owned(), source };
    let io = |e| named(path, e);
    let len = file.metadata().map_err(io)?.len();
    let mut size = [0; 8];
    file.read_exact(&mut size).map_err(|e| match e.kind() {
        std::io::ErrorKind::UnexpectedEof => bad(safetensors::SafeTensorError::HeaderTooSmall),
        _ => io(e),
    })?;
    let header = u64::from_le_bytes(size);
    // The limit of the safetensors format.
    if header > 100_000_000 || header.checked_add(8).is_none_or(|end| end > len) {
        return Err(bad(safetensors::SafeTensorError::HeaderTooLarge));
    }
    let mut bytes = vec![];
    file.take(header).read_to_end(&mut bytes).map_err(io)?;
    // The crate's own reader of headers needs the whole file in memory. Deserialising checks that
    // the tensors are contiguous.
    let metadata: Metadata = serde_json::from_slice(&bytes)
        .map_err(|e| bad(safetensors::SafeTensorError::InvalidHeaderDeserialization(e)))?;
    let end = metadata.tensors().values().map(|i| i.data_offsets.1 as u64).max().unwrap_or(0);
    if header + 8 + end != len {
        return Err(bad(safetensors::SafeTensorError::MetadataIncompleteBuffer));
    }
    Ok((header + 8, metadata))
}

/// A tensor that is decoded when the writer asks for its bytes.
struct Lazy<'a> {
    reader: &'a Reader,
    array: &'a Array,
    failure: &'a std::sync::Mutex<Option<Failure>>,
}

impl SafetensorsView for &Lazy<'_> {
    fn dtype(&self) -> Dtype {
        self.array.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.array.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        // The trait cannot report an error: keep it, and do not rename the file later. Nothing is written for what
        // could not be read, so that the writing ends at once.
        Cow::Owned(self.array.read(self.reader).unwrap_or_else(|e| {
            self.failure.lock().unwrap_or_else(|p| p.into_inner()).get_or_insert(e);
            vec![]
        }))
    }

    fn data_len(&self) -> usize {
        self.array.bytes
    }
}

/// Refuses to write tensors to anything but a .safetensors file on this machine.
pub(crate) fn require_safetensors(output: &str) -> Result<()> {
    if !output.ends_with(".safetensors") {
        return Err(Failure::Unsupported(format!(
            "{}: tensors are written to a .safetensors file, and by the Python wheel's `s4w` to a .pt file: \
             `pip install s4weights torch`",
            redact_url(output)
        )));
    }
    if is_url(output) {
        return Err(Failure::Unsupported(format!(
            "{}: a .safetensors file is written to a path, not to a URL: name one",
            redact_url(output)
        )));
    }
    Ok(())
}

/// Writes the tensors of a .s4w file into a .safetensors file; returns their number. Warns of what
/// else the file holds. Without an `output` that the user named, which says that the tensors are
/// wanted, such a file is refused.
pub(crate) fn decompress(
    reader: &Reader,
    input: &str,
    output: Option<&str>,
    target: &str,
    quiet: bool,
) -> Result<usize> {
    let arrays = Arrays::of(reader, &redact_url(input))?;
    if !arrays.left_out.is_nothing() {
        let left_out = &arrays.left_out;
        if output.is_none() {
            let input = redact_url(input);
            return Err(Failure::Unsupported(format!(
                "{input}: a .safetensors file cannot hold {left_out}: the Python wheel's `s4w` writes all of \
                 it to a .pt file; to write the tensors alone, name the output, such as {target}"
            )));
        }
        warn_of(left_out, target, quiet);
    }
    to_safetensors(reader, arrays, target)
}

/// Warns of what is not written.
pub(crate) fn warn_of(left_out: &LeftOut, output: &str, quiet: bool) {
    if !quiet {
        visible::tell(&format!(
            "warning: {output} holds tensors only; left out: {left_out}. The Python wheel's `s4w` writes all \
             of it to a .pt file"
        ));
    }
}

/// Writes the tensors of an open checkpoint into a .safetensors file; returns their number.
pub(crate) fn to_safetensors(reader: &Reader, arrays: Arrays, output: &str) -> Result<usize> {
    let Arrays { arrays, metadata, .. } = arrays;
    let failure = std::sync::Mutex::new(None);
    let views: Vec<_> = (arrays.iter())
        .map(|array| (&array.name, Lazy { reader, array, failure: &failure }))
        .collect();
    let metadata = (!metadata.is_empty()).then_some(metadata);
    // A link stays a link, and permissions stay, as if the file were overwritten in place.
    let target = std::fs::canonicalize(output).unwrap_or_else(|_| output.into());
    let temporary = beside(&target);
    // The crate creates its file for this user alone; this one has the permissions that the umask allows.
    // What a killed process or somebody else left under its name is not written through.
    let _ = std::fs::remove_file(&temporary);
    let new = File::options().write(true).create_new(true).open(&temporary);
    let new = new.and_then(|f| f.metadata());
    let permissions = new.map_err(|e| named(output, e))?.permissions();
    let written =
        safetensors::serialize_to_file(views.iter().map(|(n, v)| (*n, v)), metadata, &temporary);
    let cannot = |e| match e {
        safetensors::SafeTensorError::IoError(e) => named(output, e),
        e => Failure::Unsupported(format!("{output}: safetensors cannot hold these tensors: {e}")),
    };
    let written = written.map_err(cannot);
    let written = written.and_then(|()| sort_metadata(&temporary).map_err(|e| named(output, e)));
    let outcome =
        written.and_then(|()| match failure.lock().unwrap_or_else(|p| p.into_inner()).take() {
            Some(e) => Err(e),
            None => replace(&temporary, &target, permissions).map_err(|e| named(output, e)),
        });
    if outcome.is_err() {
        // Whatever failed, nothing half-written stays.
        let _ = std::fs::remove_file(&temporary);
    }
    outcome.map(|()| views.len())
}

/// Sorts the metadata of a .safetensors file that the crate wrote, in place, so that the same input gives the same file:
/// the crate writes them in a different order each time.
fn sort_metadata(path: &Path) -> std::io::Result<()> {
    const BEGIN: &str = r#"{"__metadata__":"#;
    let mut file = File::options().read(true).write(true).open(path)?;
    let mut len = [0; 8];
    file.read_exact(&mut len)?;
    let mut header = String::new();
    (&file).take(u64::from_le_bytes(len)).read_to_string(&mut header)?;
    let Some(metadata) = header.strip_prefix(BEGIN) else { return Ok(()) };
    let mut values = serde_json::Deserializer::from_str(metadata).into_iter();
    let Some(sorted) = values.next().transpose()? else { return Ok(()) };
    let sorted: BTreeMap<String, String> = sorted;
    let text = serde_json::to_string(&sorted)?;
    // As long as before: the crate writes JSON by the same library.
    if text.len() == values.byte_offset() {
        file.seek(SeekFrom::Start((len.len() + BEGIN.len()) as u64))?;
        file.write_all(text.as_bytes())?;
    }
    Ok(())
}

/// A temporary name in the same folder, no longer than file systems allow.
fn beside(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let stem: String = name.chars().take(60).collect();
    target.with_file_name(format!(".{stem}.{}.tmp", std::process::id()))
}

/// Renames a file to `target`. It takes over the permissions and owner of a file that is there; if
/// there is none, it gets the permissions `new`.
fn replace(temporary: &Path, target: &Path, new: std::fs::Permissions) -> std::io::Result<()> {
    let old = std::fs::metadata(target).ok();
    #[cfg(unix)]
    if let Some(old) = &old {
        use std::os::unix::fs::{MetadataExt, chown};
        // Only root may give files away, but anyone may choose one of their own groups.
        if chown(temporary, Some(old.uid()), Some(old.gid())).is_err() {
            let _ = chown(temporary, None, Some(old.gid()));
        }
    }
    // A crash must leave the old file or the new one. Opened before the permissions may forbid it.
    File::options().write(true).open(temporary)?.sync_all()?;
    std::fs::set_permissions(temporary, old.map_or(new, |old| old.permissions()))?;
    std::fs::rename(temporary, target)
}
