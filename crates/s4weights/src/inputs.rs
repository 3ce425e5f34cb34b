//! The inputs of a writer's predictions, for the engine that encodes its tensors.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use rayon::ThreadPool;
use rayon::prelude::*;
use s4_engine::{
    Choice, Expected, Input, InputFrame, InputSize, Inputs, Moment, TensorError, TensorPlan,
    TensorValues, parent_probes,
};
use s4_format::Digest;
use s4_format::limits::ALIGN;

use crate::error::{Error, Result};
use crate::levels::{Level, Levels};
use crate::parent::{Parent, ParentRange};
use crate::reader::Reader;
use crate::recall::Recall;

/// Number of tensors whose samples are requested together where answers are slow. Up to this many are looked up
/// by one thread.
const TOGETHER: usize = 64;

/// Why a call of an engine failed.
pub(crate) enum Failure {
    /// What is wrong with a tensor, which is given by its index in the engine's call.
    Tensor(TensorError),
    /// A device or its driver failed.
    #[cfg(feature = "cuda")]
    Device(s4_engine::cuda::GpuError),
    /// An error of code that the engine called.
    Own(Error),
}

impl From<TensorError> for Failure {
    fn from(e: TensorError) -> Self {
        Self::Tensor(e)
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self::Own(e)
    }
}

#[cfg(feature = "cuda")]
impl From<s4_engine::cuda::CudaError> for Failure {
    fn from(e: s4_engine::cuda::CudaError) -> Self {
        use s4_engine::cuda::CudaError;
        match e {
            CudaError::Gpu(source) => Self::Device(source),
            CudaError::Format { tensor, source } => Self::Tensor(TensorError { tensor, source }),
        }
    }
}

impl Failure {
    /// The failure, in a list where the tensors of the call have these indices.
    pub(crate) fn among(self, numbers: &[usize]) -> Self {
        match self {
            Self::Tensor(e) => {
                let tensor = numbers.get(e.tensor).copied().unwrap_or(e.tensor);
                Self::Tensor(TensorError { tensor, ..e })
            }
            other => other,
        }
    }

    /// Names the target and, by its index in the engine's call, the tensor.
    pub(crate) fn named<'a>(
        self,
        target: &str,
        name: impl FnOnce(usize) -> Option<&'a str>,
    ) -> Error {
        let target = target.to_owned();
        match self {
            Self::Own(e) => e,
            #[cfg(feature = "cuda")]
            Self::Device(source) => Error::Device { target, source },
            Self::Tensor(TensorError { tensor, source }) => {
                let source = match name(tensor) {
                    Some(name) => source.in_tensor(name),
                    None => source,
                };
                Error::Format { target, source }
            }
        }
    }
}

/// The inputs that some tensors may be predicted from: the parent's values and the tensors' moments.
pub(crate) struct ParentInputs<'a> {
    parent: Option<&'a dyn Parent>,
    pool: Option<&'a ThreadPool>,
    tensors: &'a [TensorValues<'a>],
    /// For each tensor, the number of the parent's tensor that it may be a delta of.
    numbers: &'a [Option<u32>],
    /// For each tensor that is a delta, where the parent's values are; empty until it is planned.
    places: Vec<Option<Place<'a>>>,
    /// What earlier saves noted about the tensors, and the tensors' names.
    recall: Option<(&'a Recall, &'a [&'a str])>,
    /// For each tensor, the choice to try first.
    choices: &'a [Option<Choice>],
    /// For each tensor, its moments, if it may be predicted from them.
    moments: &'a [Vec<Moment<'a>>],
    /// Whether values that are quick to get are read late, by the threads that need them.
    late: bool,
}

/// Where the parent's values are that a tensor is predicted from.
pub(crate) enum Place<'a> {
    /// In frames that are quick to get and that the engine decodes.
    Frames(Vec<Level<'a>>),
    /// Wherever the parent has them: it is asked for the values.
    Values { tensor: u32, chunk_log2: u8 },
}

