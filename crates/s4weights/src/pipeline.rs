//! Plans and encodes tensors on threads, while the caller's thread writes what is done.

use std::sync::{Arc, Mutex, MutexGuard};

use rayon::ThreadPool;
use rayon::prelude::*;
use s4_engine::{
    CpuEngine, EncodeJob, EncodedChunk, ParentSample, PlanJob, Preset, Scratch, TensorPlan,
    TensorView, parent_probes,
};
use s4_format::index::chunk_count;
use s4_format::layout::Planes;
use s4_format::manifest::TensorRole;
use s4_format::{ChunkRecord, CodecId, DType};

use crate::behind::Behind;
use crate::error::{At, Result};
use crate::options::{Meter, thread_count};
use crate::parallel::pool;
use crate::parent::{Parent, ParentRange};
use crate::writer::Writer;

/// Tensors that are planned together: samples of so many parents are in memory at once.
const PLANNED: usize = 64;
/// From so many threads and bytes of values on, others than this one hash and write.
const BEHIND: (usize, u64) = (4, 64 << 20);

/// Threads that wait for a device at least, where it codes planes of the host.
const WAITING: usize = 64;

/// A tensor with chunks of its own, to be written.
pub(crate) struct Large<'a> {
    pub(crate) name: &'a str,
    pub(crate) view: TensorView<'a>,
    pub(crate) group: u8,
    /// Number of the parent's tensor that it may be a difference from.
    pub(crate) parent: Option<u32>,
    /// What it is to the optimizer.
    pub(crate) role: Option<TensorRole<'a>>,
}

/// The same, on its way.
pub(crate) struct Item<'a> {
    pub(crate) large: Large<'a>,
    pub(crate) plan: TensorPlan,
    pub(crate) records: Vec<ChunkRecord>,
    pub(crate) shared: bool,
}

/// A tensor whose chunks are written.
pub(crate) struct Coded {
    pub(crate) plan: TensorPlan,
    pub(crate) records: Vec<ChunkRecord>,
    /// Whether a chunk uses the plan's shared tables.
    pub(crate) shared: bool,
}

/// What a chunk's place in the file and in the totals depends on.
pub(crate) struct ChunkOf<'a> {
    pub(crate) dtype: DType,
    /// Bytes of the tensor.
    pub(crate) bytes: u64,
    pub(crate) group: u8,
    pub(crate) plan: &'a TensorPlan,
    /// Number of the chunk.
    pub(crate) chunk: u64,
}

/// Reused from call to call.
#[derive(Default)]
pub(crate) struct Buffers {
    scratch: Stock,
    frames: [Vec<Frame>; 2],
}

/// Scratch memory for as many threads as need some at once.
#[derive(Default)]
struct Stock(Mutex<Vec<Scratch>>);

#[derive(Default)]
struct Frame {
    bytes: Vec<u8>,
    /// The parent's values of the chunk.
    parent: Vec<u8>,
    chunk: Option<Result<EncodedChunk>>,
}

#[derive(Clone, Copy)]
struct Job {
    item: usize,
    chunk: u64,
}

/// What threads share.
struct Encoder<'a> {
    engine: &'a CpuEngine,
    parent: Option<&'a dyn Parent>,
    scratch: &'a Stock,
    target: &'a str,
    pool: Option<&'a ThreadPool>,
}

