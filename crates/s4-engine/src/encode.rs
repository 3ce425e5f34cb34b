//! Encodes one chunk of a tensor into its stored bytes: predict, split into planes, code streams.

use s4_codec_cpu::{Context, Symbols, Workspace};
use s4_format::layout::MAX_PLANES;
use s4_format::limits::ALIGN;
use s4_format::{CodecId, LayoutId, Result, StreamEntry};
use s4_predict::Tensor;

use crate::chunk::{QUICK, chunk_bytes, repeats};
use crate::once;
use crate::planes::Layout;
use crate::predict::Prediction;
use crate::scratch::sized;
use crate::{CpuEngine, PlaneCoding, Scratch, TensorPlan, TensorView};

/// A chunk to encode.
#[derive(Debug, Clone, Copy)]
pub struct EncodeJob<'a> {
    /// The tensor.
    pub view: &'a TensorView<'a>,
    /// Its plan.
    pub plan: &'a TensorPlan,
    /// Index of the chunk.
    pub chunk: u64,
    /// The values of the plan's inputs for this chunk, in the order of the plan.
    pub inputs: &'a [&'a [u8]],
}

/// The outcome of encoding a chunk.
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

/// The outcome of encoding a plane.
struct Coded {
    coding: PlaneCoding,
    len: usize,
    /// Whether the stream is in the buffer; otherwise it is the plane itself.
    in_buffer: bool,
    shared: bool,
    /// Bytes of the next stream that this one carries.
    carried: usize,
}

const NO_STREAM: StreamEntry = StreamEntry { codec: CodecId::RAW, param: 0, len: 0 };

impl EncodedChunk {
    const EMPTY: Self = Self {
        len: 0,
        plain: false,
        crc_encoded: 0,
        crc_raw: 0,
        shared: false,
        streams: [NO_STREAM; MAX_PLANES],
    };
}

/// Appends values as they are. They may change meanwhile.
pub(crate) fn plain(src: &[u8], frame: &mut Vec<u8>) -> EncodedChunk {
    let crc = once::append_summed(src, frame);
    let (crc_encoded, crc_raw) = (crc, crc);
    EncodedChunk { len: src.len(), plain: true, crc_encoded, crc_raw, ..EncodedChunk::EMPTY }
}

impl CpuEngine {
    /// Appends a chunk of a tensor to `frame` as a plain chunk, whatever its plan.
    ///
    /// # Errors
    /// `Limit` if the tensor has no such chunk.
    pub(crate) fn encode_plain(
        &self,
        job: &EncodeJob<'_>,
        frame: &mut Vec<u8>,
    ) -> Result<EncodedChunk> {
        let EncodeJob { view, plan, chunk, .. } = *job;
        let width = view.dtype.value_width();
        let (_, src) = chunk_bytes(view.data, width, plan.chunk_log2, chunk)?;
        Ok(plain(src, frame))
    }

    /// Encodes a chunk of a tensor and appends it to `frame`. If another thread changes values
    /// meanwhile, each is stored as it was at some time during the call.
    ///
    /// # Errors
    /// `Limit` if the tensor has no such chunk; `Unsupported` if inputs of the plan are missing or
    /// this engine lacks a codec or predictor; `Corrupt` if an input has not as many values as the
    /// chunk; errors of a codec.
    pub fn encode(
        &self,
        job: &EncodeJob<'_>,
        scratch: &mut Scratch,
        frame: &mut Vec<u8>,
    ) -> Result<EncodedChunk> {
        let EncodeJob { view, plan, chunk, .. } = *job;
        let width = view.dtype.value_width();
        let values = chunk_bytes(view.data, width, plan.chunk_log2, chunk)?;
        self.encode_values(job, values, scratch, frame)
    }

    /// As [`CpuEngine::encode`], for values outside the tensor's view: `src`, from value index `first` on.
    pub(crate) fn encode_values(
        &self,
        job: &EncodeJob<'_>,
        (first, src): (u64, &[u8]),
        scratch: &mut Scratch,
        frame: &mut Vec<u8>,
    ) -> Result<EncodedChunk> {
        let EncodeJob { view, plan, .. } = *job;
        let width = view.dtype.value_width();
        let start = frame.len();
        let mut out = EncodedChunk::EMPTY;
        let layout = Layout::new(self.kernels, plan.plan.layout, width)?;
        // The values may change, so they only decide here whether coding is worth a try.
        if plan.planes.iter().any(|p| *p != PlaneCoding::RAW) || repeats(src, QUICK) {
            self.encode_streams(job, (first, src), &layout, scratch, frame, &mut out)?;
        }
        if out.len == 0 || out.len >= src.len() {
            frame.truncate(start);
            out = plain(src, frame);
        } else {
            let planes = layout.planes(0)?.sizes().len();
            out.crc_encoded = StreamEntry::parse_chunk(&frame[start..], planes)?.crc();
        }
        Ok(out)
    }

