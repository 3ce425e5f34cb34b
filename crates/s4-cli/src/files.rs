//! Tells what files are before they are read, and checks whether others may be written.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use s4weights::format::Error as FormatError;
use s4weights::format::file::{END_MAGIC, ends_s4w, is_s4w};
use s4weights::{Cause, Error, ReadOptions, Reader, Source, Target, is_url, redact_url};

use crate::error::{Failure, Result};

/// The endings of PyTorch's own files.
pub(crate) const PICKLES: [&str; 4] = [".pt", ".pth", ".bin", ".ckpt"];

/// Opens a .s4w file.
///
/// # Errors
/// As [`Reader::open`]; `Unsupported` for a sound file of another format.
pub(crate) fn open(input: &str, options: ReadOptions) -> Result<Reader> {
    refuse_stream(input)?;
    Reader::open(Source::from(input), options).map_err(|e| {
        let other = is_no_s4w(&e).then(|| what_else(input, ".s4w")).flatten();
        other.map_or_else(|| e.into(), |what| no_s4w(input, what))
    })
}

/// Refuses a pipe or a device, just as `-` is refused: opening one again would wait forever.
///
/// # Errors
/// `Usage`.
pub(crate) fn refuse_stream(input: &str) -> Result<()> {
    let found = local(input).and_then(|path| fs::metadata(path).ok());
    match found.is_some_and(|m| !m.is_file() && !m.is_dir()) {
        true => Err(Failure::Usage(format!(
            "{}: the input cannot be a pipe or a device, because it is read by range: name a file",
            redact_url(input)
        ))),
        false => Ok(()),
    }
}

fn is_no_s4w(error: &Error) -> bool {
    let Error::Format { source: FormatError::Corrupt { what, .. }, .. } = error else {
        return false;
    };
    what.starts_with("not a .s4w file")
}

fn no_s4w(input: &str, other: Other) -> Failure {
    let input = redact_url(input);
    Failure::Unsupported(match other {
        Other::Safetensors => {
            format!("{input}: a safetensors file, not a .s4w file: convert it with `s4w compress`")
        }
        Other::Torch => format!(
            "{input}: a PyTorch file or another archive, not a .s4w file: convert a PyTorch file with \
             `s4w compress` of the Python wheel"
        ),
        Other::S4w | Other::Unknown => format!("{input}: not a .s4w file"),
    })
}

/// The actual format of a file that is not in the expected one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Other {
    S4w,
    Safetensors,
    /// A ZIP archive or a pickle.
    Torch,
    Unknown,
}

/// The actual format of a file that could not be read as one with this ending; `None`: it has the expected format,
/// but is damaged.
pub(crate) fn what_else(input: &str, ending: &str) -> Option<Other> {
    let unknown = (!input.ends_with(ending)).then_some(Other::Unknown);
    if is_url(input) {
        return unknown;
    }
    let Ok((head, tail)) = look(input) else { return unknown };
    match () {
        () if is_s4w(&head) || ends_s4w(&tail) => (ending != ".s4w").then_some(Other::S4w),
        () if is_safetensors(&head) => (ending != ".safetensors").then_some(Other::Safetensors),
        () if head.starts_with(b"PK\x03\x04") || head.starts_with(b"\x80") && head[1] <= 5 => {
            Some(Other::Torch)
        }
        () => unknown,
    }
}

/// The first bytes of a file, and its last ones.
fn look(input: &str) -> std::io::Result<([u8; 9], Vec<u8>)> {
    let mut file = File::open(input)?;
    let (mut head, mut tail) = ([0; 9], vec![]);
    file.read_exact(&mut head)?;
    let end = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(end.saturating_sub(END_MAGIC.len() as u64)))?;
    file.read_to_end(&mut tail)?;
    Ok((head, tail))
}

/// Whether a file begins with a header length within the format's limit, and the header's first brace.
fn is_safetensors(head: &[u8; 9]) -> bool {
    let [a, b, c, d, e, f, g, h, brace] = *head;
    let length = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
    brace == b'{' && (2..=100_000_000).contains(&length)
}

