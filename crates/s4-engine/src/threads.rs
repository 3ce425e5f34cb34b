//! The CPU engine on its caller's threads: a window of chunks is encoded while the previous one is
//! handed on.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rayon::ThreadPool;
use s4_format::Error;

use crate::engine::{Chunk, EncodedFrame, Engine, Jobs, TensorValues, each};
use crate::error::TensorError;
use crate::inputs::{Input, Inputs, decode_frames, missing, missing_moments};
use crate::planner;
use crate::{
    CpuEngine, EncodeJob, EncodedChunk, Moment, ParentSample, PlanJob, Preset, Scratch, TensorPlan,
    TensorView, Values,
};

/// Tensors planned in one batch: the samples of this many parents are in memory at the same time.
const PLANNED: usize = 64;

/// Buffers that calls reuse, as many as threads needed at the same time.
#[derive(Debug, Default)]
pub(crate) struct ScratchPool {
    scratch: Mutex<Vec<Scratch>>,
    windows: Mutex<Vec<[Vec<Frame>; 2]>>,
}

impl ScratchPool {
    /// Runs `work` with scratch memory that no other thread is using.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Scratch) -> T) -> T {
        let mut scratch = lock(&self.scratch).pop().unwrap_or_default();
        let out = work(&mut scratch);
        lock(&self.scratch).push(scratch);
        out
    }
}

/// Buffers of a chunk: its frame, and the values that it is predicted from.
#[derive(Debug, Default)]
struct Frame {
    bytes: Vec<u8>,
    input: Vec<u8>,
    moments: [Vec<u8>; 2],
}

/// The outcome for each chunk of a window.
type Outcomes<E> = Vec<Option<Result<EncodedChunk, E>>>;

impl Engine for CpuEngine {
    type Error = TensorError;

