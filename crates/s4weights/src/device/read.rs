//! Reading tensors into device memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use rayon::ThreadPool;
use s4_engine::cuda::{Batch, CudaEngine, Decoder, Destination, DeviceMemory, FrameJob, Trusted};

use super::chain::{Chain, Step, Wanted};
use crate::error::{At, Error, Result};
use crate::inputs::Failure;
use crate::io::LOCAL_REQUEST;
use crate::parallel::pool;
use crate::progress::Meter;
use crate::reader::{LoadedBlock, Reader, Want};
use crate::spans::{Part, Span};

/// The alignment of spans in a batch, in bytes.
const LINE: usize = 64;

/// A chunk, on its way to one device.
type Job<'a> = (u32, FrameJob<'a>);

/// The reads for one checkpoint of a chain.
struct Call<'a> {
    reader: &'a Reader,
    /// Added to its tensors' numbers, so that those of all calls differ.
    base: usize,
    /// Whether its values are requested ones, which count as progress.
    counted: bool,
    pool: Option<Arc<ThreadPool>>,
    wanted: Vec<Wanted>,
    blocks: HashMap<usize, Arc<LoadedBlock>>,
}

impl Reader {
    /// Reads tensors, by number, into device memory of their size. Chunks are decoded there, after
    /// the ancestors' chunks that they are deltas of. Those of files that need closed codecs but
    /// are not trusted, and deltas in codecs that the device lacks, are decoded on the host and
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
        self.decode_on(engine, requests, chain, trusted.as_ref(), |on_host, decoder, meter| {
            on_host.into_iter().try_for_each(|i| self.copy(requests[i], decoder, meter))
        })
    }

    /// As [`Reader::apply_into`], for device memory. Returns the indices of the requests that the
    /// device does not decode, or whose memory did not hold the parent's values: their content is
    /// unspecified, and they must be read ([`Reader::read_into_device`]).
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
        let chain = Chain::top(self, requests, trusted.is_some())?;
        let mut left = vec![];
        self.decode_on(engine, requests, chain, trusted.as_ref(), |on_host, _, _| {
            left.extend(on_host);
            Ok(())
        })?;
        Ok(left)
    }

    /// The tensors whose chunks hold the requested values, after checking that the memory has the
    /// tensors' sizes.
    fn device_hosts(&self, requests: &[(usize, DeviceMemory)]) -> Result<Vec<usize>> {
        let mut hosts = vec![];
        for (number, to) in requests {
            let tensor = self.tensor(*number)?;
            if tensor.bytes().at(&self.name)? != to.bytes() {
                return Err(Error::Argument(format!(
                    "{} bytes of device memory do not fit tensor `{}` of {} {:?}",
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

    /// Decodes chunks on the devices. `rest` is given the indices of the requests that they do not
    /// decode: first those of tensors that need no others, then weights with contexts from moments,
    /// then copies.
    fn decode_on(
        &self,
        engine: &CudaEngine,
        requests: &[(usize, DeviceMemory)],
        chain: Chain<'_>,
        trusted: Option<&Trusted>,
        mut rest: impl FnMut(Vec<usize>, &mut Decoder<'_, '_>, &mut Meter) -> Result<(), Failure>,
    ) -> Result<()> {
        let Chain { before, steps, mut on_host, with_moments, copies } = chain;
        let (early, chained) = (before.len(), steps.len());
        let last = [with_moments, copies].map(|wanted| Step { reader: self, wanted });
        let mut calls = self.calls(before.into_iter().chain(steps).chain(last))?;
        for call in &mut calls[early + 1..early + chained] {
            call.counted = false;
        }
        calls[..early].iter_mut().for_each(|call| call.counted = false);
        let (calls, (before, later)) = (&calls[..], calls.split_at(early));
        let (steps, last) = later.split_at(chained);
        let mut meter = self.meter(requests.iter().map(|r| r.1.bytes()).sum());
        let memory: Vec<_> = requests.iter().map(|r| r.1).collect();
        let done = engine.decode::<Failure>(&memory, trusted, |decoder| {
            for call in before {
                call.push(call.spans(decoder.room())?, decoder, &mut meter)?;
                // Waits: the next call needs what was decoded, and overwrites what is no longer
                // needed.
                undone(calls, decoder, &mut on_host)?;
            }
            // Ancestors come first.
            for call in steps.iter().rev() {
                call.push(call.spans(decoder.room())?, decoder, &mut meter)?;
            }
            undone(calls, decoder, &mut on_host)?;
            rest(sorted(&mut on_host), decoder, &mut meter)?;
            for call in last.iter().filter(|c| !c.wanted.is_empty()) {
                // Waits for what they are predicted from, or their contexts are derived from.
                decoder.undone()?;
                call.push(call.spans(decoder.room())?, decoder, &mut meter)?;
                undone(calls, decoder, &mut on_host)?;
                rest(sorted(&mut on_host), decoder, &mut meter)?;
            }
            Ok(())
        });
        done.map_err(|e| {
            e.named(&self.name, |t| {
                let call = calls.iter().rfind(|c| c.base <= t)?;
                Some(call.reader.label(t - call.base))
            })
        })
    }

    fn calls<'a>(&self, steps: impl Iterator<Item = Step<'a>>) -> Result<Vec<Call<'a>>> {
        let pool = pool(self.threads())?.map(Arc::new);
        let mut base = 0;
        let call = |Step { reader, wanted }: Step<'a>| {
            let hosts: Vec<_> = wanted.iter().map(|w| reader.host(w.tensor)).collect();
            let (blocks, pool) = (reader.blocks(&hosts)?, pool.clone());
            let call = Call { reader, base, counted: true, pool, wanted, blocks };
            base += reader.tensors.len();
            Ok(call)
        };
        steps.map(call).collect()
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

    /// The decoders of a vendor's streams on the devices, if the caller trusts the file.
    fn trusted_by(&self, engine: &CudaEngine) -> Option<Trusted> {
        self.options.trusted.then(|| engine.trusted(&self.manifest.closed_codecs))?
    }
}

/// Waits for all that was pushed, and adds the requests that the device left undone.
fn undone(
    calls: &[Call<'_>],
    decoder: &mut Decoder<'_, '_>,
    on_host: &mut Vec<usize>,
) -> Result<(), Failure> {
    for number in decoder.undone()? {
        let Some(call) = calls.iter().rfind(|c| c.base <= number) else { continue };
        // A tensor that others are copies of may be wanted for several of them.
        let wanted = call.wanted.iter().filter(|w| call.base + w.tensor == number);
        on_host.extend(wanted.filter_map(|w| w.request));
    }
    Ok(())
}

/// The entries of a list in ascending order, without duplicates. Empties the list.
fn sorted(list: &mut Vec<usize>) -> Vec<usize> {
    let mut list = std::mem::take(list);
    list.sort_unstable();
    list.dedup();
    list
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
        Ok(self.reader.spans(jobs, room as u64, self.reader.gap(), record, together))
    }

    /// Cuts the wanted bytes of a tensor at the borders of chunks.
    fn add<'b>(
        &'b self,
        &Wanted { tensor, to, ref chunks, input, moments, .. }: &Wanted,
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
            let moments = match moments {
                Some(both) => {
                    // Moments have as many values as the tensor.
                    let width = spec.dtype.value_width() as u64;
                    let part = |m: DeviceMemory| {
                        let each = m.bytes() / (to.bytes() / width).max(1);
                        m.part(first / width * each, bytes / width * each)
                    };
                    let [first, second] = both.map(part);
                    Some([first.map_err(Failure::Device)?, second.map_err(Failure::Device)?])
                }
                None => None,
            };
            let job = jobs.entry((to.ordinal(), host, chunk)).or_insert_with(|| FrameJob {
                tensor: self.base + host,
                spec,
                chunk,
                record,
                at: 0,
                bytes,
                destinations: vec![],
                input,
                moments,
            });
            job.destinations.push(Destination { from, to: part });
        }
        Ok(())
    }

    /// Reads spans into pinned memory, with parallel requests, and has them decoded: many at once, if each is small.
    fn push<'b>(
        &'b self,
        spans: Vec<Span<Job<'b>>>,
        decoder: &mut Decoder<'_, 'b>,
        meter: &mut Meter,
    ) -> Result<(), Failure> {
        let loads = self.loads(spans, decoder.room());
        let (batches, loads): (Vec<_>, Vec<_>) = loads.into_iter().unzip();
        let read = |load: usize, at: usize, part: &mut [u8]| loads[load].read(self, at, part);
        let mut request = self.reader.request_size();
        if self.reader.any_remote() {
            // Two batches are filled at once.
            let share = decoder.room().saturating_mul(2).div_ceil(self.reader.threads());
            request = share.clamp(LOCAL_REQUEST, request.max(LOCAL_REQUEST));
        }
        decoder.push_all::<Failure>(self.pool.as_deref(), batches, request, read, |load| {
            Ok(meter.add(loads[load].counted)?)
        })
    }

    /// Puts spans together whose frames are decoded in one batch, of at most `room` bytes.
    fn loads<'b>(&self, spans: Vec<Span<Job<'b>>>, room: usize) -> Vec<(Batch<'b>, Load)> {
        let mut out: Vec<(Batch<'b>, Load)> = vec![];
        for mut span in spans {
            let ordinal = span.jobs.first().map_or(0, |job| job.0);
            let last = out.pop_if(|(batch, _)| {
                batch.ordinal == ordinal && batch.len.next_multiple_of(LINE) + span.bytes() <= room
            });
            let new = || (Batch { ordinal, len: 0, jobs: vec![] }, Load::default());
            let (mut batch, mut load) = last.unwrap_or_else(new);
            let start = batch.len.next_multiple_of(LINE);
            batch.len = start + span.bytes();
            load.pieces.push((start, span.object, span.first, span.bytes()));
            // Each value is counted once, with the checkpoint itself.
            let own = span.jobs.iter().filter(|_| self.counted);
            load.counted += own.flat_map(|j| &j.1.destinations).map(|p| p.to.bytes()).sum::<u64>();
            for (_, job) in std::mem::take(&mut span.jobs) {
                let at = start + span.at(&job.record);
                batch.jobs.push(FrameJob { at, ..job });
            }
            out.push((batch, load));
        }
        out
    }
}

/// The reads for a batch.
#[derive(Default)]
struct Load {
    /// In ascending order: start in the batch, object, first byte there, and number of bytes.
    pieces: Vec<(usize, u32, u64, usize)>,
    /// Bytes of values that count as progress.
    counted: u64,
}

impl Load {
    /// Fills `part`, the bytes of the batch from `at` on. Gaps between pieces are not filled.
    fn read(&self, call: &Call<'_>, at: usize, part: &mut [u8]) -> Result<(), Failure> {
        let end = at + part.len();
        let first = self.pieces.partition_point(|(start, .., len)| start + len <= at);
        for &(start, object, offset, len) in &self.pieces[first..] {
            let (from, to) = (at.max(start), end.min(start + len));
            if from >= to {
                break;
            }
            let wanted = &mut part[from - at..to - at];
            call.reader.read_object(object, offset + (from - start) as u64, wanted)?;
        }
        Ok(())
    }
}
