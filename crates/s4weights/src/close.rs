//! Closes tensors whose chunks are written: builds their blocks, and records what the next checkpoint needs to know
//! of them.

use std::sync::Arc;

use rayon::ThreadPool;
use rayon::prelude::*;
use s4_engine::{TensorPlan, expected_of};
use s4_format::index::Block;

use crate::error::{At, Result};
use crate::parent::{Parent, SnapshotTensor};
use crate::pipeline::Coded;
use crate::write::Registered;
use crate::writer::{Writer, needs_others};

/// Closing more tensors than this takes longer than starting a thread.
pub(crate) const WORTH_A_THREAD: usize = 64;

/// The inputs of closing, besides the tensors.
pub(crate) struct Closer {
    /// Names the output in errors.
    pub(crate) target: String,
    pub(crate) parent: Option<Arc<dyn Parent>>,
}

/// A tensor whose block is complete.
pub(crate) struct Closed {
    /// Its number.
    number: usize,
    plan: TensorPlan,
    block: (Block, Vec<u8>),
    snapshot: SnapshotTensor,
}

impl Closer {
    /// Closes tensors, with threads of a pool.
    pub(crate) fn close(
        &self,
        coded: Vec<(&Registered<'_>, Coded)>,
        pool: Option<&ThreadPool>,
    ) -> Result<Vec<Closed>> {
        let close = |(tensor, coded)| self.close_one(tensor, coded);
        match pool.filter(|_| coded.len() > WORTH_A_THREAD) {
            Some(pool) => pool.install(|| coded.into_par_iter().map(close).collect()),
            None => coded.into_iter().map(close).collect(),
        }
    }

    fn close_one(&self, tensor: &Registered<'_>, coded: Coded) -> Result<Closed> {
        let (source, parent) = (&tensor.source, self.parent.as_deref());
        let plan = &coded.plan;
        let above = match parent.zip(plan.plan.parent()) {
            Some((parent, (_, above))) => parent.expected(above)?,
            None => None,
        };
        let stored = (source.dtype, source.shape, &plan.side);
        let expected = expected_of(&plan.plan, stored, above.as_deref());
        let expected = expected.map_err(|e| e.in_tensor(source.name)).at(&self.target)?;
        let snapshot = SnapshotTensor {
            // A tensor table has at most 2^22 records.
            number: tensor.number as u32,
            dtype: source.dtype,
            shape: source.shape.to_vec(),
            bytes: source.values.bytes(),
            chunk_log2: plan.chunk_log2,
            needs_others: needs_others(parent, &plan.plan),
            expected: expected.map(Arc::new),
            checksums: coded.records.iter().map(|r| r.crc_raw).collect(),
        };
        let block = coded.block(source.name, &self.target)?;
        Ok(Closed { number: tensor.number, plan: coded.plan, block, snapshot })
    }
}

impl Writer {
    /// The [`Closer`] of this checkpoint's tensors.
    pub(crate) fn closer(&self) -> Closer {
        Closer { target: self.name.clone(), parent: self.options.parent.clone() }
    }

    /// Adds the blocks of tensors, in the order in which they will be stored.
    pub(crate) fn add_closed(&mut self, closed: Vec<Closed>) -> Result<()> {
        for Closed { number, plan, block, snapshot } in closed {
            let (plan, kind) = self.add_block(number, block, plan, false)?;
            let tensor = &mut self.tensors[number];
            (tensor.plan, tensor.kind) = (plan, kind);
            self.snapshot.insert(tensor.name.clone(), snapshot);
        }
        Ok(())
    }
}
