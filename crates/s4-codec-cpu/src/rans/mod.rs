use std::borrow::Cow;

use s4_format::{CodecId, Error, Result};
use s4_planes::Simd;

use crate::codec::{Codec, Context, Encoded, need};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod digits;
mod model;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod part;
mod scalar;
mod stream;
mod table;
#[cfg(target_arch = "x86_64")]
mod words;

pub use model::{Counts, cost, entropy};
pub use stream::Place;
pub use table::{Entry, MAX_TABLES, Precision, Table, parse_tables, write_tables};

#[cfg(target_arch = "x86_64")]
use avx512::singles;
use part::Part;
use stream::{
    CARRY_LEN, COUNT_LEN, Carry, LONG_SEGMENT_LOG2, SEGMENT_LOG2, START, STATES_LEN, Stream,
};

/// Codec `rans` (docs/codecs/rans.md).
///
/// Encodes with the tensor's shared tables if the context has any, otherwise with tables of its
/// own that stand in the stream: one, or one for each context byte that occurs. Decodes both
/// precisions, whichever it encodes with.
#[derive(Debug, Clone, Copy)]
pub struct Rans {
    precision: Precision,
    simd: Simd,
    /// Symbols of a segment that is written, as a power of two.
    segment_log2: u8,
}

/// The tables that a stream is coded with, and where they stand.
#[derive(Debug, Clone, Copy)]
pub struct Tables<'a> {
    /// 1 to [`MAX_TABLES`] tables of the encoder's precision.
    pub list: &'a [Table],
    /// Where a decoder finds them.
    pub place: Place,
}

impl Rans {
    /// Encodes with a precision. A set of instructions that this machine lacks is replaced by
    /// plain Rust.
    pub fn new(precision: Precision, simd: Simd) -> Self {
        let simd = if simd.is_available() { simd } else { Simd::Scalar };
        Self { precision, simd, segment_log2: SEGMENT_LOG2 }
    }

    /// Encodes into segments of twice the length. A segment costs 36 or 98 bytes, whatever its
    /// symbols take, so this pays where they take little; fewer segments run side by side.
    #[must_use]
    pub fn with_long_segments(self) -> Self {
        Self { segment_log2: LONG_SEGMENT_LOG2, ..self }
    }

    /// Encodes `symbols` with given tables, as [`Codec::encode`] does with those of its context or
    /// its own. `contexts` names the table of each symbol; empty if all use the first. `carry` is
    /// what the stream carries along: nothing, or [`Codec::carry_len`] bytes.
    ///
    /// # Errors
    /// `Limit` if `dst` is smaller than [`Codec::bound`], there are more than 2^32 - 1 symbols, or
    /// the number of tables, their precision, the contexts or `carry` are out of range;
    /// `Unsupported` if a symbol is not in its table and the table has no escape.
    pub fn encode_with(
        &self,
        tables: Tables<'_>,
        contexts: &[u8],
        carry: &[u8],
        symbols: &[u8],
        dst: &mut [u8],
    ) -> Result<Encoded> {
        let count = u32::try_from(symbols.len())
            .map_err(|_| Error::limit("rans stream of more than 2^32 - 1 symbols"))?;
        if !(1..=MAX_TABLES).contains(&tables.list.len())
            || tables.list.iter().any(|table| table.precision() != self.precision)
        {
            return Err(Error::limit("number or precision of the tables of a rans stream"));
        }
        check_contexts(contexts, symbols.len(), tables.list.len()).map_err(Error::limit)?;
        if !carry.is_empty() && carry.len() != self.carry_len(symbols.len()) {
            return Err(Error::limit(format!("rans stream carrying {} bytes", carry.len())));
        }
        let dst = need(dst, self.bound(symbols.len()))?;
        let (place, carries) = (tables.place, !carry.is_empty());
        let places = stream::write_head(count, self.segment_log2, tables.list, place, carries, dst);
        let len = self.encode_segments(tables.list, contexts, carry, symbols, dst, places)?;
        Ok(Encoded { len, param: self.precision.bits() as u8 })
    }

