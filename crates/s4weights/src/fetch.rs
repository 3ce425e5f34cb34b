//! Reads and decodes the chunks that hold wanted bytes.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use s4_engine::Scratch;
use s4_format::ChunkRecord;
use s4_format::index::TensorKind;

use crate::error::{At, Error, Result};
use crate::options::{Meter, thread_count};
use crate::parallel::pool;
use crate::reader::{LoadedBlock, Reader};

/// Requests under way at once where they are slow to answer.
const REMOTE_REQUESTS: usize = 8;

/// Bytes of a tensor that are wanted.
pub(crate) struct Want<'a> {
    pub(crate) tensor: usize,
    /// First byte within the tensor.
    pub(crate) first: u64,
    pub(crate) to: &'a mut [u8],
}

/// Bytes of a decoded chunk that go somewhere.
struct Piece<'a> {
    from: usize,
    to: &'a mut [u8],
}

/// A chunk to be decoded.
struct Job<'a> {
    tensor: usize,
    chunk: u64,
    record: ChunkRecord,
    /// Bytes of the decoded chunk.
    bytes: usize,
    pieces: Vec<Piece<'a>>,
}

/// Buffers of one thread.
#[derive(Default)]
struct Buffers {
    scratch: Scratch,
    span: Vec<u8>,
    chunk: Vec<u8>,
}

impl Reader {
    /// Fills every want.
    pub(crate) fn fetch(&self, wants: Vec<Want<'_>>) -> Result<()> {
        let total = wants.iter().map(|w| w.to.len() as u64).sum();
        let wants = wants.into_iter().map(|w| self.in_host(w)).collect::<Result<Vec<_>>>()?;
        let mut hosts: Vec<usize> = wants.iter().map(|w| w.tensor).collect();
        hosts.sort_unstable();
        hosts.dedup();
        let blocks = self.blocks(&hosts)?;
        let spans = self.spans(self.jobs(wants, &blocks)?);
        self.run(spans, &blocks, total)
    }

