//! `repo.json`: what a store is. Created once; only opening the store to many writers changes it.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::probe::ProbeReport;
use crate::seal;

/// The version of the layout that this library reads and writes.
const FORMAT: u32 = 1;

/// The most bytes of `repo.json`.
pub(crate) const MAX_REPO: u64 = 64 << 10;

/// How many processes may write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Any number: the object store creates an object only if it is absent.
    Many,
    /// One at a time, guarded by a lease.
    Single,
}

/// The content of `repo.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Repo {
    /// Version of the layout.
    pub format: u32,
    /// The oldest version of the layout that a reader must know.
    pub min_reader: u32,
    /// Identifies the store.
    pub id: Uuid,
    /// How many processes may write.
    pub mode: Mode,
    /// The probe's findings when the store was created. For one writer at a time no races are run.
    pub probe: ProbeReport,
    /// The kind and address of the object store that was probed. A store that was moved to another
    /// one is probed again before it is written to.
    pub probed_at: String,
    /// The clock of its creator in milliseconds since 1970.
    pub created_ms: i64,
    /// The library that created it.
    pub created_by: String,
}

impl Repo {
    pub(crate) fn new(id: Uuid, mode: Mode, probe: ProbeReport, probed_at: &str) -> Self {
        Self {
            format: FORMAT,
            min_reader: FORMAT,
            id,
            mode,
            probe,
            probed_at: probed_at.to_owned(),
            created_ms: chrono::Utc::now().timestamp_millis(),
            created_by: concat!("s4-store ", env!("CARGO_PKG_VERSION")).to_owned(),
        }
    }

    pub(crate) fn to_bytes(&self, key: &str) -> Result<Vec<u8>> {
        seal::seal(key, self)
    }

    pub(crate) fn parse(key: &str, bytes: &[u8]) -> Result<Self> {
        let body = seal::unseal(bytes).ok_or_else(|| {
            let what = "its seal does not match: it is damaged, or was not written by s4weights; restore \
                        `repo.json` from a copy, or move the rest away";
            Error::corrupt(key, what)
        })?;
        let value: Value = serde_json::from_slice(body).map_err(|e| Error::corrupt(key, e))?;
        match value.get("min_reader").and_then(Value::as_u64) {
            Some(min) if min <= u64::from(FORMAT) => {}
            Some(min) => {
                let what = format!(
                    "it needs a reader of layout {min}, but this library reads layout {FORMAT}"
                );
                return Err(Error::Unsupported { key: key.to_owned(), what });
            }
            None => return Err(Error::corrupt(key, "it does not name a layout")),
        }
        seal::parse(key, body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_layout_is_refused_by_name() {
        let mut repo = Repo::new(Uuid::nil(), Mode::Many, ProbeReport::default(), "memory");
        let bytes = repo.to_bytes("repo.json").unwrap();
        assert_eq!(Repo::parse("repo.json", &bytes).unwrap(), repo);
        let damaged = Repo::parse("repo.json", &bytes[1..]).unwrap_err();
        assert!(damaged.to_string().contains("from a copy"), "{damaged}");
        repo.min_reader = 2;
        let bytes = repo.to_bytes("repo.json").unwrap();
        let error = Repo::parse("repo.json", &bytes).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }

    #[test]
    fn a_member_stands_once_also_where_it_is_unknown() {
        let repo = Repo::new(Uuid::nil(), Mode::Many, ProbeReport::default(), "memory");
        let body = serde_json::to_string(&repo).unwrap();
        let with = |more: &str| {
            let body = body.replacen('{', &format!("{{{more},"), 1);
            let value: Box<serde_json::value::RawValue> = serde_json::from_str(&body).unwrap();
            Repo::parse("repo.json", &seal::seal("repo.json", &value).unwrap())
        };
        assert_eq!(with(r#""later":{"a":1}"#).unwrap(), repo);
        for twice in [r#""later":{"a":1,"a":1}"#, r#""later":1,"later":2"#, r#""created_ms":0"#] {
            let error = with(twice).unwrap_err();
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        }
    }
}
