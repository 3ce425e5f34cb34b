//! Parses values of options strictly: an invalid value is an error that names the option and its valid
//! values. Values may be secrets and are not repeated.

use std::ops::RangeInclusive;
use std::time::Duration;

use url::Url;

use crate::error::{Error, Result};

const LONGEST: Duration = Duration::from_secs(24 * 3600);

pub(super) fn bad(name: &str, expected: &str) -> Error {
    Error::Argument(format!("storage option `{name}`: expected {expected}"))
}

/// `true` or `false`, in the usual spellings.
pub(super) fn boolean(name: &str, value: &str) -> Result<bool> {
    truth(value).ok_or_else(|| bad(name, "`true` or `false`"))
}

pub(super) fn truth(value: &str) -> Option<bool> {
    match value.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "y" | "on" => Some(true),
        "0" | "false" | "no" | "n" | "off" => Some(false),
        _ => None,
    }
}

/// Settings of the environment, overridden by the options. All credentials come from one source: if the options
/// have some, those of the environment are ignored, and so is its choice among them (`kind`). If there are several
/// kinds, a builder applies its own order, or refuses them.
pub(super) fn of_one_source<K: PartialEq>(
    mut inherited: Vec<(K, String)>,
    given: Vec<(K, String)>,
    is_credential: impl Fn(&K) -> bool,
    kind: Option<K>,
) -> impl Iterator<Item = (K, String)> {
    if given.iter().any(|(key, value)| is_credential(key) && value != "false") {
        inherited.retain(|(key, _)| !is_credential(key) && kind.as_ref() != Some(key));
    }
    inherited.into_iter().chain(given)
}

/// Seconds, or a number with a unit: `30`, `2.5`, `500ms`, `5m`.
pub(super) fn duration(name: &str, value: &str) -> Result<Duration> {
    let text = value.trim();
    let time = match text.parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        Err(_) => humantime::parse_duration(text).ok(),
    };
    let expected = "a positive time of at most a day, such as `30`, `500ms` or `5m`";
    time.filter(|t| !t.is_zero() && *t <= LONGEST).ok_or_else(|| bad(name, expected))
}

pub(super) fn count(name: &str, value: &str, range: RangeInclusive<u64>) -> Result<u64> {
    let n = value.trim().parse().ok().filter(|n| range.contains(n));
    n.ok_or_else(|| bad(name, &format!("a number from {} to {}", range.start(), range.end())))
}

/// The allowed word that matches the value, ignoring case.
pub(super) fn word(name: &str, value: &str, allowed: &[&'static str]) -> Result<&'static str> {
    let found = allowed.iter().find(|word| word.eq_ignore_ascii_case(value.trim()));
    let list = || allowed.iter().map(|w| format!("`{w}`")).collect::<Vec<_>>().join(" or ");
    found.copied().ok_or_else(|| bad(name, &list()))
}

/// The address of a server.
pub(super) fn address(name: &str, value: &str) -> Result<String> {
    let wrong = || bad(name, "an address such as `https://host:port`, without user and query");
    let url = Url::parse(value.trim()).map_err(|_| wrong())?;
    let plain = url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none();
    let fits = matches!(url.scheme(), "http" | "https") && url.host_str().is_some() && plain;
    if fits { Ok(value.trim().to_owned()) } else { Err(wrong()) }
}

/// The error for an unknown option, with the name that may have been meant.
pub(super) fn unknown(kind: &str, name: &str, known: &[&str]) -> Error {
    let lower = name.to_ascii_lowercase();
    let near = known.iter().map(|k| (distance(&lower, k), k)).min();
    let meant = near.filter(|(d, k)| *d <= 1 + k.len() / 4).map(|(_, k)| k);
    let hint = meant.map(|k| format!("; did you mean `{k}`?")).unwrap_or_default();
    Error::Argument(format!("unknown storage option `{name}` for {kind}{hint}"))
}

/// The number of letters to change, add, drop or swap to turn one word into the other.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(64).collect(), b.chars().collect());
    let mut before: Vec<usize> = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 0..a.len() {
        let mut row = vec![i + 1];
        for j in 0..b.len() {
            let mut cost =
                (last[j] + usize::from(a[i] != b[j])).min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j] {
                cost = cost.min(before[j - 1] + 1);
            }
            row.push(cost);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

/// Options, or an environment, of these names and values.
#[cfg(test)]
pub(super) fn map(pairs: &[(&str, &str)]) -> std::collections::BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_taken_strictly() {
        for (text, expected) in [("True", Some(true)), ("off", Some(false)), (" 1 ", Some(true))] {
            assert_eq!(boolean("x", text).ok(), expected);
        }
        for (text, ms) in [("30", 30_000), ("0.5", 500), ("500ms", 500), ("2 min", 120_000)] {
            assert_eq!(duration("x", text).unwrap(), Duration::from_millis(ms), "{text}");
        }
        for hush in ["maybe", "", "truee", "/path/hush"] {
            let error = boolean("verify", hush).unwrap_err().to_string();
            assert!(error.contains("`verify`") && error.contains("`true`"), "{error}");
            assert!(!error.contains("hush"));
        }
        for wrong in ["0", "-1", "nan", "inf", "1e99", "2 days", "soon", ""] {
            assert!(duration("x", wrong).is_err(), "{wrong}");
        }
        assert_eq!(count("x", "7", 1..=10).unwrap(), 7);
        assert!(count("x", "11", 1..=10).is_err() && count("x", "-1", 0..=10).is_err());
        assert_eq!(word("x", "Virtual", &["path", "virtual"]).unwrap(), "virtual");
        assert!(word("x", "virtal", &["path", "virtual"]).is_err());
        assert_eq!(address("e", "http://127.0.0.1:9/x").unwrap(), "http://127.0.0.1:9/x");
        for wrong in ["127.0.0.1:9", "ftp://x", "https://u:hush@h", "https://h?sig=hush", "http://"]
        {
            let error = address("e", wrong).unwrap_err().to_string();
            assert!(!error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn a_slip_is_recognised() {
        let known = ["endpoint_url", "secret_access_key", "region", "verify"];
        for (slip, meant) in [
            ("endpont_url", Some("endpoint_url")),
            ("verfiy", Some("verify")),
            ("Regoin", Some("region")),
            ("colour", None),
        ] {
            let error = unknown("S3", slip, &known).to_string();
            let hint = meant
                .map(|m| format!("did you mean `{m}`?"))
                .unwrap_or(format!("unknown storage option `{slip}` for S3"));
            assert!(error.ends_with(&hint), "{error}");
        }
    }
}
