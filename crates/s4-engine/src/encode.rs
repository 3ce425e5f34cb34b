//! One chunk of a tensor into the bytes that stand on disk.

use s4_codec_cpu::rans::{Counts, Place, Precision, Table, Tables, cost};
use s4_codec_cpu::{Codec, Context, Encoded};
use s4_format::layout::{MAX_PLANES, Planes};
use s4_format::limits::ALIGN;
use s4_format::side::{Side, SideKind};
use s4_format::{CodecId, LayoutId, PredictorId, Result, StreamEntry, crc32c_append};
use s4_planes::Width;

use crate::once::{self, PIECE};
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
    /// CRC-32C of the frame's header and coded streams, as the chunk's record keeps it.
    pub crc_encoded: u32,
    /// CRC-32C of the values.
    pub crc_raw: u32,
    /// Whether a stream uses the tensor's shared tables.
    pub shared: bool,
    /// The streams; all `raw` with length 0 beyond the layout's planes, and if `plain`.
    pub streams: [StreamEntry; MAX_PLANES],
}

/// The values of a chunk.
pub(crate) struct Values<'a> {
    /// Number of the first one.
    pub(crate) first: u64,
    pub(crate) src: &'a [u8],
    /// The parent's at the same places.
    pub(crate) parent: Option<&'a [u8]>,
}

/// Planes of differences with more symbols are coded in long segments: enough of them are left to
/// run side by side, and differences take few bits, so that the price of a segment tells.
const LONG_PLANE: usize = 1 << 16;

/// A plane to be coded.
struct PlaneJob<'a> {
    plane: &'a [u8],
    coding: PlaneCoding,
    /// The table that the tensor's chunks share.
    table: Option<&'a Table>,
    /// The stream behind it, whose end it may carry.
    behind: &'a [u8],
    /// Whether it is of differences from a parent.
    delta: bool,
}

/// What a plane became.
struct Coded {
    codec: CodecId,
    param: u8,
    len: usize,
    /// Whether the stream is in the buffer; else it is the plane itself.
    in_buffer: bool,
    shared: bool,
    /// Bytes of the stream behind it that it carries.
    carried: usize,
}

const NO_STREAM: StreamEntry = StreamEntry { codec: CodecId::RAW, param: 0, len: 0 };

