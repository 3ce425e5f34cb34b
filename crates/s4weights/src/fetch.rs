//! Reads and decodes the chunks that hold wanted bytes.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use s4_engine::{DecodeJob, InputValues, Scratch};
use s4_format::index::TensorKind;
use s4_format::{ChunkRecord, Plan};

use crate::buffers::{Buffers, sized};
use crate::error::{At, Error, Result};
use crate::io;
use crate::parallel::{CONNECTIONS, lock, pool, thread_count, worth};
use crate::progress::Meter;
use crate::reader::{LoadedBlock, Reader, Want};
use crate::spans::{Part, Span};

/// Maximum bytes of a request where requests are cheap, so that its data is still in a core's cache when it is
/// decoded.
const LOCAL_REQUEST: u64 = 512 << 10;

/// Fewest bytes of such a request: small enough that all threads have work.
const SMALL_REQUEST: u64 = 128 << 10;

/// Work, in stored bytes (see `Job::value_work`), that takes longer than a thread takes to start.
const THREAD_BYTES: u64 = 512 << 10;

/// Most work that filling and copying values adds to one request where requests are cheap: one chunk
/// that is predicted from another tensor, or some four that are hardly more than records.
const LOCAL_VALUES: u64 = 640 << 10;

/// Where the bytes of a decoded chunk from an offset on go.
struct Destination<'a> {
    from: usize,
    to: &'a mut [u8],
}

/// A chunk to be decoded.
pub(crate) struct Job<'a> {
    tensor: usize,
    chunk: u64,
    record: ChunkRecord,
    /// Bytes of the decoded chunk.
    bytes: usize,
    destinations: Vec<Destination<'a>>,
    /// Whether it is predicted from the parent's values.
    pub(crate) delta: bool,
    /// Whether the parent's values are already where the chunk goes.
    pub(crate) in_place: bool,
    /// The parent's values, unless the chunk goes to one place as a whole: then they are put there.
    parent: Vec<u8>,
    /// The values of other tensors of this checkpoint that it is predicted from, or that its
    /// contexts are derived from.
    own_inputs: Vec<OwnInputValues<'a>>,
}

/// The values of another tensor of the same checkpoint at the positions of a chunk's values.
struct OwnInputValues<'a> {
    tensor: usize,
    /// The first byte within the tensor, and how many.
    first: u64,
    bytes: usize,
    /// The values: given, or else read.
    given: Option<&'a [u8]>,
    read: Vec<u8>,
}

impl OwnInputValues<'_> {
    fn values(&self) -> &[u8] {
        self.given.unwrap_or(&self.read)
    }
}

impl Job<'_> {
    /// The cost of its values beyond its stored bytes, as the number of stored bytes that take equally long to
    /// decode: all values are written, and those that it is predicted from are read or decoded first. A chunk of
    /// zeros, or a copy of another one, is stored as little more than its record, but still costs this.
    fn value_work(&self) -> u64 {
        // Given values count too: this way the threads share the work.
        let own_inputs: u64 = self.own_inputs.iter().map(|b| b.bytes as u64).sum();
        self.bytes as u64 / 4 + self.bytes as u64 * u64::from(self.delta) + own_inputs
    }

    /// Whether the chunk goes to one place as a whole.
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.destinations.as_slice(), [only] if only.to.len() == self.bytes)
    }
}

impl Reader {
    /// Fills every want.
    pub(crate) fn fetch(&self, wants: Vec<Want<'_>>) -> Result<()> {
        let mut meter = self.meter(wants.iter().map(|w| w.to.len() as u64).sum());
        self.prepare(&self.hosts(&wants))?;
        let done = self.fetch_all(wants, &mut meter);
        self.let_go();
        done
    }

    /// Reports progress, of `total` bytes, to the caller.
    pub(crate) fn meter(&self, total: u64) -> Meter {
        Meter { callback: self.options.progress.clone(), done: 0, total }
    }

    /// Frees the idle buffers.
    pub(crate) fn let_go(&self) {
        lock(&self.idle).clear();
    }

