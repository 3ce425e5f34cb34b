//! The rANS codec on exponents, by precision and vector instructions.

use std::hint::black_box;

use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, measurement::WallTime};
use s4_benches::Sample;
use s4_codec_cpu::rans::{Precision, Rans};
use s4_codec_cpu::{Codec, Context, Symbols, Workspace};
use s4_planes::Simd;

fn exponents(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, symbols: &[u8], simd: Simd) {
    for precision in [Precision::P8, Precision::P12] {
        let rans = Rans::new(simd);
        let id =
            |verb: &str| BenchmarkId::new(format!("{name}/{verb}/{}-bit", precision.bits()), simd);
        let context = Context::of(precision.bits() as u8);
        let mut coded = vec![0; rans.bound(context.param, symbols.len())];
        let mut work = Workspace::default();
        group.bench_function(id("encode"), |b| {
            let symbols = Symbols::new(black_box(symbols), context);
            b.iter(|| rans.encode(black_box(&symbols), &mut coded, &mut work));
        });
        let encoded = rans.encode(&Symbols::new(symbols, context), &mut coded, &mut work);
        let encoded = encoded.expect("exponents are encodable");
        let (stream, mut back) = (&coded[..encoded.len], vec![0; symbols.len()]);
        rans.decode(context, stream, &mut back, &mut work).expect("they are decodable");
        assert!(back == symbols, "exponents came back different");
        group.bench_function(id("decode"), |b| {
            b.iter(|| rans.decode(context, black_box(stream), &mut back, &mut work));
        });
    }
}

fn main() {
    let mut criterion: Criterion = s4_benches::criterion().configure_from_args();
    let mut group = criterion.benchmark_group("rans-exponents");
    for sample in &Sample::all() {
        // There is one symbol for each element, but rates count the tensor's raw bytes.
        group.throughput(Throughput::Bytes(sample.data.len() as u64));
        let planes = sample.planes();
        for simd in Simd::available() {
            exponents(&mut group, sample.name, &planes.e, simd);
        }
    }
    group.finish();
    criterion.final_summary();
}