    /// Where the bytes of a packed tensor are: in its pack.
    fn in_host<'a>(&self, want: Want<'a>) -> Result<Want<'a>> {
        let tensor = &self.tensors[want.tensor];
        Ok(match tensor.kind {
            TensorKind::Chunks { .. } => want,
            TensorKind::Packed { pack, first } => {
                let at = first * tensor.dtype.value_width() as u64;
                Want { tensor: pack as usize, first: at + want.first, to: want.to }
            }
        })
    }

    /// Cuts wants at the borders of chunks.
    fn jobs<'a>(
        &self,
        wants: Vec<Want<'a>>,
        blocks: &HashMap<usize, Arc<LoadedBlock>>,
    ) -> Result<Vec<Job<'a>>> {
        let mut jobs: BTreeMap<(usize, u64), Job<'a>> = BTreeMap::new();
        for want in wants {
            let tensor = &self.tensors[want.tensor];
            let block = &blocks[&want.tensor];
            let log2 = self.spec(want.tensor, block).chunk_log2;
            let size = (tensor.dtype.value_width() as u64) << log2;
            let all = tensor.bytes().at(&self.name)?;
            let (mut at, mut rest) = (want.first, want.to);
            while !rest.is_empty() {
                let chunk = at / size;
                let bytes = size.min(all - chunk * size) as usize;
                let from = (at % size) as usize;
                let (now, later) = rest.split_at_mut(rest.len().min(bytes - from));
                at += now.len() as u64;
                rest = later;
                let job = jobs.entry((want.tensor, chunk)).or_insert_with(|| Job {
                    tensor: want.tensor,
                    chunk,
                    record: block.records[chunk as usize],
                    bytes,
                    pieces: vec![],
                });
                job.pieces.push(Piece { from, to: now });
            }
        }
        Ok(jobs.into_values().collect())
    }

    /// Groups chunks that lie close together: each group is read by one request.
    fn spans<'a>(&self, mut jobs: Vec<Job<'a>>) -> Vec<Vec<Job<'a>>> {
        jobs.sort_by_key(|j| (j.record.object, j.record.offset));
        let request = self.source.request_size() as u64;
        let mut spans: Vec<Vec<Job<'a>>> = vec![];
        for job in jobs {
            let end = job.record.offset + u64::from(job.record.len);
            let joins = spans.last().is_some_and(|s| {
                let (first, last) = (&s[0].record, &s[s.len() - 1].record);
                let last_end = last.offset + u64::from(last.len);
                // A gap of a sixteenth of a request is cheaper to read than to skip.
                first.object == job.record.object
                    && job.record.offset <= last_end + request / 16
                    && end.max(last_end) - first.offset <= request
            });
            match spans.last_mut() {
                Some(span) if joins => span.push(job),
                _ => spans.push(vec![job]),
            }
        }
        spans
    }

    fn run(
        &self,
        spans: Vec<Vec<Job<'_>>>,
        blocks: &HashMap<usize, Arc<LoadedBlock>>,
        total: u64,
    ) -> Result<()> {
        let mut meter = Meter { callback: self.options.progress.clone(), done: 0, total };
        let mut threads = thread_count(self.options.threads);
        if self.source.request_size() > 1 << 20 {
            threads = threads.max(REMOTE_REQUESTS);
        }
        let Some(pool) = pool(threads.min(spans.len()))? else {
            let mut buffers = Buffers::default();
            return spans.into_iter().try_for_each(|span| {
                self.run_span(span, blocks, &mut buffers, &mut |bytes| meter.add(bytes))
            });
        };
        // Workers tell this thread what they have done; it tells the caller, who may cancel.
        let (tell, told) = channel::<Result<u64>>();
        let stop = AtomicBool::new(false);
        let idle = Mutex::new(Vec::<Buffers>::new());
        pool.in_place_scope(|scope| {
            for span in spans {
                let (tell, stop, idle) = (tell.clone(), &stop, &idle);
                scope.spawn(move |_| {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let lock = || idle.lock().unwrap_or_else(|e| e.into_inner());
                    let mut buffers = lock().pop().unwrap_or_default();
                    let done = self.run_span(span, blocks, &mut buffers, &mut |bytes| {
                        send(&tell, Ok(bytes));
                        if stop.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
                    });
                    if let Err(e) = done {
                        send(&tell, Err(e));
                    }
                    lock().push(buffers);
                });
            }
            drop(tell);
            let mut outcome = Ok(());
            for message in told {
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

    /// Reads the bytes of a span and decodes its chunks.
    fn run_span(
        &self,
        span: Vec<Job<'_>>,
        blocks: &HashMap<usize, Arc<LoadedBlock>>,
        buffers: &mut Buffers,
        done: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let Some(start) = span.first().map(|j| j.record.offset) else { return Ok(()) };
        let ends = span.iter().map(|j| j.record.offset + u64::from(j.record.len));
        let len = (ends.max().unwrap_or(start) - start) as usize;
        if buffers.span.len() < len {
            buffers.span.resize(len, 0);
        }
        self.source.read_at(start, &mut buffers.span[..len])?;
        for job in span {
            let at = (job.record.offset - start) as usize;
            let bytes: u64 = job.pieces.iter().map(|p| p.to.len() as u64).sum();
            self.decode(job, at, blocks, buffers)?;
            done(bytes)?;
        }
        Ok(())
    }

    fn decode(
        &self,
        job: Job<'_>,
        at: usize,
        blocks: &HashMap<usize, Arc<LoadedBlock>>,
        buffers: &mut Buffers,
    ) -> Result<()> {
        let Buffers { scratch, span, chunk } = buffers;
        let frame = &span[at..at + job.record.len as usize];
        let spec = self.spec(job.tensor, &blocks[&job.tensor]);
        let mut pieces = job.pieces;
        let mut decode = |to: &mut [u8]| {
            self.engine
                .decode_chunk(&spec, job.chunk, &job.record, frame, scratch, to)
                .map_err(|e| e.in_tensor(self.label(job.tensor)))
                .at(&self.name)
        };
        if let [piece] = pieces.as_mut_slice()
            && piece.to.len() == job.bytes
        {
            return decode(piece.to);
        }
        if chunk.len() < job.bytes {
            chunk.resize(job.bytes, 0);
        }
        decode(&mut chunk[..job.bytes])?;
        for p in pieces {
            p.to.copy_from_slice(&chunk[p.from..p.from + p.to.len()]);
        }
        Ok(())
    }

    /// Decodes every chunk of the file and compares its checksums, keeping nothing.
    pub(crate) fn decode_all(&self, chunks: &mut u64) -> Result<()> {
        let hosts: Vec<usize> = (0..self.tensors.len())
            .filter(|&t| matches!(self.tensors[t].kind, TensorKind::Chunks { .. }))
            .collect();
        let blocks = self.blocks(&hosts)?;
        let mut jobs = vec![];
        let mut total = 0;
        for &tensor in &hosts {
            let block = &blocks[&tensor];
            let size = (self.tensors[tensor].dtype.value_width() as u64)
                << self.spec(tensor, block).chunk_log2;
            let all = self.tensors[tensor].bytes().at(&self.name)?;
            for (chunk, record) in block.records.iter().enumerate() {
                let chunk = chunk as u64;
                let bytes = size.min(all - chunk * size) as usize;
                jobs.push(Job { tensor, chunk, record: *record, bytes, pieces: vec![] });
            }
            total += all;
        }
        *chunks = jobs.len() as u64;
        self.run(self.spans(jobs), &blocks, total)
    }
}

fn send(tell: &Sender<Result<u64>>, message: Result<u64>) {
    // The receiver lives as long as the scope; it cannot be gone.
    let _ = tell.send(message);
}
