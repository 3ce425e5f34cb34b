//! One chunk of a tensor into the bytes that stand on disk.

use s4_codec_cpu::rans::{Counts, Place, Table, Tables, cost};
use s4_codec_cpu::{Codec, Context};
use s4_format::layout::{MAX_PLANES, Planes};
use s4_format::limits::ALIGN;
use s4_format::side::{Side, SideKind};
use s4_format::{CodecId, LayoutId, PredictorId, Result, StreamEntry, crc32c};

use crate::planner::{PlaneCoding, TensorPlan};
use crate::scratch::{sized, width_of};
use crate::tables::SharedTables;
use crate::{CpuEngine, Scratch, TensorView, residual};

/// What a chunk became.
#[derive(Debug, Clone, Copy)]
pub struct EncodedChunk {
    /// Bytes of the frame.
    pub len: usize,
    /// Whether the frame is the values as they are.
    pub plain: bool,
    /// CRC-32C of the frame.
    pub crc_encoded: u32,
    /// CRC-32C of the values.
    pub crc_raw: u32,
    /// Whether a stream uses the tensor's shared tables.
    pub shared: bool,
    /// The streams; all `raw` with length 0 beyond the layout's planes, and if `plain`.
    pub streams: [StreamEntry; MAX_PLANES],
}

const NO_STREAM: StreamEntry = StreamEntry { codec: CodecId::RAW, param: 0, len: 0 };

impl CpuEngine {
    /// Encodes chunk number `chunk` of a tensor into the start of `frame`, which grows as needed.
    ///
    /// # Errors
    /// `Limit` if the tensor has no such chunk; errors of a codec.
    pub fn encode_chunk(
        &self,
        view: &TensorView<'_>,
        plan: &TensorPlan,
        chunk: u64,
        scratch: &mut Scratch,
        frame: &mut Vec<u8>,
    ) -> Result<EncodedChunk> {
        let width = view.dtype.value_width();
        let (first, src) = chunk_bytes(view.data, width, plan.chunk_log2, chunk)?;
        let crc_raw = crc32c(src);
        let mut out = EncodedChunk {
            len: 0,
            plain: false,
            crc_encoded: crc_raw,
            crc_raw,
            shared: false,
            streams: [NO_STREAM; MAX_PLANES],
        };
        if plan.planes.iter().any(|p| !matches!(p, PlaneCoding::Raw)) || repeats(src, 16) {
            self.encode_streams(view, plan, first, src, scratch, frame, &mut out)?;
        }
        if out.len == 0 || out.len >= src.len() {
            out.len = src.len();
            out.plain = true;
            out.streams = [NO_STREAM; MAX_PLANES];
            sized(frame, src.len()).copy_from_slice(src);
        } else {
            out.crc_encoded = crc32c(&frame[..out.len]);
        }
        Ok(out)
    }

    #[expect(clippy::too_many_arguments, reason = "one step of encode_chunk")]
    fn encode_streams(
        &self,
        view: &TensorView<'_>,
        plan: &TensorPlan,
        first: u64,
        src: &[u8],
        scratch: &mut Scratch,
        frame: &mut Vec<u8>,
        out: &mut EncodedChunk,
    ) -> Result<()> {
        let width = view.dtype.value_width();
        let layout = plan.plan.layout;
        let sizes = Planes::new(layout, width, src.len() / width)?;
        if plan.plan.predictor == PredictorId::NONE {
            self.split(layout, width, src, scratch)?;
        } else {
            let mut values = std::mem::take(&mut scratch.residuals);
            let to = sized(&mut values, src.len());
            to.copy_from_slice(src);
            let done = residual::forward(self.kernels, &plan.plan, &plan.side, view, first, to)
                .and_then(|()| self.split(layout, width, to, scratch));
            scratch.residuals = values;
            done?;
        }
        let mut sizes = sizes.sizes().to_vec();
        if layout == LayoutId::TOKEN {
            sizes[1] = scratch.token_bits;
        }
        let mut at = StreamEntry::header_len(sizes.len());
        for i in 0..sizes.len() {
            at = at.next_multiple_of(ALIGN);
            let plane = scratch.plane(layout, &sizes, i);
            let coding = plan.planes.get(i).copied().unwrap_or(PlaneCoding::Raw);
            let table = plan.shared.get(i).and_then(Option::as_ref);
            let (entry, shared) = self.encode_plane(plane, coding, table, frame, at)?;
            out.streams[i] = entry;
            out.shared |= shared;
            let end = at + entry.len as usize;
            // Padding up to the next stream.
            sized(frame, end.next_multiple_of(ALIGN))[end..].fill(0);
            at = end;
        }
        StreamEntry::write_header(&out.streams[..sizes.len()], frame);
        out.len = at;
        Ok(())
    }

