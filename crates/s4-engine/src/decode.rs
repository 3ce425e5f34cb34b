//! The bytes of a chunk on disk into values.

use s4_codec_cpu::Context;
use s4_format::layout::{MAX_PLANES, Planes};
use s4_format::side::{Side, SideKind};
use s4_format::{
    ChunkRecord, CodecId, DType, Error, LayoutId, Plan, PredictorId, Result, StreamEntry,
    StreamList, crc32c,
};
use s4_planes::token_bits;

use crate::scratch::{sized, width_of};
use crate::tables::SharedTables;
use crate::{CpuEngine, Scratch, TensorView, residual};

/// What decoding a chunk needs to know of its tensor.
#[derive(Debug, Clone, Copy)]
pub struct TensorSpec<'a> {
    /// Type of the elements.
    pub dtype: DType,
    /// Size of each dimension, in elements.
    pub shape: &'a [u64],
    /// Predictor, residual and layout.
    pub plan: &'a Plan,
    /// Side data.
    pub side: &'a Side,
    /// Values in each chunk but the last, as a power of two.
    pub chunk_log2: u8,
}

impl CpuEngine {
    /// Decodes the frame of chunk number `chunk` into `dst`, whose size is that of the chunk's
    /// values. Checks the frame before, and the values after, against the checksums of `record`.
    ///
    /// # Errors
    /// `Corrupt`, `Truncated` or `Unsupported`, naming chunk and stream; `dst` is then unspecified.
    pub fn decode_chunk(
        &self,
        spec: &TensorSpec<'_>,
        chunk: u64,
        record: &ChunkRecord,
        frame: &[u8],
        scratch: &mut Scratch,
        dst: &mut [u8],
    ) -> Result<()> {
        self.decode_checked(&Coded { spec, chunk, record, frame, over: false }, scratch, dst)
            .map_err(|e| e.in_chunk(chunk))
    }

    /// As [`CpuEngine::decode_chunk`], for a plan that may predict from a parent: `dst` holds the
    /// parent's values of this chunk, which become the chunk's. A plain chunk, or a plan without a
    /// parent, does not look at them.
    ///
    /// # Errors
    /// As [`CpuEngine::decode_chunk`].
    pub fn decode_chunk_over(
        &self,
        spec: &TensorSpec<'_>,
        chunk: u64,
        record: &ChunkRecord,
        frame: &[u8],
        scratch: &mut Scratch,
        dst: &mut [u8],
    ) -> Result<()> {
        self.decode_checked(&Coded { spec, chunk, record, frame, over: true }, scratch, dst)
            .map_err(|e| e.in_chunk(chunk))
    }

    fn decode_checked(
        &self,
        coded: &Coded<'_>,
        scratch: &mut Scratch,
        dst: &mut [u8],
    ) -> Result<()> {
        let Coded { spec, record, frame, .. } = *coded;
        let stored = || Error::corrupt("checksum of the stored bytes differs");
        if frame.len() != record.len as usize {
            let what = format!("{} bytes stored, {} named", frame.len(), record.len);
            return Err(Error::corrupt(what));
        }
        // The checksum of the values, once it is known.
        let mut crc = None;
        if record.plain {
            if frame.len() != dst.len() {
                return Err(Error::corrupt(format!(
                    "plain chunk of {} bytes, {} expected",
                    frame.len(),
                    dst.len()
                )));
            }
            // Stored bytes and values are the same: one checksum checks both.
            if record.crc_encoded != record.crc_raw {
                return Err(stored());
            }
            dst.copy_from_slice(frame);
        } else {
            let width = spec.dtype.value_width();
            if !dst.len().is_multiple_of(width) {
                let what = format!("{} bytes for values of {width}", dst.len());
                return Err(Error::corrupt(what));
            }
            let planes = Planes::new(spec.plan.layout, width, dst.len() / width)?;
            let streams = StreamEntry::parse_chunk(frame, planes.sizes().len())?;
            if streams.crc() != record.crc_encoded {
                return Err(stored());
            }
            crc = self.decode_predicted(coded, &streams, scratch, dst)?;
        }
        if crc.unwrap_or_else(|| crc32c(dst)) != record.crc_raw {
            return Err(Error::corrupt("checksum of the decoded values differs"));
        }
        Ok(())
    }