    /// Writes the segments from the second place on and their word counts to the first; returns the
    /// end.
    fn encode_segments(
        &self,
        tables: &[Table],
        contexts: &[u8],
        carry: &[u8],
        symbols: &[u8],
        dst: &mut [u8],
        (mut counts, at): (usize, usize),
    ) -> Result<usize> {
        let encoder = Encoder::new(self.precision, self.simd, tables);
        let mut end = at;
        for (i, group) in symbols.chunks(GROUP << self.segment_log2).enumerate() {
            let from = (i * GROUP) << self.segment_log2;
            let contexts = contexts.get(from..from + group.len()).unwrap_or_default();
            let start = stream::pad(end, dst);
            let carry = carry.get(i * GROUP * CARRY_LEN..).unwrap_or_default();
            let mut parts = self.parts(group, contexts, carry, &mut dst[start..])?;
            encoder.group(&mut parts)?;
            let lens: Vec<_> = parts.iter().map(|part| (part.words.len(), part.len)).collect();
            let mut at = start;
            for (room, len) in lens {
                let to = stream::pad(end, dst);
                dst.copy_within(at..at + STATES_LEN, to);
                at += STATES_LEN + room;
                dst.copy_within(at - len..at, to + STATES_LEN);
                // At most 49,152 words: 12 for each lane of each of 128 blocks.
                dst[counts..counts + COUNT_LEN].copy_from_slice(&((len / 2) as u16).to_le_bytes());
                counts += COUNT_LEN;
                end = to + STATES_LEN + len;
            }
        }
        Ok(end)
    }

    /// Segments and room for each, one after the other from the start of `dst`.
    fn parts<'a>(
        &self,
        symbols: &'a [u8],
        contexts: &'a [u8],
        carry: &[u8],
        mut dst: &'a mut [u8],
    ) -> Result<Vec<Part<'a>>> {
        let mut parts = Vec::with_capacity(GROUP);
        for (i, symbols) in symbols.chunks(1 << self.segment_log2).enumerate() {
            let from = i << self.segment_log2;
            let contexts = contexts.get(from..from + symbols.len()).unwrap_or_default();
            let room = stream::max_words_len(self.precision, symbols.len());
            let split = dst.split_first_chunk_mut().and_then(|(states, rest)| {
                let (words, rest) = rest.split_at_mut_checked(room)?;
                Some((states, words, rest))
            });
            let (states, words, rest) = split.ok_or_else(|| Error::limit("rans: no room"))?;
            let mut carried = carry.get(i * CARRY_LEN..).unwrap_or_default().as_chunks().0.iter();
            let start = std::array::from_fn(|_| {
                START | u32::from(carried.next().map_or(0, |word| u16::from_le_bytes(*word)))
            });
            parts.push(Part { symbols, contexts, start, states, words, len: 0 });
            dst = rest;
        }
        Ok(parts)
    }

    /// Decodes the segments of a stream. `contexts` is as long as `symbols`, each below the number
    /// of tables, or empty if all are 0. What each segment carries is appended to `carries`.
    fn decode_segments(
        &self,
        precision: Precision,
        stream: &Stream<'_>,
        contexts: &[u8],
        symbols: &mut [u8],
        carries: &mut Vec<Carry>,
    ) -> Result<()> {
        #[cfg(target_arch = "x86_64")]
        if matches!(self.simd, Simd::Avx2 | Simd::Avx512) {
            let one = match &stream.tables[..] {
                [table] if self.simd == Simd::Avx512 => Some(table),
                _ => None,
            };
            if let Some(table) = one
                && precision == Precision::P8
                && let Some(decoder) = avx512::Decoder::new(table)
            {
                // SAFETY: `new` has checked that the machine has the set.
                return unsafe { decoder.segments(stream.segments(), symbols, carries) };
            }
            if let Some(slots) = pairs::Slots::new(&stream.tables) {
                let mut rest = symbols;
                let jobs = stream.segments().map(|(range, segment)| {
                    let (symbols, behind) = std::mem::take(&mut rest).split_at_mut(range.len());
                    rest = behind;
                    let contexts = contexts.get(range).unwrap_or_default();
                    pairs::Job { segment, contexts, symbols }
                });
                // SAFETY: `new` has checked that the machine has the set; the tables are of
                // `precision`, and contexts are below their number.
                return unsafe {
                    match precision {
                        Precision::P8 => {
                            pairs::decode(&avx2::Decoder::<8>::new(slots), jobs, carries)
                        }
                        Precision::P12 if one.is_some() => {
                            let decoder = singles::Decoder::new(slots);
                            pairs::decode(&decoder, jobs, carries)
                        }
                        Precision::P12 => {
                            pairs::decode(&avx2::Decoder::<12>::new(slots), jobs, carries)
                        }
                    }
                };
            }
        }
        let decoder = scalar::Decoder::new(&stream.tables);
        for (range, segment) in stream.segments() {
            let contexts = if contexts.is_empty() { &[] } else { &contexts[range.clone()] };
            carries.push(match precision {
                Precision::P8 => decoder.segment::<8>(segment, contexts, &mut symbols[range])?,
                Precision::P12 => decoder.segment::<12>(segment, contexts, &mut symbols[range])?,
            });
        }
        Ok(())
    }
}

/// Segments that are encoded side by side.
const GROUP: usize = 4;

/// An encoder for some tables.
#[expect(clippy::large_enum_variant, reason = "one for each call, on the stack")]
enum Encoder {
    Scalar(Precision, scalar::Encoder),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Encoder),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Encoder),
    #[cfg(target_arch = "x86_64")]
    Singles(singles::Encoder),
}

