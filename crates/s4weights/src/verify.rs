//! Checks a file, and reports what is in it.

use std::collections::BTreeSet;

use rayon::{ThreadPool, prelude::*};
use s4_format::index::TensorKind;
use s4_format::layout::Planes;
use s4_format::manifest::ClosedCodec;
use s4_format::{ChunkRecord, Digest, StreamEntry};

use crate::error::{At, Result};
use crate::hash::TreeHasher;
use crate::interrupt;
use crate::parallel::{CONNECTIONS, pool, thread_count, worth};
use crate::progress::Meter;
use crate::reader::Reader;
use crate::report::{Inspection, PlaneReport, TensorReport, Verification, plane_name};
use crate::spans::Span;

/// Number of parts of an object that are read in parallel. They are in memory together, and in the cache
/// if they are local.
const READS: usize = 4;
/// Most bytes of such a part, whatever request size a source asks for: an object's claimed size is
/// not verified yet.
const READ: usize = 8 << 20;

/// Headers of chunks are read together if fewer bytes than this lie between them; one request reads at most [`HEADERS`].
const HEADERS_GAP: u64 = 16 << 10;
const HEADERS: u64 = 1 << 20;

impl Reader {
    /// Reads the whole file and compares every hash and every checksum.
    ///
    /// # Errors
    /// The first difference, as reading would report it.
    pub fn verify(&self) -> Result<Verification> {
        let mut out = Verification { tensors: self.named() as u64, ..Verification::default() };
        let mut meter = self.decode_all(&mut out.chunks)?;
        out.bytes = self.tensors().map(|t| t.bytes).sum();
        out.hashes += self.verify_objects(&mut meter)?;
        for name in self.manifest.blobs.keys() {
            self.blob(name)?;
            out.hashes += 1;
        }
        // Manifest and tensor table were compared when the file was opened.
        out.hashes += 2;
        Ok(out)
    }

    /// Compares the hashes of the objects, by all threads; returns how many there are.
    fn verify_objects(&self, meter: &mut Meter) -> Result<u64> {
        let objects = &self.manifest.objects;
        let window = (READS * self.read_size()) as u64;
        let most = objects.iter().map(|o| o.bytes).max().unwrap_or_default().min(window);
        let pool = pool(worth(thread_count(self.options.threads), most >> 20))?;
        let mut buffer = vec![];
        for (number, object) in (0..).zip(objects) {
            let mut hasher = TreeHasher::default();
            let mut at = 0;
            while at < object.bytes {
                let len = (object.bytes - at).min(window);
                let known = self.in_memory(number, at..at + len);
                let bytes = match &known {
                    Some(bytes) => &bytes[..],
                    None => {
                        if buffer.is_empty() {
                            buffer = self.buffer(most)?;
                        }
                        let into = &mut buffer[..len as usize];
                        self.read_window(number, at, into, pool.as_ref())?;
                        into
                    }
                };
                match &pool {
                    Some(pool) => pool.install(|| hasher.update_in_pool(&[bytes])),
                    None => hasher.update(bytes),
                }
                at += len;
                // Progress counts values, all of which were read by now; the call shows that work goes
                // on, and may cancel it.
                meter.add(0)?;
            }
            if Digest(*hasher.finalize().as_bytes()) != object.blake3 {
                let e = s4_format::Error::corrupt("hash mismatch in the chunks' bytes");
                return Err(e.in_part("object")).at(&self.name);
            }
        }
        Ok(objects.len() as u64)
    }

    /// Bytes of a part that is read at once.
    fn read_size(&self) -> usize {
        self.request_size().min(READ)
    }

    /// Fills `into` with the bytes of an object from `at` on, in parts that a pool reads in
    /// parallel.
    fn read_window(
        &self,
        number: u32,
        at: u64,
        into: &mut [u8],
        pool: Option<&ThreadPool>,
    ) -> Result<()> {
        let size = self.read_size();
        let read =
            |(i, part): (usize, &mut [u8])| self.read_object(number, at + (i * size) as u64, part);
        let mut parts = into.chunks_mut(size).enumerate();
        match pool {
            Some(pool) => pool.install(|| parts.par_bridge().try_for_each(read)),
            None => parts.try_for_each(read),
        }
    }

