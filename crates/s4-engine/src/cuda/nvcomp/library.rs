//! The library's codecs, by the names that plans and frames use for them.

use std::sync::Arc;

use s4_codec_gpu::nvcomp::{AnsMode, GpuCodec, Needs, Nvcomp, Shape, ans, gdeflate, open, reader};
use s4_codec_gpu::{Cuda, Device};
use s4_format::manifest::ClosedCodec;
use s4_format::{CodecId, Error, Result};

use super::ALGORITHM;
use crate::{PlaneCoding, TensorPlan};

/// Alignment of what a library reads and writes: blocks of a stream start at multiples of it.
const ALIGN: usize = s4_format::limits::ALIGN;

/// nvCOMP, for work in device memory.
#[derive(Debug)]
pub(in crate::cuda) struct Library {
    nvcomp: Arc<Nvcomp>,
    /// In the order of [`CODINGS`].
    writers: [Box<dyn GpuCodec>; WRITERS],
}

/// The library that decodes the blocks of a trusted checkpoint, and the closed codecs that the checkpoint lists.
#[derive(Debug, Clone)]
pub struct Trusted {
    pub(in crate::cuda) library: Arc<Library>,
    pub(in crate::cuda) closed: Vec<ClosedCodec>,
}

/// Codings of planes that the library writes.
const CODINGS: [PlaneCoding; WRITERS] = [PlaneCoding::GDEFLATE, PlaneCoding::NVCOMP_ANS];

/// Number of codings that the library writes.
pub(super) const WRITERS: usize = 2;

impl Library {
    /// Opens nvCOMP.
    ///
    /// # Errors
    /// `Unsupported` if it is not there or does not fit the driver.
    pub(in crate::cuda) fn open(cuda: &Cuda) -> Result<Self> {
        let nvcomp = open(cuda).map_err(|e| Error::unsupported(e.to_string()))?;
        let writers: [Box<dyn GpuCodec>; WRITERS] =
            [Box::new(gdeflate(&nvcomp, ALGORITHM)), Box::new(ans(&nvcomp, AnsMode::Bytes))];
        Ok(Self { nvcomp, writers })
    }

    /// The index of the codec that codes a plane; `None`: it is stored raw.
    pub(super) fn number(coding: PlaneCoding) -> Option<usize> {
        CODINGS.iter().position(|c| *c == coding)
    }

    pub(super) fn writer(&self, number: usize) -> &dyn GpuCodec {
        &*self.writers[number]
    }

    /// The codec that decodes streams of a bitstream, if there is one and, for a closed bitstream, it is listed.
    pub(super) fn reader(
        &self,
        closed: &[ClosedCodec],
        id: CodecId,
        param: u8,
    ) -> Option<Box<dyn GpuCodec>> {
        let codec = reader(&self.nvcomp, id, param).ok()?;
        codec.closed().is_none_or(|c| closed.contains(&c)).then_some(codec)
    }

    /// Whether the library reads all of these closed bitstreams.
    pub(in crate::cuda) fn reads(&self, closed: &[ClosedCodec]) -> bool {
        let library_major = self.nvcomp.version().major;
        closed.iter().all(|c| c.library_major == library_major)
    }
}

/// Whether the library codes some of a plan's planes, and all others are stored raw.
pub(in crate::cuda) fn codes(plan: &TensorPlan) -> bool {
    let known = |p: &PlaneCoding| *p == PlaneCoding::RAW || Library::number(*p).is_some();
    plan.planes.iter().all(known) && plan.planes.iter().any(|p| Library::number(*p).is_some())
}

/// Whether only the library can code a plan's planes.
pub(in crate::cuda) fn is_needed(plan: &TensorPlan) -> bool {
    plan.planes.contains(&PlaneCoding::NVCOMP_ANS)
}

/// The scratch memory and alignments that encoding a batch needs, and the room for each block's output.
pub(super) fn encode_needs(
    codec: &dyn GpuCodec,
    device: &Device,
    shape: Shape,
    stream: u64,
) -> Result<(Needs, usize)> {
    let _current = device.enter().map_err(|e| Error::unsupported(e.to_string()))?;
    let needs = codec.encode_needs(shape, stream)?;
    fits(codec, &needs)?;
    Ok((needs, codec.bound(shape.max_block)?.next_multiple_of(ALIGN)))
}

/// Scratch memory that decoding a batch needs.
pub(super) fn decode_scratch(
    codec: &dyn GpuCodec,
    device: &Device,
    shape: Shape,
    stream: u64,
) -> Result<usize> {
    let _current = device.enter().map_err(|e| Error::unsupported(e.to_string()))?;
    let needs = codec.decode_needs(shape, stream)?;
    fits(codec, &needs)?;
    Ok(needs.scratch)
}

/// Checks that memory at multiples of [`ALIGN`] will do.
fn fits(codec: &dyn GpuCodec, needs: &Needs) -> Result<()> {
    match needs.fit(ALIGN) {
        true => Ok(()),
        false => Err(Error::unsupported(format!(
            "codec `{}` needs unsupported alignments: {:?}",
            codec.id(),
            needs.alignments
        ))),
    }
}
