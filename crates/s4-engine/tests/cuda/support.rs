//! A device for tests, data, and the CPU engine's answers.

use std::borrow::Borrow;
use std::sync::{Arc, Mutex, MutexGuard};

use s4_codec_gpu::{Cuda, Device, DeviceBuffer, GpuError, Pinned, Pool, Stream};
use s4_engine::cuda::{CudaEngine, CudaError, CudaOptions, Destination, DeviceMemory, FrameJob};
use s4_engine::{
    CpuEngine, EncodeJob, EncodedChunk, Engine, Jobs, NoInputs, PlanJob, Preset, Scratch,
    TensorPlan, TensorSpec, TensorValues, TensorView,
};
use s4_format::index::chunk_count;
use s4_format::side::Side;
use s4_format::{ChunkRecord, DType};
use s4_planes::patterns::{self, Kind};
use s4_planes::{Simd, Width};

/// Tests take turns, because they check how much is allocated.
static TURN: Mutex<()> = Mutex::new(());

/// A device, as a framework would have it.
pub(crate) struct Gpu {
    pub(crate) cuda: Cuda,
    pub(crate) device: Arc<Device>,
    pub(crate) stream: Arc<Stream>,
    pub(crate) pool: Arc<Pool>,
    _turn: MutexGuard<'static, ()>,
}

/// A device, or `None` where there is none and none is required.
pub(crate) fn gpu() -> Option<Gpu> {
    gpu_of(0)
}

pub(crate) fn gpu_of(ordinal: u32) -> Option<Gpu> {
    let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    let cuda = match Cuda::discover() {
        Ok(cuda) => cuda,
        Err(e) => {
            let required = std::env::var("S4_REQUIRE_GPU").is_ok_and(|v| v == "1");
            assert!(!required, "a GPU is required: {e}");
            println!("skipped: no CUDA device");
            return None;
        }
    };
    if cuda.devices().len() <= ordinal as usize {
        println!("skipped: no CUDA device {ordinal}");
        return None;
    }
    let device = cuda.device(ordinal).expect("opens");
    let stream = Arc::new(Stream::new(&device).unwrap());
    let pool = Pool::new(&device, 16 << 30);
    Some(Gpu { cuda, device, stream, pool, _turn: turn })
}

impl Gpu {
    /// Whether kernels are emulated: then tests keep to less data.
    pub(crate) fn is_slow(&self) -> bool {
        self.device.info().name == "emulated"
    }

    pub(crate) fn engine(&self, options: CudaOptions) -> CudaEngine {
        CudaEngine::new(self.cuda.clone(), options)
    }

    /// Copies bytes to an address that is `skew` above a multiple of 256.
    pub(crate) fn upload(&self, bytes: &[u8], skew: u64) -> Upload {
        let buffer = self.pool.alloc(&self.stream, bytes.len() as u64 + skew, "a test").unwrap();
        let pinned = Pinned::new(&self.device, bytes.len()).unwrap();
        // SAFETY: nothing is in flight on either memory, and the copy is waited for.
        unsafe {
            pinned.slice_mut(0, bytes.len()).copy_from_slice(bytes);
            let to = buffer.address() + skew;
            self.stream.copy_to_device(&pinned, 0, bytes.len(), to).unwrap();
        }
        self.stream.synchronize().unwrap();
        let address = buffer.address() + skew;
        Upload {
            _buffer: buffer,
            address,
            bytes: bytes.len() as u64,
            ordinal: self.device.ordinal(),
        }
    }

    pub(crate) fn download(&self, address: u64, len: u64) -> Vec<u8> {
        let len = usize::try_from(len).unwrap();
        let pinned = Pinned::new(&self.device, len).unwrap();
        // SAFETY: as above.
        unsafe {
            self.stream.copy_to_host(address, &pinned, 0, len).unwrap();
            self.stream.synchronize().unwrap();
            pinned.slice(0, len).to_vec()
        }
    }
}

/// Bytes on the device.
pub(crate) struct Upload {
    _buffer: DeviceBuffer,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    ordinal: u32,
}

impl Upload {
    pub(crate) fn memory(&self) -> DeviceMemory {
        // SAFETY: the buffer lives as long as `self`; nothing else uses it.
        unsafe { DeviceMemory::new(self.ordinal, self.address, self.bytes, 0) }
    }

    /// As [`Upload::memory`]; `fixed`: said not to change.
    pub(crate) fn memory_as(&self, fixed: bool) -> DeviceMemory {
        let memory = self.memory();
        // SAFETY: nothing writes it once it is there.
        if fixed { unsafe { memory.fixed() } } else { memory }
    }
}

/// A tensor of the host.
#[derive(Clone)]
pub(crate) struct Host {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    pub(crate) data: Vec<u8>,
}

impl Host {
    pub(crate) fn new(name: impl Into<String>, dtype: DType, data: Vec<u8>) -> Self {
        let shape = vec![data.len() as u64 / dtype.size() as u64];
        Self { name: name.into(), dtype, shape, data }
    }

