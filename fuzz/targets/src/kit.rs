//! A `.s4w` file in pieces: taken apart, changed, and put together again with correct checksums,
//! hashes and offsets.

use std::sync::Arc;

use s4_format::file::{FOOTER_LEN, Footer, header};
use s4_format::index::{RECORD_LEN, TABLE_HEADER_LEN, TensorKind, chunk_count, parse_table};
use s4_format::{ChunkRecord, DType, Digest, Manifest, StreamEntry, crc32c};
use serde_json::{Value, json};

/// Most chunks of a tensor in an assembled file.
const MAX_CHUNKS: u64 = 512;

/// A chunk: fields of its record, and the bytes that the record names.
#[derive(Clone)]
pub(crate) struct Chunk {
    pub(crate) frame: Vec<u8>,
    pub(crate) plain: bool,
    pub(crate) crc_raw: u32,
}

/// Side data and chunks of a tensor.
#[derive(Clone, Default)]
pub(crate) struct Block {
    pub(crate) side: Vec<u8>,
    pub(crate) chunks: Vec<Chunk>,
}

/// A number that is written over a part of the assembled file.
#[derive(Clone, Copy)]
pub(crate) enum Patch {
    /// Field 0 to 4 of a chunk's record: offset, object, length, both checksums.
    Chunk { tensor: usize, chunk: usize, field: u8, value: u64 },
    /// Bytes of the tensor table, at an offset in it.
    Table { at: usize, len: usize, value: u64 },
    /// Footer field 0 to 1: where the manifest is, and its length.
    Footer { field: u8, value: u64 },
}

/// A file in pieces.
#[derive(Clone)]
pub(crate) struct Kit {
    pub(crate) manifest: Value,
    /// Records of the tensor table.
    pub(crate) records: Vec<[u8; RECORD_LEN]>,
    pub(crate) dims: Vec<u64>,
    pub(crate) names: Vec<u8>,
    /// The block of each record that has chunks of its own. Repeated records share one: thousands
    /// of copies would take gigabytes.
    pub(crate) blocks: Vec<Option<Arc<Block>>>,
    pub(crate) blobs: Vec<(String, Vec<u8>)>,
    pub(crate) patches: Vec<Patch>,
    /// Whether the further chunks of a tensor that grew name the bytes of its own chunks, instead
    /// of copies.
    pub(crate) share: bool,
    /// The manifest's hash before any change, in hex.
    pub(crate) origin: String,
}

/// After this many bytes of chunks, further chunks share the bytes of earlier ones, so that inputs
/// stay small.
const MAX_DATA: usize = 1 << 20;
/// After this many bytes of chunk tables and side data, further tensors keep the block that they
/// named before, for the same reason.
const MAX_BLOCKS: usize = 1 << 20;
/// After this many bytes of all chunks, no further tensor gets chunks of its own.
const MAX_FILE: usize = 4 << 20;

