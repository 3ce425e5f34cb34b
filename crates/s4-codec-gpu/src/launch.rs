//! Launches kernels on a stream.

use std::ffi::c_void;
use std::iter;

use cudarc::driver::{result, sys};

use crate::abi::{Route, threads};
use crate::device::Stream;
use crate::error::{On, Result};

/// A batch of chunks to encode, in device memory.
#[derive(Debug, Clone, Copy)]
pub struct EncodeBatch {
    /// Address of the [`EncodeChunk`](crate::abi::EncodeChunk)s, sorted by route.
    pub chunks: u64,
    /// Address of as many [`EncodeResult`](crate::abi::EncodeResult)s.
    pub results: u64,
    /// Address of a `u64` that becomes the bytes of `frames` in use.
    pub total: u64,
    /// Address of the frames, a multiple of 16.
    pub frames: u64,
    /// Bytes there: the sum of the chunks' bytes, each rounded up to 16, is always enough.
    pub capacity: u64,
    /// Chunks of each [`Route`], in the order of routes.
    pub routes: [u32; 6],
}

/// A batch of chunks to decode, in device memory.
#[derive(Debug, Clone, Copy)]
pub struct DecodeBatch {
    /// Address of the [`DecodeChunk`](crate::abi::DecodeChunk)s, sorted by route.
    pub chunks: u64,
    /// Address of a `u32` for each: its [`status`](crate::abi::status).
    pub status: u64,
    /// Chunks of each [`Route`] up to [`Route::Update`], in the order of routes.
    pub routes: [u32; 5],
}

const ROUTES: [Route; 6] = [
    Route::Fused2,
    Route::Fused4,
    Route::Composed,
    Route::Predicted,
    Route::Update,
    Route::Residual,
];

/// Bytes of a chunk's descriptor, and of its result.
const ENCODE: (u64, u64) =
    (size_of::<crate::abi::EncodeChunk>() as u64, size_of::<crate::abi::EncodeResult>() as u64);
const DECODE: (u64, u64) = (size_of::<crate::abi::DecodeChunk>() as u64, 4);

impl Stream {
    /// Queues the encoding of a batch. Kernels of its further routes run on the streams `beside`, as far as there are
    /// some: a chunk takes as long alone as with others. What is queued here later waits for all of them.
    ///
    /// # Safety
    /// All addresses, those within the chunks included, are memory of this device of the sizes that
    /// `kernels/abi.h` asks for, and nothing else uses what is written until the work is done. `beside` are streams of
    /// this device; after an error, work may be left on them that this stream does not wait for.
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn encode(&self, batch: &EncodeBatch, beside: &[Self]) -> Result<()> {
        let k = *self.device().kernels()?;
        let count: u32 = batch.routes.iter().sum();
        if count == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe {
            self.encode_streams(batch, beside)?;
            let mut args = [batch.results, count.into(), batch.total];
            self.launch(k.frame_offsets, 1, threads::OFFSETS, &mut args)?;
            self.each_route(beside, &batch.routes, ENCODE, |stream, route, n, (c, r)| {
                let (at, threads) = (route as usize, route_threads(route));
                let [w2, w4] = k.gather_fused;
                let f = *[w2, w4].get(at).unwrap_or(&k.gather_composed);
                let (c, r) = (batch.chunks + c, batch.results + r);
                stream.launch(f, n, threads, &mut [c, r, batch.frames, batch.capacity])
            })?;
            let mut args = [batch.chunks, batch.results, batch.frames, batch.capacity];
            self.launch(k.encode_crcs, 2 * count, threads::CRC, &mut args)
        }
    }

    /// Queues only the first step of [`Stream::encode`], which leaves each chunk's streams in its
    /// scratch memory: for benchmarks.
    ///
    /// # Safety
    /// As [`Stream::encode`].
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn encode_streams(&self, batch: &EncodeBatch, beside: &[Self]) -> Result<()> {
        let k = *self.device().kernels()?;
        // SAFETY: the caller's promise.
        unsafe {
            self.each_route(beside, &batch.routes, ENCODE, |stream, route, n, (c, r)| {
                let (at, threads) = (route as usize, route_threads(route));
                let [w2, w4] = k.encode_fused;
                let (predicted, update) = (k.encode_predicted, k.encode_update);
                let f = [w2, w4, k.encode_composed, predicted, update, k.encode_residual][at];
                stream.launch(f, n, threads, &mut [batch.chunks + c, batch.results + r])
            })
        }
    }

    /// Queues the decoding of a batch, with all its checks; `beside` as for [`Stream::encode`].
    ///
    /// # Safety
    /// As [`Stream::encode`].
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn decode(&self, batch: &DecodeBatch, beside: &[Self]) -> Result<()> {
        let k = *self.device().kernels()?;
        let count: u32 = batch.routes.iter().sum();
        if count == 0 {
            return Ok(());
        }
        let mut all = [batch.chunks, batch.status];
        // SAFETY: the caller's promise.
        unsafe {
            self.launch(k.check_frames, count, threads::CRC, &mut all)?;
            self.decode_streams(batch, beside)?;
            self.launch(k.check_values, count, threads::CRC, &mut all)
        }
    }

