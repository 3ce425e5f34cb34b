//! Reading tensors into device memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use rayon::ThreadPool;
use rayon::prelude::*;
use s4_engine::cuda::{CudaEngine, DecodeJob, Decoder, DeviceMemory, GpuError, Piece, Trusted};
use s4_format::PredictorId;
use s4_format::index::TensorKind;

use super::Failure;
use crate::error::{At, Error, Result};
use crate::fetch::Want;
use crate::options::{Meter, thread_count};
use crate::parallel::pool;
use crate::reader::{LoadedBlock, Reader};

/// Frames that are decoded together: as they lie in one object, on their way to one device.
struct Span<'a> {
    ordinal: u32,
    object: u32,
    first: u64,
    len: usize,
    jobs: Vec<DecodeJob<'a>>,
}

/// What all of a call's steps use.
struct Call<'a> {
    reader: &'a Reader,
    pool: Option<ThreadPool>,
    trusted: Option<Trusted>,
    blocks: HashMap<usize, Arc<LoadedBlock>>,
}

impl Reader {
    /// Reads tensors, by number, into device memory of their size. Chunks are decoded there; those
    /// that are differences from a parent are decoded on the host and copied.
    ///
    /// # Errors
    /// As [`Reader::read_into`]; `Device`. The memory's content is unspecified then.
    pub fn read_into_device(
        &self,
        engine: &CudaEngine,
        requests: &[(usize, DeviceMemory)],
    ) -> Result<()> {
        let mut hosts = vec![];
        for (number, to) in requests {
            let tensor = self.tensors[..self.named()].get(*number);
            let tensor = tensor
                .ok_or_else(|| Error::Argument(format!("{}: no tensor {number}", self.name)))?;
            if tensor.bytes().at(&self.name)? != to.bytes() {
                return Err(Error::Argument(format!(
                    "{} bytes of device memory for tensor `{}` of {} {:?}",
                    to.bytes(),
                    tensor.name,
                    tensor.dtype,
                    tensor.shape
                )));
            }
            hosts.push(self.host(*number));
        }
        hosts.sort_unstable();
        hosts.dedup();
        self.prepare(&hosts)?;
        let call = Call {
            reader: self,
            pool: pool(thread_count(self.options.threads))?,
            trusted: self.trusted_by(engine),
            blocks: self.blocks(&hosts)?,
        };
        let total = requests.iter().map(|r| r.1.bytes()).sum();
        let mut meter = Meter { callback: self.options.progress.clone(), done: 0, total };
        let memory: Vec<_> = requests.iter().map(|r| r.1).collect();
        let done = engine.decode_with::<Failure>(&memory, call.trusted.as_ref(), |decoder| {
            let (direct, here): (Vec<_>, Vec<_>) =
                requests.iter().copied().partition(|(t, _)| call.is_direct(self.host(*t)));
            for span in call.spans(&direct, decoder.room())? {
                call.push(span, decoder, &mut meter)?;
            }
            here.into_iter().try_for_each(|(t, to)| call.copy(t, to, decoder, &mut meter))
        });
        done.map_err(|e| e.named(&self.name, |t| (t < self.tensors.len()).then(|| self.label(t))))
    }

    /// What decodes a vendor's streams on the devices, if the caller trusts the file.
    fn trusted_by(&self, engine: &CudaEngine) -> Option<Trusted> {
        self.options.trusted.then(|| engine.trusted(&self.manifest.closed_codecs))?
    }
}

impl<'a> Call<'a> {
    /// Whether a tensor's chunks need nothing but themselves and what the engine has.
    fn is_direct(&self, host: usize) -> bool {
        let plan = usize::from(self.reader.tensors[host].plan);
        let closed = &self.reader.manifest.closed_codecs;
        (closed.is_empty() || self.trusted.is_some())
            && self.reader.manifest.plans[plan].predictor == PredictorId::NONE
    }

