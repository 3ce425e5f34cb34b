//! Shared by the tests of the engine on the CPU.

use s4_engine::{CpuEngine, EncodeJob, Scratch, TensorPlan, TensorView};
use s4_format::{ChunkRecord, Result};

/// Encodes the one chunk of a tensor.
pub(crate) fn encode(
    engine: &CpuEngine,
    view: &TensorView<'_>,
    plan: &TensorPlan,
    inputs: &[&[u8]],
) -> Result<(ChunkRecord, Vec<u8>)> {
    let mut frame = vec![];
    let job = EncodeJob { view, plan, chunk: 0, inputs };
    let e = engine.encode(&job, &mut Scratch::default(), &mut frame)?;
    let record = ChunkRecord {
        offset: 0,
        object: 0,
        len: frame.len() as u32,
        plain: e.plain,
        crc_encoded: e.crc_encoded,
        crc_raw: e.crc_raw,
    };
    Ok((record, frame))
}
