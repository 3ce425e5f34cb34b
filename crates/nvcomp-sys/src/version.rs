//! The version that these bindings are for, and the names by which the library is found.

use std::fmt;

/// The major version that these bindings are for.
pub const MAJOR: u32 = 6;

/// The name that the dynamic linker knows the library by.
pub const SONAME: &str = "libnvcomp.so.6";

/// The environment variable that names the library's file. If it is set, no other place is tried.
pub const ENVIRONMENT: &str = "NVCOMP_LIBRARY";

/// A version of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Changes with the interface and the closed bitstreams.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
    /// Patch.
    pub patch: u32,
}

impl Version {
    /// Decodes the version, which the library reports as one number.
    pub(crate) fn of(number: u32) -> Self {
        Self { major: number / 1000, minor: number % 1000 / 100, patch: number % 100 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}