impl<'a> Place<'a> {
    /// Reads what is known of a parent's tensors whose frames are quick to get: all in one call, since one request
    /// can read adjacent data.
    pub(crate) fn prepare(parent: &dyn Parent, tensors: impl Iterator<Item = u32>) -> Result<()> {
        let mut readers: Vec<(&Reader, Vec<usize>)> = vec![];
        for tensor in tensors {
            let Some(reader) = parent.frames_of(tensor) else { continue };
            match readers.iter_mut().find(|(known, _)| ptr::eq(*known, reader)) {
                Some((_, tensors)) => tensors.push(tensor as usize),
                None => readers.push((reader, vec![tensor as usize])),
            }
        }
        readers.iter().try_for_each(|(reader, tensors)| reader.prepare(tensors))
    }

    /// For each plan of a delta, where its parent's values are. A device decodes frames itself if
    /// there are any; they are prepared.
    pub(crate) fn find(
        parent: Option<&'a dyn Parent>,
        plans: &[TensorPlan],
        on_device: bool,
        pool: Option<&ThreadPool>,
    ) -> Result<Vec<Option<Self>>> {
        let place = |plan: &TensorPlan| {
            let Some((parent, (_, tensor))) = parent.zip(plan.plan.parent()) else {
                return Ok(None);
            };
            let chunk_log2 = plan.chunk_log2;
            let levels = match parent.frames_of(tensor).filter(|_| on_device) {
                Some(reader) => Levels::of(reader, tensor as usize)?.for_device(),
                None => None,
            };
            // Where contexts come from moments, the parent's reader decodes the values.
            let alike = |l: &Vec<Level<'_>>| {
                l[0].spec().chunk_log2 == chunk_log2 && !l.iter().any(Level::has_moment_contexts)
            };
            Ok(Some(match levels.filter(alike) {
                Some(levels) => Self::Frames(levels),
                None => Self::Values { tensor, chunk_log2 },
            }))
        };
        match pool.filter(|_| on_device && plans.len() > TOGETHER) {
            Some(pool) => pool.install(|| plans.par_iter().map(place).collect()),
            None => plans.iter().map(place).collect(),
        }
    }
}

