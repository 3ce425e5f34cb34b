//! Finding and opening the library.

use std::ffi::{OsStr, OsString};
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
use crate::version::{ENVIRONMENT, MAJOR, SONAME, Version};

/// The places to look for the library, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Search {
    places: Vec<PathBuf>,
    /// Whether the dynamic linker may search for the name: only if its search path has no relative
    /// folder.
    linker: bool,
}

impl Search {
    /// Only the file that the environment variable names, if it is set; otherwise `paths`, files
    /// that the caller knows of (such as that of an installed Python package), then whatever the
    /// dynamic linker finds.
    ///
    /// The working directory is never searched: relative paths are refused, and if the dynamic
    /// linker's search path has a relative or empty entry, the other entries are searched by this
    /// crate instead.
    pub fn new(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let linker = linker_paths();
        Self::with_environment(std::env::var_os(ENVIRONMENT), linker.as_deref(), paths)
    }

    /// As [`Self::new`], with the values of the variable and of the linker's search path given.
    pub fn with_environment(
        value: Option<OsString>,
        linker: Option<&OsStr>,
        paths: impl IntoIterator<Item = PathBuf>,
    ) -> Self {
        if let Some(file) = value.filter(|value| !value.is_empty()) {
            return Self { places: vec![file.into()], linker: false };
        }
        let instead = instead_of_linker(linker);
        let named = paths.into_iter().chain([SONAME.into()]);
        Self {
            linker: instead.is_none(),
            places: named.chain(instead.into_iter().flatten()).collect(),
        }
    }

    /// The places, in order.
    pub fn places(&self) -> &[PathBuf] {
        &self.places
    }

    /// Opens one of the places.
    ///
    /// # Safety
    /// As for [`Library::new`].
    unsafe fn open(&self, path: &Path) -> std::result::Result<Library, String> {
        let by_name = path == Path::new(SONAME);
        if by_name && let Some(library) = loaded() {
            return Ok(library);
        }
        if by_name && !self.linker {
            return Err("not loaded, and the linker's search path has a relative folder".into());
        }
        if !by_name && !path.is_absolute() {
            return Err("not an absolute path".into());
        }
        // SAFETY: the caller upholds this function's contract.
        unsafe { Library::new(path) }.map_err(|error| reason(&error))
    }
}

/// The library, if this process has already loaded it: whoever did that chose the file.
#[cfg(target_os = "linux")]
fn loaded() -> Option<Library> {
    use libloading::os::unix;
    const NOLOAD: std::ffi::c_int = 4;
    // SAFETY: this loads nothing, and the initialisers of a loaded library have already run.
    unsafe { unix::Library::open(Some(SONAME), unix::RTLD_NOW | NOLOAD) }.ok().map(Library::from)
}

#[cfg(not(target_os = "linux"))]
fn loaded() -> Option<Library> {
    None
}

/// The folders that the dynamic linker searches first. The linker read the variable when the
/// process started, so later changes do not count.
fn linker_paths() -> Option<OsString> {
    const VARIABLE: &str = "LD_LIBRARY_PATH";
    #[cfg(target_os = "linux")]
    if let Ok(all) = std::fs::read("/proc/self/environ") {
        use std::os::unix::ffi::OsStringExt;
        let prefix = [VARIABLE.as_bytes(), b"="].concat();
        let value = all.split(|b| *b == 0).find_map(|line| line.strip_prefix(&prefix[..]));
        return value.map(|value| OsString::from_vec(value.to_vec()));
    }
    std::env::var_os(VARIABLE)
}

/// The places to try instead of the dynamic linker, if it would search the working directory: the
/// library in each of the linker's other folders.
fn instead_of_linker(search: Option<&OsStr>) -> Option<Vec<PathBuf>> {
    let search = search.filter(|search| !search.is_empty())?;
    // The linker also accepts `;` as a separator.
    let entries: Vec<_> = search.as_encoded_bytes().split(|b| matches!(b, b':' | b';')).collect();
    if entries.iter().all(|entry| entry.starts_with(b"/")) {
        return None;
    }
    let text = |entry: &&[u8]| std::str::from_utf8(entry).ok().map(str::to_owned);
    let absolute = entries.iter().filter(|entry| entry.starts_with(b"/")).filter_map(text);
    let folders = absolute.chain(STANDARD.map(str::to_owned));
    Some(folders.map(|folder| PathBuf::from(folder).join(SONAME)).collect())
}

