//! The device, its memory and its clock.

use std::sync::Arc;

use s4_codec_gpu::{Cuda, Device, DeviceBuffer, Event, Pinned, Pool, Stream};
use s4_engine::cuda::{CudaOptions, DeviceMemory};

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Rounds of each measurement, after one that is not counted; the median counts.
pub(crate) const ROUNDS: usize = 7;

/// Bytes that are filled before each measurement of queued work: more than caches hold, and enough to
/// keep the device busy while the host queues the measured work.
const COLD: u64 = 256 << 20;

/// Bytes of a copy to or from pinned memory.
pub(crate) const PIECE: usize = 32 << 20;

pub(crate) struct Lab {
    pub(crate) cuda: Cuda,
    pub(crate) device: Arc<Device>,
    pub(crate) stream: Arc<Stream>,
    pub(crate) pool: Arc<Pool>,
    /// Those of the engines whose whole paths are measured.
    pub(crate) options: CudaOptions,
}

impl Lab {
    pub(crate) fn new(options: CudaOptions) -> Outcome<Self> {
        let cuda = Cuda::discover()?;
        let device = cuda.device(0)?;
        let stream = Arc::new(Stream::new(&device)?);
        let pool = Pool::new(&device, u64::MAX);
        Ok(Self { cuda, device, stream, pool, options })
    }

    pub(crate) fn machine(&self) -> String {
        let (major, minor) = self.cuda.version();
        format!("{}, driver of CUDA {major}.{minor}", self.device.info().name)
    }

    pub(crate) fn alloc(&self, bytes: u64) -> Outcome<DeviceBuffer> {
        Ok(self.pool.alloc(&self.stream, bytes.max(16), "a benchmark")?)
    }

    pub(crate) fn memory(&self, buffer: &DeviceBuffer) -> DeviceMemory {
        let (at, bytes) = (buffer.address(), buffer.bytes());
        // SAFETY: buffers outlive the calls that use them, and only one such call runs at a time.
        unsafe { DeviceMemory::new(self.device.ordinal(), at, bytes, 0) }
    }

    /// Copies bytes to the device.
    pub(crate) fn upload(&self, bytes: &[u8]) -> Outcome<DeviceBuffer> {
        self.fill(bytes, bytes.len() as u64)
    }

    /// Repeats a tile over `bytes` bytes of device memory.
    pub(crate) fn fill(&self, tile: &[u8], bytes: u64) -> Outcome<DeviceBuffer> {
        let buffer = self.alloc(bytes)?;
        let pinned = Pinned::new(&self.device, tile.len())?;
        // SAFETY: only this call uses the memory, and it waits for the copies.
        unsafe {
            pinned.slice_mut(0, tile.len()).copy_from_slice(tile);
            for at in (0..bytes).step_by(tile.len().max(1)) {
                let len = (bytes - at).min(tile.len() as u64) as usize;
                self.stream.copy_to_device(&pinned, 0, len, buffer.address() + at)?;
            }
        }
        self.stream.synchronize()?;
        Ok(buffer)
    }

    /// The first `len` bytes of device memory.
    pub(crate) fn download(&self, buffer: &DeviceBuffer, len: usize) -> Outcome<Vec<u8>> {
        let pinned = Pinned::new(&self.device, len)?;
        // SAFETY: as above.
        unsafe {
            self.stream.copy_to_host(buffer.address(), &pinned, 0, len)?;
            self.stream.synchronize()?;
            Ok(pinned.slice(0, len).to_vec())
        }
    }

    /// Whether device memory holds only repetitions of a tile.
    pub(crate) fn holds(&self, buffer: &DeviceBuffer, tile: &[u8]) -> Outcome<bool> {
        let piece = (PIECE / tile.len()).max(1) * tile.len();
        let pinned = Pinned::new(&self.device, piece)?;
        for at in (0..buffer.bytes()).step_by(piece) {
            let len = (buffer.bytes() - at).min(piece as u64) as usize;
            // SAFETY: as above.
            let bytes = unsafe {
                self.stream.copy_to_host(buffer.address() + at, &pinned, 0, len)?;
                self.stream.synchronize()?;
                pinned.slice(0, len)
            };
            if bytes.chunks(tile.len()).any(|part| part != &tile[..part.len()]) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Median seconds that queued work takes on the device, by device events. The work starts with cold
    /// caches. It is queued behind other work, so that the time that the host takes to queue it is not
    /// counted.
    pub(crate) fn time(&self, mut work: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
        let (start, stop) = (Event::timed(&self.device)?, Event::timed(&self.device)?);
        let cold = self.alloc(COLD)?;
        let mut times = vec![];
        for round in 0..=ROUNDS {
            // SAFETY: only this call uses the memory.
            unsafe { self.stream.fill(cold.address(), 0, cold.bytes())? };
            start.record(&self.stream)?;
            work()?;
            stop.record(&self.stream)?;
            stop.synchronize()?;
            if round > 0 {
                times.push(f64::from(stop.since(&start)?) / 1e3);
            }
        }
        Ok(median(times))
    }
}

pub(crate) fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
