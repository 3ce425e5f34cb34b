//! Speed of `rans` on one core: 64K symbols, in cache, distributed like the exponents of bf16
//! weights.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use s4_codec_cpu::rans::Precision;
use s4_codec_cpu::{Codec, Context, Rans, Simd, Symbols, Workspace};

/// Symbols of a chunk.
const SYMBOLS: usize = 1 << 16;
/// How often exponents of weights of a GPT occur, of 1024, from 112 up to 125; others are rare.
const EXPONENTS: [u16; 14] = [2, 3, 6, 12, 23, 46, 90, 168, 258, 248, 123, 33, 9, 2];

fn exponents() -> Vec<u8> {
    let mut x = 1u64;
    let symbol = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut at = (x >> 54) as u16;
        for (i, &count) in EXPONENTS.iter().enumerate() {
            if at < count {
                return 112 + i as u8;
            }
            at -= count;
        }
        (x >> 32) as u8 % 112
    };
    std::iter::repeat_with(symbol).take(SYMBOLS).collect()
}

fn rans(c: &mut Criterion) {
    let symbols = exponents();
    for precision in [Precision::P8, Precision::P12] {
        let mut group = c.benchmark_group(format!("rans-{}", precision.bits()));
        group.throughput(Throughput::Elements(SYMBOLS as u64));
        for simd in Simd::available() {
            let codec = Rans::new(simd);
            let (ctx, mut work) = (Context::of(precision.bits() as u8), Workspace::default());
            let mut dst = vec![0; codec.bound(ctx.param, symbols.len())];
            let all = Symbols::new(&symbols, ctx);
            let mut encode = || codec.encode(&all, &mut dst, &mut work);
            group.bench_function(format!("encode/{simd}"), |b| b.iter(&mut encode));
            let encoded = encode().expect("these symbols can be encoded");
            let stream = &dst[..encoded.len];
            let mut out = vec![0; symbols.len()];
            let mut decode = || codec.decode(ctx, stream, &mut out, &mut work);
            group.bench_function(format!("decode/{simd}"), |b| b.iter(&mut decode));
        }
        group.finish();
    }
}

criterion_group!(benches, rans);
criterion_main!(benches);
