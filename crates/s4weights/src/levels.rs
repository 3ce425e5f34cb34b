//! A tensor along its chain: its chunks in each checkpoint, down to the base.

use std::sync::Arc;

use s4_engine::TensorSpec;
use s4_format::index::TensorKind;

use crate::error::Result;
use crate::reader::{LoadedBlock, Reader};

/// A tensor with chunks of its own in one checkpoint of a chain.
pub(crate) struct Level<'a> {
    pub(crate) reader: &'a Reader,
    pub(crate) tensor: usize,
    pub(crate) block: Arc<LoadedBlock>,
}

impl Level<'_> {
    pub(crate) fn spec(&self) -> TensorSpec<'_> {
        self.reader.spec(self.tensor, &self.block)
    }

    /// Whether a chunk is predicted from the next level's values.
    pub(crate) fn is_delta(&self, chunk: u64) -> bool {
        let plain = self.block.records[chunk as usize].plain;
        !plain && self.spec().plan.is_delta()
    }

    /// Whether chunks have contexts from moments of the same checkpoint.
    pub(crate) fn has_moment_contexts(&self) -> bool {
        self.spec().plan.has_moments() && self.block.records.iter().any(|r| !r.plain)
    }
}

/// A tensor with chunks of its own, the one that it is a delta of, and so on, down to one that is
/// not a delta.
pub(crate) struct Levels<'a> {
    pub(crate) chunked: Vec<Level<'a>>,
    /// The last tensor of the chain, by its reader and number, if it is in a pack, or predicted
    /// from another tensor of its checkpoint.
    pub(crate) packed: Option<(&'a Reader, usize)>,
}

impl<'a> Levels<'a> {
    /// The levels of a tensor that is prepared for reading.
    pub(crate) fn of(reader: &'a Reader, tensor: usize) -> Result<Self> {
        let mut out = Self { chunked: vec![], packed: None };
        let (mut reader, mut tensor) = (reader, tensor);
        loop {
            let t = &reader.tensors[tensor];
            // A tensor with an own input is a copy. Moments are not part of the chain.
            let self_contained = reader.plan(tensor).own_input().is_none();
            let chunks = self_contained && matches!(t.kind, TensorKind::Chunks { .. });
            let Some(block) = reader.block(tensor)?.filter(|_| chunks) else {
                out.packed = Some((reader, tensor));
                return Ok(out);
            };
            let level = Level { reader, tensor, block };
            let deltas = (0..level.block.records.len() as u64).any(|c| level.is_delta(c));
            out.chunked.push(level);
            if !deltas {
                return Ok(out);
            }
            match reader.input(tensor)? {
                Some((parent, number)) => (reader, tensor) = (parent, number),
                None => return Ok(out),
            }
        }
    }

    /// The levels that a device decodes a tensor's chunks from: the tensor itself, the one that it
    /// is a delta of, and so on. Some may have contexts from moments. `None` if a device cannot
    /// decode them.
    pub(crate) fn for_device(self) -> Option<Vec<Level<'a>>> {
        let Self { chunked, packed } = self;
        let known = |level: &Level<'_>| {
            // A chunk of a delta needs the same chunk of the level below.
            let cut_alike = chunked[0].spec().chunk_log2 == level.spec().chunk_log2;
            cut_alike && level.reader.manifest.closed_codecs.is_empty()
        };
        let all = packed.is_none() && chunked.iter().all(known);
        all.then_some(chunked)
    }
}
