//! Every codec of the crate, on every set of instructions, through the conformance suite.

use s4_codec_cpu::rans::{Counts, Place, Precision, Table, Tables, parse_tables, write_tables};
use s4_codec_cpu::testing::{Side, carrying, conformance};
use s4_codec_cpu::{Bits, Const, Context, Deflate, Gdeflate, Lz4, Rans, Raw, Simd, Snappy, Zstd};

#[test]
fn raw() {
    conformance(&Raw, Side::NONE, |_| true);
}

#[test]
fn constant() {
    let repeats = |data: &[u8]| {
        data.is_empty()
            || (1..=16).any(|unit| data.iter().enumerate().all(|(i, b)| *b == data[i % unit]))
    };
    conformance(&Const, Side::NONE, repeats);
}

#[test]
fn bits() {
    for simd in Simd::available() {
        for width in 1..=7 {
            let fits = |data: &[u8]| data.iter().all(|b| b >> width == 0);
            conformance(&Bits::new(width, simd), Side::NONE, fits);
        }
    }
}

#[test]
fn zstd() {
    for level in [1, 3] {
        conformance(&Zstd::new(level), Side::NONE, |_| true);
        conformance(&Zstd::new(level).in_blocks(), Side::NONE, |_| true);
    }
}

#[test]
fn gdeflate() {
    conformance(&Gdeflate::entropy_only(), Side::NONE, |_| true);
    conformance(&Gdeflate::with_matches(), Side::NONE, |_| true);
}

#[test]
fn deflate() {
    for level in [0, 1, 6] {
        conformance(&Deflate::new(level), Side::NONE, |_| true);
    }
}

#[test]
fn lz4() {
    conformance(&Lz4, Side::NONE, |_| true);
}

#[test]
fn snappy() {
    conformance(&Snappy, Side::NONE, |_| true);
}

fn rans(precision: Precision) {
    for simd in Simd::available() {
        let codec = Rans::new(precision, simd);
        conformance(&codec, Side::NONE, |_| true);
        conformance(&codec, Side { tables: &[], contexts: 4 }, |_| true);
    }
}

#[test]
fn rans_of_8_bits() {
    rans(Precision::P8);
}

#[test]
fn rans_of_12_bits() {
    rans(Precision::P12);
}

/// Shared tables that fit none of the data: everything is written as escapes of frequency 1.
fn misfits(precision: Precision, count: usize) -> Vec<u8> {
    let mut counts = Counts::new();
    counts.add_symbol(99, 100_000);
    counts.add_symbol(98, 1);
    let table: Table = counts.table(precision);
    assert_eq!(table.escape(), 1);
    write_tables(&vec![table; count])
}

#[test]
fn rans_with_shared_tables() {
    for precision in [Precision::P8, Precision::P12] {
        for simd in Simd::available() {
            let codec = Rans::new(precision, simd);
            let tables = misfits(precision, 1);
            conformance(&codec, Side { tables: &tables, contexts: 0 }, |_| true);
            let tables = misfits(precision, 4);
            conformance(&codec, Side { tables: &tables, contexts: 4 }, |_| true);
        }
    }
}

/// Tables that fit the data, one for each context.
fn own_tables(precision: Precision, contexts: &[u8], data: &[u8]) -> Vec<Table> {
    if contexts.is_empty() {
        return vec![Counts::of_stream(data).table(precision)];
    }
    let mut counts = vec![Counts::new(); 4];
    for (&context, &symbol) in contexts.iter().zip(data) {
        counts[usize::from(context)].add_symbol(symbol, 1);
    }
    counts.iter().map(|counts| counts.table(precision)).collect()
}

fn carrying_rans(precision: Precision) {
    for simd in Simd::available() {
        let codec = Rans::new(precision, simd);
        let encode = |ctx: Context<'_>, carry: &[u8], data: &[u8], dst: &mut [u8]| {
            let (list, place) = if ctx.tables.is_empty() {
                (own_tables(precision, ctx.symbols, data), Place::Inline)
            } else {
                (parse_tables(precision, ctx.tables)?, Place::Shared)
            };
            codec.encode_with(Tables { list: &list, place }, ctx.symbols, carry, data, dst)
        };
        carrying(&codec, Side::NONE, encode);
        carrying(&codec, Side { tables: &[], contexts: 4 }, encode);
        let tables = misfits(precision, 4);
        carrying(&codec, Side { tables: &tables, contexts: 4 }, encode);
    }
}

#[test]
fn rans_of_8_bits_carries() {
    carrying_rans(Precision::P8);
}

#[test]
fn rans_of_12_bits_carries() {
    carrying_rans(Precision::P12);
}

#[test]
fn rans_refuses_what_shared_tables_cannot_code() {
    let mut counts = Counts::new();
    counts.add_symbol(0, 1);
    counts.add_symbol(1, 1);
    for precision in [Precision::P8, Precision::P12] {
        let tables = write_tables(&[counts.table(precision)]);
        for simd in Simd::available() {
            let side = Side { tables: &tables, contexts: 0 };
            conformance(&Rans::new(precision, simd), side, |data| data.iter().all(|b| *b < 2));
        }
    }
}
