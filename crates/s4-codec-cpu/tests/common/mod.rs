//! Data, an encoder and a decoder for the tests of `rans`.

use s4_codec_cpu::rans::{Precision, Tables};
use s4_codec_cpu::{Codec, Context, Rans, Simd, Workspace};

/// Pseudorandom numbers of 31 bits.
pub(crate) fn noise(len: usize, seed: u64) -> impl Iterator<Item = u64> {
    let mut x = seed;
    std::iter::repeat_with(move || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        x >> 33
    })
    .take(len)
}

/// Symbols around `middle`, each half as frequent as the one before, and one in `rarity` arbitrary.
pub(crate) fn skewed(len: usize, middle: u8, rarity: u64) -> Vec<u8> {
    let symbol = |x: u64| match x % rarity {
        0 => (x >> 20) as u8,
        _ => middle.wrapping_sub((x >> 16 & 0xfff | 1 << 12).trailing_zeros() as u8),
    };
    noise(len, 1 + u64::from(middle)).map(symbol).collect()
}

/// Encodes with given tables, contexts and carried bytes.
pub(crate) fn encode(
    simd: Simd,
    tables: Tables<'_>,
    contexts: &[u8],
    carry: &[u8],
    symbols: &[u8],
) -> Vec<u8> {
    let codec = Rans::new(simd);
    let param = tables.list[0].precision().bits() as u8;
    let mut dst = vec![0xa5; codec.bound(param, symbols.len())];
    let encoded = codec.encode_with(tables, contexts, carry, symbols, &mut dst).expect("codes");
    dst.truncate(encoded.len);
    dst
}

/// Decodes symbols and what the stream carries.
pub(crate) fn decode_carrying(
    simd: Simd,
    precision: Precision,
    ctx: Context<'_>,
    src: &[u8],
    len: usize,
) -> Option<(Vec<u8>, Vec<u8>)> {
    let (mut dst, mut carry) = (vec![0; len], vec![0x5a; 3]);
    let ctx = Context { param: precision.bits() as u8, ..ctx };
    let (codec, mut work) = (Rans::new(simd), Workspace::default());
    let outcome = codec.decode_carrying(ctx, src, &mut dst, &mut carry, &mut work);
    outcome.ok().map(|()| (dst, carry))
}
