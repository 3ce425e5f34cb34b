//! Key paths: where in the saved object a tensor is, as a name for its storage.

use std::collections::HashMap;

/// Bytes that the format allows in a tensor's name, less what a suffix takes.
const MAX_NAME: usize = 4096 - 16;
/// Characters of a key path.
const MAX_PATH: usize = 4 * 4096;

/// Where an object is: below another one, under a key.
#[derive(Clone, Copy)]
pub(super) enum Path<'a> {
    Root,
    Key(&'a Path<'a>, &'a str),
    Index(&'a Path<'a>, usize),
}

impl Path<'_> {
    /// The path as text: `model.layers.0.weight`.
    pub(super) fn text(&self) -> String {
        let (above, key) = match *self {
            Self::Root => return String::new(),
            Self::Key(above, key) => (above, std::borrow::Cow::Borrowed(key)),
            Self::Index(above, i) => (above, i.to_string().into()),
        };
        let mut text = above.text();
        if !text.is_empty() {
            text.push('.');
        }
        text.push_str(&key);
        // Objects may be nested deeply; the end of a path says more than its beginning.
        if text.len() > MAX_PATH && text.chars().count() > MAX_PATH {
            let (at, _) = text.char_indices().nth_back(MAX_PATH / 2 - 1).unwrap_or_default();
            text.replace_range(..at, "...");
        }
        text
    }
}

/// Makes names fit for the file: without NUL, of bounded length, each used once.
#[derive(Default)]
pub(super) struct UniqueNames {
    /// Each name that is used, with how often it was asked for.
    used: HashMap<String, u64>,
}

impl UniqueNames {
    /// A name for what is at a path.
    pub(super) fn take(&mut self, path: &str) -> String {
        let base = fit(path);
        let mut name = base.clone();
        while self.used.contains_key(&name) {
            let count = self.used.entry(base.clone()).or_insert(1);
            *count += 1;
            name = format!("{base}~{count}");
        }
        self.used.insert(name.clone(), 1);
        name
    }
}

fn fit(path: &str) -> String {
    let name = if path.is_empty() { "tensor" } else { path }.replace('\0', "\\0");
    let mut from = name.len().saturating_sub(MAX_NAME);
    while !name.is_char_boundary(from) {
        from += 1;
    }
    name[from..].to_owned()
}