    /// Fills every want, with threads. The tensors must be prepared.
    pub(crate) fn fetch_all(&self, wants: Vec<Want<'_>>, meter: &mut Meter) -> Result<()> {
        self.in_order(wants, |wants, given| {
            let wants = self.fill_mixed(wants, meter)?;
            let blocks = self.blocks(&self.hosts(&wants))?;
            let jobs = self.jobs_beside(wants, given, &blocks)?;
            let threads = thread_count(self.options.threads);
            self.run(self.request_spans(jobs, threads), &blocks, meter)
        })
    }

    /// Calls `fill` with the wants in order of their dependencies: first those of tensors that need
    /// no other wanted tensor, then those of tensors that need the former, and so on. `fill` also
    /// gets the values of the whole tensors that are filled already, which need not be decoded
    /// twice.
    pub(crate) fn in_order(
        &self,
        wants: Vec<Want<'_>>,
        mut fill: impl FnMut(Vec<Want<'_>>, &HashMap<usize, &[u8]>) -> Result<()>,
    ) -> Result<()> {
        let mut done: Vec<Want<'_>> = vec![];
        let mut rest = wants;
        loop {
            let whole: HashSet<usize> =
                rest.iter().filter(|w| self.is_whole(w)).map(|w| w.tensor).collect();
            let is_late = |w: &Want<'_>| {
                let plan = self.plan(w.tensor);
                plan.own_inputs().any(|input| whole.contains(&(input as usize)))
            };
            let (late, mut now): (Vec<_>, Vec<_>) = rest.into_iter().partition(is_late);
            if now.is_empty() && !late.is_empty() {
                // Inputs form no cycle, so some tensor is always ready.
                let e =
                    s4_format::Error::corrupt("tensors are predicted from each other in a cycle");
                return Err(e.in_tensor(self.label(late[0].tensor))).at(&self.name);
            }
            let given = done.iter().filter(|w| self.is_whole(w));
            let given = given.map(|w| (w.tensor, &*w.to)).collect();
            fill(now.iter_mut().map(Want::reborrow).collect(), &given)?;
            if late.is_empty() {
                return Ok(());
            }
            done.append(&mut now);
            rest = late;
        }
    }

    /// Whether all of a tensor's values are wanted.
    pub(crate) fn is_whole(&self, want: &Want<'_>) -> bool {
        let bytes = self.tensors[want.tensor].bytes();
        want.first == 0 && bytes.is_ok_and(|bytes| bytes == want.to.len() as u64)
    }

