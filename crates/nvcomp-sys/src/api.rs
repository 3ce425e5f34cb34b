//! The functions of one format. All formats have the same functions, each with its own options.

use std::ffi::c_void;
use std::path::Path;
use std::ptr::with_exposed_provenance_mut as address;

use libloading::Library;

use crate::error::{Error, Result};
use crate::status::Status;

/// Device-accessible array of device pointers.
type Pointers = *const *const c_void;
/// The same, for blocks that are written.
type Targets = *const *mut c_void;
/// Device-accessible array of sizes.
type Sizes = *const usize;
/// `CUstream`, which is `cudaStream_t`.
type Stream = *mut c_void;

/// Alignment that buffers need, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Alignments {
    /// Alignment of each block that is read.
    pub input: usize,
    /// Alignment of each block that is written.
    pub output: usize,
    /// Alignment of the scratch memory.
    pub scratch: usize,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Alignments>() == 3 * size_of::<usize>());
    assert!(offset_of!(Alignments, output) == size_of::<usize>());
    assert!(offset_of!(Alignments, scratch) == 2 * size_of::<usize>());
};

/// Size of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Number of blocks.
    pub blocks: usize,
    /// Bytes of the longest block before compression.
    pub max_block: usize,
    /// Bytes of all blocks together before compression, or an upper bound on them.
    pub total: usize,
}

/// Arguments of [`Api::compress`]: addresses of device-accessible memory. Sizes are arrays of `u64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compress {
    /// Array of the addresses of the blocks to compress.
    pub inputs: u64,
    /// Array of their sizes in bytes.
    pub input_sizes: u64,
    /// Array of the addresses to write to, each with room for [`Api::max_compressed`] bytes.
    pub outputs: u64,
    /// Array that receives the sizes written.
    pub output_sizes: u64,
    /// Scratch memory.
    pub scratch: u64,
    /// Its size in bytes, at least [`Api::compress_scratch`].
    pub scratch_bytes: usize,
    /// Array that receives the [`Status`] of each block; 0 if they are not wanted.
    pub statuses: u64,
}

/// Arguments of [`Api::decompress`]: addresses of device-accessible memory. Sizes are arrays of `u64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decompress {
    /// Array of the addresses of the compressed blocks.
    pub inputs: u64,
    /// Array of their sizes in bytes.
    pub input_sizes: u64,
    /// Array of the addresses to write to.
    pub outputs: u64,
    /// Array of the number of bytes that fit at each of these addresses.
    pub output_capacities: u64,
    /// Array that receives the sizes written.
    pub output_sizes: u64,
    /// Scratch memory.
    pub scratch: u64,
    /// Its size in bytes, at least [`Api::decompress_scratch`].
    pub scratch_bytes: usize,
    /// Array that receives the [`Status`] of each block; 0 if they are not wanted.
    pub statuses: u64,
}

/// The functions of one format. `C` and `D` are its options for compressing and decompressing.
#[derive(Debug, Clone, Copy)]
pub struct Api<C, D> {
    format: &'static str,
    compress_alignments: unsafe extern "C" fn(C, *mut Alignments) -> Status,
    compress_scratch: unsafe extern "C" fn(usize, usize, C, *mut usize, usize, Stream) -> Status,
    max_compressed: unsafe extern "C" fn(usize, C, *mut usize) -> Status,
    compress: unsafe extern "C" fn(
        Pointers,
        Sizes,
        usize,
        usize,
        *mut c_void,
        usize,
        Targets,
        *mut usize,
        C,
        *mut Status,
        Stream,
    ) -> Status,
    decompress_alignments: unsafe extern "C" fn(D, *mut Alignments) -> Status,
    decompress_scratch: unsafe extern "C" fn(usize, usize, D, *mut usize, usize, Stream) -> Status,
    decompress: unsafe extern "C" fn(
        Pointers,
        Sizes,
        Sizes,
        *mut usize,
        usize,
        *mut c_void,
        usize,
        Targets,
        D,
        *mut Status,
        Stream,
    ) -> Status,
}

impl<C: Copy, D: Copy> Api<C, D> {
    /// Finds the functions of `format` in the library.
    ///
    /// # Safety
    /// - The library is nvCOMP of the major version that this crate is for, and stays open;
    /// - `C` and `D` are the options of `format`.
    pub(crate) unsafe fn load(
        library: &Library,
        path: &Path,
        format: &'static str,
    ) -> Result<Self> {
        macro_rules! find {
            ($suffix:literal) => {
                // SAFETY: the types of the fields are those of the functions of this version.
                unsafe { symbol(library, path, &format!("nvcompBatched{format}{}", $suffix))? }
            };
        }
        Ok(Self {
            format,
            compress_alignments: find!("CompressGetRequiredAlignments"),
            compress_scratch: find!("CompressGetTempSize"),
            max_compressed: find!("CompressGetMaxOutputChunkSize"),
            compress: find!("CompressAsync"),
            decompress_alignments: find!("DecompressGetRequiredAlignments"),
            decompress_scratch: find!("DecompressGetTempSize"),
            decompress: find!("DecompressAsync"),
        })
    }

