//! `rans`: every set of instructions against plain Rust, and what the suite for all codecs does
//! not reach.

use proptest::prelude::*;
use s4_codec_cpu::rans::{
    Counts, Precision, Table, TableEntry, TablePlace, Tables, cost, parse_tables, write_tables,
};
use s4_codec_cpu::{Codec, Context, Rans, Simd, Symbols, Workspace};
use s4_format::Error;

mod common;
use common::{decode_carrying, encode, noise, skewed};

fn decode(
    simd: Simd,
    precision: Precision,
    ctx: Context<'_>,
    src: &[u8],
    len: usize,
) -> Option<Vec<u8>> {
    let mut dst = vec![0; len];
    let ctx = Context { param: precision.bits() as u8, ..ctx };
    Rans::new(simd).decode(ctx, src, &mut dst, &mut Workspace::default()).ok().map(|()| dst)
}

/// Encodes with every set of instructions, compares with plain Rust, and decodes with every set.
fn check(tables: Tables<'_>, symbols: &[u8]) -> Vec<u8> {
    let oracle = encode(Simd::Scalar, tables, &[], &[], symbols);
    let shared = match tables.place {
        TablePlace::Shared => write_tables(tables.list),
        TablePlace::Inline => Vec::new(),
    };
    let ctx = Context { tables: &shared, ..Context::default() };
    let precision = tables.list[0].precision();
    for simd in Simd::available() {
        let stream = encode(simd, tables, &[], &[], symbols);
        assert!(stream == oracle, "{simd} writes {} symbols differently", symbols.len());
        let decoded = decode(simd, precision, ctx, &stream, symbols.len());
        assert!(decoded.as_deref() == Some(symbols), "{simd} reads {} symbols", symbols.len());
    }
    oracle
}

/// A table of `count` symbols, most of them rare, and an escape.
fn table(precision: Precision, count: u8, escape: u16) -> Table {
    let rest = precision.total() as u16 - escape - u16::from(count - 1);
    let max = if precision == Precision::P8 { 255 } else { 4096 };
    let freq = |i| if i + 1 == count { rest.min(max) } else { 1 };
    let entries: Vec<_> =
        (0..count).map(|i| TableEntry { symbol: i.wrapping_mul(7), freq: freq(i) }).collect();
    Table::new(precision, &entries).expect("a valid table")
}

#[test]
fn every_set_of_instructions_writes_and_reads_the_same() {
    let mut sizes: Vec<usize> = vec![0, 1, 31, 255, 256, 257, 5000];
    for segments in 1..=6 {
        sizes.extend([segments * 16_384 - 300, segments * 16_384, segments * 16_384 + 511]);
    }
    for precision in [Precision::P8, Precision::P12] {
        for &len in &sizes {
            for rarity in [10, 100, 100_000] {
                let symbols = skewed(len, 125, rarity);
                let own = Counts::of_stream(&symbols).table(precision);
                check(Tables { list: &[own], place: TablePlace::Inline }, &symbols);
            }
        }
    }
}

#[test]
fn tables_of_every_size_do() {
    for precision in [Precision::P8, Precision::P12] {
        for count in [1, 2, 15, 31, 32, 62, 63, 64, 65, 128, 250] {
            for escape in [1, 3] {
                let list = [table(precision, count, escape)];
                let tables = Tables { list: &list, place: TablePlace::Shared };
                for rarity in [2, 1000] {
                    check(tables, &skewed(3 * 16_384 + 999, count.wrapping_mul(7), rarity));
                }
            }
        }
        let only_escapes = [Table::new(precision, &[]).unwrap()];
        let tables = Tables { list: &only_escapes, place: TablePlace::Inline };
        check(tables, &skewed(20_000, 3, 2));
    }
}

#[test]
fn every_frequency_divides_exactly() {
    for freq in 1..=255 {
        let entries =
            [TableEntry { symbol: 200, freq: 256 - freq }, TableEntry { symbol: 11, freq }];
        let list = [Table::new(Precision::P8, &entries).unwrap()];
        let pick = |x| if x % 256 < u64::from(freq) { 11 } else { 200 };
        let symbols: Vec<u8> = noise(9000, freq.into()).map(pick).collect();
        check(Tables { list: &list, place: TablePlace::Inline }, &symbols);
    }
}

