//! Start and end of a `.s4w` file.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::digest::{Digest, crc32c};
use crate::error::{Error, Result};
use crate::limits::MAX_MANIFEST;
use crate::wire::Cursor;

/// Version of the format. Written as a pair in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u16, u16)", into = "(u16, u16)")]
pub struct Version {
    /// Changes when readers of the older version cannot read the newer one.
    pub major: u16,
    /// While the major version is 0, readers refuse any other minor version.
    pub minor: u16,
}

impl From<(u16, u16)> for Version {
    fn from((major, minor): (u16, u16)) -> Self {
        Self { major, minor }
    }
}

impl From<Version> for (u16, u16) {
    fn from(v: Version) -> Self {
        (v.major, v.minor)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Version {
    /// The version that this crate writes and reads.
    pub const CURRENT: Self = Self { major: 0, minor: 2 };

    /// Checks that this crate reads the version.
    ///
    /// # Errors
    /// `Unsupported`, naming both versions.
    pub fn require_readable(self) -> Result<()> {
        if self == Self::CURRENT {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "file has format {self}, but this version reads format {}",
            Self::CURRENT
        )))
    }
}

/// First bytes of a file. The high bit and the line ends reveal copies that were treated as text.
pub const MAGIC: [u8; 8] = *b"\x89S4W\r\n\x1a\n";
/// Last bytes of a file.
pub const END_MAGIC: [u8; 8] = *b"S4W-END\n";
/// Bytes of the header.
pub const HEADER_LEN: usize = 16;
/// Bytes of the footer.
pub const FOOTER_LEN: usize = 64;

/// The header of a file: magic, version, 4 reserved bytes.
pub fn header() -> [u8; HEADER_LEN] {
    let mut out = [0; HEADER_LEN];
    out[..8].copy_from_slice(&MAGIC);
    out[8..10].copy_from_slice(&Version::CURRENT.major.to_le_bytes());
    out[10..12].copy_from_slice(&Version::CURRENT.minor.to_le_bytes());
    out
}

/// Whether bytes start like a `.s4w` file.
pub fn is_s4w(start: &[u8]) -> bool {
    start.starts_with(&MAGIC)
}

/// Whether bytes end like a `.s4w` file.
pub fn ends_s4w(end: &[u8]) -> bool {
    end.ends_with(&END_MAGIC)
}

/// Length of the `.s4w` file at the start of `bytes`, whatever follows it; `None` if it has no
/// complete footer.
pub fn first_len(bytes: &[u8]) -> Option<usize> {
    // The end magic may also occur inside the file, but not after a footer that is valid for a file
    // of just that length.
    memchr::memmem::find_iter(bytes, &END_MAGIC).find_map(|at| {
        let end = at + END_MAGIC.len();
        let tail = &bytes[end.saturating_sub(FOOTER_LEN)..end];
        Footer::parse(tail, end as u64).is_ok().then_some(end)
    })
}

/// Checks a file's header.
///
/// # Errors
/// `Truncated`, `Corrupt` (not a `.s4w` file) or `Unsupported` (another version).
pub fn check_header(bytes: &[u8]) -> Result<()> {
    let parse = || {
        let mut c = Cursor::new(bytes);
        if c.take(8)? != MAGIC {
            return Err(Error::corrupt("not a .s4w file: magic bytes differ"));
        }
        Version { major: c.u16()?, minor: c.u16()? }.require_readable()?;
        match c.u32()? {
            0 => Ok(()),
            _ => Err(Error::corrupt("reserved bits are set")),
        }
    };
    parse().map_err(|e| e.in_part("header"))
}

/// The footer: the place of the manifest, and its hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footer {
    /// Offset of the manifest in the file.
    pub offset: u64,
    /// Bytes of the manifest.
    pub len: u64,
    /// BLAKE3 of the manifest.
    pub digest: Digest,
}

impl Footer {
    /// The footer's bytes: the last ones of the file.
    pub fn to_bytes(&self) -> [u8; FOOTER_LEN] {
        let mut out = [0; FOOTER_LEN];
        out[0..8].copy_from_slice(&self.offset.to_le_bytes());
        out[8..16].copy_from_slice(&self.len.to_le_bytes());
        out[16..48].copy_from_slice(&self.digest.0);
        out[48..50].copy_from_slice(&Version::CURRENT.major.to_le_bytes());
        out[50..52].copy_from_slice(&Version::CURRENT.minor.to_le_bytes());
        let crc = crc32c(&out[..52]);
        out[52..56].copy_from_slice(&crc.to_le_bytes());
        out[56..64].copy_from_slice(&END_MAGIC);
        out
    }

