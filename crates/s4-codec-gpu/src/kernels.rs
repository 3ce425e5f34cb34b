//! The kernels, loaded.

use std::ffi::CString;

use cudarc::driver::{result, sys};

use crate::error::{GpuError, On, Result};

/// The committed PTX, which the driver translates for its device: that takes some ten seconds, once on a machine
/// that keeps the driver's cache, and in each new container.
const PTX: &str = include_str!("../kernels/s4.ptx");

/// Machine code by compute capability: it runs on devices with the same major number and no smaller
/// minor one.
const CUBINS: [((u32, u32), &[u8]); 3] = [
    ((9, 0), include_bytes!("../kernels/s4.sm_90.cubin")),
    ((8, 9), include_bytes!("../kernels/s4.sm_89.cubin")),
    ((8, 0), include_bytes!("../kernels/s4.sm_80.cubin")),
];

/// The entry points of the module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernels {
    module: sys::CUmodule,
    pub(crate) encode_fused: [sys::CUfunction; 2],
    pub(crate) encode_composed: sys::CUfunction,
    pub(crate) encode_residual: sys::CUfunction,
    pub(crate) encode_predicted: sys::CUfunction,
    pub(crate) encode_update: sys::CUfunction,
    pub(crate) split_planes: sys::CUfunction,
    pub(crate) place_streams: sys::CUfunction,
    pub(crate) gather_planes: sys::CUfunction,
    pub(crate) frame_offsets: sys::CUfunction,
    pub(crate) gather_fused: [sys::CUfunction; 2],
    pub(crate) gather_composed: sys::CUfunction,
    pub(crate) encode_crcs: sys::CUfunction,
    pub(crate) check_frames: sys::CUfunction,
    pub(crate) decode_fused: [sys::CUfunction; 2],
    pub(crate) decode_composed: sys::CUfunction,
    pub(crate) decode_predicted: sys::CUfunction,
    pub(crate) decode_update: sys::CUfunction,
    pub(crate) check_values: sys::CUfunction,
    pub(crate) copy_spans: sys::CUfunction,
    pub(crate) copy_rows: sys::CUfunction,
    pub(crate) crc_spans: sys::CUfunction,
}

impl Kernels {
    /// Loads the module into the current context, which is of a device of this compute capability.
    pub(crate) fn load(device: u32, capability: (u32, u32)) -> Result<Self> {
        let runs = |least: (u32, u32)| least.0 == capability.0 && least.1 <= capability.1;
        let cubin = CUBINS.iter().find(|(least, _)| runs(*least)).map(|(_, cubin)| cubin);
        // A driver that refuses machine code has a compiler of its own.
        // SAFETY: `cubin` is machine code as the compiler wrote it, which says how long it is.
        let module = cubin
            .and_then(|cubin| unsafe { result::module::load_data(cubin.as_ptr().cast()) }.ok());
        let module = match module {
            Some(module) => module,
            None => Self::translate(device)?,
        };
        let kernels = Self::resolve(device, module);
        if kernels.is_err() {
            // SAFETY: loaded above, and nothing of it is in use.
            let _ = unsafe { result::module::unload(module) };
        }
        kernels
    }

    /// Has the driver translate the PTX.
    fn translate(device: u32) -> Result<sys::CUmodule> {
        let image = CString::new(PTX).map_err(|e| GpuError::Driver {
            device,
            action: "load the kernels",
            reason: e.to_string(),
        })?;
        // SAFETY: `image` is PTX that ends with a NUL.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) };
        module.on(device, "load the kernels")
    }

    fn resolve(device: u32, module: sys::CUmodule) -> Result<Self> {
        let get = |name: &str| {
            let name = CString::new(name).unwrap_or_default();
            // SAFETY: the module is loaded.
            unsafe { result::module::get_function(module, name) }.on(device, "find a kernel")
        };
        let decode_fused = [get("s4_decode_fused_w2")?, get("s4_decode_fused_w4")?];
        // Shared memory for the five blocks that its registers allow; the rest is L1 cache.
        let carveout =
            sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: a kernel of the module. This is only a preference: the result does not matter.
        let _ = unsafe { sys::cuFuncSetAttribute(decode_fused[1], carveout, 20) };
        Ok(Self {
            module,
            encode_fused: [get("s4_encode_fused_w2")?, get("s4_encode_fused_w4")?],
            encode_composed: get("s4_encode_composed")?,
            encode_residual: get("s4_encode_residual")?,
            encode_predicted: get("s4_encode_predicted")?,
            encode_update: get("s4_encode_update")?,
            split_planes: get("s4_split_planes")?,
            place_streams: get("s4_place_streams")?,
            gather_planes: get("s4_gather_planes")?,
            frame_offsets: get("s4_frame_offsets")?,
            gather_fused: [get("s4_gather_fused_w2")?, get("s4_gather_fused_w4")?],
            gather_composed: get("s4_gather_composed")?,
            encode_crcs: get("s4_encode_crcs")?,
            check_frames: get("s4_check_frames")?,
            decode_fused,
            decode_composed: get("s4_decode_composed")?,
            decode_predicted: get("s4_decode_predicted")?,
            decode_update: get("s4_decode_update")?,
            check_values: get("s4_check_values")?,
            copy_spans: get("s4_copy_spans")?,
            copy_rows: get("s4_copy_rows")?,
            crc_spans: get("s4_crc_spans")?,
        })
    }

    /// Unloads the module from the current context.
    pub(crate) fn unload(self) {
        // SAFETY: loaded in `load`; streams that could still use it hold the device, which calls this.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

#[cfg(test)]
mod tests {
    use super::PTX;

    /// A block's shared memory starts after the driver's own, at byte 1024 on the devices seen, and a larger
    /// alignment is not honoured. Tables whose index is ORed into the address therefore align themselves
    /// (`AlignedTable`). PTX made before that coded symbols from 128 on as escapes.
    #[test]
    fn no_kernel_relies_on_the_alignment_of_shared_memory() {
        let mut shared = 0;
        for line in PTX.lines().filter(|l| l.contains(".shared .align ")) {
            let align = line.split_whitespace().skip_while(|w| *w != ".align").nth(1);
            let align: u32 = align.and_then(|a| a.parse().ok()).expect("a number");
            assert!(align <= 16, "{line}");
            shared += 1;
        }
        assert!(shared >= 6, "the kernels' shared memory was not found: {shared} declarations");
    }
}
