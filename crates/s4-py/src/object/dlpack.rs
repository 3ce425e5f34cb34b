//! Describes a tensor through PyTorch's C functions for DLPack: one call, which creates no Python objects.
//!
//! They are `DLPackExchangeAPI` of DLPack 1 (<https://dmlc.github.io/dlpack/latest/c_api.html>). PyTorch 2.11 has
//! them; without them, tensors are described through their Python attributes.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};

use super::shape::Shape;

/// `DLTensor`: a view of a tensor; `shape` and `strides` are borrowed from it.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlDType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLDevice`.
#[repr(C)]
struct DlDevice {
    kind: i32,
    number: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct DlDType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// The first fields of `DLPackExchangeAPI`, up to the one that is used.
#[repr(C)]
struct Functions {
    major: u32,
    minor: u32,
    previous: *const c_void,
    allocate: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    /// May be missing.
    tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
}

const MAJOR: u32 = 1;
/// `kDLCPU` and `kDLCUDA`.
const CPU: i32 = 1;
const CUDA: i32 = 2;

/// The function that describes tensors of a class.
#[derive(Clone, Copy)]
pub(super) struct Exchange(unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int);

/// That function's description of a tensor.
pub(super) struct Described {
    /// The ordinal of its CUDA device; `None`: the host.
    pub(super) cuda: Option<u32>,
    pub(super) dtype: DlDType,
    /// The address of its first element.
    pub(super) address: usize,
    pub(super) shape: Shape,
    /// Whether it is contiguous in PyTorch's sense: dimensions of size 1 may have any stride.
    pub(super) contiguous: bool,
}

impl Exchange {
    /// The function of PyTorch's class, if it has one.
    pub(super) fn of(class: &Bound<'_, PyType>) -> Option<Self> {
        let capsule = class.getattr("__dlpack_c_exchange_api__").ok()?;
        let capsule = capsule.cast::<PyCapsule>().ok()?;
        let functions = capsule.pointer_checked(Some(c"dlpack_exchange_api")).ok()?;
        // SAFETY: a capsule of this name holds a struct that begins with the version, and lives as long as the process.
        let functions = unsafe { functions.cast::<Functions>().as_ref() };
        (functions.major == MAJOR).then_some(functions.tensor_from_object)?.map(Self)
    }

    /// Describes a tensor of the class; `None` if something about it cannot be expressed in DLPack.
    pub(super) fn describe(self, tensor: &Bound<'_, PyAny>) -> Option<Described> {
        let mut out = MaybeUninit::<DlTensor>::uninit();
        // SAFETY: the object is a tensor of the class, the GIL is held, and what is written is a `DLTensor`.
        let status = unsafe { (self.0)(tensor.as_ptr().cast(), out.as_mut_ptr()) };
        if status != 0 {
            // Clears the exception that says why.
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: the function has filled it.
        let out = unsafe { out.assume_init() };
        let cuda = match out.device.kind {
            CPU => None,
            CUDA => Some(u32::try_from(out.device.number).ok()?),
            _ => return None,
        };
        let dimensions = usize::try_from(out.ndim).ok()?;
        if dimensions > 0 && (out.shape.is_null() || out.strides.is_null()) {
            return None;
        }
        let numbers = |from: *const i64| match dimensions {
            0 => &[][..],
            // SAFETY: the tensor has that many sizes and strides. Nobody changes it while the GIL is held.
            _ => unsafe { std::slice::from_raw_parts(from, dimensions) },
        };
        let (sizes, strides) = (numbers(out.shape), numbers(out.strides));
        let shape = sizes.iter().map(|size| u64::try_from(*size)).collect::<Result<Shape, _>>();
        let (mut contiguous, mut step) = (true, 1_i64);
        for (&size, &stride) in sizes.iter().zip(strides).rev().filter(|(size, _)| **size != 1) {
            contiguous &= stride == step;
            // The sizes of an empty tensor may be anything.
            step = size.saturating_mul(step);
        }
        let address = out.data.addr().checked_add(usize::try_from(out.byte_offset).ok()?)?;
        Some(Described { cuda, dtype: out.dtype, address, shape: shape.ok()?, contiguous })
    }
}
