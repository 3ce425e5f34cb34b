//! A device, its memory, and batches of blocks on it, as plainly as can be: every copy waits.

use std::path::PathBuf;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use s4_codec_gpu::nvcomp::{Compress, Decompress, GpuCodec, Nvcomp, Search, Shape, Status};

/// A GPU and the library.
pub(crate) struct Device {
    stream: Arc<CudaStream>,
    pub(crate) library: Arc<Nvcomp>,
}

/// Memory of the device, freed at the end.
pub(crate) struct Memory {
    pub(crate) address: u64,
    len: usize,
}

impl Memory {
    /// Memory that holds no zeros.
    pub(crate) fn new(len: usize) -> Self {
        // SAFETY: a context is current: `Device::find` bound one to this thread.
        let address = unsafe { result::malloc_sync(len.max(16)) }.expect("device memory");
        // SAFETY: the memory was just allocated.
        unsafe { result::memset_d8_sync(address, 0xa5, len.max(16)) }.expect("fills");
        Self { address, len }
    }

    pub(crate) fn of<T: Copy>(data: &[T]) -> Self {
        let memory = Self::new(size_of_val(data));
        if !data.is_empty() {
            // SAFETY: the memory is as large as the data.
            unsafe { result::memcpy_htod_sync(memory.address, data) }.expect("copies");
        }
        memory
    }

    pub(crate) fn read<T: Copy + Default>(&self, count: usize) -> Vec<T> {
        let mut data = vec![T::default(); count];
        assert!(size_of_val(&data[..]) <= self.len);
        if count > 0 {
            // SAFETY: the memory is at least as large as the data; any bits are valid numbers.
            unsafe { result::memcpy_dtoh_sync(&mut data, self.address) }.expect("copies");
        }
        data
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated by `new` and every use of it has been waited for.
        unsafe { result::free_sync(self.address) }.expect("frees");
    }
}

/// What became of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) blocks: Vec<Vec<u8>>,
    pub(crate) statuses: Vec<Status>,
}

impl Device {
    /// A GPU with nvCOMP; without one `None`, unless `S4_REQUIRE_GPU` is 1.
    pub(crate) fn find() -> Option<Self> {
        match Self::open() {
            Ok(device) => Some(device),
            Err(why) => {
                let required = std::env::var_os("S4_REQUIRE_GPU").is_some_and(|v| v == "1");
                assert!(!required, "S4_REQUIRE_GPU=1, but {why}");
                eprintln!("not run: {why}");
                None
            }
        }
    }

    fn open() -> Result<Self, String> {
        // SAFETY: opens the driver's library, whose initialisers may run.
        if !unsafe { sys::is_culib_present() } {
            return Err("there is no CUDA driver".into());
        }
        let context = CudaContext::new(0).map_err(|e| format!("there is no CUDA device: {e}"))?;
        context.bind_to_thread().expect("binds");
        let stream = context.new_stream().expect("a stream");
        let search = Search::new(None::<PathBuf>);
        // SAFETY: the library that the environment or the system names is meant to be loaded.
        let library = unsafe { Nvcomp::open(&search) }.map_err(|e| e.to_string())?;
        let mut driver = 0;
        // SAFETY: the answer is written to a local variable.
        unsafe { sys::cuDriverGetVersion(&raw mut driver) }.result().expect("a version");
        library.require_driver(driver as u32).map_err(|e| e.to_string())?;
        Ok(Self { stream, library: Arc::new(library) })
    }

    pub(crate) fn stream(&self) -> u64 {
        self.stream.cu_stream() as u64
    }

    pub(crate) fn wait(&self) {
        self.stream.synchronize().expect("the stream is done");
    }

