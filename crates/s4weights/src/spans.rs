//! The ranges to read from a file: wanted bytes, cut at chunk borders, with nearby chunks joined.

use std::collections::HashMap;
use std::sync::Arc;

use s4_format::ChunkRecord;
use s4_format::index::TensorKind;

use crate::error::{At, Result};
use crate::reader::{LoadedBlock, Reader};

/// The wanted part of a chunk.
pub(crate) struct Part {
    /// The tensor whose chunk it is.
    pub(crate) host: usize,
    pub(crate) chunk: u64,
    pub(crate) record: ChunkRecord,
    /// Bytes of the chunk's values, and which of them are wanted.
    pub(crate) bytes: u64,
    pub(crate) from: u64,
    pub(crate) len: u64,
}

/// Chunks that are read by one request.
pub(crate) struct Span<J> {
    pub(crate) object: u32,
    /// The first byte that is read, and the end.
    pub(crate) first: u64,
    pub(crate) end: u64,
    pub(crate) jobs: Vec<J>,
}

impl<J> Span<J> {
    pub(crate) fn bytes(&self) -> usize {
        (self.end - self.first) as usize
    }

    /// The offset of a chunk's frame in the bytes that are read.
    pub(crate) fn at(&self, record: &ChunkRecord) -> usize {
        (record.offset - self.first) as usize
    }
}

impl Reader {
    /// Cuts `len` bytes of a tensor, from byte `first` on, at the borders of the chunks that hold them.
    pub(crate) fn parts(
        &self,
        tensor: usize,
        first: u64,
        len: u64,
        blocks: &HashMap<usize, Arc<LoadedBlock>>,
    ) -> Result<Vec<Part>> {
        let host = self.host(tensor);
        let (t, block) = (&self.tensors[host], &blocks[&host]);
        let width = t.dtype.value_width() as u64;
        let size = width << self.spec(host, block).chunk_log2;
        let all = t.bytes().at(&self.name)?;
        let in_host = match self.tensors[tensor].kind {
            TensorKind::Chunks { .. } => 0,
            TensorKind::Packed { first, .. } => first * width,
        };
        let (mut at, end) = (in_host + first, in_host + first + len);
        let mut parts = vec![];
        while at < end {
            let (chunk, from) = (at / size, at % size);
            let bytes = size.min(all - chunk * size);
            let len = (end - at).min(bytes - from);
            let record = block.records[chunk as usize];
            parts.push(Part { host, chunk, record, bytes, from, len });
            at += len;
        }
        Ok(parts)
    }

    /// Bytes that are cheaper to read than to skip: a sixteenth of a request.
    pub(crate) fn gap(&self) -> u64 {
        self.request_size() as u64 / 16
    }

    /// Groups jobs whose chunks lie close together in one object, with at most `gap` bytes between them, into spans of at
    /// most `most` bytes. `joins` decides whether a job joins the span before it: it is given whether the job's
    /// chunk is close enough, that span's last job, and the job.
    pub(crate) fn spans<J>(
        &self,
        mut jobs: Vec<J>,
        most: u64,
        gap: u64,
        record: impl Fn(&J) -> ChunkRecord,
        mut joins: impl FnMut(bool, Option<&J>, &J) -> bool,
    ) -> Vec<Span<J>> {
        jobs.sort_by_key(|job| (record(job).object, record(job).offset));
        let mut spans: Vec<Span<J>> = vec![];
        for job in jobs {
            let ChunkRecord { object, offset, len, .. } = record(&job);
            let end = offset + u64::from(len);
            let close = spans.last().is_some_and(|s| {
                s.object == object && offset <= s.end + gap && end.max(s.end) - s.first <= most
            });
            let joined = joins(close, spans.last().and_then(|s| s.jobs.last()), &job);
            match spans.last_mut().filter(|_| close && joined) {
                Some(span) => {
                    span.end = span.end.max(end);
                    span.jobs.push(job);
                }
                None => spans.push(Span { object, first: offset, end, jobs: vec![job] }),
            }
        }
        spans
    }
}
