//! Writes one `.s4w` file, front to back.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rayon::prelude::*;
use s4_engine::{CpuEngine, EncodedChunk, Scratch, TensorPlan, TensorView};
use s4_format::file::{self, Footer, Version};
use s4_format::index::{self, Block, Tensor, TensorKind, chunk_count};
use s4_format::layout::Planes;
use s4_format::limits::ALIGN;
use s4_format::manifest::{Form, Manifest, Object, Roles, Section, TensorTable};
use s4_format::{ChunkRecord, DType, Digest, Plan, crc32c};
use serde_json::value::RawValue;

use crate::error::{At, Error, Result};
use crate::io::{Sink, Target, open_sink};
use crate::options::{Meter, WriteOptions, simd, thread_count};
use crate::pack::{Class, Pack, SMALL};
use crate::parallel::pool;
use crate::report::{Report, Totals};

/// A tensor to be written.
#[derive(Debug, Clone, Copy)]
pub struct TensorSource<'a> {
    /// Unique in the file, not empty.
    pub name: &'a str,
    /// Type of the elements.
    pub dtype: DType,
    /// Size of each dimension, in elements.
    pub shape: &'a [u64],
    /// The elements: row-major, little-endian, without gaps.
    pub data: &'a [u8],
}

/// What a file holds besides tensors.
#[derive(Debug, Default)]
pub struct Contents {
    /// The saved object as typed JSON.
    pub tree: Option<Box<RawValue>>,
    /// Named byte strings. With one named `pickle` and no tree, the file's form is `pickle`.
    pub blobs: BTreeMap<String, Vec<u8>>,
    /// Free text.
    pub metadata: BTreeMap<String, String>,
    /// What each tensor is to the optimizer.
    pub roles: Option<Roles>,
}

/// Writes one file. Dropping it before [`Writer::finish`] leaves nothing behind.
pub struct Writer {
    name: String,
    sink: Box<dyn Sink>,
    engine: Arc<CpuEngine>,
    options: WriteOptions,
    started: Instant,
    hasher: blake3::Hasher,
    offset: u64,
    tensors: Vec<Tensor>,
    names: HashMap<String, ()>,
    packs: Vec<Tensor>,
    open_packs: Vec<Pack>,
    plans: Vec<Plan>,
    plan_numbers: HashMap<Plan, u16>,
    blocks: Vec<(usize, Vec<u8>)>,
    bytes_in: u64,
    totals: Totals,
    buffers: Buffers,
}

/// Reused from call to call.
#[derive(Default)]
struct Buffers {
    scratch: Vec<Scratch>,
    frames: [Vec<Frame>; 2],
}

#[derive(Default)]
struct Frame {
    bytes: Vec<u8>,
    chunk: Option<s4_format::Result<EncodedChunk>>,
}

/// A tensor with chunks of its own, on its way to the file.
struct Item<'a> {
    name: &'a str,
    view: TensorView<'a>,
    plan: TensorPlan,
    records: Vec<ChunkRecord>,
    shared: bool,
}

#[derive(Clone, Copy)]
struct Job {
    item: usize,
    chunk: u64,
}

impl Writer {
    /// Starts a file.
    ///
    /// # Errors
    /// `Io` if the target cannot be written, `Argument` if an option does not fit.
    pub fn create(target: Target, options: WriteOptions) -> Result<Self> {
        let engine = Arc::new(CpuEngine::new(simd(options.simd)?));
        let (name, sink) = open_sink(target)?;
        let mut writer = Self {
            name,
            sink,
            engine,
            options,
            started: Instant::now(),
            hasher: blake3::Hasher::new(),
            offset: 0,
            tensors: vec![],
            names: HashMap::new(),
            packs: vec![],
            open_packs: vec![],
            plans: vec![],
            plan_numbers: HashMap::new(),
            blocks: vec![],
            bytes_in: 0,
            totals: Totals::default(),
            buffers: Buffers::default(),
        };
        writer.put(&file::header())?;
        Ok(writer)
    }