impl<'a> ParentInputs<'a> {
    pub(crate) fn new(
        parent: Option<&'a dyn Parent>,
        pool: Option<&'a ThreadPool>,
        tensors: &'a [TensorValues<'a>],
        numbers: &'a [Option<u32>],
    ) -> Self {
        Self {
            parent,
            pool,
            tensors,
            numbers,
            places: vec![],
            recall: None,
            choices: &[],
            moments: &[],
            late: true,
        }
    }

    /// With the moments of the tensors.
    pub(crate) fn with_moments(self, moments: &'a [Vec<Moment<'a>>]) -> Self {
        Self { moments, ..self }
    }

    /// With what earlier saves noted about the tensors, which have these names.
    pub(crate) fn with_recall(self, recall: &'a Recall, names: &'a [&'a str]) -> Self {
        Self { recall: Some((recall, names)), ..self }
    }

    /// With the choice to try first for each tensor.
    pub(crate) fn with_choices(self, choices: &'a [Option<Choice>]) -> Self {
        Self { choices, ..self }
    }

    /// With where the parent's values are ([`Place::find`]). All inputs of a device are read before it begins.
    pub(crate) fn with_places(self, places: Vec<Option<Place<'a>>>, on_device: bool) -> Self {
        Self { places, late: !on_device, ..self }
    }

    fn is_remote(&self) -> bool {
        self.parent.is_some_and(Parent::is_remote)
    }

    fn read_ranges(&self, ranges: &mut [ParentRange<'_>]) -> Result<()> {
        match self.parent.filter(|_| !ranges.is_empty()) {
            Some(parent) => parent.read(ranges),
            None => Ok(()),
        }
    }

    /// The remembered bytes of what [`ParentInputs::sample_ranges`] names, if there are any.
    fn remembered(&self, i: usize) -> Option<&'a [u8]> {
        // From a remote parent, more is read together with the sample.
        let (recall, names) =
            self.recall.filter(|_| self.numbers[i].is_some() && !self.is_remote())?;
        let bytes = probes_of(&self.tensors[i]).map(|probe| probe.end - probe.start).sum::<u64>();
        recall.sample(names[i], bytes as usize)
    }

    /// Adds the ranges of the parent that a tensor's plan looks at; they are read to `sample`, one
    /// after the other.
    fn sample_ranges<'b>(
        &self,
        i: usize,
        sample: &'b mut Vec<u8>,
        ranges: &mut Vec<ParentRange<'b>>,
    ) {
        let (Some(tensor), t) = (self.numbers[i], &self.tensors[i]) else { return };
        let bytes: u64 = probes_of(t).map(|p| p.end - p.start).sum();
        sample.resize(bytes as usize, 0);
        let mut rest = sample.as_mut_slice();
        for p in probes_of(t) {
            let (to, later) = rest.split_at_mut((p.end - p.start) as usize);
            ranges.push(ParentRange { tensor, first: p.start, to });
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

    fn place(&self, tensor: usize) -> Option<&Place<'a>> {
        self.places.get(tensor)?.as_ref()
    }

    /// Where the parent's values for a chunk are: tensor, first byte there, and number of bytes.
    /// `None` if they are not in values.
    fn range(&self, i: usize, chunk: u64) -> Option<(u32, u64, usize)> {
        let Some(&Place::Values { tensor, chunk_log2 }) = self.place(i) else { return None };
        let t = &self.tensors[i];
        let size = (t.dtype.value_width() as u64) << chunk_log2;
        let bytes = size.min(t.values.bytes() - chunk * size);
        Some((tensor, chunk * size, bytes as usize))
    }

    /// Reads the frames of those chunks whose parents are in frames; none for the others.
    fn frames<'b>(&'b self, chunks: &[(usize, u64)]) -> Result<Vec<Vec<InputFrame<'b>>>> {
        let mut parts = vec![];
        for (request, &(i, chunk)) in chunks.iter().enumerate() {
            let Some(Place::Frames(levels)) = self.place(i) else { continue };
            let part = |level: &'b Level<'a>| {
                let record = &level.block.records[chunk as usize];
                (request, chunk, level, level.reader.frame_in_memory(record))
            };
            parts.extend(needed(levels, chunk).map(part));
        }
        // Starting threads takes longer than finding what is in memory.
        let mut unread: Vec<_> = parts.iter_mut().filter(|part| part.3.is_none()).collect();
        if !unread.is_empty() {
            self.each(&mut unread, |(_, chunk, level, bytes)| {
                *bytes = Some(level.reader.frame(&level.block.records[*chunk as usize])?);
                Ok(())
            })?;
        }
        let mut out: Vec<_> = chunks.iter().map(|_| vec![]).collect();
        for (request, chunk, level, bytes) in parts {
            let record = level.block.records[chunk as usize];
            let bytes = bytes.unwrap_or_default();
            out[request].push(InputFrame { spec: level.spec(), record, bytes });
        }
        Ok(out)
    }
}

/// The bytes of a tensor that are compared with its parent's.
fn probes_of(t: &TensorValues<'_>) -> impl Iterator<Item = Range<u64>> + use<> {
    let width = t.dtype.value_width() as u64;
    let probes = parent_probes(t.dtype, t.values.bytes() / width).into_iter();
    probes.map(move |p| p.start * width..p.end * width)
}

/// The levels whose frames a chunk needs, starting with the one that is not a delta.
fn needed<'a, 'b>(levels: &'b [Level<'a>], chunk: u64) -> impl Iterator<Item = &'b Level<'a>> {
    let deltas = levels.iter().take_while(|l| l.is_delta(chunk)).count();
    levels[..levels.len().min(deltas + 1)].iter().rev()
}

