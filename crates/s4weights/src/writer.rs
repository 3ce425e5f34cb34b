//! Writes a checkpoint, front to back: one `.s4w` file, or objects and an index.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use s4_engine::{CpuEngine, TensorPlan, TensorValues};
use s4_format::file::{Footer, Version};
use s4_format::index::{self, Block, Tensor, TensorKind};
use s4_format::limits::MAX_CHAIN;
use s4_format::manifest::{self, ClosedCodec, Form, Manifest, Object, Roles, Section, TensorTable};
use s4_format::{CodecId, DType, Digest, Plan};
use serde_json::value::RawValue;

use crate::adopted::Adopted;
use crate::alike::Alike;
use crate::batch::Batch;
use crate::buffers::LargeBuffers;
use crate::error::{At, Error, ParentProblem, Result};
use crate::io::{Target, open_sink};
use crate::objects::{ObjectOptions, ObjectSink};
use crate::options::{DEFAULT_MAX_CHAIN, WriteOptions};
use crate::output::{KeptMemory, ObjectMemory, Output};
use crate::pack::{Class, Pack};
use crate::parallel::{simd, thread_count};
use crate::parent::{Parent, Snapshot, SnapshotTensor};
use crate::planning::Planner;
use crate::progress::Meter;
use crate::recall::Recall;
use crate::report::{Report, Totals};
use crate::roles::RoleTable;

/// How many tensors may be deltas or copies, each of which takes a plan: a manifest numbers plans
/// with 16 bits, and the last numbers are reserved for other tensors.
pub(crate) const MAX_DELTAS: usize = 65_000;

/// Bytes of tensor blocks that are collected for one write.
const BLOCKS: usize = 1 << 20;

/// The content of a file other than tensors.
#[derive(Debug, Clone, Default)]
pub struct Contents {
    /// The saved object as typed JSON.
    pub tree: Option<Box<RawValue>>,
    /// Named byte strings. With one named `pickle` and no tree, the file's form is `pickle`.
    pub blobs: BTreeMap<String, Vec<u8>>,
    /// Free text.
    pub metadata: BTreeMap<String, String>,
}

/// Writes one checkpoint. If it is dropped before [`Writer::finish`], it leaves no file behind.
pub struct Writer {
    pub(crate) name: String,
    pub(crate) out: Output,
    pub(crate) engine: Arc<CpuEngine>,
    pub(crate) options: WriteOptions,
    /// Closed codecs that the engine may use, and those that it has used.
    pub(crate) closed: Vec<ClosedCodec>,
    pub(crate) closed_used: BTreeSet<CodecId>,
    started: Instant,
    pub(crate) tensors: Vec<Tensor>,
    names: HashMap<String, ()>,
    pub(crate) packs: Vec<Tensor>,
    open_packs: Vec<Pack>,
    plans: Vec<Plan>,
    plan_numbers: HashMap<Plan, u16>,
    pub(crate) blocks: Vec<(usize, Vec<u8>)>,
    /// Tensors so far that may be deltas or copies.
    deltas: usize,
    /// How many may be: [`MAX_DELTAS`], or this rank's share of them.
    pub(crate) max_deltas: usize,
    pub(crate) snapshot: HashMap<String, SnapshotTensor>,
    pub(crate) roles: Option<Arc<RoleTable>>,
    /// What earlier saves noted about tensors, by name.
    pub(crate) recall: Option<Arc<Recall>>,
    /// The choices for tensors of this checkpoint, for similar ones that follow.
    pub(crate) alike: Arc<Alike>,
    pub(crate) adopted: Adopted,
    bytes_in: u64,
    pub(crate) totals: Totals,
    /// Whether adding tensors failed: some may be registered without values.
    pub(crate) failed: bool,
}