    /// As [`Reader::jobs`]. `given`: values of tensors that others may be predicted from.
    pub(crate) fn jobs_beside<'a>(
        &self,
        wants: Vec<Want<'a>>,
        given: &HashMap<usize, &'a [u8]>,
        blocks: &HashMap<usize, Arc<LoadedBlock>>,
    ) -> Result<Vec<Job<'a>>> {
        let mut jobs = self.jobs(wants, blocks)?;
        for own_inputs in jobs.iter_mut().flat_map(|job| &mut job.own_inputs) {
            let first = own_inputs.first as usize;
            let values = given.get(&own_inputs.tensor);
            own_inputs.given = values.and_then(|v| v.get(first..first + own_inputs.bytes));
        }
        Ok(jobs)
    }

    /// Fills every want on this thread, with buffers from a common stock. The tensors must be
    /// prepared, and have the same chunk size along their chains.
    pub(crate) fn fill(&self, wants: Vec<Want<'_>>, idle: &Mutex<Vec<Buffers>>) -> Result<()> {
        let blocks = self.blocks(&self.hosts(&wants))?;
        let spans = self.request_spans(self.jobs(wants, &blocks)?, 1);
        spans.into_iter().try_for_each(|span| self.run_span(span, &blocks, idle, &mut |_| Ok(())))
    }

    /// The tensors whose chunks hold wanted bytes.
    pub(crate) fn hosts(&self, wants: &[Want<'_>]) -> Vec<usize> {
        let mut hosts: Vec<usize> = wants.iter().map(|w| self.host(w.tensor)).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    /// The tensor whose chunks hold a tensor's values: itself, or its pack.
    pub(crate) fn host(&self, tensor: usize) -> usize {
        match self.tensors[tensor].kind {
            TensorKind::Chunks { .. } => tensor,
            TensorKind::Packed { pack, .. } => pack as usize,
        }
    }

    /// The plan of the chunks that hold a tensor's values. A pack's has no inputs.
    pub(crate) fn plan(&self, tensor: usize) -> &Plan {
        &self.manifest.plans[usize::from(self.tensors[self.host(tensor)].plan)]
    }

    /// Cuts wants at the borders of chunks.
    pub(crate) fn jobs<'a>(
        &self,
        wants: Vec<Want<'a>>,
        blocks: &HashMap<usize, Arc<LoadedBlock>>,
    ) -> Result<Vec<Job<'a>>> {
        let mut jobs: BTreeMap<(usize, u64), Job<'a>> = BTreeMap::new();
        for want in wants {
            let mut rest = want.to;
            for part in self.parts(want.tensor, want.first, rest.len() as u64, blocks)? {
                let (now, later) = rest.split_at_mut(part.len as usize);
                rest = later;
                let job = match jobs.entry((part.host, part.chunk)) {
                    Entry::Occupied(entry) => entry.into_mut(),
                    Entry::Vacant(entry) => entry.insert(self.job(&part, blocks)?),
                };
                job.destinations.push(Destination { from: part.from as usize, to: now });
            }
        }
        Ok(jobs.into_values().collect())
    }

    fn job(&self, part: &Part, blocks: &HashMap<usize, Arc<LoadedBlock>>) -> Result<Job<'static>> {
        let &Part { host, chunk, record, bytes, .. } = part;
        let plan = self.plan(host);
        // A plain chunk is its values, whatever the plan.
        let delta = plan.parent().is_some() && !record.plain;
        let own_inputs = match record.plain {
            true => vec![],
            false => self.own_input_values(host, &blocks[&host], chunk, bytes)?,
        };
        let (destinations, parent, bytes) = (vec![], vec![], bytes as usize);
        let in_place = false;
        Ok(Job {
            tensor: host,
            chunk,
            record,
            bytes,
            destinations,
            delta,
            in_place,
            parent,
            own_inputs,
        })
    }

    /// The values of other tensors of this checkpoint that a chunk of `bytes` bytes needs, not read yet.
    fn own_input_values(
        &self,
        tensor: usize,
        block: &LoadedBlock,
        chunk: u64,
        bytes: u64,
    ) -> Result<Vec<OwnInputValues<'static>>> {
        let spec = self.spec(tensor, block);
        let (first, values) = (chunk << spec.chunk_log2, bytes / spec.dtype.value_width() as u64);
        let of = |input: usize| {
            let width = self.tensors[input].dtype.value_width() as u64;
            // A chunk has at most 2^18 values.
            let (first, bytes) = (first * width, (values * width) as usize);
            OwnInputValues { tensor: input, first, bytes, given: None, read: vec![] }
        };
        Ok(self.own_inputs(tensor, &block.side)?.into_iter().map(of).collect())
    }

    /// Groups chunks that lie close together: each group is read by one request. Deltas and constants
    /// are small, so a group is also bounded by the work that their values make. Where requests are
    /// cheap that bound is low: the values that a delta is predicted from are then still in a core's
    /// cache when it is decoded.
    pub(crate) fn request_spans<'a>(
        &self,
        jobs: Vec<Job<'a>>,
        threads: usize,
    ) -> Vec<Span<Job<'a>>> {
        let request = self.request_size();
        let (request, most) = if request > io::LOCAL_REQUEST {
            (request as u64, 4 * request as u64)
        } else {
            let stored: u64 = jobs.iter().map(|job| u64::from(job.record.len)).sum();
            let share = stored / (4 * threads as u64);
            let request = LOCAL_REQUEST.min(request as u64);
            (
                if threads > 1 {
                    share.clamp(SMALL_REQUEST.min(request), request)
                } else {
                    request
                },
                LOCAL_VALUES,
            )
        };
        let mut sum = 0;
        self.spans(
            jobs,
            request,
            self.gap(),
            |job| job.record,
            |close, _, job| {
                let values = job.value_work();
                let joins = close && sum + values <= most;
                sum = if joins { sum } else { 0 } + values;
                joins
            },
        )
    }

    /// The most threads that read, each with one request in flight.
    pub(crate) fn threads(&self) -> usize {
        let threads = thread_count(self.options.threads);
        if self.any_remote() { threads.max(CONNECTIONS) } else { threads }
    }

    /// As many threads as the work is worth.
    fn threads_for(&self, spans: &[Span<Job<'_>>]) -> usize {
        let mut threads = self.threads();
        if !self.any_remote() {
            let values = |span: &Span<Job<'_>>| span.jobs.iter().map(Job::value_work).sum::<u64>();
            let work: u64 = spans.iter().map(|span| span.bytes() as u64 + values(span)).sum();
            threads = worth(threads, work / THREAD_BYTES);
        }
        threads.min(spans.len())
    }

    pub(crate) fn run(
        &self,
        spans: Vec<Span<Job<'_>>>,
        blocks: &HashMap<usize, Arc<LoadedBlock>>,
        meter: &mut Meter,
    ) -> Result<()> {
        let Some(pool) = pool(self.threads_for(&spans))? else {
            return spans.into_iter().try_for_each(|span| {
                self.run_span(span, blocks, &self.idle, &mut |bytes| meter.add(bytes))
            });
        };
        // Workers report to this thread what they have done; it reports to the caller, who may cancel.
        let (sender, receiver) = channel::<Result<u64>>();
        let stop = AtomicBool::new(false);
        pool.in_place_scope(|scope| {
            for span in spans {
                let (sender, stop) = (sender.clone(), &stop);
                scope.spawn(move |_| {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let done = self.run_span(span, blocks, &self.idle, &mut |bytes| {
                        send(&sender, Ok(bytes));
                        if stop.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
                    });
                    if let Err(e) = done {
                        send(&sender, Err(e));
                    }
                });
            }
            drop(sender);
            let mut outcome = Ok(());
            for message in receiver {
                let step = message.and_then(|bytes| meter.add(bytes));
                // The first error is the one that counts; the others follow from it.
                if let (Ok(()), Err(e)) = (&outcome, step) {
                    outcome = Err(e);
                    stop.store(true, Ordering::Relaxed);
                }
            }
            outcome
        })
    }

    /// Reads the bytes of a span and decodes its chunks. What they are predicted from is read
    /// first, so that a thread holds the bytes of one checkpoint of the chain at a time.
    fn run_span(
        &self,
        mut span: Span<Job<'_>>,
        blocks: &HashMap<usize, Arc<LoadedBlock>>,
        idle: &Mutex<Vec<Buffers>>,
        done: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        self.fill_parents(&mut span.jobs, blocks, idle)?;
        self.fill_inputs(&mut span.jobs, idle)?;
        let mut buffers = lock(idle).pop().unwrap_or_default();
        let outcome = self.decode_span(span, blocks, &mut buffers, done);
        lock(idle).push(buffers);
        outcome
    }

    /// Reads the parent's values for every chunk that is a delta, to where decoding expects them.
    fn fill_parents(
        &self,
        span: &mut [Job<'_>],
        blocks: &HashMap<usize, Arc<LoadedBlock>>,
        idle: &Mutex<Vec<Buffers>>,
    ) -> Result<()> {
        let mut from = None;
        let mut wants = vec![];
        for job in span.iter_mut().filter(|j| j.delta && !j.in_place) {
            let Some((parent, tensor)) = self.input(job.tensor)? else { continue };
            let spec = self.spec(job.tensor, &blocks[&job.tensor]);
            let first = (job.chunk * spec.dtype.value_width() as u64) << spec.chunk_log2;
            let whole = job.is_whole();
            let to = match job.destinations.first_mut() {
                Some(first) if whole => &mut *first.to,
                _ => {
                    job.parent = vec![0; job.bytes];
                    &mut job.parent
                }
            };
            wants.push(Want { tensor, first, to });
            from = Some(parent);
        }
        from.map_or(Ok(()), |parent| parent.fill(wants, idle))
    }

    /// The values of other tensors of this checkpoint that a chunk of `bytes` bytes needs.
    pub(crate) fn values_beside(
        &self,
        tensor: usize,
        block: &LoadedBlock,
        chunk: u64,
        bytes: u64,
    ) -> Result<Vec<Vec<u8>>> {
        let own_inputs = self.own_input_values(tensor, block, chunk, bytes)?;
        let (mut out, mut silent) = (vec![], Meter { callback: None, done: 0, total: 0 });
        for OwnInputValues { tensor, first, bytes, .. } in own_inputs {
            let mut values = vec![0; bytes];
            let wants = vec![Want { tensor, first, to: &mut values }];
            let wants = self.fill_mixed(wants, &mut silent)?;
            self.fill(wants, &self.idle)?;
            out.push(values);
        }
        Ok(out)
    }

    /// Reads the values of other tensors of this checkpoint that chunks need.
    fn fill_inputs(&self, span: &mut [Job<'_>], idle: &Mutex<Vec<Buffers>>) -> Result<()> {
        let mut wants = vec![];
        let own_inputs = span.iter_mut().flat_map(|job| &mut job.own_inputs);
        for OwnInputValues { tensor, first, bytes, read, .. } in
            own_inputs.filter(|b| b.given.is_none())
        {
            *read = vec![0; *bytes];
            wants.push(Want { tensor: *tensor, first: *first, to: read });
        }
        if wants.is_empty() {
            return Ok(());
        }
        let mut silent = Meter { callback: None, done: 0, total: 0 };
        let wants = self.fill_mixed(wants, &mut silent)?;
        self.fill(wants, idle)
    }

    fn decode_span(
        &self,
        mut span: Span<Job<'_>>,
        blocks: &HashMap<usize, Arc<LoadedBlock>>,
        buffers: &mut Buffers,
        done: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let Buffers { scratch, span: read, chunk } = buffers;
        let lent = self.in_memory(span.object, span.first..span.end);
        let frames: &[u8] = match &lent {
            Some(bytes) => &bytes[..],
            None => {
                let to = sized(read, span.bytes());
                self.read_object(span.object, span.first, to)?;
                to
            }
        };
        for job in std::mem::take(&mut span.jobs) {
            let at = span.at(&job.record);
            let frame = &frames[at..at + job.record.len as usize];
            let bytes: u64 = job.destinations.iter().map(|p| p.to.len() as u64).sum();
            self.decode(job, frame, blocks, scratch, chunk)?;
            done(bytes)?;
        }
        Ok(())
    }

    fn decode(
        &self,
        job: Job<'_>,
        frame: &[u8],
        blocks: &HashMap<usize, Arc<LoadedBlock>>,
        scratch: &mut Scratch,
        chunk: &mut Vec<u8>,
    ) -> Result<()> {
        let spec = self.spec(job.tensor, &blocks[&job.tensor]);
        let (whole, delta) = (job.is_whole(), job.delta);
        // The parent's values are already at the destination.
        let parent = delta.then_some(InputValues::Destination);
        let own_inputs = job.own_inputs.iter().map(|b| InputValues::Slice(b.values()));
        let inputs: Vec<_> = parent.into_iter().chain(own_inputs).collect();
        let mut destinations = job.destinations;
        let mut decode = |to: &mut [u8]| {
            let (chunk, record) = (job.chunk, &job.record);
            let chunk = DecodeJob { spec: &spec, chunk, record, frame, inputs: &inputs };
            self.engine
                .decode(&chunk, scratch, to)
                .map_err(|e| e.in_tensor(self.label(job.tensor)))
                .at(&self.name)
        };
        if let Some(first) = destinations.first_mut().filter(|_| whole) {
            return decode(first.to);
        }
        let mut parent = job.parent;
        let values = if delta { &mut parent } else { chunk };
        decode(sized(values, job.bytes))?;
        for p in destinations {
            p.to.copy_from_slice(&values[p.from..p.from + p.to.len()]);
        }
        Ok(())
    }

    /// Decodes every chunk of the file and compares its checksums, keeping nothing.
    pub(crate) fn decode_all(&self, chunks: &mut u64) -> Result<Meter> {
        let hosts: Vec<usize> = (0..self.tensors.len())
            .filter(|&t| matches!(self.tensors[t].kind, TensorKind::Chunks { .. }))
            .collect();
        self.prepare(&hosts)?;
        let blocks = self.blocks(&hosts)?;
        let sizes = hosts.iter().map(|&t| self.tensors[t].bytes());
        let total = sizes.sum::<s4_format::Result<u64>>().at(&self.name)?;
        let mut meter = self.meter(total);
        let mut jobs = vec![];
        for &tensor in &hosts {
            let block = &blocks[&tensor];
            *chunks += block.records.len() as u64;
            if self.check_mixed(tensor, &mut meter)? {
                continue;
            }
            let all = self.tensors[tensor].bytes().at(&self.name)?;
            for part in self.parts(tensor, 0, all, &blocks)? {
                jobs.push(self.job(&part, &blocks)?);
            }
        }
        let threads = thread_count(self.options.threads);
        let done = self.run(self.request_spans(jobs, threads), &blocks, &mut meter);
        self.let_go();
        done.map(|()| meter)
    }
}

fn send(sender: &Sender<Result<u64>>, message: Result<u64>) {
    // The receiver lives as long as the scope, so it cannot have been dropped.
    let _ = sender.send(message);
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use s4_format::DType;

    use super::*;
    use crate::{Contents, ReadOptions, Source, Target, TensorSource, WriteOptions, Writer};

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// A file of one array of fp32 values, its rounded copy, and zeros; read with `threads` threads.
    fn reader(threads: usize) -> Reader {
        let count = 1 << 21;
        let values =
            (0..count as u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 2 | 1 << 29) & !0xffff);
        let wide: Vec<u8> = values.clone().flat_map(u32::to_le_bytes).collect();
        let rounded: Vec<u8> = values.flat_map(|v| ((v >> 16) as u16).to_le_bytes()).collect();
        let zeros = vec![0; 4 * count];
        let shape = [count as u64];
        let kept = Kept::default();
        let target = Target::Stream(Box::new(kept.clone()));
        let mut writer = Writer::create(target, WriteOptions::default()).unwrap();
        let tensors = [
            TensorSource::new("rounded", DType::BFloat16, &shape, &rounded[..]),
            TensorSource::new("wide", DType::Float32, &shape, &wide[..]),
            TensorSource::new("zeros", DType::Float32, &shape, &zeros[..]),
        ];
        writer.write(&tensors).unwrap();
        writer.finish(Contents::default()).unwrap();
        let bytes = std::mem::take(&mut *kept.0.lock().unwrap());
        let options = ReadOptions { threads: Some(threads), ..ReadOptions::default() };
        Reader::open(Source::Bytes(bytes.into()), options).unwrap()
    }

    /// The stored bytes of a tensor, and how many threads read it.
    fn threads_of(reader: &Reader, name: &str, threads: usize) -> (u64, usize) {
        let tensor = reader.find(name).unwrap();
        reader.prepare(&[tensor]).unwrap();
        let blocks = reader.blocks(&[tensor]).unwrap();
        let stored = blocks[&tensor].records.iter().map(|r| u64::from(r.len)).sum();
        let mut to = vec![0; reader.tensors[tensor].bytes().unwrap() as usize];
        let jobs = reader.jobs(vec![Want { tensor, first: 0, to: &mut to }], &blocks).unwrap();
        let spans = reader.request_spans(jobs, threads);
        (stored, reader.threads_for(&spans))
    }

    #[test]
    fn values_that_are_hardly_stored_are_filled_by_all_threads() {
        let reader = reader(4);
        for name in ["rounded", "zeros"] {
            let (stored, threads) = threads_of(&reader, name, 4);
            assert!(stored < 4096, "{name}: {stored} bytes");
            assert_eq!(threads, 4, "{name}");
        }
        assert_eq!(threads_of(&reader, "wide", 4).1, 4);
    }
}
