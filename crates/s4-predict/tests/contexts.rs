//! A model of contexts on its way through an encoder and a decoder of several tables.

use s4_codec_cpu::rans::{Counts, Precision, write_tables};
use s4_codec_cpu::{Codec, Context, Encoded, Rans, Simd, Symbols, Workspace};
use s4_format::side::Side;
use s4_format::{DType, LayoutId, Result};
use s4_planes::Kernels;
use s4_predict::{ContextModel, Known, NoContexts, Tensor};

const TABLES: usize = 3;

/// The symbols of the second plane are as large as those of the first plane and of the input say.
#[derive(Debug)]
struct BySize;

impl ContextModel for BySize {
    fn tables(&self, _: LayoutId, plane: usize) -> usize {
        if plane == 1 { TABLES } else { 1 }
    }

    fn contexts(&self, known: &Known<'_>, out: &mut [u8]) -> Result<()> {
        for ((table, symbol), input) in out.iter_mut().zip(known.planes[0]).zip(known.inputs[0]) {
            *table = (symbol + input) % TABLES as u8;
        }
        Ok(())
    }
}

/// Bytes below `below` without a pattern.
fn noise(len: usize, seed: u64, below: u8) -> Vec<u8> {
    let mut x = seed;
    let next = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 56) as u8 % below
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// What is known of plane `planes.len()`.
fn contexts(model: &dyn ContextModel, planes: &[&[u8]], input: &[u8]) -> Vec<u8> {
    let side = Side::default();
    let tensor = Tensor { dtype: DType::UInt8, shape: &[input.len() as u64], side: &side };
    let layout = LayoutId::FIELDS;
    if model.tables(layout, planes.len()) == 1 {
        return vec![];
    }
    let mut out = vec![0; input.len()];
    let kernels = Kernels::default();
    let known = Known { kernels, tensor, first: 0, layout, planes, inputs: &[input] };
    model.contexts(&known, &mut out).expect("contexts");
    out
}

#[test]
fn a_model_chooses_among_tables_in_the_stream_and_shared_ones() {
    let n = 50_000;
    let (first, input) = (noise(n, 1, 20), noise(n, 2, 20));
    let (small, spread) = (noise(n, 3, 4), noise(n, 4, 6));
    let kind = |i: usize| (first[i] + input[i]) % TABLES as u8;
    let second: Vec<u8> = (0..n).map(|i| 60 * kind(i) + small[i] * spread[i] % 9).collect();
    let mut work = Workspace::default();
    for (precision, simd) in [Precision::P8, Precision::P12]
        .into_iter()
        .flat_map(|p| Simd::available().map(move |s| (p, s)))
    {
        let (rans, param) = (Rans::new(simd), precision.bits() as u8);
        // Shared tables, of which the stream uses as many as there are.
        let mut counts = vec![Counts::new(); TABLES];
        (0..n).for_each(|i| counts[usize::from(kind(i))].add_symbol(second[i], 1));
        let list: Vec<_> = counts.iter().map(|counts| counts.table(precision)).collect();
        let shared = write_tables(&list);
        let mut sizes = vec![];
        let cases: [(&[u8], &dyn ContextModel); 3] =
            [(&[], &NoContexts), (&[], &BySize), (&shared, &BySize)];
        for (tables, model) in cases {
            let planes: [&[u8]; 2] = [&first, &second];
            let streams: Vec<_> = (0..2)
                .map(|plane| {
                    let tables = if plane == 1 { tables } else { &[] };
                    let contexts = contexts(model, &planes[..plane], &input);
                    let ctx = Context { param, tables, contexts: &contexts };
                    let symbols = Symbols { own_tables: true, ..Symbols::new(planes[plane], ctx) };
                    let mut dst = vec![0; rans.bound(param, n)];
                    let Encoded { len, shared, .. } =
                        rans.encode(&symbols, &mut dst, &mut work).expect("encodes");
                    // The shared tables are the best that there are, and stand elsewhere.
                    assert_eq!(shared, !tables.is_empty());
                    dst.truncate(len);
                    dst
                })
                .collect();
            // The first plane is decoded, and the contexts of the second made from it.
            let mut decoded: Vec<Vec<u8>> = vec![];
            for stream in &streams {
                let known: Vec<&[u8]> = decoded.iter().map(Vec::as_slice).collect();
                let contexts = contexts(model, &known, &input);
                let tables = if known.is_empty() { &[] } else { tables };
                let ctx = Context { param, tables, contexts: &contexts };
                let mut dst = vec![0x5a; n];
                rans.decode(ctx, stream, &mut dst, &mut work).expect("decodes");
                decoded.push(dst);
            }
            assert!(decoded == planes, "{simd} {precision:?}");
            sizes.push(streams[1].len());
        }
        let [one, own, shared] = sizes[..] else { panic!("{sizes:?}") };
        assert!(own * 10 < one * 9, "contexts save a tenth at least: {sizes:?}");
        assert!(shared < own, "shared tables are not stored again: {sizes:?}");
    }
}
