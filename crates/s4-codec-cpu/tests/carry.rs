//! `rans` streams that carry the end of the next stream.

use proptest::prelude::*;
use s4_codec_cpu::rans::{Counts, Precision, Table, TablePlace, Tables, write_tables};
use s4_codec_cpu::{Codec, Context, Rans, Simd, Workspace};
use s4_format::Error;

mod common;
use common::{decode_carrying, encode, noise, skewed};

/// Bytes that a stream of `len` symbols carries.
fn carry(len: usize, seed: u64) -> Vec<u8> {
    let bytes = 64 * len.div_ceil(16_384);
    noise(bytes, seed).map(|x| (x >> 7) as u8).collect()
}

/// Encodes with every set of instructions, compares with plain Rust, decodes with every set, and
/// checks that a decoder without a place for the carry refuses the stream.
fn check(tables: Tables<'_>, contexts: &[u8], carry: &[u8], symbols: &[u8]) -> Vec<u8> {
    let oracle = encode(Simd::Scalar, tables, contexts, carry, symbols);
    let shared = match tables.place {
        TablePlace::Shared => write_tables(tables.list),
        TablePlace::Inline => Vec::new(),
    };
    let precision = tables.list[0].precision();
    let ctx = Context { param: precision.bits() as u8, tables: &shared, contexts };
    let len = symbols.len();
    for simd in Simd::available() {
        let stream = encode(simd, tables, contexts, carry, symbols);
        assert!(stream == oracle, "{simd} writes {len} symbols differently");
        let (decoded, carried) =
            decode_carrying(simd, precision, ctx, &stream, len).expect("decodes");
        assert!(decoded == symbols, "{simd} reads {len} symbols differently");
        assert!(carried == carry, "{simd}: {len} symbols carry something else");
        let (mut dst, mut work) = (vec![0; len], Workspace::default());
        let alone = Rans::new(simd).decode(ctx, &stream, &mut dst, &mut work);
        assert!(matches!(alone, Err(Error::Unsupported { .. })), "{simd}: {alone:?}");
    }
    oracle
}

fn own_table(precision: Precision, symbols: &[u8]) -> [Table; 1] {
    [Counts::of_stream(symbols).table(precision)]
}

#[test]
fn what_is_carried_comes_back_at_its_cost() {
    for precision in [Precision::P8, Precision::P12] {
        let (mut segments, mut plain_len, mut carrying_len) = (0, 0, 0);
        for count in 1..=9 {
            // Whole segments and blocks, and parts of them.
            for len in [count * 16_384, count * 16_384 - 16_383, count * 16_384 - 5000] {
                // Escapes in every block, in some, and in nearly none.
                for rarity in [4, 100, 100_000] {
                    let symbols = skewed(len, 125, rarity);
                    let list = own_table(precision, &symbols);
                    let tables = Tables { list: &list, place: TablePlace::Inline };
                    let carry = carry(len, (count as u64) << 32 | rarity);
                    carrying_len += check(tables, &[], &carry, &symbols).len();
                    plain_len += encode(Simd::detect(), tables, &[], &[], &symbols).len();
                    segments += count;
                }
            }
        }
        // A state that starts at 2^16 + w is log2(1 + w / 2^16) bits larger: 0.557 on average.
        let cost = (carrying_len - plain_len) as f64 / segments as f64;
        assert!((1.5..3.0).contains(&cost), "{cost} bytes a segment, 2.23 expected");
    }
}

#[test]
fn the_smallest_and_the_largest_words_are_carried() {
    for precision in [Precision::P8, Precision::P12] {
        let symbols = skewed(40_000, 125, 50);
        let list = own_table(precision, &symbols);
        let tables = Tables { list: &list, place: TablePlace::Inline };
        check(tables, &[], &[0xff; 192], &symbols);
        // A carry of zeros changes only the flag: without it the stream carries nothing.
        let mut zeros = check(tables, &[], &[0; 192], &symbols);
        assert_eq!(zeros[7], 2);
        zeros[7] = 0;
        assert_eq!(zeros, encode(Simd::Scalar, tables, &[], &[], &symbols));
        // With any other carry, a stream without the flag is refused.
        let mut one = [0; 192];
        one[191] = 1;
        let mut one = check(tables, &[], &one, &symbols);
        one[7] = 0;
        for simd in Simd::available() {
            let ctx = Context::of(precision.bits() as u8);
            let mut work = Workspace::default();
            let outcome = Rans::new(simd).decode(ctx, &one, &mut [0; 40_000], &mut work);
            assert!(matches!(outcome, Err(Error::Corrupt { .. })), "{simd}: {outcome:?}");
        }
    }
}

