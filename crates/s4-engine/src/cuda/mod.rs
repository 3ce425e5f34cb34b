//! The CUDA engine: encodes tensors in device memory into the frames that the CPU engine writes,
//! and decodes them again.
//!
//! A [`CudaEngine`] plans with the CPU's planner, on samples that it fetches; encodes in groups of
//! chunks on streams of low priority, while the frames of the group before are copied into pinned
//! memory and those before that are handed to the caller; and decodes frames straight into device
//! memory. It keeps within a budget of device memory and two of pinned memory, and takes at most half of the
//! device memory that is free. Frames come in memory that callers may hold on to ([`EncodedFrame::held`]).
//!
//! Chunks that need what the kernels lack (`zstd`, `token`) are copied to the host and handled by the CPU engine,
//! with the same bytes. Deliberately absent: threads of its own, and the storage of frames.

mod decode;
mod encode;
mod error;
mod feed;
mod fetch;
mod host;
mod host_copies;
mod job;
pub(crate) mod nvcomp;
mod parent;
mod pieces;
mod plan;
mod route;
mod sets;
mod staging;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing;
mod worker;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use rayon::ThreadPool;
use s4_codec_cpu::Codecs;
pub use s4_codec_gpu::{Cuda, DeviceInfo, GpuError, Pinned};
use s4_format::Error;
use s4_format::manifest::ClosedCodec;
use s4_planes::Simd;

pub use decode::Decoder;
pub use error::{CudaError, Result};
pub use fetch::FetchItem;
pub use host_copies::HostCopies;
pub use job::{Batch, Destination, FrameJob};
pub use nvcomp::Trusted;
pub use pieces::FrameMemory;
pub use staging::{StagedCopies, Stager};

pub use crate::DeviceMemory;
use crate::engine::{EncodedFrame, Engine, Jobs, TensorValues};
use crate::error::TensorError;
use crate::threads::lock;
use crate::{CpuEngine, Inputs, Preset, TensorPlan};
use encode::EncodeQueue;
use error::Of;
use host::{Counters, Host};
use host_copies::HostMemory;
use nvcomp::{Library, LibraryQueue};
use pieces::Pieces;
use staging::Stagers;
use worker::{ENOUGH_TO_DECODE, ENOUGH_TO_ENCODE, Session, Task, Work, Worker};

/// Limits on the engine's memory, and its vector instructions.
#[derive(Debug, Clone, Copy)]
pub struct CudaOptions {
    /// Scratch memory on each device while a call runs, in bytes: at least 16 MiB. A call takes at most an eighth of
    /// the free device memory, or, if that is more, the smaller of 256 MiB and half of what is free. Encoding without
    /// parents by the project's own codecs takes at most 512 MiB, decoding 320 MiB.
    pub scratch: u64,
    /// Page-locked host memory for each device that was used, in bytes, held as long as the engine lives.
    pub pinned: u64,
    /// The most page-locked host memory, in bytes and over all devices, for frames that callers hold on to. It is
    /// taken when needed and kept for later calls. Frames that do not fit must be copied.
    pub frames: u64,
    /// Vector instructions for the CPU's work.
    pub simd: Simd,
}

impl Default for CudaOptions {
    /// 768 MiB of device memory, 160 MiB of pinned memory, and at most 4 GiB for frames.
    fn default() -> Self {
        Self { scratch: 768 << 20, pinned: 160 << 20, frames: 4 << 30, simd: Simd::detect() }
    }
}

/// Chunk counts by executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Chunks {
    /// By the kernels.
    pub device: u64,
    /// By the CPU, because the kernels lack something that the plan or the frame needs.
    pub host: u64,
    /// By the CPU, because the kernels refused them: damaged frames.
    pub refused: u64,
}

/// Encodes and decodes on CUDA devices. Calls that use one device wait for each other.
pub struct CudaEngine {
    cuda: Cuda,
    host: Host,
    options: CudaOptions,
    /// What copies values within devices.
    stagers: Arc<Stagers>,
    /// Page-locked memory for copies of values.
    copies: Arc<HostMemory>,
    /// nvCOMP, once it was needed and found.
    library: Mutex<Option<Arc<Library>>>,
    workers: Mutex<BTreeMap<(u32, Task), SharedWorker>>,
}

/// A worker, used by one call at a time.
type SharedWorker = Arc<Mutex<Worker>>;

/// The least device memory and pinned memory, in bytes, with room for a worker for each task:
/// tensors are then planned while others are encoded.
const FOR_TWO_WORKERS: (u64, u64) = (128 << 20, 64 << 20);
/// A device with this many times the scratch memory free has room for it.
const AMPLE: u64 = 8;

