//! Key paths: the place of a tensor in the saved object, as a name for its storage.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::sync::Arc;

use rustc_hash::FxHashMap;

/// Bytes that the format allows in a tensor's name, less what a suffix takes.
const MAX_NAME: usize = 4096 - 16;
/// Characters of a key path.
const MAX_PATH: usize = 4 * 4096;

/// The place of an object: below another one, under a key.
#[derive(Clone, Copy)]
pub(super) enum Path<'a> {
    Root,
    Key(&'a Path<'a>, &'a str),
    Index(&'a Path<'a>, usize),
}

impl Path<'_> {
    /// The path as text: `model.layers.0.weight`.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        self.write(&mut text);
        text
    }

    /// Writes the path to an empty string.
    pub(super) fn write(&self, text: &mut String) {
        let (Self::Key(above, _) | Self::Index(above, _)) = *self else { return };
        above.write(text);
        if !text.is_empty() {
            text.push('.');
        }
        match *self {
            Self::Key(_, key) => text.push_str(key),
            // Infallible: writing to a `String` never fails.
            Self::Index(_, i) => drop(write!(text, "{i}")),
            Self::Root => {}
        }
        // Objects may be nested deeply; the end of a path says more than its beginning.
        if text.len() > MAX_PATH && text.chars().count() > MAX_PATH {
            let (at, _) = text.char_indices().nth_back(MAX_PATH / 2 - 1).unwrap_or_default();
            text.replace_range(..at, "...");
        }
    }
}

/// Makes names fit for the file: without NUL, of bounded length, each used once.
#[derive(Default)]
pub(super) struct UniqueNames {
    /// Each name in use, with how often it was requested.
    used: FxHashMap<Arc<str>, u64>,
}

impl UniqueNames {
    /// A unique name for the object at a path.
    pub(super) fn take(&mut self, path: &str) -> Arc<str> {
        let base = fit(path);
        let mut name = Arc::from(&*base);
        while self.used.contains_key(&name) {
            let count = self.used.entry(Arc::from(&*base)).or_insert(1);
            *count += 1;
            name = format!("{base}~{count}").into();
        }
        self.used.insert(Arc::clone(&name), 1);
        name
    }
}

fn fit(path: &str) -> Cow<'_, str> {
    let name = if path.is_empty() { "tensor" } else { path };
    let name = match name.contains('\0') {
        true => Cow::Owned(name.replace('\0', "\\0")),
        false => Cow::Borrowed(name),
    };
    let mut from = name.len().saturating_sub(MAX_NAME);
    while !name.is_char_boundary(from) {
        from += 1;
    }
    match name {
        Cow::Borrowed(name) => Cow::Borrowed(&name[from..]),
        Cow::Owned(name) => Cow::Owned(name[from..].to_owned()),
    }
}