#[test]
fn contexts_pick_tables() {
    for precision in [Precision::P8, Precision::P12] {
        for len in [1, 300, 9000, 50_001] {
            let contexts: Vec<u8> = noise(len, 9).map(|x| (x % 4) as u8).collect();
            let streams: Vec<_> = (0..4).map(|c| skewed(len, 30 + 50 * c, 500)).collect();
            let symbols: Vec<u8> =
                contexts.iter().enumerate().map(|(i, &c)| streams[usize::from(c)][i]).collect();

            // The stream's own tables, one for each context.
            let (codec, param) = (Rans::new(Simd::detect()), precision.bits() as u8);
            let ctx = Context { param, tables: &[], contexts: &contexts };
            let mut dst = vec![0; codec.bound(param, len)];
            let all = Symbols::new(&symbols, ctx);
            let encoded = codec.encode(&all, &mut dst, &mut Workspace::default()).unwrap();
            let own = &dst[..encoded.len];
            assert_eq!(decode(Simd::Scalar, precision, ctx, own, len).unwrap(), symbols);

            // Shared tables, which must be better than one table for all symbols.
            let mut counts = vec![Counts::new(); 4];
            for (&symbol, &c) in symbols.iter().zip(&contexts) {
                counts[usize::from(c)].add_symbol(symbol, 1);
            }
            let list: Vec<_> = counts.iter().map(|c| c.table(precision)).collect();
            let shared = write_tables(&list);
            assert_eq!(parse_tables(precision, &shared).unwrap(), list);
            let tables = Tables { list: &list, place: TablePlace::Shared };
            let stream = encode(Simd::detect(), tables, &contexts, &[], &symbols);
            let ctx = Context { param, tables: &shared, contexts: &contexts };
            assert_eq!(decode(Simd::detect(), precision, ctx, &stream, len).unwrap(), symbols);
            if len > 9000 {
                let one = [Counts::of_stream(&symbols).table(precision)];
                let one = encode(
                    Simd::detect(),
                    Tables { list: &one, place: TablePlace::Inline },
                    &[],
                    &[],
                    &symbols,
                );
                assert!(stream.len() * 10 < one.len() * 9, "{} {}", stream.len(), one.len());
                assert!(own.len() * 10 < one.len() * 9);
            }
            let wrong = Context { contexts: &contexts[1..], ..ctx };
            assert_eq!(decode(Simd::detect(), precision, wrong, &stream, len), None);
        }
    }
}

/// Each of 16 tables escapes different symbols, and one escapes none: no byte can mark an
/// escape in all of them.
#[test]
fn each_of_many_tables_has_escapes_of_its_own() {
    const TABLES: u8 = 16;
    let holds = |table: u8, symbol: u8| table == 0 || symbol % TABLES != table;
    // In the last case the first table has both an escape and every byte as a symbol.
    for (precision, freq) in [(Precision::P8, 1), (Precision::P12, 16), (Precision::P12, 15)] {
        let table = |t| {
            let symbols = (0..=255).filter(|s| holds(t, *s));
            let entries: Vec<_> = symbols.map(|symbol| TableEntry { symbol, freq }).collect();
            Table::new(precision, &entries).unwrap()
        };
        let list: Vec<_> = (0..TABLES).map(table).collect();
        assert_eq!(list[0].escape() > 0, freq == 15);
        let shared = write_tables(&list);
        let param = precision.bits() as u8;
        for len in [1, 256, 5000, 40_000] {
            let contexts: Vec<u8> = noise(len, 3).map(|x| x as u8 % TABLES).collect();
            // Nearly all symbols that would escape are replaced by symbols of their tables.
            let pick = |(x, &t): (u64, &u8)| {
                let (symbol, rare) = (x as u8, x >> 8 & 127 == 0);
                if rare || holds(t, symbol) { symbol } else { symbol ^ 1 }
            };
            let symbols: Vec<u8> = noise(len, 5).zip(&contexts).map(pick).collect();
            let tables = Tables { list: &list, place: TablePlace::Shared };
            // Without contexts all symbols use the first table.
            for contexts in [&contexts[..], &[]] {
                let oracle = encode(Simd::Scalar, tables, contexts, &[], &symbols);
                let ctx = Context { param, tables: &shared, contexts };
                for simd in Simd::available() {
                    let stream = encode(simd, tables, contexts, &[], &symbols);
                    assert!(stream == oracle, "{simd} writes {len} symbols differently");
                    let decoded = decode(simd, precision, ctx, &stream, len);
                    assert!(decoded.as_deref() == Some(&symbols[..]), "{simd} reads {len} symbols");
                }
            }
        }
    }
}

