//! Decodes a chunk's stored bytes into values: decode streams, merge planes, undo the prediction.

use s4_codec_cpu::Context;
use s4_format::layout::{MAX_PLANES, Planes};
use s4_format::side::{Side, SideKind};
use s4_format::{
    ChunkRecord, CodecId, DType, Error, LayoutId, Plan, Result, StreamEntry, StreamList, crc32c,
};
use s4_predict::Tensor;

use crate::planes::{Layout, Stored, token_plane_len};
use crate::predict::{InputValues, Prediction};
use crate::scratch::sized;
use crate::tables::SharedTables;
use crate::{CpuEngine, Scratch};

/// The properties of a tensor that decoding its chunks needs.
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

/// A chunk to decode.
#[derive(Debug, Clone, Copy)]
pub struct DecodeJob<'a> {
    /// The properties of its tensor.
    pub spec: &'a TensorSpec<'a>,
    /// Index of the chunk.
    pub chunk: u64,
    /// Its record: what the frame and the values are checked against.
    pub record: &'a ChunkRecord,
    /// Its bytes.
    pub frame: &'a [u8],
    /// The values of the plan's inputs for this chunk, in the order of the plan. Not read for a
    /// plain chunk or a plan without a prediction.
    pub inputs: &'a [InputValues<'a>],
}

/// Data that decoding needs besides the streams themselves.
#[derive(Clone, Copy)]
struct Given<'a> {
    prediction: Option<&'a Prediction<'a>>,
    inputs: &'a [&'a [u8]],
}

impl CpuEngine {
    /// Decodes a chunk into `dst`, which has the size of the chunk's values. Checks the frame
    /// before decoding and the values after it against the checksums of the record.
    ///
    /// # Errors
    /// `Corrupt`, `Truncated` or `Unsupported`, naming chunk and stream; `dst` is then unspecified.
    pub fn decode(&self, job: &DecodeJob<'_>, scratch: &mut Scratch, dst: &mut [u8]) -> Result<()> {
        self.decode_checked(job, scratch, dst).map_err(|e| e.in_chunk(job.chunk))
    }

