//! Reads a `.s4w` file, whole or in part.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use object_store::PutPayload;
use rayon::prelude::*;
use s4_engine::codec::Codecs;
use s4_engine::{CpuEngine, TensorSpec};
use s4_format::file::{self, Footer, HEADER_LEN};
use s4_format::index::{self, Tensor, TensorKind, chunk_count};
use s4_format::manifest::{self, Manifest, Section};
use s4_format::plan::check_dependencies;
use s4_format::side::Side;
use s4_format::{ChunkRecord, DType, Digest};
use s4_planes::Simd;

use crate::buffers::{Buffers, expect_writes};
use crate::error::{At, Error, Result};
use crate::extents::Extents;
use crate::io::{ReadAt, Source, TailSource, open_source};
use crate::objects::{MemoryObjects, ObjectSource};
use crate::parallel::{lock, pool, simd, thread_count, worth};
use crate::progress::ProgressFn;
use crate::slice::{ArrayView, Slice};

/// About how many tensor blocks are parsed in the time that a thread takes to start.
const PARSED: usize = 512;

/// A tensor of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Its name.
    pub name: &'a str,
    /// Type of the elements.
    pub dtype: DType,
    /// Size of each dimension, in elements.
    pub shape: &'a [u64],
    /// Bytes of the values.
    pub bytes: u64,
}

/// Finds the parent of a checkpoint: opens the checkpoint whose manifest has this hash. Each reader calls
/// it once, when a value that is stored as a delta is first read (more often only if several threads do so
/// at the same time).
pub type ParentResolver = Arc<dyn Fn(&Digest) -> Result<Arc<Reader>> + Send + Sync>;

/// Options of a [`Reader`].
#[derive(Clone, Default)]
pub struct ReadOptions {
    /// Threads that decode; `None`: as many as the machine has cores.
    pub threads: Option<usize>,
    /// Vector instructions; `None`: the best that the machine has.
    pub simd: Option<Simd>,
    /// As [`crate::WriteOptions::deadline`].
    pub deadline: Option<Duration>,
    /// Called with the progress.
    pub progress: Option<ProgressFn>,
    /// Finds the parent of a delta. Without it, only tensors that are not deltas can be read.
    pub parents: Option<ParentResolver>,
    /// Whether the file is known to come from a program that is trusted. Only then are a vendor's
    /// closed codecs decoded, on a GPU: the vendor's decoders are not safe on other bytes.
    pub trusted: bool,
    /// Codecs besides the project's, as [`crate::OwnCodecs::codecs`].
    pub codecs: Codecs,
}

impl fmt::Debug for ReadOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadOptions")
            .field("threads", &self.threads)
            .field("simd", &self.simd)
            .field("parents", &self.parents.is_some())
            .field("trusted", &self.trusted)
            .finish_non_exhaustive()
    }
}

/// An open file. All methods may be called from many threads.
pub struct Reader {
    pub(crate) name: String,
    pub(crate) source: Box<dyn ReadAt>,
    pub(crate) objects: Option<Box<dyn ObjectSource>>,
    pub(crate) manifest: Manifest,
    pub(crate) footer: Footer,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) engine: CpuEngine,
    pub(crate) options: ReadOptions,
    /// Numbers of the tensors that the caller sees, in the order of names.
    by_name: Vec<u32>,
    /// Number of tensors that the caller sees; packs follow them.
    named: usize,
    blocks: Mutex<Blocks>,
    /// The parent, once it is known.
    pub(crate) parent: OnceLock<Arc<Reader>>,
    /// The checkpoint, with the same values, that this one replaced.
    pub(crate) stands_for: OnceLock<manifest::Parent>,
    pub(crate) idle: Mutex<Vec<Buffers>>,
}

/// Bytes of a tensor that are wanted.
pub(crate) struct Want<'a> {
    pub(crate) tensor: usize,
    /// First byte within the tensor.
    pub(crate) first: u64,
    pub(crate) to: &'a mut [u8],
}

impl Want<'_> {
    pub(crate) fn reborrow(&mut self) -> Want<'_> {
        Want { tensor: self.tensor, first: self.first, to: &mut *self.to }
    }
}

