//! Checks that hold for every JSON text of the format, whatever its type: no object has a member
//! twice, and no string holds half of a surrogate pair.
//!
//! `serde` checks this for the members of structs, but not for maps, nor for JSON that is kept as
//! text, as the manifest's tree is.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::bounded::take;
use crate::limits::MAX_ENTRIES;

/// Checks a JSON text before it is parsed; nothing else may precede or follow it. Objects nested in
/// each other may have at most [`MAX_ENTRIES`] members together.
///
/// # Errors
/// The error in the text, and its place. Callers report it as `Corrupt`.
pub fn check(json: &[u8]) -> serde_json::Result<()> {
    let mut parser = serde_json::Deserializer::from_slice(json);
    let mut left = MAX_ENTRIES;
    AnyValue { left: &mut left }.deserialize(&mut parser)?;
    parser.end()
}

/// A value of any type.
struct AnyValue<'a> {
    /// Number of members that the open objects may still have; an object returns its own when it
    /// ends.
    left: &'a mut usize,
}

/// The name of a member, copied only if it has escapes.
#[derive(Deserialize, PartialEq, Eq, Hash)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de> DeserializeSeed<'de> for AnyValue<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for AnyValue<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(AnyValue { left: self.left })?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut names = HashSet::new();
        while let Some(Name(name)) = map.next_key()? {
            take(self.left)?;
            if names.contains(&name) {
                return Err(A::Error::custom(format!("duplicate key `{}`", name.escape_debug())));
            }
            names.insert(name);
            map.next_value_seed(AnyValue { left: self.left })?;
        }
        *self.left += names.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_json_passes() {
        for json in [
            "null",
            " [1, -2, 3.5e-7, true, \"a\\u0000b\", \"\\ud83d\\ude00\"] ",
            r#"{"a": {"a": 1}, "b": [{"a": 1}, {"a": 2}], "": {}}"#,
        ] {
            check(json.as_bytes()).unwrap();
        }
    }

    #[test]
    fn members_occur_once_at_any_depth_and_in_any_spelling() {
        for json in [
            r#"{"a": 1, "a": 1}"#,
            r#"[[{"x": {"a": 1, "b": 2, "\u0061": 3}}]]"#,
            r#"{"": 1, "": 2}"#,
        ] {
            let e = check(json.as_bytes()).unwrap_err().to_string();
            assert!(e.contains("duplicate key"), "{e}");
        }
    }

    #[test]
    fn surrogates_come_in_pairs() {
        for text in ["\\ud800", "\\udc00", "\\ud800x", "\\ud800\\ud800", "\\udc00\\ud800"] {
            for json in [format!("[\"{text}\"]"), format!("{{\"{text}\": 1}}")] {
                assert!(check(json.as_bytes()).is_err(), "{json}");
            }
        }
    }

    #[test]
    fn what_is_no_json_or_too_much_is_an_error() {
        let members = |n: usize| {
            let list: Vec<_> = (0..n).map(|i| format!("\"{i}\":0")).collect();
            format!("{{{}}}", list.join(","))
        };
        check(members(MAX_ENTRIES).as_bytes()).unwrap();
        check(format!("[{0},{0}]", members(MAX_ENTRIES)).as_bytes()).unwrap();
        let many = members(MAX_ENTRIES + 1);
        let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
        for json in ["", "1 2", "{", "[1,]", "NaN", "\"\u{1}\"", &many, &deep] {
            assert!(check(json.as_bytes()).is_err());
        }
    }
}