    pub(crate) fn view(&self) -> TensorView<'_> {
        TensorView { dtype: self.dtype, shape: &self.shape, data: &self.data }
    }

    pub(crate) fn on<'a>(&'a self, upload: &Upload) -> TensorValues<'a> {
        self.on_as(upload, false)
    }

    pub(crate) fn on_as<'a>(&'a self, upload: &Upload, fixed: bool) -> TensorValues<'a> {
        TensorValues::new(self.dtype, &self.shape, upload.memory_as(fixed))
    }

    pub(crate) fn chunks(&self, plan: &TensorPlan) -> u64 {
        chunk_count((self.data.len() / self.dtype.value_width()) as u64, plan.chunk_log2)
    }

    /// Bytes of the values of a chunk.
    pub(crate) fn chunk_bytes(&self, plan: &TensorPlan, chunk: u64) -> u64 {
        let size = (self.dtype.value_width() as u64) << plan.chunk_log2;
        size.min(self.data.len() as u64 - chunk * size)
    }
}

/// A tensor's chunks.
pub(crate) struct Encoded {
    pub(crate) plan: TensorPlan,
    pub(crate) side: Side,
    pub(crate) chunks: Vec<(EncodedChunk, Vec<u8>)>,
}

impl Encoded {
    pub(crate) fn new(plan: TensorPlan, chunks: Vec<(EncodedChunk, Vec<u8>)>) -> Self {
        let side = plan.side_data(chunks.iter().any(|c| c.0.shared)).unwrap();
        let mut bytes = vec![];
        side.write(&mut bytes).unwrap();
        Self { plan, side: Side::parse(&bytes).unwrap(), chunks }
    }

    pub(crate) fn spec<'a>(&'a self, host: &'a Host) -> TensorSpec<'a> {
        TensorSpec {
            dtype: host.dtype,
            shape: &host.shape,
            plan: &self.plan.plan,
            side: &self.side,
            chunk_log2: self.plan.chunk_log2,
        }
    }

    pub(crate) fn record(&self, chunk: usize) -> ChunkRecord {
        let (e, frame) = &self.chunks[chunk];
        ChunkRecord {
            offset: 0,
            object: 0,
            len: u32::try_from(frame.len()).unwrap(),
            plain: e.plain,
            crc_encoded: e.crc_encoded,
            crc_raw: e.crc_raw,
        }
    }
}

pub(crate) fn on_cpu(host: &Host, plan: Option<TensorPlan>) -> Encoded {
    let cpu = CpuEngine::new(Simd::detect());
    let mut scratch = Scratch::default();
    let view = host.view();
    let plan =
        plan.unwrap_or_else(|| cpu.plan(&PlanJob::new(Preset::Fast, &view), &mut scratch).unwrap());
    let chunk = |chunk| {
        let mut frame = vec![];
        let e = cpu
            .encode(
                &EncodeJob { view: &view, plan: &plan, chunk, inputs: &[] },
                &mut scratch,
                &mut frame,
            )
            .unwrap();
        (e, frame)
    };
    let chunks = (0..host.chunks(&plan)).map(chunk).collect();
    Encoded::new(plan, chunks)
}

/// Encodes tensors on the device, and checks the order of chunks.
pub(crate) fn on_gpu(
    engine: &CudaEngine,
    hosts: &[Host],
    uploads: &[impl Borrow<Upload>],
    plans: Option<Vec<TensorPlan>>,
) -> Result<Vec<Encoded>, CudaError> {
    let tensors: Vec<_> = hosts.iter().zip(uploads).map(|(h, u)| h.on(u.borrow())).collect();
    let plans = match plans {
        Some(plans) => plans,
        None => engine.plan::<CudaError>(Preset::Fast, &tensors, &NoInputs, None)?,
    };
    let mut chunks: Vec<Vec<_>> = hosts.iter().map(|_| vec![]).collect();
    let mut last = None;
    engine.encode(&Jobs::<CudaError>::new(&tensors, &plans), |frames| {
        for frame in frames {
            assert!(last < Some((frame.tensor, frame.chunk)), "chunks are out of order");
            last = Some((frame.tensor, frame.chunk));
            assert_eq!(frame.chunk, chunks[frame.tensor].len() as u64);
            chunks[frame.tensor].push((frame.encoded, frame.bytes.to_vec()));
        }
        Ok(())
    })?;
    Ok(plans.into_iter().zip(chunks).map(|(p, c)| Encoded::new(p, c)).collect())
}