/// Tensor blocks that were read, by tensor, and where their chunks are.
#[derive(Default)]
struct Blocks {
    /// One entry per tensor; none before a block is read.
    loaded: Vec<Option<Arc<LoadedBlock>>>,
    extents: Extents,
}

impl Blocks {
    fn get(&self, tensor: usize) -> Option<Arc<LoadedBlock>> {
        self.loaded.get(tensor).cloned().flatten()
    }
}

/// Side data and chunk table of a tensor.
pub(crate) struct LoadedBlock {
    pub(crate) side: Side,
    pub(crate) records: Vec<ChunkRecord>,
}

impl Reader {
    /// Opens a file: reads its end, its manifest and its tensor table. A file that needs closed
    /// codecs opens anywhere; reading values that need them is a `Format` error that says what is
    /// missing, or that the file must be trusted ([`ReadOptions::trusted`]).
    ///
    /// # Errors
    /// `NotFound`, `Io`, or `Format` if it is not a `.s4w` file, damaged, truncated or of another
    /// version.
    pub fn open(source: Source, options: ReadOptions) -> Result<Self> {
        Self::open_with(source, None, options)
    }

    /// Opens a checkpoint whose chunks are in objects. `index` holds the bytes that
    /// [`crate::Written::index`] had.
    ///
    /// # Errors
    /// As [`Reader::open`].
    pub fn open_objects(
        index: Source,
        objects: Box<dyn ObjectSource>,
        options: ReadOptions,
    ) -> Result<Self> {
        Self::open_with(index, Some(objects), options)
    }

    /// As [`Reader::open_objects`], of a checkpoint that is in memory: its index, and its objects in the order
    /// of their numbers, each of which is compared with its hash.
    ///
    /// # Errors
    /// As [`Reader::open`]; `Format` if there are other objects than the index names.
    pub fn open_in_memory(index: Bytes, objects: Vec<Bytes>, options: ReadOptions) -> Result<Self> {
        let held = Box::new(MemoryObjects(
            (0..).zip(objects.iter().cloned().map(PutPayload::from)).collect(),
        ));
        let reader = Self::open_objects(Source::Bytes(index), held, options)?;
        let named: Vec<_> = reader.manifest.objects.iter().filter(|o| o.name.is_some()).collect();
        let damaged =
            |what: String| Err(s4_format::Error::corrupt(what).in_part("object")).at(&reader.name);
        if named.len() != objects.len() {
            return damaged(format!(
                "{} objects, but the index names {}",
                objects.len(),
                named.len()
            ));
        }
        for (n, (object, info)) in objects.iter().zip(named).enumerate() {
            if object.len() as u64 != info.bytes || Digest::of(object) != info.blake3 {
                return damaged(format!("object {n} does not match the index"));
            }
        }
        Ok(reader)
    }

