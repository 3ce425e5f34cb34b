//! Finding and opening the library.

use std::ffi::OsString;
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::api::{Api, symbol};
use crate::error::{Error, Result, Tried};
use crate::options::{
    AnsCompress, AnsDecompress, BitcompCompress, CascadedCompress, CascadedDecompress, Lz4Compress,
    Lz4Decompress, NoOptions, PlainDecompress, SortingDecompress, WithAlgorithm,
};
use crate::status::Status;

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
    /// The version that the library gives as one number.
    fn of(number: u32) -> Self {
        Self { major: number / 1000, minor: number % 1000 / 100, patch: number % 100 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Where to look for the library, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Search {
    places: Vec<PathBuf>,
}

impl Search {
    /// The file that the environment names, if it names one; else `paths`, files that the caller knows
    /// of (that of an installed Python package, say), then whatever the dynamic linker finds.
    pub fn new(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        Self::with_environment(std::env::var_os(ENVIRONMENT), paths)
    }

    /// As [`Self::new`], with the variable's value given.
    pub fn with_environment(
        value: Option<OsString>,
        paths: impl IntoIterator<Item = PathBuf>,
    ) -> Self {
        let places = match value.filter(|value| !value.is_empty()) {
            Some(file) => vec![file.into()],
            None => paths.into_iter().chain([SONAME.into()]).collect(),
        };
        Self { places }
    }

    /// The places, in order.
    pub fn places(&self) -> &[PathBuf] {
        &self.places
    }
}

/// What the library says about itself.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Properties {
    version: u32,
    cudart_version: u32,
}

const _: () = assert!(size_of::<Properties>() == 8);

/// The opened library with the functions of its formats. It stays open until the process ends: CUDA
/// libraries do not survive being closed.
#[derive(Debug)]
pub struct Nvcomp {
    path: PathBuf,
    version: Version,
    cuda: u32,
    ans: Api<AnsCompress, AnsDecompress>,
    bitcomp: Api<BitcompCompress, PlainDecompress>,
    cascaded: Api<CascadedCompress, CascadedDecompress>,
    deflate: Api<WithAlgorithm, SortingDecompress>,
    gdeflate: Api<WithAlgorithm, PlainDecompress>,
    lz4: Api<Lz4Compress, Lz4Decompress>,
    snappy: Api<NoOptions, SortingDecompress>,
    zstd: Api<NoOptions, PlainDecompress>,
}

macro_rules! formats {
    ($($(#[$doc:meta])* $name:ident: $compress:ty, $decompress:ty;)*) => {
        impl Nvcomp {
            $($(#[$doc])* pub fn $name(&self) -> &Api<$compress, $decompress> { &self.$name })*
        }
    };
}

formats! {
    /// ANS: closed, differs between major versions.
    ans: AnsCompress, AnsDecompress;
    /// Bitcomp: closed.
    bitcomp: BitcompCompress, PlainDecompress;
    /// Cascaded: closed.
    cascaded: CascadedCompress, CascadedDecompress;
    /// Deflate, RFC 1951.
    deflate: WithAlgorithm, SortingDecompress;
    /// GDeflate.
    gdeflate: WithAlgorithm, PlainDecompress;
    /// LZ4 blocks.
    lz4: Lz4Compress, Lz4Decompress;
    /// Raw Snappy.
    snappy: NoOptions, SortingDecompress;
    /// Zstandard frames.
    zstd: NoOptions, PlainDecompress;
}

impl Nvcomp {
    /// Opens the first library that there is. One that is there, but is no nvCOMP of this version, is
    /// an error: whoever put it first should know.
    ///
    /// # Errors
    /// `NotFound` with every place that was tried; `Version` or `Symbol` for another library.
    ///
    /// # Safety
    /// Every library in the places of `search` may be loaded into this process: its initialisers run.
    pub unsafe fn open(search: &Search) -> Result<Self> {
        let mut tried = Vec::new();
        for path in search.places() {
            // SAFETY: the caller's.
            match unsafe { Library::new(path) } {
                // SAFETY: a library with the functions of nvCOMP is taken for nvCOMP; its version is
                // checked first.
                Ok(library) => return unsafe { Self::load(library, path) },
                Err(error) => {
                    tried.push(Tried { path: path.clone(), reason: reason(&error) });
                }
            }
        }
        Err(Error::NotFound { tried })
    }

    /// # Safety
    /// The library is nvCOMP, of any version, if it has its functions.
    unsafe fn load(library: Library, path: &Path) -> Result<Self> {
        let library = ManuallyDrop::new(library);
        // SAFETY: this function has had this type in every version.
        let properties: unsafe extern "C" fn(*mut Properties) -> Status =
            unsafe { symbol(&library, path, "nvcompGetProperties")? };
        let mut found = Properties::default();
        // SAFETY: the answer is written to a local variable.
        let status = unsafe { properties(&raw mut found) };
        if status != Status::SUCCESS {
            return Err(Error::Call { format: "library", call: "properties", status });
        }
        let version = require_major(path, found.version)?;
        // SAFETY: the version is the one that the options' types are for; the library is never closed.
        unsafe {
            Ok(Self {
                path: path.to_owned(),
                version,
                cuda: found.cudart_version / 1000,
                ans: Api::load(&library, path, "ANS")?,
                bitcomp: Api::load(&library, path, "Bitcomp")?,
                cascaded: Api::load(&library, path, "Cascaded")?,
                deflate: Api::load(&library, path, "Deflate")?,
                gdeflate: Api::load(&library, path, "Gdeflate")?,
                lz4: Api::load(&library, path, "LZ4")?,
                snappy: Api::load(&library, path, "Snappy")?,
                zstd: Api::load(&library, path, "Zstd")?,
            })
        }
    }

    /// The file, or the name that the dynamic linker found it by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Checks that a CUDA driver can run it. `driver` is what `cuDriverGetVersion` gives, for instance
    /// 12040: a driver of the same major version will do.
    ///
    /// # Errors
    /// `Driver` if it cannot.
    pub fn require_driver(&self, driver: u32) -> Result<()> {
        let driver = driver / 1000;
        if driver < self.cuda {
            return Err(Error::Driver { path: self.path.clone(), built: self.cuda, driver });
        }
        Ok(())
    }
}

/// The version, if these bindings are for it.
fn require_major(path: &Path, number: u32) -> Result<Version> {
    let found = Version::of(number);
    if found.major != MAJOR {
        return Err(Error::Version { path: path.to_owned(), found });
    }
    Ok(found)
}

/// What the dynamic linker said, which libloading keeps as the error's source on some systems.
fn reason(error: &libloading::Error) -> String {
    let source = std::error::Error::source(error);
    source.map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_exclusive() {
        let known = || [PathBuf::from("/opt/a.so")];
        let search = Search::with_environment(Some("/opt/mine.so".into()), known());
        assert_eq!(search.places(), [PathBuf::from("/opt/mine.so")]);
        for unset in [None, Some(OsString::new())] {
            let search = Search::with_environment(unset, known());
            assert_eq!(search.places(), [PathBuf::from("/opt/a.so"), PathBuf::from(SONAME)]);
        }
    }

    #[test]
    fn other_versions_are_refused_by_name() {
        let path = Path::new("libnvcomp.so");
        assert_eq!(require_major(path, 6012).map(|v| v.to_string()), Ok("6.0.12".into()));
        for number in [0, 2600, 4200, 5100, 7000] {
            let error = require_major(path, number).unwrap_err().to_string();
            assert!(error.contains(&Version::of(number).to_string()), "{error}");
            assert!(error.contains("version 6 is needed"), "{error}");
        }
    }

    #[test]
    fn every_place_is_named_when_there_is_none() {
        let paths = ["/nowhere/one.so", "/nowhere/two.so"].map(PathBuf::from);
        let search = Search { places: paths.to_vec() };
        // SAFETY: nothing is there to be loaded.
        let error = unsafe { Nvcomp::open(&search) }.unwrap_err();
        let Error::NotFound { tried } = &error else { panic!("{error}") };
        assert_eq!(tried.iter().map(|t| t.path.clone()).collect::<Vec<_>>(), paths);
        let text = error.to_string();
        for part in ["/nowhere/one.so", "/nowhere/two.so", ENVIRONMENT, "nvidia-libnvcomp-cu12"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn another_library_is_refused_by_the_missing_function() {
        let search = Search::with_environment(Some("libc.so.6".into()), []);
        // SAFETY: the C library is loaded already.
        let error = unsafe { Nvcomp::open(&search) }.unwrap_err();
        let Error::Symbol { symbol, .. } = &error else { panic!("{error}") };
        assert_eq!(symbol, "nvcompGetProperties");
    }

    #[test]
    fn statuses_have_texts() {
        assert_eq!(Status(12).to_string(), "cannot decompress (status 12)");
        assert_eq!(Status(77).to_string(), "status 77");
    }
}
