//! Arguments that several calls have: tensors by the addresses of their values, and what is stored besides tensors.

use std::collections::{BTreeMap, HashMap};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use s4weights::cuda::DeviceMemory;
use s4weights::format::manifest::Roles;
use s4weights::{Contents, DType, TensorSource};
use serde_json::value::RawValue;

use crate::errors::to_value_error;

/// Ordinal of the device, or -1 for the host; handle of the stream that the memory was used on.
pub(crate) type Where = (i64, u64);

/// The place of values in host memory: no device, no stream.
pub(crate) const HOST: Where = (-1, 0);

/// Address, bytes, and place.
pub(crate) type DeviceRange = (usize, usize, Where);

/// Name, dtype, shape, address, bytes, and place.
pub(crate) type PlacedTensor = (String, String, Vec<u64>, usize, usize, Where);

/// Tensor index, address, bytes, and place.
pub(crate) type DeviceRequest = (usize, usize, usize, Where);

/// The source for the native writer: a tensor's description, with its values or their place on a device.
pub(crate) fn placed(tensor: &PlacedTensor) -> PyResult<TensorSource<'_>> {
    let (name, dtype, shape, address, nbytes, (ordinal, stream)) = tensor;
    let dtype: DType = dtype.parse().map_err(to_value_error)?;
    Ok(if *ordinal < 0 {
        TensorSource::new(name, dtype, shape, values(name, *address, *nbytes)?)
    } else {
        let memory = memory(*address, *nbytes, (*ordinal, *stream))?;
        TensorSource::new(name, dtype, shape, memory)
    })
}

/// Memory to read into: checked to be disjoint, since kernels fill all of it concurrently.
pub(crate) fn requests(list: &[DeviceRequest]) -> PyResult<Vec<(usize, DeviceMemory)>> {
    let mut spans: Vec<_> = list.iter().filter(|r| r.2 > 0).map(|r| (r.3.0, r.1, r.2)).collect();
    spans.sort_unstable();
    if spans.windows(2).any(|w| w[0].0 == w[1].0 && w[1].1 - w[0].1 < w[0].2) {
        return Err(PyValueError::new_err("buffers overlap"));
    }
    list.iter().map(|r| Ok((r.0, memory(r.1, r.2, r.3)?))).collect()
}

/// Values in the memory of a CUDA device.
pub(crate) fn memory(
    address: usize,
    nbytes: usize,
    (ordinal, stream): Where,
) -> PyResult<DeviceMemory> {
    let ordinal = u32::try_from(ordinal);
    let ordinal = ordinal.map_err(|_| PyValueError::new_err("expected the ordinal of a device"))?;
    // SAFETY:
    // - The caller, the package's own Python part, passes the address and size of a storage on that
    //   device, and that device's current stream; it keeps both alive during the call.
    // - Memory that is read into was just made by that caller, or given by its user to be overwritten.
    // - If another stream changes the values meanwhile, a mixture of old and new values is saved, as with
    //   any save. The engine itself checks that the bytes are memory of the device.
    Ok(unsafe { DeviceMemory::new(ordinal, address as u64, nbytes as u64, stream) })
}

/// A tensor's values in host memory.
pub(crate) fn values<'a>(name: &str, address: usize, nbytes: usize) -> PyResult<&'a [u8]> {
    match (nbytes, address) {
        (0, _) => Ok(&[]),
        (_, 0) => Err(PyValueError::new_err(format!("tensor `{name}` has no address"))),
        (nbytes, address) => {
            let start: *const u8 = std::ptr::with_exposed_provenance(address);
            // SAFETY:
            // - The caller, the package's own Python part, passes the address and size of a
            //   storage that it keeps alive and does not resize during the call.
            // - `u8` has no alignment and no invalid values.
            // - If another thread changes the values meanwhile, a mixture of old and new values is
            //   saved, as with any save.
            Ok(unsafe { std::slice::from_raw_parts(start, nbytes) })
        }
    }
}

/// The contents of a saved object besides its tensors.
pub(crate) fn contents(
    tree: Option<String>,
    blobs: HashMap<String, PyBackedBytes>,
    metadata: BTreeMap<String, String>,
) -> PyResult<Contents> {
    let tree = tree.map(RawValue::from_string).transpose().map_err(to_value_error)?;
    let blobs = blobs.into_iter().map(|(name, bytes)| (name, bytes.to_vec())).collect();
    Ok(Contents { tree, blobs, metadata })
}

/// The role table, from JSON.
pub(crate) fn parse_roles(json: Option<String>) -> PyResult<Option<Roles>> {
    json.map(|json| serde_json::from_str(&json)).transpose().map_err(to_value_error)
}
