//! Closed bitstreams: their readers and writers, and the errors where none is available.

use s4_codec_cpu::{Codec, Codecs, Context, Encoded, Symbols, Workspace, open_codecs};
use s4_format::manifest::ClosedCodec;
use s4_format::{CodecId, Error, Result};
use s4_planes::Simd;

use crate::{CpuEngine, Preset};

/// Advice appended to errors about closed codecs.
const WAY_OUT: &str = "or convert the file to open codecs with `s4w transcode --trusted` on a machine with a GPU \
                       and nvCOMP";

impl CpuEngine {
    /// An engine that reads a checkpoint whose manifest lists these closed bitstreams. Streams of open ones are
    /// decoded on the CPU as usual. Those of closed ones are decoded on a GPU by the vendor's library; where that is
    /// impossible, decoding one is an error of type `Unsupported` that says why.
    ///
    /// `trusted`: the caller knows that a program it trusts wrote the checkpoint. The library's
    /// decoders are not safe on other bytes: they may read and write any memory of the device, and
    /// checksums do not say who wrote a file. Without it no closed stream is decoded.
    pub fn reading(simd: Simd, closed: &[ClosedCodec], trusted: bool) -> Self {
        let mut codecs = open_codecs(simd);
        if !closed.is_empty() {
            codecs = with_readers(codecs, closed, trusted);
        }
        Self::with_codecs(simd, codecs)
    }

    /// An engine that writes with a preset, and the closed bitstreams that it may use. The manifest
    /// must list those that it did use.
    ///
    /// # Errors
    /// `Unsupported` if the preset needs a GPU or a library that is missing; the message says what to do.
    pub fn writing(simd: Simd, preset: Preset) -> Result<(Self, Vec<ClosedCodec>)> {
        let codecs = open_codecs(simd);
        let (codecs, closed) = match preset {
            Preset::Nvcomp => with_writers(codecs)?,
            _ => (codecs, vec![]),
        };
        Ok((Self::with_codecs(simd, codecs), closed))
    }
}

/// Refuses every stream of a bitstream, with a reason.
#[derive(Debug)]
struct Refuse {
    id: CodecId,
    why: Error,
}

impl Codec for Refuse {
    fn id(&self) -> CodecId {
        self.id
    }

    fn bound(&self, _: u8, _: usize) -> usize {
        0
    }

    fn encode(&self, _: &Symbols<'_>, _: &mut [u8], _: &mut Workspace) -> Result<Encoded> {
        Err(self.why.clone())
    }

    fn decode(&self, _: Context<'_>, _: &[u8], _: &mut [u8], _: &mut Workspace) -> Result<()> {
        Err(self.why.clone())
    }
}

fn refuse_all(
    codecs: Codecs,
    closed: &[ClosedCodec],
    why: impl Fn(&ClosedCodec) -> Error,
) -> Codecs {
    closed.iter().fold(codecs, |all, c| all.with(Refuse { id: c.codec, why: why(c) }))
}

fn with_readers(codecs: Codecs, closed: &[ClosedCodec], trusted: bool) -> Codecs {
    if !trusted {
        return refuse_all(codecs, closed, not_trusted);
    }
    match gpu::open() {
        Err(why) => refuse_all(codecs, closed, |c| not_here(c, &why)),
        Ok(gpu) => closed.iter().fold(codecs, |all, c| match gpu.reads(c) {
            Ok(()) => gpu.with_reader(all, c.codec),
            Err(why) => all.with(Refuse { id: c.codec, why: not_here(c, &why) }),
        }),
    }
}

fn with_writers(codecs: Codecs) -> Result<(Codecs, Vec<ClosedCodec>)> {
    let gpu = gpu::open().map_err(|why| {
        Error::unsupported(format!("preset `nvcomp` needs an NVIDIA GPU and {LIBRARY}: {why}"))
    })?;
    Ok((gpu.with_writers(codecs), gpu.closed()))
}

/// The library, and how to get it.
const LIBRARY: &str = "nvCOMP 6 (install nvidia-libnvcomp-cu12 or nvidia-libnvcomp-cu13, or set \
                       NVCOMP_LIBRARY to its file)";