impl Encoder {
    /// The fastest encoder for `tables` that the machine, which has `simd`, can run.
    fn new(precision: Precision, simd: Simd, tables: &[Table]) -> Self {
        #[cfg(target_arch = "x86_64")]
        if let (Precision::P8, [table]) = (precision, tables) {
            if let (Simd::Avx512, Some(encoder)) = (simd, avx512::Encoder::new(table)) {
                return Self::Avx512(encoder);
            }
            if let (Simd::Avx512 | Simd::Avx2, Some(encoder)) = (simd, avx2::Encoder::new(table)) {
                return Self::Avx2(encoder);
            }
        }
        #[cfg(target_arch = "x86_64")]
        if let ([table], Simd::Avx512) = (tables, simd)
            && let Some(encoder) = singles::Encoder::new(table)
        {
            return Self::Singles(encoder);
        }
        let _ = simd;
        Self::Scalar(precision, scalar::Encoder::new(tables))
    }

    /// Encodes up to [`GROUP`] segments.
    fn group(&self, parts: &mut [Part<'_>]) -> Result<()> {
        match self {
            Self::Scalar(Precision::P8, encoder) => {
                parts.iter_mut().try_for_each(|part| encoder.segment::<8>(part))
            }
            Self::Scalar(Precision::P12, encoder) => {
                parts.iter_mut().try_for_each(|part| encoder.segment::<12>(part))
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(encoder) => parts.iter_mut().try_for_each(|part| {
                // SAFETY: `Rans::new` has checked that the machine has the set.
                unsafe { encoder.segment(part) }
            }),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Rans::new` has checked that the machine has the set.
            Self::Avx512(encoder) => unsafe { encoder.group(parts) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Rans::new` has checked that the machine has the set.
            Self::Singles(encoder) => unsafe { encoder.group(parts) },
        }
    }
}

/// Checks that there is a context below `tables` for each symbol, or none at all.
fn check_contexts(contexts: &[u8], symbols: usize, tables: usize) -> Result<(), String> {
    if !contexts.is_empty() && contexts.len() != symbols {
        return Err(format!("{} contexts for {symbols} symbols", contexts.len()));
    }
    let largest = contexts.iter().fold(0, |a, &b| a.max(b));
    if usize::from(largest) >= tables {
        return Err(format!("context {largest} for {tables} tables"));
    }
    Ok(())
}

impl Codec for Rans {
    fn id(&self) -> CodecId {
        CodecId::RANS
    }

    fn bound(&self, len: usize) -> usize {
        stream::bound(self.precision, self.segment_log2, len)
    }

    fn encode(&self, ctx: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<Encoded> {
        let (list, place) = if !ctx.tables.is_empty() {
            (parse_tables(self.precision, ctx.tables)?, Place::Shared)
        } else if ctx.symbols.is_empty() {
            (vec![Counts::of_stream(src).table(self.precision)], Place::Inline)
        } else {
            let tables = 1 + usize::from(ctx.symbols.iter().fold(0, |a, &b| a.max(b)));
            check_contexts(ctx.symbols, src.len(), tables.min(MAX_TABLES)).map_err(Error::limit)?;
            let counts = Counts::of_contexts(src, ctx.symbols, tables);
            (counts.iter().map(|counts| counts.table(self.precision)).collect(), Place::Inline)
        };
        self.encode_with(Tables { list: &list, place }, ctx.symbols, &[], src, dst)
    }

    fn decode(&self, param: u8, ctx: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<()> {
        let mut carry = Vec::new();
        self.decode_carrying(param, ctx, src, dst, &mut carry)?;
        if carry.is_empty() {
            return Ok(());
        }
        Err(Error::unsupported("rans stream that carries bytes of the next stream, on its own"))
    }

    fn carry_len(&self, len: usize) -> usize {
        len.div_ceil(1 << self.segment_log2) * CARRY_LEN
    }

    fn decode_carrying(
        &self,
        param: u8,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        carry: &mut Vec<u8>,
    ) -> Result<()> {
        let precision = Precision::from_param(param)?;
        let stream = Stream::parse(precision, ctx.tables, src, dst.len())?;
        let mut contexts = Cow::Borrowed(ctx.symbols);
        if stream.tables.len() == 1 {
            contexts = Cow::Borrowed(&[]);
        }
        check_contexts(&contexts, dst.len(), stream.tables.len()).map_err(Error::corrupt)?;
        let mut carries = Vec::new();
        self.decode_segments(precision, &stream, &contexts, dst, &mut carries)?;
        carry.clear();
        if stream.carries {
            carry.extend(carries.as_flattened());
        } else if carries.iter().any(|carry| *carry != [0; CARRY_LEN]) {
            return Err(Error::corrupt("rans states do not end at 2^16"));
        }
        Ok(())
    }
}
