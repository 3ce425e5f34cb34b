//! Where the values come from that tensors on a device are differences from.

use bytes::Bytes;
use rayon::ThreadPool;
use rayon::prelude::*;
use s4_engine::cuda::{DeviceTensor, ParentChunk, ParentFrame, ParentSize, ParentValues};
use s4_engine::{ParentSample, Preset, Scratch, TensorPlan, parent_probes};
use s4_format::limits::ALIGN;

use super::Failure;
use super::chain::levels;
use crate::error::Result;
use crate::levels::Level;
use crate::parent::{Parent, ParentRange};

/// Least requests in flight at once where answers are slow.
const TOGETHER: usize = 64;

/// The parents of some tensors.
pub(super) struct Parents<'a> {
    parent: &'a dyn Parent,
    pool: Option<&'a ThreadPool>,
    tensors: &'a [DeviceTensor<'a>],
    /// For each tensor the number of the parent's tensor that it may be a difference from.
    numbers: &'a [Option<u32>],
    /// For each that is one: where its values are, once the plans are known.
    places: Vec<Option<Place<'a>>>,
}

enum Place<'a> {
    /// In frames that are quickly had.
    Frames(Vec<Level<'a>>),
    /// Wherever the parent finds them.
    Values { tensor: u32, chunk_log2: u8 },
}

impl<'a> Parents<'a> {
    pub(super) fn new(
        parent: &'a dyn Parent,
        pool: Option<&'a ThreadPool>,
        tensors: &'a [DeviceTensor<'a>],
        numbers: &'a [Option<u32>],
    ) -> Self {
        Self { parent, pool, tensors, numbers, places: vec![] }
    }

    /// Which tensors may be differences.
    pub(super) fn candidates(&self) -> Vec<bool> {
        self.numbers.iter().map(Option::is_some).collect()
    }

    /// The parents' values that plans look at, for tensors of a batch; empty for one without a parent.
    pub(super) fn samples(&self, batch: &[usize]) -> Result<Vec<Vec<u8>>> {
        let mut samples: Vec<(usize, Vec<u8>)> = batch.iter().map(|&i| (i, vec![])).collect();
        if self.parent.is_remote() {
            for some in samples.chunks_mut(TOGETHER) {
                let mut ranges = vec![];
                some.iter_mut().for_each(|(i, sample)| self.ranges(*i, sample, &mut ranges));
                self.parent.read(&mut ranges)?;
            }
        } else {
            self.each(&mut samples, |(i, sample)| {
                let mut ranges = vec![];
                self.ranges(*i, sample, &mut ranges);
                self.parent.read(&mut ranges)
            })?;
        }
        Ok(samples.into_iter().map(|s| s.1).collect())
    }

    fn ranges<'b>(&self, i: usize, sample: &'b mut Vec<u8>, ranges: &mut Vec<ParentRange<'b>>) {
        let (Some(tensor), t) = (self.numbers[i], &self.tensors[i]) else { return };
        let width = t.dtype.value_width() as u64;
        let probes = parent_probes(t.dtype, t.memory.bytes() / width);
        let bytes: u64 = probes.iter().map(|p| (p.end - p.start) * width).sum();
        sample.resize(bytes as usize, 0);
        let mut rest = sample.as_mut_slice();
        for p in probes {
            let (to, later) = rest.split_at_mut(((p.end - p.start) * width) as usize);
            ranges.push(ParentRange { tensor, first: p.start * width, to });
            rest = later;
        }
    }

    /// Runs `work` on all of a list, on the pool if there is one.
    fn each<T: Send>(
        &self,
        list: &mut [T],
        work: impl Fn(&mut T) -> Result<()> + Sync + Send,
    ) -> Result<()> {
        match self.pool {
            Some(pool) if list.len() > 1 => pool.install(|| list.par_iter_mut().try_for_each(work)),
            _ => list.iter_mut().try_for_each(work),
        }
    }

    /// Plans a tensor whose sample, and whose parent's, were fetched.
    pub(super) fn plan(
        &self,
        engine: &s4_engine::cuda::CudaEngine,
        preset: Preset,
        i: usize,
        (sample, parents): (&[u8], &[u8]),
        scratch: &mut Scratch,
    ) -> s4_format::Result<TensorPlan> {
        let t = &self.tensors[i];
        let what = (t.dtype, t.memory.bytes());
        match self.numbers[i] {
            None => engine.plan_sample(preset, what.0, what.1, sample, scratch),
            Some(tensor) => {
                let manifest = self.parent.digest();
                let parent = ParentSample { manifest, tensor, values: parents };
                engine.plan_difference(preset, what, sample, &parent, scratch)
            }
        }
    }

    /// Finds the frames of all that are differences.
    pub(super) fn find(&mut self, plans: &[TensorPlan]) -> Result<()> {
        let mut found = Vec::with_capacity(plans.len());
        for plan in plans {
            let Some((_, tensor)) = plan.plan.parent() else {
                found.push(None);
                continue;
            };
            let chunk_log2 = plan.chunk_log2;
            let reader = self.parent.frames_of(tensor);
            let levels = match reader {
                Some(reader) => {
                    reader.prepare(&[tensor as usize])?;
                    levels(reader, tensor as usize)?
                }
                None => None,
            };
            let alike = |l: &Vec<Level<'_>>| l[0].spec().chunk_log2 == chunk_log2;
            found.push(Some(match levels.filter(alike) {
                Some(levels) => Place::Frames(levels),
                None => Place::Values { tensor, chunk_log2 },
            }));
        }
        self.places = found;
        Ok(())
    }

    /// The levels whose frames a chunk needs, the one that is no delta first.
    fn needed<'b>(levels: &'b [Level<'a>], chunk: u64) -> impl Iterator<Item = &'b Level<'a>> {
        let deltas = levels.iter().take_while(|l| l.is_delta(chunk)).count();
        levels[..levels.len().min(deltas + 1)].iter().rev()
    }

    /// Number of the first byte of a chunk, and bytes.
    fn range(&self, i: usize, chunk: u64, chunk_log2: u8) -> (u64, usize) {
        let t = &self.tensors[i];
        let size = (t.dtype.value_width() as u64) << chunk_log2;
        (chunk * size, size.min(t.memory.bytes() - chunk * size) as usize)
    }

    /// The parts of a request, each with what is known of it without reading.
    fn parts(&self, chunks: &[(usize, u64)]) -> Vec<Part<'_>> {
        let mut parts = vec![];
        for (request, &(i, chunk)) in chunks.iter().enumerate() {
            match self.places.get(i).and_then(Option::as_ref) {
                Some(Place::Frames(levels)) => {
                    parts.extend(Self::needed(levels, chunk).map(|level| Part {
                        request,
                        chunk,
                        level: Some(level),
                        bytes: vec![].into(),
                    }))
                }
                _ => parts.push(Part { request, chunk, level: None, bytes: Bytes::new() }),
            }
        }
        parts
    }

    /// Reads the values of chunks that are not in frames.
    fn values(&self, chunks: &[(usize, u64)]) -> Result<Vec<Bytes>> {
        let mut out: Vec<Vec<u8>> = chunks.iter().map(|_| vec![]).collect();
        let mut ranges = vec![];
        for (&(i, chunk), to) in chunks.iter().zip(&mut out) {
            let Some(Some(Place::Values { tensor, chunk_log2 })) = self.places.get(i) else {
                continue;
            };
            let (first, len) = self.range(i, chunk, *chunk_log2);
            to.resize(len, 0);
            ranges.push(ParentRange { tensor: *tensor, first, to });
        }
        if self.parent.is_remote() {
            self.parent.read(&mut ranges)?;
        } else {
            self.each(&mut ranges, |r| self.parent.read(std::slice::from_mut(r)))?;
        }
        Ok(out.into_iter().map(Bytes::from).collect())
    }
}

