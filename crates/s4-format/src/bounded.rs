//! JSON maps and lists with a bounded number of entries. Duplicate keys are errors.
//!
//! The bound limits memory: an entry of a few bytes of text can take a few hundred bytes of memory.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::limits::{MAX_ENTRIES, MAX_INPUTS, MAX_RANK, MAX_SCALARS};

/// A map of at most [`MAX_ENTRIES`] entries.
pub(crate) fn map<'de, D, V>(deserializer: D) -> Result<BTreeMap<String, V>, D::Error>
where
    D: Deserializer<'de>,
    V: Deserialize<'de>,
{
    let mut left = MAX_ENTRIES;
    Map { left: &mut left, of: PhantomData }.deserialize(deserializer)
}

/// A list of maps, with at most [`MAX_SCALARS`] maps and entries together.
pub(crate) fn maps<'de, D>(deserializer: D) -> Result<Vec<BTreeMap<String, f64>>, D::Error>
where
    D: Deserializer<'de>,
{
    deserializer.deserialize_seq(Maps)
}

/// The inputs of a plan.
pub(crate) fn inputs<'de, D, I>(d: D) -> Result<Vec<I>, D::Error>
where
    D: Deserializer<'de>,
    I: Deserialize<'de>,
{
    List::<I, MAX_INPUTS>::deserialize(d).map(|list| list.0)
}

/// A range in each dimension. It may be absent, but not `null`.
pub(crate) fn region<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Vec<[u64; 2]>>, D::Error> {
    List::<[u64; 2], MAX_RANK>::deserialize(d).map(|list| Some(list.0))
}

/// A list of at most `MOST` elements.
struct List<T, const MOST: usize>(Vec<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for List<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Elements::<T, MOST>(PhantomData))
    }
}

struct Elements<T, const MOST: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for Elements<T, MOST> {
    type Value = List<T, MOST>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let (mut left, mut out) = (MOST, vec![]);
        while let Some(element) = seq.next_element()? {
            take(&mut left)?;
            out.push(element);
        }
        Ok(List(out))
    }
}

struct Map<'a, V> {
    left: &'a mut usize,
    of: PhantomData<V>,
}

impl<'de, V: Deserialize<'de>> DeserializeSeed<'de> for Map<'_, V> {
    type Value = BTreeMap<String, V>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, V: Deserialize<'de>> Visitor<'de> for Map<'_, V> {
    type Value = BTreeMap<String, V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut out = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, V>()? {
            take(self.left)?;
            match out.entry(key) {
                Entry::Vacant(place) => place.insert(value),
                Entry::Occupied(there) => {
                    return Err(Error::custom(format!(
                        "duplicate key `{}`",
                        there.key().escape_debug()
                    )));
                }
            };
        }
        Ok(out)
    }
}

struct Maps;

impl<'de> Visitor<'de> for Maps {
    type Value = Vec<BTreeMap<String, f64>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of maps")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let (mut left, mut out) = (MAX_SCALARS, vec![]);
        loop {
            let next = Map { left: &mut left, of: PhantomData::<f64> };
            let Some(map) = seq.next_element_seed(next)? else { return Ok(out) };
            take(&mut left)?;
            out.push(map);
        }
    }
}

pub(crate) fn take<E: Error>(left: &mut usize) -> Result<(), E> {
    *left = left.checked_sub(1).ok_or_else(|| E::custom("too many entries"))?;
    Ok(())
}
