//! A device, its memory, and batches of blocks on it, kept simple: every copy waits.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use s4_codec_gpu::nvcomp::{
    Alignments, Compress, Decompress, GpuCodec, Needs, Nvcomp, Search, Shape, Status,
};

/// A GPU and the library.
pub(crate) struct Device {
    stream: Arc<CudaStream>,
    pub(crate) library: Arc<Nvcomp>,
}

/// Memory of the device, freed at the end.
struct Memory {
    address: u64,
    len: usize,
}

impl Memory {
    /// Memory that holds no zeros.
    fn new(len: usize) -> Self {
        // SAFETY: a context is current: `Device::find` bound one to this thread.
        let address = unsafe { result::malloc_sync(len.max(16)) }.expect("device memory");
        // SAFETY: the memory was just allocated.
        unsafe { result::memset_d8_sync(address, 0xa5, len.max(16)) }.expect("fills");
        Self { address, len }
    }

    fn of<T: Copy>(data: &[T]) -> Self {
        let memory = Self::new(size_of_val(data));
        if !data.is_empty() {
            // SAFETY: the memory is as large as the data.
            unsafe { result::memcpy_htod_sync(memory.address, data) }.expect("copies");
        }
        memory
    }

    fn read<T: Copy + Default>(&self, count: usize) -> Vec<T> {
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

/// The outcome of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) blocks: Vec<Vec<u8>>,
    pub(crate) statuses: Vec<Status>,
}

impl Device {
    /// A GPU with nvCOMP; `None` if there is none, unless `S4_REQUIRE_GPU` is 1.
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

    fn stream(&self) -> u64 {
        self.stream.cu_stream() as u64
    }

    /// Encodes blocks.
    pub(crate) fn encode(&self, codec: &dyn GpuCodec, blocks: &[&[u8]]) -> Outcome {
        let sizes: Vec<u64> = blocks.iter().map(|b| b.len() as u64).collect();
        let shape = shape(&sizes);
        let room = codec.bound(shape.max_block).expect("a bound");
        let needs = codec.encode_needs(shape, self.stream()).expect("known needs");
        check(&needs);
        let inputs = Places::of(blocks);
        let outputs = Places::new(&vec![room; sizes.len()]);
        let scratch = Memory::new(needs.scratch);
        let (sizes, answers) = (Memory::of(&sizes), Memory::new(8 * sizes.len()));
        let statuses = Memory::new(4 * blocks.len());
        let batch = Compress {
            inputs: inputs.addresses.address,
            input_sizes: sizes.address,
            outputs: outputs.addresses.address,
            output_sizes: answers.address,
            scratch: scratch.address,
            scratch_bytes: needs.scratch,
            statuses: statuses.address,
        };
        // SAFETY: everything is as large as the batch says, and stays until the stream is done.
        unsafe { codec.encode(shape, batch, self.stream()) }.expect("enqueues");
        self.outcome(&outputs, &answers, &statuses)
    }

    /// Decodes blocks into `lens` bytes each.
    pub(crate) fn decode(
        &self,
        codec: &dyn GpuCodec,
        coded: &[Vec<u8>],
        lens: &[usize],
    ) -> Outcome {
        assert_eq!(coded.len(), lens.len());
        let sizes: Vec<u64> = lens.iter().map(|len| *len as u64).collect();
        let shape = shape(&sizes);
        let needs = codec.decode_needs(shape, self.stream()).expect("known needs");
        check(&needs);
        let coded_sizes: Vec<u64> = coded.iter().map(|b| b.len() as u64).collect();
        let coded: Vec<&[u8]> = coded.iter().map(|b| &b[..]).collect();
        let inputs = Places::of(&coded);
        let outputs = Places::new(lens);
        let scratch = Memory::new(needs.scratch);
        let (coded_sizes, capacities) = (Memory::of(&coded_sizes), Memory::of(&sizes));
        let (answers, statuses) = (Memory::new(8 * sizes.len()), Memory::new(4 * sizes.len()));
        let batch = Decompress {
            inputs: inputs.addresses.address,
            input_sizes: coded_sizes.address,
            outputs: outputs.addresses.address,
            output_capacities: capacities.address,
            output_sizes: answers.address,
            scratch: scratch.address,
            scratch_bytes: needs.scratch,
            statuses: statuses.address,
        };
        // SAFETY: everything is as large as the batch says, and stays until the stream is done.
        unsafe { codec.decode(shape, batch, self.stream()) }.expect("enqueues");
        self.outcome(&outputs, &answers, &statuses)
    }

    fn outcome(&self, outputs: &Places, sizes: &Memory, statuses: &Memory) -> Outcome {
        self.stream.synchronize().expect("the stream is done");
        let count = outputs.places.len();
        let statuses: Vec<_> = statuses.read(count).into_iter().map(Status).collect();
        let bytes = outputs.memory.read::<u8>(outputs.memory.len);
        let sizes = sizes.read::<u64>(count);
        let blocks = outputs.places.iter().zip(&sizes).zip(&statuses);
        let blocks = blocks.map(|((place, size), status)| match *status {
            Status::SUCCESS => {
                assert!(*size <= place.len() as u64, "{size} bytes written into {place:?}");
                bytes[place.clone()][..*size as usize].to_vec()
            }
            _ => Vec::new(),
        });
        let blocks = blocks.collect();
        // The bytes between the places are unchanged: nothing was written past a block's end.
        let mut at = 0;
        for place in &outputs.places {
            assert!(bytes[at..place.start].iter().all(|b| *b == 0xa5), "wrote before {place:?}");
            at = place.end;
        }
        assert!(bytes[at..].iter().all(|b| *b == 0xa5), "wrote after the last block");
        Outcome { blocks, statuses }
    }
}

/// Places for blocks, each at a multiple of 16 bytes with at least 16 bytes after it.
struct Places {
    memory: Memory,
    places: Vec<Range<usize>>,
    addresses: Memory,
}

impl Places {
    fn new(lens: &[usize]) -> Self {
        let mut places: Vec<Range<usize>> = Vec::new();
        for len in lens {
            let start = places.last().map_or(0, |last| last.end + 16).next_multiple_of(16);
            places.push(start..start + len);
        }
        let memory = Memory::new(places.last().map_or(0, |last| last.end) + 16);
        let addresses = places.iter().map(|place| memory.address + place.start as u64);
        let addresses = Memory::of(&addresses.collect::<Vec<_>>());
        Self { memory, places, addresses }
    }

    fn of(blocks: &[&[u8]]) -> Self {
        let places = Self::new(&blocks.iter().map(|b| b.len()).collect::<Vec<_>>());
        let mut bytes = vec![0xa5; places.memory.len];
        for (block, place) in blocks.iter().zip(&places.places) {
            bytes[place.clone()].copy_from_slice(block);
        }
        // SAFETY: the memory is as large as the bytes.
        unsafe { result::memcpy_htod_sync(places.memory.address, &bytes) }.expect("copies");
        places
    }
}

fn check(needs: &Needs) {
    let Alignments { input, output, scratch } = needs.alignments;
    assert!([input, output, scratch].iter().all(|a| 16 % a == 0), "{needs:?}");
}

fn shape(sizes: &[u64]) -> Shape {
    Shape {
        blocks: sizes.len(),
        max_block: sizes.iter().max().map_or(0, |size| *size as usize),
        total: sizes.iter().sum::<u64>() as usize,
    }
}