impl CudaOptions {
    /// Whether planning has a worker of its own.
    fn plans_apart(&self) -> bool {
        self.scratch >= FOR_TWO_WORKERS.0 && self.pinned >= FOR_TWO_WORKERS.1
    }

    /// The device memory and the pinned memory of a worker.
    fn share(&self, task: Task) -> (u64, u64) {
        let Self { scratch, pinned, .. } = *self;
        // With fewer batches of samples, all threads wait less often for the last plan of a batch.
        let planning = (scratch.min(1 << 30) / 8, pinned / 2);
        match task {
            _ if !self.plans_apart() => (scratch, pinned),
            Task::Plan => planning,
            Task::Code => (scratch - planning.0, pinned - planning.1),
        }
    }
}

impl std::fmt::Debug for CudaEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaEngine").field("options", &self.options).finish_non_exhaustive()
    }
}

/// The workers of some devices, in ascending order: the order in which they are locked.
struct Workers(Vec<(u32, SharedWorker)>);

impl Workers {
    fn lock(&self, ordinal: u32) -> Option<MutexGuard<'_, Worker>> {
        let worker = &self.0.iter().find(|w| w.0 == ordinal)?.1;
        // A worker's state stays whole even if a call on it ended early.
        Some(lock(worker))
    }
}

/// The chunks of one device on their way to frames.
#[expect(clippy::large_enum_variant, reason = "one a device")]
enum DeviceQueue<'a> {
    /// Encoded by this crate's kernels.
    Kernels(EncodeQueue<'a>),
    /// By nvCOMP.
    Library(LibraryQueue<'a>),
}

impl<'a> DeviceQueue<'a> {
    fn launch<E: From<CudaError>>(&mut self, inputs: &'a dyn Inputs<E>) -> Result<(), E> {
        match self {
            Self::Kernels(queue) => queue.launch(inputs),
            Self::Library(queue) => Ok(queue.launch()?),
        }
    }

    /// Waits for the next chunks of this device; returns their tensor and chunk indices, none after the last one.
    fn ready<E: From<CudaError>>(
        &mut self,
        inputs: &'a dyn Inputs<E>,
    ) -> Result<Vec<(usize, u64)>, E> {
        match self {
            Self::Kernels(queue) => queue.ready(inputs),
            Self::Library(queue) => Ok(queue.ready()?),
        }
    }

    /// The next `count` of the chunks that are ready.
    fn take<E>(&mut self, count: usize, inputs: &dyn Inputs<E>) -> Result<Vec<EncodedFrame<'_>>> {
        match self {
            Self::Kernels(queue) => queue.take(count, inputs),
            Self::Library(queue) => Ok(queue.take(count)),
        }
    }
}

impl Engine for CudaEngine {
    type Error = CudaError;

