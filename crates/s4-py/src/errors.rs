//! Errors of the facade as exceptions of the package.

use std::error::Error as StdError;
use std::io;

use pyo3::exceptions::{PyKeyError, PyKeyboardInterrupt, PyValueError};
use pyo3::prelude::*;
use s4weights::cuda::GpuError;
use s4weights::store::StoreError;
use s4weights::{Error, ParentProblem, format};

/// Error numbers, the same on every platform that Python runs on.
const ENOENT: i32 = 2;
const EACCES: i32 = 13;

/// The exception that tells Python of an error. What a Python stream raised is passed on as it is.
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
        Error::Io { target, action, source } => io_error(py, target, action, source),
    }
}

/// Errors of checkpoint stores: the class is that of what is wrong, the text says where.
fn store_error(py: Python<'_>, error: Error) -> PyErr {
    let what = error.to_string();
    let mut cause = &error;
    while let Error::Checkpoint { source, .. } = cause {
        cause = source;
    }
    let Error::Store { target, source } = cause else {
        let class = match cause {
            Error::Io { .. } => "StorageError",
            Error::NotFound { .. } => return raise(py, "NotFoundError", (ENOENT, what)),
            Error::Format { source: format::Error::Unsupported { .. }, .. } => {
                "UnsupportedFormatError"
            }
            Error::Format { source: format::Error::Limit { .. }, .. } => "LimitError",
            _ => "CorruptDataError",
        };
        return raise(py, class, (what,));
    };
    let class = match **source {
        StoreError::Argument(_) => return PyValueError::new_err(what),
        StoreError::NoStore { .. } | StoreError::NoCheckpoint { .. } => {
            return raise(py, "NotFoundError", (ENOENT, what, target.as_str()));
        }
        StoreError::Corrupt { .. } | StoreError::Missing { .. } => "CorruptDataError",
        StoreError::Conflict(_) | StoreError::StoreExists { .. } => "ConflictError",
        StoreError::Unsupported { .. } => "UnsupportedFormatError",
        StoreError::Limit(_) => "LimitError",
        _ => "StorageError",
    };
    raise(py, class, (what,))
}

fn io_error(py: Python<'_>, target: String, action: &str, source: io::Error) -> PyErr {
    if source.get_ref().is_some_and(|e| e.is::<PyErr>()) {
        if let Some(Ok(raised)) = source.into_inner().map(|e| e.downcast::<PyErr>()) {
            return *raised;
        }
        return raise(py, "StorageError", (format!("{target}: cannot {action}"),));
    }
    if source.kind() == io::ErrorKind::NotFound {
        return not_found(py, target);
    }
    let what = format!("cannot {action}: {source}");
    let code = os_code(&source)
        .or_else(|| (source.kind() == io::ErrorKind::PermissionDenied).then_some(EACCES));
    match code {
        Some(code) => raise(py, "StorageError", (code, what, target)),
        None => raise(py, "StorageError", (format!("{target}: {what}"),)),
    }
}

fn not_found(py: Python<'_>, target: String) -> PyErr {
    raise(py, "NotFoundError", (ENOENT, "No such file or directory", target))
}

/// The system's error number, which wrappers that add a path hide.
fn os_code(error: &io::Error) -> Option<i32> {
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(e) = cause {
        if let Some(code) = e.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
            return Some(code);
        }
        cause = e.source();
    }
    None
}

fn raise<'py>(py: Python<'py>, class: &str, arguments: impl pyo3::call::PyCallArgs<'py>) -> PyErr {
    let make = || py.import("s4weights._errors")?.getattr(class)?.call1(arguments);
    make().map_or_else(|e| e, PyErr::from_value)
}