    /// Reads the footer from the last bytes of a file of `file_len` bytes.
    ///
    /// # Errors
    /// `Truncated` if the end magic is missing, `Corrupt` if the checksum or the manifest's place
    /// is wrong, `Unsupported` for another version, `Limit` for a manifest that is too long.
    pub fn parse(tail: &[u8], file_len: u64) -> Result<Self> {
        Self::parse_inner(tail, file_len).map_err(|e| e.in_part("footer"))
    }

    fn parse_inner(tail: &[u8], file_len: u64) -> Result<Self> {
        let start = tail.len().checked_sub(FOOTER_LEN);
        let Some(bytes) = start.map(|s| &tail[s..]) else {
            return Err(Error::truncated(format!("file of {file_len} bytes has no footer")));
        };
        if bytes[56..] != END_MAGIC {
            return Err(Error::truncated(
                "the end of the file is missing: the file was truncated or never fully written",
            ));
        }
        let mut c = Cursor::new(bytes);
        let (offset, len) = (c.u64()?, c.u64()?);
        let mut digest = Digest([0; 32]);
        digest.0.copy_from_slice(c.take(32)?);
        let version = Version { major: c.u16()?, minor: c.u16()? };
        if c.u32()? != crc32c(&bytes[..52]) {
            return Err(Error::corrupt("checksum mismatch"));
        }
        version.require_readable()?;
        let end = offset.checked_add(len).and_then(|e| e.checked_add(FOOTER_LEN as u64));
        if end != Some(file_len) || offset < HEADER_LEN as u64 {
            return Err(Error::corrupt(format!(
                "manifest of {len} bytes at {offset} does not end at the footer of the file, which has \
                 {file_len} bytes"
            )));
        }
        if len > MAX_MANIFEST {
            return Err(Error::limit(format!(
                "manifest has {len} bytes, at most {MAX_MANIFEST} allowed"
            )));
        }
        Ok(Self { offset, len, digest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_several_files_is_measured() {
        let file = |filling: &[u8]| {
            let mut bytes = header().to_vec();
            bytes.extend(filling);
            let footer = Footer { offset: 16, len: filling.len() as u64, digest: Digest([7; 32]) };
            bytes.extend(footer.to_bytes());
            bytes
        };
        let nested = file(b"x");
        // The content holds an end magic, and a whole file that starts elsewhere.
        let first = file(&[&END_MAGIC[..], &nested].concat());
        assert_eq!(first_len(&first), Some(first.len()));
        assert_eq!(first_len(&[&first[..], &nested, b"more"].concat()), Some(first.len()));
        assert_eq!(first_len(&first[..first.len() - 1]), None);
        assert_eq!(first_len(&END_MAGIC), None);
        assert_eq!(first_len(&[]), None);
        assert!(ends_s4w(&first) && !ends_s4w(&first[..first.len() - 1]) && !ends_s4w(b"END"));
    }

    #[test]
    fn every_flip_in_header_and_footer_is_found() {
        let h = header();
        check_header(&h).unwrap();
        let f = Footer { offset: 16, len: 20, digest: Digest::of(b"x") };
        let bytes = f.to_bytes();
        assert_eq!(Footer::parse(&bytes, 100).unwrap(), f);
        for bit in 0..FOOTER_LEN * 8 {
            let mut b = bytes;
            b[bit / 8] ^= 1 << (bit % 8);
            assert!(Footer::parse(&b, 100).is_err(), "bit {bit}");
        }
        for bit in 0..HEADER_LEN * 8 {
            let mut b = h;
            b[bit / 8] ^= 1 << (bit % 8);
            assert!(check_header(&b).is_err(), "bit {bit}");
        }
        assert!(Footer::parse(&bytes, 101).is_err());
        assert!(matches!(Footer::parse(&bytes[1..], 99), Err(Error::Truncated { .. })));
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let mut h = header();
        h[10] = 7;
        let e = check_header(&h).unwrap_err();
        assert!(matches!(e, Error::Unsupported { .. }));
        assert!(
            e.to_string().contains("format 0.7") && e.to_string().contains("format 0.2"),
            "{e}"
        );
    }
}
