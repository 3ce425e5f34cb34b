//! Plans and encodes tensors on an engine, while the caller's thread writes the finished chunks.

use std::panic::resume_unwind;
use std::sync::Arc;

use rayon::ThreadPool;
use s4_engine::{
    EncodedChunk, EncodedFrame, Engine, Inputs, Jobs, Moment, Preset, TensorPlan, TensorValues,
};
use s4_format::index::{Block, chunk_count};
use s4_format::layout::Planes;
use s4_format::{ChunkRecord, CodecId, DType, crc32c};

use crate::alike::Alike;
use crate::behind::Behind;
use crate::copies::{Original, Originals};
use crate::error::{At, Error, Result};
use crate::inputs::{Failure, ParentInputs};
use crate::interrupt;
use crate::options::{Meter, thread_count};
use crate::parallel::{pool, worth};
use crate::parent::Parent;
use crate::recall::Recall;
use crate::write::TensorSource;
use crate::writer::Writer;

/// With at least this many threads and bytes of values, hashing and writing move to background
/// threads.
const BEHIND: (usize, u64) = (4, 64 << 20);

/// By default, bytes of frames that may wait in the engine's own memory until they are written:
/// what a file takes in some milliseconds.
const AHEAD: usize = 64 << 20;

/// With this many encoding threads, a single copying thread becomes the bottleneck.
const COPIERS: usize = 8;

/// Bytes of values that take longer to encode than a thread takes to start.
const THREAD_BYTES: u64 = 1 << 20;

/// How many tensors on devices are planned together: at first, when nothing else can be done
/// meanwhile, and at most. Later ones are planned while those before them are encoded, since with
/// many tensors planning takes as long as encoding.
const PLANNED: (usize, usize) = (256, 2048);

/// Fewest encoding threads where a device codes the planes of values in host memory: the threads
/// mostly wait for it.
const WAITING: usize = 64;

/// Tensors with chunks of their own, to be written together: all in host memory, or all on devices.
#[derive(Clone, Default)]
pub(crate) struct Run<'a> {
    pub(crate) names: Vec<&'a str>,
    pub(crate) tensors: Vec<TensorValues<'a>>,
    pub(crate) groups: Vec<u8>,
    /// For each tensor, the number of the parent's tensor that it may be a delta of.
    pub(crate) parents: Vec<Option<u32>>,
    /// For each tensor, its moments, if it may be predicted from them. Empty if no tensor has any.
    pub(crate) moments: Vec<Vec<Moment<'a>>>,
}

impl<'a> Run<'a> {
    /// Adds a tensor. `parent` is the number of the parent's tensor that it may be a delta of.
    pub(crate) fn push(
        &mut self,
        source: &TensorSource<'a>,
        values: TensorValues<'a>,
        parent: Option<u32>,
    ) {
        self.names.push(source.name);
        self.tensors.push(values);
        self.groups.push(source.group);
        self.parents.push(parent);
    }

    /// The tensors at these indices.
    fn only(&self, numbers: &[usize]) -> Self {
        fn pick<T: Clone>(from: &[T], numbers: &[usize]) -> Vec<T> {
            numbers.iter().filter_map(|&i| from.get(i)).cloned().collect()
        }
        Self {
            names: pick(&self.names, numbers),
            tensors: pick(&self.tensors, numbers),
            groups: pick(&self.groups, numbers),
            parents: pick(&self.parents, numbers),
            moments: pick(&self.moments, numbers),
        }
    }

    /// Splits the run into parts: the first of `first` tensors, each later one of twice as many as
    /// the part before it, at most `most`.
    fn parts(&self, first: usize, most: usize) -> Vec<Self> {
        let (mut parts, mut start, mut count) = (vec![], 0, first);
        while start < self.tensors.len() {
            let range = start..(start + count).min(self.tensors.len());
            (start, count) = (range.end, most.min(2 * count));
            parts.push(Self {
                names: self.names[range.clone()].to_vec(),
                tensors: self.tensors[range.clone()].to_vec(),
                groups: self.groups[range.clone()].to_vec(),
                parents: self.parents[range.clone()].to_vec(),
                moments: self.moments.get(range).unwrap_or_default().to_vec(),
            });
        }
        parts
    }
}