/// The result of writing a checkpoint.
#[derive(Debug)]
pub struct Written {
    /// Counts and sizes.
    pub report: Report,
    /// Hash and checksums. Together with the values, if they are still in memory, they make the
    /// parent of the next checkpoint.
    pub snapshot: Snapshot,
    /// The index of a checkpoint in objects: bytes to store with the objects, and to pass to
    /// [`crate::Reader::open_objects`]. `None` for a file.
    pub index: Option<Bytes>,
}

impl Writer {
    /// Starts a file.
    ///
    /// # Errors
    /// `Io` if the target cannot be written, `Argument` if an option is invalid, `Parent` if the
    /// parent's chain already has the maximum length, `Format` of type `Unsupported` if the preset
    /// needs a GPU or a library that is not there.
    pub fn create(target: Target, options: WriteOptions) -> Result<Self> {
        let (name, sink) = open_sink(target, options.deadline)?;
        Self::start(name, Output::file(sink)?, options)
    }

    /// Starts a checkpoint in objects. `name` is for messages. Memory holds one object per group of
    /// tensors, and the objects that the sink has in flight.
    ///
    /// # Errors
    /// As [`Writer::create`].
    pub fn create_objects(
        name: &str,
        sink: Box<dyn ObjectSink>,
        objects: ObjectOptions,
        options: WriteOptions,
    ) -> Result<Self> {
        // Enough for the objects in flight of a sink that releases them.
        let buffers = LargeBuffers::new(objects.bytes.saturating_mul(4));
        let memory = ObjectMemory { buffers, ahead: 1, kept: KeptMemory::default() };
        Self::create_objects_in(name, sink, objects, options, memory)
    }

    /// As [`Writer::create_objects`], with the caller's memory.
    pub(crate) fn create_objects_in(
        name: &str,
        sink: Box<dyn ObjectSink>,
        objects: ObjectOptions,
        options: WriteOptions,
        memory: ObjectMemory,
    ) -> Result<Self> {
        let out = Output::objects(sink, objects, memory, thread_count(options.threads))?;
        Self::start(name.to_owned(), out, options)
    }

    fn start(name: String, out: Output, options: WriteOptions) -> Result<Self> {
        let (engine, closed) = CpuEngine::writing(simd(options.simd)?, options.preset).at(&name)?;
        let engine = engine.and_codecs(&options.own.codecs);
        check_depth(&name, &options)?;
        Ok(Self {
            name,
            out,
            engine: Arc::new(engine),
            options,
            closed,
            closed_used: BTreeSet::new(),
            started: Instant::now(),
            tensors: vec![],
            names: HashMap::new(),
            packs: vec![],
            open_packs: vec![],
            plans: vec![],
            plan_numbers: HashMap::new(),
            blocks: vec![],
            deltas: 0,
            max_deltas: MAX_DELTAS,
            snapshot: HashMap::new(),
            roles: None,
            recall: None,
            alike: Arc::default(),
            adopted: Adopted::default(),
            bytes_in: 0,
            totals: Totals::default(),
            failed: false,
        })
    }

    /// Declares the tensors' roles and the optimizer's hyperparameters, before the first tensor is
    /// written, so that every plan can depend on them. Rows name tensors by number, counted from 0
    /// in the order of writing; tensors without a row have no role. The manifest keeps the table as
    /// it is.
    ///
    /// # Errors
    /// `Argument` if a tensor was written already.
    pub fn declare(&mut self, roles: Roles) -> Result<()> {
        if !self.tensors.is_empty() {
            return Err(Error::Argument("roles must be declared before the first tensor".into()));
        }
        self.roles = Some(Arc::new(RoleTable::new(roles)));
        Ok(())
    }

    /// Says how many bytes of values will be written, at most. A small file in an object store is then uploaded in smaller
    /// parts, of 8 MiB or more, over more connections; without this, parts have 32 MiB. Has no effect once a part was
    /// uploaded.
    pub fn expect(&mut self, values: u64) {
        self.out.expect(values);
    }

