//! Every rANS kernel on the same bytes.

use s4_codec_cpu::rans::{Counts, Precision, Rans, Table, TablePlace, Tables, parse_tables};
use s4_codec_cpu::testing::decode_carrying;
use s4_codec_cpu::{Codec, Context, Simd, Symbols, Workspace};

use crate::input::{Input, expand, sets};
use crate::memory::bounded;

/// Most contexts of a stream.
const CONTEXTS: usize = 16;

/// Decodes arbitrary bytes: all kernels give the same symbols and the same carried bytes, or all
/// refuse.
pub fn rans(data: &[u8]) {
    let mut input = Input::new(data);
    let (param, flags, len) = (input.pick(&[8, 12]), input.u8(), input.len());
    let shared = if flags & 1 == 1 { usize::from(input.u16()) % 4096 } else { 0 };
    let contexts = if flags & 2 == 2 { 1 + input.below(CONTEXTS) } else { 0 };
    let tables = input.take(shared);
    let contexts: Vec<u8> = if contexts == 0 {
        vec![]
    } else {
        (0..len).map(|i| ((i * 7 + i / 300) % contexts) as u8).collect()
    };
    let stream = input.rest();
    let ctx = Context { param, tables, contexts: &contexts };
    let run = |simd| {
        let codec = Rans::new(simd);
        bounded(stream.len(), 4 * len, || decode_carrying(&codec, ctx, stream, len).ok())
    };
    let expected = run(Simd::Scalar);
    for simd in sets() {
        assert!(run(simd) == expected, "{simd} decodes otherwise");
    }
}

/// Encodes arbitrary symbols with arbitrary tables: all kernels write the same bytes, which decode
/// to the symbols.
pub fn rans_encode(data: &[u8]) {
    let mut input = Input::new(data);
    let (flags, len) = (input.u8(), input.len());
    let precision = if flags & 1 == 0 { Precision::P8 } else { Precision::P12 };
    let (param, long, shared) = (precision.bits() as u8, flags & 2 == 2, flags & 4 == 4);
    let (given, carries, own) = (flags & 8 == 8, flags & 16 == 16, flags & 32 == 32);
    let given = if given { usize::from(input.u16()) % 2048 } else { 0 };
    let table_bytes = input.take(given);
    let symbols = expand(input.rest(), len);
    let table = match Table::parse(precision, table_bytes) {
        Ok((table, _)) => table,
        Err(_) => Counts::of_stream(&symbols).partial().table(precision),
    };
    let list = [table];
    let side = s4_codec_cpu::rans::write_tables(&list);
    assert!(parse_tables(precision, &side).is_ok_and(|back| back == list), "tables");
    let place = if shared { TablePlace::Shared } else { TablePlace::Inline };
    let tables: &[u8] = if shared { &side } else { &[] };
    let ctx = Context { param, tables, contexts: &[] };
    let run = |simd| {
        let rans = Rans::new(simd);
        let rans = if long { rans.with_long_segments() } else { rans };
        let carry = expand(&[4, 1, 2, 3], if carries { rans.carry_len(len) } else { 0 });
        let mut dst = vec![0xa5; rans.bound(param, len) + 64];
        let done = if own {
            rans.encode(&Symbols::new(&symbols, ctx), &mut dst, &mut Workspace::default())
        } else {
            rans.encode_with(Tables { list: &list, place }, &[], &carry, &symbols, &mut dst)
        };
        let carry = if own { vec![] } else { carry };
        done.ok().map(|e| (dst[..e.len].to_vec(), carry))
    };
    let expected = run(Simd::Scalar);
    for simd in sets() {
        let got = run(simd);
        assert!(got == expected, "{simd} encodes otherwise");
        let Some((stream, carry)) = got else { continue };
        let back = decode_carrying(&Rans::new(simd), ctx, &stream, len);
        assert!(back == Ok((symbols.clone(), carry)), "{simd} does not decode what was encoded");
    }
}
