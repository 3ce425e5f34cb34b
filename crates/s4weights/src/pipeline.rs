//! Encodes tensors on an engine, while the caller's thread writes the finished chunks.

use std::sync::Arc;

use rayon::ThreadPool;
use s4_engine::{
    EncodedChunk, EncodedFrame, Engine, Inputs, Jobs, Preset, TensorPlan, TensorValues, chunk_log2,
};
use s4_format::index::{Block, chunk_count};
use s4_format::layout::Planes;
use s4_format::{ChunkRecord, CodecId, DType, crc32c};

use crate::batch::Batch;
use crate::behind::Behind;
use crate::copies::{Original, Originals};
use crate::error::{At, Error, Result};
use crate::inputs::{Failure, ParentInputs};
use crate::parallel::{Pools, pool, thread_count, worth};
use crate::parent::Parent;
use crate::planning::Planned;
use crate::progress::Meter;
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

/// Fewest encoding threads where a device codes the planes of values in host memory: the threads
/// mostly wait for it.
const WAITING: usize = 64;

/// A tensor whose chunks are written.
pub(crate) struct Coded {
    pub(crate) plan: TensorPlan,
    pub(crate) records: Vec<ChunkRecord>,
    /// Whether any chunk uses the plan's shared tables.
    pub(crate) shared: bool,
}

impl Coded {
    /// `shared`: whether any chunk uses the plan's shared tables.
    fn new(plan: TensorPlan, records: Vec<ChunkRecord>, shared: bool) -> Self {
        let plan = if records.iter().all(|r| r.plain) { plan.of_plain_chunks() } else { plan };
        Self { plan, records, shared }
    }

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

/// Data for counting a chunk in the totals.
struct ChunkOf<'a> {
    dtype: DType,
    /// Bytes of the tensor.
    bytes: u64,
    plan: &'a TensorPlan,
    /// Number of the chunk.
    chunk: u64,
}

impl Writer {
    /// Encodes tensors that are planned, in order, and appends their chunks.
    pub(crate) fn encode_planned(
        &mut self,
        planned: Planned<'_>,
        pools: &Pools,
        meter: &mut Meter,
    ) -> Result<Vec<Coded>> {
        let Planned { batch, plans, places } = planned;
        let pool = pools.of(batch.is_on_device());
        let parent = self.options.parent.clone();
        let inputs = ParentInputs::new(parent.as_deref(), pool, &batch.tensors, &batch.parents);
        let inputs = inputs.with_moments(&batch.moments).with_places(places, batch.is_on_device());
        self.encode_where_they_are(&batch, plans, &inputs, pool, meter)
    }

    /// Encodes copies, rounded or equal, of tensors that are already written, and appends their
    /// chunks. All copies are in one place, and their originals are there too, or in host memory.
    pub(crate) fn encode_copies(
        &mut self,
        batch: &Batch<'_>,
        plans: Vec<TensorPlan>,
        originals: Vec<Original<'_>>,
        pools: &Pools,
        meter: &mut Meter,
    ) -> Result<Vec<Coded>> {
        let inputs = Originals { tensors: &batch.tensors, originals };
        self.encode_where_they_are(batch, plans, &inputs, pools.of(batch.is_on_device()), meter)
    }

    /// The threads for tensors.
    pub(crate) fn pools(&self, tensors: &[TensorValues<'_>]) -> Result<Pools> {
        let (devices, host): (Vec<_>, Vec<_>) = tensors.iter().copied().partition(on_device);
        let threads = self.encoding_threads(false).min(chunks(&host));
        // More threads than there is work for would only wait.
        let worth = worth(threads, bytes(&host) / THREAD_BYTES);
        Ok(Pools {
            host: pool(if self.waits() { threads } else { worth })?,
            devices: if devices.is_empty() { None } else { pool(self.encoding_threads(true))? },
        })
    }

    fn encode_where_they_are(
        &mut self,
        batch: &Batch<'_>,
        plans: Vec<TensorPlan>,
        inputs: &dyn Inputs<Failure>,
        pool: Option<&ThreadPool>,
        meter: &mut Meter,
    ) -> Result<Vec<Coded>> {
        let engine = Arc::clone(&self.engine);
        #[cfg(feature = "cuda")]
        let done = match self.options.engine.clone().filter(|_| batch.is_on_device()) {
            Some(engine) => self.encode_by(&*engine, batch, plans, inputs, pool, meter),
            None => self.encode_by(&*engine, batch, plans, inputs, pool, meter),
        };
        #[cfg(not(feature = "cuda"))]
        let done = self.encode_by(&*engine, batch, plans, inputs, pool, meter);
        done.map_err(|e| e.named(&self.name, |i| batch.names.get(i).copied()))
    }

    fn encode_by<G: Engine>(
        &mut self,
        engine: &G,
        batch: &Batch<'_>,
        plans: Vec<TensorPlan>,
        inputs: &dyn Inputs<Failure>,
        pool: Option<&ThreadPool>,
        meter: &mut Meter,
    ) -> Result<Vec<Coded>, Failure>
    where
        Failure: From<G::Error>,
    {
        let Batch { tensors, groups, .. } = batch;
        let (on_device, chunks) = (batch.is_on_device(), chunks(tensors));
        let threads = self.encoding_threads(on_device);
        let much = threads >= BEHIND.0 && bytes(tensors) >= BEHIND.1;
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
            coded.map(|(plan, (records, shared))| Coded::new(plan, records, shared)).collect()
        })
    }

    /// Number of threads that encode. With preset `nvcomp` they wait for the device, which is fast only
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

    /// Number of chunks that are encoded at the same time.
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

fn on_device(t: &TensorValues<'_>) -> bool {
    t.values.memory().is_some()
}

/// The number of chunks of tensors.
fn chunks(tensors: &[TensorValues<'_>]) -> usize {
    let chunks = |t: &TensorValues<'_>| {
        chunk_count(t.values.bytes() / t.dtype.value_width() as u64, chunk_log2(t.dtype))
    };
    usize::try_from(tensors.iter().map(chunks).sum::<u64>()).unwrap_or(usize::MAX)
}

/// The bytes of all values of tensors.
fn bytes(tensors: &[TensorValues<'_>]) -> u64 {
    tensors.iter().map(|t| t.values.bytes()).sum()
}

#[cfg(test)]
mod tests {
    use s4_format::side::SideKind;
    use s4_format::{LayoutId, Plan};

    use super::*;

    #[test]
    fn tensors_of_plain_chunks_have_no_side_data() {
        let record = |plain| ChunkRecord {
            offset: 16,
            object: 0,
            len: 8,
            plain,
            crc_encoded: 0,
            crc_raw: 0,
        };
        for coded in [false, true] {
            let plan = Plan::rank1(LayoutId::FIELDS);
            let mut plan = TensorPlan::new(plan, vec![], chunk_log2(DType::Float32));
            plan.side.push(SideKind::OFFSETS, vec![0; 640]).unwrap();
            let coded_plan = plan.plan.clone();
            let of = Coded::new(plan, vec![record(true), record(!coded)], false);
            let (_, block) = of.block("x", "a test").unwrap();
            assert_eq!(block.len() > 640, coded);
            assert_eq!(of.plan.plan == coded_plan, coded);
            assert_eq!(of.plan.plan.is_direct(), !coded);
        }
    }
}