impl Writer {
    /// Plans and encodes tensors, in order, and appends their chunks.
    pub(crate) fn encode<'a>(
        &mut self,
        tensors: Vec<Large<'a>>,
        meter: &mut Meter,
    ) -> Result<Vec<Item<'a>>> {
        let threads = self.encoding_threads();
        let chunks: u64 = tensors.iter().map(|t| chunks_of(&t.view)).sum();
        let values = tensors.iter().map(|t| t.view.data.len() as u64).sum::<u64>();
        // More threads than chunks would only wait.
        let pool = pool(threads.min(usize::try_from(chunks).unwrap_or(threads)))?;
        let mut buffers = std::mem::take(&mut self.buffers);
        let engine = Arc::clone(&self.engine);
        let parent = self.options.parent.clone();
        let target = self.name.clone();
        let encoder = Encoder {
            engine: &engine,
            parent: parent.as_deref(),
            scratch: &buffers.scratch,
            target: &target,
            pool: pool.as_ref(),
        };
        let items = encoder.plan(self.options.preset, tensors);
        let done = items.and_then(|mut items| {
            if threads >= BEHIND.0 && values >= BEHIND.1 && self.memory() >= 2 * Behind::BUFFERS {
                self.out.write_behind(threads)?;
            }
            let done = self.run(&encoder, threads, &mut items, &mut buffers.frames, meter);
            // What the sink says comes before what came of it.
            self.out.write_here()?;
            done.map(|()| items)
        });
        self.buffers = buffers;
        done
    }

    /// Threads that encode. Those of preset `nvcomp` wait for the device, which is fast where much waits.
    fn encoding_threads(&self) -> usize {
        let threads = thread_count(self.options.threads);
        if self.options.preset == Preset::Nvcomp { threads.max(WAITING) } else { threads }
    }

    /// Encodes a window of chunks on the pool while this thread writes the window before it.
    fn run(
        &mut self,
        encoder: &Encoder<'_>,
        threads: usize,
        items: &mut [Item<'_>],
        frames: &mut [Vec<Frame>; 2],
        meter: &mut Meter,
    ) -> Result<()> {
        let jobs: Vec<Job> = (items.iter().enumerate())
            .flat_map(|(item, i)| {
                (0..chunks_of(&i.large.view)).map(move |chunk| Job { item, chunk })
            })
            .collect();
        let window = self.window(encoder, threads, jobs.len());
        let [now, next] = frames;
        now.resize_with(now.len().max(window), Frame::default);
        next.resize_with(next.len().max(window), Frame::default);
        let mut windows = jobs.chunks(window);
        let mut current = windows.next().unwrap_or(&[]);
        encoder.window(current, items, now);
        while !current.is_empty() {
            let following = windows.next().unwrap_or(&[]);
            let mut records = Vec::with_capacity(current.len());
            let shared_items: &[Item<'_>] = items;
            let mut write = || {
                current.iter().zip(now.iter_mut()).try_for_each(|(job, frame)| {
                    records.push(self.put_frame(job, shared_items, frame, meter)?);
                    Ok(())
                })
            };
            let written = match encoder.pool {
                None => write().map(|()| encoder.window(following, shared_items, next)),
                Some(pool) => pool.in_place_scope(|s| {
                    let next = &mut *next;
                    s.spawn(move |_| encoder.window(following, shared_items, next));
                    write()
                }),
            };
            for (job, (record, shared)) in current.iter().zip(records) {
                items[job.item].records.push(record);
                items[job.item].shared |= shared;
            }
            written?;
            std::mem::swap(now, next);
            current = following;
        }
        Ok(())
    }

    /// Bytes of buffers to keep within.
    fn memory(&self) -> usize {
        self.options.memory.unwrap_or(256 << 20)
    }

    /// Chunks of a window.
    fn window(&self, encoder: &Encoder<'_>, threads: usize, jobs: usize) -> usize {
        let behind = if self.out.is_behind() { Behind::BUFFERS } else { 0 };
        let memory = self.memory().saturating_sub(behind);
        // A frame is at most about twice a chunk's 512 KiB, and there are two windows; a parent's
        // values are one chunk more.
        let budget = match encoder.parent {
            Some(_) => memory / (3 << 20),
            None => memory / (2 << 20),
        };
        let remote = encoder.parent.is_some_and(Parent::is_remote);
        let wanted = if remote {
            // As much as can be, so that there are many requests at once.
            budget
        } else if encoder.pool.is_none() {
            1
        } else {
            (8 * threads).min(budget)
        };
        let least = if encoder.pool.is_none() { 1 } else { threads };
        wanted.max(least).min(jobs.max(1))
    }

    /// Writes an encoded chunk: its record, and whether it uses shared tables.
    fn put_frame(
        &mut self,
        job: &Job,
        items: &[Item<'_>],
        frame: &mut Frame,
        meter: &mut Meter,
    ) -> Result<(ChunkRecord, bool)> {
        let item = &items[job.item];
        let missing = || Err(s4_format::Error::corrupt("chunk was not encoded")).at(&self.name);
        let chunk = frame.chunk.take().unwrap_or_else(missing)?;
        let of = ChunkOf {
            dtype: item.large.view.dtype,
            bytes: item.large.view.data.len() as u64,
            group: item.large.group,
            plan: &item.plan,
            chunk: job.chunk,
        };
        let record = self.put_chunk(&of, &chunk, &frame.bytes, meter)?;
        Ok((record, chunk.shared))
    }

    /// Writes the frame of a chunk; gives its record.
    pub(crate) fn put_chunk(
        &mut self,
        of: &ChunkOf<'_>,
        chunk: &EncodedChunk,
        frame: &[u8],
        meter: &mut Meter,
    ) -> Result<ChunkRecord> {
        let (object, offset) = self.out.chunk(of.group, frame)?;
        let width = of.dtype.value_width();
        let size = (width as u64) << of.plan.chunk_log2;
        let bytes = size.min(of.bytes - of.chunk * size);
        let values = bytes / width as u64;
        if chunk.plain {
            self.totals.plain(values, chunk.len as u64);
        } else {
            let plan = &of.plan.plan;
            let planes = Planes::new(plan.layout, width, 0).at(&self.name)?.sizes().len();
            let streams = &chunk.streams[..planes];
            self.totals.chunk(plan, values, streams);
            let codecs = streams.iter().map(|s| s.codec);
            let closed = |c: &CodecId| self.closed.iter().any(|k| k.codec == *c);
            self.closed_used.extend(codecs.filter(closed));
        }
        meter.add(bytes)?;
        Ok(ChunkRecord {
            offset,
            object,
            len: u32::try_from(chunk.len).unwrap_or(u32::MAX),
            plain: chunk.plain,
            crc_encoded: chunk.crc_encoded,
            crc_raw: chunk.crc_raw,
        })
    }
}

impl Encoder<'_> {
    /// Runs `work` on all of `list`, on the pool if there is one.
    fn each<T: Send>(&self, list: &mut [T], work: impl Fn(&mut T) + Sync + Send) {
        match self.pool {
            Some(pool) if list.len() > 1 => {
                pool.install(|| list.par_iter_mut().for_each(work));
            }
            _ => list.iter_mut().for_each(work),
        }
    }

    fn plan<'a>(&self, preset: Preset, tensors: Vec<Large<'a>>) -> Result<Vec<Item<'a>>> {
        struct Planning<'a> {
            large: Large<'a>,
            sample: Vec<u8>,
            plan: Result<Option<TensorPlan>>,
        }
        let mut items = Vec::with_capacity(tensors.len());
        let mut tensors = tensors.into_iter().peekable();
        while tensors.peek().is_some() {
            let batch = tensors.by_ref().take(PLANNED);
            let mut batch: Vec<_> =
                batch.map(|large| Planning { large, sample: vec![], plan: Ok(None) }).collect();
            if let Some(parent) = self.parent.filter(|p| p.is_remote()) {
                let mut ranges = vec![];
                for p in &mut batch {
                    sample_ranges(&p.large, &mut p.sample, &mut ranges);
                }
                parent.read(&mut ranges)?;
            }
            self.each(&mut batch, |p| {
                p.plan = self.plan_one(preset, &p.large, &mut p.sample).map(Some);
            });
            for p in batch {
                // Every one was planned.
                if let Some(plan) = p.plan? {
                    items.push(Item { large: p.large, plan, records: vec![], shared: false });
                }
            }
        }
        Ok(items)
    }

    fn plan_one(
        &self,
        preset: Preset,
        large: &Large<'_>,
        sample: &mut Vec<u8>,
    ) -> Result<TensorPlan> {
        let &Large { name, ref view, role, .. } = large;
        let before = match (self.parent, large.parent) {
            (Some(parent), Some(tensor)) => {
                if !parent.is_remote() {
                    let mut ranges = vec![];
                    sample_ranges(large, sample, &mut ranges);
                    parent.read(&mut ranges)?;
                }
                Some(ParentSample { manifest: parent.digest(), tensor, values: sample })
            }
            _ => None,
        };
        let job = PlanJob { preset, view, parent: before.as_ref(), role };
        #[cfg(test)]
        crate::roles::tests::planned(name, &job);
        let plan = self.scratch.with(|scratch| self.engine.plan(&job, scratch));
        plan.map_err(|e| e.in_tensor(name)).at(self.target)
    }

    /// Encodes a window of chunks, each into its frame.
    fn window(&self, jobs: &[Job], items: &[Item<'_>], frames: &mut [Frame]) {
        let frames = &mut frames[..jobs.len()];
        if let Some(parent) = self.parent.filter(|p| p.is_remote()) {
            let mut ranges = vec![];
            for (job, frame) in jobs.iter().zip(&mut *frames) {
                ranges.extend(items[job.item].parent_range(job.chunk, &mut frame.parent));
            }
            if let Err(e) = parent.read(&mut ranges) {
                // The first frame is looked at first: nothing after it is written.
                frames.iter_mut().take(1).for_each(|f| f.chunk = None);
                if let Some(first) = frames.first_mut() {
                    first.chunk = Some(Err(e));
                }
                return;
            }
        }
        let mut work: Vec<_> = jobs.iter().zip(frames).collect();
        self.each(&mut work, |(job, frame)| {
            frame.chunk = Some(self.chunk(job.chunk, &items[job.item], frame));
        });
    }

    fn chunk(&self, chunk: u64, item: &Item<'_>, frame: &mut Frame) -> Result<EncodedChunk> {
        let Frame { bytes: to, parent, .. } = frame;
        let values = match self.parent.filter(|_| item.plan.plan.parent().is_some()) {
            None => None,
            Some(there) => Some(item.parent_values(there, chunk, parent)?),
        };
        to.clear();
        let (view, plan) = (&item.large.view, &item.plan);
        let job = EncodeJob { view, plan, chunk, inputs: values.as_slice() };
        self.scratch
            .with(|scratch| self.engine.encode(&job, scratch, to))
            .map_err(|e| e.in_chunk(chunk).in_tensor(item.large.name))
            .at(self.target)
    }
}

