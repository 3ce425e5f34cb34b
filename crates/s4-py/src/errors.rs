//! Errors of the facade as exceptions of the package.

use std::io;

use pyo3::exceptions::{PyKeyError, PyKeyboardInterrupt, PyValueError};
use pyo3::prelude::*;
use s4weights::cuda::GpuError;
use s4weights::store::StoreError;
use s4weights::{Cause, Error, ParentProblem, format};

/// The same on every platform that Python runs on.
const ENOENT: i32 = 2;
/// This one differs between systems.
const ETIMEDOUT: i32 = if cfg!(target_os = "macos") { 60 } else { 110 };

pub(crate) fn to_value_error(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// The exception that reports an error to Python. An exception of a Python stream is passed on as it is.
pub(crate) fn to_python(py: Python<'_>, error: Error) -> PyErr {
    match error {
        Error::Format { target, source } => {
            let class = match source {
                format::Error::Corrupt { .. } | format::Error::Truncated { .. } => {
                    "CorruptDataError"
                }
                format::Error::Unsupported { .. } => "UnsupportedFormatError",
                format::Error::Limit { .. } => "LimitError",
            };
            raise(py, class, (format!("{target}: {source}"),))
        }
        Error::NotFound { target } => not_found(py, target),
        Error::NoEntry { .. } => PyKeyError::new_err(error.to_string()),
        Error::Parent { ref target, ref problem, .. } => match problem {
            ParentProblem::Missing => {
                let what = error.to_string();
                raise(py, "NotFoundError", (ENOENT, what, target.as_str()))
            }
            _ => raise(py, "CorruptDataError", (error.to_string(),)),
        },
        Error::Checkpoint { .. } | Error::Store { .. } => store_error(py, error),
        Error::Device { ref source, .. } => {
            let class = match source {
                GpuError::OutOfMemory { .. } | GpuError::Budget { .. } => "LimitError",
                _ => "S4Error",
            };
            raise(py, class, (error.to_string(),))
        }
        Error::Argument(what) => PyValueError::new_err(what),
        Error::Cancelled => PyKeyboardInterrupt::new_err("cancelled"),
        Error::Io { .. } => io_error(py, error),
    }
}

/// Errors of checkpoint stores: the innermost error decides the class, the whole text names the place.
fn store_error(py: Python<'_>, error: Error) -> PyErr {
    let what = error.to_string();
    let mut cause = &error;
    while let Error::Checkpoint { source, .. } = cause {
        cause = source;
    }
    let Error::Store { target, source } = cause else {
        let class = match cause {
            Error::Io { target, .. } => {
                return storage(py, what, target, error.errno(), error.cause());
            }
            Error::Format { source: format::Error::Unsupported { .. }, .. } => {
                "UnsupportedFormatError"
            }
            Error::Format { source: format::Error::Limit { .. }, .. } => "LimitError",
            // This includes a missing object that a listed checkpoint needs.
            _ => "CorruptDataError",
        };
        return raise(py, class, (what,));
    };
    let class = match **source {
        StoreError::Argument(_) => return PyValueError::new_err(what),
        StoreError::NoStore { .. } | StoreError::NoCheckpoint { .. } => {
            return raise(py, "NotFoundError", (ENOENT, what, target.as_str()));
        }
        StoreError::Corrupt { .. } | StoreError::Missing { .. } | StoreError::LogDamaged { .. } => {
            "CorruptDataError"
        }
        StoreError::Conflict(_)
        | StoreError::StoreExists { .. }
        | StoreError::Locked { .. }
        | StoreError::LeaseLost { .. } => "ConflictError",
        StoreError::Unsupported { .. } => "UnsupportedFormatError",
        StoreError::Limit(_) => "LimitError",
        StoreError::Deadline { .. } => {
            return storage(py, what, target, Some(ETIMEDOUT), error.cause());
        }
        _ => return storage(py, what, target, error.errno(), error.cause()),
    };
    raise(py, class, (what,))
}

/// An error of files and plain objects. An exception of a Python stream is passed on as it is.
fn io_error(py: Python<'_>, error: Error) -> PyErr {
    let (code, cause, what) = (error.errno(), error.cause(), error.to_string());
    let Error::Io { target, action, source } = error else {
        return storage(py, what, "", code, cause);
    };
    if source.get_ref().is_some_and(|e| e.is::<PyErr>()) {
        if let Some(Ok(raised)) = source.into_inner().map(|e| e.downcast::<PyErr>()) {
            return *raised;
        }
        return raise(py, "StorageError", (format!("{target}: cannot {action}"),));
    }
    if source.kind() == io::ErrorKind::NotFound {
        return not_found(py, target);
    }
    storage(py, what, &target, code, cause)
}

/// A `StorageError` with the known facts about its cause. With an `errno`, Python adds the target to the text itself.
fn storage(
    py: Python<'_>,
    what: String,
    target: &str,
    code: Option<i32>,
    cause: Option<Cause>,
) -> PyErr {
    let raised = match code {
        Some(code) => {
            let prefix = format!("{target}: ");
            let what = what.strip_prefix(&prefix).unwrap_or(&what).to_owned();
            raise(py, "StorageError", (code, what, target))
        }
        None => raise(py, "StorageError", (what,)),
    };
    let cause = cause.map(|cause| format!("{cause:?}"));
    match raised.value(py).setattr("cause", cause) {
        Ok(()) => raised,
        Err(e) => e,
    }
}

fn not_found(py: Python<'_>, target: String) -> PyErr {
    raise(py, "NotFoundError", (ENOENT, "No such file or directory", target))
}

pub(crate) fn raise<'py>(
    py: Python<'py>,
    class: &str,
    arguments: impl pyo3::call::PyCallArgs<'py>,
) -> PyErr {
    let make = || py.import("s4weights._errors")?.getattr(class)?.call1(arguments);
    make().map_or_else(|e| e, PyErr::from_value)
}