    /// The format's name, as the library spells it.
    pub fn format(&self) -> &'static str {
        self.format
    }

    fn check(&self, call: &'static str, status: Status) -> Result<()> {
        match status {
            Status::SUCCESS => Ok(()),
            status => Err(Error::Call { format: self.format, call, status }),
        }
    }

    /// The alignments that compressing needs.
    ///
    /// # Errors
    /// `Call` if the options are not supported.
    pub fn compress_alignments(&self, options: C) -> Result<Alignments> {
        let mut answer = Alignments::default();
        // SAFETY: `load` was given the right types; the answer is written to a local variable.
        let status = unsafe { (self.compress_alignments)(options, &raw mut answer) };
        self.check("compression alignments", status).map(|()| answer)
    }

    /// The alignments that decompressing needs.
    ///
    /// # Errors
    /// `Call` if the options are not supported.
    pub fn decompress_alignments(&self, options: D) -> Result<Alignments> {
        let mut answer = Alignments::default();
        // SAFETY: `load` was given the right types; the answer is written to a local variable.
        let status = unsafe { (self.decompress_alignments)(options, &raw mut answer) };
        self.check("decompression alignments", status).map(|()| answer)
    }

    /// The most bytes that a block of `block` bytes can take once compressed.
    ///
    /// # Errors
    /// `Call` if the options are not supported or the block is too long.
    pub fn max_compressed(&self, block: usize, options: C) -> Result<usize> {
        let mut answer = 0;
        // SAFETY: `load` was given the right types; the answer is written to a local variable.
        let status = unsafe { (self.max_compressed)(block, options, &raw mut answer) };
        self.check("maximum compressed size", status).map(|()| answer)
    }

    /// Bytes of scratch memory that compressing such a batch needs. `stream` is a stream of the
    /// device that will do the work; nothing is enqueued on it. Some formats need a device to
    /// answer.
    ///
    /// # Errors
    /// `Call` if the options are not supported or the batch is too large.
    pub fn compress_scratch(&self, shape: Shape, options: C, stream: u64) -> Result<usize> {
        let mut answer = 0;
        let Shape { blocks, max_block, total } = shape;
        let stream = address(stream as usize);
        // SAFETY: `load` was given the right types; the answer is written to a local variable. The
        // library uses the stream to find its device, if at all.
        let status = unsafe {
            (self.compress_scratch)(blocks, max_block, options, &raw mut answer, total, stream)
        };
        self.check("compression scratch size", status).map(|()| answer)
    }

    /// Bytes of scratch memory that decompressing such a batch needs; otherwise as
    /// [`Self::compress_scratch`].
    ///
    /// # Errors
    /// `Call` if the options are not supported or the batch is too large.
    pub fn decompress_scratch(&self, shape: Shape, options: D, stream: u64) -> Result<usize> {
        let mut answer = 0;
        let Shape { blocks, max_block, total } = shape;
        let stream = address(stream as usize);
        // SAFETY: as for `compress_scratch`.
        let status = unsafe {
            (self.decompress_scratch)(blocks, max_block, options, &raw mut answer, total, stream)
        };
        self.check("decompression scratch size", status).map(|()| answer)
    }

    /// Enqueues the compression of a batch on `stream`, a `CUstream`. Once the stream is done, the
    /// statuses hold the outcome of each block.
    ///
    /// # Errors
    /// `Call` if the arguments are refused or the work cannot be enqueued.
    ///
    /// # Safety
    /// - `stream` belongs to the context that is current on this thread;
    /// - the arrays have `shape.blocks` entries each, and what they point to is as described in
    ///   [`Compress`] and aligned as [`Self::compress_alignments`] requires;
    /// - no block is longer than `shape.max_block`;
    /// - all of it stays valid, and what is written is not touched, until the stream is done.
    pub unsafe fn compress(
        &self,
        shape: Shape,
        batch: Compress,
        options: C,
        stream: u64,
    ) -> Result<()> {
        // SAFETY: the caller upholds this function's contract.
        let status = unsafe {
            (self.compress)(
                address::<*const c_void>(batch.inputs as usize),
                address(batch.input_sizes as usize),
                shape.max_block,
                shape.blocks,
                address(batch.scratch as usize),
                batch.scratch_bytes,
                address::<*mut c_void>(batch.outputs as usize),
                address(batch.output_sizes as usize),
                options,
                address(batch.statuses as usize),
                address(stream as usize),
            )
        };
        self.check("compress", status)
    }

    /// Enqueues the decompression of a batch on `stream`, a `CUstream`. Once the stream is done,
    /// the statuses hold the outcome of each block.
    ///
    /// # Errors
    /// `Call` if the arguments are refused or the work cannot be enqueued.
    ///
    /// # Safety
    /// - `stream` belongs to the context that is current on this thread;
    /// - the arrays have `blocks` entries each, and what they point to is as described in
    ///   [`Decompress`] and aligned as [`Self::decompress_alignments`] requires;
    /// - **the blocks are streams that this format's compressor wrote**: on anything else most formats
    ///   of the library may read and write anywhere in device memory;
    /// - all of it stays valid, and what is written is not touched, until the stream is done.
    pub unsafe fn decompress(
        &self,
        blocks: usize,
        batch: Decompress,
        options: D,
        stream: u64,
    ) -> Result<()> {
        // SAFETY: the caller upholds this function's contract.
        let status = unsafe {
            (self.decompress)(
                address::<*const c_void>(batch.inputs as usize),
                address(batch.input_sizes as usize),
                address(batch.output_capacities as usize),
                address(batch.output_sizes as usize),
                blocks,
                address(batch.scratch as usize),
                batch.scratch_bytes,
                address::<*mut c_void>(batch.outputs as usize),
                options,
                address(batch.statuses as usize),
                address(stream as usize),
            )
        };
        self.check("decompress", status)
    }
}

/// Looks up a function of the library.
///
/// # Safety
/// `T` is a function pointer of the function's type.
pub(crate) unsafe fn symbol<T: Copy>(library: &Library, path: &Path, name: &str) -> Result<T> {
    // SAFETY: the caller vouches for `T`. The library is never closed, so the pointer stays valid.
    let found = unsafe { library.get::<T>(name) };
    found.map(|symbol| *symbol).map_err(|error| Error::Symbol {
        path: path.to_owned(),
        symbol: name.to_owned(),
        reason: error.to_string(),
    })
}
