use s4_format::{CodecId, Error, Result};
use s4_planes::Simd;

use crate::Workspace;
use crate::codec::{Codec, Context, Encoded, Symbols, need};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod digits;
mod kernels;
mod model;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod part;
mod scalar;
mod state;
mod stream;
mod table;
#[cfg(target_arch = "x86_64")]
mod words;

pub use model::{Counts, cost, cost_with, entropy, entropy_of};
pub use stream::{TablePlace, Tables};
pub use table::{MAX_TABLES, Precision, Table, TableEntry, parse_tables, write_tables};

use kernels::Decoding;
use part::Part;
use state::State;
use stream::{
    CARRY_LEN, COUNT_LEN, LONG_SEGMENT_LOG2, SEGMENT_LOG2, START, STATES_LEN, Stream,
    check_contexts,
};

/// Sparse streams of more symbols than this have long segments: there are still enough of them to
/// run side by side, and symbols take so few bits that the fixed cost of a segment matters.
const LONG_STREAM: usize = 1 << 16;

/// Codec `rans` (docs/codecs/rans.md).
///
/// Encodes with the tensor's shared tables if the context has any, otherwise with its own tables,
/// stored in the stream: one, or one for each context up to the largest that occurs. If it may
/// choose, it takes those with which it estimates a smaller stream. Streams carry the end of the
/// stream after them.
#[derive(Debug, Clone, Copy)]
pub struct Rans {
    simd: Simd,
    /// Symbols of a segment that the encoder writes, as a power of two.
    segment_log2: u8,
}

impl Rans {
    /// Codes with a set of instructions; one that this machine lacks is replaced by plain Rust.
    pub fn new(simd: Simd) -> Self {
        let simd = if simd.is_available() { simd } else { Simd::Scalar };
        Self { simd, segment_log2: SEGMENT_LOG2 }
    }

    /// Encodes into segments of twice the length. A segment costs 36 or 98 bytes, whatever its
    /// symbols take, so this pays where they take little; but fewer segments can run side by side.
    #[must_use]
    pub fn with_long_segments(self) -> Self {
        Self { segment_log2: LONG_SEGMENT_LOG2, ..self }
    }

    /// Number of bytes of the following stream that a stream of `len` symbols carries.
    pub fn carry_len(&self, len: usize) -> usize {
        len.div_ceil(1 << self.segment_log2) * CARRY_LEN
    }

    /// Encodes `symbols` with given tables, as [`Codec::encode`] does with those that it chooses.
    /// `contexts` names the table of each symbol; empty if all use the first. `carry` is the data that the
    /// stream carries: nothing, or [`Rans::carry_len`] bytes.
    ///
    /// # Errors
    /// `Limit` if `dst` is smaller than [`Codec::bound`], there are more than 2^32 - 1 symbols, or
    /// the number of tables, their precisions, the contexts or `carry` are out of range;
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
            .map_err(|_| Error::limit("rans stream has more than 2^32 - 1 symbols"))?;
        let precision = tables.list.first().map(Table::precision);
        let precision = precision.filter(|_| tables.list.len() <= MAX_TABLES);
        let precision = precision.filter(|&p| tables.list.iter().all(|t| t.precision() == p));
        let precision = precision.ok_or_else(|| {
            Error::limit("invalid number of rans tables, or tables of different precisions")
        })?;
        check_contexts(contexts, symbols.len(), tables.list.len()).map_err(Error::limit)?;
        if !carry.is_empty() && carry.len() != self.carry_len(symbols.len()) {
            return Err(Error::limit(format!("rans stream cannot carry {} bytes", carry.len())));
        }
        let dst = need(dst, stream::bound(precision, self.segment_log2, symbols.len()))?;
        let (place, carries) = (tables.place, !carry.is_empty());
        let places = stream::write_head(count, self.segment_log2, tables.list, place, carries, dst);
        let len = self.encode_segments(tables.list, contexts, carry, symbols, dst, places)?;
        Ok(Encoded { len, carried: carry.len(), shared: place == TablePlace::Shared })
    }

    /// Writes the word counts from the first of the two places on and the segments from the second;
    /// returns the end.
    fn encode_segments(
        &self,
        tables: &[Table],
        contexts: &[u8],
        carry: &[u8],
        symbols: &[u8],
        dst: &mut [u8],
        (mut counts, at): (usize, usize),
    ) -> Result<usize> {
        let precision = tables[0].precision();
        let encoder = kernels::encoder(precision, self.simd, tables)?;
        let mut end = at;
        for (i, group) in symbols.chunks(GROUP << self.segment_log2).enumerate() {
            let from = (i * GROUP) << self.segment_log2;
            let contexts = contexts.get(from..from + group.len()).unwrap_or_default();
            let start = stream::pad(end, dst);
            let carry = carry.get(i * GROUP * CARRY_LEN..).unwrap_or_default();
            let mut parts = self.parts(precision, group, contexts, carry, &mut dst[start..])?;
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
        precision: Precision,
        symbols: &'a [u8],
        contexts: &'a [u8],
        carry: &[u8],
        mut dst: &'a mut [u8],
    ) -> Result<Vec<Part<'a>>> {
        let mut parts = Vec::with_capacity(GROUP);
        for (i, symbols) in symbols.chunks(1 << self.segment_log2).enumerate() {
            let from = i << self.segment_log2;
            let contexts = contexts.get(from..from + symbols.len()).unwrap_or_default();
            let room = stream::max_words_len(precision, symbols.len());
            let split = dst.split_first_chunk_mut().and_then(|(states, rest)| {
                let (words, rest) = rest.split_at_mut_checked(room)?;
                Some((states, words, rest))
            });
            let (states, words, rest) =
                split.ok_or_else(|| Error::limit("rans: output buffer is too small"))?;
            let mut carried = carry.get(i * CARRY_LEN..).unwrap_or_default().as_chunks().0.iter();
            let start = std::array::from_fn(|_| {
                START | u32::from(carried.next().map_or(0, |word| u16::from_le_bytes(*word)))
            });
            parts.push(Part { symbols, contexts, start, states, words, len: 0 });
            dst = rest;
        }
        Ok(parts)
    }
}

