//! Chunks whose planes a library codes in blocks: the steps of `kernels/blocks.cuh` before and after that.

use bytemuck::{Pod, Zeroable};

use crate::abi::{self, MAX_PLANES, threads};
use crate::device::Stream;
use crate::error::Result;
use crate::launch::DecodeBatch;

/// A plane of a chunk, coded by a library. All zero: it was not.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct CodedPlane {
    /// Address where its first block was put, a multiple of 16.
    pub slots: u64,
    /// Address of a `u64` for each block: its coded bytes.
    pub sizes: u64,
    /// Address of a `u32` for each block: 0 if it was coded.
    pub statuses: u64,
    /// Bytes from one block's place to the next, a multiple of 16.
    pub slot: u32,
    /// Number of blocks.
    pub blocks: u32,
    /// Id of the codec.
    pub codec: u8,
    /// Its parameter.
    pub param: u8,
    /// Zero.
    pub reserved: [u8; 6],
}

const _: () = assert!(size_of::<CodedPlane>() == 40);

/// Threads of a block of `s4_place_streams`.
const PLACE: u32 = 128;

/// Bytes of scratch that splitting a chunk of `n` values of `width` bytes takes: all its planes, each at a
/// multiple of 16, in order.
pub const fn split_scratch(n: u64, width: u64) -> u64 {
    abi::planes_bytes(n, width)
}

/// A batch of chunks whose planes are coded in blocks, in device memory.
#[derive(Debug, Clone, Copy)]
pub struct CodedBatch {
    /// Address of the [`EncodeChunk`](abi::EncodeChunk)s; each has [`split_scratch`] bytes of scratch.
    pub chunks: u64,
    /// Address of as many [`EncodeResult`](abi::EncodeResult)s.
    pub results: u64,
    /// Address of [`MAX_PLANES`] [`CodedPlane`]s for each chunk.
    pub planes: u64,
    /// Address of a `u64` that becomes the bytes of `frames` in use.
    pub total: u64,
    /// Address of the frames, a multiple of 16.
    pub frames: u64,
    /// Bytes there: the sum of the chunks' bytes, each rounded up to 16, is always enough.
    pub capacity: u64,
    /// Number of chunks.
    pub count: u32,
}

impl CodedBatch {
    /// Bytes of descriptors of one chunk's planes.
    pub const PLANES: u64 = (MAX_PLANES * size_of::<CodedPlane>()) as u64;
}

impl Stream {
    /// Queues splitting the values of a batch into planes for a library's codecs. Only `chunks`,
    /// `results` and `count` of the batch are used.
    ///
    /// # Safety
    /// As [`Stream::encode`]; the sizes are those that `kernels/blocks.cuh` asks for.
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn split_planes(&self, batch: &CodedBatch) -> Result<()> {
        let k = *self.device().kernels()?;
        let mut args = [batch.chunks, batch.results];
        // SAFETY: the caller's promise.
        unsafe { self.launch(k.split_planes, batch.count, threads::COMPOSED, &mut args) }
    }

    /// Queues building frames, with their checksums, from planes that were split and from the
    /// library's output.
    ///
    /// # Safety
    /// As [`Stream::split_planes`].
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn frame_planes(&self, batch: &CodedBatch) -> Result<()> {
        let CodedBatch { chunks, results, planes, total, frames, capacity, count } = *batch;
        let k = *self.device().kernels()?;
        if count == 0 {
            return Ok(());
        }
        let place = &mut [chunks, results, planes, count.into()];
        let gather = &mut [chunks, results, planes, frames, capacity];
        // SAFETY: the caller's promise.
        unsafe {
            self.launch(k.place_streams, count.div_ceil(PLACE), PLACE, place)?;
            self.launch(k.frame_offsets, 1, threads::OFFSETS, &mut [results, count.into(), total])?;
            self.launch(k.gather_planes, count, threads::COMPOSED, gather)?;
            let crcs = &mut [chunks, results, frames, capacity];
            self.launch(k.encode_crcs, 2 * count, threads::CRC, crcs)
        }
    }

    /// Queues only the check of frames: `count` [`DecodeChunk`](abi::DecodeChunk)s at `chunks`,
    /// with the results in as many `u32`s at `status`.
    ///
    /// # Safety
    /// As [`Stream::encode`].
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn check_frames(&self, chunks: u64, status: u64, count: u32) -> Result<()> {
        let k = *self.device().kernels()?;
        // SAFETY: the caller's promise.
        unsafe { self.launch(k.check_frames, count, threads::CRC, &mut [chunks, status]) }
    }

    /// Queues the decoding of a batch whose frames the caller has checked, and the check of its
    /// values. Chunks whose status is nonzero already are skipped.
    ///
    /// # Safety
    /// As [`Stream::encode`].
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn decode_checked(&self, batch: &DecodeBatch) -> Result<()> {
        let k = *self.device().kernels()?;
        let count = batch.routes.iter().sum();
        // SAFETY: the caller's promise.
        unsafe {
            self.decode_streams(batch, &[])?;
            self.launch(k.check_values, count, threads::CRC, &mut [batch.chunks, batch.status])
        }
    }
}
