//! Every codec of the crate, on every set of instructions, through the conformance suite.

use s4_codec_cpu::rans::{Counts, Precision, Table, write_tables};
use s4_codec_cpu::testing::{StreamSetup, carrying, conformance};
use s4_codec_cpu::{Bits, Const, Deflate, Gdeflate, Lz4, Rans, Raw, Simd, Snappy, Zstd};

#[test]
fn raw() {
    conformance(&Raw, StreamSetup::of(0), |_| true);
}

#[test]
fn constant() {
    let repeats = |data: &[u8]| {
        data.is_empty()
            || (1..=16).any(|unit| data.iter().enumerate().all(|(i, b)| *b == data[i % unit]))
    };
    conformance(&Const, StreamSetup::of(0), repeats);
}

#[test]
fn bits() {
    for simd in Simd::available() {
        for width in 1..=7 {
            let fits = |data: &[u8]| data.iter().all(|b| b >> width == 0);
            conformance(&Bits::new(simd), StreamSetup::of(width), fits);
        }
    }
}

#[test]
fn zstd() {
    for level in [1, 3] {
        for param in [0, Zstd::IN_BLOCKS] {
            conformance(&Zstd::new(level), StreamSetup::of(param), |_| true);
        }
    }
}

#[test]
fn gdeflate() {
    conformance(&Gdeflate::entropy_only(), StreamSetup::of(0), |_| true);
    conformance(&Gdeflate::with_matches(), StreamSetup::of(0), |_| true);
}

#[test]
fn deflate() {
    for level in [0, 1, 6] {
        conformance(&Deflate::new(level), StreamSetup::of(0), |_| true);
    }
}

#[test]
fn lz4() {
    conformance(&Lz4, StreamSetup::of(0), |_| true);
}

#[test]
fn snappy() {
    conformance(&Snappy, StreamSetup::of(0), |_| true);
}

/// Streams of a precision, without tables.
fn side(precision: Precision) -> StreamSetup<'static> {
    StreamSetup::of(precision.bits() as u8)
}

fn rans(precision: Precision) {
    for simd in Simd::available() {
        let codec = Rans::new(simd);
        conformance(&codec, side(precision), |_| true);
        conformance(&codec, StreamSetup { contexts: 4, ..side(precision) }, |_| true);
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

/// Shared tables that fit none of the data: all symbols are escapes, of frequency 1.
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
            let codec = Rans::new(simd);
            let tables = misfits(precision, 1);
            conformance(&codec, StreamSetup { tables: &tables, ..side(precision) }, |_| true);
            let tables = misfits(precision, 4);
            conformance(
                &codec,
                StreamSetup { tables: &tables, contexts: 4, ..side(precision) },
                |_| true,
            );
        }
    }
}

fn carrying_rans(precision: Precision) {
    for simd in Simd::available() {
        let codec = Rans::new(simd);
        carrying(&codec, side(precision));
        carrying(&codec, StreamSetup { contexts: 4, ..side(precision) });
        let tables = misfits(precision, 4);
        carrying(&codec, StreamSetup { tables: &tables, contexts: 4, ..side(precision) });
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
            let side = StreamSetup { tables: &tables, ..side(precision) };
            conformance(&Rans::new(simd), side, |data| data.iter().all(|b| *b < 2));
        }
    }
}