    fn encode_streams(
        &self,
        job: &EncodeJob<'_>,
        (first, src): (u64, &[u8]),
        layout: &Layout,
        scratch: &mut Scratch,
        frame: &mut Vec<u8>,
        out: &mut EncodedChunk,
    ) -> Result<()> {
        let (view, plan) = (job.view, job.plan);
        let id = plan.plan.layout;
        let planes = layout.planes(src.len())?;
        let tensor = Tensor { dtype: view.dtype, shape: view.shape, side: &plan.side };
        let prediction = self.prediction(&plan.plan, tensor, first)?;
        out.crc_raw = match &prediction {
            None => layout.split_once(src, scratch)?,
            Some(prediction) => {
                let mut residuals = std::mem::take(&mut scratch.residuals);
                let to = sized(&mut residuals, src.len());
                let crc = prediction.residuals(src, job.inputs, &mut scratch.predicted, to);
                let split = crc.and_then(|crc| layout.split(to, scratch).map(|()| crc));
                scratch.residuals = residuals;
                split?
            }
        };
        let mut sizes = [0; MAX_PLANES];
        let sizes = &mut sizes[..planes.sizes().len()];
        sizes.copy_from_slice(planes.sizes());
        if id == LayoutId::TOKEN {
            sizes[1] = scratch.token_bits;
        }
        let sizes = &*sizes;
        out.shared =
            self.encode_planes(job, prediction.as_ref(), sizes, scratch, &mut out.streams)?;
        let start = frame.len();
        frame.resize(start + StreamEntry::header_len(sizes.len()), 0);
        StreamEntry::write_header(&out.streams[..sizes.len()], &mut frame[start..]);
        for i in 0..sizes.len() {
            let gap = (frame.len() - start).next_multiple_of(ALIGN) - (frame.len() - start);
            frame.extend_from_slice(&[0; ALIGN][..gap]);
            let stream = scratch.stream(id, sizes, i);
            frame.extend_from_slice(&stream[..out.streams[i].len as usize]);
        }
        out.len = frame.len() - start;
        Ok(())
    }

    /// Codes every plane, the last one first, because a stream may carry the end of the next one.
    /// Returns whether any uses the tensor's shared tables.
    fn encode_planes(
        &self,
        job: &EncodeJob<'_>,
        prediction: Option<&Prediction<'_>>,
        sizes: &[usize],
        scratch: &mut Scratch,
        entries: &mut [StreamEntry; MAX_PLANES],
    ) -> Result<bool> {
        let (plan, layout) = (job.plan, job.plan.plan.layout);
        let mut shared = false;
        scratch.streams.resize_with(sizes.len().max(scratch.streams.len()), Vec::new);
        let mut work = std::mem::take(&mut scratch.work);
        let mut contexts = std::mem::take(&mut scratch.contexts);
        contexts.clear();
        for i in (0..sizes.len()).rev() {
            let mut buffer = std::mem::take(&mut scratch.streams[i]);
            let coding = plan.coding(i);
            let rans = coding.codec == CodecId::RANS;
            let contexts_used = rans && plan.one_table >> i & 1 == 0;
            let several = prediction.filter(|p| contexts_used && p.has_contexts(layout, i));
            if let Some(prediction) = several {
                let mut planes = [&[][..]; MAX_PLANES];
                (0..i).for_each(|j| planes[j] = scratch.plane(layout, sizes, j));
                let known = &planes[..i];
                prediction.contexts(layout, known, job.inputs, sizes[i], &mut contexts)?;
            }
            let (param, tables) = (coding.param, plan.tables(i));
            let symbols = Symbols {
                bytes: scratch.plane(layout, sizes, i),
                context: Context {
                    param,
                    tables,
                    contexts: if several.is_some() { &contexts } else { &[] },
                },
                // With the many contexts of `update`, the bytes that a chunk's own tables save are
                // not worth the time.
                own_tables: tables.is_empty()
                    || !prediction.is_some_and(Prediction::has_update_contexts),
                behind: match i + 1 < sizes.len() {
                    true => scratch.stream(layout, sizes, i + 1),
                    false => &[],
                },
                sparse: prediction.is_some_and(Prediction::is_sparse),
            };
            let coded = self.encode_plane(coding, &symbols, &mut buffer, &mut work)?;
            shared |= coded.shared;
            // A plane has at most 2^18 values of 8 bytes.
            let len = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
            let PlaneCoding { codec, param } = coded.coding;
            entries[i] = StreamEntry { codec, param, len: len(coded.len) };
            if let Some(next) = entries.get_mut(i + 1).filter(|_| coded.carried > 0) {
                next.len -= len(coded.carried);
            }
            scratch.streams[i] = buffer;
            scratch.coded[i] = coded.in_buffer.then_some(coded.len);
        }
        (scratch.work, scratch.contexts) = (work, contexts);
        Ok(shared)
    }

    /// Codes a plane into `dst`: as its constant, by the planned codec, or as it is.
    fn encode_plane(
        &self,
        coding: PlaneCoding,
        symbols: &Symbols<'_>,
        dst: &mut Vec<u8>,
        work: &mut Workspace,
    ) -> Result<Coded> {
        let plane = symbols.bytes;
        let raw = Coded {
            coding: PlaneCoding::RAW,
            len: plane.len(),
            in_buffer: false,
            shared: false,
            carried: 0,
        };
        if repeats(plane, QUICK) {
            let constant = self.codecs.get(CodecId::CONST)?;
            let symbols = Symbols::new(plane, Context::of(0));
            let dst = sized(dst, constant.bound(0, plane.len()));
            if let Ok(e) = constant.encode(&symbols, dst, work) {
                let coding = PlaneCoding::new(CodecId::CONST, 0);
                return Ok(Coded { coding, len: e.len, in_buffer: true, ..raw });
            }
        }
        if coding == PlaneCoding::RAW {
            return Ok(raw);
        }
        let codec = self.codecs.get(coding.codec)?;
        let e = codec.encode(symbols, sized(dst, codec.bound(coding.param, plane.len())), work)?;
        if e.len >= plane.len() {
            return Ok(raw);
        }
        let (shared, carried) = (e.shared, e.carried);
        Ok(Coded { coding, len: e.len, in_buffer: true, shared, carried })
    }
}
