//! Files that no writer would make, with every checksum right.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;

use s4_engine::{EncodedChunk, TensorPlan, TensorView};
use s4weights::DType;
use s4weights::format::file::{self, Footer};
use s4weights::format::index::{self, Block, Tensor, TensorKind};
use s4weights::format::manifest::{Form, Manifest, Object, Parent, Section, TensorTable};
use s4weights::format::{
    ChunkRecord, CodecId, Digest, LayoutId, Plan, StreamEntry, Version, crc32c,
};

/// A tensor of equal bytes, with a constant in each chunk: zero if the tensor is a delta or a copy.
#[derive(Clone)]
pub(crate) struct Constant {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) values: u64,
    pub(crate) chunk_log2: u8,
    /// The parent's manifest and depth, if the tensor is a delta.
    pub(crate) parent: Option<Parent>,
    /// The number of the tensor of the same file that it is a copy of, if it is one.
    pub(crate) same: Option<u32>,
    /// All chunks name the same frame.
    pub(crate) overlapping: bool,
}

impl Constant {
    pub(crate) fn new(name: &str, dtype: DType, values: u64, chunk_log2: u8) -> Self {
        let (name, parent, same, overlapping) = (name.into(), None, None, false);
        Self { name, dtype, values, chunk_log2, parent, same, overlapping }
    }
}

/// The byte that all values are made of.
pub(crate) const BYTE: u8 = 0x3c;

/// A frame of layout `whole` and one constant byte.
fn frame(byte: u8) -> Vec<u8> {
    let entry = StreamEntry { codec: CodecId::CONST, param: 0, len: 1 };
    let mut frame = vec![0; StreamEntry::header_len(1)];
    StreamEntry::write_header(&[entry], &mut frame);
    frame.push(byte);
    frame
}

/// A file in the making.
pub(crate) struct Craft {
    pub(crate) bytes: Vec<u8>,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) plans: Vec<Plan>,
    pub(crate) parent: Option<Parent>,
    /// Where chunks end.
    chunks: u64,
}

impl Craft {
    pub(crate) fn new() -> Self {
        let bytes = file::header().to_vec();
        Self { chunks: bytes.len() as u64, bytes, tensors: vec![], plans: vec![], parent: None }
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
    }

    /// Adds tensors: their chunks, then their blocks.
    pub(crate) fn constants(mut self, list: &[Constant]) -> Self {
        let mut tables = vec![];
        for (number, t) in (0..).zip(list) {
            let stored = frame(if t.parent.is_some() || t.same.is_some() { 0 } else { BYTE });
            let crc_encoded = StreamEntry::parse_chunk(&stored, 1).unwrap().crc();
            let mut table = vec![];
            let (mut left, mut offset) = (t.values, 0);
            let width = t.dtype.value_width();
            let mut sums = BTreeMap::new();
            while left > 0 {
                let n = left.min(1 << t.chunk_log2);
                left -= n;
                if offset == 0 || !t.overlapping {
                    self.align();
                    offset = self.bytes.len() as u64;
                    self.bytes.extend(&stored);
                }
                let sum = sums.entry(n).or_insert_with(|| crc32c(&vec![BYTE; n as usize * width]));
                let len = stored.len() as u32;
                let (plain, crc_raw) = (false, *sum);
                let record = ChunkRecord { offset, object: 0, len, plain, crc_encoded, crc_raw };
                record.write(&mut table);
            }
            tables.push(table);
            let plan = match (t.same, t.parent) {
                (Some(original), _) => Plan::same(LayoutId::WHOLE, original),
                (None, Some(parent)) => Plan::delta(LayoutId::WHOLE, parent.manifest, number),
                (None, None) => Plan::direct(LayoutId::WHOLE),
            };
            self.parent = self.parent.or(t.parent);
            self.plans.push(plan);
        }
        self.chunks = self.bytes.len() as u64;
        for (t, table) in list.iter().zip(tables) {
            let block = Block {
                offset: self.bytes.len() as u64,
                len: table.len() as u32,
                crc: crc32c(&table),
            };
            self.bytes.extend(table);
            self.tensors.push(Tensor {
                name: t.name.clone(),
                dtype: t.dtype,
                shape: vec![t.values],
                plan: self.tensors.len() as u16,
                kind: TensorKind::Chunks { block, chunk_log2: t.chunk_log2, pack: false },
            });
        }
        self
    }

    /// Adds a tensor whose chunks were encoded, as the only one.
    pub(crate) fn coded(
        mut self,
        name: &str,
        view: &TensorView<'_>,
        plan: &TensorPlan,
        parent: Option<Parent>,
        chunks: Vec<(EncodedChunk, Vec<u8>)>,
    ) -> Self {
        let mut block = vec![];
        plan.side_data(chunks.iter().any(|c| c.0.shared)).unwrap().write(&mut block).unwrap();
        for (e, frame) in &chunks {
            self.align();
            let offset = self.bytes.len() as u64;
            self.bytes.extend(frame);
            let EncodedChunk { plain, crc_encoded, crc_raw, .. } = *e;
            let len = frame.len() as u32;
            let record = ChunkRecord { offset, object: 0, len, plain, crc_encoded, crc_raw };
            record.write(&mut block);
        }
        self.chunks = self.bytes.len() as u64;
        let (offset, len, crc) = (self.chunks, block.len() as u32, crc32c(&block));
        self.bytes.extend(block);
        let block = Block { offset, len, crc };
        self.parent = parent;
        self.plans.push(plan.plan.clone());
        self.tensors.push(Tensor {
            name: name.into(),
            dtype: view.dtype,
            shape: view.shape.to_vec(),
            plan: 0,
            kind: TensorKind::Chunks { block, chunk_log2: plan.chunk_log2, pack: false },
        });
        self
    }

    fn section(&mut self, bytes: &[u8]) -> Section {
        let offset = self.bytes.len() as u64;
        self.bytes.extend(bytes);
        Section { offset, bytes: bytes.len() as u64, blake3: Digest::of(bytes) }
    }

    /// The file, and the reference to it as a parent.
    pub(crate) fn finish(self) -> (Vec<u8>, Parent) {
        self.finish_with(|_| (), |json| json)
    }

    /// As [`Craft::finish`], with changes to the bytes of the tensor table and to the manifest's text.
    pub(crate) fn finish_with(
        mut self,
        table: impl FnOnce(&mut Vec<u8>),
        json: impl FnOnce(String) -> String,
    ) -> (Vec<u8>, Parent) {
        let mut bytes = index::write_table(&self.tensors).unwrap();
        table(&mut bytes);
        let section = self.section(&bytes);
        let count = u32::from_le_bytes(bytes[..4].try_into().unwrap());
        let blake3 = Digest::of(&self.bytes[..self.chunks as usize]);
        let manifest = Manifest {
            format: Version::CURRENT,
            writer: "a test".into(),
            preset: "fast".into(),
            objects: vec![Object { name: None, bytes: self.chunks, blake3 }],
            tensors: TensorTable { section, count },
            plans: std::mem::take(&mut self.plans),
            form: Form::Tensors,
            tree: None,
            blobs: BTreeMap::new(),
            metadata: BTreeMap::new(),
            roles: None,
            parent: self.parent,
            closed_codecs: vec![],
        };
        let json = json(String::from_utf8(manifest.to_json().unwrap()).unwrap());
        let section = self.section(json.as_bytes());
        let footer = Footer { offset: section.offset, len: section.bytes, digest: section.blake3 };
        self.bytes.extend(footer.to_bytes());
        (self.bytes, Parent { manifest: section.blake3, depth: manifest.depth() })
    }
}