impl Inputs<Failure> for ParentInputs<'_> {
    fn parent(&self, tensor: usize) -> Option<(Digest, u32)> {
        Some((self.parent?.digest(), self.numbers[tensor]?))
    }

    #[cfg(feature = "cuda")]
    fn memory(&self) -> Vec<s4_engine::DeviceMemory> {
        self.moments.iter().flatten().filter_map(|m| m.values.memory()).collect()
    }

    fn moments(&self, tensor: usize) -> &[Moment<'_>] {
        self.moments.get(tensor).map_or(&[], Vec::as_slice)
    }

    fn expected(&self, tensor: usize) -> Result<Option<Arc<Expected>>, Failure> {
        match self.parent.zip(self.numbers[tensor]) {
            Some((parent, number)) => Ok(parent.expected(number)?),
            None => Ok(None),
        }
    }

    fn choice(&self, tensor: usize) -> Option<Choice> {
        *self.choices.get(tensor)?
    }

    fn keeps_samples(&self) -> bool {
        self.recall.is_some_and(|(recall, _)| recall.keeps())
    }

    fn keep_sample(&self, tensor: usize, values: &[u8]) {
        if let Some((recall, names)) = self.recall {
            recall.keep(names[tensor], values);
        }
    }

    fn samples(&self, tensors: &[usize]) -> Result<Vec<Vec<u8>>, Failure> {
        let mut samples: Vec<(usize, Vec<u8>)> = tensors.iter().map(|&i| (i, vec![])).collect();
        let read = |some: &mut [(usize, Vec<u8>)]| {
            let mut ranges = vec![];
            for (i, sample) in some {
                match self.remembered(*i) {
                    Some(known) => sample.extend_from_slice(known),
                    None => self.sample_ranges(*i, sample, &mut ranges),
                }
            }
            self.read_ranges(&mut ranges)
        };
        if self.is_remote() {
            samples.chunks_mut(TOGETHER).try_for_each(read)?;
        } else if self.parent.is_some() {
            self.each(&mut samples, |one| read(std::slice::from_mut(one)))?;
        }
        Ok(samples.into_iter().map(|s| s.1).collect())
    }

    fn size(&self, tensor: usize, chunk: u64) -> InputSize {
        if let Some(Place::Frames(levels)) = self.place(tensor) {
            let sizes = needed(levels, chunk).map(|l| {
                u64::from(l.block.records[chunk as usize].len).next_multiple_of(ALIGN as u64)
            });
            return sizes.fold(InputSize::default(), |sum, bytes| InputSize {
                bytes: sum.bytes + bytes,
                frames: sum.frames + 1,
            });
        }
        let bytes = self.range(tensor, chunk).map_or(0, |r| r.2 as u64);
        InputSize { bytes, frames: 0 }
    }

    fn open(&self, chunks: &[(usize, u64)]) -> Result<Vec<Input<'_>>, Failure> {
        let frames = self.frames(chunks)?;
        let mut values: Vec<Vec<u8>> = chunks.iter().map(|_| vec![]).collect();
        if self.is_remote() || !self.late {
            let mut ranges = vec![];
            for (&(i, chunk), to) in chunks.iter().zip(&mut values) {
                let Some((tensor, first, len)) = self.range(i, chunk) else { continue };
                to.resize(len, 0);
                ranges.push(ParentRange { tensor, first, to });
            }
            match self.is_remote() {
                true => self.read_ranges(&mut ranges)?,
                false => self.each(&mut ranges, |r| self.read_ranges(std::slice::from_mut(r)))?,
            }
        }
        let input = |(frames, values): (Vec<_>, Vec<u8>)| match (frames.is_empty(), values) {
            (false, _) => Input::Frames(frames),
            (true, values) if values.is_empty() => Input::Late,
            (true, values) => Input::Host(values.into()),
        };
        Ok(frames.into_iter().zip(values).map(input).collect())
    }

    fn read<'b>(
        &'b self,
        tensor: usize,
        chunk: u64,
        buffer: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], Failure> {
        let Some((parent, (number, first, len))) = self.parent.zip(self.range(tensor, chunk))
        else {
            return Ok(&[]);
        };
        if let Some(values) = parent.in_memory(number, first, len)? {
            return Ok(values);
        }
        buffer.resize(len, 0);
        parent.read(&mut [ParentRange { tensor: number, first, to: buffer }])?;
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_name_the_tensor_of_the_callers_list() {
        let failure =
            |tensor| Failure::from(TensorError { tensor, source: s4_format::Error::corrupt("x") });
        let named = |failure: Failure| match failure {
            Failure::Tensor(e) => e.tensor,
            _ => panic!("of a tensor"),
        };
        assert_eq!(named(failure(1).among(&[4, 7])), 7);
    }
}
