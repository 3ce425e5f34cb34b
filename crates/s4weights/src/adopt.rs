//! Merges the indexes of several writers into one, so that processes that encode in parallel store one checkpoint.

use bytes::Bytes;
use s4_format::index::{Block, TensorKind};
use s4_format::manifest::{self, Object};
use s4_format::{Plan, crc32c};

use crate::error::{At, Error, Result};
use crate::io::Source;
use crate::objects::ObjectSource;
use crate::reader::{LoadedBlock, ReadOptions, Reader};
use crate::writer::Writer;

/// Offsets added to the numbers of one index when it is adopted.
struct Shift {
    tensors: usize,
    packs: usize,
    /// Named tensors of the index: packs come after them.
    named: usize,
    objects: u32,
}

impl Writer {
    /// Takes over all tensors of a checkpoint in objects, which another writer encoded: `index` is its
    /// [`Written::index`]. Its objects follow those taken over before, in the same order; their bytes are not read.
    /// Only tensors and roles are taken over. A writer that takes over tensors writes none of its own.
    ///
    /// # Errors
    /// `Format` if the index is damaged; `Argument` if a name is taken, if the index is that of a
    /// file, which has its chunks in it, or if it has another parent than those before. After an
    /// error the checkpoint cannot be finished.
    ///
    /// [`Written::index`]: crate::Written::index
    pub fn adopt(&mut self, index: Bytes) -> Result<()> {
        self.adding(|writer| writer.adopt_all(index))
    }

    fn adopt_all(&mut self, index: Bytes) -> Result<()> {
        let options = ReadOptions { threads: Some(1), ..ReadOptions::default() };
        let reader = Reader::open_objects(Source::Bytes(index), Box::new(NoObjects), options)?;
        let m = reader.manifest();
        if m.objects.iter().any(|o| o.name.is_none()) {
            return Err(Error::Argument("cannot take over an index that contains chunks".into()));
        }
        self.adopt_parent(m.parent)?;
        let shift = Shift {
            tensors: self.next_number(),
            packs: self.packs.len(),
            named: reader.named(),
            objects: u32::try_from(self.adopted.objects.len()).unwrap_or(u32::MAX),
        };
        let with_chunks = |(_, t): &(usize, &s4_format::index::Tensor)| {
            matches!(t.kind, TensorKind::Chunks { .. })
        };
        let all: Vec<_> =
            reader.tensors.iter().enumerate().filter(with_chunks).map(|(n, _)| n).collect();
        let blocks = reader.blocks(&all)?;
        for (number, tensor) in reader.tensors.iter().enumerate() {
            let of = |e: s4_format::Error| e.in_tensor(&tensor.name);
            let (plan, kind) = match tensor.kind {
                TensorKind::Packed { pack, first } => {
                    let pack = shift.pack(pack as usize)?;
                    (0, TensorKind::Packed { pack, first })
                }
                TensorKind::Chunks { chunk_log2, pack, .. } => {
                    let block = blocks.get(&number).map(|b| shift.block(b));
                    let missing = || s4_format::Error::corrupt("a tensor block was not read");
                    let bytes = block.ok_or_else(missing).and_then(|b| b).map_err(of);
                    let bytes = bytes.at(&self.name)?;
                    // Block lengths have 32 bits in a tensor table.
                    let block = Block { offset: 0, len: bytes.len() as u32, crc: crc32c(&bytes) };
                    let at = match pack {
                        true => usize::MAX - shift.pack(number)? as usize,
                        false => shift.tensors + number,
                    };
                    self.blocks.push((at, bytes));
                    let plan = shift.plan(&m.plans[usize::from(tensor.plan)]);
                    (self.plan_number(plan)?, TensorKind::Chunks { block, chunk_log2, pack })
                }
            };
            if number < shift.named {
                let bytes = tensor.bytes().map_err(of).at(&self.name)?;
                self.register(&tensor.name, tensor.dtype, &tensor.shape, bytes)?;
                let own = self.tensors.last_mut().map(|t| (&mut t.plan, &mut t.kind));
                own.into_iter().for_each(|(p, k)| (*p, *k) = (plan, kind));
            } else {
                self.packs.push(s4_format::index::Tensor { plan, kind, ..tensor.clone() });
            }
        }
        if let Some(roles) = &m.roles {
            self.adopted.add_roles(roles, shift.tensors);
        }
        for codec in &m.closed_codecs {
            self.closed_used.insert(codec.codec);
            if !self.closed.contains(codec) {
                self.closed.push(codec.clone());
            }
        }
        self.adopt_objects(&m.objects);
        Ok(())
    }

    fn adopt_objects(&mut self, objects: &[Object]) {
        let first = self.adopted.objects.len();
        let named = |(n, o): (usize, &Object)| Object { name: Some(n.to_string()), ..o.clone() };
        self.adopted.objects.extend((first..).zip(objects).map(named));
    }

    fn adopt_parent(&mut self, parent: Option<manifest::Parent>) -> Result<()> {
        match (self.adopted.parent, parent) {
            (Some(one), Some(other)) if one != other => Err(Error::Argument(format!(
                "the parts of a checkpoint are deltas of different checkpoints: {} and {}",
                one.manifest, other.manifest
            ))),
            (known, new) => {
                self.adopted.parent = known.or(new);
                Ok(())
            }
        }
    }
}

impl Shift {
    /// The number of a pack among all packs, from its number in the index's tensor table.
    fn pack(&self, number: usize) -> Result<u32> {
        let pack = number.checked_sub(self.named).and_then(|n| n.checked_add(self.packs));
        let pack = pack.and_then(|n| u32::try_from(n).ok());
        pack.ok_or_else(|| Error::Argument(format!("pack {number} of an index: too many packs")))
    }

    /// A tensor block whose chunks are in the renumbered objects.
    fn block(&self, block: &LoadedBlock) -> s4_format::Result<Vec<u8>> {
        let mut bytes = vec![];
        block.side.write(&mut bytes)?;
        for record in &block.records {
            let mut record = *record;
            record.object = record.object.saturating_add(self.objects);
            record.write(&mut bytes);
        }
        Ok(bytes)
    }

    /// A plan whose inputs of the same checkpoint are renumbered.
    fn plan(&self, plan: &Plan) -> Plan {
        let mut plan = plan.clone();
        for input in plan.inputs.iter_mut().filter(|i| i.manifest.is_none()) {
            input.tensor = input.tensor.saturating_add(self.tensors as u32);
        }
        plan
    }
}

/// The objects of an index that is read without them.
struct NoObjects;

impl ObjectSource for NoObjects {
    fn get_range(&self, number: u32, range: std::ops::Range<u64>) -> Result<Bytes> {
        Err(Error::Argument(format!(
            "cannot read bytes {range:?} of object {number}: only the index is available"
        )))
    }
}
