//! nvCOMP: preset `nvcomp`, and closed streams of files that are trusted.
//!
//! Device tensors stay on their device: kernels split and merge them, and one call codes the planes
//! of many chunks ([`encode`], [`decode`]). For engines that work on the host, the CPU splits and
//! merges planes, and the GPU codes them.

mod decode;
mod encode;
mod layout;
mod library;

use std::sync::Arc;

use s4_codec_cpu::Codecs;
use s4_codec_gpu::nvcomp::{AnsMode, Host, HostDecoder, HostEncoder, ans, gdeflate};
use s4_format::CodecId;
use s4_format::manifest::ClosedCodec;

pub(super) use encode::LibraryQueue;
pub use library::Trusted;
pub(super) use library::{Library, codes, is_needed};

/// GDeflate's algorithm: the default, which finds short matches.
const ALGORITHM: u8 = 1;

/// A GPU with nvCOMP.
pub(crate) struct Gpu(Arc<Host>);

/// Opens the GPU and nvCOMP, or says what is missing.
pub(crate) fn open() -> Result<Gpu, String> {
    Host::open().map(Gpu).map_err(|e| e.to_string())
}

impl Gpu {
    /// The closed bitstreams that this library writes and reads.
    pub(crate) fn closed(&self) -> Vec<ClosedCodec> {
        self.0.closed()
    }

    /// Whether this library reads a closed bitstream; if not, why.
    pub(crate) fn reads(&self, closed: &ClosedCodec) -> Result<(), String> {
        match self.0.closed().iter().find(|c| c.codec == closed.codec) {
            Some(here) if here == closed => Ok(()),
            Some(here) => Err(format!("the installed version is {}", here.library_major)),
            None => Err("the installed version does not read it".into()),
        }
    }

    /// Adds a decoder. Only for checkpoints that the caller trusts, which is what makes this sound.
    pub(crate) fn with_reader(&self, codecs: Codecs, id: CodecId) -> Codecs {
        // SAFETY: the caller declared that a program that the caller trusts wrote the checkpoint.
        codecs.with(unsafe { HostDecoder::new(&self.0, id) })
    }

    /// Adds the encoders of preset `nvcomp`.
    pub(crate) fn with_writers(&self, codecs: Codecs) -> Codecs {
        let library = self.0.library();
        codecs
            .with(HostEncoder::new(&self.0, ans(library, AnsMode::Bytes)))
            .with(HostEncoder::new(&self.0, gdeflate(library, ALGORITHM)))
    }
}