    fn plan<E>(
        &self,
        preset: Preset,
        tensors: &[TensorValues<'_>],
        inputs: &dyn Inputs<E>,
        pool: Option<&ThreadPool>,
    ) -> Result<Vec<TensorPlan>, E>
    where
        E: From<CudaError> + From<TensorError> + Send,
    {
        self.plan_tensors(preset, tensors, inputs, pool)
    }

    fn encode<E>(
        &self,
        jobs: &Jobs<'_, E>,
        mut sink: impl FnMut(&[EncodedFrame<'_>]) -> Result<(), E>,
    ) -> Result<(), E>
    where
        E: From<CudaError> + From<TensorError> + Send,
    {
        check(jobs)?;
        let mut first = 0;
        // Split into runs of tensors that the library codes, and of tensors that it does not.
        for run in jobs.plans.chunk_by(|a, b| nvcomp::codes(a) == nvcomp::codes(b)) {
            let run = first..first + run.len();
            first = run.end;
            self.encode_run(jobs, run, &mut sink)?;
        }
        Ok(())
    }
}

impl CudaEngine {
    /// An engine on the devices of `cuda`. Devices are opened when they are first used.
    pub fn new(cuda: Cuda, options: CudaOptions) -> Self {
        let (cpu, pieces) = (CpuEngine::new(options.simd), Pieces::new(options.frames));
        let stagers = Arc::new(Stagers::default());
        let copies = HostMemory::new(pieces.clone(), Arc::clone(&stagers));
        let host = Host { cpu, chunks: Counters::default(), pieces };
        let (library, workers) = (Mutex::default(), Mutex::default());
        Self { cuda, host, options, stagers, copies, library, workers }
    }

    /// The engine with further codecs. Planes that are coded with them are encoded and decoded on the CPU.
    #[must_use]
    pub fn with_codecs(mut self, codecs: &Codecs) -> Self {
        self.host.cpu = self.host.cpu.and_codecs(codecs);
        self
    }

    /// The devices.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// Chunk counts by executor, over all calls so far.
    pub fn chunks(&self) -> Chunks {
        let Counters { device, host, refused } = &self.host.chunks;
        let read = |n: &AtomicU64| n.load(Ordering::Relaxed);
        Chunks { device: read(device), host: read(host), refused: read(refused) }
    }

    /// The most device memory, in bytes, that the engine held on a device at one time; 0 for a device that was not
    /// used. Waits for calls that use the device.
    pub fn scratch_high_water(&self, ordinal: u32) -> u64 {
        let workers = lock(&self.workers);
        let own: Vec<_> = workers.range((ordinal, Task::Code)..=(ordinal, Task::Plan)).collect();
        let own: Vec<_> = own.into_iter().map(|(_, worker)| Arc::clone(worker)).collect();
        drop(workers);
        let peak = |worker: &SharedWorker| lock(worker).pool.high_water();
        own.iter().map(peak).sum()
    }

    /// Opens a device, unless it is open, and checks that there is room for scratch memory. Waits
    /// neither for the caller's streams nor for calls that use the device.
    ///
    /// # Errors
    /// `Gpu`: there is no such device, or not enough memory.
    pub fn open(&self, ordinal: u32) -> Result<()> {
        let is_open = {
            let workers = lock(&self.workers);
            workers.contains_key(&(ordinal, Task::Code))
        };
        let workers = self.workers(Task::Code, std::iter::once(ordinal))?;
        for (_, worker) in &workers.0 {
            // A call that is using it has found room.
            let Ok(worker) = worker.try_lock() else { continue };
            // Taking the memory costs a millisecond, and tells nothing new if plenty is free.
            let ample = worker.pool.budget().saturating_mul(AMPLE);
            if !is_open || worker.device.memory()?.0 < ample {
                Session::new(worker, std::iter::empty(), Work::Encode, ENOUGH_TO_ENCODE)?;
            }
        }
        Ok(())
    }

    /// The memory of frames that callers hold on to, and of copies of values.
    pub fn frame_memory(&self) -> FrameMemory {
        self.host.pieces.memory()
    }

    /// Sets [`CudaOptions::frames`]. Memory in use beyond that goes back to the system once nobody holds it.
    pub fn limit_frame_memory(&self, bytes: u64) {
        self.host.pieces.limit(bytes);
    }

    /// Takes one more piece of that memory for later calls, unless the pieces taken so far have room for `bytes` of
    /// frames. Returns whether it did: never beyond the budget, and not before any frames needed a piece. Locking the
    /// pages of a piece takes some milliseconds, which nobody waits for if this is called between two saves.
    pub fn grow_frame_memory(&self, bytes: u64) -> bool {
        self.host.pieces.grow(bytes)
    }

    /// Claims memory for frames ([`EncodedFrame::held`]) that stay for later calls, which send them
    /// to a device straight from there. Returns the same bytes, to hold instead of `frames`; `None`
    /// if their part of the budget, half of it, has no room left.
    pub fn keep_frames(&self, frames: &[Bytes]) -> Option<Vec<Bytes>> {
        self.host.pieces.keep(frames)
    }

    /// Returns the memory of frames and copies that nobody holds to the system.
    pub fn trim_frame_memory(&self) {
        self.host.pieces.shrink(0);
    }

    /// What copies values within a device.
    ///
    /// # Errors
    /// Those of [`Stager::new`].
    pub fn stager(&self, ordinal: u32) -> std::result::Result<Arc<Stager>, GpuError> {
        self.stagers.get(&self.cuda, ordinal)
    }

    /// Copies values to page-locked host memory, within the budget of [`CudaOptions::frames`], after all work queued
    /// on their streams before. When this returns, the values may be changed; the memory is kept for later copies.
    ///
    /// `room`: by ordinal, bytes of a device's memory that are free for copies. Values for which there is room are first
    /// copied there, and to the host after this has returned ([`HostCopies::wait`]).
    ///
    /// # Errors
    /// `Budget` if the host has no room for them, `OutOfMemory`, `Argument` for pointers that are not
    /// memory of their device, `Driver`.
    pub fn copy_to_host(
        &self,
        from: &[DeviceMemory],
        room: &BTreeMap<u32, u64>,
    ) -> std::result::Result<HostCopies, GpuError> {
        self.copies.copy(&self.cuda, from, room)
    }

    /// Copies values to the host. `sink` gets batches of items, in order: each item's index and bytes.
    ///
    /// # Errors
    /// `Gpu`, also for a range outside its memory; those of `sink`.
    pub fn fetch<E: From<CudaError>>(
        &self,
        items: &[FetchItem],
        sink: impl FnMut(&[(usize, &[u8])]) -> Result<(), E>,
    ) -> Result<(), E> {
        let memory: Vec<_> = items.iter().map(FetchItem::memory).collect();
        let workers = self.workers(Task::Plan, memory.iter().map(DeviceMemory::ordinal))?;
        let sessions = self.sessions(&workers, &memory, Task::Plan)?;
        let rows: Vec<_> = items.iter().map(FetchItem::rows).collect::<Result<_>>()?;
        fetch::run(&sessions, &rows, sink)
    }

    fn encode_run<E: From<CudaError>>(
        &self,
        jobs: &Jobs<'_, E>,
        run: Range<usize>,
        sink: &mut impl FnMut(&[EncodedFrame<'_>]) -> Result<(), E>,
    ) -> Result<(), E> {
        let library = self.coding_library(jobs.plans, run.clone())?;
        let given = jobs.inputs.memory();
        let memory = jobs.tensors[run.clone()].iter().map(device_memory);
        let memory = memory.collect::<Result<Vec<_>>>()?;
        let workers = self.workers(Task::Code, memory.iter().map(|m| m.ordinal()))?;
        let is_delta = jobs.plans[run.clone()].iter().any(|plan| plan.plan.is_delta());
        let enough = if is_delta { u64::MAX } else { ENOUGH_TO_ENCODE };
        let mut queues = BTreeMap::new();
        for (ordinal, _) in &workers.0 {
            let own = memory.iter().chain(&given).copied().filter(|m| m.ordinal() == *ordinal);
            let Some(worker) = workers.lock(*ordinal) else { continue };
            let here = run.clone().zip(&memory).filter(|t| t.1.ordinal() == *ordinal);
            let chunks = jobs.queue(here.map(|t| t.0));
            let queue = match &library {
                Some(library) => {
                    let session = Session::whole(worker, own).map_err(CudaError::from)?;
                    let queue = LibraryQueue::new(session, library, &self.host, chunks)?;
                    DeviceQueue::Library(queue)
                }
                None => {
                    let session = Session::new(worker, own, Work::Encode, enough);
                    let session = session.map_err(CudaError::from)?;
                    DeviceQueue::Kernels(EncodeQueue::new(session, &self.host, chunks, jobs.pool))
                }
            };
            queues.insert(*ordinal, queue);
        }
        // All devices begin before the first chunk is waited for.
        queues.values_mut().try_for_each(|queue| queue.launch(jobs.inputs))?;
        let mut all = jobs.queue(run.clone());
        while let Some(chunk) = all.peek() {
            let ordinal = memory[chunk.tensor - run.start].ordinal();
            let Some(queue) = queues.get_mut(&ordinal) else { break };
            // All chunks up to the next one of another device.
            let ready = queue.ready(jobs.inputs)?;
            let mut is_next = |c: &(usize, u64)| {
                let next = all.peek().is_some_and(|chunk| chunk.name() == *c);
                if next {
                    all.advance();
                }
                next
            };
            let count = ready.iter().take_while(|c| is_next(c)).count();
            if count == 0 {
                let source = Error::corrupt("a chunk was not encoded").in_chunk(chunk.chunk);
                return Err(CudaError::from(TensorError { tensor: chunk.tensor, source }).into());
            }
            sink(&queue.take(count, jobs.inputs)?)?;
        }
        Ok(())
    }

    /// The library if it must code a run of tensors, of which all or none have planes for it.
    fn coding_library(
        &self,
        plans: &[TensorPlan],
        mut run: Range<usize>,
    ) -> Result<Option<Arc<Library>>> {
        if !plans.get(run.start).is_some_and(nvcomp::codes) {
            return Ok(None);
        }
        match (self.library(), run.find(|&t| nvcomp::is_needed(&plans[t]))) {
            (Ok(library), _) => Ok(Some(library)),
            // The CPU's codecs write the same bitstreams.
            (Err(_), None) => Ok(None),
            (Err(e), Some(tensor)) => Err(e).of(tensor),
        }
    }

    fn library(&self) -> s4_format::Result<Arc<Library>> {
        let mut known = lock(&self.library);
        if let Some(library) = &*known {
            return Ok(Arc::clone(library));
        }
        Ok(Arc::clone(known.insert(Arc::new(Library::open(&self.cuda)?))))
    }

    /// Lets [`CudaEngine::decode`] decode streams in blocks, including those of the given closed
    /// bitstreams; `None` if there is no nvCOMP that reads all of them.
    ///
    /// Only for checkpoints written by a program that the caller trusts: given other bytes,
    /// nvCOMP's decoders may read and write any memory of the device, and checksums do not say who
    /// wrote a file.
    pub fn trusted(&self, closed: &[ClosedCodec]) -> Option<Trusted> {
        let library = self.library().ok().filter(|l| l.reads(closed))?;
        Some(Trusted { library, closed: closed.to_vec() })
    }

    /// Decodes frames into device memory. `memory` is all memory that will be written, and `work`
    /// pushes the frames; everything is done and checked when this returns. With `trusted`, streams
    /// in blocks are decoded on the device, too.
    ///
    /// # Errors
    /// `Gpu`: pointers that are not device memory, budgets, the driver. `Format`: a damaged or
    /// unsupported chunk, with its tensor and chunk index; the decoded values are then unspecified.
    /// Those of `work`.
    pub fn decode<'a, E: From<CudaError>>(
        &self,
        memory: &[DeviceMemory],
        trusted: Option<&Trusted>,
        work: impl FnOnce(&mut Decoder<'_, 'a>) -> Result<(), E>,
    ) -> Result<(), E> {
        let workers = self.workers(Task::Code, memory.iter().map(DeviceMemory::ordinal))?;
        let sessions = self.sessions(&workers, memory, Task::Code)?;
        let mut decoder = Decoder::new(sessions, &self.host, trusted);
        work(&mut decoder)?;
        Ok(decoder.finish()?)
    }

    /// The workers of some devices for a task; opens devices that are not open yet.
    fn workers(&self, task: Task, ordinals: impl Iterator<Item = u32>) -> Result<Workers> {
        let task = if self.options.plans_apart() { task } else { Task::Code };
        let mut wanted: Vec<u32> = ordinals.collect();
        wanted.sort_unstable();
        wanted.dedup();
        let mut out = vec![];
        for ordinal in wanted {
            let known = lock(&self.workers).get(&(ordinal, task)).map(Arc::clone);
            let worker = match known {
                Some(worker) => worker,
                None => {
                    // Opening a device may take seconds: calls on other devices do not wait for it.
                    let device = self.cuda.device(ordinal)?;
                    let worker = Worker::new(task, device, self.options.share(task))?;
                    let mut workers = lock(&self.workers);
                    let worker = || Arc::new(Mutex::new(worker));
                    Arc::clone(workers.entry((ordinal, task)).or_insert_with(worker))
                }
            };
            out.push((ordinal, worker));
        }
        Ok(Workers(out))
    }

    /// A session on each device, to plan or to decode the part of `memory` that it has.
    fn sessions<'a>(
        &self,
        workers: &'a Workers,
        memory: &[DeviceMemory],
        task: Task,
    ) -> Result<Vec<Session<'a>>> {
        // A worker for everything has other slots than one for planning.
        let work = match task {
            Task::Plan if self.options.plans_apart() => Work::Plan,
            _ => Work::Decode,
        };
        let mut sessions = vec![];
        for (ordinal, _) in &workers.0 {
            let own = memory.iter().copied().filter(|m| m.ordinal() == *ordinal);
            let Some(worker) = workers.lock(*ordinal) else { continue };
            sessions.push(Session::new(worker, own, work, ENOUGH_TO_DECODE)?);
        }
        Ok(sessions)
    }
}

/// Checks the caller's tensors and plans.
fn check<E>(jobs: &Jobs<'_, E>) -> Result<()> {
    jobs.check()?;
    let known = |plan: &TensorPlan| plan.plan.inputs.is_empty() || plan.plan.input_scale() != 0;
    match jobs.plans.iter().position(|plan| !known(plan)) {
        None => Ok(()),
        Some(tensor) => {
            let predictor = jobs.plans[tensor].plan.predictor;
            let what = format!("predictor `{predictor}` in the CUDA engine");
            Err(Error::unsupported(what)).of(tensor)
        }
    }
}

/// The device memory that a tensor is in.
fn device_memory(t: &TensorValues<'_>) -> Result<DeviceMemory> {
    let on_host = || GpuError::Argument("values are in host memory, not on a CUDA device".into());
    Ok(t.values.memory().ok_or_else(on_host)?)
}