    /// Encodes the blocks of a plane.
    pub(crate) fn encode(&self, codec: &dyn GpuCodec, plane: &[u8]) -> Outcome {
        let sizes: Vec<u64> = plane.chunks(codec.block()).map(|b| b.len() as u64).collect();
        let shape = shape(&sizes);
        let room = codec.bound(shape.max_block).expect("a bound").next_multiple_of(16);
        let needs = codec.encode_needs(shape, self.stream()).expect("known needs");
        let [a, b, c] = [needs.alignments.input, needs.alignments.output, needs.alignments.scratch];
        assert!([a, b, c].iter().all(|a| 16 % a == 0), "{needs:?}");
        let (input, output) = (Memory::of(plane), Memory::new(room * sizes.len()));
        let scratch = Memory::new(needs.scratch);
        let inputs = Memory::of(&addresses(&input, codec.block(), sizes.len()));
        let outputs = Memory::of(&addresses(&output, room, sizes.len()));
        let input_sizes = Memory::of(&sizes);
        let output_sizes = Memory::new(8 * sizes.len());
        let statuses = Memory::new(4 * sizes.len());
        let batch = Compress {
            inputs: inputs.address,
            input_sizes: input_sizes.address,
            outputs: outputs.address,
            output_sizes: output_sizes.address,
            scratch: scratch.address,
            scratch_bytes: needs.scratch,
            statuses: statuses.address,
        };
        // SAFETY: everything is as large as the batch says, and stays until the stream is done.
        unsafe { codec.encode(shape, batch, self.stream()) }.expect("enqueues");
        self.wait();
        let coded = output_sizes.read::<u64>(sizes.len());
        let statuses: Vec<_> = statuses.read(sizes.len()).into_iter().map(Status).collect();
        let all = output.read::<u8>(room * sizes.len());
        let blocks = all
            .chunks(room)
            .zip(&coded)
            .zip(&statuses)
            .map(|((place, size), status)| match *status {
                Status::SUCCESS => place[..*size as usize].to_vec(),
                _ => Vec::new(),
            })
            .collect();
        Outcome { blocks, statuses }
    }

    /// Decodes blocks that are the coded parts of a plane of `len` bytes.
    pub(crate) fn decode(&self, codec: &dyn GpuCodec, blocks: &[Vec<u8>], len: usize) -> Outcome {
        let starts = (0..len).step_by(codec.block());
        let sizes: Vec<u64> = starts.map(|at| codec.block().min(len - at) as u64).collect();
        assert_eq!(sizes.len(), blocks.len());
        let shape = shape(&sizes);
        let needs = codec.decode_needs(shape, self.stream()).expect("known needs");
        let [a, b, c] = [needs.alignments.input, needs.alignments.output, needs.alignments.scratch];
        assert!([a, b, c].iter().all(|a| 16 % a == 0), "{needs:?}");
        // Blocks one after the other, aligned to 16 bytes, as in a stream.
        let (mut stored, mut offsets) = (Vec::new(), Vec::new());
        for block in blocks {
            stored.resize(usize::next_multiple_of(stored.len(), 16), 0);
            offsets.push(stored.len() as u64);
            stored.extend(block);
        }
        let (input, output) = (Memory::of(&stored), Memory::new(len));
        let scratch = Memory::new(needs.scratch);
        let places: Vec<u64> = offsets.iter().map(|offset| input.address + offset).collect();
        let inputs = Memory::of(&places);
        let outputs = Memory::of(&addresses(&output, codec.block(), sizes.len()));
        let coded: Vec<u64> = blocks.iter().map(|b| b.len() as u64).collect();
        let input_sizes = Memory::of(&coded);
        let capacities = Memory::of(&sizes);
        let output_sizes = Memory::new(8 * sizes.len());
        let statuses = Memory::new(4 * sizes.len());
        let batch = Decompress {
            inputs: inputs.address,
            input_sizes: input_sizes.address,
            outputs: outputs.address,
            output_capacities: capacities.address,
            output_sizes: output_sizes.address,
            scratch: scratch.address,
            scratch_bytes: needs.scratch,
            statuses: statuses.address,
        };
        // SAFETY: everything is as large as the batch says, and stays until the stream is done.
        unsafe { codec.decode(shape, batch, self.stream()) }.expect("enqueues");
        self.wait();
        let written = output_sizes.read::<u64>(sizes.len());
        let statuses: Vec<_> = statuses.read(sizes.len()).into_iter().map(Status).collect();
        let all = output.read::<u8>(len);
        let blocks = all
            .chunks(codec.block())
            .zip(&written)
            .zip(&statuses)
            .map(|((place, size), status)| match *status {
                Status::SUCCESS => place[..place.len().min(*size as usize)].to_vec(),
                _ => Vec::new(),
            })
            .collect();
        Outcome { blocks, statuses }
    }
}

fn shape(sizes: &[u64]) -> Shape {
    Shape {
        blocks: sizes.len(),
        max_block: sizes.iter().max().map_or(0, |size| *size as usize),
        total: sizes.iter().sum::<u64>() as usize,
    }
}

/// Addresses of `count` blocks, `step` bytes apart.
fn addresses(memory: &Memory, step: usize, count: usize) -> Vec<u64> {
    (0..count).map(|i| memory.address + (i * step) as u64).collect()
}
