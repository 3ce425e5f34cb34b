//! JSON that carries its own hash: `{...}\n"blake3:<hex>"\n`.
//!
//! Only the next log entry names a log entry's hash, so without a seal nothing would vouch for the
//! newest one; the same is true of `repo.json` and of hints. Both lines are JSON: any tool can read
//! them.

use s4_format::Digest;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

const PREFIX: &str = "\"blake3:";
/// A new line, the prefix, 64 digits, a quote, a new line.
const TAIL: usize = 1 + PREFIX.len() + 64 + 2;

/// Serialises and seals.
pub(crate) fn seal<T: Serialize>(key: &str, value: &T) -> Result<Vec<u8>> {
    let mut bytes =
        serde_json::to_vec(value).map_err(|e| Error::Argument(format!("{key}: {e}")))?;
    let tail = format!("\n{PREFIX}{}\"\n", Digest::of(&bytes));
    bytes.extend_from_slice(tail.as_bytes());
    Ok(bytes)
}

/// Checks the seal, then parses.
pub(crate) fn open<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T> {
    parse(key, unseal(bytes).ok_or_else(|| Error::corrupt(key, "its seal does not match"))?)
}

/// Parses a JSON line strictly: no member may occur twice, not even in a map.
pub(crate) fn parse<T: DeserializeOwned>(key: &str, body: &[u8]) -> Result<T> {
    s4_format::json::check(body).map_err(|e| Error::corrupt(key, e))?;
    serde_json::from_slice(body).map_err(|e| Error::corrupt(key, e))
}

/// The JSON line, if the seal matches. For callers that look at a version before they parse.
pub(crate) fn unseal(bytes: &[u8]) -> Option<&[u8]> {
    let (body, tail) = bytes.split_at_checked(bytes.len().checked_sub(TAIL)?)?;
    let expected = format!("\n{PREFIX}{}\"\n", Digest::of(body));
    (tail == expected.as_bytes()).then_some(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flip_and_every_cut_is_seen() {
        let sealed = seal("k", &vec![1, 2, 3]).unwrap();
        assert_eq!(open::<Vec<i32>>("k", &sealed).unwrap(), [1, 2, 3]);
        for i in 0..sealed.len() {
            assert!(open::<Vec<i32>>("k", &sealed[..i]).is_err());
            for bit in 0..8 {
                let mut bad = sealed.clone();
                bad[i] ^= 1 << bit;
                assert!(matches!(open::<Vec<i32>>("k", &bad), Err(Error::Corrupt { .. })));
            }
        }
    }

    #[test]
    fn no_member_is_there_twice() {
        type Maps = std::collections::BTreeMap<String, std::collections::BTreeMap<String, i32>>;
        let body = r#"{"a":{"x":1},"b":{"x":1}}"#;
        assert_eq!(parse::<Maps>("k", body.as_bytes()).unwrap().len(), 2);
        for twice in [body.replace("\"b\"", "\"a\""), body.replace("1}}", "1,\"x\":2}}")] {
            let e = parse::<Maps>("k", twice.as_bytes()).unwrap_err();
            assert!(
                matches!(&e, Error::Corrupt { .. }) && e.to_string().contains("duplicate key"),
                "{e}"
            );
        }
    }

    #[test]
    fn lines_are_json() {
        let sealed = seal("k", &7).unwrap();
        for line in std::str::from_utf8(&sealed).unwrap().lines() {
            serde_json::from_str::<serde_json::Value>(line).unwrap();
        }
    }
}