/// A tensor whose chunks are written.
pub(crate) struct Coded {
    pub(crate) plan: TensorPlan,
    pub(crate) records: Vec<ChunkRecord>,
    /// Whether any chunk uses the plan's shared tables.
    pub(crate) shared: bool,
}

impl Coded {
    /// The tensor's block, without its offset, and the bytes of it. `target` names the output in
    /// errors.
    pub(crate) fn block(&self, name: &str, target: &str) -> Result<(Block, Vec<u8>)> {
        let mut bytes = vec![];
        let side = self.plan.side_data(self.shared).at(target)?;
        side.write(&mut bytes).at(target)?;
        self.records.iter().for_each(|r| r.write(&mut bytes));
        let len = u32::try_from(bytes.len());
        let len = len.map_err(|_| Error::Argument(format!("tensor `{name}` is too large")))?;
        Ok((Block { offset: 0, len, crc: crc32c(&bytes) }, bytes))
    }
}

/// What is needed to count a chunk in the totals.
struct ChunkOf<'a> {
    dtype: DType,
    /// Bytes of the tensor.
    bytes: u64,
    plan: &'a TensorPlan,
    /// Number of the chunk.
    chunk: u64,
}

impl Writer {
    /// Plans and encodes tensors, in order, and appends their chunks.
    pub(crate) fn encode(&mut self, run: &Run<'_>, meter: &mut Meter) -> Result<Vec<Coded>> {
        let done = self.encode_where_they_are(run, meter);
        done.map_err(|e| e.named(&self.name, |i| run.names.get(i).copied()))
    }

    /// Encodes copies, rounded or equal, of tensors that are already written, and appends their
    /// chunks. All copies are in one place, and their originals are there too, or in host memory.
    pub(crate) fn encode_copies(
        &mut self,
        run: &Run<'_>,
        plans: Vec<TensorPlan>,
        originals: Vec<Original<'_>>,
        meter: &mut Meter,
    ) -> Result<Vec<Coded>> {
        if run.tensors.is_empty() {
            return Ok(vec![]);
        }
        let inputs = Originals { tensors: &run.tensors, originals };
        let on_device = run.tensors.iter().any(|t| t.values.memory().is_some());
        let threads = self.encoding_threads(on_device);
        let chunks = run.tensors.iter().map(chunks_of).sum::<u64>();
        let chunks = usize::try_from(chunks).unwrap_or(usize::MAX);
        let pool = pool(if on_device { threads } else { threads.min(chunks) })?;
        let place = (pool.as_ref(), threads, on_device);
        let engine = Arc::clone(&self.engine);
        #[cfg(feature = "cuda")]
        let done = match self.options.engine.clone().filter(|_| on_device) {
            Some(engine) => self.encode_planned(&*engine, run, plans, &inputs, place, meter),
            None => self.encode_planned(&*engine, run, plans, &inputs, place, meter),
        };
        #[cfg(not(feature = "cuda"))]
        let done = self.encode_planned(&*engine, run, plans, &inputs, place, meter);
        done.map_err(|e| e.named(&self.name, |i| run.names.get(i).copied()))
    }

    fn encode_where_they_are(
        &mut self,
        run: &Run<'_>,
        meter: &mut Meter,
    ) -> Result<Vec<Coded>, Failure> {
        #[cfg(feature = "cuda")]
        if let Some(engine) = self.options.engine.clone()
            && run.tensors.iter().any(|t| t.values.memory().is_some())
        {
            return self.encode_by(&*engine, run, true, meter);
        }
        let engine = Arc::clone(&self.engine);
        self.encode_by(&*engine, run, false, meter)
    }