    fn decode_checked(
        &self,
        job: &DecodeJob<'_>,
        scratch: &mut Scratch,
        dst: &mut [u8],
    ) -> Result<()> {
        let DecodeJob { spec, record, frame, .. } = *job;
        let stored = || Error::corrupt("checksum mismatch in the stored bytes");
        if frame.len() != record.len as usize {
            let what =
                format!("frame has {} bytes, but its record says {}", frame.len(), record.len);
            return Err(Error::corrupt(what));
        }
        // The checksum of the values, once it is known.
        let mut crc = None;
        if record.plain {
            if frame.len() != dst.len() {
                return Err(Error::corrupt(format!(
                    "plain chunk has {} bytes, expected {}",
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
                let what =
                    format!("{} bytes are not a multiple of the value size {width}", dst.len());
                return Err(Error::corrupt(what));
            }
            let planes = Planes::new(spec.plan.layout, width, dst.len() / width)?;
            let streams = StreamEntry::parse_chunk(frame, planes.sizes().len())?;
            if streams.crc() != record.crc_encoded {
                return Err(stored());
            }
            crc = self.decode_predicted(job, &streams, scratch, dst)?;
        }
        if crc.unwrap_or_else(|| crc32c(dst)) != record.crc_raw {
            return Err(Error::corrupt("checksum mismatch in the decoded values"));
        }
        Ok(())
    }

    /// Decodes streams and undoes the prediction; returns the CRC-32C of `dst` if it was computed
    /// on the way.
    fn decode_predicted(
        &self,
        job: &DecodeJob<'_>,
        streams: &StreamList<'_>,
        scratch: &mut Scratch,
        dst: &mut [u8],
    ) -> Result<Option<u32>> {
        let DecodeJob { spec, inputs, .. } = *job;
        let tensor = Tensor { dtype: spec.dtype, shape: spec.shape, side: spec.side };
        let first = job.chunk << spec.chunk_log2;
        let Some(prediction) = self.prediction(spec.plan, tensor, first)? else {
            let nothing = Given { prediction: None, inputs: &[] };
            return self.decode_streams(spec, nothing, streams, scratch, dst);
        };
        prediction.check_inputs(dst.len(), inputs)?;
        let (prediction, len) = (&prediction, dst.len());
        if !inputs.iter().any(InputValues::is_destination) {
            let parts = &prediction.parts(inputs, 0, &[], len)[..inputs.len()];
            let given = Given { prediction: Some(prediction), inputs: parts };
            self.decode_streams(spec, given, streams, scratch, dst)?;
            prediction.restore(inputs, &mut scratch.predicted, dst)?;
            return Ok(None);
        }
        // The destination holds an input that is still needed, so the residuals go elsewhere.
        let mut residuals = std::mem::take(&mut scratch.residuals);
        let to = sized(&mut residuals, len);
        let parts = &prediction.parts(inputs, 0, dst, len)[..inputs.len()];
        let given = Given { prediction: Some(prediction), inputs: parts };
        let done = self.decode_streams(spec, given, streams, scratch, to);
        let done =
            done.and_then(|_| prediction.restore_over(inputs, &mut scratch.predicted, to, dst));
        scratch.residuals = residuals;
        done.map(|()| None)
    }

    /// Decodes streams and merges their planes. Returns the CRC-32C of `dst` if it was computed on
    /// the way and `dst` holds values, not residuals.
    fn decode_streams(
        &self,
        spec: &TensorSpec<'_>,
        given: Given<'_>,
        streams: &StreamList<'_>,
        scratch: &mut Scratch,
        dst: &mut [u8],
    ) -> Result<Option<u32>> {
        let width = spec.dtype.value_width();
        let layout = spec.plan.layout;
        let split = Layout::new(self.kernels, layout, width)?;
        let planes = split.planes(dst.len())?;
        let mut sizes = [0; MAX_PLANES];
        let sizes = &mut sizes[..planes.sizes().len()];
        sizes.copy_from_slice(planes.sizes());
        let tables = SharedTables::parse(spec.side.get(SideKind::TABLES))?;
        let mut stored = [Stored::Decoded; MAX_PLANES];
        let has_contexts = |i| given.prediction.is_some_and(|p| p.has_contexts(layout, i));
        scratch.carry.clear();
        scratch.contexts.clear();
        for (i, (entry, bytes)) in streams.items().iter().enumerate() {
            // The tokens of the first plane of `token` determine the length of the second.
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
                // The kernels of this layout take plane 1 in two pieces, but contexts need it whole.
                let split = layout == LayoutId::FIELDS && i == 1 && !has_contexts(i + 1);
                if scratch.tail.is_empty() {
                    stored[i] = Stored::Frame(bytes);
                    continue;
                } else if split {
                    stored[i] = Stored::FrameAndTail(bytes);
                    std::mem::swap(&mut scratch.tail, &mut scratch.split);
                    continue;
                }
            }
            let mut contexts = std::mem::take(&mut scratch.contexts);
            let several = entry.codec == CodecId::RANS && has_contexts(i);
            if several {
                given.contexts(layout, sizes, &stored[..i], scratch, sizes[i], &mut contexts)?;
            }
            let Scratch { planes, joined, carry, tail, work, .. } = &mut *scratch;
            let contexts_of = if several { &contexts[..] } else { &[] };
            let ctx =
                Context { param: entry.param, tables: tables.plane(i), contexts: contexts_of };
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
                .and_then(|c| c.decode_carrying(ctx, bytes, to, carry, work))
                .map_err(|e| e.in_stream(i))?;
            scratch.contexts = contexts;
        }
        if !scratch.carry.is_empty() {
            return Err(Error::corrupt("the last stream carries bytes of another stream")
                .in_stream(sizes.len() - 1));
        }
        split.merge(sizes, &stored, given.prediction.is_none(), scratch, dst)
    }
}

impl Given<'_> {
    /// The contexts of the `len` symbols of a plane with several tables, from the planes before it.
    fn contexts(
        &self,
        layout: LayoutId,
        sizes: &[usize],
        before: &[Stored<'_>],
        scratch: &Scratch,
        len: usize,
        to: &mut Vec<u8>,
    ) -> Result<()> {
        let Some(prediction) = self.prediction else { return Ok(()) };
        let mut planes = [&[][..]; MAX_PLANES];
        for (j, (plane, stored)) in planes.iter_mut().zip(before).enumerate() {
            *plane = stored.bytes().unwrap_or_else(|| scratch.plane(layout, sizes, j));
        }
        prediction.contexts(layout, &planes[..before.len()], self.inputs, len, to)
    }
}