    /// Describes the content of the file. `planes`: also read the header of every chunk and add up its streams.
    ///
    /// # Errors
    /// As reading.
    pub fn inspect(&self, planes: bool) -> Result<Inspection> {
        let m = &self.manifest;
        let pool = pool(if planes && self.any_remote() { CONNECTIONS } else { 1 })?;
        let tensors = (0..self.named()).map(|t| self.inspect_tensor(t, planes, pool.as_ref()));
        let bytes = self.tensors().map(|t| t.bytes).sum();
        let beside = m.objects.iter().filter(|o| o.name.is_some());
        let file_bytes = beside.fold(self.source.len(), |n, o| n.saturating_add(o.bytes));
        Ok(Inspection {
            format: m.format.to_string(),
            writer: m.writer.clone(),
            preset: m.preset.clone(),
            form: m.form,
            digest: self.digest().to_string(),
            file_bytes,
            bytes,
            ratio: bytes as f64 / file_bytes as f64,
            metadata: m.metadata.clone(),
            parent: m.parent.map(|p| p.manifest.to_string()),
            chain: m.depth(),
            closed_codecs: m.closed_codecs.iter().map(closed_name).collect(),
            tensors: tensors.collect::<Result<_>>()?,
        })
    }

    fn inspect_tensor(
        &self,
        number: usize,
        planes: bool,
        pool: Option<&ThreadPool>,
    ) -> Result<TensorReport> {
        let t = &self.tensors[number];
        let mut out = TensorReport {
            name: t.name.clone(),
            dtype: t.dtype,
            shape: t.shape.clone(),
            bytes: t.bytes().at(&self.name)?,
            stored: None,
            plan: "packed".into(),
            planes: vec![],
        };
        let TensorKind::Chunks { block, .. } = t.kind else { return Ok(out) };
        let plan = &self.manifest.plans[usize::from(t.plan)];
        out.plan = format!("{} {} {}", plan.predictor, plan.residual, plan.layout);
        let blocks = self.blocks(&[number])?;
        let records = &blocks[&number].records;
        let chunks: u64 = records.iter().map(|r| u64::from(r.len)).sum();
        out.stored = Some(chunks + u64::from(block.len));
        if planes {
            out.planes = self.inspect_planes(number, records, pool)?;
        }
        Ok(out)
    }

    fn inspect_planes(
        &self,
        number: usize,
        records: &[ChunkRecord],
        pool: Option<&ThreadPool>,
    ) -> Result<Vec<PlaneReport>> {
        let t = &self.tensors[number];
        let layout = self.manifest.plans[usize::from(t.plan)].layout;
        let streams = Planes::new(layout, t.dtype.value_width(), 0).at(&self.name)?.sizes().len();
        let mut sums = vec![(0u64, BTreeSet::new()); streams];
        let plain = records.iter().filter(|r| r.plain).map(|r| u64::from(r.len)).sum();
        let chunks = (0u64..).zip(records).filter(|(_, r)| !r.plain).collect();
        // The headers of chunks that lie close together are read by one request.
        let groups =
            self.spans(chunks, HEADERS, HEADERS_GAP, |(_, r)| head_of(r, streams), |_, _, _| true);
        let read = |group: Span<(u64, &ChunkRecord)>| {
            interrupt::check()?;
            let mut bytes = vec![0; group.bytes()];
            self.read_object(group.object, group.first, &mut bytes)?;
            let headers = group.jobs.iter().map(|&(i, r)| {
                let head = &bytes[group.at(r)..][..head_of(r, streams).len as usize];
                let header = StreamEntry::parse_header(head, streams, r.len as usize);
                header.map_err(|e| e.in_chunk(i).in_tensor(&t.name)).at(&self.name)
            });
            headers.collect::<Result<Vec<_>>>()
        };
        let headers: Vec<_> = match pool {
            Some(pool) => pool.install(|| groups.into_par_iter().map(read).collect::<Result<_>>()),
            None => groups.into_iter().map(read).collect(),
        }?;
        for header in headers.iter().flatten() {
            for (sum, entry) in sums.iter_mut().zip(header) {
                sum.0 += u64::from(entry.len);
                sum.1.insert(entry.codec.to_string());
            }
        }
        let values = t.values().at(&self.name)?.max(1) as f64;
        let report = |plane: String, codecs: Vec<String>, bytes: u64| PlaneReport {
            plane,
            codecs,
            bytes,
            bits_per_value: bytes as f64 * 8.0 / values,
        };
        let mut out: Vec<_> = (sums.into_iter().enumerate())
            .filter(|(_, s)| !s.1.is_empty())
            .map(|(i, s)| report(plane_name(layout, i), s.1.into_iter().collect(), s.0))
            .collect();
        if plain > 0 {
            out.push(report("plain".into(), vec!["raw".into()], plain));
        }
        Ok(out)
    }
}

/// The record of a chunk's header instead of the whole chunk.
fn head_of(record: &ChunkRecord, streams: usize) -> ChunkRecord {
    let len = record.len.min(StreamEntry::header_len(streams) as u32);
    ChunkRecord { len, ..*record }
}

/// A closed codec and the version of the library that reads it.
fn closed_name(c: &ClosedCodec) -> String {
    format!("{} {}", c.codec, c.library_major)
}
