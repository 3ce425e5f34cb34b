//! Reading tensors into device memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use rayon::ThreadPool;
use s4_engine::cuda::{Batch, CudaEngine, Decoder, DeviceMemory, FrameJob, Piece, Trusted};

use super::chain::{Chain, Step, Wanted};
use crate::error::{At, Error, Result};
use crate::fetch::Want;
use crate::inputs::Failure;
use crate::options::{Meter, thread_count};
use crate::parallel::pool;
use crate::reader::{LoadedBlock, Reader};
use crate::spans::{Part, Span};

/// A chunk, on its way to one device.
type Job<'a> = (u32, FrameJob<'a>);

/// What is read of one checkpoint of a chain.
struct Call<'a> {
    reader: &'a Reader,
    /// What its tensors are numbered from: numbers are of the whole chain.
    base: usize,
    pool: Option<Arc<ThreadPool>>,
    wanted: Vec<Wanted>,
    blocks: HashMap<usize, Arc<LoadedBlock>>,
}

impl Reader {
    /// Reads tensors, by number, into device memory of their size. Chunks are decoded there; what they
    /// are differences from is decoded there before. Those of files that need closed bitstreams which
    /// nobody vouches for, and differences in codecs that the device lacks, are decoded on the host and
    /// copied.
    ///
    /// # Errors
    /// As [`Reader::read_into`]; `Device`. The memory's content is unspecified then.
    pub fn read_into_device(
        &self,
        engine: &CudaEngine,
        requests: &[(usize, DeviceMemory)],
    ) -> Result<()> {
        let hosts = self.device_hosts(requests)?;
        self.prepare(&hosts)?;
        let trusted = self.trusted_by(engine);
        let chain = Chain::of(self, requests, trusted.is_some())?;
        self.decode_on(engine, requests, chain, trusted.as_ref(), |here, decoder, meter| {
            here.into_iter().try_for_each(|i| self.copy(requests[i], decoder, meter))
        })
    }

    /// As [`Reader::apply_into`], of device memory. Returns the requests, by place, that the device does not
    /// decode, or that did not hold the parent's values: their content is unspecified, they are to be read
    /// ([`Reader::read_into_device`]).
    ///
    /// # Errors
    /// As [`Reader::read_into_device`]; `Argument` if a tensor is asked for twice.
    pub fn apply_into_device(
        &self,
        engine: &CudaEngine,
        requests: &[(usize, DeviceMemory)],
    ) -> Result<Vec<usize>> {
        self.device_hosts(requests)?;
        self.each_once(requests.iter().map(|r| r.0))?;
        let trusted = self.trusted_by(engine);
        let chain = Chain::top(self, requests, trusted.is_some());
        let mut left = vec![];
        self.decode_on(engine, requests, chain, trusted.as_ref(), |here, _, _| {
            left.extend(here);
            Ok(())
        })?;
        Ok(left)
    }

    /// The tensors whose chunks hold what is wanted, whose sizes are those of the memory.
    fn device_hosts(&self, requests: &[(usize, DeviceMemory)]) -> Result<Vec<usize>> {
        let mut hosts = vec![];
        for (number, to) in requests {
            let tensor = self.tensor(*number)?;
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
        Ok(hosts)
    }

    /// Decodes chunks on the devices; `rest` is given the requests, by place, that they do not decode: first
    /// those of all tensors but copies, then those of copies.
    fn decode_on(
        &self,
        engine: &CudaEngine,
        requests: &[(usize, DeviceMemory)],
        chain: Chain<'_>,
        trusted: Option<&Trusted>,
        mut rest: impl FnMut(Vec<usize>, &mut Decoder<'_, '_>, &mut Meter) -> Result<(), Failure>,
    ) -> Result<()> {
        let Chain { steps, mut here, copies } = chain;
        let calls = self.calls(steps)?;
        let copies = self.calls(vec![Step { reader: self, wanted: copies }])?;
        let mut meter = self.meter(requests.iter().map(|r| r.1.bytes()).sum());
        let memory: Vec<_> = requests.iter().map(|r| r.1).collect();
        let done = engine.decode::<Failure>(&memory, trusted, |decoder| {
            // What others are differences from comes first.
            for call in calls.iter().rev() {
                call.push(call.spans(decoder.room())?, decoder, &mut meter)?;
            }
            for number in decoder.undone()? {
                let call = calls.iter().rfind(|c| c.base <= number);
                let wanted =
                    call.and_then(|c| c.wanted.iter().find(|w| c.base + w.tensor == number));
                here.extend(wanted.map(|w| w.request));
            }
            here.sort_unstable();
            here.dedup();
            rest(std::mem::take(&mut here), decoder, &mut meter)?;
            let Some(copies) = copies.first().filter(|c| !c.wanted.is_empty()) else {
                return Ok(());
            };
            // What they are copies of is there.
            decoder.undone()?;
            copies.push(copies.spans(decoder.room())?, decoder, &mut meter)?;
            for number in decoder.undone()? {
                let wanted = copies.wanted.iter().find(|w| w.tensor == number);
                here.extend(wanted.map(|w| w.request));
            }
            rest(here, decoder, &mut meter)
        });
        done.map_err(|e| {
            e.named(&self.name, |t| {
                let call = calls.iter().rfind(|c| c.base <= t)?;
                Some(call.reader.label(t - call.base))
            })
        })
    }

    fn calls<'a>(&self, steps: Vec<Step<'a>>) -> Result<Vec<Call<'a>>> {
        let pool = pool(thread_count(self.options.threads))?.map(Arc::new);
        let mut base = 0;
        let call = |Step { reader, wanted }: Step<'a>| {
            let hosts: Vec<_> = wanted.iter().map(|w| reader.host(w.tensor)).collect();
            let (blocks, pool) = (reader.blocks(&hosts)?, pool.clone());
            let call = Call { reader, base, pool, wanted, blocks };
            base += reader.tensors.len();
            Ok(call)
        };
        steps.into_iter().map(call).collect()
    }

    /// Decodes a tensor on the host, as much as pinned memory has room for at a time.
    fn copy(
        &self,
        (number, to): (usize, DeviceMemory),
        decoder: &mut Decoder<'_, '_>,
        meter: &mut Meter,
    ) -> Result<(), Failure> {
        let mut done = 0;
        while done < to.bytes() {
            let len = (to.bytes() - done).min(decoder.room() as u64);
            let part = to.part(done, len).map_err(Failure::Device)?;
            decoder.put::<Failure>(part, |values| {
                let want = Want { tensor: number, first: done, to: values };
                let mut silent = Meter { callback: None, done: 0, total: len };
                Ok(self.fetch_all(vec![want], &mut silent)?)
            })?;
            meter.add(len)?;
            done += len;
        }
        Ok(())
    }

    /// What decodes a vendor's streams on the devices, if the caller trusts the file.
    fn trusted_by(&self, engine: &CudaEngine) -> Option<Trusted> {
        self.options.trusted.then(|| engine.trusted(&self.manifest.closed_codecs))?
    }
}