    /// Writes tensors; several calls may follow each other.
    ///
    /// # Errors
    /// `Argument` for a name that is empty or taken or data that does not have the shape's size,
    /// `Io` if the target fails, `Cancelled`. After an error the file cannot be finished.
    pub fn write(&mut self, tensors: &[TensorSource<'_>]) -> Result<()> {
        let total = tensors.iter().map(|t| t.data.len() as u64).sum();
        let callback = self.options.progress.clone();
        let mut meter = Meter { callback, done: 0, total };
        let mut large = vec![];
        for t in tensors {
            let values = self.register(t)?;
            if values < SMALL {
                self.pack(t, values)?;
                meter.add(t.data.len() as u64)?;
            } else {
                large.push((self.tensors.len() - 1, *t));
            }
        }
        let numbers: Vec<usize> = large.iter().map(|l| l.0).collect();
        let views = large.iter().map(|(_, t)| (t.name, view(t)));
        let items = self.encode(views.collect(), &mut meter)?;
        for (number, item) in numbers.into_iter().zip(items) {
            let (plan, kind) = self.close_item(number, item, false)?;
            self.tensors[number].plan = plan;
            self.tensors[number].kind = kind;
        }
        Ok(())
    }

    /// Checks a tensor and adds it to the index; its place follows.
    fn register(&mut self, t: &TensorSource<'_>) -> Result<u64> {
        let tensor = Tensor {
            name: t.name.to_owned(),
            dtype: t.dtype,
            shape: t.shape.to_vec(),
            plan: 0,
            kind: TensorKind::Packed { pack: 0, first: 0 },
        };
        let bytes = tensor.bytes().map_err(|e| e.in_tensor(t.name)).at(&self.name)?;
        if bytes != t.data.len() as u64 {
            return Err(Error::Argument(format!(
                "tensor `{}`: {} bytes of data for shape {:?} of {}, which has {bytes}",
                t.name,
                t.data.len(),
                t.shape,
                t.dtype
            )));
        }
        if t.name.is_empty() || self.names.insert(t.name.to_owned(), ()).is_some() {
            return Err(Error::Argument(format!("tensor name `{}` is empty or taken", t.name)));
        }
        let values = tensor.values().at(&self.name)?;
        self.bytes_in += bytes;
        self.tensors.push(tensor);
        Ok(values)
    }

    /// Puts a small tensor into the open pack of its class.
    fn pack(&mut self, t: &TensorSource<'_>, values: u64) -> Result<()> {
        let class = Class::of(t.dtype, t.data);
        let open = self.open_packs.iter().position(|p| p.class == class);
        if let Some(i) = open.filter(|&i| !self.open_packs[i].has_room(values)) {
            let full = self.open_packs.swap_remove(i);
            self.close_pack(full)?;
        }
        let i = match self.open_packs.iter().position(|p| p.class == class) {
            Some(i) => i,
            None => {
                let number = u32::try_from(self.packs.len()).unwrap_or(u32::MAX);
                self.packs.push(Tensor {
                    name: String::new(),
                    dtype: t.dtype,
                    shape: vec![],
                    plan: 0,
                    kind: TensorKind::Packed { pack: 0, first: 0 },
                });
                self.open_packs.push(Pack::new(class, number));
                self.open_packs.len() - 1
            }
        };
        let pack = &mut self.open_packs[i];
        let kind = TensorKind::Packed { pack: pack.number, first: pack.values() as u64 };
        pack.data.extend_from_slice(t.data);
        if let Some(last) = self.tensors.last_mut() {
            last.kind = kind;
        }
        Ok(())
    }

    fn close_pack(&mut self, pack: Pack) -> Result<()> {
        let dtype = pack.class.dtype;
        let shape = [(pack.data.len() / dtype.size()) as u64];
        let view = TensorView { dtype, shape: &shape, data: &pack.data };
        let mut meter = Meter { callback: None, done: 0, total: 0 };
        let items = self.encode(vec![("small tensors", view)], &mut meter)?;
        for item in items {
            let (plan, kind) = self.close_item(usize::MAX - pack.number as usize, item, true)?;
            let tensor = &mut self.packs[pack.number as usize];
            (tensor.plan, tensor.kind, tensor.shape) = (plan, kind, shape.to_vec());
        }
        Ok(())
    }

    /// Plans and encodes tensors, in order, and appends their chunks.
    fn encode<'a>(
        &mut self,
        views: Vec<(&'a str, TensorView<'a>)>,
        meter: &mut Meter,
    ) -> Result<Vec<Item<'a>>> {
        let threads = thread_count(self.options.threads);
        let chunks: u64 = views.iter().map(|(_, v)| chunks_of(v)).sum();
        // More threads than chunks would only wait.
        let pool = pool(threads.min(usize::try_from(chunks).unwrap_or(threads)))?;
        let mut items = vec![];
        let mut scratch = self.buffers.scratch.pop().unwrap_or_default();
        for (name, view) in views {
            let plan = self.engine.plan(self.options.preset, &view, &mut scratch);
            let plan = plan.map_err(|e| e.in_tensor(name)).at(&self.name)?;
            items.push(Item { name, view, plan, records: vec![], shared: false });
        }
        self.buffers.scratch.push(scratch);
        let jobs: Vec<Job> = (items.iter().enumerate())
            .flat_map(|(item, i)| (0..chunks_of(&i.view)).map(move |chunk| Job { item, chunk }))
            .collect();
        let mut buffers = std::mem::take(&mut self.buffers);
        let done = match pool {
            None => self.run_inline(&jobs, &mut items, &mut buffers, meter),
            Some(pool) => self.run_on(&pool, threads, &jobs, &mut items, &mut buffers, meter),
        };
        self.buffers = buffers;
        done.map(|()| items)
    }

    fn run_inline(
        &mut self,
        jobs: &[Job],
        items: &mut [Item<'_>],
        buffers: &mut Buffers,
        meter: &mut Meter,
    ) -> Result<()> {
        let mut scratch = buffers.scratch.pop().unwrap_or_default();
        let mut frame = buffers.frames[0].pop().unwrap_or_default();
        for job in jobs {
            encode_job(&self.engine, job, items, &mut scratch, &mut frame);
            self.append(job, items, &mut frame, meter)?;
        }
        buffers.frames[0].push(frame);
        buffers.scratch.push(scratch);
        Ok(())
    }

    /// Encodes a window of chunks on the pool while this thread writes the window before it.
    fn run_on(
        &mut self,
        pool: &rayon::ThreadPool,
        threads: usize,
        jobs: &[Job],
        items: &mut [Item<'_>],
        buffers: &mut Buffers,
        meter: &mut Meter,
    ) -> Result<()> {
        // A frame is at most about twice a chunk's 512 KiB, and there are two windows.
        let budget = self.options.memory.unwrap_or(256 << 20) >> 21;
        let window = (8 * threads).min(budget).max(threads);
        let Buffers { scratch, frames: [now, next] } = buffers;
        scratch.resize_with(scratch.len().max(threads), Scratch::default);
        let scratch: Vec<_> = scratch.iter_mut().map(Mutex::new).collect();
        now.resize_with(window, Frame::default);
        next.resize_with(window, Frame::default);
        let engine = Arc::clone(&self.engine);
        let encode = |jobs: &[Job], items: &[Item<'_>], frames: &mut [Frame]| {
            frames[..jobs.len()].par_iter_mut().zip(jobs).for_each(|(frame, job)| {
                let own = rayon::current_thread_index().unwrap_or(0) % scratch.len();
                let mut scratch = scratch[own].lock().unwrap_or_else(|e| e.into_inner());
                encode_job(&engine, job, items, &mut scratch, frame);
            });
        };
        let mut windows = jobs.chunks(window);
        let mut current = windows.next().unwrap_or(&[]);
        pool.install(|| encode(current, items, now));
        while !current.is_empty() {
            let following = windows.next().unwrap_or(&[]);
            let mut records = vec![];
            let written = {
                let shared_items: &[Item<'_>] = items;
                pool.in_place_scope(|s| {
                    let (encode, next) = (&encode, &mut *next);
                    s.spawn(move |_| encode(following, shared_items, next));
                    current.iter().zip(now.iter_mut()).try_for_each(|(job, frame)| {
                        records.push(self.put_frame(job, shared_items, frame, meter)?);
                        Ok(())
                    })
                })
            };
            for (job, (record, shared)) in current.iter().zip(records) {
                items[job.item].records.push(record);
                items[job.item].shared |= shared;
            }
            written?;
            std::mem::swap(now, next);
            current = following;
        }
        Ok(())
    }

    fn append(
        &mut self,
        job: &Job,
        items: &mut [Item<'_>],
        frame: &mut Frame,
        meter: &mut Meter,
    ) -> Result<()> {
        let (record, shared) = self.put_frame(job, items, frame, meter)?;
        items[job.item].records.push(record);
        items[job.item].shared |= shared;
        Ok(())
    }

    /// Writes an encoded chunk: its record, and whether it uses shared tables.
    fn put_frame(
        &mut self,
        job: &Job,
        items: &[Item<'_>],
        frame: &mut Frame,
        meter: &mut Meter,
    ) -> Result<(ChunkRecord, bool)> {
        let item = &items[job.item];
        let missing = || Err(s4_format::Error::corrupt("chunk was not encoded"));
        let chunk = frame.chunk.take().unwrap_or_else(missing);
        let chunk = chunk.map_err(|e| e.in_chunk(job.chunk).in_tensor(item.name)).at(&self.name)?;
        self.align()?;
        let record = ChunkRecord {
            offset: self.offset,
            object: 0,
            len: u32::try_from(chunk.len).unwrap_or(u32::MAX),
            plain: chunk.plain,
            crc_encoded: chunk.crc_encoded,
            crc_raw: chunk.crc_raw,
        };
        self.put(&frame.bytes)?;
        let width = item.view.dtype.value_width();
        let bytes = item.view.data.len() - ((job.chunk as usize) << item.plan.chunk_log2) * width;
        let bytes = bytes.min(width << item.plan.chunk_log2);
        let values = (bytes / width) as u64;
        if chunk.plain {
            self.totals.plain(values, chunk.len as u64);
        } else {
            let layout = item.plan.plan.layout;
            let planes = Planes::new(layout, width, 0).at(&self.name)?.sizes().len();
            self.totals.chunk(layout, values, &chunk.streams[..planes]);
        }
        meter.add(bytes as u64)?;
        Ok((record, chunk.shared))
    }

    /// Makes the block of a tensor whose chunks are written; blocks follow behind all chunks.
    fn close_item(
        &mut self,
        number: usize,
        item: Item<'_>,
        pack: bool,
    ) -> Result<(u16, TensorKind)> {
        let mut block = vec![];
        let side = item.plan.side_data(item.shared).at(&self.name)?;
        side.write(&mut block).at(&self.name)?;
        item.records.iter().for_each(|r| r.write(&mut block));
        let len = u32::try_from(block.len());
        let len =
            len.map_err(|_| Error::Argument(format!("tensor `{}` is too large", item.name)))?;
        let place = Block { offset: 0, len, crc: crc32c(&block) };
        let kind = TensorKind::Chunks { block: place, chunk_log2: item.plan.chunk_log2, pack };
        self.blocks.push((number, block));
        Ok((self.plan_number(item.plan.plan)?, kind))
    }

    fn plan_number(&mut self, plan: Plan) -> Result<u16> {
        if let Some(&n) = self.plan_numbers.get(&plan) {
            return Ok(n);
        }
        let n = u16::try_from(self.plans.len())
            .map_err(|_| Error::Argument("more than 65,536 different plans".into()))?;
        self.plans.push(plan.clone());
        self.plan_numbers.insert(plan, n);
        Ok(n)
    }

    /// Writes the index and publishes the file.
    ///
    /// # Errors
    /// `Io` if the target fails; nothing is visible then.
    pub fn finish(mut self, contents: Contents) -> Result<Report> {
        for pack in std::mem::take(&mut self.open_packs) {
            self.close_pack(pack)?;
        }
        let tensors = self.tensors.len() as u64;
        self.align()?;
        let data = Object {
            name: None,
            bytes: self.offset,
            blake3: Digest(*self.hasher.finalize().as_bytes()),
        };
        let table = self.write_blocks()?;
        let count = u32::try_from(table.len()).unwrap_or(u32::MAX);
        let table = index::write_table(&table).at(&self.name)?;
        let section = self.put_section(&table)?;
        let form = match (&contents.tree, contents.blobs.contains_key("pickle")) {
            (Some(_), _) => Form::Tree,
            (None, true) => Form::Pickle,
            (None, false) => Form::Tensors,
        };
        let mut blobs = BTreeMap::new();
        for (name, bytes) in contents.blobs {
            blobs.insert(name, self.put_section(&bytes)?);
        }
        let manifest = Manifest {
            format: Version::CURRENT,
            writer: concat!("s4weights ", env!("CARGO_PKG_VERSION")).into(),
            preset: self.options.preset.name().into(),
            objects: vec![data],
            tensors: TensorTable { section, count },
            plans: std::mem::take(&mut self.plans),
            form,
            tree: contents.tree,
            blobs,
            metadata: contents.metadata,
            roles: contents.roles,
            parent: None,
            closed_codecs: vec![],
        };
        let json = manifest.to_json().at(&self.name)?;
        let manifest = self.put_section(&json)?;
        let footer =
            Footer { offset: manifest.offset, len: manifest.bytes, digest: manifest.blake3 };
        self.put(&footer.to_bytes())?;
        self.sink.commit()?;
        Ok(Report {
            tensors,
            bytes_in: self.bytes_in,
            bytes_out: self.offset,
            seconds: self.started.elapsed().as_secs_f64(),
            digest: manifest.blake3.to_string(),
            streams: self.totals.finish(),
        })
    }

    /// Writes the tensors' blocks; gives the tensor table with their places, packs last.
    fn write_blocks(&mut self) -> Result<Vec<Tensor>> {
        let packs_at = self.tensors.len();
        let mut table = std::mem::take(&mut self.tensors);
        for t in &mut table {
            if let TensorKind::Packed { pack, .. } = &mut t.kind {
                *pack += u32::try_from(packs_at).unwrap_or(u32::MAX);
            }
        }
        table.append(&mut self.packs);
        for (number, bytes) in std::mem::take(&mut self.blocks) {
            // Packs count down from the largest number.
            let number = if number < packs_at { number } else { packs_at + (usize::MAX - number) };
            let offset = self.offset;
            if let TensorKind::Chunks { block, .. } = &mut table[number].kind {
                block.offset = offset;
            }
            self.put(&bytes)?;
        }
        Ok(table)
    }

    fn put_section(&mut self, bytes: &[u8]) -> Result<Section> {
        let section =
            Section { offset: self.offset, bytes: bytes.len() as u64, blake3: Digest::of(bytes) };
        self.put(bytes)?;
        Ok(section)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        self.sink.write(bytes)?;
        self.offset += bytes.len() as u64;
        Ok(())
    }

    fn align(&mut self) -> Result<()> {
        let gap = self.offset.next_multiple_of(ALIGN as u64) - self.offset;
        self.put(&[0; ALIGN][..gap as usize])
    }
}

fn view<'a>(t: &TensorSource<'a>) -> TensorView<'a> {
    TensorView { dtype: t.dtype, shape: t.shape, data: t.data }
}

fn chunks_of(v: &TensorView<'_>) -> u64 {
    chunk_count((v.data.len() / v.dtype.value_width()) as u64, s4_engine::chunk_log2(v.dtype))
}

fn encode_job(
    engine: &CpuEngine,
    job: &Job,
    items: &[Item<'_>],
    scratch: &mut Scratch,
    frame: &mut Frame,
) {
    let item = &items[job.item];
    frame.bytes.clear();
    let chunk = engine.encode_chunk(&item.view, &item.plan, job.chunk, scratch, &mut frame.bytes);
    frame.chunk = Some(chunk);
}
