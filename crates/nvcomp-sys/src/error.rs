//! Errors, with what the caller can do about them.

use std::fmt;
use std::path::PathBuf;

use crate::status::Status;
use crate::version::{ENVIRONMENT, MAJOR, SONAME, Version};

/// A place where the library was looked for, and why it was not opened there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tried {
    /// File, or bare name that the dynamic linker looked for.
    pub path: PathBuf,
    /// The dynamic linker's message.
    pub reason: String,
}

/// Errors of the library.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The library was not found in any of the places searched.
    #[error(
        "nvCOMP {MAJOR} ({SONAME}) was not found: install nvidia-libnvcomp-cu12 or \
         nvidia-libnvcomp-cu13, or set {ENVIRONMENT} to the file; tried {}", List(.tried)
    )]
    NotFound {
        /// Every place that was tried, in order.
        tried: Vec<Tried>,
    },
    /// The library has another major version: its interface and closed bitstreams are different.
    #[error("{}: found nvCOMP {found}, but version {MAJOR} is needed", .path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: Version,
    },
    /// The CUDA driver is older than the CUDA that the library was built with.
    #[error(
        "{}: built with CUDA {built}, but the driver supports CUDA {driver}: update the driver, or install the \
         package for CUDA {driver}", .path.display()
    )]
    Driver {
        /// The file.
        path: PathBuf,
        /// Major version of the CUDA that it was built with.
        built: u32,
        /// Major version that the driver has.
        driver: u32,
    },
    /// The file is a library, but not this one.
    #[error("{}: function {symbol} not found: {reason}", .path.display())]
    Symbol {
        /// The file.
        path: PathBuf,
        /// The function.
        symbol: String,
        /// The dynamic linker's message.
        reason: String,
    },
    /// A call was refused. Statuses of single blocks come back on the device instead.
    #[error("nvCOMP call failed ({format}, {call}): {status}")]
    Call {
        /// The format, as the library names it.
        format: &'static str,
        /// The call.
        call: &'static str,
        /// The library's answer.
        status: Status,
    },
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

struct List<'a>(&'a [Tried]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, Tried { path, reason }) in self.0.iter().enumerate() {
            let separator = if number == 0 { "" } else { "; " };
            write!(f, "{separator}{} ({reason})", path.display())?;
        }
        Ok(())
    }
}