/// Folders in which systems keep libraries.
const STANDARD: [&str; 5] = [
    "/usr/local/cuda/lib64",
    "/usr/local/lib",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
];

/// The library's description of itself.
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
    /// Opens the first library found. If it is not nvCOMP of this version, that is an error, and no
    /// other place is tried: whoever put it first should know.
    ///
    /// # Errors
    /// `NotFound` with every place that was tried; `Version` or `Symbol` for another library.
    ///
    /// # Safety
    /// Every library in the places of `search` may be loaded into this process: its initialisers run.
    pub unsafe fn open(search: &Search) -> Result<Self> {
        let mut tried = Vec::new();
        for path in search.places() {
            // SAFETY: the caller upholds this function's contract.
            match unsafe { search.open(path) } {
                // SAFETY: a library with the functions of nvCOMP is taken for nvCOMP; its version is
                // checked first.
                Ok(library) => return unsafe { Self::load(library, path) },
                Err(reason) => tried.push(Tried { path: path.clone(), reason }),
            }
        }
        Err(Error::NotFound { tried })
    }

    /// # Safety
    /// If the library has nvCOMP's functions, it is nvCOMP, of any version.
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
        // SAFETY: the options' types are those of this version; the library is never closed.
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

    /// Checks that a CUDA driver can run the library. `driver` is what `cuDriverGetVersion`
    /// returns, for instance 12040. A driver of the same or a later major version will do.
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

/// Decodes the version and checks that these bindings are for it.
fn require_major(path: &Path, number: u32) -> Result<Version> {
    let found = Version::of(number);
    if found.major != MAJOR {
        return Err(Error::Version { path: path.to_owned(), found });
    }
    Ok(found)
}

/// The dynamic linker's message, which libloading keeps as the error's source on some systems.
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
        let search = Search::with_environment(Some("/opt/mine.so".into()), None, known());
        assert_eq!(search.places(), [PathBuf::from("/opt/mine.so")]);
        for unset in [None, Some(OsString::new())] {
            let search = Search::with_environment(unset, None, known());
            assert_eq!(search.places(), [PathBuf::from("/opt/a.so"), PathBuf::from(SONAME)]);
        }
    }

    #[test]
    fn nothing_is_taken_from_the_working_directory() {
        let search = |value: &str| Search::with_environment(None, Some(value.as_ref()), []);
        for safe in ["", "/opt/cuda/lib64", "/a:/b"] {
            let search = search(safe);
            assert!(search.linker && search.places() == [PathBuf::from(SONAME)], "{safe}");
        }
        for relative in [":", "/a:", ":/a", "/a::/b", "lib:/a", "/a:.", "/a;b", "./x"] {
            let search = search(relative);
            let [name, others @ ..] = search.places() else { panic!("{relative}") };
            assert!(!search.linker && name == Path::new(SONAME), "{relative}");
            assert!(others.iter().all(|place| place.is_absolute()), "{relative}: {others:?}");
            let has_a = relative.contains("/a");
            assert_eq!(others.contains(&Path::new("/a").join(SONAME)), has_a, "{relative}");
        }
        for relative in ["libc.so.6", "./libnvcomp.so.6", "lib/libnvcomp.so.6"] {
            let search = Search::with_environment(Some(relative.into()), None, []);
            // SAFETY: nothing is loaded from a relative path.
            let error = unsafe { Nvcomp::open(&search) }.unwrap_err();
            assert!(error.to_string().contains("not an absolute path"), "{error}");
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
        let search = Search { places: paths.to_vec(), linker: false };
        // SAFETY: there is no library to load at these paths.
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
        // The C library's file: it is loaded already.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = maps.split_whitespace().find(|word| word.ends_with("/libc.so.6")).unwrap();
        let search = Search::with_environment(Some(path.into()), None, []);
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
