//! Restores tensors whose chunk size differs along the chain.
//!
//! Chunks of equal size are read one by one, down the chain, each once. A larger chunk would be read
//! again for each smaller chunk in it, on every level. So such tensors are restored block by block, from
//! the base up, in one buffer: a block has as many values as the largest possible chunk, so every chunk
//! of every level lies in one block and is read once.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use s4_engine::{DecodeJob, InputValues};
use s4_format::limits::CHUNK_LOG2;

use crate::buffers::Buffers;
use crate::error::{At, Result};
use crate::levels::{Level, Levels};
use crate::progress::Meter;
use crate::reader::{Reader, Want};

/// Values of a block, as a power of two.
const BLOCK: u8 = *CHUNK_LOG2.end();
/// Values of the smallest chunk, as a power of two: a block has four runs of them.
const RUN: u8 = *CHUNK_LOG2.start();

/// Runs of a block, a bit each.
type Runs = u8;
const ALL: Runs = ((1u16 << (1 << (BLOCK - RUN))) - 1) as Runs;

/// The wanted parts of a block: its runs, and pieces, each with its start in the block and its destination.
#[derive(Default)]
struct BlockWants<'a> {
    runs: Runs,
    pieces: Vec<(usize, &'a mut [u8])>,
}

impl Reader {
    /// Fills the wants of tensors whose chunk size differs along their chain, and returns the other
    /// wants. The tensors must be prepared.
    pub(crate) fn fill_mixed<'a>(
        &self,
        wants: Vec<Want<'a>>,
        meter: &mut Meter,
    ) -> Result<Vec<Want<'a>>> {
        let mut mixed = BTreeMap::new();
        for want in &wants {
            if let Entry::Vacant(entry) = mixed.entry(want.tensor) {
                entry.insert(self.mixed(want.tensor)?);
            }
        }
        let is_mixed = |w: &Want<'_>| mixed.get(&w.tensor).is_some_and(Option::is_some);
        let (own, others) = wants.into_iter().partition::<Vec<_>, _>(is_mixed);
        let mut blocks: BTreeMap<(usize, u64), BlockWants<'a>> = BTreeMap::new();
        for want in own {
            self.cut(want, &mut blocks);
        }
        let (mut buffers, mut values) = (Buffers::default(), vec![]);
        for ((tensor, block), wanted) in blocks {
            let Some(levels) = mixed.get(&tensor).and_then(Option::as_ref) else { continue };
            levels.restore(block, wanted.runs, &mut buffers, &mut values)?;
            for (from, to) in wanted.pieces {
                to.copy_from_slice(&values[from..from + to.len()]);
                meter.add(to.len() as u64)?;
            }
        }
        Ok(others)
    }

    /// Restores a tensor and keeps nothing; `false` if its chunk size does not differ.
    pub(crate) fn check_mixed(&self, tensor: usize, meter: &mut Meter) -> Result<bool> {
        let Some(levels) = self.mixed(tensor)? else { return Ok(false) };
        let (mut buffers, mut values) = (Buffers::default(), vec![]);
        let blocks = self.tensors[tensor].values().at(&self.name)?.div_ceil(1 << BLOCK);
        for block in 0..blocks {
            levels.restore(block, ALL, &mut buffers, &mut values)?;
            meter.add(values.len() as u64)?;
        }
        Ok(true)
    }

    /// The levels of a tensor, if their chunk sizes differ.
    fn mixed(&self, tensor: usize) -> Result<Option<Levels<'_>>> {
        let plan = self.plan(tensor);
        if self.host(tensor) != tensor || plan.parent().is_none() {
            return Ok(None);
        }
        let levels = Levels::of(self, tensor)?;
        let sizes = || levels.chunked.iter().map(|l| l.spec().chunk_log2);
        let alike = sizes().min() == sizes().max();
        Ok((!alike).then_some(levels))
    }

    /// Cuts a want at the borders of blocks.
    fn cut<'a>(&self, want: Want<'a>, blocks: &mut BTreeMap<(usize, u64), BlockWants<'a>>) {
        let width = self.tensors[want.tensor].dtype.value_width() as u64;
        let (block, run) = (width << BLOCK, width << RUN);
        let (mut at, mut rest) = (want.first, want.to);
        while !rest.is_empty() {
            let from = at % block;
            // A block has at most 2 MiB.
            let (now, later) = rest.split_at_mut(rest.len().min((block - from) as usize));
            let last = from + now.len() as u64 - 1;
            let wanted = blocks.entry((want.tensor, at / block)).or_default();
            (from / run..=last / run).for_each(|i| wanted.runs |= 1 << i);
            at += now.len() as u64;
            wanted.pieces.push((from as usize, now));
            rest = later;
        }
    }
}