/// Wherever it is: an encoder that codes it as something else loses data.
#[test]
fn a_symbol_that_its_table_lacks_is_refused() {
    for precision in [Precision::P8, Precision::P12] {
        let half = precision.total() as u16 / 2;
        let of = |symbols: [u8; 2], freq| {
            let entries = symbols.map(|symbol| TableEntry { symbol, freq });
            Table::new(precision, &entries).unwrap()
        };
        // The first symbol of the first table begins where the escape of the other one does.
        let list = [of([3, 7], half), of([3, 5], half / 2)];
        assert!(list[0].escape() == 0 && list[1].escape() > 0);
        for (list, len) in [(&list[..1], 33_000), (&list[..], 33_000), (&list[..], 40)] {
            let contexts: Vec<u8> = noise(len, 3).map(|x| x as u8 % list.len() as u8).collect();
            let pick = |(x, &t): (u64, &u8)| if t == 0 { [3, 7][x as usize % 2] } else { x as u8 };
            let symbols: Vec<u8> = noise(len, 5).zip(&contexts).map(pick).collect();
            let tables = Tables { list, place: TablePlace::Inline };
            for simd in Simd::available() {
                let codec = Rans::new(simd);
                let mut dst = vec![0; codec.bound(precision.bits() as u8, len)];
                let mut encode =
                    |symbols: &[u8]| codec.encode_with(tables, &contexts, &[], symbols, &mut dst);
                assert!(encode(&symbols).is_ok(), "{simd}");
                let firsts = (0..len).filter(|i| contexts[*i] == 0);
                for i in firsts.step_by(len / 37 + 1) {
                    let mut wrong = symbols.clone();
                    wrong[i] = 5;
                    let outcome = encode(&wrong);
                    assert!(
                        matches!(outcome, Err(Error::Unsupported { .. })),
                        "{simd}, {len}: {i}"
                    );
                }
            }
        }
    }
}

/// A stream with segments of another size, put together from streams of one segment.
fn with_segments(log2: u8, tables: Tables<'_>, carry: &[u8], symbols: &[u8]) -> Vec<u8> {
    let mut carries = carry.chunks(64);
    let part = |part| encode(Simd::Scalar, tables, &[], carries.next().unwrap_or_default(), part);
    let parts: Vec<_> = symbols.chunks(1 << log2).map(part).collect();
    let mut stream = (symbols.len() as u32).to_le_bytes().to_vec();
    stream.extend([5, log2, 1, parts[0][7]]);
    // A part with shared tables has 8 bytes of header, 2 of the count, 2 of padding.
    parts.iter().for_each(|part| stream.extend(&part[8..10]));
    for part in &parts {
        stream.resize(stream.len().next_multiple_of(4), 0);
        stream.extend(&part[12..]);
    }
    stream
}

#[test]
fn segments_of_other_sizes_are_read() {
    let symbols = skewed(4096 * 9 + 77, 120, 300);
    for precision in [Precision::P8, Precision::P12] {
        let list = [Counts::of_stream(&symbols).table(precision)];
        let shared = write_tables(&list);
        let tables = Tables { list: &list, place: TablePlace::Shared };
        let ctx = Context { tables: &shared, ..Context::default() };
        for log2 in 12..=14 {
            let carry: Vec<u8> =
                noise(64 * symbols.len().div_ceil(1 << log2), 5).map(|x| x as u8).collect();
            let stream = with_segments(log2, tables, &[], &symbols);
            let carrying = with_segments(log2, tables, &carry, &symbols);
            for simd in Simd::available() {
                let len = symbols.len();
                assert_eq!(decode(simd, precision, ctx, &stream, len).unwrap(), symbols);
                let (decoded, carried) =
                    decode_carrying(simd, precision, ctx, &carrying, len).unwrap();
                assert!(decoded == symbols && carried == carry, "{simd}, 2^{log2} symbols");
            }
        }
        assert_eq!(
            with_segments(14, tables, &[], &symbols),
            encode(Simd::Scalar, tables, &[], &[], &symbols)
        );
    }
}

