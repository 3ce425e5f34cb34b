//! Decoders of single streams, given arbitrary bytes.

use s4_codec_cpu::testing::decode;
use s4_codec_cpu::{
    Bits, Codec, Const, Context, Deflate, Gdeflate, Lz4, Raw, Simd, Snappy, Zstd, blocks,
};

use crate::input::Input;
use crate::memory::bounded;

/// Decodes a stream: its parameter, the length of its plane, its bytes. The outcome does not depend on
/// what memory held before.
fn decode_any(codec: &dyn Codec, input: &mut Input<'_>) {
    let (param, len) = (input.u8(), input.len());
    let stream = input.rest();
    // Two buffers exist at a time.
    bounded(stream.len(), 2 * len, || _ = decode(codec, Context::of(param), stream, len));
}

/// Codec `bits`, whose kernels must agree.
pub fn bits(data: &[u8]) {
    let mut input = Input::new(data);
    let (param, len) = (input.u8(), input.len());
    let stream = input.rest();
    let run = |simd| decode(&Bits::new(simd), Context::of(param), stream, len).ok();
    let expected = run(Simd::Scalar);
    for simd in crate::input::sets() {
        assert!(run(simd) == expected, "{simd} decodes otherwise");
    }
}

/// Codecs `raw` and `const`, and the table of a stream of blocks.
pub fn stored(data: &[u8]) {
    let mut input = Input::new(data);
    match input.below(3) {
        0 => decode_any(&Raw, &mut input),
        1 => decode_any(&Const, &mut input),
        _ => {
            let (len, block) = (input.len(), 1 + usize::from(input.u16()));
            let stream = input.rest();
            let parsed = bounded(stream.len(), 0, || blocks::Blocks::parse(stream, len, block));
            let Ok(parsed) = parsed else { return };
            let mut plane = 0;
            for b in parsed.iter() {
                assert!(!stream[b.stored].is_empty() && b.plane.start == plane);
                plane = b.plane.end;
            }
            assert_eq!(plane, len);
        }
    }
}

/// Codec `gdeflate`.
pub fn gdeflate(data: &[u8]) {
    decode_any(&Gdeflate::default(), &mut Input::new(data));
}

/// Codec `deflate`.
pub fn deflate(data: &[u8]) {
    decode_any(&Deflate::default(), &mut Input::new(data));
}

/// Codec `zstd`.
pub fn zstd(data: &[u8]) {
    decode_any(&Zstd::default(), &mut Input::new(data));
}

/// Codec `lz4`.
pub fn lz4(data: &[u8]) {
    decode_any(&Lz4, &mut Input::new(data));
}

/// Codec `snappy`.
pub fn snappy(data: &[u8]) {
    decode_any(&Snappy, &mut Input::new(data));
}
