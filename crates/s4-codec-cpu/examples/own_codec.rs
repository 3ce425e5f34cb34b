//! A codec of one's own: run lengths, under an id for private experiments.
//!
//! [`Runs`] is all that an embedder writes: a bitstream, its encoder and its decoder. The conformance suite
//! then holds it to the contract, and a registry makes it known to an engine
//! (`s4_engine::CpuEngine::with_codecs`).

use s4_codec_cpu::testing::{Side, conformance};
use s4_codec_cpu::{Codec, Context, Encoded, Simd, open_codecs};
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

    fn bound(&self, len: usize) -> usize {
        2 * len
    }

    fn encode(&self, _: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<Encoded> {
        if dst.len() < self.bound(src.len()) {
            return Err(Error::limit("a destination below the bound"));
        }
        let mut len = 0;
        for run in src.chunk_by(|a, b| a == b).flat_map(|run| run.chunks(255)) {
            dst[len] = run.len() as u8;
            dst[len + 1] = run[0];
            len += 2;
        }
        Ok(Encoded { len, param: 0 })
    }

    fn decode(&self, param: u8, _: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<()> {
        if param != 0 {
            return Err(Error::unsupported(format!("codec `runs` with parameter {param}")));
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
    conformance(&Runs, Side::NONE, |_| true);

    let codecs = open_codecs(Simd::detect()).with(Runs);
    let plane = [[7; 300].as_slice(), &[9; 20]].concat();
    let codec = codecs.get(RUNS)?;
    let mut stream = vec![0; codec.bound(plane.len())];
    let encoded = codec.encode(Context::default(), &plane, &mut stream)?;
    let mut back = vec![0; plane.len()];
    codec.decode(encoded.param, Context::default(), &stream[..encoded.len], &mut back)?;
    assert!(back == plane);
    println!("{} bytes became {}", plane.len(), encoded.len);
    Ok(())
}

#[test]
fn it_runs() -> Result<()> {
    main()
}
