//! The tensors of a saved object that is described by a tree (docs/format.md), named as Python's `open` names them.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

/// The most characters of a key path, the most of a tuple's label, and the most levels and parts that it shows: as in
/// `_names.py`.
const MAX_PATH: usize = 4 * MAX_LABEL;
const MAX_LABEL: usize = 4096;
const MAX_DEPTH: usize = 3;
const MAX_PARTS: usize = 16;

/// The most bytes of all names: the header of a .safetensors file has at most 100 MB. Tensors below one long key
/// all repeat it.
const MAX_NAMES: usize = 100_000_000;

/// Attributes of an ordered dict whose entries have paths as if they were entries of the dict.
const INLINE: [&str; 3] = ["_parameters", "_buffers", "_modules"];

/// The part of a stored tensor that a node refers to; absent members are as stored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) tensor: u64,
    pub(crate) dtype: Option<String>,
    pub(crate) shape: Option<Vec<u64>>,
    pub(crate) offset: u64,
    pub(crate) stride: Option<Vec<u64>>,
}

/// The content of a tree.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    /// Every tensor, by its key path, in the order of the object. No two have the same name.
    pub(crate) tensors: Vec<(String, Place)>,
    /// Whether tensors are missing because all names together would be longer than [`MAX_NAMES`].
    pub(crate) is_cut: bool,
    /// How many values are not tensors.
    pub(crate) values: usize,
    /// The tensor nodes so far, to which others refer by number.
    nodes: Vec<Place>,
    names: Names,
    /// Bytes of all names.
    length: usize,
}

impl Tree {
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        // The manifest's reader has checked that it is JSON, and not nested too deeply.
        let value: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let mut tree = Self::default();
        tree.node(value.get("root").ok_or("no root")?, "")?;
        Ok(tree)
    }

    fn node(&mut self, node: &Value, path: &str) -> Result<(), String> {
        let Value::Object(members) = node else {
            return match node {
                Value::Array(items) => self.items(items, path),
                _ => {
                    self.values += 1;
                    Ok(())
                }
            };
        };
        let member = |kinds: &[&str]| kinds.iter().find_map(|kind| members.get(*kind));
        if members.contains_key("tensor") {
            let place = Place {
                tensor: natural(members.get("tensor"))?,
                dtype: members.get("dtype").map(text).transpose()?,
                shape: members.get("shape").map(naturals).transpose()?,
                offset: members.get("offset").map_or(Ok(0), |n| natural(Some(n)))?,
                stride: members.get("stride").map(naturals).transpose()?,
            };
            self.nodes.push(place.clone());
            self.add(path, place);
        } else if let Some(number) = members.get("same") {
            let place = usize::try_from(natural(Some(number))?).ok();
            let place = place.and_then(|n| self.nodes.get(n)).cloned();
            self.add(
                path,
                place.ok_or_else(|| format!("{node} does not refer to an earlier tensor"))?,
            );
        } else if let Some(items) = member(&["tuple", "set", "frozenset"]) {
            self.items(items.as_array().ok_or_else(|| not("array", items))?, path)?;
        } else if let Some(pairs) = member(&["dict", "odict"]) {
            self.pairs(pairs, path)?;
            if let Some(attributes) = members.get("attrs") {
                // Not counted as values: every state dict of PyTorch has some, about versions.
                let values = self.values;
                self.attributes(attributes, path)?;
                self.values = values;
            }
        } else {
            self.values += 1;
        }
        Ok(())
    }

    fn items(&mut self, items: &[Value], path: &str) -> Result<(), String> {
        items
            .iter()
            .enumerate()
            .try_for_each(|(n, item)| self.node(item, &join(path, &n.to_string())))
    }

    fn pairs(&mut self, pairs: &Value, path: &str) -> Result<(), String> {
        for pair in pairs.as_array().ok_or_else(|| not("array", pairs))? {
            let (key, value) = two(pair)?;
            self.node(value, &join(path, &label(key, 0)))?;
        }
        Ok(())
    }

    fn attributes(&mut self, attributes: &Value, path: &str) -> Result<(), String> {
        let pairs = attributes.get("dict").ok_or_else(|| not("dict", attributes))?;
        for pair in pairs.as_array().ok_or_else(|| not("array", pairs))? {
            let (key, value) = two(pair)?;
            let inline = key.as_str().is_some_and(|key| INLINE.contains(&key));
            match value.get("dict").or_else(|| value.get("odict")).filter(|_| inline) {
                Some(entries) => self.pairs(entries, path)?,
                None => self.node(value, &join(path, &label(key, 0)))?,
            }
        }
        Ok(())
    }

    fn add(&mut self, path: &str, place: Place) {
        self.length = self.length.saturating_add(path.len());
        self.is_cut |= self.length > MAX_NAMES;
        if !self.is_cut {
            let name = self.names.unique(path);
            self.tensors.push((name, place));
        }
    }
}