/// Refuses to overwrite the file that is read and, without `force`, any other file. Devices and
/// pipes may be written to, and so may objects of a bucket that grants no permission to read.
///
/// # Errors
/// `Usage`, `Conflict`, or the error of an object store that does not answer.
pub(crate) fn check_output(
    input: Option<&str>,
    output: &str,
    force: bool,
    options: ReadOptions,
) -> Result<()> {
    let name = redact_url(output);
    if input.is_some_and(|input| is_same(input, output)) {
        return Err(Failure::Usage(format!(
            "{name}: input and output are the same file; nothing was changed. Name another output"
        )));
    }
    if !force && is_there(output, options)? {
        return Err(taken(output));
    }
    Ok(())
}

/// The target of an output that has been checked. Without `force`, it does not replace a local file that appears
/// in the meantime either; an object is replaced.
pub(crate) fn target(output: &str, force: bool) -> Target {
    match local(output) {
        Some(path) if !force => Target::New(redact_url(output).into_owned(), path),
        _ => Target::from(output),
    }
}

/// The failure of a command; a conflict if its output appeared in the meantime.
pub(crate) fn unless_taken(failure: Failure, output: &str, force: bool) -> Failure {
    match failure {
        Failure::Library(Error::Io { target, action: "create" | "rename", source })
            if !force
                && source.kind() == std::io::ErrorKind::AlreadyExists
                && target == redact_url(output) =>
        {
            taken(output)
        }
        other => other,
    }
}

fn taken(output: &str) -> Failure {
    Failure::Conflict(format!("{} exists already; --force replaces it", redact_url(output)))
}

fn is_there(output: &str, options: ReadOptions) -> Result<bool> {
    if let Some(path) = local(output) {
        return Ok(fs::metadata(path).is_ok_and(|m| m.is_file()));
    }
    match Reader::open(Source::from(output), options) {
        Err(Error::NotFound { .. }) => Ok(false),
        Ok(_) | Err(Error::Format { .. }) => Ok(true),
        Err(e) if e.cause() == Some(Cause::Permission) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Whether two names refer to the same file, also through links or paths that are spelled differently.
fn is_same(input: &str, output: &str) -> bool {
    let identity = |name| identity(&local(name)?);
    input == output || identity(input).is_some_and(|i| identity(output) == Some(i))
}

#[cfg(unix)]
fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let found = fs::metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

#[cfg(not(unix))]
fn identity(path: &Path) -> Option<PathBuf> {
    fs::canonicalize(path).ok()
}

/// The path that a name or a `file:` URL refers to, as the library reads it; `None` for what is elsewhere, and for a
/// URL that makes no sense, which is an error when it is opened.
pub(crate) fn local(name: &str) -> Option<PathBuf> {
    Target::from(name).local_path().ok().flatten()
}

/// The folder that a file is in.
pub(crate) fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::{is_same, local};

    #[test]
    fn a_file_has_many_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a b%");
        std::fs::write(&path, b"x").unwrap();
        let plain = path.to_str().unwrap();
        let url = format!("FILE://{}", plain.replace('%', "%25").replace(' ', "%20"));
        assert_eq!(local(&url).as_deref(), Some(path.as_path()));
        assert_eq!(local("s3://bucket/a"), None);
        assert_eq!(local("file://elsewhere/a"), None);
        // As the parser of URLs has it.
        for name in [r"no\..\a b%25", "no/../a%20b%25", "no/%2e%2E/a b%25", "./a\t b%25\n"] {
            let url = format!(" file://localhost{}/{name}", dir.path().display());
            assert_eq!(local(&url).as_deref(), Some(path.as_path()), "{url}");
            assert!(is_same(plain, &url), "{url}");
        }
        assert!(is_same(plain, &url));
        assert!(is_same(plain, &format!("{}/./a b%", dir.path().display())));
        assert!(!is_same(plain, dir.path().join("b").to_str().unwrap()));
        assert!(is_same("s3://bucket/a", "s3://bucket/a"));
        #[cfg(unix)]
        {
            let names = ["hard", "soft"].map(|name| dir.path().join(name));
            std::fs::hard_link(&path, &names[0]).unwrap();
            std::os::unix::fs::symlink(&path, &names[1]).unwrap();
            assert!(names.iter().all(|name| is_same(plain, name.to_str().unwrap())));
        }
    }
}