/// A frame to be read, or values.
struct Part<'a> {
    /// Place of the chunk among those that are asked for.
    request: usize,
    chunk: u64,
    level: Option<&'a Level<'a>>,
    bytes: Bytes,
}

impl ParentValues<Failure> for Parents<'_> {
    fn size(&self, tensor: usize, chunk: u64) -> ParentSize {
        match self.places.get(tensor).and_then(Option::as_ref) {
            Some(Place::Frames(levels)) => {
                let sizes = Self::needed(levels, chunk).map(|l| {
                    u64::from(l.block.records[chunk as usize].len).next_multiple_of(ALIGN as u64)
                });
                sizes.fold(ParentSize::default(), |sum, bytes| ParentSize {
                    bytes: sum.bytes + bytes,
                    frames: sum.frames + 1,
                })
            }
            Some(Place::Values { chunk_log2, .. }) => {
                let bytes = self.range(tensor, chunk, *chunk_log2).1 as u64;
                ParentSize { bytes, frames: 0 }
            }
            None => ParentSize::default(),
        }
    }

    fn get(&self, chunks: &[(usize, u64)]) -> Result<Vec<ParentChunk<'_>>, Failure> {
        let mut parts = self.parts(chunks);
        self.each(&mut parts, |part| {
            if let Some(level) = part.level {
                let record = &level.block.records[part.chunk as usize];
                part.bytes = level.reader.frame(record)?;
            }
            Ok(())
        })?;
        let values = self.values(chunks)?;
        let mut out: Vec<_> = values.into_iter().map(ParentChunk::Host).collect();
        for part in parts {
            let Some(level) = part.level else { continue };
            let record = level.block.records[part.chunk as usize];
            let frame = ParentFrame { spec: level.spec(), record, bytes: part.bytes };
            match &mut out[part.request] {
                ParentChunk::Frames(frames) => frames.push(frame),
                other => *other = ParentChunk::Frames(vec![frame]),
            }
        }
        Ok(out)
    }

    fn copy(&self, parts: Vec<(&mut [u8], Bytes)>) {
        let mut parts = parts;
        // Copying cannot fail.
        let _ = self.each(&mut parts, |(to, bytes)| {
            to.copy_from_slice(bytes);
            Ok(())
        });
    }
}
