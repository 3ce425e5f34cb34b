//! A device for tests, as a framework would have it.
#![allow(
    clippy::allow_attributes,
    dead_code,
    unreachable_pub,
    reason = "each test uses its own part"
)]

use std::sync::Arc;

use s4_codec_gpu::{Cuda, Device, DeviceBuffer, Pinned, Pool, Stream};
use s4weights::WriteOptions;
use s4weights::cuda::{CudaEngine, CudaOptions, DeviceMemory};

/// A device, for memory of the test's own.
pub struct Gpu {
    pub device: Arc<Device>,
    pub stream: Arc<Stream>,
    pub pool: Arc<Pool>,
    pub engine: Arc<CudaEngine>,
}

/// Whether a missing GPU is a failure.
pub fn is_required() -> bool {
    std::env::var("S4_REQUIRE_GPU").is_ok_and(|v| v == "1")
}

/// A device; `None` where there is none and none is required.
pub fn gpu() -> Option<Gpu> {
    let cuda = match Cuda::discover() {
        Ok(cuda) => cuda,
        Err(e) => {
            assert!(!is_required(), "a GPU is required: {e}");
            println!("skipped: no CUDA device");
            return None;
        }
    };
    let device = cuda.device(0).expect("opens");
    let stream = Arc::new(Stream::new(&device).unwrap());
    let pool = Pool::new(&device, 4 << 30);
    let engine = Arc::new(CudaEngine::new(cuda, CudaOptions::default()));
    Some(Gpu { device, stream, pool, engine })
}

impl Gpu {
    /// The same options, with the device's engine, so that its tensors can be written, too.
    pub fn with(&self, options: WriteOptions) -> WriteOptions {
        WriteOptions { engine: Some(self.engine.clone()), ..options }
    }

    /// Whether kernels are emulated: then tests use less data.
    pub fn is_slow(&self) -> bool {
        self.device.info().name == "emulated"
    }

    pub fn upload(&self, bytes: &[u8]) -> DeviceBuffer {
        let buffer = self.pool.alloc(&self.stream, bytes.len() as u64, "a test").unwrap();
        let pinned = Pinned::new(&self.device, bytes.len()).unwrap();
        // SAFETY: only this test uses the memory, and waits for the copy.
        unsafe {
            pinned.slice_mut(0, bytes.len()).copy_from_slice(bytes);
            self.stream.copy_to_device(&pinned, 0, bytes.len(), buffer.address()).unwrap();
        }
        self.stream.synchronize().unwrap();
        buffer
    }

    pub fn download(&self, buffer: &DeviceBuffer) -> Vec<u8> {
        let len = buffer.bytes() as usize;
        let pinned = Pinned::new(&self.device, len).unwrap();
        // SAFETY: as above.
        unsafe {
            self.stream.copy_to_host(buffer.address(), &pinned, 0, len).unwrap();
            self.stream.synchronize().unwrap();
            pinned.slice(0, len).to_vec()
        }
    }
}

pub fn memory(buffer: &DeviceBuffer) -> DeviceMemory {
    // SAFETY: the buffers live longer than the calls they are passed to, and nothing else uses them.
    unsafe { DeviceMemory::new(0, buffer.address(), buffer.bytes(), 0) }
}
