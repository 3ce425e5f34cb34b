//! One table of the kernels for both directions, and the choice among them.

use s4_format::{Error, Result};
use s4_planes::Simd;

use super::part::Part;
use super::scalar;
use super::stream::{Carry, Stream};
use super::table::{MAX_TABLES, Precision, Table};

#[cfg(target_arch = "x86_64")]
use super::{
    avx2,
    avx512::{self, singles},
    pairs,
};

/// The segments of a stream, to be decoded.
pub(super) struct Decoding<'a> {
    pub(super) stream: &'a Stream<'a>,
    /// One for each symbol, each below the number of tables; empty if all are 0.
    pub(super) contexts: &'a [u8],
    pub(super) symbols: &'a mut [u8],
    /// The bytes that each segment carries are appended to this list.
    pub(super) carries: &'a mut Vec<Carry>,
}

/// Makes an encoder; `None` if it does not support these tables.
type MakeEncoder = fn(&[Table]) -> Option<Encoder>;

/// Decodes all segments; returns `None` and does nothing if it does not support these tables.
///
/// # Safety
/// The machine has the instructions, and the contexts are as [`Decoding`] says.
type Decode = unsafe fn(&mut Decoding<'_>) -> Option<Result<()>>;

/// A row of the table: the streams that it is for, and a kernel for each direction, if it has one.
struct Row {
    precision: Precision,
    /// The most tables that a stream may have.
    tables: usize,
    simd: Simd,
    encode: Option<MakeEncoder>,
    decode: Option<Decode>,
}

/// Every kernel, the fastest first. Plain Rust takes any tables, so every stream has one.
const KERNELS: &[Row] = &[
    #[cfg(target_arch = "x86_64")]
    Row {
        precision: Precision::P8,
        tables: 1,
        simd: Simd::Avx512,
        encode: Some(|tables| avx512::Encoder::new(&tables[0]).map(Encoder::Avx512)),
        decode: Some(decode_in_registers),
    },
    #[cfg(target_arch = "x86_64")]
    Row {
        precision: Precision::P12,
        tables: 1,
        simd: Simd::Avx512,
        encode: Some(|tables| singles::Encoder::new(&tables[0]).map(Encoder::Singles)),
        decode: Some(decode_with_slots::<singles::Decoder<12>>),
    },
    #[cfg(target_arch = "x86_64")]
    Row {
        precision: Precision::P8,
        tables: MAX_TABLES,
        simd: Simd::Avx512,
        encode: Some(|tables| avx512::contexts::Encoder::new(tables).map(Encoder::Avx512Contexts)),
        decode: Some(decode_with_slots::<singles::Decoder<8>>),
    },
    #[cfg(target_arch = "x86_64")]
    Row {
        precision: Precision::P12,
        tables: MAX_TABLES,
        simd: Simd::Avx512,
        encode: None,
        decode: Some(decode_with_slots::<singles::Decoder<12>>),
    },
    #[cfg(target_arch = "x86_64")]
    Row {
        precision: Precision::P8,
        tables: 1,
        simd: Simd::Avx2,
        encode: Some(|tables| avx2::Encoder::new(&tables[0]).map(Encoder::Avx2P8)),
        decode: Some(decode_with_slots::<avx2::Decoder<8>>),
    },
    #[cfg(target_arch = "x86_64")]
    Row {
        precision: Precision::P8,
        tables: MAX_TABLES,
        simd: Simd::Avx2,
        encode: Some(|tables| avx2::contexts::Encoder::new(tables).map(Encoder::ContextsP8)),
        decode: Some(decode_with_slots::<avx2::Decoder<8>>),
    },
    #[cfg(target_arch = "x86_64")]
    Row {
        precision: Precision::P12,
        tables: 1,
        simd: Simd::Avx2,
        encode: Some(|tables| avx2::Encoder::new(&tables[0]).map(Encoder::Avx2P12)),
        decode: None,
    },
    #[cfg(target_arch = "x86_64")]
    Row {
        precision: Precision::P12,
        tables: MAX_TABLES,
        simd: Simd::Avx2,
        encode: Some(|tables| avx2::contexts::Encoder::new(tables).map(Encoder::ContextsP12)),
        decode: Some(decode_with_slots::<avx2::Decoder<12>>),
    },
    Row {
        precision: Precision::P8,
        tables: MAX_TABLES,
        simd: Simd::Scalar,
        encode: Some(|tables| Some(Encoder::ScalarP8(scalar::Encoder::new(tables)))),
        decode: Some(decode_scalar::<8>),
    },
    Row {
        precision: Precision::P12,
        tables: MAX_TABLES,
        simd: Simd::Scalar,
        encode: Some(|tables| Some(Encoder::ScalarP12(scalar::Encoder::new(tables)))),
        decode: Some(decode_scalar::<12>),
    },
];

/// The rows for a stream on a machine that has `simd`.
fn rows(precision: Precision, tables: usize, simd: Simd) -> impl Iterator<Item = &'static Row> {
    KERNELS.iter().filter(move |row| {
        row.precision == precision && tables <= row.tables && includes(simd, row.simd)
    })
}

/// Whether a machine that has the instructions `simd` also has `other`.
fn includes(simd: Simd, other: Simd) -> bool {
    simd == other || other == Simd::Scalar || (simd, other) == (Simd::Avx512, Simd::Avx2)
}