    fn encode_by<G: Engine + Sync>(
        &mut self,
        engine: &G,
        run: &Run<'_>,
        on_device: bool,
        meter: &mut Meter,
    ) -> Result<Vec<Coded>, Failure>
    where
        Failure: From<G::Error>,
    {
        let tensors = &run.tensors;
        let chunks = tensors.iter().map(chunks_of).sum::<u64>();
        let chunks = usize::try_from(chunks).unwrap_or(usize::MAX);
        let values = tensors.iter().map(|t| t.values.bytes()).sum::<u64>();
        let threads = self.encoding_threads(on_device);
        let pool = match on_device || self.waits() {
            true => pool(if on_device { threads } else { threads.min(chunks) })?,
            // More threads than chunks would only wait.
            false => pool(worth(threads.min(chunks), values / THREAD_BYTES))?,
        };
        let (parent, preset) = (self.options.parent.clone(), self.options.preset);
        #[cfg(test)]
        crate::roles::tests::planned(run);
        let (pool, parent) = (pool.as_ref(), parent.as_deref());
        let place = (pool, threads, on_device);
        let parts = if on_device { run.parts(PLANNED.0, PLANNED.1) } else { vec![run.clone()] };
        let (recall, alike) = (self.recall.clone(), Arc::clone(&self.alike));
        let known = Remembered { recall: recall.as_deref(), alike: &alike };
        let plan =
            |i: usize| plan_part(engine, preset, &parts[i], (parent, known), (pool, on_device));
        let interrupt = interrupt::current();
        std::thread::scope(|scope| {
            let (mut coded, mut planned) = (vec![], None);
            for (i, part) in parts.iter().enumerate() {
                let first = coded.len();
                let (inputs, plans) = planned
                    .take()
                    .unwrap_or_else(|| plan(i))
                    .map_err(|e: Failure| e.after(first))?;
                // The next part is planned meanwhile, so a device waits for the first plans only.
                let next = (i + 1 < parts.len()).then(|| {
                    let interrupt = interrupt.clone();
                    scope.spawn(move || {
                        interrupt::adopt(interrupt);
                        plan(i + 1)
                    })
                });
                let done = self.encode_planned(engine, part, plans, &inputs, place, meter);
                coded.extend(done.map_err(|e| e.after(first))?);
                planned = next.map(|next| next.join().unwrap_or_else(|p| resume_unwind(p)));
            }
            Ok(coded)
        })
    }

    /// Encodes tensors by their plans, with threads of a pool, and appends their chunks.
    fn encode_planned<G: Engine>(
        &mut self,
        engine: &G,
        run: &Run<'_>,
        plans: Vec<TensorPlan>,
        inputs: &dyn Inputs<Failure>,
        (pool, threads, on_device): (Option<&ThreadPool>, usize, bool),
        meter: &mut Meter,
    ) -> Result<Vec<Coded>, Failure>
    where
        Failure: From<G::Error>,
    {
        let Run { tensors, groups, .. } = run;
        let chunks = tensors.iter().map(chunks_of).sum::<u64>();
        let chunks = usize::try_from(chunks).unwrap_or(usize::MAX);
        let values = tensors.iter().map(|t| t.values.bytes()).sum::<u64>();
        let much = threads >= BEHIND.0 && values >= BEHIND.1;
        if on_device || much && self.memory() >= 2 * Behind::BUFFERS {
            let ahead = self.options.ahead.unwrap_or(AHEAD);
            self.out.write_behind(threads, ahead)?;
        }
        // With few encoding threads, this thread alone copies as fast.
        let copiers = pool.filter(|_| on_device || threads >= COPIERS);
        let threads = if pool.is_some() { threads } else { 1 };
        let parent = self.options.parent.clone();
        let window = self.window(parent.as_deref(), threads).min(chunks.max(1));
        let mut coded: Vec<(Vec<_>, bool)> = tensors.iter().map(|_| (vec![], false)).collect();
        let jobs = Jobs { tensors, plans: &plans, inputs, pool, window };
        let done = engine.encode(&jobs, |frames: &[EncodedFrame<'_>]| {
            let places = self.out.chunks(frames, groups, copiers)?;
            for (frame, place) in frames.iter().zip(places) {
                let t = &tensors[frame.tensor];
                let of = ChunkOf {
                    dtype: t.dtype,
                    bytes: t.values.bytes(),
                    plan: &plans[frame.tensor],
                    chunk: frame.chunk,
                };
                let record = self.count_chunk(&of, &frame.encoded, place, meter)?;
                let (records, shared) = &mut coded[frame.tensor];
                records.push(record);
                *shared |= frame.encoded.shared;
            }
            Ok(())
        });
        // An error of the sink takes precedence over the errors that follow from it. After values
        // on devices, the caller is not kept waiting for the remaining writes.
        if done.is_err() || !on_device {
            self.out.write_here()?;
        }
        done.map(|()| {
            let coded = plans.into_iter().zip(coded);
            coded.map(|(plan, (records, shared))| Coded { plan, records, shared }).collect()
        })
    }

