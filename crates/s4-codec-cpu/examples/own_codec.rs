//! A custom codec: run lengths, under an id for private experiments.
//!
//! [`Runs`] is all that an embedder writes: a bitstream, its encoder and its decoder. The
//! conformance suite checks it against the contract, and a registry makes it known to an engine
//! (`s4_engine::CpuEngine::with_codecs`).

use s4_codec_cpu::testing::{Side, conformance};
use s4_codec_cpu::{Codec, Context, Encoded, Simd, Symbols, Workspace, open_codecs};
use s4_format::{CodecId, Error, Result};

/// 240 and above are never assigned by the format: no other reader decodes them.
const RUNS: CodecId = CodecId(240);

/// Pairs of bytes: how often a byte occurs in a row, 1 to 255, and the byte.
#[derive(Debug, Clone, Copy)]
struct Runs;

impl Codec for Runs {
    fn id(&self) -> CodecId {
        RUNS
    }

    fn bound(&self, _: u8, len: usize) -> usize {
        2 * len
    }

    fn encode(&self, symbols: &Symbols<'_>, dst: &mut [u8], _: &mut Workspace) -> Result<Encoded> {
        let src = symbols.bytes;
        if dst.len() < self.bound(0, src.len()) {
            return Err(Error::limit("a destination below the bound"));
        }
        let mut len = 0;
        for run in src.chunk_by(|a, b| a == b).flat_map(|run| run.chunks(255)) {
            dst[len] = run.len() as u8;
            dst[len + 1] = run[0];
            len += 2;
        }
        Ok(Encoded::of(len))
    }

    fn decode(
        &self,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        _: &mut Workspace,
    ) -> Result<()> {
        if ctx.param != 0 {
            return Err(Error::unsupported(format!("codec `runs` with parameter {}", ctx.param)));
        }
        let (pairs, rest) = src.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(Error::truncated("half a run"));
        }
        let mut free = dst;
        for &[count, byte] in pairs {
            // A stream may hold anything: no length is used before it is compared with what is left.
            let run = free.split_off_mut(..usize::from(count));
            let run = run.ok_or_else(|| Error::corrupt("a run beyond the end of the plane"))?;
            if run.is_empty() {
                return Err(Error::corrupt("a run of length 0"));
            }
            run.fill(byte);
        }
        if !free.is_empty() {
            return Err(Error::truncated("runs that do not fill the plane"));
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    // Round trips, small destinations, flipped and missing bytes: panics if the contract is broken.
    conformance(&Runs, Side::of(0), |_| true);

    let codecs = open_codecs(Simd::detect()).with(Runs);
    let plane = [[7; 300].as_slice(), &[9; 20]].concat();
    let codec = codecs.get(RUNS)?;
    let (ctx, mut work) = (Context::default(), Workspace::default());
    let mut stream = vec![0; codec.bound(ctx.param, plane.len())];
    let encoded = codec.encode(&Symbols::new(&plane, ctx), &mut stream, &mut work)?;
    let mut back = vec![0; plane.len()];
    codec.decode(ctx, &stream[..encoded.len], &mut back, &mut work)?;
    assert!(back == plane);
    println!("{} bytes became {}", plane.len(), encoded.len);
    Ok(())
}

#[test]
fn it_runs() -> Result<()> {
    main()
}