    /// Decodes streams and undoes the prediction; returns the CRC-32C of `dst` if that was at hand.
    fn decode_predicted(
        &self,
        coded: &Coded<'_>,
        streams: &StreamList<'_>,
        scratch: &mut Scratch,
        dst: &mut [u8],
    ) -> Result<Option<u32>> {
        let Coded { spec, chunk, over, .. } = *coded;
        match spec.plan.predictor {
            PredictorId::NONE => self.decode_streams(spec, streams, scratch, dst),
            PredictorId::PARENT if !over => {
                Err(Error::unsupported("a delta without the values of its parent"))
            }
            PredictorId::PARENT => {
                let mut residuals = std::mem::take(&mut scratch.residuals);
                let differences = sized(&mut residuals, dst.len());
                let done = self
                    .decode_streams(spec, streams, scratch, differences)
                    .and_then(|_| residual::apply(self.kernels, spec, differences, dst));
                scratch.residuals = residuals;
                done.map(|()| None)
            }
            _ => {
                self.decode_streams(spec, streams, scratch, dst)?;
                let view = TensorView { dtype: spec.dtype, shape: spec.shape, data: &[] };
                let first = chunk << spec.chunk_log2;
                residual::inverse(self.kernels, spec.plan, spec.side, &view, first, dst)?;
                Ok(None)
            }
        }
    }

    /// Decodes streams and merges what they hold; returns the CRC-32C of `dst` if that was at hand,
    /// and `dst` is values.
    fn decode_streams(
        &self,
        spec: &TensorSpec<'_>,
        streams: &StreamList<'_>,
        scratch: &mut Scratch,
        dst: &mut [u8],
    ) -> Result<Option<u32>> {
        let width = spec.dtype.value_width();
        let layout = spec.plan.layout;
        let planes = Planes::new(layout, width, dst.len() / width)?;
        let mut sizes = planes.sizes().to_vec();
        let tables = SharedTables::parse(spec.side.get(SideKind::TABLES))?;
        let mut stored = [Stored::Decoded; MAX_PLANES];
        scratch.carry.clear();
        for (i, (entry, bytes)) in streams.items().iter().enumerate() {
            // The second plane of `token` is as long as the tokens of the first one say.
            if layout == LayoutId::TOKEN && i == 1 {
                let tokens = match stored[0].bytes() {
                    Some(bytes) => bytes,
                    None => &scratch.planes[0][..sizes[0]],
                };
                sizes[1] = token_plane_len(width, tokens).map_err(|e| e.in_stream(0))?;
            }
            std::mem::swap(&mut scratch.carry, &mut scratch.tail);
            scratch.carry.clear();
            let whole = bytes.len() + scratch.tail.len() == sizes[i];
            if entry.codec == CodecId::RAW && entry.param == 0 && whole {
                let split = layout == LayoutId::FIELDS && i == 1;
                if scratch.tail.is_empty() {
                    stored[i] = Stored::Frame(bytes);
                    continue;
                } else if split {
                    stored[i] = Stored::FrameAndTail(bytes);
                    std::mem::swap(&mut scratch.tail, &mut scratch.split);
                    continue;
                }
            }
            let ctx = Context { tables: tables.plane(i), symbols: &[] };
            let Scratch { planes, joined, carry, tail, .. } = &mut *scratch;
            let to = if layout == LayoutId::BYTES {
                &mut sized(&mut planes[0], dst.len())[i * sizes[i]..(i + 1) * sizes[i]]
            } else {
                sized(&mut planes[i], sizes[i])
            };
            let bytes = if tail.is_empty() {
                bytes
            } else {
                joined.clear();
                joined.extend_from_slice(bytes);
                joined.extend_from_slice(tail);
                joined.as_slice()
            };
            self.codecs
                .get(entry.codec)
                .and_then(|c| c.decode_carrying(entry.param, ctx, bytes, to, carry))
                .map_err(|e| e.in_stream(i))?;
        }
        if !scratch.carry.is_empty() {
            return Err(Error::corrupt("the last stream carries bytes of another")
                .in_stream(sizes.len() - 1));
        }
        self.merge(spec, &sizes, &stored, scratch, dst)
    }