/// The place where two encodings of a tensor differ, if they do.
pub(crate) fn compare(host: &Host, gpu: &Encoded, cpu: &Encoded) -> Option<String> {
    let name = &host.name;
    let (plan, other) = (format!("{:?}", gpu.plan), format!("{:?}", cpu.plan));
    if plan != other || gpu.chunks.len() != cpu.chunks.len() {
        return Some(format!("{name}: plans {plan} and {other}"));
    }
    gpu.chunks.iter().zip(&cpu.chunks).enumerate().find_map(|(i, (a, b))| {
        let (said, other) = (brief(&a.0), brief(&b.0));
        let at = a.1.iter().zip(&b.1).position(|(a, b)| a != b);
        let same = said == other && at.is_none() && a.1.len() == b.1.len();
        (!same).then(|| format!("{name}, chunk {i}: from byte {at:?}: {said}, the CPU {other}"))
    })
}

fn brief(e: &EncodedChunk) -> String {
    let streams = e.streams.iter().filter(|s| s.len > 0);
    let streams: Vec<_> = streams.map(|s| format!("{} {} {}", s.codec, s.param, s.len)).collect();
    let (enc, raw) = (e.crc_encoded, e.crc_raw);
    format!("{} bytes, {enc:08x} {raw:08x}, shared {}, {streams:?}", e.len, e.shared)
}

/// Decodes whole tensors into fresh device memory at odd places, and brings them back.
pub(crate) fn decode(
    gpu: &Gpu,
    engine: &CudaEngine,
    hosts: &[Host],
    encoded: &[Encoded],
) -> Result<Vec<Vec<u8>>, CudaError> {
    let fill = |(i, h): (usize, &Host)| {
        gpu.upload(&vec![0xee; h.data.len()], (i % 3 * h.dtype.value_width()) as u64)
    };
    let to: Vec<Upload> = hosts.iter().enumerate().map(fill).collect();
    let memory: Vec<_> = to.iter().map(Upload::memory).collect();
    engine.decode::<CudaError>(&memory, None, |decoder| {
        let mut span = Span::default();
        for (t, (host, e)) in hosts.iter().zip(encoded).enumerate() {
            let mut first = 0;
            for chunk in 0..e.chunks.len() {
                let bytes = host.chunk_bytes(&e.plan, chunk as u64);
                let destination = Destination { from: 0, to: memory[t].part(first, bytes)? };
                if span.bytes.len() + e.chunks[chunk].1.len() + 16 > decoder.room() {
                    std::mem::take(&mut span).push(decoder, gpu.device.ordinal())?;
                }
                span.add(t, e.spec(host), chunk, e, bytes, vec![destination]);
                first += bytes;
            }
        }
        span.push(decoder, gpu.device.ordinal())
    })?;
    Ok(to.iter().map(|u| gpu.download(u.address, u.bytes)).collect())
}

/// Consecutive frames, as in a file.
#[derive(Default)]
pub(crate) struct Span<'a> {
    pub(crate) bytes: Vec<u8>,
    pub(crate) jobs: Vec<FrameJob<'a>>,
}

impl<'a> Span<'a> {
    pub(crate) fn add(
        &mut self,
        tensor: usize,
        spec: TensorSpec<'a>,
        chunk: usize,
        e: &Encoded,
        bytes: u64,
        destinations: Vec<Destination>,
    ) {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        self.jobs.push(FrameJob {
            tensor,
            spec,
            chunk: chunk as u64,
            record: e.record(chunk),
            at: self.bytes.len(),
            bytes,
            destinations,
            input: None,
            moments: None,
        });
        self.bytes.extend(&e.chunks[chunk].1);
    }

    pub(crate) fn push(
        self,
        decoder: &mut s4_engine::cuda::Decoder<'_, 'a>,
        ordinal: u32,
    ) -> Result<(), CudaError> {
        decoder.push(ordinal, self.bytes.len(), self.jobs, |to| {
            to.copy_from_slice(&self.bytes);
            Ok(())
        })
    }
}

/// A dtype of every width and form, with the kind of its patterns.
pub(crate) fn kinds() -> Vec<(DType, Kind)> {
    let int = Kind::int;
    vec![
        (DType::BFloat16, Kind::BF16),
        (DType::Float16, Kind::F16),
        (DType::Float32, Kind::F32),
        (DType::Float64, Kind::F64),
        (DType::Float8E4M3Fn, Kind::F8_E4M3),
        (DType::Float8E5M2, Kind::F8_E5M2),
        (DType::Complex64, Kind::F32),
        (DType::Bool, int(Width::B1)),
        (DType::Int16, int(Width::B2)),
        (DType::Int32, int(Width::B4)),
        (DType::Int64, int(Width::B8)),
    ]
}

/// Every pattern of every dtype, in these sizes.
pub(crate) fn tensors(sizes: &[usize]) -> Vec<Host> {
    let mut out = vec![];
    for (dtype, kind) in kinds() {
        for &n in sizes {
            // A complex number is two values.
            let n = n.next_multiple_of(dtype.size() / dtype.value_width());
            for (pattern, data) in patterns::all(kind, n) {
                out.push(Host::new(format!("{dtype} {pattern} {n}"), dtype, data));
            }
        }
    }
    out
}

pub(crate) fn is_budget(e: &CudaError) -> bool {
    matches!(e, CudaError::Gpu(GpuError::Budget { .. }))
}
