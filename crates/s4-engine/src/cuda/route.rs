//! The choice of kernels for a chunk, and its descriptor.

use s4_codec_gpu::abi::{self, Route, coding, prediction};
use s4_format::layout::{MAX_PLANES, Planes};
use s4_format::side::Side;
use s4_format::{
    ChunkRecord, CodecId, ContextsId, DType, LayoutId, Plan, PredictorId, ResidualId, Result,
    StreamEntry,
};

use super::sets::{class, float};
use crate::{PlaneCoding, TensorPlan, TensorSpec};

/// The ways in which the kernels can predict values; [`prediction_of`] gives `None` for any other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prediction {
    /// From nothing.
    Direct,
    /// From a parent, with one table for each plane.
    Parent,
    /// From a parent, with contexts and signs from moments.
    Update,
    /// In another way, by its number; see [`prediction`].
    Other(u8),
}

fn prediction_of(plan: &Plan, dtype: DType) -> Option<Prediction> {
    type P = PredictorId;
    type R = ResidualId;
    if plan.contexts == ContextsId::UPDATE {
        let known = plan.predictor == P::PARENT
            && plan.residual == R::DESCENT
            && plan.layout == LayoutId::BYTES
            && float(dtype).is_some();
        return known.then_some(Prediction::Update);
    }
    let contexts = plan.contexts == ContextsId::EXPONENT;
    if !contexts && !plan.contexts.is_none() {
        return None;
    }
    match (plan.predictor, plan.residual) {
        (P::NONE, R::ID) if !contexts => Some(Prediction::Direct),
        (P::PARENT, R::XOR | R::SUB) if !contexts => Some(Prediction::Parent),
        (P::PARENT, R::SUB) => Some(Prediction::Other(prediction::INPUT)),
        (P::RANK1, R::MAGNITUDE) if !contexts => Some(Prediction::Other(prediction::OFFSETS)),
        (P::BLEND, R::MAGNITUDE) if !contexts => Some(Prediction::Other(prediction::BLEND)),
        (P::STEP, R::SUB) if !contexts && float(dtype).is_some() => {
            Some(Prediction::Other(prediction::STEP))
        }
        (P::SAME, R::XOR) if !contexts => Some(Prediction::Other(prediction::INPUT)),
        (P::CAST, R::XOR) if !contexts => match dtype {
            DType::BFloat16 => Some(Prediction::Other(prediction::BF16)),
            DType::Float16 => Some(Prediction::Other(prediction::F16)),
            _ => None,
        },
        _ => None,
    }
}

/// The fields of descriptors that are derived from a plan, besides its layout and residual.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PlanFields {
    pub(super) prediction: u8,
    pub(super) contexts: u8,
    pub(super) class: [u8; 2],
    /// Whether planes are coded as those of differences from a parent.
    pub(super) sparse: bool,
}

impl PlanFields {
    /// # Errors
    /// `Corrupt` if side data that the plan needs is not valid.
    pub(super) fn of(plan: &Plan, dtype: DType, side: &Side) -> Result<Self> {
        let prediction = match prediction_of(plan, dtype) {
            Some(Prediction::Other(prediction)) => prediction,
            Some(Prediction::Update) => {
                let (prediction, contexts) = (prediction::INPUT, abi::CONTEXTS_UPDATE);
                return Ok(Self { prediction, contexts, class: [0; 2], sparse: true });
            }
            _ => return Ok(Self::default()),
        };
        // The same as the CPU's predictors say.
        let sparse = !plan.inputs.is_empty() && prediction != prediction::BLEND;
        let mut fields = Self { prediction, sparse, ..Self::default() };
        if !plan.contexts.is_none() {
            (fields.contexts, fields.class) = (abi::CONTEXTS_EXPONENT, class(side)?);
        }
        Ok(fields)
    }
}

/// The kernels that encode `n` values by a plan; `None`: the CPU does.
pub(super) fn encode_route(plan: &TensorPlan, n: u64, dtype: DType) -> Option<Route> {
    let prediction = prediction_of(&plan.plan, dtype)?;
    let width = dtype.value_width();
    let known = plan.planes.iter().all(|p| code(*p).is_some());
    if !known || !has_layout(plan.plan.layout) || n * width as u64 > abi::MAX_ENCODE_BYTES {
        return None;
    }
    match prediction {
        Prediction::Direct => {}
        Prediction::Parent => return Some(Route::Residual),
        Prediction::Update => return Some(Route::Update),
        Prediction::Other(_) => return Some(Route::Predicted),
    }
    let fused = Route::fused(width).filter(|&route| {
        plan.plan.layout == LayoutId::FIELDS
            && plan.planes.first() == Some(&PlaneCoding::RANS8)
            && plan.planes[1..].iter().all(|p| *p == PlaneCoding::RAW)
            && n <= abi::FUSED_VALUES[route as usize]
    });
    Some(fused.unwrap_or(Route::Composed))
}

pub(super) fn has_layout(layout: LayoutId) -> bool {
    matches!(layout, LayoutId::WHOLE | LayoutId::BYTES | LayoutId::FIELDS | LayoutId::FIELDS_SIGN)
}

/// The codings that kernels write, and their numbers.
const CODINGS: [(PlaneCoding, u8); 4] = [
    (PlaneCoding::RAW, coding::RAW),
    (PlaneCoding::BITS7, coding::BITS7),
    (PlaneCoding::RANS8, coding::RANS8),
    (PlaneCoding::RANS12, coding::RANS12),
];