impl Kit {
    /// Takes a sound file apart.
    pub(crate) fn parse(file: &[u8]) -> Option<Self> {
        let footer = Footer::parse(file, file.len() as u64).ok()?;
        let part = |offset: u64, len: u64| file.get(offset as usize..(offset + len) as usize);
        let text = part(footer.offset, footer.len)?;
        let manifest = Manifest::parse(text, footer.offset).ok()?;
        let section = manifest.tensors.section;
        let table = part(section.offset, section.bytes)?;
        let tensors = parse_table(table, footer.offset, manifest.plans.len()).ok()?;
        let (records, rest) = table[TABLE_HEADER_LEN..].split_at(RECORD_LEN * tensors.len());
        let dims = u32::from_le_bytes(table[4..8].try_into().ok()?) as usize;
        let (dims, names) = rest.split_at(8 * dims);
        let mut blocks = vec![];
        for t in &tensors {
            let TensorKind::Chunks { block, chunk_log2, .. } = t.kind else {
                blocks.push(None);
                continue;
            };
            let bytes = part(block.offset, block.len.into())?;
            let count = chunk_count(t.values().ok()?, chunk_log2) as usize;
            let (side, records) = bytes.split_at(bytes.len() - ChunkRecord::SIZE * count);
            let chunk = |r: &ChunkRecord| {
                let frame = part(r.offset, r.len.into())?.to_vec();
                Some(Chunk { frame, plain: r.plain, crc_raw: r.crc_raw })
            };
            let chunks = ChunkRecord::parse_table(records).ok()?;
            let chunks = chunks.iter().map(chunk).collect::<Option<_>>()?;
            blocks.push(Some(Arc::new(Block { side: side.to_vec(), chunks })));
        }
        let blob = |(name, s): (&String, &s4_format::manifest::Section)| {
            Some((name.clone(), part(s.offset, s.bytes)?.to_vec()))
        };
        Some(Self {
            manifest: serde_json::from_slice(text).ok()?,
            records: records.as_chunks().0.to_vec(),
            dims: dims.as_chunks().0.iter().map(|d| u64::from_le_bytes(*d)).collect(),
            names: names.to_vec(),
            blocks,
            blobs: manifest.blobs.iter().map(blob).collect::<Option<_>>()?,
            patches: vec![],
            share: false,
            origin: Digest::of(text).to_string(),
        })
    }

    /// How many chunks tensor `t` has according to the table.
    fn wanted_chunks(&self, t: usize) -> Option<usize> {
        let record = &self.records[t];
        let dtype = DType::from_code(record[6]).ok()?;
        let first = u32::from_le_bytes(record[8..12].try_into().ok()?) as usize;
        let shape = self.dims.get(first..first.checked_add(usize::from(record[7]))?)?;
        let elements = shape.iter().try_fold(1u64, |p, d| p.checked_mul(*d))?;
        let values = elements.checked_mul((dtype.size() / dtype.value_width()) as u64)?;
        let log2 = record[14];
        (16..=18).contains(&log2).then_some(())?;
        usize::try_from(chunk_count(values, log2).min(MAX_CHUNKS)).ok()
    }

    /// The file.
    pub(crate) fn assemble(mut self) -> Vec<u8> {
        let mut out = header().to_vec();
        let mut blocks = vec![];
        let mut room = MAX_BLOCKS;
        for t in 0..self.records.len() {
            let Some(block) = self
                .blocks
                .get(t)
                .and_then(Option::as_deref)
                .filter(|_| room > 0 && out.len() < MAX_FILE)
            else {
                blocks.push(None);
                continue;
            };
            let count = block.chunks.len();
            // A tensor that grew repeats its chunks.
            let wanted = if count == 0 { None } else { self.wanted_chunks(t) };
            let made = self.place_chunks(t, block, wanted.unwrap_or(count), &mut out);
            room = room.saturating_sub(made.len());
            blocks.push(Some(made));
        }
        let data_end = out.len();
        for (t, block) in blocks.iter().enumerate() {
            let (Some(block), record) = (block, &mut self.records[t]) else { continue };
            out.resize(out.len().next_multiple_of(8), 0);
            record[16..24].copy_from_slice(&(out.len() as u64).to_le_bytes());
            record[24..28].copy_from_slice(&(block.len() as u32).to_le_bytes());
            record[28..32].copy_from_slice(&crc32c(block).to_le_bytes());
            out.extend(block);
        }
        let table = self.table();
        let section = |out: &mut Vec<u8>, bytes: &[u8]| {
            let at = out.len();
            out.extend(bytes);
            json!({"offset": at, "bytes": bytes.len(), "blake3": Digest::of(bytes).to_string()})
        };
        let m = &mut self.manifest;
        let place = section(&mut out, &table);
        set(m, &["tensors", "section"], place);
        set(m, &["tensors", "count"], json!(self.records.len()));
        set(m, &["objects", "0", "bytes"], json!(data_end));
        let digest = Digest::of(&out[..data_end]).to_string();
        set(m, &["objects", "0", "blake3"], json!(digest));
        for (name, bytes) in &self.blobs {
            let place = section(&mut out, bytes);
            set(m, &["blobs", name], place);
        }
        self.finish(out)
    }