    /// Queues the decoding of a batch without comparing checksums: for benchmarks. Chunks whose
    /// status is nonzero already are skipped.
    ///
    /// # Safety
    /// As [`Stream::encode`].
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn decode_streams(&self, batch: &DecodeBatch, beside: &[Self]) -> Result<()> {
        let k = *self.device().kernels()?;
        // SAFETY: the caller's promise.
        unsafe {
            self.each_route(beside, &batch.routes, DECODE, |stream, route, n, (c, s)| {
                let (at, threads) = (route as usize, route_threads(route));
                let [w2, w4] = k.decode_fused;
                let f = [w2, w4, k.decode_composed, k.decode_predicted, k.decode_update][at];
                stream.launch(f, n, threads, &mut [batch.chunks + c, batch.status + s])
            })
        }
    }

    /// Queues copies from device memory to device memory, each of any alignment: `count`
    /// [`CopySpan`](crate::abi::CopySpan)s at `spans`.
    ///
    /// # Safety
    /// The spans lie in memory of this device, as do the bytes that they name; no destination
    /// overlaps anything else that is copied.
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn copy_spans(&self, spans: u64, count: u32) -> Result<()> {
        let k = self.device().kernels()?;
        // SAFETY: the caller's promise.
        unsafe { self.launch(k.copy_spans, count, threads::COPY, &mut [spans]) }
    }

    /// As [`Stream::copy_spans`], for `count` [`CopyRows`](crate::abi::CopyRows) at `rows`.
    ///
    /// # Safety
    /// As [`Stream::copy_spans`].
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn copy_rows(&self, rows: u64, count: u32) -> Result<()> {
        let k = self.device().kernels()?;
        // SAFETY: the caller's promise.
        unsafe { self.launch(k.copy_rows, count, threads::COPY, &mut [rows]) }
    }

    /// Queues the CRC-32C of each of `count` [`CrcSpan`](crate::abi::CrcSpan)s at `spans` into as
    /// many `u32`s at `crcs`.
    ///
    /// # Safety
    /// As [`Stream::copy_spans`].
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn crc_spans(&self, spans: u64, count: u32, crcs: u64) -> Result<()> {
        let k = self.device().kernels()?;
        // SAFETY: the caller's promise.
        unsafe { self.launch(k.crc_spans, count, threads::CRC, &mut [spans, crcs]) }
    }

    /// Calls `run` for each route that has chunks, with their number and the offsets of the first one in the two lists,
    /// and with a stream: in turn this one and those `beside`, which start after what was queued here and which this
    /// one then waits for.
    fn each_route(
        &self,
        beside: &[Self],
        routes: &[u32],
        (chunk, result): (u64, u64),
        mut run: impl FnMut(&Self, Route, u32, (u64, u64)) -> Result<()>,
    ) -> Result<()> {
        let further = routes.iter().filter(|n| **n > 0).count().saturating_sub(1);
        let beside = &beside[..further.min(beside.len())];
        beside.iter().try_for_each(|stream| stream.wait_for(self))?;
        let mut streams = iter::once(self).chain(beside).cycle();
        let mut before = 0u64;
        for (route, &n) in ROUTES.into_iter().zip(routes) {
            if n > 0 {
                let stream = streams.next().unwrap_or(self);
                run(stream, route, n, (before * chunk, before * result))?;
            }
            before += u64::from(n);
        }
        beside.iter().try_for_each(|stream| self.wait_for(stream))
    }

    /// Launches a kernel. Every parameter is passed as 8 bytes: for an integer of 4 bytes the
    /// driver takes the first four, which hold its value on little-endian machines.
    ///
    /// # Safety
    /// `args` are the kernel's parameters.
    pub(crate) unsafe fn launch(
        &self,
        f: sys::CUfunction,
        grid: u32,
        block: u32,
        args: &mut [u64],
    ) -> Result<()> {
        if grid == 0 {
            return Ok(());
        }
        let _current = self.device().enter()?;
        let mut params: [*mut c_void; 5] = [std::ptr::null_mut(); 5];
        for (param, arg) in params.iter_mut().zip(args.iter_mut()) {
            *param = (&raw mut *arg).cast();
        }
        let (grid, block) = ((grid, 1, 1), (block, 1, 1));
        let count = args.len().min(params.len());
        // SAFETY: the caller's promise; the driver copies the parameters before it returns.
        let done = unsafe {
            result::launch_kernel(f, grid, block, 0, self.handle(), &mut params[..count])
        };
        done.on(self.device().ordinal(), "launch a kernel")
    }
}

/// Threads of a block of a route's kernels.
fn route_threads(route: Route) -> u32 {
    match route {
        Route::Fused2 => threads::FUSED2,
        Route::Fused4 => threads::FUSED4,
        Route::Composed | Route::Predicted | Route::Update | Route::Residual => threads::COMPOSED,
    }
}