    /// The chunks of requests, in the order in which they lie, in spans of at most `room` bytes.
    fn spans<'b>(
        &'b self,
        requests: &[(usize, DeviceMemory)],
        room: usize,
    ) -> Result<Vec<Span<'b>>, Failure> {
        let mut jobs: BTreeMap<(u32, usize, u64), DecodeJob<'b>> = BTreeMap::new();
        for (number, to) in requests {
            self.cut(*number, *to, &mut jobs)?;
        }
        let mut jobs: Vec<_> =
            jobs.into_iter().map(|((ordinal, ..), job)| (ordinal, job)).collect();
        jobs.sort_by_key(|(ordinal, j)| (j.record.object, j.record.offset, *ordinal));
        let gap = self.reader.request_size() as u64 / 16;
        let mut spans: Vec<Span<'b>> = vec![];
        for (ordinal, mut job) in jobs {
            let record = job.record;
            let end = record.offset + u64::from(record.len);
            let joins = |s: &&mut Span<'b>| {
                s.ordinal == ordinal
                    && s.object == record.object
                    && record.offset <= s.first + s.len as u64 + gap
                    && end - s.first <= room as u64
            };
            match spans.last_mut().filter(joins) {
                Some(span) => {
                    job.at = (record.offset - span.first) as usize;
                    span.len = span.len.max((end - span.first) as usize);
                    span.jobs.push(job);
                }
                None => spans.push(Span {
                    ordinal,
                    object: record.object,
                    first: record.offset,
                    len: record.len as usize,
                    jobs: vec![job],
                }),
            }
        }
        Ok(spans)
    }

    /// Cuts a request at the borders of chunks.
    fn cut<'b>(
        &'b self,
        number: usize,
        to: DeviceMemory,
        jobs: &mut BTreeMap<(u32, usize, u64), DecodeJob<'b>>,
    ) -> Result<(), Failure> {
        let reader = self.reader;
        let host = reader.host(number);
        let (tensor, block) = (&reader.tensors[host], &self.blocks[&host]);
        let spec = reader.spec(host, block);
        let width = tensor.dtype.value_width() as u64;
        let size = width << spec.chunk_log2;
        let all = tensor.bytes().at(&reader.name)?;
        let first = match reader.tensors[number].kind {
            TensorKind::Chunks { .. } => 0,
            TensorKind::Packed { first, .. } => first * width,
        };
        let mut done = 0;
        while done < to.bytes() {
            let at = first + done;
            let (chunk, from) = (at / size, at % size);
            let bytes = size.min(all - chunk * size);
            let len = (to.bytes() - done).min(bytes - from);
            let part = to.part(done, len).map_err(|e| Failure::Engine(e.into()))?;
            let job = jobs.entry((to.ordinal(), host, chunk)).or_insert_with(|| DecodeJob {
                tensor: host,
                spec,
                chunk,
                record: block.records[chunk as usize],
                at: 0,
                bytes,
                pieces: vec![],
            });
            job.pieces.push(Piece { from, to: part });
            done += len;
        }
        Ok(())
    }

    /// Reads a span into pinned memory, requests side by side, and has it decoded.
    fn push<'b>(
        &'b self,
        span: Span<'b>,
        decoder: &mut Decoder<'_, 'b>,
        meter: &mut Meter,
    ) -> Result<(), Failure> {
        let Span { ordinal, object, first, len, jobs } = span;
        let bytes = jobs.iter().flat_map(|j| &j.pieces).map(|p| p.to.bytes()).sum();
        let request = self.reader.request_size();
        decoder.push::<Failure>(ordinal, len, jobs, |to| {
            let read = |(i, part): (usize, &mut [u8])| {
                self.reader.read_object(object, first + (i * request) as u64, part)
            };
            Ok(match &self.pool {
                Some(pool) if len > request => {
                    pool.install(|| to.par_chunks_mut(request).enumerate().try_for_each(read))
                }
                _ => to.chunks_mut(request).enumerate().try_for_each(read),
            }?)
        })?;
        Ok(meter.add(bytes)?)
    }

    /// Decodes a tensor on the host, as much as pinned memory has room for at a time.
    fn copy(
        &self,
        number: usize,
        to: DeviceMemory,
        decoder: &mut Decoder<'_, '_>,
        meter: &mut Meter,
    ) -> Result<(), Failure> {
        let gpu = |e: GpuError| Failure::Engine(e.into());
        let mut done = 0;
        while done < to.bytes() {
            let len = (to.bytes() - done).min(decoder.room() as u64);
            let part = to.part(done, len).map_err(gpu)?;
            decoder.put::<Failure>(part, |values| {
                let want = Want { tensor: number, first: done, to: values };
                let silent = Meter { callback: None, done: 0, total: len };
                Ok(self.reader.fetch_all(vec![want], silent)?)
            })?;
            meter.add(len)?;
            done += len;
        }
        Ok(())
    }
}
