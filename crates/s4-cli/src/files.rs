//! Tells what files are before they are read, and checks whether others may be written.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

use s4weights::format::Error as FormatError;
use s4weights::format::file::{END_MAGIC, ends_s4w, is_s4w};
use s4weights::{Cause, Error, ReadOptions, Reader, Source, is_url, redact_url};

use crate::error::{Failure, Result};

/// The endings of PyTorch's own files.
pub(crate) const PICKLES: [&str; 4] = [".pt", ".pth", ".bin", ".ckpt"];

/// Opens a .s4w file.
///
/// # Errors
/// As [`Reader::open`]; `Unsupported` for a sound file of another format.
pub(crate) fn open(input: &str, options: ReadOptions) -> Result<Reader> {
    Reader::open(Source::from(input), options).map_err(|e| {
        let other = is_no_s4w(&e).then(|| what_else(input, ".s4w")).flatten();
        other.map_or_else(|| e.into(), |what| no_s4w(input, what))
    })
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
            format!("{input}: a safetensors file, not a .s4w file: `s4w compress` makes one of it")
        }
        Other::Torch => format!(
            "{input}: a PyTorch file or another archive, not a .s4w file: the Python wheel's `s4w \
             compress` makes one of a PyTorch file"
        ),
        Other::S4w | Other::Unknown => format!("{input}: not a .s4w file"),
    })
}

/// What a file is that is not in the expected format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Other {
    S4w,
    Safetensors,
    /// A ZIP archive or a pickle.
    Torch,
    Unknown,
}

/// What a file is that could not be read as one with this ending; `None`: it is one, but damaged.
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
            "{name}: input and output are the same file, and nothing was changed: name another output"
        )));
    }
    if !force && is_there(output, options)? {
        return Err(Failure::Conflict(format!("{name} exists already; --force replaces it")));
    }
    Ok(())
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
fn identity(path: &std::path::Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let found = fs::metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

#[cfg(not(unix))]
fn identity(path: &std::path::Path) -> Option<PathBuf> {
    fs::canonicalize(path).ok()
}

/// The path that a name or a `file:` URL refers to.
fn local(name: &str) -> Option<PathBuf> {
    if !is_url(name) {
        return Some(name.into());
    }
    let (scheme, rest) = name.trim().split_once("://")?;
    let path = rest.strip_prefix("localhost").unwrap_or(rest);
    (scheme.eq_ignore_ascii_case("file") && path.starts_with('/')).then(|| decoded(path).into())
}

/// The path of a URL, with `%20` and the like decoded.
fn decoded(path: &str) -> String {
    let mut out = vec![];
    let mut rest = path.as_bytes();
    while let [first, after @ ..] = rest {
        let code = after.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match code.and_then(|hex| u8::from_str_radix(hex, 16).ok()).filter(|_| *first == b'%') {
            Some(byte) => {
                out.push(byte);
                rest = &after[2..];
            }
            None => {
                out.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
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
