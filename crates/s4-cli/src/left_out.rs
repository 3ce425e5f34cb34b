//! The parts of a checkpoint that a .safetensors file cannot hold: anything but tensors.

use std::collections::HashSet;
use std::fmt;

use s4weights::Reader;
use serde_json::Value;

use crate::store::text::count;

/// The blob of a distributed checkpoint, whose tensors are pieces.
const DISTRIBUTED: &str = "dcp";
/// The blob of an object that is described by a pickle.
const PICKLE: &str = "pickle";

/// What does not go into a .safetensors file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct LeftOut {
    /// The object is in pieces, and its values that are not tensors are stored as bytes.
    pieces: bool,
    /// The object is a pickle, so what else it holds is unknown.
    pickled: bool,
    /// Values that are not tensors.
    values: usize,
    /// Tensors that share their values with others that are written.
    shared: usize,
    /// Byte strings beside the object.
    blobs: Vec<String>,
}

impl LeftOut {
    /// What is left out of a checkpoint; `None` if nothing is.
    pub(crate) fn of(reader: &Reader) -> Option<Self> {
        let blobs = &reader.manifest().blobs;
        let mut out = Self {
            pieces: blobs.contains_key(DISTRIBUTED),
            pickled: reader.tree().is_none() && blobs.contains_key(PICKLE),
            ..Self::default()
        };
        let known = |name: &String| [DISTRIBUTED, PICKLE].contains(&name.as_str());
        out.blobs = blobs.keys().filter(|name| !known(name)).cloned().collect();
        if let Some(text) = reader.tree() {
            match serde_json::from_str::<Value>(text) {
                Ok(tree) => out.count(&tree["root"], &mut HashSet::new()),
                // Too deeply nested to be parsed here: its contents are as unknown as a pickle's.
                Err(_) => out.pickled = true,
            }
        }
        (out != Self::default()).then_some(out)
    }

    /// Adds what a node of the tree (docs/format.md) holds.
    fn count(&mut self, node: &Value, seen: &mut HashSet<u64>) {
        let Value::Object(members) = node else {
            return match node {
                Value::Array(items) => items.iter().for_each(|item| self.count(item, seen)),
                _ => self.values += 1,
            };
        };
        if let Some(number) = members.get("tensor").and_then(Value::as_u64) {
            self.shared += usize::from(!seen.insert(number));
            return;
        }
        if members.contains_key("same") {
            self.shared += 1;
            return;
        }
        let list = |kinds: &[&str]| kinds.iter().find_map(|k| members.get(*k)?.as_array());
        if let Some(items) = list(&["tuple", "set", "frozenset"]) {
            items.iter().for_each(|item| self.count(item, seen));
        } else if let Some(pairs) = list(&["dict", "odict"]) {
            pairs.iter().filter_map(|pair| pair.get(1)).for_each(|item| self.count(item, seen));
        } else {
            self.values += 1;
        }
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = vec![];
        if self.pieces {
            parts.push(
                "the order of a distributed checkpoint, whose tensors stay in pieces, its other values \
                 as bytes"
                    .to_owned(),
            );
        }
        if self.pickled {
            parts.push("the object that the tensors are in, with all other values".to_owned());
        }
        if self.values > 0 {
            let are = if self.values == 1 { "is not a tensor" } else { "are not tensors" };
            parts.push(format!("{} that {are}", count(self.values, "value")));
        }
        if self.shared > 0 {
            let share = if self.shared == 1 { "shares its" } else { "share their" };
            parts.push(format!("{} that {share} values with others", count(self.shared, "tensor")));
        }
        if !self.blobs.is_empty() {
            parts.push(format!("the blobs {}", self.blobs.join(", ")));
        }
        f.write_str(&parts.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::LeftOut;

    #[test]
    fn values_are_counted_and_tensors_that_are_there_already() {
        let tree = serde_json::json!({"dict": [
            ["model", {"odict": [["w", {"tensor": 0}], ["tied", {"same": 0}]], "attrs": {"dict": []}}],
            ["view", {"tensor": 0, "shape": [2]}],
            ["other", {"tensor": 1}],
            ["betas", {"tuple": [0.9, {"float": "7ff8000000000000"}]}],
            ["list", [1, null, {"int": "0xff"}, {"torch.Size": [1, 2]}]],
            ["empty", []],
        ]});
        let mut found = LeftOut::default();
        found.count(&tree, &mut HashSet::new());
        assert_eq!((found.values, found.shared), (6, 2));
        let said = "6 values that are not tensors; 2 tensors that share their values with others";
        assert_eq!(found.to_string(), said);
        let one = LeftOut { values: 1, shared: 1, ..LeftOut::default() };
        let said = "1 value that is not a tensor; 1 tensor that shares its values with others";
        assert_eq!(one.to_string(), said);
    }
}