#[test]
fn long_segments_are_written_and_read_by_every_set_of_instructions() {
    for precision in [Precision::P8, Precision::P12] {
        for len in [1, 32_767, 32_768, 100_001, 131_072] {
            let symbols = skewed(len, 5, 300);
            let list = [Counts::of_stream(&symbols).table(precision)];
            let tables = Tables { list: &list, place: TablePlace::Inline };
            let carry: Vec<u8> = noise(64 * len.div_ceil(32_768), 3).map(|x| x as u8).collect();
            let mut oracle = None;
            for simd in Simd::available() {
                let codec = Rans::new(simd).with_long_segments();
                assert_eq!(codec.carry_len(len), carry.len());
                let mut dst = vec![0; codec.bound(precision.bits() as u8, len)];
                let e = codec.encode_with(tables, &[], &carry, &symbols, &mut dst).unwrap();
                dst.truncate(e.len);
                assert_eq!(dst[5], 15);
                let read = decode_carrying(simd, precision, Context::default(), &dst, len);
                assert!(read.unwrap() == (symbols.clone(), carry.clone()), "{simd} {len}");
                let first = oracle.get_or_insert_with(|| dst.clone());
                assert!(dst == *first, "{simd} writes {len} symbols differently");
            }
        }
    }
}

#[test]
fn headers_that_the_specification_does_not_have_are_unsupported() {
    let symbols = skewed(3000, 120, 300);
    let own = [Counts::of_stream(&symbols).table(Precision::P8)];
    let tables = Tables { list: &own, place: TablePlace::Inline };
    let stream = encode(Simd::Scalar, tables, &[], &[], &symbols);
    for at in [4, 5, 7] {
        for value in 0..=255 {
            let mut changed = stream.clone();
            changed[at] = value;
            // A single segment is the same whatever the size of a full one.
            let valid = [value == 5, (12..=15).contains(&value), value < 4][at.min(6) - 4];
            let mut dst = vec![0; symbols.len()];
            let mut carry = Vec::new();
            let outcome = Rans::new(Simd::detect()).decode_carrying(
                Context::of(8),
                &changed,
                &mut dst,
                &mut carry,
                &mut Workspace::default(),
            );
            let refused = matches!(outcome, Err(Error::Unsupported { .. }));
            assert_eq!(refused, !valid, "byte {at} = {value}: {outcome:?}");
        }
    }
}

#[test]
fn damaged_streams_are_read_alike() {
    for rarity in [4, 200] {
        let symbols = skewed(2 * 16_384 + 700, 90, rarity);
        let own = Counts::of_stream(&symbols).table(Precision::P8);
        let tables = Tables { list: &[own], place: TablePlace::Inline };
        let mut stream = encode(Simd::Scalar, tables, &[], &[], &symbols);
        for x in noise(150, rarity) {
            // Half of the damage is done to the head, where it has the most varied effects.
            let at = if x % 2 == 0 { x as usize % 64 } else { x as usize % stream.len() };
            let byte = stream[at];
            stream[at] ^= 1 << (x >> 20 & 7);
            let ctx = Context::default();
            let oracle = decode(Simd::Scalar, Precision::P8, ctx, &stream, symbols.len());
            for simd in Simd::available() {
                let decoded = decode(simd, Precision::P8, ctx, &stream, symbols.len());
                assert!(decoded == oracle, "{simd} reads byte {at} otherwise");
            }
            stream[at] = byte;
        }
    }
}

#[test]
fn the_cost_is_near_the_size() {
    for precision in [Precision::P8, Precision::P12] {
        let symbols = skewed(60_000, 77, 300);
        let mut counts = Counts::new();
        symbols.iter().for_each(|&symbol| counts.add_symbol(symbol, 1));
        let table = counts.table(precision);
        let bits = cost(&counts, &table);
        let tables = Tables { list: &[table], place: TablePlace::Inline };
        let size = 8 * check(tables, &symbols).len() as u64;
        let states = 4 * 32 * 16; // the half of each state that is overhead
        assert!(size > bits && size < bits + bits / 200 + 4 * states, "{size} {bits}");
    }
}