    /// How many threads encode. With preset `nvcomp` they wait for the device, which is fast only
    /// with many requests pending.
    fn encoding_threads(&self, on_device: bool) -> usize {
        let threads = thread_count(self.options.threads);
        if self.waits() && !on_device { threads.max(WAITING) } else { threads }
    }

    /// Whether threads that encode values of the host wait for a device.
    fn waits(&self) -> bool {
        self.options.preset == Preset::Nvcomp
    }

    /// The limit for buffers, in bytes.
    fn memory(&self) -> usize {
        self.options.memory.unwrap_or(256 << 20)
    }

    /// How many chunks are encoded at once.
    fn window(&self, parent: Option<&dyn Parent>, threads: usize) -> usize {
        let behind = if self.out.is_behind() { Behind::BUFFERS } else { 0 };
        let memory = self.memory().saturating_sub(behind);
        // A frame is at most about twice a chunk's 512 KiB, and there are two windows; a parent's
        // values are one chunk more.
        let budget = match parent {
            Some(_) => memory / (3 << 20),
            None => memory / (2 << 20),
        };
        let remote = parent.is_some_and(Parent::is_remote);
        let wanted = if remote {
            // As many as fit, so that many requests are in flight.
            budget
        } else if threads == 1 {
            1
        } else {
            (8 * threads).min(budget)
        };
        wanted.max(threads)
    }

    /// Counts a chunk whose frame is at this offset of this object; returns its record.
    fn count_chunk(
        &mut self,
        of: &ChunkOf<'_>,
        chunk: &EncodedChunk,
        (object, offset): (u32, u64),
        meter: &mut Meter,
    ) -> Result<ChunkRecord> {
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

/// Earlier choices, which are tried first.
#[derive(Clone, Copy)]
struct Remembered<'a> {
    /// Choices for the same tensors in earlier checkpoints.
    recall: Option<&'a Recall>,
    /// Choices for similar tensors of this checkpoint.
    alike: &'a Alike,
}

/// Plans tensors; returns the plans, with the inputs that deltas are predicted from.
fn plan_part<'a, G: Engine>(
    engine: &G,
    preset: Preset,
    part: &'a Run<'_>,
    (parent, Remembered { recall, alike }): (Option<&'a dyn Parent>, Remembered<'a>),
    (pool, on_device): (Option<&'a ThreadPool>, bool),
) -> Result<(ParentInputs<'a>, Vec<TensorPlan>), Failure>
where
    Failure: From<G::Error>,
{
    let Run { names, tensors, parents, moments, .. } = part;
    let chosen = |(name, parent): (&&str, &Option<u32>)| recall?.choice(name, parent.is_some());
    let known: Vec<_> = names.iter().zip(parents).map(chosen).collect();
    let mut left: Vec<_> = (0..tensors.len()).collect();
    let mut plans: Vec<(usize, TensorPlan)> = vec![];
    while !left.is_empty() {
        let round = alike.round(part, &known, &mut left);
        let Run { names, tensors, parents, moments, .. } = &part.only(&round.tensors);
        let inputs = ParentInputs::new(parent, pool, tensors, parents).with_moments(moments);
        let mut inputs = inputs.with_choices(&round.choices);
        if let Some(recall) = recall {
            inputs = inputs.with_recall(recall, names);
        }
        let planned = engine.plan(preset, tensors, &inputs, pool);
        let planned = planned.map_err(|e: Failure| e.among(&round.tensors))?;
        if let Some(recall) = recall {
            let chosen = names.iter().zip(parents).zip(&planned);
            recall
                .note(chosen.map(|((name, parent), plan)| (*name, parent.is_some(), plan.choice)));
        }
        let numbers = round.tensors.clone();
        alike.note(round, &planned);
        plans.extend(numbers.into_iter().zip(planned));
    }
    plans.sort_unstable_by_key(|(number, _)| *number);
    let plans: Vec<_> = plans.into_iter().map(|(_, plan)| plan).collect();
    let mut inputs = ParentInputs::new(parent, pool, tensors, parents).with_moments(moments);
    inputs.find(&plans, on_device)?;
    Ok((inputs, plans))
}

fn chunks_of(t: &TensorValues<'_>) -> u64 {
    chunk_count(t.values.bytes() / t.dtype.value_width() as u64, s4_engine::chunk_log2(t.dtype))
}