/// Segments that are encoded side by side.
const GROUP: usize = 4;

impl Codec for Rans {
    fn id(&self) -> CodecId {
        CodecId::RANS
    }

    fn bound(&self, param: u8, len: usize) -> usize {
        let precision = Precision::from_param(param).unwrap_or(Precision::P12);
        stream::bound(precision, self.segment_log2, len)
    }

    fn encode(
        &self,
        symbols: &Symbols<'_>,
        dst: &mut [u8],
        work: &mut Workspace,
    ) -> Result<Encoded> {
        let Symbols { bytes, context: ctx, behind, sparse, .. } = *symbols;
        let precision = Precision::from_param(ctx.param)?;
        let dst = need(dst, self.bound(ctx.param, bytes.len()))?;
        let long = sparse && bytes.len() > LONG_STREAM;
        let this = if long { self.with_long_segments() } else { *self };
        let tables = work.state::<State>().tables(precision, symbols)?;
        let at = behind.len().checked_sub(this.carry_len(bytes.len()));
        let carry = at.map_or(&[][..], |at| &behind[at..]);
        this.encode_with(tables, ctx.contexts, carry, bytes, dst)
    }

    fn decode(
        &self,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        work: &mut Workspace,
    ) -> Result<()> {
        let mut carry = Vec::new();
        self.decode_carrying(ctx, src, dst, &mut carry, work)?;
        if carry.is_empty() {
            return Ok(());
        }
        Err(Error::unsupported(
            "rans stream carries bytes of the next stream and cannot be decoded alone",
        ))
    }

    fn decode_carrying(
        &self,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        carry: &mut Vec<u8>,
        work: &mut Workspace,
    ) -> Result<()> {
        let precision = Precision::from_param(ctx.param)?;
        let stream = Stream::parse(precision, ctx.tables, src, dst.len())?;
        let contexts = if stream.tables.len() == 1 { &[] } else { ctx.contexts };
        check_contexts(contexts, dst.len(), stream.tables.len()).map_err(Error::corrupt)?;
        let carries = &mut work.state::<State>().carries;
        carries.clear();
        let decoding = &mut Decoding { stream: &stream, contexts, symbols: dst, carries };
        kernels::decode(precision, self.simd, decoding)?;
        carry.clear();
        if stream.carries {
            carry.extend(carries.as_flattened());
        } else if carries.iter().any(|carry| *carry != [0; CARRY_LEN]) {
            return Err(Error::corrupt("rans states do not end at 2^16"));
        }
        Ok(())
    }
}