/// Names that were given away.
#[derive(Debug, Default)]
struct Names {
    known: HashSet<String>,
    /// The next number to try for a path that is taken.
    next: HashMap<String, u64>,
}

impl Names {
    /// A path that is not known yet, with a number appended if need be.
    fn unique(&mut self, path: &str) -> String {
        let mut name = path.to_owned();
        while !self.known.insert(name.clone()) {
            let number = self.next.entry(path.to_owned()).or_insert(2);
            name = format!("{path}~{number}");
            *number += 1;
        }
        name
    }
}

fn not(what: &str, value: &Value) -> String {
    let text: String = value.to_string().chars().take(100).collect();
    format!("expected {what}, found {text}")
}

fn natural(value: Option<&Value>) -> Result<u64, String> {
    let number = value.and_then(Value::as_u64).filter(|n| *n < 1 << 63);
    number.ok_or_else(|| not("size", value.unwrap_or(&Value::Null)))
}

fn naturals(value: &Value) -> Result<Vec<u64>, String> {
    let items = value.as_array().filter(|items| items.len() <= 64);
    items.ok_or_else(|| not("shape", value))?.iter().map(|n| natural(Some(n))).collect()
}

fn text(value: &Value) -> Result<String, String> {
    value.as_str().map(str::to_owned).ok_or_else(|| not("text", value))
}

fn two(pair: &Value) -> Result<(&Value, &Value), String> {
    match pair.as_array().map(Vec::as_slice) {
        Some([key, value]) => Ok((key, value)),
        _ => Err(not("pair", pair)),
    }
}

/// The path of what lies under a key of the object at `path`.
fn join(path: &str, key: &str) -> String {
    let path = if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match path.char_indices().rev().nth(MAX_PATH / 2 - 1) {
        // Characters are counted only where they can be too many.
        Some((at, _)) if path.len() > MAX_PATH && path.chars().count() > MAX_PATH => {
            format!("...{}", &path[at..])
        }
        _ => path,
    }
}

/// A key as Python shows it.
fn label(key: &Value, depth: usize) -> String {
    match key {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::String(text) => text.clone(),
        Value::Number(n) if n.is_f64() => float(n.as_f64().unwrap_or_default()),
        Value::Number(n) => n.to_string(),
        Value::Array(_) => "list".into(),
        Value::Object(members) => {
            let text = |kind| members.get(kind).and_then(Value::as_str);
            if let Some(hex) = text("int") {
                integer(hex)
            } else if let Some(bits) = text("float") {
                u64::from_str_radix(bits, 16)
                    .map_or_else(|_| bits.into(), |b| float(f64::from_bits(b)))
            } else if let Some(Value::Array(parts)) =
                members.get("tuple").filter(|_| depth < MAX_DEPTH)
            {
                let cut = |text: String| text.chars().take(MAX_LABEL).collect::<String>();
                let shown = parts.iter().take(MAX_PARTS).map(|part| cut(label(part, depth + 1)));
                let more = (parts.len() > MAX_PARTS).then(|| "...".to_owned());
                cut(format!("({})", shown.chain(more).collect::<Vec<_>>().join(", ")))
            } else {
                members.keys().next().cloned().unwrap_or_default()
            }
        }
    }
}

/// A hexadecimal integer: in decimal, unless it is longer than 64 bits.
fn integer(hex: &str) -> String {
    let digits = hex.trim_start_matches('-').trim_start_matches("0x");
    match u64::from_str_radix(digits, 16) {
        Ok(n) => format!("{}{n}", if hex.starts_with('-') { "-" } else { "" }),
        Err(_) => hex.to_owned(),
    }
}

