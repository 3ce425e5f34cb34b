//! Checksums: CRC-32C against accidents, BLAKE3 as identity.

use std::fmt;
use std::str::FromStr;

use crc_fast::{CrcAlgorithm, Digest as Digester};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::Error;

/// CRC-32C (Castagnoli; iSCSI, RFC 3720) of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    // The checksum is 32 bits wide; the crate returns every width as u64.
    u32::try_from(crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes)).unwrap_or(0)
}

/// CRC-32C of some bytes followed by `bytes`, given `crc`, the CRC-32C of the first.
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    let state = u64::from(!crc);
    let mut digest = Digester::new_with_init_state(CrcAlgorithm::Crc32Iscsi, state);
    digest.update(bytes);
    u32::try_from(digest.finalize()).unwrap_or(0)
}

/// CRC-32C of the concatenation of several parts.
pub(crate) fn crc32c_of_parts<'a>(parts: impl Iterator<Item = &'a [u8]>) -> u32 {
    parts.fold(0, crc32c_append)
}

/// A BLAKE3 hash of 256 bits. Written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The hash of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl FromStr for Digest {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self, Error> {
        let hash = blake3::Hash::from_hex(s)
            .map_err(|e| Error::corrupt(format!("`{s}` is not a BLAKE3 hash: {e}")))?;
        Ok(Self(*hash.as_bytes()))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        let digest: Self = text.parse().map_err(serde::de::Error::custom)?;
        // A hash has only one spelling, so that texts can be compared.
        if digest.to_string() == text {
            Ok(digest)
        } else {
            Err(serde::de::Error::custom("a hash must be in lower case"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_of_the_standard_check_string() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn digests_round_trip_through_text() {
        let d = Digest::of(b"abc");
        assert_eq!(d.to_string().parse::<Digest>().unwrap(), d);
        assert!("xyz".parse::<Digest>().is_err());
        let json = serde_json::to_string(&d).unwrap();
        assert_eq!(serde_json::from_str::<Digest>(&json).unwrap(), d);
        assert!(serde_json::from_str::<Digest>(&json.to_uppercase()).is_err());
        assert!(serde_json::from_str::<Digest>("\"00\"").is_err());
    }
}