fn code(plane: PlaneCoding) -> Option<u8> {
    CODINGS.iter().find(|c| c.0 == plane).map(|c| c.1)
}

/// The coding of each plane, as the kernels number them.
pub(super) fn codings(plan: &TensorPlan) -> [u8; MAX_PLANES] {
    let mut out = [coding::RAW; MAX_PLANES];
    for (to, plane) in out.iter_mut().zip(&plan.planes) {
        *to = code(*plane).unwrap_or(coding::RAW);
    }
    out
}

/// Bytes of the largest plane of `n` values that is not stored raw.
pub(super) fn largest_coded(plan: &TensorPlan, n: u64, width: usize) -> Result<u64> {
    let sizes = Planes::new(plan.plan.layout, width, usize::try_from(n).unwrap_or(usize::MAX))?;
    let coded = sizes.sizes().iter().zip(codings(plan)).filter(|c| c.1 != coding::RAW);
    Ok(coded.map(|(size, _)| *size as u64).max().unwrap_or(0))
}

/// Index of a chunk's first value in its tensor, and the number of values in a row of the tensor; 0
/// if it has one dimension.
pub(super) fn position(dtype: DType, shape: &[u64], chunk_log2: u8, chunk: u64) -> (u64, u64) {
    let each = (dtype.size() / dtype.value_width()) as u64;
    let cols = if let [_, .., cols] = shape { cols.saturating_mul(each) } else { 0 };
    let size = 1u64.checked_shl(chunk_log2.into()).unwrap_or(u64::MAX);
    (chunk.saturating_mul(size), cols)
}

/// The kernels for a frame, and its descriptor without addresses; `None`: the CPU decodes it, or reports the error in
/// it. A descriptor with a residual from an input also needs the input's values.
pub(super) fn decode_route(
    spec: &TensorSpec<'_>,
    record: &ChunkRecord,
    frame: &[u8],
    bytes: u64,
) -> Option<(Route, abi::DecodeChunk)> {
    let (plan, width) = (spec.plan, spec.dtype.value_width());
    let n = bytes / width as u64;
    let prediction = prediction_of(plan, spec.dtype)?;
    let fits = bytes <= abi::MAX_DECODE_BYTES && n > 0 && frame.len() == record.len as usize;
    if !fits {
        return None;
    }
    let mut chunk: abi::DecodeChunk = bytemuck::Zeroable::zeroed();
    chunk.frame_len = record.len;
    // At most 2^21.
    chunk.n = u32::try_from(n).ok()?;
    chunk.width = u8::try_from(width).ok()?;
    chunk.layout = plan.layout.0;
    (chunk.crc_encoded, chunk.crc_raw) = (record.crc_encoded, record.crc_raw);
    if record.plain {
        chunk.plain = 1;
        // Both checksums are that of the values.
        let sound = frame.len() as u64 == bytes && record.crc_encoded == record.crc_raw;
        return sound.then_some((Route::Composed, chunk));
    }
    if !has_layout(plan.layout) {
        return None;
    }
    chunk.residual = plan.residual.0;
    let fields = PlanFields::of(plan, spec.dtype, spec.side).ok()?;
    (chunk.prediction, chunk.contexts, chunk.class) =
        (fields.prediction, fields.contexts, fields.class);
    let planes = Planes::new(plan.layout, width, 0).ok()?.sizes().len();
    let streams = StreamEntry::parse_chunk(frame, planes).ok()?;
    chunk.planes = u8::try_from(planes).ok()?;
    let mut at = StreamEntry::header_len(planes);
    for (to, (entry, stream)) in chunk.streams.iter_mut().zip(streams.items()) {
        let open = [CodecId::RAW, CodecId::CONST, CodecId::BITS, CodecId::RANS];
        if !open.contains(&entry.codec) {
            return None;
        }
        at = at.next_multiple_of(s4_format::limits::ALIGN);
        *to = abi::DecodeStream {
            offset: u32::try_from(at).ok()?,
            len: entry.len,
            codec: entry.codec.0,
            param: entry.param,
            reserved: 0,
        };
        at += stream.len();
    }
    match prediction {
        Prediction::Other(_) => return Some((Route::Predicted, chunk)),
        Prediction::Update => return Some((Route::Update, chunk)),
        Prediction::Direct | Prediction::Parent => {}
    }
    let fused = Route::fused(width).filter(|_| {
        let (first, rest) = (&chunk.streams[0], &chunk.streams[1..planes]);
        prediction == Prediction::Direct
            && plan.layout == LayoutId::FIELDS
            && (first.codec, first.param) == (CodecId::RANS.0, 8)
            && rest.iter().all(|s| (s.codec, s.param) == (CodecId::RAW.0, 0))
            && n <= abi::FUSED_DECODE_VALUES
    });
    Some((fused.unwrap_or(Route::Composed), chunk))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunks_position_is_in_values() {
        assert_eq!(position(DType::Float32, &[9, 1000], 16, 3), (3 << 16, 1000));
        assert_eq!(position(DType::BFloat16, &[4, 5, 6], 17, 0), (0, 6));
        // An element of two values.
        assert_eq!(position(DType::Complex64, &[9, 1000], 16, 1), (1 << 16, 2000));
        assert_eq!(position(DType::Float32, &[1000], 16, 1), (1 << 16, 0));
        assert_eq!(position(DType::Float32, &[], 16, 0), (0, 0));
    }
}