/// The fastest encoder for tables of a precision on a machine that has `simd`.
///
/// # Errors
/// `Unsupported` if there is none, which plain Rust rules out.
pub(super) fn encoder(precision: Precision, simd: Simd, tables: &[Table]) -> Result<Encoder> {
    rows(precision, tables.len(), simd).find_map(|row| row.encode?(tables)).ok_or_else(no_kernel)
}

/// Decodes the segments of a stream on a machine that has `simd`.
///
/// # Errors
/// `Corrupt` if a state or the number of words is wrong.
pub(super) fn decode(precision: Precision, simd: Simd, job: &mut Decoding<'_>) -> Result<()> {
    let tables = job.stream.tables.len();
    // SAFETY: the machine has the instructions, as `Rans::new` has checked; the caller has checked
    // the contexts.
    let run = |row: &Row| unsafe { row.decode?(job) };
    rows(precision, tables, simd).find_map(run).unwrap_or_else(|| Err(no_kernel()))
}

fn no_kernel() -> Error {
    Error::unsupported("rans: no kernel for these tables")
}

/// An encoder for some tables.
#[expect(clippy::large_enum_variant, reason = "one for each call, on the stack")]
pub(super) enum Encoder {
    ScalarP8(scalar::Encoder),
    ScalarP12(scalar::Encoder),
    #[cfg(target_arch = "x86_64")]
    Avx2P8(avx2::Encoder<8>),
    #[cfg(target_arch = "x86_64")]
    Avx2P12(avx2::Encoder<12>),
    #[cfg(target_arch = "x86_64")]
    ContextsP8(avx2::contexts::Encoder<8>),
    #[cfg(target_arch = "x86_64")]
    ContextsP12(avx2::contexts::Encoder<12>),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Encoder),
    #[cfg(target_arch = "x86_64")]
    Avx512Contexts(avx512::contexts::Encoder),
    #[cfg(target_arch = "x86_64")]
    Singles(singles::Encoder),
}

impl Encoder {
    /// Encodes up to [`super::GROUP`] segments.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(unused_unsafe, reason = "all kernels are plain Rust")
    )]
    pub(super) fn group(&self, parts: &mut [Part<'_>]) -> Result<()> {
        let mut each = parts.iter_mut();
        // SAFETY: `Rans::new` has checked that the machine has the instructions.
        unsafe {
            match self {
                Self::ScalarP8(e) => each.try_for_each(|part| e.segment::<8>(part)),
                Self::ScalarP12(e) => each.try_for_each(|part| e.segment::<12>(part)),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2P8(e) => each.try_for_each(|part| e.segment(part)),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2P12(e) => each.try_for_each(|part| e.segment(part)),
                #[cfg(target_arch = "x86_64")]
                Self::ContextsP8(e) => each.try_for_each(|part| e.segment(part)),
                #[cfg(target_arch = "x86_64")]
                Self::ContextsP12(e) => each.try_for_each(|part| e.segment(part)),
                #[cfg(target_arch = "x86_64")]
                Self::Avx512(e) => e.group(parts),
                #[cfg(target_arch = "x86_64")]
                Self::Avx512Contexts(e) => e.group(parts),
                #[cfg(target_arch = "x86_64")]
                Self::Singles(e) => e.group(parts),
            }
        }
    }
}

/// Decodes in plain Rust.
fn decode_scalar<const P: u32>(job: &mut Decoding<'_>) -> Option<Result<()>> {
    let decoder = scalar::Decoder::new(&job.stream.tables);
    let mut segments = job.stream.segments();
    Some(segments.try_for_each(|(range, segment)| {
        let contexts = job.contexts.get(range.clone()).unwrap_or_default();
        job.carries.push(decoder.segment::<P>(segment, contexts, &mut job.symbols[range])?);
        Ok(())
    }))
}

/// Decodes with one table of `P = 8` that is looked up by permutations.
///
/// # Safety
/// The machine has AVX-512 F, BW, VL, VBMI and VBMI2.
#[cfg(target_arch = "x86_64")]
unsafe fn decode_in_registers(job: &mut Decoding<'_>) -> Option<Result<()>> {
    let decoder = avx512::Decoder::new(&job.stream.tables[0])?;
    // SAFETY: as for this function.
    Some(unsafe { decoder.segments(job.stream.segments(), job.symbols, job.carries) })
}

/// Decodes two segments at a time with tables in memory.
///
/// # Safety
/// The machine has the decoder's instructions, the tables are of its precision and no more than it
/// supports, and the contexts are as [`Decoding`] says.
#[cfg(target_arch = "x86_64")]
unsafe fn decode_with_slots<D: pairs::Blocks>(job: &mut Decoding<'_>) -> Option<Result<()>> {
    let decoder = D::new(pairs::Slots::new(&job.stream.tables)?);
    let mut rest = &mut job.symbols[..];
    let jobs = job.stream.segments().map(|(range, segment)| {
        let (symbols, behind) = std::mem::take(&mut rest).split_at_mut(range.len());
        rest = behind;
        let contexts = job.contexts.get(range).unwrap_or_default();
        pairs::SegmentJob { segment, contexts, symbols }
    });
    // SAFETY: as for this function.
    Some(unsafe { pairs::decode(&decoder, jobs, job.carries) })
}
