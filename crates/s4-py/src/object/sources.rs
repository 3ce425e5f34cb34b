//! `_core.Sources`: the places of the values of an object's storages.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use s4weights::{DType, TensorSource};

use super::shape::Shape;
use crate::arguments::{DeviceRange, HOST, Where, memory, values};

/// The values of a tensor to be written.
#[derive(Clone)]
pub(crate) struct Source {
    pub(super) name: Arc<str>,
    pub(super) dtype: DType,
    pub(super) shape: Shape,
    pub(super) address: usize,
    pub(super) nbytes: usize,
    /// `None`: on another device, from which the values must be copied to the host first.
    pub(super) place: Option<Where>,
    /// Whether the values are a copy on a device, which nobody changes.
    pub(super) fixed: bool,
    pub(super) group: u8,
}

/// Values to be written, wherever they are. The caller keeps their memory alive.
#[pyclass(frozen, module = "s4weights._core")]
pub(crate) struct Sources(Mutex<Arc<Vec<Source>>>);

#[pymethods]
impl Sources {
    fn __len__(&self) -> usize {
        self.list().len()
    }

    /// Name, dtype, shape, address, bytes and place of the values with this index.
    fn __getitem__(
        &self,
        number: usize,
    ) -> PyResult<(String, String, Vec<u64>, usize, usize, Where)> {
        let list = self.list();
        let s = list.get(number).ok_or_else(|| PyIndexError::new_err(number))?;
        let dtype = s.dtype.name().to_owned();
        let (name, shape) = (s.name.to_string(), s.shape.to_vec());
        Ok((name, dtype, shape, s.address, s.nbytes, s.place.unwrap_or(HOST)))
    }

    /// Bytes of the values with indices from `first` up to, not including, `end`.
    #[pyo3(signature = (first=0, end=usize::MAX))]
    fn nbytes(&self, first: usize, end: usize) -> usize {
        self.list().iter().take(end).skip(first).map(|s| s.nbytes).sum()
    }

    /// Address, bytes and place of values on CUDA devices.
    pub(crate) fn on_devices(&self) -> Vec<DeviceRange> {
        let list = self.list();
        list.iter().filter_map(|s| Some((s.address, s.nbytes, s.device()?))).collect()
    }

    /// Bytes on CUDA devices.
    fn device_nbytes(&self) -> usize {
        self.list().iter().filter(|s| s.device().is_some()).map(|s| s.nbytes).sum()
    }

    /// Indices and sizes of the values in host memory or, with `elsewhere`, of those that must be copied there
    /// first. Empty values are left out.
    #[pyo3(signature = (elsewhere=false))]
    fn on_host(&self, elsewhere: bool) -> Vec<(usize, usize)> {
        let list = self.list();
        let some = list.iter().enumerate().filter(|(_, s)| s.nbytes > 0);
        some.filter(|(_, s)| if elsewhere { s.place.is_none() } else { s.is_on_host() })
            .map(|(i, s)| (i, s.nbytes))
            .collect()
    }

    /// Records that values were copied to host memory: index and new address of each.
    fn put(&self, copies: Vec<(usize, usize)>) -> PyResult<()> {
        self.change(|list| {
            for (number, address) in copies {
                let s = list.get_mut(number).ok_or_else(|| PyIndexError::new_err(number))?;
                (s.address, s.place) = (address, Some(HOST));
            }
            Ok(())
        })
    }

    /// Records that all values on CUDA devices were copied: address and place of each copy, in the order of
    /// `on_devices`.
    fn move_to(&self, places: Vec<(usize, Where)>) -> PyResult<()> {
        self.change(|list| {
            let mut places = places.into_iter();
            for s in list.iter_mut().filter(|s| s.device().is_some()) {
                let copies = "expected a copy of each value on a device";
                let (address, place) =
                    places.next().ok_or_else(|| PyValueError::new_err(copies))?;
                (s.address, s.place, s.fixed) = (address, Some(place), place.0 >= 0);
            }
            Ok(())
        })
    }
}

impl Sources {
    pub(super) fn new(list: Vec<Source>) -> Self {
        Self(Mutex::new(Arc::new(list)))
    }

    pub(crate) fn list(&self) -> Arc<Vec<Source>> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Bytes of all values.
    pub(crate) fn bytes(&self) -> u64 {
        self.list().iter().map(|s| s.nbytes as u64).sum()
    }

    fn change(&self, with: impl FnOnce(&mut Vec<Source>) -> PyResult<()>) -> PyResult<()> {
        with(Arc::make_mut(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

impl Source {
    fn device(&self) -> Option<Where> {
        self.place.filter(|place| place.0 >= 0)
    }

    fn is_on_host(&self) -> bool {
        self.place.is_some_and(|place| place.0 < 0)
    }

    /// The tensor for the native writer, which reads the values where they are.
    pub(crate) fn tensor(&self) -> PyResult<TensorSource<'_>> {
        let (name, shape) = (&*self.name, self.shape.as_slice());
        let tensor = match self.device() {
            Some(place) => {
                let memory = memory(self.address, self.nbytes, place)?;
                // SAFETY: a copy that this process made (`DeviceCopies`), and that is written only once.
                let memory = if self.fixed { unsafe { memory.fixed() } } else { memory };
                TensorSource::new(name, self.dtype, shape, memory)
            }
            None => {
                TensorSource::new(name, self.dtype, shape, values(name, self.address, self.nbytes)?)
            }
        };
        Ok(tensor.in_group(self.group))
    }
}
