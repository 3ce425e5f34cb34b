//! The parts of a checkpoint that a .safetensors file cannot hold: anything but tensors.

use std::fmt;

use s4weights::Reader;

use crate::store::text::count;

/// The blob of a distributed checkpoint, whose tensors are pieces.
const DISTRIBUTED: &str = "dcp";
/// The blob of an object that is described by a pickle.
const PICKLE: &str = "pickle";

/// The parts that do not go into a .safetensors file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct LeftOut {
    /// The object is in pieces, and its values that are not tensors are stored as bytes.
    pieces: bool,
    /// The object is a pickle, so what else it holds is unknown.
    pub(crate) pickled: bool,
    /// Values that are not tensors.
    pub(crate) values: usize,
    /// Tensors that are the same as others that are written.
    pub(crate) shared: usize,
    /// Stored tensors that the object does not have.
    pub(crate) unreached: usize,
    /// Byte strings other than the object.
    blobs: Vec<String>,
}

impl LeftOut {
    /// The parts that are left out of a checkpoint, as far as its blobs tell.
    pub(crate) fn of(reader: &Reader) -> Self {
        let blobs = &reader.manifest().blobs;
        let known = |name: &String| [DISTRIBUTED, PICKLE].contains(&name.as_str());
        Self {
            pieces: blobs.contains_key(DISTRIBUTED),
            pickled: reader.tree().is_none() && blobs.contains_key(PICKLE),
            blobs: blobs.keys().filter(|name| !known(name)).cloned().collect(),
            ..Self::default()
        }
    }

    pub(crate) fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = vec![];
        if self.pieces {
            parts.push(
                "the order of a distributed checkpoint (its tensors stay in pieces, its other values \
                 are bytes)"
                    .to_owned(),
            );
        }
        if self.values > 0 {
            let are = if self.values == 1 { "is not a tensor" } else { "are not tensors" };
            parts.push(format!("{} that {are}", count(self.values, "value")));
        }
        if self.shared > 0 {
            let share = if self.shared == 1 { "shares its" } else { "share their" };
            parts.push(format!("{} that {share} values with others", count(self.shared, "tensor")));
        }
        if self.unreached > 0 {
            parts.push(format!("{} not in the saved object", count(self.unreached, "tensor")));
        }
        if !self.blobs.is_empty() {
            parts.push(format!("the blobs {}", self.blobs.join(", ")));
        }
        f.write_str(&parts.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::LeftOut;

    #[test]
    fn what_is_left_out_is_counted() {
        let found = LeftOut { values: 6, shared: 2, ..LeftOut::default() };
        let said = "6 values that are not tensors; 2 tensors that share their values with others";
        assert_eq!(found.to_string(), said);
        let one = LeftOut { values: 1, shared: 1, unreached: 1, ..LeftOut::default() };
        let said = "1 value that is not a tensor; 1 tensor that shares its values with others; 1 tensor not \
                    in the saved object";
        assert_eq!(one.to_string(), said);
    }
}