impl Levels<'_> {
    /// Restores runs of a block into `values`, which becomes as long as the block. The content of
    /// other runs is unspecified.
    fn restore(
        &self,
        block: u64,
        mut wanted: Runs,
        buffers: &mut Buffers,
        values: &mut Vec<u8>,
    ) -> Result<()> {
        let Some(top) = self.chunked.first() else { return Ok(()) };
        let tensor = &top.reader.tensors[top.tensor];
        let width = tensor.dtype.value_width();
        let size = (width as u64) << BLOCK;
        let first = block * size;
        let all = tensor.bytes().at(&top.reader.name)?;
        values.resize(size.min(all - first) as usize, 0);
        // The chunks that each level must supply, for the deltas in the level above it.
        let mut work = vec![];
        for level in &self.chunked {
            let chunks: Vec<_> = level.chunks(block).filter(|c| c.1 & wanted != 0).collect();
            wanted = chunks.iter().filter(|c| level.is_delta(c.0)).fold(0, |all, c| all | c.1);
            work.push((level, chunks));
        }
        if let Some((reader, number)) = self.packed.filter(|_| wanted != 0) {
            // The last tensor of the chain is not a delta, so it is read first.
            let want = Want { tensor: number, first, to: &mut *values };
            reader.fill(vec![want], &reader.idle)?;
        }
        for (level, chunks) in work.into_iter().rev() {
            for (chunk, _) in chunks {
                let size = width << level.spec().chunk_log2;
                let from = (chunk * size as u64 - first) as usize;
                let end = values.len().min(from + size);
                level.decode(chunk, buffers, &mut values[from..end])?;
            }
        }
        Ok(())
    }
}

impl Level<'_> {
    /// The chunks of a block, and which runs they are.
    fn chunks(&self, block: u64) -> impl Iterator<Item = (u64, Runs)> + use<> {
        let log2 = self.spec().chunk_log2;
        let each = 1u32 << (BLOCK - log2);
        let runs = (1u32 << (1 << (log2 - RUN))) - 1;
        let (first, end) = (block * u64::from(each), self.block.records.len() as u64);
        let numbered =
            (0..each).map(move |i| (first + u64::from(i), (runs << (i << (log2 - RUN))) as Runs));
        numbered.take_while(move |(chunk, _)| *chunk < end)
    }

    /// Decodes a chunk over its parent's values.
    fn decode(&self, chunk: u64, buffers: &mut Buffers, values: &mut [u8]) -> Result<()> {
        let (reader, record) = (self.reader, &self.block.records[chunk as usize]);
        let beside = match record.plain {
            true => vec![],
            false => reader.values_beside(self.tensor, &self.block, chunk, values.len() as u64)?,
        };
        let (frame, scratch) = buffers.frame(record.len as usize);
        reader.read_object(record.object, record.offset, frame)?;
        let beside = beside.iter().map(|values| InputValues::Slice(values));
        let inputs = &*std::iter::once(InputValues::Destination).chain(beside).collect::<Vec<_>>();
        let spec = &self.spec();
        let job = DecodeJob { spec, chunk, record, frame, inputs };
        reader
            .engine
            .decode(&job, scratch, values)
            .map_err(|e| e.in_tensor(reader.label(self.tensor)))
            .at(&reader.name)
    }
}