    /// From now on, encodes tensors on devices with `engine`, as [`WriteOptions::engine`] does.
    #[cfg(feature = "cuda")]
    pub fn set_engine(&mut self, engine: Arc<s4_engine::cuda::CudaEngine>) {
        self.options.engine = Some(engine);
    }

    /// Sets [`WriteOptions::ahead`].
    pub fn set_ahead(&mut self, ahead: Option<usize>) {
        self.options.ahead = ahead;
    }

    /// The number of the parent's tensor that a tensor may be a delta of: the one of the same name,
    /// if it has the same type and shape.
    pub(crate) fn parent_of(&mut self, name: &str, dtype: DType, shape: &[u64]) -> Option<u32> {
        let there = self.options.parent.as_ref()?.find(name)?;
        let alike = there.dtype == dtype && there.shape == shape;
        let number = Some(there.number).filter(|_| alike && self.deltas < self.max_deltas)?;
        self.deltas += 1;
        Some(number)
    }

    /// Whether one more tensor may be predicted from another, which takes a plan. If so, counts it.
    pub(crate) fn may_have_input(&mut self) -> bool {
        let room = self.deltas < self.max_deltas;
        self.deltas += usize::from(room);
        room
    }

    /// See [`needs_others`].
    pub(crate) fn needs_others(&self, plan: &Plan) -> bool {
        needs_others(self.options.parent.as_deref(), plan)
    }

    /// The [`Planner`] of this checkpoint's tensors.
    pub(crate) fn planner(&self) -> Planner {
        Planner {
            target: self.name.clone(),
            preset: self.options.preset,
            cpu: Arc::clone(&self.engine),
            #[cfg(feature = "cuda")]
            devices: self.options.engine.clone(),
            parent: self.options.parent.clone(),
            recall: self.recall.clone(),
            alike: Arc::clone(&self.alike),
            choose: self.options.own.choose.clone(),
        }
    }

    /// Adds tensors. If that fails, or panics, the checkpoint cannot be finished.
    pub(crate) fn adding(&mut self, add: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let before = std::mem::replace(&mut self.failed, true);
        add(self)?;
        self.failed = before;
        Ok(())
    }

    /// The number that the next tensor gets.
    pub(crate) fn next_number(&self) -> usize {
        self.tensors.len()
    }

    /// Checks a tensor and adds it to the tensor table; where it is stored is filled in later.
    /// Returns its number of values.
    pub(crate) fn register(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[u64],
        len: u64,
    ) -> Result<u64> {
        let tensor = Tensor {
            name: name.to_owned(),
            dtype,
            shape: shape.to_vec(),
            plan: 0,
            kind: TensorKind::Packed { pack: 0, first: 0 },
        };
        let bytes = tensor.bytes().map_err(|e| e.in_tensor(name)).at(&self.name)?;
        if bytes != len {
            return Err(Error::Argument(format!(
                "tensor `{name}`: got {len} bytes of data, but shape {shape:?} of {dtype} has {bytes}"
            )));
        }
        if name.is_empty() || self.names.insert(name.to_owned(), ()).is_some() {
            return Err(Error::Argument(format!(
                "tensor name `{name}` is empty or already in use"
            )));
        }
        let values = tensor.values().at(&self.name)?;
        self.bytes_in += bytes;
        self.tensors.push(tensor);
        Ok(values)
    }

    /// Puts a small tensor into the open pack of its class.
    pub(crate) fn pack(&mut self, tensor: usize, data: &[u8], group: u8) -> Result<()> {
        let dtype = self.tensors[tensor].dtype;
        let values = (data.len() / dtype.value_width()) as u64;
        let class = Class::of(dtype, data, group);
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
                    dtype,
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
        pack.data.extend_from_slice(data);
        self.tensors[tensor].kind = kind;
        Ok(())
    }