    fn plan<E>(
        &self,
        preset: Preset,
        tensors: &[TensorValues<'_>],
        inputs: &dyn Inputs<E>,
        pool: Option<&ThreadPool>,
    ) -> Result<Vec<TensorPlan>, E>
    where
        E: From<TensorError> + Send,
    {
        let mut plans = Vec::with_capacity(tensors.len());
        for (batch, some) in tensors.chunks(PLANNED).enumerate() {
            let numbers: Vec<_> = (batch * PLANNED..).take(some.len()).collect();
            let samples = inputs.samples(&numbers)?;
            let expected = planner::expected(preset, inputs, &numbers, pool)?;
            let samples = samples.into_iter().zip(expected);
            let mut work: Vec<_> =
                numbers.into_iter().zip(some).zip(samples).map(|w| (w, None)).collect();
            each(pool, &mut work, |(((tensor, t), (sample, expected)), plan)| {
                let parent = inputs.parent(*tensor).map(|(manifest, tensor)| ParentSample {
                    manifest,
                    tensor,
                    values: sample,
                    moments: &[],
                    expected: expected.as_deref(),
                });
                let moments = inputs.moments(*tensor);
                let choice = inputs.choice(*tensor);
                let planned = host_values(*tensor, t).and_then(|data| {
                    if inputs.keeps_samples() {
                        inputs.keep_sample(*tensor, &planner::probed(t.dtype, data));
                    }
                    let view = TensorView { dtype: t.dtype, shape: t.shape, data };
                    let parent = parent.as_ref();
                    let job = PlanJob { preset, view: &view, parent, role: t.role, choice };
                    let planned = self.plan_by_moments(job, moments);
                    planned.map_err(|source| TensorError { tensor: *tensor, source })
                });
                *plan = Some(planned);
            });
            for plan in work.into_iter().filter_map(|w| w.1) {
                plans.push(plan?);
            }
        }
        Ok(plans)
    }

    fn encode<E>(
        &self,
        jobs: &Jobs<'_, E>,
        mut sink: impl FnMut(&[EncodedFrame<'_>]) -> Result<(), E>,
    ) -> Result<(), E>
    where
        E: From<TensorError> + Send,
    {
        jobs.check()?;
        let mut queue = jobs.queue(0..jobs.tensors.len());
        let mut buffers = lock(&self.idle.windows).pop().unwrap_or_default();
        let [now, next] = &mut buffers;
        let (mut done, mut following_done) = (vec![], vec![]);
        let mut current = queue.take(jobs.window.max(1));
        self.encode_window(jobs, &current, now, &mut done);
        let outcome = loop {
            if current.is_empty() {
                break Ok(());
            }
            let following = queue.take(jobs.window.max(1));
            let mut hand_on = || {
                let mut frames = Vec::with_capacity(current.len());
                let mut failed = Ok(());
                for ((chunk, frame), done) in current.iter().zip(&*now).zip(&mut done) {
                    let Chunk { tensor, chunk, .. } = *chunk;
                    let encoded = done.take().unwrap_or_else(|| {
                        let source = Error::corrupt("chunk was not encoded").in_chunk(chunk);
                        Err(TensorError { tensor, source }.into())
                    });
                    match encoded {
                        Ok(encoded) => {
                            let bytes = &frame.bytes[..];
                            frames.push(EncodedFrame { tensor, chunk, encoded, bytes, held: None });
                        }
                        Err(e) => {
                            failed = Err(e);
                            break;
                        }
                    }
                }
                if frames.is_empty() { failed } else { sink(&frames).and(failed) }
            };
            let (list, to, told) = (&following, &mut *next, &mut following_done);
            let handed = match jobs.pool {
                None => hand_on().map(|()| self.encode_window(jobs, list, to, told)),
                Some(pool) => pool.in_place_scope(|s| {
                    s.spawn(move |_| self.encode_window(jobs, list, to, told));
                    hand_on()
                }),
            };
            if handed.is_err() {
                break handed;
            }
            std::mem::swap(now, next);
            std::mem::swap(&mut done, &mut following_done);
            current = following;
        };
        lock(&self.idle.windows).push(buffers);
        outcome
    }
}

impl CpuEngine {
    /// Encodes a window of chunks, each into its frame.
    fn encode_window<E: From<TensorError> + Send>(
        &self,
        jobs: &Jobs<'_, E>,
        chunks: &[Chunk],
        frames: &mut Vec<Frame>,
        done: &mut Outcomes<E>,
    ) {
        frames.resize_with(frames.len().max(chunks.len()), Frame::default);
        done.clear();
        done.resize_with(chunks.len(), || None);
        let is_delta = |c: &&Chunk| !jobs.plans[c.tensor].plan.inputs.is_empty();
        let deltas: Vec<_> = chunks.iter().filter(is_delta).map(Chunk::name).collect();
        let opened = match deltas.is_empty() {
            true => Ok(vec![]),
            false => jobs.inputs.open(&deltas),
        };
        let mut inputs = match opened {
            Ok(inputs) => inputs.into_iter(),
            Err(e) => {
                // Outcomes are read in order, so an error in the first one keeps all later ones from being handed on.
                done.iter_mut().take(1).zip([e]).for_each(|(first, e)| *first = Some(Err(e)));
                return;
            }
        };
        let with_input = |c| (c, if is_delta(&c) { inputs.next() } else { None });
        let mut work: Vec<_> = chunks.iter().map(with_input).zip(frames).zip(done).collect();
        each(jobs.pool, &mut work, |(((chunk, input), frame), done)| {
            **done = Some(self.encode_one(jobs, chunk, input.as_ref(), frame));
        });
    }

    /// Plans a tensor in host memory, with samples of its moments if there are any.
    fn plan_by_moments(
        &self,
        job: PlanJob<'_>,
        moments: &[Moment<'_>],
    ) -> s4_format::Result<TensorPlan> {
        let Some(parent) = job.parent.filter(|_| !moments.is_empty()) else {
            return self.idle.with(|scratch| self.plan(&job, scratch));
        };
        let values = moments.iter().map(|m| m.sample(job.view.dtype));
        let values = values.collect::<s4_format::Result<Vec<_>>>()?;
        let samples = moments.iter().zip(&values).map(|(m, values)| m.with_sample(values));
        let samples: Vec<_> = samples.collect();
        let parent = ParentSample { moments: &samples, ..*parent };
        let job = PlanJob { parent: Some(&parent), ..job };
        self.idle.with(|scratch| self.plan(&job, scratch))
    }

    fn encode_one<E: From<TensorError>>(
        &self,
        jobs: &Jobs<'_, E>,
        chunk: &Chunk,
        input: Option<&Input<'_>>,
        frame: &mut Frame,
    ) -> Result<EncodedChunk, E> {
        let Chunk { tensor, chunk: number, bytes, .. } = *chunk;
        let of = |source: Error| TensorError { tensor, source: source.in_chunk(number) };
        let (t, plan) = (&jobs.tensors[tensor], &jobs.plans[tensor]);
        let view = TensorView { dtype: t.dtype, shape: t.shape, data: host_values(tensor, t)? };
        let decoded;
        let values = match input {
            None => None,
            Some(Input::Host(values)) => Some(&values[..]),
            Some(Input::Late) => Some(jobs.inputs.read(tensor, number, &mut frame.input)?),
            Some(Input::Frames(frames)) => {
                let decode = |scratch: &mut Scratch| {
                    decode_frames(self, frames, number, bytes as usize, scratch)
                };
                decoded = self.idle.with(decode).map_err(of)?;
                Some(&decoded[..])
            }
            Some(Input::Device(_) | Input::Stored { .. }) => {
                return Err(missing(tensor, number).into());
            }
        };
        frame.bytes.clear();
        let mut given = [&[][..]; 3];
        given[0] = values.unwrap_or(&[]);
        let mut count = usize::from(values.is_some());
        // Whether an input has changed since it was stored.
        let mut gone = plan.plan.own_input().is_some() && values.is_some_and(<[u8]>::is_empty);
        if plan.plan.has_moments() {
            let moments = jobs.inputs.moments(tensor);
            if moments.len() != plan.plan.moments().len() {
                return Err(missing_moments(tensor, number).into());
            }
            let count_of = bytes / t.dtype.value_width() as u64;
            let range = (number << plan.chunk_log2, count_of);
            for ((moment, buffer), to) in
                moments.iter().zip(&mut frame.moments).zip(&mut given[1..])
            {
                match moment.read(range, buffer).map_err(of)? {
                    Some(wanted) => *to = &buffer[wanted],
                    None => gone = true,
                }
            }
            count = 1 + moments.len();
        }
        let job = EncodeJob { view: &view, plan, chunk: number, inputs: &given[..count] };
        if gone {
            return Ok(self.encode_plain(&job, &mut frame.bytes).map_err(of)?);
        }
        let encoded = self.idle.with(|scratch| self.encode(&job, scratch, &mut frame.bytes));
        Ok(encoded.map_err(of)?)
    }
}

/// The values of a tensor in host memory.
fn host_values<'a>(tensor: usize, t: &TensorValues<'a>) -> Result<&'a [u8], TensorError> {
    match t.values {
        Values::Host(data) => Ok(data),
        Values::Device(_) => {
            let source = Error::unsupported("the CPU cannot read values in device memory");
            Err(TensorError { tensor, source })
        }
    }
}

/// Locks a mutex, even a poisoned one: its content stays whole when a thread that holds it panics.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
