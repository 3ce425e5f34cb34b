//! A custom codec: run lengths, under an id for private experiments.
//!
//! [`Runs`] is all that an embedder writes: a bitstream, its encoder and its decoder. The
//! conformance suite checks it against the contract, and options make it known to writers, readers
//! and stores.

use std::sync::Arc;

use s4weights::codec::testing::{StreamSetup, conformance};
use s4weights::codec::{Codec, Codecs, Context, Encoded, Symbols, Workspace};
use s4weights::format::{CodecId, Error, Result};
use s4weights::{
    DType, OwnCodecs, PlaneCoding, ReadOptions, Reader, TensorPlan, TensorSource, TensorValues,
    WriteOptions, Writer,
};

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

/// Bytes are planes of their own: all of them may be runs.
fn choose(tensor: &TensorValues<'_>, plan: &mut TensorPlan) {
    if tensor.dtype == DType::UInt8 {
        plan.code(0, PlaneCoding::new(RUNS, 0));
    }
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    // Round trips, small destinations, flipped and missing bytes: panics if the contract is broken.
    conformance(&Runs, StreamSetup::of(0), |_| true);

    let codecs = Codecs::empty().with(Runs);
    let own = OwnCodecs { codecs: codecs.clone(), choose: Some(Arc::new(choose)) };
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("masks.s4w");
    let masks: Vec<u8> = (0..100_000u32).map(|i| (i / 3000 % 2) as u8).collect();

    let mut writer =
        Writer::create(path.as_path().into(), WriteOptions { own, ..Default::default() })?;
    writer.write(&[TensorSource::new("masks", DType::UInt8, &[100, 1000], &masks)])?;
    let report = writer.finish(Default::default())?;
    println!("{} bytes became {}", report.bytes_in, report.bytes_out);

    let options = ReadOptions { codecs, ..Default::default() };
    let reader = Reader::open(path.as_path().into(), options)?;
    assert!(reader.read("masks")? == masks);

    // Other readers say what they lack.
    let stranger = Reader::open(path.as_path().into(), Default::default())?;
    let refused = stranger.read("masks").err().ok_or("it has no such codec")?;
    assert!(refused.to_string().contains("codec 240 is private to the program"), "{refused}");
    Ok(())
}

#[test]
fn it_runs() -> std::result::Result<(), Box<dyn std::error::Error>> {
    main()
}