impl Item<'_> {
    pub(crate) fn coded(self) -> Coded {
        Coded { plan: self.plan, records: self.records, shared: self.shared }
    }

    /// First byte of a chunk's values, and the end.
    fn bytes_of(&self, chunk: u64) -> (usize, usize) {
        let view = &self.large.view;
        let size = view.dtype.value_width() << self.plan.chunk_log2;
        let from = chunk as usize * size;
        (from, view.data.len().min(from + size))
    }

    /// The values of `parent` that a chunk is a difference from: where they lie, or in `buffer`, which
    /// holds those of a remote parent already.
    fn parent_values<'b>(
        &self,
        parent: &'b dyn Parent,
        chunk: u64,
        buffer: &'b mut Vec<u8>,
    ) -> Result<&'b [u8]> {
        if parent.is_remote() {
            return Ok(buffer);
        }
        let (from, end) = self.bytes_of(chunk);
        if let Some((_, tensor)) = self.plan.plan.parent()
            && let Some(values) = parent.in_memory(tensor, from as u64, end - from)?
        {
            return Ok(values);
        }
        if let Some(range) = self.parent_range(chunk, buffer) {
            parent.read(&mut [range])?;
        }
        Ok(buffer)
    }

    /// The range of the parent that a chunk is a difference from, into a buffer of that size.
    fn parent_range<'b>(&self, chunk: u64, to: &'b mut Vec<u8>) -> Option<ParentRange<'b>> {
        let (_, tensor) = self.plan.plan.parent()?;
        let (from, end) = self.bytes_of(chunk);
        to.resize(end - from, 0);
        Some(ParentRange { tensor, first: from as u64, to })
    }
}