    fn close_pack(&mut self, pack: Pack) -> Result<()> {
        let dtype = pack.class.dtype;
        let shape = [(pack.data.len() / dtype.size()) as u64];
        let batch = Batch {
            names: vec!["small tensors"],
            tensors: vec![TensorValues::new(dtype, &shape, &pack.data)],
            groups: vec![pack.class.group],
            parents: vec![None],
            moments: vec![],
        };
        let mut meter = Meter { callback: None, done: 0, total: 0 };
        // Packs have no names to recall choices by, and those of one size are not alike.
        let planner = Planner { recall: None, alike: Arc::default(), ..self.planner() };
        let pools = self.pools(&batch.tensors)?;
        let planned = planner.plan(batch, &pools)?;
        for coded in self.encode_planned(planned, &pools, &mut meter)? {
            let number = usize::MAX - pack.number as usize;
            let block = coded.block("small tensors", &self.name)?;
            let (plan, kind) = self.add_block(number, block, coded.plan, true)?;
            let tensor = &mut self.packs[pack.number as usize];
            (tensor.plan, tensor.kind, tensor.shape) = (plan, kind, shape.to_vec());
        }
        Ok(())
    }

    /// Adds the block of a tensor whose chunks are written; tensor blocks follow all chunks.
    pub(crate) fn add_block(
        &mut self,
        number: usize,
        (place, block): (Block, Vec<u8>),
        plan: TensorPlan,
        pack: bool,
    ) -> Result<(u16, TensorKind)> {
        let kind = TensorKind::Chunks { block: place, chunk_log2: plan.chunk_log2, pack };
        self.blocks.push((number, block));
        Ok((self.plan_number(plan.plan)?, kind))
    }

