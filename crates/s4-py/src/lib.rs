//! The native module of the Python package `s4weights`: a `Store`, a `Writer`, a `Reader` and a
//! `TensorCodec` over memory of the host and of CUDA devices, whose addresses Python passes, and the
//! command line.
//!
//! All native work runs detached from the interpreter, on threads that end with the call, so that
//! other Python threads can continue and a process may fork between calls. Ctrl-C stops it, its panics
//! become exceptions (`watch`), and what it logs goes to Python's `logging` (`log`).
//!
//! The one thing that it does with Python objects is to take apart an object to be saved (`object`): describing
//! thousands of tensors in Python takes too long. Everything else to do with PyTorch is in the package's Python part.

mod arguments;
mod codec;
mod copy;
mod device;
mod errors;
mod log;
mod object;
mod panics;
mod ranks;
mod reader;
mod sink;
mod store;
mod watch;
mod writer;

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use codec::{Compressed, TensorCodec};
use copy::copy_memory;
use device::{CudaEngine, DeviceCopies, HostCopies};
use object::{Sources, Storages};
use reader::Reader;
use store::Store;
use watch::{detached, watched};
use writer::Writer;

/// Bytes at a file's start that distinguish formats, and at its end that identify a `.s4w` file.
const HEAD: u64 = 9;
const TAIL: u64 = 64;

/// Whether bytes start like a `.s4w` file.
#[pyfunction]
fn is_s4w(head: &[u8]) -> bool {
    s4weights::format::file::is_s4w(head)
}

/// Whether bytes end like a `.s4w` file.
#[pyfunction]
fn ends_s4w(end: &[u8]) -> bool {
    s4weights::format::file::ends_s4w(end)
}

/// The first bytes of a file, and whether its first or last bytes identify it as a `.s4w` file; `None` if it
/// cannot be read, or is not a regular file.
#[pyfunction]
fn look_at<'py>(py: Python<'py>, path: PathBuf) -> Option<(Bound<'py, PyBytes>, bool)> {
    use s4weights::format::file::{ends_s4w, is_s4w};
    let look = || -> std::io::Result<(Vec<u8>, bool)> {
        // Opening a FIFO, for one, would wait for a writer.
        if !std::fs::metadata(&path)?.is_file() {
            return Err(std::io::ErrorKind::Unsupported.into());
        }
        let mut file = File::open(&path)?;
        let (mut head, mut tail) = (vec![], vec![]);
        (&file).take(HEAD).read_to_end(&mut head)?;
        if is_s4w(&head) {
            return Ok((head, true));
        }
        let len = file.seek(SeekFrom::End(0))?;
        file.seek(SeekFrom::Start(len.saturating_sub(TAIL)))?;
        file.take(TAIL).read_to_end(&mut tail)?;
        Ok((head, ends_s4w(&tail)))
    };
    let (head, ours) = py.detach(look).ok()?;
    Some((PyBytes::new(py, &head), ours))
}

/// Whether `tail` ends a single `.s4w` file of exactly `size` bytes.
#[pyfunction]
fn is_whole(tail: &[u8], size: u64) -> bool {
    s4weights::format::file::Footer::parse(tail, size).is_ok()
}

/// Length of the `.s4w` file that begins at offset `start` of `data`, whatever follows it; `None` if it has no
/// complete footer.
#[pyfunction]
fn first_len(py: Python<'_>, data: PyBackedBytes, start: usize) -> Option<usize> {
    py.detach(|| s4weights::format::file::first_len(data.get(start..)?))
}

/// The names of the dtypes that the format supports: PyTorch's names, without `torch.`.
#[pyfunction]
fn dtypes() -> Vec<&'static str> {
    s4weights::DType::ALL.iter().map(|d| d.name()).collect()
}

/// Whether a text is the URL of an object store or a `file:` URL rather than a path.
#[pyfunction]
fn is_url(text: &str) -> bool {
    s4weights::is_url(text)
}

/// The path on this machine that a `file:` URL names; `None` for other URLs, and for an invalid one, which is an error
/// when it is opened.
#[pyfunction]
fn path_of_url(url: &str) -> Option<OsString> {
    let path = s4weights::Target::Url(url.to_owned(), Default::default()).local_path();
    path.ok().flatten().map(Into::into)
}

/// Runs `s4w` with these arguments, which do not include the program's name; returns its exit code. If `signals`, the
/// command stops on INT, TERM and HUP, whose handlers stay installed afterwards.
#[pyfunction]
fn command_line(py: Python<'_>, arguments: Vec<String>, signals: bool) -> PyResult<u8> {
    let arguments = std::iter::once("s4w".to_owned()).chain(arguments).map(Into::into);
    detached(py, || if signals { s4_cli::run_program(arguments) } else { s4_cli::run(arguments) })
}

/// Panics in native code, so that tests can check how a panic is reported.
#[pyfunction]
fn panic_on_purpose(py: Python<'_>) -> PyResult<()> {
    watched(py, None, || panic!("on purpose"))
}

/// The module.
#[pymodule]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    panics::note_places();
    log::install();
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add_function(wrap_pyfunction!(copy_memory, m)?)?;
    m.add_function(wrap_pyfunction!(dtypes, m)?)?;
    m.add_function(wrap_pyfunction!(is_s4w, m)?)?;
    m.add_function(wrap_pyfunction!(ends_s4w, m)?)?;
    m.add_function(wrap_pyfunction!(first_len, m)?)?;
    m.add_function(wrap_pyfunction!(look_at, m)?)?;
    m.add_function(wrap_pyfunction!(is_whole, m)?)?;
    m.add_function(wrap_pyfunction!(is_url, m)?)?;
    m.add_function(wrap_pyfunction!(path_of_url, m)?)?;
    m.add_function(wrap_pyfunction!(command_line, m)?)?;
    m.add_function(wrap_pyfunction!(log::close_log, m)?)?;
    m.add_function(wrap_pyfunction!(log::reset_log, m)?)?;
    m.add_function(wrap_pyfunction!(panic_on_purpose, m)?)?;
    m.add_function(wrap_pyfunction!(watch::give_way, m)?)?;
    m.add_function(wrap_pyfunction!(watch::nesting, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::begin_parts, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::save_part, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::publish_parts, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::give_up_parts, m)?)?;
    m.add_class::<TensorCodec>()?;
    m.add_class::<Compressed>()?;
    m.add_class::<Store>()?;
    m.add_class::<CudaEngine>()?;
    m.add_class::<DeviceCopies>()?;
    m.add_class::<HostCopies>()?;
    m.add_function(wrap_pyfunction!(object::freeze, m)?)?;
    m.add_function(wrap_pyfunction!(object::write_tree, m)?)?;
    m.add_class::<Storages>()?;
    m.add_class::<Sources>()?;
    m.add_class::<Writer>()?;
    m.add_class::<Reader>()
}