impl Call<'_> {
    /// The chunks that are wanted, in the order in which they lie, in spans of at most `room` bytes.
    fn spans<'b>(&'b self, room: usize) -> Result<Vec<Span<Job<'b>>>, Failure> {
        let mut jobs: BTreeMap<(u32, usize, u64), FrameJob<'b>> = BTreeMap::new();
        for wanted in &self.wanted {
            self.add(wanted, &mut jobs)?;
        }
        let jobs = jobs.into_iter().map(|((ordinal, ..), job)| (ordinal, job)).collect();
        let record = |(_, job): &Job<'_>| job.record;
        let together = |close, last: Option<&Job<'_>>, job: &Job<'_>| {
            close && last.is_some_and(|last| last.0 == job.0)
        };
        Ok(self.reader.spans(jobs, room as u64, record, together))
    }

    /// Cuts what is wanted of a tensor at the borders of chunks.
    fn add<'b>(
        &'b self,
        &Wanted { tensor, to, ref chunks, input, .. }: &Wanted,
        jobs: &mut BTreeMap<(u32, usize, u64), FrameJob<'b>>,
    ) -> Result<(), Failure> {
        let mut done = 0;
        for Part { host, chunk, record, bytes, from, len } in
            self.reader.parts(tensor, 0, to.bytes(), &self.blocks)?
        {
            let part = to.part(done, len).map_err(Failure::Device)?;
            done += len;
            if chunks.as_ref().is_some_and(|list| list.binary_search(&chunk).is_err()) {
                continue;
            }
            let spec = self.reader.spec(host, &self.blocks[&host]);
            let first = (chunk * spec.dtype.value_width() as u64) << spec.chunk_log2;
            let input = input.map(|m| {
                let scale = m.bytes() / to.bytes().max(1);
                m.part(scale * first, scale * bytes)
            });
            let input = input.transpose();
            let input = input.map_err(Failure::Device)?;
            let job = jobs.entry((to.ordinal(), host, chunk)).or_insert_with(|| FrameJob {
                tensor: self.base + host,
                spec,
                chunk,
                record,
                at: 0,
                bytes,
                pieces: vec![],
                input,
            });
            job.pieces.push(Piece { from, to: part });
        }
        Ok(())
    }

    /// Reads spans into pinned memory, with parallel requests, and has them decoded.
    fn push<'b>(
        &'b self,
        spans: Vec<Span<Job<'b>>>,
        decoder: &mut Decoder<'_, 'b>,
        meter: &mut Meter,
    ) -> Result<(), Failure> {
        // Each value is counted once, as that of the checkpoint itself.
        let counted = |jobs: &[Job<'_>]| -> u64 {
            let own = jobs.iter().filter(|_| self.base == 0);
            own.flat_map(|j| &j.1.pieces).map(|p| p.to.bytes()).sum()
        };
        let places: Vec<_> = spans.iter().map(|s| (s.object, s.first, counted(&s.jobs))).collect();
        let batches = spans.into_iter().map(|mut span| {
            let ordinal = span.jobs.first().map_or(0, |job| job.0);
            let jobs = std::mem::take(&mut span.jobs).into_iter();
            let jobs = jobs.map(|(_, job)| FrameJob { at: span.at(&job.record), ..job });
            Batch { ordinal, len: span.bytes(), jobs: jobs.collect() }
        });
        let read = |span: usize, at: usize, part: &mut [u8]| {
            let (object, first, _) = places[span];
            Ok(self.reader.read_object(object, first + at as u64, part)?)
        };
        let request = self.reader.request_size();
        decoder.push_all::<Failure>(self.pool.as_deref(), batches, request, read, |span| {
            Ok(meter.add(places[span].2)?)
        })
    }
}