    /// Merges planes: those that were stored raw are taken from the frame itself. Returns the CRC-32C
    /// of `dst` if that was at hand, and `dst` is values.
    fn merge(
        &self,
        spec: &TensorSpec<'_>,
        sizes: &[usize],
        stored: &[Stored<'_>; MAX_PLANES],
        scratch: &mut Scratch,
        dst: &mut [u8],
    ) -> Result<Option<u32>> {
        let (layout, width) = (spec.plan.layout, spec.dtype.value_width());
        let w = width_of(width)?;
        let k = &self.kernels;
        if layout == LayoutId::BYTES {
            let all = sized(&mut scratch.planes[0], dst.len());
            for (i, plane) in stored.iter().enumerate() {
                if let Some(plane) = plane.bytes() {
                    all[i * sizes[i]..(i + 1) * sizes[i]].copy_from_slice(plane);
                }
            }
            k.merge_bytes(w, all, dst);
            return Ok(None);
        }
        let plane = |i: usize| match (stored[i].bytes(), sizes.get(i)) {
            (Some(bytes), _) => bytes,
            (None, Some(&size)) => &scratch.planes[i][..size],
            (None, None) => &[],
        };
        match layout {
            LayoutId::FIELDS => {
                // The end of plane 1 may have been carried by the stream before it.
                let head = plane(1).len();
                let (e, e_tail) = plane(0).split_at(head);
                let (b, b_tail) = plane(2).split_at(head * (width - 2));
                let (to, to_tail) = dst.split_at_mut(head * width);
                if spec.plan.predictor != PredictorId::NONE {
                    k.merge_fields(w, e, plane(1), b, to);
                    k.merge_fields(w, e_tail, &scratch.split[..e_tail.len()], b_tail, to_tail);
                    return Ok(None);
                }
                let mut crc = k.merge_fields_crc(w, e, plane(1), b, to, 0);
                if !e_tail.is_empty() {
                    crc = k.merge_fields_crc(w, e_tail, &scratch.split, b_tail, to_tail, crc);
                }
                return Ok(Some(crc));
            }
            LayoutId::FIELDS_SIGN => {
                k.merge_fields_sign(w, plane(0), plane(1), plane(2), plane(3), dst);
            }
            LayoutId::TOKEN => k
                .merge_token(w, plane(0), plane(1), dst)
                .map_err(|e| Error::corrupt(e.to_string()).in_stream(0))?,
            _ => dst.copy_from_slice(plane(0)),
        }
        Ok(None)
    }
}

/// A chunk to be decoded.
#[derive(Clone, Copy)]
struct Coded<'a> {
    spec: &'a TensorSpec<'a>,
    chunk: u64,
    record: &'a ChunkRecord,
    frame: &'a [u8],
    /// Whether the destination holds the parent's values.
    over: bool,
}

/// Where a plane is after decoding.
#[derive(Clone, Copy)]
enum Stored<'a> {
    /// In the scratch memory.
    Decoded,
    /// In the frame.
    Frame(&'a [u8]),
    /// In the frame, and its end in [`Scratch::split`].
    FrameAndTail(&'a [u8]),
}

impl<'a> Stored<'a> {
    fn bytes(self) -> Option<&'a [u8]> {
        match self {
            Self::Decoded => None,
            Self::Frame(bytes) | Self::FrameAndTail(bytes) => Some(bytes),
        }
    }
}

/// Bytes of the raw bits that belong to tokens.
fn token_plane_len(width: usize, tokens: &[u8]) -> Result<usize> {
    let w = width_of(width)?;
    let mut bits = 0usize;
    for &t in tokens {
        let n = token_bits(w, t).ok_or_else(|| Error::corrupt(format!("token {t}")))?;
        bits += n as usize;
    }
    Ok(bits.div_ceil(8))
}
