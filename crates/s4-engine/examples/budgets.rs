//! The CUDA engine within budgets: of device memory while a call works, and of pinned memory.
//!
//! The engine cuts tensors of any size into groups of chunks that fit. Without a device the example says so
//! and ends.

use std::sync::Arc;

use s4_codec_gpu::{Pinned, Pool, Stream};
use s4_engine::cuda::{Cuda, CudaEngine, CudaError, CudaOptions, DeviceMemory};
use s4_engine::{Engine, Jobs, NoInputs, Preset, TensorValues};
use s4_format::DType;

const MIB: u64 = 1 << 20;

fn main() -> Result<(), CudaError> {
    let cuda = match Cuda::discover() {
        Ok(cuda) => cuda,
        Err(e) => {
            println!("no CUDA device: {e}");
            return Ok(());
        }
    };
    let device = cuda.device(0)?;
    let options = CudaOptions { scratch: 64 * MIB, pinned: 48 * MIB, ..CudaOptions::default() };
    let engine = CudaEngine::new(cuda, options);

    // A framework has its tensors in device memory already; here some are put there.
    let values: Vec<u8> =
        (0..4 * MIB as u32).flat_map(|i| (i as f32).sqrt().to_le_bytes()).collect();
    let stream = Arc::new(Stream::new(&device)?);
    let buffer = Pool::new(&device, u64::MAX).alloc(&stream, values.len() as u64, "the tensor")?;
    let pinned = Pinned::new(&device, values.len())?;
    // SAFETY: nothing else uses either memory, and the copy is waited for.
    unsafe {
        pinned.slice_mut(0, values.len()).copy_from_slice(&values);
        stream.copy_to_device(&pinned, 0, values.len(), buffer.address())?;
    }
    stream.synchronize()?;
    // SAFETY: the buffer lives until the end of this function, and nothing else writes it.
    let memory = unsafe { DeviceMemory::new(0, buffer.address(), buffer.bytes(), 0) };

    let shape = &[4 * MIB];
    let tensors = [TensorValues::new(DType::Float32, shape, memory)];
    let plans = engine.plan::<CudaError>(Preset::Fast, &tensors, &NoInputs, None)?;
    let (mut chunks, mut bytes) = (0, 0);
    engine.encode(&Jobs::<CudaError>::new(&tensors, &plans), |frames| {
        for frame in frames {
            // A frame lies in pinned memory that is reused: to keep it, copy or write it here.
            (chunks, bytes) = (chunks + 1, bytes + frame.bytes.len());
        }
        Ok(())
    })?;
    let most = engine.scratch_high_water(0);
    println!(
        "{} bytes became {bytes} in {chunks} chunks; at most {} MiB of scratch were held",
        values.len(),
        most / MIB
    );
    // 2^16 values each.
    assert_eq!(chunks, 64);
    Ok(())
}

#[test]
fn it_runs() -> Result<(), CudaError> {
    main()
}