impl CpuEngine {
    /// Encodes chunk number `chunk` of a tensor and appends it to `frame`. Values that another thread
    /// changes meanwhile are each what they were at some time.
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
        self.encode_chunk_from(view, plan, chunk, None, scratch, frame)
    }

    /// As [`CpuEngine::encode_chunk`], for a plan that may predict from a parent. `parent` are the
    /// parent's values of this chunk.
    ///
    /// # Errors
    /// As [`CpuEngine::encode_chunk`]; `Unsupported` if the plan predicts from a parent and its
    /// values are `None`, `Corrupt` if they are not as many as the chunk's.
    pub fn encode_chunk_from(
        &self,
        view: &TensorView<'_>,
        plan: &TensorPlan,
        chunk: u64,
        parent: Option<&[u8]>,
        scratch: &mut Scratch,
        frame: &mut Vec<u8>,
    ) -> Result<EncodedChunk> {
        let width = view.dtype.value_width();
        let (first, src) = chunk_bytes(view.data, width, plan.chunk_log2, chunk)?;
        let start = frame.len();
        let mut out = EncodedChunk {
            len: 0,
            plain: false,
            crc_encoded: 0,
            crc_raw: 0,
            shared: false,
            streams: [NO_STREAM; MAX_PLANES],
        };
        // Whether it is worth a try is all that is asked of the values themselves: they may change.
        if plan.planes.iter().any(|p| !matches!(p, PlaneCoding::Raw)) || repeats(src, QUICK) {
            let values = Values { first, src, parent };
            self.encode_streams(view, plan, &values, scratch, frame, &mut out)?;
        }
        if out.len == 0 || out.len >= src.len() {
            frame.truncate(start);
            out.crc_raw = once::append_summed(src, frame);
            out.crc_encoded = out.crc_raw;
            out.len = src.len();
            out.plain = true;
            out.streams = [NO_STREAM; MAX_PLANES];
        } else {
            let planes = Planes::new(plan.plan.layout, width, 0)?.sizes().len();
            out.crc_encoded = StreamEntry::parse_chunk(&frame[start..], planes)?.crc();
        }
        Ok(out)
    }

    fn encode_streams(
        &self,
        view: &TensorView<'_>,
        plan: &TensorPlan,
        values: &Values<'_>,
        scratch: &mut Scratch,
        frame: &mut Vec<u8>,
        out: &mut EncodedChunk,
    ) -> Result<()> {
        let width = view.dtype.value_width();
        let layout = plan.plan.layout;
        let sizes = Planes::new(layout, width, values.src.len() / width)?;
        out.crc_raw = if plan.plan.predictor == PredictorId::NONE {
            self.split_once(layout, width, values.src, scratch)?
        } else {
            let mut residuals = std::mem::take(&mut scratch.residuals);
            let to = sized(&mut residuals, values.src.len());
            let crc = residual::forward(self.kernels, &plan.plan, &plan.side, view, values, to);
            let split = self.split(layout, width, to, scratch);
            scratch.residuals = residuals;
            crc.and_then(|crc| split.map(|()| crc))?
        };
        let mut sizes = sizes.sizes().to_vec();
        if layout == LayoutId::TOKEN {
            sizes[1] = scratch.token_bits;
        }
        out.shared = self.encode_planes(plan, layout, &sizes, scratch, &mut out.streams)?;
        let start = frame.len();
        frame.resize(start + StreamEntry::header_len(sizes.len()), 0);
        StreamEntry::write_header(&out.streams[..sizes.len()], &mut frame[start..]);
        for i in 0..sizes.len() {
            let gap = (frame.len() - start).next_multiple_of(ALIGN) - (frame.len() - start);
            frame.extend_from_slice(&[0; ALIGN][..gap]);
            let stream = scratch.stream(layout, &sizes, i);
            frame.extend_from_slice(&stream[..out.streams[i].len as usize]);
        }
        out.len = frame.len() - start;
        Ok(())
    }

    /// Codes every plane, the last one first, because a stream may carry the end of the one behind
    /// it. Returns whether one uses the tensor's shared tables.
    fn encode_planes(
        &self,
        plan: &TensorPlan,
        layout: LayoutId,
        sizes: &[usize],
        scratch: &mut Scratch,
        entries: &mut [StreamEntry; MAX_PLANES],
    ) -> Result<bool> {
        let mut shared = false;
        scratch.streams.resize_with(sizes.len().max(scratch.streams.len()), Vec::new);
        for i in (0..sizes.len()).rev() {
            let mut buffer = std::mem::take(&mut scratch.streams[i]);
            let plane = scratch.plane(layout, sizes, i);
            let behind = match i + 1 < sizes.len() {
                true => scratch.stream(layout, sizes, i + 1),
                false => &[],
            };
            let job = PlaneJob {
                plane,
                coding: plan.planes.get(i).copied().unwrap_or(PlaneCoding::Raw),
                table: plan.shared.get(i).and_then(Option::as_ref),
                behind,
                delta: plan.plan.predictor == PredictorId::PARENT,
            };
            let coded = self.encode_plane(&job, &mut buffer)?;
            shared |= coded.shared;
            // A plane has at most 2^18 values of 8 bytes.
            let len = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
            let Coded { codec, param, .. } = coded;
            entries[i] = StreamEntry { codec, param, len: len(coded.len) };
            if let Some(next) = entries.get_mut(i + 1).filter(|_| coded.carried > 0) {
                next.len -= len(coded.carried);
            }
            scratch.streams[i] = buffer;
            scratch.coded[i] = coded.in_buffer.then_some(coded.len);
        }
        Ok(shared)
    }

    /// Codes a plane into `dst`: as its constant, by the planned codec, or as it is.
    fn encode_plane(&self, job: &PlaneJob<'_>, dst: &mut Vec<u8>) -> Result<Coded> {
        let plane = job.plane;
        let coded = |codec, e: Encoded| Coded {
            codec,
            param: e.param,
            len: e.len,
            in_buffer: true,
            shared: false,
            carried: 0,
        };
        let raw = Coded {
            in_buffer: false,
            ..coded(CodecId::RAW, Encoded { len: plane.len(), param: 0 })
        };
        if repeats(plane, QUICK) {
            let constant = self.codecs.get(CodecId::CONST)?;
            let dst = sized(dst, constant.bound(plane.len()));
            if let Ok(e) = constant.encode(Context::default(), plane, dst) {
                return Ok(coded(CodecId::CONST, e));
            }
        }
        let codec: &dyn Codec = match job.coding {
            PlaneCoding::Raw => return Ok(raw),
            PlaneCoding::Rans(precision) => return self.encode_rans(job, precision, raw, dst),
            PlaneCoding::Bits => self.codecs.get(CodecId::BITS)?,
            PlaneCoding::Zstd => self.codecs.get(CodecId::ZSTD)?,
            PlaneCoding::Gdeflate => self.codecs.get(CodecId::GDEFLATE)?,
            PlaneCoding::NvcompAns => self.codecs.get(CodecId::NVCOMP_ANS)?,
        };
        let e = codec.encode(Context::default(), plane, sized(dst, codec.bound(plane.len())))?;
        Ok(if e.len < plane.len() { coded(codec.id(), e) } else { raw })
    }

    /// Codes a plane by rANS, with its own table or the tensor's, whichever is cheaper.
    fn encode_rans(
        &self,
        job: &PlaneJob<'_>,
        precision: Precision,
        raw: Coded,
        dst: &mut Vec<u8>,
    ) -> Result<Coded> {
        let (mut codec, plane) = (self.rans(precision), job.plane);
        if job.delta && plane.len() > LONG_PLANE {
            codec = codec.with_long_segments();
        }
        // Differences have many rare symbols, and take few bits: a sample would not do.
        let counts = if job.delta { Counts::of_all(plane) } else { Counts::of_stream(plane) };
        let own = counts.table(precision);
        let cheaper = job.table.filter(|t| shared_is_cheaper(&own, t, &counts, plane.len()));
        let place = if cheaper.is_some() { Place::Shared } else { Place::Inline };
        let tables = Tables { list: std::slice::from_ref(cheaper.unwrap_or(&own)), place };
        let at = job.behind.len().checked_sub(codec.carry_len(plane.len()));
        let carry = at.map_or(&[][..], |at| &job.behind[at..]);
        let dst = sized(dst, codec.bound(plane.len()));
        let e = codec.encode_with(tables, &[], carry, plane, dst)?;
        if e.len >= plane.len() {
            return Ok(raw);
        }
        Ok(Coded {
            codec: CodecId::RANS,
            param: e.param,
            len: e.len,
            in_buffer: true,
            shared: cheaper.is_some(),
            carried: carry.len(),
        })
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
        if layout == LayoutId::TOKEN {
            let [tokens, bits, ..] = &mut scratch.planes;
            let tokens = sized(tokens, sizes.sizes()[0]);
            let bits = sized(bits, sizes.sizes()[1]);
            scratch.token_bits = self.kernels.split_token(w, src, tokens, bits);
            return Ok(());
        }
        make_room(layout, sizes.sizes(), &mut scratch.planes);
        self.split_part(layout, w, src, (0, src.len() / width), &mut scratch.planes);
        Ok(())
    }

    /// As [`CpuEngine::split`], of values that may change meanwhile. Gives the CRC-32C of those that were
    /// split.
    fn split_once(
        &self,
        layout: LayoutId,
        width: usize,
        src: &[u8],
        scratch: &mut Scratch,
    ) -> Result<u32> {
        let (w, n) = (width_of(width)?, src.len() / width);
        let sizes = Planes::new(layout, width, n)?;
        if layout == LayoutId::TOKEN {
            // Its planes cannot be made piece by piece; it is one of differences, which are copies.
            return Err(s4_format::Error::unsupported("layout `token` of values themselves"));
        }
        make_room(layout, sizes.sizes(), &mut scratch.planes);
        if layout == LayoutId::WHOLE {
            return once::copy_summed(src, &mut scratch.planes[0][..src.len()], |_, _| Ok(()));
        }
        let Scratch { planes, piece, .. } = scratch;
        let piece = sized(piece, PIECE);
        let mut crc = 0;
        for (i, src) in src.chunks(PIECE).enumerate() {
            let piece = &mut piece[..src.len()];
            once::copy(src, piece);
            crc = crc32c_append(crc, piece);
            self.split_part(layout, w, piece, (i * (PIECE / width), n), planes);
        }
        Ok(crc)
    }

    /// Splits a part of `n` values, from number `first` on, into planes that have room for all. (Not for
    /// layout `token`.) `first` is a multiple of eight.
    fn split_part(
        &self,
        layout: LayoutId,
        w: Width,
        src: &[u8],
        (first, n): (usize, usize),
        planes: &mut [Vec<u8>; 4],
    ) {
        let (k, len) = (&self.kernels, src.len() / w.bytes());
        let [p0, p1, p2, p3] = planes;
        let part = first..first + len;
        // The low bytes of a value, which are no plane of their own of two bytes.
        let low = w.bytes().saturating_sub(2);
        let low = first * low..(first + len) * low;
        match layout {
            LayoutId::FIELDS => {
                k.split_fields(w, src, &mut p0[part.clone()], &mut p1[part], &mut p2[low]);
            }
            LayoutId::FIELDS_SIGN => {
                let signs = &mut p0[first / 8..(first + len).div_ceil(8)];
                let (e, a) = (&mut p1[part.clone()], &mut p2[part]);
                k.split_fields_sign(w, src, signs, e, a, &mut p3[low]);
            }
            LayoutId::BYTES => k.split_bytes_part(w, src, first, &mut p0[..n * w.bytes()]),
            _ => p0[first * w.bytes()..(first + len) * w.bytes()].copy_from_slice(src),
        }
    }
}

