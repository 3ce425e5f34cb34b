//! A context model used by an encoder and a decoder with several tables.

use s4_codec_cpu::rans::{Counts, Precision, write_tables};
use s4_codec_cpu::{Codec, Context, Encoded, Rans, Simd, Symbols, Workspace};
use s4_format::side::{Side, SideKind};
use s4_format::{DType, Error, LayoutId, Result};
use s4_planes::Kernels;
use s4_predict::{ContextModel, Exponents, Known, NoContexts, Tensor};

const TABLES: usize = 3;

/// For a second plane whose symbols depend on the sum of those of the first plane and of the input.
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

/// Pseudorandom bytes below `below`.
fn noise(len: usize, seed: u64, below: u8) -> Vec<u8> {
    let mut x = seed;
    let next = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 56) as u8 % below
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// The contexts of plane `planes.len()`.
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
        // Shared tables, all of which the stream uses.
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
                    // The shared tables are the best possible and are not stored in the stream, so
                    // they are chosen.
                    assert_eq!(shared, !tables.is_empty());
                    dst.truncate(len);
                    dst
                })
                .collect();
            // The contexts of the second plane are computed from the decoded first plane.
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

/// The contexts of a plane's symbols, as specified.
fn specified(
    top: u64,
    shift: u32,
    width: usize,
    input: &[u8],
    exponents: Option<&[u8]>,
) -> Vec<u8> {
    let each = input.chunks(width).enumerate().map(|(i, value)| {
        let p = value.iter().rev().fold(0u64, |all, b| all << 8 | u64::from(*b));
        let class = (top.saturating_sub((p >> (8 * width - 9)) & 255) >> shift).min(7) as u8;
        match exponents.map(|e| e[i]) {
            None | Some(0) => class,
            Some(1) => 8,
            Some(_) => 9,
        }
    });
    each.collect()
}

#[test]
fn exponents_tell_contexts_as_specified() {
    let n = 3000;
    for (dtype, width) in [(DType::BFloat16, 2), (DType::Float32, 4), (DType::Float64, 8)] {
        let input = noise(n * width, 7, 255);
        let planes = [noise(n, 8, 4), noise(n, 9, 200), noise(n, 10, 200)];
        for (layout, first) in [(LayoutId::FIELDS, 0), (LayoutId::FIELDS_SIGN, 1)] {
            for (top, shift) in [(0u8, 0u8), (127, 0), (255, 3), (130, 7)] {
                let mut side = Side::default();
                side.push(SideKind::CONTEXTS, vec![top, shift, 0, 0, 0, 0, 0, 0]).expect("side");
                let tensor = Tensor { dtype, shape: &[n as u64], side: &side };
                for simd in Simd::available() {
                    let kernels = Kernels::new(simd);
                    for plane in 0..3 {
                        let known: Vec<&[u8]> = planes[..plane].iter().map(Vec::as_slice).collect();
                        let inputs = [&input[..]];
                        let known = Known {
                            kernels,
                            tensor,
                            first: 0,
                            layout,
                            planes: &known,
                            inputs: &inputs,
                        };
                        let tables = [8, 10].into_iter().nth(plane.wrapping_sub(first));
                        assert_eq!(Exponents.tables(layout, plane), tables.unwrap_or(1));
                        if tables.is_none() {
                            continue;
                        }
                        let mut out = vec![0x5a; n];
                        Exponents.contexts(&known, &mut out).expect("contexts");
                        let next = (plane > first).then_some(&planes[first][..]);
                        let (top, shift) = (u64::from(top), u32::from(shift));
                        assert_eq!(out, specified(top, shift, width, &input, next));
                        assert!(Exponents.contexts(&known, &mut out[1..]).is_err());
                    }
                }
            }
        }
    }
}

#[test]
fn hostile_side_data_of_contexts_is_refused() {
    for bad in [&[][..], &[1], &[1, 8, 0, 0, 0, 0, 0, 0], &[1, 0, 0, 0, 0, 0, 0, 1], &[0; 9]] {
        let mut side = Side::default();
        side.push(SideKind::CONTEXTS, bad.to_vec()).expect("side");
        let tensor = Tensor { dtype: DType::BFloat16, shape: &[4], side: &side };
        let (kernels, layout) = (Kernels::default(), LayoutId::FIELDS);
        let known = Known { kernels, tensor, first: 0, layout, planes: &[], inputs: &[&[0; 8]] };
        let error = Exponents.contexts(&known, &mut [0; 4]).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }
}