/// Checks that the page shows a stream: the indented lines from the one that starts with `head` on.
fn check_example(head: &str, stream: &[u8]) {
    let hex: String = stream.iter().map(|b| format!("{b:02x}")).collect();
    let page = include_str!("../../../docs/codecs/rans.md");
    let example: String = page
        .lines()
        .skip_while(|line| !line.trim_start().starts_with(head))
        .take_while(|line| line.starts_with("    "))
        .flat_map(|line| line[..line.find('|').unwrap_or(line.len())].split_whitespace())
        .collect();
    assert_eq!(hex, example, "{head}");
}

#[test]
fn the_examples_of_the_specification() {
    let symbols = [125, 125, 124, 125, 200, 125, 125, 126];
    let own = [Counts::of_stream(&symbols).table(Precision::P8)];
    let tables = Tables { list: &own, place: TablePlace::Inline };
    check_example("08 00 00 00 05 0e 01 00", &encode(Simd::Scalar, tables, &[], &[], &symbols));
    let carry: Vec<u8> = (0..64).collect();
    check_example("08 00 00 00 05 0e 01 02", &encode(Simd::Scalar, tables, &[], &carry, &symbols));
}

#[test]
fn the_examples_with_words_and_escapes() {
    let symbols = [
        [0x7d, 0x7e, 0xc8, 0x7e, 0x7c, 0x7e, 0x7e, 0x7e],
        [0x7e, 0x7e, 0x7e, 0x7e, 0x01, 0x7e, 0x7c, 0x02],
    ]
    .concat();
    let table = |precision, freqs: [u16; 3]| {
        let entry = |(symbol, freq)| TableEntry { symbol, freq };
        let entries: Vec<_> = [0x7e, 0x7c, 0x7d].into_iter().zip(freqs).map(entry).collect();
        [Table::new(precision, &entries).expect("a valid table")]
    };
    for (precision, freqs, head) in [
        (Precision::P8, [16, 32, 192], "10 00 00 00 05 0e 01 00 | P = 8"),
        (Precision::P12, [64, 512, 3456], "10 00 00 00 05 0e 01 00 | P = 12"),
    ] {
        let list = table(precision, freqs);
        let stream = check(Tables { list: &list, place: TablePlace::Inline }, &symbols);
        check_example(head, &stream);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_symbols_round_trip(
        symbols in prop::collection::vec(prop_oneof![8 => 120u8..126, 2 => 100u8..140, 1 => any::<u8>()], 0..3000),
        repeat in 1usize..40,
    ) {
        let symbols = symbols.repeat(repeat);
        for precision in [Precision::P8, Precision::P12] {
            let own = Counts::of_stream(&symbols).table(precision);
            check(Tables { list: &[own], place: TablePlace::Inline }, &symbols);
        }
    }

    #[test]
    fn any_table_codes_what_it_holds(freqs in prop::collection::vec(1u16..60, 1..60), seed: u64) {
        let mut left = 255;
        let mut entries = Vec::new();
        for (i, freq) in freqs.into_iter().enumerate() {
            let freq = freq.min(left);
            if freq > 0 {
                entries.push(TableEntry { symbol: (seed as u8).wrapping_add(5 * i as u8), freq });
                left -= freq;
            }
        }
        let list = [Table::new(Precision::P8, &entries).unwrap()];
        let symbols: Vec<u8> = noise(20_000, seed)
            .map(|x| match x % 64 {
                0 => x as u8,
                i => entries[i as usize % entries.len()].symbol,
            })
            .collect();
        check(Tables { list: &list, place: TablePlace::Shared }, &symbols);
    }

    #[test]
    fn any_bytes_are_no_danger(
        bytes in prop::collection::vec(any::<u8>(), 0..600),
        flags in prop_oneof![Just(0), Just(2)],
        len in 0usize..600,
    ) {
        let mut stream = (len as u32).to_le_bytes().to_vec();
        stream.extend([5, 14, 1, flags, 1, 0, 1, 0, 9, 255]);
        stream.extend(bytes);
        let ctx = Context::default();
        let oracle = decode_carrying(Simd::Scalar, Precision::P8, ctx, &stream, len);
        for simd in Simd::available() {
            let decoded = decode_carrying(simd, Precision::P8, ctx, &stream, len);
            prop_assert_eq!(&decoded, &oracle);
        }
    }
}