/// Makes the buffers of planes large enough.
fn make_room(layout: LayoutId, sizes: &[usize], planes: &mut [Vec<u8>; 4]) {
    if layout == LayoutId::BYTES {
        // All planes lie in the first buffer.
        sized(&mut planes[0], sizes.iter().sum());
        return;
    }
    for (plane, size) in planes.iter_mut().zip(sizes) {
        sized(plane, *size);
    }
}

/// Whether a chunk is cheaper with the tensor's table than with one of its own.
fn shared_is_cheaper(own: &Table, shared: &Table, counts: &Counts, symbols: usize) -> bool {
    // Counts may be a sample: costs are scaled up to all symbols.
    let scale = |bits: u64| bits.saturating_mul(symbols as u64) / counts.total().max(1);
    scale(cost(counts, shared)) < scale(cost(counts, own)) + 8 * own.encoded_len() as u64
}

/// Longest unit of the codec `const`.
const UNIT: usize = 16;
/// Bytes that show whether it is worth a try.
const QUICK: usize = 64 + UNIT;

/// Whether the first `look` bytes are a unit that `const` can code, repeated. A short look refuses
/// nearly everything else.
pub(crate) fn repeats(bytes: &[u8], look: usize) -> bool {
    (1..=UNIT).any(|u| {
        let head = &bytes[..bytes.len().min(look)];
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
