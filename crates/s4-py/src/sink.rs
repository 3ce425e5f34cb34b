//! A Python stream as a native one.

use std::io::{self, Write};

use pyo3::exceptions::PyBlockingIOError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes};

/// Bytes that are collected before Python is called.
const BUFFER: usize = 1 << 20;
/// Writes of at least this size skip the buffer, for a stream that copies the data that it is given.
const LARGE: usize = 64 << 10;
/// `PyBUF_READ`: `pyo3` has no name for it in builds for CPython's stable ABI.
const READ_ONLY: std::ffi::c_int = 0x100;

/// An object with a `write` method. Unlike a `BufWriter`, it writes nothing when it is dropped: a
/// failed save does not call the stream again.
pub(crate) struct PySink {
    stream: Py<PyAny>,
    /// Whether the stream is of a class of `io` whose `write` copies or writes the data before it returns.
    copies: bool,
    /// Whether the stream is an `io.RawIOBase`, whose `write` may take a part and returns how much, or `None` if it
    /// took nothing. Others take everything, as `torch.save` assumes: what they return may be anything, such as
    /// `True` or the number of bytes after compression.
    is_raw: bool,
    buffer: Vec<u8>,
}

impl PySink {
    pub(crate) fn new(stream: Bound<'_, PyAny>) -> PyResult<Self> {
        let io = stream.py().import("io")?;
        let mut copies = false;
        for name in ["BytesIO", "BufferedWriter", "BufferedRandom", "FileIO"] {
            // The exact class: a subclass may keep a reference to its argument.
            copies |= stream.get_type().is(&io.getattr(name)?);
        }
        let raw = io.getattr("RawIOBase")?;
        let mut is_raw = stream.is_instance(&raw)?;
        // Unbuffered temporary files.
        let wrapper = stream.py().import("tempfile")?.getattr("_TemporaryFileWrapper")?;
        if stream.is_instance(&wrapper)? {
            is_raw |= stream.getattr("file")?.is_instance(&raw)?;
        }
        Ok(Self { stream: stream.unbind(), copies, is_raw, buffer: Vec::new() })
    }

    fn send_buffer(&mut self) -> io::Result<()> {
        let buffer = std::mem::take(&mut self.buffer);
        self.send(&buffer)?;
        self.buffer = buffer;
        self.buffer.clear();
        Ok(())
    }

    fn send(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            match self.attached(|py| self.call_write(py, data))? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                n => data = data.get(n..).unwrap_or_default(),
            }
        }
        Ok(())
    }

    /// Calls `write`. Returns how many bytes the stream took. A raw stream that would have to wait is an error.
    fn call_write(&self, py: Python<'_>, data: &[u8]) -> PyResult<usize> {
        let taken = if self.copies && data.len() >= LARGE {
            let view = view(py, data)?;
            let taken = self.stream.call_method1(py, "write", (&view,));
            view.call_method0("release")?;
            taken?
        } else {
            self.stream.call_method1(py, "write", (PyBytes::new(py, data),))?
        };
        if !self.is_raw || taken.bind(py).is_instance_of::<PyBool>() {
            return Ok(data.len());
        }
        if taken.is_none(py) {
            let again: i32 = py.import("errno")?.getattr("EAGAIN")?.extract()?;
            let what = "the stream is in non-blocking mode and cannot take more bytes now";
            return Err(PyBlockingIOError::new_err((again, what, 0)));
        }
        Ok(taken.extract::<usize>(py).unwrap_or(data.len()))
    }

    fn attached<T>(&self, call: impl FnOnce(Python<'_>) -> PyResult<T>) -> io::Result<T> {
        match Python::try_attach(call) {
            // Not `From`: an `InterruptedError` would be taken for a reason to try again.
            Some(result) => result.map_err(io::Error::other),
            None => Err(io::Error::other("the interpreter is shutting down")),
        }
    }
}

impl Write for PySink {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let at_once = data.len() >= if self.copies { LARGE } else { BUFFER };
        if at_once || self.buffer.len() + data.len() > BUFFER {
            self.send_buffer()?;
        }
        if at_once {
            self.send(data)?;
        } else {
            self.buffer.extend_from_slice(data);
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send_buffer()?;
        self.attached(|py| {
            if self.stream.bind(py).hasattr("flush")? {
                self.stream.call_method0(py, "flush")?;
            }
            Ok(())
        })
    }
}

/// A `memoryview` of memory that must outlive it.
fn view<'py>(py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    let len = isize::try_from(data.len())?;
    // SAFETY: the memory is readable and has `len` bytes, and Python may not write to it. Nobody reads it after
    // the caller has let go of it: `PySink::copies` promises that, and `release` enforces it.
    unsafe {
        let start = data.as_ptr().cast_mut().cast();
        let view = ffi::PyMemoryView_FromMemory(start, len, READ_ONLY);
        Bound::from_owned_ptr_or_err(py, view)
    }
}