/// The ranges of its parent that a tensor's plan looks at, one after the other in `sample`.
fn sample_ranges<'b>(
    large: &Large<'_>,
    sample: &'b mut Vec<u8>,
    ranges: &mut Vec<ParentRange<'b>>,
) {
    let Some(tensor) = large.parent else { return };
    let dtype = large.view.dtype;
    let width = dtype.value_width() as u64;
    let probes = parent_probes(dtype, large.view.data.len() as u64 / width);
    let bytes: u64 = probes.iter().map(|p| (p.end - p.start) * width).sum();
    sample.resize(bytes as usize, 0);
    let mut rest = sample.as_mut_slice();
    for p in probes {
        let (to, later) = rest.split_at_mut(((p.end - p.start) * width) as usize);
        ranges.push(ParentRange { tensor, first: p.start * width, to });
        rest = later;
    }
}

impl Stock {
    fn lock(&self) -> MutexGuard<'_, Vec<Scratch>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn with<T>(&self, work: impl FnOnce(&mut Scratch) -> T) -> T {
        let mut scratch = self.lock().pop().unwrap_or_default();
        let out = work(&mut scratch);
        self.lock().push(scratch);
        out
    }
}

pub(crate) fn chunks_of(v: &TensorView<'_>) -> u64 {
    chunk_count((v.data.len() / v.dtype.value_width()) as u64, s4_engine::chunk_log2(v.dtype))
}