    fn open_with(
        source: Source,
        objects: Option<Box<dyn ObjectSource>>,
        options: ReadOptions,
    ) -> Result<Self> {
        let simd = simd(options.simd)?;
        let (name, source) = open_source(source, options.deadline)?;
        let source = TailSource::new(source)?;
        let len = source.len();
        let mut start = vec![0; HEADER_LEN.min(usize::try_from(len).unwrap_or(HEADER_LEN))];
        source.read_at(0, &mut start)?;
        file::check_header(&start).at(&name)?;
        let footer = Footer::parse(source.tail(), len).at(&name)?;
        let known = Known { source: &source, name: &name };
        let section = Section { offset: footer.offset, bytes: footer.len, blake3: footer.digest };
        let json = known.section(&section, "manifest")?;
        let manifest = Manifest::parse_closed(&json, footer.offset).at(&name)?;
        let engine = CpuEngine::reading(simd, &manifest.closed_codecs, options.trusted);
        let engine = engine.and_codecs(&options.codecs);
        let table = known.section(&manifest.tensors.section, "tensor table")?;
        let tensors = index::parse_table(&table, footer.offset, manifest.plans.len()).at(&name)?;
        if tensors.len() != manifest.tensors.count as usize {
            let what = format!("{} tensors, expected {}", tensors.len(), manifest.tensors.count);
            return Err(s4_format::Error::corrupt(what).in_part("tensor table")).at(&name);
        }
        let named = tensors.iter().take_while(|t| !t.name.is_empty()).count();
        if tensors[named..].iter().any(|t| !t.name.is_empty()) {
            let e = s4_format::Error::corrupt("a pack precedes a named tensor");
            return Err(e.in_part("tensor table")).at(&name);
        }
        let plan = |t: &Tensor| &manifest.plans[usize::from(t.plan)];
        if tensors[named..].iter().any(|t| !plan(t).inputs.is_empty()) {
            let e = s4_format::Error::corrupt("a pack of small tensors is stored as a difference");
            return Err(e.in_part("tensor table")).at(&name);
        }
        let inputs = |t: usize| match tensors[t].kind {
            TensorKind::Chunks { .. } => plan(&tensors[t]).inputs.as_slice(),
            TensorKind::Packed { .. } => &[],
        };
        check_dependencies(named, inputs).map_err(|e| e.in_part("tensor table")).at(&name)?;
        Ok(Self {
            by_name: index::by_name(&tensors),
            name,
            source: Box::new(source),
            objects,
            manifest,
            footer,
            tensors,
            named,
            engine,
            options,
            blocks: Mutex::default(),
            parent: OnceLock::new(),
            stands_for: OnceLock::new(),
            idle: Mutex::default(),
        })
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// BLAKE3 of the manifest: the identity of the checkpoint.
    pub fn digest(&self) -> Digest {
        self.footer.digest
    }

    /// The saved object as typed JSON, if the file has it.
    pub fn tree(&self) -> Option<&str> {
        self.manifest.tree.as_ref().map(|t| t.get())
    }

    /// The tensors, in the order in which they were written. A tensor's position is its number.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorInfo<'_>> {
        self.tensors[..self.named].iter().map(|t| TensorInfo {
            name: &t.name,
            dtype: t.dtype,
            shape: &t.shape,
            // Parsing the index checked that shapes are within limits.
            bytes: t.bytes().unwrap_or(0),
        })
    }

    /// The number of a tensor.
    ///
    /// # Errors
    /// `NoEntry` if there is none of this name.
    pub fn find(&self, name: &str) -> Result<usize> {
        let named = |&i: &u32| self.tensors[i as usize].name.as_str();
        let found = self.by_name.binary_search_by_key(&name, named);
        found.map(|at| self.by_name[at] as usize).map_err(|_| self.no_entry("tensor", name))
    }

    fn no_entry(&self, what: &'static str, name: &str) -> Error {
        Error::NoEntry { target: self.name.clone(), what, name: name.to_owned() }
    }

    /// A named byte string.
    ///
    /// # Errors
    /// `NoEntry`, or the errors of reading.
    pub fn blob(&self, name: &str) -> Result<Vec<u8>> {
        let section = self.manifest.blobs.get(name).ok_or_else(|| self.no_entry("blob", name))?;
        let known = Known { source: &*self.source, name: &self.name };
        known.section(section, "blob")
    }