    pub(crate) fn plan_number(&mut self, plan: Plan) -> Result<u16> {
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
    /// `Io` if the target fails; nothing is visible then. `Argument` if chunks are in objects, whose index
    /// only [`Writer::complete`] returns, or if writing tensors failed before.
    pub fn finish(self, contents: Contents) -> Result<Report> {
        let written = self.complete(contents)?;
        match written.index {
            None => Ok(written.report),
            Some(_) => Err(Error::Argument(
                "a checkpoint in objects has an index to keep: use `complete`".into(),
            )),
        }
    }

    /// As [`Writer::finish`], but returns all that is known of the checkpoint.
    ///
    /// # Errors
    /// `Io` if the target fails, `Argument` if writing tensors failed before; nothing is visible
    /// then.
    pub fn complete(mut self, contents: Contents) -> Result<Written> {
        if self.failed {
            let what = "cannot finish the checkpoint, because writing tensors failed";
            return Err(Error::Argument(format!("{}: {what}", self.name)));
        }
        for pack in std::mem::take(&mut self.open_packs) {
            self.close_pack(pack)?;
        }
        let tensors = self.tensors.len() as u64;
        let mut objects = self.out.end_chunks()?;
        if !self.adopted.objects.is_empty() && !objects.is_empty() {
            let what = "a writer that takes over tensors cannot write tensors of its own or a file";
            return Err(Error::Argument(what.into()));
        }
        let adopted_bytes = self.adopted.bytes();
        objects.append(&mut self.adopted.objects);
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
        let parent = self.options.parent.as_ref().filter(|_| self.has_deltas());
        let parent = parent.map(|p| manifest::Parent { manifest: p.digest(), depth: p.depth() });
        let parent = parent.or(self.adopted.parent);
        let manifest = self.manifest(objects, TensorTable { section, count }, form, parent);
        let manifest = Manifest {
            tree: contents.tree,
            blobs,
            metadata: contents.metadata,
            roles: self
                .roles
                .take()
                .map(|r| r.table().clone())
                .or_else(|| self.adopted.take_roles()),
            ..manifest
        };
        let json = manifest.to_json().at(&self.name)?;
        let section = self.put_section(&json)?;
        let footer = Footer { offset: section.offset, len: section.bytes, digest: section.blake3 };
        self.out.put(&footer.to_bytes())?;
        let bytes_out = self.out.bytes() + adopted_bytes;
        let index = self.out.commit()?;
        let report = Report {
            tensors,
            bytes_in: self.bytes_in,
            bytes_out,
            seconds: self.started.elapsed().as_secs_f64(),
            digest: section.blake3.to_string(),
            streams: self.totals.finish(),
        };
        let (digest, depth) = (section.blake3, manifest.depth());
        let snapshot = Snapshot { digest, depth, tensors: self.snapshot };
        Ok(Written { report, snapshot, index })
    }

    /// Whether any tensor is stored as a delta: otherwise the checkpoint is a base.
    fn has_deltas(&self) -> bool {
        self.plans.iter().any(|p| p.parent().is_some())
    }

    fn manifest(
        &mut self,
        objects: Vec<Object>,
        tensors: TensorTable,
        form: Form,
        parent: Option<manifest::Parent>,
    ) -> Manifest {
        let used = |c: &ClosedCodec| self.closed_used.contains(&c.codec);
        let closed_codecs = self.closed.iter().filter(|c| used(c)).cloned().collect();
        Manifest {
            format: Version::CURRENT,
            writer: concat!("s4weights ", env!("CARGO_PKG_VERSION")).into(),
            preset: self.options.preset.name().into(),
            objects,
            tensors,
            plans: std::mem::take(&mut self.plans),
            form,
            tree: None,
            blobs: BTreeMap::new(),
            metadata: BTreeMap::new(),
            roles: None,
            parent,
            closed_codecs,
        }
    }

    /// Writes the tensor blocks; returns the tensor table with their offsets, packs last.
    fn write_blocks(&mut self) -> Result<Vec<Tensor>> {
        let packs_at = self.tensors.len();
        let mut table = std::mem::take(&mut self.tensors);
        for t in &mut table {
            if let TensorKind::Packed { pack, .. } = &mut t.kind {
                *pack += u32::try_from(packs_at).unwrap_or(u32::MAX);
            }
        }
        table.append(&mut self.packs);
        // Most blocks are small: written one by one they would cost more.
        let (mut offset, mut together) = (self.out.offset(), vec![]);
        for (number, bytes) in std::mem::take(&mut self.blocks) {
            // Blocks of packs are numbered downwards from `usize::MAX`.
            let number = if number < packs_at { number } else { packs_at + (usize::MAX - number) };
            if let TensorKind::Chunks { block, .. } = &mut table[number].kind {
                block.offset = offset;
            }
            offset += bytes.len() as u64;
            together.extend_from_slice(&bytes);
            if together.len() >= BLOCKS {
                self.out.put(&together)?;
                together.clear();
            }
        }
        self.out.put(&together)?;
        Ok(table)
    }

    fn put_section(&mut self, bytes: &[u8]) -> Result<Section> {
        let offset = self.out.offset();
        let section = Section { offset, bytes: bytes.len() as u64, blake3: Digest::of(bytes) };
        self.out.put(bytes)?;
        Ok(section)
    }
}

/// Whether decoding a tensor with this plan needs other tensors of its checkpoint, or decoding its
/// parent's tensor needs others of the parent.
pub(crate) fn needs_others(parent: Option<&dyn Parent>, plan: &Plan) -> bool {
    let above = parent.zip(plan.parent());
    plan.own_inputs().next().is_some()
        || above.is_some_and(|(parent, (_, above))| parent.needs_others(above))
}

/// Checks that the parent's chain may become longer.
fn check_depth(name: &str, options: &WriteOptions) -> Result<()> {
    let Some(parent) = &options.parent else { return Ok(()) };
    let max = options.max_chain.unwrap_or(DEFAULT_MAX_CHAIN).min(MAX_CHAIN as u32);
    let depth = parent.depth();
    if depth < max {
        return Ok(());
    }
    Err(Error::Parent {
        target: name.to_owned(),
        tensor: None,
        parent: parent.digest(),
        problem: ParentProblem::TooDeep { depth, max },
    })
}
