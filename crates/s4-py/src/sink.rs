//! A Python stream as a native one.

use std::io::{self, Write};

use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Bytes that are collected before Python is called.
const BUFFER: usize = 1 << 20;

/// An object with a `write` method. Unlike a `BufWriter`, it writes nothing when it is dropped: a
/// save that failed calls the stream no more.
pub(crate) struct PySink {
    stream: Py<PyAny>,
    buffer: Vec<u8>,
}

impl PySink {
    pub(crate) fn new(stream: Py<PyAny>) -> Self {
        Self { stream, buffer: Vec::new() }
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

    /// How much the stream took. Streams that do not tell have taken everything.
    fn call_write(&self, py: Python<'_>, data: &[u8]) -> PyResult<usize> {
        let taken = self.stream.call_method1(py, "write", (PyBytes::new(py, data),))?;
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
        if self.buffer.len() + data.len() > BUFFER {
            self.send_buffer()?;
        }
        if data.len() > BUFFER {
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