fn not_trusted(c: &ClosedCodec) -> Error {
    Error::unsupported(format!(
        "closed codec `{}` (nvCOMP {}) is decoded only if the file is trusted, because the vendor's decoder is \
         not safe on data of unknown origin: if you know who wrote the file, read it with `trusted=True` (`s4w`: \
         `--trusted`), {WAY_OUT}",
        c.codec, c.library_major
    ))
}

fn not_here(c: &ClosedCodec, why: &str) -> Error {
    Error::unsupported(format!(
        "closed codec `{}` needs an NVIDIA GPU and nvCOMP {}: {why}; install what is missing, {WAY_OUT}",
        c.codec, c.library_major
    ))
}

#[cfg(feature = "cuda")]
use crate::cuda::nvcomp as gpu;

#[cfg(not(feature = "cuda"))]
mod gpu {
    use super::{ClosedCodec, CodecId, Codecs};

    /// Uninhabited: without CUDA there is no GPU.
    pub(super) enum Gpu {}

    pub(super) fn open() -> Result<Gpu, String> {
        Err("this program was built without CUDA".into())
    }

    impl Gpu {
        pub(super) fn closed(&self) -> Vec<ClosedCodec> {
            match *self {}
        }
        pub(super) fn reads(&self, _: &ClosedCodec) -> Result<(), String> {
            match *self {}
        }
        pub(super) fn with_reader(&self, _: Codecs, _: CodecId) -> Codecs {
            match *self {}
        }
        pub(super) fn with_writers(&self, _: Codecs) -> Codecs {
            match *self {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANS: ClosedCodec = ClosedCodec { codec: CodecId::NVCOMP_ANS, library_major: 6 };

    fn why(closed: &[ClosedCodec], trusted: bool, id: CodecId) -> String {
        let codecs = with_readers(open_codecs(Simd::detect()), closed, trusted);
        let mut work = Workspace::default();
        let decoded =
            codecs.get(id).and_then(|c| c.decode(Context::default(), &[], &mut [0], &mut work));
        let error = decoded.unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        error.to_string()
    }

    #[test]
    fn closed_streams_are_refused_by_name_and_with_a_way_out() {
        let text = why(&[ANS], false, ANS.codec);
        for part in
            ["nvcomp-ans", "nvCOMP 6", "trusted=True", "`s4w`: `--trusted`", "s4w transcode"]
        {
            assert!(text.contains(part), "{text}");
        }
        // A wrong version is refused where the library is installed, and named in the error where it is not.
        let other = ClosedCodec { library_major: 5, ..ANS };
        let text = why(&[other], true, ANS.codec);
        for part in ["nvcomp-ans", "nvCOMP 5", "s4w transcode"] {
            assert!(text.contains(part), "{text}");
        }
        // A codec that the manifest does not list is not decoded, trusted or not.
        let text = why(&[ANS], true, CodecId::NVCOMP_BITCOMP);
        assert!(text.contains("nvcomp-bitcomp") && text.contains("closed"), "{text}");
    }

    #[test]
    fn open_streams_are_read_beside_closed_ones() {
        let codecs = with_readers(open_codecs(Simd::detect()), &[ANS], false);
        let constant = codecs.get(CodecId::CONST).unwrap();
        let (ctx, mut work) = (Context::default(), Workspace::default());
        let mut stream = vec![0; constant.bound(0, 9)];
        let e = constant.encode(&Symbols::new(&[7; 9], ctx), &mut stream, &mut work).unwrap();
        let mut values = [0; 9];
        constant.decode(ctx, &stream[..e.len], &mut values, &mut work).unwrap();
        assert_eq!(values, [7; 9]);
    }

    #[test]
    fn the_preset_says_what_it_needs() {
        assert!(CpuEngine::writing(Simd::detect(), Preset::Fast).unwrap().1.is_empty());
        match CpuEngine::writing(Simd::detect(), Preset::Nvcomp) {
            Ok((_, closed)) => assert!(closed.contains(&ANS)),
            Err(e) => {
                let text = e.to_string();
                for part in ["preset `nvcomp`", "nvidia-libnvcomp-cu12", "NVCOMP_LIBRARY", "GPU"] {
                    assert!(text.contains(part), "{text}");
                }
            }
        }
    }
}
