//! The layout of a stream: header, tables, and the places of its segments.

use s4_format::{Error, Result};

use super::table::{MAX_TABLES, Precision, Table, check_tables, parse_tables};

/// States of a segment, and therefore symbols of one step.
pub(super) const LANES: usize = 32;
/// Consecutive symbols that one lane owns in a block.
pub(super) const RUN: usize = 8;
/// Symbols of a block.
pub(super) const BLOCK: usize = LANES * RUN;
/// Symbols of a segment that encoders write by default, as a power of two.
pub(super) const SEGMENT_LOG2: u8 = 14;
/// Symbols of the longest segments, as a power of two.
pub(super) const LONG_SEGMENT_LOG2: u8 = 15;
/// Bytes that the states of a segment take.
pub(super) const STATES_LEN: usize = 4 * LANES;
/// The value that states start with in the encoder and end with in the decoder, apart from the word
/// that they carry.
pub(super) const START: u32 = 1 << 16;
/// Bytes that the states of a segment carry.
pub(super) const CARRY_LEN: usize = 2 * LANES;
/// The data that the states of a segment carry: a word for each lane.
pub(super) type Carry = [u8; CARRY_LEN];

const HEADER_LEN: usize = 8;
const LANES_LOG2: u8 = 5;
/// Segments start at multiples of this from the start of the stream.
const ALIGN: usize = 4;
/// Bytes of a segment's number of words.
pub(super) const COUNT_LEN: usize = 2;

/// The place where the tables of a stream are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TablePlace {
    /// In the stream.
    Inline,
    /// In the tensor's side data: [`crate::Context::tables`].
    Shared,
}

/// The tables that a stream is coded with, and where they are stored.
#[derive(Debug, Clone, Copy)]
pub struct Tables<'a> {
    /// 1 to [`MAX_TABLES`] tables of one precision.
    pub list: &'a [Table],
    /// The place where a decoder finds them.
    pub place: TablePlace,
}

/// The most words that one lane emits in one block: one for each renormalisation of its symbols,
/// and one for every second escape, because an escape's value takes 8 bits.
fn max_words(precision: Precision) -> usize {
    match precision {
        Precision::P8 => RUN / 2 + RUN / 2,
        Precision::P12 => RUN + RUN / 2,
    }
}

/// The most bytes that the words of a segment of `symbols` symbols take.
pub(super) fn max_words_len(precision: Precision, symbols: usize) -> usize {
    symbols.div_ceil(BLOCK) * LANES * max_words(precision) * 2
}

/// The size of the longest stream of `len` symbols, whatever its tables and contexts.
pub(super) fn bound(precision: Precision, segment_log2: u8, len: usize) -> usize {
    let segment = 1 << segment_log2;
    // Tables may hold symbols that do not occur, as tables from smoothed counts do.
    let tables = MAX_TABLES * (4 + 256 * (1 + precision.freq_len()));
    let segments = len.div_ceil(segment);
    let words =
        len / segment * max_words_len(precision, segment) + max_words_len(precision, len % segment);
    HEADER_LEN + tables + COUNT_LEN * segments + segments * (ALIGN - 1 + STATES_LEN) + words + ALIGN
}

/// Writes header, tables (unless shared) and zeros for the word counts. Returns the offsets of the
/// word counts and of the first segment. `dst` has at least [`bound`] bytes.
pub(super) fn write_head(
    symbols: u32,
    segment_log2: u8,
    tables: &[Table],
    place: TablePlace,
    carries: bool,
    dst: &mut [u8],
) -> (usize, usize) {
    dst[..4].copy_from_slice(&symbols.to_le_bytes());
    dst[4..HEADER_LEN].copy_from_slice(&[
        LANES_LOG2,
        segment_log2,
        tables.len() as u8,
        u8::from(place == TablePlace::Shared) | u8::from(carries) << 1,
    ]);
    let mut at = HEADER_LEN;
    if place == TablePlace::Inline {
        for table in tables {
            at += table.write_to(&mut dst[at..]);
        }
    }
    if symbols == 0 {
        return (at, at);
    }
    let segments = (symbols as usize).div_ceil(1 << segment_log2);
    let first = (at + COUNT_LEN * segments).next_multiple_of(ALIGN);
    dst[at..first].fill(0);
    (at, first)
}

/// Fills the gap between the end of a segment and the next one; returns where that starts.
pub(super) fn pad(at: usize, dst: &mut [u8]) -> usize {
    let next = at.next_multiple_of(ALIGN);
    dst[at..next].fill(0);
    next
}

/// The block of `all` that starts at `start`, filled up with `padding`.
pub(super) fn block_at(all: &[u8], start: usize, padding: u8) -> [u8; BLOCK] {
    let mut block = [padding; BLOCK];
    let rest = &all[start..];
    let len = rest.len().min(BLOCK);
    block[..len].copy_from_slice(&rest[..len]);
    block
}

/// Checks that there is a context below `tables` for each symbol, or none at all.
pub(super) fn check_contexts(contexts: &[u8], symbols: usize, tables: usize) -> Result<(), String> {
    if !contexts.is_empty() && contexts.len() != symbols {
        return Err(format!("{} contexts for {symbols} symbols", contexts.len()));
    }
    let largest = contexts.iter().fold(0, |a, &b| a.max(b));
    if usize::from(largest) >= tables {
        return Err(format!("context {largest} does not exist (number of tables: {tables})"));
    }
    Ok(())
}