    /// Codes a plane into `frame[at..]`: as its constant, by the planned codec, or as it is.
    fn encode_plane(
        &self,
        plane: &[u8],
        coding: PlaneCoding,
        shared: Option<&Table>,
        frame: &mut Vec<u8>,
        at: usize,
    ) -> Result<(StreamEntry, bool)> {
        let entry = |codec, param, len| StreamEntry {
            codec,
            param,
            // A plane has at most 2^18 values of 8 bytes.
            len: u32::try_from(len).unwrap_or(u32::MAX),
        };
        if repeats(plane, 16) {
            let constant = self.codecs.get(CodecId::CONST)?;
            let dst = sized(frame, at + constant.bound(plane.len()));
            if let Ok(e) = constant.encode(Context::default(), plane, &mut dst[at..]) {
                return Ok((entry(CodecId::CONST, e.param, e.len), false));
            }
        }
        let codec: &dyn Codec = match coding {
            PlaneCoding::Raw => {
                sized(frame, at + plane.len())[at..].copy_from_slice(plane);
                return Ok((entry(CodecId::RAW, 0, plane.len()), false));
            }
            PlaneCoding::Rans(precision) => self.rans(precision),
            PlaneCoding::Bits => self.codecs.get(CodecId::BITS)?,
            PlaneCoding::Zstd => self.codecs.get(CodecId::ZSTD)?,
        };
        let dst = &mut sized(frame, at + codec.bound(plane.len()))[at..];
        let mut by_shared = false;
        let encoded = if let PlaneCoding::Rans(precision) = coding {
            let counts = Counts::of_stream(plane);
            let own = counts.table(precision);
            let cheaper = shared.filter(|t| shared_is_cheaper(&own, t, &counts, plane.len()));
            by_shared = cheaper.is_some();
            let place = if by_shared { Place::Shared } else { Place::Inline };
            let tables = Tables { list: std::slice::from_ref(cheaper.unwrap_or(&own)), place };
            self.rans(precision).encode_with(tables, &[], plane, dst)?
        } else {
            codec.encode(Context::default(), plane, dst)?
        };
        if encoded.len >= plane.len() {
            dst[..plane.len()].copy_from_slice(plane);
            return Ok((entry(CodecId::RAW, 0, plane.len()), false));
        }
        Ok((entry(codec.id(), encoded.param, encoded.len), by_shared))
    }

    /// Splits values into the planes of `scratch`.
    pub(crate) fn split(
        &self,
        layout: LayoutId,
        width: usize,
        src: &[u8],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let w = width_of(width)?;
        let sizes = Planes::new(layout, width, src.len() / width)?;
        let sizes = sizes.sizes();
        let k = &self.kernels;
        let [p0, p1, p2, p3] = &mut scratch.planes;
        match layout {
            LayoutId::FIELDS => {
                let b = sized(p2, sizes.get(2).copied().unwrap_or(0));
                k.split_fields(w, src, sized(p0, sizes[0]), sized(p1, sizes[1]), b);
            }
            LayoutId::FIELDS_SIGN => {
                let b = sized(p3, sizes.get(3).copied().unwrap_or(0));
                let (s, e) = (sized(p0, sizes[0]), sized(p1, sizes[1]));
                k.split_fields_sign(w, src, s, e, sized(p2, sizes[2]), b);
            }
            LayoutId::BYTES => k.split_bytes(w, src, sized(p0, src.len())),
            LayoutId::TOKEN => {
                let tokens = sized(p0, sizes[0]);
                scratch.token_bits = k.split_token(w, src, tokens, sized(p1, sizes[1]));
            }
            _ => sized(p0, src.len()).copy_from_slice(src),
        }
        Ok(())
    }
}

/// Whether a chunk is cheaper with the tensor's table than with one of its own.
fn shared_is_cheaper(own: &Table, shared: &Table, counts: &Counts, symbols: usize) -> bool {
    // Counts may be a sample: costs are scaled up to all symbols.
    let scale = |bits: u64| bits.saturating_mul(symbols as u64) / counts.total().max(1);
    scale(cost(counts, shared)) < scale(cost(counts, own)) + 8 * own.encoded_len() as u64
}

/// Whether bytes may be a short unit, repeated: a quick look that refuses nearly everything else.
fn repeats(bytes: &[u8], unit: usize) -> bool {
    (1..=unit).any(|u| {
        let head = &bytes[..bytes.len().min(64 + unit)];
        head.len() <= u || head[u..] == head[..head.len() - u]
    })
}

/// First value and bytes of a chunk.
pub(crate) fn chunk_bytes(
    data: &[u8],
    width: usize,
    chunk_log2: u8,
    chunk: u64,
) -> Result<(u64, &[u8])> {
    let first = chunk << chunk_log2;
    let start = usize::try_from(first).ok().and_then(|f| f.checked_mul(width));
    let start = start.filter(|&s| s < data.len());
    let start =
        start.ok_or_else(|| s4_format::Error::limit("tensor has no such chunk").in_chunk(chunk))?;
    let end = data.len().min(start + (width << chunk_log2));
    Ok((first, &data[start..end]))
}

impl TensorPlan {
    /// The side data that the index keeps. `shared`: whether a chunk used the shared tables.
    ///
    /// # Errors
    /// `Limit` if there is too much of it.
    pub fn side_data(&self, shared: bool) -> Result<Side> {
        let mut side = self.side.clone();
        if shared {
            side.push(SideKind::TABLES, SharedTables::to_bytes(&self.shared))?;
        }
        Ok(side)
    }
}