/// A float as Python's `repr` has it.
fn float(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() { "nan".into() } else { x.to_string() };
    }
    let shown = format!("{x:e}");
    let (digits, exponent) = shown.split_once('e').unwrap_or((&shown, "0"));
    match exponent.parse().unwrap_or(0) {
        -4..16 => format!("{x:?}"),
        n @ ..0 => format!("{digits}e-{:02}", -n),
        n => format!("{digits}e+{n:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Place, Tree, float, integer, join};

    fn parse(root: &str) -> Tree {
        Tree::parse(&format!("{{\"root\":{root}}}")).expect("a tree")
    }

    #[test]
    fn tensors_have_the_names_that_python_gives_them() {
        let tree = parse(
            r#"{"dict":[["a.b",{"tensor":0}],["a",{"dict":[["b",{"tensor":1}]]}],["a.b~2",{"tensor":2}],
                [1,[{"tensor":3},7]],[true,{"tensor":4}],[null,{"same":1}],[0.5,{"tensor":5}],
                [{"tuple":[1,"x",{"tuple":[2]}]},{"tensor":6}],["a\nb",{"tensor":7}],
                [{"int":"0x20000000000000"},{"tensor":8}],["o",{"odict":[["w",{"tensor":9}]],"attrs":
                {"dict":[["_metadata",{"odict":[["",{"dict":[["version",1]]}]]}],["_buffers",{"dict":[["c",{"tensor":10}]]}]]}}]]}"#,
        );
        let names: Vec<_> =
            tree.tensors.iter().map(|(name, place)| (&**name, place.tensor)).collect();
        let expected = [
            ("a.b", 0),
            ("a.b~2", 1),
            ("a.b~2~2", 2),
            ("1.0", 3),
            ("True", 4),
            ("None", 1),
            ("0.5", 5),
            ("(1, x, (2))", 6),
            ("a\nb", 7),
            ("9007199254740992", 8),
            ("o.w", 9),
            ("o.c", 10),
        ];
        assert_eq!(names, expected);
        assert_eq!(tree.values, 1);
    }

    #[test]
    fn nodes_say_which_part_of_a_tensor_they_are() {
        let tree = parse(
            r#"[{"tensor":3,"dtype":"int8","shape":[2,3],"offset":5,"stride":[1,2],"grad":true},{"same":0}]"#,
        );
        let place = Place {
            tensor: 3,
            dtype: Some("int8".into()),
            shape: Some(vec![2, 3]),
            offset: 5,
            stride: Some(vec![1, 2]),
        };
        assert_eq!(tree.tensors, [("0".to_owned(), place.clone()), ("1".to_owned(), place)]);
        for bad in [
            r#"{"same":0}"#,
            r#"{"tensor":-1}"#,
            r#"{"dict":[["a"]]}"#,
            r#"{"tensor":0,"shape":2}"#,
        ] {
            assert!(Tree::parse(&format!("{{\"root\":{bad}}}")).is_err(), "{bad}");
        }
    }

    #[test]
    fn one_long_key_over_many_tensors_takes_little_memory() {
        let items = vec!["{\"tensor\":0}"; 20_000].join(",");
        let tree = parse(&format!("{{\"dict\":[[\"{}\",[{items}]]]}}", "x".repeat(10_000)));
        assert!(tree.is_cut && tree.tensors.len() < 10_000);
        assert!(!parse(&format!("[{items}]")).is_cut);
    }

    #[test]
    fn keys_that_are_numbers_are_shown_as_in_python() {
        let shown = [1e16, 1e15, 1.5e-5, 0.0001, -0.0, 1e300, 123456.75, f64::INFINITY].map(float);
        let python = [
            "1e+16",
            "1000000000000000.0",
            "1.5e-05",
            "0.0001",
            "-0.0",
            "1e+300",
            "123456.75",
            "inf",
        ];
        assert_eq!(shown, python);
        assert_eq!(integer("-0x10"), "-16");
        assert_eq!(integer("0x1ffffffffffffffff"), "0x1ffffffffffffffff");
        let long = join(&"x".repeat(16_000), &"y".repeat(1000));
        assert_eq!((long.len(), &long[..4]), (3 + 8192, "...x"));
        assert_eq!(join("", "a"), "a");
    }
}