    /// Appends `wanted` chunks; returns side data and chunk table.
    fn place_chunks(&self, t: usize, block: &Block, wanted: usize, out: &mut Vec<u8>) -> Vec<u8> {
        let mut bytes = block.side.clone();
        let mut places: Vec<usize> = vec![];
        for (i, c) in block.chunks.iter().cycle().take(wanted).enumerate() {
            let known = places.get(i % block.chunks.len()).copied();
            let known = known.filter(|_| self.share || out.len() > MAX_DATA);
            let place = known.unwrap_or_else(|| {
                out.resize(out.len().next_multiple_of(16), 0);
                let place = out.len();
                out.extend(&c.frame);
                place
            });
            places.push(place);
            let streams = (1..=8).find_map(|n| StreamEntry::parse_chunk(&c.frame, n).ok());
            let crc_raw = if c.plain { crc32c(&c.frame) } else { c.crc_raw };
            let mut record = ChunkRecord {
                offset: place as u64,
                object: 0,
                len: c.frame.len() as u32 & 0x7fff_ffff,
                plain: c.plain,
                crc_encoded: if c.plain { crc_raw } else { streams.map_or(0, |s| s.crc()) },
                crc_raw,
            };
            for patch in &self.patches {
                let Patch::Chunk { tensor, chunk, field, value } = *patch else { continue };
                if (tensor, chunk) == (t, i) {
                    match field {
                        0 => record.offset = value,
                        1 => record.object = value as u32,
                        2 => record.len = value as u32 & 0x7fff_ffff,
                        3 => record.crc_encoded = value as u32,
                        _ => record.crc_raw = value as u32,
                    }
                }
            }
            record.write(&mut bytes);
        }
        bytes
    }

    fn table(&self) -> Vec<u8> {
        let mut table = vec![];
        table.extend((self.records.len() as u32).to_le_bytes());
        table.extend((self.dims.len() as u32).to_le_bytes());
        table.extend((self.names.len() as u64).to_le_bytes());
        table.extend(self.records.as_flattened());
        self.dims.iter().for_each(|d| table.extend(d.to_le_bytes()));
        table.extend(&self.names);
        for patch in &self.patches {
            let Patch::Table { at, len, value } = *patch else { continue };
            if let Some(to) = table.get_mut(at..at + len) {
                to.copy_from_slice(&value.to_le_bytes()[..len]);
            }
        }
        table
    }

    fn finish(&self, mut out: Vec<u8>) -> Vec<u8> {
        let text = self.manifest.to_string().into_bytes();
        let mut footer =
            Footer { offset: out.len() as u64, len: text.len() as u64, digest: Digest::of(&text) };
        for patch in &self.patches {
            match *patch {
                Patch::Footer { field: 0, value } => footer.offset = value,
                Patch::Footer { value, .. } => footer.len = value,
                _ => {}
            }
        }
        out.extend(text);
        out.extend(footer.to_bytes());
        debug_assert!(out.len() > FOOTER_LEN);
        out
    }
}

/// The manifest's hash of an assembled file.
pub(crate) fn digest(file: &[u8]) -> Option<Digest> {
    let bytes = file.get(file.len().checked_sub(FOOTER_LEN)?..)?;
    Some(Digest(bytes[16..48].try_into().ok()?))
}

/// Sets a member or an element, if everything above it is there.
fn set(value: &mut Value, path: &[&str], to: Value) {
    let mut at = value;
    for step in path {
        let next = match at {
            Value::Object(map) => map.get_mut(*step),
            Value::Array(list) => step.parse().ok().and_then(|i: usize| list.get_mut(i)),
            _ => None,
        };
        let Some(next) = next else { return };
        at = next;
    }
    *at = to;
}