    /// Reads a tensor.
    ///
    /// # Errors
    /// `NoEntry`, `Io`, `Format` naming tensor and chunk, `Cancelled`.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let number = self.find(name)?;
        let bytes = self.tensors[number].bytes().at(&self.name)?;
        let mut out = self.buffer(bytes)?;
        self.read_into(&mut [(number, &mut out)])?;
        Ok(out)
    }

    /// Reads part of a tensor: row-major, without gaps.
    ///
    /// # Errors
    /// As [`Reader::read`]; `Argument` if the slice does not lie within the tensor.
    pub fn read_slice(&self, name: &str, slice: &Slice) -> Result<Vec<u8>> {
        let number = self.find(name)?;
        let tensor = &self.tensors[number];
        let item = tensor.dtype.size() as u64;
        let mut out = self.buffer(slice.check(name, &tensor.shape)? * item)?;
        self.read_view(
            number,
            ArrayView { offset: 0, item, shape: &tensor.shape },
            slice,
            &mut out,
        )?;
        Ok(out)
    }

    /// Reads part of an array that lies within a tensor's bytes into a buffer of the part's size.
    /// Decodes the chunks that the part touches and no others.
    ///
    /// # Errors
    /// As [`Reader::read`]; `Argument` if the array does not lie within the tensor, the slice not within
    /// the array, or the buffer has another size. Its content is unspecified then.
    pub fn read_view(
        &self,
        number: usize,
        view: ArrayView<'_>,
        slice: &Slice,
        to: &mut [u8],
    ) -> Result<()> {
        let tensor = self.tensor(number)?;
        let ArrayView { offset, item, shape } = view;
        let part = slice.check(&tensor.name, shape)?.checked_mul(item);
        let all = shape.iter().try_fold(item, |n, d| n.checked_mul(*d));
        let end = all.and_then(|n| n.checked_add(offset));
        let empty = part == Some(0);
        if part != Some(to.len() as u64)
            || !(empty || end.is_some_and(|end| tensor.bytes().is_ok_and(|bytes| end <= bytes)))
        {
            return Err(Error::Argument(format!(
                "{} bytes do not fit part {:?} of an array of shape {shape:?}, with elements of {item} bytes, at \
                 byte {offset} of tensor `{}`",
                to.len(),
                slice.0,
                tensor.name
            )));
        }
        let mut meter = self.meter(to.len() as u64);
        self.prepare(&[self.host(number)])?;
        let fetched = self.fetch_slice(number, view, slice, to, &mut meter);
        self.let_go();
        fetched
    }

    /// A tensor by its number.
    pub(crate) fn tensor(&self, number: usize) -> Result<&Tensor> {
        let tensor = self.tensors[..self.named].get(number);
        tensor.ok_or_else(|| Error::Argument(format!("{}: no tensor {number}", self.name)))
    }

    /// Reads tensors, by number, into buffers of their size, in parallel.
    ///
    /// # Errors
    /// As [`Reader::read`]; `Argument` if a buffer does not have its tensor's size. The buffers'
    /// content is unspecified then.
    pub fn read_into(&self, requests: &mut [(usize, &mut [u8])]) -> Result<()> {
        let wants = self.wants(requests)?;
        self.fetch_checked(wants, &mut |wants| self.fetch(wants))
    }

    /// As [`Reader::read_into`], into memory not used yet: asks the system for large pages, since
    /// faulting in small ones may take longer than decoding.
    ///
    /// # Errors
    /// As [`Reader::read_into`].
    pub fn read_into_new(&self, requests: &mut [(usize, &mut [u8])]) -> Result<()> {
        expect_writes(requests.iter_mut().map(|(_, to)| &mut **to));
        self.read_into(requests)
    }

    /// The tensors, by number, that are copies of others of the checkpoint, and those others: if one call reads
    /// them all, each is decoded only once. It does not matter how the other tensors are divided among calls.
    /// `None` if one call should read all tensors: if there is a parent, which each call would open, or if requests
    /// are slow.
    pub fn read_together(&self) -> Option<Vec<usize>> {
        if self.parent_digest().is_some() || self.any_remote() {
            return None;
        }
        let mut numbers = vec![];
        for number in 0..self.named {
            let mut originals = self.plan(number).own_inputs().peekable();
            if originals.peek().is_some() {
                numbers.push(number);
                numbers.extend(originals.map(|o| o as usize));
            }
        }
        numbers.sort_unstable();
        numbers.dedup();
        Some(numbers)
    }

    /// Fills every want. If bytes in objects of a store do not match their checksums, they are read
    /// once more before they count as damaged: they may have been damaged in transit.
    pub(crate) fn fetch_checked(
        &self,
        mut wants: Vec<Want<'_>>,
        fetch: &mut dyn FnMut(Vec<Want<'_>>) -> Result<()>,
    ) -> Result<()> {
        match fetch(wants.iter_mut().map(Want::reborrow).collect()) {
            Err(error) if self.objects.is_some() && error.is_mismatch() => {
                tracing::debug!(%error, "mismatch: reading once more");
                fetch(wants)
            }
            other => other,
        }
    }

    pub(crate) fn buffer(&self, bytes: u64) -> Result<Vec<u8>> {
        let too_large = || s4_format::Error::limit(format!("{bytes} bytes do not fit in memory"));
        let len = usize::try_from(bytes).map_err(|_| too_large()).at(&self.name)?;
        let mut out = Vec::new();
        out.try_reserve_exact(len).map_err(|_| too_large()).at(&self.name)?;
        out.resize(len, 0);
        Ok(out)
    }

    /// The decoder's description of a tensor with chunks of its own.
    pub(crate) fn spec<'a>(&'a self, tensor: usize, block: &'a LoadedBlock) -> TensorSpec<'a> {
        let t = &self.tensors[tensor];
        let chunk_log2 = match t.kind {
            TensorKind::Chunks { chunk_log2, .. } => chunk_log2,
            TensorKind::Packed { .. } => s4_engine::chunk_log2(t.dtype),
        };
        TensorSpec {
            dtype: t.dtype,
            shape: &t.shape,
            plan: &self.manifest.plans[usize::from(t.plan)],
            side: &block.side,
            chunk_log2,
        }
    }

    /// As [`Reader::blocks`] for one tensor; `None` if it is in a pack.
    pub(crate) fn block(&self, tensor: usize) -> Result<Option<Arc<LoadedBlock>>> {
        let known = lock(&self.blocks).get(tensor);
        match known {
            Some(block) => Ok(Some(block)),
            None => Ok(self.blocks(&[tensor])?.remove(&tensor)),
        }
    }

    /// Side data and chunk tables of tensors with chunks of their own. Adjacent ones are read
    /// together. All are cached.
    pub(crate) fn blocks(&self, tensors: &[usize]) -> Result<HashMap<usize, Arc<LoadedBlock>>> {
        let known = lock(&self.blocks);
        let mut missing: Vec<_> = tensors
            .iter()
            .filter(|t| known.get(**t).is_none())
            .filter_map(|&t| match self.tensors[t].kind {
                TensorKind::Chunks { block, chunk_log2, .. } => Some((block, chunk_log2, t)),
                TensorKind::Packed { .. } => None,
            })
            .collect();
        // Reading and waiting for the pool happen without the lock: no thread waits for another
        // one's read.
        drop(known);
        missing.sort_unstable_by_key(|m| m.0.offset);
        // Tensors of one pack ask for the same block.
        missing.dedup_by_key(|m| m.2);
        let mut stored = Vec::with_capacity(missing.len());
        let mut at = 0;
        while at < missing.len() {
            let first = missing[at].0.offset;
            let adjacent = missing[at..].windows(2).take_while(|w| {
                let end = w[1].0.offset + u64::from(w[1].0.len);
                w[0].0.offset + u64::from(w[0].0.len) == w[1].0.offset
                    && end - first <= self.source.request_size() as u64
            });
            let run = &missing[at..at + 1 + adjacent.count()];
            let total: u64 = run.iter().map(|m| u64::from(m.0.len)).sum();
            let mut bytes = self.buffer(total)?;
            self.source.read_at(first, &mut bytes)?;
            let mut bytes = Bytes::from(bytes);
            stored.extend(run.iter().map(|m| bytes.split_to(m.0.len as usize)));
            at += run.len();
        }
        let parse = |((block, log2, t), bytes): (&(index::Block, u8, usize), &Bytes)| {
            self.parse_block(*t, bytes, block, *log2)
        };
        let threads = worth(thread_count(self.options.threads), (missing.len() / PARSED) as u64);
        let parsed: Vec<_> = match pool(threads)? {
            Some(pool) => pool.install(|| missing.par_iter().zip(&stored).map(parse).collect()),
            None => missing.iter().zip(&stored).map(parse).collect(),
        };
        let mut blocks = lock(&self.blocks);
        let Blocks { loaded, extents } = &mut *blocks;
        if !missing.is_empty() {
            loaded.resize(self.tensors.len(), None);
        }
        for ((_, _, t), block) in missing.iter().zip(parsed) {
            if loaded[*t].is_some() {
                continue;
            }
            let added = block.and_then(|block| extents.add(&block.records).map(|()| block));
            let block = added.map_err(|e| e.in_tensor(self.label(*t))).at(&self.name)?;
            loaded[*t] = Some(Arc::new(block));
        }
        Ok(tensors.iter().filter_map(|t| Some((*t, blocks.get(*t)?))).collect())
    }

    fn parse_block(
        &self,
        tensor: usize,
        bytes: &[u8],
        block: &index::Block,
        log2: u8,
    ) -> s4_format::Result<LoadedBlock> {
        let chunks = chunk_count(self.tensors[tensor].values()?, log2);
        let (side, table) = index::split_block(bytes, block, chunks)?;
        let records = ChunkRecord::parse_table(table)?;
        for (i, r) in records.iter().enumerate() {
            let object = self.manifest.objects.get(r.object as usize);
            let end = r.offset.checked_add(u64::from(r.len));
            if object.is_none_or(|o| end.is_none_or(|e| e > o.bytes)) {
                let e = s4_format::Error::corrupt("chunk lies outside its object");
                return Err(e.in_part("chunk table").in_chunk(i as u64));
            }
        }
        Ok(LoadedBlock { side: Side::parse(side).map_err(|e| e.in_part("side data"))?, records })
    }

    /// Fills `buf` from an offset of an object.
    pub(crate) fn read_object(&self, number: u32, offset: u64, buf: &mut [u8]) -> Result<()> {
        let object = self.manifest.objects.get(number as usize);
        if object.is_some_and(|o| o.name.is_none()) {
            return self.source.read_at(offset, buf);
        }
        let Some(objects) = &self.objects else {
            let what = format!("{}: its chunks are in separate objects", self.name);
            return Err(Error::Argument(what));
        };
        if buf.is_empty() {
            return Ok(());
        }
        if objects.fill(number, offset, buf)? {
            return Ok(());
        }
        let what = format!(
            "object {number} does not have bytes {offset} to {}",
            offset + buf.len() as u64
        );
        Err(s4_format::Error::truncated(what).in_part("object")).at(&self.name)
    }

    /// Bytes of an object, if they are in memory.
    pub(crate) fn in_memory(&self, number: u32, range: Range<u64>) -> Option<Bytes> {
        let object = self.manifest.objects.get(number as usize)?;
        let len = range.end.checked_sub(range.start)?;
        let known = match object.name {
            None => self.source.in_memory(range),
            Some(_) => self.objects.as_ref()?.in_memory(number, range),
        };
        known.filter(|bytes| bytes.len() as u64 == len)
    }

    /// The frame of a chunk: a slice of the object if that is in memory, else read.
    pub(crate) fn frame(&self, record: &ChunkRecord) -> Result<Bytes> {
        if let Some(bytes) = self.frame_in_memory(record) {
            return Ok(bytes);
        }
        let mut bytes = self.buffer(record.len.into())?;
        self.read_object(record.object, record.offset, &mut bytes)?;
        Ok(bytes.into())
    }

    /// As [`Reader::frame`], if nothing has to be read.
    pub(crate) fn frame_in_memory(&self, record: &ChunkRecord) -> Option<Bytes> {
        let end = record.offset.checked_add(record.len.into())?;
        self.in_memory(record.object, record.offset..end)
    }

    /// Bytes that one request for chunks should ask for.
    pub(crate) fn request_size(&self) -> usize {
        let objects = self.objects.as_ref().map(|o| o.request_size());
        objects.unwrap_or_else(|| self.source.request_size()).clamp(1 << 16, 64 << 20)
    }

    /// A name for messages: packs have none of their own.
    pub(crate) fn label(&self, tensor: usize) -> &str {
        match self.tensors[tensor].name.as_str() {
            "" => "small tensors",
            name => name,
        }
    }

    pub(crate) fn named(&self) -> usize {
        self.named
    }
}

/// A file whose sections are read.
struct Known<'a> {
    source: &'a dyn ReadAt,
    name: &'a str,
}

impl Known<'_> {
    /// Reads a section, and checks its hash.
    fn section(&self, section: &Section, part: &'static str) -> Result<Vec<u8>> {
        let Section { offset, bytes, blake3 } = *section;
        if offset.checked_add(bytes).is_none_or(|end| end > self.source.len()) {
            let e = s4_format::Error::truncated("section extends past the end of the file");
            return Err(e.in_part(part)).at(self.name);
        }
        let mut out = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)];
        self.source.read_at(offset, &mut out)?;
        if Digest::of(&out) != blake3 {
            let e = s4_format::Error::corrupt("hash mismatch");
            return Err(e.in_part(part)).at(self.name);
        }
        Ok(out)
    }
}