/// A stream whose head has been read and whose segments are known to lie within it.
#[derive(Debug)]
pub(super) struct Stream<'a> {
    /// The whole stream.
    src: &'a [u8],
    /// The tables that its symbols are coded with.
    pub(super) tables: Vec<Table>,
    /// Whether its states carry bytes of the next stream.
    pub(super) carries: bool,
    /// Number of symbols.
    symbols: usize,
    /// Symbols of a segment.
    segment: usize,
    /// Number of words of each segment.
    counts: &'a [[u8; COUNT_LEN]],
    /// Offset of the first segment.
    first: usize,
}

/// One segment of a [`Stream`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment<'a> {
    /// States, lane 0 first.
    pub(super) states: &'a [u8; STATES_LEN],
    /// The stream from the segment's words on: decoders may read past the words, but not past the
    /// end of this.
    pub(super) tail: &'a [u8],
    /// Number of words.
    pub(super) words: usize,
}

impl<'a> Segment<'a> {
    /// The words.
    pub(super) fn words(&self) -> &'a [[u8; 2]] {
        self.tail[..2 * self.words].as_chunks().0
    }

    /// The states.
    ///
    /// # Errors
    /// `Corrupt` if one is below 2^16.
    pub(super) fn states(&self) -> Result<[u32; LANES]> {
        let states = std::array::from_fn(|l| {
            let at = 4 * l;
            u32::from_le_bytes(std::array::from_fn(|i| self.states[at + i]))
        });
        if states.iter().any(|&x| x < START) {
            return Err(Error::corrupt("rans state below 2^16"));
        }
        Ok(states)
    }
}

impl<'a> Stream<'a> {
    /// Reads the head of `src`, which must hold `symbols` symbols, and finds its segments.
    pub(super) fn parse(
        precision: Precision,
        shared: &[u8],
        src: &'a [u8],
        symbols: usize,
    ) -> Result<Self> {
        let cut = || Error::truncated("rans stream ends before its first segment");
        let (head, mut rest) = src.split_first_chunk::<HEADER_LEN>().ok_or_else(cut)?;
        let [n0, n1, n2, n3, lanes_log2, segment_log2, count, flags] = *head;
        let n = u32::from_le_bytes([n0, n1, n2, n3]);
        if n as usize != symbols {
            return Err(Error::corrupt(format!("rans stream has {n} symbols, expected {symbols}")));
        }
        if lanes_log2 != LANES_LOG2
            || !(12..=LONG_SEGMENT_LOG2).contains(&segment_log2)
            || flags > 3
        {
            return Err(Error::unsupported(format!(
                "rans stream with lanes_log2 {lanes_log2}, segment_log2 {segment_log2}, flags {flags}"
            )));
        }
        check_tables(count.into())?;
        let mut tables;
        if flags & 1 == 1 {
            tables = parse_tables(precision, shared)?;
            if tables.len() != usize::from(count) {
                return Err(Error::corrupt(format!(
                    "{} shared tables, expected {count}",
                    tables.len()
                )));
            }
        } else {
            tables = Vec::with_capacity(count.into());
            for _ in 0..count {
                let (table, len) = Table::parse(precision, rest)?;
                tables.push(table);
                rest = &rest[len..];
            }
        }
        let at = src.len() - rest.len();
        let segment = 1 << segment_log2;
        let carries = flags & 2 == 2;
        let mut stream = Self { src, tables, carries, symbols, segment, counts: &[], first: at };
        if symbols > 0 {
            let segments = symbols.div_ceil(segment);
            let end = at + COUNT_LEN * segments;
            stream.counts = src.get(at..end).ok_or_else(cut)?.as_chunks().0;
            stream.first = end.next_multiple_of(ALIGN);
        }
        stream.check_length()?;
        Ok(stream)
    }

    /// Checks that the segments fill the stream.
    fn check_length(&self) -> Result<()> {
        let mut end = self.first as u64;
        for count in self.counts {
            end = end.next_multiple_of(ALIGN as u64);
            end += STATES_LEN as u64 + 2 * u64::from(u16::from_le_bytes(*count));
        }
        let len = self.src.len() as u64;
        if len < end {
            return Err(Error::truncated(format!("rans stream has {len} bytes, expected {end}")));
        }
        if len > end {
            return Err(Error::corrupt(format!(
                "{} unexpected bytes after the rans stream",
                len - end
            )));
        }
        Ok(())
    }

    /// The segments, each with the range of its symbols.
    pub(super) fn segments(
        &self,
    ) -> impl Iterator<Item = (std::ops::Range<usize>, Segment<'a>)> + '_ {
        let mut at = self.first;
        self.counts.iter().enumerate().map_while(move |(i, count)| {
            let words = usize::from(u16::from_le_bytes(*count));
            let (states, tail) = self.src.get(at..)?.split_first_chunk()?;
            at = (at + STATES_LEN + 2 * words).next_multiple_of(ALIGN);
            let start = i * self.segment;
            let symbols = start..(start + self.segment).min(self.symbols);
            Some((symbols, Segment { states, tail, words }))
        })
    }
}
