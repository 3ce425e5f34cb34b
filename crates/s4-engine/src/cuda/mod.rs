//! The CUDA engine: tensors in device memory into the frames that the CPU engine writes, and back.
//!
//! A [`CudaEngine`] plans with the CPU's planner, on samples that it fetches; encodes in groups of
//! chunks on a stream of low priority, while the frames of the group before are copied into pinned
//! memory and those before that are handed to the caller; and decodes frames straight into device
//! memory. It keeps within a budget of device memory and one of pinned memory.
//!
//! What the kernels lack (`zstd`, `token`) is copied to the host and done by the CPU engine: the same
//! bytes. What is deliberately absent: predictors other than the parent, threads of its own, where frames are
//! kept.

mod decode;
mod encode;
mod error;
mod feed;
mod fetch;
mod job;
pub(crate) mod nvcomp;
mod parent;
mod plan;
mod route;
mod tensor;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing;
mod worker;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

pub use s4_codec_gpu::{Cuda, DeviceInfo, GpuError, Pinned};
use s4_format::DType;
use s4_format::manifest::ClosedCodec;
use s4_planes::Simd;

pub use decode::Decoder;
pub use encode::DeviceFrame;
pub use error::{CudaError, Result};
pub use job::{Batch, DecodeJob, Piece};
pub use nvcomp::Trusted;
pub use parent::{ParentChunk, ParentFrame, ParentSize, ParentValues};
pub use plan::Planners;
pub use tensor::DeviceTensor;

pub use crate::DeviceMemory;
use crate::{CpuEngine, ParentSample, Preset, Scratch, TensorPlan, planner};
use encode::Lane;
use error::Of;
use nvcomp::{Lanes, Library};
use parent::NoParents;
use worker::{Session, Worker};

/// How much memory the engine may take.
#[derive(Debug, Clone, Copy)]
pub struct CudaOptions {
    /// Device memory for scratch, in bytes, on each device, while a call works.
    pub scratch: u64,
    /// Page-locked host memory, in bytes, for each device that was used, as long as the engine lives.
    pub pinned: u64,
    /// Vector instructions of what the CPU does.
    pub simd: Simd,
}

impl Default for CudaOptions {
    /// 256 MiB of device memory and 96 MiB of pinned memory.
    fn default() -> Self {
        Self { scratch: 256 << 20, pinned: 96 << 20, simd: Simd::detect() }
    }
}

/// Chunk counts by executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Chunks {
    /// By the kernels.
    pub device: u64,
    /// By the CPU, because the kernels lack something that the plan or the frame has.
    pub host: u64,
    /// By the CPU, because the kernels refused them: damaged frames.
    pub refused: u64,
}

/// Counts chunks while an engine works.
#[derive(Debug, Default)]
struct Counters {
    device: AtomicU64,
    host: AtomicU64,
    refused: AtomicU64,
}

/// What the CPU does for the devices.
struct Host {
    cpu: CpuEngine,
    chunks: Counters,
}

/// Encodes and decodes on CUDA devices. Calls that use one device wait for each other.
pub struct CudaEngine {
    cuda: Cuda,
    host: Host,
    options: CudaOptions,
    /// nvCOMP, once it was needed and found.
    library: Mutex<Option<Arc<Library>>>,
    workers: Mutex<BTreeMap<u32, Arc<Mutex<Worker>>>>,
}

impl std::fmt::Debug for CudaEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaEngine").field("options", &self.options).finish_non_exhaustive()
    }
}

/// The workers of some devices, in ascending order: the order in which they are locked.
struct Workers(Vec<(u32, Arc<Mutex<Worker>>)>);

impl Workers {
    fn lock(&self, ordinal: u32) -> Option<MutexGuard<'_, Worker>> {
        let worker = &self.0.iter().find(|w| w.0 == ordinal)?.1;
        // What a worker keeps is whole also where a call on it ended early.
        Some(worker.lock().unwrap_or_else(|e| e.into_inner()))
    }
}

/// What lanes encode: a run of all tensors.
struct Work<'a> {
    host: &'a Host,
    tensors: &'a [DeviceTensor<'a>],
    plans: &'a [TensorPlan],
    run: Range<usize>,
}

impl Work<'_> {
    /// Tensors of the run, by number, that are on a device.
    fn on(&self, ordinal: u32) -> VecDeque<usize> {
        self.run.clone().filter(|&t| self.tensors[t].memory.ordinal() == ordinal).collect()
    }
}

