//! Turns panics, which are bugs in this package, into exceptions.

use std::any::Any;
use std::panic;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::errors::raise;

/// The place and the message of the last panic.
static LAST: Mutex<Option<String>> = Mutex::new(None);

/// Installs a hook that records where a panic happens: a caught panic has only its message.
pub(crate) fn note_places() {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let note = info.to_string();
        *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some(note);
        if std::env::var_os("RUST_BACKTRACE").is_some_and(|v| v != "0") {
            usual(info);
        }
    }));
}

/// The exception for a panic that was caught.
pub(crate) fn to_python(py: Python<'_>, payload: &(dyn Any + Send)) -> PyErr {
    let said = (payload.downcast_ref::<&str>().copied())
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    let noted = LAST.lock().unwrap_or_else(PoisonError::into_inner).take();
    let what = noted.filter(|n| n.contains(said)).unwrap_or_else(|| said.to_owned());
    let what = what.replace('\n', " ");
    // Under the name by which users know this package.
    tracing::error!(target: "s4weights::panics", "panic: {what}");
    let advice = "this is a bug in s4weights: please report it with this message";
    raise(py, "S4Error", (format!("{advice}: {what}"),))
}