#[test]
fn streams_with_contexts_carry() {
    for precision in [Precision::P8, Precision::P12] {
        for len in [1, 300, 16_384, 50_001] {
            let contexts: Vec<u8> = noise(len, 9).map(|x| (x % 4) as u8).collect();
            let streams: Vec<_> = (0..4).map(|c| skewed(len, 30 + 50 * c, 40)).collect();
            let symbols: Vec<u8> =
                contexts.iter().enumerate().map(|(i, &c)| streams[usize::from(c)][i]).collect();
            let table = |stream: &Vec<u8>| Counts::of_stream(stream).partial().table(precision);
            let list: Vec<_> = streams.iter().map(table).collect();
            for place in [TablePlace::Inline, TablePlace::Shared] {
                check(Tables { list: &list, place }, &contexts, &carry(len, 3), &symbols);
            }
        }
    }
}

#[test]
fn streams_of_nothing_but_escapes_carry() {
    for precision in [Precision::P8, Precision::P12] {
        let list = [Table::new(precision, &[]).expect("a valid table")];
        let symbols: Vec<u8> = noise(20_000, 8).map(|x| x as u8).collect();
        for place in [TablePlace::Inline, TablePlace::Shared] {
            check(Tables { list: &list, place }, &[], &carry(20_000, 4), &symbols);
        }
    }
}

#[test]
fn other_lengths_are_refused() {
    for len in [0, 1, 16_384, 16_385] {
        let symbols = skewed(len, 125, 50);
        let list = own_table(Precision::P8, &symbols);
        let tables = Tables { list: &list, place: TablePlace::Inline };
        for simd in Simd::available() {
            let codec = Rans::new(simd);
            let right = codec.carry_len(len);
            assert_eq!(right, 64 * len.div_ceil(16_384));
            let mut dst = vec![0; codec.bound(8, len)];
            for wrong in [1, 2, 63, 64, 65, 127, 128, 129, 192] {
                if wrong != right {
                    let outcome =
                        codec.encode_with(tables, &[], &vec![7; wrong], &symbols, &mut dst);
                    assert!(matches!(outcome, Err(Error::Limit { .. })), "{wrong}: {outcome:?}");
                }
            }
        }
    }
}

#[test]
fn damaged_streams_are_read_alike() {
    for precision in [Precision::P8, Precision::P12] {
        for rarity in [4, 200] {
            let symbols = skewed(2 * 16_384 + 700, 90, rarity);
            let list = own_table(precision, &symbols);
            let tables = Tables { list: &list, place: TablePlace::Inline };
            let stream = check(tables, &[], &carry(symbols.len(), 6), &symbols);
            let read = |stream: &[u8]| {
                let ctx = Context::default();
                let decode = |simd| decode_carrying(simd, precision, ctx, stream, symbols.len());
                let oracle = decode(Simd::Scalar);
                for simd in Simd::available() {
                    assert!(
                        decode(simd) == oracle,
                        "{simd} reads {} bytes otherwise",
                        stream.len()
                    );
                }
                oracle
            };
            let mut damaged = stream.clone();
            for x in noise(100, rarity) {
                // Half of the damage is done to the head, where it has the most varied effects.
                let at = if x % 2 == 0 { x as usize % 64 } else { x as usize % stream.len() };
                damaged[at] ^= 1 << (x >> 20 & 7);
                read(&damaged);
                damaged[at] = stream[at];
                let cut = x as usize % stream.len();
                assert_eq!(read(&stream[..cut]), None, "cut to {cut} of {}", stream.len());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn anything_carries_anything(
        symbols in prop::collection::vec(prop_oneof![8 => 120u8..126, 2 => 100u8..140, 1 => any::<u8>()], 1..3000),
        repeat in 1usize..40,
        seed: u64,
    ) {
        let symbols = symbols.repeat(repeat);
        for precision in [Precision::P8, Precision::P12] {
            let list = own_table(precision, &symbols);
            let tables = Tables { list: &list, place: TablePlace::Inline };
            check(tables, &[], &carry(symbols.len(), seed), &symbols);
        }
    }
}