/// What encodes the chunks of one device.
#[expect(clippy::large_enum_variant, reason = "one a device")]
enum EncodeLane<'a> {
    /// This crate's kernels.
    Kernels(Lane<'a>),
    /// nvCOMP.
    Library(Lanes<'a>),
}

impl EncodeLane<'_> {
    fn launch<E: From<CudaError>>(&mut self, parents: &dyn ParentValues<E>) -> Result<(), E> {
        match self {
            Self::Kernels(lane) => lane.launch(parents),
            Self::Library(lanes) => Ok(lanes.launch()?),
        }
    }

    fn next<E: From<CudaError>>(
        &mut self,
        parents: &dyn ParentValues<E>,
    ) -> Result<Option<DeviceFrame<'_>>, E> {
        match self {
            Self::Kernels(lane) => lane.next(parents),
            Self::Library(lanes) => Ok(lanes.next()?),
        }
    }
}

impl CudaEngine {
    /// An engine on the devices of `cuda`. Devices are opened when they are first used.
    pub fn new(cuda: Cuda, options: CudaOptions) -> Self {
        let host = Host { cpu: CpuEngine::new(options.simd), chunks: Counters::default() };
        Self { cuda, host, options, library: Mutex::default(), workers: Mutex::default() }
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

    /// The most device memory, in bytes, that the engine held at once on a device, as its driver
    /// counts it; 0 for one that was not used.
    ///
    /// # Errors
    /// `Gpu`.
    pub fn scratch_high_water(&self, ordinal: u32) -> Result<u64> {
        let workers = self.workers.lock().unwrap_or_else(|e| e.into_inner());
        let Some(worker) = workers.get(&ordinal).map(Arc::clone) else { return Ok(0) };
        drop(workers);
        let worker = worker.lock().unwrap_or_else(|e| e.into_inner());
        Ok(worker.pool.high_water()?)
    }

    /// Fetches what the planner looks at: for each tensor, in order, its number and its sample, in
    /// batches that [`Planners`] plan with [`CudaEngine::plan_sample`].
    ///
    /// # Errors
    /// `Gpu`; those of `sink`.
    pub fn samples<E: From<CudaError>>(
        &self,
        tensors: &[DeviceTensor<'_>],
        sink: impl FnMut(&[(usize, &[u8])]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.samples_from(tensors, &[], sink)
    }

    /// As [`CudaEngine::samples`], where some tensors may become differences from a parent: those that
    /// `differences` marks, by number. Theirs are planned with [`CudaEngine::plan_difference`].
    ///
    /// # Errors
    /// As [`CudaEngine::samples`].
    pub fn samples_from<E: From<CudaError>>(
        &self,
        tensors: &[DeviceTensor<'_>],
        differences: &[bool],
        sink: impl FnMut(&[(usize, &[u8])]) -> Result<(), E>,
    ) -> Result<(), E> {
        let runs = tensors.iter().enumerate().map(|(i, t)| {
            let width = t.dtype.value_width() as u64;
            let values = t.memory.bytes() / width;
            let mut runs: Vec<_> = planner::sampled_runs(values).collect();
            if differences.get(i) == Some(&true) {
                runs.extend(planner::parent_probes(t.dtype, values));
            }
            let part =
                |run: Range<u64>| t.memory.part(run.start * width, (run.end - run.start) * width);
            runs.into_iter().map(part).collect::<Result<Vec<_>, GpuError>>()
        });
        let runs = runs.collect::<Result<Vec<_>, _>>().map_err(CudaError::from)?;
        self.fetch(&runs, sink)
    }

    /// The plan for a tensor of `bytes` bytes whose sample was fetched.
    ///
    /// # Errors
    /// Errors of a codec.
    pub fn plan_sample(
        &self,
        preset: Preset,
        dtype: DType,
        bytes: u64,
        sample: &[u8],
        scratch: &mut Scratch,
    ) -> s4_format::Result<TensorPlan> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.host.cpu.plan_sample(preset, dtype, bytes, sample, scratch)
    }

    /// As [`CudaEngine::plan_sample`], for a tensor that may become the difference from its parent:
    /// the plan that [`CpuEngine::plan`] chooses.
    ///
    /// # Errors
    /// Errors of a codec; `Corrupt` if the parent's sample has another size.
    pub fn plan_difference(
        &self,
        preset: Preset,
        (dtype, bytes): (DType, u64),
        sample: &[u8],
        parent: &ParentSample<'_>,
        scratch: &mut Scratch,
    ) -> s4_format::Result<TensorPlan> {
        // Both samples are consecutive.
        let width = dtype.value_width() as u64;
        let probes = planner::parent_probes(dtype, bytes / width);
        let probed = probes.iter().map(|r| (r.end - r.start) * width).sum::<u64>();
        let at = (sample.len() as u64).saturating_sub(probed) as usize;
        let (direct, probes) = sample.split_at(at);
        let plan = |scratch: &mut Scratch| self.plan_sample(preset, dtype, bytes, direct, scratch);
        if preset == Preset::Nvcomp {
            return plan(scratch);
        }
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.host.cpu.plan_difference(dtype, len, probes.to_vec(), parent, scratch, plan)
    }

    /// Copies values to the host: for each item, in order, its number and the consecutive bytes of its
    /// parts, in batches. An item has at most 2 MiB.
    ///
    /// # Errors
    /// `Gpu`; those of `sink`.
    pub fn fetch<E: From<CudaError>>(
        &self,
        items: &[Vec<DeviceMemory>],
        sink: impl FnMut(&[(usize, &[u8])]) -> Result<(), E>,
    ) -> Result<(), E> {
        let workers = self.workers(items.iter().flatten().map(DeviceMemory::ordinal))?;
        let mut sessions = vec![];
        for (ordinal, _) in &workers.0 {
            let own = items.iter().flatten().copied().filter(|m| m.ordinal() == *ordinal);
            sessions.extend(self.session(&workers, *ordinal, own)?);
        }
        fetch::run(&sessions, items, sink)
    }

    /// Encodes tensors, of any devices, by their plans. `sink` gets every chunk, in order of tensors
    /// and chunks; when it returns an error the work ends with that error.
    ///
    /// # Errors
    /// `Gpu`: memory that is no device's, budgets, the driver. `Format`: a plan with a predictor, values
    /// that do not fill the shape. Those of `sink`.
    pub fn encode<E: From<CudaError>>(
        &self,
        tensors: &[DeviceTensor<'_>],
        plans: &[TensorPlan],
        sink: impl FnMut(DeviceFrame<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.encode_from(tensors, plans, &NoParents, sink)
    }

    /// As [`CudaEngine::encode`], where some tensors are differences from a parent, as their plans
    /// say. The parents' values are uploaded before each group of chunks, and are decoded on the device if
    /// frames are given.
    ///
    /// # Errors
    /// As [`CudaEngine::encode`]; `Gpu` of type `Argument` for parents of another size than their
    /// chunks; those of `parents`.
    pub fn encode_from<E: From<CudaError>>(
        &self,
        tensors: &[DeviceTensor<'_>],
        plans: &[TensorPlan],
        parents: &dyn ParentValues<E>,
        mut sink: impl FnMut(DeviceFrame<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        check(tensors, plans)?;
        let mut first = 0;
        for run in plans.chunk_by(|a, b| nvcomp::codes(a) == nvcomp::codes(b)) {
            let run = first..first + run.len();
            first = run.end;
            self.encode_run(tensors, plans, run, parents, &mut sink)?;
        }
        Ok(())
    }

    /// Encodes a run of tensors whose plans are all the library's, or all not.
    fn encode_run<E: From<CudaError>>(
        &self,
        tensors: &[DeviceTensor<'_>],
        plans: &[TensorPlan],
        run: Range<usize>,
        parents: &dyn ParentValues<E>,
        sink: &mut impl FnMut(DeviceFrame<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let library = self.coding_library(plans, run.clone())?;
        let given = parents.memory();
        let memory = || run.clone().map(|t| tensors[t].memory);
        let workers = self.workers(memory().map(|m| m.ordinal()))?;
        let mut lanes = BTreeMap::new();
        for (ordinal, _) in &workers.0 {
            let all = memory().chain(given.iter().copied());
            let own = all.filter(|m| m.ordinal() == *ordinal);
            let Some(worker) = workers.lock(*ordinal) else { continue };
            let work = Work { host: &self.host, tensors, plans, run: run.clone() };
            let lane = match &library {
                Some(library) => {
                    let session = Session::whole(worker, own).map_err(CudaError::from)?;
                    EncodeLane::Library(Lanes::new(session, library, work)?)
                }
                None => {
                    let session = Session::new(worker, own).map_err(CudaError::from)?;
                    EncodeLane::Kernels(Lane::new(session, work))
                }
            };
            lanes.insert(*ordinal, lane);
        }
        // All devices begin before the first chunk is waited for.
        lanes.values_mut().try_for_each(|lane| lane.launch(parents))?;
        for (tensor, plan) in tensors[run.clone()].iter().zip(&plans[run.clone()]) {
            let values = tensor.memory.bytes() / tensor.dtype.value_width() as u64;
            for _ in 0..s4_format::index::chunk_count(values, plan.chunk_log2) {
                let Some(lane) = lanes.get_mut(&tensor.memory.ordinal()) else { continue };
                if let Some(frame) = lane.next(parents)? {
                    sink(frame)?;
                }
            }
        }
        Ok(())
    }

    /// The library, if it is to code a run of tensors: all or none of them have such planes.
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
        let mut known = self.library.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(library) = &*known {
            return Ok(Arc::clone(library));
        }
        Ok(Arc::clone(known.insert(Arc::new(Library::open(&self.cuda)?))))
    }

    /// Decodes frames into device memory. `memory` is all that will be written, `work` pushes the
    /// frames; when this returns, all of it is done and checked.
    ///
    /// # Errors
    /// `Gpu`: memory that is no device's, budgets, the driver. `Format`: a chunk that is damaged or
    /// not supported, by number of tensor and chunk; what was decoded is unspecified then. Those of
    /// `work`.
    pub fn decode<'a, E: From<CudaError>>(
        &self,
        memory: &[DeviceMemory],
        work: impl FnOnce(&mut Decoder<'_, 'a>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.decode_with(memory, None, work)
    }

    /// What [`CudaEngine::decode_with`] decodes streams in blocks with, those of these closed bitstreams
    /// included; `None` where there is no nvCOMP that reads all of them.
    ///
    /// Only for checkpoints that a program wrote which the caller trusts: nvCOMP's decoders may read and
    /// write any memory of the device when they are given other bytes, and checksums do not say who
    /// wrote a file.
    pub fn trusted(&self, closed: &[ClosedCodec]) -> Option<Trusted> {
        let library = self.library().ok().filter(|l| l.reads(closed))?;
        Some(Trusted { library, closed: closed.to_vec() })
    }

    /// As [`CudaEngine::decode`]; with `trusted`, streams in blocks are decoded on the device, too.
    ///
    /// # Errors
    /// As [`CudaEngine::decode`].
    pub fn decode_with<'a, E: From<CudaError>>(
        &self,
        memory: &[DeviceMemory],
        trusted: Option<&Trusted>,
        work: impl FnOnce(&mut Decoder<'_, 'a>) -> Result<(), E>,
    ) -> Result<(), E> {
        let workers = self.workers(memory.iter().map(DeviceMemory::ordinal))?;
        let mut sessions = vec![];
        for (ordinal, _) in &workers.0 {
            let own = memory.iter().copied().filter(|m| m.ordinal() == *ordinal);
            sessions.extend(self.session(&workers, *ordinal, own)?);
        }
        let mut decoder = Decoder::new(sessions, &self.host, trusted);
        work(&mut decoder)?;
        Ok(decoder.finish()?)
    }

    /// Opens the devices that are not open yet.
    fn workers(&self, ordinals: impl Iterator<Item = u32>) -> Result<Workers> {
        let mut wanted: Vec<u32> = ordinals.collect();
        wanted.sort_unstable();
        wanted.dedup();
        let mut workers = self.workers.lock().unwrap_or_else(|e| e.into_inner());
        let mut out = vec![];
        for ordinal in wanted {
            let worker = match workers.get(&ordinal) {
                Some(worker) => Arc::clone(worker),
                None => {
                    let device = self.cuda.device(ordinal)?;
                    let worker = Worker::new(device, self.options.scratch, self.options.pinned)?;
                    let worker = Arc::new(Mutex::new(worker));
                    workers.insert(ordinal, Arc::clone(&worker));
                    worker
                }
            };
            out.push((ordinal, worker));
        }
        Ok(Workers(out))
    }

    fn session<'a>(
        &self,
        workers: &'a Workers,
        ordinal: u32,
        memory: impl Iterator<Item = DeviceMemory>,
    ) -> Result<Option<Session<'a>>> {
        let Some(worker) = workers.lock(ordinal) else { return Ok(None) };
        Ok(Some(Session::new(worker, memory)?))
    }
}

/// Checks what the caller says of tensors.
fn check(tensors: &[DeviceTensor<'_>], plans: &[TensorPlan]) -> Result<()> {
    if tensors.len() != plans.len() {
        let (t, p) = (tensors.len(), plans.len());
        return Err(GpuError::Argument(format!("{p} plans for {t} tensors")).into());
    }
    for (i, (t, plan)) in tensors.iter().zip(plans).enumerate() {
        let elements = t.shape.iter().try_fold(t.dtype.size() as u64, |n, d| n.checked_mul(*d));
        if elements != Some(t.memory.bytes()) {
            let what = format!(
                "{} bytes of device memory for shape {:?} of {}",
                t.memory.bytes(),
                t.shape,
                t.dtype
            );
            return Err(s4_format::Error::limit(what)).of(i);
        }
        if !plan.plan.is_direct() && !plan.plan.is_delta() {
            let what = format!("predictor `{}` in the CUDA engine", plan.plan.predictor);
            return Err(s4_format::Error::unsupported(what)).of(i);
        }
    }
    Ok(())
}
